/* Chapters 1 and 4 through the public API. Requests that share an engine, in any order and with
 * blocks so scarce that they are preempted, each give the same output as alone, bit for bit.
 * Further tests check the scheduler's order, pace, memory and waste. */
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
#include "tiny_model.h"

enum { VOCAB = 288, MAX_REQUESTS = 24, MAX_PROMPT = 70, RANDOM_CONTEXT = 96 };

static uint64_t submit(llm_engine *engine, llm_request request) {
    llm_error err;
    uint64_t id = 0;
    if (!llm_submit(engine, &request, &id, &err)) fail_msg("%s", err.message);
    return id;
}

static int step(llm_engine *engine) {
    llm_error err;
    static int idle; /* consecutive steps without a forward pass */
    uint64_t before = llm_engine_statistics(engine).steps;
    int more = llm_step(engine, &err);
    if (more < 0) fail_msg("%s", err.message);
    idle = !more || llm_engine_statistics(engine).steps > before ? 0 : idle + 1;
    if (idle > 1000) fail_msg("1000 steps in a row ran no forward pass");
    return more;
}

static void drain(llm_engine *engine) {
    while (step(engine)) {}
}

/* Fill `out` with n ids that depend on `seed` alone. */
static const int32_t *ids(int32_t *out, int n, uint64_t seed) {
    for (int i = 0; i < n; i++) out[i] = (int32_t)(llm_random(seed, 5, (uint64_t)i) * 280);
    return out;
}

static llm_request plain_request(const int32_t *prompt, int n_prompt, int max_tokens) {
    llm_request r = llm_request_defaults();
    r.prompt = prompt;
    r.n_prompt = n_prompt;
    r.max_tokens = max_tokens;
    r.ignore_end = true;
    return r;
}

/* ---- Random workloads ------------------------------------------------------------------- */

typedef struct tracked_request {
    int32_t prompt[MAX_PROMPT];
    const char *stops[2];
    llm_request request;
    record *got;
    bool cancelled;
} tracked_request;

typedef struct workload {
    test_random random;
    llm_engine_options options;
    tracked_request requests[MAX_REQUESTS];
    int n_requests;
} workload;

typedef struct totals {
    long samples, cancelled, preemptions, swapped, prefix_hits, proposed, accepted, stopped, shared;
} totals;

static int pick(workload *w, int n) { return random_below(&w->random, n); }
static bool chance(workload *w, int percent) { return pick(w, 100) < percent; }

static void random_options(workload *w) {
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.context_length = RANDOM_CONTEXT;
    o.draft = chance(w, 50) ? draft : NULL;
    o.cache_type = chance(w, 70) ? LLM_F16 : LLM_F32;
    o.block_size = 1 + pick(w, 20);
    o.max_sequences = 4 + pick(w, 8);
    o.max_speculation = 8;
    o.chunked_prefill = chance(w, 80);
    o.max_batch_tokens = o.chunked_prefill ? 9 + pick(w, 60) : RANDOM_CONTEXT + pick(w, 60);
    o.preempt = (llm_preempt)pick(w, 2);
    o.swap_bytes = chance(w, 50) ? 1 << 20 : 20000; /* 20000 bytes run out */
    o.prefix_cache = chance(w, 75);
    o.naive_attention = chance(w, 10);
    /* at least one context, so that every request fits; often less than two, so that requests
     * preempt each other */
    int slots = RANDOM_CONTEXT + o.block_size + (chance(w, 60) ? pick(w, 100) : 100 + pick(w, 400));
    o.cache_bytes = llm_model_cache_bytes_per_token(target, o.cache_type) * (uint64_t)slots;
    w->options = o;
}

static void random_stops(workload *w, tracked_request *j) {
    static const char *const texts[] = {"a", "\x01", "th", "%", "Z9", "e", "0"};
    j->request.n_stop = 1 + pick(w, 2);
    for (int i = 0; i < 2; i++) j->stops[i] = texts[pick(w, 7)];
    j->request.stop = j->stops;
}

static llm_sampling random_sampling(workload *w) {
    llm_sampling s = llm_sampling_defaults();
    s.seed = (uint64_t)pick(w, 1000);
    if (chance(w, 65)) s.temperature = 0.5f + (float)pick(w, 10) / 10;
    if (chance(w, 50)) s.top_k = pick(w, 40);
    if (chance(w, 50)) s.top_p = 0.8f;
    if (chance(w, 30)) s.min_p = 0.02f;
    if (chance(w, 30)) s.repetition_penalty = 1.2f;
    if (chance(w, 30)) s.penalty_window = pick(w, 20);
    return s;
}

