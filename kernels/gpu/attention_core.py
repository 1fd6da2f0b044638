"""The functions that the attention kernels share: one way to pass over keys, one way to put parts together.

Scores are kept in units of log2, so that exponentials are powers of 2. Rows pass over tiles of keys in order, each
keeping its maximum, mass and weighted sum (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). A row is
one query head of one token; the heads that share a KV head are rows of one tile, so that K and V are read once for all.

Row-invariance: where a launch is `deterministic`, a row's keys are cut into segments at fixed positions, each segment
is passed over from an empty state in tiles of one shape, and segments are folded in order. A kernel may do that in one
go or leave segments to others; what a row computes is the same, since a tile or segment that a row does not see changes
none of its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def widened(x, dtype: tl.constexpr, CODES: tl.constexpr):
    """Cached values in the dtype that is multiplied; every code is exact in each of them.

    CODES: "none"; "int8"; "fp8", converted by the hardware; "fp8_bits", float8_e4m3fn as uint8 where the hardware knows
    another format or none.
    """
    if CODES == "none":
        return x
    elif CODES == "fp8_bits":
        bits = x.to(tl.uint16)
        # The exponent's bias is 7, float16's 15: the bits in float16's places are 2^-8 of the value, subnormals too.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def times(unit: tl.constexpr, a, b, c):
    """Strides that are passed in units, so that the compiler knows what divides them: how wide it may load."""
    return a * unit, b * unit, c * unit


@triton.jit
def initial_state(sinks_ptr, heads, seen, ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """(sum, maximum, mass) of rows that have seen nothing but their sink."""
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    if sinks_ptr is None:
        return total, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    else:
        sinks = tl.load(sinks_ptr + heads, mask=seen, other=0.0).to(tl.float32) * LOG2E
        return total, sinks, tl.full([ROWS], 1.0, tl.float32)


@triton.jit
def key_scales(ptr, inside, WHOLE: tl.constexpr):
    """Return the factors with which the codes of a tile of keys are multiplied."""
    if WHOLE:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def capped(scores, scale, cap):
    """Return tanh(scores × scale / cap)."""
    # tanh(y) = 1 - 2 / (1 + e^2y) holds for infinite y too
    return 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale / cap * (2.0 * LOG2E))))


@triton.jit
def visible(scores, key, row_at, inside, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return scores, -inf for keys that are not inside, or that a row does not see."""
    seen = inside[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= row_at[:, None])
    if WINDOW:
        seen = seen & (key[None, :] > row_at[:, None] - window)
        if not CAUSAL:  # a window of rows that see later keys, too, has two sides
            seen = seen & (key[None, :] < row_at[:, None] + window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def of_trees(scores, key, row_at, nearby):
    """Return scores, -inf for keys that are no ancestors in the trees of rows, as `TreeMask.nearby` says."""
    away = row_at[:, None] - key[None, :]
    seen = (away > 31) | (((nearby[:, None] >> (away & 31)) & 1) != 0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def tree_begin(row_at, nearby, first, end, TILE: tl.constexpr):
    """Return where, of the tiles from `first` to `end`, those begin in which a row of a tree may not see a key although
    that stands before it; `end` where there are none. What comes before is passed over without masks of trees."""
    least = tl.min(tl.where(nearby == -1, 2147483647, row_at - 31), 0)
    return tl.where(least < end, first + tl.maximum(least - first, 0) // TILE * TILE, end)


@triton.jit
def attend_span(
    total, top, mass,  # (ROWS, D_PAD), (ROWS,), (ROWS,): the rows' state, taken up and returned
    q,  # (ROWS, D_PAD)
    row_at,  # (ROWS,) int32: positions; -1 for rows that are padding
    table_ptr, k_ptr, v_ptr,  # the sequence's block table; the caches from the KV head on
    k_scale_ptr, v_scale_ptr,  # (blocks, kv_heads, BLOCK_SIZE) float32: of codes, else None
    kv_head, stride_block, stride_key, stride_scale,
    first, end,  # keys [first, end) of the sequence are passed over
    least,  # no row sees a key before it; read with a WINDOW only
    bias_ptr,  # (ROWS,) pointers: to what is added to each row's score of the key at its own position; else None
    nearby,  # (ROWS,) int32, of `TreeMask`; None: no row is in a tree
    scale, cap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,  # the span is whole tiles, and every row sees all of it
    CAUSAL: tl.constexpr,  # False: every row sees all these keys, as far as its window goes
    WINDOW: tl.constexpr, CAP: tl.constexpr, CODES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        # What is masked reads as 0: the cache behind a sequence's end, and blocks that its window has left, may hold
        # anything, and 0 × NaN is NaN
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
        # What makes them logarithms to base 2 is greater than 0: it is multiplied where the maximum is subtracted
        unit = scale * LOG2E
        if CAP:
            scores = capped(scores, scale, cap)
            unit = cap * LOG2E
        if not WHOLE:
            scores = visible(scores, key, row_at, inside, window, CAUSAL, WINDOW)
            if nearby is not None:
                scores = of_trees(scores, key, row_at, nearby)
        higher = tl.maximum(top, tl.max(scores, 1) * unit)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet
        weights = tl.exp2(scores * unit - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights, 1)
        v = widened(tl.load(v_ptr + offsets, mask=loaded, other=0.0), q.dtype, CODES)
        if CODES != "none":
            v_scale = key_scales(v_scale_ptr + scale_at, inside, WHOLE)
            if q.dtype == tl.float16:  # in which a weight times a small scale would have few bits left
                v = (v.to(tl.float32) * v_scale[:, None]).to(tl.float16)
            else:  # fewer products than there are values, where few rows see many keys
                weights *= v_scale[None, :]
        total = tl.dot(weights.to(q.dtype), v, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    return total, top, mass


@triton.jit
def as_part(total, top, mass):
    """A state as attention over its keys and the log2 of its softmax's sum."""
    nothing = mass == 0.0  # not `mass > 0`: a NaN has to show
    part = tl.where(nothing[:, None], 0.0, total / mass[:, None])
    return part, tl.where(nothing, float("-inf"), top + tl.log2(mass))


@triton.jit
def fold(total, top, mass, part, lse):
    """The state with one more part; a part that has seen nothing (lse -inf) changes no bit."""
    higher = tl.maximum(top, lse)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(top - base)
    added = tl.exp2(lse - base)
    # Contracted by hand: the compiler must not choose one way here and another way there
    return tl.fma(part, added[:, None], total * kept[:, None]), higher, tl.fma(mass, kept, added)


@triton.jit
def own_begin(context, start, window, ALIGN, WINDOW: tl.constexpr):
    """The first key that a query at the end of its context has to pass over, a multiple of ALIGN from `start`."""
    if WINDOW:
        behind = tl.maximum(context - window - start, 0)
        return start + behind // ALIGN * ALIGN
    else:
        return start
