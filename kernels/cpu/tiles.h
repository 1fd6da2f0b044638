/* Matrix tiles (Intel's AMX): eight registers of up to 16 rows of 64 bytes, and products of two of them that are added
 * to a third. In a product, `x` is (rows, words) and `weight` (words, columns), with words of 32 bits as in vector.h:
 * two bfloat16 values, or four bytes; `sum` is (rows, columns) floats or integers.
 *
 * TILES is 1 if tiles are available: those of the CPU, if the compiler targets them and NO_TILES is not defined (the
 * build defines it if the system does not grant tiles). If EMULATED_TILES is defined, C code computes what Intel's
 * manual specifies (Software Developer's Manual, volume 2, TDPBF16PS, TDPBUSD and TDPBSUD), bit by bit, on any CPU. It is slow,
 * and only for tests. Tiles are named by literals.
 *
 * A thread configures its tiles, which clears them, and releases them when it is done: tiles in use add 8 KiB to every
 * context switch.
 */
#if defined(EMULATED_TILES)
#define TILES 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(NO_TILES)
#define TILES 1
#else
#define TILES 0
#endif

#define TILE_ROWS 16
#define TILE_BYTES 64 /* of a row */

#if TILES
/* The operand of LDTILECFG. A tile without a shape must not be used. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} TileShapes;
_Static_assert(sizeof(TileShapes) == 64, "what LDTILECFG reads");

INLINE void shape_tile(TileShapes *shapes, int tile, int64_t rows, int64_t bytes) {
    shapes->palette = 1, shapes->rows[tile] = (uint8_t)rows, shapes->bytes[tile] = (uint16_t)bytes;
}

/* Set the shape of a sum with `rows` rows and `columns` columns, of its x, and of its weight; each step has 16 words. */
INLINE void shape_sum(TileShapes *shapes, int tile, int64_t rows, int64_t columns) {
    shape_tile(shapes, tile, rows, columns * 4);
}
INLINE void shape_x(TileShapes *shapes, int tile, int64_t rows) { shape_tile(shapes, tile, rows, TILE_BYTES); }
INLINE void shape_weight(TileShapes *shapes, int tile, int64_t columns) {
    shape_tile(shapes, tile, TILE_ROWS, columns * 4);
}
#endif

#if TILES && !defined(EMULATED_TILES)
/* The compiler does not know that these instructions read memory: the fence keeps earlier writes before them, and later
 * writes after them. */
#define TILE_FENCE __asm__ volatile("" ::: "memory")

INLINE void tiles_configure(const TileShapes *shapes) {
    TILE_FENCE;
    _tile_loadconfig(shapes);
    TILE_FENCE;
}
INLINE void tiles_release(void) { _tile_release(); }
#define tile_zero(tile) do { _tile_zero(tile); } while (0)
#define tile_load(tile, from, stride) do { TILE_FENCE; _tile_loadd(tile, from, stride); TILE_FENCE; } while (0)
#define tile_store(tile, to, stride) do { _tile_stored(tile, to, stride); } while (0)
#define tile_dot_bf16(sum, x, weight) do { _tile_dpbf16ps(sum, x, weight); } while (0)
#define tile_dot_int8(sum, x, weight) do { _tile_dpbusd(sum, x, weight); } while (0)
#define tile_dot_int4(sum, x, weight) do { _tile_dpbsud(sum, x, weight); } while (0)

#elif TILES
typedef struct {
    uint8_t rows, words;
    uint32_t word[TILE_ROWS][16];
} EmulatedTile;
static _Thread_local EmulatedTile emulated_tiles[8];

/* Ends the process by an illegal instruction, as the hardware does for an invalid operand. */
INLINE void tile_needs(int held) {
    if (!held) __builtin_trap();
}

static __attribute__((unused)) void tiles_release(void) { memset(emulated_tiles, 0, sizeof emulated_tiles); }

static __attribute__((unused)) void tiles_configure(const TileShapes *shapes) {
    tile_needs(shapes->palette == 1 && shapes->start_row == 0);
    for (int i = 0; i < 14; i++) tile_needs(!shapes->reserved[i]);
    for (int i = 0; i < 16; i++) {
        int rows = shapes->rows[i], bytes = shapes->bytes[i];
        tile_needs(rows <= TILE_ROWS && bytes <= TILE_BYTES && !rows == !bytes && (i < 8 || !rows));
    }
    tiles_release();
    for (int i = 0; i < 8; i++) {
        tile_needs(shapes->bytes[i] % 4 == 0); /* otherwise its products are invalid */
        emulated_tiles[i].rows = shapes->rows[i], emulated_tiles[i].words = (uint8_t)(shapes->bytes[i] / 4);
    }
}

static EmulatedTile *emulated_tile(int tile) {
    tile_needs(tile >= 0 && tile < 8 && emulated_tiles[tile].rows);
    return emulated_tiles + tile;
}

