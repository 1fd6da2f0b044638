/* Attention of query rows over a paged KV cache; included once per dtype.
 *
 * A block of the cache holds block_pad x dim_pad values per KV head: the block size and the head size, rounded up to
 * LANES. K is stored by word of the head, each word for all tokens of the block: one `dot` per word computes the scores
 * of LANES keys. V is stored in words of PAIR tokens, each over the whole head: one `dot` per word updates the sums of
 * LANES values.
 *
 * A unit is LANES slots of a block, a tile is COLUMNS units, counted from the sequence's first token. The tiles
 * therefore do not depend on the query. Rows read tiles in order, and each keeps its maximum, its sum of weights (mass)
 * and its weighted sum of V (Milakov and Gimelshein, 2018). A row's bits depend neither on the other rows, nor on
 * whether its tiles are read at once or level by level of shared prefixes, with the state stored in between.
 *
 * A quantised cache (CODED) has one byte per value. Its values are multiplied as integers (fixed_point.h), or, for
 * float32 and in matrix tiles, widened tile by tile (widen.h).
 */

#define ATTENTION_TILES (TILES && PAIR == 2)
#ifdef CODED
#define CODES 1
#else
#define CODES 0
#endif
#define FIXED (CODES && PAIR == 2 && !ATTENTION_TILES)
#if FIXED /* weights of a tile before they are converted to integers */
#define WEIGHT float
#define STORE_WEIGHTS store_two_f32
#else
#define WEIGHT REAL
#define STORE_WEIGHTS STORE_TWO
#endif

typedef struct {
    const Item *item;
    const int32_t *table;
    int64_t head;
} NAME(Job);

typedef struct {
    float sum[MOST_ROWS * MAX_DIM] /* rows of dim_pad; rows must not share cache sets */, most[MOST_ROWS];
    float mass[MOST_ROWS * LANES]; /* per lane, added up at the end */
    WEIGHT p[ROWS][PANEL];
    const REAL *q[MOST_ROWS];
    int32_t position[MOST_ROWS], last[MOST_ROWS]; /* own position, and the position up to which all keys are seen */
    int32_t behind[MOST_ROWS]; /* bits for the 32 keys after that, in a draft tree */
    const float *bias[MOST_ROWS]; /* bias of the key at each position, or NULL */
#if FIXED
    float p_unit[ROWS], q_unit[MOST_ROWS];
    int16_t fixed_p[ROWS][PANEL], fixed_q[MOST_ROWS * MAX_DIM]; /* rows of dim_pad */
#endif
} NAME(Work);

/* The addresses of the units of a tile, the positions of their slots (PASSED: none), and the number of V rows needed. */
typedef struct {
    const vi *k[COLUMNS], *v[COLUMNS];
    vi position[COLUMNS];
    int64_t needed[COLUMNS], end;
    const float *k_scale[COLUMNS], *v_scale[COLUMNS]; /* for a quantised cache */
} NAME(Tile);

#if CODES
typedef struct {
    float k[PANEL], v[PANEL]; /* 0 if no row needs the token */
} NAME(Scales);

/* Copies the scales of the tile, with 0 where they are not needed, and prefetches those of the next tile. */
INLINE void NAME(take_scales)(NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Scales) *found) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int c = 0; c < COLUMNS; c++) {
        vi needed = lane < splat_word((int32_t)tile->needed[c]); /* other slots may hold NaN */
        store_f32(found->k + c * LANES, pick(needed, load_f32(tile->k_scale[c]), splat(0.0f)));
        store_f32(found->v + c * LANES, pick(needed, load_f32(tile->v_scale[c]), splat(0.0f)));
        tile->k_scale[c] = found->k + c * LANES, tile->v_scale[c] = found->v + c * LANES;
        __builtin_prefetch(ahead->k_scale[c], 0, TO_L2);
        __builtin_prefetch(ahead->v_scale[c], 0, TO_L2);
    }
}
#endif

#if CODES && !FIXED
#include "widen.h"
#endif

/* Returns the distance from one word of a tile's K to the next. */
INLINE int64_t NAME(key_stride)(const NAME(Attention) *s) { return CODES ? COLUMNS : s->block_pad / LANES; }

/* A position in a block table, advanced unit by unit. */
typedef struct {
    const int32_t *table;
    int64_t head, block, inside;
} NAME(Walk);

