"""The calls of tools in answers, as a column of a result."""

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
Splitting = Callable[[Sequence[StoredAnswer], Detokenizer | None], list[SplitAnswer]]


class Calling(NamedTuple):
    """An answer that may call tools. `tools`: those of its row as `known_tools` writes them; None: it has none.
    `whole`: whether it is an answer, and not what is left of one that failed."""

    answer: StoredAnswer
    key: bytes
    tools: str | None
    whole: bool

    @property
    def known(self) -> KnownTools | None:
        return None if self.tools is None else KnownTools.of(self.tools)


def told_calls(
    answers: Sequence[Calling], style: CallStyle, split: Splitting, detokenizer: Detokenizer
) -> tuple[list[SplitAnswer], list[list[Call]]]:
    """Return answers without the calls that they make, and these calls. `split`: tells answers from reasoning."""
    may = [number for number, one in enumerate(answers) if one.whole and (one.tools or style.of_all)]
    if style.name == HARMONY:
        return _of_messages(answers, may, style, split, detokenizer)
    told = split([one.answer for one in answers], None)
    calls: list[list[Call]] = [[] for _ in answers]
    shown = _shown(answers, may, style, split, detokenizer)
    for number in may:
        text = shown.get(number, told[number].text)
        found = None if text is None else FORMATS[style.name](text, answers[number].known)
        if found is not None and found != (text, []):
            calls[number] = found.calls
            told[number] = told[number]._replace(text=_without_tokens(found, style))
    return told, calls


def _of_messages(
    answers: Sequence[Calling],
    may: Sequence[int],
    style: CallStyle,
    split: Splitting,
    detokenizer: Detokenizer,
) -> tuple[list[SplitAnswer], list[list[Call]]]:
    """Tell calls that are messages of their own, before the others are told apart. A stop string counts the characters
    of all messages, and may have cut the call: such an answer is left as it is."""
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


def _shown(
    answers: Sequence[Calling],
    may: Sequence[int],
    style: CallStyle,
    split: Splitting,
    detokenizer: Detokenizer,
) -> dict[int, str | None]:
    """Return the texts of answers with the special tokens that belong to calls, where there are any."""
    tokens = frozenset(token for token, _ in style.shown)
    numbers = [number for number in may if not tokens.isdisjoint(answers[number].answer.ids)]
    if not numbers:
        return {}
    showing = _Showing(detokenizer, tokens)
    found = split(showing.limited([answers[number].answer for number in numbers]), showing)
    return {number: one.text for number, one in zip(numbers, found, strict=True)}


class _Showing:
    """A detokenizer that shows these special tokens."""

    def __init__(self, detokenizer: Detokenizer, shown: frozenset[int]) -> None:
        self._usual, self._shown = detokenizer, shown

    def decode_batch(self, rows: list[Sequence[int]]) -> list[str]:
        return self._usual.decode_shown(rows, self._shown)

    def decode_shown(self, rows: list[Sequence[int]], shown: frozenset[int]) -> list[str]:
        return self._usual.decode_shown(rows, self._shown | shown)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return self._usual.token_texts(ids)

    def limited(self, answers: Sequence[StoredAnswer]) -> list[StoredAnswer]:
        """Return answers whose limits count the characters of these tokens, too. A stop string ends an answer within
        its last tokens, which are text."""
        cut = [number for number, one in enumerate(answers) if one.limit is not None]
        ids: list[Sequence[int]] = [answers[number].ids for number in cut]
        texts = zip(self._usual.decode_batch(ids), self.decode_batch(ids), strict=True)
        found = list(answers)
        for number, (plain, shown) in zip(cut, texts, strict=True):
            limit = (answers[number].limit or 0) + len(shown) - len(plain)
            found[number] = answers[number]._replace(limit=limit)
        return found


def _without_tokens(found: FoundCalls, style: CallStyle) -> str | None:
    """Return what is left of an answer without special tokens, as every other answer is."""
    text = found.text or ""
    for _, shown in style.shown:
        text = text.replace(shown, "")
    return text.strip() or None


def call_column(answers: Sequence[Calling], calls: Sequence[Sequence[Call]], style: CallStyle) -> pa.Array:
    """Return the column: null for what is no answer, and an empty list for an answer without calls."""
    return pa.array(
        [
            [{"id": _id(one.key, at, style), **call._asdict()} for at, call in enumerate(made)]
            if one.whole
            else None
            for one, made in zip(answers, calls, strict=True)
        ],
        CALLS_FIELD.type,
    )


def _id(key: bytes, number: int, style: CallStyle) -> str:
    """Return the id of a call: of the same work it is always the same."""
    digest = hashlib.sha256(key + f"call {number}".encode()).hexdigest()
    length = _ID_LENGTHS.get(style.name)
    return digest[:length] if length is not None else _PREFIX + digest[:_LENGTH]


def openai_calls(calls: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return calls as OpenAI's API has them."""
    return [
        {
            "id": one["id"],
            "type": "function",
            "function": {"name": one["name"], "arguments": one["arguments"]},
        }
        for one in calls or ()
    ]
