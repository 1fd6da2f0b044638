/* The operators of one dtype (UNIT names its source) on fixed inputs, against plain C in double or, where sums are exact,
 * to the bit. Prints a line for each check; ends with the number of those that failed. Built for a CPU that is not here,
 * and run in software. */
#include <stdio.h>
#include UNIT
#if !defined(EMULATED_MMLA)
#include "emulated_mmla.h"
#endif

#define BF16 (PAIR == 2)
#define MOST_FAILURES 20

int64_t lanes(void);
int64_t packed_columns(int64_t outputs, int64_t gated);
void packed_order(int64_t outputs, int64_t gated, int64_t *order);
void pack_codes(const int8_t *weight, int64_t outputs, int64_t inputs, int64_t gated, int8_t *packed, int32_t *starts);
void NAME(paged_attention)(const NAME(Attention) *attention);

static int failures;
static uint32_t seed = 1;

static void failed(const char *what, double got, double wanted) {
    if (failures++ < MOST_FAILURES) printf("FAILED %s: %.9g, wanted %.9g\n", what, got, wanted);
}

static void near_enough(const char *what, double got, double wanted, double off) {
    if (!(fabs(got - wanted) <= off)) failed(what, got, wanted);
}

static void same(const char *what, const void *got, const void *wanted, size_t bytes) {
    if (memcmp(got, wanted, bytes)) failed(what, 0, 0);
}

static float draw(void) { /* -1 ... 1 */
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed / 2147483648.0f;
}

static REAL *draws(int64_t n) {
    REAL *values = malloc((n + 64) * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = STORE(draw());
    return values;
}

static void *zeros(int64_t bytes) { return calloc(bytes + 256, 1); }

/* What a result may be off by: a rounding of its type, and those of its terms. */
static double slack(double value, double terms) { return fabs(value) * (BF16 ? 0x1p-8 : 0x1p-20) + terms * 0x1p-18; }

static double product(const REAL *x, const REAL *w, int64_t inputs, double *terms) {
    double sum = 0;
    *terms = 0;
    for (int64_t i = 0; i < inputs; i++) sum += (double)LOAD(x[i]) * LOAD(w[i]), *terms += fabs((double)LOAD(x[i]) * LOAD(w[i]));
    return sum;
}

#ifndef CODED
/* Packs a weight and its bias. */
static Weight packed(const REAL *weight, const REAL *bias, int64_t outputs, int64_t inputs, int gated) {
    int64_t columns = packed_columns(outputs, gated), order[columns];
    REAL *panels = zeros(columns * padded(inputs * sizeof(REAL))), *added = zeros(columns * sizeof(REAL));
    NAME(pack_linear)(weight, outputs, inputs, gated, panels);
    packed_order(outputs, gated, order);
    for (int64_t i = 0; i < columns; i++)
        if (order[i] >= 0) added[i] = bias[order[i]];
    return (Weight){panels, added, NULL, NULL, outputs, inputs};
}

static void check_linear(int64_t rows, int64_t outputs, int64_t inputs, int kind) {
    int64_t wide = is_gated(kind) ? outputs / 2 : outputs;
    REAL *x = draws(rows * inputs), *w = draws(outputs * inputs), *bias = draws(outputs), alone[wide];
    REAL *y = zeros(rows * wide * sizeof(REAL));
    Weight weight = packed(w, bias, outputs, inputs, is_gated(kind));
    NAME(linear)(x, &weight, y, rows, kind);
    for (int64_t r = 0; r < rows; r++) {
        NAME(linear)(x + r * inputs, &weight, alone, 1, kind);
        same("a row of a product does not depend on the others", alone, y + r * wide, sizeof alone);
        for (int64_t o = 0; o < wide; o++) {
            double terms, sum = product(x + r * inputs, w + o * inputs, inputs, &terms) + LOAD(bias[o]), wanted = sum;
            if (is_gated(kind)) {
                double more, up = product(x + r * inputs, w + (wide + o) * inputs, inputs, &more) + LOAD(bias[wide + o]);
                wanted = sum / (1 + exp(-sum)) * up, terms = (terms + more + fabs(sum) + fabs(up)) * (BF16 ? 0x1p10 : 8);
            }
            near_enough(is_gated(kind) ? "gated product" : "product", LOAD(y[r * wide + o]), wanted, slack(wanted, terms));
        }
    }
    printf("linear %ld x %ld x %ld, kind %d\n", (long)rows, (long)outputs, (long)inputs, kind);
}

/* To the bit: the codes, their exact sums, and the two roundings after them. */
static void check_quantized(int64_t rows, int64_t outputs, int64_t inputs) {
    int64_t columns = packed_columns(outputs, 0), room = codes_of(inputs), order[columns];
    REAL *x = draws(rows * inputs), *y = zeros(rows * outputs * sizeof(REAL)), *wanted = zeros(rows * outputs * sizeof(REAL));
    int8_t *codes = zeros(outputs * inputs), *panels = zeros(columns * padded(inputs));
    int32_t *starts = zeros(columns * 4);
    float *scales = zeros(columns * 4), *row_scales = zeros(rows * 4);
    for (int64_t i = 0; i < outputs * inputs; i++) codes[i] = (int8_t)(draw() * 127.9f);
    pack_codes(codes, outputs, inputs, 0, panels, starts);
    packed_order(outputs, 0, order);
    for (int64_t i = 0; i < columns; i++) scales[i] = order[i] >= 0 ? (float)(order[i] + 1) / 256 : 0;
    Weight weight = {panels, NULL, starts, scales, outputs, inputs};
    NAME(quantized_linear)(x, &weight, y, zeros(rows * room), row_scales, rows, PLAIN);
    for (int64_t r = 0; r < rows; r++) {
        float most = 0;
        for (int64_t i = 0; i < inputs; i++) most = fmaxf(most, fabsf(LOAD(x[r * inputs + i])));
        for (int64_t o = 0; o < outputs; o++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < inputs; i++)
                sum += codes[o * inputs + i] * (int32_t)rint((double)LOAD(x[r * inputs + i]) * (127.0f / most));
            wanted[r * outputs + o] = STORE((float)sum * ((float)(o + 1) / 256 * (most / 127.0f)) + 0.0f);
        }
    }
    same("product of codes", y, wanted, rows * outputs * sizeof(REAL));
    printf("codes %ld x %ld x %ld\n", (long)rows, (long)outputs, (long)inputs);
}

