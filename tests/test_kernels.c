/* Chapter 10 of llm.h: every fast kernel, compared with the reference loops. No bit of a result
 * depends on the rest of the batch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "repeats.h"
#include "test_memory.h"
#define LLM_IMPLEMENTATION
#include "../llm.h"
#include "../models/quantize.c"
#include "ops.h"
#include "tree.h"

/* ---- Helpers ------------------------------------------------------------------------ */

static uint64_t random_state = 1;
static uint32_t random_u32(void) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)(random_state * 2685821657736338717ull >> 32);
}
static int random_int(int low, int high) {
    return low + (int)(random_u32() % (uint32_t)(high - low + 1));
}
static float random_float(void) { /* roughly normal */
    float sum = 0.0f;
    for (int i = 0; i < 6; i++) sum += (float)random_u32() / 4294967296.0f - 0.5f;
    return sum * 1.41421356f;
}
static float *random_floats(int64_t n) {
    float *x = malloc((size_t)n * sizeof *x + 1);
    for (int64_t i = 0; i < n; i++) x[i] = random_float();
    return x;
}

/* A backend of exactly this instruction set, or NULL if the machine does not have it. */
static llm_backend *open_backend(llm_isa isa, int threads) {
    llm_error err;
    llm_backend *b = llm_cpu_backend(threads, isa, &err);
    assert_non_null(b);
    if (llm_cpu_isa(b) != isa) {
        llm_backend_free(b);
        return NULL;
    }
    return b;
}
#ifdef LLM_EMULATED_TILES /* the build with emulated tiles tests only the kernels that use them */
#define FIRST_ISA LLM_ISA_AMX
#else
#define FIRST_ISA LLM_ISA_PLAIN
#endif
#define FOR_EACH_ISA(isa)                                                                          \
    for (llm_isa isa = FIRST_ISA; isa <= LLM_ISA_BEST; isa = (llm_isa)(isa + 1))

static void close_backend(llm_backend *b) {
    llm_error err;
    assert_true(b->sync(b->context, &err));
    llm_backend_free(b);
}

static double distance(const float *a, const float *b, int64_t n) { /* |a - b| / |b| */
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(difference / (norm > 0.0 ? norm : 1.0));
}

/* The same for products of random rows of length cols, relative to their expected size, since some
 * products may be near zero. */
static double product_distance(const float *a, const float *b, int64_t n, int64_t cols) {
    double difference = 0.0;
    for (int64_t i = 0; i < n; i++) difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(difference / ((double)n * (double)cols));
}

static void check_close(const char *what, llm_isa isa, const float *a, const float *b, int64_t n,
                        double bound) {
    double d = distance(a, b, n);
    if (!(d <= bound))
        fail_msg("%s, %s: relative distance %g, bound %g", what, llm_isa_name(isa), d, bound);
}

static void check_products(const char *what, llm_isa isa, llm_type type, const float *a,
                           const float *b, int64_t n, int64_t cols, double bound) {
    double d = product_distance(a, b, n, cols);
    if (!(d <= bound))
        fail_msg("%s, %s, %s, %d of %d: distance %g, bound %g", what, llm_isa_name(isa),
                 llm_type_find(type)->name, (int)n, (int)cols, d, bound);
}

static void check_same(const char *what, llm_isa isa, const void *a, const void *b, size_t bytes) {
    if (memcmp(a, b, bytes) != 0) fail_msg("%s, %s: the bits differ", what, llm_isa_name(isa));
}

/* x as the kernels for block formats see it: rounded to int8, with a scale for each `group` of
 * columns. */
static float *rounded_to_int8(const float *x, int n, int cols, int group) {
    float *out = malloc((size_t)n * (size_t)cols * sizeof *out);
    for (int row = 0; row < n; row++, x += cols)
        for (int first = 0; first < cols; first += group) {
            int end = first + group < cols ? first + group : cols;
            float range = 0.0f;
            for (int i = first; i < end; i++) range = fabsf(x[i]) > range ? fabsf(x[i]) : range;
            float inverse = range > 0.0f ? 127.0f / range : 0.0f, scale = range / 127.0f;
            for (int i = first; i < end; i++)
                out[(int64_t)row * cols + i] = rintf(x[i] * inverse) * scale;
        }
    return out;
}

/* The weights as the kernels see them, in f32: for q4_0 and q4_Z, the scales of 256 columns are
 * rounded to multiples of 1/2048 of the largest scale. */
static float *weights_seen(llm_type type, const void *data, int rows, int cols) {
    const llm_type_info *info = llm_type_find(type);
    int64_t count = (int64_t)rows * cols;
    float *out = malloc((size_t)count * sizeof *out);
    info->unpack(data, out, count);
    if (type != LLM_Q4_0 && type != LLM_Q4_Z) return out;
    for (int row = 0; row < rows; row++)
        for (int first = 0; first < cols; first += 256) {
            float largest = 0.0f;
            for (int pass = 0; pass < 2; pass++)
                for (int b = first; b < first + 256 && b < cols; b += 32) {
                    int64_t at = (int64_t)row * cols + b;
                    float scale = llm__f16_to_f32(
                        llm__read_u16((const uint8_t *)data + at / 32 * info->block_bytes));
                    if (pass == 0) largest = fabsf(scale) > fabsf(largest) ? scale : largest;
                    else
                        for (int i = 0; i < 32 && scale != 0.0f; i++)
                            out[at + i] = rintf(out[at + i] / scale) *
                                          fmaxf(rintf(scale / largest * 2048.0f), -2047.0f) *
                                          largest / 2048.0f;
                }
        }
    return out;
}

/* ---- Matrix products ---------------------------------------------------------------- */

static void *packed_weights(llm_type type, const float *values, int64_t count) {
    const llm_type_info *info = llm_type_find(type);
    size_t bytes = (size_t)(count / info->block_values) * (size_t)info->block_bytes;
    void *packed = malloc(bytes); /* the exact size, so that a sanitizer sees a read past the end */
    llm_pack(info->type, values, packed, count);
    return packed;
}

static void *random_weights(llm_type type, int64_t count) {
    float *values = random_floats(count);
    void *packed = packed_weights(type, values, count);
    free(values);
    return packed;
}

static void check_matmul(llm_type type, int rows, int cols, int n) {
    bool blocks = llm__layout_of(type).quads > 0; /* block formats: the kernels round x */
    llm_error err;
    float *values = random_floats((int64_t)rows * cols), *x = random_floats((int64_t)n * cols);
    float *bias = random_floats(rows), *start = random_floats((int64_t)n * rows);
    if (n > 1) memset(x + cols, 0, (size_t)cols * sizeof *x); /* a row of zeros */
    void *data = packed_weights(type, values, (int64_t)rows * cols);
    llm_weight w = {type, rows, cols, NULL, NULL, NULL, false};
    size_t bytes = (size_t)n * (size_t)rows * sizeof(float);
    float *expected = malloc(bytes), *exact = malloc(bytes);
    float *out = malloc(bytes), *other = malloc(bytes);
    float *x_seen = blocks
                        ? rounded_to_int8(x, n, cols, llm__layout_of(type).multipliers ? 256 : 32)
                        : x;
    float *w_seen = weights_seen(type, data, rows, cols);
    llm_weight seen = {LLM_F32, rows, cols, w_seen, NULL, NULL, false};

    llm_backend *reference = open_backend(LLM_ISA_REFERENCE, 1);
    assert_true(reference->load_weight(reference->context, &w, data, &err));
    memcpy(expected, start, bytes);
    memcpy(exact, start, bytes);
    op_matmul(reference, x_seen, &seen, bias, n, true, expected);
    op_matmul(reference, x, &w, bias, n, true, exact);
    close_backend(reference);

    FOR_EACH_ISA(isa) {
        for (int threads = 1; threads <= 3; threads++) {
            llm_backend *b = open_backend(isa, threads);
            if (!b) continue;
            if (threads == 1) {
                memcpy(out, start, bytes);
                op_matmul(b, x, &w, bias, n, true, out);
                check_products("matmul", isa, type, out, expected, (int64_t)n * rows, cols, 2e-6);
                check_products("matmul against unrounded x", isa, type, out, exact,
                               (int64_t)n * rows, cols, 1.5e-2);
                /* rows one by one and in groups; matrix tiles have separate code for up to 16, 31,
                 * 63 and more rows */
                static const int steps[] = {1, 3, 5, 7, 13, 16, 29};
                for (int k = 0; k < 7; k++) {
                    int step = steps[k];
                    memcpy(other, start, bytes);
                    for (int i = 0; i < n; i += step)
                        op_matmul(b, x + (int64_t)i * cols, &w, bias, (int)llm__min(step, n - i),
                                  true, other + (int64_t)i * rows);
                    check_same("matmul in pieces", isa, other, out, bytes);
                }
                /* only some of the matrix rows */
                if (rows > 5) {
                    llm_weight part = w;
                    part.data = (const char *)data + 3 * llm__row_bytes(type, cols);
                    part.rows = rows - 4;
                    memset(other, 0, bytes);
                    op_matmul(b, x, &part, NULL, n, false, other);
                    op_matmul(b, x, &w, NULL, n, false, out);
                    for (int i = 0; i < n; i++)
                        check_same("matmul of some weight rows", isa,
                                   other + (int64_t)i * (rows - 4), out + (int64_t)i * rows + 3,
                                   (size_t)(rows - 4) * sizeof(float));
                    memcpy(out, start, bytes);
                    op_matmul(b, x, &w, bias, n, true, out);
                }
                /* weights in the kernels' own layout */
                llm_weight packed = {type, rows, cols, NULL, NULL, NULL, false};
                assert_true(b->load_weight(b->context, &packed, data, &err));
                memcpy(other, start, bytes);
                op_matmul(b, x, &packed, bias, n, true, other);
                check_same("matmul with packed weights", isa, other, out, bytes);
                b->free_weight(b->context, &packed);
            } else {
                memcpy(other, start, bytes);
                op_matmul(b, x, &w, bias, n, true, other);
                check_same("matmul with threads", isa, other, out, bytes);
            }
            close_backend(b);
        }
    }
    if (x_seen != x) free(x_seen);
    free(w_seen);
    free(values), free(x), free(bias), free(start), free(data), free(expected), free(exact),
        free(out), free(other);
}

