"""A section of the page: a title, a short text, a chart, and the table of the chart's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.report.page.figures import Figures


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that page.js draws."""

    kind: str  # the name of the function in page.js
    label: str  # a description for screen readers
    options: Mapping[str, Any] = field(default_factory=dict)  # the columns that the function reads

    @property
    def json(self) -> str:
        """Return the kind and the options as JSON for page.js."""
        options = {"kind": self.kind, **self.options}
        return json.dumps(options, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the page. Without figures, its text explains why there is nothing to show."""

    name: str  # the anchor
    title: str
    text: str
    chart: Chart | None = None
    figures: Figures | None = None
    note: str = ""
