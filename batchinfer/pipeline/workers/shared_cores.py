"""Adapts how long an engine's threads spin to the load of other processes on the same cores."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchinfer.machine.core_load import CoreLoad
from batchinfer_kernels.cpu.spinning import SpinControl

LOOK_EVERY_S = 0.5  # a look takes 0.1 ms
# Waiting threads spin shortly if other processes and the engine's threads need CROWDED more cores than there are, and
# long again below FREE. Measured on two cores with two threads, 384 rows: with two busy processes, 3.6 to 4.5 s with
# short spins and 5.4 to 9.8 s with long ones; without other processes 1.8 s and 1.7 s.
CROWDED, FREE = 0.25, 0.1


class SharedCores:
    """Measures the CPU load of other processes. If cores are scarce, the engine's waiting threads spin less."""

    def __init__(
        self,
        threads: int,
        spins: SpinControl,
        load: CoreLoad | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads, self._spins = threads, spins
        self._load, self._clock = load or CoreLoad(), clock
        self._looked_at = clock()
        self._used = 0.0  # core seconds of other processes
        self._known_s = 0.0  # measured time in seconds

    @property
    def other_cores(self) -> float | None:
        """Return the mean number of CPU cores that other processes used, or None if unknown."""
        return self._used / self._known_s if self._known_s else None

    def tick(self) -> None:
        """Measure the load of other processes, and adapt the spinning of the engine's threads.

        Does nothing until LOOK_EVERY_S seconds have passed since the last measurement.
        """
        now = self._clock()
        elapsed = now - self._looked_at
        if elapsed < LOOK_EVERY_S:
            return
        self._looked_at, others = now, self._load.measure()
        if others is None:
            return
        self._used += others * elapsed
        self._known_s += elapsed
        missing = self._threads + others - self._load.cores
        if missing > CROWDED:
            self._spins.shorten()
        elif missing < FREE:
            self._spins.lengthen()
