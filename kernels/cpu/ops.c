/* The operators of a decoder between its matrix products, for float32 and bfloat16.
 *
 * Included twice by itself, once a dtype: REAL is the stored type, LOAD and STORE go to float and back. Everything is
 * computed in float. Semantics are those of the torch references beside this folder; a bfloat16 value is rounded
 * (to nearest, ties to even) wherever the reference rounds it.
 */
#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

static inline float bf16_load(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline bf16 bf16_store(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bf16)rounded; /* rounding must not turn NaN into infinity */
}

/* e^x for x <= 0 by 2^n * p(f), |f| <= 1/2: relative error below 2e-7, and it vectorises, which the library's may not. */
static inline float exp_nonpositive(float x) {
    float t = x < -87.0f ? -87.0f : x;
    t *= 1.44269504f;
    float n = __builtin_rintf(t), f = (t - n) * 0.69314718f;
    float p = 1.0f + f * (1.0f + f * (0.5f + f * (0.16666667f + f * (0.041666668f + f * (0.0083333338f + f * 0.0013888889f)))));
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

#define TILE 64      /* keys per step: 4 AVX-512 registers a row of scores */
#define MAX_ROWS 16  /* query rows (queries x heads of a group) that share one pass over K and V */
#define MAX_DIM 256

#define JOIN(a, b) a##b
#define NAMED(base, suffix) JOIN(base, suffix)

#define REAL float
#define LOAD(x) (x)
#define STORE(x) (x)
#define NAME(base) NAMED(base, _f32)
#include "ops.c"
#undef REAL
#undef LOAD
#undef STORE
#undef NAME

#define REAL bf16
#define LOAD(x) bf16_load(x)
#define STORE(x) bf16_store(x)
#define NAME(base) NAMED(base, _bf16)
#include "ops.c"

#else

/* total = x + residual; y = weight * round(total / rms(total)). residual may be NULL: then total is x. */
void NAME(rms_norm)(const REAL *x, const REAL *residual, const REAL *weight, REAL *y, REAL *total, int64_t rows,
                    int64_t hidden, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *xr = x + row * hidden, *rr = residual ? residual + row * hidden : NULL;
        REAL *yr = y + row * hidden, *tr = residual ? total + row * hidden : NULL;
        const REAL *sum = rr ? tr : xr;
        if (rr)
            for (int64_t i = 0; i < hidden; i++) tr[i] = STORE(LOAD(xr[i]) + LOAD(rr[i]));
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < hidden; i++) squares += LOAD(sum[i]) * LOAD(sum[i]);
        float scale = 1.0f / sqrtf(squares / hidden + eps);
        for (int64_t i = 0; i < hidden; i++) yr[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(sum[i]) * scale)));
    }
}

/* y = silu(gate) * up, gate_up: (rows, 2 * width) */
void NAME(silu_gate)(const REAL *gate_up, REAL *y, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *gate = gate_up + row * 2 * width, *up = gate + width;
        REAL *out = y + row * width;
        for (int64_t i = 0; i < width; i++) {
            float g = LOAD(gate[i]), e = exp_nonpositive(-fabsf(g));
            float sigmoid = (g >= 0 ? 1.0f : e) / (1.0f + e);
            out[i] = STORE(LOAD(STORE(g * sigmoid)) * LOAD(up[i]));
        }
    }
}

/* One head: optional RMSNorm, then the rotation of its halves. */
static inline void NAME(rotate)(const REAL *head, const REAL *norm, const float *cosine, const float *sine, REAL *out,
                                int64_t dim, float eps) {
    float value[MAX_DIM];
    int64_t half = dim / 2;
    for (int64_t i = 0; i < dim; i++) value[i] = LOAD(head[i]);
    if (norm) {
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < dim; i++) squares += value[i] * value[i];
        float scale = 1.0f / sqrtf(squares / dim + eps);
        for (int64_t i = 0; i < dim; i++) value[i] = LOAD(STORE(LOAD(norm[i]) * LOAD(STORE(value[i] * scale))));
    }
    for (int64_t i = 0; i < half; i++) {
        out[i] = STORE(value[i] * cosine[i] - value[i + half] * sine[i]);
        out[i + half] = STORE(value[i + half] * cosine[i] + value[i] * sine[i]);
    }
}

/* q, k, v are heads within rows of `stride` values; cosine, sine: (max positions, dim / 2).
 * Rotated q goes to q_out (tokens, q_heads, dim), k and v to caches (blocks, kv_heads, block_size, dim) at slots. */
void NAME(rope_store)(const REAL *q, const REAL *k, const REAL *v, int64_t stride, const float *cosine,
                      const float *sine, const int64_t *positions, const int64_t *slots, REAL *k_cache, REAL *v_cache,
                      REAL *q_out, const REAL *q_norm, const REAL *k_norm, float eps, int64_t tokens, int64_t q_heads,
                      int64_t kv_heads, int64_t dim, int64_t block_size) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosine + positions[t] * (dim / 2), *s = sine + positions[t] * (dim / 2);
        for (int64_t h = 0; h < q_heads; h++)
            NAME(rotate)(q + t * stride + h * dim, q_norm, c, s, q_out + (t * q_heads + h) * dim, dim, eps);
        int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t place = ((block * kv_heads + h) * block_size + offset) * dim;
            NAME(rotate)(k + t * stride + h * dim, k_norm, c, s, k_cache + place, dim, eps);
            memcpy(v_cache + place, v + t * stride + h * dim, dim * sizeof(REAL));
        }
    }
}

