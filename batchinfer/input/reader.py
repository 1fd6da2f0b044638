"""Reads the rows of a job's input files in bounded batches and in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa

from batchinfer.core.request import RowError
from batchinfer.input.chunk import DEFAULT_SIZE, ChunkSize, InputChunk, RowBatch, read_batch
from batchinfer.input.format_detection import by_name
from batchinfer.input.input_file import InputFile
from batchinfer.input.openai import looks_like_openai
from batchinfer.input.protocol import DEFAULT_TEXT, FormatReader, ReadOptions, TextOptions, WideColumns
from batchinfer.input.typed_rows import check_same_schema, common_schema

Shape = Literal["table", "openai"]


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The maximum size of a sample from the start of each file.

    Attributes:
        rows: The number of rows per file.
        bytes: The approximate number of decompressed bytes per text file.
    """

    rows: int
    bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class SpreadSample:
    """A sample of rows that are spread over the input: of every `stride` rows, the middle ones are sampled.

    Attributes:
        stride: The number of rows in each group. Groups continue from one file to the next.
        rows: The number of rows sampled from the middle of each group.
    """

    stride: int
    rows: int

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of sampled rows among consecutive rows of the input, as (start, end), without the row `end`.

        Args:
            first: The number of the first of these consecutive rows in the input. Ranges are counted from this row.
            count: The number of consecutive rows.
        """
        begin = (self.stride - self.rows) // 2
        for stratum in range(first // self.stride, (first + count - 1) // self.stride + 1):
            start = stratum * self.stride + begin - first
            run = max(0, start), min(count, start + self.rows)
            if run[0] < run[1]:
                yield run


@dataclass(slots=True)
class Reader:
    """Reads input files in order, as parsed rows (`batches()`) or as chunks that other processes parse (`chunks()`).

    Attributes:
        files: The files.
        text: The encoding and syntax of text files.
        sha256: The hex digest of each file that was read to its end, by path.
        sample: To yield only the first rows of each file: how many. None for all rows.
        complete: After reading, True if all rows were yielded, False if rows were left out by `sample` or `strata`.
        strata: To yield only rows that are spread over all files: which. None for all rows.
        chunk: The maximum size of the chunks of text files.
    """

    files: tuple[InputFile, ...]
    text: TextOptions
    sha256: dict[str, str]
    sample: SampleSize | None = None
    complete: bool = False
    strata: SpreadSample | None = None
    chunk: ChunkSize = DEFAULT_SIZE
    _schemas: list[pa.Schema | None] = field(default_factory=list)  # the common schema, once it was read
    _wide: WideColumns = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        files: Sequence[InputFile],
        text: TextOptions = DEFAULT_TEXT,
        sample: SampleSize | None = None,
        strata: SpreadSample | None = None,
        chunk: ChunkSize | None = None,
    ) -> Reader:
        """Return a reader of the files, after reading their schemas.

        Args:
            files: The files.
            text: The encoding and syntax of text files.
            sample: How many rows to yield from the start of each file. None for all rows.
            strata: Which rows to yield, spread over all files. None for all rows.
            chunk: The maximum size of the chunks of text files, or None for the default.

        Raises:
            InputCorrupt: A file is not in its format, or the schemas of two files differ.
        """
        reader = cls(tuple(files), text, {}, sample, strata=strata, chunk=chunk or DEFAULT_SIZE)
        reader.schema()
        return reader

    def count(self, limit: int | None = None) -> int:
        """Count the rows of the input by reading them. Stops at `limit` rows, unless it is None."""
        schema = self.schema()
        narrow = None if schema is None else schema.names[:1]
        return sum(len(batch.rows) for batch in replace(self, strata=None).batches(narrow, limit))

    @property
    def bytes_total(self) -> int:
        """The size of all input files in bytes."""
        return sum(f.size for f in self.files)

    @property
    def values_are_text(self) -> bool:
        """True if the files have no types, as CSV: their numbers and lists are texts that must be parsed."""
        return any(by_name(file.format).values_are_text for file in self.files)

    def reopen(
        self,
        files: Sequence[InputFile],
        sample: SampleSize | None,
        strata: SpreadSample | None,
        chunk: ChunkSize,
    ) -> Reader | None:
        """Return a reader of the same files with other options. Their headers and footers are not read again.

        Args:
            files: The files to read.
            sample: How many rows to yield from the start of each file. None for all rows.
            strata: Which rows to yield, spread over all files. None for all rows.
            chunk: The maximum size of the chunks of text files.

        Returns:
            None if `files` differ from this reader's files, for example because a file has changed.
        """
        if (*files,) != self.files:
            return None
        return replace(self, sha256={}, sample=sample, strata=strata, chunk=chunk, complete=False)

    def schema(self) -> pa.Schema | None:
        """Return the common schema of the files. None if they are JSON lines or empty CSV files, which have no schema.

        The first call reads the header, the footer or the first lines of each file.
        """
        if not self._schemas:
            self._schemas.append(self._read_schema())
        return self._schemas[0]

    def _read_schema(self) -> pa.Schema | None:
        first: tuple[InputFile, pa.Schema] | None = None
        for file in self.files:
            schema = self._open(file, None).schema()
            if schema is not None and first is not None:
                check_same_schema(*first, file, schema)
                first = first[0], common_schema(first[1], schema)
            elif schema is not None:
                first = file, schema
        return None if first is None else first[1]

    @property
    def is_sampled(self) -> bool:
        """True if the reader yields only a sample of the rows. `chunks()` then yields parsed rows."""
        return self.sample is not None or self.strata is not None

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[InputChunk]:
        """Yield the rows of all files in order, as unparsed chunks.

        If only a sample is read, the chunks are already parsed.

        Args:
            columns: The names of the columns to read, or None for all. Typed formats do not decode the other columns.
        """
        if self.is_sampled:
            yield from self.batches(columns)
            return
        before, self.complete = 0, True
        for file in self.files:
            reader = self._open(file, columns)
            for chunk in reader.chunks():
                yield replace(chunk, bytes_read=before + chunk.bytes_read)
            self._read_to_end(file, reader)
            before += file.size

    def batches(self, columns: Sequence[str] | None = None, limit: int | None = None) -> Iterator[RowBatch]:
        """Yield the parsed rows of all files in order.

        Args:
            columns: The names of the columns to read, or None for all. Typed formats do not decode the other columns.
            limit: The maximum number of rows to read, or None for all.
        """
        left = limit
        before = seen = 0
        self.complete = self.strata is None
        for file in self.files:
            for batch in self._batches_of(file, columns, left):
                left = None if left is None else left - len(batch.rows)
                yield from self._sampled(replace(batch, bytes_read=before + batch.bytes_read), seen)
                seen += len(batch.rows)
                if left == 0:
                    return  # a file that was not read to its end has no digest; size and times identify it
            before += file.size

    def _sampled(self, batch: RowBatch, first: int) -> Iterator[RowBatch]:
        if self.strata is None:
            yield batch
            return
        for start, end in self.strata.runs(first, len(batch.rows)):
            yield batch.slice(start, end)

    def _batches_of(
        self, file: InputFile, columns: Sequence[str] | None, limit: int | None
    ) -> Iterator[RowBatch]:
        reader, first = self._open(file, columns), 0
        most = self.sample.rows if self.sample is not None else None
        for chunk in reader.chunks():
            batch = read_batch(chunk, first, None if limit is None else limit - first)
            if most is not None and first + len(batch.rows) > most:
                self.complete = False
                if most > first:
                    yield batch.slice(0, most - first)
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

    def _open(self, file: InputFile, columns: Sequence[str] | None) -> FormatReader:
        most = None if self.sample is None else self.sample.bytes
        return by_name(file.format).open(file, ReadOptions(self.text, columns, most, self.chunk, self._wide))

    def shape(self) -> Shape:
        """Return "openai" if the first valid row is a line of an OpenAI batch file, else "table".

        Only the first 512 rows are searched for a valid row.
        """
        whole = replace(self, sample=None, sha256={})
        for batch in whole.batches(limit=512):
            for row in batch.rows:
                if not isinstance(row, RowError):
                    return "openai" if looks_like_openai(row) else "table"
        return "table"
