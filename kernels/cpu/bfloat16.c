/* The operators of a decoder for bfloat16, except attention. */
#include "bfloat16.h"

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
