"""What a review found: signals, ends of the engine's process, and what is taken for done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.data.duck import connection
from batchinfer.engine.build import BuiltEngine
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import StepOutput
from batchinfer.errors import BatchInferError, Interrupted
from batchinfer.launch import feed
from batchinfer.launch.engine_host import EngineHost
from batchinfer.launch.interrupts import Interrupts
from batchinfer.launch.messages import Progress, WorkerSpec
from batchinfer.plan.plan import Plan
from batchinfer.request import Request, SamplingParams
from tests import fake_engine

CONFIG = EngineConfig(Path("model"), "float32", "cpu", max_model_len=64, longest=64)


# Signals --------------------------------------------------------------------------------------------------------


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
        signalled(0.3),
        interrupts.retold(),
        connection(tmp_path / "spill", threads=1) as database,
    ):
        database.execute(long)
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_another_runtime_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="of its own"), Interrupts().retold():
        raise RuntimeError("of its own")


class SilentHost:
    """A worker in the middle of a step, or of loading a model, that takes for ever."""

    left = False

    def __init__(self, info: Any = None) -> None:
        self.info = info
        self.told: list[float] = []

    def submit(self, requests: list[Request]) -> None:
        """It reads them later."""

    def finish(self, within_s: float) -> None:
        self.told.append(within_s)

    def receive(self, timeout_s: float) -> list[Progress]:
        time.sleep(0.01)
        return []


class Nowhere:
    """A sink for which the time to leave comes after so many ticks."""

    def __init__(self, interrupts: Interrupts, ticks: int) -> None:
        self.interrupts, self.ticks = interrupts, ticks

    def planned(self, window: Any) -> None:
        """Nothing is kept."""

    def take(self, progress: Progress) -> None:
        raise AssertionError("nothing can have come")

    def enough(self) -> bool:
        return False

    def tick(self) -> None:
        self.ticks -= 1
        if not self.ticks:
            self.interrupts.pending = signal.SIGTERM


class OneWindow(Plan):
    """A plan of one request."""

    def windows(self, rows_per_window: int) -> Iterator[Any]:
        yield [None]


def drive(host: SilentHost, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs until a signal comes; how often and for how long a draining was announced."""
    plan = OneWindow(Path(), *[0] * 10)
    announced: list[float] = []
    monkeypatch.setattr(feed, "_requests", lambda window, prompts: iter(()))
    interrupts = Interrupts()
    sink = Nowhere(interrupts, ticks=3)
    feed.run_plan(plan, None, host, sink, interrupts, announced.append)  # type: ignore[arg-type]
    return announced


def test_a_step_that_never_ends_is_not_waited_for(monkeypatch):
    """At most 20 s, however long the step that the worker is in."""
    assert feed.DRAIN_S + feed.LATE_S < 20
    monkeypatch.setattr(feed, "DRAIN_S", 0.1)
    monkeypatch.setattr(feed, "LATE_S", 0.1)
    host = SilentHost(fake_engine.build(CONFIG).info)
    assert drive(host, monkeypatch) == [0.1]
    assert host.told == [0.1]


def test_a_model_that_is_still_loading_is_not_waited_for(monkeypatch):
    host = SilentHost()
    assert drive(host, monkeypatch) == []
    assert host.told == []


# Ends of the engine's process -----------------------------------------------------------------------------------


class FailsInItsSecondStep(fake_engine.FakeEngine):
    """Finishes what it was given in one step, and fails in the next."""

    @property
    def unfinished(self) -> int:
        return 1 if self._steps else len(self._waiting)

    def step(self) -> StepOutput:
        if self._steps:
            raise MemoryError("no more of it")
        return super().step()


def failing(config: EngineConfig, stop_streams: object = None) -> BuiltEngine:
    return BuiltEngine(FailsInItsSecondStep(), fake_engine.build(config).info)  # type: ignore[arg-type]


def receive_for_ever(host: EngineHost, done: list[bytes]) -> None:
    while True:
        done += [c.key for p in host.receive(0.1) for c in p.completions]


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "after-its-death"])
def test_what_was_finished_before_a_failure_is_received_before_the_failure(late):
    requests = [Request(bytes([i] * 32), np.array([1, 2], np.int32), SamplingParams()) for i in range(5)]
    with EngineHost(WorkerSpec(CONFIG, None, "tests.batchinfer.test_review:failing")) as host:
        while host.info is None:
            host.receive(0.1)
        host.submit(requests)
        if late:
            host._process.join(20)
        done: list[bytes] = []
        with pytest.raises(BatchInferError, match="out of memory") as caught:
            receive_for_ever(host, done)
    assert caught.value.exit_code == 71
    assert sorted(done) == [r.key for r in requests]
