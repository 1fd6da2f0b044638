"""Whole jobs, from the input file to the published Parquet, with a fake engine and a tiny real model."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import cli
from batchinfer.core.errors import BatchInferError, ErrorBudgetExceeded, StorageError
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.progress import Progress
from batchinfer.report.summary import PHASES
from tests.memory_transport import FakeTransport

# One plan of all rows, however long a busy machine reads.
FAKE = RunOptions(engine="tests.fake_engine:build", transport=FakeTransport(), waves_from_s=float("inf"))
# a run that needs an engine fails
NO_ENGINE = RunOptions(engine="tests.batchinfer.pipeline.test_pipeline:no_engine")


def no_engine(*_: object) -> None:
    raise BatchInferError("this run must not need an engine")


def write_job(folder: Path, checkpoint: Path, rows: list[Any] | None = None, **sections: Any) -> Path:
    """Write job.yaml (as JSON) and its input. `sections` are merged into a job that greets `text`.

    It does not measure the quality of quantised weights, which takes another process.
    """
    if rows is not None:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))
    job: dict[str, Any] = {
        "name": "greetings",
        "model": {"path": str(checkpoint)},
        "input": {"path": "in.jsonl"},
        "prompt": {"system": "Be brief and friendly to everyone.", "user": "Greet {{ text }}"},
        "sampling": {"max_tokens": 8},
        "output": {"path": "out/res"},
        "engine": {"quality_rows": 0},
    }
    for name, section in sections.items():
        job[name] = section if not isinstance(section, dict) else job.get(name, {}) | section
    path = folder / "job.yaml"
    path.write_text(json.dumps({k: v for k, v in job.items() if v is not None}))
    return path


def run(path: Path, options: RunOptions = FAKE, *sets: tuple[str, str]) -> Outcome:
    notices: list[str] = []
    return run_job(
        load_job(path, sets), options, Progress(io.StringIO(), quiet=True), Interrupts(), notices.append
    )


def table(path: Path, columns: str = "*") -> list[dict[str, Any]]:
    query = f"SELECT {columns} FROM read_parquet('{path.parent}/out/res/*.parquet') ORDER BY row_id"
    return duckdb.sql(query).to_arrow_table().to_pylist()


def people(count: int) -> list[dict[str, Any]]:
    return [{"id": f"p{i}", "text": f"person {i}", "age": i} for i in range(count)]


def test_rows_come_back_in_order_with_their_columns_duplicates_and_errors(tmp_path, model):
    rows: list[Any] = people(50)
    rows[10] = "{not json"
    rows[20] = {"id": "p20", "text": None, "age": 20}
    rows[30] = rows[5] | {"id": "p30"}
    path = write_job(
        tmp_path,
        model,
        rows,
        input={"path": "in.jsonl", "id": "id"},
        output={"path": "out/res", "columns": ["age"]},
        on_error={"max_error_rate": 0.1},
    )
    outcome = run(path)
    got = table(path)
    assert outcome.exit_code == 0
    assert [r["row_id"] for r in got] == list(range(50))
    assert [r["row_index"] for r in got] == list(range(50))
    assert {r["file"] for r in got} == {"in.jsonl"}
    assert [r["status"] for r in got] == ["error" if i in (10, 20) else "ok" for i in range(50)]
    assert (got[10]["error_code"], got[20]["error_code"]) == ("bad_json", "null_in_template")
    assert got[20]["custom_id"] == "p20"
    assert [r["age"] for r in got[:10]] == list(range(10))
    assert got[30]["generated_text"] == got[5]["generated_text"] is not None
    assert outcome.row["duplicate_rows"] == 1
    assert outcome.row["computed_requests"] == 47
    assert (outcome.row["rows_ok"], outcome.row["rows_error"]) == (48, 2)


def test_the_same_job_again_needs_no_engine_and_changes_no_byte(tmp_path, model):
    path = write_job(tmp_path, model, people(20))
    run(path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out/res").iterdir()}
    again = run(path, NO_ENGINE)
    assert again.exit_code == 0
    assert again.row["exit_status"] == "already published"
    (tmp_path / "out/.batchinfer-res/published.json").unlink()  # without this marker, rows are joined again
    assert run(path, NO_ENGINE).row["reused_requests"] == 20
    assert {p.name: p.read_bytes() for p in (tmp_path / "out/res").iterdir()} == before


@pytest.mark.slow
def test_every_run_that_reads_its_input_checks_for_space_first(tmp_path, model, monkeypatch):
    """A continued run whose input was read completely skips the check."""
    path = write_job(tmp_path, model, people(5))
    run(path)
    write_job(tmp_path, model, people(6))
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        with pytest.raises(StorageError, match="make room"):
            run(path)
    with pytest.raises(BatchInferError, match="must not need an engine"):
        run(path, NO_ENGINE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    assert run(path).exit_code == 0


def test_a_run_with_too_many_bad_rows_starts_no_engine_and_publishes_nothing(tmp_path, model):
    path = write_job(tmp_path, model, [*people(20), "{", "{"])
    with pytest.raises(ErrorBudgetExceeded, match=r"2 of 22 rows are errors.* allows 0 \(1.00%\)") as caught:
        run(path, NO_ENGINE)
    assert "bad_json" in str(caught.value)
    assert "in.jsonl" in str(caught.value)
    assert not (tmp_path / "out/res").exists()


def test_the_engines_errors_count_and_are_retried_only_when_asked(tmp_path, model, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "2")
    path = write_job(tmp_path, model, people(40), on_error={"max_error_rate": 1.0})
    failed = run(path).row["rows_error"]
    assert 5 < failed < 35
    bad = [r for r in table(path) if r["status"] == "error"]
    assert {(r["error_code"], r["error_class"], r["retryable"]) for r in bad} == {
        ("fake_failure", "engine", True)
    }
    monkeypatch.delenv("FAKE_ENGINE_FAILS_EVERY")
    assert run(path, NO_ENGINE).row["rows_error"] == failed
    mended = run(path, replace(FAKE, retry_errors=True))
    assert mended.row["computed_requests"] == failed
    assert mended.row["rows_error"] == 0


def test_a_run_over_its_budget_loses_no_answer_and_the_next_run_needs_no_engine(tmp_path, model, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "2")
    monkeypatch.setenv("FAKE_ENGINE_BATCH", "4")
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(log))
    path = write_job(tmp_path, model, people(200))
    with pytest.raises(ErrorBudgetExceeded):
        run(path)
    computed = log.read_text().split()
    assert len(computed) < 100, "the run stopped as soon as the budget could not hold"
    store = tmp_path / "out/.batchinfer-res/completions"
    codes = duckdb.sql(f"SELECT error_code FROM '{store}/*.parquet'").fetchall()
    assert len(codes) == len(computed), "all computed rows are stored"
    failed = sum(code is not None for (code,) in codes)
    with pytest.raises(
        ErrorBudgetExceeded, match=r"of 200 rows are errors, and on_error.* allows 2"
    ) as caught:
        run(path, NO_ENGINE)
    assert f"batchinfer show {tmp_path / 'out/res'} --errors --partial" in str(caught.value)
    assert f"--retry-errors runs {failed} of them again" in str(caught.value)
    retried = replace(FAKE, retry_errors=True)  # these errors do not count, as their rows run again
    monkeypatch.delenv("FAKE_ENGINE_FAILS_EVERY")
    assert run(path, retried).row["rows_error"] == 0
    again = log.read_text().split()[len(computed) :]
    assert len(computed) + len(again) == 200 + failed


def phases_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase. They add up to the duration of the run."""
    spent = {name: row[f"{name}_s"] for name in PHASES if row[f"{name}_s"] is not None}
    assert sum(spent.values()) == pytest.approx(row["wall_s"], rel=0.01)
    assert row["wall_s"] == pytest.approx((row["finished_at"] - row["started_at"]).total_seconds())
    return spent


