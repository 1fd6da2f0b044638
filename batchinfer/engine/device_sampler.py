"""From logits to token ids without leaving the device: what the host knows goes there in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.sequence import Sequence
from batchinfer.engine.staging import upload
from batchinfer.ops.interface import Ops
from batchinfer_kernels.penalties import Penalties
from batchinfer_kernels.sample import RowSampling


@dataclass(slots=True)
class Pending:
    """Tokens that were sampled and are not known on the host."""

    tokens: Tensor | None = None  # (n,) int64: of the step before
    rows: Mapping[Sequence, int] = field(default_factory=dict)  # sequence → its place among them

    def of(self, places: list[int], device: torch.device) -> Tensor:
        """The tokens at these places. Where there is none because a row's logits were no numbers, token 0: what the row
        runs on with is dropped."""
        assert self.tokens is not None, "a token is awaited of a step that sampled none"
        (index,) = upload([np.array(places, np.int64)], device)
        return self.tokens.index_select(0, index).clamp_min_(0)


@dataclass(frozen=True, slots=True)
class DeviceSampler:
    """The steps and their order are the Sampler's; see there."""

    ops: Ops
    eos_token_ids: frozenset[int]

    def sample(self, logits: Tensor, sequences: list[Sequence], pending: Pending) -> Tensor:
        """The next token of each row, (n,) int64. logits: (n, vocab) float32, which are changed."""
        shaped = [i for i, s in enumerate(sequences) if s.request.params.penalised or _bans(s)]
        if shaped:
            self.ops.penalise(logits, self._penalties(shaped, sequences, pending, logits.device))
        return self.ops.sample(logits, _row_sampling(sequences, logits.device))

    def _penalties(
        self, rows: list[int], sequences: list[Sequence], pending: Pending, device: torch.device
    ) -> Penalties:
        chosen = [sequences[i] for i in rows]
        params = [s.request.params for s in chosen]
        held = [np.frombuffer(s.tokens, np.int32) if s.request.params.penalised else _NONE for s in chosen]
        lengths = np.array([len(ids) for ids in held], np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        prompts = np.minimum([s.prompt_length for s in chosen], lengths).astype(np.int32)
        floats = [
            np.array([getattr(p, name) for p in params], np.float32)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        ]
        indices, tokens = np.array(rows, np.int32), np.concatenate([*held, _NONE])
        parts: list[NDArray[Any]] = [indices, tokens, starts, prompts, lengths, *floats, self._banned(chosen)]
        penalties = Penalties(*upload(parts, device))
        self._fill_in(penalties, chosen, (starts + lengths - 1).tolist(), pending)
        return penalties

    def _fill_in(
        self, penalties: Penalties, sequences: list[Sequence], last: list[int], pending: Pending
    ) -> None:
        """The last token of a row may be known on the device alone."""
        waiting = [
            (place, pending.rows[s])
            for place, s in zip(last, sequences, strict=True)
            if s.pending and s.request.params.penalised
        ]
        if waiting:
            places, sources = (list(part) for part in zip(*waiting, strict=True))
            device = penalties.tokens.device
            (index,) = upload([np.array(places, np.int64)], device)
            penalties.tokens.index_copy_(0, index, pending.of(sources, device).to(torch.int32))

    def _banned(self, sequences: list[Sequence]) -> NDArray[np.int32]:
        """(n, most) int32, padded with -1: what may not end a row yet."""
        banned = [self._bans_of(s) for s in sequences]
        table = np.full((len(banned), max(map(len, banned))), -1, np.int32)
        for row, ids in enumerate(banned):
            table[row, : len(ids)] = ids
        return table

    def _bans_of(self, sequence: Sequence) -> list[int]:
        if not _bans(sequence):
            return []
        params = sequence.request.params
        return sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids))


_NONE = np.empty(0, np.int32)


def _bans(sequence: Sequence) -> bool:
    return sequence.output_length < sequence.request.params.min_tokens


def _row_sampling(sequences: list[Sequence], device: torch.device) -> RowSampling:
    params = [s.request.params for s in sequences]
    keys = np.frombuffer(b"".join(s.request.key[:16] for s in sequences), "<i4").reshape(-1, 4)
    positions = np.array([s.output_length for s in sequences], np.int32)
    parts: list[NDArray[Any]] = [
        np.array([p.temperature for p in params], np.float32),
        np.array([max(p.top_k, 0) for p in params], np.int32),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        keys.astype(np.int32),
        positions,
    ]
    return RowSampling(*upload(parts, device))
