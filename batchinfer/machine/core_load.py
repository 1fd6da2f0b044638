"""Measures how much other processes use the CPU cores that this process may use. Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

# psutil is not used: it takes 24 ms to import and reads the same file
_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq; not idle, iowait and steal


class CoreLoad:
    """Measures how much other processes use the CPU cores that this process may use."""

    def __init__(
        self,
        stat: Path = _STAT,
        clock: Callable[[], float] = time.monotonic,
        own_time: Callable[[], float] = time.process_time,
    ) -> None:
        """Start to measure.

        Args:
            stat: The system's file with the CPU time of each core.
            clock: Returns the time in seconds.
            own_time: Returns the CPU seconds of this process.
        """
        self._stat, self._clock, self._own_time = stat, clock, own_time
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._at, self._before = clock(), self._others()

    @property
    def cores(self) -> int:
        """Return the number of cores that this process may use, ignoring a container's CPU quota."""
        return len(self._cores)

    def measure(self) -> float | None:
        """Return how many cores other processes used on average since the last call, such as 1.5.

        The first call measures from the creation of this object. The result is None if the system does not report it.
        """
        now, others = self._clock(), self._others()
        elapsed, before = now - self._at, self._before
        self._at, self._before = now, others
        if others is None or before is None or elapsed <= 0:
            return None
        return min(max(0.0, (others - before) / elapsed), float(len(self._cores)))

    def _others(self) -> float | None:
        if not self._stat.exists():
            return None
        wanted = {f"cpu{core}" for core in self._cores}
        lines = [line.split() for line in self._stat.read_text(encoding="ascii").splitlines()]
        ticks = [sum(int(line[1 + at]) for at in _BUSY) for line in lines if line and line[0] in wanted]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") - self._own_time() if ticks else None