/* The prompt usually begins with the first `common` tokens of `base`. */
static void random_request(workload *w, tracked_request *j, const int32_t *base, int common) {
    int n = 1 + pick(w, MAX_PROMPT);
    bool begins_alike = chance(w, 70);
    for (int i = 0; i < n; i++)
        j->prompt[i] = begins_alike && i < common && !chance(w, 1) ? base[i] : pick(w, 286);
    llm_request *r = &j->request;
    *r = plain_request(j->prompt, n, chance(w, 8) ? 0 : 1 + pick(w, 30));
    r->ignore_end = chance(w, 50);
    r->n_samples = chance(w, 65) ? 1 : 1 + pick(w, 4);
    r->priority = pick(w, 3) - 1;
    r->sampling = random_sampling(w);
    if (chance(w, 30)) random_stops(w, j);
    int depth = chance(w, 35) ? 0 : chance(w, 25) ? LLM_SPECULATE_AUTO : 1 + pick(w, 8);
    bool hook = depth == 0 && chance(w, 50);
    r->speculate = depth;
    r->branches = depth ? pick(w, 5) : 0;
    r->lookup = depth && (!w->options.draft || chance(w, 40));
    r->logits_hook = hook ? record_hook : NULL;
}

static void random_workload(workload *w, uint64_t seed) {
    int32_t base[MAX_PROMPT];
    memset(w, 0, sizeof *w);
    w->random.state = llm__mix(seed);
    random_options(w);
    for (int i = 0; i < MAX_PROMPT; i++) base[i] = pick(w, 286);
    int common = pick(w, MAX_PROMPT);
    w->n_requests = 1 + pick(w, MAX_REQUESTS);
    for (int i = 0; i < w->n_requests; i++) random_request(w, &w->requests[i], base, common);
}

static int live_samples(const tracked_request *j) {
    int n = 0;
    for (int s = 0; s < j->request.n_samples; s++) n += !j->got->samples[s].n_ends;
    return n;
}

static void cancel(llm_engine *engine, tracked_request *j) {
    llm_error err;
    int live = live_samples(j);
    bool ok = llm_cancel(engine, j->got->id, &err);
    assert_int_equal(ok, live > 0);
    record_events(engine);
    assert_int_equal(live_samples(j), 0);
    j->cancelled = j->cancelled || ok;
}

/* Check the invariants after each step. */
static void check_running(const workload *w, const llm_engine *engine) {
    llm_statistics s = llm_engine_statistics(engine);
    assert_in_range(s.blocks_free, 0, s.blocks_total);
    assert_true(s.slots_used <= (s.blocks_total - s.blocks_free) * s.block_size);
    assert_true(s.blocks_peak >= s.blocks_total - s.blocks_free);
    assert_true(s.running <= w->options.max_sequences);
    assert_true(s.kv_waste >= 0 && s.kv_waste <= 1);
}

/* No two tokens of a step may have the same slot. */
static void check_slots(const llm_engine *engine) {
    const llm__scheduler *s = &engine->scheduler;
    assert_true(s->batch.n_tokens <= s->options->max_batch_tokens);
    for (int a = 0; a < s->batch.n_tokens; a++)
        for (int b = 0; b < a; b++) assert_int_not_equal(s->slots[a], s->slots[b]);
}

/* Run all requests on one engine. They arrive and are cancelled at random moments. */
static void run_together(workload *w, llm_engine *engine) {
    int submitted = 0, more = 1;
    for (int n = 0; more || submitted < w->n_requests; n++) {
        while (submitted < w->n_requests && (n == 0 || chance(w, 30))) {
            tracked_request *j = &w->requests[submitted++];
            j->got = record_new(target);
            record_submit(engine, j->got, j->request, j->request.logits_hook != NULL);
        }
        more = step(engine);
        record_events(engine);
        if (submitted && chance(w, 2)) cancel(engine, &w->requests[pick(w, submitted)]);
        check_running(w, engine);
        if (more) check_slots(engine);
        assert_true(n < 100000); /* otherwise the engine makes no progress */
    }
}

/* All blocks are free again, and the engine's counters agree with the events. */
static void check_end(const workload *w, const llm_engine *engine, totals *t) {
    llm_statistics s = llm_engine_statistics(engine);
    uint64_t reported = 0, prompts = 0, at = 0;
    assert_idle(engine);
    assert_int_equal(engine->scheduler.n_swap_free, engine->scheduler.n_swap);
    assert_int_equal(engine->scheduler.n_places, 0);
    assert_int_equal(engine->scheduler.n_preempted, 0);
    assert_int_equal(s.requests_submitted, w->n_requests);
    for (int i = 0; i < w->n_requests; i++) {
        const tracked_request *j = &w->requests[i];
        prompts += (uint64_t)j->request.n_prompt;
        for (int k = 0; k < j->request.n_samples; k++) {
            reported += (uint64_t)j->got->samples[k].n_tokens;
            assert_int_equal(j->got->samples[k].n_ends, 1);
            t->stopped += j->got->samples[k].finish == LLM_FINISH_STOP;
        }
    }
    assert_int_equal(s.generated_tokens, reported);
    assert_true(s.prefix_tokens <= prompts && s.prefix_hits <= s.prefix_tokens);
    assert_true(w->options.prefix_cache || s.prefix_hits == 0);
    assert_true(s.accepted <= s.proposed);
    for (int i = 0; i < 16; i++) {
        at += s.proposed_at[i];
        assert_true(s.accepted_at[i] <= s.proposed_at[i]);
        /* a proposal is checked only if all before it were accepted */
        if (i > 0) assert_true(s.proposed_at[i] <= s.accepted_at[i - 1]);
    }
    assert_int_equal(at, s.proposed);
    assert_true(w->options.preempt == LLM_PREEMPT_SWAP || s.blocks_swapped == 0);
    t->preemptions += (long)s.preemptions;
    t->swapped += (long)s.blocks_swapped;
    t->prefix_hits += (long)s.prefix_hits;
    t->proposed += (long)s.proposed;
    t->accepted += (long)s.accepted;
}

