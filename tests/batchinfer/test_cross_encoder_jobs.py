"""Runs whole jobs with `task: rerank` and cross-encoders, and compares them with transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.core.errors import JobFileError
from tests.batchinfer.killed_runs import REAL, published
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, run, table
from tests.batchinfer.test_rerank_jobs import pairs, ranks_of_the_page
from tests.batchinfer.test_score_jobs import write_job as write_any
from tests.batchinfer.wrong_jobs import FAKE as FAKE_ENGINE
from tests.batchinfer.wrong_jobs import CliOf, Place
from tests.encoder_checkpoints import make_encoder
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


FAMILIES = [
    ("cross-bert", True),
    ("cross-bert", False),
    ("cross-xlm-roberta", True),
    ("cross-modernbert-mean", True),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "tells_types"), FAMILIES)
def test_scores_equal_transformers(tmp_path: Path, family: str, tells_types: bool) -> None:
    """Special tokens, types and heads. A duplicate pair runs once, and a long pair is truncated."""
    model = tmp_path / "model"
    make_cross_encoder(model, family, tells_types)
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
    assert [row["error_code"] for row in found[-3:]] == [
        "document_missing",
        "document_type",
        "prompt_missing",
    ]
    write_job(tmp_path, model, rows[::-1], rerank={"document": "document", "activation": "identity"})
    assert run(path, NO_ENGINE).exit_code == 0, "another activation and another order compute nothing"
    np.testing.assert_allclose(scores(path), [*wanted[:8], wanted[9]][::-1], atol=1e-4)
    assert table(path)[1]["error_code"] == "prompt_too_long"


@pytest.mark.slow
def test_a_changed_head_is_another_model(tmp_path: Path, checkpoint: Path) -> None:
    """Its scores are computed again. Naming the checkpoint's own activation changes nothing."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    path = write_job(tmp_path, model, pairs(3))
    assert run(path, REAL).row["computed_requests"] == 3
    before, stated = published(path), model / "config_sentence_transformers.json"
    stated.write_text(json.dumps({"activation_fn": "torch.nn.modules.linear.Identity"}))
    assert run(path, NO_ENGINE).exit_code == 0
    np.testing.assert_allclose(scores(path), logits(model, pairs(3)), atol=1e-4)
    assert published(path) != before
    make_cross_encoder(model, seed=9)
    assert run(path, REAL).row["computed_requests"] == 3
    np.testing.assert_allclose(scores(path), logits(model, pairs(3)), atol=1e-4)


HEADLESS = "without a classification head, and a cross-encoder has one (…ForSequenceClassification)"
NOT_COMPUTED = "Tanh) is not computed; sigmoid and identity are"
# A change of config.json, the job's sections, and the message
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"architectures": ["BertForTokenClassification"]}, {}, HEADLESS),
    ({"architectures": ["BertForMultipleChoice"]}, {}, "['BertForMultipleChoice'] is not supported"),
    ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, {}, NOT_COMPUTED),
    ({"id2label": {"0": "a", "1": "b"}}, {}, "tensors of a wrong shape: classifier.bias [1] instead of [2]"),
    ({}, {"rerank": None}, "rerank.document: is missing"),
    ({}, {"rerank": {"document": "document", "yes": "good"}}, "rerank.yes: is given together with document"),
    ({}, {"rerank": {"activation": "identity"}}, "rerank.activation: is given without document"),
    ({}, {"rerank": {"document": "doc"}}, "the input has no column 'doc'"),
    ({}, {"prompt": {"token_ids": "query"}}, "prompt.token_ids: is given together with rerank.document"),
    ({}, {"prompt": {"user": "{{ query }}"}}, "use prompt.text, or prompt.user with chat: false"),
]


@pytest.mark.parametrize(("config", "sections", "message"), WRONG)
def test_wrong_jobs_are_reported(
    tmp_path: Path,
    checkpoint: Path,
    cli_of: CliOf,
    config: dict[str, Any],
    sections: dict[str, Any],
    message: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    stated = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(stated | config))
    path = write_job(tmp_path, model, pairs(2), **sections)
    told = cli_of(FAKE_ENGINE)("validate", path)
    assert (told.code, message in told.err) == (78, True), told.err


def test_models_that_are_no_cross_encoders_are_refused(tmp_path: Path, place: Place) -> None:
    """Three labels, a class name without its head, a GPU, and a decoder."""
    model = tmp_path / "model"
    make_cross_encoder(model, num_labels=3)
    path = write_job(tmp_path, model, pairs(2))
    with pytest.raises(JobFileError, match="whose head has 3 labels, and a reranker has one"):
        run(path, REAL)
    make_encoder(model, "bert")
    stated = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(stated | {"architectures": ["BertForSequenceClassification"]})
    )
    with pytest.raises(JobFileError, match="without a classification head"):
        run(path, REAL)
    make_cross_encoder(model)
    path = write_job(tmp_path, place.shared_model, pairs(2))
    with pytest.raises(
        JobFileError, match=r"rerank\.document: is for cross-encoders, and the checkpoint is a decoder"
    ):
        run(path, REAL)


def test_the_job_of_the_page_runs(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/bge-reranker-base").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    ranked = ranks_of_the_page(tmp_path, "Cross-encoders")
    wanted = sigmoid(pair_logits(checkpoint, [(query, document) for query, document, *_ in ranked]))
    np.testing.assert_allclose([row[2] for row in ranked], wanted, atol=6e-4)


def test_every_verb_knows_scores_of_pairs(tmp_path: Path, checkpoint: Path, cli_of: CliOf) -> None:
    path = write_job(tmp_path, checkpoint, pairs(4), rerank={"document": "document"})
    verbs = cli_of(FAKE_ENGINE)
    previewed = verbs("preview", path, "--rows", "1")
    assert "<|bos|>query 0<|im_end|>It is number 0<|im_end|>" in previewed.out
    assert "how relevant a document is" in previewed.err + previewed.out
    assert verbs("plan", path).code == 0
    assert verbs("run", path).code == 0
    assert all(0 <= row["score"] <= 1 for row in table(path))
    assert verbs("report", tmp_path / "out/res").code == 0
    checked = verbs("verify", tmp_path / "out/res")
    assert checked.code == 0, checked.err + checked.out