def test_every_moment_of_a_run_is_in_a_phase(tmp_path, model, monkeypatch):
    """A busy machine may delay a run outside of its phases, but not every run."""
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0.5")
    path = write_job(tmp_path, model, people(30))
    starts = replace(FAKE, already_s=0.7)
    works = (
        run(path, starts, ("output.path", f"out/{turn}")).row for turn in range(10)
    )  # the first one, mostly
    assert any(phases_of(row)["other"] <= 0.05 * row["wall_s"] for row in works)
    done = run(path, NO_ENGINE, ("output.path", "out/0")).row  # has nothing to do
    assert done["engine_s"] is None
    assert set(phases_of(done)) == {"startup", "close", "other"}


def test_savings_by_duplicates_are_counted_per_run(tmp_path, model):
    """Eight rows have the same request. One other request was answered by an earlier run, which is no saving."""
    rows = [*people(10), *[people(1)[0] | {"id": f"again{i}"} for i in range(7)]]
    first = run(write_job(tmp_path, model, rows)).row
    _, prompt, answer = table(tmp_path / "job.yaml", "row_id, prompt_tokens, completion_tokens")[0].values()
    assert first["duplicate_rows"] == 7
    assert first["duplicate_saved_tokens"] == 7 * prompt > 0
    assert first["duplicate_saved_output_tokens"] == 7 * answer > 0
    again = run(write_job(tmp_path, model, [*rows, people(1)[0] | {"id": "late"}, {"text": "new"}])).row
    assert (again["duplicate_rows"], again["duplicate_saved_tokens"]) == (8, 0)
    assert again["duplicate_saved_output_tokens"] == 0


