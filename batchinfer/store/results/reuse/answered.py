"""Finds out if all rows of a kept chunk have stored answers. Such rows need no tokens, since they are not planned.

The check predicts the planner's decision. It errs on one side only: an answered row that is not found is prepared
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.filesystem.duck import connection
from batchinfer.input.prompts.prepared.rows import KEY_TYPE, PreparedPrompts
from batchinfer.store.answers.answered_keys import KEY_WORDS, Words, answered_keys, key_words
from batchinfer.store.results.attempts import IS_INVALID, load_chosen

_BYTES = 32  # bytes of a key
_KEPT = 2  # 64-bit words of a key that are compared


class KeySet:
    """A set of work keys that is compared by their first 16 bytes. Ten million keys take 160 MB."""

    def __init__(self, parts: Sequence[Words]) -> None:
        words = np.concatenate([np.empty((0, _KEPT), np.uint64), *parts])
        order = np.argsort(words[:, 0], kind="stable")
        self._firsts, self._seconds = words[order, 0], words[order, 1]

    def has(self, keys: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return a boolean per work key: True if it is in the set.

        If two keys in the set have the same first 8 bytes, which is improbable, only the first one is found.
        """
        words = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_WORDS)
        if not len(self._firsts):
            return np.zeros(len(words), np.bool_)
        order = np.argsort(words[:, 0])
        places = np.empty(len(words), np.int64)
        # Searching in sorted order is three times as fast
        places[order] = np.searchsorted(self._firsts, words[order, 0])
        places = np.minimum(places, len(self._firsts) - 1)
        return np.asarray(
            (self._firsts[places] == words[:, 0]) & (self._seconds[places] == words[:, 1]), np.bool_
        )


class AnsweredRows:
    """Decides if all rows of a prepared chunk have stored answers, so that they need not be computed.

    An object is called like a function.
    """

    def __init__(self, parts: Sequence[Path], retry_errors: bool, spill: Path) -> None:
        """Prepare to look up work keys in a store. Its keys are read by the first lookup.

        Args:
            parts: The parts of the store.
            retry_errors: True to treat retryable errors as missing answers.
            spill: Folder for temporary files of DuckDB.
        """
        self._parts, self._retry, self._spill = parts, retry_errors, spill
        self._present: KeySet | None = None  # loaded by the first lookup
        self._invalid: KeySet | None = None

    def __call__(self, prompts: PreparedPrompts) -> bool:
        """Return True if the store has an answer for the current attempt of every prepared row.

        Error rows are ignored, as they are never computed. Raises StorageError.
        """
        if self._present is None:
            self._present = KeySet([answered_keys(part, self._retry, _KEPT) for part in self._parts])
        due = np.frombuffer(prompts.keys, KEY_TYPE)
        if prompts.rungs:
            due = self._climbed(due.copy(), prompts)
        return bool(self._present.has(due[prompts.counts > 0]).all())

    def _climbed(self, due: NDArray[np.void], prompts: PreparedPrompts) -> NDArray[np.void]:
        # `due` has the keys of the first attempts, and is changed
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
