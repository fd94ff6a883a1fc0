/* If an allocation or a device call fails, the engine reports it, other requests are not affected
 * and nothing leaks. After the failure, the same requests still give the same tokens. */
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

#define TARGET "tests/data/golden/mqa_4_1.gguf"
#define DRAFT "tests/data/golden/gqa_8_2.gguf"

enum { N_REQUESTS = 7, MAX_PROMPT = 40 };

static llm_model *target, *draft;
static record *expected[N_REQUESTS];

/* ---- Requests of all kinds --------------------------------------------------------------- */

static llm_request some_request(int i, int32_t *prompt) {
    static const char *const stops[] = {"qq", "\x7f", "e"};
    llm_request r = llm_request_defaults();
    r.n_prompt = 6 + 5 * i;
    /* the prompts share prefixes */
    for (int k = 0; k < r.n_prompt; k++)
        prompt[k] = (int32_t)(llm_random((uint64_t)(i % 2), 3, (uint64_t)k) * 280);
    r.prompt = prompt;
    r.max_tokens = 14;
    r.ignore_end = true;
    r.n_samples = 1 + i % 3;
    r.sampling.temperature = i % 2 || i == 4 ? 0.9f : 0;
    r.sampling.top_p = 0.95f;
    r.stop = stops;
    r.n_stop = i % 4;
    r.speculate = i == 5 ? LLM_SPECULATE_AUTO : i % 4;
    r.branches = i % 3 + 1;
    r.lookup = i == 3;
    r.logits_hook = i == 4 ? record_hook : NULL;
    return r;
}

enum { RECOMPUTE, SWAP, N_KINDS };

/* Options with a pool so small that sequences are preempted, by recomputing or swapping. */
static llm_engine_options some_options(int kind) {
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.draft = draft;
    o.context_length = 64;
    o.block_size = 4;
    o.max_sequences = 6;
    o.max_batch_tokens = 24;
    o.max_speculation = 4;
    o.preempt = kind == SWAP ? LLM_PREEMPT_SWAP : LLM_PREEMPT_RECOMPUTE;
    o.swap_bytes = 1 << 20;
    o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 80;
    return o;
}

static int prepare(void **state) {
    (void)state;
    target = model_load(TARGET);
    draft = model_load(DRAFT);
    for (int i = 0; i < N_REQUESTS; i++) {
        int32_t prompt[MAX_PROMPT];
        llm_engine_options o = some_options(RECOMPUTE);
        o.cache_bytes = 0;
        llm_engine *engine = engine_new(target, &o);
        llm_request r = some_request(i, prompt);
        expected[i] = record_new(target);
        record_submit(engine, expected[i], r, r.logits_hook != NULL);
        record_drain(engine);
        llm_engine_free(engine);
    }
    return 0;
}

static int clean_up(void **state) {
    (void)state;
    for (int i = 0; i < N_REQUESTS; i++) record_free(expected[i]);
    llm_model_free(target);
    llm_model_free(draft);
    return 0;
}

/* ---- Allocations ---------------------------------------------------------------------------- */

static void check_memory_error(const llm_error *err, long k) {
    if (err->status != LLM_ERROR_MEMORY)
        fail_msg("allocation %ld failed with error %d: %s", k, (int)err->status,
                 err->message);
    assert_true(strlen(err->message) > 10);
}

/* Create an engine and run all requests, with allocation k failing. The failed call is repeated,
 * and the output must be right. Returns whether an allocation failed. */
