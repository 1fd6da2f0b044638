"""Compares layouts of a job on several devices: the number of engines and the sharding of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batchinfer.core.errors import CannotSplit, OutOfMemory
from batchinfer.core.wording import size
from batchinfer.engine.ranks.division import Division
from batchinfer.engine.ranks.shards import check_division, check_stored
from batchinfer.job import Job
from batchinfer.machine.devices import Devices
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.spec.spec import ModelSpec
from batchinfer.plan.expert_plan import ExpertPlan
from batchinfer.plan.forecast.engine import TWO_PARTS, ForecastEngine, forecast_engine
from batchinfer.plan.forecast.room import engine_room
from batchinfer.plan.forecast.sharded_model import shard_into_stages
from batchinfer.plan.forecast.steady_state import estimated_s
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import Prompts
from batchinfer.plan.setup.expert_places import expert_plan
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.setting import Setting

# At most MOST_SIMULATED layouts are simulated, if their estimate is within a factor NEAR of the fastest one, and until
# all simulations together take SIMULATE_S seconds
NEAR, MOST_SIMULATED, SIMULATE_S = 1.3, 4, 20.0
EACH_S = 2.0
_ALIKE = 0.002  # relative noise between simulations of equivalent layouts


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """The forecast of a job with one layout: a number of engines, and the sharding of each.

    Attributes:
        tensor: Tensor-parallel size.
        stages: Pipeline-parallel size.
        experts: Expert-parallel size: the number of ranks among which whole experts are divided.
        engines: Number of engines.
        seconds: Engine time. None if the layout is refused or the peaks are unknown.
        simulated: Whether `seconds` was simulated. Otherwise it was estimated.
        waits: Share of time (0 to 1) that a pipeline stage is idle. None if not simulated.
        weight_bytes: Bytes of weights on the device with the largest shard.
        kv_bytes: Bytes of the KV cache on the device with the largest KV cache.
        refused: Why the layout does not fit into memory or is impossible. None if it is possible.
        not_run: Why engines do not support the layout yet. None if they do.
        chosen: Whether it is the fastest layout that can run.
        imbalance: Load of the most loaded rank of experts divided by the mean load. None if experts are not sharded or
            it is unknown.
    """

    tensor: int
    stages: int
    experts: int
    engines: int
    seconds: float | None = None
    simulated: bool = False
    waits: float | None = None
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    refused: str | None = None
    not_run: str | None = None
    chosen: bool = False
    imbalance: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the layout for people, such as `TP 2 × PP 2, 1 engine`."""
        parts = [f"TP {self.tensor}"] * (self.tensor > 1) + [f"PP {self.stages}"] * (self.stages > 1)
        parts += [f"EP {self.experts}"] * (self.experts > 1)
        engines = f"{self.engines} engine{'s' * (self.engines > 1)}"
        return f"{' × '.join(parts)}, {engines}" if parts else engines

    @property
    def options(self) -> dict[str, int]:
        """Return the keys and values of the job file's section `engine` that select this layout."""
        return {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.stages,
            "data_parallel": self.engines,
        }


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layout, and the simulated engine that would run it.

    Attributes:
        layout: The layout.
        engine: The engine. None if the layout is refused.
    """

    layout: LayoutForecast
    engine: ForecastEngine | None


def layout_forecasts(
    job: Job, setup: Setup, plan: Plan, prompts: Prompts, multiple: float, devices: Devices
) -> tuple[LayoutForecast, ...]:
    """Forecast a job with every possible layout on several devices. Step times of earlier runs are not used.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        plan: The plan, which may cover only a sample of the job's rows.
        prompts: The token ids of all prompts.
        multiple: Rows of the job divided by rows of the plan. 1 if the plan covers all rows.
        devices: The devices.

    Returns:
        The chosen layout, then the others by time, then the refused layouts. Empty with a single device, or if the
        model's code cannot be sharded.
    """
    if devices.count == 1 or not isinstance(setup.checkpoint, Checkpoint):
        return ()
    found = [_candidate(job, setup, plan, devices, one, multiple) for one in candidates(devices.count)]
    fitting = sorted((one for one in found if one.engine is not None), key=_seconds)
    runs = [one for one in fitting if one.layout.not_run is None]
    timed = _timed(runs, prompts) if setup.setting.peaks is not None else runs
    chosen = _chosen(timed)
    others = _as_slow([one for one in fitting if one.layout.not_run is not None], runs, timed)
    layouts = [replace(one.layout, chosen=one is chosen) for one in sorted(timed + others, key=_seconds)]
    refused = (one.layout for one in found if one.engine is None)
    return (*sorted(layouts, key=lambda layout: not layout.chosen), *refused)


def candidates(devices: int) -> Iterator[Division]:
    """Yield the possible ways to shard an engine's model on up to `devices` devices, fewest ranks first.

    For each number of engines, each engine gets the largest possible number of ranks. All divisions of these ranks into
    tensor-parallel and pipeline-parallel sizes are yielded.
    """
    for ranks in sorted({devices // engines for engines in range(1, devices + 1)}):
        yield from (Division(n, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0)


def _chosen(timed: Sequence[_Candidate]) -> _Candidate | None:
    least = min(map(_seconds, timed), default=0.0)
    alike = [one for one in timed if _seconds(one) <= least * (1 + _ALIKE)]
    return min(alike, key=lambda one: (one.layout.tensor * one.layout.stages, _seconds(one)), default=None)


def _seconds(one: _Candidate) -> float:
    return one.layout.seconds or 0.0


def _candidate(
    job: Job, setup: Setup, plan: Plan, devices: Devices, division: Division, multiple: float
) -> _Candidate:
    checkpoint, engines = setup.checkpoint, devices.count // division.ranks
    assert isinstance(checkpoint, Checkpoint), "other models are not sharded"
    setting = setup.setting.with_placement(division=division, replicas=engines, gpus=())
    layout = LayoutForecast(division.tensor, division.stages, 1, engines)
    whole = checkpoint.spec.quantized(setting.numerics.quantization).with_cache_dtype(
        setting.numerics.kv_cache
    )
    try:
        check_division(whole, division)
        check_stored(checkpoint, division)
        setting = setting.with_parts(experts=expert_plan(job, checkpoint, setting))
        layout = _with_experts(layout, setting.parts.experts)
        engine = forecast_engine(job, replace(setup, setting=setting), plan, devices, learns=False)
    except CannotSplit as error:
        return _Candidate(replace(layout, refused=str(error)), None)
    except OutOfMemory as error:
        return _Candidate(replace(layout, refused=_misfit(whole, division, setting, str(error))), None)
    engine = replace(engine, multiple=multiple)
    where = None
    if not devices.in_one_node(division.ranks):
        where = "all ranks of an engine run on one machine as yet"
    seconds = None if setting.peaks is None else estimated_s(engine)
    return _Candidate(replace(_with_memory(layout, engine), seconds=seconds, not_run=where), engine)


def _with_experts(layout: LayoutForecast, experts: ExpertPlan | None) -> LayoutForecast:
    if experts is None:
        return layout
    return replace(layout, experts=experts.ranks, imbalance=experts.expected)


def _misfit(whole: ModelSpec, division: Division, setting: Setting, why: str) -> str:
    memory = setting.placement.hardware.memory_bytes
    weights = shard_into_stages(whole, division, setting).weight_bytes
    if memory is None or weights < memory:
        return f"does not fit: {why}"
    return f"does not fit: weights take {size(weights)}, and a device has {size(memory)}"


def _with_memory(layout: LayoutForecast, engine: ForecastEngine) -> LayoutForecast:
    machine = engine.machine
    sharded = engine_room(engine.job, engine.setup, engine.plan.longest).sharded
    if sharded is None:
        return replace(layout, weight_bytes=engine.setup.models[0].held_bytes, kv_bytes=engine.kv_cache_bytes)
    most = max(part.block_bytes(machine.layout, sharded.whole) for part in sharded.parts)
    return replace(layout, weight_bytes=sharded.weight_bytes, kv_bytes=machine.blocks * most)


def _timed(fitting: Sequence[_Candidate], prompts: Prompts) -> list[_Candidate]:
    found, spent_s = list[_Candidate](), 0.0
    for one in fitting[:MOST_SIMULATED]:
        takes_s = _simulating_s(one)
        if _seconds(one) > NEAR * _seconds(fitting[0]) or spent_s + takes_s > SIMULATE_S:
            break
        spent_s += takes_s
        found.append(_simulated(one, prompts))
    return [*found, *_as_slow(fitting[len(found) :], fitting, found)]


def _simulating_s(one: _Candidate) -> float:
    assert one.engine is not None
    engines = one.engine.setup.setting.placement.replicas
    return one.engine.simulating_s / engines / one.engine.every(EACH_S) * TWO_PARTS


def _simulated(one: _Candidate, prompts: Prompts) -> _Candidate:
    assert one.engine is not None
    found = one.engine.forecast(prompts, EACH_S)
    layout = replace(one.layout, seconds=found.run.seconds, simulated=True, waits=found.waits)
    return _Candidate(layout, one.engine)


def _as_slow(
    others: Sequence[_Candidate], estimated: Sequence[_Candidate], simulated: Sequence[_Candidate]
) -> list[_Candidate]:
    if not simulated or not estimated or not _seconds(estimated[0]):
        return list(others)
    times = _seconds(simulated[0]) / _seconds(estimated[0])
    layouts = (replace(one.layout, seconds=_seconds(one) * times) for one in others)
    return [replace(one, layout=layout) for one, layout in zip(others, layouts, strict=True)]
