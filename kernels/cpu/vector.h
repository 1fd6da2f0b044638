/* Vectors of this CPU's width and the operations on them, for float32 and bfloat16.
 *
 * A word is 32 bits of a row: one float, or two bfloat16 values that are adjacent in the dimension that is summed.
 * `dot` multiplies words lane by lane and adds the products to a float, by one fused multiply-add or by AVX512_BF16.
 * The same source serves both dtypes, and every sum runs in the order of its words, whatever else is computed.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define COLUMNS 4 /* vectors of a tile of results: 6 x 4 sums, 4 operands and a broadcast fill 32 registers */
#elif defined(__AVX2__)
#define LANES 8
#define COLUMNS 2 /* 16 registers */
#elif defined(__aarch64__)
#define LANES 4
#define COLUMNS 4
#else
#define LANES 4
#define COLUMNS 2
#endif
#define ROWS 6 /* rows of such a tile */
#if COLUMNS == 2 /* 16 registers hold the sums, a vector per column, and one word of one row at a time */
#define FEW_REGISTERS 1
#else
#define FEW_REGISTERS 0
#endif
#define PANEL (COLUMNS * LANES)
#define LINE 64 /* bytes of a cache line */
#define TO_L2 2 /* prefetch to the L2 cache */
#define ON_LINES __attribute__((aligned(LINE))) /* data across two lines is accessed twice */
#define INLINE static inline __attribute__((always_inline))
/* Called by all threads of a team together, and compiled once for all callers; OF_UNITS: also callers in other units. */
#if defined(__clang__)
#define APART __attribute__((noinline))
#else
#define APART __attribute__((noinline, noclone)) /* without it, a copy per constant argument takes 7% of compile time */
#endif
#define ONCE static APART /* keeps its callers short for the compiler */
#define TEAM static APART
#define TEAM_OF_UNITS APART __attribute__((visibility("hidden")))

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_word(int32_t x) { return x - (vi){0}; }
INLINE vf pick(vi mask, vf yes, vf no) { /* each lane of the mask is all ones or all zeros */
#if LANES == 8
    return (vf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
#endif
}

/* Returns a * b + c, rounded once if the CPU can. Compiler flags forbid contraction everywhere else, because the
 * compiler could choose which of two products it fuses, and choose differently for each number of rows that a loop is
 * compiled for. */
INLINE vf fused(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float fused_one(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* Rotate (a, b) by an angle. */
INLINE vf rotated_a(vf a, vf b, vf cosine, vf sine) { return fused(a, cosine, -(b * sine)); }
INLINE vf rotated_b(vf a, vf b, vf cosine, vf sine) { return fused(b, cosine, a * sine); }

INLINE float bf16_load(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE bf16 bf16_store(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bf16)rounded; /* rounding must not turn NaN into infinity */
}

INLINE vf load_f32(const float *from) { return *(const vf *)from; }
INLINE void store_f32(float *to, vf value) { *(vf *)to = value; }
INLINE vf load_bf16(const bf16 *from) {
#if LANES == 16 /* GCC 12 would widen the halves one by one */
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (vf)(__builtin_convertvector(*(const vh *)from, vi) << 16);
#endif
}

INLINE void store_bf16(bf16 *to, vf value) {
#if defined(__AVX512BF16__) && LANES == 16
    __m256bh half = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &half, sizeof half);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    bfloat16x4_t half = vcvt_bf16_f32((float32x4_t)value);
    memcpy(to, &half, sizeof half);
#else
    vi bits = (vi)value;
    vi rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits & 0x7fffffff) > 0x7f800000;
    *(vh *)to = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), vh);
#endif
}

/* Stores two vectors, one after the other. */
INLINE void store_two_f32(float *to, vf a, vf b) { store_f32(to, a), store_f32(to + LANES, b); }
INLINE void store_two_bf16(bf16 *to, vf a, vf b) {
#if defined(__AVX512BF16__) && LANES == 16
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    memcpy(to, &both, sizeof both);
#else
    store_bf16(to, a), store_bf16(to + LANES, b);
#endif
}

