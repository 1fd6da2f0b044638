"""Runs whole jobs with `on_invalid`: rows with truncated or invalid answers run again, as the ladder says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import BatchInferError, ErrorBudgetExceeded
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import load_job
from batchinfer.pipeline.clean import clean_job
from batchinfer.store.index.index import Index
from batchinfer.store.results.partial import partial_reader
from tests.batchinfer.killed_runs import published
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, run, table, write_job
from tests.batchinfer.test_nightly import aged
from tests.batchinfer.test_replicas import report
from tests.batchinfer.test_to_openai import batch, bodies, completion, to

LADDER = [{"temperature": 0.1}, {"temperature": 0.2, "seed": 4}]
LONGER = [*LADDER, {"temperature": 0.3}]
LEVELS = 4  # of hardness, as often each: a fourth fits at each attempt, and a fourth at none
COUNT = 40
PROMPT = {"system": None, "user": None, "token_ids": "ids"}


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of computed requests' keys."""
    monkeypatch.setenv("FAKE_ENGINE_LEVELS", str(LEVELS))
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def rows(count: int = COUNT) -> list[dict[str, Any]]:
    """Return rows whose hardness is n % LEVELS."""
    return [{"id": f"r{n}", "ids": [20 + n, 20]} for n in range(count)]


def job(folder: Path, model: Path, given: list[dict[str, Any]] | None = None, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    sections = {"on_invalid": LADDER, "prompt": PROMPT, "input": {"path": "in.jsonl", "id": "id"}, **sections}
    return write_job(folder, model, rows() if given is None else given, **sections)


def computed(log: Path) -> list[str]:
    found = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    assert len(found) == len(set(found)), "something was computed twice"
    return found


def attempts(path: Path) -> list[tuple[int, str]]:
    return [(row["attempt"], row["finish_reason"]) for row in table(path)]


def wanted(hardness: int, most: int) -> tuple[int, str]:
    return (hardness + 1, "stop") if hardness < most else (most, "length")


@pytest.mark.parametrize("engines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_run_again_until_they_fit(
    tmp_path: Path, model: Path, log: Path, monkeypatch: pytest.MonkeyPatch, engines: int
) -> None:
    """The first rows run again before the last row has run once. The report names the request that answered."""
    monkeypatch.setenv("FAKE_ENGINE_BATCH", "5")
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0.1")
    path = job(tmp_path / "j", model, engine={"data_parallel": engines})
    assert run(path).exit_code == 0
    assert attempts(path) == [wanted(n % LEVELS, 3) for n in range(COUNT)]
    assert len(computed(log)) == COUNT // LEVELS * (1 + 2 + 3 + 3)
    answered, requests = report(path, "rows"), {one["key"]: one for one in report(path, "requests")}
    assert len(answered) == COUNT
    assert Counter(requests[one["key"]]["cut"] for one in answered) == {False: 30, True: 10}
    if engines == 1:
        queued = sorted(requests.values(), key=lambda one: float(one["queued_s"]))
        assert queued[COUNT]["queued_s"] < max(one["finished_s"] for one in queued[:COUNT])


def test_duplicates_run_again_once_and_samples_separately(tmp_path: Path, model: Path, log: Path) -> None:
    twice = [*rows(8), *rows(8)]
    path = job(tmp_path / "a", model, twice)
    run(path)
    assert len(computed(log)) == 2 * (1 + 2 + 3 + 3)
    path = job(
        tmp_path / "b",
        model,
        twice,
        sampling={"temperature": 0.05},
        on_invalid=[{"temperature": 0.1}, {"temperature": 0}],
    )
    run(path)
    # sampled duplicates are different work; with temperature 0 they are equal
    assert len(computed(log)) == 16 + 12 + 4
    assert attempts(path) == [(1, "stop"), (2, "stop"), (3, "length"), (3, "length")] * 4


def rows_that_run_no_more(path: Path, model: Path, spill: Path) -> list[dict[str, Any]]:
    """Return the rows of a job's partial result."""
    state = path.parent / "out/.batchinfer-res"
    (marker,) = state.glob("**/index.json")
    reader = partial_reader(Index.open(marker.parent), state / "completions", Tokenizer.load(model), spill)
    return list(reader.read_all().to_pylist())


def test_a_ladder_resumes_after_kill_and_computes_nothing_twice(
    tmp_path: Path, model: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run died within the ladder: bytes are equal, and a partial result has the finished rows."""
    whole, killed = job(tmp_path / "whole", model), job(tmp_path / "cut", model, commit={"rows": 5})
    run(whole)
    everything = set(computed(log))
    monkeypatch.setenv("FAKE_ENGINE_BATCH", "5")
    monkeypatch.setenv("FAKE_ENGINE_DIES_AFTER_ROWS", "55")
    with pytest.raises(BatchInferError, match="same command resumes"):
        run(killed)
    partial = rows_that_run_no_more(killed, model, tmp_path / "spill")
    assert 10 < len(partial) < COUNT
    for row in partial:
        assert (row["attempt"], row["finish_reason"]) == wanted(row["row_id"] % LEVELS, 3)
    monkeypatch.delenv("FAKE_ENGINE_DIES_AFTER_ROWS")
    assert run(killed).exit_code == 0
    assert set(computed(log)) == everything
    assert published(killed) == published(whole)


def test_a_second_run_computes_only_new_rows(tmp_path: Path, model: Path, log: Path) -> None:
    path = job(tmp_path / "j", model, rows(40))
    run(path)
    before = set(computed(log))
    job(tmp_path / "j", model, rows(44), on_invalid=LONGER)
    run(path)
    last = computed(log)
    assert len(last) == 10 + 1 + 2 + 3 + 4
    assert not before & set(last)
    assert attempts(path) == [(n % LEVELS + 1, "stop") for n in range(44)]
    job(tmp_path / "j", model, rows(44), on_invalid=[LONGER[2]])
    run(path)
    assert len(computed(log)) == 22, "of the others, the answers are stored"
    assert attempts(path) == [(1, "stop"), (2, "stop"), (2, "stop"), (2, "stop")] * 11
    job(tmp_path / "j", model, rows(44), on_invalid=None)
    assert run(path, NO_ENGINE).exit_code == 0
    assert "attempt" not in table(path)[0]


def test_only_rows_without_a_rung_left_are_errors(tmp_path: Path, model: Path, log: Path) -> None:
    sampling = {"regex": "[a-z]*"}
    path = job(tmp_path / "a", model, sampling=sampling, on_error={"max_error_rate": 0.25})
    assert run(path).exit_code == 0
    assert Counter((row["attempt"], row["error_code"]) for row in table(path)) == {
        (1, None): 10, (2, None): 10, (3, None): 10, (3, "incomplete_output"): 10,
    }  # fmt: skip
    path = job(tmp_path / "b", model, sampling=sampling, on_error={"max_error_rate": 0.2})
    with pytest.raises(ErrorBudgetExceeded, match=r"of 40 rows are errors.*\n.*incomplete_output"):
        run(path)


def test_answers_of_earlier_attempts_are_kept(tmp_path: Path, model: Path, log: Path) -> None:
    path = job(tmp_path / "j", model)
    run(path)
    assert clean_job(load_job(path), dry_run=True).answers.rows_dropped == 0
    state = path.parent / "out/.batchinfer-res"
    aged(state, 20)
    run(path, NO_ENGINE)
    aged(state, 20)
    assert clean_job(load_job(path), dry_run=True).answers.rows_dropped == 0


@pytest.mark.slow
def test_openai_lines_have_the_answer_that_counts(tmp_path: Path, model: Path) -> None:
    requests = [completion(f"c{n}", prompt=[20 + n, 20], temperature=0) for n in range(8)]
    path = batch(tmp_path, model, *requests, on_invalid=LADDER)
    run(path, to(tmp_path / "out.jsonl"))
    reasons = [body["choices"][0]["finish_reason"] for body in bodies(tmp_path / "out.jsonl")]
    assert reasons == ["stop", "stop", "stop", "length"] * 2


def test_each_sample_has_its_own_ladder(tmp_path: Path, model: Path, log: Path) -> None:
    """As in a file with each row twice: work is equal, and the jobs share answers."""
    sampled: dict[str, Any] = {"on_invalid": [{"temperature": 0.1}, {"temperature": 0.2}]}
    path = job(tmp_path / "n", model, rows(8), sampling={"temperature": 0.05, "n": 2}, **sampled)
    assert run(path).exit_code == 0
    found = [(row["row_id"], row["sample_index"]) for row in table(path)]
    assert found == [(n, sample) for n in range(8) for sample in range(2)]
    assert attempts(path) == [wanted(n // 2 % LEVELS, 3) for n in range(16)]
    work = set(computed(log))
    assert len(work) == 2 * 2 * (1 + 2 + 3 + 3)
    assert run(path, NO_ENGINE).exit_code == 0, "the store determines the next rung"
    twice = [row for row in rows(8) for _ in range(2)]
    other = job(tmp_path / "twice", model, twice, sampling={"temperature": 0.05}, **sampled)
    assert run(other).exit_code == 0
    assert set(computed(log)) == work
    assert [row["generated_text"] for row in table(other)] == [row["generated_text"] for row in table(path)]
