"""Rotary position embedding (Su et al., 2021) of q and k, with optional QK-norm, and the write of K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.fp8_matmul import quantize_rows_fp8
from batchinfer_kernels.paged_attention import LARGEST_CODE, check_scales
from batchinfer_kernels.quantized_linear import quantize_rows
from batchinfer_kernels.rms_norm import rms_norm_reference


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x with the first 2 × pairs values of each head rotated (RoPE); the other values stay the same.

    Args:
        x: (T, heads, D).
        cos: (T, pairs) float32, for the position of each token.
        sin: as `cos`.
        interleaved: True if values 2i and 2i + 1 form a pair, as in GPT-J; False for values i and i + pairs, as in
            Llama.
    """
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs].float(), x[..., 2 * pairs :]
    first, second = (
        turned.reshape(*turned.shape[:-1], pairs, 2).unbind(-1) if interleaved else turned.chunk(2, -1)
    )
    c, s = cos[:, None], sin[:, None]
    both = (first * c - second * s, second * c + first * s)
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def check_pairs(q: Tensor, pairs: int) -> None:
    """Raise ValueError unless q is (T, heads, D) with D ≥ 2 × pairs, so that `pairs` pairs of values can be rotated."""
    if q.dim() != 3 or not 0 < 2 * pairs <= q.shape[2]:
        raise ValueError(f"heads of q {tuple(q.shape)} are rotated in {pairs} pairs")


def check_rotary(q: Tensor, k: Tensor, v: Tensor, pairs: int, slots: Tensor) -> None:
    """Raise ValueError if q, k, v and slots do not match, or heads have fewer than 2 × pairs values."""
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not match")
    check_pairs(q, pairs)
    if slots.shape != q.shape[:1]:
        raise ValueError(f"there are {tuple(slots.shape)} slots for {q.shape[0]} tokens")


def check_caches(
    k: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """Raise ValueError unless both caches have the same shape and dtype, match k, and have scales if quantised."""
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[1::2] != k.shape[1:]:
        raise ValueError(
            f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} do not match k {tuple(k.shape)}"
        )
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (k.dtype, *LARGEST_CODE):
        raise ValueError(f"k is {k.dtype}, its caches are {k_cache.dtype} and {v_cache.dtype}")
    check_scales(k_cache, k_scale, v_scale)


def check_rope_store(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, slots: Tensor) -> None:
    """Raise ValueError unless the tensors have the shapes that `rope_store_reference` accepts."""
    check_rotary(q, k, v, cos.shape[1], slots)
    if cos.shape[0] != q.shape[0]:
        raise ValueError(f"cos {tuple(cos.shape)} does not match q {tuple(q.shape)}")


def quantize_heads_reference(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise K or V for a quantised KV cache, with one scale per token and head.

    The largest magnitude of each token and head becomes the largest quantised value. The scale is NaN if a value is NaN
    or infinite.

    Args:
        values: (T, kv_heads, D).
        dtype: dtype of the cache, int8 or float8_e4m3fn.

    Returns:
        Quantised values of the same shape, and scales (T, kv_heads) float32.
    """
    coded = quantize_rows if dtype == torch.int8 else quantize_rows_fp8
    codes, scales = coded(values.flatten(0, 1))
    return codes.view(values.shape), scales.view(values.shape[:2])


def store_reference(values: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None = None) -> None:
    """Write K or V of T tokens to the KV cache, in place.

    Args:
        values: (T, kv_heads, D).
        cache: (blocks, kv_heads, block_size, D).
        slots: (T,), block * block_size + offset. Values with a negative slot are padding and are dropped.
        scale: (blocks, kv_heads, block_size), receives the scales of a quantised cache; None: not quantised.
    """
    real = slots >= 0
    blocks, places = slots[real] // cache.shape[2], slots[real] % cache.shape[2]
    if scale is None:
        cache[blocks, :, places] = values[real].to(cache.dtype)
        return
    codes, scales = quantize_heads_reference(values[real], cache.dtype)
    scale[blocks, :, places] = scales
    # As bytes, because torch does not support indexed writes of float8_e4m3fn on all devices
    cache.view(torch.uint8)[blocks, :, places] = codes.view(torch.uint8)


def rope_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Return q rotated by its positions (RoPE), for a layer that reads the K and V of another layer.

    A layer with its own K and V uses `rope_store_reference`.

    Args:
        x: (T, q_heads, D), the queries.
        cos: (T, pairs) float32.
        sin: as `cos`.
        norm: (D,), weight of an RMSNorm of each head before the rotation; None: no norm.
        eps: epsilon of the norm.
        offset: added to the weight of the norm.
        interleaved: which values form a pair; see `rotate_reference`.
    """
    check_pairs(x, cos.shape[1])
    if norm is not None:
        x = rms_norm_reference(x, norm, eps, offset=offset)[0]
    return rotate_reference(x, cos, sin, interleaved)


def rope_store_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotate q and k by their positions (RoPE), and write k and v to the KV cache, in place.

    Args:
        q: (T, q_heads, D).
        k: (T, kv_heads, D).
        v: (T, kv_heads, D).
        cos: (T, pairs) float32 with pairs ≤ D / 2, for the position of each token; scaled if the RoPE variant requires
            it.
        sin: as `cos`.
        k_cache: (blocks, kv_heads, block_size, D) of k's dtype, or int8 or float8_e4m3fn if quantised.
        v_cache: as `k_cache`.
        slots: (T,) int64, block * block_size + offset; negative for padding.
        q_norm: (D,), weight of an RMSNorm of each head before the rotation (Qwen3), or None.
        k_norm: as `q_norm`. The norms apply only if both are given.
        eps: epsilon of the norms.
        offset: added to the weights of the norms (Gemma 3).
        interleaved: which values form a pair; see `rotate_reference`.
        k_scale: (blocks, kv_heads, block_size) float32, written for a quantised cache; see `quantize_heads_reference`.
        v_scale: as `k_scale`.

    Returns:
        The rotated q, (T, q_heads, D).

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_rope_store(q, k, v, cos, slots)
    check_caches(k, k_cache, v_cache, k_scale, v_scale)
    if q_norm is None or k_norm is None:
        q_norm = k_norm = None
    turned = rope_reference(k, cos, sin, k_norm, eps, offset=offset, interleaved=interleaved)
    store_reference(turned, k_cache, slots, k_scale)
    store_reference(v, v_cache, slots, v_scale)
    return rope_reference(q, cos, sin, q_norm, eps, offset=offset, interleaved=interleaved)
