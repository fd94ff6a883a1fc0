/* llm_backend_open: the device that each name opens, and the error message if it opens none. The
 * GPU is simulated: present, absent or broken. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_memory.h"
#define LLM_WITH_CUDA
#define llm_cuda_backend stand_in_backend /* so that the real function can be linked, too */
#define LLM_IMPLEMENTATION
#include "llm.h"

static llm_status gpu_status;              /* LLM_OK: a GPU is present */
static const llm_gpu_options *gpu_options; /* options that the simulated GPU received */
static int gpu_calls;

static void gpu_destroy(llm_backend *backend) { LLM_FREE(backend); }

llm_backend *stand_in_backend(const llm_gpu_options *options, llm_error *err) {
    llm__clear(err);
    gpu_calls++;
    gpu_options = options;
    if (gpu_status != LLM_OK) return llm__fail(err, gpu_status, "the fan is loose"), NULL;
    llm_backend *b = (llm_backend *)llm__new(1, sizeof *b, "a stand-in", err);
    b->name = "stand-in";
    b->destroy = gpu_destroy;
    return b;
}

/* Open a device. Check that it is `expected` (NULL: none) and that the error contains `message`. */
static void check_opens(const char *name, const char *expected, llm_status status,
                        const char *message) {
    llm_error err;
    memset(&err, 0x55, sizeof err);
    llm_backend *b = llm_backend_open(name, NULL, NULL, &err);
    assert_int_equal(b != NULL, expected != NULL);
    if (b) assert_string_equal(b->name, expected);
    assert_int_equal(err.status, status);
    assert_string_equal(err.message, message);
    assert_null(err.option);
    llm_backend_free(b);
    llm_backend_free(llm_backend_open(name, NULL, NULL, NULL)); /* the error argument is optional */
    assert_int_equal(test_live, 0);
}

static void test_names(void **state) {
    static const char loose[] = "the fan is loose";
    (void)state;
    gpu_status = LLM_OK;
    check_opens("auto", "stand-in", LLM_OK, "");
    check_opens(NULL, "stand-in", LLM_OK, "");
    check_opens("cuda", "stand-in", LLM_OK, "");
    gpu_calls = 0;
    check_opens("cpu", "cpu", LLM_OK, "");
    check_opens("gpu", NULL, LLM_ERROR_UNSUPPORTED,
                "this program was built without a device \"gpu\": it has auto, cpu, cuda");
    check_opens("", NULL, LLM_ERROR_UNSUPPORTED,
                "this program was built without a device \"\": it has auto, cpu, cuda");
    check_opens("emulated", NULL, LLM_ERROR_UNSUPPORTED,
                "this program was built without a device \"emulated\": it has auto, cpu, cuda");
    assert_int_equal(gpu_calls, 0);
    gpu_status = LLM_ERROR_UNSUPPORTED; /* no GPU is present: no error */
    check_opens("auto", "cpu", LLM_OK, "");
    check_opens("cuda", NULL, LLM_ERROR_UNSUPPORTED, loose);
    gpu_status = LLM_ERROR_DEVICE; /* a GPU is present, but broken */
    check_opens("auto", "cpu", LLM_OK, loose);
    check_opens("cuda", NULL, LLM_ERROR_DEVICE, loose);
}

static void test_options(void **state) {
    llm_engine_options options = llm_engine_defaults();
    llm_gpu_options gpu = llm_gpu_defaults();
    llm_error err;
    (void)state;
    options.n_threads = 3;
    options.max_isa = LLM_ISA_PLAIN;
    options.pack_weights = false;
    llm_backend *b = llm_backend_open("cpu", &options, &gpu, &err);
    assert_int_equal(llm_cpu_isa(b), LLM_ISA_PLAIN);
    assert_false(((llm__cpu *)b->context)->pack);
#ifdef _OPENMP
    assert_int_equal(llm_cpu_threads(b), 3);
#endif
    llm_backend_free(b);
    b = llm_backend_open("cpu", NULL, NULL, &err);
    assert_true(((llm__cpu *)b->context)->pack);
    assert_true(llm_cpu_isa(b) >= LLM_ISA_PLAIN);
    llm_backend_free(b);
    gpu_status = LLM_OK;
    b = llm_backend_open("auto", &options, &gpu, &err);
    assert_ptr_equal(gpu_options, &gpu);
    llm_backend_free(b);
}

static void test_no_memory(void **state) {
    llm_error err;
    (void)state;
    gpu_status = LLM_ERROR_UNSUPPORTED;
    test_fail_in = 0;
    assert_null(llm_backend_open("auto", NULL, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_MEMORY);
    test_fail_in = -1;
    assert_int_equal(test_live, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests_name("backends", tests, NULL, NULL);
}
