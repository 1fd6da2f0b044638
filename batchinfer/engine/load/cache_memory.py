"""The memory of the KV cache: how many blocks there is room for, and their allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.kv.memory import JobSize, cache_blocks
from batchinfer.engine.load.device_fit import CacheRoom
from batchinfer.engine.ranks.joining import fewest
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.watched_model import WatchedModel
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.device_memory import allocate_caches, block_bytes
from batchinfer.engine.tensors.slot_states import SlotStates
from batchinfer.machine.memory import available_memory
from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.parallel.group import Group
from batchinfer.models.sources import Source


class KeptBeside(Protocol):
    """A draft model, or heads, which are in memory beside an engine's model."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of its weights."""

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes that each block of the cache takes for it."""

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the bytes that it keeps in no block of a row."""


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Sizes and allocates the KV cache of a runner, in the memory that is free when it is asked."""

    config: EngineConfig
    source: Source
    runner: ModelRunner
    limits: SchedulerConfig
    dtype: torch.dtype
    longest: int  # tokens of a sequence
    group: Group
    turns: int = 1  # engines that have a part of it each
    beside: KeptBeside | None = None  # whose cache lies in the same blocks

    @property
    def block_bytes(self) -> int:
        """Count the bytes of a block, with what a draft model or heads have in it."""
        runner = self.runner
        own = block_bytes(runner.ops, self.source.spec.caches, runner.layout, self.dtype.itemsize)
        return own if self.beside is None else own + self.beside.block_bytes(runner.layout.block_size)

    def room(self) -> CacheRoom:
        """Return what `fit` asks of the cache."""
        least = self.runner.layout.sizes.alone(self.longest, self.limits.max_num_batched_tokens)
        return CacheRoom(self._blocks, self._allocate, self.longest, self.turns * least, self._agreed)

    def _blocks(self, needed: int) -> int:
        """How many blocks the cache gets on every rank, where steps need `needed` bytes; see `cache_blocks`. Ranks on a
        CPU share its memory, and all of them what the job gives to the cache."""
        config, limits, device = self.config, self.limits, self.runner.device
        if self._states is not None:
            self._states.drop()  # those that a profile run had
        free, memory, ranks = _free_bytes(device), config.kv_memory, self.group.size
        if device.type == "cpu":
            free //= ranks
            memory = memory // ranks if isinstance(memory, int) else memory
        if device.type == "cpu" and config.memory is not None:
            weights = self.source.weight_bytes(self.runner.cost)
            weights += 0 if self.beside is None else self.beside.weight_bytes
            free = min(free, max(0, config.memory // ranks - weights))
        if self.beside is not None:
            spare = self.beside.spare_bytes(self.runner.layout.block_size, limits.max_num_seqs)
            needed += spare
            memory = memory - spare if isinstance(memory, int) else memory
        if self.turns > 1:
            free //= self.turns
            memory = memory // self.turns if isinstance(memory, int) else memory
        blocks = cache_blocks(
            block_bytes=self.block_bytes,
            tables=self.runner.layout.sizes,
            job=JobSize(config.longest, limits.max_num_seqs, limits.max_num_batched_tokens),
            memory=memory,
            free=free,
            kind=device.type,
            needed=needed,
        )
        return self.turns * self._agreed(blocks)

    def _agreed(self, count: int) -> int:
        return fewest(count, self.group, self.runner.device)

    def _allocate(self, blocks: int) -> list[LayerCache]:
        runner = self.runner
        if self._states is not None:
            self._states.allocate(blocks)
        return allocate_caches(
            runner.ops, self.source.spec.caches, runner.layout, blocks, self.dtype, runner.device
        )

    @property
    def _states(self) -> SlotStates | None:
        """Return the states that the model keeps for heads, in the blocks of the cache; None: it keeps none."""
        model = self.runner.model
        return model.kept if isinstance(model, WatchedModel) else None


def _free_bytes(device: torch.device) -> int:
    """Count the bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()
