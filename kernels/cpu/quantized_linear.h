/* Matrix products in int8: weights signed, with a scale per output; activations unsigned (zero point 128), with a scale
 * per row; included once per dtype. Sums are exact integers, so a row's result depends only on the row. Panels are as
 * in linear.h, with four values per word. Since sum((x + 128) w) = sum(x w) + 128 sum(w), each sum starts at -128 times
 * the sum of its output's weights. A weight with `hadamard` multiplies transformed rows, as in quantized_linear.py. */

/* Adding it to a number below 2^22 leaves the nearest integer, ties to even, in the lowest bits. */
#define NEAREST 12582912.0f
#define NEAREST_BITS 0x4b400000
#define HADAMARD 64 /* the largest block of the Hadamard transform; as in quantized_linear.py */

/* 1 and -1: at `distance` - 1, for the sums and the differences of lanes that are `distance` apart. */
static const float hadamard_signs[8][16] = {
    [0] = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
    [1] = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
    [3] = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
    [7] = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
};

/* Replaces each pair of lanes `distance` (a constant) apart by its sum and its difference. */
INLINE void transform_lanes(vf v[HADAMARD / LANES], const int distance) {
    if (distance >= LANES) return;
    vf signs = load_f32(hadamard_signs[distance - 1]);
    for (int i = 0; i < HADAMARD / LANES; i++) v[i] = fused(v[i], signs, exchanged(v[i], distance));
}

/* Replaces each pair of vectors `distance` (a constant) apart by its sum and its difference. */
INLINE void transform_vectors(vf v[HADAMARD / LANES], const int distance) {
    for (int i = 0; distance < HADAMARD / LANES && i < HADAMARD / LANES; i++) {
        vf first = v[i], second = v[i ^ distance];
        if (!(i & distance)) v[i] = first + second, v[i ^ distance] = first - second;
    }
}

/* Transforms a block of HADAMARD values: adds and subtracts neighbours, then pairs, at last both halves. */
INLINE void transform_block(vf v[HADAMARD / LANES]) {
    transform_lanes(v, 1), transform_lanes(v, 2), transform_lanes(v, 4), transform_lanes(v, 8);
    transform_vectors(v, 1), transform_vectors(v, 2), transform_vectors(v, 4), transform_vectors(v, 8);
}

/* Converts `count` values to floats. `block`: transforms each block of as many values; `count` is a multiple. */
INLINE void NAME(load_floats)(const REAL *x, int64_t count, int64_t block, float *to) {
    int64_t i = 0;
    for (; block == HADAMARD && i < count; i += HADAMARD) {
        vf v[HADAMARD / LANES];
        for (int n = 0; n < HADAMARD / LANES; n++) v[n] = LOADV(x + i + n * LANES);
        transform_block(v);
        for (int n = 0; n < HADAMARD / LANES; n++) store_f32(to + i + n * LANES, v[n]);
    }
    for (; i + LANES <= count; i += LANES) store_f32(to + i, LOADV(x + i));
    for (; i < count; i++) to[i] = LOAD(x[i]);
    for (int64_t distance = 1; block < HADAMARD && distance < block; distance *= 2)
        for (int64_t n = 0; n < count; n++)
            if (!(n & distance)) {
                float first = to[n], second = to[n + distance];
                to[n] = first + second, to[n + distance] = first - second;
            }
}

#define KEPT_FLOATS 8192 /* of a row, 32 KiB; longer rows are converted twice */

/* Returns the largest magnitude of a row; infinite or NaN if a value is. Compares integers, which sort like the
 * magnitudes. `kept`: receives the floats of the row, or of its last KEPT_FLOATS values. */
