/* Arm's BFDOT, BFMMLA and USMMLA in plain C, bit by bit as defined in the Architecture Reference Manual for A-profile
 * (DDI 0487) for FPCR.EBF 0 (BFDotAdd, BFMatMulAddH, MatMulAdd). In bfloat16 every step is rounded to odd, subnormal
 * operands and results are 0 with their sign, an overflow is infinite, and NaN is the default NaN. */

/* Returns a float's bits, rounded to odd: towards 0, with the last bit set if the number is not exact. The double is
 * rounded in the same way, or exact. */
static __attribute__((unused)) uint32_t odd_bits(double exact) {
    uint64_t wide, dropped = (1ull << 29) - 1;
    if (exact != exact) return 0x7fc00000;
    memcpy(&wide, &exact, 8);
    if (fabs(exact) < 0x1p-126) return wide >> 63 ? 0x80000000u : 0;
    wide = wide & dropped ? (wide & ~dropped) | (dropped + 1) : wide;
    memcpy(&exact, &wide, 8);
    float near = (float)exact;
    uint32_t bits;
    memcpy(&bits, &near, 4);
    return bits;
}

INLINE double flushed(uint32_t bits) { /* a float as an operand */
    float value;
    bits = bits & 0x7f800000u ? bits : bits & 0x80000000u;
    memcpy(&value, &bits, 4);
    return value;
}

static __attribute__((unused)) uint32_t odd_sum(uint32_t a, uint32_t b) {
    double x = flushed(a), y = flushed(b), sum = x + y, of_y = sum - x, lost = (x - (sum - of_y)) + (y - of_y);
    if (fabs(sum) < INFINITY && lost != 0) { /* round the double to odd */
        uint64_t wide;
        memcpy(&wide, &sum, 8);
        wide -= (lost < 0) != (sum < 0);
        wide |= 1;
        memcpy(&sum, &wide, 8);
    }
    return odd_bits(sum);
}

/* Adds the two products of a word, then adds them to the sum. */
static __attribute__((unused)) uint32_t emulated_bfdot(uint32_t sum, uint32_t x, uint32_t weight) {
    uint32_t low = odd_bits(flushed(x << 16) * flushed(weight << 16));
    uint32_t high = odd_bits(flushed(x & 0xffff0000u) * flushed(weight & 0xffff0000u));
    return odd_sum(sum, odd_sum(low, high));
}

static __attribute__((unused)) Quad emulated_bfmmla(Quad sums, Quad x, Quad weight) {
    for (int i = 0; i < 4; i++)
        for (int word = 0; word < 2; word++)
            sums[i] = (int32_t)emulated_bfdot((uint32_t)sums[i], (uint32_t)x[i / 2 * 2 + word], (uint32_t)weight[i % 2 * 2 + word]);
    return sums;
}

static __attribute__((unused)) Quad emulated_usmmla(Quad sums, Quad x, Quad weight) {
    for (int i = 0; i < 4; i++) {
        const uint8_t *of_x = (const uint8_t *)&x + i / 2 * 8;
        const int8_t *of_weight = (const int8_t *)&weight + i % 2 * 8;
        for (int byte = 0; byte < 8; byte++) sums[i] += of_x[byte] * of_weight[byte];
    }
    return sums;
}
