"""The result's column `confidence`: the probability of an answer's listed values among all allowed ones."""

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
_INCOMPLETE = "\ufffd"  # decoded text of an incomplete character


def confidence_field(choices: Sequence[str]) -> pa.Field:
    """Return the Arrow field of the result column `confidence`.

    Args:
        choices: The possible answers, if the job lists them: the column is a number. Empty: it is a map from
            the path of a JSON field to a number.
    """
    return pa.field(CONFIDENCE, pa.float64() if choices else _OF_FIELDS)


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """An answer's text with the character positions and log-probabilities of its tokens.

    Attributes:
        text: The text, without reasoning.
        begins: The position of each token's first character. It is negative for tokens before the text, such
            as reasoning.
        ends: The position after each token's last character.
        logprobs: The log-probability of each token relative to all tokens that the constraint allows.
    """

    text: str
    begins: Sequence[int]
    ends: Sequence[int]
    logprobs: Sequence[float]

    @classmethod
    def of(
        cls, text: str, ids: Sequence[int], logprobs: Sequence[float], detokenizer: Detokenizer
    ) -> AnswerTokens:
        """Return the text of an answer with the positions of its generated tokens.

        Args:
            text: The text of the answer, without reasoning.
            ids: All generated tokens, reasoning included. The tokens of the text come last.
            logprobs: The log-probability of each token in `ids`.
            detokenizer: Converts tokens to text.
        """
        whole, ends = _locate_tokens(ids, detokenizer)
        before = max(whole.rfind(text), 0)
        ends = [end - before for end in ends]
        return cls(text, [-before, *ends[:-1]], ends, logprobs)

    def probability(self, start: int, end: int, listed: Sequence[str]) -> float:
        """Return the probability, from 0 to 1, that a value was chosen among all possible values.

        It is the product of the probabilities of the value's tokens, up to the token that rules out all other
        possible values.

        Args:
            start: The position of the value's first character in the answer.
            end: The position after its last character.
            listed: All possible values, as JSON or text.
        """
        decided = start + _deciding_length(self.text[start:end], listed)
        places = zip(self.begins, self.ends, self.logprobs, strict=True)
        own = [p for begin, stop, p in places if (stop > start or begin >= start) and begin < decided]
        return math.exp(math.fsum(own))


def confidence_array(
    answers: Iterator[AnswerTokens | None], choices: Sequence[str], schema: object | None
) -> pa.Array:
    """Return the result column `confidence`: the probability of each answer among the possible answers.

    Args:
        answers: The answer of each row. None: the row's value is null.
        choices: The possible answers. Empty: answers are JSON that matches `schema`.
        schema: The JSON schema of answers. The column is a map with the probability of each field that is an
            enum or boolean.
    """
    if choices:
        found = (None if one is None else one.probability(0, len(one.text), choices) for one in answers)
        return pa.array(list(found), pa.float64())
    fields = ListedFields(schema)
    return pa.array([None if one is None else _of_fields(one, fields) for one in answers], _OF_FIELDS)


def _of_fields(answer: AnswerTokens, fields: ListedFields) -> list[tuple[str, float]]:
    values = fields.of(answer.text)
    return [(one.path, answer.probability(one.start, one.end, one.listed)) for one in values]


def _deciding_length(value: str, listed: Sequence[str]) -> int:
    # One more than the value's length if another value begins with it, because the next character decides
    others = (_common_prefix(value, one) for one in listed if one != value)
    return max(others, default=-1) + 1


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    differ = (at for at, (mine, yours) in enumerate(zip(one, other, strict=False)) if mine != yours)
    return next(differ, min(len(one), len(other)))


def _locate_tokens(ids: Sequence[int], detokenizer: Detokenizer) -> tuple[str, list[int]]:
    (whole,) = detokenizer.decode_batch([ids])
    texts = detokenizer.token_texts(ids)
    for count in (len(ids), len(ids) - 1):  # the text leaves out an EOS token at the end
        own = [*texts[:count], *[""] * (len(ids) - count)]
        if "".join(own) == whole:
            return whole, list(accumulate(map(len, own)))
    # The texts of some tokens depend on others, e.g. parts of a character. Decode each prefix to find where it ends
    beginnings = detokenizer.decode_batch([ids[: at + 1] for at in range(len(ids))])
    return whole, [len(one.rstrip(_INCOMPLETE)) for one in beginnings]
