/* The logits of tiny random models, compared with those of Hugging Face transformers
 * (tests/make_golden.py writes both); and models in every storage type, compared with the same
 * model unpacked to f32. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "llm.h"
#include "engine_util.h"

typedef struct golden {
    const char *name;
    char model_path[128]; /* written by make_golden.py: f16, q8_0, ... */
    char f32_path[256];   /* the same model in f32 */
    llm_file *file;
    int32_t ids[1200];
    int n_ids, n_prompt;
    const float *logits;  /* (n_ids, vocab) */
} golden;

static golden *golden_open(const char *name) {
    golden *g = (golden *)calloc(1, sizeof *g);
    char path[128];
    llm_error err;
    assert_non_null(g);
    g->name = name;
    snprintf(path, sizeof path, "tests/data/golden/%s.golden", name);
    snprintf(g->model_path, sizeof g->model_path, "tests/data/golden/%s.gguf", name);
    temporary_path(g->f32_path);
    write_as_f32(g->model_path, g->f32_path);
    g->file = llm_file_open(path, &err);
    if (!g->file) fail_msg("%s", err.message);
    const llm_value *ids = llm_file_find(g->file, "golden.ids");
    uint64_t n_prompt = 0;
    assert_non_null(ids);
    g->n_ids = (int)ids->count;
    for (int i = 0; i < g->n_ids; i++) {
        int64_t id;
        assert_true(llm_value_i64(ids, (uint64_t)i, &id));
        g->ids[i] = (int32_t)id;
    }
    assert_true(llm_value_u64(llm_file_find(g->file, "golden.n_prompt"), 0, &n_prompt));
    g->n_prompt = (int)n_prompt;
    const llm_tensor *logits = llm_file_find_tensor(g->file, "golden.logits");
    assert_non_null(logits);
    assert_int_equal(logits->dims[1], g->n_ids);
    g->logits = (const float *)logits->data;
    return g;
}

static void golden_close(golden *g) {
    unlink(g->f32_path);
    llm_file_close(g->file);
    free(g);
}

/* The whole sequence as the prompt; only the hook reads the logits. */
static llm_request whole_sequence(const golden *g) {
    llm_request r = llm_request_defaults();
    r.prompt = g->ids;
    r.n_prompt = g->n_ids;
    r.max_tokens = 0;
    return r;
}

static llm_request continuation(const golden *g) {
    llm_request r = whole_sequence(g);
    r.n_prompt = g->n_prompt;
    r.max_tokens = g->n_ids - g->n_prompt;
    return r;
}