INLINE void store_bytes(uint8_t *to, vi value) { /* the lowest byte of each lane */
#if LANES == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)value));
#elif LANES == 8
    __m256i lowest = _mm256_shuffle_epi8((__m256i)value, _mm256_set1_epi32(0x0c080400));
    __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
    _mm_storel_epi64((__m128i *)to, both);
#else
    typedef uint8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));
    *(vb *)to = __builtin_convertvector(value, vb);
#endif
}

#if LANES == 8
INLINE __m128i lower_halves(vi value) { /* of each lane */
    const __m256i halves = _mm256_set1_epi64x(0x0d0c090805040100);
    __m256i twice = _mm256_shuffle_epi8((__m256i)value, halves);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08));
}
#endif

INLINE void store_halves(uint16_t *to, vi value) { /* the lower half of each lane */
#if LANES == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)value));
#elif LANES == 8
    _mm_storeu_si128((__m128i *)to, lower_halves(value));
#else
    *(vh *)to = __builtin_convertvector(value, vh);
#endif
}

/* Twice LANES adjacent values of a row as two vectors, in the order that is cheapest to load: float32 in order;
 * bfloat16 the even values, which are the lower halves of words, and then the odd ones. */
typedef struct {
    vf a, b;
} Twin;

/* Splits twice LANES values in order into the even and the odd ones. */
INLINE Twin apart(Twin t) {
#if LANES == 16
    __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    return (Twin){(vf)_mm512_permutex2var_ps((__m512)t.a, even, (__m512)t.b),
                  (vf)_mm512_permutex2var_ps((__m512)t.a, odd, (__m512)t.b)};
#elif LANES == 8
    __m256d even = _mm256_castps_pd(_mm256_shuffle_ps((__m256)t.a, (__m256)t.b, 0x88));
    __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps((__m256)t.a, (__m256)t.b, 0xdd));
    return (Twin){(vf)_mm256_permute4x64_pd(even, 0xd8), (vf)_mm256_permute4x64_pd(odd, 0xd8)};
#else
    float values[2 * LANES], halves[2][LANES];
    memcpy(values, &t, sizeof t);
    for (int i = 0; i < LANES; i++) halves[0][i] = values[2 * i], halves[1][i] = values[2 * i + 1];
    memcpy(&t, halves, sizeof t);
    return t;
#endif
}

/* The inverse of `apart`. */
INLINE Twin in_order(Twin t) {
#if LANES == 16
    __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    return (Twin){(vf)_mm512_permutex2var_ps((__m512)t.a, low, (__m512)t.b),
                  (vf)_mm512_permutex2var_ps((__m512)t.a, high, (__m512)t.b)};
#elif LANES == 8
    __m256 low = _mm256_unpacklo_ps((__m256)t.a, (__m256)t.b), high = _mm256_unpackhi_ps((__m256)t.a, (__m256)t.b);
    return (Twin){(vf)_mm256_permute2f128_ps(low, high, 0x20), (vf)_mm256_permute2f128_ps(low, high, 0x31)};
#else
    float values[2 * LANES];
    for (int i = 0; i < LANES; i++) values[2 * i] = t.a[i], values[2 * i + 1] = t.b[i];
    memcpy(&t, values, sizeof t);
    return t;
#endif
}

INLINE Twin twin_of_words(vi words) { return (Twin){(vf)(words << 16), (vf)(words & (int32_t)0xffff0000)}; }

/* Rounds to the nearest bfloat16, two per word. */
INLINE vi words_of_twin(Twin t) {
#if defined(__AVX512BF16__) && LANES == 16
    static const int16_t halves[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)t.b, (__m512)t.a);
    return (vi)_mm512_permutexvar_epi16(_mm512_loadu_si512(halves), rounded);
#else
    vi low = (vi)t.a, high = (vi)t.b, low_nan = (low & 0x7fffffff) > 0x7f800000, high_nan = (high & 0x7fffffff) > 0x7f800000;
    low = (low + 0x7fff + ((low >> 16) & 1)) >> 16, high = high + 0x7fff + ((high >> 16) & 1);
    low = (low_nan & 0x7fc0) | (~low_nan & low & 0xffff);
    return low | (high_nan & 0x7fc00000) | (~high_nan & high & (int32_t)0xffff0000);
