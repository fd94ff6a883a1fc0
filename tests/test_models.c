/* The tiny models of tests/make_models.py: at least one for each architecture, RoPE scaling,
 * window, bias and 4-bit format. Their logits are compared with those of Hugging Face transformers,
 * from a Hugging Face folder and from a GGUF file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test_util.h"
#include "llm.h"
#include "../models/quantize.h"
#include "tiny_model.h"

static const char *const plain[] = {"llama",      "llama_mha",    "llama31",        "llama_linear",
                                    "llama_bias", "mistral",      "mistral_window", "qwen2",
                                    "qwen2_yarn", "qwen2_window", "qwen3",          "qwen3_yarn",
                                    "granite",    "granite_bias", "olmo2",          "olmo2_mha",
                                    "olmo3",      "olmo3_yarn",   "smollm3",        "smollm3_list",
                                    "phi3",       "phi3_partial", "phi3_long",      "phi3_short",
                                    "gemma2",     "gemma3",       "gemma3_linear",
                                    "mixtral",    "mixtral_tied", "qwen2moe",       "qwen2moe_norm",
                                    "qwen3moe",   "qwen3moe_step", "olmoe",         "olmoe_norm",
                                    "bloom",      "bloom_heads",  "mpt",
                                    "mpt_heads",  "gptneox",      "gptneox_serial",
                                    "stablelm",   "starcoder2",   "stablelm_parallel",
                                    "phi2",       "starcoder2_plain"};
/* groups of 32 and of 128, with and without zero points; GPTQ with and without act-order; version 2
 * of GPTQ's format */
static const char *const int4[] = {
    "gptq_g32",     "gptq_g32_zero", "gptq_g32_act_sym", "gptq_g32_act",      "awq_g32_sym",
    "awq_g32",      "gptq_g128",     "gptq_g128_zero",   "gptq_g128_act_sym", "gptq_g128_act",
    "awq_g128_sym", "awq_g128",      "gptq_v2"};
enum { N_PLAIN = sizeof plain / sizeof *plain, N_INT4 = sizeof int4 / sizeof *int4 };

typedef struct run { /* what the logits hook reads and writes */
    const int32_t *ids;
    int n_ids, vocab;
    float *logits; /* (n_ids, vocab) */
    int n_seen;
} run;

/* A logits hook that copies the logits and permits only the golden sequence's next token. */
static void logits_hook(void *user, uint64_t request, int sample, int position, float *logits) {
    run *r = (run *)user;
    (void)request, (void)sample;
    assert_true(position < r->n_ids);
    memcpy(r->logits + (size_t)position * (size_t)r->vocab, logits,
           (size_t)r->vocab * sizeof *logits);
    r->n_seen++;
    for (int i = 0; i < r->vocab; i++) logits[i] = 0;
    if (position + 1 < r->n_ids) logits[r->ids[position + 1]] = 100;
}

/* Prefill n_prompt tokens, decode the others, and return the largest error at one position: the
 * norm of the difference relative to the norm of the expected logits. */
static double worst_error(const char *path, llm_isa isa, bool naive, int chunk, int n_prompt,
                          const int32_t *ids, int n_ids, const float *expected) {
    llm_error err;
    llm_model *model = llm_model_load(path, &err);
    if (!model) fail_msg("%s", err.message);
    llm_engine_options o = llm_engine_defaults();
    o.backend = llm_cpu_backend(1, isa, &err);
    o.cache_type = LLM_F32;
    o.naive_attention = naive;
    o.max_batch_tokens = chunk;
    llm_engine *engine = llm_engine_create(model, &o, &err);
    if (!engine) fail_msg("%s", err.message);
    run r = {ids, n_ids, llm_model_config(model)->vocab_size, NULL, 0};
    r.logits = (float *)malloc((size_t)n_ids * (size_t)r.vocab * sizeof(float));
    llm_request request = llm_request_defaults();
    request.prompt = ids;
    request.n_prompt = n_prompt;
    request.max_tokens = n_ids - n_prompt;
    request.ignore_end = true;
    request.logits_hook = logits_hook;
    request.user = &r;
    assert_true(llm_submit(engine, &request, NULL, &err));
    int step;
    while ((step = llm_step(engine, &err)) > 0) {}
    if (step < 0) fail_msg("%s", err.message);
    /* the logits after the last generated token are not computed */
    assert_true(r.n_seen >= n_ids - 1);
    double worst = 0;
    for (int i = 0; i < n_ids - (n_prompt < n_ids); i++) {
        double off = 0, size = 0;
        for (int k = 0; k < r.vocab; k++) {
            double a = r.logits[i * r.vocab + k], b = expected[i * r.vocab + k];
            off += (a - b) * (a - b);
            size += b * b;
        }
        if (!(sqrt(off / size) <= worst)) worst = sqrt(off / size);
    }
    free(r.logits);
    llm_engine_free(engine);
    llm_backend_free(o.backend);
    llm_model_free(model);
    return worst;
}

