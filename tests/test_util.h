/* Shared by the tests: counting memory that can fail (test_memory.h), random numbers, GGUF files
 * and vocabularies built in memory. Include it before llm.h: it sets the LLM_MALLOC family. */
#ifndef TEST_UTIL_H
#define TEST_UTIL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "test_memory.h"

/* ---- Random numbers (xorshift64*), the same in every run ------------------------------- */

typedef struct test_random {
    uint64_t state;
} test_random;

TEST_UNUSED static uint64_t random_u64(test_random *r) {
    if (!r->state) r->state = 88172645463325252ULL;
    r->state ^= r->state >> 12;
    r->state ^= r->state << 25;
    r->state ^= r->state >> 27;
    return r->state * 2685821657736338717ULL;
}

TEST_UNUSED static int random_below(test_random *r, int n) {
    return (int)(random_u64(r) % (uint64_t)n);
}

/* CPU time of this process in seconds, for tests that something is not quadratic. (Wall time also
 * counts the time of other processes.) */
TEST_UNUSED static double computed_seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

/* ---- Bytes that grow ------------------------------------------------------------------- */

typedef struct bytes {
    uint8_t *data;
    size_t length, capacity;
} bytes;

TEST_UNUSED static void put(bytes *b, const void *data, size_t n) {
    if (b->length + n > b->capacity) {
        b->capacity = (b->length + n) * 2 + 64;
        b->data = (uint8_t *)realloc(b->data, b->capacity);
        if (!b->data) abort();
    }
    if (n) memcpy(b->data + b->length, data, n);
    b->length += n;
}

TEST_UNUSED static void put_u8(bytes *b, uint8_t x) { put(b, &x, sizeof x); }
TEST_UNUSED static void put_u32(bytes *b, uint32_t x) { put(b, &x, sizeof x); }
TEST_UNUSED static void put_u64(bytes *b, uint64_t x) { put(b, &x, sizeof x); }
TEST_UNUSED static void put_f32(bytes *b, float x) { put(b, &x, sizeof x); }

TEST_UNUSED static void put_text(bytes *b, const void *data, size_t n) {
    put_u64(b, n);
    put(b, data, n);
}

TEST_UNUSED static void put_string(bytes *b, const char *s) { put_text(b, s, strlen(s)); }

