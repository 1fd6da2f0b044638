/* Attention of query rows over a paged cache of latents; included once per dtype. The `width` values of a token are
 * contiguous. All of them are its key, and the first `rank` are its value, for every head. Items are as in attention.h,
 * with tiles of LATENT_TILE tokens counted from the sequence's first. Heads are split into slices, and a job is an item
 * with one slice of heads.
 *
 * A row's sums run in the order of values and tokens, each in its own lane. Its bits depend neither on the other rows
 * nor on how its tiles are divided into levels.
 */
#define LATENT_TILES (TILES && PAIR == 2)
#define LATENT_TILE (LATENT_TILES ? 32 : 16)

typedef struct {
    const REAL *q, *cache; /* q: (tokens, q_heads, width) */
    const Plan *plan;
    float *state; /* (tokens, q_heads, rank + 2): weighted sum, maximum and mass between levels */
    REAL *out;    /* (tokens, q_heads, rank) */
    int64_t q_heads, slice, width, rank, block_size;
    float scale; /* including log2(e), because exponentials are powers of 2 */
} NAME(Latent);

/* The rows of a job: the query of each, and its state. `sum` is (rows, stride), of which `rank` values are used. */
typedef struct {
    const REAL *q[MOST_ROWS];
    int64_t at[MOST_ROWS]; /* token * q_heads + head */
    int32_t position[MOST_ROWS];
    float most[MOST_ROWS], mass[MOST_ROWS], p[MOST_ROWS][LATENT_TILE], shrink[MOST_ROWS];
    float *sum;
    int64_t stride, rows;
} NAME(LatentWork);

/* Computes the products of `rows` (a constant) queries with two keys. */
INLINE void NAME(latent_scores)(const REAL *const *q, const REAL *a, const REAL *b, int64_t width, float (*p)[LATENT_TILE],
                                const int rows) {
    vf sums[ROWS][2];
    int64_t step = LANES * PAIR, whole = width / step * step;
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = splat(0.0f);
    for (int64_t d = 0; d < whole; d += step) {
        vi first = *(const vi *)(a + d), second = *(const vi *)(b + d);
        for (int r = 0; r < rows; r++) {
            vi query = *(const vi *)(q[r] + d);
            sums[r][0] = DOT(sums[r][0], query, first), sums[r][1] = DOT(sums[r][1], query, second);
        }
    }
    for (int r = 0; r < rows; r++) {
        float one = 0, two = 0;
        for (int64_t d = whole; d < width; d++) {
            one = fused_one(LOAD(q[r][d]), LOAD(a[d]), one);
            two = fused_one(LOAD(q[r][d]), LOAD(b[d]), two);
        }
        p[r][0] = lane_sum(sums[r][0]) + one, p[r][1] = lane_sum(sums[r][1]) + two;
    }
}

/* Turns scores into weights relative to the row's maximum. If the maximum rises, `shrink` is the factor for the row's
 * sums. */
INLINE void NAME(latent_weigh)(const NAME(Latent) *s, NAME(LatentWork) *work, int64_t r, int32_t first, int64_t count) {
    float *p = work->p[r], top;
    int32_t left = work->position[r] - first + 1; /* keys from the first on that the row sees */
    vf tops = splat(work->most[r]), added = splat(0.0f);
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    left = left < count ? left : (int32_t)count;
    for (int32_t j = 0; j < LATENT_TILE; j += LANES) {
        vf scores = pick(lane + j < left, load_f32(p + j) * s->scale, splat(-INFINITY));
        tops = larger(scores, tops); /* ignores NaN */
        store_f32(p + j, scores);
    }
    top = lane_max(tops);
    work->shrink[r] = top == work->most[r] ? 1.0f : exp2f(work->most[r] - top);
    work->most[r] = top;
    for (int64_t j = 0; j < LATENT_TILE; j += LANES) {
        vf e = exp2_bounded(load_f32(p + j) - splat(top == -INFINITY ? 0.0f : top));
        store_f32(p + j, e), added += e;
    }
    work->mass[r] = work->mass[r] * work->shrink[r] + lane_sum(added);
}

#if LATENT_TILES
#include "latent_tiles.h"
#define LATENT_STRIDE(s) NAME(latent_columns)((s)->rank)
#else
#define LATENT_STRIDE(s) (s)->rank
/* Computes sum = sum * shrink + p V for `rows` rows and `columns` vectors of the latent from `from` on (both
 * constants). */
