"""The section with the prefix tree and the tokens that each prefix saved."""

from __future__ import annotations

from typing import Any

from batchinfer.core.wording import count
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import PREFIXES

MOST_NODES = 120

# The nodes that saved most, and all their ancestors
_NODES = """
WITH RECURSIVE best AS (
    SELECT prefix FROM {prefixes} WHERE cached_tokens > 0 ORDER BY cached_tokens DESC, prefix LIMIT {most}
), shown AS (
    SELECT prefix FROM best UNION SELECT parent FROM {prefixes} AS p JOIN shown USING (prefix) WHERE parent IS NOT NULL
)
SELECT prefix::VARCHAR, parent::VARCHAR, depth, tokens, users, cached_tokens, saved_tokens, device_s
FROM {prefixes} JOIN shown USING (prefix) ORDER BY cached_tokens DESC, prefix
"""
_SUMS = """
SELECT count(*), coalesce(sum(cached_tokens), 0)::BIGINT, sum(saved_tokens)::BIGINT, sum(device_s) FROM {prefixes}
"""
_COLUMNS = (
    TableColumn("prefix", "prefix"),
    TableColumn("parent", "begins with"),
    TableColumn("depth", "length", "tokens"),
    TableColumn("tokens", "beyond the one it begins with", "tokens"),
    TableColumn("users", "requests", "requests"),
    TableColumn("cached_tokens", "tokens saved", "tokens"),
    TableColumn("saved_tokens", "at best", "tokens"),
    TableColumn("device_s", "time to run it", "s"),
)


def prefix_tree(run: ReportedRun) -> PageSection:
    """Return the section of the report page about shared prefixes.

    They are drawn as nested boxes, whose areas show the saved tokens.
    """
    title = "Shared prefixes"
    if not run.has(PREFIXES):
        why = "Nothing to show: no prompts of this run shared a prefix of a KV block or more."
        known = run.row["prefix_saved_tokens"] == 0
        return PageSection("prefixes", title, why if known else run.why_empty(PREFIXES))
    prefixes = run.own(PREFIXES)
    (sums,) = run.fetch(_SUMS.format(prefixes=prefixes))
    number, saved = sums[:2]
    rows = run.fetch(_NODES.format(prefixes=prefixes, most=MOST_NODES))
    if not rows:
        why = f"Nothing to show: {count(number)} prefixes were shared, and none was in the cache when it was needed."
        return PageSection("prefixes", title, why)
    text = (
        f"Prompts with a common prefix compute it once: {count(saved)} prompt tokens were not computed again. "
        "A box is a shared prefix, and its area shows the saved tokens. Boxes inside it are longer prefixes."
    )
    if (others := number - len(rows)) > 0:
        text += f" The {count(len(rows))} most important of {count(number)} prefixes are shown."
        rows.append(_others(others, sums, rows))
    options = {"node": "prefix", "parent": "parent", "value": "cached_tokens"}
    chart = Chart("tree", "Nested boxes of shared prefixes, by tokens saved", options)
    return PageSection("prefixes", title, text, chart, PageTable(_COLUMNS, rows))


def _others(number: int, sums: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    _, cached, saved, device_s = sums
    left = (cached - sum(row[5] for row in rows), saved - sum(row[6] for row in rows))
    time = None if device_s is None else max(0.0, device_s - sum(row[7] or 0.0 for row in rows))
    return f"{count(number)} others", None, None, None, None, *left, time
