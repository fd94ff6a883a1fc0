/* Sessions: a request that is saved midway and restored, in its engine or in another one, continues
 * with the same output, bit for bit. Damaged sessions are refused, forged ones do not affect other
 * requests, and nothing leaks when an allocation or the device fails. */
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
#include "two_models.h"
#include "failing_backend.h"

enum { N_REQUESTS = 8, MAX_PROMPT = 48 };

/* ---- Requests of all kinds ------------------------------------------------------------------ */

static llm_request some_request(int i, int32_t *prompt) {
    static const char *const stops[] = {"qq", "\x7f", "never found", "e"};
    static const llm_logit_bias biases[] = {{9, 1.5f}, {100, -2}};
    llm_request r = llm_request_defaults();
    r.n_prompt = 5 + 6 * i;
    for (int k = 0; k < r.n_prompt; k++) /* the prompts share a prefix */
        prompt[k] = (int32_t)(llm_random((uint64_t)(i % 2), 3, (uint64_t)k) * 280);
    r.prompt = prompt;
    r.max_tokens = i ? 14 : -1; /* -1: to the end of the first engine's context */
    r.ignore_end = i % 4 != 1;
    r.n_samples = 1 + i % 3;
    r.sampling.temperature = i % 2 || i == 4 ? 0.9f : 0;
    r.sampling.top_p = 0.95f;
    r.sampling.repetition_penalty = i == 6 ? 1.3f : 1;
    if (i == 5) {
        r.sampling.bias = biases;
        r.sampling.n_bias = 2;
        r.sampling.frequency_penalty = 0.3f;
        r.sampling.presence_penalty = 0.2f;
    }
    r.sampling.seed = (uint64_t)i;
    r.stop = stops;
    r.n_stop = i % 5;
    r.priority = i % 2;
    r.logits_hook = i == 4 || i == 7 ? record_hook : NULL;
    return r;
}

/* The same, with speculation. */
static llm_request speculative(int i, int32_t *prompt) {
    llm_request r = some_request(i, prompt);
    r.speculate = r.logits_hook ? 0 : i == 5 ? LLM_SPECULATE_AUTO : i % 4;
    r.branches = i % 3 + 1;
    r.lookup = i == 3;
    return r;
}

static llm_engine_options some_options(void) {
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.context_length = 64;
    o.block_size = 4;
    o.max_sequences = 6;
    o.max_batch_tokens = 16;
    o.max_speculation = 4;
    return o;
}

static void step(llm_engine *engine) {
    llm_error err;
    if (llm_step(engine, &err) < 0) fail_msg("%s", err.message);
    record_events(engine);
}

static bool ended(const record *r, int n_samples) {
    for (int i = 0; i < n_samples; i++)
        if (!r->samples[i].n_ends) return false;
    return true;
}

static void *save(llm_engine *engine, const record *r, size_t *size) {
    llm_error err;
    void *session = llm_session_save(engine, r->id, size, &err);
    if (!session) fail_msg("%s", err.message);
    assert_int_equal(err.status, LLM_OK);
    return session;
}

static void restore(llm_engine *engine, record *r, bool hooked, const void *session, size_t size) {
    llm_error err;
    llm_request callbacks = llm_request_defaults();
    callbacks.user = r;
    callbacks.logits_hook = hooked ? record_hook : NULL;
    if (!llm_session_restore(engine, session, size, &callbacks, &r->id, &err))
        fail_msg("%s", err.message);
    assert_int_equal(err.status, LLM_OK);
}

/* A copy of a request's output so far, without its logits. */
static record *record_copy(const record *from) {
    record *r = record_new(target);
    *r = *from;
    for (int i = 0; i < MAX_SAMPLES; i++) {
        sample_record *s = &r->samples[i];
        s->logits = NULL;
        if (!s->text) continue;
        s->text = (char *)malloc(s->text_length + 1);
        assert_non_null(s->text);
        memcpy(s->text, from->samples[i].text, s->text_length + 1);
    }
    return r;
}

