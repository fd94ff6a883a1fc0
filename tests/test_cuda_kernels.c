/* Chapters [3] to [6] of llm.cu: every matmul and attention kernel, at irregular sizes, against
 * the plain loops of llm.h. No bit of a result may depend on the rest of the batch or on the
 * choice of kernel. (test_device.c tests the operations of any device, and thread orders.) */
#include "test_util.h"

#include "llm.h"
#include "../models/quantize.h"

#include <math.h>

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include "device_util.h"
#include "emulator.h"
#include "ops.h"

extern int llm__pretended_processors; /* llm.cu */

static bool emulated(void) { return !strcmp(device_name("emulated"), "emulated"); }

static llm_backend *open_device(bool plain, bool split) {
    llm_gpu_options options = llm_gpu_defaults();
    options.plain = plain;
    options.split_attention = split;
    options.deterministic = true;
    return device_open(device_name("emulated"), &options);
}

static llm_backend *open_reference(void) {
    llm_error err;
    llm_backend *b = llm_cpu_backend(1, LLM_ISA_REFERENCE, &err);
    assert_non_null(b);
    return b;
}

static void *to_device(llm_backend *b, const void *host, size_t bytes) {
    llm_error err;
    void *device = b->allocate(b->context, bytes, "a test", &err);
    if (!device || !b->upload(b->context, device, host, bytes, &err)) fail_msg("%s", err.message);
    return device;
}

static void from_device(llm_backend *b, void *host, const void *device, size_t bytes) {
    llm_error err;
    if (!b->download(b->context, host, device, bytes, &err)) fail_msg("%s", err.message);
}

/* A roughly normally distributed value. */
static float random_value(test_random *r) {
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) sum += (float)random_below(r, 2001) / 1000.0f - 1.0f;
    return sum * 0.87f;
}

static float *random_values(test_random *r, int64_t n, float size) {
    float *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = size * random_value(r);
    return x;
}

/* |a - b| / |b| */
static double distance(const float *a, const float *b, int64_t n) {
    double error = 0.0, size = 0.0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return sqrt(error / (size > 0.0 ? size : 1.0));
}

/* ---- Matmul ---------------------------------------------------------------------------------- */

static void *packed_weights(llm_type type, const float *values, int64_t rows, int64_t cols) {
    const llm_type_info *info = llm_type_find(type);
    size_t row_bytes = (size_t)(cols / info->block_values) * (size_t)info->block_bytes;
    char *data = malloc((size_t)rows * row_bytes);
    for (int64_t r = 0; r < rows; r++)
        llm_pack(info->type, values + r * cols, data + (size_t)r * row_bytes, cols);
    return data;
}

static void matmul_on(llm_backend *b, llm_type type, const void *data, int64_t rows, int64_t cols,
                      const float *x, const float *bias, int n, const float *before, float *out) {
    llm_error err;
    llm_weight w = {.type = type, .rows = rows, .cols = cols};
    if (!b->load_weight(b->context, &w, data, &err)) fail_msg("%s", err.message);
    float *x_device = to_device(b, x, (size_t)(n * cols) * sizeof *x);
    float *bias_device = bias ? to_device(b, bias, (size_t)rows * sizeof *bias) : NULL;
    float *out_device = b->allocate(b->context, (size_t)(n * rows) * sizeof *out, "a test", &err);
    assert_non_null(out_device);
    if (before)
        assert_true(
            b->upload(b->context, out_device, before, (size_t)(n * rows) * sizeof *out, &err));
    op_matmul(b, x_device, &w, bias_device, n, before != NULL, out_device);
    from_device(b, out, out_device, (size_t)(n * rows) * sizeof *out);
    b->release(b->context, out_device);
    b->release(b->context, bias_device);
    b->release(b->context, x_device);
    b->free_weight(b->context, &w);
}

typedef struct matmul_case {
    llm_type type;
    int rows, cols, n;
    float x_size;
    bool bias, add;
} matmul_case;

/* Run one matmul on the device and in the reference loop. Returns their relative distance. Some
 * rows of x are also run alone, which must give the same bits. */
static double compare_matmul(llm_backend *b, const matmul_case *c, test_random *r) {
    llm_backend *reference = open_reference();
    int64_t n_out = (int64_t)c->n * c->rows;
    float *values = random_values(r, (int64_t)c->rows * c->cols, 0.05f),
          *x = random_values(r, (int64_t)c->n * c->cols, c->x_size);
    float *bias = random_values(r, c->rows, c->x_size),
          *before = random_values(r, n_out, c->x_size);
    float *expected = malloc((size_t)n_out * 4), *got = malloc((size_t)n_out * 4);
    void *data = packed_weights(c->type, values, c->rows, c->cols);
    matmul_on(reference, c->type, data, c->rows, c->cols, x, c->bias ? bias : NULL, c->n,
              c->add ? before : NULL, expected);
    matmul_on(b, c->type, data, c->rows, c->cols, x, c->bias ? bias : NULL, c->n,
              c->add ? before : NULL, got);
    double d = distance(got, expected, n_out);
    for (int64_t i = 0; i < n_out; i++) assert_true(isfinite(got[i]));

    int first = random_below(r, c->n), count = 1 + random_below(r, c->n - first);
    float *part = malloc((size_t)count * (size_t)c->rows * 4);
    matmul_on(b, c->type, data, c->rows, c->cols, x + (int64_t)first * c->cols,
              c->bias ? bias : NULL, count, c->add ? before + (int64_t)first * c->rows : NULL,
              part);
    assert_memory_equal(part, got + (int64_t)first * c->rows, (size_t)count * (size_t)c->rows * 4);
    free(values), free(x), free(bias), free(before), free(expected), free(got), free(part),
        free(data);
    llm_backend_free(reference);
    return d;
}

/* The kernels round x to 11 bits, or to 22 for f32 weights. Real matrix units also truncate
 * sums, which the emulated one does not; the difference shows with f32 weights. */
static double limit_of(llm_type type) {
    return type != LLM_F32 ? 4e-4 : strcmp(device_name("emulated"), "cuda") ? 3e-6 : 1e-5;
}

static void check_case(const matmul_case *c, test_random *r) {
    llm_backend *b = open_device(false, true);
    double d = compare_matmul(b, c, r);
    if (!(d < limit_of(c->type)))
        fail_msg("%s %d x %d, %d tokens, size %g: %g", llm_type_find(c->type)->name, c->rows,
                 c->cols, c->n, c->x_size, d);
    llm_backend_free(b);
}

/* All types, a few rows of irregular sizes, and numbers of tokens that select each kernel. For two
 * types, also the numbers at which the choice of kernel changes. */
static void test_matmul(void **state) {
    (void)state;
    static const int tokens[] = {1, 2, 5, 12, 23, 40, 8, 9, 16, 33, 65, 130};
    test_random r = {1};
    const llm_type_info *type;
    for (int t = 0; (type = llm_type_at(t)) != NULL; t++)
        for (int i = 0; i < (type->type == LLM_F16 || type->type == LLM_Q4_0 ? 12 : 6); i++) {
            int cols = (1 + random_below(&r, type->block_values > 32 ? 2 : 9)) * type->block_values;
            if (type->block_values == 1) cols = 1 + random_below(&r, 300);
            matmul_case c = {type->type, 1 + random_below(&r, 64), cols, tokens[i], 1.0f, i % 2,
                             i % 3 == 0};
            check_case(&c, &r);
        }
}

