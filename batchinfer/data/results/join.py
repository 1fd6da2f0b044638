"""The join of a job's index with the completion store: where each row's completion stands, and what that says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.data.storage.duck import Watched, connection, naming_errors, parquet

PART_SHIFT = 36  # of a position: the part's number, from the oldest, above the row's number in it
_RANK_SHIFT = 60  # of a place, which is a position with its rank above it
_POSITION, _ROW = (1 << _RANK_SHIFT) - 1, (1 << PART_SHIFT) - 1
# answers before errors, lasting errors before retryable ones, and then the part that was committed first
_RANK = "CASE WHEN error_code IS NULL THEN 0 WHEN retryable IS NOT TRUE THEN 1 ELSE 2 END::BIGINT"
_BATCH = 1 << 16
Numbers = NDArray[np.int64]


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

    @property
    def missing(self) -> int:
        """Rows that became requests, and have no completion yet."""
        return self.counts.rows - self.counts.input_errors - len(self.rows)

    def of_part(self, number: int) -> slice:
        """Return the part's share of `positions` and `rows`."""
        ends = np.array([number, number + 1], np.int64) << PART_SHIFT
        return slice(*np.searchsorted(self.positions, ends).tolist())

    def used(self) -> Iterator[tuple[str, Numbers]]:
        """Yield the parts that the rows are made of, each with the numbers of its rows that they use."""
        for number, part in enumerate(self.parts):
            found = self.positions[self.of_part(number)] & _ROW
            if len(found):
                yield part.name, found


def joined(
    index_parts: Sequence[Path],
    completion_parts: Sequence[Path],
    spill: Path,
    *,
    memory_limit: str | None = None,
    threads: int = 2,
    watched: Watched = nullcontext,
) -> Join:
    """Join the rows of an index with the completions of their keys.

    Beside what it returns it takes `memory_limit`; what is larger goes to the folder `spill`. Raises StorageError,
    OutOfMemory. `watched`: see `duck.connection`.
    """
    parts = tuple(sorted(completion_parts))
    if not index_parts:
        return Join(parts, np.empty(0, np.int64), np.empty(0, np.int64), ErrorCounts(0, 0, 0, 0))
    with connection(spill, memory_limit, threads, watched) as database:
        bad = "key IS NULL"
        ((rows, errors, retryable),) = database.execute(
            f"SELECT count(*), count(*) FILTER ({bad}), count(*) FILTER ({bad} AND retryable) "
            f"FROM {parquet(index_parts)}"
        ).fetchall()
        places = np.full(rows, -1, np.int64)
        if parts:
            _load_chosen(database, parts)
            with naming_errors(spill):
                _fill(places, database, index_parts)
    found = np.flatnonzero(places >= 0)
    places = places[found]
    ranks = places >> _RANK_SHIFT
    counts = ErrorCounts(
        rows, errors, int(np.count_nonzero(ranks)), retryable + int(np.count_nonzero(ranks == 2))
    )
    del ranks
    places &= _POSITION
    order = np.argsort(places)
    return Join(parts, places[order], found[order], counts)


def _fill(places: Numbers, database: Any, index_parts: Sequence[Path]) -> None:
    """Write the place of each row's completion to its number."""
    query = database.sql(
        f"SELECT i.row_id, c.place FROM {parquet(index_parts)} i JOIN chosen c ON i.key = c.key"
    )
    for batch in query.to_arrow_reader(_BATCH):
        places[batch.column(0).to_numpy()] = batch.column(1).to_numpy()


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
            f"WHERE c.place >> {_RANK_SHIFT} > 0 GROUP BY e.code ORDER BY e.code"
        ).fetchall()
    return [(str(code), int(count), str(first)) for code, count, first in rows]


def _load_chosen(database: Any, parts: Sequence[Path]) -> None:
    """Table `chosen`: each key with the place of the one completion that counts, wherever else it stands."""
    database.execute(
        f"CREATE TEMP TABLE chosen AS SELECT key, min(place) AS place FROM ({_placed(parts, 'key')}) GROUP BY key"
    )


def _placed(parts: Sequence[Path], columns: str) -> str:
    """Completions with their `place`: rank, part and row in one number, smaller is better."""
    source = parquet(sorted(parts), ", file_row_number = true")
    position = f"(file_index::BIGINT << {PART_SHIFT}) + file_row_number"
    return f"SELECT {columns}, (({_RANK}) << {_RANK_SHIFT}) + {position} AS place FROM {source}"
