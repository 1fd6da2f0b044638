"""LayerNorm (Ba et al., 2016) with the residual addition in front of it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels.rms_norm import check_rms_norm


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(normalised, sum): sum = x + residual, normalised = (sum - mean) / deviation * weight + bias, reduced in float32.

    x, residual: (..., hidden); weight, bias: (hidden,), or (heads, hidden) for x (..., heads, hidden), each head with
    its own. Without a residual the sum is x itself. Raises ValueError when shapes or dtypes do not fit.
    """
    check_rms_norm(x, weight.reshape(-1, weight.shape[-1])[0], residual)
    total = x if residual is None else x + residual
    if weight.dim() == 1:
        return F.layer_norm(total, weight.shape, weight, bias, eps), total
    scaled = F.layer_norm(total.float(), total.shape[-1:], eps=eps) * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype), total
