/* batch.c - llm batch: continue many prompts, from one file of JSON lines to another
 *
 * Lines are read as the engine has room for them. Their results are written in the same order, each
 * as one whole line. So the output always holds the results of the first lines, perhaps followed by
 * an incomplete line. A later run reads the output along with the input, removes the incomplete
 * line, and continues after the last result. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_COMPLAINTS = 20 }; /* most bad lines to report on standard error */

typedef struct batch_line { /* a line of the input, kept until its result is written */
    struct batch_line *next;
    uint64_t number; /* number of the line, from 1 */
    uint64_t hash;   /* hash of the line: see hash_line */
    uint64_t end;    /* offset in the input of the byte after the line */
    text id;         /* JSON value to repeat in the output; empty: none */
    text error;      /* what is wrong with the line; empty: nothing */
    llm_request request; /* before submission, it points into the fields below */
    text prompt;
    int32_t *given;  /* (n_ids) the prompt's ids, if the line has "tokens" */
    int32_t *ids;    /* (n_ids) the prompt's ids, if the line has "prompt" */
    int64_t n_ids;
    text_list stop;
    sample *samples; /* (n_samples) */
    int n_live;      /* number of samples that have not ended */
    double submitted, first, last; /* times of submission, first and last token */
} batch_line;

typedef struct batch {
    const char *model, *in_path, *out_path, *trace_path;
    trace_writer *trace;
    llm_engine_options engine_options;
    llm_request request; /* default for values that a line does not set */
    speculation speculation;
    text_list stop;
    seed_value seed;
    bool special, logprobs, no_timings, quiet;
    llm_model *loaded, *draft;
    llm_engine *engine;
    line_reader input;
    uint64_t input_bytes;     /* size of the input; 0: unknown */
    int out;                  /* file descriptor of the output */
    bool out_is_file;         /* --output names a plain file */
    double synced;            /* time of the last fsync of the output */
    batch_line *first, *last; /* list of lines read but not yet written */
    int n_held;               /* number of lines in this list */
    int n_running;            /* number of these that are in the engine */
    int n_unfit;              /* number of these refused since they cannot fit */
    uint64_t n_lines;         /* number of lines written */
    uint64_t n_bad;           /* number of results that are errors */
    uint64_t n_skipped;       /* number of results of earlier runs */
    uint64_t n_prompt_tokens, n_tokens;
    double began;             /* start time of the run */
    double share;             /* share of the input that is done; NAN: unknown */
} batch;

/* ---- A line of the input ------------------------------------------------------------------ */

/* The text of the value that begins at p, in well-formed JSON. */
static llm_string json_source(const char *p, const char *end) {
    const char *start = p;
    int depth = 0;
    bool quoted = false;
    do {
        if (quoted && *p == '\\') p++; /* also skip the escaped character */
        else if (*p == '"') quoted = !quoted;
        else if (!quoted) depth += (*p == '[' || *p == '{') - (*p == ']' || *p == '}');
        p++;
    } while (p < end && (quoted || depth || !strchr(",]} \t\r\n", *p)));
    return (llm_string){start, (size_t)(p - start)};
}

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
            return line_wrong(l, "stop needs a string that is not empty, or an array of them");
        append(&stop, words.data, words.length);
        append(&stop, "", 1);
        l->stop.items = resize(l->stop.items, (size_t)(l->stop.count + 1) * sizeof *l->stop.items);
        l->stop.items[l->stop.count++] = stop.data;
    }
    return true;
}

/* Set an option from a value, with the same checks as on the command line. source: the text of the
 * value in the line. */
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

/* The index of a key: first the other keys, then the options. -1: the key is unknown, and the error
 * is set. */
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
        return json_ids(value, &l->given, &l->n_ids) ||
               line_wrong(l, "tokens needs an array of token ids");
    default: return read_option(l, &options[key - N_OTHER_KEYS], value, source);
    }
}

/* Read the object of a line. Sets a bit in *seen for each of its keys. */
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

