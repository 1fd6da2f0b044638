"""Linear layers at the 8B Llama shape, plain and quantised, against cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import block_fp8_matmul_reference, quantize_blocks_fp8
from batchinfer_kernels.cost import (
    PANEL_BYTES,
    Cost,
    block_fp8_linear_cost,
    fp8_linear_cost,
    linear_cost,
    quantized_linear_cost,
    weight_only_linear_cost,
)
from batchinfer_kernels.fp8_matmul import fp8_matmul_reference
from batchinfer_kernels.fp8_matmul import quantize_rows_fp8 as quantize_weight_fp8
from batchinfer_kernels.gpu.block_fp8_matmul import block_fp8_matmul
from batchinfer_kernels.gpu.fp8_matmul import fp8_matmul, why_not_fp8
from batchinfer_kernels.gpu.int8_matmul import int8_matmul
from batchinfer_kernels.gpu.matmul import matmul
from batchinfer_kernels.gpu.quantize_rows import quantize_rows, quantize_rows_fp8
from batchinfer_kernels.gpu.quantized_matmul import int4_weight_matmul, int8_weight_matmul, panel_matmul
from batchinfer_kernels.matmul import matmul_reference
from batchinfer_kernels.quantized_linear import quantize_weight, quantized_linear_reference
from batchinfer_kernels.quantized_matmul import (
    int4_weight_matmul_reference,
    int8_weight_matmul_reference,
    quantize_int4,
    quantize_int8,
)
from tests.gpu_suite import experts
from tests.gpu_suite.case import TOLERANCE, Case, distance, measured
from tests.suite.clock import Call
from tests.suite.peaks import FP8
from tests.suite.section import BenchSection, Part

GROUP = 128  # inputs that share a scale in int4
# Hopper's tensor cores add products of fp8 with about 14 bits
FP8_TOLERANCE = 2e-2
CUBLAS = "cuBLAS"  # in the activations' dtype


@dataclass(frozen=True, slots=True)
class Layer:
    """x (tokens, inputs) and a weight (outputs, inputs)."""

    name: str
    inputs: int
    outputs: int

    def operands(self, section: BenchSection, tokens: int) -> tuple[Tensor, Tensor]:
        """Normal numbers, the weight's so small that results are about one."""
        device, dtype = section.device, torch.bfloat16
        x = torch.randn(tokens, self.inputs, device=device, dtype=dtype)
        weight = torch.randn(self.outputs, self.inputs, device=device, dtype=dtype)
        return x, weight * self.inputs**-0.5

    def size(self, tokens: int) -> str:
        return f"{self.name} {tokens} × {self.inputs} × {self.outputs}"


GATE_UP, DOWN, TINY = Layer("gate and up", 4096, 28672), Layer("down", 14336, 4096), Layer("tiny", 160, 48)
DECODE, WIDE_DECODE, PREFILL, TINY_TOKENS = 64, 256, 4096, 3
Maker = Callable[[BenchSection, Layer, int], Case]


def parts(section: BenchSection) -> list[Part]:
    """Each kind for one step of decode and of prefill; the plain one on more layers."""
    quantised = [int8_case, weight_int8_case, weight_int4_case]
    quantised += [fp8_case, block_fp8_case] if why_not_fp8() is None else []
    if section.rehearsal:
        kinds: list[Maker] = [plain_case, deterministic_case, *quantised]
        return [*(_part(section, make, TINY, TINY_TOKENS) for make in kinds), *experts.parts(section)]
    found = [_part(section, plain_case, layer, n) for n in (DECODE, PREFILL) for layer in (GATE_UP, DOWN)]
    found += [_part(section, make, GATE_UP, n) for n in (DECODE, PREFILL) for make in quantised]
    found += [_part(section, deterministic_case, GATE_UP, n) for n in (DECODE, PREFILL)]
    # around as many rows as make the panel pay
    found += [_part(section, weight_int4_case, GATE_UP, n) for n in (WIDE_DECODE, 2 * WIDE_DECODE)]
    found += [_part(section, plain_case, layer, WIDE_DECODE) for layer in (GATE_UP, DOWN)]
    return found + experts.parts(section)


def _part(section: BenchSection, make: Maker, layer: Layer, tokens: int) -> Part:
    return f"{make.__name__} {layer.size(tokens)}", lambda: measured(section, make(section, layer, tokens))


def plain_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    return _float_case(section, layer, tokens, "matmul", deterministic=False)


def deterministic_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    return _float_case(section, layer, tokens, "deterministic matmul", deterministic=True)


