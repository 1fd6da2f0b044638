/* Scores and weighted sums of a quantised cache in integers, for bfloat16 without matrix tiles; included by
 * attention.h.
 *
 * Cached values are widened to 16-bit integers by one instruction. A query, and the weights of a row's tile, are
 * converted to 16-bit integers with 32767 as the largest magnitude: finer than the 8 bits of bfloat16, except for
 * values below 1/128 of the largest. Sums cannot overflow, because 32767 * 128 * MAX_DIM is less than 2^31, so they are
 * exact in any order.
 */

/* Converts whole vectors of values to integers and returns their scale, which is NaN or infinite if a value is not
 * finite. */
INLINE float NAME(to_fixed)(const float *from, int64_t count, int16_t *to) {
    vi tops = splat_word(0);
    for (int64_t i = 0; i < count; i += LANES) tops = larger_word(tops, (vi)load_f32(from + i) & 0x7fffffff);
    int32_t bits = largest_word(tops); /* without a sign, the bits of floats sort like the numbers */
    float most, inverse;
    memcpy(&most, &bits, 4);
    inverse = most > 0 && most < INFINITY ? 32767.0f / most : 0.0f;
    if (!(inverse < INFINITY)) inverse = 0.0f; /* magnitudes below 1e-34 */
    for (int64_t i = 0; i < count; i += LANES) {
        /* adding 1.5 * 2^23 rounds to nearest, ties to even; the lower half of the bits is the integer */
        vf value = inverse > 0 ? load_f32(from + i) : splat(0.0f);
        store_halves((uint16_t *)to + i, (vi)fused(value, splat(inverse), splat(12582912.0f)));
    }
    return most < INFINITY ? most * (1.0f / 32767.0f) : NAN;
}

ONCE void NAME(fix_query)(const REAL *q, int64_t dim, int64_t dim_pad, int16_t *to, float *unit) {
    float values[MAX_DIM];
    for (int64_t d = 0; d < dim; d++) values[d] = LOAD(q[d]);
    for (int64_t d = dim; d < dim_pad; d++) values[d] = 0.0f;
    *unit = NAME(to_fixed)(values, dim_pad, to);
}

/* As without quantisation; the scales of keys are applied later. */
INLINE void NAME(score)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, const NAME(Work) *work,
                        int64_t first, vf scores[ROWS][COLUMNS], int64_t dim, const int rows, const int fetch) {
    int64_t stride = s->block_pad * PAIR, run = (dim / PAIR + COLUMNS - 1) / COLUMNS;
    const int two_a_line = stride == LINE / 2;
    const int16_t *q = work->fixed_q + first * s->dim_pad;
    vi sums[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = splat_word(0);
    for (int64_t w = 0; w < dim / PAIR; w++)
        for (int c = 0; c < COLUMNS; c++) {
            vi keys = halves_of_bytes((const int8_t *)tile->k[c] + w * stride);
            if (fetch && !(two_a_line && c % 2))
                __builtin_prefetch((const int8_t *)ahead->k[w / run] + (w % run * COLUMNS + c) * stride, 0, TO_L2);
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, q + r * s->dim_pad + w * PAIR, 4);
                sums[r][c] = dot_int16(sums[r][c], splat_word(word), keys);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++)
            scores[r][c] = __builtin_convertvector(sums[r][c], vf) * work->q_unit[first + r];
}

/* Computes sum = sum * shrink + p V as without quantisation. A slot that is not needed has weight 0 and may hold any
 * value. */
INLINE void NAME(add_values)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Work) *work,
                             int64_t first, const float *shrink, int64_t from, const int rows, const int columns,
                             const int fetch) {
    int64_t stride = s->dim_pad * PAIR;
    float *sum = work->sum + first * s->dim_pad + from;
    vi found[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) found[r][c] = splat_word(0);
    for (int u = 0; u < COLUMNS; u++) {
        const int8_t *values = (const int8_t *)tile->v[u] + from * PAIR, *coming = (const int8_t *)ahead->v[u] + from * PAIR;
        int64_t words = (tile->needed[u] + PAIR - 1) / PAIR, all = (ahead->needed[u] + PAIR - 1) / PAIR;
        for (int64_t w = 0; w < words; w++, values += stride, coming += stride)
            for (int c = 0; c < columns; c++) {
                vi value = halves_of_bytes(values + c * LANES * PAIR);
                if (fetch && c * LANES * PAIR % LINE == 0) __builtin_prefetch(coming + c * LANES * PAIR, 0, TO_L2);
                for (int r = 0; r < rows; r++) {
                    int32_t word;
                    memcpy(&word, work->fixed_p[r] + u * LANES + w * PAIR, 4);
                    found[r][c] = dot_int16(found[r][c], splat_word(word), value);
                }
            }
        for (int64_t w = words; fetch && w < all; w++, coming += stride)
            for (int i = 0; i < columns * LANES * PAIR; i += LINE) __builtin_prefetch(coming + i, 0, TO_L2);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float *to = sum + r * s->dim_pad + c * LANES;
            vf added = __builtin_convertvector(found[r][c], vf);
            store_f32(to, fused(added, splat(work->p_unit[r]), load_f32(to) * shrink[r]));
        }
}
