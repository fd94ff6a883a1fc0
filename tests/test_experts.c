/* Models with experts: the router and its ties, greedy text against transformers, the same bits
 * alone and in a batch, costs, and damaged files. test_models.c compares their logits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sys/stat.h>

#include "test_util.h"
#define LLM_DEBUG
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "invariants.h"
#include "engine_util.h"

static const char *const models[] = {"mixtral",  "mixtral_tied",  "qwen2moe", "qwen2moe_norm",
                                     "qwen3moe", "qwen3moe_step", "olmoe",    "olmoe_norm"};
enum { N_MODELS = sizeof models / sizeof *models, VOCAB = 96 };

static void check_route(int n, int k, bool normalize, const float *logits, const int *experts,
                        const float *factors) {
    llm_op op;
    llm_route routes[8];
    memset(&op, 0, sizeof op);
    op.n_experts = n, op.n_used = k, op.normalize = normalize;
    llm__route(&op, logits, 0, 1, routes);
    for (int i = 0; i < k; i++) {
        assert_int_equal(routes[i].expert, experts[i]);
        if (factors) assert_float_equal(routes[i].factor, factors[i], 1e-6);
    }
}

/* Of equal logits, the lower index is first. Whatever the logits are, indexes are valid. */
static void test_router(void **state) {
    (void)state;
    const float x[] = {0, 2, 1, 2}, equal[] = {1, 1, 1, 1, 1}, odd[] = {NAN, 1, INFINITY, NAN, 2};
    const float rising[] = {1, 2, 3, 4, 5}, large[] = {1000, -1000, 999};
    float e = expf(1), all = 1 + e * e + e + e * e;
    check_route(4, 3, false, x, (const int[]){1, 3, 2},
                (const float[]){e * e / all, e * e / all, e / all});
    check_route(4, 2, true, x, (const int[]){1, 3}, (const float[]){0.5f, 0.5f});
    check_route(5, 2, false, equal, (const int[]){0, 1}, (const float[]){0.2f, 0.2f});
    check_route(5, 3, true, rising, (const int[]){4, 3, 2}, NULL);
    check_route(3, 3, true, large, (const int[]){0, 2, 1},
                (const float[]){e / (1 + e), 1 / (1 + e), 0});
    llm_op op;
    llm_route routes[5];
    memset(&op, 0, sizeof op);
    op.n_experts = 5;
    for (op.n_used = 1; op.n_used <= 5; op.n_used++) {
        unsigned seen = 0;
        llm__route(&op, odd, 0, 1, routes);
        for (int i = 0; i < op.n_used; i++) {
            assert_in_range(routes[i].expert, 0, 4);
            assert_false(seen >> routes[i].expert & 1);
            seen |= 1u << routes[i].expert;
        }
    }
}

/* Routes are sorted by expert, and by token within an expert. */
static void test_group(void **state) {
    (void)state;
    enum { T = 50, K = 3, N = T * K, E = 7 };
    llm_route routes[N];
    int32_t next[E], sorted[3 * N];
    llm_op op;
    memset(&op, 0, sizeof op);
    op.n_experts = E, op.n_used = K;
    for (int i = 0; i < N; i++) routes[i].expert = (int32_t)(llm_random(1, 2, (uint64_t)i) * E);
    llm__group_routes(&op, routes, N, next, sorted);
    for (int i = 0; i < N; i++) {
        int place = sorted[2 * N + i];
        assert_in_range(place, 0, N - 1);
        assert_int_equal(sorted[place], routes[i].expert);
        assert_int_equal(sorted[N + place], i / K);
    }
    for (int i = 1; i < N; i++)
        assert_true(sorted[i - 1] < sorted[i] ||
                    (sorted[i - 1] == sorted[i] && sorted[N + i - 1] <= sorted[N + i]));
}