def _float_case(section: BenchSection, layer: Layer, tokens: int, kernel: str, deterministic: bool) -> Case:
    x, weight = layer.operands(section, tokens)
    cost = linear_cost(tokens, layer.inputs, layer.outputs, x.element_size(), x.element_size())
    ours = partial(matmul, x, weight, deterministic=deterministic)
    return _case(kernel, layer, x, weight, cost, _name(x), ours, partial(matmul_reference, x, weight))


def int8_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    """Both factors as int8, activations quantised on the way; beside it the product alone."""
    x, weight = layer.operands(section, tokens)
    codes, scales = quantize_weight(weight)
    cost = quantized_linear_cost(tokens, layer.inputs, layer.outputs, x.element_size())
    others = {}
    if tokens > 16:  # what torch asks for
        rows, _ = quantize_rows(x)
        others = {"cuBLAS int8 product alone": partial(torch._int_mm, rows, codes.T)}
    right = partial(quantized_linear_reference, x, codes, scales)
    ours = partial(int8_matmul, x, codes, scales)
    return _case("int8 matmul", layer, x, weight, cost, _name(x), ours, right, others)


def fp8_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    """Both factors as float8_e4m3fn, activations quantised on the way; beside it the product with its scales."""
    x, weight = layer.operands(section, tokens)
    codes, scales = quantize_weight_fp8(weight)
    cost = fp8_linear_cost(tokens, layer.inputs, layer.outputs, x.element_size())
    others = {}
    if not section.rehearsal:  # what it needs of its operands only GPUs have
        rows, row_scales = quantize_rows_fp8(x)
        given: dict[str, Any] = {"out_dtype": x.dtype, "use_fast_accum": True}
        product = partial(torch._scaled_mm, rows, codes.T, row_scales[:, None], scales[None], **given)
        others = {"cuBLAS fp8 product alone": product}
    right = partial(fp8_matmul_reference, x, codes, scales)
    ours = partial(fp8_matmul, x, codes, scales)
    case = _case("fp8 matmul", layer, x, weight, cost, FP8, ours, right, others)
    return replace(case, tolerance=FP8_TOLERANCE)


def block_fp8_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    """The same with scales of blocks, as published weights have them; beside it those of channels."""
    x, weight = layer.operands(section, tokens)
    coded, channels = quantize_blocks_fp8(weight), quantize_weight_fp8(weight)
    cost = block_fp8_linear_cost(tokens, layer.inputs, layer.outputs, x.element_size())
    others = {"scales of channels": partial(fp8_matmul, x, *channels)}
    right = partial(block_fp8_matmul_reference, x, coded)
    ours = partial(block_fp8_matmul, x, coded)
    case = _case("block fp8 matmul", layer, x, weight, cost, FP8, ours, right, others)
    return replace(case, tolerance=FP8_TOLERANCE)


def weight_int8_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    x, weight = layer.operands(section, tokens)
    coded = quantize_int8(weight)
    cost = weight_only_linear_cost(tokens, layer.inputs, layer.outputs, x.element_size())
    right = partial(int8_weight_matmul_reference, x, coded)
    ours = partial(int8_weight_matmul, x, coded)
    return _case("int8-weight matmul", layer, x, weight, cost, _name(x), ours, right)


def weight_int4_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    x, weight = layer.operands(section, tokens)
    coded = quantize_int4(weight, GROUP)
    cost = weight_only_linear_cost(tokens, layer.inputs, layer.outputs, x.element_size(), group=GROUP)
    right = partial(int4_weight_matmul_reference, x, coded)
    ours = partial(int4_weight_matmul, x, coded)
    panel = torch.empty(PANEL_BYTES // x.element_size(), device=x.device, dtype=x.dtype)
    others: dict[str, Call] = {"through a panel": partial(panel_matmul, x, coded, None, panel)}
    return _case("int4-weight matmul", layer, x, weight, cost, _name(x), ours, right, others)


def _case(
    kernel: str,
    layer: Layer,
    x: Tensor,
    weight: Tensor,
    cost: Cost,
    dtype: str,
    ours: Callable[[], Tensor],
    right: Callable[[], Tensor],
    others: Mapping[str, Call] | None = None,
) -> Case:
    beside: dict[str, Call] = {CUBLAS: partial(torch.nn.functional.linear, x, weight), **(others or {})}
    tolerance = TOLERANCE[x.dtype]
    size = layer.size(len(x))
    return Case(kernel, size, cost, dtype, ours, lambda: distance(ours(), right()), tolerance, beside)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