INLINE void NAME(latent_add)(const REAL *const *keys, int64_t count, float *sum, int64_t rank, float (*p)[LATENT_TILE],
                             const float *shrink, int64_t from, const int rows, const int columns) {
    vf total[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) total[r][c] = load_f32(sum + r * rank + from + c * LANES) * shrink[r];
    for (int64_t j = 0; j < count; j++)
        for (int c = 0; c < columns; c++) {
            vf value = LOADV(keys[j] + from + c * LANES);
            for (int r = 0; r < rows; r++) total[r][c] = fused(splat(p[r][j]), value, total[r][c]);
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store_f32(sum + r * rank + from + c * LANES, total[r][c]);
}

INLINE void NAME(latent_rows)(const NAME(Latent) *s, NAME(LatentWork) *work, const REAL *const *keys, int32_t first_token,
                              int64_t count, int64_t first, const int rows) {
    float (*p)[LATENT_TILE] = work->p + first, *sum = work->sum + first * s->rank;
    int64_t from = 0;
    for (int64_t j = 0; j < count; j += 2) {
        float pair[ROWS][LATENT_TILE];
        NAME(latent_scores)(work->q + first, keys[j], keys[j + 1 < count ? j + 1 : j], s->width, pair, rows);
        for (int r = 0; r < rows; r++) p[r][j] = pair[r][0], p[r][j + 1] = pair[r][1];
    }
    for (int r = 0; r < rows; r++) NAME(latent_weigh)(s, work, first + r, first_token, count);
    for (; from + 2 * LANES <= s->rank; from += 2 * LANES)
        NAME(latent_add)(keys, count, sum, s->rank, p, work->shrink + first, from, rows, 2);
    for (; from + LANES <= s->rank; from += LANES)
        NAME(latent_add)(keys, count, sum, s->rank, p, work->shrink + first, from, rows, 1);
    for (; from < s->rank; from++)
        for (int r = 0; r < rows; r++) {
            float total = sum[r * s->rank + from] * work->shrink[first + r];
            for (int64_t j = 0; j < count; j++) total = fused_one(p[r][j], LOAD(keys[j][from]), total);
            sum[r * s->rank + from] = total;
        }
}

#endif

INLINE void NAME(latent_take_up)(const NAME(Latent) *s, const Item *item, int64_t slice, NAME(LatentWork) *work) {
    work->rows = item->rows * s->slice, work->stride = LATENT_STRIDE(s);
    for (int64_t r = 0; r < work->rows; r++) {
        const int64_t *row = s->plan->rows + (item->first_row + r / s->slice) * 2;
        int64_t at = row[0] * s->q_heads + slice * s->slice + r % s->slice;
        work->at[r] = at, work->q[r] = s->q + at * s->width, work->position[r] = (int32_t)row[1];
        if (item->starts) {
            memset(work->sum + r * work->stride, 0, work->stride * sizeof(float));
            work->most[r] = -INFINITY, work->mass[r] = 0;
        } else {
            const float *kept = s->state + at * (s->rank + 2);
            memcpy(work->sum + r * work->stride, kept, s->rank * sizeof(float));
            memset(work->sum + r * work->stride + s->rank, 0, (work->stride - s->rank) * sizeof(float));
            work->most[r] = kept[s->rank], work->mass[r] = kept[s->rank + 1];
        }
    }
}

INLINE void NAME(latent_put_down)(const NAME(Latent) *s, const Item *item, const NAME(LatentWork) *work) {
    for (int64_t r = 0; r < work->rows; r++) {
        const float *sum = work->sum + r * work->stride;
        if (item->ends) {
            float share = 1.0f / work->mass[r];
            for (int64_t d = 0; d < s->rank; d++) s->out[work->at[r] * s->rank + d] = STORE(sum[d] * share);
        } else {
            float *kept = s->state + work->at[r] * (s->rank + 2);
            memcpy(kept, sum, s->rank * sizeof(float));
            kept[s->rank] = work->most[r], kept[s->rank + 1] = work->mass[r];
        }
    }
}

static void NAME(latent_attend)(const NAME(Latent) *s, const Item *item, int64_t slice, float *room) {
    NAME(LatentWork) work;
    const int32_t *table = s->plan->tables + item->sequence * s->plan->table_width;
    int64_t last = 0;
    work.sum = room;
    NAME(latent_take_up)(s, item, slice, &work);
#if LATENT_TILES
    NAME(LatentRoom) copies;
    NAME(latent_take_room)(s, &work, room + MOST_ROWS * work.stride, &copies);
#endif
    for (int64_t r = 0; r < work.rows; r++) last = work.position[r] > last ? work.position[r] : last;
    int64_t end = item->ends ? last / LATENT_TILE + 1 : item->end_tile;
    for (int64_t tile = item->first_tile; tile < end; tile++) {
        const REAL *keys[LATENT_TILE];
        int64_t token = tile * LATENT_TILE, count = last + 1 - token < LATENT_TILE ? last + 1 - token : LATENT_TILE;
        for (int64_t j = 0; j < count; j++) {
            int64_t at = token + j;
            keys[j] = s->cache + (table[at / s->block_size] * s->block_size + at % s->block_size) * s->width;
        }
#if LATENT_TILES
        NAME(latent_rows)(s, &work, &copies, keys, (int32_t)token, count);
#else
        for (int64_t first = 0; first < work.rows; first += ROWS)
#define CASE(n) \
    case n: NAME(latent_rows)(s, &work, keys, (int32_t)token, count, first, n); break;
            switch (work.rows - first < ROWS ? work.rows - first : ROWS) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
            }
#undef CASE
#endif
    }
    NAME(latent_put_down)(s, item, &work);
}

/* The tokens of a tile, and the buffer that a thread needs, in floats. */
int64_t NAME(latent_tile)(void) { return LATENT_TILE; }
int64_t NAME(latent_room)(int64_t width, int64_t rank) {
#if LATENT_TILES
    return MOST_ROWS * NAME(latent_columns)(rank) + NAME(latent_copies)(width, rank);
#else
    (void)width;
    return MOST_ROWS * rank;
#endif
}

/* `room`: (threads, latent_room) */
void NAME(latent_attention)(const NAME(Latent) *s, float *room) {
    int64_t slices = s->q_heads / s->slice, size = NAME(latent_room)(s->width, s->rank);
#pragma omp parallel
    for (int64_t level = 0; level < s->plan->levels; level++) {
        int64_t first = level ? s->plan->level_ends[level - 1] : 0, end = s->plan->level_ends[level];
#pragma omp for schedule(dynamic)
        for (int64_t job = first * slices; job < end * slices; job++)
            NAME(latent_attend)(s, s->plan->items + job / slices, job % slices,
                                room + omp_get_thread_num() * size);
        end_tiles(LATENT_TILES); /* the jobs of each level configured them */
    }
}
