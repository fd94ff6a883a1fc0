/* A device proves itself when it is opened: correct kernels never disagree, and a wrong one is
 * found, named and replaced. Only for the emulated device, on which a test can make a kernel wrong.
 * Each proof is on a separate device, since a process keeps the verdict on a device. A proof takes
 * seconds under sanitizers, so LLM_TEST_LESS runs a quarter of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_util.h"
#include "llm.h"
#include "engine_util.h"
#include "emulator.h"

#undef llm_engine_create
#include "two_models.h"

/* The families of a device without wgmma; those of wgmma. Verdicts are kept for devices below
 * UNKEPT. */
enum { FAMILIES = 26, WGMMA_FAMILIES = 9, UNKEPT = 16 };

static llm_gpu_options on_device(int number, int capability) {
    llm_gpu_options o = llm_gpu_defaults();
    o.device = number;
    emulator_devices(64, capability, 13000);
    return o;
}

static llm_device_state state_of(const llm_backend *b) {
    llm_device_state state;
    b->state(b->context, &state);
    return state;
}

/* The greedy continuations of two prompts. */
static void continue_prompts(llm_backend *b, int32_t tokens[2][8]) {
    llm_error err;
    llm_engine_options o = llm_engine_defaults();
    o.backend = b;
    o.context_length = 96;
    o.cache_bytes = 1 << 20;
    llm_engine *engine = llm_engine_create(target, &o, &err);
    if (!engine) fail_msg("%s", err.message);
    record *records[2];
    int32_t prompt[60];
    for (int i = 0; i < 60; i++) prompt[i] = 3 + i * 7 % 50;
    for (int i = 0; i < 2; i++) {
        llm_request request = llm_request_defaults();
        request.prompt = prompt + i;
        request.n_prompt = i ? 50 : 3;
        request.max_tokens = 8;
        request.ignore_end = true;
        records[i] = record_new(target);
        record_submit(engine, records[i], request, false);
    }
    record_drain(engine);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(records[i]->samples[0].n_tokens, 8);
        memcpy(tokens[i], records[i]->samples[0].tokens, 8 * sizeof(int32_t));
        record_free(records[i]);
    }
    llm_engine_free(engine);
}

static void test_right_kernels(void **state) {
    (void)state;
    llm_error err;
    for (int order = 2 - repeats(2, 1); order < 2; order++) {
        llm_gpu_options o = on_device(UNKEPT, order ? 90 : 80);
        device_set_order("emulated", 2 * order);
        llm_backend *b = llm_emulated_backend(&o, &err);
        if (!b) fail_msg("%s", err.message);
        llm_device_state now = state_of(b);
        if (now.distrusted) fail_msg("%s", now.distrusted);
        assert_int_equal(now.proved, FAMILIES + (order ? WGMMA_FAMILIES : 0));
        assert_true(now.proof_seconds > 0);
        assert_int_equal(now.launches, 0); /* launches of the proof do not count */
        llm_backend_free(b);
    }
    device_set_order("emulated", 0);
}

typedef struct wrong_kernel {
    const char *kernel;
    int index; /* index of the kernel's instance; -1: all */
    const char *named, *also, *not_named;
} wrong_kernel;

/* Each wrong kernel is found and named, and the text is right without it. */
static void check_wrong_kernels(const wrong_kernel *cases, int n) {
    llm_error err;
    int32_t expected[2][8], got[2][8];
    llm_backend *cpu = llm_cpu_backend(1, LLM_ISA_REFERENCE, &err);
    continue_prompts(cpu, expected);
    for (int i = 0; i < n; i += repeats(1, 3)) {
        llm_gpu_options o = on_device(UNKEPT, strstr(cases[i].kernel, "wgmma") ? 90 : 80);
        emulator_corrupt(cases[i].kernel, cases[i].index, strstr(cases[i].named, "nan") != NULL);
        llm_backend *b = llm_emulated_backend(&o, &err);
        if (!b) fail_msg("%s: %s", cases[i].kernel, err.message);
        const char *said = state_of(b).distrusted;
        if (!said || !strstr(said, cases[i].named) || !strstr(said, cases[i].also) ||
            strstr(said, cases[i].not_named))
            fail_msg("%s is wrong: \"%s\"", cases[i].kernel, said ? said : "");
        uint64_t wrong = emulator_corrupted();
        assert_true(wrong > 0);
        continue_prompts(b, got);
        assert_int_equal(emulator_corrupted(), wrong); /* it is no longer launched */
        assert_memory_equal(got, expected, sizeof got);
        llm_backend_free(b);
    }
    emulator_corrupt(NULL, 0, false);
    llm_backend_free(cpu);
}

