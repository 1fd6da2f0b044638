"""The rows of a job's input, whatever it is kept in, in bounded batches and in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from batchinfer.core.request import RowError
from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.openai import looks_like_openai
from batchinfer.data.input.protocol import DEFAULT_TEXT, FormatReader, ReadOptions, TextOptions
from batchinfer.data.input.registry import by_name
from batchinfer.data.input.rows import RowBatch
from batchinfer.data.input.typed_rows import check_same_schema, common_schema

Shape = Literal["table", "openai"]


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The size of a sample: of each file its first rows only, and of a file of lines about that many bytes."""

    rows: int
    bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class Strata:
    """A sample of `rows` consecutive rows in the middle of every `stride` rows, over all files."""

    stride: int
    rows: int

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the runs that are taken of `count` rows from the `first` one of all: half-open ranges from 0."""
        begin = (self.stride - self.rows) // 2
        for stratum in range(first // self.stride, (first + count - 1) // self.stride + 1):
            start = stratum * self.stride + begin - first
            run = max(0, start), min(count, start + self.rows)
            if run[0] < run[1]:
                yield run


@dataclass(slots=True)
class Reader:
    """Reads the files one after another; `sha256` fills while `batches()` runs, one digest a file read to its end.

    `complete` tells, after `batches()` has ended, whether all rows were read: no sample has left any out.
    """

    files: tuple[InputFile, ...]
    text: TextOptions
    sha256: dict[str, str]
    sample: SampleSize | None = None
    complete: bool = False
    strata: Strata | None = None  # all rows are read, and only these are handed on

    @classmethod
    def open(
        cls,
        files: Sequence[InputFile],
        text: TextOptions = DEFAULT_TEXT,
        sample: SampleSize | None = None,
        strata: Strata | None = None,
    ) -> Reader:
        """Raises InputCorrupt for files that are not what they say, or whose schemas differ."""
        reader = cls(tuple(files), text, {}, sample, strata=strata)
        reader.schema()
        return reader

    def count(self, limit: int | None = None) -> int:
        """How many rows there are, at most `limit`; they are read for it."""
        schema = self.schema()
        narrow = None if schema is None else schema.names[:1]
        return sum(len(batch.rows) for batch in replace(self, strata=None).batches(narrow, limit))

    @property
    def bytes_total(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def values_are_text(self) -> bool:
        """Whether numbers and lists are written as text (CSV)."""
        return any(by_name(file.format).values_are_text for file in self.files)

    def schema(self) -> pa.Schema | None:
        """The columns where the format declares them (Parquet, Arrow, CSV, SQL); None for JSONL and empty CSV."""
        first: tuple[InputFile, pa.Schema] | None = None
        for file in self.files:
            schema = self._one(file, None).schema()
            if schema is not None and first is not None:
                check_same_schema(*first, file, schema)
                first = first[0], common_schema(first[1], schema)
            elif schema is not None:
                first = file, schema
        return None if first is None else first[1]

    def batches(self, columns: Sequence[str] | None = None, limit: int | None = None) -> Iterator[RowBatch]:
        """Rows of all files in order, at most `limit`. `columns` spares Parquet from decoding the others."""
        left = limit
        before = seen = 0
        self.complete = self.strata is None
        for file in self.files:
            for batch in self._of(file, columns):
                batch = replace(batch, bytes_read=before + batch.bytes_read)
                if left is not None:
                    batch = _first_rows(batch, left)
                    left -= len(batch.rows)
                if batch.rows:
                    yield from self._taken(batch, seen)
                    seen += len(batch.rows)
                if left == 0:
                    return  # files that were not read to their end keep no digest: size and time identify them
            before += file.size

    def _taken(self, batch: RowBatch, first: int) -> Iterator[RowBatch]:
        """Yield the parts of a batch that are in the sample; `first` is the number of its first row."""
        if self.strata is None:
            yield batch
            return
        for start, end in self.strata.runs(first, len(batch.rows)):
            table = None if batch.table is None else batch.table.slice(start, end - start)
            yield replace(batch, first_row=batch.first_row + start, rows=batch.rows[start:end], table=table)

    def _of(self, file: InputFile, columns: Sequence[str] | None) -> Iterator[RowBatch]:
        """The rows of one file, or those of them that the sample takes."""
        reader = self._one(file, columns)
        left = self.sample.rows if self.sample is not None else None
        for batch in reader.batches():
            if left is not None and len(batch.rows) > left:
                self.complete = False
                yield _first_rows(batch, left)
                return
            left = None if left is None else left - len(batch.rows)
            yield batch
        if reader.sha256:
            self.sha256[file.path] = reader.sha256
        else:
            self.complete = False

    def _one(self, file: InputFile, columns: Sequence[str] | None) -> FormatReader:
        most = None if self.sample is None else self.sample.bytes
        return by_name(file.format).open(file, ReadOptions(self.text, columns, most))

    def shape(self) -> Shape:
        """Whether the first readable row is an OpenAI batch request, also where it is longer than a sample."""
        whole = replace(self, sample=None, sha256={})
        for batch in whole.batches(limit=512):
            for row in batch.rows:
                if not isinstance(row, RowError):
                    return "openai" if looks_like_openai(row) else "table"
        return "table"


def _first_rows(batch: RowBatch, count: int) -> RowBatch:
    if len(batch.rows) <= count:
        return batch
    table = None if batch.table is None else batch.table.slice(0, count)
    return replace(batch, rows=batch.rows[:count], table=table)
