/* 11-ladder.c - llm ladder: the whole course in one table, from the naive engine to the full one,
 * one switch at a time. See 11-ladder.md.
 *
 * Every rung runs two workloads: one request alone, and many at once that begin with the same
 * instruction and have answers of different lengths. All are greedy, so each rung must give the
 * same tokens as the rung before. (int4 is another model: the table shows bits per byte instead.)
 * The cache has the same small size on all rungs. A contiguous cache holds a few whole contexts; a
 * paged cache holds as many sequences as fit. */
#include "lesson.h"
#include "groups.h"
#include "../models/tools.h"

enum { LADDER_REQUESTS = 24, LADDER_SHARED = 96, LADDER_OWN = 8, LADDER_CONTEXTS = 4 };

typedef struct rung {
    const char *name;
    bool no_cache, naive, int4, prefix, draft, paged;
    bool large;                       /* the inflated int4 model */
    llm_isa isa;
    int threads;                      /* number of threads; 0: all */
    int sequences;                    /* most at a time; 0: as many as fit into the cache */
    bool groups;                      /* static batching */
    int many;                         /* requests of the second workload; fewer on slow rungs */
    bool tiled, fused, split, graphs; /* GPU options, see llm_gpu_options; tiled: not `plain` */
} rung;

typedef struct ladder {
    int n, context;                  /* output tokens of the single request; longest sequence */
    int requests, shared;            /* requests at once; tokens that their prompts share */
    llm_model *f16, *int4, *draft;   /* model in f16; the same in int4; draft */
    llm_model *large;                /* the int4 model, inflated: see llm synth */
    task one, many[LADDER_REQUESTS]; /* the workloads */
    double cache_bytes;
    uint64_t inflate;                /* size of `large` in bytes; 0: none */
    bool gpu;
} ladder;

typedef struct rung_result {
    double one, many;                  /* speeds of the workloads in tokens per second */
    double memory, bits;               /* bytes; bits per byte, 0: not measured */
    int32_t *one_tokens, *many_tokens; /* (n), (n_many) generated tokens */
    int n_many;                        /* number of tokens of all requests of the second workload */
} rung_result;

/* Run the tasks in static groups: see lesson batching. */
static bool ladder_groups(llm_engine *engine, task *tasks, int n) {
    member members[LADDER_REQUESTS];
    batcher groups = {.engine = engine, .policy = STATIC};
    llm_error err;
    llm_event event;
    int status = 1;
    for (int i = 0; i < n && status > 0; i++) {
        members[i] = (member){.request = tasks[i].request};
        members[i].request.user = &tasks[i];
        if (!batcher_submit(&groups, &members[i], &err)) status = -1;
    }
    while (status > 0 && !stop_requested && (status = batcher_step(&groups, &err)) > 0)
        while (batcher_next_event(&groups, &event)) take_task_event(&event);
    return status >= 0 || !fail_with(&err);
}

/* Run the tasks and measure their tokens per second together, prompts included. Without a cache,
 * every token is a separate request: see lesson kv. */
static bool ladder_work(llm_engine *engine, task *tasks, int n, const rung *r, double *rate) {
    double start = llm_seconds(), tokens = 0;
    bool good = true, no_cache = r->no_cache;
    if (!no_cache) good = r->groups ? ladder_groups(engine, tasks, n) : run_tasks(engine, tasks, n);
    for (int i = 0; i < n && no_cache && good; i++) {
        const llm_request *request = &tasks[i].request;
        kv_run run = new_kv_run(request->max_tokens);
        good = kv_without(engine, request->prompt, request->n_prompt, request->max_tokens, &run) &&
               !stop_requested;
        tasks[i].n = request->max_tokens;
        tasks[i].tokens = run.tokens;
        free(run.seconds);
        free(run.computed);
    }
    for (int i = 0; i < n; i++) tokens += tasks[i].n;
    *rate = tokens / (llm_seconds() - start);
    return good && !stop_requested;
}

