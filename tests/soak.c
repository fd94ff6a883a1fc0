/* soak.c - random workloads on random engines, for a given time: `make soak MINUTES=30`.
 *
 *     soak MINUTES [SEED]    rounds with the seeds SEED, SEED + 1, ... (default: from the time)
 *     soak --seed SEED       only the round of this seed, repeated exactly
 *
 * A round draws from its seed a model, a device, engine options and requests. It submits, steps and
 * cancels in random order. In some rounds, allocations and calls of the device fail. Each request
 * must give the same output as alone on an engine with plain options. Each failure must be reported
 * and affect nothing else. At the end, every block and all memory must be free. */
#include "cross/cmocka.h" /* its fail_msg is a longjmp, so the run continues after a failed round */

#include <signal.h>

#include "test_util.h"

/* The engine's clock advances only between operations, so that a round with dynamic batching
 * repeats exactly. */
static double soak_time;

static int soak_clock(struct timespec *t) {
    t->tv_sec = (time_t)soak_time;
    t->tv_nsec = (long)((soak_time - (double)t->tv_sec) * 1e9);
    return 0;
}

#define clock_gettime(clock, time) soak_clock(time)
#define LLM_DEBUG
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "invariants.h"
#undef clock_gettime

#include "emulator.h"
#include "engine_util.h"
#include "failing_backend.h"
#include "tiny_model.h"
#undef llm_engine_create /* each test engine names its backend */

#ifdef __GLIBC__
#include <malloc.h>
#endif

/* NULL where there is no C++ compiler for the emulated device. */
void emulator_memory(size_t bytes) __attribute__((weak));
void emulator_fail_allocation(long n) __attribute__((weak));
void emulator_fail_launch(long n) __attribute__((weak));
void emulator_lose_device(long n) __attribute__((weak));
bool emulator_failed(void) __attribute__((weak));
void emulator_recover(void) __attribute__((weak));
emulator_counts emulator_counted(void) __attribute__((weak));

enum {
    EMULATED_SHARE = 5, /* percent of the rounds: few, since this device is slow */
    FAULTS_SHARE = 40,  /* percent of the rounds */
    MAX_CLIENTS = 24,   /* the most requests in a round */
    MAX_PROMPT = 64,
    MAX_STEPS = 20000, /* the most steps until all requests of a round have ended */
    MAX_SECONDS = 600, /* the most seconds for a round; a longer round counts as hung */
    MAX_FAILURES = 10  /* failed rounds before the run ends */
};

/* ---- The round ------------------------------------------------------------------------------ */

typedef struct client { /* a request and its output */
    llm_request request;
    int32_t prompt[MAX_PROMPT];
    char text[24]; /* the prompt as text; "": the request was submitted as ids */
    char stop_texts[2][4];
    const char *stops[2];
    int32_t forced[1200]; /* see record.forced */
    bool forces;
    bool disturbed; /* a step failed while the request ran */
    record *got;
} client;

static struct {
    uint64_t seed;
    test_random random;
    bool emulated, faults, lost;
    bool own_backend;            /* the engine creates its own backend */
    const char *file;            /* the model's file; NULL: a tiny model */
    tiny_model tiny, tiny_draft; /* model is NULL if not used */
    llm_model *loaded, *loaded_draft;
    const llm_model *model, *draft;
    llm_gpu_options gpu;
    llm_engine_options options;
    llm_backend wrapper; /* wraps `real` */
    llm_engine *engine;
    client *clients[MAX_CLIENTS];
    int n_clients, comparing;
} now;

static struct { /* sums over all rounds */
    long rounds, failed, emulated, with_faults, requests, refused, compared, cancelled, faults;
    long steps, preemptions, swapped, hits, accepted, replays;
} total;

static int below(int n) { return random_below(&now.random, n); }
static bool chance(int percent) { return below(100) < percent; }
static float uniform(float low, float high) {
    return low + (high - low) * (float)below(1000) / 1000;
}

/* Everything that a round allocates and must free. */
typedef struct holdings {
    long host;
    uint64_t device, pinned, handles;
} holdings;

