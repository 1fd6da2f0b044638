"""The planner's order without DuckDB, which a machine that is only to be measured need not have.

A benchmark's few rows are ordered in Python as `plan_job` orders any number on disk; tests hold the two against
each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.bench.planning import Planned, prepared_rows, row_keys
from batchinfer.bench.workloads import Row
from batchinfer.data.prompts.keys import PREFIX_LENGTHS
from batchinfer.data.prompts.prepare import Prepared
from batchinfer.plan.plan import PLAN_SCHEMA, Plan
from batchinfer.request import TokenIds

OUTPUT_WEIGHT = 4  # as in batchinfer.plan.planner, where it is explained


class MemoryTokens:
    """Prompts end to end in memory."""

    def __init__(self, tokens: TokenIds) -> None:
        self._tokens = tokens

    def read(self, offset: int, count: int) -> TokenIds:
        return self._tokens[offset : offset + count]


def plan_in_memory(rows: Sequence[Row], folder: Path, threads: int, deduplicate: bool = True) -> Planned:
    """As `plan_rows`: each distinct key once, in the order in which the planner would have it."""
    prepared = prepared_rows(rows, deduplicate)
    keys, offsets = row_keys(prepared), np.cumsum(prepared.counts) - prepared.counts
    first = {key: row for row, key in reversed(list(enumerate(keys)))}
    users = Counter(keys)
    columns: dict[str, list[Any]] = {name: [] for name in PLAN_SCHEMA.names}
    for row in _ordered(prepared, keys, sorted(first.values())):
        count, expected = int(prepared.counts[row]), prepared.max_tokens[row]
        columns["seq"].append(len(columns["seq"]))
        columns["key"].append(keys[row])
        columns["token_offset"].append(int(offsets[row]))
        columns["token_count"].append(count)
        columns["params"].append(prepared.params[prepared.params_of[row]])
        columns["expected_tokens"].append(expected)
        columns["bucket"].append((count + expected - 1).bit_length())
        columns["prefix_group"].append(None)  # the feeder finds prefixes itself
        columns["prefix_tokens"].append(0)
        columns["users"].append(users[keys[row]])
    path = folder / "plan.parquet"
    pq.write_table(pa.table(columns, schema=PLAN_SCHEMA), path)
    return Planned(keys, _counted(path, columns, len(rows)), MemoryTokens(prepared.tokens))


def _ordered(prepared: Prepared, keys: Sequence[bytes], rows: Sequence[int]) -> list[int]:
    """A walk of the trie of prefixes, each level's groups and single rows by their largest effort."""
    efforts = {row: int(prepared.counts[row]) + OUTPUT_WEIGHT * prepared.max_tokens[row] for row in rows}
    groups: list[
        dict[int, int]
    ] = []  # of each level: prefix → largest effort, where two rows or more have it
    for level in range(len(PREFIX_LENGTHS)):
        members: dict[int, list[int]] = {}
        for row in rows:
            if _has(prepared, row, level):
                members.setdefault(int(prepared.prefixes[row, level]), []).append(efforts[row])
        groups.append({prefix: max(found) for prefix, found in members.items() if len(found) > 1})

    def place(row: int) -> tuple[object, ...]:
        path: list[tuple[int, bool, int]] = []
        for level, known in enumerate(groups):
            prefix = int(prepared.prefixes[row, level])
            grouped = _has(prepared, row, level) and prefix in known
            path.append((-known[prefix] if grouped else -efforts[row], not grouped, prefix if grouped else 0))
        return (*path, -efforts[row], keys[row])

    return sorted(rows, key=place)


def _has(prepared: Prepared, row: int, level: int) -> bool:
    return bool(prepared.counts[row] > PREFIX_LENGTHS[level])


def _counted(path: Path, columns: dict[str, list[Any]], rows: int) -> Plan:
    totals = [a + b for a, b in zip(columns["token_count"], columns["expected_tokens"], strict=True)]
    return Plan(
        path=path,
        rows=rows,
        error_rows=0,
        distinct=len(totals),
        duplicates=rows - len(totals),
        present=0,
        to_run=len(totals),
        prompt_tokens=sum(columns["token_count"]),
        expected_tokens=sum(columns["expected_tokens"]),
        shared_prefix_tokens=0,  # what forecasts need, and no benchmark
        longest=max(totals),
    )
