/* Chapter 9: text to token ids and back. Run from the repository's root. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <time.h>
#include <cmocka.h>

#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "../llm.h"

/* ---- Helpers ------------------------------------------------------------------------------ */

typedef struct vocab { /* a tokenizer and its file */
    bytes data;
    llm_file *file;
    llm_tokenizer *t;
    llm_error err;
} vocab;

#define SPACE "\xE2\x96\x81" /* a space, as "llama" vocabularies write it */

static vocab open_vocab(gguf *g) {
    vocab v;
    memset(&v, 0, sizeof v);
    v.data = gguf_finish(g);
    v.file = llm_file_from_memory(v.data.data, v.data.length, "test.gguf", &v.err);
    assert_non_null(v.file);
    v.t = llm_tokenizer_create(v.file, &v.err);
    memset(g, 0, sizeof *g);
    return v;
}

static void close_vocab(vocab *v) {
    llm_tokenizer_free(v->t);
    llm_file_close(v->file);
    clear_bytes(&v->data);
}

/* A small vocabulary of test_util.h, of either kind. */
static vocab small_vocab(bool llama) {
    gguf g = {0};
    if (llama) llama_vocabulary(&g);
    else gpt2_vocabulary(&g);
    vocab v = open_vocab(&g);
    if (!v.t) print_error("%s\n", v.err.message);
    assert_non_null(v.t);
    assert_int_equal(v.err.status, LLM_OK);
    return v;
}

/* Tokens 0 to 255: the bytes, in GPT-2's spelling. */
static vocabulary byte_vocabulary(void) {
    vocabulary w;
    char text[8];
    memset(&w, 0, sizeof w);
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        spell(&byte, 1, text);
        add_token(&w, text, 0, K_NORMAL);
    }
    return w;
}

typedef struct tokens {
    int32_t *ids;
    int64_t n;
} tokens;

static tokens tokenize(const llm_tokenizer *t, const void *text, size_t n, unsigned flags) {
    tokens r;
    llm_error err;
    int64_t capacity = (int64_t)n + 3;
    r.ids = (int32_t *)malloc((size_t)capacity * sizeof *r.ids);
    r.n = llm_tokenize(t, (const char *)text, n, flags, r.ids, capacity, &err);
    if (r.n < 0) print_error("%s\n", err.message);
    assert_true(r.n >= 0 && r.n <= capacity && err.status == LLM_OK);
    int32_t *ids;
    assert_int_equal(llm_tokenize_new(t, (const char *)text, n, flags, &ids, &err), r.n);
    assert_non_null(ids);
    assert_memory_equal(ids, r.ids, (size_t)r.n * sizeof *ids);
    llm_free(ids);
    return r;
}

/* Tokenize `text` and compare the ids with `ids`, which ends in -1. */
static void expect(const llm_tokenizer *t, const char *text, unsigned flags, const int32_t *ids) {
    tokens r = tokenize(t, text, strlen(text), flags);
    bool same = true;
    int64_t n = 0;
    for (; ids[n] >= 0; n++) same = same && n < r.n && r.ids[n] == ids[n];
    if (!same || n != r.n) {
        print_error("\"%s\":", text);
        for (int64_t i = 0; i < r.n; i++) print_error(" %d", (int)r.ids[i]);
        print_error("\n");
    }
    assert_true(same && n == r.n);
    free(r.ids);
}

#define EXPECT(t, text, flags, ...) expect(t, text, flags, (const int32_t[]){__VA_ARGS__, -1})

static bytes detokenize(const llm_tokenizer *t, const int32_t *ids, int64_t n) {
    llm_error err;
    int64_t length = llm_detokenize(t, ids, n, NULL, 0, &err);
    assert_true(length >= 0 && err.status == LLM_OK);
    bytes b = {(uint8_t *)malloc((size_t)length + 1), (size_t)length, (size_t)length + 1};
    assert_true(llm_detokenize(t, ids, n, (char *)b.data, (size_t)length, &err) == length);
    char *text;
    assert_true(llm_detokenize_new(t, ids, n, &text, &err) == length && text[length] == 0);
    assert_memory_equal(text, b.data, (size_t)length);
    llm_free(text);
    return b;
}

static void round_trip(const llm_tokenizer *t, const void *text, size_t n) {
    tokens r = tokenize(t, text, n, 0);
    bytes back = detokenize(t, r.ids, r.n);
    assert_int_equal(back.length, n);
    if (n) assert_memory_equal(back.data, text, n);
    clear_bytes(&back);
    free(r.ids);
}

/* The id of the token with this text, written as in the file. */
static int32_t id_of(const llm_tokenizer *t, const char *text) {
    for (int32_t id = 0; id < llm_tokenizer_size(t); id++) {
        llm_string s = llm_tokenizer_text(t, id);
        if (s.length == strlen(text) && !memcmp(s.data, text, s.length)) return id;
    }
    print_error("no token '%s'\n", text);
    fail();
    return -1;
}

/* Random text made of parts that the small vocabularies merge; returns its length. */
static size_t random_text(test_random *random, char *out, size_t room) {
    static const char *const parts[] = {
        "a", "b", "c", "d", "ab", "abc", "aaaa", " ", "  ", " a", "\n", "\t", "1", "12", "'s", "!",
        "\xC3\xA9", "\xC3\xA9" "a", "\xE6\x97\xA5", "\xF0\x9F\x98\x81", "dd", "bcd", ".", "<", ">",
        "s", "\xC2\xA0"};
    size_t n = 0;
    for (int i = random_below(random, 40); i > 0; i--) {
        const char *part = parts[random_below(random, sizeof parts / sizeof *parts)];
        size_t length = strlen(part);
        if (n + length > room) break;
        memcpy(out + n, part, length);
        n += length;
    }
    return n;
}

static size_t random_bytes(test_random *random, char *out, size_t room) {
    size_t n = (size_t)random_below(random, (int)room);
    for (size_t i = 0; i < n; i++) out[i] = (char)random_u64(random);
    return n;
}

/* ---- Characters --------------------------------------------------------------------------- */

static size_t encode(uint32_t c, uint8_t *out) {
    if (c < 0x80) return out[0] = (uint8_t)c, 1;
    if (c < 0x800) return out[0] = (uint8_t)(0xC0 | c >> 6), out[1] = (uint8_t)(0x80 | (c & 63)), 2;
    if (c < 0x10000)
        return out[0] = (uint8_t)(0xE0 | c >> 12), out[1] = (uint8_t)(0x80 | (c >> 6 & 63)),
               out[2] = (uint8_t)(0x80 | (c & 63)), 3;
    out[0] = (uint8_t)(0xF0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 63));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 63));
    out[3] = (uint8_t)(0x80 | (c & 63));
    return 4;
}

static void test_utf8(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 0x110000; c++) {
        uint8_t s[4];
        uint32_t code;
        size_t n = encode(c, s);
        bool surrogate = c >= 0xD800 && c < 0xE000;
        size_t got = llm__utf8(s, n, &code);
        if (surrogate) assert_true(code == LLM__UTF8_INVALID && got == 1);
        else assert_true(code == c && got == n);
        for (size_t cut = 1; cut < n && !surrogate; cut++)
            assert_true(llm__utf8(s, cut, &code) == cut && code == LLM__UTF8_INCOMPLETE);
    }
    static const struct {
        const char *bytes;
        size_t n, length;
    } invalid[] = {{"\x80", 1, 1},
                   {"\xC0\x80", 2, 1},
                   {"\xC1\xBF", 2, 1},
                   {"\xE0\x80\x80", 3, 1},
                   {"\xF0\x80\x80\x80", 4, 1},
                   {"\xF4\x90\x80\x80", 4, 1},
                   {"\xF5\x80", 2, 1},
                   {"\xFF", 1, 1},
                   {"\xE6\x97" "a", 3, 2},
                   {"\xF0\x9F\x98" "a", 4, 3},
                   {"\xC3\xC3", 2, 1}};
    for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++) {
        uint32_t code;
        assert_int_equal(llm__utf8((const uint8_t *)invalid[i].bytes, invalid[i].n, &code),
                         invalid[i].length);
        assert_int_equal(code, LLM__UTF8_INVALID);
    }
}

/* Every first and second byte, with continuation bytes after them: the decoder accepts exactly what
 * the encoder makes. */
static void test_utf8_first_bytes(void **state) {
    (void)state;
    for (uint32_t first = 0x80; first < 0x100; first++)
        for (uint32_t second = 0; second < 0x100; second++) {
            uint8_t s[4] = {(uint8_t)first, (uint8_t)second, 0x80, 0xBF}, again[4];
            uint32_t code, c = 0;
            size_t got = llm__utf8(s, 4, &code), n = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
            for (size_t i = 0; i < n; i++) c = c << 6 | (s[i] & (i ? 0x3Fu : 0x7Fu >> n));
            bool valid = c < 0x110000 && (c < 0xD800 || c > 0xDFFF) && encode(c, again) == n &&
                         !memcmp(s, again, n);
            if (valid != (code < LLM__UTF8_INVALID))
                fail_msg("%02X %02X", (unsigned)first, (unsigned)second);
            if (valid) assert_true(code == c && got == n);
        }
}

/* The characters with Unicode's White_Space property (PropList.txt). */
static void test_white_space(void **state) {
    static const uint32_t spaces[] = {0x9,    0xA,    0xB,    0xC,    0xD,    0x20,   0x85,
                                      0xA0,   0x1680, 0x2000, 0x2001, 0x2002, 0x2003, 0x2004,
                                      0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200A, 0x2028,
                                      0x2029, 0x202F, 0x205F, 0x3000};
    (void)state;
    size_t n = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        bool expected = n < sizeof spaces / sizeof *spaces && spaces[n] == c;
        n += expected;
        if (llm__is_space(c) != expected) fail_msg("U+%04X", (unsigned)c);
    }
}

/* ---- Normal form C ------------------------------------------------------------------------- */

/* Texts of up to four characters and their NFC as Python's unicodedata computes it. */
static void test_nfc(void **state) {
    static const struct {
        uint32_t text[5], expected[5];
    } cases[] = {
        {{'a', 0x301}, {0xE1}},
        /* equal combining classes: the first mark blocks the second, and the order is kept */
        {{'a', 0x305, 0x301}, {'a', 0x305, 0x301}},
        {{'a', 0x301, 0x305}, {0xE1, 0x305}},
        {{'a', 0x305, 0x301, 0x323}, {0x1EA1, 0x305, 0x301}},
        /* marks of lower classes do not block */
        {{'e', 0x334, 0x301}, {0xE9, 0x334}},
        {{'e', 0x301, 0x334}, {0xE9, 0x334}},
        {{'a', 0x301, 0x323}, {0x1EA1, 0x301}},
        {{'a', 0x31B, 0x323, 0x301}, {0x1EA1, 0x31B, 0x301}},
        {{0xE1, 0x323}, {0x1EA1, 0x301}},
        {{'O', 0x338, 0x308, 0x304}, {0x22A, 0x338}},
        {{0x301, 'a'}, {0x301, 'a'}},
        /* singletons, and characters excluded from composition */
        {{0x212B}, {0xC5}},
        {{0x2126}, {0x3A9}},
        {{0xF900}, {0x8C48}},
        {{0x344}, {0x308, 0x301}},
        {{0x958}, {0x915, 0x93C}},
        {{0x915, 0x93C}, {0x915, 0x93C}},
        {{0x1D15E}, {0x1D157, 0x1D165}},
        {{0x11099, 0x110BA}, {0x1109A}},
        /* Hangul: trailing consonants are U+11A8 to U+11C2; U+11A7, the base of their numbering, is
         * not one */
        {{0x1100, 0x1161}, {0xAC00}},
        {{0x1100, 0x1161, 0x11A7}, {0xAC00, 0x11A7}},
        {{0xAC00, 0x11A7}, {0xAC00, 0x11A7}},
        {{0xAC00, 0x11A7, 0x11A8}, {0xAC00, 0x11A7, 0x11A8}},
        {{0xAC00, 0x11A8}, {0xAC01}},
        {{0xAC00, 0x11C2}, {0xAC1B}},
        {{0xAC00, 0x11C3}, {0xAC00, 0x11C3}},
        {{0xAC01, 0x11A8}, {0xAC01, 0x11A8}},
        {{0x1112, 0x1175, 0x11C2}, {0xD7A3}},
        {{0x1100, 0x1176}, {0x1100, 0x1176}},
        {{0x1113, 0x1161}, {0x1113, 0x1161}},
        {{0xAC00, 0x301, 0x11A8}, {0xAC00, 0x301, 0x11A8}},
    };
    (void)state;
    llm_error err;
    llm__normalizer *n = llm__normalizer_create(false, &err);
    assert_non_null(n);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t text[32], expected[32];
        size_t length = 0, wanted = 0;
        for (int k = 0; cases[i].text[k]; k++) length += encode(cases[i].text[k], text + length);
        for (int k = 0; cases[i].expected[k]; k++)
            wanted += encode(cases[i].expected[k], expected + wanted);
        for (int round = 0; round < 2; round++) { /* NFC of NFC is the same */
            llm__codes codes = {NULL, 0, 0};
            llm__bytes out = {NULL, 0, 0};
            assert_true(llm__normalize(n, round ? expected : text, round ? wanted : length, &codes,
                                       &out, &err));
            if (out.length != wanted || memcmp(out.data, expected, wanted))
                fail_msg("case %zu, round %d", i, round);
            LLM_FREE(codes.data);
            LLM_FREE(out.data);
        }
    }
    LLM_FREE(n);
    assert_int_equal(test_live, 0);
}

