/* libFuzzer: any bytes as a tokenizer.json. Loading gives a tokenizer or an error. A tokenizer must
 * tokenize and detokenize a text without a crash. Seeds: tests/data/fuzz_vocabulary. */
#include "test_util.h"
#include "../llm.h"

static void check(bool fine) {
    if (!fine) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char text[] =
        "Hello  w\xC3\xB6rld, it's 12345\r\n <s>\xE6\x9C\x88 e\xCC\x81\xFF</s> a";
    llm_error err;
    int32_t ids[400];
    char out[4000];
    if (!size || data[0] != '{') return 0;
    llm_file *file = llm_file_from_memory(data, size, "/nowhere/tokenizer.json", &err);
    llm_tokenizer *t = file ? llm_tokenizer_create(file, &err) : NULL;
    check((t != NULL) == (err.status == LLM_OK));
    check(t || err.message[0]);
    if (t) {
        int64_t n = llm_tokenize(t, text, sizeof text - 1, LLM_TOKENIZE_BOS | LLM_TOKENIZE_SPECIAL,
                                 ids, 400, &err);
        check(n <= 400);
        if (n >= 0) check(llm_detokenize(t, ids, n, out, sizeof out, &err) >= 0);
    }
    llm_tokenizer_free(t);
    llm_file_close(file);
    return 0;
}
