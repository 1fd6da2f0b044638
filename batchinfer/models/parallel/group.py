"""The ranks that compute one model together, and what they tell each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """The ranks that compute one model together."""

    @property
    def rank(self) -> int:
        """Return which of them this process is."""

    @property
    def size(self) -> int:
        """Return how many they are."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, on each; may write into x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return (size, *x.shape): the ranks' tensors in their order."""

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of the rank `source`, on each; may write into x."""

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to another rank, which receives it."""

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill x with what another rank sends, and return it."""
