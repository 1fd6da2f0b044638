"""Simulates a run with the real engine and a runner that computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.samples import LAUNCH_MODES, StepSample
from batchinfer.engine.config import max_queued_requests
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.alternating_engines import AlternatingEngines
from batchinfer.engine.loop.engine import Engine, EngineLimits, StepOutput
from batchinfer.engine.loop.multi_step import MultiStepDecoding
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.schedule.step_plan import COUNTS
from batchinfer.plan.simulation.clock import Captures, Clock, LaunchPredictor
from batchinfer.plan.simulation.counting_runner import END, CountingRunner
from batchinfer.plan.simulation.stages import SimulatedStage, StageSchedule
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, Peaks


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """The limits and costs of an engine, from which its run can be simulated without weights.

    Attributes:
        cost: FLOPs and bytes of the model's steps.
        layout: Layout of the KV cache.
        blocks: Number of KV-cache blocks, divided among the micro-batches.
        scheduler: Limits of the scheduler.
        roots: Tells which requests may share cached prefixes.
        time: Predicts the seconds of a step. With `stages`, it has the peaks of one rank.
        looks_ahead: Whether the host schedules a step while the previous one runs, as on GPUs.
        captures: Limits of CUDA graphs. None on a CPU.
        stages: Pipeline stages of a sharded model. Empty for other models.
        ranks: Number of ranks of all stages.
        repeats: Whether multi-step decoding is allowed.
    """

    cost: ModelCost
    layout: CacheLayout
    blocks: int
    scheduler: SchedulerConfig
    roots: ContentRoots
    time: StepTime
    looks_ahead: bool
    captures: Captures | None = None
    stages: tuple[SimulatedStage, ...] = ()
    ranks: int = 1
    repeats: bool = False

    @property
    def turns(self) -> int:
        """Return the number of micro-batches that are in the pipeline at the same time. 1 without pipeline stages."""
        return max(1, min(len(self.stages), self.scheduler.max_num_seqs))

    @property
    def peaks(self) -> Peaks:
        """Return the peak FLOP/s and bandwidth of all ranks together."""
        return self.time.peaks.times(self.ranks)


@dataclass(frozen=True, slots=True)
class SimulatedTotals:
    """The totals of a simulated run. Tokens are counted as in the columns of the run table.

    Attributes:
        seconds: Duration of the run.
        steps: Number of steps.
        prefill_tokens: Prompt tokens that were computed, recomputed tokens included.
        decode_tokens: Generated tokens that were computed.
        cached_tokens: Prompt tokens that were reused from the cache.
        recomputed_tokens: Tokens that were computed again after a preemption.
        sampled_tokens: Sampled tokens and scored positions.
        scored_positions: Prompt positions with log-probabilities.
        preemptions: Number of preemptions.
        running: Sum over all steps of the number of running rows.
        flops: Floating-point operations.
        bytes: Bytes that were read and written.
        roofline_s: Sum over all steps of the roofline time in seconds.
        waited_s: Mean idle seconds of a pipeline stage.
        full_graph_steps: Steps that a GPU ran as one CUDA graph.
        piecewise_graph_steps: Steps that a GPU ran as CUDA graphs of the parts between two layers' attention.
        eager_steps: Steps that a GPU ran without a CUDA graph.
        full_graph_tokens: Tokens of `full_graph_steps`.
        piecewise_graph_tokens: Tokens of `piecewise_graph_steps`.
        eager_tokens: Tokens of `eager_steps`.
    """

    seconds: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    sampled_tokens: int = 0
    scored_positions: int = 0
    preemptions: int = 0
    running: int = 0
    flops: int = 0
    bytes: int = 0
    roofline_s: float = 0.0
    waited_s: float = 0.0
    full_graph_steps: int = 0
    piecewise_graph_steps: int = 0
    eager_steps: int = 0
    full_graph_tokens: int = 0
    piecewise_graph_tokens: int = 0
    eager_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Return the number of computed prompt tokens, without tokens that were recomputed after a preemption."""
        return self.prefill_tokens - self.recomputed_tokens

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens of all answers in the simulated run."""
        return self.sampled_tokens - self.scored_positions

    @property
    def tokens(self) -> int:
        """Return the number of prompt and generated tokens that the model computed in the whole run."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def launches(self) -> dict[str, int] | None:
        """Return the numbers of steps and tokens by launch mode, or None if no step was launched on a GPU.

        The keys are attributes of this class, such as `eager_steps` and `eager_tokens`.
        """
        found = {name: getattr(self, name) for name in _LAUNCHED}
        return found if any(found.values()) else None

    def counted(self, replicas: float) -> SimulatedTotals:
        """Return the totals of several replicas that each run as this one does, in parallel.

        Counts are multiplied by the number of replicas; times are unchanged.

        Args:
            replicas: Number of replicas, which may be a fraction.
        """
        names = ("steps", *_SUMMED, *_LAUNCHED)
        counts = {name: round(getattr(self, name) * replicas) for name in names}
        return replace(self, **counts)

    def plus(self, sample: StepSample, seconds: float) -> SimulatedTotals:
        """Return the totals of this run with one more step.

        Args:
            sample: Counts of the step.
            seconds: When the step ends, in seconds since the start of the run.
        """
        sums = {name: getattr(self, name) + getattr(sample, name) for name in _SUMMED}
        if sample.launch is not None:
            steps, tokens = f"{sample.launch}_steps", f"{sample.launch}_tokens"
            sums[steps] = getattr(self, steps) + 1
            sums[tokens] = getattr(self, tokens) + sample.prefill_tokens + sample.decode_tokens
        return replace(
            self,
            **sums,
            seconds=seconds,
            steps=self.steps + 1,
            roofline_s=self.roofline_s + (sample.roofline_s or 0.0),
        )


