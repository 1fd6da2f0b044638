"""The section that splits the wall time of the command and the device time into parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from batchinfer.core.text import without_markup
from batchinfer.core.wording import seconds
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.summary import PHASES
from batchinfer.report.tables.columns.run import RUN_COLUMNS
from batchinfer.report.tables.tables import RunRow

_COLUMNS = (
    TableColumn("level", "of"),
    TableColumn("part", "part"),
    TableColumn("seconds", "time", "s"),
    TableColumn("share", "share", "0…1"),
    TableColumn("meaning", "what it is"),
)
_Level = tuple[str, Sequence[tuple[str, str]]]  # a name, and the names and columns of its parts

_WALL: _Level = (
    "whole run",
    [(part, f"wall_{part}_s") for part in ("load", "input", "device", "host", "output")],
)
_DEVICE: _Level = (
    "device",
    [
        ("roofline", "device_roofline_s"),
        ("padding", "device_padding_s"),
        ("recomputation", "device_recomputation_s"),
        ("linear layers", "device_linear_loss_s"),
        ("attention", "device_attention_loss_s"),
        ("sampling", "device_sampling_loss_s"),
        ("elementwise", "device_elementwise_loss_s"),
        ("each step", "device_other_loss_s"),
    ],
)
# for runs of older versions, which do not have the parts of the wall time
_PHASES: _Level = ("whole run", [(phase, f"{phase}_s") for phase in PHASES])
_ENGINE: _Level = (
    "engine",
    [("model and sampler", "model_s"), ("overhead in steps", "overhead_s"), ("idle between steps", "idle_s")],
)
# the table already shows the whole that a column is part of
_MEANINGS = {
    column.name: re.sub("^part of [^:]*: ", "", without_markup(column.meaning)) for column in RUN_COLUMNS
}


def time_split(run: ReportedRun) -> PageSection:
    """Return the section of the report page with the parts of a run's wall time and of its device time."""
    row = run.row
    new = any(row[column] is not None for _, column in _WALL[1])
    rows = [
        part for level in ((_WALL, _DEVICE) if new else (_PHASES, _ENGINE)) for part in _parts(row, *level)
    ]
    options = {"level": "level", "part": "part", "value": "seconds", "share": "share"}
    chart = Chart("split", "Bars of the parts of the run's time", options)
    return PageSection("time", "Where the time went", _text(row, new), chart, PageTable(_COLUMNS, rows))


def _text(row: RunRow, new: bool) -> str:
    text = f"The command took {seconds(row['wall_s'])}."
    if not new:
        return f"{text} The second bar is the time of the engine."
    if row["device_roofline_s"] is not None:
        return (
            f"{text} The second bar is the device time: the least time that the hardware needs for this work (its "
            "roofline), and the additional time by kind of operator. A kind that was faster than its roofline, "
            "because its data came from a CPU cache, is left of zero."
        )
    if row["steps"]:
        text += " The parts of the device time are unknown, because the peaks of the hardware are unknown."
    return text


def _parts(row: RunRow, level: str, parts: Sequence[tuple[str, str]]) -> Iterator[tuple[Any, ...]]:
    known = [(part, column) for part, column in parts if row[column] is not None]
    whole = sum(row[column] for _, column in known)
    for part, column in known:
        yield level, part, row[column], row[column] / whole if whole else None, _MEANINGS[column]
