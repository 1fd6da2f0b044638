/* MXFP4 weights, of experts and others, which are widened to the activations' type before rows are multiplied: slice by
 * slice of a panel, or for tiles a whole panel. Values and sums have the same bits as with a panel of linear.h.
 * Included once per dtype.
 *
 * A panel stores, byte by byte of the inputs, that byte of each of its outputs: two values (E2M1), the first in the
 * lower half. Each 32 inputs of an output share a power of two, stored as a byte with exponent bias 127: (panels,
 * groups, PANEL), in place of the weight's scales.
 */
#define MXFP4_GROUP 32
#define FETCHED_CODES 4096 /* bytes to prefetch ahead: a page, which the CPU's prefetcher does not cross */

/* Returns true for an MXFP4 weight. */
INLINE int is_mxfp4(const Weight *w) { return w->form == MXFP4; }

/* GCC splits a conversion of vectors of other widths into scalar ones. */
INLINE vi words_of_bytes(const uint8_t *from) {
#if LANES == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__aarch64__)
    uint32_t word;
    memcpy(&word, from, 4);
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(word)))));
#else
    typedef uint8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));
    return __builtin_convertvector(*(const vb *)from, vi);
#endif
}

/* Returns the values of the lowest four bits of each lane: sign, two exponent bits, one mantissa bit. */
INLINE vf of_e2m1(vi code) {
#if LANES == 16
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return (vf)_mm512_permutexvar_ps((__m512i)code, values);
#else
    vi sign = (code & 8) << 28;
#if LANES == 8
    const __m256 sizes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    return (vf)((vi)_mm256_permutevar8x32_ps(sizes, (__m256i)code) | sign);
#else
    vi size = code & 7;
    vf least = __builtin_convertvector(size, vf) * 0.5f; /* 0 and 1 have no leading bit */
    return (vf)((vi)pick(size > 1, (vf)((size << 22) + (126 << 23)), least) | sign);
#endif
#endif
}

/* Returns 2 ^ (exponent - 127); infinite for 255. */
INLINE vf power_of(vi exponent) { return (vf)((exponent << 23) | ((exponent == 0) & (1 << 22))); }

/* Stores the two values of byte `i` of each of LANES columns in the layout of a panel of linear.h. */
INLINE void NAME(put_pair)(vf first, vf second, int64_t i, int64_t column, int32_t *to) {
#if PAIR == 1
    *(vi *)(to + 2 * i * PANEL + column) = (vi)first;
    *(vi *)(to + (2 * i + 1) * PANEL + column) = (vi)second;
#else
    vi words = (((vi)first >> 16) & 0xffff) | ((vi)second & (int32_t)0xffff0000); /* the lower halves are 0 */
#if BY_MMLA
    for (int lane = 0; lane < LANES; lane++) to[word_at(i, column + lane, BY_MMLA)] = words[lane];
#else
    *(vi *)(to + i * PANEL + column) = words;
#endif
#endif
}

#if PAIR == 2 && LANES == 16 && defined(__AVX512BW__) && !BY_MMLA
#define IN_HALVES 1
/* Returns true if all exponents of a group's columns give normal numbers without overflow. */
INLINE int are_usual(const uint8_t *exponents) {
    vi strange = splat_word(0);
    for (int c = 0; c < COLUMNS; c++) {
        vi found = words_of_bytes(exponents + c * LANES);
        strange |= (found < 2) | (found > 250);
    }
    return !_mm512_test_epi32_mask((__m512i)strange, (__m512i)strange);
}

/* Returns words of both values of each byte; `added` is added to the exponents of values that are not 0, (columns) in
 * both halves. */
