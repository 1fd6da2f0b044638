"""Small files that claim to be huge are refused before the first row. Real repetition is read."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import BatchInferError, InputCorrupt
from batchinfer.input import decompression
from batchinfer.input.decompression import column_size
from batchinfer.input.files import list_inputs
from batchinfer.input.formats.parquet_footer import BYTE_ARRAY, column_chunks
from batchinfer.input.reader import Reader
from batchinfer.input.sql import materialise
from tests.examples import examples


def as_parquet(path: Path, table: pa.Table, **options: Any) -> Path:
    pq.write_table(table, path, compression="zstd", **options)
    return path


def as_arrow(path: Path, table: pa.Table, compression: str | None = "zstd") -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=100_000)
    return path


# By the end of a file's name
WRITERS = {
    "parquet": as_parquet,
    "plain.parquet": partial(as_parquet, use_dictionary=False),
    "arrow": as_arrow,
}


@pytest.fixture
def small_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit for suspected bombs from 256 to 16 MiB uncompressed."""
    monkeypatch.setattr(decompression, "_BOMB_BYTES", 16 << 20)


def dictionary(bytes_each: int, rows: int) -> pa.Array:
    value = pa.array(["x" * bytes_each])
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), value)


def in_lists(values: pa.Array, each: int) -> pa.Array:
    offsets = pa.array(np.arange(0, len(values) + 1, each, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, values)


def views(bytes_each: int, rows: int) -> pa.Array:
    """Return an array whose rows all view the same bytes."""
    one = np.array([bytes_each, int.from_bytes(b"xxxx", "little"), 0, 0], np.int32)
    shown = pa.py_buffer(np.tile(one, rows).tobytes())
    return pa.Array.from_buffers(pa.string_view(), rows, [None, shown, pa.py_buffer(b"x" * bytes_each)])


def in_struct(values: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([values], ["b"])


MANY = 2_500_000
WIDE = b"x" * (1 << 20)
BOMBS: dict[str, tuple[str, Callable[[], pa.Array]]] = {
    "a dictionary's value in many rows": ("parquet", lambda: dictionary(100 << 10, 256)),
    "a short value in very many rows": ("parquet", lambda: dictionary(200, 125_000)),
    "in lists": ("parquet", lambda: in_lists(dictionary(100 << 10, 256), 16)),
    "in a struct": ("parquet", lambda: in_struct(dictionary(1 << 20, 25))),
    "rows of nulls": ("parquet", lambda: pa.nulls(312_500, pa.string())),
    "one row of many nulls": ("parquet", lambda: in_lists(pa.nulls(MANY, pa.string()), MANY)),
    "values of a fixed size": ("parquet", lambda: pa.array([WIDE] * 25, pa.binary(1 << 20))),
    "nulls of a fixed size": ("parquet", lambda: pa.nulls(25, pa.binary(1 << 20))),
    "a page that packs well": ("plain.parquet", lambda: pa.array([WIDE * 20])),
    "an arrow value that packs well": ("arrow", lambda: pa.array([WIDE * 20])),
    "an arrow dictionary": ("arrow", lambda: dictionary(1 << 20, 200_000)),
    "an arrow dictionary in a struct": ("arrow", lambda: in_struct(dictionary(1 << 20, 250))),
    "an arrow dictionary in lists": ("arrow", lambda: in_lists(dictionary(1 << 20, 250), 10)),
    "arrow views": ("arrow", lambda: views(1 << 20, 250)),
    "arrow rows of nothing": ("arrow", lambda: pa.nulls(6_250_000)),
}  # fmt: skip


@pytest.mark.usefixtures("small_bombs")
@pytest.mark.parametrize("kind", BOMBS)
def test_refused_before_the_first_row(tmp_path: Path, kind: str) -> None:
    form, made = BOMBS[kind]
    path = WRITERS[form](tmp_path / f"x.{form}", pa.table({"a": made()}))
    assert path.stat().st_size < 125_000
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(InputCorrupt, match=rf"x\.{form}: .* would unpack to .* decompression bomb"):
        next(Reader.open(list_inputs(str(path), tmp_path)).batches())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert pa.total_allocated_bytes() - before < 4 << 20


def test_a_value_that_is_wider_than_any_row(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "x.parquet", pa.table({"a": pa.nulls(2, pa.binary(1 << 25))}))
    with pytest.raises(InputCorrupt, match="column 'a': every value takes 33,554,432 bytes; at most"):
        next(Reader.open(list_inputs(str(path), tmp_path)).batches())


@pytest.mark.usefixtures("small_bombs")
def test_a_packed_line_without_end(tmp_path: Path) -> None:
    """gzip packs at most 1,032-fold, zstd 30,000-fold."""
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(pa.compress(b"x" * (20 << 20), "zstd", asbytes=True))
    with pytest.raises(InputCorrupt, match="decompression bomb"):
        list(Reader.open(list_inputs(str(path), tmp_path)).batches())


def hashes(count: int) -> list[str]:
    """Return incompressible texts."""
    source = random.Random(1)
    return [source.randbytes(9).hex() for _ in range(count)]


HONEST: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "one system prompt in all rows": ("parquet", lambda: {"s": dictionary(3000, 6000), "t": hashes(6000)}),
    "few labels in many rows": ("arrow", lambda: {"a": pa.array(["yes", "no"] * 12_000).dictionary_encode()}),
    "a short table of one text": ("parquet", lambda: {"a": dictionary(2000, 3000)}),
}


@pytest.mark.usefixtures("small_bombs")
@pytest.mark.parametrize("kind", HONEST)
def test_honest_repetition_is_read(tmp_path: Path, kind: str) -> None:
    form, made = HONEST[kind]
    table = pa.table(made())
    path = WRITERS[form](tmp_path / f"x.{form}", table)
    reader = Reader.open(list_inputs(str(path), tmp_path))
    assert next(reader.batches()).rows[0] == table.slice(0, 1).to_pylist()[0]


@pytest.mark.usefixtures("small_bombs")
def test_a_query_may_return_many_equal_rows(tmp_path: Path) -> None:
    query = "select repeat('x', 2000) as a from range(12000)"
    file = materialise(query, tmp_path / "job.yaml", tmp_path / "scratch" / "rows.parquet")
    assert file.size < 20_000
    assert len(next(Reader.open([file]).batches()).rows) > 0


def test_sizes_are_those_of_expanded_values() -> None:
    words = pa.array(["abc", None, "x" * 100, ""])
    encoded = words.dictionary_encode()
    for column in (encoded, encoded.slice(1), encoded.slice(2, 1)):
        assert column_size(column) == sum(len(one or "") for one in column.to_pylist())
    assert column_size(words.cast(pa.string_view()).slice(2)) == 100
    nested = pa.StructArray.from_arrays([in_lists(encoded, 2)], ["b"])
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


def rows_or_error(path: Path) -> int | BatchInferError:
    try:
        return sum(len(batch.rows) for batch in Reader.open(list_inputs(str(path), path.parent)).batches())
    except BatchInferError as error:
        return error


def test_mutated_files_give_rows_or_an_error_that_names_the_file(tmp_path: Path) -> None:
    """The number of rows never exceeds the capacity of the file."""
    table = pa.table({
        "t": pa.array(["a", "b", None] * 30).dictionary_encode(),
        "l": pa.array([["x"], None, ["y", "z"]] * 30),
        "n": list(range(90)),
        "s": pa.array([{"b": 1}, None, {"b": 2}] * 30),
    })  # fmt: skip
    good = {form: write(tmp_path / f"x.{form}", table).read_bytes() for form, write in WRITERS.items()}
    good["plain.arrow"] = as_arrow(tmp_path / "x.arrow", table, None).read_bytes()
    for seed in range(examples(300, 10_000)):
        source = random.Random(seed)
        form = source.choice([*good])
        path = tmp_path / f"bad.{form}"
        path.write_bytes(mutated(good[form], source))
        found = rows_or_error(path)
        assert found < 10_000 if isinstance(found, int) else found.exit_code in (65, 71, 74), (seed, found)
        assert isinstance(found, int) or "bad." in str(found), (seed, found)


@pytest.mark.parametrize("more", [{}, {"version": "1.0"}, {"use_dictionary": False}, {"row_group_size": 7}])
def test_a_footer_as_pyarrow_reads_it(tmp_path: Path, more: dict[str, Any]) -> None:
    table = pa.table({"t": ["a", None] * 20, "n": list(range(40)), "s": [{"b": [1.5], "c": "x"}] * 40})
    path = as_parquet(tmp_path / "x.parquet", table, **more)
    metadata = pq.read_metadata(path)
    theirs = [metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(4)]
    with path.open("rb") as raw:
        ours = column_chunks(raw)
    assert [(one.values, one.uncompressed, one.compressed, one.dictionary) for one in ours] == [
        (one.num_values, one.total_uncompressed_size, one.total_compressed_size, one.has_dictionary_page)
        for one in theirs
    ]
    assert [one.kind == BYTE_ARRAY for one in ours] == [one.physical_type == "BYTE_ARRAY" for one in theirs]
