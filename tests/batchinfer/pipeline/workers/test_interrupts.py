"""Signals: what a run or a query does when one comes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from batchinfer.core.errors import Interrupted
from batchinfer.data.storage.duck import connection
from batchinfer.pipeline.workers.interrupts import Interrupts


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
    """DuckDB answers it with RuntimeError("Query interrupted"), which the command line would call a bug."""
    long = "SELECT sum(a.i * b.i % 7) FROM range(100000) a(i), range(1000000) b(i)"
    interrupts = Interrupts()
    with (
        pytest.raises(Interrupted) as caught,
        interrupts.installed(),
        interrupts.retold(),
        connection(tmp_path / "spill", threads=1) as database,
        signalled(0.3),
    ):
        database.execute(long)
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_another_runtime_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="of its own"), Interrupts().retold():
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
