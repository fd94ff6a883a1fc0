/* program.h - programs, as the command and the lessons use them: small ones, which measure single
 * operations; and a model's, shown as text. Included by main.c. */

/* ---- A batch ------------------------------------------------------------------------------ */

typedef struct lone_batch { /* a batch of one sequence, which a device can run */
    llm_batch batch;
    int32_t first, count, row;
    int32_t *memory; /* of the arrays; free it */
} lone_batch;

/* n tokens, the last one at position end - 1, with or without its logits; the cache's blocks in
 * their own order. What the tokens are does not matter. *l must stay in place. */
static void make_lone_batch(lone_batch *l, int n, int end, int block_size, bool logits) {
    int blocks = (end - 1) / block_size + 1;
    *l = (lone_batch){.count = n, .row = n - 1};
    int32_t *tokens = resize(NULL, (size_t)(3 * n + blocks) * sizeof *tokens);
    int32_t *positions = tokens + n, *slots = positions + n, *table = slots + n;
    for (int i = 0; i < n; i++) tokens[i] = i % 64, positions[i] = slots[i] = end - n + i;
    for (int i = 0; i < blocks; i++) table[i] = i;
    l->memory = tokens;
    l->batch = (llm_batch){n, 1, tokens, positions, slots, &l->first, &l->count, table, blocks,
                           block_size, logits, &l->row};
}

/* ---- A program of single operations ---------------------------------------------------- */

static int program_buffer(llm_program *p, const float *data, int64_t width) {
    for (int i = 0; i < p->n_buffers; i++)
        if (p->buffers[i].data == data) return i;
    p->buffers = resize(p->buffers, (size_t)(p->n_buffers + 1) * sizeof *p->buffers);
    p->buffers[p->n_buffers] = (llm_buffer){"", width, false, (float *)(uintptr_t)data};
    return p->n_buffers++;
}

/* Add an operation, out (., n_out) = kind(in (., n_in)), to a program that starts as zeros. The
 * result is valid until the next one is added. */
static llm_op *program_add(llm_program *p, llm_op_kind kind, const llm_weight *w, const float *in,
                           int64_t n_in, float *out, int64_t n_out) {
    p->ops = resize(p->ops, (size_t)(p->n_ops + 1) * sizeof *p->ops);
    llm_op *op = &p->ops[p->n_ops++];
    *op = (llm_op){.kind = kind, .layer = -1, .weight = w, .name = "", .in = {-1, -1, -1, -1, -1}};
    op->in[0] = program_buffer(p, in, n_in);
    op->out = program_buffer(p, out, n_out);
    p->n_body = p->n_ops;
    p->fusions = LLM_FUSE_ALL;
    return op;
}

/* Run such a program over n rows, and wait for it. The first call prepares it for as many. */
static bool program_run(llm_backend *b, llm_program *p, int n, llm_error *err) {
    lone_batch l;
    llm_limits limits = {.max_tokens = n, .max_sequences = 1, .max_context = n};
    make_lone_batch(&l, n, n, 16, false);
    bool good = (p->plan || b->prepare(b->context, p, &limits, err)) &&
                b->run(b->context, p, LLM_BODY, &l.batch, 0, 0, err) && b->sync(b->context, err);
    free(l.memory);
    return good;
}

static void program_free(llm_backend *b, llm_program *p) {
    b->forget(b->context, p);
    free(p->ops);
    free(p->buffers);
}

/* ---- A model's program: names and costs -------------------------------------------------- */

/* The name of what a norm or a product applies; else what kind it is. */
static const char *op_name(const llm_op *op, char name[48]) {
    size_t n = op->kind == LLM_OP_EMBED ? 0 : strlen(op->name);
    if (n > 7 && !strcmp(op->name + n - 7, ".weight")) n -= 7;
    snprintf(name, 48, "%.*s", n ? (int)n : 47, n ? op->name : llm_op_name(op->kind));
    return name;
}
#define OP_NAME(op) op_name(op, (char[48]){0})

static double cost_bytes(const llm_cost *c) {
    return c->weight_bytes + c->activation_bytes + c->cache_bytes;
}

