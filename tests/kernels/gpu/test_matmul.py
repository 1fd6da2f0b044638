"""Compares all ways to multiply with references: odd sizes, NaN around operands, and one row's bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from batchinfer_kernels.block_fp8_matmul import quantize_groups_fp8 as quantize_groups_reference
from batchinfer_kernels.gpu import matmul_tiles
from batchinfer_kernels.gpu.block_fp8_matmul import block_fp8_matmul
from batchinfer_kernels.gpu.fp8_matmul import fp8_matmul
from batchinfer_kernels.gpu.int8_matmul import MAX_INPUTS, int8_matmul
from batchinfer_kernels.gpu.matmul import matmul
from batchinfer_kernels.gpu.matmul_tiles import choose_split
from batchinfer_kernels.gpu.quantize_rows import quantize_groups_fp8
from batchinfer_kernels.quantized_linear import quantize_weight
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.matmul_cases import DTYPES, WAYS, beside_nan, int8_reference, near, random, way
from tests.kernels.gpu.pairs import every_pair, pairs_first
from tests.kernels.refused import assert_refused
from tests.kernels.rounded_weights import quantize_blocks_fp8

ROWS = tuple((rows, 130, 70) for rows in (1, 15, 16, 17, 33))
FLOATS = tuple(name for name in WAYS if name != "int8")  # ways whose sums are rounded
pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def check(
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    biased: bool = True,
    deterministic: bool = False,
    **options: Any,
) -> None:
    """Compare a product with its reference; operands are surrounded by NaN.

    Args:
        sizes: rows, inputs, outputs.
    """
    rows, inputs, outputs = sizes
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    multiply = way(name, beside_nan(weight) if name == "plain" else weight)
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=2) if biased else None
    fixed = {"deterministic": True} if deterministic else {}
    near(multiply(beside_nan(x), bias, **fixed, **options), multiply.wanted(x, bias, **options), name)


@pytest.mark.sample(27)
@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "biased"),
    every_pair(WAYS, DTYPES, [(3, 1, 1), (5, 63, 100), (7, 1100, 34), (66, 128, 64), *ROWS], [False, True]),
)
def test_odd_sizes_in_every_dtype(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int], biased: bool
) -> None:
    check(name, dtype, sizes, biased)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [65, 97, 129])
def test_segments_of_any_number_of_tiles_are_added_up(rows: int) -> None:
    """3, 4 and 5 tiles of 32 rows, for inputs that do not start at multiples of 16 bytes."""
    check("plain", torch.float32, (rows, 1101, 34), biased=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows", "size"),
    every_pair(
        list(product(WAYS, DTYPES)),
        [1, 31, 64, 65, 129, 300],
        [(64, 128), (100, 1), (1, 100), (1537, 258), (4096, 40)],
    ),
    ids=str,
)
def test_sizes_swept(kind: tuple[str, torch.dtype], rows: int, size: tuple[int, int]) -> None:
    """All ways and dtypes with all rows and with all sizes, and all rows with all sizes in some ways."""
    for deterministic in {False, kind[0] != "int8"}:
        check(*kind, (rows, *size), deterministic=deterministic)


@pytest.mark.parametrize(
    ("name", "dtype", "activation", "inputs"),
    pairs_first(
        ["plain", "int4_128", "int8"],
        [torch.float16, torch.bfloat16],
        ["silu", "gelu", "gelu_tanh", "clamped_swiglu"],
        [50, 1100],
    ),
)
def test_a_gated_layer_rounds_once(name: str, dtype: torch.dtype, activation: str, inputs: int) -> None:
    """Sums are whole (50 inputs) or made of segments (1100)."""
    check(name, dtype, (5, inputs, 74), activation=activation)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WAYS)
def test_logits_are_float32(name: str) -> None:
    check(name, torch.bfloat16, (3, 96, 50), biased=False, out_dtype=torch.float32)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WAYS)
def test_no_rows_and_no_outputs(name: str) -> None:
    multiply = way(name, random(50, 96, dtype=torch.bfloat16, seed=1))
    assert multiply(random(0, 96, dtype=torch.bfloat16)).shape == (0, 50)
    assert matmul(random(3, 8), random(0, 8)).shape == (3, 0)


def test_no_inputs_leave_the_bias() -> None:
    assert (
        matmul(random(3, 0), random(5, 0), torch.arange(5.0, device=DEVICE)).tolist()
        == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3
    )


def test_quantised_weights_may_be_strided() -> None:
    codes, scales = quantize_weight(random(37, 200, seed=1))
    wide = torch.full((37, 230), 127, dtype=torch.int8, device=DEVICE)
    wide[:, 3:203] = codes
    x = random(5, 200)
    assert torch.equal(int8_matmul(x, wide[:, 3:203], scales), int8_matmul(x, codes, scales))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", WAYS)
def test_a_broken_row_breaks_no_other(name: str) -> None:
    multiply = way(name, random(37, 200, dtype=torch.bfloat16, seed=1))
    x = random(5, 200, dtype=torch.bfloat16)
    whole = multiply(x)
    x[2, 7] = float("nan")
    got = multiply(x)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_int8_equals_the_cpu(dtype: torch.dtype, activation: Any) -> None:
    """Bit by bit: sums of integers are exact, and later steps round like the reference."""
    for rows, inputs, hadamard in ((1, 600, True), (21, 600, False), (5, 8256, True)):
        coded = quantize_weight(random(130, inputs, seed=1), hadamard)
        x, bias = random(rows, inputs, dtype=dtype), random(130, dtype=dtype, seed=2)
        options = {"activation": activation, "hadamard": hadamard}
        got = int8_matmul(x, *coded, bias, **options)
        wanted = int8_reference(x, *coded, bias, **options)
        if activation is None:
            assert torch.equal(got, wanted)
        else:
            near(got, wanted)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 1), (5, 127), (3, 2049), (2, 4500)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_are_quantised_as_the_reference_does(rows: int, inputs: int, dtype: torch.dtype) -> None:
    x = random(rows, inputs, dtype=dtype) * 10
    x[0, :128] = 0
    x[-1, -1] = float("inf")
    for given in (x, beside_nan(x)):
        codes, scales = quantize_groups_fp8(given)
        wanted, wanted_scales = quantize_groups_reference(x)
        torch.testing.assert_close(scales, wanted_scales, atol=0, rtol=0, equal_nan=True)
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


def test_block_scales_dequantise_as_in_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # slow to import

    weight = quantize_blocks_fp8(random(256, 384, seed=1))
    whole = Fp8Dequantize(None)._dequantize_one(weight.codes.cpu(), weight.scales.cpu())
    x = torch.eye(384, device=DEVICE)
    torch.testing.assert_close(block_fp8_matmul(x, weight).T.cpu(), whole.float(), rtol=1e-6, atol=0)


def test_int8_sums_beyond_float32_are_exact() -> None:
    codes = torch.full((2, 20_001), 127, dtype=torch.int8, device=DEVICE)
    codes[1, 0] = 126
    got = int8_matmul(torch.full((1, 20_001), 127.0, device=DEVICE), codes, torch.ones(2, device=DEVICE))
    assert got.long().tolist() == [[322_596_128, 322_596_000]]  # …129 and …002, rounded once


def most_negative(inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, quantised values and scales."""
    codes = torch.full((1, inputs), -128, dtype=torch.int8, device=DEVICE)
    return torch.full((1, inputs), 127.0, device=DEVICE), codes, torch.ones(1, device=DEVICE)


