/* main.c - the `llm` command: a driver over the public calls of llm.h
 *
 * run, demo, batch, info and tokenize are here, a section for each, and at the end the table that
 * names all commands. What they share is in docs/cli.c; the other commands are in docs/ (chat,
 * lesson, ladder), models/ (quantize, synth, perplexity) and tests/bench.c. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "docs/cli.h"
#include "models/info.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#define VERSION "0.1.0"

/* ---- JSON ------------------------------------------------------------------------------ */

static const char *skip_space(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) p++;
    return p;
}

/* The text of a value that begins at p, in well-formed JSON. */
static llm_string json_source(const char *p, const char *end) {
    const char *start = p;
    int depth = 0;
    bool quoted = false;
    do {
        if (quoted && *p == '\\') p++; /* and what it escapes */
        else if (*p == '"') quoted = !quoted;
        else if (!quoted) depth += (*p == '[' || *p == '{') - (*p == ']' || *p == '}');
        p++;
    } while (p < end && (quoted || depth || !strchr(",]} \t\r\n", *p)));
    return (llm_string){start, (size_t)(p - start)};
}

/* The token ids of a JSON array. False: something else is there. */
static bool json_ids(const llm_json_node *array, int32_t **ids, int64_t *n) {
    *n = 0;
    if (!llm_json_has_kind(array, LLM_JSON_ARRAY)) return false;
    *ids = resize(*ids, ((size_t)array->length + 1) * sizeof **ids);
    for (const llm_json_node *item = llm_json_first(array); item;
         item = llm_json_next(array, item)) {
        int64_t id;
        if (!llm_json_i64(item, &id) || id < INT32_MIN || id > INT32_MAX) return false;
        (*ids)[(*n)++] = (int32_t)id;
    }
    return true;
}

/* Ids between spaces or commas. False: something else is there. */
static bool parse_ids(const char *data, size_t length, int32_t **ids, int64_t *n) {
    text t = {0}; /* zero-terminated, for strtol */
    append(&t, data, length);
    append(&t, "", 1);
    *n = 0;
    const char *p = t.data, *end = t.data + length;
    bool good = true;
    while (good && (p = skip_space(p, end)) < end) {
        char *after;
        errno = 0;
        long id = strtol(p, &after, 10);
        good = after > p && !errno && id >= INT32_MIN && id <= INT32_MAX;
        if (!good) break;
        if ((*n & (*n - 1)) == 0) *ids = resize(*ids, (size_t)(*n ? 2 * *n : 1) * sizeof **ids);
        (*ids)[(*n)++] = (int32_t)id;
        p = skip_space(after, end);
        p += p < end && *p == ',';
    }
    free(t.data);
    return good;
}

/* ---- llm run ----------------------------------------------------------------------------- */
typedef struct figures { /* of a run */
    double submitted, first, last; /* clock: submit, first token, last token */
    uint64_t first_steps;          /* steps of the engine until the first token */
    uint64_t decode_tokens;        /* tokens of the later steps */
    double cache_bytes;            /* of keys and values that those read */
} figures;

typedef struct run {
    const char *model, *file, *trace_path;
    trace_writer *trace;
    llm_engine_options engine;
    llm_request request;
    speculation speculation;
    text_list stop;
    seed_value seed;
    bool special, json, quiet;
    text prompt;
    int32_t *ids;
    llm_model *loaded, *draft;
    sample *samples;
    int shown;  /* samples that have been shown completely; the next is shown as it is generated */
    int opened; /* samples whose beginning has been shown */
    figures figures;
} run;

/* From the argument, the file or standard input. */
static bool run_read_prompt(run *r, int argc, char **argv) {
    const char *path = r->file ? r->file : argc && !strcmp(argv[0], "-") ? "-" : NULL;
    if (!path) {
        if (argc) append(&r->prompt, argv[0], strlen(argv[0]));
        return true;
    }
    if (!read_all(path, &r->prompt)) return false;
    if (r->prompt.length && r->prompt.data[r->prompt.length - 1] == '\n') r->prompt.length--;
    return true;
}

static bool run_make_ids(run *r) {
    const llm_tokenizer *t = llm_model_tokenizer(r->loaded);
    int64_t n = prompt_ids(t, &r->prompt, r->special, &r->ids);
    if (n == 0)
        fail("the prompt is empty, and this model has no BOS token to begin with: give a prompt");
    if (n <= 0) return false;
    r->request.prompt = r->ids;
    r->request.n_prompt = n < INT_MAX ? (int)n : INT_MAX;
    return true;
}

/* The new part of a sample's text, with accepted proposals in colour. */
static void run_show_sample(sample *s) {
    while (s->n_shown < s->text.length) {
        const generated_token *token =
            s->n_shown_tokens < s->n_tokens ? &s->tokens[s->n_shown_tokens] : NULL;
        size_t end = token ? token->text_end : s->text.length, n = end - s->n_shown;
        if (n && token && token->accepted) put_coloured(green, s->text.data + s->n_shown, n);
        else put_foreign(s->text.data + s->n_shown, n);
        s->n_shown = end;
        if (token) s->n_shown_tokens++;
    }
}

/* Show new text: of one sample as it is generated, and of the next one when that has ended. */
static bool run_show(run *r) {
    for (; r->shown < r->request.n_samples; r->shown++) {
        sample *s = &r->samples[r->shown];
        if (r->opened == r->shown) {
            r->opened++;
            if (r->request.n_samples > 1) put("[sample %d]\n", r->opened);
            if (!r->quiet) put_coloured(dim, r->prompt.data, r->prompt.length);
        }
        run_show_sample(s);
        if (s->finish == LLM_FINISH_NONE) break;
        put_text("\n");
    }
    return flush_output();
}

static void run_take(run *r, const llm_event *event, uint64_t steps) {
    take_event(&r->samples[event->sample], event);
    if (event->token < 0) return;
    figures *f = &r->figures;
    f->last = llm_seconds();
    if (f->first == 0) {
        f->first = f->last;
        f->first_steps = steps;
    } else if (event->index > 0) {
        f->decode_tokens++;
        double per_token = (double)llm_model_cache_bytes_per_token(r->loaded, r->engine.cache_type);
        f->cache_bytes += per_token * (r->request.n_prompt + event->index);
    }
}

/* Generate until all samples have ended, or the user stops it. */
static bool run_generate(run *r, llm_engine *engine) {
    llm_error err;
    llm_event event;
    uint64_t id;
    bool stopped = false;
    r->figures.submitted = llm_seconds();
    if (!llm_submit(engine, &r->request, &id, &err)) return fail_with(&err), false;
    if (!r->json) run_show(r);
    for (;;) {
        if (!stopped && (stop_requested || output_error)) {
            stopped = true;
            llm_cancel(engine, id, &err);
        } else if (llm_step(engine, &err) <= 0) {
            break;
        }
        uint64_t steps = llm_engine_statistics(engine).steps;
        while (llm_next_event(engine, &event)) run_take(r, &event, steps);
        if (!r->json) run_show(r);
    }
    if (err.status != LLM_OK) fail_with(&err);
    for (int i = 0; i < r->request.n_samples; i++)
        if (r->samples[i].error[0]) return !fail("%s", r->samples[i].error);
    return err.status == LLM_OK;
}

typedef struct speeds { /* what the figures amount to; 0: unknown */
    int n_generated;
    double ttft, tokens_per_second, bytes_per_second, memory_bytes_per_second;
    llm_statistics statistics;
} speeds;

