"""Every moment belongs to one phase, and the phases add up."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from batchinfer.report.stopwatch import Stopwatch, process_age_s


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_phases_nest_and_add_up_to_the_whole() -> None:
    clock = Clock()
    watch = Stopwatch(5.0, clock)
    with watch.timed("ingest_s"):
        pass
    with watch.timed("close_s"):
        with watch.timed("load_s"):
            pass
        with watch.timed("engine_s"), pytest.raises(ValueError), watch.timed("load_s"):
            raise ValueError
    spent = watch.read()
    assert spent == {
        "startup_s": 6.0, "ingest_s": 1.0, "other_s": 2.0, "close_s": 3.0, "load_s": 2.0, "engine_s": 2.0
    }  # fmt: skip
    assert sum(spent.values()) == 5.0 + clock.now - 101.0


class SetClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_spans_follow_each_other_and_short_ones_are_not_reported() -> None:
    """While an engine loads, the phase changes briefly ten times a second."""
    clock = SetClock()
    watch = Stopwatch(2.0, clock)
    with watch.timed("close_s"):
        for _ in range(50):
            with watch.timed("load_s"):
                clock.now += 0.1
            clock.now += 0.001
        with watch.timed("engine_s"):
            clock.now += 3.0
    clock.now += 1.0
    spent = watch.read()
    assert [span.phase for span in watch.spans] == ["startup_s", "load_s", "engine_s", "other_s"]
    assert watch.spans[0] == ("startup_s", 0.0, 2.0)
    for span in watch.spans[1:]:
        assert span.until_s - span.from_s == pytest.approx(spent[span.phase], abs=0.06)
    assert watch.spans[-1].until_s == watch.at(clock.now) == 2.0 + clock.now


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
def test_a_process_knows_its_age() -> None:
    script = (
        "import time; time.sleep(0.5); from batchinfer.report.stopwatch import process_age_s; "
        "print(process_age_s(), flush=True)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    tick = 0.02  # Linux tells when a process began in hundredths of a second
    assert 0.49 <= float(done.stdout) <= time.monotonic() - began + tick
    assert process_age_s() > 0
