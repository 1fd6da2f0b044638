/* The experts of a feed-forward layer; included once per dtype. Rows, one per token and chosen expert, are sorted by
 * expert, and one team of threads computes the tiles of all experts. Tiles are as in linear.h and quantized_linear.h: a
 * row's result does not depend on the other rows of its expert. */
#include "mxfp4.h"

typedef struct {
    Weight gate_up, down; /* of the first expert; the panels, biases, starts and scales of the others follow */
    const REAL *x;        /* (tokens, gate_up.inputs) */
    const int64_t *chosen; /* (tokens, choices): experts */
    const float *weights; /* (tokens, choices) */
    REAL *y;              /* (tokens, down.outputs) */
    int64_t *loads;       /* (experts,): the rows of each expert are added */
    /* Buffers. (experts + 1,): the first row and the first row block of each expert; (rows,): the token of each row,
     * and the row of each token and choice */
    int64_t *starts, *blocks, *tokens_of, *places;
    REAL *rows, *inner, *made; /* (rows, gate_up.inputs), (rows, down.inputs), (rows, down.outputs) */
    uint8_t *codes;            /* for quantised weights: (rows, most inputs padded) */
    float *row_scales;         /* (rows, most of `scales_of` both weights) */
    char *wide;                /* for MXFP4 weights: a widened panel per thread */
    int64_t wide_bytes;        /* bytes of such a panel */
    int64_t tokens, choices, experts, kind; /* the gated kind of gate_up */
} NAME(Experts);

INLINE int NAME(in_tiles)(const Weight *first) { return has_quantized_rows(first) ? TILES && first->form == INT8 : IN_TILES; }

/* Splits the rows of an expert, whose weight has the shape of `first`. */
INLINE RowSplit NAME(expert_rows)(const Weight *first, const int64_t *starts, int64_t expert) {
    int64_t rows = starts[expert + 1] - starts[expert];
    if (IN_SLICES && is_mxfp4(first)) return (RowSplit){starts[expert], rows, WIDE_ROWS, (rows + WIDE_ROWS - 1) / WIDE_ROWS, 1};
    if (has_quantized_rows(first)) return split_quantized_rows(first, starts[expert], rows);
    return split_rows(starts[expert], rows, first->inputs * (int64_t)sizeof(REAL), IN_TILES);
}

/* Computes the first row block of each expert, and the end of the last one. Experts do not share row blocks. */
static void NAME(count_blocks)(const Weight *first, const int64_t *starts, int64_t experts, int64_t *blocks) {
    blocks[0] = 0;
    for (int64_t e = 0; e < experts; e++) blocks[e + 1] = blocks[e] + NAME(expert_rows)(first, starts, e).blocks;
}

/* Returns the weight of one of several experts. */
INLINE Weight NAME(expert)(const Weight *first, int64_t at, int64_t kind) {
    Weight found = *first;
    int64_t columns = columns_of(first->outputs, is_gated(kind)) * at, inputs = first->inputs;
    int64_t words = words_of(has_quantized_rows(first) ? inputs : inputs * (int64_t)sizeof(REAL));
    if (is_mxfp4(first)) {
        found.panels = (const char *)first->panels + columns * inputs / 2;
        found.scales = (const float *)((const uint8_t *)first->scales + columns * inputs / MXFP4_GROUP);
    } else { /* int4: two values share a byte, and a column has one scale per group */
        found.panels = (const char *)first->panels + columns * words * (first->group ? 2 : 4);
    }
    int64_t groups = first->group ? (inputs + first->group - 1) / first->group : 1;
    if (first->bias) found.bias = (const REAL *)first->bias + columns;
    if (first->starts) found.starts = first->starts + columns;
    if (has_quantized_rows(first)) found.scales = first->scales + columns * groups;
    if (first->zeros) found.zeros = first->zeros + columns * groups;
    return found;
}

/* Multiplies as `linear`, with expert e's weight for the rows from starts[e] to starts[e + 1]. `wide`: this thread's
 * buffer for a widened panel. */