static void test_matmul(void **state) {
    (void)state;
    const llm_type_info *type;
    for (int i = -1; (type = i < 0 ? llm_type_find(LLM_Q4_Z) : llm_type_at(i)) != NULL; i++) {
        int block = type->block_values, blocks_at_most = block > 100 ? 4 : 300 / block;
        check_matmul(type->type, 1, block, 1);
        check_matmul(type->type, 5, block * 2, 5);
        check_matmul(type->type, repeats(300, 70), block > 32 ? 1280 : 1376, repeats(128, 20));
        /* 77 rows of x: matrix tiles process a tile in two halves, and the last tile has only its
         * first half. 5 panels of weights. */
        check_matmul(type->type, repeats(70, 20), block > 32 ? 768 : 608, 77);
        if (block <= 32) {
            check_matmul(type->type, 65, 160, 65);
            check_matmul(type->type, 7, 96, 3);
            check_matmul(type->type, 130, 128, 4);
            /* more than one tile; 45 blocks, so that the last group has one */
            check_matmul(type->type, repeats(321, 129), 1440, 13);
        }
        if (!do_less()) check_matmul(type->type, 20, 4096, 250); /* x is processed in parts */
        if (block == 1) check_matmul(type->type, 33, 1, 2);
        if (block == 1) check_matmul(type->type, 37, 1003, 9);
        for (int k = 0; k < repeats(12, 4); k++)
            check_matmul(type->type, random_int(1, 70), block * random_int(1, blocks_at_most),
                         random_int(1, 24));
    }
}

static void test_gather_columns(void **state) {
    (void)state;
    enum { N = 5, COLS = 40 };
    float *x = random_floats(N * COLS), out[N * COLS];
    int32_t columns[COLS];
    for (int j = 0; j < COLS; j++) columns[j] = (j * 7 + 3) % COLS;
    FOR_EACH_ISA(isa) {
        llm_backend *b = open_backend(isa, 2);
        if (!b) continue;
        op_gather_columns(b, x, columns, N, COLS, out);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < COLS; j++)
                assert_true(out[i * COLS + j] == x[i * COLS + columns[j]]);
        close_backend(b);
    }
    free(x);
}

/* The int8 dot products do not saturate or wrap, even with extreme integers. */
static void test_matmul_extremes(void **state) {
    (void)state;
    enum { COLS = 128, ROWS = 8 };
    static const uint8_t corners[4] = {0x80, 0x7f, 0xff, 0};
    uint8_t data[ROWS * COLS / 32 * 34];
    float x[COLS], expected[ROWS], out[ROWS];
    for (int kind = 0; kind < 2; kind++) {
        llm_weight w = {kind ? LLM_Q8_0 : LLM_Q4_0, ROWS, COLS, data, NULL, NULL, false};
        size_t block_bytes = kind ? 34 : 18;
        for (size_t block = 0; block < ROWS * COLS / 32; block++) {
            uint8_t *p = data + block * block_bytes;
            llm__write_u16(p, llm__f32_to_f16(1.0f));
            size_t row = block / (COLS / 32);
            for (size_t i = 2; i < block_bytes; i++)
                p[i] = row < 4 ? corners[row] : (uint8_t)random_u32();
        }
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int i = 0; i < COLS; i++) x[i] = (float)(sign * 127);
            llm_backend *reference = open_backend(LLM_ISA_REFERENCE, 1);
            op_matmul(reference, x, &w, NULL, 1, false, expected);
            close_backend(reference);
            FOR_EACH_ISA(isa) {
                llm_backend *b = open_backend(isa, 1);
                if (!b) continue;
                op_matmul(b, x, &w, NULL, 1, false, out);
                /* integers, so the results are exact */
                for (int r = 0; r < ROWS; r++) assert_true(out[r] == expected[r]);
                close_backend(b);
            }
        }
    }
}

/* The same for all block formats: blocks of the largest and smallest integers, with scales and
 * minimums of 1. */
static void test_matmul_extremes_of_all_formats(void **state) {
    (void)state;
    enum { COLS = 512, ROWS = 20, N = 80 };
    static const uint8_t corners[4] = {0xff, 0, 0x7f, 0x80};
    const llm_type_info *type;
    static float x[N * COLS], expected[N * ROWS], out[N * ROWS];
    static uint8_t data[ROWS * COLS * 2];
    for (int k = -1; (type = k < 0 ? llm_type_find(LLM_Q4_Z) : llm_type_at(k)) != NULL; k++) {
        if (!llm__layout_of(type->type).quads) continue;
        llm_weight w = {type->type, ROWS, COLS, data, NULL, NULL, false};
        int blocks = COLS / type->block_values, last = type->type == LLM_Q6_K ? 208 : 0;
        for (int row = 0; row < ROWS; row++)
            for (int b = 0; b < blocks; b++) {
                uint8_t *p = data + (row * blocks + b) * type->block_bytes;
                for (int i = 0; i < type->block_bytes; i++)
                    p[i] = row < 4 ? corners[row] : (uint8_t)random_u32();
                llm__write_u16(p + last, llm__f32_to_f16(1.0f));
                /* zero points from 0 to 16, and scales of both signs */
                if (type->type == LLM_Q4_Z) {
                    llm__write_u16(p, llm__f32_to_f16((row + b) % 5 == 4 ? -1.0f : 1.0f));
                    int zero = row % 3 == 0 ? 0 : row % 3 == 1 ? 16 : b % 17;
                    llm__write_u16(p + 2, (uint16_t)zero);
                } else if (llm__layout_of(type->type).minimum)
                    llm__write_u16(p + 2, llm__f32_to_f16(1.0f));
            }
        for (int i = 0; i < N * COLS; i++)
            x[i] = (float)((i / COLS % 2 ? -1 : 1) * (i / COLS < 3 ? 127 : random_int(-127, 127)));
        /* a value of 127 in each block of x, so that rounding to int8 changes nothing */
        for (int i = 0; i < N * COLS; i += 32) x[i] = x[i] < 0.0f ? -127.0f : 127.0f;
        llm_backend *reference = open_backend(LLM_ISA_REFERENCE, 1);
        float *seen = weights_seen(type->type, data, ROWS, COLS);
        llm_weight same = {LLM_F32, ROWS, COLS, seen, NULL, NULL, false};
        op_matmul(reference, x, &same, NULL, N, false, expected);
        free(seen);
        close_backend(reference);
        FOR_EACH_ISA(isa) {
            llm_backend *b = open_backend(isa, 1);
            if (!b) continue;
            op_matmul(b, x, &w, NULL, N, false, out);
            check_close(type->name, isa, out, expected, N * ROWS, 1e-6);
            x[0] = INFINITY; /* affects its own row of x and no other */
            op_matmul(b, x, &w, NULL, N, false, out);
            for (int i = 0; i < N * ROWS; i++)
                assert_true(i < ROWS ? !isfinite(out[i]) : isfinite(out[i]));
            x[0] = x[1] < 0.0f ? -127.0f : 127.0f;
            close_backend(b);
        }
    }
}

/* ---- Rows --------------------------------------------------------------------------- */

static void test_rmsnorm(void **state) {
    (void)state;
    static const int dims[] = {1, 3, 16, 64, 100, 257, 1024};
    for (int k = 0; k < 7; k++) {
        int dim = dims[k], n = 85;
        int64_t total = (int64_t)n * dim;
        size_t bytes = (size_t)total * sizeof(float);
        float *x = random_floats(total), *weight = random_floats(dim);
        float *expected = malloc(bytes), *out = malloc(bytes), *other = malloc(bytes);
        llm__plain_rmsnorm(x, weight, n, dim, 1e-5f, false, expected);
        FOR_EACH_ISA(isa)
            for (int threads = 1; threads <= 3; threads++) {
                llm_backend *b = open_backend(isa, threads);
                if (!b) continue;
                op_rmsnorm(b, x, weight, n, dim, 1e-5f, threads == 1 ? out : other);
                if (threads == 1) {
                    check_close("rmsnorm", isa, out, expected, total, 1e-6);
                    for (int i = 0; i < n; i++)
                        op_rmsnorm(b, x + i * dim, weight, 1, dim, 1e-5f, other + i * dim);
                    check_same("rmsnorm row by row", isa, other, out, bytes);
                    memcpy(other, x, bytes);
                    op_rmsnorm(b, other, weight, n, dim, 1e-5f, other);
                }
                check_same("rmsnorm", isa, other, out, bytes);
                close_backend(b);
            }
        free(x), free(weight), free(expected), free(out), free(other);
    }
}

static void test_swiglu(void **state) {
    (void)state;
    enum { N = 70001 };
    size_t bytes = N * sizeof(float);
    float *gate = random_floats(N), *up = random_floats(N);
    float *expected = malloc(bytes), *out = malloc(bytes), *other = malloc(bytes);
    for (int i = 0; i < N; i++) gate[i] *= 8.0f;
    static const float corners[] = {0.0f,   -0.0f,   1e-30f,   86.9f, -86.9f, 87.1f,
                                    -87.1f, 1000.0f, -1000.0f, 3e38f, -3e38f};
    for (int i = 0; i < 11; i++) gate[i * 7] = corners[i], up[i * 7] = 1.0f;
    llm__plain_swiglu(LLM_SILU, gate, up, N, expected);
    FOR_EACH_ISA(isa)
        for (int threads = 1; threads <= 3; threads++) {
            llm_backend *b = open_backend(isa, threads);
            if (!b) continue;
            op_swiglu(b, gate, up, N, out);
            for (int i = 0; i < N; i++)
                if (!(fabsf(out[i] - expected[i]) <= 1e-6f * fabsf(expected[i]) + 1e-30f) &&
                    fabsf(gate[i]) < 1e30f)
                    fail_msg("swiglu, %s: %g for gate %g, expected %g", llm_isa_name(isa), out[i],
                             gate[i], expected[i]);
            for (int i = 0, n; i < N; i += n) { /* in pieces, and in place */
                n = (int)llm__min(random_int(1, 5000), N - i);
                memcpy(other + i, gate + i, (size_t)n * sizeof *gate);
                op_swiglu(b, other + i, up + i, n, other + i);
            }
            check_same("swiglu in pieces", isa, other, out, bytes);
            close_backend(b);
        }
    free(gate), free(up), free(expected), free(out), free(other);
}

