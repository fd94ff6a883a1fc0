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
#include "../models/tools.h"

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
    llm_model *model;     /* the target that is measured */
    plot speeds;          /* tokens per step, and the speedup of each target, by K */
    uint64_t inflate;     /* size of the larger target in bytes; 0: none */
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

/* Write a piece of text in a frame, on a new line if it does not fit, in a coloured box. */
static void frame_piece(scene *s, const char *text, int colour, double *x, double *y) {
    double width = scene_text_width(text, 15, false);
    if (*x + width > SCENE_WIDTH - 28) *x = 28, *y += 26;
    if (colour != SCENE_PAPER) scene_rectangle(s, colour, *x, *y - 17, *x + width, *y + 5);
    scene_text(s, colour == SCENE_PAPER ? SCENE_INK : SCENE_ON + colour, 15, *x, *y, 0, false,
               text);
    *x += width + 2;
}

/* Draw a pass of the target: the text, whose last `added` tokens are new, and the proposals. */
static void speculation_frame(lesson *l, const task *t, int added, int proposals, int accepted,
                              const plot *map, int step) {
    const llm_tokenizer *tokenizer = llm_model_tokenizer(l->loaded);
    scene *s = new_frame(l, 440, "Pass %d of the target: %d tokens", step + 1, added);
    char piece[64], line[128];
    double x = 28, y = 220;
    if (!s) return;
    scene_text(s, SCENE_MUTED, 14, 28, 70, 0, false, "The draft proposes, from left to right:");
    for (int k = 0; k < 3; k++) { /* the legend */
        scene_rectangle(s, map->series[k].colour, 420 + k * 110, 58, 434 + k * 110, 72);
        scene_text(s, SCENE_INK, 14, 440 + k * 110, 70, 0, false,
                   (const char *const[]){"accepted", "rejected", "void"}[k]);
    }
    for (int k = 0; k < proposals; k++) {
        plain_text(tokenizer, speculation_spy.tokens[1 + k], piece, sizeof piece);
        double width = larger(40, scene_text_width(piece, 15, false) + 16);
        int colour = map->series[k < accepted ? 0 : k == accepted ? 1 : 2].colour;
        if (x + width > SCENE_WIDTH - 28) break;
        scene_rectangle(s, colour, x, 84, x + width, 114);
        scene_text(s, SCENE_ON + colour, 15, x + width / 2, 104, 0.5, false, piece);
        x += width + 6;
    }
    snprintf(line, sizeof line, "%d tokens in %d passes: %.2f tokens per pass", t->n, step + 2,
             t->n / (step + 2.0)); /* the first token came from the prompt's pass */
    scene_text(s, SCENE_INK, 14, 28, 148, 0, true, line);
    scene_text(s, SCENE_MUTED, 14, 28, 186, 0, false,
               "The text so far. The target chose the tokens that are not accepted proposals:");
    x = 28;
    int first = 0; /* the last lines are shown */
    for (double length = 0; first < t->n; first++) {
        length = 0;
        for (int i = first; i < t->n; i++)
            length += scene_text_width(plain_text(tokenizer, t->tokens[i], piece, sizeof piece), 15,
                                       false) + 6;
        if (length < 8 * 860) break;
    }
    for (int i = first; i < t->n; i++)
        frame_piece(s, plain_text(tokenizer, t->tokens[i], piece, sizeof piece),
                    t->accepted[i]      ? map->series[0].colour
                    : i >= t->n - added ? SCENE_GRID
                                        : SCENE_PAPER,
                    &x, &y);
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
    plot_note(&p, "Each column is a pass of the target. It accepts proposals until the first "
                  "wrong one; those after that are void.");
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
        if (step >= 0 && t.n > before)
            speculation_frame(l, &t, t.n - before, proposals, accepted, &p, step);
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
    llm_engine *engine = lesson_engine(s->model, &options);
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

/* The acceptance rate at which a step with `depth` proposals is worth `cost` plain steps; NAN:
 * none. */
static double speculation_break_even(double cost, int depth) {
    double low = 0, high = 1;
    if (depth == 0 || cost > depth + 1) return NAN;
    for (int i = 0; i < 40; i++) {
        double middle = (low + high) / 2;
        if (speculation_formula(middle, depth) < cost) low = middle;
        else high = middle;
    }
    return low;
}

/* Show the results for one target: a row for each number of proposals. */
static void speculation_show(lesson *l, speculating *s, const speculation_row *rows,
                             const char *name) {
    static const column columns[] = {{"depth", "K", "%.0f"},
                                     {"accepted_percent", "accepted %", "%.1f"},
                                     {"tokens_per_step", "tokens/step", "%.2f"},
                                     {"formula", "formula", "%.2f"},
                                     {"tokens_per_second", "tok/s", "%.0f"},
                                     {"times", "speedup", "%.2f"},
                                     {"cost", "cost", "%.2f"},
                                     {"break_even_percent", "breaks even", "%.0f"},
                                     {"same_tokens", "same", "%.0f"}};
    table t = new_table(columns, COUNT(columns));
    char label[64];
    snprintf(label, sizeof label, "speedup, %s per pass", HUMAN(llm_model_step_bytes(s->model)));
    int tokens = s->model == l->loaded ? plot_series_add(&s->speeds, "tokens per step") : -1,
        speed = plot_series_add(&s->speeds, label);
    double plain = rows[0].after_first / rows[0].seconds;
    for (int k = 0; k <= s->most; k++) {
        const speculation_row *r = &rows[k];
        double a = r->proposed ? r->accepted / r->proposed : 0, rate = r->after_first / r->seconds;
        double expected = speculation_formula(a, k), each = r->tokens / r->steps;
        double times = rate / plain, cost = each / times;
        add_row(&t, (double)k, k ? 100 * a : NAN, each, expected, rate, times, cost,
                100 * speculation_break_even(cost, k), (double)(r->hash == rows[0].hash));
        if (tokens >= 0) plot_point(&s->speeds, tokens, k, each);
        plot_point(&s->speeds, speed, k, times);
    }
    say(l, "\nA target that reads %s per pass; %d texts of %d tokens, greedy:\n\n",
        HUMAN(llm_model_step_bytes(s->model)), s->texts, s->n);
    show_table(l, &t, name);
    if (s->draft)
        say(l,
            "\nA pass of the draft reads %s: a proposal costs %.3f of a target pass, in bytes.\n",
            HUMAN(llm_model_step_bytes(s->draft)),
            (double)llm_model_step_bytes(s->draft) / (double)llm_model_step_bytes(s->model));
}

/* Show the acceptance rate at each position, for the largest number of proposals. */
static void speculation_positions(lesson *l, const speculating *s, const speculation_row *deepest) {
    static const column columns[] = {{"position", "position", "%.0f"},
                                     {"tested", "tested", "%.0f"},
                                     {"accepted_percent", "accepted %", "%.1f"}};
    table t = new_table(columns, COUNT(columns));
    for (int k = 0; k < s->most && deepest->proposed_at[k]; k++)
        add_row(&t, k + 1.0, deepest->proposed_at[k],
                100 * deepest->accepted_at[k] / deepest->proposed_at[k]);
    say(l, "\nWith K = %d, by position. A proposal is tested if all before it were accepted:\n\n",
        s->most);
    show_table(l, &t, "positions");
}

/* Measure a target with 0 to `most` proposals per step. */
static bool speculation_target(lesson *l, speculating *s, const char *name) {
    speculation_row rows[MOST_DEPTH + 1];
    bool good = true;
    for (int k = 0; k <= s->most && good && !stop_requested; k++)
        good = speculation_measure(l, s, k, &rows[k]);
    if (!good || stop_requested) return false;
    speculation_show(l, s, rows, name);
    if (s->model == l->loaded) speculation_positions(l, s, &rows[s->most]);
    return true;
}

static int lesson_speculation(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    speculating s = {
        .depth = 4, .n = -1, .texts = 4, .prompt = 32, .most = 8, .inflate = UINT64_MAX};
    const option options[] = {
        LESSON_OPTIONS(l),
        HTML_OPTION(l),
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
        {0, "inflate", "SIZE", SIZE, &s.inflate, 0, 0,
         "also measure the target made this large, see llm synth; 0: do not (default 300M, or 0 "
         "with -m)"},
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
    if (s.inflate == UINT64_MAX)
        s.inflate = l.model || chosen.device == DEVICE_EMULATED ? 0 : 300 << 20;
    s.model = l.loaded;
    good = good && fits_context(&l, s.prompt, s.n) && speculation_stream(&l, &s);
    if (good && !stop_requested) {
        say(&l,
            "\nformula: (1 - a^(K+1)) / (1 - a) tokens per step, where a is the acceptance. cost: "
            "of a step, in plain steps. Speculation pays above the acceptance at which it breaks "
            "even.\n");
        s.speeds = plot_new(PLOT_LINES, "Tokens per step and speedup, by K",
                            "proposals per step, K", "");
        plot_note(&s.speeds, "Each further proposal adds less to a step, and costs as much as "
                             "the one before.");
        good = speculation_target(&l, &s, "depths");
    }
    if (good && !stop_requested && s.inflate) {
        say(&l,
            "\nThe same target, inflated: the same tokens, but bytes are now the limit.\n");
        s.texts = s.texts > 2 ? 2 : s.texts;
        good = (s.model = inflated_model(l.path, s.inflate)) != NULL &&
               speculation_target(&l, &s, "inflated");
        llm_model_free(s.model);
    }
    if (good && !stop_requested) show_plot(&l, &s.speeds);
    else plot_free(&s.speeds);
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
    "  llm lesson speculation --lookup --most 4 --svg speculation.svg\n"
    "  llm lesson speculation --html speculation.html\n";

const command speculation_lesson = {"lesson speculation",
                                    "Proposals, accepted and rejected; when they pay.", "[options]",
                                    lesson_speculation, speculation_notes};
