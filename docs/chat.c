/* chat.c - llm chat: a conversation on a terminal or in a pipe. Lines are edited with libedit if it
 * is available (LLM_WITH_EDITLINE). */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "cli.h"

#include <errno.h>
#ifdef LLM_WITH_EDITLINE
#include <editline/readline.h>
#include <poll.h>
#else
#include <sys/select.h>
#endif
#include <unistd.h>

enum { CHAT_CONTEXT = 8192 };

typedef struct chat {
    const char *model, *system;
    text_list stop;
    llm_engine_options engine;
    llm_request request;
    llm_chat_options options;
    seed_value seed;
    speculation speculation;
    bool quiet;
    bool edits; /* read lines with a prompt, and with an editor if available */
    llm_model *loaded, *draft;
    llm_engine *running;
    llm_message *messages;   /* (n_messages) texts are released with free() */
    int n_messages;
    text answer;
    bool broken; /* the answer ended with an error */
    bool thinks;   /* the template opens a thought, so answers begin inside it */
    char stop_text[64];
    int turn;
} chat;

static void chat_add(chat *c, llm_role role, const char *data, size_t length) {
    char *copy = resize(NULL, length);
    if (length) memcpy(copy, data, length);
    c->messages = resize(c->messages, (size_t)(c->n_messages + 1) * sizeof *c->messages);
    c->messages[c->n_messages++] = (llm_message){role, copy, length};
}

static void chat_drop(chat *c, int index) {
    free((char *)c->messages[index].text);
    c->n_messages--;
    memmove(c->messages + index, c->messages + index + 1,
            (size_t)(c->n_messages - index) * sizeof *c->messages);
}

/* Begin a new conversation with the same system message. */
static void chat_reset(chat *c) {
    while (c->n_messages) chat_drop(c, c->n_messages - 1);
    if (c->system && *c->system) chat_add(c, LLM_ROLE_SYSTEM, c->system, strlen(c->system));
}

/* The token ids of the conversation. If they leave too little room for an answer, the oldest
 * messages are dropped. If the last message alone is too long, it is refused and nothing is
 * dropped. */
static bool chat_prompt(chat *c, int32_t **ids) {
    const llm_tokenizer *t = llm_model_tokenizer(c->loaded);
    int64_t context = llm_engine_settings(c->running)->context_length,
            room = context / 4 < 512 ? context / 4 : 512, n;
    int longest = llm_model_config(c->loaded)->context_length, n_kept = c->n_messages;
    int oldest = n_kept && c->messages[0].role == LLM_ROLE_SYSTEM;
    llm_message *kept = resize(NULL, (size_t)n_kept * sizeof *kept);
    llm_error err;
    memcpy(kept, c->messages, (size_t)n_kept * sizeof *kept);
    while ((n = llm_chat_tokenize_new(t, &c->options, kept, n_kept, ids, &err)) + room > context &&
           n_kept - oldest >= 3) {
        llm_free(*ids);
        n_kept -= 2; /* a question and its answer */
        memmove(kept + oldest, kept + oldest + 2, (size_t)(n_kept - oldest) * sizeof *kept);
    }
    free(kept);
    if (n < 0) return !fail_with(&err);
    if (n >= context)
        return !fail("this message alone makes a prompt of %lld tokens, even after /reset, and the "
                     "context holds %lld: send a shorter one%s",
                     (long long)n, (long long)context,
                     context < longest ? ", or start again with a larger --context" : "");
    if (n_kept < c->n_messages)
        fprintf(stderr,
                "llm: the oldest %d messages were forgotten, since the context holds %lld tokens\n",
                c->n_messages - n_kept, (long long)context);
    while (n_kept < c->n_messages) chat_drop(c, oldest);
    c->request.prompt = *ids;
    c->request.n_prompt = (int)n;
    return true;
}

