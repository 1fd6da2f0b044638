"""A part of the page: what it shows in a sentence or two, its chart, and the table that it is drawn from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.report.page.figures import Figures


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that page.js draws: `kind` names the function there, `options` the columns that it reads."""

    kind: str
    label: str  # what is to be seen, for those who do not see it
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> str:
        """The chart's kind and options, as page.js reads them."""
        options = {"kind": self.kind, **self.options}
        return json.dumps(options, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class PageSection:
    """`figures` None: the section only says why there is nothing to show."""

    name: str  # its anchor
    title: str
    text: str
    chart: Chart | None = None
    figures: Figures | None = None
    note: str = ""