/* Argmax and the sum of exponentials of a row of logits, compared with plain loops: rows of every
 * length up to a few registers, with ties (the first of the largest wins), infinities and NaNs. */
static void test_argmax_and_sum_exp(void **state) {
    (void)state;
    FOR_EACH_ISA(isa) {
        llm_backend *b = open_backend(isa, 1);
        if (!b) continue;
        const llm__kernels *kernels = ((llm__cpu *)b->context)->kernels;
        for (int n = 1; n <= 2100; n += n < 70 ? 1 : 677)
            for (int kind = 0; kind < 5; kind++) {
                float *x = random_floats(n), largest = -INFINITY;
                int best = 0;
                for (int i = 0; i < n; i++) {
                    if (kind == 1) x[i] = (float)random_int(0, 3); /* ties */
                    if (kind == 2) x[i] = random_int(0, 2) ? x[i] : -INFINITY;
                    /* a NaN is never the largest, but the sum shows it */
                    if (kind == 3) x[i] = random_int(0, 2) ? x[i] * 30 : NAN;
                    if (kind == 4) x[i] = -INFINITY;
                    if (x[i] > largest) largest = x[i], best = i;
                }
                assert_int_equal(kernels->argmax(x, n), best);
                double sum = 0.0;
                for (int i = 0; i < n; i++) sum += exp((double)x[i] - largest);
                double got = kernels->sum_exp(x, n, largest);
                if (largest > -INFINITY && isnan(sum)) assert_true(isnan(got));
                else if (largest > -INFINITY) assert_true(fabs(got - sum) <= 1e-6 * sum);
                free(x);
            }
        close_backend(b);
    }
}

/* Norms that are added, LayerNorm, GELU, and the limit of logits */
static void test_traits(void **state) {
    (void)state;
    enum { MOST = 70000 };
    size_t bytes = MOST * sizeof(float);
    float *x = random_floats(MOST), *y = random_floats(MOST), *before = random_floats(MOST);
    float *expected = malloc(bytes), *out = malloc(bytes), *other = malloc(bytes);
    static const float corners[] = {0.0f, -0.0f, 1e-30f, 86.9f, -86.9f, 1000.0f, -1000.0f};
    for (int i = 0; i < MOST; i++) x[i] *= 8.0f;
    for (int i = 0; i < 7; i++) x[i * 7] = corners[i], y[i * 7] = 1.0f;
    for (int round = 0; round < 5 * 6; round++) {
        op_trait trait = (op_trait)(round % 5);
        int dim = round < 5 ? 1 : random_int(trait == OP_LAYERNORM ? 9 : 1, 1000),
            n = random_int(1, MOST / dim);
        if (trait == OP_GEGLU && n > 5) n = 5; /* y has the shape of x */
        int64_t total = (int64_t)n * dim;
        memcpy(expected, before, bytes);
        if (trait == OP_NORM_ADDED) llm__plain_rmsnorm(x, y, n, dim, 1e-5f, true, expected);
        else if (trait == OP_GEGLU) llm__plain_swiglu(LLM_GELU, x, y, total, expected);
        else if (trait == OP_GELU) llm__plain_swiglu(LLM_GELU_ERF, x, NULL, total, expected);
        else if (trait == OP_LAYERNORM) llm__plain_layernorm(x, y, y, n, dim, 1e-5f, expected);
        else llm__plain_softcap(x, 3, total, expected);
        FOR_EACH_ISA(isa)
            for (int threads = 1; threads <= 3; threads++) {
                llm_backend *b = open_backend(isa, threads);
                if (!b) continue;
                float *to = threads == 1 ? out : other;
                memcpy(to, before, bytes);
                op_with_trait(b, trait, x, y, n, dim, to);
                for (int64_t i = 0; i < total; i++)
                    if (!(fabsf(to[i] - expected[i]) <= 2e-6f * fmaxf(1, fabsf(expected[i]))))
                        fail_msg("trait %d, %s: %g for %g, expected %g", (int)trait,
                                 llm_isa_name(isa), to[i], x[i], expected[i]);
                if (threads > 1)
                    check_same("a trait", isa, other, out, (size_t)total * sizeof *out);
                close_backend(b);
            }
    }
    free(x), free(y), free(before), free(expected), free(out), free(other);
}

/* ---- The cache and attention ---------------------------------------------------------- */

typedef struct sequences { /* whole sequences, of which a batch contains parts */
    int n_sequences, length[6];
    llm_attention_shape shape;
    llm_type cache_type;
    float *q[6], *k[6], *v[6]; /* (length, heads, head_dim) */
} sequences;

static sequences make_sequences(int n_sequences, int max_length, int n_kv_heads, int group,
                                int head_dim, llm_type cache_type) {
    sequences w = {.n_sequences = n_sequences, .cache_type = cache_type};
    w.shape = (llm_attention_shape){
        n_kv_heads * group, n_kv_heads, head_dim, 1.0f / sqrtf((float)head_dim), false, 0, 0, 0};
    for (int s = 0; s < n_sequences; s++) {
        w.length[s] = s == 0 ? max_length : random_int(1, max_length);
        w.q[s] = random_floats((int64_t)w.length[s] * w.shape.n_heads * head_dim);
        w.k[s] = random_floats((int64_t)w.length[s] * n_kv_heads * head_dim);
        w.v[s] = random_floats((int64_t)w.length[s] * n_kv_heads * head_dim);
        for (int64_t i = 0; i < (int64_t)w.length[s] * w.shape.n_heads * head_dim; i++)
            w.q[s][i] *= 3.0f;
    }
    return w;
}

static void free_sequences(sequences *w) {
    for (int s = 0; s < w->n_sequences; s++) free(w->q[s]), free(w->k[s]), free(w->v[s]);
}

/* Run attention for the positions first[s] to first[s] + count[s] - 1 of some sequences. The cache
 * blocks are in random places, and every slot not yet written holds NaN. Results go to out[s]
 * (length, n_heads, head_dim). */
static void run_attention(llm_backend *b, const sequences *w, const int *first, const int *count,
                          int block_size, bool naive, float **out) {
    int head_dim = w->shape.head_dim, n_kv = w->shape.n_kv_heads, n_heads = w->shape.n_heads,
        stride = 0, n_blocks = 2;
    for (int s = 0; s < w->n_sequences; s++) {
        int blocks = (int)llm__divide_up(w->length[s], block_size);
        stride = blocks > stride ? blocks : stride;
        n_blocks += blocks;
    }
    llm_cache cache = {
        w->cache_type, 2, n_kv, head_dim, block_size, n_blocks, 0, NULL, NULL, false};
    size_t value_bytes = w->cache_type == LLM_F16 ? 2 : 4;
    cache.keys_transposed = random_int(0, 3) > 0; /* the layout of keys does not change results */
    int64_t layer_values = (int64_t)n_blocks * n_kv * block_size * head_dim;
    cache.layer_bytes = (size_t)layer_values * value_bytes;
    cache.keys = malloc(2 * cache.layer_bytes);
    cache.values = malloc(2 * cache.layer_bytes);
    memset(cache.keys, 0xff, 2 * cache.layer_bytes); /* NaN in f16 and in f32 */
    memset(cache.values, 0xff, 2 * cache.layer_bytes);

    int *free_blocks = malloc((size_t)n_blocks * sizeof(int)), n_free = n_blocks;
    for (int i = 0; i < n_blocks; i++) free_blocks[i] = i;
    int32_t *tables = calloc((size_t)(w->n_sequences * stride), sizeof *tables);
    int32_t positions[256], seq_first[6], seq_count[6], table_of[6];
    float *q = malloc(256 * (size_t)n_heads * (size_t)head_dim * sizeof *q);
    float *result = malloc(256 * (size_t)n_heads * (size_t)head_dim * sizeof *q);
    llm_batch batch = {.positions = positions, .seq_first = seq_first, .seq_count = seq_count,
                       .block_size = block_size};
    batch.table_stride = stride;
    int32_t *batch_tables = calloc((size_t)(w->n_sequences * stride), sizeof *tables);
    for (int s = 0; s < w->n_sequences; s++) {
        if (count[s] == 0) continue;
        int32_t *table = batch_tables + batch.n_sequences * stride;
        int end = first[s] + count[s];
        for (int i = 0; i < (int)llm__divide_up(end, block_size); i++) {
            int pick = random_int(0, n_free - 1);
            table[i] = free_blocks[pick];
            free_blocks[pick] = free_blocks[--n_free];
        }
        for (int p = 0; p < end; p++)
            for (int h = 0; h < n_kv; h++) {
                int slot = table[p / block_size] * block_size + p % block_size;
                llm__plain_store(&cache, cache.keys, 1, slot, h,
                                 w->k[s] + ((int64_t)p * n_kv + h) * head_dim);
                llm__plain_store(&cache, cache.values, 1, slot, h,
                                 w->v[s] + ((int64_t)p * n_kv + h) * head_dim);
            }
        table_of[batch.n_sequences] = s;
        seq_first[batch.n_sequences] = batch.n_tokens;
        seq_count[batch.n_sequences++] = count[s];
        memcpy(q + (int64_t)batch.n_tokens * n_heads * head_dim,
               w->q[s] + (int64_t)first[s] * n_heads * head_dim,
               (size_t)(count[s] * n_heads * head_dim) * sizeof *q);
        for (int p = first[s]; p < end; p++) positions[batch.n_tokens++] = p;
    }
    batch.block_tables = batch_tables;
    llm_attention_shape shape = w->shape;
    shape.naive = naive;
    op_attention(b, &batch, &shape, q, &cache, 1, result);
    for (int i = 0; i < batch.n_sequences; i++) {
        int s = table_of[i];
        memcpy(out[s] + (int64_t)first[s] * n_heads * head_dim,
               result + (int64_t)seq_first[i] * n_heads * head_dim,
               (size_t)(count[s] * n_heads * head_dim) * sizeof *q);
    }
    free(cache.keys), free(cache.values), free(free_blocks), free(tables), free(batch_tables),
        free(q), free(result);
}

