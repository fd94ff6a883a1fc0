/* 04-attention.c - llm lesson attention: one real head, tile by tile. Beside 04-attention.md.
 *
 * The lesson stands at the seam: a copy of the backend's table of functions, with one of our own for run, sees the
 * program and the batch as the engine computes a prompt. It first runs a copy of the program that ends before the
 * attention of the chosen layer, and then that one operation, in both forms. For one head and the last token it then
 * walks over the tiles with the engine's own step, llm__base_softmax_row (the one that is compiled for every
 * processor), and compares. */
#include "lesson.h"

typedef struct attention_look { /* what to look at, and what was seen */
    int layer, head;
    bool seen, failed;
    int n, head_dim;         /* positions that the last token sees */
    float scale;
    float *q, *keys, *values; /* (head_dim), (n, head_dim), (n, head_dim) */
    float *tiled, *naive;     /* (head_dim) by the engine's two forms */
    double tiled_seconds, naive_seconds; /* of the whole layer */
} attention_look;

static struct { /* what stands at the seam has no argument of its own to remember things by */
    const llm_backend *device;
    attention_look *look;
} attention_spy;

/* What the device has computed, as host memory. */
static void *attention_download(const void *from, size_t bytes) {
    llm_error err;
    const llm_backend *b = attention_spy.device;
    void *to = resize(NULL, bytes);
    if (!b->sync(b->context, &err) || !b->download(b->context, to, from, bytes, &err)) attention_spy.look->failed = true;
    return to;
}

static float *attention_floats(const float *from, int n) { return attention_download(from, (size_t)n * sizeof *from); }

/* The rows of one kv head from their blocks, as floats. */
static float *attention_rows(const llm_batch *batch, const llm_cache *cache, const void *side, int layer, int kv_head,
                             int n) {
    int head_dim = cache->head_dim;
    float *rows = resize(NULL, (size_t)n * (size_t)head_dim * sizeof *rows);
    const llm_type_info *type = llm_type_find(cache->type);
    size_t value_bytes = llm__value_bytes(cache->type);
    for (int p = 0; p < n; p++) {
        int64_t stride, at = llm__cache_place(cache, side, llm__cache_row(batch, cache, 0, kv_head, p), &stride);
        size_t span = (size_t)((head_dim - 1) * stride + 1); /* keys may lie transposed: what is between belongs to others */
        char *packed = attention_download(llm__cache_layer(cache, side, layer) + (size_t)at * value_bytes, span * value_bytes);
        for (int d = 0; d < head_dim; d++)
            type->unpack(packed + (size_t)(d * stride) * value_bytes, rows + (size_t)p * (size_t)head_dim + (size_t)d, 1);
        free(packed);
    }
    return rows;
}

/* Run n operations of the program, from the first-th on, as a program of their own. Returns the seconds; < 0: failed. */
static double attention_part(const llm_program *whole, int first, int n, const llm_batch *batch) {
    const llm_backend *b = attention_spy.device;
    llm_error err;
    llm_program part = *whole;
    llm_limits limits = {batch->n_tokens, batch->n_sequences, batch->positions[batch->n_tokens - 1] + 1, 0};
    part.ops += first;
    part.n_ops = part.n_body = n;
    part.plan = NULL;
    if (!b->prepare(b->context, &part, &limits, &err)) return -1;
    double start = llm_seconds();
    bool good = b->run(b->context, &part, LLM_BODY, batch, 0, 0, &err) && b->sync(b->context, &err);
    double seconds = llm_seconds() - start;
    b->forget(b->context, &part);
    return good ? seconds : -1;
}

/* What attention, operation `index` of the program, makes of a batch of one sequence */
static void attention_see(attention_look *look, const llm_program *program, int index, const llm_batch *batch) {
    llm_op *op = &program->ops[index];
    const llm_attention_shape *shape = &op->attention;
    const llm_cache *cache = program->cache;
    int last = batch->n_tokens - 1, d = shape->head_dim, kv_head = look->head / (shape->n_heads / shape->n_kv_heads);
    size_t at = (size_t)last * (size_t)(shape->n_heads * d) + (size_t)(look->head * d);
    const float *q = program->buffers[op->in[0]].data + at, *out = program->buffers[op->out].data + at;
    look->failed = attention_part(program, 0, index, batch) < 0;
    look->tiled_seconds = look->failed ? -1 : attention_part(program, index, 1, batch);
    look->tiled = attention_floats(out, d);
    op->attention.naive = true;
    look->naive_seconds = attention_part(program, index, 1, batch);
    op->attention.naive = false;
    look->naive = attention_floats(out, d);
    look->failed = look->failed || look->tiled_seconds < 0 || look->naive_seconds < 0;
    look->seen = true;
    look->n = batch->positions[last] + 1;
    look->head_dim = d;
    look->scale = shape->scale;
    look->q = attention_floats(q, d);
    look->keys = attention_rows(batch, cache, cache->keys, look->layer, kv_head, look->n);
    look->values = attention_rows(batch, cache, cache->values, look->layer, kv_head, look->n);
}

