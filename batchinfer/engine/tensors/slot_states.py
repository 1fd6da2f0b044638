"""Keeps a hidden state per KV cache slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchinfer.engine.tensors.device_memory import out_of_memory_errors


@dataclass(slots=True, eq=False)
class SlotStates:
    """A hidden state for each slot of the KV cache, which draft heads read.

    The hidden state of a token has the same block and slot as the token's keys and values.

    Attributes:
        block_size: The number of tokens per block.
        width: The size of a hidden state.
        spare: The number of additional blocks after the blocks of the KV cache.
        dtype: The dtype of the hidden states.
        device: The device of the hidden states.
        values: The hidden states, [blocks, block size, width]; without blocks before `allocate` is called.
    """

    block_size: int
    width: int
    spare: int
    dtype: torch.dtype
    device: torch.device
    values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.drop()

    def allocate(self, blocks: int) -> None:
        """Allocate zero-filled hidden states for a KV cache of `blocks` blocks. Earlier states are freed first.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory.
        """
        self.drop()
        shape = blocks + self.spare, self.block_size, self.width
        with out_of_memory_errors():
            self.values = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def drop(self) -> None:
        """Free the memory of the hidden states."""
        self.values = torch.empty(0, self.block_size, self.width, dtype=self.dtype, device=self.device)

    @property
    def blocks(self) -> int:
        """The number of blocks without the spare blocks: the number of blocks of the KV cache."""
        return len(self.values) - self.spare

    def read(self, slots: Tensor) -> Tensor:
        """Return a copy of the hidden states at n slots, [n, width].

        Args:
            slots: int64 [n], the number of the block times the block size, plus the offset in the block.
        """
        return self._flat[slots]

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Write hidden states to n slots.

        Args:
            slots: int64 [n], the number of the block times the block size, plus the offset in the block.
            states: [n, width], the hidden states.
        """
        self._flat[slots] = states

    @property
    def as_cache(self) -> Tensor:
        """A view of the hidden states in the shape of a KV cache with one head, [blocks, 1, block size, width]."""
        return self.values[:, None]

    @property
    def _flat(self) -> Tensor:
        return self.values.flatten(0, 1)
