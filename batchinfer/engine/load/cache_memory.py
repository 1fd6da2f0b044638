"""Computes how many KV cache blocks fit into memory, and allocates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.kv.memory import JobSize, cache_blocks
from batchinfer.engine.load.device_fit import CacheRoom
from batchinfer.engine.ranks.rank_groups import min_over_ranks
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.tapped_model import TappedModel
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.device_memory import allocate_caches, block_bytes
from batchinfer.engine.tensors.slot_states import SlotStates
from batchinfer.machine.memory import available_memory
from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.parallel.group import Group
from batchinfer.models.sources import Source


class ProposerMemory(Protocol):
    """Computes the memory that a draft model or draft heads need."""

    @property
    def weight_bytes(self) -> int:
        """The number of bytes of the weights of the draft model or draft heads."""

    def block_bytes(self, block_size: int) -> int:
        """Return the number of bytes that the draft model or draft heads need per block of the target model's KV cache.

        Args:
            block_size: The number of tokens per block.
        """

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the number of bytes that the draft model or draft heads need besides weights and `block_bytes`.

        The result does not depend on the number of KV cache blocks.

        Args:
            block_size: The number of tokens per block.
            max_num_seqs: Maximum number of running sequences.
        """


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Sizes and allocates the KV cache of a runner from the memory that is free at the time of the call.

    Attributes:
        config: The settings of the engine.
        source: The checkpoint.
        runner: The runner, without a KV cache.
        limits: The maximum sizes of the runner's steps.
        dtype: The dtype of the model.
        longest: The number of tokens of the longest sequence.
        group: The ranks of the engine. All get the same number of blocks.
        turns: The number of engines that share the cache: with pipeline parallelism, several engines alternate.
        proposer: The draft model or the draft heads, which get a KV cache with the same number of blocks. None: the
            job has neither.
    """

    config: EngineConfig
    source: Source
    runner: ModelRunner
    limits: SchedulerConfig
    dtype: torch.dtype
    longest: int
    group: Group
    turns: int = 1
    proposer: ProposerMemory | None = None

    @property
    def block_bytes(self) -> int:
        """The number of bytes per KV cache block, including what a draft model or draft heads need per block."""
        runner = self.runner
        own = block_bytes(runner.ops, self.source.spec.caches, runner.layout, self.dtype.itemsize)
        return own if self.proposer is None else own + self.proposer.block_bytes(runner.layout.block_size)

    def room(self) -> CacheRoom:
        """Return an object that sizes and allocates the KV cache."""
        least = self.runner.layout.sizes.alone(self.longest, self.limits.max_num_batched_tokens)
        return CacheRoom(self._blocks, self._allocate, self.longest, self.turns * least, self._min_over_ranks)

    def _blocks(self, needed: int) -> int:
        config, limits, device = self.config, self.limits, self.runner.device
        if self._states is not None:
            self._states.drop()  # the states of the profile run
        free, memory, ranks = _free_bytes(device), config.kv_memory, self.group.size
        if device.type == "cpu":
            free //= ranks
            memory = memory // ranks if isinstance(memory, int) else memory
        if device.type == "cpu" and config.memory is not None:
            weights = self.source.weight_bytes(self.runner.cost)
            weights += 0 if self.proposer is None else self.proposer.weight_bytes
            free = min(free, max(0, config.memory // ranks - weights))
        if self.proposer is not None:
            spare = self.proposer.spare_bytes(self.runner.layout.block_size, limits.max_num_seqs)
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
        return self.turns * self._min_over_ranks(blocks)

    def _min_over_ranks(self, count: int) -> int:
        return min_over_ranks(count, self.group, self.runner.device)

    def _allocate(self, blocks: int) -> list[LayerCache]:
        runner = self.runner
        if self._states is not None:
            self._states.allocate(blocks)
        return allocate_caches(
            runner.ops, self.source.spec.caches, runner.layout, blocks, self.dtype, runner.device
        )

    @property
    def _states(self) -> SlotStates | None:
        model = self.runner.model
        return model.kept if isinstance(model, TappedModel) else None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()
