"""The split of time: the wall time of the command in five parts, and the device's time in its own parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from batchinfer.core.wording import seconds
from batchinfer.report.page.figures import Figure, Figures
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.summary import PHASES
from batchinfer.report.tables.columns.run import RUN_COLUMNS
from batchinfer.report.tables.tables import RunRow

_COLUMNS = (
    Figure("level", "of"),
    Figure("part", "part"),
    Figure("seconds", "time", "s"),
    Figure("share", "share", "0…1"),
    Figure("meaning", "what it is"),
)
_Level = tuple[str, Sequence[tuple[str, str]]]  # its name; names of parts, and their columns in the run table

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
# of runs of older versions, whose wall time has no such parts
_PHASES: _Level = ("whole run", [(phase, f"{phase}_s") for phase in PHASES])
_ENGINE: _Level = (
    "engine",
    [("model and sampler", "model_s"), ("overhead in steps", "overhead_s"), ("idle between steps", "idle_s")],
)
# what a column is a part of, the table says by itself
_MEANINGS = {column.name: re.sub("^of [^:]*: |`", "", column.meaning) for column in RUN_COLUMNS}


def time_split(run: ReportedRun) -> PageSection:
    """Draw two bars that each add up to their whole."""
    row = run.row
    new = any(row[column] is not None for _, column in _WALL[1])
    rows = [
        part for level in ((_WALL, _DEVICE) if new else (_PHASES, _ENGINE)) for part in _parts(row, *level)
    ]
    options = {"level": "level", "part": "part", "value": "seconds", "share": "share"}
    chart = Chart("split", "Bars of what the time of the run was spent on", options)
    return PageSection("time", "Where the time went", _text(row, new), chart, Figures(_COLUMNS, rows))


def _text(row: RunRow, new: bool) -> str:
    text = f"The command took {seconds(row['wall_s'])}."
    if not new:
        return f"{text} The second bar is the time of the engine."
    if row["device_roofline_s"] is not None:
        return (
            f"{text} The second bar is the time of the device: the least that the hardware allows for this work (its "
            "roofline), and what came on top of it, by kind of operator. A kind that was faster than its roofline, "
            "because its data came from a cache, is left of zero."
        )
    if row["steps"]:
        text += " What the device's time was made of is not known, because the peaks of the hardware are not."
    return text


def _parts(row: RunRow, level: str, parts: Sequence[tuple[str, str]]) -> Iterator[tuple[Any, ...]]:
    known = [(part, column) for part, column in parts if row[column] is not None]
    whole = sum(row[column] for _, column in known)
    for part, column in known:
        yield level, part, row[column], row[column] / whole if whole else None, _MEANINGS[column]
