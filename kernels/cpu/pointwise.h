/* Norm, gate, rotation and KV write; included once per dtype. A bfloat16 value is rounded wherever the torch reference
 * rounds it. */

/* Returns v = x + other and stores it in `total`; without `other`, v = x. */
INLINE vf NAME(add_lanes)(const REAL *x, const REAL *other, REAL *total) {
    if (!other) return LOADV(x);
    vf v = ROUNDV(LOADV(x) + LOADV(other));
    STOREV(total, v);
    return v;
}

INLINE Twin NAME(add_twin)(const REAL *x, const REAL *other, REAL *total) {
    Twin v = NAME(load_twin)(x);
    if (!other) return v;
    Twin w = NAME(load_twin)(other);
    NAME(store_twin)(total, (Twin){v.a + w.a, v.b + w.b});
    return NAME(load_twin)(total);
}

/* Returns acc + (v - mean)^power; `power` (a constant): 1 or 2. */
INLINE vf NAME(more)(vf v, vf mean, vf acc, const int power) {
    vf apart = v - mean;
    if (power == 2) return fused(apart, apart, acc);
    return acc + apart;
}

/* Returns the sum of (v - mean)^power, with v = x + other, which is stored in `total`; without `other`, v = x. `power`
 * (a constant): 1 or 2. */
INLINE float NAME(add_row)(const REAL *x, const REAL *other, REAL *total, int64_t width, float mean, const int power) {
    Twin squares[COLUMNS / 2]; /* several, so that additions are independent */
    vf centre = splat(mean);
    float rest = 0;
    int64_t i = 0;
    for (int c = 0; c < COLUMNS / 2; c++) squares[c] = (Twin){splat(0.0f), splat(0.0f)};
    for (; i + PANEL <= width; i += PANEL)
        for (int c = 0; c < COLUMNS / 2; c++) {
            int64_t at = i + c * 2 * LANES;
            Twin v = NAME(add_twin)(x + at, other ? other + at : NULL, total + at);
            squares[c].a = NAME(more)(v.a, centre, squares[c].a, power);
            squares[c].b = NAME(more)(v.b, centre, squares[c].b, power);
        }
    for (int c = 0; c < COLUMNS / 2; c++) squares[c] = NAME(ordered_twin)(squares[c]);
    for (; i + LANES <= width; i += LANES) {
        vf v = NAME(add_lanes)(x + i, other ? other + i : NULL, total + i);
        squares[0].a = NAME(more)(v, centre, squares[0].a, power);
    }
    for (; i < width; i++) {
        REAL v = other ? STORE(LOAD(x[i]) + LOAD(other[i])) : x[i];
        if (other) total[i] = v;
        float apart = LOAD(v) - mean;
        rest = power == 2 ? fused_one(apart, apart, rest) : rest + apart;
    }
    vf all = squares[0].a + squares[0].b;
    for (int c = 1; c < COLUMNS / 2; c++) all = all + squares[c].a + squares[c].b;
    return lane_sum(all) + rest;
}

/* `past` (a constant): bypass the caches as in streams.h. */
INLINE void NAME(put_twin)(REAL *to, Twin t, const int past) {
    if (past)
        NAME(stream_twin)(to, t);
    else
        NAME(store_twin)(to, t);
}

/* Computes (offset + weight) * x * scale, rounded once. y may be x. */
INLINE void NAME(scale_shifted)(const REAL *x, const REAL *weight, REAL *y, int64_t width, float scale, float offset,
                                const int past) {
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        Twin v = NAME(load_twin)(x + i), w = NAME(load_twin)(weight + i);
        NAME(put_twin)(y + i, (Twin){v.a * scale * (offset + w.a), v.b * scale * (offset + w.b)}, past);
    }
    for (; i + LANES <= width; i += LANES) STOREV(y + i, LOADV(x + i) * scale * (offset + LOADV(weight + i)));
    for (; i < width; i++) y[i] = STORE(LOAD(x[i]) * scale * (offset + LOAD(weight[i])));
}

