/* A device draws the same tokens as the sampler of chapter 3 from the same logits, in every order
 * of threads. The logits are random, of many shapes, with ties, infinities, NaNs and all
 * filters. */
#define LLM_IMPLEMENTATION
#include "llm.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "device_util.h"

static const char *device; /* the device under test */

enum { MAX_DRAWS = 24, MAX_PAST = 40, MAX_BIAS = 9, MAX_TOP = 20 };

/* Fill a row with logits of this kind. */
static void fill_logits(uint64_t seed, int kind, float *row, int n) {
    for (int i = 0; i < n; i++) {
        double u = llm_random(seed, 0, (uint64_t)i), v = llm_random(seed, 1, (uint64_t)i);
        double normal = sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * v);
        row[i] = (float)(normal * (kind == 1 ? 20 : 3));
        if (kind == 2) row[i] = (float)(int)(u * 5);       /* many ties */
        if (kind == 3) row[i] = u < 0.5 ? 0.0f : -0.0f;    /* equal values with different bits */
        if (kind == 4 && u < 0.3) row[i] = v < 0.5 ? NAN : -INFINITY;
        if (kind == 5) row[i] = v < 0.5 ? NAN : -INFINITY; /* no token is possible */
        if (kind == 6 && i == n / 2) row[i] = INFINITY;
        if (kind == 7) row[i] = (float)(normal * 1e-7);    /* almost equal */
        if (kind == 8) row[i] = (float)(int)(normal * 4);  /* ties of a few likely tokens */
    }
}

static llm_sampling random_sampling(uint64_t seed, llm_logit_bias *bias, int n) {
    llm_sampling p = llm_sampling_defaults();
#define CHANCE(k) llm_random(seed, 7, k)
    static const int ks[] = {1, 2, 5, 40, 300, 1 << 20};
    static const float ps[] = {1e-6f, 0.1f, 0.5f, 0.9f, 0.95f, 0.9999f};
    p.temperature = CHANCE(0) < 0.15 ? 0 : CHANCE(0) < 0.3 ? 1 : (float)(0.05 + 3 * CHANCE(1));
    if (CHANCE(2) < 0.4) p.top_k = ks[(int)(CHANCE(3) * 6)];
    if (CHANCE(4) < 0.5) p.top_p = ps[(int)(CHANCE(5) * 6)];
    if (CHANCE(6) < 0.4) p.min_p = CHANCE(7) < 0.2 ? 1 : (float)(CHANCE(7) * CHANCE(7));
    if (CHANCE(8) < 0.4) p.repetition_penalty = (float)(0.5 + 2 * CHANCE(9));
    p.penalty_window = CHANCE(10) < 0.5 ? 0 : 7;
    if (CHANCE(11) < 0.3) p.presence_penalty = (float)(4 * CHANCE(12) - 2);
    if (CHANCE(13) < 0.3) p.frequency_penalty = (float)(4 * CHANCE(14) - 2);
    if (CHANCE(15) < 0.4) p.n_bias = (int)(CHANCE(16) * MAX_BIAS);
    for (int i = 0; i < p.n_bias; i++) {
        bias[i].token = (int32_t)(CHANCE(17 + (uint64_t)i) * n);
        bias[i].bias = CHANCE(30 + (uint64_t)i) < 0.2 ? -1e6f : (float)(10 * CHANCE(50) - 5);
    }
    p.bias = bias;
    p.seed = seed;
    return p;
}

/* Compare one call of the device's operation, over several rows with several draws each, with the
 * sampler. */
