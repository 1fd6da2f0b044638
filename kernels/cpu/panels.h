/* How the results of a matrix product are cut up: shared by every kind of weight. */

/* What a product writes: the stored type, float, silu(gate) * up, only where a row's greatest result stands,
 * gelu_tanh(gate) * up, clamped_gate(gate) * clamped_up(up), gelu_exact(gate) * up, or silu, gelu_tanh or gelu_exact of
 * each result. */
enum { PLAIN, FLOAT, GATED, GREATEST, GELU_GATED, CLAMPED_GATED, EXACT_GELU_GATED, SILU, GELU, EXACT_GELU };
INLINE int is_gated(int64_t kind) { return kind == GATED || (kind >= GELU_GATED && kind <= EXACT_GELU_GATED); }
INLINE int is_activated(int64_t kind) { return kind >= SILU; }

/* `coarse` (a constant): whether the result is rounded to bfloat16. */
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

/* A packed weight. `bias` lies in the order of the panels' columns, padding included, and may be NULL; so do `starts` and
 * `scales`, which a quantised weight alone has. In int4 a `group` of inputs has scales, and maybe zeros, which are
 * multiplied with scales and have the other sign: (panels, groups, PANEL). One with a `group` and no `starts` is of
 * mxfp4.h. Else `group` is 0. */
typedef struct {
    const void *panels, *bias;
    const int32_t *starts; /* of each column: -128 times the sum of its codes; in int4 as floats, scaled */
    const float *scales;
    int64_t outputs, inputs;
    const float *zeros;
    int64_t group;
    const float *added; /* what adapters add to results, or NULL: (rows that get some, outputs) and a panel's width */
    const int64_t *added_places; /* of each row of x, counted from `added_first` on: which of these it gets; below: none */
    int64_t added_first;
} Weight;

INLINE int64_t panels_of(int64_t outputs, int gated) {
    return gated ? (outputs / 2 + PANEL / 2 - 1) / (PANEL / 2) : (outputs + PANEL - 1) / PANEL;
}

/* The output that stands in column `column` of panel `panel`; -1: none, the panel is wider than what is left. */
INLINE int64_t output_of(int64_t panel, int64_t column, int64_t outputs, int gated) {
    int64_t half = PANEL / 2, output = panel * PANEL + column;
    if (!gated) return output < outputs ? output : -1;
    output = panel * half + column % half;
    if (output >= outputs / 2) return -1;
    return column < half ? output : outputs / 2 + output;
}

/* Add to the sums of `rows` rows with a panel, from row `row` on, what adapters add. Columns behind the last output get
 * whatever follows, and are dropped. */
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

/* How many columns all panels of a weight have. */
INLINE int64_t columns_of(int64_t outputs, int gated) { return panels_of(outputs, gated) * PANEL; }

/* Words of a panel, and bytes of a row of codes: padded with zeros to what a tile takes at once. */
#define STEP 64 /* bytes of a row */
INLINE int64_t padded(int64_t bytes) { return (bytes + STEP - 1) / STEP * STEP; }
INLINE int64_t words_of(int64_t bytes) { return padded(bytes) / 4; }

/* Where word `i` of a column stands among a panel's words. `paired` (a constant): two that follow one another in a row do
 * so here. */
INLINE int64_t word_at(int64_t i, int64_t column, const int paired) {
    return paired ? (i / 2 * PANEL + column) * 2 + i % 2 : i * PANEL + column;
}

#define RUN 256 /* bytes of a row that packing takes at once: whole cache lines, as in linear.h */

