"""Matrix products by each available library, to measure the peaks of a device."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.compilers import NoCompiler

# "torch" means its libraries, such as oneDNN, MKL and cuBLAS; "compiled" means the C operators
Multiplier = Literal["torch", "compiled"]


def products(x: Tensor, weight: Tensor) -> Iterator[tuple[Multiplier, Callable[[], Tensor]]]:
    """Yield each library that can compute x W^T on the device of x, and a function that computes it.

    Args:
        x: (rows, inputs). In int8 and float8_e4m3fn, both x and the weight are quantised.
        weight: (outputs, inputs), in the dtype of x. It is packed before it is timed. float8_e4m3fn needs a GPU.

    Yields:
        ("torch" or "compiled", a function that returns the product).
    """
    if x.dtype == torch.float8_e4m3fn:
        yield "torch", _fp8_product(x, weight)
        return
    codes, on_cpu = x.dtype == torch.int8, x.device.type == "cpu"
    if not codes:
        yield "torch", _linear(x, weight)
    elif not on_cpu:
        yield "torch", _integer_product(x, weight)
    elif onednn_has_int8():
        yield "torch", _quantized_linear(x, weight)
    compiled = compiled_operators() if on_cpu else None
    if compiled is not None:
        yield "compiled", _compiled_codes(compiled, x, weight) if codes else _compiled(compiled, x, weight)


def compiled_operators() -> CompiledOperators | None:
    """Return the compiled operators of this CPU; None if there is no C compiler."""
    try:
        return CompiledOperators()
    except NoCompiler:
        return None


def onednn_has_int8() -> bool:
    """Return True if oneDNN is known to have int8 products on this CPU, which is the case on x86-64."""
    return platform.machine().lower() in ("x86_64", "amd64")


def _compiled(compiled: CompiledOperators, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    packed = compiled.pack_linear(weight, None)
    return lambda: compiled.linear(x, packed)


def _compiled_codes(compiled: CompiledOperators, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    packed, values = compiled.pack_codes(weight, torch.ones(len(weight)), None), x.float()
    return lambda: compiled.linear(values, packed)


def _fp8_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    one = torch.ones((), device=x.device)
    return lambda: torch._scaled_mm(x, weight.T, one, one, out_dtype=torch.bfloat16)


def _quantized_linear(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    # oneDNN's int8 products are only fast for unsigned activations
    packed = torch.ops.onednn.qlinear_prepack(weight, list(x.shape))
    raised = (x.to(torch.int16) + 128).to(torch.uint8)
    scales, zeros = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.int32)
    operands = (raised, 1.0, 128, packed, scales, zeros, None)
    return lambda: torch.ops.onednn.qlinear_pointwise(*operands, 1.0, 0, torch.float32, "none", [], "")


def _integer_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    return lambda: torch._int_mm(x, weight.T)


def _linear(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
        return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return lambda: torch.nn.functional.linear(x, weight)