static llm_engine_options ladder_options(const ladder *x, const rung *r, llm_backend *backend) {
    llm_engine_options o = llm_engine_defaults();
    o.backend = backend;
    o.context_length = x->context;
    o.block_size = r->paged ? 16 : x->context; /* contiguous: one block per sequence */
    o.cache_bytes = (uint64_t)x->cache_bytes;
    o.max_sequences = r->sequences ? r->sequences : LADDER_REQUESTS;
    o.prefix_cache = r->prefix;
    o.naive_attention = r->naive;
    o.draft = r->draft ? x->draft : NULL;
    o.max_speculation = 2;
    return o;
}

/* Create the backend, CPU or chosen GPU, with the switches of the rung. */
static llm_backend *ladder_device(const lesson *l, const ladder *x, const rung *r) {
    llm_error err;
    llm_backend *device = NULL;
    if (x->gpu) {
        chosen.gpu.plain = !r->tiled, chosen.gpu.fused = r->fused,
        chosen.gpu.split_attention = r->split, chosen.gpu.graphs = r->graphs;
        if (!(device = open_device(&l->engine, &err))) fail_with(&err);
    } else if (!(device = llm_cpu_backend(r->threads ? r->threads : l->engine.n_threads, r->isa,
                                          &err))) {
        fail_with(&err);
    }
    return device;
}

/* Run both workloads on a rung, and keep the best rates and the first tokens. */
static bool ladder_rung(lesson *l, ladder *x, const rung *r, rung_result *out) {
    llm_model *model = r->large ? x->large : r->int4 ? x->int4 : x->f16;
    llm_backend *device = ladder_device(l, x, r);
    if (!device) return false;
    llm_engine_options options = ladder_options(x, r, device);
    llm_engine *engine = lesson_engine(model, &options);
    task warm = new_task(x->one.request.prompt, 4, 4);
    for (int i = 0; i < LADDER_REQUESTS; i++) x->many[i].request.speculate = r->draft ? 2 : 0;
    x->one.request.speculate = r->draft ? 2 : 0;
    int n_many = r->many < x->requests ? r->many : x->requests;
    double one = 0, many = 0;
    bool good = engine && run_tasks(engine, &warm, 1) && ladder_work(engine, &x->one, 1, r, &one) &&
                ladder_work(engine, x->many, n_many, r, &many);
    free_task(&warm);
    out->one = larger(out->one, one);
    out->many = larger(out->many, many);
    if (good && !out->one_tokens) {
        llm_statistics s = llm_engine_statistics(engine);
        out->memory = (double)(s.weight_bytes + s.cache_bytes + s.arena_bytes);
        out->one_tokens = resize(NULL, (size_t)x->one.n * sizeof(int32_t));
        memcpy(out->one_tokens, x->one.tokens, (size_t)x->one.n * sizeof(int32_t));
        int total = 0;
        for (int i = 0; i < n_many; i++) {
            out->many_tokens =
                resize(out->many_tokens, (size_t)(total + x->many[i].n) * sizeof(int32_t));
            memcpy(out->many_tokens + total, x->many[i].tokens,
                   (size_t)x->many[i].n * sizeof(int32_t));
            total += x->many[i].n;
        }
        out->n_many = total;
    }
    free_task(&x->one);
    for (int i = 0; i < LADDER_REQUESTS; i++) {
        free_task(&x->many[i]);
        x->many[i].ended = false;
    }
    llm_engine_free(engine);
    llm_backend_free(device);
    return good;
}

/* The last column: are the tokens the same as on the previous rung, as far as both ran? */
static const char *ladder_check(const ladder *x, const rung_result *a, const rung_result *b,
                                char *out, size_t size) {
    if (!b) return "";
    if (a->bits > 0 && b->bits > 0) {
        snprintf(out, size, "bits %.3f (%.3f)", a->bits, b->bits);
        return out;
    }
    int common = a->n_many < b->n_many ? a->n_many : b->n_many, different = 0;
    for (int i = 0; i < x->n; i++) different += a->one_tokens[i] != b->one_tokens[i];
    for (int i = 0; i < common; i++) different += a->many_tokens[i] != b->many_tokens[i];
    if (!different) return "same";
    snprintf(out, size, "%d differ", different);
    return out;
}

