"""LayerNorm (Ba et al., 2016) after a residual addition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels.rms_norm import check_rms_norm


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (LayerNorm of x + residual, x + residual). Without a residual, the second is x itself.

    The mean and the deviation are computed in float32.

    Args:
        x: (..., hidden).
        weight: (hidden,), or (heads, hidden) with a weight per head for x (..., heads, hidden).
        bias: as `weight`, or None.
        eps: added to the variance.
        residual: as `x`, or None.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_rms_norm(x, weight.reshape(-1, weight.shape[-1])[0], residual)
    total = x if residual is None else x + residual
    if weight.dim() == 1:
        return F.layer_norm(total, weight.shape, weight, bias, eps), total
    scaled = F.layer_norm(total.float(), total.shape[-1:], eps=eps) * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype), total
