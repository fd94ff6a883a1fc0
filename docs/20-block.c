/* 20-block.c - llm lesson block: the operations of a layer, one after another, on one token; what
 * RoPE does to a query and a key; and how well the model predicts without each part of a layer.
 * Described in 20-block.md.
 *
 * A model is a list of operations (page 16), so a part is left out by editing the list. */
#include "lesson.h"
#include "program.h"

enum { BLOCK_TEXT = 12 }; /* tokens of the text of the first table */

typedef enum block_part { /* what is left out */
    NOTHING, ATTENTION, FEED_FORWARD, GATE, NORMS, ROPE, RESIDUAL, N_BLOCK_PARTS
} block_part;

static const char *const block_names[N_BLOCK_PARTS] = {
    "(the whole model)", "attention", "feed-forward", "gate", "norms", "RoPE",
    "residual stream"};

typedef struct block {
    lesson *l;
    llm_engine *engine;
    const llm_backend *device;
    llm_program *program; /* the engine's; this lesson edits it */
    llm_program whole;    /* as it was: a copy of the list */
    llm_limits limits;
    int bytes_of_text;
} block;

/* ---- One token through layer 0 ------------------------------------------------------------- */

/* Run the first n operations over a text, and get the last token's row of a buffer. */
static bool block_run(const block *x, int n, const int32_t *tokens, int buffer, float *row) {
    llm_program p = x->whole;
    llm_error err;
    lone_batch text;
    size_t bytes = (size_t)p.buffers[buffer].width * sizeof *row;
    p.n_ops = p.n_body = n;
    p.plan = NULL;
    p.fusions = 0; /* every operation writes its buffer */
    make_lone_batch(&text, BLOCK_TEXT, BLOCK_TEXT, llm_engine_settings(x->engine)->block_size,
                    false);
    text.batch.tokens = tokens;
    void *context = x->device->context;
    bool good = x->device->prepare(context, &p, &x->limits, &err);
    if (good) {
        const char *rows = (const char *)p.buffers[buffer].data;
        good = x->device->run(context, &p, LLM_BODY, &text.batch, 0, 0, &err) &&
               x->device->download(context, row, rows + (BLOCK_TEXT - 1) * bytes, bytes, &err);
        x->device->forget(context, &p);
    }
    free(text.memory);
    return good || !fail_with(&err);
}

static float *block_row(const block *x) { /* memory for a row of any buffer */
    int64_t width = 0;
    for (int i = 0; i < x->whole.n_buffers; i++)
        if (x->whole.buffers[i].width > width) width = x->whole.buffers[i].width;
    return resize(NULL, (size_t)width * sizeof(float));
}

static bool block_show_layer(const block *x, const int32_t *tokens) {
    static const column columns[] = {
        {"operation", "operation", "%s"}, {"buffer", "writes", "%s"},
        {"values", "values", "%.0f"},     {"rms", "size (rms)", "%.3f"},
        {"first", "the first", "%.3f"},   {"second", "three", "%.3f"},
        {"third", "values", "%.3f"}};
    table t = new_table(columns, COUNT(columns));
    const llm_program *p = &x->whole;
    float *row = block_row(x);
    bool good = true;
    for (int i = 0; i < p->n_body && p->ops[i].layer <= 0 && good; i++) {
        const llm_op *op = &p->ops[i];
        int out = op->out >= 0 ? op->out : op->in[1]; /* rope_store: the queries */
        int64_t width = p->buffers[out].width;
        double sum = 0;
        if (op->kind == LLM_OP_ROPE_ANGLES) continue;
        good = block_run(x, i + 1, tokens, out, row);
        for (int64_t j = 0; j < width && good; j++) sum += (double)row[j] * row[j];
        add_row(&t, OP_NAME(op), p->buffers[out].name, (double)width, sqrt(sum / (double)width),
                row[0], row[1], row[2]);
    }
    char last[64];
    say(x->l, "Token %d of a tale, \"%s\", through layer 0. Each row shows what an operation wrote "
              "for this token; rope_store: the queries.\n\n", BLOCK_TEXT,
        token_text(llm_model_tokenizer(x->l->loaded), tokens[BLOCK_TEXT - 1], last, sizeof last));
    show_table(x->l, &t, "layer");
    const llm_config *c = llm_model_config(x->l->loaded);
    double cache = (double)llm_model_cache_bytes_per_token(x->l->loaded, LLM_F16) / 1024;
    say(x->l, "\n%d query heads share %d heads of keys and values. So the cache takes %.1f KiB per "
              "token; without sharing it would take %.1f.\n", c->n_heads, c->n_kv_heads, cache,
        cache * c->n_heads / c->n_kv_heads);
    free(row);
    return good;
}

