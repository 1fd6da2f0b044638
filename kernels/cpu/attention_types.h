/* The arguments of attention, for its own unit and the callers in others; included once per dtype. */

typedef struct {
    const REAL *q; /* q, out: (tokens, q_heads, dim) */
    Cache cache;
    const Plan *plan;
    float *state; /* (tokens, q_heads, dim_pad + LANES + 1): state of rows between items */
    REAL *out;
    int64_t q_heads, kv_heads, dim, dim_pad, block_size, block_pad, window;
    float scale;        /* of scores, including log2(e), because exponentials are powers of 2 */
    float cap, within;  /* if cap > 0, a product p of q and k becomes cap * tanh(p * within) before scaling */
    const float *sinks; /* (q_heads,) scores without a value, or NULL */
    const float *bias;  /* (q_heads, bias_width), or NULL: at bias_reach + d the bias of a key d positions after a query */
    int64_t bias_width, bias_reach; /* LANES readable numbers follow the used ones */
} NAME(Attention);

/* The jobs of a level, from which threads take chunks. */
typedef struct {
    int64_t taken, end, chunk;
} NAME(Queue);

/* `queue` is shared by the team and empty. */
TEAM_OF_UNITS void NAME(team_attention)(const NAME(Attention) *s, NAME(Queue) *queue);
