"""The log file with the tracebacks of engines that died."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import FileOps, storage, write_bytes

MOST_BYTES = 1 << 20  # a traceback takes about 5 KB


class DeathLog:
    """Appends the tracebacks of dead engines to a file. A file that has grown too large is started again."""

    def __init__(self, path: Path, ops: FileOps) -> None:
        self._path, self._ops = path, ops

    def add(self, what: str, traceback: str) -> str:
        """Append a traceback, and return a clause that names the log file for the user.

        Args:
            what: which engine died, and of what.
            traceback: as Python formats it.
        """
        entry = f"{datetime.now().astimezone().isoformat(' ', 'seconds')} {what}\n{traceback.rstrip()}\n\n"
        try:
            write_bytes(self._path, self._earlier() + entry.encode(errors="backslashreplace"), self._ops)
        except StorageError as error:  # the rows matter more than the log
            return f"its traceback could not be written: {error}"
        return f"its traceback is in {self._path}"

    def _earlier(self) -> bytes:
        with storage(self._path, "read"):
            if not self._path.exists() or self._path.stat().st_size > MOST_BYTES:
                return b""
            return self._path.read_bytes()