/* ---- RoPE ---------------------------------------------------------------------------------- */

/* The score of a query at position i for a key at position j: both are rotated, pair by pair. */
static double block_score(const llm_op *rope, const float *frequencies, const float *q,
                          const float *k, int i, int j) {
    double sum = 0;
    int half = rope->rope_dim / 2;
    bool halves = rope->pairing == LLM_ROPE_HALVES;
    for (int pair = 0; pair < half; pair++) {
        int a = halves ? pair : 2 * pair, b = halves ? pair + half : 2 * pair + 1;
        double u = i * frequencies[pair], v = j * frequencies[pair];
        sum += (q[a] * cos(u) - q[b] * sin(u)) * (k[a] * cos(v) - k[b] * sin(v)) +
               (q[a] * sin(u) + q[b] * cos(u)) * (k[a] * sin(v) + k[b] * cos(v));
    }
    for (int d = rope->rope_dim; d < rope->attention.head_dim; d++) sum += q[d] * k[d];
    return sum * rope->attention.scale;
}

static void block_plot_rope(block *x, const float *frequencies, int half) {
    plot p = plot_new(PLOT_LINES, "RoPE: the cosine by which pairs of dimensions have turned",
                      "position", "cosine");
    plot_note(&p, "Each pair of dimensions turns by its own angle per position: the first ones "
                  "fast, which tells neighbours apart, the last ones slowly, which tells far from "
                  "near.");
    for (int k = 0; k < 4; k++) {
        char name[48];
        int pair = k * (half - 1) / 6; /* the later ones hardly turn in so short a text */
        snprintf(name, sizeof name, "pair %d: once in %.0f", pair,
                 2 * 3.14159265358979 / frequencies[pair]);
        int series = plot_series_add(&p, name);
        for (int i = 0; i <= 64; i++) plot_point(&p, series, i, cos(i * frequencies[pair]));
    }
    show_plot(x->l, &p);
}

static bool block_show_rope(block *x, const int32_t *tokens) {
    static const column columns[] = {{"distance", "distance", "%.0f"},
                                     {"near", "positions from 0", "%.4f"},
                                     {"far", "from 100", "%.4f"}, {"farther", "from 1000", "%.4f"}};
    static const int distances[] = {0, 1, 2, 4, 8, 16, 64};
    table t = new_table(columns, COUNT(columns));
    const llm_program *p = &x->whole;
    const llm_op *rope = NULL, *angles = NULL;
    llm_error err;
    int at = 0;
    for (int i = 0; i < p->n_body && !rope; i++) {
        if (p->ops[i].kind == LLM_OP_ROPE_ANGLES && !angles) angles = &p->ops[i];
        if (p->ops[i].kind == LLM_OP_ROPE_STORE) rope = &p->ops[i], at = i;
    }
    float *q = block_row(x), *k = block_row(x), *frequencies = block_row(x);
    bool good = block_run(x, at, tokens, rope->in[1], q) &&
                block_run(x, at, tokens, rope->in[2], k);
    if (good && !x->device->download(x->device->context, frequencies, angles->weight->data,
                                     (size_t)rope->rope_dim / 2 * sizeof *frequencies, &err))
        good = !fail_with(&err);
    for (int i = 0; i < COUNT(distances) && good; i++) {
        double scores[3];
        for (int j = 0; j < 3; j++) {
            int first = j == 0 ? 0 : j == 1 ? 100 : 1000;
            scores[j] = block_score(rope, frequencies, q, k, first + distances[i], first);
        }
        add_row(&t, (double)distances[i], scores[0], scores[1], scores[2]);
    }
    say(x->l, "\nScores of one query (head 0) for one key, both rotated by RoPE to positions at "
              "some distance. Only the distance counts:\n\n");
    show_table(x->l, &t, "rope");
    if (good) block_plot_rope(x, frequencies, rope->rope_dim / 2);
    free(q);
    free(k);
    free(frequencies);
    return good;
}

