"""Measures the accuracy of a result: how many answers equal the expected ones, overall, by field and by label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from batchinfer.core.wording import counted
from batchinfer.store.accuracy.expected import ExpectedColumn, result_batches
from batchinfer.store.accuracy.graded_rows import GradedField, GradedRow, graded_rows
from batchinfer.store.accuracy.grades import Grade
from batchinfer.store.accuracy.labels import MOST_FIELDS, Field, Labels, find_labels
from batchinfer.store.accuracy.reliability import Reliability

Outcome = Literal["label", "other", "error"]


@dataclass(slots=True)
class Tally:
    """Counts of rows that have an expected value.

    Attributes:
        rows: Number of rows.
        errors: Error rows among them.
        exact: Rows whose answer is exactly the expected value.
        normalised: Rows whose answer is the expected value at least after normalisation.
    """

    rows: int = 0
    errors: int = 0
    exact: int = 0
    normalised: int = 0

    def add(self, grade: Grade, failed: bool) -> None:
        """Count a row, given the grade of its answer and True if it is an error row."""
        self.rows += 1
        self.errors += failed
        self.exact += grade is Grade.EXACT
        self.normalised += grade is not Grade.WRONG


@dataclass(frozen=True, slots=True)
class ConfusionCell:
    """The number of rows with one expected label and one kind of answer: a cell of a confusion table.

    Attributes:
        field: Name of the field, or None for the whole answer.
        expected: The expected label.
        outcome: "label": the answer is a label. "other": it is something else. "error": the row failed.
        answer: The label of the answer, if it is one.
        rows: Number of rows.
    """

    field: Field
    expected: str
    outcome: Outcome
    answer: str | None
    rows: int


@dataclass(slots=True)
class Accuracy:
    """The accuracy of a result: how many of its answers equal the expected values.

    Attributes:
        column: The column with expected values.
        unlabelled: Number of rows without an expected value.
        unreadable: Number of rows whose expected value is invalid, or not an object although the answer is.
        first_unreadable: The row_id of the first unreadable row.
        overall: Counts of whole answers.
        fields: Counts per field, for answers that are objects.
        confusion: The cells of the confusion table.
        calibration: How well probabilities match right answers. None: the result has no probabilities.
    """

    column: str
    unlabelled: int = 0
    unreadable: int = 0
    first_unreadable: int | None = None
    overall: Tally = field(default_factory=Tally)
    fields: dict[str, Tally] = field(default_factory=dict)
    confusion: tuple[ConfusionCell, ...] = ()
    calibration: Reliability | None = None

    @property
    def notice(self) -> str | None:
        """Return a message about expected values that cannot be compared, or None if there are none."""
        if not self.unreadable:
            return None
        return (
            f"{counted(self.unreadable, 'row')} not measured: the value of {self.column} (input.expected) is no JSON "
            f"object as the answers are, first in the row with row_id {self.first_unreadable}; write it as JSON text"
        )

    def add(self, row: GradedRow | None) -> None:
        """Count a row of the result. None is a row without an expected value."""
        if row is None:
            self.unlabelled += 1
        elif row.fields is None:
            self.unreadable += 1
            self.first_unreadable = row.row_id if self.first_unreadable is None else self.first_unreadable
        else:
            self.overall.add(row.grade, row.failed)
            if self.calibration is not None and row.probability is not None:
                self.calibration.add(row.probability, row.grade is not Grade.WRONG)
            for one in row.fields:
                self._add_field(one, row.failed)

    def _add_field(self, one: GradedField, failed: bool) -> None:
        if one.name is not None and (one.name in self.fields or len(self.fields) < MOST_FIELDS):
            self.fields.setdefault(one.name, Tally()).add(one.grade, failed)


class _Confusion:
    """Counts, for each expected label, how often each label was the answer."""

    def __init__(self, labels: dict[Field, Labels]) -> None:
        self._labels = labels
        self._rows: Counter[tuple[Field, str, Outcome, str | None]] = Counter()

    def add(self, row: GradedRow) -> None:
        for one in row.fields or ():
            labels = self._labels.get(one.name)
            expected = None if labels is None else labels.of(one.expected)
            if labels is not None and expected is not None:
                self._rows[one.name, expected, *_outcome(labels, one, row.failed)] += 1

    def found(self) -> Iterator[ConfusionCell]:
        """Yield the cells of the confusion table by field, the most frequent expected labels first."""
        of_label: Counter[tuple[Field, str]] = Counter()
        for (name, expected, *_), rows in self._rows.items():
            of_label[name, expected] += rows
        fields = list(self._labels)

        def place(item: tuple[tuple[Field, str, Outcome, str | None], int]) -> tuple[int, int, str, int, str]:
            (name, expected, _, answer), rows = item
            return fields.index(name), -of_label[name, expected], expected, -rows, answer or ""

        for key, rows in sorted(self._rows.items(), key=place):
            yield ConfusionCell(*key, rows)


def _outcome(labels: Labels, one: GradedField, failed: bool) -> tuple[Outcome, str | None]:
    if failed:
        return "error", None
    answer = labels.of(one.answer)
    return ("other", None) if answer is None else ("label", answer)


def measure_accuracy(files: Sequence[Path]) -> Accuracy | None:
    """Return the accuracy of the result in these files, or None if it has no expected values.

    Memory does not grow with the number of rows. Raises InputCorrupt for a damaged file.
    """
    column = ExpectedColumn.of(files)
    if column is None:
        return None
    found = Accuracy(column.name, calibration=None if column.probability is None else Reliability())
    confusion = _Confusion(find_labels(map(column.values, result_batches(files, [column.name]))))
    for row in graded_rows(files, column):
        found.add(row)
        if row is not None:
            confusion.add(row)
    found.confusion = tuple(confusion.found())
    return found
