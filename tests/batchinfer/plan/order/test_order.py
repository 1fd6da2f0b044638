"""The order of rows without shared prefixes, by simulated seconds of the real scheduler."""

from __future__ import annotations

import math
import random

from batchinfer.plan.order.run_order import OUTPUT_WEIGHT
from tests.batchinfer.engine.simulation import GPU, LLAMA_8B, Row, simulate


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def mixed(count: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    return [Row(log_uniform(rng, 16, 1024), log_uniform(rng, 8, 256)) for _ in range(count)]


def planned(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -(row.prompt + OUTPUT_WEIGHT * row.output))


def seconds(rows: list[Row]) -> float:
    return simulate(rows, blocks=20_000, budget=512, cost=LLAMA_8B, peaks=GPU, overhead_s=0.002).seconds


def test_the_planned_order_beats_the_given_one_and_total_length_on_a_mix():
    rows = mixed(128, 7)
    by_total = sorted(rows, key=lambda row: -(row.prompt + row.output))
    assert seconds(planned(rows)) < 0.95 * min(seconds(rows), seconds(by_total))
