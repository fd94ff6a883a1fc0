/* Chapter 2:  speculation gives the same output as the target alone: the same tokens if greedy, the
 * same distribution if sampled. Chi-squared tests check the distribution of the acceptance rule by
 * itself and inside the engine. Wrong rules must fail the same test. */
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
#include "tiny_model.h"

#define TARGET "tests/data/golden/mqa_4_1.gguf"
#define DRAFT "tests/data/golden/gqa_8_2.gguf" /* same vocabulary, otherwise unrelated */

/* ---- Chi-squared ------------------------------------------------------------------------ */

/* The distance between counts (n) and `expected` probabilities, in standard deviations: the sum of
 * (o - e)^2 / e, made nearly normal by Wilson and Hilferty's cube root. Cells that expect less than
 * 8 are merged. A count in a cell of probability 0 is infinitely far. */
static double chi_squared(const long *counts, const double *expected, int n) {
    double total = 0, sum = 0, rest_o = 0, rest_e = 0;
    int cells = 0;
    for (int i = 0; i < n; i++) total += (double)counts[i];
    for (int i = 0; i <= n; i++) {
        double e = i < n ? expected[i] * total : rest_e, o = i < n ? (double)counts[i] : rest_o;
        if (i < n && expected[i] <= 0 && counts[i] > 0) return INFINITY;
        if (i < n && e < 8) {
            rest_o += o;
            rest_e += e;
        } else if (e >= 1) {
            sum += (o - e) * (o - e) / e;
            cells++;
        }
    }
    double df = cells - 1;
    if (df < 1) return 0;
    return (cbrt(sum / df) - (1 - 2 / (9 * df))) / sqrt(2 / (9 * df));
}

/* A correct distribution exceeds this once in 30,000 runs. All seeds are fixed, so every run gives
 * the same result. */
static const double FAR = 4;

static void test_chi_squared(void **state) {
    (void)state;
    static const double p[4] = {0.1, 0.2, 0.3, 0.4}, wrong[4] = {0.11, 0.2, 0.3, 0.39},
                        never[4] = {0.5, 0.5, 0, 0};
    long counts[4] = {0};
    for (int i = 0; i < 100000; i++) {
        double u = llm_random(3, 0, (uint64_t)i);
        counts[u < 0.1 ? 0 : u < 0.3 ? 1 : u < 0.6 ? 2 : 3]++;
    }
    assert_true(chi_squared(counts, p, 4) < FAR);
    assert_true(chi_squared(counts, wrong, 4) > FAR); /* detects a difference of 0.01 */
    assert_true(isinf(chi_squared(counts, never, 4)));
}

/* ---- The rule -------------------------------------------------------------------------------- */

enum { SMALL = 10, DRAWS = 100000 };

typedef enum rule {
    RIGHT,
    ACCEPTS_BY_P,
    CORRECTS_FROM_P,
    ACCEPTS_ALL,
    FORGETS_WHAT_IS_LEFT, /* tests later branches against the whole target */
    KEEPS_REJECTED        /* tests later branches as if drawn from the whole draft */
} rule;

/* Draw one token: up to `branches` guesses from q, without replacement, accepted or corrected. */
static int32_t draw(rule r, const float *target, const float *draft, int branches, uint64_t seed,
                    uint64_t index) {
    float p[SMALL], q[SMALL];
    int32_t guess = -1, guesses[8];
    memcpy(p, target, sizeof p);
    memcpy(q, draft, sizeof q);
    for (int k = 0; k < branches; k++) {
        float left[SMALL];
        memcpy(left, q, sizeof left);
        for (int j = 0; j < k; j++) left[guesses[j]] = 0;
        uint64_t lane = 4 * (uint64_t)k;
        int32_t next = llm__draw_residual(left, NULL, SMALL, -1, llm_random(seed, 1 + lane, index));
        if (next < 0) break;
        float old_p[SMALL], old_q[SMALL];
        memcpy(old_p, p, sizeof p);
        memcpy(old_q, q, sizeof q);
        if (k > 0) llm__reject(p, q, SMALL, guess);
        if (r == FORGETS_WHAT_IS_LEFT) memcpy(p, old_p, sizeof p);
        if (r == KEEPS_REJECTED) memcpy(q, old_q, sizeof q);
        guesses[k] = guess = next;
        double u = llm_random(seed, 2 + lane, index), pg = (double)p[guess], qg = (double)q[guess];
        if (qg == 0) fail_msg("the draft drew a token of probability 0");
        if (r == ACCEPTS_BY_P   ? u < pg
            : r == ACCEPTS_ALL ? pg > 0
                               : llm__accept(pg, qg, u))
            return guess;
    }
    double v = llm_random(seed, 3, index);
    return llm__draw_residual(p, r == CORRECTS_FROM_P ? NULL : q, SMALL, guess, v);
}

static double distance(rule r, const float *p, const float *q, int branches, uint64_t seed) {
    long counts[SMALL] = {0};
    double expected[SMALL];
    for (int i = 0; i < SMALL; i++) expected[i] = (double)p[i];
    for (uint64_t i = 0; i < DRAWS; i++) counts[draw(r, p, q, branches, seed, i)]++;
    return chi_squared(counts, expected, SMALL);
}

/* A random distribution, flat or peaked, sometimes with zero probabilities as after a filter. */
static void random_distribution(float *p, uint64_t seed, uint64_t stream) {
    double power = 1 + 4 * llm_random(seed, stream, 1000),
           holes = llm_random(seed, stream, 1001) < 0.5 ? 0.4 : 0, sum = 0;
    for (int i = 0; i < SMALL; i++) {
        p[i] = (float)pow(llm_random(seed, stream, (uint64_t)i), power);
        if (i > 0 && llm_random(seed, stream, 2000 + (uint64_t)i) < holes) p[i] = 0;
        sum += (double)p[i];
    }
    for (int i = 0; i < SMALL; i++) p[i] = (float)((double)p[i] / sum);
}

static void test_rule(void **state) {
    (void)state;
    float p[SMALL], q[SMALL];
    int caught[KEEPS_REJECTED + 1] = {0}, n = 0;
    for (uint64_t seed = 1; seed <= 12; seed++, n++) {
        random_distribution(p, seed, 10);
        random_distribution(q, seed, 11);
        for (int branches = 1; branches <= 4; branches++) {
            double d = distance(RIGHT, p, q, branches, seed);
            if (d > FAR)
                fail_msg("seed %d, %d branches: %.1f standard deviations from the target's "
                         "distribution",
                         (int)seed, branches, d);
        }
        for (int wrong = ACCEPTS_BY_P; wrong <= KEEPS_REJECTED; wrong++)
            caught[wrong] += distance((rule)wrong, p, q, wrong <= ACCEPTS_ALL ? 1 : 3, seed) > FAR;
    }
    /* the test detects every wrong rule (the last one for all drafts but one) */
    for (int wrong = ACCEPTS_BY_P; wrong <= KEEPS_REJECTED; wrong++)
        assert_in_range(caught[wrong], wrong < KEEPS_REJECTED ? n : n - 1, n);
}

