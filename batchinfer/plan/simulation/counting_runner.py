"""A runner that computes nothing: it gives each sequence the length that it is said to have, and moves a clock on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.runner.runner import StepLaunch
from batchinfer.engine.schedule.step_plan import COUNTS, Ints, PlanWants, StepPlan, TokenScores
from batchinfer.engine.schedule.step_shape import step_shape
from batchinfer.plan.simulation.launching import Launching
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost

END, WORD = 0, 1  # the only tokens there are; END ends an answer


@dataclass(slots=True)
class Clock:
    """The time of a simulated run, in seconds: of the host, and until when the device is busy."""

    host: float = 0.0
    device: float = 0.0
    most_taken: int = 0  # bytes of the KV cache that were ever taken

    def launch(self, host_s: float, launch_s: float, device_s: float) -> float:
        """The host makes a step ready and launches its layers, while the device is at the first ones; when the device
        will have done it."""
        self.host += host_s
        began = max(self.host, self.device)
        self.host += launch_s
        self.device = max(began + device_s, self.host)
        return self.device


@dataclass(frozen=True, slots=True)
class CountedStep:
    """A simulated step, in the place of `batchinfer.engine.runner.runner.Launched`."""

    answers: list[
        tuple[bytes, int]
    ]  # of each chunk that samples, its request and how many tokens its answer has
    outputs: Mapping[bytes, int]
    clock: Clock
    done_s: float
    launch: StepLaunch | None
    scored: int = 0  # tokens that are scored
    padded_tokens: int = 0

    def tokens(self) -> list[list[int]]:
        """Waits for the simulated device."""
        self.clock.host = max(self.clock.host, self.done_s)
        return [[END if said + 1 >= self.outputs[key] else WORD] for key, said in self.answers]

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Nobody asks a simulation for them."""
        return {}

    def states(self) -> Mapping[int, NDArray[np.float32]]:
        """Nobody asks a simulation for them."""
        return {}

    def scores(self) -> TokenScores:
        """Return that each token is certain: what they really are is not simulated."""
        logprobs, greedy = np.zeros(self.scored, np.float32), np.ones(self.scored, np.bool_)
        none = np.empty((self.scored, 0))
        return TokenScores(logprobs, greedy, none.astype(np.float32), none.astype(np.int64))

    def barred(self) -> Mapping[int, bool]:
        """No row is masked: what answers say is not simulated."""
        return {}


@dataclass(frozen=True, slots=True)
class CountingRunner:
    """A `Runner` that counts. `outputs`: by work key, how many tokens the answer has; `taken_bytes`: of the KV cache,
    in use or kept for later rows; `launching`: of a GPU's host, None on a CPU."""

    cost: ModelCost
    layout: CacheLayout
    time: StepTime
    outputs: Mapping[bytes, int]
    looks_ahead: bool
    taken_bytes: Callable[[], int]
    launching: Launching | None = None
    adapters: Mapping[bytes, str] = field(default_factory=dict)  # by work key, where the model has any
    clock: Clock = field(default_factory=Clock)
    wants: PlanWants = COUNTS

    @property
    def most_tokens(self) -> int | None:
        return None

    def launch(self, plan: StepPlan) -> CountedStep:
        """Count a step, and move the clock on."""
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
        launch = None
        if self.launching is not None:
            decodes = shape.tokens == len(answers) == rows and copies is None
            launch = StepLaunch(self.launching.mode(starts, lengths, decodes, plan.shared_blocks > 0))
        launch_s = self.time.launch_s(self.cost.layers, launch.mode if launch else None)
        device_s = self.time.device_s(shape, self.cost, rows) + self._first_use_s()
        done = self.clock.launch(self.time.host_s(rows), launch_s, device_s)
        tokens = 0 if scored is None else len(scored.tokens)
        return CountedStep(answers, self.outputs, self.clock, done, launch, tokens)

    def _first_use_s(self) -> float:
        """Return the seconds for memory that this step is the first to use. Blocks that were freed are used again
        first."""
        before, self.clock.most_taken = self.clock.most_taken, max(self.clock.most_taken, self.taken_bytes())
        return (self.clock.most_taken - before) * self.time.first_use_s


def _sampling(
    requests: list[tuple[bytes, int]], lengths: list[int], sampled: Ints | None
) -> list[tuple[bytes, int]]:
    """Return those of the chunks' requests that sample."""
    if sampled is None or len(sampled) == len(requests):
        return requests
    ends = accumulate(lengths)
    rows = set(sampled.tolist())
    return [request for request, end in zip(requests, ends, strict=True) if end - 1 in rows]
