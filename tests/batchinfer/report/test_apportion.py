"""Device time by request: the sum equals the time of all steps, and shares agree with counting each chunk."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.samples import RequestSample, StepSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import CacheGroup, CacheLayout
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.plan.simulation.counting_runner import END, CountingRunner
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer.report.tables.apportion import Apportionment
from batchinfer.report.tables.details import request_flops
from batchinfer.report.tables.device_time import attention_share
from batchinfer_kernels.cost import Peaks
from tests.model_costs import llama_cost

PEAKS = Peaks(4e11, 4e10)
COST = llama_cost(4, 64, 128, 4, 2, 16, 300, 2, 2)


@dataclass
class Watched:
    """Wraps a runner, and records the rows of each step."""

    runner: CountingRunner
    chunks: list[list[tuple[bytes, int, int]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plan: StepPlan) -> Any:
        assert plan.requests is not None
        keys = [key for key, _ in plan.requests]
        self.chunks.append(list(zip(keys, plan.starts.tolist(), plan.chunk_lengths.tolist(), strict=True)))
        return self.runner.launch(plan)


@dataclass
class Simulated:
    """A run, and the share of each request by counting chunks."""

    steps: list[StepSample]
    requests: list[RequestSample]
    exact: dict[bytes, float]


def simulated(rows: int, budget: int, blocks: int, looks_ahead: bool, seed: int) -> Simulated:
    rng = random.Random(seed)
    work = [
        Request(n.to_bytes(32, "big"), np.array([rng.randrange(99) for _ in range(rng.randint(4, 200))], np.int32),
                SamplingParams(max_tokens=60))
        for n in range(rows)
    ]  # fmt: skip
    outputs = {request.key: rng.randint(1, 60) for request in work}
    layout = CacheLayout((None,) * 4, (CacheGroup((0, 1, 2, 3), None, frozenset([None])),), 4, 8)
    scheduler = Scheduler(SchedulerConfig(32, budget), BlockPool(blocks, 8))
    time = StepTime(PEAKS, 0.5, 0.4, 1e-5)
    counting = CountingRunner(COST, layout, time, outputs, looks_ahead, lambda: 0)
    runner = Watched(counting)
    limits = EngineLimits(ContentRoots(4096), frozenset([END]))
    engine = Engine(runner, scheduler, limits, PEAKS, clock=lambda: runner.clock.host)  # type: ignore[arg-type]
    engine.add(work)
    outs = list(engine.drain())
    steps = [out.sample for out in outs if out.sample is not None]
    return Simulated(steps, [r for out in outs for r in out.requests], _exact(steps, runner.chunks))


def _exact(steps: list[StepSample], chunks: list[list[tuple[bytes, int, int]]]) -> dict[bytes, float]:
    found: dict[bytes, float] = defaultdict(float)
    share = attention_share(COST, PEAKS, step_columns(steps))
    for step, ran, attention in zip(steps, chunks, share.tolist(), strict=True):
        tokens = sum(length for _, _, length in ran)
        pairs = sum(length * (2 * start + length + 1) for _, start, length in ran)
        for key, start, length in ran:
            found[key] += step.model_s * (1 - attention) * length / tokens
            found[key] += step.model_s * attention * length * (2 * start + length + 1) / pairs
    return found


def step_columns(steps: list[StepSample]) -> dict[str, np.ndarray]:
    names = [*(name for name in StepSample.__slots__ if name != "step"), "prompt_tokens"]
    found = {name: np.array([getattr(step, name) for step in steps], float) for name in names}
    return found | {"ended_s": found["started_s"] + found["duration_s"]}


def request_columns(requests: list[RequestSample]) -> dict[str, np.ndarray]:
    names = [name for name in RequestSample.__slots__ if name != "key"]
    return {name: np.array([getattr(request, name) for request in requests], float) for name in names}


def apportioned(ran: Simulated, parts: int = 1) -> dict[str, np.ndarray]:
    steps, requests = step_columns(ran.steps), request_columns(ran.requests)
    made = Apportionment(steps, attention_share(COST, PEAKS, steps))
    for at in range(parts):
        made.add({name: values[at::parts] for name, values in requests.items()})
    return {name: share.prompt + share.answer for name, share in made.shares(requests).items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize(("budget", "blocks"), [(1024, 4000), (64, 4000), (256, 250)])
def test_shares_of_requests_add_up_to_the_steps(budget: int, blocks: int, looks_ahead: bool) -> None:
    """With room for all rows, with chunked prompts, and with preemption."""
    ran = simulated(120, budget, blocks, looks_ahead, seed=budget)
    found = apportioned(ran)
    for name in ("model_s", "bytes", "roofline_s"):
        assert found[name].sum() == pytest.approx(sum(getattr(step, name) or 0 for step in ran.steps))
    exact = np.array([ran.exact[request.key] for request in ran.requests])
    off = np.abs(found["model_s"] - exact) / exact
    assert np.median(off) < 0.08
    assert np.quantile(off, 0.9) < 0.3


def test_requests_may_be_added_in_parts() -> None:
    ran = simulated(60, 256, 4000, False, seed=3)
    assert apportioned(ran, 3)["model_s"].tolist() == pytest.approx(apportioned(ran)["model_s"].tolist())


def test_flops_of_requests_add_up_to_those_of_steps() -> None:
    ran = simulated(60, 256, 4000, False, seed=5)
    found = request_flops(COST, request_columns(ran.requests))
    assert found.sum() == sum(step.flops for step in ran.steps)


def test_unfinished_requests_have_a_share_and_no_row() -> None:
    ran = simulated(80, 256, 4000, False, seed=4)
    half = Simulated(ran.steps, ran.requests[:40], ran.exact)
    whole, some = apportioned(ran)["model_s"], apportioned(half)["model_s"]
    assert some.sum() < 0.9 * whole.sum()
    assert some.sum() == pytest.approx(whole[:40].sum(), rel=0.3)


def test_attention_of_answers_is_divided_by_the_preceding_tokens() -> None:
    """Both rows decode in the steps 2 and 3, only the longer one in the steps 4 and 5."""
    steps = {
        "prompt_tokens": np.array([5.0, 30, 0, 0, 0, 0]),
        "decode_tokens": np.array([0.0, 0, 2, 2, 1, 1]),
        "scheduled_s": np.arange(6.0),
        "ended_s": np.arange(1.0, 7.0),
        **{name: np.ones(6) for name in ("model_s", "bytes", "roofline_s")},
    }
    requests = {
        "prompt_tokens": np.array([5.0, 10, 20]),
        "cached_tokens": np.zeros(3),
        "completion_tokens": np.array([1.0, 3, 5]),
        "unrun_tokens": np.ones(3),
        "scheduled_s": np.array([0.0, 1, 1]),
        "first_token_s": np.array([1.0, 2, 2]),
        "finished_s": np.array([1.0, 4, 6]),
    }
    split = Apportionment(steps, np.ones(6))
    split.add(requests)
    answer = split.shares(requests)["model_s"].answer
    assert answer.tolist() == pytest.approx([0, 11 / 32 + 12 / 34, 21 / 32 + 22 / 34 + 2])


def test_a_request_that_ended_before_any_step_has_no_share() -> None:
    ran = simulated(10, 256, 4000, False, seed=6)
    early = RequestSample(b"e" * 32, 10, 3, 0, 0, 0.0, 0.1, 0.1, 0.1)
    found = apportioned(Simulated(ran.steps, [*ran.requests, early], ran.exact))["model_s"]
    assert found[-1] == 0
    assert found.sum() == pytest.approx(sum(step.model_s for step in ran.steps))


def test_a_request_without_steps_does_not_change_the_sum_of_shares() -> None:
    """Its small share is lost to rounding in a sum of millions."""
    steps = {
        "prompt_tokens": np.array([3e7, 0.0, 0.0]),
        "decode_tokens": np.array([0.0, 1.0, 1.0]),
        "scheduled_s": np.array([0.0, 1.0, 2.0]),
        "ended_s": np.array([1.0, 2.0, 3.0]),
        **{name: np.ones(3) for name in ("model_s", "bytes", "roofline_s")},
    }
    requests = {
        "prompt_tokens": np.array([3e7, 5.0]),
        "cached_tokens": np.array([0.0, 5.0]),
        "completion_tokens": np.array([3.0, 0.0]),
        "forced_tokens": np.zeros(2),
        "unrun_tokens": np.ones(2),
        "scheduled_s": np.array([0.0, 1.5]),
        "first_token_s": np.array([1.0, 1.5]),
        "finished_s": np.array([3.0, 1.5]),
    }
    split = Apportionment(steps, np.zeros(3))
    split.add(requests)
    share = split.shares(requests)["model_s"]
    assert np.isfinite(share.prompt + share.answer).all()
    assert (share.prompt + share.answer).sum() == pytest.approx(3.0, rel=0.01)
