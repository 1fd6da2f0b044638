"""The nodes of a plan's prefix forest on disk: written once, read for the largest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.data.storage.durable import storage
from batchinfer.plan.prefix_forest import ROOT, PrefixForest

PREFIX_SCHEMA = pa.schema(
    [
        ("node", pa.int64()),  # what `prefix_group` of a plan refers to; parents before children
        ("parent", pa.int64()),  # null: nothing shorter is shared
        ("prefix_tokens", pa.int32()),  # from the start of the prompt, in whole blocks
        ("own_tokens", pa.int32()),  # of these behind the parent's
        ("users", pa.int32()),  # requests that begin with it
        ("saved_tokens", pa.int64()),  # own_tokens × (users - 1)
        ("token_offset", pa.int64()),  # in the token store: where a prompt lies that begins with it
    ]
)


@dataclass(frozen=True, slots=True)
class PlannedPrefix:
    """A node; fields as in PREFIX_SCHEMA."""

    node: int
    parent: int | None
    prefix_tokens: int
    own_tokens: int
    users: int
    saved_tokens: int
    token_offset: int


def write_prefixes(path: Path, forest: PrefixForest, offsets: NDArray[np.int64]) -> None:
    """Write all nodes. `offsets`: of each node, where in the token store a prompt of it lies. Raises StorageError."""
    columns: list[Any] = [
        np.arange(len(forest)),
        pa.array(forest.parent, mask=forest.parent == ROOT),
        forest.depth,
        forest.own,
        forest.users,
        forest.saved,
        offsets,
    ]
    arrays = [pa.array(column).cast(kind) for column, kind in zip(columns, PREFIX_SCHEMA.types, strict=True)]
    with storage(path, "write"):
        pq.write_table(pa.Table.from_arrays(arrays, schema=PREFIX_SCHEMA), path, compression="zstd")


def largest_prefixes(path: Path, most: int) -> list[PlannedPrefix]:
    """The `most` nodes that save most tokens and the nodes above them, parents before children and what saves most
    first among those of one parent. Raises StorageError."""
    with storage(path, "read"):
        table = pq.read_table(path)
    saved, parent = (table.column(name).to_numpy() for name in ("saved_tokens", "parent"))
    wanted = set(np.argsort(-saved, kind="stable")[:most].tolist())
    for node in list(wanted):
        while not np.isnan(above := parent[node]) and int(above) not in wanted:
            node = int(above)
            wanted.add(node)
    return _walked(
        [PlannedPrefix(**row) for row in table.take(pa.array(sorted(wanted), pa.int64())).to_pylist()]
    )


def _walked(nodes: list[PlannedPrefix]) -> list[PlannedPrefix]:
    children: dict[int | None, list[PlannedPrefix]] = {}
    for node in sorted(
        nodes, key=lambda one: (one.saved_tokens, -one.node)
    ):  # what saves most is taken first
        children.setdefault(node.parent, []).append(node)
    walked, waiting = [], children.get(None, [])
    while waiting:
        walked.append(waiting.pop())
        waiting += children.get(walked[-1].node, [])
    return walked
