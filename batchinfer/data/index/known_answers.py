"""An index says where the answers of known rows are: nobody has to look for their keys.

    answers.bin   of each row behind those that were taken over whole, the place of its answer, as KeptPlaces has it

A row that is not known has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchinfer.data.kept.whole import NO_PLACE, PLACE_TYPE, KeptPlaces, read_numbers
from batchinfer.data.storage.durable import DurableFile, FileOps

_NAME = "answers.bin"


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """The places of the answers of the rows of an index, behind those that were taken over whole. `parts`: the parts
    of the store whose numbers they have. All rows without tokens have a place, but for error rows."""

    path: Path
    parts: tuple[str, ...]

    def read(self) -> NDArray[np.int64]:
        """Return the places. Raises StorageError."""
        found: NDArray[np.int64] = read_numbers(self.path, PLACE_TYPE)
        return found


class AnswersWriter:
    """Notes where the answers of rows are, in the order of the rows; `close` in any case."""

    def __init__(self, kept: KeptPlaces, folder: Path, ops: FileOps) -> None:
        """folder: that of the index."""
        self._kept, self._file = kept, DurableFile(folder / _NAME, ops)

    def note(self, rows: NDArray[np.integer]) -> None:
        """Note the next rows, by their numbers in the kept index, -1 for others. Raises StorageError."""
        if len(rows):
            places, known = np.full(len(rows), NO_PLACE, PLACE_TYPE), rows >= 0
            places[known] = self._kept.places[rows[known]]  # an index without rows has no places to look up
            self._file.write(places.tobytes())

    def commit(self) -> KnownAnswers:
        """Complete the file. Raises StorageError."""
        self._file.commit()
        return KnownAnswers(self._file.path, self._kept.parts)

    def close(self) -> None:
        """Give up what was not finished."""
        self._file.close()
