"""Runs the system's C compiler in processes that another thread can stop."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

TIMEOUT_S = 300  # for one process, which takes some seconds on an idle core


class NoCompiler(RuntimeError):
    """There is no C compiler, or it cannot build the CPU operators.

    The message contains the compiler's command and error.
    """


class Compilers:
    """Runs C compilers, which another thread can stop. Thread-safe."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def call(self, command: Sequence[str]) -> str:
        """Run a compiler command and return its stdout. Raises NoCompiler if it fails, times out, or is stopped."""
        try:
            process = self._started(command)
        except OSError as error:
            raise NoCompiler(f"{command[0]} cannot be started: {error}") from error
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
        """Raise NoCompiler if `stop` was called."""
        if self._stopped:
            raise NoCompiler("the compiler was stopped")

    def stop(self) -> None:
        """Kill all running compilers; later calls raise NoCompiler."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _kill(process)

    def _started(self, command: Sequence[str]) -> subprocess.Popen[str]:
        # In its own session, because Ctrl-C in a terminal must not stop the compiler
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
    with suppress(ProcessLookupError):  # the process has already ended
        os.killpg(process.pid, signal.SIGKILL)
