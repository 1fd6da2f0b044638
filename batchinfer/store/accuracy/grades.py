"""Grades answers: equal to the expected value, equal after normalisation, or wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, time
from decimal import Decimal
from enum import IntEnum
from typing import Any

from batchinfer.input.constraints.exact_numbers import is_number
from batchinfer.store.accuracy.normalise import normalise
from batchinfer.store.columns.answer_check import parse_answer

Text = Callable[[str], str]
_NUMBER = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})(e[+-]?\d{1,4})?")


class Grade(IntEnum):
    """How well an answer agrees with the expected value. Better grades are larger.

    The grades are WRONG, NORMALISED (equal only after normalisation) and EXACT.
    """

    WRONG = 0
    NORMALISED = 1  # equal after normalisation
    EXACT = 2


def text_grade(expected: Any, answer: str) -> Grade:
    """Grade a text answer against the expected value.

    An expected number also matches any text for the same number, such as 5.0 for 5, with the grade
    NORMALISED.
    """
    wanted = to_text(expected)
    if wanted == answer:
        return Grade.EXACT
    near = normalise(answer)
    right = near == normalise(wanted) or (is_number(expected) and _reads_as(near, expected))
    return Grade.NORMALISED if right else Grade.WRONG


def to_text(value: Any) -> str:
    """Return an expected value as the text that an answer should have.

    A string is unchanged, and dates are in ISO format. Numbers and booleans are as in JSON, but whole floats
    have no decimal point.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.isoformat() if isinstance(value, date | time) else str(value)


def value_grade(expected: Any, answer: Any) -> Grade:
    """Grade a JSON value of an answer against the expected value.

    The grade is NORMALISED if both values are only equal after normalisation of the texts in them.
    """
    if _same(expected, answer, str):
        return Grade.EXACT
    return Grade.NORMALISED if _same(expected, answer, normalise) else Grade.WRONG


def json_answer(text: str | None) -> Any:
    """Return the value of an answer's JSON text, or None if there is no text or it is not valid JSON."""
    try:
        return None if text is None else parse_answer(text)
    except (ValueError, RecursionError):
        return None


def _same(expected: Any, answer: Any, spelled: Text) -> bool:
    if isinstance(expected, str):
        return isinstance(answer, str) and spelled(expected) == spelled(answer)
    if isinstance(expected, dict):
        return isinstance(answer, dict) and all(
            _same(expected.get(name), answer.get(name), spelled) for name in {*expected, *answer}
        )
    if isinstance(expected, list):
        alike = isinstance(answer, list) and len(expected) == len(answer)
        return alike and all(_same(*both, spelled) for both in zip(expected, answer, strict=True))
    if is_number(expected) and is_number(answer):
        return _equal(expected, answer)
    if expected is None or isinstance(expected, bool) or isinstance(answer, bool):
        return expected is answer
    return isinstance(answer, str) and spelled(to_text(expected)) == spelled(answer)


def _equal(expected: Any, answer: Any) -> bool:
    # A float has the value of its shortest decimal representation
    return bool(_as_decimal(expected) == _as_decimal(answer))


def _as_decimal(number: Any) -> Any:
    return Decimal(repr(number)) if isinstance(number, float) else number


def _reads_as(text: str, number: Any) -> bool:
    return _NUMBER.fullmatch(text) is not None and _equal(number, Decimal(text))