/* Cancel a request; its record does not get the last events. */
static void cancel(llm_engine *engine, const record *r) {
    llm_event event;
    assert_true(llm_cancel(engine, r->id, NULL));
    while (llm_next_event(engine, &event)) assert_int_equal(event.finish, LLM_FINISH_CANCELLED);
}

typedef llm_request (*maker)(int i, int32_t *prompt);

static record *uninterrupted(const llm_engine_options *o, llm_request r) {
    llm_engine *engine = engine_new(target, o);
    record *right = record_new(target);
    record_submit(engine, right, r, r.logits_hook != NULL);
    record_drain(engine);
    llm_engine_free(engine);
    return right;
}

/* Save request i after `steps` steps, and restore it in the same engine, or in a new one with other
 * options. Returns false if the request had ended before. */
static bool round_trip(const llm_engine_options *from, const llm_engine_options *to, maker make,
                       int i, int steps, const record *right) {
    int32_t prompt[MAX_PROMPT];
    llm_request r = make(i, prompt);
    llm_engine *engine = engine_new(target, from), *other = to ? engine_new(target, to) : engine;
    record *got = record_new(target);
    record_submit(engine, got, r, r.logits_hook != NULL);
    for (int n = 0; n < steps; n++) step(engine);
    bool saved = !ended(got, r.n_samples);
    if (saved) {
        size_t size;
        void *session = save(engine, got, &size);
        cancel(engine, got);
        restore(other, got, r.logits_hook != NULL, session, size);
        memset(session, 0x5a, size); /* the engine has copied the session */
        llm_session_free(session);
    }
    record_drain(other);
    assert_same(right, got);
    assert_idle(engine);
    assert_idle(other);
    record_free(got);
    if (to) llm_engine_free(other);
    llm_engine_free(engine);
    return saved;
}

/* Make a round trip at every step, or nearly every step, of every request. */
static void round_trips(const llm_engine_options *from, const llm_engine_options *to, maker make) {
    int n = 0;
    for (int i = 0; i < N_REQUESTS; i++) {
        int32_t prompt[MAX_PROMPT];
        record *right = uninterrupted(from, make(i, prompt));
        for (int steps = 0; round_trip(from, to, make, i, steps, right);
             steps += steps < 12 ? 1 : 5)
            n++;
        record_free(right);
    }
    assert_true(n > 30);
}

static void test_same_engine(void **state) {
    (void)state;
    llm_engine_options o = some_options();
    round_trips(&o, NULL, some_request);
    o.prefix_cache = false;
    round_trips(&o, NULL, some_request);
}

/* Options that may differ between the two engines do not change the output. */
static void test_other_engine(void **state) {
    (void)state;
    llm_engine_options from = some_options(), to = some_options();
    to.n_threads = 2;
    to.context_length = 80;
    to.max_sequences = 3;
    to.max_batch_tokens = 7;
    to.prefix_cache = false;
    to.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 4 * 20; /* 20 blocks */
    to.preempt = LLM_PREEMPT_SWAP;
    to.swap_bytes = 1 << 16;
    round_trips(&from, &to, some_request);
    from.cache_type = to.cache_type = LLM_F32;
    to.cache_bytes *= 2;
    round_trips(&from, &to, some_request);
}

static void test_speculation(void **state) {
    (void)state;
    llm_engine_options o = some_options();
    o.draft = draft;
    round_trips(&o, NULL, speculative);
    llm_engine_options to = o;
    round_trips(&o, &to, speculative);
}

/* Many concurrent requests are saved and restored at random, in a pool so small that some are
 * preempted, by recomputing or swapping. */