/* Computes y = weight * round(x / rms(x)) for one row of rounded values; with an offset, (offset + weight) * x /
 * rms(x). y may be x. */
INLINE void NAME(norm_row)(const REAL *x, const REAL *weight, REAL *y, int64_t width, float squares, float eps,
                           float offset, const int past) {
    float scale = 1.0f / sqrtf(squares / width + eps);
    int64_t i = 0;
    if (offset != 0) {
        NAME(scale_shifted)(x, weight, y, width, scale, offset, past);
        return;
    }
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        Twin v = NAME(load_twin)(x + i), w = NAME(load_twin)(weight + i);
        v = NAME(round_twin)((Twin){v.a * scale, v.b * scale});
        NAME(put_twin)(y + i, (Twin){w.a * v.a, w.b * v.b}, past);
    }
    for (; i + LANES <= width; i += LANES) STOREV(y + i, LOADV(weight + i) * ROUNDV(LOADV(x + i) * scale));
    for (; i < width; i++) y[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(x[i]) * scale)));
}

#ifndef CODED /* a library for quantised caches does not need the rest */
/* Computes a range of the rows of `team_rms_norm`. */
INLINE void NAME(norm_rows)(const REAL *x, const REAL *residual, const REAL *weight, REAL *y, REAL *total, int64_t rows,
                            int64_t width, float eps, float offset, const int past) {
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * width;
        if (residual) {
            float squares = NAME(add_row)(x + at, residual + at, total + at, width, 0, 2);
            NAME(norm_row)(total + at, weight, y + at, width, squares, eps, offset, past);
        } else {
            float squares = NAME(add_row)(x + at, NULL, NULL, width, 0, 2);
            NAME(norm_row)(x + at, weight, y + at, width, squares, eps, offset, past);
        }
    }
}

/* Computes total = x + residual, and y from it as `norm_row` does. residual may be NULL: then total is x. */
TEAM void NAME(team_rms_norm)(const REAL *x, const REAL *residual, const REAL *weight, REAL *y, REAL *total,
                              int64_t rows, int64_t width, float eps, float offset) {
    if (y != x && streamed(y, rows, width * (int64_t)sizeof(REAL))) {
        NAME(norm_rows)(x, residual, weight, y, total, rows, width, eps, offset, 1);
        end_stream();
    } else {
        NAME(norm_rows)(x, residual, weight, y, total, rows, width, eps, offset, 0);
    }
#pragma omp barrier
}

void NAME(rms_norm)(const REAL *x, const REAL *residual, const REAL *weight, REAL *y, REAL *total, int64_t rows,
                    int64_t width, float eps, float offset) {
#pragma omp parallel
    NAME(team_rms_norm)(x, residual, weight, y, total, rows, width, eps, offset);
}

/* Computes y = (x - mean) * scale * weight + bias for one row, rounded once. `bias` may be NULL, y may be x. */
INLINE void NAME(centre_row)(const REAL *x, const REAL *weight, const REAL *bias, REAL *y, int64_t width, float mean,
                             float scale) {
    vf centre = splat(mean), none = splat(0.0f);
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        Twin v = NAME(load_twin)(x + i), w = NAME(load_twin)(weight + i), b = {none, none};
        if (bias) b = NAME(load_twin)(bias + i);
        NAME(store_twin)(y + i, (Twin){fused((v.a - centre) * scale, w.a, b.a), fused((v.b - centre) * scale, w.b, b.b)});
    }
    for (; i + LANES <= width; i += LANES) {
        vf b = none;
        if (bias) b = LOADV(bias + i);
        STOREV(y + i, fused((LOADV(x + i) - centre) * scale, LOADV(weight + i), b));
    }
    for (; i < width; i++)
        y[i] = STORE(fused_one((LOAD(x[i]) - mean) * scale, LOAD(weight[i]), bias ? LOAD(bias[i]) : 0.0f));
}