/* ---- What is left out ---------------------------------------------------------------------- */

/* Edit one operation. False: leave it out. gate: the last SwiGLU. */
static bool block_edit(llm_op *op, block_part part, int layer, llm_op *gate) {
    bool adds = op->kind == LLM_OP_MATMUL && op->add;
    if (op->layer < 0 || (layer >= 0 && op->layer != layer)) return true;
    if (op->kind == LLM_OP_SWIGLU) *gate = *op;
    bool after = gate->out >= 0 && gate->layer == op->layer; /* in the feed-forward block */
    switch (part) {
    case ATTENTION: return !adds || after;
    case FEED_FORWARD: return !adds || !after;
    case GATE: /* the block's last product reads `up` itself */
        if (after && op->in[0] == gate->out) op->in[0] = gate->in[1];
        return op->kind != LLM_OP_SWIGLU;
    case NORMS:
        if (op->kind == LLM_OP_RMSNORM) { /* 1e5 tanh(x / 1e5) is x, nearly */
            op->kind = LLM_OP_SOFTCAP;
            op->weight = NULL;
            op->scale = 1e5f;
        }
        return true;
    case ROPE:
        if (op->kind == LLM_OP_ROPE_STORE) op->rope_dim = 0;
        return true;
    case RESIDUAL:
        if (adds) op->add = false;
        return true;
    default: return true;
    }
}

/* Plan the engine's program again, without one part of a layer (-1: of all layers). */
static bool block_leave_out(block *x, block_part part, int layer) {
    llm_program *p = x->program;
    llm_error err;
    llm_op gate = {.out = -1};
    p->n_ops = 0;
    for (int i = 0; i < x->whole.n_ops; i++) {
        llm_op op = x->whole.ops[i];
        if (i == x->whole.n_body) p->n_body = p->n_ops;
        if (block_edit(&op, part, layer, &gate)) p->ops[p->n_ops++] = op;
    }
    x->device->forget(x->device->context, p);
    return x->device->prepare(x->device->context, p, &x->limits, &err) || !fail_with(&err);
}

static bool block_bits(block *x, block_part part, int layer, double *bits) {
    double unused;
    return block_leave_out(x, part, layer) &&
           measure_perplexity(x->l->loaded, x->engine, x->bytes_of_text, bits, &unused);
}

static bool block_show_parts(block *x) {
    static const column columns[] = {{"without", "without", "%s"},
                                     {"bits", "bits per byte", "%.3f"},
                                     {"more", "more", "%.3f"}};
    table t = new_table(columns, COUNT(columns));
    double whole = 0, bits = 0;
    bool good = true;
    for (int part = 0; part < N_BLOCK_PARTS && good; part++) {
        good = block_bits(x, (block_part)part, -1, &bits);
        if (part == NOTHING) whole = bits;
        if (good) add_row(&t, block_names[part], bits, part == NOTHING ? NAN : bits - whole);
    }
    say(x->l, "\nEach part left out of all layers: bits per byte of the first %d bytes of "
              "models/eval.txt (8: no better than guessing a byte).\n\n", x->bytes_of_text);
    show_table(x->l, &t, "parts");
    return good;
}

