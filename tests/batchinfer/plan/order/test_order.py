"""The order of rows without shared prefixes, by simulated seconds of the real scheduler."""

from __future__ import annotations

import math
import random

from batchinfer.plan.order.run_order import OUTPUT_WEIGHT
from tests.batchinfer.engine.simulation import GPU, LLAMA_8B, LLAMA_135M, Row, Simulated, simulate


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def mixed(count: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    return [Row(log_uniform(rng, 16, 1024), log_uniform(rng, 8, 256)) for _ in range(count)]


def long_tail(count: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    rows = [Row(rng.randint(50, 400), rng.randint(30, 98)) for _ in range(count)]
    return [*rows, Row(200, 64 * 20)]


def planned(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -(row.prompt + OUTPUT_WEIGHT * row.output))


def on_gpu(rows: list[Row]) -> Simulated:
    return simulate(rows, blocks=20_000, budget=512, cost=LLAMA_8B, peaks=GPU, overhead_s=0.002)


def test_the_planned_order_beats_the_given_one_and_total_length_on_a_mix():
    rows = mixed(128, 7)
    by_total = sorted(rows, key=lambda row: -(row.prompt + row.output))
    plan = on_gpu(planned(rows)).seconds
    assert plan < 0.95 * on_gpu(rows).seconds
    assert plan < 0.95 * on_gpu(by_total).seconds


def test_one_long_answer_is_not_waited_for_alone():
    rows = long_tail(300, 3)
    plan, given = on_gpu(planned(rows)), on_gpu(rows)
    assert plan.steps <= 64 * 20 + 5
    assert given.steps > 1.1 * plan.steps


def test_on_a_cpu_no_order_matters_much():
    rows = mixed(128, 1)
    seconds = [
        simulate(order, blocks=20_000, cost=LLAMA_135M, overhead_s=0.002).seconds
        for order in (rows, planned(rows), sorted(rows, key=lambda row: row.output))
    ]
    assert max(seconds) < 1.02 * min(seconds)