/* Computes y = (total - mean) / deviation * weight + bias for the rows of total = x + residual. residual may be NULL:
 * then total is x. total may be y, y may be x or residual, bias may be NULL. */
TEAM void NAME(team_layer_norm)(const REAL *x, const REAL *residual, const REAL *weight, const REAL *bias, REAL *y,
                                REAL *total, int64_t rows, int64_t width, float eps) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * width;
        const REAL *sum = residual ? total + at : x + at;
        float mean = residual ? NAME(add_row)(x + at, residual + at, total + at, width, 0, 1)
                              : NAME(add_row)(sum, NULL, NULL, width, 0, 1);
        mean /= width;
        float variance = NAME(add_row)(sum, NULL, NULL, width, mean, 2) / width;
        NAME(centre_row)(sum, weight, bias, y + at, width, mean, 1.0f / sqrtf(variance + eps));
    }
}

void NAME(layer_norm)(const REAL *x, const REAL *residual, const REAL *weight, const REAL *bias, REAL *y, REAL *total,
                      int64_t rows, int64_t width, float eps) {
#pragma omp parallel
    NAME(team_layer_norm)(x, residual, weight, bias, y, total, rows, width, eps);
}

/* `kind` is a constant. */
INLINE Twin NAME(gated)(Twin gate, Twin up, const int kind) {
    Twin g = NAME(round_twin)((Twin){gate_factor(gate.a, kind, COARSE), gate_factor(gate.b, kind, COARSE)});
    Twin u = NAME(round_twin)((Twin){up_factor(up.a, kind), up_factor(up.b, kind)});
    return (Twin){g.a * u.a, g.b * u.b};
}

INLINE void NAME(gate_row)(const REAL *gate, const REAL *up, REAL *out, int64_t width, const int kind) {
    int64_t i = 0, rest = width % (2 * LANES);
    REAL some[2 * LANES] = {0}, others[2 * LANES] = {0};
    for (; i + 2 * LANES <= width; i += 2 * LANES)
        NAME(store_twin)(out + i, NAME(gated)(NAME(load_twin)(gate + i), NAME(load_twin)(up + i), kind));
    if (!rest) return;
    memcpy(some, gate + i, rest * sizeof(REAL)), memcpy(others, up + i, rest * sizeof(REAL));
    NAME(store_twin)(some, NAME(gated)(NAME(load_twin)(some), NAME(load_twin)(others), kind));
    memcpy(out + i, some, rest * sizeof(REAL));
}

INLINE void NAME(activate_row)(const REAL *x, REAL *out, int64_t width, const int kind) {
    int64_t i = 0, rest = width % (2 * LANES);
    REAL some[2 * LANES] = {0};
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        Twin v = NAME(load_twin)(x + i);
        NAME(store_twin)(out + i, (Twin){gate_factor(v.a, kind, COARSE), gate_factor(v.b, kind, COARSE)});
    }
    if (!rest) return;
    memcpy(some, x + i, rest * sizeof(REAL));
    Twin v = NAME(load_twin)(some);
    NAME(store_twin)(some, (Twin){gate_factor(v.a, kind, COARSE), gate_factor(v.b, kind, COARSE)});
    memcpy(out + i, some, rest * sizeof(REAL));
}

/* One loop per kind, because a branch inside the loop would cost more than its body. */
#define FOR_EACH_KIND(kind, call) \
    switch (kind) { \
        case GATED: \
        case SILU: call(GATED); break; \
        case GELU_GATED: \
        case GELU: call(GELU_GATED); break; \
        case CLAMPED_GATED: call(CLAMPED_GATED); break; \
        default: call(EXACT_GELU_GATED); \
    }

