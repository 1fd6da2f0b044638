"""Tests the GPU suite in a rehearsal: its sections, records and dependencies, and errors that only a GPU
shows."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from batchinfer_kernels.cost import Cost
from batchinfer_kernels.gpu.attention_launch import KVTiles
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from tests.batchinfer.engine import interpreted_gpu
from tests.batchinfer.models.ops.prompts import flash_attention_stand_in
from tests.batchinfer.models.ops.prompts.flashinfer_stand_in import PagedPrefill
from tests.gpu_suite import (
    ENTRIES,
    attention,
    kernel_tests,
    libraries,
    loaded,
    matmul,
    model,
    profile,
    tiles,
)
from tests.gpu_suite import __main__ as command
from tests.gpu_suite.__main__ import CALLS, main, rehearsed, selected
from tests.gpu_suite.case import Case, measured
from tests.gpu_suite.paged import Heads, Paged
from tests.suite.run import ROOT
from tests.suite.section import BenchModel, BenchSection, Part, Result, WrongResult
from tests.suite.worker import parts_of

# Packages that a measured machine does not have
MISSING = ("duckdb", "pydantic", "numba", "ruamel", "llguidance", "jsonschema")
KERNELS = {
    "attention": {
        "decode attention",
        "prefill attention",
        "deterministic decode attention",
        "deterministic prefill attention",
        "shared-prefix attention",
    },
    "latents": {"latent attention"},
    "matmul": {
        "matmul",
        "deterministic matmul",
        "int8 matmul",
        "int4-weight matmul",
        "fp8 matmul",
        "block fp8 matmul",
        "mxfp4 experts",
    },
    "pointwise": {"RMSNorm with residual", "RoPE with KV write", "gated activation"},
    "sampling": {"sampling", "log-probabilities", "penalties"},
    "tiles": {"decode attention", "prefill attention", "shared-prefix attention"},
}
no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: make gpu-suite does the same on it"
)
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy


def section(rehearsal: bool = True, model: BenchModel | None = None) -> BenchSection:
    """Return a section on the CPU; without `rehearsal`, as on a GPU."""
    found = BenchSection(rehearsal, float("inf"), model=model)
    found.device = torch.device("cpu")
    return found


def rehearse(name: str) -> list[Result]:
    """Run the parts of a section in this process. A wrong result or a failed comparison raises."""
    (entry,) = selected(CALLS, [name])
    given = section(model=entry.model)
    results = [measure() for _, measure in parts_of(entry.source, given)]
    assert given.failures == []
    return [result for result in results if isinstance(result, Result)]


@no_gpu
@interpreted
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_right_in_a_rehearsal(name: str) -> None:
    results = rehearse(name)
    assert {result.name.split(", ")[0] for result in results} == KERNELS[name]
    for result in results:
        assert result.facts["error"] <= result.facts["tolerance"]
        assert set(result.targets) <= {"share", *result.times}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Build engines as for a GPU during these tests."""
    interpreted_gpu.stand_in(monkeypatch.setattr, compiles=False, quick=True)
    yield
    loaded._loaded.cache_clear()


@no_gpu
@interpreted
@pytest.mark.usefixtures("as_on_a_gpu")
def test_models_run_in_a_rehearsal() -> None:
    """As on a GPU, with one model that is loaded once."""
    jobs, _ = rehearse("small-steady")
    assert jobs.facts["operators"] == "triton"
    pieces, operators = rehearse("small-launching")
    assert pieces.metrics["piecewise_graph_steps"] > 0 < operators.metrics["eager_steps"]
    assert pieces.metrics["piecewise_graph_assumed_layer_s"] > 0
    assert "piecewise_graph_steps" not in operators.metrics
    (ten,) = rehearse("small-profile")
    assert 0 <= ten.metrics["idle_share"] < 1
    for name, tokens in {"model": [2, 9], "model-fp8": [1, 5]}.items():
        assert [result.tokens for result in rehearse(name)] == tokens
    (turns,) = rehearse("against")
    assert turns.facts["operators"] == "triton"


# Prepares a rehearsal's process. All that runs on a GPU is imported in it, the tests that do so included.
IMPORTING = """
import importlib, sys
from tests.gpu_suite import rehearsing

def prepare():
    rehearsing.prepare()
    for name in {names!r}:
        importlib.import_module(name)
    assert not set({missing!r}) & set(sys.modules)
"""


