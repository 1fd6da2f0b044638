"""Keeps a state of each token in the blocks of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchinfer.engine.tensors.device_memory import lack_of_memory


@dataclass(slots=True, eq=False)
class SlotStates:
    """The states of all slots, (blocks, block size, width). What is shared, copied, preempted or taken back of K and V
    is so of them, as they lie in the same blocks and depend on the same tokens.

    `spare`: blocks behind those that the cache of K and V has.
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
        """Allocate them for a cache of so many blocks, filled with zeros, in the place of those that there were. Raises
        torch.OutOfMemoryError."""
        self.drop()
        shape = blocks + self.spare, self.block_size, self.width
        with lack_of_memory():
            self.values = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def drop(self) -> None:
        """Give their memory back."""
        self.values = torch.empty(0, self.block_size, self.width, dtype=self.dtype, device=self.device)

    @property
    def blocks(self) -> int:
        """How many blocks the cache of K and V has."""
        return len(self.values) - self.spare

    def read(self, slots: Tensor) -> Tensor:
        """slots: (n,) int64 → (n, width), a copy."""
        return self._flat[slots]

    def write(self, slots: Tensor, states: Tensor) -> None:
        """slots: (n,) int64, states: (n, width)."""
        self._flat[slots] = states

    @property
    def places(self) -> Tensor:
        """The states as a cache of one head, (blocks, 1, block size, width)."""
        return self.values[:, None]

    @property
    def _flat(self) -> Tensor:
        return self.values.flatten(0, 1)
