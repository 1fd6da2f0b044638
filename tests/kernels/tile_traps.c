/* Executes the instructions on tiles one by one where the CPU has none: each is illegal there, and the signal that says so
 * is answered by doing in C what it would have done. So what the compiler made for a CPU with tiles runs on one without,
 * address by address. x86-64 and Linux. */
#define _GNU_SOURCE
#include "vector.h"
#include "tiles.h"
#include <signal.h>
#include <stdatomic.h>
#include <ucontext.h>

static struct sigaction before;
static _Atomic int64_t executed[8]; /* by kind: configure, release, zero, load, store, bfloat16, int8 */

int64_t executed_of(int64_t kind) { return executed[kind]; }

typedef struct {
    int prefix, reg, other, base, index, scale, mode; /* registers by number; base or index -1: none */
    uint8_t opcode;
    int64_t offset, length;
} Decoded;

/* Of VEX.128.0F38.W0 with a ModRM byte, as all of them are; 0: it is something else. */
static int decode(const uint8_t *code, Decoded *d) {
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84)) return 0;
    int x = !(code[1] & 0x40) << 3, b = !(code[1] & 0x20) << 3;
    d->prefix = code[2] & 3, d->other = ~code[2] >> 3 & 15, d->opcode = code[3];
    int low = code[4] & 7;
    d->mode = code[4] >> 6, d->reg = code[4] >> 3 & 7, d->base = low | b, d->index = -1, d->scale = 0, d->offset = 0;
    d->length = 5;
    if (d->mode == 3) return 1;
    if (low == 4) {
        uint8_t sib = code[d->length++];
        d->scale = sib >> 6, d->index = (sib >> 3 & 7) | x, d->base = (sib & 7) | b;
        if (d->index == 4) d->index = -1;
        if ((sib & 7) == 5 && d->mode == 0) return 0; /* no base: the compiler makes none */
    } else if (low == 5 && d->mode == 0) {
        return 0; /* relative to the instruction */
    }
    if (d->mode == 1) d->offset = (int8_t)code[d->length++];
    if (d->mode == 2) {
        int32_t offset;
        memcpy(&offset, code + d->length, 4);
        d->offset = offset, d->length += 4;
    }
    return 1;
}

static int64_t value_of(const ucontext_t *context, int reg) {
    static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[places[reg]];
}

enum { CONFIGURE, RELEASE, ZERO, LOAD, STORE, DOT_BF16, DOT_INT8, UNKNOWN };

static int execute(const ucontext_t *context, const Decoded *d) {
    int64_t stride = d->index < 0 ? 0 : value_of(context, d->index) << d->scale;
    char *at = d->mode == 3 ? NULL : (char *)value_of(context, d->base) + d->offset;
    int in_registers = d->mode == 3, key = d->opcode << 4 | d->prefix << 1 | in_registers;
    switch (key) {
        case 0x49 << 4 | 0 << 1 | 0: tiles_configure((const TileShapes *)(at + stride)); return CONFIGURE;
        case 0x49 << 4 | 0 << 1 | 1: tiles_release(); return RELEASE;
        case 0x49 << 4 | 3 << 1 | 1: tile_zero(d->reg); return ZERO;
        case 0x4b << 4 | 3 << 1 | 0: tile_load(d->reg, at, stride); return LOAD;
        case 0x4b << 4 | 2 << 1 | 0: tile_store(d->reg, at, stride); return STORE;
        case 0x5c << 4 | 2 << 1 | 1: tile_dot_bf16(d->reg, d->base, d->other); return DOT_BF16;
        case 0x5e << 4 | 1 << 1 | 1: tile_dot_int8(d->reg, d->base, d->other); return DOT_INT8;
        default: return UNKNOWN;
    }
}

static void on_illegal(int signal_, siginfo_t *info, void *context_) {
    ucontext_t *context = context_;
    Decoded d;
    int kind = UNKNOWN;
    if (decode((const uint8_t *)context->uc_mcontext.gregs[REG_RIP], &d)) kind = execute(context, &d);
    (void)info;
    if (kind == UNKNOWN) {
        sigaction(signal_, &before, NULL); /* comes again, and is whoever's it was */
        return;
    }
    executed[kind]++;
    context->uc_mcontext.gregs[REG_RIP] += d.length;
}

void catch_tiles(void) {
    struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO | SA_NODEFER};
    for (int i = 0; i < 8; i++) executed[i] = 0;
    sigaction(SIGILL, &action, &before);
}

void let_tiles_go(void) { sigaction(SIGILL, &before, NULL); }
