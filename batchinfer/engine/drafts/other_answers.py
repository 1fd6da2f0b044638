"""Draft source that searches other answers of the job for the last tokens of a row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.samples import DraftSourceName
from batchinfer.engine.drafts.source import CONTEXT_TOKENS, Proposal
from batchinfer.engine.schedule.sequence import Sequence

NGRAM_SIZES = (CONTEXT_TOKENS, 6, 3)  # tokens that must match, longest first
MOST_TOKENS = 1 << 18  # tokens of answers that are kept: 15 MB with their indexes
_LEAST_NEW = 256  # new tokens before the indexes are rebuilt
_MIN_AGREEING = 4  # newest matches that must continue with the same token for a proposal to count as agreed
_NONE = -1  # separates two answers
_HASHED = 4096  # n-grams that are hashed at a time: intermediate results take 100 bytes each
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]


class OtherAnswers:
    """A draft source that searches other answers of the job for the last tokens of a row.

    It proposes the tokens after the match. The newest answers, each with the last tokens of its prompt, are searched
    for the row's last 12 tokens, then for its last 6 and its last 3.
    """

    name: DraftSourceName = "answers"

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._tokens = array("i", [_NONE])
        self._sorted_tokens = 0  # number of indexed tokens
        self._text = array("i")  # the indexed tokens
        self._indexes: list[_NgramIndex] = []

    def learn(self, text: array[int]) -> None:
        """Add a complete answer to the searched texts. Above their maximum size, the oldest half is dropped.

        Args:
            text: The last tokens of the prompt, then the tokens of the answer. Tokens beyond half of the maximum size
                are dropped.
        """
        self._tokens += text[: self._most // 2]
        self._tokens.append(_NONE)
        if len(self._tokens) > self._most:
            self._tokens = self._tokens[len(self._tokens) - self._most // 2 :]
            self._sorted_tokens = 0

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Return a proposal for each row, or None if the row's last tokens occur in no other answer.

        Args:
            rows: Running sequences.
            most: Maximum number of tokens per proposal.
        """
        if len(self._tokens) - self._sorted_tokens >= max(_LEAST_NEW, self._sorted_tokens // 4):
            self._sort()
        found: list[Proposal | None] = [None] * len(rows)
        for index in self._indexes:
            open_rows = [at for at, row in enumerate(rows) if found[at] is None and len(row) >= index.size]
            if not open_rows:
                continue
            places = index.find_positions([rows[at].tokens[-index.size :] for at in open_rows])
            for at, own in zip(open_rows, places, strict=True):
                found[at] = self._proposal(own, most, index.size) if own else None
        return found

    def _proposal(self, places: list[int], most: int, size: int) -> Proposal | None:
        text, begin = self._text, places[-1]
        tokens = text[begin : begin + most]
        if _NONE in tokens:
            tokens = tokens[: tokens.index(_NONE)]
        agreed = len(places) == _MIN_AGREEING and all(text[place] == text[begin] for place in places)
        return Proposal(tokens, size, agreed) if tokens else None

    def _sort(self) -> None:
        self._text = self._tokens[:]
        self._sorted_tokens = len(self._text)
        self._indexes = [_NgramIndex.of(self._text, size) for size in NGRAM_SIZES]


@dataclass(frozen=True, slots=True, eq=False)
class _NgramIndex:
    """An index of all n-grams of one size in a text.

    Attributes:
        size: The number of tokens of an n-gram.
        text: The indexed tokens.
        hashes: The hash of each n-gram, [n], ascending.
        positions: The position after each n-gram, [n], ascending among equal hashes.
    """

    size: int
    text: array[int]
    hashes: Hashes
    positions: Places

    @classmethod
    def of(cls, text: array[int], size: int) -> _NgramIndex:
        """Build the index of the n-grams with `size` tokens in a text.

        N-grams that cross the end of an answer are left out. So is the last n-gram, because no token follows it.
        """
        if len(text) <= size:
            return cls(size, text, np.zeros(0, np.uint64), np.zeros(0, np.int64))
        tokens = np.frombuffer(text, np.int32)
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        starts = np.flatnonzero((windows != _NONE).all(1))
        blocks = [_hashes(windows[starts[at : at + _HASHED]]) for at in range(0, len(starts), _HASHED)]
        hashes = np.concatenate([np.zeros(0, np.uint64), *blocks])
        order = np.argsort(hashes, kind="stable")
        return cls(size, text, hashes[order], (starts + size)[order])

    def find_positions(self, ends: list[array[int]]) -> list[list[int]]:
        """For each n-gram, return the positions after its newest occurrences in the indexed text, in ascending order.

        Args:
            ends: The n-grams to look up, each of `size` tokens.

        Returns:
            A list per n-gram, with up to 4 positions; empty if the n-gram does not occur.
        """
        wanted = _hashes(np.array(ends, np.int32))
        first = np.searchsorted(self.hashes, wanted, side="left").tolist()
        last = np.searchsorted(self.hashes, wanted, side="right").tolist()
        return [self._matching(*own) for own in zip(first, last, ends, strict=True)]

    def _matching(self, first: int, last: int, end: array[int]) -> list[int]:
        if first == last:
            return []
        # Arrays of Python: comparing a few numbers takes numpy several times as long
        places = self.positions[max(first, last - _MIN_AGREEING) : last].tolist()
        return [place for place in places if self.text[place - self.size : place] == end]


def _hashes(windows: NDArray[np.int32]) -> Hashes:
    powers = _FACTOR ** np.arange(windows.shape[1] - 1, -1, -1, dtype=np.uint64)
    found: Hashes = (windows.astype(np.uint64) * powers).sum(1)
    return found ^ (found >> np.uint64(29))