/* Stage `index` of a step with one row of logits, or with none. */
static bool find_stage(const llm_backend *b, const llm_program *p, const llm_batch *batch,
                       int index, llm_stage *stage) {
    llm_part part = batch->n_logits ? LLM_WHOLE : LLM_BODY;
    return b->stage && b->stage(b->context, p, part, batch, batch->n_logits, index, stage);
}

/* owner[i]: the operation that stands for the stage in which operation i is done. Where a device
 * does not tell its stages, an operation that took no time was done with the one before it. */
static void find_owners(const llm_backend *b, const llm_program *p, const llm_batch *batch,
                        int *owner) {
    llm_stage stage;
    for (int i = 0; i < p->n_ops; i++) owner[i] = -1;
    for (int k = 0; find_stage(b, p, batch, k, &stage); k++)
        for (int i = stage.first; i <= stage.last; i++) owner[i] = stage.last;
    for (int i = 0; i < p->n_ops; i++) {
        bool joins = b->stage || (p->seconds && p->seconds[i] <= 0);
        if (owner[i] < 0) owner[i] = joins && i > 0 && i != p->n_body ? owner[i - 1] : i;
    }
}

/* ---- A program as text, and as JSON -------------------------------------------------------- */

typedef struct program_line {
    int number, layer;
    char text[200];
} program_line;

typedef struct program_view {
    bool json;
    bool plan;           /* also what the device made of it */
    bool all;            /* all layers, though they are alike */
    int tokens, context; /* of the batch: the last token stands at position context - 1 */
    /* filled by program_show: */
    const llm_backend *backend;
    const llm_program *program;
    lone_batch lone;
    int *owner;          /* (n_ops) see find_owners */
    program_line *lines; /* (n) not shown yet */
    int n;
} program_view;

PRINTF(4, 5)
static void program_line_add(program_view *v, int number, int layer, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    v->lines = resize(v->lines, (size_t)(v->n + 1) * sizeof *v->lines);
    program_line *line = &v->lines[v->n++];
    line->number = number;
    line->layer = layer;
    vsnprintf(line->text, sizeof line->text, format, arguments);
    va_end(arguments);
}

/* Do the lines from i and from k on say the same of two layers? */
static bool program_layers_alike(const program_view *v, int i, int k) {
    int a = v->lines[i].layer, b = k < v->n ? v->lines[k].layer : -1;
    for (; b >= 0 && k < v->n && v->lines[k].layer == b; i++, k++)
        if (v->lines[i].layer != a || strcmp(v->lines[i].text, v->lines[k].text)) return false;
    return b >= 0 && v->lines[i].layer != a;
}

/* Show the lines; of layers that are alike only the first, unless `all`. */
static void program_show_lines(program_view *v) {
    for (int i = 0, next; i < v->n; i = next) {
        int layer = v->lines[i].layer, last = layer, end = i;
        char name[16] = "-";
        if (layer >= 0) snprintf(name, sizeof name, "%d", layer);
        while (end < v->n && v->lines[end].layer == layer) end++;
        next = end;
        for (; layer >= 0 && !v->all && program_layers_alike(v, i, next); next += end - i)
            last = v->lines[next].layer;
        for (int k = i; k < end; k++)
            put("%4d %5s  %s\n", v->lines[k].number, name, v->lines[k].text);
        if (last > layer)
            put("%12slayers %d to %d are like layer %d\n", "", layer + 1, last, layer);
    }
    v->n = 0;
}

/* The buffers that an operation reads, or those that it writes; each between two `mark`s. */
static const char *op_buffers(const llm_program *p, const llm_op *op, bool written,
                              const char *mark, char out[64]) {
    int buffers[LLM_OP_INPUTS + 1], n = 0;
    for (int i = 0; i < LLM_OP_INPUTS; i++) {
        bool in_place = op->kind == LLM_OP_ROPE_STORE && i != 0 && i != 3; /* q, k and the cache */
        if (op->in[i] >= 0 && (!written || in_place)) buffers[n++] = op->in[i];
    }
    if (written && op->out >= 0) buffers[n++] = op->out;
    *out = 0;
    for (int i = 0, at = 0; i < n; i++)
        at += snprintf(out + at, (size_t)(64 - at), "%s%s%s%s", i ? "," : "", mark,
                       p->buffers[buffers[i]].name, mark);
    return out;
}
#define OP_BUFFERS(p, op, written, mark) op_buffers(p, op, written, mark, (char[64]){0})

