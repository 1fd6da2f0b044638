/* A whole decoder layer as one call of one team of threads; included once a dtype. A step has eight operators a layer:
 * called one by one, they cost a small model a few percent of its time between them. */

typedef struct {
    const REAL *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be NULL */
    Weight qkv, o, gated, down;
    int64_t window;
} NAME(Layer);

/* What the layers of a step share. `heads` and `attention` lack what differs from layer to layer. */
typedef struct {
    NAME(Heads) heads;
    NAME(Attention) attention;
    REAL *x, *residual;                     /* (tokens, hidden): in and out */
    REAL *normed, *qkv, *activated;         /* room to work in: (tokens, hidden), (tokens, heads * dim), (tokens, inner) */
    uint8_t *codes;                         /* where weights are quantised: (tokens, most inputs rounded up to 4) */
    float *row_scales;                      /* (tokens,) */
} NAME(LayerStep);

INLINE void NAME(multiply)(const NAME(LayerStep) *s, const REAL *x, const Weight *weight, REAL *y, int64_t kind) {
    if (weight->starts)
        NAME(team_quantized_linear)(x, weight, y, s->codes, s->row_scales, s->heads.tokens, kind);
    else
        NAME(team_linear)(x, weight, y, s->heads.tokens, kind);
}

INLINE void NAME(norm)(const NAME(LayerStep) *s, const REAL *residual, const REAL *weight, int64_t width) {
    NAME(team_rms_norm)(s->x, residual, weight, s->normed, s->residual, s->heads.tokens, width, s->heads.eps);
}

/* `first`: x is a copy of the residual, which holds nothing else yet. */
void NAME(decoder_layer)(const NAME(Layer) *l, const NAME(LayerStep) *s, REAL *k_cache, REAL *v_cache, int64_t first) {
    NAME(Heads) heads = s->heads;
    NAME(Attention) attention = s->attention;
    NAME(Queue) queue = {0, 0, 1};
    heads.q = s->qkv, heads.k = heads.q + heads.q_heads * heads.dim, heads.v = heads.k + heads.kv_heads * heads.dim;
    heads.k_cache = k_cache, heads.v_cache = v_cache, heads.q_norm = l->q_norm, heads.k_norm = l->k_norm;
    attention.k_cache = k_cache, attention.v_cache = v_cache, attention.window = l->window;
#pragma omp parallel
    {
        NAME(norm)(s, first ? NULL : s->residual, l->input_norm, l->qkv.inputs);
        NAME(multiply)(s, s->normed, &l->qkv, s->qkv, PLAIN);
        NAME(team_rope_store)(&heads);
        NAME(team_attention)(&attention, &queue);
        NAME(multiply)(s, attention.out, &l->o, s->x, PLAIN);
        NAME(norm)(s, s->residual, l->post_norm, l->gated.inputs);
        NAME(multiply)(s, s->normed, &l->gated, s->activated, GATED);
        NAME(multiply)(s, s->activated, &l->down, s->x, PLAIN);
    }
}
