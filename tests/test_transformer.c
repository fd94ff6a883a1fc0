/* Chapter 5 of llm.h, compared with a forward pass in double precision that shares no code with it:
 * every trait of an architecture, in ragged batches. The RoPE frequencies are compared with the
 * formulas of Hugging Face transformers, with the parameters of real models.
 *
 * test_golden.c and test_models.c compare with logits that transformers computed. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "engine_util.h"
#undef llm_engine_create /* these tests always use CPU backends */

static const double PI = 3.14159265358979323846;

/* ---- A model: its shape, and weights that depend on a seed ----------------------------------- */

enum { MAX_LAYERS = 3, VOCAB = 40 };

typedef struct shape {
    const char *architecture;
    int layers, dim, heads, kv_heads, head_dim, rope_dim, hidden;
    bool tied, qkv_bias, o_bias, ffn_bias, head_norms, divisors;
    int window, windowed; /* windowed: a bit for each layer that has the window */
    double base, epsilon, factor, beta_fast, beta_slow, attn_factor; /* 0: not in the file */
    const char *scaling;                                             /* NULL: none */
    int original, context;
} shape;

typedef struct weights { /* (rows, cols) each; NULL: the model has none */
    float *embedding, *output, *output_norm, *divisors;
    struct layer {
        float *attn_norm, *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm;
        float *ffn_norm, *gate, *up, *down, *gate_bias, *up_bias, *down_bias;
    } layers[MAX_LAYERS];
} weights;

static uint64_t next_tensor; /* number of tensors so far, so that each gets its own values */

/* Add a tensor to the file, with values of middle + scale * (a random number from -1 to 1). rows 0:
 * a vector. */
static float *tensor(gguf *g, const char *name, int rows, int cols, double middle, double scale) {
    int n = (rows ? rows : 1) * cols;
    float *values = (float *)malloc((size_t)n * sizeof *values);
    assert_non_null(values);
    next_tensor++;
    for (int i = 0; i < n; i++)
        values[i] = (float)(middle + scale * (2 * llm_random(3, next_tensor, (uint64_t)i) - 1));
    gguf_tensor(g, name, (uint64_t)rows, (uint64_t)cols, 0, values, (size_t)n * sizeof *values);
    return values;
}

static float *layer_tensor(gguf *g, int layer, const char *name, int rows, int cols, double middle,
                           double scale) {
    char full[64];
    snprintf(full, sizeof full, "blk.%d.%s", layer, name);
    return tensor(g, full, rows, cols, middle, scale);
}

static void key_u32(gguf *g, const shape *s, const char *name, int x) {
    char key[96];
    snprintf(key, sizeof key, "%s.%s", s->architecture, name);
    if (x) gguf_u32(g, key, (uint32_t)x);
}

static void key_f32(gguf *g, const shape *s, const char *name, double x) {
    char key[96];
    float value = (float)x;
    snprintf(key, sizeof key, "%s.%s", s->architecture, name);
    if (x) gguf_value(g, key, T_F32, &value, sizeof value);
}

static void write_keys(gguf *g, const shape *s) {
    char key[96];
    gguf_string(g, "general.architecture", s->architecture);
    key_u32(g, s, "context_length", s->context ? s->context : 256);
    key_u32(g, s, "embedding_length", s->dim);
    key_u32(g, s, "block_count", s->layers);
    key_u32(g, s, "feed_forward_length", s->hidden);
    key_u32(g, s, "attention.head_count", s->heads);
    key_u32(g, s, "attention.head_count_kv", s->kv_heads);
    key_u32(g, s, "attention.key_length", s->head_dim);
    key_u32(g, s, "attention.value_length", s->head_dim);
    key_u32(g, s, "rope.dimension_count", s->rope_dim);
    key_f32(g, s, "rope.freq_base", s->base);
    key_f32(g, s, "attention.layer_norm_rms_epsilon", s->epsilon);
    key_f32(g, s, "rope.scaling.factor", s->factor);
    key_f32(g, s, "rope.scaling.attn_factor", s->attn_factor);
    key_f32(g, s, "rope.scaling.yarn_beta_fast", s->beta_fast);
    key_f32(g, s, "rope.scaling.yarn_beta_slow", s->beta_slow);
    key_u32(g, s, "rope.scaling.original_context_length", s->original);
    snprintf(key, sizeof key, "%s.rope.scaling.type", s->architecture);
    if (s->scaling) gguf_string(g, key, s->scaling);
    key_u32(g, s, "attention.sliding_window", s->window);
    if (s->window) {
        uint8_t pattern[MAX_LAYERS];
        for (int i = 0; i < s->layers; i++) pattern[i] = s->windowed >> i & 1;
        snprintf(key, sizeof key, "%s.attention.sliding_window_pattern", s->architecture);
        gguf_array(g, key, T_BOOL, (uint64_t)s->layers, pattern, (size_t)s->layers);
    }
    vocabulary v;
    memset(&v, 0, sizeof v);
    add_token(&v, "<unk>", 0, K_UNKNOWN);
    add_token(&v, "<s>", 0, K_CONTROL);
    add_token(&v, "</s>", 0, K_CONTROL);
    for (int i = 3; i < VOCAB; i++) {
        char text[2] = {(char)('A' + i - 3), 0};
        add_token(&v, text, 0, K_NORMAL);
    }
    gguf_vocabulary(g, &v, "llama");
    gguf_u32(g, "tokenizer.ggml.bos_token_id", 1);
    gguf_u32(g, "tokenizer.ggml.eos_token_id", 2);
    gguf_u32(g, "tokenizer.ggml.unknown_token_id", 0);
}

