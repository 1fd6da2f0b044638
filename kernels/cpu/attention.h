/* Attention of query rows over a paged KV cache; included once a dtype.
 *
 * A block of the cache holds, for each KV head, block_pad x dim_pad values (the block size and the head size rounded up
 * to LANES). K lies word after word of the head, each word of all the block's tokens: scores of LANES keys come of one
 * `dot` a word. V lies in words of PAIR tokens, each over the whole head: sums of LANES values come of one `dot` a word.
 *
 * A UNIT is LANES places of a block, a tile COLUMNS units, counted from the sequence's first token: which keys make a tile
 * does not depend on the query. Tiles are taken in order, each row keeping its maximum, mass and weighted sum (Milakov and
 * Gimelshein, 2018); so it makes no difference to a row's bits which rows it is computed with, nor whether its tiles were
 * taken in one go or level after level of a tree of shared prefixes with the state kept in between.
 *
 * A cache of codes (CODED) has a byte where the other has a value. They are multiplied as integers (fixed_point.h), but for
 * float32 and in matrix tiles: there tile after tile is widened as widen.h says.
 */

#define ATTENTION_TILES (TILES && PAIR == 2)
#ifdef CODED
#define CODES 1
#else
#define CODES 0
#endif
#define FIXED (CODES && PAIR == 2 && !ATTENTION_TILES)
#if FIXED /* the weights of a tile before they become integers */
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
    float sum[MOST_ROWS * MAX_DIM] /* rows of dim_pad: no two at a stride that shares cache sets */, most[MOST_ROWS];
    float mass[MOST_ROWS * LANES]; /* lane by lane: they are added up at the end */
    WEIGHT p[ROWS][PANEL];
    const REAL *q[MOST_ROWS];
    int32_t position[MOST_ROWS], last[MOST_ROWS]; /* its own, and the last one up to which it sees all */
    int32_t behind[MOST_ROWS]; /* a bit for each of the keys behind that, in a tree of drafts */
    const float *bias[MOST_ROWS]; /* of the key at each position, or NULL */
#if FIXED
    float p_unit[ROWS], q_unit[MOST_ROWS];
    int16_t fixed_p[ROWS][PANEL], fixed_q[MOST_ROWS * MAX_DIM]; /* rows of dim_pad */
#endif
} NAME(Work);

/* Where the units of a tile lie, the positions of their places (PASSED: none), and how many of their V are needed. */
typedef struct {
    const vi *k[COLUMNS], *v[COLUMNS];
    vi position[COLUMNS];
    int64_t needed[COLUMNS], end;
    const float *k_scale[COLUMNS], *v_scale[COLUMNS]; /* of codes */
} NAME(Tile);

#if CODES
typedef struct {
    float k[PANEL], v[PANEL]; /* 0 where nobody needs the token */
} NAME(Scales);

/* The tile's scales are then those found; those of the tile ahead are fetched. */
INLINE void NAME(take_scales)(NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Scales) *found) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int c = 0; c < COLUMNS; c++) {
        vi needed = lane < splat_word((int32_t)tile->needed[c]); /* what lies elsewhere may be no number */
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

/* From a word of a tile's K to the next. */
INLINE int64_t NAME(key_stride)(const NAME(Attention) *s) { return CODES ? COLUMNS : s->block_pad / LANES; }

/* A way along a block table, unit by unit. */
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

/* The next tile for rows that see nothing before `least`, and of which none is after `last`. */
INLINE void NAME(next_tile)(const NAME(Attention) *s, NAME(Walk) *walk, int32_t least, int32_t last,
                            NAME(Tile) *found) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    found->end = 0;
    for (int c = 0; c < COLUMNS; c++) {
        int64_t first = walk->block * s->block_size + walk->inside, places = s->block_size - walk->inside;
        /* Nothing is seen there. Behind `last` there may be no block; before `least` another sequence may have it, whose
         * V may be no number, and 0 x NaN is NaN. So no V is needed, and any K that is readable will do. */
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
            found->end = PASSED; /* a place without a key: every row has to be masked */
        else
            found->end = first + LANES - 1;
        NAME(next_unit)(s, walk);
    }
}

#if FIXED
#include "fixed_point.h"
#else
/* Scores of `rows` (a constant) rows with a tile, not scaled yet. With `fetch` (a constant) the keys ahead are fetched on
 * the way, a line for each that is read: in one go they would queue up for the few misses that a core can have open.
 * They are fetched in the order of their addresses, and into the L2 cache, which can have more misses open than the L1. */
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