/* The length of the first match of the tokenizer's last step, which splits. */
static size_t word_length(const llm_tokenizer *t, const uint8_t *text, size_t n) {
    llm_error err;
    llm__matcher m = {t->steps[t->n_steps - 1].expression, text, (int32_t)n, 1000000, NULL, 0, 0,
                      "test", false, &err};
    int32_t begin = 0, end = 0;
    if (!llm__find(&m, -1, &begin, &end) || begin) end = begin;
    LLM_FREE(m.frames);
    return (size_t)end;
}

/* A vocabulary of one token per byte that splits by the rule. */
static vocab rule_vocab(const char *rule) {
    gguf g = {0};
    vocabulary w = byte_vocabulary();
    gguf_string(&g, "tokenizer.ggml.model", "gpt2");
    gguf_string(&g, "tokenizer.ggml.pre", rule);
    gguf_array(&g, "tokenizer.ggml.tokens", T_STRING, (uint64_t)w.n, w.tokens.data,
               w.tokens.length);
    gguf_array(&g, "tokenizer.ggml.merges", T_STRING, 0, NULL, 0);
    clear_bytes(&w.tokens);
    clear_bytes(&w.scores);
    clear_bytes(&w.kinds);
    vocab v = open_vocab(&g);
    if (!v.t) print_error("%s: %s\n", rule, v.err.message);
    assert_non_null(v.t);
    return v;
}

/* The rule finds the words of each case, which are separated by |. */
static void check_split(const char *name, const char *const *cases, size_t n_cases) {
    vocab v = rule_vocab(name);
    for (size_t i = 0; i < n_cases; i++) {
        char text[256];
        size_t n = 0;
        for (const char *p = cases[i]; *p; p++)
            if (*p != '|') text[n++] = *p;
        const char *expected = cases[i];
        for (size_t at = 0, length; at < n; at += length) {
            size_t bar = strcspn(expected, "|");
            length = word_length(v.t, (const uint8_t *)text + at, n - at);
            if (length != bar)
                fail_msg("%s, case %zu, at %zu: %zu bytes instead of %zu", name, i, at, length,
                         bar);
            expected += bar + (expected[bar] == '|');
        }
    }
    close_vocab(&v);
}

/* The words that GPT-2's own regular expression finds (computed with Python's `regex`). */
static void test_split_gpt2(void **state) {
    (void)state;
    static const char *const cases[] = {
        "I|'ll| we|'ve| they|'re| don|'t| he|'d| I|'m| it|'s| '|Sam| '|s|'| DON|'|T",
        "a| | b|  | c| \n\n| d|\n", "x|\n \n| y",
        "\xC3\xA9t\xC3\xA9| 12\xC2\xB3\xC2\xBD| \xE2\x85\xA7\xD9\xA3| \xD0\xB6\xD1\x83\xD0\xBA",
        "\xC2\xA0|\xE3\x80\x80|x| \xE2\x80\x89| y", "don|''|t|!!!| ...?", "   ",
        "tab|\t|here|\v\f|\xC2\x85|z", " \t| a",
        "\xE6\x97\xA5\xE6\x9C\xAC\xE8\xAA\x9E|\xE3\x80\x82|\xE3\x83\x86\xE3\x82\xB9\xE3\x83\x88| "
        "\xED\x95\x9C\xEA\xB5\xAD\xEC\x96\xB4",
        "e|\xCC\x81|a|\xE2\x80\x8D|b|\xEF\xBB\xBF|c", " 1|a| 2|b", "\x1C\x1D| a",
        /* invalid bytes count as other characters */
        "a| \xFF\xC3|b|\xE6\x97'|s"};
    check_split("gpt2", cases, sizeof cases / sizeof *cases);
}

/* The same for the rules of Llama 3 and Qwen2, which differ in how they split numbers. */
static void test_split_llama3(void **state) {
    (void)state;
    static const char *const both[] = {"I|'ll| SAY|'S| it|'\xC5\xBF",
                                       "don|'T| he|'LL| we|'vE",
                                       "'\xC5\xBF|o|'s",
                                       "'S",
                                       "a| '",
                                       "a|\t|\tb| | c|\n\n| | d|\n",
                                       "x|!\n\n|y| ...\r\n| z",
                                       " \n \n| | q",
                                       "\r\n\r\n|x",
                                       "!a| _|b| --|c",
                                       "\xC2\xA0x|\xE3\x80\x80y",
                                       "ab|\xCC\x81" "c"};
    static const char *const threes[] = {"123|456|78| |9", "\xD9\xA3\xD9\xA4\xD9\xA5|\xD9\xA6",
                                         " | |12", " |\xC2\xB2\xC2\xBD"};
    static const char *const ones[] = {"1|2|3|4| |9", "\xD9\xA3|\xD9\xA4|\xD9\xA5", " | |1|2",
                                       " |\xC2\xB2|\xC2\xBD"};
    check_split("llama3", both, sizeof both / sizeof *both);
    check_split("qwen2", both, sizeof both / sizeof *both);
    check_split("llama3", threes, sizeof threes / sizeof *threes);
    check_split("qwen2", ones, sizeof ones / sizeof *ones);
}

/* The effect of each name of a split rule (tokenizer.ggml.pre) in llama.cpp: into how many words
 * "1234" is split, whether text is normalised to NFC, whether a word that is a token needs no
 * merges, and whether BOS is added. */
static void test_rule_names(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int words;
        bool composes, ignores_merges, adds_bos;
    } rules[] = {
        {"gpt-2", 1, false, false, false},     {"gpt2", 1, false, false, false},
        {"phi-2", 1, false, false, false},     {"olmo", 1, false, false, false},
        {"mpt", 1, false, false, false},       {"smollm", 4, false, false, false},
        {"starcoder", 4, false, false, false}, {"refact", 4, false, false, false},
        {"command-r", 4, false, false, false}, {"codeshell", 4, false, false, false},
        {"llama-bpe", 2, false, true, true},   {"llama3", 2, false, true, true},
        {"llama-v3", 2, false, true, true},    {"falcon3", 2, false, true, true},
        {"dbrx", 2, false, false, false},      {"smaug-bpe", 2, false, false, false},
        {"qwen2", 4, true, false, false},      {"deepseek-r1-qwen", 4, true, false, false},
    };
    static const char *const merges[] = {"1 2", "12 3", "123 4"};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        gguf g = {0};
        vocabulary w = byte_vocabulary();
        add_token(&w, "12", 0, K_NORMAL);
        add_token(&w, "123", 0, K_NORMAL);
        add_token(&w, "1234", 0, K_NORMAL);
        add_token(&w, "xy", 0, K_NORMAL); /* no merge produces this token */
        for (size_t k = 0; k < sizeof merges / sizeof *merges; k++) add_merge(&w, merges[k]);
        gguf_string(&g, "tokenizer.ggml.model", "gpt2");
        gguf_string(&g, "tokenizer.ggml.pre", rules[i].name);
        gguf_array(&g, "tokenizer.ggml.tokens", T_STRING, (uint64_t)w.n, w.tokens.data,
                   w.tokens.length);
        gguf_array(&g, "tokenizer.ggml.merges", T_STRING, (uint64_t)w.n_merges, w.merges.data,
                   w.merges.length);
        clear_bytes(&w.tokens);
        clear_bytes(&w.scores);
        clear_bytes(&w.kinds);
        clear_bytes(&w.merges);
        vocab v = open_vocab(&g);
        if (!v.t) fail_msg("%s: %s", rules[i].name, v.err.message);
        tokens r = tokenize(v.t, "1234", 4, 0);
        if (r.n != rules[i].words) fail_msg("%s: 1234 is %d words", rules[i].name, (int)r.n);
        free(r.ids);
        if (rules[i].composes) EXPECT(v.t, "e\xCC\x81", 0, 0xC3, 0xA9);
        else EXPECT(v.t, "e\xCC\x81", 0, 'e', 0xCC, 0x81);
        if (rules[i].ignores_merges) EXPECT(v.t, "xy", 0, 259);
        else EXPECT(v.t, "xy", 0, 'x', 'y');
        assert_int_equal(llm_tokenizer_adds_bos(v.t), rules[i].adds_bos);
        close_vocab(&v);
    }
    assert_int_equal(test_live, 0);
}

/* ---- Expressions and steps ------------------------------------------------------------------- */

/* Write the text with | before each match and each text between matches, except the first. */
static void mark_words(const llm__expression *e, const char *text, char *out) {
    llm_error err;
    size_t n = strlen(text);
    llm__matcher m = {e, (const uint8_t *)text, (int32_t)n, 1000000, NULL, 0, 0, "test", false,
                      &err};
    bool border[300] = {false};
    int32_t begin = 0, end = -1;
    while (llm__find(&m, end, &begin, &end)) {
        border[begin] = border[end] = true;
        begin = end;
    }
    assert_false(m.failed);
    for (size_t i = 0; i < n; i++) {
        if (i && border[i]) *out++ = '|';
        *out++ = text[i];
    }
    *out = 0;
    LLM_FREE(m.frames);
}

static llm__expression *compile(const char *source, llm_error *err) {
    llm__unicode *u = llm__unicode_create(err);
    assert_non_null(u);
    llm__expression *e = llm__expression_create(u, llm__string(source), "test.gguf", err);
    LLM_FREE(u);
    return e;
}

