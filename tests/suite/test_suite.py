"""Tests suites of sections: failures, division of time, timing of calls, and the record."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchinfer_kernels.cost import Cost
from tests.suite import clock as clock_module
from tests.suite import run as run_module
from tests.suite.clock import DeviceClock
from tests.suite.record import Keeper, peaks_of, record_name, sources_digest
from tests.suite.run import Suite
from tests.suite.section import BenchModel, BenchSection, Result, SuiteEntry, Times
from tests.suite.shares import with_shares
from tests.suite.table import named, table
from tests.suite.turns import compared, in_turns
from tests.suite.worker import Reply

SECTION = """
import os, time
from tests.suite import worker
from tests.suite.section import Result

def result(**facts):
    return Result("note", {"process": os.getpid(), **facts})

def lost(section):
    section.rehearsal = False
    worker._device_answers = lambda: False
    raise RuntimeError("an illegal address")

"""
PARTS = {
    "fine": "[('good', lambda: [result(), result(given=section.given.rows, place=section.place.is_dir())])]",
    "raises": "[('bad', lambda: 1 / 0), ('good', result)]",
    "dies": "[('first', result), ('bad', lambda: os._exit(7)), ('good', result)]",
    "sticks": "[('bad', lambda: time.sleep(1000)), ('good', result)]",
    "loses": "[('first', result), ('bad', lambda: lost(section)), ('good', result)]",
    "slow": "[(str(n), lambda: time.sleep(0.3) or result()) for n in range(100)]",
    "broken": "1 / 0",
}


class Noting(Keeper):
    """Records what it would keep: the newest section, and its status."""

    def __init__(self) -> None:
        self.noted = list[str]()

    def keep(self, record: dict[str, Any]) -> None:
        self.noted.append(f"{record['sections'][-1]['name']} {record['sections'][-1]['status']}")


def suite(entries: list[SuiteEntry], minutes: float = 10.0, keeper: Keeper | None = None) -> Suite:
    return Suite(entries, minutes, keeper or Noting(), rehearsal=True, given=Namespace(rows=7))


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[str]]:
    """The record of sections that fail in every way, and the last kept state of each."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(run_module, "PART_SHARE", 0.0)
    monkeypatch.setattr(run_module, "PART_S", 4.0)  # a part that hangs
    for name, parts in PARTS.items():
        (tmp_path / f"suite_{name}.py").write_text(f"{SECTION}def made(section):\n    return {parts}\n")
    names = ["broken", "raises", "dies", "sticks", "loses", "slow", "fine"]
    keeper = Noting()
    entries = [SuiteEntry(name, 1.5 if name == "slow" else 100.0, f"suite_{name}:made") for name in names]
    return suite(entries, 6.0, keeper).run(), keeper.noted


def test_a_failure_costs_only_its_part(failing: tuple[dict[str, Any], list[str]]) -> None:
    record, kept = failing
    found = {section["name"]: section for section in record["sections"]}
    status = {name: section["status"] for name, section in found.items()}
    failed = dict.fromkeys(["broken", "raises", "dies", "sticks", "loses"], "failed")
    assert status == failed | {"slow": "out of time", "fine": "ok"}
    assert record["failed"] is True
    told = {name: len(section["results"]) for name, section in found.items() if name != "slow"}
    assert told == {"broken": 0, "raises": 1, "dies": 2, "sticks": 1, "loses": 2, "fine": 2}
    assert {"given": 7, "place": True}.items() <= found["fine"]["results"][1]["facts"].items()
    assert 0 < len(found["slow"]["results"]) < 100
    assert "not reached: " in found["slow"]["out_of_time"]
    assert "ZeroDivisionError" in found["raises"]["failures"][0]["traceback"]
    first, last = (result["facts"]["process"] for result in found["loses"]["results"])
    assert first != last, "a process that lost the device is replaced"
    assert "dies begun" in kept, "results of a section are kept before it ends"
    lines = table(with_shares(record, {})).splitlines()
    assert [line for line in lines if line.startswith("FAILED")] == [
        "FAILED broken: suite_broken:made: ZeroDivisionError: division by zero",
        "FAILED raises: bad: ZeroDivisionError: division by zero",
        "FAILED dies: bad: the process ended with code 7",
        "FAILED sticks: bad: did not end, and was ended after 4 s",
        "FAILED loses: bad: RuntimeError: an illegal address",
    ]
    assert sum(line.startswith("OUT OF TIME slow") for line in lines) == 1


def test_calls_are_compared_by_medians_of_turns() -> None:
    order: list[tuple[str, int]] = []
    took = {"without": [4.0, 2.0, 9.0], "with": [1.0, 2.0, 3.0]}

    def run(way: str, number: int) -> dict[str, Any]:
        order.append((way, number))
        return {"wall_s": took[way][number], "steps": number, "drafts": None}

    first, other = compared("8 rows", {way: partial(run, way) for way in took}, 3, "wall_s", bound=2.5)
    assert order == [(way, number) for number in range(3) for way in took]
    assert other.metrics == {"wall_s": 2.0, "steps": 1, "bound": 2.5}
    assert (first.name, other.name) == ("8 rows, without", "8 rows, with")
    assert shares_of(other)["times_as_fast"] == {"without": 2.0}
    assert first.times == {"without": Times(4.0, 2.0, 3, 0.0)}


