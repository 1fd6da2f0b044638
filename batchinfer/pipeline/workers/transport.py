"""How messages travel between the parent and a worker: through a pipe to a process of its own, or as a test likes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Protocol

from batchinfer.machine.spawning import Child, Ended, receiving
from batchinfer.pipeline.workers.engine_entry import WORKER
from batchinfer.pipeline.workers.messages import WorkerSpec


class Link(Protocol):
    """The parent's end of the way to one worker, which lives as long as the link."""

    def send(self, message: object) -> None:
        """Send a message. Raises nothing when the worker is gone: what it said before it ended is still to be
        received."""

    def poll(self, timeout_s: float) -> bool:
        """Whether there is something to receive, an end included; waits for it for so long."""

    def receive(self) -> object:
        """Return the next message of the worker. Raises EOFError once the worker has ended and all was received."""

    def wait(self, within_s: float) -> Ended | None:
        """Return how the worker ended; None: it has not within `within_s` seconds."""

    def kill(self) -> None:
        """End the worker now, and wait until it has."""

    def close(self) -> None:
        """Kill the worker if it still runs, and give back what the link holds; safe to call twice."""


class Transport(Protocol):
    """Starts workers, and tells which of them have something to say."""

    def start(self, spec: WorkerSpec) -> Link:
        """Start a worker. Raises OSError where none can be started."""

    def speaking(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Return the links that can be received from; waits for the first one for so long."""

    def lost(self, link: Link) -> bool:
        """Whether a worker that has died has lost what it ran on, and did not die by itself."""

    def missing(self, spec: WorkerSpec) -> str:
        """Say what has been lost without which a worker cannot be started, and which may come back; "": nothing."""

    @property
    def patience_s(self) -> float:
        """Return for how many seconds a run without any engine waits for what is missing."""


class ProcessLink:
    """A pipe to a worker that is a process of its own."""

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

    def lost(self, link: Link) -> bool:
        """Return that it has not: it ran on this machine."""
        return False

    def missing(self, spec: WorkerSpec) -> str:
        """Return that nothing is: processes are started on this machine."""
        return ""

    @property
    def patience_s(self) -> float:
        """Return that a run waits for nothing."""
        return 0.0


PROCESSES = ProcessTransport()
