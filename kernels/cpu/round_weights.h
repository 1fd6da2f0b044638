/* Quantises weights when they are loaded, as defined in quantized_linear.py and int4_linear.py; included once per
 * dtype. */

#if LANES == 16 || (LANES == 8 && defined(__FMA__)) || defined(__aarch64__)
#define ROUNDS_ONCE 1 /* `fused` rounds once */
#else
#define ROUNDS_ONCE 0
#endif

/* Returns the scale of one output, and its inverse, which is 0 if all its values become 0. `block`: inputs per block of
 * the Hadamard transform, or 0. */
INLINE float NAME(scale_of_row)(const REAL *x, int64_t inputs, int64_t block, float *inverse) {
    ON_LINES float kept[KEPT_FLOATS];
    float most = NAME(greatest_size)(x, inputs, block, kept);
    *inverse = most > 0 && most < INFINITY ? 127.0f / most : 0.0f;
    if (!(*inverse < INFINITY)) *inverse = 0.0f;
    return most < INFINITY ? most / 127.0f / (block ? block : 1) : NAN;
}

/* Quantises `count` values of an output, at most RUN, which is a multiple of HADAMARD. */
INLINE void NAME(round_values)(const REAL *x, int64_t count, int64_t block, float inverse, int8_t *codes) {
    ON_LINES float values[RUN];
    if (inverse == 0) {
        memset(codes, 0, count);
        return;
    }
    NAME(load_floats)(x, count, block, values);
    int64_t i = 0;
#if ROUNDS_ONCE
    for (; i + LANES <= count; i += LANES)
        store_bytes((uint8_t *)codes + i, (vi)fused(load_f32(values + i), splat(inverse), splat(NEAREST)));
#endif
    for (; i < count; i++) codes[i] = (int8_t)nearbyint((double)values[i] * inverse);
}

/* codes: (outputs, inputs); scales: (outputs,). */
void NAME(round_int8)(const REAL *weight, int64_t outputs, int64_t inputs, int64_t block, int8_t *codes, float *scales) {
#pragma omp parallel for schedule(dynamic, 16)
    for (int64_t i = 0; i < outputs; i++) {
        float inverse;
        scales[i] = NAME(scale_of_row)(weight + i * inputs, inputs, block, &inverse);
        for (int64_t from = i * inputs, left = inputs; left > 0; from += RUN, left -= RUN)
            NAME(round_values)(weight + from, left < RUN ? left : RUN, block, inverse, codes + from);
    }
}

/* Quantises a weight to int8 and packs it as `pack_codes` does. starts, scales: of each column. */
void NAME(pack_int8)(const REAL *weight, int64_t outputs, int64_t inputs, int64_t gated, int64_t block, int8_t *packed,
                     int32_t *starts, float *scales) {
    int64_t words = words_of(inputs), panels = panels_of(outputs, gated);
    memset(starts, 0, columns_of(outputs, gated) * sizeof *starts);
#pragma omp parallel for schedule(dynamic, 4) /* dynamic, because a core may be reading the next layer */
    for (int64_t panel = 0; panel < panels; panel++) {
        const REAL *rows[PANEL];
        float inverses[PANEL];
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t output = output_of(panel, column, outputs, gated);
            float *scale = scales + panel * PANEL + column;
            rows[column] = output < 0 ? NULL : weight + output * inputs;
            *scale = output < 0 ? 0.0f : NAME(scale_of_row)(rows[column], inputs, block, inverses + column);
        }
        for (int64_t from = 0; from < words; from += RUN / 4) {
            int8_t runs[PANEL][RUN];
            int64_t rest = inputs - from * 4, size = rest < RUN ? rest < 0 ? 0 : rest : RUN;
            for (int64_t column = 0; column < PANEL; column++) {
                int64_t held = rows[column] ? size : 0;
                if (held) NAME(round_values)(rows[column] + from * 4, held, block, inverses[column], runs[column]);
                memset(runs[column] + held, 0, RUN - held);
            }
            put_runs(runs, from, words, packed + panel * words * PANEL * 4, starts + panel * PANEL);
        }
    }
}

#define SHARES 6
#define GROUP 256 /* the most inputs of a group */

/* Loads a group of LANES consecutive outputs, `inputs` apart, with one output per lane. */
INLINE void NAME(turn_group)(const REAL *x, int64_t inputs, int64_t group, vf *values) {
    for (int64_t w = 0; w < group / PAIR; w += LANES) {
        vi columns[LANES];
        transpose((const int32_t *)x + w, inputs / PAIR, columns);
        for (int i = 0; i < LANES; i++) {
            Twin two = twin_of_words(columns[i]);
            if (PAIR == 2)
                values[2 * (w + i)] = two.a, values[2 * (w + i) + 1] = two.b;
            else
                values[w + i] = (vf)columns[i];
        }
    }
}

INLINE vf nearest_code(vf wanted) { return larger(smaller(wanted, splat(7.0f)), splat(-8.0f)) + splat(NEAREST); }

/* Finds the scale with the least error of each lane's group. Returns the doubtful lanes: the choice depends on the
 * order in which errors are added, or values are outside the safe range. */