static void ladder_show(lesson *l, const ladder *x, const rung *rungs, const rung_result *results,
                        int n) {
    static const column columns[] = {
        {"rung", "rung", "%s"},      {"one_tokens_per_second", "one tok/s", "%.0f"},
        {"one_times", "x", "%.2f"},  {"many_tokens_per_second", "many tok/s", "%.0f"},
        {"many_times", "x", "%.2f"}, {"memory_mib", "MiB", "%.1f"},
        {"tokens", "tokens", "%s"}};
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_BARS, "Tokens per second, rung by rung",
                      "tokens per second, logarithmic", "");
    plot_note(&p, "Each rung keeps all optimisations above it and adds one.");
    p.log_x = true;
    int one = plot_series_add(&p, "one request"), many = plot_series_add(&p, "many requests");
    int last = 0; /* the last rung of the small model */
    for (int i = 0; i < n; i++) {
        const rung_result *r = &results[i], *before = i ? &results[i - 1] : NULL;
        bool compare = before && rungs[i].large == rungs[i - 1].large;
        char check[48];
        if (!rungs[i].large) last = i;
        add_row(&t, rungs[i].name, r->one, compare ? r->one / before->one : NAN, r->many,
                compare ? r->many / before->many : NAN, r->memory / 1048576,
                ladder_check(x, r, before, check, sizeof check));
        plot_category(&p, rungs[i].name);
        plot_bar(&p, one, r->one);
        plot_bar(&p, many, r->many);
    }
    say(l,
        "One: a request of %d tokens. Many: %d requests at once that share %d prompt tokens. Every "
        "rung has a cache of %s, or %d whole contexts of %d tokens. x: speedup over the rung "
        "before. bits: per byte of text, in int4 (in f16).\n\n",
        x->n, x->requests, x->shared, HUMAN(x->cache_bytes), LADDER_CONTEXTS, x->context);
    show_table(l, &t, "rungs");
    fact(l, "total_one", results[last].one / results[0].one);
    fact(l, "total_many", results[last].many / results[0].many);
    say(l,
        "\nWith all switches before speculation, one request is %.0f times as fast as on the first "
        "rung, and many are %.0f times as fast.\n",
        results[last].one / results[0].one, results[last].many / results[0].many);
    if (last + 2 < n)
        say(l,
            "The last two rungs run the same int4 model, inflated to %s with the same tokens (see "
            "llm synth), and two requests as the many: speculation is for models that memory "
            "limits.\n",
            HUMAN(x->inflate));
    show_plot(l, &p);
}

/* Load the model (the bundled f16 one, or that of -m) and the same in int4. The bundled model also
 * has a draft, and an inflated int4 model, which is limited by bytes. */
static bool ladder_models(lesson *l, ladder *x) {
    llm_error err;
    x->f16 = l->loaded;
    x->int4 = quantized_model(l->path, LLM_Q4_0);
    char *draft = x->int4 && !l->model ? bundled_path("models/tales-draft.gguf") : NULL;
    if (draft && !(x->draft = llm_model_load(draft, &err))) fail_with(&err);
    free(draft);
    char *small = x->draft ? bundled_path(DEFAULT_MODEL) : NULL;
    if (small && x->inflate) x->large = inflated_model(small, x->inflate);
    free(small);
    return x->int4 && (l->model || (x->draft && (x->large || !x->inflate)));
}

static bool ladder_tasks(const lesson *l, ladder *x) {
    int32_t *prompt = lesson_tokens(l, 4000, 16);
    bool good = prompt != NULL;
    x->one = new_task(prompt, 16, x->n);
    for (int i = 0; i < LADDER_REQUESTS; i++) {
        int32_t *ids = lesson_tokens(l, 0, x->shared + LADDER_OWN),
                *own = lesson_tokens(l, 3000 + 60 * i, LADDER_OWN + 1);
        good = good && ids && own;
        if (ids && own) memcpy(ids + x->shared, own + 1, LADDER_OWN * sizeof *ids);
        free(own);
        x->many[i] = new_task(ids, x->shared + LADDER_OWN, i % 3 == 0 ? x->n : x->n / 4);
    }
    return good;
}

