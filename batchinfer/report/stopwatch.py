"""Measures the phases of a run: every moment belongs to one phase, so that the phases add up to the whole."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

STARTUP, OTHER = "startup_s", "other_s"
# Spans that are shorter are not told apart: while an engine loads, its phase is left and entered ten times a second
SHORTEST_SPAN_S = 0.02


class Span(NamedTuple):
    """A stretch of time that belonged to one phase, in seconds since the command was started."""

    phase: str
    from_s: float
    until_s: float


class Stopwatch:
    """Begins in the phase STARTUP, with `already_s` seconds of it behind; what no phase claims afterwards is OTHER."""

    def __init__(self, already_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._started = self._since - already_s
        self._phase, self._spent = STARTUP, {STARTUP: already_s, OTHER: 0.0}
        self._spans = [Span(STARTUP, 0.0, already_s)]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """The time inside belongs to `phase` alone, also when an exception leaves it; phases may nest."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(OTHER if before == STARTUP else before)

    def switch(self, phase: str) -> str:
        """The time from here on belongs to `phase`; the phase that it belonged to before."""
        now, before = self._clock(), self._phase
        self._spent[before] = self._spent.get(before, 0.0) + now - self._since
        self._note(Span(before, self.at(self._since), self.at(now)))
        self._since, self._phase = now, phase
        return before

    def read(self) -> dict[str, float]:
        """Seconds of each phase so far."""
        self.switch(self._phase)
        return dict(self._spent)

    @property
    def spans(self) -> list[Span]:
        """The phases in the order of time, as far as they have ended; short ones count to those around them."""
        return list(self._spans)

    def at(self, moment: float) -> float:
        """Return how many seconds after the start of the command a moment of the clock was."""
        return moment - self._started

    def _note(self, span: Span) -> None:
        last = self._spans[-1]
        if last.phase == span.phase and span.from_s - last.until_s <= SHORTEST_SPAN_S:
            self._spans[-1] = last._replace(until_s=span.until_s)
        elif span.until_s - span.from_s >= SHORTEST_SPAN_S:
            self._spans.append(span)


def process_age_s() -> float:
    """Seconds since this process was started, imports included; 0 where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return 0.0
    behind_the_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(behind_the_name[19]) / os.sysconf(
        "SC_CLK_TCK"
    )  # field 22 of proc(5), since the machine's boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
