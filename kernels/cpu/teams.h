/* What a whole layer calls to write and read the cache: a cache of values has it in the layer's own library, one of codes
 * in another, which is compiled only where it is asked for; included once a dtype. */

typedef struct {
    void (*store)(const NAME(Heads) *heads);
    void (*copy)(const NAME(Parts) *parts, const Cache *cache, int64_t kv_heads, int64_t dim_pad, int64_t block_pad);
    void (*attend)(const NAME(Attention) *attention, NAME(Queue) *queue);
} NAME(Teams);

void NAME(teams)(NAME(Teams) *found) {
    *found = (NAME(Teams)){NAME(team_rope_store), NAME(team_copy_parts), NAME(team_attention)};
}
