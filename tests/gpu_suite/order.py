"""The planner's order without DuckDB, which a machine for measurements may lack.

Sorts a benchmark's few rows in memory as `plan_job` sorts any number on disk. Tests compare the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.bench.planning import PlannedWorkload, prepared_rows, row_keys
from batchinfer.bench.workloads import Row
from batchinfer.core.content_root import ContentRoots
from batchinfer.core.prefix_forest import prefix_forest
from batchinfer.core.request import TokenIds, common_prefix
from batchinfer.input.prompts.prepared.rows import PreparedPrompts
from batchinfer.plan.order.plan import PLAN_SCHEMA, Plan
from batchinfer.plan.order.run_order import depth_first, efforts, kept_together


class MemoryTokens:
    """Concatenated prompts in memory."""

    def __init__(self, tokens: TokenIds) -> None:
        self._tokens = tokens

    def read(self, offset: int, count: int) -> TokenIds:
        return self._tokens[offset : offset + count]


def plan_in_memory(
    rows: Sequence[Row], folder: Path, threads: int, roots: ContentRoots, deduplicate: bool = True
) -> PlannedWorkload:
    """Plan each distinct key once, in the order of `plan_rows`. Raises ValueError if a model's requests have several
    content roots.
    """
    if not roots.is_single:
        raise ValueError("rows of several content roots are not planned in memory")
    prepared = prepared_rows(rows, deduplicate)
    keys, offsets = row_keys(prepared), np.cumsum(prepared.counts) - prepared.counts
    first = {key: row for row, key in reversed(list(enumerate(keys)))}
    users = Counter(keys)
    columns: dict[str, list[Any]] = {name: [] for name in PLAN_SCHEMA.names}
    for row in _ordered(prepared, offsets, sorted(first.values())):
        count, expected = int(prepared.counts[row]), prepared.max_tokens[row]
        columns["seq"].append(len(columns["seq"]))
        columns["key"].append(keys[row])
        columns["token_offset"].append(int(offsets[row]))
        columns["token_count"].append(count)
        columns["params"].append(prepared.params[prepared.params_of[row]])
        columns["expected_tokens"].append(expected)
        columns["bucket"].append(int(count + expected - 1).bit_length())
        columns["prefix_group"].append(None)  # the feeder finds prefixes itself
        columns["prefix_tokens"].append(0)
        columns["users"].append(users[keys[row]])
        columns["final_users"].append(users[keys[row]])
    path = folder / "plan.parquet"
    pq.write_table(pa.table(columns, schema=PLAN_SCHEMA), path)
    return PlannedWorkload(keys, _counted(path, columns, len(rows)), MemoryTokens(prepared.tokens))


def _ordered(prepared: PreparedPrompts, offsets: TokenIds, rows: Sequence[int]) -> list[int]:
    """Return these rows in the planner's order."""
    heads = [prepared.tokens[offsets[row] :][: prepared.counts[row] - 1] for row in rows]
    order = sorted(range(len(rows)), key=lambda at: heads[at].tolist())
    shared = [0, *(common_prefix(heads[a], heads[b]) for a, b in pairwise(order))]
    found = [rows[at] for at in order]
    effort = efforts(prepared.counts[found], prepared.max_tokens[found])
    places = depth_first(kept_together(prefix_forest(np.array(shared, np.int32))), effort)
    return [row for _, row in sorted(zip(places.tolist(), found, strict=True))]


def _counted(path: Path, columns: dict[str, list[Any]], rows: int) -> Plan:
    totals = [a + b for a, b in zip(columns["token_count"], columns["expected_tokens"], strict=True)]
    return Plan(
        path=path,
        prefixes=path.with_name("prefixes.parquet"),  # benchmarks do not read it
        rows=rows,
        error_rows=0,
        distinct=len(totals),
        duplicates=rows - len(totals),
        present=0,
        to_run=len(totals),
        prompt_tokens=sum(columns["token_count"]),
        expected_tokens=sum(columns["expected_tokens"]),
        shared_prefix_tokens=0,  # needed only by forecasts
        rows_to_run=rows,
        longest=max(totals),
    )
