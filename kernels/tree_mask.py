"""The mask of a step says which keys its queries see where some of its tokens are trees of drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_NODES = 32  # of a tree: a bit for each


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """The keys that each of T queries sees: all up to a position, and of the MOST_NODES behind it those whose bits are
    set. The keys of a tree lie one behind the other, in the order of its nodes, whose bits are its ancestors' and its
    own; other queries have no bits, and see all up to their own positions."""

    last: NDArray[np.int64]  # (T,)
    bits: NDArray[np.int32]  # (T,): bit i stands for the key at last + 1 + i

    @property
    def depths(self) -> NDArray[np.int64]:
        """Count the keys behind `last` that each query sees, (T,)."""
        each = np.ascontiguousarray(self.bits).view(np.uint8).reshape(-1, 4)
        found: NDArray[np.int64] = np.unpackbits(each, axis=1).sum(1, dtype=np.int64)
        return found

    def seen(self, first: int, end: int, keys: int) -> NDArray[np.bool_]:
        """Return which of the first `keys` keys the queries [first, end) see: (end - first, keys)."""
        place = np.arange(keys) - self.last[first:end, None] - 1
        inside = (place >= 0) & (place < MOST_NODES)
        bits = self.bits[first:end, None] >> np.where(inside, place, 0) & 1
        found: NDArray[np.bool_] = (place < 0) | (inside & bits.astype(bool))
        return found
