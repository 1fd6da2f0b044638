"""The section with the roofline: the speed of steps, and the limit for their arithmetic intensity."""

from __future__ import annotations

from typing import Any

from batchinfer.core.wording import percent, prefixed
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import STEPS

MOST_POINTS = 320
_FINEST = 24  # cells per decade on both axes; halved until there are at most MOST_POINTS cells

# The point of a cell is computed from the sums of the operations, bytes and times of its steps
_CELLS = """
WITH counted AS (
    SELECT *, CASE WHEN decode_tokens = 0 THEN 'prefill' WHEN prefill_tokens = 0 THEN 'decode' ELSE 'mixed' END AS kind
    FROM {steps} WHERE flops > 0 AND bytes > 0 AND duration_s > 0
)
SELECT kind, count(*) AS steps, sum(flops)::DOUBLE / sum(bytes) AS intensity,
    sum(flops)::DOUBLE / sum(duration_s) AS reached, sum(prefill_tokens + decode_tokens)::BIGINT AS tokens,
    sum(duration_s) AS seconds, sum(duration_s) / (SELECT sum(duration_s) FROM counted) AS share
FROM counted
GROUP BY kind, floor(log10(flops::DOUBLE / bytes) * {cells}), floor(log10(flops::DOUBLE / duration_s) * {cells})
ORDER BY kind, intensity, reached
"""
_COLUMNS = (
    TableColumn("kind", "steps of"),
    TableColumn("steps", "steps", "steps"),
    TableColumn("intensity", "arithmetic intensity", "FLOP/byte"),
    TableColumn("reached", "reached", "FLOP/s"),
    TableColumn("tokens", "tokens", "tokens"),
    TableColumn("seconds", "time", "s"),
    TableColumn("share", "of all steps' time", "0…1"),
)


def roofline(run: ReportedRun) -> PageSection:
    """Return the section of the report page about the roofline.

    It shows steps by arithmetic intensity and speed, below the peaks of the hardware.
    """
    title = "The roofline"
    if not run.has(STEPS):
        return PageSection("roofline", title, run.why_empty(STEPS))
    row = run.row
    flops, bytes_per_s = _peaks(row)
    options = {
        "x": "intensity",
        "y": "reached",
        "by": "kind",
        "size": "share",
        "peak_flops": flops,
        "peak_bytes": bytes_per_s,
    }
    chart = Chart("roofline", "Points of steps below the roof of the hardware, log-log", options)
    return PageSection(
        "roofline", title, _text(row), chart, PageTable(_COLUMNS, _cells(run)),
        "A point is a group of similar steps, and its area shows their share of the time. The data of a point above "
        "the roof came from a CPU cache, which is faster than the memory.",
    )  # fmt: skip


def _peaks(row: dict[str, Any]) -> tuple[float | None, float | None]:
    # Of one engine, because a step runs on one engine
    flops, bytes_per_s = (row[f"peak_{unit}_per_s"] for unit in ("flops", "bytes"))
    engines = row["replicas"] or 1  # older versions knew of one only
    return None if flops is None else flops / engines, None if bytes_per_s is None else bytes_per_s / engines


def _text(row: dict[str, Any]) -> str:
    flops, bytes_per_s = _peaks(row)
    if flops is None or bytes_per_s is None:
        return (
            "The speed of steps. The peaks of this hardware are unknown, so there is no roof to compare with. "
            "`batchinfer doctor --measure` measures them for later runs."
        )
    return (
        f"The roof is the limit of the hardware: on the left, memory ({prefixed(bytes_per_s, 'bytes/s')}), and "
        f"on the right, arithmetic ({prefixed(flops, 'FLOP/s')}; {row['peak_source']} peaks). Operator by "
        f"operator, this run reached {percent(row['roofline_efficiency'])} of these limits."
    )


def _cells(run: ReportedRun) -> list[tuple[Any, ...]]:
    cells = float(_FINEST)
    while True:
        found = run.fetch(_CELLS.format(steps=run.own(STEPS), cells=cells))
        if len(found) <= MOST_POINTS:
            return found
        cells /= 2
