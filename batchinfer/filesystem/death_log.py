"""The log file with tracebacks of engines that died."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import FileOps, storage, write_bytes

MOST_BYTES = 1 << 20  # maximum size of the file; a traceback takes about 5 KB


class DeathLog:
    """Appends tracebacks of engines that died to a log file.

    If the file exceeds 1 MiB, its old content is dropped before the next traceback is added.
    """

    def __init__(self, path: Path, ops: FileOps) -> None:
        self._path, self._ops = path, ops

    def add(self, what: str, traceback: str) -> str:
        """Append a traceback to the log file, and return a clause for the user that names the log file.

        If the file cannot be written, the clause says why, and no error is raised.

        Args:
            what: The engine that died, and the reason.
            traceback: The traceback as formatted by Python.
        """
        entry = f"{datetime.now().astimezone().isoformat(' ', 'seconds')} {what}\n{traceback.rstrip()}\n\n"
        try:
            write_bytes(self._path, self._earlier() + entry.encode(errors="backslashreplace"), self._ops)
        except StorageError as error:  # a failed log must not stop the run
            return f"its traceback could not be written: {error}"
        return f"its traceback is in {self._path}"

    def _earlier(self) -> bytes:
        with storage(self._path, "read"):
            if not self._path.exists() or self._path.stat().st_size > MOST_BYTES:
                return b""
            return self._path.read_bytes()
