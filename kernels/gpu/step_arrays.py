"""Small arrays that the kernels of a step read, put on the device by one copy, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.gpu.attention_launch import staged

# Values of int32: each array begins at a multiple of 16 bytes, on which what Triton compiles depends
ALIGNMENT = 4
Values: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepArray:
    """It stands for one of the arrays."""

    arrays: StepArrays
    number: int

    @property
    def values(self) -> Values:
        """Return what it holds, on the host."""
        return self.arrays.values[self.number]

    @property
    def tensor(self) -> Tensor:
        """The values on the device, int32: put there, together with all arrays that are not there yet, when the first
        of them is read."""
        return self.arrays.on_device(self.number)

    def of(self, arrays: StepArrays) -> StepArray:
        """Return the one with this number among other arrays."""
        return StepArray(arrays, self.number)


class StepArrays:
    """The arrays of all plans of a step. Copies are queued before what reads them, and nobody waits for one."""

    def __init__(
        self, device: torch.device, values: Sequence[Values] = (), origin: StepArrays | None = None
    ) -> None:
        """`origin`: what these were made of by `again`."""
        self.device, self.values, self.origin = device, list(values), origin
        self._tensors: list[Tensor] = []
        self._copies: list[_Copy] = []

    def add(self, values: NDArray[Any]) -> StepArray:
        """Add an array, of integers."""
        self.values.append(np.ascontiguousarray(values, np.int32))
        return StepArray(self, len(self.values) - 1)

    def again(self) -> StepArrays:
        """Return arrays that hold the same, some of which will be `put` anew before they are read."""
        return StepArrays(self.device, self.values, self)

    def put(self, number: int, values: NDArray[Any]) -> StepArray:
        """Replace an array that has not been read yet."""
        assert number >= len(self._tensors)
        self.values[number] = np.ascontiguousarray(values, np.int32)
        return StepArray(self, number)

    def on_device(self, number: int) -> Tensor:
        """Return an array on the device; see StepArray."""
        if number >= len(self._tensors):
            self._send()
        return self._tensors[number]

    def place(self) -> None:
        """Put on the device what is not there yet."""
        if len(self._tensors) < len(self.values):
            self._send()

    def refill(self, other: StepArrays) -> None:
        """Overwrite the tensors, which a captured graph reads, with other arrays of the same shapes: by one copy of
        what differs. Raises ValueError for other shapes."""
        mine, theirs = ([one.shape for one in arrays.values] for arrays in (self, other))
        if mine != theirs:
            raise ValueError(f"arrays of {theirs} do not fit tensors made for {mine}")
        self.place()
        for copy in self._copies:
            copy.refill(self.values, other.values)
        self.values = list(other.values)

    def _send(self) -> None:
        first = len(self._tensors)
        copy = _Copy(first, self.values[first:], self.device)
        self._copies.append(copy)
        self._tensors += copy.tensors


class _Copy:
    """Arrays that lie behind one another on the device, from one with a certain number on."""

    def __init__(self, first: int, values: Sequence[Values], device: torch.device) -> None:
        self._first = first
        self._begins = [*accumulate((-(-one.size // ALIGNMENT) * ALIGNMENT for one in values), initial=0)]
        self._flat = staged(_joined(values), device).to(device, non_blocking=True)
        self.tensors = [
            self._flat.as_strided(one.shape, (one.shape[-1], 1)[-one.ndim :], begin)
            for begin, one in zip(self._begins, values, strict=False)
        ]

    def refill(self, old: Sequence[Values], new: Sequence[Values]) -> None:
        """Copy the arrays from the first that differs to the last; those that are the same objects do not. Contexts,
        which the device changes between the steps of a launch, are another object in each plan."""
        numbers = range(self._first, self._first + len(self.tensors))
        changed = [number for number in numbers if old[number] is not new[number]]
        if not changed:
            return
        first, end = changed[0], changed[-1] + 1
        begin, last = self._begins[first - self._first], self._begins[end - self._first]
        host = staged(_joined(new[first:end]), self._flat.device)
        self._flat[begin:last].copy_(host, non_blocking=True)


def _joined(values: Sequence[Values]) -> Values:
    parts = [np.zeros(0, np.int32)]
    for one in values:
        parts.append(one.ravel())
        if one.size % ALIGNMENT:
            parts.append(np.zeros(-one.size % ALIGNMENT, np.int32))
    return np.concatenate(parts)
