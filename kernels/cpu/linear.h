/* Matrix products with a weight that is packed once; included once per dtype.
 *
 * The weight of `outputs` x `inputs` is split into panels of PANEL outputs. A panel stores, word by word of the inputs
 * (by pairs of words if `word_at` pairs them), that word of each of its outputs. A tile of ROWS x PANEL sums stays in
 * registers while it reads the panel. Every sum runs over the inputs in order, in its own lane: a result does not
 * depend on the number of rows.
 *
 * A gated weight has gate above up. A panel then holds PANEL / 2 of each, so act(gate) * up needs no second pass.
 */

#define IN_TILES (TILES && PAIR == 2) /* for any number of rows, because tiles add in another order than vectors */
#define BY_MMLA (MMLA_BF16 && PAIR == 2)

#define WORDS 64 /* words of a row that packing copies at once: whole cache lines, and a panel's rows stay in the L1 cache */

/* packed: (panels, words, PANEL) words, padded with zeros. A run of every row is copied before any of it is written,
 * because rows a power of two apart would otherwise evict each other's lines after each word. */
void NAME(pack_linear)(const REAL *weight, int64_t outputs, int64_t inputs, int64_t gated, REAL *packed) {
    int64_t bytes = inputs * (int64_t)sizeof(REAL), words = words_of(bytes), panels = panels_of(outputs, gated);
#pragma omp parallel for schedule(dynamic, 4) /* dynamic, because a core may be reading the next layer */
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t from = 0; from < words; from += WORDS) {
            uint32_t runs[PANEL][WORDS], *to = (uint32_t *)packed + panel * words * PANEL;
            int64_t rest = bytes - from * 4, size = rest < WORDS * 4 ? rest < 0 ? 0 : rest : WORDS * 4;
            for (int64_t column = 0; column < PANEL; column++) {
                int64_t output = output_of(panel, column, outputs, gated), held = output < 0 ? 0 : size;
                if (held) memcpy(runs[column], (const char *)(weight + output * inputs) + from * 4, held);
                memset((char *)runs[column] + held, 0, WORDS * 4 - held);
            }
            int64_t until = words - from < WORDS ? words - from : WORDS;
            for (int64_t i = 0; i < until; i++)
                for (int64_t column = 0; column < PANEL; column++)
                    memcpy(to + word_at(from + i, column, BY_MMLA), &runs[column][i], sizeof **runs);
        }
}

#undef WORDS

/* Writes the sums of `rows` rows with one panel to y, whose rows are `stride` values apart. */
static void NAME(put_plain)(vf sums[ROWS][COLUMNS], const vf *bias, REAL *y, int64_t stride, int rows) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) STOREV(y + r * stride + c * LANES, sums[r][c] + bias[c]);
}

static void NAME(put_float)(vf sums[ROWS][COLUMNS], const vf *bias, float *y, int64_t stride, int rows) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) store_f32(y + r * stride + c * LANES, sums[r][c] + bias[c]);
}

/* `kind` is a constant. */
INLINE void NAME(put_curve)(vf sums[ROWS][COLUMNS], const vf *bias, REAL *y, int64_t stride, int rows, const int kind) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++)
            STOREV(y + r * stride + c * LANES, gate_factor(ROUNDV(sums[r][c] + bias[c]), kind, COARSE));
}

static void NAME(put_activated)(vf sums[ROWS][COLUMNS], const vf *bias, REAL *y, int64_t stride, int rows, int kind) {
    if (kind == SILU)
        NAME(put_curve)(sums, bias, y, stride, rows, SILU);
    else if (kind == GELU)
        NAME(put_curve)(sums, bias, y, stride, rows, GELU);
    else
        NAME(put_curve)(sums, bias, y, stride, rows, EXACT_GELU);
}

/* `kind` is a constant. */
INLINE void NAME(put_product)(vf sums[ROWS][COLUMNS], const vf *bias, REAL *y, int64_t stride, int rows, const int kind) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS / 2; c++) {
            vf gate = ROUNDV(sums[r][c] + bias[c]), up = ROUNDV(sums[r][COLUMNS / 2 + c] + bias[COLUMNS / 2 + c]);
            STOREV(y + r * stride + c * LANES, ROUNDV(gate_factor(gate, kind, COARSE)) * ROUNDV(up_factor(up, kind)));
        }
}

