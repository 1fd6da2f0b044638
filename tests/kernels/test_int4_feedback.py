"""Tests quantised values whose errors compensate each other, and the outputs that they give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer_kernels.int4_feedback import output_error, round_with_feedback
from batchinfer_kernels.int4_linear import quantize_groups
from tests.examples import examples
from tests.kernels.refused import assert_refused


def values(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    return codes.double() * scales.double().repeat_interleave(group, 1)[:, : codes.shape[1]]


def one_by_one(weight: Tensor, scales: Tensor, products: Tensor, group: int) -> Tensor:
    """GPTQ as published: after each column, its row and column are removed from the inverse."""
    wide = products.double()
    inverse = torch.linalg.inv(wide + 0.01 * wide.diagonal().mean() * torch.eye(len(wide)).double())
    left, codes = weight.double().clone(), torch.zeros_like(weight, dtype=torch.int8)
    steps = scales.double().repeat_interleave(group, 1)
    for at in wide.diagonal().argsort(descending=True, stable=True).tolist():
        codes[:, at] = (left[:, at] / steps[:, at]).round().clamp(-8, 7).to(torch.int8)
        error = (left[:, at] - codes[:, at] * steps[:, at]) / inverse[at, at]
        left -= torch.outer(error, inverse[at])
        inverse = inverse - torch.outer(inverse[:, at], inverse[at]) / inverse[at, at]
        inverse[at], inverse[:, at] = 0.0, 0.0
        inverse[at, at] = 1.0
    return codes


def drawn(outputs: int, inputs: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a weight, and correlated inputs, some of them much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator) * torch.rand(inputs, generator=generator).exp()
    x = torch.randn(tokens, inputs, generator=generator) @ mix
    return torch.randn(outputs, inputs, generator=generator), x


@given(
    seed=st.integers(0, 2**16), inputs=st.sampled_from([8, 40, 130, 200]), group=st.sampled_from([8, 16, 32])
)
@settings(max_examples=examples(15, 100), deadline=None)
def test_it_is_gptq(seed: int, inputs: int, group: int) -> None:
    weight, x = drawn(24, inputs, 3 * inputs, seed)
    products = x.T @ x
    _, scales = quantize_groups(weight, group)
    found = round_with_feedback(weight, scales, products, group)
    wanted = one_by_one(weight, scales, products, group)
    # A value between two quantised values may be rounded to the other one, and then changes the rest of its row
    assert float((found == wanted).all(1).float().mean()) > 0.8


@pytest.mark.parametrize("tokens", [4, 1000])
def test_outputs_change_less_than_by_rounding(tokens: int) -> None:
    """Also with fewer tokens than inputs, where the inverse needs damping."""
    weight, x = drawn(64, 256, tokens, 3)
    products = x.T @ x
    rounded, scales = quantize_groups(weight, 32)
    found = round_with_feedback(weight, scales, products, 32)
    errors = [values(codes, scales, 32) - weight for codes in (rounded, found)]
    plain, fed = (float(output_error(off, products.double())) for off in errors)
    assert fed < plain / 2
    assert fed == pytest.approx(float((x.double() @ errors[1].T).square().sum()), rel=1e-3)


def test_inputs_that_were_never_seen_are_rounded() -> None:
    weight, x = drawn(16, 64, 300, 5)
    x[:, 10:30] = 0.0
    rounded, scales = quantize_groups(weight, 32)
    found = round_with_feedback(weight, scales, x.T @ x, 32)
    assert torch.equal(found[:, 10:30], rounded[:, 10:30])
    assert torch.equal(round_with_feedback(weight, scales, torch.zeros(64, 64), 32), rounded)


def test_what_does_not_fit_is_refused() -> None:
    weight, scales = torch.randn(4, 64), torch.ones(4, 2)
    assert_refused("products", round_with_feedback, weight, scales, torch.zeros(63, 63), 32)
    assert_refused("scales", round_with_feedback, weight, scales, torch.zeros(64, 64), 16)
    assert_refused("finite", round_with_feedback, weight, scales, torch.full((64, 64), torch.nan), 32)
