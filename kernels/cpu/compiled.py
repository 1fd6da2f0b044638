"""The compiled operators behind the signatures of their references. float32 and bfloat16, contiguous CPU tensors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.cpu.build import load_library
from batchinfer_kernels.paged_attention import check_paged_attention
from batchinfer_kernels.rms_norm import check_rms_norm
from batchinfer_kernels.rope_store import check_rope_store

SUFFIX = {torch.float32: "_f32", torch.bfloat16: "_bf16"}
MAX_ROWS = 16  # as in ops.c
MAX_HEAD_DIM = 256
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_POINTER] * 5 + [_LONG] * 2 + [_FLOAT],
    "silu_gate": [_POINTER] * 2 + [_LONG] * 2,
    "rope_store": [_POINTER] * 3 + [_LONG] + [_POINTER] * 9 + [_FLOAT] + [_LONG] * 5,
    "paged_attention": [_POINTER] * 4 + [_LONG, _POINTER, _LONG, _LONG, _FLOAT, _POINTER] + [_LONG] * 4,
}


class CompiledOperators:
    """Loads, and if need be builds, the library. Raises NoCompiler."""

    def __init__(self, cache: Path | None = None) -> None:
        library = load_library(cache)
        self._functions = {}
        for name, arguments in _SIGNATURES.items():
            for dtype, suffix in SUFFIX.items():
                function = library[name + suffix]
                function.argtypes, function.restype = arguments, None
                self._functions[name, dtype] = function

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
        slots: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """See batchinfer_kernels.rope_store; cos and sin are whole tables (positions, D/2), looked up here.

        q, k and v may be slices of one fused tensor: heads within rows of equal stride.
        """
        check_rope_store(q, k, v, cos[:1].expand(q.shape[0], -1), k_cache, slots)
        if not (
            q.stride(0) == k.stride(0) == v.stride(0)
            and q.stride(1) == k.stride(1) == v.stride(1) == q.shape[2]
        ):
            raise ValueError(
                f"q, k and v have strides {q.stride()}, {k.stride()}, {v.stride()}: wanted equal rows"
            )
        tokens, q_heads, dim = q.shape
        out = q.new_empty(q.shape)
        sizes = (tokens, q_heads, k.shape[1], dim, k_cache.shape[2])
        arrays = (cos, sin, positions, slots, k_cache, v_cache, out, q_norm, k_norm)
        self._call("rope_store", q, q, k, v, q.stride(0), *arrays, eps, *sizes, sliced=3)
        return out

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        items: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See batchinfer_kernels.paged_attention; `items` comes from `attention_items`."""
        check_paged_attention(q, k_cache, v_cache, block_tables)
        out, (_, q_heads, dim) = torch.empty_like(q), q.shape
        sizes = (q_heads, k_cache.shape[1], dim, k_cache.shape[2])
        self._call(
            "paged_attention",
            q,
            q,
            k_cache,
            v_cache,
            block_tables,
            block_tables.shape[1],
            items,
            items.shape[0],
            window or 0,
            scale,
            out,
            *sizes,
        )
        return out

    def _call(self, name: str, like: Tensor, *arguments: Tensor | float | None, sliced: int = 0) -> None:
        """`sliced`: so many leading tensors need not be contiguous."""
        plain: list[float | None] = []
        for number, argument in enumerate(arguments):
            if not isinstance(argument, Tensor):
                plain.append(argument)
                continue
            if argument.device.type != "cpu" or not (number < sliced or argument.is_contiguous()):
                raise ValueError(
                    f"{name}: a tensor of shape {tuple(argument.shape)} is not contiguous on the CPU"
                )
            plain.append(argument.data_ptr())
        function = self._functions.get((name, like.dtype))
        if function is None:
            raise ValueError(f"{name}: {like.dtype} is not compiled; there are {', '.join(map(str, SUFFIX))}")
        function(*plain)


def attention_items(query_lens: list[int], context_lens: list[int], group: int) -> Tensor:
    """Pieces of work (n, 4) int64: sequence, first token of the step, queries, position of the first query.

    A piece holds at most MAX_ROWS rows (queries × query heads a KV head). The longest come first, so that no thread
    is left alone with one at the end. Raises ValueError for a group larger than MAX_ROWS.
    """
    if group > MAX_ROWS:
        raise ValueError(f"{group} query heads share a KV head; at most {MAX_ROWS} may")
    most, items, token = MAX_ROWS // group, [], 0
    for row, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        for start in range(0, queries, most):
            count = min(most, queries - start)
            items.append((row, token + start, count, context - queries + start))
        token += queries
    items.sort(key=lambda item: item[3], reverse=True)
    return torch.tensor(items, dtype=torch.int64).view(-1, 4)
