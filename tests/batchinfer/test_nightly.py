"""Tests a job with ${date} in its output.path: one store and one history for all runs, and bounded state."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import cli
from batchinfer.core.errors import InputMissing, JobFileError, Locked
from batchinfer.job import load_job
from batchinfer.pipeline.clean import clean_job, clean_result
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.progress import Progress
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.results.find_state import find_state
from batchinfer.verbs.query import open_answer
from batchinfer.verbs.verify import Verification, verify_results
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, people, write_job

DOCUMENT = Path(__file__).parents[2] / "docs" / "resume.md"
DAY = 86400.0
TINY = (("model.max_model_len", "auto"),)  # the tests' model is smaller than the one of the example


def run(path: Path, date: str = "2026-01-01", options: RunOptions = FAKE, *sets: tuple[str, str]) -> Outcome:
    told: list[str] = []
    job = load_job(path, sets, date)
    return run_job(job, options, Progress(io.StringIO(), quiet=True), Interrupts(), told.append)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def runs(folder: Path) -> list[dict[str, Any]]:
    found = duckdb.sql(f"FROM read_parquet('{folder}/run-*.parquet') ORDER BY started_at")
    return found.to_arrow_table().to_pylist()


def answer(folder: Path, sql: str, partial: bool = False) -> list[tuple[Any, ...]]:
    with open_answer(folder, sql, partial) as found:
        return found.fetchall()


def aged(folder: Path, days: float) -> None:
    """Make everything below the folder look `days` days older, including times of uses."""
    for path in folder.rglob("*.parquet"):
        if path.parent.name == "uses":
            table = pq.read_table(path)
            older = [
                [max(0, at - int(days * DAY)) if at else 0 for at in row]
                for row in table["used_at"].to_pylist()
            ]
            column = pa.array(older, table.schema.field("used_at").type)
            pq.write_table(table.set_column(4, table.schema.field("used_at"), column), path)
    for path in folder.rglob("*"):
        at = path.stat().st_mtime - days * DAY
        os.utime(path, (at, at))


def stored(state: Path) -> int:
    return sum(json.loads(path.read_text())["rows"] for path in (state / "completions").glob("part-*.json"))


def test_the_documented_nightly_job_computes_only_changed_rows(tmp_path: Path, model: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "models").mkdir()
    shutil.copytree(model, tmp_path / "models" / "qwen2.5-7b")
    (tmp_path / "data" / "tickets").mkdir(parents=True)
    tickets = [{"ticket_id": i, "body": f"the printer on floor {i} is on fire"} for i in range(30)]
    monday = pa.Table.from_pylist(tickets)
    changed = [{"ticket_id": 3, "body": "it is out now"}, {"ticket_id": 30, "body": "a new one"}]
    tuesday = pa.Table.from_pylist([*changed, *(row for row in tickets if row["ticket_id"] != 3)])
    pq.write_table(monday, tmp_path / "data/tickets/all.parquet")
    assert run(tmp_path / "job.yaml", "2026-01-01").row["computed_requests"] == 30
    pq.write_table(tuesday, tmp_path / "data/tickets/all.parquet")
    second = run(tmp_path / "job.yaml", "2026-01-02").row
    assert (second["computed_requests"], second["reused_requests"], second["rows_ok"]) == (2, 29, 31)
    nights = duckdb.sql(
        f"SELECT parse_path(filename)[-2] AS night, count(*) AS n, count(DISTINCT ticket_id) AS tickets "
        f"FROM read_parquet('{tmp_path}/results/tickets/*/*.parquet', filename = true) GROUP BY ALL ORDER BY night"
    ).fetchall()
    assert nights == [("2026-01-01", 30, 30), ("2026-01-02", 31, 31)]
    assert len(duckdb.sql(f"FROM '{tmp_path}/results/tickets/**/*.parquet'").fetchall()) == 61
    history = "SELECT computed_requests FROM run ORDER BY run_id"
    for place in ("tickets/2026-01-01", "tickets-report"):
        assert answer(tmp_path / "results" / place, history) == [(30,), (2,)]
    joined = "SELECT count(*) FROM results JOIN rows USING (row_id) JOIN requests USING (key)"
    assert answer(tmp_path / "results/tickets/2026-01-01", joined) == [(30,)]
    assert answer(tmp_path / "results/tickets/2026-01-02", joined) == [(31,)]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        ".batchinfer-tickets", "tickets", "tickets-report",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("path", ["out/res-${date}", "out/${date}/res", "${date}"])
def test_other_positions_of_the_date_in_the_path(tmp_path: Path, model: Path, path: str) -> None:
    job = write_job(tmp_path, model, people(6), output={"path": path})
    run(job, "2026-01-01")
    again = run(job, "2026-01-02", NO_ENGINE)
    assert again.row["reused_requests"] == 6
    result = tmp_path / path.replace("${date}", "2026-01-02")
    assert pq.read_table(result).num_rows == 6
    assert verify_results(result).problems == []
    assert find_state(result).completions.is_dir()


@pytest.mark.slow
def test_a_trial_leaves_one_folder_and_a_run_without_work_no_file(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, people(12), output={"path": "out/res/${date}"})
    run(job, options=replace(FAKE, limit=5))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".batchinfer-res", "res-first-5", "res-report",
    ]  # fmt: skip
    assert run(job).row["reused_requests"] == 5
    assert [row["trial"] for row in runs(tmp_path / "out/res-report")] == [True, False]
    before = files(tmp_path / "out")
    for options in (NO_ENGINE, replace(NO_ENGINE, limit=5)):
        outcome = run(job, options=options)
        assert outcome.exit_code == 0
        assert outcome.row["exit_status"] == "already published"
        assert outcome.report is None
        assert files(tmp_path / "out") == before


@pytest.mark.slow
def test_a_query_whose_rows_are_the_same_leaves_no_run_either(tmp_path: Path, model: Path) -> None:
    sql = {"path": None, "sql": "SELECT text FROM 'in.jsonl'"}
    job = write_job(tmp_path, model, people(4), input=sql)
    assert run(job).report is not None
    assert run(job, options=NO_ENGINE).report is None
    assert len(runs(tmp_path / "out/res-report")) == 1


def test_unused_answers_are_cleaned_and_the_rest_stays(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, people(40), output={"path": "out/res/${date}"})
    state = tmp_path / "out/.batchinfer-res"
    run(job, "2026-01-01")
    aged(state, 20)
    write_job(tmp_path, model, people(10), output={"path": "out/res/${date}"})
    run(job, "2026-01-21")
    assert stored(state) == 40
    aged(state, 20)  # 30 rows were last used 40 days ago, 10 of them 20 days ago
    run(job, "2026-02-10", NO_ENGINE)
    assert stored(state) == 10
    assert verify_results(tmp_path / "out/res/2026-02-10").problems == []


def test_clean_prints_the_freed_bytes_and_a_dry_run_frees_nothing(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, model, people(20), output={"path": "out/res/${date}"})
    state = tmp_path / "out/.batchinfer-res"
    run(job, "2026-01-01")
    aged(state, 25)
    write_job(tmp_path, model, people(19), output={"path": "out/res/${date}"})
    run(job, "2026-01-26")
    aged(state, 10)
    before = files(tmp_path / "out")
    capsys.readouterr()
    assert cli._guarded(["clean", str(job), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows_dropped"], told["rows_kept"], told["folders_removed"], told["dry_run"]) == (
        1,
        19,
        1,
        True,
    )
    assert told["bytes_freed"] > 0
    assert files(tmp_path / "out") == before
    for option, value in (("--set", "cache.keep=365"), ("--date", "2026-01-26")):
        assert cli._guarded(["clean", str(tmp_path / "out/res/2026-01-26"), option, value]) == 2
        assert "Name the job file" in capsys.readouterr().err
    assert files(tmp_path / "out") == before
    assert cli._guarded(["clean", str(tmp_path / "out/res/2026-01-26")]) == 0
    assert "1 answer dropped, 19 kept" in capsys.readouterr().out
    assert stored(state) == 19
    assert not list((state / "results").iterdir())


def test_a_store_at_another_place_is_found_from_the_result(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, model, people(6), output={"path": "out/res/${date}"}, cache={"path": "shared"})
    store, result = tmp_path / "shared", tmp_path / "out/res/2026-01-01"
    run(job, "2026-01-01")
    assert verify_results(result) == Verification([], store)
    (part,) = store.glob("part-*.parquet")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    assert [problem.file.local for problem in verify_results(result).problems] == [part]
    part.write_bytes(whole)
    aged(store, 31)
    aged(tmp_path / "out/.batchinfer-res", 31)
    cleaned = clean_result(result, dry_run=True)
    assert (cleaned.store, cleaned.answers.rows_dropped) == (store, 6)
    shutil.rmtree(store)
    assert cli._guarded(["verify", str(result)]) == 0
    assert f"the stored answers were not checked: there is no folder {store}" in capsys.readouterr().err
    run(job, "2026-01-01", NO_ENGINE, ("cache.path", "null"))
    assert find_state(result).completions == tmp_path / "out/.batchinfer-res/completions"


def test_a_result_that_is_found_published_every_night_is_in_use(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, people(5))
    run(job)
    aged(tmp_path / "out/.batchinfer-res", 20)
    assert run(job, options=NO_ENGINE).report is None
    aged(tmp_path / "out/.batchinfer-res", 20)
    assert clean_job(load_job(job), dry_run=False).answers.rows_kept == 5
    aged(tmp_path / "out/.batchinfer-res", 31)
    assert clean_job(load_job(job), dry_run=False).answers.rows_dropped == 5


def test_clean_waits_for_no_run_and_needs_a_state(tmp_path: Path, model: Path) -> None:
    job = load_job(write_job(tmp_path, model, people(5)))
    assert clean_job(job, dry_run=False).answers.rows_kept == 0
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputMissing, match="name the job file"):
        clean_result(tmp_path, dry_run=False)
    with CompletionStore(tmp_path / "out/.batchinfer-res/completions"), pytest.raises(Locked):
        clean_job(job, dry_run=False)


def test_a_date_below_a_mount_point_is_refused_before_anything_runs(tmp_path: Path, model: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second disk")
    job = write_job(tmp_path, model, people(1), output={"path": "res/${date}"})
    (tmp_path / "res").symlink_to(shm)
    with pytest.raises(JobFileError, match="another disk"):
        run(job, options=NO_ENGINE)
    assert not (tmp_path / ".batchinfer-res").exists()


@pytest.mark.slow
def test_answers_of_a_long_run_count_as_used_at_its_end(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query's run that took longer than `keep` must not treat its own answers as unused."""
    sql = {"path": None, "sql": "SELECT text FROM 'in.jsonl'"}
    job = write_job(tmp_path, model, people(5), input=sql, output={"path": "out/res"})

    class LongAgo:
        @staticmethod
        def now() -> datetime:
            return datetime.fromtimestamp(time.time() - 3 * DAY)

    monkeypatch.setattr("batchinfer.pipeline.open_run.datetime", LongAgo)
    run(job)
    (uses,) = (tmp_path / "out/.batchinfer-res/completions/uses").glob("*.parquet")
    (times,) = pq.read_table(uses)["used_at"].to_pylist()
    assert min(times) > time.time() - DAY