static void write_layer(gguf *g, const shape *s, int i, struct layer *l) {
    int q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim, dim = s->dim,
        hidden = s->hidden;
    double in = 2 / sqrt(dim);
    l->attn_norm = layer_tensor(g, i, "attn_norm.weight", 0, dim, 1, 0.5);
    l->q = layer_tensor(g, i, "attn_q.weight", q, dim, 0, 2 * in);
    l->k = layer_tensor(g, i, "attn_k.weight", kv, dim, 0, 2 * in);
    l->v = layer_tensor(g, i, "attn_v.weight", kv, dim, 0, in);
    l->o = layer_tensor(g, i, "attn_output.weight", dim, q, 0, 3 / sqrt(q));
    if (s->qkv_bias) {
        l->q_bias = layer_tensor(g, i, "attn_q.bias", 0, q, 0, 1);
        l->k_bias = layer_tensor(g, i, "attn_k.bias", 0, kv, 0, 1);
        l->v_bias = layer_tensor(g, i, "attn_v.bias", 0, kv, 0, 1);
    }
    if (s->o_bias) l->o_bias = layer_tensor(g, i, "attn_output.bias", 0, dim, 0, 1);
    if (s->head_norms) {
        l->q_norm = layer_tensor(g, i, "attn_q_norm.weight", 0, s->head_dim, 1, 0.5);
        l->k_norm = layer_tensor(g, i, "attn_k_norm.weight", 0, s->head_dim, 1, 0.5);
    }
    l->ffn_norm = layer_tensor(g, i, "ffn_norm.weight", 0, dim, 1, 0.5);
    l->gate = layer_tensor(g, i, "ffn_gate.weight", hidden, dim, 0, in);
    l->up = layer_tensor(g, i, "ffn_up.weight", hidden, dim, 0, in);
    l->down = layer_tensor(g, i, "ffn_down.weight", dim, hidden, 0, 2 / sqrt(hidden));
    if (!s->ffn_bias) return;
    l->gate_bias = layer_tensor(g, i, "ffn_gate.bias", 0, hidden, 0, 1);
    l->up_bias = layer_tensor(g, i, "ffn_up.bias", 0, hidden, 0, 1);
    l->down_bias = layer_tensor(g, i, "ffn_down.bias", 0, dim, 0, 1);
}

static bytes make_file(const shape *s, weights *w) {
    gguf g;
    memset(&g, 0, sizeof g);
    memset(w, 0, sizeof *w);
    write_keys(&g, s);
    w->embedding = tensor(&g, "token_embd.weight", VOCAB, s->dim, 0, 1);
    w->output_norm = tensor(&g, "output_norm.weight", 0, s->dim, 1, 0.5);
    if (!s->tied) w->output = tensor(&g, "output.weight", VOCAB, s->dim, 0, 1);
    if (s->divisors) w->divisors = tensor(&g, "rope_freqs.weight", 0, s->rope_dim / 2, 3, 2);
    for (int i = 0; i < s->layers; i++) write_layer(&g, s, i, &w->layers[i]);
    return gguf_finish(&g);
}

static void free_weights(weights *w) {
    free(w->embedding), free(w->output), free(w->output_norm), free(w->divisors);
    for (int i = 0; i < MAX_LAYERS; i++) {
        float **all = (float **)(void *)&w->layers[i];
        for (size_t k = 0; k < sizeof(struct layer) / sizeof *all; k++) free(all[k]);
    }
}