static void check_norm(int64_t rows, int64_t width) {
    REAL *x = draws(rows * width), *weight = draws(width), *y = zeros(rows * width * sizeof(REAL));
    NAME(rms_norm)(x, NULL, weight, y, NULL, rows, width, 1e-5f, 0.0f);
    for (int64_t r = 0; r < rows; r++) {
        double terms, scale = 1 / sqrt(product(x + r * width, x + r * width, width, &terms) / width + 1e-5f);
        for (int64_t i = 0; i < width; i++) {
            double wanted = LOAD(weight[i]) * LOAD(x[r * width + i]) * scale;
            near_enough("norm", LOAD(y[r * width + i]), wanted, 3 * slack(wanted, 1e-3));
        }
    }
    printf("norm %ld x %ld\n", (long)rows, (long)width);
}

#endif

/* Heads of `dim` as the cache keeps them: each to the nearest code of its own scale, where it keeps codes. */
static double *kept(const REAL *values, int64_t heads, int64_t dim) {
    double *found = malloc(heads * dim * sizeof *found);
    for (int64_t i = 0; i < heads * dim; i++) found[i] = LOAD(values[i]);
#ifdef CODED
    for (double *head = found; head < found + heads * dim; head += dim) {
        float most = 0;
        for (int64_t d = 0; d < dim; d++) most = fmaxf(most, (float)fabs(head[d]));
        for (int64_t d = 0; d < dim; d++) head[d] = rint(head[d] * (127.0f / most)) * (most / 127.0f);
    }
#endif
    return found;
}

