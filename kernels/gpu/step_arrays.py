"""The small arrays that the kernels of a step read, copied to the device together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.gpu.attention_launch import copy_to_pinned

# In int32 values. Arrays are aligned to 16 bytes, because Triton specialises kernels by alignment
ALIGNMENT = 4
Values: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepArray:
    """A reference to one of the arrays of a step.

    Attributes:
        arrays: all arrays of the step.
        number: index of the array in `arrays`.
    """

    arrays: StepArrays
    number: int

    @property
    def values(self) -> Values:
        """Return the values on the host."""
        return self.arrays.values[self.number]

    @property
    def tensor(self) -> Tensor:
        """Return the values on the device, int32. The first access copies all arrays that are not on the device yet."""
        return self.arrays.on_device(self.number)

    def of(self, arrays: StepArrays) -> StepArray:
        """Return a reference to the array with the same number in another StepArrays."""
        return StepArray(arrays, self.number)


class StepArrays:
    """The small integer arrays of all attention plans of a step, which are copied to the device together.

    Copies do not block the host.
    """

    def __init__(
        self, device: torch.device, values: Sequence[Values] = (), origin: StepArrays | None = None
    ) -> None:
        """Create the arrays of a step.

        Args:
            device: the device that receives the arrays.
            values: initial arrays.
            origin: the arrays of an earlier step, if `again` made these arrays from them.
        """
        self.device, self.values, self.origin = device, list(values), origin
        self._tensors: list[Tensor] = []
        self._copies: list[_Copy] = []

    def add(self, values: NDArray[Any]) -> StepArray:
        """Add an array of integers, converted to int32, and return a reference to it."""
        self.values.append(np.ascontiguousarray(values, np.int32))
        return StepArray(self, len(self.values) - 1)

    def again(self) -> StepArrays:
        """Return new arrays for a later step, with the same values. Some of them can be replaced by `put`."""
        return StepArrays(self.device, self.values, self)

    def put(self, number: int, values: NDArray[Any]) -> StepArray:
        """Replace array `number`, which has not been copied to the device yet, and return a reference to it."""
        assert number >= len(self._tensors)
        self.values[number] = np.ascontiguousarray(values, np.int32)
        return StepArray(self, number)

    def on_device(self, number: int) -> Tensor:
        """Return array `number` on the device; first copies all arrays that are not on the device yet."""
        if number >= len(self._tensors):
            self._send()
        return self._tensors[number]

    def place(self) -> None:
        """Copy all arrays to the device that are not on the device yet."""
        if len(self._tensors) < len(self.values):
            self._send()

    def refill(self, other: StepArrays) -> None:
        """Overwrite the tensors on the device, which a captured graph reads, with the arrays of `other`.

        A replay of the graph then computes the step of `other`. Only the range from the first to the last changed array
        is copied.

        Raises:
            ValueError: If shapes differ.
        """
        mine, theirs = ([one.shape for one in arrays.values] for arrays in (self, other))
        if mine != theirs:
            raise ValueError(f"arrays of shapes {theirs} do not match tensors of {mine}")
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
    def __init__(self, first: int, values: Sequence[Values], device: torch.device) -> None:
        self._first = first
        self._begins = [*accumulate((-(-one.size // ALIGNMENT) * ALIGNMENT for one in values), initial=0)]
        self._flat = copy_to_pinned(_joined(values), device).to(device, non_blocking=True)
        self.tensors = [
            self._flat.as_strided(one.shape, (one.shape[-1], 1)[-one.ndim :], begin)
            for begin, one in zip(self._begins, values, strict=False)
        ]

    def refill(self, old: Sequence[Values], new: Sequence[Values]) -> None:
        # Contexts change on the device between the steps of a launch, so each plan has its own array object for them
        numbers = range(self._first, self._first + len(self.tensors))
        changed = [number for number in numbers if old[number] is not new[number]]
        if not changed:
            return
        first, end = changed[0], changed[-1] + 1
        begin, last = self._begins[first - self._first], self._begins[end - self._first]
        host = copy_to_pinned(_joined(new[first:end]), self._flat.device)
        self._flat[begin:last].copy_(host, non_blocking=True)


def _joined(values: Sequence[Values]) -> Values:
    parts = [np.zeros(0, np.int32)]
    for one in values:
        parts.append(one.ravel())
        if one.size % ALIGNMENT:
            parts.append(np.zeros(-one.size % ALIGNMENT, np.int32))
    return np.concatenate(parts)