static holdings held(void) {
    holdings h = {test_live, 0, 0, 0};
    if (!emulator_counted) return h;
    emulator_counts c = emulator_counted();
    h.device = c.live_allocations;
    h.pinned = c.live_pinned;
    h.handles = c.live_handles;
    return h;
}

static void assert_holds(holdings before) {
    holdings after = held();
    assert_int_equal(after.host, before.host);
    assert_int_equal(after.device, before.device);
    assert_int_equal(after.pinned, before.pinned);
    assert_int_equal(after.handles, before.handles);
}

/* ---- Faults: one at a time, armed before an operation and disarmed after it ----------------- */

typedef enum fault { NO_FAULT, HOST_MEMORY, DEVICE_CALL, DEVICE_MEMORY, LAUNCH, LOSS } fault;

static bool disarm(void) { /* returns whether the fault happened */
    bool hit = test_failed || (fail_call >= 0 && calls > fail_call);
    if (emulator_failed) {
        hit = hit || emulator_failed();
        emulator_fail_allocation(-1), emulator_fail_launch(-1), emulator_lose_device(-1);
    }
    test_failed = false;
    test_fail_in = fail_call = -1;
    total.faults += hit;
    return hit;
}

/* In a round with faults: with a probability of `percent`, make one of the next `reach` calls of a
 * random kind fail. */
static fault arm(int percent, int reach) {
    if (!now.faults || !chance(percent)) return NO_FAULT;
    fault kind = (fault)(HOST_MEMORY + below(now.emulated ? 5 : 2));
    long n = below(reach);
    /* a lost device ends the round, so losses are rare */
    if (kind == LOSS && !chance(20)) kind = LAUNCH;
    if (kind == HOST_MEMORY) test_fail_in = n;
    else if (kind == DEVICE_CALL) fail_call = calls + n;
    else if (kind == DEVICE_MEMORY) emulator_fail_allocation(n / 2);
    else if (kind == LAUNCH) emulator_fail_launch(n * 4);
    else emulator_lose_device(n * 4);
    return kind;
}

/* Check an operation's result: the error must name the cause of each failure. Without a graph or
 * other resources that the device refuses, the engine can continue; after a failed host allocation
 * or device call, it cannot. */
static void check_outcome(bool ok, fault kind, bool hit, const llm_error *err) {
    if (kind == LOSS && hit) now.lost = true;
    if (ok) {
        assert_int_equal(err->status, LLM_OK);
        if (hit && (kind == HOST_MEMORY || kind == DEVICE_CALL))
            fail_msg("fault %d was ignored", (int)kind);
        return;
    }
    if (!hit && !now.lost) fail_msg("nothing failed, but the error is: %s", err->message);
    if (!now.lost && err->status != (kind == HOST_MEMORY ? LLM_ERROR_MEMORY : LLM_ERROR_DEVICE) &&
        (kind != DEVICE_MEMORY || err->status != LLM_ERROR_MEMORY))
        fail_msg("fault %d gives status %d: %s", (int)kind, (int)err->status, err->message);
    assert_true(strlen(err->message) > 10 && !strchr(err->message, '\n'));
}

/* ---- Draws ---------------------------------------------------------------------------------- */

static void draw_model(void) {
    static const char *const files[] = {"mqa_4_1", "gqa_8_2", "gqa_4_2", "head64",
                                        "bias",    "wide",    "mha_48"};
    bool draft = chance(45), itself = chance(20);
    char path[64];
    if (chance(30)) {
        now.file = files[below(7)];
        snprintf(path, sizeof path, "tests/data/golden/%s.gguf", now.file);
        now.model = now.loaded = model_load(path);
        snprintf(path, sizeof path, "tests/data/golden/%s.gguf", files[below(2)]);
        if (draft && !itself) now.draft = now.loaded_draft = model_load(path);
    } else {
        tiny t = tiny_defaults();
        t.vocab = 30 + below(40);
        t.context = 48 + below(80);
        t.layers = 1 + below(3);
        t.seed = random_u64(&now.random);
        t.sharp = uniform(0.5f, 8);
        now.tiny = tiny_model_new(t);
        now.model = now.tiny.model;
        t.noise = uniform(0, 0.6f);
        t.layers = 1;
        if (draft && !itself) now.tiny_draft = tiny_model_new(t), now.draft = now.tiny_draft.model;
    }
    if (draft && itself) now.draft = now.model;
}