static void check_draws(llm_backend *b, uint64_t seed, int n) {
    llm_error err;
    llm__sampler sampler;
    int n_rows = 1 + (int)(llm_random(seed, 2, 0) * 5), n_draws = 0;
    float *logits = (float *)malloc((size_t)n_rows * (size_t)n * sizeof *logits);
    llm_draw draws[MAX_DRAWS];
    llm_logit_bias bias[MAX_DRAWS][MAX_BIAS];
    llm_adjustment lists[MAX_DRAWS][2 * MAX_PAST];
    llm_token_logprob tops[MAX_DRAWS][MAX_TOP], expected_tops[MAX_TOP];
    int32_t past[MAX_DRAWS][MAX_PAST], ids[MAX_DRAWS];
    float logprobs[MAX_DRAWS];
    assert_non_null(logits);
    assert_true(llm__sampler_init(&sampler, n, 1, &err));
    for (int row = 0; row < n_rows; row++) {
        fill_logits(seed + (uint64_t)row, (int)(llm_random(seed, 3, (uint64_t)row) * 9),
                    logits + (int64_t)row * n, n);
        for (int k = 0; k < 1 + row % 3; k++, n_draws++) {
            llm_draw *d = &draws[n_draws];
            memset(d, 0, sizeof *d);
            d->row = row;
            d->sampling = random_sampling(seed * 100 + (uint64_t)n_draws, bias[n_draws], n);
            d->random = llm__random_bits(d->sampling.seed, 5, (uint64_t)n_draws);
            for (int i = 0; i < MAX_PAST; i++)
                past[n_draws][i] = (int32_t)(llm_random(seed, 9, (uint64_t)(n_draws * 64 + i)) *
                                             (i % 2 ? n : n < 9 ? n : 9));
            d->adjustments = lists[n_draws];
            d->n_adjustments = llm__adjust(&sampler, &d->sampling,
                                           (llm__past){past[n_draws], MAX_PAST, MAX_PAST / 3},
                                           lists[n_draws]);
            d->top = tops[n_draws];
            d->n_top = (int)(llm_random(seed, 10, (uint64_t)n_draws) * (MAX_TOP + 20)) - 20;
            d->n_top = d->n_top < 0 ? 0 : d->n_top < n ? d->n_top : n;
        }
    }
    size_t bytes = (size_t)n_rows * (size_t)n * sizeof *logits;
    float *on_device = (float *)b->allocate(b->context, bytes, "logits", &err);
    assert_non_null(on_device);
    assert_true(b->upload(b->context, on_device, logits, bytes, &err));
    if (!b->sample(b->context, on_device, n, draws, n_draws, ids, logprobs, &err))
        fail_msg("%s", err.message);
    for (int i = 0; i < n_draws; i++) {
        const float *row = logits + (int64_t)draws[i].row * n;
        const llm_sampling *p = &draws[i].sampling;
        llm__past before = {past[i], MAX_PAST, MAX_PAST / 3};
        int32_t expected = llm__sample(&sampler, p, row, before, 5, (uint64_t)i);
        if (ids[i] != expected)
            fail_msg("seed %d, draw %d of %d logits: token %d, not %d (temperature %g, top_k %d, "
                     "top_p %g, min_p %g, penalties %g, %g, %g, %d biases)",
                     (int)seed, i, n, ids[i], expected, (double)p->temperature, p->top_k,
                     (double)p->top_p, (double)p->min_p, (double)p->repetition_penalty,
                     (double)p->presence_penalty, (double)p->frequency_penalty, p->n_bias);
        float logprob = llm_logprob(row, n, ids[i]);
        bool both_nan = logprob != logprob && logprobs[i] != logprobs[i];
        if (fabsf(logprob) <= FLT_MAX
                ? !(fabsf(logprob - logprobs[i]) <= 1e-5f * (1 + fabsf(logprob)))
                : logprob != logprobs[i] && !both_nan)
            fail_msg("seed %d, draw %d: logprob %g, not %g", (int)seed, i, (double)logprobs[i],
                     (double)logprob);
        if (!(fabsf(logprob) <= FLT_MAX)) continue; /* the engine then ends the sequence */
        if (draws[i].n_top) llm__top_logprobs(row, n, draws[i].n_top, expected_tops);
        for (int k = 0; k < draws[i].n_top; k++) {
            float wanted = expected_tops[k].logprob;
            assert_int_equal(tops[i][k].token, expected_tops[k].token);
            assert_true(wanted == tops[i][k].logprob ||
                        fabsf(wanted - tops[i][k].logprob) <= 1e-5f * (1 + fabsf(wanted)));
        }
    }
    /* the logits are unchanged */
    float *after = (float *)malloc(bytes);
    assert_true(b->download(b->context, after, on_device, bytes, &err));
    assert_memory_equal(after, logits, bytes);
    free(after);
    b->release(b->context, on_device);
    llm__sampler_free(&sampler);
    free(logits);
}

