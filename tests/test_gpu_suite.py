"""The GPU suite, rehearsed: what it runs, what it records, how its parts fail; and that it needs little to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchinfer_kernels.cost import Cost
from batchinfer_kernels.paged_attention import paged_attention_reference
from tests import gpu_suite
from tests.gpu_suite import clock as clock_module
from tests.gpu_suite import flashinfer, kernel_tests
from tests.gpu_suite import suite as suite_module
from tests.gpu_suite import worker as worker_module
from tests.gpu_suite.__main__ import Keeper, record_name, rehearsed, selected
from tests.gpu_suite.case import Case, WrongResult, distance, measured
from tests.gpu_suite.clock import Clock
from tests.gpu_suite.machine import sources_digest
from tests.gpu_suite.paged import Heads, Paged
from tests.gpu_suite.section import Model, Section, Setting
from tests.gpu_suite.shares import with_shares
from tests.gpu_suite.suite import CALLS, ENTRIES, Entry, Suite, peaks_of
from tests.gpu_suite.table import table
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
PACKAGE = Path(gpu_suite.__file__).parent
MISSING = (
    "duckdb",
    "pydantic",
    "numba",
    "ruamel",
    "llguidance",
    "jsonschema",
)  # on a machine that is only to be measured
PEAKS = {"bfloat16": 1e11, "float32": 1e11, "int8": 2e11, "float8_e4m3fn": 2e11, "bytes_per_s": 1e10}
TIMED = {
    "median_s",
    "min_s",
    "wall_s",
    "share",
    "bound_s",
    "flops_per_s",
    "bytes_per_s",
    "mbu",
    "mfu",
    "host_s",
    "host_layer_s",
    "launch_s",
    "launch_layer_s",
    "step_s",
    "schedule_s",
    "left_bytes",
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which some packages cannot be imported, and ours are found as in a checkout."""
    folder = tmp_path_factory.mktemp("blocked")
    for name in MISSING:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / ".typing")))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def suite(bare: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu_suite", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=bare, timeout=4 * PATIENCE_S)


def test_a_rehearsal(bare, tmp_path, monkeypatch):
    """One test, as it takes long, and test processes share no fixtures."""
    for name, value in bare.items():
        monkeypatch.setenv(name, value)
    keeper = Keeper(tmp_path)
    ran = Suite(ROOT, True, 60.0, lambda line: None, keeper.keep, rehearsed(ENTRIES)).run()
    everything_is_rehearsed(ran)
    every_kernel_is_rehearsed(ran)
    the_engine_is_rehearsed_with_triton(ran)
    what_a_gpu_would_tell_is_told(ran)
    it_claims_nothing(json.loads(keeper.path.read_text("utf-8")))


def test_a_rehearsal_by_the_command(bare, tmp_path):
    done = suite(bare, "--rehearse", "--sections", "peaks", "pointwise", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text("utf-8"))
    it_claims_nothing(record)
    it_says_where_it_was_made(record)
    assert not any(unit in done.stdout for unit in ("/s", "µs", " ms", "%", "TB", "TFLOP", "aim"))
    assert "rehearsal" in done.stdout.splitlines()[1]
    assert "docs/measurements" not in done.stdout


def everything_is_rehearsed(record: dict[str, Any]) -> None:
    assert [failure for section in record["sections"] for failure in section["failures"]] == []
    assert [section["name"] for section in record["sections"]] == [entry.name for entry in rehearsed(ENTRIES)]
    assert {section["status"] for section in record["sections"]} == {"ok"}
    assert all(section["results"] for section in record["sections"])
    assert record["rehearsal"] is True
    assert record["failed"] is False
    (tests,) = next(s["results"] for s in record["sections"] if s["name"] == "tests")
    assert tests["passed"] > 0 == tests["failed"]


def every_kernel_is_rehearsed(record: dict[str, Any]) -> None:
    found = {
        result["kernel"]
        for section in record["sections"]
        for result in section["results"]
        if "kernel" in result
    }
    assert found == {
        "decode attention",
        "prefill attention",
        "deterministic decode attention",
        "deterministic prefill attention",
        "shared-prefix attention",
        "matmul",
        "deterministic matmul",
        "int8 matmul",
        "int8-weight matmul",
        "int4-weight matmul",
        "fp8 matmul",
        "block fp8 matmul",
        "RMSNorm with residual",
        "RoPE with KV write",
        "gated activation",
        "sampling",
        "log-probabilities",
        "penalties",
    }


def the_engine_is_rehearsed_with_triton(record: dict[str, Any]) -> None:
    by_name = {section["name"]: section["results"] for section in record["sections"]}
    assert {result["phase"] for result in by_name["model"]} == {"decode", "prefill"}
    for name in ("small-steady", "against"):
        assert {result["ops"] for result in by_name[name] if result["kind"] != "memory"} == {"triton"}
    prompts = [result["launched"]["piecewise_graph_steps"] for result in by_name["small-launching"]]
    assert prompts[0] > 0 == prompts[1], "in pieces, then by operators"
    assert all(set(result["ways"]) == {"in pieces", "by operators"} for result in by_name["small-mixed"])
    coded = [by_name[name][0]["codes"] for name in ("model-fp8", "model-kv-fp8", "model-kv-int8")]
    assert coded == [", stored fp8 weights", ", fp8 KV cache", ", int8 KV cache"]


def what_a_gpu_would_tell_is_told(record: dict[str, Any]) -> None:
    """With the peaks of another machine, the record of a GPU has its shares, and the table says them."""
    gpu = {"name": "NVIDIA H200", "driver_version": "580"}
    told = with_shares({**record, "rehearsal": False, "gpu": gpu}, PEAKS)
    for result in (result for section in told["sections"] for result in section["results"]):
        if result["kind"] in ("kernel", "tiles"):
            assert result["error"] <= result["tolerance"]
            assert set(result["aim"]) <= set(result["times_as_fast"])
            if result["dtype"] in PEAKS:
                assert result["bound_s"] == pytest.approx(result["share"] * result["ours"]["median_s"])
        if result["kind"] == "step":
            assert 0 < result["mbu"] <= result["roofline_efficiency"] * (1 + 1e-9)
            assert result["tokens_per_s"] == result["tokens"] / result["ours"]["median_s"]
        if result["kind"] == "mixed":
            for times in result["ways"].values():
                assert times["host_layer_s"] == times["host_s"] / result["layers"]
        if result["kind"] == "host":
            admission, ways = result["host"]["admission"], result["host"]["ways"]
            assert sum(found["steps"] for found in admission.values()) == result["steps"]
            assert sum(way["steps"] for way in ways.values()) == result["steps"]
    text = table(told)
    parts = ["a layer (assumed 330 µs)", "rows admitted: scheduled in", "the GPU idles", "× torch", "MBU"]
    parts += ["steps launched as one graph", "roofline", "× transformers", "tiles (", "torch SDPA"]
    assert [part for part in parts if part not in text] == []


def it_claims_nothing(record: dict[str, Any]) -> None:
    """No time, no rate, no share, no peak."""

    def claims(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [k for k in value if k in TIMED] + [c for v in value.values() for c in claims(v)]
        return [c for v in value for c in claims(v)] if isinstance(value, list) else []

    assert claims(record) == []
    assert record["peaks"] == {}
    assert record["gpu"] is None


def it_says_where_it_was_made(record: dict[str, Any]) -> None:
    assert record["versions"]["torch"] == torch.__version__
    assert record["command"].split()[1:4] == ["-m", "tests.gpu_suite", "--rehearse"]
    assert len(record["sources_sha256"]) == 64
    assert record["measured_at"].endswith("+00:00")
    assert record["cpu"]["cores"] >= 1


def test_without_a_gpu_it_says_so(bare):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = suite(bare)
    assert done.returncode == 2
    assert "finds no GPU" in done.stderr
    assert "--rehearse" in done.stderr
    assert done.stdout == ""


def gpu_test_modules() -> list[str]:
    """Those of the tests that run on a GPU."""
    paths = [ROOT / test for test in kernel_tests.TESTS]
    files = [
        file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("test_*.py")))
    ]
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if "aot" not in file.stem
    ]


