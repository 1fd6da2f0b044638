"""Whole jobs with drafts and without: the same rows, fewer steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from batchinfer.core.errors import BatchInferError, JobFileError
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.plans import earlier_drafts
from batchinfer.pipeline.plans.earlier_drafts import drafted
from batchinfer.pipeline.stages import drafting
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from tests.batchinfer.pipeline.test_pipeline import no_engine, run, table, write_job

REAL = RunOptions(waves_from_s=float("inf"))
FLOAT32 = ("model.dtype", "float32")
WEIGHTS = "model.safetensors"
QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart"
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
        other = {"prompt", "answers", "earlier"} - {*names}
        assert sum(row[f"{name}_drafted"] for name in names) == row["drafted_tokens"]
        assert sum(row[f"{name}_drafted"] for name in other) == 0
        assert row["accepted_tokens"] <= row["drafted_tokens"]
        assert row["sampled_tokens"] == wanted.row["sampled_tokens"]
        if kind != "replicas":  # which divide the rows as they get to it
            assert row["steps"] <= wanted.row["steps"]
        if kind == "greedy":
            assert row["drafted_tokens"] > 0


def changed(path: Path, rows: list[dict[str, Any]], **sections: Any) -> None:
    """Give a job other rows and other sections."""
    said = json.loads(path.read_text())
    (path.parent / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path.write_text(json.dumps(said | {name: said.get(name, {}) | one for name, one in sections.items()}))


@pytest.mark.parametrize("waves", [False, True])
def test_rows_whose_job_changed_are_drafted_by_their_last_answers(
    tmp_path: Path, model: Path, waves: bool
) -> None:
    """Rows have no ids, and stand elsewhere now."""
    options = RunOptions(waves_from_s=0.0) if waves else REAL
    path, off = (job(tmp_path / name, model, drafts) for name, drafts in (("a", ["earlier"]), ("b", "off")))
    for one in (path, off):
        assert run(one, options, FLOAT32, ("sampling.max_tokens", "30")).row["drafted_tokens"] == 0
    later = [{"text": "a new row"}, *reversed(rows()), {"text": "and another one"}]
    for one in (path, off):
        changed(one, later, sampling={"max_tokens": 36})
    got, wanted = (run(one, options, FLOAT32) for one in (path, off))
    assert table(path) == table(off)
    assert 0.9 * got.row["drafted_tokens"] < got.row["earlier_accepted"] == got.row["accepted_tokens"]
    assert got.row["earlier_accepted"] > 0
    assert got.row["steps"] < wanted.row["steps"]


class Seen:
    """Gives drafts, and remembers which."""

    def __init__(self) -> None:
        self.given: list[Sequence[int] | None] = []

    def __call__(self, request: Request, tokens: Sequence[int] | None, vocab: int) -> Request:
        self.given.append(tokens)
        return drafted(request, tokens, vocab)


def test_a_row_is_drafted_by_the_last_answer_to_its_id(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [{"id": f"r{at}", **row} for at, row in enumerate(rows(6))]
    given = {"input": {"path": "in.jsonl", "id": "id"}, "sampling": {"max_tokens": 20}}
    monkeypatch.setattr(earlier_drafts, "drafted", seen := Seen())
    path, off = (
        job(tmp_path / name, model, drafts, **given) for name, drafts in (("a", "auto"), ("b", "off"))
    )
    later = [row | {"text": row["text"] + "."} for row in first[::-1]]
    for one in (path, off):
        changed(one, first)
        run(one, REAL, FLOAT32)
        changed(one, later)
        run(one, REAL, FLOAT32)
    assert table(path) == table(off)
    assert sum(tokens is not None for tokens in seen.given) == 6, "each row has that of its id"


def test_engines_begin_with_the_last_answers_of_the_last_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickstart's model writes texts that become its tokens again."""
    orders = [json.loads(line) for line in (QUICKSTART / "data/orders.jsonl").read_bytes().splitlines()[:6]]
    prompt = YAML(typ="safe").load(QUICKSTART / "job.yaml")["prompt"]
    path = job(tmp_path / "a", QUICKSTART / "model", "auto", prompt=prompt, sampling={"max_tokens": 48})
    told: list[list[str]] = []
    decoded = Tokenizer.load(QUICKSTART / "model").decode_batch
    monkeypatch.setattr(ReplicaPool, "learn", lambda _, answers: told.append(decoded(answers)))
    changed(path, orders[:5])
    run(path, REAL, FLOAT32)
    before = [row["generated_text"] for row in table(path)]
    changed(path, orders[5:])
    run(path, REAL, FLOAT32)
    assert told == [[], before]
    run(path, REAL, FLOAT32, ("drafts", "[answers]"), ("sampling.max_tokens", "47"))
    assert told[2:] == [[]], "a job that takes nothing from its last result"


def test_sampled_rows_and_rows_with_several_answers_have_no_earlier_ones(tmp_path: Path, model: Path) -> None:
    for name, sampling in (("sampled", {"temperature": 1.0}), ("several", {"n": 2, "temperature": 1.0})):
        path = job(tmp_path / name, model, ["earlier"], sampling={"max_tokens": 10, **sampling})
        run(path, REAL, FLOAT32)
        assert run(path, REAL, FLOAT32, ("sampling.max_tokens", "12")).row["drafted_tokens"] == 0