/* Run all positions of all sequences, in chunks of random sizes with the sequences mixed at
 * random. */
static void run_all(llm_backend *b, const sequences *w, int block_size, int max_chunk, bool mixed,
                    bool naive, float **out) {
    int done[6] = {0}, first[6], count[6];
    for (bool more = true; more;) {
        more = false;
        int room = 128, only = -1;
        for (int s = 0; s < w->n_sequences; s++) {
            first[s] = done[s];
            count[s] =
                (int)llm__min(llm__min(random_int(1, max_chunk), room), w->length[s] - done[s]);
            if (mixed ? random_int(0, 3) == 0 : (only >= 0)) count[s] = 0;
            if (count[s]) only = s;
            room -= count[s];
            done[s] += count[s];
            more |= done[s] < w->length[s];
        }
        run_attention(b, w, first, count, block_size, naive, out);
    }
}

static void check_attention(int n_sequences, int max_length, int n_kv_heads, int group,
                            int head_dim, llm_type type, int window, float cap, float alibi) {
    /* with fewer repeats: two tiles and a part of one */
    n_sequences = (int)llm__min(n_sequences, repeats(6, 2));
    max_length = (int)llm__min(max_length, repeats(400, 130));
    sequences w = make_sequences(n_sequences, max_length, n_kv_heads, group, head_dim, type);
    w.shape.window = window;
    w.shape.cap = cap;
    w.shape.alibi = alibi;
    float *expected[6], *out[6], *other[6];
    size_t bytes[6];
    for (int s = 0; s < n_sequences; s++) {
        bytes[s] = (size_t)(w.length[s] * n_kv_heads * group * head_dim) * sizeof(float);
        expected[s] = malloc(bytes[s]), out[s] = malloc(bytes[s]), other[s] = malloc(bytes[s]);
    }
    llm_backend *reference = open_backend(LLM_ISA_REFERENCE, 1);
    run_all(reference, &w, 16, 40, false, false, expected);
    close_backend(reference);
    static const int block_sizes[] = {16, 1, 7, 64, 100};
    FOR_EACH_ISA(isa)
        for (int k = 0; k < 6; k++) {
            llm_backend *b = open_backend(isa, k % 3 + 1);
            if (!b) continue;
            if (k == 0) run_all(b, &w, 16, 1, false, false, out); /* one token at a time */
            else if (k < 5) run_all(b, &w, block_sizes[k], k == 2 ? 3 : 100, true, false, other);
            else run_all(b, &w, 16, 40, true, true, other);
            /* matrix tiles omit the products of two low parts: at most 2^-16 of each product */
            double bound = isa >= LLM_ISA_AMX && type == LLM_F16 &&
                                   group >= LLM__SHARING_HEADS && cap == 0 && alibi == 0
                               ? 1.5e-5
                               : 2e-6;
            for (int s = 0; s < n_sequences; s++)
                if (k == 0)
                    check_close("attention", isa, out[s], expected[s], (int64_t)(bytes[s] / 4),
                                bound);
                else if (k < 5) check_same("attention, mixed", isa, other[s], out[s], bytes[s]);
                else
                    check_close("naive attention", isa, other[s], expected[s],
                                (int64_t)(bytes[s] / 4), 1e-6);
            close_backend(b);
        }
    for (int s = 0; s < n_sequences; s++) free(expected[s]), free(out[s]), free(other[s]);
    free_sequences(&w);
}

static void test_attention(void **state) {
    (void)state;
    check_attention(1, 1, 1, 1, 1, LLM_F32, 0, 0, 0);
    check_attention(2, 200, 2, 4, 64, LLM_F16, 0, 0, 0);
    check_attention(3, 330, 1, 1, 128, LLM_F16, 0, 0, 0);
    check_attention(3, 150, 1, 16, 80, LLM_F32, 0, 0, 0);
    check_attention(4, 130, 2, 3, 19, LLM_F16, 0, 0, 0);
    check_attention(6, 70, 3, 2, 5, LLM_F32, 0, 0, 0);
    check_attention(2, 140, 1, 7, 160, LLM_F16, 0, 0, 0);
    check_attention(4, 130, 1, 9, 80, LLM_F16, 0, 0, 0);
    check_attention(3, 100, 2, 5, 19, LLM_F16, 0, 0, 0);
}

static void test_attention_window(void **state) {
    (void)state;
    check_attention(2, 200, 2, 4, 64, LLM_F16, 1, 0, 0);
    check_attention(2, 200, 2, 4, 64, LLM_F16, 64, 0, 0);
    check_attention(3, 330, 1, 1, 128, LLM_F16, 65, 0, 0);
    check_attention(3, 150, 1, 16, 80, LLM_F32, 3, 0, 0);
    check_attention(4, 230, 2, 3, 19, LLM_F16, 100, 0, 0);
    check_attention(6, 70, 3, 2, 5, LLM_F32, 17, 0, 0);
    check_attention(2, 140, 1, 7, 160, LLM_F16, 1000, 0, 0);
    check_attention(3, 250, 1, 20, 33, LLM_F16, 70, 0, 0);
}

static void test_attention_cap(void **state) {
    (void)state;
    check_attention(2, 200, 2, 4, 64, LLM_F16, 0, 2, 0);
    check_attention(3, 150, 1, 16, 80, LLM_F32, 3, 0.5f, 0);
    check_attention(4, 130, 2, 3, 19, LLM_F16, 100, 50, 0);
    check_attention(2, 140, 1, 7, 256, LLM_F16, 0, 1, 0);
}

static void test_attention_alibi(void **state) {
    (void)state;
    check_attention(2, 200, 2, 4, 64, LLM_F16, 0, 0, 8);
    check_attention(3, 150, 1, 16, 80, LLM_F32, 3, 0, 4);
    check_attention(4, 130, 6, 1, 19, LLM_F16, 100, 0, 8); /* not a power of two */
    check_attention(2, 330, 1, 12, 128, LLM_F16, 0, 0, 8);
}

static void test_attention_in_trees(void **state) {
    (void)state;
    FOR_EACH_ISA(isa) {
        llm_backend *b = open_backend(isa, 1 + (int)isa % 3);
        if (b) check_trees(b, repeats(60, 24)), close_backend(b);
    }
}

/* A window: the last token's attention is the same as in a sequence that begins with the window.
 * Earlier positions have no influence, even if they are NaN, as here. */
static void test_attention_window_is_a_shorter_sequence(void **state) {
    (void)state;
    enum { LENGTH = 180, HEADS = 2, DIM = 24 };
    static const int windows[] = {1, 2, 15, 16, 63, 64, 65, 130, 179, 180, 181};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
        for (int isa = LLM_ISA_REFERENCE; isa <= LLM_ISA_BEST; isa++)
            for (int naive = 0; naive < 2; naive++) {
                sequences w = make_sequences(1, LENGTH, 1, HEADS, DIM, LLM_F32);
                float *out = malloc(LENGTH * HEADS * DIM * sizeof *out);
                float *expected = malloc(LENGTH * HEADS * DIM * sizeof *expected);
                int window = windows[i], before = window < LENGTH ? LENGTH - window : 0;
                int n = LENGTH - before;
                int first = LENGTH - 1, one = 1, first_short = n - 1;
                llm_backend *b = open_backend((llm_isa)isa, 1);
                if (b) {
                    for (int k = 0; k < before * DIM; k++) w.k[0][k] = w.v[0][k] = NAN;
                    w.shape.window = window;
                    run_attention(b, &w, &first, &one, 16, naive, &out);
                    /* the same sequence without the positions before the window */
                    sequences cut = w;
                    cut.length[0] = n;
                    cut.shape.window = 0;
                    cut.q[0] += before * HEADS * DIM;
                    cut.k[0] += before * DIM, cut.v[0] += before * DIM;
                    run_attention(b, &cut, &first_short, &one, 16, naive, &expected);
                    check_close("window", isa, out + first * HEADS * DIM,
                                expected + first_short * HEADS * DIM, HEADS * DIM, 1e-6);
                    close_backend(b);
                }
                free(out), free(expected);
                free_sequences(&w);
            }
}

/* A concentrated softmax, equal scores, and scores so large that exp of them overflows. */
static void test_attention_extremes(void **state) {
    (void)state;
    for (int kind = 0; kind < 6; kind++) {
        bool tiles = kind >= 3; /* shapes that use matrix tiles, if the processor has them */
        int group = tiles ? LLM__SHARING_HEADS : 2, n = 150 * group * 32;
        sequences w = make_sequences(1, 150, 1, group, 32, tiles ? LLM_F16 : LLM_F32);
        float scale = kind % 3 == 0 ? 100.0f : kind % 3 == 1 ? 0.0f : 1e4f;
        for (int i = 0; i < n; i++) w.q[0][i] *= scale;
        float *expected = malloc((size_t)n * 4), *out = malloc((size_t)n * 4);
        llm_backend *reference = open_backend(LLM_ISA_REFERENCE, 1);
        run_all(reference, &w, 16, 40, false, false, &expected);
        close_backend(reference);
        FOR_EACH_ISA(isa) {
            llm_backend *b = open_backend(isa, 1);
            if (!b) continue;
            run_all(b, &w, 16, 40, false, false, &out);
            /* scores of thousands have errors of 1e-3 (1e-2 with matrix tiles), and so do their
             * exponentials */
            bool rough = tiles && isa >= LLM_ISA_AMX;
            double bound =
                kind % 3 == 1 ? 1e-6 : (kind % 3 == 0 ? 2e-4 : 2e-2) * (rough ? 10.0 : 1.0);
            check_close("attention", isa, out, expected, n, bound);
            close_backend(b);
        }
        free(expected), free(out);
        free_sequences(&w);
    }
}

