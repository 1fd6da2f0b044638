/* How the results of a matrix product are cut up: shared by every kind of weight. */

enum { PLAIN, FLOAT, GATED }; /* what a product writes: the stored type, float, or silu(gate) * up */

INLINE int64_t panels_of(int64_t outputs, int gated) {
    return gated ? (outputs / 2 + PANEL / 2 - 1) / (PANEL / 2) : (outputs + PANEL - 1) / PANEL;
}

/* The output that stands in column `column` of panel `panel`; -1: none, the panel is wider than what is left. */
INLINE int64_t output_of(int64_t panel, int64_t column, int64_t outputs, int gated) {
    int64_t half = PANEL / 2, output = panel * PANEL + column;
    if (!gated) return output < outputs ? output : -1;
    output = panel * half + column % half;
    if (output >= outputs / 2) return -1;
    return column < half ? output : outputs / 2 + output;
}

/* How many columns all panels of a weight have. */
int64_t packed_columns(int64_t outputs, int64_t gated) { return panels_of(outputs, gated) * PANEL; }

/* The output in each of these columns, -1 where there is none. */
void packed_order(int64_t outputs, int64_t gated, int64_t *order) {
    for (int64_t i = 0; i < packed_columns(outputs, gated); i++)
        order[i] = output_of(i / PANEL, i % PANEL, outputs, gated);
}

#define CHUNK_BYTES (256 << 10) /* of x: a quarter of an L2 of 1 MiB. From 96 to 4,096 rows made no difference above 3% */

/* Which rows and which panel stand at place `at` of the work: chunks of `per` row blocks, in each panel after panel, in
 * each row block after row block. A chunk of x stays in the L2 cache while the panels pass. */
INLINE void place(int64_t at, int64_t per, int64_t blocks, int64_t panels, int64_t *block, int64_t *panel) {
    int64_t chunk = at / (per * panels), first = chunk * per, inside = blocks - first < per ? blocks - first : per;
    int64_t rest = at - first * panels;
    *panel = rest / inside, *block = first + rest % inside;
}
