"""Tensors of Gluon as arrays: layouts must fit, integers must not overflow, and arithmetic needs float32."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.language.core import constexpr

INTEGERS = {gl.int1: 1, gl.int32: 32, gl.int64: 64, gl.int16: 16, gl.int8: 8, gl.uint8: 8}
TORCH = {gl.bfloat16: torch.bfloat16, gl.float16: torch.float16, gl.float32: torch.float32}
OF_TORCH = {
    **{kind: dtype for dtype, kind in TORCH.items()},
    **{torch.int32: gl.int32, torch.int64: gl.int64, torch.int8: gl.int8, torch.uint8: gl.uint8},
    torch.float8_e4m3fn: gl.float8e4nv,
}


def plain(value: Any) -> Any:
    return value.value if isinstance(value, constexpr) else value


class Tensor:
    """A block of values with a layout, or a scalar without one."""

    __array_ufunc__ = None

    def __init__(self, values: Any, dtype: Any, layout: Any = None) -> None:
        self.values, self.dtype, self.layout = np.asarray(values), dtype, layout
        assert (layout is None) == (self.values.ndim == 0), "blocks have layouts, and scalars none"
        if dtype in INTEGERS and dtype != gl.int1:
            bits = INTEGERS[dtype] - (dtype != gl.uint8)
            largest = 2**bits - 1
            if self.values.size and not -largest - 1 <= self.values.min() <= self.values.max() <= largest:
                raise OverflowError(f"a value does not fit into {dtype}")

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def type(self) -> Tensor:
        return self

    def __bool__(self) -> bool:
        assert self.layout is None, "branches are taken by scalars"
        return bool(self.values)

    def __index__(self) -> int:
        assert self.layout is None
        assert self.dtype in INTEGERS
        return int(self.values)

    def to(self, dtype: Any) -> Tensor:
        if dtype in TORCH:
            rounded = torch.from_numpy(np.asarray(self.values, np.float32)).to(TORCH[dtype]).float().numpy()
            return Tensor(rounded, dtype, self.layout)
        assert {dtype, self.dtype} <= set(INTEGERS)
        return Tensor(self.values, dtype, self.layout)

    def _with(self, other: Any, by: Callable[[Any, Any], Any], *, turned: bool = False) -> Tensor:
        other = plain(other)
        layout = self.layout
        if isinstance(other, Tensor):
            assert self.layout is None or other.layout in (None, self.layout), "layouts differ"
            layout = other.layout if layout is None else layout
            kind, values = _joined(self.dtype, other.dtype), other.values
        else:
            number = isinstance(other, int) or self.dtype not in INTEGERS
            assert number, "integers are not calculated with fractions"
            kind, values = self.dtype, np.asarray(other)
        assert kind not in (gl.bfloat16, gl.float16), "16 bits are too few to calculate with"
        if kind not in INTEGERS:
            values = np.asarray(values, np.float32)
        pair = (values, self.values) if turned else (self.values, values)
        if kind in INTEGERS:
            pair = tuple(np.asarray(one, np.int64) if kind != gl.int1 else one for one in pair)
        with np.errstate(all="ignore"):
            made = np.asarray(by(*pair))
        return Tensor(made, gl.int1 if made.dtype == bool else kind, layout)


def _joined(one: Any, other: Any) -> Any:
    if one in INTEGERS and other in INTEGERS:
        return one if INTEGERS[one] >= INTEGERS[other] else other
    return other if one in INTEGERS else one


def _quotient(one: Any, other: Any) -> Any:
    return np.trunc(np.asarray(one) / np.asarray(other)).astype(np.int64)  # as C, not as Python


def _rest(one: Any, other: Any) -> Any:
    return one - _quotient(one, other) * other


_BINARY = {
    **{name: getattr(operator, f"__{name}__") for name in ("add", "sub", "mul", "and", "or", "xor")},
    **{name: getattr(operator, f"__{name}__") for name in ("lshift", "rshift", "truediv")},
    **{"floordiv": _quotient, "mod": _rest},
}
for _name, _by in _BINARY.items():
    setattr(Tensor, f"__{_name}__", lambda self, other, by=_by: self._with(other, by))
    setattr(Tensor, f"__r{_name}__", lambda self, other, by=_by: self._with(other, by, turned=True))
for _by in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    setattr(Tensor, f"__{_by.__name__}__", lambda self, other, by=_by: self._with(other, by))


class Pointer:
    """An address in GPU memory: the values of a tensor in order."""

    def __init__(self, memory: Memory, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, offset + self.offset)

    def places(self, mask: Any) -> tuple[Any, Any, Any]:
        """Return (offsets, mask, layout)."""
        offset = self.offset if isinstance(self.offset, Tensor) else Tensor(self.offset, gl.int64)
        counts = np.broadcast_to(np.asarray(True if mask is None else _values(mask)), offset.values.shape)
        assert mask is None or isinstance(mask, bool) or mask.layout == offset.layout
        real = offset.values[counts]
        if real.size and not 0 <= real.min() <= real.max() < len(self.memory.values):
            raise IndexError(f"{self.memory.name}: places from {real.min()} to {real.max()}")
        return np.where(counts, offset.values, 0), counts, offset.layout


class Memory:
    """A tensor's values in GPU memory."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor, self.dtype = name, tensor, OF_TORCH[tensor.dtype]
        size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
        self.values = tensor.as_strided((size,), (1,)).to(kind).numpy().copy()

    def give_back(self) -> None:
        flat = self.tensor.as_strided((len(self.values),), (1,))
        flat.copy_(torch.from_numpy(self.values))


