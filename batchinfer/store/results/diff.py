"""Compares two results of the same rows. Each is read once, and they are joined on disk, so they may be large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from batchinfer.core.errors import UsageError
from batchinfer.core.sampling import MAX_SAMPLES
from batchinfer.filesystem.duck import connection, interruptible, literal, parquet
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.store.accuracy.compare import AccuracyDiff, LabelledResult, compare_accuracy
from batchinfer.store.outputs.call_column import CALLS_FIELD
from batchinfer.store.outputs.registry import answer_column
from batchinfer.store.outputs.tokens import RESULT_SCHEMA

Kind = Literal["only in A", "only in B", "answer", "error came", "error went", "error changed", "column"]
ROW_ID, CUSTOM_ID, SAMPLE = "row_id", "custom_id", "sample_index"
# These fixed columns describe an answer and are compared like typed columns. The others locate the row, or are compared
# as answers and errors.
_COMPARED = ("finish_reason", "prompt_tokens", "completion_tokens")
_OURS = frozenset(RESULT_SCHEMA.names) - set(_COMPARED)


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that differs between two results A and B.

    Attributes:
        id: The value of the column that rows are matched by.
        row_id_a: The row_id in A, or None if the row is only in B.
        row_id_b: The row_id in B, or None if the row is only in A.
        a: The differing value in A as text, or None if values were not requested.
        b: The differing value in B as text.
    """

    id: str
    row_id_a: int | None
    row_id_b: int | None
    a: str | None = None
    b: str | None = None


@dataclass(frozen=True, slots=True)
class DifferingRows:
    """A group of rows that differ between two results in the same way.

    Attributes:
        kind: The kind of difference.
        rows: The number of rows.
        name: The column that differs, the error code, or `code → other code`. None for other kinds.
        examples: The first of these rows.
    """

    kind: Kind
    rows: int
    name: str | None = None
    examples: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class ResultDiff:
    """The differences between two results A and B.

    Attributes:
        matched_by: The column that rows are matched by.
        rows_a: Number of rows of A.
        rows_b: Number of rows of B.
        matched: Number of rows that are in both results.
        groups: The rows that differ, by kind of difference.
        columns_only_a: Columns that only A has.
        columns_only_b: Columns that only B has.
        note: The reason that rows were not matched by custom_id. None: they were, or the user chose a column.
        accuracy: The accuracy of both results. None: a result has no expected answers (input.expected).
    """

    matched_by: str
    rows_a: int
    rows_b: int
    matched: int
    groups: tuple[DifferingRows, ...]
    columns_only_a: tuple[str, ...]
    columns_only_b: tuple[str, ...]
    note: str | None = None
    accuracy: AccuracyDiff | None = None

    @property
    def different(self) -> bool:
        """Return True if rows or columns of the two results differ."""
        return bool(self.groups or self.columns_only_a or self.columns_only_b)


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """Options for comparing two results.

    Attributes:
        by: The column that rows are matched by. None: custom_id, or row_id if ids are missing or not unique.
        examples: Maximum number of example rows per kind of difference.
        show: True to include the texts and values of example rows.
    """

    by: str | None = None
    examples: int = 5
    show: bool = False


def diff_results(a: Sequence[Path], b: Sequence[Path], options: DiffOptions) -> ResultDiff:
    """Compare two results, and return their differences.

    Args:
        a: The Parquet files of result A.
        b: The Parquet files of result B.
        options: How rows are matched, and which examples are returned.

    Raises:
        UsageError: The results cannot be compared, or rows cannot be matched by the given column.
        StorageError: A file cannot be read.
        OutOfMemory: DuckDB exceeded its memory limit.
    """
    with (
        temporary_folder("diff") as spill,
        connection(Path(spill, "sorting")) as database,
        interruptible(database),
    ):
        return _Diff(database, a, b, options).found()


