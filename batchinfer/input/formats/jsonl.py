"""Reads JSON lines, plain or compressed: one object per line."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

from batchinfer.core.errors import StorageError
from batchinfer.core.request import RowError
from batchinfer.input.chunk import InputChunk
from batchinfer.input.input_file import InputFile
from batchinfer.input.json_text import parse_row
from batchinfer.input.line_buffer import LineBuffer
from batchinfer.input.lines import HashingFile, WholeLines, line_blocks, uncompressed_chunks
from batchinfer.input.protocol import ReadOptions
from batchinfer.input.rows import RowProblem, Values, row_error

_BLANK = b" \t\r"
Line = tuple[int, bytes]  # the line number, and the line without its newline


class JsonlReader:
    """A reader of a JSON lines file. Implements FormatReader."""

    def __init__(self, file: InputFile, options: ReadOptions) -> None:
        self._file = file
        self._options, self._text = options, options.text
        self.sha256 = ""

    def schema(self) -> None:
        """Check that the first lines of the file are text.

        Raises InputCorrupt if not. JSON lines have no schema to return.
        """
        with closing(self.chunks()) as chunks:
            next(chunks, None)

    def chunks(self) -> Generator[InputChunk, None, None]:
        """Yield all rows of the file in order, unparsed, without blank lines.

        Raises:
            InputCorrupt: The file is damaged, or changes while it is read.
            StorageError: The file cannot be read.
        """
        try:
            with self._file.location.open() as raw:
                hashing = HashingFile(raw)
                chunks = uncompressed_chunks(self._file, raw, hashing, self._text.encoding)
                head = WholeLines(chunks, self._options.sample_bytes)
                yield from self._chunks(LineBuffer(iter(head)), hashing)
                self.sha256 = "" if head.truncated else hashing.hexdigest()
        except OSError as error:
            raise StorageError(f"{self._file.path}: cannot be read: {error}") from None
        self._file.check_unchanged(self.sha256 or None)

    def _chunks(self, lines: LineBuffer, hashing: HashingFile) -> Iterator[InputChunk]:
        cap, encoding = self._text.max_line_bytes, self._text.encoding
        for number, block in line_blocks(lines, cap, self._options.chunk):
            data, too_long = (b"", block) if isinstance(block, int) else (block, None)
            ended = lines.number - number  # number of newlines; the last line of a file may have none
            yield JsonLines(
                file=self._file.name,
                bytes_read=hashing.bytes_read,
                most_rows=ended if data.endswith(b"\n") else ended + 1,
                data=data,
                line=number,
                cap=cap,
                encoding=encoding,
                too_long=too_long,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines(InputChunk):
    """A chunk of a JSON lines file: unparsed lines, or the place of a single line that was skipped as too long.

    Args:
        line: The number of the first line.
        cap: The maximum length of a line in bytes.
        encoding: The encoding of the file, for messages.
        too_long: The length of the skipped line in bytes, or None if `data` has the lines.
    """

    line: int
    cap: int
    encoding: str
    too_long: int | None = None

    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        """Parse and yield the rows from `start` to before `stop`, as values by column, or as a RowError if invalid.

        All columns are returned: `values` is ignored.
        """
        if self.too_long is not None:
            return islice(iter([self._too_long(self.line, self.too_long)]), start, stop)
        return (self._row(number, line) for number, line in islice(self._lines(), start, stop))

    def _lines(self) -> Iterator[Line]:
        for number, line in enumerate(self.data.split(b"\n"), self.line):
            if len(line) > self.cap + 1 or line.strip(_BLANK):
                yield number, line

    def _row(self, number: int, line: bytes) -> Values | RowError:
        if len(line) > self.cap + 1:  # a carriage return does not count
            return self._too_long(number, len(line))
        try:
            return parse_row(line.strip(_BLANK), self.encoding)
        except RowProblem as problem:
            return self._error(number, problem.error)

    def _too_long(self, number: int, size: int) -> RowError:
        message = f"the line has {size} bytes; the limit is {self.cap}"
        return self._error(number, row_error("line_too_long", message))

    def _error(self, number: int, error: RowError) -> RowError:
        return row_error(error.code, f"{self.file} line {number}: {error.message}")