static void check_rope_and_store(llm_rope_pairing pairing, int head_dim, int rope_dim, bool norms,
                                 llm_type cache_type) {
    enum { TOKENS = 37, HEADS = 6, KV = 2, BLOCK = 5, BLOCKS = 9 };
    llm_attention_shape shape = {HEADS, KV, head_dim, 1.0f, false, 0, 0, 0};
    llm_cache cache = {cache_type, 2, KV, head_dim, BLOCK, BLOCKS, 0, NULL, NULL, false};
    size_t cache_values = (size_t)(BLOCKS * BLOCK * KV * head_dim);
    size_t value_bytes = cache_type == LLM_F16 ? 2 : 4;
    cache.layer_bytes = cache_values * value_bytes;
    cache.keys_transposed = random_int(0, 1);
    int32_t positions[TOKENS], slots[TOKENS];
    for (int t = 0; t < TOKENS; t++)
        positions[t] = random_int(0, 4000), slots[t] = (t * 7 + 3) % (BLOCKS * BLOCK);
    llm_batch batch = {
        .n_tokens = TOKENS, .positions = positions, .slots = slots, .block_size = BLOCK};
    size_t q_values = (size_t)(TOKENS * HEADS * head_dim);
    size_t k_values = (size_t)(TOKENS * KV * head_dim);
    float *q = random_floats((int64_t)q_values), *k = random_floats((int64_t)k_values);
    float *v = random_floats((int64_t)k_values);
    /* f16 stores its largest value instead, so that a weight of 0 gives 0 */
    v[0] = 1e6f, v[1] = -INFINITY;
    float *q_norm = random_floats(head_dim), *k_norm = random_floats(head_dim);
    float *frequencies = malloc(400 * sizeof(float));
    for (int i = 0; i < rope_dim / 2; i++)
        frequencies[i] = powf(10000.0f, -2.0f * (float)i / (float)rope_dim);
    float *angles = malloc((size_t)(TOKENS * rope_dim) * sizeof(float) + 4);
    void *keys[4], *values[4];
    float *rotated[4];
    for (int i = 0; i < 4; i++) {
        keys[i] = calloc(2, cache.layer_bytes), values[i] = calloc(2, cache.layer_bytes);
        rotated[i] = malloc(q_values * sizeof(float));
    }
    float *k_copy = malloc(k_values * sizeof(float));
    float *expected_keys = malloc(cache_values * sizeof(float));
    float *found_keys = malloc(cache_values * sizeof(float));
    for (llm_isa isa = LLM_ISA_REFERENCE; isa <= LLM_ISA_BEST; isa = (llm_isa)(isa + 1))
        for (int threads = 1; threads <= 2; threads++) {
            int result = isa == LLM_ISA_REFERENCE ? 0 : threads;
            llm_backend *b = open_backend(isa, threads);
            if (!b) continue;
            op_rope_angles(b, &batch, frequencies, rope_dim, 1.0f, angles);
            for (int t = 0; t < TOKENS; t++)
                for (int i = 0; i < rope_dim / 2; i++) {
                    double angle = (float)positions[t] * frequencies[i];
                    assert_true(fabs(angles[(t * (rope_dim / 2) + i) * 2] - cos(angle)) < 2e-7);
                    assert_true(fabs(angles[(t * (rope_dim / 2) + i) * 2 + 1] - sin(angle)) < 2e-7);
                }
            memset(keys[result], 0, 2 * cache.layer_bytes);
            memset(values[result], 0, 2 * cache.layer_bytes);
            cache.keys = keys[result], cache.values = values[result];
            memcpy(rotated[result], q, q_values * sizeof(float));
            memcpy(k_copy, k, k_values * sizeof(float));
            op_rope_and_store(b, &batch, &shape, pairing, rope_dim, angles, norms ? q_norm : NULL,
                              norms ? k_norm : NULL, 1e-6f, rotated[result], k_copy, v, &cache, 1);
            if (result == 0) {
                const uint16_t *stored =
                    (const uint16_t *)(const void *)((char *)values[0] + cache.layer_bytes) +
                    (slots[0] / BLOCK * KV * BLOCK + slots[0] % BLOCK) * head_dim;
                if (cache_type == LLM_F16) assert_true(stored[0] == 0x7bff && stored[1] == 0xfbff);
                close_backend(b);
                continue;
            }
            const llm_type_info *type = llm_type_find(cache_type);
            type->unpack((char *)keys[0] + cache.layer_bytes, expected_keys, (int64_t)cache_values);
            type->unpack((char *)keys[result] + cache.layer_bytes, found_keys,
                         (int64_t)cache_values);
            check_close("rope, queries", isa, rotated[result], rotated[0], (int64_t)q_values, 1e-6);
            check_close("rope, keys", isa, found_keys, expected_keys, (int64_t)cache_values,
                        cache_type == LLM_F16 ? 1e-4 : 1e-6);
            /* values are stored without arithmetic */
            check_same("stored values", isa, values[result], values[0], 2 * cache.layer_bytes);
            /* one token at a time */
            memset(keys[3], 0, 2 * cache.layer_bytes);
            cache.keys = keys[3], cache.values = values[3];
            memcpy(rotated[3], q, q_values * sizeof(float));
            memcpy(k_copy, k, k_values * sizeof(float));
            for (int t = 0; t < TOKENS; t++) {
                llm_batch one = batch;
                one.n_tokens = 1, one.positions += t, one.slots += t;
                op_rope_and_store(b, &one, &shape, pairing, rope_dim,
                                  angles + t * (rope_dim / 2) * 2, norms ? q_norm : NULL,
                                  norms ? k_norm : NULL, 1e-6f,
                                  rotated[3] + (size_t)t * HEADS * (size_t)head_dim,
                                  k_copy + (size_t)t * KV * (size_t)head_dim,
                                  v + (size_t)t * KV * (size_t)head_dim, &cache, 1);
            }
            check_same("rope token by token", isa, rotated[3], rotated[result],
                       q_values * sizeof(float));
            check_same("keys token by token", isa, keys[3], keys[result], 2 * cache.layer_bytes);
            close_backend(b);
        }
    for (int i = 0; i < 4; i++) free(keys[i]), free(values[i]), free(rotated[i]);
    free(q), free(k), free(v), free(q_norm), free(k_norm), free(frequencies), free(angles);
    free(k_copy), free(expected_keys), free(found_keys);
}

static void test_rope_and_store(void **state) {
    (void)state;
    for (int pairing = 0; pairing < 2; pairing++) {
        check_rope_and_store((llm_rope_pairing)pairing, 64, 64, false, LLM_F16);
        check_rope_and_store((llm_rope_pairing)pairing, 128, 32, true, LLM_F32);
        check_rope_and_store((llm_rope_pairing)pairing, 19, 10, true, LLM_F16);
        check_rope_and_store((llm_rope_pairing)pairing, 3, 0, false, LLM_F32);
    }
}

/* ---- Other functions of a backend ------------------------------------------------------------ */

static void test_memory_and_copies(void **state) {
    (void)state;
    llm_error err;
    llm_backend *b = open_backend(LLM_ISA_BEST, 2);
    if (!b) b = open_backend(LLM_ISA_PLAIN, 2);
    assert_non_null(b);

    float *values = random_floats(10 * 64);
    void *data = packed_weights(LLM_Q4_0, values, 10 * 64);
    int32_t tokens[] = {9, 0, 4, 4}, logit_rows[] = {0, 2, 3};
    llm_batch batch = {.n_tokens = 4, .tokens = tokens, .n_logits = 3, .logit_rows = logit_rows};
    llm_weight table = {LLM_Q4_0, 10, 64, NULL, NULL, NULL, false};
    assert_true(b->load_weight(b->context, &table, data, &err));
    assert_ptr_equal(table.data, data); /* the weight points to the data; nothing is copied */
    float out[4 * 64], row[64], rows[2 * 64];
    op_embed(b, &batch, &table, out);
    for (int t = 0; t < 4; t++) {
        llm__unpack_q4_0((char *)data + tokens[t] * 36, row, 64);
        assert_memory_equal(out + t * 64, row, sizeof row);
    }
    op_gather_rows(b, &batch, out, 64, 1, 2, rows);
    assert_memory_equal(rows, out + 2 * 64, sizeof row);
    assert_memory_equal(rows + 64, out + 3 * 64, sizeof row);

    llm_weight strange = {(llm_type)77, 10, 64, NULL, NULL, NULL, false};
    llm_weight ragged = {LLM_Q8_0, 10, 63, NULL, NULL, NULL, false};
    assert_false(b->load_weight(b->context, &strange, data, &err));
    assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
    assert_false(b->load_weight(b->context, &ragged, data, &err));
    assert_int_equal(err.status, LLM_ERROR_FORMAT);
    b->free_weight(b->context, &table);

    enum { LAYERS = 3, BLOCKS = 5, BLOCK_BYTES = 2 * 4 * 6 * 2 };
    uint8_t keys[LAYERS][BLOCKS][BLOCK_BYTES], copies[LAYERS][BLOCKS][BLOCK_BYTES];
    for (size_t i = 0; i < sizeof keys; i++) ((uint8_t *)keys)[i] = (uint8_t)random_u32();
    memcpy(copies, keys, sizeof keys);
    llm_cache cache = {LLM_F16, LAYERS, 2, 6, 4, BLOCKS, BLOCKS * BLOCK_BYTES, keys, copies, false};
    int32_t from[] = {0, 4}, to[] = {2, 1};
    b->copy_blocks(b->context, &cache, from, to, 2);
    for (int layer = 0; layer < LAYERS; layer++) {
        assert_memory_equal(keys[layer][2], keys[layer][0], BLOCK_BYTES);
        assert_memory_equal(copies[layer][1], copies[layer][4], BLOCK_BYTES);
    }

    float *memory = b->allocate(b->context, 1000 * sizeof(float), "a test", &err);
    assert_non_null(memory);
    assert_int_equal((uintptr_t)memory % 64, 0);
    for (int i = 0; i < 1000; i++) assert_true(memory[i] == 0.0f);
    assert_true(b->upload(b->context, memory, out, sizeof out, &err));
    assert_true(b->download(b->context, rows, memory, sizeof rows, &err));
    assert_memory_equal(rows, out, sizeof rows);
    b->release(b->context, memory);
    b->release(b->context, NULL);
    assert_null(b->allocate(b->context, SIZE_MAX - 10, "too much", &err));
    assert_int_equal(err.status, LLM_ERROR_MEMORY);
    close_backend(b);
    free(values), free(data);
}

