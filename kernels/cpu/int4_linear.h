/* Matrix products with int4 weights that have a scale per output and group of inputs; included once per dtype.
 * Activations are quantised as in quantized_linear.h. A panel packs two words of four inputs into one, the first word
 * in the lower halves of its bytes. An upper half, read as a byte, is 16 times its value with the sign, so neither half
 * needs sign extension; scales are packed 16 times smaller. The sums of a group are exact integers and are added up in
 * float, group by group: a row's result depends only on the row. */

#define INT4_ROWS 3 /* rows for which the sums of a group and of all groups fit the registers */
INLINE vi low_codes(vi word) { return (word << 4) & (int32_t)0xf0f0f0f0; }
INLINE vi high_codes(vi word) { return word & (int32_t)0xf0f0f0f0; }

/* Computes the exact sums of one group, `pairs` pairs of words, of `rows` (a constant) rows with one panel; with
 * `zeroed` (a constant) also the sums of the rows' values, in every lane. */
INLINE void int4_group(const uint8_t *x, const vi *weight, int64_t pairs, int64_t stride, Ahead *ahead,
                       vi sums[INT4_ROWS][COLUMNS], vi codes[INT4_ROWS], const int rows, const int zeroed) {
    for (int r = 0; r < rows; r++) {
        codes[r] = splat_word(0);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = splat_word(0);
    }
    for (int64_t i = 0; i < pairs; i++, weight += COLUMNS) {
        if (i % FETCHED == 0) fetch_ahead(ahead);
        Four fours[INT4_ROWS][2];
        for (int r = 0; r < rows; r++) {
            memcpy(fours[r], x + r * stride + i * 8 * CODE_BYTES, sizeof fours[r]);
            if (zeroed)
                for (int half = 0; half < 2; half++)
                    codes[r] = dot_four(codes[r], fours[r][half], splat_word(0x01010101));
        }
        for (int c = 0; c < COLUMNS; c++) {
            vi low = low_codes(weight[c]), high = high_codes(weight[c]);
            for (int r = 0; r < rows; r++)
                sums[r][c] = dot_four(dot_four(sums[r][c], fours[r][0], low), fours[r][1], high);
        }
    }
}

/* Computes the results of `rows` (a constant) rows with one panel. */
INLINE void NAME(int4_tile)(const uint8_t *x, const float *row_scales, const Weight *w, int64_t panel, Ahead ahead,
                            vf result[][COLUMNS], const int rows, const int zeroed) {
    int64_t stride = codes_of(w->inputs), all = (w->inputs + 7) / 8, per = w->group / 8, groups = (all + per - 1) / per;
    const vi *weight = (const vi *)w->panels + panel * (padded(w->inputs) / 8) * COLUMNS;
    const vf *scales = (const vf *)w->scales + panel * groups * COLUMNS, *zeros = NULL;
    if (zeroed) zeros = (const vf *)w->zeros + panel * groups * COLUMNS;
    vf total[INT4_ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) total[r][c] = ((const vf *)w->starts)[panel * COLUMNS + c];
    for (int64_t first = 0; first < all; first += per, scales += COLUMNS, zeros += zeroed ? COLUMNS : 0) {
        int64_t pairs = all - first < per ? all - first : per;
        vi sums[INT4_ROWS][COLUMNS], codes[INT4_ROWS];
        int4_group(x + first * 8 * CODE_BYTES, weight + first * COLUMNS, pairs, stride, &ahead, sums, codes, rows, zeroed);
        for (int r = 0; r < rows; r++) {
            vf all_codes = splat(0.0f);
            if (zeroed) all_codes = __builtin_convertvector(codes[r] - (int32_t)(pairs * 8 * 128), vf);
            for (int c = 0; c < COLUMNS; c++) {
                total[r][c] = fused(__builtin_convertvector(sums[r][c], vf), scales[c], total[r][c]);
                if (zeroed) total[r][c] = fused(all_codes, zeros[c], total[r][c]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) result[r][c] = total[r][c] * row_scales[r];
}

/* As `quantized_block`. */
static void NAME(int4_block)(const uint8_t *codes, const float *row_scales, const Weight *w, void *y, const RowSplit *split,
                             Place at, int64_t kind) {
    int64_t bytes = padded(w->inputs), row = split->from + at.block * split->height, rows = rows_of(split, at.block);
    int64_t stride = codes_of(w->inputs);
    int more = at.panel + 1 < panels_of(w->outputs, is_gated(kind));
    const char *panel = (const char *)w->panels + at.panel * bytes / 8 * PANEL * 4;
    vf sums[ROWS][COLUMNS];
    for (int64_t done = 0; done < rows; done += INT4_ROWS) {
        const Ahead ahead = ahead_of(panel, bytes / 8, at.turn * 2 + done / INT4_ROWS, at.turns * 2, rows, more);
#define CASE(n) \
    case n: \
        if (w->zeros) \
            NAME(int4_tile)(codes + (row + done) * stride, row_scales + row + done, w, at.panel, ahead, sums + done, n, 1); \
        else \
            NAME(int4_tile)(codes + (row + done) * stride, row_scales + row + done, w, at.panel, ahead, sums + done, n, 0); \
        break;
        switch (rows - done < INT4_ROWS ? rows - done : INT4_ROWS) { CASE(1) CASE(2) CASE(3) }
#undef CASE
    }
    NAME(put_block)(sums, w, y, row, rows, at.panel, kind);
}

#if TILES
#include "int4_tiles.h"
#endif
