/* main.c - the `llm` command: a driver over the public calls of llm.h
 *
 * run, demo, info and tokenize are here; the table of all commands is at the end. Shared functions
 * are in docs/cli.c; the other commands are in docs/ (chat, batch, lesson, ladder), models/
 * (quantize, synth, perplexity) and tests/bench.c. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "docs/cli.h"
#include "models/info.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Read token ids separated by spaces or commas. False: the data contains something else. */
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
typedef struct figures { /* measurements of a run */
    double submitted, first, last; /* times of submission, first token, last token */
    uint64_t first_steps;          /* number of engine steps until the first token */
    uint64_t decode_tokens;        /* number of tokens that later steps generated */
    double cache_bytes;            /* bytes of keys and values that later steps read */
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
    int shown;  /* samples shown completely; the next one is shown as it is generated */
    int opened; /* samples shown at least in part */
    figures figures;
} run;

/* Read the prompt from the argument, the file or standard input. A file made by an editor ends with
 * a newline that is not part of the prompt; piped text is used as it is. */
static bool run_read_prompt(run *r, int argc, char **argv) {
    const char *path = r->file ? r->file : argc && !strcmp(argv[0], "-") ? "-" : NULL;
    if (!path) {
        if (argc) append(&r->prompt, argv[0], strlen(argv[0]));
        return true;
    }
    if (!read_all(path, &r->prompt)) return false;
    bool piped = !strcmp(path, "-");
    if (!piped && r->prompt.length && r->prompt.data[r->prompt.length - 1] == '\n')
        r->prompt.length--;
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

/* Print the new part of a sample's text, with accepted proposals in colour. */
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

/* Print new text: one sample as it is generated, then the next one. */
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

/* Generate until all samples have ended, or the user interrupts. */
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

typedef struct speeds { /* speeds computed from the figures; 0: unknown */
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
    if (r->draft) return s; /* passes and bytes of the draft are not counted */
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
            fprintf(stderr, " (though %s fit in the processor's cache)", HUMAN(step_bytes));
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

/* Choose the context length: the most tokens that this request can reach, so that a model with a
 * long context needs no huge cache. */
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
         "read the prompt from a file, without its final newline"},
        {'n', "tokens", "N", WHOLE, &r.request.max_tokens, -1, INT_MAX,
         "generate at most N tokens (-1: to the end of the context; default 512)"},
        SAMPLING_OPTIONS(*s, "-"),
        {'s', "seed", "N", SEED, &r.seed, 0, 0,
         "seed of the random numbers (default: a new one each time, which is printed)"},
        {0, "samples", "N", WHOLE, &r.request.n_samples, 1, 4096,
         "continue the prompt N times, all at once (default 1)"},
        STOP_OPTION(r.stop),
        {0, "ignore-end", NULL, FLAG, &r.request.ignore_end, 0, 0,
         "continue when the model ends the text"},
        {0, "special", NULL, FLAG, &r.special, 0, 0,
         "read special tokens such as <|endoftext|> in the prompt"},
        THREADS_OPTION(r.engine.n_threads),
        {'c', "context", "N", WHOLE, &r.engine.context_length, 1, INT_MAX,
         "longest sequence, with its prompt (default: as needed, up to the model's limit)"},
        SPECULATION_OPTIONS(r.speculation),
        NAIVE_OPTION(r.engine),
        CACHE_TYPE_OPTION(r.engine),
        CACHE_OPTION(r.engine, "as needed"),
        BLOCK_OPTION(r.engine),
        STEP_OPTION(r.engine),
        TRACE_OPTION(r.trace_path),
        JSON_OPTION(r.json),
        {'q', "quiet", NULL, FLAG, &r.quiet, 0, 0,
         "print only the new text: no prompt, no figures"},
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
    llm_free(r.ids);
    free(r.prompt.data);
    llm_model_free(r.loaded);
    llm_model_free(r.draft);
    return status;
}

static const char run_notes[] =
    "PROMPT is the text to continue. With - it is read from standard input, exactly as it is\n"
    "piped, including a newline at its end (printf adds none, echo adds one). Without a prompt\n"
    "the model begins by itself.\n"
    "\n"
    "The text goes to standard output as it is generated. Then a line of figures goes to\n"
    "standard error: prompt tokens, time to the first token, tokens per second after it, bytes of\n"
    "weights and cache read per second, and their share of this machine's memory bandwidth. On a\n"
    "terminal, accepted proposals (--draft, --lookup) are green.\n"
    "Ctrl-C stops; the figures then cover the text so far, and the exit status is 1.\n"
    "\n"
    "Examples:\n"
    "  llm run \"Once upon a time\"\n"
    "  llm run -m some.gguf -n 100 --temperature 0 \"The capital of France is\"\n"
    "  llm run --samples 3 --seed 7 \"There was a fox who\"\n"
    "  llm run --json --seed 1 -n 20 \"The wolf\" > wolf.json\n"
    "  llm run --draft models/tales-draft.gguf --speculate 4 \"The wolf\"\n"
    "  llm run --samples 3 --trace trace.json \"The wolf\"    (for ui.perfetto.dev)\n"
    "  git log -1 --format=%B | llm run -m some.gguf -\n";

