"""Samples tokens from logits without a sort. Cost: batchinfer_kernels.cost.sample_cost.

A token's key is the bits of exp((logit - greatest) / temperature), a float32 in [0, 1]; as integers, keys have the
order of the probabilities. Its weight is that number as an integer multiple of 2^-44. Integer sums of weights are exact
in any order, however a row is split into tiles. Probabilities below 2^-44 of the greatest count as 0.

Top-k, top-p and min-p keep all tokens above some key, and a number of tokens at it, in the order of their ids. The key
is found by bisection into four parts per pass, until the remaining tokens are few enough to be held and searched at
once. If few tokens are likely enough for the nucleus, this takes one pass. Several programs share the first pass and
the two after it if there are few rows; one program runs all others. A token is drawn by its position in the cumulative
sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.row_chunks import CHUNK, best_of, check_logits, chunk_best, is_finite, row_chunk
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2
from batchinfer_kernels.sample import MIN_TEMPERATURE, NO_TOKEN, RowSampling

# Logits at a time: each thread has 2 loads of 16 bytes in flight, for float32. 16 warps would leave 128 registers per
# thread, and 16-bit logits spill if the vocabulary is a multiple of a load
TILE = 2048
WARPS = 8
# The most keys of a bracket that are searched at once: 16 per thread
HELD = 4096
# Programs that share the chunks of few rows: about the number that a GPU runs at a time
PROGRAMS = 1024
# Sums of 2^19 weights of up to 2^44 do not overflow an int64
MAX_VOCAB = 1 << 19

_FLIGHT = tl.constexpr(2)
_UNIT = tl.constexpr(float(1 << 44))
_KEY_OF_ONE = tl.constexpr(0x3F800000)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def _key(x, best, temperature):
    return tl.exp((x - best) / temperature).to(tl.int32, bitcast=True)


@triton.jit
def _weight(key):
    return (key.to(tl.float32, bitcast=True) * _UNIT).to(tl.int64)


@triton.jit
def _row_best(best_ptr, at_ptr, chunks, CHUNKS: tl.constexpr):
    at = tl.arange(0, CHUNKS)
    values = tl.load(best_ptr + at, mask=at < chunks, other=float("-inf"))
    return best_of(values, tl.load(at_ptr + at, mask=at < chunks, other=2147483647))


@triton.jit
def _weigh_kernel(
    logits_ptr, stride, vocab, best_ptr, at_ptr, temperature_ptr, weights_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    # One chunk of a row per program
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    best, _ = _row_best(best_ptr + row * chunks, at_ptr + row * chunks, chunks, CHUNKS)
    if (temperature > 0.0) & is_finite(best):
        x = row_chunk(logits_ptr + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        weights = _weight(_key(x, best, tl.maximum(temperature, _MIN_TEMPERATURE)))
        tl.store(weights_ptr + row * chunks + chunk, tl.sum(weights, 0))


@triton.jit
def _tally(key, weight, pivot, counts, masses):
    within = key >= pivot
    return counts + tl.sum(within.to(tl.int32), 0), masses + tl.sum(tl.where(within, weight, 0), 0)


@triton.jit
def _measure(row_ptr, vocab, best, temperature, p1, p2, p3, TILE: tl.constexpr):
    c1, m1 = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int64)
    c2, m2, c3, m3 = c1, m1, c1, m1
    tile = tl.arange(0, _FLIGHT)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    for start in range(0, vocab, _FLIGHT * TILE):
        key = _key(row_chunk(row_ptr, start + tile, vocab), best, temperature)
        weight = _weight(key)
        key = tl.where(start + tile < vocab, key, -1)
        c1, m1 = _tally(key, weight, p1, c1, m1)
        c2, m2 = _tally(key, weight, p2, c2, m2)
        c3, m3 = _tally(key, weight, p3, c3, m3)
    return tl.sum(c1, 0), tl.sum(m1, 0), tl.sum(c2, 0), tl.sum(m2, 0), tl.sum(c3, 0), tl.sum(m3, 0)


@triton.jit
def _enough(count, mass, wanted, BY_MASS: tl.constexpr):
    if BY_MASS:
        return mass >= wanted
    else:
        return count >= wanted


@triton.jit
def _gather(
    row_ptr, scratch_ptr, vocab, best, temperature, low, high, CHUNK: tl.constexpr, HELD: tl.constexpr
):
    found = tl.zeros((), tl.int32)
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        key = _key(row_chunk(row_ptr, ids, vocab), best, temperature)
        within = ((key >= low) & (key < high) & (ids < vocab)).to(tl.int32)
        tl.store(scratch_ptr + found + tl.cumsum(within, 0) - 1, key, mask=within > 0)
        found += tl.sum(within, 0)
    tl.debug_barrier()  # other threads of this program read the keys
    return found


@triton.jit
def _pivots(low, high, tokens):
    # The first pivot is low itself if the number of tokens at and above it is unknown (-1)
    quarter, half = (high - low) // 4, (high - low) // 2
    return low + tl.where(tokens < 0, 0, quarter), low + half, low + half + quarter


@triton.jit
def _narrowed(low, high, tokens, count, mass, c1, m1, c2, m2, c3, m3, wanted, BY_MASS: tl.constexpr):
    # c1 … m3 are the number and weight of tokens at and above the three pivots; other arguments are as in `_search`
    p1, p2, p3 = _pivots(low, high, tokens)
    e1 = _enough(c1, m1, wanted, BY_MASS)
    e2 = _enough(c2, m2, wanted, BY_MASS)
    e3 = _enough(c3, m3, wanted, BY_MASS)
    count = tl.where(e3, count, tl.where(e2, c3, tl.where(e1, c2, c1)))
    mass = tl.where(e3, mass, tl.where(e2, m3, tl.where(e1, m2, m1)))
    high = tl.where(e3, high, tl.where(e2, p3, tl.where(e1, p2, p1)))
    tokens = tl.where(e3, c3, tl.where(e2, c2, tl.where(e1, c1, tokens)))
    low = tl.where(e3, p3, tl.where(e2, p2, tl.where(e1, p1, low)))
    return low, high, tokens, count, mass


@triton.jit
def _search(
    row_ptr, scratch_ptr, vocab, best, temperature, low, high, tokens, count, mass, found, wanted,
    BY_MASS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Return the greatest key in [low, high) for which the tokens with this or a greater key reach `wanted`.

    A token's key is its probability, with the bits read as an integer.

    - wanted: a total weight of tokens if BY_MASS, else a number of tokens.
    - tokens: number of tokens with keys of at least `low`; -1: unknown.
    - count, mass: number and total weight of tokens with keys of at least `high`.
    - found: number of keys in [low, high) if scratch_ptr already has them all, else -1.

    Returns:
        The key, and the number and total weight of tokens with greater keys.
    """
    while (high - low > 1) & ((tokens < 0) | (tokens - count > HELD)):
        p1, p2, p3 = _pivots(low, high, tokens)
        c1, m1, c2, m2, c3, m3 = _measure(row_ptr, vocab, best, temperature, p1, p2, p3, TILE)
        low, high, tokens, count, mass = _narrowed(
            low, high, tokens, count, mass, c1, m1, c2, m2, c3, m3, wanted, BY_MASS
        )
    if high - low > 1:
        if found < 0:
            found = _gather(row_ptr, scratch_ptr, vocab, best, temperature, low, high, CHUNK, HELD)
        at = tl.arange(0, HELD)
        keys = tl.load(scratch_ptr + at, mask=at < found, other=-1)
        weights = _weight(tl.maximum(keys, 0))
        count_beyond, mass_beyond = count, mass
        while high - low > 1:
            middle = low + (high - low) // 2
            within = keys >= middle
            c = count_beyond + tl.sum(within.to(tl.int32), 0)
            m = mass_beyond + tl.sum(tl.where(within, weights, 0), 0)
            enough = _enough(c, m, wanted, BY_MASS)
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            count, mass = tl.where(enough, count, c), tl.where(enough, mass, m)
    return low, count, mass


