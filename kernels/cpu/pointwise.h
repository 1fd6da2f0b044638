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
            squares[c] = fused(v, v, squares[c]);
        }
    for (; i + LANES <= width; i += LANES) {
        vf v = NAME(add_lanes)(x + i, other ? other + i : NULL, total + i);
        squares[0] = fused(v, v, squares[0]);
    }
    for (; i < width; i++) {
        REAL v = other ? STORE(LOAD(x[i]) + LOAD(other[i])) : x[i];
        if (other) total[i] = v;
        rest = fused_one(LOAD(v), LOAD(v), rest);
    }
    for (int c = 1; c < COLUMNS; c++) squares[0] += squares[c];
    return lane_sum(squares[0]) + rest;
}

/* y = weight * round(x / rms(x)) for one row of values that were rounded already; with an offset,
 * (offset + weight) * x / rms(x). y may be x. */
INLINE void NAME(norm_row)(const REAL *x, const REAL *weight, REAL *y, int64_t width, float squares, float eps,
                           float offset) {
    float scale = 1.0f / sqrtf(squares / width + eps);
    int64_t i = 0;
    if (offset != 0) {
        for (; i + LANES <= width; i += LANES) STOREV(y + i, LOADV(x + i) * scale * (offset + LOADV(weight + i)));
        for (; i < width; i++) y[i] = STORE(LOAD(x[i]) * scale * (offset + LOAD(weight[i])));
        return;
    }
    for (; i + LANES <= width; i += LANES) STOREV(y + i, LOADV(weight + i) * ROUNDV(LOADV(x + i) * scale));
    for (; i < width; i++) y[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(x[i]) * scale)));
}

/* total = x + residual; y as `norm_row` makes it of total. residual may be NULL: then total is x. */
TEAM void NAME(team_rms_norm)(const REAL *x, const REAL *residual, const REAL *weight, REAL *y, REAL *total,
                              int64_t rows, int64_t width, float eps, float offset) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * width;
        if (residual) {
            float squares = NAME(add_row)(x + at, residual + at, total + at, width);
            NAME(norm_row)(total + at, weight, y + at, width, squares, eps, offset);
        } else {
            NAME(norm_row)(x + at, weight, y + at, width, NAME(add_row)(x + at, NULL, NULL, width), eps, offset);
        }
    }
}

void NAME(rms_norm)(const REAL *x, const REAL *residual, const REAL *weight, REAL *y, REAL *total, int64_t rows,
                    int64_t width, float eps, float offset) {
#pragma omp parallel
    NAME(team_rms_norm)(x, residual, weight, y, total, rows, width, eps, offset);
}

/* y = gate_factor(gate) * up_factor(up); gate_up: (rows, 2 * width) */
void NAME(gate)(const REAL *gate_up, REAL *y, int64_t rows, int64_t width, int64_t kind) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const REAL *gate = gate_up + row * 2 * width, *up = gate + width;
        REAL *out = y + row * width, some[LANES] = {0}, others[LANES] = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t count = width - i < LANES ? width - i : LANES;
            memcpy(some, gate + i, count * sizeof(REAL));
            memcpy(others, up + i, count * sizeof(REAL));
            STOREV(some, ROUNDV(gate_factor(LOADV(some), kind)) * ROUNDV(up_factor(LOADV(others), kind)));
            memcpy(out + i, some, count * sizeof(REAL));
        }
    }
}

/* y = the gate's factor of that kind, of (rows, width) values that have no up */
void NAME(activate)(const REAL *x, REAL *y, int64_t rows, int64_t width, int64_t kind) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        REAL some[LANES] = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t at = row * width + i, count = width - i < LANES ? width - i : LANES;
            memcpy(some, x + at, count * sizeof(REAL));
            STOREV(some, gate_factor(LOADV(some), kind));
            memcpy(y + at, some, count * sizeof(REAL));
        }
    }
}

/* How heads are normed and rotated. */
typedef struct {
    const float *cosine, *sine; /* (max positions, pairs) */
    int64_t pairs, interleaved; /* a pair is (i, i + pairs), or (2i, 2i + 1) */
    const REAL *q_norm, *k_norm; /* NULL: no norm */
    float eps, offset;
} NAME(Rotation);

