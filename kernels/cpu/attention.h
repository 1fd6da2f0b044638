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
 */

typedef struct {
    int64_t first_row, rows; /* into `rows`: (token, position) each */
    int64_t sequence;        /* whose block table is walked */
    int64_t first_tile, end_tile; /* where it `ends`, end_tile is its last query's */
    int64_t starts, ends;    /* whether these are the rows' first tiles, and their last */
} NAME(Item);

typedef struct {
    const NAME(Item) *item;
    const int32_t *table;
    int64_t head;
} NAME(Job);

typedef struct {
    const REAL *q, *k_cache, *v_cache;
    const int64_t *rows;
    float *state; /* (tokens, q_heads, dim_pad + LANES + 1); read and written where an item neither starts nor ends its rows */
    REAL *out;
    int64_t q_heads, kv_heads, dim, dim_pad, block_size, block_pad, window;
    float scale; /* times log2(e): exponentials are powers of 2 here */
} NAME(Step);

typedef struct {
    float sum[MOST_ROWS * MAX_DIM] /* rows of dim_pad: no two at a stride that shares cache sets */, most[MOST_ROWS];
    float mass[MOST_ROWS * LANES]; /* lane by lane: they are added up at the end */
    REAL p[ROWS][PANEL];
    const REAL *q[MOST_ROWS];
    int32_t position[MOST_ROWS];
} NAME(Work);

/* Where the units of a tile lie, the positions of their places (PASSED: none), and how many of their V are needed. */
typedef struct {
    const vi *k[COLUMNS], *v[COLUMNS];
    vi position[COLUMNS];
    int64_t needed[COLUMNS], end;
} NAME(Tile);

INLINE int64_t NAME(tile_of)(const NAME(Step) *s, int64_t position) {
    return (position / s->block_size * (s->block_pad / LANES) + position % s->block_size / LANES) / COLUMNS;
}

INLINE void NAME(find_tile)(const NAME(Step) *s, const int32_t *table, int64_t tile, int64_t head, int32_t last,
                            NAME(Tile) *found) {
    int64_t units = s->block_pad / LANES;
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int c = 0; c < COLUMNS; c++) {
        int64_t unit = tile * COLUMNS + c, block = unit / units, inside = unit % units * LANES;
        int64_t first = block * s->block_size + inside, places = s->block_size - inside;
        if (first > last) { /* nothing is seen there, and there may be no block: anything readable will do */
            found->k[c] = c ? found->k[0] : (const vi *)s->k_cache;
            found->v[c] = found->k[c], found->position[c] = splat_word(PASSED), found->needed[c] = 0;
            continue;
        }
        int64_t at = (table[block] * s->kv_heads + head) * s->block_pad * s->dim_pad;
        found->k[c] = (const vi *)((const int32_t *)(s->k_cache + at) + inside);
        found->v[c] = (const vi *)(s->v_cache + at + inside * s->dim_pad);
        vi outside = lane >= (int32_t)places;
        found->position[c] = (outside & PASSED) | (~outside & (lane + (int32_t)first));
        places = places < LANES ? places : LANES;
        found->needed[c] = last - first + 1 < places ? last - first + 1 : places;
    }
    found->end = 0;
    for (int c = 0; c < COLUMNS; c++) /* a place without a key: every row has to be masked */
        found->end = found->needed[c] < LANES || found->end == PASSED ? PASSED : found->position[c][LANES - 1];
}

/* Where a tile to come lies, as far as there are keys. */
typedef struct {
    const vi *k[COLUMNS], *v[COLUMNS];
} NAME(Ahead);

INLINE void NAME(look_ahead)(const NAME(Step) *s, const int32_t *table, int64_t tile, int64_t head, int32_t last,
                             NAME(Ahead) *ahead) {
    int64_t units = s->block_pad / LANES;
    for (int c = 0; c < COLUMNS; c++) {
        int64_t unit = tile * COLUMNS + c, block = unit / units, inside = unit % units * LANES;
        if (block * s->block_size + inside > last) {
            ahead->k[c] = c ? ahead->k[0] : (const vi *)s->k_cache;
            ahead->v[c] = c ? ahead->v[0] : (const vi *)s->v_cache;
            continue;
        }
        int64_t at = (table[block] * s->kv_heads + head) * s->block_pad * s->dim_pad;
        ahead->k[c] = (const vi *)((const int32_t *)(s->k_cache + at) + inside);
        ahead->v[c] = (const vi *)(s->v_cache + at + inside * s->dim_pad);
    }
}

/* Scores of `rows` (a constant) rows with a tile, not scaled yet. With `fetch` (a constant) the keys ahead are fetched on
 * the way, a line for each that is read: in one go they would queue up for the few misses that a core can have open. */
