/* The engine through its public API: a request's output depends on the request alone, the engine
 * reports every mistake of a caller and stays usable, nothing leaks, and the engine survives a
 * failed allocation. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>

#include "test_util.h"
#define LLM_DEBUG
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "invariants.h"
#include "engine_util.h"
#include "tiny_model.h"

#define GQA "tests/data/golden/gqa_4_2.gguf"   /* q8_0 */
#define TIED "tests/data/golden/gqa_8_2.gguf"  /* q4_0 */
#define ODD "tests/data/golden/mha_48.gguf"    /* bf16 */
#define SMALL "tests/data/golden/mqa_4_1.gguf" /* f16 */
static const char *const models[] = {GQA, TIED, ODD, SMALL};
enum { N_MODELS = 4, VOCAB = 288, BOS = 286, END = 287, CONTEXT = 128 };

/* The first n ids of row `seed` form a prompt that depends only on `seed`. */
static int32_t prompt_ids[8][CONTEXT];

static const int32_t *some_prompt(int seed) {
    for (int i = 0; i < CONTEXT; i++)
        prompt_ids[seed][i] = (int32_t)(llm_random((uint64_t)seed, 77, (uint64_t)i) * 286);
    return prompt_ids[seed];
}

static llm_request some_request(int seed, int n_prompt, int max_tokens) {
    llm_request r = llm_request_defaults();
    r.prompt = some_prompt(seed);
    r.n_prompt = n_prompt;
    r.max_tokens = max_tokens;
    r.ignore_end = true;
    r.sampling.temperature = 0.9f;
    r.sampling.top_p = 0.95f;
    r.sampling.repetition_penalty = 1.1f;
    r.sampling.seed = 1234 + (uint64_t)seed;
    return r;
}

/* ---- Bit for bit ------------------------------------------------------------------------ */

static void check_same(const llm_model *model, const record *expected,
                       const llm_engine_options *options, llm_request request) {
    record *r = run_alone(model, options, request);
    assert_same(expected, r);
    record_free(r);
}

static void test_block_sizes(void **state) {
    static const int sizes[] = {1, 2, 3, 7, 16, 33, 64, CONTEXT, 1000};
    (void)state;
    for (int m = 0; m < N_MODELS; m++) {
        llm_model *model = model_load(models[m]);
        llm_request request = some_request(m, 50, 30);
        for (int type = 0; type < 2; type++) {
            llm_engine_options o = llm_engine_defaults();
            o.cache_type = type ? LLM_F32 : LLM_F16;
            record *expected = run_alone(model, &o, request);
            for (int i = 0; i < 9; i++) {
                o.block_size = sizes[i];
                check_same(model, expected, &o, request);
            }
            record_free(expected);
        }
        llm_model_free(model);
    }
}

static void test_chunks(void **state) {
    static const int chunks[] = {1, 2, 3, 5, 8, 31, 64, 512};
    (void)state;
    for (int m = 0; m < N_MODELS; m++) {
        llm_model *model = model_load(models[m]);
        llm_request request = some_request(m, 70, 12);
        llm_engine_options o = llm_engine_defaults();
        record *expected = run_alone(model, &o, request);
        assert_int_equal(expected->samples[0].n_rows, 70 + 11);
        for (int i = 0; i < 8; i++)
            for (int naive = 0; naive < 2; naive++) {
                llm_engine_options changed = o;
                changed.max_batch_tokens = chunks[i];
                if (!naive) {
                    check_same(model, expected, &changed, request);
                } else { /* the naive loop has another fixed order of additions */
                    changed.naive_attention = true;
                    record *one = run_alone(model, &changed, request);
                    changed.max_batch_tokens = 17;
                    check_same(model, one, &changed, request);
                    record_free(one);
                }
            }
        record_free(expected);
        llm_model_free(model);
    }
}

static void test_threads(void **state) {
    (void)state;
    for (int m = 0; m < N_MODELS; m++) {
        llm_model *model = model_load(models[m]);
        llm_request request = some_request(m, 60, 12);
        for (int isa = LLM_ISA_PLAIN; isa <= LLM_ISA_BEST; isa++) {
            if (!has_isa((llm_isa)isa)) continue;
            record *expected = NULL;
            for (int threads = 1; threads <= 5; threads++) {
                llm_error err;
                llm_engine_options o = llm_engine_defaults();
                o.backend = llm_cpu_backend(threads, (llm_isa)isa, &err);
                if (!o.backend) fail_msg("%s", err.message);
                record *r = run_alone(model, &o, request);
                if (expected) assert_same(expected, r);
                if (expected) record_free(r);
                else expected = r;
                llm_backend_free(o.backend);
            }
            record_free(expected);
        }
        llm_model_free(model);
    }
}

/* A model of realistic widths, for the tiles and unrolled loops that tiny models do not reach. */
static void test_bundled_model(void **state) {
    static int32_t ids[300];
    (void)state;
    if (access("models/tales-q4_0.gguf", R_OK)) {
        print_message("SKIPPED: models/tales-q4_0.gguf is not there\n");
        skip();
    }
    llm_model *model = model_load("models/tales-q4_0.gguf");
    int vocab = llm_model_config(model)->vocab_size;
    for (int i = 0; i < 300; i++) ids[i] = (int32_t)(llm_random(5, 5, (uint64_t)i) * vocab);
    llm_request request = some_request(0, 1, 8);
    request.prompt = ids;
    request.n_prompt = 300;
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 2;
    o.max_sequences = 2;
    record *expected = run_alone(model, &o, request);
    o.n_threads = 3;
    o.block_size = 5;
    o.max_batch_tokens = 37;
    check_same(model, expected, &o, request);
    o.n_threads = 1;
    o.block_size = 64;
    o.max_batch_tokens = 128;
    check_same(model, expected, &o, request);
    record_free(expected);
    llm_model_free(model);
}

/* Run the same requests one at a time and all at once, in several orders of arrival, and with
 * others that are cancelled, so that blocks are scattered over the pool. */
static void test_batch_composition(void **state) {
    enum { N = 6 };
    (void)state;
    for (int m = 0; m < N_MODELS; m++) {
        llm_model *model = model_load(models[m]);
        llm_request requests[N];
        record *alone[N];
        for (int i = 0; i < N; i++) {
            requests[i] = some_request(i, 1 + 17 * i, i == 3 ? 0 : 8 + 3 * i);
            requests[i].n_samples = i == 2 ? 3 : 1;
            alone[i] = run_alone(model, NULL, requests[i]);
        }
        for (int round = 0; round < 12; round++) {
            llm_error err;
            llm_engine_options o = llm_engine_defaults();
            record *r[N];
            uint64_t victim = 0;
            o.block_size = 1 + round * 3;
            o.max_batch_tokens = round % 3 ? 5 + 9 * round : 512;
            o.max_sequences = 3 + round % 4;
            o.n_threads = 1 + round % 2;
            llm_engine *engine = engine_new(model, &o);
            for (int i = 0; i < N; i++) {
                int which = (i * 5 + round) % N;
                llm_request other = some_request(7, 30, 40);
                r[which] = record_new(model);
                record *unread = record_new(model);
                other.user = unread;
                if (!llm_submit(engine, &other, &victim, &err)) fail_msg("%s", err.message);
                unread->id = victim;
                record_submit(engine, r[which], requests[which], true);
                for (int k = 0; k < i + round % 5; k++) {
                    assert_int_not_equal(llm_step(engine, &err), -1);
                    record_events(engine);
                }
                llm_cancel(engine, victim, &err); /* fails if it has already ended */
                record_events(engine);
                assert_int_equal(unread->samples[0].n_ends, 1);
                record_free(unread);
            }
            record_drain(engine);
            for (int i = 0; i < N; i++) {
                assert_same(alone[i], r[i]);
                record_free(r[i]);
            }
            assert_idle(engine);
            llm_engine_free(engine);
        }
        for (int i = 0; i < N; i++) record_free(alone[i]);
        llm_model_free(model);
    }
}

/* Sample s uses the random stream (seed, s) and shares the prompt's blocks. Its output does not
 * depend on the number of samples. */
static void test_samples(void **state) {
    (void)state;
    llm_model *model = model_load(GQA);
    /* 32 is a whole number of blocks: nothing to copy */
    for (int n_prompt = 30; n_prompt <= 33; n_prompt++) {
        llm_request request = some_request(1, n_prompt, 20);
        request.n_samples = 5;
        record *five = run_alone(model, NULL, request);
        request.n_samples = 1;
        record *one = run_alone(model, NULL, request);
        request.n_samples = 3;
        llm_engine_options o = llm_engine_defaults();
        o.max_batch_tokens = 2; /* fewer tokens than sequences */
        o.max_sequences = 3;
        record *three = run_alone(model, &o, request);
        assert_same_sample(&one->samples[0], &five->samples[0], VOCAB);
        for (int s = 0; s < 3; s++)
            assert_same_sample(&three->samples[s], &five->samples[s], VOCAB);
        for (int s = 0; s < 5; s++) {
            assert_int_equal(five->samples[s].n_tokens, 20);
            for (int t = 0; t < s; t++)
                assert_memory_not_equal(five->samples[s].tokens, five->samples[t].tokens,
                                        20 * sizeof(int32_t));
        }
        /* check a sample's cache: its tokens as the prompt of a new request give the same last
         * logits */
        for (int s = 0; s < 5; s++) {
            int32_t ids[CONTEXT];
            memcpy(ids, request.prompt, sizeof(int32_t) * (size_t)n_prompt);
            memcpy(ids + n_prompt, five->samples[s].tokens, sizeof(int32_t) * 19);
            llm_request again = request;
            again.prompt = ids;
            again.n_prompt = n_prompt + 19;
            again.n_samples = 1;
            again.max_tokens = 0;
            record *r = run_alone(model, NULL, again);
            const sample_record *a = &r->samples[0], *b = &five->samples[s];
            assert_memory_equal(a->logits + (size_t)(a->n_rows - 1) * VOCAB,
                                b->logits + (size_t)(b->n_rows - 1) * VOCAB, VOCAB * sizeof(float));
            record_free(r);
        }
        record_free(one);
        record_free(three);
        record_free(five);
    }
    llm_model_free(model);
}

static void test_seeds(void **state) {
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_request request = some_request(0, 5, 30);
    record *a = run_alone(model, NULL, request), *b = run_alone(model, NULL, request);
    assert_same(a, b);
    request.sampling.seed++;
    record *c = run_alone(model, NULL, request);
    assert_memory_not_equal(a->samples[0].tokens, c->samples[0].tokens, 30 * sizeof(int32_t));
    record_free(a);
    record_free(b);
    record_free(c);
    llm_model_free(model);
}

/* Random submits, steps, cancels and reads: each request that is not cancelled gives the same
 * output as alone, and each sample ends exactly once. */
