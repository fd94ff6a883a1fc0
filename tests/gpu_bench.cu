/* gpu_bench.cu - compares the kernels of llm.cu with the limits of the GPU. tests/gpu_report.sh
 * builds and runs it:
 *
 *     gpu_bench [ceilings|host|layers|matmul|attention]... (default: all)
 *
 * It measures how fast the device copies its own memory and how fast cuBLAS multiplies bf16
 * matrices, then runs each operation and prints its share of these limits, as rows of a Markdown
 * table with three columns. Compiled with WITHOUT_CUBLAS, it runs without cuBLAS. Compiled as C++
 * with LLM_EMULATED, it runs tiny sizes on the emulated device, to test the program itself. */
#include "llm.h"
#include "../models/quantize.h"
#include "ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#ifdef LLM_EMULATED
static const int SCALE = 32; /* batches and contexts are divided by this */
static const int DIM = 256, HIDDEN = 512; /* multiples of 256, the block size of q4_K */
static llm_backend *open_device(const llm_gpu_options *o, llm_error *err) {
    return llm_emulated_backend(o, err);
}
#else
#ifndef WITHOUT_CUBLAS
#include <cublas_v2.h>
#endif
#include <cuda_runtime.h>
static const int SCALE = 1, DIM = 4096, HIDDEN = 14336; /* the sizes of Llama-3.1-8B */
static llm_backend *open_device(const llm_gpu_options *o, llm_error *err) {
    return llm_cuda_backend(o, err);
}
#endif

/* limits: bytes (read and written) and operations per second; 0: not measured */
static double copy_rate = 0, matrix_rate = 0;

static void die(const char *what) {
    fprintf(stderr, "gpu_bench: %s\n", what);
    exit(1);
}

static void row(const char *what, const char *figure, double share, const char *of) {
    if (share > 0) printf("| %s | %s | %.0f %% of %s |\n", what, figure, 100 * share, of);
    else printf("| %s | %s | |\n", what, figure);
    fflush(stdout);
}

static const char *text(const char *format, double a, double b = 0) {
    static char buffers[8][128];
    static int next;
    char *buffer = buffers[next++ % 8];
    snprintf(buffer, sizeof buffers[0], format, a, b);
    return buffer;
}

static uint64_t random_state = 88172645463325252ull;
static uint64_t random_u64() {
    random_state ^= random_state >> 12, random_state ^= random_state << 25,
        random_state ^= random_state >> 27;
    return random_state * 2685821657736338717ull;
}
static std::vector<float> random_floats(size_t n) {
    std::vector<float> x(n);
    for (float &v : x) v = (float)(random_u64() >> 40) / 8388608.0f - 1.0f;
    return x;
}

/* ---- Limits, and cuBLAS ---------------------------------------------------------------------- */

#ifndef LLM_EMULATED
static void check(cudaError_t e) {
    if (e) die(cudaGetErrorString(e));
}

/* Seconds per run of `work`, the best of five rounds of `times` runs, measured with events. */
template <class F> static double device_seconds(int times, F work) {
    cudaEvent_t start, end;
    check(cudaEventCreate(&start)), check(cudaEventCreate(&end));
    double best = INFINITY;
    for (int round = 0; round < 6; round++) { /* the first round warms up */
        check(cudaEventRecord(start));
        for (int i = 0; i < times; i++) work(i);
        check(cudaEventRecord(end));
        check(cudaEventSynchronize(end));
        float milliseconds;
        check(cudaEventElapsedTime(&milliseconds, start, end));
        if (round) best = std::min(best, milliseconds * 1e-3 / times);
    }
    cudaEventDestroy(start), cudaEventDestroy(end);
    return best;
}

#ifdef WITHOUT_CUBLAS
static double cublas_seconds(int, int, int, int) { return 0; }
static double cublas_matrix_rate() { return 0; }
#else
/* random signs and fractions, one exponent */
__global__ static void fill_kernel(uint16_t *x, size_t n, int exponent) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t r = (uint32_t)i * 2654435761u;
        r ^= r >> 15, r *= 2246822519u, r ^= r >> 13;
        x[i] = (uint16_t)((r & 0x83ff) | exponent);
    }
}

static void must_cublas(cublasStatus_t status, const char *what) {
    if (status != CUBLAS_STATUS_SUCCESS) die(what);
}

/* f16 or bf16: (n, cols) times (rows, cols) transposed, over several copies of the weights, which
 * do not fit in the L2 cache. */
