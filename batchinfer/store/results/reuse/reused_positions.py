"""Answers of rows that were taken over whole are found in the store by their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.store.index.reused_rows import ReusedRows
from batchinfer.store.kept.finished import FAILED_TYPE, POSITION_TYPE, read_numbers
from batchinfer.store.results.attempts import PART_SHIFT, POSITION, Numbers

_ROW = (1 << PART_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class ReusedPositions:
    """The places of rows, negative where a row has no answer. `failed` are the rows whose answers are errors, with
    their `keys`: another run may have answered them since."""

    places: Numbers
    failed: Numbers
    keys: pa.Array

    def overlay(self, found: Numbers) -> Numbers:
        """Return all places, those that were found anew instead of those that were known."""
        return np.where(found >= 0, found, self.places)

    def is_unchanged(self, places: Numbers) -> bool:
        """Whether the rows whose answers were errors have the same ones at these places."""
        return bool((places[self.failed] & POSITION == self.places[self.failed]).all())


def read_reused_positions(reused: ReusedRows, parts: Sequence[Path]) -> ReusedPositions:
    """Return the places of rows in a store that has these parts, oldest first: all that their answers stand in are
    among them. Raises StorageError."""
    numbers = {part.name: number for number, part in enumerate(parts)}
    places = [
        _in_store(read_numbers(one.places, POSITION_TYPE), one.segment.store, numbers)
        for one in reused.segments
    ]
    failed: NDArray[np.void] = np.concatenate(
        [np.empty(0, FAILED_TYPE), *(read_numbers(one.failed, FAILED_TYPE) for one in reused.segments)]
    )
    data = pa.py_buffer(np.ascontiguousarray(failed["key"]))
    keys = pa.Array.from_buffers(pa.binary(32), len(failed), [None, data]).cast(pa.binary())
    return ReusedPositions(np.concatenate([np.empty(0, np.int64), *places]), failed["row"].copy(), keys)


def _in_store(places: Numbers, names: Sequence[str], numbers: Mapping[str, int]) -> Numbers:
    """Return places, in which parts have the numbers of these names, with other numbers of parts."""
    own = np.array([*(numbers[name] for name in names), 0], np.int64)
    moved = (own[places >> PART_SHIFT] << PART_SHIFT) + (places & _ROW)
    return np.where(places >= 0, moved, places)