/* If draft and target agree, every guess is accepted. If they have no token in common, no guess is,
 * and the token still follows the target's distribution. */
static void test_rule_extremes(void **state) {
    (void)state;
    float p[SMALL] = {0.25f, 0.25f, 0.5f}, q[SMALL] = {0, 0, 0, 0.5f, 0.5f};
    for (uint64_t i = 0; i < 1000; i++) {
        double u = llm_random(1, 1, i);
        assert_true(llm__accept(0.3, 0.3, u));
        assert_true(llm__accept(0.4, 0.3, u));
        assert_false(llm__accept(0, 0.3, u));
    }
    assert_true(llm__accept(1e-9, 1, 0));
    assert_false(llm__accept(0, 1, 0));
    assert_true(distance(RIGHT, p, q, 1, 5) < FAR);
    assert_true(distance(RIGHT, p, q, 3, 5) < FAR); /* the draft has only two tokens to draw */
    assert_true(distance(RIGHT, p, p, 1, 6) < FAR);
    /* rounding may leave the point past the end: draw the last possible token, not the last
     * token */
    assert_int_equal(llm__draw_residual(p, NULL, SMALL, -1, 1), 2);
    assert_int_equal(llm__draw_residual(p, NULL, SMALL, -1, 0), 0);
}

/* If each guess is accepted with probability a, K guesses give (1 - a^(K+1)) / (1 - a) tokens. a is
 * the sum of min(p, q). */
static void test_expected_tokens_per_step(void **state) {
    (void)state;
    float p[SMALL], q[SMALL];
    for (uint64_t seed = 20; seed < 24; seed++) {
        random_distribution(p, seed, 10);
        random_distribution(q, seed, 11);
        double a = 0;
        for (int i = 0; i < SMALL; i++) a += fmin((double)p[i], (double)q[i]);
        for (int depth = 1; depth <= 8; depth++) {
            long tokens = 0;
            for (uint64_t i = 0; i < 20000; i++) {
                int k = 0;
                for (bool accepted = true; k < depth && accepted; k += accepted) {
                    uint64_t index = i * 8 + (uint64_t)k;
                    int32_t guess =
                        llm__draw_residual(q, NULL, SMALL, -1, llm_random(seed, 1, index));
                    accepted =
                        llm__accept((double)p[guess], (double)q[guess], llm_random(seed, 2, index));
                }
                tokens += k + 1;
            }
            double expected = (1 - pow(a, depth + 1)) / (1 - a);
            assert_true(fabs((double)tokens / 20000 / expected - 1) < 0.03);
        }
    }
}

/* ---- Greedy: the same tokens ----------------------------------------------------------------- */

enum { N_PROMPTS = 200, MAX_PROMPT = 40 };

static llm_request prompt_request(int i, int vocab, int32_t *ids) {
    llm_request r = llm_request_defaults();
    r.n_prompt = 1 + (i * 7) % MAX_PROMPT;
    int period = i % 3 ? 1000 : 5; /* some prompts repeat themselves, for lookup */
    for (int k = 0; k < r.n_prompt; k++)
        ids[k] = (int32_t)(llm_random((uint64_t)i, 9, (uint64_t)(k % period)) * vocab);
    r.prompt = ids;
    r.max_tokens = 24;
    r.ignore_end = i % 2;
    r.sampling.repetition_penalty = i % 5 ? 1 : 1.2f;
    return r;
}

/* kind 0: none; otherwise 1 to 8, then auto */
static int depth_of(int i, int kind) {
    return kind == 0 ? 0 : i % 9 == 8 ? LLM_SPECULATE_AUTO : 1 + i % 9;
}

/* Run all prompts on one engine. kind 0: no speculation; 1: with the draft model; 2: with
 * lookup. */
static llm_statistics run_prompts(const llm_model *target, const llm_model *draft, int kind,
                                  float temperature, record **out) {
    int32_t ids[MAX_PROMPT];
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.draft = draft;
    o.context_length = 100;
    llm_engine *engine = engine_new(target, &o);
    for (int i = 0; i < N_PROMPTS; i++) {
        llm_request r = prompt_request(i, llm_model_config(target)->vocab_size, ids);
        r.speculate = depth_of(i, kind);
        r.branches = i % 7 < 4 ? 0 : i % 7 - 2; /* 2 to 4 */
        r.lookup = kind == 2;
        r.sampling.temperature = temperature;
        out[i] = record_new(target);
        record_submit(engine, out[i], r, false);
    }
    record_drain(engine);
    assert_idle(engine);
    llm_statistics s = llm_engine_statistics(engine);
    llm_engine_free(engine);
    return s;
}

static void check_statistics(const llm_statistics *s) {
    uint64_t proposed = 0, accepted = 0;
    for (int k = 0; k < 16; k++) {
        proposed += s->proposed_at[k];
        accepted += s->accepted_at[k];
        assert_true(s->accepted_at[k] <= s->proposed_at[k]);
        if (k > 0) assert_true(s->proposed_at[k] <= s->accepted_at[k - 1]);
    }
    assert_int_equal(s->proposed, proposed);
    assert_int_equal(s->accepted, accepted);
}

static void check_greedy(const llm_model *target, const llm_model *draft, const char *name) {
    record *expected[N_PROMPTS], *got[N_PROMPTS];
    run_prompts(target, draft, 0, 0, expected);
    for (int kind = draft ? 1 : 2; kind <= 2; kind++) {
        llm_statistics s = run_prompts(target, draft, kind, 0, got);
        check_statistics(&s);
        assert_true(s.proposed > 500 && s.accepted > 0 && s.accepted < s.proposed);
        assert_true(s.decode_steps < s.generated_tokens);
        for (int i = 0; i < N_PROMPTS; i++) {
            assert_same(expected[i], got[i]);
            record_free(got[i]);
        }
        print_message("%s%s: %.0f %% of %ld proposals accepted, %.2f tokens per step\n", name,
                      kind == 2 ? ", lookup" : "", 100.0 * (double)s.accepted / (double)s.proposed,
                      (long)s.proposed, (double)s.generated_tokens / (double)s.decode_steps);
    }
    for (int i = 0; i < N_PROMPTS; i++) record_free(expected[i]);
}