/* "gate,up -> gate" */
static const char *op_flow(const llm_program *p, const llm_op *op, char out[160]) {
    snprintf(out, 160, "%s%s-> %s%s", OP_BUFFERS(p, op, false, ""), op->in[0] >= 0 ? " " : "",
             op->add ? "+=" : "", OP_BUFFERS(p, op, true, ""));
    return out;
}
#define OP_FLOW(p, op) op_flow(p, op, (char[160]){0})

/* "attn_q q4_0 256 x 256" */
static const char *op_weight(const llm_op *op, char out[96]) {
    const llm_weight *w = op->weight;
    const char *name = *op->name ? op->name : "frequencies"; /* of RoPE */
    if (w)
        snprintf(out, 96, "%.*s %s %lld x %lld", (int)strcspn(name, "."), name,
                 llm_type_find(w->type)->name, (long long)w->rows, (long long)w->cols);
    return out;
}
#define OP_WEIGHT(op) op_weight(op, (char[96]){0})

static const char *human_count(double x, char *buffer, size_t size) {
    static const char units[] = " kMGT";
    int unit = 0;
    while (x >= 1000 && unit < 4) x /= 1000, unit++;
    snprintf(buffer, size, unit ? "%.1f %c" : "%.0f", x, units[unit]);
    return buffer;
}
#define HUMAN_COUNT(x) human_count(x, (char[32]){0}, 32)

static void put_cost_json(const llm_cost *c) {
    put("\"weight_bytes\": %.0f, ", c->weight_bytes);
    put("\"activation_bytes\": %.0f, ", c->activation_bytes);
    put("\"cache_bytes\": %.0f, \"operations\": %.0f}", c->cache_bytes, c->operations);
}

static void program_show_json(const program_view *v, const char *path, const llm_cost *costs) {
    const llm_program *p = v->program;
    llm_stage stage;
    put_text("{\"path\": ");
    put_json_text(path);
    put(", \"tokens\": %d, \"context\": %d,\n \"operations\": [", v->tokens, v->context);
    for (int i = 0; i < p->n_ops; i++) {
        const llm_op *op = &p->ops[i];
        const llm_weight *w = op->weight;
        put("%s\n  {\"number\": %d, \"layer\": %d, \"kind\": \"%s\", ", i ? "," : "", i, op->layer,
            llm_op_name(op->kind));
        put("\"reads\": [%s], \"writes\": [%s], \"add\": %s, \"weight\": \"%s\", ",
            OP_BUFFERS(p, op, false, "\""), OP_BUFFERS(p, op, true, "\""),
            op->add ? "true" : "false", op->name);
        if (w)
            put("\"type\": \"%s\", \"rows\": %lld, \"cols\": %lld, ", llm_type_find(w->type)->name,
                (long long)w->rows, (long long)w->cols);
        put_cost_json(&costs[i]);
    }
    put_text("],\n \"total\": {");
    put_cost_json(&costs[p->n_ops]);
    if (v->plan) put_text(",\n \"stages\": [");
    for (int k = 0; v->plan && find_stage(v->backend, p, &v->lone.batch, k, &stage); k++) {
        put("%s\n  {\"barrier\": %s, \"rounds\": %s, \"each\": %s, \"operations\": [", k ? "," : "",
            stage.barrier ? "true" : "false", stage.rounds ? "true" : "false",
            stage.each ? "true" : "false");
        for (int i = 0, n = 0; i < p->n_ops; i++)
            if (stage.rounds ? i == stage.last : v->owner[i] == stage.last)
                put(n++ ? ", %d" : "%d", i);
        put_text("]}");
    }
    put_text(v->plan ? "]}\n" : "}\n");
}

/* What a stage does, in words. */
static const char *stage_text(const llm_program *p, const int *owner, const llm_stage *stage,
                              char out[160]) {
    int n = 0;
    snprintf(out, 160, "%s", stage->rounds ? "round the input of " : "");
    for (int i = 0; i < p->n_ops; i++) {
        if (stage->rounds ? i != stage->last : owner[i] != stage->last) continue;
        size_t at = strlen(out);
        snprintf(out + at, 160 - at, "%s%s", n++ ? " + " : "", OP_NAME(&p->ops[i]));
    }
    size_t at = strlen(out);
    snprintf(out + at, 160 - at, "%s%s", n > 1 ? ", fused" : "",
             stage->each ? ", each thread for itself" : "");
    return out;
}