static void random_calls(const llm_model *model, record *const *alone, const llm_request *requests,
                        int n_requests, uint64_t seed) {
    enum { MAX = 60 };
    uint64_t draws = 0;
#define PICK(n) ((int)(llm_random(seed, 0, draws++) * (n)))
    llm_error err;
    llm_engine_options o = llm_engine_defaults();
    o.block_size = 1 + PICK(20);
    o.max_sequences = 3 + PICK(4);
    o.max_batch_tokens = 1 + PICK(40);
    o.n_threads = 1 + PICK(2);
    o.context_length = CONTEXT - PICK(3) * 4;
    /* at least one context, so that every request fits; often less than two, so that some wait */
    o.cache_bytes = llm_model_cache_bytes_per_token(model, LLM_F16) *
                    (uint64_t)(3 * CONTEXT + o.block_size * 4 + PICK(100));
    llm_engine *engine = engine_new(model, &o);
    record *r[MAX];
    int kind[MAX], n = 0;
    bool cancelled[MAX] = {false};
    for (int i = 0; i < 300; i++) {
        int what = PICK(10);
        if (what < 2 && n < MAX) {
            kind[n] = PICK(n_requests);
            r[n] = record_new(model);
            record_submit(engine, r[n], requests[kind[n]], true);
            n++;
        } else if (what == 2 && n) {
            int victim = PICK(n);
            int live = 0;
            for (int s = 0; s < requests[kind[victim]].n_samples; s++)
                live += !r[victim]->samples[s].n_ends;
            bool ok = llm_cancel(engine, r[victim]->id, &err);
            if (live == 0) assert_false(ok); /* the request has ended */
            if (ok) cancelled[victim] = true;
            else assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
            record_events(engine); /* read all: the next step drops unread events */
        } else {
            assert_int_not_equal(llm_step(engine, &err), -1);
            record_events(engine);
        }
        llm_statistics s = llm_engine_statistics(engine);
        assert_in_range(s.blocks_free, 0, s.blocks_total);
        assert_true(s.slots_used <= (s.blocks_total - s.blocks_free) * s.block_size);
        assert_true(s.running <= o.max_sequences);
        assert_true(s.blocks_peak >= s.blocks_total - s.blocks_free);
    }
    record_drain(engine);
    assert_idle(engine);
    for (int i = 0; i < n; i++) {
        for (int s = 0; s < requests[kind[i]].n_samples; s++)
            assert_int_equal(r[i]->samples[s].n_ends, 1);
        if (!cancelled[i]) assert_same(alone[kind[i]], r[i]);
        record_free(r[i]);
    }
    llm_engine_free(engine);
#undef PICK
}

static void test_random_calls(void **state) {
    enum { N = 6 };
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_request requests[N];
    record *alone[N];
    for (int i = 0; i < N; i++) {
        requests[i] = some_request(i, 1 + 13 * i, i == 4 ? 0 : 25 - 3 * i);
        requests[i].n_samples = i == 1 ? 3 : i == 5 ? 2 : 1;
        alone[i] = run_alone(model, NULL, requests[i]);
    }
    for (uint64_t seed = 1; seed <= 25; seed++) random_calls(model, alone, requests, N, seed);
    for (int i = 0; i < N; i++) record_free(alone[i]);
    llm_model_free(model);
}

/* One model shared by several engines, each in a thread of its own. */
static void *run_in_thread(void *model) {
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    return run_alone((const llm_model *)model, &o, some_request(2, 40, 20));
}

static void test_model_shared_by_threads(void **state) {
    pthread_t threads[3];
    (void)state;
    llm_model *model = model_load(TIED);
    some_prompt(2);
    record *expected = (record *)run_in_thread(model);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_in_thread, model), 0);
    for (int i = 0; i < 3; i++) {
        void *r = NULL;
        assert_int_equal(pthread_join(threads[i], &r), 0);
        assert_same(expected, (record *)r);
        record_free((record *)r);
    }
    record_free(expected);
    llm_model_free(model);
}

/* ---- How a request ends ------------------------------------------------------------------ */

static void test_max_tokens(void **state) {
    (void)state;
    llm_model *model = model_load(SMALL);
    for (int max = 0; max <= 3; max++) {
        record *r = run_alone(model, NULL, some_request(0, 10, max));
        assert_int_equal(r->samples[0].n_tokens, max);
        assert_int_equal(r->samples[0].n_ends, 1);
        assert_int_equal(r->samples[0].finish, LLM_FINISH_LENGTH);
        assert_int_equal(r->samples[0].n_rows, 10 + (max ? max - 1 : 0));
        for (int i = 0; i < r->samples[0].n_rows; i++)
            assert_int_equal(r->samples[0].positions[i], i);
        record_free(r);
    }
    /* a negative or too large max_tokens generates up to the end of the context: the model's, or a
     * shorter one */
    for (int context = CONTEXT; context >= 32; context -= 96)
        for (int max = -1; max < 1000; max += 500) {
            llm_engine_options o = llm_engine_defaults();
            o.context_length = context;
            record *r = run_alone(model, &o, some_request(0, 10, max));
            assert_int_equal(r->samples[0].n_tokens, context - 10);
            assert_int_equal(r->samples[0].finish, LLM_FINISH_LENGTH);
            record_free(r);
        }
    /* a prompt that fills the context leaves no room for output */
    record *r = run_alone(model, NULL, some_request(0, CONTEXT, -1));
    assert_int_equal(r->samples[0].n_tokens, 0);
    assert_int_equal(r->samples[0].n_ends, 1);
    record_free(r);
    /* without a hook, max_tokens = 0 with several samples still ends them all */
    llm_engine *engine = engine_new(model, NULL);
    llm_request silent = some_request(0, 40, 0);
    silent.n_samples = 3;
    r = record_new(model);
    record_submit(engine, r, silent, false);
    record_drain(engine);
    for (int s = 0; s < 3; s++) assert_int_equal(r->samples[s].n_ends, 1);
    assert_idle(engine);
    record_free(r);
    llm_engine_free(engine);
    llm_model_free(model);
}

/* Make the request produce these tokens, through its logits hook. */
static record *run_forced(llm_engine *engine, llm_request request, const int32_t *tokens, int n) {
    static int32_t forced[CONTEXT];
    for (int i = 0; i < CONTEXT; i++) forced[i] = -1;
    memcpy(forced + request.n_prompt - 1, tokens, sizeof(int32_t) * (size_t)n);
    record *r = record_new(llm_engine_model(engine));
    r->forced = forced;
    r->force_until = CONTEXT;
    record_submit(engine, r, request, true);
    record_drain(engine);
    return r;
}

static void test_end_token(void **state) {
    static const int32_t text[] = {40, 41, 42, END, 43, 44};
    (void)state;
    llm_model *model = model_load(SMALL);
    const llm_tokenizer *t = llm_model_tokenizer(model);
    assert_int_equal(llm_tokenizer_eos(t), END);
    assert_int_equal(llm_tokenizer_bos(t), BOS);
    llm_engine *engine = engine_new(model, NULL);
    llm_request request = some_request(0, 9, 6);
    request.sampling = llm_sampling_defaults();
    record *r = run_forced(engine, request, text, 6); /* ignore_end is set */
    assert_int_equal(r->samples[0].n_tokens, 6);
    assert_int_equal(r->samples[0].finish, LLM_FINISH_LENGTH);
    assert_memory_equal(r->samples[0].tokens, text, sizeof text);
    record_free(r);
    request.ignore_end = false;
    r = run_forced(engine, request, text, 6);
    assert_int_equal(r->samples[0].n_tokens, 4);
    assert_int_equal(r->samples[0].finish, LLM_FINISH_END);
    assert_int_equal(r->samples[0].n_ends, 1);
    assert_memory_equal(r->samples[0].tokens, text, 4 * sizeof(int32_t));
    char expected[64];
    llm_error err;
    /* the end token has no text */
    int64_t length = llm_detokenize(t, text, 3, expected, sizeof expected, &err);
    assert_int_equal(r->samples[0].text_length, length);
    assert_memory_equal(r->samples[0].text, expected, (size_t)length);
    record_free(r);
    r = run_forced(engine, request, text + 3, 1); /* EOS is the first token */
    assert_int_equal(r->samples[0].n_tokens, 1);
    assert_int_equal(r->samples[0].text_length, 0);
    assert_int_equal(r->samples[0].finish, LLM_FINISH_END);
    record_free(r);
    assert_idle(engine);
    llm_engine_free(engine);
    llm_model_free(model);
}

static bool is_utf8(const char *text, size_t length) {
    const unsigned char *s = (const unsigned char *)text;
    for (size_t i = 0; i < length;) {
        size_t n = s[i] < 0x80 ? 1 : s[i] < 0xc2 ? 0 : s[i] < 0xe0 ? 2
                 : s[i] < 0xf0 ? 3 : s[i] < 0xf5 ? 4 : 0;
        if (n == 0 || i + n > length) return false;
        for (size_t k = 1; k < n; k++)
            if ((s[i + k] & 0xc0) != 0x80) return false;
        if ((s[i] == 0xe0 && s[i + 1] < 0xa0) || (s[i] == 0xed && s[i + 1] > 0x9f) ||
            (s[i] == 0xf0 && s[i + 1] < 0x90) || (s[i] == 0xf4 && s[i + 1] > 0x8f))
            return false; /* an overlong encoding, a surrogate, or a value above U+10FFFF */
        i += n;
    }
    return true;
}

/* The pieces of text, joined, are the text of all tokens, and no piece splits a character. */
static void test_streamed_text(void **state) {
    static const char text[] =
        "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x90\xba, \xe2\x80\x9cwolf\xe2\x80\x9d";
    int32_t ids[64];
    char joined[512], whole[4096];
    size_t n_joined = 0;
    llm_error err;
    llm_event event;
    (void)state;
    llm_model *model = model_load(SMALL);
    const llm_tokenizer *t = llm_model_tokenizer(model);
    int64_t n = llm_tokenize(t, text, sizeof text - 1, 0, ids, 64, &err);
    assert_in_range(n, 8, 64);
    static int32_t forced[CONTEXT];
    for (int i = 0; i < CONTEXT; i++) forced[i] = -1;
    memcpy(forced + 2, ids, sizeof(int32_t) * (size_t)n);
    record *r = record_new(model);
    r->forced = forced;
    r->force_until = CONTEXT;
    llm_engine *engine = engine_new(model, NULL);
    llm_request request = some_request(0, 3, (int)n);
    request.logits_hook = record_hook;
    request.user = r;
    assert_true(llm_submit(engine, &request, &r->id, &err));
    while (llm_step(engine, &err) > 0)
        while (llm_next_event(engine, &event)) {
            assert_ptr_equal(event.user, r);
            if (event.text_length) /* a piece starts with the first byte of a character */
                assert_int_not_equal((unsigned char)event.text[0] & 0xc0, 0x80);
            memcpy(joined + n_joined, event.text, event.text_length);
            n_joined += event.text_length;
        }
    assert_int_equal(n_joined, sizeof text - 1);
    assert_memory_equal(joined, text, n_joined);
    record_free(r);
    llm_engine_free(engine);

    /* Random tokens are mostly invalid UTF-8. The text is always valid: U+FFFD replaces each
     * invalid byte. */
    for (int seed = 0; seed < 8; seed++) {
        r = run_alone(model, NULL, some_request(seed, 6, 60));
        int64_t length = llm_detokenize(t, r->samples[0].tokens, 60, whole, sizeof whole, &err);
        assert_true(length > 0 && !is_utf8(whole, (size_t)length));
        assert_true(is_utf8(r->samples[0].text, r->samples[0].text_length));
        record_free(r);
    }
    llm_model_free(model);
}