static void draw_gpu(void) {
    now.gpu = llm_gpu_defaults();
    now.gpu.trust = true;
    now.gpu.graphs = chance(70);
    now.gpu.fused = chance(70);
    now.gpu.split_attention = chance(70);
    now.gpu.overlap = chance(30);
    now.gpu.plain = chance(15);
    now.gpu.deterministic = true;
}

/* A pool of at least one context, often less than two, so that sequences are preempted. */
static uint64_t draw_cache_bytes(const llm_engine_options *o) {
    int whole = llm_model_config(now.model)->context_length;
    int context = o->context_length ? o->context_length : whole;
    int tokens = chance(10) ? context / 2 + 1 : context + below(2 * context);
    uint64_t each = llm_model_cache_bytes_per_token(now.model, o->cache_type);
    return chance(20) ? 0 : each * (uint64_t)(tokens + o->block_size);
}

static void draw_options(void) {
    llm_engine_options o = llm_engine_defaults();
    int context = llm_model_config(now.model)->context_length;
    o.draft = now.draft;
    o.n_threads = 1 + below(2);
    o.max_isa = chance(50) ? LLM_ISA_BEST : (llm_isa)below(LLM_ISA_BEST + 1);
    o.pack_weights = chance(70);
    o.context_length = chance(30) ? 0 : 24 + below(context - 23);
    o.block_size = chance(50) ? 1 + below(8) : 1 + below(40);
    o.cache_type = chance(60) ? LLM_F16 : LLM_F32;
    o.cache_bytes = draw_cache_bytes(&o);
    o.memory_share = uniform(0.1f, 0.7f);
    o.max_sequences = 1 + below(8);
    o.max_batch_tokens = chance(50) ? 1 + below(24) : 16 + below(120);
    o.max_speculation = 1 + below(8);
    o.preempt = chance(50) ? LLM_PREEMPT_RECOMPUTE : LLM_PREEMPT_SWAP;
    o.swap_bytes = chance(70) ? (uint64_t)1 << 20 : (uint64_t)below(1 << 15);
    o.prefix_cache = chance(75);
    o.chunked_prefill = chance(80);
    if (!o.chunked_prefill) o.max_batch_tokens += 48; /* a whole request must fit in a step */
    o.naive_attention = chance(15);
    o.host_sampling = chance(25);
    now.options = o;
}

static void draw_sampling(llm_sampling *p) {
    p->temperature = chance(45) ? 0 : uniform(0.1f, 2);
    if (chance(30)) p->top_k = 1 + below(20);
    if (chance(40)) p->top_p = uniform(0.1f, 1);
    if (chance(20)) p->min_p = uniform(0, 0.3f);
    if (chance(40)) p->repetition_penalty = uniform(0.7f, 1.6f);
    if (chance(50)) p->penalty_window = below(30);
    p->seed = random_u64(&now.random);
}

/* Draw a prompt as text. c->prompt gets its tokens, so that the test knows its length. */
static int draw_text(client *c) {
    const llm_tokenizer *tokenizer = llm_model_tokenizer(now.model);
    int length = 1 + below(12);
    for (int i = 0; i < length; i++) c->text[i] = (char)('a' + below(8));
    return (int)llm_tokenize(tokenizer, c->text, (size_t)length, LLM_TOKENIZE_BOS, c->prompt,
                             MAX_PROMPT, NULL);
}

/* Draw a prompt. The prompts of a round share prefixes, and thus blocks. Some repeat a passage, for
 * prompt lookup. */
static void draw_prompt(client *c, int context, int vocab) {
    int longest = (int)llm__min(context - 1, MAX_PROMPT);
    int n = 1 + below(chance(50) ? longest : (longest + 3) / 4);
    int alike = below(n + 1), period = chance(30) ? 1 + below(6) : MAX_PROMPT;
    uint64_t stream = (uint64_t)below(3);
    for (int i = 0; i < n; i++) {
        bool repeats = i >= alike && i >= period;
        int common = (int)(llm_random(now.seed, stream, (uint64_t)i) * vocab);
        c->prompt[i] = repeats ? c->prompt[i - period] : i < alike ? common : below(vocab);
    }
    if (chance(15)) n = draw_text(c);
    assert_in_range(n, 1, longest);
    c->request.prompt = c->prompt;
    c->request.n_prompt = n;
}