/* Where the last occurrence of one of these words ends in a text; 0: none. */
static size_t last_word(const char *data, size_t length, const char *word) {
    size_t n = strlen(word);
    while (length >= n && memcmp(data + length - n, word, n)) length--;
    return length >= n ? length : 0;
}

/* Whether the answer is inside a thought now, which is printed dimmed. */
static bool chat_thinks(const chat *c) {
    size_t begun = last_word(c->answer.data, c->answer.length, "<think>"),
           ended = last_word(c->answer.data, c->answer.length, "</think>");
    return begun > ended || (c->thinks && !ended);
}

static void chat_take(chat *c, const llm_event *event) {
    bool dimmed = chat_thinks(c);
    append(&c->answer, event->text, event->text_length);
    if (dimmed || chat_thinks(c)) put_coloured(dim, event->text, event->text_length);
    else put_foreign(event->text, event->text_length);
    flush_output();
    if (event->finish == LLM_FINISH_LENGTH && !c->quiet) put_text(" ...");
    if (event->error) c->broken = !!fail("%s", event->error);
}

static void chat_figures(const chat *c, const llm_statistics *before, double start) {
    llm_statistics s = llm_engine_statistics(c->running);
    uint64_t tokens = s.generated_tokens - before->generated_tokens;
    double seconds = llm_seconds() - start;
    bool colour = in_colour(STDERR_FILENO);
    fprintf(stderr, "%s%d prompt tokens (%llu from the cache), %llu tokens in %.1f s%s\n",
            colour ? dim : "", c->request.n_prompt,
            (unsigned long long)(s.prefix_hits - before->prefix_hits), (unsigned long long)tokens,
            seconds, colour ? "\033[0m" : "");
}

/* Ctrl-C stops the answer, not the program; the partial answer stays in the conversation. */
static bool chat_answer(chat *c) {
    llm_error err;
    llm_event event;
    uint64_t id;
    int32_t *ids = NULL;
    llm_statistics before = llm_engine_statistics(c->running);
    double start = llm_seconds();
    bool stopped = false, good = chat_prompt(c, &ids);
    c->answer.length = 0;
    c->broken = false;
    c->request.sampling.seed = c->seed.value + (uint64_t)c->turn++;
    if (good && !llm_submit(c->running, &c->request, &id, &err)) good = !fail_with(&err);
    llm_free(ids);
    if (!good) return chat_drop(c, c->n_messages - 1), false;
    for (;;) {
        if (!stopped && (stop_requested || output_error)) {
            stopped = true;
            llm_cancel(c->running, id, NULL); /* fails if the request has just ended */
        } else if (llm_step(c->running, &err) <= 0) break;
        while (llm_next_event(c->running, &event)) chat_take(c, &event);
    }
    put_text("\n");
    if (err.status != LLM_OK) fail_with(&err);
    chat_add(c, LLM_ROLE_ASSISTANT, c->answer.data, c->answer.length);
    if (stop_requested == SIGINT) forget_interrupt();
    flush_output();
    if (!c->quiet) chat_figures(c, &before, start);
    return err.status == LLM_OK && !c->broken;
}

/* Write a JSON array of objects {"role": ..., "content": ...}, which other chat programs also
 * read. */
static void chat_save(const chat *c, const char *path) {
    static const char *const roles[] = {"system", "user", "assistant"};
    text t = {0};
    captured = &t;
    put_text("[\n");
    for (int i = 0; i < c->n_messages; i++) {
        put("  {\"role\": \"%s\", \"content\": ", roles[c->messages[i].role]);
        put_json(c->messages[i].text, c->messages[i].length);
        put_text(i + 1 < c->n_messages ? "},\n" : "}\n");
    }
    put_text("]\n");
    captured = NULL;
    FILE *file = fopen(path, "wb");
    bool good = file && fwrite(t.data, 1, t.length, file) == t.length;
    if (file && fclose(file)) good = false;
    if (!good) fail("cannot write %s: %s", path, strerror(errno));
    else if (!c->quiet) fprintf(stderr, "%d messages are in %s\n", c->n_messages, path);
    free(t.data);
}

