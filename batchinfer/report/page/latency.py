"""How long requests took, as percentiles."""

from __future__ import annotations

from typing import Any

from batchinfer.report.page.figures import Figure, Figures
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns import REQUESTS, STEPS

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
_OF_REQUESTS = ("queue", "ttft", "tpot", "latency")
_TITLES = {
    "queue": "waiting in the queue",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "whole request",
}
_COLUMNS = (Figure("percentile", "percentile"), *(Figure(f"{n}_s", t, "s") for n, t in _TITLES.items()))

# the least interval that reaches the share of all decoded tokens, as in the table `run`
_ITL = """
WITH ranked AS (
    SELECT interval_s, sum(decode_tokens) OVER (ORDER BY interval_s ROWS UNBOUNDED PRECEDING) AS reached,
        sum(decode_tokens) OVER () AS whole
    FROM {steps} WHERE interval_s IS NOT NULL AND decode_tokens > 0
)
SELECT {wanted} FROM ranked
"""


def latency(run: ReportedRun) -> PageSection:
    """One line for each latency."""
    title = "Latency percentiles"
    if not run.has(REQUESTS):
        return PageSection("latency", title, run.lacks(REQUESTS))
    found = _spreads(run)
    rows = [
        (f"p{percentile:g}", *(found[name][at] for name in _TITLES))
        for at, percentile in enumerate(PERCENTILES)
    ]
    options = {
        "category": "percentile",
        "lines": [{"y": f"{name}_s"} for name in _TITLES],
        "unit": "s",
        "log": True,
    }
    chart = Chart("curves", "A line for each latency, over percentiles", options)
    text = (
        "Offline, all requests are handed over early, so that TTFT is mostly waiting. TPOT: seconds per output token "
        "after the first, one value per request. ITL: the gap between two tokens of a sequence, one value per token."
    )
    return PageSection("latency", title, text, chart, Figures(_COLUMNS, rows))


def _spreads(run: ReportedRun) -> dict[str, tuple[Any, ...]]:
    shares = [f"{percentile / 100:.6f}::DOUBLE" for percentile in PERCENTILES]
    found: dict[str, tuple[Any, ...]] = {}
    for name in _OF_REQUESTS:
        wanted = ", ".join(f"quantile_cont({name}_s, {share})" for share in shares)
        (found[name],) = run.fetch(f"SELECT {wanted} FROM {run.own(REQUESTS)}")
    wanted = ", ".join(f"min(interval_s) FILTER (reached >= {share} * whole)" for share in shares)
    (found["itl"],) = run.fetch(_ITL.format(steps=run.own(STEPS), wanted=wanted))
    return found
