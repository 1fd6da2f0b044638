/* What every unit of the operators includes. Each dtype has units of its own, of which the compilers work on as many side
 * by side as there are cores; shared.c has what knows no dtype. Everything is computed in float. Semantics are those of the torch references beside
 * this folder. */
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
/* Queries of one KV head that pass over a tile of keys together: with it they fit an L1 of 32 KiB. In tiles the keys' values
 * are copied once for all of them, which pays for more: 96 take 7 to 9% less time than 48, 144 no less. */
#define MOST_ROWS (TILES ? 96 : 48)
#define PASSED INT32_MAX
#define AHEAD 2 /* tokens between fetching the places of K and V and writing them */
#define LEAST_TURNED 4 /* tokens whose keys are turned into the cache's order as a square */
#define LOG2_E 1.44269504f
#define SLACK 8.0f /* powers of two by which a weight of attention may exceed 1 */

/* What a measurement may make of the end of an operator in a layer, which every thread passes: tests/speed/layer_clock.h. */
#ifndef DONE
#define DONE(operator)
#endif
