"""Formats the answer to a query as a table, as blocks, or in a format for programs."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Literal, get_args

from batchinfer.core.errors import UsageError
from batchinfer.core.text import on_one_line, printable

if TYPE_CHECKING:
    import duckdb

Format = Literal["auto", "table", "blocks", "json", "jsonl", "csv", "parquet"]
FORMATS: tuple[str, ...] = get_args(Format)
JSON_FORMATS = ("json", "jsonl")  # both write one object per line
BATCH_ROWS = 1000  # rows in memory at a time; the first batch sets the widths of a table
_GAP = "  "
_ROW = "batchinfer_answer_row"
_NUMBERS = ("INT", "DECIMAL", "DOUBLE", "FLOAT", "HUGEINT", "BIGINT")
_NESTED = ("STRUCT", "MAP", "UNION")  # lists and arrays end in brackets
_LEAST_WIDTH = 20  # least width of a block's values, in columns
_MOST_WIDTH = 120  # largest width that a column is padded to, so one long value does not widen every row
Cells = Sequence[str | None]
# Characters that spreadsheet programs take for the start of a formula (OWASP, "CSV Injection"), full width included
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_A_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|-inf")


def check_format(form: str, output: Path | None) -> None:
    """Raise UsageError if an answer cannot be written in a format.

    Args:
        form: The format. Unknown formats are refused.
        output: The output file, or None for stdout. Parquet needs a file.
    """
    if form not in FORMATS:
        raise UsageError(f"--format {form}: it can be {', '.join(FORMATS)}")
    if form == "parquet" and output is None:
        raise UsageError("--format parquet needs a file: --output FILE")


def format_for(form: str, output: Path | None) -> str:
    """Determine the format of the answer to a query, from the user's choice or the suffix of the output file.

    Args:
        form: The format that the user names, or "auto".
        output: The output file, or None for stdout.

    Returns:
        The format, or "auto" if neither the user nor the suffix determines one.
    """
    if form != "auto" or output is None:
        return form
    ending = output.suffix.lower().lstrip(".")
    known = {"json": "jsonl", "ndjson": "jsonl", "pq": "parquet"}.get(ending, ending)
    return known if known in FORMATS else form


def check_escapes(form: str, escape_formulas: bool, output: Path | None) -> str:
    """Determine the format of an answer, which must be CSV if formulas are escaped.

    Args:
        form: The format that the user names, or "auto".
        escape_formulas: True if formulas must be escaped. "auto" then means CSV.
        output: The output file, or None for stdout.

    Raises:
        UsageError: Formulas must be escaped in another format than CSV.
    """
    if not escape_formulas:
        return form
    found = format_for(form, output)
    if found == "auto":
        return "csv"
    if found != "csv":
        raise UsageError(
            f"--escape-formulas is for CSV, and the format is {found}; use --format csv, or leave it out"
        )
    return found


def answer_lines(
    answer: duckdb.DuckDBPyRelation, form: str, width: int | None, escape_formulas: bool = False
) -> Iterator[str]:
    """Yield the lines of the answer to a query in a text format, without line ends.

    Args:
        answer: The answer, which DuckDB computes while it is read.
        form: One of FORMATS, except parquet. "auto": a table with a line per row, or a block of lines per row if the
            table is too wide for the terminal.
        width: The width of the terminal in columns. None if the output is no terminal: lines may have any length.
        escape_formulas: True to put an apostrophe before CSV cells that spreadsheet programs would run as formulas.
    """
    if form in JSON_FORMATS:
        yield from _json_lines(answer)
        return
    if form == "csv":
        yield from _csv_lines(_Texts.of(answer, nested="json"), escape_formulas)
        return
    texts = _Texts.of(answer)
    first = next(texts.batches, [])
    rows = chain(first, chain.from_iterable(texts.batches))
    layout = _Table.of(texts, first)
    if form == "table" or (form == "auto" and (width is None or layout.fits(width))):
        yield from layout.lines(rows)
    else:
        yield from _blocks(texts.names, rows, width)


@dataclass(frozen=True, slots=True)
class _Texts:
    # DuckDB converts all values to texts: Python's types support neither the year 290000 nor duplicate column names
    names: list[str]
    numeric: list[bool]
    batches: Iterator[list[Cells]]

    @classmethod
    def of(cls, answer: duckdb.DuckDBPyRelation, nested: Literal["duckdb", "json"] = "duckdb") -> _Texts:
        kinds = [str(kind) for kind in answer.types]
        numeric = [kind.startswith(_NUMBERS) or kind.endswith("INT") for kind in kinds]
        as_json = [kind.startswith(_NESTED) or kind.endswith("]") for kind in kinds]
        if nested == "duckdb" or not any(as_json):
            texts = answer.project("CAST(COLUMNS(*) AS VARCHAR)")
            return cls(list(answer.columns), numeric, _batches(texts, ()))
        columns = [f"to_json(#{at})" if json else f"#{at}" for at, json in enumerate(as_json, 1)]
        texts = answer.project(", ".join(f"CAST({column} AS VARCHAR)" for column in columns))
        return cls(
            list(answer.columns), numeric, _batches(texts, [at for at, json in enumerate(as_json) if json])
        )


def _batches(texts: duckdb.DuckDBPyRelation, json_columns: Sequence[int]) -> Iterator[list[Cells]]:
    for batch in texts.to_arrow_reader(BATCH_ROWS):
        columns = [column.to_pylist() for column in batch.columns]
        for at in json_columns:
            columns[at] = [None if text is None else _strict(text) for text in columns[at]]
        yield list(zip(*columns, strict=True))


# rich's Table takes 29 ms to import, keeps all rows before it prints the first, and wraps or truncates values. Here
# rows are printed as they are read, and an answer that is too wide becomes blocks.
@dataclass(frozen=True, slots=True)
class _Table:
    names: list[str]
    numeric: list[bool]
    widths: list[int]
    one_line: bool

    @classmethod
    def of(cls, texts: _Texts, rows: Sequence[Cells]) -> _Table:
        names = [on_one_line(name) for name in texts.names]
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        widths = [
            max(map(columns_of, [name, *map(on_one_line, map(_said, cells))]))
            for name, cells in zip(names, columns, strict=True)
        ]
        broken = any(cell is not None and "\n" in cell for row in rows for cell in row)
        return cls(names, texts.numeric, widths, not broken)

    def fits(self, width: int) -> bool:
        return self.one_line and sum(self.widths) + len(_GAP) * (len(self.widths) - 1) <= width

    def lines(self, rows: Iterator[Cells]) -> Iterator[str]:
        yield self._line(self.names)
        yield _GAP.join("─" * min(width, _MOST_WIDTH) for width in self.widths)
        for row in rows:
            yield self._line([on_one_line(_said(cell)) for cell in row])

    def _line(self, cells: Sequence[str]) -> str:
        padded = (
            _padded(cell, min(width, _MOST_WIDTH), right)
            for cell, width, right in zip(cells, self.widths, self.numeric, strict=True)
        )
        return _GAP.join(padded).rstrip()


def _padded(text: str, width: int, right: bool) -> str:
    room = " " * max(0, width - columns_of(text))
    return room + text if right else text + room


def _blocks(names: Sequence[str], rows: Iterator[Cells], width: int | None) -> Iterator[str]:
    shown_names = [on_one_line(name) for name in names]
    indent = max(map(columns_of, shown_names), default=0) + len(_GAP)
    for number, row in enumerate(rows, 1):
        head = f"── {number} "
        yield head + "─" * max(0, (width or 80) - len(head))
        for name, cell in zip(shown_names, row, strict=True):
            lines = _wrapped(printable(_said(cell)), None if width is None else width - indent)
            yield (_padded(name, indent, False) + lines[0]).rstrip()
            yield from ((" " * indent + line).rstrip() for line in lines[1:])


def _wrapped(text: str, width: int | None) -> list[str]:
    lines = text.expandtabs(4).split("\n")
    if width is None:
        return lines
    room = max(width, _LEAST_WIDTH)
    pieces = (wrap(line, room, replace_whitespace=False, drop_whitespace=True) for line in lines)
    return [piece for found in pieces for piece in (found or [""])]


def columns_of(text: str) -> int:
    """Return the width of a text in terminal columns: two for wide characters, none for combining accents."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def _said(cell: str | None) -> str:
    return "NULL" if cell is None else cell


