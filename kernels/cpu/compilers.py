"""Processes of the system's C compiler, which can be ended from another thread."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

TIMEOUT_S = 300  # of one process, which takes some seconds on an idle core


class NoCompiler(RuntimeError):
    """There is no C compiler here, or it cannot build the operators; says which and why."""


class Compilers:
    """Runs compilers until it is stopped; several threads may call it at once."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def call(self, command: Sequence[str]) -> str:
        """Run a command and return its output. Raises NoCompiler when it fails, takes too long, or is stopped."""
        try:
            process = self._started(command)
        except OSError as error:
            raise NoCompiler(f"{command[0]} does not run: {error}") from error
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise NoCompiler(f"{command[0]} cannot build the operators: {error}") from error
        finally:
            self._end(process)
        self.check()
        if process.returncode != 0:
            raise NoCompiler(f"{command[0]} cannot build the operators: {errors.strip()[:500]}")
        return output

    def check(self) -> None:
        """Raises NoCompiler once it was stopped."""
        if self._stopped:
            raise NoCompiler("the compiler was stopped")

    def stop(self) -> None:
        """End what runs; nothing runs afterwards."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _kill(process)

    def _started(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a process in a session of its own: a terminal's signals are for the command, which may still need the
        library."""
        pipe = subprocess.PIPE
        with self._lock:
            self.check()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
            self._running.add(process)
        return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        with self._lock:
            self._running.discard(process)
        if process.returncode is None:
            _kill(process)
            process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    """The compiler and what it has started."""
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, signal.SIGKILL)
