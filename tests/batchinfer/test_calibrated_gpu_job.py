"""Whole jobs that calibrate int4 weights on a GPU. Without one, Triton's kernels are interpreted."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.engine.config import CalibrationOrder
from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.machine.facts import this_machine
from batchinfer.models.calibration.work import CalibrationOutcome
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.spec.model_cost import loaded_bytes
from batchinfer.pipeline.calibration import calibration
from batchinfer.pipeline.calibration import process as calibrator
from batchinfer.pipeline.calibration.calibration import MOST_WEIGHTS, Listener
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.stages import calibrating
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.plan.setup.job_setup import check_setup
from batchinfer.report.progress import Progress
from tests.batchinfer.engine.interpreted_gpu import DEVICE
from tests.batchinfer.int4_jobs import INT4, PLAIN, make_divisible
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.batchinfer.test_calibrated_job import weights
from tests.settings import changed, has_gpus

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy

HERE = "tests.batchinfer.engine.interpreted_gpu"
ENGINE = {"device": "cuda", "max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_memory": "1MiB"}
BUILD = f"{HERE}:build"
ROWS = [{"text": f"alpha {number} and beta"} for number in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1}
    return make_divisible(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, stand-ins are some."""
    if DEVICE == "cpu":
        has_gpus(monkeypatch, "0", "1")
        monkeypatch.setattr(calibrator, "CALIBRATOR", f"{HERE}:calibrate")
        monkeypatch.setattr(calibrating, "ENGINE", BUILD)  # others have no weights


@pytest.mark.slow  # the interpreter takes half a minute
def test_the_first_run_calibrates_on_the_gpu_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "ANSWER_TOKENS", 3)  # the interpreter takes long for each step
    sections: dict[str, Any] = PLAIN | {"sampling": {"max_tokens": 2, "ignore_eos": True}}
    job = write_job(tmp_path, model, ROWS, engine=ENGINE, **sections)
    options = RunOptions(engine=BUILD)
    first = run(job, options, *INT4)
    assert (first.exit_code, first.row["device"]) == (0, "cuda")
    assert first.row["calibration_s"] > 0
    assert 0 < first.row["int4_kl"] < 5
    assert first.row["int4_tokens"] > 2, "answers were held out, too"
    assert len(weights(job)) > 3
    assert all(row["generated_text"] for row in table(job))
    forecast = forecast_job(load_job(job, INT4), lambda _: None, lambda _: None)
    assert (forecast.plan.to_run, forecast.plan.present) == (0, len(ROWS)), "with the weights that were made"


@pytest.mark.parametrize("short", [0, 1])
def test_a_model_of_ranks_answers_where_it_fits_one_gpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """`short`: bytes that a GPU has less than the model in int4 needs of it."""
    path = write_job(tmp_path, model, ROWS, engine={**ENGINE, "tensor_parallel_size": 2}, **PLAIN)
    job, told, orders = load_job(path, INT4), list[str](), list[CalibrationOrder]()
    setup = check_setup(job, state_of(job), this_machine(job.engine.device))
    assert isinstance(setup.checkpoint, Checkpoint)
    taken = loaded_bytes(setup.checkpoint.spec.quantized("int4"), setup.checkpoint.parameters, 4)
    memory = -int(-taken // MOST_WEIGHTS) - short
    hardware = replace(setup.setting.placement.hardware, memory_bytes=memory)
    setup = replace(setup, setting=changed(setup.setting, hardware=hardware))

    def calibrated(order: CalibrationOrder, *_: Any) -> CalibrationOutcome:
        orders.append(order)
        return CalibrationOutcome(None)

    monkeypatch.setattr(calibration, "calibrate_in_child", calibrated)
    listener = Listener(Progress(None, job="test", quiet=True), told.append)
    assert calibration.write_calibrated(job, setup, tmp_path / "int4", listener)
    assert [order.answer_tokens > 0 for order in orders] == [not short]
    assert any("too large for one GPU" in line for line in told) == bool(short)
    assert orders[0].load.device == "cuda"