typedef struct golden {
    llm_file *file;
    int32_t ids[64];
    int n_ids, n_prompt;
    const float *logits;
} golden;

static golden golden_open(const char *name) {
    golden g;
    char path[200];
    llm_error err;
    uint64_t n_prompt;
    snprintf(path, sizeof path, "tests/data/models/%s.golden", name);
    g.file = llm_file_open(path, &err);
    if (!g.file) fail_msg("%s", err.message);
    const llm_value *ids = llm_file_find(g.file, "golden.ids");
    assert_true(ids && ids->count <= 64 &&
                llm_value_u64(llm_file_find(g.file, "golden.n_prompt"), 0, &n_prompt));
    g.n_ids = (int)ids->count;
    g.n_prompt = (int)n_prompt;
    for (int i = 0; i < g.n_ids; i++) {
        int64_t id;
        assert_true(llm_value_i64(ids, (uint64_t)i, &id));
        g.ids[i] = (int32_t)id;
    }
    g.logits = (const float *)llm_file_find_tensor(g.file, "golden.logits")->data;
    return g;
}

/* Compare with the golden logits on each instruction set, with both kinds of attention, in
 * prefill and in decode. Without quantized weights, the only errors are roundings of f32. With
 * them, the fast kernels round activations to 8 bits (see test_golden.c), the reference does
 * not. The bound for quantized weights is wide: zero points increase the error, and so do the
 * gates of these random models, where a few products are far larger than the other 255 that
 * share their scale. test_kernels.c has a sharp bound. */
static void check_logits(const char *name, const char *path, bool quantized) {
    golden g = golden_open(name);
    double worst = 0, reference = 0;
    for (int isa = LLM_ISA_REFERENCE; isa <= LLM_ISA_BEST; isa++)
        for (int naive = 0; naive < 2; naive++) {
            double bound = quantized && isa > LLM_ISA_REFERENCE ? 0.3 : 1e-4;
            double whole =
                worst_error(path, (llm_isa)isa, naive, 64, g.n_ids, g.ids, g.n_ids, g.logits);
            double decoded =
                worst_error(path, (llm_isa)isa, naive, 16, g.n_prompt, g.ids, g.n_ids, g.logits);
            if (!(whole <= bound && decoded <= bound))
                fail_msg("%s, %s: prefill %.1e, decode %.1e, bound %.1e", path,
                         llm_isa_name((llm_isa)isa), whole, decoded, bound);
            if (whole > worst) worst = whole;
            if (decoded > worst) worst = decoded;
            if (isa == LLM_ISA_REFERENCE) reference = worst;
        }
    print_message("%-48s %.1e (reference %.1e)\n", path, worst, reference);
    llm_file_close(g.file);
}

static void test_folders(void **state) {
    char path[200];
    (void)state;
    for (int i = 0; i < N_PLAIN; i++) {
        snprintf(path, sizeof path, "tests/data/models/%s", plain[i]);
        check_logits(plain[i], path, false);
    }
}

static void test_gguf(void **state) {
    char path[200];
    (void)state;
    for (int i = 0; i < N_PLAIN; i++) {
        snprintf(path, sizeof path, "tests/data/models/%s.gguf", plain[i]);
        check_logits(plain[i], path, false);
    }
}

static void test_int4(void **state) {
    char path[200];
    (void)state;
    for (int i = 0; i < N_INT4; i++) {
        snprintf(path, sizeof path, "tests/data/models/%s", int4[i]);
        check_logits(int4[i], path, true);
    }
    /* experts, each with its own integers */
    check_logits("gptq_experts", "tests/data/models/gptq_experts", true);
}

