"""Submitting a plan to the engine's process, and the wait after a signal."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from batchinfer.core.request import Request
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.pipeline.workers import feed
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.messages import WorkDone
from tests import fake_engine

CONFIG = EngineConfig(LoadConfig(Path("model"), "float32", "cpu"), max_model_len=64, longest=64)


class SilentHost:
    """A worker that never finishes its step, or the loading of its model."""

    left = False
    dies = False  # when it has rows; its replacement has no engine yet

    def __init__(self, info: Any = None) -> None:
        self.info = info
        self.told: list[float] = []

    @property
    def wants_more(self) -> bool:
        return self.info is not None

    def submit(self, requests: list[Request]) -> None:
        pass

    def end_plan(self) -> None:
        """It has not read what was submitted."""

    def finish(self, within_s: float) -> None:
        self.told.append(within_s)

    def receive(self, timeout_s: float) -> list[WorkDone]:
        time.sleep(0.01)
        self.info = None if self.dies else self.info
        return []


class Nowhere:
    """A sink whose stop time comes after a number of ticks."""

    def __init__(self, interrupts: Interrupts, ticks: int) -> None:
        self.interrupts, self.ticks = interrupts, ticks

    def register(self, window: Any, requests: Any) -> None:
        """Nothing is kept."""

    def take(self, done: WorkDone) -> None:
        raise AssertionError("nothing can have come")

    def should_stop(self) -> bool:
        return False

    def tick(self) -> None:
        self.ticks -= 1
        if not self.ticks:
            self.interrupts.pending = signal.SIGTERM


def drive(host: SilentHost) -> list[float]:
    """Run one request until a signal comes. Return the announced waits in seconds."""
    announced: list[float] = []
    interrupts = Interrupts()
    sink = Nowhere(interrupts, ticks=3)
    feed.run_plan(iter([(None, [None])]), host, sink, interrupts, announced.append)  # type: ignore[arg-type]
    return announced


def test_a_step_that_never_ends_is_not_waited_for(monkeypatch):
    """Waits at most 20 s, however long the step takes."""
    assert feed.DRAIN_S + feed.LATE_S < 20
    monkeypatch.setattr(feed, "DRAIN_S", 0.1)
    monkeypatch.setattr(feed, "LATE_S", 0.1)
    host = SilentHost(fake_engine.build(CONFIG.load).engine(CONFIG).info)
    assert drive(host) == [0.1]
    assert host.told == [0.1]


def test_a_model_that_is_loading_is_not_waited_for():
    """The first worker of a run may be loading, or the replacement of a dead one."""
    first, again = SilentHost(), SilentHost(fake_engine.build(CONFIG.load).engine(CONFIG).info)
    again.dies = True
    for host in (first, again):
        assert drive(host) == []
        assert host.told == []
