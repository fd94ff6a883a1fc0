/* program.c - implements program.h. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "program.h"
#include "../models/quantize.h"

#include <stdarg.h>

/* ---- Batches, and programs of single operations ------------------------------------------ */

void make_lone_batch(lone_batch *l, int n, int end, int block_size, bool logits) {
    int blocks = (end - 1) / block_size + 1;
    *l = (lone_batch){.count = n, .row = n - 1};
    int32_t *tokens = resize(NULL, (size_t)(3 * n + blocks) * sizeof *tokens);
    int32_t *positions = tokens + n, *slots = positions + n, *table = slots + n;
    for (int i = 0; i < n; i++) tokens[i] = i % 64, positions[i] = slots[i] = end - n + i;
    for (int i = 0; i < blocks; i++) table[i] = i;
    l->memory = tokens;
    l->batch = (llm_batch){.n_tokens = n, .n_sequences = 1, .tokens = tokens, .positions = positions,
                           .slots = slots, .seq_first = &l->first, .seq_count = &l->count,
                           .block_tables = table, .table_stride = blocks,
                           .block_size = block_size, .n_logits = logits, .logit_rows = &l->row};
}

int program_buffer(llm_program *p, const float *data, int64_t width) {
    for (int i = 0; i < p->n_buffers; i++)
        if (p->buffers[i].data == data) return i;
    p->buffers = resize(p->buffers, (size_t)(p->n_buffers + 1) * sizeof *p->buffers);
    p->buffers[p->n_buffers] = (llm_buffer){"", width, false, (float *)(uintptr_t)data};
    return p->n_buffers++;
}

