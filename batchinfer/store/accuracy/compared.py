"""Two results of the same rows by their expected answers: which of both is right, and whether that may be chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchinfer.store.accuracy.expected import ExpectedColumn
from batchinfer.store.accuracy.graded_rows import GradedRow, graded_rows
from batchinfer.store.accuracy.grades import Grade
from batchinfer.store.accuracy.mcnemar import mcnemar

_ROWS = 1 << 16  # of a result that are graded at a time
_GRADED = pa.schema([("row_id", pa.int64()), ("grade", pa.int8())])


@dataclass(frozen=True, slots=True)
class RightRows:
    """Rows that are right in one of two results or in both, and the p value of McNemar's test."""

    both: int
    only_a: int
    only_b: int
    p: float

    @classmethod
    def of(cls, both: int, only_a: int, only_b: int) -> RightRows:
        return cls(both, only_a, only_b, mcnemar(only_a, only_b))


@dataclass(frozen=True, slots=True)
class AccuracyDiff:
    """The accuracy of two results in the same rows: those for which both expect one answer. `other_labels`: rows for
    which they expect different ones."""

    rows: int
    other_labels: int
    exact: RightRows
    normalised: RightRows


@dataclass(frozen=True, slots=True)
class LabelledResult:
    """A result as a view of a database, by its files and the SQL of what its rows are matched by."""

    view: str
    files: Sequence[Path]
    key: str


def compare_accuracy(database: Any, a: LabelledResult, b: LabelledResult) -> AccuracyDiff | None:
    """Compare two results; None where one has no expected answers. Of each row only its key, a hash and a grade are
    kept, which the database spills. Raises InputCorrupt."""
    columns = [ExpectedColumn.of(one.files) for one in (a, b)]
    sides = []
    for result, column in zip((a, b), columns, strict=True):
        if column is None:
            return None
        _grade(database, result, column)
        label = '"' + column.name.replace('"', '""') + '"'
        sides.append(
            f"(SELECT {result.key} AS k, hash(CAST({label} AS VARCHAR)) AS label, grade "
            f"FROM {result.view} JOIN graded_{result.view} USING (row_id))"
        )
    counts = [
        f"count(*) FILTER (same AND {condition})"
        for grade in (Grade.EXACT, Grade.NORMALISED)
        for condition in _conditions(grade)
    ]
    rows, other, *right = database.execute(
        f"SELECT count(*) FILTER (same), count(*) FILTER (NOT same), {', '.join(counts)} "
        f"FROM (SELECT a.grade AS a, b.grade AS b, a.label = b.label AS same "
        f"FROM {sides[0]} AS a JOIN {sides[1]} AS b ON a.k = b.k)"
    ).fetchone()
    return AccuracyDiff(rows, other, RightRows.of(*right[:3]), RightRows.of(*right[3:]))


def _conditions(least: int) -> tuple[str, str, str]:
    """Return when both answers have at least that grade, only that of A, and only that of B."""
    a, b = f"a >= {least:d}", f"b >= {least:d}"
    return f"{a} AND {b}", f"{a} AND NOT {b}", f"{b} AND NOT {a}"


def _grade(database: Any, result: LabelledResult, column: ExpectedColumn) -> None:
    """Write the grades of a result's rows into a table."""
    database.execute(f"CREATE TEMP TABLE graded_{result.view} (row_id BIGINT, grade TINYINT)")
    rows = _measured_rows(result.files, column)
    while some := list(islice(rows, _ROWS)):
        values = [[row.row_id for row in some], [int(row.grade) for row in some]]
        table = pa.table([pa.array(v, f.type) for v, f in zip(values, _GRADED, strict=True)], schema=_GRADED)
        database.register("graded", table)
        database.execute(f"INSERT INTO graded_{result.view} FROM graded")
        database.unregister("graded")


def _measured_rows(files: Sequence[Path], column: ExpectedColumn) -> Iterator[GradedRow]:
    return (row for row in graded_rows(files, column) if row is not None and row.fields is not None)