static void test_greedy_unrelated_draft(void **state) {
    (void)state;
    llm_model *target = model_load(TARGET), *draft = model_load(DRAFT);
    check_greedy(target, draft, "unrelated draft");
    llm_model_free(target);
    llm_model_free(draft);
}

static void test_greedy_similar_draft(void **state) {
    (void)state;
    tiny t = tiny_defaults(), d = t;
    d.noise = 0.1f;
    tiny_model target = tiny_model_new(t), draft = tiny_model_new(d);
    check_greedy(target.model, draft.model, "similar draft");
    tiny_model_free(&target);
    tiny_model_free(&draft);
}

/* Models with the same vocabulary, whose matrices are padded to different numbers of rows. A draft
 * model's padding changes nothing. */
static void test_padded_vocabularies(void **state) {
    /* padding of the target, of the draft */
    static const int paddings[][2] = {{0, 0}, {0, 9}, {9, 0}, {7, 9}};
    record *expected[N_PROMPTS], *got[N_PROMPTS];
    llm_statistics plain;
    (void)state;
    for (int i = 0; i < 4; i++) {
        tiny t = tiny_defaults(), d = t;
        d.noise = 0.1f;
        t.padding = paddings[i][0];
        d.padding = paddings[i][1];
        tiny_model target = tiny_model_new(t), draft = tiny_model_new(d);
        assert_int_equal(llm_model_config(draft.model)->vocab_size, d.vocab + d.padding);
        check_greedy(target.model, draft.model, "padded");
        llm_statistics s = run_prompts(target.model, draft.model, 1, 1, i == 0 ? expected : got);
        if (i == 0) plain = s;
        assert_true(s.accepted > 100);
        for (int k = 0; k < N_PROMPTS && i > 0; k++) {
            if (i == 1) assert_same(expected[k], got[k]);
            record_free(got[k]);
        }
        if (i == 1) assert_int_equal(s.accepted, plain.accepted);
        tiny_model_free(&target);
        tiny_model_free(&draft);
    }
    for (int k = 0; k < N_PROMPTS; k++) record_free(expected[k]);
}

/* ---- Draft vocabularies of another size ----------------------------------------------------- */

static bool plain_download(void *context, void *host, const void *device, size_t bytes,
                           llm_error *err) {
    (void)context;
    (void)err;
    memcpy(host, device, bytes);
    return true;
}

static const int32_t *drawn_ids;
static bool draw_given_ids(void *context, float *logits, int vocab, const llm_draw *draws, int n,
                          int32_t *ids, float *logprobs, llm_error *err) {
    (void)context;
    (void)logits;
    (void)err;
    for (int i = 0; i < n; i++) {
        assert_int_equal(draws[i].row, i);
        assert_true(drawn_ids[i] < vocab);
        ids[i] = drawn_ids[i];
        logprobs[i] = (float)-i;
    }
    return true;
}

/* If a draft's logits rows are narrower than the target's, the missing tokens have probability 0.
 * If they are wider, the engine ignores the end: a token drawn there is not proposed. */
static void test_draft_vocabulary_width(void **state) {
    enum { VOCAB = 6, ROWS = 3 };
    static const int32_t ids[ROWS] = {3, VOCAB, VOCAB - 1};
    (void)state;
    llm_backend b;
    memset(&b, 0, sizeof b);
    b.download = plain_download;
    b.sample = draw_given_ids;
    drawn_ids = ids;
    for (int width = VOCAB - 2; width <= VOCAB + 2; width++) {
        float logits[ROWS * (VOCAB + 2)], host[ROWS * VOCAB];
        llm_model model;
        llm__network net;
        llm_error err;
        memset(&model, 0, sizeof model);
        memset(&net, 0, sizeof net);
        model.config.vocab_size = width;
        net.model = &model;
        net.backend = &b;
        net.logits = logits;
        net.max_logits = ROWS;
        for (int i = 0; i < ROWS * width; i++) logits[i] = (float)(i / width * 100 + i % width);
        for (int first = 0; first < ROWS; first++) {
            for (int i = 0; i < ROWS * VOCAB; i++) host[i] = 7000;
            assert_true(llm__fetch_logits(&net, first, ROWS - first, host, VOCAB, &err));
            for (int i = 0; i < ROWS * VOCAB; i++) {
                int row = i / VOCAB, column = i % VOCAB;
                float expected = row < first      ? 7000
                                 : column < width ? (float)(row * 100 + column)
                                                  : -INFINITY;
                assert_true(host[i] == expected);
            }
        }
        if (width <= VOCAB) continue;
        llm__request request;
        llm__sequence seq, *sequences[1] = {&seq};
        llm__scheduler s;
        llm__sampler sampler;
        int32_t numbers[ROWS] = {0, 1, 2}, zeros[ROWS] = {0}, tokens[ROWS] = {0};
        llm_engine_options o = llm_engine_defaults();
        memset(&request, 0, sizeof request);
        memset(&seq, 0, sizeof seq);
        memset(&s, 0, sizeof s);
        request.forked = true;
        request.params = llm_request_defaults();
        seq.request = &request;
        seq.tokens = tokens;
        seq.n_tokens = 1;
        s.options = &o;
        s.batch.n_logits = ROWS;
        s.batch_sequences = sequences;
        s.row_sequence = s.seq_first = zeros;
        s.positions = s.logit_rows = numbers;
        assert_true(llm__sampler_init(&sampler, VOCAB, ROWS, &err));
        assert_int_equal(llm__fetch(&sampler, &s, &net, 0, host, &err), ROWS);
        for (int i = 0; i < ROWS; i++) {
            assert_true(sampler.outcomes[i].sequence == &seq && sampler.outcomes[i].position == i);
            assert_int_equal(sampler.outcomes[i].id, ids[i] < VOCAB ? ids[i] : 0);
            assert_true(sampler.outcomes[i].logprob == (float)-i);
        }
        llm__sampler_free(&sampler);
    }
}

/* If the target is its own draft, every proposal is accepted, even at temperature 1, and K
 * proposals give K + 1 tokens. */
static void test_own_draft(void **state) {
    (void)state;
    llm_model *target = model_load(TARGET);
    record *got[N_PROMPTS];
    for (int temperature = 0; temperature < 2; temperature++) {
        llm_statistics s = run_prompts(target, target, 1, (float)temperature, got);
        check_statistics(&s);
        assert_true(s.proposed > 1000);
        assert_int_equal(s.accepted, s.proposed);
        for (int i = 0; i < N_PROMPTS; i++) record_free(got[i]);
    }
    llm_model_free(target);
}