llm_op *program_add(llm_program *p, llm_op_kind kind, const llm_weight *w, const float *in,
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

bool program_run(llm_backend *b, llm_program *p, int n, llm_error *err) {
    lone_batch l;
    llm_limits limits = {.max_tokens = n, .max_sequences = 1, .max_context = n};
    make_lone_batch(&l, n, n, 16, false);
    bool good = (p->plan || b->prepare(b->context, p, &limits, err)) &&
                b->run(b->context, p, LLM_BODY, &l.batch, 0, 0, err) && b->sync(b->context, err);
    free(l.memory);
    return good;
}

void program_free(llm_backend *b, llm_program *p) {
    b->forget(b->context, p);
    free(p->ops);
    free(p->buffers);
}

double arithmetic_peak(const llm_model *model, llm_backend *b) {
    enum { SIZE_ = 512, ROWS = 256 };
    llm_error err;
    llm_program p = {0};
    const llm_tensor *like = llm_file_find_tensor(llm_model_file(model), "blk.0.ffn_up.weight");
    const llm_type_info *type = llm_type_find(like ? like->type : LLM_F16);
    size_t bytes = row_bytes(type->type, SIZE_) * SIZE_;
    float *values = resize(NULL, SIZE_ * SIZE_ * sizeof *values);
    for (int i = 0; i < SIZE_ * SIZE_; i++)
        values[i] = (float)(llm_random(1, 2, (uint64_t)i) - 0.5);
    void *weights = resize(NULL, bytes);
    llm_pack(type->type, values, weights, SIZE_ * SIZE_);
    llm_weight w = {.type = type->type, .rows = SIZE_, .cols = SIZE_};
    float *x = b->allocate(b->context, ROWS * SIZE_ * sizeof *x, "a test", &err),
          *out = b->allocate(b->context, ROWS * SIZE_ * sizeof *x, "a test", &err);
    bool good = x && out && b->load_weight(b->context, &w, weights, &err) &&
                b->upload(b->context, x, values, ROWS * SIZE_ * sizeof *x, &err);
    double best = 0, end = llm_seconds() + 0.4;
    for (int i = 0; good && i < 4; i++) program_add(&p, LLM_OP_MATMUL, &w, x, SIZE_, out, SIZE_);
    while (good && llm_seconds() < end) {
        double start = llm_seconds();
        good = program_run(b, &p, ROWS, &err);
        double rate = 4 * 2.0 * ROWS * SIZE_ * SIZE_ / (llm_seconds() - start);
        if (rate > best) best = rate;
    }
    if (!good) fail_with(&err);
    program_free(b, &p);
    if (w.data) b->free_weight(b->context, &w);
    b->release(b->context, x);
    b->release(b->context, out);
    free(values);
    free(weights);
    return good ? best : 0;
}

/* ---- A model's program: names and costs -------------------------------------------------- */

const char *op_name(const llm_op *op, char name[48]) {
    size_t n = op->kind == LLM_OP_EMBED ? 0 : strlen(op->name);
    if (n > 7 && !strcmp(op->name + n - 7, ".weight")) n -= 7;
    snprintf(name, 48, "%.*s", n ? (int)n : 47, n ? op->name : llm_op_name(op->kind));
    return name;
}

double cost_bytes(const llm_cost *c) {
    return c->weight_bytes + c->activation_bytes + c->cache_bytes;
}

/* Find stage `index` of a step with one row of logits, or with none. */
static bool find_stage(const llm_backend *b, const llm_program *p, const llm_batch *batch,
                       int index, llm_stage *stage) {
    llm_part part = batch->n_logits ? LLM_WHOLE : LLM_BODY;
    return b->stage && b->stage(b->context, p, part, batch, batch->n_logits, index, stage);
}

void find_owners(const llm_backend *b, const llm_program *p, const llm_batch *batch, int *owner) {
    llm_stage stage;
    for (int i = 0; i < p->n_ops; i++) owner[i] = -1;
    for (int k = 0; find_stage(b, p, batch, k, &stage); k++)
        for (int i = stage.first; i <= stage.last; i++) owner[i] = stage.last;
    for (int i = 0; i < p->n_ops; i++) {
        bool joins = b->stage || (p->seconds && p->seconds[i] <= 0);
        if (owner[i] < 0) owner[i] = joins && i > 0 && i != p->n_body ? owner[i - 1] : i;
    }
}

/* ---- A program as text, and as JSON ------------------------------------------------------ */

typedef struct program_line {
    int number, layer;
    char text[200];
} program_line;

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

/* Whether the layers whose lines begin at i and at k have the same lines. */
static bool program_layers_alike(const program_view *v, int i, int k) {
    int a = v->lines[i].layer, b = k < v->n ? v->lines[k].layer : -1;
    for (; b >= 0 && k < v->n && v->lines[k].layer == b; i++, k++)
        if (v->lines[i].layer != a || strcmp(v->lines[i].text, v->lines[k].text)) return false;
    return b >= 0 && v->lines[i].layer != a;
}

/* Show the lines. Of identical layers, show only the first, unless v->all is set. */
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

/* Write the names of the buffers that an operation reads or writes, with `mark` before and after
 * each name. */
static const char *op_buffers(const llm_program *p, const llm_op *op, bool written,
                              const char *mark, char out[64]) {
    int buffers[LLM_OP_INPUTS + 1], n = 0;
    for (int i = 0; i < LLM_OP_INPUTS; i++) {
        bool in_place = op->kind == LLM_OP_ROPE_STORE && i != 0 && i != 3; /* changes q, k */
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

const char *op_flow(const llm_program *p, const llm_op *op, char out[160]) {
    snprintf(out, 160, "%s%s-> %s%s", OP_BUFFERS(p, op, false, ""), op->in[0] >= 0 ? " " : "",
             op->add ? "+=" : "", OP_BUFFERS(p, op, true, ""));
    return out;
}

const char *op_weight(const llm_op *op, char out[96]) {
    const llm_weight *w = op->weight;
    const char *name = *op->name ? op->name : "frequencies"; /* frequencies of RoPE have no name */
    if (w)
        snprintf(out, 96, "%.*s %s %lld x %lld%s", (int)strcspn(name, "."), name,
                 llm_type_find(w->type)->name, (long long)w->rows, (long long)w->cols,
                 op->n_experts ? " each" : "");
    return out;
}

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

/* Describe in words what a stage does. */
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

int count_barriers(const llm_backend *b, const llm_program *p, const llm_batch *batch, bool show) {
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
    put("\nThe plan for %d thread%s: stages, and the barriers before them\n\n  no layer\n",
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
    put("A step with %d token%s of one sequence, the last at position %d\n\n  no layer  ",
        v->tokens, v->tokens == 1 ? "" : "s", v->context - 1);
    put(row, "operation", "buffers", "weight", "weights", "activations", "cache", "operations");
    put_text("\n");
    for (int i = 0; i <= p->n_ops; i++) { /* the last line is the total */
        const llm_op *op = i < p->n_ops ? &p->ops[i] : NULL;
        const llm_cost *c = &costs[i];
        if (!op) program_show_lines(v);
        program_line_add(v, i, op ? op->layer : -1, row, op ? llm_op_name(op->kind) : "total",
                         op ? OP_FLOW(p, op) : "", op ? OP_WEIGHT(op) : "", HUMAN(c->weight_bytes),
                         HUMAN(c->activation_bytes), HUMAN(c->cache_bytes),
                         HUMAN_COUNT(c->operations));
    }
    put("%12s%s\n", "", v->lines[0].text);
    v->n = 0;
    if (v->plan) program_show_plan(v);
}

bool program_show(program_view *v, llm_engine *engine, const char *path) {
    v->backend = llm_engine_settings(engine)->backend;
    v->program = llm_engine_program(engine, false);
    if (v->plan && !v->backend->stage)
        return !fail("this device does not report its plan: leave out --plan");
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
