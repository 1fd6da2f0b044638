"""Compares products of rows sorted by expert with their reference.

Experts without rows, odd sizes, NaN around operands, and one row's bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.experts import combine_reference
from batchinfer_kernels.fp8_matmul import FP8, quantize_rows_fp8
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu import fp8_matmul as fp8_module
from batchinfer_kernels.gpu.combine import combine
from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul, tile_ends
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.quantized_linear import quantize_weight
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.matmul_cases import DTYPES, beside_nan, near, random
from tests.kernels.gpu.pairs import each_first, pairs_first
from tests.kernels.refused import assert_refused
from tests.kernels.rounded_weights import quantize_blocks_fp8

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def starts_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0)


def check(*operands: Any, **options: Any) -> None:
    near(grouped_matmul(*operands, **options), grouped_matmul_reference(*operands, **options))


def weights_of(experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return random(experts, outputs, inputs, dtype=dtype, seed=1)


COUNTS = [(1,), (0, 3, 0), (0, 0, 17, 1, 0), (16, 0, 33, 15, 2, 0, 1), (70, 40)]


@pytest.mark.parametrize(("counts", "dtype", "activation"), pairs_first(COUNTS, DTYPES, [None, "silu"]))
def test_experts_with_any_number_of_rows(
    counts: tuple[int, ...], dtype: torch.dtype, activation: Activation | None
) -> None:
    weight = weights_of(len(counts), 34, 63, dtype)
    x, bias = random(sum(counts), 63, dtype=dtype), random(len(counts), 34, dtype=dtype, seed=2)
    check(x, weight, starts_of(counts), bias if activation else None, activation=activation)


@pytest.mark.sample(2)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_per_block(dtype: torch.dtype, activation: Activation | None) -> None:
    """Numbers of outputs and inputs are no multiples of a block. Any order of rows gives equal bits."""
    counts, each = (0, 19, 1, 0, 4), [quantize_blocks_fp8(random(34, 300, seed=e), 16) for e in range(5)]
    codes = torch.stack([weight.codes.view(torch.uint8) for weight in each]).view(FP8)
    x, bias = random(7, 300, dtype=dtype), random(5, 34, dtype=dtype, seed=2)
    from_rows = torch.arange(24, device=DEVICE) * 5 % 7
    scales = torch.stack([weight.scales for weight in each])
    options: dict[str, Any] = {"scales": scales, "lines": each[0].lines, "activation": activation}
    wanted = grouped_matmul_reference(x[from_rows], codes, starts_of(counts), bias, **options)
    for how in (False, True):
        given = {"from_rows": from_rows, "deterministic": how}
        got = grouped_matmul(x, codes, starts_of(counts), bias, **given, **options)
        near(got, wanted, "block_fp8")
    whole = grouped_matmul(x[from_rows], codes, starts_of(counts), bias, deterministic=True, **options)
    one = grouped_matmul(
        x[from_rows[19:20]], codes, starts_of((0, 0, 1, 0, 0)), bias, deterministic=True, **options
    )
    assert torch.equal(one, whole[19:20])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": None}, "without scales"),
        ({"lines": torch.zeros(5, dtype=torch.int32)}, "the weight has 34 rows"),
        ({"scales": torch.zeros(2, 3, 2)}, "scales are"),
    ],
)
def test_scales_of_blocks_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    weight = quantize_blocks_fp8(random(34, 300), 16)
    given: dict[str, Any] = {"scales": weight.scales[None], "lines": weight.lines, **change}
    codes = weight.codes[None].float() if given["scales"] is None else weight.codes[None]
    assert_refused(words, grouped_matmul, random(2, 300), codes, starts_of((2,)), **given)


def test_no_rows_at_all() -> None:
    weight = weights_of(3, 8, 16, torch.float32)
    assert grouped_matmul(random(0, 16), weight, starts_of((0, 0, 0))).shape == (0, 8)


@pytest.mark.parametrize("activation", [None, "gelu_tanh", "clamped_swiglu"])
def test_quantised_experts(activation: Activation | None) -> None:
    counts = (0, 19, 1, 0, 4)
    weight = random(5 * 34, 70, seed=1)
    codes, scales = (part.view(5, 34, *part.shape[1:]) for part in quantize_weight(weight))
    x, bias = random(24, 70, dtype=torch.bfloat16), random(5, 34, dtype=torch.bfloat16, seed=2)
    options: dict[str, Any] = {"scales": scales, "activation": activation}
    got = grouped_matmul(x, codes, starts_of(counts), bias, **options)
    wanted = grouped_matmul_reference(x, codes, starts_of(counts), bias, **options)
    if activation is None:
        assert torch.equal(got, wanted)
    near(got, wanted)


@pytest.mark.parametrize("quantize", [None, quantize_weight, quantize_rows_fp8])
def test_rows_are_read_in_place(quantize: Any) -> None:
    counts, from_rows = (3, 0, 5), torch.tensor([4, 0, 2, 3, 3, 1, 0, 4], device=DEVICE)
    x, weight = random(5, 40), weights_of(3, 6, 40, torch.float32)
    more: dict[str, Any] = {}
    if quantize is not None:
        codes, scales = quantize(weight.flatten(0, 1))
        weight, more = codes.view(weight.shape), {"scales": scales.view(3, 6)}
    wanted = grouped_matmul_reference(x[from_rows], weight, starts_of(counts), **more)
    for how in (False, True):
        given = {"from_rows": from_rows, "deterministic": how}
        got = grouped_matmul(x, weight, starts_of(counts), **given, **more)
        near(got, wanted, "fp8" if quantize is quantize_rows_fp8 else "")


def test_quantised_values_that_a_gpu_cannot_multiply_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = quantize_rows_fp8(random(6, 40))
    monkeypatch.setattr(fp8_module, "architecture", lambda: "80")
    with pytest.raises(ValueError, match=r"needs compute capability 8\.9 or newer, this GPU has 8\.0"):
        grouped_matmul(random(2, 40), codes[None], starts_of((2,)), scales=scales[None])


def test_nothing_outside_the_operands_is_read() -> None:
    counts = (2, 0, 7)
    x, weight = random(9, 37), weights_of(3, 10, 37, torch.float32)
    weight[1] = float("nan")  # an expert without rows
    check(beside_nan(x), weight, starts_of(counts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """The number of its expert's rows and other experts' rows have no effect."""
    weight = weights_of(4, 70, 200, dtype)
    x = random(300, 200, dtype=dtype)
    whole = grouped_matmul(x, weight, starts_of((0, 150, 149, 1)), deterministic=True)
    for first, last in ((0, 1), (100, 163), (149, 151), (290, 300)):
        counts = tuple(
            max(0, min(last, end) - max(first, begin))
            for begin, end in ((0, 0), (0, 150), (150, 299), (299, 300))
        )
        part = grouped_matmul(x[first:last], weight, starts_of(counts), deterministic=True)
        assert torch.equal(part, whole[first:last])


def test_tiles_of_experts() -> None:
    assert tile_ends(starts_of((0, 1, 16, 17, 0)), 16).tolist() == [0, 1, 2, 4, 4]


@pytest.mark.parametrize(("dtype", "sizes"), each_first(DTYPES, [(1, 1, 1), (7, 3, 100), (2, 8, 1030)]))
def test_combine(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    tokens, chosen, width = sizes
    made, weights = random(tokens * chosen, width, dtype=dtype), random(tokens, chosen, seed=3)
    order = torch.randperm(tokens * chosen, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(combine(made, order.argsort(), weights), combine_reference(made, order, weights))


def test_wrong_operands_are_refused() -> None:
    made, order, weights = random(6, 4), torch.arange(6, device=DEVICE), random(3, 2)
    for wrong in ((made, order[:5], weights), (made, order, weights[:2]), (made[:, 0], order, weights)):
        assert_refused("results", combine, *wrong)
