"""Ranks as threads of one process, which reduce in memory: tests of ranks' results need no processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
PATIENCE = 60.0  # seconds for another rank


@dataclass
class _Exchange:
    """The state that the ranks of a group share."""

    size: int
    given: dict[int, Tensor] = field(default_factory=dict)
    mail: dict[tuple[int, int], Queue[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=PATIENCE)
        self.mail = {(a, b): Queue() for a in range(self.size) for b in range(self.size)}


@dataclass
class ThreadGroup:
    """A rank of a group.

    Attributes:
        sent: bytes that it contributed to sums and gathers.
    """

    rank: int
    exchange: _Exchange
    sent: int = 0

    @property
    def size(self) -> int:
        return self.exchange.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum in the order of the ranks."""
        found = self.all_gather(x)
        total = found[0]
        for part in found[1:]:
            total = total + part
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks."""
        self.sent += x.nbytes
        self.exchange.given[self.rank] = x.clone()
        self.exchange.barrier.wait()
        found = torch.stack([self.exchange.given[rank] for rank in range(self.size)])
        self.exchange.barrier.wait()
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of rank `source`."""
        return self.all_gather(x)[source]

    def send(self, x: Tensor, to: int) -> None:
        """Leave a tensor for another rank."""
        self.exchange.mail[self.rank, to].put(x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Wait for a tensor of another rank."""
        return x.copy_(self.exchange.mail[source, self.rank].get(timeout=PATIENCE))


def groups_of(size: int) -> list[ThreadGroup]:
    """Return the ranks of a group."""
    exchange = _Exchange(size)
    return [ThreadGroup(rank, exchange) for rank in range(size)]


def of_ranks(groups: Sequence[ThreadGroup], work: Callable[[ThreadGroup], T]) -> list[T]:
    """Do the work of all ranks in parallel and return the results. Raises the first failing rank's error."""

    def done(group: ThreadGroup) -> T:
        torch.set_num_threads(1)
        try:
            return work(group)
        except BaseException:
            group.exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        found = [pool.submit(done, group) for group in groups]
        errors = [error for one in found if (error := one.exception()) is not None]
        for error in errors:
            if not isinstance(error, BrokenBarrierError):
                raise error
        return [one.result() for one in found]
