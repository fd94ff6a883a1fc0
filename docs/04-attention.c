/* 04-attention.c - llm lesson attention: the attention of one head, tile by tile. Described in
 * 04-attention.md.
 *
 * The lesson replaces the function `run` in a copy of the backend, so it sees the program and the
 * batch when the engine computes a prompt. It runs the part of the program before the attention of
 * the chosen layer, and then that one operation in both forms. For one head and the last token, it
 * repeats the computation tile by tile with the engine's own llm__base_softmax_row (the variant
 * compiled for every processor) and compares the results. */
#include "lesson.h"

typedef struct attention_look { /* what to capture, and the captured data */
    int layer, head; /* index of the layer; index of the query head in it */
    bool seen;       /* whether the attention was captured */
    bool failed;
    int n; /* number of positions that the last token sees */
    int head_dim;
    float scale; /* factor of the scores */
    float *q;             /* (head_dim) */
    float *keys, *values; /* (n, head_dim) */
    float *tiled, *naive; /* (head_dim) outputs of the engine's two forms */
    double tiled_seconds, naive_seconds; /* times for all heads and tokens */
} attention_look;

static struct { /* state of attention_run, whose only context is the device's */
    const llm_backend *device;
    attention_look *look;
} attention_spy;

/* Copy `bytes` of device memory to a new buffer. */
static void *attention_download(const void *from, size_t bytes) {
    llm_error err;
    const llm_backend *b = attention_spy.device;
    void *to = resize(NULL, bytes);
    if (!b->sync(b->context, &err) || !b->download(b->context, to, from, bytes, &err))
        attention_spy.look->failed = true;
    return to;
}

static float *attention_floats(const float *from, int n) {
    return attention_download(from, (size_t)n * sizeof *from);
}

/* Copy the keys or values (n, head_dim) of one kv head from the cache blocks, as floats. */
static float *attention_rows(const llm_batch *batch, const llm_cache *cache, const void *side,
                             int layer, int kv_head, int n) {
    int head_dim = cache->head_dim;
    float *rows = resize(NULL, (size_t)n * (size_t)head_dim * sizeof *rows);
    const llm_type_info *type = llm_type_find(cache->type);
    size_t value_bytes = llm__value_bytes(cache->type);
    for (int p = 0; p < n; p++) {
        int64_t row = llm__cache_row(batch, cache, 0, 0, kv_head, p), stride,
                at = llm__cache_place(cache, side, row, &stride);
        /* Transposed keys are not contiguous: the span includes values of other positions. */
        size_t span = (size_t)((head_dim - 1) * stride + 1);
        char *packed = attention_download(
            llm__cache_layer(cache, side, layer) + (size_t)at * value_bytes, span * value_bytes);
        for (int d = 0; d < head_dim; d++)
            type->unpack(packed + (size_t)(d * stride) * value_bytes,
                         rows + (size_t)p * (size_t)head_dim + (size_t)d, 1);
        free(packed);
    }
    return rows;
}

/* Run n operations, from index `first` on, as a separate program. Returns the seconds, or -1 if the
 * run failed. */