static void test_company(void **state) {
    (void)state;
    for (int round = 0; round < repeats(24, 8); round++) {
        llm_engine_options o = some_options();
        test_random random = {100 + (uint64_t)round};
        record *right[N_REQUESTS], *got[N_REQUESTS];
        if (round % 3 == 1) o.draft = draft;
        for (int i = 0; i < N_REQUESTS; i++) {
            int32_t prompt[MAX_PROMPT];
            right[i] = uninterrupted(&o, some_request(i, prompt));
            got[i] = record_new(target);
        }
        o.preempt = round % 2 ? LLM_PREEMPT_SWAP : LLM_PREEMPT_RECOMPUTE;
        o.swap_bytes = 1 << 16;
        o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 4 * 26; /* 26 blocks */
        llm_engine *engines[2] = {engine_new(target, &o), engine_new(target, &o)};
        int at[N_REQUESTS];
        for (int i = 0; i < N_REQUESTS; i++) {
            int32_t prompt[MAX_PROMPT];
            llm_request r = some_request(i, prompt);
            record_submit(engines[at[i] = i % 2], got[i], r, r.logits_hook != NULL);
        }
        for (int n = 0; n < 60; n++) {
            int i = random_below(&random, N_REQUESTS);
            int32_t prompt[MAX_PROMPT];
            llm_request r = some_request(i, prompt);
            step(engines[random_below(&random, 2)]);
            if (ended(got[i], r.n_samples)) continue;
            size_t size;
            void *session = save(engines[at[i]], got[i], &size);
            cancel(engines[at[i]], got[i]);
            restore(engines[at[i] ^= 1], got[i], r.logits_hook != NULL, session, size);
            llm_session_free(session);
        }
        for (int i = 0; i < 2; i++) {
            record_drain(engines[i]);
            assert_idle(engines[i]);
            llm_engine_free(engines[i]);
        }
        for (int i = 0; i < N_REQUESTS; i++) {
            assert_same(right[i], got[i]);
            record_free(right[i]);
            record_free(got[i]);
        }
    }
}

/* ---- The cache is restored, not computed again ---------------------------------------------- */

static void test_no_second_prefill(void **state) {
    (void)state;
    for (int prefix_cache = 0; prefix_cache < 2; prefix_cache++) {
        int32_t prompt[MAX_PROMPT];
        llm_engine_options o = some_options();
        llm_request r = some_request(6, prompt); /* 41 tokens */
        size_t size;
        o.prefix_cache = prefix_cache;
        r.n_samples = 3;
        r.max_tokens = 30;
        r.sampling.temperature = 0.9f;
        llm_engine *engine = engine_new(target, &o), *other = engine_new(target, &o);
        record *got = record_new(target);
        record_submit(engine, got, r, false);
        for (int n = 0; n < 8; n++) step(engine);
        void *session = save(engine, got, &size);
        llm_engine_free(engine);
        restore(other, got, false, session, size);
        llm_session_free(session);
        llm_statistics s = llm_engine_statistics(other);
        assert_int_equal(s.blocks_free, s.blocks_total);
        step(other);
        s = llm_engine_statistics(other);
        assert_int_equal(s.prompt_tokens, 0);
        assert_int_equal(s.running, 3);
        assert_int_equal(s.blocks_shared, 10); /* blocks of the prompt */
        record_drain(other);
        assert_int_equal(llm_engine_statistics(other).prompt_tokens, 0);
        record_free(got);
        llm_engine_free(other);
    }
}

/* A pool without free blocks: the cache is recomputed once there is room. */
static void test_full_pool(void **state) {
    (void)state;
    int32_t prompt[MAX_PROMPT], long_prompt[MAX_PROMPT];
    llm_engine_options o = some_options();
    llm_request r = some_request(6, prompt), large = some_request(7, long_prompt);
    size_t size;
    o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 4 * 16; /* 16 blocks */
    large.n_samples = r.n_samples = 1;
    large.logits_hook = NULL;
    record *right = uninterrupted(&o, r), *got = record_new(target), *first = record_new(target);
    llm_engine *engine = engine_new(target, &o), *other = engine_new(target, &o);
    record_submit(engine, got, r, false);
    for (int n = 0; n < 6; n++) step(engine);
    void *session = save(engine, got, &size);
    llm_engine_free(engine);
    record_submit(other, first, large, false);
    for (int n = 0; n < 5; n++) step(other);
    restore(other, got, false, session, size);
    llm_session_free(session);
    record_drain(other);
    assert_same(right, got);
    assert_idle(other);
    llm_engine_free(other);
    record_free(right), record_free(got), record_free(first);
}