/* Matrices with more chunks of columns than segments, and with fewer. */
static void test_matmul_wide(void **state) {
    (void)state;
    test_random r = {2};
    matmul_case cases[] = {{LLM_Q4_0, 33, 64 * 43, 1, 1.0f, false, true},
                           {LLM_Q4_0, 17, 64 * 43, 9, 1.0f, true, false},
                           {LLM_Q8_0, 16, 64 * 19, 70, 1.0f, false, false},
                           {LLM_F16, 20, 64 * 30 + 3, 3, 1.0f, true, true},
                           {LLM_BF16, 40, 1000, 12, 1.0f, false, false},
                           {LLM_F32, 31, 1111, 7, 1.0f, false, true},
                           {LLM_Q4_0, 9, 32, 2, 1.0f, false, false},
                           {LLM_F16, 1, 1, 1, 1.0f, false, false},
                           {LLM_F16, 150, 130, 200, 1.0f, false, false},
                           {LLM_Q4_0, 200, 96, 129, 1.0f, true, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_case(&cases[i], &r);
}

/* Enough weight rows for the kernels that take several at once, with a type for each layout. */
static void test_matmul_tall(void **state) {
    (void)state;
    static const llm_type types[] = {LLM_F16,  LLM_Q8_0, LLM_Q4_0, LLM_Q4_1, LLM_Q4_K,
                                     LLM_Q5_0, LLM_Q5_K, LLM_Q6_K, LLM_F32};
    static const int tokens[] = {8, 12, 25, 70};
    test_random r = {11};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
            const llm_type_info *type = llm_type_find(types[t]);
            /* enough rows for the two processors that main sets */
            int rows = tokens[i] > 16 ? 130 + random_below(&r, 30) : 240 + random_below(&r, 30);
            matmul_case c = {types[t],  rows, type->block_values > 32 ? type->block_values : 96,
                             tokens[i], 1.0f, i % 2,
                             i % 3 == 0};
            check_case(&c, &r);
        }
}

/* Where tiles do not fill the processors, each quarter of the columns has its own block, even if it
 * is empty. The bits are the same. */
static void test_matmul_split(void **state) {
    (void)state;
    enum { ROWS = 150, TOKENS = 20 }; /* three tiles of 128 threads */
    static const llm_type types[] = {LLM_F16,  LLM_Q8_0, LLM_Q4_0, LLM_Q4_K,
                                     LLM_Q5_0, LLM_Q5_K, LLM_Q6_K, LLM_F32};
    static const int columns[] = {1280, 256};
    test_random r = {25};
    for (int t = 0; t < 8; t++) {
        int cols = columns[t % 2];
        float *values = random_values(&r, ROWS * cols, 0.05f),
              *x = random_values(&r, TOKENS * cols, 1.0f),
              *out[2] = {malloc(TOKENS * ROWS * 4), malloc(TOKENS * ROWS * 4)};
        void *data = packed_weights(types[t], values, ROWS, cols);
        uint64_t blocks[2];
        for (int split = 0; split < 2; split++) {
            llm__pretended_processors = 1 + 5 * split;
            llm_backend *b = open_device(false, true);
            blocks[split] = emulator_counted().blocks;
            matmul_on(b, types[t], data, ROWS, cols, x, NULL, TOKENS, NULL, out[split]);
            blocks[split] = emulator_counted().blocks - blocks[split];
            llm_backend_free(b);
        }
        assert_memory_equal(out[0], out[1], TOKENS * ROWS * 4);
        /* f32 rows need three times the memory: they come in several parts */
        if (emulated() && types[t] != LLM_F32) assert_int_equal(blocks[1] - blocks[0], 3 * 3);
        free(values), free(x), free(out[0]), free(out[1]), free(data);
    }
    llm__pretended_processors = 2;
}

/* Activations far above f16's largest number (65504), or far below its smallest, lose no
 * precision. */
static void test_matmul_range(void **state) {
    (void)state;
    static const float sizes[] = {1e-30f, 1e-6f, 1e6f, 1e25f};
    static const llm_type types[] = {LLM_F16, LLM_BF16, LLM_F32, LLM_Q8_0, LLM_Q4_0};
    test_random r = {3};
    for (int t = 0; t < 5; t++)
        for (int i = 0; i < 4; i++) {
            matmul_case c = {types[t], 18, 320, i % 2 ? 11 : 2, sizes[i], false, false};
            check_case(&c, &r);
        }
}

/* Weights beyond f16's range, in types that can hold them. */
static void test_matmul_large_weights(void **state) {
    (void)state;
    enum { rows = 5, cols = 70 };
    test_random r = {4};
    for (int t = 0; t < 2; t++) {
        llm_type type = t ? LLM_F32 : LLM_BF16;
        llm_backend *b = open_device(false, true), *reference = open_reference();
        float *values = random_values(&r, rows * cols, 1.0f), *x = random_values(&r, cols, 1.0f),
              expected[rows], got[rows];
        for (int i = 0; i < rows * cols; i++) values[i] *= i / cols % 2 ? 1e20f : 1e-20f;
        void *data = packed_weights(type, values, rows, cols);
        matmul_on(reference, type, data, rows, cols, x, NULL, 1, NULL, expected);
        matmul_on(b, type, data, rows, cols, x, NULL, 1, NULL, got);
        for (int i = 0; i < rows; i++)
            assert_true(fabs(got[i] - expected[i]) <=
                        2e-3 * fabs(expected[i]) + (i % 2 ? 1e17 : 1e-23));
        free(values), free(x), free(data);
        llm_backend_free(b);
        llm_backend_free(reference);
    }
}

/* NaN and infinity must reach the output: an error in a model should be visible. */
static void test_matmul_not_finite(void **state) {
    (void)state;
    enum { cols = 96 };
    test_random r = {5};
    llm_backend *b = open_device(false, true);
    float *values = random_values(&r, 3 * cols, 1.0f), *x = random_values(&r, 2 * cols, 1.0f),
          got[6];
    void *data = packed_weights(LLM_Q8_0, values, 3, cols);
    x[cols + 40] = NAN;
    matmul_on(b, LLM_Q8_0, data, 3, cols, x, NULL, 2, NULL, got);
    for (int i = 0; i < 6; i++) assert_int_equal(isnan(got[i]) != 0, i >= 3);
    x[cols + 40] = INFINITY;
    matmul_on(b, LLM_Q8_0, data, 3, cols, x, NULL, 2, NULL, got);
    for (int i = 0; i < 6; i++) assert_int_equal(isfinite(got[i]) != 0, i < 3);
    free(values), free(x), free(data);
    llm_backend_free(b);
}

/* Matmuls with the same x share its rounded copy, but none may use the copy of another x, within a
 * program or across runs. */
static void test_matmul_same_input(void **state) {
    (void)state;
    enum { n = 10, cols = 128, rows = cols };
    llm_error err;
    test_random r = {10};
    llm_backend *b = open_device(false, true);
    float *values = random_values(&r, rows * cols, 0.1f), *x = random_values(&r, n * cols, 1.0f);
    float first[n * rows], second[n * rows], third[n * rows], got[n * rows];
    void *data = packed_weights(LLM_F16, values, rows, cols);
    matmul_on(b, LLM_F16, data, rows, cols, x, NULL, n, NULL, first);
    matmul_on(b, LLM_F16, data, rows, cols, first, NULL, n, NULL, second);
    matmul_on(b, LLM_F16, data, rows, cols, second, NULL, n, NULL, third);
    llm_weight w = {.type = LLM_F16, .rows = rows, .cols = cols};
    assert_true(b->load_weight(b->context, &w, data, &err));
    float *x_device = to_device(b, x, sizeof got), *out = to_device(b, x, sizeof got);
    for (int apart = 0; apart < 2; apart++) {
        assert_true(b->upload(b->context, x_device, x, sizeof got, &err)); /* the host writes x */
        ops *o = ops_new();
        ops_matmul(o, x_device, &w, NULL, false, out); /* out = first */
        ops_matmul(o, x_device, &w, NULL, false, out); /* shares the rounding */
        if (apart) {
            ops_run_rows(o, b, n);
            from_device(b, got, out, sizeof got);
            assert_memory_equal(got, first, sizeof got);
            o = ops_new();
        }
        ops_matmul(o, out, &w, NULL, false, x_device); /* x is `out`; x_device = second */
        ops_matmul(o, x_device, &w, NULL, false, out); /* a matmul has written x */
        ops_run_rows(o, b, n);
        from_device(b, got, out, sizeof got);
        assert_memory_equal(got, third, sizeof got);
    }
    assert_true(b->upload(b->context, x_device, x, sizeof got, &err));
    op_matmul(b, x_device, &w, NULL, n, false, out);
    from_device(b, got, out, sizeof got);
    assert_memory_equal(got, first, sizeof got);
    op_matmul(b, x_device, &w, NULL, 3, false, out); /* fewer rows: x is rounded again */
    from_device(b, got, out, sizeof got);
    assert_memory_equal(got, first, sizeof got);
    ops *o = ops_new();
    ops_matmul(o, x_device, &w, NULL, false, out);
    ops_softcap(o, out, 3, rows, x_device); /* another kernel writes x */
    float other[n * rows];
    ops_matmul(o, x_device, &w, NULL, false, out);
    ops_run_rows(o, b, n);
    from_device(b, got, x_device, sizeof got);
    matmul_on(b, LLM_F16, data, rows, cols, got, NULL, n, NULL, other);
    from_device(b, got, out, sizeof got);
    assert_memory_equal(got, other, sizeof got);
    b->release(b->context, x_device), b->release(b->context, out);
    b->free_weight(b->context, &w);
    free(values), free(x), free(data);
    llm_backend_free(b);
}

/* In a program, matmuls with the same x run in one launch and give the same bits as one by one. A
 * matrix of another layout, or one whose x depends on another's result, runs alone. */
static void test_matmul_together(void **state) {
    (void)state;
    enum { n = 5, cols = 256, most = 5 };
    static const struct {
        llm_type types[most];
        int rows[most], launches; /* kernel launches, without the rounding of x */
    } cases[] = {{{LLM_Q4_0, LLM_Q4_0, LLM_Q4_0}, {70, 20, 33}, 1},
                 {{LLM_Q5_0, LLM_Q5_1, LLM_Q6_K}, {16, 40, 20}, 2},
                 {{LLM_F16, LLM_F16, LLM_F16, LLM_F16, LLM_Q8_0}, {17, 90, 1, 5, 40}, 3},
                 {{LLM_F32, LLM_F16}, {20, 31}, 2}};
    static const int32_t zeros[n] = {0}, positions[n] = {0, 1, 2, 3, 4}, count[1] = {n};
    llm_error err;
    test_random r = {12};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm_gpu_options options = llm_gpu_defaults();
        float *got[2][most], *x = random_values(&r, llm_rounded_rows(n) * cols, 1.0f);
        void *data[most];
        uint64_t launches[2];
        int n_products = 0;
        for (; n_products < most && cases[i].rows[n_products]; n_products++) {
            int rows = cases[i].rows[n_products];
            float *values = random_values(&r, (int64_t)rows * cols, 0.1f);
            data[n_products] = packed_weights(cases[i].types[n_products], values, rows, cols);
            free(values);
        }
        for (int fused = 0; fused < 2; fused++) {
            options.fused = fused;
            llm_backend *b = device_open(device_name("emulated"), &options);
            llm_weight w[most];
            float *x_device = to_device(b, x, (size_t)llm_rounded_rows(n) * cols * 4), *out[most];
            for (int k = 0; k < n_products; k++) {
                memset(&w[k], 0, sizeof w[k]);
                w[k].type = cases[i].types[k], w[k].rows = cases[i].rows[k], w[k].cols = cols;
                if (!b->load_weight(b->context, &w[k], data[k], &err)) fail_msg("%s", err.message);
                size_t bytes = (size_t)llm_rounded_rows(n) * (size_t)w[k].rows * 4;
                got[fused][k] = calloc(1, bytes);
                out[k] = to_device(b, got[fused][k], bytes);
            }
            llm_batch batch = {.n_tokens = n, .n_sequences = 1, .tokens = zeros,
                               .positions = positions, .slots = positions, .seq_first = zeros,
                               .seq_count = count, .block_tables = zeros, .table_stride = 1,
                               .block_size = 16, .logit_rows = zeros};
            llm_device_state before, after;
            ops *o = ops_new();
            for (int k = 0; k < n_products; k++)
                ops_matmul(o, x_device, &w[k], NULL, false, out[k]);
            for (int step = 0; step < 3; step++) { /* run; captured and replayed; replayed */
                b->state(b->context, &before);
                if (!ops_step(o, b, &batch, &err) || !b->sync(b->context, &err))
                    fail_msg("%s", err.message);
                b->state(b->context, &after);
                if (step == 0) launches[fused] = after.launches - before.launches;
                else assert_int_equal(after.replays - before.replays, 1);
            }
            ops_free(o, b);
            for (int k = 0; k < n_products; k++) {
                from_device(b, got[fused][k], out[k], (size_t)n * (size_t)w[k].rows * 4);
                b->release(b->context, out[k]);
                b->free_weight(b->context, &w[k]);
            }
            b->release(b->context, x_device);
            llm_backend_free(b);
        }
        llm_backend *b = open_device(false, true);
        for (int k = 0; k < n_products; k++) {
            size_t bytes = (size_t)n * (size_t)cases[i].rows[k] * 4;
            float *alone = malloc(bytes);
            matmul_on(b, cases[i].types[k], data[k], cases[i].rows[k], cols, x, NULL, n, NULL,
                      alone);
            assert_memory_equal(got[0][k], alone, bytes);
            assert_memory_equal(got[1][k], alone, bytes);
            free(got[0][k]), free(got[1][k]), free(data[k]), free(alone);
        }
        llm_backend_free(b);
        assert_int_equal(launches[0] - launches[1], n_products - cases[i].launches);
        free(x);
    }
}