static void draw_stops(client *c) {
    c->request.n_stop = chance(70) ? 0 : 1 + below(2);
    for (int i = 0; i < c->request.n_stop; i++) {
        int length = 1 + below(3);
        for (int k = 0; k < length; k++) c->stop_texts[i][k] = (char)('a' + below(26));
        c->stops[i] = c->stop_texts[i];
    }
    c->request.stop = c->stops;
}

static void draw_request(client *c) {
    const llm_engine_options *o = llm_engine_settings(now.engine);
    int vocab = llm_model_config(now.model)->vocab_size;
    llm_request *q = &c->request;
    *q = llm_request_defaults();
    draw_sampling(&q->sampling);
    draw_prompt(c, o->context_length, vocab);
    q->max_tokens = chance(8) ? -1 : chance(8) ? 0 : 1 + below(now.emulated ? 10 : 40);
    q->n_samples = chance(70) ? 1 : 1 + below((int)llm__min(o->max_sequences, 4));
    q->ignore_end = chance(60);
    draw_stops(c);
    q->priority = chance(70) ? 0 : below(7) - 3;
    q->lookup = chance(40);
    if (chance(60) && (o->draft || q->lookup))
        q->speculate = chance(25) ? LLM_SPECULATE_AUTO : 1 + below(o->max_speculation);
    if (q->speculate) q->branches = below(5);
    if (q->speculate || !chance(35)) return;
    q->logits_hook = record_hook;
    c->forces = chance(30);
    for (int i = 0; i < 1200; i++) c->forced[i] = chance(10) ? below(vocab) : -1;
}

/* Repeat an earlier request, with a stop text that occurs in its output. */
static void draw_repeat(client *c, const client *earlier) {
    const sample_record *sample = &earlier->got->samples[0];
    *c = *earlier;
    c->request.prompt = c->prompt;
    c->request.stop = c->stops;
    for (int i = 0; i < 2; i++) c->stops[i] = c->stop_texts[i];
    c->disturbed = false;
    size_t length = 1 + (size_t)below(3);
    if (sample->text_length < length) return;
    memset(c->stop_texts, 0, sizeof c->stop_texts);
    memcpy(c->stop_texts[0], sample->text + below((int)(sample->text_length - length + 1)), length);
    c->request.n_stop = c->stop_texts[0][0] != 0;
}

/* Make a request invalid. Returns the status with which it must be refused. */
static llm_status make_invalid(llm_request *q) {
    const llm_engine_options *o = llm_engine_settings(now.engine);
    static const char *const empty[] = {""};
    static int32_t wrong[] = {-1};
    switch (below(8)) {
    case 0: q->n_prompt = 0; break;
    case 1: q->prompt = wrong, q->n_prompt = 1; break;
    case 2: q->max_tokens = -2; break;
    case 3: q->n_samples = o->max_sequences + 1; break;
    case 4: q->sampling.temperature = NAN; break;
    case 5: q->stop = empty, q->n_stop = 1; break;
    case 6: q->speculate = o->max_speculation + 1, q->lookup = true; break;
    default: q->n_prompt = o->context_length + 1; return LLM_ERROR_CAPACITY;
    }
    return LLM_ERROR_ARGUMENT;
}

/* ---- A running engine ----------------------------------------------------------------------- */

static void check_now(void) {
    llm_statistics s = llm_engine_statistics(now.engine);
    assert_true(s.blocks_free >= 0 && s.blocks_free <= s.blocks_total);
    assert_true(s.blocks_peak >= s.blocks_total - s.blocks_free);
    assert_true(s.slots_used <= (s.blocks_total - s.blocks_free) * s.block_size);
    assert_true(s.running <= now.options.max_sequences && s.accepted <= s.proposed);
    assert_true(s.requests_finished <= s.requests_submitted);
}

