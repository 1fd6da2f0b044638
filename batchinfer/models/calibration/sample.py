"""The rows of a calibration, in steps, over which one layer at a time is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.models.calibration.work import STEP_TOKENS
from batchinfer.models.ops.attention import AttentionInputs
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import DecoderLayer
from batchinfer.models.spec.spec import LayerSpec, ModelSpec

BLOCK = 16  # tokens per block of the temporary KV cache


@dataclass(frozen=True, slots=True, eq=False)
class SampledRow:
    """A sequence of token ids: a prompt, and possibly its answer.

    Args:
        ids: (tokens,).
        counted: (tokens,), True for tokens that count. A prefix that sequences share counts once.
        scored: (tokens,), True for positions at which the next token is predicted for the loss.
    """

    ids: NDArray[np.int32]
    counted: NDArray[np.bool_]
    scored: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Rows in sorted order, which makes rows with long common prefixes adjacent."""

    rows: tuple[SampledRow, ...]

    @classmethod
    def of(cls, rows: Iterable[tuple[NDArray[np.int32], int]]) -> SampleRows:
        """Return the rows of sequences, each given with the number of tokens of its prompt."""
        ordered = sorted(((ids, prompt) for ids, prompt in rows if len(ids)), key=lambda row: row[0].tolist())
        found, before = [], np.empty(0, np.int32)
        for ids, prompt in ordered:
            positions = np.arange(len(ids))
            found.append(SampledRow(ids, positions >= _common_prefix(before, ids), positions >= prompt - 1))
            before = ids
        return cls(tuple(found))

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return sum(len(row.ids) for row in self.rows)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence."""
        return max((len(row.ids) for row in self.rows), default=0)

    def steps(self, device: torch.device) -> Iterator[SampledStep]:
        """Yield steps of whole sequences, on a device."""
        first, tokens = 0, 0
        for at, row in enumerate(self.rows):
            if tokens and tokens + len(row.ids) > STEP_TOKENS:
                yield SampledStep(self.rows[first:at], device)
                first, tokens = at, 0
            tokens += len(row.ids)
        if tokens:
            yield SampledStep(self.rows[first:], device)


def _common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


class SampledStep:
    """A batch of sequences, each computed from its first token on."""

    def __init__(self, rows: Sequence[SampledRow], device: torch.device) -> None:
        lengths = [len(row.ids) for row in rows]
        self.ids = torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int64)).to(device)
        self.counted = torch.from_numpy(np.concatenate([row.counted for row in rows])).to(device)
        self.scored = torch.from_numpy(np.concatenate([row.scored for row in rows])).to(device)
        blocks = [-(-length // BLOCK) for length in lengths]
        self.blocks = sum(blocks)
        firsts = np.cumsum([0, *blocks[:-1]])
        tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        for table, first, count in zip(tables, firsts.tolist(), blocks, strict=True):
            table[:count] = torch.arange(first, first + count)
        places = [torch.arange(length) for length in lengths]
        slots = [place + first * BLOCK for place, first in zip(places, firsts.tolist(), strict=True)]
        positions, written = torch.cat(places).to(device), torch.cat(slots).to(device)
        self.inputs = AttentionInputs(positions, written, tables.to(device), lengths, lengths)


class LayerRun:
    """Runs one layer at a time over all steps, with a KV cache for that layer only."""

    def __init__(self, ops: Ops, spec: ModelSpec, dtype: torch.dtype, steps: Sequence[SampledStep]) -> None:
        self._ops, self._dtype, self.steps = ops, dtype, steps
        windows = frozenset(spec.windows)
        self._plans = [ops.plan_attention(step.inputs, BLOCK, windows) for step in steps]
        self._blocks = max(step.blocks for step in steps)

    def __call__(self, spec: LayerSpec, layer: DecoderLayer, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Return the hidden states after a layer, (T, hidden) per step; the inputs `hidden` are not changed."""
        return list(self._run(spec, layer, hidden))

    def _run(self, spec: LayerSpec, layer: DecoderLayer, hidden: Sequence[Tensor]) -> Iterator[Tensor]:
        cache = None
        if spec.cache is not None:
            device = self.steps[0].ids.device
            cache = self._ops.allocate_cache(spec.cache, self._blocks, BLOCK, self._dtype, device)
        for step, plan, before in zip(self.steps, self._plans, hidden, strict=True):
            x, residual = layer(before.clone(), None, step.inputs, cache, plan)
            yield x if residual is None else x + residual