TEST_UNUSED static void clear_bytes(bytes *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

/* Read a whole file and append a zero byte, which `length` does not include. */
TEST_UNUSED static bytes slurp(const char *path) {
    bytes b = {0};
    char buffer[4096];
    size_t n;
    FILE *f = fopen(path, "rb");
    if (!f) {
        fprintf(stderr, "cannot open %s; run this from the repository's root\n", path);
        abort();
    }
    while ((n = fread(buffer, 1, sizeof buffer, f)) > 0) put(&b, buffer, n);
    fclose(f);
    put_u8(&b, 0);
    b.length--;
    return b;
}

/* ---- GGUF files ------------------------------------------------------------------------- */

/* A file under construction. Values, declarations and data are plain bytes, so that a test can also
 * write invalid ones. */
typedef struct gguf {
    uint32_t version;          /* 0 means 3 */
    uint64_t n_values, n_tensors;
    uint64_t alignment;        /* 0 means 32 */
    bytes values, tensors, data;
} gguf;

enum {
    T_U8, T_I8, T_U16, T_I16, T_U32, T_I32, T_F32, T_BOOL, T_STRING, T_ARRAY, T_U64, T_I64, T_F64
};

TEST_UNUSED static void gguf_value(gguf *g, const char *key, uint32_t type, const void *data,
                                   size_t n) {
    put_string(&g->values, key);
    put_u32(&g->values, type);
    put(&g->values, data, n);
    g->n_values++;
}

TEST_UNUSED static void gguf_array(gguf *g, const char *key, uint32_t type, uint64_t count,
                                   const void *data, size_t n) {
    bytes b = {0};
    put_u32(&b, type);
    put_u64(&b, count);
    put(&b, data, n);
    gguf_value(g, key, T_ARRAY, b.data, b.length);
    clear_bytes(&b);
}

TEST_UNUSED static void gguf_u32(gguf *g, const char *key, uint32_t x) {
    gguf_value(g, key, T_U32, &x, sizeof x);
}

TEST_UNUSED static void gguf_bool(gguf *g, const char *key, bool x) {
    uint8_t byte = x;
    gguf_value(g, key, T_BOOL, &byte, 1);
}

TEST_UNUSED static void gguf_string(gguf *g, const char *key, const char *x) {
    bytes b = {0};
    put_string(&b, x);
    gguf_value(g, key, T_STRING, b.data, b.length);
    clear_bytes(&b);
}

TEST_UNUSED static void gguf_declare(gguf *g, const char *name, uint32_t n_dims,
                                     const uint64_t *dims, uint32_t type, uint64_t offset) {
    put_string(&g->tensors, name);
    put_u32(&g->tensors, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) put_u64(&g->tensors, dims[i]);
    put_u32(&g->tensors, type);
    put_u64(&g->tensors, offset);
    g->n_tensors++;
}

/* Append a tensor and its data. */
TEST_UNUSED static void gguf_tensor(gguf *g, const char *name, uint64_t rows, uint64_t cols,
                                    uint32_t type, const void *data, size_t n) {
    uint64_t dims[2] = {cols, rows}, alignment = g->alignment ? g->alignment : 32;
    while (g->data.length % alignment) put_u8(&g->data, 0);
    gguf_declare(g, name, rows ? 2 : 1, dims, type, g->data.length);
    put(&g->data, data, n);
}

/* Assemble the file and free its parts. */
TEST_UNUSED static bytes gguf_finish(gguf *g) {
    bytes b = {0};
    put(&b, "GGUF", 4);
    put_u32(&b, g->version ? g->version : 3);
    put_u64(&b, g->n_tensors);
    put_u64(&b, g->n_values);
    put(&b, g->values.data, g->values.length);
    put(&b, g->tensors.data, g->tensors.length);
    if (g->n_tensors)
        while (b.length % (g->alignment ? g->alignment : 32)) put_u8(&b, 0);
    put(&b, g->data.data, g->data.length);
    clear_bytes(&g->values);
    clear_bytes(&g->tensors);
    clear_bytes(&g->data);
    return b;
}

/* ---- Vocabularies ------------------------------------------------------------------------ */

typedef struct vocabulary {
    int n, n_merges;
    bytes tokens, scores, kinds, merges; /* contents of the file's arrays */
} vocabulary;

enum { K_NORMAL = 1, K_UNKNOWN, K_CONTROL, K_USER, K_UNUSED, K_BYTE };

TEST_UNUSED static void add_bytes_token(vocabulary *v, const void *text, size_t n, float score,
                                        int32_t kind) {
    put_text(&v->tokens, text, n);
    put_f32(&v->scores, score);
    put(&v->kinds, &kind, sizeof kind);
    v->n++;
}

TEST_UNUSED static void add_token(vocabulary *v, const char *text, float score, int32_t kind) {
    add_bytes_token(v, text, strlen(text), score, kind);
}

TEST_UNUSED static void add_merge(vocabulary *v, const char *merge) {
    put_string(&v->merges, merge);
    v->n_merges++;
}

/* GPT-2's printable spelling of bytes: a printable byte is its own character; the others are the
 * code points from 256 on, in order. out has room for 2n + 1 bytes. */
TEST_UNUSED static void spell(const uint8_t *data, size_t n, char *out) {
    int code[256], next = 256;
    for (int b = 0; b < 256; b++) {
        bool prints =
            (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
        code[b] = prints ? b : next++;
    }
    for (size_t i = 0; i < n; i++) {
        int c = code[data[i]];
        if (c < 128) *out++ = (char)c;
        else {
            *out++ = (char)(0xC0 | c >> 6);
            *out++ = (char)(0x80 | (c & 63));
        }
    }
    *out = 0;
}

/* Add the vocabulary's metadata to a file, and free the vocabulary. */
TEST_UNUSED static void gguf_vocabulary(gguf *g, vocabulary *v, const char *model) {
    gguf_string(g, "tokenizer.ggml.model", model);
    /* converters write "default" for a vocabulary whose text is not split into words */
    gguf_string(g, "tokenizer.ggml.pre", strcmp(model, "llama") ? "gpt-2" : "default");
    gguf_array(g, "tokenizer.ggml.tokens", T_STRING, (uint64_t)v->n, v->tokens.data,
               v->tokens.length);
    gguf_array(g, "tokenizer.ggml.token_type", T_I32, (uint64_t)v->n, v->kinds.data,
               v->kinds.length);
    if (!strcmp(model, "llama"))
        gguf_array(g, "tokenizer.ggml.scores", T_F32, (uint64_t)v->n, v->scores.data,
                   v->scores.length);
    else
        gguf_array(g, "tokenizer.ggml.merges", T_STRING, (uint64_t)v->n_merges, v->merges.data,
                   v->merges.length);
    clear_bytes(&v->tokens);
    clear_bytes(&v->scores);
    clear_bytes(&v->kinds);
    clear_bytes(&v->merges);
}

/* A small vocabulary of either kind. Merges are frequent among the letters a to d, spaces and a few
 * multibyte characters. Ids: 0 <unk>, 1 <s>, 2 </s>, 3 "<|im_end|>" (control), 4 "<|im|>"
 * (control), 5 "<tool>" and 6 "<tools>" (user-defined), then the 256 bytes, then the rest. */
enum { V_UNKNOWN, V_BOS, V_EOS, V_IM_END, V_IM, V_TOOL, V_TOOLS, V_BYTES };

TEST_UNUSED static void add_fixed_tokens(vocabulary *v) {
    add_token(v, "<unk>", 0, K_UNKNOWN);
    add_token(v, "<s>", 0, K_CONTROL);
    add_token(v, "</s>", 0, K_CONTROL);
    add_token(v, "<|im_end|>", 0, K_CONTROL);
    add_token(v, "<|im|>", 0, K_CONTROL);
    add_token(v, "<tool>", 0, K_USER);
    add_token(v, "<tools>", 0, K_USER);
}

TEST_UNUSED static void gpt2_vocabulary(gguf *g) {
    /* merges over raw bytes, each of two tokens that already exist */
    static const char *const pairs[][2] = {
        {"a", "b"}, {"b", "c"}, {" ", "a"}, {"ab", "c"}, {"c", "d"}, {" a", "b"}, {"a", "a"},
        {"aa", "aa"}, {" ", " "}, {"d", "d"}, {"bc", "d"}, {"\xC3", "\xA9"}, {"\xE6", "\x97"},
        {"\xE6\x97", "\xA5"}, {"\xF0\x9F", "\x98"}, {"\xF0", "\x9F"}, {"aaaa", "aaaa"},
        {"abc", "d"}, {"\n", "\n"}, {"1", "2"}, {"'", "s"}, {" ", "\xE6\x97\xA5"}, {"  ", "  "},
        {"\xA9", "\xC3"}};
    vocabulary v;
    memset(&v, 0, sizeof v);
    add_fixed_tokens(&v);
    char text[64], left[32], right[32];
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        spell(&byte, 1, text);
        add_token(&v, text, 0, K_NORMAL);
    }
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        spell((const uint8_t *)pairs[i][0], strlen(pairs[i][0]), left);
        spell((const uint8_t *)pairs[i][1], strlen(pairs[i][1]), right);
        snprintf(text, sizeof text, "%s%s", left, right);
        add_token(&v, text, 0, K_NORMAL);
        snprintf(text, sizeof text, "%s %s", left, right);
        add_merge(&v, text);
    }
    gguf_vocabulary(g, &v, "gpt2");
    gguf_u32(g, "tokenizer.ggml.bos_token_id", V_BOS);
    gguf_u32(g, "tokenizer.ggml.eos_token_id", V_EOS);
}

