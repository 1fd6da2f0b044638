"""Builds an Engine that is ready to step from an EngineConfig."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.core.samples import ExpertTokens
from batchinfer.engine.config import DEFAULT_BLOCK_SIZE, Agreed, EngineConfig, EngineInfo, Untimed, alone
from batchinfer.engine.graphs.decode_graphs import GraphOps
from batchinfer.engine.graphs.graph_capture import GpuRecorder, GraphRecorder, R, Replay
from batchinfer.engine.kv.cache_layout import cache_layout
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.kv.memory import JobSize, cache_blocks
from batchinfer.engine.kv.table_sizes import TableSizes
from batchinfer.engine.load.device_fit import CacheRoom, Fitted, fit
from batchinfer.engine.load.rehearsal import GpuMeter
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import ConstraintMask, Sampler
from batchinfer.engine.schedule.budget import captured_tokens, refill_costs, scheduler_config
from batchinfer.engine.schedule.constraints import Constraints, ConstraintsFor
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.schedule.sequence import StopStreams
from batchinfer.engine.tensors.cache_tensors import allocate_caches, block_bytes
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.memory import available_memory
from batchinfer.models.arithmetic import Arithmetic
from batchinfer.models.decoder.expert_loads import ExpertLoads
from batchinfer.models.ops.prefill_choice import PromptSizes, fastest_prefill
from batchinfer.models.sources import Source, checkpoint_source
from batchinfer_kernels.cost import Peaks
from batchinfer_kernels.cpu.memory import keep_freed_memory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    info: EngineInfo
    read_loads: Callable[[], ExpertTokens]  # how many tokens experts were given so far; waits for the device


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device with its KV cache tensors: all of an engine that is slow to make."""

    runner: ModelRunner
    limits: SchedulerConfig
    engine_limits: EngineLimits
    info: EngineInfo
    expert_loads: ExpertLoads
    constraints: Constraints | None = None

    def engine(
        self,
        peaks: Peaks | None = None,
        stop_streams: StopStreams | None = None,
        runner: ModelRunner | None = None,
    ) -> Engine:
        """An engine whose cache holds nothing yet. Only the newest one of a model may be stepped: they share
        the cache tensors. `runner` stands in for the model's own.
        """
        windows = self.runner.layout.sizes.windows
        pool = BlockPool(self.info.blocks, self.info.block_size, len(windows))
        scheduler = Scheduler(self.limits, pool, windows=windows)
        limits = self.engine_limits
        return Engine(
            runner or self.runner, scheduler, limits, peaks, stop_streams, constraints=self.constraints
        )


def build_engine(
    config: EngineConfig,
    stop_streams: StopStreams | None = None,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    agreed: Agreed = alone,
) -> BuiltEngine:
    """Load the checkpoint that `config.model` names and wire the rooms together; raises as `load_model` does."""
    loaded = load_model(config, constraints=constraints, untimed=untimed, agreed=agreed)
    return BuiltEngine(loaded.engine(config.peaks, stop_streams), loaded.info, loaded.expert_loads.read)


def load_model(
    config: EngineConfig,
    source: Source | None = None,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    agreed: Agreed = alone,
) -> LoadedModel:
    """Load the weights and size the KV cache; `source` takes the place of the checkpoint at `config.model`, and what
    takes as long as it takes, also in mid-job, is done inside of `untimed`. A choice by time is made through `agreed`.

    Raises Unavailable without the device, OutOfMemory when the job cannot fit, and what loading a checkpoint raises.
    """
    device, dtype, threads = _settled(config)
    source = source or checkpoint_source(config.model, config.kv_cache, config.quantization == "stored")
    arithmetic = Arithmetic(
        dtype,
        device,
        quantization=config.quantization,
        deterministic=config.deterministic,
        tiles=config.tiles,
        kv_cache=config.kv_cache,
    )
    # no longer than what runs: a checkpoint may name billions of positions
    longest = max(1, min(config.longest, config.max_model_len))
    cost, block_size = source.cost(arithmetic), config.block_size or DEFAULT_BLOCK_SIZE
    limits = scheduler_config(config, cost, source.can_be_captured)
    sizes = PromptSizes(limits.max_num_batched_tokens, longest, block_size)
    ops = fastest_prefill(source.choose_ops(arithmetic), sizes, device, source.plain_attention, agreed)
    model = source.load(ops, arithmetic, longest)
    eos, caches = frozenset(source.spec.eos_token_ids), source.spec.caches
    layout = cache_layout(caches, block_size, longest)
    bytes_of_a_block = block_bytes(ops, caches, layout, dtype.itemsize)
    room = CacheRoom(
        blocks=partial(
            _blocks, config, device, bytes_of_a_block, layout.sizes, limits, source.weight_bytes(cost)
        ),
        allocate=lambda blocks: allocate_caches(ops, caches, layout, blocks, dtype, device),
        longest=longest,
        least=layout.sizes.alone(longest, limits.max_num_batched_tokens),
    )
    followed = None if constraints is None else constraints(eos, source.spec.vocab)
    mask = None if followed is None else ConstraintMask(followed)
    runner = ModelRunner(model, ops, [], layout, Sampler(eos, mask, device.type == "cpu"), cost, device)
    counters = model.expert_loads if source.can_be_captured else None
    fitted = _fit(runner, limits, room, counters, config, untimed)
    info = _info(config, source, fitted, (block_size, bytes_of_a_block), threads)
    model.expert_loads.restart()  # what was measured and compiled with is nobody's work
    engine_limits = EngineLimits(longest, eos, model.long_from)
    return LoadedModel(fitted.runner, fitted.limits, engine_limits, info, model.expert_loads, followed)


