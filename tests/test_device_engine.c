/* The whole engine on a device: concurrent requests, blocks so scarce that sequences are preempted,
 * speculation, and failures. LLM_TEST_DEVICE=cpu|emulated|cuda names the device; the default is
 * emulated. Tests that compare bit for bit use deterministic mode. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_util.h"
#include "llm.h"
#include "engine_util.h"
#include "ops.h"
#include "emulator.h"

void emulator_memory(size_t bytes) __attribute__((weak));
void emulator_fail_allocation(long n) __attribute__((weak));
void emulator_fail_launch(long n) __attribute__((weak));
void emulator_lose_device(long n) __attribute__((weak));
void emulator_devices(int count, int compute_capability, int driver_version) __attribute__((weak));
bool emulator_failed(void) __attribute__((weak));
void emulator_recover(void) __attribute__((weak));
emulator_counts emulator_counted(void) __attribute__((weak));

extern int llm__pretended_processors __attribute__((weak)); /* llm.cu */

#undef llm_engine_create /* these tests choose the backend themselves */

#define TARGET "tests/data/golden/mqa_4_1.gguf"
#define DRAFT "tests/data/golden/gqa_8_2.gguf" /* the same vocabulary */

#ifdef __SANITIZE_ADDRESS__ /* the device is then several times slower */
enum { N_REQUESTS = 3, MAX_TOKENS = 3, LESS = 4 };
#else
enum { N_REQUESTS = 4, MAX_TOKENS = 6, LESS = 1 };
#endif
enum { CONTEXT = 96 };

static llm_model *target, *draft;
static const char *device;

static int load_models(void **state) {
    (void)state;
    device = device_name("emulated");
    target = model_load(TARGET);
    draft = model_load(DRAFT);
    return 0;
}

static int free_models(void **state) {
    (void)state;
    llm_model_free(target);
    llm_model_free(draft);
    return 0;
}

static llm_gpu_options gpu_options(void) {
    llm_gpu_options o = llm_gpu_defaults();
    o.deterministic = o.trust = true;
    return o;
}

static llm_engine_options options_on(llm_backend *backend) {
    llm_engine_options o = llm_engine_defaults();
    o.backend = backend;
    o.context_length = CONTEXT;
    o.block_size = 8;
    o.max_sequences = 4;
    o.max_batch_tokens = 24;
    o.cache_bytes = 1 << 20;
    return o;
}

static llm_engine *engine_on(const llm_engine_options *options) {
    llm_error err;
    llm_engine *engine = llm_engine_create(target, options, &err);
    if (!engine) fail_msg("%s", err.message);
    return engine;
}

static llm_request make_request(int i, int32_t prompt[64]) {
    llm_request r = llm_request_defaults();
    r.prompt = prompt;
    r.n_prompt = 5 + 6 * i;
    /* requests 2 and 3 share a prefix */
    for (int k = 0; k < r.n_prompt; k++)
        prompt[k] = (int32_t)(llm_random(i / 2 == 1 ? 2 : (uint64_t)i, 5, (uint64_t)k) *
                              (llm_model_config(target)->vocab_size - 8));
    r.max_tokens = MAX_TOKENS;
    r.ignore_end = true;
    if (i % 2)
        r.sampling.temperature = 0.8f, r.sampling.top_p = 0.9f,
        r.sampling.repetition_penalty = 1.1f, r.sampling.seed = (uint64_t)i;
    return r;
}

/* Run all requests on this backend, together or each alone. A request with a logits hook is sampled
 * on the host, the others on the device. */
enum { NO_HOOKS, SOME_HOOKS, ALL_HOOKS };
static void run_requests(const llm_engine_options *options, bool together, int hooks,
                         record *records[N_REQUESTS]) {
    llm_error err;
    int32_t prompts[N_REQUESTS][64];
    llm_engine *engine = NULL;
    for (int i = 0; i < N_REQUESTS; i++) {
        if (!engine) engine = llm_engine_create(target, options, &err);
        if (!engine) fail_msg("%s", err.message);
        records[i] = record_new(target);
        record_submit(engine, records[i], make_request(i, prompts[i]),
                      hooks == ALL_HOOKS || (hooks == SOME_HOOKS && i % 3 == 1));
        if (together && i + 1 < N_REQUESTS) continue;
        record_drain(engine);
        assert_idle(engine);
        llm_engine_free(engine);
        engine = NULL;
    }
}

static void free_records(record *records[N_REQUESTS]) {
    for (int i = 0; i < N_REQUESTS; i++) record_free(records[i]);
}

static void assert_same_tokens(const record *a, const record *b) {
    assert_int_equal(a->samples[0].n_tokens, b->samples[0].n_tokens);
    assert_memory_equal(a->samples[0].tokens, b->samples[0].tokens,
                        sizeof(int32_t) * (size_t)a->samples[0].n_tokens);
}

/* ---- Output ---------------------------------------------------------------------------------- */

/* The logits of the prompts are close to those of the plain loops. */
static void test_logits(void **state) {
    (void)state;
    llm_error err;
    llm_backend *reference = llm_cpu_backend(1, LLM_ISA_REFERENCE, &err),
                *b = device_open(device, NULL);
    llm_engine_options right = options_on(reference), o = options_on(b);
    record *expected[N_REQUESTS], *got[N_REQUESTS];
    run_requests(&right, true, ALL_HOOKS, expected);
    run_requests(&o, true, ALL_HOOKS, got);
    double worst = 0;
    for (int i = 0; i < N_REQUESTS; i++)
        /* only the prompt's rows, since later rows depend on the sampled tokens */
        for (int row = 0; row < 5 + 6 * i; row++) {
            size_t at = (size_t)row * (size_t)expected[i]->vocab;
            double e = relative_error(got[i]->samples[0].logits + at,
                                      expected[i]->samples[0].logits + at, expected[i]->vocab);
            worst = e > worst ? e : worst;
        }
    print_message("    %s: logits differ from the reference by at most %.1e\n", device, worst);
    assert_true(worst < 1e-2);
    free_records(expected), free_records(got);
    llm_backend_free(reference), llm_backend_free(b);
}