def test_no_turn_begins_that_may_take_longer_than_is_left() -> None:
    left = iter([1.0, 0.0])
    assert in_turns({"a": lambda number: number}, 5, lambda: next(left)) == {"a": [0, 1]}


def test_a_section_without_time_is_not_begun() -> None:
    record = suite([SuiteEntry("x", 1.0, "nowhere")], 0.01).run()
    assert record["sections"][0]["out_of_time"] == "not begun"
    assert record["failed"] is True


def test_another_model_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process would still use half of the device's memory."""
    done: list[str] = []

    class Recording:
        def __init__(self, prepare: str | None) -> None:
            assert prepare is None

        def ask(self, module: str, section: BenchSection, _: int | None, within_s: float) -> Reply:
            assert within_s > section.left_s + 1, "a part may end itself when its section's time is over"
            done.append(module)
            return Reply()

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setattr(run_module, "Worker", Recording)
    small, large = BenchModel("small", 0.9), BenchModel("large", 0.9)
    models = dict(zip("abcde", (None, small, small, large, None), strict=True))
    run = suite([SuiteEntry(name, 1.0, name, model) for name, model in models.items()])
    run.rehearsal = False
    run.run()
    assert done == ["a", "b", "c", "closed", "d", "closed", "e", "closed"]


def test_unused_time_goes_to_later_sections() -> None:
    found = suite([SuiteEntry("a", 1.0, ""), SuiteEntry("b", 3.0, "")], 4.0)
    assert [found.limit_s(number) for number in (0, 1)] == pytest.approx([60, 240], abs=1)


# ---- metrics

TIMES = Times(2e-3, 1e-3, 5, 1e-5)
PEAKS = {"bfloat16": 1e13, "int8": 2e13, "float8_e4m3fn": 4e13, "bytes_per_s": 9e11}


def kernel(cost: Cost = Cost(10**10, 10**9), **more: Any) -> Result:  # noqa: B008 - it is frozen
    times = {"ours": TIMES, "peer": Times(3e-3, 3e-3, 5, 1e-5)}
    return Result("k, s", times=times, costs={"": cost}, targets={"share": 0.85, "peer": 10.0}, **more)


def record(*results: Result, name: str = "x", gpu: str = "NVIDIA H200") -> dict[str, Any]:
    section = {"name": name, "status": "ok", "seconds": 1.0, "failures": [], "out_of_time": None}
    versions = {"torch": "2", "triton": "3", "transformers": "5"}
    told = {"rehearsal": False, "versions": versions, "measured_at": "2026-01-02T03:04:05+00:00"}
    sections = [{**section, "results": [asdict(result) for result in results]}]
    return {**told, "gpu": {"name": gpu, "driver_version": "580"}, "sections": sections}


def shares_of(result: Result, peaks: dict[str, float] = PEAKS) -> dict[str, Any]:
    found: dict[str, Any] = with_shares(record(result), peaks)["sections"][0]["results"][0]["shares"]
    return found


@pytest.mark.parametrize(
    ("result", "bound_s", "by"),
    [
        (kernel(), 1 / 900, "memory"),
        (kernel(Cost(10**11, 10**9)), 1e-2, "compute"),
        (kernel(Cost(10**11, 10**6, 10**11)), 5e-3, "compute"),
        (kernel(Cost(10**11, 10**6, 10**11), codes_dtype="float8_e4m3fn"), 2.5e-3, "compute"),
    ],
    ids=["memory", "compute", "int8", "float8"],
)
def test_a_share_is_the_bound_over_the_time(result: Result, bound_s: float, by: str) -> None:
    found = shares_of(result)
    assert (found["bound_by"], found["bound_s"]) == (by, pytest.approx(bound_s))
    assert found["share"] == pytest.approx(bound_s / 2e-3)
    assert found["times_as_fast"] == {"peer": pytest.approx(1.5)}
    assert found["bytes_per_s"] == pytest.approx(next(iter(result.costs.values())).bytes / 2e-3)


def test_a_step_s_bound_is_the_sum_of_its_operators() -> None:
    costs = {"a": Cost(10**9, 10**6), "b": Cost(10**6, 10**9)}
    step = Result(
        "decode", times={"ours": Times(4e-3, 4e-3, 5, 0.0)}, costs=costs, tokens=2, targets={"mbu": 0.8}
    )
    peaks = {"bfloat16": 1e12, "bytes_per_s": 1e12}
    found = shares_of(step, peaks)
    assert found["share"] == pytest.approx(0.5)
    assert found["mbu"] == found["mfu"] == pytest.approx(1.001e9 / 4e9)
    assert "MBU 25 % (aim 80 %), MFU 25 %, 500 tokens/s" in table(with_shares(record(step), peaks))


