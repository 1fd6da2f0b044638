"""What the host needs for the steps of a steady state: to schedule them, to admit rows, and to launch them.

The same rows run twice, with steps that read prompts launched in pieces and operator by operator. The device is waited
for as in a job, one step behind, so that these are the host's times in a run and not those of an idle machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from batchinfer.core.samples import LAUNCH_MODES, StepSample
from batchinfer.engine.loop.engine import Engine
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.runner import Launched
from batchinfer.engine.schedule.budget import LAUNCH_LAYER_S, REPLAY_LAYER_S
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.scheduler import Chunk, Scheduler, Step
from tests.gpu_suite import workloads
from tests.gpu_suite.case import WrongResult
from tests.gpu_suite.clock import wait_for
from tests.gpu_suite.loaded import loaded_model, model_name
from tests.gpu_suite.section import Section

ROWS = 256  # in work at a time: few enough that the steady state begins soon
FIRST, ENDED = 50, 350  # rows that have ended when counting begins, and when it is over
# What the rule of admission and the simulator take a layer to cost the host
ASSUMED_LAYER_S = {"piecewise_graph": REPLAY_LAYER_S, "eager": LAUNCH_LAYER_S}


def run(section: Section) -> None:
    """A result each way."""
    section.parts(
        [
            ("steps in pieces", partial(_measured, section, True)),
            ("steps by operators", partial(_measured, section, False)),
        ]
    )


@dataclass(frozen=True, slots=True)
class HostStep:
    """What the host took for a step, in seconds."""

    schedule_s: float
    launch_s: float
    admitted: int  # rows


class TimedScheduler(Scheduler):
    """Keeps how long it took to decide the last step."""

    took_s = 0.0

    def schedule(self) -> Step:
        began = time.perf_counter()
        step = super().schedule()
        self.took_s = time.perf_counter() - began
        return step


class TimedRunner:
    """Stands before a runner, and keeps how long it took to launch each step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.scheduler: TimedScheduler | None = None
        self.steps: list[HostStep] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, chunks: list[Chunk], copies: Sequence[Copy] = ()) -> Launched:
        """Raises what the runner raises."""
        admitted = sum(chunk.sequence.scheduled_s is None for chunk in chunks)
        began = time.perf_counter()
        launched = self._runner.launch(chunks, copies)
        taken = time.perf_counter() - began
        assert self.scheduler is not None
        self.steps.append(HostStep(self.scheduler.took_s, taken, admitted))
        return launched


def _measured(section: Section, in_pieces: bool) -> dict[str, Any]:
    samples, steps, begun = _stepped(section, in_pieces)
    layers = loaded_model(section.setting).runner.cost.layers
    result = {"kind": "host", "model": model_name(section.setting), "in_pieces": in_pieces, "layers": layers}
    result |= {"steps": len(samples) - begun, **workloads.launched(samples[begun:])}
    if not result["steps"]:
        raise WrongResult("no step was left once rows had begun to end")
    steady = list(zip(samples[begun:], steps[begun:], strict=True))
    admission = {name: _admission(steady, name == "admitting") for name in ("admitting", "others")}
    ways = {mode: _way([pair for pair in steady if pair[0].launch == mode], layers) for mode in LAUNCH_MODES}
    found = {mode: way for mode, way in ways.items() if way}
    return result | {"host": {"ways": found, "admission": admission, "assumed_layer_s": ASSUMED_LAYER_S}}


def _stepped(section: Section, in_pieces: bool) -> tuple[list[StepSample], list[HostStep], int]:
    """All steps, and how many there were before the steady state."""
    setting, loaded = section.setting, loaded_model(section.setting)
    runner = loaded.runner
    if isinstance(runner, DeviceRunner) and not in_pieces:
        runner = replace(runner, mixed=None)
    timed = TimedRunner(runner)
    limits = replace(loaded.limits, max_num_seqs=min(loaded.limits.max_num_seqs, ROWS))
    engine = replace(loaded, limits=limits).engine(runner=cast(ModelRunner, timed))
    timed.scheduler = _timed(engine)
    engine.add(workloads.requests(section))
    samples: list[StepSample] = []
    ended, begun = 0, 0
    first, last = (0, 1) if setting.rehearsal else (FIRST, ENDED)
    while ended < last and engine.unfinished:
        output = engine.step()
        ended += len(output.completions)
        samples += [] if output.sample is None else [output.sample]
        begun = len(samples) if ended < first else begun
    wait_for(setting.device)  # what is in flight is not to outlast its engine
    return samples, timed.steps[: len(samples)], begun


def _timed(engine: Engine) -> TimedScheduler:
    """The engine's scheduler, which from here on keeps its times."""
    engine._scheduler.__class__ = TimedScheduler
    return cast(TimedScheduler, engine._scheduler)


def _way(steps: Sequence[tuple[StepSample, HostStep]], layers: int) -> dict[str, float]:
    """Medians over steps that were launched in one way; nothing where there are none."""
    if not steps:
        return {}
    launch_s = _median(host.launch_s for _, host in steps)
    return {
        "steps": len(steps),
        "tokens": _median(sample.prefill_tokens + sample.decode_tokens for sample, _ in steps),
        "padded_tokens": _median(sample.padded_tokens for sample, _ in steps),
        "launch_s": launch_s,
        "launch_layer_s": launch_s / layers,
        "step_s": _median(sample.duration_s for sample, _ in steps),
    }


def _admission(steps: Sequence[tuple[StepSample, HostStep]], admitting: bool) -> dict[str, float]:
    """Of scheduling the steps that admit rows, or of the others."""
    own = [host for _, host in steps if (host.admitted > 0) == admitting]
    if not own:
        return {"steps": 0}
    found = {"steps": len(own), "schedule_s": _median(host.schedule_s for host in own)}
    rows = _median(host.admitted for host in own)
    return {**found, "most_s": max(host.schedule_s for host in own), "rows": rows}


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