static void open_backend(llm_error *err) {
    llm_engine_options *o = &now.options;
    now.options.backend = real = NULL;
    llm__clear(err);
    if (now.own_backend) return;
    if (now.emulated) real = llm_emulated_backend(&now.gpu, err);
    else real = llm_cpu_backend(o->n_threads, o->max_isa, err);
    if (!real) return;
    if (!now.emulated) llm_cpu_pack_weights(real, o->pack_weights);
    now.wrapper = failing_backend();
    o->backend = &now.wrapper;
}

/* Create the engine. A failed attempt must leak nothing; it is repeated. */
static void create_engine(void) {
    llm_error err;
    for (int tries = 0; !now.engine; tries++) {
        holdings before = held();
        fault kind = arm(tries < 3 ? 40 : 0, 120);
        open_backend(&err);
        if (err.status == LLM_OK) now.engine = llm_engine_create(now.model, &now.options, &err);
        check_outcome(now.engine != NULL, kind, disarm(), &err);
        if (now.engine && !now.lost) return;
        llm_engine_free(now.engine);
        llm_backend_free(real);
        now.engine = NULL;
        now.lost = false;
        if (emulator_recover) emulator_recover();
        assert_holds(before);
    }
}

static bool submit(llm_engine *engine, const client *c, llm_request q, record *r, llm_error *err) {
    q.user = r;
    if (c->forces) r->forced = c->forced, r->force_until = 1200;
    if (c->text[0]) return llm_submit_text(engine, c->text, &q, &r->id, err);
    return llm_submit(engine, &q, &r->id, err);
}

/* Whether a request can ever fit: its whole length must fit in the pool and, without chunked
 * prefill, in a step. */
static bool fits(const llm_request *q) {
    llm_statistics s = llm_engine_statistics(now.engine);
    const llm_engine_options *o = llm_engine_settings(now.engine);
    int room = o->context_length - q->n_prompt;
    int length = q->n_prompt + (q->max_tokens < 0 || q->max_tokens > room ? room : q->max_tokens);
    if (!o->chunked_prefill && length > o->max_batch_tokens) return false;
    return (length + s.block_size - 1) / s.block_size <= s.blocks_total;
}

static void submit_one(void) {
    llm_error err;
    client *c = (client *)calloc(1, sizeof *c);
    assert_non_null(c);
    if (now.n_clients && chance(20)) draw_repeat(c, now.clients[below(now.n_clients)]);
    else draw_request(c);
    if (chance(6)) {
        llm_request bad = c->request;
        llm_status status = make_invalid(&bad);
        assert_false(llm_submit(now.engine, &bad, NULL, &err));
        assert_int_equal(err.status, status);
    }
    c->got = record_new(now.model);
    uint64_t before = llm_engine_statistics(now.engine).requests_submitted;
    bool fit = fits(&c->request), ok = false;
    for (int tries = 0; fit && !ok; tries++) {
        fault kind = arm(tries < 3 ? 30 : 0, 3);
        ok = submit(now.engine, c, c->request, c->got, &err);
        check_outcome(ok, kind, disarm(), &err);
    }
    if (!fit) {
        assert_false(submit(now.engine, c, c->request, c->got, &err));
        assert_int_equal(err.status, LLM_ERROR_CAPACITY);
        record_free(c->got);
        free(c);
        total.refused++;
    } else {
        now.clients[now.n_clients++] = c;
        total.requests++;
    }
    assert_int_equal(llm_engine_statistics(now.engine).requests_submitted, before + fit);
}

static bool has_ended(const client *c) {
    for (int s = 0; s < c->request.n_samples; s++)
        if (!c->got->samples[s].n_ends) return false;
    return true;
}

static void cancel(client *c) {
    llm_error err;
    bool ended = has_ended(c);
    assert_int_equal(llm_cancel(now.engine, c->got->id, &err), !ended);
    assert_int_equal(err.status, ended ? LLM_ERROR_ARGUMENT : LLM_OK);
    record_events(now.engine);
    assert_true(has_ended(c));
    total.cancelled += !ended;
}

