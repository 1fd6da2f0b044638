"""A table of numbers as the page shows it: charts are drawn from its cells, so that both say the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.core.wording import is_number, shown

_LONGEST_TEXT = 800  # characters of a cell; names of rows may be any length
_SHORT_TEXT = 32  # characters that are not broken into lines


@dataclass(frozen=True, slots=True)
class Figure:
    """One column of a table on the page. `unit` is as in the report's columns; empty for texts and plain numbers."""

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

    def without(self, *names: str) -> Figures:
        """Return the table without these columns."""
        kept = [at for at, column in enumerate(self.columns) if column.name not in names]
        rows = [tuple(row[at] for at in kept) for row in self.rows]
        return Figures(tuple(self.columns[at] for at in kept), rows)

    @property
    def headings(self) -> list[tuple[Figure, bool]]:
        """Each column, and whether it has numbers."""
        numeric = (any(is_number(row[at]) for row in self.rows) for at in range(len(self.columns)))
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
    return kind, repr(value) if is_number(value) else "", cut
