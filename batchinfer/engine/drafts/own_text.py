"""Proposes what followed the same words earlier in a row's prompt or answer (prompt lookup; Saxena, 2023; inference
with reference: Yang et al., 2023, arXiv:2304.04487)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.source import Proposal
from batchinfer.engine.schedule.sequence import Sequence

# Longer stretches are looked for first: what follows them is likelier to follow again
STRETCHES = (8, 4, 2)
MOST_MATCHED = 32  # tokens of a stretch that are counted
_BYTES = array("i").itemsize


class OwnText:
    """Finds the last place in a row's own text that ends as the row does now; and, for an answer's first tokens, the
    place in the prompt at which an answer of another row began that is copied from there: rows of a job are alike."""

    name: DraftName = "prompt"

    def __init__(self) -> None:
        self._beginning: int | None = None  # in prompts, of the newest answer that is copied

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Search the text of each row; it takes one pass over the text for each length of stretch, in C."""
        return [self._of_row(row.tokens, row.prompt_length, most) for row in rows]

    def learn(self, text: array[int]) -> None:
        """Do nothing: only a row's own text is looked at."""

    def _of_row(self, tokens: array[int], prompt: int, most: int) -> Proposal | None:
        said = len(tokens) - prompt
        if 0 < said < STRETCHES[1]:
            found = self._from_beginning(tokens, prompt, most)
            if found is not None:
                return found
        place = recognised(tokens)
        if place is None:
            return None
        if STRETCHES[0] <= said <= place.matched and said <= place.behind < prompt:
            self._beginning = place.behind - said
        return Proposal(followed(tokens, place.behind, most), place.matched)

    def _from_beginning(self, tokens: array[int], prompt: int, most: int) -> Proposal | None:
        """Return what follows in the prompt where answers begin, if this one's first tokens stand there."""
        said = len(tokens) - prompt
        if self._beginning is None:
            return None
        behind = self._beginning + said
        if behind >= prompt or tokens[self._beginning : behind] != tokens[prompt:]:
            return None
        return Proposal(tokens[behind : min(prompt, behind + most)], said, agreed=True)


class Recognised(NamedTuple):
    """A place in a text, and how many tokens before it are known to be those at the text's end."""

    behind: int
    matched: int


def recognised(tokens: array[int]) -> Recognised | None:
    """Return the place behind the last earlier one of the longest stretch with which `tokens` end; None where none of
    them stands anywhere else."""
    text = tokens.tobytes()
    for stretch in STRETCHES:
        if len(tokens) <= stretch:
            continue
        at = last_place(text, text[-stretch * _BYTES :])
        if at is not None:
            return Recognised(at + stretch, _matched(tokens, at + stretch, stretch))
    return None


def followed(tokens: array[int], behind: int, most: int) -> array[int]:
    """Return the tokens behind a place, as many as are wanted. A text that repeats itself is continued."""
    found = tokens[behind : behind + most]
    while len(found) < most:  # it reaches the text's end: from there on it is what it begins with
        found += found[: most - len(found)]
    return found


def last_place(text: bytes, wanted: bytes) -> int | None:
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
