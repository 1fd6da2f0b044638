/* Attention of one item in matrix tiles, for bfloat16; included by attention.h. Tiles of keys, masks and the softmax
 * are the same as with vectors.
 *
 * K is stored in the cache as tiles read it: LANES slots of 16 words of the head, with the stride of a block. V of a
 * tile of keys is copied to the L1 cache, because its units are in different blocks, and unneeded slots must be 0: 0 x
 * NaN is NaN. Queries are copied too, because the rows of a tile need one stride.
 *
 * Rows are split into tiles of equal height, at most TILE_ROWS. All rows of bfloat16 use tiles, even a single one: a tile
 * rounds differently from a vector's dot, and a row's bits must not depend on the number of rows. Few rows cost no
 * more, because tiles are only as high as needed, and reading the keys dominates.
 */
#define STEP_WORDS 16 /* words that a product sums over */
#define TILE_KEYS (PANEL < 2 * STEP_WORDS ? 2 * STEP_WORDS : PANEL) /* padded with zeros beyond PANEL */

typedef struct {
    REAL q[MOST_ROWS * MAX_DIM]; /* rows of whole steps, padded with zeros */
    float scores[2][TILE_ROWS][PANEL]; /* of the current tile of rows and the next one */
    REAL p[TILE_ROWS][TILE_KEYS];
    int32_t v[TILE_KEYS / PAIR * MAX_DIM];  /* rows of dim_pad */
    int32_t k_end[STEP_WORDS][PANEL]; /* words of the head beyond its whole steps */
    int64_t width, height; /* width of a row of q; height of a tile */
    int64_t turn, scored;  /* index of the scores to weigh next, and whether they are computed */
} NAME(Room);

/* Configures tiles of this height, for this item only: the text of `attend` is then the same with and without tiles. */
INLINE void NAME(shape_rows)(NAME(Room) *room, int64_t rows) {
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    TileShapes shapes = {0};
    room->height = (rows + tiles - 1) / tiles;
    for (int i = 0; i < COLUMNS; i++) shape_sum(&shapes, i, room->height, LANES);
    shape_x(&shapes, 4, room->height);
    shape_weight(&shapes, 6, LANES);
    shape_weight(&shapes, 7, LANES);
    tiles_configure(&shapes);
}

INLINE void NAME(copy_queries)(const NAME(Work) *work, int64_t rows, int64_t dim, NAME(Room) *room) {
    room->width = (dim + PAIR * STEP_WORDS - 1) / (PAIR * STEP_WORDS) * PAIR * STEP_WORDS;
    for (int64_t r = 0; r < rows; r++) {
        memcpy(room->q + r * room->width, work->q[r], dim * sizeof(REAL));
        memset(room->q + r * room->width + dim, 0, (room->width - dim) * sizeof(REAL));
    }
}

/* Prepares an item. Padding rows of the last tile are set to 0, because they are read. */
ONCE void NAME(take_room)(const NAME(Attention) *s, NAME(Work) *work, int64_t rows, int64_t dim, NAME(Room) *room) {
    NAME(shape_rows)(room, rows);
    NAME(copy_queries)(work, rows, dim, room);
    room->turn = room->scored = 0;
    memset(room->p, 0, sizeof room->p);
    memset(room->v + PANEL / PAIR * s->dim_pad, 0, (TILE_KEYS - PANEL) / PAIR * s->dim_pad * sizeof *room->v);
    if (room->width > dim) memset(room->k_end, 0, sizeof room->k_end);
    for (; rows % room->height; rows++) {
        memset(room->q + rows * room->width, 0, room->width * sizeof(REAL));
        memset(work->sum + rows * s->dim_pad, 0, s->dim_pad * sizeof(float));
    }
}

/* Lines of the next tile's K in address order, prefetched a few at a time. */
typedef struct {
    const vi *at;
    int64_t stride, left; /* vectors between lines; lines left in the unit */
} NAME(Keys);

INLINE void NAME(fetch_keys)(NAME(Keys) *keys, int64_t count) {
    for (; keys->left && count; keys->left--, count--, keys->at += keys->stride) __builtin_prefetch(keys->at, 0, TO_L2);
}

