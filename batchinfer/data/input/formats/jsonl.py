"""JSON lines, plain or compressed: one object a line."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.core.errors import StorageError
from batchinfer.core.request import RowError
from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.json_text import parse_row
from batchinfer.data.input.lines import (
    BATCH_BYTES,
    MAGIC,
    HashingFile,
    WholeLines,
    split_lines,
    unpacked_chunks,
)
from batchinfer.data.input.protocol import BATCH_ROWS, Format, ReadOptions
from batchinfer.data.input.rows import RowBatch, RowProblem, Values, row_error

PACKED_MAGIC = tuple(MAGIC)


class JsonlReader:
    """One JSONL file. After `batches()` has ended, `sha256` identifies what was read."""

    def __init__(self, file: InputFile, options: ReadOptions) -> None:
        self._file = file
        self._options, self._text = options, options.text
        self.sha256 = ""

    def schema(self) -> None:
        """JSON declares no columns."""

    def batches(self) -> Iterator[RowBatch]:
        """Rows in file order; blank lines are skipped. Raises InputCorrupt when the file is damaged or changes."""
        try:
            with open(self._file.path, "rb") as raw:
                hashing = HashingFile(raw)
                chunks = unpacked_chunks(self._file.path, raw, hashing, self._text.encoding)
                head = WholeLines(chunks, self._options.sample_bytes)
                yield from self._grouped(split_lines(head, self._text.max_line_bytes), hashing)
                self.sha256 = "" if head.cut else hashing.hexdigest()
        except OSError as error:
            raise StorageError(f"{self._file.path}: cannot be read: {error}") from None
        self._file.check_unchanged(self.sha256 or None)

    def _grouped(self, lines: Iterator[tuple[int, bytes | int]], hashing: HashingFile) -> Iterator[RowBatch]:
        rows: list[Values | RowError] = []
        first = held = 0
        for number, line in lines:
            if isinstance(line, bytes):
                line = line.strip(b" \t\r")
                if not line:
                    continue
                held += len(line)
            rows.append(self._row(number, line))
            if len(rows) >= BATCH_ROWS or held >= BATCH_BYTES:
                yield RowBatch(self._file.name, first, rows, None, hashing.bytes_read)
                first, rows, held = first + len(rows), [], 0
        if rows:
            yield RowBatch(self._file.name, first, rows, None, hashing.bytes_read)

    def _row(self, number: int, line: bytes | int) -> Values | RowError:
        try:
            if isinstance(line, int):
                most = self._text.max_line_bytes
                raise RowProblem("line_too_long", f"the line has {line} bytes; the limit is {most}")
            return parse_row(line, self._text.encoding)
        except RowProblem as problem:
            error = problem.error
            return row_error(error.code, f"{self._file.name} line {number}: {error.message}")


FORMAT = Format("jsonl", "JSON lines", (".jsonl", ".ndjson", ".json"), True, (), JsonlReader)
