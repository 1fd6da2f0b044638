"""The ranks that compute one model together, and what they send each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from batchinfer.models.parallel.place import EVERYTHING, RankPlace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


class TorchGroup:
    """The ranks of a process group of torch's."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self.rank, self.size = processes.rank(), processes.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add x up over all ranks, in place."""
        self._processes.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the ranks' tensors."""
        found = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._processes.allgather([[*found.unbind()]], [x.contiguous()]).wait()
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with that of the rank `source`."""
        self._processes.broadcast(x, source).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x, and wait until it is taken."""
        self._processes.send([x], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Wait for a tensor, which overwrites x."""
        self._processes.recv([x], source, 0).wait()
        return x


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


class SpentTime:
    """Adds up seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time inside."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def restart(self) -> None:
        """Forget what was counted."""
        self.seconds = 0.0


def merged(x: Tensor, group: Group) -> Tensor:
    """Return the values of all ranks, of which each is 0 on all ranks but one. Their bytes are added, so that none is
    rounded, and -0 stays what it is."""
    return group.all_reduce(x.contiguous().view(torch.uint8)).view(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The `place` of a rank in a model, and the ranks that add up what they make of a token: `tensor`, of their heads
    and columns; `experts`, of the ranges of experts that they have. `exact`: experts' results are added in the order
    and with the bits of one process, for which each of them is sent."""

    tensor: Group = field(default_factory=Alone)
    experts: Group = field(default_factory=Alone)
    exact: bool = False
    place: RankPlace = EVERYTHING


ALONE = Ranks()