/* Cancel after k steps, for every k: while the request waits, in the middle of its prompt, and
 * while it generates. */
static void test_cancel_at_any_step(void **state) {
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_request request = some_request(3, 40, 10), other = some_request(4, 20, 30);
    request.n_samples = 3;
    record *alone = run_alone(model, NULL, other);
    for (int steps = 0; steps < 22; steps++) {
        llm_error err;
        llm_engine_options o = llm_engine_defaults();
        o.max_batch_tokens = 8;
        o.max_sequences = 4;
        llm_engine *engine = engine_new(model, &o);
        record *a = record_new(model), *b = record_new(model);
        record_submit(engine, a, request, true);
        record_submit(engine, b, other, true);
        int32_t last = -1;
        for (int i = 0; i < steps; i++) {
            assert_int_not_equal(llm_step(engine, &err), -1);
            llm_event event;
            /* for odd i, events are read before the cancel; for even i, they are still unread */
            while (i % 2 && llm_next_event(engine, &event)) {}
        }
        int live = 0;
        bool ok = llm_cancel(engine, a->id, &err);
        llm_event event;
        while (llm_next_event(engine, &event))
            live += event.user == a && event.finish == LLM_FINISH_CANCELLED;
        assert_int_equal(ok, live > 0);
        if (ok) {
            assert_int_equal(live, 3);
            assert_int_equal(err.status, LLM_OK);
        }
        assert_false(llm_cancel(engine, a->id, &err)); /* already cancelled */
        assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
        int more;
        while ((more = llm_step(engine, &err)) > 0)
            while (llm_next_event(engine, &event)) {
                assert_ptr_equal(event.user, b);
                if (event.token >= 0) last = event.token;
            }
        assert_int_equal(more, 0);
        if (last >= 0) assert_int_equal(last, alone->samples[0].tokens[29]);
        assert_idle(engine);
        record_free(a);
        record_free(b);
        llm_engine_free(engine);
    }
    record_free(alone);
    llm_model_free(model);
}

/* Events may stay unread. */
static void test_unread_events(void **state) {
    llm_error err;
    uint64_t id = 0;
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_engine *engine = engine_new(model, NULL);
    llm_request request = some_request(0, 5, 3);
    for (int i = 0; i < 100; i++) {
        request.n_samples = 1 + i % 7;
        assert_true(llm_submit(engine, &request, &id, &err));
        if (i % 10 == 9) assert_int_equal(llm_step(engine, &err), 1);
        assert_true(llm_cancel(engine, id, &err));
    }
    for (int i = 0; i < 20; i++) assert_true(llm_submit(engine, &request, &id, &err));
    while (llm_step(engine, &err) > 0) {}
    assert_int_equal(err.status, LLM_OK);
    assert_idle(engine);
    for (int i = 0; i < 20; i++) assert_true(llm_submit(engine, &request, &id, &err));
    llm_step(engine, &err);
    llm_engine_free(engine); /* while requests are still running */
    llm_engine_free(NULL);
    llm_model_free(model);
}

/* ---- Events, against a model of the rules ------------------------------------------------- */

/* A request whose samples follow a script: a hook forces each token. */
enum { SCRIPT = 12, WRITERS = 3, LETTER = 3, TINY_END = 2 }; /* LETTER: the id of 'a' */

typedef struct script {
    int32_t tokens[WRITERS][SCRIPT];
    float logprobs[WRITERS][SCRIPT]; /* logprobs of the script's tokens, by the model's logits */
    int n_prompt, vocab;
} script;

static void force_script(void *user, uint64_t request, int sample, int position, float *logits) {
    script *s = (script *)user;
    int i = position + 1 - s->n_prompt;
    double sum = 0;
    (void)request;
    if (i < 0) return;
    for (int v = 0; v < s->vocab; v++) {
        /* the model's own logits: earlier calls did not change them */
        assert_true(fabsf(logits[v]) < 1e3f);
        sum += exp((double)logits[v]);
    }
    s->logprobs[sample][i] = (float)((double)logits[s->tokens[sample][i]] - log(sum));
    logits[s->tokens[sample][i]] = 1e30f;
}

/* The expected output of one sample so far. */
typedef struct writer {
    char text[SCRIPT + 1];
    int length, shown, n_tokens;
    bool ended;
} writer;

/* The position of the first stop text in the text; -1: none. */
static int first_stop(const llm_request *r, const char *text) {
    int first = -1;
    for (int i = 0; i < r->n_stop; i++) {
        const char *at = strstr(text, r->stop[i]);
        if (at && (first < 0 || at - text < first)) first = (int)(at - text);
    }
    return first;
}

/* The length of the text that cannot become part of a stop text any more, and so can be emitted. */
static int certain_length(const llm_request *r, const writer *w) {
    int first = w->length;
    for (int i = 0; i < r->n_stop; i++)
        for (int at = 0; at < first; at++)
            if (!strncmp(r->stop[i], w->text + at, (size_t)(w->length - at))) first = at;
    return first;
}

/* Check that the next event is this sample's, with this token (-1: cancelled). Returns the finish
 * reason that it must have. */
static llm_finish assert_event(llm_engine *engine, const llm_request *r, const script *s,
                               uint64_t id, int sample, writer *w, int32_t token) {
    llm_event event;
    bool end = token == TINY_END && !r->ignore_end;
    llm_finish finish = LLM_FINISH_NONE;
    if (w->n_tokens + 1 == r->max_tokens) finish = LLM_FINISH_LENGTH;
    if (end) finish = LLM_FINISH_END;
    if (token < 0) finish = LLM_FINISH_CANCELLED;
    if (token >= LETTER) w->text[w->length++] = (char)('a' + token - LETTER);
    int stop = first_stop(r, w->text), shown = finish ? w->length : certain_length(r, w);
    if (stop >= 0) shown = stop, finish = LLM_FINISH_STOP;
    assert_true(llm_next_event(engine, &event));
    assert_int_equal(event.request, id);
    assert_ptr_equal(event.user, s);
    assert_int_equal(event.sample, sample);
    assert_int_equal(event.token, token);
    assert_int_equal(event.index, w->n_tokens);
    assert_int_equal(event.finish, finish);
    assert_false(event.accepted);
    if (token >= 0) assert_true(fabsf(event.logprob - s->logprobs[sample][w->n_tokens]) < 1e-4f);
    assert_int_equal(event.text_length, shown - w->shown);
    if (shown > w->shown) assert_memory_equal(event.text, w->text + w->shown, event.text_length);
    w->shown = shown;
    w->n_tokens += token >= 0;
    w->ended = finish != LLM_FINISH_NONE;
    return finish;
}

/* One request with random scripts, stop texts and limits. Some are cancelled before the events of a
 * step are read. Counts the finish reasons in `ends`. */
static void check_events(llm_engine *engine, test_random *random, int ends[5]) {
    static const int32_t prompt[] = {5, 9, 4, 7};
    char stops[3][5], given[3][5];
    const char *list[] = {stops[0], stops[1], stops[2]};
    const char *given_list[] = {given[0], given[1], given[2]};
    script s;
    writer w[WRITERS];
    llm_error err;
    llm_request r = llm_request_defaults();
    memset(&s, 0, sizeof s);
    memset(w, 0, sizeof w);
    memset(stops, 0, sizeof stops);
    r.prompt = prompt;
    r.n_prompt = s.n_prompt = 1 + random_below(random, 4);
    s.vocab = llm_model_config(llm_engine_model(engine))->vocab_size;
    r.max_tokens = 1 + random_below(random, SCRIPT);
    r.n_samples = 1 + random_below(random, WRITERS);
    r.ignore_end = random_below(random, 2);
    r.n_stop = random_below(random, 4);
    for (int i = 0; i < r.n_stop; i++)
        for (int k = random_below(random, 4); k >= 0; k--)
            stops[i][k] = (char)('a' + random_below(random, 2));
    for (int i = 0; i < WRITERS; i++)
        for (int k = 0; k < SCRIPT; k++)
            s.tokens[i][k] = random_below(random, 20) ? LETTER + random_below(random, 3) : TINY_END;
    r.logits_hook = force_script;
    r.user = &s;
    r.stop = given_list;
    memcpy(given, stops, sizeof given);
    uint64_t id;
    assert_true(llm_submit(engine, &r, &id, &err));
    memset(given, 'a', sizeof given - 1); /* the engine must have its own copies */
    r.stop = list;

    int cancelled_at = random_below(random, 2 * SCRIPT), live = r.n_samples;
    for (int k = 0; live > 0; k++) {
        assert_int_equal(llm_step(engine, &err), 1);
        bool cancelled = k == cancelled_at && llm_cancel(engine, id, &err);
        for (int i = 0; i < r.n_samples; i++) {
            if (w[i].ended) continue;
            ends[assert_event(engine, &r, &s, id, i, &w[i], s.tokens[i][k])]++;
            live -= w[i].ended;
        }
        if (k == cancelled_at) assert_int_equal(cancelled, live > 0);
        for (int i = 0; cancelled && i < r.n_samples; i++) {
            if (w[i].ended) continue;
            ends[assert_event(engine, &r, &s, id, i, &w[i], -1)]++;
            live--;
        }
        llm_event none;
        assert_false(llm_next_event(engine, &none));
    }
    assert_idle(engine);
    assert_int_equal(llm_step(engine, &err), 0);
}

static void test_events(void **state) {
    test_random random = {4};
    int ends[5] = {0};
    (void)state;
    tiny_model m = tiny_model_new(tiny_defaults());
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    llm_engine *engine = engine_new(m.model, &o);
    for (int i = 0; i < 600; i++) check_events(engine, &random, ends);
    for (int i = LLM_FINISH_END; i <= LLM_FINISH_CANCELLED; i++) assert_true(ends[i] > 30);
    llm_engine_free(engine);
    tiny_model_free(&m);
}

