/* Code that is the same for every dtype: packing of weights, and properties of this build. */
#include "operators.h"

int64_t lanes(void) { return LANES; }
int64_t most_rows(void) { return MOST_ROWS; }

/* Returns true if products use matrix tiles. */
int64_t has_tiles(void) { return TILES; }

int64_t packed_columns(int64_t outputs, int64_t gated) { return columns_of(outputs, gated); }

/* Returns the output of each column, -1 for padding. */
void packed_order(int64_t outputs, int64_t gated, int64_t *order) {
    for (int64_t i = 0; i < columns_of(outputs, gated); i++)
        order[i] = output_of(i / PANEL, i % PANEL, outputs, gated);
}

/* Decodes the columns from n `ranked` integers; -1 for a result that is not finite. */
void ranked_columns(const uint64_t *greatest, int64_t *columns, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = greatest[i] >> 32, plain = bits >> 31 ? bits & 0x7fffffffu : ~bits;
        int finite = (plain & 0x7f800000u) != 0x7f800000u;
        columns[i] = finite ? (int64_t)(uint32_t)~(uint32_t)greatest[i] : -1;
    }
}

/* Computes logit = cap * tanh(logit / cap) for (rows, width) logits. */
void cap_logits(float *logits, int64_t rows, int64_t width, float cap) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float some[LANES] = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t at = row * width + i, count = width - i < LANES ? width - i : LANES;
            memcpy(some, logits + at, count * sizeof(float));
            store_f32(some, cap * tanh_vector(load_f32(some) / cap));
            memcpy(logits + at, some, count * sizeof(float));
        }
    }
}

/* Sets the logits of tokens whose bit is 0 to -inf, in n of the rows of `width` logits, each with `words` words of
 * bits. */
void mask_logits(float *logits, int64_t width, const int32_t *rows, int64_t n, const uint32_t *bits, int64_t words) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float *row = logits + rows[i] * width;
        for (int64_t word = 0; word < words; word++) {
            uint32_t allowed = bits[i * words + word];
            int64_t first = word * 32, count = width - first < 32 ? width - first : 32;
            if (allowed == UINT32_MAX) continue;
            for (int64_t j = 0; j < count; j++)
                if (!(allowed >> j & 1)) row[first + j] = -INFINITY;
        }
    }
}

/* Returns the greatest of `width` logits whose bit is set, the lowest token if equal; -1 if it is not finite or a logit
 * is NaN. `any` is the same for all logits. Both in one pass. */
static int64_t greatest_allowed(const float *row, int64_t width, const uint32_t *bits, int64_t *any) {
    float best = -INFINITY, top = -INFINITY;
    int64_t found = -1, place = -1;
    int strange = 0;
    for (int64_t first = 0; first < width; first += 32) {
        uint32_t allowed = bits[first / 32];
        int64_t count = width - first < 32 ? width - first : 32;
        float most = INFINITY; /* the last word may be partial: then the loops below decide */
        int bad = 1;
        if (count == 32) {
            vf tops = splat(-INFINITY), odd = splat(0.0f);
            for (int64_t j = 0; j < 32; j += LANES) {
                vf values = load_f32(row + first + j);
                tops = pick(values > tops, values, tops);
                odd = pick(values != values, splat(1.0f), odd);
            }
            most = lane_max(tops), bad = any_greater(odd, 0.0f);
        }
        if (most > top)
            for (int64_t j = 0; j < count; j++)
                if (row[first + j] > top) top = row[first + j], place = first + j;
        if (bad)
            for (int64_t j = 0; j < count; j++) strange |= (allowed >> j & 1) && row[first + j] != row[first + j];
        if (most > best && allowed)
            for (int64_t j = 0; j < count; j++)
                if ((allowed >> j & 1) && row[first + j] > best) best = row[first + j], found = first + j;
    }
    *any = place;
    return strange || best == INFINITY ? -1 : found;
}

/* Finds, for n rows of `width` logits with `words` words of bits each, the greatest token that the bits allow (-1 if it
 * is not finite), and whether the bits exclude the greatest of all. */
void masked_argmax(const float *logits, int64_t width, int64_t n, const uint32_t *bits, int64_t words, int64_t *tokens,
                   uint8_t *barred) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        int64_t any;
        tokens[i] = greatest_allowed(logits + i * width, width, bits + i * words, &any);
        barred[i] = any >= 0 && !(bits[i * words + any / 32] >> any % 32 & 1);
    }
}

