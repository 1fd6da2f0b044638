"""The progress display of a job: a bar on a terminal, periodic lines elsewhere, nothing with `--quiet`."""

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
from batchinfer.core.wording import count, rough_duration, short_number, size
from batchinfer.report.expected_output import ExpectedOutput

Phase = Literal[
    "listing",
    "downloading",
    "calibrating",
    "measuring quality",
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
SPARE_COLUMNS = 3  # columns left free at the right, so an echoed ^C does not break the line
_SO_FAR = " read so far"
ERASE_LINE = "\r\x1b[2K"
# The rate is measured over a window, because the first steps of a job may differ from later ones
RATE_WINDOW_S = 30.0
RATE_SAMPLE_S = 1.0
RECORD_EVERY_S = 2.0  # interval of writing progress.json


class _Screen:
    """Writes to a stream until the stream fails, for example because the terminal was closed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        encoding = getattr(stream, "encoding", None) or ""
        self.ascii = not encoding.lower().startswith("utf")
        # a dumb terminal cannot erase a line
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
        except OSError:  # the run continues without a display
            self._stream = None


@dataclass(slots=True)
class _Work:
    """The total and the finished work of one phase of a run, in rows, bytes, layers or tokens.

    Attributes:
        phase: The phase.
        rows: Finished rows or layers.
        total_rows: All rows or layers, or None if unknown.
        bytes: Finished bytes of the input files or of a download.
        total_bytes: All these bytes, or None if the phase counts none.
        prompt_tokens: Prompt tokens of all rows. None for a phase that does not count tokens.
        ran_tokens: Finished prompt and output tokens.
        output: The estimate of output tokens.
        more: True if more rows may follow.
        marks: Times in seconds with the work that was finished then, for the rate.
        last_rate: The rate when the run began to stop, which is kept from then on.
    """

    phase: Phase
    rows: int = 0
    total_rows: int | None = None
    bytes: int = 0
    total_bytes: int | None = None
    prompt_tokens: int | None = None
    ran_tokens: int = 0
    output: ExpectedOutput = field(default_factory=ExpectedOutput)
    more: bool = False
    marks: deque[tuple[float, int]] = field(default_factory=deque)
    last_rate: float | None = None

    @property
    def done(self) -> int:
        if self.phase == "downloading":
            return self.bytes
        return self.rows if self.prompt_tokens is None else self.ran_tokens

    @property
    def total(self) -> int | None:
        if self.phase == "downloading":
            return self.total_bytes
        if self.prompt_tokens is None:
            return self.total_rows
        return max(self.done, self.prompt_tokens + self.output.total)

    @property
    def share(self) -> float | None:
        # Reading ends with the files or at the row limit, so the larger share counts
        if self.more:
            return None
        parts = ((self.done, self.total), (self.bytes, self.total_bytes))
        shares = [done / total for done, total in parts if total]
        return min(1.0, max(shares)) if shares else None

    @property
    def in_layers(self) -> bool:
        # One layer may take longer than the window of the rate
        return self.phase in ("calibrating", "measuring quality")

    @property
    def unit(self) -> str:
        if self.in_layers:
            return "layers"
        return "rows" if self.prompt_tokens is None else "tok"

    def mark(self, now: float) -> None:
        # After every layer, or for other units at most once per second
        before = self.marks[-1] if self.marks else None
        if before is not None and (
            self.done == before[1] if self.in_layers else now - before[0] < RATE_SAMPLE_S
        ):
            return
        self.marks.append((now, self.done))
        while len(self.marks) > 2 and now - self.marks[1][0] >= RATE_WINDOW_S:
            self.marks.popleft()

    def rate(self, now: float) -> float | None:
        # For layers, the window ends at the last finished layer
        if self.last_rate is not None:
            return self.last_rate
        if not self.marks:
            return None
        since, before = self.marks[0]
        until, done = self.marks[-1] if self.in_layers else (now, self.done)
        return (done - before) / (until - since) if until > since and done > before else None

    def left_s(self, now: float) -> float | None:
        rate, share = self.rate(now), self.share
        if rate is None or not share or share >= 1:
            return None
        left = self.done * (1 - share) / share / rate
        return max(0.0, left - (now - self.marks[-1][0])) if self.in_layers else left


@dataclass(frozen=True, slots=True)
class ProgressState:
    """The progress of a run at one moment. A value is None if it is unknown or does not apply to the phase.

    Attributes:
        phase: The current phase.
        rows: Finished rows.
        rows_total: All rows.
        tokens: Finished prompt and output tokens.
        tokens_total: An estimate of all tokens.
        share: Finished share of the phase, from 0 to 1.
        per_s: Tokens per second in the phase "running", else rows per second.
        left_s: Seconds to the end of the phase.
        errors: Number of known error rows by error code.
    """

    phase: Phase
    rows: int
    rows_total: int | None
    tokens: int | None
    tokens_total: int | None
    share: float | None
    per_s: float | None
    left_s: float | None
    errors: dict[str, int]


Recorder = Callable[[ProgressState], None]


class Progress:
    """Displays the progress of a run on a stream, one phase at a time. Not thread-safe."""

    def __init__(
        self,
        stream: TextIO | None,
        *,
        job: str | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Prepare to display progress on a stream.

        Args:
            stream: The stream. A terminal shows a bar, other streams get lines. None: nothing is displayed.
            job: The name of the job. Lines on streams other than terminals begin with the time and this name.
            quiet: True to show only notices.
            clock: Returns the time in seconds.
            today: Returns the date and time of lines.
        """
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
        """Begin a phase of the run, which counts rows or layers, or nothing.

        Args:
            name: The phase.
            total_rows: The number of all rows or layers. None: unknown, or the phase counts nothing.
        """
        self._begin(_Work(name, total_rows=total_rows))

    def running(self, *, rows: int, prompt_tokens: int, expected_tokens: int, more: bool = False) -> None:
        """Begin the phase in which engines compute, which counts tokens.

        Args:
            rows: The number of rows.
            prompt_tokens: Their prompt tokens.
            expected_tokens: An upper bound of their output tokens.
            more: True if more rows may follow.
        """
        output = ExpectedOutput(expected_tokens)
        self._begin(_Work("running", total_rows=rows, prompt_tokens=prompt_tokens, output=output, more=more))

    def known(self, *, rows: int, done: int, prompt_tokens: int, expected_tokens: int, more: bool) -> None:
        """Update the known work of the phase "running", while the input is still being read.

        Args:
            rows: The number of rows known so far.
            done: The number of these rows that have answers.
            prompt_tokens: The prompt tokens of all these rows.
            expected_tokens: An upper bound of their output tokens.
            more: True if more rows may follow.
        """
        work = self._current()
        work.total_rows, work.rows, work.prompt_tokens, work.more = rows, done, prompt_tokens, more
        work.output.expect(expected_tokens)

    def more(self, *, prompt_tokens: int, expected_tokens: int) -> None:
        """Add the tokens of further attempts at rows. The rows themselves are counted already.

        Args:
            prompt_tokens: The prompt tokens of these attempts.
            expected_tokens: An upper bound of their output tokens.
        """
        work = self._current()
        work.prompt_tokens = (work.prompt_tokens or 0) + prompt_tokens
        work.output.more(expected_tokens)

    def downloading(self, received: int, total: int) -> None:
        """Begin the phase "downloading".

        Args:
            received: The bytes that were downloaded before.
            total: The bytes of the whole download.
        """
        self._begin(_Work("downloading", bytes=received, total_bytes=total))

    def received(self, received: int) -> None:
        """Set the number of downloaded bytes, and update the display."""
        self._current().bytes = received
        self.tick()

    def rows(self, number: int) -> None:
        """Count `number` more rows that were read or published, or layers that were calibrated."""
        self._current().rows += number
        self.tick()

    def read(self, rows: int, bytes_read: int, bytes_total: int) -> None:
        """Set the progress of reading the input, and update the display.

        Args:
            rows: The number of rows read so far.
            bytes_read: The bytes read so far.
            bytes_total: The bytes of all input files.
        """
        work = self._current()
        work.rows, work.bytes, work.total_bytes = rows, bytes_read, bytes_total
        self.tick()

    def step(self, sample: StepSample, engine: int = 0) -> None:
        """Count the tokens of an engine step, and update the display.

        Tokens found in the KV cache count as done. Recomputed tokens and padding do not count.

        Args:
            sample: The counts of the step.
            engine: The number of the engine.
        """
        work, output = self._current(), sample.output_tokens
        work.ran_tokens += sample.prompt_tokens + sample.cached_tokens + output
        work.output.step(output, sample.running, engine)
        self.tick()

    def recorded_by(self, recorder: Recorder | None) -> None:
        """Set a function that records the progress, for example in a file.

        It is called at the start of each phase, and then every RECORD_EVERY_S seconds.

        Args:
            recorder: The function, or None to stop recording.
        """
        self._recorder = recorder

    def record(self) -> None:
        """Call the function that records the progress now, if a phase has begun."""
        if self._work is not None:
            self._record(self._work, self._clock())

    def failed(self, codes: Mapping[str, int]) -> None:
        """Count new error rows.

        Args:
            codes: The number of rows by error code.
        """
        self._errors.update(codes)

    def finished(
        self,
        *,
        expected_tokens: int,
        completion_tokens: int,
        rows: int = 1,
        error: str | None = None,
        truncated: bool = False,
        engine: int = 0,
    ) -> None:
        """Count a finished request, and update the display.

        Args:
            expected_tokens: The maximum of its output tokens.
            completion_tokens: Its output tokens.
            rows: The number of rows that it answers.
            error: Its error code, or None.
            truncated: True if its answer ended at the maximum.
            engine: The number of its engine.
        """
        work = self._current()
        if error is not None and rows:
            self._errors[error] += rows
        work.rows += rows
        work.output.finished(expected_tokens, completion_tokens, truncated, engine)
        self.tick()

    def tick(self) -> None:
        """Update the display if enough time has passed. It must also be called while the run only waits."""
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
        """Keep the present rate from now on, because the run stops and only its running rows will finish.

        Estimates of the time left use this rate.
        """
        if self._work is not None:
            self._work.last_rate = self._work.rate(self._clock())

    @property
    def rows_left(self) -> int | None:
        """Return how many of the known rows have no final answer. None: the phase counts no tokens."""
        work = self._work
        if work is None or work.prompt_tokens is None or work.total_rows is None:
            return None
        return max(0, work.total_rows - work.rows)

    @property
    def knows_all_rows(self) -> bool:
        """Return True unless more rows of the input may follow."""
        return self._work is None or not self._work.more

    def left_s(self) -> float | None:
        """Return the seconds to the end of the current phase at the current rate, or None if unknown."""
        return None if self._work is None else self._work.left_s(self._clock())

    def left_of_known_s(self) -> float | None:
        """Return the seconds until all known work is done at the current rate, or None if it is unknown."""
        work = self._work
        rate = None if work is None else work.rate(self._clock())
        return None if work is None or rate is None else max(0, (work.total or 0) - work.done) / rate

    @property
    def share(self) -> float | None:
        """Return the finished share of the run's current phase from 0 to 1, or None if unknown."""
        return None if self._work is None else self._work.share

    @property
    def output(self) -> ExpectedOutput | None:
        """Return the estimate of output tokens, or None in a phase that counts no tokens."""
        return None if self._work is None or self._work.prompt_tokens is None else self._work.output

    def note(self, text: str) -> None:
        """Write a text above the progress bar, also if the display is quiet."""
        if not self._has_bar or self._work is None:
            self._line(text)
            return
        self._screen.write(ERASE_LINE)  # also erases an echoed ^C
        self._line(text)
        self._draw(self._work, self._clock())

    def close(self) -> None:
        """End the current phase.

        Its bar stays on the screen, unless the phase counts work and none was done.
        """
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
        self._screen.write(f"{ERASE_LINE}{bar_of(work, now, columns, self._screen.ascii)}")
        self._screen.flush()


def bar_of(work: _Work, now: float, columns: int, ascii_only: bool) -> str:
    """Return a phase of a run as one line of a terminal, with a bar that fills the line.

    Args:
        work: The total and finished work of the phase.
        now: The time in seconds.
        columns: The width of the terminal.
        ascii_only: Draw the bar with ASCII characters.
    """
    if work.phase in UNCOUNTED:
        return f"{work.phase} …"[:columns]
    details = " · ".join([_amount(work), *_details(work, now)])
    if work.share is None:
        return f"{work.phase} {details}"[:columns]
    # only its static method is used: an instance would start a thread and create a lock between processes
    from tqdm.std import tqdm

    line = f"{work.phase} {_percent(work.share):>4}|{{bar}}| {details}"
    return str(tqdm.format_meter(work.share, 1, 0, ncols=columns, ascii=ascii_only, bar_format=line))


def _amount(work: _Work) -> str:
    done, total = work.done, work.total
    if work.phase == "downloading":
        return f"{size(done)} of {size(total or 0)}"
    if work.prompt_tokens is not None:
        return f"{short_number(done)} of {short_number(total)} tokens{_SO_FAR if work.more else ''}"
    return (
        f"{count(done)} {work.unit}"
        if total is None or work.total_bytes
        else f"{count(done)} of {count(total)} {work.unit}"
    )


def _rows(work: _Work) -> str:
    return f"{count(work.rows)} of {count(work.total_rows)} rows{_SO_FAR if work.more else ''}"


def _percent(share: float) -> str:
    # Rounded down, so 100% means that all is done
    return f"{math.floor(share * 100 + 1e-9)}%"


def line_of(work: _Work, now: float) -> str:
    """Return a phase of a run as a line: `running 12% · 1.2M of 10M tokens · 8.1k tok/s · about 3 min left · …`.

    Args:
        work: The total and finished work of the phase.
        now: The time in seconds.
    """
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
    rate, left = work.rate(now), work.left_s(now)
    parts = [] if rate is None else [_rate(work, rate)]
    return parts if left is None else [*parts, f"about {rough_duration(left)} left"]


def _rate(work: _Work, rate: float) -> str:
    if work.phase == "downloading":
        return f"{size(rate)}/s"
    return (
        f"{rough_duration(1 / rate)} a layer"
        if work.in_layers and rate < 1
        else f"{short_number(rate)} {work.unit}/s"
    )