/* Make the request for a line. */
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
        {0, "branches", NULL, WHOLE, &r->branches, 1, LLM_MOST_BRANCHES, ""},
        {0, "lookup", NULL, FLAG, &r->lookup, 0, 0, ""},
        {0, "ignore_end", NULL, FLAG, &r->ignore_end, 0, 0, ""},
    };
    if (!read_object(l, options, COUNT(options), data, length, &seen)) return false;
    bool prompt = seen >> KEY_PROMPT & 1, tokens = seen >> KEY_TOKENS & 1;
    if (prompt == tokens)
        return line_wrong(l, prompt ? "it has both prompt and tokens: give one of them"
                                    : "it has neither prompt nor tokens: give one of them");
    if (prompt)
        l->n_ids = prompt_ids(llm_model_tokenizer(b->loaded), &l->prompt, b->special, &l->ids);
    if (l->n_ids <= 0)
        return line_wrong(l, "the prompt is empty%s",
                          prompt ? ", and this model has no BOS token to begin with" : "");
    if (seed.given) r->sampling.seed = seed.value;
    if (r->speculate == NO_DEPTH) r->speculate = r->lookup || b->draft ? LLM_SPECULATE_AUTO : 0;
    if (seen >> KEY_STOP & 1) {
        r->stop = l->stop.items;
        r->n_stop = l->stop.count;
    }
    r->prompt = prompt ? l->ids : l->given;
    r->n_prompt = l->n_ids < INT_MAX ? (int)l->n_ids : INT_MAX;
    r->user = l;
    return true;
}

/* A hash of a line and of everything else that determines its result, to detect that the input or
 * the options have changed. */
static uint64_t hash_line(const batch *b, const char *data, size_t n) {
    const llm_request *r = &b->request;
    const llm_sampling *s = &r->sampling;
    char options[256];
    int length =
        snprintf(options, sizeof options, "%llu %d %d %d %d %d %llu %g %d %g %g %g %d",
                 (unsigned long long)llm_file_size(llm_model_file(b->loaded)),
                 b->engine_options.context_length, (int)b->engine_options.cache_type, r->max_tokens,
                 r->ignore_end, b->special, (unsigned long long)b->seed.value,
                 (double)s->temperature, s->top_k, (double)s->top_p, (double)s->min_p,
                 (double)s->repetition_penalty, s->penalty_window);
    uint64_t hash = hash_bytes(0xCBF29CE484222325u, options, (size_t)length);
    for (int i = 0; i < b->stop.count; i++)
        hash = hash_bytes(hash, b->stop.items[i], strlen(b->stop.items[i]) + 1);
    return hash_bytes(hash, data, n);
}

/* Free what is not needed after the request was submitted. */
static void free_line_input(batch_line *l) {
    for (int i = 0; i < l->stop.count; i++) free((char *)l->stop.items[i]);
    free(l->stop.items);
    llm_free(l->ids);
    free(l->given);
    free(l->prompt.data);
    l->stop = (text_list){0};
    l->ids = l->given = NULL;
    l->prompt = (text){0};
}

static void free_line(batch_line *l) {
    free_line_input(l);
    free_samples(l->samples, l->request.n_samples);
    free(l->id.data);
    free(l->error.data);
    free(l);
}

/* ---- The output --------------------------------------------------------------------------- */

static void put_record(const batch *b, const batch_line *l) {
    put("{\"line\": %llu, \"hash\": \"%016llx\"", (unsigned long long)l->number,
        (unsigned long long)l->hash);
    if (l->error.length) put_text(", \"error\": "), put_json(l->error.data, l->error.length);
    if (l->id.length) put_text(", \"id\": "), put_bytes(l->id.data, l->id.length);
    for (int i = 0; !l->error.length && i < l->request.n_samples; i++) {
        const sample *s = &l->samples[i];
        put_text(i ? ", {\"text\": " : ", \"samples\": [{\"text\": ");
        put_json(s->text.data, s->text.length);
        put_text(", \"tokens\": [");
        for (int k = 0; k < s->n_tokens; k++) put(k ? ", %d" : "%d", s->tokens[k].id);
        if (b->logprobs) put_text("], \"logprobs\": [");
        for (int k = 0; b->logprobs && k < s->n_tokens; k++)
            put_text(k ? ", " : ""), put_number((double)s->tokens[k].logprob);
        put("], \"finish_reason\": \"%s\"}", llm_finish_name(s->finish));
    }
    if (!l->error.length) {
        put("], \"prompt_tokens\": %d, \"seed\": %llu", l->request.n_prompt,
            (unsigned long long)l->request.sampling.seed);
        if (!b->no_timings)
            put(", \"ttft_seconds\": %.6f, \"seconds\": %.6f", l->first - l->submitted,
                l->last - l->submitted);
    }
    put_text("}\n");
}