static void NAME(put_gated)(vf sums[ROWS][COLUMNS], const vf *bias, REAL *y, int64_t stride, int rows, int kind) {
    if (kind == GATED)
        NAME(put_product)(sums, bias, y, stride, rows, GATED);
    else if (kind == GELU_GATED)
        NAME(put_product)(sums, bias, y, stride, rows, GELU_GATED);
    else if (kind == CLAMPED_GATED)
        NAME(put_product)(sums, bias, y, stride, rows, CLAMPED_GATED);
    else
        NAME(put_product)(sums, bias, y, stride, rows, EXACT_GELU_GATED);
}

/* Only `columns` of the panel's results belong to y; the last panel may have padding. */
INLINE void NAME(put)(vf sums[ROWS][COLUMNS], const REAL *bias, void *y, int64_t at, int64_t stride, int64_t columns,
                      int kind, int rows) {
    float room[ROWS * PANEL];
    int64_t width = is_gated(kind) ? PANEL / 2 : PANEL, size = kind == FLOAT ? sizeof(float) : sizeof(REAL);
    char *to = columns < width ? (char *)room : (char *)y + at * size;
    int64_t step = columns < width ? width : stride;
    vf added[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) added[c] = bias ? LOADV(bias + c * LANES) : splat(0.0f);
    if (kind == GREATEST) {
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) sums[r][c] += added[c];
        put_greatest(sums, (uint64_t *)y + at / stride, at % stride, columns, rows);
        return;
    }
    if (is_gated(kind))
        NAME(put_gated)(sums, added, (REAL *)to, step, rows, kind);
    else if (is_activated(kind))
        NAME(put_activated)(sums, added, (REAL *)to, step, rows, kind);
    else if (kind == FLOAT)
        NAME(put_float)(sums, added, (float *)to, step, rows);
    else
        NAME(put_plain)(sums, added, (REAL *)to, step, rows);
    if (columns < width)
        for (int r = 0; r < rows; r++) memcpy((char *)y + (at + r * stride) * size, to + r * width * size, columns * size);
}

/* Writes the results of `rows` rows from `row` on with a panel; `put` defines y. */
INLINE void NAME(put_block)(vf (*sums)[COLUMNS], const Weight *w, void *y, int64_t row, int64_t rows, int64_t panel,
                            int64_t kind) {
    int64_t wanted = is_gated(kind) ? w->outputs / 2 : w->outputs, width = is_gated(kind) ? PANEL / 2 : PANEL;
    int64_t columns = wanted - panel * width < width ? wanted - panel * width : width;
    const REAL *bias = w->bias ? (const REAL *)w->bias + panel * PANEL : NULL;
    if (w->added) add_adapted(sums, w, row, rows, panel, is_gated(kind));
    for (int64_t r = 0; r < rows; r += ROWS)
        NAME(put)(sums + r, bias, y, (row + r) * wanted + panel * width, wanted, columns, kind,
                  rows - r < ROWS ? rows - r : ROWS);
}

/* Scales the integer sums of `rows` rows, which started at 0. */
INLINE void NAME(scale_sums)(vf (*sums)[COLUMNS], const float *row_scales, const int32_t *starts, const float *scales,
                             int64_t rows) {
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++)
            sums[r][c] = __builtin_convertvector((vi)sums[r][c] + ((const vi *)starts)[c], vf) *
                         (load_f32(scales + c * LANES) * row_scales[r]);
}

#if TILES
/* Writes `rows` rows of the waiting block, or the rest of it. */
static void NAME(put_waiting)(Waiting *b, int64_t rows) {
    int64_t count = rows < b->left ? rows : b->left, from = b->panel * PANEL;
    if (b->row_scales)
        NAME(scale_sums)(b->sums, b->row_scales + b->row, b->weight.starts + from, b->weight.scales + from, count);
    NAME(put_block)(b->sums, &b->weight, b->y, b->row, count, b->panel, b->kind);
    b->sums += count, b->row += count, b->left -= count;
}
#endif

/* Writes a thread's last block of a product. */
INLINE void NAME(end_waiting)(Waiting *waiting) {
#if TILES
    if (waiting->left) NAME(put_waiting)(waiting, waiting->left);
#else
    (void)waiting;
#endif
}

/* Adds one word of `rows` (a constant) rows. */
INLINE void NAME(add_word)(const REAL *x, const vi *weight, int64_t inputs, vf sums[ROWS][COLUMNS], const int rows) {
    for (int r = 0; r < rows; r++) {
        int32_t word;
        memcpy(&word, x + r * inputs, 4);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = DOT(sums[r][c], splat_word(word), weight[c]);
    }
}