/* A feed-forward layer: x += attention's output times a matrix, norm, gate and up, gate, down. With
 * fused kernels, norm and gate round their result for the next matmul, and with few tokens the last
 * block of the first matmul computes the norm. The bits are the same. The last case is on a Hopper
 * GPU, where the matmuls use wgmma. (Blocks of the emulated
 * device run one after the other, so a missing memory fence does not show here.) */
enum { LAYER_DIM = 160, LAYER_HIDDEN = 224, LAYER_TOKENS = 70 };

static uint64_t run_layer(llm_backend *b, llm_type type, int n, float *x_out, float *normed_out) {
    static const int rows[] = {LAYER_DIM, LAYER_HIDDEN, LAYER_HIDDEN, LAYER_DIM},
                     cols[] = {LAYER_DIM, LAYER_DIM, LAYER_DIM, LAYER_HIDDEN};
    enum { EACH = 14 }; /* tokens of a sequence; more than 16 are not captured */
    int32_t zeros[LAYER_TOKENS] = {0}, positions[LAYER_TOKENS], first[LAYER_TOKENS],
            count[LAYER_TOKENS];
    llm_error err;
    llm_weight w[4];
    llm_device_state before, after;
    test_random r = {21};
    for (int t = 0; t < n; t++) positions[t] = t;
    for (int i = 0; i * EACH < n; i++)
        first[i] = i * EACH, count[i] = n - first[i] < EACH ? n - first[i] : EACH;
    for (int i = 0; i < 4; i++) {
        float *values = random_values(&r, (int64_t)rows[i] * cols[i], 0.1f);
        void *data = packed_weights(type, values, rows[i], cols[i]);
        w[i] = (llm_weight){.type = type, .rows = rows[i], .cols = cols[i]};
        if (!b->load_weight(b->context, &w[i], data, &err)) fail_msg("%s", err.message);
        free(values), free(data);
    }
    float *device[6]; /* x, attention's output, norm weights, norm, gate, up */
    for (int i = 0; i < 6; i++) {
        int64_t count = (int64_t)llm_rounded_rows(n) * LAYER_HIDDEN;
        float *values = random_values(&r, count, 1.0f);
        device[i] = to_device(b, values, (size_t)count * 4);
        free(values);
    }
    ops *o = ops_new();
    ops_matmul(o, device[1], &w[0], NULL, true, device[0]);
    ops_rmsnorm(o, device[0], device[2], LAYER_DIM, 1e-5f, device[3]);
    ops_matmul(o, device[3], &w[1], NULL, false, device[4]);
    ops_matmul(o, device[3], &w[2], NULL, false, device[5]);
    ops_swiglu(o, device[4], device[5], LAYER_HIDDEN, device[4]);
    ops_matmul(o, device[4], &w[3], NULL, true, device[0]);
    llm_batch batch = {.n_tokens = n, .n_sequences = (n + EACH - 1) / EACH, .tokens = zeros,
                       .positions = positions, .slots = positions, .seq_first = first,
                       .seq_count = count,
                       .block_tables = zeros, .table_stride = 1, .block_size = 64,
                       .logit_rows = zeros};
    b->state(b->context, &before);
    for (int step = 0; step < 3; step++) { /* run; captured and replayed; replayed */
        if (!ops_step(o, b, &batch, &err) || !b->sync(b->context, &err))
            fail_msg("%s", err.message);
        if (step == 0) b->state(b->context, &after);
    }
    ops_free(o, b);
    from_device(b, x_out, device[0], (size_t)n * LAYER_DIM * 4);
    from_device(b, normed_out, device[3], (size_t)n * LAYER_DIM * 4);
    for (int i = 0; i < 6; i++) b->release(b->context, device[i]);
    for (int i = 0; i < 4; i++) b->free_weight(b->context, &w[i]);
    return after.launches - before.launches;
}