@triton.jit
def _times(wanted, weight, most):
    # The float32 quotient may be off by one and is corrected; a division of int64 would be a subroutine
    guess = tl.minimum(wanted.to(tl.float32) / weight.to(tl.float32), most + 2.0).to(tl.int64)
    times = tl.maximum(guess - 1, 0)
    lacking = wanted - times * weight
    times += (
        (lacking > 0).to(tl.int64) + (lacking > weight).to(tl.int64) + (lacking > 2 * weight).to(tl.int64)
    )
    return tl.minimum(times, most).to(tl.int32)


@triton.jit
def _nucleus(total, top_p, members, low):
    wanted = tl.minimum(tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1), total)
    # All tokens below this together weigh less than half of the weight that top-p may drop
    least = ((1.0 - top_p) * total.to(tl.float64)).to(tl.float32) / (2.0 * _UNIT * members)
    return wanted, tl.maximum(tl.maximum(low, 0), least.to(tl.int32, bitcast=True) - 1)


@triton.jit
def _total(weights_ptr, chunks, CHUNKS: tl.constexpr):
    at = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(weights_ptr + at, mask=at < chunks, other=0), 0)


@triton.jit
def _shared_row(
    row, vocab, best_ptr, at_ptr, chunks, temperature_ptr, top_k_ptr, top_p_ptr, CHUNKS: tl.constexpr
):  # fmt: skip
    # `shared` is True if tokens of the row are drawn with top-p but without top-k: several programs then share the
    # first pass over the row
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    best, _ = _row_best(best_ptr + row * chunks, at_ptr + row * chunks, chunks, CHUNKS)
    shared = (temperature > 0.0) & is_finite(best) & (top_p < 1.0) & ~((top_k > 0) & (top_k < vocab))
    return shared, best, tl.maximum(temperature, _MIN_TEMPERATURE), top_p


