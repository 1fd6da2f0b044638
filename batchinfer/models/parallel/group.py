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
    """The ranks of an engine that compute its model together, and their collectives."""

    @property
    def rank(self) -> int:
        """Return the number of this process among the ranks."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors that all ranks pass, on each rank. May overwrite x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors that all ranks pass, stacked in the order of the ranks: (ranks, *x.shape)."""

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor that the rank `source` passes, on each rank. May overwrite x."""

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to the rank `to`, which must call `receive`."""

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the tensor that the rank `source` sends, and return x."""


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
    """The ranks of a torch.distributed process group."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self.rank, self.size = processes.rank(), processes.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks in place, and return it."""
        self._processes.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors that all ranks pass, stacked: (ranks, *x.shape)."""
        found = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._processes.allgather([[*found.unbind()]], [x.contiguous()]).wait()
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with the tensor of the rank `source`, and return it."""
        self._processes.broadcast(x, source).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x to the rank `to`, and wait until it has been sent."""
        self._processes.send([x], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Wait for a tensor of the rank `source`, store it in x, and return x."""
        self._processes.recv([x], source, 0).wait()
        return x


@dataclass(frozen=True, slots=True, eq=False)
class TimedGroup:
    """A group that measures how long a rank spends in its collectives, waiting for other ranks included.

    Args:
        inner: The group, which must block until a collective is done.
        spent: Receives the time.
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
        """Return the sum over all ranks, and measure the time."""
        with self.spent.measure():
            return self.inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the stacked tensors of all ranks, and measure the time."""
        with self.spent.measure():
            return self.inner.all_gather(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of the rank `source`, and measure the time."""
        with self.spent.measure():
            return self.inner.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to the rank `to`. The time is not measured, as this is no collective."""
        self.inner.send(x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the tensor that the rank `source` sends, and return it. The time is not measured."""
        return self.inner.receive(x, source)


class SpentTime:
    """The sum of measured times, in seconds."""

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
    """Add up the tensors of all ranks, bit by bit exact, if each value is nonzero on at most one rank.

    Bytes are added instead of floats, which rounds nothing and keeps -0.

    Args:
        x: The tensor of this rank; its shape is equal on all ranks.
        group: The ranks.
    """
    return group.all_reduce(x.contiguous().view(torch.uint8)).view(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The shard of this rank, and the groups of ranks with which it computes layers.

    Args:
        tensor: The ranks among which heads and columns are divided.
        experts: The ranks among which experts are divided.
        exact: If True, outputs of experts are added up with the bits of a single process, for which ranks exchange the
            output of each expert.
        shard: The part of the model that this rank holds.
    """

    tensor: Group = field(default_factory=SingleRankGroup)
    experts: Group = field(default_factory=SingleRankGroup)
    exact: bool = False
    shard: ModelShard = WHOLE_MODEL


SINGLE_RANK = Ranks()