static speeds run_speeds(const run *r, llm_engine *engine) {
    const figures *f = &r->figures;
    speeds s = {.statistics = llm_engine_statistics(engine)};
    for (int i = 0; i < r->request.n_samples; i++) s.n_generated += r->samples[i].n_tokens;
    if (f->first > 0) s.ttft = f->first - f->submitted;
    if (f->decode_tokens == 0 || f->last <= f->first) return s;
    double seconds = f->last - f->first, steps = (double)(s.statistics.steps - f->first_steps);
    s.tokens_per_second = (double)f->decode_tokens / seconds;
    if (r->draft) return s; /* it reads its own weights too, in passes that nobody counts */
    s.bytes_per_second =
        ((double)llm_model_step_bytes(r->loaded) * steps + f->cache_bytes) / seconds;
    if (!r->quiet) s.memory_bytes_per_second = engine_bandwidth(engine);
    return s;
}

static void run_print_figures(const run *r, const speeds *s) {
    bool colour = in_colour(STDERR_FILENO);
    double step_bytes = (double)llm_model_step_bytes(r->loaded);
    fputs(colour ? "\033[2m[" : "[", stderr);
    fprintf(stderr, "%s%d prompt tokens", stop_requested ? "stopped; " : "", r->request.n_prompt);
    if (s->ttft > 0) fprintf(stderr, ", first token after %.1f ms", 1e3 * s->ttft);
    fprintf(stderr, "; %d tokens", s->n_generated);
    if (s->tokens_per_second > 0) fprintf(stderr, " at %.1f tokens/s", s->tokens_per_second);
    if (s->bytes_per_second > 0) {
        fprintf(stderr, " = %.2f GB/s", 1e-9 * s->bytes_per_second);
        if (s->memory_bytes_per_second > 0)
            fprintf(stderr, ", %.0f %% of the memory's %.1f GB/s",
                    100 * s->bytes_per_second / s->memory_bytes_per_second,
                    1e-9 * s->memory_bytes_per_second);
        if (s->memory_bytes_per_second > 0 && step_bytes < processor_cache())
            fprintf(stderr, " (though %s fit the processor's cache)", HUMAN(step_bytes));
    }
    if (r->request.speculate) print_speculation(&s->statistics);
    print_host_time(&s->statistics);
    if (r->request.sampling.temperature > 0)
        fprintf(stderr, "; seed %llu", (unsigned long long)r->request.sampling.seed);
    fprintf(stderr, "]%s\n", colour ? "\033[0m" : "");
}

static void run_print_json(const run *r, const speeds *s) {
    put_text("{\"model\": ");
    put_json_text(llm_file_path(llm_model_file(r->loaded)));
    put_text(", \"prompt\": ");
    put_json(r->prompt.data, r->prompt.length);
    put_text(", \"prompt_tokens\": ");
    put_ids(r->ids, r->request.n_prompt);
    put(", \"seed\": %llu,\n \"samples\": [", (unsigned long long)r->request.sampling.seed);
    for (int i = 0; i < r->request.n_samples; i++) {
        const sample *x = &r->samples[i];
        put_text(i ? ",\n  {\"text\": " : "\n  {\"text\": ");
        put_json(x->text.data, x->text.length);
        put(", \"finish\": \"%s\", \"tokens\": [", llm_finish_name(x->finish));
        size_t start = 0;
        for (int k = 0; k < x->n_tokens; start = x->tokens[k++].text_end) {
            put(k ? ",\n   {\"id\": %d, \"logprob\": " : "\n   {\"id\": %d, \"logprob\": ",
                x->tokens[k].id);
            put_number(x->tokens[k].logprob);
            put_text(", \"text\": ");
            put_json(x->text.data + start, x->tokens[k].text_end - start);
            put_text(x->tokens[k].accepted ? ", \"accepted\": true}" : "}");
        }
        put_text("]}");
    }
    put(" ],\n \"timings\": {\"prompt_tokens\": %d, \"generated_tokens\": %d", r->request.n_prompt,
        s->n_generated);
    const struct { const char *name; double value; } values[] = {
        {"ttft_seconds", s->ttft}, {"tokens_per_second", s->tokens_per_second},
        {"bytes_per_second", s->bytes_per_second},
        {"memory_bytes_per_second", s->memory_bytes_per_second},
        {"proposed", (double)s->statistics.proposed},
        {"accepted", (double)s->statistics.accepted}, {"acceptance", acceptance(&s->statistics)},
        {"tokens_per_step", tokens_per_step(&s->statistics)}};
    for (int i = 0; i < COUNT(values); i++) {
        put(", \"%s\": ", values[i].name);
        put_number(values[i].value > 0 ? values[i].value : NAN);
    }
    put("}}\n");
}

/* The context is no longer than this request can become, so that a model of long context needs no
 * huge cache. */
static int run_context(const run *r) {
    int64_t longest = llm_model_config(r->loaded)->context_length;
    int64_t wanted =
        r->request.max_tokens < 0 ? longest : (int64_t)r->request.n_prompt + r->request.max_tokens;
    return (int)(wanted < longest ? wanted : longest);
}

static int run_model(run *r, int argc, char **argv) {
    llm_error err;
    if (!check_trace(r->trace_path, NULL)) return FAILED;
    char *path = model_path(r->model);
    bool good = path && run_read_prompt(r, argc, argv);
    good = good && load_models(path, r->speculation.path, &r->loaded, &r->draft);
    free(path);
    if (!good || !run_make_ids(r)) return FAILED;
    r->engine.draft = r->draft;
    chosen.quiet = r->quiet;
    if (r->engine.context_length == 0) r->engine.context_length = run_context(r);
    if (!open_trace(&r->trace, r->trace_path, &r->engine)) return FAILED;
    llm_engine *engine = create_engine(r->loaded, &r->engine, &err);
    if (!engine) return close_trace(r->trace, r->trace_path), fail_with(&err);
    trace_engine(r->trace, engine);
    r->samples = make_samples(r->request.n_samples);
    good = run_generate(r, engine);
    if (good) {
        speeds s = run_speeds(r, engine);
        if (r->json) run_print_json(r, &s);
        else if (!r->quiet && !output_error) run_print_figures(r, &s);
    }
    free_engine(engine);
    good = close_trace(r->trace, r->trace_path) && good;
    return good && !stop_requested ? 0 : FAILED;
}

