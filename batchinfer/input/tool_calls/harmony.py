"""Parses the calls of gpt-oss: messages addressed to a function, between the messages of its reasoning.

A message is a header, a marker, the content, and an end token: https://cookbook.openai.com/articles/openai-harmony
Messages are recognised by their tokens, not by their text.
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
    """The interface of a tokenizer that can keep chosen special tokens when it decodes token ids, as Tokenizer does."""

    def decode_shown(self, rows: list[Sequence[int]], shown: frozenset[int]) -> list[str]:
        """Decode several sequences of token ids to texts, without special tokens except those in `shown`."""


class AnswerWithCalls(NamedTuple):
    """An answer whose tool calls were extracted.

    Attributes:
        ids: The token ids of the answer without its calls.
        calls: The calls.
    """

    ids: list[int]
    calls: list[Call]


class _Message(NamedTuple):
    # A message in the tokens of an answer: `content` to `end` are its content, `stop` is after the token that ends it
    start: int
    content: int
    end: int
    stop: int


def without_calls(
    answers: Sequence[list[int]], style: CallStyle, detokenizer: ShowingDetokenizer
) -> list[AnswerWithCalls]:
    """Extract the tool calls from answers of gpt-oss, which write them as messages to functions (the harmony format).

    A message to a function stays in the answer if its content is not a JSON object.

    Args:
        answers: The token ids of each answer.
        style: The harmony style, with the ids of its special tokens.
        detokenizer: Decodes tokens.
    """
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
    # The prompt contains the start of the first message
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