INLINE vi choose_scales(const vf *values, int64_t group, const float *shares, vf *scale) {
    vf extreme = values[0], ones[SHARES], inverses[SHARES], sums[SHARES], least = splat(INFINITY);
    vi top = (vi)extreme & 0x7fffffff;
    for (int64_t i = 1; i < group; i++) { /* the first of several counts */
        vi size = (vi)values[i] & 0x7fffffff;
        extreme = pick(size > top, values[i], extreme), top = larger_word(top, size);
    }
    vi some = top != 0, doubtful = some & ~(((vf)top > 1e-10f) & ((vf)top < 1e15f));
    for (int s = 0; s < SHARES; s++) {
        ones[s] = extreme * shares[s] / -8.0f;
        inverses[s] = pick(some, 1.0f / ones[s], splat(0.0f)), sums[s] = splat(0.0f);
    }
    for (int64_t i = 0; i < group; i++)
        for (int s = 0; s < SHARES; s++) {
            vf wanted = values[i] * inverses[s], off = (nearest_code(wanted) - splat(NEAREST)) - wanted;
            sums[s] = fused(off, off, sums[s]);
        }
    float doubt = 4.0f * (group + 8) / (1 << 24); /* bound of the difference of two sums, each in any order */
    *scale = ones[0];
    for (int s = 0; s < SHARES; s++) {
        vf error = sums[s] * (ones[s] * ones[s]), most = larger(error, least), gap = error - least;
        if (s) doubtful |= (most > 0.0f) & (larger(gap, -gap) <= doubt * most);
        vi less = error < least;
        *scale = pick(less, ones[s], *scale), least = pick(less, error, least);
    }
    return doubtful;
}

/* Packs the values of the lanes' groups, eight inputs per word as in int4_linear.h. */
INLINE void put_group(const vf *values, int64_t group, vf scale, uint8_t *to) {
    vf inverse = pick(scale != 0.0f, 1.0f / scale, splat(0.0f));
    for (int64_t i = 0; i < group; i += 8, to += PANEL * 4) {
        vi word = splat_word(0);
        for (int n = 7; n >= 0; n--) { /* the last four inputs are in the upper halves of bytes */
            vi code = (vi)nearest_code(values[i + n / 2 + n % 2 * 4] * inverse);
            word = (word << 4) | ((code + 8) & 15);
        }
        *(vi *)to = word;
    }
}

/* Quantises one group of each of up to LANES consecutive outputs, and packs it from `to` on. */
INLINE void NAME(round_group)(const REAL *x, int64_t inputs, int64_t group, int64_t count, const float *shares, vf *scale,
                              vi *unsure, uint8_t *to) {
    vf values[GROUP];
    if (count < LANES) {
        REAL few[LANES * GROUP] = {0};
        for (int64_t i = 0; i < count; i++) memcpy(few + i * group, x + i * inputs, group * sizeof *few);
        NAME(turn_group)(few, group, group, values);
    } else {
        NAME(turn_group)(x, inputs, group, values);
    }
    *unsure = choose_scales(values, group, shares, scale);
    put_group(values, group, *scale, to);
}

/* Quantises a weight and packs it as `pack_int4` does. inputs: a multiple of `group`, which is a multiple of twice
 * LANES and at most GROUP; scales, doubtful: (outputs, groups). Doubtful groups must be quantised by
 * the reference and stored by `put_int4`. `shares`: those of the reference. */
void NAME(round_int4)(const REAL *weight, int64_t outputs, int64_t inputs, int64_t gated, int64_t group, const float *shares,
                      float *scales, uint8_t *doubtful, uint8_t *packed) {
    int64_t groups = inputs / group, panels = panels_of(outputs, gated), pairs = padded(inputs) / 8;
#pragma omp parallel for collapse(2) schedule(dynamic, COLUMNS) /* dynamic, because a core may be reading the next layer */
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t part = 0; part < COLUMNS; part++) {
            int64_t first = output_of(panel, part * LANES, outputs, gated), count = 0;
            while (count < LANES && output_of(panel, part * LANES + count, outputs, gated) >= 0) count++;
            for (int64_t i = 0; i < pairs && (count < LANES || inputs < padded(inputs)); i++)
                memset(packed + ((panel * pairs + i) * PANEL + part * LANES) * 4, 0x88, LANES * 4); /* padding: 0 + 8 */
            for (int64_t g = 0; count && g < groups; g++) {
                const REAL *from = weight + first * inputs + g * group;
                uint8_t *to = packed + ((panel * pairs + g * group / 8) * PANEL + part * LANES) * 4;
                vf scale;
                vi unsure;
                if (group == 32)
                    NAME(round_group)(from, inputs, 32, count, shares, &scale, &unsure, to);
                else
                    NAME(round_group)(from, inputs, group, count, shares, &scale, &unsure, to);
                for (int64_t i = 0; i < count; i++) {
                    int64_t at = (first + i) * groups + g;
                    scales[at] = scale[i], doubtful[at] = unsure[i] != 0;
                }
            }
        }
}

#undef SHARES
#undef GROUP
#undef ROUNDS_ONCE
