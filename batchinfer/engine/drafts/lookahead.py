"""Proposes what the model itself said behind drafts that were wrong: lookahead decoding, of a single chain (Jacobi
iteration: Santilli et al., 2023, arXiv:2305.10427; n-grams of its trajectories: Fu et al., 2024, arXiv:2402.02057)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import NamedTuple

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.ngram_pool import NgramPool
from batchinfer.engine.drafts.own_text import followed, last_place
from batchinfer.engine.drafts.source import Proposal
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer_kernels.arithmetic import NO_TOKEN

MOST_GUESSES = 16  # tokens of a row: what lies further ahead is hardly ever right
_PAIR = 2  # tokens by which the pool knows what follows
# Before any was verified, guesses count as behind so many tokens that were recognised, and those of the pool: of the
# quickstart's first rows, 36 to 47 of 100 were right, and 47 to 61
_OWN, _POOLED = 2, 4


class Lookahead:
    """Guesses the next tokens of rows as the model did that ran the guesses before.

    A step samples behind each draft, also behind a wrong one and those behind it: as if these were right. What it says
    there are better guesses of the tokens at these places, which is Jacobi iteration. The pool, which all rows fill,
    knows what was said behind which two tokens; where it knows what follows a row, that is proposed, and else the row's
    own guesses. A row that has none begins with what followed its last token before. What it begins with is seldom
    right, and counts with the guesses that come of it.
    """

    name: DraftName = "lookahead"

    def __init__(self) -> None:
        self._pool = NgramPool()
        self._guesses: dict[Sequence, _Guesses] = {}

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Propose as many tokens of each row as it may have guesses, and `most` at most."""
        return [self._of_row(row, min(most, MOST_GUESSES)) for row in rows]

    def learn(self, text: array[int]) -> None:
        """Do nothing: it learns from what was sampled behind drafts, whoever proposed them."""

    def verified(self, taken: AcceptedTokens) -> None:
        """Learn what was sampled behind a row's drafts, but for those that are a tree."""
        if taken.parents or not taken.sampled:
            return
        known = taken.sequence.tokens[max(0, taken.known - _PAIR) : taken.known]
        text = [*known, *taken.drafts]
        for end, token in enumerate(taken.sampled, len(known)):
            if end >= _PAIR and token != NO_TOKEN:
                self._pool.learn(text[end - 2], text[end - 1], token)
        each = zip(taken.sampled, taken.drafts, strict=False)
        given = 1 + sum(1 for _ in takewhile(lambda one: one[0] == one[1], each))
        guesses = [*takewhile(lambda token: token != NO_TOKEN, taken.sampled[given:])]
        self._guesses[taken.sequence] = _Guesses(taken.known + given, guesses)

    @property
    def guessed(self) -> int:
        """Count the rows of which it has guesses."""
        return len(self._guesses)

    def ended(self, row: Sequence) -> None:
        """Forget the guesses of a row, which has ended."""
        self._guesses.pop(row, None)

    def _of_row(self, row: Sequence, most: int) -> Proposal | None:
        if len(row) < _PAIR:
            return None
        found = self._pool.continued(row.tokens[-2], row.tokens[-1], most)
        matched = _POOLED if found else _OWN
        if not found and row in self._guesses:
            found = self._guesses[row].behind(len(row))[:most]
        before, last = [*row.tokens[-_PAIR:], *found][-_PAIR:]
        found = [*found, *self._pool.continued(before, last, most - len(found))]
        if len(found) < most:
            found = [*found, *_begun(row, [last, *found][-1], most - len(found))]
        return Proposal(found, matched)


class _Guesses(NamedTuple):
    """Guesses of a row's tokens from the place `begin` on. They stay at their places, whatever steps give the row."""

    begin: int
    tokens: list[int]

    def behind(self, length: int) -> list[int]:
        """Return the guesses of the tokens behind the first `length` ones; none where some of these lie before them,
        which the row did not take."""
        return self.tokens[length - self.begin :] if length >= self.begin else []


def _begun(row: Sequence, last: int, most: int) -> array[int]:
    """Return what followed a token the last time in a row's text, else how the text ends: something to begin with."""
    at = last_place(row.tokens.tobytes(), array("i", [last]).tobytes())
    return row.tokens[max(0, len(row) - most) :] if at is None else followed(row.tokens, at + 1, most)