/* A preempted request is saved from host memory and not recomputed. */
static void test_swapped(void **state) {
    (void)state;
    int32_t prompts[2][MAX_PROMPT];
    llm_engine_options o = some_options(), ample = some_options();
    record *got[2], *right[2];
    size_t size;
    o.preempt = LLM_PREEMPT_SWAP;
    o.swap_bytes = 1 << 16;
    o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 4 * 20; /* 20 blocks */
    llm_engine *engine = engine_new(target, &o), *other = engine_new(target, &ample);
    for (int i = 0; i < 2; i++) {
        llm_request r = some_request(5 + i, prompts[i]);
        r.n_samples = 1;
        r.max_tokens = 20;
        r.priority = 0;
        right[i] = uninterrupted(&ample, r);
        record_submit(engine, got[i] = record_new(target), r, false);
    }
    while (engine->scheduler.n_preempted == 0) step(engine);
    const llm__sequence *newest = engine->scheduler.sequences[1];
    int cached = newest->n_cached / 4 * 4;
    assert_true(newest->state == LLM_PREEMPTED && newest->n_saved > 4);
    void *session = save(engine, got[1], &size);
    cancel(engine, got[1]);
    restore(other, got[1], false, session, size);
    llm_session_free(session);
    record_drain(engine);
    record_drain(other);
    assert_int_equal(llm_engine_statistics(other).prompt_tokens, cached < 41 ? 41 - cached : 0);
    for (int i = 0; i < 2; i++) {
        assert_same(right[i], got[i]);
        record_free(right[i]), record_free(got[i]);
    }
    llm_engine_free(engine);
    llm_engine_free(other);
}

/* A restored request waits as others do: for free sequences, after the requests that arrived before
 * it. */
static void test_waits(void **state) {
    (void)state;
    int32_t prompt[MAX_PROMPT];
    llm_engine_options o = some_options();
    llm_request r = some_request(2, prompt);
    size_t size;
    o.max_sequences = 2;
    r.n_samples = 2;
    llm_engine *engine = engine_new(target, &o);
    record *a = record_new(target), *right = uninterrupted(&o, r);
    record_submit(engine, a, r, false);
    for (int n = 0; n < 4; n++) step(engine);
    void *session = save(engine, a, &size);
    record *b = record_copy(a);
    restore(engine, b, false, session, size); /* the original request continues */
    assert_int_equal(llm_engine_statistics(engine).waiting, 1);
    step(engine);
    assert_int_equal(llm_engine_statistics(engine).waiting, 1);
    record_drain(engine);
    assert_same(right, a);
    assert_same(right, b);
    llm_session_free(session);
    llm_engine_free(engine);
    record_free(a), record_free(b), record_free(right);
}

/* A session contains no data of other requests, although its last block may hold such data after
 * the request's own tokens. */
static void test_only_its_own(void **state) {
    (void)state;
    void *sessions[2];
    size_t sizes[2];
    for (int k = 0; k < 2; k++) {
        int32_t prompt[MAX_PROMPT];
        llm_engine_options o = some_options();
        o.prefix_cache = false;
        llm_engine *engine = engine_new(target, &o);
        record *got = record_new(target), *before = record_new(target);
        if (k) {
            record_submit(engine, before, some_request(5, prompt), false);
            record_drain(engine);
        }
        record_submit(engine, got, some_request(3, prompt), false);
        for (int n = 0; n < 4; n++) step(engine);
        sessions[k] = save(engine, got, &sizes[k]);
        llm_engine_free(engine);
        record_free(got), record_free(before);
    }
    assert_int_equal(sizes[0], sizes[1]);
    assert_memory_equal(sessions[0], sessions[1], sizes[0]);
    llm_session_free(sessions[0]);
    llm_session_free(sessions[1]);
}

