"""The results of sampling a step: tokens, which the next step may need on the device, log-probabilities and masks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.staging import upload
from batchinfer.engine.tensors.table_rows import places_of


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobs:
    """Log-probabilities of the next tokens of those sequences that ask for them, one row each."""

    sequences: list[Sequence]
    chosen: Tensor  # (n,) float32
    top: Tensor  # (n, the most that any of them asks for) float32
    top_ids: Tensor  # of the same shape, int64

    @property
    def tensors(self) -> list[Tensor]:
        return [self.chosen, self.top, self.top_ids]


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Rows whose tokens were masked, and whether that kept each from its most likely token."""

    sequences: list[Sequence]
    barred: Tensor  # (n,) bool

    def note(self, barred: NDArray[Any]) -> None:
        """Remember on the sequences what `barred` says on the host."""
        for sequence, one in zip(self.sequences, barred.tolist(), strict=True):
            masking = sequence.masking
            masking.followed, masking.ever_steered = not one, masking.ever_steered or one


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The results of sampling, on the device where the logits were."""

    tokens: Tensor  # (rows,) int64; NO_TOKEN where a row's logits are not finite
    logprobs: RowLogprobs | None = None  # None: no row asks
    masked: Masked | None = None  # None: no row is


def by_sequence(
    sequences: Seq[Sequence], chosen: NDArray[Any], top: NDArray[Any], top_ids: NDArray[Any]
) -> dict[Sequence, TokenLogprobs]:
    """Give each sequence the log-probabilities of its one token, with as many of the likeliest ones as it asks for. The
    arrays hold what the tensors of `RowLogprobs` do."""
    ids = top_ids.astype(np.int32)
    found: dict[Sequence, TokenLogprobs] = {}
    for row, sequence in enumerate(sequences):
        one, most = slice(row, row + 1), sequence.request.params.logprobs
        found[sequence] = TokenLogprobs(chosen[one], top[one, :most], ids[one, :most])
    return found


@dataclass(slots=True)
class DeviceTokens:
    """The tokens of the step before, by sequence, which the host may not know yet."""

    tokens: Tensor | None = None  # (n,) int64
    sequences: list[Sequence] = field(default_factory=list)  # (n,): whose they are

    def keep(self, tokens: Tensor, sequences: list[Sequence]) -> None:
        """Take over the tokens that a step has sampled."""
        self.tokens, self.sequences = tokens, sequences

    def of(self, sequences: list[Sequence], device: torch.device) -> Tensor:
        """The tokens of these sequences. Token 0 stands for none, where a row's logits were not finite: the sequence
        has ended, and what it runs on with is dropped."""
        assert self.tokens is not None, "a token is awaited of a step that sampled none"
        if sequences == self.sequences:  # nearly always
            return self.tokens.clamp_min(0)
        places = places_of(sequences, self.sequences)
        assert -1 not in places, "a token is awaited of a step that did not run the sequence"
        (index,) = upload([np.array(places, np.int64)], device)
        return self.tokens.index_select(0, index).clamp_min_(0)
