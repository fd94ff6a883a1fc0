/* gpu_bench.cu - compares the kernels of llm.cu with the limits of the GPU. tests/gpu_report.sh
 * builds and runs it:
 *
 *     gpu_bench [ceilings|host|layers|matmul|attention|rows|sampling]... (default: all)
 *     gpu_bench one matmul|attention|prompt|rmsnorm|gate|sampling [TYPE] [ROWS]
 *
 * It measures how fast the device copies its own memory and how fast cuBLAS multiplies bf16
 * matrices, then runs each operation and prints its share of these limits, as rows of a Markdown
 * table: operation, shape, figure, share. The first two are those of tests/gpu_launches.cpp, so
 * that docs/gpu.md can show a forecast beside the figure. `one` runs one operation a few times,
 * launch by launch, and nothing like it before or after: for a profiler. Compiled with
 * WITHOUT_CUBLAS, it runs without cuBLAS. Compiled as C++ with LLM_EMULATED, it runs tiny sizes on
 * the emulated device, to test the program itself. */
#include "llm.h"
#include "../models/quantize.h"
#include "ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <map>
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

static void row(const char *what, const char *shape, const char *figure, double share,
                const char *of) {
    if (share > 0)
        printf("| %s | %s | %s | %.0f %% of %s |\n", what, shape, figure, 100 * share, of);
    else printf("| %s | %s | %s | |\n", what, shape, figure);
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
    static std::map<std::array<int, 3>, double> known; /* every type has the same shapes */
    double &s = known[{n, rows, cols}];
    return s > 0 ? s : s = cublas_seconds_of(CUDA_R_16F, n, rows, cols, copies);
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
    row("copy", "2 GiB, device to device",
        text("%.2f TB/s (read and written)", copy_rate * 1e-12), 0, "");
    if (matrix_rate)
        row("cuBLAS, bf16", "8192 x 8192 x 8192", text("%.0f TFLOP/s", matrix_rate * 1e-12), 0, "");
    else row("cuBLAS", "", "not available: no limit for arithmetic", 0, "");
}
#else
static void measure_ceilings(bool show) {
    if (show) row("the emulated device", "", "no speed to measure", 0, "");
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

/* A batch of sequences with `context` positions each (the last sequence: `last`, if it is not 0),
 * the last `count` of them in this step. The blocks lie in random order, or in sequence. */
struct workload {
    llm_batch batch;
    std::vector<int32_t> tokens, positions, slots, seq_first, seq_count, tables, rows;
    int n_blocks;
};

static void make_workload(workload &w, int n_sequences, int context, int count, int block_size,
                          bool paged, int last = 0) {
    int stride = (std::max(context, last) + block_size - 1) / block_size;
    int own = (context + block_size - 1) / block_size; /* blocks of all sequences but the last */
    w.n_blocks = (n_sequences - 1) * own + (last ? stride : own);
    std::vector<int32_t> blocks((size_t)w.n_blocks);
    for (int i = 0; i < w.n_blocks; i++) blocks[(size_t)i] = i;
    for (int i = w.n_blocks; paged && i > 1; i--)
        std::swap(blocks[(size_t)i - 1], blocks[(size_t)(random_u64() % (uint64_t)i)]);
    w.tables.assign((size_t)n_sequences * (size_t)stride, 0);
    for (int i = 0; i < w.n_blocks; i++) {
        int s = std::min(i / own, n_sequences - 1);
        w.tables[(size_t)s * (size_t)stride + (size_t)(i - s * own)] = blocks[(size_t)i];
    }
    for (int s = 0; s < n_sequences; s++) {
        if (s == n_sequences - 1 && last) context = last;
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

/* Matrices of Llama-3.1-8B; the last two are q, k and v together, and the output matrix. */
static const int PRODUCTS[][2] = {{DIM, DIM},
                                  {HIDDEN, DIM},
                                  {DIM, HIDDEN},
                                  {DIM + DIM / 2, DIM},
                                  {SCALE > 1 ? 512 : 128256, DIM}};

static void measure_matmul(llm_type type, int rows, int cols) {
    const llm_type_info *info = llm_type_find(type);
    const int max_rows = 4096 / (SCALE > 1 ? 256 : 1), repeats = SCALE > 1 ? 1 : 2;
    double size = (double)rows * cols / info->block_values * info->block_bytes;
    /* more bytes than three L2 caches */
    const int copies = SCALE > 1 ? 1 : std::max(1, std::min(16, (int)(2e8 / size) + 1));
    size_t weight_bytes = 0;
    std::vector<llm_weight> weights((size_t)copies);
    for (llm_weight &w : weights) w = load_matrix(type, rows, cols, &weight_bytes);
    std::vector<float> x = random_floats((size_t)max_rows * cols);
    float *in = (float *)allocate(x.size() * 4, x.data()),
          *out = (float *)allocate((size_t)max_rows * rows * 4);
    static const int counts[] = {1, 2, 4, 8, 16, 32, 48, 64, 128, 512, 4096};
    for (int n : counts) {
        if (n > max_rows) break;
        workload w;
        make_workload(w, n, 1, 1, 16, false); /* a decode step, which the GPU captures as a graph */
        ops *program = ops_new();
        for (int k = 0; k < repeats; k++)
            for (llm_weight &weight : weights)
                ops_matmul(program, in, &weight, nullptr, false, out);
        double s = step_seconds(program, &w.batch, SCALE > 1 ? 1 : n > 512 ? 6 : 10) /
                   (repeats * copies);
        ops_free(program, backend);
        double other = cublas_seconds(n, rows, cols, std::max(1, std::min(6, copies))),
               bytes = (double)weight_bytes + 4.0 * n * (rows + cols), work = 2.0 * n * rows * cols;
        char what[64], shape[64], figure[128];
        snprintf(what, sizeof what, "product %s", info->name);
        snprintf(shape, sizeof shape, "%d x %d, %d rows", rows, cols, n);
        bool by_bytes = !matrix_rate || bytes / copy_rate > work / matrix_rate;
        int used = snprintf(figure, sizeof figure, "%.1f us, %.2f TB/s, %.0f TFLOP/s", 1e6 * s,
                            bytes / s * 1e-12, work / s * 1e-12);
        if (other > 0)
            snprintf(figure + used, sizeof figure - used, "; cuBLAS f16 %.1f us: %.2f x",
                     1e6 * other, other / s);
        row(what, shape, figure,
            !copy_rate ? 0
            : by_bytes ? bytes / s / copy_rate
                       : work / s / matrix_rate,
            by_bytes ? "the copy's bytes/s" : "cuBLAS's bf16 rate");
    }
    for (llm_weight &w : weights) backend->free_weight(backend->context, &w);
    backend->release(backend->context, in), backend->release(backend->context, out);
}

struct attention_case {
    int sequences, context, last, count; /* as make_workload has them */
    int head_dim, group;                 /* group: query heads per kv head; 8 kv heads */
};

static double attention_seconds(const attention_case &a, bool paged, int steps = 8) {
    const int kv = 8 / (SCALE > 1 ? 8 : 1), heads = kv * a.group, dim = a.head_dim;
    workload w;
    make_workload(w, a.sequences, a.context, a.count, 16, paged, a.last);
    llm_attention_shape shape = {heads, kv, dim, 1.0f / sqrtf((float)dim), false, 0, 0, 0};
    llm_cache cache;
    memset(&cache, 0, sizeof cache);
    cache.type = LLM_F16, cache.n_layers = 1, cache.n_kv_heads = kv, cache.head_dim = dim;
    cache.block_size = 16, cache.n_blocks = w.n_blocks;
    cache.layer_bytes = (size_t)w.n_blocks * kv * 16 * dim * 2;
    /* magnitudes from 1/4 to 1/2; the same megabyte again and again */
    std::vector<uint16_t> halves(cache.layer_bytes / 2);
    for (size_t i = 0; i < halves.size(); i++)
        halves[i] = i < 1 << 19 ? (uint16_t)((random_u64() & 0x83ff) | 0x3400)
                                : halves[i - (1 << 19)];
    cache.keys = allocate(cache.layer_bytes, halves.data()),
    cache.values = allocate(cache.layer_bytes, halves.data());
    std::vector<float> queries = random_floats((size_t)w.batch.n_tokens * heads * dim);
    size_t rows = (size_t)llm_rounded_rows(w.batch.n_tokens);
    float *q = (float *)allocate(rows * heads * dim * 4),
          *out = (float *)allocate(rows * heads * dim * 4);
    llm_error err;
    must(backend->upload(backend->context, q, queries.data(), queries.size() * 4, &err), &err);
    int repeats = SCALE > 1 || steps == 1 ? 1 : 10;
    ops *program = ops_new();
    for (int i = 0; i < repeats; i++) ops_attention(program, &shape, q, &cache, 0, out);
    double s = step_seconds(program, &w.batch, SCALE > 1 ? 1 : steps) / repeats;
    ops_free(program, backend);
    backend->release(backend->context, cache.keys),
        backend->release(backend->context, cache.values);
    backend->release(backend->context, q), backend->release(backend->context, out);
    return s;
}

static void group_text(char *to, size_t bytes, int group) {
    to[0] = 0; /* the usual group, 4, is not named */
    if (group != 4) snprintf(to, bytes, ", groups of %d", group);
}

static void measure_attention() {
    static const struct {
        const char *name;
        int sequences, context, last;
    } decode[] = {{"one sequence of 32k", 1, 32768, 0},
                  {"one sequence of 128k", 1, 131072, 0},
                  {"64 sequences of 4k", 64, 4096, 0},
                  {"63 sequences of 512, one of 16k", 64, 512, 16384}};
    for (int head_dim : {64, 128})
        for (int group : {4, 1, 8})
            for (auto &d : decode) {
                attention_case a = {SCALE > 1 ? std::min(d.sequences, 2) : d.sequences,
                                    d.context / SCALE, d.last / SCALE, 1, head_dim, group};
                if (SCALE > 1 && (d.context > 32768 || head_dim == 64 || group > 4)) continue;
                double s = attention_seconds(a, true), positions = (double)a.sequences * a.context;
                if (a.last) positions += a.last - a.context;
                double bytes = 4.0 * positions * (SCALE > 1 ? 1 : 8) * head_dim;
                char shape[96], groups[32];
                group_text(groups, sizeof groups, group);
                snprintf(shape, sizeof shape, "heads of %d, %s%s", head_dim, d.name, groups);
                row("attention, decode", shape,
                    text("%.1f us, %.2f TB/s", 1e6 * s, bytes / s * 1e-12),
                    copy_rate ? bytes / s / copy_rate : 0, "the copy's bytes/s");
            }
    for (int head_dim : {64, 128})
        for (int group : {4, 1, 8})
            for (int tokens : {1024, 4096, 16384}) {
                if (group != 4 && tokens != 4096) continue;
                int n = tokens / SCALE;
                if (SCALE > 1 && (head_dim == 64 || n > 200)) continue;
                double s = attention_seconds({1, n, 0, n, head_dim, group}, true),
                       heads = (SCALE > 1 ? 1.0 : 8.0) * group,
                       work = 4.0 * n * ((double)n + 1) / 2 * heads * head_dim;
                char shape[96], groups[32];
                group_text(groups, sizeof groups, group);
                snprintf(shape, sizeof shape, "heads of %d, %d tokens%s", head_dim, n, groups);
                row("attention of a prompt", shape,
                    text("%.1f us, %.0f TFLOP/s", 1e6 * s, work / s * 1e-12),
                    matrix_rate ? work / s / matrix_rate : 0, "cuBLAS's bf16 rate");
            }
}

/* rmsnorm and the gate; `only`: one of them, a few launches. */
static void measure_rows(const char *only = nullptr, int only_rows = 0) {
    for (int n : {1, 64, 512}) {
        if (only && n != only_rows) continue;
        if (SCALE > 1) n = std::min(n, 2);
        workload w;
        make_workload(w, n, 1, 1, 16, false);
        std::vector<float> values = random_floats((size_t)std::max(n, 8) * HIDDEN);
        float *x = (float *)allocate(values.size() * 4, values.data()),
              *y = (float *)allocate(values.size() * 4, values.data());
        int repeats = SCALE > 1 || only ? 2 : 100, steps = SCALE > 1 || only ? 1 : 8;
        for (int gate = 0; gate < 2; gate++) {
            if (only && strcmp(only, gate ? "gate" : "rmsnorm")) continue;
            ops *o = ops_new();
            for (int i = 0; i < repeats; i++)
                if (gate) ops_swiglu(o, x, y, HIDDEN, y);
                else ops_rmsnorm(o, x, x, DIM, 1e-5f, y);
            double s = step_seconds(o, &w.batch, steps) / repeats,
                   bytes = 4.0 * n * (gate ? 3 * HIDDEN : 2 * DIM);
            ops_free(o, backend);
            row(gate ? "gate" : "rmsnorm", text("%.0f columns, %.0f rows", gate ? HIDDEN : DIM, n),
                text("%.1f us, %.2f TB/s", 1e6 * s, bytes / s * 1e-12), 0, "");
        }
        backend->release(backend->context, x), backend->release(backend->context, y);
    }
}

/* Draw tokens from rows of 128256 logits. The time includes what the host does. */
static void measure_sampling(bool few = false) {
    const int vocab = SCALE > 1 ? 4096 : 128256;
    for (int n : {1, 64}) {
        if (SCALE > 1) n = std::min(n, 2);
        std::vector<float> values = random_floats((size_t)n * vocab);
        for (float &v : values) v *= 8;
        float *logits = (float *)allocate(values.size() * 4, values.data());
        for (float top_p : {1.0f, 0.9f}) {
            std::vector<llm_draw> draws((size_t)n);
            std::vector<int32_t> ids((size_t)n);
            std::vector<float> logprobs((size_t)n);
            memset(draws.data(), 0, (size_t)n * sizeof draws[0]);
            for (int i = 0; i < n; i++) {
                llm_draw &d = draws[(size_t)i];
                d.row = i, d.random = random_u64(), d.sampling.temperature = 0.8f;
                d.sampling.top_p = top_p, d.sampling.repetition_penalty = 1;
            }
            double best = INFINITY;
            for (int i = 0; i < (SCALE > 1 || few ? 2 : 20); i++) {
                llm_error err;
                double start = llm_seconds();
                must(backend->sample(backend->context, logits, vocab, draws.data(), n, ids.data(),
                                     logprobs.data(), &err),
                     &err);
                best = std::min(best, llm_seconds() - start);
            }
            char shape[96];
            snprintf(shape, sizeof shape, "%d logits, %d rows, %s", vocab, n,
                     top_p < 1 ? "top-p 0.9" : "temperature 0.8");
            double bytes = 4.0 * vocab * n;
            row("sampling", shape,
                text("%.1f us with the host, %.2f TB/s", 1e6 * best, bytes / best * 1e-12), 0, "");
        }
        backend->release(backend->context, logits);
    }
}

/* A few launches of one operation, for a profiler. */
static void run_one(const char *what, const char *type_name, int n) {
    if (!strcmp(what, "matmul")) {
        const llm_type_info *info = llm_type_by_name(type_name);
        if (!info) die("unknown type");
        size_t bytes;
        llm_weight weight = load_matrix(info->type, HIDDEN, DIM, &bytes);
        std::vector<float> x = random_floats((size_t)n * DIM);
        float *in = (float *)allocate(x.size() * 4, x.data()),
              *out = (float *)allocate((size_t)(n + 8) * HIDDEN * 4);
        workload w;
        make_workload(w, n, 1, 1, 16, false);
        for (int i = 0; i < 4; i++) {
            ops *o = ops_new();
            ops_matmul(o, in, &weight, nullptr, false, out);
            step_seconds(o, &w.batch, 1);
            ops_free(o, backend);
        }
        backend->free_weight(backend->context, &weight);
        backend->release(backend->context, in), backend->release(backend->context, out);
    } else if (!strcmp(what, "attention") || !strcmp(what, "prompt")) {
        attention_case a = {1, 4096 / SCALE, 0, 4096 / SCALE, 128, 4};
        /* a small cache: a profiler saves and restores the memory that a kernel can reach */
        if (*what == 'a') a.sequences = SCALE > 1 ? 2 : 16, a.count = 1;
        for (int i = 0; i < 4; i++) attention_seconds(a, true, 1);
    } else if (!strcmp(what, "sampling")) measure_sampling(true);
    else measure_rows(what, n);
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
    llm_attention_shape shape = {2, 1, 32, 0.18f, false, 0, 0, 0};
    llm_cache cache = {LLM_F16, 1,   1, 32, 16, w.n_blocks, (size_t)w.n_blocks * 16 * 32 * 2,
                       NULL,    NULL, false};
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
    snprintf(what, sizeof what, "%d sequences, %d layers (until launched; until done)", n, layers);
    row("host time per step", what, text("%.0f us; %.0f us", 1e6 * host, 1e6 * all), 0, "");
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
    llm_attention_shape shape = {heads, kv, head_dim, 1.0f / sqrtf((float)head_dim), false, 0, 0, 0};
    llm_cache cache = {
        LLM_F16, 1,   kv, head_dim, 16, w.n_blocks, (size_t)w.n_blocks * kv * 16 * head_dim * 2,
        NULL,    NULL, false};
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
    snprintf(name, sizeof name, "%s, one token, %s", llm_type_find(type)->name, what);
    row("a layer of Llama-3.1-8B", name, text("%.1f us, %.2f TB/s", 1e6 * s, all / s * 1e-12),
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
        row("... overlapping kernels", "give the same bits", same ? "yes" : "NO: there is a race",
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
    if (argc > 2 && !strcmp(argv[1], "one")) {
        llm_gpu_options options = llm_gpu_defaults();
        options.graphs = false; /* a profiler sees launches, not graphs */
        backend = open_device(&options, &err);
        if (!backend) die(err.message);
        run_one(argv[2], argc > 3 ? argv[3] : "q4_0", argc > 4 ? atoi(argv[4]) : 1);
        must(backend->sync(backend->context, &err), &err);
        llm_backend_free(backend);
        return 0;
    }
    measure_ceilings(asked(argc, argv, "ceilings"));
    backend = open_device(NULL, &err);
    if (!backend) die(err.message);
    if (asked(argc, argv, "host")) measure_host();
    if (asked(argc, argv, "layers")) wrong += measure_layers();
    static const llm_type types[] = {LLM_Q4_0, LLM_F16, LLM_Q4_K, LLM_Q8_0};
    if (asked(argc, argv, "matmul"))
        for (auto &size : PRODUCTS)
            for (llm_type type : types) {
                if (SCALE > 1 && &size != &PRODUCTS[0] && type != LLM_Q4_0) continue;
                measure_matmul(type, size[0], size[1]);
            }
    if (asked(argc, argv, "attention")) measure_attention();
    if (asked(argc, argv, "rows")) measure_rows();
    if (asked(argc, argv, "sampling")) measure_sampling();
    must(backend->sync(backend->context, &err), &err);
    llm_backend_free(backend);
    return wrong;
}
