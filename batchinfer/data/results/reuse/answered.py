"""Tells which rows of a kept index need no tokens: those whose answers the store has, so that no plan has them.

This says what the planner will find, and errs on one side only: a row that it takes for one without an answer is merely
prepared again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.data.kept.rows import SAMPLE_KEYS, Marks, Records, attempt_names
from batchinfer.data.results.attempts import IS_INVALID, load_chosen
from batchinfer.data.storage.duck import connection
from batchinfer.data.store.answered_keys import KEY_WORDS, Words, answered_keys, key_words

_BYTES = 32  # of a key
_KEPT = 2  # words of a key that are compared: 128 bits


class KeySet:
    """A set of keys, by their first 16 bytes: ten million take 160 MB."""

    def __init__(self, parts: Sequence[Words]) -> None:
        words = np.concatenate([np.empty((0, _KEPT), np.uint64), *parts])
        order = np.argsort(words[:, 0], kind="stable")
        self._firsts, self._seconds = words[order, 0], words[order, 1]

    def has(self, keys: NDArray[np.void]) -> Marks:
        """Return which of the keys are in it. Of two keys with equal first 8 bytes only one is found."""
        words = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_WORDS)
        if not len(self._firsts):
            return np.zeros(len(words), np.bool_)
        order = np.argsort(words[:, 0])
        places = np.empty(len(words), np.int64)
        # three times as fast as in any order
        places[order] = np.searchsorted(self._firsts, words[order, 0])
        places = np.minimum(places, len(self._firsts) - 1)
        return np.asarray(
            (self._firsts[places] == words[:, 0]) & (self._seconds[places] == words[:, 1]), np.bool_
        )


class AnsweredRows:
    """Tells of records of rows which need no tokens, by the parts of a store."""

    def __init__(self, parts: Sequence[Path], retry_errors: bool, spill: Path) -> None:
        """retry_errors: an error that is marked retryable counts as no answer."""
        self._parts, self._retry, self._spill = parts, retry_errors, spill
        self._present: KeySet | None = None  # once somebody asks
        self._invalid: KeySet | None = None

    def __call__(self, records: Records, attempts: int) -> Marks:
        """Return which of these rows have the answers of all attempts that are due, and of all samples. Raises
        StorageError."""
        if self._present is None:
            self._present = KeySet([answered_keys(part, self._retry, _KEPT) for part in self._parts])
        due = records["key"].copy()
        if attempts > 1:
            self._climb(due, records, attempts)
        has = self._present.has(due)
        if SAMPLE_KEYS in (records.dtype.names or ()):
            further = np.ascontiguousarray(records[SAMPLE_KEYS]).view("V32").reshape(len(records), -1)
            has &= self._present.has(further.reshape(-1)).reshape(further.shape).all(axis=1)
        return has

    def _climb(self, due: NDArray[np.void], records: Records, attempts: int) -> None:
        """Put the key of the attempt that is due in the place of each row's first."""
        if self._invalid is None:
            self._invalid = self._invalid_ones(attempts)
        for attempt in range(2, attempts + 1):
            key, _, size, _ = attempt_names(attempt)
            further = self._invalid.has(due) & (records[size] > 0)
            due[further] = records[key][further]

    def _invalid_ones(self, attempts: int) -> KeySet:
        if not self._parts:
            return KeySet([])
        with connection(self._spill) as database:
            load_chosen(database, self._parts, attempts)
            found = database.sql(f"SELECT key FROM chosen WHERE {IS_INVALID}").to_arrow_table()
        return KeySet([key_words(found.column(0).cast(pa.binary(_BYTES)), _KEPT)])
