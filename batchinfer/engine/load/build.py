"""Builds an Engine that is ready to step. Its weights are loaded as a LoadConfig says; an EngineConfig, which may be
known later, says what is made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.core.samples import ExpertTokens
from batchinfer.engine.config import (
    DEFAULT_BLOCK_SIZE,
    Agreed,
    EngineConfig,
    EngineInfo,
    LoadConfig,
    Untimed,
    alone,
)
from batchinfer.engine.graphs.decode_graphs import GraphOps
from batchinfer.engine.graphs.graph_capture import GpuRecorder, GraphRecorder, R, Replay
from batchinfer.engine.kv.cache_layout import cache_layout
from batchinfer.engine.kv.memory import JobSize, cache_blocks
from batchinfer.engine.load.device_fit import CacheRoom, Fitted, fit
from batchinfer.engine.load.dummy_steps import GpuMeter
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.budget import admission_costs, captured_tokens, scheduler_config
from batchinfer.engine.schedule.constraints import ConstraintMasks, ConstraintsFor
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.schedule.sequence import StopStreams
from batchinfer.engine.tensors.cache_tensors import allocate_caches, block_bytes
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.memory import available_memory
from batchinfer.models.arithmetic import Arithmetic
from batchinfer.models.decoder.expert_loads import ExpertLoads
from batchinfer.models.ops.interface import LayerCache, Ops
from batchinfer.models.ops.prefill_choice import PromptSizes, fastest_prefill
from batchinfer.models.sources import Decoders, Source, checkpoint_source
from batchinfer_kernels.cpu.memory import keep_freed_memory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    info: EngineInfo
    read_loads: Callable[[], ExpertTokens]  # how many tokens experts were given so far; waits for the device


@dataclass(frozen=True, slots=True, eq=False)
class LoadedWeights:
    """A model's weights on their device, packed for its operators: all of an engine that needs no plan."""

    config: LoadConfig
    source: Source
    ops: Ops
    arithmetic: Arithmetic
    threads: int
    decoder: Decoders
    masks: ConstraintMasks | None
    untimed: Untimed

    def engine(
        self, config: EngineConfig, stop_streams: StopStreams | None = None, agreed: Agreed = alone
    ) -> BuiltEngine:
        """Wire the rooms together; raises as `model` does."""
        loaded = self.model(config, agreed)
        return BuiltEngine(loaded.engine(config.peaks, stop_streams), loaded.info, loaded.expert_loads.read)

    def model(self, config: EngineConfig, agreed: Agreed = alone) -> LoadedModel:
        """Size the KV cache and warm up. A choice by time is made through `agreed`. Raises OutOfMemory when the job
        cannot fit."""
        source, device = self.source, self.arithmetic.device
        # no longer than what runs: a checkpoint may name billions of positions
        longest = max(1, min(config.longest, config.max_model_len))
        cost, block_size = source.cost(self.arithmetic), config.block_size or DEFAULT_BLOCK_SIZE
        limits = scheduler_config(config, cost, source.can_be_captured)
        sizes = PromptSizes(limits.max_num_batched_tokens, longest, block_size)
        ops = fastest_prefill(self.ops, sizes, device, source.plain_attention, agreed)
        model = self.decoder(ops, longest)
        eos = frozenset(source.spec.eos_token_ids)
        sampler = Sampler(eos, self.masks, device.type == "cpu", model.classifier)
        layout = cache_layout(source.spec.caches, block_size, longest)
        runner = ModelRunner(model, ops, [], layout, sampler, cost, device)
        runner.give_adapters(_numbers(config.load.adapters, source))
        memory = _CacheMemory(config, source, runner, limits, self.arithmetic.dtype, longest)
        counters = model.expert_loads if source.can_be_captured else None
        fitted = _fit(runner, limits, memory.room(), counters, config, self.untimed)
        model.expert_loads.restart()  # what was measured and compiled with is nobody's work
        return LoadedModel(
            runner=fitted.runner,
            limits=fitted.limits,
            engine_limits=EngineLimits(source.spec.content_roots(longest), eos),
            info=_info(self.config, source, fitted, memory.block_bytes, self.threads),
            expert_loads=model.expert_loads,
            masks=self.masks,
            drafts=config.drafts,
        )


def load_weights(
    config: LoadConfig,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    source: Source | None = None,
) -> LoadedWeights:
    """Load the weights. `source` takes the place of the checkpoint at `config.model`; work whose duration nobody knows,
    also in mid-job, is done inside of `untimed`.

    Raises Unavailable without the device, and what loading a checkpoint raises.
    """
    device, threads = _settled(config)
    if device.type == "cuda":
        _announce_compilations(untimed)
    source = source or checkpoint_source(
        config.model, config.kv_cache, config.quantization, config.adapters, config.adapter_places
    )
    arithmetic = _arithmetic(config, device)
    ops = source.choose_ops(arithmetic)
    decoder = source.load(ops, arithmetic)
    eos = frozenset(source.spec.eos_token_ids)
    masks = None if constraints is None else ConstraintMasks(constraints(eos, source.spec.vocab))
    return LoadedWeights(config, source, ops, arithmetic, threads, decoder, masks, untimed)


def load_model(
    config: EngineConfig,
    source: Source | None = None,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    agreed: Agreed = alone,
) -> LoadedModel:
    """Load the weights and size the KV cache; see `load_weights` and `LoadedWeights.model`."""
    return load_weights(config.load, constraints, untimed, source).model(config, agreed)


