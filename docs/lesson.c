/* lesson.c - implements lesson.h */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "lesson.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>

/* Check that the file can be created, before a long computation. */
static bool can_create(const char *path) {
    int descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (descriptor < 0)
        return errno == EEXIST || !fail("cannot write %s: %s", path, strerror(errno));
    close(descriptor);
    unlink(path);
    return true;
}

int lesson_begin(lesson *l, const command *self, const option *options, int n, int argc,
                 char **argv, const char *model) {
    llm_error err;
    l->self = self;
    chosen.quiet = true;
    int status = parse(self, options, n, &argc, argv, 0);
    if (status != PARSED) return status;
    if (l->svg && (!may_write(l->svg, NULL) || !can_create(l->svg))) return FAILED;
    if (l->png && (!may_write(l->png, NULL) || !can_create(l->png))) return FAILED;
    if (l->html && (!may_write(l->html, NULL) || !can_create(l->html))) return FAILED;
    if (!(l->path = l->model || !model ? model_path(l->model) : bundled_path(model))) return FAILED;
    if (!(l->loaded = llm_model_load(l->path, &err))) return free(l->path), fail_with(&err);
    if (l->json) {
        put("{\"lesson\": \"%s\", \"model\": ", self->name[0] == 'l' && strchr(self->name, ' ')
                                                    ? strchr(self->name, ' ') + 1
                                                    : self->name);
        put_json_text(l->path);
    }
    return PARSED;
}

int given_or(int given, int wanted, int least, int most) {
    if (given >= 0) return given;
    return most < least ? least : wanted < most ? wanted : most;
}

bool fits_context(const lesson *l, int prompt, int generated) {
    int context = l->engine.context_length ? l->engine.context_length
                                           : llm_model_config(l->loaded)->context_length;
    return prompt <= context - generated ||
           !fail("a prompt of %d tokens and %d tokens of output do not fit the context of %d: "
                 "use fewer",
                 prompt, generated, context);
}

static bool lesson_picture(const lesson *l, const char *path) {
    scene s = plot_scene(l->plots, l->n_plots);
    bool good = path == l->svg ? scene_svg(path, &s, l->self->summary) : scene_png(path, &s);
    scene_free(&s);
    if (!good) return !fail("cannot write %s", path);
    if (!l->json) put("The picture is in %s\n", path);
    return true;
}

int lesson_end(lesson *l, bool good) {
    if (l->json) put_text("}\n");
    if (good && l->svg) good = lesson_picture(l, l->svg);
    if (good && l->png) good = lesson_picture(l, l->png);
    if (good && l->html && !scene_html(l->html, l->frames, l->n_frames, l->self->summary))
        good = !fail("cannot write %s", l->html);
    else if (good && l->html && !l->json) put("The animation is in %s\n", l->html);
    for (int i = 0; i < l->n_frames; i++) scene_free(&l->frames[i]);
    free(l->frames);
    for (int i = 0; i < l->n_plots; i++) plot_free(&l->plots[i]);
    free(l->plots);
    llm_model_free(l->loaded);
    free(l->path);
    if (stop_requested) good = !fail("interrupted");
    return good ? 0 : FAILED;
}

/* ---- Showing ----------------------------------------------------------------------------- */

/* Print text, with long lines wrapped between words. */
static void put_wrapped(const char *words) {
    for (int at = 0; *words;) {
        if (*words == '\n' || *words == ' ') {
            int next = (int)strcspn(words + 1, " \n") + 1;
            bool end = *words == '\n' || at + next > LESSON_WIDTH;
            put_text(end ? "\n" : " ");
            at = end ? 0 : at + 1;
            words++;
            continue;
        }
        int n = (int)strcspn(words, " \n");
        put_bytes(words, (size_t)n);
        at += n;
        words += n;
    }
}

