/* Widens the values of a tile of a quantised cache to the dtype of products; included once per dtype, by attention.h.
 *
 * Each value is widened without its scale, which is exact in either dtype. The scale of a key multiplies its scores,
 * the scale of a value the weight that it gets: the lanes of a vector are tokens, and so are adjacent scales. All rows
 * of an item then read the widened tile as one of a cache that is not quantised.
 */

typedef struct {
    vi k[MAX_DIM / PAIR * COLUMNS];          /* by word, each for all slots of the tile */
    int32_t v[PANEL / PAIR * MAX_DIM];       /* words of PAIR tokens, rows of dim_pad */
} NAME(Widened);

/* Widens PAIR * LANES values to LANES words. */
INLINE vi NAME(widen)(const int8_t *from) {
#if LANES == 16 && PAIR == 1
    return (vi)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif PAIR == 1
    typedef int8_t vc __attribute__((vector_size(LANES), aligned(1), may_alias));
    return (vi)__builtin_convertvector(*(const vc *)from, vf);
#elif LANES == 16 && defined(__AVX512BF16__)
    __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + LANES))));
    return (vi)_mm512_cvtne2ps_pbh(second, first);
#else
    vi words = halves_of_bytes(from);
    /* the lower halves of floats with 8 significant bits are 0 */
    vi low = (vi)__builtin_convertvector((words << 16) >> 16, vf), high = (vi)__builtin_convertvector(words >> 16, vf);
    return ((low >> 16) & 0xffff) | high;
#endif
}

/* Widens K of the tile, and prefetches K of the next tile. Slots that are not needed are skipped. */
INLINE void NAME(widen_keys)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, int64_t dim,
                             NAME(Widened) *found) {
    for (int c = 0; c < COLUMNS; c++) {
        const int8_t *from = (const int8_t *)tile->k[c], *coming = (const int8_t *)ahead->k[c];
        for (int64_t w = 0, stride = s->block_pad * PAIR; w < dim / PAIR; w++) {
            if (ahead->needed[c]) __builtin_prefetch(coming + w * stride, 0, TO_L2);
            if (tile->needed[c]) found->k[w * COLUMNS + c] = NAME(widen)(from + w * stride);
        }
    }
}

INLINE void NAME(widen_values)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead,
                               NAME(Widened) *found) {
    for (int c = 0; c < COLUMNS; c++) {
        const int8_t *from = (const int8_t *)tile->v[c], *coming = (const int8_t *)ahead->v[c];
        vi *to = (vi *)(found->v + c * (LANES / PAIR) * s->dim_pad);
        int64_t end = (tile->needed[c] + PAIR - 1) / PAIR * s->dim_pad, fetched = ahead->needed[c] * s->dim_pad;
        for (int64_t i = 0; i < end; i += LANES) *to++ = NAME(widen)(from + i * PAIR);
        for (int64_t i = 0; i < fetched; i += LINE) __builtin_prefetch(coming + i, 0, TO_L2);
    }
}

/* Widens the tile, and makes `tile` point to the result. */
INLINE void NAME(widen_tile)(const NAME(Attention) *s, NAME(Tile) *tile, const NAME(Tile) *ahead, int64_t dim,
                             NAME(Widened) *found) {
    NAME(widen_keys)(s, tile, ahead, dim, found);
    NAME(widen_values)(s, tile, ahead, found);
    for (int c = 0; c < COLUMNS; c++)
        tile->k[c] = found->k + c, tile->v[c] = (const vi *)(found->v + c * (LANES / PAIR) * s->dim_pad);
}