/* A switch that a rung does not name is off. */
#define LADDER_FAST .isa = LLM_ISA_BEST, .many = LADDER_REQUESTS
#define LADDER_INT4 LADDER_FAST, .int4 = true
#define LADDER_INFLATED .int4 = true, .paged = true, .prefix = true, .large = true, .many = 2
#define LADDER_LARGE .isa = LLM_ISA_BEST, LADDER_INFLATED
static const rung ladder_cpu[] = {
    {"naive: no cache", .isa = LLM_ISA_PLAIN, .threads = 1, .sequences = 1, .no_cache = true,
     .naive = true, .many = 2},
    {"+ KV cache", .isa = LLM_ISA_PLAIN, .threads = 1, .sequences = 1, .naive = true, .many = 3},
    {"+ tiled attention", .isa = LLM_ISA_PLAIN, .threads = 1, .sequences = 1,
     .many = LADDER_REQUESTS},
    {"+ wide vectors", LADDER_FAST, .threads = 1, .sequences = 1},
    {"+ threads", LADDER_FAST, .sequences = 1},
    {"+ int4 weights", LADDER_INT4, .sequences = 1},
    {"+ static batches", LADDER_INT4, .sequences = LADDER_CONTEXTS, .groups = true},
    {"+ continuous", LADDER_INT4, .sequences = LADDER_CONTEXTS},
    {"+ paged cache", LADDER_INT4, .paged = true},
    {"+ prefix cache", LADDER_INT4, .paged = true, .prefix = true},
    {"inflated model", LADDER_LARGE},
    {"+ speculation", LADDER_LARGE, .draft = true},
};

/* On a GPU, switches of kernels and launches replace those of vectors and threads. */
#define LADDER_KERNELS .many = LADDER_REQUESTS, .tiled = true
#define LADDER_SWITCHES .fused = true, .split = true, .graphs = true
#define LADDER_GPU LADDER_KERNELS, LADDER_SWITCHES
#define LADDER_GPU_INT4 LADDER_GPU, .int4 = true
#define LADDER_GPU_LARGE .tiled = true, LADDER_SWITCHES, LADDER_INFLATED
static const rung ladder_gpu[] = {
    {"naive: no cache", .sequences = 1, .no_cache = true, .naive = true, .many = 2},
    {"+ KV cache", .sequences = 1, .naive = true, .many = 3},
    {"+ tiled kernels", LADDER_KERNELS, .sequences = 1},
    {"+ fused kernels", LADDER_KERNELS, .sequences = 1, .fused = true},
    {"+ split attention", LADDER_KERNELS, .sequences = 1, .fused = true, .split = true},
    {"+ graphs", LADDER_GPU, .sequences = 1},
    {"+ int4 weights", LADDER_GPU_INT4, .sequences = 1},
    {"+ static batches", LADDER_GPU_INT4, .sequences = LADDER_CONTEXTS, .groups = true},
    {"+ continuous", LADDER_GPU_INT4, .sequences = LADDER_CONTEXTS},
    {"+ paged cache", LADDER_GPU_INT4, .paged = true},
    {"+ prefix cache", LADDER_GPU_INT4, .paged = true, .prefix = true},
    {"inflated model", LADDER_GPU_LARGE},
    {"+ speculation", LADDER_GPU_LARGE, .draft = true},
};

/* Run each rung three times and keep the best result, since other programs use the machine, too.
 * Measure the bits per byte before and after the change to int4. */