INLINE int64_t NAME(tile_of)(const NAME(Attention) *s, int64_t position) {
    return (position / s->block_size * (s->block_pad / LANES) + position % s->block_size / LANES) / COLUMNS;
}

INLINE NAME(Walk) NAME(walk_from)(const NAME(Attention) *s, const NAME(Job) *job, int64_t tile) {
    int64_t unit = tile * COLUMNS, units = s->block_pad / LANES;
    return (NAME(Walk)){job->table, job->head, unit / units, unit % units * LANES};
}

INLINE void NAME(next_unit)(const NAME(Attention) *s, NAME(Walk) *walk) {
    walk->inside += LANES;
    if (walk->inside >= s->block_pad) walk->inside = 0, walk->block++;
}

/* Finds the next tile, for rows that see keys from `least` to `last` only. */
INLINE void NAME(next_tile)(const NAME(Attention) *s, NAME(Walk) *walk, int32_t least, int32_t last,
                            NAME(Tile) *found) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    found->end = 0;
    for (int c = 0; c < COLUMNS; c++) {
        int64_t first = walk->block * s->block_size + walk->inside, places = s->block_size - walk->inside;
        /* No row sees these keys. After `last` there may be no block. Blocks before `least` may belong to another
         * sequence, and their V may hold NaN, and 0 x NaN is NaN. So V is skipped, and any readable K will do. */
        int passed = first > last, before = first + (places < LANES ? places : LANES) <= least;
        if (passed || before) {
            found->k[c] = c ? found->k[0] : (const vi *)s->cache.k;
            found->v[c] = c ? found->v[0] : (const vi *)s->cache.v;
            if (CODES) found->k_scale[c] = s->cache.k_scale, found->v_scale[c] = s->cache.v_scale;
            found->position[c] = splat_word(PASSED), found->needed[c] = 0;
            found->end = PASSED;
            if (before) NAME(next_unit)(s, walk);
            continue;
        }
        int64_t token = (walk->table[walk->block] * s->kv_heads + walk->head) * s->block_pad, at = token * s->dim_pad;
        found->k[c] = (const vi *)((const KEPT *)s->cache.k + at + walk->inside * PAIR);
        found->v[c] = (const vi *)((const KEPT *)s->cache.v + at + walk->inside * s->dim_pad);
        if (CODES) {
            found->k_scale[c] = s->cache.k_scale + token + walk->inside;
            found->v_scale[c] = s->cache.v_scale + token + walk->inside;
        }
        vi outside = lane >= (int32_t)places;
        found->position[c] = (outside & PASSED) | (~outside & (lane + (int32_t)first));
        places = places < LANES ? places : LANES;
        found->needed[c] = last - first + 1 < places ? last - first + 1 : places;
        if (found->needed[c] < LANES || found->end == PASSED)
            found->end = PASSED; /* a slot without a key: every row must be masked */
        else
            found->end = first + LANES - 1;
        NAME(next_unit)(s, walk);
    }
}

#if FIXED
#include "fixed_point.h"
#else
/* Computes the scores of `rows` (a constant) rows with a tile, before scaling. With `fetch` (a constant) it prefetches
 * the next tile's K, one line per line read, because a core can have only few misses outstanding. The prefetches are in
 * address order and go to the L2 cache, which allows more misses than the L1. */
INLINE void NAME(score)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, const NAME(Work) *work,
                        int64_t first, vf scores[ROWS][COLUMNS], int64_t dim, const int rows, const int fetch) {
    int64_t stride = NAME(key_stride)(s), run = (dim / PAIR + COLUMNS - 1) / COLUMNS;
    const REAL *const *q = work->q + first;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) scores[r][c] = splat(0.0f);
    for (int64_t w = 0; w < dim / PAIR; w++) {
#if FEW_REGISTERS
        vi keys[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) {
            keys[c] = tile->k[c][w * stride];
            if (fetch) __builtin_prefetch(ahead->k[w / run] + (w % run * COLUMNS + c) * stride, 0, TO_L2);
        }
        for (int r = 0; r < rows; r++) {
            int32_t word;
            memcpy(&word, q[r] + w * PAIR, 4);
            for (int c = 0; c < COLUMNS; c++) scores[r][c] = DOT(scores[r][c], splat_word(word), keys[c]);
        }
#else
        for (int c = 0; c < COLUMNS; c++) {
            vi keys = tile->k[c][w * stride];
            if (fetch) __builtin_prefetch(ahead->k[w / run] + (w % run * COLUMNS + c) * stride, 0, TO_L2);
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, q[r] + w * PAIR, 4);
                scores[r][c] = DOT(scores[r][c], splat_word(word), keys);
            }
        }
