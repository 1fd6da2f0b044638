"""Transports start workers and exchange messages with them. The default starts processes and uses pipes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Protocol

from batchinfer.engine.config import LoadConfig
from batchinfer.machine.spawning import Child, receiving
from batchinfer.pipeline.workers.engine_entry import WORKER
from batchinfer.pipeline.workers.messages import EngineResources, WorkerSpec


class WorkerEnd(Protocol):
    """The way a worker ended. Its text completes "the engine's process ..."."""

    @property
    def out_of_cpu_time(self) -> bool:
        """Return True if a limit on CPU time ended the worker."""

    @property
    def out_of_memory(self) -> bool:
        """Return True if the worker was killed because memory ran out."""


class Link(Protocol):
    """The driver's end of the connection to one worker. Closing the link ends the worker."""

    def send(self, message: object) -> None:
        """Send a message to the worker.

        Raises nothing if the worker is gone, because its last messages can still be received.
        """

    def poll(self, timeout_s: float) -> bool:
        """Return True if `receive` would not block, after waiting for at most `timeout_s` seconds."""

    def receive(self) -> object:
        """Return the next message of the worker.

        Raises:
            EOFError: The worker has ended and all its messages were received.
        """

    @property
    def placed(self) -> bool:
        """Return True if the worker runs, and False while it waits for resources of a cluster."""

    @property
    def lost(self) -> bool:
        """Return True if the worker ended because its machine is gone."""

    def wait(self, within_s: float) -> WorkerEnd | None:
        """Return how the worker ended, or None if it is still running after `within_s` seconds."""

    def kill(self) -> None:
        """End the worker now, and wait for its end."""

    def close(self) -> None:
        """Kill the worker if it is still running, and free the resources of the link. May be called twice."""


class Transport(Protocol):
    """Starts workers, as processes or on a cluster, and waits for their messages."""

    def start(self, spec: WorkerSpec) -> Link:
        """Start a worker, and return the connection to it.

        Raises:
            OSError: The worker cannot be started.
        """

    def call(self, target: str, argument: object, load: LoadConfig) -> Link:
        """Start a process that calls a function, and return the connection to it.

        Args:
            target: The function, "module:function". Its arguments are `argument` and its end of the connection.
            argument: The first argument of the function.
            load: The model that the function reads.
        """

    def takes_standby(self, spec: WorkerSpec) -> bool:
        """Return True if the standby process can become the worker with this specification."""

    def wait_for_messages(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Wait until a worker has sent a message, and return the links of all workers with messages.

        Args:
            links: The links of the workers.
            timeout_s: Maximum number of seconds to wait. Then the result is empty.
        """

    @property
    def wanted(self) -> str:
        """Return a phrase with the resources for which a worker waits, such as "node with 8 free CPUs"."""

    @property
    def wait_s(self) -> float:
        """Return how many seconds a run waits for resources while none of its workers has any."""


class ProcessLink:
    """The driver's end of a pipe to a worker process."""

    placed, lost = True, False

    def __init__(self, child: Child) -> None:
        self._child = child
        self.connection = child.connection
        self.poll, self.wait = child.connection.poll, child.wait
        self.kill, self.close = child.kill, child.close

    def send(self, message: object) -> None:
        """Send a message to the process unless it has ended."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def receive(self) -> object:
        """Return the next message of the process. Raises EOFError after the last one."""
        with receiving():
            return self.connection.recv()


class ProcessTransport:
    """Starts each worker as a process on this machine, and connects to it with a pipe.

    A crash of an engine does not affect the other engines.
    """

    wait_s, wanted = 0.0, ""  # a process never waits for resources

    def start(self, spec: WorkerSpec) -> Link:
        """Start a worker as a process on this machine."""
        return ProcessLink(Child(WORKER, spec))

    def wait_for_messages(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Wait until a worker has sent a message or has ended, and return the links of all such workers.

        Args:
            links: The links of the workers.
            timeout_s: Maximum number of seconds to wait. Then the result is empty.
        """
        by_pipe = {link.connection: link for link in links if isinstance(link, ProcessLink)}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe), timeout_s)]  # type: ignore[index]

    def call(self, target: str, argument: object, load: LoadConfig) -> Link:
        """Start a process on this machine that calls the function `target`, "module:function", with `argument`."""
        return ProcessLink(Child(target, argument))

    def takes_standby(self, spec: WorkerSpec) -> bool:
        """Return True if the worker may use the whole machine.

        Otherwise it must be restricted before its imports.
        """
        return spec.resources == EngineResources()


PROCESSES = ProcessTransport()