static llm_model *load_file(const bytes *file) {
    llm_error err;
    llm_model *model = llm_model_from_memory(file->data, file->length, "a model", &err);
    if (!model) fail_msg("%s", err.message);
    return model;
}

/* ---- The oracle ---------------------------------------------------------------------------- */

/* transformers, modeling_rope_utils.py, _compute_yarn_parameters: the inverse frequencies of a head
 * of `dim` dimensions. Returns the attention factor that applies if the config gives none. */
static double yarn_frequencies(double base, int dim, int original, double factor, double beta_fast,
                               double beta_slow, double *frequencies) {
    /* find_correction_dim */
    double low = dim * log(original / (beta_fast * 2 * PI)) / (2 * log(base));
    double high = dim * log(original / (beta_slow * 2 * PI)) / (2 * log(base));
    low = fmax(floor(low), 0), high = fmin(ceil(high), dim - 1); /* find_correction_range */
    if (low == high) high += 0.001;
    for (int i = 0; i < dim / 2; i++) {
        double extrapolated = 1 / pow(base, 2.0 * i / dim), interpolated = extrapolated / factor;
        double ramp = fmin(fmax((i - low) / (high - low), 0), 1), mask = 1 - ramp;
        frequencies[i] = interpolated * (1 - mask) + extrapolated * mask;
    }
    return factor <= 1 ? 1 : 0.1 * log(factor) + 1; /* get_mscale */
}

/* The inverse frequencies by _compute_llama3_parameters (transformers, modeling_rope_utils.py). */
static void llama3_frequencies(double base, int dim, int original, double factor, double low_factor,
                               double high_factor, double *frequencies) {
    for (int i = 0; i < dim / 2; i++) {
        double frequency = 1 / pow(base, 2.0 * i / dim), wavelength = 2 * PI / frequency;
        double smooth = (original / wavelength - low_factor) / (high_factor - low_factor);
        if (wavelength > original / low_factor)
            frequencies[i] = frequency / factor;
        else if (wavelength < original / high_factor)
            frequencies[i] = frequency;
        else
            frequencies[i] = (1 - smooth) * frequency / factor + smooth * frequency;
    }
}

static void oracle_frequencies(const shape *s, const weights *w, double *frequencies,
                               double *magnitude) {
    double base = s->base ? s->base : 10000, factor = s->factor ? s->factor : 1;
    *magnitude = s->attn_factor ? s->attn_factor : 1;
    if (s->scaling && !strcmp(s->scaling, "yarn")) {
        *magnitude *= yarn_frequencies(base, s->rope_dim, s->original, factor,
                                       s->beta_fast ? s->beta_fast : 32,
                                       s->beta_slow ? s->beta_slow : 1, frequencies);
        return;
    }
    for (int i = 0; i < s->rope_dim / 2; i++)
        frequencies[i] =
            pow(base, -2.0 * i / s->rope_dim) / factor / (w->divisors ? w->divisors[i] : 1);
}

/* out (rows) = w (rows, cols) x + bias */
static void oracle_product(const float *w, const float *bias, const double *x, int rows, int cols,
                           double *out) {
    for (int r = 0; r < rows; r++) {
        out[r] = bias ? bias[r] : 0;
        for (int c = 0; c < cols; c++) out[r] += (double)w[r * cols + c] * x[c];
    }
}

static void oracle_norm(const double *x, const float *weight, int n, double epsilon, double *out) {
    double squares = 0;
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    for (int i = 0; i < n; i++) out[i] = x[i] / sqrt(squares / n + epsilon) * weight[i];
}

/* The heads of one token: norm, then rotation. Files of the architecture "llama" pair dimensions
 * 2i and 2i + 1, all others i and i + rope_dim / 2. */
static void oracle_heads(const shape *s, double *x, int heads, const float *norm, int position,
                         const double *frequencies, double magnitude) {
    bool adjacent = !strcmp(s->architecture, "llama");
    for (int h = 0; h < heads; h++, x += s->head_dim) {
        if (norm) oracle_norm(x, norm, s->head_dim, s->epsilon, x);
        for (int i = 0; i < s->rope_dim / 2; i++) {
            int a = adjacent ? 2 * i : i, b = adjacent ? 2 * i + 1 : i + s->rope_dim / 2;
            double angle = position * frequencies[i], c = cos(angle) * magnitude,
                   d = sin(angle) * magnitude;
            double first = x[a] * c - x[b] * d, second = x[b] * c + x[a] * d;
            x[a] = first, x[b] = second;
        }
    }
}

