"""The heartbeat of a process that loads a model. Without it, the watchdog ends the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

BEAT_S = 1.0
# Limit on the time until the first message of a process, which may import torch from a slow disk
STARTING_S = 600.0


class Heartbeat:
    """Calls a function about every BEAT_S (1) seconds in a thread. A context manager.

    The calls end with the block, or when the function raises OSError because its receiver is gone.
    """

    def __init__(self, beat: Callable[[], None], most_s: float = float("inf")) -> None:
        """Prepare the thread, which starts with the block.

        Args:
            beat: The function to call.
            most_s: Number of seconds after which the calls end, even within the block.
        """
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
        """Stop the calls and wait for the thread. May be called twice."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set() and time.monotonic() < self._until:
            try:
                self._beat()
            except OSError:
                return
            self._over.wait(BEAT_S)