static void test_draws(void **state) {
    static const int sizes[] = {1, 2, 31, 32, 33, 500, 2049};
    (void)state;
    for (int order = do_less() ? device_orders(device) - 1 : 0; order < device_orders(device);
         order++) {
        device_set_order(device, order);
        llm_backend *b = device_open(device, NULL);
        if (!b->sample) skip();
        for (int i = 0; i < 7; i++)
            for (uint64_t seed = 1; seed <= (sizes[i] > 100 ? 5 : 8); seed++)
                check_draws(b, seed + 1000 * (uint64_t)i + 100000 * (uint64_t)order, sizes[i]);
        llm_backend_free(b);
    }
    device_set_order(device, 0);
}

/* Rows of several parts, where some lists of likely tokens are full and others too short. */
static void test_large_vocabulary(void **state) {
    (void)state;
    llm_backend *b = device_open(device, NULL);
    for (uint64_t seed = 1; seed <= (do_less() ? 6 : 24); seed++) {
        device_set_order(device, (int)seed % device_orders(device));
        check_draws(b, seed, 9000);
    }
    device_set_order(device, 0);
    check_draws(b, 77, 50257);
    for (uint64_t seed = 78; seed < (do_less() ? 80 : 86); seed++)
        check_draws(b, seed, 4096 * 33 + 1);
    llm_backend_free(b);
}

/* A larger logit never gets a smaller weight, and weights are close to the exponential function. */
static void test_exponential_weights(void **state) {
    llm_sampling p = llm_sampling_defaults();
    uint64_t last = UINT64_MAX;
    (void)state;
    p.temperature = 1;
    for (int i = 0; i < 1 << 22; i++) {
        float x = (float)i * (44.0f / (1 << 22));
        uint64_t weight = llm__likelihood(&p, -x, 0, 44);
        assert_true(weight <= last);
        last = weight;
        double exact = exp(-(double)x) * (double)((uint64_t)1 << 44);
        if (fabs((double)weight - exact) > 1 + 2e-6 * exact)
            fail_msg("e^-%g is %g", (double)x, (double)weight);
    }
    /* sample the fractions of one octave, densely near its ends: a larger exponent never gives a
     * larger weight */
    last = UINT64_MAX;
    for (uint64_t y = 0; y < (1 << 24) + 2; y += y < 4096 || y > (1 << 24) - 4096 ? 1 : 61) {
        uint64_t weight = llm__likelihood(
            &p, -(float)(((double)y + 0.5) / (1.4426950408889634 * 16777216)), 0, 44);
        assert_true(weight <= last);
        last = weight;
    }
    assert_int_equal(llm__likelihood(&p, 3, 3, 44), (uint64_t)1 << 44);
    assert_int_equal(llm__likelihood(&p, -INFINITY, 3, 44), 0);
}

static void test_multiply_high(void **state) {
    (void)state;
#ifdef __SIZEOF_INT128__
    for (uint64_t i = 0; i < 100000; i++) {
        uint64_t a = llm__mix(i), b = llm__mix(~i) >> i % 40;
        assert_int_equal(llm__multiply_high(a, b), (uint64_t)((unsigned __int128)a * b >> 64));
    }
#endif
    assert_int_equal(llm__multiply_high(UINT64_MAX, UINT64_MAX), UINT64_MAX - 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exponential_weights),
        cmocka_unit_test(test_multiply_high),
        cmocka_unit_test(test_draws),
        cmocka_unit_test(test_large_vocabulary),
    };
    device = device_name("emulated");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
