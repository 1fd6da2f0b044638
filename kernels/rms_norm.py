"""RMSNorm (Zhang and Sennrich, 2019), fused with a preceding residual addition."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Raise ValueError if shapes or dtypes do not match."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, x has {x.shape[-1]} columns")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype}, x {tuple(x.shape)} {x.dtype}"
        )


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (normalised, sum): sum = x + residual, normalised = sum / rms(sum) * weight, computed in float32.

    Without a residual, the sum is x itself. The normalised value is rounded to x's dtype before it is multiplied by the
    weight, as in transformers' LlamaRMSNorm.

    Args:
        x: (..., hidden).
        weight: (hidden,).
        eps: added to the mean square.
        residual: as `x`.
        offset: if not 0, multiply by offset + weight in float32 and round once, as in GemmaRMSNorm. Adding in a 16-bit
            dtype would lose small weights.
    """
    check_rms_norm(x, weight, residual)
    total = x if residual is None else x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * scale * (offset + weight.float())).to(x.dtype), total
    return weight * (wide * scale).to(x.dtype), total