/* Copies a run of each of a panel's outputs, from byte `from` of a row on, padded with zeros. */
INLINE void copy_runs(const int8_t *weight, int64_t outputs, int64_t inputs, int64_t gated, int64_t panel, int64_t from,
                      int8_t (*runs)[RUN]) {
    int64_t rest = inputs - from, size = rest < RUN ? rest < 0 ? 0 : rest : RUN;
    for (int64_t column = 0; column < PANEL; column++) {
        int64_t output = output_of(panel, column, outputs, gated), held = output < 0 ? 0 : size;
        if (held) memcpy(runs[column], weight + output * inputs + from, held);
        memset(runs[column] + held, 0, RUN - held);
    }
}

/* Packs an int8 weight (outputs, inputs) and computes the starts of its sums. */
void pack_codes(const int8_t *weight, int64_t outputs, int64_t inputs, int64_t gated, int8_t *packed, int32_t *starts) {
    int64_t words = words_of(inputs), panels = panels_of(outputs, gated);
    memset(starts, 0, columns_of(outputs, gated) * sizeof *starts);
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t from = 0; from < words; from += RUN / 4) {
            int8_t runs[PANEL][RUN];
            copy_runs(weight, outputs, inputs, gated, panel, from * 4, runs);
            put_runs(runs, from, words, packed + panel * words * PANEL * 4, starts + panel * PANEL);
        }
}

/* Packs an int4 weight (outputs, inputs), given as int8, in the layout of int4_linear.h. */
void pack_int4(const int8_t *weight, int64_t outputs, int64_t inputs, int64_t gated, uint8_t *packed) {
    int64_t pairs = padded(inputs) / 8, panels = panels_of(outputs, gated);
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t from = 0; from < pairs; from += RUN / 8) {
            int8_t runs[PANEL][RUN];
            copy_runs(weight, outputs, inputs, gated, panel, from * 8, runs);
            int64_t until = pairs - from < RUN / 8 ? pairs - from : RUN / 8;
            for (int64_t i = 0; i < until; i++)
                for (int64_t column = 0; column < PANEL; column++) {
                    uint32_t halves[2], both;
                    memcpy(halves, runs[column] + i * 8, 8);
                    both = ((halves[0] & 0x0f0f0f0f) | (halves[1] & 0x0f0f0f0f) << 4) ^ 0x88888888; /* plus 8 each */
                    memcpy(packed + ((panel * pairs + from + i) * PANEL + column) * 4, &both, 4);
                }
        }
}

/* Returns the column of the panels that holds an output. */
INLINE int64_t column_of(int64_t output, int64_t outputs, int64_t gated) {
    int64_t half = PANEL / 2, up = gated && output >= outputs / 2, own = output - up * (outputs / 2);
    return gated ? own / half * PANEL + own % half + up * half : output;
}

/* Replaces `count` groups in a weight that `round_int4` packed. places: output * groups + group, of each; codes:
 * (count, group) int8. */
void put_int4(const int8_t *codes, const int64_t *places, int64_t count, int64_t outputs, int64_t inputs, int64_t gated,
              int64_t group, uint8_t *packed) {
    int64_t groups = inputs / group, pairs = padded(inputs) / 8;
    for (int64_t n = 0; n < count; n++, codes += group) {
        int64_t column = column_of(places[n] / groups, outputs, gated);
        int64_t from = column / PANEL * pairs + places[n] % groups * (group / 8);
        for (int64_t i = 0; i < group; i += 8) {
            uint32_t word = 0;
            for (int k = 0; k < 8; k++) word |= (uint32_t)((codes[i + k] + 8) & 15) << (k % 4 * 8 + k / 4 * 4);
            memcpy(packed + ((from + i / 8) * PANEL + column % PANEL) * 4, &word, 4);
        }
    }
}

/* Computes the scales of an int4 weight in the order of products, (panels, groups, PANEL), from scales (outputs,
 * groups). They are 0 for padding. */
void int4_columns(const float *scales, int64_t outputs, int64_t groups, int64_t gated, float *in_panels) {
    int64_t columns = columns_of(outputs, gated);
#pragma omp parallel for schedule(static, PANEL)
    for (int64_t column = 0; column < columns; column++) {
        int64_t output = output_of(column / PANEL, column % PANEL, outputs, gated);
        float *to = in_panels + column / PANEL * groups * PANEL + column % PANEL;
        for (int64_t g = 0; g < groups; g++) to[g * PANEL] = output < 0 ? 0.0f : scales[output * groups + g];
    }
}
