/* Every operation of the seam on a device, against the plain loops of chapter 6
 * (LLM_ISA_REFERENCE), over random shapes and ragged batches. LLM_TEST_DEVICE=cpu|emulated|cuda
 * names the device; the default is emulated. A GPU runs each operation in every variant that its
 * options select. The emulated device also runs it in several thread orders, which must not change
 * the bits.
 *
 *  make build/test_device && build/test_device */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "../llm.h"
#include "../models/quantize.c"
#include "device_util.h"
#include "emulator.h"
#include "ops.h"
#include "tree.h"

/* ---- Random data ------------------------------------------------------------------------ */

static test_random rng = {20261121};

static int random_int(int low, int high) { return low + random_below(&rng, high - low + 1); }

static float *random_floats(int64_t n, float scale) { /* roughly normal */
    float *x = malloc((size_t)n * sizeof *x + 1);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int k = 0; k < 6; k++) sum += (float)(random_u64(&rng) >> 40) / 16777216.0f - 0.5f;
        x[i] = sum * 1.41421356f * scale;
    }
    return x;
}

enum { MAX_SEQUENCES = 6 };

/* A ragged batch over a pool of blocks in random order. Sequence s has first[s] cached positions
 * and count[s] tokens in this step. */
typedef struct ragged {
    llm_batch batch;
    int first[MAX_SEQUENCES], count[MAX_SEQUENCES];
    int n_blocks;
} ragged;

static ragged make_batch(int n_sequences, const int *first, const int *count, int block_size,
                         int vocab) {
    ragged r;
    memset(&r, 0, sizeof r);
    llm_batch *b = &r.batch;
    b->block_size = block_size, b->n_sequences = n_sequences;
    for (int s = 0; s < n_sequences; s++) {
        r.first[s] = first[s], r.count[s] = count[s];
        b->n_tokens += count[s];
        int blocks = (first[s] + count[s] + block_size - 1) / block_size;
        b->table_stride = blocks > b->table_stride ? blocks : b->table_stride;
        r.n_blocks += blocks;
    }
    r.n_blocks += 2;
    size_t tokens = (size_t)b->n_tokens * sizeof(int32_t),
           sequences = (size_t)n_sequences * sizeof(int32_t);
    int32_t *ids = malloc(tokens), *positions = malloc(tokens), *slots = malloc(tokens),
            *rows = malloc(tokens);
    int32_t *seq_first = malloc(sequences), *seq_count = malloc(sequences);
    int32_t *tables = calloc((size_t)n_sequences * (size_t)b->table_stride, sizeof *tables);
    int *blocks = malloc((size_t)r.n_blocks * sizeof *blocks);
    for (int i = 0; i < r.n_blocks; i++) blocks[i] = i;
    for (int i = r.n_blocks; i > 1; i--) {
        int j = random_below(&rng, i), other = blocks[i - 1];
        blocks[i - 1] = blocks[j], blocks[j] = other;
    }
    int token = 0, taken = 0;
    for (int s = 0; s < n_sequences; s++) {
        int32_t *table = tables + s * b->table_stride;
        for (int i = 0; i < (first[s] + count[s] + block_size - 1) / block_size; i++)
            table[i] = blocks[taken++];
        seq_first[s] = token, seq_count[s] = count[s];
        for (int p = first[s]; p < first[s] + count[s]; p++, token++) {
            ids[token] = random_below(&rng, vocab);
            positions[token] = p;
            slots[token] = table[p / block_size] * block_size + p % block_size;
            if (p + 1 == first[s] + count[s] || random_below(&rng, 3) == 0)
                rows[b->n_logits++] = token;
        }
    }
    b->tokens = ids, b->positions = positions, b->slots = slots, b->seq_first = seq_first,
    b->seq_count = seq_count;
    b->block_tables = tables, b->logit_rows = rows;
    free(blocks);
    return r;
}

static void free_batch(ragged *r) {
    free((void *)r->batch.tokens), free((void *)r->batch.positions), free((void *)r->batch.slots);
    free((void *)r->batch.seq_first), free((void *)r->batch.seq_count),
        free((void *)r->batch.block_tables);
    free((void *)r->batch.logit_rows);
}

/* A batch of n tokens from a few sequences. */
static ragged batch_of(int n_tokens, int vocab) {
    int first[MAX_SEQUENCES], count[MAX_SEQUENCES], n = 0;
    while (n_tokens > 0 && n < MAX_SEQUENCES) {
        first[n] = random_below(&rng, 200);
        count[n] = n + 1 == MAX_SEQUENCES ? n_tokens : random_int(1, n_tokens);
        n_tokens -= count[n++];
    }
    return make_batch(n, first, count, random_int(1, 20), vocab);
}

/* ---- Devices ------------------------------------------------------------------------------ */

typedef struct variant { /* the device with some options, and the accuracy required of it */
    const char *name;
    llm_backend *backend;
    const char *of; /* the operations that the options affect; NULL: all */
    bool exact;     /* computes in f32, so the error bound of the CPU's kernels applies */
    bool batch_independent;   /* check that a row's result does not depend on its batch */
} variant;

static variant variants[8];
static int n_variants;
static llm_backend *reference;
static const char *device;

static void add_variant(const char *name, const llm_gpu_options *options, const char *of,
                        bool exact, bool batch_independent) {
    variant f = {name, device_open(device, options), of, exact, batch_independent};
    variants[n_variants++] = f;
}

static int open_devices(void **state) {
    (void)state;
    llm_error err;
    device = device_name("emulated");
    reference = llm_cpu_backend(1, LLM_ISA_REFERENCE, &err);
    assert_non_null(reference);
    if (!device_is_gpu(device)) {
        add_variant("cpu", NULL, NULL, false, true);
        return 0;
    }
    /* No graphs, since a single operation is not a step and cannot be captured. test_graphs and the
     * engine's tests use graphs. */
    llm_gpu_options plain = llm_gpu_defaults();
    plain.graphs = false;
    llm_gpu_options usual = plain, separate = plain, whole = plain, fixed = plain;
    plain.plain = true;
    add_variant("plain", &plain, NULL, true, false);
    add_variant("usual", &usual, NULL, false, false);
    separate.fused = false;
    add_variant("not fused", &separate, "rmsnorm rope_and_store swiglu", false, false);
    whole.split_attention = false;
    add_variant("not split", &whole, "attention", false, false);
    /* uses the same kernels, so only batch independence remains to be checked */
    fixed.deterministic = true;
    add_variant("deterministic", &fixed, "", false, true);
    return 0;
}

static int close_devices(void **state) {
    (void)state;
    for (int i = 0; i < n_variants; i++) llm_backend_free(variants[i].backend);
    llm_backend_free(reference);
    return 0;
}

/* Allocate device memory and fill it with these bytes. */
static void *to_device(llm_backend *b, const void *data, size_t bytes) {
    llm_error err;
    void *p = b->allocate(b->context, bytes, "a test", &err);
    if (!p) fail_msg("%s", err.message);
    if (data && !b->upload(b->context, p, data, bytes, &err)) fail_msg("%s", err.message);
    return p;
}

static float *floats_to_device(llm_backend *b, const float *x, int64_t n) {
    return x ? (float *)to_device(b, x, (size_t)n * sizeof *x) : NULL;
}

static void fetch_and_free(llm_backend *b, void *device_memory, void *out, size_t bytes) {
    llm_error err;
    if (!b->download(b->context, out, device_memory, bytes, &err)) fail_msg("%s", err.message);
    b->release(b->context, device_memory);
}

static double distance(const float *a, const float *b, int64_t n) { /* |a - b| / |b| */
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(difference / (norm > 0.0 ? norm : 1.0));
}

/* Runs one operation with its args on a device and writes its results to `out`. */
typedef void (*operation)(llm_backend *b, const void *args, float *out);

/* Whether the variant affects this operation (the first word of `what`). */
static bool applies_to(const variant *f, const char *what) {
    char word[32];
    snprintf(word, sizeof word, "%.*s", (int)strcspn(what, ", "), what);
    return !f->of || strstr(f->of, word);
}

