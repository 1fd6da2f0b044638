"""The rows of a result, each with the grade of its answer: read in batches, whatever their number."""

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
    """A field of a row: what is expected, what was answered, and how near that is."""

    name: Field
    expected: Any
    answer: Any
    grade: Grade


@dataclass(frozen=True, slots=True)
class GradedRow:
    """A row with an expected value. `fields`: None where that cannot be read, or is no object as the answer is one."""

    row_id: int
    failed: bool  # it is an error row
    fields: tuple[GradedField, ...] | None
    probability: float | None = None  # of the answer, where the result says it

    @property
    def grade(self) -> Grade:
        """The grade of the whole answer: that of its worst field."""
        return min((one.grade for one in self.fields or ()), default=Grade.WRONG)


def graded_rows(files: Sequence[Path], column: ExpectedColumn) -> Iterator[GradedRow | None]:
    """Yield the rows of a result in order; None for each that has no expected value. Raises InputCorrupt."""
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
    """Return what is expected of a row, graded; `text`: its answer."""
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
