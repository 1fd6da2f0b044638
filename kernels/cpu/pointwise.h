/* Norm, gate, rotation and KV write; included once a dtype. A bfloat16 value is rounded wherever the torch reference
 * rounds it. */

/* y = weight * round(x / rms(x)) for one row of float values that were rounded already. */
INLINE void NAME(norm_row)(const REAL *x, const REAL *weight, REAL *y, int64_t width, float eps) {
    vf squares = splat(0.0f);
    float rest = 0;
    int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) squares += LOADV(x + i) * LOADV(x + i);
    for (int64_t i = whole; i < width; i++) rest += LOAD(x[i]) * LOAD(x[i]);
    float scale = 1.0f / sqrtf((lane_sum(squares) + rest) / width + eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        REAL rounded[LANES];
        STOREV(rounded, LOADV(x + i) * scale);
        STOREV(y + i, LOADV(weight + i) * LOADV(rounded));
    }
    for (int64_t i = whole; i < width; i++) y[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(x[i]) * scale)));
}

/* total = x + residual; y = weight * round(total / rms(total)). residual may be NULL: then total is x. */
void NAME(rms_norm)(const REAL *x, const REAL *residual, const REAL *weight, REAL *y, REAL *total, int64_t rows,
                    int64_t width, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *from = x + row * width;
        if (residual) {
            const REAL *other = residual + row * width;
            REAL *to = total + row * width;
            int64_t i = 0;
            for (; i + LANES <= width; i += LANES) STOREV(to + i, LOADV(from + i) + LOADV(other + i));
            for (; i < width; i++) to[i] = STORE(LOAD(from[i]) + LOAD(other[i]));
            from = to;
        }
        NAME(norm_row)(from, weight, y + row * width, width, eps);
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
    int64_t half = dim / 2;
    if (norm) NAME(norm_row)(head, norm, normed, dim, eps), head = normed;
    for (int64_t i = 0; i < half; i++) {
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

/* q, k, v are heads within rows of `stride` values; cosine, sine: (max positions, dim / 2).
 * Rotated q goes to q_out (tokens, q_heads, dim), k and v to the caches at slots (block * block_size + place). */
void NAME(rope_store)(const REAL *q, const REAL *k, const REAL *v, int64_t stride, const float *cosine,
                      const float *sine, const int64_t *positions, const int64_t *slots, REAL *k_cache, REAL *v_cache,
                      REAL *q_out, const REAL *q_norm, const REAL *k_norm, float eps, int64_t tokens, int64_t q_heads,
                      int64_t kv_heads, int64_t dim, int64_t dim_pad, int64_t block_size, int64_t block_pad) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        int64_t next = t + 1 < tokens ? slots[t + 1] : slots[t];
        int64_t there = next / block_size * kv_heads * block_pad * dim_pad, inside = next % block_size;
        const REAL *next_k = k_cache + there + inside * PAIR, *next_v = v_cache + there + inside / PAIR * dim_pad * PAIR;
        const float *c = cosine + positions[t] * (dim / 2), *s = sine + positions[t] * (dim / 2);
        for (int64_t h = 0; h < q_heads; h++)
            NAME(rotate)(q + t * stride + h * dim, q_norm, c, s, q_out + (t * q_heads + h) * dim, dim, eps);
        int64_t block = slots[t] / block_size, place = slots[t] % block_size;
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t at = (block * kv_heads + h) * block_pad * dim_pad;
            REAL rotated[MAX_DIM];
            for (int64_t w = 0; w < dim / PAIR; w++) /* each word of K lies in a line of its own */
                __builtin_prefetch(next_k + h * block_pad * dim_pad + w * block_pad * PAIR, 1);
            for (int64_t d = 0; d < dim * PAIR; d += LINE / (int64_t)sizeof(REAL))
                __builtin_prefetch(next_v + h * block_pad * dim_pad + d, 1);
            NAME(rotate)(k + t * stride + h * dim, k_norm, c, s, rotated, dim, eps);
            NAME(store_token)(rotated, v + t * stride + h * dim, k_cache + at, v_cache + at, place, dim, dim_pad, block_pad);
        }
    }
}

