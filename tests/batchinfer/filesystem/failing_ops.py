"""A `FileOps` whose n-th operation fails or kills the process."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from batchinfer.filesystem.durable import FileOps

CHANGES = [name for name in vars(FileOps) if not name.startswith("_")]


class FailingOps(FileOps):
    """Counts operations. Number `fail_at` (0-based) raises OSError(code), or kills the process if `code` is None.

    Operations of several threads are counted in the order of execution, which may vary.
    """

    def __init__(self, fail_at: int = -1, code: int | None = None) -> None:
        self.count = 0
        self.log: list[str] = []
        self._fail_at, self._code = fail_at, code
        self._lock = threading.Lock()

    def _step(self, name: str, path: Any) -> None:
        with self._lock:
            number, self.count = self.count, self.count + 1
            self.log.append(f"{name} {Path(path).name if isinstance(path, Path) else ''}")
        if number != self._fail_at:
            return
        if self._code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(self._code, os.strerror(self._code))


def _counted(name: str) -> Any:
    real = getattr(FileOps, name)

    def method(self: FailingOps, *args: Any) -> Any:
        self._step(name, args[0])
        return real(self, *args)

    return method


for _name in CHANGES:
    setattr(FailingOps, _name, _counted(_name))


class ShortWrites(FileOps):
    """Writes at most 7 bytes per call."""

    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[:7])
