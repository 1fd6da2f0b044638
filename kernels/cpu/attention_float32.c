/* Attention for float32: half of what the compiler has to do for the dtype. */
#include "float32.h"

#include "attention_types.h"
#include "attention.h"
