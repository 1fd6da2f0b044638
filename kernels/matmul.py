"""Linear layers, y = x W^T + b, with what may follow them: the gate of a feed-forward layer, logits in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation, gated_activation_reference

# Outputs taken at once: the float32 copy of a whole head of 150,000 outputs would take gigabytes
OUTPUTS_AT_ONCE = 8192


def matmul_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """x: (T, K), weight: (N, K) of x's dtype, bias: (N,) → (T, N), or (T, N / 2) with an activation.

    Sums, bias and activation are float32; one rounding to `out_dtype` at the end (None: x's dtype; float32 is what a
    head's logits want). With an activation the weight is gate above up, and the result act(gate) * up (Shazeer, 2020).
    Raises ValueError when shapes or dtypes do not fit.
    """
    check_matmul(x, weight.shape, bias, out_dtype, activation)
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {weight.dtype}")
    return finished(products(x, weight), bias, out_dtype or x.dtype, activation)


def check_matmul(
    x: Tensor,
    weight_shape: tuple[int, ...],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
) -> None:
    """Raises ValueError when shapes do not fit; `weight_shape`: (N, K), whatever its values are stored as."""
    if len(weight_shape) != 2 or x.dim() != 2 or x.shape[1] != weight_shape[1] or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, the weight {tuple(weight_shape)}")
    if bias is not None and bias.shape != weight_shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}, the weight has {weight_shape[0]} rows")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"the result is {x.dtype} or float32, not {out_dtype}")
    if activation is not None and weight_shape[0] % 2:
        raise ValueError(f"gate and up need an even number of rows, the weight has {weight_shape[0]}")


def products(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32, of values that float32 holds. (T, K), (N, K) → (T, N)."""
    parts = [x.float() @ part.float().T for part in torch.split(weight, OUTPUTS_AT_ONCE)]
    return torch.cat(parts, 1) if parts else x.new_empty(len(x), 0, dtype=torch.float32)


def finished(
    sums: Tensor, bias: Tensor | None, out_dtype: torch.dtype, activation: Activation | None
) -> Tensor:
    """Return the result of scaled sums, (T, N) float32, after the bias, the gate and the one rounding."""
    wide = sums if bias is None else sums + bias.float()
    return (wide if activation is None else gated_activation_reference(wide, activation)).to(out_dtype)
