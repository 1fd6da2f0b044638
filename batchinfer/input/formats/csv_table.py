"""Reads CSV and TSV files as defined by RFC 4180: a header, doubled quotes and newlines in quotes.

All values are text; an empty field is null. Without `input.delimiter`, files named .tsv or .tab are tab-separated;
else the header decides: comma, semicolon or tab, the first one in this order that occurs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import pyarrow as pa

from batchinfer.core.errors import InputCorrupt, StorageError
from batchinfer.core.request import RowError
from batchinfer.input.chunk import InputChunk
from batchinfer.input.format import TABS, uncompressed_name
from batchinfer.input.formats.csv_dialect import CsvDialect, detect_delimiter
from batchinfer.input.formats.csv_records import CsvRecords, Found
from batchinfer.input.input_file import InputFile
from batchinfer.input.line_buffer import LineBuffer
from batchinfer.input.lines import HashingFile, WholeLines, uncompressed_chunks
from batchinfer.input.protocol import ReadOptions
from batchinfer.input.rows import RowProblem, Values, first_repeated, row_error
from batchinfer.input.text_encoding import decode_record

_HEADERLESS_HINT = "input.sql with read_csv reads files without a header"
MAX_COLUMNS = 100_000  # a row of 100,000 fields takes 10 MB
_SPARE = 1000  # a record with this number of fields more than the header is counted before it is split

Fields = list[str]


class CsvReader:
    """A reader of a CSV file. Implements FormatReader."""

    def __init__(self, file: InputFile, options: ReadOptions) -> None:
        self._file = file
        self._options, self._text = options, options.text
        self.sha256 = ""

    def schema(self) -> pa.Schema | None:
        """Return the columns that the header of the CSV file names, all of type text; None for an empty file.

        Raises:
            InputCorrupt: The header is invalid.
            StorageError: The file cannot be read.
        """
        with self._open() as table:
            return None if table is None else pa.schema([(name, pa.string()) for name in table.names])

    def chunks(self) -> Iterator[InputChunk]:
        """Yield all rows of the file in order, unparsed, without blank lines. An invalid record is an error row."""
        with self._open() as table:
            if table is not None:
                yield from self._chunks(table)
                self.sha256 = "" if table.head.truncated else table.hashing.hexdigest()
        self._file.check_unchanged(self.sha256 or None)

    @contextmanager
    def _open(self) -> Iterator[_OpenTable | None]:
        try:
            with self._file.location.open() as raw:
                hashing = HashingFile(raw)
                chunks = uncompressed_chunks(self._file, raw, hashing, self._text.encoding)
                head = WholeLines(chunks, self._options.sample_bytes)
                lines = LineBuffer(iter(head))
                if _skip_blank(lines, self._text.max_line_bytes + 1):
                    dialect = self._dialect(lines)
                    records = CsvRecords(lines, dialect, self._text.max_line_bytes, lambda: head.truncated)
                    names = self._header(records.first(), dialect)
                    yield _OpenTable(names, lines, records, dialect, head, hashing)
                else:
                    self.sha256 = "" if head.truncated else hashing.hexdigest()
                    yield None
        except OSError as error:
            raise StorageError(f"{self._file.path}: cannot be read: {error}") from None

    def _dialect(self, lines: LineBuffer) -> CsvDialect:
        quote, delimiter = self._text.quote, self._text.delimiter
        if delimiter is None and uncompressed_name(self._file.path).endswith(TABS):
            delimiter = "\t"
        end = lines.line_end(self._text.max_line_bytes + 1)
        header = b"" if end is None or end < 0 else lines.peek(end)
        return CsvDialect(delimiter or detect_delimiter(header, quote), quote)

    def _header(self, found: Found | None, dialect: CsvDialect) -> Fields:
        number, record, _ = found or (1, b"", 0)
        try:
            if isinstance(record, RowProblem):
                raise record
            text = decode_record(record, self._text.encoding, number)
        except RowProblem as problem:
            raise InputCorrupt(
                f"{self._file.path}: the header in line {number}: {problem.error.message}"
            ) from None
        if (count := dialect.count(text)) > MAX_COLUMNS:
            raise InputCorrupt(
                f"{self._file.path}: the header names {count:,} columns; at most {MAX_COLUMNS:,} are read"
            )
        return _names(self._file, dialect.split(text))

    def _chunks(self, table: _OpenTable) -> Iterator[InputChunk]:
        wanted = None if self._options.columns is None else set(self._options.columns)
        kept = tuple((at, name) for at, name in enumerate(table.names) if wanted is None or name in wanted)
        whole = CsvLines(
            file=self._file.name,
            bytes_read=0,
            most_rows=0,
            columns=len(table.names),
            kept=kept,
            dialect=table.dialect,
            cap=self._text.max_line_bytes,
            encoding=self._text.encoding,
        )
        for block in table.records.blocks(self._options.chunk):
            chunk = replace(whole, bytes_read=table.hashing.bytes_read)
            if isinstance(block, list):
                yield replace(chunk, records=tuple(map(_sendable, block)), most_rows=len(block))
            else:
                line, data = block
                ended = table.lines.number - line  # number of newlines; the last line of a file may have none
                most = ended if data.endswith(b"\n") else ended + 1
                yield replace(chunk, line=line, data=data, most_rows=most)


def _sendable(found: Found) -> ReadRecord:
    number, record, _ = found
    return number, record.error if isinstance(record, RowProblem) else record


ReadRecord = tuple[int, bytes | RowError]  # line number, and record without its line end


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvLines(InputChunk):
    """A chunk of a CSV file: whole records as unparsed lines, or records that have already been split.

    Args:
        columns: The number of fields per record.
        kept: (position, name) of each column to read.
        dialect: The delimiter and the quote character.
        cap: The maximum length of a record in bytes.
        encoding: The encoding of the file, for messages.
        line: The number of the first line of `data`.
        records: The split records as (line number, bytes or error), or None if `data` has the lines.
    """

    columns: int
    kept: tuple[tuple[int, str], ...]
    dialect: CsvDialect
    cap: int
    encoding: str
    line: int = 0
    records: tuple[ReadRecord, ...] | None = None

    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        """Parse and yield the rows from `start` to before `stop`, as values by column, or as a RowError if invalid.

        All columns that the chunk has are returned: `values` is ignored.
        """
        found = self._found() if self.records is None else iter(self.records)
        return (self._row(number, record) for number, record in islice(found, start, stop))

    def _found(self) -> Iterator[ReadRecord]:
        lines = LineBuffer(iter([self.data]), self.line)
        return map(_sendable, CsvRecords(lines, self.dialect, self.cap, lambda: False))

    def _row(self, number: int, record: bytes | RowError) -> Values | RowError:
        if isinstance(record, RowError):
            return self._error(number, record)
        try:
            fields = _fields(decode_record(record, self.encoding, number), self.dialect, self.columns)
        except RowProblem as problem:
            return self._error(number, problem.error)
        return {name: fields[at] or None for at, name in self.kept}

    def _error(self, number: int, error: RowError) -> RowError:
        return row_error(error.code, f"{self.file} line {number}: {error.message}")


@dataclass(frozen=True, slots=True)
class _OpenTable:
    # An open CSV file after its header; `head` are the chunks of the file, or of its start if a sample is read
    names: Fields
    lines: LineBuffer
    records: CsvRecords
    dialect: CsvDialect
    head: WholeLines
    hashing: HashingFile


def _skip_blank(lines: LineBuffer, most: int) -> bool:
    while (end := lines.line_end(most)) is not None:
        if end < 0 or lines.peek(end).strip():
            return True
        lines.take(lines.at, end + 1)
    return False


def _fields(record: str, dialect: CsvDialect, columns: int) -> Fields:
    many = record.count(dialect.delimiter) > columns + _SPARE  # too many fields, or delimiters within quotes
    fields = [] if many and dialect.count(record) != columns else dialect.split(record)
    if len(fields) != columns:
        count = len(fields) or dialect.count(record)
        plural = "" if count == 1 else "s"
        raise RowProblem("bad_csv", f"{count} field{plural}, where the header has {columns}")
    return fields


def _names(file: InputFile, header: Fields) -> Fields:
    # A column without a name is named after its position, as in DuckDB: column0
    if any("\r" in name for name in header):
        raise InputCorrupt(
            f"{file.path}: lines end with a carriage return without a newline; write the file with newlines"
        )
    names = [name or f"column{at}" for at, name in enumerate(header)]
    twice = first_repeated(names)
    if twice is not None:
        raise InputCorrupt(
            f"{file.path}: the header names the column {twice[:100]!r} twice; the first line must name the "
            f"columns ({_HEADERLESS_HINT})"
        )
    return names
