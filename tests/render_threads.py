"""Render workers in threads: jobs of tests have few harmless rows, and starting a process takes longer."""

from __future__ import annotations

import signal
import threading
from contextlib import closing, suppress
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from batchinfer.input.prompts import render_worker
from batchinfer.machine.spawning import ChildExit
from tests.patience import PATIENCE_S


class RenderThread:
    """A fake of batchinfer.machine.spawning.Child.

    A template that hangs needs a process: a thread cannot be ended.
    """

    def __init__(self, _: str, *arguments: Any, files: object = ()) -> None:
        self.connection, theirs = Pipe()

        def serve() -> None:
            with closing(theirs), suppress(BrokenPipeError, ConnectionResetError):
                render_worker.serve(*arguments, theirs)

        self._thread = threading.Thread(target=serve, daemon=True, name="render")
        self._thread.start()

    def wait(self, within_s: float) -> ChildExit | None:
        self._thread.join(within_s)
        return None if self._thread.is_alive() else ChildExit(1)

    def close(self) -> None:
        self.connection.close()
        assert self.wait(PATIENCE_S), "a template hangs: add the fixture render_processes to this test"


def use_threads(patch: pytest.MonkeyPatch) -> None:
    """Replace render processes by threads, which have no limits on memory and CPU time."""
    quiet = {name: lambda *_: None for name in ("signal", "pthread_sigmask", "setitimer")}
    patch.setattr(render_worker, "signal", SimpleNamespace(**(vars(signal) | quiet)))
    patch.setattr(render_worker, "limit_memory", lambda _: None)
    patch.setattr(render_worker, "Child", RenderThread)
