"""Stores the prefix tree of a plan on disk, and reads its largest prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import ROOT, PrefixForest
from batchinfer.filesystem.durable import storage

_GROUP = 1 << 18  # nodes in memory at a time

PREFIX_SCHEMA = pa.schema(
    [
        ("node", pa.int64()),  # the plan's `prefix_group`; parents before children
        ("parent", pa.int64()),  # null for the shortest shared prefix
        ("prefix_tokens", pa.int32()),  # from the start of the prompt
        ("own_tokens", pa.int32()),  # prefix_tokens minus prefix_tokens of the parent
        ("users", pa.int32()),  # requests with this prefix
        ("saved_tokens", pa.int64()),  # own_tokens × (users - 1)
        ("token_offset", pa.int64()),  # offset of such a prompt in the token store
    ]
)


@dataclass(frozen=True, slots=True)
class PlannedPrefix:
    """A prefix that several requests of a plan share: a node of the prefix tree.

    Attributes:
        node: Number of the prefix in its plan. A parent has a smaller number than its children.
        parent: Number of the next shorter prefix that more requests share. None if there is none.
        prefix_tokens: Number of tokens of the prefix.
        own_tokens: Number of tokens of the prefix after the end of its parent.
        users: Number of requests that begin with the prefix.
        saved_tokens: `own_tokens` × (`users` - 1).
        token_offset: Position of a prompt with this prefix in the stored tokens of all prompts.
    """

    node: int
    parent: int | None
    prefix_tokens: int
    own_tokens: int
    users: int
    saved_tokens: int
    token_offset: int


def write_prefixes(path: Path, forest: PrefixForest, offsets: NDArray[np.int64]) -> None:
    """Write a prefix tree as a Parquet file with the columns of PREFIX_SCHEMA.

    Args:
        path: File to write.
        forest: The prefix tree.
        offsets: For each node of the tree, the position of a prompt with its prefix in the stored tokens of all
            prompts.

    Raises:
        StorageError: The file cannot be written.
    """
    own, saved = forest.own, forest.saved
    with storage(path, "write"), pq.ParquetWriter(path, PREFIX_SCHEMA, compression="zstd") as writer:
        for start in range(0, len(forest), _GROUP):
            some = slice(start, start + _GROUP)
            columns: list[Any] = [
                np.arange(len(forest))[some],
                pa.array(forest.parent[some], mask=forest.parent[some] == ROOT),
                forest.depth[some],
                own[some],
                forest.users[some],
                saved[some],
                offsets[some],
            ]
            kinds = zip(columns, PREFIX_SCHEMA.types, strict=True)
            arrays = [pa.array(column).cast(kind) for column, kind in kinds]
            writer.write_batch(pa.record_batch(arrays, schema=PREFIX_SCHEMA))


def largest_prefixes(path: Path, count: int) -> list[PlannedPrefix]:
    """Return the `count` shared prefixes that save the largest number of tokens, and all their ancestors.

    Parents come before children. Children of the same parent are in descending order of saved tokens.

    Args:
        path: File that `write_prefixes` wrote.
        count: Number of prefixes, without the ancestors.

    Raises:
        StorageError: The file cannot be read.
    """
    with storage(path, "read"), pq.ParquetFile(path) as file:
        rows = _with_ancestors(file, _saving_most(file, count))
    return _walked([PlannedPrefix(**row) for row in rows])


def _saving_most(file: pq.ParquetFile, count: int) -> list[int]:
    best: list[tuple[int, int]] = []  # saved tokens, - node
    first = 0
    for group in range(file.num_row_groups):
        saved = file.read_row_group(group, columns=["saved_tokens"]).column(0).to_numpy()
        largest = np.argsort(-saved, kind="stable")[:count]
        pairs = zip(saved[largest].tolist(), (-first - largest).tolist(), strict=True)
        best, first = nlargest(count, [*best, *pairs]), first + len(saved)
    return [-node for _, node in best]


def _with_ancestors(file: pq.ParquetFile, nodes: list[int]) -> list[dict[str, Any]]:
    waiting, rows = {-node for node in nodes}, []
    heap = sorted(waiting)  # the last node first
    for group in reversed(range(file.num_row_groups)):
        table = file.read_row_group(group)
        first, above, places = table.column("node")[0].as_py(), table.column("parent"), []
        while heap and -heap[0] >= first:
            places.append(-heappop(heap) - first)
            parent = above[places[-1]].as_py()
            if parent is not None and -parent not in waiting:
                waiting.add(-parent)
                heappush(heap, -parent)
        rows += table.take(pa.array(places, pa.int64())).to_pylist()
    return rows


def _walked(nodes: list[PlannedPrefix]) -> list[PlannedPrefix]:
    children: dict[int | None, list[PlannedPrefix]] = {}
    # the last element is popped first
    for node in sorted(nodes, key=lambda one: (one.saved_tokens, -one.node)):
        children.setdefault(node.parent, []).append(node)
    walked, waiting = [], children.get(None, [])
    while waiting:
        walked.append(waiting.pop())
        waiting += children.get(walked[-1].node, [])
    return walked