/* Run the operation on every variant of the device, in the forward order and one other. The result
 * must be near the reference, and both orders must give the same bits. bound 0: the reference's
 * bits; exact_bound: for variants that compute in f32. */
static void check(const char *what, operation run, const void *args, int64_t n, double bound,
                  double exact_bound) {
    static int checks;
    size_t bytes = (size_t)n * sizeof(float);
    float *expected = malloc(bytes), *out = malloc(bytes), *first = malloc(bytes);
    run(reference, args, expected);
    checks++;
    for (int f = 0; f < n_variants; f++)
        for (int order = 0;
             order < (device_orders(device) > 1 ? 2 : 1) && applies_to(&variants[f], what);
             order++) {
            device_set_order(device, order ? 1 + (checks + f) % (device_orders(device) - 1) : 0);
            memset(out, 0xff, bytes);
            run(variants[f].backend, args, order ? out : first);
            if (order && memcmp(out, first, bytes))
                fail_msg("%s, %s: the order of the threads changes the bits", what,
                         variants[f].name);
            if (order) continue;
            double d = distance(first, expected, n), most = variants[f].exact ? exact_bound : bound;
            if (most == 0.0 ? memcmp(first, expected, bytes) != 0 : !(d <= most))
                fail_msg("%s, %s on %s: relative distance %g, bound %g", what, variants[f].name,
                         device, d, most);
        }
    device_set_order(device, 0);
    free(expected), free(out), free(first);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

typedef struct rows_case {
    ragged batch;
    const float *x, *y; /* (n, dim); weight (dim) or up (n, dim) */
    int n, dim, first;
    float epsilon;
    bool in_place;
    op_trait trait;
} rows_case;

static void run_rmsnorm(llm_backend *b, const void *args, float *out) {
    const rows_case *c = (const rows_case *)args;
    int64_t n = (int64_t)c->n * c->dim;
    float *x = floats_to_device(b, c->x, n), *weight = floats_to_device(b, c->y, c->dim),
          *result = c->in_place ? x : to_device(b, NULL, (size_t)n * 4);
    op_rmsnorm(b, x, weight, c->n, c->dim, c->epsilon, result);
    fetch_and_free(b, result, out, (size_t)n * sizeof *out);
    if (!c->in_place) b->release(b->context, x);
    b->release(b->context, weight);
}

static void test_rmsnorm(void **state) {
    (void)state;
    static const int dims[] = {1, 3, 16, 64, 100, 257, 1024, 4099, 9000};
    for (int i = 0; i < 18; i++) {
        rows_case c = {.dim = dims[i / 2],
                       .n = i % 4 == 0 ? 1 : random_int(1, 40),
                       .epsilon = 1e-5f,
                       .in_place = i % 2};
        c.x = random_floats((int64_t)c.n * c.dim, i == 6 ? 1e4f : 1.0f),
        c.y = random_floats(c.dim, 1.0f);
        /* a row of zeros */
        if (c.n > 1) memset((void *)(c.x + c.dim), 0, (size_t)c.dim * sizeof(float));
        check("rmsnorm", run_rmsnorm, &c, (int64_t)c.n * c.dim, 2e-6, 2e-6);
        free((void *)c.x), free((void *)c.y);
    }
}

static void run_trait(llm_backend *b, const void *args, float *out) {
    const rows_case *c = (const rows_case *)args;
    int64_t n = (int64_t)c->n * c->dim;
    float *x = floats_to_device(b, c->x, n), *y = floats_to_device(b, c->y, n),
          *result = floats_to_device(b, c->y, n);
    op_with_trait(b, c->trait, x, y, c->n, c->dim, result);
    fetch_and_free(b, result, out, (size_t)n * sizeof *out);
    b->release(b->context, x), b->release(b->context, y);
}

static void test_traits(void **state) {
    (void)state;
    static const char *const names[] = {"an added norm", "GELU", "a limit", "exact GELU alone",
                                        "LayerNorm"};
    for (int i = 0; i < 15; i++) {
        rows_case c = {.n = random_int(1, 5), .dim = i < 5 ? 7 : random_int(20, 3000)};
        int64_t n = (int64_t)c.n * c.dim;
        c.trait = (op_trait)(i % 5);
        c.x = random_floats(n, 8.0f), c.y = random_floats(n, 1.0f);
        check(names[c.trait], run_trait, &c, n, 2e-6, 2e-6);
        free((void *)c.x), free((void *)c.y);
    }
}

static void run_swiglu(llm_backend *b, const void *args, float *out) {
    const rows_case *c = (const rows_case *)args;
    float *gate = floats_to_device(b, c->x, c->n), *up = floats_to_device(b, c->y, c->n),
          *result = c->in_place ? gate : to_device(b, NULL, (size_t)c->n * 4);
    op_swiglu(b, gate, up, c->n, result);
    fetch_and_free(b, result, out, (size_t)c->n * sizeof *out);
    if (!c->in_place) b->release(b->context, gate);
    b->release(b->context, up);
}

static void test_swiglu(void **state) {
    (void)state;
    static const float corners[] = {0.0f,  -0.0f,  1e-30f,  86.9f,   -86.9f,
                                    87.1f, -87.1f, 1000.0f, -1000.0f};
    for (int i = 0; i < 8; i++) {
        rows_case c = {.n = i == 0 ? 1 : i == 1 ? 20001 : random_int(1, 3000), .in_place = i % 2};
        c.x = random_floats(c.n, 8.0f), c.y = random_floats(c.n, 1.0f);
        for (int k = 0; k < 9 && k * 7 < c.n; k++)
            ((float *)c.x)[k * 7] = corners[k], ((float *)c.y)[k * 7] = 1.0f;
        check("swiglu", run_swiglu, &c, c.n, 1e-6, 1e-6);
        free((void *)c.x), free((void *)c.y);
    }
}

/* The body and the head of a program give the same results as the whole program, in any order in
 * which an engine runs them. */
static void run_parts(llm_backend *b, const void *args, float *out) {
    const rows_case *c = (const rows_case *)args;
    llm_error err;
    int tokens = c->batch.batch.n_tokens, n = c->batch.batch.n_logits;
    size_t bytes = (size_t)n * (size_t)c->dim * sizeof *out;
    float *x = floats_to_device(b, c->x, (int64_t)tokens * c->dim);
    float *weight = floats_to_device(b, c->y, c->dim);
    float *normed = to_device(b, NULL, (size_t)(tokens * c->dim) * 4),
          *rows = to_device(b, NULL, bytes);
    float *one = to_device(b, NULL, bytes), *result = to_device(b, NULL, bytes);
    ops *o = ops_new();
    ops_rmsnorm(o, x, weight, c->dim, c->epsilon, normed);
    ops_swiglu(o, normed, normed, c->dim, normed);
    llm_op *gather = ops_add(o, LLM_OP_GATHER_ROWS);
    gather->in[0] = ops_buffer(o, normed, c->dim, false);
    gather->out = ops_buffer(o, rows, c->dim, true);
    ops_buffer(o, one, c->dim, true), ops_buffer(o, result, c->dim, true);
    ops_rmsnorm(o, rows, weight, c->dim, c->epsilon, one);
    ops_swiglu(o, one, rows, c->dim, result);
    o->program.n_body = 2;
    llm_limits limits = ops_limits(&c->batch.batch, n);
    if (!b->prepare(b->context, &o->program, &limits, &err)) fail_msg("%s", err.message);
    float *got = malloc(bytes), *nothing = calloc(1, bytes);
    for (int i = 0; i < 9; i++) { /* whole; body and head; body twice */
        bool whole = i % 3 == 0, head = i % 3 == 1;
        llm_part part = whole ? LLM_WHOLE : LLM_BODY;
        for (int again = 0; again <= (i % 3 == 2); again++)
            if (!b->run(b->context, &o->program, part, &c->batch.batch, 0, whole ? n : 0, &err))
                fail_msg("%s", err.message);
        for (int first = 0, count; head && first < n; first += count) {
            count = (int)llm__min(n - first, i == 1 ? n : i); /* slices of varying size */
            if (!b->run(b->context, &o->program, LLM_HEAD, &c->batch.batch, first, count, &err))
                fail_msg("%s", err.message);
            assert_true(b->download(b->context, got + (int64_t)first * c->dim, result,
                                    (size_t)(count * c->dim) * sizeof *got, &err));
        }
        if (whole) assert_true(b->download(b->context, got, result, bytes, &err));
        if (i == 0) memcpy(out, got, bytes);
        if (whole || head) assert_memory_equal(got, out, bytes);
        assert_true(b->upload(b->context, result, nothing, bytes, &err));
        assert_true(b->upload(b->context, rows, nothing, bytes, &err));
    }
    ops_free(o, b);
    b->release(b->context, x), b->release(b->context, weight), b->release(b->context, normed);
    b->release(b->context, rows), b->release(b->context, one), b->release(b->context, result);
    free(got), free(nothing);
}

static void test_body_and_head(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        rows_case c = {.dim = 32 * random_int(1, 8), .epsilon = 1e-5f};
        c.batch = batch_of(random_int(1, 60), 10);
        int64_t results = (int64_t)c.batch.batch.n_logits * c.dim;
        c.x = random_floats((int64_t)c.batch.batch.n_tokens * c.dim, 1.0f);
        c.y = random_floats(c.dim, 1.0f);
        check("parts of a program", run_parts, &c, results, 3e-6, 3e-6);
        free((void *)c.x), free((void *)c.y), free_batch(&c.batch);
    }
}

