"""The table `rows`: work keys of the requests, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.report.tables import row_keys
from batchinfer.report.tables.columns.declared import ROWS, SCHEMAS
from batchinfer.report.tables.row_keys import RowKeysWriter, hexadecimal, write_rows

KEYS = [bytes([n]) * 32 for n in range(10)]


def index_part(path: Path, first: int, keys: list[bytes | None]) -> Path:
    rows = pa.array(range(first, first + len(keys)), pa.int64())
    pq.write_table(
        pa.table({"row_id": rows, "key": pa.array(keys, pa.binary(32)), "file": ["x"] * len(keys)}), path
    )
    return path


def test_every_row_with_a_key_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_keys, "BATCH_ROWS", 2)
    parts = [
        index_part(tmp_path / "a", 0, [KEYS[0], None, KEYS[1], KEYS[0], None]),
        index_part(tmp_path / "b", 5, [None, None]),
        index_part(tmp_path / "c", 7, []),
        index_part(tmp_path / "d", 7, [KEYS[9]]),
    ]
    table = pq.read_table(write_rows(tmp_path / "report", "run-1", parts))
    assert table.schema.equals(SCHEMAS[ROWS])
    assert table.to_pylist() == [
        {"run_id": "run-1", "row_id": row, "key": KEYS[n].hex()}
        for row, n in ((0, 0), (2, 1), (3, 0), (7, 9))
    ]


def test_a_slice_of_keys_is_its_own_text() -> None:
    keys = pa.array(KEYS, pa.binary(32))
    assert hexadecimal(keys.slice(3, 4)).to_pylist() == [key.hex() for key in KEYS[3:7]]
    assert hexadecimal(keys.slice(0, 0)).to_pylist() == []


def test_rows_written_in_a_thread_are_complete_when_finish_returns(tmp_path: Path) -> None:
    parts = [
        index_part(tmp_path / "a", 0, [KEYS[0], None, KEYS[1]]),
        index_part(tmp_path / "b", 3, [KEYS[2]]),
    ]
    wanted = pq.read_table(write_rows(tmp_path / "wanted", "run-1", parts))
    with RowKeysWriter(tmp_path / "report", "run-1", parts, "row_id") as table:
        assert not [*(tmp_path / "report").glob("*.parquet")], "the table is not visible yet"
        path = table.finish()
    assert pq.read_table(path).equals(wanted)


def test_a_failure_leaves_no_files(tmp_path: Path) -> None:
    """Damaged parts raise an error at the end of a thread. Other work may fail at the same time."""
    report, broken = tmp_path / "report", tmp_path / "broken"
    broken.write_bytes(b"PAR1 no")
    parts = [index_part(tmp_path / "a", 0, KEYS), broken]
    with pytest.raises(pa.ArrowInvalid):
        write_rows(report, "run-1", parts)
    with RowKeysWriter(report, "run-1", parts, "row_id") as table, pytest.raises(pa.ArrowInvalid):
        table.finish()
    with pytest.raises(ZeroDivisionError), RowKeysWriter(report, "run-1", parts[:1], "row_id"):
        raise ZeroDivisionError
    assert list(report.iterdir()) == []
