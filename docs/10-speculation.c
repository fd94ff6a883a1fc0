/* 10-speculation.c - llm lesson speculation: proposals, accepted and rejected.
 * See 10-speculation.md.
 *
 * The lesson reads the proposals with a copy of the backend's table of functions, in which another
 * `run` receives each batch before it is computed. In a step with one sequence, the last batch is
 * the target's: the last known token, then the proposals. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "lesson.h"

#include <unistd.h>

enum { MOST_DEPTH = 16 };

static struct { /* global, since `run` has no argument for user data */
    const llm_backend *device;
    int32_t tokens[MOST_PROPOSALS + 1]; /* (n) tokens of the last batch */
    int n;
} speculation_spy;

static bool speculation_run(void *context, const llm_program *program, llm_part part,
                            const llm_batch *batch, int first, int n, llm_error *err) {
    speculation_spy.n = batch->n_tokens <= MOST_PROPOSALS + 1 ? batch->n_tokens : 0;
    memcpy(speculation_spy.tokens, batch->tokens, (size_t)speculation_spy.n * sizeof(int32_t));
    return speculation_spy.device->run(context, program, part, batch, first, n, err);
}

typedef struct speculating {
    const char *draft_path; /* NULL: not given */
    llm_model *draft;       /* NULL: none */
    bool lookup;
    int depth, most;      /* proposals per step: in the printed text; largest number measured */
    int n, texts, prompt; /* tokens per text; number of texts; tokens per prompt */
} speculating;

/* Print a piece of text, on a new line if it does not fit on this one. before, after: brackets,
 * used if there are no colours. */
static void put_piece(const char *text, const char *colour, const char *before, const char *after,
                      int *at) {
    bool coloured = in_colour(STDOUT_FILENO);
    int n = (int)strlen(text) + (coloured ? 0 : (int)(strlen(before) + strlen(after)));
    if (*at + n > LESSON_WIDTH - 2) put_text("\n  "), *at = 0;
    *at += n;
    if (coloured) put_text(colour);
    else put_text(before);
    put_foreign(text, strlen(text));
    put_text(coloured ? "\033[0m" : after);
}

/* The text of a token, with '?' for each byte that is not ASCII, so that each byte takes one
 * column. */
static const char *plain_text(const llm_tokenizer *t, int32_t id, char *out, size_t size) {
    token_text(t, id, out, size);
    for (char *c = out; *c; c++)
        if (*c & 0x80) *c = '?';
    return out;
}

/* Print one text with its proposals. */
static bool speculation_stream(lesson *l, const speculating *s) {
    llm_backend *device = lesson_device(l);
    if (!device) return false;
    llm_backend spy = *device;
    speculation_spy.device = device;
    spy.run = speculation_run;
    llm_engine_options options = l->engine;
    options.backend = &spy;
    options.draft = s->draft;
    llm_engine *engine = lesson_engine(l->loaded, &options);
    int32_t *prompt = lesson_tokens(l, 0, s->prompt);
    task t = new_task(prompt, s->prompt, s->n);
    t.request.speculate = s->depth;
    t.request.lookup = s->lookup;
    const llm_tokenizer *tokenizer = llm_model_tokenizer(l->loaded);
    plot p = plot_new(PLOT_MAP, "Proposals by position and step", "steps", "position");
    int accepted_series = plot_series_add(&p, "accepted"),
        rejected_series = plot_series_add(&p, "rejected"),
        void_series = plot_series_add(&p, "void, after a rejected one");
    if (void_series == 2)
        p.series[0].mark = '+', p.series[1].mark = 'x', p.series[2].mark = '-',
        p.series[2].colour = 4;
    for (int k = 0; k < s->depth; k++)
        plot_category(&p, (char[8]){(char)(k < 9 ? '1' + k : '0' + (k + 1) % 10), 0});
    bool good = engine && prompt && submit_task(engine, &t);
    int status = 1, at = 0, step = -1;
    char piece[64];
    say(l,
        "Accepted proposals are in %s, rejected ones in %s. The target chose all other tokens:"
        "\n\n  ",
        in_colour(STDOUT_FILENO) ? "green" : "[brackets]",
        in_colour(STDOUT_FILENO) ? "red" : "{braces}");
    while (good && status > 0) {
        int before = t.n, accepted = 0;
        speculation_spy.n = 0;
        status = step_tasks(engine);
        int proposals = before > 0 && speculation_spy.n > 0 ? speculation_spy.n - 1 : 0;
        for (int i = before; i < t.n; i++) {
            accepted += t.accepted[i];
            if (!l->json && !t.accepted[i] && accepted < proposals && before > 0)
                put_piece(plain_text(tokenizer, speculation_spy.tokens[1 + accepted], piece,
                                     sizeof piece),
                          "\033[31;9m", "{", "}", &at);
            if (!l->json)
                put_piece(plain_text(tokenizer, t.tokens[i], piece, sizeof piece),
                          t.accepted[i] ? green : "", t.accepted[i] ? "[" : "",
                          t.accepted[i] ? "]" : "", &at);
        }
        if (before > 0 && t.n > before) step++;
        for (int k = 0; k < proposals && step >= 0 && t.n > before; k++)
            plot_cell(&p, k, step,
                      k < accepted    ? accepted_series
                      : k == accepted ? rejected_series
                                      : void_series);
    }
    if (!l->json) put_text("\n");
    good = good && status == 0;
    if (good) show_plot(l, &p);
    else plot_free(&p);
    free_task(&t);
    free(prompt);
    llm_engine_free(engine);
    llm_backend_free(device);
    return good;
}