/* Computes the sums of `rows` (a constant) rows with one panel. */
INLINE void NAME(linear_tile)(const REAL *x, const REAL *panel, Ahead ahead, int64_t inputs,
                              vf sums[ROWS][COLUMNS], const int rows) {
    const vi *weight = (const vi *)panel;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = splat(0.0f);
    int64_t words = inputs / PAIR, i = 0;
    while (i + FETCHED <= words) {
        fetch_ahead(&ahead);
        for (int end = i + FETCHED; i < end; i++, weight += COLUMNS)
            NAME(add_word)(x + i * PAIR, weight, inputs, sums, rows);
    }
    for (; i < words; i++, weight += COLUMNS) NAME(add_word)(x + i * PAIR, weight, inputs, sums, rows);
    if (inputs % PAIR) /* half a word: the other half must not be read */
        for (int r = 0; r < rows; r++) {
            int32_t word = 0;
            memcpy(&word, x + r * inputs + words * PAIR, sizeof(REAL));
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = DOT(sums[r][c], splat_word(word), weight[c]);
        }
}

/* Multiplies a block of rows by a panel of w at `panel`; `more`: the next panel follows it. */
INLINE void NAME(panel_block)(const REAL *x, const Weight *w, const char *panel, int more, void *y, const RowSplit *split,
                              Place at, Waiting *waiting, int64_t kind) {
    int64_t inputs = w->inputs, bytes = inputs * (int64_t)sizeof(REAL);
    int64_t row = split->from + at.block * split->height, rows = rows_of(split, at.block);
#if IN_TILES
    vf (*sums)[COLUMNS] = tile_sums((const char *)x, bytes, split, panel, at, more, waiting, NAME(put_waiting), 0);
    let_wait(waiting, sums, w, y, row, rows, at.panel, kind, NULL);
#else
    const Ahead ahead = ahead_of(panel, words_of(bytes), at.turn, at.turns, rows, more);
    vf sums[ROWS][COLUMNS];
    (void)waiting;
#if BY_MMLA
    mmla_sums((const char *)(x + row * inputs), bytes, panel, ahead, rows, sums, 0);
#else
#define CASE(n) \
    case n: NAME(linear_tile)(x + row * inputs, (const REAL *)panel, ahead, inputs, sums, n); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
#endif
    NAME(put_block)(sums, w, y, row, rows, at.panel, kind);
#endif
}

INLINE void NAME(linear_block)(const REAL *x, const Weight *w, void *y, const RowSplit *split, Place at, Waiting *waiting,
                               int64_t kind) {
    int64_t words = words_of(w->inputs * (int64_t)sizeof(REAL));
    int more = at.panel + 1 < panels_of(w->outputs, is_gated(kind));
    const char *panel = (const char *)w->panels + at.panel * words * PANEL * 4;
    NAME(panel_block)(x, w, panel, more, y, split, at, waiting, kind);
}

/* As `team_linear`, without waiting for the results of other threads. */
TEAM void NAME(team_linear_unawaited)(const REAL *x, const Weight *w, void *y, int64_t rows, int64_t kind) {
    int64_t panels = panels_of(w->outputs, is_gated(kind));
    const RowSplit split = split_rows(0, rows, w->inputs * (int64_t)sizeof(REAL), IN_TILES);
    Waiting waiting;
    begin_waiting(&waiting);
    begin_tiles(&split, IN_TILES);
#pragma omp for schedule(guided, 1) nowait
    for (int64_t at = 0; at < split.blocks * panels; at++)
        NAME(linear_block)(x, w, y, &split, place(at, &split, panels), &waiting, kind);
    NAME(end_waiting)(&waiting);
    end_tiles(IN_TILES);
}

/* x: (rows, inputs); y: (rows, outputs), or (rows, outputs / 2) if gated, or float (rows, outputs), or for GREATEST
 * (rows,) zeros that receive `ranked` results. */
TEAM void NAME(team_linear)(const REAL *x, const Weight *w, void *y, int64_t rows, int64_t kind) {
    NAME(team_linear_unawaited)(x, w, y, rows, kind);
#pragma omp barrier
}

void NAME(linear)(const REAL *x, const Weight *weight, void *y, int64_t rows, int64_t kind) {
#pragma omp parallel
    NAME(team_linear)(x, weight, y, rows, kind);
}