INLINE void NAME(score)(const NAME(Step) *s, const NAME(Tile) *tile, const NAME(Ahead) *ahead, const REAL *const *q,
                        vf scores[ROWS][COLUMNS], int64_t dim, const int rows, const int fetch) {
    int64_t stride = s->block_pad / LANES;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) scores[r][c] = splat(0.0f);
    for (int64_t w = 0; w < dim / PAIR; w++) {
        for (int c = 0; c < COLUMNS; c++) {
            vi keys = tile->k[c][w * stride];
            if (fetch) __builtin_prefetch(ahead->k[c] + w * stride);
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, q[r] + w * PAIR, 4);
                scores[r][c] = DOT(scores[r][c], splat_word(word), keys);
            }
        }
    }
}

/* Scores become probabilities relative to the row's maximum so far; in return what the row's sum has to be scaled by. */
INLINE float NAME(weigh)(const NAME(Step) *s, vf *scores, const NAME(Tile) *tile, int32_t position, float *most,
                         float *mass, REAL *p) {
    if (s->window > 0 || tile->end > position)
        for (int c = 0; c < COLUMNS; c++) {
            vi seen = tile->position[c] <= position;
            if (s->window > 0) seen &= tile->position[c] > position - (int32_t)s->window;
            scores[c] = pick(seen, scores[c], splat(-INFINITY));
        }
    vf tops = scores[0], added = load_f32(mass);
    for (int c = 1; c < COLUMNS; c++) tops = pick(scores[c] > tops, scores[c], tops);
    float shrink = 1.0f, before = *most, top = before;
    if (any_greater(tops, before)) {
        top = lane_max(tops);
        shrink = before == -INFINITY ? 0.0f : exp2f((before - top) * s->scale);
        *most = top, added *= shrink;
    }
    if (top == -INFINITY) { /* nothing of this tile is seen: it lies behind the window, or after the query */
        for (int c = 0; c < COLUMNS; c++) STOREV(p + c * LANES, splat(0.0f));
        return 1.0f;
    }
    for (int c = 0; c < COLUMNS; c++) {
        vf e = exp2_bounded(scores[c] * s->scale - top * s->scale);
        STOREV(p + c * LANES, e);
        added += e;
    }
    store_f32(mass, added);
    return shrink;
}

/* sum = sum * shrink + p V for `rows` rows and `columns` (both constants) vectors of the head from `from` on. */
INLINE void NAME(add_values)(const NAME(Step) *s, const NAME(Tile) *tile, const NAME(Ahead) *ahead,
                             REAL p[ROWS][PANEL], const float *shrink, float *sum, int64_t from, const int rows,
                             const int columns, const int fetch) {
    vf total[ROWS][COLUMNS];
    int64_t stride = s->dim_pad / LANES;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) total[r][c] = load_f32(sum + r * s->dim_pad + from + c * LANES) * shrink[r];
    for (int u = 0; u < COLUMNS; u++) {
        const vi *values = tile->v[u] + from / LANES, *coming = ahead->v[u] + from / LANES;
        int64_t whole = tile->needed[u] / PAIR;
        for (int64_t w = 0; w < whole; w++, values += stride, coming += stride) {
            for (int c = 0; c < columns; c++) {
                vi value = values[c];
                if (fetch) __builtin_prefetch(coming + c);
                for (int r = 0; r < rows; r++) {
                    int32_t word;
                    memcpy(&word, p[r] + u * LANES + w * PAIR, 4);
                    total[r][c] = DOT(total[r][c], splat_word(word), value);
                }
            }
        }
        if (tile->needed[u] % PAIR) /* the other token of the word is not written: it may hold anything */
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, p[r] + u * LANES + whole * PAIR, 4);
                for (int c = 0; c < columns; c++)
                    total[r][c] = DOT(total[r][c], splat_word(word), values[c] & 0xffff);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store_f32(sum + r * s->dim_pad + from + c * LANES, total[r][c]);
}

INLINE void NAME(tile_rows)(const NAME(Step) *s, const NAME(Tile) *tile, const NAME(Ahead) *ahead, NAME(Work) *work,
                            int64_t first, int64_t dim, const int rows, const int fetch) {
    vf scores[ROWS][COLUMNS];
    float shrink[ROWS];
    NAME(score)(s, tile, ahead, work->q + first, scores, dim, rows, fetch);
    for (int r = 0; r < rows; r++) {
        float *mass = work->mass + (first + r) * LANES;
        shrink[r] = NAME(weigh)(s, scores[r], tile, work->position[first + r], work->most + first + r, mass, work->p[r]);
    }
    int64_t from = 0;
    for (; from + PANEL <= dim; from += PANEL)
        NAME(add_values)(s, tile, ahead, work->p, shrink, work->sum + first * s->dim_pad, from, rows, COLUMNS, fetch);
    for (; from < dim; from += LANES)
        NAME(add_values)(s, tile, ahead, work->p, shrink, work->sum + first * s->dim_pad, from, rows, 1, fetch);
}

