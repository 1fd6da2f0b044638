"""What a review found: signals, ends of the engine's process, and what is taken for done."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.data.storage.duck import connection
from batchinfer.engine.build import BuiltEngine
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import StepOutput
from batchinfer.error_budget import Budget
from batchinfer.errors import BatchInferError, ErrorBudgetExceeded, Interrupted, UsageError
from batchinfer.launch import feed
from batchinfer.launch.engine_host import EngineHost
from batchinfer.launch.interrupts import Interrupts
from batchinfer.launch.messages import Progress, WorkerSpec
from batchinfer.plan.plan import Plan
from batchinfer.request import Request, SamplingParams
from tests import fake_engine
from tests.batchinfer.test_pipeline import NO_ENGINE, people, run, write_job

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


def drive(host: SilentHost, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs one request until a signal comes; how often and for how long a draining was announced."""
    plan = Plan(Path(), *[0] * 10)
    announced: list[float] = []
    monkeypatch.setattr(feed, "_requests", lambda plan, prompts: iter([(None, [None])]))
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


def test_a_model_that_is_loading_again_is_not_waited_for(monkeypatch):
    """The worker that had the rows in work died, and the one in its place is not ready when the signal comes."""
    host = SilentHost(fake_engine.build(CONFIG).info)
    receive = host.receive

    def died(timeout_s: float) -> list[Progress]:
        host.info = None
        return receive(timeout_s)

    host.receive = died  # type: ignore[method-assign]
    assert drive(host, monkeypatch) == []
    assert host.told == []


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
            host._child.wait(20)
            host.submit(requests)  # nobody reads it, and nothing is lost by it
        done: list[bytes] = []
        with pytest.raises(BatchInferError, match="out of memory") as caught:
            receive_for_ever(host, done)
    assert caught.value.exit_code == 71
    assert sorted(done) == [r.key for r in requests]


# What is taken for done -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "rows", "allowed"), [(0.29, 100, 29), (0.57, 100, 57), (0.01, 99, 0), (1e-5, 10**5, 1)]
)
def test_a_budget_is_what_is_written(rate, rows, allowed):
    """In floats 0.29 × 100 is less than 29."""
    assert Budget(rows, rate, publish=False).allowed == allowed


def test_a_result_over_its_budget_is_no_success_the_second_time_either(tmp_path, model):
    path = write_job(tmp_path, model, [*people(20), "{"], on_error={"publish": True})
    first = run(path)
    second = run(path, NO_ENGINE)
    assert (first.exit_code, second.exit_code) == (65, 65)
    assert first.error is not None
    assert second.error == first.error.replace("are published", "are already published")
    assert second.row["exit_status"] == "already published over budget"
    write_job(tmp_path, model, on_error={"publish": True, "max_error_rate": 0.5})
    assert run(path, NO_ENGINE).exit_code == 0


def test_errors_that_may_pass_are_told_with_their_cure(tmp_path, model, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "1")
    path = write_job(tmp_path, model, people(4))
    with pytest.raises(ErrorBudgetExceeded, match="--retry-errors runs 4 of them again"):
        run(path)


def test_a_template_that_tells_the_day_makes_new_work_every_day(tmp_path, model, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    template = "{{ strftime_now('%d %b %Y') }} {{ messages[-1].content }}"
    (folder / "chat_template.jinja").write_text(template)
    path = write_job(tmp_path, folder, people(3))
    for day, computed in ((1, 3), (1, 0), (2, 3)):
        at_noon(monkeypatch, day)
        assert (run(path).row["computed_requests"] or 0) == computed


def at_noon(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 1, day, 12, tzinfo=tz or UTC)

    monkeypatch.setattr("batchinfer.pipeline.datetime", Clock)


def test_an_openai_file_of_another_input_is_refused_before_the_engine(tmp_path, model):
    path = write_job(tmp_path, model, people(3))
    with pytest.raises(UsageError, match="no OpenAI batch file"):
        run(path, replace(NO_ENGINE, to_openai=tmp_path / "out.jsonl"))
