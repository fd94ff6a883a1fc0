/* device_util.h - the device that a test runs on: LLM_TEST_DEVICE=cpu|emulated|cuda, as `make test
 * DEVICE=...` sets it. Include after llm.h and cmocka.h. */
#ifndef DEVICE_UTIL_H
#define DEVICE_UTIL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "repeats.h"

/* NULL if the test is linked without that device. */
llm_backend *llm_cuda_backend(const llm_gpu_options *options, llm_error *err) __attribute__((weak));
llm_backend *llm_emulated_backend(const llm_gpu_options *options, llm_error *err)
    __attribute__((weak));
bool emulator_order(const char *order) __attribute__((weak));
void emulator_devices(int count, int compute_capability, int driver) __attribute__((weak));

/* LLM_TEST_ONLY=test_layer: run only the tests of this name (a pattern with * and ?). */
static __attribute__((constructor)) void choose_tests(void) {
    const char *only = getenv("LLM_TEST_ONLY");
    if (only && *only) cmocka_set_test_filter(only);
}

/* The requested device, or `otherwise` if none was requested. */
static __attribute__((unused)) const char *device_name(const char *otherwise) {
    const char *name = getenv("LLM_TEST_DEVICE");
    return name && *name ? name : otherwise;
}

static __attribute__((unused)) bool device_is_gpu(const char *name) {
    return strcmp(name, "cpu") != 0;
}

/* Open a backend of that device. If there is none, the test fails. options (NULL: defaults) apply
 * to a GPU, which uses all kernels, proved or not. */
static __attribute__((unused)) llm_backend *device_open(const char *name,
                                                        const llm_gpu_options *options) {
    llm_error err;
    llm_backend *b = NULL;
    llm_gpu_options o = options ? *options : llm_gpu_defaults();
    o.trust = true;
    if (!strcmp(name, "cpu")) b = llm_cpu_backend(2, LLM_ISA_BEST, &err);
    else if (!strcmp(name, "emulated") && llm_emulated_backend)
        b = llm_emulated_backend(&o, &err);
    else if (!strcmp(name, "cuda") && llm_cuda_backend) b = llm_cuda_backend(&o, &err);
    else fail_msg("this test knows no device \"%s\", or was built without it", name);
    if (!b) fail_msg("%s: %s", name, err.message);
    return b;
}

/* The number of orders in which the emulated device can run its threads; other devices have one. */
static __attribute__((unused)) int device_orders(const char *name) {
    return !strcmp(name, "emulated") ? 4 : 1;
}
static __attribute__((unused)) void device_set_order(const char *name, int i) {
    static const char *const orders[] = {"forward", "reverse", "random:7", "random:8"};
    if (!strcmp(name, "emulated")) assert_true(emulator_order(orders[i]));
}

/* Make the emulated device a GPU of this compute capability: 80, the default, or 90. */
static __attribute__((unused)) void device_set_capability(const char *name, int capability) {
    if (!strcmp(name, "emulated")) emulator_devices(1, capability, 13000);
}

/* The process's GPU, used by every engine that does not name a backend. It is deterministic: a
 * row's bits do not depend on the rest of the batch, which most tests require. */
static __attribute__((unused)) llm_backend *device_of_engines(void) {
    static llm_backend *backend;
    const char *name = device_name("cpu");
    if (!backend && device_is_gpu(name)) {
        llm_gpu_options options = llm_gpu_defaults();
        options.deterministic = true;
        backend = device_open(name, &options);
    }
    return backend;
}

static __attribute__((unused)) llm_engine *
device_engine_create(const llm_model *model, const llm_engine_options *options, llm_error *err) {
    llm_engine_options o = options ? *options : llm_engine_defaults();
    if (!o.backend) o.backend = device_of_engines();
    /* the default share of a large GPU's memory would be millions of blocks */
    if (!o.cache_bytes && o.backend) o.cache_bytes = (uint64_t)64 << 20;
    return llm_engine_create(model, &o, err);
}
#define llm_engine_create device_engine_create

#endif
