/* Matrix products with int4 weights that have a scale per output and group of inputs; included once per dtype.
 * Activations are int8, with a scale per row and group. Weights are stored plus 8, as unsigned values, because the
 * instruction multiplies unsigned by signed bytes. Since sum((w + 8) x) = sum(w x) + 8 sum(x), each sum of a
 * group begins at its row's offset, -8 times the sum of the group's activations. A panel packs two words of four inputs
 * into one, the first word in the lower halves of its bytes. The sums of a group are exact integers and are added up in
 * float, group by group: a row's result depends only on the row. */

#define INT4_ROWS 3 /* rows for which the sums of a group and of all groups fit the registers */
INLINE vi low_codes(vi word) { return word & 0x0f0f0f0f; }
INLINE vi high_codes(vi word) { return (word >> 4) & 0x0f0f0f0f; }

/* Without an instruction that adds four products of bytes, sums of pairs of products are added up in 16 bits: at most
 * NARROW_PAIRS pairs of words, 16 products of at most 15 * 127. */
#if LANES == 8 || (LANES == 16 && !defined(__AVX512VNNI__))
#define NARROW 1
#define NARROW_PAIRS 4
#else
#define NARROW 0
#define NARROW_PAIRS INT64_MAX
#endif

/* Adds products of values from 0 to 15 and of signed bytes, four per lane, or pairs of two for `wide_sums`. */
INLINE vi dot_nibbles(vi sum, vi nibbles, vi x) {
#if LANES == 8
    return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)nibbles, (__m256i)x));
#elif LANES == 16 && !defined(__AVX512VNNI__)
    return (vi)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)nibbles, (__m512i)x));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)nibbles, (int8x16_t)x);
#else
    return dot_int8(sum, nibbles, x);
#endif
}

/* Returns sums of four products per lane, in 32 bits, from what `dot_nibbles` added up. */
INLINE vi wide_sums(vi sums) {
#if LANES == 8
    return (vi)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#elif LANES == 16 && !defined(__AVX512VNNI__)
    return (vi)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#else
    return sums;
#endif
}

/* Returns the number of groups of a row. */
INLINE int64_t groups_of(const Weight *w) { return (w->inputs + w->group - 1) / w->group; }

/* Returns the floats of a row's scales: a scale for int8; for int4 one per group, and then the offset of each group, an
 * integer. */
INLINE int64_t scales_of(const Weight *w) { return w->form == INT4 ? 2 * groups_of(w) : 1; }

/* Quantises one group of a row and returns its scale; `offset` receives -8 times the sum of its values. `past` (a
 * constant): bypass the caches as in streams.h. */
INLINE float NAME(quantize_group)(const REAL *x, int64_t inputs, uint8_t *codes, int32_t *offset, const int past) {
    ON_LINES float kept[KEPT_FLOATS];
    float most = NAME(greatest_size)(x, inputs, 0, kept), inverse = most > 0 && most < INFINITY ? 127.0f / most : 0.0f;
    vi sums = splat_word(0);
    int32_t sum = 0;
    for (int64_t from = 0; from < inputs; from += KEPT_FLOATS) {
        int64_t i = 0, count = inputs - from < KEPT_FLOATS ? inputs - from : KEPT_FLOATS;
        if (inputs > KEPT_FLOATS) NAME(load_floats)(x + from, count, 0, kept);
        for (; i + LANES <= count; i += LANES) {
            vi code = (vi)fused(load_f32(kept + i), splat(inverse), splat(NEAREST));
            sums += code - NEAREST_BITS;
            past ? stream_bytes(codes + from + i, code) : store_bytes(codes + from + i, code);
        }
        for (; i < count; i++) {
            float shifted = fused_one(kept[i], inverse, NEAREST);
            int32_t code;
            memcpy(&code, &shifted, 4);
            codes[from + i] = (uint8_t)code, sum += code - NEAREST_BITS;
        }
    }
    *offset = -8 * (sum + lane_sum_words(sums));
    return most < INFINITY ? most / 127.0f : NAN;
}

/* As `quantize_group`, for a group of `vectors` (a constant) whole vectors, which stay in registers. */
INLINE float NAME(quantize_held_group)(const REAL *x, uint8_t *codes, int32_t *offset, const int vectors, const int past) {
    vf v[8];
    vi tops = splat_word(0), sums = splat_word(-vectors * NEAREST_BITS);
    for (int n = 0; n < vectors; n++) {
        v[n] = LOADV(x + n * LANES);
        tops = larger_word(tops, (vi)v[n] & 0x7fffffff);
    }
    int32_t bits = largest_word(tops);
    float most;
    memcpy(&most, &bits, 4);
    vf inverse = splat(most > 0 && most < INFINITY ? 127.0f / most : 0.0f);
    for (int n = 0; n < vectors; n++) {
        vi code = (vi)fused(v[n], inverse, splat(NEAREST));
        sums += code;
        past ? stream_bytes(codes + n * LANES, code) : store_bytes(codes + n * LANES, code);
    }
    *offset = -8 * lane_sum_words(sums);
    return most < INFINITY ? most / 127.0f : NAN;
}

