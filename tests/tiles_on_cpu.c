/* tests/tiles_on_cpu.c: emulates matrix tiles (AMX) on an x86-64 processor that has none, so that
 * the kernels that use them are checked on every machine.
 *
 * test_tiles.c includes it, and llm.h with LLM_EMULATED_TILES defined. The processor does not know
 * the tile instructions, so the system sends SIGILL; the handler below decodes the instruction,
 * carries it out and continues after it. The kernels are the same as on a processor with tiles. The
 * emulator also checks more than a processor does: the address sanitizer sees each row that a tile
 * reads or writes, and a product of tiles whose shapes do not match ends the test with a message.
 *
 * The instructions and their encoding: Intel, Architecture Instruction Set Extensions Programming
 * Reference, chapter 3. A processor with tiles carries out some of these instructions itself, so
 * there the test reports that it is skipped; test_kernels uses the real tiles.
 *
 * A signal takes a microsecond or two and a product of bf16 another two: some thousand times the
 * time of real tiles. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };

typedef struct tile {
    int rows, row_bytes;
    char bytes[ROWS][ROW_BYTES];
} tile;

static __thread tile tiles[TILES];
static __thread int configured;

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "tiles_on_cpu: %s\n", what);
    abort();
}

typedef struct instruction {
    int prefix, opcode;      /* prefix: 0 none, 1 0x66, 2 0xf3, 3 0xf2 */
    int mode, reg, rm, vvvv; /* mode 3: both operands are registers */
    char *address;           /* mode < 3: address of the memory operand, or of a tile's first row */
    int64_t stride;          /* index times scale: bytes from one row of a tile to the next */
    int length;
} instruction;

/* Decode the instruction at rip. Returns 0 unless it has a three-byte VEX prefix with map 0f38, 128
 * bits and W0, as all tile instructions have. */
static int decode(const ucontext_t *context, instruction *i) {
    static const int registers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                      REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                      REG_R12, REG_R13, REG_R14, REG_R15};
    const greg_t *values = context->uc_mcontext.gregs;
    const uint8_t *start = (const uint8_t *)values[REG_RIP], *p = start;
    if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || (p[2] & 0x84) != 0) return 0;
    int no_x = p[1] & 0x40, no_b = p[1] & 0x20; /* these bits of the prefix are inverted */
    i->vvvv = ~(p[2] >> 3) & 15;
    i->prefix = p[2] & 3;
    i->opcode = p[3];
    i->mode = p[4] >> 6;
    i->reg = p[4] >> 3 & 7;
    i->rm = p[4] & 7;
    i->address = NULL;
    i->stride = 0;
    p += 5;
    if (i->mode < 3) {
        int base = i->rm, by_rip = i->mode == 0 && i->rm == 5, no_base = 0;
        if (i->rm == 4) {
            int index = (*p >> 3 & 7) | (no_x ? 0 : 8);
            base = *p & 7;
            no_base = i->mode == 0 && base == 5;
            if (index != 4) i->stride = (int64_t)((uint64_t)values[registers[index]] << (*p >> 6));
            p++;
        }
        int32_t offset = 0;
        if (i->mode == 1) offset = (int8_t)*p++;
        else if (i->mode == 2 || by_rip || no_base) memcpy(&offset, p, 4), p += 4;
        int64_t from = values[registers[base | (no_b ? 0 : 8)]];
        if (by_rip) from = (int64_t)(intptr_t)p;
        else if (no_base) from = 0;
        i->address = (char *)(intptr_t)(from + offset);
    }
    i->length = (int)(p - start);
    return 1;
}

static void configure(const char *shapes) {
    uint8_t bytes[64];
    memcpy(bytes, shapes, sizeof bytes);
    if (bytes[0] != 1) fail("ldtilecfg: the palette is not 1");
    memset(tiles, 0, sizeof tiles);
    for (int t = 0; t < TILES; t++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
        if (bytes[48 + t] > ROWS || row_bytes > ROW_BYTES || row_bytes % 4)
            fail("ldtilecfg: a tile has an impossible shape");
        tiles[t].rows = bytes[48 + t], tiles[t].row_bytes = row_bytes;
    }
    configured = 1;
}

/* C (m, n) += A (m, k) x B (k, n), where an element has 32 bits: four int8 or two bf16. */
static void check_shapes(const tile *c, const tile *a, const tile *b) {
    if (c->rows != a->rows || c->row_bytes != b->row_bytes || a->row_bytes != 4 * b->rows)
        fail("a product of tiles whose shapes do not match");
}

static int32_t int8_at(const char *quad, int i, int is_signed) {
    return is_signed ? ((const int8_t *)quad)[i] : ((const uint8_t *)quad)[i];
}

static void multiply_int8(tile *c, const tile *a, const tile *b, int a_signed, int b_signed) {
    check_shapes(c, a, b);
    for (int m = 0; m < c->rows; m++)
        for (int k = 0; k < b->rows; k++)
            for (int n = 0; n < c->row_bytes; n += 4) {
                uint32_t sum; /* 32 bits, wraps */
                memcpy(&sum, c->bytes[m] + n, 4);
                for (int i = 0; i < 4; i++)
                    sum += (uint32_t)(int8_at(a->bytes[m] + 4 * k, i, a_signed) *
                                      int8_at(b->bytes[k] + n, i, b_signed));
                memcpy(c->bytes[m] + n, &sum, 4);
            }
}