/* Remove the last n bytes of the output if it is a file: an incomplete line, left when the disk is
 * full. */
static void take_back(const batch *b, size_t n) {
    struct stat status;
    off_t end = lseek(b->out, 0, SEEK_CUR); /* also right if the file was opened to append */
    if (n == 0 || fstat(b->out, &status) != 0 || !S_ISREG(status.st_mode)) return;
    if (end >= (off_t)n && ftruncate(b->out, end - (off_t)n) == 0)
        lseek(b->out, end - (off_t)n, SEEK_SET);
}

/* Write a whole line. If that fails and the output is a file, remove the partial line. */
static bool write_line(batch *b, const text *line) {
    size_t done = 0;
    while (done < line->length) {
        ssize_t n = write(b->out, line->data + done, line->length - done);
        if (n >= 0) done += (size_t)n;
        else if (errno != EINTR) break;
    }
    if (done == line->length) return true;
    int error = errno;
    take_back(b, done);
    if (b->out == STDOUT_FILENO) output_error = error; /* main reports it */
    else fail("cannot write to %s: %s", b->out_path, strerror(error));
    return false;
}

/* Report a bad line. */
static void complain(const batch *b, const batch_line *l) {
    if (b->n_bad > MOST_COMPLAINTS) return;
    show_progress("batch", -1, "");
    fail("%s, line %llu: %s", b->in_path, (unsigned long long)l->number, l->error.data);
    if (b->n_bad == MOST_COMPLAINTS) fail("... and so on; the output has the other errors");
}

static void batch_progress(const batch *b) {
    char note[96];
    snprintf(note, sizeof note, "%llu lines, %.1f tokens/s",
             (unsigned long long)(b->n_lines + b->n_skipped),
             (double)b->n_tokens / (llm_seconds() - b->began));
    if (!b->quiet) show_progress("batch", b->share, note);
}

/* Write the results of all lines up to the first one that is not done. */
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
        if (b->input_bytes) b->share = (double)l->end / (double)b->input_bytes;
        free_line(l);
        double now = llm_seconds();
        if (b->out_is_file && now - b->synced > 5) fsync(b->out), b->synced = now;
    }
    return true;
}

/* ---- Continuing where an earlier run ended -------------------------------------------------- */

static bool is_blank(const char *line, size_t length) {
    return skip_space(line, line + length) == line + length;
}

/* Skip the input up to the line of a result, and check that the result belongs to this line. */
static bool skip_to(batch *b, uint64_t number, uint64_t hash) {
    const char *line;
    size_t length;
    while (b->input.number < number) {
        if (next_line(&b->input, true, &line, &length) != LINE)
            return !fail("%s has a result for line %llu, and %s has no such line: the input has "
                         "changed; remove the output, or give another path",
                         b->out_path, (unsigned long long)number, b->in_path);
        bool due = b->input.number == number;
        if (due ? hash_line(b, line, length) == hash : is_blank(line, length)) continue;
        return !fail("%s, line %llu is not what the result in %s was made from (or the model or "
                     "the options have changed): remove the output, or give another path",
                     b->in_path, (unsigned long long)b->input.number, b->out_path);
    }
    return true;
}

/* Skip the lines that have a result in the output, and remove an incomplete last line of the
 * output. */
static bool skip_done(batch *b) {
    line_reader old = {.file = b->out};
    const char *line;
    size_t length;
    uint64_t whole = 0; /* bytes in whole lines */
    bool good = true;
    while (good && next_line(&old, true, &line, &length) == LINE && !old.torn) {
        char head[96], after = 0;
        unsigned long long number = 0, hash = 0;
        snprintf(head, sizeof head, "%.*s", length < 95 ? (int)length : 95, line);
        good =
            sscanf(head, "{\"line\": %llu, \"hash\": \"%16llx\"%c", &number, &hash, &after) == 3 &&
            number > b->input.number;
        if (!good)
            fail("%s, line %llu is not a result of llm batch: give another path", b->out_path,
                 (unsigned long long)old.number);
        good = good && skip_to(b, number, hash);
        b->n_skipped++;
        b->n_bad += strstr(head, ", \"error\":") != NULL;
        whole = old.offset;
    }
    if (good && old.error) good = !fail("cannot read %s: %s", b->out_path, strerror(old.error));
    free(old.buffer.data);
    if (good && old.torn && ftruncate(b->out, (off_t)whole) != 0)
        good = !fail("cannot remove the incomplete last line of %s: %s", b->out_path,
                     strerror(errno));
    return good && !stop_requested;
}

