"""Quantised values and scales, exact sums, and results for zeros, ties and NaN."""

from __future__ import annotations

import math

import pytest
import torch

from batchinfer_kernels import quantized_linear
from batchinfer_kernels.quantized_linear import (
    hadamard_size,
    hadamard_transform,
    quantize_rows,
    quantize_weight,
    quantized_linear_reference,
)
from tests.kernels.refused import assert_refused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 63), (100, 7), (5, 576)])
def test_codes_are_within_half_a_step(dtype: torch.dtype, rows: int, columns: int) -> None:
    weight = random(rows, columns, dtype=dtype) * torch.logspace(-4, 3, rows)[:, None].to(dtype)
    codes, scales = quantize_weight(weight)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert codes.abs().amax(1).eq(127).all()
    error = (codes * scales[:, None] - weight.float()).abs().amax(1)
    assert error.le(scales * 0.5001).all()


@pytest.mark.parametrize(("columns", "block"), [(1, 1), (6, 2), (96, 32), (576, 64)])
def test_the_hadamard_transform_multiplies_blocks_by_a_matrix(columns: int, block: int) -> None:
    x = random(3, columns, dtype=torch.float32)
    ones = torch.tensor([[bin(i & j).count("1") % 2 for j in range(block)] for i in range(block)])
    matrix = torch.block_diag(*[1.0 - 2.0 * ones] * (columns // block))
    assert hadamard_size(columns) == block
    torch.testing.assert_close(hadamard_transform(x), x @ matrix)


def test_the_hadamard_transform_keeps_products_and_reduces_the_error_of_large_channels() -> None:
    x, weight = random(20, 192, dtype=torch.float32), random(30, 192, dtype=torch.float32, seed=1)
    x[:, 7] *= 50
    exact = x.double() @ weight.double().T
    errors = [
        (quantized_linear_reference(x, *quantize_weight(weight, hadamard), hadamard=hadamard) - exact).norm()
        for hadamard in (False, True)
    ]
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.01 * exact.norm()


def test_ties_go_to_the_even_code() -> None:
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.49999]])
    codes, scales = quantize_rows(row)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 3]]
    assert scales.tolist() == [1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(0, 5, 3), (1, 1, 1), (7, 63, 100), (2, 576, 33)])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_sum_over_codes(
    dtype: torch.dtype, tokens: int, inputs: int, outputs: int, biased: bool
) -> None:
    x, weight = random(tokens, inputs, dtype=dtype), random(outputs, inputs, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if biased else None
    codes, scales = quantize_weight(weight)
    rows, row_scales = quantize_rows(x)
    sums = (rows.long()[:, None] * codes.long()[None]).sum(-1)
    wanted = sums.float() * (row_scales[:, None] * scales) + (0.0 if bias is None else bias.float())
    got = quantized_linear_reference(x, codes, scales, bias)
    assert got.dtype == dtype
    assert torch.equal(got, wanted.to(dtype))


def test_sums_of_the_largest_quantised_values_are_exact() -> None:
    """Above 2^24, float32 sums would be rounded."""
    inputs = 20_001
    codes, scales = torch.full((2, inputs), 127, dtype=torch.int8), torch.ones(2)
    codes[1, 0] = 126
    got = quantized_linear_reference(torch.full((1, inputs), 127.0), codes, scales)
    assert got.long().tolist() == [[322_596_128, 322_596_000]]  # …129 and …002, rounded once


def test_large_weights_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(3, 20), random(50, 20, seed=1)
    codes, scales = quantize_weight(weight)
    whole = quantized_linear_reference(x, codes, scales)
    monkeypatch.setattr(quantized_linear, "OUTPUTS_AT_ONCE", 7)
    assert all(map(torch.equal, quantize_weight(weight), (codes, scales)))
    assert torch.equal(quantized_linear_reference(x, codes, scales), whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_row_becomes_nan_and_no_other_row_does(bad: float, dtype: torch.dtype) -> None:
    codes, scales = quantize_weight(random(5, 8))
    x = random(3, 8, dtype=dtype, seed=1)
    x[1, 3] = bad
    got = quantized_linear_reference(x, codes, scales)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_a_broken_output_becomes_nan_and_no_other_does() -> None:
    weight = random(5, 8)
    weight[2, 0] = math.nan
    got = quantized_linear_reference(random(3, 8, seed=1), *quantize_weight(weight))
    assert got.isnan().any(0).tolist() == [False, False, True, False, False]


def test_rows_too_small_for_a_scale_are_zero() -> None:
    codes, scales = quantize_rows(torch.tensor([[1e-38, -1e-38], [1e-36, -4e-37]]))
    assert codes.tolist() == [[0, 0], [127, -51]]
    assert scales.isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    x, codes, scales = torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.int8), torch.zeros(3)
    for wrong, words in (
        ((x[0], codes, scales), "the weight has 4 columns"),
        ((x[:, :3], codes, scales), "the weight has 4 columns"),
        ((x, codes, scales[:2]), "the weight has 3 rows"),
        ((x, codes, scales, torch.zeros(4)), "the weight has 3 rows"),
        ((x, codes[0], scales), "not a matrix"),
    ):
        assert_refused(words, quantized_linear_reference, *wrong)
    assert_refused("not a matrix of floats", quantize_weight, codes)
