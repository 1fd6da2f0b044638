"""RoPE of q and k, with optional QK-norm, and the write of K and V. Cost: batchinfer_kernels.cost.rope_store_cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.checks import check_contiguous, check_same_dtype, check_vectors, unit_columns
from batchinfer_kernels.gpu.quantize_rows import codes_of, inverse_scale
from batchinfer_kernels.gpu.rms_norm import scaled
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2
from batchinfer_kernels.rope_store import check_caches, check_pairs, check_rotary

# Values of one token per program: 8 of each half per thread with 4 warps, 16 bytes of bfloat16
TILE = 2048
# Names of quantised formats in the kernel
CODES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@triton.jit
def _load_pairs(ptr, at, mask, PAIRS: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PADDED)[None, :]
        wide = tl.load(ptr + at + columns, mask=mask & (columns < 2 * PAIRS), other=0.0)
        first, second = tl.split(tl.reshape(wide, (wide.shape[0], PADDED, 2)))
    else:
        columns = tl.arange(0, PADDED)[None, :]
        first = tl.load(ptr + at + columns, mask=mask & (columns < PAIRS), other=0.0)
        second = tl.load(ptr + at + PAIRS + columns, mask=mask & (columns < PAIRS), other=0.0)
    return first, second


@triton.jit
def _store_pairs(
    ptr, at, mask, first, second, PAIRS: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PADDED)[None, :]
        wide = tl.reshape(tl.join(first, second), (first.shape[0], 2 * PADDED))
        tl.store(ptr + at + columns, wide, mask=mask & (columns < 2 * PAIRS))
    else:
        columns = tl.arange(0, PADDED)[None, :]
        tl.store(ptr + at + columns, first, mask=mask & (columns < PAIRS))
        tl.store(ptr + at + PAIRS + columns, second, mask=mask & (columns < PAIRS))


@triton.jit
def _squares(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _rotated_heads(
    ptr, at, mask, cos, sin, norm_ptr, eps, offset,
    D: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    NORMED: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    # If all values are rotated, the values that are not (the third result) are copies of some of the first values
    first, second = _load_pairs(ptr, at, mask, PAIRS, PADDED, INTERLEAVED)
    beyond = 2 * PAIRS + tl.arange(0, REST_PADDED)[None, :]
    rest = tl.load(ptr + at + beyond, mask=mask & (beyond < D), other=0.0)
    if NORMED:
        squares = _squares(first) + _squares(second)
        if D > 2 * PAIRS:
            squares += _squares(rest)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        nowhere = tl.zeros((1, 1), tl.int32)
        low, high = _load_pairs(norm_ptr, nowhere, nowhere == 0, PAIRS, PADDED, INTERLEAVED)
        weight = tl.load(norm_ptr + beyond, mask=beyond < D, other=0.0)
        first = scaled(first.to(tl.float32) * scale, low, offset, OFFSET).to(first.dtype)
        second = scaled(second.to(tl.float32) * scale, high, offset, OFFSET).to(second.dtype)
        rest = scaled(rest.to(tl.float32) * scale, weight, offset, OFFSET).to(rest.dtype)
    low, high = first.to(tl.float32), second.to(tl.float32)
    first = (low * cos - high * sin).to(first.dtype)
    second = (high * cos + low * sin).to(second.dtype)
    return first, second, rest


@triton.jit
def _fp8_code(x):
    # Some GPUs have no conversion to float8
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    wide = size.to(tl.uint32, bitcast=True)
    # Round off 20 bits of the mantissa, and change the exponent bias from 127 to 7
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - 960
    # Multiples of 2^-9, the unit in the last place of a float32 at 2^14
    subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _largest(x):
    size = tl.abs(x.to(tl.float32))
    return tl.max(tl.where(size < float("inf"), size, float("inf")), 1)


@triton.jit
def _scale(largest, CODES: tl.constexpr):
    if CODES == "int8":
        return inverse_scale(largest, 127.0)
    else:
        return inverse_scale(largest, 448.0)


@triton.jit
def _coded(x, inverse, target_type: tl.constexpr, CODES: tl.constexpr):
    if CODES == "none":
        return x.to(target_type)
    else:
        wide = x.to(tl.float32)
        wide = tl.where(tl.abs(wide) < float("inf"), wide, 0.0)
        if CODES == "int8":
            return codes_of(wide, inverse[:, None], tl.int8, 127.0)
        else:
            return _fp8_code(wide * inverse[:, None])


@triton.jit
def _store_heads(
    ptr, at, mask, first, second, rest,
    D: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    _store_pairs(ptr, at, mask, first, second, PAIRS, PADDED, INTERLEAVED)
    if D > 2 * PAIRS:
        beyond = 2 * PAIRS + tl.arange(0, REST_PADDED)[None, :]
        tl.store(ptr + at + beyond, rest, mask=mask & (beyond < D))


@triton.jit
def _cache_keys(
    ptr, at, mask, scale_ptr, scale_at, first, second, rest,
    D: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    kept: tl.constexpr = ptr.dtype.element_ty
    inverse = 1.0
    if CODES != "none":
        largest = tl.maximum(_largest(first), _largest(second))
        if D > 2 * PAIRS:
            largest = tl.maximum(largest, _largest(rest))
        inverse, scale = _scale(largest, CODES)
        tl.store(scale_ptr + scale_at, scale[:, None], mask=mask)
    low, high = _coded(first, inverse, kept, CODES), _coded(second, inverse, kept, CODES)
    beyond = _coded(rest, inverse, kept, CODES)
    _store_heads(ptr, at, mask, low, high, beyond, D, PAIRS, PADDED, REST_PADDED, INTERLEAVED)


@triton.jit
def _cache_values(
    source, from_, target, to, inside, kept, scale_ptr, scale_at,
    D: tl.constexpr, D_PADDED: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, D_PADDED)[None, :]
    mask = inside & (columns < D)
    values = tl.load(source + from_ + columns, mask=mask, other=0.0)
    inverse = 1.0
    if CODES != "none":
        inverse, scale = _scale(_largest(values), CODES)
        tl.store(scale_ptr + scale_at, scale[:, None], mask=inside & kept)
    codes = _coded(values, inverse, target.dtype.element_ty, CODES)
    tl.store(target + to + columns, codes, mask=mask & kept)


@triton.jit
def _rope_store_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    q_norm_ptr, k_norm_ptr, k_scale_ptr, v_scale_ptr, y_ptr, eps, offset,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, cos_stride,
    k_block_stride, k_cache_head_stride, k_slot_stride, v_block_stride, v_cache_head_stride, v_slot_stride,
    q_heads, kv_heads,
    LOOKED_UP: tl.constexpr, NORMED: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    CODES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # The second program index counts q, then k, then v. Without kv_heads only q is rotated, and slots are not used
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts, kv_parts = tl.cdiv(q_heads, HEADS), tl.cdiv(kv_heads, HEADS)
    pairs = tl.arange(0, PADDED)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = tl.load(positions_ptr + token).to(tl.int64) if LOOKED_UP else token
    cos = tl.load(cos_ptr + row * cos_stride + pairs, mask=pairs < PAIRS, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * cos_stride + pairs, mask=pairs < PAIRS, other=0.0)[None, :]
    if part < q_parts:
        heads = (part * HEADS + tl.arange(0, HEADS))[:, None]
        first, second, rest = _rotated_heads(
            q_ptr + token * q_token_stride, heads * q_head_stride, heads < q_heads, cos, sin, q_norm_ptr, eps,
            offset, D, PAIRS, PADDED, REST_PADDED, NORMED, OFFSET, INTERLEAVED,
        )  # fmt: skip
        _store_heads(
            y_ptr + token * q_heads * D, heads * D, heads < q_heads, first, second, rest,
            D, PAIRS, PADDED, REST_PADDED, INTERLEAVED,
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        heads = ((part - q_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        first, second, rest = _rotated_heads(
            k_ptr + token * k_token_stride, heads * k_head_stride, heads < kv_heads, cos, sin, k_norm_ptr, eps,
            offset, D, PAIRS, PADDED, REST_PADDED, NORMED, OFFSET, INTERLEAVED,
        )  # fmt: skip
        _cache_keys(
            k_cache_ptr + block * k_block_stride + place * k_slot_stride,
            heads.to(tl.int64) * k_cache_head_stride, (heads < kv_heads) & (slot >= 0), k_scale_ptr,
            (block * kv_heads + heads) * BLOCK_SIZE + place, first, second, rest,
            D, PAIRS, PADDED, REST_PADDED, INTERLEAVED, CODES,
        )  # fmt: skip
    else:
        heads = ((part - q_parts - kv_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        _cache_values(
            v_ptr + token * v_token_stride, heads * v_head_stride,
            v_cache_ptr + block * v_block_stride + place * v_slot_stride,
            heads.to(tl.int64) * v_cache_head_stride, heads < kv_heads, slot >= 0, v_scale_ptr,
            (block * kv_heads + heads) * BLOCK_SIZE + place, D, D_PADDED, CODES,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Places:
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    kv_heads: int
    scales: tuple[Tensor, Tensor]
    norms: tuple[Tensor, Tensor]


def rope_store(
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
    positions: Tensor | None = None,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotate q and k by their positions (RoPE), and write k and v to the KV cache.

    The contract is `rope_store_reference`.

    Args:
        q: (T, q_heads, D). q, k and v may be slices of one tensor.
        k: (T, kv_heads, D).
        v: (T, kv_heads, D).
        cos: (T, pairs) float32; with `positions` a table (positions, pairs).
        sin: as `cos`.
        k_cache: (blocks, kv_heads, block_size, D) of k's dtype, or int8 or float8_e4m3fn if quantised.
        v_cache: as `k_cache`.
        slots: (T,) int64, block * block_size + offset; negative for padding.
        q_norm: (D,), weight of an RMSNorm of each head before the rotation; given together with `k_norm`.
        k_norm: as `q_norm`.
        eps: epsilon of the norms.
        positions: (T,) int64, the row of cos and sin of each token; None: token i uses row i.
        offset: added to the weights of the norms.
        interleaved: which values form a pair; see `rotate_reference`.
        k_scale: (blocks, kv_heads, block_size) float32, written for a quantised cache.
        v_scale: as `k_scale`.

    Returns:
        The rotated q, (T, q_heads, D).
    """
    _check(q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, positions, k_scale, v_scale)
    norms = (q, k) if q_norm is None or k_norm is None else (q_norm.contiguous(), k_norm.contiguous())
    scales = (q, k) if k_scale is None or v_scale is None else (k_scale, v_scale)
    places = _Places(k, v, k_cache, v_cache, slots, k.shape[1], scales, norms)
    return _launch(q, cos, sin, places, eps, offset, positions, interleaved, q_norm is not None)