static int command_run(const command *self, int argc, char **argv) {
    run r = {.engine = llm_engine_defaults(),
             .request = llm_request_defaults(),
             .speculation.depth = NO_DEPTH};
    llm_sampling *s = &r.request.sampling;
    s->temperature = 0.8f;
    s->top_p = 0.95f;
    r.request.max_tokens = 512;
    const option options[] = {
        MODEL_OPTION(r.model),
        {'f', "file", "FILE", TEXT, &r.file, 0, 0,
         "read the prompt from a file (one newline at its end is dropped)"},
        {'n', "tokens", "N", WHOLE, &r.request.max_tokens, -1, INT_MAX,
         "generate at most N tokens (-1: to the end of the context; default 512)"},
        SAMPLING_OPTIONS(*s, "-"),
        {'s', "seed", "N", SEED, &r.seed, 0, 0,
         "of the random draws (default: another one each time; the figures tell it)"},
        {0, "samples", "N", WHOLE, &r.request.n_samples, 1, 4096,
         "continue the prompt N times, all at once (default 1)"},
        STOP_OPTION(r.stop),
        {0, "ignore-end", NULL, FLAG, &r.request.ignore_end, 0, 0,
         "go on where the model would end"},
        {0, "special", NULL, FLAG, &r.special, 0, 0,
         "read <|endoftext|> and the like in the prompt as special tokens"},
        THREADS_OPTION(r.engine.n_threads),
        {'c', "context", "N", WHOLE, &r.engine.context_length, 1, INT_MAX,
         "longest text, prompt included (default: as needed, up to the model's)"},
        SPECULATION_OPTIONS(r.speculation),
        NAIVE_OPTION(r.engine),
        CACHE_TYPE_OPTION(r.engine),
        CACHE_OPTION(r.engine, "as needed"),
        BLOCK_OPTION(r.engine),
        STEP_OPTION(r.engine),
        TRACE_OPTION(r.trace_path),
        JSON_OPTION(r.json),
        {'q', "quiet", NULL, FLAG, &r.quiet, 0, 0, "the new text alone: no prompt, no figures"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status == PARSED && argc && r.file)
        status = misuse(self, "two prompts: '%s' and --file %s", argv[0], r.file);
    if (status == PARSED) status = check_speculation(self, &r.speculation);
    if (status == PARSED) status = check_trace_name(self, r.trace_path);
    if (status != PARSED) return free(r.stop.items), status;
    apply_speculation(&r.speculation, &r.engine, &r.request);
    r.request.stop = r.stop.items;
    r.request.n_stop = r.stop.count;
    s->seed = r.seed.given ? r.seed.value : chance_seed();
    r.engine.max_sequences = r.request.n_samples;
    status = run_model(&r, argc, argv);
    free_samples(r.samples, r.request.n_samples);
    free(r.stop.items);
    free(r.ids);
    free(r.prompt.data);
    llm_model_free(r.loaded);
    llm_model_free(r.draft);
    return status;
}

static const char run_notes[] =
    "PROMPT is the text to continue; - reads it from standard input; without one the model begins "
    "by itself.\n"
    "The text goes to standard output as it is made, and then one line of figures to standard "
    "error: tokens\n"
    "of the prompt, time to the first token, tokens per second after it, the bytes of weights and "
    "cache\n"
    "that were read for them, and what share that is of the speed at which this machine reads "
    "memory.\n"
    "With --draft or --lookup the tokens that were guessed, and found right, are green on a "
    "terminal.\n"
    "Ctrl-C ends the text; the figures are of what there is by then, and the exit status is 1.\n"
    "\n"
    "Examples:\n"
    "  llm run \"Once upon a time\"\n"
    "  llm run -m some.gguf -n 100 --temperature 0 \"The capital of France is\"\n"
    "  llm run --samples 3 --seed 7 \"There was a fox who\"\n"
    "  llm run --json --seed 1 -n 20 \"The wolf\" > wolf.json\n"
    "  llm run --draft models/tales-draft.gguf --speculate 4 \"The wolf\"\n"
    "  llm run --samples 3 --trace trace.json \"The wolf\"    (open it at ui.perfetto.dev)\n"
    "  git log -1 --format=%B | llm run -m some.gguf -\n";

/* A tale, as a first sight. */
static int command_demo(const command *self, int argc, char **argv) {
    char *words[] = {"Once upon a time"};
    int status = parse(self, NULL, 0, &argc, argv, 0);
    return status == PARSED ? command_run(self, 1, words) : status;
}

static const char demo_notes[] = "The same as: llm run \"Once upon a time\"\n";

/* ---- llm batch -------------------------------------------------------------------------------
 * Lines come in as the engine has room for them, and their results go out in the same order, each with one
 * write of a whole line. So the output is at any moment the results of the first lines, and perhaps a torn one
 * after them; when we start again we read it beside the input, cut off what is torn, and go on behind it. */
enum { MOST_COMPLAINTS = 20 };

typedef struct batch_line { /* from the input to the output */
    struct batch_line *next;
    uint64_t number, hash;
    uint64_t end;   /* offset in the input of the byte behind it */
    text id;        /* as it is to be echoed, JSON; empty: none */
    text error;     /* what is wrong with the line; empty: nothing */
    llm_request request; /* its pointers are into the following, until it was submitted */
    text prompt;
    int32_t *ids;
    int64_t n_ids;
    text_list stop;
    sample *samples;
    int n_live;
    double submitted, first, last;
} batch_line;

typedef struct batch {
    const char *model, *in_path, *out_path, *trace_path;
    trace_writer *trace;
    llm_engine_options engine_options;
    llm_request request; /* what a line does not say */
    speculation speculation;
    text_list stop;
    seed_value seed;
    bool special, logprobs, no_timings, quiet;
    llm_model *loaded, *draft;
    llm_engine *engine;
    line_reader input;
    uint64_t input_bytes; /* 0: unknown */
    int out;
    bool out_is_file;
    uint64_t out_bytes;
    double synced;        /* on the clock */
    batch_line *first, *last; /* read, and not yet written */
    int n_held, n_running;    /* of these; in the engine */
    uint64_t n_lines, n_bad, n_skipped, n_prompt_tokens, n_tokens;
    double began;
} batch;

/* ---- A line of the input */

PRINTF(2, 3)
static bool line_wrong(batch_line *l, const char *format, ...) {
    char message[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    for (char *c = message; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7F) *c = '?';
    l->error.length = 0;
    append(&l->error, message, strlen(message));
    return false;
}

static bool read_stop(batch_line *l, const llm_json_node *value) {
    const llm_json_node *array = llm_json_has_kind(value, LLM_JSON_ARRAY) ? value : NULL;
    const llm_json_node *item = array ? llm_json_first(array) : value;
    for (; item; item = llm_json_next(array, item)) {
        llm_string words;
        text stop = {0};
        if (!llm_json_string(item, &words) || !words.length || memchr(words.data, 0, words.length))
            return line_wrong(l, "stop needs a text that is not empty, or an array of them");
        append(&stop, words.data, words.length);
        append(&stop, "", 1);
        l->stop.items = resize(l->stop.items, (size_t)(l->stop.count + 1) * sizeof *l->stop.items);
        l->stop.items[l->stop.count++] = stop.data;
    }
    return true;
}

/* A value into what the option points to: the same checks as on the command line. source: the
 * value as the line has it. */
static bool read_option(batch_line *l, const option *o, const llm_json_node *value,
                        llm_string source) {
    text t = {0};
    bool word = o->kind == DEPTH && llm_json_has_kind(value, LLM_JSON_STRING), good;
    append(&t, word ? value->text : source.data, word ? value->length : source.length);
    append(&t, "", 1);
    if (o->kind == FLAG) good = llm_json_bool(value, o->value);
    else good = (word || llm_json_has_kind(value, LLM_JSON_NUMBER)) && parse_value(o, t.data);
    if (!good) line_wrong(l, "%s needs %s, not %.60s", o->name, WANTED(o), t.data);
    free(t.data);
    return good;
}

/* The keys that are not options. */
enum { KEY_PROMPT, KEY_TOKENS, KEY_STOP, KEY_ID, N_OTHER_KEYS };
static const char *const other_keys[N_OTHER_KEYS] = {"prompt", "tokens", "stop", "id"};

/* Which key that is: first the others, then the options; -1, and told: none of them. */
static int find_key(batch_line *l, const option *options, int n, const text *key) {
    suggestion s = {key->data, NULL, 0};
    for (int i = 0; i < N_OTHER_KEYS + n; i++) {
        const char *name = i < N_OTHER_KEYS ? other_keys[i] : options[i - N_OTHER_KEYS].name;
        if (strlen(name) == key->length - 1 && !memcmp(name, key->data, key->length)) return i;
        consider(&s, name);
    }
    if (s.best) line_wrong(l, "unknown key '%.60s'; did you mean '%s'?", key->data, s.best);
    else line_wrong(l, "unknown key '%.60s'", key->data);
    return -1;
}

static bool read_key(batch_line *l, const option *options, int key, const llm_json_node *value,
                     llm_string source) {
    llm_string words;
    switch (key) {
    case KEY_ID: append(&l->id, source.data, source.length); return true;
    case KEY_STOP: return read_stop(l, value);
    case KEY_PROMPT:
        if (!llm_json_string(value, &words)) return line_wrong(l, "prompt needs a string");
        append(&l->prompt, words.data, words.length);
        return true;
    case KEY_TOKENS:
        return json_ids(value, &l->ids, &l->n_ids) ||
               line_wrong(l, "tokens needs an array of token ids");
    default: return read_option(l, &options[key - N_OTHER_KEYS], value, source);
    }
}

/* The object of a line, key by key; `seen` gets a bit for each that is there. */
static bool read_object(batch_line *l, const option *options, int n, const char *data,
                        size_t length, uint32_t *seen) {
    llm_json json;
    llm_error err;
    if (!llm_json_parse(&json, data, length, NULL, &err))
        return line_wrong(l, "not JSON: %s", err.message);
    const llm_json_node *object = json.nodes, *value = llm_json_first(object);
    bool good = llm_json_has_kind(object, LLM_JSON_OBJECT) || line_wrong(l, "not a JSON object");
    for (; good && value; value = llm_json_next(object, value)) {
        llm_string source = json_source(data + llm_json_offset(&json, value), data + length);
        text name = {0};
        append(&name, llm_json_key(value).data, llm_json_key(value).length);
        append(&name, "", 1);
        int key = find_key(l, options, n, &name);
        if (key >= 0) *seen |= 1u << key;
        good = key >= 0 && read_key(l, options, key, value, source);
        free(name.data);
    }
    llm_json_free(&json);
    return good;
}

/* What a line wants done. */
static bool read_line(const batch *b, batch_line *l, const char *data, size_t length) {
    llm_request *r = &l->request;
    seed_value seed = {false, 0};
    uint32_t seen = 0;
    const option options[] = {
        SAMPLING_OPTIONS(r->sampling, "_"),
        {0, "max_tokens", NULL, WHOLE, &r->max_tokens, -1, INT_MAX, ""},
        {0, "seed", NULL, SEED, &seed, 0, 0, ""},
        {0, "n", NULL, WHOLE, &r->n_samples, 1, 4096, ""},
        {0, "priority", NULL, WHOLE, &r->priority, -1000000, 1000000, ""},
        {0, "speculate", NULL, DEPTH, &r->speculate, 0, MOST_PROPOSALS, ""},
        {0, "lookup", NULL, FLAG, &r->lookup, 0, 0, ""},
        {0, "ignore_end", NULL, FLAG, &r->ignore_end, 0, 0, ""},
    };
    if (!read_object(l, options, COUNT(options), data, length, &seen)) return false;
    bool prompt = seen >> KEY_PROMPT & 1, tokens = seen >> KEY_TOKENS & 1;
    if (prompt == tokens) return line_wrong(l, prompt ? "both prompt and tokens: one of them" : "neither prompt nor tokens: one of them");
    if (prompt) l->n_ids = prompt_ids(llm_model_tokenizer(b->loaded), &l->prompt, b->special, &l->ids);
    if (l->n_ids <= 0) return line_wrong(l, "the prompt is empty%s", prompt ? ", and this model has no BOS token to begin with" : "");
    if (seed.given) r->sampling.seed = seed.value;
    if (r->speculate == NO_DEPTH) r->speculate = r->lookup || b->draft ? LLM_SPECULATE_AUTO : 0;
    if (seen >> KEY_STOP & 1) {
        r->stop = l->stop.items;
        r->n_stop = l->stop.count;
    }
    r->prompt = l->ids;
    r->n_prompt = l->n_ids < INT_MAX ? (int)l->n_ids : INT_MAX;
    r->user = l;
    return true;
}

/* Of a line, and of all else that decides its result: so that a changed input, or other options, are noticed. */
static uint64_t hash_line(const batch *b, const char *data, size_t n) {
    const llm_request *r = &b->request;
    const llm_sampling *s = &r->sampling;
    char options[256];
    int length = snprintf(options, sizeof options, "%llu %d %d %d %d %d %llu %g %d %g %g %g %d",
                          (unsigned long long)llm_file_size(llm_model_file(b->loaded)),
                          b->engine_options.context_length, (int)b->engine_options.cache_type,
                          r->max_tokens, r->ignore_end, b->special,
                          (unsigned long long)b->seed.value, (double)s->temperature, s->top_k,
                          (double)s->top_p, (double)s->min_p, (double)s->repetition_penalty,
                          s->penalty_window);
    uint64_t hash = hash_bytes(0xCBF29CE484222325u, options, (size_t)length);
    for (int i = 0; i < b->stop.count; i++) hash = hash_bytes(hash, b->stop.items[i], strlen(b->stop.items[i]) + 1);
    return hash_bytes(hash, data, n);
}

static void free_line_input(batch_line *l) { /* what is not wanted any more when the engine has it */
    for (int i = 0; i < l->stop.count; i++) free((char *)l->stop.items[i]);
    free(l->stop.items);
    free(l->ids);
    free(l->prompt.data);
    l->stop = (text_list){0};
    l->ids = NULL;
    l->prompt = (text){0};
}

static void free_line(batch_line *l) {
    free_line_input(l);
    free_samples(l->samples, l->request.n_samples);
    free(l->id.data);
    free(l->error.data);
    free(l);
}

/* ---- The output */

static void put_record(const batch *b, const batch_line *l) {
    put("{\"line\": %llu, \"hash\": \"%016llx\"", (unsigned long long)l->number, (unsigned long long)l->hash);
    if (l->error.length) put_text(", \"error\": "), put_json(l->error.data, l->error.length);
    if (l->id.length) put_text(", \"id\": "), put_bytes(l->id.data, l->id.length);
    for (int i = 0; !l->error.length && i < l->request.n_samples; i++) {
        const sample *s = &l->samples[i];
        put_text(i ? ", {\"text\": " : ", \"samples\": [{\"text\": ");
        put_json(s->text.data, s->text.length);
        put_text(", \"tokens\": [");
        for (int k = 0; k < s->n_tokens; k++) put(k ? ", %d" : "%d", s->tokens[k].id);
        if (b->logprobs) put_text("], \"logprobs\": [");
        for (int k = 0; b->logprobs && k < s->n_tokens; k++) put_text(k ? ", " : ""), put_number((double)s->tokens[k].logprob);
        put("], \"finish_reason\": \"%s\"}", llm_finish_name(s->finish));
    }
    if (!l->error.length) {
        put("], \"prompt_tokens\": %d, \"seed\": %llu", l->request.n_prompt, (unsigned long long)l->request.sampling.seed);
        if (!b->no_timings) put(", \"ttft_seconds\": %.6f, \"seconds\": %.6f", l->first - l->submitted, l->last - l->submitted);
    }
    put_text("}\n");
}

/* All of a line, or, in a file, nothing of it. */
static bool write_line(batch *b, const text *line) {
    size_t done = 0;
    while (done < line->length) {
        ssize_t n = write(b->out, line->data + done, line->length - done);
        if (n >= 0) done += (size_t)n;
        else if (errno != EINTR) break;
    }
    if (done == line->length) return b->out_bytes += done, true;
    int error = errno;
    if (b->out_is_file && done > 0 && ftruncate(b->out, (off_t)b->out_bytes) != 0) error = errno;
    if (b->out == STDOUT_FILENO) output_error = error; /* main tells */
    else fail("cannot write to %s: %s", b->out_path, strerror(error));
    return false;
}

static void complain(const batch *b, const batch_line *l) {
    if (b->n_bad > MOST_COMPLAINTS) return;
    show_progress("batch", -1, "");
    fail("%s, line %llu: %s", b->in_path, (unsigned long long)l->number, l->error.data);
    if (b->n_bad == MOST_COMPLAINTS) fail("... and so on; the output tells of the others");
}

/* Write what is done, as far as all before it is done too. */
static bool write_finished(batch *b) {
    for (batch_line *l; (l = b->first) && l->n_live == 0;) {
        text record = {0};
        captured = &record;
        put_record(b, l);
        captured = NULL;
        append(&l->error, "", 1);
        if (l->error.length > 1) b->n_bad++, complain(b, l);
        bool good = write_line(b, &record);
        free(record.data);
        if (!good) return false;
        b->n_lines++;
        b->first = l->next;
        b->n_held--;
        double done = b->input_bytes ? (double)l->end / (double)b->input_bytes : NAN, now = llm_seconds();
        free_line(l);
        char note[96];
        snprintf(note, sizeof note, "%llu lines, %.1f tokens/s", (unsigned long long)(b->n_lines + b->n_skipped),
                 (double)b->n_tokens / (now - b->began));
        show_progress("batch", done, note);
        if (b->out_is_file && now - b->synced > 5) fsync(b->out), b->synced = now;
    }
    return true;
}

/* ---- Going on where an earlier run ended */

static bool is_blank(const char *line, size_t length) { return skip_space(line, line + length) == line + length; }

/* Step over the input up to a line that has a result, and see that it is the line that this was made from. */
static bool skip_to(batch *b, uint64_t number, uint64_t hash) {
    const char *line;
    size_t length;
    while (b->input.number < number) {
        if (next_line(&b->input, true, &line, &length) != LINE)
            return !fail("%s has a result for line %llu, and %s no such line: the input has changed; remove the output, or give another",
                         b->out_path, (unsigned long long)number, b->in_path);
        bool due = b->input.number == number;
        if (due ? hash_line(b, line, length) == hash : is_blank(line, length)) continue;
        return !fail("%s, line %llu is not what the result in %s was made from (or the model or the options are others): "
                     "remove the output, or give another", b->in_path, (unsigned long long)b->input.number, b->out_path);
    }
    return true;
}

static bool skip_done(batch *b) {
    line_reader old = {.file = b->out};
    const char *line;
    size_t length;
    bool good = true;
    while (good && next_line(&old, true, &line, &length) == LINE && !old.torn) {
        char head[96], after = 0;
        unsigned long long number = 0, hash = 0;
        snprintf(head, sizeof head, "%.*s", length < 95 ? (int)length : 95, line);
        good = sscanf(head, "{\"line\": %llu, \"hash\": \"%16llx\"%c", &number, &hash, &after) == 3 && number > b->input.number;
        if (!good) fail("%s, line %llu is not a result of llm batch: give another output", b->out_path, (unsigned long long)old.number);
        good = good && skip_to(b, number, hash);
        b->n_skipped++;
        b->n_bad += strstr(head, ", \"error\":") != NULL;
        b->out_bytes = old.offset;
    }
    if (good && old.error) good = !fail("cannot read %s: %s", b->out_path, strerror(old.error));
    free(old.buffer.data);
    if (good && old.torn && ftruncate(b->out, (off_t)b->out_bytes) != 0)
        good = !fail("cannot cut off the torn last line of %s: %s", b->out_path, strerror(errno));
    return good && !stop_requested;
}

/* Nobody else may write to it meanwhile. (Where files cannot be locked we trust in that.) */
static bool lock_output(const batch *b) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(b->out, F_SETLK, &lock) == 0 || (errno != EACCES && errno != EAGAIN)) return true;
    return !fail("another llm writes to %s", b->out_path);
}

