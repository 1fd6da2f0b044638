/* K and V of one layer: (blocks, kv_heads, block_pad, dim_pad) values of KEPT each, in the block layout of attention.h. */

typedef struct {
    void *k, *v;
    float *k_scale, *v_scale; /* (blocks, kv_heads, block_pad), the scales of a quantised cache, or NULL */
} Cache;
