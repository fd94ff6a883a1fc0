/* 16-program.c - llm lesson program: a model as a list of operations; which of them are limited by
 * bytes and which by arithmetic; what the plan fuses, and what that saves. See 16-program.md.
 *
 * The lesson takes the program of an engine and runs it itself, on its own batches. */
#include "lesson.h"
#include "program.h"

enum { PROGRAM_SIZES = 2, PROGRAM_VARIANTS = 6, PROGRAM_ROUNDS = 9, PROGRAM_REPEATS = 15 };

typedef struct program_row { /* all operations of one name */
    const llm_op *op; /* first of these operations */
    int n;            /* number of these operations */
    double seconds[PROGRAM_SIZES]; /* median time of one operation, for each size of step */
    llm_cost costs[PROGRAM_SIZES]; /* cost of one operation, for each size of step */
} program_row;

typedef struct program_timing {
    lesson *l;
    const llm_backend *device;
    llm_program *program;                   /* program of the engine */
    llm_program variants[PROGRAM_VARIANTS]; /* the program, planned with fewer fusions */
    lone_batch steps[PROGRAM_SIZES];        /* batch of one token; batch of many tokens */
    int many;
    double bandwidth; /* bytes per second, those of the cache if the weights fit in it */
    double peak;      /* operations per second */
    program_row rows[32];
    int n_rows;
} program_timing;

static const char *const program_variants[PROGRAM_VARIANTS] = {
    "all", "without gate", "without rope", "without own-copies", "without side-by-side", "none"};

/* Run a program. Returns the seconds, or -1 if the run failed. */
static double program_time(const program_timing *x, const llm_program *p, int size) {
    llm_error err;
    const llm_backend *b = x->device;
    double start = llm_seconds();
    bool good = b->run(b->context, p, LLM_WHOLE, &x->steps[size].batch, 0, 1, &err) &&
                b->sync(b->context, &err);
    return good ? llm_seconds() - start : (fail_with(&err), -1);
}

/* ---- The list --------------------------------------------------------------------------- */

static void program_show_list(program_timing *x) {
    static const column columns[] = {
        {"operation", "operation", "%s"}, {"buffers", "buffers", "%s"}, {"weight", "weight", "%s"}};
    table t = new_table(columns, COUNT(columns));
    const llm_program *p = x->program;
    for (int i = 0; i < p->n_ops; i++) {
        const llm_op *op = &p->ops[i];
        if (op->layer <= 0) add_row(&t, llm_op_name(op->kind), OP_FLOW(p, op), OP_WEIGHT(op));
    }
    say(x->l, "The program has %d operations. The list shows the first two, layer 0 of %d layers, "
              "and the last three.\n\n", p->n_ops, llm_model_config(x->l->loaded)->n_layers);
    fact(x->l, "n_operations", p->n_ops);
    show_table(x->l, &t, "program");
}

/* ---- Each operation, by itself -------------------------------------------------------------- */

static program_row *program_find(program_timing *x, const llm_op *op) {
    int i = 0;
    while (i < x->n_rows && strcmp(OP_NAME(x->rows[i].op), OP_NAME(op))) i++;
    if (i == COUNT(x->rows)) return NULL;
    if (i == x->n_rows) x->rows[x->n_rows++] = (program_row){.op = op};
    return &x->rows[i];
}

/* Time each operation, without fusions, so that each runs alone. */
static bool program_measure(program_timing *x, int size, int runs) {
    llm_program *p = &x->variants[PROGRAM_VARIANTS - 1];
    double *times = resize(NULL, (size_t)(runs * x->n_rows + p->n_ops) * sizeof *times);
    bool good = true;
    p->seconds = times + runs * x->n_rows;
    memset(times, 0, (size_t)(runs * x->n_rows) * sizeof *times);
    for (int run = -1; run < runs && good && !stop_requested; run++) { /* run -1 warms up */
        memset(p->seconds, 0, (size_t)p->n_ops * sizeof *times);
        good = program_time(x, p, size) >= 0;
        for (int i = 0; i < p->n_ops && run >= 0; i++) {
            program_row *row = program_find(x, &x->program->ops[i]);
            if (row) times[(row - x->rows) * runs + run] += p->seconds[i] / row->n;
        }
    }
    p->seconds = NULL;
    for (int i = 0; i < x->n_rows; i++) x->rows[i].seconds[size] = median(times + i * runs, runs);
    free(times);
    return good && !stop_requested;
}

