"""The section with the rows that took the most device time."""

from __future__ import annotations

from batchinfer.core.wording import percent
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import REQUESTS, ROWS

MOST_REQUESTS = 12

_EXPENSIVE = """
WITH expensive AS (
    SELECT key, rows, prompt_tokens, completion_tokens, cached_tokens, device_s, latency_s FROM {requests}
    WHERE device_s IS NOT NULL ORDER BY device_s DESC, key LIMIT {most}
), first_rows AS (
    SELECT key, min(row_id) AS row_id FROM {rows} WHERE key IN (SELECT key FROM expensive) GROUP BY key
)
SELECT {name}, d.rows, prompt_tokens, completion_tokens, cached_tokens, device_s, latency_s
FROM expensive AS d LEFT JOIN first_rows USING (key) {names} ORDER BY device_s DESC, key
"""
_SHARE = """
SELECT sum(device_s) FILTER (place <= greatest(1, whole / 100)) / sum(device_s)
FROM (SELECT device_s, row_number() OVER (ORDER BY device_s DESC) AS place, count(*) OVER () AS whole FROM {requests}
    WHERE device_s IS NOT NULL)
"""
_COLUMNS = (
    TableColumn("row", "row"),
    TableColumn("rows", "rows with this answer", "rows"),
    TableColumn("prompt_tokens", "prompt tokens", "tokens"),
    TableColumn("completion_tokens", "output tokens", "tokens"),
    TableColumn("cached_tokens", "shared", "tokens"),
    TableColumn("device_s", "time of the device", "s"),
    TableColumn("latency_s", "latency", "s"),
)


def expensive(run: ReportedRun) -> PageSection:
    """Return the section of the report page about the requests with the most device time."""
    title = "Most expensive requests"
    ((share,),) = run.fetch(_SHARE.format(requests=run.own(REQUESTS)))
    if share is None:
        return PageSection("expensive", title, run.why_empty("requests` with `device_s"))
    rows = run.fetch(_query(run))
    options = {"category": "row", "bars": ["device_s"], "unit": "s", "horizontal": True}
    chart = Chart("bars", "Bars of the requests that took the device longest", options)
    text = (
        "The requests that took the device longest, with the first row that each answers. The time of a shared prefix "
        f"is split among all who share it. The most expensive hundredth of all requests took {percent(share)} of the "
        "time."
    )
    table = PageTable(_COLUMNS, rows)
    if not run.has_output:
        table = table.without("completion_tokens")
    return PageSection("expensive", title, text, chart, table)


def _query(run: ReportedRun) -> str:
    # Rows have their custom ids if the results of this run are still published
    name, names = "coalesce('row ' || row_id, 'key ' || key[:12])", ""
    if run.results:
        name = f"coalesce(custom_id, {name})"
        names = "LEFT JOIN (SELECT DISTINCT row_id, custom_id FROM results) USING (row_id)"
    return _EXPENSIVE.format(
        requests=run.own(REQUESTS), rows=run.own(ROWS), most=MOST_REQUESTS, name=name, names=names
    )
