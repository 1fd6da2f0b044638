"""Codes of int4 weights that keep a linear layer's outputs, rather than each weight, near to what they were.

What counts of a layer's inputs x is the matrix of their products, X^T X: with it the square error of all outputs is
tr(D X^T X D^T), D being the errors of the weights (Frantar et al., 2023, "GPTQ").
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.int4_linear import LEAST_CODE, MOST_CODE

DAMPING = 0.01  # of the mean product, added to each input's: as in GPTQ's own code
# Whose errors reach the columns behind them in one product. Among 32 columns of a thousand outputs torch computes in
# one thread: where others use the cores, too, many small parallel steps take 30 times as long
COLUMNS_AT_ONCE = 32


def output_error(errors: Tensor, products: Tensor) -> Tensor:
    """errors: (N, K) of weights; products: (K, K), X^T X of inputs → (), the square error of all outputs."""
    return ((errors @ products) * errors).sum()


def codes_with_feedback(weight: Tensor, scales: Tensor, products: Tensor, group: int) -> Tensor:
    """weight: (…, N, K) float32; scales: (…, N, ceil(K / group)); products: (…, K, K) → codes (…, N, K) int8 in
    -8 … 7, of a matrix, or of each of several.

    Columns are rounded one after the other, those of the largest inputs first, each with the scale of its own group;
    the columns that are still to come make up for its error. Raises ValueError for sizes that do not fit, and for
    products that are no finite numbers.
    """
    *several, outputs, inputs = weight.shape
    groups = -(-inputs // group)
    if products.shape != (*several, inputs, inputs) or scales.shape != (*several, outputs, groups):
        shapes = f"scales {tuple(scales.shape)} and products {tuple(products.shape)}"
        raise ValueError(f"weight {tuple(weight.shape)} in groups of {group} has {shapes}")
    if not bool(products.isfinite().all()):
        raise ValueError("products of inputs are no finite numbers")
    each, steps, seen = (one.reshape(-1, *one.shape[-2:]) for one in (weight, scales, products))
    return _codes(each, steps, seen, group).view(weight.shape)


def _codes(weight: Tensor, scales: Tensor, products: Tensor, group: int) -> Tensor:
    """Return the same of several matrices. Whatever is asked of the device is asked before the columns: a GPU gets the
    work of all of them at once."""
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
            code = (left[:, at] * inverses[:, at]).round_().clamp_(LEAST_CODE, MOST_CODE)
            codes[:, at] = code
            error = (left[:, at] - code * steps[:, at]) / factor[:, at, at, None]
            errors[:, at - first] = error
            left[:, at + 1 : end].baddbmm_(factor[:, at, at + 1 : end, None], error[:, None], alpha=-1)
        left[:, end:].baddbmm_(factor[:, first:end, end:].mT, errors, alpha=-1)
    return torch.empty_like(codes).scatter_(1, lines, codes).mT.contiguous()


def _feedback(products: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse, (K, K) float32: row k says how an error of column k is made up
    for by the ones behind it. Inputs that depend on one another are told apart by damping, as much as it takes.

    It is the inverse of the factor M of products = M M^T, and M is the lower factor of the products in reverse order,
    reversed: so no inverse of all products is needed.
    """
    wide = products.double().flip(0, 1)
    ones = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    usual = float(wide.diagonal().mean()) or 1.0
    damping, failed = DAMPING, True
    while failed:
        lower, info = torch.linalg.cholesky_ex(wide + damping * usual * ones)
        failed, damping = bool(info), damping * 10
    upper: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), ones, upper=True)
    return upper.float()
