"""Keeps the hidden states behind which a step's tokens were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.staging import upload


class _Kept(NamedTuple):
    """The hidden states of a sequence in a step: (rows, hidden) from a row on."""

    hidden: Tensor
    first: int
    rows: int
    said: int  # tokens of its answer before the first of them
    step: int


@dataclass(slots=True)
class KeptStates:
    """The hidden states, before the final norm, of the rows of the newest step that sampled a request.

    `steps`: of how many steps they are kept; None: of all. Where steps are launched before the tokens of the one before
    are known, a row whose tokens have just arrived was sampled in the last step but one.
    """

    steps: int | None = None
    _of: dict[bytes, _Kept] = field(default_factory=dict)
    _step: int = 0

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Keep what a step gave: hidden (n, hidden) of the rows that its plan names; the plan names requests, too."""
        if not plan.sampling.chooses:
            return
        self._step += 1
        if self.steps is not None:
            first = self._step - self.steps + 1
            self._of = {key: one for key, one in self._of.items() if one.step >= first}
        assert plan.requests is not None, "a runner that keeps states wants to know whose they are"
        rows = np.arange(len(plan.tokens)) if plan.sampled is None else plan.sampled
        chosen = np.arange(len(rows)) if plan.sampling.chosen is None else plan.sampling.chosen
        chunks = np.searchsorted(np.cumsum(plan.chunk_lengths), rows[chosen], side="right")
        owners, firsts, counts = np.unique(chunks, return_index=True, return_counts=True)
        for chunk, first, count in zip(owners.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            key, said = plan.requests[chunk]
            self._of[key] = _Kept(hidden, int(chosen[first]), count, said - count + 1, self._step)

    def has(self, key: bytes, said: int) -> bool:
        """Whether the state is there behind which the last of the `said` tokens of a request's answer was sampled."""
        one = self._of.get(key)
        return one is not None and 0 <= said - 1 - one.said < one.rows

    def of(self, asked: Sequence[tuple[bytes, int]]) -> Tensor:
        """Return the states of requests, each as it is named for `has`: (n, hidden)."""
        steps = dict[int, Tensor]()
        begun, rows = dict[int, int](), list[int]()  # where the states of each step begin behind one another
        for key, said in asked:
            one = self._of[key]
            if one.step not in steps:
                begun[one.step] = sum(map(len, steps.values()))
                steps[one.step] = one.hidden
            rows.append(begun[one.step] + one.first + said - 1 - one.said)
        every = torch.cat([*steps.values()]) if len(steps) > 1 else next(iter(steps.values()))
        (index,) = upload([np.array(rows, np.int64)], every.device)
        return every.index_select(0, index)

    def forget(self, key: bytes) -> None:
        """Forget a request."""
        self._of.pop(key, None)
