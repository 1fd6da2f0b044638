/* Copies of the beginnings of blocks of the cache, which lie as attention.h says; included once a dtype. Semantics are
 * those of copy_parts.py. */

typedef struct {
    const int64_t *fields; /* of each part: the block read, the one written, and the places [first, end) */
    int64_t count;
} NAME(Parts);

INLINE void NAME(copy_part)(const REAL *k_from, REAL *k_to, const REAL *v_from, REAL *v_to, int64_t first, int64_t end,
                            int64_t dim_pad, int64_t block_pad) {
    for (int64_t w = 0; w < dim_pad / PAIR; w++) {
        int64_t at = (w * block_pad + first) * PAIR;
        memcpy(k_to + at, k_from + at, (end - first) * 4);
    }
    for (int64_t place = first; place < end;) {
        int64_t row = place / PAIR * dim_pad * PAIR;
        if (place % PAIR == 0 && place + PAIR <= end) {
            memcpy(v_to + row, v_from + row, dim_pad * PAIR * sizeof(REAL));
            place += PAIR;
        } else { /* the other token of the word is not this part's */
            row += place++ % PAIR;
            for (int64_t d = 0; d < dim_pad; d++) v_to[row + d * PAIR] = v_from[row + d * PAIR];
        }
    }
}

TEAM void NAME(team_copy_parts)(const NAME(Parts) *parts, REAL *k_cache, REAL *v_cache, int64_t kv_heads,
                                int64_t dim_pad, int64_t block_pad) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < parts->count * kv_heads; i++) {
        const int64_t *part = parts->fields + i / kv_heads * 4;
        int64_t from = (part[0] * kv_heads + i % kv_heads) * block_pad * dim_pad;
        int64_t to = (part[1] * kv_heads + i % kv_heads) * block_pad * dim_pad;
        NAME(copy_part)(k_cache + from, k_cache + to, v_cache + from, v_cache + to, part[2], part[3], dim_pad, block_pad);
    }
}

void NAME(copy_parts)(const NAME(Parts) *parts, REAL *k_cache, REAL *v_cache, int64_t kv_heads,
                      int64_t dim_pad, int64_t block_pad) {
#pragma omp parallel
    NAME(team_copy_parts)(parts, k_cache, v_cache, kv_heads, dim_pad, block_pad);
}