static bool run_with_failing_allocation(int kind, long k) {
    llm_error err;
    llm_engine_options o = some_options(kind);
    record *got[N_REQUESTS];
    long live = test_live;
    memset(&err, 0x55, sizeof err);
    test_failed = false;
    test_fail_in = k;
    llm_engine *engine = llm_engine_create(target, &o, &err);
    assert_int_equal(engine == NULL, test_failed);
    if (!engine) {
        check_memory_error(&err, k);
        assert_int_equal(test_live, live); /* nothing leaks */
        engine = llm_engine_create(target, &o, &err);
        assert_non_null(engine);
    }
    for (int i = 0; i < N_REQUESTS; i++) {
        int32_t prompt[MAX_PROMPT];
        llm_request r = some_request(i, prompt);
        r.user = got[i] = record_new(target);
        long before = test_live;
        bool failed = test_failed, ok = llm_submit(engine, &r, &got[i]->id, &err);
        assert_int_equal(ok, failed == test_failed);
        if (!ok) {
            check_memory_error(&err, k);
            assert_true(test_live <= before + 1); /* the list of events may have grown */
            assert_int_equal(llm_engine_statistics(engine).requests_submitted, i);
            if (!llm_submit(engine, &r, &got[i]->id, &err)) fail_msg("%s", err.message);
        }
        assert_int_equal(err.status, LLM_OK);
        for (int n = 0; n < i; n++) { /* run some steps before the next request */
            assert_true(llm_step(engine, &err) >= 0);
            record_events(engine);
        }
    }
    record_drain(engine);
    assert_idle(engine);
    for (int i = 0; i < N_REQUESTS; i++) {
        assert_same(expected[i], got[i]);
        record_free(got[i]);
    }
    llm_engine_free(engine);
    test_fail_in = -1;
    assert_int_equal(test_live, live);
    return test_failed;
}

static void test_failing_allocations(void **state) {
    (void)state;
    for (int kind = 0; kind < N_KINDS; kind++) {
        long n = 0;
        while (run_with_failing_allocation(kind, n)) n++;
        print_message("%ld allocations, each failed once\n", n);
        assert_true(n > 40);
    }
}

/* The same test through llm_submit_text, which also allocates tokens. */
static void test_failing_text(void **state) {
    (void)state;
    llm_error err;
    llm_engine_options o = some_options(RECOMPUTE);
    llm_engine *engine = engine_new(target, &o);
    char *text = NULL;
    size_t length = 0;
    for (int round = 0; round < 2; round++) {
        bool ok = false;
        for (long k = 0; !ok; k++) {
            record *r = record_new(target);
            llm_request request = llm_request_defaults();
            request.max_tokens = 10;
            request.user = r;
            long live = test_live;
            test_failed = false;
            test_fail_in = k;
            ok = llm_submit_text(engine, "the same text again", &request, &r->id, &err);
            test_fail_in = -1;
            assert_int_equal(ok, !test_failed);
            assert_int_equal(err.status, ok ? LLM_OK : LLM_ERROR_MEMORY);
            if (!ok) assert_true(test_live <= live + 1);
            if (ok) record_drain(engine);
            if (ok && text)
                assert_true(length == r->samples[0].text_length &&
                            !memcmp(text, r->samples[0].text, length));
            if (ok && !text) {
                length = r->samples[0].text_length;
                text = (char *)malloc(length + 1);
                assert_non_null(text);
                memcpy(text, r->samples[0].text, length);
            }
            record_free(r);
        }
    }
    free(text);
    assert_idle(engine);
    llm_engine_free(engine);
}

/* ---- A device that fails --------------------------------------------------------------------- */

/* Create an engine and run all requests, with device call k failing. Returns whether a call
 * failed. */