/* Copies V of one unit, `needed` slots of it. Prefetches V and K of the next tile's unit on the way, because a core can
 * have only few misses outstanding. */
INLINE void NAME(copy_unit)(const vi *from, const vi *ahead, int64_t needed, int64_t coming, vi *to, int64_t stride,
                            NAME(Keys) keys) {
    int64_t turns = LANES / PAIR, share = (keys.left + turns - 1) / turns;
    for (int64_t w = 0; w < turns; w++, from += stride, ahead += stride, to += stride) {
        int32_t kept = needed - w * PAIR >= PAIR ? -1 : needed - w * PAIR > 0 ? 0xffff : 0;
        for (int64_t d = 0; w * PAIR < coming && d < stride; d++) __builtin_prefetch(ahead + d, 0, TO_L2);
        NAME(fetch_keys)(&keys, share);
        if (kept == -1)
            for (int64_t d = 0; d < stride; d++) to[d] = from[d];
        else if (kept)
            for (int64_t d = 0; d < stride; d++) to[d] = from[d] & kept;
        else
            memset(to, 0, stride * sizeof *to);
    }
}

ONCE void NAME(copy_values)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, int64_t dim,
                            NAME(Room) *room) {
    int64_t stride = s->dim_pad / LANES;
    for (int c = 0; c < COLUMNS; c++) {
        NAME(Keys) keys = {ahead->k[c], NAME(key_stride)(s), CODES ? 0 : dim / PAIR};
        NAME(copy_unit)(tile->v[c], ahead->v[c], tile->needed[c], CODES ? 0 : ahead->needed[c],
                        (vi *)room->v + c * (LANES / PAIR) * stride, stride, keys);
    }
}

/* Copies the words of the keys beyond the whole steps. */
INLINE void NAME(copy_key_ends)(const NAME(Attention) *s, const NAME(Tile) *tile, int64_t dim, NAME(Room) *room) {
    int64_t from = dim / PAIR / STEP_WORDS * STEP_WORDS, stride = NAME(key_stride)(s);
    for (int64_t w = from; w < dim / PAIR; w++)
        for (int c = 0; c < COLUMNS; c++) ((vi *)room->k_end[w - from])[c] = tile->k[c][w * stride];
}

/* Computes one step of the scores of a tile of rows, from `keys` of each unit, with words `stride` bytes apart. */
INLINE void NAME(score_step)(const REAL *q, int64_t width, const void *const *keys, int64_t stride) {
    tile_load(4, q, width * sizeof(REAL));
    tile_load(6, keys[0], stride);
    tile_dot_bf16(0, 4, 6);
    tile_load(7, keys[1], stride);
    tile_dot_bf16(1, 4, 7);
    if (COLUMNS == 2) return;
    tile_load(6, keys[COLUMNS - 2], stride);
    tile_dot_bf16(2, 4, 6);
    tile_load(7, keys[COLUMNS - 1], stride);
    tile_dot_bf16(3, 4, 7);
}

/* Computes the scores of a tile of rows with a tile of keys. */
INLINE void NAME(score_tile)(const NAME(Attention) *s, const NAME(Tile) *tile, const REAL *q, int64_t dim,
                             NAME(Room) *room, float (*scores)[PANEL]) {
    int64_t words = dim / PAIR, stride = NAME(key_stride)(s), w = 0;
    const void *keys[COLUMNS];
    tile_zero(0);
    tile_zero(1);
    if (COLUMNS == 4) {
        tile_zero(2);
        tile_zero(3);
    }
    for (; w + STEP_WORDS <= words; w += STEP_WORDS) {
        for (int c = 0; c < COLUMNS; c++) keys[c] = tile->k[c] + w * stride;
        NAME(score_step)(q + w * PAIR, room->width, keys, stride * LANES * 4);
    }
    if (w < words) {
        for (int c = 0; c < COLUMNS; c++) keys[c] = room->k_end[0] + c * LANES;
        NAME(score_step)(q + w * PAIR, room->width, keys, PANEL * 4);
    }
    tile_store(0, scores[0], PANEL * 4);
    tile_store(1, scores[0] + LANES, PANEL * 4);
    if (COLUMNS == 4) {
        tile_store(2, scores[0] + 2 * LANES, PANEL * 4);
        tile_store(3, scores[0] + 3 * LANES, PANEL * 4);
    }
}

