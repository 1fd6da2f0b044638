"""The section with the percentiles of latencies."""

from __future__ import annotations

from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import REQUESTS, STEPS
from batchinfer.report.tables.percentiles import percentiles

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
_TITLES = {
    "queue": "waiting in the queue",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "whole request",
}
_COLUMNS = (
    TableColumn("percentile", "percentile"),
    *(TableColumn(f"{n}_s", t, "s") for n, t in _TITLES.items()),
)


def latency(run: ReportedRun) -> PageSection:
    """Return the section of the report page about latencies, with a line of percentiles for each latency."""
    title = "Latency percentiles"
    if not run.has(REQUESTS):
        return PageSection("latency", title, run.why_empty(REQUESTS))
    titles = _TITLES if run.has_output else {name: _TITLES[name] for name in ("queue", "latency")}
    shares = [percentile / 100 for percentile in PERCENTILES]
    found = percentiles(run.database, run.own(REQUESTS), run.own(STEPS), shares)
    rows = [
        (f"p{percentile:g}", *(found[name][at] for name in _TITLES))
        for at, percentile in enumerate(PERCENTILES)
    ]
    options = {
        "category": "percentile",
        "lines": [{"y": f"{name}_s"} for name in titles],
        "unit": "s",
        "log": True,
    }
    chart = Chart("curves", "A line for each latency, over percentiles", options)
    table = PageTable(_COLUMNS, rows).without(*(f"{name}_s" for name in _TITLES.keys() - titles.keys()))
    if not run.has_output:
        return PageSection("latency", title, "Offline, all requests are queued early.", chart, table)
    text = (
        "Offline, all requests are handed over early, so TTFT is mostly waiting. TPOT: seconds per output token "
        "after the first, one value per request. ITL: the gap between two tokens of a sequence, one value per token."
    )
    return PageSection("latency", title, text, chart, table)
