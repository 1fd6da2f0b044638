"""Tests that the GPU suite's plan without DuckDB has the planner's order."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from batchinfer.bench.planning import plan_rows
from batchinfer.bench.workloads import WORKLOADS, make_workload
from batchinfer.core.content_root import ContentRoots
from tests.gpu_suite.order import plan_in_memory

COLUMNS = ("key", "token_offset", "token_count", "params", "expected_tokens", "users", "seq", "bucket")


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_order_is_the_planner_s(name, deduplicate, tmp_path):
    rows = make_workload(name, 32_000).rows
    for folder in ("theirs", "ours"):
        (tmp_path / folder).mkdir()
    theirs = plan_rows(rows, tmp_path / "theirs", 1, ContentRoots(32_000), deduplicate)
    ours = plan_in_memory(rows, tmp_path / "ours", 1, ContentRoots(32_000), deduplicate)
    assert ours.keys == theirs.keys
    wanted, found = (pq.read_table(plan.plan.path, columns=list(COLUMNS)) for plan in (theirs, ours))
    assert found.equals(wanted)
    for count in ("rows", "distinct", "duplicates", "to_run", "prompt_tokens", "expected_tokens", "longest"):
        assert getattr(ours.plan, count) == getattr(theirs.plan, count)
    offset, length = (found.column(c)[3].as_py() for c in ("token_offset", "token_count"))
    assert ours.tokens.read(offset, length).tolist() == theirs.tokens.read(offset, length).tolist()
