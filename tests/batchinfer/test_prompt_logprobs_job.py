"""Runs whole jobs with log-probabilities of prompts, and compares them with transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.verbs.query import open_answer
from tests.batchinfer.killed_runs import DETERMINISTIC, REAL, killed_and_whole
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, people, run, table, write_job
from tests.batchinfer.test_to_openai import chat, completion
from tests.checkpoints import make_model_folder

PAGE = Path(__file__).parents[2] / "docs/output.md"
SAMPLING = {"max_tokens": 4, "temperature": 0.8, "ignore_eos": True}
PROMPT = {"system": None, "user": None, "text": "text"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts") / "model"
    make_model_folder(folder, "qwen3", seed=3)
    return folder


def rows_of(count: int) -> list[dict[str, Any]]:
    """Return rows, two per prompt, some of them without prompt log-probabilities."""
    text = "A question that all share, and number"
    return [
        {"id": f"r{n}", "text": f"{text} {n // 2}", "asked": (None, 0, 3)[n // 2 % 3]} for n in range(count)
    ]


def check(rows: list[dict[str, Any]], found: list[dict[str, Any]], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, got in zip(rows, found, strict=True):
        entries = got["prompt_logprobs"]
        if row["asked"] is None:
            assert entries is None
            continue
        ids = tokenizer(row["text"])["input_ids"]
        with torch.inference_mode():
            wanted = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        assert [one["token_id"] for one in entries] == ids
        assert len(ids) == got["prompt_tokens"]
        assert "".join(one["token"] for one in entries) == row["text"]
        assert (entries[0]["logprob"], entries[0]["top"]) == (None, [])
        chosen = wanted[range(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose([one["logprob"] for one in entries[1:]], chosen, atol=1e-4)
        top = [[one["logprob"] for one in entry["top"]] for entry in entries[1:]]
        np.testing.assert_allclose(top, wanted.topk(row["asked"]).values, atol=1e-4)


def test_rows_with_logprobs_fill_a_column_of_the_result(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicates are computed once, and a run with equal rows computes nothing."""
    rows, sampling = rows_of(12), SAMPLING | {"from_columns": {"prompt_logprobs": "asked"}}
    sections: dict[str, Any] = {"sampling": sampling, "prompt": PROMPT, "output": {"path": "results/tickets"}}
    path = write_job(tmp_path, checkpoint, rows, **sections)
    planned = forecast_job(load_job(path), lambda _: None, lambda _: None)
    assert planned.forecast is not None
    assert planned.forecast.run.output_tokens == planned.plan.expected_tokens
    outcome = run(path, REAL)
    assert outcome.exit_code == 0
    with open_answer(
        tmp_path / "results/tickets", "SELECT sum(flops) FROM requests", partial=False
    ) as requests:
        assert requests.fetchall() == [(outcome.row["flops"],)]

    def result() -> list[dict[str, Any]]:
        query = f"FROM '{tmp_path}/results/tickets/*.parquet' ORDER BY row_id"
        found: list[dict[str, Any]] = duckdb.sql(query).to_arrow_table().to_pylist()
        return found

    first = result()
    check(rows, first, checkpoint)
    write_job(tmp_path, checkpoint, rows[::-1], **sections)
    assert run(path, NO_ENGINE).exit_code == 0
    assert [row["prompt_logprobs"] for row in result()][::-1] == [row["prompt_logprobs"] for row in first]
    monkeypatch.chdir(tmp_path)
    (query,) = [one for one in fenced() if "prompt_logprobs" in one]
    found = duckdb.sql(query).fetchall()
    assert [one for _, one in found] == sorted((one for _, one in found), reverse=True)