static bool block_show_layers(block *x) {
    static const column columns[] = {{"layer", "layer", "%.0f"},
                                     {"attention", "without its attention", "%.3f"},
                                     {"feed_forward", "without its feed-forward", "%.3f"}};
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_BARS, "Bits per byte without one block of one layer", "",
                      "bits per byte");
    plot_note(&p, "The longer the bar, the more the model needs this block.");
    int series[2] = {plot_series_add(&p, "without its attention"),
                     plot_series_add(&p, "without its feed-forward")};
    bool good = true;
    for (int layer = 0; layer < llm_model_config(x->l->loaded)->n_layers && good; layer++) {
        char name[32];
        double bits[2] = {0};
        snprintf(name, sizeof name, "layer %d", layer);
        plot_category(&p, name);
        for (int i = 0; i < 2 && good; i++) {
            good = block_bits(x, i ? FEED_FORWARD : ATTENTION, layer, &bits[i]);
            plot_bar(&p, series[i], bits[i]);
        }
        add_row(&t, (double)layer, bits[0], bits[1]);
    }
    say(x->l, "\nThe same, of one layer at a time:\n\n");
    show_table(x->l, &t, "layers");
    if (good) keep_plot(x->l, p); /* the table says the same as text */
    else plot_free(&p);
    return good;
}

/* ---- The lesson ---------------------------------------------------------------------------- */

/* The parts that the lesson leaves out must be there. */
static bool block_has_parts(const llm_program *p) {
    for (int i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind == LLM_OP_LAYERNORM || p->ops[i].kind == LLM_OP_EXPERTS)
            return !fail("this lesson is about layers with RMSNorm and a gated feed-forward block; "
                         "this model has others (see llm info)");
    return true;
}

static bool block_teach(block *x) {
    const llm_engine_options *o = llm_engine_settings(x->engine);
    x->device = o->backend;
    x->program = llm_engine_program(x->engine, false);
    if (!block_has_parts(x->program)) return false;
    x->limits = (llm_limits){o->max_batch_tokens, o->max_sequences, o->context_length,
                             o->max_batch_tokens};
    x->whole = *x->program;
    x->whole.ops = resize(NULL, (size_t)x->whole.n_ops * sizeof(llm_op));
    memcpy(x->whole.ops, x->program->ops, (size_t)x->whole.n_ops * sizeof(llm_op));
    int32_t *tokens = lesson_tokens(x->l, 0, BLOCK_TEXT);
    bool good = tokens && block_show_layer(x, tokens) && block_show_rope(x, tokens) &&
                block_show_parts(x) && block_show_layers(x);
    free(tokens);
    free(x->whole.ops);
    return good;
}

static int lesson_block(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    block x = {.l = &l, .bytes_of_text = 6000};
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "text", "N", WHOLE, &x.bytes_of_text, 100, 1000000,
         "bytes of models/eval.txt that each variant predicts (default 6000)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, "models/tales.gguf");
    if (status != PARSED) return status;
    l.engine.prefix_cache = false; /* its blocks would be another variant's */
    x.engine = fits_context(&l, BLOCK_TEXT, 0) ? perplexity_engine(&l, l.loaded) : NULL;
    bool good = x.engine && block_teach(&x);
    free_engine(x.engine);
    return lesson_end(&l, good);
}

static const char block_notes[] =
    "Shows what each operation of a layer does to one token, why RoPE makes scores depend on\n"
    "distances only, and how well the model predicts text when a part is left out.\n"
    "\n"
    "Examples:\n"
    "  llm lesson block\n"
    "  llm lesson block --text 2000 --json\n"
    "  llm lesson block -m some.gguf --svg block.svg\n";

const command block_lesson = {
    "lesson block", "The parts of a layer, and the model without each of them.", "[options]",
    lesson_block, block_notes};