/* ---- Refused sessions ----------------------------------------------------------------------- */

static void refuse(llm_engine *engine, const void *session, size_t size, llm_status status,
                   const char *text) {
    llm_error err;
    uint64_t id = 77;
    memset(&err, 0x55, sizeof err);
    long live = test_live;
    llm_statistics before = llm_engine_statistics(engine);
    assert_false(llm_session_restore(engine, session, size, NULL, &id, &err));
    if (err.status != status || !strstr(err.message, text))
        fail_msg("status %d: %s", (int)err.status, err.message);
    assert_int_equal(id, 77);
    assert_int_equal(test_live, live);
    assert_int_equal(llm_engine_statistics(engine).waiting, before.waiting);
    assert_int_equal(llm_engine_statistics(engine).requests_submitted, before.requests_submitted);
}

/* *so_far (may be NULL): the request's output so far */
static void *some_session(const llm_engine_options *o, int i, size_t *size, record **so_far) {
    int32_t prompt[MAX_PROMPT];
    llm_engine *engine = engine_new(target, o);
    record *got = record_new(target);
    record_submit(engine, got, some_request(i, prompt), false);
    for (int n = 0; n < 7; n++) step(engine);
    void *session = save(engine, got, size);
    if (so_far) *so_far = got;
    else record_free(got);
    llm_engine_free(engine);
    return session;
}

