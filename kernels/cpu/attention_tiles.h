/* Attention of one item in matrix tiles, for bfloat16; included by attention.h. What a tile of keys is, its masks and its
 * softmax are those of the vectors.
 *
 * K lies in the cache as tiles are multiplied: LANES places of 16 words of the head, a block's places apart. V of a tile of
 * keys is copied to where the L1 cache has it: its units lie in different blocks, and 0 x NaN is NaN, so that what no row
 * needs has to be 0. Queries are copied as well, since a row's are not at a stride of the tile before it.
 *
 * Rows are cut into tiles of equal height, at most TILE_ROWS. All rows of bfloat16 go this way, a single one, too: a tile
 * rounds otherwise than a vector's dot, and whether a row is computed alone or with others may not show in its bits. Of few
 * rows it costs no more: the tile is as high as they are many, and the keys come from memory.
 */
#define STEP_WORDS 16 /* that a product sums over */
#define TILE_KEYS (PANEL < 2 * STEP_WORDS ? 2 * STEP_WORDS : PANEL) /* more than PANEL: the rest is 0 */

typedef struct {
    REAL q[MOST_ROWS * MAX_DIM]; /* rows of whole steps, 0 where the head ends before */
    float scores[TILE_ROWS][PANEL];
    REAL p[TILE_ROWS][TILE_KEYS];
    int32_t v[TILE_KEYS / PAIR * MAX_DIM];  /* rows of dim_pad */
    int32_t k_end[STEP_WORDS][PANEL]; /* the head's words beyond its whole steps */
    int64_t width, height; /* of a row of q; of a tile */
} NAME(Room);

/* Tiles of this height, for this item alone: so that `attend` is the same text as without tiles. */
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

/* An item's first: the rows that fill the last tile are nobody's, but they are read. */
ONCE void NAME(take_room)(const NAME(Attention) *s, NAME(Work) *work, int64_t rows, int64_t dim, NAME(Room) *room) {
    NAME(shape_rows)(room, rows);
    NAME(copy_queries)(work, rows, dim, room);
    memset(room->p, 0, sizeof room->p);
    memset(room->v + PANEL / PAIR * s->dim_pad, 0, (TILE_KEYS - PANEL) / PAIR * s->dim_pad * sizeof *room->v);
    if (room->width > dim) memset(room->k_end, 0, sizeof room->k_end);
    for (; rows % room->height; rows++) {
        memset(room->q + rows * room->width, 0, room->width * sizeof(REAL));
        memset(work->sum + rows * s->dim_pad, 0, s->dim_pad * sizeof(float));
    }
}

/* V of one unit, `needed` places of it; that of the unit ahead is fetched on the way. */
INLINE void NAME(copy_unit)(const vi *from, const vi *ahead, int64_t needed, int64_t coming, vi *to, int64_t stride) {
    for (int64_t w = 0; w < LANES / PAIR; w++, from += stride, ahead += stride, to += stride) {
        int32_t kept = needed - w * PAIR >= PAIR ? -1 : needed - w * PAIR > 0 ? 0xffff : 0;
        for (int64_t d = 0; w * PAIR < coming && d < stride; d++) __builtin_prefetch(ahead + d, 0, TO_L2);
        if (kept == -1)
            for (int64_t d = 0; d < stride; d++) to[d] = from[d];
        else if (kept)
            for (int64_t d = 0; d < stride; d++) to[d] = from[d] & kept;
        else
            memset(to, 0, stride * sizeof *to);
    }
}

ONCE void NAME(copy_values)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Room) *room) {
    int64_t stride = s->dim_pad / LANES;
    for (int c = 0; c < COLUMNS; c++)
        NAME(copy_unit)(tile->v[c], ahead->v[c], tile->needed[c], CODES ? 0 : ahead->needed[c],
                        (vi *)room->v + c * (LANES / PAIR) * stride, stride);
}