_SUMMED = (
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "recomputed_tokens",
    "sampled_tokens",
    "scored_positions",
    "preemptions",
    "running",
    "flops",
    "bytes",
)
_LAUNCHED = tuple(f"{mode}_{unit}" for unit in ("steps", "tokens") for mode in LAUNCH_MODES)


def simulate(
    machine: SimulatedEngine, requests: Iterable[Request], outputs: Mapping[bytes, int]
) -> SimulatedTotals:
    """Simulate a run of some requests, and return its totals.

    Args:
        machine: The engine.
        requests: The requests, in order of execution.
        outputs: Forecast number of answer tokens, by work key.
    """
    found, clock = SimulatedTotals(), machine_clock(machine)
    for output in simulated_steps(machine, requests, outputs, clock):
        for sample in output.samples:
            found = found.plus(sample, sample.started_s + sample.duration_s)
    return replace(found, waited_s=clock.stages.waited_s)


def machine_clock(machine: SimulatedEngine) -> Clock:
    """Create a clock for a simulated run, with the pipeline stages of the engine."""
    return Clock(stages=StageSchedule(max(1, len(machine.stages))), asks_last=machine.captures is None)


def simulated_steps(
    machine: SimulatedEngine,
    requests: Iterable[Request],
    outputs: Mapping[bytes, int],
    clock: Clock | None = None,
) -> Iterator[StepOutput]:
    """Simulate a run of some requests, and yield the output of each step.

    The engine receives new requests as earlier ones finish, as in a real run.

    Args:
        machine: The engine.
        requests: The requests, in order of execution.
        outputs: Forecast number of answer tokens, by work key.
        clock: The clock that the run advances. None: a new clock.
    """
    adapters: dict[bytes, str] = {}
    engine = counting_engine(machine, outputs, adapters, clock or machine_clock(machine))
    waiting, more = iter(requests), True
    while more or engine.unfinished:
        room = max_queued_requests(machine.scheduler.max_num_seqs) - engine.unfinished
        fed = list(islice(waiting, max(0, room)))
        more = more and (room <= 0 or len(fed) == room)
        if machine.cost.adapted:
            adapters.update((request.key, request.params.adapter) for request in fed)
        engine.add([_counted(request, machine.repeats) for request in fed])
        if engine.unfinished:
            yield engine.step()


def _counted(request: Request, repeats: bool) -> Request:
    # A penalty marks the rows that cannot use multi-step decoding
    counted = request.params.for_simulation
    if repeats and not request.params.is_stateless:
        counted = replace(counted, presence_penalty=1.0)
    return replace(request, params=counted)


def block_bytes(layout: CacheLayout, cost: ModelCost) -> int:
    """Return the bytes of a KV-cache block over all layers.

    Args:
        layout: Layout of the KV cache.
        cost: The model's cost, with the bytes of a cached token.
    """
    return layout.depth * layout.block_size * max(size for _, size in cost.caches)


def counting_engine(
    machine: SimulatedEngine, outputs: Mapping[bytes, int], adapters: Mapping[bytes, str], clock: Clock
) -> Engine | AlternatingEngines:
    """Create a real engine, with scheduler and KV-cache blocks, whose runner computes nothing but advances a clock.

    Args:
        machine: The limits and costs of the engine.
        outputs: Forecast number of answer tokens, by work key.
        adapters: Names of adapters, by work key. Only used if the model has adapters.
        clock: The clock that the engine advances.
    """
    windows, turns = machine.layout.sizes.windows, machine.turns
    size = machine.layout.block_size
    pools = [BlockPool(machine.blocks // turns, size, len(windows)) for _ in range(turns)]
    block = block_bytes(machine.layout, machine.cost)
    runner = CountingRunner(
        cost=machine.cost,
        layout=machine.layout,
        time=machine.time,
        outputs=outputs,
        looks_ahead=machine.looks_ahead,
        taken_bytes=lambda: block * sum(pool.used + pool.cached for pool in pools),
        launching=None if machine.captures is None else LaunchPredictor(machine.captures),
        adapters=adapters,
        clock=clock,
        stages=machine.stages,
        wants=COUNTS._replace(repeats=machine.repeats),
    )
    rows = machine.scheduler.max_num_seqs // turns
    config = replace(machine.scheduler, max_num_seqs=rows)
    limits = EngineLimits(machine.roots, frozenset([END]))
    schedulers = (Scheduler(config, pool, windows=windows) for pool in pools)
    engines = [
        Engine(
            replace(runner),
            scheduler,
            limits,
            machine.peaks,
            clock=lambda: clock.host,
            repeated=_repeated(machine),
        )
        for scheduler in schedulers
    ]
    return engines[0] if turns == 1 else AlternatingEngines(engines)


def _repeated(machine: SimulatedEngine) -> MultiStepDecoding | None:
    costs = machine.scheduler.admission_costs
    return MultiStepDecoding(costs) if machine.repeats and costs is not None else None