static void test_layer(void **state) {
    (void)state;
    static const llm_type types[] = {LLM_Q4_0, LLM_F16, LLM_F32};
    static const int tokens[] = {1, 2, 3, 9, LAYER_TOKENS, LAYER_TOKENS};
    static float before[LAYER_TOKENS * LAYER_DIM];
    static float x[2][LAYER_TOKENS * LAYER_DIM], normed[2][LAYER_TOKENS * LAYER_DIM];
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 6; i++) {
            uint64_t launches[2];
            device_set_capability(device_name("emulated"), i == 5 ? 90 : 80);
            for (int fused = 0; fused < 2; fused++) {
                llm_gpu_options options = llm_gpu_defaults();
                options.fused = fused;
                llm_backend *b = device_open(device_name("emulated"), &options);
                launches[fused] = run_layer(b, types[t], tokens[i], x[fused], normed[fused]);
                llm_backend_free(b);
            }
            size_t bytes = (size_t)tokens[i] * LAYER_DIM * 4;
            assert_memory_equal(normed[0], normed[1], bytes);
            assert_memory_equal(x[0], x[1], bytes);
            if (i == 5) {
                double error = distance(x[0], before, LAYER_TOKENS * LAYER_DIM);
                if (!(error < 1e-3) || (error == 0 && types[t] == LLM_Q4_0))
                    fail_msg("with wgmma: %g", error);
            }
            memcpy(before, x[0], bytes);
            if (types[t] == LLM_F32) continue; /* x is three times as wide: matmuls are in parts */
            /* apart: 4 matmuls, 3 roundings of x, norm, gate */
            assert_int_equal(launches[0], 9);
            /* rounding, matmul (and norm), gate and up, gate, down */
            assert_int_equal(launches[1], tokens[i] <= 2 ? 5 : 6);
        }
    device_set_capability(device_name("emulated"), 80);
}

/* x (n, cols) times one matrix, on a Hopper GPU. */
static void matmul_on_hopper(bool deterministic, const matmul_case *c, const void *data,
                             const float *x, const float *bias, const float *before, float *out) {
    llm_gpu_options options = llm_gpu_defaults();
    options.deterministic = deterministic;
    device_set_capability(device_name("emulated"), 90);
    llm_backend *b = device_open(device_name("emulated"), &options);
    matmul_on(b, c->type, data, c->rows, c->cols, x, c->bias ? bias : NULL, c->n,
              c->add ? before : NULL, out);
    llm_backend_free(b);
    device_set_capability(device_name("emulated"), 80);
}

/* wgmma: more chunks than stages, tiles of both sizes, with rows and tokens left over. Its bits
 * differ; in deterministic mode they are those of the other kernels. */
