"""Workers in the process of the tests. A worker takes a turn whenever it is asked whether it has something to say:
nothing waits, no process is started, and deaths are scripted."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from batchinfer.core.errors import BatchInferError, OutOfMemory
from batchinfer.machine.memory import peak_memory
from batchinfer.machine.spawning import Ended
from batchinfer.pipeline.workers.messages import Add, Failed, Finish, Left, Ready, WorkDone, WorkerSpec
from batchinfer.pipeline.workers.transport import PROCESSES, Link
from tests import fake_engine


class DiedError(Exception):
    """What a scripted worker raises where a process would be killed."""


class InMemory(Protocol):
    """What stands at the other end of a link."""

    def hear(self, message: object) -> None:
        """A message of the parent."""

    def turn(self) -> list[object]:
        """What it says next. Raises DiedError when it dies."""


class MemoryLink:
    """See batchinfer.pipeline.workers.transport.Link."""

    def __init__(self, worker: InMemory) -> None:
        self.worker = worker
        self.closed = self.dead = False
        self._said: deque[object] = deque()

    def send(self, message: object) -> None:
        """Reaches nobody once the worker is dead."""
        if not self.dead:
            self.worker.hear(message)

    def turn(self) -> bool:
        """Let the worker go on, and say whether there is something to receive."""
        if not self._said and not self.dead:
            try:
                self._said.extend(self.worker.turn())
            except DiedError:
                self.dead = True
        return self.poll(0)

    def poll(self, timeout_s: float) -> bool:
        return bool(self._said) or self.dead

    def receive(self) -> object:
        if not self._said:
            raise EOFError
        return self._said.popleft()

    def wait(self, within_s: float) -> Ended | None:
        return Ended(-signal.SIGKILL) if self.dead else None

    def kill(self) -> None:
        self.dead = True

    def close(self) -> None:
        self.dead = self.closed = True


class MemoryTransport:
    """See batchinfer.pipeline.workers.transport.Transport. `started` has all links, dead ones too."""

    def __init__(self, make: Callable[[WorkerSpec], InMemory]) -> None:
        self._make = make
        self.started: list[MemoryLink] = []

    def start(self, spec: WorkerSpec) -> Link:
        self.started.append(MemoryLink(self._make(spec)))
        return self.started[-1]

    def speaking(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        return [link for link in links if isinstance(link, MemoryLink) and link.turn()]


class FakeWorker:
    """The fake engine without a process, as long as it is to have no fault that takes one."""

    def __init__(self, spec: WorkerSpec) -> None:
        built = fake_engine.build(spec.config)
        self._engine, self._says = built.engine, [Ready(built.info)]
        self._leaves = False

    def hear(self, message: object) -> None:
        if isinstance(message, Add):
            self._engine.add(message.requests)
        elif isinstance(message, Finish):
            self._engine.forget_waiting()
            self._leaves = True

    def turn(self) -> list[object]:
        said: list[object] = list(self._says)
        self._says = []
        if self._engine.unfinished:
            try:
                output = self._engine.step()
            except Exception as error:  # noqa: BLE001 - as a worker tells it
                return [*said, _failed(error)]
            said.append(WorkDone(output.completions, output.requests, [output.sample]))
        elif self._leaves:
            said.append(Left(peak_memory(), 0.0, {}))
        return said


def _failed(error: Exception) -> Failed:
    code = error.exit_code if isinstance(error, BatchInferError) else BatchInferError.exit_code
    return Failed(OutOfMemory.exit_code if isinstance(error, MemoryError) else code, str(error), "")


# What is asked of the fake engine that only a process can do, or that is counted by process
OF_PROCESSES = ("DIES", "HANG", "RAISES", "STARTS", "TOGETHER")


class FakeTransport(MemoryTransport):
    """The fake engine in memory; a process for it where a fault is asked for, and for every other engine."""

    def __init__(self) -> None:
        super().__init__(FakeWorker)

    def start(self, spec: WorkerSpec) -> Link:
        faults = [
            name
            for name in os.environ
            if name.startswith("FAKE_ENGINE_") and any(w in name for w in OF_PROCESSES)
        ]
        if faults or spec.factory != "tests.fake_engine:build":
            return PROCESSES.start(spec)
        return super().start(spec)

    def speaking(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        if any(not isinstance(link, MemoryLink) for link in links):
            return PROCESSES.speaking(links, timeout_s)
        return super().speaking(links, timeout_s)