/* sum = sum * shrink + p V for `rows` rows and `columns` (both constants) vectors of the head from `from` on. */
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
        if (tile->needed[u] % PAIR) /* the other token of the word is not written: it may hold anything */
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, work->p[r] + u * LANES + whole * PAIR, 4);
                for (int c = 0; c < columns; c++)
                    total[r][c] = DOT(total[r][c], splat_word(word), values[c] & 0xffff);
            }
    }
    if (fetch) /* what a tile with more keys than this one has beyond it */
        for (int u = 0; u < COLUMNS; u++)
            for (int64_t w = tile->needed[u] / PAIR; w < ahead->needed[u] / PAIR; w++)
                for (int c = 0; c < columns; c++)
                    __builtin_prefetch(ahead->v[u] + from / LANES + w * stride + c, 0, TO_L2);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store_f32(sum + r * s->dim_pad + from + c * LANES, total[r][c]);
}

#endif

/* Apart from `weigh`, which is compiled into every loop over rows: few models cap their scores. */
static __attribute__((noinline)) void NAME(cap_scores)(const NAME(Attention) *s, vf *scores) {
    for (int c = 0; c < COLUMNS; c++) scores[c] = s->cap * tanh_vector(scores[c] * s->within);
}

/* Adds what a key adds to its score by its distance. Apart for the same reason. */
static __attribute__((noinline)) void NAME(bias_scores)(const NAME(Tile) *tile, const float *bias, vf *scores) {
    for (int c = 0; c < COLUMNS; c++) {
        int32_t first = tile->position[c][0];
        if (first != PASSED) scores[c] += load_f32(bias + first);
    }
}

/* Which of a unit's keys behind `last` a row of a tree sees. Apart for the same reason. */
static __attribute__((noinline)) vi NAME(in_tree)(vi position, int32_t last, int32_t behind) {
    vi place = position - splat_word(last + 1); /* of PASSED it is no place, as of those up to `last` */
    vi inside = (place >= 0) & (place < 32);
    return inside & -((splat_word(behind) >> (place & 31)) & 1);
}

/* What weights of a unit multiply its V with. */
INLINE vf NAME(scaled)(const NAME(Tile) *tile, vf weights, int c) {
    if (CODES) weights *= load_f32(tile->v_scale[c]);
    return weights;
}

/* Scores become probabilities relative to a maximum of the row's; in return what the row's sum has to be scaled by.
 * The maximum is raised only where a score exceeds it by SLACK: weights of up to 2^SLACK are as exact, and most tiles
 * leave the sums as they are (Zadouri et al., FlashAttention-4, 2026). */
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
        if (found > before) { /* not so where it is, or hides, what is no number */
            shrink = before == -INFINITY ? 0.0f : exp2f((before - found) * scale);
            *most = top = found, added *= shrink;
        }
    }
    if (top == -INFINITY) { /* nothing is seen so far, behind a window or after the query, or nothing but NaN */
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

/* The last position that a row of the plan sees: its own, or one after it, within the window on both sides. */
INLINE int32_t NAME(last_seen)(const NAME(Attention) *s, int64_t row) {
    int64_t position = s->plan->rows[row * 2 + 1], last = s->plan->last_seen ? s->plan->last_seen[row] : position;
    return (int32_t)(s->window > 0 && last - position >= s->window ? position + s->window - 1 : last);
}

/* The rows of an item that belong to one KV head: their state set up, or taken up again. */
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

/* What the sink of a query head adds to a row's mass, relative to the row's maximum; infinite where no key was seen. */
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

/* The first key that a row at `position` sees. */
INLINE int32_t NAME(first_seen)(const NAME(Attention) *s, int32_t position) {
    return s->window <= 0 || position < s->window ? 0 : position - (int32_t)s->window + 1;
}

/* The last key that a row sees. */
INLINE int32_t NAME(reached)(const NAME(Work) *work, int64_t row) {
    int32_t behind = work->behind[row];
    return work->last[row] + (behind ? 32 - __builtin_clz((uint32_t)behind) : 0);
}

/* An item's first tile that any row sees, the first of which sees from `least` on. */
INLINE int64_t NAME(first_tile)(const NAME(Attention) *s, const Item *item, int32_t least) {
    int64_t seen = NAME(tile_of)(s, least);
    return seen > item->first_tile ? seen : item->first_tile;
}

#if ATTENTION_TILES
#include "attention_tiles.h"
#endif

/* One item for one KV head; the first tile of the next job is fetched on the way. */
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
            else /* what is left at the end fetches once more: for a loop of its own each the compiler takes 40% longer */
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

/* Takes jobs until there are none; always one ahead, to fetch the next one's keys in time. */
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

/* `queue` is the team's, empty. */
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
