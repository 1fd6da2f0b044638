"""Proposes what followed the same words in other answers of the job."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.source import LAST_WORDS, Proposal
from batchinfer.engine.schedule.sequence import Sequence

STRETCHES = (LAST_WORDS, 6, 3)  # tokens that have to be the same, the longest first
MOST_TOKENS = 1 << 18  # of answers that are remembered: 15 MB with what finds them
_LEAST_NEW = 256  # tokens before they are sorted in
_ENOUGH = 4  # of the latest places, which have to agree on the next token for a proposal to count as certain
_NONE = -1  # between two answers; no token
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]


class OtherAnswers:
    """Remembers the newest answers, with the last words of their prompts, and finds where the longest stretch stands
    with which a row ends. What finds them is sorted anew, when it is asked and a share of the tokens is new."""

    name: DraftName = "answers"

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._tokens = array("i", [_NONE])
        self._sorted_tokens = 0  # how many of them the indexes know
        self._text: NDArray[np.int32] = np.zeros(0, np.int32)
        self._indexes: list[_StretchIndex] = []

    def learn(self, text: array[int]) -> None:
        """Remember an answer. Once there are too many tokens, the oldest half is forgotten."""
        self._tokens += text[: self._most // 2]
        self._tokens.append(_NONE)
        if len(self._tokens) > self._most:
            self._tokens = self._tokens[len(self._tokens) - self._most // 2 :]
            self._sorted_tokens = 0

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Look all rows up at once, the longest stretch first."""
        if len(self._tokens) - self._sorted_tokens >= max(_LEAST_NEW, self._sorted_tokens // 4):
            self._sort()
        found: list[Proposal | None] = [None] * len(rows)
        for index in self._indexes:
            open_rows = [at for at, row in enumerate(rows) if found[at] is None and len(row) >= index.stretch]
            if not open_rows:
                continue
            ends = np.array([rows[at].tokens[-index.stretch :] for at in open_rows], np.int32)
            for at, places in zip(open_rows, index.places(ends), strict=True):
                found[at] = self._proposal(places, most, index.stretch)
        return found

    def _proposal(self, places: Places, most: int, stretch: int) -> Proposal | None:
        """Return what follows the newest of these places, up to the end of its answer."""
        if not len(places):
            return None
        latest = self._text[places[-_ENOUGH:]]
        begin = int(places[-1])
        tokens = self._text[begin : begin + most]
        ends = np.flatnonzero(tokens == _NONE)
        tokens = tokens[: ends[0]] if len(ends) else tokens
        agreed = len(latest) == _ENOUGH and bool((latest == latest[-1]).all())
        return Proposal(tokens.tolist(), stretch, agreed) if len(tokens) else None

    def _sort(self) -> None:
        self._text = np.array(self._tokens, np.int32)
        self._sorted_tokens = len(self._text)
        self._indexes = [_StretchIndex.of(self._text, stretch) for stretch in STRETCHES]


@dataclass(frozen=True, slots=True, eq=False)
class _StretchIndex:
    """The places behind all stretches of a length, sorted by a hash of these; equal ones by place."""

    stretch: int
    text: NDArray[np.int32]
    hashes: Hashes  # (n,) ascending
    behind: Places  # (n,): the token behind each stretch

    @classmethod
    def of(cls, text: NDArray[np.int32], stretch: int) -> _StretchIndex:
        """Sort the stretches of a text. Those that reach into the next answer, or end the text, are left out."""
        if len(text) <= stretch:
            return cls(stretch, text, np.zeros(0, np.uint64), np.zeros(0, np.int64))
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], stretch)
        starts = np.flatnonzero((windows != _NONE).all(1))
        hashes = _hashes(windows[starts])
        order = np.argsort(hashes, kind="stable")
        return cls(stretch, text, hashes[order], (starts + stretch)[order])

    def places(self, ends: NDArray[np.int32]) -> list[Places]:
        """Return the places behind each of these stretches, (n, stretch), ascending."""
        wanted = _hashes(ends)
        first = np.searchsorted(self.hashes, wanted, side="left")
        last = np.searchsorted(self.hashes, wanted, side="right")
        found = (self.behind[low:high][-_ENOUGH:] for low, high in zip(first, last, strict=True))
        return [self._equal(places, end) for places, end in zip(found, ends, strict=True)]

    def _equal(self, places: Places, end: NDArray[np.int32]) -> Places:
        """Leave out places behind other stretches of the same hash."""
        if not len(places):
            return places
        own = self.text[places[:, None] - np.arange(self.stretch, 0, -1)]
        same: NDArray[np.bool_] = (own == end).all(1)
        return places[same]


def _hashes(windows: NDArray[np.int32]) -> Hashes:
    """Hash stretches, (n, stretch), as polynomials modulo 2^64."""
    found = np.zeros(len(windows), np.uint64)
    for column in windows.T:
        found = found * _FACTOR + column.astype(np.uint64)
    return found ^ (found >> np.uint64(29))
