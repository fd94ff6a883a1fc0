/* 01-memory.c - llm lesson memory: what uses memory, and how much. Described in 01-memory.md. */
#include "lesson.h"
#include "../models/tools.h"
#include "../models/quantize.h"

enum { MEMORY_TYPES = 64 };

/* The number of weights of a shape: those of its matrices, and the few of its norms. */
static double shape_weights(const shape *s) {
    double head_dim = s->head_dim ? s->head_dim : s->dim / s->heads, q = s->heads * head_dim,
           kv = s->kv_heads * head_dim;
    double layer = (double)s->dim * (2 * q + 2 * kv + 3.0 * s->hidden + 2);
    return s->layers * layer + (double)s->vocab * s->dim * (s->tied ? 1 : 2) + s->dim;
}

static double bytes_per_value(llm_type type) {
    const llm_type_info *info = llm_type_find(type);
    return (double)info->block_bytes / info->block_values;
}

/* Bytes of the weights in q4_0 as `llm quantize` writes them: 8 bits for the token table and the
 * output matrix, 32 for norms. step: count only the bytes that a step reads. It reads one
 * row of the token table, too little to count. A table that is also the output matrix is counted in
 * full. */
static double shape_bytes(const shape *s, bool step) {
    double table = (double)s->vocab * s->dim, tables = s->tied ? 1 : 2,
           norms = (2.0 * s->layers + 1) * s->dim;
    double layers = shape_weights(s) - tables * table - norms;
    llm_type type = llm_quantize_type(LLM_Q4_0, (uint64_t)s->dim, true);
    return layers * bytes_per_value(LLM_Q4_0) +
           (step ? 1 : tables) * table * bytes_per_value(type) + 4 * norms;
}

/* Bytes of cache per token: a key and a value for each kv head in each layer, in f16. */
static double shape_cache(const shape *s, int kv_heads) {
    double head_dim = s->head_dim ? s->head_dim : s->dim / s->heads;
    return 2.0 * s->layers * kv_heads * head_dim * 2;
}

static shape shape_of(const llm_config *c) {
    return (shape){"this model",  c->dim,        c->n_layers,   c->n_heads,
                   c->n_kv_heads, c->hidden_dim, c->vocab_size, c->context_length,
                   c->head_dim,   c->rope_base,  c->tied_output, c->n_experts,
                   c->n_experts_used};
}

/* Show the weights of the file by type. */
static void memory_types(const lesson *l) {
    static const column columns[] = {{"type", "type", "%s"},
                                     {"tensors", "tensors", "%.0f"},
                                     {"values", "values", "%.0f"},
                                     {"bytes", "bytes", "%.0f"},
                                     {"bits_per_value", "bits/value", "%.2f"}};
    const llm_file *file = llm_model_file(l->loaded);
    table t = new_table(columns, COUNT(columns));
    double all_values = 0, all_bytes = 0, all_tensors = 0;
    for (int i = 0; i < MEMORY_TYPES && llm_type_at(i); i++) {
        const llm_type_info *type = llm_type_at(i);
        double tensors = 0, bytes = 0, values = 0;
        for (int64_t k = 0; k < llm_file_n_tensors(file); k++) {
            const llm_tensor *tensor = llm_file_tensor(file, k);
            if (tensor->type != type->type) continue;
            tensors++;
            bytes += (double)tensor->bytes;
            values += (double)tensor->bytes / type->block_bytes * type->block_values;
        }
        if (tensors) add_row(&t, type->name, tensors, values, bytes, 8 * bytes / values);
        all_tensors += tensors, all_values += values, all_bytes += bytes;
    }
    add_row(&t, "all", all_tensors, all_values, all_bytes, 8 * all_bytes / all_values);
    show_table(l, &t, "weights");
}

/* Show how the cache depends on the number of kv heads. Latent attention (DeepSeek-V2) keeps 4.5 x
 * head_dim numbers per token and layer, for any number of heads. */
static void memory_heads(lesson *l, const shape *s) {
    static const column columns[] = {{"form", "form", "%s"},
                                     {"kv_heads", "kv heads", "%.0f"},
                                     {"bytes_per_token", "bytes/token", "%.0f"},
                                     {"context_mib", "MiB/context", "%.1f"}};
    const struct { const char *name; double heads, bytes; } forms[] = {
        {"MHA: one kv head per query head", s->heads, shape_cache(s, s->heads)},
        {"this model", s->kv_heads, shape_cache(s, s->kv_heads)},
        {"MQA: one kv head for all", 1, shape_cache(s, 1)},
        {"latent (4.5 x head_dim)", NAN, 4.5 * s->head_dim * s->layers * 2}};
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_BARS, "Cache per token", "bytes", "");
    plot_note(&p, "Keys and values of one token, with a kv head for each query head (MHA), as "
                  "in this model, with one kv head for all (MQA), and with one small latent "
                  "vector.");
    int bytes = plot_series_add(&p, "bytes");
    static const char *const names[] = {"MHA", "this model", "MQA", "latent"};
    for (int i = 0; i < COUNT(forms); i++) {
        add_row(&t, forms[i].name, forms[i].heads, forms[i].bytes,
                forms[i].bytes * s->context / 1048576);
        plot_category(&p, names[i]);
        plot_bar(&p, bytes, forms[i].bytes);
    }
    show_table(l, &t, "heads");
    show_plot(l, &p);
}

