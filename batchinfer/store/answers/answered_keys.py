"""Reads the work keys that have an answer, as numbers that are fast to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.filesystem.durable import storage

KEY_WORDS = 4  # 64-bit words per key
Words = NDArray[np.uint64]


def answered_keys(part: Path, retry_errors: bool, words: int) -> Words:
    """Return the first `words` 64-bit words of each key in a part, with shape (n, words).

    Args:
        part: The part.
        retry_errors: Treat retryable errors as missing answers.
        words: The number of words.

    Raises:
        StorageError: The part cannot be read.
    """
    names = ["key", "error_code", "retryable"] if retry_errors else ["key"]
    with storage(part, "read"), pq.ParquetFile(part, page_checksum_verification=True) as file:
        table = file.read(names)
    if retry_errors:
        again = pc.and_(pc.is_valid(table["error_code"]), pc.fill_null(table["retryable"], False))
        table = table.filter(pc.invert(again))
    return key_words(table["key"], words)


def key_words(keys: Any, words: int) -> Words:
    """Return the first `words` 64-bit words of each 32-byte key in a chunked array, with shape (n, words)."""
    found = [
        np.frombuffer(chunk.buffers()[1], np.uint64).reshape(-1, KEY_WORDS)[
            chunk.offset : chunk.offset + len(chunk), :words
        ]
        for chunk in keys.chunks
    ]
    return np.concatenate([np.empty((0, words), np.uint64), *found])
