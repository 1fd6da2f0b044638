"""A fake device: its tensors are in the host's memory and claim to be on a device.

Within `far_away()`, tensors created on device FAR are computed on the CPU, one operator at a time. As with
CUDA, an operator raises if it gets tensors of the host and of the device. Reading a data pointer or an array
raises, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

FAR = torch.device("meta")  # no library is asked for it
# Operators that copy from one side to the other
COPIES = ("aten.copy_.default", "aten._to_copy.default")


class FarTensor(Tensor):
    """A tensor on the fake device."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        layout = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype}
        made: FarTensor = Tensor._make_wrapper_subclass(cls, near.shape, device=FAR, **layout)  # type: ignore[attr-defined]
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.near.tolist()


class _Everywhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Handles all operators, also those without tensors or with tensors of the host only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    far, near = list[Tensor](), list[Tensor]()

    def brought(value: Any) -> Any:
        if isinstance(value, FarTensor):
            far.append(value)
            return value.near
        if isinstance(value, Tensor) and value.dim():
            near.append(value)
        return value

    args, kwargs = tree_map(brought, args), tree_map(brought, kwargs)
    if far and near and str(func) not in COPIES:
        raise RuntimeError(f"{func} got tensors of two devices")
    device = kwargs.get("device")
    if device is not None:
        kwargs["device"] = "cpu"
    into_first = str(func) == "aten.copy_.default"
    there = _lies_far(into_first, far, args) if device is None else torch.device(device) == FAR
    made = func(*args, **kwargs)
    return tree_map(lambda one: FarTensor(one) if there and isinstance(one, Tensor) else one, made)


def _lies_far(into_first: bool, far: list[Tensor], args: Any) -> bool:
    """Return True if the result is on the far device; a copy is where its destination is."""
    return any(one.near is args[0] for one in far if isinstance(one, FarTensor)) if into_first else bool(far)


@contextmanager
def far_away() -> Iterator[None]:
    """Provide the fake device within the block. Its tensors cannot be views in inference mode."""
    with patch.object(torch, "inference_mode", torch.no_grad), torch.no_grad(), _Everywhere():
        yield
