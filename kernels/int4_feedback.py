"""Rounds int4 weights with the least change of a linear layer's outputs, rather than of its weights.

The squared error of all outputs is tr(D X^T X D^T), with D the errors of the weights and X^T X the products of the
inputs (Frantar et al., 2023, "GPTQ").
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.int4_linear import LEAST_CODE, MAX_CODE

DAMPING = 0.01  # added to the diagonal, as a share of its mean; the value of GPTQ's code
# Columns whose errors are applied to later columns in one product. With 32 columns of a thousand outputs torch uses one
# thread; many small parallel steps take 30 times as long if other processes use the cores
COLUMNS_AT_ONCE = 32


def output_error(errors: Tensor, products: Tensor) -> Tensor:
    """Return the sum of squared errors of a layer's outputs that rounding its weights causes, a scalar tensor.

    Args:
        errors: (N, K), the error of each weight; N outputs, K inputs.
        products: (K, K), X^T X of the layer's inputs X on sample prompts.
    """
    return ((errors @ products) * errors).sum()


def round_with_feedback(weight: Tensor, scales: Tensor, products: Tensor, group: int) -> Tensor:
    """Round weights to int4 with small errors of a layer's outputs (GPTQ): (…, N, K) int8 in -8 … 7.

    Columns are rounded in the order of falling input magnitude. After each column, the later ones are adjusted to
    compensate for its error.

    Args:
        weight: (…, N, K) float32; N outputs, K inputs.
        scales: (…, N, ceil(K / group)), the scale of each output and group of inputs.
        products: (…, K, K), X^T X of the layer's inputs X on sample prompts.
        group: number of inputs that share a scale.

    Raises:
        ValueError: If sizes do not match, or `products` are not finite.
    """
    *several, outputs, inputs = weight.shape
    groups = -(-inputs // group)
    if products.shape != (*several, inputs, inputs) or scales.shape != (*several, outputs, groups):
        shapes = f"scales {tuple(scales.shape)} and products {tuple(products.shape)}"
        raise ValueError(f"weight {tuple(weight.shape)} in groups of {group} has {shapes}")
    if not bool(products.isfinite().all()):
        raise ValueError("products of inputs are not finite")
    each, steps, seen = (one.reshape(-1, *one.shape[-2:]) for one in (weight, scales, products))
    return _codes(each, steps, seen, group).view(weight.shape)


def _codes(weight: Tensor, scales: Tensor, products: Tensor, group: int) -> Tensor:
    # Synchronises with a GPU only before the loop over columns
    outputs, inputs = weight.shape[1:]
    order = products.diagonal(0, 1, 2).argsort(dim=-1, descending=True, stable=True)
    within = order[:, None].expand(-1, inputs, -1)
    sorted_ = products.gather(1, within.mT).gather(2, within)
    factor = torch.stack([_feedback(own) for own in sorted_])
    lines = order[..., None].expand(-1, -1, outputs)
    left = weight.mT.gather(1, lines)  # (matrices, K, N), columns in the order of their rounding
    steps = scales.float().mT.gather(1, lines // group)
    inverses = torch.where(steps.abs() > 0, 1 / steps, 0.0)
    codes = torch.empty_like(left, dtype=torch.int8)
    for first in range(0, inputs, COLUMNS_AT_ONCE):
        end = min(first + COLUMNS_AT_ONCE, inputs)
        errors = torch.empty_like(left[:, first:end])
        for at in range(first, end):
            code = (left[:, at] * inverses[:, at]).round_().clamp_(LEAST_CODE, MAX_CODE)
            codes[:, at] = code
            error = (left[:, at] - code * steps[:, at]) / factor[:, at, at, None]
            errors[:, at - first] = error
            left[:, at + 1 : end].baddbmm_(factor[:, at, at + 1 : end, None], error[:, None], alpha=-1)
        left[:, end:].baddbmm_(factor[:, first:end, end:].mT, errors, alpha=-1)
    return torch.empty_like(codes).scatter_(1, lines, codes).mT.contiguous()


def _feedback(products: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of `products` (GPTQ), (K, K) float32.

    Row k of the factor tells how later columns compensate for an error of column k.
    """
    # The factor is the inverse of M in products = M M^T; M is the lower Cholesky factor of the reversed products,
    # reversed. The diagonal is increased (damping) until the matrix is positive definite
    wide = products.double().flip(0, 1)
    ones = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    usual = float(wide.diagonal().mean()) or 1.0
    damping, failed = DAMPING, True
    while failed:
        lower, info = torch.linalg.cholesky_ex(wide + damping * usual * ones)
        failed, damping = bool(info), damping * 10
    upper: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), ones, upper=True)
    return upper.float()
