"""A parsed page, as a browser without scripts would show it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = ("meta", "br", "hr", "img", "input", "link")


@dataclass
class ReadTable:
    """Column names, and rows of cells: the number with all digits, or the text."""

    columns: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)

    def column(self, name: str) -> list[Any]:
        return [row[self.columns.index(name)] for row in self.rows]


class ParsedPage(HTMLParser):
    """All parts of a page that tests read. Raises AssertionError on unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, ReadTable] = {}
        self.charts: list[tuple[str, dict[str, Any]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.policy = ""
        self._open: list[str] = []
        self._table: ReadTable | None = None
        self._cell: tuple[str | None, list[str]] | None = None
        self.feed(text)
        self.close()
        assert self._open == []

    @property
    def ids(self) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get("id"))]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self._open.append(tag)
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "script":
            self.scripts.append("")
        if tag == "figure":
            self.charts.append((found["data-table"] or "", json.loads(found["data-chart"] or "")))
        self._start_of_table(tag, found)

    def _start_of_table(self, tag: str, found: dict[str, str | None]) -> None:
        if tag == "table":
            self._table = self.tables[found["id"] or ""] = ReadTable()
        elif tag == "th" and self._table is not None:
            self._table.columns.append(found["data-c"] or "")
        elif tag == "tr" and self._table is not None and "tbody" in self._open:
            self._table.rows.append([])
        elif tag == "td":
            self._cell = (found.get("data-v"), [])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "td" and self._table is not None and self._cell is not None:
            number, texts = self._cell
            self._table.rows[-1].append("".join(texts) if number is None else float(number))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif self._open and self._open[-1] != "style":
            self.text += data
        if self._cell is not None:
            self._cell[1].append(data)