class Pages:
    """A tensor descriptor, which the hardware copies from."""

    def __init__(self, name: str, told: Any) -> None:
        strides = [stride * told.base.element_size() for stride in told.strides[:-1]]
        assert told.strides[-1] == 1
        assert not any(stride % 16 for stride in strides), "rows lie multiples of 16 bytes apart"
        assert all(0 < n < 2**32 for n in told.shape)
        assert all(n <= 256 for n in told.block_shape)
        self.name, self.layout, self.dtype = name, told.layout, OF_TORCH[told.base.dtype]
        kind = torch.float32 if told.base.is_floating_point() else torch.int64
        self.values = told.base.as_strided(told.shape, told.strides).to(kind).numpy()
        self.block_type = Block(list(told.block_shape), told.base.element_size())

    def box(self, corner: list[int]) -> Any:
        """Return the box of values at a corner, with 0 outside of the tensor."""
        assert len(corner) == self.values.ndim
        box = np.zeros(self.block_type.shape, np.float32)
        inside = [
            (max(0, at), min(total, at + n))
            for at, n, total in zip(corner, box.shape, self.values.shape, strict=True)
        ]
        if all(begin < end for begin, end in inside):
            there = tuple(slice(*span) for span in inside)
            here = tuple(slice(begin - at, end - at) for at, (begin, end) in zip(corner, inside, strict=True))
            box[here] = self.values[there]
        return box


class Block:
    def __init__(self, shape: list[int], size: int) -> None:
        self.shape, self.nbytes = shape, int(np.prod(shape)) * size


def _values(value: Any) -> Any:
    return value.values if isinstance(value, Tensor) else plain(value)


def load(pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False) -> Tensor:
    places, counts, layout = pointer.places(mask)
    assert mask is None or other is not None, "a masked load needs a default"
    found = np.where(counts, pointer.memory.values[places], 0 if other is None else other)
    return Tensor(found, pointer.memory.dtype, layout)


def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    places, counts, layout = pointer.places(mask)
    assert (value.layout, value.dtype) == (layout, pointer.memory.dtype), (
        "a stored value has the layout and dtype of its destination"
    )
    pointer.memory.values[places[counts]] = value.values[counts]


def arange(start: int, end: int, layout: Any) -> Tensor:
    return Tensor(np.arange(start, end), gl.int32, layout)


def full(shape: list[int], value: Any, dtype: Any, layout: Any) -> Tensor:
    return Tensor(np.full(shape, value, np.float32 if dtype in TORCH else np.int64), dtype, layout)


def to_tensor(value: int) -> Tensor:
    return Tensor(value, gl.int32)


def expand_dims(value: Tensor, axis: int) -> Tensor:
    assert isinstance(value.layout, gl.SliceLayout)
    assert value.layout.dim == axis
    return Tensor(np.expand_dims(value.values, axis), value.dtype, value.layout.parent)


def convert_layout(value: Tensor, layout: Any) -> Tensor:
    return Tensor(value.values, value.dtype, layout)


def _reduced(by: Any) -> Callable[[Tensor, int], Tensor]:
    def reduced(value: Tensor, axis: int) -> Tensor:
        assert value.dtype == gl.float32
        with np.errstate(all="ignore"):
            return Tensor(by.reduce(value.values, axis), value.dtype, gl.SliceLayout(axis, value.layout))

    return reduced


def _greater(one: Any, other: Any, by: Any) -> Any:
    one, other = (other, one) if not isinstance(one, Tensor) else (one, other)
    return one._with(other, by) if isinstance(one, Tensor) else int(by(one, other))


def maximum(one: Any, other: Any) -> Any:
    return _greater(one, other, np.fmax)


def minimum(one: Any, other: Any) -> Any:
    return _greater(one, other, np.fmin)


def where(condition: Tensor, one: Any, other: Any) -> Tensor:
    known = one if isinstance(one, Tensor) else other
    assert condition.dtype == gl.int1
    picked = known._with(0, lambda values, _: np.where(condition.values, _values(one), _values(other)))
    layouts = {part.layout for part in (condition, one, other) if isinstance(part, Tensor)} - {None}
    assert len(layouts) <= 1, "layouts differ"
    return Tensor(picked.values, known.dtype, condition.layout)


def exp2(value: Tensor) -> Tensor:
    assert value.dtype == gl.float32
    with np.errstate(all="ignore"):
        return Tensor(np.exp2(value.values), value.dtype, value.layout)


FUNCTIONS: dict[str, Any] = {
    **{one.__name__: one for one in (load, store, arange, full, to_tensor, expand_dims, convert_layout)},
    **{one.__name__: one for one in (maximum, minimum, where, exp2)},
    **{"max": _reduced(np.fmax), "sum": _reduced(np.add), "static_range": range},
}