/* Queries at the end of one sequence; K and V come into the cache by the operator that stores them. */
static void check_attention(int64_t context, int64_t queries, int64_t group, int64_t kv_heads, int64_t dim) {
    int64_t block_size = 6, block_pad = (block_size + LANES - 1) / LANES * LANES, dim_pad = (dim + LANES - 1) / LANES * LANES;
    int64_t blocks = (context + block_size - 1) / block_size, heads = group * kv_heads, slots[context], positions[context];
    int64_t size = blocks * kv_heads * block_pad * dim_pad, stride = kv_heads * dim;
    REAL *k = draws(context * stride), *v = draws(context * stride), *q = draws(queries * heads * dim);
    REAL *rotated = zeros(context * heads * dim * sizeof(REAL)), *unused = zeros(context * heads * dim * sizeof(REAL));
    double *k_kept = kept(k, context * kv_heads, dim), *v_kept = kept(v, context * kv_heads, dim);
    Cache cache = {zeros(size * sizeof(KEPT)), zeros(size * sizeof(KEPT)), NULL, NULL};
#ifdef CODED
    cache.k_scale = zeros(size / dim_pad * sizeof(float)), cache.v_scale = zeros(size / dim_pad * sizeof(float));
    for (int64_t i = 0; i < size / dim_pad; i++) cache.k_scale[i] = cache.v_scale[i] = NAN; /* until it is written */
#endif
    REAL *out = zeros(queries * heads * dim * sizeof(REAL)), *alone = zeros(queries * heads * dim * sizeof(REAL));
    int32_t table[blocks];
    float none[1] = {0};
    for (int64_t b = 0; b < blocks; b++) table[b] = (int32_t)(blocks - 1 - b);
    for (int64_t t = 0; t < context; t++)
        positions[t] = t, slots[t] = table[t / block_size] * block_size + t % block_size;
    NAME(Heads) stored = {unused, k, v, stride, positions, slots, cache, rotated,
                          {none, none, 0, 0, NULL, NULL, 1e-5f, 0.0f}, context, kv_heads, kv_heads, dim, dim_pad, block_size, block_pad};
    NAME(rope_store)(&stored);
    int64_t rows[2 * queries], level_end = 1;
    for (int64_t i = 0; i < queries; i++) rows[2 * i] = i, rows[2 * i + 1] = context - queries + i;
    Item item = {0, queries, 0, 0, 0, 1, 1};
    Plan plan = {table, blocks, &item, &level_end, 1, rows};
    NAME(Attention) call = {q, cache, &plan, NULL, out, heads, kv_heads, dim, dim_pad, block_size, block_pad, 0,
                            0.3f * LOG2_E, 0, 0, NULL};
    NAME(paged_attention)(&call);
    call.out = alone;
    for (int64_t i = 0; i < queries; i++) {
        item.first_row = i, item.rows = 1;
        NAME(paged_attention)(&call);
    }
    same("a query's attention does not depend on the others", alone, out, queries * heads * dim * sizeof(REAL));
    for (int64_t i = 0; i < queries * heads; i++) {
        int64_t seen = context - queries + i / heads + 1, head = i % heads / group;
        double weights[seen], mass = 0;
        for (int64_t t = 0; t < seen; t++) {
            double score = 0;
            for (int64_t d = 0; d < dim; d++) score += (double)LOAD(q[i * dim + d]) * k_kept[t * stride + head * dim + d];
            mass += weights[t] = exp(0.3 * score);
        }
        for (int64_t d = 0; d < dim; d++) {
            double wanted = 0;
            for (int64_t t = 0; t < seen; t++) wanted += weights[t] / mass * v_kept[t * stride + head * dim + d];
            near_enough("attention", LOAD(out[i * dim + d]), wanted, BF16 ? 0x1p-7 : 0x1p-17);
        }
    }
    printf("attention %ld queries of %ld, %ld x %ld heads of %ld\n", (long)queries, (long)context, (long)group,
           (long)kv_heads, (long)dim);
}

#if BF16
/* The nearest float towards 0, its last bit set where that is not the number itself. */
static float rounded_to_odd(double exact) {
    float near = (float)exact;
    if (fabs((double)near) > fabs(exact)) near = nextafterf(near, 0.0f);
    uint32_t bits;
    memcpy(&bits, &near, 4);
    bits |= (double)near != exact;
    memcpy(&near, &bits, 4);
    return near;
}
#endif

