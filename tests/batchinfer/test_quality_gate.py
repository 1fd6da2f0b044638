"""Runs with quantised weights measure their quality, warn, and keep to the limits of the job."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModel

from batchinfer.core.errors import JobFileError, QualityTooLow
from batchinfer.core.request import TokenIds
from batchinfer.core.sampling import Pooling
from batchinfer.core.statistics.quality import Quality
from batchinfer.engine.config import LoadConfig, QualityOrder
from batchinfer.engine.load.quality import measure_quality
from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.machine.facts import this_machine
from batchinfer.models.calibration.layered import LayeredModel
from batchinfer.models.calibration.sample import SampleRows
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer.pipeline.calibration import quality
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.transport import PROCESSES
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.plan.setup.job_setup import check_setup
from batchinfer.plan.setup.quality import check_quality_limits
from batchinfer.report.progress import Progress
from tests.batchinfer.int4_jobs import PLAIN, ROWS, make_divisible
from tests.batchinfer.pipeline.test_pipeline import run, write_job
from tests.checkpoints import make_checkpoint
from tests.encoder_checkpoints import make_encoder
from tests.examples import seed

ENCODERS = ("bert", "mpnet", "modernbert")
INT8: tuple[tuple[str, str], ...] = (
    ("model.quantization", "int8"),
    ("model.dtype", "float32"),
    ("engine.quality_rows", "12"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_divisible(tmp_path_factory.mktemp("model"))


def test_a_run_measures_once_and_plan_shows_the_result(model: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, model, ROWS, **PLAIN)
    first = run(job, RunOptions(limit=2), *INT8)
    again = run(job, RunOptions(), *INT8)
    assert 0 < first.row["quality_kl"] < 0.1
    assert 0.5 < first.row["quality_top1"] <= 1
    assert first.row["quality_positions"] > 20
    assert first.row["quality_cosine"] is None
    assert (first.row["quality_s"] > 0, again.row["quality_s"]) == (True, None)
    assert again.row["quality_kl"] == first.row["quality_kl"]
    for name, sets in (("other prompt", (("prompt.truncate", "left"),)), ("same", ())):
        found = forecast_job(load_job(job, (*INT8, *sets)), lambda _: None, lambda _: None)
        assert (found.quality is None) == (name == "other prompt" or not found.plan.to_run)
    plain = run(job, RunOptions(replace=True), *INT8, ("model.quantization", "none"))
    assert plain.row["quality_positions"] is None


def test_a_run_beyond_the_limits_ends_before_the_first_answer(model: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, model, ROWS, **PLAIN, engine={"quality_limits": {"kl": 1e-9, "top1": 1.0}})
    with pytest.raises(QualityTooLow, match=r"KL 0\.\d+ nats is above engine\.quality_limits\.kl: 1e-09"):
        run(job, RunOptions(), *INT8)
    assert not [*tmp_path.rglob("completions/*.parquet")]
    row = pq.read_table(next(tmp_path.glob("out/res-report/run-*.parquet"))).to_pylist()[0]
    assert (row["exit_code"], row["exit_status"], row["quality_kl"] > 0) == (65, "quality too low", True)
    with pytest.raises(JobFileError, match=r"engine\.quality_limits"):
        load_job(job, (("engine.quality_limits", "0.05"),))


def test_a_low_quality_is_a_warning(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path, model, ROWS[:3], **PLAIN)
    for measured, expected in (
        (Quality(0.5, 0.7, 100), "changes many answers of this job: KL 0.5 nats from unquantised weights"),
        (Quality(0.001, 0.99, 100), "quality of float32 with int8 weights: KL 0.001 nats"),
        (Quality(0.001, 0.0, 100), "changes many answers of this job: KL 0.001 nats"),
    ):
        monkeypatch.setattr(quality, "measure_in_child", lambda *_, measured=measured: measured)
        lines: list[str] = []
        (tmp_path / "out/.batchinfer-res/quality.json").unlink(missing_ok=True)
        tokens = ("sampling.max_tokens", str(1 + round(10 * (measured.top1 or 0))))  # other work each time
        loaded, options = load_job(job, (*INT8, tokens)), RunOptions(replace=True)
        run_job(loaded, options, Progress(io.StringIO(), quiet=True), Interrupts(), lines.append)
        assert [line for line in lines if expected in line], lines


@pytest.mark.parametrize("measured", [Quality(float("nan"), 0.0, 100), Quality(None, None, 9, float("nan"))])
def test_a_quality_that_is_not_a_number_is_beyond_every_limit(
    measured: Quality, model: Path, tmp_path: Path
) -> None:
    limits = {"quality_limits": {"kl": 1.0, "cosine": 0.1}}
    job = load_job(write_job(tmp_path, model, ROWS[:1], engine=limits, **PLAIN), INT8)
    with pytest.raises(QualityTooLow, match="nan"):
        check_quality_limits(job, measured)


def test_a_short_job_measures_fewer_rows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[QualityOrder] = []

    def record(order: QualityOrder, *_: Any) -> Quality:
        orders.append(order)
        return Quality(0.001, 0.99, 100)

    monkeypatch.setattr(quality, "measure_in_child", record)
    monkeypatch.setattr(quality, "quality_forecast_s", lambda *_: 10.0)
    job = load_job(write_job(tmp_path, model, ROWS, **PLAIN), INT8)
    setup = check_setup(job, state_of(job), this_machine(job.engine.device))
    silent = Progress(None, job="test", quiet=True)
    for forecast_s, rows in ((None, 12), (1000.0, 12), (150.0, 9), (1.0, quality.MIN_ROWS)):
        lines: list[str] = []
        quality.measure_job_quality(job, setup, silent, lines.append, PROCESSES, forecast_s)
        assert (len(orders[-1].prompts), len(lines)) == (rows, int(rows < 12))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2", *ENCODERS])
def test_layers_one_at_a_time_compute_the_states_of_transformers(family: str, tmp_path: Path) -> None:
    (make_encoder if family in ENCODERS else make_checkpoint)(tmp_path, family)
    reference = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = random_prompts(reference.config.vocab_size)
    source = checkpoint_source(tmp_path)
    assert isinstance(source, ModelSource)
    arithmetic = Arithmetic(torch.float32, torch.device("cpu"))
    steps = [*SampleRows.of((prompt, 1) for prompt in prompts).steps(torch.device("cpu"))]
    with torch.inference_mode(), source.open_layers(arithmetic) as weights:
        model = LayeredModel(source.spec, weights, source.choose_ops(arithmetic), torch.float32, steps)
        found = [model.ends.states(states) for states in model.final_states(lambda: None)]
        rows = [
            row for step, of in zip(steps, found, strict=True) for row in of.split(step.inputs.context_lens)
        ]
        for prompt, row in zip(sorted(prompts, key=lambda ids: ids.tolist()), rows, strict=True):
            expected = reference(torch.from_numpy(prompt.astype(np.int64))[None]).last_hidden_state[0]
            torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-4)


def test_logits_are_compared_at_a_limited_number_of_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    prompts = tuple(random_prompts(AutoConfig.from_pretrained(tmp_path).vocab_size))
    order = QualityOrder(LoadConfig(tmp_path, "float32", "cpu", threads=1, quantization="int8"), prompts)
    assert measure_quality(order, lambda *_: None).positions == sum(map(len, prompts))
    monkeypatch.setattr("batchinfer.engine.load.quality.MAX_POSITIONS", 16)
    found = measure_quality(order, lambda *_: None)
    assert found.positions == 16
    assert found.kl is not None
    assert 0 < found.kl < 0.1


def random_prompts(vocab: int) -> list[TokenIds]:
    drawn = random.Random(seed())
    return [np.array(drawn.choices(range(3, vocab), k=length), np.int32) for length in (1, 5, 17, 40)]


@pytest.mark.parametrize(("family", "pooling"), [("llama", "last"), ("bert", "mean")])
def test_vectors_of_quantised_weights_are_compared_by_their_cosine(
    family: str, pooling: Pooling, tmp_path: Path
) -> None:
    (make_encoder if family in ENCODERS else make_checkpoint)(tmp_path, family)
    config = AutoConfig.from_pretrained(tmp_path)
    prompts = tuple(random_prompts(config.vocab_size))
    layers: list[tuple[int, int]] = []
    load = LoadConfig(tmp_path, "float32", "cpu", threads=1, quantization="int8")
    found = measure_quality(QualityOrder(load, prompts, pooling), lambda *done: layers.append(done))
    assert (found.kl, found.top1, found.positions) == (None, None, len(prompts))
    assert found.cosine is not None
    assert 0.98 < found.cosine < 1
    count = 2 * config.num_hidden_layers
    assert layers == [(done, count) for done in range(count + 1)]
