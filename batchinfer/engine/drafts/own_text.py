"""Proposes what followed the same words earlier in a row's prompt or answer (prompt lookup; Saxena, 2023; inference
with reference: Yang et al., 2023, arXiv:2304.04487)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.source import Proposal
from batchinfer.engine.schedule.sequence import Sequence

# Longer stretches are looked for first: what follows them is likelier to follow again
STRETCHES = (8, 4, 2)
MOST_MATCHED = 32  # tokens of a stretch that are counted
_BYTES = array("i").itemsize


class OwnText:
    """Finds the last place in a row's own text that ends as the row does now."""

    name: DraftName = "prompt"

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Search the text of each row; it takes one pass over the text for each length of stretch, in C."""
        return [follows(row.tokens, most) for row in rows]

    def learn(self, text: array[int]) -> None:
        """Do nothing: only a row's own text is looked at."""


def follows(tokens: array[int], most: int) -> Proposal | None:
    """Return what followed the last earlier place at which the longest of the stretches stands with which `tokens` end;
    None where none of them stands anywhere else. A text that repeats itself is continued."""
    text = tokens.tobytes()
    for stretch in STRETCHES:
        if len(tokens) <= stretch:
            continue
        at = _last_place(text, text[-stretch * _BYTES :])
        if at is not None:
            begin = at + stretch
            found = tokens[begin : begin + most]
            while len(found) < most:  # it reaches the text's end: from there on it is what it begins with
                found += found[: most - len(found)]
            return Proposal(found, _matched(tokens, begin, stretch))
    return None


def _last_place(text: bytes, wanted: bytes) -> int | None:
    """Return the number of the token at which `wanted` begins for the last time, its own place at the end left out."""
    at = text.rfind(wanted, 0, len(text) - _BYTES)
    while at > 0 and at % _BYTES:  # within a token
        at = text.rfind(wanted, 0, at + len(wanted) - 1)
    return None if at < 0 else at // _BYTES


def _matched(tokens: array[int], begin: int, stretch: int) -> int:
    """Count the tokens before `begin` that are those at the end, of which so many are known to be."""
    end, matched = len(tokens), stretch
    while matched < min(begin, MOST_MATCHED) and tokens[begin - 1 - matched] == tokens[end - 1 - matched]:
        matched += 1
    return matched