static bool attention_at_the_seam(void *context, const llm_program *program, llm_part part, const llm_batch *batch,
                                  int first, int n, llm_error *err) {
    attention_look *look = attention_spy.look;
    for (int i = 0; i < program->n_body && !look->seen && batch->n_tokens > 1; i++)
        if (program->ops[i].kind == LLM_OP_ATTENTION && program->ops[i].layer == look->layer)
            attention_see(look, program, i, batch);
    return attention_spy.device->run(context, program, part, batch, first, n, err);
}

static double furthest(const float *a, const double *b, int n) {
    double worst = 0;
    for (int i = 0; i < n; i++) worst = larger(worst, fabs(a[i] - b[i]));
    return worst;
}

/* The blackboard form in double precision: weights (n) and out (head_dim). */
static void attention_exact(const attention_look *a, double *weights, double *out) {
    double largest = -INFINITY, total = 0;
    for (int p = 0; p < a->n; p++) {
        weights[p] = 0;
        for (int d = 0; d < a->head_dim; d++) weights[p] += (double)a->q[d] * a->keys[p * a->head_dim + d];
        weights[p] *= a->scale;
        largest = larger(largest, weights[p]);
    }
    for (int p = 0; p < a->n; p++) total += weights[p] = exp(weights[p] - largest);
    for (int d = 0; d < a->head_dim; d++) out[d] = 0;
    for (int p = 0; p < a->n; p++) {
        weights[p] /= total;
        for (int d = 0; d < a->head_dim; d++) out[d] += weights[p] * a->values[p * a->head_dim + d];
    }
}

/* Tile by tile: the largest score m, the sum l, and the weighted values so far, which shrink when m grows. */
static double attention_walk(lesson *l, const attention_look *a, const double *exact) {
    static const column columns[] = {{"tile", "tile", "%.0f"},
                                     {"first", "first", "%.0f"},
                                     {"last", "last", "%.0f"},
                                     {"largest", "m, largest score", "%.4f"},
                                     {"shrink", "shrink", "%.4f"},
                                     {"sum", "l, sum", "%.4f"},
                                     {"distance", "from the result", "%.2g"}};
    table t = new_table(columns, COUNT(columns));
    int d = a->head_dim, padded = (int)llm__divide_up(d, LLM__PADDING) * LLM__PADDING;
    float m = -INFINITY, total = 0, scores[LLM__TILE];
    float *sums = resize(NULL, (size_t)padded * sizeof *sums), *out = resize(NULL, (size_t)d * sizeof *out);
    memset(sums, 0, (size_t)padded * sizeof *sums);
    double distance = 0;
    for (int first = 0, tile = 1; first < a->n; first += LLM__TILE, tile++) {
        int seen = a->n - first < LLM__TILE ? a->n - first : LLM__TILE;
        for (int k = 0; k < LLM__TILE; k++) {
            scores[k] = 0;
            for (int i = 0; k < seen && i < d; i++) scores[k] += a->q[i] * a->keys[(first + k) * d + i];
        }
        float before = m;
        llm__base_softmax_row(scores, 0, seen, a->scale, &m, &total, sums, padded); /* scores become exp(score - m) */
        for (int k = 0; k < seen; k++)
            for (int i = 0; i < d; i++) sums[i] += scores[k] * a->values[(first + k) * d + i];
        for (int i = 0; i < d; i++) out[i] = sums[i] / total;
        distance = furthest(out, exact, d);
        add_row(&t, (double)tile, (double)first, (double)(first + seen - 1), (double)m,
                first ? exp((double)before - m) : NAN, (double)total, distance);
    }
    show_table(l, &t, "tiles");
    free(sums);
    free(out);
    return distance;
}

/* Bytes of keys and values that one layer reads for a prompt of n tokens, and the scores it has in memory at a time. */
static void attention_bytes(lesson *l, const attention_look *a) {
    static const column columns[] = {{"form", "form", "%s"},
                                     {"kv_bytes", "k, v bytes read", "%.0f"},
                                     {"score_bytes", "score bytes", "%.0f"},
                                     {"milliseconds", "ms", "%.2f"},
                                     {"error", "error", "%.2g"}};
    const llm_config *c = llm_model_config(l->loaded);
    double n = a->n, row = 2.0 * c->head_dim * (double)llm__value_bytes(l->engine.cache_type), tiled = 0;
    int group = c->n_heads / c->n_kv_heads;
    for (int first = 0; first < a->n * group; first += LLM__QUERY_ROWS) { /* a work item sees what its last row sees */
        int end = first + LLM__QUERY_ROWS < a->n * group ? first + LLM__QUERY_ROWS : a->n * group;
        tiled += row * c->n_kv_heads * ((end - 1) / group + 1);
    }
    double *weights = resize(NULL, (size_t)a->n * sizeof *weights),
           *exact = resize(NULL, (size_t)a->head_dim * sizeof *exact);
    attention_exact(a, weights, exact);
    table t = new_table(columns, COUNT(columns));
    add_row(&t, "the blackboard: n x n scores", row * c->n_heads * n * (n + 1) / 2, 4 * n * n * c->n_heads, NAN, NAN);
    add_row(&t, "the plain loop: a row at a time", row * c->n_heads * n * (n + 1) / 2, 4 * n, 1e3 * a->naive_seconds,
            furthest(a->naive, exact, a->head_dim));
    add_row(&t, "in tiles of 64", tiled, 4.0 * LLM__TILE * LLM__QUERY_ROWS, 1e3 * a->tiled_seconds,
            furthest(a->tiled, exact, a->head_dim));
    say(l, "\nOne layer of this prompt, all heads; the error is against double precision:\n\n");
    show_table(l, &t, "forms");
    free(weights);
    free(exact);
}

