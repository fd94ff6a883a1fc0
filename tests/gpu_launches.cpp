/* gpu_launches.cpp - lists the launches of llm.cu for given shapes without running any kernel, for
 * tests/gpu_model.py. The host code is that of the engine, on an emulated device with the SMs and
 * the compute capability of an H200, so kernels and grids are those that a GPU would get. Weights
 * and buffers are addresses that nothing reads. Output, fields separated by tabs:
 *
 *     case    NAME  SHAPE  LIMIT  bytes that must be moved  arithmetic operations
 *     launch  symbol's offset  name  grid x  y  z  threads  dynamic shared bytes  the arguments
 *     base    offset of the function llm_gpu_launches_base
 */
#define LLM_EMULATED
#include "cuda_on_cpu.h"

#include <stdio.h>

static bool recording;

static void describe(...) {}
template <class T, typename std::enable_if<std::is_integral<T>::value, int>::type = 0>
static void describe(T x) {
    printf(" %lld", (long long)x);
}
struct llm__products;
struct llm__packed;
struct llm__rounded;
struct llm__next_x;
static void describe(const llm__products &p);
static void describe(const llm__packed &w);
static void describe(const llm__rounded &x);
static void describe(const llm__next_x &next);

extern "C" void llm_gpu_launches_base(void) {}

template <class... P, class... A>
static void record(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t bytes,
                   cudaStream_t, A &&...arguments) {
    if (!recording) return;
    printf("launch\t%lld\t%s\t%u\t%u\t%u\t%u\t%zu\t",
           (long long)((const char *)(const void *)kernel -
                       (const char *)(const void *)llm_gpu_launches_base),
           name, grid.x, grid.y, grid.z, block.x * block.y * block.z, bytes);
    (describe(static_cast<P>(arguments)), ...);
    printf("\n");
}

