/* 03-kv.c - llm lesson kv: a text generated with and without the KV cache. Described in 03-kv.md.
 *
 * Without the cache, each new token is a new request: the whole text so far goes through the model
 * again, and only the last row of logits is used. With it, one request generates all tokens, and
 * each decode step computes one token. */
#include "lesson.h"

kv_run new_kv_run(int n) {
    return (kv_run){resize(NULL, (size_t)n * sizeof(int32_t)),
                    resize(NULL, (size_t)n * sizeof(double)),
                    resize(NULL, (size_t)n * sizeof(double))};
}

static void free_kv_run(kv_run *r) {
    free(r->tokens);
    free(r->seconds);
    free(r->computed);
}

bool kv_without(llm_engine *engine, const int32_t *prompt, int n_prompt, int n, kv_run *out) {
    int32_t *text = resize(NULL, (size_t)(n_prompt + n) * sizeof *text);
    memcpy(text, prompt, (size_t)n_prompt * sizeof *text);
    double start = llm_seconds(), computed = 0;
    bool good = true;
    for (int i = 0; i < n && good; i++) {
        task t = new_task(text, n_prompt + i, 1);
        good = run_tasks(engine, &t, 1) && t.n == 1;
        if (good) out->tokens[i] = text[n_prompt + i] = t.tokens[0];
        out->computed[i] = computed += n_prompt + i;
        out->seconds[i] = llm_seconds() - start;
        free_task(&t);
    }
    free(text);
    return good;
}

static bool kv_with(llm_engine *engine, const int32_t *prompt, int n_prompt, int n, kv_run *out) {
    task t = new_task(prompt, n_prompt, n);
    bool good = run_tasks(engine, &t, 1) && t.n == n;
    for (int i = 0; i < n && good; i++) {
        out->tokens[i] = t.tokens[i];
        out->seconds[i] = t.seconds[i];
        out->computed[i] = n_prompt + i;
    }
    free_task(&t);
    return good;
}

static bool kv_measure(lesson *l, int n_prompt, int n, kv_run *without, kv_run *with) {
    l->engine.max_sequences = 1;
    l->engine.prefix_cache = false; /* the prefix cache would reuse the last request's blocks */
    int32_t *prompt = lesson_tokens(l, 0, n_prompt);
    llm_engine *engine = prompt ? lesson_engine(l->loaded, &l->engine) : NULL;
    kv_run warm = new_kv_run(n);
    bool good = engine && kv_with(engine, prompt, n_prompt, n, &warm) &&
                kv_with(engine, prompt, n_prompt, n, with) &&
                kv_without(engine, prompt, n_prompt, n, without);
    free_engine(engine);
    free_kv_run(&warm);
    free(prompt);
    return good;
}

static void kv_show(lesson *l, int n_prompt, int n, const kv_run *without, const kv_run *with) {
    static const column columns[] = {{"tokens", "tokens", "%.0f"},
                                     {"computed_without", "computed without", "%.0f"},
                                     {"computed_with", "with", "%.0f"},
                                     {"milliseconds_without", "ms without", "%.1f"},
                                     {"milliseconds_with", "with", "%.1f"},
                                     {"times", "speedup", "%.1f"}};
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_LINES, "Time to generate the first n tokens", "n", "milliseconds");
    plot_note(&p, "Without the cache, each step computes the whole text again; with it, only "
                  "the newest token.");
    int slow = plot_series_add(&p, "without the cache"),
        fast = plot_series_add(&p, "with the cache");
    bool same = true;
    for (int i = 0; i < n; i++) {
        double a = 1e3 * without->seconds[i], b = 1e3 * with->seconds[i];
        plot_point(&p, slow, i + 1, a);
        plot_point(&p, fast, i + 1, b);
        same = same && without->tokens[i] == with->tokens[i];
        bool power = ((i + 1) & i) == 0 || i == n - 1;
        if (power || l->json)
            add_row(&t, i + 1.0, without->computed[i], with->computed[i], a, b, a / b);
    }
    say(l, "%d tokens after a prompt of %d, greedy, with and without the cache:\n\n", n, n_prompt);
    show_table(l, &t, "tokens");
    fact(l, "same_tokens", same);
    say(l,
        "\nBoth gave %s tokens. Without the cache, token i (from 0) costs a pass over prompt + i "
        "tokens: n x prompt + n(n-1)/2 = %.0f for n of them. With it, each token goes through the "
        "model once: prompt + n - 1 = %.0f.\n",
        same ? "the same" : "NOT THE SAME", without->computed[n - 1], with->computed[n - 1]);
    show_plot(l, &p);
}

static int lesson_kv(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    int n_prompt = -1, n = -1;
    const option options[] = {
        LESSON_OPTIONS(l),
        {'p', "prompt", "N", WHOLE, &n_prompt, 1, 1 << 20,
         "tokens of the prompt (default 16, or what fits the context)"},
        {'n', "max-tokens", "N", WHOLE, &n, 1, 1 << 20,
         "tokens to generate (default 128, or what fits the context)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    int context = llm_model_config(l.loaded)->context_length;
    n_prompt = given_or(n_prompt, 16, 1, context / 4);
    n = given_or(n, 128, 1, context - n_prompt);
    if (!fits_context(&l, n_prompt, n)) return lesson_end(&l, false);
    l.engine.max_batch_tokens = n_prompt + n < 512 ? 512 : n_prompt + n;
    kv_run without = new_kv_run(n), with = new_kv_run(n);
    bool good = kv_measure(&l, n_prompt, n, &without, &with) && !stop_requested;
    if (good) kv_show(&l, n_prompt, n, &without, &with);
    free_kv_run(&without);
    free_kv_run(&with);
    return lesson_end(&l, good);
}

static const char kv_notes[] =
    "Generates the same greedy text twice: without the KV cache, each token takes a pass over the\n"
    "whole text so far; with it, a pass over one token. The work grows with the square of the\n"
    "length in the first case, and with the length in the second.\n"
    "\n"
    "Examples:\n"
    "  llm lesson kv\n"
    "  llm lesson kv -n 400 --svg kv.svg\n";

const command kv_lesson = {
    "lesson kv", "A text generated with and without the KV cache.", "[options]",
    lesson_kv, kv_notes};