def rope(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    positions: Tensor | None = None,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Return q rotated by its positions (RoPE), for a layer that reads the K and V of another layer.

    The result has the same bits as that of `rope_store`.

    Args:
        q: (T, q_heads, D).
        cos: (T, pairs) float32; with `positions` a table (positions, pairs).
        sin: as `cos`.
        norm: (D,), weight of an RMSNorm of each head before the rotation, or None.
        eps: epsilon of the norm.
        positions: (T,) int64, the row of cos and sin of each token; None: token i uses row i.
        offset: added to the weight of the norm.
        interleaved: which values form a pair; see `rotate_reference`.
    """
    check_pairs(q, cos.shape[1])
    _check_tables(q, cos, sin, positions)
    check_same_dtype(q=q, norm=norm)
    check_vectors(q.shape[2], q.dtype, norm=norm)
    unit_columns(q=q, cos=cos, sin=sin)
    rows = torch.empty(len(q), dtype=torch.int64, device=q.device) if positions is None else positions
    norms = (q, q) if norm is None else (norm.contiguous(), q)
    places = _Places(q, q, q[:, None], q[:, None], rows, 0, (q, q), norms)
    return _launch(q, cos, sin, places, eps, offset, positions, interleaved, norm is not None)


def _launch(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    to: _Places,
    eps: float,
    offset: float,
    positions: Tensor | None,
    interleaved: bool,
    normed: bool,
) -> Tensor:
    tokens, q_heads, dim = q.shape
    y = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return y
    pairs, kv_heads = cos.shape[1], to.kv_heads
    padded = next_power_of_2(pairs)
    heads = min(next_power_of_2(max(q_heads, kv_heads)), max(1, TILE // next_power_of_2(dim)))
    grid = (tokens, cdiv(q_heads, heads) + 2 * cdiv(kv_heads, heads))
    places = (q, to.k, to.v, cos, sin, to.slots if positions is None else positions)
    token_strides = (*q.stride()[:2], *to.k.stride()[:2], *to.v.stride()[:2], cos.stride(0))
    _rope_store_kernel[grid](
        *places,
        _as_codes(to.k_cache),
        _as_codes(to.v_cache),
        to.slots,
        *to.norms,
        *to.scales,
        y,
        eps,
        offset,
        *token_strides,
        *to.k_cache.stride()[:3],
        *to.v_cache.stride()[:3],
        q_heads,
        kv_heads,
        LOOKED_UP=positions is not None,
        NORMED=normed,
        OFFSET=offset != 0,
        INTERLEAVED=interleaved,
        CODES=CODES.get(to.k_cache.dtype, "none"),
        BLOCK_SIZE=to.k_cache.shape[2],
        D=dim,
        D_PADDED=next_power_of_2(dim),
        PAIRS=pairs,
        PADDED=padded,
        REST_PADDED=next_power_of_2(max(1, dim - 2 * pairs)),
        HEADS=heads,
        num_warps=max(1, min(4, heads * padded // 256)),
        # `rope` and `rope_store` are compiled separately but must round alike
        enable_fp_fusion=False,
    )
    return y


def _as_codes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    positions: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check_rotary(q, k, v, cos.shape[1], slots)
    check_caches(k, k_cache, v_cache, k_scale, v_scale)
    check_contiguous(k_scale=k_scale, v_scale=v_scale)
    _check_tables(q, cos, sin, positions)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given together")
    check_same_dtype(q=q, k=k, v=v, q_norm=q_norm, k_norm=k_norm)
    check_vectors(q.shape[2], q.dtype, q_norm=q_norm, k_norm=k_norm)
    check_vectors(q.shape[0], torch.int64, slots=slots)
    unit_columns(q=q, k=k, v=v, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache)


def _check_tables(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    if positions is None and cos.shape[0] != q.shape[0]:
        raise ValueError(f"cos {tuple(cos.shape)} does not match q {tuple(q.shape)}")
    if cos.shape != sin.shape or cos.stride() != sin.stride() or {cos.dtype, sin.dtype} != {torch.float32}:
        raise ValueError(f"cos {tuple(cos.shape)} {cos.dtype} and sin {tuple(sin.shape)} {sin.dtype} differ")
    check_vectors(q.shape[0], torch.int64, positions=positions)
