/* tiny_model.h - models of a few thousand weights, built in memory, for tests that need a specific
 * vocabulary, context length or distribution. Include after test_util.h, llm.h and cmocka.h. */
#ifndef TINY_MODEL_H
#define TINY_MODEL_H

typedef struct tiny { /* start from tiny_defaults() */
    int vocab;       /* ids 0 <unk>, 1 <s>, 2 </s>, then letters, then pairs of letters */
    int context, layers;
    char first;      /* the first letter */
    uint64_t seed;   /* seed of the weights' random values */
    /* share of different weights (seed + 1) mixed in: a draft model similar to its target */
    float noise;
    float sharp;     /* factor on the logits */
    bool constant;   /* the logits are the same after every token */
    int padding;     /* number of zero rows after the vocabulary's rows in the matrices */
    int broken;      /* id of the token whose embedding is NaN; 0: none */
} tiny;

/* four query heads share one key head, so attention uses matrix tiles */
enum { TINY_DIM = 16, TINY_HIDDEN = 24, TINY_HEADS = 4, TINY_KV_HEADS = 1 };

static TEST_UNUSED tiny tiny_defaults(void) {
    tiny t = {40, 512, 1, 'a', 1, 0, 4, false, 0, 0};
    return t;
}

typedef struct tiny_model {
    bytes file;
    llm_model *model;
} tiny_model;

static void tiny_tensor(gguf *g, const tiny *t, const char *name, int index, uint64_t rows,
                        uint64_t cols, float scale) {
    uint64_t n = (rows ? rows : 1) * cols;
    float *values = (float *)malloc(n * sizeof *values);
    assert_non_null(values);
    for (uint64_t i = 0; i < n; i++) {
        double x = llm_random(t->seed, (uint64_t)index, i) - 0.5,
               y = llm_random(t->seed + 1, (uint64_t)index, i) - 0.5;
        values[i] = rows ? (float)(x + (double)t->noise * y) * scale : 1;
        if (t->constant && index > 0) values[i] = 0;
        if (t->constant && index == 0) values[i] = values[i % cols];
        if (rows == (uint64_t)(t->vocab + t->padding) && i >= (uint64_t)t->vocab * cols)
            values[i] = 0;
    }
    for (uint64_t i = 0; i < cols && index == 0 && t->broken; i++)
        values[(uint64_t)t->broken * cols + i] = NAN;
    gguf_tensor(g, name, rows, cols, 0, values, n * sizeof *values);
    free(values);
}

static void tiny_vocabulary(gguf *g, const tiny *t) {
    vocabulary v;
    memset(&v, 0, sizeof v);
    add_token(&v, "<unk>", 0, K_UNKNOWN);
    add_token(&v, "<s>", 0, K_CONTROL);
    add_token(&v, "</s>", 0, K_CONTROL);
    for (int i = 3; i < t->vocab; i++) {
        char text[3] = {(char)(t->first + (i - 3) % 26),
                        i < 29 ? '\0' : (char)('a' + (i - 29) / 26), 0};
        add_token(&v, text, 0, K_NORMAL);
    }
    gguf_vocabulary(g, &v, "llama");
    gguf_u32(g, "tokenizer.ggml.bos_token_id", 1);
    gguf_u32(g, "tokenizer.ggml.eos_token_id", 2);
    gguf_u32(g, "tokenizer.ggml.unknown_token_id", 0);
}

static TEST_UNUSED tiny_model tiny_model_new(tiny t) {
    static const struct {
        const char *name;
        int rows, cols;
    } parts[] = {{"attn_norm", 0, TINY_DIM},
                 {"attn_q", TINY_DIM, TINY_DIM},
                 {"attn_k", TINY_DIM * TINY_KV_HEADS / TINY_HEADS, TINY_DIM},
                 {"attn_v", TINY_DIM * TINY_KV_HEADS / TINY_HEADS, TINY_DIM},
                 {"attn_output", TINY_DIM, TINY_DIM},
                 {"ffn_norm", 0, TINY_DIM},
                 {"ffn_gate", TINY_HIDDEN, TINY_DIM},
                 {"ffn_up", TINY_HIDDEN, TINY_DIM},
                 {"ffn_down", TINY_DIM, TINY_HIDDEN}};
    gguf g;
    memset(&g, 0, sizeof g);
    gguf_string(&g, "general.architecture", "llama");
    gguf_u32(&g, "llama.context_length", (uint32_t)t.context);
    gguf_u32(&g, "llama.embedding_length", TINY_DIM);
    gguf_u32(&g, "llama.block_count", (uint32_t)t.layers);
    gguf_u32(&g, "llama.feed_forward_length", TINY_HIDDEN);
    gguf_u32(&g, "llama.attention.head_count", TINY_HEADS);
    gguf_u32(&g, "llama.attention.head_count_kv", TINY_KV_HEADS);
    tiny_vocabulary(&g, &t);
    tiny_tensor(&g, &t, "token_embd.weight", 0, (uint64_t)(t.vocab + t.padding), TINY_DIM, 2);
    tiny_tensor(&g, &t, "output_norm.weight", -1, 0, TINY_DIM, 1);
    bool constant = t.constant;
    t.constant = false;
    tiny_tensor(&g, &t, "output.weight", 99, (uint64_t)(t.vocab + t.padding), TINY_DIM, t.sharp);
    t.constant = constant;
    for (int layer = 0; layer < t.layers; layer++)
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            char name[64];
            snprintf(name, sizeof name, "blk.%d.%s.weight", layer, parts[i].name);
            tiny_tensor(&g, &t, name, 100 * (layer + 1) + (int)i, (uint64_t)parts[i].rows,
                        (uint64_t)parts[i].cols, 1.5f);
        }
    llm_error err;
    tiny_model m;
    m.file = gguf_finish(&g);
    m.model = llm_model_from_memory(m.file.data, m.file.length, "tiny", &err);
    if (!m.model) fail_msg("%s", err.message);
    return m;
}

static TEST_UNUSED void tiny_model_free(tiny_model *m) {
    llm_model_free(m->model);
    clear_bytes(&m->file);
}

#endif