INLINE float NAME(greatest_size)(const REAL *x, int64_t inputs, int64_t block, float *kept) {
    vi tops = splat_word(0);
    int32_t most = 0, bits;
    for (int64_t from = 0; from < inputs; from += KEPT_FLOATS) {
        int64_t i = 0, count = inputs - from < KEPT_FLOATS ? inputs - from : KEPT_FLOATS;
        NAME(load_floats)(x + from, count, block, kept);
        for (; i + LANES <= count; i += LANES) tops = larger_word(tops, *(const vi *)(kept + i) & 0x7fffffff);
        for (; i < count; i++) {
            memcpy(&bits, kept + i, 4);
            bits &= 0x7fffffff;
            most = bits > most ? bits : most;
        }
    }
    bits = largest_word(tops);
    most = bits > most ? bits : most;
    float found;
    memcpy(&found, &most, 4);
    return found;
}

/* Quantises one row and returns its scale; if a value is not finite, the scale is not finite and the values are
 * arbitrary. */
INLINE float NAME(quantize_row)(const REAL *x, int64_t inputs, int64_t block, uint8_t *codes, const int past) {
    ON_LINES float kept[KEPT_FLOATS];
    float most = NAME(greatest_size)(x, inputs, block, kept), inverse = most > 0 && most < INFINITY ? 127.0f / most : 0.0f;
    float shift = NEAREST + 128.0f; /* the lowest byte is the value plus the zero point */
    for (int64_t from = 0; from < inputs; from += KEPT_FLOATS) {
        int64_t i = 0, count = inputs - from < KEPT_FLOATS ? inputs - from : KEPT_FLOATS;
        if (inputs > KEPT_FLOATS) NAME(load_floats)(x + from, count, block, kept);
        for (; i + 2 * LANES <= count; i += 2 * LANES) {
            vi a = (vi)fused(load_f32(kept + i), splat(inverse), splat(shift));
            vi b = (vi)fused(load_f32(kept + i + LANES), splat(inverse), splat(shift));
            put_codes(codes + (from + i) * CODE_BYTES, a, b, past);
        }
        for (; i < count; i++) {
            float shifted = fused_one(kept[i], inverse, shift);
            int32_t code;
            memcpy(&code, &shifted, 4);
            put_code(codes, from + i, code);
        }
    }
    for (int64_t i = inputs; i < padded(inputs); i++) put_code(codes, i, 0x80);
    return most < INFINITY ? most / 127.0f : NAN;
}

/* Computes the exact sums of `rows` (a constant) rows with one panel, scaled. */
INLINE void NAME(quantized_tile)(const uint8_t *x, const float *row_scales, const int8_t *panel, Ahead ahead,
                                 const int32_t *starts, const float *scales, int64_t inputs, vf result[ROWS][COLUMNS],
                                 const int rows) {
    int64_t words = (inputs + 3) / 4, stride = codes_of(inputs);
    vi sums[ROWS][COLUMNS];
    const vi *weight = (const vi *)panel;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = ((const vi *)starts)[c];
    int64_t i = 0;
    while (i + FETCHED <= words) {
        fetch_ahead(&ahead);
        for (int end = i + FETCHED; i < end; i++, weight += COLUMNS)
            add_codes(x + i * 4 * CODE_BYTES, weight, stride, sums, rows);
    }
    for (; i < words; i++, weight += COLUMNS) add_codes(x + i * 4 * CODE_BYTES, weight, stride, sums, rows);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++)
            result[r][c] = __builtin_convertvector(sums[r][c], vf) * (load_f32(scales + c * LANES) * row_scales[r]);
}

#include "int4_linear.h"

