"""A group whose collectives are timed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.parallel.group import Group
from batchinfer.models.parallel.spent_time import SpentTime


@dataclass(frozen=True, slots=True, eq=False)
class TimedGroup:
    """Adds up what the collectives of a group took this rank, for ranks that wait until they are done. To wait for
    ranks that come later is a part of it."""

    inner: Group
    spent: SpentTime

    @property
    def rank(self) -> int:
        """Return which of the ranks this process is."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Return how many they are."""
        return self.inner.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add x up over all ranks."""
        with self.spent.spending():
            return self.inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the ranks' tensors."""
        with self.spent.spending():
            return self.inner.all_gather(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of the rank `source`."""
        with self.spent.spending():
            return self.inner.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to another rank. Not timed: it is no collective."""
        self.inner.send(x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill x with what another rank sends. Not timed, either."""
        return self.inner.receive(x, source)
