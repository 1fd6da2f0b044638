"""The labels of a result: its distinct expected values, if they are few enough for a confusion table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from batchinfer.input.constraints.exact_numbers import is_number
from batchinfer.store.accuracy.expected import UNREADABLE
from batchinfer.store.accuracy.grades import to_text
from batchinfer.store.accuracy.normalise import normalise

MOST_LABELS = 50  # maximum labels per field
MOST_FIELDS = 200  # maximum fields with figures of their own
LONGEST_LABEL = 200  # maximum characters of a label
ROWS_PER_LABEL = 2  # minimum average rows per label; unique values are not labels
_REMEMBERED = 1000  # cached normalised texts per field

Field = str | None  # name of a field of an object; None: the whole answer


class Labels:
    """Collects the distinct expected values of one field, to decide if they are labels of a classification.

    Texts that are equal after normalisation are the same label.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # first spelling by normalised text
        self._keys: dict[str, str] = {}  # normalised text by text
        self._rows = 0
        self.few = True

    def add(self, value: Any) -> None:
        """Add the expected value of a row to the labels."""
        self._rows += 1
        if not self.few:
            return
        text = _label_text(value)
        if text is not None:
            self._texts.setdefault(self._key(text), text)
        self.few = text is not None and len(self._texts) <= MOST_LABELS

    @property
    def are_useful(self) -> bool:
        """Return True if the field has labels, at most 50, and on average at least two rows per label."""
        return self.few and self._rows >= ROWS_PER_LABEL * len(self._texts) > 0

    def of(self, value: Any) -> str | None:
        """Return the label that a value is equal to, in its first spelling, or None if it is not a label."""
        text = _label_text(value)
        return None if text is None else self._texts.get(self._key(text))

    def _key(self, text: str) -> str:
        if (key := self._keys.get(text)) is None:
            self._keys = self._keys if len(self._keys) < _REMEMBERED else {}
            key = self._keys[text] = normalise(text)
        return key


def _label_text(value: Any) -> str | None:
    """Return a text, boolean or number as the text of a label, or None for other and for long values."""
    text = to_text(value) if isinstance(value, str | bool) or is_number(value) else None
    return text if text is not None and len(text) <= LONGEST_LABEL else None


def fields_of(value: Any) -> Iterator[tuple[Field, Any]]:
    """Yield the names and values of an object's fields. A value that is not an object has the name None."""
    if isinstance(value, dict):
        yield from value.items()
    else:
        yield None, value


def find_labels(batches: Iterable[list[Any]]) -> dict[Field, Labels]:
    """Find the labels of each field in the expected values of all rows, for at most MOST_FIELDS fields.

    Only fields with few labels are returned. A value that is not an object counts as the field None. If no
    value is an object, reading stops once there are too many labels.

    Args:
        batches: The expected values of consecutive rows, in batches.
    """
    found: dict[Field, Labels] = {}
    for values in batches:
        for value in values:
            if value is not None and value is not UNREADABLE:
                _note(found, value)
        if found.keys() == {None} and not found[None].few:
            break
    return {field: labels for field, labels in found.items() if labels.are_useful}


def _note(found: dict[Field, Labels], value: Any) -> None:
    for field, one in fields_of(value):
        if field in found or len(found) < MOST_FIELDS:
            found.setdefault(field, Labels()).add(one)
