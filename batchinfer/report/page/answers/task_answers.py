"""The sections with labels, probabilities or scores, for tasks without output tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchinfer.core.wording import count, counted, percent
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection

MOST_LABELS = 50
_BARS = 20

_LABELS = """
SELECT label, count(*) AS rows, count(*) / sum(count(*)) OVER (), avg(probability), min(probability), max(probability)
FROM results WHERE status = 'ok' GROUP BY label ORDER BY rows DESC, label
"""
_LABEL_COLUMNS = (
    TableColumn("label", "label"),
    TableColumn("rows", "rows", "rows"),
    TableColumn("share", "of all labels", "0…1"),
    TableColumn("probability", "mean probability", "0…1"),
    TableColumn("least", "least probability", "0…1"),
    TableColumn("most", "greatest probability", "0…1"),
)
_BIN_COLUMNS = (TableColumn("range", "from – to"), TableColumn("rows", "rows", "rows"))
# Values in bars of equal width; the last bar includes the largest value
_BINS = """
WITH given AS (SELECT {value} AS value FROM results WHERE status = 'ok'),
    found AS (SELECT value FROM given WHERE isfinite(value)),
    edges AS (SELECT coalesce({least}, min(value)) AS least, coalesce({most}, max(value)) AS most FROM found),
    bars AS (
        SELECT least(floor((value - least) / (most - least) * {bars}), {bars} - 1)::INTEGER AS bar, count(*) AS rows
        FROM found, edges WHERE most > least GROUP BY bar
    )
SELECT printf('%.{digits}f – %.{digits}f', least + places.bar * (most - least) / {bars},
        least + (places.bar + 1) * (most - least) / {bars}), coalesce(rows, 0)
FROM (SELECT unnest(range({bars})) AS bar) AS places CROSS JOIN edges LEFT JOIN bars ON bars.bar = places.bar
WHERE most > least ORDER BY places.bar
"""


def task_answers(run: ReportedRun) -> Iterator[PageSection]:
    """Yield the sections of the report page about labels or scores, for tasks that have them.

    The tasks are classify, score and rerank.
    """
    row = run.row
    if row["mean_label_probability"] is not None:
        yield from _of_labels(run)
    elif row["mean_logprob"] is not None:
        text = "Rows by the mean log-probability of their tokens. Nearer to 0: the model found the text likelier."
        yield from _histogram(
            run, "scores", "Mean log-probability of a token", text, "logprob / scored_tokens"
        )
    elif row["score_p50"] is not None:
        yield from _histogram(run, "scores", "Scores", "Rows by their score.", "score")


def _of_labels(run: ReportedRun) -> Iterator[PageSection]:
    if run.row["labels"] is not None:
        yield _labels(run)
    text = "Rows by the probability of their label: the label's share among all labels of the row."
    yield from _histogram(run, "probabilities", "Probabilities of labels", text, "probability", (0, 1, 10))


def _labels(run: ReportedRun) -> PageSection:
    rows = run.fetch(_LABELS) if run.results else _counted(run)
    right = _right_text(run)
    text = f"{counted(sum(row[1] for row in rows), 'row')} by label.{right}"
    if len(rows) > MOST_LABELS:
        text += f" The {MOST_LABELS} most frequent of {count(len(rows))} labels are shown."
    options = {"category": "label", "bars": ["rows"], "unit": "rows", "horizontal": True}
    chart = Chart("bars", "Bars of the rows with each label", options)
    return PageSection("labels", "Labels", text, chart, PageTable(_LABEL_COLUMNS, rows[:MOST_LABELS]))


def _right_text(run: ReportedRun) -> str:
    row = run.row
    if row["normalised_accuracy"] is None:
        return ""
    return f" {percent(row['normalised_accuracy'])} of {counted(row['labelled_rows'], 'labelled row')} are right."


def _counted(run: ReportedRun) -> list[tuple[Any, ...]]:
    # For a run whose results were replaced
    labels = run.row["labels"]
    whole = sum(labels.values())
    ranked = sorted(labels.items(), key=lambda item: (-item[1], item[0]))
    return [(label, number, number / whole, None, None, None) for label, number in ranked]


def _histogram(
    run: ReportedRun,
    name: str,
    title: str,
    text: str,
    value: str,
    axis: tuple[int, int, int] | None = None,
) -> Iterator[PageSection]:
    # Yields nothing if all values are equal or the results were replaced
    if not run.results:
        return
    least, most, bars = axis or ("NULL", "NULL", _BARS)
    sql = _BINS.format(value=value, least=least, most=most, bars=bars, digits=1 if axis else 3)
    rows = run.fetch(sql)
    if not rows:
        return
    options = {"category": "range", "bars": ["rows"], "unit": "rows", "histogram": True}
    chart = Chart("bars", f"Histogram of rows: {title}", options)
    yield PageSection(name, title, text, chart, PageTable(_BIN_COLUMNS, rows))
