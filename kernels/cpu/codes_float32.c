/* Rotation and KV write, copies and attention for float32 and a quantised cache, in a library of their own. */
#define CODED
#include "float32.h"

#include "attention_types.h"
#include "pointwise.h"
#include "parts.h"
#include "attention.h"
#include "teams.h"
