/* What each operator of a layer takes where it stands, among the others: included before the operators' own sources, by
 * kernels.py. Of a thread's time, waiting for the others at a barrier is kept apart from working. */
#include <omp.h>
#include <stdint.h>
#include <time.h>

enum { BEGUN, INPUT_NORM, CODES, QKV, ROPE_STORE, ATTENTION, O, POST_NORM, GATE_UP, DOWN, OPERATORS };
#define THREADS 64
#ifndef CLOCK
#define CLOCK CLOCK_MONOTONIC
#endif
#define SHARED __attribute__((weak)) /* by all units that this is included in */

typedef struct {
    double passed[OPERATORS], waited[OPERATORS], last, waiting;
    char line[64]; /* no two threads write to one */
} Clock;
SHARED Clock clocks[THREADS];

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static inline void done(int operator) {
    Clock *c = clocks + omp_get_thread_num();
    double at = now();
    c->passed[operator] += at - c->last, c->waited[operator] += c->waiting;
    c->last = at, c->waiting = 0;
}
#define DONE done

/* Linked with --wrap=GOMP_barrier. */
void __real_GOMP_barrier(void);
SHARED void __wrap_GOMP_barrier(void) {
    double began = now();
    __real_GOMP_barrier();
    clocks[omp_get_thread_num()].waiting += now() - began;
}

/* Seconds of all calls so far, and begins anew. (OPERATORS,) each. */
SHARED void read_clock(int64_t thread, double *passed, double *waited) {
    Clock *c = clocks + thread;
    for (int i = 0; i < OPERATORS; i++) {
        passed[i] = c->passed[i], waited[i] = c->waited[i];
        c->passed[i] = c->waited[i] = 0;
    }
}
