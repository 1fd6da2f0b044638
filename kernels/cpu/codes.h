/* Quantised activations for int8 weights, unsigned with zero point 128. If the CPU multiplies bytes, they are bytes,
 * four per word. AVX2's instruction for bytes saturates, so there an activation takes 16 bits, and a word of four
 * becomes two: the first and the third, and the second and the fourth, which is how shifts unpack a word of a weight.
 * The integer sums are exact in both cases. */
#if LANES == 8 && !TILES && !MMLA_INT8
#define WIDE_CODES 1
#define CODE_BYTES 2
#else
#define WIDE_CODES 0
#define CODE_BYTES 1
#endif

/* Returns the bytes of a quantised row. */
INLINE int64_t codes_of(int64_t inputs) { return padded(inputs) * CODE_BYTES; }

/* As `codes_of`, for the form of a weight: rows for int4 are signed bytes. */
INLINE int64_t row_bytes(const Weight *w) { return w->form == INT4 ? padded(w->inputs) : codes_of(w->inputs); }

/* Stores the quantised value of one input, the lowest byte of `code`. */
INLINE void put_code(uint8_t *codes, int64_t input, int32_t code) {
    int64_t at = WIDE_CODES ? (input & ~(int64_t)3) + input % 2 * 2 + input % 4 / 2 : input;
    codes[at * CODE_BYTES] = (uint8_t)code;
    if (WIDE_CODES) codes[at * CODE_BYTES + 1] = 0;
}

/* Stores the quantised values of twice LANES consecutive inputs, from the lowest bytes of `a` and `b`. `past` (a
 * constant): bypass the caches as in streams.h. */
INLINE void put_codes(uint8_t *codes, vi a, vi b, const int past) {
#if WIDE_CODES
    const __m256i bytes = _mm256_set1_epi64x((int64_t)0x800c800480088000); /* the lowest bytes of each four lanes */
    __m256i first = _mm256_shuffle_epi8((__m256i)a, bytes), second = _mm256_shuffle_epi8((__m256i)b, bytes);
    __m256i words = _mm256_permute4x64_epi64(_mm256_unpacklo_epi64(first, second), 0xd8);
    past ? stream_words(codes, (vi)words) : _mm256_storeu_si256((__m256i *)codes, words);
#else
    if (past) {
        stream_bytes(codes, a), stream_bytes(codes + LANES, b);
    } else {
        store_bytes(codes, a), store_bytes(codes + LANES, b);
    }
#endif
}

/* Adds a word of four values of `rows` (a constant) rows, which are `stride` bytes apart. */
INLINE void add_codes(const uint8_t *x, const vi *weight, int64_t stride, vi sums[][COLUMNS], const int rows) {
#if WIDE_CODES
    for (int odd = 0; odd < 2; odd++) { /* in two passes: the sums, one half of the weights and one value fit the registers */
        vi halves[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) halves[c] = odd ? odd_bytes(weight[c]) : even_bytes(weight[c]);
        for (int r = 0; r < rows; r++) {
            int32_t word;
            memcpy(&word, x + r * stride + odd * 4, 4);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = dot_int16(sums[r][c], splat_word(word), halves[c]);
        }
    }
#else
    for (int r = 0; r < rows; r++) {
        int32_t word;
        memcpy(&word, x + r * stride, 4);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = dot_int8(sums[r][c], splat_word(word), weight[c]);
    }
#endif
}

#if WIDE_CODES
#define CODE_ROWS 66    /* rows that use a slice of a panel after it is widened */
#define CODE_SLICE 32   /* words of a panel: widened (4 KiB) they stay in an L1 of 32 KiB with the rows */

/* Widens each word of four weights to two, in the order of a quantised row. `ahead`: prefetched, one line per word. */
INLINE void widen_codes(const vi *weight, int64_t words, const char *ahead, vi *to) {
    for (int64_t i = 0; i < words; i++, weight += COLUMNS, to += 2 * COLUMNS) {
        if (ahead) __builtin_prefetch(ahead + i * COLUMNS * sizeof *weight, 0, TO_L2);
        for (int c = 0; c < COLUMNS; c++) to[c] = even_bytes(weight[c]), to[COLUMNS + c] = odd_bytes(weight[c]);
    }
}

/* Adds the products of widened words and `rows` (a constant) rows to their sums. */
INLINE void add_widened(const uint8_t *x, const vi *weight, int64_t words, int64_t stride, vi (*to)[COLUMNS], const int rows) {
    vi sums[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = to[r][c];
    for (int64_t i = 0; i < words; i++, weight += COLUMNS)
        for (int r = 0; r < rows; r++) {
            int32_t word;
            memcpy(&word, x + r * stride + i * 4, 4);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = dot_int16(sums[r][c], splat_word(word), weight[c]);
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) to[r][c] = sums[r][c];
}

/* Computes the sums of up to CODE_ROWS rows of `words` words with one panel. `more`: prefetch the next panel, which
 * follows. */
static void sum_widened(const uint8_t *x, const vi *panel, int64_t words, int64_t stride, int64_t rows, int more,
                        vi (*sums)[COLUMNS]) {
    vi wide[2 * CODE_SLICE * COLUMNS];
    memset(sums, 0, rows * sizeof *sums);
    for (int64_t i = 0; i < words; i += CODE_SLICE) {
        int64_t count = words - i < CODE_SLICE ? words - i : CODE_SLICE;
        widen_codes(panel + i * COLUMNS, count, more ? (const char *)(panel + (words + i) * COLUMNS) : NULL, wide);
        for (int64_t r = 0; r < rows; r += ROWS) {
            const uint8_t *from = x + r * stride + i * 4 * CODE_BYTES;
#define CASE(n) \
    case n: add_widened(from, wide, 2 * count, stride, sums + r, n); break;
            switch (rows - r < ROWS ? rows - r : ROWS) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
        }
    }
}
#endif

/* Splits quantised rows for a product with a weight. If panels are widened, more rows than a block are split evenly. */
INLINE RowSplit split_quantized_rows(const Weight *w, int64_t from, int64_t rows) {
    if (w->form == INT4) return split_rows(from, rows, padded(w->inputs), 0);
    RowSplit split = split_rows(from, rows, codes_of(w->inputs), TILES);
#if WIDE_CODES
    if (rows > ROWS) {
        int64_t blocks = (rows + CODE_ROWS - 1) / CODE_ROWS, height = ((rows + blocks - 1) / blocks + ROWS - 1) / ROWS * ROWS;
        split = split_evenly(from, rows, height, codes_of(w->inputs));
    }
#endif
    return split;
}
