"""A table of numbers as the page shows it: charts are drawn from its cells, so that both say the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from batchinfer.core.sizes import size
from batchinfer.core.units import UNKNOWN, count, percent, seconds, short

_LONGEST_TEXT = 800  # characters of a cell; names of rows may be any length
_SHORT_TEXT = 32  # characters that are not broken into lines
_SHARE = "0…1"
_LEAST_SHARE = 0.0005  # what one decimal still shows
# units with metric prefixes, and how they are written then
PREFIXED = {"FLOP/s": "FLOP/s", "bytes/s": "B/s", "J": "J", "J/token": "J/token"}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True, slots=True)
class Figure:
    """A column. `unit` is as in the report's columns; empty for texts and plain numbers."""

    name: str
    title: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number with a unit of its own, in a column whose rows differ in theirs."""

    value: Any
    unit: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Columns and rows; None is "not known"."""

    columns: tuple[Figure, ...]
    rows: Sequence[Sequence[Any]]

    @property
    def headings(self) -> list[tuple[Figure, bool]]:
        """Each column, and whether it has numbers."""
        numeric = (any(_is_number(row[at]) for row in self.rows) for at in range(len(self.columns)))
        return list(zip(self.columns, numeric, strict=True))

    @property
    def cells(self) -> Iterator[list[tuple[str, str, str]]]:
        """Each row's cells: their class, a number's digits, all of them, and the text for people."""
        headings = self.headings
        for row in self.rows:
            yield [_cell(value, *heading) for value, heading in zip(row, headings, strict=True)]


def _cell(value: Any, column: Figure, numeric: bool) -> tuple[str, str, str]:
    unit = column.unit
    if isinstance(value, Amount):
        value, unit = value.value, value.unit
    text = shown(value, unit)
    kind = "n" if numeric else "w" if len(text) > _SHORT_TEXT else ""
    cut = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
    return kind, repr(value) if _is_number(value) else "", cut


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any, unit: str = "") -> str:
    """A value as people read it."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S} UTC"
    if not _is_number(value):
        return str(value)
    return _number(value, unit)


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value) if value >= 0 else f"−{seconds(-value)}"
    if unit == _SHARE:
        return _share(value)
    if unit == "bytes":
        return size(value)
    if unit in PREFIXED:
        return prefixed(value, unit)
    if "/" in unit:
        return f"{short(value)} {unit}"
    return count(value) if isinstance(value, int) else short(value)


def _share(value: float) -> str:
    """A share that is not zero does not look like it."""
    if value == 0 or abs(value) >= _LEAST_SHARE:
        return percent(value).replace("-", "−")
    return "< 0.1%" if value > 0 else "> −0.1%"


def prefixed(value: float, unit: str) -> str:
    """A figure with the metric prefix at its unit: 180 GFLOP/s."""
    size, letter = next((one for one in _PREFIXES if abs(value) >= one[0] * 0.9995), (1.0, ""))
    return f"{short(value / size)} {letter}{PREFIXED[unit]}"