/* Computes y = gate_factor(gate) * up_factor(up); gate_up: (rows, 2 * width). */
void NAME(gate)(const REAL *gate_up, REAL *y, int64_t rows, int64_t width, int64_t kind) {
#define GATE(kind) NAME(gate_row)(gate_up + row * 2 * width, gate_up + (row * 2 + 1) * width, y + row * width, width, kind)
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) FOR_EACH_KIND(kind, GATE)
#undef GATE
}

/* Computes y, the activation of `kind` of (rows, width) values. */
void NAME(activate)(const REAL *x, REAL *y, int64_t rows, int64_t width, int64_t kind) {
#define ACTIVATE(kind) NAME(activate_row)(x + row * width, y + row * width, width, kind)
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) FOR_EACH_KIND(kind, ACTIVATE)
#undef ACTIVATE
}
#undef FOR_EACH_KIND
#endif

/* The norms and the rotation of heads. */
typedef struct {
    const float *cosine, *sine; /* (max positions, pairs) */
    int64_t pairs, interleaved; /* a pair is (i, i + pairs), or (2i, 2i + 1) */
    const REAL *q_norm, *k_norm; /* NULL: no norm */
    float eps, offset;
} NAME(Rotation);

INLINE void NAME(rotate_adjacent)(const REAL *head, const float *cosine, const float *sine, REAL *out, int64_t pairs) {
    int64_t i = 0;
    for (; i + LANES <= pairs; i += LANES) {
        Twin v = NAME(load_apart)(head + 2 * i);
        vf c = load_f32(cosine + i), s = load_f32(sine + i);
        NAME(store_apart)(out + 2 * i, (Twin){rotated_a(v.a, v.b, c, s), rotated_b(v.a, v.b, c, s)});
    }
    for (; i < pairs; i++) {
        float a = LOAD(head[2 * i]), b = LOAD(head[2 * i + 1]);
        out[2 * i] = STORE(fused_one(a, cosine[i], -(b * sine[i])));
        out[2 * i + 1] = STORE(fused_one(b, cosine[i], a * sine[i]));
    }
}

INLINE void NAME(rotate_halves)(const REAL *head, const float *cosine, const float *sine, REAL *out, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = LOADV(head + i), b = LOADV(head + i + half), c = load_f32(cosine + i), s = load_f32(sine + i);
        STOREV(out + i, rotated_a(a, b, c, s));
        STOREV(out + i + half, rotated_b(a, b, c, s));
    }
    for (; i < half; i++) {
        float a = LOAD(head[i]), b = LOAD(head[i + half]);
        out[i] = STORE(fused_one(a, cosine[i], -(b * sine[i])));
        out[i + half] = STORE(fused_one(b, cosine[i], a * sine[i]));
    }
}

/* Rotates one head at a position: optional RMSNorm, then the rotation of its first 2 * pairs values. */
INLINE void NAME(rotate)(const NAME(Rotation) *by, const REAL *head, const REAL *norm, int64_t position, REAL *out,
                         int64_t dim) {
    REAL normed[MAX_DIM];
    const float *cosine = by->cosine + position * by->pairs, *sine = by->sine + position * by->pairs;
    int64_t turned = 2 * by->pairs;
    if (norm) {
        NAME(norm_row)(head, norm, normed, dim, NAME(add_row)(head, NULL, NULL, dim, 0, 2), by->eps, by->offset, 0);
        head = normed;
    }
    if (by->interleaved)
        NAME(rotate_adjacent)(head, cosine, sine, out, by->pairs);
    else
        NAME(rotate_halves)(head, cosine, sine, out, by->pairs);
    if (turned < dim) memcpy(out + turned, head + turned, (dim - turned) * sizeof(REAL));
}

#ifndef CODED
/* Writes K and V of one token to a block of the cache. Another thread may be writing the other halves of the words of
 * V. */
