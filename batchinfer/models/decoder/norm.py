"""Norms, as their specs describe them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.parameters import BIAS
from batchinfer.models.spec.spec import NormSpec


def apply_norm(
    ops: Ops,
    norm: NormSpec,
    parameters: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), with the parameters of this name."""
    weight, bias = parameters[name], parameters.get(name + BIAS)
    if norm.kind == "layer":
        return ops.layer_norm(x, weight, bias, norm.eps, residual)
    return ops.rms_norm(x, weight, norm.eps, residual, norm.offset)
