"""The roofline: what steps reached, against what their arithmetic intensity allows on this hardware."""

from __future__ import annotations

from typing import Any

from batchinfer.core.wording import percent, prefixed
from batchinfer.report.page.figures import Figure, Figures
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import STEPS

MOST_POINTS = 320
_FINEST = 24  # cells a decade, in both directions; halved until there are few enough

# A cell's point lies where its steps together lie: the sums of their operations, bytes and times.
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
    Figure("kind", "steps of"),
    Figure("steps", "steps", "steps"),
    Figure("intensity", "arithmetic intensity", "FLOP/byte"),
    Figure("reached", "reached", "FLOP/s"),
    Figure("tokens", "tokens", "tokens"),
    Figure("seconds", "time", "s"),
    Figure("share", "of all steps' time", "0…1"),
)


def roofline(run: ReportedRun) -> PageSection:
    """Steps by intensity and speed, both logarithmic, below the roof of the peaks."""
    title = "The roofline"
    if not run.has(STEPS):
        return PageSection("roofline", title, run.lacks(STEPS))
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
        "roofline", title, _text(row), chart, Figures(_COLUMNS, _cells(run)),
        "A point stands for steps that lie close together, its area for their share of the time. One above the roof "
        "had its data in a cache, which is faster than the memory.",
    )  # fmt: skip


def _peaks(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the peaks of one engine, since a step is one engine's."""
    flops, bytes_per_s = (row[f"peak_{unit}_per_s"] for unit in ("flops", "bytes"))
    engines = row["replicas"] or 1  # older versions knew of one only
    return None if flops is None else flops / engines, None if bytes_per_s is None else bytes_per_s / engines


def _text(row: dict[str, Any]) -> str:
    flops, bytes_per_s = _peaks(row)
    if flops is None or bytes_per_s is None:
        return (
            "What steps reached. The peaks of this hardware are not known, so that there is no roof to compare with: "
            "`batchinfer doctor --measure` finds them for later runs."
        )
    return (
        f"The roof is what the hardware allows: on the left, memory ({prefixed(bytes_per_s, 'bytes/s')}) is the limit, "
        f"on the right, arithmetic ({prefixed(flops, 'FLOP/s')}; {row['peak_source']} peaks). Operator by "
        f"operator, this run reached {percent(row['roofline_efficiency'])} of what they allow."
    )


def _cells(run: ReportedRun) -> list[tuple[Any, ...]]:
    cells = float(_FINEST)
    while True:
        found = run.fetch(_CELLS.format(steps=run.own(STEPS), cells=cells))
        if len(found) <= MOST_POINTS:
            return found
        cells /= 2
