"""The locks of a completion store: one shared by all who use it and held alone by who removes something from it, and
one held for a moment by who adds something."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchinfer.data.storage.durable import FileOps, storage


class StoreLock:
    """Opens the store's lock, which creates its folder. Nothing is held yet. Raises StorageError."""

    def __init__(self, store: Path, ops: FileOps) -> None:
        self._path, self._order = store / "lock", store / "order.lock"
        with storage(store, "create"):
            ops.mkdir(store, 0o700)
        with storage(self._path, "open"):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_alone(self) -> bool:
        """Hold the store alone, if nobody else uses it."""
        with storage(self._path, "lock"):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def share(self) -> None:
        """Wait until nobody holds the store alone; from then on nothing is removed from it.

        Another process may have held it alone between `try_alone` and the return of this.
        """
        with storage(self._path, "lock"):
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Wait until nobody else adds a part: within this block the parts that are there are all that have a number
        up to theirs."""
        with storage(self._order, "lock"):
            fd = os.open(self._order, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with storage(self._order, "lock"):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