def small(model: Path, folder: Path) -> Path:
    """Make a model that is the other one with other weights, by a little: it answers alike, mostly."""
    copied = Path(shutil.copytree(model, folder))
    noise = torch.Generator().manual_seed(1)
    weights = {
        name: (one.float() * (1 + 2e-3 * torch.randn(one.shape, generator=noise))).to(one.dtype)
        for name, one in load_file(copied / WEIGHTS).items()
    }
    save_file(weights, copied / WEIGHTS, {"format": "pt"})
    return copied


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised", "logprobs", "schema"])
def test_rows_are_those_of_a_job_without_a_draft_model(tmp_path: Path, model: Path, kind: str) -> None:
    plain = job(tmp_path / "off", model, "off", **JOBS[kind])
    assert run(plain, REAL, FLOAT32).exit_code == 0
    path = job(tmp_path / "model", model, {"model": str(small(model, tmp_path / "small"))}, **JOBS[kind])
    got = run(path, REAL, FLOAT32)
    assert (got.exit_code, table(path)) == (0, table(plain))
    # how many are drafted, and so how many of them are right, follows from what steps took
    assert 0.3 * got.row["model_drafted"] < got.row["model_accepted"]
    assert got.row["model_drafted"] > 0
    assert 0 < got.row["draft_model_s"] < got.row["wall_s"]


def test_a_draft_model_may_be_the_same_one_with_other_weights(tmp_path: Path, model: Path) -> None:
    plain = job(tmp_path / "off", model, "off", sampling={"max_tokens": 40})
    run(plain, REAL, FLOAT32)
    path = job(
        tmp_path / "int4", model, {"model": str(model), "quantization": "int4"}, sampling={"max_tokens": 40}
    )
    got = run(path, REAL, FLOAT32)
    assert table(path) == table(plain)
    assert got.row["model_drafted"] > 0
    assert got.row["quantization"] == "none"


def test_rows_that_ask_a_draft_model_the_same_ask_once_and_never_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows differ in what is reported of their tokens, or are too long for the draft model."""
    other = small(model, tmp_path / "small")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    mixed = [{"text": text, "lp": lp} for text in ("one", "two", "word " * 80) for lp in (1, 2)]
    sections = {"sampling": {"max_tokens": 20, "from_columns": {"logprobs": "lp"}}}
    path = job(tmp_path / "job", model, {"model": str(other)}, **sections)
    changed(path, mixed)
    assert run(path, REAL, FLOAT32).exit_code == 0
    monkeypatch.setattr(drafting, "engines", no_engine)
    assert run(path, REAL, FLOAT32, ("model.kv_cache_dtype", "int8")).row["draft_model_s"] > 0


def test_drafts_end_before_tokens_that_the_model_has_not() -> None:
    request = Request(bytes(32), np.zeros(1, np.int32), SamplingParams(max_tokens=4))
    for tokens, expected in (([1, 2, 300, 4], [1, 2]), ([300], None), ([1, 2, 3, 4, 5], [1, 2, 3, 4])):
        draft = drafted(request, tokens, 300).draft
        assert (None if draft is None else draft.tolist()) == expected


def test_a_draft_models_greedy_answers_are_those_of_its_own_job(tmp_path: Path, model: Path) -> None:
    """So each of the two jobs leaves the other one nothing to compute with that model."""
    other, shared = small(model, tmp_path / "small"), {"path": str(tmp_path / "store")}
    own = job(tmp_path / "own", other, "off", sampling={"max_tokens": 20}, cache=shared)
    answered = run(own, REAL, FLOAT32).row["distinct_requests"]
    both = job(tmp_path / "both", model, {"model": str(other)}, sampling={"max_tokens": 20}, cache=shared)
    before = len(stored(tmp_path / "store"))
    run(both, REAL, FLOAT32)
    assert len(stored(tmp_path / "store")) == before + answered


def stored(store: Path) -> list[Any]:
    return duckdb.sql(f"SELECT DISTINCT key FROM read_parquet('{store}/part-*.parquet')").fetchall()


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path, model: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    said = json.loads((other / "tokenizer.json").read_text())
    said["added_tokens"][-1]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(JobFileError, match=r"drafts\.model: .* has other tokens than the job's model"):
        run(job(tmp_path / "job", model, {"model": str(other)}), REAL)
    with pytest.raises(JobFileError, match=r"drafts\.model: "):
        run(job(tmp_path / "gone", model, {"model": str(tmp_path / "nowhere")}), REAL)


def test_a_resumed_job_takes_the_answers_that_drafts_made(tmp_path: Path, model: Path) -> None:
    path = job(tmp_path / "job", model, "auto", sampling={"max_tokens": 20})
    assert run(path, REAL, FLOAT32).row["drafted_tokens"] > 0
    again = run(path, REAL, FLOAT32, ("drafts", "off"))
    assert not again.row["steps"], "no answer is computed again because drafts are off now"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"drafts": "some"}, "auto, off, a list of any of prompt, answers, earlier, or a section"),
        ({"drafts": ["prompt", "oracle"]}, "auto, off, a list"),
        ({"drafts": []}, "auto, off, a list"),
        ({"drafts": {"modl": "small"}}, 'the section drafts has no key "modl" .did you mean model'),
        (
            {"drafts": {"model": "small", "quantization": "int3"}},
            'found the text "int3"; it must be one of auto',
        ),
        ({"drafts": {"model": "small"}, "task": "embed"}, "no answers are generated"),
        ({"drafts": ["prompt", "prompt"]}, "names a source twice"),
        ({"drafts": ["prompt"], "task": "embed"}, "no answers are generated"),
    ],
)
def test_what_drafts_may_be(tmp_path: Path, model: Path, sections: dict[str, Any], message: str) -> None:
    path = write_job(tmp_path, model, rows(2), **sections)
    with pytest.raises((BatchInferError, JobFileError), match=message):
        load_job(path)
