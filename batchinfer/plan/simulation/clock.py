"""The clock of a simulated run: the time of its stages, and of the host that launches their steps."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchinfer.core.samples import LaunchMode
from batchinfer.engine.tensors.graph_sizes import (
    CAPTURE_AT_USE,
    MIN_CONTEXT_BOUND,
    batch_sizes,
    context_bound,
)
from batchinfer.plan.simulation.stages import StageSchedule, StageWork


@dataclass(slots=True, eq=False)
class TimedLaunch:
    """A launched step.

    Attributes:
        work: The work of each stage.
        submitted_s: When the host submits the step to the stages.
        launched_s: When all layers are launched.
        after: The previous step of the same engine, whose tokens the first stage needs. None if there is none, or
            if this step is done.
        done_s: When the step is done. None until the host waits for this or a later step.
    """

    work: Sequence[StageWork]
    submitted_s: float
    launched_s: float
    after: TimedLaunch | None = None
    done_s: float | None = None

    @property
    def may_begin_s(self) -> float:
        """Return when the first stage can start. Earlier steps must be done."""
        return max(self.submitted_s, (self.after and self.after.done_s) or 0.0)


@dataclass(slots=True)
class Clock:
    """The time of a simulated run, in seconds.

    If `asks_last` is True, the scheduling process itself runs the last of several stages when it waits for results,
    as on a CPU.
    """

    host: float = 0.0
    stages: StageSchedule = field(default_factory=lambda: StageSchedule(1))
    asks_last: bool = False
    most_taken: int = 0  # peak bytes of the KV cache
    _begun: deque[TimedLaunch] = field(default_factory=deque)

    def launch(
        self, host_s: float, launch_s: float, work: Sequence[StageWork], after: TimedLaunch | None = None
    ) -> TimedLaunch:
        """Prepare a step and launch its layers. Devices start while later layers are launched.

        The step continues with the tokens of the step `after`.
        """
        self.host += host_s
        step = TimedLaunch(work, self.host, self.host + launch_s, after)
        self.host += launch_s
        self._begun.append(step)
        return step

    def wait(self, step: TimedLaunch) -> None:
        """Wait until a step is done. Steps finish in launch order."""
        asked = self.host if self.asks_last else 0.0
        while step.done_s is None:
            first = self._begun.popleft()
            first.done_s = self.stages.run(first.work, first.may_begin_s, first.launched_s, asked)
            first.after = None
        self.host = max(self.host, step.done_s)


@dataclass(frozen=True, slots=True)
class Captures:
    """The largest steps that are captured as CUDA graphs. All zero: no captures."""

    rows: int  # rows of a decode step
    longest: int  # tokens of a sequence in a decode step
    tokens: int  # tokens of a step that is captured piecewise


class Launching:
    """Predicts how each step is launched, like `DecodeGraphs` and `PiecewiseGraphs`.

    Decode graphs are distinguished by their rows, context bound and block sharing. A real GPU has more kinds, by
    the split of rows and the number of sharing groups, so a few more steps run there before each kind has its
    graph.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._sizes = batch_sizes(captures.rows) if captures.rows else []
        self._seen: Counter[tuple[int, int, bool]] = Counter()

    def mode(self, starts: list[int], lengths: list[int], decodes: bool, shares: bool) -> LaunchMode:
        """Return how a step is launched.

        Args:
            starts: Start position of each chunk.
            lengths: Tokens of each chunk.
            decodes: Whether every row decodes one token and no block is copied.
            shares: Whether rows share blocks.
        """
        if decodes:
            rows, longest = len(starts), max(starts) + 1
            if self._is_covered(rows, longest) and self._is_replayed(rows, longest, shares):
                return "full_graph"
        return "piecewise_graph" if sum(lengths) <= self._captures.tokens else "eager"

    def _is_covered(self, rows: int, longest: int) -> bool:
        return rows <= self._captures.rows and longest <= self._captures.longest

    def _is_replayed(self, rows: int, longest: int, shares: bool) -> bool:
        """Return True if the step has a graph or captures one now.

        The warm-up captures the shortest contexts without sharing.
        """
        bound = context_bound(longest, self._captures.longest)
        if bound <= MIN_CONTEXT_BOUND and not shares:
            return True
        kind = self._sizes[bisect_left(self._sizes, rows)], bound, shares
        self._seen[kind] += 1
        return self._seen[kind] >= CAPTURE_AT_USE