typedef struct columns_case {
    const float *x;
    const int32_t *columns;
    int n, cols;
} columns_case;

static void run_gather_columns(llm_backend *b, const void *args, float *out) {
    const columns_case *c = (const columns_case *)args;
    size_t bytes = (size_t)c->n * (size_t)c->cols * sizeof(float);
    float *x = floats_to_device(b, c->x, (int64_t)c->n * c->cols),
          *result = to_device(b, NULL, bytes);
    int32_t *columns = to_device(b, c->columns, (size_t)c->cols * sizeof *columns);
    op_gather_columns(b, x, columns, c->n, c->cols, result);
    fetch_and_free(b, result, out, bytes);
    b->release(b->context, x);
    b->release(b->context, columns);
}

static void test_gather_columns(void **state) {
    (void)state;
    static const int cols[] = {1, 32, 100, 4096};
    for (int i = 0; i < 4; i++) {
        int32_t columns[4096];
        int n = i * 3 + 1;
        columns_case c = {random_floats((int64_t)n * cols[i], 1.0f), columns, n, cols[i]};
        for (int j = 0; j < cols[i]; j++) columns[j] = cols[i] - 1 - j;
        check("gather_columns", run_gather_columns, &c, (int64_t)c.n * c.cols, 0, 0);
        free((void *)c.x);
    }
}

static void run_gather(llm_backend *b, const void *args, float *out) {
    const rows_case *c = (const rows_case *)args;
    float *x = floats_to_device(b, c->x, (int64_t)c->batch.batch.n_tokens * c->dim),
          *result = to_device(b, NULL, (size_t)(c->n * c->dim) * 4);
    op_gather_rows(b, &c->batch.batch, x, c->dim, c->first, c->n, result);
    fetch_and_free(b, result, out, (size_t)(c->n * c->dim) * sizeof *out);
    b->release(b->context, x);
}

static void test_gather(void **state) {
    (void)state;
    for (int i = 0; i < 12; i++) {
        rows_case c = {.dim = i % 3 == 0 ? 64 * random_int(1, 8) : random_int(1, 300)};
        c.batch = batch_of(random_int(1, 60), 10);
        c.first = random_below(&rng, c.batch.batch.n_logits);
        c.n = random_int(1, c.batch.batch.n_logits - c.first);
        c.x = random_floats((int64_t)c.batch.batch.n_tokens * c.dim, 1.0f);
        check("gather_rows", run_gather, &c, (int64_t)c.n * c.dim, 0, 0);
        free((void *)c.x), free_batch(&c.batch);
    }
}

/* ---- Weights --------------------------------------------------------------------------------- */

static const llm_type required_types[] = {LLM_F32, LLM_F16, LLM_BF16, LLM_Q8_0, LLM_Q4_0};

typedef struct weight_case {
    ragged batch;
    llm_type type;
    int rows, cols, n, group; /* group: rows of x per call; 0: all */
    const void *data;         /* packed */
    const float *x, *bias, *start;
    bool add;
} weight_case;

static void *packed(llm_type type, const float *values, int64_t count) {
    const llm_type_info *info = llm_type_find(type);
    void *data = malloc((size_t)(count / info->block_values) * (size_t)info->block_bytes);
    assert_non_null(data);
    llm_pack(info->type, values, data, count);
    return data;
}

static llm_weight load(llm_backend *b, const weight_case *c) {
    llm_error err;
    llm_weight w;
    memset(&w, 0, sizeof w);
    w.type = c->type, w.rows = c->rows, w.cols = c->cols;
    if (!b->load_weight(b->context, &w, c->data, &err)) fail_msg("%s", err.message);
    return w;
}

/* Whether the device can load a weight of this type. It must load the required types. */
static bool can_load(llm_backend *b, const weight_case *c) {
    llm_error err;
    llm_weight w;
    memset(&w, 0, sizeof w);
    w.type = c->type, w.rows = c->rows, w.cols = c->cols;
    if (b->load_weight(b->context, &w, c->data, &err)) {
        b->free_weight(b->context, &w);
        return true;
    }
    assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
    for (size_t i = 0; i < sizeof required_types / sizeof *required_types; i++)
        if (required_types[i] == c->type) fail_msg("%s", err.message);
    return false;
}

static void run_embed(llm_backend *b, const void *args, float *out) {
    const weight_case *c = (const weight_case *)args;
    llm_weight table = load(b, c);
    size_t bytes = (size_t)(c->batch.batch.n_tokens * c->cols) * sizeof(float);
    float *result = to_device(b, NULL, bytes);
    op_embed(b, &c->batch.batch, &table, result);
    fetch_and_free(b, result, out, bytes);
    b->free_weight(b->context, &table);
}

static void test_embed(void **state) {
    (void)state;
    for (int type = 0; type < 64; type++) {
        const llm_type_info *info = llm_type_find((llm_type)type);
        if (!info) continue;
        for (int i = 0; i < 3; i++) {
            weight_case c = {.type = (llm_type)type,
                             .rows = random_int(1, 50),
                             .cols = info->block_values * random_int(1, 512 / info->block_values)};
            float *values = random_floats((int64_t)c.rows * c.cols, 1.0f);
            c.data = packed(c.type, values, (int64_t)c.rows * c.cols);
            c.batch = batch_of(random_int(1, 40), c.rows);
            double bound = 1.2e-7;
            if (can_load(variants[0].backend, &c))
                check(info->name, run_embed, &c, (int64_t)c.batch.batch.n_tokens * c.cols, bound,
                      bound);
            else if (i == 0)
                print_message("    %s: the device does not support %s\n", device, info->name);
            free(values), free((void *)c.data), free_batch(&c.batch);
        }
    }
}

static void run_matmul(llm_backend *b, const void *args, float *out) {
    const weight_case *c = (const weight_case *)args;
    llm_weight w = load(b, c);
    float *x = floats_to_device(b, c->x, (int64_t)c->n * c->cols),
          *bias = floats_to_device(b, c->bias, c->rows);
    float *result = floats_to_device(b, c->start, (int64_t)c->n * c->rows);
    int group = c->group ? c->group : c->n;
    for (int i = 0; i < c->n; i += group)
        op_matmul(b, x + (int64_t)i * c->cols, &w, bias, i + group < c->n ? group : c->n - i,
                  c->add, result + (int64_t)i * c->rows);
    fetch_and_free(b, result, out, (size_t)c->n * (size_t)c->rows * sizeof *out);
    b->release(b->context, x);
    b->release(b->context, bias);
    b->free_weight(b->context, &w);
}