/* ---- Plans ----------------------------------------------------------------------------------- */

enum { PLAN_N = 130, PLAN_COLS = 256, PLAN_HEADS = 4, PLAN_KV_HEADS = 2, PLAN_OPERATIONS = 400 };
enum { PLAN_BUFFERS = 5, PLAN_BLOCK = 16, PLAN_BEFORE = 5 };

/* The delayed kernels begin late, at random, so that a thread that skips a necessary barrier reads
 * or writes too early. */
static const llm__kernels *undelayed;
static llm__cpu *alternating; /* switches between one thread and all of them; NULL: none */
static void delay(double most) {
    static _Thread_local uint64_t state;
#ifdef _OPENMP
    if (alternating && omp_get_thread_num() == 0)
        alternating->alone_until = omp_in_parallel() ? 1e300 : 0;
#endif
    if (state == 0) state = 0x9E3779B97F4A7C15ull * (uint64_t)(uintptr_t)&state | 1;
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    if (state % 8) return;
    double share = (double)(state >> 8 & 255) / 255; /* its fourth power is seldom near 1 */
    double end = llm_seconds() + most * share * share * share * share;
    while (llm_seconds() < end) {}
}
static void delayed_round_rows(const float *x, int64_t cols, int group, int height, int rows,
                            int64_t first, int64_t end, char *tile) {
    /* longer than the other delays: a product reads another thread's part late */
    delay(1e-3);
    undelayed->round_rows(x, cols, group, height, rows, first, end, tile);
}
static void delayed_matmul(const llm__matmul_args *args, int64_t first_row, int64_t end_row,
                        void *scratch) {
    delay(1e-4);
    undelayed->matmul(args, first_row, end_row, scratch);
}
static void delayed_rmsnorm(const float *x, const float *weight, int n, int dim, float epsilon,
                            bool add, float *out) {
    delay(1e-4);
    undelayed->rmsnorm(x, weight, n, dim, epsilon, add, out);
}
static void delayed_swiglu(llm_activation f, const float *gate, const float *up, int64_t n,
                           float *out) {
    delay(1e-4);
    undelayed->swiglu(f, gate, up, n, out);
}
static void delayed_rope_and_store(const llm__rope_args *args, int first_token, int end_token,
                                int first_kv_head, int end_kv_head) {
    delay(1e-4);
    undelayed->rope_and_store(args, first_token, end_token, first_kv_head, end_kv_head);
}
static void delayed_attention(const llm__attention_args *args, int sequence, int kv_head,
                              int first_row, int end_row, void *scratch) {
    delay(1e-4);
    undelayed->attention(args, sequence, kv_head, first_row, end_row, scratch);
}

typedef struct plan_fixture { /* the data of a run, and the values from which all runs start */
    int n;
    llm_batch batch;
    int32_t positions[PLAN_N], slots[PLAN_N], seq_first[PLAN_N], seq_count[PLAN_N];
    int32_t tables[PLAN_N][6], columns[PLAN_COLS];
    float *angles, *norm, *head_norm, *start[PLAN_BUFFERS], *kv_start[2];
    /* changed by a run: keys and values (n, PLAN_COLS / 2); a product of 16 columns (n, 16) */
    float *kv[2], *small;
    llm_cache cache;
    void *keys, *values;
} plan_fixture;

/* n tokens, `together` per sequence, after PLAN_BEFORE cached tokens. Their keys are transposed, as
 * in the CPU backend. */
static void make_plan_fixture(plan_fixture *w, int n, int together) {
    memset(w, 0, sizeof *w);
    w->n = n;
    w->batch = (llm_batch){.n_tokens = n, .n_sequences = n / together, .positions = w->positions,
                           .slots = w->slots, .seq_first = w->seq_first, .seq_count = w->seq_count,
                           .block_tables = w->tables[0], .table_stride = 6,
                           .block_size = PLAN_BLOCK};
    for (int t = 0; t < n; t++) {
        int s = t / together, p = w->positions[t] = PLAN_BEFORE + t % together;
        w->seq_first[s] = s * together, w->seq_count[s] = together;
        for (int i = 0; i < 6; i++) w->tables[s][i] = s * 6 + i;
        w->slots[t] = w->tables[s][p / PLAN_BLOCK] * PLAN_BLOCK + p % PLAN_BLOCK;
    }
    int64_t cached =
        (int64_t)w->batch.n_sequences * 6 * PLAN_BLOCK * PLAN_COLS / PLAN_HEADS * PLAN_KV_HEADS;
    w->cache = (llm_cache){LLM_F32, 1, PLAN_KV_HEADS, PLAN_COLS / PLAN_HEADS, PLAN_BLOCK,
                           w->batch.n_sequences * 6, (size_t)cached * 4, NULL, NULL, true};
    w->keys = random_floats(cached), w->values = random_floats(cached);
    w->cache.keys = malloc(w->cache.layer_bytes), w->cache.values = malloc(w->cache.layer_bytes);
    w->angles = random_floats(n * PLAN_COLS / PLAN_HEADS);
    w->norm = random_floats(PLAN_COLS), w->head_norm = random_floats(PLAN_COLS / PLAN_HEADS);
    for (int i = 0; i < PLAN_COLS; i++) w->columns[i] = (i * 77 + 5) % PLAN_COLS;
    for (int i = 0; i < PLAN_BUFFERS; i++) w->start[i] = random_floats(n * PLAN_COLS);
    for (int i = 0; i < 2; i++) w->kv_start[i] = random_floats(n * PLAN_COLS / 2);
    for (int i = 0; i < 2; i++) w->kv[i] = random_floats(n * PLAN_COLS / 2);
    w->small = random_floats(n * 16);
}

static void free_plan_fixture(plan_fixture *w) {
    free(w->keys), free(w->values), free(w->cache.keys), free(w->cache.values);
    free(w->angles), free(w->norm), free(w->head_norm), free(w->small);
    for (int i = 0; i < 2; i++) free(w->kv_start[i]), free(w->kv[i]);
    for (int i = 0; i < PLAN_BUFFERS; i++) free(w->start[i]);
}

/* A random program on buffers (n, PLAN_COLS). Its operations have all dependencies that a model's
 * have, and others: several products of one x, a change of x in between, a product added to
 * another's result, results written where another operation has just read. */
static ops *random_program(const plan_fixture *w, const llm_weight *weights,
                           const llm_weight *order, int n_groups, float **buffer) {
    llm_attention_shape shape = {
        PLAN_HEADS, PLAN_KV_HEADS, PLAN_COLS / PLAN_HEADS, 0.1f, false, 0, 0, 0};
    ops *o = ops_new();
    for (int i = 0; i < n_groups; i++) {
        float *pick[4]; /* all different */
        for (int k = 0; k < 4; k++) {
            pick[k] = buffer[random_u32() % PLAN_BUFFERS];
            for (int j = 0; j < k; j++)
                if (pick[j] == pick[k]) k--, j = k;
        }
        float *x = pick[0], *other = pick[1], *out = pick[2];
        const llm_weight *v = &weights[random_u32() % 4], *u = &weights[random_u32() % 4];
        switch (random_u32() % 10) {
        case 0: ops_rmsnorm(o, x, w->norm, PLAN_COLS, 1e-5f, x); break;
        case 1: ops_matmul(o, x, v, NULL, random_u32() % 2, out); break;
        case 2: /* a norm and two products of its result; one may overwrite the norm's input */
            ops_rmsnorm(o, x, w->norm, PLAN_COLS, 1e-5f, out);
            ops_matmul(o, out, v, NULL, false, other);
            ops_matmul(o, out, u, NULL, random_u32() % 2, x);
            break;
        case 3:
            ops_rmsnorm(o, x, w->norm, PLAN_COLS, 1e-5f, out);
            ops_matmul(o, out, v, NULL, true, x);
            ops_matmul(o, x, u, NULL, false, out);
            ops_matmul(o, out, v, NULL, false, other);
            break;
        case 4: /* the second product applies the gate if nothing else reads `other` */
            ops_rmsnorm(o, x, w->norm, PLAN_COLS, 1e-5f, x);
            ops_matmul(o, x, v, NULL, false, out);
            ops_matmul(o, random_u32() % 4 ? x : pick[3], u, NULL, false, other);
            ops_swiglu(o, out, other, PLAN_COLS, out);
            if (random_u32() % 4) ops_rmsnorm(o, out, w->norm, PLAN_COLS, 1e-5f, other);
            break;
        case 5: ops_swiglu(o, x, other, PLAN_COLS, out); break;
        case 6: ops_gather_columns(o, x, order, out); break;
        case 7: /* the norm's result is overwritten */
            ops_rmsnorm(o, x, w->norm, PLAN_COLS, 1e-5f, out);
            ops_matmul(o, out, v, NULL, false, other);
            ops_gather_columns(o, x, order, out);
            ops_matmul(o, out, v, NULL, true, other);
            break;
        case 8: /* a product too small to be shared, next to one that is shared */
            ops_rmsnorm(o, x, w->norm, PLAN_COLS, 1e-5f, x);
            ops_matmul(o, x, &weights[4], NULL, false, w->small);
            ops_matmul(o, x, v, NULL, false, other);
            ops_rmsnorm(o, other, w->norm, PLAN_COLS, 1e-5f, out);
            ops_matmul(o, out, u, NULL, false, x);
            break;
        default: /* attention, with or without an operation between it and RoPE */
            /* without the norm, the softmax would put all weight on one key */
            ops_rmsnorm(o, x, w->norm, PLAN_COLS, 1e-5f, x);
            ops_rope_and_store(o, &shape, LLM_ROPE_HALVES, PLAN_COLS / PLAN_HEADS, w->angles,
                               v == u ? w->head_norm : NULL, w->head_norm, 1e-5f, x, w->kv[0],
                               w->kv[1], &w->cache, 0);
            if (random_u32() % 3 == 0) ops_rmsnorm(o, other, w->norm, PLAN_COLS, 1e-5f, other);
            ops_attention(o, &shape, x, &w->cache, 0, out);
            ops_matmul(o, out, v, NULL, true, x);
        }
        /* keeps the values finite */
        if (i % 3 == 0) ops_rmsnorm(o, out, w->norm, PLAN_COLS, 1e-5f, out);
    }
    /* reads every buffer, so that no operation is without effect */
    for (int i = 0; i < PLAN_BUFFERS; i++)
        ops_rmsnorm(o, buffer[i], w->norm, PLAN_COLS, 1e-5f, buffer[i]);
    return o;
}

