/* 09-prefix.c - llm lesson prefix: many questions after one long instruction. See 09-prefix.md.
 *
 * Each prompt is the same n_shared tokens, then some different ones. The requests first run one
 * after another, which gives the TTFT of each; then all at once, which shows how many blocks they
 * share. */
#include "lesson.h"

typedef struct prefix_run {
    double *ttft;        /* (n) seconds to the first token */
    double *hits;        /* (n) prompt tokens found in the prefix cache */
    int32_t *tokens;     /* (n, n_tokens) */
    double shared, used; /* blocks in several tables, blocks in use, at the peak */
    double separate;     /* blocks that would be in use if none were shared */
} prefix_run;

/* Run the tasks one after another, then all at once. cache: use the prefix cache. */
static bool prefix_measure(lesson *l, task *tasks, int n, int n_tokens, bool cache,
                           prefix_run *out) {
    l->engine.prefix_cache = cache;
    llm_engine *engine = lesson_engine(l->loaded, &l->engine);
    bool good = engine != NULL;
    if (good) { /* warm up with another text: the first step touches new memory */
        int32_t *other = lesson_tokens(l, 9000, tasks[0].request.n_prompt);
        task t = new_task(other, tasks[0].request.n_prompt, 1);
        good = other && run_tasks(engine, &t, 1);
        free_task(&t);
        free(other);
    }
    for (int i = 0; i < n && good; i++) {
        uint64_t before = llm_engine_statistics(engine).prefix_hits;
        good = run_tasks(engine, &tasks[i], 1) && tasks[i].n == n_tokens;
        if (!good) break;
        out->ttft[i] = tasks[i].seconds[0];
        out->hits[i] = (double)(llm_engine_statistics(engine).prefix_hits - before);
        memcpy(out->tokens + (size_t)i * (size_t)n_tokens, tasks[i].tokens,
               (size_t)n_tokens * sizeof(int32_t));
        free_task(&tasks[i]);
    }
    int status = 1;
    for (int i = 0; i < n && good; i++) good = submit_task(engine, &tasks[i]);
    while (good && status > 0) {
        status = step_tasks(engine);
        llm_statistics s = llm_engine_statistics(engine);
        double used = (double)(s.blocks_total - s.blocks_free);
        if (s.running < n || used < out->used) continue;
        out->used = used;
        out->shared = (double)s.blocks_shared;
        out->separate = n * ceil((tasks[0].request.n_prompt + tasks[0].n - 1.0) / s.block_size);
    }
    for (int i = 0; i < n; i++) free_task(&tasks[i]);
    free_engine(engine);
    return good && status == 0;
}

static void prefix_show(lesson *l, const task *tasks, int n, int n_shared, int n_tokens,
                        const prefix_run *cold, const prefix_run *warm) {
    static const column columns[] = {
        {"request", "request", "%.0f"},           {"prompt", "prompt tokens", "%.0f"},
        {"found", "found in cache", "%.0f"},      {"ttft_cold_ms", "TTFT ms without", "%.1f"},
        {"ttft_warm_ms", "TTFT ms with", "%.1f"}, {"times", "speedup", "%.1f"}};
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_BARS, "Time to the first token, by request", "milliseconds", "");
    plot_note(&p, "The first request computes the beginning that all share. The others find it "
                  "in the cache, and compute only what is their own.");
    int without = plot_series_add(&p, "no prefix cache"),
        with = plot_series_add(&p, "prefix cache");
    for (int i = 0; i < n; i++) {
        add_row(&t, i + 1.0, (double)tasks[i].request.n_prompt, warm->hits[i], 1e3 * cold->ttft[i],
                1e3 * warm->ttft[i], cold->ttft[i] / warm->ttft[i]);
        char name[32];
        snprintf(name, sizeof name, "request %d", i + 1);
        plot_category(&p, name);
        plot_bar(&p, without, 1e3 * cold->ttft[i]);
        plot_bar(&p, with, 1e3 * warm->ttft[i]);
    }
    bool same = !memcmp(cold->tokens, warm->tokens, (size_t)n * (size_t)n_tokens * sizeof(int32_t));
    say(l,
        "%d requests whose prompts begin with the same %d tokens, one after another, without and "
        "with the prefix cache:\n\n",
        n, n_shared);
    show_table(l, &t, "requests");
    fact(l, "same_tokens", same);
    fact(l, "block_size", l->engine.block_size);
    fact(l, "blocks_shared", warm->shared);
    fact(l, "blocks_used", warm->used);
    fact(l, "blocks_used_without", cold->used);
    fact(l, "blocks_separate", warm->separate);
    say(l,
        "\nBoth ways give %s tokens. When all requests run at once, %.0f blocks are in use, and "
        "%.0f of them are shared. Without the prefix cache, it is %.0f blocks.\n",
        same ? "the same" : "DIFFERENT", warm->used, warm->shared, cold->used);
    show_plot(l, &p);
}

static int lesson_prefix(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    int n_shared = -1, n_own = 12, n = 5, n_tokens = 8;
    const option options[] = {
        LESSON_OPTIONS(l),
        BLOCK_OPTION(l.engine),
        {0, "shared", "N", WHOLE, &n_shared, 1, 1 << 20,
         "tokens that all prompts begin with (default 512, or what fits the context)"},
        {0, "own", "N", WHOLE, &n_own, 1, 1 << 20, "further tokens of each prompt (default 12)"},
        {0, "requests", "N", WHOLE, &n, 1, 64, "number of requests (default 5)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    n_shared =
        given_or(n_shared, 512, 1, llm_model_config(l.loaded)->context_length - n_own - n_tokens);
    if (!fits_context(&l, n_shared + n_own, n_tokens)) return lesson_end(&l, false);
    l.engine.max_sequences = n;
    task tasks[64];
    prefix_run runs[2] = {{0}, {0}};
    bool good = true;
    for (int k = 0; k < 2; k++) {
        runs[k].ttft = resize(NULL, (size_t)n * sizeof(double));
        runs[k].hits = resize(NULL, (size_t)n * sizeof(double));
        runs[k].tokens = resize(NULL, (size_t)n * (size_t)n_tokens * sizeof(int32_t));
    }
    for (int i = 0; i < n; i++) {
        int32_t *ids = lesson_tokens(&l, 0, n_shared + n_own),
                *own = lesson_tokens(&l, 3000 + 50 * i, n_own + 1);
        good = good && ids && own;
        if (ids && own) memcpy(ids + n_shared, own + 1, (size_t)n_own * sizeof *ids);
        free(own);
        tasks[i] = new_task(ids, n_shared + n_own, n_tokens);
    }
    good = good && prefix_measure(&l, tasks, n, n_tokens, false, &runs[0]) &&
           prefix_measure(&l, tasks, n, n_tokens, true, &runs[1]);
    if (good && !stop_requested) prefix_show(&l, tasks, n, n_shared, n_tokens, &runs[0], &runs[1]);
    for (int i = 0; i < n; i++) free((void *)tasks[i].request.prompt);
    for (int k = 0; k < 2; k++) free(runs[k].ttft), free(runs[k].hits), free(runs[k].tokens);
    return lesson_end(&l, good);
}

static const char prefix_notes[] =
    "The first request computes the common beginning. Its full blocks stay in the cache, and the\n"
    "other requests list them in their block tables instead of computing them again.\n"
    "\n"
    "Examples:\n"
    "  llm lesson prefix\n"
    "  llm lesson prefix --shared 900 --block-size 64 --svg prefix.svg\n";

const command prefix_lesson = {"lesson prefix", "Many questions after one long instruction.",
                               "[options]", lesson_prefix, prefix_notes};