static const char chat_commands[] =
    "/reset         begin a new conversation\n"
    "/system TEXT   begin a new one with this system message "
    "(without TEXT: print the present one)\n"
    "/save FILE     write the conversation to a file, as JSON\n"
    "/help          print this text\n"
    "/quit          leave (or Ctrl-D)\n"
    "A line that ends with \\ continues on the next line. // at the "
    "beginning is a / and no command.\n"
    "Ctrl-C stops the answer, or clears what was typed.\n";

/* Run a line that begins with a slash. False: leave the chat. */
static bool chat_obey(chat *c, const char *line) {
    size_t length = strcspn(line, " \t");
    const char *rest = line + length + strspn(line + length, " \t");
    bool bare = !*rest;
    if (!strcmp(line, "/quit") || !strcmp(line, "/exit")) return false;
    if (!strcmp(line, "/help")) {
        fputs(chat_commands, stderr);
    } else if (!strcmp(line, "/reset")) {
        chat_reset(c);
    } else if (length == 7 && !strncmp(line, "/system", 7) && bare) {
        if (c->system) fprintf(stderr, "%s\n", c->system);
        else fputs("there is no system message\n", stderr);
    } else if (length == 7 && !strncmp(line, "/system", 7)) {
        free((char *)c->system);
        c->system = strcpy(resize(NULL, strlen(rest) + 1), rest);
        chat_reset(c);
    } else if (length == 5 && !strncmp(line, "/save", 5) && !bare) {
        chat_save(c, rest);
    } else {
        fprintf(stderr, "llm: there is no command %.*s of this form; /help lists the commands\n",
                (int)length, line);
    }
    return true;
}

static ssize_t plain_line(char **line) {
    size_t capacity = 0;
    return getline(line, &capacity, stdin);
}

#ifdef LLM_WITH_EDITLINE
static struct { /* what the editor returned: its callback has no argument for user data */
    char *line;
    bool done;
} edited;

static void take_edited(char *line) {
    edited.line = line;
    edited.done = true;
    rl_callback_handler_remove();
}

/* This loop replaces readline(), which would continue to read after a signal. */
static ssize_t terminal_line(const char *prompt, char **line) {
    struct pollfd input = {STDIN_FILENO, POLLIN, 0};
    edited.line = NULL;
    edited.done = false;
    rl_callback_handler_install(prompt, take_edited);
    while (!edited.done && !stop_requested)
        if (poll(&input, 1, -1) > 0) rl_callback_read_char();
    if (!edited.done) rl_callback_handler_remove();
    if (edited.line && *edited.line) add_history(edited.line);
    *line = edited.line;
    return edited.line ? (ssize_t)strlen(edited.line) : -1;
}
#else
/* Wait for input or a signal. A signal that arrived before the call also ends the wait, unlike with
 * getline, because signals are blocked except while pselect waits. */
static void wait_for_typing(void) {
    sigset_t blocked, usual;
    fd_set typed;
    sigemptyset(&blocked), sigaddset(&blocked, SIGINT), sigaddset(&blocked, SIGTERM);
    FD_ZERO(&typed);
    FD_SET(STDIN_FILENO, &typed);
    sigprocmask(SIG_BLOCK, &blocked, &usual);
    if (!stop_requested) pselect(STDIN_FILENO + 1, &typed, NULL, NULL, NULL, &usual);
    sigprocmask(SIG_SETMASK, &usual, NULL);
}

static ssize_t terminal_line(const char *prompt, char **line) {
    put_text(prompt);
    flush_output();
    wait_for_typing();
    return stop_requested ? -1 : plain_line(line);
}
#endif

/* Append a line of standard input, without its newline, to `line`. On a terminal (edits), print a
 * prompt first, and let Ctrl-C empty the line. False: the input has ended. */
