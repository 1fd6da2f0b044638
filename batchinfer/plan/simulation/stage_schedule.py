"""When each of several stages, one behind the other, has each step: their own speeds, and how they wait for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StageWork(NamedTuple):
    """The time that a step takes one stage: seconds of its own, and of handing on to the stage behind it."""

    seconds: float
    hand_on_s: float = 0.0


class StageSchedule:
    """Steps go through all stages, in the order in which they come. A stage has one of them at a time: it keeps what it
    has made until the stage behind it is free to take it, as ranks do that send each other hidden states."""

    def __init__(self, stages: int) -> None:
        """`stages`: how many there are."""
        self._free = [0.0] * stages
        self.busy = [0.0] * stages  # seconds that each computes, and hands on

    @property
    def ended_s(self) -> float:
        """Return when the last step that has run is done."""
        return self._free[-1]

    @property
    def waited_s(self) -> float:
        """Return the seconds that a stage has waited so far, as a mean of all: for the first step, for others, and for
        the last one."""
        return self.ended_s - sum(self.busy) / len(self.busy)

    def run(self, work: Sequence[StageWork], told_s: float, launched_s: float, asked_s: float = 0.0) -> float:
        """Return when the next step is done. It may begin once stages are told of it, and no stage is done before it is
        launched; the last of several takes it once its results are asked for."""
        came, free, last = told_s, self._free, len(work) - 1
        for stage, (seconds, hand_on_s) in enumerate(work):
            done = max(max(came, free[stage]) + seconds, launched_s)
            self.busy[stage] += seconds
            if stage < last:
                taken = max(done, free[stage + 1], asked_s if stage + 1 == last else 0.0)
                done = taken + hand_on_s
                self.busy[stage] += hand_on_s
            came = free[stage] = done
        return came
