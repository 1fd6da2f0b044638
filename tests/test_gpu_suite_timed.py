"""What the GPU suite does on a GPU, on tiny shapes and with a clock of the host: all of it but the device itself."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

from torch.profiler import ProfilerActivity
from triton.runtime.errors import OutOfResources

from batchinfer.bench.workloads import Row, Workload, make_workload
from batchinfer.engine.config import EngineConfig
from batchinfer.models.checkpoint.shapes import shape_config
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.gpu.attention_launch import KVTiles
from tests.batchinfer.engine import interpreted_gpu
from tests.gpu_suite import (
    against,
    attention,
    case,
    continuous,
    launching,
    loaded,
    matmul,
    mixed,
    model,
    peaks,
    pointwise,
    profile,
    sampling,
    tiles,
    workloads,
)
from tests.gpu_suite.clock import Times
from tests.gpu_suite.section import Model, Section, Setting
from tests.gpu_suite.shares import with_shares
from tests.gpu_suite.table import table

ROOT = Path(__file__).parents[1]
TINY_MODEL = Model("tiny", 2**23)
PEAKS = {"bfloat16": 1e11, "float32": 1e11, "int8": 2e11, "float8_e4m3fn": 2e11, "bytes_per_s": 1e10}
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a GPU: make gpu-suite does the same on it"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # masked lanes are computed too, by NumPy
]


class HostClock:
    """Once each."""

    def times(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Times]:
        found = {}
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            taken = time.perf_counter() - began
            found[name] = Times(taken, taken, 1, taken)
        return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU in the place of the GPU, and small sizes in the place of large ones."""
    sizes: list[tuple[Any, dict[str, Any]]] = [
        (
            attention,
            {"LLAMA_8B": attention.TINY, "DECODES": ((3, 20), (2, 33), (1, 17)), "MIXED": (3, 9, 40)},
        ),
        (attention, {"PREFILLS": ((1, 20, 20), (1, 5, 20)), "PREFIX": (4, 256, 3), "CODED": (2, 17)}),
        (attention, {"SKEWED": (60, 5, 5), "FIXED_DECODE": (1030, 5), "FIXED_PREFILL": (4, 1030)}),
        (matmul, {"GATE_UP": matmul.Layer("g", 160, 96), "DOWN": matmul.Layer("d", 160, 48)}),
        (matmul, {"DECODE": 4, "WIDE_DECODE": 20, "PREFILL": 17}),
        (pointwise, {"TOKENS": 5, "FEW": 2, "HIDDEN": 64, "INTERMEDIATE": 100}),
        (sampling, {"ROWS": 3, "VOCAB": 300, "FILTERS": {"top-p 0.95": sampling.FILTERS["top-p 0.95"]}}),
        (peaks, {"SIZE": 128, "STREAM_BYTES": {"cuda": 2**16}}),
        (model, {"DECODES": ((3, 10), (1, 4)), "SKEWED": (30, 2, 5), "PREFILLS": (9,), "PREFILL_RUNS": 2}),
        (mixed, {"ROWS": 2, "CONTEXT": 8, "PROMPT_TOKENS": (5,), "HOST_RUNS": 1, "TOLERANCE": 1e-4}),
        (launching, {"ROWS": 2, "FIRST": 1, "ENDED": 3}),
        (tiles, {"CANDIDATES": tiles.TINY_CANDIDATES, "QWEN_HALF_B": attention.TINY}),
        (tiles, {"DECODE": (2, 33), "PREFILL": (1, 20, 40), "PREFIX": (4, 256, 3)}),
        (workloads, {"ROWS": 24, "PROMPT": 20, "SHARED": 16, "MEAN_OUTPUT": 6, "SHORT_OUTPUT": 3}),
        (profile, {"ENDED": 5}),
        (loaded, {"DTYPE": "float32", "LONGEST": 1280}),
    ]
    for module, values in sizes:
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    for module in (case, mixed, peaks):
        monkeypatch.setattr(module, "the_clock", lambda device: HostClock())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**30))
    monkeypatch.setattr(loaded, "EngineConfig", small_engine)
    monkeypatch.setattr(against, "make_workload", short_workload)
    monkeypatch.setattr(against, "ContinuousPeer", small_peer)
    loaded._loaded.cache_clear()
    yield
    loaded._loaded.cache_clear()


