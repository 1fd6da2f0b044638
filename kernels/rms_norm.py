"""RMSNorm (Zhang and Sennrich, 2019), fused with a preceding residual addition."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `rms_norm_reference` accepts."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, x has {x.shape[-1]} columns")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype}, x {tuple(x.shape)} {x.dtype}"
        )


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of x + residual, x + residual). Without a residual, the second is x itself.

    The norm is computed in float32, rounded to x's dtype, and multiplied by the weight, as in transformers'
    LlamaRMSNorm.

    Args:
        x: (..., hidden).
        weight: (hidden,).
        eps: added to the mean square.
        residual: as `x`, or None.
        offset: if not 0, the norm is multiplied by offset + weight in float32 and rounded once, as in GemmaRMSNorm.
    """
    check_rms_norm(x, weight, residual)
    total = x if residual is None else x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * scale * (offset + weight.float())).to(x.dtype), total
    return weight * (wide * scale).to(x.dtype), total
