"""Attention over one-byte quantised keys and values, int8 or float8_e4m3fn, which are multiplied in float16.

float16 holds every quantised value exactly, and two of them are converted at once; bfloat16 needs one conversion per
value. A 16-bit word with two adjacent values of a key is loaded at once, because the hardware can reorder words for
tensor cores, but not bytes. The even and the odd values of a head are therefore separate products, which are
interleaved at the end.

A power of two per row scales q into the range of float16. The scale of V per key is 2^e × m with m in [1, 2): e is
added to the score before the row's maximum is found, which keeps the largest weight near 1, and m multiplies the
weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchinfer_kernels.gpu.attention_core import LOG2E, capped, key_scales, mask_trees, visible


@triton.jit
def code_values(words, PLANE: tl.constexpr, CODES: tl.constexpr):
    """Convert one byte of each int16 word to float16 exactly: the lower byte for PLANE 0, the upper for PLANE 1.

    CODES is the format of the bytes: "int8", "fp8" (float8_e4m3fn, converted by the hardware) or "fp8_bits"
    (float8_e4m3fn without hardware support; the result is 2^-8 × the value).
    """
    if CODES == "fp8":
        return (words >> (PLANE * 8)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif CODES == "int8":  # build 1024 + 128 + value, by flipping the sign bit
        bits = ((words >> (PLANE * 8)) & 0xFF) ^ 0x6480
        return bits.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    else:  # the exponent bias is 7, and 15 in float16: the same bits in float16 mean 2^-8 × the value
        if PLANE == 0:
            bits = ((words & 0x80) << 8) | ((words & 0x7F) << 7)
        else:
            bits = (words & -0x8000) | ((words >> 1) & 0x3F80)
        return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def power_of_2(size):
    """Return, for each value of `size`, the largest power of two that is not greater, and its inverse.

    `size` is float32 and not negative. If it is not finite, the results are not finite.
    """
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def within_float16(at, real, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load rows of q, and scale each by a power of two to magnitudes below 2.

    `at` are pointers (rows, D_PAD) to the values. Rows that are not `real`, and values from index D on, are 0.

    Returns:
        The scaled rows (rows, D_PAD) float16, and the power of two that each row was divided by, (rows,) float32.
    """
    inside = real[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
    q = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    size, inverse = power_of_2(tl.max(tl.abs(q), 1))
    return (q * inverse[:, None]).to(tl.float16), size


@triton.jit
def value_scales(scales):
    """Split each float32 scale into 2^e × m with m in [1, 2), and return (e, m, 2^-e).

    They are scales of V in a quantised cache. e is at least -60; for a smaller scale m is below 1.
    """
    # A scale that is not finite gives e = 128 and an m that is not finite
    exponent = tl.maximum(scales.to(tl.int32, bitcast=True) & 0x7F800000, 67 << 23)
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    # From 2^23 on, the mantissa of a float32 is an integer
    e = ((exponent >> 23) | 0x4B000000).to(tl.float32, bitcast=True) - 8388735.0
    return e, scales * inverse, inverse


@triton.jit
def attend_codes(
    q_ptr, q_at, real, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, kv_head, stride_block, stride_key,
    stride_scale, first, plain, end, least, nearby, scale, cap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Return the attention state of ROWS query rows over the keys [first, end) of a quantised cache.

    The state is (weighted sum of V, maximum score, sum of weights), with scores in units of log2. K and V are
    multiplied in float16.

    - q_at (ROWS, 1): offset of each row's first value in q. Rows that are not `real` are padding.
    - row_at (ROWS,): position of each row's query, -1 for padding.
    - table_ptr: block table of the sequence. k_ptr, v_ptr: cached values of the KV head as int16 words; K in "fp8" as
      float8. stride_block, stride_key: in words.
    - plain: the first key that needs a mask of draft trees. nearby (ROWS,): `TreeMask.nearby`, or None.
    - least: the first key that any row sees, used with WINDOW.
    - scale, cap, window: as in ScoreRules. CAP, WINDOW: whether they apply. CODES: as in `code_values`.
    """
    HALF: tl.constexpr = D_PAD // 2
    CODE: tl.constexpr = 256.0 if CODES == "fp8_bits" else 1.0
    q, size = within_float16(q_ptr + q_at + tl.arange(0, D_PAD)[None, :], real, D, D_PAD)
    even, odd = tl.split(tl.reshape(q, (ROWS, HALF, 2)))
    size *= CODE
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    evens = tl.zeros([ROWS, HALF], tl.float32)
    odds = tl.zeros([ROWS, HALF], tl.float32)
    evens, odds, top, mass = _attend_span(
        evens, odds, top, mass, q, even, odd, size, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
        kv_head, stride_block, stride_key, stride_scale, first, plain, least, None, scale, cap, window,
        D, D_PAD, TILE, BLOCK_SIZE, CAUSAL, WINDOW, CAP, CODES,
    )  # fmt: skip
    if nearby is not None:
        evens, odds, top, mass = _attend_span(
            evens, odds, top, mass, q, even, odd, size, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            kv_head, stride_block, stride_key, stride_scale, plain, end, least, nearby, scale, cap, window,
            D, D_PAD, TILE, BLOCK_SIZE, CAUSAL, WINDOW, CAP, CODES,
        )  # fmt: skip
    return tl.interleave(evens, odds) * CODE, top, mass


@triton.jit
def _attend_span(
    evens, odds, top, mass,  # the state of the rows, updated and returned
    q, even, odd, size, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, kv_head, stride_block,
    stride_key, stride_scale, first, end, least, nearby, scale, cap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, TILE)
    word = tl.arange(0, D_PAD // 2)
    for start in range(first, end, TILE):
        key = start + lane
        inside = key < end
        if WINDOW:
            inside = inside & (key >= least)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = block * stride_block + (key % BLOCK_SIZE) * stride_key
        loaded = inside[:, None] & (word < D // 2)[None, :]
        offsets = at[:, None] + word[None, :]
        if CODES == "fp8":  # the hardware converts two adjacent values of a key at once
            byte = tl.arange(0, D_PAD)
            k_at = 2 * at[:, None] + byte[None, :]
            k = tl.load(k_ptr + k_at, mask=inside[:, None] & (byte < D)[None, :], other=0.0).to(tl.float16)
            scores = tl.dot(q, tl.trans(k))
        else:
            k = tl.load(k_ptr + offsets, mask=loaded, other=0)
            scores = tl.dot(even, tl.trans(code_values(k, 0, CODES)))
            scores = tl.dot(odd, tl.trans(code_values(k, 1, CODES)), scores)
        scale_at = block * stride_scale + kv_head * BLOCK_SIZE + key % BLOCK_SIZE
        k_scale = key_scales(k_scale_ptr + scale_at, inside, False)
        exponent, factor, undone = value_scales(key_scales(v_scale_ptr + scale_at, inside, False))
        if CAP:
            scores = capped(scores * size[:, None] * k_scale[None, :], scale, cap) * (cap * LOG2E)
        else:
            scores *= size[:, None] * (k_scale * (scale * LOG2E))[None, :]
        scores = visible(scores + exponent[None, :], key, row_at, inside, window, CAUSAL, WINDOW)
        if nearby is not None:
            scores = mask_trees(scores, key, row_at, nearby)
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights * undone[None, :], 1)
        weights = (weights * factor[None, :]).to(tl.float16)
        v = tl.load(v_ptr + offsets, mask=loaded, other=0)
        evens = tl.dot(weights, code_values(v, 0, CODES), evens * shrink[:, None])
        odds = tl.dot(weights, code_values(v, 1, CODES), odds * shrink[:, None])
        top = higher
    return evens, odds, top, mass