/* 64 greedy tokens equal those of transformers, from folders and GGUF files. */
static void test_greedy(void **state) {
    enum { PROMPT = 8, N = 64 };
    (void)state;
    for (int i = 0; i < 2 * N_MODELS; i++)
        for (int isa = LLM_ISA_REFERENCE; isa <= LLM_ISA_BEST; isa += LLM_ISA_BEST) {
            char path[200];
            int32_t ids[PROMPT + N];
            llm_error err;
            snprintf(path, sizeof path, "tests/data/models/%s.golden", models[i / 2]);
            llm_file *file = llm_file_open(path, &err);
            if (!file) fail_msg("%s", err.message);
            for (int k = 0; k < PROMPT + N; k++) {
                int64_t id;
                assert_true(llm_value_i64(llm_file_find(file, "golden.greedy"), (uint64_t)k, &id));
                ids[k] = (int32_t)id;
            }
            llm_file_close(file);
            snprintf(path, sizeof path, "tests/data/models/%s%s", models[i / 2],
                     i % 2 ? ".gguf" : "");
            llm_model *model = model_load(path);
            llm_engine_options o = llm_engine_defaults();
            o.backend = llm_cpu_backend(2, (llm_isa)isa, &err);
            o.cache_type = LLM_F32;
            llm_request r = llm_request_defaults();
            r.prompt = ids;
            r.n_prompt = PROMPT;
            r.max_tokens = N;
            r.ignore_end = true;
            record *got = run_alone(model, &o, r);
            assert_int_equal(got->samples[0].n_tokens, N);
            for (int k = 0; k < N; k++)
                if (got->samples[0].tokens[k] != ids[PROMPT + k])
                    fail_msg("%s: token %d is %d, not %d", path, k, got->samples[0].tokens[k],
                             ids[PROMPT + k]);
            record_free(got);
            llm_backend_free(o.backend);
            llm_model_free(model);
        }
}

/* Random requests give the same bits alone and together, in any chunks, with any number of threads
 * and any fusions. */
static void check_invariance(const llm_model *model, llm_isa isa, uint64_t seed) {
    enum { N = 5, ROUNDS = 5 };
    int32_t prompts[N][64];
    record *alone[N], *got[N];
    llm_request requests[N];
    llm_error err;
    for (int i = 0; i < N; i++) {
        llm_request r = llm_request_defaults();
        r.prompt = prompts[i];
        r.n_prompt = 1 + (int)(llm_random(seed, 1, (uint64_t)i) * 50);
        for (int k = 0; k < r.n_prompt; k++)
            prompts[i][k] = (int32_t)(llm_random(seed, 100 + (uint64_t)i, (uint64_t)k) * VOCAB);
        r.max_tokens = 1 + (int)(llm_random(seed, 2, (uint64_t)i) * 12);
        r.ignore_end = true;
        r.sampling.temperature = 0.9f;
        r.sampling.seed = seed + (uint64_t)i;
        requests[i] = r;
        llm_engine_options o = llm_engine_defaults();
        o.backend = llm_cpu_backend(1, isa, &err);
        o.max_batch_tokens = 7;
        alone[i] = run_alone(model, &o, r);
        llm_backend_free(o.backend);
    }
    for (int round = 0; round < ROUNDS; round++) {
        static const int chunks[ROUNDS] = {1, 9, 33, 150, 512};
        llm_engine_options o = llm_engine_defaults();
        o.backend = llm_cpu_backend(1 + round % 4, isa, &err);
        o.max_batch_tokens = chunks[round];
        o.max_sequences = N;
        if (round == 3) o.fusions = 0;
        llm_engine *engine = engine_new(model, &o);
        for (int i = 0; i < N; i++) {
            got[i] = record_new(model);
            record_submit(engine, got[i], requests[i], true);
        }
        record_drain(engine);
        assert_idle(engine);
        for (int i = 0; i < N; i++) {
            assert_same(alone[i], got[i]);
            record_free(got[i]);
        }
        llm_engine_free(engine);
        llm_backend_free(o.backend);
    }
    for (int i = 0; i < N; i++) record_free(alone[i]);
}

static void test_invariance(void **state) {
    static const llm_type types[] = {LLM_F32,  LLM_F16,  LLM_BF16, LLM_Q4_0,
                                     LLM_Q4_1, LLM_Q5_0, LLM_Q5_1, LLM_Q8_0};
    char out[200];
    const char *tmp = getenv("TMPDIR");
    (void)state;
    snprintf(out, sizeof out, "%s/llm-test-experts-%ld.gguf", tmp ? tmp : "/tmp", (long)getpid());
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        llm_error err;
        if (!llm_quantize("tests/data/models/gptq_experts", out, types[i], false, NULL, NULL, &err))
            fail_msg("%s", err.message);
        llm_model *model = model_load(out);
        const llm_tensor *t = llm_file_find_tensor(llm_model_file(model),
                                                   "blk.0.ffn_down_exps.weight");
        assert_true(t && t->type == types[i] && t->dims[2] == 4);
        for (int isa = LLM_ISA_REFERENCE; isa <= LLM_ISA_BEST; isa++)
            if (has_isa((llm_isa)isa)) check_invariance(model, (llm_isa)isa, 10 + i);
        llm_model_free(model);
    }
    unlink(out);
    static const char *const others[] = {"gptq_experts", "qwen2moe", "qwen2moe_norm"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        snprintf(out, sizeof out, "tests/data/models/%s", others[i]);
        llm_model *model = model_load(out);
        check_invariance(model, LLM_ISA_BEST, 30 + i);
        llm_model_free(model);
    }
}

