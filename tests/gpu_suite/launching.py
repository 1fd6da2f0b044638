"""Measures the host's time for steps of the steady state: scheduling, admission and launch.

Equal rows run twice, with prefill launched in pieces and operator by operator. The host waits for the device
one step late, as in a job.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from batchinfer.core.samples import LAUNCH_MODES, StepSample
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.runner import LaunchedStep
from batchinfer.engine.schedule.budget import LAUNCH_LAYER_S, REPLAY_LAYER_S
from batchinfer.engine.schedule.scheduler import Step
from batchinfer.engine.schedule.step_plan import PlanWants, StepPlan
from tests.gpu_suite import steady
from tests.gpu_suite.loaded import loaded_model, name_of
from tests.suite.clock import wait_for
from tests.suite.section import BenchSection, Part, Result, WrongResult

ROWS = 256  # running rows: few, for a short start before the steady state
FIRST, ENDED = 50, 350  # finished rows at the start and the end of the measurement
# Costs of a layer for the host, as assumed by admission and by the simulator
ASSUMED_LAYER_S = {"piecewise_graph": REPLAY_LAYER_S, "eager": LAUNCH_LAYER_S}


def parts(section: BenchSection) -> list[Part]:
    """Return a part for each way of launching."""
    ways = {"steps in pieces": True, "steps by operators": False}
    return [(name, partial(_measured, section, name, in_pieces)) for name, in_pieces in ways.items()]


@dataclass(frozen=True, slots=True)
class HostStep:
    """The host's time for a step, in seconds."""

    schedule_s: float
    launch_s: float
    admitted: int  # number of admitted rows


Stepped = tuple[StepSample, HostStep]


class TimedRunner:
    """Wraps a runner and the scheduler of its engine, and records the host's time for each step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._scheduled = 0.0, 0
        self.steps: list[HostStep] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def wants(self) -> PlanWants:
        """Return the runner's wants, with single steps."""
        return self._runner.wants._replace(repeats=False)

    def watch(self, scheduler: Any) -> None:
        """Time the scheduling of steps."""
        schedule = scheduler.schedule

        def timed(drafted: bool = False) -> Step:
            began = time.perf_counter()
            step: Step = schedule(drafted)
            self._scheduled = time.perf_counter() - began, len(step.admitted)
            return step

        scheduler.schedule = timed

    def launch(self, plan: StepPlan) -> LaunchedStep:
        began = time.perf_counter()
        launched = self._runner.launch(plan)
        taken, (schedule_s, admitted) = time.perf_counter() - began, self._scheduled
        self.steps.append(HostStep(schedule_s, taken, admitted))
        return launched


def _measured(section: BenchSection, name: str, in_pieces: bool) -> Result:
    """Run the rows with one way of launching. Raises WrongResult if no steps of the steady state remain."""
    steady_steps = _stepped(section, in_pieces)
    if not steady_steps:
        raise WrongResult("no step was left once rows had begun to end")
    layers = loaded_model(section).runner.cost.layers
    metrics: dict[str, float] = {}
    for mode in LAUNCH_MODES:
        metrics |= _way(mode, [step for step in steady_steps if step[0].launch == mode], layers)
    for which, admitting in (("admitting", True), ("others", False)):
        own = [host for _, host in steady_steps if (host.admitted > 0) == admitting]
        metrics |= _admission(which, own)
    modes = steady.launched(step for step, _ in steady_steps)
    shares = {mode: share for mode, share in modes.items() if share}
    launched = ", ".join(mode.removesuffix("_share") for mode in shares)
    facts = {"steps": len(steady_steps), "launched": launched}
    return Result(f"host, {name}, {name_of(section)}", facts, metrics=metrics | shares)


def _stepped(section: BenchSection, in_pieces: bool) -> list[Stepped]:
    """Return the steps of the steady state."""
    loaded = loaded_model(section)
    runner = loaded.runner
    if isinstance(runner, DeviceRunner) and not in_pieces:
        runner = replace(runner, mixed=None)
    timed = TimedRunner(runner)
    limits = replace(loaded.limits, max_num_seqs=min(loaded.limits.max_num_seqs, ROWS))
    engine = replace(loaded, limits=limits).engine(runner=cast(ModelRunner, timed))
    timed.watch(engine._scheduler)
    engine.add(steady.requests(section))
    samples: list[StepSample] = []
    ended, begun = 0, 0
    first, last = (0, 1) if section.rehearsal else (FIRST, ENDED)
    while ended < last and engine.unfinished:
        output = engine.step()
        ended += len(output.completions)
        samples += [] if output.sample is None else [output.sample]
        begun = len(samples) if ended < first else begun
    wait_for(section.device)  # steps in flight may not outlive their engine
    return list(zip(samples, timed.steps, strict=False))[begun:]


def _way(mode: str, steps: Sequence[Stepped], layers: int) -> dict[str, float]:
    """Return medians over the steps with one way of launching, or an empty dict without any."""
    if not steps:
        return {}
    launch_s = statistics.median(host.launch_s for _, host in steps)
    tokens = [sample.prefill_tokens + sample.decode_tokens for sample, _ in steps]
    found = {
        f"{mode}_steps": len(steps),
        f"{mode}_tokens": statistics.median(tokens),
        f"{mode}_padded_tokens": statistics.median(sample.padded_tokens for sample, _ in steps),
        f"{mode}_launch_s": launch_s,
        f"{mode}_launch_layer_s": launch_s / layers,
        f"{mode}_step_s": statistics.median(sample.duration_s for sample, _ in steps),
    }
    assumed = ASSUMED_LAYER_S.get(mode)
    return found | ({} if assumed is None else {f"{mode}_assumed_layer_s": assumed})


def _admission(which: str, steps: Sequence[HostStep]) -> dict[str, float]:
    """Return the scheduling times of steps that admit rows, or of the other steps."""
    if not steps:
        return {}
    return {
        f"{which}_steps": len(steps),
        f"{which}_rows": statistics.median(host.admitted for host in steps),
        f"{which}_schedule_s": statistics.median(host.schedule_s for host in steps),
        f"{which}_most_schedule_s": max(host.schedule_s for host in steps),
    }
