"""The tokens by which a model marks its reasoning, and where they cut an answer in two.

Everything that tells reasoning from the answer behind it asks `cut`: the engine's constraints, the checks of answers,
the columns of a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

Ids = tuple[int, ...]
# How a prompt ends: with neither marker, within the reasoning that it begins, or behind reasoning that is over
UNSAID, OPEN, CLOSED = 0, 1, 2
# Raise it when the same answers give other columns: results with reasoning are then published again from stored answers
_VERSION = 2


class ReasoningTokens(NamedTuple):
    """The token ids around the reasoning of an answer.

    `begin` is empty where the prompt has begun the reasoning already. `answer` is how an answer begins, with or without
    reasoning before it, where the model says so; it is then the end of `end`. `gap` is what a model writes between the
    reasoning's end and an answer: it is forced where a constraint follows.
    """

    begin: Ids
    end: Ids
    answer: Ids = ()
    gap: Ids = ()

    @property
    def closing(self) -> Ids:
        """The tokens behind which the reasoning is over, whatever stood before them."""
        return self.answer or self.end


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The texts around the reasoning of an answer, as `ReasoningTokens` describes them, and these tokens: None where
    the texts are written like any other."""

    begin: str
    end: str
    answer: str = ""
    gap: str = ""
    tokens: ReasoningTokens | None = None

    @property
    def closing(self) -> str:
        """The text behind which the reasoning is over."""
        return self.answer or self.end

    def to_json(self) -> dict[str, Any]:
        """Return the form that `from_json` reads. It is part of the identity of an index and of a result."""
        return {**asdict(self), "version": _VERSION}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        found = value["tokens"]
        tokens = None if found is None else ReasoningTokens(*map(tuple, found))
        return cls(value["begin"], value["end"], value["answer"], value["gap"], tokens)

    def tokens_after(self, opening: int) -> ReasoningTokens | None:
        """Return the tokens around the reasoning of an answer whose prompt ends so; None: it is over, or is told by
        text alone."""
        if self.tokens is None or opening == CLOSED:
            return None
        return self.tokens._replace(begin=()) if opening == OPEN else self.tokens


class ReasoningCut(NamedTuple):
    """Places in the tokens of an answer: its reasoning lies from `start` to `end`, and what the user is to read begins
    at `answer`; None: the answer ended within its reasoning. `reasons`: whether there is any reasoning."""

    start: int
    end: int
    answer: int | None
    reasons: bool = True


WHOLE = ReasoningCut(0, 0, 0, False)  # of an answer without reasoning


def cut(ids: Sequence[int], marks: ReasoningTokens) -> ReasoningCut:
    """Say where the tokens of an answer are its reasoning. Reasoning that does not begin with the first token is none:
    a model may speak of its own markers."""
    first = _first_mark(ids, marks) if marks.begin else ()
    if first is None:
        return ReasoningCut(len(ids), len(ids), None) if _is_cut_short(ids, marks) else WHOLE
    if first != marks.begin:
        return ReasoningCut(0, 0, len(first), False)
    start = len(first)
    at = find(ids, marks.closing, start)
    if at < 0:
        return ReasoningCut(start, max(start, len(ids) - held_back(ids, marks.end)), None)
    behind = at + len(marks.closing)
    whole = behind - len(marks.end)
    return ReasoningCut(start, whole if whole >= start and _stands(ids, marks.end, whole) else at, behind)


def find(ids: Sequence[int], wanted: Ids, start: int = 0) -> int:
    """Return the place from `start` on where the wanted tokens stand one behind the other; -1: nowhere."""
    first = wanted[0]
    while True:
        try:
            start = ids.index(first, start)
        except ValueError:
            return -1
        if _stands(ids, wanted, start):
            return start
        start += 1


def held_back(ids: Sequence[int], mark: Ids) -> int:
    """Return how many of the last tokens may be the beginning of a marker, which is not there as a whole."""
    longest = min(len(ids), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if _stands(ids, mark[:n], len(ids) - n)), 0)


def _stands(ids: Sequence[int], wanted: Ids, at: int) -> bool:
    return tuple(ids[at : at + len(wanted)]) == wanted


def _first_mark(ids: Sequence[int], marks: ReasoningTokens) -> Ids | None:
    """Return the marker that an answer begins with, the shorter one of two."""
    shorter_first = sorted(filter(None, (marks.begin, marks.answer)), key=len)
    return next((mark for mark in shorter_first if _stands(ids, mark, 0)), None)


def _is_cut_short(ids: Sequence[int], marks: ReasoningTokens) -> bool:
    """Whether the answer ended within the marker that it begins with."""
    given = tuple(ids)
    return bool(given) and any(given == mark[: len(given)] for mark in (marks.begin, marks.answer))