static double attention_part(const llm_program *whole, int first, int n, const llm_batch *batch) {
    const llm_backend *b = attention_spy.device;
    llm_error err;
    llm_program part = *whole;
    llm_limits limits = {batch->n_tokens, batch->n_sequences,
                         batch->positions[batch->n_tokens - 1] + 1, 0};
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

/* Run the attention at `index` of the program for a batch of one sequence, and capture it. */
static void attention_capture(attention_look *look, const llm_program *program, int index,
                              const llm_batch *batch) {
    llm_op *op = &program->ops[index];
    const llm_attention_shape *shape = &op->attention;
    const llm_cache *cache = program->cache;
    int last = batch->n_tokens - 1, d = shape->head_dim,
        kv_head = look->head / (shape->n_heads / shape->n_kv_heads);
    size_t at = (size_t)last * (size_t)(shape->n_heads * d) + (size_t)(look->head * d);
    const float *q = program->buffers[op->in[0]].data + at,
                *out = program->buffers[op->out].data + at;
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

/* The function `run` of the copied backend. */
static bool attention_run(void *context, const llm_program *program, llm_part part,
                          const llm_batch *batch, int first, int n, llm_error *err) {
    attention_look *look = attention_spy.look;
    for (int i = 0; i < program->n_body && !look->seen && batch->n_tokens > 1; i++)
        if (program->ops[i].kind == LLM_OP_ATTENTION && program->ops[i].layer == look->layer)
            attention_capture(look, program, i, batch);
    return attention_spy.device->run(context, program, part, batch, first, n, err);
}

static double largest_difference(const float *a, const double *b, int n) {
    double worst = 0;
    for (int i = 0; i < n; i++) worst = larger(worst, fabs(a[i] - b[i]));
    return worst;
}

/* Compute the textbook form in double precision: weights (n) and out (head_dim). */
static void attention_exact(const attention_look *a, double *weights, double *out) {
    double largest = -INFINITY, total = 0;
    for (int p = 0; p < a->n; p++) {
        weights[p] = 0;
        for (int d = 0; d < a->head_dim; d++)
            weights[p] += (double)a->q[d] * a->keys[p * a->head_dim + d];
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

/* Add a bar: each tile's contribution to the sum l, after `tile` tiles. The last series is for all
 * further tiles. */
static void attention_plot_sum(plot *p, double *terms, int tile, float shrink, float total) {
    char name[32];
    snprintf(name, sizeof name, "after tile %d", tile);
    plot_category(p, name);
    double before = 0;
    for (int i = 0; i < PLOT_COLOURS; i++) before += terms[i] *= shrink;
    terms[tile < PLOT_COLOURS ? tile - 1 : PLOT_COLOURS - 1] += total - before;
    for (int i = 0; i < p->n_series; i++) plot_bar(p, i, terms[i]);
}

/* Draw the state after a tile: the scores with m, the sum l by tiles, and acc. `scores` and `sums`
 * hold all tiles; a bar of l has one segment per series, and acc has d numbers for each tile. */
static void attention_frame(lesson *l, const plot *scores, const plot *sums, const float *accs,
                            int d, int tile, double largest_acc) {
    const plot_series *dots = &scores->series[0], *stairs = &scores->series[1];
    int first = (tile - 1) * LLM__TILE, seen = first + LLM__TILE;
    if (seen > dots->n) seen = dots->n;
    scene *s = new_frame(l, 620, "Tile %d: positions %d to %d", tile, first, seen - 1);
    if (!s) return;
    double low = INFINITY, high = -INFINITY, longest = 0, from = 60, m = stairs->y[2 * tile - 1],
           shrink = tile > 1 ? exp(stairs->y[2 * tile - 3] - m) : 1;
    char line[128];
    for (int i = 0; i < dots->n; i++) {
        low = fmin(low, dots->y[i]);
        high = larger(high, dots->y[i]);
    }
#define FRAME_Y(score) (270 - 180 * ((score) - low) / (high > low ? high - low : 1))
#define FRAME_X(position) (60 + 820.0 * (position) / dots->n)
    scene_text(s, SCENE_MUTED, 14, 28, 66, 0, false,
               "The scores of this tile are orange, those to come are pale. The line is m.");
    for (int i = 0; i < dots->n; i++) {
        double x = FRAME_X(i), y = FRAME_Y(dots->y[i]);
        scene_line(s, i >= seen ? SCENE_GRID : i >= first ? 1 : 0, 5, x, y, x, y);
    }
    scene_line(s, 3, 2, 60, FRAME_Y(m), FRAME_X(seen), FRAME_Y(m));
    snprintf(line, sizeof line, "m = %.2f", m);
    scene_text(s, SCENE_INK, 14, 60, 300, 0, true, line);
    snprintf(line, sizeof line, "earlier terms shrink by exp(old m - new m) = %.3f", shrink);
    if (tile > 1) scene_text(s, SCENE_INK, 14, 180, 300, 0, false, line);
    for (int k = 0; k < sums->n_categories; k++) {
        double sum = 0;
        for (int i = 0; i < sums->n_series; i++) sum += sums->series[i].y[k];
        longest = larger(longest, sum);
    }
    double sum = 0;
    for (int i = 0; i < sums->n_series; i++) {
        double to = from + 820 * sums->series[i].y[tile - 1] / longest;
        if (to > from) scene_rectangle(s, sums->series[i].colour, from, 350, to, 380);
        if (to > from + 12) {
            snprintf(line, sizeof line, "%d", i + 1);
            scene_text(s, SCENE_ON + sums->series[i].colour, 13, (from + to) / 2, 370, 0.5, false,
                       line);
        }
        from = to;
        sum += sums->series[i].y[tile - 1];
    }
    snprintf(line, sizeof line, "l = %.2f, the sum of exp(score - m); in it, each tile's terms",
             sum);
    scene_text(s, SCENE_INK, 14, 60, 340, 0, true, line);
    scene_text(s, SCENE_INK, 14, 60, 422, 0, true,
               "acc, the sum of exp(score - m) x value; the result is acc / l");
    for (int i = 0; i < d; i++) {
        double v = accs[(tile - 1) * d + i], x = 60 + 820.0 * i / d, y = 515 - 80 * v / largest_acc;
        scene_rectangle(s, 2, x, fmin(y, 515), x + 0.8 * 820 / d, larger(y, 515));
    }
    scene_line(s, SCENE_INK, 1, 60, 515, 880, 515);
#undef FRAME_X
#undef FRAME_Y
}

/* Compute the attention tile by tile: keep the largest score m, the sum l and the weighted sum of
 * values so far; both sums are scaled down when m grows. Returns the difference between the result
 * and `exact` (head_dim). */
static double attention_walk(lesson *l, const attention_look *a, const double *exact) {
    static const column columns[] = {{"tile", "tile", "%.0f"},
                                     {"first", "first", "%.0f"},
                                     {"last", "last", "%.0f"},
                                     {"largest", "m, largest score", "%.4f"},
                                     {"shrink", "shrink", "%.4f"},
                                     {"sum", "l, sum", "%.4f"},
                                     {"distance", "error so far", "%.2g"}};
    table t = new_table(columns, COUNT(columns));
    int d = a->head_dim, padded = (int)llm__divide_up(d, LLM__PADDING) * LLM__PADDING;
    float m = -INFINITY, total = 0, scores[LLM__TILE];
    float *sums = resize(NULL, (size_t)padded * sizeof *sums),
          *out = resize(NULL, (size_t)d * sizeof *out);
    memset(sums, 0, (size_t)padded * sizeof *sums);
    double distance = 0, terms[PLOT_COLOURS] = {0}, largest_acc = 1e-30;
    float *accs = NULL; /* (tiles, d) acc after each tile */
    llm_attention_shape shape = {.scale = a->scale};
    plot scores_plot = plot_new(PLOT_LINES, "The scores, and m, the largest so far", "position",
                                "");
    plot sum_plot = plot_new(PLOT_BARS, "The sum l, and what each tile's terms make of it", "", "");
    plot_note(&scores_plot, "A tile with a larger score raises m; it never falls.");
    plot_note(&sum_plot, "When m rises, the terms of all earlier tiles shrink, and in the end the "
                         "sum is as if the last m had been known from the start.");
    int dots = plot_series_add(&scores_plot, "score of a position"),
        stairs = plot_series_add(&scores_plot, "m, after each tile of 64");
    scores_plot.series[dots].dots = true;
    sum_plot.stacked = true;
    for (int i = 0; i < PLOT_COLOURS && i * LLM__TILE < a->n; i++) {
        char name[48];
        snprintf(name, sizeof name, i < PLOT_COLOURS - 1 ? "tile %d" : "tiles from %d on", i + 1);
        plot_series_add(&sum_plot, name);
    }
    for (int first = 0, tile = 1; first < a->n; first += LLM__TILE, tile++) {
        int seen = a->n - first < LLM__TILE ? a->n - first : LLM__TILE;
        for (int k = 0; k < LLM__TILE; k++) {
            scores[k] = 0;
            for (int i = 0; k < seen && i < d; i++)
                scores[k] += a->q[i] * a->keys[(first + k) * d + i];
            if (k < seen) plot_point(&scores_plot, dots, first + k, scores[k] * a->scale);
        }
        float before = m;
        /* scores become exp(score - m) */
        llm__base_softmax_row(scores, 0, seen, &shape, 0, 0, &m, &total, sums, padded);
        for (int k = 0; k < seen; k++)
            for (int i = 0; i < d; i++) sums[i] += scores[k] * a->values[(first + k) * d + i];
        for (int i = 0; i < d; i++) out[i] = sums[i] / total;
        distance = largest_difference(out, exact, d);
        plot_point(&scores_plot, stairs, first, (double)m);
        plot_point(&scores_plot, stairs, first + seen - 1, (double)m);
        attention_plot_sum(&sum_plot, terms, tile, first ? expf(before - m) : 0, total);
        accs = resize(accs, (size_t)(tile * d) * sizeof *accs);
        memcpy(accs + (tile - 1) * d, sums, (size_t)d * sizeof *accs);
        for (int i = 0; i < d; i++) largest_acc = larger(largest_acc, fabs((double)sums[i]));
        add_row(&t, (double)tile, (double)first, (double)(first + seen - 1), (double)m,
                first ? exp((double)before - m) : NAN, (double)total, distance);
    }
    for (int tile = 1; tile <= sum_plot.n_categories && l->html; tile++)
        attention_frame(l, &scores_plot, &sum_plot, accs, d, tile, largest_acc);
    free(accs);
    show_table(l, &t, "tiles");
    show_plot(l, &scores_plot);
    keep_plot(l, sum_plot);
    free(sums);
    free(out);
    return distance;
}

/* Show, for each form, one layer and a prompt of n tokens: the bytes of keys and values that the
 * form reads, and the bytes of scores that it holds at a time. */
static void attention_bytes(lesson *l, const attention_look *a) {
    static const column columns[] = {{"form", "form", "%s"},
                                     {"kv_bytes", "k, v bytes read", "%.0f"},
                                     {"score_bytes", "score bytes", "%.0f"},
                                     {"milliseconds", "ms", "%.2f"},
                                     {"error", "error", "%.2g"}};
    const llm_config *c = llm_model_config(l->loaded);
    double n = a->n, row = 2.0 * c->head_dim * (double)llm__value_bytes(l->engine.cache_type),
           tiled = 0;
    int group = c->n_heads / c->n_kv_heads;
    /* A work item reads the keys and values that its last row sees. */
    for (int first = 0; first < a->n * group; first += LLM__QUERY_ROWS) {
        int end = first + LLM__QUERY_ROWS < a->n * group ? first + LLM__QUERY_ROWS : a->n * group;
        tiled += row * c->n_kv_heads * ((end - 1) / group + 1);
    }
    double *weights = resize(NULL, (size_t)a->n * sizeof *weights),
           *exact = resize(NULL, (size_t)a->head_dim * sizeof *exact);
    attention_exact(a, weights, exact);
    table t = new_table(columns, COUNT(columns));
    add_row(&t, "textbook: n x n scores", row * c->n_heads * n * (n + 1) / 2,
            4 * n * n * c->n_heads, NAN, NAN);
    add_row(&t, "plain loop: one row at a time", row * c->n_heads * n * (n + 1) / 2, 4 * n,
            1e3 * a->naive_seconds, largest_difference(a->naive, exact, a->head_dim));
    add_row(&t, "tiles of 64", tiled, 4.0 * LLM__TILE * LLM__QUERY_ROWS, 1e3 * a->tiled_seconds,
            largest_difference(a->tiled, exact, a->head_dim));
    say(l, "\nAll heads of this layer and all tokens (error: against double precision):\n\n");
    show_table(l, &t, "forms");
    free(weights);
    free(exact);
}

static void attention_show(lesson *l, const attention_look *a) {
    double *weights = resize(NULL, (size_t)a->n * sizeof *weights),
           *exact = resize(NULL, (size_t)a->head_dim * sizeof *exact);
    attention_exact(a, weights, exact);
    double sum = 0;
    for (int i = 0; i < a->n; i++) sum += weights[i];
    say(l, "Layer %d, head %d, the last of %d tokens: %d scores, in tiles of %d.\n\n", a->layer,
        a->head, a->n, a->n, LLM__TILE);
    double distance = attention_walk(l, a, exact);
    say(l,
        "\nWhen a tile has a larger score, the sums so far are multiplied by shrink = "
        "exp(old m - new m). After the last tile, acc / l is the result; its difference from the "
        "textbook form is rounding (%.1g).\n",
        distance);
    fact(l, "positions", a->n);
    fact(l, "weights_sum", sum);
    fact(l, "walk_error", distance);
    attention_bytes(l, a);
    free(weights);
    free(exact);
}

static int lesson_attention(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    int n = -1;
    attention_look look = {.layer = -1, .head = -1};
    const option options[] = {
        LESSON_OPTIONS(l),
        HTML_OPTION(l),
        {'p', "prompt", "N", WHOLE, &n, 2, 1 << 20,
         "tokens of the prompt (default 400, or what fits the context)"},
        {0, "layer", "N", WHOLE, &look.layer, 0, 1 << 20, "the layer, from 0 (default 2)"},
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
        good = !fail("layer %d, head %d: this model has layers 0 to %d, heads 0 to %d", look.layer,
                     look.head, c->n_layers - 1, c->n_heads - 1);
    chosen.gpu.graphs = false; /* the lesson runs extra operations during a step */
    llm_backend *device = good ? lesson_device(&l) : NULL;
    good = device != NULL;
    llm_backend spy = {0};
    if (good) {
        spy = *device;
        attention_spy.device = device;
        attention_spy.look = &look;
        spy.run = attention_run;
    }
    l.engine.backend = &spy;
    l.engine.max_sequences = 1;
    l.engine.max_batch_tokens = n < 512 ? 512 : n; /* the prompt in one step */
    llm_engine *engine = good ? lesson_engine(l.loaded, &l.engine) : NULL;
    int32_t *prompt = engine ? lesson_tokens(&l, 0, n) : NULL;
    task t = new_task(prompt, n, 1);
    good = prompt && run_tasks(engine, &t, 1);
    if (good && look.failed) good = !fail("cannot read what the device computed");
    if (good && look.seen) attention_show(&l, &look);
    else if (good && !stop_requested) good = !fail("the prompt was not computed in one step");
    free_task(&t);
    free(prompt);
    free(look.q), free(look.keys), free(look.values), free(look.tiled), free(look.naive);
    llm_engine_free(engine);
    llm_backend_free(device);
    return lesson_end(&l, good);
}

static const char attention_notes[] =
    "Computes the attention of one head for the last token of a prompt, in tiles of 64 positions.\n"
    "Only the largest score, the sum and the weighted values are carried from tile to tile. Then\n"
    "compares the memory and the time of the whole layer in both forms.\n"
    "\n"
    "Examples:\n"
    "  llm lesson attention\n"
    "  llm lesson attention --prompt 900 --layer 7 --head 0 --svg attention.svg\n"
    "  llm lesson attention --html attention.html\n";

const command attention_lesson = {
    "lesson attention", "One head, tile by tile: the online softmax.", "[options]",
    lesson_attention, attention_notes};
