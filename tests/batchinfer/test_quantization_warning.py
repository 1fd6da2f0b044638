"""Tests that a job with quantised weights warns about its accuracy."""

from __future__ import annotations

import io
from pathlib import Path

from batchinfer.job import load_job
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.report.progress import Progress
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, write_job
from tests.checkpoints import make_tokenizer
from tests.published_formats import make_published

LINE = (
    "changes nearly all answers of real models: "
    "on SmolLM2-135M, int8 kept 22 of 200 answers, int4 21 (docs/models.md)"
)


def warnings(lines: list[str]) -> list[str]:
    return [line for line in lines if "SmolLM2" in line]


def test_run_plan_and_validate_warn_that_quantisation_changes_answers(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(1), model={"path": str(model), "quantization": "int8"})
    job, progress = load_job(path), Progress(io.StringIO(), quiet=True)
    run: list[str] = []
    plan: list[str] = []
    forecast_job(job, lambda _: None, plan.append)
    run_job(job, FAKE, progress, Interrupts(), run.append)
    wanted = [f"model.quantization: int8 {LINE}"]
    assert [warnings(lines) for lines in (run, plan, validate_job(job))] == [wanted] * 3


def test_stored_quantised_weights_need_no_warning(tmp_path: Path) -> None:
    """Stored int4 is multiplied as int4; in int8 its weights are quantised again."""
    make_published(tmp_path / "model", tmp_path / "plain", "gptq")
    make_tokenizer(tmp_path / "model")
    path = write_job(tmp_path, tmp_path / "model", people(1))
    for quantization, count in (("int4", 0), ("none", 0), ("int8", 1)):
        assert len(warnings(validate_job(load_job(path, (("model.quantization", quantization),))))) == count