#endif
    }
}

/* Computes sum = sum * shrink + p V for `rows` rows and `columns` vectors of the head from `from` on (both constants). */
INLINE void NAME(add_values)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Work) *work,
                             int64_t first, const float *shrink, int64_t from, const int rows, const int columns,
                             const int fetch) {
    vf total[ROWS][COLUMNS];
    float *sum = work->sum + first * s->dim_pad;
    int64_t stride = s->dim_pad / LANES;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) total[r][c] = load_f32(sum + r * s->dim_pad + from + c * LANES) * shrink[r];
    for (int u = 0; u < COLUMNS; u++) {
        const vi *values = tile->v[u] + from / LANES, *coming = ahead->v[u] + from / LANES;
        int64_t whole = tile->needed[u] / PAIR;
        for (int64_t w = 0; w < whole; w++, values += stride, coming += stride) {
#if FEW_REGISTERS
            for (int c = 0; fetch && c < columns; c++) __builtin_prefetch(coming + c, 0, TO_L2);
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, work->p[r] + u * LANES + w * PAIR, 4);
                for (int c = 0; c < columns; c++) total[r][c] = DOT(total[r][c], splat_word(word), values[c]);
            }
#else
            for (int c = 0; c < columns; c++) {
                vi value = values[c];
                if (fetch) __builtin_prefetch(coming + c, 0, TO_L2);
                for (int r = 0; r < rows; r++) {
                    int32_t word;
                    memcpy(&word, work->p[r] + u * LANES + w * PAIR, 4);
                    total[r][c] = DOT(total[r][c], splat_word(word), value);
                }
            }
#endif
        }
        if (tile->needed[u] % PAIR) /* the other token of the word has not been written and may hold NaN */
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, work->p[r] + u * LANES + whole * PAIR, 4);
                for (int c = 0; c < columns; c++)
                    total[r][c] = DOT(total[r][c], splat_word(word), values[c] & 0xffff);
            }
    }
    if (fetch) /* prefetch the keys that the next tile has beyond the number of this one */
        for (int u = 0; u < COLUMNS; u++)
            for (int64_t w = tile->needed[u] / PAIR; w < ahead->needed[u] / PAIR; w++)
                for (int c = 0; c < columns; c++)
                    __builtin_prefetch(ahead->v[u] + from / LANES + w * stride + c, 0, TO_L2);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store_f32(sum + r * s->dim_pad + from + c * LANES, total[r][c]);
}

#endif

/* Not inlined into `weigh`, which is compiled into every loop over rows, because few models cap their scores. */
static __attribute__((noinline)) void NAME(cap_scores)(const NAME(Attention) *s, vf *scores) {
    for (int c = 0; c < COLUMNS; c++) scores[c] = s->cap * tanh_vector(scores[c] * s->within);
}

/* Adds the bias of each key to its score. Not inlined for the same reason. */
static __attribute__((noinline)) void NAME(bias_scores)(const NAME(Tile) *tile, const float *bias, vf *scores) {
    for (int c = 0; c < COLUMNS; c++) {
        int32_t first = tile->position[c][0];
        if (first != PASSED) scores[c] += load_f32(bias + first);
    }
}

/* Returns which keys after `last` a row in a draft tree sees. Not inlined for the same reason. */
static __attribute__((noinline)) vi NAME(in_tree)(vi position, int32_t last, int32_t behind) {
    vi place = position - splat_word(last + 1); /* outside 0 to 31 for PASSED, and for keys up to `last` */
    vi inside = (place >= 0) & (place < 32);
    return inside & -((splat_word(behind) >> (place & 31)) & 1);
}

/* Returns the weights of a unit, multiplied by the scales of V in a quantised cache. */
INLINE vf NAME(scaled)(const NAME(Tile) *tile, vf weights, int c) {
    if (CODES) weights *= load_f32(tile->v_scale[c]);
    return weights;
}

