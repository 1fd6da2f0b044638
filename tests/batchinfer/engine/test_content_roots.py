"""Tests that requests with different content roots share nothing in plan, engine, simulation and report.

Requests with one root share their whole common prefix. The roots are made up: only `ContentRoots` knows the
reason for a root.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.engine.kv.cache_layout import one_group
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.models.spec.spec import CacheSpec
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.order.requests import read_requests
from batchinfer.plan.simulation.simulator import SimulatedEngine, simulate
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer.report.tables.prefixes import PrefixTree
from tests.batchinfer.engine.driver import Driver, distinct_tokens, driver_for
from tests.batchinfer.engine.simulation import CPU, LLAMA_135M
from tests.batchinfer.store.small_index import good_row, write_index
from tests.examples import examples

BLOCK = 16


class MadeUp(ContentRoots):
    """Content roots where a request has the usual root or one of two others."""

    @property
    def is_single(self) -> bool:
        return False

    def of(self, prompt_tokens: int, params: SamplingParams) -> bytes:
        return (b"", b"one", b"another")[params.max_tokens % 3]


ROOTS = MadeUp(10_000)
# Paths consist of parts of 7 tokens, which fill no whole blocks. The last token is unique per row.
ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=14), st.integers(1, 30), st.integers(3, 8)),
    min_size=2,
    max_size=24,
)


def prompts_of(rows: list[tuple[list[int], int, int]]) -> list[list[int]]:
    return [
        [2 + step for step in path for _ in range(7)] + [50 + number] * own
        for number, (path, own, _) in enumerate(rows)
    ]


def planned(rows: list[tuple[list[int], int, int]], folder: Path) -> tuple[Plan, list[Request]]:
    text = SamplingParams(ignore_eos=True).to_json()
    work = [
        good_row(number, prompt, most, params=text)
        for number, (prompt, (_, _, most)) in enumerate(zip(prompts_of(rows), rows, strict=True))
    ]
    index = write_index(folder / "x", work)
    plan = plan_job(index.index_parts, index.tokens, [], folder / "plan", ROOTS)
    read = read_requests(plan, index.tokens, REQUEST_BATCH, ROOTS)
    return plan, [request for _, some in read for request in some]


def shared_within_roots(requests: list[Request]) -> int:
    """Return the prompt tokens that are saved if each node of each root's tree runs once."""
    by_root: dict[bytes, list[list[int]]] = {}
    for request in requests:
        root = ROOTS.of(len(request.prompt), request.params)
        by_root.setdefault(root, []).append(request.prompt.tolist())
    return sum(sum(map(len, rows)) - distinct_tokens(rows) for rows in by_root.values())


def run_engine(requests: list[Request]) -> Driver:
    """Run requests on the real scheduler and cache, and check that no row reads another root's K or V."""
    rows = [Sequence.of(request, ROOTS, None, 0.0) for request in requests]
    driver = driver_for(rows, blocks=2000, size=BLOCK, seqs=64, budget=2048)
    driver.drain()
    return driver


def simulated(requests: list[Request]) -> int:
    layout = one_group([CacheSpec(1, 64)] * LLAMA_135M.layers, BLOCK)
    machine = SimulatedEngine(
        LLAMA_135M, layout, 2000, SchedulerConfig(64, 2048), ROOTS, StepTime(CPU), looks_ahead=False
    )
    return simulate(machine, requests, {r.key: r.params.max_tokens for r in requests}).cached_tokens


def reported(requests: list[Request], folder: Path) -> pa.Table:
    tree = PrefixTree()
    for request in requests:
        tree.add(request)
    return pq.read_table(tree.close().write(folder, "r"))


@given(rows=ROWS)
@settings(max_examples=examples(12, 200), deadline=None, print_blob=True)
def test_all_that_is_shared_is_shared_within_a_root(
    rows: list[tuple[list[int], int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("roots")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchinfer.plan.order.run_order.MANY", 1)
        plan, requests = planned(rows, folder)
    report, wanted = reported(requests, folder), shared_within_roots(requests)
    assert plan.shared_prefix_tokens == wanted
    assert run_engine(requests).cached == wanted
    assert simulated(requests) == wanted
    assert sum(report["saved_tokens"].to_pylist()) == wanted
    columns = {"depth": "prefix_tokens", "tokens": "own_tokens", "users": "users"}
    nodes = pq.read_table(plan.prefixes).select(list(columns.values())).rename_columns(list(columns))
    assert sorted_rows(report.select(list(columns))) == sorted_rows(nodes)


def sorted_rows(table: pa.Table) -> list[tuple[int, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())
