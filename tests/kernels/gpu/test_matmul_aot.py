"""Compiles matrix products, including experts, for GPUs: nothing spills, tensor cores multiply, and loads are
wide."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul
from tests.examples import first_of
from tests.kernels.gpu.aot import NVIDIA, STACK_LIMIT, TARGETS, Compiled, compile_launch
from tests.kernels.gpu.matmul_cases import processors_of
from tests.kernels.gpu.pairs import each_first, every_pair

LAUNCH = "tests.kernels.gpu.matmul_cases:launch_way"
PROCESSORS = 132
WAYS = ("plain", "int4_32", "int4_64_zeros", "int4_128", "fp8", "block_fp8", "int8")
FLOAT8 = ("fp8", "block_fp8")
SEVERAL = ("plain", "int4_64_zeros", *FLOAT8, "int8")
WIDENED = ("int4_32", "int4_64", "int4_64_zeros", "int4_128")
FEW, MANY = 8, 600
ADDRESSES_PUT_ASIDE = 160  # bytes of stack
ALL_ROWS = (FEW, 32, 64, 256, MANY)
# Outputs, inputs. ODD: no whole tiles, nothing at multiples of 16 bytes. DEEP: of several segments. RANKS: of a rank's
# part of the tokens
EVEN, ODD, DEEP, RANKS = (1024, 512), (1026, 515), (1024, 2048), (1025, 512)
# The instruction that multiplies floats of 16 bits, float8 and int8, in PTX, SASS (9.0) or amdgcn
_AMPERE = r"\bmma\.sync\S*\.f16|\bmma\.sync\S*\.bf16"
MULTIPLIES = {
    "sm_80": (_AMPERE, None, r"\bmma\.sync\S*\.s8"),
    "sm_89": (_AMPERE, r"\bmma\.sync\S*\.e4m3", r"\bmma\.sync\S*\.s8"),
    "sm_90": (r"\bHGMMA\b", r"\bQGMMA\b", r"\bIGMMA\b"),
    "sm_100": (r"\btcgen05\.mma\S*kind::f16", r"\btcgen05\.mma\S*kind::f8f6f4", r"\bmma\.sync\S*\.s8"),
    "gfx942": (r"\bv_mfma_f32\S*_b?f16", None, r"\bv_mfma_i32\S*_i8"),
}


def may_wait(way: str, rows: int) -> bool:
    """Return True if products on compute capability 9.0 are known to run in sequence.

    This concerns values that are converted in registers, and float8 in tiles of few rows, which are bound by
    reading weights.
    """
    return way in WIDENED or (way == "fp8" and rows <= 32)


def can(target: str, way: str) -> bool:
    return way not in FLOAT8 or MULTIPLIES[target][1] is not None


def compiled(
    target: str,
    way: str,
    rows: int,
    sizes: tuple[int, int] = EVEN,
    *,
    dtype: str = "bfloat16",
    deterministic: bool = False,
    activation: str | None = None,
    processors: int = 1,
    stack: int = STACK_LIMIT,
) -> Compiled:
    """Return the compiled product, after checking all other kernels of the launch."""
    arguments = (way, dtype, rows, *sizes, deterministic, activation, processors)
    found = compile_launch(LAUNCH, arguments, target)
    for kernel in found:
        kernel.check(may_wait(way, rows), stack)
    (matmul,) = [kernel for kernel in found if kernel.kernel.removeprefix("_coded_") == "matmul_kernel"]
    if dtype != "float32":
        assert_multiplies(matmul, target, way)
    if target.startswith("sm_") and sizes != ODD:
        # Of float32 a tile has two pieces of the weight and two of x, or four and one, in each of three stages
        assert_reads_wide(matmul, 12 if dtype == "float32" else 16)
    return matmul


def assert_multiplies(kernel: Compiled, target: str, way: str) -> None:
    floats, float8, integers = MULTIPLIES[target]
    pattern = {**dict.fromkeys(FLOAT8, float8), "int8": integers}.get(way, floats)
    assert pattern is not None
    assert re.search(pattern, kernel.sass if target == "sm_90" else kernel.ptx), kernel.summary()


def assert_reads_wide(kernel: Compiled, least: int) -> None:
    """Assert wide loads of all weights. A piece of x with 32 inputs and 16 rows has only 8 bytes per thread."""
    copies = re.findall(r"\bLDGSTS\S*", kernel.sass)
    narrow = [copy for copy in copies if "128" not in copy]
    assert kernel.wide_loads() >= least, kernel.summary()
    assert len(narrow) <= len(copies) // 2, f"{kernel.summary()}: {narrow}"


def assert_leaves_tiles_in_flight(kernel: Compiled) -> None:
    """Assert that the loop waits only for the oldest tile's two copies."""
    waits = [int(count) for count in re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.ptx)]
    assert waits, kernel.summary()
    assert waits[0] >= 2, f"{kernel.summary()}: {waits}"


@pytest.mark.parametrize(
    ("target", "way", "rows"),
    first_of([("sm_90", "plain", FEW), ("sm_90", "int8", MANY), *product(TARGETS, SEVERAL, (FEW, MANY))], 2),
)
def test_few_and_many_rows(target: str, way: str, rows: int) -> None:
    if can(target, way):
        compiled(target, way, rows)
    else:
        with pytest.raises(RuntimeError, match="float8_e4m3fn"):
            compiled(target, way, rows)


@pytest.mark.slow
def test_products_that_may_wait_do() -> None:
    """Otherwise the exception is no longer needed."""
    for way in ("fp8", "int4_64_zeros"):
        assert compiled("sm_90", way, FEW).losses


