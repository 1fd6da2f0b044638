/* K and V of one layer: (blocks, kv_heads, block_pad, dim_pad) of KEPT each, as attention.h says they lie in a block. */

typedef struct {
    void *k, *v;
    float *k_scale, *v_scale; /* of codes, (blocks, kv_heads, block_pad): what a token's codes are multiplied with; or NULL */
} Cache;
