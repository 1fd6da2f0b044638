"""Measures waiting for another process, without the time in which this process itself was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LOOK_S = 0.25


class WaitTimer:
    """Measures how long this process has waited for another process.

    Time in which this process was stopped, for example by a terminal or a container, does not count. Call `look` often:
    of the time between two calls, at most `most_s` seconds count.
    """

    # If this process was stopped, the other process was probably stopped too

    def __init__(self, most_s: float = 2 * LOOK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self.seconds, self._looked_at = 0.0, clock()

    def update(self) -> float:
        """Add the time since the last call to the waiting time, and return the waiting time in seconds."""
        now = self._clock()
        self.seconds += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self.seconds

    def reset(self) -> None:
        """Set the waiting time to 0, after a message has arrived."""
        self.seconds, self._looked_at = 0.0, self._clock()


def wait_for_message(pipe: Connection[Any, Any], within_s: float) -> bool:
    """Wait up to `within_s` seconds for a message in a pipe, and return True if there is one.

    Time in which this process is stopped does not count (see `WaitTimer`).
    """
    timer = WaitTimer()
    while not pipe.poll(LOOK_S):
        if timer.update() >= within_s:
            return False
    return True