static void test_matmul_hopper(void **state) {
    (void)state;
    test_random r = {21};
    static const llm_type types[] = {LLM_F16,  LLM_BF16, LLM_F32,  LLM_Q8_0, LLM_Q4_0, LLM_Q4_Z,
                                     LLM_Q4_K, LLM_Q5_0, LLM_Q5_K, LLM_Q6_K};
    static const int rows[] = {100, 300, 7}, tokens[] = {130, 257, 65},
                     columns[] = {1280, 300, 700};
    for (int t = 0; t < 10; t++)
        for (int i = 0; i < 3; i++) {
            const llm_type_info *type = llm_type_find(types[t]);
            int block = type->block_values;
            matmul_case c = {type->type, rows[(t + i) % 3], columns[i] / block * block, tokens[i],
                             i == 1 ? 1e7f : i == 2 ? 1e-9f : 1.0f, t % 2, t % 3 == 0};
            llm_backend *reference = open_reference(), *b = open_device(false, true);
            int64_t n_out = (int64_t)c.n * c.rows;
            float *values = random_values(&r, (int64_t)c.rows * c.cols, 0.05f),
                  *x = random_values(&r, (int64_t)c.n * c.cols, c.x_size),
                  *bias = random_values(&r, c.rows, c.x_size),
                  *before = random_values(&r, n_out, c.x_size);
            float *expected = malloc((size_t)n_out * 4), *got = malloc((size_t)n_out * 4);
            void *data = packed_weights(c.type, values, c.rows, c.cols);
            matmul_on(reference, c.type, data, c.rows, c.cols, x, c.bias ? bias : NULL, c.n,
                      c.add ? before : NULL, expected);
            matmul_on_hopper(false, &c, data, x, bias, before, got);
            double d = distance(got, expected, n_out);
            if (!(d < (c.type == LLM_F32 ? limit_of(c.type) : 1e-3))) /* weights are rounded, too */
                fail_msg("%s %d x %d, %d tokens: %g", type->name, c.rows, c.cols, c.n, d);
            if (i == 2) {
                matmul_on(b, c.type, data, c.rows, c.cols, x, c.bias ? bias : NULL, c.n,
                          c.add ? before : NULL, expected);
                /* f32 rows need three times the memory: they come in parts too small for wgmma */
                if (c.type != LLM_F32 && !strcmp(device_name("emulated"), "emulated"))
                    assert_memory_not_equal(got, expected, (size_t)n_out * 4);
                matmul_on_hopper(true, &c, data, x, bias, before, got);
                assert_memory_equal(got, expected, (size_t)n_out * 4);
            }
            free(values), free(x), free(bias), free(before), free(expected), free(got), free(data);
            llm_backend_free(reference), llm_backend_free(b);
        }
}

/* A product with wgmma and one without round the same x in different orders. (`fused` would give
 * both the same kernel.) */
static void test_matmul_hopper_same_input(void **state) {
    (void)state;
    enum { n = 70, cols = 128, rows = 512, few = 20 };
    llm_error err;
    test_random r = {22};
    float *values = random_values(&r, rows * cols, 0.1f), *x = random_values(&r, n * cols, 1.0f),
          *expected = malloc(n * rows * 4), *got = malloc(n * rows * 4);
    void *data = packed_weights(LLM_F16, values, rows, cols);
    llm_gpu_options options = llm_gpu_defaults();
    options.fused = false;
    llm__pretended_processors = 8; /* `few` rows use only a few of them */
    device_set_capability(device_name("emulated"), 90);
    llm_backend *b = device_open(device_name("emulated"), &options);
    matmul_on(b, LLM_F16, data, few, cols, x, NULL, n, NULL, expected);
    llm_weight w = {.type = LLM_F16, .rows = rows, .cols = cols},
               w_few = {.type = LLM_F16, .rows = few, .cols = cols};
    assert_true(b->load_weight(b->context, &w, data, &err));
    assert_true(b->load_weight(b->context, &w_few, data, &err));
    float *x_device = to_device(b, x, n * cols * 4), *out = to_device(b, got, n * rows * 4),
          *few_out = to_device(b, got, n * few * 4);
    ops *o = ops_new();
    ops_matmul(o, x_device, &w, NULL, false, out);
    ops_matmul(o, x_device, &w_few, NULL, false, few_out);
    ops_run_rows(o, b, n);
    from_device(b, got, few_out, n * few * 4);
    assert_memory_equal(got, expected, n * few * 4);
    b->release(b->context, x_device), b->release(b->context, out);
    b->release(b->context, few_out);
    b->free_weight(b->context, &w), b->free_weight(b->context, &w_few);
    llm_backend_free(b);
    device_set_capability(device_name("emulated"), 80);
    llm__pretended_processors = 2;
    free(values), free(x), free(expected), free(got), free(data);
}

static void test_matmul_plain(void **state) {
    (void)state;
    test_random r = {6};
    const llm_type_info *type;
    for (int t = 0; (type = llm_type_at(t)) != NULL; t++) {
        llm_backend *b = open_device(true, true);
        matmul_case c = {type->type,
                         19,
                         2 * type->block_values < 64 ? 77 / type->block_values * type->block_values
                                                     : 2 * type->block_values,
                         3,
                         1.0f,
                         t % 2,
                         t % 3 == 0};
        double d = compare_matmul(b, &c, &r), limit = 2e-6;
        if (!(d < limit)) fail_msg("%s: %g", type->name, d);
        llm_backend_free(b);
    }
}

/* ---- Attention ------------------------------------------------------------------------------- */

enum { MAX_SEQUENCES = 6 };

typedef struct attention_case {
    /* number of cached positions and of new tokens per sequence */
    int n_sequences, past[MAX_SEQUENCES], count[MAX_SEQUENCES];
    int n_kv_heads, group, head_dim, block_size, window;
} attention_case;

typedef struct attention_data {
    const attention_case *c;
    llm_cache cache;                   /* in host memory; unused slots are NaN */
    size_t cache_bytes;
    int32_t *tables;                   /* (n_sequences, table_stride) blocks in random order */
    int table_stride, n_tokens;
    float *q;                          /* (n_tokens, heads, head_dim) */
} attention_data;

static uint16_t *cache_slot(const attention_data *d, void *side, int sequence, int kv_head,
                             int position) {
    int block_size = d->c->block_size;
    int64_t block = d->tables[sequence * d->table_stride + position / block_size];
    return (uint16_t *)side +
           ((block * d->c->n_kv_heads + kv_head) * block_size + position % block_size) *
               d->c->head_dim;
}

