/* The layout and the division of matrix products, for all kinds of weights. */

/* The epilogue of a product: the stored type, float, silu(gate) * up, the column of a row's greatest result,
 * gelu_tanh(gate) * up, clamped_gate(gate) * clamped_up(up), gelu_exact(gate) * up, or silu, gelu_tanh or gelu_exact of
 * each result. */
enum { PLAIN, FLOAT, GATED, GREATEST, GELU_GATED, CLAMPED_GATED, EXACT_GELU_GATED, SILU, GELU, EXACT_GELU };
INLINE int is_gated(int64_t kind) { return kind == GATED || (kind >= GELU_GATED && kind <= EXACT_GELU_GATED); }
INLINE int is_activated(int64_t kind) { return kind >= SILU; }

/* `coarse` (a constant): the result is rounded to bfloat16. */
INLINE vf gate_factor(vf gate, const int kind, const int coarse) {
    switch (kind) {
        case GATED:
        case SILU: return silu(gate, coarse);
        case GELU_GATED:
        case GELU: return gelu_tanh(gate, coarse);
        case CLAMPED_GATED: return clamped_gate(gate);
        default: return coarse ? gelu_exact_coarse(gate) : gelu_exact(gate);
    }
}
INLINE vf up_factor(vf up, const int kind) { return kind == CLAMPED_GATED ? clamped_up(up) : up; }

/* The forms of a weight: not quantised, quantized_linear.h, int4_linear.h, mxfp4.h. */
enum { FLOATS, INT8, INT4, MXFP4 };

/* A packed weight. `bias` is in the order of the panels' columns, with padding, and may be NULL. So are `starts` and
 * `scales` of an int8 weight. An int4 weight has a `group` of inputs with scales and optional zeros, both (panels,
 * groups, PANEL); zeros are multiplied by the scales and negated. */
typedef struct {
    const void *panels, *bias;
    const int32_t *starts; /* int8: -128 times the sum of each column's values */
    const float *scales;
    int64_t outputs, inputs;
    const float *zeros;
    int64_t group;
    const float *added; /* what adapters add to results, or NULL: (rows with an adapter, outputs), plus the width of a panel */
    const int64_t *added_places; /* for each row of x: its row of `added`, counted from `added_first` on; below that: none */
    int64_t added_first;
    int64_t hadamard; /* inputs per block of the Hadamard transform; 0: the weight is not transformed */
    int64_t form;
} Weight;

/* Returns true if rows are quantised before they are multiplied by the weight. */
INLINE int has_quantized_rows(const Weight *w) { return w->form == INT8 || w->form == INT4; }

INLINE int64_t panels_of(int64_t outputs, int gated) {
    return gated ? (outputs / 2 + PANEL / 2 - 1) / (PANEL / 2) : (outputs + PANEL - 1) / PANEL;
}

/* Returns the output in column `column` of panel `panel`; -1 for padding. */
INLINE int64_t output_of(int64_t panel, int64_t column, int64_t outputs, int gated) {
    int64_t half = PANEL / 2, output = panel * PANEL + column;
    if (!gated) return output < outputs ? output : -1;
    output = panel * half + column % half;
    if (output >= outputs / 2) return -1;
    return column < half ? output : outputs / 2 + output;
}

/* Adds the values of adapters to the sums of `rows` rows from row `row` on with a panel. Padding columns receive
 * arbitrary values, which are dropped. */
INLINE void add_adapted(vf (*sums)[COLUMNS], const Weight *w, int64_t row, int64_t rows, int64_t panel, int gated) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = w->added_places[row + r] - w->added_first;
        if (at < 0) continue;
        const float *added = w->added + at * w->outputs + panel * (gated ? PANEL / 2 : PANEL);
        for (int c = 0; c < COLUMNS; c++) {
            int64_t up = gated && c >= COLUMNS / 2 ? w->outputs / 2 - PANEL / 2 : 0;
            sums[r][c] += load_f32(added + up + c * LANES);
        }
    }
}

/* Returns the number of columns of all panels of a weight. */
INLINE int64_t columns_of(int64_t outputs, int gated) { return panels_of(outputs, gated) * PANEL; }

/* Returns the words of a panel, or the bytes of a quantised row, padded with zeros to the size of a tile step. */
#define STEP 64 /* bytes of a row */
INLINE int64_t padded(int64_t bytes) { return (bytes + STEP - 1) / STEP * STEP; }
INLINE int64_t words_of(int64_t bytes) { return padded(bytes) / 4; }

/* Returns the index of word `i` of a column within a panel. `paired` (a constant): two consecutive words of a row are
 * adjacent. */
INLINE int64_t word_at(int64_t i, int64_t column, const int paired) {
    return paired ? (i / 2 * PANEL + column) * 2 + i % 2 : i * PANEL + column;
}

#define RUN 256 /* bytes of a row that packing copies at once: whole cache lines, as in linear.h */

/* Packs a run of values of each column, from word `from` of the panel's `words` on, and subtracts their sums from its
 * starts. */
INLINE void put_runs(int8_t (*runs)[RUN], int64_t from, int64_t words, int8_t *panel, int32_t *starts) {
    int64_t until = words - from < RUN / 4 ? words - from : RUN / 4;
#if MMLA_INT8
    for (int64_t i = 0; i < until; i++)
        for (int64_t column = 0; column < PANEL; column++)
            memcpy(panel + word_at(from + i, column, 1) * 4, runs[column] + i * 4, 4);
#else
    for (int64_t i = 0; i < until; i += LANES) /* whole steps, hence whole squares */
        for (int64_t column = 0; column < PANEL; column += LANES) {
            vi square[LANES];
            transpose((const int32_t *)(runs[column] + i * 4), RUN / 4, square);
            for (int n = 0; n < LANES; n++) *(vi *)(panel + word_at(from + i + n, column, 0) * 4) = square[n];
        }
#endif
    for (int64_t column = 0; column < PANEL; column++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < RUN; i++) sum += runs[column][i];
        starts[column] -= 128 * sum;
    }
}

