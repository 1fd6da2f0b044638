/* Products with int4 weights in matrix tiles; included once per dtype, by int4_linear.h. The words of a group are
 * widened to bytes once for all row tiles of a block. The exact sums of the group are scaled and added in the same
 * order as with vectors: the bits are the same, so the number of rows may decide which to use. */
#define INT4_TILES 4       /* row tiles of a block: a group is widened once for all of them */
#define MOST_INT4_GROUP 128 /* inputs; larger groups use vectors */

INLINE int64_t int4_step(int64_t group) { return group % 64 == 0 ? 64 : 32; } /* bytes of a row per product */

/* Returns true if a product with this number of rows uses tiles: from where they are faster (measured on a CPU of 2026:
 * from 12 rows for groups of 32, from 8 for 64, from 7 for 128). */
INLINE int int4_in_tiles(int64_t rows, int64_t group) {
    return group && group % 32 == 0 && group <= MOST_INT4_GROUP && rows >= (group < 64 ? 12 : 7);
}

/* Splits rows into tiles of equal height, INT4_TILES per block. */
INLINE RowSplit split_int4_rows(int64_t from, int64_t rows, int64_t bytes) {
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, height = INT4_TILES * ((rows + tiles - 1) / tiles);
    return split_evenly(from, rows, height, bytes);
}

INLINE void begin_int4_tiles(const RowSplit *split, int64_t group) {
    TileShapes shapes = {0};
    int64_t height = split->height / INT4_TILES, step = int4_step(group);
    for (int i = 0; i < 4; i++) shape_sum(&shapes, i, height, TILE_COLUMNS);
    for (int i = 4; i < 6; i++) shape_tile(&shapes, i, height, step);
    for (int i = 6; i < 8; i++) shape_tile(&shapes, i, step / 4, TILE_COLUMNS * 4);
    tiles_configure(&shapes);
}

/* The rows of a block, and their sums. */
typedef struct {
    ON_LINES vf total[INT4_TILES][TILE_ROWS][COLUMNS];
    vi sums[2][TILE_ROWS][COLUMNS];        /* of two row tiles with a group */
    vi wide[MOST_INT4_GROUP / 4][COLUMNS];
    const uint8_t *x[INT4_TILES];     /* first row of each tile */
    const float *scales[INT4_TILES];  /* of the first row of each tile */
    int64_t tiles, height, stride;
} Int4Room;

/* Widens `words` words of a column; the number is even. */
INLINE void widen_int4(const vi *weight, int64_t words, vi (*wide)[COLUMNS]) {
    for (int64_t i = 0; i < words; i += 2, weight += COLUMNS)
        for (int c = 0; c < COLUMNS; c++) {
            wide[i][c] = low_codes(weight[c]);
            wide[i + 1][c] = high_codes(weight[c]);
        }
}

/* Computes the sums of two row tiles, which may be the same, with a widened group. */
INLINE void sum_int4(Int4Room *room, const uint8_t *first, const uint8_t *second, int64_t bytes, int64_t step) {
    for (int64_t column = 0; column < PANEL; column += ACROSS * TILE_COLUMNS) {
        int32_t *sums = (int32_t *)room->sums[0] + column, *others = (int32_t *)room->sums[1] + column;
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        for (int64_t at = 0; at < bytes; at += step)
            add_step((const char *)first + at, (const char *)second + at, room->stride,
                     (const char *)room->wide[at / 4] + column * 4, TWO, INT4);
        tile_store(0, sums, PANEL * 4);
        tile_store(2, others, PANEL * 4);
        if (ACROSS == 2) tile_store(1, sums + TILE_COLUMNS, PANEL * 4);
        if (ACROSS == 2) tile_store(3, others + TILE_COLUMNS, PANEL * 4);
    }
}

/* Scales the exact sums of a row tile with group `g` of a panel, and adds them. `own`: the scales of the first row. */
INLINE void add_int4(vf (*total)[COLUMNS], vi (*sums)[COLUMNS], const float *own, const Weight *w, int64_t panel,
                     int64_t g, int64_t rows, const int zeroed) {
    int64_t groups = groups_of(w), at = (panel * groups + g) * COLUMNS;
    const vf *scales = (const vf *)w->scales + at, *zeros = zeroed ? (const vf *)w->zeros + at : NULL;
    for (int64_t r = 0; r < rows; r++, own += 2 * groups) {
        int32_t offset = ((const int32_t *)own)[groups + g];
        for (int c = 0; c < COLUMNS; c++) sums[r][c] += offset;
        add_int4_group(total[r], sums[r], own[g], offset, scales, zeros, zeroed);
    }
}