def _info(
    config: EngineConfig, source: Source, fitted: Fitted, block: tuple[int, int], threads: int
) -> EngineInfo:
    """`block`: its tokens and its bytes."""
    runner, limits = fitted.runner, fitted.limits
    whose, linear = source.computed_by(runner.ops)
    return EngineInfo(
        ops=whose,
        device=_device_name(runner.device),
        dtype=config.dtype,
        threads=threads,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=block[0],
        blocks=fitted.blocks,
        kv_bytes=fitted.blocks * block[1],
        weight_bytes=source.weight_bytes(runner.cost),
        quantization=config.quantization,
        deterministic=config.deterministic,
        linear=linear,
        gpu=_gpu(runner.device),
        capture_s=runner.capture_s,
        graph_bytes=runner.graph_bytes,
        free_bytes=fitted.free_bytes,
    )


def _settled(config: EngineConfig) -> tuple[torch.device, torch.dtype, int]:
    """The device, the dtype and the number of threads, of which this process takes notice. Raises Unavailable."""
    device, threads = _device(config), _set_threads(config)
    if config.device == "cuda":
        keep_partial_sums()
    return device, getattr(torch, config.dtype), threads


def _fit(
    runner: ModelRunner,
    limits: SchedulerConfig,
    room: CacheRoom,
    loads: ExpertLoads | None,
    config: EngineConfig,
    untimed: Untimed,
) -> Fitted:
    """Give the runner its cache. On a GPU steps are measured first, and then captured; `loads` are the counters of a
    model that can be captured, None one that cannot."""
    if isinstance(runner.ops, GraphOps):
        mixed = captured_tokens(runner.cost, config.peaks, limits.max_num_batched_tokens)
        capture = None if loads is None else _Uncounted(GpuRecorder(), loads, untimed)
        found = fit(runner, limits, room, GpuMeter(runner.device), capture, config.logprobs, mixed)
        return found if found.captures_pieces else _by_operators(found, config)
    blocks = room.blocks(0)
    return Fitted(replace(runner, caches=room.allocate(blocks)), replace(limits, refill=None), blocks)


def _by_operators(found: Fitted, config: EngineConfig) -> Fitted:
    """Steps that read prompts are launched an operator at a time: more of it has to be hidden."""
    refill = found.limits.refill and refill_costs(found.runner.cost, config.peaks, pieces=False)
    return replace(found, limits=replace(found.limits, refill=refill))


class _Uncounted(GraphRecorder):
    """A step that is captured runs for nobody, and is replayed afterwards."""

    def __init__(self, inner: GraphRecorder, loads: ExpertLoads, untimed: Untimed) -> None:
        self._inner, self._loads, self._untimed = inner, loads, untimed

    @property
    def taken_bytes(self) -> int:
        return self._inner.taken_bytes

    def warm_up(self, run: Callable[[], object]) -> None:
        with self._loads.paused(), self._untimed():  # kernels may be compiled
            self._inner.warm_up(run)

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        with self._loads.paused(), self._untimed():
            return self._inner.record(run)


def _blocks(
    config: EngineConfig,
    device: torch.device,
    bytes_of_a_block: int,
    sizes: TableSizes,
    limits: SchedulerConfig,
    weight_bytes: int,
    needed: int,
) -> int:
    """How many blocks the cache gets of the memory that is free now; see `cache_blocks`."""
    job = JobSize(config.longest, limits.max_num_seqs, limits.max_num_batched_tokens)
    free = _free_bytes(device)
    if device.type == "cpu" and config.memory is not None:
        free = min(free, max(0, config.memory - weight_bytes))
    return cache_blocks(bytes_of_a_block, sizes, job, config.kv_memory, free, device.type, needed)


def _free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            "engine.device is cuda, and torch finds no CUDA device; use device: cpu, or check the driver"
        )
    return torch.device(config.device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _gpu(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def keep_partial_sums() -> None:
    """Tell torch, for this process, not to round partial sums of the vendor's matrix products to 16 bits: which ones
    are split along the inner dimension depends on the number of rows."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _set_threads(config: EngineConfig) -> int:
    """One thread for each core that this process may use, or fewer: more would only wait for one another."""
    if config.device == "cpu":
        keep_freed_memory()
    usable = usable_cpus()
    if config.threads is not None and config.threads > usable:
        _log.warning(
            "engine.threads is %d, but this process may use only %d cores; that many threads are used",
            *(config.threads, usable),
        )
    torch.set_num_threads(min(config.threads or usable, usable))
    return torch.get_num_threads()
