"""The declaration of a column of a report table, with helpers for the usual types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

Formula = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a report table.

    Its value is computed by `sql` or `formula`. With neither, the code that writes the table sets it.

    Attributes:
        name: Its name.
        type: Its Arrow type.
        unit: The unit; empty for names, texts and timestamps.
        meaning: Markdown for docs/report.md; links are relative to docs/.
        sql: A DuckDB expression over the rows that the table is computed from, such as the steps of a run.
        formula: A function that computes the value from earlier columns of the row.
    """

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    sql: str = ""
    formula: Formula | None = None


TEXT = pa.string()
INT = pa.int64()
REAL = pa.float64()
TIME = pa.timestamp("us", tz="UTC")
TEXTS = pa.map_(pa.string(), pa.string())
COUNTS = pa.map_(pa.string(), pa.int64())


def text(name: str, meaning: str, sql: str = "") -> Column:
    """Declare a report column of texts.

    Args:
        name: Its name.
        meaning: Its meaning, as Markdown for docs/report.md.
        sql: A DuckDB expression that computes it, or "".
    """
    return Column(name, TEXT, "", meaning, sql)


def count(name: str, unit: str, meaning: str, sql: str = "") -> Column:
    """Declare a report column of whole numbers.

    Args:
        name: Its name.
        unit: Its unit.
        meaning: Its meaning, as Markdown for docs/report.md.
        sql: A DuckDB expression that computes it, or "".
    """
    return Column(name, INT, unit, meaning, sql)


def real(name: str, unit: str, meaning: str, sql: str = "", formula: Formula | None = None) -> Column:
    """Declare a report column of real numbers.

    Args:
        name: Its name.
        unit: Its unit.
        meaning: Its meaning, as Markdown for docs/report.md.
        sql: A DuckDB expression that computes it, or "".
        formula: A function that computes it from earlier columns of the row.
    """
    return Column(name, REAL, unit, meaning, sql, formula)


def seconds(name: str, meaning: str, sql: str = "", formula: Formula | None = None) -> Column:
    """Declare a report column of times in seconds.

    Args:
        name: Its name.
        meaning: Its meaning, as Markdown for docs/report.md.
        sql: A DuckDB expression that computes it, or "".
        formula: A function that computes it from earlier columns of the row.
    """
    return real(name, "s", meaning, sql, formula)


def ratio(name: str, meaning: str, sql: str = "", formula: Formula | None = None) -> Column:
    """Declare a report column of shares from 0 to 1.

    Args:
        name: Its name.
        meaning: Its meaning, as Markdown for docs/report.md.
        sql: A DuckDB expression that computes it, or "".
        formula: A function that computes it from earlier columns of the row.
    """
    return real(name, "0…1", meaning, sql, formula)


def total(column: str) -> str:
    """Return SQL for the sum of a column, which is 0 without rows."""
    return f"coalesce(sum({column}), 0)"


def whole(column: str) -> str:
    """Return SQL for the sum of a column, which is null if the column is null in any row."""
    return f"CASE WHEN count(*) = count({column}) THEN sum({column}) END"


def spread(stem: str, meaning: str) -> list[Column]:
    """Declare three report columns with the 50th, 90th and 99th percentile of a latency, in seconds.

    Args:
        stem: The start of their names, which end in _p50_s, _p90_s and _p99_s.
        meaning: The latency, for docs/report.md.
    """
    return [seconds(f"{stem}_p{p}_s", f"{meaning}, {p}th percentile") for p in (50, 90, 99)]