def fenced() -> list[str]:
    return re.findall(r"```sql\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run has two engines; the other has an engine with chunked prompts and little memory, which dies."""
    jobs = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        sampling = SAMPLING | {"from_columns": {"prompt_logprobs": "asked"}, "logprobs": 1}
        rows = [row | {"text": row["text"] + f" or {n}"} for n, row in enumerate(rows_of(30))]
        sections: dict[str, Any] = {"sampling": sampling, "prompt": PROMPT, "engine": DETERMINISTIC}
        jobs.append(write_job(tmp_path / name, checkpoint, rows, **sections))
    small = (("engine.max_num_batched_tokens", "24"), ("engine.max_num_seqs", "5"))
    killed_and_whole(*jobs, monkeypatch, *small)
    found = table(jobs[1])
    assert [row["prompt_logprobs"] is None for row in found] == [n // 2 % 3 == 0 for n in range(30)]


@pytest.mark.slow
def test_several_answers_and_forced_ones_have_prompt_logprobs(tmp_path: Path, checkpoint: Path) -> None:
    """An answer without a choice still runs its prompt."""
    rows, asked = rows_of(2), {"prompt_logprobs": 1}
    several = SAMPLING | {"n": 2} | asked
    path = write_job(tmp_path, checkpoint, rows, sampling=several, prompt=PROMPT)
    assert run(path, REAL).exit_code == 0
    found = table(path)
    assert [row["sample_index"] for row in found] == [0, 1, 0, 1]
    check([rows[0] | {"asked": 1}] * 4, found, checkpoint)
    forced = {"max_tokens": 20, "choice": ["only this"]} | asked
    path = write_job(tmp_path, checkpoint, rows, sampling=forced, prompt=PROMPT)
    assert run(path, REAL).exit_code == 0
    assert [row["generated_text"] for row in table(path)] == ["only this"] * 2
    check([rows[0] | {"asked": 1}] * 2, table(path), checkpoint)


def test_openai_requests_get_vllms_shape(tmp_path: Path, checkpoint: Path) -> None:
    rows = [
        chat("a", prompt_logprobs=2, max_tokens=3),
        chat("b", max_tokens=3),
        completion("hello there", prompt_logprobs=0, max_tokens=3),
        completion("hello there", echo=True, logprobs=1, max_tokens=3),
        completion("hello there", prompt_logprobs=21, max_tokens=3),
    ]
    path = write_job(tmp_path, checkpoint, rows, prompt=None, sampling=None, on_error={"max_error_rate": 0.5})
    out = tmp_path / "out.jsonl"
    assert run(path, replace(REAL, to_openai=out)).exit_code == 0
    one, none, text, echoed = (
        json.loads(line)["response"]["body"] for line in out.read_text().splitlines()[:4]
    )
    assert "prompt_logprobs" not in none
    column = table(path)[0]["prompt_logprobs"]
    assert one["prompt_logprobs"][0] is None
    for entry, token in zip(one["prompt_logprobs"][1:], column[1:], strict=True):
        own = entry[str(token["token_id"])]
        assert (own["logprob"], own["decoded_token"]) == (token["logprob"], token["token"])
        ranks = {number: found["rank"] for number, found in entry.items()}
        assert [ranks[str(likely["token_id"])] for likely in token["top"]] == [1, 2]
    assert len(text["choices"][0]["prompt_logprobs"]) == text["usage"]["prompt_tokens"]
    *_, row, wrong = table(path)
    assert wrong["error_code"] == "bad_parameter"
    # An echoed prompt has log-probabilities like its answer
    (choice,) = echoed["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    found, every = choice["logprobs"], [*row["prompt_logprobs"], *row["logprobs"]]
    assert found["token_logprobs"] == [token["logprob"] for token in every]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert "".join(found["tokens"]) == choice["text"] == "hello there" + row["generated_text"]
    assert {len(values) for values in found.values()} == {len(every)}


def test_a_column_of_that_name_is_taken_only_then(tmp_path: Path, checkpoint: Path) -> None:
    rows = [row | {"prompt_logprobs": 2} for row in people(3)]
    output = {"path": "out/res", "columns": ["prompt_logprobs"]}
    path = write_job(tmp_path, checkpoint, rows, output=output)
    load_job(path, [])
    for asking in (("sampling.prompt_logprobs", "1"), ("sampling.from_columns", "[prompt_logprobs]")):
        with pytest.raises(
            JobFileError, match="a column that a result with log-probabilities of prompts has"
        ):
            load_job(path, [asking])