/* The attention of query head `head` at position t over keys and values (positions, kv_heads,
 * head_dim). */
static void oracle_attention(const shape *s, int layer, int head, int t, const double *q,
                             const double *keys, const double *values, double *out) {
    int kv_head = head * s->kv_heads / s->heads, kv = s->kv_heads * s->head_dim, first = 0;
    if (s->window && (s->windowed >> layer & 1) && t - s->window + 1 > 0) first = t - s->window + 1;
    double total = 0, largest = -1e300;
    double *shares = (double *)malloc((size_t)(t + 1) * sizeof *shares);
    for (int p = first; p <= t; p++) {
        shares[p] = 0;
        for (int i = 0; i < s->head_dim; i++)
            shares[p] += q[i] * keys[p * kv + kv_head * s->head_dim + i];
        shares[p] /= sqrt(s->head_dim);
        largest = fmax(largest, shares[p]);
    }
    for (int p = first; p <= t; p++) total += shares[p] = exp(shares[p] - largest);
    for (int i = 0; i < s->head_dim; i++) {
        out[i] = 0;
        for (int p = first; p <= t; p++)
            out[i] += shares[p] / total * values[p * kv + kv_head * s->head_dim + i];
    }
    free(shares);
}

/* The logits (n, VOCAB) after each of n tokens, and the hidden states (n, dim) of the last layer
 * after the final norm. */
static float *oracle_logits(const shape *s, const weights *w, const int32_t *tokens, int n,
                            double *hidden) {
    enum { MOST = 256 };
    int q_width = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    double frequencies[MOST], magnitude, h[MOST], q[MOST], attended[MOST], gate[MOST], up[MOST],
        added[MOST];
    double *x = (double *)malloc((size_t)(n * s->dim) * sizeof *x);
    double *keys = (double *)malloc((size_t)(n * kv) * sizeof *keys);
    double *values = (double *)malloc((size_t)(n * kv) * sizeof *values);
    float *logits = (float *)malloc((size_t)(n * VOCAB) * sizeof *logits);
    oracle_frequencies(s, w, frequencies, &magnitude);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < s->dim; i++) x[t * s->dim + i] = w->embedding[tokens[t] * s->dim + i];
    for (int layer = 0; layer < s->layers; layer++) {
        const struct layer *l = &w->layers[layer];
        for (int t = 0; t < n; t++) { /* one token at a time: a token attends to those before it */
            double *row = x + t * s->dim;
            oracle_norm(row, l->attn_norm, s->dim, s->epsilon, h);
            oracle_product(l->q, l->q_bias, h, q_width, s->dim, q);
            oracle_product(l->k, l->k_bias, h, kv, s->dim, keys + t * kv);
            oracle_product(l->v, l->v_bias, h, kv, s->dim, values + t * kv);
            oracle_heads(s, q, s->heads, l->q_norm, t, frequencies, magnitude);
            oracle_heads(s, keys + t * kv, s->kv_heads, l->k_norm, t, frequencies, magnitude);
            for (int head = 0; head < s->heads; head++)
                oracle_attention(s, layer, head, t, q + head * s->head_dim, keys, values,
                                 attended + head * s->head_dim);
            oracle_product(l->o, l->o_bias, attended, s->dim, q_width, added);
            for (int i = 0; i < s->dim; i++) row[i] += added[i];
            oracle_norm(row, l->ffn_norm, s->dim, s->epsilon, h);
            oracle_product(l->gate, l->gate_bias, h, s->hidden, s->dim, gate);
            oracle_product(l->up, l->up_bias, h, s->hidden, s->dim, up);
            for (int i = 0; i < s->hidden; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
            oracle_product(l->down, l->down_bias, gate, s->dim, s->hidden, added);
            for (int i = 0; i < s->dim; i++) row[i] += added[i];
        }
    }
    for (int t = 0; t < n; t++) {
        double row[VOCAB], *state = hidden + t * s->dim;
        oracle_norm(x + t * s->dim, w->output_norm, s->dim, s->epsilon, state);
        oracle_product(s->tied ? w->embedding : w->output, NULL, state, VOCAB, s->dim, row);
        for (int i = 0; i < VOCAB; i++) logits[t * VOCAB + i] = (float)row[i];
    }
    free(x), free(keys), free(values);
    return logits;
}

