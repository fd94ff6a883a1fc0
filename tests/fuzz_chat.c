/* libFuzzer: any bytes as a chat template, with any text in the messages. The engine renders it or
 * gives an error. If the template has no special tokens, no message produces one. Input: the
 * template, a zero byte, the text of the messages, or the messages as JSON. The length of the text
 * selects a named template. Seeds: tests/data/fuzz_chat. */
#include "test_util.h"
#include "../llm.h"

static void check(bool fine) {
    if (!fine) abort();
}

static int64_t count_special_tokens(const llm_tokenizer *t, const llm_chat_options *options,
                                    const char *text, size_t length) {
    llm_message m[3] = {{LLM_ROLE_USER, text, length},
                        {LLM_ROLE_ASSISTANT, text, length},
                        {LLM_ROLE_USER, text, length}};
    llm_error err;
    size_t capacity = length * 3 + 400; /* three messages, at most one token per byte */
    int32_t *ids = (int32_t *)malloc(capacity * sizeof *ids);
    int64_t n = llm_chat_tokenize(t, options, m, 3, ids, (int64_t)capacity, &err), count = 0;
    check((n < 0) == (err.status != LLM_OK));
    if (n > (int64_t)capacity) { /* the template's text may need more */
        ids = (int32_t *)realloc(ids, (size_t)n * sizeof *ids);
        check(llm_chat_tokenize(t, options, m, 3, ids, n, &err) == n);
    }
    for (int64_t i = 0; i < n; i++) count += llm_tokenizer_is_special(t, ids[i]);
    free(ids);
    return n < 0 ? -1 : count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *zero = size ? (const uint8_t *)memchr(data, 0, size) : NULL;
    size_t template_length = zero ? (size_t)(zero - data) : size;
    const char *text = zero ? (const char *)zero + 1 : "";
    size_t length = zero ? size - template_length - 1 : 0;
    static gguf vocabulary_only; /* built once */
    if (!vocabulary_only.n_values) gpt2_vocabulary(&vocabulary_only);
    llm_error err;
    gguf g = vocabulary_only;
    bytes value = {0};
    memset(&g.values, 0, sizeof g.values);
    put(&g.values, vocabulary_only.values.data, vocabulary_only.values.length);
    put_text(&value, data, template_length);
    gguf_value(&g, "tokenizer.chat_template", T_STRING, value.data, value.length);
    clear_bytes(&value);
    bytes whole = gguf_finish(&g);
    llm_file *file = llm_file_from_memory(whole.data, whole.length, "fuzz", &err);
    llm_tokenizer *t = llm_tokenizer_create(file, &err);
    check(t != NULL);
    check(llm_chat_template_source(t, NULL).length == template_length);
    llm_chat_options options = llm_chat_defaults();
    count_special_tokens(t, &options, text, length);
    int32_t *ids;
    if (llm_chat_tokenize_json(t, &options, text, length, &ids, &err) >= 0) llm_free(ids);
    else check(err.status != LLM_OK && ids == NULL);
    char *source = (char *)malloc(template_length + 1); /* without "<" there is no special token */
    for (size_t i = 0; i < template_length; i++)
        source[i] = data[i] == '<' || !data[i] ? ' ' : (char)data[i];
    source[template_length] = 0;
    options.template_source = source;
    bool escapes = strstr(source, "_token") != NULL;
    check(escapes || count_special_tokens(t, &options, text, length) <= 0);
    free(source);
    options.template_source = NULL;
    size_t n_templates = 0;
    while (llm_chat_template_at((int)n_templates)) n_templates++;
    options.template_name = llm_chat_template_at((int)(length % n_templates));
    check(count_special_tokens(t, &options, text, length) ==
          count_special_tokens(t, &options, "x", 1));
    llm_tokenizer_free(t);
    llm_file_close(file);
    clear_bytes(&whole);
    return 0;
}
