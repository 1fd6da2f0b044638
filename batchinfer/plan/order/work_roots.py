"""Numbers the content roots of planned requests, so that only requests with equal roots share prefixes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from batchinfer.core.content_root import USUAL, ContentRoots
from batchinfer.plan.order.block_hashes import Hashes
from batchinfer.plan.order.requests import request_params

_ROWS = 65_536  # rows per read


def _root_number(root: bytes) -> int:
    # Collisions have a probability of about 2⁻⁶⁴ and only worsen the order
    return 0 if root == USUAL else int.from_bytes(blake2b(root, digest_size=8).digest(), "little")


def work_roots(database: Any, roots: ContentRoots) -> Hashes:
    """Return a number per row of the table `work`. Rows with different numbers cannot share cached prefixes.

    The number is 64 bits of a digest of the request's content root: everything except the tokens that determines
    cached values, such as the adapter.

    Args:
        database: A DuckDB connection with the table `work` of all requests.
        roots: Tells which requests may share cached prefixes.
    """
    rows = int(database.execute("SELECT count(*) FROM work").fetchall()[0][0])
    if roots.is_single:
        return np.broadcast_to(np.uint64(0), rows)  # takes no memory
    found, done, numbers = np.empty(rows, np.uint64), 0, dict[bytes, int]()
    query = database.sql("SELECT token_count, params, expected_tokens FROM work ORDER BY rowid")
    for batch in query.to_arrow_reader(_ROWS):
        for count, text, expected in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            root = roots.of(count, request_params(text, expected))
            if root not in numbers:
                numbers[root] = _root_number(root)
            found[done] = numbers[root]
            done += 1
    return found