/* Expressions and what they match, as Hugging Face's library (Oniguruma) does. */
static void test_expressions(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"\\d{1,3}+", "1234567"},
        {"\\d{2}", "12|34|5"},
        {"a{,2}", "aa|aa|b"},
        {"a{,}", "a{,}|b"},
        {"a{2", "b|a{2"},
        {"^b", "ab\n|b"},
        {"a$", "a|\nb |a"},
        {"\\Aa", "a|aa"},
        {"a\\z", "a\na|a"},
        {"a\\Z", "a\na|a|\n"},
        {"(?=\\d)", "a|1b|2|2"},
        {"x*", "a|xx|b"},
        {"(?i)ss", "\u00DF |SS| |\u017Fs"},
        {"[a-c&&[^b]]+", "ac|bb|ca"},
        {".+(?!\U0001F680|\\z)", "a|b\U0001F680"},
        {"[^a&&b]", "a|b|c"},
        {"[a\\]b-]", "a|]|b|-|c"},
        {"[]a]", "a|]|b"},
        {"(?i)[k]", "K|\u212A|k|x"},
        {"(?i)k", "K|\u212A|k|x"},
        {"(?i)[^k]", "K\u212Ak|x"},
        {"(?i:\u03C9)", "\u03A9|\u2126|\u03C9"},
        {"a++b", "c|aab"},
        {"a++ab", "aab"},
        {"a?+b", "ab|c"},
        {"(?:ab)?+abc", "ababc|abc"},
        {"(?>a+)b", "aab|c"},
        {"(?>a|ab)c", "abc"},
        {"\\bfoo\\b", "foo| food |foo"},
        {"a{2,}?", "aa|aa"},
        {"a+?b", "aab|c"},
        {"<.*?>", "<a>|b|<c>"},
        {"<.*>", "x|<a>b<c>"},
        {".+x", "x\U0001F680\u4E00x|\U0001F680"},
        {"a+ab", "aab|c"},
        {"\\S+(?!\\S)", "ab| |c"},
        {"\\u0041\\x42\\x{43}", "ABC|D"},
        {".", "a|\n|b"},
        {"\\p{^L}", "a|1|2|b"},
        {"\\P{L}", "a|1|2|b"},
        {"[\\D]+", "ab|1"},
        {"[\\S]+", "ab| |c"},
        {"(?:a|b){2}", "ab|ab|a"},
        {"(?:ab|c){2,}", "abx|cabc"},
        {"(?:ab){0,2}c", "ab|ababc"},
        {"(?-i:a)", "a|A"},
        {"(?i)a(?-i)b|C", "aB |Ab| c C"},
        {"a(?i)b|c", "aB| C c b"},
        {"(?i:a)|b", "A| B"},
        {"(a|(b|(c)))d", "ad|bd|x|cd"},
        {"(?!ab)\\w+", "a|b"},
        {"[\\x{4E00}-\\x{9FA5}]+", "a|\u4E00\u4E8C|\u3042"},
        {"\\p{Han}+", "a|\u4E00\u3007|\u3042"},
        {"[\\w]+", "a1_|\u00B2"},
        {"\\w+", "-|\u00B2"},
        {"\\n\\t\\-\\/", "\n\t-/|x"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm_error err;
        char text[300], out[600];
        size_t n = 0;
        for (const char *p = cases[i][1]; *p; p++)
            if (*p != '|') text[n++] = *p;
        text[n] = 0;
        llm__expression *e = compile(cases[i][0], &err);
        if (!e) fail_msg("%s: %s", cases[i][0], err.message);
        mark_words(e, text, out);
        if (strcmp(out, cases[i][1]))
            fail_msg("%s: \"%s\" instead of \"%s\"", cases[i][0], out, cases[i][1]);
        llm__expression_free(e);
    }
    assert_int_equal(test_live, 0);
}

/* The number of characters in a class, counted with Hugging Face's library. */
static void test_classes(void **state) {
    (void)state;
    static const struct {
        const char *source;
        int count;
    } cases[] = {{"\\p{L}", 141028}, {"\\p{N}", 1911}, {"\\p{P}", 855},  {"\\p{S}", 8514},
                 {"\\p{M}", 2501},   {"\\p{Lm}", 404}, {"\\p{Lu}", 1858}, {"\\p{Nd}", 760},
                 {"\\d", 760},       {"\\s", 25},      {"\\w", 144671},   {"[\\w]", 144665},
                 {"\\p{Han}", 99030}, {".", 1114112},   {"(?i:[a-z])", 54}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm_error err;
        llm__expression *e = compile(cases[i].source, &err);
        assert_non_null(e);
        int count = 0;
        for (uint32_t c = 0; c <= LLM__UTF8_INVALID; c++) count += llm__accepts(e->nodes, c);
        if (count != cases[i].count)
            fail_msg("%s: %d instead of %d", cases[i].source, count, cases[i].count);
        llm__expression_free(e);
    }
    assert_int_equal(test_live, 0);
}

static void test_refused_expressions(void **state) {
    (void)state;
    static const char *const cases[] = {
        "(?<=a)b", "(?<!a)b",  "(?<n>a)",   "(a)\\1",    "*a",      "+",       "(a",     "a)",
        "[a",      "[",        "\\",        "\\p",       "\\p{",    "\\p{}",   "\\p{Greek}",
        "(a*)*",   "(?:a?)+",  "(a|)*",     "\\G",       "\\K",     "\\R",     "[[:alpha:]]",
        "a{3,2}",  "\\d{2}?",  "[b-a]",     "[a-\\d]",   "\\x{}",   "\\x{110000}",
        "(?m:.)",  "(?i",      "(?:a{9}{9}{9}{9}{9}{9})", "a\xFF"};
    llm_error err;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm__expression *e = compile(cases[i], &err);
        if (e || !strstr(err.message, "test.gguf: the regular expression"))
            fail_msg("%s: \"%s\"", cases[i], e ? "" : err.message);
    }
    char deep[2000];
    for (int kind = 0; kind < 3; kind++) {
        memset(deep, kind == 1 ? '[' : '(', 1000);
        for (int i = 0; kind == 2 && i < 1000; i++) deep[i] = '|';
        memset(deep + 1000, kind == 1 ? ']' : ')', 999);
        deep[kind == 2 ? 1000 : 1999] = 0;
        assert_null(compile(deep, &err));
    }
    for (int i = 0; i < 1200; i++) deep[i] = "[ab]"[i % 4];
    deep[1200] = 0; /* too many sets */
    assert_null(compile(deep, &err));
    assert_int_equal(test_live, 0);
}

/* A vocabulary whose words of up to 60 bytes are one token each: the length less one. */
static vocab steps_vocab(const char *const *steps, int n) {
    vocabulary w;
    gguf g = {0};
    bytes lines = {0};
    char text[64], merge[64];
    memset(&w, 0, sizeof w);
    memset(text, 'a', sizeof text);
    for (int i = 1; i <= 60; i++) {
        text[i] = 0;
        add_token(&w, text, 0, K_NORMAL);
        text[i] = 'a';
        for (int k = 1; k < i; k++) {
            memset(merge, 'a', sizeof merge);
            merge[k] = ' ';
            merge[i + 1] = 0;
            add_merge(&w, merge);
        }
    }
    for (int i = 0; i < n && steps[i]; i++) put_string(&lines, steps[i]);
    for (int i = 0; i < n; i++) if (!steps[i]) n = i;
    gguf_vocabulary(&g, &w, "gpt2");
    gguf_array(&g, "tokenizer.llm.steps", T_STRING, (uint64_t)n, lines.data, lines.length);
    clear_bytes(&lines);
    vocab v = open_vocab(&g);
    if (v.t)
        for (int b = 0; b < 256; b++) v.t->bytes[b] = 0;
    return v;
}