/* ---- The engine, compared with the oracle ---------------------------------------------------- */

enum { REQUESTS = 4, LENGTH = 60 };
static const int lengths[REQUESTS] = {37, 1, 60, 18}, prompts[REQUESTS] = {30, 1, 41, 18};

/* A request without a hook gets the likeliest token after its prompt. */
static void check_token(const sample_record *got, const float *logits) {
    int best = 0;
    for (int i = 1; i < VOCAB; i++)
        if (logits[i] > logits[best]) best = i;
    assert_int_equal(got->n_tokens, 1);
    assert_int_equal(got->tokens[0], best);
}

/* Run all requests in one engine: prompts in chunks, together with tokens that are decoded. A hook
 * forces the tokens after its prompt and reads the logits of every token. Unless all_hooked, some
 * requests have no hook, so that logits are wanted for few rows of the batch. max_logits: the most
 * rows whose logits are computed at once. */
static void check_engine(const shape *s, const llm_model *model, llm_engine_options o,
                         bool all_hooked, int max_logits, int32_t tokens[REQUESTS][LENGTH],
                         float *const expected[REQUESTS]) {
    record *records[REQUESTS];
    int32_t forced[REQUESTS][LENGTH];
    llm_engine *engine = engine_new(model, &o);
    if (max_logits < engine->network.max_logits) engine->network.max_logits = max_logits;
    for (int i = 0; i < REQUESTS; i++) {
        llm_request r = llm_request_defaults();
        bool hooked = all_hooked || i % 2;
        records[i] = record_new(model);
        for (int t = 0; t < LENGTH; t++)
            forced[i][t] = t + 1 < lengths[i] && t + 1 >= prompts[i] ? tokens[i][t + 1] : -1;
        records[i]->forced = forced[i];
        records[i]->force_until = lengths[i];
        r.prompt = tokens[i];
        r.n_prompt = hooked ? prompts[i] : lengths[i];
        r.max_tokens = lengths[i] - r.n_prompt + 1;
        r.ignore_end = true;
        record_submit(engine, records[i], r, hooked);
    }
    record_drain(engine);
    assert_idle(engine);
    llm_engine_free(engine);
    for (int i = 0; i < REQUESTS; i++) {
        const sample_record *got = &records[i]->samples[0];
        if (!all_hooked && i % 2 == 0) check_token(got, expected[i] + (lengths[i] - 1) * VOCAB);
        else assert_int_equal(got->n_rows, lengths[i]);
        for (int row = 0; row < got->n_rows; row++) {
            assert_int_equal(got->positions[row], row);
            double error =
                relative_error(got->logits + row * VOCAB, expected[i] + row * VOCAB, VOCAB);
            if (!(error <= 1e-4))
                fail_msg("%s, %d x %d heads of %d, %s: request %d, position %d: %g",
                         s->architecture, s->kv_heads, s->heads / s->kv_heads, s->head_dim,
                         llm_isa_name(llm_cpu_isa(o.backend)), i, row, error);
        }
        record_free(records[i]);
    }
}

/* Embeddings, next to a request that generates: the last hidden state and the mean of all. */
static void check_embeddings(const shape *s, const llm_model *model, llm_engine_options o,
                             int32_t tokens[REQUESTS][LENGTH], double *const hidden[REQUESTS]) {
    llm_error err;
    llm_event event;
    int n_checked = 0;
    llm_engine *engine = engine_new(model, &o);
    for (int i = 0; i <= REQUESTS; i++) {
        llm_request r = llm_request_defaults();
        r.embedding = i < REQUESTS;
        r.prompt = tokens[i % REQUESTS];
        r.n_prompt = lengths[i % REQUESTS];
        r.max_tokens = i < REQUESTS ? -1 : 4;
        if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
    }
    while (llm_step(engine, &err) > 0)
        while (llm_next_event(engine, &event)) {
            if (event.request == REQUESTS + 1) {
                assert_null(event.last_hidden);
                continue;
            }
            int i = (int)event.request - 1, n = lengths[i];
            float last[64], mean[64];
            for (int k = 0; k < s->dim; k++) {
                double sum = 0;
                for (int t = 0; t < n; t++) sum += hidden[i][t * s->dim + k];
                mean[k] = (float)(sum / n);
                last[k] = (float)hidden[i][(n - 1) * s->dim + k];
            }
            assert_int_equal(event.finish, LLM_FINISH_LENGTH);
            assert_int_equal(event.token, -1);
            assert_true(relative_error(event.last_hidden, last, s->dim) <= 1e-4);
            assert_true(relative_error(event.mean_hidden, mean, s->dim) <= 1e-4);
            n_checked++;
        }
    assert_int_equal(n_checked, REQUESTS);
    assert_int_equal(err.status, LLM_OK);
    assert_idle(engine);
    llm_engine_free(engine);
}

