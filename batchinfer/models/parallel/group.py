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
    """The ranks of an engine that compute its model together, and their collective operations."""

    @property
    def rank(self) -> int:
        """Return the number of this process among the ranks of the group, from 0."""

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors that all ranks pass. All ranks must call it. May overwrite x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors that all ranks pass, stacked in the order of the ranks: (ranks, *x.shape).

        All ranks must call it.
        """

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor that the rank `source` passes. All ranks must call it. May overwrite x."""

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to the rank `to`, which must call `receive`.

        Args:
            x: The tensor.
            to: The number of the receiving rank.
        """

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the tensor that the rank `source` sends, and return x."""


class SingleRankGroup:
    """A group with a single rank, which has no other process to communicate with."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x, which is the sum over the only rank."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x with a new first dimension of size 1, as there is only one rank."""
        return x[None]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return x, as there is only one rank."""
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Raise ValueError: there is no other rank."""
        raise ValueError(f"a group of one has no rank {to}")

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Raise ValueError: there is no other rank."""
        raise ValueError(f"a group of one has no rank {source}")


class TorchGroup:
    """The ranks of a torch.distributed process group, and their collective operations."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self.rank, self.size = processes.rank(), processes.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks in place, and return x."""
        self._processes.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors that all ranks pass, stacked in the order of the ranks: (ranks, *x.shape)."""
        found = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._processes.allgather([[*found.unbind()]], [x.contiguous()]).wait()
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with the tensor that the rank `source` passes, and return x."""
        self._processes.broadcast(x, source).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x to the rank `to`, and wait until it has been sent."""
        self._processes.send([x], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the tensor that the rank `source` sends, and return x.

        Waits until the tensor has arrived.
        """
        self._processes.recv([x], source, 0).wait()
        return x


@dataclass(frozen=True, slots=True, eq=False)
class TimedGroup:
    """A group that measures how long this rank spends in collective operations, including the wait for other ranks.

    Args:
        inner: The group that communicates. Its calls must block until they are done.
        spent: Receives the measured times.
    """

    inner: Group
    spent: SpentTime

    @property
    def rank(self) -> int:
        """Return the number of this process among the ranks of the group, from 0."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self.inner.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors that all ranks pass, and measure the time."""
        with self.spent.measure():
            return self.inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors that all ranks pass, stacked in the order of the ranks, and measure the time."""
        with self.spent.measure():
            return self.inner.all_gather(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor that the rank `source` passes, and measure the time."""
        with self.spent.measure():
            return self.inner.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to the rank `to`. The time is not measured."""
        self.inner.send(x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the tensor that the rank `source` sends, and return x. The time is not measured."""
        return self.inner.receive(x, source)


class SpentTime:
    """A sum of measured times, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Return a context manager that adds the time spent in its `with` block to the sum."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def restart(self) -> None:
        """Set the sum of measured times to 0."""
        self.seconds = 0.0


def merge_disjoint(x: Tensor, group: Group) -> Tensor:
    """Return the exact sum of the tensors of all ranks. Each value may be nonzero on only one rank.

    Args:
        x: The tensor of this rank. Its shape is equal on all ranks.
        group: The ranks.
    """
    # A sum of bytes rounds nothing and keeps -0
    return group.all_reduce(x.contiguous().view(torch.uint8)).view(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The part of the model that this rank holds, and the groups of ranks with which it computes layers.

    Args:
        tensor: The ranks among which heads and columns are divided.
        experts: The ranks among which experts are divided.
        exact: If True, the sums of experts' outputs have the same bits as in a single process.
        shard: The part of the model that this rank holds.
    """

    tensor: Group = field(default_factory=SingleRankGroup)
    experts: Group = field(default_factory=SingleRankGroup)
    exact: bool = False
    shard: ModelShard = WHOLE_MODEL


SINGLE_RANK = Ranks()
