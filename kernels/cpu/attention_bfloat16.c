/* Attention for bfloat16: half of what the compiler has to do for the dtype. */
#include "bfloat16.h"

#include "attention_types.h"
#include "attention.h"
