"""The compiled operators behind the signatures of their references. float32 and bfloat16, contiguous CPU tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from batchinfer_kernels.cpu.attention_plan import CachePages, Items
from batchinfer_kernels.cpu.build import load_library
from batchinfer_kernels.cpu.memory import HugePages
from batchinfer_kernels.rms_norm import check_rms_norm
from batchinfer_kernels.rope_store import check_rotary_shapes

SUFFIX = {torch.float32: "_f32", torch.bfloat16: "_bf16"}
WORD_BYTES = 4
MAX_HEAD_DIM = 256
Kind = Literal["plain", "float", "gated"]
_KINDS: dict[Kind, int] = {"plain": 0, "float": 1, "gated": 2}  # as in panels.h
_GREATEST = 3
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_POINTER] * 5 + [_LONG] * 2 + [_FLOAT],
    "silu_gate": [_POINTER] * 2 + [_LONG] * 2,
    "rope_store": [_POINTER] * 3 + [_LONG] + [_POINTER] * 9 + [_FLOAT] + [_LONG] * 7,
    "pack_linear": [_POINTER] + [_LONG] * 3 + [_POINTER],
    "linear": [_POINTER] * 4 + [_LONG] * 4,
    "quantized_linear": [_POINTER] * 8 + [_LONG] * 4,
    "paged_attention": [_POINTER] * 4
    + [_LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _FLOAT, _POINTER]
    + [_LONG] * 6,
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight (outputs, inputs) cut into panels, as linear.h says, with its bias in the order of their columns."""

    panels: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int
    kind: Kind

    @property
    def columns(self) -> int:
        """Columns of the result: a gated weight's halves become one."""
        return self.outputs // 2 if self.kind == "gated" else self.outputs


@dataclass(frozen=True, slots=True, eq=False)
class PackedCodes:
    """A quantised weight, as quantized_linear.h says."""

    weight: PackedWeight  # int8 panels
    starts: Tensor  # (columns of all panels,) int32: -128 times the sum of the column's codes
    scales: Tensor  # (columns of all panels,) float32