/* Turns scores into weights relative to the row's maximum, and returns the factor for the row's sums. The maximum is
 * raised only if a score exceeds it by SLACK: weights up to 2^SLACK are as exact, and most tiles need no scaling of the
 * sums (Zadouri et al., FlashAttention-4, 2026). */
INLINE float NAME(weigh)(const NAME(Attention) *s, vf *scores, const NAME(Tile) *tile, NAME(Work) *work, int64_t row,
                         WEIGHT *p) {
    int32_t position = work->position[row], last = work->last[row];
    float *most = work->most + row, *mass = work->mass + row * LANES;
    for (int c = 0; CODES && c < COLUMNS; c++) scores[c] *= load_f32(tile->k_scale[c]);
    if (s->bias) NAME(bias_scores)(tile, work->bias[row], scores);
    if (s->cap > 0) NAME(cap_scores)(s, scores);
    if (s->window > 0 || tile->end > last)
        for (int c = 0; c < COLUMNS; c++) {
            vi seen = tile->position[c] <= last;
            if (s->plan->behind) seen |= NAME(in_tree)(tile->position[c], last, work->behind[row]);
            if (s->window > 0) seen &= tile->position[c] > position - (int32_t)s->window;
            scores[c] = pick(seen, scores[c], splat(-INFINITY));
        }
    vf tops = scores[0], added = load_f32(mass);
    for (int c = 1; c < COLUMNS; c++) tops = larger(scores[c], tops);
    float shrink = 1.0f, before = *most, top = before, scale = s->scale;
    if (any_greater(tops * scale, before * scale + SLACK)) {
        float found = lane_max(tops);
        if (found > before) { /* false if a NaN is the maximum, or hides it */
            shrink = before == -INFINITY ? 0.0f : exp2f((before - found) * scale);
            *most = top = found, added *= shrink;
        }
    }
    if (top == -INFINITY) { /* the row has seen no key yet, or only NaN */
        for (int c = 0; c < COLUMNS; c++) scores[c] = pick(scores[c] != scores[c], scores[c], splat(0.0f));
    } else {
        for (int c = 0; c < COLUMNS; c++) scores[c] = EXP2(fused(scores[c], splat(scale), splat(-top * scale)));
    }
    for (int c = 0; c < COLUMNS; c += 2) {
        STORE_WEIGHTS(p + c * LANES, NAME(scaled)(tile, scores[c], c), NAME(scaled)(tile, scores[c + 1], c + 1));
        added += scores[c], added += scores[c + 1];
    }
    store_f32(mass, added);
    return shrink;
}

INLINE void NAME(tile_rows)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Work) *work,
                            int64_t first, int64_t dim, const int rows, const int fetch) {
    vf scores[ROWS][COLUMNS];
    float shrink[ROWS];
    NAME(score)(s, tile, ahead, work, first, scores, dim, rows, fetch);
    for (int r = 0; r < rows; r++) {
        shrink[r] = NAME(weigh)(s, scores[r], tile, work, first + r, work->p[r]);
#if FIXED
        work->p_unit[r] = NAME(to_fixed)(work->p[r], PANEL, work->fixed_p[r]);
#endif
    }
    int64_t from = 0;
    for (; from + PANEL <= dim; from += PANEL)
        NAME(add_values)(s, tile, ahead, work, first, shrink, from, rows, COLUMNS, fetch);
    for (; from < dim; from += LANES)
        NAME(add_values)(s, tile, ahead, work, first, shrink, from, rows, 1, fetch);
}

/* Returns the last position that a row of the plan sees: its own, or a later one within a bidirectional window. */
INLINE int32_t NAME(last_seen)(const NAME(Attention) *s, int64_t row) {
    int64_t position = s->plan->rows[row * 2 + 1], last = s->plan->last_seen ? s->plan->last_seen[row] : position;
    return (int32_t)(s->window > 0 && last - position >= s->window ? position + s->window - 1 : last);
}

