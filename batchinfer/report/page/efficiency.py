"""The sections with the hardware efficiency by phase and by prompt length."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import BUCKETS, PHASES

_SHARES = (
    TableColumn("roofline", "of the roofline", "0…1"),
    TableColumn("mfu", "MFU", "0…1"),
    TableColumn("mbu", "MBU", "0…1"),
)
_PHASES = (
    TableColumn("phase", "steps of"),
    TableColumn("steps", "steps", "steps"),
    TableColumn("prompt_tokens", "prompt tokens", "tokens"),
    TableColumn("decode_tokens", "tokens decoded", "tokens"),
    TableColumn("engine_s", "time of the engine", "s"),
    TableColumn("device_s", "time of the device", "s"),
    *_SHARES,
)
_BUCKETS = (
    TableColumn("bucket", "prompt tokens"),
    TableColumn("requests", "requests", "requests"),
    TableColumn("rows", "rows", "rows"),
    TableColumn("prompt_tokens", "prompt tokens", "tokens"),
    TableColumn("cached_tokens", "shared", "tokens"),
    TableColumn("completion_tokens", "output tokens", "tokens"),
    TableColumn("engine_s", "time of the engine", "s"),
    TableColumn("device_s", "time of the device", "s"),
    *_SHARES,
    TableColumn("latency_p50_s", "latency p50", "s"),
    TableColumn("latency_p99_s", "latency p99", "s"),
)
_RATIOS = "roofline_efficiency, mfu, mbu"


def efficiency(run: ReportedRun) -> Iterator[PageSection]:
    """Yield the sections of the report page about hardware efficiency: by phase, and by length of prompt.

    Tasks without output tokens have no section by phase (prefill, decode).
    """
    if run.has_output:
        yield _phases(run)
    yield _buckets(run)


def _phases(run: ReportedRun) -> PageSection:
    title = "Prefill and decode"
    if not run.has(PHASES):
        return PageSection("phases", title, run.why_empty(PHASES))
    rows = run.fetch(
        f"SELECT phase, steps, prompt_tokens, decode_tokens, engine_s, device_s, {_RATIOS} FROM {run.own(PHASES)} "
        "ORDER BY engine_s DESC"
    )
    options = {"category": "phase", "bars": ["roofline", "mfu", "mbu"], "unit": "0…1", "horizontal": True}
    chart = Chart("bars", "Bars of the use of the hardware by kind of step", options)
    text = (
        "How well the hardware was used by steps that only ran prompts (prefill), by steps that only continued answers "
        "(decode), and by steps that did both (mixed). The first token of an answer comes from a step that runs its "
        "prompt, so there are fewer tokens decoded than output tokens."
    )
    return PageSection("phases", title, text, chart, PageTable(_PHASES, rows))


def _buckets(run: ReportedRun) -> PageSection:
    title = "By length of prompt"
    if not run.has(BUCKETS):
        return PageSection("buckets", title, run.why_empty(BUCKETS))
    rows = run.fetch(
        "SELECT '≤ ' || most_prompt_tokens, requests, rows, prompt_tokens, cached_tokens, completion_tokens, engine_s, "
        f"device_s, {_RATIOS}, latency_p50_s, latency_p99_s FROM {run.own(BUCKETS)} ORDER BY most_prompt_tokens"
    )
    options = {"category": "bucket", "bars": ["engine_s"], "unit": "s"}
    chart = Chart("bars", "Bars of the time that requests took, by length of prompt", options)
    table = PageTable(_BUCKETS, rows)
    if not run.has_output:
        table = table.without("completion_tokens")
    if not run.shares_prefixes:
        table = table.without("cached_tokens")
    text = (
        "The engine's time by the length of the requests' prompts. In the device's time, a shared prefix is split "
        "among all requests that share it."
    )
    return PageSection("buckets", title, text, chart, table)
