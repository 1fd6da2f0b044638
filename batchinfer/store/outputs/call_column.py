"""The column of tool calls in a result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from batchinfer.core.tool_calls import Call, CallStyle, FoundCalls
from batchinfer.input.tool_calls.formats import FORMATS, HARMONY
from batchinfer.input.tool_calls.harmony import without_calls
from batchinfer.input.tool_calls.known_tools import KnownTools
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.outputs.reasoning_columns import SplitAnswer, StoredAnswer

CALLS_FIELD = pa.field(
    "tool_calls",
    pa.list_(pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])),
)
# Mistral's templates print an id only if it has 9 letters and digits
_ID_LENGTHS = {"mistral": 9}
_PREFIX, _LENGTH = "call_", 24
SplitFunction = Callable[[Sequence[StoredAnswer], Detokenizer | None], list[SplitAnswer]]


class CallingAnswer(NamedTuple):
    """A stored answer that may contain tool calls.

    Attributes:
        answer: The tokens of the answer.
        key: Its work key.
        tools: The tools of its row, as JSON written by `known_tools`. None: the row has no tools.
        answered: False if the row is an error whose text is kept.
    """

    answer: StoredAnswer
    key: bytes
    tools: str | None
    answered: bool

    @property
    def known(self) -> KnownTools | None:
        """Return the parsed tools of the answer's row, or None if it has no tools."""
        return None if self.tools is None else KnownTools.of(self.tools)


def split_calls(
    answers: Sequence[CallingAnswer], style: CallStyle, split: SplitFunction, detokenizer: Detokenizer
) -> tuple[list[SplitAnswer], list[list[Call]]]:
    """Remove the tool calls from the texts of answers, and return texts and calls.

    Args:
        answers: The answers.
        style: How the model writes calls.
        split: Splits answers into reasoning and the text after it.
        detokenizer: Converts tokens to text.

    Returns:
        The answers without calls, and for each answer the list of its calls.
    """
    may = [number for number, one in enumerate(answers) if one.answered and (one.tools or style.of_all)]
    if style.name == HARMONY:
        return _split_messages(answers, may, style, split, detokenizer)
    told = split([one.answer for one in answers], None)
    calls: list[list[Call]] = [[] for _ in answers]
    shown = _texts_with_tokens(answers, may, style, split, detokenizer)
    for number in may:
        text = shown.get(number, told[number].text)
        found = None if text is None else FORMATS[style.name](text, answers[number].known)
        if found is not None and found != (text, []):
            calls[number] = found.calls
            told[number] = told[number]._replace(text=_without_tokens(found, style))
    return told, calls


def _split_messages(
    answers: Sequence[CallingAnswer],
    may: Sequence[int],
    style: CallStyle,
    split: SplitFunction,
    detokenizer: Detokenizer,
) -> tuple[list[SplitAnswer], list[list[Call]]]:
    # With separate messages for calls, they are removed before reasoning is split off. An answer that a stop
    # string ended is not changed: its limit counts the characters of all messages, and the call may be truncated
    # off
    stored = [one.answer for one in answers]
    calls: list[list[Call]] = [[] for _ in answers]
    may = [number for number in may if stored[number].limit is None]
    found = without_calls([stored[number].ids for number in may], style, detokenizer)
    for number, (ids, made) in zip(may, found, strict=True):
        stored[number], calls[number] = stored[number]._replace(ids=ids), made
    told = split(stored, None)
    for number in may:
        if calls[number] and not told[number].text:
            told[number] = told[number]._replace(text=None)
    return told, calls


def _texts_with_tokens(
    answers: Sequence[CallingAnswer],
    may: Sequence[int],
    style: CallStyle,
    split: SplitFunction,
    detokenizer: Detokenizer,
) -> dict[int, str | None]:
    tokens = frozenset(token for token, _ in style.shown)
    numbers = [number for number in may if not tokens.isdisjoint(answers[number].answer.ids)]
    if not numbers:
        return {}
    showing = _ShowingDetokenizer(detokenizer, tokens)
    found = split(showing.limited([answers[number].answer for number in numbers]), showing)
    return {number: one.text for number, one in zip(numbers, found, strict=True)}


class _ShowingDetokenizer:
    def __init__(self, detokenizer: Detokenizer, shown: frozenset[int]) -> None:
        self._usual, self._shown = detokenizer, shown

    def decode_batch(self, rows: list[Sequence[int]]) -> list[str]:
        return self._usual.decode_shown(rows, self._shown)

    def decode_shown(self, rows: list[Sequence[int]], shown: frozenset[int]) -> list[str]:
        return self._usual.decode_shown(rows, self._shown | shown)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return self._usual.token_texts(ids)

    def limited(self, answers: Sequence[StoredAnswer]) -> list[StoredAnswer]:
        # Limits then also count the characters of the special tokens shown here. A stop string ends an answer
        # within its last tokens, which are ordinary text
        limited = [number for number, one in enumerate(answers) if one.limit is not None]
        ids: list[Sequence[int]] = [answers[number].ids for number in limited]
        texts = zip(self._usual.decode_batch(ids), self.decode_batch(ids), strict=True)
        found = list(answers)
        for number, (plain, shown) in zip(limited, texts, strict=True):
            limit = (answers[number].limit or 0) + len(shown) - len(plain)
            found[number] = answers[number]._replace(limit=limit)
        return found


def _without_tokens(found: FoundCalls, style: CallStyle) -> str | None:
    text = found.text or ""
    for _, shown in style.shown:
        text = text.replace(shown, "")
    return text.strip() or None


def call_column(
    answers: Sequence[CallingAnswer], calls: Sequence[Sequence[Call]], style: CallStyle
) -> pa.Array:
    """Return the result column of tool calls.

    It is null for an error row, and an empty list for an answer without calls.

    Args:
        answers: The answers.
        calls: For each answer the list of its calls.
        style: How the model writes calls. It determines the length of their ids.
    """
    return pa.array(
        [
            [{"id": _id(one.key, at, style), **call._asdict()} for at, call in enumerate(made)]
            if one.answered
            else None
            for one, made in zip(answers, calls, strict=True)
        ],
        CALLS_FIELD.type,
    )


def _id(key: bytes, number: int, style: CallStyle) -> str:
    digest = hashlib.sha256(key + f"call {number}".encode()).hexdigest()
    length = _ID_LENGTHS.get(style.name)
    return digest[:length] if length is not None else _PREFIX + digest[:_LENGTH]


def openai_calls(calls: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tool calls of a result row in the format of OpenAI's API. None becomes an empty list."""
    return [
        {
            "id": one["id"],
            "type": "function",
            "function": {"name": one["name"], "arguments": one["arguments"]},
        }
        for one in calls or ()
    ]
