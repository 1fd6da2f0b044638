/* A whole decoder layer as one call of one team of threads; included once a dtype. A step has eight operators a layer:
 * called one by one, they cost a small model a few percent of its time between them. */

typedef struct {
    const REAL *norms[4];  /* of the attention's input, its result, the feed-forward half's input, and its result */
    const REAL *biases[4]; /* those of the norms: NULL where there is none, as is a norm that the layer lacks */
    Weight qkv, o, up, down;
    NAME(Rotation) rotation; /* whose eps and offset are those of all norms */
    int64_t window, kind;    /* the latter: what the product with `up` writes */
    int64_t centred;         /* norms are LayerNorms */
    int64_t norms_sums;      /* a half's result is normed with its input added, and the norm is the next half's input */
    const float *sinks;      /* or NULL */
    LowRank adapters[4];     /* of qkv, o, up and down */
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

/* y: the norm number `which` of total = x + residual; residual may be NULL. */
INLINE void NAME(norm)(const NAME(Layer) *l, int which, const REAL *x, const REAL *residual, REAL *y, REAL *total,
                       int64_t rows, int64_t width) {
    const REAL *weight = l->norms[which];
    if (l->centred)
        NAME(team_layer_norm)(x, residual, weight, l->biases[which], y, total, rows, width, l->rotation.eps);
    else
        NAME(team_rms_norm)(x, residual, weight, y, total, rows, width, l->rotation.eps, l->rotation.offset);
}

/* s->normed: the norm of what x and residual add up to, which the residual receives. */
INLINE void NAME(norm_before)(const NAME(LayerStep) *s, const NAME(Layer) *l, int which, const REAL *residual,
                              int64_t width) {
    NAME(norm)(l, which, s->x, residual, s->normed, s->residual, s->heads.tokens, width);
}

/* What a half of the layer adds to the residual, normed where it stands. */
INLINE void NAME(norm_after)(const NAME(LayerStep) *s, const NAME(Layer) *l, int which, int64_t width) {
    if (l->norms[which]) NAME(norm)(l, which, s->x, NULL, s->x, NULL, s->heads.tokens, width);
}

/* y: the norm of y and what a half of the layer got, `x`. */
INLINE void NAME(norm_sum)(const NAME(LayerStep) *s, const NAME(Layer) *l, int which, const REAL *x, REAL *y, int64_t width) {
    NAME(norm)(l, which, s->normed, x, y, y, s->heads.tokens, width);
}

/* K and V of the step's tokens are stored, and its queries attend. */
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

/* A layer whose halves' inputs are normed. `first`: x is a copy of the residual, which holds nothing else yet. */
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

/* A layer that norms sums (Vaswani et al., 2017): x alone comes and goes. */
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
