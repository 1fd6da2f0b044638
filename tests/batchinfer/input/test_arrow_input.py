"""Arrow IPC files and streams: accepted inputs, errors of rows, errors of jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather

from batchinfer.core.errors import InputCorrupt, OutOfMemory
from batchinfer.input.formats import arrow
from tests.batchinfer.input.test_reader import read
from tests.batchinfer.store.index.ingest_kit import carried, checkpoint, make_job, run

ROWS = [{"id": i, "text": f"word {i}", "tags": ["a", "b"][: i % 3]} for i in range(2000)]
TABLE = pa.Table.from_pylist(ROWS)


def as_file(
    path: Path,
    table: pa.Table,
    compression: str | None = None,
    rows: int | None = None,
    new: Callable[..., Any] = pa.ipc.new_file,
) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with new(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


as_stream = partial(as_file, new=pa.ipc.new_stream)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("write", [as_file, as_stream])
def test_rows_in_order(tmp_path: Path, write: Callable[..., Path], compression: str | None) -> None:
    path = write(tmp_path / "x.arrow", TABLE, compression, 700)
    assert read(path) == ROWS
    assert read(path, columns=["text"]) == [{"text": row["text"]} for row in ROWS]


def test_the_layout_is_detected_from_the_content(tmp_path: Path) -> None:
    feather.write_feather(TABLE, tmp_path / "x.feather")
    assert read(tmp_path / "x.feather") == ROWS
    for name in ("x.ipc", "x.arrows", "nothing-known"):
        assert read(as_file(tmp_path / name, TABLE)) == ROWS
        assert read(as_stream(tmp_path / name, TABLE)) == ROWS
    assert read(as_file(tmp_path / "none.arrow", TABLE.slice(0, 0))) == []


def test_types_of_all_kinds(tmp_path: Path) -> None:
    table = pa.table({
        "word": pa.array(["x", None, "y"]).dictionary_encode(),
        "number": pa.array([7, 8, 7]).dictionary_encode(),
        "view": pa.array(["a" * 40, None, "ü"], pa.string_view()),
        "large": pa.array(["a", "b", None], pa.large_string()),
        "when": pa.array([0, 1, None], pa.timestamp("ns")),
        "nested": pa.array([{"a": [1]}, None, {"a": None}]),
    })  # fmt: skip
    path = as_file(tmp_path / "x.arrow", table)
    rows = read(path)
    assert [row["view"] for row in rows] == ["a" * 40, None, "ü"]
    assert [(row["word"], row["number"]) for row in rows] == [("x", 7), (None, 8), ("y", 7)]
    checkpoint(tmp_path / "model")
    job = make_job(tmp_path, prompt={"user": "{{ row }}"}, columns=tuple(table.column_names), path=str(path))
    kept = carried(run(job))
    assert kept["view"].to_pylist() == ["a" * 40, None, "ü"]
    assert kept["nested"].to_pylist() == table["nested"].to_pylist()


@pytest.mark.parametrize("write", [as_file, as_stream])
def test_a_truncated_file(tmp_path: Path, write: Callable[..., Path]) -> None:
    data = write(tmp_path / "x.arrow", TABLE, None, 700).read_bytes()
    path = tmp_path / "cut.arrow"
    for keep in (5, 40, len(data) // 2, len(data) - 30):
        path.write_bytes(data[:keep])
        if write is as_stream and keep == len(data) - 30:
            continue  # within the last batch's padding nothing may be missing
        with pytest.raises(InputCorrupt, match=r"cut.arrow"):
            read(path)


def test_not_arrow(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"id,text\n1,a\n")
    with pytest.raises(InputCorrupt, match=r"x.arrow: not an Arrow file or stream"):
        read(tmp_path / "x.arrow")


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_too_large_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None) -> None:
    path = as_file(tmp_path / "x.arrow", TABLE, compression)
    monkeypatch.setattr(arrow, "available_memory", lambda: 20_000)
    with pytest.raises(OutOfMemory, match=r"record batch 0 takes .* max_chunksize=10000"):
        read(path)
    small = as_file(tmp_path / "small.arrow", TABLE, compression, 100)
    assert read(small) == ROWS


def test_a_type_that_cannot_be_read(tmp_path: Path) -> None:
    views = pa.ListViewArray.from_arrays([0, 1], [1, 1], pa.array([1, 2]))
    path = as_file(tmp_path / "x.arrow", pa.table({"odd": views, "text": ["a", "b"]}))
    assert read(path, columns=["text"]) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(InputCorrupt, match=r"column 'odd' has the type list_view"):
        read(path)
