/* Chapters [3] to [6] of llm.cu: every kernel of matmul and attention, at sizes that are no multiple of anything, against the textbook
 * loops of llm.h; and the promise that a result does not depend, to the last bit, on what else is in the batch, nor so on which of
 * the kernels computed it. (test_device.c tests the operations of any device, and the order of threads.) */
#include "test_util.h"

#include "llm.h"

#include <math.h>

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include "device_util.h"

static llm_backend *open_device(bool plain, bool split) {
    llm_gpu_options options = llm_gpu_defaults();
    options.plain = plain;
    options.split_attention = split;
    return device_open(device_name("emulated"), &options);
}

static llm_backend *open_reference(void) {
    llm_error err;
    llm_backend *b = llm_cpu_backend(1, LLM_ISA_REFERENCE, &err);
    assert_non_null(b);
    return b;
}

static void reserve(llm_backend *b, int tokens, int sequences, int context, int n_heads, int head_dim, int64_t cols) {
    llm_error err;
    llm_limits limits = {.max_tokens = tokens, .max_sequences = sequences, .max_context = context, .n_heads = n_heads,
                         .head_dim = head_dim, .max_cols = cols};
    if (!b->reserve(b->context, &limits, &err)) fail_msg("%s", err.message);
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

/* Normally distributed, more or less. */
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
    for (int64_t r = 0; r < rows; r++) info->pack(values + r * cols, data + (size_t)r * row_bytes, cols);
    return data;
}

static void matmul_on(llm_backend *b, llm_type type, const void *data, int64_t rows, int64_t cols, const float *x,
                      const float *bias, int n, const float *before, float *out) {
    llm_error err;
    llm_weight w = {.type = type, .rows = rows, .cols = cols};
    if (!b->load_weight(b->context, &w, data, &err)) fail_msg("%s", err.message);
    float *x_device = to_device(b, x, (size_t)(n * cols) * sizeof *x);
    float *bias_device = bias ? to_device(b, bias, (size_t)rows * sizeof *bias) : NULL;
    float *out_device = b->allocate(b->context, (size_t)(n * rows) * sizeof *out, "a test", &err);
    assert_non_null(out_device);
    if (before) assert_true(b->upload(b->context, out_device, before, (size_t)(n * rows) * sizeof *out, &err));
    b->matmul(b->context, x_device, &w, bias_device, n, before != NULL, out_device);
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

/* One product on the device and by the reference loop; returns how far they are apart. `tail` (n >= 1 rows of x) also alone: each row of
 * the result must be the same bits as with the others. */
static double compare_matmul(llm_backend *b, const matmul_case *c, test_random *r) {
    llm_backend *reference = open_reference();
    reserve(reference, c->n, 1, 1, 1, 1, c->cols);
    int64_t n_out = (int64_t)c->n * c->rows;
    float *values = random_values(r, (int64_t)c->rows * c->cols, 0.05f), *x = random_values(r, (int64_t)c->n * c->cols, c->x_size);
    float *bias = random_values(r, c->rows, c->x_size), *before = random_values(r, n_out, c->x_size);
    float *expected = malloc((size_t)n_out * 4), *got = malloc((size_t)n_out * 4);
    void *data = packed_weights(c->type, values, c->rows, c->cols);
    matmul_on(reference, c->type, data, c->rows, c->cols, x, c->bias ? bias : NULL, c->n, c->add ? before : NULL, expected);
    matmul_on(b, c->type, data, c->rows, c->cols, x, c->bias ? bias : NULL, c->n, c->add ? before : NULL, got);
    double d = distance(got, expected, n_out);
    for (int64_t i = 0; i < n_out; i++) assert_true(isfinite(got[i]));

    int first = random_below(r, c->n), count = 1 + random_below(r, c->n - first); /* some of the rows alone */
    float *part = malloc((size_t)count * (size_t)c->rows * 4);
    matmul_on(b, c->type, data, c->rows, c->cols, x + (int64_t)first * c->cols, c->bias ? bias : NULL, count,
              c->add ? before + (int64_t)first * c->rows : NULL, part);
    assert_memory_equal(part, got + (int64_t)first * c->rows, (size_t)count * (size_t)c->rows * 4);
    free(values), free(x), free(bias), free(before), free(expected), free(got), free(part), free(data);
    llm_backend_free(reference);
    return d;
}

/* Types with a layout of their own on the device; all others become f16. */
static bool is_kept(llm_type type) {
    return type == LLM_F32 || type == LLM_F16 || type == LLM_BF16 || type == LLM_Q8_0 || type == LLM_Q4_0;
}

/* x is rounded to 11 bits, but for f32 weights to 22 */
static double limit_of(llm_type type) { return type == LLM_F32 ? 3e-6 : 4e-4; }

static void check_case(const matmul_case *c, test_random *r) {
    llm_backend *b = open_device(false, true);
    reserve(b, c->n, 1, 1, 1, 1, c->cols);
    double d = compare_matmul(b, c, r);
    if (!(d < limit_of(c->type)))
        fail_msg("%s %d x %d, %d tokens, size %g: %g", llm_type_find(c->type)->name, c->rows, c->cols, c->n, c->x_size, d);
    llm_backend_free(b);
}

/* All types, sizes that are no multiple of anything, every kernel. */
static void test_matmul(void **state) {
    (void)state;
    static const int tokens[] = {1, 2, 5, 8, 9, 16, 23, 33, 64, 65, 130};
    test_random r = {1};
    const llm_type_info *type;
    for (int t = 0; (type = llm_type_at(t)) != NULL; t++)
        for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
            if (!is_kept(type->type) && i % 4) continue;
            int cols = (1 + random_below(&r, type->block_values > 32 ? 2 : 9)) * type->block_values;
            if (type->block_values == 1) cols = 1 + random_below(&r, 300);
            matmul_case c = {type->type, 1 + random_below(&r, 70), cols, tokens[i], 1.0f, i % 2, i % 3 == 0};
            check_case(&c, &r);
        }
}

