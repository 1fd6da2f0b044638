"""Runs a whole job on a model that transformers computes, from the command to the report."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest
import torch

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.models.foreign.probe import describe
from batchinfer.models.opening import open_checkpoint
from batchinfer.pipeline.options import RunOptions
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.pipeline.test_pipeline import run, write_job
from tests.checkpoints import make_tokenizer
from tests.foreign_models import EOS, make_foreign

TEXTS = ["alpha", "beta and gamma", "alpha and more", "delta"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the answers of transformers' generate to each row."""
    made = tmp_path_factory.mktemp("foreign")
    tokenizer = make_tokenizer(made / "model")
    theirs = make_foreign(made / "model", "gpt_bigcode")
    theirs.set_attn_implementation("eager")
    answers = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text).input_ids])
        asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
        found = theirs.generate(ids, attention_mask=torch.ones_like(ids), **asked)[0]
        answers.append(tokenizer.decode(found[ids.shape[1] :], skip_special_tokens=True))
    (made / "wanted.json").write_text(json.dumps(answers))
    return made


@pytest.fixture(autouse=True)
def described_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe the model in this process, as another one would first import transformers."""
    monkeypatch.setattr(open_checkpoint, "__defaults__", (describe,))


def job(folder: Path, tmp_path: Path, **sections: object) -> Path:
    rows = [{"text": text} for text in TEXTS]
    plain = {"prompt": {"text": "text", "system": None, "user": None}, "sampling": {"max_tokens": 6}}
    return write_job(tmp_path, folder / "model", rows, **{**plain, **sections})


def test_a_job(folder: Path, tmp_path: Path) -> None:
    outcome = run(job(folder, tmp_path), RunOptions(), ("model.dtype", "float32"))
    assert outcome.exit_code == 0
    assert dict(outcome.row["ops"]) == {"decoder": "transformers", "linear": "transformers"}
    table = f"'{tmp_path}/out/res/*.parquet'"
    rows = duckdb.sql(f"SELECT generated_text FROM {table} ORDER BY row_index").fetchall()
    assert [text for (text,) in rows] == json.loads((folder / "wanted.json").read_text())


@pytest.mark.slow
def test_validate_names_the_library(folder: Path, tmp_path: Path) -> None:
    found = "\n".join(validate_job(load_job(job(folder, tmp_path), ())))
    assert "batchinfer has no code of its own for gpt_bigcode: transformers" in found


def test_validate_refuses_models_that_cannot_run(folder: Path, tmp_path: Path) -> None:
    path = job(folder, tmp_path, model={"quantization": "int8"})
    with pytest.raises(JobFileError, match="no layer is quantised"):
        validate_job(load_job(path, ()))