def test_all_it_needs_is_there_without_what_is_missing(bare):
    """Imported in one process that lacks them, with the tests that run on a GPU, all of which one such import would
    end. That they are lacking is seen, too."""
    names = [f"tests.gpu_suite.{path.stem}" for path in PACKAGE.glob("*.py") if not path.stem.startswith("_")]
    names += ["tests.gpu_suite.__main__", *gpu_test_modules()]
    lines = ["import importlib, sys", "from tests.kernels.gpu import interpreter", "interpreter.switch_on()"]
    lines += [f"for name in {names!r}: importlib.import_module(name)"]
    lines += [f"assert not set({MISSING!r}) & set(sys.modules)", "try: import duckdb"]
    lines += ["except ModuleNotFoundError: sys.exit(0)", "sys.exit('duckdb is there')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=bare)
    assert done.returncode == 0, done.stderr


# ---- how sections fail

MODULES = {
    "fine": "def run(section): section.result({'kind': 'note'})",
    "raises": "def run(section):\n section.result({'kind': 'note'})\n raise ValueError('it broke')",
    "crashes": "import os\ndef run(section):\n"
    " section.parts([('bad', lambda: os._exit(7)), ('good', lambda: {'kind': 'note'})])",
    "sticks": "import time\ndef run(section):\n"
    " section.parts([('bad', lambda: time.sleep(1000)), ('good', lambda: {'kind': 'note'})])",
    "loses": "from types import SimpleNamespace\nfrom tests.gpu_suite import section as own\n"
    "class Lost(own.Setting):\n device = SimpleNamespace(type='cuda')\n"
    "def run(section):\n section.setting = Lost(True, 100.0, '', skip=section.setting.skip)\n"
    " own._answers = lambda: False\n"
    " section.parts([('fine', lambda: {'kind': 'first'}), ('bad', lambda: 1 / 0), ('good', lambda: {'kind': 'note'})])",
    "partly": "def run(section): section.parts([('bad', lambda: 1 / 0), ('good', lambda: {'kind': 'note'})])",
    "hangs": "import time\ndef run(section):\n section.result({'kind': 'note'})\n time.sleep(1000)",
    "dies": "import os\ndef run(section):\n section.result({'kind': 'note'})\n os._exit(7)",
    "slow": "import time\ndef run(section):\n"
    " section.parts((str(n), lambda: time.sleep(0.3) or {'kind': 'note'}) for n in range(100))",
}


def test_a_failure_does_not_stop_the_others(tmp_path, monkeypatch):
    """Sections that fail in every way; those that do not end have 6 and 4 seconds, the others more than a minute."""
    for name, text in MODULES.items():
        (tmp_path / f"suite_{name}.py").write_text(text)
    names = ["raises", "fine", "dies", "partly", "hangs", "slow", "fine"]
    shares = {"hangs": 1.0, "slow": 0.7}
    entries = tuple(Entry(name, shares.get(name, 100.0), f"suite_{name}") for name in names)
    monkeypatch.syspath_prepend(str(tmp_path))
    kept: list[tuple[int, str]] = []

    def changed(record: dict[str, Any]) -> None:
        kept.append((len(record["sections"]), record["sections"][-1]["status"]))

    failing = Suite(ROOT, True, 10.0, lambda line: None, changed, entries).run()
    assert [count for count, status in kept if status != "begun"] == list(range(1, 8))
    assert (5, "begun") in kept, "what was told of a section is kept before it ends"
    the_others_ran(failing)
    the_table_ends_with_what_failed(failing)


def the_others_ran(failing: dict[str, Any]) -> None:
    raises, fine, dies, partly, hangs, slow, last = failing["sections"]
    assert [s["status"] for s in (fine, last)] == ["ok", "ok"]
    assert [s["status"] for s in (raises, dies, partly)] == ["failed"] * 3
    assert [s["status"] for s in (hangs, slow)] == ["out of time"] * 2
    assert failing["failed"] is True
    assert "ValueError: it broke" in raises["failures"][0]["traceback"]
    assert "suite_raises.py" in raises["failures"][0]["traceback"]
    assert "code 7" in dies["failures"][0]["message"]
    assert partly["failures"][0]["what"] == "bad"
    assert len(partly["results"]) == 1, "the part after the one that failed has run"
    assert all(len(section["results"]) == 1 for section in (raises, dies, hangs)), "what was told is kept"
    assert "not reached: " in slow["out_of_time"]
    assert 0 < len(slow["results"]) < 100


def the_table_ends_with_what_failed(failing: dict[str, Any]) -> None:
    lines = table(failing).splitlines()
    assert [line for line in lines if line.startswith("FAILED")] == [
        "FAILED raises: suite_raises: ValueError: it broke",
        "FAILED dies: process: the process ended with code 7",
        "FAILED partly: bad: ZeroDivisionError: division by zero",
    ]
    assert sum(line.startswith("OUT OF TIME") for line in lines) == 2


def test_a_part_that_ends_its_process_does_not_end_the_others(tmp_path, monkeypatch):
    """Nor does one after which the device runs nothing for its process, nor one that does not end."""
    names = ("crashes", "loses", "sticks")
    for name in names:
        (tmp_path / f"suite_{name}.py").write_text(MODULES[name])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(worker_module, "PART_SHARE", 0.0)

    def patient(line: str) -> None:
        """Only the part that sleeps is ended soon, however slow the others are."""
        soon = line.startswith("sticks: at most")
        monkeypatch.setattr(worker_module, "PART_S", 1.0 if soon else PATIENCE_S)

    entries = tuple(Entry(name, 1.0, f"suite_{name}") for name in names)
    ran = Suite(ROOT, True, 10.0, patient, lambda r: None, entries).run()["sections"]
    crashes, loses, sticks = ran
    assert [s["status"] for s in ran] == ["failed"] * 3
    assert sticks["results"] == [{"kind": "note"}]
    assert ["part 1 did not end" in f["message"] for f in sticks["failures"]] == [True]
    assert [s["results"] for s in (crashes, loses)] == [
        [{"kind": "note"}],
        [{"kind": "first"}, {"kind": "note"}],
    ]
    assert ["code 7" in f["message"] for f in crashes["failures"]] == [True]
    assert [f["what"] for f in loses["failures"]] == ["bad"]


def test_a_section_without_time_is_not_begun():
    record = Suite(ROOT, True, 0.01, lambda line: None, lambda r: None, (Entry("x", 1.0, "nowhere"),)).run()
    assert record["sections"][0]["out_of_time"] == "not begun"
    assert record["failed"] is True


def test_each_section_belongs_to_a_command():
    """Each of them begins with what its shares are of, and fits into its nine minutes."""
    assert {call for entry in ENTRIES for call in entry.calls} == set(CALLS)
    for call in CALLS:
        entries = selected([call])
        assert sum(entry.share for entry in entries) <= 9 * 60
        names = [entry.name for entry in entries]
        assert names == ["tests"] or (names[0], names[-1]) == ("peaks", "peaks-again")
    assert selected(CALLS) == ENTRIES
    assert [entry.name for entry in selected(["kernels"], ["tiles", "model"])] == ["tiles"]
    left_out = ["steady", "profile", "launching", "mixed", "peaks-again"]
    assert [entry.name for entry in ENTRIES if entry not in rehearsed(ENTRIES)] == left_out
    assert {entry.module for entry in ENTRIES} == {entry.module for entry in rehearsed(ENTRIES)}


def test_another_model_has_a_process_of_its_own(monkeypatch):
    """Its memory is the device's, and half of it would be missing."""
    done: list[str] = []

    class Recording:
        def __init__(self, rehearsal: bool) -> None:
            done.append("rehearsal" if rehearsal else "real")

        def run(self, module, setting, tell) -> dict[str, Any]:
            done.append(module)
            return {"seconds": 0.0, "out_of_time": None}

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setattr(suite_module, "Worker", Recording)
    small, large = Model("small", 0.9), Model("large", 0.9)
    entries = tuple(
        Entry(name, 1.0, name, model)
        for name, model in zip("abcde", (None, small, small, large, None), strict=True)
    )
    Suite(ROOT, False, 9.0, lambda line: None, lambda r: None, entries).run()
    assert done == ["real", "a", "b", "c", "closed", "d", "closed", "e", "closed"]


def test_time_that_is_left_goes_to_the_others():
    entries = (Entry("a", 1.0, ""), Entry("b", 3.0, ""))
    found = Suite(ROOT, True, 4.0, lambda line: None, lambda r: None, entries)
    assert found._limit(0) == pytest.approx(60, abs=1)
    assert found._limit(1) == pytest.approx(240, abs=1)


# ---- figures


def kernel(**more: Any) -> dict[str, Any]:
    """10 GFLOP and 1 GB in 2 ms."""
    timed = {"median_s": 2e-3, "min_s": 1e-3, "runs": 5, "host_s": 1e-5}
    plain = {"kind": "kernel", "kernel": "k", "size": "s", "dtype": "bfloat16", "int8_ops": 0, "error": 0.0}
    others = {"peer": {**timed, "median_s": 3e-3}}
    given = {"flops": 10**10, "bytes": 10**9, "target": 0.85, "aim": {"peer": 10.0}}
    return {**plain, **given, "ours": timed, "others": others, **more}


def record(*results: dict[str, Any]) -> dict[str, Any]:
    section = {"name": "x", "status": "ok", "seconds": 1.0, "failures": [], "out_of_time": None}
    versions = {"torch": "2", "triton": "3", "transformers": "5"}
    told = {"rehearsal": False, "versions": versions, "measured_at": "2026-01-02T03:04:05+00:00"}
    gpu = {"name": "NVIDIA H200", "driver_version": "580"}
    return {**told, "gpu": gpu, "sections": [{**section, "results": list(results)}]}


def test_a_share_is_the_bound_over_the_time():
    peaks = {"bfloat16": 1e13, "bytes_per_s": 1e12}
    (found,) = with_shares(record(kernel()), peaks)["sections"][0]["results"]
    assert found["bound_s"] == pytest.approx(1e-3)
    assert found["share"] == pytest.approx(0.5)
    assert found["flops_per_s"] == pytest.approx(5e12)
    assert found["bytes_per_s"] == pytest.approx(5e11)
    assert found["times_as_fast"] == {"peer": pytest.approx(1.5)}
    assert (
        with_shares(record(kernel()), {**peaks, "bytes_per_s": 9e11})["sections"][0]["results"][0]["bound_by"]
        == "memory"
    )
    (compute,) = with_shares(record(kernel(flops=10**11)), peaks)["sections"][0]["results"]
    assert (compute["bound_by"], compute["share"]) == ("compute", pytest.approx(5.0))


def test_without_peaks_there_are_no_shares():
    (found,) = with_shares(record(kernel()), {})["sections"][0]["results"]
    assert "share" not in found
    assert found["times_as_fast"] == {"peer": pytest.approx(1.5)}


def test_what_no_datasheet_states_has_no_share_of_it():
    unknown = record(kernel()) | {"gpu": {"name": "NVIDIA H300", "driver_version": "1"}}
    found = with_shares(unknown, {"bfloat16": 1e13, "bytes_per_s": 9e11})
    assert found["datasheet"] == {}
    assert found["sections"][0]["results"][0]["datasheet_share"] is None
    assert "of its memory bound" in table(found)


def test_int8_operations_are_held_against_their_own_peak():
    peaks = {"bfloat16": 1e13, "int8": 2e13, "bytes_per_s": 1e15}
    result = kernel(flops=10**11, int8_ops=10**11)
    assert with_shares(record(result), peaks)["sections"][0]["results"][0]["bound_s"] == pytest.approx(5e-3)


def test_a_step_s_bound_is_the_sum_of_its_operators():
    peaks = {"bfloat16": 1e12, "bytes_per_s": 1e12}
    step = {
        "kind": "step",
        "phase": "decode",
        "size": "2",
        "dtype": "bfloat16",
        "codes": "",
        "codes_dtype": "int8",
        "tokens": 2,
        "mbu_target": 0.8,
    }
    operators = {"a": [10**9, 10**6, 0], "b": [10**6, 10**9, 0]}
    step |= {"ours": {"median_s": 4e-3, "min_s": 4e-3, "runs": 5}, "operators": operators}
    (found,) = with_shares(record(step), peaks)["sections"][0]["results"]
    assert found["roofline_efficiency"] == pytest.approx(0.5)
    assert found["mbu"] == found["mfu"] == pytest.approx(1.001e9 / 4e9)
    assert found["tokens_per_s"] == pytest.approx(500)
    assert "MBU 25 % (aim 80 %)" in table(with_shares(record(step), peaks))


def test_products_of_a_step_s_codes_are_held_against_their_dtype():
    peaks = {"bfloat16": 1e12, "int8": 2e12, "float8_e4m3fn": 4e12, "bytes_per_s": 1e15}
    plain = {"kind": "step", "phase": "prefill", "size": "2", "dtype": "bfloat16", "tokens": 2, "codes": ""}
    plain |= {"ours": {"median_s": 1e-2, "min_s": 1e-2, "runs": 5}, "operators": {"a": [10**10, 1, 10**10]}}
    for dtype, efficiency in (("int8", 0.5), ("float8_e4m3fn", 0.25)):
        told = with_shares(record({**plain, "codes_dtype": dtype}), peaks)
        assert told["sections"][0]["results"][0]["roofline_efficiency"] == pytest.approx(efficiency)


def test_the_better_peaks_count():
    told = [
        {"kind": "peaks", "peaks": peaks} for peaks in ({"int8": 1.0, "bfloat16": 5.0}, {"int8": 2.0}, {})
    ]
    assert peaks_of(record(*told)) == {"int8": 2.0, "bfloat16": 5.0}


def test_the_table_says_what_was_reached():
    peaks = {"bfloat16": 1e13, "bytes_per_s": 9e11}
    text = table(with_shares(record(kernel()), peaks))
    assert "2,000 µs, 56 % [10 %] of its memory bound (aim 85 %), 1.50× peer (aim 10×)" in text
    assert "peaks of this run: 10 TFLOP/s bfloat16 [1 %], 0.90 TB/s [19 %]" in text
    assert "NVIDIA H200, driver 580" in text


def test_a_record_is_named_by_date_and_gpu(tmp_path):
    assert record_name(record()) == "2026-01-02-0304-nvidia-h200"
    keeper = Keeper(tmp_path / "new")
    for results in ((), (kernel(),)):
        keeper.keep(record(*results))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["2026-01-02-0304-nvidia-h200.json"]
    assert len(json.loads(keeper.path.read_text())["sections"][0]["results"]) == 1


def test_commands_of_the_same_minute_keep_their_own_records(tmp_path):
    for call in CALLS:
        Keeper(tmp_path, call).keep(record(kernel()))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"2026-01-02-0304-nvidia-h200-{c}.json" for c in CALLS
    }


