"""Builds an Engine that is ready to step from an EngineConfig."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from batchinfer.cpus import usable_cpus
from batchinfer.engine.budget import step_tokens
from batchinfer.engine.cache_layout import cache_layout
from batchinfer.engine.cache_tensors import allocate_caches, block_bytes
from batchinfer.engine.config import DEFAULT_MAX_NUM_SEQS, EngineConfig, EngineInfo
from batchinfer.engine.decode_graphs import Captured, GraphOps, capture_on_gpu
from batchinfer.engine.device_fit import CacheRoom, Fitted, fit
from batchinfer.engine.engine import Engine, EngineLimits
from batchinfer.engine.kv_cache import BlockPool
from batchinfer.engine.memory import JobSize, cache_blocks, free_bytes
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.rehearsal import GpuMeter
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.sequence import StopStreams
from batchinfer.engine.table_sizes import TableSizes
from batchinfer.errors import Unavailable
from batchinfer.models.checkpoint import inspect_checkpoint
from batchinfer.models.decoder import Decoder
from batchinfer.models.expert_loads import ExpertLoads
from batchinfer.models.model_cost import model_cost
from batchinfer.models.outliers import WatchedWeights, warning_of
from batchinfer.models.spec import ModelSpec
from batchinfer.models.weights import CheckpointWeights, Weights
from batchinfer.ops.choose import choose_ops
from batchinfer.ops.interface import Ops
from batchinfer.request import ExpertTokens
from batchinfer_kernels.cost import ModelCost, Peaks
from batchinfer_kernels.cpu.memory import keep_freed_memory

DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
DEFAULT_BLOCK_SIZE = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    info: EngineInfo
    read_loads: Callable[[], ExpertTokens]  # how many tokens experts were given so far; waits for the device


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that an engine can be built of: what it is, and where its weights come from."""

    spec: ModelSpec
    parameters: int  # values in all its tensors
    weights: Callable[[torch.dtype, torch.device], Weights]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device with its KV cache tensors: all of an engine that is slow to make."""

    runner: ModelRunner
    limits: SchedulerConfig
    engine_limits: EngineLimits
    info: EngineInfo
    expert_loads: ExpertLoads

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
        return Engine(runner or self.runner, scheduler, self.engine_limits, peaks, stop_streams)


def build_engine(config: EngineConfig, stop_streams: StopStreams | None = None) -> BuiltEngine:
    """Load the checkpoint that `config.model` names and wire the rooms together; raises as `load_model` does."""
    loaded = load_model(config)
    return BuiltEngine(loaded.engine(config.peaks, stop_streams), loaded.info, loaded.expert_loads.read)


def checkpoint_source(path: Path) -> ModelSource:
    """The model of a checkpoint folder. Raises what inspecting a checkpoint raises."""
    checkpoint = inspect_checkpoint(path)
    parameters = sum(math.prod(tensor.info.shape) for tensor in checkpoint.tensors.values())
    return ModelSource(checkpoint.spec, parameters, partial(CheckpointWeights, checkpoint))


def load_model(config: EngineConfig, source: ModelSource | None = None) -> LoadedModel:
    """Load the weights and size the KV cache; `source` takes the place of the checkpoint at `config.model`.

    Raises Unavailable without the device, OutOfMemory when the job cannot fit, and what loading a checkpoint raises.
    """
    device, dtype = _device(config), getattr(torch, config.dtype)
    threads = _set_threads(config)
    source = source or checkpoint_source(config.model)
    ops = _ops(config, source.spec, device, dtype)
    # no longer than what runs: a checkpoint may name billions of positions
    longest = max(1, min(config.longest, config.max_model_len))
    quantized = config.quantization == "int8"
    weights = WatchedWeights(source.weights(dtype, device), source.spec)
    model = Decoder(source.spec, weights, ops, longest, device)
    warning = warning_of(weights.worst) if quantized else None
    if warning is not None:
        _log.warning("%s", warning)
    cost = model_cost(source.spec, dtype.itemsize, 1 if quantized else dtype.itemsize)
    limits, block_size = _scheduler_config(config, cost), config.block_size or DEFAULT_BLOCK_SIZE
    eos, caches = frozenset(source.spec.eos_token_ids), source.spec.caches
    layout = cache_layout(caches, block_size, longest)
    bytes_of_a_block = block_bytes(ops, caches, layout, dtype.itemsize)
    room = CacheRoom(
        blocks=partial(_blocks, config, device, bytes_of_a_block, layout.sizes, limits),
        allocate=lambda blocks: allocate_caches(ops, caches, layout, blocks, dtype, device),
        longest=longest,
        least=layout.sizes.alone(longest, limits.max_num_batched_tokens),
    )
    runner = ModelRunner(model, ops, [], layout, Sampler(eos), cost, device)
    fitted = _fit(runner, limits, room, model.expert_loads)
    limits, blocks = fitted.limits, fitted.blocks
    info = EngineInfo(
        ops=ops.name,
        device=_device_name(device),
        dtype=config.dtype,
        threads=threads,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=block_size,
        blocks=blocks,
        kv_bytes=blocks * bytes_of_a_block,
        weight_bytes=_weight_bytes(source, cost),
        quantization=config.quantization,
        deterministic=config.deterministic,
        linear=ops.linear,
    )
    loads = model.expert_loads
    loads.restart()  # what was measured and compiled with is nobody's work
    return LoadedModel(fitted.runner, limits, EngineLimits(longest, eos), info, loads)


def _fit(runner: ModelRunner, limits: SchedulerConfig, room: CacheRoom, loads: ExpertLoads) -> Fitted:
    """Give the runner its cache. On a GPU whose steps can be captured, they are measured first."""
    if isinstance(runner.ops, GraphOps):
        capture = capture_on_gpu()

        def uncounted(run: Callable[[], Tensor]) -> Captured:
            with loads.paused():  # a step that is captured runs for nobody, and is replayed afterwards
                return capture(run)

        return fit(runner, limits, room, GpuMeter(runner.device), uncounted)
    blocks = room.blocks(0)
    return Fitted(replace(runner, caches=room.allocate(blocks)), limits, blocks)


def _blocks(
    config: EngineConfig,
    device: torch.device,
    bytes_of_a_block: int,
    sizes: TableSizes,
    limits: SchedulerConfig,
    needed: int,
) -> int:
    """How many blocks the cache gets of the memory that is free now; see `cache_blocks`."""
    job = JobSize(config.longest, limits.max_num_seqs, limits.max_num_batched_tokens)
    free = free_bytes(device)
    return cache_blocks(bytes_of_a_block, sizes, job, config.kv_memory, free, device.type, needed)


def _ops(config: EngineConfig, model: ModelSpec, device: torch.device, dtype: torch.dtype) -> Ops:
    """Choose the operators. Raises Unavailable if none here have the arithmetic that the job asks for."""
    attention, arithmetic = model.attention, (config.quantization, config.deterministic)
    sizes = (attention.group, attention.head_dim)
    kv_heads, latent = attention.kv_heads, attention.cache.latent
    return choose_ops(device, dtype, *sizes, *arithmetic, kv_heads, config.linear, latent)


def _weight_bytes(source: ModelSource, cost: ModelCost) -> int:
    """Bytes of the loaded weights. A tied head counts once, unless it is quantised beside its embedding."""
    if not cost.quantized:
        return source.parameters * cost.itemsize
    head = source.spec.head.values
    linear = sum(linear.values for linear in source.spec.linears() if not linear.exact)
    others = source.parameters - linear - (0 if source.spec.tied else head)
    return (linear + head) * cost.weight_itemsize + others * cost.itemsize


def _scheduler_config(config: EngineConfig, cost: ModelCost) -> SchedulerConfig:
    seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    default = DEFAULT_MAX_NUM_BATCHED_TOKENS[config.device]
    tokens = config.max_num_batched_tokens or step_tokens(cost, config.peaks, seqs, default)
    return SchedulerConfig(seqs, tokens, config.prefix_caching)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            "engine.device is cuda, and torch finds no CUDA device; use device: cpu, or check the driver"
        )
    return torch.device(config.device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _set_threads(config: EngineConfig) -> int:
    """One thread for each core that this process may use, or fewer: more would only wait for one another."""
    if config.device == "cpu":
        keep_freed_memory()
    usable = usable_cpus()
    if config.threads is not None and config.threads > usable:
        _log.warning(
            "engine.threads is %d; this process may use %d cores, so many are taken", config.threads, usable
        )
    torch.set_num_threads(min(config.threads or usable, usable))
    return torch.get_num_threads()
