"""Progress of a job: a bar on a terminal, periodic lines elsewhere, nothing when quiet."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Literal, TextIO

from batchinfer.core.samples import StepSample
from batchinfer.core.text import printable, with_near_paths
from batchinfer.core.wording import about, count, short, size
from batchinfer.report.expected_output import ExpectedOutput

Phase = Literal[
    "listing",
    "downloading",
    "calibrating",
    "reading",
    "planning",
    "waiting",
    "loading model",
    "running",
    "publishing",
]

UNCOUNTED: tuple[Phase, ...] = ("listing", "planning", "waiting", "loading model")

FIRST_LINE_S = 5.0
LINE_EVERY_S = 30.0
BAR_EVERY_S = 0.1
SPARE_COLUMNS = 3  # right of the bar: the terminal writes ^C there without breaking the line
_SO_FAR = " read so far"
ERASE_LINE = "\r\x1b[2K"
# The rate is that of the last seconds: a mixed job's first steps say little about its last
RATE_WINDOW_S = 30.0
RATE_SAMPLE_S = 1.0
RECORD_EVERY_S = 2.0  # for who looks from outside; a record is a small file


class _Screen:
    """A stream that may go away (a closed terminal, a pipe without a reader): from then on nothing is written."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        encoding = getattr(stream, "encoding", None) or ""
        self.ascii = not encoding.lower().startswith("utf")
        # a dumb terminal can neither return to the line's start nor erase it
        self.draws = stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def write(self, text: str) -> None:
        self._attempt(lambda stream: stream.write(text))

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def _attempt(self, what: Callable[[TextIO], object]) -> None:
        if self._stream is None:
            return
        try:
            what(self._stream)
        except OSError:  # the work goes on: its outcome stands in the run table
            self._stream = None


@dataclass(slots=True)
class _Work:
    """The work of one phase, total and done, in rows and (while running) in tokens."""

    phase: Phase
    rows: int = 0
    total_rows: int | None = None
    bytes: int = 0  # of the input files, or of a download
    total_bytes: int | None = None
    prompt_tokens: int | None = None  # None: not a phase of tokens
    ran_tokens: int = 0
    output: ExpectedOutput = field(default_factory=ExpectedOutput)
    more: bool = False  # there may be more rows than are known
    marks: deque[tuple[float, int]] = field(default_factory=deque)  # (time, done) within the rate's window
    last_rate: float | None = None  # of a run that is stopping: fewer and fewer rows run at once

    @property
    def done(self) -> int:
        if self.phase == "downloading":
            return self.bytes
        return self.rows if self.prompt_tokens is None else self.ran_tokens

    @property
    def total(self) -> int | None:
        """Return the total work of the phase. The tokens of answers are estimated from those that have ended."""
        if self.phase == "downloading":
            return self.total_bytes
        if self.prompt_tokens is None:
            return self.total_rows
        return max(self.done, self.prompt_tokens + self.output.total)

    @property
    def share(self) -> float | None:
        """How much of the phase is done, 0 … 1. Reading ends with the files or at the row limit."""
        if self.more:
            return None
        parts = ((self.done, self.total), (self.bytes, self.total_bytes))
        shares = [done / total for done, total in parts if total]
        return min(1.0, max(shares)) if shares else None

    @property
    def in_layers(self) -> bool:
        """Whether layers are counted, each of which may take longer than the window of the rate."""
        return self.phase == "calibrating"

    @property
    def unit(self) -> str:
        if self.in_layers:
            return "layers"
        return "rows" if self.prompt_tokens is None else "tok"

    def mark(self, now: float) -> None:
        """Remember how much was done by now, at most once a second, for the length of the window; layers as each of
        them is done."""
        before = self.marks[-1] if self.marks else None
        if before is not None and (
            self.done == before[1] if self.in_layers else now - before[0] < RATE_SAMPLE_S
        ):
            return
        self.marks.append((now, self.done))
        while len(self.marks) > 2 and now - self.marks[1][0] >= RATE_WINDOW_S:
            self.marks.popleft()

    def rate(self, now: float) -> float | None:
        """Units a second over the window, of layers until the last one was done; None before anything was done."""
        if self.last_rate is not None:
            return self.last_rate
        if not self.marks:
            return None
        since, before = self.marks[0]
        until, done = self.marks[-1] if self.in_layers else (now, self.done)
        return (done - before) / (until - since) if until > since and done > before else None

    def left_s(self, now: float) -> float | None:
        """Seconds to the end at the present rate; None when that is not known, or nothing is left."""
        rate, share = self.rate(now), self.share
        if rate is None or not share or share >= 1:
            return None
        left = self.done * (1 - share) / share / rate
        return max(0.0, left - (now - self.marks[-1][0])) if self.in_layers else left


