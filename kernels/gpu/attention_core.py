"""The functions that all attention kernels share: reading a span of keys, and folding parts together.

Scores are in units of log2, because exponentials are computed as powers of 2. Rows read tiles of keys in order, and
each keeps its maximum, its sum of weights (mass) and its weighted sum of V (Milakov and Gimelshein, 2018;
FlashAttention, Dao et al., 2022). A row is one query head of one token; the heads that share a KV head are rows of one
tile, so K and V are read once for them.

Row invariance: in a `deterministic` launch the keys of a row are split into segments at fixed positions. Each segment
starts from an empty state and uses tiles of one shape, and segments are folded in order. It does not matter which
program computes a segment, because a tile or segment that a row does not see changes none of its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def widened(x, dtype: tl.constexpr, CODES: tl.constexpr):
    """Convert cached values to `dtype`, the dtype of q, without scaling. Every quantised value is exact in it.

    CODES is the format of the cache: "none" (x is returned as it is), "int8", "fp8" (converted by the hardware), or
    "fp8_bits" (float8_e4m3fn as uint8, for hardware without that format).
    """
    if CODES == "none":
        return x
    elif CODES == "fp8_bits":
        bits = x.to(tl.uint16)
        # The exponent bias is 7, and 15 in float16: the same bits in float16 mean 2^-8 × the value, also for subnormals
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def times(unit: tl.constexpr, a, b, c):
    """Return a, b and c multiplied by the constant `unit`.

    Strides are passed divided by a common divisor `unit`: the constant factor tells the compiler how loads are aligned.
    """
    return a * unit, b * unit, c * unit


@triton.jit
def initial_state(sinks_ptr, heads, seen, ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """Return the attention state of ROWS query rows before they have seen a key: only attention sinks count.

    The state is (weighted sum of V (ROWS, D_PAD), maximum score (ROWS,), sum of weights (ROWS,)), with scores in units
    of log2. `heads` are the query heads of the rows and `seen` marks rows that are not padding; sinks_ptr is None
    without sinks.
    """
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    if sinks_ptr is None:
        return total, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    else:
        sinks = tl.load(sinks_ptr + heads, mask=seen, other=0.0).to(tl.float32) * LOG2E
        return total, sinks, tl.full([ROWS], 1.0, tl.float32)


@triton.jit
def key_scales(ptr, inside, WHOLE: tl.constexpr):
    """Load the scales of a tile of quantised keys from the pointers `ptr`. Keys that are not `inside` get 0.

    WHOLE is true if all keys are inside.
    """
    if WHOLE:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def capped(scores, scale, cap):
    """Return tanh(scores × scale / cap). The caller multiplies it by `cap` to get capped scores."""
    # tanh(y) = 1 - 2 / (1 + e^2y) is correct for infinite y too
    return 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale / cap * (2.0 * LOG2E))))


@triton.jit
def visible(scores, key, row_at, inside, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the scores (rows, keys) of a tile, with -inf for keys that a row does not see.

    A row sees keys that are `inside` the sequence. With CAUSAL, it sees no keys after its own position. With WINDOW, it
    sees only keys less than `window` positions away. `key` and `row_at` are the positions of keys and rows.
    """
    seen = inside[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= row_at[:, None])
    if WINDOW:
        seen = seen & (key[None, :] > row_at[:, None] - window)
        if not CAUSAL:  # a bidirectional window
            seen = seen & (key[None, :] < row_at[:, None] + window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def mask_trees(scores, key, row_at, nearby):
    """Return the scores (rows, keys) of a tile, with -inf for keys that a row's `TreeMask.nearby` excludes.

    `key` and `row_at` are the positions of keys and rows. Bit d of `nearby` (rows,) int32 is 1 if the row sees the key
    d positions before its own.
    """
    away = row_at[:, None] - key[None, :]
    seen = (away > 31) | (((nearby[:, None] >> (away & 31)) & 1) != 0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def tree_begin(row_at, nearby, first, end, TILE: tl.constexpr):
    """Return the first key that needs tree masks, rounded down to whole tiles; `end` if no key needs them.

    A key in [first, end) needs them if it is among the 32 keys up to a row in a draft tree. Tiles of TILE keys are
    counted from `first`; `row_at` and `nearby` are as in `mask_trees`.
    """
    least = tl.min(tl.where(nearby == -1, 2147483647, row_at - 31), 0)
    return tl.where(least < end, first + tl.maximum(least - first, 0) // TILE * TILE, end)


@triton.jit
def attend_span(
    total, top, mass, q, row_at, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, kv_head, stride_block,
    stride_key, stride_scale, first, end, least, bias_ptr, nearby, scale, cap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WHOLE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, CODES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the keys [first, end) of a sequence, and return the updated attention state of ROWS query rows.

    The state (`total` (ROWS, D_PAD), `top` and `mass` (ROWS,)) is the weighted sum of V, the maximum score in units of
    log2, and the sum of weights.

    - row_at: position of each row's query, -1 for padding. least: the first key that any row sees, used with WINDOW.
    - table_ptr: block table of the sequence. k_ptr and v_ptr: the caches at the KV head. k_scale_ptr and v_scale_ptr:
      scales of a quantised cache, else None.
    - bias_ptr (ROWS,): pointers to each row's bias for the key at the row's own position, or None. nearby:
      `TreeMask.nearby`, or None if no row is in a draft tree.
    - scale, cap, window: as in ScoreRules; CAP and WINDOW state whether they apply.
    - WHOLE: [first, end) is whole tiles, and every row sees all of their keys. CAUSAL False: rows also see keys after
      their position. CODES: as in `widened`.
    """
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, D_PAD)
    for start in range(first, end, TILE):
        key = start + lane
        inside = key < end
        if WINDOW:
            inside = inside & (key >= least)
        if WHOLE:
            block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = block * stride_block + (key % BLOCK_SIZE) * stride_key
        offsets = at[:, None] + dim[None, :]
        # Load 0 for masked keys: slots after the sequence's end or before its window may hold NaN, and 0 × NaN is NaN
        if WHOLE:
            loaded = (dim < D)[None, :]
        else:
            loaded = inside[:, None] & (dim < D)[None, :]
        k = widened(tl.load(k_ptr + offsets, mask=loaded, other=0.0), q.dtype, CODES)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CODES != "none":
            scale_at = block * stride_scale + kv_head * BLOCK_SIZE + key % BLOCK_SIZE
            scores *= key_scales(k_scale_ptr + scale_at, inside, WHOLE)[None, :]
        if bias_ptr is not None:
            away = key[None, :] - row_at[:, None]
            known = inside[None, :] & (row_at >= 0)[:, None]
            scores += tl.load(bias_ptr[:, None] + away, mask=known, other=0.0) / scale
        # The factor to log2 is positive, so it can be applied together with the subtraction of the maximum
        unit = scale * LOG2E
        if CAP:
            scores = capped(scores, scale, cap)
            unit = cap * LOG2E
        if not WHOLE:
            scores = visible(scores, key, row_at, inside, window, CAUSAL, WINDOW)
            if nearby is not None:
                scores = mask_trees(scores, key, row_at, nearby)
        higher = tl.maximum(top, tl.max(scores, 1) * unit)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: the row has not seen a key yet
        weights = tl.exp2(scores * unit - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights, 1)
        v = widened(tl.load(v_ptr + offsets, mask=loaded, other=0.0), q.dtype, CODES)
        if CODES != "none":
            v_scale = key_scales(v_scale_ptr + scale_at, inside, WHOLE)
            if q.dtype == tl.float16:  # a weight times a small scale would be subnormal in float16
                v = (v.to(tl.float32) * v_scale[:, None]).to(tl.float16)
            else:  # scaling weights takes fewer products than scaling V, because there are few rows
                weights *= v_scale[None, :]
        total = tl.dot(weights.to(q.dtype), v, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    return total, top, mass


@triton.jit
def as_part(total, top, mass):
    """Convert an attention state into the attention output (rows, D), and the log2-sum-exp of scores (rows,).

    The state is the weighted sum of V (`total`), the maximum score in units of log2 (`top`) and the sum of weights
    (`mass`). Without keys the output is 0 and the log2-sum-exp -inf.
    """
    nothing = mass == 0.0  # not `mass > 0`, which would hide a NaN
    part = tl.where(nothing[:, None], 0.0, total / mass[:, None])
    return part, tl.where(nothing, float("-inf"), top + tl.log2(mass))


@triton.jit
def fold(total, top, mass, part, lse):
    """Add attention over further keys to an attention state, and return the new state.

    The state is the weighted sum of V (`total`), the maximum score in units of log2 (`top`) and the sum of weights
    (`mass`). `part` is the attention output over the further keys, and `lse` its log2-sum-exp; -inf means no keys and
    changes no bit.
    """
    higher = tl.maximum(top, lse)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(top - base)
    added = tl.exp2(lse - base)
    # Explicit fma: left to the compiler, kernels could contract differently and differ in their bits
    return tl.fma(part, added[:, None], total * kept[:, None]), higher, tl.fma(mass, kept, added)


@triton.jit
def first_own_key(context, start, window, ALIGN, WINDOW: tl.constexpr):
    """Return the first key that a decode query reads: `start`, or a later key if it has a sliding window (WINDOW).

    The query is at the end of `context` keys. Keys before the window are skipped in multiples of ALIGN from `start`.
    """
    if WINDOW:
        behind = tl.maximum(context - window - start, 0)
        return start + behind // ALIGN * ALIGN
    else:
        return start
