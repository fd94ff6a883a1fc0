/* Write small files from which the fuzzers start. Run it from the repository's root:
 *     mkdir -p build tests/data/fuzz_file tests/data/fuzz_tokenizer
 *     cc -o build/make_seeds tests/make_seeds.c && build/make_seeds */
#include "test_util.h"

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q8_0 = 8 };

static void save(const char *folder, const char *name, const void *data, size_t n) {
    char path[200];
    snprintf(path, sizeof path, "tests/data/%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) {
        perror(path);
        exit(1);
    }
}

static void save_file(gguf *g, const char *name) {
    bytes b = gguf_finish(g);
    save("fuzz_file", name, b.data, b.length);
    clear_bytes(&b);
    memset(g, 0, sizeof *g);
}

/* A few tokens only, so that the fuzzer spends its time on structure. */
static void tiny_vocabulary(gguf *g, bool llama) {
    vocabulary v;
    memset(&v, 0, sizeof v);
    add_fixed_tokens(&v);
    static const char *const texts[] = {"a", "b", "ab", "aa", ("\xE2\x96\x81" "a"),
                                        "O", "n", "c", "e"};
    for (int i = 0; i < 9; i++) add_token(&v, texts[i], (float)-i, K_NORMAL);
    if (llama) add_token(&v, "<0x0A>", 0, K_BYTE);
    add_merge(&v, "a b");
    add_merge(&v, "a a");
    while (v.n < 20) add_token(&v, "", 0, K_UNUSED);
    gguf_vocabulary(g, &v, llama ? "llama" : "gpt2");
    gguf_u32(g, "tokenizer.ggml.eos_token_id", 2);
    gguf_u32(g, "tokenizer.ggml.unknown_token_id", 0);
}

static void matrix(gguf *g, const char *name, uint64_t rows, uint64_t cols, uint32_t type) {
    size_t n = (size_t)((rows ? rows : 1) * cols);
    n = type == F32 ? n * 4 : type == F16 ? n * 2 : type == Q4_0 ? n / 32 * 18 : n / 32 * 34;
    uint8_t *data = (uint8_t *)malloc(n);
    test_random random = {n + 1};
    for (size_t i = 0; i < n; i++) data[i] = (uint8_t)random_u64(&random);
    if (type == F32)
        for (size_t i = 0; i < n / 4; i++) {
            float x = rows ? (float)random_below(&random, 200) / 100 - 1 : 1;
            memcpy(data + 4 * i, &x, 4);
        }
    if (type == F16)
        /* about 0.2 */
        for (size_t i = 0; i < n; i += 2) data[i + 1] = (uint8_t)(0x30 | (data[i + 1] & 0x83));
    if (type == Q4_0 || type == Q8_0)
        /* scale 1/64 */
        for (size_t i = 0; i < n; i += type == Q4_0 ? 18 : 34) data[i] = 0, data[i + 1] = 0x24;
    gguf_tensor(g, name, rows, cols, type, data, n);
    free(data);
}

/* A model of one layer with dim 32, two query heads and one key/value head. */
static void model(gguf *g, uint32_t type, bool tied, bool llama) {
    tiny_vocabulary(g, llama);
    gguf_string(g, "general.architecture", "llama");
    gguf_u32(g, "llama.block_count", 1);
    gguf_u32(g, "llama.context_length", 64);
    gguf_u32(g, "llama.embedding_length", 32);
    gguf_u32(g, "llama.feed_forward_length", 32);
    gguf_u32(g, "llama.attention.head_count", 2);
    gguf_u32(g, "llama.attention.head_count_kv", 1);
    matrix(g, "token_embd.weight", 20, 32, type);
    matrix(g, "output_norm.weight", 0, 32, F32);
    if (!tied) matrix(g, "output.weight", 20, 32, type);
    matrix(g, "blk.0.attn_norm.weight", 0, 32, F32);
    matrix(g, "blk.0.attn_q.weight", 32, 32, type);
    matrix(g, "blk.0.attn_k.weight", 16, 32, type);
    matrix(g, "blk.0.attn_v.weight", 16, 32, type);
    matrix(g, "blk.0.attn_output.weight", 32, 32, type);
    matrix(g, "blk.0.ffn_norm.weight", 0, 32, F32);
    matrix(g, "blk.0.ffn_gate.weight", 32, 32, type);
    matrix(g, "blk.0.ffn_up.weight", 32, 32, type);
    matrix(g, "blk.0.ffn_down.weight", 32, 32, type);
}

int main(void) {
    gguf g;
    memset(&g, 0, sizeof g);
    save_file(&g, "empty.gguf");
    g.version = 2;
    for (uint32_t type = 0; type <= 12; type++) {
        uint64_t x = 1;
        char key[8];
        static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
        snprintf(key, sizeof key, "k%u", type);
        if (sizes[type]) gguf_value(&g, key, type, &x, sizes[type]);
        snprintf(key, sizeof key, "a%u", type);
        if (sizes[type]) gguf_array(&g, key, type, 1, &x, sizes[type]);
    }
    gguf_string(&g, "s", "text");
    save_file(&g, "values-v2.gguf");
    g.alignment = 64;
    gguf_u32(&g, "general.alignment", 64);
    matrix(&g, "a", 0, 4, F32);
    matrix(&g, "b", 2, 32, Q8_0);
    save_file(&g, "tensors.gguf");
    tiny_vocabulary(&g, true);
    save_file(&g, "llama.gguf");
    tiny_vocabulary(&g, false);
    save_file(&g, "gpt2.gguf");
    model(&g, Q4_0, true, true);
    save_file(&g, "model-q4_0.gguf");
    model(&g, Q8_0, false, false);
    save_file(&g, "model-q8_0.gguf");
    model(&g, F16, true, false);
    save_file(&g, "model-f16.gguf");
    static const char *const texts[] = {
        "Once upon a time", "abcd aaaa  a\n\n'll 12 ab", "<s><tool>a<|im_end|></s> b<tools>",
        "\xC3\xA9\xE6\x97\xA5\xF0\x9F\x98\x81 \xFF\xE6\x97 \xE2\x96\x81", "dddddd \t \xC2\xA0x"};
    for (int i = 0; i < 5; i++)
        for (int llama = 0; llama < 2; llama++) {
            char name[16], text[100];
            snprintf(name, sizeof name, "%d-%d", i, llama);
            snprintf(text, sizeof text, "%c%s", '0' + llama + (i == 2 ? 2 : 0) + (i == 3 ? 4 : 0),
                     texts[i]);
            save("fuzz_tokenizer", name, text, strlen(text));
        }
    return 0;
}
