"""Answers of known rows, taken over whole or not, are found in the store by their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.errors import StorageError
from batchinfer.data.index.known_answers import KnownAnswers
from batchinfer.data.index.taken import TakenRows
from batchinfer.data.kept.whole import (
    FAILED,
    FAILED_TYPE,
    NO_PLACE,
    PLACE_TYPE,
    PLACES,
    KeptPlaces,
    WholeStretch,
    as_error,
    read_numbers,
)
from batchinfer.data.results.attempts import PART_SHIFT, POSITION, Numbers
from batchinfer.data.storage.durable import sha256_of

_ROW = (1 << PART_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class TakenPlaces:
    """The places of rows, negative where a row has no answer. `failed` are the taken rows whose answers are errors,
    with their `keys`, and `again` such rows among the others: another run may have answered them since."""

    places: Numbers
    failed: Numbers
    keys: pa.Array
    again: Numbers

    def laid_under(self, found: Numbers) -> Numbers:
        """Return all places, those that were found anew instead of those that were known."""
        return np.where(found >= 0, found, self.places)

    def is_still(self, places: Numbers) -> bool:
        """Whether the taken rows whose answers were errors have the same ones at these places."""
        return bool((places[self.failed] & POSITION == self.places[self.failed]).all())


def taken_places(taken: TakenRows, parts: Sequence[Path], known: KnownAnswers | None = None) -> TakenPlaces:
    """Return the places of rows in a store that has these parts, oldest first: all that their answers stand in are
    among them. `known`: those of the rows behind the taken ones. Raises StorageError."""
    numbers = {part.name: number for number, part in enumerate(parts)}
    places = [
        _in_store(read_numbers(one.places, PLACE_TYPE), one.stretch.store, numbers) for one in taken.stretches
    ]
    failed: NDArray[np.void] = np.concatenate(
        [np.empty(0, FAILED_TYPE), *(read_numbers(one.failed, FAILED_TYPE) for one in taken.stretches)]
    )
    data = pa.py_buffer(np.ascontiguousarray(failed["key"]))
    keys = pa.Array.from_buffers(pa.binary(32), len(failed), [None, data]).cast(pa.binary())
    others = np.empty(0, np.int64) if known is None else known.read()
    again = np.flatnonzero(others < NO_PLACE)
    others[again] = as_error(others[again])
    if known is not None:
        others = _in_store(others, known.parts, numbers)
    together = np.concatenate([np.empty(0, np.int64), *places, others])
    return TakenPlaces(together, failed["row"].copy(), keys, again + taken.rows)


def distinct_answers(taken: TakenRows, known: KnownAnswers) -> int:
    """Return how many different answers known rows have, the taken ones among them. Raises StorageError."""
    found = np.sort(taken_places(taken, [Path(name) for name in known.parts], known).places)
    return int(np.count_nonzero(np.diff(found, prepend=NO_PLACE)))  # np.unique takes ten times as long


def kept_places(kept: Path, stretches: Sequence[WholeStretch], parts: Sequence[Path]) -> KeptPlaces:
    """Return where the answers of all rows of a kept index are, which has these stretches, in a store with these parts.
    Raises StorageError, also where a file is not as it was written."""
    names = tuple(part.name for part in sorted(parts))
    numbers = {name: number for number, name in enumerate(names)}
    found = [np.empty(0, np.int64)]
    for one in stretches:
        found.append(_in_store(_read(kept, one, PLACES, PLACE_TYPE), one.store, numbers))
    places = np.concatenate(found)
    for one in stretches:
        failed = _read(kept, one, FAILED, FAILED_TYPE)["row"]
        places[failed] = as_error(places[failed])
    return KeptPlaces(places, names)


def _read(kept: Path, stretch: WholeStretch, name: str, kind: np.dtype[Any]) -> NDArray[Any]:
    path = kept / stretch.folder / name
    if sha256_of(path) != stretch.files[name].sha256:
        raise StorageError(f"{path}: its sha256 is not the recorded one")
    return read_numbers(path, kind)


def _in_store(places: Numbers, names: Sequence[str], numbers: Mapping[str, int]) -> Numbers:
    """Return places, in which parts have the numbers of these names, with other numbers of parts."""
    own = np.array([*(numbers[name] for name in names), 0], np.int64)
    moved = (own[places >> PART_SHIFT] << PART_SHIFT) + (places & _ROW)
    return np.where(places >= 0, moved, places)
