"""Finds work keys without a stored answer while rows are read, long before there is a plan."""

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

# The first eight bytes of keys. With ten million stored keys, one missing key in two million million looks stored. The
# plan finds it later.
Starts = NDArray[np.uint64]
_BYTES = 32  # bytes per key
_MOST_THREADS = 4
_NONE = np.empty(0, np.uint64)


class MissingKeys:
    """Counts the distinct work keys passed to `add` that have no stored answer.

    Counting stops at a maximum.
    """

    def __init__(self, parts: Sequence[Path], most: int, retry_errors: bool = False) -> None:
        """Read the work keys of all stored answers, which `add` compares with other keys.

        Args:
            parts: The Parquet files of the store's parts.
            most: Number of missing keys at which counting stops.
            retry_errors: Treat retryable errors as missing answers.

        Raises:
            StorageError: A part cannot be read.
        """
        self._most, self._found = most, set[int]()
        self._stored = _stored(parts, retry_errors)

    @property
    def has_enough(self) -> bool:
        """Return True if the maximum number of missing keys was counted."""
        return len(self._found) >= self._most

    def add(self, keys: bytes) -> None:
        """Look up concatenated work keys of 32 bytes each, and count those without a stored answer."""
        starts = np.unique(np.frombuffer(keys, np.uint64)[::KEY_WORDS])
        # np.isin is 30,000 times slower with 10 million stored keys
        places = np.searchsorted(self._stored, starts)
        beside = self._stored[np.minimum(places, len(self._stored) - 1)] if len(self._stored) else ~starts
        self._found.update(starts[beside != starts][: self._most].tolist())


def _stored(parts: Sequence[Path], retry_errors: bool) -> Starts:
    # 10 million keys take 80 MB, and 0.3 s to sort
    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cpus()), "stored keys") as pool:
        found = pool.map(lambda part: answered_keys(part, retry_errors, 1)[:, 0], parts)
        return np.sort(np.concatenate([_NONE, *found]))


def key_batches(parts: Sequence[Path]) -> Iterator[bytes]:
    """Yield the work keys of all requests in parts of the index, as concatenated bytes, 32 per key.

    Args:
        parts: The Parquet files of the index.

    Raises:
        StorageError: A part cannot be read.
    """
    for part in parts:
        with storage(part, "read"), pq.ParquetFile(part, page_checksum_verification=True) as file:
            for batch in file.iter_batches(columns=["key"]):
                keys = batch["key"].drop_null()
                yield keys.buffers()[1].to_pybytes()[
                    _BYTES * keys.offset : _BYTES * (keys.offset + len(keys))
                ]