static void check_shape(const shape *s) {
    weights w;
    bytes file = make_file(s, &w);
    llm_model *model = load_file(&file);
    int32_t tokens[REQUESTS][LENGTH];
    float *expected[REQUESTS];
    double *hidden[REQUESTS];
    for (int i = 0; i < REQUESTS; i++) {
        hidden[i] = (double *)malloc((size_t)(LENGTH * s->dim) * sizeof *hidden[i]);
        assert_non_null(hidden[i]);
        for (int t = 0; t < LENGTH; t++)
            tokens[i][t] = (int32_t)(llm_random(9, (uint64_t)i, (uint64_t)t) * VOCAB);
        expected[i] = oracle_logits(s, &w, tokens[i], lengths[i], hidden[i]);
    }
    /* the reference loops, with whole prompts and in small chunks; the best kernels; the plain
     * kernels */
    static const llm_isa isas[4] = {LLM_ISA_REFERENCE, LLM_ISA_REFERENCE, LLM_ISA_BEST,
                                    LLM_ISA_PLAIN};
    for (int kind = 0; kind < 4; kind++) {
        llm_error err;
        llm_engine_options o = llm_engine_defaults();
        o.backend = llm_cpu_backend(kind == 2 ? 2 : 1, isas[kind], &err);
        if (!o.backend) fail_msg("%s", err.message);
        o.cache_type = LLM_F32;
        o.context_length = 64;
        o.max_sequences = 4;
        o.max_batch_tokens = kind == 1 ? 7 : 128;
        o.block_size = kind == 1 ? 5 : 16;
        o.cache_bytes = 4 << 20;
        check_engine(s, model, o, kind % 2 == 0, kind == 2 ? 5 : 1000, tokens, expected);
        check_embeddings(s, model, o, tokens, hidden);
        llm_backend_free(o.backend);
    }
    for (int i = 0; i < REQUESTS; i++) free(expected[i]), free(hidden[i]);
    llm_model_free(model);
    clear_bytes(&file);
    free_weights(&w);
}