/* One word's products, as the instruction that adds them is documented. Numbers lie so close that a double is exact. */
static void check_dot(void) {
    for (int i = 0; i < 1000; i++) {
        float start = draw(), wanted;
        REAL a[2] = {STORE(draw()), STORE(draw())}, b[2] = {STORE(draw()), STORE(draw() * (i % 2 ? 0x1p-12f : 1))};
        int32_t x = 0, w = 0;
        memcpy(&x, a, PAIR * sizeof(REAL)), memcpy(&w, b, PAIR * sizeof(REAL));
        float got = DOT(splat(start), splat_word(x), splat_word(w))[LANES - 1];
#if BF16 && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        float pair = rounded_to_odd((double)LOAD(a[0]) * LOAD(b[0]) + (double)LOAD(a[1]) * LOAD(b[1]));
        wanted = rounded_to_odd((double)pair + start);
#elif BF16
        wanted = fmaf(LOAD(a[0]), LOAD(b[0]), fmaf(LOAD(a[1]), LOAD(b[1]), start));
#else
        wanted = fmaf(LOAD(a[0]), LOAD(b[0]), start);
#endif
        same("one word's products", &got, &wanted, 4);
#if BF16
        float made, modelled = rounded_to_odd((double)LOAD(a[0]) * LOAD(b[0]) + (double)LOAD(a[1]) * LOAD(b[1]));
        uint32_t sum, in_c;
        modelled = rounded_to_odd((double)modelled + start);
        memcpy(&sum, &start, 4);
        in_c = emulated_bfdot(sum, (uint32_t)x, (uint32_t)w);
        memcpy(&made, &in_c, 4);
        same("BFDOT in C", &made, &modelled, 4);
#endif
    }
    printf("dot\n");
}

static void check_codes(void) {
    for (int i = 0; i < 1000; i++) {
        uint8_t a[4];
        int8_t b[4];
        int32_t x, w, wanted = i * 12345;
        for (int j = 0; j < 4; j++) a[j] = (uint8_t)(draw() * 127.5f + 127.5f), b[j] = (int8_t)(draw() * 127.9f);
        if (i < 4) memset(a, i & 1 ? 255 : 0, 4), memset(b, i & 2 ? -127 : 127, 4);
        memcpy(&x, a, 4), memcpy(&w, b, 4);
        int32_t got = dot_int8(splat_word(wanted), splat_word(x), splat_word(w))[LANES - 1];
        for (int j = 0; j < 4; j++) wanted += a[j] * b[j];
        same("one word's codes", &got, &wanted, 4);
    }
    printf("dot of codes\n");
}

/* Bytes widened, and their products with integers of 16 bits, at their ends too. */
static void check_int16(void) {
    for (int i = 0; i < 1000; i++) {
        int8_t bytes[2 * LANES];
        int16_t by[2] = {(int16_t)(draw() * 32767.9f), (int16_t)(draw() * 32767.9f)};
        int32_t word;
        for (int j = 0; j < 2 * LANES; j++) bytes[j] = (int8_t)(draw() * 128.5f);
        if (i < 4) memset(bytes, i & 1 ? 127 : -128, sizeof bytes), by[0] = by[1] = i & 2 ? 32767 : -32767;
        memcpy(&word, by, 4);
        vi got = dot_int16(splat_word(i * 12345), splat_word(word), halves_of_bytes(bytes));
        for (int j = 0; j < LANES; j++) {
            int32_t found = got[j], wanted = i * 12345 + by[0] * bytes[2 * j] + by[1] * bytes[2 * j + 1];
            same("two products of 16 bits", &found, &wanted, 4);
        }
    }
    printf("dot of 16 bits\n");
}

#if MMLA_BF16 || MMLA_INT8
/* Any bits at all, or numbers of one size; every 16th is one of those that are treated in a way of their own. */
static Quad any_quad(int i) {
    static const uint16_t strange[] = {0, 0x8000, 1, 0x807f, 0x7f80, 0xff80, 0x7fc1, 0x7f7f, 0xff7f, 0x0080, 0x2000, 0x1fff};
    uint16_t halves[8];
    Quad made;
    for (int j = 0; j < 8; j++) {
        float value = draw();
        halves[j] = i % 2 ? bf16_store(value) : (uint16_t)(int32_t)(value * 32767.0f);
        if (i % 3 == 0 && (int)(value * 1000) % 16 == 0) halves[j] = strange[(unsigned)(value * value * 1e6f) % 12];
    }
    memcpy(&made, halves, sizeof made);
    return made;
}
#endif

