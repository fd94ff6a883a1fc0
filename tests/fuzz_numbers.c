/* libFuzzer: any bytes as weights of any type. They are unpacked, multiplied by every set of kernels that the machine has, in
 * one piece and row by row, which must give the same bits, and packed again.
 *
 * Input: type, rows, blocks in a row, rows of x (a byte each), then the weights, repeated as often as they are needed. */
#define LLM_IMPLEMENTATION
#include "../llm.h"

static void *get_memory(size_t bytes) { /* of exact size, so that a sanitizer sees a read past the end */
    void *p = malloc(bytes);
    if (!p) abort();
    return p;
}

static void multiply(llm_isa isa, const llm_weight *matrix, const void *data, const float *x, int n) {
    llm_error err;
    llm_limits limits;
    memset(&limits, 0, sizeof limits);
    limits.max_tokens = n;
    limits.max_sequences = limits.max_context = limits.n_heads = limits.head_dim = 1;
    limits.max_cols = matrix->cols;
    size_t count = (size_t)n * (size_t)matrix->rows;
    float *together = get_memory(count * sizeof(float)), *single = get_memory(count * sizeof(float));
    llm_backend *b = llm_cpu_backend(1, isa, &err);
    if (!b || !b->reserve(b->context, &limits, &err)) abort();
    llm_weight w = *matrix;
    if (!b->load_weight(b->context, &w, data, &err)) abort();
    b->matmul(b->context, x, &w, NULL, n, false, together);
    for (int i = 0; i < n; i++) b->matmul(b->context, x + i * w.cols, &w, NULL, 1, false, single + i * w.rows);
    /* a NaN may have any bits */
    for (size_t i = 0; i < count; i++)
        if (memcmp(together + i, single + i, sizeof(float)) && !(isnan(together[i]) && isnan(single[i]))) abort();
    b->free_weight(b->context, &w);
    if (!b->sync(b->context, &err)) abort();
    llm_backend_free(b);
    free(together), free(single);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 5) return 0;
    int n_types = 0;
    while (llm_type_at(n_types)) n_types++;
    const llm_type_info *type = llm_type_at(data[0] % n_types);
    int64_t rows = data[1] % 40 + 1, blocks = data[2] % (type->block_values == 1 ? 70 : 5) + 1, n = data[3] % 10 + 1;
    llm_weight w;
    memset(&w, 0, sizeof w);
    w.type = type->type;
    w.rows = rows;
    w.cols = blocks * type->block_values;
    size_t bytes = (size_t)(rows * blocks) * (size_t)type->block_bytes, count = (size_t)(rows * w.cols);
    uint8_t *weights = get_memory(bytes), *packed = get_memory(bytes);
    float *values = get_memory(count * sizeof(float)), *x = get_memory((size_t)(n * w.cols) * sizeof(float));
    for (size_t i = 0; i < bytes; i++) weights[i] = data[4 + i % (size - 4)];
    for (int64_t i = 0; i < n * w.cols; i++) x[i] = (float)((i * 7 + data[4 + (size_t)i % (size - 4)]) % 23 - 11) * 0.1f;
    type->unpack(weights, values, (int64_t)count);
    type->pack(values, packed, (int64_t)count);
    type->unpack(packed, values, (int64_t)count);
    for (int isa = LLM_ISA_REFERENCE; isa <= LLM_ISA_BEST; isa++) multiply((llm_isa)isa, &w, weights, x, (int)n);
    memcpy(values, weights, bytes < count * sizeof(float) ? bytes : count * sizeof(float)); /* and any floats are packed */
    type->pack(values, packed, (int64_t)count);
    type->unpack(packed, values, (int64_t)count);
    free(weights), free(packed), free(values), free(x);
    return 0;
}