static void test_architecture_traits(void **state) {
    (void)state;
    static const shape shapes[] = {
        /* architecture, layers, dim, heads, kv_heads, head_dim, rope_dim, hidden */
        {"llama", 2, 16, 4, 2, 4, 4, 24, .tied = false},
        /* the heads together are wider than the model, and the output matrix is the embedding */
        {"llama", 2, 12, 6, 2, 8, 8, 20, .tied = true, .base = 500000, .epsilon = 1e-3},
        /* all biases; one key/value head; RoPE on a part of each head */
        {"llama", 2, 20, 3, 1, 10, 6, 18, .qkv_bias = true, .o_bias = true, .ffn_bias = true},
        {"llama", 1, 16, 2, 2, 8, 8, 16, .divisors = true, .scaling = "linear", .factor = 2.5},
        /* a window in the first and the last layer */
        {"llama", 3, 16, 4, 4, 4, 4, 16, .window = 9, .windowed = 5},
        {"qwen2", 2, 16, 4, 2, 8, 8, 24, .qkv_bias = true, .tied = true, .base = 1e6,
         .epsilon = 1e-6},
        {"qwen3", 2, 16, 4, 2, 8, 4, 24, .head_norms = true, .epsilon = 1e-2},
        /* YaRN with a ramp from dimension 5 to 14 of 16 */
        {"qwen2", 2, 16, 2, 1, 32, 32, 24, .qkv_bias = true, .scaling = "yarn", .factor = 8,
         .beta_fast = 1, .beta_slow = 0.01, .original = 128, .attn_factor = 1.2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        shape s = shapes[i];
        if (!s.epsilon) s.epsilon = 1e-5;
        check_shape(&s);
    }
}

/* ---- RoPE frequencies ------------------------------------------------------------------------ */

static void check_frequencies(const char *what, const float *got, const double *expected, int n) {
    for (int i = 0; i < n; i++)
        if (!(fabs(got[i] - expected[i]) <= 1e-6 * expected[i]))
            fail_msg("%s: frequency %d is %g, not %g", what, i, (double)got[i], expected[i]);
}

/* YaRN's frequencies as the kernels get them, from the metadata of a file. */
static void test_yarn_frequencies(void **state) {
    (void)state;
    static const struct {
        const char *name;
        double base;
        int head_dim, original;
        double factor, beta_fast, beta_slow, attn_factor; /* 0: not in the file */
    } cases[] = {
        {"Llama 2, YaRN 64k", 10000, 128, 4096, 16, 32, 1, 0},
        {"Qwen2.5, YaRN 128k", 1000000, 128, 32768, 4, 0, 0, 0},
        {"heads of 64", 10000, 64, 4096, 4, 32, 1, 0},
        {"an attention factor", 1000000, 128, 32768, 4, 32, 1, 1.25},
        {"other betas", 10000, 128, 4096, 8, 16, 2, 0},
        {"a ramp that begins before the first dimension", 10000, 64, 128, 4, 32, 1, 0},
        {"a ramp that ends beyond the last dimension", 10000, 128, 4096, 4, 32, 1e-6, 0},
        {"a ramp of one dimension", 10000, 128, 4096, 4, 1, 1, 0},
        {"a factor of 1", 10000, 128, 4096, 1, 32, 1, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm_error err;
        weights w;
        shape s = {"llama", 1, 8, 1, 1, cases[i].head_dim, cases[i].head_dim, 8, .epsilon = 1e-5};
        s.scaling = "yarn", s.base = cases[i].base;
        s.original = cases[i].original, s.factor = cases[i].factor;
        s.beta_fast = cases[i].beta_fast, s.beta_slow = cases[i].beta_slow;
        s.attn_factor = cases[i].attn_factor;
        s.context = (int)(s.original * s.factor);
        bytes file = make_file(&s, &w);
        llm_model *model = load_file(&file);
        llm__network net;
        memset(&net, 0, sizeof net);
        net.model = model;
        net.backend = llm_cpu_backend(1, LLM_ISA_REFERENCE, &err);
        assert_true(llm__load_frequencies(&net, 0, false, &err));
        double expected[128], magnitude;
        oracle_frequencies(&s, &w, expected, &magnitude);
        check_frequencies(cases[i].name, (const float *)net.frequencies.data, expected,
                          s.rope_dim / 2);
        assert_true(fabs(llm_model_config(model)->rope_magnitude - magnitude) <= 1e-6);
        net.backend->release(net.backend->context, (void *)net.frequencies.data);
        llm_backend_free(net.backend);
        llm_model_free(model);
        clear_bytes(&file);
        free_weights(&w);
    }
}

/* Values that transformers computes: _compute_yarn_parameters for Qwen2.5's YaRN config (theta 1e6,
 * heads of 128, 32768 positions, factor 4) ramps from dimension 23 to 40. */
static void test_yarn_ramp(void **state) {
    (void)state;
    llm_config c = {.rope_dim = 128,
                    .rope_base = 1e6f,
                    .rope_scaling = LLM_ROPE_YARN,
                    .rope_factor = 4,
                    .rope_original_context = 32768,
                    .rope_beta_fast = 32,
                    .rope_beta_slow = 1};
    for (int i = 0; i < 64; i++) {
        double ramp = i <= 23 ? 0 : i >= 40 ? 1 : (i - 23) / 17.0, plain = pow(1e6, -i / 64.0);
        assert_true(fabs(llm__frequency(&c, i, 1) / plain - (1 - 0.75 * ramp)) < 1e-6);
    }
}

/* Read the RoPE settings of a folder's config.json, and compare the model's frequencies, magnitude
 * and context length. */
static void check_folder_rope(const char *config, int head_dim, const double *expected,
                              double magnitude, int context) {
    llm_error err;
    llm__folder f;
    llm_model model;
    llm_file *file = (llm_file *)calloc(1, sizeof *file);
    llm__metadata m;
    assert_non_null(file);
    memset(&f, 0, sizeof f), memset(&model, 0, sizeof model), memset(&m, 0, sizeof m);
    f.tensors = (llm_tensor *)calloc(1, sizeof *f.tensors); /* for the divisors */
    f.head_dim = head_dim, f.file = file, f.architecture = llm__architecture_at(0);
    file->error = &err;
    m.architecture = "llama";
    if (!llm_json_parse(&f.config, config, strlen(config), "config.json", &err))
        fail_msg("%s", err.message);
    if (!llm__folder_rope(&f, &m, 131072) || !llm__read_metadata(&m, file, &err))
        fail_msg("%s", err.message);
    llm_config *c = &model.config;
    model.file = file;
    strcpy(c->architecture, "llama");
    c->rope_dim = head_dim;
    llm__loader l = {&model, file, NULL, ""};
    assert_true(llm__model_int(&l, "context_length", 0, &c->context_length));
    assert_true(llm__model_float(&l, "rope.freq_base", 1, &c->rope_base));
    assert_true(llm__model_scaling(&l));
    assert_int_equal(c->context_length, context);
    assert_true(fabs(c->rope_magnitude - magnitude) <= 1e-6);
    const float *divisors = f.n_tensors ? (const float *)f.tensors[0].data : NULL;
    float got[128];
    for (int i = 0; i < head_dim / 2; i++)
        got[i] = (float)llm__frequency(c, i, divisors ? (double)divisors[i] : 1);
    check_frequencies(config, got, expected, head_dim / 2);
    LLM_FREE(m.bytes.data);
    llm_json_free(&f.config);
    free(f.tensors);
    llm_file_close(file);
}

/* transformers computes the attention factor from mscale and mscale_all_dim if both are given and
 * attention_factor is not. */
static void test_folder_yarn(void **state) {
    (void)state;
    static const struct {
        const char *more; /* JSON after the type and the factor */
        double beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim;
    } cases[] = {{"", 32, 1, 0, 0, 0},
                 {", \"beta_fast\": 24, \"beta_slow\": 1.5", 24, 1.5, 0, 0, 0},
                 {", \"attention_factor\": 1.5", 32, 1, 1.5, 0, 0},
                 {", \"mscale\": 0.7, \"mscale_all_dim\": 0.4", 32, 1, 0, 0.7, 0.4},
                 {", \"mscale\": 0.7", 32, 1, 0, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[400];
        double expected[128], factor = 40;
        snprintf(config, sizeof config,
                 "{\"rope_theta\": 10000, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 40, "
                 "\"original_max_position_embeddings\": 4096%s}}",
                 cases[i].more);
        double magnitude = yarn_frequencies(10000, 128, 4096, factor, cases[i].beta_fast,
                                            cases[i].beta_slow, expected);
        if (cases[i].mscale && cases[i].mscale_all_dim)
            magnitude = (0.1 * cases[i].mscale * log(factor) + 1) /
                        (0.1 * cases[i].mscale_all_dim * log(factor) + 1);
        if (cases[i].attention_factor) magnitude = cases[i].attention_factor;
        check_folder_rope(config, 128, expected, magnitude, 4096 * 40);
    }
}

static void test_folder_llama3(void **state) {
    (void)state;
    static const struct {
        double base;
        int head_dim, original;
        double factor, low, high;
    } cases[] = {
        {500000, 128, 8192, 8, 1, 4}, {500000, 64, 8192, 32, 1, 4}, {10000, 80, 2048, 3, 2, 5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[400];
        double expected[128];
        snprintf(
            config, sizeof config,
            "{\"rope_theta\": %g, \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": %g, "
            "\"low_freq_factor\": %g, \"high_freq_factor\": %g, "
            "\"original_max_position_embeddings\": %d}}",
            cases[i].base, cases[i].factor, cases[i].low, cases[i].high, cases[i].original);
        llama3_frequencies(cases[i].base, cases[i].head_dim, cases[i].original, cases[i].factor,
                           cases[i].low, cases[i].high, expected);
        check_folder_rope(config, cases[i].head_dim, expected, 1, 131072);
    }
}

static void test_folder_linear(void **state) {
    (void)state;
    double expected[32];
    for (int i = 0; i < 32; i++) expected[i] = pow(10000, -i / 32.0) / 2.5;
    check_folder_rope(
        "{\"rope_theta\": 10000, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.5}}", 64,
        expected, 1, 327680);
    for (int i = 0; i < 32; i++) expected[i] *= 2.5;
    check_folder_rope("{\"rope_theta\": 10000, \"rope_scaling\": null}", 64, expected, 1, 131072);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_architecture_traits),        cmocka_unit_test(test_yarn_frequencies),
        cmocka_unit_test(test_yarn_ramp),     cmocka_unit_test(test_folder_yarn),
        cmocka_unit_test(test_folder_llama3), cmocka_unit_test(test_folder_linear),
    };
    return cmocka_run_group_tests_name("transformer", tests, NULL, NULL);
}
