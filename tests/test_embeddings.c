/* Embeddings: hidden states of a prompt. No bit of them depends on the rest of the batch, on how
 * the prompt is chunked, or on preemptions and failures. (tests/test_transformer.c compares them
 * with those of another implementation, tests/test_device_engine.c on a device.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_util.h"
#define LLM_DEBUG
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "invariants.h"
#include "engine_util.h"
#include "failing_backend.h"

#define MODEL "tests/data/golden/mqa_4_1.gguf"

enum { N_TEXTS = 6, LONGEST = 60, MAX_DIM = 512, VOCAB = 280 };

static llm_model *model;
static int dim;

typedef struct embedding {
    int32_t prompt[LONGEST];
    int n_prompt, n_ends;
    float last[MAX_DIM], mean[MAX_DIM];
} embedding;

static embedding right[N_TEXTS]; /* expected results: each text alone, in one step */

static llm_engine_options some_options(void) {
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.context_length = 64;
    o.block_size = 4;
    o.max_sequences = 6;
    o.max_batch_tokens = 64;
    return o;
}

static embedding make_text(int i) {
    embedding t;
    memset(&t, 0, sizeof t);
    t.n_prompt = 1 + 11 * i;
    for (int k = 0; k < t.n_prompt; k++) /* the texts share a prefix */
        t.prompt[k] = (int32_t)(llm_random((uint64_t)(i % 2), 3, (uint64_t)k) * 280);
    return t;
}

static llm_request request_for(embedding *t) {
    llm_request r = llm_request_defaults();
    r.prompt = t->prompt;
    r.n_prompt = t->n_prompt;
    r.embedding = true;
    r.user = t;
    return r;
}

static void submit(llm_engine *engine, embedding *t) {
    llm_error err;
    llm_request r = request_for(t);
    if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
}

static void read_events(llm_engine *engine) {
    llm_event event;
    while (llm_next_event(engine, &event)) {
        embedding *t = (embedding *)event.user;
        if (!t) continue; /* a request that generates */
        assert_int_equal(event.finish, LLM_FINISH_LENGTH);
        assert_int_equal(event.token, -1);
        assert_int_equal(event.index, 0);
        assert_int_equal(event.text_length, 0);
        memcpy(t->last, event.last_hidden, (size_t)dim * sizeof(float));
        memcpy(t->mean, event.mean_hidden, (size_t)dim * sizeof(float));
        t->n_ends++;
    }
}

/* Returns the number of failed steps. */
static int drain(llm_engine *engine) {
    llm_error err;
    int more, n_failed = 0;
    while ((more = llm_step(engine, &err)) != 0) {
        n_failed += more < 0;
        read_events(engine);
        assert_true(n_failed < 3);
    }
    assert_idle(engine);
    return n_failed;
}

static void check(const embedding *got, int i) {
    size_t bytes = (size_t)dim * sizeof(float);
    assert_int_equal(got->n_ends, 1);
    assert_memory_equal(got->last, right[i].last, bytes);
    assert_memory_equal(got->mean, right[i].mean, bytes);
}

static int prepare(void **state) {
    (void)state;
    model = model_load(MODEL);
    dim = llm_model_config(model)->dim;
    assert_true(dim <= MAX_DIM);
    for (int i = 0; i < N_TEXTS; i++) {
        llm_engine_options o = some_options();
        llm_engine *engine = engine_new(model, &o);
        right[i] = make_text(i);
        submit(engine, &right[i]);
        drain(engine);
        assert_int_equal(right[i].n_ends, 1);
        llm_engine_free(engine);
    }
    return 0;
}

static int clean_up(void **state) {
    (void)state;
    llm_model_free(model);
    return 0;
}

/* Run all texts together twice, next to requests that generate. The second time, the texts are in
 * the prefix cache. */
