"""Small files that claim to hold very much are refused before the first row; honest repetition is read."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import BatchInferError, InputCorrupt
from batchinfer.input.files import list_inputs
from batchinfer.input.formats.parquet_footer import BYTE_ARRAY, column_chunks
from batchinfer.input.reader import Reader
from batchinfer.input.sql import materialise
from batchinfer.input.unpacked import column_size


def as_parquet(path: Path, table: pa.Table, **options: Any) -> Path:
    pq.write_table(table, path, compression="zstd", **options)
    return path


def as_arrow(path: Path, table: pa.Table) -> Path:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=100_000)
    return path


def dictionary(bytes_each: int, rows: int) -> pa.Array:
    value = pa.array(["x" * bytes_each])
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), value)


def in_lists(values: pa.Array, each: int) -> pa.Array:
    offsets = pa.array(np.arange(0, len(values) + 1, each, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, values)


def views(bytes_each: int, rows: int) -> pa.Array:
    """All of them show the same bytes."""
    one = np.array([bytes_each, int.from_bytes(b"xxxx", "little"), 0, 0], np.int32)
    shown = pa.py_buffer(np.tile(one, rows).tobytes())
    return pa.Array.from_buffers(pa.string_view(), rows, [None, shown, pa.py_buffer(b"x" * bytes_each)])


def no_columns(rows: int) -> pa.Table:
    return pa.table({"a": pa.nulls(rows)})


MANY = 40_000_000
WIDE = b"x" * (1 << 20)
BOMBS: dict[str, tuple[str, Callable[[], pa.Table]]] = {
    "a dictionary's value in many rows": ("parquet", lambda: pa.table({"a": dictionary(100 << 10, 4096)})),
    "a short value in very many rows": ("parquet", lambda: pa.table({"a": dictionary(200, 2_000_000)})),
    "in lists": ("parquet", lambda: pa.table({"a": in_lists(dictionary(100 << 10, 4096), 16)})),
    "in a struct": ("parquet", lambda: pa.table({"a": pa.StructArray.from_arrays([dictionary(1 << 20, 400)], ["b"])})),
    "rows of nulls": ("parquet", lambda: pa.table({"a": pa.nulls(5_000_000, pa.string())})),
    "one row of many nulls": ("parquet", lambda: pa.table({"a": in_lists(pa.nulls(MANY, pa.string()), MANY)})),
    "values of a fixed size": ("parquet", lambda: pa.table({"a": pa.array([WIDE] * 400, pa.binary(1 << 20))})),
    "nulls of a fixed size": ("parquet", lambda: pa.table({"a": pa.nulls(400, pa.binary(1 << 20))})),
    "an arrow dictionary": ("arrow", lambda: pa.table({"a": dictionary(1 << 20, 200_000)})),
    "an arrow dictionary in a struct": (
        "arrow", lambda: pa.table({"a": pa.StructArray.from_arrays([dictionary(1 << 20, 4000)], ["b"])})
    ),
    "an arrow dictionary in lists": ("arrow", lambda: pa.table({"a": in_lists(dictionary(1 << 20, 4000), 10)})),
    "arrow views": ("arrow", lambda: pa.table({"a": views(1 << 20, 4000)})),
    "arrow rows of nothing": ("arrow", lambda: no_columns(100_000_000)),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_refused_before_the_first_row(tmp_path: Path, kind: str) -> None:
    form, made = BOMBS[kind]
    path = (as_parquet if form == "parquet" else as_arrow)(tmp_path / f"x.{form}", made())
    assert path.stat().st_size < 2_000_000
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(InputCorrupt, match=rf"x\.{form}: .* would unpack to .* decompression bomb"):
        next(Reader.open(list_inputs(str(path), tmp_path)).batches())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert pa.total_allocated_bytes() - before < 64 << 20


def test_a_value_that_is_wider_than_any_row(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "x.parquet", pa.table({"a": pa.nulls(2, pa.binary(1 << 25))}))
    with pytest.raises(
        InputCorrupt, match="column 'a': every value takes 33,554,432 bytes; at most 16,777,216"
    ):
        next(Reader.open(list_inputs(str(path), tmp_path)).batches())


def test_a_packed_line_without_end(tmp_path: Path) -> None:
    """gzip packs no more than 1,032-fold, zstd 30,000-fold."""
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(pa.compress(b"x" * (300 << 20), "zstd", asbytes=True))
    with pytest.raises(InputCorrupt, match="decompression bomb"):
        list(Reader.open(list_inputs(str(path), tmp_path)).batches())


def hashes(count: int) -> list[str]:
    """Texts that nothing packs."""
    source = random.Random(1)
    return [source.randbytes(9).hex() for _ in range(count)]


HONEST: dict[str, tuple[str, Callable[[], pa.Table]]] = {
    "one system prompt in all rows": (
        "parquet",
        lambda: pa.table({"s": dictionary(3000, 100_000), "t": hashes(100_000)}),
    ),
    "few labels in many rows": (
        "arrow", lambda: pa.table({"a": pa.array(["yes", "no"] * 200_000).dictionary_encode()})
    ),
    "a short table of one text": ("parquet", lambda: pa.table({"a": dictionary(2000, 50_000)})),
}  # fmt: skip


@pytest.mark.parametrize("kind", HONEST)
def test_honest_repetition_is_read(tmp_path: Path, kind: str) -> None:
    form, made = HONEST[kind]
    table = made()
    path = (as_parquet if form == "parquet" else as_arrow)(tmp_path / f"x.{form}", table)
    reader = Reader.open(list_inputs(str(path), tmp_path))
    assert next(reader.batches()).rows[0] == table.slice(0, 1).to_pylist()[0]


def test_the_rows_of_a_query_may_be_so(tmp_path: Path) -> None:
    """Many answers to one prompt: the job's own file of 200,000 equal rows is no bomb."""
    query = "select repeat('x', 2000) as a from range(200000)"
    file = materialise(query, tmp_path / "job.yaml", tmp_path / "scratch" / "rows.parquet")
    assert file.size < 300_000
    assert len(next(Reader.open([file]).batches()).rows) > 0