INLINE void NAME(rotate_adjacent)(const REAL *head, const float *cosine, const float *sine, REAL *out, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i++) {
        float a = LOAD(head[2 * i]), b = LOAD(head[2 * i + 1]);
        out[2 * i] = STORE(fused_one(a, cosine[i], -(b * sine[i])));
        out[2 * i + 1] = STORE(fused_one(b, cosine[i], a * sine[i]));
    }
}

INLINE void NAME(rotate_halves)(const REAL *head, const float *cosine, const float *sine, REAL *out, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = LOADV(head + i), b = LOADV(head + i + half), c = load_f32(cosine + i), s = load_f32(sine + i);
        STOREV(out + i, fused(a, c, -(b * s)));
        STOREV(out + i + half, fused(b, c, a * s));
    }
    for (; i < half; i++) {
        float a = LOAD(head[i]), b = LOAD(head[i + half]);
        out[i] = STORE(fused_one(a, cosine[i], -(b * sine[i])));
        out[i + half] = STORE(fused_one(b, cosine[i], a * sine[i]));
    }
}

/* One head at a position: optional RMSNorm, then the rotation of its first 2 * pairs values. */
INLINE void NAME(rotate)(const NAME(Rotation) *by, const REAL *head, const REAL *norm, int64_t position, REAL *out,
                         int64_t dim) {
    REAL normed[MAX_DIM];
    const float *cosine = by->cosine + position * by->pairs, *sine = by->sine + position * by->pairs;
    int64_t turned = 2 * by->pairs;
    if (norm) {
        NAME(norm_row)(head, norm, normed, dim, NAME(add_row)(head, NULL, NULL, dim), by->eps, by->offset);
        head = normed;
    }
    if (by->interleaved)
        NAME(rotate_adjacent)(head, cosine, sine, out, by->pairs);
    else
        NAME(rotate_halves)(head, cosine, sine, out, by->pairs);
    if (turned < dim) memcpy(out + turned, head + turned, (dim - turned) * sizeof(REAL));
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

/* Heads of a step's tokens, as their linear layer leaves them, and where they go. Without kv_heads q alone is rotated,
 * and k, v, slots and caches are NULL. */
typedef struct {
    const REAL *q, *k, *v; /* (tokens, heads, dim), tokens `stride` values apart */
    int64_t stride;
    const int64_t *positions, *slots; /* a slot: block * block_size + place */
    REAL *k_cache, *v_cache, *q_out;  /* q_out: (tokens, q_heads, dim) */
    NAME(Rotation) rotation;
    int64_t tokens, q_heads, kv_heads, dim, dim_pad, block_size, block_pad;
} NAME(Heads);

/* K and V of token t into the cache; lines of a token to come are fetched. */
INLINE void NAME(store_heads)(const NAME(Heads) *a, int64_t t) {
    int64_t block = a->slots[t] / a->block_size, place = a->slots[t] % a->block_size, size = a->block_pad * a->dim_pad;
    int64_t later = t + AHEAD < a->tokens ? t + AHEAD : t, coming = a->slots[later];
    int fetched = later > t && coming / LANES == a->slots[later - 1] / LANES; /* by the token before it */
    for (int64_t h = 0; h < a->kv_heads; h++) {
        int64_t at = (block * a->kv_heads + h) * size, there = (coming / a->block_size * a->kv_heads + h) * size;
        REAL rotated[MAX_DIM];
        if (!fetched)
            NAME(fetch_token)(a->k_cache + there, a->v_cache + there, coming % a->block_size, a->dim, a->dim_pad,
                              a->block_pad);
        NAME(rotate)(&a->rotation, a->k + t * a->stride + h * a->dim, a->rotation.k_norm, a->positions[t], rotated, a->dim);
        NAME(store_token)(rotated, a->v + t * a->stride + h * a->dim, a->k_cache + at, a->v_cache + at, place, a->dim,
                          a->dim_pad, a->block_pad);
    }
}

TEAM void NAME(team_rope_store)(const NAME(Heads) *a) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a->tokens; t++) {
        for (int64_t h = 0; h < a->q_heads; h++)
            NAME(rotate)(&a->rotation, a->q + t * a->stride + h * a->dim, a->rotation.q_norm, a->positions[t],
                         a->q_out + (t * a->q_heads + h) * a->dim, a->dim);
        if (a->kv_heads) NAME(store_heads)(a, t);
    }
}

void NAME(rope_store)(const NAME(Heads) *heads) {
#pragma omp parallel
    NAME(team_rope_store)(heads);
}