/* The largest acceptable error. For block types, the CPU's kernels round x to int8. A GPU's kernels
 * round x to f16 (to bf16 for bf16 weights); its plain kernels do not round. */
static double matmul_bound(llm_type type) {
    if (!device_is_gpu(device)) return llm_type_find(type)->block_values > 1 ? 1.5e-2 : 2e-6;
    return type == LLM_F32 ? 1e-3 : type == LLM_BF16 ? 4e-3 : 1e-3;
}

static void check_matmul(llm_type type, int rows, int cols, int n) {
    char what[128];
    snprintf(what, sizeof what, "matmul, %s (%d, %d), %d rows of x", llm_type_find(type)->name,
             rows, cols, n);
    weight_case c = {
        .type = type, .rows = rows, .cols = cols, .n = n, .add = random_below(&rng, 2)};
    float *values = random_floats((int64_t)rows * cols, 1.0f);
    c.data = packed(type, values, (int64_t)rows * cols);
    c.x = random_floats((int64_t)n * cols, 1.0f);
    c.start = random_floats((int64_t)n * rows, 1.0f);
    c.bias = random_below(&rng, 2) ? random_floats(rows, 1.0f) : NULL;
    if (can_load(variants[0].backend, &c)) {
        /* a single dot product may be near zero, and its relative error large */
        double slack = (int64_t)n * rows < 32 ? 30 : 1;
        check(what, run_matmul, &c, (int64_t)n * rows, slack * matmul_bound(type), slack * 3e-6);
        size_t bytes = (size_t)n * (size_t)rows * sizeof(float);
        float *all = malloc(bytes), *parts = malloc(bytes);
        for (int f = 0; f < n_variants && n > 1; f++) {
            if (!variants[f].batch_independent) continue;
            run_matmul(variants[f].backend, &c, all);
            c.group = random_int(1, n - 1);
            run_matmul(variants[f].backend, &c, parts);
            if (memcmp(all, parts, bytes))
                fail_msg("%s, %s: the result depends on the number of rows (%d at a time)",
                         what, variants[f].name, c.group);
            c.group = 0;
        }
        free(all), free(parts);
    }
    free(values), free((void *)c.data), free((void *)c.x), free((void *)c.start);
    free((void *)c.bias);
}

static void test_matmul(void **state) {
    (void)state;
    for (int type = 0; type < 64; type++) {
        const llm_type_info *info = llm_type_find((llm_type)type);
        if (!info) continue;
        int block = info->block_values;
        check_matmul((llm_type)type, 1, block, 1);
        check_matmul((llm_type)type, 96, block > 128 ? block : 128, 1);
        check_matmul((llm_type)type, 70, block > 256 ? block : 256, random_int(2, 16));
        check_matmul((llm_type)type, 65, block > 32 ? block : 96, random_int(17, 40));
        if (block == 1) check_matmul((llm_type)type, 37, random_int(1, 300), 9);
        check_matmul((llm_type)type, random_int(1, 100), block * random_int(1, 512 / block),
                     random_int(1, 12));
    }
    check_matmul(LLM_F16, 128, 128, 150);
    check_matmul(LLM_Q4_0, 136, 256, 140);
}

/* ---- The cache ------------------------------------------------------------------------------- */

typedef struct cache_case {
    ragged batch;
    llm_attention_shape shape;
    llm_type cache_type;
    llm_rope_pairing pairing;
    int rope_dim, chunk; /* chunk: positions per call of attention; 0: all */
    float magnitude;
    const float *q, *k, *v, *q_norm, *k_norm, *frequencies, *angles;
} cache_case;

enum { LAYERS = 2, LAYER = 1 };

static llm_cache cache_of(const cache_case *c) {
    llm_cache cache = {c->cache_type,
                       LAYERS,
                       c->shape.n_kv_heads,
                       c->shape.head_dim,
                       c->batch.batch.block_size,
                       c->batch.n_blocks,
                       0,
                       NULL,
                       NULL,
                       false};
    cache.layer_bytes = (size_t)c->batch.n_blocks *
                        (size_t)(cache.n_kv_heads * cache.block_size * cache.head_dim) *
                        (c->cache_type == LLM_F16 ? 2 : 4);
    return cache;
}

static void run_angles(llm_backend *b, const void *args, float *out) {
    const cache_case *c = (const cache_case *)args;
    size_t bytes = (size_t)(c->batch.batch.n_tokens * c->rope_dim) * sizeof(float);
    float *frequencies = floats_to_device(b, c->frequencies, c->rope_dim / 2),
          *angles = to_device(b, NULL, bytes);
    op_rope_angles(b, &c->batch.batch, frequencies, c->rope_dim, c->magnitude, angles);
    fetch_and_free(b, angles, out, bytes);
    b->release(b->context, frequencies);
}

/* out: the rotated q, then all of the layer's keys and values as f32 (0 where nothing was
 * written) */
static void run_rope_and_store(llm_backend *b, const void *args, float *out) {
    const cache_case *c = (const cache_case *)args;
    int tokens = c->batch.batch.n_tokens, head_dim = c->shape.head_dim;
    int64_t q_values = (int64_t)tokens * c->shape.n_heads * head_dim,
            kv_values = (int64_t)tokens * c->shape.n_kv_heads * head_dim;
    llm_cache cache = cache_of(c);
    void *zeros = calloc(LAYERS, cache.layer_bytes);
    cache.keys = to_device(b, zeros, LAYERS * cache.layer_bytes),
    cache.values = to_device(b, zeros, LAYERS * cache.layer_bytes);
    float *q = floats_to_device(b, c->q, q_values), *k = floats_to_device(b, c->k, kv_values),
          *v = floats_to_device(b, c->v, kv_values);
    float *q_norm = floats_to_device(b, c->q_norm, head_dim),
          *k_norm = floats_to_device(b, c->k_norm, head_dim);
    float *angles = to_device(b, c->angles, (size_t)(tokens * c->rope_dim) * sizeof(float));
    op_rope_and_store(b, &c->batch.batch, &c->shape, c->pairing, c->rope_dim, angles, q_norm,
                      k_norm, 1e-6f, q, k, v, &cache, LAYER);
    fetch_and_free(b, q, out, (size_t)q_values * sizeof *out);
    int64_t layer_values = (int64_t)(cache.layer_bytes / (c->cache_type == LLM_F16 ? 2 : 4));
    for (int side = 0; side < 2; side++) {
        char *bytes = malloc(LAYERS * cache.layer_bytes);
        fetch_and_free(b, side ? cache.values : cache.keys, bytes, LAYERS * cache.layer_bytes);
        assert_memory_equal(bytes, zeros, cache.layer_bytes); /* the other layer is untouched */
        llm_type_find(c->cache_type)
            ->unpack(bytes + LAYER * cache.layer_bytes, out + q_values + side * layer_values,
                     layer_values);
        free(bytes);
    }
    b->release(b->context, k), b->release(b->context, v), b->release(b->context, q_norm),
        b->release(b->context, k_norm);
    b->release(b->context, angles);
    free(zeros);
}

/* `huge`: include values beyond f16's range, which are stored as f16's largest value (see
 * llm__plain_store). */
