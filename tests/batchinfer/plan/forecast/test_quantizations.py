"""Quantisations of a job's model that `batchinfer plan` compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batchinfer.machine.hardware import Hardware
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer.plan.forecast.text import forecast_json
from batchinfer_kernels.arithmetic import Quantization
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.batchinfer.plan.forecast.forecasts import machine_of, planned, runs_on, text
from tests.checkpoints import make_tokenizer
from tests.published_formats import make_published

NAMES: tuple[Quantization, ...] = ("none", "int8", "int4")
FLOAT32 = ("model.dtype", "float32")
pytestmark = pytest.mark.usefixtures("quantizations")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """A machine on which reading the weights dominates."""
    found = replace(machine_of(1e10), peak_flops=dict.fromkeys(("float32", "bfloat16", "int8", "int4"), 1e14))
    runs_on(monkeypatch, found)
    return found


def test_each_quantization_has_the_forecast_of_a_job_with_it(
    tmp_path: Path, model: Path, machine: Hardware
) -> None:
    path = write_job(tmp_path, model, people(20), sampling={"max_tokens": 9, "ignore_eos": True})
    found = planned(path, FLOAT32)
    assert [one.quantization for one in found.quantizations] == list(NAMES)
    assert [one.chosen for one in found.quantizations] == [True, False, False]
    took = [one.seconds or 0 for one in found.quantizations]
    assert took[0] > took[1] > took[2] > 0
    for one in found.quantizations:
        chosen = ("model.quantization", one.quantization)
        job = found if one.chosen else planned(path, FLOAT32, chosen)
        assert job.forecast.seconds == pytest.approx(one.seconds)
        assert [other.seconds for other in job.quantizations] == took
        source = checkpoint_source(model, quantization=one.quantization)
        assert isinstance(source, ModelSource)
        cost = source.cost(Arithmetic(torch.float32, torch.device("cpu")))
        assert one.weight_bytes == source.weight_bytes(cost)
    said = text(found)
    assert "model.quantization: none (this job) " in said
    assert "seconds without what earlier runs tell" in said
    assert [one["quantization"] for one in forecast_json(found, None)["quantizations"]] == list(NAMES)


def test_without_peaks_only_memory_is_compared(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_on(monkeypatch, Hardware("a machine", "cpu", 2, 8 << 30, {}, None, "unknown"))
    found = planned(write_job(tmp_path, model, people(5)), FLOAT32)
    assert [one.seconds for one in found.quantizations] == [None] * 3
    assert [one.fits for one in found.quantizations] == [True] * 3
    assert "seconds" not in next(line for line in text(found).splitlines() if "weights" in line)


def test_zeros_that_a_gpu_leaves_out_are_one_of_the_choices(tmp_path: Path) -> None:
    model = tmp_path / "sparse"
    make_published(model, tmp_path / "plain", "2:4 sparse")
    make_tokenizer(model)
    gpu = Hardware("a GPU", "cuda", None, 8 << 30, {"bfloat16": 1e14, "int8": 2e14}, 1e10, "datasheet")
    job = write_job(tmp_path, model, people(5), model={"max_model_len": 100, "dtype": "bfloat16"})
    dense, coded, sparse = planned(job, hardware=gpu).quantizations
    assert [one.quantization for one in (dense, coded, sparse)] == ["none", "int8", "stored-sparse"]
    assert (dense.chosen, sparse.chosen) == (False, True)
    assert dense.weight_bytes > sparse.weight_bytes > coded.weight_bytes


def test_quantised_checkpoints_have_no_alternatives(tmp_path: Path, machine: Hardware) -> None:
    make_published(tmp_path / "packed", tmp_path / "plain", "w4a16")
    make_tokenizer(tmp_path / "packed")
    found = planned(write_job(tmp_path, tmp_path / "packed", people(5), model={"max_model_len": 100}))
    assert found.plan.to_run == 5
    assert found.quantizations == ()
