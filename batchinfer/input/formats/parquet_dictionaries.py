"""Finds the dictionary-encoded columns of a Parquet file that may expand to much more than their stored size.

The footer has the size of a column chunk, but not the length of the longest dictionary value. That is in the first
page of the chunk, so it can be found without reading the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.input.decompression import is_bomb, longest_value
from batchinfer.input.formats.parquet_footer import BYTE_ARRAY, ColumnChunk, dictionary_values
from batchinfer.input.protocol import BATCH_ROWS

WIDE_DICTIONARY = 128 << 10  # a dictionary value of this size, repeated in 512 rows, is 64 MiB
_BATCH_BYTES = 64 << 20
_INDEX_BYTES = 4  # of a dictionary index
# Maximum rows per batch. Each batch includes whole dictionaries, so batches of 512 rows take ten times as long
_PROBED_ROWS = 1 << 16
_FIRST_ROWS = 16  # rows of a chunk that are searched for a value that is not null

OpenWithDictionaries = Callable[[Sequence[str]], pq.ParquetFile]


@dataclass(frozen=True, slots=True)
class DoubtfulColumns:
    """The columns of a Parquet file whose uncompressed size is only known after reading their values.

    A dictionary value is stored once, but takes memory in each row that repeats it.

    Args:
        wide: The names of top-level columns that may have very large values.
        shared: The paths of columns that may expand to far more than the file's size.
        rows_at_once: The number of rows to read at a time while values are still dictionary-encoded.
    """

    wide: frozenset[str]
    shared: frozenset[str]
    rows_at_once: int


def doubtful_columns(
    footer: pq.ParquetFile,
    chunks: Sequence[ColumnChunk],
    size: int,
    raw: BinaryIO,
    opened: OpenWithDictionaries,
) -> DoubtfulColumns:
    """Find the columns that may expand to a dangerous size, by the footer and the longest dictionary values.

    Args:
        footer: The open Parquet file.
        chunks: The column chunks in its footer.
        size: The size of the file in bytes.
        raw: The same file as bytes.
        opened: A function that opens the file so that the columns with the given names stay dictionary-encoded.
    """
    paths = [footer.metadata.schema.column(at).path for at in range(footer.metadata.num_columns)]
    own = [(chunk, paths[chunk.column]) for chunk in chunks if chunk.kind == BYTE_ARRAY and chunk.dictionary]
    sizes = [chunk.uncompressed for chunk, _ in own]
    wide, shared = _classify(own, sizes, size)
    if wide or shared:
        inside = opened(sorted(wide | shared))
        names = (wide | shared) & {*footer.schema_arrow.names}
        sizes = [_longest(raw, inside, *one) if one[1] in names else one[0].uncompressed for one in own]
        wide, shared = _classify(own, sizes, size)
    rows = [max(1, footer.metadata.row_group(chunk.group).num_rows) for chunk, _ in own]
    widest = (
        max(
            (chunk.uncompressed + _INDEX_BYTES * chunk.values) // count
            for (chunk, _), count in zip(own, rows, strict=True)
        )
        if own
        else 1
    )
    at_once = max(BATCH_ROWS, min(_PROBED_ROWS, _BATCH_BYTES // max(1, widest)))
    return DoubtfulColumns(frozenset(wide & {*footer.schema_arrow.names}), frozenset(shared), at_once)


def _classify(
    chunks: Sequence[tuple[ColumnChunk, str]], longest: Sequence[int], size: int
) -> tuple[set[str], set[str]]:
    wide, most = set[str](), dict[str, int]()
    for (chunk, name), value in zip(chunks, longest, strict=True):
        if value > WIDE_DICTIONARY:
            wide.add(name)
        most[name] = most.get(name, 0) + value * chunk.values + chunk.uncompressed
    return wide, {name for name, bytes_ in most.items() if is_bomb(size, bytes_)}


def _longest(raw: BinaryIO, file: pq.ParquetFile, chunk: ColumnChunk, name: str) -> int:
    # Reading one row loads the whole dictionary. It only counts if it has the number of values in the page header, and
    # at least two: then it is really the first page. If a struct's field and a column have the same path, both are
    # read, and neither counts.
    values = dictionary_values(raw, chunk)
    if values is None or values < 2:
        return chunk.uncompressed
    try:
        for batch in islice(_rows(file, chunk, name), _FIRST_ROWS):
            if batch.num_columns > 1:
                break
            column = batch.column(0)
            if pa.types.is_dictionary(column.type) and len(column.dictionary) == values:
                return longest_value(column)
    except (pa.ArrowException, OSError):
        return chunk.uncompressed  # the damage is reported when the rows are read
    return chunk.uncompressed


def _rows(file: pq.ParquetFile, chunk: ColumnChunk, name: str) -> Iterator[pa.RecordBatch]:
    yield from file.iter_batches(1, row_groups=[chunk.group], columns=[name], use_threads=False)
