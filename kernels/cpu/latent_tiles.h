/* Attention over latents in matrix tiles, for bfloat16; included by latent.h. Tiles of keys, masks and the softmax are
 * the same as with vectors.
 *
 * The values of a token are contiguous in the cache, but a product reads words of 16 tokens. Each tile of keys is
 * therefore transposed once for all rows of a job, and its values are interleaved by pairs of tokens. Slots without a
 * token are 0, because 0 x NaN is NaN. All rows use tiles, even a single one: a tile rounds differently from a vector's
 * dot, and a row's bits must not depend on the number of rows.
 */
#define LATENT_STEP 16 /* words that a product sums over */
#define LATENT_ACROSS 16 /* columns of a tile */
_Static_assert(LATENT_TILE == 2 * LATENT_ACROSS && LATENT_TILE == 2 * LATENT_STEP, "one step of values, two tiles of keys");

typedef struct {
    REAL *q;         /* (MOST_ROWS, words) of pairs, padded with zeros */
    int32_t *keys;   /* (words, LATENT_TILE) */
    int32_t *values; /* (LATENT_TILE / 2, columns): pairs of tokens */
    REAL *copied;    /* (LANES, words) of pairs: tokens that are not contiguous, or are not whole vectors */
    REAL *none;      /* (words,) of pairs: zeros */
    int64_t words, columns, height;
    float scores[2][TILE_ROWS][LATENT_TILE]; /* alternating between steps, so products need not wait */
    REAL p[TILE_ROWS][LATENT_TILE];
} NAME(LatentRoom);

INLINE int64_t NAME(latent_words)(int64_t width) {
    return (width + PAIR * LATENT_STEP - 1) / (PAIR * LATENT_STEP) * LATENT_STEP;
}

INLINE int64_t NAME(latent_columns)(int64_t rank) { return (rank + LATENT_ACROSS - 1) / LATENT_ACROSS * LATENT_ACROSS; }

/* Returns the size of these buffers in floats, without the sums. */
INLINE int64_t NAME(latent_copies)(int64_t width, int64_t rank) {
    int64_t words = NAME(latent_words)(width);
    return (MOST_ROWS + LATENT_TILE + LANES + 1) * words + LATENT_TILE / 2 * NAME(latent_columns)(rank);
}

INLINE void NAME(latent_shapes)(NAME(LatentRoom) *room, int64_t rows) {
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    TileShapes shapes = {0};
    room->height = (rows + tiles - 1) / tiles;
    for (int i = 0; i < 4; i++) shape_sum(&shapes, i, room->height, LATENT_ACROSS);
    shape_x(&shapes, 4, room->height);
    shape_weight(&shapes, 6, LATENT_ACROSS);
    shape_weight(&shapes, 7, LATENT_ACROSS);
    tiles_configure(&shapes);
}

/* Prepares an item in `from`. Padding rows of the last tile are set to 0, because they are read. */
static void NAME(latent_take_room)(const NAME(Latent) *s, NAME(LatentWork) *work, float *from, NAME(LatentRoom) *room) {
    int64_t words = NAME(latent_words)(s->width), width = words * PAIR, columns = work->stride;
    NAME(latent_shapes)(room, work->rows);
    room->words = words, room->columns = columns;
    room->q = (REAL *)from, from += MOST_ROWS * words;
    room->keys = (int32_t *)from, from += LATENT_TILE * words;
    room->values = (int32_t *)from, from += LATENT_TILE / 2 * columns;
    room->copied = (REAL *)from, from += LANES * words;
    room->none = (REAL *)from;
    memset(room->none, 0, words * 4);
    memset(room->values, 0, LATENT_TILE / 2 * columns * sizeof *room->values);
    int64_t rows = work->rows;
    for (int64_t r = 0; r < rows; r++) {
        memcpy(room->q + r * width, work->q[r], s->width * sizeof(REAL));
        memset(room->q + r * width + s->width, 0, (width - s->width) * sizeof(REAL));
    }
    for (; rows % room->height; rows++) {
        memset(room->q + rows * width, 0, width * sizeof(REAL));
        memset(work->sum + rows * columns, 0, columns * sizeof(float));
    }
    memset(room->p, 0, sizeof room->p);
}

/* Returns true if LANES tokens have one stride and are whole words and whole vectors. */
INLINE int NAME(latent_in_line)(const NAME(Latent) *s, const REAL *const *keys, int64_t count) {
    if (count < LANES || s->width % (LANES * PAIR)) return 0;
    for (int64_t j = 1; j < LANES; j++)
        if (keys[j] != keys[0] + j * s->width) return 0;
    return 1;
}

/* Transposes the words of `count` tokens, at most LANES, to columns from `to` on. */
INLINE void NAME(latent_turn)(const NAME(Latent) *s, const REAL *const *keys, int64_t count, const NAME(LatentRoom) *room,
                              int32_t *to) {
    int64_t words = room->words, stride = words;
    const REAL *from = room->copied;
    if (NAME(latent_in_line)(s, keys, count))
        from = keys[0], stride = s->width / PAIR;
    else
        for (int64_t j = 0; j < LANES; j++) {
            int64_t held = j < count ? s->width : 0;
            memcpy(room->copied + j * words * PAIR, j < count ? keys[j] : room->none, held * sizeof(REAL));
            memset(room->copied + j * words * PAIR + held, 0, (words * PAIR - held) * sizeof(REAL));
        }
    for (int64_t w = 0; w < words; w += LANES) {
        vi turned[LANES];
        if (w < stride)
            transpose((const int32_t *)from + w, stride, turned);
        else /* after the last whole vector */
            for (int i = 0; i < LANES; i++) turned[i] = splat_word(0);
        for (int i = 0; i < LANES; i++) *(vi *)(to + (w + i) * LATENT_TILE) = turned[i];
    }
}

