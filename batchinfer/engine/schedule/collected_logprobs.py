"""The log-probabilities of a sequence's tokens, as they come."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from batchinfer.core.request import TokenLogprobs


@dataclass(slots=True, eq=False)
class CollectedLogprobs:
    """Grows by a token at a time; 4 bytes a token, and 8 for each of the likeliest ones at its place."""

    _chosen: array[float] = field(default_factory=lambda: array("f"))
    _top: array[float] = field(default_factory=lambda: array("f"))
    _top_ids: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self._chosen)

    def append(self, found: TokenLogprobs, at: int) -> None:
        """Take those of the token `at` of `found`. They are copied: `found` may be a view of a whole step's."""
        self._chosen.append(found.chosen[at])
        self._top.frombytes(found.top[at].tobytes())
        self._top_ids.frombytes(found.top_ids[at].tobytes())

    def all(self) -> TokenLogprobs:
        """Those of all tokens so far."""
        count = len(self._chosen)
        shape = (count, len(self._top) // max(count, 1))
        return TokenLogprobs(
            np.array(self._chosen, np.float32),
            np.array(self._top, np.float32).reshape(shape),
            np.array(self._top_ids, np.int32).reshape(shape),
        )
