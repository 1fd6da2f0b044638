/* Stores that bypass the caches, for data that one thread writes and all threads read: results of norms, quantised
 * rows.
 *
 * When a layer writes to such a line again, every core has a copy of it. On a Zen 4 the store waits until the other
 * copies are invalidated, 8 to 27 ns per line, whatever is prefetched: 35 of the 45 us of a norm of 128 x 576. With a
 * store past the caches no thread waits, and the readers load the lines from memory. Other CPUs were not measured, and
 * use ordinary stores.
 */
#if defined(__CLZERO__) && LANES >= 8 /* only AMD's Zen has it */
#define STREAMS 1
#else
#define STREAMS 0
#endif
#define LEAST_STREAMED (32 << 10) /* bytes: less fits the L1 caches, and is written again without waiting */

/* Returns true if a team stores rows of this size past the caches. */
INLINE int streamed(const void *to, int64_t rows, int64_t bytes) {
    int whole = bytes % LINE == 0 && (uintptr_t)to % LINE == 0; /* partial lines would be written to memory in parts */
    return STREAMS && whole && rows * bytes >= LEAST_STREAMED && omp_get_num_threads() > 1;
}

/* `to` is aligned to a vector. */
INLINE void stream_words(void *to, vi words) {
#if !STREAMS
    *(vi *)to = words;
#elif LANES == 16
    _mm512_stream_si512((__m512i *)to, (__m512i)words);
#else
    _mm256_stream_si256((__m256i *)to, (__m256i)words);
#endif
}

/* As store_bytes. */
INLINE void stream_bytes(uint8_t *to, vi value) {
#if STREAMS && LANES == 16
    _mm_stream_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)value));
#else
    store_bytes(to, value);
#endif
}

/* Must run before the barrier after which other threads read. */
INLINE void end_stream(void) {
#if STREAMS
    _mm_sfence();
#endif
}

INLINE void stream_twin_f32(float *to, Twin t) { stream_words(to, (vi)t.a), stream_words(to + LANES, (vi)t.b); }
INLINE void stream_twin_bf16(bf16 *to, Twin t) { stream_words(to, words_of_twin(t)); }
