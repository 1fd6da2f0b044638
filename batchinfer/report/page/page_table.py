"""The tables of numbers on the page. Charts are drawn from their cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.core.wording import is_number, shown

_LONGEST_TEXT = 800  # longer texts of a cell are truncated
_SHORT_TEXT = 32  # characters of a text that is not broken into lines


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table on the report page.

    Attributes:
        name: The name by which charts refer to the column.
        title: The heading of the column.
        unit: The unit, as in the report's columns; empty for texts and plain numbers.
    """

    name: str
    title: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number with its own unit, in a table column whose rows have different units."""

    value: Any
    unit: str


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of numbers on the report page. Charts are drawn from the same numbers.

    Attributes:
        columns: The columns.
        rows: The cells of each row. None means unknown.
    """

    columns: tuple[TableColumn, ...]
    rows: Sequence[Sequence[Any]]

    def without(self, *names: str) -> PageTable:
        """Return the table without the columns with these names."""
        kept = [at for at, column in enumerate(self.columns) if column.name not in names]
        rows = [tuple(row[at] for at in kept) for row in self.rows]
        return PageTable(tuple(self.columns[at] for at in kept), rows)

    @property
    def headings(self) -> list[tuple[TableColumn, bool]]:
        """Return pairs of a column of the table, and True if the column has numbers."""
        numeric = (any(is_number(row[at]) for row in self.rows) for at in range(len(self.columns)))
        return list(zip(self.columns, numeric, strict=True))

    @property
    def cells(self) -> Iterator[list[tuple[str, str, str]]]:
        """Yield the cells of each table row.

        A cell is its CSS class, all digits of its number ("" for a text), and the displayed text.
        """
        headings = self.headings
        for row in self.rows:
            yield [_cell(value, *heading) for value, heading in zip(row, headings, strict=True)]


def _cell(value: Any, column: TableColumn, numeric: bool) -> tuple[str, str, str]:
    unit = column.unit
    if isinstance(value, Amount):
        value, unit = value.value, value.unit
    text = shown(value, unit)
    kind = "n" if numeric else "w" if len(text) > _SHORT_TEXT else ""
    shortened = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
    return kind, repr(value) if is_number(value) else "", shortened