/* The lengths of the words, as in Hugging Face's library; the steps rewrite the text first. */
static void test_steps(void **state) {
    (void)state;
    static const struct {
        const char *steps[4], *text;
        int lengths[12];
    } cases[] = {
        {{"Isolated -+"}, "a--b-", {1, 2, 1, 1}},
        {{"Removed -"}, "a--b-", {1, 1}},
        {{"!Removed -"}, "a--b-", {1, 1, 1}},
        {{"Contiguous -"}, "a--b-", {1, 2, 1, 1}},
        {{"MergedWithPrevious -"}, "a--b-", {2, 1, 2}},
        {{"MergedWithPrevious -"}, "--b", {1, 1, 1}},
        {{"MergedWithNext -"}, "a--b-", {1, 1, 2, 1}},
        {{"!MergedWithNext -"}, "a--b-", {2, 1, 2}},
        {{"Isolated \\d", "Isolated [a-c]"}, "ab1c22", {1, 1, 1, 1, 1, 1}},
        {{"Isolated \\d", "Isolated ^a"}, "aa1a2aa", {1, 1, 1, 1, 1, 1, 1}},
        {{"NFKC"}, "\uFF21\uFB01\u1E9B\u0323\u2167\u00BD\u0385", {1 + 2 + 3 + 4 + 5 + 5}},
        {{"NFC"}, "\uFF21\uFB01\u1E9B\u0323", {3 + 3 + 3 + 2}},
        {{"NFC", "NFKC"}, "e\u0301\uFF21", {3}},
        {{"Lowercase", "Isolated [a-z]+"}, "AbC\u0130K\u212A", {4, 2, 2}},
        {{"Lowercase", "Isolated [\uAB70-\uABBF\u13F8-\u13FD\u00E9\u01C6\u2170]"},
         "\u13A0\u13F0\u00C9\u01C5\u2160\u01C4", {3, 3, 2, 2, 3, 2}},
        {{"Spell"}, "\u00E9\n", {6}},
        {{"Spell", "!Spell"}, "\u00E9\n\u00AD\x7F", {6}},
        {{"Spell", "Isolated \\p{N}", "!Spell"}, "\u00B2 \u00BE", {1, 1, 2, 1}},
        {{"Strip-left"}, " \u3000a ", {2}},
        {{"Strip-right"}, " a\u3000 ", {2}},
        {{"Strip-left", "Strip-right"}, " \n ", {0}},
        {{"Replace xyz\1a+"}, "aabab", {8}},
        {{"Replace \1 "}, " a b ", {2}},
        {{"Prepend ab"}, "ab", {4}},
        {{"Prepend-each ab"}, "ab", {2}},
        {{"Prepend-each ab"}, "b", {3}},
        {{"Prepend-first ab"}, "ab", {2}},
        {{"Isolated c", "Prepend-first ab"}, "xcx", {3, 1, 1}},
        {{"Isolated c", "Prepend-each ab"}, "xcx", {3, 3, 3}},
        {{"Isolated c", "Prepend-start ab"}, "xcx", {3, 1, 1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        vocab v = steps_vocab(cases[i].steps, 4);
        if (!v.t) fail_msg("case %zu: %s", i, v.err.message);
        tokens r = tokenize(v.t, cases[i].text, strlen(cases[i].text), 0);
        int64_t n = 0;
        for (; cases[i].lengths[n]; n++)
            if (n >= r.n || r.ids[n] + 1 != cases[i].lengths[n])
                fail_msg("case %zu (%s), word %d: %d bytes", i, cases[i].steps[0], (int)n,
                         n < r.n ? r.ids[n] + 1 : -1);
        if (n != r.n) fail_msg("case %zu: %d words", i, (int)r.n);
        free(r.ids);
        close_vocab(&v);
    }
    static const char *const unknown[] = {"isolated x", "Isolated", "Isolated ", "", "!", "NFD",
                                          "Replace x"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        vocab v = steps_vocab(&unknown[i], 1);
        assert_null(v.t);
        assert_non_null(strstr(v.err.message, "tokenizer.llm.steps has a step that is unknown"));
        close_vocab(&v);
    }
    assert_int_equal(test_live, 0);
}

/* SentencePiece's table for replacing characters, in a Unigram vocabulary: the longest text that it
 * knows counts. Spaces at the ends and next to others are dropped. */
static void test_charsmap(void **state) {
    (void)state;
    enum { UNITS = 0x800, LETTERS = 5 };
    static const char *const letters[LETTERS] = {"<unk>", "\u2581", "x", "q", "\uFFFD"};
    static const struct { const char *text; int32_t ids[8]; } cases[] = {
        {"a", {1, 2, 2}}, {"abab", {1, 3, 3}}, {"aab", {1, 2, 2, 3}}, {"xa", {1, 2, 2, 2}},
        {"  x   q ", {1, 2, 1, 3}}, {"\xFF" "a\xE2\x96", {1, 4, 2, 2, 4}}, {"   ", {0}}};
    uint32_t table[1 + UNITS + 2] = {4 * UNITS, 0x100 << 10};
    for (int damage = 0; damage < 7; damage++) {
        uint32_t *units = table + 1;
        units[0x161] = 'a' | 1 << 8 | 0x200 << 10; /* "a" -> "xx" */
        units[0x361] = 0x80000000;
        units[0x303] = 'b' | 1 << 8 | 0x400 << 10; /* "ab" -> "q" */
        units[0x703] = 0x80000003;
        memcpy(units + UNITS, "xx\0q\0\0\0", 8);
        table[0] = 4 * UNITS;
        size_t length = sizeof table;
        if (damage == 1) length = 8;
        if (damage == 2) table[0] = 4 * UNITS + 8;
        if (damage == 3) table[0] = 0xFFFFFFFC;
        if (damage == 4) memcpy(units + UNITS, "xx\0qqqqq", 8);
        if (damage == 5) units[0x361] = 0xFFFFFFFF; /* these two only find nothing */
        if (damage == 6) units[0x161] = 'a' | 1 << 8 | 0x3FFFFFu << 10;
        vocabulary w;
        gguf g = {0};
        memset(&w, 0, sizeof w);
        for (int i = 0; i < LETTERS; i++)
            add_token(&w, letters[i], i ? -1.0f : 0, i ? K_NORMAL : K_UNKNOWN);
        gguf_array(&g, "tokenizer.ggml.scores", T_F32, LETTERS, w.scores.data, w.scores.length);
        gguf_array(&g, "tokenizer.ggml.precompiled_charsmap", T_U8, length, table, length);
        gguf_bool(&g, "tokenizer.ggml.remove_extra_whitespaces", true);
        gguf_bool(&g, "tokenizer.ggml.add_eos_token", false);
        gguf_vocabulary(&g, &w, "t5");
        vocab v = open_vocab(&g);
        if (damage > 0 && damage < 5) {
            assert_null(v.t);
            assert_non_null(strstr(v.err.message, "no valid tokenizer.ggml.precompiled_charsmap"));
        } else assert_non_null(v.t);
        for (size_t i = 0; v.t && i < sizeof cases / sizeof *cases; i++) {
            tokens r = tokenize(v.t, cases[i].text, strlen(cases[i].text), 0);
            for (int64_t k = 0; !damage && k < r.n; k++)
                assert_int_equal(r.ids[k], cases[i].ids[k]);
            if (!damage && cases[i].ids[r.n]) fail_msg("%s: %d tokens", cases[i].text, (int)r.n);
            free(r.ids);
        }
        close_vocab(&v);
    }
    assert_int_equal(test_live, 0);
}

/* An expression that would take exponential time, or quadratic time on a long text, is an error. */
static void test_bound_of_steps(void **state) {
    (void)state;
    static const char *const steps[] = {"Isolated (?:a|b|ab)*c", "Isolated \\s+x"};
    char *text = (char *)malloc(100000);
    for (int i = 0; i < 2; i++) {
        vocab v = steps_vocab(&steps[i], 1);
        llm_error err;
        for (int k = 0; k < 100000; k++) text[k] = i ? ' ' : "ab"[k % 2];
        assert_int_equal(llm_tokenize(v.t, text, 100000, 0, NULL, 0, &err), -1);
        assert_non_null(strstr(err.message, "takes too many steps to split this text"));
        assert_non_null(strstr(err.message, steps[i] + 9));
        assert_true(llm_tokenize(v.t, text, 6, 0, NULL, 0, &err) > 0);
        close_vocab(&v);
    }
    free(text);
    assert_int_equal(test_live, 0);
}

/* ---- Small vocabularies ---------------------------------------------------------------------- */

static void test_gpt2_merges(void **state) {
    (void)state;
    vocab v = small_vocab(false);
    const llm_tokenizer *t = v.t;
    int32_t a = V_BYTES + 'a', b = V_BYTES + 'b', c = V_BYTES + 'c', d = V_BYTES + 'd';
    int32_t ab = id_of(t, "ab"), abc = id_of(t, "abc"), aa = id_of(t, "aa"), a4 = id_of(t, "aaaa");
    int32_t quote_s = id_of(t, "'s");
    EXPECT(t, "", 0, -1);
    EXPECT(t, "a", 0, a);
    EXPECT(t, "ab", 0, ab);
    EXPECT(t, "abc", 0, abc);
    EXPECT(t, "abcd", 0, id_of(t, "abcd"));
    EXPECT(t, "aba", 0, ab, a);
    /* "a b" ranks before " a", and no merge joins " " and "ab", though " ab" is a token */
    EXPECT(t, " ab", 0, V_BYTES + ' ', ab);
    assert_true(id_of(t, "\xC4\xA0" "ab") > 0);
    EXPECT(t, "aaaaa", 0, a4, a);
    EXPECT(t, "aaa", 0, aa, a);
    EXPECT(t, "ac's", 0, a, c, quote_s);
    EXPECT(t, "bb dc", 0, b, b, V_BYTES + ' ', d, c);
    assert_int_equal(llm_tokenizer_size(t), V_BYTES + 256 + 24);
    assert_int_equal(llm_tokenizer_bos(t), V_BOS);
    assert_int_equal(llm_tokenizer_eos(t), V_EOS);
    assert_false(llm_tokenizer_adds_bos(t));
    EXPECT(t, "a", LLM_TOKENIZE_BOS, a);
    close_vocab(&v);
    assert_int_equal(test_live, 0);
}

static void test_llama_merges(void **state) {
    (void)state;
    vocab v = small_vocab(true);
    const llm_tokenizer *t = v.t;
    int32_t space = id_of(t, SPACE), space_a = id_of(t, SPACE "a"), two = id_of(t, SPACE SPACE);
    int32_t abc = id_of(t, "abc"), bc = id_of(t, "bc"), b = id_of(t, "b");
    EXPECT(t, "", 0, -1);
    EXPECT(t, "a", 0, space_a);
    EXPECT(t, "b", 0, space, b);
    EXPECT(t, " b", 0, two, b);
    EXPECT(t, "abc", 0, space_a, bc); /* the space and "a" have the best score */
    EXPECT(t, "cabc", 0, space, id_of(t, "c"), abc);
    EXPECT(t, "babc", 0, space, b, abc);
    EXPECT(t, "b\n", 0, space, b, V_BYTES + '\n');
    EXPECT(t, "b\xC3\xA8", 0, space, b, V_BYTES + 0xC3, V_BYTES + 0xA8);
    EXPECT(t, "b\xC3", 0, space, b, V_BYTES + 0xC3);
    EXPECT(t, "b\xC3\xA9", 0, space, b, id_of(t, "\xC3\xA9"));
    /* as text, not as the control token */
    EXPECT(t, "b<s>", 0, space, b, id_of(t, "<s"), id_of(t, ">"));
    EXPECT(t, "ddd", 0, space, id_of(t, "ddd")); /* merges "dd" first, then all three */
    assert_true(llm_tokenizer_adds_bos(t));
    EXPECT(t, "a", LLM_TOKENIZE_BOS, V_BOS, space_a);
    EXPECT(t, "", LLM_TOKENIZE_BOS, V_BOS);
    close_vocab(&v);
    assert_int_equal(test_live, 0);
}

static void test_space_prefix_off(void **state) {
    (void)state;
    gguf g = {0};
    llama_vocabulary(&g);
    gguf_bool(&g, "tokenizer.ggml.add_space_prefix", false);
    gguf_bool(&g, "tokenizer.ggml.add_bos_token", false);
    vocab v = open_vocab(&g);
    assert_non_null(v.t);
    EXPECT(v.t, "b", 0, id_of(v.t, "b"));
    EXPECT(v.t, " a", 0, id_of(v.t, SPACE "a"));
    EXPECT(v.t, "b", LLM_TOKENIZE_BOS | LLM_TOKENIZE_EOS, id_of(v.t, "b"));
    round_trip(v.t, " a  b ", 6);
    close_vocab(&v);
}

/* EOS is added after the text if both the file and the caller ask for it. */
static void test_eos(void **state) {
    (void)state;
    gguf g = {0};
    llama_vocabulary(&g);
    gguf_bool(&g, "tokenizer.ggml.add_eos_token", true);
    vocab v = open_vocab(&g);
    int32_t eos = llm_tokenizer_eos(v.t), ids[2];
    llm_error err;
    assert_true(llm_tokenizer_adds_eos(v.t) && eos >= 0);
    EXPECT(v.t, "a", 0, id_of(v.t, SPACE "a"));
    EXPECT(v.t, "a", LLM_TOKENIZE_BOS | LLM_TOKENIZE_EOS, V_BOS,
           id_of(v.t, SPACE "a"), eos);
    EXPECT(v.t, "", LLM_TOKENIZE_EOS, eos);
    /* one token more than fits */
    assert_int_equal(llm_tokenize(v.t, "a", 1, LLM_TOKENIZE_BOS | LLM_TOKENIZE_EOS, ids, 2, &err),
                     3);
    close_vocab(&v);
    v = small_vocab(true);
    assert_false(llm_tokenizer_adds_eos(v.t));
    EXPECT(v.t, "a", LLM_TOKENIZE_EOS, id_of(v.t, SPACE "a"));
    close_vocab(&v);
}

static void test_special_tokens(void **state) {
    (void)state;
    for (int llama = 0; llama < 2; llama++) {
        vocab v = small_vocab(llama);
        const llm_tokenizer *t = v.t;
        unsigned special = LLM_TOKENIZE_SPECIAL;
        EXPECT(t, "<s>", special, V_BOS);
        EXPECT(t, "<s></s><|im|><|im_end|>", special, V_BOS, V_EOS, V_IM, V_IM_END);
        EXPECT(t, "<tool><tools>", special, V_TOOL, V_TOOLS); /* the longest match wins */
        /* user-defined tokens are found without the flag too */
        EXPECT(t, "<tool><tools>", 0, V_TOOL, V_TOOLS);
        tokens r = tokenize(t, "<|im_end|></s><s>", 17, 0);
        for (int64_t i = 0; i < r.n; i++) assert_false(llm_tokenizer_is_special(t, r.ids[i]));
        bytes back = detokenize(t, r.ids, r.n);
        assert_true(back.length == 17 && !memcmp(back.data, "<|im_end|></s><s>", 17));
        clear_bytes(&back);
        free(r.ids);
        round_trip(t, "<tool>a", 7);
        round_trip(t, " <tools> a<tool><tool", 21);
        round_trip(t, "a<tool>", 7);
        if (llama) {
            int32_t space = id_of(t, SPACE), b = id_of(t, "b");
            /* the text after a control token gets a space before it */
            EXPECT(t, "b</s>b", special, space, b, V_EOS, space, b);
            /* the text after a user-defined one does not */
            EXPECT(t, "b<tool>b", special, space, b, V_TOOL, b);
        } else {
            EXPECT(t, "b</s>b", special, V_BYTES + 'b', V_EOS, V_BYTES + 'b');
            EXPECT(t, "b<|im", special, V_BYTES + 'b', V_BYTES + '<', V_BYTES + '|', V_BYTES + 'i',
                   V_BYTES + 'm');
        }
        int32_t with_special[4] = {V_BOS, V_TOOL, V_EOS, V_UNKNOWN};
        back = detokenize(t, with_special, 4);
        assert_true(back.length == 6 && !memcmp(back.data, "<tool>", 6));
        clear_bytes(&back);
        assert_true(llm_tokenizer_is_end(t, V_EOS) && llm_tokenizer_is_end(t, V_IM_END));
        assert_false(llm_tokenizer_is_end(t, V_BOS) || llm_tokenizer_is_end(t, V_BYTES) ||
                     llm_tokenizer_is_end(t, -1));
        assert_false(llm_tokenizer_is_end(t, llm_tokenizer_size(t)));
        assert_true(llm_tokenizer_is_special(t, V_BOS) && llm_tokenizer_is_special(t, V_IM));
        assert_false(llm_tokenizer_is_special(t, V_TOOL) ||
                     llm_tokenizer_is_special(t, V_BYTES + 'a') || llm_tokenizer_is_special(t, -1));
        assert_true(llm_tokenizer_text(t, V_IM).length == 6 &&
                    llm_tokenizer_text(t, -1).length == 0);
        close_vocab(&v);
    }
}

/* ---- Special tokens, compared with a loop over all of them ----------------------------------- */

typedef struct special_token {
    const char *text;
    int32_t kind;
} special_token;

/* Each token is a prefix of the next or of the one after it, so that the longest match depends on
 * the rest of the text. */
static const special_token nested[] = {
    {"<x", K_USER},  {"<x>", K_CONTROL},    {"<x><", K_USER}, {"<x><y>", K_CONTROL},
    {"<y>", K_USER}, {"<y><x>", K_CONTROL}, {"<", K_CONTROL}, {"y>>", K_USER}};
enum { N_NESTED = sizeof nested / sizeof *nested };

/* Tokens 0 to 255 are the bytes; the nested tokens follow. */
static vocab nested_vocab(void) {
    gguf g = {0};
    vocabulary w = byte_vocabulary();
    for (int i = 0; i < N_NESTED; i++) add_token(&w, nested[i].text, 0, nested[i].kind);
    gguf_vocabulary(&g, &w, "gpt2");
    vocab v = open_vocab(&g);
    assert_non_null(v.t);
    return v;
}

/* The longest of these tokens that begins at text[at] and ends by `end`; -1 if there is none. */
static int longest_nested(const char *text, size_t at, size_t end, bool control) {
    int best = -1;
    for (int i = 0; i < N_NESTED; i++) {
        size_t n = strlen(nested[i].text);
        if (nested[i].kind == K_CONTROL && !control) continue;
        if (at + n <= end && !memcmp(text + at, nested[i].text, n) &&
            (best < 0 || n > strlen(nested[best].text)))
            best = i;
    }
    return best;
}

/* The plain loop: in a trusted range, the longest special token that lies in the range; elsewhere,
 * or if there is none, the longest user-defined token; else a byte. */
static int64_t naive_special_tokens(const char *text, size_t n, const llm__range *trusted,
                              int64_t n_trusted, int32_t *ids) {
    int64_t count = 0;
    for (size_t at = 0; at < n;) {
        int found = -1;
        for (int64_t r = 0; r < n_trusted; r++)
            if (trusted[r].begin <= at && at < trusted[r].end)
                found = longest_nested(text, at, trusted[r].end, true);
        if (found < 0) found = longest_nested(text, at, n, false);
        ids[count++] = found < 0 ? (uint8_t)text[at] : 256 + found;
        at += found < 0 ? 1 : strlen(nested[found].text);
    }
    return count;
}

static void check_special_tokens(const llm_tokenizer *t, const char *text, size_t n,
                         const llm__range *trusted, int64_t n_trusted) {
    int32_t got[64], wanted[64];
    llm_error err;
    int64_t n_got =
        llm__tokenize_ranges(t, text, n, trusted, n_trusted, false, false, got, 64, NULL, &err);
    int64_t n_wanted = naive_special_tokens(text, n, trusted, n_trusted, wanted);
    if (n_got != n_wanted || memcmp(got, wanted, (size_t)n_wanted * sizeof *got))
        fail_msg("\"%.*s\" with %d trusted ranges", (int)n, text, (int)n_trusted);
}

static void test_longest_special_token(void **state) {
    (void)state;
    vocab v = nested_vocab();
    EXPECT(v.t, "<x><y>", LLM_TOKENIZE_SPECIAL, 256 + 3);
    EXPECT(v.t, "<x><y", LLM_TOKENIZE_SPECIAL, 256 + 2, 'y');
    EXPECT(v.t, "<x>x", LLM_TOKENIZE_SPECIAL, 256 + 1, 'x');
    EXPECT(v.t, "<x", LLM_TOKENIZE_SPECIAL, 256);
    EXPECT(v.t, "<x><y>", 0, 256 + 2, 'y', '>');
    /* a trusted "<x>" before an untrusted "<y>": together they would be another token */
    llm__range first = {0, 3}, last = {3, 6};
    int32_t ids[8];
    int64_t n = llm__tokenize_ranges(v.t, "<x><y>", 6, &first, 1, false, false, ids, 8, NULL, NULL);
    assert_int_equal(n, 2);
    assert_true(ids[0] == 256 + 1 && ids[1] == 256 + 4);
    n = llm__tokenize_ranges(v.t, "<x><y>", 6, &last, 1, false, false, ids, 8, NULL, NULL);
    assert_int_equal(n, 3);
    assert_true(ids[0] == 256 + 2 && ids[1] == 'y' && ids[2] == '>');
    test_random random = {17};
    for (int round = 0; round < 20000; round++) {
        char text[24];
        llm__range trusted[4];
        int64_t n_trusted = 0;
        size_t n = (size_t)random_below(&random, (int)sizeof text);
        for (size_t i = 0; i < n; i++) text[i] = "<x>y><"[random_below(&random, 6)];
        for (size_t at = 0; at < n && n_trusted < 4;) { /* in order; they may touch */
            size_t begin = at + (size_t)random_below(&random, 4),
                   end = begin + 1 + (size_t)random_below(&random, 8);
            if (end > n) break;
            trusted[n_trusted++] = (llm__range){begin, end};
            at = end;
        }
        check_special_tokens(v.t, text, n, trusted, n_trusted);
        trusted[0] = (llm__range){0, n};
        check_special_tokens(v.t, text, n, trusted, 1);
    }
    close_vocab(&v);
    assert_int_equal(test_live, 0);
}

/* Adjacent characters without a token become a single unknown token if the file says so; a known
 * token ends the run. */
static void test_fused_unknown(void **state) {
    (void)state;
    for (int fuse = 0; fuse < 2; fuse++) {
        gguf g = {0};
        vocabulary w;
        memset(&w, 0, sizeof w);
        add_token(&w, "<unk>", 0, K_UNKNOWN);
        add_token(&w, "a", 0, K_NORMAL);
        gguf_vocabulary(&g, &w, "llama");
        gguf_bool(&g, "tokenizer.ggml.add_space_prefix", false);
        gguf_bool(&g, "tokenizer.llm.fuse_unknown", fuse);
        vocab v = open_vocab(&g);
        assert_non_null(v.t);
        EXPECT(v.t, "x", 0, 0);
        if (fuse) EXPECT(v.t, "xyz", 0, 0);
        else EXPECT(v.t, "xyz", 0, 0, 0, 0);
        EXPECT(v.t, "xax", 0, 0, 1, 0);
        if (fuse) EXPECT(v.t, "axxaxxa", 0, 1, 0, 1, 0, 1);
        else EXPECT(v.t, "axxaxxa", 0, 1, 0, 0, 1, 0, 0, 1);
        close_vocab(&v);
    }
}

/* Text that spells a byte token does not become that byte, even if merges lead to it. */
static void test_spelled_byte_token(void **state) {
    (void)state;
    static const char *const pieces[] = {"<", "0",  "x",   "4",    "1",
                                         ">", "<0", "<0x", "<0x4", "<0x41"};
    gguf g = {0};
    vocabulary w;
    memset(&w, 0, sizeof w);
    add_token(&w, "<0x41>", 9, K_BYTE);
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        add_token(&w, pieces[i], (float)strlen(pieces[i]), K_NORMAL);
    gguf_vocabulary(&g, &w, "llama");
    gguf_bool(&g, "tokenizer.ggml.add_space_prefix", false);
    vocab v = open_vocab(&g);
    assert_non_null(v.t);
    EXPECT(v.t, "<0x41>", 0, id_of(v.t, "<0x41"), id_of(v.t, ">"));
    EXPECT(v.t, "A", 0, 0);
    round_trip(v.t, "<0x41>A", 7);
    close_vocab(&v);
}

static void test_end_tokens(void **state) {
    (void)state;
    gguf g = {0};
    vocabulary w;
    memset(&w, 0, sizeof w);
    static const char *const texts[] = {"x",       "<|eot_id|>", "<|endoftext|>", "<end_of_turn>",
                                        "<|end|>", "mine",       "<other>",       "plain",
                                        "</s>"};
    for (int i = 0; i < 9; i++) add_token(&w, texts[i], 0, K_NORMAL);
    gguf_vocabulary(&g, &w, "gpt2");
    gguf_u32(&g, "tokenizer.ggml.eot_token_id", 5);
    gguf_u32(&g, "tokenizer.ggml.eom_token_id", 6);
    gguf_u32(&g, "tokenizer.ggml.eos_token_id", 2);
    vocab v = open_vocab(&g);
    assert_non_null(v.t);
    assert_int_equal(llm_tokenizer_bos(v.t), -1);
    /* "</s>" is an ordinary token of HTML here, as in Qwen's vocabulary */
    for (int32_t i = 0; i < 9; i++) {
        assert_int_equal(llm_tokenizer_is_end(v.t, i), i >= 1 && i <= 6);
        assert_int_equal(llm_tokenizer_is_special(v.t, i), (i >= 1 && i <= 4) || i == 6);
    }
    /* the file declares them ordinary, but they are special */
    EXPECT(v.t, "<|endoftext|><other>", LLM_TOKENIZE_SPECIAL, 2, 6);
    close_vocab(&v);
}

/* ---- Merges, compared with the plain, slow algorithm ----------------------------------------- */

typedef struct piece {
    size_t start, length;
} piece;

/* Join the adjacent pair of the lowest cost, until every cost is HUGE_VAL (not a token). */
static int naive_merge(const llm_tokenizer *t, const uint8_t *text, piece *pieces, int n,
                       double (*cost)(const llm_tokenizer *, const uint8_t *, piece, piece)) {
    for (;;) {
        int best = -1;
        double least = HUGE_VAL;
        for (int i = 0; i + 1 < n; i++) {
            double x = cost(t, text, pieces[i], pieces[i + 1]);
            if (x < least) least = x, best = i;
        }
        if (best < 0) return n;
        pieces[best].length += pieces[best + 1].length;
        memmove(pieces + best + 1, pieces + best + 2, (size_t)(n - best - 2) * sizeof *pieces);
        n--;
    }
}

/* The pair's position in the file's list of merges. */
static double merge_cost(const llm_tokenizer *t, const uint8_t *text, piece a, piece b) {
    char left[200], right[100];
    spell(text + a.start, a.length, left);
    spell(text + b.start, b.length, right);
    strcat(left, " ");
    strcat(left, right);
    llm_string rule = {0};
    size_t cursor = 0;
    for (int rank = 0;
         llm_value_string(llm_file_find(t->file, "tokenizer.ggml.merges"), &cursor, &rule); rank++)
        if (rule.length == strlen(left) && !memcmp(rule.data, left, rule.length)) return rank;
    return HUGE_VAL;
}

static double score_cost(const llm_tokenizer *t, const uint8_t *text, piece a, piece b) {
    for (int32_t id = V_BYTES + 256; id < llm_tokenizer_size(t); id++) {
        llm_string s = llm_tokenizer_text(t, id);
        double score = 0;
        if (s.length != a.length + b.length || memcmp(s.data, text + a.start, s.length)) continue;
        assert_true(
            llm_value_f64(llm_file_find(t->file, "tokenizer.ggml.scores"), (uint64_t)id, &score));
        return -score;
    }
    return HUGE_VAL;
}

static void check_pieces(const llm_tokenizer *t, const uint8_t *text, const piece *pieces, int n,
                         bool llama, const tokens *r, int64_t *at) {
    for (int i = 0; i < n; i++) {
        char wanted[256];
        if (llama)
            snprintf(wanted, sizeof wanted, "%.*s", (int)pieces[i].length,
                     (const char *)text + pieces[i].start);
        else spell(text + pieces[i].start, pieces[i].length, wanted);
        assert_true(*at < r->n);
        llm_string s = llm_tokenizer_text(t, r->ids[*at]);
        if (s.length == strlen(wanted) && !memcmp(s.data, wanted, s.length)) {
            ++*at;
            continue;
        }
        for (size_t k = 0; k < pieces[i].length; k++, ++*at) { /* no such token: use its bytes */
            assert_true(llama && *at < r->n);
            assert_int_equal(r->ids[*at], V_BYTES + text[pieces[i].start + k]);
        }
    }
}

static void test_gpt2_against_naive(void **state) {
    (void)state;
    vocab v = small_vocab(false);
    test_random random = {7};
    for (int round = 0; round < 400; round++) {
        char text[200];
        piece pieces[200];
        size_t n = random_text(&random, text, sizeof text);
        tokens r = tokenize(v.t, text, n, 0);
        int64_t at = 0;
        for (size_t begin = 0, length; begin < n; begin += length) {
            length = word_length(v.t, (const uint8_t *)text + begin, n - begin);
            for (size_t i = 0; i < length; i++) pieces[i] = (piece){begin + i, 1};
            int count = naive_merge(v.t, (const uint8_t *)text, pieces, (int)length, merge_cost);
            check_pieces(v.t, (const uint8_t *)text, pieces, count, false, &r, &at);
        }
        assert_true(at == r.n);
        free(r.ids);
    }
    close_vocab(&v);
}

static void test_llama_against_naive(void **state) {
    (void)state;
    vocab v = small_vocab(true);
    test_random random = {8};
    for (int round = 0; round < 400; round++) {
        char text[200];
        uint8_t escaped[700];
        piece pieces[700];
        size_t n = random_text(&random, text, sizeof text), m = 0;
        tokens r = tokenize(v.t, text, n, 0);
        int64_t at = 0;
        int count = 0;
        for (size_t i = 0; n && i < n + 1; i++) {
            char c = i ? text[i - 1] : ' ';
            if (c == ' ') memcpy(escaped + m, SPACE, 3), m += 3;
            else escaped[m++] = (uint8_t)c;
        }
        for (size_t i = 0, length; i < m; i += length) {
            length = escaped[i] < 0x80 ? 1 : escaped[i] < 0xE0 ? 2 : escaped[i] < 0xF0 ? 3 : 4;
            pieces[count++] = (piece){i, length};
        }
        count = naive_merge(v.t, escaped, pieces, count, score_cost);
        check_pieces(v.t, escaped, pieces, count, true, &r, &at);
        assert_true(at == r.n);
        free(r.ids);
    }
    close_vocab(&v);
}

/* ---- Decoding -------------------------------------------------------------------------------- */

static void test_round_trip(void **state) {
    (void)state;
    test_random random = {3};
    for (int llama = 0; llama < 2; llama++) {
        vocab v = small_vocab(llama);
        for (int round = 0; round < 5000; round++) {
            char text[300];
            size_t n = round % 2 ? random_text(&random, text, sizeof text)
                                 : random_bytes(&random, text, sizeof text);
            round_trip(v.t, text, n);
        }
        for (int a = 0; a < 256; a++) /* every pair of bytes */
            for (int b = 0; b < 256; b++) {
                char text[2] = {(char)a, (char)b};
                round_trip(v.t, text, 2);
            }
        close_vocab(&v);
    }
}

static bool valid_utf8(const uint8_t *s, size_t n) {
    for (size_t at = 0; at < n;) {
        uint32_t code;
        at += llm__utf8(s + at, n - at, &code);
        if (code >= LLM__UTF8_INVALID) return false;
    }
    return true;
}

/* Decode token by token. Each output has only whole characters and stays within the capacity. */
static bytes decode_stream(const llm_tokenizer *t, const int32_t *ids, int64_t n, bool started) {
    bytes all = {0};
    llm_stream s;
    memset(&s, 0, sizeof s);
    s.started = started;
    size_t capacity = llm_stream_capacity(t);
    for (int64_t i = 0; i <= n; i++) {
        char *text = (char *)malloc(capacity);
        size_t length = llm_stream_decode(t, &s, i < n ? ids[i] : -1, text);
        assert_true(length <= capacity);
        assert_true(valid_utf8((uint8_t *)text, length));
        put(&all, text, length);
        free(text);
    }
    assert_int_equal(s.n_held, 0);
    return all;
}

static void test_stream_of_text(void **state) {
    (void)state;
    test_random random = {5};
    for (int llama = 0; llama < 2; llama++) {
        vocab v = small_vocab(llama);
        for (int round = 0; round < 3000; round++) {
            char text[300];
            size_t n = random_text(&random, text, sizeof text);
            tokens r = tokenize(v.t, text, n, 0);
            bytes out = decode_stream(v.t, r.ids, r.n, false);
            assert_int_equal(out.length, n);
            if (n) assert_memory_equal(out.data, text, n);
            clear_bytes(&out);
            /* the same text as tokens of one byte each */
            int32_t ids[300];
            for (size_t i = 0; i < n; i++) ids[i] = V_BYTES + (uint8_t)text[i];
            out = decode_stream(v.t, ids, (int64_t)n, true);
            assert_int_equal(out.length, n);
            if (n) assert_memory_equal(out.data, text, n);
            clear_bytes(&out);
            free(r.ids);
        }
        close_vocab(&v);
    }
}

static void test_stream_of_random_tokens(void **state) {
    (void)state;
    test_random random = {6};
    for (int llama = 0; llama < 2; llama++) {
        vocab v = small_vocab(llama);
        for (int round = 0; round < 5000; round++) {
            int32_t ids[60];
            int n = random_below(&random, 60);
            for (int i = 0; i < n; i++) ids[i] = random_below(&random, llm_tokenizer_size(v.t) + 1);
            bytes out = decode_stream(v.t, ids, n, round % 2);
            clear_bytes(&out);
        }
        close_vocab(&v);
    }
}

static void expect_stream(const llm_tokenizer *t, const char *raw, const char *expected) {
    int32_t ids[64];
    int n = 0;
    for (const char *p = raw; *p; p++) ids[n++] = V_BYTES + (uint8_t)*p;
    bytes out = decode_stream(t, ids, n, true);
    assert_int_equal(out.length, strlen(expected));
    assert_memory_equal(out.data, expected, out.length);
    clear_bytes(&out);
}

/* An incomplete or invalid sequence becomes one U+FFFD, as the Unicode standard recommends. */
static void test_stream_of_invalid_utf8(void **state) {
    (void)state;
    for (int llama = 0; llama < 2; llama++) {
        vocab v = small_vocab(llama);
        expect_stream(v.t, "a\xFF" "b", "a\xEF\xBF\xBD" "b");
        expect_stream(v.t, "\xE6\x97", "\xEF\xBF\xBD");
        expect_stream(v.t, "\xF0\x9F\x98z", "\xEF\xBF\xBDz");
        expect_stream(v.t, "\xE6\x97\xE6\x97\xA5", "\xEF\xBF\xBD\xE6\x97\xA5");
        expect_stream(v.t, "\xC0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD");
        /* no output before the character is complete */
        llm_stream s;
        char text[1000];
        memset(&s, 0, sizeof s);
        s.started = true;
        assert_int_equal(llm_stream_decode(v.t, &s, V_BYTES + 0xF0, text), 0);
        assert_int_equal(llm_stream_decode(v.t, &s, V_BYTES + 0x9F, text), 0);
        assert_int_equal(llm_stream_decode(v.t, &s, V_EOS, text), 0);
        assert_int_equal(llm_stream_decode(v.t, &s, V_BYTES + 0x98, text), 0);
        assert_int_equal(llm_stream_decode(v.t, &s, 1000000, text), 0);
        assert_int_equal(llm_stream_decode(v.t, &s, V_BYTES + 0x81, text), 4);
        assert_memory_equal(text, "\xF0\x9F\x98\x81", 4);
        assert_int_equal(llm_stream_decode(v.t, &s, -1, text), 0);
        close_vocab(&v);
    }
}

static void test_leading_space(void **state) {
    (void)state;
    vocab v = small_vocab(true);
    int32_t ids[3] = {V_BOS, id_of(v.t, SPACE "a"), id_of(v.t, SPACE "a")};
    bytes out = decode_stream(v.t, ids, 3, false);
    assert_true(out.length == 3 && !memcmp(out.data, "a a", 3));
    clear_bytes(&out);
    out = decode_stream(v.t, ids, 3, true); /* a continuation of the prompt's text */
    assert_true(out.length == 4 && !memcmp(out.data, " a a", 4));
    clear_bytes(&out);
    out = detokenize(v.t, ids, 3);
    assert_true(out.length == 3 && !memcmp(out.data, "a a", 3));
    clear_bytes(&out);
    close_vocab(&v);
}

/* ---- Sizes ----------------------------------------------------------------------------------- */

static void test_long_texts_take_linear_time(void **state) {
    (void)state;
    enum { N = 1000000 };
    char *text = (char *)malloc(N);
    static const char *const fillings[] = {"a", "d",     " ",    "\n",           "ab",
                                           "<", "<tool", "\xFF", "\xE6\x97\xA5", "a "};
    for (int llama = 0; llama < 2; llama++) {
        vocab v = small_vocab(llama);
        for (size_t f = 0; f < sizeof fillings / sizeof *fillings; f++) {
            size_t period = strlen(fillings[f]), n = f < 2 ? N : N / 5;
            for (size_t i = 0; i < n; i++) text[i] = fillings[f][i % period];
            clock_t start = clock(); /* processor time: other processes may use the machine */
            round_trip(v.t, text, n);
            /* much less is typical; quadratic time would take hours */
            assert_true(clock() - start < 30 * CLOCKS_PER_SEC);
        }
        close_vocab(&v);
    }
    free(text);
}

static void test_capacity(void **state) {
    (void)state;
    vocab v = small_vocab(false);
    llm_error err;
    int32_t ids[4] = {-7, -7, -7, -7};
    assert_int_equal(llm_tokenize(v.t, "abca", 4, 0, NULL, 0, &err), 2);
    assert_int_equal(llm_tokenize(v.t, "b d b", 5, 0, ids, 2, &err), 5);
    assert_true(ids[1] >= 0 && ids[2] == -7);
    char text[4] = "....";
    ids[0] = id_of(v.t, "abcd");
    assert_int_equal(llm_detokenize(v.t, ids, 1, text, 2, &err), 4);
    assert_memory_equal(text, "ab..", 4);
    assert_int_equal(llm_detokenize(v.t, ids, 0, NULL, 0, &err), 0);
    ids[1] = llm_tokenizer_size(v.t);
    assert_int_equal(llm_detokenize(v.t, ids, 2, text, 2, &err), -1);
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_non_null(
        strstr(err.message, "token 1 is 287, but the vocabulary has ids from 0 to 286"));
    assert_int_equal(llm_tokenize(v.t, NULL, 4, 0, ids, 4, &err), -1);
    assert_int_equal(llm_tokenize(v.t, "", 0, 0, ids, 4, &err), 0);
    assert_int_equal(llm_tokenize(v.t, NULL, 0, 0, NULL, 0, NULL), 0);
    assert_int_equal(llm_tokenize(v.t, "x", (size_t)INT32_MAX, 0, ids, 4, &err), -1);
    assert_non_null(strstr(err.message, "a text of 2.0 GiB is too long"));
    /* into allocated memory: NULL on error; not NULL even for no tokens */
    int32_t *own = ids;
    char *words = text;
    assert_int_equal(llm_tokenize_new(v.t, NULL, 4, 0, &own, &err), -1);
    assert_null(own);
    assert_int_equal(llm_tokenize_new(v.t, "", 0, 0, &own, &err), 0);
    assert_non_null(own);
    own[0] = 1; /* there is room for one token */
    llm_free(own);
    assert_int_equal(llm_detokenize_new(v.t, ids, 2, &words, &err), -1);
    assert_null(words);
    assert_int_equal(llm_detokenize_new(v.t, ids, 0, &words, &err), 0);
    assert_string_equal(words, "");
    llm_free(words);
    llm_free(NULL);
    close_vocab(&v);
}

static void test_loading_takes_linear_time(void **state) {
    (void)state;
    enum { N = 150000 };
    gguf g = {0};
    vocabulary w;
    memset(&w, 0, sizeof w);
    char text[64], merge[64];
    for (int i = 0; i < N; i++) {
        snprintf(text, sizeof text, "%x", i * 13);
        add_token(&w, text, 0, K_NORMAL);
        snprintf(merge, sizeof merge, "%.*s %s", (int)strlen(text) - 1, text,
                 text + strlen(text) - 1);
        add_merge(&w, merge);
    }
    gguf_vocabulary(&g, &w, "gpt2");
    double start = computed_seconds();
    vocab v = open_vocab(&g);
    double took = computed_seconds() - start;
    assert_non_null(v.t);
    print_message("a vocabulary of %d tokens and merges was opened in %.0f ms\n", N, 1e3 * took);
    assert_true(took < 5); /* typical is 0.1 s, but sanitizers are slow */
    close_vocab(&v);
}

/* ---- Bad vocabularies ------------------------------------------------------------------------ */

static void refuse(gguf *g, const char *expected) {
    vocab v = open_vocab(g);
    if (v.t || !strstr(v.err.message, expected))
        print_error("expected \"%s\", got \"%s\"\n", expected, v.t ? "(no error)" : v.err.message);
    assert_null(v.t);
    assert_true(v.err.status == LLM_ERROR_FORMAT || v.err.status == LLM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(v.err.message, expected));
    assert_non_null(strstr(v.err.message, "test.gguf: "));
    close_vocab(&v);
    assert_int_equal(test_live, 0);
}

static void put_arrays(gguf *g, const char *model, int n_tokens, int n_scores, int n_kinds) {
    bytes texts = {0}, scores = {0}, kinds = {0};
    char text[16];
    for (int i = 0; i < n_tokens; i++) {
        snprintf(text, sizeof text, "t%d", i);
        put_string(&texts, text);
    }
    for (int i = 0; i < n_scores; i++) put_f32(&scores, (float)i);
    for (int i = 0; i < n_kinds; i++) put_u32(&kinds, 1);
    gguf_string(g, "tokenizer.ggml.model", model);
    if (n_tokens >= 0)
        gguf_array(g, "tokenizer.ggml.tokens", T_STRING, (uint64_t)n_tokens, texts.data,
                   texts.length);
    if (n_scores >= 0)
        gguf_array(g, "tokenizer.ggml.scores", T_F32, (uint64_t)n_scores, scores.data,
                   scores.length);
    if (n_kinds >= 0)
        gguf_array(g, "tokenizer.ggml.token_type", T_I32, (uint64_t)n_kinds, kinds.data,
                   kinds.length);
    clear_bytes(&texts);
    clear_bytes(&scores);
    clear_bytes(&kinds);
}

static void test_invalid_vocabularies(void **state) {
    (void)state;
    gguf g = {0};
    refuse(&g, "there is no tokenizer (tokenizer.ggml.model) in this file");
    gguf_u32(&g, "tokenizer.ggml.model", 5);
    refuse(&g, "there is no tokenizer");
    gguf_string(&g, "tokenizer.ggml.model", "bert");
    refuse(&g, "the tokenizer is of the kind 'bert', which is not supported; supported are gpt2");
    put_arrays(&g, "llama", -1, 3, 3);
    refuse(&g, "the vocabulary has no tokenizer.ggml.tokens");
    put_arrays(&g, "llama", 0, 0, 0);
    refuse(&g, "a vocabulary of 0 tokens");
    put_arrays(&g, "llama", 4, 3, 4);
    refuse(&g, "tokenizer.ggml.scores has 3 elements for 4 tokens");
    put_arrays(&g, "llama", 4, 5, 4);
    refuse(&g, "tokenizer.ggml.scores has 5 elements for 4 tokens");
    put_arrays(&g, "llama", 4, 4, 3);
    refuse(&g, "tokenizer.ggml.token_type has 3 elements for 4 tokens");
    put_arrays(&g, "llama", 4, -1, 4);
    refuse(&g, "the vocabulary has no tokenizer.ggml.scores");
    put_arrays(&g, "gpt2", 4, -1, -1);
    gguf_string(&g, "tokenizer.ggml.pre", "gpt-2");
    refuse(&g, "the vocabulary has no tokenizer.ggml.merges");
    put_arrays(&g, "gpt2", 4, -1, -1);
    gguf_string(&g, "tokenizer.ggml.pre", "gpt-2");
    gguf_array(&g, "tokenizer.ggml.merges", T_F32, 0, NULL, 0);
    refuse(&g, "the vocabulary has no tokenizer.ggml.merges");
    put_arrays(&g, "gpt2", 4, -1, -1);
    gguf_string(&g, "tokenizer.ggml.pre", "gpt");
    refuse(&g, "splits words by the rule 'gpt', which is not known");
    put_arrays(&g, "gpt2", 4, -1, -1);
    refuse(&g, "does not name the rule that splits words (tokenizer.ggml.pre is missing), as after "
               "early converters; get a newer");
    put_arrays(&g, "gpt2", 4, -1, -1);
    gguf_string(&g, "tokenizer.ggml.pre", "default");
    refuse(&g, "does not name the rule that splits words (tokenizer.ggml.pre is 'default'");
    put_arrays(&g, "gpt2", 4, -1, -1);
    gguf_u32(&g, "tokenizer.ggml.pre", 2);
    refuse(&g, "tokenizer.ggml.pre is not a string");
    static const char *const named[] = {
        "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id"};
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        char message[100];
        snprintf(message, sizeof message, "%s is not the id of one of the 4 tokens", named[i]);
        put_arrays(&g, "llama", 4, 4, 4);
        gguf_u32(&g, named[i], 4);
        refuse(&g, message);
        put_arrays(&g, "llama", 4, 4, 4);
        gguf_u32(&g, named[i], UINT32_MAX);
        refuse(&g, message);
    }
    put_arrays(&g, "llama", 1, -1, -1);
    float nan = NAN;
    gguf_array(&g, "tokenizer.ggml.scores", T_F32, 1, &nan, 4);
    refuse(&g, "the score of token 0 is not a number");
    put_arrays(&g, "llama", 1, 1, -1);
    float half = 0.5f;
    gguf_array(&g, "tokenizer.ggml.token_type", T_F32, 1, &half, 4);
    refuse(&g, "token_type is not an array of whole numbers");
    llm_error err;
    assert_null(llm_tokenizer_create(NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    llm_tokenizer_free(NULL);
}

/* Odd vocabularies that are still usable: equal texts, empty texts, invalid UTF-8, merges of
 * unknown or empty parts, unknown kinds of tokens. */
static void test_odd_vocabularies(void **state) {
    (void)state;
    gguf g = {0};
    vocabulary w;
    memset(&w, 0, sizeof w);
    add_token(&w, "", 0, K_NORMAL);
    add_token(&w, "a", 0, K_NORMAL);
    add_token(&w, "a", 0, K_NORMAL);
    add_token(&w, "b", 0, 77);
    add_token(&w, "", 0, K_CONTROL);
    add_bytes_token(&w, "\xFF\xC4", 2, 0, K_NORMAL);
    add_bytes_token(&w, "\0x", 2, 0, K_USER);
    add_token(&w, "ab", 0, K_NORMAL);
    static const char *const merges[] = {"",    " ",   "a",   "a ",  " a",   "x y",
                                         "a x", "b a", "a b", "a b", "a  b", "a b c"};
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++) add_merge(&w, merges[i]);
    gguf_vocabulary(&g, &w, "gpt2");
    vocab v = open_vocab(&g);
    assert_non_null(v.t);
    EXPECT(v.t, "aab", 0, 1, 7);
    int32_t ids[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    bytes out = detokenize(v.t, ids, 8);
    assert_true(out.length == 9 && !memcmp(out.data, "aab\xFF\xC4\0xab", 9));
    clear_bytes(&out);
    out = decode_stream(v.t, ids, 8, false);
    clear_bytes(&out);
    /* no token for a byte and no unknown token */
    llm_error err;
    assert_int_equal(llm_tokenize(v.t, "ac", 2, 0, ids, 8, &err), -1);
    assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "no token for the byte 0x63"));
    close_vocab(&v);
    /* the same with an unknown token */
    memset(&w, 0, sizeof w);
    add_token(&w, "<unk>", 0, K_UNKNOWN);
    add_token(&w, "a", 0, K_NORMAL);
    gguf_vocabulary(&g, &w, "gpt2");
    gguf_u32(&g, "tokenizer.ggml.unknown_token_id", 0);
    v = open_vocab(&g);
    EXPECT(v.t, "ac", 0, 1, 0);
    close_vocab(&v);
    /* a "llama" vocabulary without byte tokens and without kinds */
    put_arrays(&g, "llama", 4, 4, -1);
    v = open_vocab(&g);
    assert_non_null(v.t);
    assert_int_equal(llm_tokenize(v.t, "q", 1, 0, ids, 8, &err), -1);
    assert_non_null(strstr(err.message, "no token for the byte 0x20"));
    /* the default BOS is 1, but here that is not a control token */
    assert_int_equal(llm_tokenizer_bos(v.t), -1);
    close_vocab(&v);
    /* only the 256 bytes: spaces round-trip too */
    memset(&w, 0, sizeof w);
    for (int b = 0; b < 256; b++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
        add_token(&w, text, 0, K_BYTE);
    }
    gguf_vocabulary(&g, &w, "llama");
    v = open_vocab(&g);
    EXPECT(v.t, "a b", 0, ' ', 'a', ' ', 'b');
    round_trip(v.t, "  a b ", 6);
    close_vocab(&v);
    /* the default ids of "llama" */
    memset(&w, 0, sizeof w);
    add_fixed_tokens(&w);
    gguf_vocabulary(&g, &w, "llama");
    v = open_vocab(&g);
    assert_true(llm_tokenizer_bos(v.t) == 1 && llm_tokenizer_eos(v.t) == 2 &&
                llm_tokenizer_is_end(v.t, 2));
    EXPECT(v.t, "q", 0, 0, 0); /* unknown tokens: the added space and the letter */
    close_vocab(&v);
}

static void test_damaged_vocabularies(void **state) {
    (void)state;
    test_random random = {11};
    int opened = 0;
    for (int llama = 0; llama < 2; llama++) {
        gguf g = {0};
        if (llama) llama_vocabulary(&g);
        else gpt2_vocabulary(&g);
        bytes b = gguf_finish(&g);
        for (int round = 0; round < 3000; round++) {
            uint8_t *copy = (uint8_t *)malloc(b.length);
            memcpy(copy, b.data, b.length);
            for (int i = 1 + random_below(&random, 4); i > 0; i--)
                copy[random_below(&random, (int)b.length)] = (uint8_t)random_u64(&random);
            llm_error err;
            llm_file *file = llm_file_from_memory(copy, b.length, "flipped", &err);
            llm_tokenizer *t = file ? llm_tokenizer_create(file, &err) : NULL;
            if (t) {
                char text[100];
                int32_t ids[310];
                size_t n = random_text(&random, text, sizeof text);
                int64_t count = llm_tokenize(t, text, n, LLM_TOKENIZE_BOS | LLM_TOKENIZE_SPECIAL,
                                             ids, 310, &err);
                assert_true(count <= 310);
                if (count > 0) {
                    bytes out = decode_stream(t, ids, count, false);
                    clear_bytes(&out);
                }
                opened++;
            }
            llm_tokenizer_free(t);
            llm_file_close(file);
            free(copy);
        }
        clear_bytes(&b);
    }
    assert_true(opened > 100);
    assert_int_equal(test_live, 0);
}

static void test_failed_allocations(void **state) {
    (void)state;
    for (int llama = 0; llama < 2; llama++) {
        gguf g = {0};
        if (llama) llama_vocabulary(&g);
        else gpt2_vocabulary(&g);
        vocab v = open_vocab(&g);
        llm_error err;
        bool done = false;
        for (long i = 0; !done; i++) {
            test_fail_in = i;
            test_failed = false;
            llm_tokenizer *t = llm_tokenizer_create(v.file, &err);
            done = !test_failed;
            test_fail_in = -1;
            assert_true((t != NULL) == done);
            if (!done) assert_int_equal(err.status, LLM_ERROR_MEMORY);
            llm_tokenizer_free(t);
        }
        done = false;
        long before = test_live;
        for (long i = 0; !done; i++) {
            int32_t ids[100];
            test_fail_in = i;
            test_failed = false;
            int64_t n = llm_tokenize(v.t, "a b abcd aaaaaaaaaaaa", 21, 0, ids, 100, &err);
            done = !test_failed;
            test_fail_in = -1;
            assert_true((n > 0) == done);
            if (!done) assert_int_equal(err.status, LLM_ERROR_MEMORY);
            assert_int_equal(test_live, before);
        }
        done = false;
        for (long i = 0; !done; i++) {
            int32_t *ids;
            char *text;
            test_fail_in = i;
            test_failed = false;
            int64_t n = llm_tokenize_new(v.t, "a b abcd aaaaaaaaaaaa", 21, 0, &ids, &err);
            if (n > 0) n = llm_detokenize_new(v.t, ids, n, &text, &err);
            done = !test_failed;
            test_fail_in = -1;
            assert_true((n > 0) == done && (n < 0 || ids));
            if (!done) assert_int_equal(err.status, LLM_ERROR_MEMORY);
            else llm_free(text);
            llm_free(ids);
            assert_int_equal(test_live, before);
        }
        close_vocab(&v);
    }
    assert_int_equal(test_live, 0);
}

/* ---- Real vocabularies ----------------------------------------------------------------------- */

/* Texts and their ids from the authors' own tokenizers (tests/data/tokenizers: texts separated by a
 * line, ids with one line per text). The vocabularies may not be distributed; LLM_SHARED names a
 * folder whose tokenizers/ contains them. */
static void check_cases(const char *name, const char *vocabulary) {
    static const char separator[] = "\n__ggml_vocab_test__\n";
    const char *shared = getenv("LLM_SHARED");
    char path[1000];
    snprintf(path, sizeof path, "%s/tokenizers/%s/%s", shared ? shared : "../shared", name,
             vocabulary);
    if (access(path, R_OK)) {
        print_message("SKIPPED: %s is not there (LLM_SHARED names the folder above tokenizers/)\n",
                      path);
        skip();
    }
    llm_error err;
    llm_file *file = llm_file_open(path, &err);
    llm_tokenizer *t = file ? llm_tokenizer_create(file, &err) : NULL;
    if (!t) print_error("%s\n", err.message);
    assert_non_null(t);
    snprintf(path, sizeof path, "tests/data/tokenizers/%s.expected.txt", name);
    bytes cases = slurp("tests/data/tokenizers/cases.txt"), expected = slurp(path);
    char *text = (char *)cases.data, *ids = (char *)expected.data;
    int n = 0, wrong = 0;
    for (char *end; (end = strstr(text, separator)) != NULL; text = end + strlen(separator), n++) {
        tokens r = tokenize(t, text, (size_t)(end - text), 0);
        int64_t i = 0;
        bool same = true;
        for (; *ids && *ids != '\n'; i++) {
            int32_t id = (int32_t)strtol(ids, &ids, 10);
            same = same && i < r.n && r.ids[i] == id;
        }
        if (*ids) ids++;
        if (!same || i != r.n) {
            wrong++;
            print_error("%s, text %d \"%.*s\" gave", name, n + 1, (int)(end - text), text);
            for (i = 0; i < r.n; i++) print_error(" %d", (int)r.ids[i]);
            print_error("\n");
        }
        bytes out = decode_stream(t, r.ids, r.n, false);
        assert_int_equal(out.length, end - text);
        if (out.length) assert_memory_equal(out.data, text, out.length);
        clear_bytes(&out);
        free(r.ids);
        round_trip(t, text, (size_t)(end - text));
    }
    assert_int_equal(wrong, 0);
    assert_int_equal(n, 46);
    clear_bytes(&cases);
    clear_bytes(&expected);
    llm_tokenizer_free(t);
    llm_file_close(file);
}

static void test_gpt2_cases(void **state) { (void)state; check_cases("gpt2", "vocab.gguf"); }
static void test_llama2_cases(void **state) {
    (void)state;
    check_cases("llama2-spm", "vocab.gguf");
}
static void test_llama3_cases(void **state) {
    (void)state;
    check_cases("llama3", "tokenizer.json");
}
static void test_qwen2_cases(void **state) { (void)state; check_cases("qwen2_5", ""); }

/* Small tokenizers of every kind give the ids of Hugging Face's library for random texts, with and
 * without BOS and special tokens (tests/make_tokenizers.py). */
static void test_against_hugging_face(void **state) {
    (void)state;
    bytes data = slurp("tests/data/tokenizers/random.json");
    llm_json json;
    llm_error err;
    int wrong = 0, compared = 0;
    assert_true(llm_json_parse(&json, (const char *)data.data, data.length, "random.json", &err));
    const llm_json_node *texts = llm_json_member(json.nodes, "texts");
    const llm_json_node *kinds = llm_json_member(json.nodes, "kinds");
    for (const llm_json_node *kind = llm_json_first(kinds); kind;
         kind = llm_json_next(kinds, kind)) {
        llm_string name = {0};
        char path[300];
        assert_true(llm_json_string(llm_json_member(kind, "file"), &name));
        snprintf(path, sizeof path, "tests/data/fuzz_vocabulary/%.*s", (int)name.length, name.data);
        llm_file *file = llm_file_open(path, &err);
        llm_tokenizer *t = file ? llm_tokenizer_create(file, &err) : NULL;
        if (!t) print_error("%s\n", err.message);
        assert_non_null(t);
        const llm_json_node *all = llm_json_member(kind, "ids"), *pair = llm_json_first(all);
        for (const llm_json_node *item = llm_json_first(texts); item;
             item = llm_json_next(texts, item), pair = llm_json_next(all, pair)) {
            llm_string text = {0};
            assert_true(llm_json_string(item, &text));
            const llm_json_node *ids = llm_json_first(pair);
            for (int plain = 0; plain < 2; plain++, ids = llm_json_next(pair, ids)) {
                int32_t got[3000];
                unsigned flags = plain ? 0 : LLM_TOKENIZE_BOS | LLM_TOKENIZE_SPECIAL;
                int64_t n = llm_tokenize(t, text.data, text.length, flags, got, 3000, &err), i = 0;
                bool same = n == (int64_t)ids->length;
                for (const llm_json_node *id = llm_json_first(ids); id && same;
                     id = llm_json_next(ids, id), i++) {
                    int64_t wanted = -1;
                    same = llm_json_i64(id, &wanted) && got[i] == wanted;
                }
                compared++;
                if (same) continue;
                if (wrong++ < 10)
                    print_error("%s, plain %d: \"%.*s\"\n", path, plain, (int)text.length,
                                text.data);
            }
        }
        llm_tokenizer_free(t);
        llm_file_close(file);
    }
    if (wrong) print_error("%d of %d differ\n", wrong, compared);
    assert_int_equal(wrong, 0);
    assert_int_equal(compared, 14 * 100 * 2);
    llm_json_free(&json);
    clear_bytes(&data);
    assert_int_equal(test_live, 0);
}

/* Unsupported or invalid tokenizer.json files. In each, `from` of the small GPT-2 tokenizer is
 * replaced by `to`. */
static void test_invalid_tokenizer_json(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *expected;
    } cases[] = {
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Nmt\"}",
         "the normalizer 'Nmt' is not supported; supported: NFC"},
        {"\"normalizer\":null",
         "\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"A?==\"}",
         "the normalizer 'Precompiled' is not supported"},
        {"\"type\":\"BPE\"", "\"type\":\"WordLevel\"",
         "the model 'WordLevel' is not supported; supported: BPE, Unigram"},
        {"\"dropout\":null", "\"dropout\":0.5", "dropout is not supported"},
        {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"x\"",
         "BPE with a end_of_word_suffix is not supported"},
        {"\"pre_tokenizer\":{\"type\":\"ByteLevel\"",
         "\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"",
         "the pre_tokenizer 'UnicodeScripts' is not supported"},
        {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"WordPiece\"",
         "the decoder 'WordPiece' is not supported"},
        {"\"type\":\"TemplateProcessing\"", "\"type\":\"BertProcessing\"",
         "the post_processor 'BertProcessing' is not supported"},
        {"\"padding\":null", "\"secrets\":null",
         "'secrets' is not a known part of a tokenizer.json"},
        {"\"single_word\":false", "\"single_word\":true", "is single_word, which is not supported"},
        {"\"vocab\":{", "\"vocab\":{\"far\":99999999,",
         "has no id, or one that leaves most ids below it without a token"},
        {"\"vocab\":{", "\"vocab\":{\"twin\":7,", "have the same id, 7"},
        {"\"merges\":[[", "\"merges\":[[\"a\"],[", "merge 1 is not a pair of tokens"},
        {"\"merges\":[[", "\"merges\":[7,[", "merge 1 is not a pair of tokens"},
        {"\"unk_token\":null", "\"unk_token\":\"nobody\"", "unk_token is not one of the tokens"},
        {"\"model\":{", "\"model\":[{", "should be"}};
    bytes whole = slurp("tests/data/fuzz_vocabulary/gpt2.json");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *found = strstr((char *)whole.data, cases[i].from);
        if (!found) print_error("%s\n", cases[i].from);
        assert_non_null(found);
        bytes b = {0};
        put(&b, whole.data, (size_t)(found - (char *)whole.data));
        put(&b, cases[i].to, strlen(cases[i].to));
        put(&b, found + strlen(cases[i].from), strlen(found + strlen(cases[i].from)));
        llm_error err;
        llm_file *file = llm_file_from_memory(b.data, b.length, "/nowhere/tokenizer.json", &err);
        if (file || !strstr(err.message, cases[i].expected))
            print_error("expected \"%s\", got \"%s\"\n", cases[i].expected, err.message);
        assert_null(file);
        assert_non_null(strstr(err.message, cases[i].expected));
        assert_non_null(strstr(err.message, "/nowhere/tokenizer.json"));
        clear_bytes(&b);
    }
    clear_bytes(&whole);
    assert_int_equal(test_live, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_utf8_first_bytes),
        cmocka_unit_test(test_white_space),
        cmocka_unit_test(test_nfc),
        cmocka_unit_test(test_split_gpt2),
        cmocka_unit_test(test_split_llama3),
        cmocka_unit_test(test_rule_names),
        cmocka_unit_test(test_expressions),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_refused_expressions),
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_charsmap),
        cmocka_unit_test(test_bound_of_steps),
        cmocka_unit_test(test_gpt2_merges),
        cmocka_unit_test(test_llama_merges),
        cmocka_unit_test(test_space_prefix_off),
        cmocka_unit_test(test_eos),
        cmocka_unit_test(test_special_tokens),
        cmocka_unit_test(test_longest_special_token),
        cmocka_unit_test(test_fused_unknown),
        cmocka_unit_test(test_spelled_byte_token),
        cmocka_unit_test(test_end_tokens),
        cmocka_unit_test(test_gpt2_against_naive),
        cmocka_unit_test(test_llama_against_naive),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_stream_of_text),
        cmocka_unit_test(test_stream_of_random_tokens),
        cmocka_unit_test(test_stream_of_invalid_utf8),
        cmocka_unit_test(test_leading_space),
        cmocka_unit_test(test_long_texts_take_linear_time),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_loading_takes_linear_time),
        cmocka_unit_test(test_invalid_vocabularies),
        cmocka_unit_test(test_odd_vocabularies),
        cmocka_unit_test(test_damaged_vocabularies),
        cmocka_unit_test(test_failed_allocations),
        cmocka_unit_test(test_against_hugging_face),
        cmocka_unit_test(test_invalid_tokenizer_json),
        cmocka_unit_test(test_gpt2_cases),
        cmocka_unit_test(test_llama2_cases),
        cmocka_unit_test(test_llama3_cases),
        cmocka_unit_test(test_qwen2_cases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