#endif
}

/* Returns words with one value of each of two rows. */
INLINE vi paired(const uint16_t *first, const uint16_t *second) {
#if LANES == 16
    __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first));
    __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)second));
    return (vi)_mm512_or_si512(a, _mm512_slli_epi32(b, 16));
#else
    return __builtin_convertvector(*(const vh *)first, vi) | __builtin_convertvector(*(const vh *)second, vi) << 16;
#endif
}

INLINE Twin load_twin_f32(const float *from) { return (Twin){load_f32(from), load_f32(from + LANES)}; }
INLINE Twin load_twin_bf16(const bf16 *from) { return twin_of_words(*(const vi *)from); }
INLINE void store_twin_f32(float *to, Twin t) { store_f32(to, t.a), store_f32(to + LANES, t.b); }
INLINE void store_twin_bf16(bf16 *to, Twin t) { *(vi *)to = words_of_twin(t); }
INLINE Twin round_twin_f32(Twin t) { return t; }
INLINE Twin round_twin_bf16(Twin t) { return twin_of_words(words_of_twin(t)); }

/* Returns the values of a twin in order. */
INLINE Twin ordered_twin_f32(Twin t) { return t; }
INLINE Twin ordered_twin_bf16(Twin t) { return in_order(t); }

/* Loads the even values and the odd ones. */
INLINE Twin load_apart_f32(const float *from) { return apart(load_twin_f32(from)); }
INLINE Twin load_apart_bf16(const bf16 *from) { return load_twin_bf16(from); }
INLINE void store_apart_f32(float *to, Twin t) { store_twin_f32(to, in_order(t)); }
INLINE void store_apart_bf16(bf16 *to, Twin t) { store_twin_bf16(to, t); }

/* Returns the vector with lanes `distance` (a constant power of two below LANES) apart exchanged. */
INLINE vf exchanged(vf v, const int distance) {
#if LANES == 16
    switch (distance) {
        case 1: return (vf)_mm512_permute_ps((__m512)v, 0xb1);
        case 2: return (vf)_mm512_permute_ps((__m512)v, 0x4e);
        case 4: return (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
        default: return (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
    }
#elif LANES == 8
    switch (distance) {
        case 1: return (vf)_mm256_permute_ps((__m256)v, 0xb1);
        case 2: return (vf)_mm256_permute_ps((__m256)v, 0x4e);
        default: return (vf)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
    }
#elif defined(__aarch64__)
    return distance == 1 ? (vf)vrev64q_f32((float32x4_t)v) : (vf)vextq_f32((float32x4_t)v, (float32x4_t)v, 2);
#else
    vf found;
    for (int i = 0; i < LANES; i++) found[i] = v[i ^ distance];
    return found;
#endif
}

INLINE vf round_f32(vf value) { return value; }

INLINE vf round_bf16(vf value) { /* to the nearest bfloat16 */
#if defined(__AVX512BF16__) && LANES == 16
    return (vf)_mm512_cvtpbh_ps(_mm512_cvtneps_pbh((__m512)value));
#endif
    bf16 rounded[LANES];
    store_bf16(rounded, value);
    return load_bf16(rounded);
}

INLINE vf dot_f32(vf sum, vi a, vi b) { return fused((vf)a, (vf)b, sum); }

INLINE vf dot_bf16(vf sum, vi a, vi b) {
#if defined(__AVX512BF16__) && LANES == 16
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    /* BFDOT adds the two products and then the sum, each rounded to odd and with subnormals as 0, unless the process
     * enables FEAT_EBF16, which this one does not. */
    return (vf)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_s32((int32x4_t)a), vreinterpretq_bf16_s32((int32x4_t)b));
#else
    sum = fused((vf)(a & (int32_t)0xffff0000), (vf)(b & (int32_t)0xffff0000), sum);
    return fused((vf)(a << 16), (vf)(b << 16), sum);
#endif
}

/* Widens signed bytes to 16-bit integers, two per lane: the first and the third of each four, and the second and the
 * fourth. */
#if LANES == 8
INLINE vi even_bytes(vi four) { return (vi)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)four, 8), 8); }
INLINE vi odd_bytes(vi four) { return (vi)_mm256_srai_epi16((__m256i)four, 8); }
#endif