static double cublas_seconds_of(cudaDataType type, int n, int rows, int cols, int copies) {
    uint16_t *w, *x, *y;
    size_t one_weight = (size_t)rows * cols;
    check(cudaMalloc(&w, 2 * one_weight * copies)), check(cudaMalloc(&x, (size_t)2 * n * cols)),
        check(cudaMalloc(&y, (size_t)2 * n * rows));
    fill_kernel<<<1024, 256>>>(w, one_weight * copies, 0x3800);
    fill_kernel<<<1024, 256>>>(x, (size_t)n * cols, 0x3800);
    cublasHandle_t handle;
    must_cublas(cublasCreate(&handle), "cublasCreate failed");
    float one = 1, zero = 0;
    double s = device_seconds(4 * copies, [&](int i) {
        must_cublas(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, rows, n, cols, &one,
                                 w + one_weight * (i % copies), type, cols, x, type, cols, &zero, y,
                                 type, rows, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                    "cublasGemmEx failed");
    });
    cublasDestroy(handle);
    check(cudaFree(w)), check(cudaFree(x)), check(cudaFree(y));
    return s;
}
static double cublas_seconds(int n, int rows, int cols, int copies) {
    return cublas_seconds_of(CUDA_R_16F, n, rows, cols, copies);
}
static double cublas_matrix_rate() {
    const int n = 8192;
    return 2.0 * n * n * n / cublas_seconds_of(CUDA_R_16BF, n, n, n, 2);
}
#endif

static void measure_ceilings(bool show) {
    size_t bytes = (size_t)2 << 30;
    char *a, *b;
    check(cudaMalloc(&a, bytes)), check(cudaMalloc(&b, bytes));
    check(cudaMemset(a, 1, bytes));
    copy_rate = 2.0 * (double)bytes / device_seconds(5, [&](int) {
                    check(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice));
                });
    check(cudaFree(a)), check(cudaFree(b));
    matrix_rate = cublas_matrix_rate();
    if (!show) return;
    row("copy of 2 GiB, device to device", text("%.2f TB/s (read and written)", copy_rate * 1e-12),
        0, "");
    if (matrix_rate)
        row("cuBLAS, bf16, 8192 x 8192 x 8192", text("%.0f TFLOP/s", matrix_rate * 1e-12), 0, "");
    else row("cuBLAS", "not available: no limit for arithmetic", 0, "");
}
#else
static void measure_ceilings(bool show) {
    if (show) row("the emulated device", "no speed to measure", 0, "");
}
static double cublas_seconds(int, int, int, int) { return 0; }
#endif

/* ---- Operations, through the seam ------------------------------------------------------------ */

static llm_backend *backend;

static void must(bool fine, const llm_error *err) {
    if (!fine) die(err->message);
}

static void *allocate(size_t bytes, const void *data = nullptr) {
    llm_error err;
    void *p = backend->allocate(backend->context, bytes, "a benchmark", &err);
    must(p != nullptr, &err);
    if (data) must(backend->upload(backend->context, p, data, bytes, &err), &err);
    return p;
}

/* A batch of sequences with `context` positions each, the last `count` of them in this step. The
 * blocks lie in random order, or in sequence. */
struct workload {
    llm_batch batch;
    std::vector<int32_t> tokens, positions, slots, seq_first, seq_count, tables, rows;
    int n_blocks;
};

static void make_workload(workload &w, int n_sequences, int context, int count, int block_size,
                          bool paged) {
    int stride = (context + block_size - 1) / block_size;
    w.n_blocks = n_sequences * stride;
    w.tables.resize((size_t)w.n_blocks);
    for (int i = 0; i < w.n_blocks; i++) w.tables[(size_t)i] = i;
    for (int i = w.n_blocks; paged && i > 1; i--)
        std::swap(w.tables[(size_t)i - 1], w.tables[(size_t)(random_u64() % (uint64_t)i)]);
    for (int s = 0; s < n_sequences; s++) {
        w.seq_first.push_back((int32_t)w.tokens.size()), w.seq_count.push_back(count);
        for (int p = context - count; p < context; p++) {
            w.tokens.push_back(0), w.positions.push_back(p);
            w.slots.push_back(w.tables[(size_t)(s * stride + p / block_size)] * block_size +
                              p % block_size);
        }
        w.rows.push_back((int32_t)w.tokens.size() - 1);
    }
    memset(&w.batch, 0, sizeof w.batch);
    w.batch.n_tokens = (int)w.tokens.size(), w.batch.n_sequences = n_sequences,
    w.batch.n_logits = n_sequences;
    w.batch.tokens = w.tokens.data(), w.batch.positions = w.positions.data(),
    w.batch.slots = w.slots.data();
    w.batch.seq_first = w.seq_first.data(), w.batch.seq_count = w.seq_count.data(),
    w.batch.logit_rows = w.rows.data();
    w.batch.block_tables = w.tables.data(), w.batch.table_stride = stride,
    w.batch.block_size = block_size;
}

