"""Calls as gpt-oss makes them: messages of their own, addressed to a function, between those of its reasoning.

https://cookbook.openai.com/articles/openai-harmony describes the messages: a header, its end, the content, and a token
behind which the next message begins. They are told by their tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from batchinfer.core.tool_calls import Call, CallStyle
from batchinfer.input.tool_calls.json_calls import whole_object

_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]{1,64})(?=[\s<]|$)")


class ShowingDetokenizer(Protocol):
    """Token ids to text, in which chosen special tokens are shown."""

    def decode_shown(self, rows: list[Sequence[int]], shown: frozenset[int]) -> list[str]:
        """Return the text of each row, special tokens left out but for those that are `shown`."""


class AnswerWithCalls(NamedTuple):
    """The tokens of an answer without its calls, and these."""

    ids: list[int]
    calls: list[Call]


class _Message(NamedTuple):
    """Places in the tokens of an answer: a message from `start` to `stop`, whose content lies between the others."""

    start: int
    content: int
    end: int
    stop: int


def without_calls(
    answers: Sequence[list[int]], style: CallStyle, detokenizer: ShowingDetokenizer
) -> list[AnswerWithCalls]:
    """Take the calls out of answers. A message to a function whose content is no JSON object stays."""
    marks = {text: token for token, text in style.shown}
    messages = [list(_messages(ids, marks)) for ids in answers]
    parts: list[Sequence[int]] = [
        part
        for ids, found in zip(answers, messages, strict=True)
        for one in found
        for part in (ids[one.start : one.content], ids[one.content : one.end])
    ]
    texts = iter(detokenizer.decode_shown(parts, frozenset({marks["<|channel|>"]})))
    return [_without(ids, found, texts) for ids, found in zip(answers, messages, strict=True)]


def _without(ids: list[int], messages: Sequence[_Message], texts: Iterator[str]) -> AnswerWithCalls:
    calls: list[Call] = []
    kept: list[int] = []
    start = 0
    for one in messages:
        recipient, arguments = _RECIPIENT.search(next(texts)), whole_object(next(texts))
        if recipient is not None and arguments is not None:
            calls.append(Call(recipient[1], arguments))
            kept += ids[start : one.start]
            start = one.stop
    return AnswerWithCalls(kept + ids[start:], calls)


def _messages(ids: Sequence[int], marks: Mapping[str, int]) -> Iterator[_Message]:
    """Yield the messages of an answer, the first of which its prompt has begun."""
    start, message = marks["<|start|>"], marks["<|message|>"]
    ends = {marks[text] for text in ("<|end|>", "<|call|>", "<|return|>") if text in marks}
    places = [at for at, token in enumerate(ids) if token in ends or token in (start, message)]
    first, content = 0, -1
    for at, following in pairwise([*places, len(ids)]):
        token = ids[at]
        if token == start:
            first, content = at, -1
        elif token == message and content < 0:
            content = at + 1
            ended = following < len(ids) and ids[following] in ends
            yield _Message(first, content, following, following + ended)
        elif token in ends:
            first, content = at + 1, -1
