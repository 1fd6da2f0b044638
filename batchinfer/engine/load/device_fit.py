"""Sizes the KV cache of a GPU: measures the memory of the largest step and gives the rest to the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.wording import size
from batchinfer.engine.graphs.decode_graphs import DecodeGraphs, GraphOps
from batchinfer.engine.graphs.graph_capture import Capture, GraphRecorder
from batchinfer.engine.graphs.piecewise_graphs import PiecewiseGraphs, SplitModel, graph_bytes
from batchinfer.engine.load.dummy_steps import DummySteps, MemoryMeter
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.tapped_model import TappedModel
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.device_tables import GraphTables
from batchinfer.engine.tensors.graph_inputs import GraphSize
from batchinfer.engine.tensors.graph_sizes import DRAFT_QUERIES, MIN_SAMPLED_ROWS
from batchinfer.engine.tensors.step_state import StepState
from batchinfer.models.decoder.attention import StaticBuffers
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache

T = TypeVar("T")
_log = logging.getLogger(__name__)

# If a cache cannot be allocated, the next attempt uses this share of its blocks
RETRY_SHARE = 15 / 16


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Computes how large the KV cache of a GPU can be, and allocates it.

    Attributes:
        blocks: Returns the number of blocks that fit, given the number of bytes that steps need. It raises OutOfMemory
            if the longest sequence does not fit.
        allocate: Allocates a number of blocks and returns the cache of each layer. It raises torch.OutOfMemoryError.
        longest: The number of tokens of the longest sequence.
        least: The minimum number of blocks, with which each engine that shares the cache can run the longest sequence.
        min_over_ranks: Returns the minimum of a number over all ranks of the engine. All ranks must call it together.
    """

    blocks: Callable[[int], int]
    allocate: Callable[[int], list[LayerCache]]
    longest: int
    least: int
    min_over_ranks: Callable[[int], int] = int


@dataclass(frozen=True, slots=True, eq=False)
class FittedRunner:
    """A runner with its KV cache and the limits of its steps.

    Attributes:
        runner: The runner.
        limits: The maximum sizes of its steps, which fit into memory.
        blocks: The number of blocks of the KV cache.
        free_bytes: The free device memory in bytes after CUDA graphs were captured; None on a CPU.
    """

    runner: ModelRunner
    limits: SchedulerConfig
    blocks: int
    free_bytes: int | None = None

    @property
    def captures_pieces(self) -> bool:
        """True if prefill steps are replayed as CUDA graphs, in pieces between the attention of two layers."""
        runner = self.runner
        return isinstance(runner, DeviceRunner) and runner.mixed is not None and runner.mixed.covers(1)