/* What is left of the keys behind the whole steps. */
INLINE void NAME(copy_key_ends)(const NAME(Attention) *s, const NAME(Tile) *tile, int64_t dim, NAME(Room) *room) {
    int64_t from = dim / PAIR / STEP_WORDS * STEP_WORDS, stride = NAME(key_stride)(s);
    for (int64_t w = from; w < dim / PAIR; w++)
        for (int c = 0; c < COLUMNS; c++) ((vi *)room->k_end[w - from])[c] = tile->k[c][w * stride];
}

/* One step of the scores of a tile of rows; `keys` of each unit, words `stride` bytes apart. */
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

/* Scores of a tile of rows with a tile of keys. With `fetch` (a constant) the keys ahead are fetched. */
INLINE void NAME(score_tile)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, const REAL *q,
                             int64_t dim, NAME(Room) *room, const int fetch) {
    int64_t words = dim / PAIR, stride = NAME(key_stride)(s), w = 0;
    const void *keys[COLUMNS];
    tile_zero(0);
    tile_zero(1);
    if (COLUMNS == 4) {
        tile_zero(2);
        tile_zero(3);
    }
    for (; w + STEP_WORDS <= words; w += STEP_WORDS) {
        for (int c = 0; c < COLUMNS; c++) {
            keys[c] = tile->k[c] + w * stride;
            for (int i = 0; fetch && i < STEP_WORDS; i++)
                __builtin_prefetch(ahead->k[c] + (w + i) * stride, 0, TO_L2);
        }
        NAME(score_step)(q + w * PAIR, room->width, keys, stride * LANES * 4);
    }
    if (w < words) {
        for (int c = 0; c < COLUMNS; c++) keys[c] = room->k_end[0] + c * LANES;
        NAME(score_step)(q + w * PAIR, room->width, keys, PANEL * 4);
    }
    tile_store(0, room->scores[0], PANEL * 4);
    tile_store(1, room->scores[0] + LANES, PANEL * 4);
    if (COLUMNS == 4) {
        tile_store(2, room->scores[0] + 2 * LANES, PANEL * 4);
        tile_store(3, room->scores[0] + 3 * LANES, PANEL * 4);
    }
}

/* sum = sum + p V of a tile of rows, for one or for `two` (a constant) vectors of the head. */
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

/* A tile of rows, `count` of them somebody's, with a tile of keys. */
INLINE void NAME(attend_tile)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Work) *work,
                              NAME(Room) *room, int64_t first, int64_t count, int64_t dim) {
    const REAL *q = room->q + first * room->width;
    float *sum = work->sum + first * s->dim_pad;
    int64_t from = 0;
    if (first)
        NAME(score_tile)(s, tile, ahead, q, dim, room, 0);
    else
        NAME(score_tile)(s, tile, ahead, q, dim, room, !CODES);
    for (int64_t r = 0; r < count; r++) {
        int64_t at = first + r;
        float shrink = NAME(weigh)(s, (vf *)room->scores[r], tile, work, at, room->p[r]);
        for (int64_t d = 0; shrink != 1.0f && d < s->dim_pad; d += LANES)
            store_f32(sum + r * s->dim_pad + d, load_f32(sum + r * s->dim_pad + d) * shrink);
    }
    for (; from + LANES < dim; from += 2 * LANES) NAME(add_columns)(s, room, sum + from, room->v + from, 1);
    if (from < dim) NAME(add_columns)(s, room, sum + from, room->v + from, 0);
}

INLINE void NAME(attend_tiles)(const NAME(Attention) *s, const NAME(Tile) *tile, const NAME(Tile) *ahead, NAME(Work) *work,
                               NAME(Room) *room, int64_t rows, int64_t dim) {
    NAME(copy_values)(s, tile, ahead, room);
    NAME(copy_key_ends)(s, tile, dim, room);
    for (int64_t first = 0; first < rows; first += room->height)
        NAME(attend_tile)(s, tile, ahead, work, room, first, rows - first < room->height ? rows - first : room->height, dim);
}
