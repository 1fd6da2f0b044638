"""Sizes and allocates the KV cache of a runner, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from batchinfer.core.errors import OutOfMemory
from batchinfer.engine.config import EngineConfig, Untimed
from batchinfer.engine.graphs.decode_graphs import GraphOps
from batchinfer.engine.graphs.graph_capture import GpuRecorder, GraphRecorder, R, Replay
from batchinfer.engine.load.device_fit import CacheRoom, FittedRunner, allocate_cache, fit, with_cache
from batchinfer.engine.load.dummy_prompts import DummyPrompts
from batchinfer.engine.load.dummy_steps import GpuMeter, MemoryMeter
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.budget import admission_costs, captured_tokens
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.models.decoder.feed_forward import ExpertLoads
from batchinfer.models.ops.attention import LayerCache
from batchinfer_kernels.cost import ModelCost


def fit_prompts(
    runner: ModelRunner, limits: SchedulerConfig, room: CacheRoom, meter: MemoryMeter
) -> FittedRunner:
    """Give the runner of an encoder on a GPU the largest KV cache that leaves memory for its steps, and warm it up.

    If a step of the maximum size does not fit, the maximum number of tokens per step is halved.

    Args:
        runner: The runner, without a KV cache.
        limits: The maximum sizes of its steps.
        room: Sizes and allocates the KV cache.
        meter: Measures device memory.

    Returns:
        The runner with its KV cache, and the limits of steps that fit.

    Raises:
        OutOfMemory: There is no memory for the longest prompt.
    """
    step_bytes, batches = _measured(runner, limits, room, meter)
    if batches.most_tokens is not None:
        limits = replace(limits, max_num_batched_tokens=max(batches.most_tokens, room.longest))
    meter.restart()
    spare = runner.ops.spare_bytes(limits.max_num_seqs, 1, runner.device)  # for prompts of one token
    blocks, caches = allocate_cache(room, room.blocks(step_bytes + spare))
    fitted = _on_device(runner, caches, batches)
    DummyPrompts(fitted, limits, room.longest, blocks).warm_up()
    return FittedRunner(fitted, limits, blocks, meter.free())


def _measured(
    runner: ModelRunner, limits: SchedulerConfig, room: CacheRoom, meter: MemoryMeter
) -> tuple[int, MicroBatches]:
    batches = MicroBatches(whole_chunks=True)
    measured = _on_device(runner, room.allocate(limits.max_num_seqs + 1), batches)
    try:
        return DummyPrompts(measured, limits, room.longest, limits.max_num_seqs).profile(meter), batches
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the device has too little memory for a prompt of {room.longest} tokens: {error}"
        ) from error


def _on_device(runner: ModelRunner, caches: list[LayerCache], batches: MicroBatches) -> DeviceRunner:
    return replace(with_cache(runner, caches), micro_batches=batches)


def fit_cache(
    runner: ModelRunner,
    limits: SchedulerConfig,
    cost: ModelCost,
    room: CacheRoom,
    loads: ExpertLoads | None,
    config: EngineConfig,
    untimed: Untimed,
) -> FittedRunner:
    """Size and allocate the KV cache of a runner. On a GPU, CUDA graphs are captured, too.

    Args:
        runner: The runner, without a KV cache.
        limits: The maximum sizes of its steps.
        cost: Computes the FLOPs and memory traffic of a step of the whole model, even if the runner has a shard.
        room: Sizes and allocates the KV cache.
        loads: Counts the tokens per expert of the model. None: the model cannot be captured as CUDA graphs.
        config: The settings of the engine.
        untimed: A context for work of unknown duration, during which the watchdog does not expect a message.

    Returns:
        The runner with its KV cache, and the limits of steps that fit.

    Raises:
        OutOfMemory: The job does not fit into memory.
    """
    if isinstance(runner.ops, GraphOps) and limits.whole_prompts:
        return fit_prompts(runner, limits, room, GpuMeter(runner.device))
    if isinstance(runner.ops, GraphOps):
        mixed = captured_tokens(cost, config.peaks, limits.max_num_batched_tokens)
        capture = None if loads is None else _Uncounted(GpuRecorder(), loads, untimed)
        drafts = bool(config.drafts) and config.peaks is not None
        options = (config.logprobs, mixed, drafts, config.load.heads is not None)
        found = fit(runner, limits, room, GpuMeter(runner.device), capture, *options)
        return found if found.captures_pieces else _without_pieces(found, cost, config)
    blocks = room.blocks(0)
    return FittedRunner(
        replace(runner, caches=room.allocate(blocks)), replace(limits, admission_costs=None), blocks
    )


def _without_pieces(found: FittedRunner, cost: ModelCost, config: EngineConfig) -> FittedRunner:
    costs = found.limits.admission_costs and admission_costs(cost, config.peaks, pieces=False)
    return replace(found, limits=replace(found.limits, admission_costs=costs))


class _Uncounted(GraphRecorder):
    """A graph recorder that does not count tokens per expert during a capture, because the step is replayed later."""

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