static void test_wrong_products(void **state) {
    (void)state;
    static const wrong_kernel cases[] = {
        {"matmul_few", -1, "products of few rows in f16 (off by ", "rows in q6_k", "many rows"},
        {"matmul_many", -1, "products of many rows in f16 (off by ", "rows in q6_k", "few rows"},
        {"matmul_one", 6, "products of few rows in q6_k (off by ", "", "), "},
        {"matmul_wgmma", -1, "many rows with wgmma in f16 (off by ", "wgmma in q4_0", "rows in"}};
    check_wrong_kernels(cases, sizeof cases / sizeof *cases);
}

static void test_wrong_attention(void **state) {
    (void)state;
    static const wrong_kernel cases[] = {
        {"attention_kernel", 1, "decode attention (off by ", "", "), "},
        {"attention_kernel", 2, "attention (off by ", "", "decode"},
        {"merge_kernel", 0, "split attention (off by ", "", "decode"},
        {"attention_wgmma", 0, "attention with wgmma (off by ", "", "), "},
        {"rope_and_store", 0, "RoPE and store (off by ", "", "), "}};
    check_wrong_kernels(cases, sizeof cases / sizeof *cases);
}

static void test_wrong_others(void **state) {
    (void)state;
    static const wrong_kernel cases[] = {
        {"rmsnorm_kernel", 1, "norms (off by ", "", "), "},
        {"swiglu_kernel", 1, "gate (off by nan", "", "), "},
        {"atomicInc", -1, "norms in products (off by ", "split products (off by ", "rows in"},
        {"draw_kernel", -1, "sampling (another token)", "", "), "},
        {"graph", -1, "graphs (off by ", "", "), "}};
    check_wrong_kernels(cases, sizeof cases / sizeof *cases);
}

/* If no kernel is right, the device is not used. */
static void test_wrong_plain_kernels(void **state) {
    (void)state;
    static const char *const kernels[] = {"plain_matmul", "plain_attention", "rmsnorm"};
    llm_error err;
    for (int i = 0; i < repeats(3, 1); i++) {
        llm_gpu_options o = on_device(UNKEPT, 80);
        uint64_t before = emulator_counted().live_bytes;
        emulator_corrupt(kernels[i], -1, i == 0);
        assert_null(llm_emulated_backend(&o, &err));
        assert_int_equal(err.status, LLM_ERROR_DEVICE);
        if (!strstr(err.message, "give wrong results")) fail_msg("%s", err.message);
        assert_int_equal(emulator_counted().live_bytes, before);
    }
    emulator_corrupt(NULL, 0, false);
}

/* A process tests a device once, or not at all with the option `trust`. */
static void test_once(void **state) {
    (void)state;
    llm_error err;
    llm_gpu_options o = on_device(3, 80);
    emulator_corrupt("swiglu_kernel", 1, false);
    for (int i = 0; i < 3; i++) {
        uint64_t before = emulator_counted().launches;
        o.trust = i == 2;
        llm_backend *b = llm_emulated_backend(&o, &err);
        if (!b) fail_msg("%s", err.message);
        assert_true(emulator_counted().launches == before || i == 0);
        llm_device_state now = state_of(b);
        assert_int_equal(now.proved, i < 2 ? FAMILIES : 0);
        assert_true(i < 2 ? now.distrusted != NULL : now.distrusted == NULL);
        llm_backend_free(b);
        emulator_corrupt(NULL, 0, false);
    }
}

/* A kernel that cannot start is replaced, too. Other failures end in an error that names the cause,
 * and nothing leaks. */
static void test_failures(void **state) {
    (void)state;
    llm_error err;
    uint64_t before = emulator_counted().live_bytes, pinned = emulator_counted().live_pinned;
    for (int i = 0; i < repeats(12, 6); i++) {
        llm_gpu_options o = on_device(UNKEPT, 80);
        if (i % 3 == 0) emulator_fail_allocation(i / 3 * 3);
        if (i % 3 == 1) emulator_fail_launch(10 + i / 3 * 50);
        if (i % 3 == 2) emulator_lose_device(5 + i / 3 * 70);
        llm_backend *b = llm_emulated_backend(&o, &err);
        assert_true(emulator_failed());
        const char *said = b ? state_of(b).distrusted : err.message,
                   *words = i % 3 == 0 ? "out of " : i % 3 == 2 ? "the GPU is lost"
                                                   : b ? "(cannot start)"
                                                       : "packing weights failed";
        if (!said || !strstr(said, words)) fail_msg("failure %d: %s", i, said ? said : "");
        if (i % 3 != 1) assert_null(b);
        llm_backend_free(b);
        emulator_recover();
        assert_int_equal(emulator_counted().live_bytes, before);
        assert_int_equal(emulator_counted().live_pinned, pinned);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_kernels), cmocka_unit_test(test_wrong_products),
        cmocka_unit_test(test_wrong_attention), cmocka_unit_test(test_wrong_others),
        cmocka_unit_test(test_wrong_plain_kernels), cmocka_unit_test(test_once),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, load_models, free_models);
}
