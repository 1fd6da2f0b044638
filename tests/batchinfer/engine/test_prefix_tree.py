"""Planner, feeder, scheduler and cache together run each node of a prefix tree once, however scarce the cache is.

A node's tokens that fill no whole block run again with each of its children: blocks are shared whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from batchinfer.engine.config import WINDOW
from batchinfer.engine.kv_cache import BlockPool
from batchinfer.engine.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.sequence import Sequence
from batchinfer.plan.planner import plan_job
from batchinfer.plan.requests import planned_requests
from batchinfer.request import Request, SamplingParams, TokenIds
from tests.batchinfer.data.small_index import good_row, write_index
from tests.batchinfer.engine.driver import Driver
from tests.kernels.gpu.pairs import pairs_first

BLOCK = 16
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class Tokens:
    """A token store in memory."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.all = np.array([t for row in rows for t in row], np.int32)
        self.offsets = np.cumsum([0, *map(len, rows)]).tolist()

    def read(self, offset: int, count: int) -> TokenIds:
        return self.all[offset : offset + count].copy()


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


def planned(rows: list[list[int]], folder: Path, window: int = WINDOW) -> Iterator[list[Request]]:
    """The windows of requests that the feeder sends."""
    tokens = Tokens(rows)
    text = PARAMS.to_json()
    index = write_index(
        folder / "x",
        [good_row(i, row, 12 if i % 5 else 11, tokens.offsets[i], params=text) for i, row in enumerate(rows)],
    )
    plan = plan_job(index.folder / "index", [], folder / "plan")
    for _, requests in planned_requests(plan, tokens, window):
        yield requests


def fewest(rows: list[list[int]]) -> int:
    """Prompt tokens to run when every distinct whole block runs once. A row's last token always runs."""
    blocks = [
        tuple(row[: at + BLOCK]) for row in rows for at in range(0, (len(row) - 1) // BLOCK * BLOCK, BLOCK)
    ]
    return sum(map(len, rows)) - BLOCK * (len(blocks) - len(set(blocks)))


def run(scheduler: Scheduler, windows: Iterator[list[Request]], queued: int) -> Driver:
    """Feeds as the parent does: at least `queued` in flight while there are more."""
    driver, more = Driver(scheduler), True
    while more or scheduler.waiting or scheduler.running:
        while more and len(scheduler.waiting) + len(scheduler.running) < queued:
            window = next(windows, None)
            more = window is not None
            for request in window or []:
                scheduler.add(Sequence.of(request, 10_000, None, 0.0))
        driver.step()
    return driver


SCARCE, SOME, PLENTY = 1.3, 3.0, 30.0  # memory


@pytest.mark.parametrize(
    ("shape", "room", "budget"),
    pairs_first([(0, 200, 16, 16), (70, 50, 16, 16), (70, 1100, 6, 5)], [SCARCE, SOME, PLENTY], [64, 2048]),
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
    assert driver.ran - outputs == fewest(rows)


def test_the_document_outlives_a_queue_that_runs_dry(tmp_path):
    """Windows of 4 rows, each sent when nothing is left of the one before: the next request is announced."""
    rows = tree(0, 200, 3, 10, seed=5)
    scheduler = Scheduler(SchedulerConfig(64, 2048), BlockPool(60, BLOCK))
    driver = run(scheduler, planned(rows, tmp_path, 4), queued=1)
    outputs = sum(s.output_length - 1 for s in driver.finished)
    assert driver.ran - outputs == fewest(rows)


def test_a_window_border_costs_a_node_of_the_ladder_nothing_and_others_one_run_a_window(
    tmp_path,
):
    """What the ladder cannot tell apart is gathered within a window only."""
    rows = tree(
        70, 50, 16, 16, seed=9
    )  # documents begin behind the ladder's 64 tokens, and end before its 128
    scheduler = Scheduler(SchedulerConfig(4, 2048), BlockPool(80, BLOCK))
    driver = run(scheduler, planned(rows, tmp_path, 64), queued=12)
    ran = driver.ran - sum(s.output_length - 1 for s in driver.finished)
    assert fewest(rows) <= ran <= fewest(rows) + 4 * 16 * 6 * BLOCK
