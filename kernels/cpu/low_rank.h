/* Products with the low-rank factors of adapters; included once per dtype. Rows are sorted by adapter, and use the
 * tiles of linear.h: the result of a row does not depend on the other rows. */

/* The packed factors of all adapters for one product with `outputs` outputs: a (rank, inputs) and b (outputs, rank)
 * each. An adapter that does not change the product has no panels. */
typedef struct {
    const Weight *a, *b; /* NULL: no adapter changes the product */
    int64_t count, outputs, most_rank;
} LowRank;

/* The tokens of a step, sorted by adapter; tokens without one come first. */
typedef struct {
    const int64_t *order, *places, *starts; /* (tokens,), (tokens,), (adapters + 2,); order is NULL without adapters */
    /* Buffers for the tokens that have an adapter: (tokens, most inputs), (tokens, most rank), and (tokens, most
     * outputs) plus the width of a panel */
    REAL *rows, *low;
    float *values;
} NAME(Adapted);

/* Computes values = B A x of each token of `s` that has an adapter, in their order. x: (tokens of the step, inputs). */
TEAM void NAME(team_low_rank)(const REAL *x, const LowRank *l, const NAME(Adapted) *s, int64_t inputs) {
    const int64_t *starts = s->starts + 1, first = starts[0], rows = starts[l->count] - first;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++)
        memcpy(s->rows + i * inputs, x + s->order[first + i] * inputs, inputs * sizeof(REAL));
    for (int64_t e = 0; e < l->count; e++) {
        int64_t from = starts[e] - first, own = starts[e + 1] - starts[e];
        if (own && l->a[e].panels)
            NAME(team_linear_unawaited)(s->rows + from * inputs, &l->a[e], s->low + from * l->most_rank, own, PLAIN);
    }
#pragma omp barrier
    for (int64_t e = 0; e < l->count; e++) {
        int64_t from = starts[e] - first, own = starts[e + 1] - starts[e];
        float *values = s->values + from * l->outputs;
        if (own && l->b[e].panels) {
            NAME(team_linear_unawaited)(s->low + from * l->most_rank, &l->b[e], values, own, FLOAT);
        } else if (own) {
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < own; row++) memset(values + row * l->outputs, 0, l->outputs * sizeof(float));
        }
    }
#pragma omp barrier
}

/* Returns the weight with the values of `team_low_rank` added to its results. */
INLINE Weight NAME(adapted_weight)(const Weight *weight, const NAME(Adapted) *s) {
    Weight found = *weight;
    found.added = s->values, found.added_places = s->places, found.added_first = s->starts[1];
    return found;
}

void NAME(low_rank)(const REAL *x, const LowRank *l, const NAME(Adapted) *s, int64_t inputs) {
#pragma omp parallel
    NAME(team_low_rank)(x, l, s, inputs);
}
