"""The products of experts compiled for GPUs: nothing spills, tensor cores multiply, and loads are wide."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

from batchinfer_kernels.gated_activation import Activation
from tests.kernels.gpu.aot import NVIDIA, TARGETS, Compiled, compile_launch
from tests.kernels.gpu.pairs import each_first
from tests.kernels.gpu.test_matmul_aot import assert_multiplies, assert_reads_wide

FEW, MANY = 16, 4096
EXPERTS, ODD_EXPERTS = 8, 60
EVEN, ODD = (1024, 512), (1026, 515)


def launch_grouped(
    dtype: str,
    rows: int,
    experts: int,
    sizes: tuple[int, int],
    coded: str | None,
    deterministic: bool,
    activation: Activation | None,
) -> None:
    """What a GPU would launch; arguments are JSON's types."""
    from batchinfer_kernels.gpu import target
    from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul

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
    before, target.processors = target.processors, lambda _device: 132
    try:
        from_rows = torch.zeros(rows, dtype=torch.int64)
        grouped_matmul(x, weight, starts, bias, activation=activation, from_rows=from_rows, **options)
    finally:
        target.processors = before


def compiled(
    target: str,
    rows: int,
    sizes: tuple[int, int] = EVEN,
    *,
    experts: int = EXPERTS,
    dtype: str = "bfloat16",
    coded: str | None = None,
    deterministic: bool = False,
    activation: str | None = None,
) -> Compiled:
    arguments = (dtype, rows, experts, sizes, coded, deterministic, activation)
    found = compile_launch("tests.kernels.gpu.test_grouped_matmul_aot:launch_grouped", arguments, target)
    for kernel in found:
        kernel.check()
    (matmul,) = [kernel for kernel in found if kernel.kernel == "grouped_matmul_kernel"]
    if dtype != "float32":
        assert_multiplies(matmul, target, coded or "plain")
    if target in NVIDIA and sizes != ODD:
        assert_reads_wide(matmul, 12 if dtype == "float32" else 16)
    return matmul


@pytest.mark.parametrize(("target", "coded", "rows"), each_first(TARGETS, (None, "int8"), (FEW, MANY)))
def test_few_and_many_rows(target: str, coded: str | None, rows: int) -> None:
    compiled(target, rows, coded=coded, activation="silu" if rows == FEW else None)


@pytest.mark.parametrize(("target", "rows"), each_first(("sm_89", "sm_90", "sm_100"), (FEW, MANY)))
def test_scales_of_blocks(target: str, rows: int) -> None:
    for deterministic in (False, True):
        kernel = compiled(target, rows, coded="block_fp8", deterministic=deterministic, activation="silu")
        waits = [int(count) for count in re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.ptx)]
        assert waits, kernel.summary()
        assert waits[0] >= 2, f"{kernel.summary()}: {waits}"


def test_deterministic_products_and_odd_sizes() -> None:
    compiled("sm_90", MANY, deterministic=True, activation="silu")
    compiled("sm_90", MANY, ODD, experts=ODD_EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "rows", "sizes", "dtype", "deterministic"),
    [
        (*case, dtype, deterministic)
        for case in product(TARGETS, (FEW, 256, MANY), (EVEN, ODD))
        for dtype, deterministic in (("bfloat16", True), ("float16", False), ("float32", False))
    ],
)
def test_sweep(target: str, rows: int, sizes: tuple[int, int], dtype: str, deterministic: bool) -> None:
    compiled(target, rows, sizes, dtype=dtype, deterministic=deterministic, activation="silu")
