"""The labels of a result: the different values that are expected, where they are few enough for a confusion table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from batchinfer.store.accuracy.expected import UNREADABLE
from batchinfer.store.accuracy.grades import is_number, written
from batchinfer.store.accuracy.normalised import normalised

MOST_LABELS = 50  # different ones, of one field
MOST_FIELDS = 200  # whose figures are told apart
LONGEST_LABEL = 200  # characters: what is longer is a text and no label
ROWS_PER_LABEL = 2  # on average: where no value comes again there are no labels
_REMEMBERED = 1000  # texts of a field that need not be normalised again

Field = str | None  # a field of an object; None: the whole answer


class Labels:
    """The labels of one field. Texts that are equal once they are normalised are one label."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # as they were first written, by normalised text
        self._keys: dict[str, str] = {}  # normalised texts, by text
        self._rows = 0
        self.few = True

    def add(self, value: Any) -> None:
        """Note the value that a row expects."""
        self._rows += 1
        if not self.few:
            return
        text = _label_text(value)
        if text is not None:
            self._texts.setdefault(self._key(text), text)
        self.few = text is not None and len(self._texts) <= MOST_LABELS

    @property
    def there(self) -> bool:
        """Whether there are labels, and few."""
        return self.few and self._rows >= ROWS_PER_LABEL * len(self._texts) > 0

    def of(self, value: Any) -> str | None:
        """Return the label that a value is; None: it is none of them."""
        text = _label_text(value)
        return None if text is None else self._texts.get(self._key(text))

    def _key(self, text: str) -> str:
        if (key := self._keys.get(text)) is None:
            self._keys = self._keys if len(self._keys) < _REMEMBERED else {}
            key = self._keys[text] = normalised(text)
        return key


def _label_text(value: Any) -> str | None:
    """Return a value as a label; None for what cannot be one."""
    text = written(value) if isinstance(value, str | bool) or is_number(value) else None
    return text if text is not None and len(text) <= LONGEST_LABEL else None


def fields_of(value: Any) -> Iterator[tuple[Field, Any]]:
    """Yield the fields of an expected value; one that is no object is a whole answer."""
    if isinstance(value, dict):
        yield from value.items()
    else:
        yield None, value


def find_labels(batches: Iterable[list[Any]]) -> dict[Field, Labels]:
    """Find the labels of each field, of MOST_FIELDS at most, in the expected values of all rows. Of values that are no
    objects no more are looked at than it takes to see that they are not few."""
    found: dict[Field, Labels] = {}
    for values in batches:
        for value in values:
            if value is not None and value is not UNREADABLE:
                _note(found, value)
        if found.keys() == {None} and not found[None].few:
            break
    return {field: labels for field, labels in found.items() if labels.there}


def _note(found: dict[Field, Labels], value: Any) -> None:
    for field, one in fields_of(value):
        if field in found or len(found) < MOST_FIELDS:
            found.setdefault(field, Labels()).add(one)