static attention_data make_attention(const attention_case *c, test_random *r) {
    attention_data d = {.c = c};
    int n_blocks = 1, next = 0;
    for (int s = 0; s < c->n_sequences; s++) {
        int blocks = (c->past[s] + c->count[s] + c->block_size - 1) / c->block_size;
        n_blocks += blocks;
        if (blocks > d.table_stride) d.table_stride = blocks;
        d.n_tokens += c->count[s];
    }
    int32_t *order = malloc((size_t)n_blocks * sizeof *order);
    for (int i = 0; i < n_blocks; i++) {
        int j = random_below(r, i + 1);
        order[i] = order[j], order[j] = i;
    }
    d.tables = calloc((size_t)(c->n_sequences * d.table_stride), sizeof *d.tables);
    for (int s = 0; s < c->n_sequences; s++)
        for (int i = 0; i * c->block_size < c->past[s] + c->count[s]; i++)
            d.tables[s * d.table_stride + i] = order[next++];
    free(order);
    d.cache = (llm_cache){LLM_F16,  1, c->n_kv_heads, c->head_dim, c->block_size,
                          n_blocks, 0, NULL,          NULL,        false};
    d.cache_bytes = d.cache.layer_bytes =
        (size_t)n_blocks * (size_t)(c->n_kv_heads * c->block_size * c->head_dim) * 2;
    d.cache.keys = malloc(d.cache_bytes), d.cache.values = malloc(d.cache_bytes);
    memset(d.cache.keys, 0xff, d.cache_bytes), memset(d.cache.values, 0xff, d.cache_bytes);
    float head[512];
    for (int s = 0; s < c->n_sequences; s++)
        for (int p = 0; p < c->past[s] + c->count[s]; p++)
            for (int h = 0; h < c->n_kv_heads; h++)
                for (int side = 0; side < 2; side++) {
                    for (int i = 0; i < c->head_dim; i++) head[i] = random_value(r);
                    llm_pack(LLM_F16, head,
                             cache_slot(&d, side ? d.cache.values : d.cache.keys, s, h, p),
                             c->head_dim);
                }
    d.q = random_values(r, (int64_t)d.n_tokens * c->n_kv_heads * c->group * c->head_dim, 3.0f);
    return d;
}

static void free_attention(attention_data *d) {
    free(d->tables), free(d->cache.keys), free(d->cache.values), free(d->q);
}

/* Attention by its definition, independent of the reference loop, so that a misreading of the seam
 * in the reference loop shows as a difference. */
static void expected_attention(const attention_data *d, float *out) {
    const attention_case *c = d->c;
    const llm_type_info *f16 = llm_type_find(LLM_F16);
    float *value = malloc((size_t)c->head_dim * 4);
    double *sums = malloc((size_t)c->head_dim * sizeof *sums);
    int64_t row = 0;
    for (int s = 0; s < c->n_sequences; s++)
        for (int p = c->past[s]; p < c->past[s] + c->count[s]; p++)
            for (int head = 0; head < c->n_kv_heads * c->group; head++, row++) {
                int first = c->window && p >= c->window ? p - c->window + 1 : 0;
                double total = 0.0, largest = -1e300,
                       *scores = malloc((size_t)(p + 1) * sizeof *scores);
                for (int k = first; k <= p; k++) {
                    f16->unpack(cache_slot(d, d->cache.keys, s, head / c->group, k), value,
                                c->head_dim);
                    scores[k] = 0.0;
                    for (int i = 0; i < c->head_dim; i++)
                        scores[k] +=
                            (double)d->q[row * c->head_dim + i] * value[i] / sqrt(c->head_dim);
                    if (scores[k] > largest) largest = scores[k];
                }
                for (int i = 0; i < c->head_dim; i++) sums[i] = 0.0;
                for (int k = first; k <= p; k++) {
                    double share = exp(scores[k] - largest);
                    total += share;
                    f16->unpack(cache_slot(d, d->cache.values, s, head / c->group, k), value,
                                c->head_dim);
                    for (int i = 0; i < c->head_dim; i++) sums[i] += share * value[i];
                }
                for (int i = 0; i < c->head_dim; i++)
                    out[row * c->head_dim + i] = (float)(sums[i] / total);
                free(scores);
            }
    free(value), free(sums);
}

/* A step with the tokens first to first + count - 1 of each sequence (all if count is 0), and a
 * program of one attention operation or, with `windows`, of one for each window. */
typedef struct attention_step {
    llm_batch batch;
    ops *o;
    llm_cache cache;                   /* on the device */
    int32_t *numbers;                  /* memory of the batch's arrays */
    int *token_of;                     /* (n_tokens) index of each token in attention_data.q */
    float *q, *out;                    /* on the device; out: (n_operations, n_tokens, width) */
    int n_operations;
    int64_t width;
} attention_step;

static attention_step make_step(llm_backend *b, const attention_data *d, int first, int count,
                                const int *windows, int n_windows) {
    const attention_case *c = d->c;
    llm_error err;
    int heads = c->n_kv_heads * c->group, n = 0, from = 0;
    attention_step s = {.width = (int64_t)heads * c->head_dim, .cache = d->cache,
                        .n_operations = windows ? n_windows : 1};
    s.numbers = calloc((size_t)(2 * d->n_tokens + 2 * MAX_SEQUENCES), 4);
    int32_t *positions = s.numbers + d->n_tokens, *firsts = positions + d->n_tokens,
            *counts = firsts + MAX_SEQUENCES;
    s.token_of = malloc((size_t)d->n_tokens * sizeof *s.token_of);
    float *q = malloc((size_t)(d->n_tokens * s.width) * 4 + 16);
    for (int i = 0; i < c->n_sequences; from += c->count[i++]) {
        firsts[i] = n, counts[i] = 0;
        for (int t = first; t < c->count[i] && (!count || t < first + count);
             t++, n++, counts[i]++) {
            positions[n] = c->past[i] + t, s.token_of[n] = from + t;
            memcpy(q + n * s.width, d->q + (from + t) * s.width, (size_t)s.width * 4);
        }
    }
    s.batch = (llm_batch){.n_tokens = n, .n_sequences = c->n_sequences, .tokens = s.numbers,
                          .positions = positions, .slots = s.numbers, .seq_first = firsts,
                          .seq_count = counts, .block_tables = d->tables,
                          .table_stride = d->table_stride, .block_size = c->block_size,
                          .n_logits = 0, .logit_rows = s.numbers};
    s.cache.keys = to_device(b, d->cache.keys, d->cache_bytes),
    s.cache.values = to_device(b, d->cache.values, d->cache_bytes);
    s.q = to_device(b, q, (size_t)(n * s.width) * 4 + 16);
    s.out = b->allocate(b->context, (size_t)(s.n_operations * n * s.width) * 4, "a test", &err);
    s.o = ops_new();
    for (int i = 0; i < s.n_operations; i++) {
        llm_attention_shape shape = {heads, c->n_kv_heads, c->head_dim,
                                     1.0f / sqrtf((float)c->head_dim), false,
                                     windows ? windows[i] : c->window, 0, 0};
        ops_attention(s.o, &shape, s.q, &s.cache, 0, s.out + i * n * s.width);
    }
    free(q);
    return s;
}

/* Write the result of one operation to its tokens' rows of `out`, and leave the other rows. */
static void step_result(llm_backend *b, const attention_step *s, int operation, float *out) {
    size_t row = (size_t)s->width * 4;
    int n = s->batch.n_tokens;
    float *got = malloc((size_t)n * row);
    from_device(b, got, s->out + operation * n * s->width, (size_t)n * row);
    for (int t = 0; t < n; t++)
        memcpy(out + s->token_of[t] * s->width, got + t * s->width, row);
    free(got);
}

static void free_step(llm_backend *b, attention_step *s) {
    ops_free(s->o, b);
    b->release(b->context, s->cache.keys), b->release(b->context, s->cache.values);
    b->release(b->context, s->q), b->release(b->context, s->out);
    free(s->numbers), free(s->token_of);
}

