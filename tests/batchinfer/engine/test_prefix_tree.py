"""Tests that planner, feeder, scheduler and cache run each node of a prefix tree once.

The cache may be small, and a node may end anywhere in a block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.order.requests import read_requests
from tests.batchinfer.engine.driver import Driver, distinct_tokens, driver_for
from tests.batchinfer.store.small_index import good_row, write_index
from tests.kernels.gpu.pairs import each_first

BLOCK = 16
ROOTS = ContentRoots(10_000)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def tree(system: int, document: int, documents: int, questions: int, seed: int) -> list[list[int]]:
    """Return shuffled rows: `system` common tokens, a document of about `document` tokens, and a question."""
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


def planned(rows: list[list[int]], folder: Path, batch: int = REQUEST_BATCH) -> Iterator[list[Request]]:
    """Yield the batches of requests that the feeder sends."""
    text = PARAMS.to_json()
    work = [good_row(i, row, 12 if i % 5 else 11, params=text) for i, row in enumerate(rows)]
    index = write_index(folder / "x", work)
    plan = plan_job(index.index_parts, index.tokens, [], folder / "plan", ROOTS)
    for _, requests in read_requests(plan, index.tokens, batch, ROOTS):
        yield requests


def run(batches: Iterator[list[Request]], queued: int = 192, **limits: Any) -> Driver:
    """Feed requests like the driver: keep at least `queued` rows in flight."""
    driver, more = driver_for(**{"size": BLOCK, "seqs": 64, "budget": 2048, **limits}), True
    scheduler = driver.scheduler
    while more or scheduler.waiting or scheduler.running:
        while more and len(scheduler.waiting) + len(scheduler.running) < queued:
            batch = next(batches, None)
            more = batch is not None
            for request in batch or []:
                scheduler.add(Sequence.of(request, ROOTS, None, 0.0))
        driver.step()
    return driver


def prompt_tokens(driver: Driver) -> int:
    """Return the number of prompt tokens that ran."""
    return driver.ran - sum(s.output_length - 1 for s in driver.finished)


SCARCE, SOME, PLENTY = 1.3, 3.0, 30.0  # memory, in longest rows
# An unused block is evicted for tokens of running rows. The next row then copies from a running row instead,
# and recomputes the rest.
MORE = {SCARCE: 1.02, SOME: 1.02, PLENTY: 1.0}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("shape", "room", "budget"),
    each_first([(0, 200, 12, 8), (70, 50, 16, 10), (70, 1100, 4, 4)], [SCARCE, SOME, PLENTY], [64, 2048]),
    ids=str,
)
def test_each_node_runs_once(shape, room, budget, tmp_path):
    rows = tree(*shape, seed=3)
    longest = max(map(len, rows)) + 12
    blocks = int(room * (-(-longest // BLOCK) + 1))
    driver = run(planned(rows, tmp_path), blocks=blocks, budget=budget)
    assert len(driver.finished) == len(rows)
    assert driver.preempted == 0
    assert distinct_tokens(rows) <= prompt_tokens(driver) <= MORE[room] * distinct_tokens(rows)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("shape", "batch", "limits"),
    [
        # Each batch is sent when nothing is left of the one before: the next request is announced
        ((0, 200, 3, 10), 4, {"blocks": 60, "queued": 1}),
        # A border of batches costs nothing: documents start after the same 70 tokens and end before token 128
        ((70, 50, 16, 8), 64, {"blocks": 80, "queued": 12, "seqs": 4}),
        ((5000, 50, 3, 4), REQUEST_BATCH, {"blocks": 400}),
    ],
    ids=["the queue runs dry", "a border of batches", "a prefix of more than 4096 tokens"],
)
def test_batches_cost_nothing(shape, batch, limits, tmp_path):
    rows = tree(*shape, seed=5)
    assert prompt_tokens(run(planned(rows, tmp_path, batch), **limits)) == distinct_tokens(rows)
