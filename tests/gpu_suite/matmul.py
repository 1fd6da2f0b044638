"""Linear layers of the 8B Llama shape, plain and quantised, and MXFP4 experts of the shape of gpt-oss-20b."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import block_fp8_matmul_reference
from batchinfer_kernels.cost import (
    PANEL_BYTES,
    Cost,
    block_fp8_linear_cost,
    fp8_linear_cost,
    linear_cost,
    mxfp4_grouped_linear_cost,
    quantized_linear_cost,
    weight_only_linear_cost,
)
from batchinfer_kernels.fp8_matmul import fp8_matmul_reference
from batchinfer_kernels.fp8_matmul import quantize_rows_fp8 as quantize_weight_fp8
from batchinfer_kernels.gpu.block_fp8_matmul import block_fp8_matmul
from batchinfer_kernels.gpu.fp8_matmul import fp8_matmul, why_not_fp8
from batchinfer_kernels.gpu.grouped_coded_matmul import grouped_mxfp4_matmul
from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul
from batchinfer_kernels.gpu.int8_matmul import int8_matmul
from batchinfer_kernels.gpu.matmul import matmul
from batchinfer_kernels.gpu.quantize_rows import quantize_rows, quantize_rows_fp8
from batchinfer_kernels.gpu.quantized_matmul import int4_weight_matmul, panel_matmul
from batchinfer_kernels.matmul import matmul_reference
from batchinfer_kernels.mxfp4 import GROUP as MXFP4_GROUP
from batchinfer_kernels.mxfp4 import mxfp4_values, pack_mxfp4_weights
from batchinfer_kernels.quantized_linear import quantize_weight, quantized_linear_reference
from batchinfer_kernels.quantized_matmul import (
    int4_weight_matmul_reference,
)
from tests.gpu_suite.case import DTYPE, Case, part, random
from tests.gpu_suite.peaks import FP8
from tests.kernels.rounded_weights import quantize_blocks_fp8, quantize_int4
from tests.suite.clock import Call
from tests.suite.section import BenchSection, Part

GROUP = 128  # inputs that share a scale in int4
BYTES = 2  # bytes per activation
# Hopper's tensor cores add products of fp8 with about 14 bits
FP8_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Layer:
    """Name and sizes of a weight (outputs, inputs)."""

    name: str
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return self.name


GATE_UP, DOWN, TINY = Layer("gate and up", 4096, 28672), Layer("down", 14336, 4096), Layer("tiny", 160, 48)
DECODE, WIDE_DECODE, PREFILL, TINY_TOKENS = 64, 256, 4096, 3
CHOSEN = 4  # experts per token
EXPERTS, TINY_EXPERTS = (32, 2880, 5760), (4, 64, 48)  # experts, inputs, outputs of gate and up
EXPERT_TOKENS = (16, 256, 4096)  # tokens of the end of a job, of decode, of prefill


def parts(section: BenchSection) -> list[Part]:
    """Return each kind for a decode step and a prefill step, and the plain kind for further layers."""
    quantised: list[Callable[..., Case]] = [int8_case, weight_int4_case]
    quantised += [fp8_case, block_fp8_case] if why_not_fp8() is None else []
    if section.rehearsal:
        kinds = [plain_case, deterministic_case, *quantised]
        tiny = [part(section, make, TINY, TINY_TOKENS) for make in kinds]
        return [*tiny, part(section, mxfp4_case, *TINY_EXPERTS, 3)]
    found = [part(section, plain_case, layer, n) for n in (DECODE, PREFILL) for layer in (GATE_UP, DOWN)]
    found += [part(section, make, GATE_UP, n) for n in (DECODE, PREFILL) for make in quantised]
    found += [part(section, deterministic_case, GATE_UP, n) for n in (DECODE, PREFILL)]
    # around the number of rows from which the panel is faster
    found += [part(section, weight_int4_case, GATE_UP, n) for n in (WIDE_DECODE, 2 * WIDE_DECODE)]
    found += [part(section, plain_case, layer, WIDE_DECODE) for layer in (GATE_UP, DOWN)]
    return found + [part(section, mxfp4_case, *EXPERTS, tokens) for tokens in EXPERT_TOKENS]


def plain_case(section: BenchSection, layer: Layer, tokens: int, deterministic: bool = False) -> Case:
    x, weight = _operands(section, layer, tokens)
    cost = linear_cost(tokens, layer.inputs, layer.outputs, BYTES, BYTES)
    ours = partial(matmul, x, weight, deterministic=deterministic)
    kernel = "deterministic matmul" if deterministic else "matmul"
    return _case(kernel, layer, x, weight, cost, ours, partial(matmul_reference, x, weight))


def deterministic_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    return plain_case(section, layer, tokens, deterministic=True)


def int8_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    """Return a case of an int8 product that quantises activations, compared with cuBLAS's product only."""
    x, weight = _operands(section, layer, tokens)
    codes, scales = quantize_weight(weight)
    cost = quantized_linear_cost(tokens, layer.inputs, layer.outputs, BYTES)
    others: dict[str, Call] = {}
    if tokens > 16:  # torch requires it
        others = {"cuBLAS int8 product alone": partial(torch._int_mm, quantize_rows(x)[0], codes.T)}
    right = partial(quantized_linear_reference, x, codes, scales)
    return _case("int8 matmul", layer, x, weight, cost, partial(int8_matmul, x, codes, scales), right, others)