typedef struct speculation_row {
    double seconds, after_first; /* seconds after the first token of each text; tokens in them */
    double tokens, steps, proposed, accepted;
    double proposed_at[MOST_DEPTH], accepted_at[MOST_DEPTH];
    uint64_t hash;
} speculation_row;

/* Generate some texts, one after another, with `depth` proposals per step. */
static bool speculation_measure(lesson *l, const speculating *s, int depth, speculation_row *row) {
    llm_engine_options options = l->engine;
    options.draft = depth ? s->draft : NULL;
    options.prefix_cache = false;
    llm_engine *engine = lesson_engine(l->loaded, &options);
    bool good = engine != NULL;
    *row = (speculation_row){0};
    for (int i = -1; i < s->texts && good; i++) { /* text -1 warms up */
        int32_t *prompt = lesson_tokens(l, 1500 * (i + 1), s->prompt);
        task t = new_task(prompt, s->prompt, s->n);
        t.request.speculate = depth;
        t.request.lookup = depth && s->lookup;
        llm_statistics a = llm_engine_statistics(engine);
        good = prompt && run_tasks(engine, &t, 1) && t.n == s->n;
        llm_statistics b = llm_engine_statistics(engine);
        if (good && i >= 0) {
            row->seconds += t.seconds[t.n - 1] - t.seconds[0];
            row->tokens += t.n;
            row->after_first += t.n - 1;
            row->steps += (double)(b.decode_steps - a.decode_steps);
            row->proposed += (double)(b.proposed - a.proposed);
            row->accepted += (double)(b.accepted - a.accepted);
            row->hash =
                hash_bytes(row->hash, (const char *)t.tokens, (size_t)t.n * sizeof(int32_t));
            for (int k = 0; k < MOST_DEPTH; k++) {
                row->proposed_at[k] += (double)(b.proposed_at[k] - a.proposed_at[k]);
                row->accepted_at[k] += (double)(b.accepted_at[k] - a.accepted_at[k]);
            }
        }
        free_task(&t);
        free(prompt);
    }
    free_engine(engine);
    return good;
}

/* Tokens per step if each proposal is accepted with probability a, and the first rejection ends the
 * step. */
static double speculation_formula(double a, int depth) {
    return a >= 1 ? depth + 1 : (1 - pow(a, depth + 1)) / (1 - a);
}