static bool read_typed(const char *prompt, bool edits, text *line) {
    char *data = NULL;
    ssize_t n = edits ? terminal_line(prompt, &data) : plain_line(&data);
    if (n > 0 && data[n - 1] == '\n') n--;
    if (n > 0 && data[n - 1] == '\r') n--;
    if (n > 0) append(line, data, (size_t)n);
    free(data);
    if (n < 0 && edits) {
        put_text("\n");
        flush_output();
    }
    if (n < 0 && edits && stop_requested == SIGINT) {
        clearerr(stdin);
        forget_interrupt();
        line->length = 0;
        return true;
    }
    return n >= 0;
}

/* Read a message: one line, or several if lines end with a backslash; zero-terminated. */
static bool chat_read(chat *c, text *line) {
    line->length = 0;
    bool more = read_typed("> ", c->edits, line);
    if (!more) return false;
    while (line->length && line->data[line->length - 1] == '\\') {
        line->data[line->length - 1] = '\n';
        if (!read_typed(". ", c->edits, line)) break;
    }
    append(line, "", 1);
    line->length--;
    return true;
}

static bool chat_talk(chat *c) {
    text line = {0};
    bool good = true;
    while (!stop_requested && !output_error && chat_read(c, &line)) {
        const char *message = line.data;
        if (message[0] == '/' && message[1] != '/') {
            if (!chat_obey(c, message)) break;
            continue;
        }
        message += message[0] == '/';
        if (!message[strspn(message, " \t\n")]) continue;
        chat_add(c, LLM_ROLE_USER, message, line.length - (size_t)(message - line.data));
        good = chat_answer(c) && good;
    }
    free(line.data);
    return good;
}

static int chat_model(chat *c) {
    const llm_tokenizer *t = llm_model_tokenizer(c->loaded);
    const char *name = c->options.template_name ? c->options.template_name : "the model's own";
    llm_string source = llm_chat_template_source(t, &c->options);
    int longest = llm_model_config(c->loaded)->context_length;
    llm_error err;
    chat_reset(c);
    chat_add(c, LLM_ROLE_USER, "?", 1); /* can the template format such a conversation? */
    int64_t n = llm_chat_render(t, &c->options, c->messages, c->n_messages, NULL, 0, &err);
    if (n < 0)
        return fail("%s%s", err.message, source.length ? "" : " (--template NAME)");
    char *probe = resize(NULL, (size_t)n);
    llm_chat_render(t, &c->options, c->messages, c->n_messages, probe, (size_t)n, &err);
    while (n && (probe[n - 1] == '\n' || probe[n - 1] == ' ')) n--;
    c->thinks = n && last_word(probe, (size_t)n, "<think>") == (size_t)n;
    free(probe);
    chat_reset(c);
    if (c->options.no_thinking && !last_word(source.data, source.length, "enable_thinking"))
        return fail("--no-thinking is for chat templates that know enable_thinking; this one, %s, "
                    "has no form for it: leave it out",
                    name);
    if (llm_chat_stop(t, &c->options, c->stop_text, sizeof c->stop_text)) {
        c->stop.items = resize(c->stop.items, (size_t)(c->stop.count + 1) * sizeof *c->stop.items);
        c->stop.items[c->stop.count++] = c->stop_text;
    }
    c->request.stop = c->stop.items;
    c->request.n_stop = c->stop.count;
    c->engine.draft = c->draft;
    c->engine.max_sequences = 1;
    if (!c->engine.context_length)
        c->engine.context_length = longest < CHAT_CONTEXT ? longest : CHAT_CONTEXT;
    chosen.quiet = c->quiet;
    c->running = create_engine(c->loaded, &c->engine, &err);
    if (!c->running) return fail_with(&err);
    if (!c->quiet) fprintf(stderr, "chat template: %s; /help lists the commands\n", name);
    bool good = chat_talk(c);
    free_engine(c->running);
    return good && stop_requested != SIGTERM ? 0 : FAILED;
}