/* Sums even and odd elements separately. Each multiply-add rounds once, to nearest, whatever
 * rounding mode the program has set; subnormal numbers count as zero. */
__attribute__((target("avx512f,avx512bw"))) static void multiply_bf16(tile *c, const tile *a,
                                                                      const tile *b) {
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80 | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    check_shapes(c, a, b);
    __mmask64 columns = c->row_bytes == 64 ? ~0ull : (1ull << c->row_bytes) - 1;
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000);
    for (int m = 0; m < c->rows; m++) {
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int k = 0; k < b->rows; k++) {
            int32_t pair;
            memcpy(&pair, a->bytes[m] + 4 * k, 4);
            __m512i x = _mm512_set1_epi32(pair), y = _mm512_maskz_loadu_epi8(columns, b->bytes[k]);
            sums[0] = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16),
                                      (__m512)_mm512_slli_epi32(y, 16), sums[0]);
            sums[1] = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, odd),
                                      (__m512)_mm512_and_si512(y, odd), sums[1]);
        }
        __m512 sum = (__m512)_mm512_maskz_loadu_epi8(columns, c->bytes[m]);
        sum = _mm512_add_ps(sum, _mm512_add_ps(sums[0], sums[1]));
        _mm512_mask_storeu_epi8(c->bytes[m], columns, (__m512i)sum);
    }
    _mm_setcsr(before);
}

static int carry_out(const instruction *i) {
    enum { CONFIGURE = 0x49, MOVE = 0x4b, BF16 = 0x5c, INT8 = 0x5e };
    tile *t = &tiles[i->reg];
    if (i->opcode == CONFIGURE && i->prefix == 0 && i->mode < 3) {
        configure(i->address);
        return 1;
    }
    if (i->opcode == CONFIGURE && i->prefix == 0) { /* tilerelease */
        memset(tiles, 0, sizeof tiles);
        configured = 0;
        return 1;
    }
    if (!configured && (i->opcode == MOVE || i->opcode == BF16 || i->opcode == INT8 ||
                        (i->opcode == CONFIGURE && i->prefix == 3)))
        fail("a tile is used before ldtilecfg or after tilerelease");
    if (i->opcode == CONFIGURE && i->prefix == 3 && i->mode == 3) { /* tilezero */
        memset(t->bytes, 0, sizeof t->bytes);
    } else if (i->opcode == MOVE && i->mode < 3 && i->rm == 4 && i->prefix % 2) {
        /* tileloadd, tileloaddt1 */
        memset(t->bytes, 0, sizeof t->bytes);
        for (int r = 0; r < t->rows; r++)
            memcpy(t->bytes[r], i->address + r * i->stride, (size_t)t->row_bytes);
    } else if (i->opcode == MOVE && i->mode < 3 && i->rm == 4 && i->prefix == 2) { /* tilestored */
        for (int r = 0; r < t->rows; r++)
            memcpy(i->address + r * i->stride, t->bytes[r], (size_t)t->row_bytes);
    } else if (i->opcode == INT8 && i->mode == 3 && i->vvvv < TILES) {
        /* tdpbuud, tdpbusd, tdpbsud, tdpbssd */
        multiply_int8(t, &tiles[i->rm], &tiles[i->vvvv], i->prefix >= 2, i->prefix % 2);
    } else if (i->opcode == BF16 && i->mode == 3 && i->prefix == 2 && i->vvvv < TILES) {
        /* tdpbf16ps */
        multiply_bf16(t, &tiles[i->rm], &tiles[i->vvvv]);
    } else return 0;
    return 1;
}

static void on_illegal_instruction(int number, siginfo_t *info, void *context_) {
    ucontext_t *context = (ucontext_t *)context_;
    instruction i;
    (void)info;
    if (decode(context, &i) && carry_out(&i)) context->uc_mcontext.gregs[REG_RIP] += i.length;
    else /* not a tile instruction: it raises SIGILL again, which ends the program */
        sigaction(number, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
}

__attribute__((constructor)) static void install(void) {
    unsigned a, b, c, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1u << 24)) {
        puts("SKIPPED: emulated matrix tiles (this processor has tiles, which test_kernels uses)");
        puts("0 passed, 0 failed, 1 skipped");
        exit(0);
    }
    sigaction(SIGILL,
              &(struct sigaction){.sa_sigaction = on_illegal_instruction,
                                  .sa_flags = SA_SIGINFO | SA_NODEFER},
              NULL);
}

/* Replaces libc's function: cmocka installs handlers for its crash reports, and must not replace
 * the one for SIGILL. Visible to cmocka even with gcc's -fwhole-program. */
#pragma GCC diagnostic ignored "-Wattributes" /* clang does not know this attribute */
__attribute__((externally_visible)) void (*signal(int number, void (*handler)(int)))(int) {
    struct sigaction before, now = {.sa_handler = handler, .sa_flags = SA_RESTART};
    if (number == SIGILL) return SIG_DFL;
    return sigaction(number, &now, &before) == 0 ? before.sa_handler : SIG_ERR;
}