/* As `linear_block`, for quantised rows: `codes` (rows, row_bytes) and `row_scales` (rows, scales_of). */
INLINE void NAME(quantized_block)(const uint8_t *codes, const float *row_scales, const Weight *w, void *y, const RowSplit *split,
                                  Place at, Waiting *waiting, int64_t kind) {
    if (w->form == INT4) {
        NAME(int4_block)(codes, row_scales, w, y, split, at, kind);
        return;
    }
    int64_t bytes = padded(w->inputs), words = bytes / 4, from = at.panel * PANEL;
    int64_t row = split->from + at.block * split->height, rows = rows_of(split, at.block);
    int more = at.panel + 1 < panels_of(w->outputs, is_gated(kind));
    const char *panel = (const char *)w->panels + from * words * 4;
    const float *scales = w->scales + from;
#if TILES
    vf (*sums)[COLUMNS] = tile_sums((const char *)codes, bytes, split, panel, at, more, waiting, NAME(put_waiting), 1);
    (void)scales;
    let_wait(waiting, sums, w, y, row, rows, at.panel, kind, row_scales);
#else
    (void)waiting;
    const Ahead ahead = ahead_of(panel, words, at.turn, at.turns, rows, more);
#if WIDE_CODES
    vf sums[CODE_ROWS][COLUMNS];
    if (split->height > ROWS) {
        sum_widened(codes + row * codes_of(w->inputs), (const vi *)panel, words, codes_of(w->inputs), rows,
                    more && !at.turn, (vi(*)[COLUMNS])sums);
        NAME(scale_sums)(sums, row_scales + row, w->starts + from, scales, rows);
        NAME(put_block)(sums, w, y, row, rows, at.panel, kind);
        return;
    }
#else
    vf sums[ROWS][COLUMNS];
#endif
#if MMLA_INT8
    mmla_sums((const char *)codes + row * bytes, bytes, panel, ahead, rows, sums, 1);
    NAME(scale_sums)(sums, row_scales + row, w->starts + from, scales, rows);
#else
#define CASE(n) \
    case n: \
        NAME(quantized_tile)(codes + row * codes_of(w->inputs), row_scales + row, (const int8_t *)panel, ahead, w->starts + from, scales, \
                             w->inputs, sums, n); \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
#endif
    NAME(put_block)(sums, w, y, row, rows, at.panel, kind);
#endif
}

INLINE void NAME(quantize_rows)(const REAL *x, const Weight *w, uint8_t *codes, float *row_scales, int64_t rows,
                                const int past) {
    int64_t inputs = w->inputs, bytes = row_bytes(w), scales = scales_of(w);
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < rows; row++)
        if (w->form == INT4)
            NAME(quantize_groups)(x + row * inputs, w, codes + row * bytes, row_scales + row * scales, past);
        else
            row_scales[row] = NAME(quantize_row)(x + row * inputs, inputs, w->hadamard, codes + row * bytes, past);
}

/* Quantises rows for a product with a weight. */
TEAM void NAME(team_quantize)(const REAL *x, const Weight *w, uint8_t *codes, float *row_scales, int64_t rows) {
    if (streamed(codes, rows, row_bytes(w))) {
        NAME(quantize_rows)(x, w, codes, row_scales, rows, 1);
        end_stream();
    } else {
        NAME(quantize_rows)(x, w, codes, row_scales, rows, 0);
    }
#pragma omp barrier
}

/* As `linear`, with a packed quantised weight; `codes` and `row_scales` are buffers. */
TEAM void NAME(team_quantized_linear)(const REAL *x, const Weight *w, void *y, uint8_t *codes, float *row_scales,
                                        int64_t rows, int64_t kind) {
    int64_t panels = panels_of(w->outputs, is_gated(kind));
    const int in_tiles = TILES && w->form == INT8;
    const RowSplit split = split_quantized_rows(w, 0, rows);
    NAME(team_quantize)(x, w, codes, row_scales, rows);
    DONE(CODES);
    Waiting waiting;
#if TILES
    if (w->form == INT4 && int4_in_tiles(rows, w->group)) {
        NAME(team_int4_tiles)(codes, row_scales, w, y, rows, kind);
#pragma omp barrier
        return;
    }
#endif
    begin_waiting(&waiting);
    begin_tiles(&split, in_tiles);
#pragma omp for schedule(guided, 1) nowait
    for (int64_t at = 0; at < split.blocks * panels; at++)
        NAME(quantized_block)(codes, row_scales, w, y, &split, place(at, &split, panels), &waiting, kind);
    NAME(end_waiting)(&waiting);
    end_tiles(in_tiles);
#pragma omp barrier
}

void NAME(quantized_linear)(const REAL *x, const Weight *weight, void *y, uint8_t *codes, float *row_scales, int64_t rows,
                            int64_t kind) {
#pragma omp parallel
    NAME(team_quantized_linear)(x, weight, y, codes, row_scales, rows, kind);
}