/* Show the size of a step's activations: the engine's arena, which holds the program's buffers in
 * f32 (llm info --program lists them). */
static bool memory_activations(lesson *l) {
    llm_engine_options options = l->engine;
    options.cache_bytes = 0;
    options.max_sequences = 1;
    options.n_threads = 1;
    llm_engine *engine = lesson_engine(l->loaded, &options);
    if (!engine) return false;
    llm_statistics s = llm_engine_statistics(engine);
    say(l,
        "\nActivations of a step of up to %d tokens: %s, reused by every layer and every step.\n",
        llm_engine_settings(engine)->max_batch_tokens, HUMAN(s.arena_bytes));
    fact(l, "activation_bytes", (double)s.arena_bytes);
    free_engine(engine);
    return true;
}

/* Show well-known shapes in f16 and q4_0: tokens of cache that fit, the speed limit and the
 * price. */
static void memory_shapes(lesson *l, const shape *mine, double card, double bandwidth,
                          double price) {
    static const column columns[] = {{"shape", "shape", "%s"},
                                     {"parameters", "weights", "%.3g"},
                                     {"f16_gib", "f16 GiB", "%.2f"},
                                     {"q4_0_gib", "q4_0", "%.2f"},
                                     {"cache_bytes_per_token", "cache/tok", "%.0f"},
                                     {"tokens_that_fit", "tokens fit", "%.0f"},
                                     {"tokens_per_second", "tok/s", "%.0f"},
                                     {"dollars_per_million", "$/M", "%.2f"}};
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_BARS, "q4_0 weights, and the cache of 16 sequences of 2048 tokens",
                      "GiB", "");
    plot_note(&p, "All sequences share the weights, but each has a cache of its own. It is "
                  "small if query heads share kv heads.");
    int weights = plot_series_add(&p, "weights"), cache = plot_series_add(&p, "cache");
    p.stacked = true;
    for (int i = 0; i < N_SHAPES; i++) {
        const shape *s = i ? &shapes[i] : mine;
        if (s->experts) continue; /* a step reads a small part of these models */
        double n = shape_weights(s), f16 = 2 * n, q4 = shape_bytes(s, false),
               token = shape_cache(s, s->kv_heads);
        double fit = card > q4 ? floor((card - q4) / token) : 0,
               rate = bandwidth / shape_bytes(s, true);
        add_row(&t, s->name, n, f16 / (1 << 30), q4 / (1 << 30), token, fit, rate,
                price / 3600 / rate * 1e6);
        plot_category(&p, s->name);
        plot_bar(&p, weights, q4 / (1 << 30));
        plot_bar(&p, cache, 16 * 2048.0 * token / (1 << 30));
    }
    show_table(l, &t, "shapes");
    show_plot(l, &p);
}

static int lesson_memory(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    uint64_t card = (uint64_t)24 << 30;
    float price = 1, speed = 0;
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "card", "SIZE", SIZE, &card, 0, 0, "memory of the GPU to fill (default 24G)"},
        {0, "bandwidth", "GB/S", REAL, &speed, 1e-3, 1e6,
         "its memory bandwidth (default: as measured on this machine)"},
        {0, "price", "DOLLARS", REAL, &price, 0, 1e6, "the price of an hour (default 1)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    const llm_config *c = llm_model_config(l.loaded);
    shape mine = shape_of(c);
    double token = (double)llm_model_cache_bytes_per_token(l.loaded, LLM_F16);
    double bandwidth = speed > 0 ? 1e9 * speed
                                 : measure_bandwidth(l.engine.n_threads ? l.engine.n_threads
                                                                        : llm_processor_count());
    say(&l, "Weights: %s\n\n", l.path);
    memory_types(&l);
    say(&l,
        "\nThe KV cache takes 2 x %d layers x %d kv heads x %d dimensions x 2 bytes = %.0f "
        "bytes per token.\n\n",
        c->n_layers, c->n_kv_heads, c->head_dim, token);
    fact(&l, "cache_bytes_per_token", token);
    memory_heads(&l, &mine);
    bool good = memory_activations(&l);
    say(&l,
        "\nOther shapes, in q4_0 (token table and output matrix in 8 bits). Tokens fit: tokens of "
        "cache that have room next to the weights in %s. tok/s: the most that one sequence can get "
        "at %.1f GB/s. $/M: the price of a million of these tokens at $%g an hour.\n\n",
        HUMAN(card), 1e-9 * bandwidth, (double)price);
    fact(&l, "bandwidth", bandwidth);
    memory_shapes(&l, &mine, (double)card, bandwidth, (double)price);
    return lesson_end(&l, good);
}

static const char memory_notes[] =
    "Shows the weights by type; the cache per token (2 x layers x kv heads x head_dim x bytes)\n"
    "with multi-head, grouped-query, multi-query and latent attention; the activations of a step;\n"
    "and, for well-known shapes, what fits, how fast it can be and what it costs.\n"
    "\n"
    "Examples:\n"
    "  llm lesson memory\n"
    "  llm lesson memory --card 80G --bandwidth 3350 --price 3 --svg memory.svg\n";

const command memory_lesson = {
    "lesson memory", "Weights, cache and activations, and what fits.", "[options]",
    lesson_memory, memory_notes};