static void check_together(llm_engine_options o) {
    llm_engine *engine = engine_new(model, &o);
    for (int round = 0; round < 2; round++) {
        embedding got[N_TEXTS];
        for (int i = 0; i < N_TEXTS; i++) {
            llm_error err;
            llm_request r = llm_request_defaults();
            got[i] = make_text(i);
            submit(engine, &got[i]);
            r.prompt = got[i].prompt;
            r.n_prompt = got[i].n_prompt < 20 ? got[i].n_prompt : 20;
            r.max_tokens = 40;
            r.ignore_end = true;
            if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
        }
        long allocations = test_allocations;
        assert_int_equal(drain(engine), 0);
        assert_int_equal(test_allocations, allocations);
        for (int i = 0; i < N_TEXTS; i++) check(&got[i], i);
    }
    if (o.cache_bytes) assert_true(llm_engine_statistics(engine).preemptions > 0);
    llm_engine_free(engine);
}

static void test_company(void **state) {
    (void)state;
    llm_engine_options o = some_options();
    check_together(o);
    o.max_batch_tokens = 7;
    check_together(o);
    o.prefix_cache = false;
    o.n_threads = 2;
    check_together(o);
    o = some_options();
    o.max_batch_tokens = 13;
    o.cache_bytes = llm_model_cache_bytes_per_token(model, LLM_F16) * 4 * 24; /* 24 blocks */
    check_together(o);
    o.preempt = LLM_PREEMPT_SWAP;
    o.swap_bytes = 1 << 16;
    check_together(o);
}

/* A prompt that is preempted midway and computed again is counted once. */
static void test_preempted(void **state) {
    (void)state;
    for (int prefix_cache = 0; prefix_cache < 2; prefix_cache++) {
        llm_error err;
        llm_engine_options o = some_options();
        o.prefix_cache = prefix_cache;
        o.max_batch_tokens = 2; /* one token for the older request, one for the prompt */
        o.cache_bytes = llm_model_cache_bytes_per_token(model, LLM_F16) * 4 * 16; /* 16 blocks */
        llm_engine *engine = engine_new(model, &o);
        embedding got = make_text(4);
        llm_request r = llm_request_defaults();
        r.prompt = got.prompt;
        r.n_prompt = 1;
        r.max_tokens = 50;
        r.ignore_end = true;
        assert_true(llm_submit(engine, &r, NULL, &err));
        submit(engine, &got);
        assert_int_equal(drain(engine), 0);
        assert_true(llm_engine_statistics(engine).preemptions > 0);
        check(&got, 4);
        llm_engine_free(engine);
    }
}

/* The rows of the output matrix, times the last hidden state, are the logits. */
static void last_logits(void *user, uint64_t request, int sample, int position, float *logits) {
    (void)request, (void)sample;
    if (position == right[3].n_prompt - 1)
        memcpy(user, logits, VOCAB * sizeof(float));
}

static void test_logits(void **state) {
    (void)state;
    llm_error err;
    float logits[VOCAB], row[MAX_DIM];
    llm_engine_options o = some_options();
    llm_engine *engine = engine_new(model, &o);
    llm_request r = request_for(&right[3]);
    r.embedding = false;
    r.max_tokens = 0;
    r.logits_hook = last_logits;
    r.user = logits;
    assert_true(llm_model_config(model)->vocab_size >= VOCAB);
    assert_true(llm_submit(engine, &r, NULL, &err));
    while (llm_step(engine, &err) > 0) {}
    llm_engine_free(engine);
    const llm_file *file = llm_model_file(model);
    const llm_tensor *output = llm_file_find_tensor(file, "output.weight");
    if (!output) output = llm_file_find_tensor(file, "token_embd.weight");
    size_t bytes = (size_t)(output->bytes / output->dims[1]);
    for (int i = 0; i < VOCAB; i++) {
        double sum = 0;
        const char *from = (const char *)output->data + (size_t)i * bytes;
        llm_type_find(output->type)->unpack(from, row, dim);
        for (int k = 0; k < dim; k++) sum += (double)row[k] * (double)right[3].last[k];
        /* the kernel rounds its input */
        assert_true(fabs(sum - (double)logits[i]) < 0.02 * (1 + fabs(sum)));
    }
}