static __attribute__((unused)) void tile_zero(int tile) {
    memset(emulated_tile(tile)->word, 0, sizeof emulated_tiles->word);
}

/* Reads exactly the bytes that the instruction reads. */
static __attribute__((unused)) void tile_load(int tile, const void *from, int64_t stride) {
    EmulatedTile *t = emulated_tile(tile);
    tile_zero(tile);
    for (int row = 0; row < t->rows; row++) memcpy(t->word[row], (const char *)from + row * stride, t->words * 4);
}

static __attribute__((unused)) void tile_store(int tile, void *to, int64_t stride) {
    const EmulatedTile *t = emulated_tile(tile);
    for (int row = 0; row < t->rows; row++) memcpy((char *)to + row * stride, t->word[row], t->words * 4);
}

static void check_product(int sum, int x, int weight) {
    const EmulatedTile *s = emulated_tile(sum), *a = emulated_tile(x), *b = emulated_tile(weight);
    tile_needs(sum != x && sum != weight && x != weight);
    tile_needs(s->rows == a->rows && s->words == b->words && a->words == b->rows);
}

/* Flushes a subnormal number to 0 with its sign, as the hardware does for operands and results. */
INLINE uint32_t tile_flushed(uint32_t bits) { return bits & 0x7f800000u ? bits : bits & 0x80000000u; }

INLINE float tile_float(uint32_t bits) {
    float value;
    bits = tile_flushed(bits);
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t tile_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return tile_flushed(bits);
}

/* Computes sums += x * weight, each rounded once. Whether a result is subnormal is decided with 24 bits and an
 * unbounded exponent: results that were rounded up to the smallest normal number are checked again. */
static void tile_fuse(float x, const uint32_t *weight, uint32_t *sums) {
    uint32_t made[16];
    int near = 0;
    for (int n = 0; n < 16; n++) {
        float sum = __builtin_fmaf(x, tile_float(weight[n]), tile_float(sums[n]));
        made[n] = tile_bits(sum);
        near |= (made[n] & 0x7fffffffu) == 0x00800000u;
    }
    for (int n = 0; near && n < 16; n++)
        if ((made[n] & 0x7fffffffu) == 0x00800000u &&
            fabs(fma(x, tile_float(weight[n]), tile_float(sums[n]))) < 0x1p-126 - 0x1p-151)
            made[n] &= 0x80000000u;
    memcpy(sums, made, sizeof made);
}

/* The products of the words' first values and of their second values are summed separately, each in order. */
static __attribute__((noinline, unused)) void tile_dot_bf16(int sum, int x, int weight) {
    check_product(sum, x, weight);
    EmulatedTile *s = emulated_tiles + sum;
    const EmulatedTile *a = emulated_tiles + x, *b = emulated_tiles + weight;
    for (int m = 0; m < s->rows; m++) {
        uint32_t parts[2][16] = {{0}};
        for (int k = 0; k < a->words; k++) {
            uint32_t halves[2][16], word = a->word[m][k];
            for (int n = 0; n < 16; n++)
                halves[0][n] = b->word[k][n] << 16, halves[1][n] = b->word[k][n] & 0xffff0000u;
            tile_fuse(tile_float(word << 16), halves[0], parts[0]);
            tile_fuse(tile_float(word & 0xffff0000u), halves[1], parts[1]);
        }
        for (int n = 0; n < s->words; n++) {
            uint32_t both = tile_bits(tile_float(parts[0][n]) + tile_float(parts[1][n]));
            s->word[m][n] = tile_bits(tile_float(s->word[m][n]) + tile_float(both));
        }
    }
}

/* Multiplies bytes of x by bytes of the weight; sums do not saturate. `x_signed`: x is signed and the weight unsigned,
 * else the other way round. */
static void tile_dot_bytes(int sum, int x, int weight, int x_signed) {
    check_product(sum, x, weight);
    EmulatedTile *s = emulated_tiles + sum;
    const EmulatedTile *a = emulated_tiles + x, *b = emulated_tiles + weight;
    for (int m = 0; m < s->rows; m++)
        for (int k = 0; k < a->words; k++)
            for (int n = 0; n < s->words; n++)
                for (int shift = 0; shift < 32; shift += 8) {
                    int32_t of_x = a->word[m][k] >> shift & 0xff, of_weight = b->word[k][n] >> shift & 0xff;
                    if (x_signed)
                        of_x = (int8_t)of_x;
                    else
                        of_weight = (int8_t)of_weight;
                    s->word[m][n] += (uint32_t)(of_x * of_weight);
                }
}
static __attribute__((noinline, unused)) void tile_dot_int8(int sum, int x, int weight) {
    tile_dot_bytes(sum, x, weight, 0);
}
static __attribute__((noinline, unused)) void tile_dot_int4(int sum, int x, int weight) {
    tile_dot_bytes(sum, x, weight, 1);
}
#endif
