"""A process that loads says now and then that it is there: one that was stopped, or hangs as a whole, says nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

BEAT_S = 1.0
# Until a process says something for the first time: it imports torch, from a cold disk perhaps
STARTING_S = 600.0


class Heartbeat:
    """Calls `beat` every BEAT_S seconds within its context, in a thread; for `most_s` seconds at the most. It ends when
    nobody hears it any more."""

    def __init__(self, beat: Callable[[], None], most_s: float = float("inf")) -> None:
        self._beat, self._until = beat, time.monotonic() + most_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Call it no more; safe to call twice."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set() and time.monotonic() < self._until:
            try:
                self._beat()
            except OSError:
                return
            self._over.wait(BEAT_S)