@dataclass(slots=True)
class _Diff:
    # `a` and `b` are views of the results, and `differing` is a table of the rows that differ
    database: Any
    files_a: Sequence[Path]
    files_b: Sequence[Path]
    options: DiffOptions
    types: dict[str, dict[str, str]] = field(default_factory=dict)

    def found(self) -> ResultDiff:
        rows = {}
        for side, files in (("a", self.files_a), ("b", self.files_b)):
            self.database.execute(f"CREATE VIEW {side} AS FROM {parquet(files)}")
            described = self.database.execute(f"DESCRIBE {side}").fetchall()
            self.types[side] = {name: kind for name, kind, *_ in described}
            rows[side] = self._number(f"SELECT count(*) FROM {side}")
        self._refuse_unlike()
        by, note = self._key(rows)
        columns = self._columns()
        self._join(by, columns)
        groups = tuple(self._groups(columns))
        only_a = next((group.rows for group in groups if group.kind == "only in A"), 0)
        only = [tuple(sorted(self.types[x].keys() - self.types[y].keys())) for x, y in ("ab", "ba")]
        labelled = [
            LabelledResult(side, files, self._value(by))
            for side, files in (("a", self.files_a), ("b", self.files_b))
        ]
        accuracy = compare_accuracy(self.database, *labelled)
        matched = rows["a"] - only_a
        return ResultDiff(by, rows["a"], rows["b"], matched, groups, only[0], only[1], note, accuracy)

    @property
    def answer(self) -> str:
        found = answer_column(name for name in self.types["a"] if name in self.types["b"])
        if found is None:
            raise UsageError(
                "these results have different kinds of answers; compare results of the same task"
            )
        return found

    def _number(self, sql: str) -> int:
        return int(self.database.execute(sql).fetchone()[0])

    def _refuse_unlike(self) -> None:
        kinds = [self.types[side].get(SAMPLE, "").endswith("[]") for side in "ab"]
        if kinds[0] != kinds[1]:
            lists, other = "AB" if kinds[0] else "BA"
            raise UsageError(
                f"{lists} has lists of answers per row, and {other} has one row per answer; compare results of jobs "
                "with the same output.explode"
            )

    def _key(self, rows: dict[str, int]) -> tuple[str, str | None]:
        # Returns the column that rows are matched by, and the reason if it is not custom_id
        if self.options.by is None:
            problems = [problem for side in rows if (problem := self._no_key(side, CUSTOM_ID, rows[side]))]
            return (ROW_ID, problems[0]) if problems else (CUSTOM_ID, None)
        for side in rows:
            if (problem := self._no_key(side, self.options.by, rows[side])) is not None:
                raise UsageError(
                    f"--by {self.options.by}: {problem}; name a column that is different in every row"
                )
        return self.options.by, None

    def _no_key(self, side: str, column: str, rows: int) -> str | None:
        name = f"{column} of {side.upper()}"
        if column not in self.types[side]:
            return f"{side.upper()} has no column {column}"
        there = self._number(f"SELECT count({_named(column)}) FROM {side}")
        if there < rows:
            return f"{name} is null in {rows - there:,} rows"
        key = self._key_value(column) if self._samples else _named(column)
        different = self._number(f"SELECT count(*) FROM (SELECT DISTINCT {key} FROM {side})")
        return (
            f"{name} has only {different:,} different values in {rows:,} rows" if different < rows else None
        )

    def _columns(self) -> list[str]:
        left_out = {*_OURS, self.answer}
        return [name for name in self.types["a"] if name in self.types["b"] and name not in left_out]

    def _same_type(self, column: str) -> bool:
        return self.types["a"][column] == self.types["b"][column]

    def _value(self, column: str) -> str:
        # Ids of tool calls differ even if the calls are equal
        if column == CALLS_FIELD.name and self._same_type(column) and self.types["a"][column].endswith("[]"):
            return f"[[one['name'], one['arguments']] FOR one IN {_named(column)}]"
        return _named(column) if self._same_type(column) else f"CAST({_named(column)} AS VARCHAR)"

    @property
    def _samples(self) -> bool:
        return all(not self.types[side].get(SAMPLE, "[]").endswith("[]") for side in "ab")

    @property
    def _place(self) -> str:
        return f"({ROW_ID} * {MAX_SAMPLES} + {SAMPLE})" if self._samples else ROW_ID

    def _key_value(self, column: str) -> str:
        if self._samples and column in (ROW_ID, CUSTOM_ID):
            return f"concat({_named(column)}, '#', {SAMPLE})"
        return self._value(column)

    def _join(self, by: str, columns: Sequence[str]) -> None:
        # Long values are compared by their 64-bit hash
        hashes = [f"hash({self._value(name)}) AS c{at}" for at, name in enumerate(columns)]
        side = ", ".join(
            [f"{self._key_value(by)} AS k", f"{self._place} AS r", "status = 'ok' AS ok", "error_code AS code",
             f"hash({_named(self.answer)}) AS answer", *hashes]
        )  # fmt: skip
        changed = [f"both_ok AND a.c{at} <> b.c{at} AS c{at}," for at in range(len(columns))]
        anything = " OR ".join(["kind IS NOT NULL", *(f"c{at}" for at in range(len(columns)))])
        self.database.execute(
            f"""CREATE TEMP TABLE differing AS SELECT * FROM (
                SELECT coalesce(a.k, b.k) AS k, a.r AS ra, b.r AS rb, a.code AS code_a, b.code AS code_b,
                       coalesce(a.ok AND b.ok, false) AS both_ok,
                       CASE WHEN b.r IS NULL THEN 'only in A' WHEN a.r IS NULL THEN 'only in B'
                            WHEN a.ok AND NOT b.ok THEN 'error came' WHEN b.ok AND NOT a.ok THEN 'error went'
                            WHEN NOT a.ok AND a.code IS DISTINCT FROM b.code THEN 'error changed'
                            WHEN a.ok AND a.answer <> b.answer THEN 'answer' END AS kind,
                       CASE kind WHEN 'error came' THEN code_b WHEN 'error went' THEN code_a
                                 WHEN 'error changed' THEN concat(code_a, ' → ', code_b) END AS name,
                       {" ".join(changed)}
                FROM (SELECT {side} FROM a) AS a FULL JOIN (SELECT {side} FROM b) AS b ON a.k = b.k
            ) WHERE {anything}"""
        )

    def _groups(self, columns: Sequence[str]) -> Iterator[DifferingRows]:
        found = self.database.execute(
            "SELECT kind, name, count(*) FROM differing WHERE kind IS NOT NULL GROUP BY ALL ORDER BY 3 DESC, 2"
        ).fetchall()
        for kind, name, rows in sorted(found, key=lambda group: get_args(Kind).index(group[0])):
            where = f"kind = {literal(kind)}" + ("" if name is None else f" AND name = {literal(name)}")
            answer = _named(self.answer)
            shown = f"coalesce(error_message, {answer})" if kind.startswith("error") else answer
            yield DifferingRows(kind, rows, name, self._examples(where, shown))
        for at, column in enumerate(columns):
            if rows := self._number(f"SELECT count(*) FROM differing WHERE c{at}"):
                yield DifferingRows("column", rows, column, self._examples(f"c{at}", _named(column)))

    def _examples(self, where: str, shown: str) -> tuple[Difference, ...]:
        first = (
            f"SELECT CAST(k AS VARCHAR) AS id, ra, rb FROM differing WHERE {where} "
            f"ORDER BY coalesce(ra, rb) LIMIT {self.options.examples}"
        )
        if self.options.show:
            texts = [
                f"LEFT JOIN (SELECT {self._place} AS place, CAST({shown} AS VARCHAR) AS text FROM {side}) AS {side} "
                f"ON {side}.place = first.r{side}"
                for side in ("a", "b")
            ]
            first = f"SELECT first.*, a.text, b.text FROM ({first}) AS first {' '.join(texts)} "
            first += "ORDER BY coalesce(ra, rb)"
        found = self.database.execute(first).fetchall()
        return tuple(
            Difference(row[0], self._row_id(row[1]), self._row_id(row[2]), *row[3:]) for row in found
        )

    def _row_id(self, place: int | None) -> int | None:
        return place // MAX_SAMPLES if self._samples and place is not None else place


def _named(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'
