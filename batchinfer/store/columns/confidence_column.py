"""The result's column `confidence`: how probable the listed values of an answer are among those that were allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa

from batchinfer.store.columns.field_values import ListedFields
from batchinfer.store.columns.logprob_column import Detokenizer

CONFIDENCE = "confidence"
_OF_FIELDS = pa.map_(pa.string(), pa.float64())
_INCOMPLETE = "\ufffd"  # how a part of a character is decoded


def confidence_field(choices: Sequence[str]) -> pa.Field:
    """Return the column: a number where each answer is one of the choices, and else a map from fields to numbers."""
    return pa.field(CONFIDENCE, pa.float64() if choices else _OF_FIELDS)


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """An answer: its text, and where in it each token begins and ends. What comes before it, such as reasoning, is at
    places below 0."""

    text: str
    begins: Sequence[int]
    ends: Sequence[int]
    logprobs: Sequence[float]  # of each token, among the allowed ones

    @classmethod
    def of(
        cls, text: str, ids: Sequence[int], logprobs: Sequence[float], detokenizer: Detokenizer
    ) -> AnswerTokens:
        """Find the places of tokens; `ids` are all that were generated, and end with those of the text."""
        whole, ends = _placed(ids, detokenizer)
        before = max(whole.rfind(text), 0)
        ends = [end - before for end in ends]
        return cls(text, [-before, *ends[:-1]], ends, logprobs)

    def probability(self, start: int, end: int, listed: Sequence[str]) -> float:
        """Return the probability of the value at [start, end): the product over its tokens, up to the one with which no
        other of the `listed` values was possible any more."""
        decided = start + _decided(self.text[start:end], listed)
        places = zip(self.begins, self.ends, self.logprobs, strict=True)
        own = [p for begin, stop, p in places if (stop > start or begin >= start) and begin < decided]
        return math.exp(math.fsum(own))


def confidences(
    answers: Iterator[AnswerTokens | None], choices: Sequence[str], schema: object | None
) -> pa.Array:
    """Return the column; null where there is no answer. `choices`: what each answer is one of; none: answers are valid
    under `schema`."""
    if choices:
        found = (None if one is None else one.probability(0, len(one.text), choices) for one in answers)
        return pa.array(list(found), pa.float64())
    fields = ListedFields(schema)
    return pa.array([None if one is None else _of_fields(one, fields) for one in answers], _OF_FIELDS)


def _of_fields(answer: AnswerTokens, fields: ListedFields) -> list[tuple[str, float]]:
    values = fields.of(answer.text)
    return [(one.path, answer.probability(one.start, one.end, one.listed)) for one in values]


def _decided(value: str, listed: Sequence[str]) -> int:
    """Return how many characters of the value tell it from all others; one more than it has where another one begins
    with it, because what follows decides."""
    others = (_in_common(value, one) for one in listed if one != value)
    return max(others, default=-1) + 1


def _in_common(one: str, other: str) -> int:
    """Return how many characters at their beginning the two have in common."""
    differ = (at for at, (mine, yours) in enumerate(zip(one, other, strict=False)) if mine != yours)
    return next(differ, min(len(one), len(other)))


def _placed(ids: Sequence[int], detokenizer: Detokenizer) -> tuple[str, list[int]]:
    """Return the text of these tokens, and where in it each of them ends."""
    (whole,) = detokenizer.decode_batch([ids])
    texts = detokenizer.token_texts(ids)
    for count in (len(ids), len(ids) - 1):  # without what ends the answer, which texts leave out
        own = [*texts[:count], *[""] * (len(ids) - count)]
        if "".join(own) == whole:
            return whole, list(accumulate(map(len, own)))
    # Tokens whose texts depend on others', such as parts of a character: the text of each beginning says where it ends
    beginnings = detokenizer.decode_batch([ids[: at + 1] for at in range(len(ids))])
    return whole, [len(one.rstrip(_INCOMPLETE)) for one in beginnings]
