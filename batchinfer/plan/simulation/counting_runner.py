"""A runner that computes nothing: it gives each answer its forecast length, and advances a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.runner.runner import StepLaunch
from batchinfer.engine.schedule.step_plan import COUNTS, Ints, PlanWants, StepPlan, TokenScores
from batchinfer.engine.schedule.step_shape import decode_shape, step_shape
from batchinfer.plan.simulation.clock import Clock, LaunchPredictor, TimedLaunch
from batchinfer.plan.simulation.stages import SimulatedStage, StageWork
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, StepShape

END, WORD = 0, 1  # the only tokens; END ends an answer


@dataclass(frozen=True, slots=True)
class CountedStep:
    """One or several simulated steps that were launched together. It has the interface of `LaunchedStep`.

    Attributes:
        answers: For each row that samples a token: its work key, and the number of its answer tokens before this step.
        outputs: Forecast number of answer tokens, by work key.
        clock: The simulated time.
        timed: The launch of the step.
        launch: How the host launched the step. None on a CPU.
        scored: Number of tokens with log-probabilities.
        padded_tokens: Always 0.
        collective_s: Always None.
        repeats: Number of tokens that each row decodes. None: one.
    """

    answers: list[tuple[bytes, int]]
    outputs: Mapping[bytes, int]
    clock: Clock
    timed: TimedLaunch
    launch: StepLaunch | None
    scored: int = 0
    padded_tokens: int = 0
    collective_s: float | None = None
    repeats: list[int] | None = None

    def tokens(self) -> list[list[int]]:
        """Wait until the simulated step is done, and return the new tokens of each row.

        The token ids are made up: END for the last token of an answer with its forecast length, else WORD.
        """
        self.clock.wait(self.timed)
        if self.repeats is None:
            return [[END if said + 1 >= self.outputs[key] else WORD] for key, said in self.answers]
        each = zip(self.answers, self.repeats, strict=True)
        return [
            [END if at >= self.outputs[key] else WORD for at in range(said + 1, said + 1 + count)]
            for (key, said), count in each
        ]

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return an empty mapping, because log-probabilities are not simulated."""
        return {}

    def states(self) -> Mapping[int, NDArray[np.float32]]:
        """Return an empty mapping, because hidden states are not simulated."""
        return {}

    def scores(self) -> TokenScores:
        """Return made-up scores for the scored tokens: every token has probability 1."""
        logprobs, greedy = np.zeros(self.scored, np.float32), np.ones(self.scored, np.bool_)
        none = np.empty((self.scored, 0))
        return TokenScores(logprobs, greedy, none.astype(np.float32), none.astype(np.int64))

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return an empty mapping, because constraints are not simulated."""
        return {}


@dataclass(frozen=True, slots=True)
class CountingRunner:
    """A `Runner` that computes nothing, but counts the tokens and time of an engine's steps.

    Attributes:
        cost: FLOPs and bytes of the model's steps.
        layout: Layout of the KV cache.
        time: Predicts the seconds of a step.
        outputs: Forecast number of answer tokens, by work key.
        looks_ahead: Whether the host schedules a step while the previous one runs.
        taken_bytes: Returns the bytes of used and cached blocks of the KV cache.
        launching: Predicts how a GPU's host launches steps. None on a CPU.
        adapters: Name of the adapter by work key, if the model has adapters.
        clock: The simulated time.
        stages: Pipeline stages of a sharded model. Empty for other models.
        wants: The arrays of a step plan that this runner needs.
    """

    cost: ModelCost
    layout: CacheLayout
    time: StepTime
    outputs: Mapping[bytes, int]
    looks_ahead: bool
    taken_bytes: Callable[[], int]
    launching: LaunchPredictor | None = None
    adapters: Mapping[bytes, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    stages: tuple[SimulatedStage, ...] = ()
    wants: PlanWants = COUNTS
    _newest: deque[TimedLaunch] = field(default_factory=partial(deque, maxlen=1), init=False)

    most_tokens: ClassVar[int | None] = None  # a step may have any number of tokens

    def launch(self, plan: StepPlan) -> CountedStep:
        """Simulate a step: add its device and host time to the clock, and return the launched step.

        Args:
            plan: The sequences, tokens and blocks of the step.
        """
        assert plan.requests is not None
        starts, lengths = plan.starts.tolist(), plan.chunk_lengths.tolist()
        rows, copies = len(starts), plan.copies
        answers = _sampling(plan.requests, lengths, plan.sampled)
        copied = 0 if copies is None else int((copies[:, 5] - copies[:, 4])[copies[:, 1] == 0].sum())
        spans = list(zip(plan.requests, starts, lengths, strict=True))
        scored = plan.sampling.scored
        rows_asked = len(answers) + (0 if scored is None else len(np.unique(scored.rows)))
        names = [self.adapters[key] for key, _ in plan.requests] if self.cost.adapted else []
        shape = step_shape(
            spans, rows_asked, plan.shared_blocks, self.layout, copied, self.cost.causal, names
        )
        launch, steps = None, plan.steps
        if self.launching is not None:
            decodes = shape.tokens == len(answers) == rows and copies is None
            ends = [start + steps - 1 for start in starts]
            launch = StepLaunch(self.launching.mode(ends, lengths, decodes, plan.shared_blocks > 0))
        launch_s = steps * self.time.launch_s(self._layers, launch.mode if launch else None)
        after = self._newest[0] if self._newest else None
        work = self._work(shape, rows)
        if plan.repeats is not None:
            work = [StageWork(work[0].seconds + self._further_s(plan, plan.repeats, names))]
        timed = self.clock.launch(self.time.host_s(rows, steps), launch_s, work, after)
        self._newest.append(timed)
        tokens, repeats = 0 if scored is None else len(scored.tokens), plan.repeats
        each = None if repeats is None else repeats.tolist()
        return CountedStep(answers, self.outputs, self.clock, timed, launch, tokens, repeats=each)

    @property
    def _layers(self) -> int:
        return max((stage.cost.layers for stage in self.stages), default=self.cost.layers)

    def _work(self, shape: StepShape, rows: int) -> list[StageWork]:
        first_use_s = self._first_use_s() / max(1, len(self.stages))
        if not self.stages:
            return [StageWork(self.time.device_s(shape, self.cost, rows) + first_use_s)]
        found = (stage.work(shape, rows, self.time) for stage in self.stages)
        return [StageWork(one.seconds + first_use_s, one.hand_on_s) for one in found]

    def _further_s(self, plan: StepPlan, repeats: Ints, names: Sequence[str]) -> float:
        seconds, starts = 0.0, plan.starts.astype(np.int64)
        for step in range(1, plan.steps):
            at = starts + np.minimum(step, repeats - 1)
            shape = decode_shape(at, plan.shared_blocks, self.layout, names)
            seconds += self.time.device_s(shape, self.cost, len(at))
        return seconds

    def _first_use_s(self) -> float:
        before, self.clock.most_taken = self.clock.most_taken, max(self.clock.most_taken, self.taken_bytes())
        return (self.clock.most_taken - before) * self.time.first_use_s


def _sampling(
    requests: list[tuple[bytes, int]], lengths: list[int], sampled: Ints | None
) -> list[tuple[bytes, int]]:
    if sampled is None or len(sampled) == len(requests):
        return requests
    ends = accumulate(lengths)
    rows = set(sampled.tolist())
    return [request for request, end in zip(requests, ends, strict=True) if end - 1 in rows]
