"""The quantisations that a job could have: the memory that its weights would take, and the engine's time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from batchinfer.core.errors import CannotSplit, OutOfMemory
from batchinfer.job import Job
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.spec.model_cost import loaded_bytes
from batchinfer.plan.forecast.engine import ForecastEngine, forecast_engine
from batchinfer.plan.forecast.step_times import step_times
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import Prompts
from batchinfer.plan.setup.job_setup import Setup
from batchinfer_kernels.arithmetic import Device, Quantization

COMPARED: Mapping[Device, tuple[Quantization, ...]] = {
    "cpu": ("none", "int8", "int4"),
    "cuda": ("none", "int8"),
}
SIMULATE_S = 0.5  # for each: together a third of what `plan` may simulate for


@dataclass(frozen=True, slots=True)
class QuantizedForecast:
    """The forecast of a job with another `quantization`, or with its own. `seconds`: of the engine, from what is known
    of the machine without runs of this model, so that all are known in the same way; None: they are not known, or the
    job does not fit into memory, and not `fits`. `chosen`: whether it is the job's own."""

    quantization: Quantization
    chosen: bool
    weight_bytes: int
    seconds: float | None
    fits: bool


def quantized_forecasts(
    job: Job, setup: Setup, plan: Plan, prompts: Prompts, multiple: float
) -> Iterator[QuantizedForecast]:
    """Yield the forecasts of a model of ours that is stored in floats; of others there is nothing to choose. What the
    job's ranks could not divide is left out. `multiple`: as in ForecastEngine."""
    setting = setup.setting
    checkpoint = open_checkpoint(job.model.path) if setting.parts.weights is not None else setup.checkpoint
    if not isinstance(checkpoint, Checkpoint) or any(each.quantized for each in checkpoint.packed.values()):
        return
    checkpoint = checkpoint.as_stored(frozenset())
    if (setting.device, setting.numerics.dtype) == ("cpu", "float16"):
        return
    for name in dict.fromkeys((*COMPARED[setting.device], setting.numerics.quantization)):
        held = checkpoint.held_for(name)
        other = setting.with_numerics(quantization=name, calibrates=False).with_parts(weights=None)
        found = replace(setup, checkpoint=held, setting=other)
        taken = loaded_bytes(held.spec.quantized(name), held.parameters, setting.numerics.itemsize)
        chosen, size = name == setting.numerics.quantization, taken * setting.placement.replicas
        try:
            engine = _without_runs(replace(forecast_engine(job, found, plan), multiple=multiple))
        except CannotSplit:
            continue
        except OutOfMemory:
            yield QuantizedForecast(name, chosen, size, None, False)
            continue
        yield QuantizedForecast(name, chosen, size, engine.forecast(prompts, SIMULATE_S).seconds, True)


def _without_runs(engine: ForecastEngine) -> ForecastEngine:
    """Return the engine with steps whose times no earlier run has told."""
    times = step_times(engine.setup.setting, engine.machine.cost, None)
    return replace(engine, times=times, machine=replace(engine.machine, time=times.time))