static void check_alone(const workload *w, const tracked_request *j, totals *t) {
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.context_length = RANDOM_CONTEXT;
    o.draft = w->options.draft;
    o.cache_type = w->options.cache_type;
    o.naive_attention = w->options.naive_attention;
    o.prefix_cache = false;
    o.max_sequences = 4;
    o.max_batch_tokens = 64;
    llm_engine *engine = engine_new(target, &o);
    record *alone = record_new(target);
    record_submit(engine, alone, j->request, j->request.logits_hook != NULL);
    record_drain(engine);
    llm_engine_free(engine);
    for (int s = 0; s < j->request.n_samples; s++) {
        t->samples++;
        if (j->got->samples[s].finish == LLM_FINISH_CANCELLED) {
            t->cancelled++;
            assert_true(j->cancelled);
            assert_sample_prefix(&j->got->samples[s], &alone->samples[s], VOCAB);
        } else {
            assert_same_sample(&alone->samples[s], &j->got->samples[s], VOCAB);
        }
    }
    record_free(alone);
}

static void test_random_workloads(void **state) {
    (void)state;
    workload *w = (workload *)malloc(sizeof *w);
    totals t;
    assert_non_null(w);
    memset(&t, 0, sizeof t);
    for (uint64_t seed = 1; seed <= 60; seed++) {
        random_workload(w, seed);
        llm_engine *engine = engine_new(target, &w->options);
        run_together(w, engine);
        check_end(w, engine, &t);
        llm_engine_free(engine);
        for (int i = 0; i < w->n_requests; i++) {
            check_alone(w, &w->requests[i], &t);
            record_free(w->requests[i].got);
        }
    }
    free(w);
    print_message("%ld samples, %ld cancelled, %ld stopped; %ld preemptions, %ld blocks swapped, "
                  "%ld prefix hits; %ld of %ld accepted\n",
                  t.samples, t.cancelled, t.stopped, t.preemptions, t.swapped, t.prefix_hits,
                  t.accepted, t.proposed);
    /* the workloads must cover what they are meant to test */
    assert_true(t.cancelled > 10 && t.stopped > 10 && t.preemptions > 100 && t.swapped > 100 &&
                t.prefix_hits > 100 && t.accepted > 50);
}

/* ---- Admission -------------------------------------------------------------------------- */

/* Blocks of a shared prefix cost a new request nothing while another request uses them. If only the
 * prefix cache holds them, they count as free blocks that the request takes. */
static void test_admission_with_a_prefix(void **state) {
    int32_t prompt[40], other[40];
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        llm_engine_options o = llm_engine_defaults();
        o.n_threads = 1;
        o.block_size = 4;
        o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 48; /* 12 blocks */
        llm_engine *engine = engine_new(target, &o);
        ids(prompt, 40, 1);
        ids(other, 40, 2);
        submit(engine, plain_request(prompt, 16, shared ? 20 : 1));
        /* shared: 5 blocks are in use; else: none, and the prefix cache holds 4 */
        for (int i = 0; i < 2; i++) step(engine);
        submit(engine, plain_request(prompt, 17, 2)); /* 1 block; else 4 kept ones and 1 more */
        /* shared: needs 6 blocks, 6 are left; else: needs 8, 7 are left */
        submit(engine, plain_request(other, shared ? 20 : 28, 1));
        step(engine);
        assert_int_equal(llm_engine_statistics(engine).waiting, shared ? 0 : 1);
        assert_int_equal(llm_engine_statistics(engine).prefix_hits, 16);
        drain(engine);
        assert_idle(engine);
        llm_engine_free(engine);
    }
}

/* A request is admitted with all its samples at once, or waits. */
static void test_admission_counts_samples(void **state) {
    int32_t prompt[4];
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.max_sequences = 4;
    llm_engine *engine = engine_new(target, &o);
    llm_request r = plain_request(ids(prompt, 4, 1), 4, 3);
    static const int samples[] = {3, 2, 1}, finished[] = {0, 0, 1, 1, 1, 3};
    for (int i = 0; i < 3; i++) {
        r.n_samples = samples[i];
        submit(engine, r);
    }
    for (int i = 0; i < 6; i++) {
        step(engine);
        llm_statistics s = llm_engine_statistics(engine);
        assert_int_equal(s.requests_finished, finished[i]);
        /* the last request would fit, but must not overtake the second */
        assert_int_equal(s.waiting, i < 3 ? 2 : 0);
    }
    assert_idle(engine);
    llm_engine_free(engine);
}

/* ---- Pace ------------------------------------------------------------------------------- */

