"""Runs whole jobs with `task: rerank`, and compares them with transformers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import pytest

from tests.batchinfer.killed_runs import DETERMINISTIC, REAL, published
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, run, table
from tests.batchinfer.test_score_jobs import Reference, checkpoint, reference, write_job
from tests.batchinfer.wrong_jobs import FAKE as FAKE_ENGINE
from tests.batchinfer.wrong_jobs import Place, command

__all__ = ["checkpoint", "reference"]  # fixtures
PAGE = (Path(__file__).parents[2] / "docs/rerank.md").read_text("utf-8")
PROMPT = {"user": "{{ query }} Is it said here: {{ document }}?", "chat": False}


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"p{n}", "query": f"query {n % 3}", "document": f"It is{' not' * n} number {n}"}
        for n in range(count)
    ]


def prompt_of(row: dict[str, Any]) -> str:
    return f"{row['query']} Is it said here: {row['document']}?"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("yes", "no"), [("yes", "no"), ("!", "?")])
def test_scores_equal_transformers(
    tmp_path: Path, checkpoint: Path, reference: Reference, yes: str, no: str
) -> None:
    """In any batch and any order. A duplicate pair runs once."""
    rows = [*pairs(9), pairs(1)[0] | {"id": "again"}, {"id": "bad", "query": None}]
    said = None if (yes, no) == ("yes", "no") else {"yes": yes, "no": no}
    path = write_job(tmp_path, checkpoint, rows, "rerank", prompt=PROMPT, rerank=said)
    outcome = run(path, REAL)
    assert (outcome.exit_code, outcome.row["computed_requests"], outcome.row["duplicate_rows"]) == (0, 9, 1)
    found = table(path)
    for row, got in zip(rows[:-1], found, strict=False):
        each = [sum(reference.logprobs(prompt_of(row), text)[0]) for text in (yes, no)]
        assert got["score"] == pytest.approx(1 / (1 + math.exp(each[1] - each[0])), rel=3e-4, abs=0)
        assert got["prompt_tokens"] == len(reference.encode(prompt_of(row)))
    assert len({got["score"] for got in found[:9]}) == 9
    assert outcome.row["score_p50"] == pytest.approx(median(got["score"] for got in found[:-1]))
    assert (found[-1]["status"], found[-1]["score"], found[-1]["prompt_tokens"]) == ("error", None, None)
    write_job(tmp_path, checkpoint, rows[::-1], "rerank", prompt=PROMPT, rerank=said)
    assert run(path, NO_ENGINE).exit_code == 0, "the second night computes nothing"
    assert [got["score"] for got in table(path)][::-1] == [got["score"] for got in found]


@pytest.mark.slow
def test_steps_and_engines_change_no_byte(tmp_path: Path, checkpoint: Path) -> None:
    jobs = []
    for name, (key, value) in {
        "one": ("max_num_batched_tokens", 24),
        "two": ("data_parallel", 2),
    }.items():
        (tmp_path / name).mkdir()
        engine = {**DETERMINISTIC, key: value}
        jobs.append(write_job(tmp_path / name, checkpoint, pairs(8), "rerank", prompt=PROMPT, engine=engine))
    assert [run(path, REAL).exit_code for path in jobs] == [0, 0]
    assert published(jobs[0]) == published(jobs[1])


def test_a_pair_that_is_too_long_is_reported(tmp_path: Path, checkpoint: Path) -> None:
    """The message has advice that the job can follow. The last token of an answer takes no position."""
    fits = {"query": "", "document": "a" * 8}
    rows, room = [fits, fits | {"document": "b" * 9}], {"text": "document"}
    model = {"path": str(checkpoint), "max_model_len": 8}
    said = {"yes": "!", "no": "?"}
    path = write_job(tmp_path, checkpoint, rows, "rerank", prompt=room, rerank=said, model=model)
    assert run(path).exit_code == 0
    fit, long = table(path)
    assert (fit["status"], fit["prompt_tokens"], long["error_code"]) == ("ok", 8, "prompt_too_long")
    assert "shorten it, or raise model.max_model_len" in long["error_message"]


def fenced(language: str, section: str = "") -> str:
    """Return the only fenced block of a language in a section of the page, or before all sections."""
    text = PAGE.partition(f"\n## {section}\n")[2] if section else PAGE
    (found,) = re.findall(rf"```{language}\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    return str(found)


def ranks_of_the_page(folder: Path, section: str) -> list[Any]:
    """Run the job of a section of the page; return the ranks by the page's query."""
    (folder / "job.yaml").write_text(fenced("yaml", section))
    (folder / "pairs.jsonl").write_text(fenced("json"))
    assert run(folder / "job.yaml", REAL).exit_code == 0
    ranked = duckdb.sql(fenced("sql")).fetchall()
    assert [(row[0], row[3]) for row in ranked] == [
        (query, place) for query in ("How is stock made?", "What causes tides?") for place in (1, 2)
    ]
    assert all(one[2] >= two[2] for one, two in zip(ranked[::2], ranked[1::2], strict=True))
    return ranked


def test_the_job_of_the_page_runs(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/qwen3-reranker-0.6b").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    ranked = ranks_of_the_page(tmp_path, "Decoders that answer with a word")
    assert all(0 < row[2] < 1 for row in ranked)


@pytest.mark.slow
def test_every_verb_knows_scores_of_relevance(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs = command(capsys, monkeypatch, FAKE_ENGINE)
    clash = place.job("task: rerank", sampling="", output="output: {path: out/res, columns: [score]}")
    assert "that a result of task: rerank has" in verbs("run", clash).err
    job = place.job("task: rerank", sampling="")
    previewed = verbs("preview", job, "--rows", "1")
    assert "how relevant a document is" in previewed.err + previewed.out
    assert verbs("plan", job).code == 0
    assert verbs("run", job).code == 0
    assert all(0 <= row["score"] <= 1 for row in place.table())
    assert verbs("report", place.results).code == 0
    checked = verbs("verify", place.results)
    assert checked.code == 0, checked.err + checked.out
