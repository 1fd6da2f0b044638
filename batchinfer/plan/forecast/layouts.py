"""The layouts in which a job could run on several devices: engines, and how the ranks of each divide its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batchinfer.core.errors import CannotSplit, OutOfMemory
from batchinfer.core.wording import size
from batchinfer.engine.ranks.parts import check_division, check_stored
from batchinfer.engine.ranks.seat import Division
from batchinfer.job import Job
from batchinfer.machine.devices import Devices
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.spec.spec import ModelSpec
from batchinfer.plan.expert_plan import ExpertPlan
from batchinfer.plan.forecast.divided import divided_spec
from batchinfer.plan.forecast.engine import TWO_PARTS, ForecastEngine, forecast_engine
from batchinfer.plan.forecast.room import engine_room
from batchinfer.plan.forecast.steady_state import estimated_s
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import Prompts
from batchinfer.plan.setup.expert_places import expert_plan
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.setting import Setting

# Layouts that are estimated to be within this factor of the fastest one are simulated, so many at the most, and as long
# as all simulations together take about as many seconds
NEAR, MOST_SIMULATED, SIMULATE_S = 1.3, 4, 20.0
EACH_S = 2.0
_ALIKE = 0.002  # a share of the time, by which simulations of alike layouts differ for no reason


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """The time and the memory that a layout takes. `experts`: among how many ranks whole experts are divided. Bytes are
    those of the device that holds most. `seconds` are None where it is `refused`: it does not fit, or cannot be; and
    where peaks are not known. `not_run`: why no engine runs it as yet. `waits`: the share of its time that a stage
    waits, if it was `simulated`."""

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
    imbalance: float | None = None  # of experts: see ExpertPlan; None: none are divided, or it is not known

    @property
    def name(self) -> str:
        """Return what people call it."""
        parts = [f"TP {self.tensor}"] * (self.tensor > 1) + [f"PP {self.stages}"] * (self.stages > 1)
        parts += [f"EP {self.experts}"] * (self.experts > 1)
        engines = f"{self.engines} engine{'s' * (self.engines > 1)}"
        return f"{' × '.join(parts)}, {engines}" if parts else engines

    @property
    def options(self) -> dict[str, int]:
        """Return the options of `engine` that make it."""
        return {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.stages,
            "data_parallel": self.engines,
        }


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layout, and the engine that would run it; None: it is refused."""

    layout: LayoutForecast
    engine: ForecastEngine | None


def layout_forecasts(
    job: Job, setup: Setup, plan: Plan, prompts: Prompts, multiple: float, devices: Devices
) -> tuple[LayoutForecast, ...]:
    """Return all layouts of a job on so many devices, the chosen one first and refused ones last; none for a model that
    is not divided, and for a single device. Seconds are those of the engines, from what is known of the devices without
    runs of this model. `multiple`: as in ForecastEngine."""
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
    """Yield the ways in which the model of an engine can be divided, the least first; those that leave more devices
    idle than another one with as many engines are left out."""
    for ranks in sorted({devices // engines for engines in range(1, devices + 1)}):
        yield from (Division(n, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0)


def _chosen(timed: Sequence[_Candidate]) -> _Candidate | None:
    """Return the fastest; of those that a simulation cannot tell from it the one that divides its model least."""
    least = min(map(_seconds, timed), default=0.0)
    alike = [one for one in timed if _seconds(one) <= least * (1 + _ALIKE)]
    return min(alike, key=lambda one: (one.layout.tensor * one.layout.stages, _seconds(one)), default=None)


def _seconds(one: _Candidate) -> float:
    return one.layout.seconds or 0.0


def _candidate(
    job: Job, setup: Setup, plan: Plan, devices: Devices, division: Division, multiple: float
) -> _Candidate:
    checkpoint, engines = setup.checkpoint, devices.count // division.ranks
    assert isinstance(checkpoint, Checkpoint), "other models are not divided"
    setting = setup.setting.with_placement(division=division, replicas=engines, gpus=())
    layout = LayoutForecast(division.tensor, division.stages, 1, engines)
    whole = checkpoint.spec.quantized(setting.numerics.quantization).caching(setting.numerics.kv_cache)
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
    """Return the layout with what is known of its experts."""
    if experts is None:
        return layout
    return replace(layout, experts=experts.ranks, imbalance=experts.expected)


def _misfit(whole: ModelSpec, division: Division, setting: Setting, why: str) -> str:
    """Say why a layout does not fit: for its weights alone, or for its KV cache, which `why` says."""
    memory = setting.placement.hardware.memory_bytes
    weights = divided_spec(whole, division, setting).weight_bytes
    if memory is None or weights < memory:
        return f"does not fit: {why}"
    return f"does not fit: weights take {size(weights)}, and a device has {size(memory)}"


def _with_memory(layout: LayoutForecast, engine: ForecastEngine) -> LayoutForecast:
    machine = engine.machine
    divided = engine_room(engine.job, engine.setup, engine.plan.longest).divided
    if divided is None:
        return replace(layout, weight_bytes=engine.setup.models[0].held_bytes, kv_bytes=engine.kv_cache_bytes)
    most = max(part.block_bytes(machine.layout, divided.whole) for part in divided.parts)
    return replace(layout, weight_bytes=divided.weight_bytes, kv_bytes=machine.blocks * most)


def _timed(fitting: Sequence[_Candidate], prompts: Prompts) -> list[_Candidate]:
    """Simulate those that may be the fastest, and return all: the others as much slower as they were estimated to
    be."""
    found, spent_s = list[_Candidate](), 0.0
    for one in fitting[:MOST_SIMULATED]:
        takes_s = _simulating_s(one)
        if _seconds(one) > NEAR * _seconds(fitting[0]) or spent_s + takes_s > SIMULATE_S:
            break
        spent_s += takes_s
        found.append(_simulated(one, prompts))
    return [*found, *_as_slow(fitting[len(found) :], fitting, found)]


def _simulating_s(one: _Candidate) -> float:
    """Return about how long it takes to simulate a layout."""
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
    """Return others with seconds in proportion to those of the fastest one that was simulated."""
    if not simulated or not estimated or not _seconds(estimated[0]):
        return list(others)
    times = _seconds(simulated[0]) / _seconds(estimated[0])
    layouts = (replace(one.layout, seconds=_seconds(one) * times) for one in others)
    return [replace(one, layout=layout) for one, layout in zip(others, layouts, strict=True)]