enum { AT_ONCE, PLANNED, WEAKENED }; /* how to run a random program */

/* Run random programs, the same ones in each call, from the same values. AT_ONCE: each operation is
 * its own program. WEAKENED: without barriers. */
static void run_programs(llm_backend *b, plan_fixture *w, const llm_weight *weights, int how,
                         float **buffer) {
    enum { GROUPS = 40 };
    llm_error err;
    llm_weight order = {.rows = 1, .cols = PLAN_COLS, .columns = w->columns};
    uint64_t kept = random_state;
    int n = w->n, share = n < 20 ? 1 : n > 100 ? 2 : 4;
    int n_groups = repeats(PLAN_OPERATIONS / share, PLAN_OPERATIONS / 16);
    random_state = 99 + (uint64_t)n;
    for (int i = 0; i < PLAN_BUFFERS; i++)
        memcpy(buffer[i], w->start[i], (size_t)n * PLAN_COLS * sizeof(float));
    for (int i = 0; i < 2; i++)
        memcpy(w->kv[i], w->kv_start[i], (size_t)n * PLAN_COLS / 2 * sizeof(float));
    memcpy(w->cache.keys, w->keys, w->cache.layer_bytes);
    memcpy(w->cache.values, w->values, w->cache.layer_bytes);
    ((llm__cpu *)b->context)->alone_until = 0;
    for (int done = 0; done < n_groups; done += GROUPS) {
        ops *o = random_program(w, weights, &order, (int)llm__min(GROUPS, n_groups - done), buffer);
        llm_limits limits = ops_limits(&w->batch, 0);
        llm_program one = o->program;
        for (int i = 0; how == AT_ONCE && i < o->program.n_ops; i++) {
            one.ops = &o->program.ops[i], one.n_ops = one.n_body = 1, one.plan = NULL;
            assert_true(b->prepare(b->context, &one, &limits, &err));
            assert_true(b->run(b->context, &one, LLM_BODY, &w->batch, 0, 0, &err));
            b->forget(b->context, &one);
        }
        if (how != AT_ONCE) {
            assert_true(b->prepare(b->context, &o->program, &limits, &err));
            llm__plan *plan = (llm__plan *)o->program.plan;
            for (int i = 0; how == WEAKENED && i < LLM__CLASSES * 2; i++)
                for (int k = 0; k < plan->variants[0][i / 2][i % 2].n; k++)
                    plan->variants[0][i / 2][i % 2].stages[k].barrier = false;
            assert_true(ops_start(o, b, &w->batch, 0, 0, &err));
        }
        ops_free(o, b);
        /* use all threads again, which a backend stops doing after long waits */
        if (!alternating) ((llm__cpu *)b->context)->alone_until = 0;
    }
    random_state = kept;
}

/* Random programs give the same bits when each operation runs alone on one thread, and when they
 * are planned for one or several threads that start late at random. Without barriers the bits
 * differ, or else this test detects nothing. */
static void test_plans_of_random_programs(void **state) {
    static const struct {
        int n, together;
    } sizes[] = { /* 70 tokens with two heads per key/value head: more than LLM__QUERY_ROWS rows */
        {1, 1}, {3, 1}, {5, 5}, {14, 7}, {27, 27}, {70, 70}, {PLAN_N, 65}};
    static const llm_type types[4] = {LLM_Q4_0, LLM_F32, LLM_Q8_0, LLM_Q6_K};
    (void)state;
    llm_error err;
    int differing = 0;
    bool any = false; /* test_tiles runs only kernels that also need AVX-512 */
    FOR_EACH_ISA(isa) {
        enum { BACKENDS = 3 };
        llm_backend *b[BACKENDS] = {open_backend(isa, 1), open_backend(isa, 2),
                                    open_backend(isa, 3)};
        if (!b[0]) continue;
        any = true;
        undelayed = ((llm__cpu *)b[0]->context)->kernels;
        llm__kernels late = *undelayed;
        late.round_rows = delayed_round_rows, late.matmul = delayed_matmul,
        late.rmsnorm = delayed_rmsnorm, late.swiglu = delayed_swiglu;
        late.rope_and_store = delayed_rope_and_store, late.attention = delayed_attention;
        for (int i = 1; i < BACKENDS; i++) ((llm__cpu *)b[i]->context)->kernels = &late;
        void *data[4];
        for (int i = 0; i < 4; i++) {
            float *values = random_floats(PLAN_COLS * PLAN_COLS);
            for (int v = 0; v < PLAN_COLS * PLAN_COLS; v++) values[v] /= sqrtf(PLAN_COLS);
            data[i] = packed_weights(types[i], values, PLAN_COLS * PLAN_COLS);
            free(values);
        }
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k += (size_t)repeats(1, 2)) {
            plan_fixture w;
            make_plan_fixture(&w, sizes[k].n, sizes[k].together);
            size_t bytes = (size_t)w.n * PLAN_COLS * sizeof(float);
            float *expected[PLAN_BUFFERS], *found[PLAN_BUFFERS];
            for (int i = 0; i < PLAN_BUFFERS; i++)
                expected[i] = malloc(bytes), found[i] = malloc(bytes);
            /* one operation at a time, planned for 1, 2 and 3 threads, then without barriers */
            for (int run = 0; run <= BACKENDS + (differing == 0); run++) {
                llm_backend *device = b[run > BACKENDS ? BACKENDS - 1 : run ? run - 1 : 0];
                llm_weight weights[5];
                for (int i = 0; i < 5; i++) {
                    int of = i < 4 ? i : 1; /* the last matrix is small and f32 */
                    weights[i] = (llm_weight){
                        types[of], i < 4 ? PLAN_COLS : 16, PLAN_COLS, NULL, NULL, NULL, false};
                    assert_true(device->load_weight(device->context, &weights[i], data[of], &err));
                }
                alternating = run == BACKENDS ? (llm__cpu *)device->context : NULL;
                int how = run > BACKENDS ? WEAKENED : run ? PLANNED : AT_ONCE;
                run_programs(device, &w, weights, how, run ? found : expected);
                for (int i = 0; i < 5; i++) device->free_weight(device->context, &weights[i]);
                for (int i = 0; run > BACKENDS && i < PLAN_BUFFERS; i++)
                    differing += memcmp(found[i], expected[i], bytes) != 0;
                for (int i = 0; run <= BACKENDS && i < PLAN_BUFFERS; i++) {
                    double size = 0;
                    for (int64_t v = 0; v < (int64_t)w.n * PLAN_COLS; v++)
                        size += fabs((double)expected[i][v]);
                    /* values that are all zero or infinite would show nothing */
                    assert_true(size > 0.01 * w.n * PLAN_COLS && size < 1e10);
                    if (run)
                        check_same(run == 1 ? "a plan, one thread" : "a plan", isa, found[i],
                                   expected[i], bytes);
                }
            }
            for (int i = 0; i < PLAN_BUFFERS; i++) free(expected[i]), free(found[i]);
            free_plan_fixture(&w);
        }
        for (int i = 0; i < 4; i++) free(data[i]);
        for (int i = 0; i < BACKENDS; i++) close_backend(b[i]);
    }
    if (!any) skip();
#ifdef _OPENMP
    assert_true(differing > 0);
#else
    (void)differing;
#endif
}

/* Rounding that is slow in every thread but the first: a product that does not wait for it reads
 * old values. */
static void slow_round_rows(const float *x, int64_t cols, int group, int height, int rows,
                            int64_t first, int64_t end, char *tile) {
#ifdef _OPENMP
    if (omp_get_thread_num() > 0)
        for (double until = llm_seconds() + 5e-4; llm_seconds() < until;) {}
#endif
    undelayed->round_rows(x, cols, group, height, rows, first, end, tile);
}

/* The product with the up weights applies the gate as it finishes: the bits are the same and up
 * itself is not written. The products of the last two pairs are not fused: f16 does not round x,
 * and q4_K and q8_0 round it in different ways. With 70 rows of x, threads share the rounding. */