def fit(
    runner: ModelRunner,
    limits: SchedulerConfig,
    room: CacheRoom,
    meter: MemoryMeter,
    capture: Capture | None,
    logprobs: int | None = None,
    mixed: int = 0,
    drafts: bool = False,
    trees: bool = False,
) -> FittedRunner:
    """Give a runner on a GPU the largest KV cache that leaves memory for its steps, and capture CUDA graphs.

    The maximum number of tokens per step is halved until the largest step fits. All ranks get the same sizes.

    Args:
        runner: The runner, without a KV cache.
        limits: The maximum sizes of its steps.
        room: Sizes and allocates the KV cache.
        meter: Measures device memory.
        capture: Captures graphs of decode steps. None: the model cannot be captured.
        logprobs: The highest number of log-probabilities per token that a row requests. None: no row requests any.
        mixed: The number of tokens of the largest prefill step that is captured in pieces; 0 to capture none.
        drafts: True if rows may have drafts, which are verified by separate graphs.
        trees: True if drafts may form trees, provided the runner supports them.

    Raises:
        OutOfMemory: The longest sequence or a step of one token does not fit.
    """
    profile = _profile(runner, limits, room, meter, logprobs, mixed)
    meter.restart()
    limits = profile.limits
    recorder = capture if isinstance(capture, GraphRecorder) else None
    buffers: StaticBuffers | None = None
    if recorder is not None:
        buffers = _on_all(_static_buffers(runner, min(mixed, limits.max_num_batched_tokens)), room)
    needed = profile.step_bytes + (graph_bytes(buffers.tokens, profile.layers) if buffers else 0)
    # Needed twice: graphs keep their own memory, in addition to steps without a graph
    spare = runner.ops.spare_bytes(_most_rows(limits), room.longest, runner.device)
    if capture is not None and drafts:
        size = _drafted(_largest(runner, limits, room), limits)
        spare = max(spare, runner.ops.spare_bytes(size.rows, room.longest, runner.device, size.queries))
    needed += spare if capture is None else 2 * spare
    tables: GraphTables | None = None
    if capture is not None:
        largest = _largest(runner, limits, room)
        tables = _on_all(_graph_tables(runner, _drafted(largest, limits) if drafts else largest), room)
    blocks, caches = allocate_cache(room, room.blocks(needed))
    blocks = room.min_over_ranks(blocks)
    fitted = replace(with_cache(runner, caches), micro_batches=profile.micro_batches, recorder=recorder)
    if capture is not None and tables is not None:
        largest = _largest(runner, limits, room, blocks)
        own = _drafted(largest, limits) if drafts else None
        wants = fitted.wants._replace(repeats=not fitted.in_group)
        fitted = replace(fitted, graphs=_graphs(fitted, largest, tables, capture, own), wants=wants)
    if buffers is not None and recorder is not None:
        fitted = replace(fitted, mixed=_piecewise(fitted, buffers, blocks, recorder))
    trees &= fitted.follows_trees
    steps = DummySteps(fitted, limits, room.longest, blocks, logprobs, _has_masks(runner, room), trees)
    return _warmed_up(FittedRunner(fitted, limits, blocks), steps, meter)


def _on_all(made: T | None, room: CacheRoom) -> T | None:
    # All ranks must call this: a graph is captured on all ranks or on none
    return made if room.min_over_ranks(made is not None) else None


def _has_masks(runner: ModelRunner, room: CacheRoom) -> bool:
    # Only the leading rank knows whether rows may have masks
    return not room.min_over_ranks(runner.sampler.mask is None)


@dataclass(frozen=True, slots=True)
class _Profile:
    """The results of running the largest steps with a small KV cache.

    Attributes:
        step_bytes: The memory that steps take in addition to weights and cache.
        limits: The maximum sizes of steps that fit into memory.
        micro_batches: How larger steps are divided.
        layers: The number of layers with attention.
    """

    step_bytes: int
    limits: SchedulerConfig
    micro_batches: MicroBatches
    layers: int


def _profile(
    runner: ModelRunner,
    limits: SchedulerConfig,
    room: CacheRoom,
    meter: MemoryMeter,
    logprobs: int | None,
    mixed: int,
) -> _Profile:
    measured = with_cache(runner, room.allocate(limits.max_num_seqs + 1))
    masked = _has_masks(runner, room)
    steps = DummySteps(measured, limits, room.longest, limits.max_num_seqs, logprobs, masked)
    try:
        step_bytes = steps.profile(meter, mixed)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the device has no memory for a step of one token: {error}") from error
    if measured.most_tokens is not None:
        limits = replace(limits, max_num_batched_tokens=measured.most_tokens)
    return _Profile(step_bytes, limits, measured.micro_batches, len(measured.caches))


def _warmed_up(fitted: FittedRunner, steps: DummySteps, meter: MemoryMeter) -> FittedRunner:
    before = meter.free()
    steps.warm_up()
    free = meter.free()
    _log.info(
        "the warm-up took %s of the device's memory, %s of it for graphs; %s are free",
        *map(size, (max(0, before - free), steps.runner.graph_bytes, free)),
    )
    return replace(fitted, free_bytes=free)


def with_cache(runner: ModelRunner, caches: list[LayerCache]) -> DeviceRunner:
    """Return a GPU runner with the settings of another runner and a KV cache.

    Args:
        runner: The runner whose model, operators and other settings are used.
        caches: The cache of each layer with attention.
    """
    return DeviceRunner(
        model=runner.model,
        ops=runner.ops,
        caches=caches,
        layout=runner.layout,
        sampler=runner.sampler,
        cost=runner.cost,
        device=runner.device,
        state=StepState(adapters=runner.state.adapters),
        in_group=runner.in_group,
        stage_io=runner.stage_io,
    )