void say(const lesson *l, const char *format, ...) {
    if (l->json) return;
    char piece[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(piece, sizeof piece, format, arguments);
    va_end(arguments);
    put_wrapped(piece);
    flush_output();
}

void fact(const lesson *l, const char *name, double value) {
    if (!l->json) return;
    put(",\n \"%s\": ", name);
    put_number(value);
}

table new_table(const column *columns, int n) { return (table){columns, n, 0, NULL, NULL}; }

void add_row(table *t, ...) {
    va_list arguments;
    va_start(arguments, t);
    for (int i = 0; i < t->n_columns; i++) {
        t->cells = resize(t->cells, (size_t)(t->n_cells + 1) * sizeof *t->cells);
        t->numbers = resize(t->numbers, (size_t)(t->n_cells + 1) * sizeof *t->numbers);
        char *cell = t->cells[t->n_cells];
        double number = NAN;
        if (!strcmp(t->columns[i].format, "%s")) {
            snprintf(cell, sizeof *t->cells, "%s", va_arg(arguments, const char *));
        } else {
            number = va_arg(arguments, double);
            if (isnan(number)) cell[0] = 0;
            else snprintf(cell, sizeof *t->cells, t->columns[i].format, number);
        }
        t->numbers[t->n_cells++] = number;
    }
    va_end(arguments);
}

static void put_table_json(const table *t, const char *name) {
    put(",\n \"%s\": [", name);
    for (int i = 0; i < t->n_cells; i++) {
        const column *c = &t->columns[i % t->n_columns];
        bool first = i % t->n_columns == 0, last = i % t->n_columns == t->n_columns - 1;
        put(first ? "%s\n  {\"%s\": " : "%s\"%s\": ", first && i ? "," : first ? "" : ", ", c->key);
        if (!strcmp(c->format, "%s")) put_json_text(t->cells[i]);
        else put_number(t->numbers[i]);
        if (last) put_text("}");
    }
    put_text("]");
}

void show_table(const lesson *l, table *t, const char *name) {
    if (l->json) put_table_json(t, name);
    for (int row = -1; !l->json && row < t->n_cells / t->n_columns; row++)
        for (int i = 0; i < t->n_columns; i++) {
            int width = (int)strlen(t->columns[i].title);
            for (int k = i; k < t->n_cells; k += t->n_columns)
                if ((int)strlen(t->cells[k]) > width) width = (int)strlen(t->cells[k]);
            const char *cell = row < 0 ? t->columns[i].title : t->cells[row * t->n_columns + i];
            bool words = !strcmp(t->columns[i].format, "%s"), last = i == t->n_columns - 1;
            put(words ? "%-*s" : "%*s", words && last ? 0 : width, cell);
            put_text(last ? "\n" : "  ");
        }
    flush_output();
    free(t->cells);
    free(t->numbers);
}

void keep_plot(lesson *l, plot p) {
    l->plots = resize(l->plots, (size_t)(l->n_plots + 1) * sizeof *l->plots);
    l->plots[l->n_plots++] = p;
}

scene *new_frame(lesson *l, double height, const char *format, ...) {
    char title[128];
    if (!l->html) return NULL;
    l->frames = resize(l->frames, (size_t)(l->n_frames + 1) * sizeof *l->frames);
    scene *s = &l->frames[l->n_frames++];
    *s = (scene){.height = height};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(title, sizeof title, format, arguments);
    va_end(arguments);
    scene_text(s, SCENE_INK, 18, 28, 38, 0, true, title);
    return s;
}

void show_plot(lesson *l, plot *p) {
    if (!l->json) {
        put_text("\n");
        plot_text(p, put_bytes, LESSON_WIDTH, in_colour(STDOUT_FILENO));
        flush_output();
    }
    keep_plot(l, *p);
}

/* ---- Work for the engine ----------------------------------------------------------------- */

int32_t *lesson_tokens(const lesson *l, int start, int n) {
    const llm_tokenizer *t = llm_model_tokenizer(l->loaded);
    char *path = bundled_path("models/eval.txt");
    text words = {0};
    int32_t *all = NULL, *ids = NULL;
    llm_error err;
    int64_t count = -1;
    if (path && read_all(path, &words) &&
        (count = llm_tokenize_new(t, words.data, words.length, 0, &all, &err)) < 0)
        fail_with(&err);
    if (count == 0) fail("%s holds no text", path);
    if (count > 0) {
        ids = resize(NULL, (size_t)n * sizeof *ids);
        bool bos = llm_tokenizer_adds_bos(t) && llm_tokenizer_bos(t) >= 0;
        for (int i = 0; i < n; i++)
            ids[i] = i == 0 && bos ? llm_tokenizer_bos(t) : all[(start + i) % count];
    }
    llm_free(all);
    free(words.data);
    free(path);
    return ids;
}

task new_task(const int32_t *prompt, int n_prompt, int max_tokens) {
    task t = {.request = llm_request_defaults()};
    t.request.prompt = prompt;
    t.request.n_prompt = n_prompt;
    t.request.max_tokens = max_tokens;
    t.request.ignore_end = true;
    return t;
}

void free_task(task *t) {
    free(t->tokens);
    free(t->seconds);
    free(t->accepted);
    t->tokens = NULL, t->seconds = NULL, t->accepted = NULL;
    t->n = 0;
}

bool submit_task(llm_engine *engine, task *t) {
    llm_error err;
    t->request.user = t;
    t->submitted = llm_seconds();
    return llm_submit(engine, &t->request, NULL, &err) || !fail_with(&err);
}

void take_task_event(const llm_event *event) {
    task *t = event->user;
    if (event->error) fail("%s", event->error);
    if (event->finish != LLM_FINISH_NONE) t->ended = true;
    if (event->token < 0 || event->sample != 0) return;
    t->tokens = resize(t->tokens, (size_t)(t->n + 1) * sizeof *t->tokens);
    t->seconds = resize(t->seconds, (size_t)(t->n + 1) * sizeof *t->seconds);
    t->accepted = resize(t->accepted, (size_t)(t->n + 1) * sizeof *t->accepted);
    t->tokens[t->n] = event->token;
    t->accepted[t->n] = event->accepted;
    t->seconds[t->n++] = llm_seconds() - t->submitted;
}

int step_tasks(llm_engine *engine) {
    llm_error err;
    llm_event event;
    int status = stop_requested ? 0 : llm_step(engine, &err);
    bool good = status >= 0 || !fail_with(&err);
    while (status > 0 && llm_next_event(engine, &event)) {
        take_task_event(&event);
        good = good && !event.error;
    }
    return good ? status : -1;
}

bool run_tasks(llm_engine *engine, task *tasks, int n) {
    int status = 1;
    for (int i = 0; i < n; i++)
        if (!submit_task(engine, &tasks[i])) return false;
    while (status > 0) status = step_tasks(engine);
    return status == 0;
}

llm_backend *lesson_device(const lesson *l) {
    llm_error err;
    llm_backend *device = open_device(&l->engine, &err);
    if (!device) fail_with(&err);
    return device;
}

llm_engine *lesson_engine(const llm_model *model, const llm_engine_options *options) {
    llm_error err;
    llm_engine_options o = *options;
    o.fusions &= chosen.fusions;
    llm_engine *engine =
        o.backend ? llm_engine_create(model, &o, &err) : create_engine(model, &o, &err);
    if (!engine) fail_with(&err);
    return engine;
}

const char *token_text(const llm_tokenizer *t, int32_t id, char *out, size_t size) {
    int64_t n = llm_detokenize(t, &id, 1, out, size - 1, NULL);
    out[n < 0 ? 0 : n < (int64_t)size ? n : (int64_t)size - 1] = 0;
    for (char *c = out; *c; c++)
        if ((unsigned char)*c < ' ') *c = '/';
    return out;
}