static int command_demo(const command *self, int argc, char **argv) {
    char *words[] = {"Once upon a time"};
    int status = parse(self, NULL, 0, &argc, argv, 0);
    return status == PARSED ? command_run(self, 1, words) : status;
}

static const char demo_notes[] = "The same as: llm run \"Once upon a time\"\n";

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

/* Describe the device that --device names, if any. Returns the exit status. */
static int info_device(const info *in) {
    llm_error err;
    llm_device_state state;
    if (chosen.device == DEVICE_AUTO || chosen.device == DEVICE_CPU) return 0;
    llm_backend *device = open_device(&in->engine, &err);
    if (!device) return fail_with(&err);
    device->state(device->context, &state);
    put("%s: %s of memory", state.name, HUMAN(state.total_bytes));
    put(", %s free; ", HUMAN(state.free_bytes));
    if (state.proved)
        put("checked: %d kernel families, %.0f ms\n", state.proved, 1e3 * state.proof_seconds);
    else put_text("not checked\n");
    if (state.distrusted) put("wrong results, so other kernels are used: %s\n", state.distrusted);
    llm_backend_free(device);
    return 0;
}

static int command_info(const command *self, int argc, char **argv) {
    info in = {.cache_type = LLM_F16, .memory = UINT64_MAX, .engine = llm_engine_defaults()};
    const option options[] = {
        MODEL_OPTION(in.model),
        {0, "tensors", NULL, FLAG, &in.tensors, 0, 0, "also list the tensors"},
        {0, "check", NULL, FLAG, &in.check, 0, 0,
         "instead, read all weights, and say which are not finite"},
        {0, "memory", "SIZE", SIZE, &in.memory, 0, 0,
         "what fits into this much memory, such as 8G (default: that of this machine)"},
        {'c', "context", "N", WHOLE, &in.context, 1, INT_MAX,
         "tokens in a sequence (default: the model's context)"},
        CACHE_TYPE_OPTION(in),
        JSON_OPTION(in.json),
        {0, "program", NULL, FLAG, &in.program, 0, 0,
         "instead, list the operations of a step, with their bytes and arithmetic"},
        {0, "tokens", "N", WHOLE, &in.view.tokens, 1, 1 << 20,
         "--program: tokens in the step, at the end of --context (default: 1 of 512)"},
        {0, "plan", NULL, FLAG, &in.view.plan, 0, 0,
         "--program: also list the device's plan: its stages and barriers"},
        {0, "all", NULL, FLAG, &in.view.all, 0, 0,
         "--program: list all layers, even if they are alike"},
        THREADS_OPTION(in.engine.n_threads), /* for --program; the default device is the CPU */
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status != PARSED) return status;
    if (!in.program && (in.view.tokens || in.view.plan || in.view.all))
        return misuse(self, "--tokens, --plan and --all need --program");
    if (in.check && (in.program || in.tensors))
        return misuse(self, "--check cannot go with --program or --tensors");
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
                fail("--context is %d: the model supports 1 to %d tokens%s%s", in.context,
                     most, *note ? "; " : "", note);
        else if (in.program && in.view.tokens > in.context)
            status = fail("--tokens is %d, more than --context, %d", in.view.tokens, in.context);
        else if (in.program) status = in.loaded ? info_program(&in) : fail_with(&in.why);
        else if (in.check) status = info_check(&in);
        else if (in.json) info_print_json(&in), status = 0;
        else info_print(&in), status = info_device(&in);
    }
    llm_model_free(in.loaded);
    llm_file_close(in.file);
    free(path);
    return status;
}

static const char info_notes[] =
    "FILE is any GGUF file or Hugging Face folder. If this engine cannot run the model, the last\n"
    "line says why.\n"
    "\n"
    "Examples:\n"
    "  llm info\n"
    "  llm info some.gguf --tensors\n"
    "  llm info some.gguf --memory 8G --context 4096\n"
    "  llm info --device cuda           (also says whether the GPU gives correct results)\n"
    "  llm info some.gguf --check       (exit status 1: it is damaged, or cannot be run)\n"
    "  llm info some.gguf --program --plan --tokens 512\n";

