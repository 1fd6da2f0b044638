"""Tests MXFP4 and int4 experts against references: experts without rows, odd sizes, NaN around operands, bits
of one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.grouped_coded_matmul import grouped_int4_matmul, grouped_mxfp4_matmul
from batchinfer_kernels.gpu.quantized_matmul import mxfp4_matmul, panel_matmul, widen
from batchinfer_kernels.mxfp4 import (
    GROUP,
    grouped_mxfp4_matmul_reference,
    mxfp4_matmul_reference,
    mxfp4_values,
    pack_mxfp4_weight,
    pack_mxfp4_weights,
)
from batchinfer_kernels.quantized_matmul import grouped_int4_matmul_reference, pack_int4_experts
from tests.kernels.gpu.aot import NVIDIA, TARGETS, compile_launch
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.matmul_cases import DTYPES, beside_nan, near, processors_of, random
from tests.kernels.gpu.pairs import each_first, pairs_first
from tests.kernels.gpu.test_matmul_aot import assert_multiplies
from tests.kernels.refused import assert_refused

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")
COUNTS = [(1,), (0, 3, 0), (16, 0, 33, 15, 2, 0, 1), (70, 40)]


def starts_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0)


def stored(experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Return quantised values and exponents."""
    generator = torch.Generator().manual_seed(outputs)
    shape = (experts, outputs, inputs // GROUP)
    codes = torch.randint(0, 256, (*shape[:2], inputs // 2), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
    return codes.to(DEVICE), exponents.to(DEVICE)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("counts", "dtype", "inputs", "activation"),
    pairs_first(COUNTS, DTYPES, [32, 96, 288], [None, "clamped_swiglu"]),
)
def test_experts_with_any_number_of_rows(
    counts: tuple[int, ...], dtype: torch.dtype, inputs: int, activation: Activation | None
) -> None:
    """Rows are read in place and surrounded by NaN."""
    parts, starts = stored(len(counts), 34, inputs), starts_of(counts)
    x, bias = random(sum(counts), inputs, dtype=dtype), random(len(counts), 34, dtype=dtype, seed=2)
    at = torch.arange(len(x), device=DEVICE).flip(0)
    wanted = grouped_mxfp4_matmul_reference(x[at], *parts, starts, bias, activation=activation)
    options: dict[str, Any] = {"activation": activation, "from_rows": at}
    near(grouped_mxfp4_matmul(beside_nan(x), pack_mxfp4_weights(*parts), starts, bias, **options), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_value_with_every_exponent_is_exact(dtype: torch.dtype) -> None:
    """A row of x has a single 1: a result is a weight. Bits equal a weight that was converted before, with
    extreme numbers; overflow gives infinity."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(1, 256, 1)
    exponents = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(1, 256 * 16, 1)
    codes, exponents = codes.to(DEVICE), exponents.to(DEVICE)
    wanted = mxfp4_values(codes, exponents).to(dtype)[0]
    finite = (exponents[0, :, 0] < 253).cpu()  # times 0 they would be no number, and as sums too large
    x = torch.eye(32, device=DEVICE).to(dtype)
    weights, starts = pack_mxfp4_weights(codes[:, finite], exponents[:, finite]), starts_of((32,))
    got = grouped_mxfp4_matmul(x, weights, starts)
    assert torch.equal(got, wanted[finite].T)
    assert float(got.float().abs().amax()) == 6.0 * 2.0**125


def test_a_row_does_not_depend_on_its_batch() -> None:
    parts, counts = stored(3, 34, 288), (40, 0, 90)
    x, weights = random(130, 288, dtype=torch.bfloat16), pack_mxfp4_weights(*parts)
    whole = grouped_mxfp4_matmul(x, weights, starts_of(counts), deterministic=True)
    for row, where in ((0, (1, 0, 0)), (39, (1, 0, 0)), (129, (0, 0, 1))):
        one = grouped_mxfp4_matmul(x[row : row + 1], weights, starts_of(where), deterministic=True)
        assert torch.equal(one, whole[row : row + 1])
    few = grouped_mxfp4_matmul(x[30:60], weights, starts_of((10, 0, 20)), deterministic=True)
    assert torch.equal(few, whole[30:60])


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("counts", "dtype", "inputs", "group", "zeroed"),
    pairs_first(COUNTS, DTYPES, [50, 130, 288], [32, 128], [False, True]),
)
def test_int4_experts_with_any_number_of_inputs(
    counts: tuple[int, ...], dtype: torch.dtype, inputs: int, group: int, zeroed: bool
) -> None:
    """Rows are read in place and surrounded by NaN. A single row has equal bits."""
    generator = torch.Generator().manual_seed(inputs)
    shape = (len(counts), 34, -(-inputs // group))
    codes = torch.randint(-8, 8, (*shape[:2], inputs), generator=generator, dtype=torch.int8)
    scales = 0.01 + torch.rand(shape, generator=generator)
    zeros = torch.randint(-8, 9, shape, generator=generator).float().to(DEVICE) if zeroed else None
    weights = pack_int4_experts(codes.to(DEVICE), scales.to(DEVICE), zeros, group, dtype)
    x, starts = random(sum(counts), inputs, dtype=dtype), starts_of(counts)
    bias = random(len(counts), 34, dtype=dtype, seed=2)
    from_rows = torch.arange(len(x), device=DEVICE).flip(0)
    wanted = grouped_int4_matmul_reference(x[from_rows], weights, starts, bias, activation="silu")
    given: dict[str, Any] = {"bias": bias, "activation": "silu"}
    near(grouped_int4_matmul(beside_nan(x), weights, starts, from_rows=from_rows, **given), wanted)
    given["deterministic"] = True
    whole, last = grouped_int4_matmul(x, weights, starts, **given), len(counts) - 1
    while counts[last] == 0:
        last -= 1
    alone = starts_of(tuple(int(e == last) for e in range(len(counts))))
    assert torch.equal(grouped_int4_matmul(x[-1:], weights, alone, **given), whole[-1:])


def test_wrong_operands_are_refused() -> None:
    weights, odd = pack_mxfp4_weights(*stored(2, 34, 32)), pack_mxfp4_weights(*stored(2, 33, 32))
    given: dict[str, Any] = {"x": random(2, 32), "weights": weights, "starts": starts_of((1, 1))}
    for words, changed in (
        ("x is", {"x": random(2, 64)}),
        ("expected one dtype of float32", {"x": random(2, 32).int()}),
        ("bias is", {"bias": random(2, 33)}),
        ("starts are", {"starts": torch.zeros(2)}),
        ("even number", {"activation": "silu", "weights": odd}),
    ):
        assert_refused(words, grouped_mxfp4_matmul, **{**given, **changed})
    codes, exponents = stored(2, 34, 64)
    for parts in ((codes.char(), exponents), (codes, exponents[:, :, :1]), (codes[0], exponents[0])):
        assert_refused("codes and exponents", pack_mxfp4_weights, *parts)


def launch_experts(
    dtype: str, rows: int, deterministic: bool, activation: Activation | None, int4: bool
) -> None:
    """Launch a product of experts as on a GPU."""
    kind = getattr(torch, dtype)
    x, starts = torch.zeros(rows // 2, 512, dtype=kind), torch.zeros(9, dtype=torch.int64)
    bias, from_rows = torch.zeros(8, 1024, dtype=kind), torch.zeros(rows, dtype=torch.int64)
    options: dict[str, Any] = {"activation": activation, "deterministic": deterministic}
    with processors_of(132):
        if int4:
            scales = torch.ones(8, 1024, 4)
            codes = torch.zeros(8, 1024, 512, dtype=torch.int8)
            coded = pack_int4_experts(codes, scales, scales, 128, kind)
            grouped_int4_matmul(x, coded, starts, bias, from_rows=from_rows, **options)
        else:
            codes = torch.zeros(8, 1024, 256, dtype=torch.uint8)
            weights = pack_mxfp4_weights(codes, torch.zeros(8, 1024, 16, dtype=torch.uint8))
            grouped_mxfp4_matmul(x, weights, starts, bias, from_rows=from_rows, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("target", "rows", "deterministic", "dtype", "int4"),
    [
        *each_first(TARGETS, (16, 4096), (False, True), ("bfloat16",), (False,)),
        *each_first(TARGETS, (16, 4096), (False,), ("bfloat16",), (True,)),
        *each_first(NVIDIA, (16,), (False,), ("float16", "float32"), (False,)),
    ],
)
def test_it_compiles_without_spills(
    target: str, rows: int, deterministic: bool, dtype: str, int4: bool
) -> None:
    arguments = (dtype, rows, deterministic, "clamped_swiglu", int4)
    (kernel,) = (
        found
        for found in compile_launch("tests.kernels.gpu.test_mxfp4:launch_experts", arguments, target)
        if found.kernel == "grouped_coded_matmul_kernel"
    )
    kernel.check(may_wait=True)  # products whose left factor is in registers run in sequence
    if dtype != "float32":
        assert_multiplies(kernel, target, "plain")
    if target in NVIDIA:
        assert ".ftz" not in kernel.ptx, "small numbers on the way become 0"
        assert kernel.wide_loads() >= 1, kernel.summary()


def linear_of(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    codes, exponents = stored(1, outputs, inputs)
    return codes[0], exponents[0]


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("rows", "dtype", "inputs", "activation", "deterministic"),
    pairs_first([1, 16, 37], DTYPES, [32, 96, 288], [None, "silu"], [False, True]),
)
def test_linear_layers_with_any_number_of_rows(
    rows: int, dtype: torch.dtype, inputs: int, activation: Activation | None, deterministic: bool
) -> None:
    parts, packed = linear_of(34, inputs), pack_mxfp4_weight(*linear_of(34, inputs))
    x, bias = random(rows, inputs, dtype=dtype), random(34, dtype=dtype, seed=2)
    wanted = mxfp4_matmul_reference(x, *parts, bias, activation=activation)
    near(mxfp4_matmul(x, packed, bias, activation=activation, deterministic=deterministic), wanted)
    if activation is None:
        room = torch.full((10 * inputs,), float("nan"), dtype=dtype, device=DEVICE)
        near(panel_matmul(x, packed, bias, room), wanted)


def test_a_linear_layer_is_widened_exactly() -> None:
    codes, exponents = linear_of(70, 160)
    panel = torch.empty(30, 160, dtype=torch.bfloat16, device=DEVICE)
    widen(pack_mxfp4_weight(codes, exponents), 20, panel)
    assert torch.equal(panel, mxfp4_values(codes[None], exponents[None])[0, 20:50].to(torch.bfloat16))
    assert_refused("x is", mxfp4_matmul, random(2, 64), pack_mxfp4_weight(codes, exponents))


def launch_linear(rows: int) -> None:
    """Launch a linear layer as on a GPU."""
    codes, exponents = torch.zeros(1024, 256, dtype=torch.uint8), torch.zeros(1024, 16, dtype=torch.uint8)
    weight = pack_mxfp4_weight(codes, exponents)
    with processors_of(132):
        mxfp4_matmul(torch.zeros(rows, 512, dtype=torch.bfloat16), weight, activation="silu")


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("rows", [16, 256])
def test_linear_layers_compile_without_spills(target: str, rows: int) -> None:
    found = compile_launch("tests.kernels.gpu.test_mxfp4:launch_linear", (rows,), target)
    (kernel,) = (each for each in found if "matmul_kernel" in each.kernel)
    kernel.check(may_wait=True)
    assert_multiplies(kernel, target, "plain")
    assert ".ftz" not in kernel.ptx, "small numbers on the way become 0"
