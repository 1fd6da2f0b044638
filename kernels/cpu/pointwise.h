/* Norm, gate, rotation and KV write; included once a dtype. A bfloat16 value is rounded wherever the torch reference
 * rounds it. */

/* v = x + other, which `total` receives; without `other`, x. */
INLINE vf NAME(add_lanes)(const REAL *x, const REAL *other, REAL *total) {
    if (!other) return LOADV(x);
    vf v = ROUNDV(LOADV(x) + LOADV(other));
    STOREV(total, v);
    return v;
}

/* The sum of the squares of x + other, which `total` receives; without `other`, of x. */
INLINE float NAME(add_row)(const REAL *x, const REAL *other, REAL *total, int64_t width) {
    vf squares[COLUMNS]; /* several, so that additions need not wait for one another */
    float rest = 0;
    int64_t i = 0;
    for (int c = 0; c < COLUMNS; c++) squares[c] = splat(0.0f);
    for (; i + PANEL <= width; i += PANEL)
        for (int c = 0; c < COLUMNS; c++) {
            int64_t at = i + c * LANES;
            vf v = NAME(add_lanes)(x + at, other ? other + at : NULL, total + at);
            squares[c] += v * v;
        }
    for (; i + LANES <= width; i += LANES) {
        vf v = NAME(add_lanes)(x + i, other ? other + i : NULL, total + i);
        squares[0] += v * v;
    }
    for (; i < width; i++) {
        REAL v = other ? STORE(LOAD(x[i]) + LOAD(other[i])) : x[i];
        if (other) total[i] = v;
        rest += LOAD(v) * LOAD(v);
    }
    for (int c = 1; c < COLUMNS; c++) squares[0] += squares[c];
    return lane_sum(squares[0]) + rest;
}

/* y = weight * round(x / rms(x)) for one row of values that were rounded already. */
INLINE void NAME(norm_row)(const REAL *x, const REAL *weight, REAL *y, int64_t width, float squares, float eps) {
    float scale = 1.0f / sqrtf(squares / width + eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) STOREV(y + i, LOADV(weight + i) * ROUNDV(LOADV(x + i) * scale));
    for (; i < width; i++) y[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(x[i]) * scale)));
}

/* total = x + residual; y = weight * round(total / rms(total)). residual may be NULL: then total is x. */
void NAME(rms_norm)(const REAL *x, const REAL *residual, const REAL *weight, REAL *y, REAL *total, int64_t rows,
                    int64_t width, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * width;
        if (residual) {
            float squares = NAME(add_row)(x + at, residual + at, total + at, width);
            NAME(norm_row)(total + at, weight, y + at, width, squares, eps);
        } else {
            NAME(norm_row)(x + at, weight, y + at, width, NAME(add_row)(x + at, NULL, NULL, width), eps);
        }
    }
}

/* y = silu(gate) * up, gate_up: (rows, 2 * width) */
void NAME(silu_gate)(const REAL *gate_up, REAL *y, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *gate = gate_up + row * 2 * width, *up = gate + width;
        REAL *out = y + row * width, some[LANES] = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t count = width - i < LANES ? width - i : LANES;
            memcpy(some, gate + i, count * sizeof(REAL));
            STOREV(some, silu(LOADV(some)));
            for (int64_t j = 0; j < count; j++) out[i + j] = STORE(LOAD(some[j]) * LOAD(up[i + j]));
        }
    }
}

/* One head: optional RMSNorm, then the rotation of its halves. */
INLINE void NAME(rotate)(const REAL *head, const REAL *norm, const float *cosine, const float *sine, REAL *out,
                         int64_t dim, float eps) {
    REAL normed[MAX_DIM];
    int64_t half = dim / 2, i = 0;
    if (norm) {
        NAME(norm_row)(head, norm, normed, dim, NAME(add_row)(head, NULL, NULL, dim), eps);
        head = normed;
    }
    for (; i + LANES <= half; i += LANES) {
        vf a = LOADV(head + i), b = LOADV(head + i + half), c = load_f32(cosine + i), s = load_f32(sine + i);
        STOREV(out + i, a * c - b * s);
        STOREV(out + i + half, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = LOAD(head[i]), b = LOAD(head[i + half]);
        out[i] = STORE(a * cosine[i] - b * sine[i]);
        out[i + half] = STORE(b * cosine[i] + a * sine[i]);
    }
}

/* K and V of one token and head into a block of the cache, laid out as attention.h says. */
INLINE void NAME(store_token)(const REAL *k, const REAL *v, REAL *k_block, REAL *v_block, int64_t place, int64_t dim,
                        int64_t dim_pad, int64_t block_pad) {
    REAL *to = v_block + place / PAIR * dim_pad * PAIR + place % PAIR;
    for (int64_t w = 0; w < dim / PAIR; w++) memcpy(k_block + (w * block_pad + place) * PAIR, k + w * PAIR, 4);
    for (int64_t d = 0; d < dim; d++) to[d * PAIR] = v[d];
}

/* Fetches the lines that `store_token` will write for one head: each word of K lies in a line of its own. */
INLINE void NAME(fetch_token)(const REAL *k_block, const REAL *v_block, int64_t place, int64_t dim, int64_t dim_pad,
                              int64_t block_pad) {
    const REAL *v = v_block + place / PAIR * dim_pad * PAIR;
    for (int64_t w = 0; w < dim / PAIR; w++) __builtin_prefetch(k_block + (w * block_pad + place) * PAIR, 0, TO_L2);
    for (int64_t d = 0; d < dim * PAIR; d += LINE / (int64_t)sizeof(REAL)) __builtin_prefetch(v + d, 0, TO_L2);
}

/* q, k, v are heads within rows of `stride` values; cosine, sine: (max positions, dim / 2).
 * Rotated q goes to q_out (tokens, q_heads, dim), k and v to the caches at slots (block * block_size + place). */
void NAME(rope_store)(const REAL *q, const REAL *k, const REAL *v, int64_t stride, const float *cosine,
                      const float *sine, const int64_t *positions, const int64_t *slots, REAL *k_cache, REAL *v_cache,
                      REAL *q_out, const REAL *q_norm, const REAL *k_norm, float eps, int64_t tokens, int64_t q_heads,
                      int64_t kv_heads, int64_t dim, int64_t dim_pad, int64_t block_size, int64_t block_pad) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosine + positions[t] * (dim / 2), *s = sine + positions[t] * (dim / 2);
        for (int64_t h = 0; h < q_heads; h++)
            NAME(rotate)(q + t * stride + h * dim, q_norm, c, s, q_out + (t * q_heads + h) * dim, dim, eps);
        int64_t block = slots[t] / block_size, place = slots[t] % block_size;
        int64_t coming = slots[t + AHEAD < tokens ? t + AHEAD : t], before = slots[t + AHEAD < tokens ? t + AHEAD - 1 : t];
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t at = (block * kv_heads + h) * block_pad * dim_pad;
            int64_t there = (coming / block_size * kv_heads + h) * block_pad * dim_pad;
            REAL rotated[MAX_DIM];
            if (coming / LANES != before / LANES) /* else the token before it has fetched those lines */
                NAME(fetch_token)(k_cache + there, v_cache + there, coming % block_size, dim, dim_pad, block_pad);
            NAME(rotate)(k + t * stride + h * dim, k_norm, c, s, rotated, dim, eps);
            NAME(store_token)(rotated, v + t * stride + h * dim, k_cache + at, v_cache + at, place, dim, dim_pad, block_pad);
        }
    }
}

