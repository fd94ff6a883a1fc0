/* 18-step.c - llm lesson step: the launches of a decode step on a GPU, in order, with their bytes
 * and a forecast of their times. See 18-step.md.
 *
 * The lesson makes the program of one layer, for the shape of a well-known model, and takes the
 * bytes of each operation from llm_op_cost. Which operations share a launch is what chapter [10] of
 * llm.cu decides for one token. */
#include "lesson.h"
#include "program.h"
#include "../models/quantize.h"
#include "../models/tools.h"

enum { STEP_OPS = 24, STEP_PARTS = 4 };

typedef struct step_op { /* an operation and its launch */
    const char *launch;  /* name of its launch; NULL: same launch as the previous operation */
    const char *alone;   /* name if no operations share a launch; NULL: the same */
    int times;           /* per step */
    llm_op_kind kind;
    const char *in[3], *out;
    int64_t rows, cols;  /* shape of its matrix; 0: none */
    bool head;           /* the output matrix, which has another type */
    bool add;
} step_op;

typedef struct step_launch {
    const char *name;
    int times;
    double weights, rest; /* bytes of one launch: weights; buffers and cache */
} step_launch;

/* Add the buffers' bytes and the weights' bytes of all operations to their launches. Returns the
 * number of launches. */
static int step_launches(const shape *s, int context, llm_type type, bool fused,
                         step_launch *launches) {
    int64_t dim = s->dim, head_dim = s->head_dim ? s->head_dim : s->dim / s->heads,
            q = s->heads * head_dim, kv = s->kv_heads * head_dim, hidden = s->hidden;
    int layers = s->layers;
    const step_op ops[STEP_OPS] = {
        {"embed", "embed", 1, LLM_OP_EMBED, {0}, "x", s->vocab, dim, true, false},
        {"angles", "angles", 1, LLM_OP_ROPE_ANGLES, {0}, "angles", 0, 0, false, false},
        {"first norm", NULL, 1, LLM_OP_RMSNORM, {"x"}, "h", 1, dim, false, false},
        {"q, k, v", "q", layers, LLM_OP_MATMUL, {"h"}, "q", q, dim, false, false},
        {NULL, "k", layers, LLM_OP_MATMUL, {"h"}, "k", kv, dim, false, false},
        {NULL, "v", layers, LLM_OP_MATMUL, {"h"}, "v", kv, dim, false, false},
        {"rope, store", "rope, store", layers, LLM_OP_ROPE_STORE, {"q", "k", "v"}, NULL, 0, 0,
         false, false},
        {"attention", "attention", layers, LLM_OP_ATTENTION, {"q"}, "a", 0, 0, false, false},
        {"merge", "merge", layers, LLM_OP_SWIGLU, {"a"}, "a", 0, 0, false, false},
        {"round a", "round a", layers, LLM_OP_SWIGLU, {"a"}, "a", 0, 0, false, false},
        {"o, norm", "o", layers, LLM_OP_MATMUL, {"a"}, "x", dim, q, false, true},
        {NULL, "norm", layers, LLM_OP_RMSNORM, {"x"}, "h", 1, dim, false, false},
        {"gate, up", "gate", layers, LLM_OP_MATMUL, {"h"}, "g", hidden, dim, false, false},
        {NULL, "up", layers, LLM_OP_MATMUL, {"h"}, "u", hidden, dim, false, false},
        {"swiglu", "swiglu", layers, LLM_OP_SWIGLU, {"g", "u"}, "g", 0, 0, false, false},
        {"down, norm", "down", layers, LLM_OP_MATMUL, {"g"}, "x", dim, hidden, false, true},
        {NULL, "norm", layers - 1, LLM_OP_RMSNORM, {"x"}, "h", 1, dim, false, false},
        {"gather", "gather", 1, LLM_OP_GATHER_ROWS, {"x"}, "r", 0, 0, false, false},
        {"last norm", "last norm", 1, LLM_OP_RMSNORM, {"r"}, "r", 1, dim, false, false},
        {"output", "output", 1, LLM_OP_MATMUL, {"r"}, "logits", s->vocab, dim, true, false},
        {"sample (3)", "sample (3)", 3, LLM_OP_SWIGLU, {"logits"}, NULL, 0, 0, false, false}};
    const struct { const char *name; int64_t width; } widths[] = {
        {"x", dim}, {"h", dim}, {"q", q}, {"k", kv}, {"v", kv}, {"a", q}, {"g", hidden},
        {"u", hidden}, {"r", dim}, {"logits", s->vocab}, {"angles", head_dim}};
    llm_buffer buffers[COUNT(widths)];
    llm_cache cache = {.type = LLM_F16};
    llm_program program = {.buffers = buffers, .n_buffers = COUNT(widths), .cache = &cache};
    for (int i = 0; i < COUNT(widths); i++)
        buffers[i] = (llm_buffer){.name = widths[i].name, .width = widths[i].width};
    lone_batch lone;
    make_lone_batch(&lone, 1, context, 16, true);
    int n = 0;
    for (int i = 0; i < STEP_OPS && ops[i].times; i++) {
        const step_op *o = &ops[i];
        llm_type matrix = o->head ? llm_quantize_type(type, (uint64_t)dim, true) : type;
        llm_weight w = {.type = o->rows == 1 ? LLM_F32 : matrix, .rows = o->rows, .cols = o->cols};
        llm_op op = {.kind = o->kind, .out = -1, .add = o->add, .weight = o->rows ? &w : NULL,
                     .attention = {s->heads, s->kv_heads, (int)head_dim, 1, false, 0}};
        for (int k = 0; k < LLM_OP_INPUTS; k++) op.in[k] = -1;
        for (int b = 0; b < COUNT(widths); b++) {
            for (int k = 0; k < 3; k++)
                if (o->in[k] && !strcmp(o->in[k], widths[b].name)) op.in[k] = b;
            if (o->out && !strcmp(o->out, widths[b].name)) op.out = b;
        }
        llm_cost cost = llm_op_cost(&program, &op, &lone.batch);
        const char *name = fused || !o->alone ? o->launch : o->alone;
        if (name) launches[n++] = (step_launch){name, o->times, 0, 0};
        launches[n - 1].weights += cost.weight_bytes;
        launches[n - 1].rest += cost.activation_bytes + cost.cache_bytes;
    }
    free(lone.memory);
    return n;
}

