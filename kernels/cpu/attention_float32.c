/* Attention for float32, in its own unit because it takes half of the compile time of the dtype. */
#include "float32.h"

#include "attention_types.h"
#include "attention.h"
