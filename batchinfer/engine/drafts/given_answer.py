"""Proposes the answer that a request came with: one that the row had before, or that a smaller model gave it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import numpy as np

from batchinfer.core.request import TokenIds
from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.source import LAST_WORDS, Proposal
from batchinfer.engine.schedule.sequence import Sequence

MOST_GIVEN = 128  # tokens: more than a source proposes that knows less
_SURE = 8  # tokens that are the same at a place: no other place is looked at
_PLACES = 8  # that are compared further
_COMPARED = 32  # tokens before a place


class GivenAnswer:
    """Goes on in a request's draft behind what the row has of it. Where the answer differs, it goes on behind the place
    of the draft that ends most like the answer so far, the one nearest to the answer's length."""

    def __init__(self, name: DraftName) -> None:
        """`name`: of where the job's requests have their drafts from."""
        self._name = name

    @property
    def name(self) -> DraftName:
        """The name by which jobs and reports know it."""
        return self._name

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Return what follows in each row's draft; `most` is exceeded, as the draft is of the row itself."""
        return [
            None if row.request.draft is None else goes_on(row.request.draft, row.tokens[row.prompt_length :])
            for row in rows
        ]

    def learn(self, text: array[int]) -> None:
        """Do nothing: a draft is of one row."""


def goes_on(draft: TokenIds, answer: array[int]) -> Proposal | None:
    """Return what follows in a draft behind an answer so far; None: the answer has left it."""
    if not len(answer):
        return _behind(draft, 0, LAST_WORDS)
    said = answer[-_COMPARED:].tolist()
    begin = len(answer)
    matched = _matched(draft, begin, said)
    if matched < _SURE:
        places = [(begin, matched), *((at, _matched(draft, at, said)) for at in _places(draft, said, begin))]
        begin, matched = max(places, key=lambda place: place[1])  # the first of equal ones
    return _behind(draft, begin, matched) if matched else None


def _behind(draft: TokenIds, begin: int, matched: int) -> Proposal | None:
    tokens = draft[begin : begin + MOST_GIVEN].tolist()
    return Proposal(tokens, matched) if tokens else None


def _places(draft: TokenIds, said: list[int], near: int) -> list[int]:
    """Return the places behind the last two tokens that were said, the nearest first."""
    if len(said) < 2 or len(draft) < 2:
        return []
    found = np.flatnonzero((draft[1:] == said[-1]) & (draft[:-1] == said[-2])) + 2
    order = np.argsort(np.abs(found - near), kind="stable")[:_PLACES]
    places: list[int] = found[order].tolist()
    return places


def _matched(draft: TokenIds, begin: int, said: list[int]) -> int:
    """Count the tokens before a place of the draft that are the last ones that were said."""
    if begin > len(draft):
        return 0
    # Lists, as comparing a few tokens in numpy takes ten times as long
    before = draft[max(0, begin - len(said)) : begin].tolist()
    matched = 0
    for own, other in zip(reversed(before), reversed(said), strict=False):
        if own != other:
            break
        matched += 1
    return matched
