"""Runs and queries during signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from batchinfer.core.errors import Interrupted, StopTimeReached
from batchinfer.filesystem.duck import connection
from batchinfer.pipeline.workers.interrupts import Interrupts
from tests.patience import PATIENCE_S, wait_until


@contextmanager
def signalled(after_s: float, signum: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signum))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_a_signal_during_a_query_is_an_interruption_and_no_bug(tmp_path):
    """DuckDB raises RuntimeError("Query interrupted"), which the command line would report as a bug."""
    long = "SELECT sum(a.i * b.i % 7) FROM range(100000) a(i), range(1000000) b(i)"
    interrupts = Interrupts()
    with (
        pytest.raises(Interrupted) as caught,
        interrupts.installed(),
        interrupts.reraised(),
        connection(tmp_path / "spill", threads=1) as database,
        signalled(0.3),
    ):
        database.execute(long)
    assert caught.value.exit_code == 128 + signal.SIGTERM


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 6, 1, 5, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def waited(clock: Clock, until: datetime) -> None:
    """Wait longer than the test takes, while the clock jumps."""
    time.sleep(0.05)
    clock.now = until
    time.sleep(PATIENCE_S)


def test_a_stop_time_ends_a_wait_and_is_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the wall clock, which jumps after a suspend."""
    monkeypatch.setattr("batchinfer.pipeline.workers.interrupts.LOOK_S", 0.01)
    clock = Clock()
    at, interrupts = clock.now + timedelta(hours=1), Interrupts(clock=clock)
    with (
        pytest.raises(StopTimeReached, match="the time has come"),
        interrupts.installed(),
        interrupts.stopping_at(at, "the time has come"),
    ):
        waited(clock, at)


def test_a_signal_takes_precedence_over_the_stop_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop time after a signal has no effect. A signal after the stop time interrupts at once."""
    at = datetime(2026, 6, 1, 6, tzinfo=UTC)
    clock, interrupts = Clock(), Interrupts(clock=lambda: clock.now)
    monkeypatch.setattr("batchinfer.pipeline.workers.interrupts.LOOK_S", 0.01)
    with interrupts.installed(), interrupts.deferred(), interrupts.stopping_at(at):
        signal.raise_signal(signal.SIGINT)
        clock.now = at
        time.sleep(0.1)
        assert (interrupts.pending, interrupts.is_stop_pending) == (signal.SIGINT, False)
    interrupts.pending = None
    with interrupts.installed(), interrupts.deferred(), interrupts.stopping_at(at):
        wait_until(lambda: interrupts.is_stop_pending)
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_other_runtime_errors_are_raised_unchanged():
    with pytest.raises(RuntimeError, match="of its own"), Interrupts().reraised():
        raise RuntimeError("of its own")


def test_what_nohup_had_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts().installed() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.pending is None
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(Interrupted) as caught, Interrupts().installed():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert caught.value.exit_code == 128 + signal.SIGHUP
