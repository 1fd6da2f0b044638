"""Reads the work keys that have an answer as arrays of integers, which are fast to compare."""

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
    """Return the first words of all work keys that have an answer in a part of the store: [keys, words].

    A key of 32 bytes is read as four 64-bit words. Fewer words take less memory, and still distinguish nearly
    all keys.

    Args:
        part: The Parquet file of the part.
        retry_errors: Leave out the keys of retryable errors, so that they are computed again.
        words: The number of words to return per key, from 1 to 4.

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
    """Return the first `words` 64-bit words of each 32-byte work key, with shape [keys, words].

    Args:
        keys: A chunked Arrow array of keys.
        words: The number of words per key, from 1 to 4.
    """
    found = [
        np.frombuffer(chunk.buffers()[1], np.uint64).reshape(-1, KEY_WORDS)[
            chunk.offset : chunk.offset + len(chunk), :words
        ]
        for chunk in keys.chunks
    ]
    return np.concatenate([np.empty((0, words), np.uint64), *found])
