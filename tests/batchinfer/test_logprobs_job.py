"""Runs whole jobs with log-probabilities, from the job file to the typed column and OpenAI's files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchinfer.core.errors import JobFileError
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, run, table, write_job
from tests.batchinfer.test_to_openai import chat, completion
from tests.checkpoints import make_model_folder

REAL = RunOptions()
PAGE = Path(__file__).parents[2] / "docs/output.md"


def test_rows_with_logprobs_fill_a_column_of_the_result(tmp_path: Path, model: Path) -> None:
    rows = [row | {"lp": (None, 0, 2)[i % 3]} for i, row in enumerate(people(30))]
    path = write_job(tmp_path, model, rows, sampling={"max_tokens": 4, "from_columns": {"logprobs": "lp"}})
    assert run(path).exit_code == 0
    for row, given in zip(table(path), rows, strict=True):
        found = row["logprobs"]
        if given["lp"] is None:
            assert found is None
            continue
        assert len(found) == row["completion_tokens"] == 4
        for token in found:  # as the fake engine has it
            assert token["logprob"] == -token["token_id"] / 64
            likely = [(token["token_id"] + n) % 256 for n in range(given["lp"])]
            assert [(one["token_id"], one["logprob"]) for one in token["top"]] == [
                (t, -t / 64) for t in likely
            ]


def test_a_tiny_model_and_the_pages_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column equals the log-softmax of transformers' logits."""
    model = tmp_path / "model"
    make_model_folder(model, seed=3)
    path = write_job(
        tmp_path,
        model,
        people(9),
        model={"path": str(model), "dtype": "float32"},
        sampling={"max_tokens": 6, "temperature": 0.8, "ignore_eos": True, "logprobs": 5},
        prompt={"system": None, "user": None, "text": "text"},
        output={"path": "results/tickets"},
    )
    assert run(path, REAL).exit_code == 0
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = Tokenizer.load(model)
    rows = duckdb.sql(f"FROM '{tmp_path}/results/tickets/*.parquet' ORDER BY row_id").to_arrow_table()
    for row, given in zip(rows.to_pylist(), people(9), strict=True):
        prompt = tokenizer.rust.encode(given["text"], add_special_tokens=True).ids
        assert len(prompt) == row["prompt_tokens"]
        answer = [token["token_id"] for token in row["logprobs"]]
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)
        chosen = wanted[torch.arange(6), torch.tensor(answer)].numpy()
        np.testing.assert_allclose([token["logprob"] for token in row["logprobs"]], chosen, atol=1e-4)
        top = [[one["logprob"] for one in token["top"]] for token in row["logprobs"]]
        np.testing.assert_allclose(top, wanted.topk(5).values.numpy(), atol=1e-4)
    monkeypatch.chdir(tmp_path)
    unsure, first = (duckdb.sql(query).fetchall() for query in queries())
    assert len(unsure) == 9
    assert [row[2] for row in unsure] == sorted(row[2] for row in unsure)
    assert len(first) == 9 * 5
    assert all(0 < probability < 1 for _, _, probability in first)


def queries() -> list[str]:
    found = re.findall(r"```sql\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [query for query in found if "logprob" in query and "prompt_logprobs" not in query]


def test_openai_requests_get_openais_shape(tmp_path: Path, model: Path) -> None:
    rows = [
        chat("a", logprobs=True, top_logprobs=2, max_tokens=3),
        chat("b", max_tokens=3),
        completion("hello there", logprobs=1, max_tokens=3),
        completion("hello there", max_tokens=3),
        chat("c", logprobs=True, max_tokens=3),
    ]
    path = write_job(tmp_path, model, rows, prompt=None, sampling=None)
    out = tmp_path / "out.jsonl"
    run(path, replace(FAKE, to_openai=out))
    one, none, text, silent, alone = (
        json.loads(line)["response"]["body"]["choices"][0]["logprobs"]
        for line in out.read_text().splitlines()
    )
    assert none is silent is None
    assert one.keys() == {"content", "refusal"}
    shown = [token for token in table(path)[0]["logprobs"] if not token["token"].startswith("<|")]
    assert [entry["token"] for entry in one["content"]] == [token["token"] for token in shown]
    for entry in one["content"]:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert all(likely.keys() == {"token", "logprob", "bytes"} for likely in entry["top_logprobs"])
    assert all(entry["top_logprobs"] == [] for entry in alone["content"])
    assert text.keys() == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert len({len(values) for values in text.values()}) == 1
    assert text["text_offset"][0] == 0
    answers = [row["generated_text"] for row in table(path)]
    assert "".join(text["tokens"]) == answers[2]
    said = b"".join(bytes(entry["bytes"]) for entry in one["content"])
    assert said.decode("utf-8", "replace") == answers[0]
    assert all(math.isfinite(value) for value in text["token_logprobs"])


def test_a_column_of_that_name_is_taken_only_then(tmp_path: Path, model: Path) -> None:
    rows = [row | {"logprobs": 2} for row in people(3)]
    path = write_job(tmp_path, model, rows, output={"path": "out/res", "columns": ["logprobs"]})
    run(path)
    assert [row["logprobs"] for row in table(path)] == [2, 2, 2]
    for asking in (("sampling.logprobs", "1"), ("sampling.from_columns", "[logprobs]")):
        with pytest.raises(JobFileError, match="a column that a result with log-probabilities has"):
            load_job(path, [asking])


@pytest.mark.parametrize("value", ["21", "-1", "true", "1.5", '"5"'])
def test_a_wrong_number_is_a_mistake(tmp_path: Path, model: Path, value: str) -> None:
    path = write_job(tmp_path, model, people(1))
    with pytest.raises(JobFileError, match=r"sampling\.logprobs: .*whole number from 0 to 20"):
        load_job(path, [("sampling.logprobs", value)])