def test_the_digest_is_of_what_is_measured(tmp_path):
    (tmp_path / "kernels").mkdir()
    before = sources_digest(tmp_path)
    (tmp_path / "kernels" / "x.py").write_text("1")
    after = sources_digest(tmp_path)
    (tmp_path / "kernels" / "x.txt").write_text("1")
    assert before != after == sources_digest(tmp_path)


# ---- cases


def case(ours: Callable[[], Any], **more: Any) -> Case:
    right = torch.ones(4)
    return Case("k", "s", Cost(1, 1), "bfloat16", ours, lambda: distance(ours(), right), 1e-2, **more)


def telling() -> tuple[Section, list[tuple[str, Any]]]:
    told: list[tuple[str, Any]] = []
    return Section(Setting(True, 100.0, str(ROOT)), lambda *said: told.append(said)), told


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.full((4,), float("nan"))])
def test_what_is_wrong_is_not_timed(wrong):
    with pytest.raises(WrongResult, match="k, s: off by"):
        measured(telling()[0], case(lambda: wrong))


def test_a_peer_that_fails_is_told_and_left_out():
    section, told = telling()
    found = measured(section, case(lambda: torch.ones(4), others={"bad": lambda: 1 / 0, "good": lambda: 1}))
    assert list(found["others"]) == ["good"]
    assert [(kind, said["what"]) for kind, said in told] == [("failure", "k, s: bad")]


