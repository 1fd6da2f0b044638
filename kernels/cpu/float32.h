/* Definitions for float32, for the headers that are included once per dtype. */
#include "operators.h"

#define REAL float
#define PAIR 1 /* values per word */
#define LOAD(x) (x)
#define STORE(x) (x)
#define LOADV load_f32
#define STOREV store_f32
#define STORE_TWO store_two_f32
#define ROUNDV round_f32
#define DOT dot_f32
#define EXP2 exp2_bounded
#define COARSE 0
#define NAME(base) base##_f32
#ifdef CODED /* the type of a cached value */
#define KEPT int8_t
#else
#define KEPT REAL
#endif
