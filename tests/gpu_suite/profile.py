"""Runs ten steps of the steady state under torch's profiler: idle times of the GPU, and its work.

Idle time is the time between the first and the last work in which nothing ran on the device. The profiler
slows the host down and overstates its share. The time of equal steps without the profiler is reported, too.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from batchinfer.core.samples import StepSample
from batchinfer.engine.loop.engine import Engine
from tests.gpu_suite import steady
from tests.gpu_suite.loaded import loaded_model, name_of
from tests.suite.clock import wait_for
from tests.suite.section import BenchSection, Part, Result, WrongResult

STEPS = 10
# This number of rows has ended, and others have replaced them
ENDED = 300
SHOWN = 8  # number of kernels in the table, the slowest first


@dataclass(frozen=True, slots=True)
class Work:
    """Work of the device from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


def parts(section: BenchSection) -> list[Part]:
    return [("ten steady steps", partial(_profiled, section))]


def _profiled(section: BenchSection) -> Result:
    """Profile steps. Raises WrongResult if too few steps remain, or the profiler recorded no work."""
    engine = loaded_model(section).engine()
    engine.add(steady.requests(section))
    _reach(engine, 0 if section.rehearsal else ENDED)
    wanted, kind = (1, "CPU") if section.rehearsal else (STEPS, "CUDA")
    before = _steps(engine, wanted)
    with profile(activities=[getattr(ProfilerActivity, kind)]) as seen:
        samples = _steps(engine, wanted)
        wait_for(section.device)  # steps in flight may not outlive their engine
    if len(samples) < wanted:
        raise WrongResult(f"{len(samples)} steps were left, not {wanted}")
    durations = {"profiled_step_s": samples, "plain_step_s": before}
    metrics: dict[str, Any] = {
        name: statistics.median(step.duration_s for step in steps) for name, steps in durations.items()
    }
    tokens = {name: [getattr(step, name) for step in samples] for name in ("decode_tokens", "prefill_tokens")}
    metrics |= summary(_device_work(seen, kind))
    return Result(f"{wanted} steady steps, {name_of(section)}", metrics=metrics, details=tokens)


def _reach(engine: Engine, ended: int) -> None:
    """Run steps until this number of rows has ended."""
    found = 0
    while found < ended and engine.unfinished:
        found += len(engine.step().completions)


def _steps(engine: Engine, wanted: int) -> list[StepSample]:
    found: list[StepSample] = []
    while len(found) < wanted and engine.unfinished:
        sample = engine.step().sample
        found += [] if sample is None else [sample]
    return found


def _device_work(seen: Any, kind: str) -> list[Work]:
    """Return the kernels, copies and fills on devices of type `kind`.

    Raises:
        WrongResult: If the profiler saw none, for example without permission.
    """
    found = [
        Work(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type.name == kind
    ]
    if not found:
        raise WrongResult("torch's profiler saw nothing on the device")
    return found


def summary(works: list[Work]) -> dict[str, Any]:
    """Return times in seconds.

    `idle_share` refers to `span_s`, a kernel's `work_share` to the sum of all works' times.
    """
    span = max(w.end for w in works) - min(w.start for w in works)
    busy, gaps = busy_time(works)
    times: dict[str, float] = defaultdict(float)
    for work in works:
        times[work.name] += work.end - work.start
    most, total = sorted(times.items(), key=lambda item: -item[1])[:SHOWN], sum(times.values())
    return {
        "span_s": span / 1e6,
        "idle_share": 1 - busy / span,
        "gaps": len(gaps),
        "longest_gap_s": max(gaps, default=0.0) / 1e6,
        "work_share": {name: time / total for name, time in most},
    }


def busy_time(works: list[Work]) -> tuple[float, list[float]]:
    """Return the total busy time, and the list of idle intervals."""
    busy, gaps = 0.0, []
    reached = min(work.start for work in works)
    for work in sorted(works, key=lambda w: w.start):
        if work.start > reached:
            gaps.append(work.start - reached)
        busy += max(0.0, work.end - max(work.start, reached))
        reached = max(reached, work.end)
    return busy, gaps
