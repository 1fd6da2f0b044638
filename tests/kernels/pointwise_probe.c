/* What moves data and computes little, with a move of the same bytes beside it; for pointwise_speed.py. */
#include "bfloat16.h"

#include "pointwise.h"
#include "linear.h"
#include "quantized_linear.h"

void quantize(const bf16 *x, int64_t inputs, uint8_t *codes, float *row_scales, int64_t rows) {
#pragma omp parallel
    team_quantize_bf16(x, inputs, codes, row_scales, rows);
}

/* Reads `in` vectors of every 4 + 4 and writes `out`; streams are `apart` vectors from one another. */
INLINE void move_vector(const vf *from, vf *to, int64_t i, int64_t apart, const int in, const int out) {
    vf some = from[i];
    for (int k = 1; k < in; k++) some = (vf)((vi)some | (vi)from[i + k * apart]);
    for (int k = 0; k < out; k++) to[i + k * apart] = some;
}

/* As many bytes as an operator's `in` streams read and `out` streams written, of `vectors` vectors each. */
void move(const vf *from, vf *to, int64_t vectors, int64_t in, int64_t out) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < vectors; i++) switch (in * 8 + out) {
            case 9: move_vector(from, to, i, vectors, 1, 1); break;
            case 17: move_vector(from, to, i, vectors, 2, 1); break;
            case 18: move_vector(from, to, i, vectors, 2, 2); break;
        }
}
