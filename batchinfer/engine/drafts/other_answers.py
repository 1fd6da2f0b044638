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
_HASHED = 4096  # stretches at a time: the products of all take 100 bytes each
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
        self._text = array("i")  # these
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
            places = index.places([rows[at].tokens[-index.stretch :] for at in open_rows])
            for at, own in zip(open_rows, places, strict=True):
                found[at] = self._proposal(own, most, index.stretch) if own else None
        return found

    def _proposal(self, places: list[int], most: int, stretch: int) -> Proposal | None:
        """Return what follows the newest of these places, up to the end of its answer."""
        text, begin = self._text, places[-1]
        tokens = text[begin : begin + most]
        if _NONE in tokens:
            tokens = tokens[: tokens.index(_NONE)]
        agreed = len(places) == _ENOUGH and all(text[place] == text[begin] for place in places)
        return Proposal(tokens, stretch, agreed) if tokens else None

    def _sort(self) -> None:
        self._text = self._tokens[:]
        self._sorted_tokens = len(self._text)
        self._indexes = [_StretchIndex.of(self._text, stretch) for stretch in STRETCHES]


@dataclass(frozen=True, slots=True, eq=False)
class _StretchIndex:
    """The places behind all stretches of a length, sorted by a hash of these; equal ones by place. What is found of a
    row is compared in arrays of Python: for a few numbers numpy takes several times as long."""

    stretch: int
    text: array[int]
    hashes: Hashes  # (n,) ascending
    behind: Places  # (n,): the token behind each stretch

    @classmethod
    def of(cls, text: array[int], stretch: int) -> _StretchIndex:
        """Sort the stretches of a text. Those that reach into the next answer, or end the text, are left out."""
        if len(text) <= stretch:
            return cls(stretch, text, np.zeros(0, np.uint64), np.zeros(0, np.int64))
        tokens = np.frombuffer(text, np.int32)
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], stretch)
        starts = np.flatnonzero((windows != _NONE).all(1))
        blocks = [_hashes(windows[starts[at : at + _HASHED]]) for at in range(0, len(starts), _HASHED)]
        hashes = np.concatenate([np.zeros(0, np.uint64), *blocks])
        order = np.argsort(hashes, kind="stable")
        return cls(stretch, text, hashes[order], (starts + stretch)[order])

    def places(self, ends: list[array[int]]) -> list[list[int]]:
        """Return the newest places behind each of these stretches, up to _ENOUGH, ascending."""
        wanted = _hashes(np.array(ends, np.int32))
        first = np.searchsorted(self.hashes, wanted, side="left").tolist()
        last = np.searchsorted(self.hashes, wanted, side="right").tolist()
        return [self._equal(*own) for own in zip(first, last, ends, strict=True)]

    def _equal(self, first: int, last: int, end: array[int]) -> list[int]:
        """Return the newest of these places, without those behind other stretches of the same hash."""
        if first == last:
            return []
        places = self.behind[max(first, last - _ENOUGH) : last].tolist()
        return [place for place in places if self.text[place - self.stretch : place] == end]


def _hashes(windows: NDArray[np.int32]) -> Hashes:
    """Hash stretches, (n, stretch), as polynomials modulo 2^64."""
    powers = _FACTOR ** np.arange(windows.shape[1] - 1, -1, -1, dtype=np.uint64)
    found: Hashes = (windows.astype(np.uint64) * powers).sum(1)
    return found ^ (found >> np.uint64(29))
