"""Keeps the hidden states from which the tokens of a step were sampled."""

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
    """The hidden states of one sequence in one step.

    Attributes:
        hidden: The hidden states of all sampled rows of the step, [n, hidden].
        first: The index of the sequence's first row in `hidden`.
        rows: The number of the sequence's rows in `hidden`.
        generated: The number of tokens that the answer had before the step.
        step: The number of the step.
    """

    hidden: Tensor
    first: int
    rows: int
    generated: int
    step: int


@dataclass(slots=True)
class KeptStates:
    """Stores the hidden states, before the final norm, from which the newest tokens of each request were sampled.

    Draft heads read them.

    Attributes:
        steps: The number of newest steps whose hidden states are stored. None: the newest hidden states of each
            request are stored, however old they are.
    """

    steps: int | None = None
    _of: dict[bytes, _Kept] = field(default_factory=dict)
    _step: int = 0

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Store the hidden states of a step.

        Args:
            hidden: [n, hidden], the hidden states of the tokens of the step from which tokens are sampled.
            plan: The step's plan, which must contain the request of each chunk.
            host: Ignored.
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
        """Return True if the hidden state from which a request's last token was sampled is stored.

        Args:
            key: The work key of the request.
            generated: The number of tokens that the request has generated.
        """
        one = self._of.get(key)
        return one is not None and 0 <= generated - 1 - one.generated < one.rows

    def of(self, asked: Sequence[tuple[bytes, int]]) -> Tensor:
        """Return the hidden states from which the last tokens of n requests were sampled, [n, hidden].

        Args:
            asked: (work key, number of generated tokens) of each request. `has` must be True for each.
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
        """Delete the hidden states of the request with this work key."""
        self._of.pop(key, None)