/* Loads the rows of an item for one KV head, and initialises or restores their state. */
INLINE void NAME(take_up)(const NAME(Attention) *s, const Item *item, int64_t head, NAME(Work) *work) {
    int64_t group = s->q_heads / s->kv_heads;
    for (int64_t i = 0; i < item->rows; i++)
        for (int64_t g = 0; g < group; g++) {
            const int64_t *row = s->plan->rows + (item->first_row + i) * 2;
            int64_t at = row[0] * s->q_heads + head * group + g, r = i * group + g;
            work->q[r] = s->q + at * s->dim, work->position[r] = (int32_t)row[1];
            work->last[r] = NAME(last_seen)(s, item->first_row + i);
            work->behind[r] = s->plan->behind ? s->plan->behind[item->first_row + i] : 0;
            work->bias[r] = s->bias ? s->bias + (head * group + g) * s->bias_width + s->bias_reach - row[1] : NULL;
#if FIXED
            NAME(fix_query)(work->q[r], s->dim, s->dim_pad, work->fixed_q + r * s->dim_pad, work->q_unit + r);
#endif
            if (item->starts) {
                memset(work->sum + r * s->dim_pad, 0, s->dim_pad * sizeof(float));
                memset(work->mass + r * LANES, 0, LANES * sizeof(float));
                work->most[r] = -INFINITY;
            } else {
                const float *kept = s->state + at * (s->dim_pad + LANES + 1);
                memcpy(work->sum + r * s->dim_pad, kept, s->dim_pad * sizeof(float));
                memcpy(work->mass + r * LANES, kept + s->dim_pad, LANES * sizeof(float));
                work->most[r] = kept[s->dim_pad + LANES];
            }
        }
}

/* Returns the weight of a query head's sink relative to the row's maximum; infinite if the row sees no key. */
INLINE float NAME(sink)(const NAME(Attention) *s, int64_t head, float most) {
    return exp2f(s->sinks[head] * LOG2_E - most * s->scale);
}

INLINE void NAME(put_down)(const NAME(Attention) *s, const Item *item, int64_t head, const NAME(Work) *work) {
    int64_t group = s->q_heads / s->kv_heads;
    for (int64_t i = 0; i < item->rows; i++)
        for (int64_t g = 0; g < group; g++) {
            int64_t at = s->plan->rows[(item->first_row + i) * 2] * s->q_heads + head * group + g, r = i * group + g;
            if (item->ends) {
                float mass = lane_sum(load_f32(work->mass + r * LANES));
                if (s->sinks) mass += NAME(sink)(s, head * group + g, work->most[r]);
                float share = 1.0f / mass;
                for (int64_t d = 0; d < s->dim; d++)
                    s->out[at * s->dim + d] = STORE(work->sum[r * s->dim_pad + d] * share);
            } else {
                float *kept = s->state + at * (s->dim_pad + LANES + 1);
                memcpy(kept, work->sum + r * s->dim_pad, s->dim_pad * sizeof(float));
                memcpy(kept + s->dim_pad, work->mass + r * LANES, LANES * sizeof(float));
                kept[s->dim_pad + LANES] = work->most[r];
            }
        }
}

/* Returns the first key that a row at `position` sees. */
INLINE int32_t NAME(first_seen)(const NAME(Attention) *s, int32_t position) {
    return s->window <= 0 || position < s->window ? 0 : position - (int32_t)s->window + 1;
}

/* Returns the last key that a row sees. */
INLINE int32_t NAME(reached)(const NAME(Work) *work, int64_t row) {
    int32_t behind = work->behind[row];
    return work->last[row] + (behind ? 32 - __builtin_clz((uint32_t)behind) : 0);
}

/* Returns an item's first tile that any row sees; the first row sees keys from `least` on. */
INLINE int64_t NAME(first_tile)(const NAME(Attention) *s, const Item *item, int32_t least) {
    int64_t seen = NAME(tile_of)(s, least);
    return seen > item->first_tile ? seen : item->first_tile;
}

#if ATTENTION_TILES
#include "attention_tiles.h"
#endif

