/* libFuzzer: any bytes as weights of any type, q4_Z included. The weights are unpacked and packed
 * again, and multiplied by one of the machine's sets of kernels: all rows of x at once and row by
 * row, in the file's layout and in the kernels' own. All these products must have the same bits.
 *
 * Input: one byte each for the type, the rows, the blocks per row, and one for both the rows of
 * x and the set of kernels; then the weights, repeated as often as needed. */
#include "../llm.h"
#include "../models/quantize.c"
#include "ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* the exact size, so that a sanitizer sees a read past the end */
static void *get_memory(size_t bytes) {
    void *p = malloc(bytes);
    if (!p) abort();
    return p;
}

/* Check for the same bits, except that any NaN equals any other. */
static void check_same(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) && !(isnan(a[i]) && isnan(b[i]))) abort();
}

enum { MAX_ROWS = 40, MAX_X = 10 };

/* Backends are kept: their scratch memory is large compared with the weights. */
static llm_backend *backend_of(llm_isa isa) {
    static llm_backend *backends[LLM_ISA_BEST + 1];
    llm_error err;
    if (!backends[isa]) {
        backends[isa] = llm_cpu_backend(1, isa, &err);
        if (!backends[isa]) abort();
    }
    return backends[isa];
}

static void multiply(llm_isa isa, bool pack, const llm_weight *matrix, const void *data,
                     const float *x, int n, float *out) {
    llm_error err;
    llm_backend *b = backend_of(isa);
    llm_weight w = *matrix;
    llm_cpu_pack_weights(b, pack);
    if (!b->load_weight(b->context, &w, data, &err)) abort();
    op_matmul(b, x, &w, NULL, n, false, out);
    float *single = get_memory((size_t)w.rows * sizeof(float));
    for (int i = 0; i < n; i++) {
        op_matmul(b, x + i * w.cols, &w, NULL, 1, false, single);
        check_same(out + i * w.rows, single, w.rows);
    }
    free(single);
    b->free_weight(b->context, &w);
    if (!b->sync(b->context, &err)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 5) return 0;
    int n_types = 0;
    while (llm_type_at(n_types)) n_types++;
    int index = data[0] % (n_types + 1);
    const llm_type_info *type = index < n_types ? llm_type_at(index) : llm_type_find(LLM_Q4_Z);
    int64_t rows = data[1] % MAX_ROWS + 1,
            blocks = data[2] % (type->block_values == 1    ? 70
                                : type->block_values == 32 ? 5
                                                           : 3) +
                     1,
            n = data[3] % MAX_X + 1;
    llm_isa isa = (llm_isa)(data[3] / MAX_X % (LLM_ISA_BEST + 1));
    llm_weight w;
    memset(&w, 0, sizeof w);
    w.type = type->type;
    w.rows = rows;
    w.cols = blocks * type->block_values;
    size_t bytes = (size_t)(rows * blocks) * (size_t)type->block_bytes,
           count = (size_t)(rows * w.cols);
    uint8_t *weights = get_memory(bytes), *packed = get_memory(bytes);
    float *values = get_memory(count * sizeof(float)),
          *x = get_memory((size_t)(n * w.cols) * sizeof(float));
    for (size_t i = 0; i < bytes; i++) weights[i] = data[4 + i % (size - 4)];
    for (int64_t i = 0; i < n * w.cols; i++)
        x[i] = (float)((i * 7 + data[4 + (size_t)i % (size - 4)]) % 23 - 11) * 0.1f;
    type->unpack(weights, values, (int64_t)count);
    llm_pack(type->type, values, packed, (int64_t)count);
    type->unpack(packed, values, (int64_t)count);
    float *plain = get_memory((size_t)(n * rows) * sizeof(float)),
          *packed_out = get_memory((size_t)(n * rows) * sizeof(float));
    multiply(isa, false, &w, weights, x, (int)n, plain);
    if (isa != LLM_ISA_REFERENCE) { /* the reference has no layout of its own */
        multiply(isa, true, &w, weights, x, (int)n, packed_out);
        check_same(plain, packed_out, n * rows);
    }
    free(plain), free(packed_out);
    /* read the bytes as floats: any value, also NaN and infinity */
    memcpy(values, weights, bytes < count * sizeof(float) ? bytes : count * sizeof(float));
    llm_pack(type->type, values, packed, (int64_t)count);
    type->unpack(packed, values, (int64_t)count);
    free(weights), free(packed), free(values), free(x);
    return 0;
}
