"""A part of the page: what it shows in a sentence or two, its charts, and the table that they are drawn from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.report.page.figures import Figures, html_prose, html_text

_SHORT_TABLE = 14  # rows that stand open below their chart


@dataclass(frozen=True, slots=True)
class Chart:
    """What page.js draws: `kind` names its function there, `options` the columns that it reads."""

    kind: str
    label: str  # what is to be seen, for those who do not see it
    options: Mapping[str, Any] = field(default_factory=dict)

    def html(self, table: str) -> str:
        """An element that says how it is to be drawn from the table of that id."""
        options = html_attribute({"kind": self.kind, **self.options})
        return (
            f'<figure class="chart {self.kind}" role="img" aria-label="{html_text(self.label)}" '
            f'data-table="{table}" data-chart="{options}"></figure>'
        )


@dataclass(frozen=True, slots=True)
class PageSection:
    """`figures` None: the section only says why there is nothing to show."""

    name: str  # its anchor
    title: str
    text: str
    chart: Chart | None = None
    figures: Figures | None = None
    note: str = ""

    def html(self) -> str:
        parts = [f"<h2>{html_text(self.title)}</h2>", f"<p>{html_prose(self.text)}</p>"]
        if self.figures is not None:
            table = f"{self.name}-table"
            parts += [self.chart.html(table)] if self.chart is not None else []
            parts.append(self._table(self.figures, table))
        parts += [f'<p class="note">{html_prose(self.note)}</p>'] if self.note else []
        return f'<section id="{self.name}">\n' + "\n".join(parts) + "\n</section>"

    def _table(self, figures: Figures, name: str) -> str:
        rows = len(figures.rows)
        is_open = " open" if rows <= _SHORT_TABLE else ""
        summary = f"Table, {rows} {'row' if rows == 1 else 'rows'}"
        return (
            f'<details{is_open}><summary>{summary}</summary><div class="scroll">{figures.html(name)}</div>'
            "</details>"
        )


def html_attribute(value: Mapping[str, Any]) -> str:
    """JSON that stands in an attribute between double quotes."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