/* ---- llm tokenize -------------------------------------------------------------------------- */
typedef struct tokenizing {
    const char *model, *file, *chat, *template_file;
    bool json, decode, bos, eos, special, pieces, render;
    llm_chat_options options;
    const llm_tokenizer *tokenizer;
} tokenizing;

static unsigned tokenize_flags(const tokenizing *t) {
    return (t->bos ? LLM_TOKENIZE_BOS : 0) | (t->eos ? LLM_TOKENIZE_EOS : 0) |
           (t->special ? LLM_TOKENIZE_SPECIAL : 0);
}

/* Print the ids of a text. */
static bool tokenize_text(const tokenizing *t, const char *data, size_t length) {
    int32_t *ids;
    llm_error err;
    int64_t n =
        t->chat ? llm_chat_tokenize_json(t->tokenizer, &t->options, data, length, &ids, &err)
                : llm_tokenize_new(t->tokenizer, data, length, tokenize_flags(t), &ids, &err);
    if (n < 0) fail_with(&err);
    if (n >= 0 && t->json) put_ids(ids, n);
    for (int64_t i = 0; !t->json && i < n; i++) {
        put(t->pieces ? "%7d " : i ? " %d" : "%d", ids[i]);
        llm_string piece = llm_tokenizer_text(t->tokenizer, ids[i]);
        if (t->pieces) put_json(piece.data, piece.length), put_text("\n");
    }
    if (n >= 0 && !t->pieces) put_text("\n");
    llm_free(ids);
    return n >= 0;
}

/* Print the text of a conversation. */
static bool tokenize_render(const tokenizing *t, const char *data, size_t length) {
    llm_error err;
    int64_t n = llm_chat_render_json(t->tokenizer, &t->options, data, length, NULL, 0, &err);
    if (n < 0) return !fail_with(&err);
    char *out = resize(NULL, (size_t)n);
    llm_chat_render_json(t->tokenizer, &t->options, data, length, out, (size_t)n, &err);
    put_bytes(out, (size_t)n);
    free(out);
    return true;
}

/* Print the text of a list of ids. */
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
        fail(t->json ? "the line is not a JSON array of token ids: %.*s"
                     : "not a list of token ids: %.*s",
             length < 60 ? (int)length : 60, data);
    } else if ((bytes = llm_detokenize_new(t->tokenizer, ids, n, &out, &err)) < 0) {
        fail("%s, in %.*s", err.message, length < 60 ? (int)length : 60, data);
    } else {
        if (t->json) put_json(out, (size_t)bytes), put_text("\n");
        else put_bytes(out, (size_t)bytes);
    }
    free(ids);
    llm_free(out);
    return bytes >= 0;
}

/* Read JSON values, one per line. Print each result at once, since another program may be waiting
 * for it. */
