"""Keeps a hidden state per KV cache slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchinfer.engine.tensors.device_memory import out_of_memory_errors


@dataclass(slots=True, eq=False)
class SlotStates:
    """A hidden state for each slot of the KV cache: (blocks, block size, width).

    States use the block numbers of K and V, so they are shared, copied and freed together with K and V.
    """

    block_size: int
    width: int
    spare: int  # additional blocks after the blocks of the KV cache
    dtype: torch.dtype
    device: torch.device
    values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.drop()

    def allocate(self, blocks: int) -> None:
        """Replace the states by zeros for a cache of `blocks` blocks. Raises torch.OutOfMemoryError."""
        self.drop()
        shape = blocks + self.spare, self.block_size, self.width
        with out_of_memory_errors():
            self.values = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def drop(self) -> None:
        """Free the memory."""
        self.values = torch.empty(0, self.block_size, self.width, dtype=self.dtype, device=self.device)

    @property
    def blocks(self) -> int:
        """Return the number of blocks of the KV cache."""
        return len(self.values) - self.spare

    def read(self, slots: Tensor) -> Tensor:
        """Return a copy of the states at slots: (n,) int64 → (n, width)."""
        return self._flat[slots]

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Write states, (n, width), to slots, (n,) int64."""
        self._flat[slots] = states

    @property
    def places(self) -> Tensor:
        """Return the states in the shape of a cache with one head: (blocks, 1, block size, width)."""
        return self.values[:, None]

    @property
    def _flat(self) -> Tensor:
        return self.values.flatten(0, 1)
