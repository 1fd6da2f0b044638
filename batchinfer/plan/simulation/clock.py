"""The time of a simulated run: that of the stages of its devices, and of the host, which launches their steps."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchinfer.core.samples import LaunchMode
from batchinfer.engine.tensors.graph_sizes import LATER_FIRST, SHORTEST, batch_sizes, context_bound
from batchinfer.plan.simulation.stages import StageSchedule, StageWork


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


@dataclass(frozen=True, slots=True)
class Captures:
    """The largest steps that are captured; nothing is where all are 0."""

    rows: int  # of a decode step
    longest: int  # tokens of a sequence in it
    tokens: int  # of a step that is captured in pieces


class Launching:
    """Says how each step of one run is launched, as `DecodeGraphs` and `PiecewiseGraphs` would do it.

    Kinds of decode steps are told apart by their number of rows, the bound of their contexts, and whether rows share
    blocks. On a GPU it also counts how long rows are split among programs, and how many groups of sharing rows there
    are, so that a few more steps are launched otherwise before each kind has its graph.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._sizes = batch_sizes(captures.rows) if captures.rows else []
        self._seen: Counter[tuple[int, int, bool]] = Counter()

    def mode(self, starts: list[int], lengths: list[int], decodes: bool, shares: bool) -> LaunchMode:
        """Return how a step of chunks that begin at `starts` is launched. `decodes`: every row runs one token and
        samples the next, and nothing is copied; `shares`: rows have blocks in common."""
        if decodes:
            rows, longest = len(starts), max(starts) + 1
            if self._is_covered(rows, longest) and self._is_replayed(rows, longest, shares):
                return "full_graph"
        return "piecewise_graph" if sum(lengths) <= self._captures.tokens else "eager"

    def _is_covered(self, rows: int, longest: int) -> bool:
        return rows <= self._captures.rows and longest <= self._captures.longest

    def _is_replayed(self, rows: int, longest: int, shares: bool) -> bool:
        """Whether it has a graph, or gets one now. The warm-up captures the shortest contexts of rows that share
        nothing."""
        bound = context_bound(longest, self._captures.longest)
        if bound <= SHORTEST and not shares:
            return True
        kind = self._sizes[bisect_left(self._sizes, rows)], bound, shares
        self._seen[kind] += 1
        return self._seen[kind] >= LATER_FIRST