/* Put a run of codes of each column, from word `from` of the panel's `words` on, and take their sums off its starts. */
INLINE void put_runs(int8_t (*runs)[RUN], int64_t from, int64_t words, int8_t *panel, int32_t *starts) {
    int64_t until = words - from < RUN / 4 ? words - from : RUN / 4;
#if MMLA_INT8
    for (int64_t i = 0; i < until; i++)
        for (int64_t column = 0; column < PANEL; column++)
            memcpy(panel + word_at(from + i, column, 1) * 4, runs[column] + i * 4, 4);
#else
    for (int64_t i = 0; i < until; i += LANES) /* whole steps, so whole squares */
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

#define CHUNK_BYTES (256 << 10) /* of x: a quarter of an L2 of 1 MiB. From 96 to 4,096 rows made no difference above 3% */

/* How rows of x are cut up for a product: from row `from` on into `blocks` of `height`, the last of what is left. A chunk of
 * `per` blocks stays in the L2 cache while the panels pass. */
typedef struct {
    int64_t from, rows, height, blocks, per;
} Cut;

/* Blocks of `height` rows of `bytes` each, in chunks of as many blocks each as makes all about alike: one of few blocks
 * would wait for panels. */
INLINE Cut cut_evenly(int64_t from, int64_t rows, int64_t height, int64_t bytes) {
    int64_t blocks = (rows + height - 1) / height, most = CHUNK_BYTES / (height * bytes) + 1;
    int64_t chunks = (blocks + most - 1) / most;
    return (Cut){from, rows, height, blocks, chunks ? (blocks + chunks - 1) / chunks : 1};
}

/* Rows of `bytes` each. In tiles a block is two of them, of as many rows each as makes all alike: 33 rows are three tiles
 * of 11. */
INLINE Cut cut_rows(int64_t from, int64_t rows, int64_t bytes, int in_tiles) {
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, height = ROWS;
    if (in_tiles && rows) height = 2 * ((rows + tiles - 1) / tiles);
    return cut_evenly(from, rows, height, bytes);
}

INLINE int64_t rows_of(const Cut *cut, int64_t block) {
    int64_t left = cut->rows - block * cut->height;
    return left < cut->height ? left : cut->height;
}

/* A block of rows and a panel that meet, `turn` of the `turns` blocks that the panel meets before the next one does. */
typedef struct {
    int64_t block, panel, turn, turns;
} Place;

/* Which stand at place `at` of the work: chunks of row blocks, in each panel after panel, in each row block after row
 * block. */
INLINE Place place(int64_t at, const Cut *cut, int64_t panels) {
    int64_t first = at / (cut->per * panels) * cut->per, rest = at - first * panels;
    int64_t inside = cut->blocks - first < cut->per ? cut->blocks - first : cut->per;
    return (Place){first + rest % inside, rest / inside, rest % inside, inside};
}

/* A panel is met by several row blocks, of which the first would wait for it to come from memory, while memory would wait
 * for the others: a step reads all weights of the model, more than any cache holds. So each block fetches its part of the
 * next panel: some lines every FETCHED words. */
#define FETCHED 4
#define FETCHED_LINES (PANEL * 4 / LINE * FETCHED) /* of as many words */
typedef struct {
    const char *at;
    int64_t lines; /* after each FETCHED words */
} Ahead;

/* What the block of this turn, of `rows` rows, fetches of the panel after this one, both `words` long, if there is `more`.
 * Where nothing but a row or two meets a panel, memory is never idle: to fetch all slowed these by 11 to 22%. They fetch a
 * line after every FETCHED words, so the panel's first part: with none a Zen 3 took 7 to 10% longer, and an Emerald
 * Rapids as long. */
INLINE Ahead ahead_of(const void *panel, int64_t words, int64_t turn, int64_t turns, int64_t rows, int more) {
    int64_t lines = turns == 1 && rows <= 2 ? 1 : (FETCHED_LINES + turns - 1) / turns, left = FETCHED_LINES - turn * lines;
    const char *next = (const char *)panel + words * PANEL * 4;
    return (Ahead){next + turn * lines * (words / FETCHED) * LINE, more && left > 0 ? left < lines ? left : lines : 0};
}

INLINE void fetch_ahead(Ahead *ahead) {
    for (int64_t i = 0; i < ahead->lines; i++, ahead->at += LINE) __builtin_prefetch(ahead->at, 0, TO_L2);
}

/* A result and its column as one integer that is greater for a greater result, and for the lower column of equals.
 * What is not a number is greater than any. */
INLINE uint64_t ranked(float result, int64_t column) {
    uint32_t bits;
    result += 0.0f; /* -0 and 0 are equal */
    memcpy(&bits, &result, 4);
    bits = result != result ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)column;
}

/* Keep the greatest of the `columns` results of each of `rows` rows, the first of them in column `from`. */
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
        /* The last panel's padding is 0, which may look greatest: then the loop below decides. */
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