static void program_show_costs(program_timing *x) {
    static const column columns[] = {
        {"operation", "operation", "%s"},    {"one_kib", "1: KiB", "%.1f"},
        {"one_intensity", "FLOP/B", "%.1f"}, {"one_limit", "limit", "%s"},
        {"one_us", "us", "%.1f"},            {"many_kib", "many: KiB", "%.0f"},
        {"many_intensity", "FLOP/B", "%.1f"}, {"many_limit", "limit", "%s"},
        {"many_us", "us", "%.0f"}};
    table t = new_table(columns, COUNT(columns));
    double bend = x->peak / x->bandwidth;
    unsigned drawn = 0; /* bit k: an operation of kind k is in the plot */
    plot p = plot_new(PLOT_LINES, "", "operations for each byte", "operations a second");
    snprintf(p.title, sizeof p.title, "Operations, from 1 token (left or below) to %d", x->many);
    plot_note(&p, "More tokens move products and attention to the right, where arithmetic is "
                  "the limit. Small operations stay on the slope, where bytes are the limit.");
    p.log_x = p.log_y = true;
    const double roof[] = {0.11, bend, 256};
    for (int i = 0, s = plot_series_add(&p, "roof"); i < COUNT(roof); i++)
        plot_point(&p, s, roof[i], fmin(x->peak, roof[i] * x->bandwidth));
    for (int i = 0; i < x->n_rows; i++) {
        const program_row *r = &x->rows[i];
        if (r->op->layer < 0 && r->op->kind != LLM_OP_MATMUL) continue;
        const char *limit[PROGRAM_SIZES];
        double kib[PROGRAM_SIZES], intensity[PROGRAM_SIZES];
        bool shown = r->op->layer >= 0 && !(drawn & 1u << r->op->kind); /* the first of a kind */
        int series = shown ? plot_series_add(&p, OP_NAME(r->op)) : -1;
        for (int k = 0; k < PROGRAM_SIZES; k++) {
            kib[k] = cost_bytes(&r->costs[k]) / 1024;
            intensity[k] = r->costs[k].operations / (1024 * kib[k]);
            limit[k] = intensity[k] < bend ? "bytes" : "arith.";
            plot_point(&p, series, intensity[k], r->costs[k].operations / r->seconds[k]);
        }
        if (shown) drawn |= 1u << r->op->kind;
        add_row(&t, OP_NAME(r->op), kib[0], intensity[0], limit[0], 1e6 * r->seconds[0], kib[1],
                intensity[1], limit[1], 1e6 * r->seconds[1]);
    }
    say(x->l,
        "\nEach operation alone, for 1 token and for many (%d), the last at position %d. KiB: "
        "read and written. With %.1f GB/s and %.0f GFLOP/s, arithmetic is the limit from %.0f "
        "operations per byte on.\n\n",
        x->many, x->many - 1, 1e-9 * x->bandwidth, 1e-9 * x->peak, bend);
    fact(x->l, "bytes_per_second", x->bandwidth);
    fact(x->l, "operations_per_second", x->peak);
    show_table(x->l, &t, "operations");
    show_plot(x->l, &p);
}

/* ---- The plan, and what it saves ------------------------------------------------------------ */

/* Measure the variants in turn. Each round starts with another variant, so that a disturbance
 * affects all of them alike. */
static bool program_show_fusions(program_timing *x) {
    static const column columns[] = {
        {"fusions", "fusions", "%s"}, {"one_barriers", "1 token: barriers", "%.0f"},
        {"one_us", "us", "%.0f"},     {"one_ratio", "ratio", "%.2f"},
        {"many_barriers", "many: barriers", "%.0f"}, {"many_ms", "ms", "%.1f"},
        {"many_ratio", "ratio", "%.2f"}};
    table t = new_table(columns, COUNT(columns));
    double times[PROGRAM_SIZES][PROGRAM_VARIANTS][PROGRAM_ROUNDS], repeats[PROGRAM_REPEATS];
    double all[2] = {0};
    size_t bytes = (size_t)llm_model_config(x->l->loaded)->vocab_size * sizeof(float);
    char *logits = resize(NULL, 2 * bytes); /* logits of a round's first variant, then of another */
    const float *out = x->program->buffers[x->program->ops[x->program->n_ops - 1].out].data;
    llm_error err;
    bool good = true, same = true;
    for (int i = 0; i < PROGRAM_ROUNDS * PROGRAM_SIZES * PROGRAM_VARIANTS && good; i++) {
        int step = i / PROGRAM_VARIANTS, size = step % PROGRAM_SIZES;
        int k = (i + step / PROGRAM_SIZES) % PROGRAM_VARIANTS, n = size ? 1 : PROGRAM_REPEATS;
        for (int j = 0; j < n && good && (good = !stop_requested); j++)
            good = (repeats[j] = program_time(x, &x->variants[k], size)) >= 0;
        times[size][k][step / PROGRAM_SIZES] = median(repeats, n);
        char *to = logits + (i % PROGRAM_VARIANTS ? bytes : 0);
        good = good && x->device->download(x->device->context, to, out, bytes, &err);
        same = same && (to == logits || !memcmp(logits, to, bytes));
    }
    for (int k = 0; k < PROGRAM_VARIANTS && good; k++) {
        double one = median(times[0][k], PROGRAM_ROUNDS), barriers[PROGRAM_SIZES];
        double many = median(times[1][k], PROGRAM_ROUNDS);
        for (int i = 0; i < PROGRAM_SIZES; i++)
            barriers[i] = count_barriers(x->device, &x->variants[k], &x->steps[i].batch, false);
        if (k == 0) all[0] = one, all[1] = many;
        add_row(&t, program_variants[k], barriers[0], 1e6 * one, one / all[0], barriers[1],
                1e3 * many, many / all[1]);
    }
    say(x->l, "\n");
    show_table(x->l, &t, "fusions");
    say(x->l, "\nThe logits of all rows %s.\n", same ? "have the same bits" : "ARE NOT THE SAME");
    fact(x->l, "same_bits", same);
    free(logits);
    return good;
}

