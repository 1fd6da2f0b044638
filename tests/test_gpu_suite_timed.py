"""What the GPU suite has for a GPU, as far as no rehearsal shows it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from batchinfer_kernels.gpu.attention_launch import KVTiles
from tests.gpu_suite import (
    attention,
    case,
    host_table,
    matmul,
    model,
    profile,
    tiles,
    workloads,
)
from tests.gpu_suite.section import Model, Section, Setting

ROOT = Path(__file__).parents[1]
TINY_MODEL = Model("tiny", 2**23)
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a GPU: make gpu-suite does the same on it"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # masked lanes are computed too, by NumPy
]


class OnTheCpu(Setting):
    """As on a GPU, but there."""

    device = torch.device("cpu")  # type: ignore[assignment]


@pytest.mark.parametrize("module", [attention, matmul, tiles], ids=lambda module: module.__name__)
def test_each_case_of_a_gpu_has_a_name_of_its_own(module, monkeypatch):
    monkeypatch.setattr(matmul, "why_not_fp8", lambda: None)
    section = Section(OnTheCpu(False, 100.0, str(ROOT)), lambda *said: None)
    names = [name for name, _ in module.cases(section)]
    assert len(names) == len(set(names)) > 10


def test_the_memory_that_was_left_is_told():
    sizes = dict.fromkeys(("weight", "step", "cache", "kept_back", "reserve", "unforeseen", "left"), 2**31)
    told = {f"{name}_bytes": size for name, size in (sizes | {"cache": 2**35, "unforeseen": 2**20}).items()}
    (line,) = host_table.memory_lines({"kind": "memory", "model": "m", **told})
    assert "cache 32,768 MiB; kept back 2,048 MiB" in line
    assert "of which 1 MiB were needed" in line


def test_workloads_are_large_enough_for_a_steady_state():
    assert workloads.ROWS >= 2000
    for output in (workloads.MEAN_OUTPUT, workloads.SHORT_OUTPUT):
        rows = workloads.steady_rows(workloads.ROWS, 32_000, 4, output, workloads.MOST_OUTPUT, shared=2)
        assert 0.9 * output < workloads.mean_output(rows) <= 128
        assert len({row.prompt[:2] for row in rows}) == 1 < len({row.max_tokens for row in rows})
        assert {len(row.prompt) for row in rows} == {4}


def test_without_peaks_no_model_is_run():
    failures: list[Any] = []
    setting = OnTheCpu(False, 100.0, str(ROOT), model=TINY_MODEL)
    model.run(Section(setting, lambda *said: failures.append(said)))
    assert {kind for kind, _ in failures} == {"part", "failure"}
    messages = [said["message"] for kind, said in failures if kind == "failure"]
    assert all("peaks of this GPU were not measured" in message for message in messages)


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
    section = Section(OnTheCpu(True, 100.0, str(ROOT)), lambda *said: None)
    for _, part in tiles.rehearsed(section):
        assert part()["fits"] is False


def test_idle_time_is_what_no_work_covers():
    works = [("a", 0, 10), ("b", 5, 20), ("a", 30, 60), ("c", 40, 50), ("c", 100, 110)]
    found = profile.summary([profile.Work(*work) for work in works])
    assert found["idle_share"] == pytest.approx(50 / 110)
    assert (found["gaps"], found["longest_gaps_s"]) == (2, [pytest.approx(40e-6), pytest.approx(10e-6)])
    assert found["kernels"][0] == {"name": "a", "share": pytest.approx(40 / 75)}


def test_a_profiler_that_sees_nothing_is_a_failure():
    with pytest.raises(case.WrongResult, match="saw nothing"):
        profile._device_work(SimpleNamespace(events=list), "CUDA")
