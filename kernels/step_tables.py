"""The block tables of a step's sequences where the host reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepTables:
    """Block tables of S sequences, as rows of an array that may have more rows and longer ones.

    What follows a sequence's own blocks names no block of it.
    """

    kept: NDArray[np.int32]  # (at least S rows, at least `width` blocks)
    rows: NDArray[np.int64]  # (S,): the row of each sequence
    width: int  # the most blocks that a sequence has

    @classmethod
    def of(cls, tables: NDArray[np.int32]) -> StepTables:
        """From an array that has a row for each sequence, in their order: (S, most blocks)."""
        return cls(tables, np.arange(len(tables)), tables.shape[1])

    def leading(self, sequences: NDArray[np.int64], blocks: int) -> NDArray[np.int32]:
        """(n, blocks): a copy of the first blocks of these n of the S sequences."""
        return self.kept[self.rows[sequences], :blocks]

    def array(self) -> NDArray[np.int32]:
        """(S, width): a copy of all of them."""
        return self.kept[self.rows, : self.width]
