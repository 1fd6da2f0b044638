"""The ranks that compute one model together, and how they communicate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from batchinfer.models.parallel.shard import WHOLE_MODEL, ModelShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Group(Protocol):
    """The ranks that compute one model together."""

    @property
    def rank(self) -> int:
        """Return the number of this process among the ranks."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, on each rank; may overwrite x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return (size, *x.shape): the tensors of all ranks, in the order of the ranks."""

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of the rank `source`, on each rank; may overwrite x."""

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to another rank, which must call `receive`."""

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill x with the tensor that another rank sends, and return it."""


class SingleRankGroup:
    """A group with a single rank, which communicates with no other process."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x with a first dimension of size 1."""
        return x[None]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return x unchanged."""
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Raise ValueError: there is no other rank."""
        raise ValueError(f"a group of one has no rank {to}")

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Raise ValueError: there is no other rank."""
        raise ValueError(f"a group of one has no rank {source}")


class TorchGroup:
    """The ranks of a process group of torch.distributed."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self.rank, self.size = processes.rank(), processes.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place."""
        self._processes.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the tensors of all ranks."""
        found = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._processes.allgather([[*found.unbind()]], [x.contiguous()]).wait()
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with the tensor of the rank `source`."""
        self._processes.broadcast(x, source).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x, and wait until it has been sent."""
        self._processes.send([x], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Wait for a tensor of the rank `source`, and store it in x."""
        self._processes.recv([x], source, 0).wait()
        return x


@dataclass(frozen=True, slots=True, eq=False)
class TimedGroup:
    """Adds up the time that a rank spends in the collectives of a group, waiting for other ranks included.

    The group must block until a collective is done.
    """

    inner: Group
    spent: SpentTime

    @property
    def rank(self) -> int:
        """Return the number of this process among the ranks."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.inner.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks."""
        with self.spent.measure():
            return self.inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the tensors of all ranks."""
        with self.spent.measure():
            return self.inner.all_gather(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of the rank `source`."""
        with self.spent.measure():
            return self.inner.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to another rank. This is not timed, as it is no collective."""
        self.inner.send(x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill x with the tensor that another rank sends. This is not timed."""
        return self.inner.receive(x, source)


class SpentTime:
    """A sum of measured times."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time spent in the `with` block."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def restart(self) -> None:
        """Set the sum to 0."""
        self.seconds = 0.0


def merge_disjoint(x: Tensor, group: Group) -> Tensor:
    """Return tensors of all ranks as one, if each value is nonzero on at most one rank.

    Bytes are added instead of floats, which rounds nothing and keeps -0.
    """
    return group.all_reduce(x.contiguous().view(torch.uint8)).view(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The shard of a rank, and the groups of ranks over which results are summed.

    Args:
        tensor: The ranks that share heads and columns.
        experts: The ranks that share the experts.
        exact: If True, results of experts are added with the bits of a single process, for which each result is sent.
        shard: The part of the model that this rank holds.
    """

    tensor: Group = field(default_factory=SingleRankGroup)
    experts: Group = field(default_factory=SingleRankGroup)
    exact: bool = False
    shard: ModelShard = WHOLE_MODEL


SINGLE_RANK = Ranks()
