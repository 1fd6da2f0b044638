"""`batchinfer schema infer`: infers a JSON Schema from the examples in a column of a table."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from batchinfer.core.errors import InputCorrupt, UsageError
from batchinfer.core.request import RowError
from batchinfer.core.wording import counted
from batchinfer.input.files import list_inputs
from batchinfer.input.json_text import parse_value
from batchinfer.input.reader import Reader
from batchinfer.input.rows import RowProblem, Values
from batchinfer.store.columns.inferred_schema import InferredSchema, NoJson

NAMED = 20  # maximum columns that a message lists
MOST_BAD = Fraction(1, 100)  # maximum share of bad rows, the default of a job


@dataclass(frozen=True, slots=True)
class SchemaInference:
    """A JSON schema that was inferred from examples in a table, and counts of the rows that were read.

    Attributes:
        schema: The JSON schema.
        rows: Number of rows read.
        examples: Number of rows with an example.
        complete: True if the table has no further rows.
        bad: Number of skipped rows.
        first_bad: The position of the first skipped row, and why it was skipped; empty without one.
        notes: Remarks for users about types in the schema.
    """

    schema: dict[str, Any]
    rows: int
    examples: int
    complete: bool
    bad: int
    first_bad: str
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return a summary for users: the number of rows that were read and skipped, and remarks."""
        rows = f"all {self.rows:,} rows" if self.complete else f"the first {self.rows:,} rows"
        lines = [f"looked at {rows}; {self.examples:,} of them have an example"]
        if self.bad:
            lines.append(
                f"skipped {counted(self.bad, 'row')} without a valid example; the first: {self.first_bad}"
            )
        return "\n".join([*lines, *self.notes])


def infer_schema(path: str, column: str | None, rows: int) -> SchemaInference:
    """Infer a JSON schema from the examples in the first `rows` rows of a table.

    Args:
        path: The path or pattern of the input files.
        column: The column with the examples, as JSON text or typed values. None: each row is an example.
        rows: Maximum number of rows to read.

    Raises:
        InputMissing: No file matches.
        InputCorrupt: A file is damaged, or there are too few valid examples.
        StorageError: A file cannot be read.
        UsageError: There is no such column.
    """
    reader = Reader.open(list_inputs(path, Path.cwd()))
    declared = reader.schema()
    if column is not None and declared is not None and column not in declared.names:
        raise _no_column(path, column, declared.names)
    examples = _Examples(column, InferredSchema())
    complete = True
    for place, row in _rows(reader, column, rows + 1):
        if examples.rows == rows:
            complete = False
            break
        examples.add(place, row)
    examples.check(path)
    return SchemaInference(
        examples.found.schema,
        examples.rows,
        examples.count,
        complete,
        examples.bad,
        examples.first_bad,
        tuple(examples.found.notes()),
    )


@dataclass(slots=True)
class _Examples:
    column: str | None
    found: InferredSchema
    rows: int = 0
    count: int = 0
    bad: int = 0
    first_bad: str = ""
    column_seen: bool = False
    names: dict[str, None] = field(default_factory=dict)

    def add(self, place: str, row: Values | RowError) -> None:
        self.rows += 1
        if isinstance(row, RowError):
            self._skip(f"{place}: {row.message}")
            return
        self.column_seen = self.column_seen or self.column in row
        if len(self.names) < NAMED:
            self.names.update(dict.fromkeys(row))
        where = place if self.column is None else f"{place}, column {self.column!r}"
        try:
            example = as_json(row) if self.column is None else _example(row.get(self.column))
            if example is not None:
                self.found.add(example)
                self.count += 1
        except RowProblem as problem:
            why = "is not JSON" if problem.error.code == "bad_json" else problem.error.message
            self._skip(f"{where}: {why}")
        except NoJson as error:
            self._skip(f"{where}: {error}")

    def _skip(self, why: str) -> None:
        self.bad += 1
        self.first_bad = self.first_bad or why

    def check(self, path: str) -> None:
        if not self.rows:
            raise InputCorrupt(f"{path}: there are no rows")
        if self.bad > self.rows * MOST_BAD:
            raise InputCorrupt(
                f"{self.first_bad}\n{self.bad:,} of {self.rows:,} rows have no valid example, and at most "
                f"{float(MOST_BAD):.0%} may lack one; correct these rows"
            )
        if self.column is not None and not self.column_seen:
            raise _no_column(path, self.column, list(self.names))
        if not self.count:
            raise InputCorrupt(
                f"{path}: column {self.column!r} holds nothing but nulls in the first {self.rows:,} rows; "
                "name another column, or look at more rows with --rows"
            )


def _rows(reader: Reader, column: str | None, most: int) -> Iterator[tuple[str, Values | RowError]]:
    for batch in reader.batches(None if column is None else [column], limit=most):
        for number, row in enumerate(batch.rows, batch.first_row):
            yield f"{batch.file}: row {number}", row


def _example(value: Any) -> Any:
    return parse_value(value) if isinstance(value, str) else as_json(value)


def as_json(value: Any) -> Any:
    """Convert a Python value from a Parquet file to JSON: dates and UUIDs to text, decimals to floats."""
    if isinstance(value, dict):
        return {name: as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, datetime | time):
        text = value.isoformat()
        return f"{text}Z" if value.tzinfo is None else text
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, Decimal):
        return float(value)
    return value


def _no_column(path: str, column: str, names: Sequence[str]) -> UsageError:
    known = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
    return UsageError(f"{path}: no row has a column {column!r}; there are {known}")
