"""A node that has joined a run, as the run sees it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue

from batchinfer.core.errors import Unavailable
from batchinfer.engine.ranks.seat import Seat
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.messages import WorkerSpec
from batchinfer.pipeline.workers.nodes.orders import RunOver, StartProcess
from batchinfer.pipeline.workers.nodes.remote_process import RemoteProcess
from batchinfer.pipeline.workers.nodes.wire import Wire

START_S = 30.0  # a node that has not opened a process's connection by then is lost

Files = Mapping[str, Mapping[str, str]]


class JoinedNode:
    """Starts processes on a node. A thread watches whether it is still there."""

    def __init__(self, number: int, name: str, wire: Wire, lost: Callable[[JoinedNode], None]) -> None:
        self.number, self.name = number, name
        self._wire, self._lost = wire, lost
        self._lock = threading.Lock()
        self._awaited: dict[str, SimpleQueue[Wire | None]] = {}
        self._end = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True, name=f"node {number}")
        self._watching.start()

    def __str__(self) -> str:
        return f"node {self.number} ({self.name})"

    @property
    def gone(self) -> bool:
        """Whether it is."""
        return self._end.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Whether it is gone, or is found to be within so many seconds."""
        return self._end.wait(seconds)

    def start(self, spec: WorkerSpec, files: Files, seat: Seat | None = None) -> RemoteProcess:
        """Start an engine, or a rank of one. Raises Unavailable when the node is gone, or does not answer."""
        channel, arrived = secrets.token_hex(16), SimpleQueue[Wire | None]()
        with self._lock:
            if self.gone:
                raise Unavailable(f"{self} is gone")
            self._awaited[channel] = arrived
        try:
            with suppress(OSError):  # the watch sees it, too
                self._wire.send(StartProcess(channel, spec, files, seat))
            wire = arrived.get(timeout=START_S)
        except Empty:
            self.leave()
            self._watching.join()  # from now on it is gone
            raise Unavailable(f"{self} does not answer") from None
        finally:
            with self._lock:
                del self._awaited[channel]
        if wire is None:
            raise Unavailable(f"{self} is gone")
        return RemoteProcess(wire)

    def arrived(self, channel: str, wire: Wire) -> bool:
        """Take the connection of a process; False: it is not one of this node."""
        with self._lock:
            awaited = self._awaited.get(channel)
            if awaited is None:
                return False
            awaited.put(wire)
        return True

    def over(self) -> None:
        """Tell the node that the run is over."""
        with suppress(OSError):
            self._wire.send(RunOver())
        self.leave()

    def leave(self) -> None:
        """End the connection, which the watch then closes: the node ends its processes."""
        self._wire.hang_up()

    def _watch(self) -> None:
        with suppress(EOFError), receiving():
            self._wire.recv()  # nodes say nothing here: this is the end
        with self._lock:
            self._end.set()
            for awaited in self._awaited.values():
                awaited.put(None)
        self._wire.close()
        self._lost(self)