static bool tokenize_lines(const tokenizing *t) {
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n;
    bool good = true;
    for (long number = 1; good && !output_error && (n = getline(&line, &capacity, stdin)) >= 0;
         number++) {
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
    const char *path = t->chat ? t->chat : t->file ? t->file
                       : argc && strcmp(argv[0], "-") ? NULL : "-";
    bool good = true;
    if (path) good = read_all(path, &words);
    else
        for (int i = 0; i < argc; i++)
            append(&words, " ", i > 0), append(&words, argv[i], strlen(argv[i]));
    append(&words, "", 1);
    if (good)
        good = (t->decode ? tokenize_decode : t->render ? tokenize_render : tokenize_text)(
            t, words.data, words.length - 1);
    free(words.data);
    return good;
}

/* The path of the vocabulary. For a folder, it is that of tokenizer.json, which the engine reads
 * together with the other vocabulary files, so the weights may be missing or of an unsupported
 * type. */
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
        {'d', "decode", NULL, FLAG, &t.decode, 0, 0, "convert ids to text"},
        {0, "bos", NULL, FLAG, &t.bos, 0, 0,
         "begin with the BOS token, if the model's file asks for it"},
        {0, "eos", NULL, FLAG, &t.eos, 0, 0,
         "end with the EOS token, if the model's file asks for it"},
        {0, "special", NULL, FLAG, &t.special, 0, 0,
         "read special tokens such as <|endoftext|>"},
        {'p', "pieces", NULL, FLAG, &t.pieces, 0, 0,
         "print one token per line, with its text in the vocabulary"},
        {0, "json", NULL, FLAG, &t.json, 0, 0,
         "convert each line of standard input, a JSON string, to an array of ids"},
        {0, "chat", "FILE", TEXT, &t.chat, 0, 0,
         "convert a conversation: a JSON array of messages in OpenAI's form"},
        {0, "template", "NAME", TEXT, &t.options.template_name, 0, 0,
         "chat template (default: the one in the model's file)"},
        {0, "template-file", "FILE", TEXT, &t.template_file, 0, 0, "chat template (Jinja)"},
        {0, "render", NULL, FLAG, &t.render, 0, 0, "print the conversation as text, not as ids"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1000);
    if (status != PARSED) return status;
    if (argc && t.file) return misuse(self, "two texts: '%s' and --file %s", argv[0], t.file);
    if (t.json && (t.file || (argc && strcmp(argv[0], "-"))))
        return misuse(self, "--json reads standard input: give no other text");
    if (argc > 1 && !t.decode)
        return misuse(self, "one argument too many: '%s' (a text with spaces needs quotes)",
                      argv[1]);
    if (t.pieces && (t.json || t.decode))
        return misuse(self, "--pieces cannot be combined with --json or --decode");
    if (t.chat && (argc || t.file || t.json || t.decode))
        return misuse(self, "--chat has its own text: give no other, and no --json or --decode");
    if (!t.chat && (t.render || t.template_file || t.options.template_name))
        return misuse(self, "--template, --template-file and --render are for --chat");
    char *path = vocabulary_path(t.model);
    text source = {0};
    if (!path) return FAILED;
    if (t.template_file && !read_all(t.template_file, &source)) return free(path), FAILED;
    append(&source, "", 1);
    if (t.template_file) t.options.template_source = source.data;
    llm_error err;
    llm_file *file = llm_file_open(path, &err);
    llm_tokenizer *tokenizer = file ? llm_tokenizer_create(file, &err) : NULL;
    t.tokenizer = tokenizer;
    if (!tokenizer) status = fail_with(&err);
    else status = tokenize_all(&t, argc, argv) ? 0 : FAILED;
    llm_tokenizer_free(tokenizer);
    llm_file_close(file);
    free(path);
    free(source.data);
    return status;
}

static const char tokenize_notes[] =
    "Without TEXT, standard input is read. The model's file needs no weights, only a vocabulary:\n"
    "a GGUF file, a tokenizer.json, or a folder with one.\n"
    "With --json --decode, each line is an array of ids and the answer is a string; invalid UTF-8\n"
    "in it becomes U+FFFD. Without --json, all bytes stay as they are.\n"
    "\n"
    "Examples:\n"
    "  llm tokenize \"Once upon a time\"\n"
    "  llm tokenize --pieces \"Once upon a time\"\n"
    "  llm tokenize -f tale.txt | llm tokenize --decode\n"
    "  echo '\"The wolf\"' | llm tokenize --json\n"
    "  llm tokenize -m some-instruct.gguf --chat messages.json --render\n";

/* ---- The command itself ------------------------------------------------------------------ */
static const command run_command = {"run", "Continue a prompt.",
                                    "[-m FILE] [options] [PROMPT | -f FILE | -]", command_run,
                                    run_notes};
static const command demo_command = {"demo", "Tell a story with the bundled model.", "",
                                     command_demo, demo_notes};
static const command info_command = {
    "info", "Print what a model file contains, and how much memory it needs.", "[FILE] [options]",
    command_info, info_notes};
static const command tokenize_command = {"tokenize", "Convert text to token ids, or back.",
                                         "[-m FILE] [options] [TEXT | -f FILE | -]",
                                         command_tokenize, tokenize_notes};

static const command *const commands[] = {
    &run_command,   &chat_command,     &batch_command,      &serve_command,      &demo_command,
    &info_command,  &tokenize_command, &perplexity_command, &quantize_command,
    &bench_command, &synth_command,    &lesson_command,     &ladder_command,
};

static void show_commands(void) {
    put_text("llm " LLM_VERSION " - a small LLM inference engine\n"
             "Usage: llm COMMAND [options]\n\n");
    for (int i = 0; i < COUNT(commands); i++)
        put("  %-12s %s\n", commands[i]->name, commands[i]->summary);
    put_text("\n  llm COMMAND --help: the options of a command, with examples; llm --version\n"
             "\nExamples:\n"
             "  llm run \"Once upon a time\"\n"
             "  llm run -m some.gguf -n 100 \"The capital of France is\"\n"
             "Exit status: 0: success; 1: failed or stopped; 2: wrong arguments.\n");
}

static int dispatch(int argc, char **argv) {
    if (argc < 2) {
        show_commands();
        return misuse(NULL, "a command is missing");
    }
    const char *name = argv[1];
    bool help = !strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help");
    if (!strcmp(name, "--version")) return put_text("llm " LLM_VERSION "\n"), 0;
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
    int descriptor; /* open missing standard streams, so that no other file gets their number */
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
