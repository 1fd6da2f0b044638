"""Tests messages of commands that have little to report, and errors before any computation."""

from __future__ import annotations

import errno
import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.core.errors import StorageError, classify_error
from batchinfer.filesystem.durable import FileOps, write_bytes
from batchinfer.filesystem.state import StateFolder
from batchinfer.report.tables.row_keys import write_rows
from batchinfer.report.tables.spool import TEMPORARY, write_row
from batchinfer.verbs.status import RunStatus, Standing
from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Command, Place, run_once


@pytest.fixture
def run(cli_of: CliOf) -> Command:
    return cli_of(NO_ENGINE)


# --- output.path where a folder cannot be renamed to


def test_a_mounted_disk_as_output_path_is_refused_before_anything_runs(
    place: Place, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.results.mkdir(parents=True)
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == place.results)
    ended = run("run", place.folder / "job.yaml")
    assert (ended.code, f"output.path: {place.results}/results" in ended.err) == (73, True), ended.err


# --- a full disk


def full(folder: Path, name: str) -> None:
    """Let writes of this report file fail with a full disk."""
    (folder / f"{name}{TEMPORARY}").symlink_to("/dev/full")


def test_a_full_disk_names_the_file_of_the_report(tmp_path: Path) -> None:
    full(tmp_path, "run-x.parquet")
    with pytest.raises(OSError, match=r"run-x\.parquet") as caught:
        write_row(tmp_path / "run-x.parquet", pa.schema([("n", pa.int64())]), {"n": 1})
    told = str(classify_error(caught.value))
    assert "No space left on device" in told
    assert "make room on that disk, then run the same command again" in told


def test_a_full_disk_names_the_table_of_rows(tmp_path: Path) -> None:
    full(tmp_path, "rows-x.parquet")
    with pytest.raises(OSError, match=r"rows-x\.parquet"):
        write_rows(tmp_path, "x", [])


def test_a_full_disk_has_a_next_step(tmp_path: Path) -> None:
    class Full(FileOps):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(
        StorageError, match=r"ENOSPC.*make room on that disk, then run the same command again"
    ):
        write_bytes(tmp_path / "x", b"x", Full())


# --- messages about success


def test_a_run_that_still_reads_has_nothing_to_query_yet(place: Place, run: Command) -> None:
    with StateFolder(place.results).lock():
        for more in ((), ("--partial",)):
            ended = run("query", place.results, *more)
            assert (ended.code, "still reading the input" in ended.err) == (66, True), ended.err
            assert f"batchinfer status {place.results}" in ended.err
    assert "there is no such folder" in run("query", place.results).err


@pytest.mark.slow
def test_retry_errors_reports_if_there_is_nothing_to_retry(place: Place, run: Command) -> None:
    run_once(place)
    ended = run("run", place.folder / "job.yaml", "--retry-errors")
    assert (ended.code, "no row has an error that is marked retryable" in ended.err) == (0, True), ended.err


def test_the_end_of_a_run_is_printed_once() -> None:
    def head(exit_status: str, exit_code: int, state: Standing) -> str:
        return RunStatus(state, "out", "job", exit_code=exit_code, exit_status=exit_status).lines(
            datetime.now(UTC)
        )[0]

    assert head("interrupted", 130, "interrupted") == "job: interrupted (exit code 130)"
    assert head("published", 0, "finished") == "job: finished (published)"
    assert head("storage error", 74, "failed") == "job: failed (storage error, exit code 74)"


# --- permissions


def test_no_other_user_can_write_to_files_of_a_run(place: Place, cli_of: CliOf) -> None:
    """With any umask: results, report and the folders above."""
    place.job(output="output: {path: out/deep/res}")
    before = os.umask(0)
    try:
        assert cli_of()("run", place.folder / "job.yaml").code == 0
    finally:
        os.umask(before)
    made = [place.folder / "out", *(place.folder / "out").rglob("*")]
    state = place.folder / "out/deep/.batchinfer-res"
    assert place.folder / "out/deep/res-report/last_run.json" in made
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert [path for path in made if path.stat().st_mode & 0o022 and state not in path.parents] == []