@dataclass(frozen=True, slots=True)
class ProgressState:
    """How far a run is at one moment. None: not known, or nothing that the phase counts."""

    phase: Phase
    rows: int
    rows_total: int | None
    tokens: int | None
    tokens_total: int | None
    share: float | None  # of the phase, 0 … 1
    per_s: float | None  # tokens a second while running, else rows
    left_s: float | None  # to the end of the phase
    errors: dict[str, int]  # rows by error code, as far as they are known


Recorder = Callable[[ProgressState], None]


class Progress:
    """Writes to the stream that it is given, and to nothing else. Not for several threads at once."""

    def __init__(
        self,
        stream: TextIO | None,
        *,
        job: str | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], datetime] = datetime.now,
    ) -> None:
        """A terminal gets a bar. Lines elsewhere begin with the time and the `job`, if it is named."""
        self._screen = _Screen(stream)
        self._job = job
        self._quiet = quiet
        self._clock, self._today = clock, today
        self._work: _Work | None = None
        self._has_bar = False
        self._recorder: Recorder | None = None
        self._next_record = 0.0
        self._errors: Counter[str] = Counter()
        self._next_draw = clock() + (BAR_EVERY_S if self._screen.draws else FIRST_LINE_S)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, name: Phase, total_rows: int | None = None) -> None:
        """Begin a phase that is counted in rows, or not at all (planning, loading model)."""
        self._begin(_Work(name, total_rows=total_rows))

    def running(self, *, rows: int, prompt_tokens: int, expected_tokens: int, more: bool = False) -> None:
        """Begin the phase of tokens. `expected_tokens` is the upper bound of the output; `more`: there may be more rows
        than these."""
        output = ExpectedOutput(expected_tokens)
        self._begin(_Work("running", total_rows=rows, prompt_tokens=prompt_tokens, output=output, more=more))

    def known(self, *, rows: int, done: int, prompt_tokens: int, expected_tokens: int, more: bool) -> None:
        """Take note of how many rows there are by now, how many of them have their answers, and of all their tokens."""
        work = self._current()
        work.total_rows, work.rows, work.prompt_tokens, work.more = rows, done, prompt_tokens, more
        work.output.expect(expected_tokens)

    def more(self, *, prompt_tokens: int, expected_tokens: int) -> None:
        """Rows that were counted already run again, with so many more tokens."""
        work = self._current()
        work.prompt_tokens = (work.prompt_tokens or 0) + prompt_tokens
        work.output.more(expected_tokens)

    def downloading(self, received: int, total: int) -> None:
        """Begin the phase of a download, some of whose bytes are there already."""
        self._begin(_Work("downloading", bytes=received, total_bytes=total))

    def received(self, received: int) -> None:
        """Take note of how many bytes of the download are there in all."""
        self._current().bytes = received
        self.tick()

    def rows(self, number: int) -> None:
        """Count more rows that were read or published, or layers that were calibrated."""
        self._current().rows += number
        self.tick()

    def read(self, rows: int, bytes_read: int, bytes_total: int) -> None:
        """Take note of how many rows, and bytes of the input files, were read in all."""
        work = self._current()
        work.rows, work.bytes, work.total_bytes = rows, bytes_read, bytes_total
        self.tick()

    def step(self, sample: StepSample, engine: int = 0) -> None:
        """The `engine`-th engine of the run ran a step. Tokens that a prefix saved count as done, recomputed and padded
        ones do not."""
        work, said = self._current(), sample.output_tokens
        work.ran_tokens += sample.prompt_tokens + sample.cached_tokens + said
        work.output.step(said, sample.running, engine)
        self.tick()

    def recorded_by(self, recorder: Recorder | None) -> None:
        """From now on `recorder` gets the state at the start of each phase, and every RECORD_EVERY_S seconds."""
        self._recorder = recorder

    def record(self) -> None:
        """Give the recorder the state at this moment, if a phase is under way."""
        if self._work is not None:
            self._record(self._work, self._clock())

    def failed(self, codes: Mapping[str, int]) -> None:
        """Count more error rows, by their codes."""
        self._errors.update(codes)

    def finished(
        self,
        *,
        expected_tokens: int,
        completion_tokens: int,
        rows: int = 1,
        error: str | None = None,
        cut: bool = False,
        engine: int = 0,
    ) -> None:
        """A request is done that was expected to have up to `expected_tokens`, and serves `rows` rows. `cut`: it had no
        room for a longer answer."""
        work = self._current()
        if error is not None and rows:
            self._errors[error] += rows
        work.rows += rows
        work.output.finished(expected_tokens, completion_tokens, cut, engine)
        self.tick()

    def tick(self) -> None:
        """Draw if it is time to; for callers that wait without anything to count."""
        now = self._clock()
        work = self._current()
        work.mark(now)
        if now >= self._next_record:
            self._record(work, now)
        if self._quiet or now < self._next_draw:
            return
        self._next_draw = now + (BAR_EVERY_S if self._screen.draws else LINE_EVERY_S)
        if self._has_bar:
            self._draw(work, now)
        elif not self._screen.draws:
            self._line(line_of(work, now))

    def stopping(self) -> None:
        """Keep the present rate for estimates: only the rows in progress are finished from now on."""
        if self._work is not None:
            self._work.last_rate = self._work.rate(self._clock())

    @property
    def rows_left(self) -> int | None:
        """Return how many known rows have no final answer yet; None outside of the phase of tokens."""
        work = self._work
        if work is None or work.prompt_tokens is None or work.total_rows is None:
            return None
        return max(0, work.total_rows - work.rows)

    @property
    def knows_all_rows(self) -> bool:
        """Return False while there may be more rows than are known."""
        return self._work is None or not self._work.more

    def left_s(self) -> float | None:
        """Seconds to the end of the phase at its present rate; None: not known."""
        return None if self._work is None else self._work.left_s(self._clock())

    def left_of_known_s(self) -> float | None:
        """Seconds until all that is known by now is done, at the present rate; None: the rate is not known."""
        work = self._work
        rate = None if work is None else work.rate(self._clock())
        return None if work is None or rate is None else max(0, (work.total or 0) - work.done) / rate

    @property
    def share(self) -> float | None:
        """How much of the phase is done, 0 … 1; None: not known."""
        return None if self._work is None else self._work.share

    @property
    def output(self) -> ExpectedOutput | None:
        """Return the expected lengths of the answers; None outside of a phase that counts tokens."""
        return None if self._work is None or self._work.prompt_tokens is None else self._work.output

    def note(self, text: str) -> None:
        """Lines of their own, above the bar; also where progress itself is quiet."""
        if not self._has_bar or self._work is None:
            self._line(text)
            return
        self._screen.write(ERASE_LINE)  # with the ^C of a terminal that echoes it
        self._line(text)
        self._draw(self._work, self._clock())

    def close(self) -> None:
        """End the present phase; its bar leaves its last state on the screen, unless it counted nothing."""
        if self._has_bar and self._work is not None:
            self._draw(self._work, self._clock())
            stays = self._work.done > 0 or self._work.phase in UNCOUNTED
            self._screen.write("\n" if stays else ERASE_LINE)
            self._screen.flush()
        self._has_bar = False
        self._work = None

    def _begin(self, work: _Work) -> None:
        self.close()
        self._work = work
        work.mark(self._clock())
        if self._screen.draws and not self._quiet:
            self._has_bar = True
            self._draw(work, self._clock())
        self._record(work, self._clock())

    def _record(self, work: _Work, now: float) -> None:
        self._next_record = now + RECORD_EVERY_S
        if self._recorder is None:
            return
        tokens = None if work.prompt_tokens is None else work.done
        total = None if work.prompt_tokens is None else work.total
        state = ProgressState(
            work.phase, work.rows, work.total_rows, tokens, total, work.share, work.rate(now), work.left_s(now),
            dict(self._errors),
        )  # fmt: skip
        self._recorder(state)

    def _current(self) -> _Work:
        if self._work is None:
            raise ValueError("no phase has begun: call phase() or running() first")
        return self._work

    def _line(self, text: str) -> None:
        if self._job is not None and not self._screen.draws:
            head = f"{self._today().astimezone():%Y-%m-%dT%H:%M:%S%z} {self._job}: "
            text = "\n".join(head + line for line in text.splitlines())
        self._screen.write(with_near_paths(printable(text)) + "\n")
        self._screen.flush()

    def _draw(self, work: _Work, now: float) -> None:
        columns = max(20, shutil.get_terminal_size().columns - SPARE_COLUMNS)
        self._screen.write(f"{ERASE_LINE}{drawn(work, now, columns, self._screen.ascii)}")
        self._screen.flush()