INLINE vi words_of_codes(const uint8_t *codes, vi added) {
    const __m512i values = _mm512_set_epi32(/* 32 bfloat16 values; the fifth bit of an index is not part of the value's bits */
        (int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000, 0x40c04080, 0x40404000, 0x3fc03f80, 0x3f000000,
        (int)0xc0c0c080, (int)0xc040c000, (int)0xbfc0bf80, (int)0xbf008000, 0x40c04080, 0x40404000, 0x3fc03f80, 0x3f000000);
    vi both = words_of_bytes(codes);
    __m512i at = (__m512i)(both | (both << 12)), found = _mm512_permutexvar_epi16(at, values);
    return (vi)_mm512_mask_add_epi16(found, _mm512_test_epi16_mask(at, _mm512_set1_epi16(7)), found, (__m512i)added);
}

/* Widens one group of a panel. */
INLINE void NAME(widen_halves)(const uint8_t *codes, const uint8_t *exponents, int64_t words, int32_t *to) {
    vi added[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
        vi more = words_of_bytes(exponents + c * LANES) - 127;
        added[c] = ((more << 7) & 0xffff) | (more << 23);
    }
    for (int64_t i = 0; i < words; i++) {
        __builtin_prefetch(codes + FETCHED_CODES);
        for (int c = 0; c < COLUMNS; c++, codes += LANES, to += LANES) *(vi *)to = words_of_codes(codes, added[c]);
    }
}
#else
#define IN_HALVES 0
#endif

/* Widens `number` groups of a panel from group `first` on to `to`, one word per word. */
INLINE void NAME(widen_groups)(const Weight *w, int64_t panel, int64_t first, int64_t number, int32_t *to) {
    const int64_t groups = w->inputs / MXFP4_GROUP, bytes = MXFP4_GROUP / 2;
    const uint8_t *codes = (const uint8_t *)w->panels + (panel * groups + first) * bytes * PANEL;
    const uint8_t *exponents = (const uint8_t *)w->scales + (panel * groups + first) * PANEL;
    for (int64_t g = 0; g < number; g++, exponents += PANEL) {
        __builtin_prefetch(exponents + FETCHED_CODES / 16);
#if IN_HALVES
        if (are_usual(exponents)) {
            NAME(widen_halves)(codes, exponents, bytes, to + g * bytes * PANEL);
            codes += bytes * PANEL;
            continue;
        }
#endif
        vf powers[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) powers[c] = power_of(words_of_bytes(exponents + c * LANES));
        for (int64_t i = g * bytes; i < (g + 1) * bytes; i++) {
            __builtin_prefetch(codes + FETCHED_CODES);
            for (int c = 0; c < COLUMNS; c++, codes += LANES) {
                vi both = words_of_bytes(codes);
                NAME(put_pair)(of_e2m1(both) * powers[c], of_e2m1(both >> 4) * powers[c], i, c * LANES, to);
            }
        }
    }
}

/* Rows that use a slice of a panel after it is widened, and the groups of a slice, 32 words per column: with the rows'
 * sums it stays in an L1 of 32 KiB. */
#define WIDE_ROWS 48
#define SLICE PAIR
#define SLICE_WORDS (SLICE * MXFP4_GROUP / PAIR)
#define IN_SLICES (!IN_TILES && !BY_MMLA)

#if IN_SLICES
/* Adds the products of words and `rows` (a constant) rows to their sums. */
INLINE void NAME(add_slice)(const REAL *x, const vi *weight, int64_t words, int64_t inputs, vf (*to)[COLUMNS],
                            const int rows) {
    vf sums[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = to[r][c];
    for (int64_t i = 0; i < words; i++, weight += COLUMNS) NAME(add_word)(x + i * PAIR, weight, inputs, sums, rows);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) to[r][c] = sums[r][c];
}

/* As `linear_block`, for up to WIDE_ROWS rows. */
static void NAME(widened_block)(const REAL *x, const Weight *w, void *y, const RowSplit *split, Place at, int64_t kind) {
    int64_t row = split->from + at.block * split->height, rows = rows_of(split, at.block), inputs = w->inputs;
    int64_t groups = inputs / MXFP4_GROUP;
    vf sums[WIDE_ROWS][COLUMNS];
    vi wide[SLICE_WORDS * COLUMNS];
    memset(sums, 0, rows * sizeof sums[0]);
    for (int64_t g = 0; g < groups; g += SLICE) {
        int64_t number = groups - g < SLICE ? groups - g : SLICE, words = number * MXFP4_GROUP / PAIR;
        NAME(widen_groups)(w, at.panel, g, number, (int32_t *)wide);
        for (int64_t r = 0; r < rows; r += ROWS) {
            const REAL *from = x + (row + r) * inputs + g * MXFP4_GROUP;
#define CASE(n) \
    case n: NAME(add_slice)(from, wide, words, inputs, sums + r, n); break;
            switch (rows - r < ROWS ? rows - r : ROWS) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
        }
    }
    NAME(put_block)(sums, w, y, row, rows, at.panel, kind);
}

/* As `team_linear`. */
TEAM void NAME(team_widened_linear)(const REAL *x, const Weight *w, void *y, int64_t rows, int64_t kind) {
    int64_t panels = panels_of(w->outputs, is_gated(kind));
    const RowSplit split = {0, rows, WIDE_ROWS, (rows + WIDE_ROWS - 1) / WIDE_ROWS, 1};
#pragma omp for schedule(guided, 1) nowait
    for (int64_t at = 0; at < split.blocks * panels; at++)
        NAME(widened_block)(x, w, y, &split, place(at, &split, panels), kind);
#pragma omp barrier
}
#endif

/* Returns true if a decoder layer supports such weights: if they are widened in slices, which need no further buffer. */
int64_t NAME(layer_widens)(void) { return IN_SLICES; }