static void check_rope(llm_rope_pairing pairing, int head_dim, int rope_dim, bool norms,
                       llm_type cache_type, int n_kv, int group, bool huge) {
    cache_case c = {
        .cache_type = cache_type, .pairing = pairing, .rope_dim = rope_dim, .magnitude = 1.0f};
    c.shape = (llm_attention_shape){n_kv * group, n_kv, head_dim, 1.0f, false, 0, 0, 0};
    c.batch = batch_of(random_int(1, 30), 10);
    int tokens = c.batch.batch.n_tokens;
    c.q = random_floats((int64_t)tokens * n_kv * group * head_dim, 1.0f);
    float *v = random_floats((int64_t)tokens * n_kv * head_dim, 1.0f);
    c.k = random_floats((int64_t)tokens * n_kv * head_dim, 1.0f), c.v = v;
    if (huge) v[0] = 1e6f, v[1] = -INFINITY;
    if (norms) c.q_norm = random_floats(head_dim, 1.0f), c.k_norm = random_floats(head_dim, 1.0f);
    float *frequencies = malloc((size_t)rope_dim * sizeof(float) + 4),
          *angles = malloc((size_t)(tokens * rope_dim) * sizeof(float) + 4);
    for (int i = 0; i < rope_dim / 2; i++)
        frequencies[i] = powf(10000.0f, -2.0f * (float)i / (float)rope_dim);
    c.frequencies = frequencies, c.angles = angles;
    if (rope_dim) {
        run_angles(reference, &c, angles);
        check("rope_angles", run_angles, &c, (int64_t)tokens * rope_dim, 3e-7, 3e-7);
        c.magnitude = 1.25f;
        check("rope_angles, magnified", run_angles, &c, (int64_t)tokens * rope_dim, 3e-7, 3e-7);
    }
    int64_t layer_values = (int64_t)c.batch.n_blocks * n_kv * c.batch.batch.block_size * head_dim;
    check("rope_and_store", run_rope_and_store, &c,
          (int64_t)tokens * n_kv * group * head_dim + 2 * layer_values,
          cache_type == LLM_F16 ? 1e-4 : 1e-6, cache_type == LLM_F16 ? 1e-4 : 1e-6);
    free((void *)c.q), free((void *)c.k), free((void *)c.v), free((void *)c.q_norm),
        free((void *)c.k_norm), free(frequencies), free(angles);
    free_batch(&c.batch);
}

static void test_rope(void **state) {
    (void)state;
    for (int pairing = 0; pairing < 2; pairing++) {
        check_rope((llm_rope_pairing)pairing, 64, 64, false, LLM_F16, 2, 3, false);
        check_rope((llm_rope_pairing)pairing, 128, 32, true, LLM_F32, 1, 4, false);
        check_rope((llm_rope_pairing)pairing, 19, 10, true, LLM_F16, 2, 1, false);
        check_rope((llm_rope_pairing)pairing, 3, 0, false, LLM_F32, 1, 1, false);
        check_rope((llm_rope_pairing)pairing, 256, 256, true, LLM_F16, 1, 2, false);
        check_rope((llm_rope_pairing)pairing, 16, 16, false, LLM_F16, 2, 2, true);
    }
}

/* Put `k` and `v` (every position of every sequence) in the cache and NaN in every other slot, then
 * run attention for the batch's queries. k, v: (all positions, n_kv_heads, head_dim), sequence by
 * sequence. */
static void run_attention(llm_backend *b, const void *args, float *out) {
    const cache_case *c = (const cache_case *)args;
    const llm_batch *batch = &c->batch.batch;
    int head_dim = c->shape.head_dim, n_kv = c->shape.n_kv_heads, block_size = batch->block_size;
    llm_cache cache = cache_of(c);
    char *keys = malloc(LAYERS * cache.layer_bytes), *values = malloc(LAYERS * cache.layer_bytes);
    memset(keys, 0xff, LAYERS * cache.layer_bytes),
        memset(values, 0xff, LAYERS * cache.layer_bytes);
    const llm_type_info *info = llm_type_find(c->cache_type);
    size_t head_bytes = (size_t)head_dim * (size_t)info->block_bytes;
    int64_t row = 0;
    for (int s = 0; s < batch->n_sequences; s++)
        for (int p = 0; p < c->batch.first[s] + c->batch.count[s]; p++, row++)
            for (int h = 0; h < n_kv; h++) {
                int64_t block = batch->block_tables[s * batch->table_stride + p / block_size];
                size_t at = LAYER * cache.layer_bytes +
                            (size_t)((block * n_kv + h) * block_size + p % block_size) * head_bytes;
                llm_pack(info->type, c->k + (row * n_kv + h) * head_dim, keys + at, head_dim);
                llm_pack(info->type, c->v + (row * n_kv + h) * head_dim, values + at, head_dim);
            }
    cache.keys = to_device(b, keys, LAYERS * cache.layer_bytes),
    cache.values = to_device(b, values, LAYERS * cache.layer_bytes);
    int64_t width = (int64_t)c->shape.n_heads * head_dim;
    if (!c->chunk) {
        float *q = floats_to_device(b, c->q, batch->n_tokens * width),
              *result = to_device(b, NULL, (size_t)(batch->n_tokens * width) * 4);
        op_attention(b, batch, &c->shape, q, &cache, LAYER, result);
        fetch_and_free(b, result, out, (size_t)(batch->n_tokens * width) * sizeof *out);
        b->release(b->context, q);
    }
    /* one sequence at a time, some positions at a time */
    for (int s = 0; c->chunk && s < batch->n_sequences; s++)
        for (int done = 0, n; done < batch->seq_count[s]; done += n) {
            n = (int)llm__min(c->chunk, batch->seq_count[s] - done);
            int32_t first = 0, count = n, token = batch->seq_first[s] + done;
            llm_batch one = {.n_tokens = n, .n_sequences = 1, .tokens = batch->tokens + token,
                             .positions = batch->positions + token, .slots = batch->slots + token,
                             .seq_first = &first, .seq_count = &count,
                             .block_tables = batch->block_tables + s * batch->table_stride,
                             .table_stride = batch->table_stride, .block_size = block_size,
                             .n_logits = 1, .logit_rows = &first};
            float *q = floats_to_device(b, c->q + token * width, n * width),
                  *result = to_device(b, NULL, (size_t)(n * width) * 4);
            op_attention(b, &one, &c->shape, q, &cache, LAYER, result);
            fetch_and_free(b, result, out + token * width, (size_t)(n * width) * sizeof *out);
            b->release(b->context, q);
        }
    b->release(b->context, cache.keys), b->release(b->context, cache.values);
    free(keys), free(values);
}

static void check_attention(int n_sequences, const int *first, const int *count, int n_kv,
                            int group, int head_dim, int block_size, llm_type type, int window,
                            float cap, float alibi) {
    char what[160];
    cache_case c = {.cache_type = type};
    c.shape = (llm_attention_shape){n_kv * group, n_kv,  head_dim, 1.0f / sqrtf((float)head_dim),
                                    false,        window, cap, alibi};
    c.batch = make_batch(n_sequences, first, count, block_size, 10);
    int64_t positions = 0, tokens = c.batch.batch.n_tokens, n = tokens * n_kv * group * head_dim;
    for (int s = 0; s < n_sequences; s++) positions += first[s] + count[s];
    snprintf(
        what, sizeof what,
        "attention, %d sequences, %d tokens of %d, %d x %d heads of %d, blocks of %d, window %d, "
        "cap %g, ALiBi %g",
        n_sequences, (int)tokens, (int)positions, n_kv, group, head_dim, block_size, window,
        (double)cap, (double)alibi);
    c.q = random_floats(n, 3.0f);
    c.k = random_floats(positions * n_kv * head_dim, 1.0f),
    c.v = random_floats(positions * n_kv * head_dim, 1.0f);
    /* queries and softmax weights are rounded to f16 for the matrix instructions */
    check(what, run_attention, &c, n, device_is_gpu(device) ? 2e-3 : 2e-6, 3e-6);
    float *all = malloc((size_t)n * sizeof *all), *parts = malloc((size_t)n * sizeof *parts);
    for (int f = 0; f < n_variants; f++) {
        if (!variants[f].batch_independent) continue;
        run_attention(variants[f].backend, &c, all);
        for (int k = 0; k < 2; k++) {
            c.chunk = k ? random_int(2, 20) : 1;
            run_attention(variants[f].backend, &c, parts);
            if (memcmp(all, parts, (size_t)n * sizeof *all))
                fail_msg("%s, %s: the result depends on the batch (chunks of %d)", what,
                         variants[f].name, c.chunk);
        }
        c.chunk = 0;
    }
    free(all), free(parts), free((void *)c.q), free((void *)c.k), free((void *)c.v),
        free_batch(&c.batch);
}

