"""Whole jobs with `task: rerank` and cross-encoders, against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.core.errors import BatchInferError, JobFileError
from batchinfer.job import load_job
from batchinfer.machine.hardware import Hardware
from batchinfer.models.opening import open_checkpoint
from batchinfer.plan.setup.resolve import resolve
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, run, table
from tests.batchinfer.test_rerank_jobs import pairs
from tests.batchinfer.test_score_jobs import REAL, published
from tests.batchinfer.test_score_jobs import write_job as write_any
from tests.sentence_checkpoints import make_cross_encoder, pair_logits

TASK: dict[str, Any] = {"prompt": {"text": "query"}, "rerank": {"document": "document"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross") / "model"
    make_cross_encoder(folder)
    return folder


def write_job(folder: Path, checkpoint: Path, rows: list[Any], **sections: Any) -> Path:
    return write_any(folder, checkpoint, rows, "rerank", **{**TASK, **sections})


def logits(checkpoint: Path, rows: list[dict[str, Any]]) -> list[float]:
    return pair_logits(checkpoint, [(row["query"], row["document"]) for row in rows])


def sigmoid(values: list[float]) -> list[float]:
    found: list[float] = (1 / (1 + np.exp(-np.array(values)))).tolist()
    return found


def scores(path: Path) -> list[float]:
    return [row["score"] for row in table(path) if row["status"] == "ok"]


FAMILIES = ["cross-bert", "cross-xlm-roberta", "cross-distilbert", "cross-modernbert-mean"]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Special tokens, types and heads; a pair that is there twice runs once, and one that is too long is cut."""
    model = tmp_path / "model"
    make_cross_encoder(model, family)
    long = {"query": "why " * 20, "document": "because " * 30}
    rows = [*pairs(7), pairs(1)[0], long, {"query": "", "document": "nothing"}]
    bad = [{"query": "q", "document": None}, {"query": "q", "document": 3}, {"query": None, "document": "d"}]
    path = write_job(tmp_path, model, [*rows, *bad], prompt={"text": "query", "truncate": "right"})
    outcome = run(path, REAL)
    assert (outcome.exit_code, outcome.row["computed_requests"], outcome.row["duplicate_rows"]) == (0, 9, 1)
    wanted = logits(model, rows)
    assert np.ptp(wanted) > 0.05
    np.testing.assert_allclose(scores(path), sigmoid(wanted), atol=3e-5)
    found = table(path)
    assert found[8]["prompt_tokens"] == 128
    assert [row["error_code"] for row in found[-3:]] == ["document_missing", "document_type", "prompt_missing"]
    write_job(tmp_path, model, rows[::-1], rerank={"document": "document", "activation": "identity"})
    assert run(path, NO_ENGINE).exit_code == 0, "another activation and another order compute nothing"
    np.testing.assert_allclose(scores(path), [*wanted[:8], wanted[9]][::-1], atol=1e-4)
    assert table(path)[1]["error_code"] == "prompt_too_long"
