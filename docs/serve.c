/* serve.c - llm serve: the options of the server in docs/examples/serve.c. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "cli.h"
#include "examples/serve.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

#ifdef LLM_WITH_MICROHTTPD
extern const unsigned char serve_page[]; /* docs/examples/serve.html, embedded by the Makefile */
extern const unsigned long serve_page_size;

typedef struct serving {
    const char *model, *key, *key_file, *log_file;
    llm_engine_options engine;
    serve_options server;
    speculation speculation;
    text keys;             /* contents of the key file; each key ends with a zero */
    const char **key_list; /* (server.n_keys) */
    char *name;            /* model name taken from the path */
    const char *path;
} serving;

static void add_key(serving *v, const char *key) {
    size_t n = (size_t)v->server.n_keys;
    v->key_list = resize(v->key_list, (n + 1) * sizeof *v->key_list);
    v->key_list[n] = key;
    v->server.keys = v->key_list;
    v->server.n_keys++;
}

/* Read one key per line; empty lines and lines that begin with # are ignored. */
static bool read_keys(serving *v) {
    if (v->key) add_key(v, v->key);
    if (!v->key_file) return true;
    if (!read_all(v->key_file, &v->keys)) return false;
    append(&v->keys, "\n", 2);
    for (char *line = v->keys.data, *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        if (end > line && end[-1] == '\r') end[-1] = 0;
        *end = 0;
        if (*line && *line != '#') add_key(v, line);
    }
    return v->server.n_keys || !fail("there is no key in %s", v->key_file);
}

/* The last part of the path, without its extension. */
static char *name_of(const char *path) {
    size_t n = strlen(path), start, end;
    while (n > 1 && path[n - 1] == '/') n--;
    for (start = n; start && path[start - 1] != '/'; start--) continue;
    end = n - start > 5 && !strncmp(path + n - 5, ".gguf", 5) ? n - 5 : n;
    char *name = resize(NULL, end - start + 1);
    memcpy(name, path + start, end - start);
    name[end - start] = 0;
    return name;
}

static bool is_loopback(const char *host) {
    return !strncmp(host, "127.", 4) || !strcmp(host, "::1") || !strcmp(host, "localhost");
}

static void tell_ready(void *serving_, const char *url) {
    const serving *v = serving_;
    fprintf(stderr, "%s: listening on %s, with OpenAI's API under %s/v1\n", v->server.model_name,
            url, url);
    if (!v->server.n_keys && !is_loopback(v->server.host))
        fprintf(stderr, "warning: anyone who can reach %s can use this server: --api-key protects "
                        "it\n", v->server.host);
}

static int serve_model(serving *v) {
    llm_error err;
    llm_model *model = NULL, *draft = NULL;
    char *path = model_path(v->model);
    bool good = path && read_keys(v) && load_models(path, v->speculation.path, &model, &draft);
    if (good) {
        v->path = path;
        if (!v->server.model_name) v->server.model_name = v->name = name_of(path);
        v->engine.draft = draft;
        v->engine.backend = open_device(&v->engine, &err);
        good = v->engine.backend || fail_with(&err) == 0;
    }
    if (good && v->log_file && !(v->server.log = fopen(v->log_file, "a")))
        good = !fail("cannot open %s: %s", v->log_file, strerror(errno));
    if (good) {
        v->server.stop = &stop_requested;
        v->server.ready = tell_ready;
        v->server.user = v;
        good = serve(model, &v->engine, &v->server, &err) || fail_with(&err) == 0;
    }
    if (v->log_file && v->server.log) fclose(v->server.log);
    llm_backend_free(v->engine.backend);
    llm_model_free(model);
    llm_model_free(draft);
    free(path);
    return good ? 0 : FAILED;
}
#endif