def _arithmetic(config: LoadConfig, device: torch.device) -> Arithmetic:
    return Arithmetic(
        dtype=getattr(torch, config.dtype),
        device=device,
        deterministic=config.deterministic,
        tiles=config.tiles,
        kv_cache=config.kv_cache,
    )


@dataclass(frozen=True, slots=True)
class _CacheMemory:
    """Sizes and allocates the KV cache of a runner, in the memory that is free when it is asked."""

    config: EngineConfig
    source: Source
    runner: ModelRunner
    limits: SchedulerConfig
    dtype: torch.dtype
    longest: int  # tokens of a sequence

    @property
    def block_bytes(self) -> int:
        runner = self.runner
        return block_bytes(runner.ops, self.source.spec.caches, runner.layout, self.dtype.itemsize)

    def room(self) -> CacheRoom:
        """Return what `fit` asks of the cache."""
        least = self.runner.layout.sizes.alone(self.longest, self.limits.max_num_batched_tokens)
        return CacheRoom(self._blocks, self._allocate, self.longest, least)

    def _blocks(self, needed: int) -> int:
        """How many blocks the cache gets, where steps need `needed` bytes; see `cache_blocks`."""
        config, limits, device = self.config, self.limits, self.runner.device
        free = _free_bytes(device)
        if device.type == "cpu" and config.memory is not None:
            free = min(free, max(0, config.memory - self.source.weight_bytes(self.runner.cost)))
        return cache_blocks(
            block_bytes=self.block_bytes,
            tables=self.runner.layout.sizes,
            job=JobSize(config.longest, limits.max_num_seqs, limits.max_num_batched_tokens),
            memory=config.kv_memory,
            free=free,
            kind=device.type,
            needed=needed,
        )

    def _allocate(self, blocks: int) -> list[LayerCache]:
        runner = self.runner
        return allocate_caches(
            runner.ops, self.source.spec.caches, runner.layout, blocks, self.dtype, runner.device
        )


def _numbers(adapters: Iterable[tuple[str, Path]], source: Source) -> dict[str, int]:
    """Number the adapters in the order in which they were loaded; 0: the weights as they are, into which one may be
    merged."""
    beside = {name: number for number, name in enumerate(source.adapters, 1)}
    return {"": 0} | {name: beside.get(name, 0) for name, _ in adapters}


def _info(config: LoadConfig, source: Source, fitted: Fitted, block_bytes: int, threads: int) -> EngineInfo:
    runner, limits = fitted.runner, fitted.limits
    whose, linear = source.computed_by(runner.ops)
    return EngineInfo(
        ops=whose,
        device=_device_name(runner.device),
        dtype=config.dtype,
        threads=threads,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=runner.layout.block_size,
        blocks=fitted.blocks,
        kv_bytes=fitted.blocks * block_bytes,
        weight_bytes=source.weight_bytes(runner.cost),
        quantization=config.quantization,
        deterministic=config.deterministic,
        linear=linear,
        gpu=_gpu(runner.device),
        capture_s=runner.capture_s,
        graph_bytes=runner.graph_bytes,
        free_bytes=fitted.free_bytes,
    )


def _settled(config: LoadConfig) -> tuple[torch.device, int]:
    """Set this process up for the job's device; the device and the number of threads. Raises Unavailable."""
    device, threads = _device(config), _set_threads(config)
    if config.device == "cuda":
        keep_partial_sums()
    return device, threads


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
    return Fitted(
        replace(runner, caches=room.allocate(blocks)), replace(limits, admission_costs=None), blocks
    )


def _by_operators(found: Fitted, config: EngineConfig) -> Fitted:
    """Steps that read prompts are launched an operator at a time: more of it has to be hidden."""
    costs = found.limits.admission_costs and admission_costs(found.runner.cost, config.peaks, pieces=False)
    return replace(found, limits=replace(found.limits, admission_costs=costs))


class _Uncounted(GraphRecorder):
    """Records without counting experts' tokens: a step that is captured runs for nobody, and is replayed afterwards."""

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


def _free_bytes(device: torch.device) -> int:
    """Count the bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def _device(config: LoadConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            "engine.device is cuda, and torch finds no CUDA device; use device: cpu, or check the driver"
        )
    return torch.device(config.device)


def _announce_compilations(untimed: Untimed) -> None:
    """Let no watchdog take the compilation of a kernel for a hang: new sizes may come up in mid-job."""
    from batchinfer_kernels.gpu.compilations import announce_compilations

    announce_compilations(untimed)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _gpu(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def keep_partial_sums() -> None:
    """Tell torch, for this process, not to round partial sums of the vendor's matrix products to 16 bits: which ones
    are split along the inner dimension depends on the number of rows."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _set_threads(config: LoadConfig) -> int:
    """One thread for each core that this process may use, or fewer: more would only wait for one another."""
    if config.device == "cpu":
        keep_freed_memory()
    usable = usable_cpus()
    if config.threads is not None and config.threads > usable:
        _log.warning(
            "engine.threads is %d, but this process may use only %d cores; that many threads are used",
            config.threads,
            usable,
        )
    torch.set_num_threads(min(config.threads or usable, usable))
    return torch.get_num_threads()
