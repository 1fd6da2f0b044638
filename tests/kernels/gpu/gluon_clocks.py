"""Checks the order of actions of a program's partitions with vector clocks (Mattern, 1989).

Shared memory knows from them which partition may read and write it (as FastTrack, Flanagan and Freund, 2009).
An order that only the schedule of one run gives is no order: each run finds a missing wait.
"""

from __future__ import annotations

import math
from itertools import count

import numpy as np
from numpy.typing import NDArray

Clock = dict[int, int]  # by agent: the last moment that is known to have happened


class RaceError(AssertionError):
    """A value is read or written while another agent may still write or read it."""


class Agent:
    """A sequence of actions: of a partition, of the tensor cores that it started, or of a copy."""

    _numbers = count(1)

    def __init__(self, name: str, known: Clock | None = None) -> None:
        self.name, self.number = name, next(Agent._numbers)
        self.known: Clock = {**(known or {}), self.number: 1}

    @property
    def now(self) -> int:
        return self.known[self.number]

    def learn(self, clock: Clock) -> None:
        for number, moment in clock.items():
            self.known[number] = max(moment, self.known.get(number, 0))

    def tell(self) -> Clock:
        """Return the clock of all actions before this call."""
        told = dict(self.known)
        self.known[self.number] += 1
        return told


class Allocation:
    """Shared memory that records each value's writer and each agent's last read. It starts as NaN."""

    def __init__(self, shape: list[int]) -> None:
        size = math.prod(shape)
        self.values = np.full(size, np.nan, np.float32)
        self.writer, self.written = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.read: dict[int, NDArray[np.int64]] = {}
        # Who touched it by threads' own instructions, which the hardware that copies and multiplies does not see yet
        self.threads = np.zeros(size, np.int64)

    def check_written(self, agent: Agent, cells: NDArray[np.int64], what: str) -> None:
        writers, moments = self.writer[cells], self.written[cells]
        if not writers.all() and what == "reads":
            raise RaceError(f"{agent.name} reads memory that was not written")
        for writer in np.unique(writers[writers > 0]):
            if moments[writers == writer].max() > agent.known.get(int(writer), 0):
                raise RaceError(f"{agent.name} {what} what may not be there yet")

    def note_read(self, agent: Agent, cells: NDArray[np.int64]) -> None:
        self.check_written(agent, cells, "reads")
        self.read.setdefault(agent.number, np.zeros(len(self.values), np.int64))[cells] = agent.now

    def note_write(self, agent: Agent, cells: NDArray[np.int64]) -> None:
        self.check_written(agent, cells, "overwrites")
        for reader, moments in self.read.items():
            if moments[cells].max() > agent.known.get(reader, 0):
                raise RaceError(f"{agent.name} overwrites what may still be read")
        self.writer[cells], self.written[cells] = agent.number, agent.now

    def check_fenced(self, agent: Agent, cells: NDArray[np.int64]) -> None:
        if self.threads[cells].any():
            raise RaceError(f"{agent.name} meets what threads read or wrote without a fence")

    def fence(self, agent: Agent) -> None:
        """Make writes and reads of threads that `agent` knows of visible to copies and tensor cores."""
        for thread in np.unique(self.threads[self.threads > 0]):
            known = agent.known.get(int(thread), 0)
            done = self.written * (self.writer == thread)
            if thread in self.read:
                done = np.maximum(done, self.read[int(thread)])
            self.threads[(self.threads == thread) & (done <= known)] = 0


class Barrier:
    """An mbarrier: a phase ends when all threads have arrived and all bytes are there."""

    def __init__(self) -> None:
        self.count, self.left, self.bytes, self.phase = 0, 0, 0, 0
        self._told: Clock = {}
        self.done: Clock = {}  # the clock at the end of the last phase

    def init(self, arrivals: int) -> None:
        self.count = self.left = arrivals

    def arrive(self, told: Clock, arrivals: int, expected: int = 0) -> None:
        if self.count == 0 or arrivals > self.left:
            raise RaceError("more arrive than the barrier was made for")
        self.left, self.bytes = self.left - arrivals, self.bytes + expected
        self._hear(told)

    def deliver(self, told: Clock, size: int) -> None:
        if size > self.bytes:
            raise RaceError("more bytes arrive than are expected")
        self.bytes -= size
        self._hear(told)

    def passed(self, parity: int) -> bool:
        """Return True if the phase of this parity has ended, as on the hardware."""
        return self.phase & 1 != parity

    def _hear(self, told: Clock) -> None:
        for number, moment in told.items():
            self._told[number] = max(moment, self._told.get(number, 0))
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase, self.done = self.count, self.phase + 1, dict(self._told)