def drawn(work: _Work, now: float, columns: int, ascii_only: bool) -> str:
    """Return a phase as one line of a terminal, with a bar that fills the line."""
    if work.phase in UNCOUNTED:
        return f"{work.phase} …"[:columns]
    figures = " · ".join([_amount(work), *_details(work, now)])
    if work.share is None:
        return f"{work.phase} {figures}"[:columns]
    # Its static method draws one line; an instance would start a thread and create a lock of processes
    from tqdm.std import tqdm

    line = f"{work.phase} {_percent(work.share):>4}|{{bar}}| {figures}"
    return str(tqdm.format_meter(work.share, 1, 0, ncols=columns, ascii=ascii_only, bar_format=line))


def _amount(work: _Work) -> str:
    done, total = work.done, work.total
    if work.phase == "downloading":
        return f"{size(done)} of {size(total or 0)}"
    if work.prompt_tokens is not None:
        return f"{short(done)} of {short(total)} tokens{_SO_FAR if work.more else ''}"
    return (
        f"{count(done)} {work.unit}"
        if total is None or work.total_bytes
        else f"{count(done)} of {count(total)} {work.unit}"
    )


def _rows(work: _Work) -> str:
    return f"{count(work.rows)} of {count(work.total_rows)} rows{_SO_FAR if work.more else ''}"