/* ---- Step by step ----------------------------------------------------------------------- */

typedef enum source { DRAFT_MODEL, LOOKUP } source;

enum { STEP_PROMPT = 12, STEP_TOKENS = 90, STEP_CONTEXT = STEP_PROMPT + STEP_TOKENS };

/* The tokens that a model generates greedily after these, without speculation. */
static void greedy_text(llm_engine *engine, const int32_t *ids, int n, int more, int32_t *out) {
    llm_error err;
    llm_event event;
    llm_request r = llm_request_defaults();
    r.prompt = ids;
    r.n_prompt = n;
    r.max_tokens = more;
    r.ignore_end = true;
    if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
    while (llm_step(engine, &err) > 0)
        while (llm_next_event(engine, &event)) out[event.index] = event.token;
}

/* The tokens that followed the last earlier occurrence of the last three tokens (or two, or
 * one). */
static int find_continuation(const int32_t *text, int n, int depth, int32_t *out) {
    for (int length = 3; length > 0; length--)
        for (int end = n - 1; end >= length; end--) {
            int same = 0, found = 0;
            while (same < length && text[end - 1 - same] == text[n - 1 - same]) same++;
            if (same < length) continue;
            for (; end + found < n && found < depth; found++) out[found] = text[end + found];
            return found;
        }
    return 0;
}

/* The depth that gives the most tokens per unit of cost. */
static int best_depth(double acceptance, const llm__scheduler *s, bool lookup, int most, int n) {
    const double *target = s->pass_costs[0], *draft = s->pass_costs[1];
    double best = 1 / target[1];
    int depth = 0;
    for (int k = 1; k <= most; k++) {
        double tokens = (1 - pow(acceptance, k + 1)) / (1 - acceptance);
        double rate = tokens / (target[1 + k] + (lookup ? 0 : k * draft[1]));
        if (rate <= best) continue;
        best = rate;
        depth = k;
    }
    return depth == 0 && n % 16 == 0 && most > 0 ? 1 : depth;
}

/* Compare each event and counter of a greedy request with the rules: proposals are accepted up to
 * the first that is not the target's own token, which then follows. Returns the number of proposals
 * tested. */
static uint64_t check_steps(const llm_model *target, const llm_model *draft, source from,
                            int speculate, const int32_t *prompt) {
    llm_engine_options o = llm_engine_defaults(), plain = o;
    o.n_threads = plain.n_threads = 1;
    o.draft = draft;
    o.max_speculation = 20;
    llm_engine *alone = engine_new(target, &plain), *engine = engine_new(target, &o);
    llm_engine *drafts = draft ? engine_new(draft, &plain) : NULL;
    int32_t text[STEP_CONTEXT], proposed[20];
    uint64_t proposed_at[16] = {0}, accepted_at[16] = {0}, all = 0;
    double acceptance = 0.7;
    memcpy(text, prompt, STEP_PROMPT * sizeof *text);
    greedy_text(alone, prompt, STEP_PROMPT, STEP_TOKENS, text + STEP_PROMPT);

    llm_error err;
    llm_request r = llm_request_defaults();
    r.prompt = prompt;
    r.n_prompt = STEP_PROMPT;
    r.max_tokens = STEP_TOKENS;
    r.ignore_end = true;
    r.speculate = speculate;
    r.lookup = from == LOOKUP;
    r.branches = 1;
    if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
    for (int n = STEP_PROMPT; n < STEP_CONTEXT;) {
        int most = STEP_CONTEXT - n - 1, depth = 0, found = 0, accepted = 0;
        if (n > STEP_PROMPT) { /* the first token comes from the prompt's logits */
            depth = speculate > 0 && speculate < most ? speculate : most < 20 ? most : 20;
            if (speculate == LLM_SPECULATE_AUTO)
                depth = best_depth(acceptance, &engine->scheduler, from == LOOKUP, depth, n);
        }
        if (from == LOOKUP) found = find_continuation(text, n, depth, proposed);
        else if (depth > 0) greedy_text(drafts, text, n, found = depth, proposed);
        for (bool same = true; same && accepted < found; accepted += same) {
            int column = accepted < 15 ? accepted : 15;
            same = proposed[accepted] == text[n + accepted];
            proposed_at[column]++;
            accepted_at[column] += same;
            acceptance += 0.1 * ((same ? 1 : 0) - acceptance);
            all++;
        }
        assert_int_equal(llm_step(engine, &err), 1);
        for (int i = 0; i <= accepted; i++, n++) {
            llm_event event;
            assert_true(llm_next_event(engine, &event));
            assert_int_equal(event.token, text[n]);
            assert_int_equal(event.index, n - STEP_PROMPT);
            assert_int_equal(event.accepted, i < accepted);
            assert_int_equal(event.finish, n < STEP_CONTEXT - 1 ? 0 : LLM_FINISH_LENGTH);
        }
        llm_event none;
        assert_false(llm_next_event(engine, &none));
    }
    assert_int_equal(llm_step(engine, &err), 0);
    llm_statistics s = llm_engine_statistics(engine);
    assert_int_equal(s.proposed, all);
    assert_memory_equal(s.proposed_at, proposed_at, sizeof proposed_at);
    assert_memory_equal(s.accepted_at, accepted_at, sizeof accepted_at);
    llm_engine_free(alone);
    llm_engine_free(drafts);
    llm_engine_free(engine);
    return all;
}

static void test_steps(void **state) {
    static const int depths[] = {1, 3, 14, 15, 16, 20};
    int32_t prompt[STEP_PROMPT], repeated[STEP_PROMPT];
    (void)state;
    tiny t = tiny_defaults(), d = t, constant = t;
    d.noise = 0.2f;
    constant.constant = true; /* the same token forever, so lookup is always right */
    tiny_model target = tiny_model_new(t), draft = tiny_model_new(d);
    tiny_model same = tiny_model_new(constant);
    for (int i = 0; i < STEP_PROMPT; i++) {
        prompt[i] = (int32_t)(llm_random(7, 7, (uint64_t)i) * t.vocab);
        repeated[i] = 3 + i % 4;
    }
    for (int i = 0; i < 6; i++) {
        check_steps(target.model, draft.model, DRAFT_MODEL, depths[i], prompt);
        check_steps(target.model, target.model, DRAFT_MODEL, depths[i], prompt);
        check_steps(target.model, NULL, LOOKUP, depths[i], repeated);
        check_steps(same.model, NULL, LOOKUP, depths[i], repeated);
    }
    /* Automatic depth. A draft as large as the target never pays off and is tried only
     * occasionally. */
    const int automatic = LLM_SPECULATE_AUTO;
    uint64_t tried = check_steps(target.model, target.model, DRAFT_MODEL, automatic, prompt);
    assert_in_range(tried, 1, STEP_TOKENS / 16 + 1);
    check_steps(target.model, NULL, LOOKUP, automatic, prompt);
    check_steps(target.model, NULL, LOOKUP, automatic, repeated);
    check_steps(same.model, NULL, LOOKUP, automatic, repeated);
    tiny_model_free(&target);
    tiny_model_free(&draft);
    tiny_model_free(&same);
}