static bool open_files(batch *b) {
    struct stat in, out;
    bool from_stdin = !strcmp(b->in_path, "-");
    b->input.file = from_stdin ? STDIN_FILENO : open(b->in_path, O_RDONLY);
    if (b->input.file < 0 || fstat(b->input.file, &in) != 0) return !fail("cannot read %s: %s", b->in_path, strerror(errno));
    if (from_stdin) b->in_path = "standard input";
    if (S_ISREG(in.st_mode)) b->input_bytes = (uint64_t)in.st_size;
    b->out = STDOUT_FILENO;
    if (!strcmp(b->out_path, "-")) return true;
    bool same = stat(b->out_path, &out) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino;
    if (same) return !fail("input and output are the same file, %s: give another path to write to", b->out_path);
    b->out = open(b->out_path, O_RDWR | O_CREAT | O_APPEND, 0666);
    if (b->out < 0 || fstat(b->out, &out) != 0) return !fail("cannot write to %s: %s", b->out_path, strerror(errno));
    b->out_is_file = S_ISREG(out.st_mode);
    return !b->out_is_file || (lock_output(b) && skip_done(b));
}

/* ---- The engine */

/* One line more into the engine, or into the list of those that were bad. False: nothing can go on. */
static bool feed_line(batch *b, const char *data, size_t length) {
    llm_error err;
    batch_line *l = resize(NULL, sizeof *l);
    memset(l, 0, sizeof *l);
    l->number = b->input.number;
    l->end = b->input.offset;
    l->hash = hash_line(b, data, length);
    l->request = b->request;
    l->request.sampling.seed = b->seed.value + l->number;
    if (b->first) b->last->next = l;
    else b->first = l;
    b->last = l;
    b->n_held++;
    if (!read_line(b, l, data, length)) return true;
    l->submitted = llm_seconds();
    bool good = llm_submit(b->engine, &l->request, NULL, &err);
    free_line_input(l);
    if (!good && err.status != LLM_ERROR_MEMORY) line_wrong(l, "%s", our_words(&err).text);
    if (!good) return err.status != LLM_ERROR_MEMORY || !fail_with(&err);
    l->samples = make_samples(l->request.n_samples);
    l->n_live = l->request.n_samples;
    b->n_running++;
    b->n_prompt_tokens += (uint64_t)l->request.n_prompt;
    return true;
}

