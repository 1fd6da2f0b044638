"""Commands that call a function in a separate process, and a watcher of growing sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from threading import Event, Thread
from typing import Any


def command_of(call: Callable[..., Any], *given: Any) -> list[str]:
    """Return the command of a process that calls a module's function with JSON arguments."""
    code = f"import json, sys; from {call.__module__} import {call.__name__} as call; call(*json.loads(sys.argv[1]))"
    return [sys.executable, "-c", code, json.dumps(given, default=str)]


class Growth:
    """Watches the growth of a size while a block runs."""

    def __init__(self, read: Callable[[], int], every_s: float) -> None:
        self.most = 0
        self._read, self._every_s, self._before = read, every_s, read()
        self._stop = Event()
        self._thread = Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.most = max(self.most, self._read() - self._before)

    def __enter__(self) -> Growth:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
