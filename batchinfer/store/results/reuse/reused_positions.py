"""The positions of the answers of reused rows in the store."""

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
    """The positions of the answers to reused rows in the store, as recorded by the last run.

    Attributes:
        places: The position of each row's answer, negative without an answer.
        failed: The rows whose answers are errors. Another run may have answered them since.
        keys: The work keys of the rows in `failed`.
    """

    places: Numbers
    failed: Numbers
    keys: pa.Array

    def overlay(self, found: Numbers) -> Numbers:
        """Return the current position of each reused row's answer.

        Args:
            found: The position that was looked up for each row. If it is negative, the recorded one is
                returned.
        """
        return np.where(found >= 0, found, self.places)

    def is_unchanged(self, places: Numbers) -> bool:
        """Return True if every reused row with an error still has its recorded completion.

        Args:
            places: The current position of each reused row's answer.
        """
        return bool((places[self.failed] & POSITION == self.places[self.failed]).all())


def read_reused_positions(reused: ReusedRows, parts: Sequence[Path]) -> ReusedPositions:
    """Return the recorded positions of the answers of reused rows. Raises StorageError.

    Args:
        reused: The reused rows.
        parts: The parts of the store, oldest first. They must include all parts with answers of the rows.
    """
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
    # Part numbers are indices into `names` before, and part numbers of the store afterwards
    own = np.array([*(numbers[name] for name in names), 0], np.int64)
    moved = (own[places >> PART_SHIFT] << PART_SHIFT) + (places & _ROW)
    return np.where(places >= 0, moved, places)
