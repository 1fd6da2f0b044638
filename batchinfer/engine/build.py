"""From an EngineConfig to an Engine that is ready to step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from batchinfer.cpus import usable_cpus
from batchinfer.engine.config import DEFAULT_MAX_NUM_SEQS, EngineConfig, EngineInfo
from batchinfer.engine.engine import Engine, EngineLimits
from batchinfer.engine.kv_cache import BlockPool
from batchinfer.engine.memory import cache_blocks, free_bytes
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.sequence import StopStreams
from batchinfer.errors import Unavailable
from batchinfer.models.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.decoder import load_decoder
from batchinfer.ops.choose import choose_ops

DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    info: EngineInfo


def build_engine(config: EngineConfig, stop_streams: StopStreams | None = None) -> BuiltEngine:
    """Load the model, size the KV cache, wire the rooms together.

    Raises Unavailable without the device, OutOfMemory when the job cannot fit, and what loading a checkpoint raises.
    """
    began = time.perf_counter()
    device, dtype = _device(config), getattr(torch, config.dtype)
    threads = _set_threads(config)
    checkpoint = inspect_checkpoint(config.model)
    heads = checkpoint.config.q_heads // checkpoint.config.kv_heads
    ops = choose_ops(device, dtype, heads, checkpoint.config.head_dim)
    model = load_decoder(checkpoint, ops, dtype, device, config.max_model_len)
    shape = checkpoint.config.decoder_shape(dtype.itemsize, dtype.itemsize)
    limits, block_size = _scheduler_config(config), config.block_size or DEFAULT_BLOCK_SIZE
    block_bytes = shape.kv_bytes_per_token * block_size
    free = free_bytes(device)
    blocks = cache_blocks(
        block_bytes, block_size, config.longest, limits.max_num_seqs, config.kv_memory, free, device.type
    )
    eos = frozenset(checkpoint.config.eos_token_ids)
    caches = model.allocate_cache(blocks, block_size, dtype, device)
    windows = tuple(checkpoint.config.windows)
    runner = ModelRunner(model, ops, caches, windows, block_size, Sampler(eos), shape, device)
    scheduler = Scheduler(limits, BlockPool(blocks, block_size))
    engine_limits = EngineLimits(config.max_model_len, eos)
    info = EngineInfo(
        ops=ops.name,
        device=_device_name(device),
        dtype=config.dtype,
        threads=threads,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=block_size,
        blocks=blocks,
        kv_bytes=blocks * block_bytes,
        weight_bytes=_weight_bytes(checkpoint, dtype),
        load_s=time.perf_counter() - began,
    )
    return BuiltEngine(Engine(runner, scheduler, engine_limits, config.peaks, stop_streams), info)


def _weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """As they lie in memory once loaded."""
    return sum(math.prod(tensor.info.shape) for tensor in checkpoint.tensors.values()) * dtype.itemsize


def _scheduler_config(config: EngineConfig) -> SchedulerConfig:
    seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    tokens = config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[config.device]
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
    """By default one thread for each core that this process may use."""
    torch.set_num_threads(config.threads or usable_cpus())
    return torch.get_num_threads()