static void test_attention(void **state) {
    (void)state;
    static const int zero[MAX_SEQUENCES] = {0}, one[MAX_SEQUENCES] = {1, 1, 1, 1, 1, 1};
    static const int far[] = {0, 63, 64, 130, 299, 17}, few[] = {5, 2, 1, 3, 1, 4};
    check_attention(1, zero, one, 1, 1, 8, 16, LLM_F32, 0, 0, 0);
    check_attention(5, far, few, 2, 2, 128, 16, LLM_F16, 0, 0.5f, 0);
    check_attention(2, (const int[]){0, 40}, (const int[]){70, 33}, 1, 4, 256, 16, LLM_F16, 70, 1,
                    0);
    check_attention(3, far, one, 2, 8, 64, 16, LLM_F32, 0, 2, 0);
    check_attention(6, far, one, 2, 4, 64, 16, LLM_F16, 0, 0, 0);    /* a decode step */
    check_attention(6, far, few, 2, 3, 64, 16, LLM_F16, 0, 0, 8);
    check_attention(2, (const int[]){0, 40}, (const int[]){70, 33}, 1, 4, 128, 16, LLM_F16, 70, 0,
                    8);
    check_attention(3, far, few, 5, 1, 19, 7, LLM_F32, 0, 0, 4);
    /* a speculative verification and a short prompt */
    check_attention(5, far, few, 2, 2, 128, 16, LLM_F16, 0, 0, 0);
    check_attention(3, far, one, 1, 8, 256, 16, LLM_F16, 0, 0, 0);
    check_attention(4, far, few, 1, 3, 19, 7, LLM_F32, 0, 0, 0);
    check_attention(4, far, few, 2, 1, 96, 32, LLM_F16, 0, 0, 0);
    check_attention(6, far, few, 1, 2, 64, 16, LLM_F16, 50, 0, 0);   /* a window */
    /* prefill */
    check_attention(2, (const int[]){0, 40}, (const int[]){70, 33}, 1, 4, 64, 16, LLM_F16, 0, 0, 0);
    check_attention(2, (const int[]){0, 5}, (const int[]){33, 18}, 2, 2, 128, 16, LLM_F16, 0, 0, 0);
    check_attention(1, (const int[]){20}, (const int[]){50}, 1, 2, 80, 8, LLM_F32, 30, 0, 0);
    check_attention(1, (const int[]){700}, one, 1, 2, 64, 16, LLM_F16, 0, 0, 0); /* long */
}

static void test_attention_in_trees(void **state) {
    (void)state;
    for (int f = 0; f < n_variants; f++)
        if (variants[f].batch_independent) check_trees(variants[f].backend, 16);
}

typedef struct copy_case {
    cache_case cache;
    const uint16_t *keys, *values;
    const int32_t *from, *to;
    int n;
} copy_case;

static void run_copy_blocks(llm_backend *b, const void *args, float *out) {
    const copy_case *c = (const copy_case *)args;
    llm_cache cache = cache_of(&c->cache);
    cache.keys = to_device(b, c->keys, LAYERS * cache.layer_bytes),
    cache.values = to_device(b, c->values, LAYERS * cache.layer_bytes);
    b->copy_blocks(b->context, &cache, c->from, c->to, c->n);
    fetch_and_free(b, cache.keys, out, LAYERS * cache.layer_bytes);
    fetch_and_free(b, cache.values, (char *)out + LAYERS * cache.layer_bytes,
                LAYERS * cache.layer_bytes);
}

static void test_copy_blocks(void **state) {
    (void)state;
    enum { MANY = 300 }; /* more pairs than one launch copies */
    int32_t many[MANY], after[MANY];
    for (int i = 0; i < MANY; i++) many[i] = i, after[i] = MANY + i;
    for (int i = 0; i < 7; i++) {
        /* block 2 is written, then read; block 0 is read, then written */
        static const int32_t from[] = {0, 4, 2, 3}, to[] = {2, 1, 4, 0};
        copy_case c = {.from = from, .to = to, .n = i % 4 + 1};
        if (i == 6) c.from = many, c.to = after, c.n = MANY;
        int block_size = random_int(1, 16), head_dim = i % 2 ? 2 * random_int(1, 20) : 64;
        if (i == 1) block_size = 3, head_dim = 10; /* 120 bytes, not a multiple of 16 */
        if (i == 6) block_size = 1, head_dim = 8;
        c.cache.batch.batch.block_size = block_size;
        c.cache.batch.n_blocks = i == 6 ? 2 * MANY : 5;
        c.cache.shape = (llm_attention_shape){2, 2, head_dim, 1.0f, false, 0, 0, 0};
        c.cache.cache_type = LLM_F16;
        llm_cache cache = cache_of(&c.cache);
        size_t bytes = LAYERS * cache.layer_bytes;
        uint8_t *keys = malloc(bytes), *values = malloc(bytes);
        for (size_t k = 0; k < bytes; k++)
            keys[k] = (uint8_t)random_u64(&rng), values[k] = (uint8_t)random_u64(&rng);
        c.keys = (const uint16_t *)(const void *)keys,
        c.values = (const uint16_t *)(const void *)values;
        check("copy_blocks", run_copy_blocks, &c, (int64_t)(2 * bytes / sizeof(float)), 0, 0);
        free(keys), free(values);
    }
}

/* ---- Memory, errors -------------------------------------------------------------------------- */

static void test_memory(void **state) {
    (void)state;
    llm_error err;
    for (int f = 0; f < n_variants; f++) {
        llm_backend *b = variants[f].backend;
        for (int i = 0; i < 6; i++) {
            size_t bytes = i == 0 ? 1 : i == 5 ? 5000001 : (size_t)random_int(1, 100000);
            uint8_t *data = malloc(bytes), *back = malloc(bytes);
            for (size_t k = 0; k < bytes; k++) data[k] = (uint8_t)random_u64(&rng);
            uint8_t *p = to_device(b, data, bytes);
            fetch_and_free(b, p, back, bytes);
            assert_memory_equal(data, back, bytes);
            p = to_device(b, NULL, bytes); /* upload in pieces */
            for (size_t at = 0, n; at < bytes; at += n) {
                n = bytes - at < 30001 ? bytes - at : 30001;
                assert_true(b->upload(b->context, p + at, data + at, n, &err));
            }
            fetch_and_free(b, p, back, bytes);
            assert_memory_equal(data, back, bytes);
            free(data), free(back);
        }
        b->release(b->context, NULL);
        assert_null(b->allocate(b->context, (size_t)1 << 60, "far too much", &err));
        assert_int_equal(err.status, LLM_ERROR_MEMORY);
        assert_non_null(strstr(err.message, "far too much"));
        assert_true(b->sync(b->context, &err));

        llm_weight strange = {(llm_type)77, 10, 64, NULL, NULL, NULL, false},
                   cut = {LLM_Q8_0, 10, 63, NULL, NULL, NULL, false};
        float data[640] = {0};
        assert_false(b->load_weight(b->context, &strange, data, &err));
        assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
        assert_false(b->load_weight(b->context, &cut, data, &err));
        assert_int_equal(err.status, LLM_ERROR_FORMAT);
        llm_limits nothing, some = {160, 8, 2100, 1};
        memset(&nothing, 0, sizeof nothing);
        ops *wide = ops_new();
        llm_attention_shape shape = {1, 1, 5000, 1.0f, false, 0, 0, 0};
        llm_cache cache = {LLM_F16, 1, 1, 5000, 1, 1, 10000, data, data, false};
        llm_batch none;
        memset(&none, 0, sizeof none);
        ops_attention(wide, &shape, data, &cache, 0, data);
        assert_false(b->prepare(b->context, &wide->program, &nothing, &err));
        assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
        if (device_is_gpu(device)) {
            assert_false(b->prepare(b->context, &wide->program, &some, &err));
            assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
        }
        assert_null(wide->program.plan);
        assert_false(b->run(b->context, &wide->program, LLM_BODY, &none, 0, 0, &err));
        assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
        ops_free(wide, b);
    }
}

/* An upload larger than all pinned staging buffers together. Each buffer is refilled only after the
 * previous copy from it has ended. */
