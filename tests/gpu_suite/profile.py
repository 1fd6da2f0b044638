"""Ten steps of the steady state under torch's profiler: when the GPU had nothing to do, and what it did otherwise.

Idle time is the time between the first and the last work of these steps in which nothing ran on the device. The
profiler slows the host down, so that the host's share of it comes out high rather than low; the time of as many steps
right before, without the profiler, stands beside.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from batchinfer.core.samples import StepSample
from batchinfer.engine.loop.engine import Engine
from tests.gpu_suite import workloads
from tests.gpu_suite.case import WrongResult
from tests.gpu_suite.clock import wait_for
from tests.gpu_suite.loaded import loaded_model, model_name
from tests.gpu_suite.section import Section

STEPS = 10
# Of the workload's rows so many have ended before, and others have taken their places
ENDED = 300
SHOWN = 8  # kernels that take most of the time


@dataclass(frozen=True, slots=True)
class Work:
    """What the device did, from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


def run(section: Section) -> None:
    """One result."""
    section.parts([("ten steady steps", partial(_profiled, section))])


def _profiled(section: Section) -> dict[str, Any]:
    loaded = loaded_model(section.setting)
    engine = loaded.engine()
    engine.add(workloads.requests(section))
    _reach(engine, 0 if section.setting.rehearsal else ENDED)
    on_gpu = not section.setting.rehearsal
    wanted = STEPS if on_gpu else 1
    before = _steps(engine, wanted)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        samples = _steps(engine, wanted)
        wait_for(section.setting.device)  # what is in flight is not to outlast its engine
    result: dict[str, Any] = {"kind": "profile", "model": model_name(section.setting), "steps": len(samples)}
    if len(samples) < wanted:
        raise WrongResult(f"{len(samples)} steps were left, not {wanted}")
    return {
        **result,
        **_described(before, samples),
        "profiled": summary(_device_work(seen, "CUDA" if on_gpu else "CPU")),
    }


def _reach(engine: Engine, ended: int) -> None:
    """Step until so many rows have ended."""
    found = 0
    while found < ended and engine.unfinished:
        found += len(engine.step().completions)


def _steps(engine: Engine, wanted: int) -> list[StepSample]:
    found: list[StepSample] = []
    while len(found) < wanted and engine.unfinished:
        sample = engine.step().sample
        found += [] if sample is None else [sample]
    return found


def _described(before: Iterable[StepSample], samples: list[StepSample]) -> dict[str, Any]:
    return {
        "decode_tokens": [sample.decode_tokens for sample in samples],
        "prefill_tokens": [sample.prefill_tokens for sample in samples],
        "step_s": {"median": statistics.median(sample.duration_s for sample in samples)},
        "unprofiled_step_s": {"median": statistics.median(sample.duration_s for sample in before)},
    }


def _device_work(seen: Any, kind: str) -> list[Work]:
    """Return the kernels, copies and fills of a kind of device. Raises WrongResult where the profiler saw none: it may
    lack the right to."""
    found = [
        Work(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type.name == kind
    ]
    if not found:
        raise WrongResult("torch's profiler saw nothing on the device")
    return found


def summary(works: list[Work]) -> dict[str, Any]:
    """Times in seconds; `idle_share` is of `span_s`, a kernel's `share` of the sum of all works' times."""
    span = max(w.end for w in works) - min(w.start for w in works)
    busy, gaps = busy_time(works)
    times: Counter[str] = Counter()
    for work in works:
        times[work.name] += work.end - work.start  # type: ignore[assignment]
    total = sum(times.values())
    return {
        "span_s": span / 1e6,
        "busy_s": busy / 1e6,
        "idle_share": 1 - busy / span,
        "gaps": len(gaps),
        "longest_gaps_s": [gap / 1e6 for gap in sorted(gaps, reverse=True)[:SHOWN]],
        "kernels": [{"name": name, "share": time / total} for name, time in times.most_common(SHOWN)],
    }


def busy_time(works: list[Work]) -> tuple[float, list[float]]:
    """How long anything ran, and how long each time was in which nothing did."""
    busy, gaps = 0.0, []
    reached = min(work.start for work in works)
    for work in sorted(works, key=lambda w: w.start):
        if work.start > reached:
            gaps.append(work.start - reached)
        busy += max(0.0, work.end - max(work.start, reached))
        reached = max(reached, work.end)
    return busy, gaps
