/* Rotation and KV write, copies and attention for bfloat16 and a quantised cache, in a library of their own. */
#define CODED
#include "bfloat16.h"

#include "attention_types.h"
#include "pointwise.h"
#include "parts.h"
#include "attention.h"
#include "teams.h"