/* Compare the logits of a golden sequence with those of Hugging Face transformers, an independent
 * implementation (see test_golden.c), with steps of at most `chunk` tokens. */
static double error_of(const char *folder, const char *name, int chunk) {
    enum { N = 24 };
    llm_error err;
    char path[100];
    snprintf(path, sizeof path, "tests/data/%s/%s.gguf", folder, name);
    llm_model *model = model_load(path);
    snprintf(path, sizeof path, "tests/data/%s/%s.golden", folder, name);
    llm_file *file = llm_file_open(path, &err);
    if (!file) fail_msg("%s", err.message);
    const llm_value *ids = llm_file_find(file, "golden.ids");
    const llm_tensor *logits = llm_file_find_tensor(file, "golden.logits");
    assert_non_null(ids);
    assert_non_null(logits);
    assert_true(ids->count >= N);
    int32_t prompt[N];
    for (int i = 0; i < N; i++) {
        int64_t id;
        assert_true(llm_value_i64(ids, (uint64_t)i, &id));
        prompt[i] = (int32_t)id;
    }
    llm_backend *b = device_open(device, NULL);
    llm_engine_options o = options_on(b);
    o.context_length = 64;
    o.max_batch_tokens = chunk;
    llm_request r = llm_request_defaults();
    r.prompt = prompt, r.n_prompt = N, r.max_tokens = 0; /* the hook records the logits */
    record *got = run_alone(model, &o, r);
    assert_int_equal(got->samples[0].n_rows, N);
    double error = relative_error(got->samples[0].logits, (const float *)logits->data,
                                  (int64_t)N * got->vocab);
    record_free(got);
    llm_backend_free(b);
    llm_file_close(file);
    llm_model_free(model);
    return error;
}

