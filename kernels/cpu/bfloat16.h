/* Definitions for bfloat16, for the headers that are included once per dtype. */
#include "operators.h"

#define REAL bf16
#define PAIR 2
#define LOAD bf16_load
#define STORE bf16_store
#define LOADV load_bf16
#define STOREV store_bf16
#define STORE_TWO store_two_bf16
#define ROUNDV round_bf16
#define DOT dot_bf16
#define EXP2 exp2_coarse
#define COARSE 1 /* results are rounded to 8 bits */
#define NAME(base) base##_bf16
#ifdef CODED /* the type of a cached value */
#define KEPT int8_t
#else
#define KEPT REAL
#endif