/* Begins a block. If the last tile has too few rows, it starts earlier and overlaps the tile before. */
INLINE void begin_int4_block(Int4Room *room, const uint8_t *codes, const float *row_scales, const Weight *w,
                             const RowSplit *split, Place at) {
    int64_t first = at.block * split->height, left = rows_of(split, at.block);
    room->height = split->height / INT4_TILES, room->stride = row_bytes(w);
    room->tiles = (left + room->height - 1) / room->height;
    for (int64_t t = 0; t < room->tiles; t++) {
        int64_t row = first + t * room->height, last = split->rows - room->height;
        row = split->from + (row < last ? row : last);
        room->x[t] = codes + row * room->stride, room->scales[t] = row_scales + row * scales_of(w);
        for (int64_t r = 0; r < room->height; r++)
            for (int c = 0; c < COLUMNS; c++) room->total[t][r][c] = splat(0.0f);
    }
}

/* Computes all tiles of the block with group `g`. */
INLINE void int4_tiles_group(Int4Room *room, const Weight *w, int64_t panel, int64_t g, const int zeroed) {
    int64_t from = g * w->group, left = padded(w->inputs) - from, bytes = left < w->group ? left : w->group;
    widen_int4((const vi *)w->panels + (panel * (padded(w->inputs) / 8) + from / 8) * COLUMNS, bytes / 4, room->wide);
    for (int64_t t = 0; t < room->tiles; t += 2) {
        int64_t second = t + 1 < room->tiles ? t + 1 : t;
        sum_int4(room, room->x[t] + from, room->x[second] + from, bytes, int4_step(w->group));
        for (int64_t i = t; i <= second; i++)
            add_int4(room->total[i], room->sums[i - t], room->scales[i], w, panel, g, room->height, zeroed);
    }
}

/* As `int4_block`. */
static void NAME(int4_tiles_block)(const uint8_t *codes, const float *row_scales, const Weight *w, void *y, const RowSplit *split,
                                   Place at, int64_t kind) {
    Int4Room room;
    int more = at.panel + 1 < panels_of(w->outputs, is_gated(kind));
    int64_t size = padded(w->inputs) / 8 * PANEL * 4, groups = groups_of(w);
    const char *ahead = (const char *)w->panels + (at.panel + more) * size + size * at.turn / at.turns / LINE * LINE;
    begin_int4_block(&room, codes, row_scales, w, split, at);
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t i = 0; more && i < size / at.turns / groups; i += LINE, ahead += LINE) __builtin_prefetch(ahead, 0, TO_L2);
        if (w->zeros)
            int4_tiles_group(&room, w, at.panel, g, 1);
        else
            int4_tiles_group(&room, w, at.panel, g, 0);
    }
    for (int64_t t = 0; t < room.tiles; t++) {
        int64_t row = split->from + at.block * split->height + t * room.height, end = split->from + split->rows;
        int64_t rows = end - row < room.height ? end - row : room.height, skipped = room.height - rows;
        NAME(put_block)(room.total[t] + skipped, w, y, row, rows, at.panel, kind);
    }
}

/* As `team_quantized_linear`, with rows that are quantised already. */
TEAM void NAME(team_int4_tiles)(const uint8_t *codes, const float *row_scales, const Weight *w, void *y, int64_t rows,
                                int64_t kind) {
    int64_t panels = panels_of(w->outputs, is_gated(kind));
    const RowSplit split = split_int4_rows(0, rows, row_bytes(w));
    begin_int4_tiles(&split, w->group);
#pragma omp for schedule(guided, 1) nowait
    for (int64_t at = 0; at < split.blocks * panels; at++)
        NAME(int4_tiles_block)(codes, row_scales, w, y, &split, place(at, &split, panels), kind);
    end_tiles(1);
}
