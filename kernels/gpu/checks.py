"""The checks that every launcher makes of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_same_dtype(**tensors: Tensor | None) -> None:
    """Raises ValueError unless all are of one floating-point type that the kernels know. None is left out."""
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) != 1 or not set(given.values()) <= set(FLOATS):
        found = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise ValueError(f"expected one of float32, float16 and bfloat16 throughout, got {found}")


def check_vectors(length: int, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Raises ValueError unless all are contiguous, of this dtype and of shape (length,). None is left out."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != (length,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected ({length},) {dtype}")


def unit_columns(**tensors: Tensor) -> None:
    """Raises ValueError unless the values of each tensor's last dimension lie next to one another."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last dimension of {name} has stride {tensor.stride(-1)}, expected 1")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raises ValueError unless all are contiguous. None is left out."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, and has to be contiguous")


def as_rows(x: Tensor) -> Tensor:
    """(..., columns) as a matrix whose rows are contiguous; a view where x allows it."""
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()
