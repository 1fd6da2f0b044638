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
    """The token ids of a sample prompt, and possibly of its answer.

    Args:
        ids: (tokens,), the token ids.
        counted: (tokens,), True for tokens whose layer inputs calibration uses. The prefix that the row shares with the
            previous row is False, so each shared prefix counts once.
        scored: (tokens,), True for positions at which the loss compares predictions: the last of the prompt and all
            of the answer.
    """

    ids: NDArray[np.int32]
    counted: NDArray[np.bool_]
    scored: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The sample rows of a calibration, sorted by token ids, so rows with long common prefixes are adjacent."""

    rows: tuple[SampledRow, ...]

    @classmethod
    def of(cls, rows: Iterable[tuple[NDArray[np.int32], int]]) -> SampleRows:
        """Sort the rows, and mark the tokens that count and the positions of the loss. Empty rows are skipped.

        Args:
            rows: Pairs of token ids (tokens,) of a prompt with its answer, and number of tokens of the prompt.
        """
        ordered = sorted(((ids, prompt) for ids, prompt in rows if len(ids)), key=lambda row: row[0].tolist())
        found, before = [], np.empty(0, np.int32)
        for ids, prompt in ordered:
            positions = np.arange(len(ids))
            found.append(SampledRow(ids, positions >= _common_prefix(before, ids), positions >= prompt - 1))
            before = ids
        return cls(tuple(found))

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all rows, shared prefixes included."""
        return sum(len(row.ids) for row in self.rows)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest row; 0 without rows."""
        return max((len(row.ids) for row in self.rows), default=0)

    def steps(self, device: torch.device) -> Iterator[SampledStep]:
        """Yield the rows in batches of up to STEP_TOKENS tokens, on a device. A longer row is a batch of its own."""
        first, tokens = 0, 0
        for at, row in enumerate(self.rows):
            if tokens and tokens + len(row.ids) > STEP_TOKENS:
                yield SampledStep(self.rows[first:at], device)
                first, tokens = at, 0
            tokens += len(row.ids)
        if tokens:
            yield SampledStep(self.rows[first:], device)


def _common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


class SampledStep:
    """A batch of sample rows that one forward pass computes completely, and its inputs of attention."""

    def __init__(self, rows: Sequence[SampledRow], device: torch.device) -> None:
        """Concatenate the tokens of the rows on a device, and assign blocks of a temporary KV cache to the rows."""
        lengths = [len(row.ids) for row in rows]
        self.ids = torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int64)).to(device)
        self.counted = torch.from_numpy(np.concatenate([row.counted for row in rows])).to(device)
        self.scored = torch.from_numpy(np.concatenate([row.scored for row in rows])).to(device)
        blocks = [-(-length // BLOCK) for length in lengths]
        self.blocks, self.longest = sum(blocks), max(lengths)
        firsts = np.cumsum([0, *blocks[:-1]])
        tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        for table, first, count in zip(tables, firsts.tolist(), blocks, strict=True):
            table[:count] = torch.arange(first, first + count)
        places = [torch.arange(length) for length in lengths]
        slots = [place + first * BLOCK for place, first in zip(places, firsts.tolist(), strict=True)]
        positions, written = torch.cat(places).to(device), torch.cat(slots).to(device)
        self.inputs = AttentionInputs(positions, written, tables.to(device), lengths, lengths)


class LayerRun:
    """Runs one layer at a time over all steps of a sample, with a KV cache for that layer only."""

    def __init__(self, ops: Ops, spec: ModelSpec, dtype: torch.dtype, steps: Sequence[SampledStep]) -> None:
        self._ops, self._dtype, self.steps = ops, dtype, steps
        windows = frozenset(spec.windows)
        self._plans = [ops.plan_attention(step.inputs, BLOCK, windows) for step in steps]
        self._blocks = max(step.blocks for step in steps)

    def __call__(self, spec: LayerSpec, layer: DecoderLayer, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Run a layer over all steps, and return the hidden states after it, (tokens, hidden) per step.

        Args:
            spec: The spec of the layer.
            layer: The layer.
            hidden: The hidden states before the layer, (tokens, hidden) per step. They are not changed.
        """
        return list(self._run(spec, layer, hidden))

    def _run(self, spec: LayerSpec, layer: DecoderLayer, hidden: Sequence[Tensor]) -> Iterator[Tensor]:
        cache = None
        if spec.cache is not None:
            device = self.steps[0].ids.device
            cache = self._ops.allocate_cache(spec.cache, self._blocks, BLOCK, self._dtype, device)
        for step, plan, before in zip(self.steps, self._plans, hidden, strict=True):
            x, residual = layer(before.clone(), None, step.inputs, cache, plan)
            yield x if residual is None else x + residual
