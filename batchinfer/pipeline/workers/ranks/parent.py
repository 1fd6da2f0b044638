"""The way to whoever has started a process."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Any


class Parent:
    """The way to the parent, on which one thread at a time sends."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self.recv = connection.recv

    def send(self, message: object) -> None:
        """Send a message. Raises BrokenPipeError when the parent is gone."""
        with self._sending:
            self._connection.send(message)
