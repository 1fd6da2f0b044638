"""Runs the partitions of a Gluon program in a random order.

One partition runs at a time, up to its next visible action, and copies arrive at any time between.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from tests.kernels.gpu.gluon_clocks import Agent

PATIENCE_S = 60.0


class DeadlockError(AssertionError):
    """All remaining partitions wait forever."""


class Stopped(BaseException):
    """Raised in a partition when another one has failed."""


class Partition(threading.Thread):
    """Runs a function step by step, whenever it is resumed."""

    def __init__(self, agent: Agent, body: Callable[[], None]) -> None:
        super().__init__(daemon=True, name=agent.name)
        self.agent, self._body = agent, body
        self._go, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self.may_go: Callable[[], bool] = lambda: True
        self.failure: BaseException | None = None
        self._stopped = self.ended = False

    def run(self) -> None:
        self._go.acquire()
        try:
            self._check()
            self._body()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  raised again where the program runs
            self.failure = error
        self.ended = True
        self._pause.release()

    def resume(self) -> None:
        """Run up to the next action."""
        self._go.release()
        if not self._pause.acquire(timeout=PATIENCE_S):
            raise TimeoutError(f"{self.name} takes too long")

    def pause(self, until: Callable[[], bool]) -> None:
        """Let other partitions run, and continue once `until` returns True. The partition itself calls it."""
        self.may_go = until
        self._pause.release()
        self._go.acquire()
        self._check()

    def stop(self) -> None:
        self._stopped = True
        if not self.ended:
            self.resume()

    def _check(self) -> None:
        if self._stopped:
            raise Stopped


class Schedule:
    """Chooses the next partition at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.copies: list[Callable[[], None]] = []  # that are on their way
        self._running: Partition | None = None

    def act(self, until: Callable[[], bool] = lambda: True) -> None:
        """Pause before an action that other partitions see, until `until` returns True."""
        if self._running is not None:
            self._running.pause(until)
        elif not until():
            raise DeadlockError("a wait outside of partitions never ends")

    def run(self, partitions: list[Partition]) -> None:
        for one in partitions:
            one.start()
        try:
            while any(not one.ended for one in partitions):
                self._step([one for one in partitions if not one.ended])
            while self.copies:
                self._deliver()
        finally:
            for one in partitions:
                one.stop()

    def _step(self, left: list[Partition]) -> None:
        able = [one for one in left if one.may_go()]
        if not able and not self.copies:
            names = ", ".join(one.name for one in left)
            raise DeadlockError(f"{names} wait for no running partition")
        chosen = self.random.randrange(len(able) + bool(self.copies))
        if chosen == len(able):
            self._deliver()
            return
        self._running = able[chosen]
        try:
            self._running.resume()
        finally:
            self._running = None
        if able[chosen].failure is not None:
            raise able[chosen].failure

    def _deliver(self) -> None:
        self.copies.pop(self.random.randrange(len(self.copies)))()
