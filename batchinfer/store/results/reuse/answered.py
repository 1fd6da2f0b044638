"""Tells whether the rows of a kept chunk need no tokens: their answers are stored, so that no plan has them.

This says what the planner will find, and errs on one side only: a row that it takes for one without an answer is merely
prepared again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.filesystem.duck import connection
from batchinfer.input.prompts.prepared.rows import KEY_TYPE, Prepared
from batchinfer.store.answers.answered_keys import KEY_WORDS, Words, answered_keys, key_words
from batchinfer.store.results.attempts import IS_INVALID, load_chosen

_BYTES = 32  # of a key
_KEPT = 2  # words of a key that are compared: 128 bits


class KeySet:
    """A set of keys, by their first 16 bytes: ten million take 160 MB."""

    def __init__(self, parts: Sequence[Words]) -> None:
        words = np.concatenate([np.empty((0, _KEPT), np.uint64), *parts])
        order = np.argsort(words[:, 0], kind="stable")
        self._firsts, self._seconds = words[order, 0], words[order, 1]

    def has(self, keys: NDArray[np.void]) -> NDArray[np.bool_]:
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
    """Tells whether rows need no tokens, by the parts of a store."""

    def __init__(self, parts: Sequence[Path], retry_errors: bool, spill: Path) -> None:
        """retry_errors: an error that is marked retryable counts as no answer."""
        self._parts, self._retry, self._spill = parts, retry_errors, spill
        self._present: KeySet | None = None  # once somebody asks
        self._invalid: KeySet | None = None

    def __call__(self, prompts: Prepared) -> bool:
        """Return True if each row, apart from error rows, has the answer of the attempt that is due. Raises
        StorageError."""
        if self._present is None:
            self._present = KeySet([answered_keys(part, self._retry, _KEPT) for part in self._parts])
        due = np.frombuffer(prompts.keys, KEY_TYPE)
        if prompts.rungs:
            due = self._climbed(due.copy(), prompts)
        return bool(self._present.has(due[prompts.counts > 0]).all())

    def _climbed(self, due: NDArray[np.void], prompts: Prepared) -> NDArray[np.void]:
        """Return the keys of the attempts that are due. `due`: those of the first ones."""
        if self._invalid is None:
            self._invalid = self._invalid_ones(1 + len(prompts.rungs))
        for rung in prompts.rungs:
            further = self._invalid.has(due) & (rung.params_of >= 0)
            due[further] = np.frombuffer(rung.keys, KEY_TYPE)[further]
        return due

    def _invalid_ones(self, attempts: int) -> KeySet:
        if not self._parts:
            return KeySet([])
        with connection(self._spill) as database:
            load_chosen(database, self._parts, attempts)
            found = database.sql(f"SELECT key FROM chosen WHERE {IS_INVALID}").to_arrow_table()
        return KeySet([key_words(found.column(0).cast(pa.binary(_BYTES)), _KEPT)])
