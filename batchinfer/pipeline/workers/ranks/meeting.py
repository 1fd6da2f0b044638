"""How the ranks of an engine meet: through a file, or through what the leading rank passes on."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from batchinfer.engine.ranks.seat import Division, Seat
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.messages import ListensAt


class Parent:
    """The way to the parent, on which one thread at a time sends."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self.recv = connection.recv

    def send(self, message: object) -> None:
        """Send a message. Raises BrokenPipeError when the parent is gone."""
        with self._sending:
            self._connection.send(message)


class Meeting:
    """A file that the ranks' processes have, and nobody else: without a name where the system has such files, else in a
    folder of this user's own."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.files: list[int] = []  # descriptors that the processes of all ranks need, by the same numbers
        if sys.platform == "linux":
            self.files.append(os.memfd_create("batchinfer-ranks"))
            # Each opens it anew, by a name that only processes that have it know: locks are those of an opened file
            self._path = f"/proc/self/fd/{self.files[0]}"
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="batchinfer-ranks-")
            self._path = str(Path(self._folder.name) / "meeting")

    def seat(self, rank: int) -> Seat:
        """Return the seat of a rank."""
        return Seat(rank, self._division, self._path)

    def over(self) -> None:
        """Remove what has a name: all ranks have met."""
        if self._folder is not None:
            self._folder.cleanup()


class LeadingExchange:
    """The leading rank's end: `tell_all` sends a message to all others."""

    def __init__(self, tell_all: Callable[[ListensAt], None]) -> None:
        self._tell_all, self._heard = tell_all, SimpleQueue[ListensAt]()

    def tell(self, key: str, value: bytes) -> None:
        """Tell the others."""
        self._tell_all(ListensAt(key, value))

    def told(self, message: ListensAt) -> None:
        """Take note of what another rank tells, which was passed on."""
        self._heard.put(message)

    def hear(self) -> tuple[str, bytes]:
        """Return what another rank tells. Should one be gone, this process ends meanwhile."""
        message = self._heard.get()
        return message.key, message.value


class FollowingExchange:
    """The end of a rank that follows, which receives nothing else before it has met the others."""

    def __init__(self, connection: Parent) -> None:
        self._connection = connection

    def tell(self, key: str, value: bytes) -> None:
        """Tell the leading rank, which tells the others."""
        self._connection.send(ListensAt(key, value))

    def hear(self) -> tuple[str, bytes]:
        """Return what another rank tells. Raises EOFError when the leading rank is gone."""
        with receiving():
            message = self._connection.recv()
        if not isinstance(message, ListensAt):
            raise EOFError(f"{type(message).__name__} was sent before the ranks had met")
        return message.key, message.value
