"""Memory limits of input queries, and the message when a query exceeds them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import OutOfMemory
from batchinfer.filesystem import duck
from batchinfer.input import sql as sql_input
from batchinfer.input.sql import materialise
from tests.batchinfer.store.index.ingest_kit import checkpoint, make_job, run


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(40):
        lines = (json.dumps({"text": f"{number} {row}"}) for row in range(2))
        (folder / f"{number:02d}.jsonl").write_text("\n".join(lines))
    return folder


def test_many_tiny_files_fit_by_default(tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB reserves 32 MiB per file; 20 files exceeded a limit of 600 MB. Also with little free memory."""
    monkeypatch.setattr(sql_input, "available_memory", lambda: 1 << 30)
    query = f"select * from '{many}/*.jsonl'"
    file = materialise(query, tmp_path / "job.yaml", tmp_path / "scratch" / "rows.parquet")
    assert pq.read_metadata(file.path).num_rows == 80
    monkeypatch.setattr(sql_input, "available_memory", lambda: 20 << 30)
    assert sql_input.default_memory() == 10 << 30, "half of the available memory"


def test_too_little_memory_names_the_option(tmp_path: Path, many: Path) -> None:
    checkpoint(tmp_path / "model")
    source = {"sql": f"select * from '{many}/*.jsonl'", "sql_memory": 128 << 20}
    job = make_job(tmp_path, prompt={"user": "{{ text }}"}, **source)
    with pytest.raises(OutOfMemory) as caught:
        run(job)
    said = str(caught.value)
    assert "128 MiB that input.sql_memory allows" in said
    assert "input.sql_memory: 1GiB" in said
    assert "are available here" in said
    assert "SET " not in said  # users cannot follow DuckDB's advice: they have no connection
    assert "\n" not in said


def test_what_is_larger_is_spilled(tmp_path: Path) -> None:
    rows = 400_000
    query = f"select i, repeat(chr(97 + (i % 26)::int), 200) as t from range({rows}) r(i) order by hash(i)"
    file = materialise(query, tmp_path / "job.yaml", tmp_path / "scratch" / "rows.parquet", 96 << 20)
    assert pq.read_metadata(file.path).num_rows == rows
    assert {path.name for path in (tmp_path / "scratch").iterdir()} == {"rows.parquet"}


@pytest.mark.parametrize(("available", "taken"), [(64 << 30, 1 << 30), (2 << 30, 512 << 20), (0, 128 << 20)])
def test_internal_queries_take_less_memory_on_small_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, taken: int
) -> None:
    monkeypatch.setattr(duck, "available_memory", lambda: available)
    assert duck.working_memory() == taken
    with duck.connection(tmp_path / "state" / "spill") as database:
        (limit,) = database.execute("select current_setting('memory_limit')").fetchone()
    assert limit in {"1.0 GiB", "512.0 MiB", "128.0 MiB"}


def test_internal_queries_report_their_memory_limit(tmp_path: Path) -> None:
    query = "select list(i) as whole from range(30000000) t(i)"
    with (
        pytest.raises(OutOfMemory, match="a quarter of the memory that is available") as caught,
        duck.connection(tmp_path / "state" / "spill", "64MiB") as database,
    ):
        database.execute(f"create temp table t as {query}")
    assert "SET " not in str(caught.value)