/* A matrix with more columns than segments have chunks, and one with few. */
static void test_matmul_wide(void **state) {
    (void)state;
    test_random r = {2};
    matmul_case cases[] = {{LLM_Q4_0, 33, 64 * 43, 1, 1.0f, false, true},  {LLM_Q4_0, 17, 64 * 43, 9, 1.0f, true, false},
                           {LLM_Q8_0, 16, 64 * 19, 70, 1.0f, false, false}, {LLM_F16, 20, 64 * 30 + 3, 3, 1.0f, true, true},
                           {LLM_BF16, 40, 1000, 12, 1.0f, false, false},   {LLM_F32, 31, 1111, 7, 1.0f, false, true},
                           {LLM_Q4_0, 9, 32, 2, 1.0f, false, false},       {LLM_F16, 1, 1, 1, 1.0f, false, false},
                           {LLM_F16, 150, 130, 200, 1.0f, false, false},   {LLM_Q4_0, 200, 96, 129, 1.0f, true, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_case(&cases[i], &r);
}

/* f16 ends at 65504: activations far beyond, and far below its smallest number, lose nothing. */
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

/* Weights beyond f16's range in types that have it. */
static void test_matmul_large_weights(void **state) {
    (void)state;
    enum { rows = 5, cols = 70 };
    test_random r = {4};
    for (int t = 0; t < 2; t++) {
        llm_type type = t ? LLM_F32 : LLM_BF16;
        llm_backend *b = open_device(false, true), *reference = open_reference();
        reserve(b, 1, 1, 1, 1, 1, cols);
        reserve(reference, 1, 1, 1, 1, 1, cols);
        float *values = random_values(&r, rows * cols, 1.0f), *x = random_values(&r, cols, 1.0f), expected[rows], got[rows];
        for (int i = 0; i < rows * cols; i++) values[i] *= i / cols % 2 ? 1e20f : 1e-20f;
        void *data = packed_weights(type, values, rows, cols);
        matmul_on(reference, type, data, rows, cols, x, NULL, 1, NULL, expected);
        matmul_on(b, type, data, rows, cols, x, NULL, 1, NULL, got);
        for (int i = 0; i < rows; i++) assert_true(fabs(got[i] - expected[i]) <= 2e-3 * fabs(expected[i]) + (i % 2 ? 1e17 : 1e-23));
        free(values), free(x), free(data);
        llm_backend_free(b);
        llm_backend_free(reference);
    }
}

/* Not a number, and infinity, must come through: an error in a model should show. */
static void test_matmul_not_finite(void **state) {
    (void)state;
    enum { cols = 96 };
    test_random r = {5};
    llm_backend *b = open_device(false, true);
    reserve(b, 2, 1, 1, 1, 1, cols);
    float *values = random_values(&r, 3 * cols, 1.0f), *x = random_values(&r, 2 * cols, 1.0f), got[6];
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

static void test_matmul_plain(void **state) {
    (void)state;
    test_random r = {6};
    const llm_type_info *type;
    for (int t = 0; (type = llm_type_at(t)) != NULL; t++) {
        llm_backend *b = open_device(true, true);
        reserve(b, 3, 1, 1, 1, 1, 512);
        matmul_case c = {type->type, 19, 2 * type->block_values < 64 ? 77 / type->block_values * type->block_values : 2 * type->block_values,
                         3, 1.0f, t % 2, t % 3 == 0};
        double d = compare_matmul(b, &c, &r), limit = is_kept(type->type) ? 2e-6 : 4e-4;
        if (!(d < limit)) fail_msg("%s: %g", type->name, d);
        llm_backend_free(b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_matmul_wide),
        cmocka_unit_test(test_matmul_range),
        cmocka_unit_test(test_matmul_large_weights),
        cmocka_unit_test(test_matmul_not_finite),
        cmocka_unit_test(test_matmul_plain),
    };
    return cmocka_run_group_tests_name("llm.cu: matmul and attention", tests, NULL, NULL);
}
