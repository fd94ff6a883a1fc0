/* libFuzzer: any bytes as a GGUF file. If it opens, every byte of it is read. If it has a
 * tokenizer, a text is tokenized and decoded. If it is a whole model, it generates a few tokens.
 * Seeds: tests/data/fuzz_file, written by make_seeds.c. */
#include "../llm.h"
#include "walk.h"

#include <string.h>

static void tokenize_and_decode(const llm_tokenizer *t) {
    static const char text[] = "Once </s> ab aaaa\xE6\x97\xA5\xFF 12<tool>";
    int32_t ids[100];
    llm_error err;
    int64_t n = llm_tokenize(t, text, sizeof text - 1, LLM_TOKENIZE_BOS | LLM_TOKENIZE_SPECIAL, ids,
                             100, &err);
    char *out = (char *)malloc(llm_stream_capacity(t));
    llm_stream stream;
    memset(&stream, 0, sizeof stream);
    for (int64_t i = 0; i <= n && i < 100; i++)
        read_all(out, llm_stream_decode(t, &stream, i < n ? ids[i] : -1, out));
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    llm_error err;
    llm_file *file = llm_file_from_memory(data, size, "fuzz", &err);
    if (!file && (err.status == LLM_OK || !err.message[0])) abort();
    if (!file) return 0;
    walk(file);
    llm_tokenizer *t = llm_tokenizer_create(file, &err);
    if (!t && (err.status == LLM_OK || !err.message[0])) abort();
    if (t) tokenize_and_decode(t);
    llm_tokenizer_free(t);
    llm_file_close(file);
    llm_model *model = llm_model_from_memory(data, size, "fuzz", &err);
    if (!model && (err.status == LLM_OK || !err.message[0])) abort();
    if (model) say_words(model, 16, 4);
    llm_model_free(model);
    return 0;
}