/* Each of four sums, as the manual defines the instructions; BFMMLA also as two BFDOTs, which is how keys count on it. */
static void check_mmla(void) {
#if MMLA_INT8
    for (int i = 0; i < 4000; i++) {
        Quad sums = any_quad(0), x = any_quad(0), w = any_quad(0);
        Quad got = mmla_int8(sums, x, w), wanted = emulated_usmmla(sums, x, w);
        same("USMMLA", &got, &wanted, sizeof got);
    }
    printf("usmmla\n");
#endif
#if MMLA_BF16
    for (int i = 0; i < 20000; i++) {
        Quad sums = any_quad(i), x = any_quad(i), w = any_quad(i), got = mmla_bf16(sums, x, w), wanted = emulated_bfmmla(sums, x, w);
        same("BFMMLA", &got, &wanted, sizeof got);
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        Quad rows[2] = {{x[0], x[0], x[2], x[2]}, {x[1], x[1], x[3], x[3]}};
        Quad columns[2] = {{w[0], w[2], w[0], w[2]}, {w[1], w[3], w[1], w[3]}};
        vf twice = dot_bf16(dot_bf16((vf)sums, (vi)rows[0], (vi)columns[0]), (vi)rows[1], (vi)columns[1]);
        same("BFMMLA is two BFDOTs", &got, &twice, sizeof got);
#endif
    }
    printf("bfmmla\n");
#endif
}

#ifndef CODED
/* A product's floats are BFDOT's, word after word, where the CPU has that. */
static void check_product_bits(int64_t rows, int64_t outputs, int64_t inputs) {
#if BF16 && (MMLA_BF16 || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)) && !TILES
    int64_t columns = packed_columns(outputs, 0);
    REAL *x = draws(rows * inputs), *w = draws(outputs * inputs), *panels = zeros(columns * padded(inputs * 2));
    float *y = zeros(rows * outputs * 4), *wanted = zeros(rows * outputs * 4);
    NAME(pack_linear)(w, outputs, inputs, 0, panels);
    Weight weight = {panels, NULL, NULL, NULL, outputs, inputs};
    NAME(linear)(x, &weight, y, rows, FLOAT);
    for (int64_t i = 0; i < rows * outputs; i++) {
        const REAL *of_x = x + i / outputs * inputs, *of_w = w + i % outputs * inputs;
        uint32_t sum = 0;
        for (int64_t j = 0; j < inputs; j += 2) {
            uint32_t high = j + 1 < inputs;
            sum = emulated_bfdot(sum, of_x[j] | (high ? (uint32_t)of_x[j + 1] << 16 : 0),
                                 of_w[j] | (high ? (uint32_t)of_w[j + 1] << 16 : 0));
        }
        memcpy(wanted + i, &sum, 4);
    }
    same("a product in the order of its words", y, wanted, rows * outputs * 4);
    printf("bits of %ld x %ld x %ld\n", (long)rows, (long)outputs, (long)inputs);
#else
    (void)rows, (void)outputs, (void)inputs;
#endif
}

static void check_products(void) {
    check_mmla();
    for (int64_t rows = 1; rows < 9; rows++) check_product_bits(rows, 37, 60 + rows);
    for (int64_t rows = 1; rows < 9; rows++) check_linear(rows, 70, 33 + 16 * rows, PLAIN);
    check_linear(13, 130, 200, GATED);
    for (int64_t rows = 1; rows < 9; rows += 2) check_quantized(rows, 70, 31 + 16 * rows);
    check_norm(3, 77);
}
#endif

int main(void) {
    printf("%ld lanes\n", (long)lanes());
    check_dot();
    check_codes();
    check_int16();
#ifndef CODED
    check_products();
#endif
    check_attention(1, 1, 1, 1, 4);
    check_attention(75, 1, 3, 2, 64);
    check_attention(75, 9, 2, 1, 20);
    check_attention(140, 3, 7, 1, 72);
    printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures > 0;
}
