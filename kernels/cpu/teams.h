/* The functions with which a layer writes and reads the cache. They are in the layer's own library, or for a quantised
 * cache in another one that is compiled only if needed; included once per dtype. */

typedef struct {
    void (*store)(const NAME(Heads) *heads);
    void (*copy)(const NAME(Parts) *parts, const Cache *cache, int64_t kv_heads, int64_t dim_pad, int64_t block_pad);
    void (*attend)(const NAME(Attention) *attention, NAME(Queue) *queue);
} NAME(Teams);

void NAME(teams)(NAME(Teams) *found) {
    *found = (NAME(Teams)){NAME(team_rope_store), NAME(team_copy_parts), NAME(team_attention)};
}