static void cancel_one(void) {
    if (now.n_clients) cancel(now.clients[below(now.n_clients)]);
}

static int step(void) {
    llm_error err;
    soak_time += 0.001;
    fault kind = arm(12, 12);
    int more = llm_step(now.engine, &err);
    bool hit = disarm();
    record_events(now.engine); /* also events of a step that failed */
    check_outcome(more >= 0, kind, hit, &err);
    for (int i = 0; i < now.n_clients && more < 0; i++)
        if (!has_ended(now.clients[i])) now.clients[i]->disturbed = true;
    check_now();
    return more;
}

/* Submit, step and cancel in random order, then step until all have ended. */
static void run_requests(void) {
    int n = 2 + below(now.emulated ? 5 : MAX_CLIENTS - 1), busy = 1 + below(6);
    for (int i = 0; now.n_clients < n && !now.lost && i < MAX_STEPS; i++) {
        int what = below(busy + 2);
        if (what == 0) submit_one();
        else if (what == 1 && chance(30)) cancel_one();
        else step();
    }
    for (int i = 0; !now.lost && step(); i++) {
        if (i == MAX_STEPS) fail_msg("requests are left after %d steps", MAX_STEPS);
        if (chance(3)) cancel_one();
    }
    for (int i = 0; i < now.n_clients; i++) {
        if (now.lost) cancel(now.clients[i]);
        assert_true(has_ended(now.clients[i]));
    }
    assert_idle(now.engine);
    assert_int_equal(now.engine->scheduler.n_swap_free, now.engine->scheduler.n_swap);
}

/* ---- The same requests alone ---------------------------------------------------------------- */

static bool samples_proposals(const llm_request *q) {
    return q->speculate && q->sampling.temperature > 0;
}

/* Plain options, except the options on which the output may depend: the arithmetic, the context
 * and, for sampled speculation, the depth, which determines the random numbers that are used. */
static llm_engine_options plain_options(const client *c) {
    llm_engine_options o = llm_engine_defaults(), *drawn = &now.options;
    int context = llm_engine_settings(now.engine)->context_length, n = c->request.n_samples;
    o.n_threads = 1;
    o.max_isa = drawn->max_isa;
    o.pack_weights = !drawn->pack_weights;
    o.naive_attention = drawn->naive_attention;
    o.cache_type = drawn->cache_type;
    o.context_length = drawn->context_length;
    o.prefix_cache = false;
    o.max_sequences = n;
    o.cache_bytes = llm_model_cache_bytes_per_token(now.model, o.cache_type);
    o.cache_bytes *= (uint64_t)(context + o.block_size) * (uint64_t)n;
    if (samples_proposals(&c->request)) {
        o.draft = drawn->draft;
        o.max_speculation = drawn->max_speculation;
        o.max_batch_tokens = drawn->max_batch_tokens;
    }
    return o;
}

static record *run_plain(const client *c) {
    llm_error err;
    llm_engine_options o = plain_options(c);
    llm_gpu_options gpu = now.gpu;
    llm_request q = c->request;
    record *r = record_new(now.model);
    gpu.graphs = gpu.overlap = false;
    if (now.emulated) o.backend = llm_emulated_backend(&gpu, &err);
    if (now.emulated && !o.backend) fail_msg("%s", err.message);
    if (q.sampling.temperature == 0) q.speculate = 0;
    llm_engine *engine = llm_engine_create(now.model, &o, &err);
    if (!engine || !submit(engine, c, q, r, &err)) fail_msg("%s", err.message);
    record_drain(engine);
    assert_idle(engine);
    llm_engine_free(engine);
    llm_backend_free(o.backend);
    return r;
}

/* Host and device sum probabilities in different orders, so nearby logprobs count as equal. */
static void match_logprobs(sample_record *got, const sample_record *expected) {
    for (int i = 0; i < got->n_tokens && i < expected->n_tokens; i++) {
        float a = got->logprobs[i], b = expected->logprobs[i];
        if (!(fabsf(a - b) < 1e-4f))
            fail_msg("logprob %d is %g, but %g alone", i, (double)a, (double)b);
        got->logprobs[i] = b;
    }
}

