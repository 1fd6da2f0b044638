"""Tests paths that are not UTF-8: pyarrow and DuckDB do not accept them, and an error says it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer import cli
from batchinfer.core.errors import InputCorrupt, JobFileError, StorageError
from batchinfer.filesystem import duck
from batchinfer.input.files import list_inputs
from batchinfer.job import load_job

CAFE = os.fsdecode(b"caf\xe9")
SHOWN = r"caf\\xe9"
JOB = "name: j\nmodel: {path: model}\ninput: {path: '*.jsonl'}\nprompt: {user: x}\noutput: {path: out}\n"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = tmp_path / CAFE
    folder.mkdir()
    return folder


def test_a_job_file(odd: Path) -> None:
    (odd / "job.yaml").write_text(JOB)
    with pytest.raises(JobFileError, match=rf"{SHOWN}/job\.yaml: .*(\n.*)?not UTF-8.*rename") as caught:
        load_job(odd / "job.yaml")
    str(caught.value).encode("utf-8")


@pytest.mark.parametrize("section", ["model", "out"])
def test_a_link_that_leads_there(tmp_path: Path, odd: Path, section: str) -> None:
    (tmp_path / section).symlink_to(odd)
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(JobFileError, match=r"(model|output)\.path: leads to .*caf.*not UTF-8"):
        load_job(tmp_path / "job.yaml")


def test_an_input_file(tmp_path: Path) -> None:
    (tmp_path / f"{CAFE}.jsonl").write_text("{}\n")
    for pattern in (str(tmp_path), str(tmp_path / "*.jsonl"), str(tmp_path / f"{CAFE}.jsonl")):
        with pytest.raises(InputCorrupt, match=rf"{SHOWN}\.jsonl: the name of the file .* rename it"):
            list_inputs(pattern, tmp_path)


def test_a_folder_for_duckdb(odd: Path) -> None:
    with pytest.raises(StorageError, match=rf"{SHOWN}.*not UTF-8"), duck.connection(odd / "spill"):
        raise AssertionError("opened")
    with pytest.raises(StorageError, match=rf"{SHOWN}.*not UTF-8"):
        duck.parquet([odd / "x.parquet"])


def test_a_query_of_a_result_with_such_a_path(odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message shows bytes, not Python's surrogates."""
    assert cli._guarded(["query", str(odd), "select 1"]) == 66
    assert r"/caf\xe9: no published result there" in capsys.readouterr().err