/* A greedy request with two branches, step by step: the draft's chain of half the proposals and
 * then, for each position, its second likeliest token. The draft's cache must follow the accepted
 * branch, or its next proposals differ. */
static void test_tree_steps(void **state) {
    enum { DEPTH = 6 };
    (void)state;
    tiny t = tiny_defaults(), d = t;
    d.noise = 0.3f;
    tiny_model target = tiny_model_new(t), draft = tiny_model_new(d);
    llm_engine_options plain = llm_engine_defaults(), o;
    plain.n_threads = 1;
    o = plain;
    o.draft = draft.model;
    llm_engine *alone = engine_new(target.model, &plain), *engine = engine_new(target.model, &o),
               *drafts = engine_new(draft.model, &plain);
    int32_t text[STEP_CONTEXT];
    int n_second = 0;
    llm_error err;
    llm_event event;
    for (int i = 0; i < STEP_PROMPT; i++)
        text[i] = (int32_t)(llm_random(8, 7, (uint64_t)i) * t.vocab);
    greedy_text(alone, text, STEP_PROMPT, STEP_TOKENS, text + STEP_PROMPT);
    llm_request r = llm_request_defaults(), ask = r;
    r.prompt = ask.prompt = text;
    r.n_prompt = STEP_PROMPT;
    r.max_tokens = STEP_TOKENS;
    r.ignore_end = ask.ignore_end = true;
    r.speculate = DEPTH;
    r.branches = ask.top_logprobs = 2;
    if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
    for (int n = STEP_PROMPT; n < STEP_CONTEXT;) {
        int most = (int)llm__min(STEP_CONTEXT - n - 1, DEPTH), chain = (most + 1) / 2, right = 0;
        bool main = n > STEP_PROMPT && most > 0, second = false;
        ask.n_prompt = n;
        ask.max_tokens = chain;
        if (main && !llm_submit(drafts, &ask, NULL, &err)) fail_msg("%s", err.message);
        while (main && llm_step(drafts, &err) > 0)
            while (llm_next_event(drafts, &event)) {
                int i = event.index;
                int32_t other = event.top[event.top[0].token == event.token].token;
                if (i != right || second) continue;
                second = event.token != text[n + i] && other == text[n + i] && i < most - chain;
                right += event.token == text[n + i] || second;
            }
        n_second += second && chain > 1;
        assert_int_equal(llm_step(engine, &err), 1);
        for (int i = 0; i <= right; i++, n++) {
            assert_true(llm_next_event(engine, &event));
            assert_int_equal(event.token, text[n]);
            assert_int_equal(event.accepted, i < right);
        }
        assert_false(llm_next_event(engine, &event));
    }
    assert_true(n_second > 3);
    llm_engine_free(alone);
    llm_engine_free(drafts);
    llm_engine_free(engine);
    tiny_model_free(&target);
    tiny_model_free(&draft);
}

/* ---- Sampled: the same distribution ---------------------------------------------------------- */

/* A target and a draft whose logits are the same after every token. So the tokens are independent
 * draws from a known distribution, and a guess is accepted with a known probability. */
static void constant_models(tiny_model *target, tiny_model *draft, int vocab) {
    tiny t = tiny_defaults();
    t.vocab = vocab;
    t.constant = true;
    t.sharp = 1.5f;
    t.context = 450;
    *target = tiny_model_new(t);
    t.noise = 0.7f;
    *draft = tiny_model_new(t);
}

static void keep_logits(void *user, uint64_t request, int sample, int position, float *logits) {
    (void)request;
    (void)sample;
    (void)position;
    memcpy(((float **)user)[0], logits, sizeof(float) * (size_t)*((int **)user)[1]);
}

/* The model's distribution for the token after `ids`. */
static void distribution_after(llm_engine *engine, const llm_sampling *p, const int32_t *ids, int n,
                               float *out) {
    int vocab = llm_model_config(llm_engine_model(engine))->vocab_size;
    float *logits = (float *)malloc(sizeof(float) * (size_t)vocab);
    assert_non_null(logits);
    void *user[2] = {logits, &vocab};
    llm_error err;
    llm__sampler sampler;
    llm_request r = llm_request_defaults();
    r.prompt = ids;
    r.n_prompt = n;
    r.max_tokens = 0;
    r.logits_hook = keep_logits;
    r.user = user;
    if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
    while (llm_step(engine, &err) > 0) {}
    assert_true(llm__sampler_init(&sampler, vocab, 1, &err));
    llm__distribution(&sampler, p, logits, (llm__past){ids, n, n}, out);
    llm__sampler_free(&sampler);
    free(logits);
}

static llm_engine *oracle_new(const llm_model *model) {
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = 1;
    o.max_sequences = 1;
    return engine_new(model, &o);
}

/* 10^5 tokens, each drawn in the engine with a draft's proposals: how often each token and each
 * pair of tokens occurs. */
