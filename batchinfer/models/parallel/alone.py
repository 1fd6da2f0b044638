"""A group of one."""

from __future__ import annotations

from torch import Tensor


class Alone:
    """A single rank, which has nobody to tell anything."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x as it is."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x as the first of one."""
        return x[None]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return x as it is."""
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Raise: there is no other rank."""
        raise ValueError(f"a group of one has no rank {to}")

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Raise: there is no other rank."""
        raise ValueError(f"a group of one has no rank {source}")