/* ---- The lesson --------------------------------------------------------------------------- */

/* Prepare all variants, and compute the cost of each operation. */
static bool program_prepare(program_timing *x) {
    llm_error err;
    llm_limits limits = {x->many, 1, x->many, 1};
    for (int k = 0; k < PROGRAM_VARIANTS; k++) {
        x->variants[k] = *x->program;
        x->variants[k].plan = NULL;
        x->variants[k].fusions = k == PROGRAM_VARIANTS - 1 ? 0 : LLM_FUSE_ALL & ~(1u << k >> 1);
        if (!x->device->prepare(x->device->context, &x->variants[k], &limits, &err))
            return !fail_with(&err);
    }
    for (int i = 0; i < x->program->n_ops; i++) {
        program_row *row = program_find(x, &x->program->ops[i]);
        if (!row || row->n++) continue;
        for (int k = 0; k < PROGRAM_SIZES; k++)
            row->costs[k] = llm_op_cost(x->program, row->op, &x->steps[k].batch);
    }
    return true;
}

static bool program_teach(program_timing *x, llm_engine *engine) {
    int block_size = llm_engine_settings(engine)->block_size;
    x->device = llm_engine_settings(engine)->backend;
    x->program = llm_engine_program(engine, false);
    make_lone_batch(&x->steps[0], 1, x->many, block_size, true);
    make_lone_batch(&x->steps[1], x->many, x->many, block_size, true);
    bool good = program_prepare(x);
    if (good) program_show_list(x);
    good = good && program_measure(x, 1, 5) && program_measure(x, 0, 41);
    if (good) {
        program_show_costs(x);
        say(x->l, "\nThe plan of layer 0 for 1 token (|: barrier; +: fused; *: by each thread):\n");
        count_barriers(x->device, &x->variants[0], &x->steps[0].batch, !x->l->json);
        good = program_show_fusions(x);
    }
    for (int k = 0; k < PROGRAM_VARIANTS; k++)
        x->device->forget(x->device->context, &x->variants[k]);
    for (int k = 0; k < PROGRAM_SIZES; k++) free(x->steps[k].memory);
    return good;
}

static int lesson_program(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    program_timing x = {.l = &l, .many = -1};
    roofline roof;
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "tokens", "N", WHOLE, &x.many, 2, 4096, "tokens of the large step (default 512)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    x.many = given_or(x.many, 512, 2, llm_model_config(l.loaded)->context_length);
    bool good = fits_context(&l, x.many, 0);
    l.engine.max_sequences = 1;
    l.engine.context_length = l.engine.max_batch_tokens = x.many;
    llm_engine *engine = good ? lesson_engine(l.loaded, &l.engine) : NULL;
    good = engine && roofline_measure(&l, llm_engine_settings(engine)->backend, &roof);
    if (good) {
        x.bandwidth = roof.fits ? roof.cached : roof.memory;
        x.peak = roof.peak;
        good = program_teach(&x, engine);
    }
    free_engine(engine);
    return lesson_end(&l, good);
}

static const char program_notes[] =
    "Lists the operations of a step, measures each for 1 token and for many, shows which of\n"
    "them the device's plan fuses, and measures the program without each of these fusions.\n"
    "\n"
    "Examples:\n"
    "  llm lesson program\n"
    "  llm lesson program -t 1 --tokens 64\n"
    "  llm lesson program --svg program.svg\n";

const command program_lesson = {
    "lesson program", "A model as a list of operations: their limits, and fusions.", "[options]",
    lesson_program, program_notes};
