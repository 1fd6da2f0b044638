/* What attention is called with, by the unit that has it and by the others; included once a dtype. */

typedef struct {
    const REAL *q; /* q, out: (tokens, q_heads, dim) */
    Cache cache;
    const Plan *plan;
    float *state; /* (tokens, q_heads, dim_pad + LANES + 1); read and written where an item neither starts nor ends its rows */
    REAL *out;
    int64_t q_heads, kv_heads, dim, dim_pad, block_size, block_pad, window;
    float scale;        /* of scores, times log2(e): exponentials are powers of 2 here */
    float cap, within;  /* cap > 0: a product p of q and k becomes the score cap * tanh(p * within) before that */
    const float *sinks; /* (q_heads,) scores without a value, or NULL */
    const float *bias;  /* (q_heads, bias_width), or NULL: at bias_reach + d what a key d places after a query adds to p */
    int64_t bias_width, bias_reach; /* beyond what is used there are LANES numbers */
} NAME(Attention);

/* Jobs of a level, which threads take some at a time. */
typedef struct {
    int64_t taken, end, chunk;
} NAME(Queue);

/* `queue` is the team's, empty. */
TEAM_OF_UNITS void NAME(team_attention)(const NAME(Attention) *s, NAME(Queue) *queue);
