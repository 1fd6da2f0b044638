"""A section of the page: a title, a short text, a chart, and the table of the chart's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.report.page.page_table import PageTable


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the report page, which page.js draws.

    Attributes:
        kind: The name of the function in page.js.
        label: A description for screen readers.
        options: Arguments of the function, such as the columns to draw.
    """

    kind: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> str:
        """Return kind and options of the chart as JSON for page.js."""
        options = {"kind": self.kind, **self.options}
        return json.dumps(options, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the report page. Without a table, its text explains why there is nothing to show.

    Attributes:
        name: The anchor.
        title: The heading.
        text: Text above the chart.
        chart: The chart, or None.
        table: The table with the numbers of the chart, or None.
        note: Text below the chart.
    """

    name: str
    title: str
    text: str
    chart: Chart | None = None
    table: PageTable | None = None
    note: str = ""