/* Enough lines that the engine never lacks one, and no more, so that the input may be longer than memory. */
static bool feed(batch *b, bool *more) {
    const char *line;
    size_t length;
    int at_once = 4 * b->engine_options.max_sequences;
    while (*more && b->n_running < at_once && b->n_held < 16 * at_once) {
        line_state state = next_line(&b->input, b->n_held == 0, &line, &length);
        if (state == NOT_YET) break;
        *more = state == LINE;
        if (*more && !is_blank(line, length) && !feed_line(b, line, length)) return false;
    }
    if (*more || stop_requested) return true;
    if (b->input.error) return !fail("cannot read %s: %s", b->in_path, strerror(b->input.error));
    return b->input.ended || !fail("%s, line %llu is too long", b->in_path, (unsigned long long)b->input.number + 1);
}

static bool take_events(batch *b) {
    llm_error err;
    llm_event event;
    if (llm_step(b->engine, &err) < 0) return !fail_with(&err);
    double now = llm_seconds();
    while (llm_next_event(b->engine, &event)) {
        batch_line *l = event.user;
        take_event(&l->samples[event.sample], &event);
        b->n_tokens += event.token >= 0;
        if (l->first == 0) l->first = now;
        l->last = now;
        if (event.error && !l->error.length) append(&l->error, event.error, strlen(event.error));
        if (event.finish != LLM_FINISH_NONE && --l->n_live == 0) b->n_running--;
    }
    return true;
}

