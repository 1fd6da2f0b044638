"""Joins a job's index with the completion store: the position of each row's completion, and error counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.errors import BatchInferError
from batchinfer.filesystem.duck import Watched, connection, parquet, translate_errors
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows
from batchinfer.store.results.attempts import (
    PART_SHIFT,
    POSITION,
    WITH_RANK,
    ChosenCompletions,
    Numbers,
    choose_completions,
    load_chosen,
    with_places,
)
from batchinfer.store.results.reuse.reused_positions import read_reused_positions

ROW_IN_PART = (1 << PART_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """The number of rows of a job that were read so far, and of its error rows by kind.

    Attributes:
        rows: All rows of the index.
        input_errors: Rows that could not become requests.
        engine_errors: Rows whose completion is an error.
        retryable: Error rows of both kinds that a retry may fix.
    """

    rows: int
    input_errors: int
    engine_errors: int
    retryable: int

    @property
    def errors(self) -> int:
        """Return the number of error rows of both kinds: without a request, or with an error completion."""
        return self.input_errors + self.engine_errors


@dataclass(frozen=True, slots=True)
class Join:
    """Maps the rows of a job to the positions of their completions in the store. It takes 16 bytes per row.

    A position in the store is the number of a part << 36 plus the number of the row in the part.

    Attributes:
        parts: Parts of the store, oldest first.
        positions: The positions of the completions, ascending. Rows with equal keys have the same position.
        rows: The row of the index for each position. Rows without a completion are left out.
        counts: Numbers of rows and error rows.
        attempts: For each index row, the number of the attempt that gave its completion, from 1. None: the
            job has no ladder.
        others: Positions of completions that were not chosen, because another attempt was.
        failed: Rows of the index whose completion is an error, ascending.
        again: A boolean per row in `failed`: True if the error is retryable.
        reused_unchanged: True if all rows reused from the last run have the same completions as then.
    """

    parts: tuple[Path, ...]
    positions: Numbers
    rows: Numbers
    counts: ErrorCounts
    attempts: NDArray[np.uint8] | None = None
    others: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    failed: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    again: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    reused_unchanged: bool = True

    @property
    def missing(self) -> int:
        """Return the number of rows whose requests have no completion yet."""
        return self.counts.rows - self.counts.input_errors - len(self.rows)

    def refuse_missing(self) -> None:
        """Raise BatchInferError if a request of the job has no completion."""
        if self.missing:
            raise BatchInferError(f"{self.missing} rows have no completion yet: nothing published")

    def within(self, spans: Sequence[tuple[int, int]]) -> Join:
        """Return the positions for only some rows of the index.

        Args:
            spans: The ranges of rows, as (start, stop).
        """
        wanted = np.zeros(self.counts.rows, np.bool_)
        for start, stop in spans:
            wanted[start:stop] = True
        if wanted.all():
            return self
        chosen = wanted[self.rows]
        return replace(self, positions=self.positions[chosen], rows=self.rows[chosen])

    def of_part(self, number: int) -> slice:
        """Return the slice of `positions` and `rows` for the part of the store with this number."""
        return _part_slice(self.positions, number)

    def used(self) -> Iterator[tuple[str, Numbers]]:
        """Yield the name of each used part of the store, with the ascending numbers of its used rows.

        Invalid answers count as used: without them, later attempts would not have been made.
        """
        used = np.union1d(self.positions, self.others) if len(self.others) else self.positions
        for number, part in enumerate(self.parts):
            found = used[_part_slice(used, number)] & ROW_IN_PART
            if len(found):
                yield part.name, found


def _part_slice(positions: Numbers, number: int) -> slice:
    ends = np.array([number, number + 1], np.int64) << PART_SHIFT
    return slice(*np.searchsorted(positions, ends).tolist())


def join_answers(
    index_parts: Sequence[Path],
    completion_parts: Sequence[Path],
    spill: Path,
    *,
    attempts: int = 1,
    reused: ReusedRows = NO_REUSED_ROWS,
    without: Sequence[Path] = (),
    memory_limit: str | None = None,
    threads: int = 2,
    watched: Watched = nullcontext,
) -> Join:
    """Find the position in the store of each index row's completion.

    Args:
        index_parts: Parts of the index.
        completion_parts: Parts of the store.
        spill: Folder for data that exceeds `memory_limit`.
        attempts: Maximum attempts per row. A row that needs a further attempt has no completion.
        reused: The first rows of the index, with recorded positions. Only error rows are looked up again.
        without: Parts of the store that have no completion of a row outside `reused`. They are not read if
            they are the first parts.
        memory_limit: Memory of DuckDB, in addition to the returned arrays. None: `working_memory`.
        threads: Threads of DuckDB.
        watched: Makes queries interruptible, see `duck.connection`.

    Raises:
        StorageError: A part cannot be read.
        OutOfMemory: DuckDB exceeded its memory limit.
    """
    parts = tuple(sorted(completion_parts))
    if not index_parts:
        return Join(parts, np.empty(0, np.int64), np.empty(0, np.int64), ErrorCounts(0, 0, 0, 0))
    known = read_reused_positions(reused, parts)
    new = [*index_parts[len(reused.parts) :]]
    with connection(spill, memory_limit, threads, watched) as database:
        rows, errors, retryable = _count_rows(database, new)
        database.register("failed", pa.table({"row_id": known.failed, "key": known.keys}))
        some = reused.rows > 0
        found_in = _rows_to_look_up(new, some)
        old = 0 if len(known.failed) else _count_leading(parts, without)
        counted = _choose(database, found_in, parts, reused.rows + rows, attempts, spill, some, old)
    there = len(known.places)
    counted.places[:there] = known.overlay(counted.places[:there])
    found = np.flatnonzero(counted.places >= 0)
    places, ranks = counted.places[found], counted.ranks[found]
    bad = np.flatnonzero(ranks)
    failed, again = found[bad], ranks[bad] == 2
    counts = ErrorCounts(
        reused.rows + rows,
        reused.errors + errors,
        len(failed),
        reused.retryable + retryable + int(np.count_nonzero(again)),
    )
    del ranks
    reused_unchanged = known.is_unchanged(counted.places[: reused.rows])
    places &= POSITION
    order = np.argsort(places)
    where = places[order], found[order]
    return Join(parts, *where, counts, counted.numbers, counted.others, failed, again, reused_unchanged)


def _rows_to_look_up(new: Sequence[Path], some: bool) -> str:
    # The table `failed` has the reused rows whose answers are errors
    source = parquet(new)
    if not some:
        return source
    return f"(SELECT row_id, key FROM {source} UNION ALL SELECT * FROM failed)" if new else "failed"


def _count_leading(parts: Sequence[Path], some: Sequence[Path]) -> int:
    among = {*some}
    return next((number for number, part in enumerate(parts) if part not in among), len(parts))


def _count_rows(database: Any, index: Sequence[Path]) -> tuple[int, int, int]:
    if not index:
        return 0, 0, 0
    bad = "key IS NULL"
    counts = f"count(*), count(*) FILTER ({bad}), count(*) FILTER ({bad} AND retryable)"
    ((rows, errors, retryable),) = database.execute(f"SELECT {counts} FROM {parquet(index)}").fetchall()
    return int(rows), int(errors), int(retryable)


def find_completion(
    index_parts: Sequence[Path], completion_parts: Sequence[Path], spill: Path, watched: Watched = nullcontext
) -> tuple[Path, int, int] | None:
    """Return where the store has the completion of an index with a single row, or None if it has none.

    Args:
        index_parts: Parts of the index.
        completion_parts: Parts of the store.
        spill: Folder for temporary files.
        watched: Makes queries interruptible, see `duck.connection`.

    Returns:
        The part, the row number in the part, and both as a position (see `Join`).

    Raises:
        StorageError: A part cannot be read.
        OutOfMemory: DuckDB exceeded its memory limit.
    """
    parts = tuple(sorted(completion_parts))
    if not parts:
        return None
    with connection(spill, watched=watched) as database:
        keys = f"SELECT key FROM {parquet(index_parts)}"
        query = f"SELECT min(place) FROM ({with_places(parts, 'key')}) WHERE key IN ({keys})"
        ((place,),) = database.execute(query).fetchall()
    if place is None:
        return None
    position = place & POSITION
    return parts[position >> PART_SHIFT], position & ROW_IN_PART, position


def _choose(
    database: Any,
    index: str,
    parts: Sequence[Path],
    rows: int,
    attempts: int,
    spill: Path,
    few: bool = False,
    old: int = 0,
) -> ChosenCompletions:
    # If most completions belong to other rows (`few`), keys are filtered first. The first `old` parts have no
    # completions of these rows
    if not parts[old:]:
        return ChosenCompletions(np.full(rows, -1, np.int64), None, np.empty(0, np.int64))
    load_chosen(database, parts[old:], attempts, index if few else None, old)
    with translate_errors(spill):
        return choose_completions(database, index, rows, attempts)


def has_error_completions(completion_parts: Sequence[Path], spill: Path) -> bool:
    """Return True if any completion in the parts of a store is an error. Most stores have none.

    Args:
        completion_parts: The parts.
        spill: Folder for temporary files.
    """
    if not completion_parts:
        return False
    with connection(spill) as database:
        found = f"SELECT 1 FROM {parquet(completion_parts)} WHERE error_code IS NOT NULL LIMIT 1"
        return bool(database.execute(found).fetchall())


def count_engine_errors(
    index_parts: Sequence[Path],
    completion_parts: Sequence[Path],
    spill: Path,
    *,
    attempts: int = 1,
    memory_limit: str | None = None,
    threads: int = 2,
) -> list[tuple[str, int, str]]:
    """Count the index rows whose completion is an error, by error code.

    Args:
        index_parts: Parts of the index.
        completion_parts: Parts of the store.
        spill: Folder for temporary files.
        attempts: Maximum attempts per row.
        memory_limit: Memory of DuckDB. None: `working_memory`.
        threads: Threads of DuckDB.

    Returns:
        For each error code: the code, the number of rows, and the location and message of the first row.
    """
    if not index_parts or not completion_parts:
        return []
    with connection(spill, memory_limit, threads) as database:
        ((rows,),) = database.execute(f"SELECT count(*) FROM {parquet(index_parts)}").fetchall()
        counted = _choose(database, parquet(index_parts), completion_parts, rows, attempts, spill)
        bad = np.flatnonzero((counted.places >= 0) & (counted.ranks > 0))
        places = counted.places[bad] & WITH_RANK
        database.register("bad", pa.table({"row_id": bad, "place": places}))
        failed = f"({with_places(completion_parts, 'error_code AS code, error_message AS message')})"
        found = database.execute(
            "SELECT e.code, count(*), "
            "arg_min(i.file || ' row ' || i.row_index || ': ' || coalesce(e.message, ''), i.row_id) "
            f"FROM {parquet(index_parts)} i JOIN bad c ON i.row_id = c.row_id JOIN {failed} e ON c.place = e.place "
            "GROUP BY e.code ORDER BY e.code"
        ).fetchall()
    return [(str(code), int(count), str(first)) for code, count, first in found]