static void speculation_show(lesson *l, const speculating *s, const speculation_row *rows) {
    static const column columns[] = {{"depth", "K", "%.0f"},
                                     {"accepted_percent", "acceptance %", "%.1f"},
                                     {"tokens_per_step", "tokens/step", "%.2f"},
                                     {"formula", "formula", "%.2f"},
                                     {"tokens_per_second", "tok/s", "%.0f"},
                                     {"times", "speedup", "%.2f"},
                                     {"same_tokens", "same tokens", "%.0f"}};
    static const column at_columns[] = {{"position", "position", "%.0f"},
                                        {"tested", "tested", "%.0f"},
                                        {"accepted_percent", "acceptance %", "%.1f"}};
    table t = new_table(columns, COUNT(columns)), at = new_table(at_columns, COUNT(at_columns));
    plot p = plot_new(PLOT_LINES, "Tokens per step and speedup, by K", "proposals per step, K", "");
    int measured = plot_series_add(&p, "tokens per step"), formula = plot_series_add(&p, "formula"),
        speed = plot_series_add(&p, "speedup");
    double plain = rows[0].after_first / rows[0].seconds;
    for (int k = 0; k <= s->most; k++) {
        const speculation_row *r = &rows[k];
        double a = r->proposed ? r->accepted / r->proposed : 0, rate = r->after_first / r->seconds;
        double expected = speculation_formula(a, k), each = r->tokens / r->steps;
        add_row(&t, (double)k, k ? 100 * a : NAN, each, expected, rate, rate / plain,
                (double)(r->hash == rows[0].hash));
        plot_point(&p, measured, k, each);
        plot_point(&p, formula, k, expected);
        plot_point(&p, speed, k, rate / plain);
    }
    const speculation_row *deepest = &rows[s->most];
    for (int k = 0; k < s->most && deepest->proposed_at[k]; k++)
        add_row(&at, k + 1.0, deepest->proposed_at[k],
                100 * deepest->accepted_at[k] / deepest->proposed_at[k]);
    say(l,
        "\n%d texts of %d tokens, greedy. Formula: (1 - a^(K+1)) / (1 - a), where a is the "
        "acceptance:\n\n",
        s->texts, s->n);
    show_table(l, &t, "depths");
    show_plot(l, &p);
    say(l, "\nWith K = %d, by position. A proposal is tested if all before it were accepted:\n\n",
        s->most);
    show_table(l, &at, "positions");
    if (s->draft)
        say(l,
            "\nA pass of the draft reads %s, a pass of the target %s: a proposal costs %.2f of a "
            "target pass.\n",
            HUMAN(llm_model_step_bytes(s->draft)), HUMAN(llm_model_step_bytes(l->loaded)),
            (double)llm_model_step_bytes(s->draft) / (double)llm_model_step_bytes(l->loaded));
}

static int lesson_speculation(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    speculating s = {.depth = 4, .n = -1, .texts = 4, .prompt = 32, .most = 8};
    const option options[] = {
        LESSON_OPTIONS(l),
        {'d', "draft", "FILE", TEXT, &s.draft_path, 0, 0,
         "the draft model (default: the bundled draft, for the bundled model)"},
        {0, "lookup", NULL, FLAG, &s.lookup, 0, 0,
         "instead of a draft: propose what followed the same words earlier in the text"},
        {'k', "depth", "K", WHOLE, &s.depth, 1, MOST_DEPTH,
         "proposals per step in the printed text (default 4)"},
        {0, "most", "K", WHOLE, &s.most, 1, MOST_DEPTH,
         "measure 0 to K proposals per step (default 8)"},
        {0, "texts", "N", WHOLE, &s.texts, 1, 64, "texts to measure (default 4)"},
        {'n', "max-tokens", "N", WHOLE, &s.n, 2, 1 << 20,
         "tokens per text (default 64, or what fits the context)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    llm_error err;
    bool good = true;
    if (!s.lookup) {
        if (l.model && !s.draft_path)
            good = !fail("%s has no bundled draft: use --draft FILE, or --lookup", l.model);
        char *path =
            good ? s.draft_path ? model_path(s.draft_path) : bundled_path("models/tales-draft.gguf")
                 : NULL;
        if (good && path && !(s.draft = llm_model_load(path, &err))) fail_with(&err);
        free(path);
        good = s.draft != NULL;
    }
    l.engine.max_sequences = 1;
    l.engine.max_speculation = s.depth > s.most ? s.depth : s.most;
    if (s.draft &&
        llm_model_config(s.draft)->context_length < llm_model_config(l.loaded)->context_length)
        l.engine.context_length = llm_model_config(s.draft)->context_length;
    int context = l.engine.context_length ? l.engine.context_length
                                          : llm_model_config(l.loaded)->context_length;
    s.n = given_or(s.n, 64, 2, context - s.prompt);
    speculation_row rows[MOST_DEPTH + 1];
    good = good && fits_context(&l, s.prompt, s.n) && speculation_stream(&l, &s);
    for (int k = 0; k <= s.most && good && !stop_requested; k++)
        good = speculation_measure(&l, &s, k, &rows[k]);
    if (good && !stop_requested) speculation_show(&l, &s, rows);
    llm_model_free(s.draft);
    return lesson_end(&l, good);
}

static const char speculation_notes[] =
    "A draft proposes K tokens, and one pass of the target tests them all. The target's text\n"
    "does not change. Speculation pays if a pass over K + 1 rows costs hardly more than a pass\n"
    "over one row, and if the draft costs little.\n"
    "\n"
    "Examples:\n"
    "  llm lesson speculation\n"
    "  llm lesson speculation --lookup --most 4 --png speculation.png\n";

const command speculation_lesson = {"lesson speculation",
                                    "Proposals, accepted and rejected; when they pay.", "[options]",
                                    lesson_speculation, speculation_notes};
