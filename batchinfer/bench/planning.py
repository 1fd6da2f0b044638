"""Plans a workload like a job: writes an index to disk and runs the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchinfer.bench.workloads import Row
from batchinfer.core.content_root import ContentRoots
from batchinfer.core.sampling import SamplingParams
from batchinfer.filesystem.durable import FileOps
from batchinfer.input.prompts.keys import token_bytes, work_key
from batchinfer.input.prompts.prepared.rows import PreparedPrompts, PreparedRows
from batchinfer.input.prompts.row_facts import RowFields, no_facts
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import Prompts
from batchinfer.store.index.index import Layout, index_schema
from batchinfer.store.index.token_store import TokenStore
from batchinfer.store.index.writer import IndexWriter, RowPlace

CONTEXT = b"batchinfer bench"  # a constant part of work keys: benchmarks store no answers


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """A workload with its plan.

    Attributes:
        keys: The work key of each row.
        plan: The order of all requests.
        tokens: Reads the prompts of requests from the index.
    """

    keys: tuple[bytes, ...]
    plan: Plan
    tokens: Prompts


def plan_rows(
    rows: Sequence[Row], folder: Path, threads: int, roots: ContentRoots, deduplicate: bool = True
) -> PlannedWorkload:
    """Write an index of the rows to a folder and plan them.

    Args:
        rows: The rows of the workload.
        folder: An empty folder for the index.
        threads: Number of threads of the planner.
        roots: Computes which requests may share cached blocks.
        deduplicate: False to compute each row, even if it is a duplicate.

    Raises:
        StorageError: Writing failed.
    """
    # Imports DuckDB, which the rest of this package does not need
    from batchinfer.plan.order.planner import plan_job

    prepared = prepared_rows(rows, deduplicate)
    layout = Layout(folder)
    for path in (layout.tokens.parent, layout.index):
        path.mkdir()
    longest = max(row.length for row in rows)
    with IndexWriter(layout, longest, index_schema(endpoints=False), FileOps()) as writer:
        facts = no_facts(RowFields(()), len(rows))
        writer.append(RowPlace("bench", 0), PreparedRows(prepared, facts), prepared.answers(1))
        writer.commit()
    tokens = TokenStore(layout.tokens)
    plan = plan_job(
        sorted(layout.index.glob("part-*.parquet")), tokens, [], folder / "plan", roots, threads=threads
    )
    return PlannedWorkload(row_keys(prepared), plan, tokens)


def row_keys(prepared: PreparedPrompts) -> tuple[bytes, ...]:
    """Return the work key of each row, 32 bytes."""
    return tuple(prepared.keys[at : at + 32] for at in range(0, len(prepared.keys), 32))


def prepared_rows(rows: Sequence[Row], deduplicate: bool) -> PreparedPrompts:
    """Return the rows in the form in which an index stores them.

    Args:
        rows: The rows of the workload.
        deduplicate: False to give duplicates different work keys, so that each is computed.
    """
    asked = [(row.max_tokens, row.schema) for row in rows]
    params = {one: number for number, one in enumerate(dict.fromkeys(asked))}
    texts = [_params(*one) for one in params]
    prompts = [np.array(row.prompt, np.int32) for row in rows]
    keys = bytearray()
    for number, prompt in enumerate(prompts):
        data = token_bytes(prompt)
        occurrence = 0 if deduplicate else number
        keys += work_key(CONTEXT, texts[params[asked[number]]], data, occurrence)
    return PreparedPrompts(
        errors={},
        params=texts,
        params_of=np.array([params[one] for one in asked], np.int32),
        max_tokens=np.array([row.max_tokens for row in rows], np.int32),
        counts=np.array([len(prompt) for prompt in prompts], np.int32),
        keys=bytes(keys),
        tokens=np.concatenate(prompts),
        openings=np.zeros(len(prompts), np.int8),
    )


def _params(max_tokens: int, schema: str | None) -> str:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, json_schema=schema)
    return params.canonical().to_json()
