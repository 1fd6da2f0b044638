/* A whole decoder layer as one call of one team of threads; included once a dtype. A step has eight operators a layer:
 * called one by one, they cost a small model a few percent of its time between them. */

typedef struct {
    const REAL *input_norm, *attention_norm, *post_norm, *feed_forward_norm; /* the second and the last may be NULL */
    Weight qkv, o, gated, down;
    NAME(Rotation) rotation; /* whose eps and offset are those of all norms */
    int64_t window, gate;    /* the latter: what makes `is_gated` true */
    const float *sinks;      /* or NULL */
    LowRank adapters[4];     /* of qkv, o, gated and down */
} NAME(Layer);

/* What the layers of a step share. `heads` and `attention` lack what differs from layer to layer. */
typedef struct {
    NAME(Heads) heads;
    NAME(Attention) attention;
    REAL *x, *residual;                     /* (tokens, hidden): in and out */
    REAL *normed, *qkv, *activated;         /* room to work in: (tokens, hidden), (tokens, heads * dim), (tokens, inner) */
    uint8_t *codes;                         /* where weights are quantised: (tokens, most inputs padded) */
    float *row_scales;                      /* (tokens,) */
    NAME(Parts) parts;                      /* of blocks that are copied once the step's K and V are stored */
    NAME(Adapted) adapted;                  /* the tokens that have an adapter */
    NAME(Teams) teams;                      /* those of the cache that the step has */
} NAME(LayerStep);

INLINE void NAME(multiply_all)(const NAME(LayerStep) *s, const REAL *x, const Weight *weight, REAL *y, int64_t kind) {
    if (weight->starts)
        NAME(team_quantized_linear)(x, weight, y, s->codes, s->row_scales, s->heads.tokens, kind);
#if IN_SLICES
    else if (is_mxfp4(weight))
        NAME(team_widened_linear)(x, weight, y, s->heads.tokens, kind);
#endif
    else
        NAME(team_linear)(x, weight, y, s->heads.tokens, kind);
}

/* A product, with what adapters add to it. */
INLINE void NAME(multiply)(const NAME(LayerStep) *s, const REAL *x, const Weight *weight, const LowRank *adapters, REAL *y,
                           int64_t kind) {
    if (!s->adapted.order || !adapters->a) {
        NAME(multiply_all)(s, x, weight, y, kind);
        return;
    }
    NAME(team_low_rank)(x, adapters, &s->adapted, weight->inputs);
    Weight own = NAME(adapted_weight)(weight, &s->adapted);
    NAME(multiply_all)(s, x, &own, y, kind);
}

INLINE void NAME(norm)(const NAME(LayerStep) *s, const NAME(Rotation) *by, const REAL *residual, const REAL *weight,
                       int64_t width) {
    NAME(team_rms_norm)(s->x, residual, weight, s->normed, s->residual, s->heads.tokens, width, by->eps, by->offset);
}

/* What a half of the layer adds to the residual, normed where it stands. */
INLINE void NAME(norm_after)(const NAME(LayerStep) *s, const NAME(Rotation) *by, const REAL *weight, int64_t width) {
    if (weight) NAME(team_rms_norm)(s->x, NULL, weight, s->x, NULL, s->heads.tokens, width, by->eps, by->offset);
}

/* `first`: x is a copy of the residual, which holds nothing else yet. */
void NAME(decoder_layer)(const NAME(Layer) *l, const NAME(LayerStep) *s, const Cache *cache, int64_t first) {
    NAME(Heads) heads = s->heads;
    NAME(Attention) attention = s->attention;
    NAME(Queue) queue = {0, 0, 1};
    heads.q = s->qkv, heads.k = heads.q + heads.q_heads * heads.dim, heads.v = heads.k + heads.kv_heads * heads.dim;
    heads.cache = attention.cache = *cache, heads.rotation = l->rotation;
    attention.window = l->window, attention.sinks = l->sinks;
#pragma omp parallel
    {
        DONE(BEGUN);
        NAME(norm)(s, &l->rotation, first ? NULL : s->residual, l->input_norm, l->qkv.inputs);
        DONE(INPUT_NORM);
        NAME(multiply)(s, s->normed, &l->qkv, &l->adapters[0], s->qkv, PLAIN);
        DONE(QKV);
        s->teams.store(&heads);
        if (s->parts.count)
            s->teams.copy(&s->parts, cache, heads.kv_heads, heads.dim_pad, heads.block_pad);
        DONE(ROPE_STORE);
        s->teams.attend(&attention, &queue);
        DONE(ATTENTION);
        NAME(multiply)(s, attention.out, &l->o, &l->adapters[1], s->x, PLAIN);
        DONE(O);
        NAME(norm_after)(s, &l->rotation, l->attention_norm, l->o.outputs);
        NAME(norm)(s, &l->rotation, s->residual, l->post_norm, l->gated.inputs);
        DONE(POST_NORM);
        NAME(multiply)(s, s->normed, &l->gated, &l->adapters[2], s->activated, l->gate);
        DONE(GATE_UP);
        NAME(multiply)(s, s->activated, &l->down, &l->adapters[3], s->x, PLAIN);
        DONE(DOWN);
        NAME(norm_after)(s, &l->rotation, l->feed_forward_norm, l->down.outputs);
    }
}
