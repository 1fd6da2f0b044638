"""A plan that is on disk, in another order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.prefix_forest import ROOT, Ints, PrefixForest
from batchinfer.data.storage.duck import connection, parquet
from batchinfer.data.storage.durable import storage
from batchinfer.plan.order.plan import PLAN_SCHEMA, Plan
from batchinfer.plan.order.planner import longest_params, write_plan
from batchinfer.plan.order.policies import Capacity, OrderPolicy, SharedWork
from batchinfer.plan.order.run_order import kept_together


def reorder(
    plan: Plan, policy: OrderPolicy, capacity: Capacity, *, memory_limit: str | None = None, threads: int = 2
) -> None:
    """Write a plan, which is in `plan_job`'s order, in that of another policy. `memory_limit` as in `plan_job`.

    Raises StorageError, OutOfMemory; the plan is then as it was.
    """
    places = _work(plan).places(policy, capacity)
    names = [name for name in PLAN_SCHEMA.names if name != "seq"]
    written = plan.path.with_suffix(".new")
    with connection(plan.path.parent / "spill", memory_limit, threads) as database:
        database.register("place", pa.table({"place": places}))
        source = parquet([plan.path])
        query = f"SELECT {', '.join(names)} FROM {source} POSITIONAL JOIN place ORDER BY place"
        try:
            write_plan(database.sql(query), written, longest_params(database, source))
            with storage(plan.path, "replace"):
                written.replace(plan.path)
        finally:
            written.unlink(missing_ok=True)  # a part of it, where that failed


def _work(plan: Plan) -> SharedWork:
    with storage(plan.path, "read"):
        columns = ["token_count", "expected_tokens", "token_offset", "prefix_group"]
        rows = pq.read_table(plan.path, columns=columns)
    counts, outputs, offsets = (rows.column(name).to_numpy() for name in columns[:3])
    node_of = rows.column("prefix_group").fill_null(ROOT).to_numpy().astype(np.int32)
    return SharedWork(_forest(plan.prefixes, node_of), counts, outputs, offsets)


def _forest(path: Path, node_of: Ints) -> PrefixForest:
    """Return the forest over the rows of a plan as they stand: the nodes whose rows stand together."""
    with storage(path, "read"):
        table = pq.read_table(path, columns=["prefix_tokens", "users", "parent"])
    depth, users, parent = (_ints(table.column(name)) for name in table.column_names)
    forest = kept_together(PrefixForest(depth, np.zeros_like(depth), users, parent, node_of))
    return replace(forest, first=_firsts(forest.node_of, forest.parent))


def _ints(column: Any) -> Ints:
    return np.asarray(column.fill_null(ROOT).to_numpy(), np.int32)


def _firsts(node_of: Ints, parent: Ints) -> Ints:
    """The first row of each node: one of its own or of a node below it. In as many rounds as the logarithm of the
    forest's height: each looks twice as far down as the one before."""
    firsts = np.full(len(parent) + 1, len(node_of), np.int32)  # one more, where ROOT points
    nodes, rows = np.unique(node_of, return_index=True)
    firsts[nodes] = rows
    above = np.append(parent, np.int32(ROOT))
    while (above != ROOT).any():
        np.minimum.at(firsts, above, firsts.copy())
        above = above[above]
    return firsts[:-1]
