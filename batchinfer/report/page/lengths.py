"""The sections with the lengths of prompts and answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from batchinfer.core.wording import count
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import REQUESTS

MOST_BARS = 32
# If the longest is more than this many times the median, bars get wider from left to right, because with equal widths
# nearly all requests would be in one bar
_SKEWED = 8
_NICE = (1, 2, 5)

_COLUMNS = (
    TableColumn("range", "tokens"),
    TableColumn("requests", "requests", "requests"),
    TableColumn("tokens", "tokens in all", "tokens"),
)
_WHAT = (("prompt_tokens", "prompts", "Prompt lengths"), ("completion_tokens", "answers", "Answer lengths"))


def lengths(run: ReportedRun) -> Iterator[PageSection]:
    """Yield the sections of the report page with histograms of prompt lengths and answer lengths.

    Tasks without output tokens have no answer lengths.
    """
    if not run.has(REQUESTS):
        yield PageSection("prompts", "Lengths", run.why_empty(REQUESTS))
        return
    for column, name, title in _WHAT if run.has_output else _WHAT[:1]:
        yield _histogram(run, column, name, title)


def _histogram(run: ReportedRun, column: str, name: str, title: str) -> PageSection:
    requests = run.own(REQUESTS)
    ((least, median, most, total),) = run.fetch(
        f"SELECT min({column}), median({column}), max({column}), sum({column})::BIGINT FROM {requests}"
    )
    edges = bin_edges(least, median, most)
    text = (
        f"From {count(least)} to {count(most)} tokens, the median {count(median)}; {count(total)} in all. Requests "
        "that were computed in this run, equal rows once."
    )
    options = {"category": "range", "bars": ["requests"], "unit": "requests", "histogram": True}
    chart = Chart("bars", f"Histogram of the lengths of {name}", options)
    return PageSection(name, title, text, chart, PageTable(_COLUMNS, _bars(run, column, edges)))


def _bars(run: ReportedRun, column: str, edges: list[int]) -> list[tuple[Any, ...]]:
    found = run.fetch(
        f"SELECT list_count(list_filter(?::BIGINT[], lambda edge: edge <= {column})) AS bar, count(*), "
        f"sum({column})::BIGINT FROM {run.own(REQUESTS)} GROUP BY bar",
        [edges],
    )
    bars = {bar: (requests, tokens) for bar, requests, tokens in found}
    return [
        (_range(one, other), *bars.get(at, (0, 0)))
        for at, (one, other) in enumerate(pairwise(edges), start=1)
    ]


def _range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first} – {end - 1}"


def bin_edges(least: int, median: float, most: int) -> list[int]:
    """Return where the bars of a histogram of lengths begin, in ascending order, and where the last bar ends.

    The bars have equal, round widths. If most lengths are small compared to the largest, each bar is instead
    √2 times as wide as the one before.

    Args:
        least: The smallest length.
        median: The median length.
        most: The largest length.
    """
    if most <= max(MOST_BARS, _SKEWED * median):
        width = _nice_width(most - least + 1)
        first = least // width * width
        return list(range(first, most + width + 1, width))
    edges = {0, 1} if least == 0 else {1}
    step = 1
    while max(edges) <= most:
        edges.add(round(2 ** (step / 2)))
        step += 1
    after = [edge for edge in sorted(edges) if edge > least]
    before = max(edge for edge in edges if edge <= least)
    return [before, *after]


def _nice_width(span: int) -> int:
    least = max(1, math.ceil(span / MOST_BARS))
    power: int = 10 ** math.floor(math.log10(least))
    return next(nice * power for nice in (*_NICE, 10) if nice * power >= least)
