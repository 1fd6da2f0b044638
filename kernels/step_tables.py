"""The block tables of a step's sequences in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepTables:
    """The block tables of S sequences, as rows of a larger array on the host.

    Attributes:
        kept: (at least S rows, at least `width` columns), block numbers. After a sequence's own blocks they are
            undefined.
        rows: (S,), the row of each sequence in `kept`.
        width: number of blocks of the longest sequence.
    """

    kept: NDArray[np.int32]
    rows: NDArray[np.int64]
    width: int

    @classmethod
    def of(cls, tables: NDArray[np.int32]) -> StepTables:
        """Return block tables for an array (S, blocks) with one row per sequence, in order."""
        return cls(tables, np.arange(len(tables)), tables.shape[1])

    def leading(self, sequences: NDArray[np.int64], blocks: int) -> NDArray[np.int32]:
        """Return a copy of the first `blocks` block numbers of some sequences: (n, blocks).

        Args:
            sequences: (n,), indices of sequences, below S.
            blocks: number of leading blocks.
        """
        return self.kept[self.rows[sequences], :blocks]

    def array(self) -> NDArray[np.int32]:
        """Return a copy of all block tables: (S, width)."""
        return self.kept[self.rows, : self.width]