/* The rows of an item that belong to one KV head: their state set up, or taken up again. */
INLINE void NAME(take_up)(const NAME(Step) *s, const NAME(Item) *item, int64_t head, NAME(Work) *work) {
    int64_t group = s->q_heads / s->kv_heads;
    for (int64_t i = 0; i < item->rows; i++)
        for (int64_t g = 0; g < group; g++) {
            const int64_t *row = s->rows + (item->first_row + i) * 2;
            int64_t at = row[0] * s->q_heads + head * group + g, r = i * group + g;
            work->q[r] = s->q + at * s->dim, work->position[r] = (int32_t)row[1];
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

INLINE void NAME(put_down)(const NAME(Step) *s, const NAME(Item) *item, int64_t head, const NAME(Work) *work) {
    int64_t group = s->q_heads / s->kv_heads;
    for (int64_t i = 0; i < item->rows; i++)
        for (int64_t g = 0; g < group; g++) {
            int64_t at = s->rows[(item->first_row + i) * 2] * s->q_heads + head * group + g, r = i * group + g;
            if (item->ends) {
                float share = 1.0f / lane_sum(load_f32(work->mass + r * LANES));
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

/* One item for one KV head; the first tile of the next job is fetched on the way. */
INLINE void NAME(attend)(const NAME(Step) *s, const NAME(Job) *job, const NAME(Job) *next, int64_t dim) {
    NAME(Work) work;
    NAME(Tile) tile;
    NAME(Ahead) ahead;
    const NAME(Item) *item = job->item;
    int64_t rows = item->rows * (s->q_heads / s->kv_heads);
    NAME(take_up)(s, item, job->head, &work);
    int32_t first_position = PASSED, last = 0;
    for (int64_t r = 0; r < rows; r++) {
        last = work.position[r] > last ? work.position[r] : last;
        first_position = work.position[r] < first_position ? work.position[r] : first_position;
    }
    int64_t from = item->first_tile, end = item->ends ? NAME(tile_of)(s, last) + 1 : item->end_tile;
    if (s->window > 0 && first_position >= s->window) { /* tiles that all rows have left behind change nothing */
        int64_t seen = NAME(tile_of)(s, first_position - s->window + 1);
        from = seen > from ? seen : from;
    }
    for (int64_t at = from; at < end; at++) {
        NAME(find_tile)(s, job->table, at, job->head, last, &tile);
        if (at + 1 < end)
            NAME(look_ahead)(s, job->table, at + 1, job->head, last, &ahead);
        else
            NAME(look_ahead)(s, next->table, next->item->first_tile, next->head,
                             s->rows[next->item->first_row * 2 + 1], &ahead);
        for (int64_t first = 0; first < rows; first += ROWS)
#define CASE(n, fetch) \
    case n: NAME(tile_rows)(s, &tile, &ahead, &work, first, dim, n, fetch); break;
            if (first)
                switch (rows - first < ROWS ? rows - first : ROWS) {
                    CASE(1, 0) CASE(2, 0) CASE(3, 0) CASE(4, 0) CASE(5, 0) CASE(6, 0)
                }
            else
                switch (rows < ROWS ? rows : ROWS) { CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1) }
#undef CASE
    }
    NAME(put_down)(s, item, job->head, &work);
}

static void NAME(attend_64)(const NAME(Step) *s, const NAME(Job) *job, const NAME(Job) *next) {
    NAME(attend)(s, job, next, 64);
}
static void NAME(attend_any)(const NAME(Step) *s, const NAME(Job) *job, const NAME(Job) *next) {
    NAME(attend)(s, job, next, s->dim);
}

/* q, out: (tokens, q_heads, dim); tables: (sequences, table_width). `items` are cut into `levels` stretches that end at
 * `level_ends`: a row's items lie in different levels, in the order of their tiles. */
void NAME(paged_attention)(const REAL *q, const REAL *k_cache, const REAL *v_cache, const int32_t *tables,
                           int64_t table_width, const NAME(Item) *items, const int64_t *level_ends, int64_t levels,
                           const int64_t *rows, float *state, int64_t window, float scale, REAL *out, int64_t q_heads,
                           int64_t kv_heads, int64_t dim, int64_t dim_pad, int64_t block_size, int64_t block_pad) {
    NAME(Step) s = {q, k_cache, v_cache, rows, state, out, q_heads, kv_heads, dim, dim_pad, block_size, block_pad,
                    window, scale * 1.44269504f};
#pragma omp parallel
    for (int64_t level = 0; level < levels; level++) {
        int64_t first = level ? level_ends[level - 1] : 0, jobs = (level_ends[level] - first) * kv_heads;
        int64_t share = jobs / (omp_get_num_threads() * 8), chunk = share < 1 ? 1 : share > 8 ? 8 : share;
#pragma omp for schedule(dynamic, 1)
        for (int64_t start = 0; start < jobs; start += chunk)
            for (int64_t at = start; at < start + chunk && at < jobs; at++) {
                NAME(Job) two[2];
                int more = at + 1 < start + chunk && at + 1 < jobs;
                for (int i = 0; i <= more; i++) {
                    two[i].item = items + first + (at + i) / kv_heads, two[i].head = (at + i) % kv_heads;
                    two[i].table = tables + two[i].item->sequence * table_width;
                }
                (dim == 64 ? NAME(attend_64) : NAME(attend_any))(&s, two, two + more);
            }
    }
}