def fp8_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    """Return a case of an fp8 product that quantises activations, compared with cuBLAS's product only."""
    x, weight = _operands(section, layer, tokens)
    codes, scales = quantize_weight_fp8(weight)
    cost = fp8_linear_cost(tokens, layer.inputs, layer.outputs, BYTES)
    others: dict[str, Call] = {}
    if not section.rehearsal:  # its operands need a GPU
        rows, row_scales = quantize_rows_fp8(x)
        factors = (rows, codes.T, row_scales[:, None], scales[None])
        product = partial(torch._scaled_mm, *factors, out_dtype=x.dtype, use_fast_accum=True)
        others = {"cuBLAS fp8 product alone": product}
    right = partial(fp8_matmul_reference, x, codes, scales)
    case = _case("fp8 matmul", layer, x, weight, cost, partial(fp8_matmul, x, codes, scales), right, others)
    return replace(case, dtype=FP8, tolerance=FP8_TOLERANCE)


def block_fp8_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    """Return a case of fp8 with block scales, as in published weights. Also compared with channel scales."""
    x, weight = _operands(section, layer, tokens)
    coded = quantize_blocks_fp8(weight)
    cost = block_fp8_linear_cost(tokens, layer.inputs, layer.outputs, BYTES)
    others = {"scales of channels": partial(fp8_matmul, x, *quantize_weight_fp8(weight))}
    ours, right = partial(block_fp8_matmul, x, coded), partial(block_fp8_matmul_reference, x, coded)
    case = _case("block fp8 matmul", layer, x, weight, cost, ours, right, others)
    return replace(case, dtype=FP8, tolerance=FP8_TOLERANCE)


def weight_int4_case(section: BenchSection, layer: Layer, tokens: int) -> Case:
    x, weight = _operands(section, layer, tokens)
    coded = quantize_int4(weight, GROUP)
    cost = weight_only_linear_cost(tokens, layer.inputs, layer.outputs, BYTES, group=GROUP)
    ours, right = partial(int4_weight_matmul, x, coded), partial(int4_weight_matmul_reference, x, coded)
    panel = torch.empty(PANEL_BYTES // BYTES, device=x.device, dtype=x.dtype)
    others: dict[str, Call] = {"through a panel": partial(panel_matmul, x, coded, None, panel)}
    return _case("int4-weight matmul", layer, x, weight, cost, ours, right, others)


def _operands(section: BenchSection, layer: Layer, tokens: int) -> tuple[Tensor, Tensor]:
    """Return normal numbers as activations and weight, scaled so that results are about 1."""
    weight = random(section, layer.outputs, layer.inputs) * float(layer.inputs) ** -0.5
    return random(section, tokens, layer.inputs), weight


def _case(
    kernel: str,
    layer: Layer,
    x: Tensor,
    weight: Tensor,
    cost: Cost,
    ours: Call,
    right: Call,
    others: Mapping[str, Call] | None = None,
) -> Case:
    """Return a case that is compared with cuBLAS in the activations' dtype, and with `others`."""
    beside: dict[str, Call] = {"cuBLAS": partial(torch.nn.functional.linear, x, weight), **(others or {})}
    return Case(
        kernel, f"{layer.name} {len(x)} × {layer.inputs} × {layer.outputs}", cost, ours, right, beside
    )


def mxfp4_case(section: BenchSection, experts: int, inputs: int, outputs: int, tokens: int) -> Case:
    """Return a case of evenly distributed rows. Checked against and compared with products of dequantised weights."""
    device, rows = section.device, tokens * CHOSEN
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), device=device, dtype=torch.uint8)
    shape = (experts, outputs, inputs // MXFP4_GROUP)
    exponents = torch.randint(118, 122, shape, device=device, dtype=torch.uint8)
    x = random(section, rows, inputs)
    starts = torch.arange(experts + 1, device=device) * rows // experts
    packed, wide = pack_mxfp4_weights(codes, exponents), _widened(codes, exponents)
    theirs = partial(grouped_matmul, x, wide, starts)
    return Case(
        "mxfp4 experts",
        f"experts {tokens} × {CHOSEN} of {experts} × {inputs} × {outputs}",
        mxfp4_grouped_linear_cost(rows, min(rows, experts), inputs, outputs, BYTES),
        partial(grouped_mxfp4_matmul, x, packed, starts),
        theirs,
        {"widened before": theirs},
    )


def _widened(codes: Tensor, exponents: Tensor) -> Tensor:
    """Dequantise one expert at a time: float32 copies of all experts would take gigabytes."""
    each = (mxfp4_values(codes[e : e + 1], exponents[e : e + 1]).to(DTYPE) for e in range(len(codes)))
    return torch.cat(list(each))
