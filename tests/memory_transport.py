"""Workers in the process of the tests, with scripted deaths.

A worker takes a turn whenever it is asked for messages: nothing waits and no process starts.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from batchinfer.engine.config import EngineConfig
from batchinfer.machine.memory import peak_memory
from batchinfer.machine.spawning import ChildExit
from batchinfer.pipeline.workers.endings import failure
from batchinfer.pipeline.workers.messages import (
    Add,
    Configure,
    Finish,
    Left,
    Load,
    Loaded,
    Ready,
    WorkDone,
    WorkerSpec,
)
from batchinfer.pipeline.workers.transport import PROCESSES, Link
from tests import fake_engine

LOOK_S = 0.002  # for which a turn in which no worker said anything waits: another thread has to go on


class DiedError(BaseException):
    """Raised by a worker instead of ending its process."""

    def __init__(self, code: int = -signal.SIGKILL) -> None:
        """`code` is an exit status, or minus a signal."""
        self.code = code


class InMemory(Protocol):
    """The worker at the other end of a link."""

    def hear(self, message: object) -> None:
        """Receive a message of the driver."""

    def turn(self) -> list[object]:
        """Return the next messages. Raises DiedError if the worker dies."""


class MemoryLink:
    """A fake of batchinfer.pipeline.workers.transport.Link."""

    placed = True
    lost = False

    def __init__(self, worker: InMemory) -> None:
        self.worker = worker
        self.closed = False
        self._ended: ChildExit | None = None
        self._said: deque[object] = deque()

    def send(self, message: object) -> None:
        """Send a message, which a dead worker does not receive."""
        if not self.dead:
            with self._living():
                self.worker.hear(message)

    def turn(self) -> bool:
        """Let the worker take a turn, and return True if there is a message."""
        if not self._said and not self.dead:
            with self._living():
                self._said.extend(self.worker.turn())
        return self.poll(0)

    @property
    def dead(self) -> bool:
        return self._ended is not None

    @contextmanager
    def _living(self) -> Iterator[None]:
        """Catch the worker's death within the block."""
        try:
            yield
        except DiedError as death:
            self._ended = ChildExit(death.code)

    def poll(self, timeout_s: float) -> bool:
        return bool(self._said) or self.dead

    def receive(self) -> object:
        if not self._said:
            raise EOFError
        return self._said.popleft()

    def wait(self, within_s: float) -> ChildExit | None:
        return self._ended

    def kill(self) -> None:
        self._ended = self._ended or ChildExit(-signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.closed = True


class MemoryTransport:
    """A fake of batchinfer.pipeline.workers.transport.Transport.

    Attributes:
        started: all links, including dead ones.
    """

    def __init__(self, make: Callable[[WorkerSpec], InMemory]) -> None:
        self._make = make
        self.started: list[MemoryLink] = []

    def start(self, spec: WorkerSpec) -> Link:
        self.started.append(MemoryLink(self._make(spec)))
        return self.started[-1]

    def wait_for_messages(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        said = [link for link in links if isinstance(link, MemoryLink) and link.turn()]
        if not said:
            time.sleep(min(timeout_s, LOOK_S))
        return said

    call, can_use_standby = PROCESSES.call, PROCESSES.can_use_standby

    wanted, wait_s = "", 0.0


class FakeWorker:
    """The fake engine without a process: each step of loading takes a turn."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._told_to_load = False
        self._weights: fake_engine.FakeWeights | None = None
        self._config: EngineConfig | None = None
        self._engine: fake_engine.FakeEngine | None = None
        self._leaves = False

    def hear(self, message: object) -> None:
        if isinstance(message, Load):
            self._told_to_load = True
            return
        if isinstance(message, Configure):
            assert self._told_to_load, "loading comes first"
            self._config = message.config
            return
        assert self._engine is not None, "it is given nothing before it is ready"
        if isinstance(message, Add):
            self._engine.add(message.requests)
        elif isinstance(message, Finish):
            self._engine.forget_waiting()
            self._leaves = True

    def turn(self) -> list[object]:
        try:
            return self._said()
        except Exception as error:  # noqa: BLE001 - as a worker tells it
            return [failure(error)]

    def _said(self) -> list[object]:
        if self._weights is None and self._told_to_load:
            self._weights = fake_engine.build(self._spec.load, end=_die)
            return [Loaded(time.perf_counter())]
        if self._engine is None:
            if self._weights is None or self._config is None:
                return []
            built = self._weights.engine(self._config)
            self._engine = built.engine
            return [Ready(built.info)]
        if self._engine.unfinished:
            output = self._engine.step()
            return [WorkDone(output.completions, output.requests, output.samples)]
        return [Left(peak_memory(), 0.0)] if self._leaves else []


def _die(code: int) -> None:
    raise DiedError(code)


# Faults of the fake engine that need parallel processes
OF_PROCESSES = ("DIES_SENDING", "HANGS_AT_STEP", "HANGS_OF_MORE_TOKENS", "TOGETHER", "RELOAD_S")


class FakeTransport(MemoryTransport):
    """Runs the fake engine in memory, or in a process for faults that need one and for other engines."""

    def __init__(self) -> None:
        super().__init__(FakeWorker)

    def start(self, spec: WorkerSpec) -> Link:
        apart = any(f"FAKE_ENGINE_{name}" in os.environ for name in OF_PROCESSES)
        if apart or spec.factory != "tests.fake_engine:build":
            return PROCESSES.start(spec)
        return super().start(spec)

    def wait_for_messages(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        if any(not isinstance(link, MemoryLink) for link in links):
            return PROCESSES.wait_for_messages(links, timeout_s)
        return super().wait_for_messages(links, timeout_s)
