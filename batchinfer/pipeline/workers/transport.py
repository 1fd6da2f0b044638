"""How messages travel between the parent and a worker: through a pipe to a process of its own, or as a test likes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Protocol

from batchinfer.engine.config import LoadConfig
from batchinfer.machine.spawning import Child, receiving
from batchinfer.pipeline.workers.engine_entry import WORKER
from batchinfer.pipeline.workers.messages import EnginePlace, WorkerSpec


class WorkerEnd(Protocol):
    """How a worker ended. Its text completes "the engine's process ..."."""

    @property
    def out_of_cpu_time(self) -> bool:
        """Whether a limit on CPU time ended it."""

    @property
    def out_of_memory(self) -> bool:
        """Whether it was killed because memory ran out."""


class Link(Protocol):
    """The parent's end of the way to one worker, which lives as long as the link."""

    def send(self, message: object) -> None:
        """Send a message. Raises nothing when the worker is gone: what it said before it ended is still to be
        received."""

    def poll(self, timeout_s: float) -> bool:
        """Whether there is something to receive, an end included; waits for it for so long."""

    def receive(self) -> object:
        """Return the next message of the worker. Raises EOFError once the worker has ended and all was received."""

    @property
    def placed(self) -> bool:
        """Whether the worker runs. A cluster may let it wait for resources."""

    @property
    def lost(self) -> bool:
        """Whether the worker ended because its machine is gone."""

    def wait(self, within_s: float) -> WorkerEnd | None:
        """Return how the worker ended; None: it has not within `within_s` seconds."""

    def kill(self) -> None:
        """End the worker now, and wait until it has."""

    def close(self) -> None:
        """Kill the worker if it still runs, and give back what the link holds; safe to call twice."""


class Transport(Protocol):
    """Starts workers, and tells which of them have something to say."""

    def start(self, spec: WorkerSpec) -> Link:
        """Start a worker. Raises OSError where none can be started."""

    def call(self, target: str, argument: object, load: LoadConfig) -> Link:
        """Start a process that calls a function.

        Args:
            target: The function "module:function". It gets the argument and its end of a connection.
            argument: The function's first argument.
            load: The model that the function reads.
        """

    def takes_standby(self, spec: WorkerSpec) -> bool:
        """Return True if a process that stands by can become this worker."""

    def speaking(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Return the links that can be received from; waits for the first one for so long."""

    @property
    def wanted(self) -> str:
        """Name the resources that a worker waits for: "a node of the Ray cluster with 8 free CPUs"."""

    @property
    def wait_s(self) -> float:
        """Return the seconds that a run without a running worker waits for resources."""


class ProcessLink:
    """A pipe to a worker that is a process of its own."""

    placed, lost = True, False

    def __init__(self, child: Child) -> None:
        self._child = child
        self.connection = child.connection
        self.poll, self.wait = child.connection.poll, child.wait
        self.kill, self.close = child.kill, child.close

    def send(self, message: object) -> None:
        """Send through the pipe, if the process is still there."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def receive(self) -> object:
        """Receive from the pipe."""
        with receiving():
            return self.connection.recv()


class ProcessTransport:
    """Each worker is a process of its own, so that an engine that crashes costs its own work alone."""

    def start(self, spec: WorkerSpec) -> Link:
        """Start a process."""
        return ProcessLink(Child(WORKER, spec))

    def speaking(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Return the links whose pipes have something, an end included."""
        by_pipe = {link.connection: link for link in links if isinstance(link, ProcessLink)}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe), timeout_s)]  # type: ignore[index]

    def call(self, target: str, argument: object, load: LoadConfig) -> Link:
        """Start a process on this machine."""
        return ProcessLink(Child(target, argument))

    def takes_standby(self, spec: WorkerSpec) -> bool:
        """Return True if nothing of the specification must be settled before the imports of the process."""
        return spec.place == EnginePlace()

    @property
    def wanted(self) -> str:
        """Return nothing: a process never waits for resources."""
        return ""

    @property
    def wait_s(self) -> float:
        """Return 0: a process never waits for resources."""
        return 0.0


PROCESSES = ProcessTransport()
