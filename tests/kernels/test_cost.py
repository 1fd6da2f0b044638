"""Costs calculated by hand, and the peak that bounds each operation."""

from __future__ import annotations

import pytest

from batchinfer_kernels.cost import (
    Cost,
    Peaks,
    StepShape,
    linear_cost,
    roofline_seconds,
    step_total,
)
from tests.model_costs import llama_cost

PEAKS = Peaks(1000.0, 100.0)
INT8 = Peaks(1000.0, 100.0, 4000.0)
SHAPE = llama_cost(2, 64, 128, 4, 2, 16, 1000, 2, 2)
QUANTIZED = llama_cost(2, 64, 128, 4, 2, 16, 1000, 2, 1)
STEP = StepShape(tokens=300, sampled=3, pairs=90_000, kv_tokens=600)
LINEAR = ("qkv", "o", "gate_up", "down", "lm_head")


def test_the_larger_of_computing_and_moving_bounds() -> None:
    assert Cost(2000, 100).seconds(PEAKS) == 2.0
    assert Cost(100, 2000).seconds(PEAKS) == 20.0


def test_int8_operations_have_their_own_peak_and_add_to_the_others() -> None:
    cost = Cost(flops=5000, bytes=0, coded_ops=4000)
    assert cost.seconds(INT8) == 2.0
    assert cost.seconds(PEAKS) == 5.0, "without a peak of their own they count as the others"
    assert Cost(5000, 0).seconds(INT8) == 5.0


def test_sums_keep_arithmetic_separate() -> None:
    total = Cost(10, 20, 5) + Cost(1, 2) * 3
    assert total == Cost(13, 26, 5)
    assert Cost(2, 3, 1) * 4 == Cost(8, 12, 4)


def test_the_fastest_peak() -> None:
    assert (PEAKS.fastest, INT8.fastest, Peaks(10.0, 1.0, 5.0).fastest) == (1000.0, 4000.0, 10.0)


def test_only_the_linear_layers_of_a_quantised_model_change() -> None:
    plain, quantized = SHAPE.step(STEP), QUANTIZED.step(STEP)
    assert list(plain) == list(quantized)
    for name in plain:
        if name in LINEAR:
            assert quantized[name].coded_ops == plain[name].flops
            assert quantized[name].bytes < plain[name].bytes
        else:
            assert quantized[name] == plain[name]
    assert step_total(plain).coded_ops == 0
    assert plain["lm_head"] == linear_cost(3, 64, 1000, 2, 2)


def test_the_roofline_of_a_quantised_model_uses_the_int8_peak() -> None:
    """With unlimited bandwidth: the linear layers at four times the peak, the others unchanged."""
    free = Peaks(1e6, 1e30), Peaks(1e6, 1e30, 4e6)
    costs = QUANTIZED.step(STEP)
    integer = sum(cost.coded_ops for cost in costs.values())
    saved = roofline_seconds(costs, free[0]) - roofline_seconds(costs, free[1])
    assert saved == pytest.approx(integer / 1e6 * 3 / 4)
    plain = SHAPE.step(STEP)
    assert roofline_seconds(plain, free[0]) == roofline_seconds(plain, free[1])


def test_useful_flops_do_not_depend_on_how_weights_are_stored() -> None:
    assert SHAPE.model_flops(STEP) == QUANTIZED.model_flops(STEP)
    assert (SHAPE.quantized, QUANTIZED.quantized) == (False, True)