@pytest.mark.parametrize(
    ("target", "rows", "deterministic"),
    first_of(
        [("sm_90", FEW, True), *product(("sm_89", "sm_90", "sm_100"), (FEW, 64, MANY), (False, True))], 1
    ),
)
def test_scales_of_blocks_leave_tiles_in_flight(target: str, rows: int, deterministic: bool) -> None:
    found = compiled(target, "block_fp8", rows, deterministic=deterministic, activation="silu")
    assert_leaves_tiles_in_flight(found)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100"])
def test_scales_of_blocks_in_segments(target: str) -> None:
    """On 9.0, a tile's sums of all segments and of the current one fill the registers.

    Addresses are put aside, and read again once per segment of at least 512 inputs.
    """
    stack = ADDRESSES_PUT_ASIDE if target == "sm_90" else STACK_LIMIT
    compiled(
        target,
        "block_fp8",
        MANY,
        DEEP,
        deterministic=True,
        activation="silu",
        processors=PROCESSORS,
        stack=stack,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tile", "given", "dtype"),
    every_pair(
        [(target, way) for target, way in product((*TARGETS, "sm_89"), WAYS) if can(target, way)],
        [*((rows, False) for rows in ALL_ROWS), (FEW, True), (MANY, True)],
        [*product((EVEN, ODD, DEEP), (None, "silu")), (RANKS, None)],
        ["bfloat16", "float16", "float32"],
    ),
    ids=str,
)
def test_sweep(
    kind: tuple[str, str], tile: tuple[int, bool], given: tuple[tuple[int, int], str | None], dtype: str
) -> None:
    """Inputs of the choice of tiles in full, with all sizes, gates and dtypes, but not in all combinations."""
    (rows, deterministic), (sizes, activation) = tile, given
    processors = PROCESSORS if sizes == DEEP else 1
    compiled(
        *kind,
        rows,
        sizes,
        dtype=dtype,
        deterministic=deterministic,
        activation=activation,
        processors=processors,
    )


# ---- products of experts

FEW_OF_EXPERTS, MANY_OF_EXPERTS = 16, 4096


def launch_grouped(
    dtype: str,
    rows: int,
    experts: int,
    sizes: tuple[int, int],
    coded: str | None,
    deterministic: bool,
    activation: Activation | None,
) -> None:
    """Launch grouped products as on a GPU; arguments are JSON's types."""
    outputs, inputs = sizes
    kind = getattr(torch, dtype)
    codes = {"int8": torch.int8, "block_fp8": torch.float8_e4m3fn}
    weight = torch.zeros(experts, outputs, inputs, dtype=codes[coded] if coded else kind)
    x, starts = torch.zeros(rows // 2, inputs, dtype=kind), torch.zeros(experts + 1, dtype=torch.int64)
    bias, scales = torch.zeros(experts, outputs, dtype=kind), torch.zeros(experts, outputs)
    options: dict[str, Any] = {"scales": scales if coded else None, "deterministic": deterministic}
    if coded == "block_fp8":
        options |= {"scales": torch.zeros(experts, -(-outputs // 128), -(-inputs // 128))}
        options |= {"lines": torch.zeros(outputs, dtype=torch.int32)}
    options |= {"from_rows": torch.zeros(rows, dtype=torch.int64), "activation": activation}
    with processors_of(PROCESSORS):
        grouped_matmul(x, weight, starts, bias, **options)


def compiled_grouped(
    target: str,
    rows: int,
    sizes: tuple[int, int] = EVEN,
    *,
    experts: int = 8,
    dtype: str = "bfloat16",
    coded: str | None = None,
    deterministic: bool = False,
    activation: str | None = None,
) -> Compiled:
    arguments = (dtype, rows, experts, sizes, coded, deterministic, activation)
    found = compile_launch("tests.kernels.gpu.test_matmul_aot:launch_grouped", arguments, target)
    for kernel in found:
        kernel.check()
    (matmul,) = [kernel for kernel in found if kernel.kernel == "grouped_matmul_kernel"]
    if dtype != "float32":
        assert_multiplies(matmul, target, coded or "plain")
    if target in NVIDIA and sizes != ODD:
        assert_reads_wide(matmul, 12 if dtype == "float32" else 16)
    return matmul


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("target", "coded", "rows"), each_first(TARGETS, (None, "int8"), (FEW_OF_EXPERTS, MANY_OF_EXPERTS))
)
def test_few_and_many_rows_of_experts(target: str, coded: str | None, rows: int) -> None:
    compiled_grouped(target, rows, coded=coded, activation="silu" if rows == FEW_OF_EXPERTS else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "rows", "deterministic"),
    list(product(("sm_89", "sm_90", "sm_100"), (FEW_OF_EXPERTS, MANY_OF_EXPERTS), (False, True))),
)
def test_scales_of_blocks_of_experts(target: str, rows: int, deterministic: bool) -> None:
    kernel = compiled_grouped(target, rows, coded="block_fp8", deterministic=deterministic, activation="silu")
    assert_leaves_tiles_in_flight(kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "rows", "sizes", "dtype", "deterministic"),
    [
        (*case, dtype, deterministic)
        for case in product(TARGETS, (FEW_OF_EXPERTS, 256, MANY_OF_EXPERTS), (EVEN, ODD))
        for dtype, deterministic in (("bfloat16", True), ("float16", False), ("float32", False))
    ],
)
def test_sweep_of_experts(
    target: str, rows: int, sizes: tuple[int, int], dtype: str, deterministic: bool
) -> None:
    experts = 60 if sizes == ODD else 8
    compiled_grouped(
        target, rows, sizes, experts=experts, dtype=dtype, deterministic=deterministic, activation="silu"
    )