/* Adds four products of unsigned and signed bytes per lane, exactly. */
INLINE vi dot_int8(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__) && LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__ARM_FEATURE_DOTPROD)
    /* Signed instructions only: (a - 128) * b, plus 128 * b, which is the same for all rows. */
    vi lowered = (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)(a ^ (int32_t)0x80808080), (int8x16_t)b);
    return lowered + ((vi)vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(64), (int8x16_t)b) << 1);
#elif LANES == 8 /* its instruction for bytes saturates */
    __m256i even = _mm256_and_si256((__m256i)a, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16((__m256i)a, 8);
    sum += (vi)_mm256_madd_epi16(even, (__m256i)even_bytes(b));
    return sum + (vi)_mm256_madd_epi16(odd, (__m256i)odd_bytes(b));
#else
    for (int shift = 0; shift < 32; shift += 8) sum += ((a >> shift) & 0xff) * ((b << (24 - shift)) >> 24);
    return sum;
#endif
}

/* Loads signed bytes of a row, two per lane, as words of 16-bit integers. */
INLINE vi halves_of_bytes(const int8_t *from) {
#if LANES == 16
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
    typedef int8_t vc __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
    typedef int16_t vs __attribute__((vector_size(4 * LANES), may_alias));
    return (vi)__builtin_convertvector(*(const vc *)from, vs);
#endif
}

/* Adds two products of signed 16-bit integers per lane, exactly. */
INLINE vi dot_int16(vi sum, vi a, vi b) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif LANES == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif LANES == 8
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
    int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return sum + (vi)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* Returns 2^f for |f| <= 1/2, with a relative error below 2.2e-7. */
INLINE vf exp2_fraction(vf f) {
    vf p = fused(splat(1.5403530e-4f), f, splat(1.3333558e-3f));
    p = fused(p, f, splat(9.6181291e-3f));
    p = fused(p, f, splat(5.5504109e-2f));
    p = fused(p, f, splat(2.4022651e-1f));
    p = fused(p, f, splat(6.9314718e-1f));
    return fused(p, f, splat(1.0f));
}

/* Returns 2^x for x <= 126, and 2^126 above; 0 far below 2^-126, NaN for NaN. */
INLINE vf exp2_bounded(vf x) {
#if LANES == 16 && defined(__AVX512DQ__) /* min returns its second operand if one is NaN */
    /* The fraction of infinity is 0, and scalef supports 2^-infinity. 2^-200, which is 0 too, costs an Intel CPU 150
     * clocks, as do all results below 2^-126: masked keys must not be clamped. */
    __m512 t = _mm512_min_ps(_mm512_set1_ps(126.0f), (__m512)x);
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vf)_mm512_scalef_ps((__m512)exp2_fraction((vf)f), _mm512_sub_ps(t, f));
#else
    vi tiny = x < -126.0f;
#if LANES == 8 /* min and max return their second operand if one is NaN */
    vf t = (vf)_mm256_max_ps(_mm256_set1_ps(-126.0f), _mm256_min_ps(_mm256_set1_ps(126.0f), (__m256)x));
#else
    vf t = pick(tiny, splat(-126.0f), pick(x > 126.0f, splat(126.0f), x));
#endif
    /* adding 1.5 * 2^23 rounds to an integer in the low bits, which then moves to the exponent */
    vf shifted = t + 12582912.0f, p = exp2_fraction(t - (shifted - 12582912.0f));
    return (vf)(~tiny & ((vi)p + ((vi)shifted << 23)));
#endif
}

/* Returns 2^x for x <= 100, with a relative error below 1e-4: for results that are rounded to bfloat16, which is 20
 * times coarser. */