static int command_serve(const command *self, int argc, char **argv) {
#ifndef LLM_WITH_MICROHTTPD
    (void)argc, (void)argv;
    fprintf(stderr, "llm serve: this program was built without libmicrohttpd. Install it, then "
                    "build again:\n    sudo apt-get install -y libmicrohttpd-dev && make\n");
    (void)self;
    return FAILED;
#else
    serving v = {.engine = llm_engine_defaults(), .server = serve_defaults()};
    llm_request request = llm_request_defaults();
    float grace = 30, receive = 30;
    v.speculation.depth = NO_DEPTH;
    const option options[] = {
        MODEL_OPTION(v.model),
        {0, "host", "ADDRESS", TEXT, &v.server.host, 0, 0,
         "address to listen on (default 127.0.0.1: this machine only)"},
        {0, "port", "N", WHOLE, &v.server.port, 0, 65535,
         "port to listen on (default 8080; 0: any free one)"},
        {0, "api-key", "KEY", TEXT, &v.key, 0, 0, "accept only requests with this key"},
        {0, "api-key-file", "FILE", TEXT, &v.key_file, 0, 0, "the same, with a key on each line"},
        {0, "model-name", "NAME", TEXT, &v.server.model_name, 0, 0,
         "name of the model for clients (default: its file name)"},
        {0, "template", "NAME", TEXT, &v.server.chat.template_name, 0, 0,
         "chat template (default: the one in the file)"},
        {0, "no-thinking", NULL, FLAG, &v.server.chat.no_thinking, 0, 0,
         "Qwen 3: answer without a thinking section"},
        {0, "max-waiting", "N", WHOLE, &v.server.max_waiting, 0, 1 << 20,
         "requests that may wait; more are refused with 429 (default 256)"},
        {0, "max-connections", "N", WHOLE, &v.server.max_connections, 1, 1 << 16,
         "connections at a time (default 2048)"},
        {0, "receive-timeout", "SECONDS", REAL, &receive, 0.1, 3600,
         "time in which a client must send its request (default 30)"},
        {0, "cors", "ORIGIN", TEXT, &v.server.cors, 0, 0,
         "let pages of this origin call the server (*: any)"},
        {0, "log", "FILE", TEXT, &v.log_file, 0, 0,
         "append a JSON line per request to this file (default: standard error)"},
        {0, "page-controls", NULL, FLAG, &v.server.page_controls, 0, 0,
         "let the page at / restart the engine, even for other machines"},
        {0, "grace", "SECONDS", REAL, &grace, 0, 86400,
         "time for running requests when the server ends (default 30)"},
        {'c', "context", "N", WHOLE, &v.engine.context_length, 1, INT_MAX,
         "longest sequence, with its prompt (default: the model's limit)"},
        THREADS_OPTION(v.engine.n_threads),
        SPECULATION_OPTIONS(v.speculation),
        SCHEDULE_OPTIONS(v.engine),
        CACHE_TYPE_OPTION(v.engine),
        CACHE_OPTION(v.engine, "for all sequences"),
        BLOCK_OPTION(v.engine),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED) status = check_speculation(self, &v.speculation);
    if (status != PARSED) return status;
    apply_speculation(&v.speculation, &v.engine, &request);
    v.server.page = serve_page;
    v.server.page_size = serve_page_size;
    v.server.speculate = request.speculate;
    v.server.branches = request.branches;
    v.server.lookup = request.lookup;
    v.server.grace_seconds = (double)grace;
    v.server.receive_seconds = (double)receive;
    status = serve_model(&v);
    free(v.key_list);
    free(v.keys.data);
    free(v.name);
    return status;
#endif
}

static const char serve_notes[] =
    "The server speaks OpenAI's API: POST /v1/chat/completions and /v1/completions (with\n"
    "streams), GET /v1/models; also POST /tokenize and /detokenize, GET /health, /version and\n"
    "/metrics (for Prometheus, with vLLM's names). All requests share the steps of one engine,\n"
    "and the page at / shows it at work: open the printed address in a browser.\n"
    "Ctrl-C or SIGTERM ends it: running requests get --grace seconds. A second one ends it at\n"
    "once. The exit status is 0 after an orderly end.\n"
    "\n"
    "Examples:\n"
    "  llm serve -m some.gguf --port 8000\n"
    "  curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\\n"
    "       -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 50}'\n"
    "  llm serve -m some.gguf --host 0.0.0.0 --api-key-file keys.txt --max-sequences 64\n";

const command serve_command = {"serve", "Answer requests over HTTP, with OpenAI's API.",
                               "[-m FILE] [options]", command_serve, serve_notes};
