"""How near an answer is to the value that is expected: exactly right, right but for its spelling, or wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, time
from decimal import Decimal
from enum import IntEnum
from typing import Any

from batchinfer.store.accuracy.normalised import normalised
from batchinfer.store.columns.answer_check import parsed_answer

Text = Callable[[str], str]
_NUMBER = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})(e[+-]?\d{1,4})?")


class Grade(IntEnum):
    """A grade of an answer; a better one is larger."""

    WRONG = 0
    NORMALISED = 1  # right once both are normalised
    EXACT = 2


def text_grade(expected: Any, answer: str) -> Grade:
    """Grade an answer that is a text. A number is also right, once normalised, if the answer reads as that number."""
    wanted = written(expected)
    if wanted == answer:
        return Grade.EXACT
    near = normalised(answer)
    right = near == normalised(wanted) or (is_number(expected) and _reads_as(near, expected))
    return Grade.NORMALISED if right else Grade.WRONG


def written(value: Any) -> str:
    """Return a value as a text: numbers and truth values as JSON writes them, but whole numbers without a point."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.isoformat() if isinstance(value, date | time) else str(value)


def value_grade(expected: Any, answer: Any) -> Grade:
    """Grade a JSON value, or a field of one. Only the texts in it are normalised."""
    if _same(expected, answer, str):
        return Grade.EXACT
    return Grade.NORMALISED if _same(expected, answer, normalised) else Grade.WRONG


def json_answer(text: str | None) -> Any:
    """Return the value of an answer that is JSON; None where it is none."""
    try:
        return None if text is None else parsed_answer(text)
    except (ValueError, RecursionError):
        return None


def _same(expected: Any, answer: Any, spelled: Text) -> bool:
    """Whether both say the same. A field that is null and one that is missing are alike."""
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
    return isinstance(answer, str) and spelled(written(expected)) == spelled(answer)


def _equal(expected: Any, answer: Any) -> bool:
    """Whether two numbers are equal; a float stands for the shortest decimal that reads as it."""
    return bool(_exactly(expected) == _exactly(answer))


def _exactly(number: Any) -> Any:
    return Decimal(repr(number)) if isinstance(number, float) else number


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _reads_as(text: str, number: Any) -> bool:
    return _NUMBER.fullmatch(text) is not None and _equal(number, Decimal(text))
