"""Where the time went: the wall time of the command, then that of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchinfer.report.page.figures import Figure, Figures
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.summary import PHASES
from batchinfer.report.tables import RunRow
from batchinfer.report.units import seconds

_COLUMNS = (
    Figure("level", "of"),
    Figure("part", "part"),
    Figure("seconds", "time", "s"),
    Figure("share", "share", "0…1"),
)
_ENGINE = (("model", "model and sampler"), ("overhead", "overhead in steps"), ("idle", "idle between steps"))
_WHOLE_RUN = "whole run"
_ENGINE_LEVEL = "engine"


def time_split(run: ReportedRun) -> PageSection:
    """Two bars that each add up to their whole."""
    rows = [*_level(_WHOLE_RUN, _phases(run.row)), *_level(_ENGINE_LEVEL, _engine(run.row))]
    text = f"The command took {seconds(run.row['wall_s'])}."
    if any(level == _ENGINE_LEVEL for level, *_ in rows):
        text += f" The engine computed for {seconds(run.row['engine_wall_s'])} of that; the second bar is its time."
    options = {"level": "level", "part": "part", "value": "seconds"}
    chart = Chart("split", "Bars of the parts that the time of the run is made of", options)
    return PageSection("time", "Where the time went", text, chart, Figures(_COLUMNS, rows))


def _phases(row: RunRow) -> list[tuple[str, float]]:
    return [(name, row[f"{name}_s"]) for name in PHASES if row[f"{name}_s"] is not None]


def _engine(row: RunRow) -> list[tuple[str, float]]:
    return [(title, row[f"{name}_s"]) for name, title in _ENGINE if row[f"{name}_s"] is not None]


def _level(level: str, parts: list[tuple[str, float]]) -> Iterator[tuple[Any, ...]]:
    whole = sum(spent for _, spent in parts)
    for part, spent in parts:
        yield level, part, spent, spent / whole if whole else None