/* A step of one token reads only the experts that it uses; a large step reads nearly all. */
static void test_cost(void **state) {
    (void)state;
    llm_model *model = model_load("tests/data/models/qwen3moe"); /* 4 of 16 experts, bf16 */
    llm_engine_options o = llm_engine_defaults();
    llm_engine *engine = engine_new(model, &o);
    const llm_program *p = &engine->network.program;
    int32_t count[] = {1}, first[] = {0}, positions[512] = {0};
    llm_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.n_sequences = 1, batch.seq_count = count, batch.seq_first = first;
    batch.positions = positions;
    int n = 0;
    double bytes = 0;
    for (int i = 0; i < p->n_ops; i++) {
        const llm_op *op = &p->ops[i];
        batch.n_tokens = batch.n_logits = count[0] = 1;
        bytes += llm_op_cost(p, op, &batch).weight_bytes;
        if (op->kind != LLM_OP_EXPERTS) continue;
        n++;
        assert_float_equal(llm_op_cost(p, op, &batch).weight_bytes, 4 * 16 * 24 * 2, 1e-6);
        assert_float_equal(llm_op_cost(p, op, &batch).operations, 2 * 4 * 16 * 24, 1e-6);
        batch.n_tokens = count[0] = 2; /* 7 experts: 4, and 4 x 12/16 more */
        assert_float_equal(llm_op_cost(p, op, &batch).weight_bytes, 7 * 16 * 24 * 2, 1e-6);
        batch.n_tokens = count[0] = 512;
        assert_float_equal(llm_op_cost(p, op, &batch).weight_bytes, 16 * 16 * 24 * 2, 1e-6);
    }
    assert_int_equal(n, 3 * 2);
    /* the program also reads vectors, which are f32 there, and the RoPE frequencies */
    double step = (double)llm_model_step_bytes(model);
    assert_true(bytes >= step && bytes < step * 1.1);
    llm_engine_free(engine);
    llm_model_free(model);
}

/* ---- Damaged files ------------------------------------------------------------------------ */

static uint8_t *read_all(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *size = (size_t)ftell(f);
    rewind(f);
    uint8_t *data = (uint8_t *)malloc(*size);
    assert_int_equal(fread(data, 1, *size, f), *size);
    fclose(f);
    return data;
}

/* Change a number `at` bytes after the first occurrence of a name, or (at -1) its last letter. */
static void refuse_changed(const char *path, const char *name, int at, uint32_t value,
                           const char *says) {
    size_t size, length = strlen(name), i = 0;
    uint8_t *data = read_all(path, &size);
    llm_error err;
    while (i + length < size && memcmp(data + i, name, length)) i++;
    assert_true(i + length < size);
    if (at < 0) data[i + length - 1] = (uint8_t)value;
    else memcpy(data + i + length + (size_t)at, &value, 4);
    llm_model *model = llm_model_from_memory(data, size, "damaged", &err);
    if (model) fail_msg("%s: accepted %s %u", path, name, (unsigned)value);
    if (!strstr(err.message, says)) fail_msg("\"%s\" does not say \"%s\"", err.message, says);
    free(data);
}

