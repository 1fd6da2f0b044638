"""The sections with throughput, batch size and KV cache over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import PROMPT_TOKENS, STEPS

MOST_SEGMENTS = 240  # one or two pixels each on the screen of a phone

# A segment consists of whole steps, so the tokens of all segments add up to the run's. It lasts from the end of the
# segment before to the end of its last step. The time of a restarted engine continues where the engine before it ended.
_SEGMENTS = """
WITH engines AS (
    SELECT engine, coalesce(any_value(replica), 0) AS place, min(started_s) AS first_s,
        max(started_s + duration_s) AS last_s
    FROM {steps} GROUP BY engine
), placed AS (
    SELECT engine, coalesce(sum(last_s - first_s) OVER (
        PARTITION BY place ORDER BY engine ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) - first_s AS moved_s
    FROM engines
), timed AS (
    SELECT s.*, started_s + duration_s + moved_s AS at_s FROM {steps} AS s JOIN placed USING (engine)
), whole AS (
    SELECT greatest(max(at_s), 1e-9) AS wall_s FROM timed
), segments AS (
    SELECT least(floor(at_s / wall_s * {most}), {most} - 1) AS segment, max(at_s) AS until_s,
        count(*) AS steps, sum({prompt_tokens}) AS prompt_tokens,
        sum(decode_tokens) AS decode_tokens,
        min(running) AS running_min, median(running) AS running_median, max(running) AS running_max,
        max(waiting) AS waiting_max,
        min(blocks_used / blocks_total) AS kv_min, median(blocks_used / blocks_total) AS kv_median,
        max(blocks_used / blocks_total) AS kv_max, sum(preemptions) AS preemptions
    FROM timed, whole GROUP BY segment
), spans AS (
    SELECT lag(until_s, 1, 0.0::DOUBLE) OVER (ORDER BY until_s) AS from_s, * FROM segments
)
SELECT from_s, until_s, steps::BIGINT,
    prompt_tokens::DOUBLE / (until_s - from_s), decode_tokens::DOUBLE / (until_s - from_s),
    running_min, running_median, running_max, waiting_max, kv_min, kv_median, kv_max, preemptions::BIGINT
FROM spans WHERE until_s > from_s ORDER BY until_s
"""
_TIMES = (
    TableColumn("from_s", "from", "s"),
    TableColumn("until_s", "to", "s"),
    TableColumn("steps", "steps", "steps"),
)
_THROUGHPUT = (
    TableColumn("prompt_tokens_per_s", "prompt tokens", "tokens/s"),
    TableColumn("decode_tokens_per_s", "output tokens", "tokens/s"),
)
_BATCH = (
    TableColumn("running_min", "running, least", "sequences"),
    TableColumn("running_median", "running, median", "sequences"),
    TableColumn("running_max", "running, most", "sequences"),
    TableColumn("waiting_max", "waiting, most", "sequences"),
)
_KV = (
    TableColumn("kv_min", "KV blocks used, least", "0…1"),
    TableColumn("kv_median", "KV blocks used, median", "0…1"),
    TableColumn("kv_max", "KV blocks used, most", "0…1"),
    TableColumn("preemptions", "preemptions", "times"),
)
_BINS = (
    "Steps are grouped into at most {most} segments of time. A segment consists of whole steps, and its rate is its "
    "tokens divided by its length."
)


def timeline(run: ReportedRun) -> Iterator[PageSection]:
    """Yield the sections of the report page with throughput, batch size and KV cache over time.

    They have a common time axis. Tasks without output tokens only have throughput.
    """
    if not run.has(STEPS):
        yield PageSection("throughput", "Over time", run.why_empty(STEPS))
        return
    found = run.fetch(_SEGMENTS.format(steps=run.own(STEPS), prompt_tokens=PROMPT_TOKENS, most=MOST_SEGMENTS))
    decoded = [{"y": "decode_tokens_per_s", "stack": True}] if run.has_output else []
    more = "; the three charts over time move together" if run.has_output else ""
    yield _section(
        "throughput", "Throughput over time",
        f"Tokens that the model ran in each second of the engine. Drag across the chart to look closer{more}.",
        found, _THROUGHPUT[: 1 + len(decoded)], 3,
        {"unit": "tokens/s", "lines": [{"y": "prompt_tokens_per_s", "stack": True}, *decoded]},
    )  # fmt: skip
    if not run.has_output:
        return
    yield _section(
        "batch", "Batch size over time",
        "Sequences that ran together: the median of each stretch of time, in a band from its least to its most.",
        found, _BATCH, 5,
        {"unit": "sequences", "lines": [{"y": "running_median", "band": ["running_min", "running_max"]}]},
    )  # fmt: skip
    yield _section(
        "kv", "KV cache over time", "Share of the KV cache's blocks that was in use, in the same way.", found, _KV, 9,
        {"unit": "0…1", "lines": [{"y": "kv_median", "band": ["kv_min", "kv_max"]}]},
    )  # fmt: skip


def _section(
    name: str,
    title: str,
    text: str,
    found: list[tuple[Any, ...]],
    columns: tuple[TableColumn, ...],
    first: int,
    options: dict[str, Any],
) -> PageSection:
    rows = [(*row[:3], *row[first : first + len(columns)]) for row in found]
    options = {"x": "until_s", "from": "from_s", "group": "time", **options}
    chart = Chart("lines", f"{title}, as lines", options)
    note = _BINS.format(most=MOST_SEGMENTS)
    return PageSection(name, title, text, chart, PageTable((*_TIMES, *columns), rows), note)
