/* Products by matrix multiply-accumulate: pairs of rows with pairs of a panel's columns, two words of each at a time.
 * Panels store these words next to each other (`word_at` in panels.h), so a pair of columns is one load. Zipping the
 * panels of other CPUs in registers took 101 instead of 82 instructions for 48 products with 6 rows. A row's sum runs
 * over its words in order, independent of the other rows; an odd row is paired with zeros. */
#if MMLA_BF16 || MMLA_INT8
#define QUADS (PANEL / 2) /* pairs of columns */
#define PASS 16 /* bytes of a row at a time: two quads for each pair of rows */
_Static_assert(PASS == 4 * FETCHED, "lines are fetched in each pass");

#if !MMLA_BF16
#define MMLA(sums, x, weight, codes) mmla_int8(sums, x, weight)
#elif !MMLA_INT8
#define MMLA(sums, x, weight, codes) mmla_bf16(sums, x, weight)
#else
#define MMLA(sums, x, weight, codes) (codes ? mmla_int8(sums, x, weight) : mmla_bf16(sums, x, weight))
#endif

/* Computes one pass of `rows` (a constant) rows. */
INLINE void add_pass(const char *x, int64_t stride, const Quad *weight, Quad sums[ROWS / 2][QUADS], const int codes,
                     const int rows) {
    Quad pairs[2][ROWS / 2];
    for (int r = 0; r < rows; r += 2) {
        Quad one = *(const Quad *)(x + r * stride), other = {0};
        if (r + 1 < rows) other = *(const Quad *)(x + (r + 1) * stride);
        pairs[0][r / 2] = first_halves(one, other), pairs[1][r / 2] = second_halves(one, other);
    }
    for (int half = 0; half < 2; half++)
        for (int c = 0; c < QUADS; c++, weight++)
            for (int r = 0; r < rows; r += 2) sums[r / 2][c] = MMLA(sums[r / 2][c], pairs[half][r / 2], *weight, codes);
}

/* Computes the sums of `rows` (a constant) rows of `bytes` each with one panel, in the order of results. */
INLINE void sum_pairs(const char *x, int64_t bytes, const char *panel, Ahead ahead, vf result[ROWS][COLUMNS],
                      const int codes, const int rows) {
    const Quad *weight = (const Quad *)panel;
    Quad sums[ROWS / 2][QUADS];
    for (int r = 0; r < rows; r += 2)
        for (int c = 0; c < QUADS; c++) sums[r / 2][c] = (Quad){0};
    int64_t i = 0;
    for (; i + PASS <= bytes; i += PASS, weight += 2 * QUADS) {
        fetch_ahead(&ahead);
        add_pass(x + i, bytes, weight, sums, codes, rows);
    }
    if (i < bytes) { /* bytes after a row must not be read */
        char ends[ROWS][PASS] = {{0}};
        for (int r = 0; r < rows; r++) memcpy(ends[r], x + r * bytes + i, bytes - i);
        add_pass(ends[0], PASS, weight, sums, codes, rows);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < QUADS; c += 2) {
            Quad one = sums[r / 2][c], next = sums[r / 2][c + 1];
            *(Quad *)((float *)result[r] + 2 * c) = r % 2 ? second_halves(one, next) : first_halves(one, next);
        }
}

INLINE void mmla_sums(const char *x, int64_t bytes, const char *panel, Ahead ahead, int64_t rows,
                      vf result[ROWS][COLUMNS], const int codes) {
#define CASE(n) \
    case n: sum_pairs(x, bytes, panel, ahead, result, codes, n); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}
#endif
