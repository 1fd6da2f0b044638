"""The lock of a completion store: shared by all who use it, held alone by who removes something from it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from batchinfer.data.durable import FileOps, storage


class StoreLock:
    """Opens the store's lock, which creates its folder. Nothing is held yet. Raises StorageError."""

    def __init__(self, store: Path, ops: FileOps) -> None:
        self._path = store / "lock"
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

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
