/* Matrix products with a weight packed once; included once a dtype.
 *
 * The weight of `outputs` x `inputs` is cut into panels of PANEL outputs. A panel holds, word after word of the inputs,
 * that word of each of its outputs: a tile of ROWS x PANEL sums stays in registers while it runs down the panel. Every
 * sum runs over the inputs in order, alone in its lane: a result does not depend on how many rows it is computed with.
 *
 * A gated weight has gate above up; a panel then holds PANEL / 2 of each, so that act(gate) * up needs no second pass.
 */

/* packed: (panels, words, PANEL) words, columns and values without a weight zero. */
void NAME(pack_linear)(const REAL *weight, int64_t outputs, int64_t inputs, int64_t gated, REAL *packed) {
    int64_t words = (inputs + PAIR - 1) / PAIR, panels = panels_of(outputs, gated);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t i = 0; i < words; i++)
            for (int64_t column = 0; column < PANEL; column++) { /* writes in order; reads PANEL rows side by side */
                int64_t output = output_of(panel, column, outputs, gated), rest = inputs - i * PAIR;
                REAL word[PAIR] = {0};
                if (output >= 0)
                    memcpy(word, weight + output * inputs + i * PAIR, rest < PAIR ? sizeof(REAL) : sizeof word);
                memcpy(packed + ((panel * words + i) * PANEL + column) * PAIR, word, sizeof word);
            }
}

/* Write one row of sums: `columns` of them belong to y. */
INLINE void NAME(put)(const vf *sums, const REAL *bias, REAL *y, float *wide, int64_t columns, int kind) {
    vf value[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) value[c] = sums[c];
    if (bias)
        for (int c = 0; c < COLUMNS; c++) value[c] += LOADV(bias + c * LANES);
    if (kind == GATED) {
        REAL rounded[PANEL], result[PANEL / 2];
        for (int c = 0; c < COLUMNS; c++) STOREV(rounded + c * LANES, value[c]);
        for (int c = 0; c < COLUMNS / 2; c++) {
            STOREV(result + c * LANES, silu(LOADV(rounded + c * LANES)));
            STOREV(result + c * LANES, LOADV(result + c * LANES) * LOADV(rounded + PANEL / 2 + c * LANES));
        }
        memcpy(y, result, columns * sizeof(REAL));
    } else if (kind == FLOAT) {
        if (columns == PANEL)
            for (int c = 0; c < COLUMNS; c++) store_f32(wide + c * LANES, value[c]);
        else
            memcpy(wide, value, columns * sizeof(float));
    } else if (columns == PANEL) {
        for (int c = 0; c < COLUMNS; c++) STOREV(y + c * LANES, value[c]);
    } else {
        REAL result[PANEL];
        for (int c = 0; c < COLUMNS; c++) STOREV(result + c * LANES, value[c]);
        memcpy(y, result, columns * sizeof(REAL));
    }
}

/* Sums of `rows` (a constant) rows with one panel. */
INLINE void NAME(linear_tile)(const REAL *x, const REAL *panel, int64_t inputs, vf sums[ROWS][COLUMNS], const int rows) {
    const vi *weight = (const vi *)panel;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = splat(0.0f);
    int64_t words = inputs / PAIR;
    for (int64_t i = 0; i < words; i++, weight += COLUMNS)
        for (int r = 0; r < rows; r++) {
            int32_t word;
            memcpy(&word, x + r * inputs + i * PAIR, 4);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = DOT(sums[r][c], splat_word(word), weight[c]);
        }
    if (inputs % PAIR) /* half a word: its other half must not be read */
        for (int r = 0; r < rows; r++) {
            int32_t word = 0;
            memcpy(&word, x + r * inputs + words * PAIR, sizeof(REAL));
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = DOT(sums[r][c], splat_word(word), weight[c]);
        }
}

INLINE void NAME(linear_rows)(const REAL *x, const REAL *panel, const REAL *bias, REAL *y, float *wide, int64_t stride,
                              int64_t inputs, int64_t columns, int kind, const int rows) {
    vf sums[ROWS][COLUMNS];
    NAME(linear_tile)(x, panel, inputs, sums, rows);
    for (int r = 0; r < rows; r++) NAME(put)(sums[r], bias, y + r * stride, wide + r * stride, columns, kind);
}

/* x: (rows, inputs); y: (rows, outputs), or (rows, outputs / 2) gated, or float (rows, outputs). `bias` lies in the
 * order of the panels (their columns, padding included) and may be NULL. */
void NAME(linear)(const REAL *x, const REAL *packed, const REAL *bias, void *y, int64_t rows, int64_t outputs,
                  int64_t inputs, int64_t kind) {
    int64_t words = (inputs + PAIR - 1) / PAIR, wanted = kind == GATED ? outputs / 2 : outputs;
    int64_t width = kind == GATED ? PANEL / 2 : PANEL, panels = panels_of(outputs, kind == GATED);
    int64_t blocks = (rows + ROWS - 1) / ROWS, per = CHUNK_BYTES / (ROWS * inputs * (int64_t)sizeof(REAL)) + 1;
#pragma omp parallel
    {
        int64_t threads = omp_get_num_threads(), me = omp_get_thread_num(), total = blocks * panels;
        for (int64_t at = total * me / threads; at < total * (me + 1) / threads; at++) {
            int64_t block, panel;
            place(at, per, blocks, panels, &block, &panel);
            int64_t row = block * ROWS, columns = wanted - panel * width < width ? wanted - panel * width : width;
            int64_t to = row * wanted + panel * width;
            const REAL *some = bias ? bias + panel * PANEL : NULL, *weight = packed + panel * words * PANEL * PAIR;
#define CASE(n) \
    case n: \
        NAME(linear_rows)(x + row * inputs, weight, some, (REAL *)y + to, (float *)y + to, wanted, inputs, columns, \
                          kind, n); \
        break;
            switch (rows - row < ROWS ? rows - row : ROWS) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
        }
    }
}
