/* Vectors of this CPU's width, and what the operators do with them, for float32 and bfloat16.
 *
 * A WORD is 32 bits of a row: one float or two bfloat16 values that are adjacent along the dimension summed over. `dot`
 * multiplies words lane by lane and adds what each holds to a float: one fused multiply-add, or AVX512_BF16's. So one
 * text serves both dtypes, and every sum runs in the order of its words whatever else is computed beside it.
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
#define COLUMNS 4 /* vectors across a tile of results: 6 x 4 sums, 4 operands and a broadcast fill 32 registers */
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
#define PANEL (COLUMNS * LANES)
#define LINE 64 /* bytes of a cache line */
#define TO_L2 2 /* the cache that a prefetch is for */
#define INLINE static inline __attribute__((always_inline))
#define TEAM static __attribute__((noinline)) /* what all threads of a team call together: compiled once for all callers */

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_word(int32_t x) { return x - (vi){0}; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* a * b + c, rounded once where the CPU can. Nowhere else are a product and a sum rounded together: the flags forbid it,
 * because a compiler would be free to choose which of two products it fuses, and might choose otherwise for each number of
 * rows that a loop is compiled for. */
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
#if LANES == 16 /* GCC 12 widens the halves one by one */
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (vf)(__builtin_convertvector(*(const vh *)from, vi) << 16);
#endif
}

INLINE void store_bf16(bf16 *to, vf value) {
#if defined(__AVX512BF16__) && LANES == 16
    __m256bh half = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &half, sizeof half);
#else
    vi bits = (vi)value;
    vi rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits & 0x7fffffff) > 0x7f800000;
    *(vh *)to = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), vh);
#endif
}

INLINE void store_bytes(uint8_t *to, vi value) { /* each lane's lowest */
#if LANES == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)value));
#else
    typedef uint8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));
    *(vb *)to = __builtin_convertvector(value, vb);
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
#else
    sum = fused((vf)(a & (int32_t)0xffff0000), (vf)(b & (int32_t)0xffff0000), sum);
    return fused((vf)(a << 16), (vf)(b << 16), sum);
#endif
}

/* Four products of unsigned and signed bytes a lane, added exactly. */
INLINE vi dot_int8(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__) && LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    for (int shift = 0; shift < 32; shift += 8) sum += ((a >> shift) & 0xff) * ((b << (24 - shift)) >> 24);
    return sum;
#endif
}

/* 2^f for |f| <= 1/2, relative error below 2.2e-7. */
INLINE vf exp2_fraction(vf f) {
    vf p = fused(splat(1.5403530e-4f), f, splat(1.3333558e-3f));
    p = fused(p, f, splat(9.6181291e-3f));
    p = fused(p, f, splat(5.5504109e-2f));
    p = fused(p, f, splat(2.4022651e-1f));
    p = fused(p, f, splat(6.9314718e-1f));
    return fused(p, f, splat(1.0f));
}

/* 2^x for x <= 126, 2^126 above; 0 far below 2^-126, NaN for NaN. */
INLINE vf exp2_bounded(vf x) {
#if LANES == 16 /* of a NaN and a bound, min and max take their second operand */
    __m512 t = _mm512_max_ps(_mm512_set1_ps(-200.0f), _mm512_min_ps(_mm512_set1_ps(126.0f), (__m512)x));
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vf)_mm512_scalef_ps((__m512)exp2_fraction((vf)_mm512_sub_ps(t, whole)), whole);
#else
    vi tiny = x < -126.0f;
    vf t = pick(tiny, splat(-126.0f), pick(x > 126.0f, splat(126.0f), x)), shifted = t + 12582912.0f;
    /* adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits, and moves to the exponent's place */
    vf p = exp2_fraction(t - (shifted - 12582912.0f));
    return pick(tiny, splat(0.0f), (vf)((vi)p + ((vi)shifted << 23)));
#endif
}

/* 2^x for x <= 100, relative error below 1e-4: for results that are rounded to bfloat16, which is 20 times coarser. */
INLINE vf exp2_coarse(vf x) {
#if LANES == 16
    __m512 t = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x); /* x where that is no number */
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = (vf)_mm512_sub_ps(t, whole), p = fused(splat(0.05517167f), f, splat(0.24261112f));
    p = fused(p, f, splat(0.69326099f));
    return (vf)_mm512_scalef_ps((__m512)fused(p, f, splat(0.99992807f)), whole);
#else
    return exp2_bounded(x);
#endif
}

/* 1 / x for 1 <= x <= 2^127, NaN for NaN; relative error below 2e-7. */
INLINE vf reciprocal(vf x) {
#if LANES == 16
    vf y = (vf)_mm512_rcp14_ps((__m512)x);
    return y * fused(-x, y, splat(2.0f));
#else
    return 1.0f / x;
#endif
}

INLINE vf silu(vf g) { return g * reciprocal(1.0f + exp2_bounded(g * -1.44269504f)); }

/* Hendrycks and Gimpel's approximation: g * (1 + tanh(u)) / 2 = g / (1 + exp(-2u)), u = sqrt(2 / pi) (g + 0.044715 g^3). */
INLINE vf gelu_tanh(vf g) {
    vf inner = g * fused(g * g, splat(0.044715f), splat(1.0f));
    return g * reciprocal(1.0f + exp2_bounded(inner * (-2.0f * 0.7978845608f * 1.44269504f)));
}

/* g * (1 + erf(g / sqrt(2))) / 2, by Abramowitz and Stegun, 7.1.26: of y = |g| / sqrt(2) the complement of erf is a
 * polynomial of 1 / (1 + 0.3275911 y) times exp(-y^2), off by less than 2e-7. Beyond 20 it is 0. */
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

/* GPT-OSS's gate and up: g * sigmoid(1.702 g) * (u + 1), both clamped. */
INLINE vf clamped_gate(vf g) {
    g = pick(g > 7.0f, splat(7.0f), g);
    return g * reciprocal(1.0f + exp2_bounded(g * (-1.702f * 1.44269504f)));
}
INLINE vf clamped_up(vf u) { return 1.0f + pick(u > 7.0f, splat(7.0f), pick(u < -7.0f, splat(-7.0f), u)); }

/* tanh(x), off by less than 2e-7. */
INLINE vf tanh_vector(vf x) { return 1.0f - 2.0f * reciprocal(1.0f + exp2_bounded(x * (2.0f * 1.44269504f))); }

INLINE float lane_sum(vf v) {
    float part[LANES];
    memcpy(part, &v, sizeof part);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) part[i] += part[i + step];
    return part[0];
}

/* Lane by lane; of a NaN and another, b. */
INLINE vf larger(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

/* Whether any lane is greater than the bound, or no number. */
INLINE int any_greater(vf v, float bound) {
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_NLE_UQ) != 0;
#else
    vi greater = ~(v <= bound);
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= greater[i];
    return any != 0;
#endif
}

/* The largest lane; with a NaN among them it may be any of them, or NaN. */
INLINE float lane_max(vf v) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float part[LANES], top;
    memcpy(part, &v, sizeof part);
    top = part[0];
    for (int i = 1; i < LANES; i++) top = part[i] > top ? part[i] : top;
    return top;
#endif
}
