/* Products in tiles, for bfloat16 and for quantised values. Panels need no special layout: 16 words of 16 columns of a
 * panel, PANEL words apart, are a tile. Two tiles of rows are multiplied by two of columns, so each loaded tile is used
 * twice. A single tile of rows is multiplied by a panel's four: a product takes several times as long as the interval
 * between products, so four independent sums keep the hardware busy, and two would not.
 *
 * A row's sum runs over its words in steps of 16, whatever the other rows are: the hardware does so row by row, and a
 * smaller tile is only configured with fewer rows. If the last tile has too few rows, it starts earlier and overlaps
 * another tile; the duplicate results are dropped. Nothing outside x is read: the end of a row that is not a whole step
 * is copied and padded with zeros.
 */
#define TILE_COLUMNS (PANEL < 16 ? PANEL : 16)
#define ACROSS (PANEL > TILE_COLUMNS ? 2 : 1) /* tiles of columns next to each other */
#define WIDE (PANEL == 4 * TILE_COLUMNS)
enum { TWO, ONE, ONE_WIDE }; /* tiles of rows: two or one, with ACROSS tiles of columns, or one with four */

#if TILES
/* A block whose results are not written yet: while the tiles of the next block are multiplied, vectors scale, activate
 * and round the rows of this one. A thread has at most one. */
typedef struct {
    ON_LINES vf rooms[2][2 * TILE_ROWS][COLUMNS]; /* of this block, and of the next one */
    vf (*sums)[COLUMNS];                          /* of its first row that is not written */
    int64_t turn, row, left, panel, kind;
    Weight weight;
    void *y;
    const float *row_scales; /* if its sums are of quantised rows */
} Waiting;
typedef void (*PutWaiting)(Waiting *, int64_t); /* writes some of its rows */

/* Rows to write evenly over steps: after each step the number that is due. */
typedef struct {
    int64_t rows, steps, owed; /* rows in total, steps in total; rows times steps that are still due */
} Pace;

INLINE int64_t rows_due(Pace *pace) {
    pace->owed += pace->rows;
    if (pace->owed < pace->steps) return 0;
    int64_t due = pace->owed / pace->steps;
    pace->owed -= due * pace->steps;
    return due;
}

/* What a block prefetches of the next panel: one part per block that uses the panel, some lines per step. */
typedef struct {
    const char *at, *end;
    int64_t lines;
} Fetch;

INLINE Fetch fetch_for(const char *panel, int64_t bytes, Place at, int more, int64_t passes) {
    int64_t steps = words_of(bytes) / 16, whole = steps * 16 * PANEL * 4, lines = whole / LINE;
    int64_t from = lines * at.turn / at.turns, to = more ? lines * (at.turn + 1) / at.turns : from;
    int64_t turns = steps * passes;
    return (Fetch){panel + whole + from * LINE, panel + whole + to * LINE, (to - from + turns - 1) / turns};
}

INLINE void fetch_lines(Fetch *fetch) {
    const char *end = fetch->at + fetch->lines * LINE < fetch->end ? fetch->at + fetch->lines * LINE : fetch->end;
    for (; fetch->at < end; fetch->at += LINE) __builtin_prefetch(fetch->at, 0, TO_L2);
}

#define DOT_TILES(sum, x, weight) do { \
        if (codes == INT4) \
            tile_dot_int4(sum, x, weight); \
        else if (codes) \
            tile_dot_int8(sum, x, weight); \
        else \
            tile_dot_bf16(sum, x, weight); \
    } while (0)

/* Multiplies 16 words of tiles of rows by those of tiles of columns, as `form` (a constant) says. Sums are in tiles 0
 * to 3. */
INLINE void add_step(const char *first, const char *second, int64_t stride, const char *weight, const int form,
                     const int codes) {
    tile_load(4, first, stride);
    tile_load(6, weight, PANEL * 4);
    DOT_TILES(0, 4, 6);
    if (ACROSS == 2) {
        tile_load(7, weight + TILE_COLUMNS * 4, PANEL * 4);
        DOT_TILES(1, 4, 7);
    }
    if (form == TWO) {
        tile_load(5, second, stride);
        DOT_TILES(2, 5, 6);
        if (ACROSS == 2) DOT_TILES(3, 5, 7);
    } else if (form == ONE_WIDE) {
        tile_load(6, weight + 2 * TILE_COLUMNS * 4, PANEL * 4);
        DOT_TILES(2, 4, 6);
        tile_load(7, weight + 3 * TILE_COLUMNS * 4, PANEL * 4);
        DOT_TILES(3, 4, 7);
    }
}

/* Computes the sums of rows from `first` and from `second` on with the columns of one pass. After each step, the due
 * rows of the waiting block are written. */
