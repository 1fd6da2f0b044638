"""The attempts of rows: which completion counts, of those that a row has of its own keys.

A row of a job with a ladder (`on_invalid`) has one of its first attempt, and, as long as all before are invalid, one of
each of the next. The first valid one counts; else the last that is an answer; else the last.
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

PART_SHIFT = 36  # of a position: the part's number, from the oldest, above the row's number in it
# Of a place, which is a position with its rank above it, and above that whether its completion is invalid
_RANK_SHIFT, _INVALID_SHIFT = 60, 62
POSITION, WITH_RANK = (1 << _RANK_SHIFT) - 1, (1 << _INVALID_SHIFT) - 1
# answers before errors, lasting errors before retryable ones, and then the part that was committed first
_RANK = "CASE WHEN error_code IS NULL THEN 0 WHEN retryable IS NOT TRUE THEN 1 ELSE 2 END::BIGINT"
_BATCH = 1 << 16
_NONE, _MISSING = -1, -2  # instead of a place: there is no such attempt; it is still to be made
IS_INVALID = f"place >> {_INVALID_SHIFT} <> 0"  # a row of the table `chosen`, in SQL
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CountedAttempts:
    """The completions that count, by row. Each row takes 8 bytes, and a ninth with a ladder.

    `places`: negative where a row has none, or an attempt is still to be made. `numbers`: which attempt it is of; None:
    there is no ladder. `others`: positions of further completions of these rows, which do not count.
    """

    places: Numbers
    numbers: NDArray[np.uint8] | None
    others: Numbers

    @property
    def ranks(self) -> Numbers:
        """How each row failed: 0 not at all, 1 for good, 2 retryably. Of rows with a completion."""
        return ranks_of(self.places)


def ranks_of(places: Numbers) -> Numbers:
    """Return the rank of each place."""
    return (places >> _RANK_SHIFT) & 3


def counted_attempts(database: Any, index: str, rows: int, attempts: int = 1) -> CountedAttempts:
    """Find the completion of each row of an index, as SQL reads it. Its table `chosen` is loaded (`load_chosen`)."""
    places = np.full(rows, _NONE, np.int64)
    _fill(places, database, f"SELECT row_id, place FROM {index} i JOIN chosen c ON i.key = c.key")
    if attempts == 1:
        return CountedAttempts(places, None, np.empty(0, np.int64))
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
    return CountedAttempts(places, numbers, np.unique(np.concatenate(others)))


def _invalid(places: Numbers) -> NDArray[np.bool_]:
    return np.asarray(places >= (1 << _INVALID_SHIFT))


def _fill(places: Numbers, database: Any, query: str) -> None:
    """Write what a query found of rows to their numbers."""
    for batch in database.sql(query).to_arrow_reader(_BATCH):
        places[batch.column(0).to_numpy()] = batch.column(1).to_numpy()


def load_chosen(
    database: Any, parts: Sequence[Path], attempts: int = 1, keys: str | None = None, first: int = 0
) -> None:
    """Create the table `chosen`: each key with the place of the one completion that counts, wherever else it stands.
    With more attempts than one, that says whether it is invalid. `keys`: only those of these rows, as SQL reads
    them. `first`: the number of the first part."""
    place, columns = "min(place)", "key"
    if attempts > 1:
        place += f" + (arg_min(invalid, place)::BIGINT << {_INVALID_SHIFT})"
        columns += f", {INVALID} AS invalid"
    wanted = "" if keys is None else f" WHERE key IN (SELECT key FROM {keys})"
    source = f"({placed(parts, columns, first)}){wanted}"
    database.execute(f"CREATE TEMP TABLE chosen AS SELECT key, {place} AS place FROM {source} GROUP BY key")


def placed(parts: Sequence[Path], columns: str, first: int = 0) -> str:
    """Completions with their `place`: rank, part and row in one number, smaller is better. It does not say whether they
    are invalid. `first`: the number of the first part."""
    source = parquet(sorted(parts), ", file_row_number = true")
    position = f"((file_index::BIGINT + {first}) << {PART_SHIFT}) + file_row_number"
    return f"SELECT {columns}, (({_RANK}) << {_RANK_SHIFT}) + {position} AS place FROM {source}"