/* Seconds per step of the program, the best of several; host_seconds: until the host has launched
 * all of it. */
static double step_seconds(ops *program, const llm_batch *batch, int steps,
                           double *host_seconds = nullptr) {
    llm_error err;
    double best = INFINITY, host = INFINITY;
    llm_limits limits = ops_limits(batch, batch->n_logits);
    llm_program *p = &program->program;
    if (!p->plan) must(backend->prepare(backend->context, p, &limits, &err), &err);
    for (int i = 0; i < steps; i++) {
        double start = llm_seconds();
        must(ops_step(program, backend, batch, &err), &err);
        double asked = llm_seconds();
        must(backend->sync(backend->context, &err), &err);
        if (i < 3 && steps > 3) continue; /* warm-up, including the capture of a graph */
        best = std::min(best, llm_seconds() - start), host = std::min(host, asked - start);
    }
    if (host_seconds) *host_seconds = host;
    return best;
}

/* Load a matrix that repeats 16 random rows. *bytes: its size in a file. */
static llm_weight load_matrix(llm_type type, int rows, int cols, size_t *bytes) {
    const llm_type_info *info = llm_type_find(type);
    if (cols % info->block_values) die("a row is not a whole number of blocks");
    size_t row_bytes = (size_t)(cols / info->block_values) * (size_t)info->block_bytes;
    std::vector<float> values = random_floats((size_t)16 * cols);
    std::vector<char> packed((size_t)rows * row_bytes);
    llm_pack(info->type, values.data(), packed.data(), (int64_t)std::min(rows, 16) * cols);
    for (int r = 16; r < rows; r++)
        memcpy(packed.data() + (size_t)r * row_bytes, packed.data() + (size_t)(r % 16) * row_bytes,
               row_bytes);
    llm_weight w;
    llm_error err;
    memset(&w, 0, sizeof w);
    w.type = type, w.rows = rows, w.cols = cols;
    must(backend->load_weight(backend->context, &w, packed.data(), &err), &err);
    *bytes = packed.size();
    return w;
}

static void measure_matmul(llm_type type, int rows, int cols) {
    const llm_type_info *info = llm_type_find(type);
    const int max_rows = 1024 / SCALE,
              copies = SCALE > 1                                    ? 1
                       : info->block_values > 1 && type != LLM_Q8_0 ? 16
                                                                    : 6,
              repeats = SCALE > 1 ? 1 : 4;
    size_t weight_bytes = 0;
    std::vector<llm_weight> weights((size_t)copies);
    for (llm_weight &w : weights) w = load_matrix(type, rows, cols, &weight_bytes);
    std::vector<float> x = random_floats((size_t)max_rows * cols);
    float *in = (float *)allocate(x.size() * 4, x.data()),
          *out = (float *)allocate((size_t)max_rows * rows * 4);
    static const int counts[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024};
    for (int n : counts) {
        if (n > max_rows) break;
        workload w;
        make_workload(w, n, 1, 1, 16, false); /* a decode step, which the GPU captures as a graph */
        ops *program = ops_new();
        for (int k = 0; k < repeats; k++)
            for (llm_weight &weight : weights)
                ops_matmul(program, in, &weight, nullptr, false, out);
        double s = step_seconds(program, &w.batch, SCALE > 1 ? 1 : 12) / (repeats * copies);
        ops_free(program, backend);
        double other = cublas_seconds(n, rows, cols, 6),
               bytes = (double)weight_bytes + 4.0 * n * (rows + cols), work = 2.0 * n * rows * cols;
        char what[128], figure[128];
        snprintf(what, sizeof what, "matmul %s (%d, %d), %d rows", info->name, rows, cols, n);
        bool by_bytes = !matrix_rate || bytes / copy_rate > work / matrix_rate;
        int used = snprintf(figure, sizeof figure, "%.1f us, %.2f TB/s, %.0f TFLOP/s", 1e6 * s,
                            bytes / s * 1e-12, work / s * 1e-12);
        if (other > 0)
            snprintf(figure + used, sizeof figure - used, "; cuBLAS f16 %.1f us: %.2f x",
                     1e6 * other, other / s);
        row(what, figure,
            !copy_rate ? 0
            : by_bytes ? bytes / s / copy_rate
                       : work / s / matrix_rate,
            by_bytes ? "the copy's bytes/s" : "cuBLAS's bf16 rate");
    }
    for (llm_weight &w : weights) backend->free_weight(backend->context, &w);
    backend->release(backend->context, in), backend->release(backend->context, out);
}