def _most_rows(limits: SchedulerConfig) -> int:
    return min(limits.max_num_seqs, limits.max_num_batched_tokens)


def allocate_cache(room: CacheRoom, wanted: int) -> tuple[int, list[LayerCache]]:
    """Allocate a KV cache of `wanted` blocks, or of fewer blocks if memory is missing.

    Args:
        room: Allocates the cache.
        wanted: The number of blocks that sequences can use.

    Returns:
        The number of blocks that sequences can use, and the cache of each layer. The cache has one more block, for
        padding rows.

    Raises:
        OutOfMemory: There is no memory for the longest sequence.
    """
    blocks = wanted
    while True:
        try:
            caches = room.allocate(blocks + 1)
        except torch.OutOfMemoryError as error:
            smaller = int(blocks * RETRY_SHARE)
            if smaller < room.least:
                raise OutOfMemory(f"the device has no memory for a KV cache of {blocks} blocks") from error
            blocks = smaller
        else:
            if blocks < wanted:
                _log.warning(
                    "the KV cache has only %d blocks: the device had no memory for %d", blocks, wanted
                )
            return blocks, caches


def _static_buffers(runner: ModelRunner, tokens: int) -> StaticBuffers | None:
    if not tokens or not isinstance(runner.ops, GraphOps) or not isinstance(runner.model, SplitModel):
        return None
    try:
        return runner.model.static_buffers(tokens)
    except torch.OutOfMemoryError:
        _log.warning(
            "too little GPU memory to capture steps of %s tokens as graphs; these steps run slower. Lower "
            "engine.kv_memory to capture them",
            tokens,
        )
        return None


def _piecewise(
    runner: DeviceRunner, buffers: StaticBuffers, blocks: int, recorder: GraphRecorder
) -> PiecewiseGraphs:
    assert isinstance(runner.model, SplitModel), "the buffers exist only for a SplitModel"
    groups, padding_slot = len(runner.layout.groups), blocks * runner.layout.block_size
    copied = runner.model.copy if isinstance(runner.model, TappedModel) else None
    return PiecewiseGraphs(
        runner.model, runner.caches, groups, padding_slot, buffers, recorder, runner.in_group, copied
    )


def _largest(runner: ModelRunner, limits: SchedulerConfig, room: CacheRoom, blocks: int = 0) -> GraphSize:
    size = runner.layout.block_size
    return GraphSize(_most_rows(limits), room.longest, size, padding_slot=blocks * size)


def _drafted(largest: GraphSize, limits: SchedulerConfig) -> GraphSize:
    rows = min(max(largest.rows, MIN_SAMPLED_ROWS), limits.max_num_batched_tokens)
    return replace(largest, rows=rows, queries=DRAFT_QUERIES[-1])


def _graph_tables(runner: ModelRunner, largest: GraphSize) -> GraphTables | None:
    if not isinstance(runner.ops, GraphOps):
        return None
    try:
        return GraphTables(len(runner.layout.groups), largest.table_entries, runner.device)
    except torch.OutOfMemoryError:
        _log.warning(
            "too little GPU memory to capture decode steps of %s rows as graphs; these steps run slower. Lower "
            "engine.kv_memory to capture them",
            largest.rows,
        )
        return None


def _graphs(
    runner: DeviceRunner,
    largest: GraphSize,
    tables: GraphTables,
    capture: Capture,
    drafted: GraphSize | None,
) -> DecodeGraphs:
    def forward(token_ids: Tensor, inputs: Seq[AttentionInputs], plans: Seq[AttentionPlan]) -> Tensor:
        return runner.model.forward(token_ids, inputs, runner.caches, plans)

    assert isinstance(runner.ops, GraphOps), "the tables exist only for GraphOps"
    return DecodeGraphs(forward, runner.ops, largest, runner.layout.groups, tables, capture, drafted)
