"""Compares the accuracy of two results of the same rows, with a significance test."""

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

_ROWS = 1 << 16  # rows graded at a time
_GRADED = pa.schema([("row_id", pa.int64()), ("grade", pa.int8())])


@dataclass(frozen=True, slots=True)
class RightRows:
    """Counts of the right answers in two results A and B, and McNemar's test of their difference.

    Attributes:
        both: Rows that are right in both results.
        only_a: Rows that are right in A only.
        only_b: Rows that are right in B only.
        p: The two-sided p-value for the hypothesis that both results are right equally often.
    """

    both: int
    only_a: int
    only_b: int
    p: float

    @classmethod
    def of(cls, both: int, only_a: int, only_b: int) -> RightRows:
        """Return these counts of right rows with the p-value of McNemar's test.

        Args:
            both: Rows that are right in both results.
            only_a: Rows that are right in result A only.
            only_b: Rows that are right in result B only.
        """
        return cls(both, only_a, only_b, mcnemar(only_a, only_b))


@dataclass(frozen=True, slots=True)
class AccuracyDiff:
    """A comparison of the accuracy of two results, on the rows for which both expect the same answer.

    Attributes:
        rows: The number of rows for which both results expect the same answer.
        other_labels: The number of rows for which they expect different answers. These rows are not compared.
        exact: Counts of rows whose answer equals the expected one exactly.
        normalised: Counts of rows whose answer equals the expected one, at least after normalisation.
    """

    rows: int
    other_labels: int
    exact: RightRows
    normalised: RightRows


@dataclass(frozen=True, slots=True)
class LabelledResult:
    """A result with a column of expected answers, to be compared with another result.

    Attributes:
        view: Name of its view in a DuckDB database.
        files: Its Parquet files.
        key: SQL expression over its columns. Rows of two results with equal keys are compared.
    """

    view: str
    files: Sequence[Path]
    key: str


def compare_accuracy(database: Any, a: LabelledResult, b: LabelledResult) -> AccuracyDiff | None:
    """Compare how many answers of two results are right. Return None if A or B has no expected answers.

    Args:
        database: A DuckDB connection with the views of both results.
        a: The first result.
        b: The second result.

    Raises:
        InputCorrupt: A file is damaged.
    """
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
    a, b = f"a >= {least:d}", f"b >= {least:d}"
    return f"{a} AND {b}", f"{a} AND NOT {b}", f"{b} AND NOT {a}"


def _grade(database: Any, result: LabelledResult, column: ExpectedColumn) -> None:
    """Create the table `graded_<view>` with the id and the grade of each row of a result."""
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