def test_int8_sums_that_may_overflow_are_refused() -> None:
    assert_refused("overflow", int8_matmul, *most_negative(MAX_INPUTS + 1))


@pytest.mark.slow
def test_the_largest_int8_sum_does_not_overflow() -> None:
    assert int8_matmul(*most_negative(MAX_INPUTS)).tolist() == [[-128.0 * 127 * MAX_INPUTS]]


SHORT_AND_LONG = [  # every way of multiplying with few inputs; with many, two of them, and all in the whole sweep
    *((name, torch.bfloat16, 96) for name in FLOATS),
    *((name, torch.bfloat16, 1100) for name in ("plain", "int4_128")),
    *(("plain", dtype, 1100) for dtype in (torch.float32, torch.float16)),
    *(pytest.param(name, torch.bfloat16, 1100, marks=pytest.mark.slow) for name in FLOATS[2:]),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "dtype", "inputs"), SHORT_AND_LONG)
def test_a_row_does_not_depend_on_its_batch(name: str, dtype: torch.dtype, inputs: int) -> None:
    """Alone, in a small batch, at any position, and in a batch that sums segments in turn."""
    multiply = way(name, random(70, inputs, dtype=dtype, seed=1))
    x, bias = random(140, inputs, dtype=dtype), random(70, dtype=dtype, seed=2)
    options: dict[str, Any] = {"deterministic": True, "out_dtype": torch.float32}
    whole = multiply(x, bias, **options)
    order = torch.randperm(140, generator=torch.Generator().manual_seed(5))
    for rows in (*(torch.arange(*ends) for ends in ((1,), (139, 140), (3, 20), (64, 129), (7, 136))), order):
        assert torch.equal(multiply(x[rows], bias, **options), whole[rows])


