"""Progress with a fake clock and a fake stream."""

from __future__ import annotations

import errno
import io
import re
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.pipeline.calibration.calibration import layer_progress
from batchinfer.report.expected_output import FEWEST
from batchinfer.report.progress import SPARE_COLUMNS, Progress
from tests.batchinfer.cli.screen import lines_on


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(Screen):
    """A closed terminal."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_downloads_are_shown_in_bytes_and_resumed_bytes_do_not_count_for_the_rate(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(stream, clock=clock) as progress:
        progress.downloading(1 << 30, 4 << 30)
        for second in range(1, 11):
            clock.now += 1
            progress.received((1 << 30) + second * (100 << 20))
    assert stream.getvalue().splitlines() == [
        "downloading 37% · 100 MiB/s · about 26 s left · 1.49 GiB of 4 GiB"
    ]


def test_plain_lines_come_after_5_then_every_30_seconds(clock: Clock, step: Any) -> None:
    stream = io.StringIO()
    with Progress(stream, clock=clock) as progress:
        progress.running(rows=9000, prompt_tokens=9_000, expected_tokens=1_000)
        times = []
        for second in range(1, 71):
            clock.now += 1
            progress.step(step(prefill_tokens=90, recomputed_tokens=0, cached_tokens=5, sampled_tokens=5))
            if len(stream.getvalue().splitlines()) > len(times):
                times.append(second)
    assert times == [5, 35, 65]
    first = stream.getvalue().splitlines()[0]
    assert first == "running 5% · 500 of 10k tokens · 100 tok/s · about 2 min left · 0 of 9,000 rows"


def test_recomputed_tokens_are_no_progress(clock: Clock, step: Any) -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=clock)
    progress.running(rows=1, prompt_tokens=100, expected_tokens=100)
    clock.now += 10
    progress.step(step(prefill_tokens=60, recomputed_tokens=20, cached_tokens=0, sampled_tokens=10))
    assert "50 of 200 tokens" in stream.getvalue()


def test_the_total_shrinks_as_outputs_end_early(clock: Clock, step: Any) -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=clock)
    progress.running(rows=100, prompt_tokens=1000, expected_tokens=100 * 50)
    for _ in range(FEWEST):
        progress.finished(expected_tokens=50, completion_tokens=10)
    clock.now += 6
    progress.step(step(prefill_tokens=500, recomputed_tokens=0, cached_tokens=0, sampled_tokens=0))
    assert "500 of 2k tokens" in stream.getvalue()
    assert "16 of 100 rows" in stream.getvalue()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40), st.integers(0, 5000))
def test_done_never_passes_the_total(outputs: list[tuple[int, int]], sampled: int) -> None:
    """For outputs of any length, even longer than expected."""
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, clock=clock)
    progress.running(rows=len(outputs), prompt_tokens=10, expected_tokens=sum(e for e, _ in outputs))
    for expected, actual in outputs:
        progress.finished(expected_tokens=expected, completion_tokens=actual)
    work = progress._current()
    work.ran_tokens += sampled
    assert work.total is not None
    assert work.done <= work.total


def test_rows_are_counted_while_reading(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(stream, clock=clock) as progress:
        progress.phase("reading")
        clock.now += 2
        progress.rows(1000)
        clock.now += 4
        progress.rows(2000)
        progress.phase("publishing", total_rows=3000)
        clock.now += 31
        progress.rows(1500)
    assert stream.getvalue().splitlines() == [
        "reading · 500 rows/s · 3,000 rows",
        "publishing 50% · 48.4 rows/s · about 31 s left · 1,500 of 3,000 rows",
    ]


@pytest.mark.parametrize(
    ("most_rows", "bytes_read", "line"),
    [
        (None, 250, "reading 25% · 100 rows/s · about 30 s left · 1,000 rows\n"),
        (2000, 1, "reading 50% · 100 rows/s · about 10 s left · 1,000 rows\n"),
    ],
)
def test_reading_ends_with_the_bytes_or_at_the_row_limit(
    clock: Clock, most_rows: int | None, bytes_read: int, line: str
) -> None:
    stream = io.StringIO()
    with Progress(stream, clock=clock) as progress:
        progress.phase("reading", most_rows)
        clock.now += 10
        progress.read(1000, bytes_read, 1000)
    assert stream.getvalue() == line


def test_only_finished_work_shows_100_percent_and_no_time_left(clock: Clock, step: Any) -> None:
    for done, shown in ((9999, "running 99%"), (10000, "running 100%")):
        for stream in (io.StringIO(), Screen()):
            progress = Progress(stream, clock=clock)
            progress.running(rows=9, prompt_tokens=10000, expected_tokens=0)
            clock.now += 6
            progress.step(step(prefill_tokens=done, recomputed_tokens=0, cached_tokens=0, sampled_tokens=0))
            assert shown in re.sub(" +", " ", stream.getvalue())
            assert ("left" in stream.getvalue()) == (done < 10000)


def test_a_phase_without_progress_prints_no_line(clock: Clock) -> None:
    screen = Screen()
    with Progress(screen, clock=clock) as progress:
        progress.phase("reading")
        progress.phase("planning")
    assert lines_on(screen.getvalue()) == ["planning …"]


@pytest.mark.parametrize(("encoding", "full"), [("utf-8", "█"), ("ascii", "#")])
def test_a_bar_fills_its_line_by_its_share(clock: Clock, encoding: str, full: str) -> None:
    class Encoded(Screen):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    screen = Encoded()
    with Progress(screen, clock=clock) as progress:
        progress.phase("publishing", total_rows=4)
        clock.now += 1
        progress.rows(3)
    (line,) = lines_on(screen.getvalue())
    drawn = line[line.index("|") + 1 : line.rindex("|")]
    assert line.startswith("publishing  75%|")
    assert len(line) == 100 - SPARE_COLUMNS
    assert drawn.count(full) == len(drawn) * 3 // 4


def test_a_note_stands_above_the_bar(clock: Clock) -> None:
    screen = Screen()
    with Progress(screen, clock=clock) as progress:
        progress.phase("publishing", 10)
        clock.now += 1
        progress.rows(5)
        screen.write("^C")  # as a terminal does
        progress.note("stopping")
        progress.rows(1)
    first, second = lines_on(screen.getvalue())
    assert first == "stopping"
    assert second.startswith("publishing  60%|")
    assert "^C" not in second
    assert len(second) < 100 - 2  # room for the next one


def test_lines_of_a_log_have_time_and_job(clock: Clock) -> None:
    stream = io.StringIO()
    today = datetime(2026, 11, 22, 1, 2, 3)
    progress = Progress(stream, job="night\x1b[2Jly", clock=clock, today=lambda: today)
    progress.phase("publishing", 10)
    clock.now += 6
    progress.rows(5)
    progress.note("one\ntwo")
    for line, text in zip(stream.getvalue().splitlines(), ("publishing 50%", "one", "two"), strict=True):
        assert line.startswith(f"{today.astimezone():%Y-%m-%dT%H:%M:%S%z} night\\x1b[2Jly: {text}")


@pytest.mark.parametrize("stream", [Gone(), None])
def test_a_closed_terminal_does_not_stop_the_run(stream: Any, clock: Clock, step: Any) -> None:
    with Progress(stream, job="x", clock=clock) as progress:
        progress.running(rows=1, prompt_tokens=10, expected_tokens=10)
        clock.now += 10
        progress.step(step())
        progress.note("nobody hears")


def test_a_dumb_terminal_gets_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    with Progress(screen, clock=clock) as progress:
        progress.phase("publishing", 10)
        clock.now += 6
        progress.rows(5)
    assert screen.getvalue() == "publishing 50% · 0.83 rows/s · about 6 s left · 5 of 10 rows\n"


def test_the_rate_is_that_of_the_last_seconds(clock: Clock) -> None:
    progress = Progress(io.StringIO(), clock=clock)
    progress.phase("publishing", total_rows=10**6)
    for second in range(600):
        clock.now += 1
        progress.rows(1000 if second < 300 else 10)
    work = progress._current()
    assert work.rate(clock.now) == pytest.approx(10, rel=0.2)
    assert len(work.marks) < 40


def test_layers_that_take_longer_than_the_window_have_a_time_left(clock: Clock) -> None:
    """A layer takes 100 s: most windows contain no finished layer."""
    log = io.StringIO()
    progress = Progress(log, clock=clock)
    progress.phase("calibrating", total_rows=24)
    for second in range(250):
        clock.now += 1
        progress.tick()
        if second % 100 == 99:
            progress.rows(1)
    assert progress.left_s() == pytest.approx(22 * 100 - 50)
    lines = log.getvalue().splitlines()
    assert lines[0] == "calibrating 0% · 0 of 24 layers"
    assert "calibrating 4% · 2 min a layer · about 38 min left · 1 of 24 layers" in lines
    clock.now += 3000
    assert progress.left_s() == 0


def test_calibration_progress_counts_layers_from_the_first_one(clock: Clock) -> None:
    """The model answers its prompts first."""
    progress = Progress(io.StringIO(), clock=clock)
    for at in (0, 0, 1, 2):
        clock.now += 10 if at else 500
        layer_progress(progress, "calibrating")(at, 4)
    assert progress.left_s() == pytest.approx(2 * 10)


def test_quiet_prints_nothing(clock: Clock, step: Any) -> None:
    for stream in (io.StringIO(), Screen()):
        with Progress(stream, quiet=True, clock=clock) as progress:
            progress.phase("reading", total_rows=5)
            clock.now += 100
            progress.rows(5)
            progress.running(rows=1, prompt_tokens=10, expected_tokens=10)
            clock.now += 100
            progress.step(step())
        assert stream.getvalue() == ""


def test_an_empty_job_divides_by_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(stream, clock=clock) as progress:
        progress.running(rows=0, prompt_tokens=0, expected_tokens=0)
        clock.now += 10
        progress.tick()
    assert stream.getvalue() == "running · 0 of 0 tokens · 0 of 0 rows\n"


def test_counting_before_a_phase_is_refused(clock: Clock) -> None:
    with pytest.raises(ValueError, match="no phase"):
        Progress(io.StringIO(), clock=clock).rows(1)


@pytest.mark.parametrize("kind", ["constant", "geometric"])
def test_the_total_is_estimated_from_the_first_answers(clock: Clock, step: Any, kind: str) -> None:
    """2,000 answers of up to 96 tokens have 30; 64 run at a time. The total is estimated after 64 answers. These are
    the shortest ones; with 64 of a geometric distribution, the error is an eighth.
    """
    rng = np.random.default_rng(2)
    lengths = {"constant": np.full(2000, 30), "geometric": np.minimum(96, rng.geometric(1 / 30, 2000))}[
        kind
    ].tolist()
    progress = Progress(None, clock=clock)
    progress.running(rows=2000, prompt_tokens=1, expected_tokens=2000 * 96)
    waiting, running, first = list(lengths), list[list[int]](), None
    while (waiting or running) and first is None:
        clock.now += 0.1
        while waiting and len(running) < 64:
            running.append([waiting.pop(), 0])
        for row in running:
            row[1] += 1
        ended = [row for row in running if row[0] == row[1]]
        running = [row for row in running if row[0] > row[1]]
        progress.step(step(sampled_tokens=len(ended) + len(running), running=len(running)))
        for length, _ in ended:
            progress.finished(expected_tokens=96, completion_tokens=length, truncated=length == 96)
        output = progress.output
        assert output is not None
        if output.ended >= 64:
            first = output.total
    assert first == pytest.approx(sum(lengths), rel=0.01 if kind == "constant" else 0.25)