@pytest.mark.slow
def test_a_rehearsal_without_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything runs in a process without the optional packages, and no times are claimed."""
    folder = tmp_path / "blocked"
    for name in MISSING:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    names = ["tests.gpu_suite.__main__", *{entry.source for entry in ENTRIES}, *gpu_test_modules()]
    (folder / "importing.py").write_text(IMPORTING.format(names=names, missing=MISSING))
    monkeypatch.setattr(command, "PREPARE", "importing")
    monkeypatch.syspath_prepend(folder)  # which a process that is spawned takes from this one
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, ROOT, ROOT / ".typing"))))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    options = ["--rehearse", "--minutes", "60", "--out", str(tmp_path / "records")]
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *options])
    code, said = main(), capsys.readouterr().out.replace(str(tmp_path), "")
    (path,) = (tmp_path / "records").iterdir()
    record = json.loads(path.read_text("utf-8"))
    assert [failure for each in record["sections"] for failure in each["failures"]] == []
    assert [each["status"] for each in record["sections"]] == ["ok"] * len(rehearsed(ENTRIES))
    assert (code, record["failed"]) == (0, False)
    kept = {each["name"]: each["results"] for each in record["sections"]}
    assert all(kept.values())
    assert {frozenset(result) for results in kept.values() for result in results} == {
        frozenset({"name", "facts", "targets", "beside"})
    }
    assert kept["tests"][0]["facts"]["passed"] > 0 == kept["tests"][0]["facts"]["failed"]
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["sources_sha256"]) == 64
    assert not any(unit in said for unit in ("/s", "µs", " ms", "%", "TB", "TFLOP", "aim"))


@no_gpu
def test_without_a_gpu_the_suite_reports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--call", "kernels"])
    assert main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "finds no GPU" in err
    assert "--rehearse" in err


def gpu_test_modules() -> list[str]:
    """Return the test modules that run on a GPU."""
    paths = [ROOT / test for test in kernel_tests.TESTS]
    files = [
        file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("test_*.py")))
    ]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name for name in names if "aot" not in name]


def test_each_section_belongs_to_a_command() -> None:
    """A command starts with the peaks for its shares and fits into its nine minutes. The page names all
    commands."""
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    assert all(f"`{entry.name}`" in page for entry in ENTRIES)
    for call in CALLS:
        entries = selected([call])
        assert sum(entry.share for entry in entries) <= 9 * 60
        names = [entry.name for entry in entries]
        assert names == ["tests"] or (names[0], names[-1]) == ("peaks", "peaks-again")
    assert selected(CALLS) == list(ENTRIES)
    assert [entry.name for entry in selected(["kernels"], ["tiles", "model"])] == ["tiles"]
    left_out = ["steady", "profile", "launching", "peaks-again"]
    assert [entry.name for entry in ENTRIES if entry not in rehearsed(ENTRIES)] == left_out


def test_on_a_gpu_all_its_tests_are_selected() -> None:
    assert tuple(kernel_tests.selected(False))[: len(kernel_tests.TESTS)] == kernel_tests.TESTS
    assert all((ROOT / name).exists() for name in kernel_tests.TESTS)
    assert f"GPU_TESTS := {' '.join(kernel_tests.TESTS)}\n" in (ROOT / "Makefile").read_text("utf-8")


JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure/></testcase>
<testcase classname="a" name="three"><skipped/></testcase><testcase classname="b" name="four"><error/></testcase>
</testsuite></testsuites>"""


def test_results_of_pytest_are_counted(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = kernel_tests.counts(tmp_path / "junit.xml")
    assert found == {"passed": 1, "failed": 2, "skipped": 1, "failed_tests": "a::two, b::four"}
    assert kernel_tests.counts(tmp_path / "none.xml")["passed"] == 0


# ---- cases


def case(ours: Callable[[], Any], **more: Any) -> Case:
    return Case("k", "s", Cost(1, 1), ours, lambda: torch.ones(4), **more)


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.full((4,), float("nan"))])
def test_wrong_results_are_not_timed(wrong: torch.Tensor) -> None:
    with pytest.raises(WrongResult, match="k, s: off by"):
        measured(section(), case(lambda: wrong))


def test_a_failing_peer_is_reported_and_omitted() -> None:
    given = section()
    found = measured(given, case(lambda: torch.ones(4), others={"bad": lambda: 1 / 0, "good": lambda: 1}))
    assert list(found.times) == ["ours", "good"]
    assert [failure["what"] for failure in given.failures] == ["k, s: bad"]


