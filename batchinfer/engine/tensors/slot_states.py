"""Keeps a state of each token in the blocks of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.copy_parts import copy_parts_reference


@dataclass(frozen=True, slots=True, eq=False)
class SlotStates:
    """The states of all slots, (blocks, block size, width). What is shared, copied, preempted or taken back of K and V
    is so of them, as they lie in the same blocks and depend on the same tokens."""

    values: Tensor

    @classmethod
    def allocate(
        cls, blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> SlotStates:
        """Allocate them, filled with zeros. Raises torch.OutOfMemoryError."""
        return cls(torch.zeros(blocks, block_size, width, dtype=dtype, device=device))

    def read(self, slots: Tensor) -> Tensor:
        """slots: (n,) int64 → (n, width), a copy."""
        return self._flat[slots]

    def write(self, slots: Tensor, states: Tensor) -> None:
        """slots: (n,) int64, states: (n, width)."""
        self._flat[slots] = states

    def copy(self, parts: Tensor) -> None:
        """Copy the beginnings of blocks; see batchinfer_kernels.copy_parts."""
        places = self.values[:, None]
        copy_parts_reference(places, places, parts)

    @property
    def _flat(self) -> Tensor:
        return self.values.flatten(0, 1)
