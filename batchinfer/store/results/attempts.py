"""Chooses the completion of each row among its attempts.

A row of a job with a ladder (`on_invalid`) has a key per attempt. Attempt n + 1 is only made if all earlier
attempts are invalid. The first valid completion is chosen, else the last one that is an answer, else the last
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.filesystem.duck import parquet
from batchinfer.store.answers.validity import INVALID
from batchinfer.store.index.index import attempt_columns

PART_SHIFT = 36  # a position is (part number, from the oldest) << 36 | (row number in the part)
# A place is a position with a rank above it (see _RANK), and a bit above that: the completion is invalid
_RANK_SHIFT, _INVALID_SHIFT = 60, 62
POSITION, WITH_RANK = (1 << _RANK_SHIFT) - 1, (1 << _INVALID_SHIFT) - 1
# Smaller ranks are preferred: answers, then permanent errors, then retryable errors. Then the older part is preferred
_RANK = "CASE WHEN error_code IS NULL THEN 0 WHEN retryable IS NOT TRUE THEN 1 ELSE 2 END::BIGINT"
_BATCH = 1 << 16
_NONE, _MISSING = -1, -2  # used as places: the row has no such attempt; the attempt has no completion yet
IS_INVALID = f"place >> {_INVALID_SHIFT} <> 0"  # a row of the table `chosen`, in SQL
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChosenCompletions:
    """The completion that was chosen for each row of an index. It takes 8 bytes per row, or 9 with a ladder.

    Attributes:
        places: Per row, the completion's position in the store, with its rank (see `ranks_of`) in the upper
            bits. Negative: there is none, or the row needs a further attempt.
        numbers: Per row, the number of the attempt that gave the completion, from 1. None: the job has no
            ladder.
        others: The positions of completions of these rows that were not chosen, ascending.
    """

    places: Numbers
    numbers: NDArray[np.uint8] | None
    others: Numbers

    @property
    def ranks(self) -> Numbers:
        """Return the rank of each row: 0 for an answer, 1 for a permanent error, 2 for a retryable error.

        The value is undefined for a row without a completion.
        """
        return ranks_of(self.places)


def ranks_of(places: Numbers) -> Numbers:
    """Return the rank of each place, which is a position in the store with a rank in the upper bits.

    The rank is 0 for an answer, 1 for a permanent error and 2 for a retryable error.
    """
    return (places >> _RANK_SHIFT) & 3


def choose_completions(database: Any, index: str, rows: int, attempts: int = 1) -> ChosenCompletions:
    """Choose the completion of each row of an index among its attempts.

    The first valid one is chosen. If there is none, it is the last answer, or else the last error.

    Args:
        database: A DuckDB connection with the table `chosen`, see `load_chosen`.
        index: The rows of the index, as a table expression in SQL.
        rows: Number of rows.
        attempts: Maximum attempts per row.
    """
    places = np.full(rows, _NONE, np.int64)
    _fill(places, database, f"SELECT row_id, place FROM {index} i JOIN chosen c ON i.key = c.key")
    if attempts == 1:
        return ChosenCompletions(places, None, np.empty(0, np.int64))
    numbers, invalid, others = np.ones(rows, np.uint8), _invalid(places), list[Numbers]()
    for attempt in range(2, attempts + 1):
        here = np.full(rows, _NONE, np.int64)
        key = attempt_columns(attempt)[0]
        source = f"{index} i LEFT JOIN chosen c ON i.{key} = c.key WHERE i.{key} IS NOT NULL"
        _fill(here, database, f"SELECT row_id, coalesce(place, {_MISSING}) FROM {source}")
        made = invalid & (here >= 0)
        counts = made & ((ranks_of(here) == 0) | (ranks_of(places) > 0))
        others += [places[counts] & POSITION, here[made & ~counts] & POSITION]
        places[counts], numbers[counts] = here[counts], attempt
        places[invalid & (here == _MISSING)] = _MISSING
        invalid &= (here == _NONE) | _invalid(here)
    return ChosenCompletions(places, numbers, np.unique(np.concatenate(others)))


def _invalid(places: Numbers) -> NDArray[np.bool_]:
    return np.asarray(places >= (1 << _INVALID_SHIFT))


def _fill(places: Numbers, database: Any, query: str) -> None:
    for batch in database.sql(query).to_arrow_reader(_BATCH):
        places[batch.column(0).to_numpy()] = batch.column(1).to_numpy()


def load_chosen(
    database: Any, parts: Sequence[Path], attempts: int = 1, keys: str | None = None, first: int = 0
) -> None:
    """Create the table `chosen` in DuckDB, with a completion of each work key in the columns key and place.

    Of several completions with the same key, answers are preferred, then permanent errors. The place is the
    position in the store, with the rank (see `ranks_of`) in the upper bits.

    Args:
        database: A DuckDB connection.
        parts: Parts of the store.
        attempts: Maximum attempts per row. If it is above 1, a further bit of the place marks invalid
            answers.
        keys: A table expression with the keys to load. None: all.
        first: The number of the first of these parts in the store.
    """
    place, columns = "min(place)", "key"
    if attempts > 1:
        place += f" + (arg_min(invalid, place)::BIGINT << {_INVALID_SHIFT})"
        columns += f", {INVALID} AS invalid"
    wanted = "" if keys is None else f" WHERE key IN (SELECT key FROM {keys})"
    source = f"({with_places(parts, columns, first)}){wanted}"
    database.execute(f"CREATE TEMP TABLE chosen AS SELECT key, {place} AS place FROM {source} GROUP BY key")


def with_places(parts: Sequence[Path], columns: str, first: int = 0) -> str:
    """Return a SQL query for the completions in parts of the store, with the columns `columns` and place.

    The place is the position in the store, with the rank (see `ranks_of`) in the upper bits.

    Args:
        parts: Parts of the store.
        columns: Further columns to select, as SQL.
        first: The number of the first of these parts in the store.
    """
    source = parquet(sorted(parts), ", file_row_number = true")
    position = f"((file_index::BIGINT + {first}) << {PART_SHIFT}) + file_row_number"
    return f"SELECT {columns}, (({_RANK}) << {_RANK_SHIFT}) + {position} AS place FROM {source}"
