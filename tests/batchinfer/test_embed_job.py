"""Runs whole jobs with `task: embed`, and compares them with transformers."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.batchinfer.killed_runs import REAL
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, run, table
from tests.batchinfer.pipeline.test_pipeline import write_job as write_any
from tests.batchinfer.wrong_jobs import FAKE as FAKE_ENGINE
from tests.batchinfer.wrong_jobs import CliOf, Place
from tests.sentence_checkpoints import make_sentence_model, reference

TEXTS = [f"the {'long ' * (n % 7)}text of number {n}" for n in range(30)]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences") / "model"
    make_sentence_model(folder)
    return folder


def write_job(folder: Path, checkpoint: Path, texts: list[Any] | None, **sections: Any) -> Path:
    rows = None if texts is None else [{"id": f"r{n}", "text": text} for n, text in enumerate(texts)]
    usual = {
        "task": "embed",
        "sampling": None,
        "engine": {"device": "cpu"},
        "on_error": {"max_error_rate": 0.2},
    }
    prompt = sections.pop("prompt", {"text": "text"})
    path = write_any(folder, checkpoint, rows, **{**usual, "prompt": None, **sections})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompt": prompt}))
    return path


def embeddings(path: Path) -> np.ndarray[Any, Any]:
    return np.array([row["embedding"] for row in table(path) if row["status"] == "ok"])


def test_vectors_equal_transformers(tmp_path: Path, sentences: Path) -> None:
    texts: list[Any] = [*TEXTS, TEXTS[3], None]
    path = write_job(tmp_path, sentences, texts, embed={"prompt": "query"})
    outcome = run(path, REAL)
    assert outcome.exit_code == 0
    rows = table(path)
    wanted = reference(sentences, [f"find: {text}" for text in texts[:-1]])
    np.testing.assert_allclose(embeddings(path), wanted.numpy(), atol=1e-4)
    assert (rows[-1]["status"], rows[-1]["error_code"], rows[-1]["embedding"]) == (
        "error",
        "prompt_missing",
        None,
    )
    assert rows[0]["prompt_tokens"] == len(f"find: {TEXTS[0]}") + 1, "and what ends a text"
    assert (outcome.row["computed_requests"], outcome.row["duplicate_rows"]) == (30, 1)
    (file,) = (tmp_path / "out/res").glob("*.parquet")
    assert pq.read_schema(file).field("embedding").type == pa.list_(pa.float32(), 48)
    vectors = f"SELECT row_id, embedding::FLOAT[48] AS v FROM '{file}'"
    query = f"SELECT a.row_id FROM ({vectors}) a, ({vectors}) b WHERE b.row_id = 3"
    alike = duckdb.sql(f"{query} AND array_cosine_similarity(a.v, b.v) > 0.99999 ORDER BY 1")
    assert alike.fetchall() == [(3,), (30,)]


@pytest.mark.slow
def test_columns_made_from_vectors_compute_nothing(tmp_path: Path, sentences: Path) -> None:
    path = write_job(tmp_path, sentences, TEXTS, embed={"normalize": False})
    run(path, REAL)
    whole = embeddings(path)
    write_job(tmp_path, sentences, TEXTS[5:] + TEXTS[:2], embed={"dimensions": 16})
    assert run(path, NO_ENGINE).exit_code == 0
    short = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(embeddings(path), np.concatenate([short[5:], short[:2]]), atol=1e-6)
    write_job(tmp_path, sentences, TEXTS, embed={"normalize": False})
    assert run(path, NO_ENGINE).exit_code == 0
    np.testing.assert_array_equal(embeddings(path), whole)


@pytest.mark.slow
def test_every_verb_knows_vectors(place: Place, cli_of: CliOf) -> None:

    def write(words: int) -> None:
        texts = (f"word {n * words // 12}" for n in range(12))
        place.rows(*({"id": f"r{n}", "text": text, "generated_text": "kept"} for n, text in enumerate(texts)))

    write(6)
    carried = "output: {path: out/res, columns: [generated_text]}"
    job = place.job("task: embed", prompt="prompt: {text: text}", sampling="", output=carried)
    verbs = cli_of(FAKE_ENGINE)
    previewed = verbs("preview", job, "--rows", "1")
    assert "word 0" in previewed.out
    assert "vector" in previewed.err + previewed.out
    assert "made of the prompts alone, without a token of output" in verbs("plan", job).out
    planned = verbs("plan", job, "--json")
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["most_output_tokens"] == 0
    assert verbs("run", job).code == 0
    rows = place.table()
    assert [row["generated_text"] for row in rows] == ["kept"] * 12
    assert all(np.linalg.norm(row["embedding"]) == pytest.approx(1) for row in rows)
    assert rows[0]["embedding"] == rows[1]["embedding"] != rows[2]["embedding"]
    queried = verbs("query", place.results, "SELECT len(embedding) AS n FROM results LIMIT 1", "--json")
    assert json.loads(queried.out) == {"n": 48}
    for verb, of in (
        ("verify", place.results), ("report", place.results), ("status", job), ("history", place.results),
    ):  # fmt: skip
        done = verbs(verb, of)
        assert done.code == 0, (verb, done.out, done.err)
    before = place.folder / "before"
    shutil.copytree(place.results, before)
    write(3)
    assert verbs("run", job).code == 0
    differs = verbs("diff", before, place.results)
    assert "answers changed: 10 rows" in differs.out
    wrong = place.job(
        "task: embed", prompt="prompt: {text: text, reasoning: none}", sampling="sampling: {max_tokens: 3}"
    )
    refused = verbs("validate", wrong)
    assert refused.code == 78
    assert "sampling: says how tokens are chosen" in refused.err
    assert "prompt.reasoning: says how texts mark reasoning" in refused.err
    alone = verbs("validate", place.job("embed: {dimensions: 3}"))
    assert (alone.code, "embed: is given, but the job does not have task: embed" in alone.err) == (78, True)


def fenced(language: str, which: int = 0) -> str:
    page = (Path(__file__).parents[2] / "docs/tasks.md").read_text("utf-8")
    return str(re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[which])


def test_the_job_of_the_page_runs_and_its_query_is_answered(
    tmp_path: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/qwen3-embedding-0.6b").symlink_to(sentences)
    (tmp_path / "job.yaml").write_text(fenced("yaml"))
    (tmp_path / "articles.jsonl").write_text(fenced("json"))
    assert run(tmp_path / "job.yaml", FAKE).exit_code == 0
    monkeypatch.chdir(tmp_path)
    found = duckdb.sql(fenced("sql")).fetchall()
    assert len(found) == 3
    assert all(-1.001 <= similarity <= 1.001 for *_, similarity in found)


@pytest.mark.slow
def test_long_texts_keep_their_end_token(tmp_path: Path, sentences: Path) -> None:
    """A text with the maximum number of tokens is not truncated. A truncated text keeps the token that ends a text."""
    texts = ["a" * 19, "a" * 20 + "b" * 20]
    prompt = {"text": "text", "truncate": "right"}
    model = {"path": str(sentences), "max_model_len": 20}
    path = write_job(tmp_path, sentences, texts, prompt=prompt, model=model)
    run(path, FAKE)
    whole, truncated = table(path)
    assert whole["prompt_tokens"] == truncated["prompt_tokens"] == 20
    assert whole["embedding"] == truncated["embedding"]
    run(write_job(tmp_path, sentences, texts, model=model, on_error={"max_error_rate": 1.0}), FAKE)
    assert [row["error_code"] for row in table(path)] == [None, "prompt_too_long"]


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_openai_lines_for_embeddings(tmp_path: Path, sentences: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"input": "a text", "model": "m", "encoding_format": "float", "user": "u"},
        {"input": ["a text"], "encoding_format": "base64", "dimensions": 16},
        {"input": [1, 2, 3]},
        {"input": ["a text", "two"]},
        {"input": "a text", "dimensions": 49},
        {"input": "a text", "encoding_format": "int8"},
        {"input": "a text", "temperature": 0},
        {"model": "m"},
    ]
    url = "/v1/embeddings"
    rows = [
        {"custom_id": f"c{at}", "method": "POST", "url": url, "body": one} for at, one in enumerate(bodies)
    ]
    rows.append({"custom_id": "c8", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}})
    shared = {
        "embed": {"dimensions": 16},
        "on_error": {"max_error_rate": 1.0},
        "sampling": None,
        "prompt": None,
    }
    path = write_any(tmp_path, sentences, rows, task="embed", **shared)
    out = tmp_path / "out.jsonl"
    assert run(path, replace(FAKE, to_openai=out)).exit_code == 0
    plain, coded, ids, several, *failed = lines_of(out)
    numbers, second = (table(path)[at]["embedding"] for at in (0, 4))
    listed = several["response"]["body"]["data"]
    assert [(one["index"], one["embedding"]) for one in listed] == [(0, numbers), (1, second)]
    assert plain["response"]["body"] == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": numbers}],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
        "model": "m",
    }
    body = coded["response"]["body"]
    assert np.frombuffer(b64decode(body["data"][0]["embedding"]), "<f4").tolist() == numbers
    assert body["model"] == "model"
    assert ids["response"]["body"]["usage"]["prompt_tokens"] == 3
    said = [line["error"]["message"] for line in failed]
    words = ("from 1 to 48", "float or base64", "body.temperature", "input is null")
    assert all(
        word in text for word, text in zip((*words, "url must be /v1/embeddings"), said, strict=True)
    ), said
