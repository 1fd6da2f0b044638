"""Estimates an engine's time in closed form, to compare layouts before any is simulated."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.samples import LaunchMode
from batchinfer.engine.loop.multi_step import MultiStepDecoding
from batchinfer.plan.forecast.engine import ForecastEngine
from batchinfer.plan.simulation.simulator import SimulatedEngine
from batchinfer.plan.simulation.stages import StageWork
from batchinfer_kernels.cost import StepShape


@dataclass(frozen=True, slots=True)
class MeanRow:
    """The mean number of tokens of a job's rows.

    Attributes:
        prompt: Prompt tokens.
        own: Prompt tokens that are not part of a prefix computed for an earlier row.
        output: Output tokens.
    """

    prompt: float
    own: float
    output: float


def estimated_s(engine: ForecastEngine) -> float:
    """Return the approximate engine time of a plan in seconds, without a simulation.

    The engine is assumed to compute the rows in consecutive full batches: each batch first prefills all its
    prompts, then decodes all its answers.
    """
    plan, machine = engine.plan, engine.machine
    rows = plan.to_run * engine.multiple / engine.setup.setting.placement.replicas
    mean = MeanRow(
        plan.prompt_tokens / plan.to_run,
        max(1.0, (plan.prompt_tokens - plan.shared_prefix_tokens) / plan.to_run),
        plan.expected_tokens / plan.to_run,
    )
    room = machine.blocks * machine.layout.block_size / (mean.prompt + mean.output / 2)
    running = max(1.0, min(machine.scheduler.max_num_seqs, room, rows) / machine.turns)
    waves = max(1.0, rows / machine.turns / running)
    reading = running * mean.own / machine.scheduler.max_num_batched_tokens
    wave_s = mean.output * _decode_s(machine, running, mean) + reading * _prompt_s(machine, mean)
    return waves * wave_s


def _decode_s(machine: SimulatedEngine, rows: float, mean: MeanRow) -> float:
    count = round(rows)
    seen = count * machine.cost.seen(round(mean.prompt + mean.output / 2))
    steps = _at_once(machine, count, seen / machine.cost.layers, mean.output)
    return _interval_s(machine, StepShape(count, count, seen, seen), count, "full_graph", steps)


def _at_once(machine: SimulatedEngine, rows: int, cached: float, output: float) -> int:
    costs = machine.scheduler.admission_costs
    if costs is None or not machine.repeats:
        return 1
    chooser = MultiStepDecoding(costs)
    chooser.record_tokens(round(output), 1)
    return chooser.choose_steps(rows, round(cached))


def _prompt_s(machine: SimulatedEngine, mean: MeanRow) -> float:
    tokens = machine.scheduler.max_num_batched_tokens
    rows = max(1, round(tokens / mean.own))
    pairs = tokens * machine.cost.seen(max(1, round(mean.prompt - mean.own / 2)))
    read = rows * machine.cost.seen(round(mean.prompt))
    return _interval_s(machine, StepShape(tokens, rows, pairs, read), rows, "piecewise_graph")


def _interval_s(
    machine: SimulatedEngine, shape: StepShape, rows: int, mode: LaunchMode, steps: int = 1
) -> float:
    # A micro-batch runs again after every other micro-batch has run one step of the same size
    time, turns, captures = machine.time, machine.turns, machine.captures
    if captures is not None and not captures.rows:
        mode = "eager"
    layers = max((stage.cost.layers for stage in machine.stages), default=machine.cost.layers)
    host_s = time.host_s(rows, steps) / steps + time.launch_s(layers, None if captures is None else mode)
    work = [stage.work(shape, rows, time) for stage in machine.stages]
    work = work or [StageWork(time.device_s(shape, machine.cost, rows))]
    slowest, through = max(map(sum, work)), sum(map(sum, work))
    if machine.looks_ahead and len(work) == 1:
        return max(slowest, host_s)
    return max(turns * slowest, turns * host_s, through + host_s)