static void attention_on(llm_backend *b, const attention_data *d, int first, int count,
                         float *out) {
    llm_error err;
    attention_step s = make_step(b, d, first, count, NULL, 0);
    if (s.batch.n_tokens) {
        if (!ops_step(s.o, b, &s.batch, &err)) fail_msg("%s", err.message);
        step_result(b, &s, 0, out);
    }
    free_step(b, &s);
}

static int largest_step(const attention_case *c) {
    int largest = 0;
    for (int s = 0; s < c->n_sequences; s++)
        largest = c->count[s] > largest ? c->count[s] : largest;
    return largest;
}

/* The result must be right, and have the same bits in one step as in several, and with split
 * attention as without. */
static void check_attention_case(const attention_case *c, test_random *r) {
    attention_data d = make_attention(c, r);
    size_t bytes = (size_t)d.n_tokens * (size_t)(c->n_kv_heads * c->group * c->head_dim) * 4;
    float *expected = malloc(bytes), *all = malloc(bytes), *pieces = malloc(bytes);
    expected_attention(&d, expected);
    for (int unsplit = 0; unsplit < 2; unsplit++) {
        llm_backend *b = open_device(false, unsplit == 0);
        memset(unsplit ? pieces : all, 0xff, bytes);
        attention_on(b, &d, 0, 0, unsplit ? pieces : all);
        if (unsplit == 0) {
            double error = distance(all, expected, (int64_t)bytes / 4);
            if (!(error < 1e-3))
                fail_msg("heads %d x %d of %d, window %d: %g", c->n_kv_heads, c->group, c->head_dim,
                         c->window, error);
        } else assert_memory_equal(pieces, all, bytes);
        for (int size = 1; unsplit == 0 && size < largest_step(c); size = size * 5 + 2) {
            if (size == 1 && largest_step(c) > 20) continue; /* too slow */
            memset(pieces, 0xff, bytes);
            for (int first = 0; first < largest_step(c); first += size)
                attention_on(b, &d, first, size, pieces);
            assert_memory_equal(pieces, all, bytes);
        }
        llm_backend_free(b);
    }
    free(expected), free(all), free(pieces);
    free_attention(&d);
}

/* Every head size, with decode steps and prompts, also longer than one part of 256 positions. */
static void test_attention(void **state) {
    (void)state;
    test_random r = {7};
    static const int dims[] = {8, 32, 48, 64, 80, 96, 128, 192, 256};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        attention_case decode = {
            3, {random_below(&r, 300), 0, 255}, {1, 1, 1}, 1, 1 + random_below(&r, 5), dims[i], 16,
            0};
        check_attention_case(&decode, &r);
        attention_case prompt = {2,
                                 {random_below(&r, 70), 3},
                                 {40 + random_below(&r, 30), 1},
                                 1,
                                 1 + random_below(&r, 3),
                                 dims[i],
                                 5,
                                 0};
        check_attention_case(&prompt, &r);
    }
    /* a prompt whose parts are merged in `out`; one that begins in the second part; verifications
     * of 17 rows or more, 32 and 33 */
    attention_case cases[] = {{1, {0}, {300}, 1, 1, 64, 16, 0},
                              {2, {250, 500}, {40, 35}, 1, 2, 32, 32, 0},
                              {3, {300, 255, 600}, {6, 5, 1}, 2, 4, 32, 16, 0},
                              {2, {20, 290}, {8, 11}, 1, 4, 64, 16, 0},
                              /* 27 rows, but 16 tokens when the step is rounded up */
                              {1, {40}, {3}, 1, 20, 32, 16, 0},
                              {1, {0}, {9}, 1, 3, 32, 16, 0},
                              {5, {0, 1, 2, 3, 4}, {1, 40, 2, 41, 33}, 1, 1, 32, 1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_attention_case(&cases[i], &r);
}

/* Windows shorter and longer than a tile and a part; sequences shorter and longer than the
 * window. */
static void test_attention_window(void **state) {
    (void)state;
    test_random r = {8};
    static const int windows[] = {1, 7, 64, 100, 257, 400};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        attention_case decode = {
            3, {600 + random_below(&r, 60), 30, 255}, {1, 2, 5}, 1, 3, 32, 16, windows[i]};
        check_attention_case(&decode, &r);
        attention_case prompt = {2, {random_below(&r, 400), 0}, {66, 90}, 1, 1, 64, 16, windows[i]};
        check_attention_case(&prompt, &r);
    }
}

/* Short sequences and a long one form about as many blocks as there are parts, and no more for a
 * step that is rounded up. A second step with the same tables gives the same bits. */
static void test_attention_ragged(void **state) {
    (void)state;
    if (!emulated()) skip();
    test_random r = {14};
    llm_error err;
    attention_case c = {6, {511, 511, 700, 511, 8191, 30}, {1, 1, 2, 1, 1, 1}, 2, 2, 32, 16, 0};
    attention_data d = make_attention(&c, &r);
    int64_t n = (int64_t)d.n_tokens * c.n_kv_heads * c.group * c.head_dim;
    float *expected = malloc((size_t)n * 4), *got = malloc((size_t)n * 4);
    llm_backend *b = open_device(false, true);
    attention_step s = make_step(b, &d, 0, 0, NULL, 0);
    expected_attention(&d, expected);
    for (int run = 0; run < 3; run++) { /* launched, captured, replayed */
        emulator_counts before = emulator_counted(), after;
        if (!ops_step(s.o, b, &s.batch, &err)) fail_msg("%s", err.message);
        step_result(b, &s, 0, got);
        after = emulator_counted();
        /* parts: 2 + 2 + 3 + 2 + 32 + 1 = 42, rounded up to 48; 5 tiles of up to 4 rows are merged,
         * rounded up to 8; for each of 2 kv heads */
        assert_int_equal(after.blocks - before.blocks, (48 + 8 * 4) * 2);
        assert_true(run == 0 || after.live_allocations == before.live_allocations);
        assert_true(distance(got, expected, n) < 1e-3);
    }
    free_step(b, &s);
    llm_backend_free(b);
    free(expected), free(got);
    free_attention(&d);
}

/* Sequences that share their blocks can have more parts than a cache in free memory could hold.
 * Such a step reserves memory, once; if there is none, it fails with an error, and the next step
 * works. */