#undef LLM_LAUNCH
#undef LLM_LAUNCH_EARLY
#define LLM_LAUNCH(kernel, ...) record(#kernel, kernel, __VA_ARGS__)
#define LLM_LAUNCH_EARLY(cuda, kernel, grid, block, bytes, ...) \
    record(#kernel, kernel, grid, block, bytes, (cuda)->stream, __VA_ARGS__)
#include "../llm.cu"
#include "emulator.h"
#include "ops.h"

#include <string>
#include <vector>

static void describe(const llm__packed &w) {
    printf(" rows=%lld cols=%lld bytes=%zu", (long long)w.rows, (long long)w.cols,
           llm__packed_bytes(&w));
}
static void describe(const llm__products &p) {
    for (int i = 0; i < p.n; i++) describe(p.each[i].w);
    if (p.next.rounded.n) printf(" then=%dx%d", p.next.rounded.n, p.next.rounded.cols);
}
static void describe(const llm__rounded &x) { printf(" n=%d wide=%d", x.n, x.cols); }
static void describe(const llm__next_x &next) { describe(next.rounded); }

static llm_backend *backend;
static size_t next_address = (size_t)1 << 40;

static float *address(size_t bytes) {
    size_t at = next_address;
    next_address += (bytes + 4095) / 4096 * 4096;
    return (float *)at;
}

static void must(bool fine, const llm_error *err) {
    if (!fine) fprintf(stderr, "gpu_launches: %s\n", err->message), exit(1);
}

static llm_weight matrix(llm_type type, int64_t rows, int64_t cols) {
    llm_weight w;
    memset(&w, 0, sizeof w);
    w.type = type, w.rows = rows, w.cols = cols, w.data = address((size_t)rows * cols * 4);
    return w;
}

/* A batch: sequence s has contexts[s] positions, the last counts[s] of them in this step. */
struct step {
    llm_batch batch;
    std::vector<int32_t> tokens, positions, slots, first, count, tables, rows;

    step(const std::vector<int> &contexts, const std::vector<int> &counts) {
        const int block_size = 16;
        int stride = 1, blocks = 0;
        for (int c : contexts) stride = std::max(stride, (c + block_size - 1) / block_size);
        for (size_t s = 0; s < contexts.size(); s++) {
            first.push_back((int32_t)tokens.size()), count.push_back(counts[s]);
            for (int p = contexts[s] - counts[s]; p < contexts[s]; p++)
                tokens.push_back(0), positions.push_back(p),
                    slots.push_back((blocks + p / block_size) * block_size + p % block_size);
            rows.push_back((int32_t)tokens.size() - 1);
            for (int i = 0; i < stride; i++) tables.push_back(blocks + i);
            blocks += (contexts[s] + block_size - 1) / block_size;
        }
        memset(&batch, 0, sizeof batch);
        batch.n_tokens = (int)tokens.size(), batch.n_sequences = (int)contexts.size();
        batch.n_logits = (int)rows.size(), batch.table_stride = stride;
        batch.block_size = block_size;
        batch.tokens = tokens.data(), batch.positions = positions.data();
        batch.slots = slots.data(), batch.seq_first = first.data();
        batch.seq_count = count.data(), batch.logit_rows = rows.data();
        batch.block_tables = tables.data();
    }
};

/* limit: what limits the operation, "bytes" or "arithmetic". */
static void start(const char *name, const std::string &shape, const char *limit, double bytes,
                  double operations) {
    printf("case\t%s\t%s\t%s\t%.0f\t%.0f\n", name, shape.c_str(), limit, bytes, operations);
}

static void run(ops *o, const llm_batch *batch) {
    llm_error err;
    recording = false;
    llm_limits limits = ops_limits(batch, batch->n_logits);
    must(backend->prepare(backend->context, &o->program, &limits, &err), &err);
    recording = true;
    must(backend->run(backend->context, &o->program, LLM_WHOLE, batch, 0, batch->n_logits, &err),
         &err);
    recording = false;
    must(backend->sync(backend->context, &err), &err);
    ops_free(o, backend);
}

/* The step's bytes and operations, and its limit: above 200 operations per byte, arithmetic. */
static void start_program(const char *name, const std::string &shape, ops *o,
                          const llm_batch *batch) {
    double bytes = 0, operations = 0;
    for (int i = 0; i < o->program.n_ops; i++) {
        llm_cost c = llm_op_cost(&o->program, &o->program.ops[i], batch);
        /* buffers between kernels stay in the L2 cache; a lone operation reads and writes them */
        bytes += c.weight_bytes + c.cache_bytes + (o->program.n_ops < 5 ? c.activation_bytes : 0);
        operations += c.operations;
    }
    start(name, shape, operations > 200 * bytes ? "arithmetic" : "bytes", bytes, operations);
}

static std::string text(const char *format, int a, int b = 0, int c = 0) {
    char buffer[128];
    snprintf(buffer, sizeof buffer, format, a, b, c);
    return buffer;
}

static const char *name_of(llm_type type) { return llm_type_find(type)->name; }

static void product(llm_type type, int rows, int cols, int n) {
    step s(std::vector<int>((size_t)n, 1), std::vector<int>((size_t)n, 1));
    ops *o = ops_new();
    llm_weight w = matrix(type, rows, cols);
    ops_matmul(o, address((size_t)n * cols * 4), &w, NULL, false, address((size_t)n * rows * 4));
    std::string name = std::string("product ") + name_of(type);
    start_program(name.c_str(), text("%d x %d, %d rows", rows, cols, n), o, &s.batch);
    run(o, &s.batch);
}

static llm_cache cache_of(const step &s, int layers, int kv_heads, int head_dim) {
    int64_t blocks = (int64_t)s.tables.size();
    llm_cache cache = {LLM_F16, layers, kv_heads, head_dim, 16, blocks,
                       (size_t)blocks * kv_heads * 16 * head_dim * 2, NULL, NULL, false};
    cache.keys = address(cache.layer_bytes * layers);
    cache.values = address(cache.layer_bytes * layers);
    return cache;
}

static void attention(const char *name, const std::string &shape, const step &s, int heads,
                      int kv_heads, int head_dim) {
    llm_attention_shape a = {heads, kv_heads, head_dim, 0.1f, false, 0, 0, 0};
    llm_cache cache = cache_of(s, 1, kv_heads, head_dim);
    size_t bytes = s.tokens.size() * heads * head_dim * 4;
    ops *o = ops_new();
    ops_attention(o, &a, address(bytes), &cache, 0, address(bytes));
    start_program(name, shape, o, &s.batch);
    printf("sequences");
    for (size_t i = 0; i < s.count.size(); i++)
        printf("\t%d:%d", s.positions[(size_t)s.rows[i]] + 1, s.count[i]);
    printf("\n");
    run(o, &s.batch);
}

/* Llama-3.1-8B: a whole step, for as many sequences as s has. */
static void llama(llm_type type, const std::string &shape, const step &s) {
    const int layers = 32, dim = 4096, hidden = 14336, kv_heads = 8, head_dim = 128,
              kv = kv_heads * head_dim, vocab = 128256;
    llm_type rare = type == LLM_Q4_0 ? LLM_Q8_0 : type == LLM_Q4_K ? LLM_Q6_K : type;
    size_t n = s.tokens.size();
    std::vector<llm_weight> w;
    llm_weight table = matrix(rare, vocab, dim), head = matrix(rare, vocab, dim);
    const int sizes[7][2] = {{dim, dim},    {kv, dim},     {kv, dim},    {dim, dim},
                             {hidden, dim}, {hidden, dim}, {dim, hidden}};
    for (int i = 0; i < 7 * layers; i++)
        w.push_back(matrix(type, sizes[i % 7][0], sizes[i % 7][1]));
    llm_attention_shape a = {32, kv_heads, head_dim, 0.1f, false, 0, 0, 0};
    llm_cache cache = cache_of(s, layers, kv_heads, head_dim);
    float *x = address(n * dim * 4), *h = address(n * dim * 4), *q = address(n * dim * 4),
          *k = address(n * kv * 4), *v = address(n * kv * 4), *out = address(n * dim * 4),
          *gate = address(n * hidden * 4), *up = address(n * hidden * 4), *norm = address(dim * 4),
          *angles = address(n * head_dim * 4), *rows = address(n * dim * 4),
          *logits = address(n * vocab * 4), *frequencies = address(head_dim * 4);
    ops *o = ops_new();
    ops_embed(o, &table, x);
    ops_rope_angles(o, frequencies, head_dim, 1, angles);
    for (int i = 0; i < layers; i++) {
        llm_weight *l = &w[(size_t)i * 7];
        ops_rmsnorm(o, x, norm, dim, 1e-5f, h);
        ops_matmul(o, h, &l[0], NULL, false, q);
        ops_matmul(o, h, &l[1], NULL, false, k);
        ops_matmul(o, h, &l[2], NULL, false, v);
        ops_rope_and_store(o, &a, LLM_ROPE_HALVES, head_dim, angles, NULL, NULL, 1e-5f, q, k, v,
                           &cache, i);
        ops_attention(o, &a, q, &cache, i, out);
        ops_matmul(o, out, &l[3], NULL, true, x);
        ops_rmsnorm(o, x, norm, dim, 1e-5f, h);
        ops_matmul(o, h, &l[4], NULL, false, gate);
        ops_matmul(o, h, &l[5], NULL, false, up);
        ops_swiglu(o, gate, up, hidden, gate);
        ops_matmul(o, gate, &l[6], NULL, true, x);
    }
    int body = o->program.n_ops;
    llm_op *op = ops_add(o, LLM_OP_GATHER_ROWS);
    op->in[0] = ops_buffer(o, x, dim, false), op->out = ops_buffer(o, rows, dim, true);
    ops_rmsnorm(o, rows, norm, dim, 1e-5f, rows);
    ops_buffer(o, logits, vocab, true);
    ops_matmul(o, rows, &head, NULL, false, logits);
    o->program.n_body = body;
    start_program(("Llama-3.1-8B " + std::string(name_of(type))).c_str(), shape, o, &s.batch);
    printf("sequences");
    for (size_t i = 0; i < s.count.size(); i++)
        printf("\t%d:%d", s.positions[(size_t)s.rows[i]] + 1, s.count[i]);
    printf("\n");
    run(o, &s.batch);
}

static void rows_of(ops *o, const char *name, const std::string &shape, int n) {
    step s(std::vector<int>((size_t)n, 1), std::vector<int>((size_t)n, 1));
    start_program(name, shape, o, &s.batch);
    run(o, &s.batch);
}

static void sample(const std::string &shape, int n) {
    const int vocab = 128256;
    std::vector<llm_draw> draws((size_t)n);
    std::vector<int32_t> ids((size_t)n);
    std::vector<float> logprobs((size_t)n);
    for (int i = 0; i < n; i++) {
        memset(&draws[(size_t)i], 0, sizeof draws[0]);
        draws[(size_t)i].row = i;
        draws[(size_t)i].sampling.temperature = 0.8f;
        draws[(size_t)i].sampling.top_p = 0.9f;
        draws[(size_t)i].sampling.repetition_penalty = 1;
    }
    start("sampling", shape, "bytes", 4.0 * vocab * n, 0);
    llm_error err;
    recording = true;
    must(backend->sample(backend->context, address((size_t)n * vocab * 4), vocab, draws.data(), n,
                         ids.data(), logprobs.data(), &err),
         &err);
    recording = false;
}

/* The device does not run the kernels, so it must not test them. */
template <class O> static auto trust(O &o, int) -> decltype(o.trust, void()) { o.trust = true; }
template <class O> static void trust(O &, long) {}

int main(void) {
    llm_error err;
    llm_gpu_options options = llm_gpu_defaults();
    trust(options, 0);
    setenv("LLM_EMU_PROCESSORS", "132", 1);
    setenv("LLM_EMU_SHARED", "232448", 1);
    setenv("LLM_EMU_MEMORY", "68719476736", 1);
    emulator_devices(1, 90, 13000);
    backend = llm_emulated_backend(&options, &err);
    must(backend != NULL, &err);
    static const llm_type types[] = {LLM_F16, LLM_Q8_0, LLM_Q4_0, LLM_Q4_K};
    static const int sizes[][2] = {{4096, 4096}, {14336, 4096}, {4096, 14336}};
    static const int counts[] = {1, 2, 4, 8, 16, 32, 64, 128, 512};
    for (llm_type type : types)
        for (auto &size : sizes)
            for (int n : counts) product(type, size[0], size[1], n);

    for (int head_dim : {64, 128}) {
        for (int n : {1024, 4096, 16384})
            attention("attention of a prompt", text("heads of %d, %d tokens", head_dim, n),
                      step({n}, {n}), 32, 8, head_dim);
        std::vector<int> ones(64, 1), ragged(64, 512);
        ragged[63] = 16384;
        attention("attention, decode", text("heads of %d, one sequence of 32k", head_dim),
                  step({32768}, {1}), 32, 8, head_dim);
        attention("attention, decode", text("heads of %d, 64 sequences of 4k", head_dim),
                  step(std::vector<int>(64, 4096), ones), 32, 8, head_dim);
        attention("attention, decode",
                  text("heads of %d, 63 sequences of 512, one of 16k", head_dim),
                  step(ragged, ones), 32, 8, head_dim);
    }
    for (int n : {1, 64, 512}) {
        ops *o = ops_new();
        ops_rmsnorm(o, address((size_t)n * 4096 * 4), address(4096 * 4), 4096, 1e-5f,
                    address((size_t)n * 4096 * 4));
        rows_of(o, "rmsnorm", text("4096 columns, %d rows", n), n);
        o = ops_new();
        ops_swiglu(o, address((size_t)n * 14336 * 4), address((size_t)n * 14336 * 4), 14336,
                   address((size_t)n * 14336 * 4));
        rows_of(o, "gate", text("14336 columns, %d rows", n), n);
    }
    for (int n : {1, 64}) sample(text("128256 logits, %d rows, top-p 0.9", n), n);
    for (llm_type type : {LLM_F16, LLM_Q4_0, LLM_Q4_K}) {
        llama(type, "a step of 1 sequence at position 1024", step({1024}, {1}));
        llama(type, "a step of 64 sequences at position 1024",
              step(std::vector<int>(64, 1024), std::vector<int>(64, 1)));
    }
    recording = false;
    llm_backend_free(backend);
    return 0;
}
