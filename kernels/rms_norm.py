"""RMSNorm (Zhang and Sennrich, 2019) with the residual addition fused in front of it."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, x has {x.shape[-1]} columns")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype}, x {tuple(x.shape)} {x.dtype}"
        )


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(normalised, sum): sum = x + residual, normalised = sum / rms(sum) * weight, reduced in float32.

    x, residual: (..., hidden). Without a residual the sum is x itself. As transformers' LlamaRMSNorm, the normalised
    value is rounded to x's dtype before the weight is applied. With an offset it is multiplied with offset + weight
    instead, in float32, and rounded once, as in GemmaRMSNorm: a small weight would be lost in the sum.
    """
    check_rms_norm(x, weight, residual)
    total = x if residual is None else x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * scale * (offset + weight.float())).to(x.dtype), total
    return weight * (wide * scale).to(x.dtype), total
