/* A whole decoder layer as one call of one team of threads; included once per dtype. A step has eight operators per
 * layer, and calling them one by one costs a small model a few percent of its time. */

typedef struct {
    const REAL *norms[4];  /* of the input of attention, its result, the input of the feed-forward part, and its result */
    const REAL *biases[4]; /* of the norms; NULL if there is none, as is a norm that the layer does not have */
    Weight qkv, o, up, down;
    NAME(Rotation) rotation; /* its eps and offset apply to all norms */
    int64_t window, kind;    /* `kind` is the epilogue of the product with `up` */
    int64_t centred;         /* true: LayerNorms */
    int64_t norms_sums;      /* true: a norm applies to a result plus its input, and is the next input */
    const float *sinks;      /* or NULL */
    LowRank adapters[4];     /* of qkv, o, up and down */
} NAME(Layer);

/* What the layers of a step share. Fields of `heads` and `attention` that differ between layers are not set. */
typedef struct {
    NAME(Heads) heads;
    NAME(Attention) attention;
    REAL *x, *residual;                     /* (tokens, hidden): input and output */
    REAL *normed, *qkv, *activated;         /* buffers: (tokens, hidden), (tokens, heads * dim), (tokens, inner) */
    uint8_t *codes;                         /* for quantised weights: (tokens, most inputs padded) */
    float *row_scales;                      /* (tokens, most of `scales_of` all weights) */
    NAME(Parts) parts;                      /* blocks to copy after the step's K and V are stored */
    NAME(Adapted) adapted;                  /* the tokens that have an adapter */
    NAME(Teams) teams;                      /* the functions for the kind of cache of the step */
} NAME(LayerStep);

INLINE void NAME(multiply_all)(const NAME(LayerStep) *s, const REAL *x, const Weight *weight, REAL *y, int64_t kind) {
    if (has_quantized_rows(weight))
        NAME(team_quantized_linear)(x, weight, y, s->codes, s->row_scales, s->heads.tokens, kind);
#if IN_SLICES
    else if (is_mxfp4(weight))
        NAME(team_widened_linear)(x, weight, y, s->heads.tokens, kind);
#endif
    else
        NAME(team_linear)(x, weight, y, s->heads.tokens, kind);
}

/* Multiplies, and adds the products of adapters. */
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

/* Computes y, the norm `which` of total = x + residual; residual may be NULL. */
INLINE void NAME(norm)(const NAME(Layer) *l, int which, const REAL *x, const REAL *residual, REAL *y, REAL *total,
                       int64_t rows, int64_t width) {
    const REAL *weight = l->norms[which];
    if (l->centred)
        NAME(team_layer_norm)(x, residual, weight, l->biases[which], y, total, rows, width, l->rotation.eps);
    else
        NAME(team_rms_norm)(x, residual, weight, y, total, rows, width, l->rotation.eps, l->rotation.offset);
}

/* Computes s->normed, the norm of x + residual, and stores the sum in the residual. */
INLINE void NAME(norm_before)(const NAME(LayerStep) *s, const NAME(Layer) *l, int which, const REAL *residual,
                              int64_t width) {
    NAME(norm)(l, which, s->x, residual, s->normed, s->residual, s->heads.tokens, width);
}

/* Applies the norm of a result in place, before it is added to the residual. */
INLINE void NAME(norm_after)(const NAME(LayerStep) *s, const NAME(Layer) *l, int which, int64_t width) {
    if (l->norms[which]) NAME(norm)(l, which, s->x, NULL, s->x, NULL, s->heads.tokens, width);
}

/* Computes y, the norm of y + x, with x the input of this half of the layer. */
INLINE void NAME(norm_sum)(const NAME(LayerStep) *s, const NAME(Layer) *l, int which, const REAL *x, REAL *y, int64_t width) {
    NAME(norm)(l, which, s->normed, x, y, y, s->heads.tokens, width);
}

/* Stores K and V of the step's tokens, and computes the attention of its queries. */
INLINE void NAME(attend_all)(const NAME(LayerStep) *s, const NAME(Heads) *heads, const NAME(Attention) *attention,
                             NAME(Queue) *queue) {
    DONE(QKV);
    s->teams.store(heads);
    if (s->parts.count)
        s->teams.copy(&s->parts, &heads->cache, heads->kv_heads, heads->dim_pad, heads->block_pad);
    DONE(ROPE_STORE);
    s->teams.attend(attention, queue);
    DONE(ATTENTION);
}

/* Runs a layer with norms before its halves. `first`: x is a copy of the residual, which holds nothing else yet. */
INLINE void NAME(pre_norm_layer)(const NAME(Layer) *l, const NAME(LayerStep) *s, const NAME(Heads) *heads,
                                 const NAME(Attention) *attention, NAME(Queue) *queue, int64_t first) {
    NAME(norm_before)(s, l, 0, first ? NULL : s->residual, l->qkv.inputs);
    DONE(INPUT_NORM);
    NAME(multiply)(s, s->normed, &l->qkv, &l->adapters[0], s->qkv, PLAIN);
    NAME(attend_all)(s, heads, attention, queue);
    NAME(multiply)(s, attention->out, &l->o, &l->adapters[1], s->x, PLAIN);
    DONE(O);
    NAME(norm_after)(s, l, 1, l->o.outputs);
    NAME(norm_before)(s, l, 2, s->residual, l->up.inputs);
    DONE(POST_NORM);
    NAME(multiply)(s, s->normed, &l->up, &l->adapters[2], s->activated, l->kind);
    DONE(GATE_UP);
    NAME(multiply)(s, s->activated, &l->down, &l->adapters[3], s->x, PLAIN);
    DONE(DOWN);
    NAME(norm_after)(s, l, 3, l->down.outputs);
}

/* Runs a layer with norms after its halves (Vaswani et al., 2017); there is no residual. */
INLINE void NAME(post_norm_layer)(const NAME(Layer) *l, const NAME(LayerStep) *s, const NAME(Heads) *heads,
                                  const NAME(Attention) *attention, NAME(Queue) *queue) {
    NAME(multiply)(s, s->x, &l->qkv, &l->adapters[0], s->qkv, PLAIN);
    NAME(attend_all)(s, heads, attention, queue);
    NAME(multiply)(s, attention->out, &l->o, &l->adapters[1], s->normed, PLAIN);
    DONE(O);
    NAME(norm_sum)(s, l, 1, s->x, s->residual, l->o.outputs);
    DONE(POST_NORM);
    NAME(multiply)(s, s->residual, &l->up, &l->adapters[2], s->activated, l->kind);
    DONE(GATE_UP);
    NAME(multiply)(s, s->activated, &l->down, &l->adapters[3], s->normed, PLAIN);
    DONE(DOWN);
    NAME(norm_sum)(s, l, 3, s->residual, s->x, l->down.outputs);
}

/* `first`: as for `pre_norm_layer`. */
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
        if (l->norms_sums)
            NAME(post_norm_layer)(l, s, &heads, &attention, &queue);
        else
            NAME(pre_norm_layer)(l, s, &heads, &attention, &queue, first);
    }
}