static bool run_with_failing_device(int kind, long k) {
    llm_error err;
    llm_engine_options o = some_options(kind);
    record *got[N_REQUESTS];
    long live = test_live;
    int n_failed = 0, more;
    real = llm_cpu_backend(1, LLM_ISA_BEST, &err);
    assert_non_null(real);
    llm_backend device = failing_backend();
    o.backend = &device;
    calls = 0;
    fail_call = k;
    llm_engine *engine = llm_engine_create(target, &o, &err);
    if (!engine) {
        assert_int_equal(err.status, LLM_ERROR_DEVICE);
        llm_backend_free(real);
        assert_int_equal(test_live, live);
        return true;
    }
    if (engine->network.max_logits > 3) /* several downloads per step */
        engine->network.max_logits = engine->speculator.draft.max_logits = 3;
    for (int i = 0; i < N_REQUESTS; i++) {
        int32_t prompt[MAX_PROMPT];
        llm_request r = some_request(i, prompt);
        got[i] = record_new(target);
        record_submit(engine, got[i], r, r.logits_hook != NULL);
    }
    while ((more = llm_step(engine, &err)) != 0) {
        record_events(engine); /* also events of a step that failed */
        if (more > 0) continue;
        assert_int_equal(err.status, LLM_ERROR_DEVICE);
        assert_int_equal(++n_failed, 1);
    }
    assert_int_equal(n_failed, calls > k && k >= 0);
    assert_idle(engine);
    assert_int_equal(engine->scheduler.n_swap_free, engine->scheduler.n_swap);
    for (int i = 0; i < N_REQUESTS; i++) {
        int32_t prompt[MAX_PROMPT];
        llm_request r = some_request(i, prompt);
        /* A step that fails during verification ends early; sampling with proposals then continues
         * with other random numbers. */
        if (r.speculate && r.sampling.temperature > 0)
            for (int k = 0; k < r.n_samples; k++) assert_int_equal(got[i]->samples[k].n_ends, 1);
        else assert_same(expected[i], got[i]);
        record_free(got[i]);
    }
    llm_engine_free(engine);
    llm_backend_free(real);
    assert_int_equal(test_live, live);
    return calls > k;
}

static void test_failing_device(void **state) {
    (void)state;
    for (int kind = 0; kind < N_KINDS; kind++) {
        run_with_failing_device(kind, -1);
        long n = calls, tried = 0;
        test_random random = {1 + (uint64_t)kind};
        /* test only some calls, since most are alike */
        for (long k = 0; k < n; k += 1 + random_below(&random, (int)(n / 60)), tried++)
            assert_true(run_with_failing_device(kind, k));
        print_message("%ld calls of the device, %ld of them failed once\n", n, tried);
        assert_true(n > 300 && tried > 50);
    }
}

/* The samples of a request write into copies of a shared block. Each device call fails once,
 * including copies; the next step repeats a copy that was not done. */
static void test_failing_copies(void **state) {
    (void)state;
    llm_error err;
    record *right = NULL;
    real = llm_cpu_backend(1, LLM_ISA_BEST, &err);
    assert_non_null(real);
    llm_backend device = failing_backend();
    for (long k = -1, n = 0; k < n; k++) {
        int32_t prompt[MAX_PROMPT];
        llm_engine_options o = some_options(RECOMPUTE);
        llm_request r = some_request(0, prompt); /* 6 tokens, in blocks of 4 */
        o.backend = &device;
        o.draft = NULL;
        r.n_samples = 3;
        r.max_tokens = 4;
        r.sampling.temperature = 1;
        fail_call = -1;
        llm_engine *engine = engine_new(target, &o);
        record *got = record_new(target);
        record_submit(engine, got, r, false);
        calls = 0;
        fail_call = k;
        for (int more = 1, n_failed = 0; more; record_events(engine)) {
            more = llm_step(engine, &err);
            if (more < 0) assert_int_equal(++n_failed, 1);
        }
        assert_idle(engine);
        llm_engine_free(engine);
        if (k < 0) {
            right = got;
            n = calls;
        } else {
            assert_same(right, got);
            record_free(got);
        }
    }
    record_free(right);
    llm_backend_free(real);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_failing_allocations),
        cmocka_unit_test(test_failing_text),
        cmocka_unit_test(test_failing_copies),
        cmocka_unit_test(test_failing_device),
    };
    return cmocka_run_group_tests_name("faults", tests, prepare, clean_up);
}
