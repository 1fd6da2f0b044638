"""The work keys of a store that have an answer, as numbers that are quickly compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.filesystem.durable import storage

KEY_WORDS = 4  # of eight bytes
Words = NDArray[np.uint64]


def answered_keys(part: Path, retry_errors: bool, words: int) -> Words:
    """Return the first `words` words of each key of a part, (n, words). `retry_errors`: an error that is marked
    retryable counts as no answer. Raises StorageError."""
    names = ["key", "error_code", "retryable"] if retry_errors else ["key"]
    with storage(part, "read"), pq.ParquetFile(part, page_checksum_verification=True) as file:
        table = file.read(names)
    if retry_errors:
        again = pc.and_(pc.is_valid(table["error_code"]), pc.fill_null(table["retryable"], False))
        table = table.filter(pc.invert(again))
    return key_words(table["key"], words)


def key_words(keys: Any, words: int) -> Words:
    """Return the first `words` words of each key of a chunked array of 32-byte values, (n, words)."""
    found = [
        np.frombuffer(chunk.buffers()[1], np.uint64).reshape(-1, KEY_WORDS)[
            chunk.offset : chunk.offset + len(chunk), :words
        ]
        for chunk in keys.chunks
    ]
    return np.concatenate([np.empty((0, words), np.uint64), *found])