/* With more sequences than tokens in a step, all sequences get the same share. */
static void test_tokens_are_shared_evenly(void **state) {
    enum { N = 5 };
    int32_t prompt[4];
    int tokens[N] = {0};
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.max_batch_tokens = 2;
    llm_engine *engine = engine_new(target, &o);
    llm_request r = plain_request(ids(prompt, 2, 1), 2, 60);
    r.n_samples = N;
    submit(engine, r);
    for (int n = 0; n < 100; n++) {
        llm_event event;
        int least = 60, most = 0;
        step(engine);
        while (llm_next_event(engine, &event)) tokens[event.sample]++;
        for (int i = 0; i < N; i++) {
            least = tokens[i] < least ? tokens[i] : least;
            most = tokens[i] > most ? tokens[i] : most;
        }
        assert_true(most - least <= 2);
    }
    drain(engine);
    assert_idle(engine);
    llm_engine_free(engine);
}

/* With scarce blocks, the sequences that get a token in a step are older than the others. */
static void test_older_goes_first(void **state) {
    enum { N = 6 };
    int32_t prompt[8];
    bool ended[N + 1] = {false};
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.block_size = 2;
    o.prefix_cache = false;
    o.preempt = LLM_PREEMPT_SWAP;
    o.swap_bytes = 1 << 20;
    o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 60;
    llm_engine *engine = engine_new(target, &o);
    for (int i = 0; i < N; i++) {
        ids(prompt, 8, (uint64_t)i);
        submit(engine, plain_request(prompt, 3 + i, 50 - 7 * i));
    }
    while (step(engine)) {
        bool got[N + 1] = {false}, gap = false;
        llm_event event;
        while (llm_next_event(engine, &event)) {
            got[event.request] = true;
            if (event.finish) ended[event.request] = true;
        }
        for (int i = 1; i <= N; i++) {
            if (gap) assert_false(got[i]);
            gap = gap || !(got[i] || ended[i]);
        }
    }
    assert_true(llm_engine_statistics(engine).preemptions > 3);
    assert_idle(engine);
    llm_engine_free(engine);
}

/* ---- Order --------------------------------------------------------------------------------- */

/* Requests that run one at a time start in the order of id - 64 x priority. */
static void test_priority_order(void **state) {
    enum { N = 40 };
    static const int priorities[] = {0, 1, 0, -1, 0, 2, 0, 0, 1, -1};
    (void)state;
    int32_t prompt[4];
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.max_sequences = 1;
    llm_engine *engine = engine_new(target, &o);
    int64_t rank[N + 1] = {0}, last = INT64_MIN;
    for (int i = 0; i < N; i++) {
        llm_request r = plain_request(ids(prompt, 4, (uint64_t)i), 4, 2);
        r.priority = priorities[i % 10];
        uint64_t id = submit(engine, r);
        rank[id] = (int64_t)id - 64 * r.priority;
    }
    int ended = 0;
    while (step(engine)) {
        llm_event event;
        while (llm_next_event(engine, &event)) {
            if (event.index == 0) assert_true(rank[event.request] > last);
            last = rank[event.request];
            ended += event.finish != 0;
        }
    }
    assert_int_equal(ended, N);
    assert_idle(engine);
    llm_engine_free(engine);
}

/* Requests of higher priority keep arriving. They overtake a low-priority request only a limited
 * number of times. */
static void test_priority_does_not_starve(void **state) {
    (void)state;
    for (int priority = 1; priority <= 2; priority++) {
        int32_t prompt[4];
        llm_engine_options o = llm_engine_defaults();
        o.n_threads = 1;
        o.max_sequences = 1;
        llm_engine *engine = engine_new(target, &o);
        uint64_t low = submit(engine, plain_request(ids(prompt, 4, 1), 4, 1));
        int before = 0;
        bool done = false;
        while (!done) {
            for (int i = 0; i < 2; i++) { /* more requests than a step can finish */
                llm_request r = plain_request(ids(prompt, 4, 2), 4, 1);
                r.priority = priority;
                submit(engine, r);
            }
            step(engine);
            llm_event event;
            while (llm_next_event(engine, &event)) {
                before += event.request != low;
                done = done || event.request == low;
            }
            assert_true(before < 1000);
        }
        assert_int_equal(before, 64 * priority);
        llm_engine_free(engine);
    }
}

/* Without chunked prefill, a prompt needs a step with room for all of it. Decoding sequences must
 * not delay it forever. */
static void test_whole_prompts_do_not_starve(void **state) {
    int32_t prompt[100];
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.chunked_prefill = false;
    o.max_batch_tokens = 64;
    o.max_sequences = 6;
    llm_engine *engine = engine_new(target, &o);
    ids(prompt, 100, 3);
    for (int i = 0; i < 5; i++) submit(engine, plain_request(prompt + i, 3, 5 + i));
    step(engine);
    uint64_t whole = submit(engine, plain_request(prompt, 63, 1));
    bool reported = false;
    for (int n = 0; n < 200 && !reported; n++) {
        /* keep some sequences decoding */
        submit(engine, plain_request(prompt + n % 90, 3, 5 + n % 4));
        step(engine);
        llm_event event;
        while (llm_next_event(engine, &event)) reported = reported || event.request == whole;
    }
    assert_true(reported);
    llm_engine_free(engine);
}

