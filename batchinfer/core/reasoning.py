"""The markers of a model's reasoning, and `locate_reasoning`, which separates the reasoning from the final answer.

The engine's constraints, the checks of answers and the result columns all use `locate_reasoning`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

Ids = tuple[int, ...]
# How a prompt ends: without a marker, inside of reasoning that it begins, or after the end of reasoning
NO_MARKER, OPEN, CLOSED = 0, 1, 2
# Raise it when the same answers give other columns: results with reasoning are then published again from the store
_VERSION = 2


class ReasoningTokens(NamedTuple):
    """The token ids of the markers around the reasoning of an answer.

    Args:
        begin: The marker before the reasoning. Empty if the prompt ends with this marker.
        end: The marker after the reasoning.
        answer: The marker that begins every final answer, with or without reasoning. `end` then ends with this marker.
            Empty: there is no such marker.
        gap: Tokens between the reasoning's end and the final answer. They are forced if a constraint begins after the
            reasoning.
    """

    begin: Ids
    end: Ids
    answer: Ids = ()
    gap: Ids = ()

    @property
    def closing(self) -> Ids:
        """Return the marker whose first occurrence ends the reasoning: `answer` if there is one, else `end`."""
        return self.answer or self.end


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around the reasoning of an answer, as texts.

    Args:
        begin: The marker before the reasoning.
        end: The marker after the reasoning.
        answer: The marker that begins every final answer, with or without reasoning. `end` then ends with this marker.
            Empty: there is no such marker.
        gap: The text between the reasoning's end and the final answer.
        tokens: The markers as tokens. None: the texts do not always have the same tokens.
    """

    begin: str
    end: str
    answer: str = ""
    gap: str = ""
    tokens: ReasoningTokens | None = None

    @property
    def closing(self) -> str:
        """Return the marker whose first occurrence ends the reasoning: `answer` if there is one, else `end`."""
        return self.answer or self.end

    def to_json(self) -> dict[str, Any]:
        """Return the reasoning markers as JSON values, which `from_json` reads.

        They are part of the identity of a result: a run with other markers does not reuse the result.
        """
        return {**asdict(self), "version": _VERSION}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the reasoning markers from the JSON values that `to_json` returns."""
        found = value["tokens"]
        tokens = None if found is None else ReasoningTokens(*map(tuple, found))
        return cls(value["begin"], value["end"], value["answer"], value["gap"], tokens)

    def tokens_after(self, opening: int) -> ReasoningTokens | None:
        """Return the reasoning markers, as tokens, that answers to a prompt may contain.

        Returns None if the prompt has ended the reasoning, or the markers have no fixed tokens.

        Args:
            opening: How the prompt ends: NO_MARKER, OPEN (after the marker before reasoning) or CLOSED (after the
                reasoning).
        """
        if self.tokens is None or opening == CLOSED:
            return None
        return self.tokens._replace(begin=()) if opening == OPEN else self.tokens


class ReasoningSpan(NamedTuple):
    """The positions of the reasoning and of the final answer in the tokens of an answer.

    Args:
        start: The index of the first token of the reasoning, after the marker.
        end: The end of the reasoning (exclusive), before the marker.
        answer: The index of the first token of the final answer. None: the answer ended within its reasoning.
        reasons: False if there is no reasoning.
    """

    start: int
    end: int
    answer: int | None
    reasons: bool = True


NO_REASONING = ReasoningSpan(0, 0, 0, False)


def locate_reasoning(ids: Sequence[int], marks: ReasoningTokens) -> ReasoningSpan:
    """Find the reasoning in the tokens of an answer.

    Reasoning must begin with the first token of the answer. Later markers are text, because a model may write about its
    own markers.

    Args:
        ids: The tokens of the answer.
        marks: The markers that begin and end reasoning.
    """
    first = _first_mark(ids, marks) if marks.begin else ()
    if first is None:
        return ReasoningSpan(len(ids), len(ids), None) if _is_partial_marker(ids, marks) else NO_REASONING
    if first != marks.begin:
        return ReasoningSpan(0, 0, len(first), False)
    start = len(first)
    at = find(ids, marks.closing, start)
    if at < 0:
        return ReasoningSpan(start, max(start, len(ids) - partial_marker_length(ids, marks.end)), None)
    answer = at + len(marks.closing)
    end_mark = answer - len(marks.end)
    has_end_mark = end_mark >= start and _is_at(ids, marks.end, end_mark)
    return ReasoningSpan(start, end_mark if has_end_mark else at, answer)


def find(ids: Sequence[int], wanted: Ids, start: int = 0) -> int:
    """Return the index at which the tokens `wanted` first occur in `ids`; -1 if they do not occur.

    Args:
        ids: The tokens to search.
        wanted: The consecutive tokens to find, at least one.
        start: The first index to consider.
    """
    first = wanted[0]
    while True:
        try:
            start = ids.index(first, start)
        except ValueError:
            return -1
        if _is_at(ids, wanted, start):
            return start
        start += 1


def partial_marker_length(ids: Sequence[int], mark: Ids) -> int:
    """Return how many tokens at the end of `ids` may be the beginning of an incomplete marker.

    Args:
        ids: The tokens of an answer.
        mark: The tokens of the marker.
    """
    longest = min(len(ids), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if _is_at(ids, mark[:n], len(ids) - n)), 0)


def _is_at(ids: Sequence[int], wanted: Ids, at: int) -> bool:
    return tuple(ids[at : at + len(wanted)]) == wanted


def _first_mark(ids: Sequence[int], marks: ReasoningTokens) -> Ids | None:
    # The shorter marker has precedence
    shorter_first = sorted(filter(None, (marks.begin, marks.answer)), key=len)
    return next((mark for mark in shorter_first if _is_at(ids, mark, 0)), None)


def _is_partial_marker(ids: Sequence[int], marks: ReasoningTokens) -> bool:
    given = tuple(ids)
    return bool(given) and any(given == mark[: len(given)] for mark in (marks.begin, marks.answer))