@triton.jit
def _tally_kernel(
    logits_ptr, stride, vocab, best_ptr, at_ptr, chunks, temperature_ptr, top_k_ptr, top_p_ptr, weights_ptr,
    counts_ptr, masses_ptr,  # (rows, 3, chunks)
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    # Counts tokens at and above three candidates for the key of top-p
    row, first, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    shared, best, temperature, top_p = _shared_row(
        row, vocab, best_ptr, at_ptr, chunks, temperature_ptr, top_k_ptr, top_p_ptr, CHUNKS
    )
    if shared:
        total = _total(weights_ptr + row * chunks, chunks, CHUNKS)
        _wanted, low = _nucleus(total, top_p, vocab, -1)
        p1, p2, p3 = _pivots(low, _KEY_OF_ONE + 1, -1)
        counts_ptr += row * 3 * chunks
        masses_ptr += row * 3 * chunks
        for chunk in range(first, chunks, programs):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            key = _key(row_chunk(logits_ptr + row * stride, ids, vocab), best, temperature)
            weight = _weight(key)
            key = tl.where(ids < vocab, key, -1)
            for number in tl.static_range(3):
                within = key >= (p1 if number == 0 else (p2 if number == 1 else p3))
                tl.store(counts_ptr + number * chunks + chunk, tl.sum(within.to(tl.int32), 0))
                tl.store(masses_ptr + number * chunks + chunk, tl.sum(tl.where(within, weight, 0), 0))


@triton.jit
def _first_bracket(counts_ptr, masses_ptr, chunks, wanted, low, CHUNKS: tl.constexpr):
    at = tl.arange(0, CHUNKS)
    inside = at < chunks
    c1 = tl.sum(tl.load(counts_ptr + at, mask=inside, other=0), 0)
    c2 = tl.sum(tl.load(counts_ptr + chunks + at, mask=inside, other=0), 0)
    c3 = tl.sum(tl.load(counts_ptr + 2 * chunks + at, mask=inside, other=0), 0)
    m1 = tl.sum(tl.load(masses_ptr + at, mask=inside, other=0), 0)
    m2 = tl.sum(tl.load(masses_ptr + chunks + at, mask=inside, other=0), 0)
    m3 = tl.sum(tl.load(masses_ptr + 2 * chunks + at, mask=inside, other=0), 0)
    high = tl.full((), _KEY_OF_ONE + 1, tl.int32)
    none, nothing = tl.full((), -1, tl.int32), tl.zeros((), tl.int64)
    zero = tl.zeros((), tl.int32)
    return _narrowed(low, high, none, zero, nothing, c1, m1, c2, m2, c3, m3, wanted, True)


@triton.jit
def _collect_kernel(
    logits_ptr, stride, vocab, best_ptr, at_ptr, chunks, temperature_ptr, top_k_ptr, top_p_ptr, weights_ptr,
    counts_ptr, masses_ptr, scratch_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    # The keys are ordered by token. Several programs share the chunks of a row
    row, first, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    shared, best, temperature, top_p = _shared_row(
        row, vocab, best_ptr, at_ptr, chunks, temperature_ptr, top_k_ptr, top_p_ptr, CHUNKS
    )
    if shared:
        total = _total(weights_ptr + row * chunks, chunks, CHUNKS)
        wanted, start = _nucleus(total, top_p, vocab, -1)
        counts_ptr += row * 3 * chunks
        low, high, tokens, count, _mass = _first_bracket(
            counts_ptr, masses_ptr + row * 3 * chunks, chunks, wanted, start, CHUNKS
        )
        if (high - low > 1) & (tokens - count <= HELD):
            _lowest, p2, p3 = _pivots(start, _KEY_OF_ONE + 1, -1)
            at = tl.arange(0, CHUNKS)
            # Per chunk: tokens at and above low, minus tokens at and above high
            lower = tl.where(low == p3, 2, tl.where(low == p2, 1, 0))
            within = tl.load(counts_ptr + lower * chunks + at, mask=at < chunks, other=0)
            within -= tl.load(
                counts_ptr + (lower + 1) * chunks + at, mask=(at < chunks) & (lower < 2), other=0
            )
            for chunk in range(first, chunks, programs):
                place = scratch_ptr + row * HELD + tl.sum(tl.where(at < chunk, within, 0), 0)
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                key = _key(
                    row_chunk(logits_ptr + row * stride, ids, vocab),
                    best, temperature,
                )  # fmt: skip
                taken = ((key >= low) & (key < high) & (ids < vocab)).to(tl.int32)
                tl.store(place + tl.cumsum(taken, 0) - 1, key, mask=taken > 0)


@triton.jit
def _filter(
    row_ptr, scratch_ptr, vocab, best, temperature, total, top_k, top_p, min_p, counts_ptr, masses_ptr, chunks,
    TILE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Return (key, ties): which tokens of a row top-k, top-p and min-p keep.

    They are the tokens with a greater key, and the first `ties` tokens with this key. A token's key is its probability,
    with the bits read as an integer. `total` is the total weight of all tokens.
    """
    low, ties = tl.full((), -1, tl.int32), tl.zeros((), tl.int32) + vocab
    members = ties
    high, none = tl.full((), _KEY_OF_ONE + 1, tl.int32), tl.full((), -1, tl.int32)
    zero, nothing = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    by_rank = (top_k > 0) & (top_k < vocab)
    if by_rank:
        low, count, mass = _search(
            row_ptr, scratch_ptr, vocab, best, temperature, zero, high, members, zero, nothing, none, top_k,
            False, TILE, CHUNK, HELD,
        )  # fmt: skip
        ties, members = top_k - count, top_k
        total = mass + ties * _weight(low)
    if top_p < 1.0:
        wanted, start = _nucleus(total, top_p, members, low)
        tokens, count, mass, found = none, zero, nothing, none
        if not by_rank:
            start, high, tokens, count, mass = _first_bracket(
                counts_ptr, masses_ptr, chunks, wanted, start, CHUNKS
            )
            found = tl.where(tokens - count <= HELD, tokens - count, -1)
        key, _, mass = _search(
            row_ptr, scratch_ptr, vocab, best, temperature, start, high, tokens, count, mass, found, wanted,
            True, TILE, CHUNK, HELD,
        )  # fmt: skip
        fitting = _times(wanted - mass, tl.maximum(_weight(key), 1), vocab)
        ties = tl.where(key == low, tl.minimum(ties, fitting), fitting)
        low = key
    if min_p > 0.0:
        floor = min_p.to(tl.float32)
        key = floor.to(tl.int32, bitcast=True) + (floor.to(tl.float64) < min_p).to(tl.int32)
        ties = tl.where(key > low, 0, ties)
        low = tl.where(key > low, key - 1, low)
    return low, ties


@triton.jit
def _weigh_kept_kernel(
    logits_ptr, stride, vocab, best_ptr, at_ptr, chunks, temperature_ptr, weights_ptr, equal_ptr, low_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    # For a row without filters the weights stay, and the counts have no effect. The programs of a row share its chunks
    row, first, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    low = tl.load(low_ptr + row)
    if low >= 0:
        best, _ = _row_best(best_ptr + row * chunks, at_ptr + row * chunks, chunks, CHUNKS)
        temperature = tl.maximum(tl.load(temperature_ptr + row), _MIN_TEMPERATURE)
        for chunk in range(first, chunks, programs):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            key = _key(row_chunk(logits_ptr + row * stride, ids, vocab), best, temperature)
            key = tl.where(ids < vocab, key, -2)
            tl.store(equal_ptr + row * chunks + chunk, tl.sum((key == low).to(tl.int32), 0))
            tl.store(weights_ptr + row * chunks + chunk, tl.sum(tl.where(key > low, _weight(key), 0), 0))


@triton.jit
def _uniform(key_ptr, position):
    # As batchinfer_kernels.philox.uniforms
    k0, k1 = tl.load(key_ptr).to(tl.uint32, bitcast=True), tl.load(key_ptr + 1).to(tl.uint32, bitcast=True)
    seed = k0.to(tl.uint64) | (k1.to(tl.uint64) << 32)
    none = tl.zeros((), tl.int32)
    first, second, _, _ = tl.philox(seed, position, none, tl.load(key_ptr + 2), tl.load(key_ptr + 3))
    high, low = (first >> 5).to(tl.int64), (second >> 6).to(tl.int64)
    return (high * 67108864 + low).to(tl.float64) / 9007199254740992.0


@triton.jit
def _draw(
    row_ptr, weights_ptr, equal_ptr, chunks, vocab, best, temperature, low, ties, uniform,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    # The first token at which the cumulative weight of kept tokens exceeds uniform × their total weight
    at = tl.arange(0, CHUNKS)
    equal = tl.load(equal_ptr + at, mask=at < chunks, other=0)
    ahead = tl.cumsum(equal, 0) - equal  # tokens at the key before each chunk
    kept = tl.minimum(tl.maximum(ties - ahead, 0), equal).to(tl.int64)
    masses = tl.load(weights_ptr + at, mask=at < chunks, other=0) + kept * _weight(tl.maximum(low, 0))
    total = tl.sum(masses, 0)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.sum((tl.cumsum(masses, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(at < chunk, masses, 0), 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    key = _key(row_chunk(row_ptr, ids, vocab), best, temperature)
    tie = (key == low).to(tl.int32)
    rank = tl.sum(tl.where(at < chunk, equal, 0), 0) + tl.cumsum(tie, 0) - tie
    kept = (ids < vocab) & ((key > low) | ((tie > 0) & (rank < ties)))
    cumulated = before + tl.cumsum(tl.where(kept, _weight(key), 0), 0)
    return tl.min(tl.where(cumulated > target, ids, 2147483647), 0)


@triton.jit
def _filter_kernel(
    logits_ptr, stride, vocab, best_ptr, at_ptr, chunks,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, weights_ptr, counts_ptr, masses_ptr, low_ptr, ties_ptr,
    scratch_ptr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    # For a greedy row, or one without filters, key and ties are -1 and 0: all tokens are kept
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    best, _ = _row_best(best_ptr + row * chunks, at_ptr + row * chunks, chunks, CHUNKS)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    low, ties = tl.full((), -1, tl.int32), tl.zeros((), tl.int32)
    filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)
    if (temperature > 0.0) & is_finite(best) & filtered:
        temperature = tl.maximum(temperature, _MIN_TEMPERATURE)
        row_ptr = logits_ptr + row * stride
        total = _total(weights_ptr + row * chunks, chunks, CHUNKS)
        low, ties = _filter(
            row_ptr, scratch_ptr + row * HELD, vocab, best, temperature, total, top_k, top_p, min_p,
            counts_ptr + row * 3 * chunks, masses_ptr + row * 3 * chunks, chunks, TILE, CHUNK, CHUNKS, HELD,
        )  # fmt: skip
    tl.store(low_ptr + row, low)
    tl.store(ties_ptr + row, ties)


@triton.jit
def _choose_kernel(
    logits_ptr, stride, vocab, best_ptr, at_ptr, chunks,
    temperature_ptr, keys_ptr, positions_ptr, weights_ptr, equal_ptr, low_ptr, ties_ptr, tokens_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best, token = _row_best(best_ptr + row * chunks, at_ptr + row * chunks, chunks, CHUNKS)
    token = tl.where(is_finite(best), token, _NO_TOKEN)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0.0) & is_finite(best):
            token = _draw(
                logits_ptr + row * stride, weights_ptr + row * chunks, equal_ptr + row * chunks, chunks, vocab,
                best, tl.maximum(temperature, _MIN_TEMPERATURE), tl.load(low_ptr + row), tl.load(ties_ptr + row),
                _uniform(keys_ptr + row * 4, tl.load(positions_ptr + row)), CHUNK, CHUNKS,
            )  # fmt: skip
    tl.store(tokens_ptr + row, token.to(tl.int64))


def sample(logits: Tensor, sampling: RowSampling | None = None, out: Tensor | None = None) -> Tensor:
    """Sample a token from each row of logits, as `sample_reference` does: (rows,) int64.

    Launches depend only on the shape of logits and on whether `sampling` is given, so they can be captured into a
    graph. A row's token does not depend on other rows.

    Args:
        logits: (rows, vocab); rows may be strided.
        sampling: sampling parameters of the rows; None: the argmax of each row.
        out: (rows,) int64; receives the tokens if given.
    """
    _check(logits, sampling, out)
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if not rows:
        return out
    if vocab == 1:  # Triton 3.6 does not compile the filter for a row of one token on compute capability 9.0
        logits, vocab = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf), 2
    best, ids, _ = chunk_best(logits, with_sums=False)
    places = (logits, logits.stride(0), vocab, best, ids)
    sizes = {"CHUNK": CHUNK, "CHUNKS": next_power_of_2(best.shape[1])}
    if sampling is None:
        _choose_kernel[(rows,)](*places, best.shape[1], *(None,) * 7, out, **sizes, num_warps=8)
        return out
    weights = torch.empty(best.shape, dtype=torch.int64, device=logits.device)
    _weigh_kernel[best.shape](*places, sampling.temperature, weights, **sizes, num_warps=4)
    equal, scratch = torch.empty_like(ids), ids.new_empty((rows, HELD))
    low, ties = ids.new_empty(rows), ids.new_empty(rows)
    chunks = best.shape[1]
    counts, masses = ids.new_empty((rows, 3, chunks)), weights.new_empty((rows, 3, chunks))
    shared = (rows, min(chunks, cdiv(PROGRAMS, rows)))
    nucleus = (sampling.temperature, sampling.top_k, sampling.top_p)
    tallies = (*places, chunks, *nucleus, weights, counts, masses)
    _tally_kernel[shared](*tallies, **sizes, num_warps=8)
    _collect_kernel[shared](*tallies, scratch, **sizes, HELD=HELD, num_warps=8)
    _filter_kernel[(rows,)](
        *places, chunks, *nucleus, sampling.min_p, weights, counts, masses, low, ties, scratch,
        **sizes, TILE=TILE, HELD=HELD, num_warps=WARPS,
    )  # fmt: skip
    kept = (weights, equal, low, ties)
    _weigh_kept_kernel[shared](*places, chunks, sampling.temperature, *kept[:3], **sizes, num_warps=8)
    drawn = (sampling.temperature, sampling.keys, sampling.positions)
    _choose_kernel[(rows,)](*places, best.shape[1], *drawn, *kept, out, **sizes, num_warps=8)
    return out


def _check(logits: Tensor, sampling: RowSampling | None, out: Tensor | None) -> None:
    check_logits(logits)
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"rows have {logits.shape[1]} logits; at most {MAX_VOCAB} are supported")
    if sampling is not None:
        sampling.check(logits)
    if out is not None and (
        out.shape != logits.shape[:1] or out.dtype != torch.int64 or out.stride() != (1,)
    ):
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, expected {tuple(logits.shape[:1])} int64")