/* The forecast of a launch: it reads and writes its bytes at the speed of memory; before that, the
 * GPU waits `gap` for the first bytes. */
static double step_seconds(const step_launch *s, double bandwidth, double gap) {
    return gap + (s->weights + s->rest) / bandwidth;
}

static double step_sum(const step_launch *launches, int n, double bandwidth, double gap,
                       double *count) {
    double seconds = 0;
    *count = 0;
    for (int i = 0; i < n; i++) {
        seconds += launches[i].times * step_seconds(&launches[i], bandwidth, gap);
        *count += launches[i].times;
    }
    return seconds;
}

static int lesson_step(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    const char *name = "llama-3.1-8b", *type_name = "q4_0";
    float speed = 4300, gap = 1.5f;
    int context = 1024;
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "shape", "NAME", TEXT, &name, 0, 0,
         "a shape of llm synth --help (default llama-3.1-8b)"},
        {0, "type", "TYPE", TEXT, &type_name, 0, 0, "type of the matrices (default q4_0)"},
        {'c', "context", "N", WHOLE, &context, 1, 1 << 20,
         "positions in the cache (default 1024)"},
        {0, "bandwidth", "GB/S", REAL, &speed, 1e-3, 1e6,
         "of the GPU's memory, when it copies (default 4300, an H200)"},
        {0, "gap", "MICROSECONDS", REAL, &gap, 0, 1e3,
         "from the end of a kernel to the first bytes of the next (default 1.5)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    const shape *s = NULL;
    for (int i = 0; i < N_SHAPES; i++)
        if (!strcmp(shapes[i].name, name) && !shapes[i].experts) s = &shapes[i];
    const llm_type_info *type = llm_type_by_name(type_name);
    if (!s || !type) {
        fail(s ? "--type: there is no type '%s'" : "--shape: there is no shape '%s'",
             s ? type_name : name);
        return lesson_end(&l, false);
    }
    static const column columns[] = {{"launch", "launch", "%s"},
                                     {"times", "times", "%.0f"},
                                     {"weight_kib", "weights KiB", "%.1f"},
                                     {"other_kib", "other KiB", "%.1f"},
                                     {"microseconds", "us", "%.2f"},
                                     {"share", "% of step", "%.1f"}};
    step_launch fused[STEP_OPS], apart[STEP_OPS];
    double bandwidth = 1e9 * speed, wait = 1e-6 * gap, count[2], bytes = 0;
    int n = step_launches(s, context, type->type, true, fused),
        n_apart = step_launches(s, context, type->type, false, apart);
    double seconds = step_sum(fused, n, bandwidth, wait, &count[0]),
           seconds_apart = step_sum(apart, n_apart, bandwidth, wait, &count[1]);
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_BARS, "Forecast of a decode step", "microseconds", "");
    plot_note(&p, "Bytes: the time to move them. Gaps: the memory waits for the first bytes of "
                  "each launch, however small the launch is.");
    int moving = plot_series_add(&p, "bytes"), waiting = plot_series_add(&p, "gaps");
    p.stacked = true;
    for (int i = 0; i < n; i++) {
        double each = step_seconds(&fused[i], bandwidth, wait);
        add_row(&t, fused[i].name, (double)fused[i].times, fused[i].weights / 1024,
                fused[i].rest / 1024, 1e6 * each, 100 * fused[i].times * each / seconds);
        bytes += fused[i].times * (fused[i].weights + fused[i].rest);
        plot_category(&p, fused[i].name);
        plot_bar(&p, moving, 1e6 * fused[i].times * (each - wait));
        plot_bar(&p, waiting, 1e6 * fused[i].times * wait);
    }
    say(&l, "A decode step of one token with %s in %s on a GPU, after %d positions: its launches "
            "in order. This is a forecast, not a measurement: bytes / (%.0f GB/s) + %.1f us per "
            "launch.\n\n", s->name, type->name, context, (double)speed, (double)gap);
    show_table(&l, &t, "launches");
    say(&l, "\n%.0f launches, %.2f MB, %.0f us: %.0f tokens per second, %.0f %% of the speed of a "
            "copy. With each operation in a launch of its own: %.0f launches, %.0f us.\n",
        count[0], 1e-6 * bytes, 1e6 * seconds, 1 / seconds, 100 * bytes / bandwidth / seconds,
        count[1], 1e6 * seconds_apart);
    fact(&l, "n_launches", count[0]);
    fact(&l, "n_launches_apart", count[1]);
    fact(&l, "bytes", bytes);
    fact(&l, "microseconds", 1e6 * seconds);
    fact(&l, "microseconds_apart", 1e6 * seconds_apart);
    show_plot(&l, &p);
    return lesson_end(&l, true);
}

static const char step_notes[] =
    "Lists the launches of a decode step of one token on a GPU, with the bytes of each (from the\n"
    "program's costs) and a forecast of its time. Nothing runs on a GPU.\n"
    "\n"
    "Examples:\n"
    "  llm lesson step\n"
    "  llm lesson step --shape llama-3.2-1b --gap 0.7\n"
    "  llm lesson step --type f16 --context 32768 --svg step.svg\n";

const command step_lesson = {
    "lesson step", "The launches of a decode step on a GPU, with a forecast.", "[options]",
    lesson_step, step_notes};
