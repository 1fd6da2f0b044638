"""The labels of a result: its distinct expected values, if they are few enough for a confusion table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from batchinfer.input.constraints.exact_numbers import is_number
from batchinfer.store.accuracy.expected import UNREADABLE
from batchinfer.store.accuracy.grades import to_text
from batchinfer.store.accuracy.normalise import normalise

MOST_LABELS = 50  # maximum labels per field
MOST_FIELDS = 200  # maximum fields with an accuracy of their own
LONGEST_LABEL = 200  # maximum characters of a label
ROWS_PER_LABEL = 2  # minimum average rows per label; unique values are not labels
_REMEMBERED = 1000  # cached normalised texts per field

Field = str | None  # name of a field of an object; None: the whole answer


class Labels:
    """Collects the distinct expected values of one field, to decide if they are labels of a classification.

    Texts that are equal after normalisation (case, white space, punctuation) are the same label.
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
        """Return True if the values are labels: at most 50, each in at least two rows on average."""
        return self.few and self._rows >= ROWS_PER_LABEL * len(self._texts) > 0

    def of(self, value: Any) -> str | None:
        """Return the label that equals a value after normalisation, as spelled first. None: there is none."""
        text = _label_text(value)
        return None if text is None else self._texts.get(self._key(text))

    def _key(self, text: str) -> str:
        if (key := self._keys.get(text)) is None:
            self._keys = self._keys if len(self._keys) < _REMEMBERED else {}
            key = self._keys[text] = normalise(text)
        return key


def _label_text(value: Any) -> str | None:
    text = to_text(value) if isinstance(value, str | bool) or is_number(value) else None
    return text if text is not None and len(text) <= LONGEST_LABEL else None


def fields_of(value: Any) -> Iterator[tuple[Field, Any]]:
    """Yield the name and value of each field of an object. Any other value is yielded with the name None."""
    if isinstance(value, dict):
        yield from value.items()
    else:
        yield None, value


def find_labels(batches: Iterable[list[Any]]) -> dict[Field, Labels]:
    """Find the fields whose expected values are labels of a classification, and return the labels by field.

    Values that are not objects count as the field None. A field is left out if it has too many distinct
    values. At most MOST_FIELDS fields are examined.

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
