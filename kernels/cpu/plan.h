/* How a step's queries are cut up for attention, as attention_plan.py plans it. */

typedef struct {
    int64_t first_row, rows; /* into the plan's rows */
    int64_t sequence;        /* whose block table is walked */
    int64_t first_tile, end_tile; /* where it `ends`, end_tile is its last query's */
    int64_t starts, ends;    /* whether these are the rows' first tiles, and their last */
} Item;

typedef struct {
    const int32_t *tables; /* (sequences, table_width) */
    int64_t table_width;
    const Item *items; /* cut into `levels` stretches: a row's items lie in different levels, in the order of their tiles */
    const int64_t *level_ends;
    int64_t levels;
    const int64_t *rows; /* (token, position) each */
    const int64_t *last_seen; /* of each row the last position up to which it sees all; NULL: its own */
    const int32_t *behind; /* of each row of a tree of drafts which of the 32 keys behind that it sees; NULL: none */
} Plan;