/* The largest relative error at any position. */
static double worst_error(const sample_record *s, const float *expected, int vocab) {
    double worst = 0;
    for (int i = 0; i < s->n_rows; i++) {
        const float *row = expected + (size_t)s->positions[i] * (size_t)vocab;
        double error = relative_error(s->logits + (size_t)i * (size_t)vocab, row, vocab);
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

/* f32 weights and an f32 cache. Two f32 implementations differ only in the order of their sums:
 * each addition rounds to 2^-24, and a few thousand independent roundings stay far below 1e-4. */
static void check_f32(const golden *g, llm_engine_options o) {
    llm_model *model = model_load(g->f32_path);
    int vocab = llm_model_config(model)->vocab_size;
    o.cache_type = LLM_F32;

    record *r = run_alone(model, &o, whole_sequence(g));
    assert_int_equal(r->samples[0].n_rows, g->n_ids);
    double prefill = worst_error(&r->samples[0], g->logits, vocab);
    assert_true(prefill <= 1e-4);
    record_free(r);

    r = run_alone(model, &o, continuation(g));
    assert_int_equal(r->samples[0].n_tokens, g->n_ids - g->n_prompt);
    assert_memory_equal(r->samples[0].tokens, g->ids + g->n_prompt,
                        sizeof(int32_t) * (size_t)r->samples[0].n_tokens);
    double decode = worst_error(&r->samples[0], g->logits, vocab);
    assert_true(decode <= 1e-4);
    record_free(r);

    /* An f16 cache changes keys and values by up to 2^-12 = 2.4e-4 of their size in every layer.
     * Where attention is concentrated on few positions, a relative error of a score (here up to
     * about 10) becomes a ten times larger one of its weight. */
    o.cache_type = LLM_F16;
    r = run_alone(model, &o, whole_sequence(g));
    double half = worst_error(&r->samples[0], g->logits, vocab);
    assert_true(half <= 1e-2);
    record_free(r);
    print_message("%-8s prefill %.1e, decode %.1e, with an f16 cache %.1e\n", g->name, prefill,
                  decode, half);
    llm_model_free(model);
}

static void check_all_instruction_sets(const char *name) {
    golden *g = golden_open(name);
    for (int isa = LLM_ISA_PLAIN; isa <= LLM_ISA_BEST; isa++)
        for (int naive = 0; naive < 2 && has_isa((llm_isa)isa); naive++) {
            llm_error err;
            llm_engine_options o = llm_engine_defaults();
            o.backend = llm_cpu_backend(2, (llm_isa)isa, &err);
            if (!o.backend) fail_msg("%s", err.message);
            o.naive_attention = naive;
            print_message("%-7s %s  ", llm_isa_name(llm_cpu_isa(o.backend)),
                          naive ? "naive" : "tiled");
            check_f32(g, o);
            llm_backend_free(o.backend);
        }
    golden_close(g);
}

static void test_gqa_4_2(void **state) { (void)state; check_all_instruction_sets("gqa_4_2"); }
static void test_gqa_8_2(void **state) { (void)state; check_all_instruction_sets("gqa_8_2"); }
static void test_mha_48(void **state) { (void)state; check_all_instruction_sets("mha_48"); }
static void test_mqa_4_1(void **state) { (void)state; check_all_instruction_sets("mqa_4_1"); }
static void test_wide(void **state) { (void)state; check_all_instruction_sets("wide"); }
static void test_head64(void **state) { (void)state; check_all_instruction_sets("head64"); }
static void test_bias(void **state) { (void)state; check_all_instruction_sets("bias"); }

/* Compare the model in `path` with its own copy unpacked to f32, so that the difference shows
 * the error of the arithmetic with packed weights, without the error of packing. Returns the
 * relative error over all logits of the sequence. */
static double packed_error(const golden *g, const char *path, llm_isa isa) {
    char unpacked[256];
    llm_error err;
    temporary_path(unpacked);
    write_as_f32(path, unpacked);
    llm_model *packed = model_load(path), *expected = model_load(unpacked);
    llm_engine_options o = llm_engine_defaults();
    o.cache_type = LLM_F32;
    o.backend = llm_cpu_backend(2, isa, &err);
    if (!o.backend) fail_msg("%s", err.message);
    record *a = run_alone(packed, &o, whole_sequence(g)),
           *b = run_alone(expected, &o, whole_sequence(g));
    assert_int_equal(a->samples[0].n_rows, g->n_ids);
    double error =
        relative_error(a->samples[0].logits, b->samples[0].logits, (int64_t)g->n_ids * a->vocab);
    record_free(a);
    record_free(b);
    llm_model_free(packed);
    llm_model_free(expected);
    llm_backend_free(o.backend);
    unlink(unpacked);
    return error;
}

/* The bounds. f16 and bf16 weights are unpacked exactly and multiplied in f32: 1e-4 as above.
 *
 * Block formats: the activations of every product are rounded to int8 with one scale per 32 or 256
 * values, where 256 is here a whole row of at most 96. The largest of 96 normal values is about 2.7
 * standard deviations, so a step is 2.7/127 = 0.021 of one and the rounding error, uniform over a
 * step, is step/sqrt(12) = 0.006. This is the relative error of one product, since its errors are
 * independent. A layer has four products in sequence, these models have up to three layers and an
 * output: 13 products, so sqrt(13) x 0.006 = 0.022. Attention and the gate, whose inputs have a
 * wide range here, increase it two or three times. Hence 0.06. A mistake in an index or a scale
 * gives an error near 1. */
static double bound_of(llm_type type) {
    return llm_type_find(type)->block_values > 1 ? 0.06 : 1e-4;
}

static void test_packed(void **state) {
    static const char *const names[] = {"gqa_4_2", "gqa_8_2", "mha_48", "mqa_4_1",
                                        "wide",    "head64",  "bias"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        golden *g = golden_open(names[i]);
        for (int t = 0; llm_type_at(t); t++) {
            const llm_type_info *info = llm_type_at(t);
            char path[256];
            llm_error err;
            temporary_path(path);
            if (!llm_quantize(g->f32_path, path, info->type, false, NULL, NULL, &err))
                fail_msg("%s", err.message);
            for (int isa = LLM_ISA_PLAIN; isa <= LLM_ISA_BEST; isa++) {
                if (!has_isa((llm_isa)isa)) continue;
                double error = packed_error(g, path, (llm_isa)isa);
                print_message("%-8s %-5s %-7s %.1e\n", g->name, info->name,
                              llm_isa_name((llm_isa)isa), error);
                assert_true(error <= bound_of(info->type));
            }
            unlink(path);
        }
        /* also as make_golden.py stored it, packed by the gguf package */
        assert_true(packed_error(g, g->model_path, LLM_ISA_BEST) <= 0.06);
        golden_close(g);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gqa_4_2), cmocka_unit_test(test_gqa_8_2),
        cmocka_unit_test(test_mha_48),  cmocka_unit_test(test_mqa_4_1),
        cmocka_unit_test(test_wide),    cmocka_unit_test(test_head64),
        cmocka_unit_test(test_bias),    cmocka_unit_test(test_packed),
    };
    return cmocka_run_group_tests_name("golden", tests, NULL, NULL);
}