static void test_refused(void **state) {
    (void)state;
    llm_error err;
    llm_engine_options o = some_options();
    llm_engine *engine = engine_new(model, &o);
    for (int i = 0; i < 3; i++) {
        llm_request r = request_for(&right[2]);
        if (i == 0) r.n_samples = 2;
        if (i == 1) r.logits_hook = last_logits;
        if (i == 2) r.speculate = 2, r.lookup = true;
        assert_false(llm_submit(engine, &r, NULL, &err));
        assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
        assert_non_null(strstr(err.message, "embedding"));
    }
    embedding longest; /* the longest prompt that fits in the context, with any max_tokens */
    memset(&longest, 0, sizeof longest);
    llm_request r = request_for(&longest);
    int32_t prompt[65] = {0};
    r.prompt = prompt;
    r.n_prompt = 65;
    assert_false(llm_submit(engine, &r, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_CAPACITY);
    r.n_prompt = 64;
    r.max_tokens = 5;
    uint64_t id;
    size_t size;
    assert_true(llm_submit(engine, &r, &id, &err));
    assert_null(llm_session_save(engine, id, &size, &err));
    assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
    drain(engine);
    assert_int_equal(longest.n_ends, 1);
    llm_engine_free(engine);
}

/* Each device call fails once. The step is repeated, and nothing is counted twice. */
static void test_failing_device(void **state) {
    (void)state;
    llm_error err;
    real = llm_cpu_backend(1, LLM_ISA_BEST, &err);
    assert_non_null(real);
    llm_backend device_that_fails = failing_backend();
    llm_engine_options o = some_options();
    o.backend = &device_that_fails;
    o.max_batch_tokens = 9;
    long n = 1;
    for (long k = -1; k < n; k++) {
        embedding got[N_TEXTS];
        fail_call = -1;
        llm_engine *engine = engine_new(model, &o);
        if (engine->network.max_logits > 1) engine->network.max_logits = 1; /* several slices */
        calls = 0;
        fail_call = k;
        for (int i = 0; i < N_TEXTS; i++) {
            llm_request r = llm_request_defaults();
            got[i] = make_text(i);
            submit(engine, &got[i]);
            r.prompt = got[i].prompt;
            r.n_prompt = 1;
            r.max_tokens = 3;
            assert_true(llm_submit(engine, &r, NULL, &err));
        }
        assert_int_equal(drain(engine), k >= 0);
        for (int i = 0; i < N_TEXTS; i++) check(&got[i], i);
        llm_engine_free(engine);
        if (k < 0) n = calls;
    }
    llm_backend_free(real);
    print_message("%ld calls of the device, each failed once\n", n);
    assert_true(n > 30);
}

/* Hidden states that are not finite are an error, in any chunk of the prompt. */
static void test_not_finite(void **state) {
    (void)state;
    llm_error err;
    llm_event event;
    bytes file = slurp(MODEL);
    const llm_tensor *embd = llm_file_find_tensor(llm_model_file(model), "token_embd.weight");
    uint8_t *at = file.data;
    while (memcmp(at, embd->data, 256)) at++;
    size_t bytes = (size_t)(embd->bytes / embd->dims[1]), token = (size_t)right[5].prompt[20];
    memset(at + token * bytes, 0xff, bytes); /* NaN in every type */
    llm_model *broken = llm_model_from_memory(file.data, file.length, "broken", &err);
    if (!broken) fail_msg("%s", err.message);
    for (int chunk = 8; chunk <= 64; chunk += 28) {
        llm_engine_options o = some_options();
        o.max_batch_tokens = chunk;
        llm_engine *engine = engine_new(broken, &o);
        llm_request r = request_for(&right[5]);
        int n = 0;
        assert_true(llm_submit(engine, &r, NULL, &err));
        while (llm_step(engine, &err) > 0)
            for (; llm_next_event(engine, &event); n++) {
                assert_int_equal(event.finish, LLM_FINISH_ERROR);
                assert_null(event.last_hidden);
                assert_non_null(strstr(event.error, "hidden states up to position 55"));
            }
        assert_int_equal(n, 1);
        assert_idle(engine);
        llm_engine_free(engine);
    }
    llm_model_free(broken);
    clear_bytes(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_company),        cmocka_unit_test(test_preempted),
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_failing_device),
        cmocka_unit_test(test_not_finite),
    };
    return cmocka_run_group_tests_name("embeddings", tests, prepare, clean_up);
}