def test_parquet_and_sql_keep_types(tmp_path, model):
    rows = pa.table(
        {
            "text": ["a", "b"],
            "at": pa.array([1, 2], pa.timestamp("ns", "UTC")),
            "small": pa.array([1, None], pa.int8()),
            "tags": [["x"], []],
        }
    )
    pq.write_table(rows, tmp_path / "in.parquet")
    output = {"path": "out/res", "columns": ["at", "small", "tags"]}
    path = write_job(tmp_path, model, input={"path": "in.parquet"}, output=output)
    run(path)
    got = pq.read_table(next((tmp_path / "out/res").glob("*.parquet")))
    assert got.schema.field("at").type == pa.timestamp("ns", "UTC")
    assert got.schema.field("small").type == pa.int8()
    assert got.column("tags").to_pylist() == [["x"], []]
    sql = {"path": None, "sql": "SELECT text, small FROM 'in.parquet' WHERE small IS NOT NULL"}
    path = write_job(
        tmp_path, model, name="by-sql", input=sql, output={"path": "out/sql", "columns": ["small"]}
    )
    assert run(path).row["rows"] == 1


@pytest.mark.slow
def test_an_interrupted_query_runs_again_and_answers_are_kept(tmp_path, model, monkeypatch):
    """Rows that changed since then are published with their new values."""
    sql = {"path": None, "sql": "SELECT text FROM 'in.jsonl'"}
    path = write_job(tmp_path, model, people(12), input=sql)
    monkeypatch.setenv("FAKE_ENGINE_DIES_AFTER_ROWS", "6")
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_ENGINE_BATCH", "3")
    with pytest.raises(BatchInferError, match="same command resumes"):
        run(path)
    monkeypatch.delenv("FAKE_ENGINE_DIES_AFTER_ROWS")
    write_job(tmp_path, model, [*people(12)[1:], {"id": "new", "text": "somebody new", "age": 0}], input=sql)
    outcome = run(path, FAKE)
    assert outcome.row["rows"] == 12
    assert outcome.row["computed_requests"] + outcome.row["reused_requests"] == 12
    assert 2 <= outcome.row["reused_requests"] <= 6, "the answers of at most two steps arrived"
    assert not any(r["generated_text"] is None for r in table(path))


# With a model ---------------------------------------------------------------------------------------------------


