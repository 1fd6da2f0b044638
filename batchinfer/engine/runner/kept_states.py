"""Keeps the hidden states behind which a step's tokens were sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from batchinfer.engine.schedule.step_plan import StepPlan


class _Kept(NamedTuple):
    """The hidden states of a sequence in a step: (rows, hidden) from a row on."""

    hidden: Tensor
    first: int
    rows: int
    said: int  # tokens of its answer before the first of them


@dataclass(slots=True)
class KeptStates:
    """The hidden states, before the final norm, of the rows of the newest step that sampled a request."""

    _of: dict[bytes, _Kept] = field(default_factory=dict)

    def take(self, hidden: Tensor, plan: StepPlan) -> None:
        """Keep what a step gave: hidden (n, hidden) of the rows that its plan names; the plan names requests, too."""
        if not plan.sampling.chooses:
            return
        assert plan.requests is not None, "a runner that keeps states wants to know whose they are"
        rows = np.arange(len(plan.tokens)) if plan.sampled is None else plan.sampled
        chosen = np.arange(len(rows)) if plan.sampling.chosen is None else plan.sampling.chosen
        chunks = np.searchsorted(np.cumsum(plan.chunk_lengths), rows[chosen], side="right")
        owners, firsts, counts = np.unique(chunks, return_index=True, return_counts=True)
        for chunk, first, count in zip(owners.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            key, said = plan.requests[chunk]
            self._of[key] = _Kept(hidden, int(chosen[first]), count, said - count + 1)

    def has(self, key: bytes, said: int) -> bool:
        """Whether the state is there behind which the last of the `said` tokens of a request's answer was sampled."""
        one = self._of.get(key)
        return one is not None and 0 <= said - 1 - one.said < one.rows

    def of(self, key: bytes, said: int) -> Tensor:
        """Return that state, (hidden,)."""
        one = self._of[key]
        return one.hidden[one.first + said - 1 - one.said]

    def forget(self, key: bytes) -> None:
        """Forget a request."""
        self._of.pop(key, None)
