"""A step, as the leading rank sends it to the others. No torch."""

from __future__ import annotations

from typing import NamedTuple

from batchinfer.engine.schedule.step_plan import StepPlan


class RankStep(NamedTuple):
    """A step of one of the engines that take turns on the ranks."""

    turn: int
    plan: StepPlan
