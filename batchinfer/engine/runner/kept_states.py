"""Keeps the hidden states that a step's tokens were sampled from."""

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
    """The hidden states of one sequence in one step."""

    hidden: Tensor  # (n, hidden): all sampled rows of the step
    first: int  # the sequence's first row in `hidden`
    rows: int
    generated: int  # tokens of the answer before the one sampled from `first`
    step: int


@dataclass(slots=True)
class KeptStates:
    """For each request, the hidden states (before the final norm) of the latest step that sampled it."""

    steps: int | None = None  # how many of the latest steps to keep; None: all
    _of: dict[bytes, _Kept] = field(default_factory=dict)
    _step: int = 0

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Keep the hidden states of a step.

        Args:
            hidden: (n, hidden), of the sampled rows.
            plan: The step's plan, with `requests`.
            host: The step's arrays (unused here).
        """
        if not plan.sampling.chooses:
            return
        self._step += 1
        if self.steps is not None:
            first = self._step - self.steps + 1
            self._of = {key: one for key, one in self._of.items() if one.step >= first}
        assert plan.requests is not None, "PlanWants.requests must be set to keep hidden states"
        rows = np.arange(len(plan.tokens)) if plan.sampled is None else plan.sampled
        chosen = np.arange(len(rows)) if plan.sampling.chosen is None else plan.sampling.chosen
        chunks = np.searchsorted(np.cumsum(plan.chunk_lengths), rows[chosen], side="right")
        owners, firsts, counts = np.unique(chunks, return_index=True, return_counts=True)
        for chunk, first, count in zip(owners.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            key, generated = plan.requests[chunk]
            self._of[key] = _Kept(hidden, int(chosen[first]), count, generated - count + 1, self._step)

    def has(self, key: bytes, generated: int) -> bool:
        """Return True if the state is kept from which the last of a request's `generated` tokens was sampled."""
        one = self._of.get(key)
        return one is not None and 0 <= generated - 1 - one.generated < one.rows

    def of(self, asked: Sequence[tuple[bytes, int]]) -> Tensor:
        """Return the states of requests, (n, hidden).

        Args:
            asked: For each request its key and its number of generated tokens; `has` must be True for it.
        """
        steps = dict[int, Tensor]()
        begun, rows = dict[int, int](), list[int]()  # the offset of each step's states in their concatenation
        for key, generated in asked:
            one = self._of[key]
            if one.step not in steps:
                begun[one.step] = sum(map(len, steps.values()))
                steps[one.step] = one.hidden
            rows.append(begun[one.step] + one.first + generated - 1 - one.generated)
        every = torch.cat([*steps.values()]) if len(steps) > 1 else next(iter(steps.values()))
        (index,) = upload([np.array(rows, np.int64)], every.device)
        return every.index_select(0, index)

    def forget(self, key: bytes) -> None:
        """Drop the states of a request."""
        self._of.pop(key, None)