INLINE void NAME(store_token)(const REAL *k, const REAL *v, REAL *k_block, REAL *v_block, int64_t place, int64_t dim,
                              int64_t dim_pad, int64_t block_pad) {
    REAL *to = v_block + place / PAIR * dim_pad * PAIR + place % PAIR;
    for (int64_t w = 0; w < dim / PAIR; w++) memcpy(k_block + (w * block_pad + place) * PAIR, k + w * PAIR, 4);
    for (int64_t d = 0; d < dim; d++) to[d * PAIR] = v[d];
}

/* Writes K of `count` tokens at consecutive slots of one unit to a block of the cache, LANES words of the head at once
 * if that is faster. `k` has LANES readable rows of MAX_DIM. */
ONCE void NAME(store_keys)(const REAL *k, int64_t count, REAL *block, int64_t place, int64_t dim, int64_t block_pad) {
    const int64_t stride = MAX_DIM / PAIR;
    const int32_t *words = (const int32_t *)k;
    int32_t *to = (int32_t *)block + place;
    int64_t w = 0;
    if (count >= LEAST_TURNED)
        for (; w + LANES <= dim / PAIR; w += LANES) {
            vi columns[LANES];
            transpose(words + w, stride, columns);
            for (int i = 0; i < LANES; i++) store_words(to + (w + i) * block_pad, columns[i], count);
        }
    for (int64_t i = 0; i < count; i++)
        for (int64_t at = w; at < dim / PAIR; at++) memcpy(to + at * block_pad + i, words + i * stride + at, 4);
}

/* Writes V of two tokens that share words. */
INLINE void NAME(store_pair)(const REAL *v, const REAL *other, REAL *to, int64_t dim) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        *(vi *)(to + d * PAIR) = paired((const uint16_t *)v + d, (const uint16_t *)other + d);
    for (; d < dim; d++) to[d * PAIR] = v[d], to[d * PAIR + 1] = other[d];
}

/* Writes V of these tokens, whose rows are `stride` values apart. If a word has only one of them, another thread may be
 * writing its other half. */
ONCE void NAME(store_values)(const REAL *v, int64_t stride, int64_t count, REAL *block, int64_t place, int64_t dim,
                             int64_t dim_pad) {
    for (int64_t i = 0; i < count;) {
        int both = PAIR == 2 && (place + i) % PAIR == 0 && i + 1 < count;
        const REAL *row = v + i * stride;
        REAL *to = block + (place + i) / PAIR * dim_pad * PAIR + (place + i) % PAIR;
        if (both)
            NAME(store_pair)(row, row + stride, to, dim);
        else
            for (int64_t d = 0; d < dim; d++) to[d * PAIR] = row[d];
        i += 1 + both;
    }
}

#endif

/* Prefetches the lines of one token's K and V of one head; each word of K may be in its own line. */
INLINE void NAME(fetch_token)(const KEPT *k_block, const KEPT *v_block, int64_t place, int64_t dim, int64_t dim_pad,
                              int64_t block_pad) {
    const KEPT *v = v_block + place / PAIR * dim_pad * PAIR;
    for (int64_t w = 0; w < dim / PAIR; w++) __builtin_prefetch(k_block + (w * block_pad + place) * PAIR, 0, TO_L2);
    for (int64_t d = 0; d < dim * PAIR; d += LINE / (int64_t)sizeof(KEPT)) __builtin_prefetch(v + d, 0, TO_L2);
}

/* The heads of a step's tokens, as their linear layer writes them, and their targets. Without kv_heads only q is
 * rotated, and k, v, slots and the cache are NULL. */
typedef struct {
    const REAL *q, *k, *v; /* (tokens, heads, dim), with tokens `stride` values apart */
    int64_t stride;
    const int64_t *positions, *slots; /* a slot: block * block_size + place */
    Cache cache;
    REAL *q_out; /* (tokens, q_heads, dim) */
    NAME(Rotation) rotation;
    int64_t tokens, q_heads, kv_heads, dim, dim_pad, block_size, block_pad;
} NAME(Heads);