INLINE void sum_columns(const char *first, const char *second, const char tails[2][TILE_ROWS][TILE_BYTES], int64_t bytes,
                        const char *weight, Fetch *fetch, Waiting *waiting, Pace *pace, PutWaiting put, const int form,
                        const int codes) {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t i = 0; i < bytes / STEP; i++, weight += 16 * PANEL * 4) {
        fetch_lines(fetch);
        add_step(first + i * STEP, second + i * STEP, bytes, weight, form, codes);
        int64_t due = rows_due(pace);
        if (due) put(waiting, due);
    }
    if (bytes % STEP) add_step(tails[0][0], tails[1][0], TILE_BYTES, weight, form, codes);
}

/* Copies the ends of `height` rows that are not a whole step. */
INLINE void copy_tails(const char *x, int64_t bytes, int64_t height, char tails[TILE_ROWS][TILE_BYTES]) {
    int64_t tail = bytes % STEP;
    memset(tails, 0, TILE_ROWS * TILE_BYTES);
    for (int64_t row = 0; row < height; row++) memcpy(tails[row], x + (row + 1) * bytes - tail, tail);
}

/* Computes the sums of a block of rows of x, of `bytes` each, with a panel, and returns its first row. `put` writes the
 * waiting block on the way. `codes` (a constant): x is quantised, and sums are integers. */
INLINE vf (*tile_sums(const char *x, int64_t bytes, const RowSplit *split, const char *panel, Place at, int more, Waiting *waiting,
                      PutWaiting put, const int codes))[COLUMNS] {
    int64_t height = split->height / 2, block = at.block * split->height, last = split->rows - height;
    int64_t start = block < last ? block : last, next = block + height < last ? block + height : last;
    int two = block + height < split->rows, tiles = two || !WIDE ? ACROSS : 4; /* columns per pass */
    const char *first = x + (split->from + start) * bytes, *second = x + (split->from + next) * bytes;
    int64_t passes = PANEL / (tiles * TILE_COLUMNS);
    Pace pace = {waiting->left, bytes / STEP * passes, 0};
    char tails[2][TILE_ROWS][TILE_BYTES];
    vf (*room)[COLUMNS] = waiting->rooms[waiting->turn];
    Fetch fetch = fetch_for(panel, bytes, at, more, passes);
    if (bytes % STEP) {
        copy_tails(first, bytes, height, tails[0]);
        if (two) copy_tails(second, bytes, height, tails[1]);
    }
    for (int64_t column = 0; column < PANEL; column += tiles * TILE_COLUMNS) {
        float *sums = (float *)room + column, *others = two ? sums + (next - start) * PANEL : sums + 2 * TILE_COLUMNS;
        if (two)
            sum_columns(first, second, tails, bytes, panel + column * 4, &fetch, waiting, &pace, put, TWO, codes);
        else
            sum_columns(first, first, tails, bytes, panel + column * 4, &fetch, waiting, &pace, put,
                        WIDE ? ONE_WIDE : ONE, codes);
        tile_store(0, sums, PANEL * 4);
        if (ACROSS == 2) tile_store(1, sums + TILE_COLUMNS, PANEL * 4);
        if (two || WIDE) tile_store(2, others, PANEL * 4);
        if ((two && ACROSS == 2) || WIDE) tile_store(3, others + TILE_COLUMNS, PANEL * 4);
    }
    if (waiting->left) put(waiting, waiting->left);
    return room + (block - start);
}

/* Makes the block the waiting one. */
INLINE void let_wait(Waiting *waiting, vf (*sums)[COLUMNS], const Weight *weight, void *y, int64_t row, int64_t rows,
                     int64_t panel, int64_t kind, const float *row_scales) {
    waiting->sums = sums, waiting->weight = *weight, waiting->y = y, waiting->row = row, waiting->left = rows;
    waiting->panel = panel, waiting->kind = kind, waiting->row_scales = row_scales, waiting->turn = !waiting->turn;
}
INLINE void begin_waiting(Waiting *waiting) { waiting->turn = waiting->left = 0; }
#else
typedef struct {
    char none;
} Waiting;
INLINE void begin_waiting(Waiting *waiting) { (void)waiting; }
#endif

/* Called by every thread of a team, before blocks of this height and after them. */
INLINE void begin_tiles(const RowSplit *split, int in_tiles) {
#if TILES
    TileShapes shapes = {0};
    if (!in_tiles || !split->rows) return;
    for (int i = 0; i < 4; i++) shape_sum(&shapes, i, split->height / 2, TILE_COLUMNS);
    for (int i = 4; i < 6; i++) shape_x(&shapes, i, split->height / 2);
    for (int i = 6; i < 8; i++) shape_weight(&shapes, i, TILE_COLUMNS);
    tiles_configure(&shapes);
#else
    (void)split, (void)in_tiles;
#endif
}

INLINE void end_tiles(int in_tiles) {
#if TILES
    if (in_tiles) tiles_release();
#else
    (void)in_tiles;
#endif
}
