"""Reads the rows of a result with the grades of their answers, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.store.accuracy.expected import UNREADABLE, ExpectedColumn, result_batches
from batchinfer.store.accuracy.grades import Grade, json_answer, text_grade, value_grade
from batchinfer.store.accuracy.labels import Field, fields_of


@dataclass(frozen=True, slots=True)
class GradedField:
    """A field of an answer that is a JSON object, or the whole answer, with its grade.

    Attributes:
        name: Name of the field, or None for the whole answer.
        expected: The expected value.
        answer: The value in the answer.
        grade: How well the answer agrees with the expected value.
    """

    name: Field
    expected: Any
    answer: Any
    grade: Grade


@dataclass(frozen=True, slots=True)
class GradedRow:
    """A row of a result that has an expected value.

    Attributes:
        row_id: The id of the row.
        failed: True for an error row.
        fields: Its graded fields. None if it cannot be graded: the expected value is unreadable, or is not an
            object although the answer is.
        probability: The probability of the answer, if the result has it.
    """

    row_id: int
    failed: bool
    fields: tuple[GradedField, ...] | None
    probability: float | None = None

    @property
    def grade(self) -> Grade:
        """Return the grade of the row's answer: the grade of its worst field, or WRONG without fields."""
        return min((one.grade for one in self.fields or ()), default=Grade.WRONG)


def graded_rows(files: Sequence[Path], column: ExpectedColumn) -> Iterator[GradedRow | None]:
    """Yield the rows of a result in order, with the grades of their answers.

    A row without an expected value is None.

    Args:
        files: The files of the result.
        column: The columns with expected values and answers.

    Raises:
        InputCorrupt: A file is damaged.
    """
    more = [] if column.probability is None else [column.probability]
    for batch in result_batches(files, ["row_id", "status", column.answer, *more, column.name]):
        ids, statuses, texts = (
            batch.column(name).to_pylist() for name in ("row_id", "status", column.answer)
        )
        probable = batch.column(more[0]).to_pylist() if more else [None] * len(ids)
        expected = column.values(batch)
        for row_id, status, text, wanted, likely in zip(
            ids, statuses, texts, expected, probable, strict=True
        ):
            if wanted is None or wanted == {}:
                yield None
            else:
                failed = status != "ok"
                yield GradedRow(row_id, failed, _fields(column, wanted, None if failed else text), likely)


def _fields(column: ExpectedColumn, expected: Any, text: str | None) -> tuple[GradedField, ...] | None:
    if column.kind == "text":
        grade = Grade.WRONG if text is None else text_grade(expected, text)
        return (GradedField(None, expected, text, grade),)
    answer = json_answer(text)
    if expected is UNREADABLE or (isinstance(answer, dict) and not isinstance(expected, dict)):
        return None
    found = answer if isinstance(answer, dict) else {}
    return tuple(
        _field(name, one, found.get(name) if name is not None else answer, text is None)
        for name, one in fields_of(expected)
    )


def _field(name: Field, expected: Any, answer: Any, unanswered: bool) -> GradedField:
    grade = Grade.WRONG if unanswered else value_grade(expected, answer)
    return GradedField(name, expected, answer, grade)