/* The unpacked values of a 4-bit matrix are exactly those of the golden file. */
static void test_int4_values(void **state) {
    (void)state;
    for (int i = 0; i < N_INT4; i++) {
        golden g = golden_open(int4[i]);
        const llm_tensor *golden_values = llm_file_find_tensor(g.file, "golden.k_proj");
        char path[200];
        llm_error err;
        snprintf(path, sizeof path, "tests/data/models/%s", int4[i]);
        llm_file *file = llm_file_open(path, &err);
        if (!file) fail_msg("%s", err.message);
        const llm_tensor *t = llm_file_find_tensor(file, "blk.0.attn_k.weight");
        assert_true(t && t->dims[0] == golden_values->dims[0] &&
                    t->dims[1] == golden_values->dims[1]);
        bool act = strstr(int4[i], "_act") != NULL, wide = strstr(int4[i], "_g128") != NULL;
        bool symmetric =
            strstr(int4[i], "sym") || !strcmp(int4[i], "gptq_g32") || !strcmp(int4[i], "gptq_g128");
        assert_int_equal(t->type, symmetric ? LLM_Q4_0 : LLM_Q4_Z);
        /* with groups of 128, this matrix has one group and ffn_down two */
        assert_int_equal(t->columns != NULL, act && !wide);
        assert_int_equal(llm_file_find_tensor(file, "blk.0.ffn_down.weight")->columns != NULL, act);
        assert_null(t->data);
        float *row = (float *)malloc(t->dims[0] * sizeof *row);
        char *rows = (char *)malloc(t->bytes);
        const llm_type_info *type = llm_type_find(t->type);
        if (!llm_tensor_rows(t, 0, t->dims[1], rows, &err)) fail_msg("%s", err.message);
        for (uint64_t r = 0; r < t->dims[1]; r++) {
            type->unpack(rows + r * t->bytes / t->dims[1], row, (int64_t)t->dims[0]);
            for (uint64_t c = 0; c < t->dims[0]; c++) {
                uint64_t column = t->columns ? (uint64_t)t->columns[c] : c;
                float expected = ((const float *)golden_values->data)[r * t->dims[0] + column];
                if (row[c] != expected)
                    fail_msg("%s: (%d, %d) is %g, not %g", int4[i], (int)r, (int)c, (double)row[c],
                             (double)expected);
            }
        }
        free(row);
        free(rows);
        llm_file_close(file);
        llm_file_close(g.file);
    }
}

/* n rows from `first` on equal those of `all`, and no byte around them is written. */
static void check_rows(const llm_tensor *t, const uint8_t *all, uint64_t first, uint64_t n) {
    enum { MARGIN = 64 };
    uint64_t row_bytes = t->bytes / t->dims[1];
    size_t size = (size_t)(n * row_bytes);
    uint8_t *rows = (uint8_t *)malloc(size + 2 * MARGIN);
    llm_error err = {.status = LLM_ERROR_DEVICE, .message = "old"};
    memset(rows, 0xa5, size + 2 * MARGIN);
    if (!llm_tensor_rows(t, first, n, rows + MARGIN, &err)) fail_msg("%s", err.message);
    assert_int_equal(err.status, LLM_OK);
    assert_memory_equal(rows + MARGIN, all + first * row_bytes, size);
    for (int i = 0; i < MARGIN; i++)
        assert_true(rows[i] == 0xa5 && rows[MARGIN + size + (size_t)i] == 0xa5);
    free(rows);
}

static void refuse_rows(const llm_tensor *t, uint64_t first, uint64_t n, void *out,
                         const char *words) {
    llm_error err = {.status = LLM_OK};
    if (llm_tensor_rows(t, first, n, out, &err))
        fail_msg("accepted: %llu rows from %llu", (unsigned long long)n, (unsigned long long)first);
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    if (!strstr(err.message, words)) fail_msg("expected \"%s\", got \"%s\"", words, err.message);
    assert_false(llm_tensor_rows(t, first, n, out, NULL));
}

/* Any rows of any tensor can be read: of 4-bit tensors, the rows that test_int4_values checks; of
 * the others, the data itself. */
