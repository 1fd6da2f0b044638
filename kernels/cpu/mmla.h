/* Matrix multiply-accumulate (Arm's BFMMLA and USMMLA): adds the products of two rows of x and two columns of a weight
 * to 2 x 2 sums. A Quad holds two words, as in vector.h, of each row or column: four bfloat16 values, or eight bytes,
 * unsigned in x and signed in the weight. One instruction does the work of two BFDOT or USDOT.
 *
 * BFMMLA is defined as BFDOT with the first of the two words and then the second (Arm's Architecture Reference Manual
 * for A-profile, DDI 0487, FPCR.EBF 0). A product therefore has the same bits with either.
 *
 * MMLA_BF16 and MMLA_INT8 are 1 if the compiler targets these instructions, or if EMULATED_MMLA is defined: plain C for
 * any CPU, which is slow, for tests. Matrix tiles take precedence.
 */
typedef int32_t Quad __attribute__((vector_size(16), aligned(4), may_alias));

#if TILES
#define MMLA_BF16 0
#define MMLA_INT8 0
#elif defined(EMULATED_MMLA)
#define MMLA_BF16 1
#define MMLA_INT8 1
#else
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MMLA_BF16 1
#else
#define MMLA_BF16 0
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define MMLA_INT8 1
#else
#define MMLA_INT8 0
#endif
#endif

#if defined(EMULATED_MMLA)
#include "emulated_mmla.h"
#define mmla_bf16 emulated_bfmmla
#define mmla_int8 emulated_usmmla
#endif

#if !defined(EMULATED_MMLA)
/* Assembly instead of intrinsics, because GCC 12 moves sums between registers, once for every three products. */
#if MMLA_BF16
INLINE Quad mmla_bf16(Quad sums, Quad x, Quad weight) {
    __asm__("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sums) : "w"(x), "w"(weight));
    return sums;
}
#endif
#if MMLA_INT8
INLINE Quad mmla_int8(Quad sums, Quad x, Quad weight) {
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(x), "w"(weight));
    return sums;
}
#endif
#endif

/* Returns the first halves of two quads, and the second ones. */
INLINE Quad first_halves(Quad a, Quad b) {
#if defined(__aarch64__)
    return (Quad)vzip1q_s64((int64x2_t)a, (int64x2_t)b);
#else
    return (Quad){a[0], a[1], b[0], b[1]};
#endif
}

INLINE Quad second_halves(Quad a, Quad b) {
#if defined(__aarch64__)
    return (Quad)vzip2q_s64((int64x2_t)a, (int64x2_t)b);
#else
    return (Quad){a[2], a[3], b[2], b[3]};
#endif
}