static void test_sampled_distribution(void **state) {
    enum { VOCAB = 12, REQUESTS = 250, TOKENS = 400 };
    (void)state;
    tiny_model target, draft;
    constant_models(&target, &draft, VOCAB);
    int32_t first = 3;
    float p[VOCAB], q[VOCAB];
    llm_sampling sampling = llm_sampling_defaults();
    sampling.temperature = 1;
    llm_engine *oracle = oracle_new(target.model), *draft_oracle = oracle_new(draft.model);
    distribution_after(oracle, &sampling, &first, 1, p);
    distribution_after(draft_oracle, &sampling, &first, 1, q);
    llm_engine_free(oracle);
    llm_engine_free(draft_oracle);
    double a = 0, expected[VOCAB], pairs[VOCAB * VOCAB];
    for (int i = 0; i < VOCAB; i++) {
        a += fmin((double)p[i], (double)q[i]);
        expected[i] = (double)p[i];
        for (int k = 0; k < VOCAB; k++) pairs[i * VOCAB + k] = (double)p[i] * (double)p[k];
    }
    assert_true(a > 0.4 && a < 0.95);
    for (int i = 0; i < 7; i++) {
        static const int depths[] = {1, 2, 3, 4, 8, 4, 2}, widths[] = {1, 1, 1, 1, 1, 2, 3};
        int depth = depths[i], branches = widths[i];
        static long counts[VOCAB], pair_counts[VOCAB * VOCAB];
        memset(counts, 0, sizeof counts);
        memset(pair_counts, 0, sizeof pair_counts);
        llm_engine_options o = llm_engine_defaults();
        o.n_threads = 1;
        o.draft = draft.model;
        o.max_sequences = 50;
        o.max_batch_tokens = 500;
        llm_engine *engine = engine_new(target.model, &o);
        llm_error err;
        static int32_t last[REQUESTS + 1];
        /* 10^5 draws for depth 3 (2 x 10^4 in a short run), 2 x 10^4 for the others */
        int requests = depth == 3 ? repeats(REQUESTS, REQUESTS / 5) : REQUESTS / 5;
        for (int k = 0; k < requests; k++) {
            llm_request r = llm_request_defaults();
            r.prompt = &first;
            r.n_prompt = 1;
            r.max_tokens = TOKENS;
            r.ignore_end = true;
            r.sampling = sampling;
            r.sampling.seed = (uint64_t)(k + 1000 * (depth + branches - 1));
            r.speculate = depth * branches;
            r.branches = branches;
            if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
        }
        int more;
        while ((more = llm_step(engine, &err)) > 0) {
            llm_event event;
            while (llm_next_event(engine, &event)) {
                counts[event.token]++;
                /* every second pair, so that the pairs are independent */
                if (event.index % 2) pair_counts[last[event.request] * VOCAB + event.token]++;
                last[event.request] = event.token;
            }
        }
        assert_int_equal(more, 0);
        llm_statistics s = llm_engine_statistics(engine);
        check_statistics(&s);
        double d = chi_squared(counts, expected, VOCAB),
               e = chi_squared(pair_counts, pairs, VOCAB * VOCAB);
        double rate = (double)s.accepted / (double)s.proposed,
               formula = (1 - pow(a, depth + 1)) / (1 - a);
        /* the first token of each request comes from its prompt, before any proposal */
        uint64_t firsts = (uint64_t)requests;
        double in_a_step =
            (double)(s.generated_tokens - firsts) / (double)(s.decode_steps - firsts);
        print_message("K = %d x %d: %ld tokens, %.1f and %.1f standard deviations; %.3f accepted "
                      "(%.3f expected), %.3f tokens per step (%.3f)\n",
                      depth, branches, (long)s.generated_tokens, d, e, rate, a, in_a_step, formula);
        assert_int_equal(s.generated_tokens, requests * TOKENS);
        if (d > FAR || e > FAR)
            fail_msg("depth %d: %.1f and %.1f standard deviations from the target's distribution",
                     depth, d, e);
        if (branches > 1) /* at the end of the chain, branches matter less */
            assert_true(rate > a + 0.05 && in_a_step > formula * 1.05);
        for (int k = 0; k < depth && branches == 1; k++) {
            double n = (double)s.proposed_at[k], at = (double)s.accepted_at[k] / n;
            /* the acceptance rate is the same at each position */
            assert_true(n > 0 && fabs(at - a) < 4.5 * sqrt(a * (1 - a) / n));
        }
        /* the last step of a request may have fewer proposals */
        if (branches == 1) assert_true(fabs(in_a_step / formula - 1) < 0.03);
        llm_engine_free(engine);
    }
    tiny_model_free(&target);
    tiny_model_free(&draft);
}

/* A model whose logits depend on the text: many short texts, against the exact probabilities of all
 * pairs of the first two tokens, and of the third. The first token comes from the prompt, the
 * others from proposals. */
static void check_texts(bool lookup, int branches, llm_sampling sampling) {
    enum { VOCAB = 8, TEXTS = 20000, N_PROMPT = 5 };
    /* ends with a token that occurs before, for lookup */
    static const int32_t prompt[N_PROMPT] = {1, 3, 4, 5, 3};
    tiny t = tiny_defaults(), d;
    t.vocab = VOCAB;
    t.sharp = 1.2f;
    t.context = 32;
    d = t;
    d.noise = 0.6f;
    tiny_model target = tiny_model_new(t), draft = tiny_model_new(d);

    double two[VOCAB * VOCAB], third[VOCAB] = {0};
    float p1[VOCAB], p2[VOCAB], p3[VOCAB];
    int32_t ids[N_PROMPT + 2];
    llm_engine *oracle = oracle_new(target.model);
    memcpy(ids, prompt, sizeof prompt);
    distribution_after(oracle, &sampling, ids, N_PROMPT, p1);
    for (int i = 0; i < VOCAB; i++) {
        ids[N_PROMPT] = i;
        distribution_after(oracle, &sampling, ids, N_PROMPT + 1, p2);
        for (int k = 0; k < VOCAB; k++) {
            double p = two[i * VOCAB + k] = (double)p1[i] * (double)p2[k];
            ids[N_PROMPT + 1] = k;
            distribution_after(oracle, &sampling, ids, N_PROMPT + 2, p3);
            for (int j = 0; j < VOCAB; j++) third[j] += p * (double)p3[j];
        }
    }
    llm_engine_free(oracle);

    llm_engine_options o = llm_engine_defaults();
    llm_error err;
    o.n_threads = 1;
    o.draft = draft.model;
    o.max_sequences = 64;
    o.max_batch_tokens = 400;
    llm_engine *engine = engine_new(target.model, &o);
    long two_counts[VOCAB * VOCAB] = {0}, third_counts[VOCAB] = {0};
    static int32_t out[TEXTS][4];
    for (int i = 0; i < TEXTS; i += 8) {
        llm_request r = llm_request_defaults();
        r.prompt = prompt;
        r.n_prompt = N_PROMPT;
        r.max_tokens = 4;
        r.n_samples = 8;
        r.ignore_end = true;
        r.sampling = sampling;
        r.sampling.seed = (uint64_t)i;
        r.speculate = branches > 1 ? 5 : 2;
        r.branches = branches;
        r.lookup = lookup;
        r.user = out[i];
        if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
    }
    int more;
    while ((more = llm_step(engine, &err)) > 0) {
        llm_event event;
        while (llm_next_event(engine, &event))
            ((int32_t(*)[4])event.user)[event.sample][event.index] = event.token;
    }
    assert_int_equal(more, 0);
    for (int i = 0; i < TEXTS; i++) {
        two_counts[out[i][0] * VOCAB + out[i][1]]++;
        third_counts[out[i][2]]++;
    }
    llm_statistics s = llm_engine_statistics(engine);
    check_statistics(&s);
    assert_true(s.accepted > TEXTS / 40 && s.proposed - s.accepted > TEXTS / 10);
    double a = chi_squared(two_counts, two, VOCAB * VOCAB),
           b = chi_squared(third_counts, third, VOCAB);
    print_message("%s, %d branches: %.1f and %.1f standard deviations, %.2f accepted\n",
                  lookup ? "lookup" : "draft", branches, a, b,
                  (double)s.accepted / (double)s.proposed);
    if (a > FAR || b > FAR)
        fail_msg("%.1f and %.1f standard deviations from the target's distribution", a, b);
    llm_engine_free(engine);
    tiny_model_free(&target);
    tiny_model_free(&draft);
}