static bool batch_run(batch *b) {
    bool more = true;
    b->began = b->synced = llm_seconds();
    while (!stop_requested && (more || b->n_held > 0)) {
        if (!feed(b, &more) || !write_finished(b)) return false;
        if (b->n_running > 0 && !take_events(b)) return false;
    }
    return stop_requested || write_finished(b);
}

static void batch_print_figures(const batch *b) {
    bool colour = in_colour(STDERR_FILENO);
    double seconds = llm_seconds() - b->began;
    llm_statistics s = llm_engine_statistics(b->engine);
    fprintf(stderr, "%s[%llu lines", colour ? dim : "", (unsigned long long)b->n_lines);
    if (b->n_skipped) fprintf(stderr, " (and %llu done before)", (unsigned long long)b->n_skipped);
    if (b->n_bad) fprintf(stderr, ", %llu bad", (unsigned long long)b->n_bad);
    fprintf(stderr, "; %llu prompt tokens, %.0f %% of them cached; %llu tokens in %.2f s = %.1f tokens/s", (unsigned long long)b->n_prompt_tokens,
            s.prefix_tokens ? 100 * (double)s.prefix_hits / (double)s.prefix_tokens : 0.0, (unsigned long long)b->n_tokens, seconds,
            (double)b->n_tokens / seconds);
    if (s.preemptions) fprintf(stderr, "; %llu preemptions", (unsigned long long)s.preemptions);
    if (s.proposed) print_speculation(&s);
    fprintf(stderr, "]%s\n", colour ? "\033[0m" : "");
}

static int batch_model(batch *b) {
    llm_error err;
    char *path = model_path(b->model);
    bool good = path && load_models(path, b->speculation.path, &b->loaded, &b->draft);
    free(path);
    if (!good || !open_files(b) || !check_trace(b->trace_path, b->out_path) ||
        !open_trace(&b->trace, b->trace_path, &b->engine_options))
        return FAILED;
    b->engine_options.draft = b->draft;
    b->engine = create_engine(b->loaded, &b->engine_options, &err);
    if (!b->engine) return close_trace(b->trace, b->trace_path), fail_with(&err);
    trace_engine(b->trace, b->engine);
    good = batch_run(b);
    good = close_trace(b->trace, b->trace_path) && good;
    show_progress("batch", -1, "");
    if (b->out_is_file && fsync(b->out) != 0 && good) good = !fail("cannot write to %s: %s", b->out_path, strerror(errno));
    if (good && !b->quiet) batch_print_figures(b);
    if (good && stop_requested)
        fail("stopped, with %llu lines done%s", (unsigned long long)(b->n_lines + b->n_skipped),
             b->out_is_file ? "; the same command goes on from there" : "");
    return good && !stop_requested && b->n_bad == 0 ? 0 : FAILED;
}

