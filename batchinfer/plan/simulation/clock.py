"""The time of a simulated run: that of the host, and of the stages of its devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchinfer.plan.simulation.stage_schedule import StageSchedule, StageWork


@dataclass(slots=True, eq=False)
class TimedLaunch:
    """A step that was launched. `after`: the step before of the same engine, whose tokens the first stage needs; None:
    there is none, or this one is done. `done_s` is None until somebody waits for it, or for a later one."""

    work: Sequence[StageWork]
    told_s: float
    launched_s: float
    after: TimedLaunch | None = None
    done_s: float | None = None

    @property
    def may_begin_s(self) -> float:
        """Return when the first stage has what it needs. Earlier steps are done."""
        return max(self.told_s, (self.after and self.after.done_s) or 0.0)


@dataclass(slots=True)
class Clock:
    """The time of a simulated run, in seconds. `asks_last`: the process that schedules runs the last of several stages
    itself, when it asks for a step's results, as on a CPU."""

    host: float = 0.0
    stages: StageSchedule = field(default_factory=lambda: StageSchedule(1))
    asks_last: bool = False
    most_taken: int = 0  # bytes of the KV cache that were ever taken
    _begun: deque[TimedLaunch] = field(default_factory=deque)

    def launch(
        self, host_s: float, launch_s: float, work: Sequence[StageWork], after: TimedLaunch | None = None
    ) -> TimedLaunch:
        """The host makes a step ready and launches its layers, while devices are at the first ones. `after`: the step
        whose tokens it runs on with."""
        self.host += host_s
        step = TimedLaunch(work, self.host, self.host + launch_s, after)
        self.host += launch_s
        self._begun.append(step)
        return step

    def wait(self, step: TimedLaunch) -> None:
        """The host waits until a step is done. Steps are done in the order in which they were launched."""
        asked = self.host if self.asks_last else 0.0
        while step.done_s is None:
            first = self._begun.popleft()
            first.done_s = self.stages.run(first.work, first.may_begin_s, first.launched_s, asked)
            first.after = None
        self.host = max(self.host, step.done_s)
