"""Tokens that were sampled on the device and are not known on the host yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.sequence import Sequence
from batchinfer.engine.staging import upload


@dataclass(slots=True)
class Pending:
    """The tokens of the step before, by sequence."""

    tokens: Tensor | None = None  # (n,) int64
    rows: Mapping[Sequence, int] = field(default_factory=dict)  # sequence → its place among them

    def of(self, places: list[int], device: torch.device) -> Tensor:
        """The tokens at these places. Token 0 stands for none, where a row's logits were not finite: the sequence has
        ended, and what it runs on with is dropped."""
        assert self.tokens is not None, "a token is awaited of a step that sampled none"
        (index,) = upload([np.array(places, np.int64)], device)
        return self.tokens.index_select(0, index).clamp_min_(0)
