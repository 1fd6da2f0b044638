"""The clock of a simulated run: the time of pipeline stages, and of the host that launches their steps."""

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
    """A step that the simulated host has launched. Times are seconds since the start of the run.

    Attributes:
        work: The seconds that each pipeline stage needs for the step.
        submitted_s: When the host submits the step to the first stage.
        launched_s: When the host has launched all layers.
        after: The previous step of the same engine, whose tokens the first stage needs. None if there is none, or if
            this step is done.
        done_s: When the step is done. None until the host waits for this or a later step.
    """

    work: Sequence[StageWork]
    submitted_s: float
    launched_s: float
    after: TimedLaunch | None = None
    done_s: float | None = None

    @property
    def may_begin_s(self) -> float:
        """Return when the first pipeline stage can start this step, in seconds since the start of the run.

        It starts after the host has submitted it, and after the step `after` is done.
        """
        return max(self.submitted_s, (self.after and self.after.done_s) or 0.0)


@dataclass(slots=True)
class Clock:
    """The simulated time of a run, in seconds.

    Attributes:
        host: Current time of the process that schedules and launches steps.
        stages: When each pipeline stage is free.
        asks_last: Whether the last of several pipeline stages runs in the scheduling process, as on a CPU. It then runs
            only while this process waits for results.
        most_taken: Peak bytes of the KV cache so far.
    """

    host: float = 0.0
    stages: StageSchedule = field(default_factory=lambda: StageSchedule(1))
    asks_last: bool = False
    most_taken: int = 0
    _begun: deque[TimedLaunch] = field(default_factory=deque)

    def launch(
        self, host_s: float, launch_s: float, work: Sequence[StageWork], after: TimedLaunch | None = None
    ) -> TimedLaunch:
        """Add a step to the clock. The host's time advances by the time to prepare and launch it.

        Devices start to compute while later layers are launched.

        Args:
            host_s: Seconds to prepare the step.
            launch_s: Seconds to launch its layers.
            work: The seconds that each pipeline stage needs for the step.
            after: The step whose tokens this step needs, or None.

        Returns:
            The launched step, for `wait`.
        """
        self.host += host_s
        step = TimedLaunch(work, self.host, self.host + launch_s, after)
        self.host += launch_s
        self._begun.append(step)
        return step

    def wait(self, step: TimedLaunch) -> None:
        """Advance the host's time until a step is done. Steps finish in the order of their launches."""
        asked = self.host if self.asks_last else 0.0
        while step.done_s is None:
            first = self._begun.popleft()
            first.done_s = self.stages.run(first.work, first.may_begin_s, first.launched_s, asked)
            first.after = None
        self.host = max(self.host, step.done_s)


@dataclass(frozen=True, slots=True)
class Captures:
    """The limits of the steps that an engine captures as CUDA graphs. If all are 0, it captures none.

    Attributes:
        rows: Maximum number of rows of a decode step that is captured as one graph.
        longest: Maximum number of tokens of a sequence in such a decode step.
        tokens: Maximum number of tokens of a step that is captured piecewise: one graph for each part between two
            layers' attention.
    """

    rows: int
    longest: int
    tokens: int


class LaunchPredictor:
    """Predicts how an engine launches each step: as one CUDA graph, piecewise, or eagerly.

    Piecewise means one CUDA graph for each part between two layers' attention. Decode steps with long contexts or
    shared blocks run as one graph only after several steps of the same kind: with about the same number of rows, the
    same bound on the context, and blocks shared or not.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._sizes = batch_sizes(captures.rows) if captures.rows else []
        self._seen: Counter[tuple[int, int, bool]] = Counter()

    def mode(self, starts: list[int], lengths: list[int], decodes: bool, shares: bool) -> LaunchMode:
        """Return how the engine launches a step: "full_graph", "piecewise_graph" or "eager".

        Args:
            starts: Position in its sequence of the first token of each chunk.
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
        bound = context_bound(longest, self._captures.longest)
        if bound <= MIN_CONTEXT_BOUND and not shares:
            return True
        # A real engine distinguishes more kinds, so it captures a few steps later
        kind = self._sizes[bisect_left(self._sizes, rows)], bound, shares
        self._seen[kind] += 1
        return self._seen[kind] >= CAPTURE_AT_USE
