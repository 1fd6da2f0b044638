"""Converts KV caches between the plain layout (blocks, kv_heads, block_size, D) and that of compiled operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer_kernels.cpu.compiled import WORD_BYTES, CompiledOperators


def laid_out(compiled: CompiledOperators, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Convert plain K and V for the compiled operators. Padding is NaN."""
    blocks, kv_heads, block_size, dim = k.shape
    _, rows, width = compiled.cache_shape(kv_heads, block_size, dim)
    pair = WORD_BYTES // k.element_size()
    padded = [torch.full((blocks, kv_heads, rows, width), float("nan"), dtype=k.dtype) for _ in range(2)]
    for whole, part in zip(padded, (k, v), strict=True):
        whole[:, :, :block_size, :dim] = part
    words_of_heads = padded[0].view(blocks, kv_heads, rows, width // pair, pair).transpose(2, 3)
    words_of_tokens = padded[1].view(blocks, kv_heads, rows // pair, pair, width).transpose(3, 4)
    shape = (blocks, kv_heads, rows, width)
    return words_of_heads.reshape(shape).contiguous(), words_of_tokens.reshape(shape).contiguous()


def codes_laid_out(
    compiled: CompiledOperators, k: Tensor, v: Tensor, scales: Sequence[Tensor], itemsize: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return quantised K, V and their scales in the layout of values of `itemsize` bytes.

    Padding is a quantised value that never occurs, with scale NaN.
    """
    laid = laid_out(compiled, *(c.to(torch.float32 if itemsize == 4 else torch.bfloat16) for c in (k, v)))
    codes = [torch.where(of.isnan(), -128.0, of.float()).to(torch.int8) for of in laid]
    room = [torch.full(codes[0].shape[:3], float("nan")) for _ in scales]
    for whole, part in zip(room, scales, strict=True):
        whole[:, :, : k.shape[2]] = part
    return codes[0], codes[1], (room[0], room[1])


def plain(
    k: Tensor, v: Tensor, block_size: int, dim: int, itemsize: int | None = None
) -> tuple[Tensor, Tensor]:
    """Convert back to the plain layout, without padding.

    `itemsize`: bytes of a value of the run, for quantised caches.
    """
    blocks, kv_heads, rows, width = k.shape
    pair = WORD_BYTES // (itemsize or k.element_size())
    k = k.view(blocks, kv_heads, width // pair, rows, pair).transpose(2, 3).reshape(k.shape)
    v = v.view(blocks, kv_heads, rows // pair, width, pair).transpose(3, 4).reshape(v.shape)
    return k[:, :, :block_size, :dim], v[:, :, :block_size, :dim]
