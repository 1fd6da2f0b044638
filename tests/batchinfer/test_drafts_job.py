"""Whole jobs with drafts and without: the same rows, fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import BatchInferError, JobFileError
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job

REAL = RunOptions(waves_from_s=float("inf"))
FLOAT32 = ("model.dtype", "float32")
SOURCES: tuple[Any, ...] = (["prompt"], ["answers"], "auto")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["order", "question"]}, "note": {"type": "string", "maxLength": 20}},
    "required": ["kind", "note"],
}
JOBS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": {"max_tokens": 40}},
    "sampled": {"sampling": {"max_tokens": 40, "temperature": 0.4, "top_p": 0.9, "seed": 3}},
    "penalised": {"sampling": {"max_tokens": 40, "repetition_penalty": 1.05, "min_tokens": 30}},
    "logprobs": {"sampling": {"max_tokens": 30, "logprobs": 2, "stop": ["ee"]}},
    "schema": {
        "sampling": {"max_tokens": 60},
        "output": {"schema": SCHEMA},
        "on_error": {"max_error_rate": 1},
    },
    "deterministic": {"sampling": {"max_tokens": 40}, "engine": {"deterministic": True}},
    "replicas": {"sampling": {"max_tokens": 40}, "engine": {"data_parallel": 2, "threads": 2}},
}


def rows(count: int = 24) -> list[dict[str, Any]]:
    return [{"text": f"row {at % 7} has some words, and row {at % 5} has some words"} for at in range(count)]


def job(folder: Path, model: Path, drafts: Any, **sections: Any) -> Path:
    folder.mkdir()
    plain = {"prompt": {"text": "text", "system": None, "user": None}}
    output = {"path": "out/res", **sections.pop("output", {})}
    engine = {"max_num_seqs": 4, **sections.pop("engine", {})}
    return write_job(
        folder, model, rows(), output=output, engine=engine, drafts=drafts, **{**plain, **sections}
    )


@pytest.mark.parametrize("kind", JOBS)
def test_rows_are_those_of_a_job_without_drafts(tmp_path: Path, model: Path, kind: str) -> None:
    """Answers of a small random model soon repeat themselves and each other, so that drafts are right."""
    sections, float32 = JOBS[kind], () if kind == "deterministic" else (FLOAT32,)
    plain = job(tmp_path / "off", model, "off", **sections)
    wanted = run(plain, REAL, *float32)
    assert wanted.exit_code == 0, kind
    assert (wanted.row["drafted_tokens"], wanted.row["drafts_saved_s"]) == (0, 0)
    for number, drafts in enumerate(SOURCES if kind == "greedy" else ("auto",)):
        path = job(tmp_path / str(number), model, drafts, **sections)
        got = run(path, REAL, *float32)
        assert got.exit_code == 0
        assert table(path) == table(plain), drafts
        row = got.row
        names = ("prompt", "answers") if drafts == "auto" else drafts
        other = {"prompt", "answers"} - {*names}
        assert sum(row[f"{name}_drafted"] for name in names) == row["drafted_tokens"]
        assert sum(row[f"{name}_drafted"] for name in other) == 0
        assert row["accepted_tokens"] <= row["drafted_tokens"]
        assert row["sampled_tokens"] == wanted.row["sampled_tokens"]
        if kind != "replicas":  # which divide the rows as they get to it
            assert row["steps"] <= wanted.row["steps"]
        if kind == "greedy":
            assert row["drafted_tokens"] > 0


def test_a_resumed_job_takes_the_answers_that_drafts_made(tmp_path: Path, model: Path) -> None:
    path = job(tmp_path / "job", model, "auto", sampling={"max_tokens": 20})
    assert run(path, REAL, FLOAT32).row["drafted_tokens"] > 0
    again = run(path, REAL, FLOAT32, ("drafts", "off"))
    assert not again.row["steps"], "no answer is computed again because drafts are off now"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"drafts": "some"}, "auto, off, or a list"),
        ({"drafts": ["prompt", "oracle"]}, "auto, off, or a list"),
        ({"drafts": []}, "auto, off, or a list"),
        ({"drafts": ["prompt", "prompt"]}, "names a source twice"),
        ({"drafts": ["prompt"], "task": "embed"}, "no answers are generated"),
    ],
)
def test_what_drafts_may_be(tmp_path: Path, model: Path, sections: dict[str, Any], message: str) -> None:
    path = write_job(tmp_path, model, rows(2), **sections)
    with pytest.raises((BatchInferError, JobFileError), match=message):
        load_job(path)