INLINE vf exp2_coarse(vf x) {
#if LANES == 16 && defined(__AVX512DQ__) /* the fraction of infinity is 0 */
    vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf p = fused(splat(0.05517167f), f, splat(0.24261112f));
    p = fused(p, f, splat(0.69326099f));
    return (vf)_mm512_scalef_ps((__m512)fused(p, f, splat(0.99992807f)), (__m512)(x - f));
#else
    return exp2_bounded(x);
#endif
}

/* Returns 1 / x for 1 <= x <= 2^127, NaN for NaN, with a relative error below 2e-7. */
INLINE vf reciprocal(vf x) {
#if LANES == 16
    vf y = (vf)_mm512_rcp14_ps((__m512)x);
    return y * fused(-x, y, splat(2.0f));
#else
    return 1.0f / x;
#endif
}

/* As `reciprocal`, with a relative error below 1e-4, as `exp2_coarse`. */
INLINE vf reciprocal_coarse(vf x) {
#if LANES == 16
    return (vf)_mm512_rcp14_ps((__m512)x);
#else
    return 1.0f / x;
#endif
}

/* Returns g / (1 + 2^x); `coarse` (a constant): the result is rounded to bfloat16. */
INLINE vf over_one_and_exp2(vf g, vf x, const int coarse) {
    if (coarse) return g * reciprocal_coarse(1.0f + exp2_coarse(x));
    return g * reciprocal(1.0f + exp2_bounded(x));
}

INLINE vf silu(vf g, const int coarse) { return over_one_and_exp2(g, g * -1.44269504f, coarse); }

/* Hendrycks and Gimpel's approximation: g * (1 + tanh(u)) / 2 = g / (1 + exp(-2u)), u = sqrt(2 / pi) (g + 0.044715 g^3). */
INLINE vf gelu_tanh(vf g, const int coarse) {
    vf inner = g * fused(g * g, splat(0.044715f), splat(1.0f));
    return over_one_and_exp2(g, inner * (-2.0f * 0.7978845608f * 1.44269504f), coarse);
}

/* Returns g * (1 + erf(g / sqrt(2))) / 2, by Abramowitz and Stegun, 7.1.26: with y = |g| / sqrt(2), erfc(y) is a
 * polynomial of 1 / (1 + 0.3275911 y) times exp(-y^2), with an error below 2e-7. Beyond 20 it is 0. */
INLINE vf gelu_exact(vf g) {
    vf bounded = pick(g > 20.0f, splat(20.0f), pick(g < -20.0f, splat(-20.0f), g));
    vf size = pick(bounded < 0.0f, -bounded, bounded) * 0.70710678f;
    vf t = reciprocal(fused(size, splat(0.3275911f), splat(1.0f)));
    vf p = fused(t, splat(1.061405429f), splat(-1.453152027f));
    p = fused(p, t, splat(1.421413741f));
    p = fused(p, t, splat(-0.284496736f));
    p = fused(p, t, splat(0.254829592f)) * t;
    vf rest = bounded * 0.5f * p * exp2_bounded(size * size * -1.44269504f);
    return pick(g < 0.0f, rest, g - rest);
}

/* As `gelu_exact`, for results that are rounded to bfloat16: max(g, 0) - |g| * P(Z > |g|), Z normal. The logarithm of
 * that probability is nearly a parabola; here it is a polynomial fitted from 0 to 9 (relative errors up to 3e-4).
 * Beyond 9, g is clamped, with an error of 1e-18. */
INLINE vf gelu_exact_coarse(vf g) {
    vf size = pick(g < 0.0f, -g, g), most = pick(g < 0.0f, splat(0.0f), g);
    size = pick(size > 9.0f, splat(9.0f), size);
    vf p = fused(splat(-1.2111495e-6f), size, splat(4.7173646e-5f));
    p = fused(p, size, splat(-7.9982233e-4f));
    p = fused(p, size, splat(7.9214154e-3f));
    p = fused(p, size, splat(-5.2607946e-2f));
    p = fused(p, size, splat(-4.5995685e-1f));
    p = fused(p, size, splat(-1.1506230f));
    p = fused(p, size, splat(-1.0000411f));
    return fused(-size, exp2_coarse(p), most);
}

