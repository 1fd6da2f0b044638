/* The division of a step's queries for attention, made by attention_plan.py. */

typedef struct {
    int64_t first_row, rows; /* into the plan's rows */
    int64_t sequence;        /* for the block table */
    int64_t first_tile, end_tile; /* if it `ends`, end_tile is the tile of its last query */
    int64_t starts, ends;    /* true if these are the first or the last tiles of the rows */
} Item;

typedef struct {
    const int32_t *tables; /* (sequences, table_width) */
    int64_t table_width;
    const Item *items; /* in `levels` segments: the items of a row are in different levels, in the order of their tiles */
    const int64_t *level_ends;
    int64_t levels;
    const int64_t *rows; /* (token, position) each */
    const int64_t *last_seen; /* of each row the position up to which it sees all keys; NULL: its own */
    const int32_t *behind; /* of each row bits for the next 32 keys, in a draft tree; NULL: no trees */
} Plan;
