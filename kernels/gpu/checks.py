"""Argument checks that all launchers share."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_same_dtype(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all given tensors have the same dtype: float32, float16 or bfloat16. None is ignored."""
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) != 1 or not set(given.values()) <= set(FLOATS):
        found = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise ValueError(f"expected one dtype of float32, float16 and bfloat16, got {found}")


def check_vectors(length: int, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are contiguous, of this dtype and shape (length,). None is ignored."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != (length,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected ({length},) {dtype}")


def unit_columns(**tensors: Tensor) -> None:
    """Raise ValueError unless the last dimension of each given tensor has stride 1, as the kernels need."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last dimension of {name} has stride {tensor.stride(-1)}, expected 1")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all given tensors are contiguous. None is ignored."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, but must be contiguous")


def as_rows(x: Tensor) -> Tensor:
    """Return x (..., columns) as a matrix (rows, columns) with contiguous rows; a view if possible."""
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()
