"""Asynchronous copies between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes: the widest load of a kernel
Arrays = Sequence[NDArray[Any]]
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")}


class Upload:
    """Device tensors that are filled from numpy arrays, in one asynchronous transfer from pinned memory.

    The caller may modify its arrays as soon as a call returns, even if the device is a CPU.

    Args:
        arrays: The arrays to copy: int32, int64, float32 or float64.
        device: The device of the tensors.
    """

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        self._layout = [(array.dtype, array.shape) for array in arrays]
        self._flat = _staged(arrays, device).to(device, non_blocking=True)
        self.tensors = [
            _viewed(self._flat, place, array)
            for place, array in zip(_places(arrays)[:-1], arrays, strict=True)
        ]

    def refill(self, arrays: Arrays) -> None:
        """Overwrite the device tensors with the values of other arrays, after all work that is queued so far.

        Raises:
            ValueError: If shapes or dtypes differ from the first arrays.
        """
        layout = [(array.dtype, array.shape) for array in arrays]
        if layout != self._layout:
            raise ValueError(f"arrays of {layout} do not fit tensors of {self._layout}")
        self._flat.copy_(_staged(arrays, self._flat.device), non_blocking=True)


def upload(arrays: Arrays, device: torch.device) -> list[Tensor]:
    """Copy arrays to a device in one asynchronous transfer, and return a tensor for each.

    Args:
        arrays: int32, int64, float32 or float64. The caller may modify them as soon as the call returns.
        device: The device of the tensors.
    """
    return Upload(arrays, device).tensors


def _places(arrays: Arrays) -> list[int]:
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    return [*accumulate(sizes, initial=0)]


def _staged(arrays: Arrays, device: torch.device) -> Tensor:
    places = _places(arrays)
    staged = torch.empty(places[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    raw = staged.numpy()
    for place, array in zip(places[:-1], arrays, strict=True):
        raw[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return staged


def _viewed(flat: Tensor, place: int, array: NDArray[Any]) -> Tensor:
    return flat[place : place + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)


class Download:
    """Copies device tensors to the host asynchronously. Creating the object queues the copies."""

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = [_copied(tensor) for tensor in tensors]
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def arrays(self) -> list[NDArray[Any]]:
        """Wait for the copies, but not for work that was queued after them, and return an array per tensor."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._host]


def _copied(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
