"""Tests that the step budget follows from the roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.schedule.budget import AMORTISED, LEAST, MOST, least_copied, step_tokens
from batchinfer_kernels.cost import Cost, Peaks, StepShape, step_total
from tests.model_costs import llama_cost

SIZES = (30, 576, 1536, 9, 3, 64, 32_000)
SHAPE = llama_cost(*SIZES, 2, 2)
LINEAR = ("qkv", "o", "gate_up", "down")


@pytest.mark.parametrize(
    ("peaks", "weight", "tokens"),
    [
        (Peaks(430e9, 40e9), 2, 2048),  # two CPU cores with AVX512_BF16
        (Peaks(430e9, 40e9, 790e9), 1, 2048),
        (Peaks(150e9, 50e9), 4, 1024),  # the same without bfloat16
        (Peaks(20e9, 40e9), 2, LEAST),
        (Peaks(790e12, 4.3e12), 2, MOST),  # one data-centre GPU
        (Peaks(790e12, 1e9), 2, MOST),
    ],
)
def test_budgets_of_known_hardware(peaks: Peaks, weight: int, tokens: int) -> None:
    assert step_tokens(llama_cost(*SIZES, max(2, weight), weight), peaks, 128, 2048) == tokens


def test_unknown_peaks_leave_the_default() -> None:
    assert step_tokens(SHAPE, None, 256, 2048) == 2048


def test_a_full_batch_leaves_room_for_prompts() -> None:
    assert step_tokens(SHAPE, Peaks(430e9, 40e9), 2000, 2048) == 4000


@given(
    flops=st.floats(1e9, 1e16),
    bandwidth=st.floats(1e9, 1e13),
    weight=st.sampled_from([1, 2, 4]),
    seqs=st.integers(1, 500),
)
def test_weights_are_read_in_a_small_part_of_the_time(
    flops: float, bandwidth: float, weight: int, seqs: int
) -> None:
    shape, peaks = llama_cost(*SIZES, max(2, weight), weight), Peaks(flops, bandwidth)
    tokens = step_tokens(shape, peaks, seqs, 0)
    assert LEAST <= tokens <= max(MOST, 2 * seqs)
    if tokens < MOST:
        costs = shape.step(StepShape(tokens, 0, 0, 0))
        total = step_total({name: costs.get(name, Cost()) for name in LINEAR})
        reading = shape.active_parameters * weight / bandwidth
        assert reading * (AMORTISED - 1) <= total.flops / flops


@pytest.mark.parametrize("peaks", [Peaks(430e9, 40e9), Peaks(790e12, 4.3e12), None])
def test_tokens_are_copied_if_that_is_faster_than_running_them(peaks: Peaks | None) -> None:
    assert least_copied(SHAPE, peaks) == 1
    free = replace(SHAPE, operators=tuple(one for one in SHAPE.operators if one.name == "copy_parts"))
    assert least_copied(free, peaks) == (1 if peaks is None else None)
