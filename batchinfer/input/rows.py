"""Rows: the values of the columns, or an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchinfer.core.request import ErrorClass, RowError

Values = dict[str, Any]
MESSAGE_BYTES = 2048  # maximum length of an error message in UTF-8


class RowProblem(Exception):
    """Raised if a row of the input is invalid. The row becomes an error row, and the job continues."""

    def __init__(self, code: str, message: str, error_class: ErrorClass = "input") -> None:
        super().__init__(message)
        self.error = row_error(code, message, error_class)


def row_error(code: str, message: str, error_class: ErrorClass = "input") -> RowError:
    """Return a RowError with its message truncated to 2 KiB of UTF-8.

    Args:
        code: The machine-readable cause, such as "bad_json".
        message: The text for users.
        error_class: The class of the error; "input" if the input row is wrong.
    """
    data = message.encode("utf-8", "replace")
    if len(data) > MESSAGE_BYTES:
        message = data[: MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"
    return RowError(code, error_class, message)


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that is equal to an earlier one, or None if all names differ."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def kind_of(value: object) -> str:
    """Return the type of a value in words for messages, such as "a number". Messages must not show the value itself."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return f"a {type(value).__name__}"