static void test_attention_shared_blocks(void **state) {
    (void)state;
    if (!emulated()) skip();
    test_random r = {15};
    llm_error err;
    attention_case c = {6, {4000, 4000, 4000, 4000, 4000, 4000}, {1, 1, 1, 1, 1, 1}, 1, 8, 32, 16,
                        0};
    attention_data d = make_attention(&c, &r);
    for (int s = 1; s < c.n_sequences; s++)
        memcpy(d.tables + s * d.table_stride, d.tables, (size_t)d.table_stride * sizeof *d.tables);
    int64_t n = (int64_t)d.n_tokens * c.group * c.head_dim;
    float *expected = malloc((size_t)n * 4), *got = malloc((size_t)n * 4);
    expected_attention(&d, expected);
    llm_backend *b = open_device(false, true);
    attention_step s = make_step(b, &d, 0, 0, NULL, 0);
    llm_limits limits = ops_limits(&s.batch, 0);
    emulator_memory(emulator_counted().live_bytes + (512 << 10));
    if (!b->prepare(b->context, &s.o->program, &limits, &err)) fail_msg("%s", err.message);
    emulator_fail_allocation(0);
    assert_false(ops_step(s.o, b, &s.batch, &err));
    emulator_fail_allocation(-1);
    assert_int_equal(err.status, LLM_ERROR_MEMORY);
    assert_non_null(strstr(err.message, "parts of attention (fewer sequences"));
    uint64_t live = emulator_counted().live_bytes;
    for (int run = 0; run < 4; run++) {
        if (!ops_step(s.o, b, &s.batch, &err)) fail_msg("%s", err.message);
        step_result(b, &s, 0, got);
        assert_true(distance(got, expected, n) < 1e-3);
        if (run == 0) assert_true(emulator_counted().live_bytes > live);
        else assert_int_equal(emulator_counted().live_bytes, live);
        live = emulator_counted().live_bytes;
    }
    free_step(b, &s);
    llm_backend_free(b);
    emulator_memory((size_t)8 << 30);
    free(expected), free(got);
    free_attention(&d);
}

/* A program whose operations have several windows: each window has its own items; the plain kernel
 * computes the windows beyond the first four. */
static void test_attention_several_windows(void **state) {
    (void)state;
    static const int windows[] = {0, 100, 1, 300, 0, 64, 100};
    test_random r = {16};
    llm_error err;
    attention_case c = {3, {600, 30, 255}, {1, 40, 5}, 1, 3, 64, 16, 0};
    attention_data d = make_attention(&c, &r);
    int64_t n = (int64_t)d.n_tokens * c.group * c.head_dim;
    float *expected = malloc((size_t)n * 4), *got = malloc((size_t)n * 4);
    llm_backend *b = open_device(false, true);
    attention_step s = make_step(b, &d, 0, 0, windows, 7);
    if (!ops_step(s.o, b, &s.batch, &err)) fail_msg("%s", err.message);
    for (int i = 0; i < 7; i++) {
        c.window = windows[i];
        expected_attention(&d, expected);
        step_result(b, &s, i, got);
        double error = distance(got, expected, n);
        if (!(error < 1e-3)) fail_msg("operation %d, window %d: %g", i, windows[i], error);
    }
    free_step(b, &s);
    llm_backend_free(b);
    free(expected), free(got);
    free_attention(&d);
}

/* A step of thousands of tokens, thousands of positions, and a matmul with thousands of rows of
 * x. */
static void test_large_sizes(void **state) {
    (void)state;
    test_random r = {13};
    static const attention_case cases[] = {{2, {0, 60}, {1030, 1}, 1, 1, 32, 16, 0},
                                           {2, {3000, 3}, {1, 1}, 2, 4, 64, 16, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const attention_case *c = &cases[i];
        attention_data d = make_attention(c, &r);
        int64_t n = (int64_t)d.n_tokens * c->n_kv_heads * c->group * c->head_dim;
        float *expected = malloc((size_t)n * 4), *got = malloc((size_t)n * 4);
        llm_backend *b = open_device(false, true);
        expected_attention(&d, expected);
        attention_on(b, &d, 0, 0, got);
        double error = distance(got, expected, n);
        if (!(error < 1e-3))
            fail_msg("%d tokens after %d positions: %g", c->count[0], c->past[0], error);
        free(expected), free(got);
        free_attention(&d);
        llm_backend_free(b);
    }
    matmul_case many = {LLM_Q4_K, 20, 256, 1030, 1.0f, true, false};
    check_case(&many, &r);
}

/* The kernel for prompts on Hopper: two tiles of rows and several of positions, in blocks that
 * cross them; a window; groups; a sequence with few rows. */
static void test_attention_hopper(void **state) {
    (void)state;
    test_random r = {23};
    attention_case cases[] = {{2, {100, 3}, {150, 40}, 1, 1, 128, 16, 0},
                              {1, {30}, {45}, 2, 3, 128, 5, 0},
                              {2, {300, 2}, {140, 1}, 1, 1, 128, 32, 90}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        attention_data d = make_attention(&cases[i], &r);
        int n = d.n_tokens * cases[i].n_kv_heads * cases[i].group * 128;
        float *expected = malloc((size_t)n * 4), *got = malloc((size_t)n * 4);
        expected_attention(&d, expected);
        device_set_capability(device_name("emulated"), 90);
        llm_backend *b = device_open(device_name("emulated"), NULL);
        attention_on(b, &d, 0, 0, got);
        double error = distance(got, expected, n);
        if (!(error < 1e-3)) fail_msg("case %zu: %g", i, error);
        llm_backend_free(b);
        device_set_capability(device_name("emulated"), 80);
        free(expected), free(got);
        free_attention(&d);
    }
}

/* Queries far beyond f16's range, whose softmax selects a single position. */
static void test_attention_range(void **state) {
    (void)state;
    test_random r = {9};
    attention_case c = {1, {70}, {3}, 1, 2, 64, 16, 0};
    attention_data d = make_attention(&c, &r);
    int n = 3 * 2 * 64;
    float expected[3 * 2 * 64], got[3 * 2 * 64];
    for (int i = 0; i < n; i++) d.q[i] *= i / 128 == 0 ? 1e8f : i / 128 == 1 ? 1e-12f : 1e4f;
    llm_backend *b = open_device(false, true);
    expected_attention(&d, expected);
    attention_on(b, &d, 0, 0, got);
    assert_true(distance(got, expected, n) < 1e-3);
    llm_backend_free(b);
    free_attention(&d);
}

int main(void) {
    /* the choice of kernel depends on the number of rows per processor */
    llm__pretended_processors = 2;
    setenv("LLM_EMU_SHARED", "232448", 0); /* as on an H100; attention keeps its totals there */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_matmul_wide),
        cmocka_unit_test(test_matmul_tall),
        cmocka_unit_test(test_matmul_split),
        cmocka_unit_test(test_matmul_range),
        cmocka_unit_test(test_matmul_large_weights),
        cmocka_unit_test(test_matmul_not_finite),
        cmocka_unit_test(test_matmul_same_input),
        cmocka_unit_test(test_matmul_together),
        cmocka_unit_test(test_layer),
        cmocka_unit_test(test_matmul_hopper),
        cmocka_unit_test(test_matmul_hopper_same_input),
        cmocka_unit_test(test_matmul_plain),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_window),
        cmocka_unit_test(test_attention_range),
        cmocka_unit_test(test_attention_ragged),
        cmocka_unit_test(test_attention_shared_blocks),
        cmocka_unit_test(test_attention_several_windows),
        cmocka_unit_test(test_attention_hopper),
        cmocka_unit_test(test_large_sizes),
    };
    const char *device = device_name("emulated");
    int failed = 0;
    for (int order = do_less() ? device_orders(device) - 1 : 0; order < device_orders(device);
         order++) {
        device_set_order(device, order);
        failed += cmocka_run_group_tests_name("llm.cu: matmul and attention", tests, NULL, NULL);
    }
    return failed;
}