def _percent(share: float) -> str:
    """Rounded down: 100% is only what is done."""
    return f"{math.floor(share * 100 + 1e-9)}%"


def line_of(work: _Work, now: float) -> str:
    """`running 12% · 1.2M of 10M tokens · 8.1k tok/s · about 3 min left · 1,203 of 9,000 rows`"""
    if work.phase in UNCOUNTED:
        return work.phase
    share = work.share
    parts = [work.phase if share is None else f"{work.phase} {_percent(share)}"]
    if work.prompt_tokens is not None:
        parts += [_amount(work), *_details(work, now), _rows(work)]
    else:
        parts += [*_details(work, now), _amount(work)]
    return " · ".join(parts)


def _details(work: _Work, now: float) -> list[str]:
    """Rate and time left, as far as they are known."""
    rate, left = work.rate(now), work.left_s(now)
    parts = [] if rate is None else [_rate(work, rate)]
    return parts if left is None else [*parts, f"about {about(left)} left"]


def _rate(work: _Work, rate: float) -> str:
    """Say the rate, that of slow layers as the time of one."""
    if work.phase == "downloading":
        return f"{size(rate)}/s"
    return f"{about(1 / rate)} a layer" if work.in_layers and rate < 1 else f"{short(rate)} {work.unit}/s"