/* Unread events stay in the queue when more requests are submitted. */
static void test_unread_events_survive_submit(void **state) {
    llm_error err;
    llm_event event;
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_engine *engine = engine_new(model, NULL);
    llm_request request = some_request(0, 5, 3);
    for (int i = 0; i < 4; i++) assert_true(llm_submit(engine, &request, NULL, &err));
    assert_int_equal(llm_step(engine, &err), 1);
    assert_true(llm_next_event(engine, &event));
    for (int i = 0; i < 100; i++) assert_true(llm_submit(engine, &request, NULL, &err));
    for (uint64_t id = 2; id <= 4; id++) {
        assert_true(llm_next_event(engine, &event));
        assert_int_equal(event.request, id);
        assert_int_equal(event.index, 0);
    }
    assert_false(llm_next_event(engine, &event));
    llm_engine_free(engine);
    llm_model_free(model);
}

/* An incomplete character at the end of the output is shown as U+FFFD, whatever ended the output. A
 * stop text completed by this U+FFFD cuts the text, but a cancelled sample remains cancelled. */
static void test_incomplete_characters(void **state) {
    static const char *const stops[] = {"\xef\xbf\xbd"};
    int32_t ids[2];
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_error err;
    assert_int_equal(llm_tokenize(llm_model_tokenizer(model), "\xc3", 1, 0, ids, 2, &err), 1);
    ids[1] = END;
    llm_engine *engine = engine_new(model, NULL);
    for (int kind = 0; kind < 3; kind++)
        for (int stop = 0; stop < 2; stop++) {
            static int32_t forced[CONTEXT];
            static const llm_finish ends[] = {LLM_FINISH_LENGTH, LLM_FINISH_END,
                                              LLM_FINISH_CANCELLED};
            llm_request request = some_request(0, 4, kind == 0 ? 1 : 3);
            for (int i = 0; i < CONTEXT; i++) forced[i] = -1;
            memcpy(forced + 3, ids, sizeof ids);
            request.ignore_end = false;
            request.stop = stops;
            request.n_stop = stop;
            record *r = record_new(model);
            r->forced = forced;
            r->force_until = CONTEXT;
            record_submit(engine, r, request, true);
            assert_int_equal(llm_step(engine, &err), 1);
            record_events(engine);
            /* the character may still be completed */
            if (kind) assert_int_equal(r->samples[0].text_length, 0);
            if (kind == 2) assert_true(llm_cancel(engine, r->id, &err));
            record_events(engine);
            record_drain(engine);
            assert_int_equal(r->samples[0].text_length, stop ? 0 : 3);
            if (!stop) assert_string_equal(r->samples[0].text, stops[0]);
            assert_int_equal(r->samples[0].finish, stop && kind < 2 ? LLM_FINISH_STOP : ends[kind]);
            record_free(r);
        }
    assert_idle(engine);
    llm_engine_free(engine);
    llm_model_free(model);
}

/* ---- Draws of a device --------------------------------------------------------------------- */

static llm_backend *cpu;
static int n_device_draws, n_later_calls; /* calls that begin after row 0 */

/* A device's `sample` function, as plain loops in floating point. */
static bool plain_sample(void *context, float *logits, int vocab, const llm_draw *draws, int n,
                         int32_t *out, float *logprobs, llm_error *err) {
    assert_int_equal(vocab, VOCAB);
    for (int i = 0; i < n; i++) {
        const llm_draw *d = &draws[i];
        const float *from = logits + (size_t)d->row * VOCAB;
        float row[VOCAB];
        if (!cpu->download(context, row, from, sizeof row, err)) return false;
        double x[VOCAB], most = -INFINITY, sum = 0, all = 0;
        int32_t best = 0;
        for (int v = 0; v < vocab; v++) {
            x[v] = (double)row[v];
            all += exp(x[v]);
        }
        for (int k = 0; k < d->n_adjustments; k++) {
            const llm_adjustment *a = &d->adjustments[k];
            double *y = &x[a->token];
            *y += (double)a->bias;
            *y = (*y > 0 ? *y / (double)a->penalty : *y * (double)a->penalty) - (double)a->minus;
        }
        for (int v = 0; v < vocab; v++)
            if (x[v] > most) most = x[v], best = v;
        if (d->sampling.temperature > 0) {
            double t = (double)d->sampling.temperature, point = (double)d->random * 0x1p-64;
            for (int v = 0; v < vocab; v++) sum += exp((x[v] - most) / t);
            for (best = 0, point *= sum; best < vocab - 1; best++)
                if ((point -= exp((x[best] - most) / t)) < 0) break;
        }
        out[i] = best;
        logprobs[i] = (float)((double)row[best] - log(all));
        if (d->n_top) llm__top_logprobs(row, vocab, d->n_top, d->top);
    }
    n_device_draws += n;
    n_later_calls += draws[0].row > 0;
    return true;
}

/* A device draws the same tokens as the host: for each row and sample, with the row's adjustments
 * and its random number, and also where hooks keep some rows on the host. Lists of adjustments that
 * do not fit into the sampler's memory together are drawn in several calls. */
static void test_device_draws(void **state) {
    enum { N = 8 };
    static const int windows[] = {0, 1, 2, 3, 7, 64};
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_error err;
    cpu = llm_cpu_backend(1, LLM_ISA_BEST, &err);
    assert_non_null(cpu);
    llm_backend device = *cpu;
    device.sample = plain_sample;
    llm_logit_bias bias[VOCAB];
    for (int v = 0; v < VOCAB; v++) {
        bias[v].token = v;
        bias[v].bias = (float)llm_random(3, 0, (uint64_t)v);
    }
    for (int w = 0; w < 6; w++) {
        record *r[2][N];
        n_device_draws = n_later_calls = 0;
        for (int host = 0; host < 2; host++) {
            llm_engine_options o = llm_engine_defaults();
            o.backend = &device;
            o.host_sampling = host;
            o.max_batch_tokens = o.max_sequences = 8; /* short lists of draws, too */
            llm_engine *engine = engine_new(model, &o);
            for (int i = 0; i < N; i++) {
                llm_request request = some_request(i, 3 + 5 * i, 20);
                request.sampling.bias = bias;
                request.sampling.n_bias = w > 3 ? VOCAB : w;
                request.sampling.presence_penalty = w % 2 ? 0.3f : 0;
                request.sampling.frequency_penalty = w % 3 ? 0.2f : 0;
                request.top_logprobs = w % 3 ? i : 0;
                request.n_samples = 1 + i % 3;
                request.sampling.top_p = 1;
                request.sampling.temperature = i % 2 ? 0.8f : 0;
                request.sampling.repetition_penalty = 1.5f;
                request.sampling.penalty_window = windows[w];
                if (w == 5 && i % 2 == 0) { /* greedy proposals; the bias makes the text repeat */
                    request.sampling.repetition_penalty = 1;
                    request.sampling.presence_penalty = request.sampling.frequency_penalty = 0;
                    request.lookup = true;
                    request.speculate = 3;
                }
                r[host][i] = record_new(model);
                record_submit(engine, r[host][i], request, w < 4 && (i == 2 || i == 5));
            }
            record_drain(engine);
            if (w == 5) assert_true(llm_engine_statistics(engine).accepted > 0);
            llm_engine_free(engine);
        }
        /* all but the draws of hooks; proposals, also rejected ones, add draws */
        assert_in_range(n_device_draws, 20 * (w < 4 ? 9 : 15), w < 5 ? 20 * (w < 4 ? 9 : 15) : 900);
        assert_true(w != 4 || n_later_calls > 10);
        for (int i = 0; i < N; i++) {
            for (int k = 0; k < 1 + i % 3; k++) {
                const sample_record *a = &r[0][i]->samples[k], *b = &r[1][i]->samples[k];
                assert_int_equal(a->n_tokens, 20);
                assert_memory_equal(a->tokens, b->tokens, 20 * sizeof(int32_t));
                for (int t = 0; t < 20; t++) {
                    assert_true(fabsf(a->logprobs[t] - b->logprobs[t]) < 1e-4f);
                    if (w % 3 && i) {
                        assert_int_equal(a->tops[t].token, b->tops[t].token);
                        assert_true(fabsf(a->tops[t].logprob - b->tops[t].logprob) < 1e-4f);
                    }
                }
            }
            record_free(r[0][i]);
            record_free(r[1][i]);
        }
    }
    llm_backend_free(cpu);
    llm_model_free(model);
}

/* ---- Mistakes of the caller ----------------------------------------------------------------- */

static llm_engine *tested; /* the engine that must survive each mistake */

/* Check the error: its status, its option (NULL: none), whose name begins the message, and that the
 * message contains `word`. */
static void check_error(const llm_error *err, llm_status status, const char *option,
                        const char *word) {
    assert_int_equal(err->status, status);
    if (option) assert_string_equal(err->option, option);
    else assert_null(err->option);
    if (option && strncmp(err->message, option, strlen(option)))
        fail_msg("\"%s\" does not begin with \"%s\"", err->message, option);
    if (!strstr(err->message, word)) fail_msg("\"%s\" does not say \"%s\"", err->message, word);
    assert_null(strchr(err->message, '\n'));
}

static void assert_refused_saying(llm_request request, llm_status status, const char *option,
                                  const char *word) {
    llm_error err;
    uint64_t id = 99;
    memset(&err, 0x55, sizeof err);
    assert_false(llm_submit(tested, &request, &id, &err));
    check_error(&err, status, option, word);
    assert_false(llm_submit(tested, &request, NULL, NULL)); /* the error argument is optional */
    record *r = record_new(llm_engine_model(tested)); /* the engine still works */
    record_submit(tested, r, some_request(0, 2, 1), false);
    record_drain(tested);
    assert_int_equal(r->samples[0].n_tokens, 1);
    record_free(r);
    assert_idle(tested);
}

static void assert_refused(llm_request request, llm_status status, const char *option) {
    assert_refused_saying(request, status, option, option);
}

