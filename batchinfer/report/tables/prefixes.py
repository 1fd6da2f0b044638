"""The tree of prefixes that requests share, in the order of their submission."""

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
NOWHERE = -1  # the position of a request that was not added


class PrefixTree:
    """Builds the tree of prefixes that prompts of requests share.

    Call `add` for all requests in the order of their submission, then `close`. It takes 4 bytes per request,
    and 60 per prefix.
    """

    def __init__(self) -> None:
        self._befores = array("i")  # tokens that each request shares with the one before it
        self._shared = 0  # tokens that the last request shares with the next one
        # Requests that share more with the next one than with the one before: the first users of prefixes
        self._firsts, self._keys = array("i"), bytearray()

    def add(self, request: Request) -> int:
        """Add the next request, and return its position in the order of requests, from 0."""
        place, most = len(self._befores), max(0, len(request.prompt) - 1)  # the last prompt token always runs
        before, self._shared = min(self._shared, most), min(request.shares_next, most)
        self._befores.append(before)
        if self._shared > before:
            self._firsts.append(place)
            self._keys += request.key
        return place

    def close(self) -> PrefixNodes:
        """Return the complete tree of the prefixes that the added requests share."""
        forest = prefix_forest(np.array(self._befores, np.int32))
        keys = np.frombuffer(self._keys, np.uint8).reshape(-1, KEY_BYTES)
        return PrefixNodes(forest, keys[np.searchsorted(np.array(self._firsts, np.int32), forest.first)])


class PrefixNodes:
    """The complete tree of prefixes that requests share, with token counts and times for each prefix.

    Call `count` for all requests before `shared`. The column `place` of requests is the position that
    `PrefixTree.add` returned, or NOWHERE.
    """

    def __init__(self, forest: PrefixForest, keys: NDArray[np.uint8]) -> None:
        """Prepare to count the users, cached tokens and device time of each prefix.

        Args:
            forest: The prefixes, which are the nodes of the tree.
            keys: The work key of the first request with each prefix. Shape: [prefixes, KEY_BYTES].
        """
        self._forest, self._keys = forest, keys
        self._own = forest.own.astype(np.int64)
        self._above = forest.depth - self._own  # depth of the parent
        self._finished, self._cached, self._seconds = (np.zeros(len(forest)) for _ in range(3))
        self._each: Floats | None = None

    def names(self, places: Floats) -> pa.Array:
        """Return the number of the longest prefix that each request shares, or null if it shares none.

        Args:
            places: The position of each request from `PrefixTree.add`, or NOWHERE.
        """
        node = self._nodes(places)
        return pa.array(node, pa.int64(), mask=node == ROOT)

    def _nodes(self, places: Floats) -> NDArray[np.int32]:
        nodes = np.append(self._forest.node_of, np.int32(ROOT))  # NOWHERE is the last index
        return nodes[places.astype(np.int64)]

    def count(self, requests: Columns, seconds: Floats) -> None:
        """Add finished requests to the counts and times of the prefixes that they share.

        Args:
            requests: Columns of the report table `requests`, and `place`.
            seconds: Device time of the prompt tokens that each request computed. Shape: [requests].
        """
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
        """Return the device time of each request's prompt if the cost of shared prefixes is split evenly.

        All requests with a prefix bear the same part of its cost, whichever of them computed it. Shape:
        [requests].

        Args:
            requests: Columns of the report table `requests`, and `place`.
            seconds: Device time of the prompt tokens that each request computed. Shape: [requests].
        """
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
        # Includes all nodes above
        if self._each is None:
            self._each = self._forest.from_root(self._seconds / np.maximum(1, self._finished))
        return self._each

    def write(self, folder: Path, run_id: str) -> Path:
        """Write the report table `prefixes` of a run atomically, and return its path.

        Raises:
            OSError: The table cannot be written.
        """
        forest, saved = self._forest, self._forest.saved
        columns: dict[str, object] = {
            "run_id": pa.repeat(run_id, len(forest)),
            "prefix": np.arange(len(forest)),
            "parent": pa.array(forest.parent, pa.int64(), mask=forest.parent == ROOT),
            "depth": forest.depth,
            "tokens": self._own,
            "users": forest.users,
            "saved_tokens": saved,
            # limited, because a first user may have found the prefix in the cache from a much earlier request
            "cached_tokens": np.minimum(self._cached, saved).astype(np.int64),
            "device_s": self._seconds,
            "first_key": hexadecimal(_fixed(self._keys)),
        }
        with Spool(table_path(folder, PREFIXES, run_id), SCHEMAS[PREFIXES]) as spool:
            spool.write(pa.table(columns, schema=SCHEMAS[PREFIXES]))
            return spool.finish()


def _fixed(keys: NDArray[np.uint8]) -> pa.FixedSizeBinaryArray:
    data = pa.py_buffer(np.ascontiguousarray(keys))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), len(keys), [None, data])


def _per_token(requests: Columns, seconds: Floats) -> Floats:
    ran = requests["prompt_tokens"] - requests["cached_tokens"]
    return np.divide(seconds, ran, out=np.zeros_like(seconds), where=ran > 0)