/* Computes sum = sum + p V of a tile of rows, for one or `two` (a constant) vectors of the head. */
INLINE void NAME(add_columns)(const NAME(Attention) *s, const NAME(Room) *room, float *sum, const int32_t *v, const int two) {
    int64_t stride = s->dim_pad * 4;
    tile_load(0, sum, stride);
    if (two) tile_load(1, sum + LANES, stride);
    for (int64_t step = 0; step < TILE_KEYS / PAIR / STEP_WORDS; step++, v += STEP_WORDS * s->dim_pad) {
        tile_load(4, room->p[0] + step * STEP_WORDS * PAIR, TILE_KEYS * sizeof(REAL));
        tile_load(6, v, stride);
        tile_dot_bf16(0, 4, 6);
        if (two) {
            tile_load(7, v + LANES, stride);
            tile_dot_bf16(1, 4, 7);
        }
    }
    tile_store(0, sum, stride);
    if (two) tile_store(1, sum + LANES, stride);
}

/* Turns the scores of a tile of rows into weights, and scales its sums where the maxima rose. */
INLINE void NAME(weigh_rows)(const NAME(Attention) *s, const NAME(Tile) *tile, NAME(Work) *work, NAME(Room) *room,
                             int64_t first, int64_t count) {
    for (int64_t r = 0; r < count; r++) {
        float *sum = work->sum + (first + r) * s->dim_pad;
        float shrink = NAME(weigh)(s, (vf *)room->scores[room->turn][r], tile, work, first + r, room->p[r]);
        for (int64_t d = 0; shrink != 1.0f && d < s->dim_pad; d += LANES)
            store_f32(sum + d, load_f32(sum + d) * shrink);
    }
}

INLINE void NAME(add_tile)(const NAME(Attention) *s, NAME(Work) *work, const NAME(Room) *room, int64_t first, int64_t dim) {
    float *sum = work->sum + first * s->dim_pad;
    int64_t from = 0;
    for (; from + LANES < dim; from += 2 * LANES) NAME(add_columns)(s, room, sum + from, room->v + from, 1);
    if (from < dim) NAME(add_columns)(s, room, sum + from, room->v + from, 0);
}

/* Computes the scores to weigh next: of the rows from `first` on, or of the first rows with the next tile of keys. */
INLINE void NAME(score_next)(const NAME(Attention) *s, const NAME(Tile) *keys, NAME(Room) *room, int64_t first, int64_t dim) {
    if (!first) NAME(copy_key_ends)(s, keys, dim, room);
    NAME(score_tile)(s, keys, room->q + first * room->width, dim, room, room->scores[!room->turn]);
}

/* Computes all rows with a tile of keys. Before a tile of rows multiplies its weights by V, the scores of the next tile
 * of rows are started; after the last one those with the next tile of keys, if this item has it (`more`). Tiles then
 * multiply while vectors compute exponentials. */
INLINE void NAME(attend_tiles)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Work) *work,
                               NAME(Room) *room, int64_t rows, int64_t dim, int more) {
    if (!room->scored) {
        NAME(score_next)(s, tile, room, 0, dim);
        room->turn = !room->turn;
    }
    NAME(copy_values)(s, tile, ahead, dim, room);
    for (int64_t first = 0; first < rows; first += room->height) {
        int64_t next = first + room->height, count = next < rows ? room->height : rows - first;
        NAME(weigh_rows)(s, tile, work, room, first, count);
        if (next < rows)
            NAME(score_next)(s, tile, room, next, dim);
        else if (more)
            NAME(score_next)(s, ahead, room, 0, dim);
        NAME(add_tile)(s, work, room, first, dim);
        room->turn = !room->turn;
    }
    room->scored = more;
}
