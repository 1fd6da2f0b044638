"""References that replace two Triton kernels in tests of launches, each as a single launch.

The interpreter takes milliseconds per program of a kernel, and these kernels have a program per token and
head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchinfer.models.ops import triton_ops
from batchinfer_kernels.rms_norm import rms_norm_reference
from batchinfer_kernels.rope_store import rope_reference, rope_store_reference
from tests.batchinfer.engine.taped import launched


def launch_references(replace: Callable[[Any, str, Any], None]) -> None:
    """Replace the kernels for rotary embeddings and RMSNorm by torch references, whose launches are recorded.

    Other tests compare these kernels with their references.
    """
    replace(triton_ops, "rope_store", _rope_store)
    replace(triton_ops, "rotate", _rotate)
    replace(triton_ops, "rms_norm", _rms_norm)


def _rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, positions: Tensor, **how: Any,
) -> Tensor:  # fmt: skip
    y = q.new_empty(q.shape)

    def run() -> None:
        tables, caches, norms = (cos[positions], sin[positions]), (k_cache, v_cache, slots), (q_norm, k_norm)
        y.copy_(rope_store_reference(q, k, v, *tables, *caches, *norms, eps, **how))

    return launched(run, y)


def _rotate(
    q: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float, positions: Tensor, **how: Any
) -> Tensor:
    y = q.new_empty(q.shape)
    return launched(lambda: y.copy_(rope_reference(q, cos[positions], sin[positions], norm, eps, **how)), y)


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)

    def run() -> None:
        found, summed = rms_norm_reference(x, weight, eps, residual, offset)
        y.copy_(found)
        if residual is not None:
            total.copy_(summed)

    return launched(run, y), total