def test_sizes_are_those_of_unpacked_values() -> None:
    words = pa.array(["abc", None, "x" * 100, ""])
    packed = words.dictionary_encode()
    for column in (packed, packed.slice(1), packed.slice(2, 1)):
        assert column_size(column) == sum(len(one or "") for one in column.to_pylist())
    assert column_size(words.cast(pa.string_view()).slice(2)) == 100
    nested = pa.StructArray.from_arrays([in_lists(packed, 2)], ["b"])
    assert column_size(nested) >= 103
    assert column_size(pa.array([[("k", "v" * 50)]], pa.map_(pa.string(), pa.string()))) >= 51


def mutated(good: bytes, source: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(source.randrange(1, 5)):
        at = source.randrange(len(data))
        match source.randrange(4):
            case 0:
                data[at] ^= 1 << source.randrange(8)
            case 1:
                data[at] = source.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del data[at : at + source.randrange(1, 20)]
            case _:
                data[at:at] = source.randbytes(source.randrange(1, 9))
        data = data or bytearray(b"x")
    return bytes(data)


def read_mutants(folder: Path, seeds: range) -> None:
    """Rows, or an error of ours that names the file: nothing else, and not more than the file could hold."""
    table = pa.table({
        "t": pa.array(["a", "b", None] * 30).dictionary_encode(),
        "l": pa.array([["x"], None, ["y", "z"]] * 30),
        "n": list(range(90)),
        "s": pa.array([{"b": 1}, None, {"b": 2}] * 30),
    })  # fmt: skip
    good = {"parquet": as_parquet(folder / "x.parquet", table).read_bytes()}
    good["arrow"] = as_arrow(folder / "x.arrow", table).read_bytes()
    for seed in seeds:
        source = random.Random(seed)
        form = source.choice(["parquet", "arrow"])
        path = folder / f"bad.{form}"
        path.write_bytes(mutated(good[form], source))
        found = rows_or_error(path)
        assert found < 10_000 if isinstance(found, int) else found.exit_code in (65, 71, 74), (seed, found)
        assert isinstance(found, int) or "bad." in str(found), (seed, found)


def rows_or_error(path: Path) -> int | BatchInferError:
    try:
        return sum(len(batch.rows) for batch in Reader.open(list_inputs(str(path), path.parent)).batches())
    except BatchInferError as error:
        return error


def test_mutants(tmp_path: Path) -> None:
    read_mutants(tmp_path, range(300))


@pytest.mark.slow
def test_many_mutants(tmp_path: Path) -> None:
    read_mutants(tmp_path, range(1000, 11_000))


@pytest.mark.parametrize(
    "options", [{}, {"version": "1.0"}, {"use_dictionary": False}, {"row_group_size": 7}]
)
def test_a_footer_as_pyarrow_reads_it(tmp_path: Path, options: dict[str, Any]) -> None:
    table = pa.table({"t": ["a", None] * 20, "n": list(range(40)), "s": [{"b": [1.5], "c": "x"}] * 40})
    path = as_parquet(tmp_path / "x.parquet", table, **options)
    metadata = pq.read_metadata(path)
    theirs = [metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(4)]
    with path.open("rb") as raw:
        ours = column_chunks(raw)
    assert [(one.values, one.unpacked, one.packed, one.dictionary) for one in ours] == [
        (one.num_values, one.total_uncompressed_size, one.total_compressed_size, one.has_dictionary_page)
        for one in theirs
    ]
    assert [one.kind == BYTE_ARRAY for one in ours] == [one.physical_type == "BYTE_ARRAY" for one in theirs]
