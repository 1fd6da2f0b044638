"""The matrix products compiled for GPUs: nothing spills, tensor cores multiply what was meant, and loads are wide."""

from __future__ import annotations

import re
from itertools import product

import pytest

from tests.kernels.gpu.aot import NVIDIA, TARGETS, Compiled, compile_launch

LAUNCH = "tests.kernels.gpu.matmul_cases:launch_way"
PROCESSORS = 132
# Groups of 64 and 128 differ in nothing but how many scales are read
WAYS = ("plain", "int8_weight", "int4_32", "int4_64_zeros", "fp8", "int8")
FEW, MANY = 8, 600
ALL_ROWS = (FEW, 32, 64, 256, MANY)
EVEN, ODD, DEEP = (1024, 512), (1025, 515), (1024, 2048)  # outputs, inputs; DEEP: of several segments
# The instruction that multiplies floats of 16 bits, float8 and int8, in PTX, SASS (9.0) or amdgcn
MULTIPLIES = {
    "sm_80": (r"\bmma\.sync\S*\.f16|\bmma\.sync\S*\.bf16", None, r"\bmma\.sync\S*\.s8"),
    "sm_90": (r"\bHGMMA\b", r"\bQGMMA\b", r"\bIGMMA\b"),
    "sm_100": (r"\btcgen05\.mma\S*kind::f16", r"\btcgen05\.mma\S*kind::f8f6f4", r"\bmma\.sync\S*\.s8"),
    "gfx942": (r"\bv_mfma_f32\S*_b?f16", None, r"\bv_mfma_i32\S*_i8"),
}


def can(target: str, way: str) -> bool:
    return way != "fp8" or MULTIPLIES[target][1] is not None


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
) -> Compiled:
    """The product itself; all that is launched with it has been checked."""
    arguments = (way, dtype, rows, *sizes, deterministic, activation, processors)
    found = compile_launch(LAUNCH, arguments, target)
    for kernel in found:
        kernel.check()
    (matmul,) = [kernel for kernel in found if kernel.kernel.removeprefix("_coded_") == "matmul_kernel"]
    if dtype != "float32":
        assert_multiplies(matmul, target, way)
    if target in NVIDIA and sizes != ODD:
        assert_reads_wide(matmul)
    return matmul


def assert_multiplies(kernel: Compiled, target: str, way: str) -> None:
    floats, float8, integers = MULTIPLIES[target]
    pattern = {"fp8": float8, "int8": integers}.get(way, floats)
    assert pattern is not None
    assert re.search(pattern, kernel.sass if target == "sm_90" else kernel.ptx), kernel.summary()


def assert_reads_wide(kernel: Compiled) -> None:
    """All weights. Of x a piece of 32 inputs and 16 rows has but 8 bytes for each thread."""
    copies = re.findall(r"\bLDGSTS\S*", kernel.sass)
    narrow = [copy for copy in copies if "128" not in copy]
    assert kernel.wide_loads() >= 16, kernel.summary()
    assert len(narrow) <= len(copies) // 2, f"{kernel.summary()}: {narrow}"


@pytest.mark.parametrize("way", ["plain", "int8_weight", "int4_64_zeros", "fp8", "int8"])
@pytest.mark.parametrize("target", TARGETS)
def test_few_and_many_rows(target: str, way: str) -> None:
    if can(target, way):
        for rows in (FEW, MANY):
            compiled(target, way, rows)
    else:
        with pytest.raises(RuntimeError, match="float8_e4m3fn"):
            compiled(target, way, FEW)


@pytest.mark.parametrize("way", ["plain", "int4_64"])
def test_segments_and_gates(way: str) -> None:
    compiled("sm_90", way, FEW, DEEP, activation="silu", processors=PROCESSORS)
    compiled("sm_90", way, MANY, DEEP, deterministic=True, activation="silu")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_odd_sizes(target: str) -> None:
    compiled(target, "plain", MANY, ODD)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_tile(target: str, way: str, activation: str | None) -> None:
    for rows, sizes in product(ALL_ROWS, (EVEN, ODD)):
        if can(target, way):
            compiled(target, way, rows, sizes, activation=activation)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "int8"])
@pytest.mark.parametrize("target", TARGETS)
def test_one_tile_where_it_is_deterministic(target: str, way: str, activation: str | None) -> None:
    for rows, sizes in product((FEW, MANY), (EVEN, DEEP, ODD)):
        if can(target, way):
            compiled(target, way, rows, sizes, deterministic=True, activation=activation)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", TARGETS)
def test_other_dtypes(target: str, way: str, dtype: str) -> None:
    for rows, deterministic in product((FEW, MANY), (False, True)):
        if can(target, way) and not (deterministic and way == "int8"):
            compiled(target, way, rows, DEEP, dtype=dtype, deterministic=deterministic)