class FakeDevice:
    """A GPU that takes as long as it is told to, beside a host that takes none: `torch.cuda`, as far as it is asked."""

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


def test_the_clock_tells_the_device_s_median(monkeypatch):
    device = FakeDevice()
    names = {"_sleep": device.sleep, "Event": device.event, "synchronize": lambda: None}
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(clock_module, "COLD_BYTES", 1024)
    order: list[str] = []
    taking = iter(
        [1.0, 1.0, 1.0, 1.0, 9.0, 2.0, 3.0, 2.0, 2.0]
    )  # three to warm up and one to choose the turns

    def ours() -> None:
        order.append("ours")
        device.work(next(taking))

    def theirs() -> None:
        order.append("theirs")
        device.work(0.5)

    found = Clock(torch.device("cpu")).times({"ours": ours, "theirs": theirs})
    assert found["ours"].median_s == pytest.approx(2.0)
    assert found["ours"].min_s == pytest.approx(2.0)
    assert found["theirs"].median_s == pytest.approx(0.5)
    assert found["ours"].runs == clock_module.LEAST_TURNS == 5
    assert order[-10:] == ["ours", "theirs"] * 5
    assert all(slept >= 1e-4 for slept in device.slept), "the host is given time to queue each call"


# ---- FlashInfer, which no test machine has


