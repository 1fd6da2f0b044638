"""Runs a whole job with looping answers: rows with the option end at the loop, and results mark them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.engine.test_loops import looped
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, people, run, table, write_job
from tests.batchinfer.test_to_openai import batch, bodies, chat, to
from tests.checkpoints import make_model_folder
from tests.examples import examples

REAL = RunOptions()


def tokens(row: dict[str, Any]) -> list[int]:
    return [one["token_id"] for one in row["logprobs"]]


def test_looping_answers_end_at_the_loop(tmp_path: Path) -> None:
    """Each is a prefix of the answer without the option, bit by bit, and is not computed again."""
    model = tmp_path / "model"
    make_model_folder(model, seed=3)
    rows = [row | {"stop_at": (None, 0, 8, 24)[i % 4]} for i, row in enumerate(people(examples(8, 24)))]
    sampling = {"max_tokens": 120, "ignore_eos": True, "logprobs": 0, "frequency_penalty": -0.2}
    path = write_job(tmp_path, model, rows, sampling=sampling, engine={"deterministic": True})
    assert run(path, REAL).exit_code == 0
    whole = table(path)
    asking = (("sampling.repetition_stop", "16"), ("sampling.from_columns", "{repetition_stop: stop_at}"))
    assert run(path, REAL, *asking).exit_code == 0
    ends = set()
    for free, row, given in zip(whole, table(path), rows, strict=True):
        least = 16 if given["stop_at"] is None else given["stop_at"]
        said = tokens(free)
        end = next((n for n in range(1, 121) if least and looped(said[:n], least)), None)
        assert row["logprobs"] == free["logprobs"][:end]
        assert row["finish_reason"] == ("length" if end is None else "repetition")
        assert free["generated_text"].startswith(row["generated_text"].rstrip("\N{REPLACEMENT CHARACTER}"))
        ends.add((least, row["finish_reason"]))
    assert {(0, "length"), (8, "repetition"), (16, "repetition")} <= ends
    assert run(path, NO_ENGINE, *asking).exit_code == 0


@pytest.mark.slow
def test_lines_of_openai_know_no_loops(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model_folder(model, seed=3)
    asked = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "frequency_penalty": -2}
    path = batch(tmp_path, model, chat("a", **asked, repetition_stop=8), chat("b", **asked))
    run(path, to(tmp_path / "out.jsonl", REAL))
    assert [row["finish_reason"] for row in table(path)] == ["repetition", "length"]
    looped, long = bodies(tmp_path / "out.jsonl")
    assert [one["choices"][0]["finish_reason"] for one in (looped, long)] == ["length", "length"]
    assert looped["usage"]["completion_tokens"] < long["usage"]["completion_tokens"] == 200