@pytest.mark.parametrize("parts", [attention.parts, matmul.parts, tiles.parts], ids=lambda f: f.__module__)
def test_each_case_of_a_gpu_has_a_unique_name(
    parts: Callable[[BenchSection], list[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "why_not_fp8", lambda: None)
    names = [name for name, _ in parts(section(rehearsal=False))]
    assert len(names) == len(set(names)) > 10


def test_without_peaks_no_model_is_run() -> None:
    for _, measure in model.parts(section(rehearsal=False, model=BenchModel("tiny", 2**23))):
        with pytest.raises(Exception, match="peaks of this GPU were not measured"):
            measure()


@no_gpu
@interpreted
@pytest.mark.parametrize("work", ["prefill", "decode", "prefix"])
def test_tiles_reach_the_kernels(work: Any) -> None:
    """No kernel supports a tile of 48 keys: its launch fails, and the chosen tile is restored."""
    make = tiles.cases(section(), attention.TINY)[work]
    case = make()
    before = case.ours()
    with (
        tiles.instead(work, KVTiles(32, 48, 4, 1)),
        pytest.raises(Exception, match=r"power of 2|a tile of 48"),
    ):
        make().ours()
    assert torch.equal(case.ours(), before)


def test_tiles_that_do_not_fit_a_gpu_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(section: BenchSection, tried: Case) -> Result:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(tiles, "measured", refused)
    assert {measure().metrics["tiles"] for _, measure in tiles.parts(section())} == {"do not fit"}


def test_idle_time_is_the_time_without_work() -> None:
    works = [("a", 0, 10), ("b", 5, 20), ("a", 30, 60), ("c", 40, 50), ("c", 100, 110)]
    found = profile.summary([profile.Work(*work) for work in works])
    assert found["idle_share"] == pytest.approx(50 / 110)
    assert (found["gaps"], found["longest_gap_s"]) == (2, pytest.approx(40e-6))
    assert next(iter(found["work_share"].items())) == ("a", pytest.approx(40 / 75))


def test_a_profiler_that_sees_nothing_is_a_failure() -> None:
    with pytest.raises(WrongResult, match="saw nothing"):
        profile._device_work(SimpleNamespace(events=list), "CUDA")


# ---- FlashInfer and FlashAttention, which no test machine has


class Prefill(PagedPrefill):
    """A fake of FlashInfer's wrapper of chunks, which returns a new tensor."""

    made: list[PagedPrefill] = []  # noqa: RUF012

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().run(q, cache, out=torch.empty_like(q))


class Decode(Prefill):
    """A fake of FlashInfer's wrapper of decoding rows."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        super().__init__(workspace, layout)

    def plan(self, starts: torch.Tensor, *given: Any, **dtypes: torch.dtype) -> None:
        rows = torch.arange(len(starts), dtype=torch.int32)
        super().plan(rows, starts, *given, causal=True, **dtypes)


class Cascade(Prefill):
    """A fake cascade with a level for the shared prefix and one for the rest. Together their pages are each
    sequence's."""

    def __init__(self, levels: int, workspace: torch.Tensor, layout: str) -> None:
        super().__init__(workspace, layout)
        assert levels == 2

    def plan(self, rows, starts, pages, last, *sizes: int, q_data_type: torch.dtype) -> None:
        assert [level.tolist() for level in rows] == [[0, 3], [0, 1, 2, 3]]
        assert {t.dtype for level in (rows, starts, pages, last) for t in level} == {torch.int32}
        assert last[0].tolist() == [sizes[3]]
        joined = [torch.cat((pages[0], pages[1][starts[1][n] : starts[1][n + 1]])) for n in range(3)]
        ends = torch.tensor([0, *map(len, joined)]).cumsum(0).to(torch.int32)
        dtypes = {"q_data_type": q_data_type, "kv_data_type": q_data_type}
        super().plan(rows[1], ends, torch.cat(joined), last[1], *sizes, causal=True, **dtypes)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace FlashInfer and FlashAttention-4 by the reference."""
    package = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        MultiLevelCascadeAttentionWrapper=Cascade,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(libraries, "has_flashinfer", lambda: True)
    for name, module in flash_attention_stand_in.stand_in(flash_attention_stand_in.Forward()).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(libraries.FlashAttentionPrefill, "version", lambda: "4.0.0b36")


@pytest.mark.usefixtures("stood_in")
@pytest.mark.parametrize("kind", ["decode", "prefill", "cascade"])
def test_libraries_are_given_the_same_work(kind: str) -> None:
    shared = 16 if kind == "cascade" else 0
    paged = Paged.random(
        [17, 32, 40], Heads(4, 2, 16, 8), torch.float16, torch.device("cpu"), shared_keys=shared
    )
    queries = 5 if kind == "prefill" else 1
    q = paged.queries(3 * queries)
    more = {"decode": (), "prefill": (queries,), "cascade": (shared,)}[kind]
    calls = getattr(libraries, kind)(paged, q, *more)
    asked = [queries] * 3, list(paged.contexts), ScoreRules(paged.heads.scale)
    wanted = paged_attention_reference(q, paged.k, paged.v, paged.table, *asked)
    flash_attention = [libraries.FlashAttentionPrefill.name] if kind == "prefill" else []
    assert list(calls) == ["FlashInfer's cascade" if shared else "FlashInfer", *flash_attention]
    for call in calls.values():
        torch.testing.assert_close(call(), wanted, atol=4e-3, rtol=4e-3)


def test_without_the_libraries_only_torch_is_compared() -> None:
    paged = Paged.random([17], Heads(4, 2, 16, 8), torch.float32, torch.device("cpu"))
    assert libraries.has_flashinfer() or list(libraries.decode(paged, paged.queries(1))) == [libraries.SDPA]
    installed = libraries.FlashAttentionPrefill.version() is not None
    assert installed or libraries.prefill(paged, paged.queries(1), 1) == {}
