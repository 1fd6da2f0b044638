"""The join of a job's index with the completion store: where each row's completion stands, and what that says."""

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
from batchinfer.filesystem.duck import Watched, connection, naming_errors, parquet
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows
from batchinfer.store.results.attempts import (
    PART_SHIFT,
    POSITION,
    WITH_RANK,
    CountedAttempts,
    Numbers,
    counted_attempts,
    load_chosen,
    placed,
)
from batchinfer.store.results.reuse.reused_positions import read_reused_positions

ROW_IN_PART = (1 << PART_SHIFT) - 1


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


@dataclass(frozen=True, slots=True)
class Join:
    """The completions of a job's rows by their positions in the store. Each row takes 16 bytes.

    `positions` ascend; `rows` are those of the index whose completions stand there, several of one position where rows
    are equal. Rows without a completion are in neither.
    """

    parts: tuple[Path, ...]  # of the store, oldest first
    positions: Numbers
    rows: Numbers
    counts: ErrorCounts
    # By row of the index: which attempt its completion is of; None: the job has no ladder
    attempts: NDArray[np.uint8] | None = None
    # Positions of completions of other attempts
    others: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    # Rows whose completion is an error, ascending, and which of them are retryable
    failed: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    again: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    # Whether all rows that were taken over have the completions that they had
    reused_unchanged: bool = True

    @property
    def missing(self) -> int:
        """Rows that became requests, and have no completion yet."""
        return self.counts.rows - self.counts.input_errors - len(self.rows)

    def refuse_missing(self) -> None:
        """Raises BatchInferError where rows have no completion."""
        if self.missing:
            raise BatchInferError(f"{self.missing} rows have no completion yet: nothing published")

    def within(self, spans: Sequence[tuple[int, int]]) -> Join:
        """Return what it says of the rows of these spans, each from a row to another."""
        wanted = np.zeros(self.counts.rows, np.bool_)
        for start, stop in spans:
            wanted[start:stop] = True
        if wanted.all():
            return self
        chosen = wanted[self.rows]
        return replace(self, positions=self.positions[chosen], rows=self.rows[chosen])

    def of_part(self, number: int) -> slice:
        """Return the part's share of `positions` and `rows`."""
        return _of_part(self.positions, number)

    def used(self) -> Iterator[tuple[str, Numbers]]:
        """Yield the parts that the rows are made of, each with the numbers of its rows that they use: invalid answers,
        too, without which further attempts would not have been made."""
        used = np.union1d(self.positions, self.others) if len(self.others) else self.positions
        for number, part in enumerate(self.parts):
            found = used[_of_part(used, number)] & ROW_IN_PART
            if len(found):
                yield part.name, found


def _of_part(positions: Numbers, number: int) -> slice:
    ends = np.array([number, number + 1], np.int64) << PART_SHIFT
    return slice(*np.searchsorted(positions, ends).tolist())


