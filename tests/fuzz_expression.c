/* libFuzzer: a line of steps, separated by tabs, then a text, which is also the table of a Charsmap
 * step. The steps give a tokenizer or an error; tokenizing the text gives an error or tokens that
 * decode to the text (if no step changes it). Seeds: tests/data/fuzz_expression. */
#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "../llm.h"

static void check(bool fine) {
    if (!fine) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *end = size ? (const uint8_t *)memchr(data, '\n', size) : NULL;
    if (!end || size > 4000) return 0;
    llm_error err;
    llm_tokenizer t;
    static llm__unicode *unicode; /* unpacked once */
    int32_t ids[20000];
    bool rewrites = false, ok = true;
    memset(&t, 0, sizeof t);
    memset(&err, 0, sizeof err);
    t.name = t.in.path = "fuzz";
    t.in.error = &err;
    t.byte_level = true;
    llm_file file;
    llm_value table;
    const llm_string *index = &table.key;
    memset(&file, 0, sizeof file);
    memset(&table, 0, sizeof table);
    table.key = llm__string("tokenizer.ggml.precompiled_charsmap");
    table.data = end + 1;
    table.bytes = size - (size_t)(end + 1 - data);
    file.path = (char *)(uintptr_t)"fuzz";
    file.error = &err;
    file.value_index = &index;
    file.n_values = 1;
    t.file = &file;
    t.bos = t.eos = t.unknown = -1;
    t.merges = (llm__merge_rule *)calloc(1, sizeof *t.merges);
    if (!unicode) unicode = llm__unicode_create(&err);
    t.unicode = unicode;
    for (int b = 0; b < 256; b++) t.bytes[b] = b;
    for (const uint8_t *at = data, *tab; ok && at < end && t.n_steps < 4; at = tab + 1) {
        tab = (const uint8_t *)memchr(at, '\t', (size_t)(end - at));
        if (!tab) tab = end;
        llm_string line = {(const char *)at, (size_t)(tab - at)};
        ok = llm__add_step(&t, line);
        check(ok == (err.status == LLM_OK));
        if (ok) {
            int kind = t.steps[t.n_steps - 1].kind;
            if (kind == LLM__STEP_CHARSMAP) file.n_values = 0; /* one makes the text long enough */
            rewrites |= kind >= LLM__STEP_REPLACE || kind == LLM__STEP_REMOVED;
        }
    }
    const char *text = (const char *)end + 1;
    size_t n = size - (size_t)(end + 1 - data);
    if (ok) {
        int64_t count = llm_tokenize(&t, text, n, 0, ids, 20000, &err);
        check((count >= 0) == (err.status == LLM_OK));
        if (count >= 0 && !rewrites) {
            check(count == (int64_t)n);
            for (size_t i = 0; i < n; i++) check(ids[i] == (uint8_t)text[i]);
        }
    }
    for (int64_t i = 0; i < t.n_steps; i++) {
        llm__expression_free(t.steps[i].expression);
        LLM_FREE(t.steps[i].normalizer);
    }
    LLM_FREE(t.steps);
    free(t.merges);
    return 0;
}