def _csv_lines(texts: _Texts, escape_formulas: bool) -> Iterator[str]:
    # As in RFC 4180, but with Unix line ends. Nulls are empty, and empty texts are quoted.
    written = _escaped if escape_formulas else _quoted
    yield ",".join(map(written, texts.names))
    for rows in texts.batches:
        yield from (",".join("" if cell is None else written(cell) for cell in row) for row in rows)


def _escaped(text: str) -> str:
    # Numbers are unchanged, although a minus sign may begin a formula
    if not _FORMULA.match(text) or _A_NUMBER.fullmatch(text):
        return _quoted(text)
    return _quoted(f"'{text}")


def _quoted(text: str) -> str:
    if text and not any(char in text for char in ',"\n\r'):
        return text
    return '"' + text.replace('"', '""') + '"'


def _json_lines(answer: duckdb.DuckDBPyRelation) -> Iterator[str]:
    # NaN and infinity become null, because JSON does not have them
    # A name that no column has: to_json(x) would take a column x instead of the row
    objects = answer.query(_ROW, f"SELECT CAST(to_json({_ROW}) AS VARCHAR) AS line FROM {_ROW}")
    for batch in objects.to_arrow_reader(BATCH_ROWS) if objects is not None else ():
        yield from map(_strict, batch.column(0).to_pylist())


def _strict(line: str) -> str:
    if "NaN" not in line and "Infinity" not in line:
        return line
    return json.dumps(
        json.loads(line, parse_constant=lambda _: None), ensure_ascii=False, separators=(",", ":")
    )
