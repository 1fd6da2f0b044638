"""The rows of a job's input, whatever it is kept in, in bounded batches and in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa

from batchinfer.core.request import RowError
from batchinfer.input.chunk import DEFAULT_SIZE, ChunkSize, InputChunk, RowBatch, read_batch
from batchinfer.input.input_file import InputFile
from batchinfer.input.openai import looks_like_openai
from batchinfer.input.protocol import DEFAULT_TEXT, FormatReader, ReadOptions, TextOptions, WideColumns
from batchinfer.input.registry import by_name
from batchinfer.input.typed_rows import check_same_schema, common_schema

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
    """Reads the files one after another, as rows (`batches()`) or as chunks that others read (`chunks()`).

    `sha256` fills meanwhile, one digest a file read to its end. `complete` tells at the end whether all rows were read:
    no sample has left any out.
    """

    files: tuple[InputFile, ...]
    text: TextOptions
    sha256: dict[str, str]
    sample: SampleSize | None = None
    complete: bool = False
    strata: Strata | None = None  # all rows are read, and only these are handed on
    chunk: ChunkSize = DEFAULT_SIZE
    _schemas: list[pa.Schema | None] = field(default_factory=list)  # of all files, once they were looked at
    _wide: WideColumns = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        files: Sequence[InputFile],
        text: TextOptions = DEFAULT_TEXT,
        sample: SampleSize | None = None,
        strata: Strata | None = None,
        chunk: ChunkSize | None = None,
    ) -> Reader:
        """Raises InputCorrupt for files that are not what they say, or whose schemas differ."""
        reader = cls(tuple(files), text, {}, sample, strata=strata, chunk=chunk or DEFAULT_SIZE)
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

    def again(
        self,
        files: Sequence[InputFile],
        sample: SampleSize | None,
        strata: Strata | None,
        chunk: ChunkSize,
    ) -> Reader | None:
        """Return a reader of the same files, whose headers and footers are not read again; None if one of them has
        changed."""
        if (*files,) != self.files:
            return None
        return replace(self, sha256={}, sample=sample, strata=strata, chunk=chunk, complete=False)

    def schema(self) -> pa.Schema | None:
        """The columns where the format declares them (Parquet, Arrow, CSV, SQL); None for JSONL and empty CSV. The
        header, the footer or the first lines of every file are read for it, once."""
        if not self._schemas:
            self._schemas.append(self._read_schema())
        return self._schemas[0]

    def _read_schema(self) -> pa.Schema | None:
        first: tuple[InputFile, pa.Schema] | None = None
        for file in self.files:
            schema = self._one(file, None).schema()
            if schema is not None and first is not None:
                check_same_schema(*first, file, schema)
                first = first[0], common_schema(first[1], schema)
            elif schema is not None:
                first = file, schema
        return None if first is None else first[1]

    @property
    def samples(self) -> bool:
        """Whether some rows are to be left out, which takes the reading of all before them."""
        return self.sample is not None or self.strata is not None

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[InputChunk]:
        """Yield the rows of all files in order; of a sample they are read already. `columns` spares Parquet from
        decoding the others."""
        if self.samples:
            yield from self.batches(columns)
            return
        before, self.complete = 0, True
        for file in self.files:
            reader = self._one(file, columns)
            for chunk in reader.chunks():
                yield replace(chunk, bytes_read=before + chunk.bytes_read)
            self._read_to_end(file, reader)
            before += file.size

    def batches(self, columns: Sequence[str] | None = None, limit: int | None = None) -> Iterator[RowBatch]:
        """Rows of all files in order, at most `limit`. `columns` spares Parquet from decoding the others."""
        left = limit
        before = seen = 0
        self.complete = self.strata is None
        for file in self.files:
            for batch in self._of(file, columns, left):
                left = None if left is None else left - len(batch.rows)
                yield from self._taken(replace(batch, bytes_read=before + batch.bytes_read), seen)
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
            yield batch.sliced(start, end)

    def _of(self, file: InputFile, columns: Sequence[str] | None, limit: int | None) -> Iterator[RowBatch]:
        """The rows of one file, at most `limit`, or those of them that the sample takes."""
        reader, first = self._one(file, columns), 0
        most = self.sample.rows if self.sample is not None else None
        for chunk in reader.chunks():
            batch = read_batch(chunk, first, None if limit is None else limit - first)
            if most is not None and first + len(batch.rows) > most:
                self.complete = False
                if most > first:
                    yield batch.sliced(0, most - first)
                return
            if batch.rows:
                yield batch
            first += len(batch.rows)
        self._read_to_end(file, reader)

    def _read_to_end(self, file: InputFile, reader: FormatReader) -> None:
        if reader.sha256:
            self.sha256[file.path] = reader.sha256
        else:
            self.complete = False

    def _one(self, file: InputFile, columns: Sequence[str] | None) -> FormatReader:
        most = None if self.sample is None else self.sample.bytes
        return by_name(file.format).open(file, ReadOptions(self.text, columns, most, self.chunk, self._wide))

    def shape(self) -> Shape:
        """Whether the first readable row is an OpenAI batch request, also where it is longer than a sample."""
        whole = replace(self, sample=None, sha256={})
        for batch in whole.batches(limit=512):
            for row in batch.rows:
                if not isinstance(row, RowError):
                    return "openai" if looks_like_openai(row) else "table"
        return "table"