static double attention_seconds(int n_sequences, int context, int count, bool paged) {
    const int heads = 32 / (SCALE > 1 ? 8 : 1), kv = 8 / (SCALE > 1 ? 8 : 1), dim = 128,
              block_size = 16;
    workload w;
    make_workload(w, n_sequences, context, count, block_size, paged);
    llm_attention_shape shape = {heads, kv, dim, 1.0f / sqrtf((float)dim), false, 0};
    llm_cache cache = {LLM_F16, 1, kv, dim, block_size, w.n_blocks, 0, NULL, NULL};
    cache.layer_bytes = (size_t)w.n_blocks * kv * block_size * dim * 2;
    std::vector<uint16_t> halves(cache.layer_bytes / 2);
    /* magnitudes from 1/4 to 1/2 */
    for (uint16_t &h : halves) h = (uint16_t)((random_u64() & 0x83ff) | 0x3400);
    cache.keys = allocate(cache.layer_bytes, halves.data()),
    cache.values = allocate(cache.layer_bytes, halves.data());
    std::vector<float> queries = random_floats((size_t)w.batch.n_tokens * heads * dim);
    float *q = (float *)allocate(queries.size() * 4, queries.data()),
          *out = (float *)allocate(queries.size() * 4);
    int repeats = SCALE > 1 ? 1 : 20;
    ops *program = ops_new();
    for (int i = 0; i < repeats; i++) ops_attention(program, &shape, q, &cache, 0, out);
    double s = step_seconds(program, &w.batch, SCALE > 1 ? 1 : 8) / repeats;
    ops_free(program, backend);
    backend->release(backend->context, cache.keys),
        backend->release(backend->context, cache.values);
    backend->release(backend->context, q), backend->release(backend->context, out);
    return s;
}

static void measure_attention() {
    static const int contexts[] = {1024, 4096, 16384};
    for (int c : contexts) {
        int context = c / SCALE, sequences = SCALE > 1 ? 2 : 64;
        double paged = attention_seconds(sequences, context, 1, true),
               contiguous = attention_seconds(sequences, context, 1, false);
        double bytes = 2.0 * sequences * context * (SCALE > 1 ? 1 : 8) * 128 * 2;
        char what[128], figure[128];
        snprintf(what, sizeof what, "decode attention, %d sequences of %d, 32/8 heads of 128",
                 sequences, context);
        snprintf(figure, sizeof figure, "%.1f us, %.2f TB/s; blocks in order %.1f us: %.3f x",
                 1e6 * paged, bytes / paged * 1e-12, 1e6 * contiguous, contiguous / paged);
        row(what, figure, copy_rate ? bytes / paged / copy_rate : 0, "the copy's bytes/s");
    }
    for (int c : contexts) {
        int context = c / SCALE;
        double s = attention_seconds(1, context, context, true),
               work = 4.0 * context * ((double)context + 1) / 2 * (SCALE > 1 ? 4 : 32) * 128;
        char what[128];
        snprintf(what, sizeof what, "prefill attention, %d tokens, causal, 32/8 heads of 128",
                 context);
        row(what, text("%.2f ms, %.0f TFLOP/s", 1e3 * s, work / s * 1e-12),
            matrix_rate ? work / s / matrix_rate : 0, "cuBLAS's bf16 rate");
    }
}

/* Host time for a step of 256 sequences and 28 layers. The operations are tiny, so that the
 * device's time does not count. */
