"""Rotary position embedding (Su et al., 2021) of q and k, with optional QK-norm before and the KV write after."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.rms_norm import rms_norm_reference


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation as in transformers. x: (T, heads, D); cos, sin: (T, D/2), float32."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    c, s = cos[:, None], sin[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)


def check_rotary_shapes(q: Tensor, k: Tensor, v: Tensor, half: int, slots: Tensor) -> None:
    """`half`: pairs that are rotated, D/2. Raises ValueError when shapes do not fit."""
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit")
    if q.shape[2] != 2 * half or slots.shape != q.shape[:1]:
        raise ValueError(
            f"heads of {q.shape[2]} are rotated in {half} pairs, at {tuple(slots.shape)} slots for {q.shape[0]} tokens"
        )


def check_rope_store(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, k_cache: Tensor, slots: Tensor) -> None:
    """Raises ValueError when shapes do not fit."""
    check_rotary_shapes(q, k, v, cos.shape[1], slots)
    if cos.shape[0] != q.shape[0] or k_cache.shape[1] != k.shape[1] or k_cache.shape[3] != k.shape[2]:
        raise ValueError(
            f"cos {tuple(cos.shape)} or cache {tuple(k_cache.shape)} do not fit k {tuple(k.shape)}"
        )


def store_reference(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write values (T, kv_heads, D) into cache (blocks, kv_heads, block_size, D) at slots (T,), in place."""
    block_size = cache.shape[2]
    cache[slots // block_size, :, slots % block_size] = values


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
) -> Tensor:
    """Rotated q, with rotated k and v written to the cache in place.

    q: (T, q_heads, D); k, v: (T, kv_heads, D); cos, sin: (T, D/2) float32, scaled where the variant asks for it;
    caches: (blocks, kv_heads, block_size, D); slots: (T,) int64, block * block_size + offset. q_norm, k_norm: (D,)
    weights of a per-head RMSNorm applied before the rotation (Qwen3).
    """
    check_rope_store(q, k, v, cos, k_cache, slots)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps)[0], rms_norm_reference(k, k_norm, eps)[0]
    store_reference(rotate_reference(k, cos, sin), k_cache, slots)
    store_reference(v, v_cache, slots)
    return rotate_reference(q, cos, sin)