static void test_damaged_gguf(void **state) {
    static const char mixtral[] = "tests/data/models/mixtral.gguf",
                      qwen[] = "tests/data/models/qwen2moe.gguf";
    enum { VALUE = 4, EXPERTS = 4 + 16, LETTER = -1 };
    (void)state;
    refuse_changed(mixtral, "llama.expert_count", VALUE, 5, "asks for (5, 24)");
    refuse_changed(mixtral, "llama.expert_count", VALUE, 1, "2 of 1 experts");
    refuse_changed(mixtral, "llama.expert_count", VALUE, 0, "blk.0.ffn_gate.weight is missing");
    refuse_changed(mixtral, "llama.expert_count", VALUE, 1u << 30, "of 1073741824 experts");
    refuse_changed(mixtral, "llama.expert_used_count", VALUE, 5, "5 of 4 experts");
    refuse_changed(mixtral, "llama.expert_used_count", VALUE, 0, "expert_used_count is 0");
    refuse_changed(mixtral, "blk.1.ffn_up_exps.weight", EXPERTS, 3, "has 3 matrices, but");
    refuse_changed(mixtral, "blk.1.ffn_up_exps.weight", LETTER, 'T', "blk.1.ffn_up.0.weight is");
    refuse_changed(mixtral, "blk.0.ffn_gate_inp.weight", LETTER, 'T', "gate_inp.weight is missing");
    refuse_changed(qwen, "qwen2moe.expert_feed_forward_length", VALUE, 21, "asks for (21, 24)");
    refuse_changed(qwen, "qwen2moe.expert_shared_feed_forward_length", VALUE, 4,
                   "asks for (4, 24)");
    refuse_changed(qwen, "blk.0.ffn_up_shexp.weight", LETTER, 'T', "up_shexp.weight is missing");
}

/* Load a copy of a folder in which `old` in config.json is replaced. says NULL: it is accepted. */
static void check_config(const char *name, const char *old, const char *new, const char *says) {
    static const char *const files[] = {"tokenizer.json", "model.safetensors", "config.json"};
    char folder[200], path[300];
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/llm-test-experts-%ld", tmp ? tmp : "/tmp", (long)getpid());
    mkdir(folder, 0777);
    for (int i = 0; i < 3; i++) {
        size_t size;
        snprintf(path, sizeof path, "tests/data/models/%s/%s", name, files[i]);
        uint8_t *data = read_all(path, &size);
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        FILE *f = fopen(path, "wb");
        assert_non_null(f);
        data = (uint8_t *)realloc(data, size + 1);
        data[size] = 0;
        char *at = i == 2 ? strstr((char *)data, old) : NULL;
        assert_true(i < 2 || at);
        size_t before = at ? (size_t)(at - (char *)data) : size, skip = at ? strlen(old) : 0;
        fwrite(data, 1, before, f);
        if (at) fputs(new, f);
        fwrite(data + before + skip, 1, size - before - skip, f);
        fclose(f);
        free(data);
    }
    llm_error err;
    llm_model *model = llm_model_load(folder, &err);
    if (model && says) fail_msg("%s: accepted %s", name, new);
    if (!says && !model) fail_msg("%s: %s", name, err.message);
    if (says && !strstr(err.message, says))
        fail_msg("\"%s\" does not say \"%s\"", err.message, says);
    llm_model_free(model);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        unlink(path);
    }
    rmdir(folder);
}

static void test_damaged_folder(void **state) {
    (void)state;
    check_config("mixtral", "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 4", NULL);
    check_config("mixtral", "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 5",
                 "5 of 4 experts");
    check_config("mixtral", "\"num_local_experts\": 4", "\"num_local_experts\": 5",
                 "block_sparse_moe.experts.4.w1.weight is missing");
    check_config("mixtral", "\"num_local_experts\": 4", "\"num_local_experts\": 3",
                 "experts.3.w1.weight is unknown");
    check_config("mixtral", "\"num_local_experts\": 4", "\"num_local_experts\": 1000000",
                 "1000000 experts, but there are only");
    check_config("mixtral", "\"num_local_experts\": 4,", "", "num_local_experts");
    check_config("qwen3moe", "\"moe_intermediate_size\": 16", "\"moe_intermediate_size\": 15",
                 "asks for (15, 24)");
    check_config("qwen3moe", "\"moe_intermediate_size\": 16", "\"router_bias\": true",
                 "\"router_bias\"");
    check_config("olmoe", "\"clip_qkv\": null", "\"clip_qkv\": 8.0", "\"clip_qkv\"");
    check_config("qwen2moe", "\"shared_expert_intermediate_size\": 28",
                 "\"shared_expert_intermediate_size\": 27", "asks for (27, 24)");
    /* other architectures have no experts */
    check_config("qwen2", "\"model_type\"", "\"num_experts\": 4, \"model_type\"",
                 "\"num_experts\"");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_router),       cmocka_unit_test(test_group),
        cmocka_unit_test(test_greedy),       cmocka_unit_test(test_invariance),
        cmocka_unit_test(test_cost),         cmocka_unit_test(test_damaged_gguf),
        cmocka_unit_test(test_damaged_folder),
    };
    return cmocka_run_group_tests_name("experts", tests, NULL, NULL);
}