static void attention_show(lesson *l, const attention_look *a) {
    double *weights = resize(NULL, (size_t)a->n * sizeof *weights),
           *exact = resize(NULL, (size_t)a->head_dim * sizeof *exact);
    attention_exact(a, weights, exact);
    plot p = plot_new(PLOT_LINES, "What the last token looks at: the weight of each position", "position", "weight");
    int line = plot_series_add(&p, "weight");
    double sum = 0;
    for (int i = 0; i < a->n; i++) {
        sum += weights[i];
        plot_point(&p, line, i, weights[i]);
    }
    say(l, "Layer %d, head %d, the last of %d tokens: %d scores, in tiles of %d.\n\n", a->layer, a->head, a->n, a->n,
        LLM__TILE);
    double distance = attention_walk(l, a, exact);
    say(l,
        "\nWhen a tile brings a larger score, what was added before is multiplied by exp(old m - new m): shrink. "
        "After the last tile the sums over l are the result; the difference from the blackboard form is rounding "
        "(%.1g).\n",
        distance);
    fact(l, "positions", a->n);
    fact(l, "weights_sum", sum);
    fact(l, "walk_error", distance);
    attention_bytes(l, a);
    show_plot(l, &p);
    free(weights);
    free(exact);
}

static int lesson_attention(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    int n = -1;
    attention_look look = {.layer = -1, .head = -1};
    const option options[] = {
        LESSON_OPTIONS(l),
        {'p', "prompt", "N", WHOLE, &n, 2, 1 << 20, "tokens of the prompt (default 400, or what fits the context)"},
        {0, "layer", "N", WHOLE, &look.layer, 0, 1 << 20, "the layer to look at, from 0 (default 2)"},
        {0, "head", "N", WHOLE, &look.head, 0, 1 << 20, "the query head, from 0 (default 1)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    const llm_config *c = llm_model_config(l.loaded);
    bool good = true;
    n = given_or(n, 400, 2, c->context_length - 1);
    look.layer = given_or(look.layer, 2, 0, c->n_layers - 1);
    look.head = given_or(look.head, 1, 0, c->n_heads - 1);
    if (look.layer >= c->n_layers || look.head >= c->n_heads)
        good = !fail("layer %d, head %d: this model has layers 0 to %d, heads 0 to %d", look.layer, look.head,
                     c->n_layers - 1, c->n_heads - 1);
    chosen.gpu.graphs = false; /* the seam is looked at while the step runs */
    llm_backend *device = good ? lesson_device(&l) : NULL;
    good = device != NULL;
    llm_backend spy = {0};
    if (good) {
        spy = *device;
        attention_spy.device = device;
        attention_spy.look = &look;
        spy.run = attention_at_the_seam;
    }
    l.engine.backend = &spy;
    l.engine.max_sequences = 1;
    l.engine.max_batch_tokens = n < 512 ? 512 : n; /* the prompt in one step */
    llm_engine *engine = good ? lesson_engine(l.loaded, &l.engine) : NULL;
    int32_t *prompt = engine ? lesson_tokens(&l, 0, n) : NULL;
    task t = new_task(prompt, n, 1);
    good = prompt && run_tasks(engine, &t, 1);
    if (good && look.failed) good = !fail("the device would not give what it computed");
    if (good && look.seen) attention_show(&l, &look);
    else if (good && !stop_requested) good = !fail("the prompt did not come as one batch");
    free_task(&t);
    free(prompt);
    free(look.q), free(look.keys), free(look.values), free(look.tiled), free(look.naive);
    llm_engine_free(engine);
    llm_backend_free(device);
    return lesson_end(&l, good);
}

static const char attention_notes[] =
    "The last token of a prompt, one head: the scores come in tiles of 64 positions, and only the largest score, the sum and the\n"
    "weighted values are carried from one to the next. Then what the whole layer reads and keeps, in both forms.\n"
    "\n"
    "Examples:\n"
    "  llm lesson attention\n"
    "  llm lesson attention --prompt 900 --layer 7 --head 0 --png attention.png\n";

const command attention_lesson = {
    "lesson attention", "One real head, tile by tile: the online softmax.", "[options]",
    lesson_attention, attention_notes};
