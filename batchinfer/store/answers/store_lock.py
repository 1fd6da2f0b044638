"""The locks of a completion store.

Users of the store share one lock, which is exclusive while files are removed. Another lock is held while a part is
added.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchinfer.filesystem.durable import FileOps, storage

_LONGEST = 64  # maximum bytes of the content of the order lock


class PartOrder:
    """The number of the newest part of the store, cached in the file order.lock.

    A commit uses it to number a new part without listing the folder. It is invalid if the folder changed
    without an update of order.lock.
    """

    def __init__(self, store: Path, fd: int) -> None:
        self._store, self._fd = store, fd

    @property
    def last(self) -> int | None:
        """Return the number of the newest part of the store, or None if the cached number is not valid."""
        with storage(self._store, "read the order of"):
            changed, noted = os.stat(self._store).st_mtime_ns, os.pread(self._fd, _LONGEST, 0).split()
        if len(noted) != 2 or noted[1] != b"%d" % changed or not noted[0].isdigit():
            return None
        return int(noted[0])

    def note(self, number: int) -> None:
        """Record the number of a part that was just committed to the store. Errors are ignored."""
        with suppress(OSError):  # the part is committed anyway; the next commit lists the folder
            text = b"%d %d" % (number, os.stat(self._store).st_mtime_ns)
            os.pwrite(self._fd, text.ljust(_LONGEST), 0)


class StoreLock:
    """The lock of a completion store: shared by all users, exclusive while files are removed.

    The constructor creates the store's folder, but locks nothing. Methods raise StorageError.
    """

    def __init__(self, store: Path, ops: FileOps) -> None:
        self._path, self._order = store / "lock", store / "order.lock"
        with storage(store, "create"):
            ops.mkdir(store, 0o700)
        with storage(self._path, "open"):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_exclusive(self) -> bool:
        """Lock the store exclusively. Return False if another process uses it."""
        with storage(self._path, "lock"):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def share(self) -> None:
        """Wait for a shared lock on the store. While it is held, no process removes files from the store.

        An exclusive lock of this process is released first, so other processes may change the store in
        between.
        """
        with storage(self._path, "lock"):
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    @contextmanager
    def lock_order(self) -> Iterator[PartOrder]:
        """Lock the numbering of parts while the block runs, and yield the cached number of the newest part.

        No other process adds a part within the block, so all parts with smaller numbers are in the folder.
        """
        with storage(self._order, "lock"):
            fd = os.open(self._order, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with storage(self._order, "lock"):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield PartOrder(self._order.parent, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Release all locks of the store."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
