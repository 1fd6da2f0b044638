"""Finds the columns of a Parquet file of which one stored value may stand in many rows: those with dictionaries.

A footer says how many bytes a column chunk has, but not how long the longest value of its dictionary is. This is in the
first page of the chunk, so that the rows need not be read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.input.formats.parquet_footer import BYTE_ARRAY, ColumnChunk, dictionary_values
from batchinfer.input.protocol import BATCH_ROWS
from batchinfer.input.unpacked import is_bomb, longest_value

WIDE_DICTIONARY = 128 << 10  # a dictionary value of this size, repeated in 512 rows, is 64 MiB
_BATCH_BYTES = 64 << 20
_INDEX_BYTES = 4  # of a value's place in a dictionary
# Each batch has whole dictionaries, so that 512 rows at once take ten times as long
_PROBED_ROWS = 1 << 16
_FIRST_ROWS = 16  # of a chunk, one of which has a value mostly

Opened = Callable[[Sequence[str]], pq.ParquetFile]


@dataclass(frozen=True, slots=True)
class DoubtfulColumns:
    """Columns whose rows have to be looked at: `wide` ones at the top, of which a value may be large, and the paths of
    those that may hold more in all than such a file should (`shared`). `rows_at_once`: so many have some 64 MiB of
    them, packed."""

    wide: frozenset[str]
    shared: frozenset[str]
    rows_at_once: int


def doubtful_columns(
    footer: pq.ParquetFile, chunks: Sequence[ColumnChunk], size: int, raw: BinaryIO, opened: Opened
) -> DoubtfulColumns:
    """Return those of a file of `size` bytes, which `raw` reads, and which `opened` opens so that these columns keep
    their dictionaries. Values are looked at where the footer does not say enough."""
    paths = [footer.metadata.schema.column(at).path for at in range(footer.metadata.num_columns)]
    own = [(chunk, paths[chunk.column]) for chunk in chunks if chunk.kind == BYTE_ARRAY and chunk.dictionary]
    sizes = [chunk.unpacked for chunk, _ in own]
    wide, shared = _named(own, sizes, size)
    if wide or shared:
        inside = opened(sorted(wide | shared))
        names = (wide | shared) & {*footer.schema_arrow.names}
        sizes = [_longest(raw, inside, *one) if one[1] in names else one[0].unpacked for one in own]
        wide, shared = _named(own, sizes, size)
    rows = [max(1, footer.metadata.row_group(chunk.group).num_rows) for chunk, _ in own]
    widest = (
        max(
            (chunk.unpacked + _INDEX_BYTES * chunk.values) // count
            for (chunk, _), count in zip(own, rows, strict=True)
        )
        if own
        else 1
    )
    at_once = max(BATCH_ROWS, min(_PROBED_ROWS, _BATCH_BYTES // max(1, widest)))
    return DoubtfulColumns(frozenset(wide & {*footer.schema_arrow.names}), frozenset(shared), at_once)


def _named(
    chunks: Sequence[tuple[ColumnChunk, str]], longest: Sequence[int], size: int
) -> tuple[set[str], set[str]]:
    """Return the columns in which a value may be large, and those that may hold more than a file of that size should.
    `longest`: at most so many bytes has a value of each chunk's dictionary; what is in no dictionary stands in the
    chunk itself."""
    wide, most = set[str](), dict[str, int]()
    for (chunk, name), value in zip(chunks, longest, strict=True):
        if value > WIDE_DICTIONARY:
            wide.add(name)
        most[name] = most.get(name, 0) + value * chunk.values + chunk.unpacked
    return wide, {name for name, bytes_ in most.items() if is_bomb(size, bytes_)}


def _longest(raw: BinaryIO, file: pq.ParquetFile, chunk: ColumnChunk, name: str) -> int:
    """Return the bytes of the longest value of a chunk's dictionary: at most those of the chunk.

    A row's value is read, and all of the dictionary with it. It counts if it has as many values as the first page says,
    several: another page than the dictionary, read first, would have brought one. A field of a struct may have the path
    that is another column's name: then both are read, and neither counts."""
    values = dictionary_values(raw, chunk)
    if values is None or values < 2:
        return chunk.unpacked
    try:
        for batch in islice(_rows(file, chunk, name), _FIRST_ROWS):
            if batch.num_columns > 1:
                break
            column = batch.column(0)
            if pa.types.is_dictionary(column.type) and len(column.dictionary) == values:
                return longest_value(column)
    except (pa.ArrowException, OSError):
        return chunk.unpacked  # whoever reads it says what is damaged
    return chunk.unpacked


def _rows(file: pq.ParquetFile, chunk: ColumnChunk, name: str) -> Iterator[pa.RecordBatch]:
    yield from file.iter_batches(1, row_groups=[chunk.group], columns=[name], use_threads=False)