/* Prefetches the slot of a token's head, unless the token before is stored next to it. */
INLINE void NAME(fetch_place)(const NAME(Heads) *a, int64_t t, int64_t h) {
    if (t && a->slots[t] / LANES == a->slots[t - 1] / LANES) return;
    int64_t block = a->slots[t] / a->block_size, place = a->slots[t] % a->block_size;
    int64_t at = (block * a->kv_heads + h) * a->block_pad * a->dim_pad;
    NAME(fetch_token)((const KEPT *)a->cache.k + at, (const KEPT *)a->cache.v + at, place, a->dim, a->dim_pad, a->block_pad);
}

/* Returns how many tokens from t on, before `end`, have consecutive slots in one unit. */
INLINE int64_t NAME(run_from)(const NAME(Heads) *a, int64_t t, int64_t end) {
    int64_t n = 1;
    if (!a->kv_heads) return 1;
    while (t + n < end && a->slots[t + n] == a->slots[t] + n && (a->slots[t + n] % a->block_size) % LANES) n++;
    return n;
}

#ifdef CODED
#include "store_codes.h"
#else
/* Stores a run within a segment that ends before `end`. */
INLINE void NAME(store_run)(const NAME(Heads) *a, int64_t t, int64_t count, int64_t end) {
    int64_t block = a->slots[t] / a->block_size, place = a->slots[t] % a->block_size, size = a->block_pad * a->dim_pad;
    REAL rotated[LANES * MAX_DIM] __attribute__((aligned(LINE)));
    for (int64_t h = 0; h < a->kv_heads; h++) {
        const REAL *k = a->k + t * a->stride + h * a->dim, *v = a->v + t * a->stride + h * a->dim;
        REAL *k_block = (REAL *)a->cache.k + (block * a->kv_heads + h) * size;
        REAL *v_block = (REAL *)a->cache.v + (block * a->kv_heads + h) * size;
        for (int64_t later = t + AHEAD; later < t + AHEAD + count && later < end; later++) NAME(fetch_place)(a, later, h);
        for (int64_t i = 0; i < count; i++)
            NAME(rotate)(&a->rotation, k + i * a->stride, a->rotation.k_norm, a->positions[t + i], rotated + i * MAX_DIM,
                         a->dim);
        if (count == 1) {
            NAME(store_token)(rotated, v, k_block, v_block, place, a->dim, a->dim_pad, a->block_pad);
            continue;
        }
        NAME(store_keys)(rotated, count, k_block, place, a->dim, a->block_pad);
        NAME(store_values)(v, a->stride, count, v_block, place, a->dim, a->dim_pad);
    }
}
#endif

/* Each thread stores a segment of the tokens, run by run, and does not prefetch lines of other threads, which may be
 * written. */
TEAM void NAME(team_rope_store)(const NAME(Heads) *a) {
    int64_t me = omp_get_thread_num(), all = omp_get_num_threads(), count;
    int64_t first = a->tokens * me / all, end = a->tokens * (me + 1) / all;
    for (int64_t t = first; t < end && t < first + AHEAD; t++)
        for (int64_t h = 0; h < a->kv_heads; h++) NAME(fetch_place)(a, t, h);
    for (int64_t t = first; t < end; t += count) {
        count = NAME(run_from)(a, t, end);
        for (int64_t i = 0; i < count; i++) {
            const REAL *q = a->q + (t + i) * a->stride;
            for (int64_t h = 0; h < a->q_heads; h++)
                NAME(rotate)(&a->rotation, q + h * a->dim, a->rotation.q_norm, a->positions[t + i],
                             a->q_out + ((t + i) * a->q_heads + h) * a->dim, a->dim);
        }
        if (a->kv_heads) NAME(store_run)(a, t, count, end);
    }
#pragma omp barrier
}

void NAME(rope_store)(const NAME(Heads) *heads) {
#pragma omp parallel
    NAME(team_rope_store)(heads);
}
