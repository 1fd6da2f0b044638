"""A process on a node, as the run's side sees it: what a child is that runs here."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any

from batchinfer.machine.spawning import Ended, receiving
from batchinfer.pipeline.workers.nodes.orders import ProcessEnded
from batchinfer.pipeline.workers.nodes.wire import Wire

_KILL_S = 10.0


class RemoteProcess:
    """Speaks with a process through the node that has it. Its end is a message, too, unless the node is gone."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.connection = self  # as that of a Child
        self._kept: deque[Any] = deque()  # messages that came while somebody waited for the end
        self._over = False
        self._ended: Ended | None = None

    def send(self, message: object) -> None:
        """Send it a message. Raises BrokenPipeError when it is gone."""
        try:
            self.wire.send(message)
        except OSError as error:
            raise BrokenPipeError(str(error)) from error

    def recv(self) -> Any:
        """Return its next message, waiting for it. Raises EOFError once it has ended, or its node is gone."""
        if self._kept:
            return self._kept.popleft()
        if self._over:
            raise EOFError("the process has ended")
        return self._next()

    def poll(self, timeout_s: float) -> bool:
        """Whether there is something to receive, an end included; waits for it for so long."""
        return self.ready or self.wire.poll(timeout_s)

    @property
    def ready(self) -> bool:
        """Whether there is something to receive that no wire shows."""
        return bool(self._kept) or self._over

    def fileno(self) -> int:
        """Return the descriptor that is readable when something comes."""
        return self.wire.fileno()

    def wait(self, within_s: float) -> Ended | None:
        """Return how it ended; None: it has not within so many seconds, or its node is gone and cannot say."""
        deadline = time.monotonic() + within_s
        with suppress(EOFError):
            while not self._over and self.wire.poll(max(0.0, deadline - time.monotonic())):
                self._kept.append(self._next())
        return self._ended

    def kill(self) -> None:
        """Have it ended, and wait until it is. A node that does not say so in time ends it once it sees the end of the
        connection."""
        if not self._over:
            self.wire.stop_sending()
            self.wait(_KILL_S)
            self._over = True

    def close(self) -> None:
        """End it if it still runs, and the connection; safe to call twice."""
        self.kill()
        self._over = True
        self.wire.close()

    def _next(self) -> Any:
        try:
            with receiving():
                message = self.wire.recv()
        except EOFError:
            self._over = True
            raise
        if isinstance(message, ProcessEnded):
            self._over, self._ended = True, Ended(message.code, message.cpu_s)
            raise EOFError("the process has ended")
        return message
