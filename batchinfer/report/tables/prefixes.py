"""The tree of prefixes that requests share, found from the order in which they are handed to the engine.

Requests that share a prefix follow one another, and each says how much it shares with the next. A node is a prefix of
two or more requests in a row; its parent is the longest shorter one that they share with others.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import Request
from batchinfer.report.tables.columns import PREFIXES, SCHEMAS
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.row_keys import KEY_BYTES, hexadecimal
from batchinfer.report.tables.spool import Spool

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Columns = Mapping[str, Floats]
NONE = -1


class PrefixTree:
    """`add` all requests in order; then `close` it. 56 bytes a node, of which there are fewer than requests."""

    def __init__(self) -> None:
        self._open: list[int] = []  # nodes whose requests still come, from the root down
        self._parents, self._depths, self._users = array("q"), array("q"), array("q")
        self._keys = bytearray()  # of the first request of each, one behind the other
        self._shared = 0  # tokens that the request before shares with the next one

    def add(self, request: Request) -> int | None:
        """The deepest node of this request; None: it shares nothing."""
        most = max(0, len(request.prompt) - 1)  # the last token always runs
        before = min(self._shared, most)
        self._shared = min(request.shares_next, most)
        self._leave(before)
        if self._shared > self._depth():
            self._enter(self._shared, request.key)
        if not self._open:
            return None
        self._users[self._open[-1]] += 1
        return self._open[-1]

    def close(self) -> PrefixNodes:
        """All requests were added."""
        self._leave(0)
        numbers = (np.array(values, np.int64) for values in (self._parents, self._depths, self._users))
        keys = np.frombuffer(self._keys, np.uint8).reshape(-1, KEY_BYTES)
        return PrefixNodes(keys, *numbers)

    def _depth(self) -> int:
        return self._depths[self._open[-1]] if self._open else 0

    def _enter(self, depth: int, key: bytes) -> int:
        node = len(self._parents)
        self._parents.append(NONE)
        self._depths.append(depth)
        self._users.append(0)
        self._keys += key
        self._open.append(node)
        return node

    def _leave(self, depth: int) -> None:
        """Close the nodes that are deeper than what the next request shares with the last one."""
        while self._depth() > depth:
            node = self._open.pop()
            if self._depth() < depth:
                if self._users[node] == 1:  # the next one shares less of it than was thought
                    self._depths[node] = depth
                    self._open.append(node)
                    return
                self._enter(depth, bytes(self._keys[node * KEY_BYTES : (node + 1) * KEY_BYTES]))
            if self._open:
                self._parents[node] = self._open[-1]
                self._users[self._open[-1]] += self._users[node]


class PrefixNodes:
    """The closed tree. Once `count` was told of all requests, `shared` says what prefixes cost each of them."""

    def __init__(self, keys: NDArray[np.uint8], parents: Ints, depths: Ints, users: Ints) -> None:
        self._keys, self._parents, self._depths, self._users = keys, parents, depths, users
        above = np.where(parents == NONE, 0, depths[parents] if len(depths) else 0)
        self._above = np.asarray(above, np.int64)  # depth of the parent
        self._finished, self._cached, self._seconds = (np.zeros(len(keys)) for _ in range(3))
        self._each: Floats | None = None

    def count(self, requests: Columns, seconds: Floats) -> None:
        """`seconds`: what the prompts took that these requests ran, without what the cache held."""
        self._each = None
        cached, node = requests["cached_tokens"], requests["prefix"].astype(np.int64)
        price = _per_token(requests, seconds)
        while (some := node != NONE).any():
            node, cached, price = node[some], cached[some], price[some]
            found = np.clip(cached - self._above[node], 0, self._depths[node] - self._above[node])
            ran = self._depths[node] - self._above[node] - found
            np.add.at(self._finished, node, 1)
            np.add.at(self._cached, node, found)
            np.add.at(self._seconds, node, price * ran)
            node = self._parents[node]

    def shared(self, requests: Columns, seconds: Floats) -> Floats:
        """`seconds`, of which those of shared prefixes are split evenly among the requests that share them."""
        node = requests["prefix"].astype(np.int64)
        some = node != NONE
        if not some.any():
            return seconds
        ran = np.maximum(0, self._depths[node[some]] - requests["cached_tokens"][some])
        own = ran * _per_token(requests, seconds)[some]
        split = seconds.copy()
        split[some] += self._of_each()[node[some]] - own
        return split

    def _of_each(self) -> Floats:
        """Return the seconds that each request of a node gets of it and of the nodes above."""
        if self._each is None:
            each = self._seconds / np.maximum(1, self._finished)
            total, above = each.copy(), self._parents
            while (some := above != NONE).any():
                total[some] += each[above[some]]
                above = np.where(some, self._parents[above], NONE)
            self._each = total
        return self._each

    def write(self, folder: Path, run_id: str) -> Path:
        """The table of the nodes that two or more requests share, whole or not at all. Raises OSError."""
        kept = np.flatnonzero(self._users > 1)
        tokens = self._depths - self._above
        columns: dict[str, object] = {
            "run_id": pa.repeat(run_id, len(kept)),
            "prefix": kept,
            "parent": pa.array(self._parents[kept], mask=self._parents[kept] == NONE),
            "depth": self._depths[kept],
            "tokens": tokens[kept],
            "users": self._users[kept],
            "saved_tokens": (tokens * (self._users - 1))[kept],
            # a first user that took it from a request further up the order saved something, but not by these sharing it
            "cached_tokens": np.minimum(self._cached, tokens * (self._users - 1))[kept].astype(np.int64),
            "device_s": self._seconds[kept],
            "first_key": hexadecimal(_fixed(self._keys[kept])),
        }
        with Spool(table_path(folder, PREFIXES, run_id), SCHEMAS[PREFIXES]) as spool:
            spool.write(pa.table(columns, schema=SCHEMAS[PREFIXES]))
            return spool.finish()


def _fixed(keys: NDArray[np.uint8]) -> pa.FixedSizeBinaryArray:
    """Return keys as an Arrow array."""
    data = pa.py_buffer(np.ascontiguousarray(keys))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), len(keys), [None, data])


def _per_token(requests: Columns, seconds: Floats) -> Floats:
    ran = requests["prompt_tokens"] - requests["cached_tokens"]
    return np.divide(seconds, ran, out=np.zeros_like(seconds), where=ran > 0)
