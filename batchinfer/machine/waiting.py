"""Seconds that are held against another process: those in which this one could run, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LOOK_S = 0.25


class Waited:
    """Adds up a wait, look by look. A look counts for `most_s` seconds at the most: while a terminal, a container or a
    virtual machine has stopped this process, the one that it waits for is stopped as a rule, too."""

    def __init__(self, most_s: float = 2 * LOOK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self.seconds, self._looked_at = 0.0, clock()

    def look(self) -> float:
        """The seconds so far."""
        now = self._clock()
        self.seconds += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self.seconds

    def again(self) -> None:
        """Something came: what is waited for from now on begins with no seconds."""
        self.seconds, self._looked_at = 0.0, self._clock()


def comes(pipe: Connection[Any, Any], within_s: float) -> bool:
    """Return whether there is something to receive, after waiting at most that many seconds in which this process
    runs."""
    waited = Waited()
    while not pipe.poll(LOOK_S):
        if waited.look() >= within_s:
            return False
    return True
