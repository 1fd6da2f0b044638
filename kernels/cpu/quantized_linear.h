/* Matrix products in int8: weights signed per output, activations unsigned (zero point 128) per row; included once a
 * dtype. Sums are exact integers, so a row's result depends on nothing but the row. Panels as in linear.h, four values
 * a word. Since sum((x + 128) w) = sum(x w) + 128 sum(w), each sum starts at -128 times its output's weights. */

/* Codes of one row, its scale in return. A value that is not a number makes the scale one. */
INLINE float NAME(quantize_row)(const REAL *x, int64_t inputs, uint8_t *codes) {
    float most = 0, bad = 0;
    int64_t whole = inputs / LANES * LANES;
    vf tops = splat(0.0f), strange = splat(0.0f);
    for (int64_t i = 0; i < whole; i += LANES) {
        vf v = LOADV(x + i), a = pick(v < 0.0f, -v, v);
        tops = pick(a > tops, a, tops);
        strange = fused(v, splat(0.0f), strange);
    }
    most = lane_max(tops), bad = lane_sum(strange);
    for (int64_t i = whole; i < inputs; i++) {
        float v = LOAD(x[i]), a = fabsf(v);
        most = a > most ? a : most, bad += v * 0.0f;
    }
    float scale = most / 127.0f, inverse = most > 0 && most < INFINITY ? 127.0f / most : 0.0f;
    for (int64_t i = 0; i < whole; i += LANES) {
        vf shifted = fused(LOADV(x + i), splat(inverse), splat(12582912.0f)); /* rounds to nearest, ties to even */
        store_bytes(codes + i, ((vi)shifted & 0xff) ^ 0x80);
    }
    for (int64_t i = whole; i < inputs; i++) {
        float shifted = fused_one(LOAD(x[i]), inverse, 12582912.0f);
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        codes[i] = (bits & 0xff) ^ 0x80;
    }
    for (int64_t i = inputs; i % 4; i++) codes[i] = 0x80;
    return scale + bad;
}

/* Exact sums of `rows` (a constant) rows with one panel, scaled. */
INLINE void NAME(quantized_tile)(const uint8_t *x, const float *row_scales, const int8_t *panel, const char *ahead,
                                 const int32_t *starts, const float *scales, int64_t words, vf result[ROWS][COLUMNS],
                                 const int rows) {
    vi sums[ROWS][COLUMNS];
    const vi *weight = (const vi *)panel;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = ((const vi *)starts)[c];
    int64_t i = 0;
    for (; i + FETCHED <= words; ahead += LINE) {
        __builtin_prefetch(ahead);
        for (int end = i + FETCHED; i < end; i++, weight += COLUMNS) add_codes(x + i * 4, weight, words, sums, rows);
    }
    for (; i < words; i++, weight += COLUMNS) add_codes(x + i * 4, weight, words, sums, rows);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++)
            result[r][c] = __builtin_convertvector(sums[r][c], vf) * (load_f32(scales + c * LANES) * row_scales[r]);
}

/* As `linear_block`, of rows that were quantised: `codes` (rows, inputs rounded up to 4) and `row_scales` (rows,). */
INLINE void NAME(quantized_block)(const uint8_t *codes, const float *row_scales, const Weight *w, void *y, int64_t row,
                                  int64_t rows, int64_t panel, int64_t turn, int64_t kind) {
    int64_t words = (w->inputs + 3) / 4, wanted = is_gated(kind) ? w->outputs / 2 : w->outputs;
    int64_t width = is_gated(kind) ? PANEL / 2 : PANEL, panels = panels_of(w->outputs, is_gated(kind));
    int64_t columns = wanted - panel * width < width ? wanted - panel * width : width;
    int64_t from = panel * PANEL, count = rows - row < ROWS ? rows - row : ROWS;
    const int8_t *weight = (const int8_t *)w->panels + from * words * 4;
    const char *ahead = ahead_of(weight, words, turn, panel + 1 < panels);
    const REAL *bias = w->bias;
    vf sums[ROWS][COLUMNS];
#define CASE(n) \
    case n: \
        NAME(quantized_tile)(codes + row * words * 4, row_scales + row, weight, ahead, w->starts + from, \
                             w->scales + from, words, sums, n); \
        break;
    switch (count) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
    NAME(put)(sums, bias ? bias + from : NULL, y, row * wanted + panel * width, wanted, columns, kind, count);
}

TEAM void NAME(team_quantize)(const REAL *x, int64_t inputs, uint8_t *codes, float *row_scales, int64_t rows) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        row_scales[row] = NAME(quantize_row)(x + row * inputs, inputs, codes + row * ((inputs + 3) / 4) * 4);
}

/* As `linear`, with packed codes; `codes` and `row_scales` are room to work in. */
TEAM void NAME(team_quantized_linear)(const REAL *x, const Weight *w, void *y, uint8_t *codes, float *row_scales,
                                        int64_t rows, int64_t kind) {
    int64_t panels = panels_of(w->outputs, is_gated(kind));
    int64_t blocks = (rows + ROWS - 1) / ROWS, per = CHUNK_BYTES / (ROWS * w->inputs) + 1;
    NAME(team_quantize)(x, w->inputs, codes, row_scales, rows);
#pragma omp for schedule(guided, 1)
    for (int64_t at = 0; at < blocks * panels; at++) {
        int64_t block, panel, turn;
        place(at, per, blocks, panels, &block, &panel, &turn);
        NAME(quantized_block)(codes, row_scales, w, y, block * ROWS, rows, panel, turn, kind);
    }
}

void NAME(quantized_linear)(const REAL *x, const Weight *weight, void *y, uint8_t *codes, float *row_scales, int64_t rows,
                            int64_t kind) {
#pragma omp parallel
    NAME(team_quantized_linear)(x, weight, y, codes, row_scales, rows, kind);
}
