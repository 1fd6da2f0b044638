"""The join of a job's index with the completion store, in input order, and what it says about errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.data.storage.duck import Watched, connection, literal, naming_errors, parquet
from batchinfer.data.store.parts import COMPLETION_SCHEMA, padded, schema_of

FINISHED_SCHEMA = pa.schema(
    [("row_id", pa.int64()), *(field for field in COMPLETION_SCHEMA if field.name != "key")]
)
_PART_MASK, _ROW_MASK = (1 << 24) - 1, (1 << 36) - 1  # of a place, see `_placed`
# answers before errors, lasting errors before retryable ones, and then the part that was committed first
_RANK = "CASE WHEN error_code IS NULL THEN 0 WHEN retryable IS NOT TRUE THEN 1 ELSE 2 END::BIGINT"


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """Error rows among all rows of a job, so far."""

    rows: int  # rows of the input
    input_errors: int  # rows that could not become requests
    engine_errors: int  # rows whose completion is an error
    retryable: int  # of both, those that another run may cure

    @property
    def errors(self) -> int:
        return self.input_errors + self.engine_errors


def count_errors(
    index_parts: Sequence[Path],
    completion_parts: Sequence[Path],
    spill: Path,
    *,
    memory_limit: str | None = None,
    threads: int = 2,
) -> ErrorCounts:
    """Count the error rows of index and store; a key's error counts once for each row that wants it."""
    if not index_parts:
        return ErrorCounts(0, 0, 0, 0)
    with connection(spill, memory_limit, threads) as database:
        _load_chosen(database, completion_parts)
        found = database.execute(
            f"SELECT count(*), count(*) FILTER (i.key IS NULL), count(*) FILTER (c.place >> 60 > 0), "
            "count(*) FILTER (i.key IS NULL AND i.retryable OR c.place >> 60 = 2) "
            f"FROM {parquet(index_parts)} i LEFT JOIN chosen c ON i.key = c.key"
        ).fetchall()
    return ErrorCounts(*(int(value) for value in found[0]))


def engine_errors(
    index_parts: Sequence[Path],
    completion_parts: Sequence[Path],
    spill: Path,
    *,
    memory_limit: str | None = None,
    threads: int = 2,
) -> list[tuple[str, int, str]]:
    """Return the errors of completions: (code, number of rows, place and message of the first)."""
    if not index_parts or not completion_parts:
        return []
    with connection(spill, memory_limit, threads) as database:
        _load_chosen(database, completion_parts)
        failed = f"({_placed(completion_parts, 'error_code AS code, error_message AS message')})"
        rows = database.execute(
            "SELECT e.code, count(*), "
            "arg_min(i.file || ' row ' || i.row_index || ': ' || coalesce(e.message, ''), i.row_id) "
            f"FROM {parquet(index_parts)} i JOIN chosen c ON i.key = c.key JOIN {failed} e ON c.place = e.place "
            "WHERE c.place >> 60 > 0 GROUP BY e.code ORDER BY e.code"
        ).fetchall()
    return [(str(code), int(count), str(first)) for code, count, first in rows]


def used_rows(
    index_parts: Sequence[Path],
    completion_parts: Sequence[Path],
    spill: Path,
    *,
    memory_limit: str | None = None,
    threads: int = 2,
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """The completions that a job's rows are made of: part name and row numbers, a part possibly several times."""
    if not index_parts or not completion_parts:
        return
    names = [part.name for part in sorted(completion_parts)]
    with connection(spill, memory_limit, threads) as database:
        _load_chosen(database, completion_parts)
        query = database.sql(
            f"SELECT c.place FROM chosen c SEMI JOIN {parquet(index_parts)} i ON i.key = c.key"
        )
        with naming_errors(spill):
            for batch in query.to_arrow_reader(1 << 16):
                places = batch.column(0).to_numpy()
                parts, rows = (places >> 36) & _PART_MASK, places & _ROW_MASK
                yield from ((names[part], rows[parts == part]) for part in np.unique(parts))


def finished_rows(
    index_parts: Sequence[Path],
    completion_parts: Sequence[Path],
    spill: Path,
    *,
    memory_limit: str | None = None,
    threads: int = 2,
    batch_rows: int = 4096,
    schema: pa.Schema = FINISHED_SCHEMA,
    watched: Watched = nullcontext,
) -> Iterator[pa.RecordBatch]:
    """The completion of every row that has one, by ascending row_id, in `schema`: FINISHED_SCHEMA, and columns that a
    kind of answers adds, null where a part lacks them.

    Memory is bounded by `memory_limit`; what is larger is sorted in the folder `spill`. Raises StorageError,
    OutOfMemory. `watched`: see `duck.connection`.
    """
    if not index_parts or not completion_parts:
        return
    with connection(spill, memory_limit, threads, watched) as database:
        _load_chosen(database, completion_parts)
        database.execute(  # only narrow columns are joined by key: texts and token lists come in last
            "CREATE TEMP TABLE wanted AS SELECT i.row_id, c.place "
            f"FROM {parquet(index_parts)} i JOIN chosen c ON i.key = c.key"
        )
        there = schema if schema.equals(FINISHED_SCHEMA) else _within(schema, completion_parts)
        query = database.sql(
            f"SELECT w.row_id, t.* EXCLUDE (place) FROM ({_payload(completion_parts, there)}) t "
            "JOIN wanted w USING (place) ORDER BY w.row_id"
        )
        with naming_errors(spill):
            for batch in query.to_arrow_reader(batch_rows):
                yield padded(batch.cast(there), schema)


def _load_chosen(database: Any, parts: Sequence[Path]) -> None:
    """Table `chosen`: each key with the place of the one completion that counts, wherever else it stands."""
    database.execute("CREATE TEMP TABLE part_number(filename VARCHAR, part BIGINT)")
    database.execute("CREATE TEMP TABLE chosen(key BLOB, place BIGINT)")
    if parts:
        numbered = ", ".join(f"({literal(part)}, {number})" for number, part in enumerate(sorted(parts)))
        database.execute(f"INSERT INTO part_number VALUES {numbered}")
        database.execute(
            f"INSERT INTO chosen SELECT key, min(place) FROM ({_placed(parts, 'key')}) GROUP BY key"
        )


def _within(schema: pa.Schema, parts: Sequence[Path]) -> pa.Schema:
    """Return the columns of `schema` that any part has."""
    there = {"row_id", *schema_of(parts).names}
    return pa.schema([field for field in schema if field.name in there])


def _payload(parts: Sequence[Path], schema: pa.Schema) -> str:
    """Completions with their `place` and all of `schema` but row_id."""
    names = [name for name in schema.names if name != "row_id"]
    some = schema.names != FINISHED_SCHEMA.names  # columns that only some parts have
    return _placed(parts, ", ".join(names), ", union_by_name = true" if some else "")


def _placed(parts: Sequence[Path], columns: str, options: str = "") -> str:
    """Completions with their `place`: rank, part and row in one number, smaller is better."""
    source = parquet(parts, f", filename = true, file_row_number = true{options}")
    place = f"(({_RANK}) << 60) + (part << 36) + file_row_number AS place"
    return f"SELECT {columns}, {place} FROM {source} JOIN part_number USING (filename)"
