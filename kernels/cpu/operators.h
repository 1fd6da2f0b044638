/* Included by every unit of the operators. Each dtype has its own units, which compile in parallel; shared.c holds what
 * does not depend on the dtype. Everything is computed in float. The semantics are defined by the torch references in
 * the parent folder. */
#include "vector.h"
#include "streams.h"
#include "tiles.h"
#include "mmla.h"
#include "panels.h"
#include "codes.h"
#include "tile_sums.h"
#include "mmla_sums.h"
#include "cache.h"
#include "plan.h"

#define MAX_DIM 256
/* The most queries of one KV head that read a tile of keys together; they fit an L1 of 32 KiB with the tile. With
 * matrix tiles V is copied once for all of them, so more pay off: 96 take 7 to 9% less time than 48, 144 the same. */
#define MOST_ROWS (TILES ? 96 : 48)
#define PASSED INT32_MAX
#define AHEAD 2 /* tokens between prefetching the slots of K and V and writing them */
#define LEAST_TURNED 4 /* the fewest tokens whose keys are transposed to the cache's order at once */
#define LOG2_E 1.44269504f
#define SLACK 8.0f /* powers of two by which a weight of attention may exceed 1 */

/* A hook for measurements at the end of each operator in a layer: tests/speed/layer_clock.h. */
#ifndef DONE
#define DONE(operator)
#endif
