"""The sections with the accuracy by field, and the answers for each expected label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from batchinfer.core.wording import count, counted
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import ACCURACY, CALIBRATION, CONFUSION
from batchinfer.report.tables.tables import RunRow

MOST_LABELS = 20  # shown labels of a field, the most frequent ones; the report's table has all
MOST_TABLES = 5  # fields whose labels are shown
OTHERS = "(others)"  # less frequent labels
OTHER, ERROR = "(no label)", "(error row)"

_FIELDS = """
SELECT coalesce(field, '(the whole answer)'), accuracy, normalised_accuracy, labelled_rows, labelled_errors, exact_rows,
    normalised_rows FROM {table}
"""
_COLUMNS = (
    TableColumn("field", "field"),
    TableColumn("exact", "right", "0…1"),
    TableColumn("normalised", "right once normalised", "0…1"),
    TableColumn("rows", "labelled rows", "rows"),
    TableColumn("errors", "of them error rows", "rows"),
    TableColumn("exact_rows", "right", "rows"),
    TableColumn("normalised_rows", "right once normalised", "rows"),
)
_BINS = """
SELECT printf('%.1f to %.1f', from_probability, to_probability), rows, mean_probability, accuracy FROM {table}
WHERE rows > 0 ORDER BY from_probability
"""
_BIN_COLUMNS = (
    TableColumn("bin", "probability"),
    TableColumn("rows", "labelled rows", "rows"),
    TableColumn("probability", "mean probability", "0…1"),
    TableColumn("right", "right once normalised", "0…1"),
)
_LABELS = "SELECT DISTINCT field FROM {table} ORDER BY field NULLS FIRST LIMIT {most}"
_PAIRS = "SELECT expected, outcome, answer, rows FROM {table} WHERE field IS NOT DISTINCT FROM ?"


def accuracy(run: ReportedRun) -> Iterator[PageSection]:
    """Yield the sections of the report page about right answers: by field, by label, and by probability.

    It yields none for a job without expected answers.
    """
    row = run.row
    if row["labelled_rows"] is None:
        return
    if not run.has(ACCURACY):
        yield PageSection("accuracy", "Right answers", f"{_text(row)} {run.why_empty(ACCURACY)}")
        return
    rows = run.fetch(_FIELDS.format(table=run.own(ACCURACY)))
    options = {"category": "field", "bars": ["exact", "normalised"], "unit": "0…1", "horizontal": True}
    chart = Chart("bars", "Bars of the shares of right answers by field", options)
    yield PageSection("accuracy", "Right answers", _text(row), chart, PageTable(_COLUMNS, rows))
    fields = run.fetch(_LABELS.format(table=run.own(CONFUSION), most=MOST_TABLES))
    for number, (field,) in enumerate(fields):
        pairs = run.fetch(_PAIRS.format(table=run.own(CONFUSION)), [field])
        yield _confusion(f"confusion-{number}", field, pairs)
    if row["calibration_error"] is not None and run.has(CALIBRATION):
        yield _calibration(row, run.fetch(_BINS.format(table=run.own(CALIBRATION))))


def _calibration(row: RunRow, bins: Sequence[tuple[Any, ...]]) -> PageSection:
    options = {"category": "bin", "bars": ["probability", "right"], "unit": "0…1"}
    chart = Chart(
        "bars", "Bars of the mean probability and the share of right answers, by probability", options
    )
    text = (
        f"Answers by their probability. With perfect probabilities, both bars would be equal. Their distance is "
        f"{row['calibration_error']:.3f} on average (expected calibration error); the Brier score is "
        f"{row['brier_score']:.3f}."
    )
    return PageSection(
        "calibration", "Probabilities and right answers", text, chart, PageTable(_BIN_COLUMNS, bins)
    )


def _text(row: RunRow) -> str:
    without = (row["unlabelled_rows"] or 0) + (row["unreadable_labels"] or 0)
    rest = f" {counted(without, 'row')} without one that can be read are not measured." if without else ""
    errors = row["labelled_errors"]
    wrong = f", {counted(errors, 'error row')} among them, which count as wrong" if errors else ""
    return f"{counted(row['labelled_rows'], 'row')} with an expected answer{wrong}.{rest}"


def _confusion(name: str, field: str | None, pairs: Sequence[tuple[Any, ...]]) -> PageSection:
    shown, table = _table(pairs)
    answers = [
        *shown,
        *(one for one in (OTHERS, OTHER, ERROR) if any(one in found for found in table.values())),
    ]
    columns = (
        TableColumn("expected", "expected"),
        *(TableColumn(f"answer_{at}", f"answered {one}", "rows") for at, one in enumerate(answers)),
    )
    rows = [(expected, *(found.get(one, 0) for one in answers)) for expected, found in table.items()]
    more = f" The {count(len(shown))} most frequent labels are shown." if OTHERS in table else ""
    title = "Confused labels" if field is None else f"Confused labels of {field}"
    text = f"Rows by expected label and by answer.{more}"
    return PageSection(name, title, text, None, PageTable(columns, rows))


def _table(pairs: Sequence[tuple[Any, ...]]) -> tuple[list[str], dict[str, dict[str, int]]]:
    of_label: dict[str, int] = {}
    for expected, _, _, rows in pairs:
        of_label[expected] = of_label.get(expected, 0) + rows
    ranked = sorted(of_label, key=lambda label: (-of_label[label], label))
    shown = ranked[:MOST_LABELS]
    table: dict[str, dict[str, int]] = {label: {} for label in shown}
    for expected, outcome, answer, rows in pairs:
        line = table.setdefault(expected if expected in shown else OTHERS, {})
        answered = {"other": OTHER, "error": ERROR}.get(outcome, answer if answer in shown else OTHERS)
        line[answered] = line.get(answered, 0) + rows
    return shown, table