/* Computes one item for one KV head, and prefetches the first tile of the next job. */
INLINE void NAME(attend)(const NAME(Attention) *s, const NAME(Job) *job, const NAME(Job) *next, int64_t dim) {
    ON_LINES NAME(Work) work;
    NAME(Tile) tile, ahead;
#if CODES
    NAME(Scales) scales;
#endif
#if CODES && !FIXED
    NAME(Widened) widened;
#endif
    const Item *item = job->item;
    int64_t rows = item->rows * (s->q_heads / s->kv_heads);
    NAME(take_up)(s, item, job->head, &work);
#if ATTENTION_TILES
    ON_LINES NAME(Room) room;
    NAME(take_room)(s, &work, rows, dim, &room);
#endif
    int32_t first_position = PASSED, last = 0;
    for (int64_t r = 0; r < rows; r++) {
        int32_t reached = NAME(reached)(&work, r);
        last = reached > last ? reached : last;
        first_position = work.position[r] < first_position ? work.position[r] : first_position;
    }
    int32_t least = NAME(first_seen)(s, first_position);
    int64_t from = NAME(first_tile)(s, item, least);
    int64_t end = item->ends ? NAME(tile_of)(s, last) + 1 : item->end_tile;
    NAME(Walk) walk = NAME(walk_from)(s, job, from);
    NAME(next_tile)(s, &walk, least, last, &ahead);
    for (int64_t at = from; at < end; at++) {
        tile = ahead;
        if (at + 1 < end) {
            NAME(next_tile)(s, &walk, least, last, &ahead);
        } else {
            int32_t position = (int32_t)s->plan->rows[next->item->first_row * 2 + 1];
            int32_t seen = NAME(first_seen)(s, position);
            walk = NAME(walk_from)(s, next, NAME(first_tile)(s, next->item, seen));
            NAME(next_tile)(s, &walk, seen, position, &ahead);
        }
#if CODES
        NAME(take_scales)(&tile, &ahead, &scales);
#endif
#if CODES && !FIXED
        NAME(widen_tile)(s, &tile, &ahead, dim, &widened);
#endif
#if ATTENTION_TILES
        NAME(attend_tiles)(s, &tile, &ahead, &work, &room, rows, dim, !CODES && at + 1 < end);
#else
        for (int64_t first = 0; first < rows; first += ROWS)
#define CASE(n) \
    case n: NAME(tile_rows)(s, &tile, &ahead, &work, first, dim, n, FIXED || !CODES); break;
            if (first && rows - first >= ROWS)
                NAME(tile_rows)(s, &tile, &ahead, &work, first, dim, ROWS, 0);
            else /* the remainder prefetches again: a separate loop would increase compile time by 40% */
                switch (rows - first < ROWS ? rows - first : ROWS) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
#endif
    }
    NAME(put_down)(s, item, job->head, &work);
}

INLINE NAME(Job) NAME(job_at)(const NAME(Attention) *s, int64_t at) {
    const Item *item = s->plan->items + at / s->kv_heads;
    return (NAME(Job)){item, s->plan->tables + item->sequence * s->plan->table_width, at % s->kv_heads};
}

/* Takes jobs until none is left, always one ahead, to prefetch the next job's keys. */
INLINE void NAME(work)(const NAME(Attention) *s, NAME(Queue) *queue, int64_t dim) {
    int64_t at = __atomic_fetch_add(&queue->taken, queue->chunk, __ATOMIC_RELAXED), left = queue->chunk;
    if (at >= queue->end) return;
    NAME(Job) job = NAME(job_at)(s, at), next;
    for (int more = 1; more; job = next) {
        if (--left)
            at++;
        else
            at = __atomic_fetch_add(&queue->taken, queue->chunk, __ATOMIC_RELAXED), left = queue->chunk;
        more = at < queue->end;
        next = more ? NAME(job_at)(s, at) : job;
        NAME(attend)(s, &job, &next, dim);
    }
#if ATTENTION_TILES
    tiles_release();
#endif
}

static void NAME(work_64)(const NAME(Attention) *s, NAME(Queue) *queue) { NAME(work)(s, queue, 64); }
static void NAME(work_any)(const NAME(Attention) *s, NAME(Queue) *queue) { NAME(work)(s, queue, s->dim); }

/* `queue` is shared by the team and empty. */
TEAM_OF_UNITS void NAME(team_attention)(const NAME(Attention) *s, NAME(Queue) *queue) {
    for (int64_t level = 0; level < s->plan->levels; level++) {
#pragma omp single
        {
            int64_t end = s->plan->level_ends[level] * s->kv_heads, share = (end - queue->end) / (omp_get_num_threads() * 8);
            *queue = (NAME(Queue)){queue->end, end, share < 1 ? 1 : share > 8 ? 8 : share};
        }
        (s->dim == 64 ? NAME(work_64) : NAME(work_any))(s, queue);
#pragma omp barrier
    }
}

void NAME(paged_attention)(const NAME(Attention) *attention) {
    NAME(Queue) queue = {0, 0, 1};
#pragma omp parallel
    NAME(team_attention)(attention, &queue);
}