TEAM void NAME(team_grouped)(const REAL *x, const Weight *first, const int64_t *starts, const int64_t *blocks,
                             int64_t experts, void *y, uint8_t *codes, float *row_scales, char *wide, int64_t kind) {
#if !IN_SLICES
    int64_t widened = -1; /* which panel of all experts `wide` holds */
#endif
    int64_t panels = panels_of(first->outputs, is_gated(kind)), height = 0; /* the height that tiles are configured for */
    const int in_tiles = NAME(in_tiles)(first);
    Waiting waiting;
    begin_waiting(&waiting);
    if (has_quantized_rows(first)) NAME(team_quantize)(x, first, codes, row_scales, starts[experts]);
#pragma omp for schedule(guided, 1) nowait
    for (int64_t at = 0; at < blocks[experts] * panels; at++) {
        int64_t e = 0, end = experts;
        while (end - e > 1) { /* find the last expert that starts at or before this block and has rows */
            int64_t middle = (e + end) / 2;
            if (blocks[middle] * panels <= at) e = middle; else end = middle;
        }
        Weight weight = NAME(expert)(first, e, kind);
        const RowSplit split = NAME(expert_rows)(first, starts, e);
        Place here = place(at - blocks[e] * panels, &split, panels);
        if (split.height != height) begin_tiles(&split, in_tiles), height = split.height;
        if (has_quantized_rows(first))
            NAME(quantized_block)(codes, row_scales, &weight, y, &split, here, &waiting, kind);
#if IN_SLICES
        else if (is_mxfp4(first))
            NAME(widened_block)(x, &weight, y, &split, here, kind);
#else
        else if (is_mxfp4(first)) {
            if (widened != e * panels + here.panel)
                NAME(widen_groups)(&weight, here.panel, 0, weight.inputs / MXFP4_GROUP, (int32_t *)wide);
            widened = e * panels + here.panel;
            NAME(panel_block)(x, &weight, wide, 0, y, &split, here, &waiting, kind);
        }
#endif
        else
            NAME(linear_block)(x, &weight, y, &split, here, &waiting, kind);
    }
    NAME(end_waiting)(&waiting);
    end_tiles(in_tiles);
#pragma omp barrier
}

/* Returns this thread's part of the team's buffer for widened panels. */
INLINE char *wide_of(char *wide, int64_t bytes) { return wide ? wide + omp_get_thread_num() * bytes : NULL; }

/* `blocks`: a buffer of experts + 1 numbers; `codes` and `row_scales` as for `quantized_linear`, `wide` as in the
 * structure. */
void NAME(grouped_linear)(const REAL *x, const Weight *first, const int64_t *starts, int64_t experts, int64_t *blocks,
                          void *y, uint8_t *codes, float *row_scales, char *wide, int64_t wide_bytes, int64_t kind) {
    NAME(count_blocks)(first, starts, experts, blocks);
#pragma omp parallel
    NAME(team_grouped)(x, first, starts, blocks, experts, y, codes, row_scales, wide_of(wide, wide_bytes), kind);
}

/* Sorts rows by expert; returns 0, or -1 if an expert does not exist. */
static int64_t NAME(sort_rows)(const NAME(Experts) *a) {
    int64_t rows = a->tokens * a->choices;
    memset(a->starts, 0, (a->experts + 1) * sizeof *a->starts);
    for (int64_t i = 0; i < rows; i++) {
        if (a->chosen[i] < 0 || a->chosen[i] >= a->experts) return -1;
        a->starts[a->chosen[i] + 1]++;
    }
    for (int64_t e = 0; e < a->experts; e++) {
        a->loads[e] += a->starts[e + 1];
        a->starts[e + 1] += a->starts[e];
        a->blocks[e] = a->starts[e]; /* the expert's next free row */
    }
    for (int64_t i = 0; i < rows; i++) {
        a->places[i] = a->blocks[a->chosen[i]]++;
        a->tokens_of[a->places[i]] = i / a->choices;
    }
    NAME(count_blocks)(&a->gate_up, a->starts, a->experts, a->blocks);
    return 0;
}

/* Computes y, the sum of weight * made over a token's rows, in the order of its choices. */
INLINE void NAME(combine_row)(const NAME(Experts) *a, int64_t token) {
    int64_t width = a->down.outputs, first = token * a->choices, i = 0;
    REAL *y = a->y + token * width;
    for (; i + LANES <= width; i += LANES) {
        vf sum = LOADV(a->made + a->places[first] * width + i) * a->weights[first];
        for (int64_t c = first + 1; c < first + a->choices; c++)
            sum += LOADV(a->made + a->places[c] * width + i) * a->weights[c];
        STOREV(y + i, sum);
    }
    for (; i < width; i++) {
        float sum = LOAD(a->made[a->places[first] * width + i]) * a->weights[first];
        for (int64_t c = first + 1; c < first + a->choices; c++)
            sum += LOAD(a->made[a->places[c] * width + i]) * a->weights[c];
        y[i] = STORE(sum);
    }
}

/* Returns 0, or -1 if a token chose an expert that does not exist. */
int64_t NAME(experts)(const NAME(Experts) *a) {
    int64_t inputs = a->gate_up.inputs;
    if (NAME(sort_rows)(a)) return -1;
#pragma omp parallel
    {
        char *wide = wide_of(a->wide, a->wide_bytes);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->tokens * a->choices; row++)
            memcpy(a->rows + row * inputs, a->x + a->tokens_of[row] * inputs, inputs * sizeof(REAL));
        NAME(team_grouped)(a->rows, &a->gate_up, a->starts, a->blocks, a->experts, a->inner, a->codes, a->row_scales,
                           wide, a->kind);
        NAME(team_grouped)(a->inner, &a->down, a->starts, a->blocks, a->experts, a->made, a->codes, a->row_scales,
                           wide, PLAIN);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < a->tokens; token++) NAME(combine_row)(a, token);
    }
    return 0;
}
