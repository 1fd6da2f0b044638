"""Keeps the engine's threads from fighting other processes for the cores."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchinfer.machine.core_load import CoreLoad
from batchinfer_kernels.cpu.spinning import Spinning

LOOK_EVERY_S = 0.5  # a look takes 0.1 ms
# Cores' worth of others' work beyond what the engine's threads leave free, from which on threads that wait stop
# spinning. Two cores, two threads, two busy processes beside: 384 rows took 3.6 to 4.5 s with short spins, 5.4 to 9.8 s
# with long ones; without others 1.7 s with long and 1.8 s with short ones.
CROWDED, FREE = 0.25, 0.1


class SharedCores:
    """Looks now and then how many cores others use, and has threads spin shortly while they are too many."""

    def __init__(
        self,
        threads: int,
        spins: Spinning,
        load: CoreLoad | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads, self._spins = threads, spins
        self._load, self._clock = load or CoreLoad(), clock
        self._looked_at = clock()
        self._used = 0.0  # core seconds of others
        self._known_s = 0.0  # seconds for which they are known

    @property
    def other_cores(self) -> float | None:
        """Cores that other processes used, on average since the start; None where that is unknown."""
        return self._used / self._known_s if self._known_s else None

    def tick(self) -> None:
        """Look at the load if it is time to; most calls do nothing."""
        now = self._clock()
        elapsed = now - self._looked_at
        if elapsed < LOOK_EVERY_S:
            return
        self._looked_at, others = now, self._load.look()
        if others is None:
            return
        self._used += others * elapsed
        self._known_s += elapsed
        missing = self._threads + others - self._load.cores
        if missing > CROWDED:
            self._spins.shorten()
        elif missing < FREE:
            self._spins.lengthen()