static void compare(const client *c) {
    int vocab = c->got->vocab;
    if (c->disturbed && samples_proposals(&c->request)) return; /* it used other random numbers */
    record *expected = run_plain(c);
    for (int s = 0; s < c->request.n_samples; s++) {
        sample_record *got = &c->got->samples[s], *right = &expected->samples[s];
        assert_int_equal(got->n_ends, 1);
        for (int i = 0; i < c->request.n_stop; i++)
            assert_true(!got->text || !strstr(got->text, c->stops[i]));
        if (now.emulated && now.options.host_sampling) match_logprobs(got, right);
        if (got->finish == LLM_FINISH_CANCELLED) assert_sample_prefix(got, right, vocab);
        else assert_same_sample(got, right, vocab);
    }
    record_free(expected);
    total.compared++;
}

/* ---- A whole round -------------------------------------------------------------------------- */

static void start_round(uint64_t seed) {
    memset(&now, 0, sizeof now);
    now.seed = seed;
    now.random.state = llm__mix(seed);
    soak_time = 1;
    disarm();
    if (emulator_recover) emulator_recover();
    now.emulated = chance(EMULATED_SHARE) && llm_emulated_backend;
    now.own_backend = !now.emulated && chance(25);
    now.faults = chance(FAULTS_SHARE);
    draw_model();
    draw_options();
    draw_gpu();
    if (now.emulated) {
        /* little memory if the pool's size is a share of it */
        emulator_memory(now.options.cache_bytes ? (size_t)8 << 30 : (size_t)16 << 20);
        device_set_order("emulated", below(4));
    }
}

static void count_round(void) {
    llm_statistics s = llm_engine_statistics(now.engine);
    total.emulated += now.emulated;
    total.with_faults += now.faults;
    total.steps += (long)s.steps;
    total.preemptions += (long)s.preemptions;
    total.swapped += (long)s.blocks_swapped;
    total.hits += (long)s.prefix_hits;
    total.accepted += (long)s.accepted;
    total.replays += (long)s.device_replays;
}

static void run_round(uint64_t seed) {
    holdings before = held();
    start_round(seed);
    create_engine();
    run_requests();
    count_round();
    if (now.lost) emulator_recover();
    for (int i = 0; i < now.n_clients; i++) {
        now.comparing = i;
        compare(now.clients[i]);
        record_free(now.clients[i]->got);
        free(now.clients[i]);
    }
    llm_engine_free(now.engine);
    llm_backend_free(real);
    llm_model_free(now.loaded);
    llm_model_free(now.loaded_draft);
    tiny_model_free(&now.tiny);
    tiny_model_free(&now.tiny_draft);
    assert_holds(before);
}

static void print_failure(void) {
    const llm_engine_options *o = &now.options;
    const char *draft = !now.draft ? "" : now.draft == now.model ? ", its own draft" : ", a draft";
    fprintf(stderr, "round %llu failed, on %s%s, at request %d of %d\n",
            (unsigned long long)now.seed, now.emulated ? "the emulated device" : "the CPU",
            now.faults ? " with faults" : "", now.comparing, now.n_clients);
    fprintf(stderr, "  model %s%s, isa %s, threads %d\n", now.file ? now.file : "tiny", draft,
            llm_isa_name(o->max_isa), o->n_threads);
    fprintf(stderr, "  context %d, block size %d, cache %s of %llu bytes\n", o->context_length,
            o->block_size, llm_type_find(o->cache_type)->name, (unsigned long long)o->cache_bytes);
    fprintf(stderr, "  sequences %d, batch tokens %d, speculation %d, preempt %d\n",
            o->max_sequences, o->max_batch_tokens, o->max_speculation, (int)o->preempt);
    fprintf(stderr, "  prefix cache %d, chunked prefill %d, naive attention %d\n", o->prefix_cache,
            o->chunked_prefill, o->naive_attention);
    fprintf(stderr, "  to repeat it: soak --seed %llu\n", (unsigned long long)now.seed);
}

static void crash(int number) {
    signal(number, SIG_DFL);
    print_failure();
    raise(number);
}

