"""Splits answers into the reasoning and the text after it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple

import pyarrow as pa

from batchinfer.core.reasoning import (
    NO_REASONING,
    Reasoning,
    ReasoningSpan,
    ReasoningTokens,
    find,
    locate_reasoning,
)
from batchinfer.store.columns.logprob_column import Detokenizer

REASONING_FIELDS = (pa.field("reasoning", pa.string()), pa.field("reasoning_tokens", pa.int32()))
_INCOMPLETE = "\ufffd"  # decoded text of an incomplete character


class SplitAnswer(NamedTuple):
    """An answer, split into its reasoning and the text after it.

    Attributes:
        text: The text after the reasoning. None: the answer ended within its reasoning.
        reasoning: The text of the reasoning. None: there is none, or only white space.
        tokens: The number of reasoning tokens.
    """

    text: str | None
    reasoning: str | None
    tokens: int


class StoredAnswer(NamedTuple):
    """The tokens of a stored answer, and facts that help to find its reasoning.

    Attributes:
        ids: Its token ids.
        limit: The number of characters of its text to keep, if a stop string ended it. None: all.
        opening: Whether its prompt opened the reasoning: NO_MARKER, OPEN or CLOSED.
        ended: True if the last token is the EOS or stop token that ended the answer.
    """

    ids: list[int]
    limit: int | None
    opening: int
    ended: bool = False


def split_reasoning(
    answers: Sequence[StoredAnswer], reasoning: Reasoning, detokenizer: Detokenizer
) -> list[SplitAnswer]:
    """Split answers into their reasoning and the text after it.

    Args:
        answers: The answers.
        reasoning: How the model marks reasoning.
        detokenizer: Converts tokens to text.
    """
    if reasoning.tokens is None:
        return _split_by_text(answers, reasoning, detokenizer)
    splits, inside, behind = [_split(answer, reasoning) for answer in answers], [], list[Sequence[int]]()
    for (ids, *_), (start, end, first, _) in zip(answers, splits, strict=True):
        inside.append(_messages(ids[start:end], reasoning.tokens))
        behind.append(ids[len(ids) if first is None else first :])
    texts = iter(detokenizer.decode_batch([*chain.from_iterable(inside), *behind]))
    thoughts = ["\n".join(islice(texts, len(messages))) for messages in inside]
    told = [_split_text(*one, reasoning) for one in zip(splits, thoughts, texts, strict=True)]
    for number, answer in enumerate(answers):
        if answer.limit is not None:
            told[number] = _split_stopped_answer(answer, splits[number], reasoning, detokenizer)
    return told


def _messages(ids: list[int], marks: ReasoningTokens) -> list[list[int]]:
    # A message of the reasoning ends at the first end token, and the next one begins after the last token of
    # its header
    found, at = [], 0
    while marks.answer and (end := find(ids, marks.end[:1], at)) >= 0:
        found.append(ids[at:end])
        behind = find(ids, marks.answer[-1:], end)
        at = len(ids) if behind < 0 else behind + 1
    return [*found, ids[at:]]


def _split(answer: StoredAnswer, reasoning: Reasoning) -> ReasoningSpan:
    marks = reasoning.tokens_after(answer.opening)
    if marks is None:
        return NO_REASONING
    found = locate_reasoning(answer.ids, marks)
    # The token that ended an answer within its reasoning is not a part of the reasoning
    return locate_reasoning(answer.ids[:-1], marks) if found.answer is None and answer.ended else found


def _split_text(found: ReasoningSpan, inside: str, behind: str, reasoning: Reasoning) -> SplitAnswer:
    text = None if found.answer is None else _answer(behind, reasoning) if found.reasons else behind
    return SplitAnswer(text, (inside.strip() or None) if found.reasons else None, found.end - found.start)


def _answer(text: str, reasoning: Reasoning) -> str:
    # A constrained answer always has exactly this gap before it, so its own white space is kept
    gap = reasoning.gap
    return text[len(gap) :] if text.startswith(gap) else text.lstrip()


def _split_stopped_answer(
    answer: StoredAnswer, found: ReasoningSpan, reasoning: Reasoning, detokenizer: Detokenizer
) -> SplitAnswer:
    # The limit of a stop string counts the characters of all tokens
    first = len(answer.ids) if found.answer is None else found.answer
    before = [answer.ids[: found.start], answer.ids[: found.end], answer.ids[:first], answer.ids]
    start, end, behind, whole = detokenizer.decode_batch([*before])
    text = whole[: answer.limit]
    told = _split_text(found, text[len(start) : len(end)], text[len(behind) :], reasoning)
    return told._replace(text=None) if found.reasons and len(text) < len(end) else told


def _split_by_text(
    answers: Sequence[StoredAnswer], reasoning: Reasoning, detokenizer: Detokenizer
) -> list[SplitAnswer]:
    # The marks are ordinary text, so a token may contain a mark and adjacent text
    texts = detokenizer.decode_batch([answer.ids for answer in answers])
    places = [
        _reasoning_range(text[: answer.limit], reasoning) for text, answer in zip(texts, answers, strict=True)
    ]
    inside = [number for number, place in enumerate(places) if place is not None]
    ids = [answers[number].ids for number in inside]
    starts, ends = (
        _count_tokens(ids, [place[at] for place in places if place is not None], detokenizer) for at in (0, 1)
    )
    tokens = {number: end - start for number, start, end in zip(inside, starts, ends, strict=True)}
    return [
        _split_at_chars(text[: answer.limit], place, tokens.get(number, 0), len(reasoning.end))
        for number, (text, answer, place) in enumerate(zip(texts, answers, places, strict=True))
    ]


def _reasoning_range(text: str, reasoning: Reasoning) -> tuple[int, int] | None:
    start = len(text) - len(text.lstrip()) + len(reasoning.begin)
    if not text.startswith(reasoning.begin, start - len(reasoning.begin)):
        return None
    end = text.find(reasoning.end, start)
    return start, len(text) if end < 0 else end


def _split_at_chars(text: str, place: tuple[int, int] | None, tokens: int, mark: int) -> SplitAnswer:
    if place is None:
        return SplitAnswer(text, None, 0)
    start, end = place
    behind = text[end + mark :].lstrip() if end < len(text) else None
    return SplitAnswer(behind, text[start:end].strip() or None, tokens)


def _count_tokens(rows: list[list[int]], chars: list[int], detokenizer: Detokenizer) -> list[int]:
    # Binary search for all rows at once
    low, high = [0] * len(rows), [len(row) for row in rows]
    while any(a < b for a, b in zip(low, high, strict=True)):
        half = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        texts = detokenizer.decode_batch([row[:end] for row, end in zip(rows, half, strict=True)])
        for number, (text, wanted) in enumerate(zip(texts, chars, strict=True)):
            if low[number] == high[number]:
                continue
            if len(text.rstrip(_INCOMPLETE)) >= wanted:
                high[number] = half[number]
            else:
                low[number] = half[number] + 1
    return low