static void measure_host() {
    const int n = 256 / SCALE, layers = 28 / (SCALE > 1 ? 14 : 1), dim = 64;
    workload w;
    make_workload(w, n, 17, 1, 16, true);
    std::vector<float> values = random_floats((size_t)dim * dim);
    llm_weight weight;
    memset(&weight, 0, sizeof weight);
    weight.type = LLM_F32, weight.rows = weight.cols = dim;
    llm_error err;
    must(backend->load_weight(backend->context, &weight, values.data(), &err), &err);
    float *x = (float *)allocate((size_t)n * dim * 4), *y = (float *)allocate((size_t)n * dim * 4);
    float *norm = (float *)allocate((size_t)dim * 4, values.data());
    llm_attention_shape shape = {2, 1, 32, 0.18f, false, 0};
    llm_cache cache = {LLM_F16, 1,   1, 32, 16, w.n_blocks, (size_t)w.n_blocks * 16 * 32 * 2,
                       NULL,    NULL};
    cache.keys = allocate(cache.layer_bytes), cache.values = allocate(cache.layer_bytes);
    float *frequencies = (float *)allocate(16 * 4, values.data()),
          *angles = (float *)allocate((size_t)n * 32 * 4);
    ops *o = ops_new();
    ops_rope_angles(o, frequencies, 32, 1.0f, angles);
    for (int layer = 0; layer < layers; layer++) {
        ops_rmsnorm(o, x, norm, dim, 1e-5f, y);
        for (int k = 0; k < 3; k++) ops_matmul(o, y, &weight, NULL, false, x);
        ops_rope_and_store(o, &shape, LLM_ROPE_HALVES, 32, angles, NULL, NULL, 1e-5f, x, y, y,
                           &cache, 0);
        ops_attention(o, &shape, x, &cache, 0, y);
        ops_matmul(o, y, &weight, NULL, true, x);
        ops_rmsnorm(o, x, norm, dim, 1e-5f, y);
        for (int k = 0; k < 2; k++) ops_matmul(o, y, &weight, NULL, false, x);
        ops_swiglu(o, x, y, dim, x);
        ops_matmul(o, x, &weight, NULL, true, y);
    }
    double host = 0, all = step_seconds(o, &w.batch, SCALE > 1 ? 4 : 200, &host);
    ops_free(o, backend);
    char what[128];
    snprintf(
        what, sizeof what,
        "host time per step, %d sequences, %d layers (until launched; until done)",
        n, layers);
    row(what, text("%.0f us; %.0f us", 1e6 * host, 1e6 * all), 0, "");
    void *memory[] = {x, y, norm, cache.keys, cache.values, frequencies, angles};
    backend->free_weight(backend->context, &weight);
    for (void *p : memory) backend->release(backend->context, p);
}

/* A layer of Llama-3.1-8B for one sequence at position 1024, repeated within one step, as in a
 * decode step with its launches. Returns the output, for comparison. */
