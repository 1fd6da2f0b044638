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

    @property
    def nearby(self) -> NDArray[np.int32]:
        """Return which keys each query sees that stand little before it, (T,): bit d of those that are d before its own
        one. It sees all that stand further before it; a query in no tree all, -1."""
        places = np.arange(MOST_NODES)
        ones = (self.bits.view(np.uint32)[:, None] >> places & 1).astype(bool)
        own = np.where(ones, places, -1).max(1, initial=-1)
        before = own[:, None] - places
        seen = (before < 0) | np.take_along_axis(ones, np.maximum(before, 0), 1)
        words: NDArray[np.uint32] = (seen.astype(np.uint32) << places.astype(np.uint32)).sum(
            1, dtype=np.uint32
        )
        return words.view(np.int32)

    def part(self, first: int, end: int) -> TreeMask | None:
        """Return that of the queries [first, end); None: none of them is in a tree."""
        bits = self.bits[first:end]
        return TreeMask(self.last[first:end], bits) if bits.any() else None

    def seen(self, first: int, end: int, keys: int) -> NDArray[np.bool_]:
        """Return which of the first `keys` keys the queries [first, end) see: (end - first, keys)."""
        place = np.arange(keys) - self.last[first:end, None] - 1
        inside = (place >= 0) & (place < MOST_NODES)
        bits = self.bits[first:end, None] >> np.where(inside, place, 0) & 1
        found: NDArray[np.bool_] = (place < 0) | (inside & bits.astype(bool))
        return found
