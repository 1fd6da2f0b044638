"""The locks of a completion store: one shared by all who use it and held alone by who removes something from it, and
one held for a moment by who adds something."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchinfer.filesystem.durable import FileOps, storage

_LONGEST = 64  # bytes of what the lock of the order holds


class PartOrder:
    """The number of the last part, kept in the lock of those who add parts: a store of ten million answers has twenty
    thousand files. When they were listed for each commit, ten million rows took 13.4 times the CPU time of a million,
    and 11.0 times without.

    With it stands when the store's folder last changed. Where that is another moment now, somebody has added a part
    without noting it, or died before, and the number is not known.
    """

    def __init__(self, store: Path, fd: int) -> None:
        self._store, self._fd = store, fd

    @property
    def last(self) -> int | None:
        """Return the number of the last part; None: it is not known."""
        with storage(self._store, "read the order of"):
            changed, noted = os.stat(self._store).st_mtime_ns, os.pread(self._fd, _LONGEST, 0).split()
        if len(noted) != 2 or noted[1] != b"%d" % changed or not noted[0].isdigit():
            return None
        return int(noted[0])

    def note(self, number: int) -> None:
        """Note the number of a part that is committed."""
        with suppress(OSError):  # it is committed all the same, and the next commit lists the parts
            text = b"%d %d" % (number, os.stat(self._store).st_mtime_ns)
            os.pwrite(self._fd, text.ljust(_LONGEST), 0)


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
    def ordered(self) -> Iterator[PartOrder]:
        """Wait until nobody else adds a part: within this block the parts that are there are all that have a number
        up to theirs."""
        with storage(self._order, "lock"):
            fd = os.open(self._order, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with storage(self._order, "lock"):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield PartOrder(self._order.parent, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
