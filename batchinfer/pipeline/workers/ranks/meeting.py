"""The file through which the ranks of an engine meet, and the connection to the parent."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchinfer.engine.ranks.division import Division, RankConfig


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

    def rank_config(self, rank: int) -> RankConfig:
        """Return the RankConfig of a rank."""
        return RankConfig(rank, self._division, self._path)

    def over(self) -> None:
        """Remove what has a name: all ranks have met."""
        if self._folder is not None:
            self._folder.cleanup()
