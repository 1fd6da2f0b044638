"""Rows: each is its columns, or the error that it became."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchinfer.core.request import ErrorClass, RowError

Values = dict[str, Any]
MESSAGE_BYTES = 2048  # an error message is never longer


class RowProblem(Exception):
    """Raised while one row is prepared; the row becomes an error row, the job goes on."""

    def __init__(self, code: str, message: str, error_class: ErrorClass = "input") -> None:
        super().__init__(message)
        self.error = row_error(code, message, error_class)


def row_error(code: str, message: str, error_class: ErrorClass = "input") -> RowError:
    """A RowError whose message fits in 2 KiB of UTF-8."""
    data = message.encode("utf-8", "replace")
    if len(data) > MESSAGE_BYTES:
        message = data[: MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"
    return RowError(code, error_class, message)


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that stands a second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def kind_of(value: object) -> str:
    """Name the kind of a value in the words of a data file, for messages that may not show the value itself."""
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
