"""The file through which the ranks of an engine connect to each other, and the connection to the parent process."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchinfer.engine.ranks.division import Division, RankConfig


class ParentConnection:
    """The connection to the process that started this one. Several threads may send on it."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self.recv = connection.recv

    def send(self, message: object) -> None:
        """Send a message to the parent process. Raises BrokenPipeError if the parent is gone."""
        with self._sending:
            self._connection.send(message)


class RendezvousFile:
    """A file through which the ranks of an engine find each other. Processes of other users cannot open it.

    It is an anonymous file on Linux, else a file in a private folder.
    """

    def __init__(self, division: Division) -> None:
        self._division = division
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.files: list[int] = []  # descriptors that all ranks inherit with the same numbers
        if sys.platform == "linux":
            self.files.append(os.memfd_create("batchinfer-ranks"))
            # each rank opens the file again by this path, because file locks belong to an open file description
            self._path = f"/proc/self/fd/{self.files[0]}"
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="batchinfer-ranks-")
            self._path = str(Path(self._folder.name) / "rendezvous")

    def rank_config(self, rank: int) -> RankConfig:
        """Return what a rank needs to connect to the others: its number, the model's sharding, and the file's path."""
        return RankConfig(rank, self._division, self._path)

    def remove_folder(self) -> None:
        """Remove the file's private folder, if it has one. Call it once all ranks are connected."""
        if self._folder is not None:
            self._folder.cleanup()