static void test_transformers(void **state) {
    (void)state;
    static const char *const models[][2] = {
        {"golden", "mqa_4_1"}, {"models", "granite"}, {"models", "olmo3_yarn"},
        {"models", "smollm3"}, {"models", "phi3"},    {"models", "phi3_long"},
        {"models", "gemma2"},  {"models", "gemma3_linear"},
        {"models", "mixtral"}, {"models", "qwen2moe"}, {"models", "qwen3moe"},
        {"models", "bloom"}, {"models", "mpt_heads"}, {"models", "gptneox"},
        {"models", "stablelm_parallel"}, {"models", "phi2"}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (int chunk = 24; chunk >= 4; chunk -= 20) {
            double error = error_of(models[i][0], models[i][1], chunk);
            print_message("    %s: logits of %s differ from those of transformers by %.1e\n",
                          device, models[i][1], error);
            assert_true(error < 1e-2);
        }
}

/* Requests give the same bits together as alone, in any order of threads, with scarce blocks, and
 * with any of the GPU's options. */
static void test_batch_composition(void **state) {
    (void)state;
    llm_gpu_options gpu = gpu_options();
    llm_backend *b = device_open(device, &gpu);
    llm_engine_options o = options_on(b);
    record *alone[N_REQUESTS], *got[N_REQUESTS];
    run_requests(&o, false, ALL_HOOKS, alone);
    for (int kind = 0; kind < 4; kind++) {
        llm_engine_options other = o;
        device_set_order(device, kind % device_orders(device));
        /* blocks for only one context, so that sequences are preempted; small chunks */
        if (kind == 1) other.cache_bytes = 9300, other.max_batch_tokens = 7;
        if (kind == 2) other.cache_bytes = 9300, other.preempt = LLM_PREEMPT_SWAP;
        if (kind == 3) other.prefix_cache = false, other.block_size = 16;
        run_requests(&other, true, ALL_HOOKS, got);
        for (int i = 0; i < N_REQUESTS; i++) assert_same(alone[i], got[i]);
        free_records(got);
    }
    device_set_order(device, 0);
    /* without hooks the device samples all tokens; in the last round it samples some */
    for (int kind = 0; kind < 5 && device_is_gpu(device); kind++) {
        llm_gpu_options variant = gpu;
        if (kind == 1) variant.graphs = false;
        if (kind == 2) variant.fused = false;
        if (kind == 3) variant.overlap = true; /* has an effect if the GPU supports it */
        llm_backend *c = device_open(device, &variant);
        llm_engine_options other = options_on(c);
        run_requests(&other, true, kind == 4 ? SOME_HOOKS : NO_HOOKS, got);
        for (int i = 0; i < N_REQUESTS; i++) assert_same_tokens(alone[i], got[i]);
        for (int i = 1; i < N_REQUESTS && kind == 4; i += 3) assert_same(alone[i], got[i]);
        free_records(got);
        llm_backend_free(c);
    }
    free_records(alone);
    llm_backend_free(b);
}

/* The same for models with experts, in f16 with a shared expert and in 4 bits. */
static void test_batches_of_experts(void **state) {
    static const char *const models[] = {"qwen2moe_norm", "gptq_experts"};
    llm_model *usual = target;
    for (int i = 0; i < 2; i++) {
        char path[100];
        snprintf(path, sizeof path, "tests/data/models/%s", models[i]);
        target = model_load(path);
        test_batch_composition(state);
        if (i == 1) test_logits(state); /* in the other, f16 decides a router's near tie */
        llm_model_free(target);
    }
    target = usual;
}

/* Greedy speculation gives the target's own tokens; good or bad proposals only change the speed. */
static void test_speculation(void **state) {
    (void)state;
    llm_gpu_options gpu = gpu_options();
    llm_backend *b = device_open(device, &gpu);
    int32_t prompt[64];
    llm_request r = make_request(2, prompt);
    r.max_tokens = 16 / LESS;
    record *expected = NULL;
    for (int kind = 0; kind < 4; kind++) { /* no draft, another model, the target itself, lookup */
        llm_engine_options o = options_on(b);
        o.draft = kind == 1 ? draft : kind == 2 ? target : NULL;
        llm_request s = r;
        s.speculate = kind ? 3 : 0;
        s.lookup = kind == 3;
        llm_engine *engine = engine_on(&o);
        record *got = record_new(target);
        record_submit(engine, got, s, false);
        record_drain(engine);
        assert_idle(engine);
        llm_statistics facts = llm_engine_statistics(engine);
        if (kind == 1 || kind == 2) assert_true(facts.proposed > 0);
        /* the draft's passes are replayed too, so there are more replays than steps */
        if (LESS == 1 && device_is_gpu(device) && kind == 2)
            assert_true(facts.device_replays > facts.steps);
        if (kind == 2) assert_true(facts.accepted > facts.proposed / 2);
        if (expected) assert_same_tokens(expected, got);
        llm_engine_free(engine);
        if (expected) record_free(got);
        else expected = got;
    }
    record_free(expected);
    llm_backend_free(b);
}

/* Sampled speculation gives the same tokens whether the device or the host samples. The draft's
 * distributions always go to the host. */
static void test_sampled_speculation(void **state) {
    (void)state;
    llm_gpu_options gpu = gpu_options();
    llm_backend *b = device_open(device, &gpu);
    record *got[2];
    for (int host = 0; host < 2; host++) {
        int32_t prompt[64];
        llm_engine_options o = options_on(b);
        o.draft = draft;
        o.host_sampling = host;
        llm_request r = make_request(1, prompt);
        r.speculate = 2;
        llm_engine *engine = engine_on(&o);
        got[host] = record_new(target);
        record_submit(engine, got[host], r, false);
        record_drain(engine);
        assert_idle(engine);
        assert_true(llm_engine_statistics(engine).proposed > 0);
        llm_engine_free(engine);
    }
    assert_same_tokens(got[1], got[0]);
    record_free(got[0]), record_free(got[1]);
    llm_backend_free(b);
}

/* Prompt steps are never captured. A decode step is captured when its shape occurs a second time,
 * at the third token. */
static void test_captured_steps(void **state) {
    (void)state;
    llm_error err;
    enum { LENGTH = 45 }; /* two chunks: 24 tokens and 21 */
    int32_t prompt[LENGTH];
    llm_backend *b = device_open(device, NULL);
    if (!device_is_gpu(device)) {
        llm_backend_free(b);
        skip();
    }
    llm_engine_options o = options_on(b);
    o.prefix_cache = false;
    llm_engine *engine = engine_on(&o);
    llm_request r = llm_request_defaults();
    for (int i = 0; i < LENGTH; i++) prompt[i] = (int32_t)(llm_random(9, 5, (uint64_t)i) * 280);
    r.prompt = prompt, r.n_prompt = LENGTH, r.max_tokens = 1, r.ignore_end = true;
    for (int i = 0; i < 4; i++) {
        record *got = record_new(target);
        record_submit(engine, got, r, false);
        record_drain(engine);
        record_free(got);
    }
    assert_int_equal(llm_engine_statistics(engine).device_replays, 0);
    record *got = record_new(target);
    r.max_tokens = 8;
    record_submit(engine, got, r, false);
    for (int tokens = 0; tokens < r.max_tokens; tokens = got->samples[0].n_tokens) {
        assert_int_equal(llm_step(engine, &err), 1);
        record_events(engine);
        int graphs = got->samples[0].n_tokens - 2;
        assert_int_equal(llm_engine_statistics(engine).device_replays, graphs > 0 ? graphs : 0);
    }
    record_drain(engine);
    record_free(got);
    llm_engine_free(engine);
    llm_backend_free(b);
}

/* On a Hopper GPU, a prompt's matmuls use wgmma, unless deterministic. */
static void test_hopper(void **state) {
    (void)state;
    enum { LENGTH = 80 };
    if (strcmp(device, "emulated")) skip();
    int32_t prompt[LENGTH];
    record *got[3];
    uint64_t products[3]; /* number of matrix instructions */
    llm_request r = llm_request_defaults();
    for (int i = 0; i < LENGTH; i++) prompt[i] = (int32_t)(llm_random(8, 5, (uint64_t)i) * 280);
    r.prompt = prompt, r.n_prompt = LENGTH, r.max_tokens = MAX_TOKENS, r.ignore_end = true;
    llm__pretended_processors = 1; /* the model is small */
    for (int i = 0; i < 3; i++) { /* deterministic; with wgmma; with wgmma in use */
        llm_gpu_options gpu = gpu_options();
        gpu.deterministic = i < 2;
        device_set_capability(device, i ? 90 : 80);
        llm_backend *b = device_open(device, &gpu);
        llm_engine_options o = options_on(b);
        o.max_batch_tokens = 3 * CONTEXT; /* room for rows of f32 matmuls, three times as wide */
        products[i] = emulator_counted().matrix_products;
        got[i] = run_alone(target, &o, r);
        products[i] = emulator_counted().matrix_products - products[i];
        llm_backend_free(b);
    }
    llm__pretended_processors = 0;
    device_set_capability(device, 80);
    assert_same(got[0], got[1]);
    double error = relative_error(got[2]->samples[0].logits, got[0]->samples[0].logits,
                                  (int64_t)LENGTH * got[0]->vocab);
    print_message("    with wgmma, logits differ by %.1e\n", error);
    assert_true(error < 1e-2);
    assert_true(products[1] == products[0] && products[2] < products[0]);
    for (int i = 0; i < 3; i++) record_free(got[i]);
}

/* A request that is saved after some steps and restored in another engine on the device gives the
 * same tokens and logits. */
static void test_sessions(void **state) {
    (void)state;
    llm_error err;
    llm_gpu_options gpu = gpu_options();
    llm_backend *b = device_open(device, &gpu);
    llm_engine_options o = options_on(b);
    record *expected[N_REQUESTS];
    run_requests(&o, false, SOME_HOOKS, expected);
    for (int i = 0; i < N_REQUESTS; i++) {
        int32_t prompt[64];
        size_t size;
        bool hook = i % 3 == 1;
        llm_request r = make_request(i, prompt), callbacks = llm_request_defaults();
        llm_engine *engine = engine_on(&o), *other = engine_on(&o);
        record *got = record_new(target);
        record_submit(engine, got, r, hook);
        for (int n = 0; n < 2; n++, record_events(engine))
            if (llm_step(engine, &err) != 1) fail_msg("%s", err.message);
        void *session = llm_session_save(engine, got->id, &size, &err);
        if (!session) fail_msg("%s", err.message);
        llm_engine_free(engine);
        callbacks.user = got;
        callbacks.logits_hook = hook ? record_hook : NULL;
        if (!llm_session_restore(other, session, size, &callbacks, &got->id, &err))
            fail_msg("%s", err.message);
        llm_session_free(session);
        record_drain(other);
        assert_same_tokens(expected[i], got);
        assert_in_range(llm_engine_statistics(other).prompt_tokens, 0, 7); /* less than a block */
        assert_idle(other);
        llm_engine_free(other);
        record_free(got);
    }
    free_records(expected);
    llm_backend_free(b);
}

/* The hidden states of a prompt in several steps, next to a request that generates, are near those
 * of the textbook loops. */
static void test_embeddings(void **state) {
    (void)state;
    llm_error err;
    llm_backend *backends[2] = {llm_cpu_backend(1, LLM_ISA_REFERENCE, &err),
                                device_open(device, NULL)};
    float hidden[2][2][64]; /* backend; last, mean */
    int dim = llm_model_config(target)->dim;
    assert_true(dim <= 64);
    for (int k = 0; k < 2; k++) {
        int32_t prompt[64], other_prompt[64];
        llm_engine_options o = options_on(backends[k]);
        llm_engine *engine = engine_on(&o);
        llm_request r = make_request(3, prompt), other = make_request(0, other_prompt);
        llm_event event;
        uint64_t id;
        bool found = false;
        r.n_prompt = 40;
        for (int i = 0; i < 40; i++) prompt[i] = (int32_t)(llm_random(4, 5, (uint64_t)i) * 280);
        r.embedding = true;
        assert_true(llm_submit(engine, &other, NULL, &err) && llm_submit(engine, &r, &id, &err));
        while (llm_step(engine, &err) > 0)
            while (llm_next_event(engine, &event)) {
                assert_true((event.last_hidden != NULL) == (event.request == id));
                if (event.request != id) continue;
                memcpy(hidden[k][0], event.last_hidden, (size_t)dim * sizeof(float));
                memcpy(hidden[k][1], event.mean_hidden, (size_t)dim * sizeof(float));
                found = true;
            }
        assert_int_equal(err.status, LLM_OK);
        assert_true(found);
        llm_engine_free(engine);
        llm_backend_free(backends[k]);
    }
    for (int i = 0; i < 2; i++)
        assert_true(relative_error(hidden[1][i], hidden[0][i], dim) < 1e-2);
}

/* ---- Failures (only on the emulated device) -------------------------------------------------- */

static void skip_unless_emulated(void) {
    if (!strcmp(device, "emulated")) return;
    print_message("SKIPPED: only the emulated device can inject failures\n");
    skip();
}

static char last_error[sizeof ((llm_error *)0)->message];

typedef enum failure { NONE, ALLOCATION, LAUNCH, LOSS } failure;

/* Three samples of a prompt share a block, which is then copied. With a draft model, which has its
 * own cache, there are two samples. */
static llm_request make_samples(bool speculate, int32_t prompt[64]) {
    llm_request r = make_request(1, prompt);
    r.n_samples = speculate ? 2 : 3;
    /* a graph is captured in the second step of its shape and replayed in the third */
    r.max_tokens = 5;
    if (speculate) r.speculate = 1, r.sampling.temperature = 0;
    return r;
}

static void assert_same_samples(const record *expected, const record *got) {
    for (int i = 0; i < MAX_SAMPLES; i++) {
        assert_int_equal(expected->samples[i].n_tokens, got->samples[i].n_tokens);
        assert_memory_equal(expected->samples[i].tokens, got->samples[i].tokens,
                            sizeof(int32_t) * (size_t)got->samples[i].n_tokens);
        assert_int_equal(expected->samples[i].n_ends, got->samples[i].n_ends);
    }
}

/* Run an engine in which the nth allocation or launch fails, or the device is lost. Returns
 * whether that happened. If so, the engine either works without the resource or reports an error
 * that names the cause, and the following steps give the expected tokens. All memory is freed. */
static bool run_with_failure(failure kind, long n, bool speculate, record **expected) {
    llm_error err;
    llm_gpu_options gpu = gpu_options();
    emulator_counts before = emulator_counted();
    emulator_fail_allocation(kind == ALLOCATION ? n : -1);
    emulator_fail_launch(kind == LAUNCH ? n : -1);
    emulator_lose_device(kind == LOSS ? n : -1);
    llm_backend *b = llm_emulated_backend(&gpu, &err);
    llm_engine_options o = options_on(b);
    if (speculate) o.draft = draft;
    llm_engine *engine = b ? llm_engine_create(target, &o, &err) : NULL;
    record *got = record_new(target);
    int more = engine ? 1 : -1;
    if (engine) {
        int32_t prompt[64];
        record_submit(engine, got, make_samples(speculate, prompt), false);
        while ((more = llm_step(engine, &err)) > 0) record_events(engine);
        record_events(engine);
    }
    if (more < 0) {
        assert_true(err.status == LLM_ERROR_MEMORY || err.status == LLM_ERROR_DEVICE);
        assert_true(strlen(err.message) > 20);
        /* the message gives the requested size and its purpose, the free memory and a size that
         * would fit; or why the host has no memory */
        if (kind == ALLOCATION) {
            const char *end = strstr(err.message, "device memory") ? "free" : "locked memory";
            if (!strstr(err.message, "wanted for") || !strstr(err.message, end))
                fail_msg("%s", err.message);
            if (strstr(err.message, "device memory") && !strstr(err.message, " less") &&
                !strstr(err.message, " more"))
                fail_msg("%s", err.message);
        }
        if (kind == LOSS && !strstr(err.message, "lost")) fail_msg("%s", err.message);
        if (more < 0 && !last_error[0]) snprintf(last_error, sizeof last_error, "%s", err.message);
    }
    bool happened = emulator_failed();
    if (engine && more < 0 && kind != LOSS) { /* the device still works, so the engine must too */
        emulator_fail_allocation(-1), emulator_fail_launch(-1);
        while ((more = llm_step(engine, &err)) != 0) {
            if (more < 0) fail_msg("after the failure: %s", err.message);
            record_events(engine);
        }
    }
    if (engine && kind != LOSS && *expected) assert_same_samples(*expected, got);
    if (engine && kind != LOSS) assert_idle(engine);
    if (kind == LOSS && happened) assert_true(more < 0);
    llm_engine_free(engine);
    llm_backend_free(b);
    if (*expected) record_free(got);
    else *expected = got;
    emulator_recover();
    emulator_counts after = emulator_counted();
    assert_int_equal(after.live_allocations, before.live_allocations);
    assert_int_equal(after.live_pinned, before.live_pinned);
    assert_int_equal(after.live_handles, before.live_handles);
    return happened;
}

static void test_failures(void **state) {
    (void)state;
    skip_unless_emulated();
    for (int speculate = 0; speculate < 2; speculate++) {
        record *expected = NULL;
        assert_false(run_with_failure(NONE, 0, speculate, &expected));
        for (int kind = ALLOCATION; kind <= LOSS; kind++) {
            long n = 0, happened = 0, gap;
            last_error[0] = 0;
            for (; run_with_failure((failure)kind, n, speculate, &expected); n += gap, happened++)
                gap = LESS * (1 + n / (kind == LOSS || LESS > 1 ? 2 : 5));
            print_message("    %s%s: tried %ld of about %ld\n",
                          kind == ALLOCATION ? "failed allocations"
                          : kind == LAUNCH   ? "failed launches"
                                             : "lost devices",
                          speculate ? " with a draft" : "", happened, n);
            print_message("      first error: %s\n", last_error);
            assert_true(happened >= 3);
        }
        record_free(expected);
    }
}

/* Copying a shared block is the first device operation of the samples' next step. If it fails, the
 * step after that repeats it. A draft model adds a second copy. */
static void test_failed_copies(void **state) {
    (void)state;
    skip_unless_emulated();
    for (int speculate = 0; speculate < 2; speculate++) {
        record *expected = NULL;
        for (int fails = -1; fails <= speculate; fails++) { /* -1: none */
            llm_error err;
            int32_t prompt[64];
            llm_gpu_options gpu = gpu_options();
            llm_backend *b = device_open(device, &gpu);
            llm_engine_options o = options_on(b);
            if (speculate) o.draft = draft;
            llm_engine *engine = engine_on(&o);
            record *got = record_new(target);
            record_submit(engine, got, make_samples(speculate, prompt), false);
            while (llm_engine_statistics(engine).blocks_shared == 0)
                assert_int_equal(llm_step(engine, &err), 1);
            record_events(engine);
            if (fails >= 0) {
                emulator_fail_launch(fails);
                assert_int_equal(llm_step(engine, &err), -1);
                if (!strstr(err.message, "copy_blocks")) fail_msg("%s", err.message);
                record_events(engine);
            }
            record_drain(engine);
            assert_idle(engine);
            if (expected) assert_same_samples(expected, got);
            if (expected) record_free(got);
            else expected = got;
            llm_engine_free(engine);
            llm_backend_free(b);
        }
        record_free(expected);
    }
}

/* If a graph cannot be launched, the step launches its kernels one by one. */
static void test_failed_graph_launch(void **state) {
    (void)state;
    skip_unless_emulated();
    record *records[2];
    uint64_t launches[2]; /* launches in a step: by sampling alone; in total */
    for (int fails = 0; fails < 2; fails++) {
        llm_error err;
        int32_t prompt[64];
        llm_backend *b = device_open(device, NULL);
        llm_engine_options o = options_on(b);
        llm_engine *engine = engine_on(&o);
        llm_request r = make_request(0, prompt);
        r.max_tokens = 8;
        record_submit(engine, records[fails] = record_new(target), r, false);
        while (llm_engine_statistics(engine).device_replays == 0)
            assert_int_equal(llm_step(engine, &err), 1), record_events(engine);
        uint64_t replays = llm_engine_statistics(engine).device_replays,
                 before = llm_engine_statistics(engine).device_launches;
        if (fails) emulator_fail_launch(0);
        assert_int_equal(llm_step(engine, &err), 1);
        record_events(engine);
        launches[fails] = llm_engine_statistics(engine).device_launches - before;
        record_drain(engine);
        assert_true(llm_engine_statistics(engine).device_replays > replays);
        llm_engine_free(engine);
        llm_backend_free(b);
    }
    assert_true(launches[1] > launches[0]);
    assert_same_samples(records[0], records[1]);
    record_free(records[0]), record_free(records[1]);
}

/* If there is no memory for a second, larger engine on the same backend, the first engine still
 * works. */
static void test_second_engine(void **state) {
    (void)state;
    skip_unless_emulated();
    record *expected = NULL;
    int refused = 0;
    bool more = true;
    for (long n = -1; more; n += n < 0 ? 1 : LESS) { /* -1: no failure */
        llm_error err;
        int32_t prompt[64];
        llm_gpu_options gpu = gpu_options();
        llm_backend *b = device_open(device, &gpu);
        llm_engine_options o = options_on(b);
        llm_engine *first = engine_on(&o);
        o.max_batch_tokens = 2048;
        o.max_sequences = 64;
        o.context_length = 128;
        emulator_fail_allocation(n);
        llm_engine *second = llm_engine_create(target, &o, &err);
        emulator_fail_allocation(-1);
        if (!second) assert_int_equal(err.status, LLM_ERROR_MEMORY);
        if (!second) refused++;
        more = n < 0 || !second;
        record *got = record_new(target);
        record_submit(first, got, make_samples(false, prompt), false);
        record_drain(first);
        if (expected) assert_same_samples(expected, got);
        if (expected) record_free(got);
        else expected = got;
        llm_engine_free(second);
        llm_engine_free(first);
        llm_backend_free(b);
    }
    print_message("    %d allocations of a second engine failed\n", refused);
    assert_true(refused > 40 / LESS - 5);
    record_free(expected);
}

/* ---- The seam: state kept between calls ------------------------------------------------- */

enum { ROWS = 3, WIDTH = 64 };

/* A backend and a program of one matmul: out (ROWS, WIDTH) = x times w. */
typedef struct product {
    llm_backend *b;
    llm_weight w;
    ops *program;
    float *x, *out;
} product;

/* Prepare a program of one matmul for this many tokens and columns. It is not run. */
static void prepare_for(llm_backend *b, int tokens, int width, bool expected) {
    llm_error err;
    llm_limits limits = {tokens, ROWS, WIDTH, ROWS};
    llm_weight w = {LLM_F32, 1, width, NULL, NULL, NULL, false};
    float x, out;
    ops *o = ops_new();
    ops_matmul(o, &x, &w, NULL, false, &out);
    bool fine = b->prepare(b->context, &o->program, &limits, &err);
    if (fine != expected) fail_msg("prepare: %s", fine ? "not refused" : err.message);
    if (!fine) assert_int_equal(err.status, LLM_ERROR_MEMORY);
    ops_free(o, b);
}

static product product_open(int gpu) {
    llm_error err;
    llm_gpu_options options = gpu_options();
    options.device = gpu;
    product p = {device_open(device, &options),
                 {LLM_F32, WIDTH, WIDTH, NULL, NULL, NULL, false},
                 ops_new(),
                 NULL,
                 NULL};
    llm_backend *b = p.b;
    float x[8 * WIDTH], w[WIDTH * WIDTH]; /* 3 rows are rounded up to 8 in a graph */
    for (int i = 0; i < WIDTH * WIDTH; i++) w[i] = (float)(llm_random(1, 1, (uint64_t)i) - 0.5);
    for (int i = 0; i < 8 * WIDTH; i++) x[i] = (float)(llm_random(1, 2, (uint64_t)i) - 0.5);
    assert_true(b->load_weight(b->context, &p.w, w, &err));
    p.x = (float *)b->allocate(b->context, sizeof x, "a test", &err),
    p.out = (float *)b->allocate(b->context, sizeof x, "a test", &err);
    assert_true(p.x && p.out && b->upload(b->context, p.x, x, sizeof x, &err));
    return p;
}

static void product_close(product *p) {
    ops_free(p->program, p->b);
    p->b->release(p->b->context, p->x), p->b->release(p->b->context, p->out);
    p->b->free_weight(p->b->context, &p->w);
    llm_backend_free(p->b);
}

/* Run a step of one matmul. Returns whether a graph was replayed. */
static bool product_step(product *p) {
    static const int32_t zeros[ROWS], positions[ROWS] = {0, 1, 2}, count[1] = {ROWS};
    llm_batch batch = {.n_tokens = ROWS,
                       .n_sequences = 1,
                       .tokens = zeros,
                       .positions = positions,
                       .slots = positions,
                       .seq_first = zeros,
                       .seq_count = count,
                       .block_tables = zeros,
                       .table_stride = 1,
                       .block_size = 16,
                       .n_logits = 1,
                       .logit_rows = zeros};
    llm_error err;
    llm_device_state before, after;
    llm_backend *b = p->b;
    b->state(b->context, &before);
    if (!p->program->program.n_ops) ops_matmul(p->program, p->x, &p->w, NULL, false, p->out);
    assert_true(ops_step(p->program, b, &batch, &err));
    b->state(b->context, &after);
    return after.replays > before.replays;
}

static void download_product(product *p, float out[ROWS * WIDTH]) {
    llm_error err;
    if (!p->b->download(p->b->context, out, p->out, ROWS * WIDTH * sizeof *out, &err))
        fail_msg("%s", err.message);
}

/* Preparing a larger program moves scratch memory, so the earlier graphs must not be replayed. */
static void test_prepare_drops_graphs(void **state) {
    (void)state;
    skip_unless_emulated();
    product p = product_open(0);
    float first[ROWS * WIDTH], later[ROWS * WIDTH];
    assert_false(product_step(&p));
    download_product(&p, first);
    assert_true(product_step(&p));
    prepare_for(p.b, ROWS, 64 * WIDTH, true);
    assert_false(product_step(&p));
    download_product(&p, later);
    assert_memory_equal(first, later, sizeof first);
    product_close(&p);
}

/* A failed prepare does not change the limits of earlier programs: preparing one of them again
 * takes no more memory than before. */
static void test_failed_prepare(void **state) {
    (void)state;
    skip_unless_emulated();
    /* n: the allocation that fails; the buffers allocated before it remain larger */
    for (int n = 0; n < 3; n++) {
        product p = product_open(0);
        float before[ROWS * WIDTH], after[ROWS * WIDTH];
        assert_false(product_step(&p));
        download_product(&p, before);
        prepare_for(p.b, ROWS, WIDTH, true);
        uint64_t run_with_failure = emulator_counted().live_bytes;
        emulator_fail_allocation(n);
        prepare_for(p.b, 1000 * ROWS, 1000 * WIDTH, false);
        emulator_fail_allocation(-1);
        prepare_for(p.b, ROWS, WIDTH, true);
        if (n == 0) assert_true(emulator_counted().live_bytes <= run_with_failure);
        assert_false(product_step(&p));
        download_product(&p, after);
        assert_memory_equal(before, after, sizeof before);
        product_close(&p);
    }
}

/* Copying blocks neither allocates nor waits, and the caller may change its lists at once. */
static void test_copies_do_not_wait(void **state) {
    (void)state;
    skip_unless_emulated();
    llm_error err;
    product p = product_open(0);
    uint16_t keys[2 * 64], got[2 * 64];
    for (int i = 0; i < 2 * 64; i++) keys[i] = (uint16_t)i;
    assert_true(p.b->upload(p.b->context, p.x, keys, sizeof keys, &err) &&
                p.b->sync(p.b->context, &err));
    int32_t from = 0, to = 1;
    llm_cache cache = {LLM_F16, 1, 1, 16, 4, 2, sizeof keys, p.x, p.out, false};
    emulator_counts before = emulator_counted();
    emulator_fail_allocation(0);
    p.b->copy_blocks(p.b->context, &cache, &from, &to, 1);
    from = 1, to = 0;
    emulator_counts after = emulator_counted();
    bool fine = p.b->download(p.b->context, got, p.x, sizeof got, &err);
    bool allocated = emulator_failed();
    emulator_fail_allocation(-1);
    assert_true(fine);
    assert_false(allocated);
    assert_int_equal(after.launches, before.launches); /* the kernel waits on its stream */
    assert_int_equal(after.copies, before.copies);
    assert_memory_equal(got, keys, 128);
    assert_memory_equal(got + 64, keys, 128);
    product_close(&p);
}

/* When load_weight returns, the weights are packed: with the option `overlap`, a kernel may read
 * them before it waits for earlier kernels. */
static void test_loaded_weights_are_packed(void **state) {
    (void)state;
    skip_unless_emulated();
    llm_error err;
    product p = product_open(0);
    assert_true(p.b->sync(p.b->context, &err));
    float host[WIDTH * WIDTH] = {0};
    llm_weight w = {LLM_F32, WIDTH, WIDTH, NULL, NULL, NULL, false};
    uint64_t before = emulator_counted().launches;
    assert_true(p.b->load_weight(p.b->context, &w, host, &err));
    assert_int_equal(emulator_counted().launches, before + 2); /* row scales; packing */
    p.b->free_weight(p.b->context, &w);
    product_close(&p);
}

/* One thread uses two GPUs in turn; CUDA's current device is the last one used. */
static void test_two_devices(void **state) {
    (void)state;
    skip_unless_emulated();
    llm_error err;
    emulator_devices(2, 80, 13000);
    product a = product_open(0), b = product_open(1);
    float host[WIDTH * WIDTH] = {0};
    llm_weight w = {LLM_F32, WIDTH, WIDTH, NULL, NULL, NULL, false};
    static const int32_t zero;
    llm_batch batch = {.n_tokens = 1, .tokens = &zero, .positions = &zero, .slots = &zero,
                       .seq_first = &zero, .seq_count = &zero, .block_tables = &zero,
                       .logit_rows = &zero};
    llm_limits limits = ops_limits(&batch, 0);
    ops *norm = ops_new();
    ops_rmsnorm(norm, b.x, b.x, WIDTH, 1e-5f, b.out);
    assert_true(b.b->prepare(b.b->context, &norm->program, &limits, &err));
    /* allocates scratch memory */
    assert_true(b.b->run(b.b->context, &norm->program, LLM_BODY, &batch, 0, 0, &err));
    /* the first device again, after calls to the second */
    if (!a.b->load_weight(a.b->context, &w, host, &err)) fail_msg("%s", err.message);
    a.b->free_weight(a.b->context, &w);
    assert_true(b.b->run(b.b->context, &norm->program, LLM_BODY, &batch, 0, 0, &err));
    /* the second device again, after calls to the first */
    if (!b.b->sync(b.b->context, &err)) fail_msg("%s", err.message);
    ops_free(norm, b.b);
    product_close(&a), product_close(&b);
    emulator_devices(1, 80, 13000);
    a = product_open(0); /* make the first device current again */
    product_close(&a);
}

/* A failure not yet reported is still reported after a step that was captured as a graph. */
static void test_failure_before_a_capture(void **state) {
    (void)state;
    skip_unless_emulated();
    llm_error err;
    static const int32_t zero;
    llm_batch batch = {.n_tokens = 1, .tokens = &zero, .positions = &zero, .slots = &zero,
                       .seq_first = &zero, .seq_count = &zero, .block_tables = &zero,
                       .logit_rows = &zero};
    llm_limits limits = ops_limits(&batch, 0);
    product p = product_open(0);
    ops *norm = ops_new();
    ops_rmsnorm(norm, p.x, p.x, WIDTH, 1e-5f, p.out);
    assert_true(p.b->prepare(p.b->context, &norm->program, &limits, &err));
    assert_false(product_step(&p));
    emulator_fail_launch(0);
    assert_true(p.b->run(p.b->context, &norm->program, LLM_BODY, &batch, 0, 0, &err));
    emulator_fail_launch(-1);
    assert_true(product_step(&p));
    assert_false(p.b->sync(p.b->context, &err));
    assert_non_null(strstr(err.message, "rmsnorm"));
    assert_true(p.b->sync(p.b->context, &err));
    ops_free(norm, p.b);
    product_close(&p);
}

/* A step that starts while the previous one still runs does not change the previous step's
 * inputs. */
static void test_overlapping_steps(void **state) {
    (void)state;
    enum { VOCAB_ROWS = 10 };
    llm_error err;
    llm_gpu_options options = gpu_options();
    llm_backend *b = device_open(device, &options);
    ops *program[2] = {ops_new(), ops_new()};
    float values[VOCAB_ROWS * WIDTH], got[2][WIDTH], *out[2];
    for (int i = 0; i < VOCAB_ROWS * WIDTH; i++) values[i] = (float)(i / WIDTH);
    llm_weight table = {LLM_F32, VOCAB_ROWS, WIDTH, NULL, NULL, NULL, false};
    assert_true(b->load_weight(b->context, &table, values, &err));
    for (int i = 0; i < 2; i++) {
        llm_limits limits = {1, 1, WIDTH, 0};
        out[i] = (float *)b->allocate(b->context, 8 * sizeof got[0], "a test", &err);
        ops_embed(program[i], &table, out[i]);
        assert_true(b->prepare(b->context, &program[i]->program, &limits, &err));
    }
    for (int i = 0; i < 2; i++) {
        int32_t zero = 0, one = 1, token = 3 + 4 * i;
        llm_batch batch = {.n_tokens = 1,
                           .n_sequences = 1,
                           .tokens = &token,
                           .positions = &zero,
                           .slots = &zero,
                           .seq_first = &zero,
                           .seq_count = &one,
                           .block_tables = &zero,
                           .table_stride = 1,
                           .block_size = 16,
                           .logit_rows = &zero};
        assert_true(b->run(b->context, &program[i]->program, LLM_BODY, &batch, 0, 0, &err));
    }
    for (int i = 0; i < 2; i++) {
        assert_true(b->download(b->context, got[i], out[i], sizeof got[i], &err));
        for (int k = 0; k < WIDTH; k++) assert_true(got[i][k] == (float)(3 + 4 * i));
        b->release(b->context, out[i]);
        ops_free(program[i], b);
    }
    b->free_weight(b->context, &table);
    llm_backend_free(b);
}

static void test_too_little_memory(void **state) {
    (void)state;
    llm_error err;
    if (strcmp(device, "emulated")) {
        print_message("SKIPPED: only the emulated device has an adjustable memory size\n");
        skip();
    }
    uint64_t before = emulator_counted().live_allocations;
    emulator_memory(100000);
    llm_backend *b = device_open(device, NULL);
    llm_engine_options o = options_on(b);
    assert_null(llm_engine_create(target, &o, &err));
    assert_int_equal(err.status, LLM_ERROR_MEMORY);
    print_message("    %s\n", err.message);
    assert_non_null(strstr(err.message, "free")); /* the message says how much is free */
    llm_backend_free(b);
    emulator_memory((size_t)8 << 30);
    assert_int_equal(emulator_counted().live_allocations, before);
}

static void test_no_device(void **state) {
    (void)state;
    llm_error err;
    if (strcmp(device, "emulated")) {
        print_message("SKIPPED: only the emulated device can be removed\n");
        skip();
    }
    static const struct {
        int count, capability, driver;
        const char *words;
    } cases[] = {{0, 80, 13000, "no NVIDIA GPU"},
                 {1, 80, 11000, "driver"},
                 {1, 75, 13000, "compute capability 7.5"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        emulator_devices(cases[i].count, cases[i].capability, cases[i].driver);
        assert_null(llm_emulated_backend(NULL, &err));
        assert_true(err.status == LLM_ERROR_UNSUPPORTED || err.status == LLM_ERROR_DEVICE);
        if (!strstr(err.message, cases[i].words))
            fail_msg("\"%s\" does not say \"%s\"", err.message, cases[i].words);
    }
    emulator_devices(1, 80, 13000);
    llm_gpu_options second = llm_gpu_defaults();
    second.device = 1;
    assert_null(llm_emulated_backend(&second, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_transformers),
        cmocka_unit_test(test_batch_composition),
        cmocka_unit_test(test_batches_of_experts),
        cmocka_unit_test(test_sessions),
        cmocka_unit_test(test_embeddings),
        cmocka_unit_test(test_speculation),
        cmocka_unit_test(test_sampled_speculation),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_failed_copies),
        cmocka_unit_test(test_failed_graph_launch),
        cmocka_unit_test(test_second_engine),
        cmocka_unit_test(test_too_little_memory),
        cmocka_unit_test(test_no_device),
        cmocka_unit_test(test_prepare_drops_graphs),
        cmocka_unit_test(test_failed_prepare),
        cmocka_unit_test(test_copies_do_not_wait),
        cmocka_unit_test(test_loaded_weights_are_packed),
        cmocka_unit_test(test_two_devices),
        cmocka_unit_test(test_failure_before_a_capture),
        cmocka_unit_test(test_overlapping_steps),
        cmocka_unit_test(test_captured_steps),
        cmocka_unit_test(test_hopper),
    };
    return cmocka_run_group_tests(tests, load_models, free_models);
}
