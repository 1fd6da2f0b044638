"""The tree of prefixes that requests share in the order in which they are handed to the engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import ROOT, PrefixForest, prefix_forest
from batchinfer.core.request import Request
from batchinfer.report.tables.columns.declared import PREFIXES, SCHEMAS
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.row_keys import KEY_BYTES, hexadecimal
from batchinfer.report.tables.spool import Spool

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]
NOWHERE = -1  # the place of a request that was not added


class PrefixTree:
    """`add` all requests in order; then `close` it. Each request takes 4 bytes, each prefix some 60."""

    def __init__(self) -> None:
        self._befores = array("i")  # how much each shares with the one before it
        self._shared = 0  # tokens that the request before shares with the next one
        # Requests that share more with the next one than with the one before, with which alone prefixes begin
        self._firsts, self._keys = array("i"), bytearray()

    def add(self, request: Request) -> int:
        """Take the next request, and return its place in the order."""
        place, most = len(self._befores), max(0, len(request.prompt) - 1)  # the last token always runs
        before, self._shared = min(self._shared, most), min(request.shares_next, most)
        self._befores.append(before)
        if self._shared > before:
            self._firsts.append(place)
            self._keys += request.key
        return place

    def close(self) -> PrefixNodes:
        """Return the tree of all requests that were added."""
        forest = prefix_forest(np.array(self._befores, np.int32))
        keys = np.frombuffer(self._keys, np.uint8).reshape(-1, KEY_BYTES)
        return PrefixNodes(forest, keys[np.searchsorted(np.array(self._firsts, np.int32), forest.first)])


class PrefixNodes:
    """The closed tree. Once `count` was told of all requests, `shared` says what prefixes cost each of them.

    The column `place` of requests is what `PrefixTree.add` returned, or NOWHERE.
    """

    def __init__(self, forest: PrefixForest, keys: NDArray[np.uint8]) -> None:
        """`keys`: of each node's first request."""
        self._forest, self._keys = forest, keys
        self._own = forest.own.astype(np.int64)
        self._above = forest.depth - self._own  # depth of the parent
        self._finished, self._cached, self._seconds = (np.zeros(len(forest)) for _ in range(3))
        self._each: Floats | None = None

    def names(self, places: Floats) -> pa.Array:
        """Return the deepest prefix of each of these requests, as the table names it; null: it shares nothing."""
        node = self._nodes(places)
        return pa.array(node, pa.int64(), mask=node == ROOT)

    def _nodes(self, places: Floats) -> NDArray[np.int32]:
        return np.append(self._forest.node_of, np.int32(ROOT))[
            places.astype(np.int64)
        ]  # NOWHERE is the last one

    def count(self, requests: Columns, seconds: Floats) -> None:
        """`seconds`: what the prompts took that these requests ran, without what the cache held."""
        self._each = None
        cached, node = requests["cached_tokens"], self._nodes(requests["place"])
        price = _per_token(requests, seconds)
        while (some := node != ROOT).any():
            node, cached, price = node[some], cached[some], price[some]
            found = np.clip(cached - self._above[node], 0, self._own[node])
            np.add.at(self._finished, node, 1)
            np.add.at(self._cached, node, found)
            np.add.at(self._seconds, node, price * (self._own[node] - found))
            node = self._forest.parent[node]

    def shared(self, requests: Columns, seconds: Floats) -> Floats:
        """`seconds`, of which those of shared prefixes are split evenly among the requests that share them."""
        node = self._nodes(requests["place"])
        some = node != ROOT
        if not some.any():
            return seconds
        ran = np.maximum(0, self._forest.depth[node[some]] - requests["cached_tokens"][some])
        own = ran * _per_token(requests, seconds)[some]
        split = seconds.copy()
        split[some] += self._of_each()[node[some]] - own
        return split

    def _of_each(self) -> Floats:
        """Return the seconds that each request of a node gets of it and of the nodes above."""
        if self._each is None:
            self._each = self._forest.from_root(self._seconds / np.maximum(1, self._finished))
        return self._each

    def write(self, folder: Path, run_id: str) -> Path:
        """The table of the nodes that two or more requests share, whole or not at all. Raises OSError."""
        forest, saved = self._forest, self._forest.saved
        columns: dict[str, object] = {
            "run_id": pa.repeat(run_id, len(forest)),
            "prefix": np.arange(len(forest)),
            "parent": pa.array(forest.parent, pa.int64(), mask=forest.parent == ROOT),
            "depth": forest.depth,
            "tokens": self._own,
            "users": forest.users,
            "saved_tokens": saved,
            # a first user that took it from a request further up the order saved something, but not by these sharing it
            "cached_tokens": np.minimum(self._cached, saved).astype(np.int64),
            "device_s": self._seconds,
            "first_key": hexadecimal(_fixed(self._keys)),
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
