/* Copies of parts of cache blocks, in the layout of attention.h; included once per dtype. The semantics are defined in
 * copy_parts.py. */

typedef struct {
    const int64_t *fields; /* of each part: source block, target block, and the slots [first, end) */
    int64_t count;
} NAME(Parts);

INLINE void NAME(copy_part)(const KEPT *k_from, KEPT *k_to, const KEPT *v_from, KEPT *v_to, int64_t first, int64_t end,
                            int64_t dim_pad, int64_t block_pad) {
    for (int64_t w = 0; w < dim_pad / PAIR; w++) {
        int64_t at = (w * block_pad + first) * PAIR;
        memcpy(k_to + at, k_from + at, (end - first) * PAIR * sizeof(KEPT));
    }
    for (int64_t place = first; place < end;) {
        int64_t row = place / PAIR * dim_pad * PAIR;
        if (place % PAIR == 0 && place + PAIR <= end) {
            memcpy(v_to + row, v_from + row, dim_pad * PAIR * sizeof(KEPT));
            place += PAIR;
        } else { /* the other token of the word does not belong to this part */
            row += place++ % PAIR;
            for (int64_t d = 0; d < dim_pad; d++) v_to[row + d * PAIR] = v_from[row + d * PAIR];
        }
    }
}

/* Copies K and V of one slot and head to a slot of another block. */
INLINE void NAME(move_place)(const KEPT *k_from, KEPT *k_to, const KEPT *v_from, KEPT *v_to, int64_t from, int64_t to,
                             int64_t dim_pad, int64_t block_pad) {
    for (int64_t w = 0; w < dim_pad / PAIR; w++)
        memcpy(k_to + (w * block_pad + to) * PAIR, k_from + (w * block_pad + from) * PAIR, PAIR * sizeof(KEPT));
    v_from += from / PAIR * dim_pad * PAIR + from % PAIR, v_to += to / PAIR * dim_pad * PAIR + to % PAIR;
    for (int64_t d = 0; d < dim_pad; d++) v_to[d * PAIR] = v_from[d * PAIR];
}

/* moves: (count, 2) source and target slots; the moves of a head run in order. */
void NAME(move_slots)(const int64_t *moves, int64_t count, const Cache *cache, int64_t kv_heads, int64_t dim_pad,
                      int64_t block_size, int64_t block_pad) {
    KEPT *k = cache->k, *v = cache->v;
    for (int64_t head = 0; head < kv_heads; head++)
        for (const int64_t *move = moves; move < moves + 2 * count; move += 2) {
            int64_t from = (move[0] / block_size * kv_heads + head) * block_pad, at = move[0] % block_size;
            int64_t to = (move[1] / block_size * kv_heads + head) * block_pad, place = move[1] % block_size;
            NAME(move_place)(k + from * dim_pad, k + to * dim_pad, v + from * dim_pad, v + to * dim_pad, at, place,
                             dim_pad, block_pad);
            if (!cache->k_scale) continue;
            cache->k_scale[to + place] = cache->k_scale[from + at];
            cache->v_scale[to + place] = cache->v_scale[from + at];
        }
}

TEAM void NAME(team_copy_parts)(const NAME(Parts) *parts, const Cache *cache, int64_t kv_heads, int64_t dim_pad,
                                int64_t block_pad) {
    KEPT *k = cache->k, *v = cache->v;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < parts->count * kv_heads; i++) {
        const int64_t *part = parts->fields + i / kv_heads * 4;
        int64_t from = (part[0] * kv_heads + i % kv_heads) * block_pad, to = (part[1] * kv_heads + i % kv_heads) * block_pad;
        NAME(copy_part)(k + from * dim_pad, k + to * dim_pad, v + from * dim_pad, v + to * dim_pad, part[2], part[3],
                        dim_pad, block_pad);
        for (int64_t place = part[2]; cache->k_scale && place < part[3]; place++) {
            cache->k_scale[to + place] = cache->k_scale[from + place];
            cache->v_scale[to + place] = cache->v_scale[from + place];
        }
    }
}

void NAME(copy_parts)(const NAME(Parts) *parts, const Cache *cache, int64_t kv_heads, int64_t dim_pad, int64_t block_pad) {
#pragma omp parallel
    NAME(team_copy_parts)(parts, cache, kv_heads, dim_pad, block_pad);
}
