"""The work keys that a store lacks are noticed as soon as a row of theirs is read, long before a plan is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.filesystem.durable import storage
from batchinfer.machine.cpus import usable_cpus
from batchinfer.store.answers.answered_keys import KEY_WORDS, answered_keys

# A key counts by its first eight bytes. Among ten million stored keys one in two million million is taken for another:
# then it is found later, by the plan.
Starts = NDArray[np.uint64]
_BYTES = 32  # of a key
_MOST_THREADS = 4
_NONE = np.empty(0, np.uint64)


class LackingKeys:
    """Counts distinct keys for which a store has no answer, up to as many as somebody wants to know."""

    def __init__(self, parts: Sequence[Path], most: int, retry_errors: bool = False) -> None:
        """parts: the store's. retry_errors: an error that is marked retryable counts as no answer. Raises
        StorageError."""
        self._most, self._found = most, set[int]()
        self._stored = _stored(parts, retry_errors)

    @property
    def enough(self) -> bool:
        """Whether as many were found."""
        return len(self._found) >= self._most

    def look(self, keys: bytes) -> None:
        """Take keys, 32 bytes each."""
        starts = np.unique(np.frombuffer(keys, np.uint64)[::KEY_WORDS])
        # np.isin is 30,000 times slower beside 10 million keys
        places = np.searchsorted(self._stored, starts)
        beside = self._stored[np.minimum(places, len(self._stored) - 1)] if len(self._stored) else ~starts
        self._found.update(starts[beside != starts][: self._most].tolist())


def _stored(parts: Sequence[Path], retry_errors: bool) -> Starts:
    """Return the sorted beginnings of all keys that have an answer: 10 million take 80 MB, and 0.3 s to sort."""
    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cpus()), "stored keys") as pool:
        found = pool.map(lambda part: answered_keys(part, retry_errors, 1)[:, 0], parts)
        return np.sort(np.concatenate([_NONE, *found]))


def key_batches(parts: Sequence[Path]) -> Iterator[bytes]:
    """Yield the keys of an index's parts, 32 bytes each. Raises StorageError."""
    for part in parts:
        with storage(part, "read"), pq.ParquetFile(part, page_checksum_verification=True) as file:
            for batch in file.iter_batches(columns=["key"]):
                keys = batch["key"].drop_null()
                yield keys.buffers()[1].to_pybytes()[
                    _BYTES * keys.offset : _BYTES * (keys.offset + len(keys))
                ]
