"""Compares the quantisations that a job could use: weight memory and engine time."""

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
SIMULATE_S = 0.5  # per quantisation; together a third of PLAN_MOST_S


@dataclass(frozen=True, slots=True)
class QuantizedForecast:
    """The forecast of a job with one quantisation of the weights.

    Attributes:
        quantization: The quantisation.
        chosen: Whether the job uses this quantisation.
        weight_bytes: Weight bytes of all engines.
        seconds: Engine time. It ignores the step times that earlier runs measured, for a fair comparison. None if
            unknown or if the job does not fit.
        fits: Whether the job fits into memory.
    """

    quantization: Quantization
    chosen: bool
    weight_bytes: int
    seconds: float | None
    fits: bool


def quantized_forecasts(
    job: Job, setup: Setup, plan: Plan, prompts: Prompts, multiple: float
) -> Iterator[QuantizedForecast]:
    """Forecast a job with each quantisation that it could use.

    Yields nothing if the checkpoint stores quantised weights, or if the job computes in float16 on a CPU. Quantisations
    that the job's ranks cannot shard are omitted.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        plan: The plan, which may cover only a sample of the job's rows.
        prompts: The token ids of all prompts.
        multiple: Rows of the job divided by rows of the plan. 1 if the plan covers all rows.
    """
    setting = setup.setting
    checkpoint = open_checkpoint(job.model.path) if setting.parts.weights is not None else setup.checkpoint
    if not isinstance(checkpoint, Checkpoint) or any(each.quantized for each in checkpoint.encoded.values()):
        return
    checkpoint = checkpoint.keep_quantized(frozenset())
    if (setting.device, setting.numerics.dtype) == ("cpu", "float16"):
        return
    for name in dict.fromkeys((*COMPARED[setting.device], setting.numerics.quantization)):
        held = checkpoint.for_quantization(name)
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
    times = step_times(engine.setup.setting, engine.machine.cost, None)
    return replace(engine, times=times, machine=replace(engine.machine, time=times.time))