static void test_refused_requests(void **state) {
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_engine_options o = llm_engine_defaults();
    o.cache_bytes = llm_model_cache_bytes_per_token(model, LLM_F16) * 96;
    tested = engine_new(model, &o);
    int32_t ids[CONTEXT + 1] = {0};
    llm_request good = some_request(0, 4, 4), r;
    r = good;
    r.prompt = NULL;
    assert_refused(r, LLM_ERROR_ARGUMENT, "prompt");
    r = good;
    r.n_prompt = 0;
    assert_refused(r, LLM_ERROR_ARGUMENT, "prompt");
    r = good;
    r.n_prompt = -1;
    assert_refused(r, LLM_ERROR_ARGUMENT, "prompt");
    r = good;
    r.prompt = ids;
    ids[2] = VOCAB;
    assert_refused_saying(r, LLM_ERROR_ARGUMENT, "prompt", "288");
    ids[2] = -1;
    assert_refused_saying(r, LLM_ERROR_ARGUMENT, "prompt", "-1");
    ids[2] = 0;
    r.n_prompt = CONTEXT + 1;
    assert_refused_saying(r, LLM_ERROR_CAPACITY, "context_length", "context");
    r.n_prompt = CONTEXT;
    r.max_tokens = 1;
    assert_refused_saying(r, LLM_ERROR_CAPACITY, "context_length", "context");
    r.n_prompt = INT32_MAX;
    r.max_tokens = -1;
    assert_refused_saying(r, LLM_ERROR_CAPACITY, "context_length", "context");
    r = good;
    r.max_tokens = -2;
    assert_refused(r, LLM_ERROR_ARGUMENT, "max_tokens");
    r = good;
    r.max_tokens = -1;
    assert_refused_saying(r, LLM_ERROR_CAPACITY, "cache_bytes",
                          "blocks"); /* 128 tokens do not fit in 96 slots */
    r = good;
    r.max_tokens = 93;
    assert_refused_saying(r, LLM_ERROR_CAPACITY, "cache_bytes", "blocks");
    r.max_tokens = 92; /* requires all six blocks */
    record *whole = record_new(model);
    record_submit(tested, whole, r, false);
    record_drain(tested);
    assert_int_equal(whole->samples[0].n_tokens, 92);
    record_free(whole);
    r = good;
    r.n_samples = 0;
    assert_refused(r, LLM_ERROR_ARGUMENT, "n_samples");
    r = good;
    r.n_samples = -3;
    assert_refused(r, LLM_ERROR_ARGUMENT, "n_samples");
    r = good;
    r.n_samples = 17;
    assert_refused(r, LLM_ERROR_ARGUMENT, "n_samples");
    r = good;
    r.sampling.temperature = NAN;
    assert_refused(r, LLM_ERROR_ARGUMENT, "temperature");
    r = good;
    r.sampling.temperature = -1;
    assert_refused(r, LLM_ERROR_ARGUMENT, "temperature");
    r = good;
    r.sampling.temperature = INFINITY;
    assert_refused(r, LLM_ERROR_ARGUMENT, "temperature");
    r = good; r.sampling.top_k = -1;                 assert_refused(r, LLM_ERROR_ARGUMENT, "top_k");
    r = good; r.sampling.top_p = 0;                  assert_refused(r, LLM_ERROR_ARGUMENT, "top_p");
    r = good; r.sampling.top_p = 1.5f;               assert_refused(r, LLM_ERROR_ARGUMENT, "top_p");
    r = good; r.sampling.top_p = NAN;                assert_refused(r, LLM_ERROR_ARGUMENT, "top_p");
    r = good; r.sampling.min_p = -0.1f;              assert_refused(r, LLM_ERROR_ARGUMENT, "min_p");
    r = good; r.sampling.min_p = NAN;                assert_refused(r, LLM_ERROR_ARGUMENT, "min_p");
    r = good;
    r.sampling.repetition_penalty = 0;
    assert_refused(r, LLM_ERROR_ARGUMENT, "repetition_penalty");
    r = good;
    r.sampling.repetition_penalty = NAN;
    assert_refused(r, LLM_ERROR_ARGUMENT, "repetition_penalty");
    r = good;
    r.sampling.penalty_window = -1;
    assert_refused(r, LLM_ERROR_ARGUMENT, "penalty_window");
    const llm_logit_bias biases[] = {{1 << 30, 2}, {-1, 2}, {3, NAN}};
    for (int i = 0; i < 7; i++) {
        r = good;
        if (i < 3) r.sampling.bias = &biases[i], r.sampling.n_bias = 1;
        if (i == 3) r.sampling.n_bias = 1; /* bias is NULL */
        if (i == 4) r.sampling.presence_penalty = NAN;
        if (i == 5) r.sampling.frequency_penalty = INFINITY;
        if (i == 6) r.top_logprobs = 257;
        assert_refused(r, LLM_ERROR_ARGUMENT,
                       i < 3    ? "bias"
                       : i == 3 ? "n_bias"
                       : i == 4 ? "presence_penalty"
                       : i == 5 ? "frequency_penalty"
                                : "top_logprobs");
    }
    r = good;
    r.speculate = 1;
    assert_refused_saying(r, LLM_ERROR_ARGUMENT, "speculate", "draft");
    r = good;
    r.speculate = 99;
    assert_refused(r, LLM_ERROR_ARGUMENT, "speculate");
    r = good;
    r.n_stop = 1;
    assert_refused(r, LLM_ERROR_ARGUMENT, "n_stop");
    r = good;
    r.n_stop = 1;
    r.stop = (const char *const[]){""};
    assert_refused(r, LLM_ERROR_ARGUMENT, "stop");
    r = good;
    r.n_prompt = 90;
    r.prompt = ids;
    r.max_tokens = 30; /* 8 blocks of 16 tokens of 96 bytes; the message gives units */
    ids[2] = 0;
    assert_refused_saying(
        r, LLM_ERROR_CAPACITY, "cache_bytes",
        " is 9.0 KiB (6 blocks of 16 tokens), and the request may need 12.0 KiB (8 blocks)");
    llm_engine_free(tested);
    llm_model_free(model);
}

static void assert_engine_refused(const llm_model *model, llm_engine_options o, llm_status status,
                                  const char *option, const char *word) {
    llm_error err;
    memset(&err, 0x55, sizeof err);
    assert_null(llm_engine_create(model, &o, &err));
    check_error(&err, status, option, word);
    assert_null(llm_engine_create(model, &o, NULL));
}

static void assert_options_refused(const llm_model *model, llm_engine_options o, llm_status status,
                                   const char *option) {
    assert_engine_refused(model, o, status, option, option);
}

static void test_refused_options(void **state) {
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_engine_options good = llm_engine_defaults(), o;
    assert_engine_refused(NULL, good, LLM_ERROR_ARGUMENT, NULL, "model");
    o = good;
    o.context_length = -1;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "context_length");
    o = good;
    o.context_length = CONTEXT + 1;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "context_length");
    o = good;
    o.block_size = 0;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "block_size");
    o = good;
    o.block_size = -16;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "block_size");
    o = good;
    o.cache_type = LLM_Q8_0;
    assert_engine_refused(model, o, LLM_ERROR_UNSUPPORTED, "cache_type", "f16 or f32");
    o = good;
    o.cache_bytes = 1;
    assert_engine_refused(model, o, LLM_ERROR_ARGUMENT, "cache_bytes",
                          " is 1 byte, and one block of 16 tokens takes 1.5 KiB: a context of 128 "
                          "tokens needs 12.0 KiB");
    o = good;
    o.preempt = (llm_preempt)2;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "preempt");
    o = good;
    o.memory_share = 1.5f;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "memory_share");
    o = good;
    o.max_speculation = 0;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "max_speculation");
    o = good;
    o.max_sequences = 0;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "max_sequences");
    o = good;
    o.max_batch_tokens = 0;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "max_batch_tokens");
    o = good;
    o.n_threads = -1;
    assert_options_refused(model, o, LLM_ERROR_ARGUMENT, "n_threads");
    llm_model_free(model);
}

