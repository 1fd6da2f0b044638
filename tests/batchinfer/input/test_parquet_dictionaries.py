"""Parquet columns that repeat a stored value in several rows are detected by their dictionaries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.input import decompression
from batchinfer.input.formats import parquet_dictionaries
from batchinfer.input.formats.parquet_dictionaries import DoubtfulColumns, doubtful_columns
from batchinfer.input.formats.parquet_footer import ColumnChunk, column_chunks
from tests.examples import examples

WIDE = 64
CELLS = st.lists(st.tuples(st.sampled_from([0, 1, WIDE, WIDE + 1, 5 * WIDE]), st.integers(0, 5)), max_size=9)


def doubtful(path: Path, forged: int | None = None) -> DoubtfulColumns:
    """Inspect a file. `forged`: offset that all chunks claim as their start."""
    with pq.ParquetFile(path) as footer, path.open("rb") as raw:
        chunks: list[ColumnChunk] = column_chunks(raw)
        chunks = [one if forged is None else replace(one, start=forged) for one in chunks]

        def opened(names: object) -> pq.ParquetFile:
            return pq.ParquetFile(path, read_dictionary=names)

        return doubtful_columns(footer, chunks, path.stat().st_size, raw, opened)


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_dictionaries, "WIDE_DICTIONARY", WIDE)
    monkeypatch.setattr(decompression, "_BOMB_BYTES", 1000)
    monkeypatch.setattr(decompression, "_BOMB_RATIO", 2)


OPTIONS = st.fixed_dictionaries(
    {
        "row_group_size": st.sampled_from([1, 17, 1000, 1 << 20]),
        "dictionary_pagesize_limit": st.sampled_from([64, 1 << 20]),
        "data_page_size": st.sampled_from([32, 1 << 20]),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
    }
)


@settings(max_examples=examples(25, 150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=CELLS, times=st.integers(1, 100), nulls=st.integers(0, 40), options=OPTIONS)
def test_nothing_large_is_overlooked(
    tmp_path: Path, small_bounds: None, cells: list[tuple[int, int]], times: int, nulls: int, options: Any
) -> None:
    own = [chr(97 + letter) * size for size, letter in cells]
    column = pa.array([None] * nulls + own * times, pa.string())
    path = tmp_path / "a.parquet"
    table = pa.table({"a": column, "b": pa.array([own] * len(column), pa.list_(pa.string()))})
    pq.write_table(table, path, **options)
    found, longest = doubtful(path), max(map(len, own), default=0)
    if options["dictionary_pagesize_limit"] > 64 and longest > WIDE:  # all values are in dictionaries
        assert "a" in found.wide
    size = path.stat().st_size
    for name in table.schema.names:
        held = decompression.column_size(table.column(name).combine_chunks())
        if decompression.is_bomb(
            size, held - 16 * len(column)
        ):  # up to 16 bytes per row are offsets and null bitmaps
            assert any(one.split(".")[0] == name for one in found.shared)


def test_short_values_are_not_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    words = [f"word {number:06d}" for number in range(30_000)]  # a dictionary of half a megabyte
    pq.write_table(pa.table({"a": words * 10, "b": [["x"]] * 300_000}), path, row_group_size=100_000)
    found = doubtful(path)
    assert not found.wide
    assert not found.shared


@pytest.mark.parametrize("where", ["a page of data", "no page", "after the file"])
def test_a_chunk_that_does_not_begin_with_its_dictionary_is_doubtful(tmp_path: Path, where: str) -> None:
    path = tmp_path / "a.parquet"
    words = [f"word {number:06d}" for number in range(30_000)]
    pq.write_table(pa.table({"a": words * 2}), path)
    data = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    forged = {"a page of data": data, "no page": 1, "after the file": 1 << 40}[where]
    assert doubtful(path, forged).wide == {"a"}


def test_a_dictionary_of_one_value_is_doubtful(tmp_path: Path, small_bounds: None) -> None:
    path = tmp_path / "a.parquet"
    for values, wide in ((1, {"a"}), (2, set[str]())):
        words = ["x" * (WIDE - number) for number in range(values)]
        pq.write_table(pa.table({"a": words * 3000}), path, compression="none")
        assert doubtful(path).wide == wide


@pytest.mark.parametrize("first", ["a", "a.b"])
def test_a_field_is_not_confused_with_a_column_named_like_its_path(
    tmp_path: Path, small_bounds: None, first: str
) -> None:
    """Field `b` of column `a` and a column named `a.b` have the same path. Only the field has long values."""
    path = tmp_path / "a.parquet"
    short, long = ["x", "y"] * 3000, ["x" * 5 * WIDE, "y" * 5 * WIDE] * 3000
    columns = {"a.b": pa.array(short), "a": pa.array([{"b": one} for one in long])}
    names = sorted(columns, key=lambda name: name != first)
    pq.write_table(pa.table({name: columns[name] for name in names}), path, compression="none")
    found = doubtful(path)
    assert found.shared == {"a.b"}
    assert found.wide == {"a.b"}
