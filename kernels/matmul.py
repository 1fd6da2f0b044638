"""Linear layers, y = x W^T + b, with an optional gated activation or float32 output."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation, gated_activation_reference

# Outputs per product, which bounds memory: the float32 copy of a head of 150,000 outputs would take gigabytes
OUTPUTS_AT_ONCE = 8192


def matmul_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Return x W^T + bias: (T, N). With an activation, return act(gate) * up of its two halves: (T, N / 2).

    Sums, bias and activation are computed in float32 and rounded once at the end.

    Args:
        x: (T, K).
        weight: (N, K) of x's dtype; with an activation, the rows of the gate above the rows of up.
        bias: (N,), or None.
        out_dtype: x's dtype by default, or float32.
        activation: activation of the gate; None: the result is not gated.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_matmul(x, weight.shape, bias, out_dtype, activation)
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {weight.dtype}")
    return finish_product(products(x, weight), bias, out_dtype or x.dtype, activation)


def check_matmul(
    x: Tensor,
    weight_shape: tuple[int, ...],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
) -> None:
    """Raise ValueError unless x and bias match a weight, as `matmul_reference` describes.

    Args:
        x: (T, K).
        weight_shape: shape of the weight, which must be (N, K). Its dtype is not checked.
        bias: (N,), or None.
        out_dtype: dtype of the result, or None for x's.
        activation: gated activation of the result, or None.
    """
    if len(weight_shape) != 2 or x.dim() != 2 or x.shape[1] != weight_shape[1] or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, the weight {tuple(weight_shape)}")
    if bias is not None and bias.shape != weight_shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}, the weight has {weight_shape[0]} rows")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"the result is {x.dtype} or float32, not {out_dtype}")
    if activation is not None and weight_shape[0] % 2:
        raise ValueError(f"gate and up need an even number of rows, the weight has {weight_shape[0]}")


def products(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in float32, (T, N), for x (T, K) and a weight (N, K)."""
    parts = [x.float() @ part.float().T for part in torch.split(weight, OUTPUTS_AT_ONCE)]
    return torch.cat(parts, 1) if parts else x.new_empty(len(x), 0, dtype=torch.float32)


def finish_product(
    sums: Tensor, bias: Tensor | None, out_dtype: torch.dtype, activation: Activation | None
) -> Tensor:
    """Return sums + bias after the gated activation, rounded to `out_dtype`: (T, N), or (T, N / 2) with an activation.

    Args:
        sums: (T, N) float32, products that are already scaled.
        bias: (N,), or None.
        out_dtype: dtype of the result.
        activation: activation of the gate, the first half of the columns; None: the result is not gated.
    """
    wide = sums if bias is None else sums + bias.float()
    return (wide if activation is None else gated_activation_reference(wide, activation)).to(out_dtype)