/* Lock the output against other processes, if the file system supports locks. */
static bool lock_output(const batch *b) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(b->out, F_SETLK, &lock) == 0 || (errno != EACCES && errno != EAGAIN)) return true;
    return !fail("another llm is writing to %s", b->out_path);
}

static bool open_files(batch *b) {
    struct stat in, out;
    bool from_stdin = !strcmp(b->in_path, "-");
    b->input.file = from_stdin ? STDIN_FILENO : open(b->in_path, O_RDONLY);
    if (b->input.file < 0 || fstat(b->input.file, &in) != 0)
        return !fail("cannot read %s: %s", b->in_path, strerror(errno));
    if (from_stdin) b->in_path = "standard input";
    if (S_ISREG(in.st_mode)) b->input_bytes = (uint64_t)in.st_size;
    b->out = STDOUT_FILENO;
    if (!strcmp(b->out_path, "-")) return true;
    bool same = stat(b->out_path, &out) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino;
    if (same)
        return !fail("input and output are the same file, %s: give another path to write to",
                     b->out_path);
    b->out = open(b->out_path, O_RDWR | O_CREAT | O_APPEND, 0666);
    if (b->out < 0 || fstat(b->out, &out) != 0)
        return !fail("cannot write to %s: %s", b->out_path, strerror(errno));
    b->out_is_file = S_ISREG(out.st_mode);
    return !b->out_is_file || (lock_output(b) && skip_done(b));
}

/* ---- The engine --------------------------------------------------------------------------- */

/* Add a line to the list, and submit its request unless it is bad. False: the batch must end. */
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
    b->n_unfit += !good && err.status == LLM_ERROR_CAPACITY;
    if (!good) return err.status != LLM_ERROR_MEMORY || !fail_with(&err);
    l->samples = make_samples(l->request.n_samples);
    l->n_live = l->request.n_samples;
    b->n_running++;
    b->n_prompt_tokens += (uint64_t)l->request.n_prompt;
    return true;
}

/* Read just enough lines to keep the engine busy, so that the input may be larger than memory. */
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
    return b->input.ended ||
           !fail("%s, line %llu is too long", b->in_path, (unsigned long long)b->input.number + 1);
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

/* Before the work starts: warn if most of the lines that have been read cannot fit. */
static void warn_unfit(const batch *b) {
    if (b->n_held < 2 || 2 * b->n_unfit <= b->n_held) return;
    fail("warning: %d of the first %d lines do not fit into the context or the cache, and get an "
         "error instead of a result (a larger --context or --cache-memory may help)",
         b->n_unfit, b->n_held);
}