/* Interleaves the values of a tile's tokens by pairs. */
INLINE void NAME(latent_pair)(const NAME(Latent) *s, const REAL *const *keys, int64_t count, const NAME(LatentRoom) *room) {
    for (int64_t j = 0; j < LATENT_TILE; j += 2) {
        const REAL *one = j < count ? keys[j] : room->none, *other = j + 1 < count ? keys[j + 1] : room->none;
        int32_t *to = room->values + j / 2 * room->columns;
        int64_t d = 0;
        for (; d + LANES <= s->rank; d += LANES) *(vi *)(to + d) = paired(one + d, other + d);
        for (; d < s->rank; d++) to[d] = (int32_t)(one[d] | (uint32_t)other[d] << 16);
    }
}

/* Computes the scores of a row tile with all keys. */
INLINE void NAME(latent_score)(const REAL *q, NAME(LatentRoom) *room) {
    int64_t wide = room->words * 4, row = LATENT_TILE * 4;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t w = 0; w < room->words; w += 2 * LATENT_STEP) {
        const int32_t *keys = room->keys + w * LATENT_TILE;
        tile_load(4, q + w * PAIR, wide);
        tile_load(6, keys, row);
        tile_dot_bf16(0, 4, 6);
        tile_load(7, keys + LATENT_ACROSS, row);
        tile_dot_bf16(1, 4, 7);
        if (w + LATENT_STEP == room->words) break;
        keys += LATENT_STEP * LATENT_TILE;
        tile_load(4, q + (w + LATENT_STEP) * PAIR, wide);
        tile_load(6, keys, row);
        tile_dot_bf16(2, 4, 6);
        tile_load(7, keys + LATENT_ACROSS, row);
        tile_dot_bf16(3, 4, 7);
    }
    tile_store(0, room->scores[0][0], row);
    tile_store(1, room->scores[0][0] + LATENT_ACROSS, row);
    tile_store(2, room->scores[1][0], row);
    tile_store(3, room->scores[1][0] + LATENT_ACROSS, row);
}

/* Turns a row's scores into weights, and scales its sum if its maximum rose. */
INLINE void NAME(latent_row)(const NAME(Latent) *s, NAME(LatentWork) *work, NAME(LatentRoom) *room, int64_t first, int64_t r,
                             int32_t token, int64_t count) {
    float *p = work->p[first + r], *sum = work->sum + (first + r) * work->stride;
    for (int64_t j = 0; j < LATENT_TILE; j += LANES)
        store_f32(p + j, load_f32(room->scores[0][r] + j) + load_f32(room->scores[1][r] + j));
    NAME(latent_weigh)(s, work, first + r, token, count);
    for (int64_t j = 0; j < LATENT_TILE; j += LANES) STOREV(room->p[r] + j, load_f32(p + j));
    float shrink = work->shrink[first + r];
    for (int64_t d = 0; shrink != 1.0f && d < work->stride; d += LANES) store_f32(sum + d, load_f32(sum + d) * shrink);
}

/* Computes sum += p V for `two` (a constant) tiles of columns, else for one. */
INLINE void NAME(latent_gain)(float *sum, const int32_t *values, int64_t columns, const int two) {
    tile_load(0, sum, columns * 4);
    tile_load(6, values, columns * 4);
    tile_dot_bf16(0, 4, 6);
    if (two) {
        tile_load(1, sum + LATENT_ACROSS, columns * 4);
        tile_load(7, values + LATENT_ACROSS, columns * 4);
        tile_dot_bf16(1, 4, 7);
    }
    tile_store(0, sum, columns * 4);
    if (two) tile_store(1, sum + LATENT_ACROSS, columns * 4);
}

/* Computes all rows of a job with a tile of `count` keys, the first of which is `token`. */
INLINE void NAME(latent_rows)(const NAME(Latent) *s, NAME(LatentWork) *work, NAME(LatentRoom) *room, const REAL *const *keys,
                              int32_t token, int64_t count) {
    for (int64_t j = 0; j < LATENT_TILE; j += LANES)
        NAME(latent_turn)(s, keys + j, count - j, room, room->keys + j);
    NAME(latent_pair)(s, keys, count, room);
    for (int64_t first = 0; first < work->rows; first += room->height) {
        int64_t here = work->rows - first < room->height ? work->rows - first : room->height, d = 0;
        float *sum = work->sum + first * work->stride;
        NAME(latent_score)(room->q + first * room->words * PAIR, room);
        for (int64_t r = 0; r < here; r++) NAME(latent_row)(s, work, room, first, r, token, count);
        tile_load(4, room->p[0], LATENT_TILE * sizeof(REAL));
        for (; d + LATENT_ACROSS < room->columns; d += 2 * LATENT_ACROSS)
            NAME(latent_gain)(sum + d, room->values + d, room->columns, 1);
        if (d < room->columns) NAME(latent_gain)(sum + d, room->values + d, room->columns, 0);
    }
}