/* How many barriers a step has. show: print the stages of layer 0, too, a line from each barrier to
 * the next. */
static int count_barriers(const llm_backend *b, const llm_program *p, const llm_batch *batch,
                          bool show) {
    int *owner = resize(NULL, (size_t)p->n_ops * sizeof *owner), n = 0;
    llm_stage stage;
    find_owners(b, p, batch, owner);
    for (int k = 0; find_stage(b, p, batch, k, &stage); k++) {
        n += stage.barrier;
        if (!show || p->ops[stage.last].layer != 0) continue;
        put_text(stage.barrier ? "\n  | " : ", ");
        for (int i = 0, parts = 0; i < p->n_ops; i++)
            if (stage.rounds ? i == stage.last : owner[i] == stage.last)
                put("%s%s", parts++ ? " + " : "", stage.rounds ? "round" : OP_NAME(&p->ops[i]));
        if (stage.each) put_text("*");
    }
    if (show) put_text("\n");
    free(owner);
    return n;
}

static void program_show_plan(program_view *v) {
    llm_stage stage;
    char text[160];
    int threads = llm_cpu_threads(v->backend);
    put("\nThe plan, for %d thread%s: stages, and the barriers before them\n\n  no layer\n",
        threads, threads == 1 ? "" : "s");
    for (int k = 0; find_stage(v->backend, v->program, &v->lone.batch, k, &stage); k++)
        program_line_add(v, k, v->program->ops[stage.last].layer, "%-8s %s",
                         stage.barrier ? "barrier" : "",
                         stage_text(v->program, v->owner, &stage, text));
    program_show_lines(v);
}

static void program_show_text(program_view *v, const llm_cost *costs) {
    static const char row[] = "%-11s %-31s %-29s %10s %11s %10s %10s";
    const llm_program *p = v->program;
    put("A step of %d token%s of one sequence, the last one at position %d\n\n  no layer  ",
        v->tokens, v->tokens == 1 ? "" : "s", v->context - 1);
    put(row, "operation", "buffers", "weight", "weights", "activations", "cache", "operations");
    put_text("\n");
    for (int i = 0; i <= p->n_ops; i++) { /* the last one: all together */
        const llm_op *op = i < p->n_ops ? &p->ops[i] : NULL;
        const llm_cost *c = &costs[i];
        if (!op) program_show_lines(v);
        program_line_add(v, i, op ? op->layer : -1, row, op ? llm_op_name(op->kind) : "all",
                         op ? OP_FLOW(p, op) : "", op ? OP_WEIGHT(op) : "",
                         HUMAN(c->weight_bytes), HUMAN(c->activation_bytes),
                         HUMAN(c->cache_bytes), HUMAN_COUNT(c->operations));
    }
    put("%12s%s\n", "", v->lines[0].text);
    v->n = 0;
    if (v->plan) program_show_plan(v);
}

/* Show the program of an engine. False: said why. */
static bool program_show(program_view *v, llm_engine *engine, const char *path) {
    v->backend = llm_engine_settings(engine)->backend;
    v->program = llm_engine_program(engine, false);
    if (v->plan && !v->backend->stage)
        return !fail("this device does not tell its plan: leave out --plan");
    int n = v->program->n_ops;
    llm_cost *costs = resize(NULL, (size_t)(n + 1) * sizeof *costs), all = {0};
    v->owner = resize(NULL, (size_t)n * sizeof *v->owner);
    make_lone_batch(&v->lone, v->tokens, v->context, 16, true);
    find_owners(v->backend, v->program, &v->lone.batch, v->owner);
    for (int i = 0; i < n; i++) {
        llm_cost c = costs[i] = llm_op_cost(v->program, &v->program->ops[i], &v->lone.batch);
        all.weight_bytes += c.weight_bytes;
        all.activation_bytes += c.activation_bytes;
        all.cache_bytes += c.cache_bytes;
        all.operations += c.operations;
    }
    costs[n] = all;
    if (v->json) program_show_json(v, path, costs);
    else program_show_text(v, costs);
    free(v->lone.memory);
    free(v->owner);
    free(v->lines);
    free(costs);
    return true;
}
