"""A column of a report's table: its one declaration, and short ways to write it for the usual types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

Formula = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: what it is, and how it is made. Without `sql` and `formula` it is given as it is."""

    name: str
    type: pa.DataType
    unit: str  # empty for names, texts and timestamps
    meaning: str
    sql: str = ""  # a DuckDB expression over what the table is made of
    formula: Formula | None = None  # its value from the columns of its row that stand before it


TEXT = pa.string()
INT = pa.int64()
REAL = pa.float64()
TIME = pa.timestamp("us", tz="UTC")
TEXTS = pa.map_(pa.string(), pa.string())
COUNTS = pa.map_(pa.string(), pa.int64())


def text(name: str, meaning: str, sql: str = "") -> Column:
    """A name or a text."""
    return Column(name, TEXT, "", meaning, sql)


def count(name: str, unit: str, meaning: str, sql: str = "") -> Column:
    """A whole number."""
    return Column(name, INT, unit, meaning, sql)


def real(name: str, unit: str, meaning: str, sql: str = "", formula: Formula | None = None) -> Column:
    """A number that need not be whole."""
    return Column(name, REAL, unit, meaning, sql, formula)


def seconds(name: str, meaning: str, sql: str = "", formula: Formula | None = None) -> Column:
    """A time in seconds."""
    return real(name, "s", meaning, sql, formula)


def ratio(name: str, meaning: str, sql: str = "", formula: Formula | None = None) -> Column:
    """A share of 1."""
    return real(name, "0…1", meaning, sql, formula)


def total(column: str) -> str:
    """Sum a column that is known in every row; 0 without rows."""
    return f"coalesce(sum({column}), 0)"


def whole(column: str) -> str:
    """Sum a column; null as soon as one row does not know it."""
    return f"CASE WHEN count(*) = count({column}) THEN sum({column}) END"


def spread(stem: str, meaning: str) -> list[Column]:
    """The three percentile columns of one latency."""
    return [seconds(f"{stem}_p{p}_s", f"{meaning}, {p}th percentile") for p in (50, 90, 99)]
