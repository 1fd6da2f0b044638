"""How far the job is: a bar in tokens on a terminal, elsewhere a line now and then, nothing when quiet."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TextIO

from tqdm import tqdm

from batchinfer.report.units import about, count, short
from batchinfer.request import StepSample

Phase = Literal["reading", "planning", "loading model", "running", "publishing"]

FIRST_LINE_S = 5.0
LINE_EVERY_S = 30.0
BAR_EVERY_S = 0.1
RATE_WINDOW_S = (
    30.0  # the rate is that of the last seconds: a mixed job's first steps say little about its last
)
RATE_SAMPLE_S = 1.0
FINISHED_BEFORE_TRUST = 16  # completions before their mean length corrects the expected total


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm without its watchdog thread and its inter-process lock: one process draws one bar."""

    monitor_interval = 0
    _lock = threading.RLock()


@dataclass(slots=True)
class _Work:
    """What one phase has to do and has done, in rows and (while running) in tokens."""

    phase: Phase
    rows: int = 0
    total_rows: int | None = None
    prompt_tokens: int | None = None  # None: not a phase of tokens
    expected_tokens: int = 0  # upper bound of the output
    ran_tokens: int = 0
    finished: int = 0
    finished_expected: int = 0
    finished_actual: int = 0
    marks: deque[tuple[float, int]] = field(default_factory=deque)  # (time, done) within the rate's window

    @property
    def done(self) -> int:
        return self.rows if self.prompt_tokens is None else self.ran_tokens

    @property
    def total(self) -> int | None:
        """What the phase comes to; shrinks as outputs end before the most they may have."""
        if self.prompt_tokens is None:
            return self.total_rows
        left = self.expected_tokens - self.finished_expected
        if self.finished >= FINISHED_BEFORE_TRUST and self.finished_expected > 0:
            left = round(left * self.finished_actual / self.finished_expected)
        return max(self.done, self.prompt_tokens + self.finished_actual + left)

    @property
    def unit(self) -> str:
        return "rows" if self.prompt_tokens is None else "tok"

    def mark(self, now: float) -> None:
        """Remember how much was done by now, at most once a second, for the length of the window."""
        if self.marks and now - self.marks[-1][0] < RATE_SAMPLE_S:
            return
        self.marks.append((now, self.done))
        while len(self.marks) > 2 and now - self.marks[1][0] >= RATE_WINDOW_S:
            self.marks.popleft()

    def rate(self, now: float) -> float | None:
        """Units a second over the window; None before anything was done."""
        if not self.marks:
            return None
        since, before = self.marks[0]
        done = self.done - before
        return done / (now - since) if now > since and done > 0 else None

    def left_s(self, now: float) -> float | None:
        rate, total = self.rate(now), self.total
        return None if rate is None or total is None else (total - self.done) / rate


class Progress:
    """Writes to the stream that it is given, and to nothing else. Not for several threads at once."""

    def __init__(
        self,
        stream: TextIO,
        *,
        quiet: bool = False,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`terminal`: draw a bar; None asks the stream whether it is one."""
        self._stream = stream
        self._quiet = quiet
        self._terminal = stream.isatty() if terminal is None else terminal
        self._clock = clock
        self._work: _Work | None = None
        self._bar: Any = None
        self._next_draw = clock() + (BAR_EVERY_S if self._terminal else FIRST_LINE_S)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, name: Phase, total_rows: int | None = None) -> None:
        """Begin a phase that is counted in rows, or not at all (planning, loading model)."""
        self._begin(_Work(name, total_rows=total_rows))

    def running(self, *, rows: int, prompt_tokens: int, expected_tokens: int) -> None:
        """Begin the phase of tokens. `expected_tokens` is the upper bound of the output."""
        self._begin(
            _Work("running", total_rows=rows, prompt_tokens=prompt_tokens, expected_tokens=expected_tokens)
        )

    def rows(self, number: int) -> None:
        """So many more rows were read or published."""
        self._current().rows += number
        self.tick()

    def step(self, sample: StepSample) -> None:
        """An engine step ran. Tokens that a prefix saved count as done, recomputed and padded ones do not."""
        prompt = sample.prefill_tokens - sample.recomputed_tokens + sample.cached_tokens
        self._current().ran_tokens += prompt + sample.sampled_tokens
        self.tick()

    def finished(self, *, expected_tokens: int, completion_tokens: int, rows: int = 1) -> None:
        """A request is done that was expected to have up to `expected_tokens`, and serves `rows` rows."""
        work = self._current()
        work.rows += rows
        work.finished += 1
        work.finished_expected += expected_tokens
        work.finished_actual += completion_tokens
        self.tick()

    def tick(self) -> None:
        """Draw if it is time to; for callers that wait without anything to count."""
        now = self._clock()
        work = self._current()
        work.mark(now)
        if self._quiet or now < self._next_draw:
            return
        self._next_draw = now + (BAR_EVERY_S if self._terminal else LINE_EVERY_S)
        if self._terminal:
            self._draw(work, now)
        else:
            self._line(line_of(work, now))

    def close(self) -> None:
        """End the present phase; the bar leaves its last state on the screen."""
        if self._bar is not None and self._work is not None:
            self._draw(self._work, self._clock())
            self._bar.close()
        self._bar = None
        self._work = None

    def _begin(self, work: _Work) -> None:
        self.close()
        self._work = work
        work.mark(self._clock())
        if self._terminal and not self._quiet:
            self._bar = _new_bar(work, self._stream)

    def _current(self) -> _Work:
        if self._work is None:
            raise ValueError("no phase has begun: call phase() or running() first")
        return self._work

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _draw(self, work: _Work, now: float) -> None:
        self._bar.n = work.done
        self._bar.total = work.total
        self._bar.set_postfix_str(" · ".join(_details(work, now)), refresh=False)
        self._bar.refresh()


def _new_bar(work: _Work, stream: TextIO) -> Any:
    counted = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} " + work.unit + " {postfix}"
    open_ended = "{desc} {n_fmt} " + work.unit + " {postfix}"
    form = open_ended if work.total is None else counted
    if work.phase in ("planning", "loading model"):
        form = "{desc} …"
    return _Bar(
        total=work.total, desc=work.phase, file=stream, unit_scale=True, dynamic_ncols=True, bar_format=form
    )


def line_of(work: _Work, now: float) -> str:
    """`running 12% · 1.2M of 10M tokens · 8.1k tok/s · about 3 min left · 1,203 of 9,000 rows`"""
    done, total = work.done, work.total
    head = work.phase if not total else f"{work.phase} {done / total:.0%}"
    parts = [head]
    if work.prompt_tokens is not None:
        parts.append(f"{short(done)} of {short(total)} tokens")
    return " · ".join([*parts, *_details(work, now), *_row_count(work)])


def _details(work: _Work, now: float) -> list[str]:
    """Rate and time left, as far as they are known."""
    rate, left = work.rate(now), work.left_s(now)
    parts = [] if rate is None else [f"{short(rate)} {work.unit}/s"]
    return parts if left is None else [*parts, f"about {about(left)} left"]


def _row_count(work: _Work) -> list[str]:
    if work.total_rows is not None:
        return [f"{count(work.rows)} of {count(work.total_rows)} rows"]
    return [f"{count(work.rows)} rows"] if work.rows else []
