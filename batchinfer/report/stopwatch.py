"""Measures the phases of a run. Each moment belongs to exactly one phase, so the phases add up to the whole time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

STARTUP, OTHER = "startup_s", "other_s"
# Shorter spans are merged into their neighbours: while an engine loads, its phase is left and entered 10 times a second
SHORTEST_SPAN_S = 0.02


class Span(NamedTuple):
    """An interval of time in one phase of a run, in seconds since the command was started."""

    phase: str
    from_s: float
    until_s: float


class Stopwatch:
    """Measures how long each phase of a run takes. Each moment belongs to exactly one phase.

    The first phase is STARTUP. Later time that belongs to no other phase is counted as OTHER.
    """

    def __init__(self, already_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start the stopwatch in the phase STARTUP.

        Args:
            already_s: Seconds that STARTUP has already taken.
            clock: Returns the time in seconds.
        """
        self._clock = clock
        self._since = clock()
        self._started = self._since - already_s
        self._phase, self._spent = STARTUP, {STARTUP: already_s, OTHER: 0.0}
        self._spans = [Span(STARTUP, 0.0, already_s)]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time of the block for a phase.

        The time of a nested `timed` block counts for its own phase only.
        """
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(OTHER if before == STARTUP else before)

    def switch(self, phase: str) -> str:
        """End the current phase, begin another one, and return the name of the ended phase."""
        now, before = self._clock(), self._phase
        self._spent[before] = self._spent.get(before, 0.0) + now - self._since
        self._note(Span(before, self.at(self._since), self.at(now)))
        self._since, self._phase = now, phase
        return before

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase so far, by name."""
        self.switch(self._phase)
        return dict(self._spent)

    @property
    def spans(self) -> list[Span]:
        """Return the finished intervals of phases in order. Intervals below SHORTEST_SPAN_S are left out."""
        return list(self._spans)

    def at(self, moment: float) -> float:
        """Convert a time of the stopwatch's clock to seconds since the start of the command."""
        return moment - self._started

    def _note(self, span: Span) -> None:
        last = self._spans[-1]
        if last.phase == span.phase and span.from_s - last.until_s <= SHORTEST_SPAN_S:
            self._spans[-1] = last._replace(until_s=span.until_s)
        elif span.until_s - span.from_s >= SHORTEST_SPAN_S:
            self._spans.append(span)


def process_age_s() -> float:
    """Return the seconds since this process was started, imports included, or 0 on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return 0.0
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from field 3 of proc(5) on
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, in seconds since boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
