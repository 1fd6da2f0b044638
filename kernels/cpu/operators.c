/* The operators of a decoder, for float32 and bfloat16. Everything is computed in float. Semantics are those of the torch
 * references beside this folder. */
#include "vector.h"
#include "panels.h"
#include "quantize_weight.h"
#include "plan.h"

#define MAX_DIM 256
#define MOST_ROWS 48 /* queries of one KV head that pass over a tile of keys together: with it they fit an L1 of 32 KiB */
#define PASSED INT32_MAX
#define AHEAD 4 /* tokens between fetching the places of K and V and writing them */
#define SLACK 8.0f /* powers of two by which a weight of attention may exceed 1 */

int64_t lanes(void) { return LANES; }

#define REAL float
#define PAIR 1 /* values a word */
#define LOAD(x) (x)
#define STORE(x) (x)
#define LOADV load_f32
#define STOREV store_f32
#define ROUNDV round_f32
#define DOT dot_f32
#define EXP2 exp2_bounded
#define NAME(base) base##_f32
#include "pointwise.h"
#include "linear.h"
#include "quantized_linear.h"
#include "attention.h"
#include "layer.h"
#undef REAL
#undef PAIR
#undef LOAD
#undef STORE
#undef LOADV
#undef STOREV
#undef ROUNDV
#undef DOT
#undef EXP2
#undef NAME

#define REAL bf16
#define PAIR 2
#define LOAD bf16_load
#define STORE bf16_store
#define LOADV load_bf16
#define STOREV store_bf16
#define ROUNDV round_bf16
#define DOT dot_bf16
#define EXP2 exp2_coarse
#define NAME(base) base##_bf16
#include "pointwise.h"
#include "linear.h"
#include "quantized_linear.h"
#include "attention.h"
#include "layer.h"

/* For whoever builds the structures elsewhere: their sizes, and the most that a head and an item may have. */
void sizes(int64_t *found) {
    int64_t all[] = {sizeof(Weight),          sizeof(Heads_f32), sizeof(Plan), sizeof(Attention_f32), sizeof(Layer_f32),
                     sizeof(LayerStep_f32), MAX_DIM,           MOST_ROWS};
    memcpy(found, all, sizeof all);
}