/* Run a round. Returns whether it passed. The memory of a failed round leaks. */
static bool try_round(uint64_t seed) {
    total.rounds++;
    alarm(MAX_SECONDS);
    if (setjmp(cm_out) == CM_PASSED) {
        run_round(seed);
        return true;
    }
    print_failure();
    total.failed++;
    return false;
}

/* ---- The run -------------------------------------------------------------------------------- */

typedef struct memory_use { /* in KiB; 0 if unknown */
    long heap, resident;
} memory_use;

static memory_use memory_used(void) {
    memory_use m = {0, 0};
/* the address sanitizer keeps freed memory, and reports leaks itself */
#ifndef __SANITIZE_ADDRESS__
    long all;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld %ld", &all, &m.resident) == 2)
        m.resident *= sysconf(_SC_PAGESIZE) / 1024;
    if (f) fclose(f);
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
    struct mallinfo2 info = mallinfo2();
    m.heap = (long)((info.uordblks + info.hblkhd) / 1024);
#endif
#endif
    return m;
}

static void print_progress(long seconds) {
    memory_use m = memory_used();
    printf("%5ld s: %ld rounds (%ld emulated, %ld with faults), %ld requests, %ld compared, "
           "%ld cancelled, %ld refused, %ld faults; heap %ld KiB, resident %ld KiB\n",
           seconds, total.rounds, total.emulated, total.with_faults, total.requests, total.compared,
           total.cancelled, total.refused, total.faults, m.heap, m.resident);
}

static void print_coverage(void) {
    printf("%ld steps, %ld preemptions, %ld blocks swapped, %ld prefix hits, "
           "%ld proposals accepted, %ld graph replays\n",
           total.steps, total.preemptions, total.swapped, total.hits, total.accepted,
           total.replays);
}

/* early: the highest value in the first third of the run; late: the lowest in the last third.
 * Single values vary with the free memory that the allocator retains. */
static bool memory_is_flat(memory_use early, memory_use late) {
    bool flat = late.heap <= early.heap + 128 && late.resident <= early.resident + 16 * 1024;
    if (flat) return true;
    fprintf(stderr, "memory has grown: heap from %ld to %ld KiB, resident from %ld to %ld KiB\n",
            early.heap, late.heap, early.resident, late.resident);
    return false;
}

static void soak(double minutes, uint64_t seed) {
    time_t start = time(NULL);
    long seconds = 0, printed_at = 0;
    memory_use early = {0, 0}, late = {LONG_MAX, LONG_MAX};
    printf("soak: %g minutes from seed %llu\n", minutes, (unsigned long long)seed);
    while ((double)seconds < minutes * 60 && total.failed < MAX_FAILURES) {
        try_round(seed++);
        memory_use m = memory_used();
        if ((double)seconds <= minutes * 20) {
            early.heap = (long)llm__max(early.heap, m.heap);
            early.resident = (long)llm__max(early.resident, m.resident);
        } else if ((double)seconds >= minutes * 40) {
            late.heap = (long)llm__min(late.heap, m.heap);
            late.resident = (long)llm__min(late.resident, m.resident);
        }
        seconds = (long)(time(NULL) - start);
        if (seconds - printed_at < 10) continue;
        printed_at = seconds;
        print_progress(seconds);
    }
    print_progress(seconds);
    if (total.failed == 0 && late.heap < LONG_MAX) /* failed rounds leak memory */
        total.failed += !memory_is_flat(early, late);
}

int main(int argc, char **argv) {
    bool single = argc == 3 && !strcmp(argv[1], "--seed");
    double minutes = argc > 1 ? strtod(argv[1], NULL) : 0;
    uint64_t seed = argc == 3 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL) * 1000000;
    if (!single && (!(minutes > 0) || argc > 3)) {
        fprintf(stderr, "usage: soak MINUTES [SEED], or soak --seed SEED\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGSEGV, crash);
    signal(SIGABRT, crash);
    signal(SIGALRM, crash);
    if (single) try_round(seed);
    else soak(minutes, seed);
    print_coverage();
    printf("%ld passed, %ld failed\n", total.rounds - total.failed, total.failed);
    return total.failed != 0;
}
