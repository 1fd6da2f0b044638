"""Draft source for requests that carry a draft: the row's earlier answer, or the answer of a draft model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import numpy as np

from batchinfer.core.request import TokenIds
from batchinfer.core.samples import DraftSourceName
from batchinfer.engine.drafts.source import CONTEXT_TOKENS, Proposal
from batchinfer.engine.schedule.sequence import Sequence

MOST_GIVEN = 128  # maximum tokens of a proposal
_SURE = 8  # matching tokens from which on no other position is tried
_PLACES = 8  # maximum number of other positions that are compared
_COMPARED = 32  # tokens that are compared before each position


class GivenAnswer:
    """A draft source for requests that carry a draft of the whole answer, such as the row's earlier answer.

    It proposes the draft's tokens from the answer's current length on. If the draft does not match the end of the
    answer there, it proposes the tokens after the longest match with the end of the answer.
    """

    def __init__(self, name: DraftSourceName) -> None:
        """Create a source for drafts of one origin.

        Args:
            name: The name of the source in reports: "earlier" if drafts are earlier answers to the rows, "model" if a
                draft model generated them.
        """
        self.name = name

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Return a proposal of up to 128 tokens for each row, taken from the draft that its request carries.

        Args:
            rows: Running sequences.
            most: Ignored.

        Returns:
            A proposal per row. None for a row without a draft, or if no position of its draft matches.
        """
        return [
            None
            if row.request.draft is None
            else continue_draft(row.request.draft, row.tokens[row.prompt_length :])
            for row in rows
        ]

    def learn(self, text: array[int]) -> None:
        """Do nothing with a complete answer: all drafts of this source come from requests."""


def continue_draft(draft: TokenIds, answer: array[int]) -> Proposal | None:
    """Return the part of a draft that continues an incomplete answer.

    Args:
        draft: The tokens of a complete answer that resembles the one being generated.
        answer: The tokens that were generated so far.

    Returns:
        The proposed tokens, at most 128. None if no position of the draft matches the end of the answer, or if the
        draft ends there.
    """
    if not len(answer):
        return _proposal(draft, 0, CONTEXT_TOKENS)
    last = answer[-_COMPARED:].tolist()
    begin = len(answer)
    matched = _matched(draft, begin, last)
    if matched < _SURE:
        nearby = _nearby_positions(draft, last, begin)
        positions = [(begin, matched), *((at, _matched(draft, at, last)) for at in nearby)]
        begin, matched = max(positions, key=lambda position: position[1])  # the first of equal ones
    return _proposal(draft, begin, matched) if matched else None


def _proposal(draft: TokenIds, begin: int, matched: int) -> Proposal | None:
    tokens = draft[begin : begin + MOST_GIVEN].tolist()
    return Proposal(tokens, matched) if tokens else None


def _nearby_positions(draft: TokenIds, last: list[int], near: int) -> list[int]:
    if len(last) < 2 or len(draft) < 2:
        return []
    found = np.flatnonzero((draft[1:] == last[-1]) & (draft[:-1] == last[-2])) + 2
    order = np.argsort(np.abs(found - near), kind="stable")[:_PLACES]
    positions: list[int] = found[order].tolist()
    return positions


def _matched(draft: TokenIds, begin: int, last: list[int]) -> int:
    if begin > len(draft):
        return 0
    # Lists: comparing a few tokens in numpy takes ten times as long
    before = draft[max(0, begin - len(last)) : begin].tolist()
    matched = 0
    for own, other in zip(reversed(before), reversed(last), strict=False):
        if own != other:
            break
        matched += 1
    return matched