static void test_tensor_rows(void **state) {
    (void)state;
    int64_t n_int4 = 0, n_large = 0;
    for (int i = 0; i < N_INT4 + 1; i++) {
        char path[200];
        llm_error err;
        snprintf(path, sizeof path, "tests/data/models/%s", i < N_INT4 ? int4[i] : "qwen3.gguf");
        llm_file *file = llm_file_open(path, &err);
        if (!file) fail_msg("%s", err.message);
        for (int64_t k = 0; k < llm_file_n_tensors(file); k++) {
            const llm_tensor *t = llm_file_tensor(file, k);
            uint64_t n = t->dims[1];
            uint8_t *all = (uint8_t *)malloc(t->bytes);
            if (!llm_tensor_rows(t, 0, n, all, &err)) fail_msg("%s", err.message);
            if (t->data) assert_memory_equal(all, t->data, t->bytes);
            assert_true(t->data || t->int4);
            n_int4 += !t->data;
            n_large += !t->data && n > 128;
            for (uint64_t r = 0; r < n; r++) check_rows(t, all, r, 1);
            for (uint64_t trial = 0; trial < 60; trial++) {
                uint64_t first =
                    (uint64_t)(llm_random(1, (uint64_t)k, 2 * trial) * (double)(n + 1));
                check_rows(t, all, first,
                           (uint64_t)(llm_random(1, (uint64_t)k, 2 * trial + 1) *
                                      (double)(n - first + 1)));
            }
            check_rows(t, all, n, 0);
            assert_true(llm_tensor_rows(t, 0, 0, NULL, &err));
            refuse_rows(t, n, 1, all, "1 rows of ");
            refuse_rows(t, 0, n + 1, all, "but it has ");
            refuse_rows(t, n + 1, 0, all, "but it has ");
            refuse_rows(t, 1, UINT64_MAX, all, "but it has ");
            refuse_rows(t, UINT64_MAX, 1, all, "but it has ");
            refuse_rows(t, UINT64_MAX, UINT64_MAX, all, "but it has ");
            refuse_rows(t, 0, 1, NULL, "out is NULL");
            refuse_rows(NULL, 0, 1, all, "the tensor is NULL");
            free(all);
        }
        llm_file_close(file);
    }
    assert_true(n_int4 >= 7 * N_INT4 && n_large >= 8);
}

/* A folder rewritten as an f32 GGUF file is the same model. (For llama, that permutes the rows of q
 * and k.) */
static void test_folder_to_gguf(void **state) {
    (void)state;
    char path[200], out[200];
    const char *tmp = getenv("TMPDIR");
    snprintf(out, sizeof out, "%s/llm-test-models-%ld.gguf", tmp ? tmp : "/tmp", (long)getpid());
    for (int i = 0; i < N_PLAIN + N_INT4; i++) {
        const char *name = i < N_PLAIN ? plain[i] : int4[i - N_PLAIN];
        llm_error err;
        snprintf(path, sizeof path, "tests/data/models/%s", name);
        if (!llm_quantize(path, out, LLM_F32, false, NULL, NULL, &err)) fail_msg("%s", err.message);
        golden g = golden_open(name);
        double error = worst_error(out, LLM_ISA_BEST, false, 64, g.n_ids, g.ids, g.n_ids, g.logits);
        if (!(error <= 1e-4)) fail_msg("%s as f32: %.1e", name, error);
        llm_file *file = llm_file_open(out, &err);
        for (int64_t k = 0; k < llm_file_n_tensors(file); k++) {
            const llm_tensor *t = llm_file_tensor(file, k);
            assert_int_equal(t->type, LLM_F32); /* also vectors, as llama.cpp requires */
            /* in the same order as from llama.cpp's converter */
            char other[200];
            snprintf(other, sizeof other, "tests/data/models/%s.gguf", name);
            llm_file *peer = i < N_PLAIN ? llm_file_open(other, &err) : NULL;
            if (peer && strncmp(t->name.data, "rope_freqs", 10)) {
                char key[64];
                snprintf(key, sizeof key, "%.*s", (int)t->name.length, t->name.data);
                const llm_tensor *u = llm_file_find_tensor(peer, key);
                assert_non_null(u);
                int64_t n = (int64_t)(t->bytes / 4);
                float *values = (float *)malloc(t->bytes);
                llm_type_find(u->type)->unpack(u->data, values, n);
                assert_memory_equal(values, t->data, t->bytes);
                free(values);
            }
            llm_file_close(peer);
        }
        llm_file_close(file);
        llm_file_close(g.file);
    }
    unlink(out);
}

