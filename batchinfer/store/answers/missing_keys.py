"""Finds work keys without a stored answer while rows are read, long before there is a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from batchinfer.filesystem.durable import storage
from batchinfer.store.answers.stored_keys import StoredKeys, key_starts

_BYTES = 32  # bytes per key


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
        self._stored = StoredKeys(parts, retry_errors)

    @property
    def has_enough(self) -> bool:
        """Return True if the maximum number of missing keys was counted."""
        return len(self._found) >= self._most

    def add(self, keys: bytes) -> None:
        """Look up concatenated work keys of 32 bytes each, and count those without a stored answer.

        A missing key that begins like a stored key is not counted. The plan finds it later.
        """
        starts = np.unique(key_starts(keys))
        self._found.update(starts[~self._stored.has(starts)][: self._most].tolist())


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