def small_engine(**given: Any) -> EngineConfig:
    return EngineConfig(
        **{**given, "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 16, "threads": 1}
    )


def short_workload(name: str, vocab: int, rows: int | None = None) -> Workload:
    return Workload(name, tuple(Row(row.prompt[:20], 4) for row in make_workload(name, vocab, 4).rows))


def small_peer(*given: Any) -> continuous.ContinuousPeer:
    *same, _ = given
    return continuous.ContinuousPeer(*same, against.TINY_CACHE)


class OnTheCpu(Setting):
    """As on a GPU, but there."""

    device = torch.device("cpu")  # type: ignore[assignment]


def told(module: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results with their shares, and failures, of a section."""
    results: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    setting = OnTheCpu(False, 100.0, str(ROOT), PEAKS, TINY_MODEL)
    kinds: dict[str, list[dict[str, Any]]] = {"result": results, "failure": failures, "part": []}
    module.run(Section(setting, lambda kind, said: kinds[kind].append(said)))
    return with_shares(record(results), PEAKS)["sections"][0]["results"], failures


def record(results: list[dict[str, Any]]) -> dict[str, Any]:
    section = {"name": "x", "status": "ok", "seconds": 1.0, "failures": [], "out_of_time": None}
    versions = dict.fromkeys(("torch", "triton", "transformers"), "1")
    return {
        "rehearsal": False,
        "versions": versions,
        "gpu": None,
        "datasheet": {},
        "sections": [{**section, "results": results}],
    }


@pytest.mark.parametrize("module", [attention, matmul, pointwise, sampling], ids=lambda m: m.__name__)
def test_kernels_are_checked_and_timed(module):
    results, failures = told(module)
    assert failures == []
    assert len({(result["kernel"], result["size"]) for result in results}) == len(results)
    for result in results:
        assert result["error"] <= result["tolerance"]
        assert result["share"] > 0
        assert result["bound_s"] == pytest.approx(result["share"] * result["ours"]["median_s"])
        assert result["bound_by"] in ("memory", "compute")
        assert set(result["aim"]) <= set(result["times_as_fast"])
    assert len(table(with_shares(record(results), PEAKS)).splitlines()) == len(results) + 5


def test_peaks_of_every_dtype_are_told():
    results, failures = told(peaks)
    assert failures == []
    assert {name for result in results for name in result["peaks"]} == {
        "bfloat16",
        "float16",
        "float32",
        "int8",
        "float8_e4m3fn",
        "bytes_per_s",
    }
    assert all(value > 0 for result in results for value in result["peaks"].values())


def test_steps_are_held_against_their_operators():
    results, failures = told(model)
    assert failures == []
    sizes = ["3 sequences at 10", "1 sequences at 4", "2 sequences at 5, one at 30", "9 tokens"]
    assert [result["size"] for result in results] == sizes
    assert [result.get("mbu_target") for result in results] == [0.8, None, None, None]
    for result in results:
        assert 0 < result["mbu"] <= result["roofline_efficiency"] * (1 + 1e-9)
        assert result["tokens_per_s"] == result["tokens"] / result["ours"]["median_s"]
    assert results[0]["ours"]["runs"] == model.DECODE_STEPS


def test_workloads_are_large_enough_for_a_steady_state(monkeypatch):
    monkeypatch.undo()  # their own sizes
    assert workloads.ROWS >= 2000
    for output in (workloads.MEAN_OUTPUT, workloads.SHORT_OUTPUT):
        rows = workloads.steady_rows(workloads.ROWS, 32_000, 4, output, workloads.MOST_OUTPUT, shared=2)
        assert 0.9 * output < workloads.mean_output(rows) <= 128
        assert len({row.prompt[:2] for row in rows}) == 1 < len({row.max_tokens for row in rows})
        assert {len(row.prompt) for row in rows} == {4}


def test_workloads_run_and_are_compared():
    results, failures = told(workloads)
    assert failures == []
    *results, memory = results
    assert [result["workload"] for result in results] == ["steady, shared prefix", "steady"]
    assert all(len(result["wall_s"]["runs"]) == workloads.MOST_TURNS for result in results)
    assert memory["free_bytes"] == memory["step_bytes"] + memory["cache_bytes"] + memory["kept_back_bytes"]
    assert memory["unforeseen_bytes"] == memory["kept_back_bytes"] - 2**20
    assert "MiB were needed" in table(record([memory]) | {"peaks": PEAKS})
    (other,), failures = told(against)
    assert failures == []
    assert other["against"]["name"] == "transformers"
    assert other["against"]["equal_rows"] == 1.0
    assert f"× transformers {other['against']['version']} (aim 3×)" in table(
        record([other]) | {"peaks": PEAKS}
    )


def test_without_peaks_no_model_is_run():
    failures: list[Any] = []
    setting = OnTheCpu(False, 100.0, str(ROOT), model=TINY_MODEL)
    model.run(Section(setting, lambda *said: failures.append(said)))
    assert {kind for kind, _ in failures} == {"part", "failure"}
    messages = [said["message"] for kind, said in failures if kind == "failure"]
    assert all("peaks of this GPU were not measured" in message for message in messages)


def of_one_layer(name: str) -> ModelSpec:
    """Enough of a model."""
    spec = shape_config(name)
    return replace(spec, layers=spec.layers[:1])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured, whole and in pieces."""
    interpreted_gpu.stand_in(monkeypatch.setattr)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name, value in {"PROMPT": 9, "MEAN_OUTPUT": 2, "MOST_OUTPUT": 4}.items():
        monkeypatch.setattr(workloads, name, value)
    monkeypatch.setattr(loaded, "shape_config", of_one_layer)
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "longest": 24, "max_model_len": 24}
    monkeypatch.setattr(loaded, "EngineConfig", lambda **given: EngineConfig(**{**given, **sizes}))


def test_mixed_steps_are_timed_both_ways(as_on_a_gpu):
    results, failures = told(mixed)
    assert failures == []
    (result,) = results
    assert (result["tokens"], result["rows"]) == (5, 2)
    assert result["error"] <= 1e-4
    for times in result["ways"].values():
        assert times["host_layer_s"] == times["host_s"] / result["layers"]
    text = table(record(results) | {"peaks": PEAKS})
    assert "a layer (assumed 330 µs)" in text
    assert "a layer (assumed 1,100 µs)" in text
    results, failures = told(launching)
    assert failures == []
    captured, launched = (result["host"]["ways"] for result in results)
    assert set(captured) == {"full_graph", "piecewise_graph"}
    assert set(launched) == {"full_graph", "eager"}
    for result in results:
        admission = result["host"]["admission"]
        assert admission["admitting"]["rows"] >= 1
        assert sum(found["steps"] for found in admission.values()) == result["steps"]
        assert sum(way["steps"] for way in result["host"]["ways"].values()) == result["steps"]
    text = table(record(results) | {"peaks": PEAKS})
    assert "rows admitted: scheduled in" in text
    assert "steps launched as one graph" in text


def test_other_tiles_are_tried_beside_the_chosen_ones():
    results, failures = told(tiles)
    assert failures == []
    assert [result["kind"] for result in results] == ["tiles"] * 6
    assert {tuple(result["tiles"]) for result in results} == {(32, 32, 4, 1), (16, 32, 4, 1), (32, 64, 4, 1)}
    for result in results:
        assert result["error"] <= result["tolerance"]
        assert set(result["times_as_fast"]) == {tiles.CHOSEN}
        assert result["share"] > 0
        assert result["chosen"] != result["tiles"]


@pytest.mark.parametrize("work", ["prefill", "decode", "prefix"])
def test_tiles_reach_the_kernels(work):
    """No kernel has a tile of 48 keys: what is launched with it fails, and the chosen one is back behind it."""
    section = Section(OnTheCpu(False, 100.0, str(ROOT)), lambda *said: None)
    make = tiles._makers(section, attention.TINY)[work]
    case = make()
    before = case.ours()
    with (
        tiles.instead(work, KVTiles(32, 48, 4, 1)),
        pytest.raises(Exception, match=r"power of 2|of tiles of 48"),
    ):
        make().ours()
    assert torch.equal(case.ours(), before)


def test_what_a_gpu_has_no_room_for_is_told(monkeypatch):
    def refused(section: Section, tried: case.Case) -> dict[str, Any]:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(tiles, "measured", refused)
    results, failures = told(tiles)
    assert failures == []
    assert {result["fits"] for result in results} == {False}
    assert "does not fit" in table(record(results) | {"peaks": PEAKS})


def test_steady_steps_are_profiled(monkeypatch):
    """With works of the device as torch's profiler tells them."""
    works = [("a", 0, 10), ("b", 5, 20), ("a", 30, 60), ("c", 40, 50), ("c", 100, 110)]
    monkeypatch.setattr(profile, "_device_work", lambda seen: [profile.Work(*work) for work in works])
    monkeypatch.setattr(profile, "ProfilerActivity", SimpleNamespace(CUDA=ProfilerActivity.CPU))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    results, failures = told(profile)
    assert failures == []
    (result,) = results
    assert result["steps"] == profile.STEPS == len(result["decode_tokens"])
    found = result["profiled"]
    assert found["idle_share"] == pytest.approx(50 / 110)
    assert (found["gaps"], found["longest_gaps_s"]) == (2, [pytest.approx(40e-6), pytest.approx(10e-6)])
    assert found["kernels"][0] == {"name": "a", "share": pytest.approx(40 / 75)}
    text = table(record([result]) | {"peaks": PEAKS})
    assert "the GPU idles 45 % of 110 µs, in 2 gaps of up to 40 µs" in text
    assert "53 % of the device's work: a" in text


def test_a_profiler_that_sees_nothing_is_a_failure():
    with pytest.raises(case.WrongResult, match="saw nothing"):
        profile._device_work(SimpleNamespace(events=list))
