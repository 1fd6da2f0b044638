/* Codes of a weight that is quantised once it is loaded, by output, as quantized_linear.py and int4_linear.py say; included
 * once a dtype. */

#if LANES == 16 || (LANES == 8 && defined(__FMA__)) || defined(__aarch64__)
#define ROUNDS_ONCE 1 /* `fused` is what it says */
#else
#define ROUNDS_ONCE 0
#endif
#define NEAREST 12582912.0f /* whose sum with a number below 2^22 is the nearest integer, ties to even, in its lowest bits */

/* Codes of one output, its scale in return. */
INLINE float NAME(round_row)(const REAL *x, int64_t inputs, int8_t *codes) {
    float most = NAME(greatest_size)(x, inputs), inverse = most > 0 && most < INFINITY ? 127.0f / most : 0.0f;
    if (inverse == 0 || !(inverse < INFINITY)) {
        memset(codes, 0, inputs);
        return most < INFINITY ? most / 127.0f : NAN;
    }
    int64_t i = 0;
#if ROUNDS_ONCE
    for (; i + 2 * LANES <= inputs; i += 2 * LANES) {
        Twin v = NAME(load_twin)(x + i);
        vi a = (vi)fused(v.a, splat(inverse), splat(NEAREST)), b = (vi)fused(v.b, splat(inverse), splat(NEAREST));
        if (PAIR == 2)
            store_halves((uint16_t *)(codes + i), (a & 0xff) | (b << 8));
        else
            store_bytes((uint8_t *)codes + i, a), store_bytes((uint8_t *)codes + i + LANES, b);
    }
#endif
    for (; i < inputs; i++) codes[i] = (int8_t)nearbyint((double)LOAD(x[i]) * inverse);
    return most / 127.0f;
}

/* codes: (outputs, inputs); scales: (outputs,). */
void NAME(round_int8)(const REAL *weight, int64_t outputs, int64_t inputs, int8_t *codes, float *scales) {
#pragma omp parallel for schedule(dynamic, 16)
    for (int64_t i = 0; i < outputs; i++) scales[i] = NAME(round_row)(weight + i * inputs, inputs, codes + i * inputs);
}

#define SHARES 6
#define GROUP 256 /* most inputs of a group */

INLINE vf NAME(nearest_code)(vf value) {
    vf rounded = (value + splat(NEAREST)) - splat(NEAREST);
    rounded = pick(rounded > 7.0f, splat(7.0f), rounded);
    return pick(rounded < -8.0f, splat(-8.0f), rounded);
}

/* Codes of a group, a multiple of LANES, and its scale. 0 in return: which of the scales leaves the least error depends on
 * the order in which errors are added, or values are beyond what is sure here; whoever calls asks the reference. */
INLINE int NAME(round_group)(const REAL *x, int64_t group, const float *shares, int8_t *codes, float *scale) {
    vf values[GROUP / LANES];
    int64_t count = group / LANES;
    vi tops = splat_word(0), above = splat_word(0), below = splat_word(0);
    for (int64_t i = 0; i < count; i++) {
        values[i] = LOADV(x + i * LANES);
        tops = larger_word(tops, (vi)values[i] & 0x7fffffff);
    }
    int32_t bits = largest_word(tops);
    float most, best, least = INFINITY;
    memcpy(&most, &bits, 4);
    if (most == 0) {
        memset(codes, 0, group);
        *scale = LOAD(x[0]) / -8.0f;
        return 1;
    }
    if (!(most > 1e-15f && most < 1e15f)) return 0;
    for (int64_t i = 0; i < count; i++) above |= values[i] == splat(most), below |= values[i] == splat(-most);
    int up = largest_word((vi)above & 1), down = largest_word((vi)below & 1);
    if (up && down) { /* the first of them counts */
        int64_t first = 0;
        while (fabsf(LOAD(x[first])) != most) first++;
        up = LOAD(x[first]) > 0;
    }
    float extreme = up ? most : -most, ones[SHARES], error[SHARES];
    vf sums[SHARES], inverses[SHARES];
    for (int s = 0; s < SHARES; s++) {
        ones[s] = extreme * shares[s] / -8.0f;
        inverses[s] = splat(1.0f / ones[s]), sums[s] = splat(0.0f);
    }
    for (int64_t i = 0; i < count; i++)
        for (int s = 0; s < SHARES; s++) {
            vf wanted = values[i] * inverses[s], off = NAME(nearest_code)(wanted) - wanted;
            sums[s] += off * off;
        }
    for (int s = 0; s < SHARES; s++) error[s] = lane_sum(sums[s]) * (ones[s] * ones[s]);
    best = extreme / -8.0f;
    float doubt = 2.0f * (group + 8) / (1 << 24); /* of two sums of positive numbers, each added up in any order */
    for (int s = 0; s < SHARES; s++) {
        float more = error[s] > least ? error[s] : least;
        if (s && more > 0 && fabsf(error[s] - least) <= doubt * more) return 0;
        if (error[s] < least) least = error[s], best = ones[s];
    }
    float inverse = 1.0f / best;
    for (int64_t i = 0; i < count; i++)
        store_bytes((uint8_t *)codes + i * LANES, (vi)(NAME(nearest_code)(values[i] * splat(inverse)) + splat(NEAREST)));
    *scale = best;
    return 1;
}

/* codes: (outputs, inputs), inputs a multiple of `group`, this one of LANES and at most GROUP; scales, doubtful: (outputs,
 * groups), 1 where the rest is not to be used. `shares`: as the reference has them. */
void NAME(round_int4)(const REAL *weight, int64_t outputs, int64_t inputs, int64_t group, const float *shares, int8_t *codes,
                      float *scales, uint8_t *doubtful) {
    int64_t groups = inputs / group;
#pragma omp parallel for schedule(dynamic, 16)
    for (int64_t i = 0; i < outputs; i++)
        for (int64_t at = i * groups; at < (i + 1) * groups; at++) {
            const REAL *own = weight + at * group;
            int8_t *to = codes + at * group;
            int sure = group == 32 ? NAME(round_group)(own, 32, shares, to, scales + at)
                                   : NAME(round_group)(own, group, shares, to, scales + at);
            doubtful[at] = !sure;
        }
}

#undef NEAREST
#undef SHARES
#undef GROUP
#undef ROUNDS_ONCE
