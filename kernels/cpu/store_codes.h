/* Writes K and V to a quantised cache; included once per dtype, by pointwise.h. Each token and head has its own scale,
 * with the largest magnitude at 127. Values have the layout of the other cache, with PAIR of them in place of a word. */

/* Quantises one head and returns its scale, which is not finite if a value is not. `head` is padded with zeros to a
 * whole vector, and `codes` has the same size. */
INLINE float NAME(head_codes)(const REAL *head, int64_t dim, int8_t *codes) {
    vi tops = splat_word(0);
    for (int64_t d = 0; d < dim; d += LANES) tops = larger_word(tops, (vi)LOADV(head + d) & 0x7fffffff);
    int32_t bits = largest_word(tops); /* without a sign, the bits of floats sort like the numbers */
    float most, inverse;
    memcpy(&most, &bits, 4);
    inverse = most > 0 && most < INFINITY ? 127.0f / most : 0.0f;
    if (!(inverse < INFINITY)) inverse = 0.0f; /* magnitudes below 4e-37 */
    for (int64_t d = 0; d < dim; d += LANES) {
        /* adding 1.5 * 2^23 rounds to nearest, ties to even; the lowest byte is the value */
        vf value = inverse > 0 ? LOADV(head + d) : splat(0.0f);
        store_bytes((uint8_t *)codes + d, (vi)fused(value, splat(inverse), splat(12582912.0f)));
    }
    return most < INFINITY ? most / 127.0f : NAN;
}

INLINE void NAME(store_codes)(const int8_t *k, const int8_t *v, int8_t *k_block, int8_t *v_block, int64_t place,
                              int64_t dim, int64_t dim_pad, int64_t block_pad) {
    int8_t *keys = k_block + place * PAIR, *values = v_block + place / PAIR * dim_pad * PAIR + place % PAIR;
    for (int64_t w = 0; w < dim / PAIR; w++) memcpy(keys + w * block_pad * PAIR, k + w * PAIR, PAIR);
    for (int64_t d = 0; d < dim; d++) values[d * PAIR] = v[d];
}

/* Stores K, rotated, and V of `count` tokens from t on in one block, within a segment that ends before `end`. */
INLINE void NAME(store_run)(const NAME(Heads) *a, int64_t t, int64_t count, int64_t end) {
    int64_t block = a->slots[t] / a->block_size, place = a->slots[t] % a->block_size, dim = a->dim;
    REAL head[MAX_DIM + LANES];
    int8_t codes[2][MAX_DIM];
    memset(head + dim, 0, LANES * sizeof *head);
    for (int64_t h = 0; h < a->kv_heads; h++)
        for (int64_t i = 0; i < count; i++) {
            const REAL *k = a->k + (t + i) * a->stride + h * dim, *v = a->v + (t + i) * a->stride + h * dim;
            int64_t of_head = block * a->kv_heads + h, at = of_head * a->block_pad * a->dim_pad;
            int64_t token = of_head * a->block_pad + place + i;
            if (t + i + AHEAD < end) NAME(fetch_place)(a, t + i + AHEAD, h);
            NAME(rotate)(&a->rotation, k, a->rotation.k_norm, a->positions[t + i], head, dim);
            a->cache.k_scale[token] = NAME(head_codes)(head, dim, codes[0]);
            memcpy(head, v, dim * sizeof *head);
            a->cache.v_scale[token] = NAME(head_codes)(head, dim, codes[1]);
            NAME(store_codes)(codes[0], codes[1], (int8_t *)a->cache.k + at, (int8_t *)a->cache.v + at, place + i, dim,
                              a->dim_pad, a->block_pad);
        }
}