/* Widen TILE keys and values of one KV head; keys transposed, so that scores vectorise over keys. Rows behind `count`
 * are zero: what lies in the cache there may be anything. */
static inline void NAME(load_tile)(const REAL *k_cache, const REAL *v_cache, const int32_t *table, int64_t first,
                                   int64_t count, int64_t kv_heads, int64_t head, int64_t dim, int64_t block_size,
                                   float *restrict keys, float *restrict values) {
    for (int64_t t = 0; t < count; t++) {
        int64_t at = first + t;
        int64_t place = ((table[at / block_size] * kv_heads + head) * block_size + at % block_size) * dim;
        for (int64_t d = 0; d < dim; d++) keys[d * TILE + t] = LOAD(k_cache[place + d]);
        for (int64_t d = 0; d < dim; d++) values[t * dim + d] = LOAD(v_cache[place + d]);
    }
    for (int64_t t = count; t < TILE; t++)
        for (int64_t d = 0; d < dim; d++) keys[d * TILE + t] = values[t * dim + d] = 0;
}

/* Attention of `queries` queries, the first at position `start`, over one KV head; rows are query-major. */
static inline void NAME(attend)(const REAL *q, const REAL *k_cache, const REAL *v_cache, const int32_t *table,
                                REAL *out, int64_t queries, int64_t start, int64_t window, float scale,
                                int64_t q_heads, int64_t kv_heads, int64_t head, int64_t dim, int64_t block_size) {
    int64_t group = q_heads / kv_heads, rows = queries * group, end = start + queries;
    int64_t first = window > 0 && start - window + 1 > 0 ? (start - window + 1) / TILE * TILE : 0;
    float query[MAX_ROWS][MAX_DIM], sum[MAX_ROWS][MAX_DIM], scores[MAX_ROWS][TILE], most[MAX_ROWS], mass[MAX_ROWS];
    static _Thread_local float keys[MAX_DIM * TILE], values[TILE * MAX_DIM];
    for (int64_t r = 0; r < rows; r++) {
        const REAL *from = q + ((r / group) * q_heads + head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d++) query[r][d] = LOAD(from[d]) * scale, sum[r][d] = 0;
        most[r] = -INFINITY, mass[r] = 0;
    }
    for (int64_t tile = first; tile < end; tile += TILE) {
        int64_t count = end - tile < TILE ? end - tile : TILE;
        NAME(load_tile)(k_cache, v_cache, table, tile, count, kv_heads, head, dim, block_size, keys, values);
        for (int64_t r = 0; r < rows; r++) {
            float row[TILE] = {0};
            for (int64_t d = 0; d < dim; d++)
                for (int64_t t = 0; t < TILE; t++) row[t] += query[r][d] * keys[d * TILE + t];
            int64_t at = start + r / group, last = at - tile, oldest = window > 0 ? at - window + 1 - tile : -1;
            float top = most[r];
            for (int64_t t = 0; t < TILE; t++) {
                row[t] = t <= last && t >= oldest ? row[t] : -INFINITY;
                top = row[t] > top ? row[t] : top;
            }
            if (top == -INFINITY) { /* nothing of this tile is seen: it lies behind the window, or before the query */
                for (int64_t t = 0; t < TILE; t++) scores[r][t] = 0;
                continue;
            }
            float shrink = most[r] == -INFINITY ? 0.0f : exp_nonpositive(most[r] - top), added = 0;
            for (int64_t t = 0; t < TILE; t++) {
                float e = exp_nonpositive(row[t] - top);
                scores[r][t] = e, added += e;
            }
            mass[r] = mass[r] * shrink + added;
            most[r] = top;
            for (int64_t d = 0; d < dim; d++) sum[r][d] *= shrink;
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t t = 0; t < count; t++) {
                float p = scores[r][t];
                for (int64_t d = 0; d < dim; d++) sum[r][d] += p * values[t * dim + d];
            }
    }
    for (int64_t r = 0; r < rows; r++) {
        REAL *to = out + ((r / group) * q_heads + head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = STORE(sum[r][d] / mass[r]);
    }
}

/* A piece of work: `item` holds sequence, first token of the step, queries, position of the first query. */
void NAME(paged_attention)(const REAL *q, const REAL *k_cache, const REAL *v_cache, const int32_t *tables,
                           int64_t table_width, const int64_t *items, int64_t count, int64_t window, float scale,
                           REAL *out, int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t block_size) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t job = 0; job < count * kv_heads; job++) {
        const int64_t *item = items + (job / kv_heads) * 4;
        int64_t head = job % kv_heads, offset = item[1] * q_heads * dim;
        const int32_t *table = tables + item[0] * table_width;
        /* the usual sizes as constants: the compiler then keeps rows in registers */
#define CALL(size) \
    NAME(attend)(q + offset, k_cache, v_cache, table, out + offset, item[2], item[3], window, scale, q_heads, \
                 kv_heads, head, size, block_size)
        if (dim == 64)
            CALL(64);
        else if (dim == 128)
            CALL(128);
        else
            CALL(dim);
#undef CALL
    }
}

#endif
