/* Single instructions on tiles, for test_tiles.py. */
#include "vector.h"
#include "tiles.h"

#if TILES

/* The dot product of one x and one weight, added to a sum, with shapes as they are given. */
void add_product(const TileShapes *shapes, const void *x, int64_t x_stride, const void *weight, int64_t weight_stride,
                 void *sum, int64_t sum_stride, int64_t codes) {
    tiles_configure(shapes);
    tile_load(0, sum, sum_stride);
    tile_load(1, x, x_stride);
    tile_load(2, weight, weight_stride);
    if (codes)
        tile_dot_int8(0, 1, 2);
    else
        tile_dot_bf16(0, 1, 2);
    tile_store(0, sum, sum_stride);
    tiles_release();
}

/* What a tile that was loaded is after it was cleared. */
void clear(const TileShapes *shapes, void *sum, int64_t stride) {
    tiles_configure(shapes);
    tile_load(0, sum, stride);
    tile_zero(0);
    tile_store(0, sum, stride);
    tiles_release();
}

/* A tile that no thread has configured. */
void load_without_shape(const void *from) {
    tile_load(0, from, TILE_BYTES);
}
#endif
