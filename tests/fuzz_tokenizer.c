/* libFuzzer: a byte of flags, then a text. The text is tokenized with a small vocabulary of either
 * kind, and detokenizing must return it. Its bytes are also decoded as token ids; the stream must
 * emit only whole characters. Seeds: tests/data/fuzz_tokenizer, written by make_seeds.c. */
#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "../llm.h"

enum { FLAG_LLAMA = 1, FLAG_SPECIAL = 2, FLAG_BOS = 4 };

static void check(bool fine) {
    if (!fine) abort();
}

static llm_tokenizer *vocabulary_of(bool llama) {
    static llm_tokenizer *tokenizers[2]; /* built once */
    static bytes data[2];
    if (!tokenizers[llama]) {
        gguf g;
        llm_error err;
        memset(&g, 0, sizeof g);
        if (llama) llama_vocabulary(&g);
        else gpt2_vocabulary(&g);
        data[llama] = gguf_finish(&g);
        tokenizers[llama] = llm_tokenizer_create(
            llm_file_from_memory(data[llama].data, data[llama].length, "fuzz", &err), &err);
        check(tokenizers[llama] != NULL);
    }
    return tokenizers[llama];
}

static void check_stream(const llm_tokenizer *t, const int32_t *ids, int64_t n) {
    size_t capacity = llm_stream_capacity(t);
    char *out = (char *)malloc(capacity);
    llm_stream s;
    memset(&s, 0, sizeof s);
    for (int64_t i = 0; i <= n; i++) {
        size_t length = llm_stream_decode(t, &s, i < n ? ids[i] : -1, out);
        check(length <= capacity);
        for (size_t at = 0; at < length;) {
            uint32_t code;
            at += llm__utf8((const uint8_t *)out + at, length - at, &code);
            check(code < LLM__UTF8_INVALID);
        }
    }
    check(s.n_held == 0);
    free(out);
}

static bool contains(const uint8_t *text, size_t n, const char *wanted) {
    size_t length = strlen(wanted);
    for (size_t i = 0; i + length <= n; i++)
        if (!memcmp(text + i, wanted, length)) return true;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    bool llama = data[0] & FLAG_LLAMA;
    unsigned flags = (data[0] & FLAG_SPECIAL ? LLM_TOKENIZE_SPECIAL : 0u) |
                     (data[0] & FLAG_BOS ? LLM_TOKENIZE_BOS : 0u);
    const uint8_t *text = data + 1;
    size_t n = size - 1;
    llm_tokenizer *t = vocabulary_of(llama);
    int64_t capacity = (int64_t)n * 4 + 4; /* a space may be added after every special token */
    int32_t *ids = (int32_t *)malloc((size_t)capacity * sizeof *ids);
    char *back = (char *)malloc(n + 1);
    llm_error err;
    int64_t count = llm_tokenize(t, (const char *)text, n, flags, ids, capacity, &err);
    check(count >= 0 && count <= capacity && err.status == LLM_OK);
    int64_t length = llm_detokenize(t, ids, count, back, n, &err);
    check(length >= 0);
    /* a "llama" vocabulary writes a space as U+2581, so a U+2581 in the text comes back as a
     * space */
    if (!(flags & LLM_TOKENIZE_SPECIAL) && !(llama && contains(text, n, "\xE2\x96\x81")))
        check(length == (int64_t)n && !memcmp(back, text, n));
    check_stream(t, ids, count);
    /* some ids are out of range */
    for (size_t i = 0; i < n; i++) ids[i] = i % 3 ? text[i] : text[i] * 2;
    check_stream(t, ids, (int64_t)n);
    free(ids);
    free(back);
    return 0;
}
