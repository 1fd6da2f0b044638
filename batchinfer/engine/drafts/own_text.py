"""Draft source that searches a row's own prompt and answer for its last tokens.

References: prompt lookup decoding (Saxena, 2023); inference with reference (Yang et al., 2023, arXiv:2304.04487).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

from batchinfer.core.samples import DraftSourceName
from batchinfer.engine.drafts.source import Proposal
from batchinfer.engine.schedule.sequence import Sequence

# Longer n-grams are tried first: the tokens after them are more likely to be accepted
NGRAM_SIZES = (8, 4, 2)
MOST_MATCHED = 32  # maximum counted length of a match, in tokens
_BYTES = array("i").itemsize


class OwnText:
    """A draft source that searches a row's own prompt and answer for the row's last tokens.

    It proposes the tokens after an earlier occurrence. The last 8 tokens are searched first, then the last 4 and the
    last 2.
    """

    name: DraftSourceName = "prompt"

    def __init__(self) -> None:
        self._beginning: int | None = None  # prompt position from which the newest copied answer began

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Return a proposal for each row, or None if the row's last tokens occur nowhere else in the row.

        Args:
            rows: Running sequences.
            most: Maximum number of tokens per proposal.
        """
        return [self._of_row(row.tokens, row.prompt_length, most) for row in rows]

    def learn(self, text: array[int]) -> None:
        """Do nothing with a complete answer: this source only searches a row's own text."""

    def _of_row(self, tokens: array[int], prompt: int, most: int) -> Proposal | None:
        answered = len(tokens) - prompt
        if 0 < answered < NGRAM_SIZES[1]:
            found = self._from_beginning(tokens, prompt, most)
            if found is not None:
                return found
        match = find_match(tokens)
        if match is None:
            return None
        if NGRAM_SIZES[0] <= answered <= match.matched and answered <= match.end < prompt:
            self._beginning = match.end - answered
        return Proposal(tokens_from(tokens, match.end, most), match.matched)

    def _from_beginning(self, tokens: array[int], prompt: int, most: int) -> Proposal | None:
        answered = len(tokens) - prompt
        if self._beginning is None:
            return None
        end = self._beginning + answered
        if end >= prompt or tokens[self._beginning : end] != tokens[prompt:]:
            return None
        return Proposal(tokens[end : min(prompt, end + most)], answered, agreed=True)


class Match(NamedTuple):
    """An earlier occurrence of a text's last tokens.

    Attributes:
        end: The position after the occurrence.
        matched: The number of tokens that match, at most 32.
    """

    end: int
    matched: int


def find_match(tokens: array[int]) -> Match | None:
    """Find the last earlier occurrence of the tokens at the end of a text.

    The last 8 tokens are searched first, then the last 4 and the last 2.

    Returns:
        The occurrence, or None if the last 2 tokens do not occur earlier.
    """
    text = tokens.tobytes()
    for size in NGRAM_SIZES:
        if len(tokens) <= size:
            continue
        at = last_occurrence(text, text[-size * _BYTES :])
        if at is not None:
            return Match(at + size, _matched(tokens, at + size, size))
    return None


def tokens_from(tokens: array[int], start: int, most: int) -> array[int]:
    """Return `most` tokens of a text from position `start` on. If the text has fewer, they are repeated to fill up."""
    found = tokens[start : start + most]
    while len(found) < most:
        found += found[: most - len(found)]
    return found


def last_occurrence(text: bytes, wanted: bytes) -> int | None:
    """Return the token index of the last occurrence of some tokens in a text, or None if there is none.

    The occurrence at the very end of the text does not count.

    Args:
        text: The tokens of the text, as the bytes of int32 values.
        wanted: The tokens to find, as the bytes of int32 values.
    """
    at = text.rfind(wanted, 0, len(text) - _BYTES)
    while at > 0 and at % _BYTES:  # the bytes match, but not at the start of a token
        at = text.rfind(wanted, 0, at + len(wanted) - 1)
    return None if at < 0 else at // _BYTES


def _matched(tokens: array[int], begin: int, size: int) -> int:
    end, matched = len(tokens), size
    while matched < min(begin, MOST_MATCHED) and tokens[begin - 1 - matched] == tokens[end - 1 - matched]:
        matched += 1
    return matched