/* The gate and up of GPT-OSS: g * sigmoid(1.702 g) * (u + 1), both clamped. */
INLINE vf clamped_gate(vf g) {
    g = pick(g > 7.0f, splat(7.0f), g);
    return g * reciprocal(1.0f + exp2_bounded(g * (-1.702f * 1.44269504f)));
}
INLINE vf clamped_up(vf u) { return 1.0f + pick(u > 7.0f, splat(7.0f), pick(u < -7.0f, splat(-7.0f), u)); }

/* Returns tanh(x), with an error below 2e-7. */
INLINE vf tanh_vector(vf x) { return 1.0f - 2.0f * reciprocal(1.0f + exp2_bounded(x * (2.0f * 1.44269504f))); }

/* Transposes words of LANES rows, which are `stride` words apart: first words first, then second words. */
INLINE void transpose(const int32_t *rows, int64_t stride, vi columns[LANES]) {
#if LANES == 16
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows + i * stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) { /* a[4 r + i]: in each quarter q the column 4 q + i of the rows 4 r to 4 r + 3 */
        __m512i one = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), two = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        __m512i three = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        __m512i four = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        columns[i] = (vi)_mm512_shuffle_i32x4(one, three, 0x88);
        columns[8 + i] = (vi)_mm512_shuffle_i32x4(one, three, 0xdd);
        columns[4 + i] = (vi)_mm512_shuffle_i32x4(two, four, 0x88);
        columns[12 + i] = (vi)_mm512_shuffle_i32x4(two, four, 0xdd);
    }
#elif LANES == 8
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i *)(rows + i * stride));
    for (int i = 0; i < 8; i += 2)
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    for (int i = 0; i < 8; i += 4) /* a[4 r + j]: in each half h the column 4 h + j of the rows 4 r to 4 r + 3 */
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        columns[j] = (vi)_mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
        columns[4 + j] = (vi)_mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) columns[j][i] = rows[i * stride + j];
#endif
}

/* Stores the first `count` lanes; no byte beyond them is written. */
INLINE void store_words(int32_t *to, vi words, int64_t count) {
#if LANES == 16
    _mm512_mask_storeu_epi32(to, (__mmask16)((1u << count) - 1), (__m512i)words);
#else
    if (count == LANES)
        *(vi *)to = words;
    else
        memcpy(to, &words, count * sizeof *to);
#endif
}

INLINE float lane_sum(vf v) {
#if LANES >= 8 /* the same additions; GCC would do them via memory */
#if LANES == 16
    __m256 eight = _mm512_castps512_ps256((__m512)v);
    eight = _mm256_add_ps(eight, _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
#else
    __m256 eight = (__m256)v;
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
    float part[LANES];
    memcpy(part, &v, sizeof part);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) part[i] += part[i + step];
    return part[0];
}

/* Returns the larger value per lane; b if one is NaN. */
INLINE vf larger(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

INLINE vf smaller(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return pick(a < b, a, b);
#endif
}

INLINE vi larger_word(vi a, vi b) {
#if LANES == 16
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi greater = a > b;
    return (greater & a) | (~greater & b);
#endif
}

INLINE int32_t largest_word(vi v) {
#if LANES == 16
    return _mm512_reduce_max_epi32((__m512i)v);
#elif LANES == 8
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
    int32_t top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
#endif
}

/* Returns true if any lane is greater than the bound, or NaN. */
INLINE int any_greater(vf v, float bound) {
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_NLE_UQ) != 0;
#elif LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(bound), _CMP_NLE_UQ)) != 0;
#else
    vi greater = ~(v <= bound);
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= greater[i];
    return any != 0;
#endif
}

/* Returns the largest lane; if one is NaN, any of them or NaN. */
/* Returns the sum of all lanes. */
INLINE int32_t lane_sum_words(vi v) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#elif LANES == 8
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
#endif
}

INLINE float lane_max(vf v) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#elif LANES == 8
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float part[LANES], top;
    memcpy(part, &v, sizeof part);
    top = part[0];
    for (int i = 1; i < LANES; i++) top = part[i] > top ? part[i] : top;
    return top;
#endif
}