TEST_UNUSED static void llama_vocabulary(gguf *g) {
    static const struct {
        const char *text;
        float score;
    } pieces[] = {
        {"\xE2\x96\x81", -9}, {"a", -5}, {"b", -6}, {"c", -7}, {"d", -8}, {"ab", -2}, {"bc", -2},
        {"abc", -1}, {"\xE2\x96\x81" "a", -1}, {"\xE2\x96\x81" "ab", -3}, {"aa", -4}, {"aaaa", -3},
        {"cd", -2}, {"\xE2\x96\x81\xE2\x96\x81", -4}, {"\xC3\xA9", -3}, {"\xC3\xA9" "a", -3},
        {"\xE6\x97\xA5", -2}, {"dd", -2}, {"ddd", -2}, {"<", -5}, {"s", -5}, {">", -5}, {"<s", -1},
        {"1", -3}};
    vocabulary v;
    memset(&v, 0, sizeof v);
    add_fixed_tokens(&v);
    for (int b = 0; b < 256; b++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
        add_token(&v, text, 0, K_BYTE);
    }
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        add_token(&v, pieces[i].text, pieces[i].score, K_NORMAL);
    gguf_vocabulary(g, &v, "llama");
    gguf_u32(g, "tokenizer.ggml.bos_token_id", V_BOS);
    gguf_u32(g, "tokenizer.ggml.eos_token_id", V_EOS);
    gguf_u32(g, "tokenizer.ggml.unknown_token_id", V_UNKNOWN);
}

#endif /* TEST_UTIL_H */