static void test_sampled_texts(void **state) {
    (void)state;
    llm_sampling plain = llm_sampling_defaults(), shaped;
    plain.temperature = 1;
    shaped = plain;
    shaped.temperature = 1.3f;
    shaped.top_k = 6;
    shaped.top_p = 0.9f;
    shaped.repetition_penalty = 1.3f;
    shaped.penalty_window = 4;
    for (int lookup = 0; lookup < 2; lookup++)
        for (int branches = 1; branches <= 3; branches += 2) {
            check_texts(lookup, branches, plain);
            check_texts(lookup, branches, shaped);
        }
}

/* ---- The number of proposals ----------------------------------------------------------------- */

/* The best expected tokens per cost, over all depths and widths, by the formula of a geometric
 * series: k positions with `width` proposals each, for each of n sequences. */
static double best_rate(const llm__scheduler *s, int n, int most, int widest, double a,
                        double rescue) {
    double best = 1 / s->pass_costs[0][n];
    for (int width = 1; width <= widest; width++)
        for (int k = 1; k * width <= most && n * (1 + k * width) <= s->most_rows; k++) {
            double others = (width - 1) * rescue < 1 ? (width - 1) * rescue : 1,
                   any = a + (1 - a) * others,
                   tokens = 1 + any * (a < 1 ? (1 - pow(a, k)) / (1 - a) : k),
                   cost = s->pass_costs[0][n * (1 + k * width)] + k * s->pass_costs[1][n];
            if (tokens / cost > best) best = tokens / cost;
        }
    return best;
}

/* The automatic number of proposals gives the most tokens per cost, whatever the acceptance, the
 * costs and the number of other sequences; with drawn proposals, these do not matter. */
static void test_auto_depth(void **state) {
    (void)state;
    enum { ROWS = 200 };
    static double target[ROWS + 1], draft[ROWS + 1];
    llm_engine_options options = llm_engine_defaults();
    llm__scheduler s;
    llm__request request;
    llm__sequence sequence;
    memset(&s, 0, sizeof s);
    memset(&request, 0, sizeof request);
    memset(&sequence, 0, sizeof sequence);
    s.options = &options;
    s.pass_costs[0] = target;
    s.pass_costs[1] = draft;
    s.most_rows = ROWS;
    sequence.request = &request;
    request.params.speculate = LLM_SPECULATE_AUTO;
    request.forked = true;
    request.depth = 8;
    request.limit = 1000;
    int with_width[5] = {0}, none = 0, fewer = 0;
    for (int i = 0; i < 20000; i++) {
        double row = llm_random(1, 1, (uint64_t)i) * 0.3, more = llm_random(1, 2, (uint64_t)i);
        for (int n = 0; n <= ROWS; n++) target[n] = 1 + row * n, draft[n] = more * target[n];
        double a = sequence.acceptance = floor(llm_random(1, 3, (uint64_t)i) * 21) / 20;
        double rescue = sequence.rescue = llm_random(1, 4, (uint64_t)i) * 0.4;
        int n = 1 + i % 30;
        sequence.n_tokens = 17;
        request.branches = i / 30 % 5;
        s.n_decoding = n;
        int depth = llm__speculation_depth(&s, &sequence), width = sequence.width;
        int widest = request.branches > 1 ? request.branches : 1;
        assert_true(depth >= 0 && depth <= 8 && width >= 1 && width <= widest);
        assert_int_equal(depth % width, 0);
        int k = depth / width;
        double others = (width - 1) * rescue < 1 ? (width - 1) * rescue : 1,
               any = a + (1 - a) * others,
               tokens = 1 + any * (a < 1 ? (1 - pow(a, k)) / (1 - a) : k),
               rate = tokens / (target[n * (1 + depth)] + k * draft[n]);
        assert_true(rate > best_rate(&s, n, 8, widest, a, rescue) - 1e-9);
        none += depth == 0;
        with_width[width] += depth > 0;
        request.params.sampling.temperature = 1;
        int drawn = llm__speculation_depth(&s, &sequence), drawn_width = sequence.width;
        s.n_decoding = 1;
        request.params.sampling.temperature = 0;
        int alone = llm__speculation_depth(&s, &sequence);
        assert_int_equal(drawn, alone);
        assert_int_equal(drawn_width, sequence.width);
        fewer += depth < alone;
    }
    assert_true(none > 100 && fewer > 100); /* all cases occurred */
    for (int width = 1; width <= 4; width++)
        if (with_width[width] <= 50) fail_msg("%d proposals per position: rare", width);

    for (int n = 0; n <= ROWS; n++) target[n] = 1 + 0.05 * n, draft[n] = 0.05;
    request.branches = 0;
    sequence.acceptance = 0;
    assert_int_equal(llm__speculation_depth(&s, &sequence), 0);
    sequence.n_tokens = 32; /* the engine tries one proposal occasionally */
    assert_int_equal(llm__speculation_depth(&s, &sequence), 1);
    sequence.acceptance = 1;
    assert_int_equal(llm__speculation_depth(&s, &sequence), 8);
    for (int left = 1; left <= 12; left++) { /* never beyond the end of the request */
        sequence.n_tokens = request.limit - left;
        assert_int_equal(llm__speculation_depth(&s, &sequence), left - 1 < 8 ? left - 1 : 8);
    }
    request.params.speculate = 3;
    sequence.n_tokens = 100;
    request.depth = 3;
    assert_int_equal(llm__speculation_depth(&s, &sequence), 3);
}