static void test_fused_gate(void **state) {
    static const llm_type pairs[][2] = {{LLM_Q4_0, LLM_Q4_0}, {LLM_Q4_K, LLM_Q6_K},
                                        {LLM_Q8_0, LLM_Q8_0}, {LLM_Q5_1, LLM_Q8_0},
                                        {LLM_F16, LLM_F16},   {LLM_Q4_K, LLM_Q8_0}};
    static const int counts[] = {1, 3, 9, 33, 70};
    (void)state;
    llm_error err;
    FOR_EACH_ISA(isa) {
        llm_backend *b[2] = {open_backend(isa, 1), open_backend(isa, 3)};
        if (!b[0]) continue;
        undelayed = ((llm__cpu *)b[0]->context)->kernels;
        llm__kernels slow = *undelayed;
        slow.round_rows = slow_round_rows;
        for (int pair = 0; pair < 6; pair++)
            for (int i = 0; i < 5; i += repeats(1, 2)) {
                int n = counts[i], cols = n == 70 ? 512 : 256;
                ((llm__cpu *)b[1]->context)->kernels = n == 70 ? &slow : undelayed;
                /* the last panel is not full; 1043 rows give more results than the cache should keep */
                int64_t rows = i % 2 ? 1043 : 96, size = n * rows;
                float *x = random_floats(n * cols), *bias = random_floats(rows);
                float *results[3], *up = malloc((size_t)size * sizeof *up);
                void *data[2];
                for (int k = 0; k < 2; k++) data[k] = random_weights(pairs[pair][k], rows * cols);
                /* without fusions; fused, on one thread; on three */
                for (int run = 0; run < 3; run++) {
                    llm_backend *device = b[run == 2];
                    llm_weight weights[2];
                    for (int k = 0; k < 2; k++) {
                        weights[k] =
                            (llm_weight){pairs[pair][k], rows, cols, NULL, NULL, NULL, false};
                        assert_true(
                            device->load_weight(device->context, &weights[k], data[k], &err));
                    }
                    results[run] = malloc((size_t)size * sizeof(float));
                    for (int64_t v = 0; v < size; v++) up[v] = 77;
                    ops *o = ops_new();
                    if (run == 0) o->program.fusions = 0;
                    ops_matmul(o, x, &weights[0], bias, false, results[run]);
                    ops_matmul(o, x, &weights[1], i % 3 ? bias : NULL, false, up);
                    ops_swiglu(o, results[run], up, rows, results[run]);
                    ops_run_rows(o, device, n);
                    assert_memory_equal(results[run], results[0], (size_t)size * sizeof(float));
                    bool fused = run > 0 && isa > LLM_ISA_REFERENCE && pair < 4;
                    for (int64_t v = 0; v < size; v++)
                        assert_true(fused ? up[v] == 77 : up[v] != 77);
                    for (int k = 0; k < 2; k++) device->free_weight(device->context, &weights[k]);
                }
                free(x), free(bias), free(up);
                for (int k = 0; k < 2; k++) free(data[k]);
                for (int run = 0; run < 3; run++) free(results[run]);
            }
        close_backend(b[0]), close_backend(b[1]);
    }
}

/* A program that is not prepared, or that exceeds the prepared limits, is refused. A failed
 * allocation leaves an earlier program prepared. */
static void test_refused_runs_and_failed_allocations(void **state) {
    (void)state;
    llm_error err;
    float x[8] = {1, 2, 3, 4}, out[8];
    for (llm_isa isa = LLM_ISA_REFERENCE; isa <= LLM_ISA_PLAIN; isa = (llm_isa)(isa + 1)) {
        llm_backend *b = llm_cpu_backend(1, isa, &err);
        llm_weight w = {LLM_F32, 2, 4, x, NULL, NULL, false};
        llm_batch batch = {.n_tokens = 1};
        llm_limits limits = {1, 1, 1, 0}, nothing = {0};
        ops *o = ops_new();
        ops_matmul(o, x, &w, NULL, false, out);
        assert_false(b->run(b->context, &o->program, LLM_BODY, &batch, 0, 0, &err));
        assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
        assert_false(b->prepare(b->context, &o->program, &nothing, &err));
        assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
        assert_null(o->program.plan);
        assert_true(b->prepare(b->context, &o->program, &limits, &err));
        assert_true(b->run(b->context, &o->program, LLM_BODY, &batch, 0, 0, &err));
        batch.n_tokens = 2;
        assert_false(b->run(b->context, &o->program, LLM_BODY, &batch, 0, 0, &err));
        assert_int_equal(err.status, LLM_ERROR_DEVICE);
        int32_t position = 1, zero = 0, one = 1;
        batch = (llm_batch){.n_tokens = 1, .n_sequences = 1, .positions = &position,
                            .seq_first = &zero, .seq_count = &one};
        /* position 1 needs a context of 2 */
        assert_false(b->run(b->context, &o->program, LLM_BODY, &batch, 0, 0, &err));
        position = 0;
        assert_true(b->run(b->context, &o->program, LLM_BODY, &batch, 0, 0, &err));
        ops *wide = ops_new();
        llm_weight too_wide = {LLM_F32, 2, INT64_MAX / 2, x, NULL, NULL, false};
        ops_matmul(wide, x, &too_wide, NULL, false, out);
        assert_false(b->prepare(b->context, &wide->program, &limits, &err));
        assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
        assert_true(b->run(b->context, &o->program, LLM_BODY, &batch, 0, 0, &err));
        ops_free(wide, b), ops_free(o, b);
        llm_backend_free(b);
    }
    llm_weight w = {LLM_Q4_0, 64, 4096, NULL, NULL, NULL, false};
    llm_limits small = {4, 1, 8, 4}, large = {2000, 1, 8, 4};
    /* each allocation of a second prepare fails in turn; the first program still runs */
    for (int i = 0, done = 0; !done; i++) {
        float *values = random_floats(64 * 4096), *in = random_floats(4 * 4096);
        float first[4 * 64], again[4 * 64];
        void *data = packed_weights(LLM_Q4_0, values, 64 * 4096);
        llm_backend *b = llm_cpu_backend(2, LLM_ISA_BEST, &err);
        assert_non_null(b);
        assert_true(b->load_weight(b->context, &w, data, &err));
        llm_batch batch = {.n_tokens = 4};
        ops *o = ops_new(), *second = ops_new();
        ops_matmul(o, in, &w, NULL, false, first), ops_matmul(second, in, &w, NULL, false, first);
        assert_true(b->prepare(b->context, &o->program, &small, &err));
        assert_true(b->run(b->context, &o->program, LLM_BODY, &batch, 0, 0, &err));
        memcpy(again, first, sizeof first);
        memset(first, 0, sizeof first);
        test_fail_in = i;
        done = b->prepare(b->context, &second->program, &large, &err);
        test_fail_in = -1;
        assert_int_equal(err.status, done ? LLM_OK : LLM_ERROR_MEMORY);
        assert_true(b->run(b->context, &o->program, LLM_BODY, &batch, 0, 0, &err));
        assert_memory_equal(first, again, sizeof first);
        ops_free(o, b), ops_free(second, b);
        b->free_weight(b->context, &w);
        llm_backend_free(b);
        free(values), free(in), free(data);
        assert_int_equal(test_live, 0);
    }
    for (int i = 0;; i++) { /* each allocation of a backend's creation fails in turn */
        test_fail_in = i;
        llm_backend *b = llm_cpu_backend(2, LLM_ISA_BEST, &err);
        test_fail_in = -1;
        llm_backend_free(b);
        assert_int_equal(test_live, 0);
        if (b) break;
        assert_int_equal(err.status, LLM_ERROR_MEMORY);
    }
    llm_backend_free(NULL);
    assert_int_equal(test_live, 0);
}

/* After prepare, a run allocates nothing. */
static void test_no_allocation_in_a_run(void **state) {
    (void)state;
    llm_error err;
    FOR_EACH_ISA(isa) {
        llm_backend *b = open_backend(isa, 2);
        if (!b) continue;
        plan_fixture w;
        make_plan_fixture(&w, 70, 70);
        float *values = random_floats(PLAN_COLS * PLAN_COLS), *buffer[PLAN_BUFFERS];
        void *data = packed_weights(LLM_Q4_0, values, PLAN_COLS * PLAN_COLS);
        llm_weight weights[5], order = {.rows = 1, .cols = PLAN_COLS, .columns = w.columns};
        for (int i = 0; i < 5; i++)
            weights[i] = (llm_weight){
                LLM_Q4_0, i < 4 ? PLAN_COLS : 16, PLAN_COLS, data, NULL, NULL, false};
        for (int i = 0; i < PLAN_BUFFERS; i++) buffer[i] = random_floats(70 * PLAN_COLS);
        ops *o = random_program(&w, weights, &order, 30, buffer);
        llm_limits limits = ops_limits(&w.batch, 0);
        assert_true(b->prepare(b->context, &o->program, &limits, &err));
        long before = test_allocations;
        assert_true(ops_start(o, b, &w.batch, 0, 0, &err));
        assert_int_equal(test_allocations, before);
        ops_free(o, b);
        for (int i = 0; i < PLAN_BUFFERS; i++) free(buffer[i]);
        free(values), free(data);
        free_plan_fixture(&w);
        close_backend(b);
    }
}

static void test_instruction_sets(void **state) {
    (void)state;
    llm_error err;
    for (int max = LLM_ISA_REFERENCE; max <= LLM_ISA_BEST; max++) {
        llm_backend *b = llm_cpu_backend(0, (llm_isa)max, &err);
        assert_non_null(b);
        assert_true(llm_cpu_isa(b) <= (llm_isa)max);
        assert_true(llm_cpu_threads(b) >= 1 && llm_cpu_threads(b) <= llm_processor_count());
        print_message("    asked for at most %s: %s, %d threads\n", llm_isa_name((llm_isa)max),
                      llm_isa_name(llm_cpu_isa(b)), llm_cpu_threads(b));
        llm_backend_free(b);
    }
    assert_string_equal(llm_isa_name((llm_isa)99), "unknown");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_instruction_sets), cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_matmul_extremes),
        cmocka_unit_test(test_matmul_extremes_of_all_formats), cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_gather_columns), cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_traits), cmocka_unit_test(test_attention_cap),
        cmocka_unit_test(test_attention_alibi),
        cmocka_unit_test(test_argmax_and_sum_exp), cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_in_trees),
        cmocka_unit_test(test_attention_window),
        cmocka_unit_test(test_attention_window_is_a_shorter_sequence),
        cmocka_unit_test(test_attention_extremes), cmocka_unit_test(test_rope_and_store),
        cmocka_unit_test(test_memory_and_copies),
        cmocka_unit_test(test_refused_runs_and_failed_allocations),
        cmocka_unit_test(test_no_allocation_in_a_run),
        cmocka_unit_test(test_plans_of_random_programs), cmocka_unit_test(test_fused_gate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