static void test_large_upload(void **state) {
    (void)state;
    llm_error err;
    llm_backend *b = variants[0].backend;
    size_t n = (size_t)27 << 20;
    uint32_t *data = malloc(n * 4), *back = calloc(n, 4);
    assert_non_null(data);
    assert_non_null(back);
    for (size_t i = 0; i < n; i++) data[i] = (uint32_t)i * 2654435761u;
    uint32_t *p = to_device(b, NULL, n * 4);
    assert_true(b->upload(b->context, p, data, n * 4 - 3, &err));
    uint8_t last = (uint8_t)(data[n - 1] & 255);
    memset(data + n / 2, 0, n * 2 - 3); /* upload has already read the host's memory */
    assert_true(b->download(b->context, back, p, n * 4 - 3, &err));
    for (size_t i = 0; i + 1 < n; i++)
        if (back[i] != (uint32_t)i * 2654435761u)
            fail_msg("value %zu of %zu is wrong", i, n);
    assert_int_equal((uint8_t)(back[n - 1] & 255), last);
    b->release(b->context, p);
    free(data), free(back);
}

/* ---- Programs and their graphs --------------------------------------------------------------- */

void emulator_fail_allocation(long n) __attribute__((weak));
void emulator_fail_launch(long n) __attribute__((weak));
bool emulator_failed(void) __attribute__((weak));
emulator_counts emulator_counted(void) __attribute__((weak));

enum {
    SIDE = 64,
    STEP_COUNT = 4,
    STEP_ROWS = MAX_SEQUENCES * STEP_COUNT /* enough rows for x to be rounded into scratch memory */
};

/* A step with a few tokens of each sequence, and programs for it: y = swiglu(x, x), out = y times a
 * matrix. */
typedef struct graph_case {
    llm_backend *b;
    ragged step;
    llm_weight weights[2];
    float *x, *y, *out;                  /* device (STEP_ROWS, SIDE) */
    float expected[2][STEP_ROWS * SIDE]; /* result for each matrix */
    uint64_t replays;                    /* the device's replay count when last read */
} graph_case;

static ops *program_with(graph_case *c, int matrix) {
    ops *o = ops_new();
    ops_swiglu(o, c->x, c->x, SIDE, c->y);
    ops_matmul(o, c->y, &c->weights[matrix], NULL, false, c->out);
    return o;
}

static int new_replays(graph_case *c) {
    llm_device_state now;
    c->b->state(c->b->context, &now);
    int more = (int)(now.replays - c->replays);
    c->replays = now.replays;
    return more;
}

static void check_outcome(graph_case *c, int matrix) {
    llm_error err;
    float got[STEP_ROWS * SIDE], nothing[STEP_ROWS * SIDE];
    if (!c->b->download(c->b->context, got, c->out, sizeof got, &err)) fail_msg("%s", err.message);
    assert_memory_equal(got, c->expected[matrix], sizeof got);
    memset(nothing, 0xff, sizeof nothing); /* the next run must write it */
    assert_true(c->b->upload(c->b->context, c->out, nothing, sizeof nothing, &err));
}

/* Run a step. The result must be right, and `replays` graphs must be replayed. */
static void check_step(graph_case *c, ops *o, int matrix, int replays) {
    llm_error err;
    if (!ops_step(o, c->b, &c->step.batch, &err)) fail_msg("%s", err.message);
    check_outcome(c, matrix);
    assert_int_equal(new_replays(c), replays);
}

static graph_case *new_graph_case(void) {
    llm_error err;
    graph_case *c = calloc(1, sizeof *c);
    static const int first[MAX_SEQUENCES] = {0, 3, 9, 1, 20, 7};
    static const int count[MAX_SEQUENCES] = {STEP_COUNT, STEP_COUNT, STEP_COUNT,
                                             STEP_COUNT, STEP_COUNT, STEP_COUNT};
    float *x = random_floats(STEP_ROWS * SIDE, 1.0f);
    assert_int_equal(llm_rounded_rows(STEP_ROWS), STEP_ROWS);
    c->b = device_open(device, NULL);
    c->step = make_batch(MAX_SEQUENCES, first, count, 16, 10);
    c->x = floats_to_device(c->b, x, STEP_ROWS * SIDE);
    c->y = to_device(c->b, NULL, STEP_ROWS * SIDE * 4);
    c->out = to_device(c->b, NULL, STEP_ROWS * SIDE * 4);
    for (int i = 0; i < 2; i++) {
        float *values = random_floats(SIDE * SIDE, 1.0f);
        weight_case w = {.type = LLM_F16, .rows = SIDE, .cols = SIDE};
        w.data = packed(LLM_F16, values, SIDE * SIDE);
        c->weights[i] = load(c->b, &w);
        op_swiglu(c->b, c->x, c->x, STEP_ROWS * SIDE, c->y);
        op_matmul(c->b, c->y, &c->weights[i], NULL, STEP_ROWS, false, c->out);
        assert_true(
            c->b->download(c->b->context, c->expected[i], c->out, sizeof c->expected[i], &err));
        free(values), free((void *)w.data);
    }
    assert_true(memcmp(c->expected[0], c->expected[1], sizeof c->expected[0]));
    assert_int_equal(new_replays(c), 0);
    free(x);
    return c;
}

static void free_graph_case(graph_case *c) {
    for (int i = 0; i < 2; i++) c->b->free_weight(c->b->context, &c->weights[i]);
    c->b->release(c->b->context, c->x), c->b->release(c->b->context, c->y);
    c->b->release(c->b->context, c->out);
    llm_backend_free(c->b);
    free_batch(&c->step);
    free(c);
}

static void skip_unless_gpu(void) {
    if (!device_is_gpu(device)) skip();
}

static void skip_unless_emulated(void) {
    if (!strcmp(device, "emulated")) return;
    print_message("SKIPPED: only the emulated device can inject failures\n");
    skip();
}

static uint64_t handles(void) {
    return !strcmp(device, "emulated") ? emulator_counted().live_handles : 0;
}

/* A graph belongs to a program and is freed with it. A later program at the same address gets a
 * graph of its own. */
static void test_graphs(void **state) {
    (void)state;
    skip_unless_gpu();
    graph_case *c = new_graph_case();
    uint64_t before = handles();
    ops *one = program_with(c, 0);
    for (int i = 0; i < 4; i++)
        check_step(c, one, 0, i > 0); /* the first step of its shape is launched, not replayed */
    ops *other = program_with(c, 1);
    for (int i = 0; i < 3; i++) check_step(c, other, 1, i > 0);
    for (int i = 0; i < 3; i++) { /* preparing `other` dropped the graphs of `one` */
        check_step(c, one, 0, i > 0);
        check_step(c, other, 1, 1);
    }
    assert_true(handles() == before + 2 || strcmp(device, "emulated"));
    c->b->forget(c->b->context, &one->program);
    assert_true(handles() == before + 1 || strcmp(device, "emulated"));
    assert_null(one->program.plan);
    check_step(c, other, 1, 1); /* `other` still has its graph */
    one->list[1].weight = &c->weights[1];
    for (int i = 0; i < 3; i++) check_step(c, one, 1, i > 0);
    ops_free(one, c->b), ops_free(other, c->b);
    assert_int_equal(handles(), before);
    free_graph_case(c);
}

/* No graph uses scratch memory that prepare has moved. */
static void test_stale_graphs(void **state) {
    (void)state;
    skip_unless_gpu();
    enum { COLS = 16384 };
    llm_error err;
    graph_case *c = new_graph_case();
    ops *o = program_with(c, 0);
    for (int i = 0; i < 3; i++) check_step(c, o, 0, i > 0);
    float *values = random_floats(COLS, 1.0f);
    float *x = floats_to_device(c->b, values, COLS), *out = to_device(c->b, NULL, 4);
    weight_case wide = {.type = LLM_F16, .rows = 1, .cols = COLS};
    wide.data = packed(LLM_F16, values, COLS);
    llm_weight w = load(c->b, &wide);
    for (int kind = 0; kind < 2; kind++) { /* first wider rows, then larger step tables */
        llm_limits limits = {kind ? 2000 : 1, kind ? 64 : 1, kind ? 100000 : 1, 1};
        ops *larger = ops_new();
        ops_matmul(larger, x, &w, NULL, false, out);
        if (!c->b->prepare(c->b->context, &larger->program, &limits, &err))
            fail_msg("%s", err.message);
        for (int i = 0; i < 3; i++) check_step(c, o, 0, i > 0);
        ops_free(larger, c->b);
    }
    ops_free(o, c->b);
    c->b->free_weight(c->b->context, &w);
    c->b->release(c->b->context, x), c->b->release(c->b->context, out);
    free(values), free((void *)wide.data);
    free_graph_case(c);
}

