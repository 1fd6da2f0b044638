"""Sizes the KV cache of a GPU: measures what the largest step needs and gives the cache the rest of the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.sizes import size
from batchinfer.engine.graphs.decode_graphs import DecodeGraphs, GraphLimits, GraphOps
from batchinfer.engine.graphs.graph_capture import Capture, GraphRecorder
from batchinfer.engine.graphs.piecewise_graphs import PiecewiseGraphs, StoppingModel, graph_bytes
from batchinfer.engine.load.rehearsal import MemoryMeter, Rehearsal
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.device_tables import GraphTables
from batchinfer.models.decoder.stop import StepRoom
from batchinfer.models.ops.interface import AttentionInputs, AttentionPlan, LayerCache

_log = logging.getLogger(__name__)

# Each further attempt, when a cache cannot be allocated, asks for this share of the one before
SMALLER = 15 / 16


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Computes how large the cache may be, and allocates it."""

    blocks: Callable[
        [int], int
    ]  # bytes that steps need → blocks; raises OutOfMemory when it holds no sequence
    allocate: Callable[[int], list[LayerCache]]  # raises torch.OutOfMemoryError
    longest: int  # tokens of a sequence
    least: int  # blocks that it holds alone


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A runner with its cache, and the limits of its steps."""

    runner: ModelRunner
    limits: SchedulerConfig
    blocks: int
    free_bytes: int | None = None  # of the device's memory, with all that was captured; None on a CPU

    @property
    def captures_pieces(self) -> bool:
        """Whether steps that read prompts are replayed in pieces."""
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
) -> Fitted:
    """Gives `runner`, which has no cache yet, the largest cache that leaves room for its steps.

    `capture` turns decode steps into graphs, if the operators can plan for graphs; None: the model cannot be captured.
    `logprobs`: the most log-probabilities that a row asks for; None: none does. `mixed`: the most tokens of a step that
    reads prompts and is captured in pieces, if `capture` can record them.
    Halves the largest step until there is memory for it. Raises OutOfMemory when there is none for a step of one token
    or for the longest sequence.
    """
    measured = _with_cache(runner, room.allocate(limits.max_num_seqs + 1))
    try:
        first = Rehearsal(measured, limits, room.longest, limits.max_num_seqs, logprobs)
        needed = first.step_bytes(meter, mixed)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the device has no memory for a step of one token: {error}") from error
    if measured.most_tokens is not None:
        limits = replace(limits, max_num_batched_tokens=measured.most_tokens)
    mixed = min(mixed, limits.max_num_batched_tokens)
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    pieces, layers = measured.pieces, len(measured.caches)
    del measured, first  # its small cache, too
    meter.restart()
    between = _step_room(runner, mixed) if isinstance(capture, GraphRecorder) else None
    needed += graph_bytes(between.tokens, layers) if between is not None else 0
    # of steps that are launched, and of graphs, which keep what they take
    needed += (1 if capture is None else 2) * runner.ops.spare_bytes(rows, room.longest, runner.device)
    tables = _graph_tables(runner, _largest(runner, limits, room)) if capture is not None else None
    blocks, caches = _cache(room, room.blocks(needed))
    recorder = capture if isinstance(capture, GraphRecorder) else None
    fitted = replace(_with_cache(runner, caches), pieces=pieces, recorder=recorder)
    if capture is not None and tables is not None:
        largest = _largest(runner, limits, room, blocks)
        fitted = replace(fitted, graphs=_graphs(fitted, largest, tables, capture))
    if between is not None and isinstance(capture, GraphRecorder):
        fitted = replace(fitted, mixed=_piecewise(fitted, between, blocks, capture))
    before = meter.free()
    Rehearsal(fitted, limits, room.longest, blocks, logprobs).warm_up()
    free = meter.free()
    _log.info(
        "the warm-up took %s of the device's memory, %s of it for graphs; %s are free",
        *map(size, (max(0, before - free), fitted.graph_bytes, free)),
    )
    return Fitted(fitted, limits, blocks, free)


def _with_cache(runner: ModelRunner, caches: list[LayerCache]) -> DeviceRunner:
    names = ("model", "ops", "layout", "sampler", "cost", "device")
    return DeviceRunner(caches=caches, **{name: getattr(runner, name) for name in names})


def _cache(room: CacheRoom, wanted: int) -> tuple[int, list[LayerCache]]:
    """(blocks for sequences, a cache with one block more, which takes the keys of padding rows)."""
    blocks = wanted
    while True:
        try:
            caches = room.allocate(blocks + 1)
        except torch.OutOfMemoryError as error:
            smaller = int(blocks * SMALLER)
            if smaller < room.least:
                raise OutOfMemory(f"the device has no memory for a KV cache of {blocks} blocks") from error
            blocks = smaller
        else:
            if blocks < wanted:
                _log.warning(
                    "the KV cache has only %d blocks: the device had no memory for %d", blocks, wanted
                )
            return blocks, caches


def _step_room(runner: ModelRunner, tokens: int) -> StepRoom | None:
    """What is left between the pieces of steps of up to so many tokens, allocated before the cache is; None: no step is
    captured in pieces."""
    if not tokens or not isinstance(runner.ops, GraphOps) or not isinstance(runner.model, StoppingModel):
        return None
    try:
        return runner.model.room(tokens)
    except torch.OutOfMemoryError:
        _log.warning(
            "too little GPU memory to capture steps of %s tokens as graphs: they run slower; lower engine.kv_memory",
            tokens,
        )
        return None


def _piecewise(
    runner: DeviceRunner, between: StepRoom, blocks: int, recorder: GraphRecorder
) -> PiecewiseGraphs:
    assert isinstance(runner.model, StoppingModel), "it has made the room"
    groups, padding_slot = len(runner.layout.groups), blocks * runner.layout.block_size
    return PiecewiseGraphs(runner.model, runner.caches, groups, padding_slot, between, recorder)


def _largest(runner: ModelRunner, limits: SchedulerConfig, room: CacheRoom, blocks: int = 0) -> GraphLimits:
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    return GraphLimits(rows, room.longest, runner.layout.block_size, scratch_block=blocks)


def _graph_tables(runner: ModelRunner, largest: GraphLimits) -> GraphTables | None:
    """What graphs of decode steps read block tables from, allocated before the cache is; None: no decode step is
    captured."""
    if not isinstance(runner.ops, GraphOps):
        return None
    try:
        return GraphTables(len(runner.layout.groups), largest.table_entries, runner.device)
    except torch.OutOfMemoryError:
        _log.warning(
            "too little GPU memory to capture decode steps of %s rows as graphs: they run slower; lower "
            "engine.kv_memory",
            largest.rows,
        )
        return None


def _graphs(
    runner: DeviceRunner, largest: GraphLimits, tables: GraphTables, capture: Capture
) -> DecodeGraphs:
    def forward(token_ids: Tensor, inputs: Seq[AttentionInputs], plans: Seq[AttentionPlan]) -> Tensor:
        return runner.model.forward(token_ids, inputs, runner.caches, plans)

    assert isinstance(runner.ops, GraphOps), "it has the tables"
    return DecodeGraphs(forward, runner.ops, largest, runner.layout.groups, tables, capture)
