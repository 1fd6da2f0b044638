"""Implements `batchinfer show`: shows rows of a result as cards. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import duckdb

from batchinfer.core.errors import InputMissing, StorageError
from batchinfer.core.text import on_one_line, printable
from batchinfer.core.wording import count, counted
from batchinfer.filesystem.duck import parquet
from batchinfer.filesystem.location import Location
from batchinfer.store.outputs.registry import answer_column, probability_column
from batchinfer.store.results.manifest import read_manifest
from batchinfer.verbs.answer import BATCH_ROWS, answer_lines, columns_of
from batchinfer.verbs.query import RESULTS, OpenResult, no_result, open_result

MOST_LINES = 6  # maximum lines of a value
EXAMPLES = 3  # example rows in the summary of a run
_LEAST_WIDTH = 20  # least width of a value, in columns
# Columns that are in the head or error line of a card, or rarely needed
_NOT_LISTED = {
    "row_id", "file", "row_index", "custom_id", "sample_index", "status", "finish_reason", "error_code",
    "error_class", "error_message", "retryable", "prompt_tokens", "completion_tokens", "reasoning_tokens",
    "engine_class",
}  # fmt: skip
Row = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class ShownRows:
    """The rows of a result to show: the first rows that match.

    Args:
        folder: The folder of the result or its report.
        rows: The maximum number of rows.
        errors: True to show only error rows.
        where: An SQL condition on the columns of the result, or None.
        partial: True to show the answers that an unfinished run has committed.
    """

    folder: Path
    rows: int
    errors: bool = False
    where: str | None = None
    partial: bool = False

    def cards(self, width: int) -> Iterator[tuple[str, str]]:
        """Yield each row as a card for users: (heading, lines). The last card has the number of rows and "".

        Raises UsageError for an invalid condition, and the errors of `open_result`.

        Args:
            width: The width of the terminal in columns.
        """
        with open_result(self.folder, self.partial) as result:
            self._check(result)
            first = 0
            for row in self._texts(result):
                yield _head(row, width), "\n".join(_body(row, width))
                first += 1
            yield self._ending(result, first), ""

    def json_lines(self) -> Iterator[str]:
        """Yield each row as a line of JSON. Raises the errors of `cards`."""
        with open_result(self.folder, self.partial) as result:
            self._check(result)
            with result.answer(self._sql) as answer:
                yield from answer_lines(answer, "json", None)

    def _check(self, result: OpenResult) -> None:
        if RESULTS not in result.names:
            raise InputMissing(no_result(self.folder))

    def _texts(self, result: OpenResult) -> Iterator[Row]:
        with result.answer(self._sql) as answer:
            yield from _rows_of(answer)

    @property
    def _sql(self) -> str:
        return f"SELECT * FROM {RESULTS}{self._condition} LIMIT {self.rows}"

    @property
    def _condition(self) -> str:
        # The line break ends a comment in the user's condition
        conditions = ["status = 'error'"] if self.errors else []
        conditions += [] if self.where is None else [f"({self.where}\n)"]
        return f" WHERE {' AND '.join(conditions)}" if conditions else ""

    def _ending(self, result: OpenResult, first: int) -> str:
        number, errors = (
            _number(result, f"SELECT count(*) FROM {RESULTS}{condition}")
            for condition in (self._condition, " WHERE status = 'error'")
        )
        kind = "error row" if self.errors else "row"
        matching = "" if self.where is None else f" with {self.where}"
        if not number:
            whole = _number(result, f"SELECT count(*) FROM {RESULTS}")
            return printable(f"no {kind}{matching}; the result has {counted(whole, 'row')}")
        more = "; --rows N shows more" if first < number else ""
        bad = f", {counted(errors, 'error row')}" if errors and not self._condition else ""
        also = "; --errors shows these" if bad else ""
        return printable(f"{count(first)} of {counted(number, kind)}{matching}{bad}{more}{also}")


def example_lines(results: Path, width: int) -> list[str]:
    """Return the answers to the first rows of a published result, each in at most `width` terminal columns."""
    manifest = read_manifest(Location.at(results))
    if manifest is None or not manifest.files:
        return []
    files = [results / file.name for file in manifest.files]
    try:
        with duckdb.connect() as connection:
            found = connection.sql(f"FROM {parquet(files)} WHERE status = 'ok' LIMIT {EXAMPLES}")
            return [_example(row, width) for row in _rows_of(found)]
    except (duckdb.Error, StorageError) as error:  # the run has published, so it must not fail
        return [printable(f"cannot be shown: {error}").replace("\n", " ")]


def _rows_of(answer: duckdb.DuckDBPyRelation) -> Iterator[Row]:
    names = list(answer.columns)
    for batch in answer.project("CAST(COLUMNS(*) AS VARCHAR)").to_arrow_reader(BATCH_ROWS):
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield dict(zip(names, values, strict=True))


def _number(result: OpenResult, sql: str) -> int:
    with result.answer(sql) as answer:
        ((found,),) = answer.fetchall()
    return int(found)


def _example(row: Row, width: int) -> str:
    name = answer_column(row)
    answer = (row.get(name) if name is not None else None) or ""
    likely = row.get(probability_column(name) or "") if name is not None else None
    text = answer if likely is None else f"{answer} ({float(likely):.2f})"
    line = on_one_line(f"{_name_of(row)}: {text}")
    return line if columns_of(line) <= width else f"{_first_columns(line, width - 2)} …"


def _name_of(row: Row) -> str:
    return row.get("custom_id") or f"row {row.get('row_id')}"


def _head(row: Row, width: int) -> str:
    parts = [f"row {row.get('row_id')}"]
    parts += [f"answer {row['sample_index']}"] if row.get("sample_index") is not None else []
    parts += [row["custom_id"] or ""] if row.get("custom_id") is not None else []
    reason = row.get("finish_reason")
    parts.append(row.get("status") or "" if reason in (None, "stop") else f"{row.get('status')} ({reason})")
    head = _first_columns(on_one_line(f"── {' · '.join(parts)} "), width)
    return head + "─" * max(0, width - columns_of(head))


def _body(row: Row, width: int) -> Iterator[str]:
    values = [(name, value) for name, value in row.items() if name not in _NOT_LISTED and value is not None]
    if row.get("error_code") is not None:
        again = " (retryable)" if row.get("retryable") == "true" else ""
        values.insert(0, ("error", f"{row['error_code']}: {row.get('error_message') or ''}{again}"))
    indent = max((columns_of(on_one_line(name)) for name, _ in values), default=0) + 2
    for name, value in values:
        label = on_one_line(name)
        for line in _clipped(value, max(_LEAST_WIDTH, width - indent)):
            yield (label + " " * (indent - columns_of(label)) + line).rstrip()
            label = ""


def _clipped(text: str, room: int) -> list[str]:
    # Enough: combining accents aside, a line has at most `room` characters
    part = text[: room * MOST_LINES * 2]
    lines = [piece for line in printable(part).expandtabs(4).split("\n") for piece in _wrapped(line, room)]
    if len(lines) <= MOST_LINES and len(part) == len(text):
        return lines
    kept = lines[:MOST_LINES]
    hidden = max(1, len(text) - len("".join(kept)))
    return [*kept, f"… about {counted(hidden, 'character')} more"]


def _wrapped(line: str, room: int) -> Sequence[str]:
    if columns_of(line) == len(line):
        return wrap(line, room, replace_whitespace=False, drop_whitespace=True) or [""]
    pieces = []
    while columns_of(line) > room:
        piece = _first_columns(line, room)
        pieces.append(piece)
        line = line[len(piece) :]
    return [*pieces, line]


def _first_columns(text: str, room: int) -> str:
    # At least one character, even if it is too wide
    taken = 0
    for at, char in enumerate(text):
        taken += columns_of(char)
        if taken > room and at:
            return text[:at]
    return text