def mixed_rows() -> list[dict[str, Any]]:
    """Return greedy and sampled rows with duplicates among the sampled ones, and prompts of many lengths."""
    rng = random.Random(2)
    rows = []
    for i in range(9):
        text = " ".join(rng.choice(["ant", "bee", "cat", "dog"]) for _ in range(rng.randrange(1, 30)))
        rows.append({"id": f"r{i}", "text": text, "temperature": (0, 0.9, 1.4)[i % 3]})
    return rows + [{"id": f"same{i}", "text": "the same", "temperature": 1.0} for i in range(4)]


def answers(folder: Path, model: Path, rows: list[dict[str, Any]], seqs: int) -> Counter[tuple[Any, ...]]:
    """Run the rows, and return (text, temperature, answer) of each. Duplicates are compared as a multiset."""
    folder.mkdir()
    path = write_job(
        folder,
        model,
        rows,
        model={"dtype": "float32"},
        sampling={"max_tokens": 8, "seed": 5, "top_p": 0.95, "from_columns": ["temperature"]},
        output={"columns": ["text", "temperature"]},
    )
    outcome = run(
        path, RunOptions(), ("engine.max_num_seqs", str(seqs)), ("engine.max_num_batched_tokens", "512")
    )
    assert outcome.exit_code == 0
    got = table(path, "row_id, text, temperature, generated_text")
    return Counter((r["text"], float(r["temperature"]), r["generated_text"]) for r in got)


def test_answers_do_not_depend_on_the_batch_or_the_order_of_rows(tmp_path, model):
    rows = mixed_rows()
    wanted = answers(tmp_path / "seqs64", model, rows, 64)
    assert len({k for k in wanted if k[0] == "the same"}) == 4, "equal sampled rows get different samples"
    random.Random(9).shuffle(rows)
    assert answers(tmp_path / "shuffled", model, rows, 1) == wanted


def test_stop_strings_end_an_answer_and_are_removed(tmp_path, model):
    rows = [{"text": f"n {i}", "include_stop": included} for included in (False, True) for i in range(6)]
    sampling: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "from_columns": ["include_stop"]}
    path = write_job(tmp_path, model, rows, sampling=sampling)
    run(path, RunOptions())
    full = [r["generated_text"] for r in table(path)]
    stop = full[0][10:13]
    run(write_job(tmp_path, model, rows, sampling=sampling | {"stop": [stop]}), RunOptions())
    found = table(path)
    truncated = [text.split(stop)[0] for text in full[:6]]
    with_stop = ["".join(text.partition(stop)[:2]) for text in full[6:]]
    assert [r["generated_text"] for r in found] == truncated + with_stop
    assert found[0]["finish_reason"] == "stop"
    assert found[0]["completion_tokens"] < 24
    assert [r["completion_tokens"] for r in found[:6]] == [r["completion_tokens"] for r in found[6:]]
    assert len(list((tmp_path / "out/res-report").glob("steps-*.parquet"))) == 2
    assert not list(tmp_path.rglob("experts-*")), "a model without experts has no table of theirs"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("error", "code", "status"), [
    (OSError(5, "Input/output error"), 74, "storage error"),
    (MemoryError("none left"), 71, "out of memory"),
    (ValueError("unexpected"), 70, "bug"),
])  # fmt: skip
def test_the_run_table_and_the_process_report_the_same_error(
    tmp_path, model, monkeypatch, capsys, error, code, status
):
    """Also of errors that are not subclasses of BatchInferError."""

    def fails(*_: object, **__: object) -> None:
        raise error

    path = write_job(tmp_path, model, people(3))
    monkeypatch.setattr("batchinfer.pipeline.stages.planning.plan_job", fails)
    assert cli._guarded(["run", str(path), "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    (report,) = (tmp_path / "out/res-report").glob("run-*.parquet")
    (row,) = pq.read_table(report).to_pylist()
    assert (said["exit_code"], said["exit_status"]) == (code, status)
    assert (row["exit_code"], row["exit_status"]) == (code, status)