/* Samples share their prompt's blocks: four samples fit where four separate requests would not. */
static void test_samples_fit_together(void **state) {
    int32_t prompt[40];
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.block_size = 4;
    o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 60; /* 15 blocks */
    llm_engine *engine = engine_new(target, &o);
    llm_request r = plain_request(ids(prompt, 40, 1), 40, 20);
    r.n_samples = 4; /* 60 blocks if they shared none */
    r.sampling.temperature = 1;
    submit(engine, r);
    int n_ended = 0;
    while (step(engine)) {
        llm_event event;
        while (llm_next_event(engine, &event)) n_ended += event.finish != 0;
    }
    llm_statistics s = llm_engine_statistics(engine);
    assert_int_equal(n_ended, 4);
    assert_true(s.preemptions > 0);
    assert_int_equal(s.blocks_peak, 15);
    /* all samples choose their first token from one row of logits */
    assert_int_equal(s.decode_steps, s.generated_tokens);
    assert_idle(engine);
    llm_engine_free(engine);
}

/* A long prompt arrives while others decode: each decoding sequence still gets a token in every
 * step. */
static void test_decoding_keeps_its_pace(void **state) {
    enum { N = 4 };
    int32_t prompt[100];
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.max_batch_tokens = 12;
    llm_engine *engine = engine_new(target, &o);
    for (int i = 0; i < N; i++) submit(engine, plain_request(ids(prompt, 2, (uint64_t)i), 2, 40));
    step(engine);
    uint64_t slow = submit(engine, plain_request(ids(prompt, 100, 9), 100, 5));
    bool started = false;
    int steps = 0;
    for (; !started; steps++) {
        int tokens = 0;
        llm_event event;
        step(engine);
        while (llm_next_event(engine, &event)) {
            started = started || event.request == slow;
            tokens += event.request != slow;
        }
        assert_int_equal(tokens, N);
    }
    /* the prompt gets the rest of the token budget */
    assert_int_equal(steps, (100 + 7) / (12 - N));
    drain(engine);
    assert_idle(engine);
    llm_engine_free(engine);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static void mixed_requests(llm_engine *engine, bool speculate) {
    static const char *const stops[] = {"qq", "zz"};
    int32_t prompt[60];
    for (int i = 0; i < 12; i++) {
        llm_request r = plain_request(ids(prompt, 60, (uint64_t)(i % 3)), 10 + 4 * i, 25);
        r.n_samples = 1 + i % 3;
        r.sampling.temperature = i % 2 ? 0.8f : 0;
        r.sampling.top_p = 0.9f;
        r.stop = stops;
        r.n_stop = i % 3;
        r.speculate = speculate ? i % 5 - 1 : 0;
        r.branches = i % 4;
        r.lookup = i % 4 == 0;
        submit(engine, r);
    }
}

/* Steps allocate nothing, from the first on, neither in the engine nor in the backend. */
static void test_steps_allocate_nothing(void **state) {
    (void)state;
    for (int mode = 0; mode < 8; mode++) {
        llm_engine_options o = llm_engine_defaults();
        o.n_threads = 1 + mode % 2;
        o.max_sequences = 8;
        o.max_batch_tokens = 40;
        o.draft = mode & 2 ? draft : NULL;
        o.preempt = mode & 4 ? LLM_PREEMPT_SWAP : LLM_PREEMPT_RECOMPUTE;
        o.swap_bytes = 1 << 20;
        o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 256;
        llm_engine *engine = engine_new(target, &o);
        for (int round = 0; round < 2; round++) {
            mixed_requests(engine, o.draft != NULL);
            long before = test_allocations;
            drain(engine);
            assert_int_equal(test_allocations, before);
        }
        llm_statistics s = llm_engine_statistics(engine);
        assert_true(s.preemptions > 0);
        assert_true(s.schedule_seconds > 0 && s.schedule_seconds < s.step_seconds);
        assert_true(s.forward_seconds > 0 && s.sampling_seconds > 0);
        assert_int_equal(s.draft_seconds > 0, 1); /* small without a draft model */
        double parts =
            s.schedule_seconds + s.forward_seconds + s.draft_seconds + s.sampling_seconds;
        assert_true(parts <= s.step_seconds * 1.0001);
        assert_idle(engine);
        llm_engine_free(engine);
    }
}

/* With blocks of one token, no used block is empty: the blocks of rejected proposals are released
 * after each step. */
static void test_rejected_blocks_are_released(void **state) {
    int32_t prompt[8];
    (void)state;
    for (int lookup = 0; lookup < 2; lookup++) {
        llm_engine_options o = llm_engine_defaults();
        o.n_threads = 1;
        o.block_size = 1;
        o.draft = draft;
        llm_engine *engine = engine_new(target, &o);
        for (int i = 0; i < 4; i++) {
            llm_request r = plain_request(ids(prompt, 8, (uint64_t)i), 8, 30);
            r.speculate = 3 + i;
            r.branches = i;
            r.lookup = lookup;
            submit(engine, r);
        }
        while (step(engine)) {
            llm_statistics s = llm_engine_statistics(engine);
            assert_int_equal(s.blocks_total - s.blocks_free, s.slots_used);
        }
        llm_statistics s = llm_engine_statistics(engine);
        assert_true(s.proposed > s.accepted);
        assert_idle(engine);
        llm_engine_free(engine);
    }
}

/* Sequences of mean length 200 in blocks of 16: on average, half a block of each is empty. */
static void test_cache_waste(void **state) {
    tiny t = tiny_defaults();
    tiny_model m = tiny_model_new(t);
    int32_t prompt[300];
    uint64_t draws = 0;
    double used = 0, taken = 0;
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.max_sequences = 8;
    o.prefix_cache = false;
    llm_engine *engine = engine_new(m.model, &o);
    /* each sequence passes through all lengths from l - 60 to l + 60, with l from 110 to 290 */
    for (int i = 0; i < 48; i++) {
        int n = 50 + (int)(llm_random(1, 1, draws++) * 180);
        for (int k = 0; k < n; k++)
            prompt[k] = (int32_t)(llm_random(2, (uint64_t)i, (uint64_t)k) * t.vocab);
        submit(engine, plain_request(prompt, n, 120));
    }
    while (step(engine)) {
        llm_statistics s = llm_engine_statistics(engine);
        int64_t slots = (s.blocks_total - s.blocks_free) * s.block_size;
        if (slots)
            assert_true(fabs(s.kv_waste - (1 - (double)s.slots_used / (double)slots)) < 1e-9);
        /* less than one block per sequence */
        assert_true(slots - s.slots_used < (s.running + 1) * s.block_size);
        used += (double)s.slots_used;
        taken += (double)slots;
    }
    double waste = 1 - used / taken;
    print_message("waste at mean length 200 and block size 16: %.2f %%\n", 100 * waste);
    assert_true(waste > 0.02 && waste < 0.04);
    llm_engine_free(engine);
    tiny_model_free(&m);
}

/* ---- The prefix cache ------------------------------------------------------------------------ */

static uint64_t hits_of(llm_engine *engine, const int32_t *prompt, int n) {
    uint64_t before = llm_engine_statistics(engine).prefix_hits;
    submit(engine, plain_request(prompt, n, 1));
    drain(engine);
    return llm_engine_statistics(engine).prefix_hits - before;
}

static void test_prefix_hits(void **state) {
    int32_t prompt[100];
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    llm_engine *engine = engine_new(target, &o);
    ids(prompt, 100, 1);
    assert_int_equal(hits_of(engine, prompt, 65), 0);
    assert_int_equal(hits_of(engine, prompt, 65), 64);
    /* the last token always goes through the model */
    assert_int_equal(hits_of(engine, prompt, 64), 48);
    assert_int_equal(hits_of(engine, prompt, 100), 64);
    assert_int_equal(hits_of(engine, prompt, 100), 96);
    prompt[40]++;
    assert_int_equal(hits_of(engine, prompt, 65), 32);
    prompt[40]--;
    /* the same tokens at other positions do not match */
    assert_int_equal(hits_of(engine, prompt + 16, 65), 0);
    llm_statistics s = llm_engine_statistics(engine);
    assert_int_equal(s.prefix_tokens, 65 * 4 + 64 + 200);
    assert_int_equal(s.prefix_tokens - s.prefix_hits, s.prompt_tokens);

    /* two concurrent requests share the blocks */
    submit(engine, plain_request(prompt, 65, 10));
    submit(engine, plain_request(prompt, 65, 10));
    step(engine);
    s = llm_engine_statistics(engine);
    assert_int_equal(s.blocks_shared, 4);
    assert_int_equal(s.blocks_total - s.blocks_free, 6);
    assert_int_equal(s.slots_used, 66);
    drain(engine);
    assert_idle(engine);
    llm_engine_free(engine);

    o.prefix_cache = false;
    engine = engine_new(target, &o);
    for (int i = 0; i < 2; i++) assert_int_equal(hits_of(engine, prompt, 65), 0);
    llm_engine_free(engine);
}

/* The cache has room for three prompts of four blocks each: the least recently used prompt is
 * evicted. */
static void test_eviction(void **state) {
    enum { A, B, C, D };
    int32_t prompts[4][64];
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 12 * 16;
    llm_engine *engine = engine_new(target, &o);
    for (int i = 0; i < 4; i++) ids(prompts[i], 64, 50 + (uint64_t)i);
    for (int i = A; i <= C; i++) assert_int_equal(hits_of(engine, prompts[i], 64), 0);
    assert_int_equal(hits_of(engine, prompts[A], 64), 48);
    assert_int_equal(hits_of(engine, prompts[D], 64), 0);  /* evicts B */
    assert_int_equal(hits_of(engine, prompts[A], 64), 48);
    assert_int_equal(hits_of(engine, prompts[C], 64), 48);
    /* evicts the end of D, not its beginning */
    assert_int_equal(hits_of(engine, prompts[B], 17), 0);
    assert_int_equal(hits_of(engine, prompts[D], 33), 32);
    assert_idle(engine);
    llm_engine_free(engine);
}

/* ---- Hooks and preemption -------------------------------------------------------------------- */

/* A hook sees each position once and in order, even if its request is preempted and another request
 * then makes the prefix cache hold more of the prompt than it had computed. */
static void test_hook_and_preemption(void **state) {
    int32_t prompt[64], other[40];
    uint64_t preemptions = 0;
    (void)state;
    for (int swap = 0; swap < 2; swap++)
        for (int pressure = 0; pressure < 12; pressure++) {
            llm_engine_options o = llm_engine_defaults(), calm = o;
            o.n_threads = calm.n_threads = 1;
            o.block_size = 4;
            o.max_batch_tokens = 10;
            o.context_length = 100;
            o.preempt = swap ? LLM_PREEMPT_SWAP : LLM_PREEMPT_RECOMPUTE;
            o.swap_bytes = 1 << 20;
            o.cache_bytes =
                llm_model_cache_bytes_per_token(target, LLM_F16) * (uint64_t)(100 + 3 * pressure);
            llm_engine *engine = engine_new(target, &o);
            ids(prompt, 64, 1);
            ids(other, 40, 2);
            submit(engine, plain_request(prompt, 48, 30)); /* the same prompt, submitted first */
            submit(engine, plain_request(other, 10, 60));
            for (int i = 0; i < pressure % 4; i++) step(engine);
            llm_request r = plain_request(prompt, 56, 10);
            r.n_samples = 1 + pressure % 3;
            r.sampling.temperature = 1;
            record *hooked = record_new(target);
            r.user = hooked;
            r.logits_hook = record_hook;
            hooked->id = submit(engine, r);
            while (step(engine)) {
                llm_event event;
                while (llm_next_event(engine, &event))
                    if (event.request == hooked->id) record_event(hooked, &event);
            }
            preemptions += llm_engine_statistics(engine).preemptions;
            for (int s = 0; s < r.n_samples; s++) {
                const sample_record *got = &hooked->samples[s];
                /* sample 0: all rows of the prompt; the others: only the last */
                int first = s ? 55 : 0;
                assert_int_equal(got->n_rows, 56 + 10 - 1 - first);
                for (int i = 0; i < got->n_rows; i++)
                    assert_int_equal(got->positions[i], first + i);
            }
            record *alone = run_alone(target, &calm, r);
            assert_same(alone, hooked);
            record_free(alone);
            record_free(hooked);
            assert_idle(engine);
            llm_engine_free(engine);
        }
    assert_true(preemptions > 10);
}

/* A request with a hook is preempted during its prompt, while the prefix cache holds the whole
 * prompt. The hook must still see every position. */
static void test_hook_resumes_where_it_was(void **state) {
    int32_t prompt[40];
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.block_size = 4;
    o.max_batch_tokens = 8;
    llm_engine *engine = engine_new(target, &o);
    llm_request r = plain_request(ids(prompt, 40, 1), 40, 3);
    record *expected = run_alone(target, NULL, r), *hooked = record_new(target);
    submit(engine, plain_request(prompt, 40, 1));
    drain(engine); /* now the whole prompt is in the prefix cache */
    record_submit(engine, hooked, r, true);
    for (int i = 0; i < 2; i++) step(engine);
    llm_error err;
    assert_int_equal(engine->scheduler.n_sequences, 1);
    assert_true(llm__preempt(&engine->scheduler, engine->scheduler.sequences[0], &err));
    record_drain(engine);
    assert_same(expected, hooked);
    record_free(expected);
    record_free(hooked);
    assert_idle(engine);
    llm_engine_free(engine);
}

/* ---- Mistakes -------------------------------------------------------------------------------- */

static void assert_refused(llm_engine *engine, llm_request r, llm_status status, const char *part) {
    llm_error err;
    uint64_t id = 77;
    assert_false(llm_submit(engine, &r, &id, &err));
    if (!strstr(err.message, part)) fail_msg("\"%s\" does not say \"%s\"", err.message, part);
    assert_int_equal(err.status, status);
    assert_int_equal(id, 77);
}

static void test_refused_requests(void **state) {
    static const char *const empty[] = {"a", ""}, *const null_text[] = {NULL};
    int32_t prompt[128];
    llm_error err;
    (void)state;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.draft = draft;
    o.max_speculation = 4;
    o.max_sequences = 6;
    o.cache_bytes = llm_model_cache_bytes_per_token(target, LLM_F16) * 64;
    llm_engine *engine = engine_new(target, &o);
    llm_request good = plain_request(ids(prompt, 128, 1), 10, 5), r;

    r = good, r.max_tokens = 60;
    assert_refused(engine, r, LLM_ERROR_CAPACITY, "blocks");
    r = good, r.n_prompt = 128;
    assert_refused(engine, r, LLM_ERROR_CAPACITY, "context");
    r = good, r.n_prompt = 0;
    assert_refused(engine, r, LLM_ERROR_ARGUMENT, "empty");
    r = good, r.max_tokens = -2;
    assert_refused(engine, r, LLM_ERROR_ARGUMENT, "max_tokens");
    static const int counts[] = {0, -1, 7, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; i++) {
        r = good, r.n_samples = counts[i];
        assert_refused(engine, r, LLM_ERROR_ARGUMENT, "n_samples");
    }
    static const int depths[] = {-2, -100, 5, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; i++) {
        r = good, r.speculate = depths[i];
        assert_refused(engine, r, LLM_ERROR_ARGUMENT, "speculate");
        r.lookup = true;
        assert_refused(engine, r, LLM_ERROR_ARGUMENT, "speculate");
    }
    for (int i = 0; i < 4; i++) {
        r = good;
        *(i == 0   ? &r.sampling.temperature
          : i == 1 ? &r.sampling.top_p
          : i == 2 ? &r.sampling.min_p
                   : &r.sampling.repetition_penalty) = NAN;
        assert_refused(engine, r, LLM_ERROR_ARGUMENT, "nan");
    }
    r = good, r.stop = empty, r.n_stop = 2;
    assert_refused(engine, r, LLM_ERROR_ARGUMENT, "stop text 1");
    r = good, r.stop = null_text, r.n_stop = 1;
    assert_refused(engine, r, LLM_ERROR_ARGUMENT, "stop text 0");
    r = good, r.n_stop = 1;
    assert_refused(engine, r, LLM_ERROR_ARGUMENT, "n_stop");
    r = good, r.stop = empty, r.n_stop = -1;
    assert_refused(engine, r, LLM_ERROR_ARGUMENT, "n_stop");
    r = good, r.speculate = 2, r.logits_hook = record_hook;
    assert_refused(engine, r, LLM_ERROR_UNSUPPORTED, "hook");
    for (uint64_t id = 0; id < 3; id++) assert_false(llm_cancel(engine, id, &err));
    assert_false(llm_cancel(engine, UINT64_MAX, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_non_null(strstr(err.message, "18446744073709551615"));

    /* refused calls change nothing */
    assert_int_equal(llm_step(engine, &err), 0);
    assert_int_equal(llm_engine_statistics(engine).requests_submitted, 0);
    uint64_t id = submit(engine, good);
    drain(engine);
    assert_false(llm_cancel(engine, id, &err));
    assert_idle(engine);
    llm_engine_free(engine);

    o.draft = NULL;
    o.chunked_prefill = false;
    o.max_batch_tokens = 12;
    engine = engine_new(target, &o);
    r = good, r.max_tokens = 2, r.speculate = 2;
    assert_refused(engine, r, LLM_ERROR_ARGUMENT, "draft");
    r.speculate = LLM_SPECULATE_AUTO;
    assert_refused(engine, r, LLM_ERROR_ARGUMENT, "draft");
    assert_refused(engine, good, LLM_ERROR_CAPACITY, "chunked prefill");
    llm_engine_free(engine);
}

static void assert_engine_refused(const llm_model *model, llm_engine_options o, const char *part) {
    llm_error err;
    long live = test_live;
    assert_null(llm_engine_create(model, &o, &err));
    if (!strstr(err.message, part)) fail_msg("\"%s\" does not say \"%s\"", err.message, part);
    assert_int_not_equal(err.status, LLM_OK);
    assert_int_equal(test_live, live);
}

static void test_refused_engines(void **state) {
    (void)state;
    llm_engine_options good = llm_engine_defaults(), o;
    o = good, o.max_speculation = 0;
    assert_engine_refused(target, o, "max_speculation");
    o = good, o.max_speculation = 1025;
    assert_engine_refused(target, o, "max_speculation");
    o = good, o.preempt = (llm_preempt)2;
    assert_engine_refused(target, o, "preempt");

    tiny t = tiny_defaults(), other = t;
    tiny_model same = tiny_model_new(t);
    other.vocab--;
    tiny_model smaller = tiny_model_new(other);
    other = t, other.first = 'b';
    tiny_model renamed = tiny_model_new(other);
    other = t, other.context = 100;
    tiny_model shorter = tiny_model_new(other);
    o = good, o.draft = smaller.model;
    assert_engine_refused(same.model, o, "39");
    o.draft = renamed.model;
    assert_engine_refused(same.model, o, "token 3 is \"b\"");
    o.draft = shorter.model;
    assert_engine_refused(same.model, o, "context_length");
    o.context_length = 100;
    llm_engine_free(engine_new(same.model, &o));
    o.draft = target;
    assert_engine_refused(same.model, o, "vocabulary");
    tiny_model_free(&same);
    tiny_model_free(&smaller);
    tiny_model_free(&renamed);
    tiny_model_free(&shorter);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_admission_with_a_prefix),
        cmocka_unit_test(test_admission_counts_samples),
        cmocka_unit_test(test_tokens_are_shared_evenly),
        cmocka_unit_test(test_older_goes_first),
        cmocka_unit_test(test_rejected_blocks_are_released),
        cmocka_unit_test(test_random_workloads),
        cmocka_unit_test(test_priority_order),
        cmocka_unit_test(test_priority_does_not_starve),
        cmocka_unit_test(test_whole_prompts_do_not_starve),
        cmocka_unit_test(test_samples_fit_together),
        cmocka_unit_test(test_decoding_keeps_its_pace),
        cmocka_unit_test(test_steps_allocate_nothing),
        cmocka_unit_test(test_cache_waste),
        cmocka_unit_test(test_prefix_hits),
        cmocka_unit_test(test_eviction),
        cmocka_unit_test(test_hook_and_preemption),
        cmocka_unit_test(test_hook_resumes_where_it_was),
        cmocka_unit_test(test_refused_requests),
        cmocka_unit_test(test_refused_engines),
    };
    return cmocka_run_group_tests_name("scheduler", tests, load_models, free_models);
}
