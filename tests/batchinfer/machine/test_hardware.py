"""Peaks: measured values before datasheets before unknown; never zero, never a crash."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.machine import hardware
from batchinfer.machine.doctor import doctor, peaks_text, products_text, steps_text
from batchinfer.machine.hardware import Gpu, Hardware, detect, read_cache, remember
from batchinfer_kernels.cost import Peaks

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30)


def test_the_cpu_is_named_and_unknown_before_it_is_measured(tmp_path: Path) -> None:
    here = detect("cpu", cache=tmp_path / "none.json")
    assert here.name
    assert (here.cores or 0) >= 1
    assert here.memory_bytes is None or here.memory_bytes > 2**28
    assert (here.source, here.bandwidth, dict(here.peak_flops)) == ("unknown", None, {})
    assert here.peaks("float32") is None


def test_measured_peaks_come_back_for_the_same_machine_only(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "hardware.json"
    here = detect("cpu", cache=cache).measured(
        {"float32": 1.5e11},
        4e10,
        {"float32+int8": {"rows": 1e-5}},
        {"float32": "compiled"},
        {"float32": {"large": {"torch": 1.4e11, "compiled": 1.5e11}, "layers": {"torch": 8e10}}},
    )
    gpu = detect("cuda", gpu=H100, cache=cache).measured({"bfloat16": 7e14}, 3e12)
    assert remember(here, cache) == cache
    remember(gpu, cache)
    found = detect("cpu", cache=cache)
    assert found.source == "measured"
    assert found.peaks("float32") == Peaks(1.5e11, 4e10)
    assert found.peaks("bfloat16") is None
    assert found.step_time("float32", "int8") == {"rows": 1e-5}  # though another device was measured later
    assert found.step_time("float32") is None
    assert found.peak_by == {"float32": "compiled"}
    assert "float32 150 GFLOP/s by compiled" in peaks_text(found)
    assert found.products == here.products
    said = "float32 large 140 GFLOP/s by torch, 150 GFLOP/s by compiled; float32 layers 80 GFLOP/s by torch"
    assert products_text(found) == said
    assert "doctor --measure" in products_text(detect("cuda", gpu=H100, cache=cache))
    assert detect("cuda", gpu=H100, cache=cache).peak_flops == {"bfloat16": 7e14}
    assert replace(here, cores=999).key not in read_cache(cache)


def test_well_known_gpus_have_datasheet_peaks_and_others_have_none(tmp_path: Path) -> None:
    known = detect("cuda:0", gpu=H100, cache=tmp_path / "none")
    assert known.source == "datasheet"
    assert known.peaks("bfloat16") == Peaks(989.4e12, 3.35e12)
    assert known.peaks("bfloat16", "int8") == Peaks(989.4e12, 3.35e12, 1978.9e12)
    for name, dtype, quantization in (("V100-SXM2-16GB", "float16", "int8"), ("T4", "bfloat16", "none")):
        old = detect("cuda", gpu=Gpu(f"Tesla {name}", None), cache=tmp_path / "none")
        assert old.peaks(dtype, quantization) is None
    other = detect("cuda", gpu=Gpu("NVIDIA Imaginary 1", 2**30), cache=tmp_path / "none")
    assert (other.source, other.bandwidth) == ("unknown", None)


def test_a_gpu_that_is_not_there_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "nvidia_gpus", lambda: [H100])
    assert detect("cuda:0", cache=tmp_path / "none").name == H100.name
    assert detect("cuda:1", cache=tmp_path / "none").name == "unknown GPU"
    with pytest.raises(ValueError, match="'tpu'"):
        detect("tpu")


@pytest.mark.parametrize("text", [
    "",
    "{",
    "null",
    '{"format": 2, "devices": {}}',
    '{"format": 1, "devices": []}',
    '{"format": 1, "devices": {"cpu:x": 3}}',
    '{"format": 1, "devices": {"cpu:x": {"peak_flops": {"float32": 0}, "bandwidth": 1}}}',
    '{"format": 1, "devices": {"cpu:x": {"peak_flops": {}, "bandwidth": Infinity}}}',
    '{"format": 1, "devices": {"cpu:x": {"peak_flops": {"float32": 1}}}}',
    '{"format": 1, "devices": {"cpu:x": {"peak_flops": {}, "bandwidth": 1, "products": []}}}',
    '{"format": 1, "devices": {"cpu:x": {"peak_flops": {}, "bandwidth": 1, "products": {"int8": 3}}}}',
    '{"format": 1, "devices": {"cpu:x": {"peak_flops": {}, "bandwidth": 1, "products": {"a": {"b": 3}}}}}',
    '{"format": 1, "devices": {"cpu:x": {"peak_flops": {}, "bandwidth": 1,'
        ' "products": {"int8": {"large": {"torch": -1}}}}}}',
])  # fmt: skip
def test_a_damaged_cache_is_ignored(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "hardware.json"
    cache.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert detect("cpu", cache=cache).source == "unknown"
    assert str(cache) in caplog.text
    assert "doctor --measure" in caplog.text


@given(st.binary(max_size=200))
def test_no_cache_file_crashes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    cache = tmp_path_factory.getbasetemp() / "fuzz.json"
    cache.write_bytes(content)
    assert read_cache(cache) == {}


def test_a_cache_that_is_missing_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_cache(tmp_path / "none.json") == {}
    assert caplog.text == ""


def test_the_cache_follows_xdg() -> None:
    assert hardware.cache_path({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/batchinfer/hardware.json")
    assert hardware.cache_path({"HOME": "/h"}) == Path("/h/.cache/batchinfer/hardware.json")


@pytest.mark.parametrize(("text", "fast"), [
    ("model name\t: AMD EPYC 9B14\nflags\t\t: fpu avx2 avx512_bf16 sse\n", True),
    ("model name : Xeon\nflags : amx_tile amx_bf16\n", True),
    ("model name : Old\nflags : avx2 avx512f\nbugs : avx512_bf16\n", False),
    ("Features : fp asimd i8mm bf16\n", True),
    ("Features : fp asimd asimddp\n", False),
    ("", False),
])  # fmt: skip
def test_fast_bf16_is_read_from_the_flags(text: str, fast: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert hardware.has_fast_bf16(cpuinfo) is fast
    assert not hardware.has_fast_bf16(tmp_path / "none")


def test_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVIDIA H200, 143771\nNVIDIA Odd, name, [N/A]\n"
    monkeypatch.setattr(hardware, "_output", lambda command: text)
    assert hardware.nvidia_gpus() == [Gpu("NVIDIA H200", 143771 * 2**20), Gpu("NVIDIA Odd, name", None)]


def test_the_doctor_names_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "nvidia_gpus", lambda: [H100])
    facts: dict[str, Any] = {fact.name: fact.value for fact in doctor(tmp_path / "hardware.json")}
    assert {"python", "torch", "transformers", "tokenizers", "duckdb", "pyarrow", "memory"} <= set(facts)
    assert "doctor --measure" in facts["cpu peaks"]
    assert "datasheet" in facts["gpu 0 peaks"]
    assert "does not exist" in facts["peaks file"]
    (tmp_path / "hardware.json").write_text(json.dumps({"format": 9}))
    assert "unusable" in {f.name: f.value for f in doctor(tmp_path / "hardware.json")}["peaks file"]


def test_peaks_are_shown_with_their_source() -> None:
    here = Hardware("x", "cpu", 2, None, {"float32": 1.5e11}, 4e10, "measured")
    assert peaks_text(here) == "float32 150 GFLOP/s, memory 40 GB/s (measured)"
    assert "doctor --measure" in steps_text(here)
    assert steps_text(replace(here, step_times={"float32": {}})) == "measured in float32"