#define CHUNK_BYTES (256 << 10) /* bytes of x, a quarter of an L2 of 1 MiB. For 96 to 4,096 rows other sizes differ by at most 3% */

/* The division of rows of x for a product: `blocks` of `height` rows from row `from` on; the last one may be smaller. A
 * chunk of `per` blocks stays in the L2 cache while all panels are read. */
typedef struct {
    int64_t from, rows, height, blocks, per;
} RowSplit;

/* Splits rows of `bytes` each into blocks of `height`, in chunks of about equal numbers of blocks: a chunk of few blocks
 * would wait for panels. */
INLINE RowSplit split_evenly(int64_t from, int64_t rows, int64_t height, int64_t bytes) {
    int64_t blocks = (rows + height - 1) / height, most = CHUNK_BYTES / (height * bytes) + 1;
    int64_t chunks = (blocks + most - 1) / most;
    return (RowSplit){from, rows, height, blocks, chunks ? (blocks + chunks - 1) / chunks : 1};
}

/* Splits rows of `bytes` each. With tiles, a block is two tiles of equal height: 33 rows are three tiles of 11. */
INLINE RowSplit split_rows(int64_t from, int64_t rows, int64_t bytes, int in_tiles) {
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, height = ROWS;
    if (in_tiles && rows) height = 2 * ((rows + tiles - 1) / tiles);
    return split_evenly(from, rows, height, bytes);
}

INLINE int64_t rows_of(const RowSplit *split, int64_t block) {
    int64_t left = split->rows - block * split->height;
    return left < split->height ? left : split->height;
}

/* A block of rows and a panel, and the number `turn` of the block among the `turns` blocks that use the panel before
 * the next one. */
typedef struct {
    int64_t block, panel, turn, turns;
} Place;

/* Returns the pair at position `at` of the work: chunks of row blocks, in each panel by panel, in each row block by row
 * block. */
INLINE Place place(int64_t at, const RowSplit *split, int64_t panels) {
    int64_t first = at / (split->per * panels) * split->per, rest = at - first * panels;
    int64_t inside = split->blocks - first < split->per ? split->blocks - first : split->per;
    return (Place){first + rest % inside, rest / inside, rest % inside, inside};
}

/* A step reads all weights of the model, more than any cache holds. The first of several row blocks would wait for a
 * panel from memory, and memory would then be idle during the other blocks. So each block prefetches its part of the
 * next panel: some lines every FETCHED words. */
#define FETCHED 4
#define FETCHED_LINES (PANEL * 4 / LINE * FETCHED) /* for FETCHED words */
typedef struct {
    const char *at;
    int64_t lines; /* after each FETCHED words */
} Ahead;

/* Returns what the block of this turn, of `rows` rows, prefetches of the next panel if there is `more`; both panels
 * have `words` words. If only one or two rows use a panel, memory is always busy, and prefetching everything slowed
 * them by 11 to 22%. They prefetch one line per FETCHED words, the first part of the panel: without it a Zen 3 took 7
 * to 10% longer, an Emerald Rapids the same time. */
INLINE Ahead ahead_of(const void *panel, int64_t words, int64_t turn, int64_t turns, int64_t rows, int more) {
    int64_t lines = turns == 1 && rows <= 2 ? 1 : (FETCHED_LINES + turns - 1) / turns, left = FETCHED_LINES - turn * lines;
    const char *next = (const char *)panel + words * PANEL * 4;
    return (Ahead){next + turn * lines * (words / FETCHED) * LINE, more && left > 0 ? left < lines ? left : lines : 0};
}

INLINE void fetch_ahead(Ahead *ahead) {
    for (int64_t i = 0; i < ahead->lines; i++, ahead->at += LINE) __builtin_prefetch(ahead->at, 0, TO_L2);
}

/* Returns a result and its column as one integer that is greater for a greater result, and for the lower column if
 * equal. A NaN is greater than any number. */
INLINE uint64_t ranked(float result, int64_t column) {
    uint32_t bits;
    result += 0.0f; /* -0 and 0 are equal */
    memcpy(&bits, &result, 4);
    bits = result != result ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)column;
}

/* Keeps the greatest of the `columns` results of each of `rows` rows; the first is in column `from`. */
static void put_greatest(vf results[ROWS][COLUMNS], uint64_t *greatest, int64_t from, int64_t columns, int rows) {
    for (int r = 0; r < rows; r++) {
        uint64_t best = __atomic_load_n(greatest + r, __ATOMIC_RELAXED), least = best;
        vf top = splat(-INFINITY), strange = splat(0.0f);
        float some[PANEL];
        for (int c = 0; c < COLUMNS; c++) {
            top = pick(results[r][c] > top, results[r][c], top);
            strange = pick(results[r][c] != results[r][c], results[r][c], strange);
            store_f32(some + c * LANES, results[r][c]);
        }
        /* The padding of the last panel is 0, which may be the greatest: then the loop below decides. */
        if (!any_greater(strange, 0.0f) && ranked(lane_max(top), from) <= best) continue;
        for (int64_t column = 0; column < columns; column++) {
            uint64_t rank = ranked(some[column], from + column);
            best = rank > best ? rank : best;
        }
        while (best > least &&
               !__atomic_compare_exchange_n(greatest + r, &least, best, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            ;
    }
}

