"""Sizes the KV cache of an encoder on a GPU: keys stay for the one step that reads a prompt. No step is captured."""

from __future__ import annotations

from dataclasses import replace

import torch

from batchinfer.core.errors import OutOfMemory
from batchinfer.engine.load.device_fit import CacheRoom, Fitted, allocated, with_cache
from batchinfer.engine.load.dummy_prompts import DummyPrompts
from batchinfer.engine.load.dummy_steps import MemoryMeter
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.models.ops.attention import LayerCache


def fit_prompts(runner: ModelRunner, limits: SchedulerConfig, room: CacheRoom, meter: MemoryMeter) -> Fitted:
    """Give `runner`, which has no cache yet, the largest cache that leaves room for its steps of whole prompts.

    Halves the largest step until there is memory for it. Raises OutOfMemory when there is none for the longest prompt.
    """
    step_bytes, batches = _measured(runner, limits, room, meter)
    if batches.most_tokens is not None:
        limits = replace(limits, max_num_batched_tokens=max(batches.most_tokens, room.longest))
    meter.restart()
    spare = runner.ops.spare_bytes(limits.max_num_seqs, 1, runner.device)  # of prompts of one token
    blocks, caches = allocated(room, room.blocks(step_bytes + spare))
    fitted = _on_device(runner, caches, batches)
    DummyPrompts(fitted, limits, room.longest, blocks).warm_up()
    return Fitted(fitted, limits, blocks, meter.free())


def _measured(
    runner: ModelRunner, limits: SchedulerConfig, room: CacheRoom, meter: MemoryMeter
) -> tuple[int, MicroBatches]:
    """Return the bytes that steps take, and how steps are divided for which there was no memory. The small cache that
    they run with is gone by then."""
    batches = MicroBatches(whole=True)
    measured = _on_device(runner, room.allocate(limits.max_num_seqs + 1), batches)
    try:
        return DummyPrompts(measured, limits, room.longest, limits.max_num_seqs).profile(meter), batches
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the device has no memory for a prompt of {room.longest} tokens: {error}"
        ) from error


def _on_device(runner: ModelRunner, caches: list[LayerCache], batches: MicroBatches) -> DeviceRunner:
    return replace(with_cache(runner, caches), micro_batches=batches)