/* Quantises one row with a scale per group, and pads it with zeros. `scales` receives `scales_of` values. */
INLINE void NAME(quantize_groups)(const REAL *x, const Weight *w, uint8_t *codes, float *scales, const int past) {
    int64_t groups = groups_of(w);
    for (int64_t g = 0, from = 0; g < groups; g++, from += w->group) {
        int64_t count = w->inputs - from < w->group ? w->inputs - from : w->group;
        int32_t *offset = (int32_t *)scales + groups + g;
        if (count == 2 * LANES)
            scales[g] = NAME(quantize_held_group)(x + from, codes + from, offset, 2, past);
        else if (count == 4 * LANES)
            scales[g] = NAME(quantize_held_group)(x + from, codes + from, offset, 4, past);
        else if (count == 8 * LANES)
            scales[g] = NAME(quantize_held_group)(x + from, codes + from, offset, 8, past);
        else
            scales[g] = NAME(quantize_group)(x + from, count, codes + from, offset, past);
    }
    memset(codes + w->inputs, 0, padded(w->inputs) - w->inputs);
}

/* Computes the exact sums of one group, `pairs` pairs of words, of `rows` (a constant) rows with one panel. */
INLINE void int4_group(const uint8_t *x, const vi *weight, int64_t pairs, int64_t stride, Ahead *ahead,
                       vi sums[INT4_ROWS][COLUMNS], const int rows) {
    for (int64_t i = 0, end; i < pairs; i = end) {
        vi some[INT4_ROWS][COLUMNS];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++)
                if (NARROW) some[r][c] = splat_word(0); else some[r][c] = sums[r][c];
        end = pairs - i < NARROW_PAIRS ? pairs : i + NARROW_PAIRS;
        for (; i < end; i++, weight += COLUMNS) {
            if (i % FETCHED == 0) fetch_ahead(ahead);
            int32_t fours[INT4_ROWS][2];
            for (int r = 0; r < rows; r++) memcpy(fours[r], x + r * stride + i * 8, 8);
            for (int c = 0; c < COLUMNS; c++) {
                vi low = low_codes(weight[c]), high = high_codes(weight[c]);
                for (int r = 0; r < rows; r++)
                    some[r][c] = dot_nibbles(dot_nibbles(some[r][c], low, splat_word(fours[r][0])), high,
                                             splat_word(fours[r][1]));
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++)
                if (NARROW) sums[r][c] += wide_sums(some[r][c]); else sums[r][c] = some[r][c];
    }
}

/* Adds the exact sums of a row's group to the row's total. `scale`, `offset`: the row's, of the group. */
INLINE void add_int4_group(vf total[COLUMNS], const vi sums[COLUMNS], float scale, int32_t offset, const vf *scales,
                           const vf *zeros, const int zeroed) {
    for (int c = 0; c < COLUMNS; c++) {
        vf scaled = __builtin_convertvector(sums[c], vf) * scales[c];
        if (zeroed) scaled = fused(splat((float)offset * -0.125f), zeros[c], scaled);
        total[c] = fused(scaled, splat(scale), total[c]);
    }
}

/* Computes the results of `rows` (a constant) rows with one panel. */
INLINE void NAME(int4_tile)(const uint8_t *x, const float *row_scales, const Weight *w, int64_t panel, Ahead ahead,
                            vf total[][COLUMNS], const int rows, const int zeroed) {
    int64_t stride = padded(w->inputs), all = (w->inputs + 7) / 8, per = w->group / 8, groups = groups_of(w);
    const vi *weight = (const vi *)w->panels + panel * (stride / 8) * COLUMNS;
    const vf *scales = (const vf *)w->scales + panel * groups * COLUMNS, *zeros = NULL;
    if (zeroed) zeros = (const vf *)w->zeros + panel * groups * COLUMNS;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) total[r][c] = splat(0.0f);
    for (int64_t g = 0, first = 0; g < groups; g++, first += per) {
        int64_t pairs = all - first < per ? all - first : per;
        vi sums[INT4_ROWS][COLUMNS];
        for (int r = 0; r < rows; r++) {
            vi offset = splat_word(((const int32_t *)row_scales)[(2 * r + 1) * groups + g]);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = offset;
        }
        int4_group(x + first * 8, weight + first * COLUMNS, pairs, stride, &ahead, sums, rows);
        for (int r = 0; r < rows; r++) {
            const float *own = row_scales + 2 * r * groups + g;
            add_int4_group(total[r], sums[r], own[0], ((const int32_t *)own)[groups], scales + g * COLUMNS,
                           zeroed ? zeros + g * COLUMNS : NULL, zeroed);
        }
    }
}

/* As `quantized_block`. */
static void NAME(int4_block)(const uint8_t *codes, const float *row_scales, const Weight *w, void *y, const RowSplit *split,
                             Place at, int64_t kind) {
    int64_t bytes = padded(w->inputs), row = split->from + at.block * split->height, rows = rows_of(split, at.block);
    int more = at.panel + 1 < panels_of(w->outputs, is_gated(kind));
    const char *panel = (const char *)w->panels + at.panel * bytes / 8 * PANEL * 4;
    vf sums[ROWS][COLUMNS];
    for (int64_t done = 0; done < rows; done += INT4_ROWS) {
        const Ahead ahead = ahead_of(panel, bytes / 8, at.turn * 2 + done / INT4_ROWS, at.turns * 2, rows, more);
        const float *own = row_scales + (row + done) * scales_of(w);
#define CASE(n) \
    case n: \
        if (w->zeros) \
            NAME(int4_tile)(codes + (row + done) * bytes, own, w, at.panel, ahead, sums + done, n, 1); \
        else \
            NAME(int4_tile)(codes + (row + done) * bytes, own, w, at.panel, ahead, sums + done, n, 0); \
        break;
        switch (rows - done < INT4_ROWS ? rows - done : INT4_ROWS) { CASE(1) CASE(2) CASE(3) }
#undef CASE
    }
    NAME(put_block)(sums, w, y, row, rows, at.panel, kind);
}

#if TILES
#include "int4_tiles.h"
#endif