static int command_chat(const command *self, int argc, char **argv) {
    chat c = {.engine = llm_engine_defaults(),
              .request = llm_request_defaults(),
              .options = llm_chat_defaults(),
              .speculation.depth = NO_DEPTH};
    llm_sampling *s = &c.request.sampling;
    s->temperature = 0.8f;
    s->top_p = 0.95f;
    c.request.max_tokens = -1;
    const option options[] = {
        MODEL_OPTION(c.model),
        {0, "template", "NAME", TEXT, &c.options.template_name, 0, 0,
         "chat template (default: the one in the file; 'help' lists all)"},
        {0, "system", "TEXT", TEXT, &c.system, 0, 0, "begin with this system message"},
        {0, "no-thinking", NULL, FLAG, &c.options.no_thinking, 0, 0,
         "answer without thinking first, if the template knows this"},
        {'n', "tokens", "N", WHOLE, &c.request.max_tokens, -1, INT_MAX,
         "at most N tokens in an answer (default -1: to the end of the context)"},
        SAMPLING_OPTIONS(*s, "-"),
        {'s', "seed", "N", SEED, &c.seed, 0, 0,
         "seed of the random numbers (default: a new one each time)"},
        STOP_OPTION(c.stop),
        THREADS_OPTION(c.engine.n_threads),
        {'c', "context", "N", WHOLE, &c.engine.context_length, 1, INT_MAX,
         "longest conversation (default: 8192, or the model's limit if that is less)"},
        SPECULATION_OPTIONS(c.speculation),
        CACHE_TYPE_OPTION(c.engine),
        {'q', "quiet", NULL, FLAG, &c.quiet, 0, 0, "print only the answers: no figures"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED) status = check_speculation(self, &c.speculation);
    if (status == PARSED && c.options.template_name && !strcmp(c.options.template_name, "help")) {
        for (int i = 0; llm_chat_template_at(i); i++) put("%s\n", llm_chat_template_at(i));
        status = 0;
    }
    if (status != PARSED) return free(c.stop.items), status;
    apply_speculation(&c.speculation, &c.engine, &c.request);
    if (!c.seed.given) c.seed.value = chance_seed();
    if (c.system) c.system = strcpy(resize(NULL, strlen(c.system) + 1), c.system);
    c.edits = is_terminal(STDIN_FILENO) && is_terminal(STDOUT_FILENO);
    char *path = model_path(c.model);
    status = path && load_models(path, c.speculation.path, &c.loaded, &c.draft) ? chat_model(&c)
                                                                                : FAILED;
    free(path);
    while (c.n_messages) chat_drop(&c, c.n_messages - 1);
    free(c.messages);
    free((char *)c.system);
    free(c.answer.data);
    free(c.stop.items);
    llm_model_free(c.loaded);
    llm_model_free(c.draft);
    return status;
}

static const char chat_notes[] =
    "Each line is a message. The answer goes to standard output as it is generated, and a line of\n"
    "figures to standard error. Lines that begin with / are commands: /reset, /system TEXT,\n"
    "/save FILE, /help, /quit. In a pipe there is no prompt.\n"
    "\n"
    "The special tokens around the messages come from the model's chat template; if it has none,\n"
    "name one with --template. Nothing in a message can stand for a special token.\n"
    "Earlier messages are in the cache and are not computed again.\n"
    "\n"
    "Examples:\n"
    "  llm chat -m some-instruct.gguf\n"
    "  llm chat -m some.gguf --template chatml --system \"You are a pirate.\"\n"
    "  echo \"Tell me a joke.\" | llm chat -m some-instruct.gguf --quiet\n";

const command chat_command = {"chat", "Talk with a model.", "[-m FILE] [options]", command_chat,
                              chat_notes};
