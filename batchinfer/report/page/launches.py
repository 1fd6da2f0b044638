"""The section with the launches of steps on a GPU, actual and forecast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchinfer.core.samples import LAUNCH_MODES, LaunchMode
from batchinfer.core.wording import count, seconds, size
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.tables import RunRow

_COLUMNS = (
    TableColumn("mode", "launched as"),
    TableColumn("steps", "steps", "steps"),
    TableColumn("steps_share", "share of steps", "0…1"),
    TableColumn("tokens", "tokens", "tokens"),
    TableColumn("tokens_share", "share of tokens", "0…1"),
    TableColumn("forecast_steps", "steps forecast", "steps"),
    TableColumn("forecast_tokens", "tokens forecast", "tokens"),
)
_TITLES: dict[LaunchMode, str] = {
    "full_graph": "one graph",
    "piecewise_graph": "graphs of pieces",
    "eager": "operator by operator",
}


def launches(run: ReportedRun) -> Iterator[PageSection]:
    """Yield the section of the report page about how steps were launched on a GPU: as CUDA graphs or eagerly.

    It yields nothing for a run on a CPU, or of a version that did not count launches.
    """
    if run.row["eager_steps"] is None:
        return
    options = {"category": "mode", "bars": ["steps_share", "tokens_share"], "unit": "0…1", "horizontal": True}
    chart = Chart("bars", "Bars of the shares of steps and tokens by the way they were launched", options)
    text = (
        "A step that is one graph costs the host one launch; a step of pieces, a few per layer. Steps run operator "
        "by operator if they are too large to gain from a graph, or if there was too little memory to capture one."
    )
    rows = [_cells(run.row, mode) for mode in LAUNCH_MODES]
    yield PageSection(
        "launches",
        "How steps were launched",
        text,
        chart,
        PageTable(_COLUMNS, rows),
        f"{_at_once(run.row)}{_captures(run.row)}",
    )


def _cells(row: RunRow, mode: LaunchMode) -> tuple[Any, ...]:
    names = ("steps", "steps_share", "tokens", "tokens_share")
    forecasts = (row[f"forecast_{mode}_{unit}"] for unit in ("steps", "tokens"))
    return _TITLES[mode], *(row[f"{mode}_{name}"] for name in names), *forecasts


def _at_once(row: RunRow) -> str:
    times, steps = row.get("host_launches"), row["steps"]
    if times is None or times >= steps:
        return ""
    return f"The host launched the {count(steps)} steps in {count(times)} launches, because some steps only decoded. "


def _captures(row: RunRow) -> str:
    parts = [
        ("while loading", row["load_capture_s"], row["load_graph_bytes"]),
        ("between steps", row["capture_s"], row["graph_bytes"]),
    ]
    known = [f"{_spent(took, memory)} {when}" for when, took, memory in parts if took is not None]
    return f"Capturing graphs took {' and '.join(known)}." if known else ""


def _spent(took: float, memory: int | None) -> str:
    # Older reports do not have the bytes
    return seconds(took) if memory is None else f"{seconds(took)} and {size(memory)} of GPU memory"
