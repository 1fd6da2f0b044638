"""The gated activation of a feed-forward layer: act(gate) * up. Cost: cost.gated_activation_cost."""

from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.checks import check_same_dtype, unit_columns
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2

# 8 values per thread with 4 warps: 16 bytes of bfloat16
BLOCK = 1024


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return the activation function of x, float32; ACTIVATION is its name: "silu", "gelu" or "gelu_tanh"."""
    if ACTIVATION == "silu":
        return x * _sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # x/2 (1 + tanh u) equals x sigmoid(2u), with u = sqrt(2/pi) (x + 0.044715 x^3)
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gate_factor(gate, ACTIVATION: tl.constexpr):
    """Return act(gate), the first factor of a gated activation. ACTIVATION is the name of any gated activation."""
    if ACTIVATION == "clamped_swiglu":
        bounded = tl.where(gate > 7.0, 7.0, gate)  # a minimum would drop a NaN
        return bounded * _sigmoid(1.702 * bounded)
    else:
        return activated(gate, ACTIVATION)


@triton.jit
def up_factor(up, ACTIVATION: tl.constexpr):
    """Return the second factor of a gated activation: `up` itself, or for "clamped_swiglu" clamped up + 1."""
    if ACTIVATION == "clamped_swiglu":
        bounded = tl.where(up > 7.0, 7.0, up)
        return tl.where(bounded < -7.0, -7.0, bounded) + 1.0
    else:
        return up


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr, y_ptr, stride, intermediate, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < intermediate
    gate_up_ptr += row * stride
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + intermediate + at, mask=mask, other=0.0)
    # Round between the two steps, as torch does
    active = gate_factor(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    factor = up_factor(up.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + row * intermediate + at, (active * factor).to(gate.dtype), mask=mask)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, (T, intermediate), as `gated_activation_reference` does.

    Args:
        gate_up: (T, 2 × intermediate), the gate's values first; rows may be strided.
        activation: activation of the gate.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(
            f"gate and up need a matrix with an even number of columns, got {tuple(gate_up.shape)}"
        )
    if activation not in get_args(Activation):
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(get_args(Activation))}")
    check_same_dtype(gate_up=gate_up)
    unit_columns(gate_up=gate_up)
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        block = min(BLOCK, next_power_of_2(intermediate))
        grid = (tokens, cdiv(intermediate, block))
        _gated_activation_kernel[grid](
            gate_up, y, gate_up.stride(0), intermediate, ACTIVATION=activation, BLOCK=block, num_warps=4
        )
    return y