def test_what_no_peak_is_known_of_has_no_share() -> None:
    assert set(shares_of(kernel(), {})) == {"times_as_fast"}
    unknown = with_shares(record(kernel(), gpu="NVIDIA H300"), PEAKS)
    assert unknown["datasheet"] == {}
    assert unknown["sections"][0]["results"][0]["shares"]["datasheet_share"] is None
    assert "56 % of its memory bound" in table(unknown)


def test_the_better_peaks_count() -> None:
    told = [Result("p", metrics=found) for found in ({"int8": 1.0, "bfloat16": 5.0}, {"int8": 2.0}, {})]
    assert peaks_of(record(*told, name="peaks-again")) == {"int8": 2.0, "bfloat16": 5.0}


def test_the_table_shows_reached_shares() -> None:
    metrics = {
        "launch_layer_s": 3e-5,
        "work_share": {"gemm": 0.25},
        "rows_per_s": 1234.5,
        "left_bytes": 2**31,
    }
    peaks = {"bfloat16": 1e13, "bytes_per_s": 9e11}
    text = table(with_shares(record(kernel(), Result("host", metrics=metrics)), peaks))
    assert "2,000 µs, 56 % [10 %] of its memory bound (aim 85 %), 1.50× peer (aim 10×)" in text
    assert "peaks of this run: 10 TFLOP/s bfloat16 [1 %], 0.90 TB/s [19 %]" in text
    assert "NVIDIA H200, driver 580" in text
    assert "launch layer 30 µs, 1,234 rows/s, left 2,048 MiB\n" in text
    assert text.endswith("work 25 %: gemm")
    assert named("mfu", 0.5) == "mfu 50 %"


def test_a_rehearsal_claims_nothing() -> None:
    result = kernel(facts={"error": 0.5}, metrics={"wall_s": 1.0}, details={"wall_s": 1.0})
    told = with_shares({**record(result), "rehearsal": True}, PEAKS)
    facts = {"name": "k, s", "facts": {"error": 0.5}, "targets": dict(result.targets), "beside": ["peer"]}
    assert told["sections"][0]["results"] == [facts]
    assert told["peaks"] == {}
    assert table(told).endswith("error 0.5, beside peer")


def test_a_record_is_named_by_date_gpu_and_command(tmp_path: Path) -> None:
    assert record_name(record()) == "2026-01-02-0304-nvidia-h200"
    keepers = [Keeper(tmp_path / "new", call) for call in (None, "models")]
    for results in ((), (kernel(),)):
        for keeper in keepers:
            keeper.keep(record(*results))
    names = ["2026-01-02-0304-nvidia-h200-models.json", "2026-01-02-0304-nvidia-h200.json"]
    assert sorted(os.listdir(tmp_path / "new")) == names
    for keeper in keepers:
        assert keeper.path is not None
        assert len(json.loads(keeper.path.read_text())["sections"][0]["results"]) == 1


def test_the_digest_follows_the_measured_sources(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    before = sources_digest(tmp_path)
    (tmp_path / "kernels" / "x.py").write_text("1")
    after = sources_digest(tmp_path)
    (tmp_path / "kernels" / "x.txt").write_text("1")
    assert before != after == sources_digest(tmp_path)


# ---- the clock


class FakeDevice:
    """A fake `torch.cuda` with given times, and a host that takes no time."""

    CYCLES_PER_S = 1e9

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def work(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles / self.CYCLES_PER_S)
        self.now += self.slept[-1]

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(at=0.0, synchronize=lambda: None)
        made.record = lambda: setattr(made, "at", self.now)
        made.elapsed_time = lambda end: (end.at - made.at) * 1e3
        return made


def test_the_clock_returns_the_device_s_median(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    names = {"_sleep": device.sleep, "Event": device.event, "synchronize": lambda: None}
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(clock_module, "COLD_BYTES", 1024)
    order: list[str] = []
    taking = iter([1.0, 1.0, 1.0, 1.0, 9.0, 2.0, 3.0, 2.0, 2.0])  # three to warm up, one to choose the turns

    def ours() -> None:
        order.append("ours")
        device.work(next(taking))

    def theirs() -> None:
        order.append("theirs")
        device.work(0.5)

    found = DeviceClock(torch.device("cpu")).times({"ours": ours, "theirs": theirs})
    assert (found["ours"].median_s, found["ours"].min_s) == pytest.approx((2.0, 2.0))
    assert found["theirs"].median_s == pytest.approx(0.5)
    assert found["ours"].runs == clock_module.LEAST_TURNS == 5
    assert order[-10:] == ["ours", "theirs"] * 5
    assert all(slept >= 1e-4 for slept in device.slept), "the host is given time to queue each call"