/* What a sequence learns from a step: how often a position's first proposal is accepted, and how
 * often each of the others once the first is rejected. */
static void test_learning(void **state) {
    /* rows 1 to 3 follow the known token; rows 4 and 5 follow rows 1 and 4 */
    enum { KNOWN = 7, FIRST = 10, SECOND, THIRD, FOURTH, FIFTH, NONE };
    int32_t parents[] = {0, 0, 0, 1, 4}, tokens[] = {KNOWN, FIRST, SECOND, THIRD, FOURTH, FIFTH};
    static const struct {
        int32_t chosen[3];
        int n, tested;
        double acceptance, rescue;
    } cases[] = {{{NONE}, 1, 1, 0.45, 0.27},
                 {{SECOND, NONE}, 2, 1, 0.45, 0.32},
                 {{FIRST, NONE}, 2, 2, 0.495, 0.3},
                 {{FIRST, FOURTH, FIFTH}, 3, 3, 0.6355, 0.3}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm__sequence seq;
        int32_t rows[5];
        memset(&seq, 0, sizeof seq);
        memcpy(rows, parents, sizeof rows);
        seq.tokens = tokens;
        seq.parents = rows;
        seq.n_tokens = 1;
        seq.n_proposed = 5;
        seq.acceptance = 0.5;
        seq.rescue = 0.3;
        for (int k = 0; k < cases[i].n; k++) llm__follow(&seq, cases[i].chosen[k]);
        assert_int_equal(seq.n_tested, cases[i].tested);
        assert_true(fabs(seq.acceptance - cases[i].acceptance) < 1e-12);
        assert_true(fabs(seq.rescue - cases[i].rescue) < 1e-12);
    }
}

/* The cost of a pass: more rows cost more arithmetic and no more bytes, and a device that does more
 * operations per byte pays less for them. Weights that fit the caches make rows dearer. */
static void test_pass_cost(void **state) {
    (void)state;
    llm_op op;
    llm_weight weight;
    llm_backend backend;
    llm_buffer buffer;
    llm__network net;
    memset(&op, 0, sizeof op);
    memset(&weight, 0, sizeof weight);
    memset(&backend, 0, sizeof backend);
    memset(&buffer, 0, sizeof buffer);
    memset(&net, 0, sizeof net);
    weight.type = LLM_F16;
    weight.cols = 1024;
    op.kind = LLM_OP_MATMUL;
    op.weight = &weight;
    op.in[0] = op.out = 0;
    for (int i = 1; i < LLM_OP_INPUTS; i++) op.in[i] = -1;
    net.program.ops = &op;
    net.program.n_ops = 1;
    net.program.buffers = &buffer;
    net.backend = &backend;
    for (int large = 0; large < 2; large++) {
        weight.rows = large ? 1 << 20 : 1 << 10;
        double values = (double)weight.rows * 1024, read = large ? 2 * values : 2 * values / 3;
        for (int n = 1; n <= 64; n *= 4)
            for (int balance = 0; balance <= 100; balance += 50) {
                backend.balance = balance;
                double want = read + 2 * n * values / (balance ? balance : 40);
                assert_true(fabs(llm__pass_cost(&net, n) / want - 1) < 1e-12);
            }
    }
}

/* Lookup proposes the tokens that followed an earlier occurrence of the last tokens: the longest
 * match first, then the latest. Several matches share their beginnings. */
static void test_lookup_proposals(void **state) {
    static const struct {
        const char *text;
        int depth;
        const char *proposed;
        int branches;
        const char *parents; /* NULL: a chain */
    } cases[] = {{"abcdXabc", 3, "dXa", 0, NULL},
                 {"abcdabceabc", 2, "ea", 0, NULL},
                 {"aXbXcX", 1, "c", 0, NULL},
                 {"abcdefgh", 4, "", 0, NULL},
                 {"aaaa", 8, "a", 0, NULL},
                 {"a", 4, "", 0, NULL},
                 {"aa", 4, "a", 0, NULL},
                 {"abab", 8, "ab", 0, NULL},
                 {"xyzabcQyzabcRabc", 1, "R", 0, NULL},
                 {"abcdXabc", 0, "", 0, NULL},
                 {"abcPabcQabcRabc", 4, "RaQa", 2, "0103"},
                 {"abcPabcQabcRabc", 3, "RQP", 3, "000"},
                 {"abcPabcQabcRabc", 5, "RaQaP", 3, "01030"},
                 {"abcRxabcRyabc", 6, "Ryaxab", 2, "012145"},
                 {"abcRxabcRxabc", 6, "RxabcR", 2, NULL},
                 {"bPcbQabcRbc", 3, "Rbb", 8, "010"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t tokens[64], parents[64];
        llm__sequence sequence;
        llm__request request;
        memset(&sequence, 0, sizeof sequence);
        memset(&request, 0, sizeof request);
        sequence.request = &request;
        sequence.width = cases[i].branches > 1 ? cases[i].branches : 1;
        sequence.tokens = tokens;
        sequence.parents = parents;
        sequence.n_tokens = (int)strlen(cases[i].text);
        sequence.depth = cases[i].depth;
        for (int k = 0; k < sequence.n_tokens; k++) tokens[k] = cases[i].text[k];
        llm__propose_lookup(&sequence);
        assert_int_equal(sequence.n_proposed, strlen(cases[i].proposed));
        for (int k = 0; k < sequence.n_proposed; k++) {
            assert_int_equal(tokens[sequence.n_tokens + k], cases[i].proposed[k]);
            assert_int_equal(parents[k], cases[i].parents ? cases[i].parents[k] - '0' : k);
        }
        assert_int_equal(sequence.branched, cases[i].parents != NULL);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_tree_steps),
        cmocka_unit_test(test_chi_squared),
        cmocka_unit_test(test_rule),
        cmocka_unit_test(test_rule_extremes),
        cmocka_unit_test(test_expected_tokens_per_step),
        cmocka_unit_test(test_greedy_unrelated_draft),
        cmocka_unit_test(test_greedy_similar_draft),
        cmocka_unit_test(test_padded_vocabularies),
        cmocka_unit_test(test_draft_vocabulary_width),
        cmocka_unit_test(test_own_draft),
        cmocka_unit_test(test_sampled_distribution),
        cmocka_unit_test(test_sampled_texts),
        cmocka_unit_test(test_auto_depth),
        cmocka_unit_test(test_learning),
        cmocka_unit_test(test_pass_cost),
        cmocka_unit_test(test_lookup_proposals),
    };
    return cmocka_run_group_tests_name("speculation", tests, NULL, NULL);
}
