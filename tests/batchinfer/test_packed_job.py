"""Runs whole jobs on quantised weights, some of them quantised again for the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import checkpoint_source
from batchinfer.pipeline.options import RunOptions
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.checkpoints import edit_json, make_checkpoint, make_tokenizer
from tests.packed_weights import make_mxfp4
from tests.published_formats import make_published

ROWS = [{"text": text} for text in ("alpha", "beta and gamma", "alpha and more", "delta")]
PLAIN = {"prompt": {"text": "text", "system": None, "user": None}, "sampling": {"max_tokens": 6}}


@pytest.fixture(scope="module", params=["mxfp4", "gptq"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "mxfp4":
        make_mxfp4(folder / "packed", folder / "dequantised")
    else:
        make_published(folder / "packed", folder / "dequantised", request.param)
    for name in ("packed", "dequantised"):
        make_tokenizer(folder / name)
    return folder


@pytest.mark.sample(1)
def test_answers_equal_the_dequantised_checkpoint(models: Path, tmp_path: Path) -> None:
    answers = []
    for name in ("packed", "dequantised"):
        (tmp_path / name).mkdir()
        job = write_job(tmp_path / name, models / name, ROWS, **PLAIN)
        sets = (("model.dtype", "float32"), ("model.quantization", "int8"))
        assert run(job, RunOptions(), *sets).exit_code == 0
        answers.append([row["generated_text"] for row in table(job)])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_validate_reports_the_memory_of_quantised_weights(models: Path, tmp_path: Path) -> None:
    """Dequantised and quantised: MXFP4 stays quantised by default, GPTQ on request."""
    job = write_job(tmp_path, models / "packed", ROWS, **PLAIN)
    plain, stored = (
        "\n".join(validate_job(load_job(job, (("model.quantization", how),)))) for how in ("none", "stored")
    )
    text = (
        r"weights stored as (mxfp4|gptq) are dequantised when they are loaded: all weights take .* in 16 bits"
    )
    assert (found := re.search(text, plain))
    assert ("; model.quantization: stored leaves" in plain) == (found[1] == "gptq")
    assert not re.search(text, stored)
    assert re.search(r"\d% of the weights of linear layers stay in (mxfp4|int4) as they are stored", stored)
    automatic = "\n".join(validate_job(load_job(job, ())))
    assert ("stay in mxfp4" in automatic) == (found[1] == "mxfp4")


@pytest.mark.slow
@pytest.mark.sample(1)
def test_quantised_products_keep_the_work_key_if_nothing_is_rounded(models: Path, tmp_path: Path) -> None:
    """Answers of dequantised MXFP4 are reused. With int4, a CPU quantises activations."""
    job = write_job(tmp_path, models / "packed", ROWS, **PLAIN)
    stored = run(job, RunOptions(), ("model.quantization", "stored"))
    again = run(job, RunOptions(replace=True), ("model.quantization", "none"))
    assert (stored.exit_code, again.exit_code) == (0, 0)
    reused = {"stored-mxfp4": len(ROWS), "stored-int4": 0}
    assert again.row["reused_requests"] == reused[stored.row["quantization"]]


def test_other_ways_to_quantize_are_refused(models: Path, tmp_path: Path) -> None:
    edit_json(models / "packed" / "config.json", quantization_config={"quant_method": "hqq", "bits": 4})
    with pytest.raises(
        JobFileError, match="quant_method 'hqq' are not supported; float weights and mxfp4, fp8"
    ):
        validate_job(load_job(write_job(tmp_path, models / "packed", ROWS, **PLAIN), ()))


@pytest.mark.slow
def test_int8_is_multiplied_as_it_is_stored(tmp_path: Path) -> None:
    """With quantization: none, the answers are other work."""
    make_published(tmp_path / "model", tmp_path / "plain", "w8a8")
    make_tokenizer(tmp_path / "model")
    job = write_job(tmp_path, tmp_path / "model", ROWS, **PLAIN)
    first = run(job, RunOptions())
    assert (first.exit_code, first.row["quantization"]) == (0, "stored-int8")
    again = run(job, RunOptions(replace=True), ("model.quantization", "none"))
    assert (again.exit_code, again.row["quantization"], again.row["rows_ok"]) == (0, "none", len(ROWS))


@pytest.mark.slow
def test_weights_are_rounded_to_int4(tmp_path: Path) -> None:
    """Rounding is deterministic, and uses less memory than int8."""
    model = tmp_path / "model"
    make_checkpoint(model, "llama", hidden_size=128, intermediate_size=256)
    make_tokenizer(model)
    answers = []
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        job = write_job(tmp_path / name, model, ROWS, **PLAIN)
        outcome = run(job, RunOptions(), ("model.quantization", "int4"), ("engine.deterministic", "true"))
        assert (outcome.exit_code, outcome.row["quantization"]) == (0, "int4")
        answers.append([row["generated_text"] for row in table(job)])
    assert answers[0] == answers[1]
    sources = [checkpoint_source(model, quantization=codes) for codes in ("int4", "int8", "none")]
    place = Arithmetic(torch.float32, torch.device("cpu"))
    small, middle, large = (source.weight_bytes(source.cost(place)) for source in sources)
    assert small < 0.8 * middle < 0.3 * large