static void test_wrong_calls(void **state) {
    llm_error err;
    llm_event event;
    llm_request request = some_request(0, 3, 3);
    (void)state;
    err.status = LLM_OK;
    assert_null(llm_model_load("tests/data/there-is-no-such-file.gguf", &err));
    assert_int_equal(err.status, LLM_ERROR_FILE);
    assert_non_null(strstr(err.message, "there-is-no-such-file.gguf"));
    assert_null(llm_model_load("tests/test_engine.c", &err));
    assert_int_equal(err.status, LLM_ERROR_FORMAT);
    /* GGUF, but not a model */
    assert_null(llm_model_load("tests/data/golden/gqa_4_2.golden", &err));
    assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
    assert_null(llm_model_load(NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_null(llm_model_load(NULL, NULL));
    llm_model_free(NULL);
    assert_int_equal(llm_step(NULL, &err), -1);
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_false(llm_submit(NULL, &request, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_false(llm_submit_text(NULL, "x", NULL, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_false(llm_cancel(NULL, 1, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_false(llm_next_event(NULL, &event));
    assert_int_equal(llm_engine_statistics(NULL).steps, 0);

    llm_model *model = model_load(SMALL);
    llm_engine *engine = engine_new(model, NULL);
    assert_ptr_equal(llm_engine_model(engine), model);
    assert_false(llm_next_event(engine, &event));
    err.option = "of an earlier error";
    assert_int_equal(llm_step(engine, &err), 0); /* a step with nothing to do is not an error */
    assert_int_equal(err.status, LLM_OK);
    assert_null(err.option);
    assert_false(llm_submit(engine, NULL, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_false(llm_submit_text(engine, NULL, NULL, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    long live = test_live;
    /* this vocabulary's file does not ask for BOS, so the prompt is empty */
    assert_false(llm_submit_text(engine, "", NULL, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_int_equal(test_live, live);
    assert_false(llm_cancel(engine, 12345, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_non_null(strstr(err.message, "12345"));
    assert_idle(engine);
    llm_engine_free(engine);
    llm_model_free(model);
}

static void test_submit_text(void **state) {
    static const char text[] = "and then the wolf \xff\xc3 said";
    int32_t ids[64];
    llm_error err;
    (void)state;
    llm_model *model = model_load(SMALL);
    int64_t n = llm_tokenize(llm_model_tokenizer(model), text, strlen(text), LLM_TOKENIZE_BOS, ids,
                             64, &err);
    assert_in_range(n, 1, 64);
    llm_request request = some_request(0, 1, 12);
    request.prompt = ids;
    request.n_prompt = (int)n;
    record *expected = run_alone(model, NULL, request), *r = record_new(model);
    llm_engine *engine = engine_new(model, NULL);
    request.prompt = NULL; /* the prompt is ignored */
    request.n_prompt = -5;
    request.user = r;
    request.logits_hook = record_hook;
    assert_true(llm_submit_text(engine, text, &request, &r->id, &err));
    record_drain(engine);
    assert_same(expected, r);
    record_free(expected);
    record_free(r);
    llm_engine_free(engine);
    llm_model_free(model);
}

/* If the file asks for BOS, a prompt made from text begins with it; an empty text becomes BOS. */
static void test_submit_text_with_bos(void **state) {
    static const char *const texts[] = {"", "ab"};
    int32_t ids[8];
    llm_error err;
    (void)state;
    tiny_model m = tiny_model_new(tiny_defaults());
    const llm_tokenizer *t = llm_model_tokenizer(m.model);
    llm_engine *engine = engine_new(m.model, NULL);
    ids[0] = llm_tokenizer_bos(t);
    for (int i = 0; i < 2; i++) {
        llm_request request = llm_request_defaults();
        request.prompt = ids;
        int64_t n = llm_tokenize(t, texts[i], strlen(texts[i]), 0, ids + 1, 7, &err);
        request.n_prompt = 1 + (int)n;
        request.max_tokens = 8;
        record *expected = run_alone(m.model, NULL, request), *r = record_new(m.model);
        request.user = r;
        request.logits_hook = record_hook;
        assert_true(llm_submit_text(engine, texts[i], &request, &r->id, &err));
        record_drain(engine);
        assert_same(expected, r);
        record_free(expected);
        record_free(r);
    }
    llm_engine_free(engine);
    tiny_model_free(&m);
}

/* ---- Statistics and logprobs ----------------------------------------------------------------- */

static void test_statistics(void **state) {
    llm_error err;
    (void)state;
    llm_model *model = model_load(SMALL);
    llm_engine_options o = llm_engine_defaults();
    o.max_sequences = 4;
    o.max_batch_tokens = 16;
    llm_engine *engine = engine_new(model, &o);
    llm_statistics s = llm_engine_statistics(engine);
    assert_int_equal(s.block_size, 16);
    assert_int_equal(s.blocks_total, 4 * CONTEXT / 16);
    assert_int_equal(s.cache_bytes, (uint64_t)s.blocks_total * 16 *
                                        llm_model_cache_bytes_per_token(model, LLM_F16));
    assert_int_equal(llm_model_cache_bytes_per_token(model, LLM_F16), 2 * 3 * 8 * 2);
    assert_true(s.weight_bytes > 0 && s.arena_bytes > 0);
    assert_true(llm_model_step_bytes(model) <= s.weight_bytes);
    record *r[6];
    uint64_t prompts = 0, generated = 0;
    for (int i = 0; i < 6; i++) {
        llm_request request = some_request(i, 5 + 9 * i, 7);
        request.n_samples = i == 3 ? 2 : 1;
        r[i] = record_new(model);
        record_submit(engine, r[i], request, false);
        /* a prompt counts once, however many samples it has */
        prompts += (uint64_t)request.n_prompt;
        generated += 7 * (uint64_t)request.n_samples;
    }
    assert_int_equal(llm_engine_statistics(engine).waiting, 6);
    uint64_t steps = 0;
    int64_t most = 0;
    while (llm_step(engine, &err) > 0) {
        record_events(engine);
        s = llm_engine_statistics(engine);
        assert_int_equal(s.steps, ++steps);
        most = s.blocks_total - s.blocks_free > most ? s.blocks_total - s.blocks_free : most;
        if (s.running) assert_true(s.slots_used > 0);
        /* less than one block is wasted per sequence */
        assert_true((s.blocks_total - s.blocks_free) * 16 - s.slots_used <=
                    15 * (s.running ? s.running : 0));
    }
    s = llm_engine_statistics(engine);
    assert_int_equal(s.prompt_tokens, prompts);
    assert_int_equal(s.generated_tokens, generated);
    assert_int_equal(s.requests_submitted, 6);
    assert_int_equal(s.requests_finished, 6);
    assert_true(s.blocks_peak >= most && s.blocks_peak <= s.blocks_total);
    assert_true(s.step_seconds > 0 &&
                s.forward_seconds + s.sampling_seconds <= s.step_seconds * 1.001);
    assert_idle(engine);
    for (int i = 0; i < 6; i++) record_free(r[i]);
    llm_engine_free(engine);
    llm_model_free(model);
}

/* An event's logprob comes from the model's own logits, regardless of the hook, penalty and
 * temperature. */
static void test_logprobs(void **state) {
    (void)state;
    llm_model *model = model_load(SMALL);
    record *r = run_alone(model, NULL, some_request(1, 12, 20));
    const sample_record *s = &r->samples[0];
    for (int i = 0; i < 20; i++) {
        const float *logits = s->logits + (size_t)(11 + i) * VOCAB;
        double sum = 0;
        for (int v = 0; v < VOCAB; v++) sum += exp((double)logits[v]);
        assert_true(fabs((double)s->logprobs[i] - ((double)logits[s->tokens[i]] - log(sum))) <
                    1e-4);
        assert_true(s->logprobs[i] == llm_logprob(logits, VOCAB, s->tokens[i]));
    }
    record_free(r);
    llm_model_free(model);
}

/* ---- Sampling -------------------------------------------------------------------------------- */

/* Token probabilities after all filters, computed by sorting everything. */
typedef struct ranked { double weight; int id; } ranked;

static int by_rank(const void *a, const void *b) {
    const ranked *x = (const ranked *)a, *y = (const ranked *)b;
    if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
    return x->id - y->id;
}

static void expected_distribution(const llm_sampling *p, const float *logits, int n,
                                  double *probability) {
    ranked *r = (ranked *)malloc((size_t)n * sizeof *r);
    assert_non_null(r);
    double most = -INFINITY, all = 0, sum = 0, kept = 0;
    for (int i = 0; i < n; i++) most = logits[i] > most ? (double)logits[i] : most;
    for (int i = 0; i < n; i++) {
        r[i].weight = exp(((double)logits[i] - most) / (double)p->temperature);
        r[i].id = i;
        probability[i] = 0;
    }
    qsort(r, (size_t)n, sizeof *r, by_rank);
    int limit = p->top_k && p->top_k < n ? p->top_k : n, m = 0;
    for (int i = 0; i < limit; i++) all += r[i].weight;
    for (; m < limit; m++) {
        if (m && (sum >= (double)p->top_p * all * (1 - 1e-9) || r[m].weight < (double)p->min_p))
            break;
        sum += r[m].weight;
    }
    if (p->top_p == 1) /* no top-p filter: only top-k and min-p apply */
        for (m = 1; m < limit && r[m].weight >= (double)p->min_p; m++) {}
    for (int i = 0; i < m; i++) kept += r[i].weight;
    for (int i = 0; i < m; i++) probability[r[i].id] = r[i].weight / kept;
    free(r);
}

/* Compare many draws with the expected distribution, by the chi-squared test. A bin has at least
 * five expected draws; the sum over n bins has mean n and standard deviation sqrt(2 n), and exceeds
 * five deviations by chance once in millions. */
static void check_distribution(const llm_sampling *p, const float *logits, int n) {
    const int draws = repeats(20000, 2000);
    llm__sampler sampler;
    llm_error err;
    double *expected = (double *)malloc((size_t)n * sizeof *expected);
    int *drawn = (int *)calloc((size_t)n, sizeof *drawn);
    assert_true(expected && drawn && llm__sampler_init(&sampler, n, 1, &err));
    expected_distribution(p, logits, n, expected);
    for (int i = 0; i < draws; i++) {
        int32_t id = llm__sample(&sampler, p, logits, (llm__past){NULL, 0, 0}, 3, (uint64_t)i);
        assert_in_range(id, 0, n - 1);
        drawn[id]++;
    }
    double chi = 0, rest_expected = 0, rest_drawn = 0;
    int bins = 0;
    for (int i = 0; i < n; i++) {
        if (expected[i] == 0 && drawn[i]) /* a filtered token is never drawn */
            fail_msg("token %d was drawn at temperature %g, top-k %d, top-p %g, min-p %g", i,
                     (double)p->temperature, p->top_k, (double)p->top_p, (double)p->min_p);
        if (expected[i] * draws < 5) {
            rest_expected += expected[i] * draws;
            rest_drawn += drawn[i];
            continue;
        }
        bins++;
        chi += (drawn[i] - expected[i] * draws) * (drawn[i] - expected[i] * draws) /
               (expected[i] * draws);
    }
    if (rest_expected >= 5) {
        bins++;
        chi += (rest_drawn - rest_expected) * (rest_drawn - rest_expected) / rest_expected;
    }
    if (chi > bins + 5 * sqrt(2.0 * bins) + 5)
        fail_msg("chi squared is %g over %d bins", chi, bins);
    llm__sampler_free(&sampler);
    free(expected);
    free(drawn);
}

static void test_distributions(void **state) {
    static const float temperatures[] = {0.5f, 1, 2}, top_ps[] = {1, 0.9f, 0.5f, 0.01f},
                       min_ps[] = {0, 0.05f, 0.9f};
    static const int top_ks[] = {0, 1, 5, 40, 1000};
    float logits[150];
    (void)state;
    for (int i = 0; i < 150; i++) logits[i] = (float)(8 * llm_random(9, 1, (uint64_t)i) - 4);
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < 5; k++)
            for (int p = 0; p < 4; p++)
                for (int m = 0; m < 3; m++) {
                    llm_sampling s = llm_sampling_defaults();
                    s.temperature = temperatures[t];
                    s.top_k = top_ks[k];
                    s.top_p = top_ps[p];
                    s.min_p = min_ps[m];
                    s.seed = (uint64_t)(1000 * t + 100 * k + 10 * p + m);
                    check_distribution(&s, logits, 150);
                }
}

static int32_t sample_once(const llm_sampling *p, const float *logits, int n, const int32_t *recent,
                           int n_recent) {
    llm__sampler sampler;
    llm_error err;
    assert_true(llm__sampler_init(&sampler, n, 1, &err));
    int32_t id = llm__sample(&sampler, p, logits, (llm__past){recent, n_recent, n_recent}, 0, 0);
    llm__sampler_free(&sampler);
    return id;
}

static void test_extreme_logits(void **state) {
    float bad[5][4] = {{NAN, 1, NAN, 0}, {-INFINITY, -INFINITY, 2, -INFINITY}, {NAN, NAN, NAN, NAN},
                       {INFINITY, 1, INFINITY, NAN}, {-INFINITY, -INFINITY, -INFINITY, -INFINITY}};
    int32_t right[5] = {1, 2, 0, 0, 0};
    llm_sampling p = llm_sampling_defaults();
    (void)state;
    for (int i = 0; i < 5; i++) {
        p.temperature = 0;
        assert_int_equal(sample_once(&p, bad[i], 4, NULL, 0), right[i]);
        p.temperature = 1e-6f; /* nearly greedy: must not overflow */
        assert_in_range(sample_once(&p, bad[i], 4, NULL, 0), 0, 3);
        p.temperature = 1;
        p.top_k = i;
        p.top_p = 0.9f;
        int32_t id = sample_once(&p, bad[i], 4, NULL, 0);
        assert_in_range(id, 0, 3);
        if (i == 1) assert_int_equal(id, 2);
        if (i == 0) assert_true(id == 1 || id == 3); /* never a NaN */
    }
    float equal[6] = {1, 1, 1, 1, 1, 1}; /* ties: the smaller id wins */
    p = llm_sampling_defaults();
    assert_int_equal(sample_once(&p, equal, 6, NULL, 0), 0);
    p.temperature = 1;
    p.top_k = 1;
    assert_int_equal(sample_once(&p, equal, 6, NULL, 0), 0);
}

static void test_penalty(void **state) {
    float logits[4] = {2, 1.9f, -1, -1.05f};
    int32_t recent[6] = {0, 0, 0, 1, 2, 2};
    llm_sampling p = llm_sampling_defaults();
    (void)state;
    assert_int_equal(sample_once(&p, logits, 4, recent, 6), 0);
    p.repetition_penalty = 1.1f;
    p.penalty_window = 0;
    /* 2 / 1.1 < 1.9: a token in the window is penalized once, not three times */
    assert_int_equal(sample_once(&p, logits, 4, recent, 3), 1);
    /* both are penalized: 2 / 1.1 > 1.9 / 1.1 */
    assert_int_equal(sample_once(&p, logits, 4, recent, 6), 0);
    p.penalty_window = 3;
    assert_int_equal(sample_once(&p, logits, 4, recent, 6), 0); /* 0 is outside the window */
    float below[4] = {-9, -9, -1, -1.05f};
    assert_int_equal(sample_once(&p, below, 4, recent, 6), 3); /* -1 x 1.1 < -1.05 */
    p.repetition_penalty = 0.9f;
    assert_int_equal(sample_once(&p, below, 4, recent, 6), 2);

    /* a window of three tokens starts at the third from the end */
    float level[4] = {1.1f, 1, 0, 0};
    int32_t order[4] = {1, 0, 2, 3};
    p.repetition_penalty = 2;
    assert_int_equal(sample_once(&p, level, 4, order, 4), 1);
}

/* SplitMix64 as published (Steele, Lea and Flood 2014): the output for a state. */
static uint64_t splitmix64(uint64_t state) {
    uint64_t z = state + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Users rely on a seed to repeat a result, so these numbers must never change. The constants were
 * computed independently in Python. */
static void test_random_numbers(void **state) {
    static const struct {
        uint64_t seed, stream, index;
        double expected;
    } cases[] = {
        {0, 0, 0, 0x1.1c13ade1c7e5cp-3},
        {0, 0, 1, 0x1.79953c24b633cp-3},
        {1, 2, 3, 0x1.a0e68ea1fbc6cp-1},
        {42, 7, 0, 0x1.56fa2225de082p-2},
        {42, 7, 1, 0x1.c1e98431377d4p-3},
        {3, (1ULL << 32) | 1, 5, 0x1.8d914dacd1e26p-2},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, 0x1.656c5fd21f038p-2},
    };
    (void)state;
    /* published outputs of SplitMix64 for the seeds 0 and 1234567 */
    assert_true(splitmix64(0) == 0xE220A8397B1DCDAFu);
    assert_true(splitmix64(1234567) == 6457827717110365317u);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double x = llm_random(cases[i].seed, cases[i].stream, cases[i].index);
        if (x != cases[i].expected) fail_msg("case %zu: %a, not %a", i, x, cases[i].expected);
    }
    for (uint64_t seed = 0; seed < 5; seed++)
        for (uint64_t stream = 0; stream < 5; stream++)
            for (uint64_t index = 0; index < 100; index++) {
                uint64_t bits = splitmix64(splitmix64(splitmix64(seed) ^ stream) ^ index) >> 11;
                assert_true(llm_random(seed, stream, index) == (double)bits / 9007199254740992.0);
            }
}

static void test_random_statistics(void **state) {
    double sum = 0, squares = 0;
    (void)state;
    assert_true(llm_random(1, 2, 3) == llm_random(1, 2, 3));
    assert_true(llm_random(1, 2, 3) != llm_random(1, 2, 4));
    assert_true(llm_random(1, 2, 3) != llm_random(1, 3, 3));
    assert_true(llm_random(1, 2, 3) != llm_random(2, 2, 3));
    for (int i = 0; i < 100000; i++) {
        double x = llm_random(42, 7, (uint64_t)i);
        assert_true(x >= 0 && x < 1);
        sum += x;
        squares += x * x;
    }
    assert_true(fabs(sum / 100000 - 0.5) < 0.005);
    assert_true(fabs(squares / 100000 - 1.0 / 3) < 0.005);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Load a model, run requests and read their events, with one allocation failing. Returns whether
 * everything succeeded; otherwise, the error must be about memory. */
static bool load_run_and_free(llm_error *err) {
    bool ok = false;
    llm_event event;
    llm_model *model = llm_model_load(TIED, err);
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    llm_engine *engine = model ? llm_engine_create(model, &o, err) : NULL;
    if (engine) {
        llm_request request = some_request(0, 20, 4);
        request.n_samples = 2;
        ok = llm_submit(engine, &request, NULL, err) &&
             llm_submit_text(engine, "the wolf and", &request, NULL, err);
        int more = ok;
        while (more > 0) {
            more = llm_step(engine, err);
            while (llm_next_event(engine, &event)) {}
        }
        ok = ok && more == 0;
    }
    llm_engine_free(engine);
    llm_model_free(model);
    return ok;
}

static void test_failing_allocations(void **state) {
    llm_error err;
    (void)state;
    long live = test_live, before = test_allocations;
    assert_true(load_run_and_free(&err));
    long total = test_allocations - before;
    assert_int_equal(test_live, live);
    assert_true(total > 10);
    for (long k = 0; k < total; k++) {
        test_fail_in = k;
        memset(&err, 0x55, sizeof err);
        bool ok = load_run_and_free(&err);
        test_fail_in = -1;
        if (ok) fail_msg("allocation %ld of %ld failed without an error", k, total);
        if (err.status != LLM_ERROR_MEMORY)
            fail_msg("allocation %ld failed with error %d: %s", k, (int)err.status,
                     err.message);
        assert_true(strlen(err.message) > 10);
        assert_int_equal(test_live, live);
    }
    print_message("%ld allocations, each failed once\n", total);
}

static void test_failing_quantize(void **state) {
    llm_error err;
    char path[256];
    long live = test_live;
    bool ok = false;
    (void)state;
    temporary_path(path);
    for (long k = 0; !ok; k++) {
        unlink(path);
        test_failed = false;
        test_fail_in = k;
        ok = llm_quantize(SMALL, path, LLM_Q8_0, false, NULL, NULL, &err);
        test_fail_in = -1;
        assert_int_equal(ok, !test_failed);
        assert_int_equal(err.status, ok ? LLM_OK : LLM_ERROR_MEMORY);
        assert_int_equal(access(path, F_OK) == 0, ok); /* no partial file remains */
        assert_int_equal(test_live, live);
    }
    unlink(path);
}

/* After warm-up a step allocates nothing, neither in the engine nor in the backend. */
static void test_steps_allocate_nothing(void **state) {
    llm_error err;
    (void)state;
    llm_model *model = model_load(GQA);
    llm_engine_options o = llm_engine_defaults();
    o.max_batch_tokens = 24;
    llm_engine *engine = engine_new(model, &o);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 5; i++) {
            llm_request request = some_request(i, 10 + 20 * i, 12);
            request.n_samples = 1 + i % 3;
            assert_true(llm_submit(engine, &request, NULL, &err));
        }
        long before = test_allocations;
        int more;
        while ((more = llm_step(engine, &err)) > 0) {}
        assert_int_equal(more, 0);
        assert_int_equal(test_allocations, before);
    }
    llm_engine_free(engine);
    llm_model_free(model);
}

static void test_model_from_memory(void **state) {
    llm_error err;
    (void)state;
    FILE *f = fopen(TIED, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    void *data = malloc((size_t)size);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, (size_t)size, f), size);
    fclose(f);
    llm_model *from_memory = llm_model_from_memory(data, (size_t)size, "a name", &err);
    if (!from_memory) fail_msg("%s", err.message);
    llm_model *from_file = model_load(TIED);
    record *a = run_alone(from_memory, NULL, some_request(0, 30, 10)),
           *b = run_alone(from_file, NULL, some_request(0, 30, 10));
    assert_same(a, b);
    record_free(a);
    record_free(b);
    llm_model_free(from_memory);
    llm_model_free(from_file);
    assert_null(llm_model_from_memory(data, 100, "the first hundred", &err));
    assert_int_equal(err.status, LLM_ERROR_FORMAT);
    assert_non_null(strstr(err.message, "the first hundred"));
    free(data);
}

/* Bias and penalties against plain loops, with random histories. */
static void test_adjusted_logits(void **state) {
    enum { VOCAB = 60, MOST = 40 };
    (void)state;
    for (uint64_t seed = 0; seed < 400; seed++) {
#define CHANCE(k) llm_random(seed, 77, k)
        float logits[VOCAB], wanted[VOCAB], p[VOCAB];
        int32_t tokens[MOST];
        llm_logit_bias bias[5];
        int n = (int)(CHANCE(0) * (MOST + 1)), n_prompt = (int)(CHANCE(1) * (n + 1));
        llm_sampling s = llm_sampling_defaults();
        s.temperature = CHANCE(2) < 0.3 ? 0 : 1;
        s.presence_penalty = CHANCE(3) < 0.5 ? 0 : (float)(4 * CHANCE(4) - 2);
        s.frequency_penalty = CHANCE(5) < 0.5 ? 0 : (float)(4 * CHANCE(6) - 2);
        s.repetition_penalty = CHANCE(7) < 0.5 ? 1 : (float)(0.5 + 2 * CHANCE(8));
        s.penalty_window = (int)(CHANCE(9) * 10);
        s.n_bias = (int)(CHANCE(10) * 6);
        s.bias = bias;
        for (int i = 0; i < VOCAB; i++)
            wanted[i] = logits[i] = (float)(8 * llm_random(seed, 1, (uint64_t)i) - 4);
        for (int i = 0; i < n; i++)
            tokens[i] = (int32_t)(llm_random(seed, 2, (uint64_t)i) * 12);
        for (int i = 0; i < s.n_bias; i++) {
            bias[i].token = 7 * i; /* each token once: the order of additions does not matter */
            bias[i].bias = (float)(10 * llm_random(seed, 3, (uint64_t)i) - 5);
            wanted[bias[i].token] += bias[i].bias;
        }
        for (int id = 0; id < VOCAB; id++) {
            bool recent = false;
            int count = 0;
            for (int i = 0; i < n; i++) {
                recent = recent || (tokens[i] == id && (!s.penalty_window ||
                                                        i >= n - s.penalty_window));
                count += i >= n_prompt && tokens[i] == id;
            }
            float *x = &wanted[id];
            if (recent) *x = *x > 0 ? *x / s.repetition_penalty : *x * s.repetition_penalty;
            if (count) *x -= s.presence_penalty + s.frequency_penalty * (float)count;
        }
        llm__sampler sampler;
        llm_error err;
        llm__past past = {tokens, n, n_prompt}, none = {NULL, 0, 0};
        llm_sampling plain = llm_sampling_defaults();
        plain.temperature = s.temperature;
        assert_true(llm__sampler_init(&sampler, VOCAB, 1, &err));
        for (int k = 0; k < 2; k++) { /* twice: a draw resets its counts */
            float right[VOCAB];
            assert_int_equal(llm__sample(&sampler, &s, logits, past, 0, 0),
                             llm__sample(&sampler, &plain, wanted, none, 0, 0));
            llm__distribution(&sampler, &s, logits, past, p);
            llm__distribution(&sampler, &plain, wanted, none, right);
            for (int i = 0; i < VOCAB; i++) assert_true(fabsf(p[i] - right[i]) < 1e-5f);
        }
        llm__sampler_free(&sampler);
#undef CHANCE
    }
}

/* The most likely tokens of each event are those of the logits that a hook sees, whatever the
 * request changes in the logits; without a hook and with proposals, they are the same. */
static void test_top_logprobs(void **state) {
    enum { TOP = 7, LENGTH = 20 };
    (void)state;
    tiny_model m = tiny_model_new(tiny_defaults());
    llm_engine_options o = llm_engine_defaults();
    llm_logit_bias bias = {11, 3};
    llm_token_logprob tops[3][LENGTH][TOP];
    int32_t prompt[9], tokens[3][LENGTH] = {{0}}, forced[1200];
    o.n_threads = 1;
    for (int i = 0; i < 9; i++) prompt[i] = 8 + i % 4;
    for (int i = 0; i < 1200; i++) forced[i] = i % 3 ? -1 : 30;
    for (int kind = 0; kind < 3; kind++) { /* 0: a hook that forces tokens; 1: a hook; 2:
                                            * proposals */
        llm_engine *engine = engine_new(m.model, &o);
        record *seen = record_new(m.model);
        llm_request r = llm_request_defaults();
        llm_error err;
        llm_event event;
        r.prompt = prompt;
        r.n_prompt = 9;
        r.max_tokens = LENGTH;
        r.ignore_end = true;
        r.top_logprobs = TOP;
        r.sampling.bias = &bias;
        r.sampling.n_bias = 1;
        r.sampling.frequency_penalty = 0.5f;
        r.user = seen;
        if (kind < 2) r.logits_hook = record_hook;
        else r.speculate = 4, r.lookup = true;
        if (kind == 0) seen->forced = forced, seen->force_until = 1200;
        bias.bias = 3;
        if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
        bias.bias = kind == 1 ? 50 : -50; /* it was copied */
        int n = 0;
        while (llm_step(engine, &err) > 0)
            for (; llm_next_event(engine, &event); n++) {
                assert_int_equal(event.n_top, TOP);
                memcpy(tops[kind][n], event.top, sizeof tops[kind][n]);
                tokens[kind][n] = event.token;
            }
        assert_int_equal(n, LENGTH);
        for (int i = 0; kind < 2 && i < n; i++) {
            const float *row = seen->samples[0].logits + (int64_t)(8 + i) * seen->vocab;
            bool used[512] = {false};
            for (int k = 0; k < TOP; k++) { /* the largest one left; of equal ones, the first */
                int best = -1;
                for (int t = 0; t < seen->vocab; t++)
                    if (!used[t] && (best < 0 || row[t] > row[best])) best = t;
                used[best] = true;
                assert_int_equal(tops[kind][i][k].token, best);
                assert_true(tops[kind][i][k].logprob == llm_logprob(row, seen->vocab, best));
            }
        }
        record_free(seen);
        llm_engine_free(engine);
    }
    assert_memory_equal(tokens[1], tokens[2], sizeof tokens[1]);
    assert_memory_equal(tops[1], tops[2], sizeof tops[1]);
    tiny_model_free(&m);
}

/* ---- Logits that are not numbers -------------------------------------------------------- */

/* One token of the vocabulary has an embedding of NaN. A request that contains it ends with an
 * error that names the request and the position; the others give the same output as without it. */
static void test_broken_logits(void **state) {
    enum { N = 6, LENGTH = 12, BAD = 7 };
    (void)state;
    tiny t = tiny_defaults();
    tiny_model good = tiny_model_new(t);
    t.broken = BAD;
    tiny_model bad = tiny_model_new(t);
    int n_errors = 0, n_good = 0;
    for (int kind = 0; kind < 4; kind++) {
        int32_t prompt[N][LENGTH];
        record *expected[N], *got[N];
        llm_error err;
        llm_engine_options o = llm_engine_defaults();
        o.n_threads = 1;
        o.max_batch_tokens = kind == 1 ? 5 : 64;
        o.block_size = 4;
        o.draft = kind == 2 ? bad.model : NULL;
        llm_engine *engine = engine_new(bad.model, &o);
        for (int i = 0; i < N; i++) {
            for (int k = 0; k < LENGTH; k++)
                prompt[i][k] = 8 + (int32_t)(llm_random(3, (uint64_t)i, (uint64_t)k) * 20);
            llm_request r = llm_request_defaults();
            r.prompt = prompt[i];
            r.n_prompt = LENGTH;
            r.max_tokens = 40;
            r.n_samples = 1 + i % 2;
            r.ignore_end = true;
            r.sampling.temperature = (float)(i % 3);
            expected[i] = run_alone(good.model, NULL, r);
            if (i == 3) prompt[i][LENGTH - 1] = BAD;
            r.speculate = kind >= 2 ? 3 : 0;
            r.lookup = kind == 3;
            got[i] = record_new(bad.model);
            got[i]->id = 0;
            r.user = got[i];
            if (!llm_submit(engine, &r, &got[i]->id, &err)) fail_msg("%s", err.message);
        }
        int more;
        while ((more = llm_step(engine, &err)) > 0) {
            llm_event event;
            while (llm_next_event(engine, &event)) {
                record *r = event.user;
                record_event(r, &event);
                assert_int_equal(event.error != NULL, event.finish == LLM_FINISH_ERROR);
                if (!event.error) continue;
                const sample_record *s = &r->samples[event.sample];
                int position = LENGTH + s->n_tokens - 1;
                char place[80];
                snprintf(place, sizeof place,
                         "request %llu, sample %d: the model's logits after position %d ",
                         (unsigned long long)event.request, event.sample, position);
                if (!strstr(event.error, place)) fail_msg("%s", event.error);
                assert_int_equal(event.token, -1);
                assert_int_equal(s->n_tokens ? s->tokens[s->n_tokens - 1] : BAD, BAD);
                n_errors++;
            }
        }
        assert_int_equal(more, 0);
        assert_idle(engine);
        llm_engine_free(engine);
        for (int i = 0; i < N; i++) {
            for (int s = 0; s < 1 + i % 2; s++) {
                const sample_record *a = &expected[i]->samples[s], *b = &got[i]->samples[s];
                bool ended = b->finish == LLM_FINISH_ERROR;
                if (i == 3) assert_true(ended && b->n_tokens == 0);
                /* sampled speculation with a draft may draw another text */
                else if (i % 3 == 0 || kind != 2) {
                    if (!ended) assert_int_equal(a->n_tokens, b->n_tokens), n_good++;
                    assert_memory_equal(a->tokens, b->tokens,
                                        sizeof(int32_t) * (size_t)b->n_tokens);
                }
            }
            record_free(expected[i]);
            record_free(got[i]);
        }
    }
    print_message("%d samples ended with an error, %d ended normally\n", n_errors, n_good);
    assert_true(n_errors > 6 && n_good > 8);
    tiny_model_free(&good);
    tiny_model_free(&bad);
    assert_string_equal(llm_finish_name(LLM_FINISH_ERROR), "error");
    assert_string_equal(llm_finish_name((llm_finish)77), "unknown");
    assert_string_equal(llm_status_name(LLM_ERROR_DEVICE), "device");
    assert_string_equal(llm_version(), LLM_VERSION);
}

/* A hook may choose a token even if the model's logits are not finite. The engine takes that
 * token. */
static void only_nine(void *user, uint64_t request, int sample, int position, float *logits) {
    (void)request;
    (void)sample;
    (void)position;
    for (int i = 0; i < *(int *)user; i++) logits[i] = i == 9 ? 0 : -INFINITY;
}

static void test_hook_over_broken_logits(void **state) {
    (void)state;
    llm_error err;
    llm_event event;
    tiny t = tiny_defaults();
    t.broken = 7;
    tiny_model bad = tiny_model_new(t);
    int32_t prompt[] = {8, 7};
    int vocab = llm_model_config(bad.model)->vocab_size, n = 0;
    llm_engine *engine = engine_new(bad.model, NULL);
    llm_request r = llm_request_defaults();
    r.prompt = prompt;
    r.n_prompt = 2;
    r.max_tokens = 3;
    r.logits_hook = only_nine;
    r.user = &vocab;
    assert_true(llm_submit(engine, &r, NULL, &err));
    while (llm_step(engine, &err) > 0)
        for (; llm_next_event(engine, &event); n++) {
            assert_int_equal(event.token, 9);
            assert_int_equal(event.finish, n == 2 ? LLM_FINISH_LENGTH : LLM_FINISH_NONE);
        }
    assert_int_equal(n, 3);
    llm_engine_free(engine);
    tiny_model_free(&bad);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_unread_events_survive_submit),
        cmocka_unit_test(test_incomplete_characters),
        cmocka_unit_test(test_device_draws),
        cmocka_unit_test(test_max_tokens),
        cmocka_unit_test(test_end_token),
        cmocka_unit_test(test_streamed_text),
        cmocka_unit_test(test_cancel_at_any_step),
        cmocka_unit_test(test_unread_events),
        cmocka_unit_test(test_refused_requests),
        cmocka_unit_test(test_refused_options),
        cmocka_unit_test(test_wrong_calls),
        cmocka_unit_test(test_submit_text),
        cmocka_unit_test(test_submit_text_with_bos),
        cmocka_unit_test(test_statistics),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_extreme_logits),
        cmocka_unit_test(test_penalty),
        cmocka_unit_test(test_random_numbers),
        cmocka_unit_test(test_random_statistics),
        cmocka_unit_test(test_steps_allocate_nothing),
        cmocka_unit_test(test_model_from_memory),
        cmocka_unit_test(test_distributions),
        cmocka_unit_test(test_block_sizes),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_bundled_model),
        cmocka_unit_test(test_batch_composition),
        cmocka_unit_test(test_samples),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_random_calls),
        cmocka_unit_test(test_model_shared_by_threads),
        cmocka_unit_test(test_failing_allocations),
        cmocka_unit_test(test_failing_quantize),
        cmocka_unit_test(test_adjusted_logits),
        cmocka_unit_test(test_top_logprobs),
        cmocka_unit_test(test_broken_logits),
        cmocka_unit_test(test_hook_over_broken_logits),
    };
    return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
