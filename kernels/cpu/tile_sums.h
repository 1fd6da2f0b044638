/* Products in tiles, for bfloat16 and for codes. Panels need no other layout for it: 16 words of 16 of a panel's columns,
 * PANEL words apart, are a tile as it is multiplied. Two tiles of rows meet two of columns, so that each that is loaded is
 * multiplied twice. One tile of rows meets a panel's four: a product takes several times as long as it takes to begin the
 * next one, so four sums side by side keep the hardware busy where two would wait for themselves.
 *
 * A row's sum runs over its words in steps of 16, whatever the other rows are: row by row the hardware does the same, and a
 * tile of fewer rows is one that is configured with fewer. Where the last tile has too few it begins earlier, in rows that
 * another tile has, too; those are dropped. Nothing beside x is read: a row's end that fills no step is copied, and zeros
 * after it.
 */
#define TILE_COLUMNS (PANEL < 16 ? PANEL : 16)
#define ACROSS (PANEL > TILE_COLUMNS ? 2 : 1) /* tiles of columns side by side */
#define WIDE (PANEL == 4 * TILE_COLUMNS)
enum { TWO, ONE, ONE_WIDE }; /* tiles of rows: two or one with ACROSS of columns, or one with four */

#if TILES
/* A block whose results wait to be written: while the tiles of the next block are multiplied, vectors scale, activate and
 * round the rows of this one. A thread has one at a time, and none before its first block. */
typedef struct {
    ON_LINES vf rooms[2][2 * TILE_ROWS][COLUMNS]; /* where it is, and where the next one is summed */
    vf (*sums)[COLUMNS];                          /* of its first row that is not written */
    int64_t turn, row, left, panel, kind;
    Weight weight;
    void *y;
    const float *row_scales; /* where its sums are those of codes */
} Waiting;
typedef void (*PutWaiting)(Waiting *, int64_t); /* writes some rows of it */

/* Rows that are written evenly over steps: after each one as many as are due. */
typedef struct {
    int64_t rows, steps, owed; /* rows in all, steps in all; rows times steps that are not paid off */
} Pace;

INLINE int64_t rows_due(Pace *pace) {
    pace->owed += pace->rows;
    if (pace->owed < pace->steps) return 0;
    int64_t due = pace->owed / pace->steps;
    pace->owed -= due * pace->steps;
    return due;
}

/* What a block fetches of the panel after its own: a part for each of the blocks that meet the panel, some lines a step. */
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
        if (codes) \
            tile_dot_int8(sum, x, weight); \
        else \
            tile_dot_bf16(sum, x, weight); \
    } while (0)

/* 16 words of tiles of rows with those of tiles of columns, as the `form` (a constant) says. Sums are in tiles 0 to 3. */
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

/* Sums of rows from `first` and from `second` on with the columns of one pass. After a step those rows of the block
 * that waits are written which are due. */
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

/* The ends of `height` rows that fill no step. */
INLINE void copy_tails(const char *x, int64_t bytes, int64_t height, char tails[TILE_ROWS][TILE_BYTES]) {
    int64_t tail = bytes % STEP;
    memset(tails, 0, TILE_ROWS * TILE_BYTES);
    for (int64_t row = 0; row < height; row++) memcpy(tails[row], x + (row + 1) * bytes - tail, tail);
}

/* Sums of a block of rows of x, of `bytes` each, with a panel; in return its first row. The block that waits is written by
 * `put` on the way. `codes` (a constant): x are codes, and sums integers. */
INLINE vf (*tile_sums(const char *x, int64_t bytes, const Cut *cut, const char *panel, Place at, int more, Waiting *waiting,
                      PutWaiting put, const int codes))[COLUMNS] {
    int64_t height = cut->height / 2, block = at.block * cut->height, last = cut->rows - height;
    int64_t start = block < last ? block : last, next = block + height < last ? block + height : last;
    int two = block + height < cut->rows, tiles = two || !WIDE ? ACROSS : 4; /* of columns, in a pass */
    const char *first = x + (cut->from + start) * bytes, *second = x + (cut->from + next) * bytes;
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

/* The block waits from now on. */
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

/* Every thread of a team, before blocks of this height and after them. */
INLINE void begin_tiles(const Cut *cut, int in_tiles) {
#if TILES
    TileShapes shapes = {0};
    if (!in_tiles || !cut->rows) return;
    for (int i = 0; i < 4; i++) shape_sum(&shapes, i, cut->height / 2, TILE_COLUMNS);
    for (int i = 4; i < 6; i++) shape_x(&shapes, i, cut->height / 2);
    for (int i = 6; i < 8; i++) shape_weight(&shapes, i, TILE_COLUMNS);
    tiles_configure(&shapes);
#else
    (void)cut, (void)in_tiles;
#endif
}

INLINE void end_tiles(int in_tiles) {
#if TILES
    if (in_tiles) tiles_release();
#else
    (void)in_tiles;
#endif
}