static int command_batch(const command *self, int argc, char **argv) {
    batch b = {.engine_options = llm_engine_defaults(), .request = llm_request_defaults(), .speculation.depth = NO_DEPTH,
               .out_path = "-", .out = -1, .input.file = -1};
    llm_engine_options *e = &b.engine_options;
    llm_sampling *s = &b.request.sampling;
    s->temperature = 0.8f;
    s->top_p = 0.95f;
    b.request.max_tokens = 512;
    const option options[] = {
        MODEL_OPTION(b.model),
        {'f', "file", "FILE", TEXT, &b.in_path, 0, 0, "the prompts: a JSON object a line (-: standard input)"},
        {'o', "output", "FILE", TEXT, &b.out_path, 0, 0, "the results, added to what is there (default -: standard output)"},
        {'n', "tokens", "N", WHOLE, &b.request.max_tokens, -1, INT_MAX, "generate at most N tokens (-1: to the end of the context; default 512)"},
        SAMPLING_OPTIONS(*s, "-"),
        {'s', "seed", "N", SEED, &b.seed, 0, 0, "line i draws with seed N + i, unless it has a seed itself (default 0)"},
        STOP_OPTION(b.stop),
        {0, "ignore-end", NULL, FLAG, &b.request.ignore_end, 0, 0, "go on where the model would end"},
        {0, "special", NULL, FLAG, &b.special, 0, 0, "read <|endoftext|> and the like in prompts as special tokens"},
        {0, "logprobs", NULL, FLAG, &b.logprobs, 0, 0, "tell the log-probability of each token"},
        {0, "no-timings", NULL, FLAG, &b.no_timings, 0, 0, "leave the times out: the same input gives the same bytes"},
        SPECULATION_OPTIONS(b.speculation),
        THREADS_OPTION(e->n_threads),
        {'c', "context", "N", WHOLE, &e->context_length, 1, INT_MAX, "longest text, prompt included (default: the model's)"},
        CACHE_TYPE_OPTION(*e),
        CACHE_OPTION(*e, "what all sequences need"),
        BLOCK_OPTION(*e),
        SCHEDULE_OPTIONS(*e),
        TRACE_OPTION(b.trace_path),
        {'q', "quiet", NULL, FLAG, &b.quiet, 0, 0, "no figures at the end"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED && !b.in_path) status = misuse(self, "the prompts are missing: -f FILE");
    if (status == PARSED) status = check_speculation(self, &b.speculation);
    if (status == PARSED) status = check_trace_name(self, b.trace_path);
    if (status == PARSED) {
        b.request.stop = b.stop.items;
        b.request.n_stop = b.stop.count;
        apply_speculation(&b.speculation, e, &b.request);
        if (b.speculation.depth == NO_DEPTH) b.request.speculate = NO_DEPTH; /* a line may know better */
        status = batch_model(&b);
    }
    while (b.first) {
        batch_line *l = b.first;
        b.first = l->next;
        free_line(l);
    }
    if (b.input.file > STDERR_FILENO) close(b.input.file);
    if (b.out > STDERR_FILENO) close(b.out);
    free_engine(b.engine);
    llm_model_free(b.loaded);
    llm_model_free(b.draft);
    free(b.input.buffer.data);
    free(b.stop.items);
    return status;
}

static const char batch_notes[] =
    "Each line of the input is an object with \"prompt\" (a string) or \"tokens\" (an array of ids), and, where they differ\n"
    "from the options above: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, penalty_window, seed,\n"
    "stop (a string or an array), n (samples), priority, speculate (a number or \"auto\"), lookup, ignore_end; and id, which is\n"
    "any value, and comes back. Blank lines count, and are passed over.\n"
    "Each line of the output is an object with line (from 1), hash (of the input's line and the options), id, samples (text,\n"
    "tokens, logprobs, finish_reason: end, length or stop), prompt_tokens, seed, ttft_seconds, seconds; or with line, hash\n"
    "and error, where the input's line was bad: this is told on standard error too, the others go on, and the exit\n"
    "status is 1. Results are in the order of the input, and each is written at once and whole.\n"
    "If the output has results already, of a run that was stopped or killed, it goes on behind them; it refuses to\n"
    "do so where the lines that they came from, or the options, have changed.\n"
    "\n"
    "Examples:\n"
    "  llm batch -f prompts.jsonl -o results.jsonl\n"
    "  llm batch -f prompts.jsonl -o results.jsonl --max-sequences 64 --temperature 0 -n 100\n"
    "  llm batch -f prompts.jsonl -o results.jsonl --trace trace.json    (open it at ui.perfetto.dev)\n"
    "  echo '{\"prompt\": \"The wolf\", \"n\": 3, \"stop\": \".\"}' | llm batch -f -\n";

/* ---- llm info ---------------------------------------------------------------------------- */

/* Create an engine that needs little memory and time, and show its program. Returns the exit
 * status. */
static int info_program(info *in) {
    llm_error err;
    llm_engine_options *o = &in->engine;
    if (chosen.device == DEVICE_AUTO) chosen.device = DEVICE_CPU;
    chosen.quiet = true;
    chosen.pack_weights = false;
    o->context_length = in->view.context = in->context;
    o->max_batch_tokens = in->view.tokens;
    o->max_sequences = 1;
    o->cache_type = in->cache_type;
    llm_engine *engine = create_engine(in->loaded, o, &err);
    if (!engine) return fail_with(&err);
    in->view.json = in->json;
    bool good = program_show(&in->view, engine, llm_file_path(in->file));
    free_engine(engine);
    return good ? 0 : FAILED;
}

static int command_info(const command *self, int argc, char **argv) {
    info in = {.cache_type = LLM_F16, .memory = UINT64_MAX, .engine = llm_engine_defaults()};
    const option options[] = {
        MODEL_OPTION(in.model),
        {0, "tensors", NULL, FLAG, &in.tensors, 0, 0, "list the tensors too"},
        {0, "check", NULL, FLAG, &in.check, 0, 0,
         "instead: read all weights, and say which are not finite"},
        {0, "memory", "SIZE", SIZE, &in.memory, 0, 0,
         "tell what fits in so much memory, such as 8G (default: this machine's)"},
        {'c', "context", "N", WHOLE, &in.context, 1, INT_MAX,
         "tokens of a whole sequence (default: the model's context)"},
        CACHE_TYPE_OPTION(in),
        JSON_OPTION(in.json),
        {0, "program", NULL, FLAG, &in.program, 0, 0,
         "instead: the operations of a step, with their bytes and arithmetic"},
        {0, "tokens", "N", WHOLE, &in.view.tokens, 1, 1 << 20,
         "... of so many tokens, the last of --context (default: 1, of up to 512)"},
        {0, "plan", NULL, FLAG, &in.view.plan, 0, 0, "... and what the device does together"},
        {0, "all", NULL, FLAG, &in.view.all, 0, 0, "... all layers, also where they are alike"},
        THREADS_OPTION(in.engine.n_threads), /* for the program; the default device is the CPU */
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status != PARSED) return status;
    if (!in.program && (in.view.tokens || in.view.plan || in.view.all))
        return misuse(self, "--tokens, --plan and --all go with --program");
    if (in.check && (in.program || in.tensors))
        return misuse(self, "--check goes without --program and --tensors");
    if (in.view.tokens == 0) in.view.tokens = 1;
    if (argc && in.model) return misuse(self, "two models: '%s' and '%s'", argv[0], in.model);
    if (in.memory == UINT64_MAX)
        in.memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    char *path = model_path(argc ? argv[0] : in.model);
    llm_error err;
    if (!path) return FAILED;
    in.file = llm_file_open(path, &err);
    if (!in.file) status = fail_with(&err);
    else {
        in.loaded = llm_model_load(path, &in.why);
        int most = in.loaded ? llm_model_config(in.loaded)->context_length : INT_MAX;
        const char *note = in.loaded ? llm_model_context_note(in.loaded) : "";
        if (in.loaded && in.context == 0) in.context = in.program && most > 512 ? 512 : most;
        if (in.context > most)
            status =
                fail("--context is %d: the model was trained for 1 to %d tokens%s%s", in.context,
                     most, *note ? "; " : "", note);
        else if (in.program && in.view.tokens > in.context)
            status = fail("--tokens is %d: they end at --context, %d", in.view.tokens, in.context);
        else if (in.program) status = in.loaded ? info_program(&in) : fail_with(&in.why);
        else if (in.check) status = info_check(&in);
        else if (in.json) info_print_json(&in), status = 0;
        else info_print(&in), status = 0;
    }
    llm_model_free(in.loaded);
    llm_file_close(in.file);
    free(path);
    return status;
}

static const char info_notes[] =
    "Any GGUF file or Hugging Face folder will do: where this engine cannot run the model, the "
    "end says why.\n"
    "\n"
    "Examples:\n"
    "  llm info\n"
    "  llm info some.gguf --tensors\n"
    "  llm info some.gguf --memory 8G --context 4096\n"
    "  llm info some.gguf --check       (exit status 1: it is damaged, or cannot be run)\n"
    "  llm info some.gguf --program --plan --tokens 512\n";

/* ---- llm tokenize -------------------------------------------------------------------------- */
typedef struct tokenizing {
    const char *model, *file;
    bool json, decode, bos, eos, special, pieces;
    const llm_tokenizer *tokenizer;
} tokenizing;

static unsigned tokenize_flags(const tokenizing *t) {
    return (t->bos ? LLM_TOKENIZE_BOS : 0) | (t->eos ? LLM_TOKENIZE_EOS : 0) | (t->special ? LLM_TOKENIZE_SPECIAL : 0);
}

/* Text in, ids out. */
static bool tokenize_text(const tokenizing *t, const char *data, size_t length) {
    int32_t *ids;
    int64_t n = tokenize(t->tokenizer, data, length, tokenize_flags(t), &ids);
    if (n >= 0 && t->json) put_ids(ids, n);
    for (int64_t i = 0; !t->json && i < n; i++) {
        put(t->pieces ? "%7d " : i ? " %d" : "%d", ids[i]);
        llm_string piece = llm_tokenizer_text(t->tokenizer, ids[i]);
        if (t->pieces) put_json(piece.data, piece.length), put_text("\n");
    }
    if (n >= 0 && !t->pieces) put_text("\n");
    free(ids);
    return n >= 0;
}

/* Ids in, text out. */
static bool tokenize_decode(const tokenizing *t, const char *data, size_t length) {
    llm_error err;
    int32_t *ids = NULL;
    int64_t n, bytes = -1;
    char *out = NULL;
    llm_json json = {0};
    bool good =
        t->json ? llm_json_parse(&json, data, length, NULL, NULL) && json_ids(json.nodes, &ids, &n)
                : parse_ids(data, length, &ids, &n);
    llm_json_free(&json);
    if (!good) {
        fail(t->json ? "the line is not a JSON array of token ids: %.*s" : "not a list of token ids: %.*s",
             length < 60 ? (int)length : 60, data);
    } else if ((bytes = llm_detokenize(t->tokenizer, ids, n, NULL, 0, &err)) < 0) {
        fail("%s, in %.*s", err.message, length < 60 ? (int)length : 60, data);
    } else {
        out = resize(NULL, (size_t)bytes);
        llm_detokenize(t->tokenizer, ids, n, out, (size_t)bytes, &err);
        if (t->json) put_json(out, (size_t)bytes), put_text("\n");
        else put_bytes(out, (size_t)bytes);
    }
    free(ids);
    free(out);
    return bytes >= 0;
}

/* One JSON value a line, and one line of answer to each, at once, so that a program can talk with us. */
static bool tokenize_lines(const tokenizing *t) {
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n;
    bool good = true;
    for (long number = 1; good && !output_error && (n = getline(&line, &capacity, stdin)) >= 0; number++) {
        const char *start = skip_space(line, line + n);
        size_t length = (size_t)(line + n - start);
        if (length == 0) continue;
        if (t->decode) {
            good = tokenize_decode(t, start, length);
        } else {
            llm_json json = {0};
            llm_string words;
            good = llm_json_parse(&json, start, length, NULL, NULL) &&
                   llm_json_string(json.nodes, &words);
            if (!good) fail("line %ld is not a JSON string", number);
            else good = tokenize_text(t, words.data, words.length);
            llm_json_free(&json);
        }
        flush_output();
    }
    if (good && ferror(stdin)) good = !fail("cannot read standard input: %s", strerror(errno));
    free(line);
    return good;
}

static bool tokenize_all(const tokenizing *t, int argc, char **argv) {
    if (t->json) return tokenize_lines(t);
    text words = {0};
    const char *path = t->file ? t->file : argc && strcmp(argv[0], "-") ? NULL : "-";
    bool good = true;
    if (path) good = read_all(path, &words);
    else
        for (int i = 0; i < argc; i++) append(&words, " ", i > 0), append(&words, argv[i], strlen(argv[i]));
    append(&words, "", 1);
    if (good) good = (t->decode ? tokenize_decode : tokenize_text)(t, words.data, words.length - 1);
    free(words.data);
    return good;
}

/* Where the vocabulary is. Of a folder the tokenizer.json will do, which the engine reads together with its neighbours: the weights may be
 * missing, or of a kind that is not read. */
static char *vocabulary_path(const char *given) {
    static const char name[] = "/tokenizer.json";
    char *path = model_path(given);
    text inside = {0};
    if (!path) return NULL;
    append(&inside, path, strlen(path));
    append(&inside, name, sizeof name);
    bool there = !access(inside.data, F_OK);
    free(there ? path : inside.data);
    return there ? inside.data : path;
}

static int command_tokenize(const command *self, int argc, char **argv) {
    tokenizing t = {0};
    const option options[] = {
        MODEL_OPTION(t.model),
        {'f', "file", "FILE", TEXT, &t.file, 0, 0, "read from a file"},
        {'d', "decode", NULL, FLAG, &t.decode, 0, 0, "the other way: ids to text"},
        {0, "bos", NULL, FLAG, &t.bos, 0, 0, "put the BOS token in front, if the model's file asks for it"},
        {0, "eos", NULL, FLAG, &t.eos, 0, 0, "put the EOS token behind, if the model's file asks for it"},
        {0, "special", NULL, FLAG, &t.special, 0, 0, "read <|endoftext|> and the like as special tokens"},
        {'p', "pieces", NULL, FLAG, &t.pieces, 0, 0, "one token a line, with its text as the vocabulary spells it"},
        {0, "json", NULL, FLAG, &t.json, 0, 0, "from each line of standard input, one JSON string, to one array of ids"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1000);
    if (status != PARSED) return status;
    if (argc && t.file) return misuse(self, "two texts: '%s' and --file %s", argv[0], t.file);
    if (t.json && (t.file || (argc && strcmp(argv[0], "-"))))
        return misuse(self, "--json reads standard input, and no other text");
    if (argc > 1 && !t.decode) return misuse(self, "one argument too many: '%s' (a text with spaces needs quotes)", argv[1]);
    if (t.pieces && (t.json || t.decode)) return misuse(self, "--pieces goes with neither --json nor --decode");
    char *path = vocabulary_path(t.model);
    if (!path) return FAILED;
    llm_error err;
    llm_file *file = llm_file_open(path, &err);
    llm_tokenizer *tokenizer = file ? llm_tokenizer_create(file, &err) : NULL;
    t.tokenizer = tokenizer;
    if (!tokenizer) status = fail_with(&err);
    else status = tokenize_all(&t, argc, argv) ? 0 : FAILED;
    llm_tokenizer_free(tokenizer);
    llm_file_close(file);
    free(path);
    return status;
}

static const char tokenize_notes[] =
    "Without TEXT, standard input is read. The model's file needs no weights, a vocabulary is enough: a GGUF file,\n"
    "a tokenizer.json, or a folder that holds one.\n"
    "With --json --decode each line is an array of ids, and the answer a string, in which a byte that is not\n"
    "part of UTF-8 becomes U+FFFD; without --json the bytes come out as they are.\n"
    "\n"
    "Examples:\n"
    "  llm tokenize \"Once upon a time\"\n"
    "  llm tokenize --pieces \"Once upon a time\"\n"
    "  llm tokenize -f tale.txt | llm tokenize --decode\n"
    "  echo '\"The wolf\"' | llm tokenize --json\n";

/* ---- The command itself ------------------------------------------------------------------ */
static const command run_command = {"run", "Continue a prompt.",
                                    "[-m FILE] [options] [PROMPT | -f FILE | -]", command_run,
                                    run_notes};
static const command batch_command = {
    "batch", "Continue many prompts at once, from a file into a file.",
    "-f PROMPTS.jsonl [-o RESULTS.jsonl] [-m FILE] [options]", command_batch, batch_notes};
static const command demo_command = {"demo", "Tell a tale with the bundled model.", "",
                                     command_demo, demo_notes};
static const command info_command = {
    "info", "What a model file holds, how much memory it takes, and what fits.", "[FILE] [options]",
    command_info, info_notes};
static const command tokenize_command = {"tokenize", "Text to token ids, and back.",
                                         "[-m FILE] [options] [TEXT | -f FILE | -]",
                                         command_tokenize, tokenize_notes};

static const command *const commands[] = {
    &run_command,   &chat_command,     &batch_command,      &demo_command,
    &info_command,  &tokenize_command, &perplexity_command, &quantize_command,
    &bench_command, &synth_command,    &lesson_command,     &ladder_command,
};

static void show_commands(void) {
    put_text("llm " VERSION
             " - a small LLM inference engine\n\nUsage: llm COMMAND [options]\n\nCommands:\n");
    for (int i = 0; i < COUNT(commands); i++)
        put("  %-12s %s\n", commands[i]->name, commands[i]->summary);
    put_text("\n  llm COMMAND --help   the options of a command, with examples\n"
             "  llm --version        the version\n"
             "\nExamples:\n"
             "  llm run \"Once upon a time\"\n"
             "  llm run -m some.gguf -n 100 \"The capital of France is\"\n"
             "  llm info some.gguf\n"
             "\nExit status: 0; 1: it failed or was stopped; 2: it was called wrongly.\n");
}

static int dispatch(int argc, char **argv) {
    if (argc < 2) {
        show_commands();
        return misuse(NULL, "a command is missing");
    }
    const char *name = argv[1];
    bool help = !strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help");
    if (!strcmp(name, "--version")) return put_text("llm " VERSION "\n"), 0;
    if (help && argc == 2) return show_commands(), 0;
    char help_option[] = "--help", *help_words[] = {help_option};
    if (help) name = argv[2];
    for (int i = 0; i < COUNT(commands); i++)
        if (!strcmp(name, commands[i]->name))
            return help ? commands[i]->run(commands[i], 1, help_words)
                        : commands[i]->run(commands[i], argc - 2, argv + 2);
    suggestion s = {name, NULL, 0};
    for (int i = 0; i < COUNT(commands); i++) consider(&s, commands[i]->name);
    const char *what = name[0] == '-' ? "option" : "command";
    if (s.best) return misuse(NULL, "unknown %s '%s'; did you mean '%s'?", what, name, s.best);
    return misuse(NULL, "unknown %s '%s'", what, name);
}

int main(int argc, char **argv) {
    int descriptor; /* if one of the standard three is closed, no file of ours may take its number
                     */
    while ((descriptor = open("/dev/null", O_RDONLY)) >= 0 && descriptor <= STDERR_FILENO) continue;
    if (descriptor > STDERR_FILENO) close(descriptor);
    if (argc > 0) program_path = argv[0];
    set_signals();
    chosen.gpu = llm_gpu_defaults();
    chosen.memory_share = llm_engine_defaults().memory_share;
    chosen.isa = LLM_ISA_BEST;
    chosen.pack_weights = true;
    chosen.fusions = LLM_FUSE_ALL;
    int status = dispatch(argc, argv);
    if (!flush_output()) {
        if (output_error != EPIPE)
            fprintf(stderr, "llm: cannot write to standard output: %s\n", strerror(output_error));
        return FAILED;
    }
    return status;
}