/* Slices of the head with different numbers of rows need different graphs. */
static void test_graphs_per_slice_size(void **state) {
    (void)state;
    skip_unless_gpu();
    llm_error err;
    graph_case *c = new_graph_case();
    ops *o = program_with(c, 0);
    const int all = c->step.batch.n_logits, counts[] = {1, 1, 1, all, 1, all};
    assert_true(all > 1);
    o->program.n_body = 1;
    o->buffers[o->list[1].out].head = true;
    llm_limits limits = ops_limits(&c->step.batch, all);
    assert_true(c->b->prepare(c->b->context, &o->program, &limits, &err));
    for (int i = 0; i < 6; i++) {
        float got[STEP_ROWS * SIDE];
        size_t bytes = (size_t)counts[i] * SIDE * sizeof *got;
        memset(got, 0xff, sizeof got);
        assert_true(c->b->upload(c->b->context, c->out, got, sizeof got, &err));
        assert_true(
            c->b->run(c->b->context, &o->program, LLM_WHOLE, &c->step.batch, 0, counts[i], &err));
        assert_true(c->b->download(c->b->context, got, c->out, sizeof got, &err));
        assert_memory_equal(got, c->expected[0], bytes);
    }
    ops_free(o, c->b);
    free_graph_case(c);
}

/* Only a whole decode step is captured: not a prompt, a part of a program or a profiled step. */
static void test_never_captured(void **state) {
    (void)state;
    skip_unless_gpu();
    llm_error err;
    graph_case *c = new_graph_case();
    ops *o = program_with(c, 0);
    double seconds[2] = {0, 0};
    uint64_t before = handles();
    ragged prompt = make_batch(2, (const int[]){0, 2}, (const int[]){17, STEP_ROWS - 17}, 16, 10);
    ragged decode = c->step;
    c->step = prompt;
    for (int i = 0; i < 3; i++) check_step(c, o, 0, 0);
    c->step = decode;
    for (int i = 0; i < 3; i++) {
        assert_true(c->b->run(c->b->context, &o->program, LLM_BODY, &c->step.batch, 0, 0, &err));
        check_outcome(c, 0);
        assert_int_equal(new_replays(c), 0);
    }
    o->program.seconds = seconds;
    for (int i = 0; i < 3; i++) check_step(c, o, 0, 0);
    assert_true(seconds[0] > 0 && seconds[1] > 0);
    assert_int_equal(handles(), before);
    o->program.seconds = NULL;
    for (int i = 0; i < 3; i++) check_step(c, o, 0, i > 0);
    ops_free(o, c->b);
    free_batch(&prompt);
    free_graph_case(c);
}

/* If prepare runs out of memory, the program cannot be run, but earlier programs still can. A later
 * prepare succeeds. */
static void test_failed_prepare(void **state) {
    (void)state;
    skip_unless_emulated();
    int refused = 0;
    bool more = true;
    for (long n = 0; more; n++) {
        llm_error err;
        uint64_t live = emulator_counted().live_allocations;
        uint64_t pinned = emulator_counted().live_pinned;
        graph_case *c = new_graph_case();
        llm_limits limits = {3000, 64, 5000, 100};
        llm_attention_shape shape = {4, 1, 64, 1.0f, false, 0, 0, 0};
        llm_cache cache = {LLM_F16, 1, 1, 64, 16, 1, 2048, c->x, c->x, false};
        ops *o = program_with(c, 0), *larger = program_with(c, 1);
        ops_attention(larger, &shape, c->x, &cache, 0, c->y); /* prepared, but not run */
        larger->program.n_body--;
        for (int i = 0; i < 3; i++) check_step(c, o, 0, i > 0);
        emulator_fail_allocation(n);
        more = !c->b->prepare(c->b->context, &larger->program, &limits, &err);
        emulator_fail_allocation(-1);
        if (more) {
            refused++;
            assert_int_equal(err.status, LLM_ERROR_MEMORY);
            assert_true(strstr(err.message, "wanted for") || strstr(err.message, "locked memory"));
            assert_null(larger->program.plan);
            assert_false(
                c->b->run(c->b->context, &larger->program, LLM_BODY, &c->step.batch, 0, 0, &err));
            assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
        }
        for (int i = 0; i < 3; i++) check_step(c, o, 0, i > 0);
        if (more && !c->b->prepare(c->b->context, &larger->program, &limits, &err))
            fail_msg("%s", err.message);
        assert_true(
            c->b->run(c->b->context, &larger->program, LLM_BODY, &c->step.batch, 0, 0, &err));
        check_outcome(c, 1);
        ops_free(o, c->b), ops_free(larger, c->b);
        free_graph_case(c);
        assert_int_equal(emulator_counted().live_allocations, live);
        assert_int_equal(emulator_counted().live_pinned, pinned);
    }
    print_message("    %d allocations of prepare failed\n", refused);
    assert_true(refused > 3);
}

/* The next sync reports a failed kernel launch; later syncs do not. A failure while a graph is
 * captured, created or launched is no error: the kernels are then launched one by one. */
static void test_failed_launches(void **state) {
    (void)state;
    skip_unless_emulated();
    llm_error err;
    llm_device_state now;
    graph_case *c = new_graph_case();
    ops *o = program_with(c, 0);
    c->b->state(c->b->context, &now);
    uint64_t start = now.launches;
    check_step(c, o, 0, 0);
    c->b->state(c->b->context, &now);
    int launches = (int)(now.launches - start);
    assert_true(launches >= 2); /* swiglu, matmul */
    for (int n = 0; n < launches; n++) {
        ops_free(o, c->b);
        o = program_with(c, 0);
        emulator_fail_launch(n); /* in the first run */
        assert_true(ops_step(o, c->b, &c->step.batch, &err));
        assert_true(emulator_failed());
        assert_false(c->b->sync(c->b->context, &err));
        assert_int_equal(err.status, LLM_ERROR_DEVICE);
        assert_true(c->b->sync(c->b->context, &err));
        emulator_fail_launch(n); /* in the capture */
        check_step(c, o, 0, 0);
        assert_true(emulator_failed());
        check_step(c, o, 0, 1);
    }
    for (int kind = 0; kind < 3; kind++) {
        ops_free(o, c->b);
        o = program_with(c, 0);
        check_step(c, o, 0, 0);
        if (kind == 2) check_step(c, o, 0, 1);
        if (kind == 0) emulator_fail_allocation(0);          /* creating the graph */
        /* launching a new graph, or an old one */
        else emulator_fail_launch(kind == 1 ? launches : 0);
        uint64_t before = emulator_counted().live_handles;
        check_step(c, o, 0, 0);
        assert_true(emulator_failed());
        assert_int_equal(emulator_counted().live_handles, before - (kind == 2));
        assert_true(c->b->sync(c->b->context, &err));
        for (int i = 0; i < 2; i++) check_step(c, o, 0, 1);
    }
    ops_free(o, c->b);
    free_graph_case(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_large_upload),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_gather_columns),
        cmocka_unit_test(test_gather),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_body_and_head),
        cmocka_unit_test(test_copy_blocks),
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_in_trees),
        cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_stale_graphs),
        cmocka_unit_test(test_graphs_per_slice_size),
        cmocka_unit_test(test_never_captured),
        cmocka_unit_test(test_failed_prepare),
        cmocka_unit_test(test_failed_launches),
        cmocka_unit_test(test_traits),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
