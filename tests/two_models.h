/* Two small models, a target and its draft, for several tests, and the setup and teardown of a test
 * group that load and free them. Include it after engine_util.h. */
#define TARGET "tests/data/golden/mqa_4_1.gguf"
#define DRAFT "tests/data/golden/gqa_8_2.gguf" /* the same vocabulary */

static llm_model *target, *draft;

static int load_models(void **state) {
    (void)state;
    target = model_load(TARGET);
    draft = model_load(DRAFT);
    return 0;
}

static int free_models(void **state) {
    (void)state;
    llm_model_free(target);
    llm_model_free(draft);
    return 0;
}