static std::vector<float> measure_layer(llm_type type, bool fused, bool overlap, const char *what) {
    llm_backend *usual = backend;
    llm_gpu_options options = llm_gpu_defaults();
    llm_error err;
    options.fused = fused, options.overlap = overlap;
    backend = open_device(&options, &err);
    must(backend != nullptr, &err);
    const int dim = DIM, hidden = HIDDEN, head_dim = 128, heads = dim / head_dim,
              kv = heads / 4 ? heads / 4 : 1;
    const int context = 1024 / SCALE, repeats = SCALE > 1 ? 1 : 16,
              rows[] = {dim, kv * head_dim, kv * head_dim, dim, hidden, hidden, dim};
    workload w;
    random_state = 1;
    make_workload(w, 1, context, 1, 16, true);
    llm_weight weights[7];
    size_t bytes = 0, one = 0;
    for (int i = 0; i < 7; i++, bytes += one)
        weights[i] = load_matrix(type, rows[i], i == 6 ? hidden : dim, &one);
    llm_attention_shape shape = {heads, kv, head_dim, 1.0f / sqrtf((float)head_dim), false, 0};
    llm_cache cache = {
        LLM_F16, 1,   kv, head_dim, 16, w.n_blocks, (size_t)w.n_blocks * kv * 16 * head_dim * 2,
        NULL,    NULL};
    std::vector<uint16_t> halves(cache.layer_bytes / 2);
    for (uint16_t &h : halves) h = (uint16_t)((random_u64() & 0x83ff) | 0x3400);
    cache.keys = allocate(cache.layer_bytes, halves.data()),
    cache.values = allocate(cache.layer_bytes, halves.data());
    std::vector<float> start = random_floats((size_t)8 * hidden), norms((size_t)hidden, 0.01f),
                       out((size_t)dim);
    float *x = (float *)allocate(start.size() * 4), *piece[7],
          *norm = (float *)allocate(norms.size() * 4, norms.data());
    for (float *&p : piece) p = (float *)allocate((size_t)8 * hidden * 4, start.data());
    float *angles = (float *)allocate((size_t)8 * head_dim * 4, start.data());
    ops *o = ops_new();
    for (int i = 0; i < repeats; i++) {
        ops_rmsnorm(o, x, norm, dim, 1e-5f, piece[0]);
        for (int k = 0; k < 3; k++) ops_matmul(o, piece[0], &weights[k], NULL, false, piece[k + 1]);
        ops_rope_and_store(o, &shape, LLM_ROPE_HALVES, head_dim, angles, NULL, NULL, 1e-5f,
                           piece[1], piece[2], piece[3], &cache, 0);
        ops_attention(o, &shape, piece[1], &cache, 0, piece[4]);
        ops_matmul(o, piece[4], &weights[3], NULL, true, x);
        ops_rmsnorm(o, x, norm, dim, 1e-5f, piece[0]);
        for (int k = 4; k < 6; k++) ops_matmul(o, piece[0], &weights[k], NULL, false, piece[k + 1]);
        ops_swiglu(o, piece[5], piece[6], hidden, piece[5]);
        ops_matmul(o, piece[5], &weights[6], NULL, true, x);
    }
    double s = 0;
    /* round 1 computes the output that is compared; it starts from the same x in every variant */
    for (int round = 0; round < 2; round++) {
        must(backend->upload(backend->context, x, start.data(), start.size() * 4, &err), &err);
        double seconds = step_seconds(o, &w.batch, round || SCALE > 1 ? 1 : 12);
        if (!round) s = seconds / repeats;
    }
    ops_free(o, backend);
    must(backend->download(backend->context, out.data(), x, out.size() * 4, &err), &err);
    double all = (double)bytes + 2.0 * context * kv * head_dim * 2;
    char name[128];
    snprintf(name, sizeof name, "a layer of Llama-3.1-8B, %s, one token, %s",
             llm_type_find(type)->name, what);
    row(name, text("%.1f us, %.2f TB/s", 1e6 * s, all / s * 1e-12),
        copy_rate ? all / s / copy_rate : 0, "the copy's bytes/s");
    for (llm_weight &weight : weights) backend->free_weight(backend->context, &weight);
    void *memory[] = {cache.keys, cache.values, x, norm, angles};
    for (void *p : memory) backend->release(backend->context, p);
    for (float *p : piece) backend->release(backend->context, p);
    llm_backend_free(backend);
    backend = usual;
    return out;
}

static int measure_layers() {
    int wrong = 0;
    static const llm_type types[] = {LLM_Q4_0, LLM_F16, LLM_Q4_K};
    for (llm_type type : types) {
        measure_layer(type, false, false, "one kernel for each operation");
        std::vector<float> usual = measure_layer(type, true, false, "fused");
        std::vector<float> overlap = measure_layer(type, true, true, "fused, kernels overlap");
        bool same = !memcmp(usual.data(), overlap.data(), usual.size() * 4);
        row("... overlapping kernels give the same bits", same ? "yes" : "NO: there is a race",
            0, "");
        wrong += !same;
    }
    return wrong;
}

/* Whether this part was requested. */
static bool asked(int argc, char **argv, const char *part) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], part)) return true;
    return argc < 2;
}

int main(int argc, char **argv) {
    llm_error err;
    int wrong = 0;
    measure_ceilings(asked(argc, argv, "ceilings"));
    backend = open_device(NULL, &err);
    if (!backend) die(err.message);
    if (asked(argc, argv, "host")) measure_host();
    if (asked(argc, argv, "layers")) wrong += measure_layers();
    static const llm_type types[] = {LLM_Q4_0, LLM_F16, LLM_Q4_K, LLM_Q8_0};
    for (llm_type type : types)
        /* a feed-forward matrix */
        if (asked(argc, argv, "matmul")) measure_matmul(type, HIDDEN, DIM);
    if (asked(argc, argv, "attention")) measure_attention();
    must(backend->sync(backend->context, &err), &err);
    llm_backend_free(backend);
    return wrong;
}