static bool batch_run(batch *b) {
    bool more = true, started = false;
    b->began = b->synced = llm_seconds();
    b->share = b->input_bytes ? 0 : NAN;
    while (!stop_requested && (more || b->n_held > 0)) {
        if (!feed(b, &more)) return false;
        if (!started) warn_unfit(b);
        started = true;
        if (!write_finished(b)) return false;
        if (b->n_running > 0 && !take_events(b)) return false;
        batch_progress(b);
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
    fprintf(stderr,
            "; %llu prompt tokens, %.0f %% of them cached; %llu tokens in %.2f s = %.1f tokens/s",
            (unsigned long long)b->n_prompt_tokens,
            s.prefix_tokens ? 100 * (double)s.prefix_hits / (double)s.prefix_tokens : 0.0,
            (unsigned long long)b->n_tokens, seconds, (double)b->n_tokens / seconds);
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
    if (b->out_is_file && fsync(b->out) != 0 && good)
        good = !fail("cannot write to %s: %s", b->out_path, strerror(errno));
    if (good && !b->quiet) batch_print_figures(b);
    if (good && stop_requested)
        fail("stopped, with %llu lines done%s", (unsigned long long)(b->n_lines + b->n_skipped),
             b->out_is_file ? "; the same command continues from there" : "");
    return good && !stop_requested && b->n_bad == 0 ? 0 : FAILED;
}

static int command_batch(const command *self, int argc, char **argv) {
    batch b = {.engine_options = llm_engine_defaults(),
               .request = llm_request_defaults(),
               .speculation.depth = NO_DEPTH,
               .out_path = "-",
               .out = -1,
               .input.file = -1};
    llm_engine_options *e = &b.engine_options;
    llm_sampling *s = &b.request.sampling;
    s->temperature = 0.8f;
    s->top_p = 0.95f;
    b.request.max_tokens = 512;
    const option options[] = {
        MODEL_OPTION(b.model),
        {'f', "file", "FILE", TEXT, &b.in_path, 0, 0,
         "read the prompts from a file of JSON lines (-: standard input)"},
        {'o', "output", "FILE", TEXT, &b.out_path, 0, 0,
         "append the results to a file (default -: standard output)"},
        {'n', "tokens", "N", WHOLE, &b.request.max_tokens, -1, INT_MAX,
         "generate at most N tokens (-1: to the end of the context; default 512)"},
        SAMPLING_OPTIONS(*s, "-"),
        {'s', "seed", "N", SEED, &b.seed, 0, 0,
         "seed line i with N + i, unless the line has a seed (default 0)"},
        STOP_OPTION(b.stop),
        {0, "ignore-end", NULL, FLAG, &b.request.ignore_end, 0, 0,
         "continue when the model ends the text"},
        {0, "special", NULL, FLAG, &b.special, 0, 0,
         "read special tokens such as <|endoftext|> in prompts"},
        {0, "logprobs", NULL, FLAG, &b.logprobs, 0, 0,
         "also write the log-probability of each token"},
        {0, "no-timings", NULL, FLAG, &b.no_timings, 0, 0,
         "write no times, so that the same input gives the same bytes"},
        SPECULATION_OPTIONS(b.speculation),
        THREADS_OPTION(e->n_threads),
        {'c', "context", "N", WHOLE, &e->context_length, 1, INT_MAX,
         "longest sequence, with its prompt (default: the model's limit)"},
        CACHE_TYPE_OPTION(*e),
        CACHE_OPTION(*e, "what all sequences need"),
        BLOCK_OPTION(*e),
        SCHEDULE_OPTIONS(*e),
        TRACE_OPTION(b.trace_path),
        {'q', "quiet", NULL, FLAG, &b.quiet, 0, 0, "print no progress and no figures"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED && !b.in_path) status = misuse(self, "the prompts are missing: -f FILE");
    if (status == PARSED) status = check_speculation(self, &b.speculation);
    if (status == PARSED) status = check_trace_name(self, b.trace_path);
    if (status == PARSED) {
        b.request.stop = b.stop.items;
        b.request.n_stop = b.stop.count;
        apply_speculation(&b.speculation, e, &b.request);
        if (b.speculation.depth == NO_DEPTH)
            b.request.speculate = NO_DEPTH; /* unless a line sets it */
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
    "Input: a JSON object per line, with \"prompt\" (a string) or \"tokens\" (an array of ids).\n"
    "Optional keys, for values that differ from the options above: max_tokens, temperature,\n"
    "top_k, top_p, min_p, repetition_penalty, penalty_window, seed, stop (a string or an array),\n"
    "n (samples), priority, speculate (a number or \"auto\"), lookup and ignore_end. The key id\n"
    "may have any value, which is repeated in the output. Blank lines are skipped, but counted.\n"
    "\n"
    "Output: a JSON object per line, in the order of the input, with line (from 1), hash (of the\n"
    "input line and the options), id, samples (text, tokens, logprobs, and finish_reason: end,\n"
    "length or stop), prompt_tokens, seed, ttft_seconds and seconds. The result of a bad line has\n"
    "line, hash and error instead; the error also goes to standard error, the other lines are\n"
    "computed anyway, and the exit status is 1.\n"
    "\n"
    "If the output already has results, of a run that was stopped, the batch continues\n"
    "after them. It refuses to if their input lines or the options have changed.\n"
    "\n"
    "Examples:\n"
    "  llm batch -f prompts.jsonl -o results.jsonl\n"
    "  llm batch -f prompts.jsonl -o results.jsonl --max-sequences 64 --temperature 0 -n 100\n"
    "  llm batch -f prompts.jsonl -o results.jsonl --trace trace.json   (for ui.perfetto.dev)\n"
    "  echo '{\"prompt\": \"The wolf\", \"n\": 3, \"stop\": \".\"}' | llm batch -f -\n";

const command batch_command = {"batch", "Continue many prompts at once, from one file to another.",
                               "-f PROMPTS.jsonl [-o RESULTS.jsonl] [-m FILE] [options]",
                               command_batch, batch_notes};
