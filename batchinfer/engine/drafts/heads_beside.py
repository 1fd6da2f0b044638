"""Heads that were trained for the job's model propose what follows rows, from its hidden states."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from batchinfer.core.samples import DraftName
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.runner.sampler import LogitsHead
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.models.heads.medusa import MedusaHeads
from batchinfer_kernels.cost import Cost, Peaks

MOST_ROWS = 256  # that they are asked about at a time
_NEWEST = 0.2  # the weight of what the newest proposals took


@dataclass(frozen=True, slots=True, eq=False)
class HeadsRunner:
    """Heads that are ready to run, and where they find the hidden states of their model."""

    heads: MedusaHeads
    model: LogitsHead
    states: KeptStates
    head_values: int  # of one of them
    itemsize: int

    def cost(self, rows: int, count: int) -> Cost:
        """Return what the first `count` heads cost for so many rows."""
        values = count * self.head_values
        return Cost(2 * rows * values, values * self.itemsize)


class HeadsBeside:
    """Proposes one token of each head: those behind the last token that a row got, by the state from which that one was
    sampled. So nothing is run for a row but the heads themselves; penalties, biases and draws are not looked at."""

    name: DraftName = "heads"
    most_rows = MOST_ROWS

    def __init__(
        self, runner: HeadsRunner, peaks: Peaks, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._runner, self._peaks, self._clock = runner, peaks, clock
        self._ratio: float | None = None  # how much longer than its bound the newest proposals took

    @property
    def most_proposed(self) -> int:
        """The most tokens that it proposes of a row: one of each head."""
        return len(self._runner.heads.heads)

    def takes(self, row: Sequence) -> bool:
        """Whether its last token was sampled from a state that is known: it is not where it had to come."""
        return self._runner.states.has(row.request.key, row.output_length)

    def seconds(self, rows: Seq[Sequence], count: int) -> float:
        """Return about how long it takes to propose `count` tokens of each of these rows."""
        return self._least_s(len(rows), count) * (self._ratio or 1.0)

    def propose(self, rows: Seq[Sequence], count: int) -> list[list[int]]:
        """Return up to `count` tokens that may follow each of these rows, which `takes`."""
        began, states = self._clock(), self._runner.states
        hidden = states.of([(row.request.key, row.output_length) for row in rows])
        tokens: list[list[int]] = self._runner.heads.tokens(self._runner.model.states(hidden), count).tolist()
        self.measured(len(rows), count, self._clock() - began)
        return tokens

    def measured(self, rows: int, count: int, took_s: float) -> None:
        """Take the time in which so many tokens of each row were proposed."""
        found = took_s / self._least_s(rows, count)
        before = self._ratio or found
        self._ratio = before + _NEWEST * (min(found, 2 * before) - before)

    def ended(self, row: Sequence) -> None:
        """Forget a row."""
        self._runner.states.forget(row.request.key)

    def _least_s(self, rows: int, count: int) -> float:
        return self._runner.cost(rows, count).seconds(self._peaks)