def test_a_deterministic_split_is_the_weights() -> None:
    """Tile and segments are equal for any number of rows and any GPU."""
    for kind, aligned in product(("half", "wide", "coded", "fp8", "block_fp8"), (True, False)):
        few, many = (choose_split(kind, 300, rows, 4096, True, 1, aligned=aligned) for rows in (1, 4096))
        assert (few.tiles, few.segment, few.segments) == (many.tiles, many.segment, many.segments)
        assert few.segments > 1
        assert few.splits == few.segments
        assert many.splits == 1
        assert few == choose_split(kind, 300, 1, 4096, True, 999, aligned=aligned)


def test_few_programs_are_split_and_many_are_not() -> None:
    assert choose_split("half", 4096, 1, 4096, False, 132).splits > 1
    assert choose_split("half", 150_000, 1, 4096, False, 132).splits == 1
    assert choose_split("half", 4096, 4096, 4096, False, 132).splits == 1
    assert choose_split("half", 64, 1, 500, False, 132).splits == 1


@pytest.mark.parametrize("kind", list(matmul_tiles._TILES))
def test_segments_are_whole_tiles_and_cover_the_inputs(kind: Any) -> None:
    for outputs, rows, inputs in ((1, 1, 1), (576, 3, 576), (4096, 64, 14336), (300, 5000, 4100)):
        for deterministic in (False, True):
            split = choose_split(kind, outputs, rows, inputs, deterministic, 132)
            assert split.segment % split.tiles.inputs == 0
            assert split.segments == -(-inputs // split.segment)
            assert split.splits in (1, split.segments)


def test_wrong_operands_are_refused() -> None:
    x, weight = random(2, 3), random(4, 3)
    assert_refused("the weight", matmul, x, random(4, 5))
    assert_refused("the weight", matmul, x[0], weight)
    assert_refused("stride", matmul, random(3, 2).T, weight)
    assert_refused("expected one dtype", matmul, x, weight.half())
    assert_refused("the weight has 4 rows", matmul, x, weight, bias=x[0])
    assert_refused("even number", matmul, x, weight[:3], activation="silu")
    assert_refused("or float32", matmul, x, weight, out_dtype=torch.float16)


def test_blocks_that_do_not_fit_are_refused() -> None:
    weight = quantize_blocks_fp8(random(4, 300))
    x = random(2, 300)
    for change, words in (
        ({"codes": weight.codes.float()}, "float8_e4m3fn"),
        ({"scales": weight.scales[:, :2]}, "scales are"),
        ({"lines": weight.lines[:3]}, "the weight has 4 rows"),
    ):
        assert_refused(words, block_fp8_matmul, x, replace(weight, **change))


def test_wrong_quantised_operands_are_refused() -> None:
    codes, scales = quantize_weight(random(4, 3))
    assert_refused("float8_e4m3fn", fp8_matmul, random(2, 3), codes, scales)
    assert_refused("scales", int8_matmul, random(2, 3), codes, scales[:3])