/* Models whose parts are valid but do not match. Each is a valid file in which one number or one
 * letter of a name is changed. The number is `at` bytes after the end of the name: a key is
 * followed by its type, a tensor's name by its number of dimensions. */
static void test_mismatched_parts(void **state) {
    enum { TYPE = 4, DIMENSIONS = 4, ROWS = DIMENSIONS + 8, LETTER = -1 };
    static const struct {
        const char *name;
        int at; /* bytes after the name */
        uint32_t value;
        const char *says;
    } cases[] = {
        {"token_embd.weight", ROWS, 39,
         "the vocabulary has 40 tokens, but the embedding (token_embd.weight) only 39 rows"},
        {"token_embd.weight", DIMENSIONS, TINY_DIM / 2, "token_embd.weight"},
        {"blk.0.attn_k.weight", ROWS, 1, "blk.0.attn_k.weight"},
        {"blk.0.ffn_up.weight", LETTER, 'T', "blk.0.ffn_up.weigh"},
        {"output_norm.weight", LETTER, 'T', "output_norm.weight"},
        {"llama.block_count", TYPE, 0, "block_count"},
        {"llama.block_count", TYPE, 1,
         "llama.block_count is 1, but there are more layers, with the tensor blk.1."},
        {"llama.block_count", TYPE, 1u << 30, "1073741824 layers, but only 21 tensors"},
        {"llama.attention.head_count", TYPE, 0, "head_count"},
        {"llama.attention.head_count", TYPE, 3, "at most a head's 5"},
        {"llama.attention.head_count_kv", TYPE, 1u << 31, "head_count_kv"},
        {"llama.embedding_length", TYPE, 0, "embedding_length"},
        {"llama.embedding_length", TYPE, 1u << 31, "embedding_length"},
        {"llama.feed_forward_length", TYPE, 0, "feed_forward_length"},
        {"llama.context_length", TYPE, 0, "context_length"},
    };
    (void)state;
    tiny t = tiny_defaults();
    t.layers = 2;
    tiny_model m = tiny_model_new(t);
    llm_model_free(m.model);
    uint8_t *good = malloc(m.file.length);
    assert_non_null(good);
    memcpy(good, m.file.data, m.file.length);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t length = strlen(cases[i].name), at = 8;
        uint64_t named = length; /* a name's length precedes it */
        while (at + length < m.file.length &&
               (memcmp(good + at, cases[i].name, length) || memcmp(good + at - 8, &named, 8)))
            at++;
        assert_true(at + length < m.file.length);
        at += length;
        if (cases[i].at == LETTER) m.file.data[at - 1] = (uint8_t)cases[i].value;
        else memcpy(m.file.data + at + cases[i].at, &cases[i].value, 4);
        llm_error err;
        assert_null(llm_model_from_memory(m.file.data, m.file.length, "unfit", &err));
        if (err.status != LLM_ERROR_FORMAT && err.status != LLM_ERROR_UNSUPPORTED)
            fail_msg("case %zu: status %d, %s", i, err.status, err.message);
        if (!strstr(err.message, cases[i].says) || !strstr(err.message, "unfit"))
            fail_msg("case %zu: \"%s\" does not say \"%s\" and the file's name", i, err.message,
                     cases[i].says);
        memcpy(m.file.data, good, m.file.length);
    }
    /* the unchanged file loads, so each case above is refused because of its change */
    m.model = llm_model_from_memory(m.file.data, m.file.length, "fit", NULL);
    assert_non_null(m.model);
    tiny_model_free(&m);
    free(good);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_folders),      cmocka_unit_test(test_gguf),
        cmocka_unit_test(test_int4),         cmocka_unit_test(test_int4_values),
        cmocka_unit_test(test_tensor_rows),         cmocka_unit_test(test_folder_to_gguf),
        cmocka_unit_test(test_mismatched_parts),
    };
    return cmocka_run_group_tests_name("models", tests, NULL, NULL);
}
