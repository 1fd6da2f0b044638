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
    """The interface of a description of how a worker ended. As a text, it completes "the engine's process ..."."""

    @property
    def out_of_cpu_time(self) -> bool:
        """Return True if a limit on CPU time ended the worker."""

    @property
    def out_of_memory(self) -> bool:
        """Return True if the worker was killed because memory ran out."""


class Link(Protocol):
    """The interface of the driver's connection to one worker. Closing the connection ends the worker."""

    def send(self, message: object) -> None:
        """Send a message to the worker.

        If the worker is gone, nothing is raised, because its last messages can still be received.
        """

    def poll(self, timeout_s: float) -> bool:
        """Return True if `receive` would not block, after waiting for at most `timeout_s` seconds."""

    def receive(self) -> object:
        """Return the next message of the worker, and wait for it if necessary.

        Raises:
            EOFError: The worker has ended and all its messages were returned.
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
    """The interface of an object that starts workers, as processes or on a cluster, and waits for their messages."""

    def start(self, spec: WorkerSpec) -> Link:
        """Start a worker, and return the connection to it.

        Raises:
            OSError: The worker cannot be started.
        """

    def call(self, target: str, argument: object, load: LoadConfig) -> Link:
        """Start a process that calls a function, and return the connection to it.

        Args:
            target: The function, "module:function". It is called with `argument` and its end of the connection.
            argument: The first argument of the function.
            load: The model that the function reads.
        """

    def can_use_standby(self, spec: WorkerSpec) -> bool:
        """Return True if the standby process of this machine can become the worker with this specification."""

    def wait_for_messages(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Wait until a worker has sent a message or has ended, and return the links of all such workers.

        Args:
            links: The links of the workers.
            timeout_s: Maximum number of seconds to wait. After this time, the result is empty.
        """

    @property
    def wanted(self) -> str:
        """Return a phrase for the user that names the resources for which a worker waits: "node with 8 free CPUs"."""

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
        """Return the next message of the process, and wait for it if necessary.

        Raises:
            EOFError: The process has ended and all its messages were returned.
        """
        with receiving():
            return self.connection.recv()


class ProcessTransport:
    """Starts each worker as a process on this machine, and connects to it with a pipe.

    If an engine crashes, the other engines and the driver are not affected.
    """

    wait_s, wanted = 0.0, ""  # a process never waits for resources

    def start(self, spec: WorkerSpec) -> Link:
        """Start a worker as a process on this machine, and return the connection to it.

        Args:
            spec: Specification of the worker.
        """
        return ProcessLink(Child(WORKER, spec))

    def wait_for_messages(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Wait until a worker has sent a message or has ended, and return the links of all such workers.

        Args:
            links: The links of the workers.
            timeout_s: Maximum number of seconds to wait. After this time, the result is empty.
        """
        by_pipe = {link.connection: link for link in links if isinstance(link, ProcessLink)}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe), timeout_s)]  # type: ignore[index]

    def call(self, target: str, argument: object, load: LoadConfig) -> Link:
        """Start a process on this machine that calls a function, and return the connection to it.

        Args:
            target: The function, "module:function". It is called with `argument` and its end of the connection.
            argument: The first argument of the function.
            load: Not used.
        """
        return ProcessLink(Child(target, argument))

    def can_use_standby(self, spec: WorkerSpec) -> bool:
        """Return True if the worker may use the whole machine, so the standby process can become this worker.

        A worker with some of the cores or GPUs must be restricted to them before it imports libraries.
        """
        return spec.resources == EngineResources()


PROCESSES = ProcessTransport()
