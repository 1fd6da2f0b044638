/* The operators of a decoder for float32, except attention. */
#include "float32.h"

#include "pointwise.h"
#include "parts.h"
#include "linear.h"
#include "low_rank.h"
#include "quantized_linear.h"
#include "round_weights.h"
#include "experts.h"
#include "attention_types.h"
#include "latent.h"
#include "teams.h"
#include "layer.h"

/* Returns the sizes of the structures and the limits of heads and items, for callers that build the structures. */
void sizes(int64_t *found) {
    int64_t all[] = {sizeof(Weight),          sizeof(Heads_f32), sizeof(Plan), sizeof(Attention_f32), sizeof(Layer_f32),
                     sizeof(LayerStep_f32), sizeof(Experts_f32), sizeof(Latent_f32), sizeof(Parts_f32),
                     sizeof(LowRank), sizeof(Adapted_f32), MAX_DIM, MOST_ROWS};
    memcpy(found, all, sizeof all);
}
