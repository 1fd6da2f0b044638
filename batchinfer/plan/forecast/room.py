"""Computes how many KV-cache blocks fit into the memory of an engine, after its weights. Handles sharded engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.core.errors import OutOfMemory
from batchinfer.engine.config import DEFAULT_BLOCK_SIZE, EngineConfig
from batchinfer.engine.drafts.draft_model import spare_blocks
from batchinfer.engine.kv.cache_layout import CacheLayout, cache_layout
from batchinfer.engine.kv.memory import JobSize, cache_blocks
from batchinfer.engine.schedule.budget import captured_tokens, scheduler_config
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.graph_sizes import kept_rows
from batchinfer.job import Job
from batchinfer.models.checkpoint.checkpoint import OWN, Checkpoint
from batchinfer.models.spec.spec import Caches, CacheSpec
from batchinfer.plan.forecast.sharded_model import ShardedModel, shard_model
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.setting import Setting, engine_weights
from batchinfer.plan.simulation.clock import Captures
from batchinfer.plan.simulation.simulator import block_bytes
from batchinfer_kernels.cost import PANEL_BYTES, ModelCost


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """The capacity of an engine for sequences.

    Attributes:
        limits: Limits of the scheduler, such as the maximum numbers of rows and tokens per step.
        layout: Layout of the KV cache.
        blocks: Number of KV-cache blocks.
        sharded: The model's shard for each pipeline stage. None if the model is not sharded.
    """

    limits: SchedulerConfig
    layout: CacheLayout
    blocks: int
    sharded: ShardedModel | None


def engine_room(job: Job, setup: Setup, longest: int) -> EngineRoom:
    """Compute the capacity of a job's engine for sequences, without starting the engine.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        longest: Maximum number of tokens of a sequence.

    Raises:
        OutOfMemory: Not even one such sequence fits into memory.
    """
    setting = setup.setting
    config = setting.engine_config(job, longest)
    cost = setting.model_cost(setup.checkpoint)
    captured = setup.checkpoint.modelling == OWN
    limits = scheduler_config(config, cost, captured)
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    sharded = shard_model(setup, setting.placement.division)
    if sharded is None:
        kept: Caches = [CacheSpec(1, 1, window=window) for window in cost.windows]
        layout = cache_layout(kept, block_size, longest)
        own_block = block_bytes(layout, cost) + draft_block_bytes(setup, block_size)
        taken = [(engine_weights(setup.models), own_block)]
    else:
        layout = cache_layout(sharded.whole.caches, block_size, longest)
        adapters = setting.adapter_bytes // setting.placement.division.ranks
        taken = [(p.weight_bytes + adapters, p.block_bytes(layout, sharded.whole)) for p in sharded.parts]
    spare = spare_blocks(block_size, limits.max_num_seqs) * draft_block_bytes(setup, block_size)
    spare += head_state_bytes(setup, limits.max_num_seqs)
    widens = setting.device == "cuda" and _widens(setup) and not setting.numerics.deterministic
    panel = PANEL_BYTES if widens else 0
    return EngineRoom(limits, layout, _blocks(setting, config, limits, layout, taken, panel, spare), sharded)


def _blocks(
    setting: Setting,
    config: EngineConfig,
    limits: SchedulerConfig,
    layout: CacheLayout,
    taken: Sequence[tuple[int, int]],
    panel: int,
    spare: int,
) -> int:
    on_gpu, ranks = setting.device == "cuda", setting.placement.division.ranks
    turns = min(setting.placement.division.stages, limits.max_num_seqs)
    size = JobSize(config.longest, limits.max_num_seqs // turns, limits.max_num_batched_tokens)
    whole, memory = config.memory or setting.placement.free_memory, config.kv_memory
    free = (setting.placement.hardware.memory_bytes or 1 << 62) if on_gpu else whole // ranks
    if isinstance(memory, int):
        memory = memory // (turns * (1 if on_gpu else ranks)) - spare
    rooms = (
        cache_blocks(
            block, layout.sizes, size, memory, (free - weights) // turns, setting.device, panel + spare
        )
        for weights, block in taken
    )
    return turns * min(rooms)


def draft_block_bytes(setup: Setup, block_size: int) -> int:
    """Return the bytes that a draft model or draft heads add to each block of the KV cache, or 0 without them.

    Args:
        setup: The job's model, tokenizer and setting.
        block_size: Tokens per block.
    """
    drafting, heads = setup.engine_draft_model, setup.setting.parts.heads
    if heads is not None:
        return block_size * heads.token_bytes(setup.setting.numerics.itemsize)
    return 0 if drafting is None else drafting.setting.model_cost(drafting.checkpoint).kv_bytes(block_size)


def head_state_bytes(setup: Setup, max_num_seqs: int) -> int:
    """Return the bytes of the hidden states that a GPU stores as input of draft heads. 0 on a CPU or without heads.

    Args:
        setup: The job's model, tokenizer and setting.
        max_num_seqs: Maximum number of sequences in a step.
    """
    heads, setting = setup.setting.parts.heads, setup.setting
    if heads is None or setting.device != "cuda":
        return 0
    return heads.state_bytes(kept_rows(max_num_seqs), setting.numerics.itemsize)


def _widens(setup: Setup) -> bool:
    quantization = setup.setting.numerics.quantization
    return quantization in ("int4", "stored-int4") or (
        quantization == "stored-mxfp4"
        and isinstance(setup.checkpoint, Checkpoint)
        and any(
            linear.form is not None and linear.form.codes == "mxfp4" and not linear.experts
            for linear in setup.checkpoint.spec.linears()
        )
    )


def fits(job: Job, setup: Setup) -> bool:
    """Return True if the KV cache of an engine has room for the longest row that the job allows."""
    try:
        engine_room(job, setup, setup.setting.numerics.max_model_len)
    except OutOfMemory:
        return False
    return True


def captures_of(setup: Setup, cost: ModelCost, limits: SchedulerConfig, longest: int) -> Captures:
    """Return the largest steps, in rows and tokens, that an engine captures as CUDA graphs.

    All limits are 0 for models that third-party code runs, because their steps are not captured.

    Args:
        setup: The job's model, tokenizer and setting.
        cost: FLOPs and bytes of the model's steps.
        limits: Limits of the scheduler.
        longest: Maximum number of tokens of a sequence.
    """
    if setup.checkpoint.modelling != OWN:
        return Captures(0, 0, 0)
    most = limits.max_num_batched_tokens
    tokens = captured_tokens(cost, setup.setting.peaks, most)
    return Captures(min(limits.max_num_seqs, most), longest, tokens)
