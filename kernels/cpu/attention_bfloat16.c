/* Attention for bfloat16, in its own unit because it takes half of the compile time of the dtype. */
#include "bfloat16.h"

#include "attention_types.h"
#include "attention.h"
