/* libFuzzer: a chat template, which is recognised or not, and renders a conversation; and messages, of which none can become a
 * special token. The input is the template, a zero byte, and the text of the messages. Seeds: tests/data/fuzz_chat. */
#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "../llm.h"

static void check(bool fine) {
    if (!fine) abort();
}

static int64_t specials(const llm_tokenizer *t, const llm_chat_options *options, const char *text, size_t length) {
    llm_message m[3] = {{LLM_ROLE_USER, text, length}, {LLM_ROLE_ASSISTANT, text, length}, {LLM_ROLE_USER, text, length}};
    llm_error err;
    int64_t n = llm_chat_tokenize(t, options, m, 3, NULL, 0, &err), count = 0;
    check((n < 0) == (err.status != LLM_OK));
    if (n < 0) return -1;
    int32_t *ids = (int32_t *)malloc((size_t)n * sizeof *ids + 1);
    check(llm_chat_tokenize(t, options, m, 3, ids, n, &err) == n);
    for (int64_t i = 0; i < n; i++) count += llm_tokenizer_is_special(t, ids[i]);
    free(ids);
    return count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *zero = size ? (const uint8_t *)memchr(data, 0, size) : NULL;
    size_t template_length = zero ? (size_t)(zero - data) : size;
    const char *text = zero ? (const char *)zero + 1 : "";
    size_t length = zero ? size - template_length - 1 : 0;
    llm_error err;
    gguf g;
    bytes value = {0};
    memset(&g, 0, sizeof g);
    gpt2_vocabulary(&g);
    put_text(&value, data, template_length);
    gguf_value(&g, "tokenizer.chat_template", T_STRING, value.data, value.length);
    clear_bytes(&value);
    bytes whole = gguf_finish(&g);
    llm_file *file = llm_file_from_memory(whole.data, whole.length, "fuzz", &err);
    llm_tokenizer *t = llm_tokenizer_create(file, &err);
    check(t != NULL);
    check(llm_chat_template_source(t).length == template_length);
    llm_chat_options options = llm_chat_defaults();
    check((specials(t, &options, text, length) >= 0) == (llm_chat_template(t) != NULL && (specials(t, &options, "", 0) >= 0)));
    for (int i = 0; (options.template_name = llm_chat_template_at(i)) != NULL; i++)
        check(specials(t, &options, text, length) == specials(t, &options, "x", 1));
    llm_tokenizer_free(t);
    llm_file_close(file);
    clear_bytes(&whole);
    return 0;
}
