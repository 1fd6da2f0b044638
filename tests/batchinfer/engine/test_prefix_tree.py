"""Planner, feeder, scheduler and cache together run each node of a prefix tree once, however scarce the cache is, and
wherever in a block it ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.data.index.token_store import TokenStore
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.order.requests import planned_requests
from batchinfer.report.tables.prefixes import PrefixTree
from tests.batchinfer.data.small_index import good_row, write_index
from tests.batchinfer.engine.driver import Driver
from tests.kernels.gpu.pairs import each_first

BLOCK = 16
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def tree(system: int, document: int, documents: int, questions: int, seed: int) -> list[list[int]]:
    """Shuffled rows: common instructions, a document of about so many tokens, a question of its own."""
    rng = random.Random(seed)
    head = [1] * system
    texts = [
        [rng.randrange(100, 999) for _ in range(document + rng.randint(-9, 9))] for _ in range(documents)
    ]
    rows = [
        head + text + [rng.randrange(1000, 9999) for _ in range(rng.randint(3, 30))]
        for text in texts
        for _ in range(questions)
    ]
    rng.shuffle(rows)
    return rows


def plan_of(rows: list[list[int]], folder: Path) -> tuple[Plan, TokenStore]:
    text = PARAMS.to_json()
    index = write_index(
        folder / "x",
        [good_row(i, row, 12 if i % 5 else 11, params=text) for i, row in enumerate(rows)],
    )
    return plan_job(index.folder / "index", index.tokens, [], folder / "plan"), index.tokens


def planned(rows: list[list[int]], folder: Path, batch: int = REQUEST_BATCH) -> Iterator[list[Request]]:
    """The batches of requests that the feeder sends."""
    plan, tokens = plan_of(rows, folder)
    for _, requests in planned_requests(plan, tokens, batch):
        yield requests


def fewest(rows: list[list[int]]) -> int:
    """Prompt tokens to run when every node of the tokens' trie runs once."""
    return len({known for row in rows for known in accumulate(row, lambda *pair: hash(pair), initial=0)}) - 1


def run(scheduler: Scheduler, batches: Iterator[list[Request]], queued: int) -> Driver:
    """Feeds as the parent does: at least `queued` in flight while there are more."""
    driver, more = Driver(scheduler), True
    while more or scheduler.waiting or scheduler.running:
        while more and len(scheduler.waiting) + len(scheduler.running) < queued:
            batch = next(batches, None)
            more = batch is not None
            for request in batch or []:
                scheduler.add(Sequence.of(request, 10_000, None, 0.0))
        driver.step()
    return driver


SCARCE, SOME, PLENTY = 1.3, 3.0, 30.0  # memory, in longest rows
# A block that nobody uses gives way to what rows write. What the next row would have copied from it, it copies from a
# row that still runs; it runs again what none of them has.
MORE = {SCARCE: 1.02, SOME: 1.02, PLENTY: 1.0}


@pytest.mark.parametrize(
    ("shape", "room", "budget"),
    each_first([(0, 200, 16, 16), (70, 50, 16, 16), (70, 1100, 6, 5)], [SCARCE, SOME, PLENTY], [64, 2048]),
    ids=str,
)
def test_each_node_runs_once(shape, room, budget, tmp_path):
    rows = tree(*shape, seed=3)
    longest = max(map(len, rows)) + 12
    pool = BlockPool(int(room * (-(-longest // BLOCK) + 1)), BLOCK)
    scheduler = Scheduler(SchedulerConfig(64, budget), pool)
    driver = run(scheduler, planned(rows, tmp_path), queued=192)
    assert len(driver.finished) == len(rows)
    assert driver.preempted == 0
    outputs = sum(s.output_length - 1 for s in driver.finished)
    assert fewest(rows) <= driver.ran - outputs <= MORE[room] * fewest(rows)


@pytest.mark.parametrize("size", [5, 16, 33])
@pytest.mark.parametrize("shape", [(3, 10, 9, 9), (70, 50, 16, 5)], ids=str)
def test_plan_engine_and_report_count_the_same_shared_tokens(shape, size, tmp_path):
    """Where documents, too, stand together that have less than a block in common."""
    rows = tree(*shape, seed=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchinfer.plan.order.run_order.MANY", 1)
        plan, tokens = plan_of(rows, tmp_path)
    requests = [request for _, some in planned_requests(plan, tokens, REQUEST_BATCH) for request in some]
    scheduler = Scheduler(SchedulerConfig(64, 2048), BlockPool(4000 // size, size))
    driver = run(scheduler, iter([requests]), queued=192)
    assert driver.cached == plan.shared_prefix_tokens == sum(map(len, rows)) - fewest(rows)
    reported = PrefixTree()
    for request in requests:
        reported.add(request)
    nodes = pq.read_table(reported.close().write(tmp_path, "r"))
    assert sum(nodes["saved_tokens"].to_pylist()) == plan.shared_prefix_tokens
    wanted = pq.read_table(plan.prefixes).select(["prefix_tokens", "own_tokens", "users"]).to_pylist()
    assert sorted(
        map(tuple, zip(*(nodes[name].to_pylist() for name in ("depth", "tokens", "users")), strict=True))
    ) == sorted(tuple(node.values()) for node in wanted)


def test_the_document_outlives_a_queue_that_runs_dry(tmp_path):
    """Batches of 4 rows, each sent when nothing is left of the one before: the next request is announced."""
    rows = tree(0, 200, 3, 10, seed=5)
    scheduler = Scheduler(SchedulerConfig(64, 2048), BlockPool(60, BLOCK))
    driver = run(scheduler, planned(rows, tmp_path, 4), queued=1)
    outputs = sum(s.output_length - 1 for s in driver.finished)
    assert driver.ran - outputs == fewest(rows)


def test_a_window_border_costs_nothing(tmp_path):
    """Documents that begin behind the same 70 tokens and end before the 128th, in batches of four of them."""
    rows = tree(70, 50, 16, 16, seed=9)
    scheduler = Scheduler(SchedulerConfig(4, 2048), BlockPool(80, BLOCK))
    driver = run(scheduler, planned(rows, tmp_path, 64), queued=12)
    assert driver.ran - sum(s.output_length - 1 for s in driver.finished) == fewest(rows)


def test_a_prefix_of_more_than_4096_tokens_runs_once(tmp_path):
    rows = tree(5000, 50, 3, 4, seed=2)
    scheduler = Scheduler(SchedulerConfig(64, 2048), BlockPool(400, BLOCK))
    driver = run(scheduler, planned(rows, tmp_path), queued=192)
    assert driver.ran - sum(s.output_length - 1 for s in driver.finished) == fewest(rows)
