"""A column of a report's table, and short ways to declare one of the usual types."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `unit` is empty for names, texts and timestamps."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str


TEXT = pa.string()
INT = pa.int64()
REAL = pa.float64()
TIME = pa.timestamp("us", tz="UTC")
TEXTS = pa.map_(pa.string(), pa.string())
COUNTS = pa.map_(pa.string(), pa.int64())


def text(name: str, meaning: str) -> Column:
    """A name or a text."""
    return Column(name, TEXT, "", meaning)


def count(name: str, unit: str, meaning: str) -> Column:
    """A whole number."""
    return Column(name, INT, unit, meaning)


def seconds(name: str, meaning: str) -> Column:
    """A time in seconds."""
    return Column(name, REAL, "s", meaning)


def ratio(name: str, meaning: str) -> Column:
    """A share of 1."""
    return Column(name, REAL, "0…1", meaning)


def spread(stem: str, meaning: str) -> list[Column]:
    """The three percentile columns of one latency."""
    return [seconds(f"{stem}_p{p}_s", f"{meaning}, {p}th percentile") for p in (50, 90, 99)]