static bool ladder_climb(lesson *l, ladder *x, const rung *rungs, int n, int text,
                         rung_result *results) {
    const bool slow = chosen.device == DEVICE_EMULATED;
    bool good = true;
    for (int i = 0; i < n && good && !stop_requested; i++) {
        show_progress("ladder", (double)i / n, rungs[i].name);
        for (int run = 0; run < (rungs[i].no_cache || slow ? 1 : 3) && good && !stop_requested;
             run++)
            good = ladder_rung(l, x, &rungs[i], &results[i]);
        if (good && rungs[i].int4 && !rungs[i - 1].int4) {
            double unused;
            good = lesson_perplexity(l, x->f16, text, &results[i - 1].bits, &unused) &&
                   lesson_perplexity(l, x->int4, text, &results[i].bits, &unused);
        }
    }
    show_progress("", -1, "");
    return good && !stop_requested;
}

static int command_ladder(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    ladder x = {.n = -1, .requests = LADDER_REQUESTS, .inflate = 300 << 20};
    int text = 6000;
    const option options[] = {
        LESSON_OPTIONS(l),
        {'n', "max-tokens", "N", WHOLE, &x.n, 4, 1 << 16,
         "output tokens of the one request, and of a third of the many (default 48, or what fits)"},
        {0, "requests", "N", WHOLE, &x.requests, 1, LADDER_REQUESTS,
         "number of the many requests (default 24)"},
        {0, "inflate", "SIZE", SIZE, &x.inflate, 0, 0,
         "size of the inflated model of the last rungs, see llm synth; 0: without these rungs "
         "(default 300M)"},
        {0, "text", "BYTES", WHOLE, &text, 100, INT_MAX,
         "bytes of models/eval.txt for the bits per byte of int4 (default 6000)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, "models/tales.gguf");
    if (status != PARSED) return status;
    llm_error err;
    llm_backend *device = open_device(&l.engine, &err);
    if (!device) return fail_with(&err), lesson_end(&l, false);
    x.gpu = llm_cpu_threads(device) == 0;
    llm_backend_free(device);
    x.context = l.engine.context_length =
        given_or(-1, 512, 1, llm_model_config(l.loaded)->context_length);
    x.cache_bytes = (double)LADDER_CONTEXTS * x.context *
                    (double)llm_model_cache_bytes_per_token(l.loaded, LLM_F16);
    x.shared = given_or(-1, LADDER_SHARED, 1, x.context / 2);
    x.n = given_or(x.n, 48, 4, x.context - x.shared - LADDER_OWN);
    if (!fits_context(&l, x.shared + LADDER_OWN, x.n)) return lesson_end(&l, false);
    rung_result results[COUNT(ladder_gpu)];
    memset(results, 0, sizeof results);
    bool good = ladder_models(&l, &x) && ladder_tasks(&l, &x);
    const rung *rungs = x.gpu ? ladder_gpu : ladder_cpu;
    int n = x.gpu ? COUNT(ladder_gpu) : COUNT(ladder_cpu);
    if (!x.large) n -= 2; /* the last rungs need speculation */
    good = good && ladder_climb(&l, &x, rungs, n, text, results);
    if (good) ladder_show(&l, &x, rungs, results, n);
    for (int i = 0; i < COUNT(results); i++)
        free(results[i].one_tokens), free(results[i].many_tokens);
    free((void *)x.one.request.prompt);
    for (int i = 0; i < LADDER_REQUESTS; i++) free((void *)x.many[i].request.prompt);
    llm_model_free(x.int4);
    llm_model_free(x.large);
    llm_model_free(x.draft);
    return lesson_end(&l, good);
}

static const char ladder_notes[] =
    "Switches the optimisations of the course on, one after another, and measures one request\n"
    "and many. Checks that each rung gives the tokens of the rung before. (int4 is another model:\n"
    "its bits per byte are shown instead.) Starts from an f16 model, models/tales.gguf or that of\n"
    "-m. On a GPU, tiled kernels, fused kernels, split attention and graphs replace the rungs of\n"
    "vectors and threads. Wide vectors add in another order, so a token may differ where two\n"
    "tokens are almost equally likely.\n"
    "\n"
    "Examples:\n"
    "  llm ladder\n"
    "  llm ladder --svg ladder.svg\n";

const command ladder_command = {
    "ladder", "Compare the naive engine with each optimization, in one table.",
    "[options]", command_ladder, ladder_notes};