def joined(
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
    """Join the rows of an index with the completions of their keys, `attempts` of which a row may have. A row has no
    completion while one of its attempts is still to be made. `reused`: the first rows, whose answers are known; only
    those that are errors are looked up. `without`: parts that have no completion of any other row.

    Beside what it returns it takes `memory_limit`; what is larger goes to the folder `spill`. Raises StorageError,
    OutOfMemory. `watched`: see `duck.connection`.
    """
    parts = tuple(sorted(completion_parts))
    if not index_parts:
        return Join(parts, np.empty(0, np.int64), np.empty(0, np.int64), ErrorCounts(0, 0, 0, 0))
    known = read_reused_positions(reused, parts)
    new = [*index_parts[len(reused.parts) :]]
    with connection(spill, memory_limit, threads, watched) as database:
        rows, errors, retryable = _numbers(database, new)
        database.register("failed", pa.table({"row_id": known.failed, "key": known.keys}))
        some = reused.rows > 0
        found_in = _searched(new, some)
        old = 0 if len(known.failed) else _leading(parts, without)
        counted = _counted(database, found_in, parts, reused.rows + rows, attempts, spill, some, old)
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


def _searched(new: Sequence[Path], some: bool) -> str:
    """Return the rows whose completions are looked up, as a table of a query: those of the index parts `new`; and where
    `some` rows were taken over, those of them whose answers are errors, which are registered as `failed`."""
    source = parquet(new)
    if not some:
        return source
    return f"(SELECT row_id, key FROM {source} UNION ALL SELECT * FROM failed)" if new else "failed"


def _leading(parts: Sequence[Path], some: Sequence[Path]) -> int:
    """Return how many of the parts, from the first one on, are among these."""
    among = {*some}
    return next((number for number, part in enumerate(parts) if part not in among), len(parts))


def _numbers(database: Any, index: Sequence[Path]) -> tuple[int, int, int]:
    """Return how many rows an index has, how many of them are error rows, and how many of these are retryable."""
    if not index:
        return 0, 0, 0
    bad = "key IS NULL"
    counts = f"count(*), count(*) FILTER ({bad}), count(*) FILTER ({bad} AND retryable)"
    ((rows, errors, retryable),) = database.execute(f"SELECT {counts} FROM {parquet(index)}").fetchall()
    return int(rows), int(errors), int(retryable)


def completion_of(
    index_parts: Sequence[Path], completion_parts: Sequence[Path], spill: Path, watched: Watched = nullcontext
) -> tuple[Path, int, int] | None:
    """Return where the completion stands that counts for the one row of an index: its part, the row there, and both as
    a position of a `Join`; None: there is none. Raises and takes what `joined` does."""
    parts = tuple(sorted(completion_parts))
    if not parts:
        return None
    with connection(spill, watched=watched) as database:
        query = f"SELECT min(place) FROM ({placed(parts, 'key')}) WHERE key IN (SELECT key FROM {parquet(index_parts)})"
        ((place,),) = database.execute(query).fetchall()
    if place is None:
        return None
    position = place & POSITION
    return parts[position >> PART_SHIFT], position & ROW_IN_PART, position


def _counted(
    database: Any,
    index: str,
    parts: Sequence[Path],
    rows: int,
    attempts: int,
    spill: Path,
    few: bool = False,
    old: int = 0,
) -> CountedAttempts:
    """Find the completions of rows, as SQL reads them; `few`: most of the store's are of others, and all of the first
    `old` parts."""
    if not parts[old:]:
        return CountedAttempts(np.full(rows, -1, np.int64), None, np.empty(0, np.int64))
    load_chosen(database, parts[old:], attempts, index if few else None, old)
    with naming_errors(spill):
        return counted_attempts(database, index, rows, attempts)


def stores_errors(completion_parts: Sequence[Path], spill: Path) -> bool:
    """Return True if any of these parts has an error completion. Most stores have no such part."""
    if not completion_parts:
        return False
    with connection(spill) as database:
        found = f"SELECT 1 FROM {parquet(completion_parts)} WHERE error_code IS NOT NULL LIMIT 1"
        return bool(database.execute(found).fetchall())


def engine_errors(
    index_parts: Sequence[Path],
    completion_parts: Sequence[Path],
    spill: Path,
    *,
    attempts: int = 1,
    memory_limit: str | None = None,
    threads: int = 2,
) -> list[tuple[str, int, str]]:
    """Return the errors of completions: (code, number of rows, place and message of the first)."""
    if not index_parts or not completion_parts:
        return []
    with connection(spill, memory_limit, threads) as database:
        ((rows,),) = database.execute(f"SELECT count(*) FROM {parquet(index_parts)}").fetchall()
        counted = _counted(database, parquet(index_parts), completion_parts, rows, attempts, spill)
        bad = np.flatnonzero((counted.places >= 0) & (counted.ranks > 0))
        places = counted.places[bad] & WITH_RANK
        database.register("bad", pa.table({"row_id": bad, "place": places}))
        failed = f"({placed(completion_parts, 'error_code AS code, error_message AS message')})"
        found = database.execute(
            "SELECT e.code, count(*), "
            "arg_min(i.file || ' row ' || i.row_index || ': ' || coalesce(e.message, ''), i.row_id) "
            f"FROM {parquet(index_parts)} i JOIN bad c ON i.row_id = c.row_id JOIN {failed} e ON c.place = e.place "
            "GROUP BY e.code ORDER BY e.code"
        ).fetchall()
    return [(str(code), int(count), str(first)) for code, count, first in found]
