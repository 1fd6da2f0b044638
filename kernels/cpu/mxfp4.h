/* Weights of experts in MXFP4, of which a panel is widened to the stored type before rows pass over it: its values are those
 * of a panel of linear.h, to the bit, and so are sums. Included once a dtype.
 *
 * A panel holds, byte after byte of the inputs, that byte of each of its outputs: two codes (E2M1), the first in the lower
 * half. Each 32 inputs of an output share a power of two, of which the exponent and 127 more is kept, a byte: (panels,
 * groups, PANEL) in the place of the weight's scales. */
#define MXFP4_GROUP 32

/* Whether a weight is one. */
INLINE int is_mxfp4(const Weight *w) { return w->group && !w->starts; }

INLINE vi words_of_bytes(const uint8_t *from) {
    typedef uint8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));
    return __builtin_convertvector(*(const vb *)from, vi);
}

/* What the lowest four bits of each lane stand for: a sign, two bits of an exponent, one of a fraction. */
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

/* 2 ^ (exponent - 127); infinite for 255. */
INLINE vf power_of(vi exponent) { return (vf)((exponent << 23) | ((exponent == 0) & (1 << 22))); }

/* Two values of each of LANES columns, those of byte `i`, go where they stand in a panel of linear.h. */
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

/* `to`: as many words as a panel of linear.h has. */
static void NAME(widen_panel)(const Weight *w, int64_t panel, int32_t *to) {
    const int64_t groups = w->inputs / MXFP4_GROUP, bytes = MXFP4_GROUP / 2;
    const uint8_t *codes = (const uint8_t *)w->panels + panel * groups * bytes * PANEL;
    const uint8_t *exponents = (const uint8_t *)w->scales + panel * groups * PANEL;
    for (int64_t g = 0; g < groups; g++, exponents += PANEL) {
        vf powers[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) powers[c] = power_of(words_of_bytes(exponents + c * LANES));
        for (int64_t i = g * bytes; i < (g + 1) * bytes; i++)
            for (int c = 0; c < COLUMNS; c++, codes += LANES) {
                vi both = words_of_bytes(codes);
                NAME(put_pair)(of_e2m1(both) * powers[c], of_e2m1(both >> 4) * powers[c], i, c * LANES, to);
            }
    }
}