class CompiledOperators:
    """Loads, and if need be builds, the library. Raises NoCompiler."""

    def __init__(self, cache: Path | None = None) -> None:
        library = load_library(cache)
        self._pages = HugePages()
        self._columns = _function(library, "packed_columns", [_LONG, _LONG], _LONG)
        self._packed_order = _function(library, "packed_order", [_LONG, _LONG, _POINTER])
        self._pack_codes = _function(library, "pack_codes", [_POINTER] + [_LONG] * 3 + [_POINTER] * 2)
        self._ranked_columns = _function(library, "ranked_columns", [_POINTER] * 2 + [_LONG])
        self.lanes = int(_function(library, "lanes", [], _LONG)())
        self.tile = int(self._columns(1, 0))  # keys of an attention tile
        self._functions = {
            (name, dtype): _function(library, name + suffix, arguments)
            for name, arguments in _SIGNATURES.items()
            for dtype, suffix in SUFFIX.items()
        }

    def pages(self, block_size: int) -> CachePages:
        """How a cache of this block size is laid out in units and tiles."""
        return CachePages(block_size, self.lanes, self.tile // self.lanes)

    def cache_shape(self, kv_heads: int, block_size: int, head_dim: int) -> tuple[int, int, int]:
        """Of one block: (kv_heads, block size, head size), the last two rounded up to whole vectors."""
        return kv_heads, _up(block_size, self.lanes), _up(head_dim, self.lanes)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, kind: Kind = "plain") -> PackedWeight:
        """weight: (outputs, inputs); gated: gate above up. Raises ValueError for what is no such weight."""
        outputs, inputs = _check_weight(weight, bias, kind)
        words = -(-inputs * weight.element_size() // WORD_BYTES)
        order = self._order(outputs, kind)
        size = len(order) * words * WORD_BYTES // weight.element_size()
        panels = self._pages.zeros(size, weight.dtype)
        self._call("pack_linear", weight, weight.contiguous(), outputs, inputs, kind == "gated", panels)
        return PackedWeight(panels, _reordered(bias, order), outputs, inputs, kind)

    def pack_codes(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, kind: Kind = "plain"
    ) -> PackedCodes:
        """codes: (outputs, inputs) int8 in -127 … 127; scales: (outputs,) float32."""
        outputs, inputs = _check_weight(codes, bias, kind)
        order = self._order(outputs, kind)
        panels = self._pages.zeros(len(order) * _up(inputs, WORD_BYTES), torch.int8)
        starts = torch.empty(len(order), dtype=torch.int32)
        arguments = (codes.contiguous().data_ptr(), outputs, inputs, kind == "gated")
        self._pack_codes(*arguments, panels.data_ptr(), starts.data_ptr())
        weight = PackedWeight(panels, _reordered(bias, order), outputs, inputs, kind)
        ordered = _reordered(scales.float(), order)
        assert ordered is not None
        return PackedCodes(weight, starts, ordered)

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x: (T, inputs) → (T, columns), float32 where the weight's kind is "float"."""
        y = _result(x, weight)
        self._linear(x, weight, y, _KINDS[weight.kind])
        return y

    def quantized_linear(self, x: Tensor, codes: PackedCodes) -> Tensor:
        """See batchinfer_kernels.quantized_linear; shapes as `linear`."""
        y = _result(x, codes.weight)
        self._quantized_linear(x, codes, y, _KINDS[codes.weight.kind])
        return y

    def greatest(self, x: Tensor, weight: PackedWeight | PackedCodes) -> Tensor:
        """(T,) int64: the column where each row of the product is greatest, the lowest of equals; -1 where that is not
        finite or any column is no number. The product, of kind "float", is never written."""
        _check_input(x, weight if isinstance(weight, PackedWeight) else weight.weight)
        found = torch.zeros(x.shape[0], dtype=torch.int64)
        if isinstance(weight, PackedWeight):
            self._linear(x, weight, found, _GREATEST)
        else:
            self._quantized_linear(x, weight, found, _GREATEST)
        self._ranked_columns(found.data_ptr(), found.data_ptr(), len(found))
        return found

    def _linear(self, x: Tensor, weight: PackedWeight, y: Tensor, kind: int) -> None:
        sizes = (x.shape[0], weight.outputs, weight.inputs, kind)
        self._call("linear", x, x, weight.panels, weight.bias, y, *sizes)

    def _quantized_linear(self, x: Tensor, codes: PackedCodes, y: Tensor, kind: int) -> None:
        weight, rows = codes.weight, x.shape[0]
        room = torch.empty(rows, _up(weight.inputs, WORD_BYTES), dtype=torch.uint8)
        row_scales = torch.empty(rows, dtype=torch.float32)
        sizes = (rows, weight.outputs, weight.inputs, kind)
        arrays = (weight.panels, codes.starts, codes.scales, weight.bias, y, room, row_scales)
        self._call("quantized_linear", x, x, *arrays, *sizes)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See batchinfer_kernels.rms_norm."""
        check_rms_norm(x, weight, residual)
        y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        rows = x.numel() // max(x.shape[-1], 1)
        self._call("rms_norm", x, x, residual, weight, y, total, rows, x.shape[-1], eps)
        return y, total

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """See batchinfer_kernels.gated_activation, for silu."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if gate_up.shape[1] % 2:
            raise ValueError(f"gate and up need an even number of columns, got {gate_up.shape[1]}")
        y = gate_up.new_empty(rows, width)
        self._call("silu_gate", gate_up, gate_up, y, rows, width)
        return y

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_size: int,
        slots: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """See batchinfer_kernels.rope_store; cos and sin are whole tables (positions, D/2), looked up here, and the
        caches (blocks, *cache_shape).

        q, k and v may be slices of one fused tensor: heads within rows of equal stride.
        """
        tokens, q_heads, dim = q.shape
        check_rotary_shapes(q, k, v, cos.shape[1], slots)
        self._check_cache(k_cache, k.shape[1], block_size, dim)
        if not (
            q.stride(0) == k.stride(0) == v.stride(0)
            and q.stride(1) == k.stride(1) == v.stride(1) == q.shape[2]
        ):
            raise ValueError(
                f"q, k and v have strides {q.stride()}, {k.stride()}, {v.stride()}: wanted equal rows"
            )
        out = q.new_empty(q.shape)
        sizes = (tokens, q_heads, k.shape[1], dim, k_cache.shape[3], block_size, k_cache.shape[2])
        arrays = (cos, sin, positions, slots, k_cache, v_cache, out, q_norm, k_norm)
        self._call("rope_store", q, q, k, v, q.stride(0), *arrays, eps, *sizes, sliced=3)
        return out

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_size: int,
        block_tables: Tensor,
        items: Items,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See batchinfer_kernels.paged_attention; `items` were planned for these tables with `pages(block_size)`,
        the caches are (blocks, *cache_shape)."""
        tokens, q_heads, dim = q.shape
        kv_heads = k_cache.shape[1]
        self._check_cache(k_cache, kv_heads, block_size, dim)
        if q_heads % kv_heads or block_tables.dim() != 2:
            raise ValueError(
                f"{q_heads} query heads, {kv_heads} KV heads, tables {tuple(block_tables.shape)}"
            )
        out, width = torch.empty_like(q), k_cache.shape[3]
        kept = width + self.lanes + 1  # floats of a row's state between levels
        state = q.new_empty(tokens, q_heads, kept, dtype=torch.float32) if items.levels > 1 else None
        planned = (block_tables.shape[1], items.items, items.level_ends, items.levels, items.rows)
        sizes = (q_heads, kv_heads, dim, width, block_size, k_cache.shape[2])
        arrays = (q, k_cache, v_cache, block_tables)
        self._call("paged_attention", q, *arrays, *planned, state, window or 0, scale, out, *sizes)
        return out

    def _check_cache(self, cache: Tensor, kv_heads: int, block_size: int, dim: int) -> None:
        if cache.shape[1:] != self.cache_shape(kv_heads, block_size, dim):
            wanted = self.cache_shape(kv_heads, block_size, dim)
            raise ValueError(f"the cache's blocks are {tuple(cache.shape[1:])}, wanted {wanted}")

    def _order(self, outputs: int, kind: Kind) -> Tensor:
        gated = int(kind == "gated")
        order = torch.empty(int(self._columns(outputs, gated)), dtype=torch.int64)
        self._packed_order(outputs, gated, order.data_ptr())
        return order

    def _call(self, name: str, like: Tensor, *arguments: Tensor | float | None, sliced: int = 0) -> None:
        """`sliced`: so many leading tensors need not be contiguous."""
        plain: list[float | None] = []
        for number, argument in enumerate(arguments):
            if not isinstance(argument, Tensor):
                plain.append(argument)
                continue
            if not (number < sliced or argument.is_contiguous()) or not argument.is_cpu:
                raise ValueError(
                    f"{name}: a tensor of shape {tuple(argument.shape)} is not contiguous on the CPU"
                )
            plain.append(argument.data_ptr())
        function = self._functions.get((name, like.dtype))
        if function is None:
            raise ValueError(f"{name}: {like.dtype} is not compiled; there are {', '.join(map(str, SUFFIX))}")
        function(*plain)


def _function(library: ctypes.CDLL, name: str, arguments: list[Any], result: Any = None) -> Any:
    function = library[name]
    function.argtypes, function.restype = arguments, result
    return function


def _check_weight(weight: Tensor, bias: Tensor | None, kind: Kind) -> tuple[int, int]:
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"weight {tuple(weight.shape)} is not a matrix, or its bias does not fit")
    if kind == "gated" and weight.shape[0] % 2:
        raise ValueError(f"gate and up need an even number of rows, got {weight.shape[0]}")
    return weight.shape[0], weight.shape[1]


def _reordered(values: Tensor | None, order: Tensor) -> Tensor | None:
    """Per output → per column of the panels, 0 where a column has no output."""
    if values is None:
        return None
    return torch.cat((values, values.new_zeros(1)))[order]  # -1 takes the zero


def _check_input(x: Tensor, weight: PackedWeight) -> None:
    if x.dim() != 2 or x.shape[1] != weight.inputs:
        raise ValueError(f"x is {tuple(x.shape)}, the weight takes {weight.inputs} inputs")


def _result(x: Tensor, weight: PackedWeight) -> Tensor:
    _check_input(x, weight)
    return torch.empty(len(x), weight.columns, dtype=torch.float32 if weight.kind == "float" else x.dtype)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