static void test_refused(void **state) {
    (void)state;
    llm_error err;
    size_t size;
    llm_engine_options o = some_options();
    void *session = some_session(&o, 6, &size, NULL);
    const char *other = "another model, draft model, cache_type, block_size or kind of device";
    for (int kind = 0; kind < 5; kind++) {
        llm_engine_options p = o;
        if (kind == 0) p.cache_type = LLM_F32;
        if (kind == 1) p.block_size = 8;
        if (kind == 2) p.draft = draft;
        if (kind == 4) p.context_length = 40; /* shorter than the prompt */
        llm_engine *engine = engine_new(kind == 3 ? draft : target, &p);
        refuse(engine, session, size, kind == 4 ? LLM_ERROR_CAPACITY : LLM_ERROR_UNSUPPORTED,
               kind == 4 ? "the prompt has 41 tokens" : other);
        llm_engine_free(engine);
    }
    llm_engine *engine = engine_new(target, &o);
    refuse(engine, NULL, size, LLM_ERROR_ARGUMENT, "NULL");
    refuse(engine, "llm 1", 5, LLM_ERROR_FORMAT, "not a session");
    refuse(engine, session, 0, LLM_ERROR_FORMAT, "not a session");
    assert_false(llm_session_restore(NULL, session, size, NULL, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_false(llm_session_restore(engine, session, size - 1, NULL, NULL, NULL));
    assert_null(llm_session_save(engine, 1, &size, &err)); /* no such request */
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_null(llm_session_save(engine, 1, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    llm_session_free(NULL);
    llm_engine_free(engine);
    llm_session_free(session);
}

/* A model of the same shape but with other weights is another model. */
static void test_other_weights(void **state) {
    (void)state;
    llm_error err;
    llm_engine_options o = some_options();
    size_t size;
    bytes file = slurp(TARGET);
    const llm_tensor *norm = llm_file_find_tensor(llm_model_file(target), "blk.1.ffn_norm.weight");
    assert_non_null(norm);
    uint8_t *at = file.data;
    while (memcmp(at, norm->data, 64)) at++;
    at[1] ^= 1;
    llm_model *model = llm_model_from_memory(file.data, file.length, "almost the same", &err);
    if (!model) fail_msg("%s", err.message);
    void *session = some_session(&o, 6, &size, NULL);
    llm_engine *engine = engine_new(model, &o);
    refuse(engine, session, size, LLM_ERROR_UNSUPPORTED, "another model");
    llm_engine_free(engine);
    llm_model_free(model);
    llm_session_free(session);
    clear_bytes(&file);
}

/* ---- Damage --------------------------------------------------------------------------------- */

/* A session that is cut short or has a damaged byte is refused. */
static void test_damaged(void **state) {
    (void)state;
    size_t size;
    llm_engine_options o = some_options();
    char *session = (char *)some_session(&o, 4, &size, NULL);
    llm_engine *engine = engine_new(target, &o);
    char *exact = (char *)malloc(size);
    assert_non_null(exact);
    for (size_t n = 0; n < size; n += n < 300 ? 1 : 1 + size / 200) {
        char *shorter = (char *)malloc(n ? n : 1); /* a sanitizer detects reads past n */
        memcpy(shorter, session, n);
        refuse(engine, shorter, n, LLM_ERROR_FORMAT, "damaged");
        free(shorter);
        memcpy(exact, session, size);
        exact[n] ^= (char)(1 << n % 8);
        refuse(engine, exact, size, n / 8 == 1 ? LLM_ERROR_UNSUPPORTED : LLM_ERROR_FORMAT,
               "session");
    }
    free(exact);
    llm_session_free(session);
    llm_engine_free(engine);
}

/* Damaged sessions with a correct checksum: the engine either refuses them or runs a request that
 * ends. The invariants are checked after each step. */
static void test_forged(void **state) {
    (void)state;
    size_t size;
    llm_engine_options o = some_options();
    o.max_batch_tokens = 64;
    llm_engine *engine = engine_new(target, &o);
    int n_restored = 0, n_refused = 0;
    for (int round = 0; round < repeats(4000, 600); round++) {
        static char *session;
        test_random random = {1 + (uint64_t)round};
        if (round % 200 == 0) {
            llm_session_free(session);
            session = (char *)some_session(&o, round / 200 % N_REQUESTS, &size, NULL);
        }
        size_t n = size;
        char *forged = (char *)malloc(size + 16);
        assert_non_null(forged);
        memset(forged, 0, size + 16);
        memcpy(forged, session, size);
        for (int k = 1 + random_below(&random, 3); k > 0; k--) { /* mostly near the beginning */
            int32_t number = (int32_t)random_u64(&random);
            size_t at = sizeof(llm__session_head) +
                        (size_t)random_below(&random, k % 2 ? 400 : (int)size) / 4 * 4;
            if (random_below(&random, 3)) number = (int32_t)random_below(&random, 60) - 10;
            if (at + 4 <= size) memcpy(forged + at, &number, 4);
        }
        if (random_below(&random, 4) == 0) n = size - (size_t)random_below(&random, (int)size - 32);
        if (random_below(&random, 8) == 0) n = size + 8;
        llm__session_head head = llm__head_of(&engine->scheduler, forged, n);
        memcpy(forged, &head, sizeof head);
        llm_error err;
        char *exact = (char *)malloc(n);
        memcpy(exact, forged, n);
        long live = test_live;
        if (llm_session_restore(engine, exact, n, NULL, NULL, &err)) {
            llm_event event;
            int more = 1;
            for (int steps = 0; steps < 300 && more; steps++) {
                if ((more = llm_step(engine, &err)) < 0) fail_msg("%s", err.message);
                while (llm_next_event(engine, &event)) {}
            }
            assert_int_equal(more, 0);
            n_restored++;
        } else {
            assert_true(err.status != LLM_OK && err.status != LLM_ERROR_MEMORY);
            assert_true(test_live <= live + 1); /* the list of events may have grown */
            n_refused++;
        }
        assert_idle(engine);
        free(exact);
        free(forged);
        if (round + 1 == repeats(4000, 600)) llm_session_free(session);
    }
    print_message("%d forged sessions refused, %d restored\n", n_refused, n_restored);
    assert_true(n_refused > 100 && n_restored > 50);
    llm_engine_free(engine);
}

/* A session whose only sample has ended is refused, since its request would never end. So is one
 * with data after the blocks. */
static void test_ended(void **state) {
    (void)state;
    size_t size;
    llm_engine_options o = some_options();
    o.block_size = 64; /* so that the session has no blocks */
    char *session = (char *)some_session(&o, 0, &size, NULL);
    llm_engine *engine = engine_new(target, &o);
    int finish, length = LLM_FINISH_LENGTH;
    size_t at = sizeof(llm__session_head) + sizeof(llm_sampling) + (9 + 5) * sizeof(int);
    memcpy(&finish, session + at, sizeof finish);
    assert_int_equal(finish, LLM_FINISH_NONE);
    memcpy(session + at, &length, sizeof length);
    llm__session_head head = llm__head_of(&engine->scheduler, session, size);
    memcpy(session, &head, sizeof head);
    int32_t prompt[MAX_PROMPT];
    record *other = record_new(target); /* grows the list of events once for all */
    record_submit(engine, other, some_request(0, prompt), false);
    record_drain(engine);
    record_free(other);
    refuse(engine, session, size, LLM_ERROR_FORMAT, "damaged");
    memcpy(session + at, &finish, sizeof finish); /* makes it valid again, but longer */
    char *longer = (char *)calloc(1, size + 4);
    assert_non_null(longer);
    memcpy(longer, session, size);
    head = llm__head_of(&engine->scheduler, longer, size + 4);
    memcpy(longer, &head, sizeof head);
    refuse(engine, longer, size + 4, LLM_ERROR_FORMAT, "damaged");
    free(longer);
    llm_session_free(session);
    llm_engine_free(engine);
}

/* Only the session's own request uses a forged cache; the prefix cache does not contain it. */
static void test_not_for_others(void **state) {
    (void)state;
    size_t size;
    int32_t prompt[MAX_PROMPT];
    llm_engine_options o = some_options();
    llm_request r = some_request(6, prompt);
    record *right = uninterrupted(&o, r), *got, *other = record_new(target);
    char *session = (char *)some_session(&o, 6, &size, &got);
    llm_engine *engine = engine_new(target, &o);
    for (size_t i = size - 4000; i + 2 <= size; i += 2) { /* small numbers in the last blocks */
        uint16_t half = (uint16_t)(0x2c00 + i % 512);
        memcpy(session + i, &half, 2);
    }
    llm__session_head head = llm__head_of(&engine->scheduler, session, size);
    memcpy(session, &head, sizeof head);
    restore(engine, got, false, session, size);
    step(engine);
    record_submit(engine, other, r, false);
    record_drain(engine);
    assert_same(right, other);
    record *again = record_new(target);
    record_submit(engine, again, r, false); /* after the forged request has ended */
    record_drain(engine);
    assert_same(right, again);
    llm_session_free(session);
    llm_engine_free(engine);
    record_free(right), record_free(got), record_free(other), record_free(again);
}

/* ---- Failures ------------------------------------------------------------------------------- */

static void test_failing_allocations(void **state) {
    (void)state;
    int32_t prompt[MAX_PROMPT];
    llm_error err;
    llm_engine_options o = some_options();
    llm_request r = some_request(5, prompt);
    record *right = uninterrupted(&o, r), *got = record_new(target);
    llm_engine *engine = engine_new(target, &o), *other = engine_new(target, &o);
    record_submit(engine, got, r, false);
    for (int n = 0; n < 6; n++) step(engine);
    size_t size;
    void *session = NULL;
    for (long k = 0; !session; k++) {
        long live = test_live;
        test_failed = false;
        test_fail_in = k;
        session = llm_session_save(engine, got->id, &size, &err);
        test_fail_in = -1;
        assert_int_equal(err.status, session ? LLM_OK : LLM_ERROR_MEMORY);
        assert_int_equal(session == NULL, test_failed);
        assert_int_equal(test_live, live + (session != NULL));
    }
    cancel(engine, got);
    bool ok = false;
    llm_request callbacks = llm_request_defaults();
    callbacks.user = got;
    for (long k = 0; !ok; k++) {
        long live = test_live;
        test_failed = false;
        test_fail_in = k;
        ok = llm_session_restore(other, session, size, &callbacks, &got->id, &err);
        test_fail_in = -1;
        assert_int_equal(err.status, ok ? LLM_OK : LLM_ERROR_MEMORY);
        assert_int_equal(ok, !test_failed);
        if (!ok) assert_true(test_live <= live + 1); /* the list of events may have grown */
        if (ok) assert_true(k >= 3);
    }
    llm_session_free(session);
    long allocations = test_allocations;
    record_drain(other);
    assert_int_equal(test_allocations, allocations); /* steps allocate nothing */
    assert_same(right, got);
    llm_engine_free(engine);
    llm_engine_free(other);
    record_free(right), record_free(got);
}

/* Each call of the device fails once: during save, during restore, or in a step between them. */
static void test_failing_device(void **state) {
    (void)state;
    llm_error err;
    int32_t prompt[MAX_PROMPT];
    llm_request r = some_request(2, prompt);
    llm_engine_options o = some_options();
    record *right = uninterrupted(&o, r);
    real = llm_cpu_backend(1, LLM_ISA_BEST, &err);
    assert_non_null(real);
    llm_backend device_that_fails = failing_backend();
    o.backend = &device_that_fails;
    long n = 1;
    for (long run = -2; run < 2 * n; run++) {
        long k = (run - (run < 0)) / 2; /* restored in the same or in another engine */
        fail_call = -1;
        llm_engine *engine = engine_new(target, &o);
        llm_engine *other = run % 2 ? engine : engine_new(target, &o);
        record *got = record_new(target);
        record_submit(engine, got, r, false);
        calls = 0;
        fail_call = k;
        for (int i = 0, more = 1; i < 4 && more > 0; i++) { /* copies may be pending */
            more = llm_step(engine, &err);
            record_events(engine);
        }
        size_t size;
        void *session = llm_session_save(engine, got->id, &size, &err);
        if (!session) {
            assert_int_equal(err.status, LLM_ERROR_DEVICE);
            session = save(engine, got, &size);
        }
        cancel(engine, got);
        llm_request callbacks = llm_request_defaults();
        callbacks.user = got;
        if (!llm_session_restore(other, session, size, &callbacks, &got->id, &err)) {
            assert_int_equal(err.status, LLM_ERROR_DEVICE);
            restore(other, got, false, session, size);
        }
        llm_session_free(session);
        for (int more = 1, n_failed = 0; more; record_events(other)) {
            more = llm_step(other, &err);
            if (more < 0) assert_int_equal(++n_failed, 1);
        }
        assert_same(right, got);
        assert_idle(engine);
        assert_idle(other);
        record_free(got);
        if (other != engine) llm_engine_free(other);
        llm_engine_free(engine);
        if (k < 0) n = calls;
    }
    print_message("%ld calls of the device, each failed once\n", n);
    assert_true(n > 50);
    record_free(right);
    llm_backend_free(real);
}

int main(void) {
#ifdef __GLIBC__ /* engines are often created and freed: keeping freed memory is faster */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_engine),     cmocka_unit_test(test_other_engine),
        cmocka_unit_test(test_speculation),     cmocka_unit_test(test_company),
        cmocka_unit_test(test_no_second_prefill), cmocka_unit_test(test_full_pool),
        cmocka_unit_test(test_waits),           cmocka_unit_test(test_only_its_own),
        cmocka_unit_test(test_refused),         cmocka_unit_test(test_other_weights),
        cmocka_unit_test(test_damaged),         cmocka_unit_test(test_forged),
        cmocka_unit_test(test_ended),           cmocka_unit_test(test_not_for_others),
        cmocka_unit_test(test_failing_allocations), cmocka_unit_test(test_failing_device),
        cmocka_unit_test(test_swapped),
    };
    return cmocka_run_group_tests_name("sessions", tests, load_models, free_models);
}