class FakeWrapper:
    """FlashInfer's wrappers as its documentation has them, computed by the reference."""

    def __init__(self, workspace: torch.Tensor, layout: str, **more: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "HND"

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        counts = self.starts[1:] - self.starts[:-1]
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, (start, count) in enumerate(zip(self.starts.tolist(), counts.tolist(), strict=False)):
            table[row, :count] = self.pages[start : start + count]
        contexts = ((counts - 1) * self.block + self.last).tolist()
        return paged_attention_reference(q, *cache, table, self.queries, contexts, q.shape[2] ** -0.5)

    def _plan(
        self, starts: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, sizes: tuple[int, ...]
    ) -> None:
        assert {t.dtype for t in (starts, pages, last)} == {torch.int32}
        self.starts, self.pages, self.last, self.block = starts, pages, last, sizes[3]


class FakeDecode(FakeWrapper):
    def plan(self, starts, pages, last, *sizes: int, q_data_type, kv_data_type) -> None:
        self._plan(starts, pages, last, sizes)
        self.queries = [1] * len(last)


class FakePrefill(FakeWrapper):
    def plan(self, rows, starts, pages, last, *sizes: int, causal, q_data_type, kv_data_type) -> None:
        assert causal
        self._plan(starts, pages, last, sizes)
        self.queries = (rows[1:] - rows[:-1]).tolist()


class FakeCascade(FakeWrapper):
    """A level for what all share, one for the rest; the pages of both together are each sequence's."""

    def __init__(self, levels: int, workspace: torch.Tensor, layout: str) -> None:
        super().__init__(workspace, layout)
        assert levels == 2

    def plan(self, rows, starts, pages, last, *sizes: int, q_data_type) -> None:
        assert [level.tolist() for level in rows] == [[0, 3], [0, 1, 2, 3]]
        assert {t.dtype for level in (*rows, *starts, *pages, *last) for t in [level]} == {torch.int32}
        assert last[0].tolist() == [sizes[3]]
        own = [pages[1][starts[1][n] : starts[1][n + 1]] for n in range(3)]
        joined = [torch.cat((pages[0], part)) for part in own]
        counts = torch.tensor([0, *(len(part) for part in joined)]).cumsum(0)
        self._plan(counts.to(torch.int32), torch.cat(joined), last[1], sizes)
        self.queries = [1] * 3


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Paged:
    package = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeDecode,
        BatchPrefillWithPagedKVCacheWrapper=FakePrefill,
        MultiLevelCascadeAttentionWrapper=FakeCascade,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(flashinfer, "is_installed", lambda: True)
    return Paged.random([17, 32, 40], Heads(4, 2, 16, 8), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("queries", [1, 5])
def test_flashinfer_is_given_the_same_work(paged, queries):
    q = paged.queries(3 * queries)
    calls = flashinfer.decode(paged, q) if queries == 1 else flashinfer.prefill(paged, q, queries)
    wanted = paged_attention_reference(
        q, paged.k, paged.v, paged.table, [queries] * 3, list(paged.contexts), paged.heads.scale
    )
    torch.testing.assert_close(calls["FlashInfer"](), wanted)


def test_flashinfer_s_cascade_is_given_the_same_work(paged):
    sharing = Paged.random([17, 32, 40], paged.heads, torch.float32, torch.device("cpu"), shared_keys=16)
    q = sharing.queries(3)
    wanted = paged_attention_reference(
        q, sharing.k, sharing.v, sharing.table, [1] * 3, list(sharing.contexts), sharing.heads.scale
    )
    torch.testing.assert_close(flashinfer.cascade(sharing, q, 16)["FlashInfer's cascade"](), wanted)


def test_without_flashinfer_nothing_is_compared():
    paged = Paged.random([17], Heads(4, 2, 16, 8), torch.float32, torch.device("cpu"))
    assert flashinfer.is_installed() or flashinfer.decode(paged, paged.queries(1)) == {}


# ---- the tests' section

JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure/></testcase>
<testcase classname="a" name="three"><skipped/></testcase><testcase classname="b" name="four"><error/></testcase>
</testsuite></testsuites>"""


def test_what_pytest_wrote_is_counted(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = kernel_tests.counts(tmp_path / "junit.xml")
    assert found == {"passed": 1, "failed": 2, "skipped": 1, "failed_tests": ["a::two", "b::four"]}
    assert kernel_tests.counts(tmp_path / "none.xml")["passed"] == 0


def test_on_a_gpu_all_its_tests_are_selected():
    assert (
        tuple(kernel_tests.selected(Setting(False, 10.0, str(ROOT))))[: len(kernel_tests.TESTS)]
        == kernel_tests.TESTS
    )
    assert all((ROOT / name).exists() for name in kernel_tests.TESTS)
    assert f"GPU_TESTS := {' '.join(kernel_tests.TESTS)}\n" in (ROOT / "Makefile").read_text("utf-8")


# ---- documentation


def test_the_page_names_every_section():
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    assert all(f"`{entry.name}`" in page for entry in ENTRIES)
