/* Codes of a weight, packed, and what its sums start at. Codes come as (outputs, inputs) int8. */
void pack_codes(const int8_t *weight, int64_t outputs, int64_t inputs, int64_t gated, int8_t *packed, int32_t *starts) {
    int64_t words = (inputs + 3) / 4, panels = panels_of(outputs, gated);
    memset(starts, 0, packed_columns(outputs, gated) * sizeof *starts);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t i = 0; i < words; i++)
            for (int64_t column = 0; column < PANEL; column++) {
                int64_t output = output_of(panel, column, outputs, gated), rest = inputs - i * 4;
                int8_t word[4] = {0};
                if (output >= 0) memcpy(word, weight + output * inputs + i * 4, rest < 4 ? rest : 4);
                memcpy(packed + ((panel * words + i) * PANEL + column) * 4, word, 4);
                for (int j = 0; j < 4; j++) starts[panel * PANEL + column] -= 128 * word[j];
            }
}
