"""Tokens that were sampled on the device and are not known on the host yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.places import places_of
from batchinfer.engine.tensors.staging import upload


@dataclass(slots=True)
class DeviceTokens:
    """The tokens of the step before, by sequence."""

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
