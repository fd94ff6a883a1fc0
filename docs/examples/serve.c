/* serve.c - a server with OpenAI's HTTP API, over the public calls of llm.h and libmicrohttpd
 *
 * Two threads do the work:
 *
 *     libmicrohttpd's thread    reads requests, checks them, turns text into tokens; sends what is
 *                               in each call's `out`
 *     the engine's thread       submits calls to the engine, runs its steps, and turns its events
 *                               into the text of `out`
 *
 * A call is one HTTP request. While it has nothing to send, its connection is suspended, which
 * costs no thread; the engine's thread resumes it. One lock guards what both threads use.
 *
 * buffer.h has the growing text in which JSON is written, view.h the picture of the engine that the
 * page draws.
 *
 * CONTENTS
 *     [1] Calls       what the server knows of a request
 *     [2] Parsing     a request's JSON becomes a call, or a refusal
 *     [3] Answering   an engine's event becomes a chunk of a stream, or part of an answer
 *     [4] Watching    the engine's state, from its trace, for the page
 *     [5] The engine  submit, step, cancel; pause, single steps, other settings
 *     [6] Metrics     in Prometheus' format, with vLLM's names
 *     [7] HTTP        routes and connections
 *     [8] serve */
#ifdef LLM_WITH_MICROHTTPD
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "serve.h"
#include "view.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_WATCHERS = 64 };
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* =====================================================================================
 * [1] Calls
 * ================================================================================== */

typedef enum endpoint { COMPLETIONS, CHAT, OTHER } endpoint;

typedef struct call call;
typedef struct server server;

/* The settings that POST /engine/control changes; -1: unchanged. */
typedef struct control {
    int paused, steps;       /* steps: to run, then pause */
    int pace;                /* most steps per second; 0: no limit */
    int prefix_cache, chunked_prefill, speculation, block_size, cache_tokens; /* as in `tuning` */
} control;

typedef struct choice { /* one sample of one prompt */
    buffer text;     /* answer so far; of a stream: the part not sent yet */
    buffer tokens;   /* logprobs: JSON of tokens not sent yet (chat: of all fields) */
    buffer logprobs, tops, offsets; /* logprobs of /v1/completions: the other arrays */
    int n_tokens;    /* tokens generated */
    size_t length;   /* bytes of text generated */
    bool begun;      /* it has had an event */
    bool started;    /* its first chunk has been sent */
    const char *finish; /* finish reason; NULL: not ended */
} choice;

typedef struct prompt { /* a call has one; /v1/completions may have several */
    call *call;
    int32_t *ids;
    int64_t n;
    uint64_t request; /* the engine's id of the request; 0: not submitted */
    int cached;       /* tokens found in the prefix cache */
    float *logprobs;  /* (n) echo: logprob of each token of the prompt; NULL: not wanted */
    buffer tops;      /* echo: JSON of the likeliest tokens at each place but the first */
} prompt;

struct call {
    server *server;
    call *next;              /* next in the inbox or among the engine's calls */
    struct MHD_Connection *connection;
    int descriptor;          /* descriptor of its socket */
    double began;            /* time when the request's first byte arrived */
    char method[8], path[64];
    char client[64];         /* address of the client */
    char id[48];             /* id of the answer */
    char request_id[136];    /* value of x-request-id */
    buffer body;             /* body of the request */
    bool too_large;
    /* ---- what the client wants; constant once the engine has the call ---- */
    endpoint endpoint;
    bool stream, usage, usage_always, echo, fallback; /* fallback: the model has no template */
    int logprobs;            /* likeliest tokens to list; -1: no logprobs */
    llm_request request;     /* common to all prompts */
    llm_logit_bias *bias;
    char **stop;             /* (request.n_stop) */
    prompt *prompts;
    int n_prompts;
    buffer echoed;           /* text of the prompt, to echo */
    control control;         /* settings of POST /engine/control */
    /* ---- for the engine's thread ---- */
    choice *choices;         /* (n_prompts, request.n_samples) */
    int n_live;              /* choices that have not ended */
    int n_generated;         /* tokens of all choices */
    double queued, started, first, last; /* of arrival, admission, first and latest token */
    double sent;             /* time of the latest addition to `out` */
    /* ---- guarded by the lock ---- */
    buffer out;              /* text for the client */
    size_t out_at;           /* bytes of `out` that have been sent */
    int status;              /* HTTP status; 0: not known yet */
    bool owned;              /* the engine's thread has the call */
    bool suspended;          /* the connection is suspended */
    bool ended;              /* `out` is complete */
    bool gone;               /* the client has left */
    bool behind;             /* a watcher that needs a whole state next */
};

enum { N_BOUNDS = 20 };

typedef struct histogram {
    const char *name, *help;
    double bounds[N_BOUNDS]; /* upper bounds of the buckets; 0 after the last */
    uint64_t counts[N_BOUNDS + 1];
    double sum;
} histogram;

/* A connection, with or without a request. */
typedef struct client {
    struct client *next, *previous;
    int descriptor;
    double since; /* when it began to wait for a request; 0: one is being answered */
} client;

/* Settings that the page can change; the engine is restarted with them. */
typedef struct tuning {
    bool prefix_cache, chunked_prefill;
    bool speculation;        /* by the draft or, without one, by lookup */
    int block_size;
    int cache_tokens;        /* slots of the cache; 0: as at the server's start */
} tuning;

struct server {
    const serve_options *options;
    const llm_model *model;
    const llm_tokenizer *tokenizer;
    llm_engine *engine;      /* used only by the engine's thread; NULL: creation failed */
    llm_engine_options first; /* options that the server was started with */
    view view;               /* used only by the engine's thread */
    double told;             /* when changes were last sent to the watchers */
    double looked;           /* when the watchers' connections were last checked */
    bool controls;           /* the page may control the engine; constant */
    call *calls;             /* used only by the engine's thread: calls submitted, not ended */
    time_t created;
    uint64_t seed;           /* makes ids and seeds differ */
    llm_error failure;       /* why the engine failed */
    bool failed;             /* the failure is permanent */
    pthread_t thread;
    /* ---- guarded by the lock ---- */
    pthread_mutex_t lock;
    pthread_cond_t wake;     /* for the engine's thread: a call has arrived or gone */
    call *inbox, **inbox_end; /* calls that the engine's thread has not taken yet */
    int n_inbox;             /* prompts in the inbox */
    int n_open;              /* HTTP requests not finished yet */
    bool ending;             /* no new calls are accepted */
    bool stopped;            /* the engine's thread must end now */
    bool broken;             /* the last step failed */
    uint64_t n_calls;
    client *clients;
    llm_statistics statistics; /* statistics of the engine after its last step */
    llm_statistics past;     /* totals of earlier engines */
    uint64_t prompt_tokens, generated_tokens; /* totals of all calls */
    histogram ttft, between, whole, queue;
    uint64_t finished[5];    /* by index in `finish_reasons` */
    llm_engine_options settings; /* settings of the engine */
    tuning tuning;           /* the settings that the page can change */
    bool paused;
    int n_steps;             /* steps to run while paused */
    int pace;                /* most steps per second, for watching; 0: no limit */
    double next_step;        /* time when the next step may run, with a pace */
    call *controlling;       /* calls of /engine/control, not yet taken by the engine's thread */
    call *watchers;          /* calls of /engine/events */
    int n_watchers;
    bool stirred;            /* the engine's thread has work for a watcher */
    double last_ttft;        /* seconds; 0: none yet */
};

static const char *const finish_reasons[] = {"stop", "length", "abort", "error"};

/* Random bits that differ from call to call. */
static uint64_t next_random(server *s) {
    pthread_mutex_lock(&s->lock);
    uint64_t n = ++s->n_calls;
    pthread_mutex_unlock(&s->lock);
    return (uint64_t)(llm_random(s->seed, 1, n) * 0x1p53);
}

/* The engine's settings, for other threads. */
static llm_engine_options settings_of(server *s) {
    pthread_mutex_lock(&s->lock);
    llm_engine_options settings = s->settings;
    pthread_mutex_unlock(&s->lock);
    return settings;
}

static void call_free(call *c) {
    for (int i = 0; i < c->n_prompts; i++) {
        llm_free(c->prompts[i].ids);
        free(c->prompts[i].logprobs);
        buffer_free(&c->prompts[i].tops);
    }
    for (int i = 0; c->choices && i < c->n_prompts * c->request.n_samples; i++) {
        choice *x = &c->choices[i];
        buffer_free(&x->text);
        buffer_free(&x->tokens);
        buffer_free(&x->logprobs);
        buffer_free(&x->tops);
        buffer_free(&x->offsets);
    }
    for (int i = 0; i < c->request.n_stop; i++) free(c->stop[i]);
    free(c->stop);
    free(c->bias);
    free(c->prompts);
    free(c->choices);
    buffer_free(&c->echoed);
    buffer_free(&c->body);
    buffer_free(&c->out);
    free(c);
}

/* =====================================================================================
 * [2] Parsing
 * ================================================================================== */

/* Answer a call with an error in OpenAI's form. code, param: NULL: none. Returns false. */
__attribute__((format(printf, 5, 6))) static bool
refuse(call *c, int status, const char *code, const char *param, const char *format, ...) {
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    buffer b = {0};
    add_text(&b, "{\"error\": {\"message\": ");
    add_string(&b, message, strlen(message));
    add(&b, ", \"type\": \"%s\", \"param\": ",
        status == 401   ? "authentication_error"
        : status == 403 ? "permission_error"
        : status == 404 ? "not_found_error"
        : status == 429 ? "rate_limit_error"
        : status >= 500 ? "server_error"
                        : "invalid_request_error");
    if (param) add_string(&b, param, strlen(param));
    else add_text(&b, "null");
    add_text(&b, ", \"code\": ");
    if (code) add_string(&b, code, strlen(code));
    else add_text(&b, "null");
    add_text(&b, "}}");
    buffer_free(&c->out);
    c->out = b;
    c->out_at = 0;
    c->status = status;
    return false;
}

static bool refuse_value(call *c, const char *name, const char *wanted) {
    return refuse(c, 400, "invalid_value", name, "%s must be %s", name, wanted);
}

static bool is_given(const llm_json_node *node) {
    return node && !llm_json_has_kind(node, LLM_JSON_NULL);
}

/* The read_ functions leave *out unchanged if the member is absent or null. False: the call is
 * refused. */
static bool read_number(call *c, const llm_json_node *body, const char *name, double low,
                        double high, float *out) {
    const llm_json_node *node = llm_json_member(body, name);
    double x;
    char wanted[80];
    if (!is_given(node)) return true;
    snprintf(wanted, sizeof wanted, "a number from %g to %g", low, high);
    if (!llm_json_f64(node, &x) || !(x >= low && x <= high)) return refuse_value(c, name, wanted);
    *out = (float)x;
    return true;
}

static bool read_int(call *c, const llm_json_node *body, const char *name, int low, int high,
                     int *out) {
    const llm_json_node *node = llm_json_member(body, name);
    double x;
    char wanted[80];
    if (!is_given(node)) return true;
    snprintf(wanted, sizeof wanted, "a whole number from %d to %d", low, high);
    if (!llm_json_f64(node, &x) || !(x >= low && x <= high) || x != floor(x))
        return refuse_value(c, name, wanted);
    *out = (int)x;
    return true;
}

static bool read_bool(call *c, const llm_json_node *body, const char *name, bool *out) {
    const llm_json_node *node = llm_json_member(body, name);
    if (!is_given(node) || llm_json_bool(node, out)) return true;
    return refuse_value(c, name, "true or false");
}

static bool read_seed(call *c, const llm_json_node *body) {
    const llm_json_node *node = llm_json_member(body, "seed");
    int64_t seed;
    c->request.sampling.seed = next_random(c->server) % 1000000;
    if (!is_given(node) || llm_json_u64(node, &c->request.sampling.seed)) return true;
    if (!llm_json_i64(node, &seed)) return refuse_value(c, "seed", "a whole number of 64 bits");
    c->request.sampling.seed = (uint64_t)seed;
    return true;
}

enum { MOST_STOPS = 16, MOST_SAMPLES = 128, MOST_TOP = 20, MOST_PROMPTS = 256 };

static bool add_stop(call *c, const char *data, size_t length) {
    char *copy = (char *)malloc(length + 1);
    if (!copy) return refuse(c, 500, NULL, NULL, "out of memory");
    memcpy(copy, data, length);
    copy[length] = 0;
    c->stop[c->request.n_stop++] = copy;
    return true;
}

static bool read_stops(call *c, const llm_json_node *body, const char *own) {
    const llm_json_node *node = llm_json_member(body, "stop"), *one;
    const char *wanted = "a text, or an array of at most 16 texts, none of them empty";
    llm_string text;
    c->stop = (char **)calloc(MOST_STOPS + 1, sizeof *c->stop);
    if (!c->stop) return refuse(c, 500, NULL, NULL, "out of memory");
    if (own && !add_stop(c, own, strlen(own))) return false;
    bool list = llm_json_has_kind(node, LLM_JSON_ARRAY);
    if (!is_given(node)) return true;
    if (list && node->length > MOST_STOPS) return refuse_value(c, "stop", wanted);
    for (one = list ? llm_json_first(node) : node; one;
         one = list ? llm_json_next(node, one) : NULL) {
        if (!llm_json_string(one, &text) || !text.length || memchr(text.data, 0, text.length))
            return refuse_value(c, "stop", wanted);
        if (!add_stop(c, text.data, text.length)) return false;
    }
    return true;
}

static bool read_bias(call *c, const llm_json_node *body) {
    const llm_json_node *node = llm_json_member(body, "logit_bias"), *value;
    llm_sampling *p = &c->request.sampling;
    if (!is_given(node)) return true;
    if (!llm_json_has_kind(node, LLM_JSON_OBJECT) || node->length > 1024)
        return refuse_value(c, "logit_bias", "an object of at most 1024 token ids with numbers");
    c->bias = (llm_logit_bias *)calloc(node->length + 1, sizeof *c->bias);
    if (!c->bias) return refuse(c, 500, NULL, NULL, "out of memory");
    for (value = llm_json_first(node); value; value = llm_json_next(node, value)) {
        llm_string key = llm_json_key(value);
        char digits[12] = "";
        double bias;
        if (key.length < sizeof digits) memcpy(digits, key.data, key.length);
        char *end = digits;
        long id = strtol(digits, &end, 10);
        if (!*digits || *end || id < 0 || id >= llm_model_config(c->server->model)->vocab_size)
            return refuse(c, 400, "invalid_value", "logit_bias",
                          "logit_bias: '%.*s' is not a token id of this model",
                          (int)(key.length < 40 ? key.length : 40), key.data);
        if (!llm_json_f64(value, &bias) || !(fabs(bias) <= 100))
            return refuse_value(c, "logit_bias", "an object whose values are from -100 to 100");
        c->bias[p->n_bias++] = (llm_logit_bias){(int32_t)id, (float)bias};
    }
    p->bias = c->bias;
    return true;
}

static bool read_sampling(call *c, const llm_json_node *body) {
    llm_sampling *p = &c->request.sampling;
    int low_priority = 0;
    p->temperature = 1;
    p->penalty_window = 0; /* as in other servers, all tokens count */
    bool good = read_number(c, body, "temperature", 0, 2, &p->temperature) &&
                read_number(c, body, "top_p", 1e-6, 1, &p->top_p) &&
                read_int(c, body, "top_k", -1, INT32_MAX, &p->top_k) &&
                read_number(c, body, "min_p", 0, 1, &p->min_p) &&
                read_number(c, body, "repetition_penalty", 0.01, 100, &p->repetition_penalty) &&
                read_number(c, body, "presence_penalty", -2, 2, &p->presence_penalty) &&
                read_number(c, body, "frequency_penalty", -2, 2, &p->frequency_penalty) &&
                read_bias(c, body) && read_seed(c, body) &&
                read_int(c, body, "priority", -1000000, 1000000, &low_priority);
    if (p->top_k < 0) p->top_k = 0;
    c->request.priority = -low_priority; /* OpenAI's API: lower numbers come first */
    return good;
}

static bool mentions(llm_string source, const char *word) {
    size_t n = strlen(word);
    for (size_t i = 0; i + n <= source.length; i++)
        if (!memcmp(source.data + i, word, n)) return true;
    return false;
}

/* Whether the chat template uses tools. */
static bool has_tools(const call *c, const llm_json_node *body) {
    const server *s = c->server;
    return c->endpoint == CHAT &&
           llm_json_has_kind(llm_json_member(body, "tools"), LLM_JSON_ARRAY) &&
           mentions(llm_chat_template_source(s->tokenizer, &s->options->chat), "tools");
}

/* Refuse, rather than ignore, what this server does not support. */
static bool refuse_unsupported(call *c, const llm_json_node *body) {
    const char *const names[] = {has_tools(c, body) ? "functions" : "tools", "functions",
                                 "suffix", "audio", "prompt_embeds"};
    const llm_json_node *format = llm_json_member(body, "response_format");
    for (int i = 0; i < COUNT(names); i++) {
        const llm_json_node *node = llm_json_member(body, names[i]);
        bool empty = llm_json_has_kind(node, LLM_JSON_ARRAY) && node->length == 0;
        if (is_given(node) && !empty)
            return refuse(c, 400, "unsupported_parameter", names[i],
                          "%s is not supported by this server", names[i]);
    }
    if (is_given(format) && !llm_json_is(llm_json_member(format, "type"), "text")) {
        llm_string type = {"", 0};
        llm_json_string(llm_json_member(format, "type"), &type);
        return refuse(c, 400, "unsupported_parameter", "response_format",
                      "response_format %.*s is not supported by this server: it has only text",
                      (int)(type.length < 40 ? type.length : 40), type.data);
    }
    return true;
}

static bool check_model(call *c, const llm_json_node *body) {
    const llm_json_node *node = llm_json_member(body, "model");
    llm_string name;
    if (!is_given(node) || llm_json_is(node, c->server->options->model_name)) return true;
    if (!llm_json_string(node, &name)) return refuse_value(c, "model", "a text");
    return refuse(c, 404, "model_not_found", "model",
                  "the model '%.*s' does not exist; this server has '%s'",
                  (int)(name.length < 200 ? name.length : 200), name.data,
                  c->server->options->model_name);
}

static bool read_stream(call *c, const llm_json_node *body) {
    const llm_json_node *options = llm_json_member(body, "stream_options");
    if (!read_bool(c, body, "stream", &c->stream)) return false;
    if (!is_given(options)) return true;
    if (!c->stream) return refuse(c, 400, NULL, "stream_options", "stream_options needs stream");
    return read_bool(c, options, "include_usage", &c->usage) &&
           read_bool(c, options, "continuous_usage_stats", &c->usage_always);
}

static bool read_logprobs(call *c, const llm_json_node *body) {
    bool wanted = false;
    int top = -1;
    c->logprobs = -1;
    if (c->endpoint == COMPLETIONS) {
        if (!read_int(c, body, "logprobs", 0, MOST_TOP, &c->logprobs)) return false;
    } else {
        if (!read_bool(c, body, "logprobs", &wanted) ||
            !read_int(c, body, "top_logprobs", 0, MOST_TOP, &top))
            return false;
        if (top > 0 && !wanted)
            return refuse(c, 400, NULL, "top_logprobs", "top_logprobs needs logprobs");
        if (wanted) c->logprobs = top > 0 ? top : 0;
    }
    c->request.top_logprobs = c->logprobs > 0 ? c->logprobs : 0;
    return true;
}

/* The prompt must leave room for at least one token. */
static bool check_length(call *c, int64_t n) {
    int context = settings_of(c->server).context_length;
    if (n > 0 && n + (c->request.max_tokens != 0) <= context) return true;
    if (n <= 0)
        return refuse(c, 400, NULL, c->endpoint == CHAT ? "messages" : "prompt",
                      "the prompt is empty, and this model has no BOS token to begin with");
    return refuse(c, 400, "context_length_exceeded", c->endpoint == CHAT ? "messages" : "prompt",
                  "this model's context holds %d tokens, and the prompt has %lld: shorten it",
                  context, (long long)n);
}

static bool fail_with(call *c, const llm_error *err, const char *param) {
    return refuse(c, err->status == LLM_ERROR_MEMORY ? 500 : 400, NULL, param, "%s", err->message);
}

static prompt *new_prompts(call *c, int n) {
    c->prompts = (prompt *)calloc((size_t)n, sizeof *c->prompts);
    if (!c->prompts) return refuse(c, 500, NULL, NULL, "out of memory"), NULL;
    c->n_prompts = n;
    for (int i = 0; i < n; i++) c->prompts[i].call = c;
    return c->prompts;
}

/* Turn a text into tokens, with BOS if the model wants it. */
static bool tokenize(call *c, const char *data, size_t length, bool bos, prompt *p) {
    const llm_tokenizer *t = c->server->tokenizer;
    llm_error err;
    p->n = llm_tokenize_new(t, data, length, bos ? LLM_TOKENIZE_BOS : 0, &p->ids, &err);
    if (p->n < 0) return fail_with(c, &err, "prompt");
    if (p->n == 0 && llm_tokenizer_bos(t) >= 0) { /* an empty prompt becomes BOS */
        p->ids[0] = llm_tokenizer_bos(t);
        p->n = 1;
    }
    return true;
}

static bool read_ids(call *c, const llm_json_node *array, prompt *p) {
    int vocab = llm_model_config(c->server->model)->vocab_size;
    int64_t id;
    p->ids = (int32_t *)malloc((size_t)(array->length + 1) * sizeof *p->ids);
    if (!p->ids) return refuse(c, 500, NULL, NULL, "out of memory");
    for (const llm_json_node *x = llm_json_first(array); x; x = llm_json_next(array, x)) {
        if (!llm_json_i64(x, &id) || id < 0 || id >= vocab)
            return refuse(c, 400, "invalid_value", "prompt",
                          "prompt: element %lld is not a token id from 0 to %d", (long long)p->n,
                          vocab - 1);
        p->ids[p->n++] = (int32_t)id;
    }
    return true;
}

/* Read the prompt of /v1/completions: a text, an array of ids, or an array of these. */
static bool read_prompts(call *c, const llm_json_node *body) {
    const llm_json_node *node = llm_json_member(body, "prompt"), *one;
    const llm_json_node *first = llm_json_first(node);
    const char *wanted = "a text, an array of token ids, or an array of at most 256 of these";
    bool list = llm_json_has_kind(node, LLM_JSON_ARRAY) &&
                !llm_json_has_kind(first, LLM_JSON_NUMBER);
    if (!node || (list && (node->length < 1 || node->length > MOST_PROMPTS)))
        return refuse_value(c, "prompt", wanted);
    prompt *p = new_prompts(c, list ? (int)node->length : 1);
    if (!p) return false;
    for (one = list ? first : node; one; one = list ? llm_json_next(node, one) : NULL, p++) {
        llm_string text;
        bool good = llm_json_string(one, &text);
        if (good) good = tokenize(c, text.data, text.length, true, p);
        else if (llm_json_has_kind(one, LLM_JSON_ARRAY)) good = read_ids(c, one, p);
        else return refuse_value(c, "prompt", wanted);
        if (!good || !check_length(c, p->n)) return false;
        if (c->echo && c->n_prompts > 1)
            return refuse(c, 400, NULL, "echo", "echo needs a single prompt");
        if (c->echo && llm_json_string(one, &text)) add_bytes(&c->echoed, text.data, text.length);
        else if (c->echo) {
            char *words = NULL;
            int64_t n = llm_detokenize_new(c->server->tokenizer, p->ids, p->n, &words, NULL);
            if (n > 0) add_bytes(&c->echoed, words, (size_t)n);
            llm_free(words);
        }
    }
    return true;
}

/* Read the text of a message: a string, or a list of parts of type text, appended to `joined`. */
static bool read_content(call *c, const llm_json_node *message, int index, buffer *joined,
                         llm_message *out) {
    const llm_json_node *content = llm_json_member(message, "content"), *part;
    llm_string text = {"", 0};
    char name[48];
    snprintf(name, sizeof name, "messages[%d].content", index);
    if (!llm_json_has_kind(content, LLM_JSON_ARRAY)) {
        if (content && !llm_json_string(content, &text) &&
            !(out->role == LLM_ROLE_ASSISTANT && !is_given(content)))
            return refuse_value(c, name, "a text, or a list of parts");
        if (!content) return refuse_value(c, name, "given");
        out->text = text.data;
        out->length = text.length;
        return true;
    }
    size_t start = joined->length;
    for (part = llm_json_first(content); part; part = llm_json_next(content, part)) {
        if (!llm_json_is(llm_json_member(part, "type"), "text") ||
            !llm_json_string(llm_json_member(part, "text"), &text))
            return refuse(c, 400, "unsupported_value", name,
                          "%s: only parts of type text are supported", name);
        add_bytes(joined, text.data, text.length);
    }
    out->text = NULL; /* `joined` may still move */
    out->length = joined->length - start;
    return true;
}

static bool read_messages(call *c, const llm_json_node *list, llm_message *messages,
                          buffer *joined) {
    static const struct { const char *name; llm_role role; } roles[] = {
        {"system", LLM_ROLE_SYSTEM}, {"developer", LLM_ROLE_SYSTEM}, {"user", LLM_ROLE_USER},
        {"assistant", LLM_ROLE_ASSISTANT}};
    int n = 0;
    for (const llm_json_node *m = llm_json_first(list); m; m = llm_json_next(list, m), n++) {
        char name[48];
        int role = 0;
        snprintf(name, sizeof name, "messages[%d].role", n);
        while (role < COUNT(roles) && !llm_json_is(llm_json_member(m, "role"), roles[role].name))
            role++;
        if (role == COUNT(roles))
            return refuse_value(c, name, "system, developer, user or assistant");
        messages[n].role = roles[role].role;
        if (!read_content(c, m, n, joined, &messages[n])) return false;
    }
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        if (messages[i].text) continue;
        messages[i].text = joined->data ? joined->data + at : "";
        at += messages[i].length;
    }
    return true;
}

/* Write a conversation for a model without a template: each message after the name of its role. */
static bool plain_conversation(call *c, const llm_message *messages, int n) {
    static const char *const names[] = {"System", "User", "Assistant"};
    buffer text = {0};
    for (int i = 0; i < n; i++) {
        add(&text, "%s: ", names[messages[i].role]);
        add_bytes(&text, messages[i].text, messages[i].length);
        add_text(&text, "\n\n");
    }
    add_text(&text, "Assistant:");
    bool good = !text.failed && tokenize(c, text.data, text.length, true, c->prompts);
    c->fallback = true;
    buffer_free(&text);
    return good;
}

static bool has_template(const server *s) {
    return llm_chat_template_source(s->tokenizer, &s->options->chat).length > 0;
}

static const char *plain_stop(const server *s, char *text, size_t size) {
    if (!has_template(s)) return "\n\nUser:";
    return llm_chat_stop(s->tokenizer, &s->options->chat, text, size) ? text : NULL;
}

/* Add a value as JSON. */
static void add_node(buffer *b, const llm_json_node *node) {
    static const char *const words[] = {"null", "false", "true"};
    bool object = llm_json_has_kind(node, LLM_JSON_OBJECT);
    llm_string text = {node->text, node->length};
    if (node->kind < LLM_JSON_NUMBER) add_text(b, words[node->kind]);
    else if (node->kind == LLM_JSON_NUMBER) add_bytes(b, text.data, text.length);
    else if (node->kind == LLM_JSON_STRING) add_string(b, text.data, text.length);
    else {
        const llm_json_node *n = llm_json_first(node);
        add_text(b, object ? "{" : "[");
        for (int i = 0; n; n = llm_json_next(node, n), i++) {
            if (i) add_text(b, ",");
            if (object) add_string(b, n[-1].text, n[-1].length), add_text(b, ":");
            add_node(b, n);
        }
        add_text(b, object ? "}" : "]");
    }
}

/* Tokenize a conversation with tools or variables, which the template reads directly. */
static bool json_conversation(call *c, const llm_json_node *body) {
    static const char *const names[] = {"messages", "tools", "chat_template_kwargs"};
    llm_chat_options options = c->server->options->chat;
    buffer texts[3] = {{0}, {0}, {0}};
    prompt *p = new_prompts(c, 1);
    llm_error err;
    bool good = p != NULL;
    for (int i = 0; i < 3; i++) {
        const llm_json_node *node = llm_json_member(body, names[i]);
        if (is_given(node)) add_node(&texts[i], node), add_bytes(&texts[i], "", 1);
        if (texts[i].failed && good) good = refuse(c, 500, NULL, NULL, "out of memory");
    }
    options.tools_json = texts[1].data;
    options.variables_json = texts[2].data ? texts[2].data : options.variables_json;
    if (good) {
        p->n = llm_chat_tokenize_json(c->server->tokenizer, &options, texts[0].data,
                                      texts[0].length - 1, &p->ids, &err);
        good = p->n >= 0 || fail_with(c, &err, "messages");
    }
    for (int i = 0; i < 3; i++) buffer_free(&texts[i]);
    return good;
}

static bool read_conversation(call *c, const llm_json_node *body) {
    const server *s = c->server;
    const llm_json_node *list = llm_json_member(body, "messages");
    if (!llm_json_has_kind(list, LLM_JSON_ARRAY) || list->length < 1 || list->length > 100000)
        return refuse_value(c, "messages", "an array of at least one message");
    const llm_json_node *variables = llm_json_member(body, "chat_template_kwargs");
    if (is_given(variables) && (!llm_json_has_kind(variables, LLM_JSON_OBJECT) || !has_template(s)))
        return refuse_value(c, "chat_template_kwargs", "an object, for a model with a template");
    if (is_given(variables) || has_tools(c, body)) return json_conversation(c, body);
    prompt *p = new_prompts(c, 1);
    llm_message *messages = (llm_message *)calloc(list->length, sizeof *messages);
    buffer joined = {0};
    llm_error err;
    bool good = p && messages;
    if (p && !messages) refuse(c, 500, NULL, NULL, "out of memory");
    good = good && read_messages(c, list, messages, &joined);
    if (good && !has_template(s)) good = plain_conversation(c, messages, (int)list->length);
    else if (good) {
        p->n = llm_chat_tokenize_new(s->tokenizer, &s->options->chat, messages, (int)list->length,
                                     &p->ids, &err);
        good = p->n >= 0 || fail_with(c, &err, "messages");
    }
    buffer_free(&joined);
    free(messages);
    return good;
}

/* Speculate as set at the server's start or, later, by the page. */
static void choose_speculation(call *c) {
    server *s = c->server;
    pthread_mutex_lock(&s->lock);
    bool wanted = s->tuning.speculation;
    pthread_mutex_unlock(&s->lock);
    if (!wanted) return;
    c->request.speculate = s->options->speculate ? s->options->speculate : LLM_SPECULATE_AUTO;
    c->request.branches = s->options->branches;
    c->request.lookup = s->options->lookup || !s->first.draft;
}

/* Read the body of a completion or chat request. */
static bool read_request(call *c, const llm_json_node *body) {
    llm_request *r = &c->request;
    char own[64];
    *r = llm_request_defaults();
    r->max_tokens = c->endpoint == CHAT ? -1 : 16; /* OpenAI's defaults */
    const char *const limits[] = {"max_tokens", "max_completion_tokens"};
    int most = settings_of(c->server).max_sequences;
    bool good = llm_json_has_kind(body, LLM_JSON_OBJECT) ||
                refuse(c, 400, NULL, NULL, "the body must be a JSON object");
    good = good && refuse_unsupported(c, body) && check_model(c, body) && read_stream(c, body);
    for (int i = 0; good && i < 2; i++)
        good = read_int(c, body, limits[i], c->endpoint == COMPLETIONS && i == 0 ? 0 : 1, INT32_MAX,
                        &r->max_tokens);
    good = good && read_sampling(c, body) && read_logprobs(c, body) &&
           read_stops(c, body,
                      c->endpoint == CHAT ? plain_stop(c->server, own, sizeof own) : NULL) &&
           read_int(c, body, "n", 1, most < MOST_SAMPLES ? most : MOST_SAMPLES, &r->n_samples) &&
           read_bool(c, body, "ignore_eos", &r->ignore_end) &&
           (c->endpoint == CHAT || read_bool(c, body, "echo", &c->echo)) &&
           (c->endpoint == CHAT ? read_conversation(c, body) && check_length(c, c->prompts[0].n)
                                : read_prompts(c, body));
    if (!good) return false;
    r->stop = (const char *const *)c->stop;
    if (c->echo && c->logprobs >= 0)
        c->prompts[0].logprobs = (float *)calloc((size_t)c->prompts[0].n, sizeof(float));
    else if (r->max_tokens != 0) choose_speculation(c);
    c->n_live = c->n_prompts * r->n_samples;
    c->choices = (choice *)calloc((size_t)c->n_live, sizeof *c->choices);
    if (!c->choices || (c->echo && c->logprobs >= 0 && !c->prompts[0].logprobs))
        return refuse(c, 500, NULL, NULL, "out of memory");
    return true;
}

/* =====================================================================================
 * [3] Answering
 * ================================================================================== */

/* The text of one token, as bytes that may not be UTF-8. text: room for llm_stream_capacity + 8
 * bytes. */
static size_t token_text(const llm_tokenizer *t, int32_t id, char *text) {
    llm_stream stream = {.started = true}; /* keep a leading space */
    size_t n = llm_stream_decode(t, &stream, id, text);
    return n + llm_stream_decode(t, &stream, -1, text + n);
}

/* Add "token": ..., "logprob": ..., "bytes": [...], as in chat answers. */
static void add_chat_token(buffer *b, const char *text, size_t n, float logprob) {
    add_text(b, "\"token\": ");
    add_string(b, text, n);
    add_text(b, ", \"logprob\": ");
    add_logprob(b, logprob);
    add_text(b, ", \"bytes\": [");
    for (size_t i = 0; i < n; i++) add(b, i ? ", %u" : "%u", (unsigned char)text[i]);
    add_text(b, "]");
}

static void separate(buffer *b) {
    if (b->length) add_text(b, ", ");
}

/* Add an object with the likeliest tokens and their logprobs; only the first of equal texts. */
static void add_top(buffer *b, const llm_tokenizer *t, const llm_token_logprob *top, int n,
                    char *text) {
    buffer keys = {0}; /* the quoted texts so far, each followed by a zero */
    add_text(b, "{");
    for (int i = 0; i < n; i++) {
        size_t start = keys.length, at = 0;
        add_string(&keys, text, token_text(t, top[i].token, text));
        add_bytes(&keys, "", 1);
        if (keys.failed) break;
        while (at < start && strcmp(keys.data + at, keys.data + start))
            at += strlen(keys.data + at) + 1;
        if (at < start) { /* already in the object */
            keys.length = start;
            continue;
        }
        add_text(b, i ? ", " : "");
        add_text(b, keys.data + start);
        add_text(b, ": ");
        add_logprob(b, top[i].logprob);
    }
    add_text(b, "}");
    b->failed = b->failed || keys.failed;
    buffer_free(&keys);
}

/* Add a generated token to the logprobs of a choice. */
static void add_logprobs(call *c, choice *x, const llm_event *e) {
    const llm_tokenizer *t = c->server->tokenizer;
    char *text = (char *)malloc(llm_stream_capacity(t) + 8);
    if (!text) {
        x->tokens.failed = true;
        return;
    }
    size_t n = token_text(t, e->token, text);
    separate(&x->tokens);
    if (c->endpoint == CHAT) {
        add_text(&x->tokens, "{");
        add_chat_token(&x->tokens, text, n, e->logprob);
        add_text(&x->tokens, ", \"top_logprobs\": [");
        for (int i = 0; i < e->n_top; i++) {
            add_text(&x->tokens, i ? ", {" : "{");
            add_chat_token(&x->tokens, text, token_text(t, e->top[i].token, text),
                           e->top[i].logprob);
            add_text(&x->tokens, "}");
        }
        add_text(&x->tokens, "]}");
    } else {
        add_string(&x->tokens, text, n);
        separate(&x->logprobs);
        add_logprob(&x->logprobs, e->logprob);
        separate(&x->tops);
        add_top(&x->tops, t, e->top, e->n_top, text);
        separate(&x->offsets);
        add(&x->offsets, "%zu", x->length);
    }
    free(text);
}

/* Send the logprobs not sent yet, and clear them. */
static void put_logprobs(call *c, choice *x) {
    buffer *b = &c->out;
    if (c->logprobs < 0 || (!x->tokens.length && c->stream)) {
        add_text(b, "null");
        return;
    }
    add_text(b, c->endpoint == CHAT ? "{\"content\": [" : "{\"tokens\": [");
    add_bytes(b, x->tokens.data, x->tokens.length);
    if (c->endpoint == COMPLETIONS) {
        add_text(b, "], \"token_logprobs\": [");
        add_bytes(b, x->logprobs.data, x->logprobs.length);
        add_text(b, "], \"top_logprobs\": ");
        if (c->logprobs > 0) {
            add_text(b, "[");
            add_bytes(b, x->tops.data, x->tops.length);
            add_text(b, "]");
        } else {
            add_text(b, "null");
        }
        add_text(b, ", \"text_offset\": [");
        add_bytes(b, x->offsets.data, x->offsets.length);
    }
    add_text(b, "]}");
    b->failed = b->failed || x->tokens.failed;
    x->tokens.length = x->logprobs.length = x->tops.length = x->offsets.length = 0;
}

static int64_t prompt_tokens(const call *c) {
    int64_t n = 0;
    for (int i = 0; i < c->n_prompts; i++) n += c->prompts[i].n;
    return n;
}

static void put_usage(call *c) {
    int cached = 0;
    for (int i = 0; i < c->n_prompts; i++) cached += c->prompts[i].cached;
    add(&c->out,
        "{\"prompt_tokens\": %lld, \"completion_tokens\": %d, \"total_tokens\": %lld, "
        "\"prompt_tokens_details\": {\"cached_tokens\": %d}}",
        (long long)prompt_tokens(c), c->n_generated, (long long)prompt_tokens(c) + c->n_generated,
        cached);
}

/* Begin an answer or a chunk: everything before its choices. */
static void put_head(call *c) {
    const char *kind = c->endpoint == COMPLETIONS ? "text_completion"
                       : c->stream                ? "chat.completion.chunk"
                                                  : "chat.completion";
    add(&c->out, "{\"id\": \"%s\", \"object\": \"%s\", \"created\": %lld, \"model\": ", c->id, kind,
        (long long)time(NULL));
    add_string(&c->out, c->server->options->model_name, strlen(c->server->options->model_name));
    add_text(&c->out, ", \"system_fingerprint\": \"llm-" LLM_VERSION "\", \"choices\": [");
}

/* Add a choice to an answer or a chunk. */
static void put_choice(call *c, choice *x) {
    buffer *b = &c->out;
    bool chat = c->endpoint == CHAT;
    add(b, "{\"index\": %d, ", (int)(x - c->choices));
    if (!chat) {
        add_text(b, "\"text\": ");
    } else if (!c->stream) {
        add_text(b, "\"message\": {\"role\": \"assistant\", \"refusal\": null, \"content\": ");
    } else {
        add_text(b, x->started ? "\"delta\": {" : "\"delta\": {\"role\": \"assistant\"");
        if (x->text.length || !x->started)
            add_text(b, x->started ? "\"content\": " : ", \"content\": ");
    }
    if (!chat || !c->stream || x->text.length || !x->started)
        add_string(b, x->text.data, x->text.length);
    add_text(b, chat ? "}, \"logprobs\": " : ", \"logprobs\": ");
    put_logprobs(c, x);
    add_text(b, ", \"finish_reason\": ");
    if (x->finish) add(b, "\"%s\"", x->finish);
    else add_text(b, "null");
    add_text(b, "}");
    b->failed = b->failed || x->text.failed;
    x->text.length = 0;
    x->started = true;
}

/* Add a chunk of a stream with one choice, or with usage alone (x NULL). */
static void put_chunk(call *c, choice *x) {
    add_text(&c->out, "data: ");
    put_head(c);
    if (x) put_choice(c, x);
    add_text(&c->out, "]");
    if (c->usage) {
        add_text(&c->out, ", \"usage\": ");
        if (!x || c->usage_always) put_usage(c);
        else add_text(&c->out, "null");
    }
    add_text(&c->out, "}\n\n");
    c->sent = llm_seconds();
}

static void put_end(call *c) {
    if (c->stream) {
        if (c->usage) put_chunk(c, NULL);
        add_text(&c->out, "data: [DONE]\n\n");
    } else {
        put_head(c);
        for (int i = 0; i < c->n_prompts * c->request.n_samples; i++) {
            if (i) add_text(&c->out, ", ");
            put_choice(c, &c->choices[i]);
        }
        add_text(&c->out, "], \"usage\": ");
        put_usage(c);
        add_text(&c->out, "}");
    }
    c->status = 200;
    c->ended = true;
}

/* End a call with an error: a stream that has begun gets the error as an event. */
static void put_error(call *c, int status, const char *code, const char *message) {
    buffer sent = c->out;
    bool begun = c->stream && c->status == 200;
    c->ended = true;
    if (!begun) {
        refuse(c, status, code, NULL, "%s", message);
        return;
    }
    add_text(&sent, "data: {\"error\": {\"message\": ");
    add_string(&sent, message, strlen(message));
    add(&sent, ", \"type\": \"server_error\", \"param\": null, \"code\": \"%s\"}}\n\n", code);
    add_text(&sent, "data: [DONE]\n\n");
    c->out = sent;
}

/* ---- Histograms ----------------------------------------------------------------------------- */

static void observe(histogram *h, double x) {
    int i = 0;
    while (i < N_BOUNDS && h->bounds[i] > 0 && x > h->bounds[i]) i++;
    h->counts[i]++;
    h->sum += x;
}

/* ---- Events --------------------------------------------------------------------------------- */

/* Begin a choice; with echo, with the text of the prompt. */
static void begin_choice(call *c, const prompt *p, choice *x) {
    const llm_tokenizer *t = c->server->tokenizer;
    char *text = c->logprobs >= 0 && c->echo ? (char *)malloc(llm_stream_capacity(t) + 8) : NULL;
    if (!c->echo) return;
    add_bytes(&x->text, c->echoed.data, c->echoed.length);
    for (int64_t i = 0; text && i < p->n; i++) {
        size_t n = token_text(t, p->ids[i], text);
        separate(&x->tokens);
        add_string(&x->tokens, text, n);
        separate(&x->logprobs);
        if (i) add_logprob(&x->logprobs, p->logprobs[i]);
        else add_text(&x->logprobs, "null");
        separate(&x->offsets);
        add(&x->offsets, "%zu", x->length);
        x->length += n;
    }
    if (text) add(&x->tops, "null%s", p->tops.length ? ", " : "");
    if (text) add_bytes(&x->tops, p->tops.data, p->tops.length);
    x->length = c->echoed.length;
    free(text);
}

static const char *finish_reason(llm_finish finish) {
    return finish_reasons[finish == LLM_FINISH_LENGTH      ? 1
                          : finish == LLM_FINISH_CANCELLED ? 2
                          : finish == LLM_FINISH_ERROR     ? 3
                                                           : 0];
}

static void call_ended(server *s, call *c) {
    observe(&s->whole, llm_seconds() - c->queued);
    if (!c->ended) put_end(c);
}

/* Turn an event of the engine into text for the client. The lock is held. */
static void take_event(server *s, const llm_event *e) {
    prompt *p = (prompt *)e->user;
    call *c = p->call;
    choice *x = &c->choices[(p - c->prompts) * c->request.n_samples + e->sample];
    double now = llm_seconds();
    if (x->finish) return;
    if (!x->begun) begin_choice(c, p, x);
    x->begun = true;
    if (e->token >= 0) {
        if (c->first == 0) observe(&s->ttft, now - c->queued);
        else observe(&s->between, now - c->last);
        if (c->first == 0) s->last_ttft = now - c->queued;
        if (c->first == 0) c->first = now;
        c->last = now;
        x->n_tokens++;
        c->n_generated++;
        s->generated_tokens++;
        if (c->logprobs >= 0 && e->finish != LLM_FINISH_END) add_logprobs(c, x, e);
    }
    add_bytes(&x->text, e->text, e->text_length);
    x->length += e->text_length;
    if (e->finish) {
        x->finish = finish_reason(e->finish);
        for (int i = 0; i < COUNT(finish_reasons); i++)
            if (!strcmp(x->finish, finish_reasons[i])) s->finished[i]++;
        c->n_live--;
    }
    if (e->finish == LLM_FINISH_ERROR && !c->ended) put_error(c, 500, "model_error", e->error);
    if (c->ended) return;
    if (c->stream && (x->text.length || x->tokens.length || x->finish)) {
        c->status = 200;
        put_chunk(c, x);
    }
    if (c->n_live == 0) call_ended(s, c);
}

/* =====================================================================================
 * [4] Watching
 *
 * view.h keeps a picture of the engine up to date. At most 20 times a second, what has changed
 * is sent to all watchers (GET /engine/events) as one line of JSON. A watcher that is new, or has
 * not read the last line, gets the whole state instead, so its buffer stays bounded.
 * ================================================================================== */

static const char *word(bool x) { return x ? "true" : "false"; }

static void put_tuning(buffer *b, const tuning *t) {
    add(b, "{\"prefix_cache\": %s, \"chunked_prefill\": %s, \"speculation\": %s, "
           "\"block_size\": %d, \"cache_tokens\": %d}",
        word(t->prefix_cache), word(t->chunked_prefill), word(t->speculation), t->block_size,
        t->cache_tokens);
}

/* Add the whole state of the engine, or the changes since the last one was sent. Called by the
 * engine's thread, which holds the lock. */
static void put_state(buffer *b, const server *s, bool whole) {
    const view *v = &s->view;
    const llm_statistics *t = &s->statistics, *past = &s->past;
    add(b, "data: {\"whole\": %s", word(whole));
    if (whole) {
        add_text(b, ", \"model\": ");
        add_string(b, s->options->model_name, strlen(s->options->model_name));
        add_text(b, ", \"settings\": ");
        put_tuning(b, &s->tuning);
        add(b, ", \"controls\": %s, \"draft\": %s, \"context\": %d, \"max_sequences\": %d, "
               "\"max_batch_tokens\": %d, \"blocks_total\": %lld, \"blocks_shown\": %d",
            word(s->controls), word(s->first.draft != NULL), s->settings.context_length,
            s->settings.max_sequences, s->settings.max_batch_tokens, (long long)t->blocks_total,
            v->n_blocks);
    }
    add_text(b, ", ");
    put_view(b, v, whole);
    add(b, ", \"paused\": %s, \"pace\": %d, \"time\": %.3f, \"running\": %d, "
           "\"waiting\": %d, \"tracks\": %d, "
           "\"ttft\": %.6f, \"generated\": %llu, \"preemptions\": %llu, \"prefix_tokens\": %llu, "
           "\"prefix_hits\": %llu, \"blocks_free\": %lld, \"blocks_shared\": %lld}\n\n",
        word(s->paused), s->pace, llm_seconds(), t->running, t->waiting + s->n_inbox, v->n_tracks,
        s->last_ttft, (unsigned long long)s->generated_tokens,
        (unsigned long long)(past->preemptions + t->preemptions),
        (unsigned long long)t->prefix_tokens, (unsigned long long)t->prefix_hits,
        (long long)t->blocks_free, (long long)t->blocks_shared);
}

/* Resume the connection of a call. The lock is held. */
static void resume(call *c) {
    if (c->out.failed && !c->ended) {
        c->out.failed = false;
        put_error(c, 500, "out_of_memory", "out of memory");
    }
    if (!c->suspended || c->gone) return;
    c->suspended = false;
    MHD_resume_connection(c->connection);
}

/* Find the watchers that have left, and send a comment to those that have long got nothing. */
static void review_watchers(server *s, double now) {
    for (call *c = s->watchers; c; c = c->next) {
        struct pollfd polled = {.fd = c->descriptor, .events = POLLRDHUP};
        if (!c->gone && poll(&polled, 1, 0) > 0) {
            resume(c); /* to close its connection */
            c->gone = true;
        } else if (now - c->sent > 5 && c->out.length == c->out_at) {
            add_text(&c->out, ": waiting\n\n");
            c->sent = now;
            resume(c);
        }
    }
}

/* Send the changes to the watchers, unless that was done a moment ago. */
static void inform_watchers(server *s) {
    view *v = &s->view;
    double now = llm_seconds();
    buffer change = {0}, whole = {0};
    pthread_mutex_lock(&s->lock);
    bool due = v->changed && now - s->told > 0.05;
    if (s->watchers && now - s->looked > 0.5) {
        review_watchers(s, now);
        s->looked = now;
    }
    for (call *c = s->watchers; c; c = c->next) {
        bool idle = c->out.length == c->out_at;
        if (s->ending) {
            c->ended = true;
            resume(c);
            continue;
        }
        c->behind = c->behind || (due && !idle);
        if (c->gone || !idle || !(c->behind || due)) continue;
        buffer *b = c->behind ? &whole : &change;
        if (!b->length) put_state(b, s, c->behind);
        if (!b->failed) add_bytes(&c->out, b->data, b->length);
        /* A whole state may include changes that are sent again later, which is harmless. */
        c->behind = false;
        c->sent = now;
        resume(c);
    }
    pthread_mutex_unlock(&s->lock);
    buffer_free(&change);
    buffer_free(&whole);
    if (!due) return;
    view_sent(v);
    s->told = now;
}

/* =====================================================================================
 * [5] The engine
 * ================================================================================== */

/* Called with the logits of each position of a prompt whose logprobs are echoed. */
static void see_logits(void *user, uint64_t request, int sample, int position, float *logits) {
    prompt *p = (prompt *)user;
    call *c = p->call;
    int vocab = llm_model_config(c->server->model)->vocab_size;
    llm_token_logprob top[MOST_TOP];
    (void)request;
    if (sample || position + 1 >= p->n) return;
    p->logprobs[position + 1] = llm_logprob(logits, vocab, p->ids[position + 1]);
    for (int k = 0; k < c->logprobs; k++) { /* the next likeliest token */
        int best = -1;
        for (int i = 0; i < vocab; i++) {
            bool after = k == 0 || logits[i] < logits[top[k - 1].token] ||
                         (logits[i] == logits[top[k - 1].token] && i > top[k - 1].token);
            if (after && (best < 0 || logits[i] > logits[best])) best = i;
        }
        top[k] = (llm_token_logprob){best < 0 ? 0 : best, llm_logprob(logits, vocab, best)};
    }
    char *text = (char *)malloc(llm_stream_capacity(c->server->tokenizer) + 8);
    separate(&p->tops);
    if (text) add_top(&p->tops, c->server->tokenizer, top, c->logprobs, text);
    free(text);
}

/* Submit the prompts of a call. */
static void submit(server *s, call *c) {
    llm_error err;
    for (int i = 0; i < c->n_prompts; i++) {
        prompt *p = &c->prompts[i];
        llm_request r = c->request;
        r.prompt = p->ids;
        r.n_prompt = (int)p->n;
        r.user = p;
        if (p->logprobs) r.logits_hook = see_logits;
        bool good = s->engine && llm_submit(s->engine, &r, &p->request, &err);
        if (!s->engine) err = s->failure;
        if (good) {
            view_request(&s->view, p->request, r.n_prompt,
                         r.max_tokens < 0 ? s->settings.context_length : r.n_prompt + r.max_tokens);
            pthread_mutex_lock(&s->lock);
            s->prompt_tokens += (uint64_t)p->n;
            pthread_mutex_unlock(&s->lock);
            continue;
        }
        for (int k = 0; k < i; k++) llm_cancel(s->engine, c->prompts[k].request, NULL);
        pthread_mutex_lock(&s->lock);
        bool large = err.status == LLM_ERROR_CAPACITY;
        put_error(c, large ? 400 : 500, large ? "context_length_exceeded" : "engine_error",
                  err.message);
        c->n_live = i * c->request.n_samples; /* the cancelled ones */
        pthread_mutex_unlock(&s->lock);
        return;
    }
    if (!c->stream) return;
    pthread_mutex_lock(&s->lock);
    c->status = 200; /* send the headers now; the first chunk comes with the first token */
    resume(c);
    pthread_mutex_unlock(&s->lock);
}

static void cancel(server *s, const call *c) {
    if (!s->engine) return;
    for (int i = 0; i < c->n_prompts; i++)
        if (c->prompts[i].request) llm_cancel(s->engine, c->prompts[i].request, NULL);
}

/* Find the clients that have left: nothing is read from a suspended connection. */
static void find_gone(server *s) {
    enum { AT_ONCE = 64 };
    struct pollfd polled[AT_ONCE];
    call *calls[AT_ONCE];
    int n = 0;
    pthread_mutex_lock(&s->lock);
    for (call *c = s->calls;; c = c->next) {
        if (c && !c->gone) {
            polled[n] = (struct pollfd){.fd = c->descriptor, .events = POLLRDHUP};
            calls[n++] = c;
        }
        if (n && (n == AT_ONCE || !c) && poll(polled, (nfds_t)n, 0) > 0)
            for (int i = 0; i < n; i++)
                if (polled[i].revents) {
                    resume(calls[i]); /* to close its connection */
                    calls[i]->gone = true;
                }
        if (n == AT_ONCE) n = 0;
        if (!c) break;
    }
    pthread_mutex_unlock(&s->lock);
}

enum { COMMENT_SECONDS = 5 }; /* a stream that has sent nothing for this long gets a comment line */

/* Remove ended calls, cancel those whose client has left, and keep streams alive. */
static void review_calls(server *s) {
    double now = llm_seconds();
    find_gone(s);
    for (call **at = &s->calls, *c; (c = *at);) {
        pthread_mutex_lock(&s->lock);
        bool gone = c->gone, over = c->n_live <= 0;
        if (c->stream && c->status == 200 && !c->ended && now - c->sent > COMMENT_SECONDS) {
            add_text(&c->out, ": waiting\n\n");
            c->sent = now;
        }
        if (c->ended || c->out.length > c->out_at) resume(c);
        if (over) {
            *at = c->next;
            c->owned = false;
        }
        bool unused = over && !c->connection;
        pthread_mutex_unlock(&s->lock);
        if (unused) call_free(c);
        if (over) continue;
        if (gone) cancel(s, c);
        at = &c->next;
    }
}

/* Whether the next step may run. The lock is held. */
static bool may_step(const server *s) {
    if (!s->engine || !s->calls) return false;
    if (s->ending) return true;
    if (s->paused) return s->n_steps > 0;
    return !s->pace || llm_seconds() >= s->next_step;
}

/* Wait until there is work. Watchers, and clients that may leave while the engine is paused, are
 * checked several times a second. The lock is held. */
static void await_work(server *s) {
    while (!s->stopped && !s->inbox && !s->controlling && !s->stirred && !may_step(s)) {
        if (!s->calls && !s->watchers) {
            pthread_cond_wait(&s->wake, &s->lock);
            continue;
        }
        struct timespec end;
        double left = s->next_step - llm_seconds(), most = s->view.changed ? 0.05 : 0.2;
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_nsec += (long)(1e9 * (s->pace && left > 0 && left < most ? left : most));
        end.tv_sec += end.tv_nsec / 1000000000;
        end.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&s->wake, &s->lock, &end) == ETIMEDOUT) break;
    }
    s->stirred = false;
}

/* Take the calls that have arrived; wait for one if there is no work. False: stop. */
static bool take_calls(server *s) {
    call *arrived = NULL;
    pthread_mutex_lock(&s->lock);
    await_work(s);
    bool stopped = s->stopped;
    arrived = s->inbox;
    s->inbox = NULL;
    s->inbox_end = &s->inbox;
    s->n_inbox = 0;
    pthread_mutex_unlock(&s->lock);
    while (arrived) {
        call *c = arrived;
        arrived = c->next;
        c->next = s->calls;
        s->calls = c;
        submit(s, c);
    }
    return !stopped;
}

static void take_events(server *s) {
    llm_event event;
    if (!s->engine) return;
    pthread_mutex_lock(&s->lock);
    while (llm_next_event(s->engine, &event)) take_event(s, &event);
    s->statistics = llm_engine_statistics(s->engine);
    pthread_mutex_unlock(&s->lock);
}

/* End all calls with an error. */
static void fail_calls(server *s, int status, const char *code, const char *message) {
    for (call *c = s->calls; c; c = c->next) {
        pthread_mutex_lock(&s->lock);
        if (!c->ended) put_error(c, status, code, message);
        pthread_mutex_unlock(&s->lock);
        cancel(s, c);
    }
    take_events(s);
    review_calls(s);
}

/* Called for each decision of the engine, on its thread: note when a request is admitted. */
static void see_decision(void *server_, const llm_trace_event *e) {
    server *s = (server *)server_;
    view_event(&s->view, e);
    if (e->kind != LLM_TRACE_STATE || e->from != LLM_WAITING || e->state == LLM_WAITING) return;
    for (call *c = s->calls; c; c = c->next)
        for (int i = 0; i < c->n_prompts; i++) {
            prompt *p = &c->prompts[i];
            if (p->request != e->request || e->sample || e->state == LLM_ENDED) continue;
            p->cached = e->count;
            if (c->started > 0) continue;
            c->started = llm_seconds();
            pthread_mutex_lock(&s->lock);
            observe(&s->queue, c->started - c->queued);
            pthread_mutex_unlock(&s->lock);
        }
}

/* ---- Control ------------------------------------------------------------------------------- */

/* Make an engine with these settings; the backend and the model stay. */
static bool start_engine(server *s, const tuning *t, llm_error *err) {
    llm_engine_options o = s->first;
    o.prefix_cache = t->prefix_cache;
    o.chunked_prefill = t->chunked_prefill;
    o.block_size = t->block_size;
    if (t->cache_tokens)
        o.cache_bytes =
            (uint64_t)t->cache_tokens * llm_model_cache_bytes_per_token(s->model, o.cache_type);
    int context = o.context_length ? o.context_length : llm_model_config(s->model)->context_length;
    if (context > 4096) context = 4096; /* activations of a step need memory */
    if (!o.chunked_prefill && s->first.chunked_prefill && o.max_batch_tokens < context)
        o.max_batch_tokens = context; /* a request must fit in a step */
    llm_engine *engine = llm_engine_create(s->model, &o, err);
    if (!engine) return false;
    llm_statistics statistics = llm_engine_statistics(engine);
    view_reset(&s->view, statistics.blocks_total);
    pthread_mutex_lock(&s->lock);
    s->engine = engine;
    s->settings = *llm_engine_settings(engine);
    s->tuning = *t;
    s->statistics = statistics;
    for (call *c = s->watchers; c; c = c->next) c->behind = true;
    pthread_mutex_unlock(&s->lock);
    return true;
}

/* Replace the engine by one with other settings. On failure, the old settings stay, and err says
 * why. */
static bool restart_engine(server *s, const tuning *t, llm_error *err) {
    tuning old = s->tuning;
    fail_calls(s, 503, "engine_restarted",
               "the engine was restarted with other settings: send the request again");
    pthread_mutex_lock(&s->lock);
    s->past.preemptions += s->statistics.preemptions;
    s->past.prefix_tokens += s->statistics.prefix_tokens;
    s->past.prefix_hits += s->statistics.prefix_hits;
    s->past.proposed += s->statistics.proposed;
    s->past.accepted += s->statistics.accepted;
    pthread_mutex_unlock(&s->lock);
    llm_engine_free(s->engine);
    s->engine = NULL;
    if (start_engine(s, t, err)) return true;
    if (start_engine(s, &old, &s->failure)) return false;
    pthread_mutex_lock(&s->lock);
    s->failed = s->ending = true;
    pthread_mutex_unlock(&s->lock);
    return false;
}

/* Apply the settings of a call of /engine/control, and write its answer. */
static void apply_control(server *s, call *c) {
    const control *x = &c->control;
    tuning t = s->tuning, old = t;
    llm_error err = {0};
    bool good = true;
    if (x->prefix_cache >= 0) t.prefix_cache = x->prefix_cache;
    if (x->chunked_prefill >= 0) t.chunked_prefill = x->chunked_prefill;
    if (x->speculation >= 0) t.speculation = x->speculation;
    if (x->block_size >= 0) t.block_size = x->block_size;
    if (x->cache_tokens >= 0) t.cache_tokens = x->cache_tokens;
    bool same = t.prefix_cache == old.prefix_cache && t.chunked_prefill == old.chunked_prefill &&
                t.speculation == old.speculation && t.block_size == old.block_size &&
                t.cache_tokens == old.cache_tokens;
    if (!s->engine) good = false, err = s->failure;
    else if (!same) good = restart_engine(s, &t, &err);
    pthread_mutex_lock(&s->lock);
    if (x->paused >= 0) s->paused = x->paused;
    if (x->paused >= 0) s->n_steps = 0;
    if (x->pace >= 0) s->pace = x->pace;
    if (x->steps > 0) {
        s->paused = true;
        s->n_steps = s->calls ? s->n_steps + x->steps : 0;
    }
    s->next_step = 0;
    s->view.changed = true;
    buffer_free(&c->out);
    if (good) {
        add(&c->out, "{\"paused\": %s, \"pace\": %d, \"settings\": ", word(s->paused), s->pace);
        put_tuning(&c->out, &s->tuning);
        add_text(&c->out, "}");
        c->status = 200;
    } else {
        refuse(c, 400, "invalid_value", NULL, "%s", err.message);
    }
    c->ended = true;
    c->owned = false;
    bool unused = !c->connection;
    if (!unused) resume(c);
    pthread_mutex_unlock(&s->lock);
    if (unused) call_free(c);
}

static void take_controls(server *s) {
    for (;;) {
        pthread_mutex_lock(&s->lock);
        call *c = s->controlling;
        if (c) s->controlling = c->next;
        pthread_mutex_unlock(&s->lock);
        if (!c) return;
        apply_control(s, c);
    }
}

/* ---- The thread ---------------------------------------------------------------------------- */

enum { MOST_FAILURES = 5 }; /* consecutive failed steps after which the engine is abandoned */

/* Run a step, unless the engine is paused. Returns the result of llm_step, or 0. */
static int run_step(server *s, llm_error *err) {
    pthread_mutex_lock(&s->lock);
    bool may = may_step(s);
    if (may && s->n_steps > 0) s->n_steps--;
    if (may && s->pace) s->next_step = llm_seconds() + 1.0 / s->pace;
    pthread_mutex_unlock(&s->lock);
    return may ? llm_step(s->engine, err) : 0;
}

static void *run_engine(void *server_) {
    server *s = (server *)server_;
    llm_error err;
    int failures = 0;
    while (take_calls(s)) {
        take_controls(s);
        int worked = run_step(s, &err);
        take_events(s);
        review_calls(s);
        take_events(s); /* those of cancelled calls */
        inform_watchers(s);
        failures = worked < 0 ? failures + 1 : 0;
        pthread_mutex_lock(&s->lock);
        s->broken = failures > 0;
        pthread_mutex_unlock(&s->lock);
        if (failures) usleep(100000); /* before the next attempt */
        if (failures < MOST_FAILURES) continue;
        s->failure = err;
        fail_calls(s, 500, "engine_error", err.message);
        pthread_mutex_lock(&s->lock);
        s->failed = s->ending = true;
        pthread_mutex_unlock(&s->lock);
        failures = 0;
    }
    fail_calls(s, 503, "server_ending", "the server is ending");
    take_controls(s);
    inform_watchers(s);
    return NULL;
}

/* =====================================================================================
 * [6] Metrics
 * ================================================================================== */

static const histogram no_ttft = {
    "time_to_first_token_seconds", "Time from the arrival of a request to its first token",
    {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
     80, 160}, {0}, 0};
static const histogram no_between = {
    "inter_token_latency_seconds", "Time between the tokens of a request",
    {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
     7.5, 10, 20}, {0}, 0};
static const histogram no_whole = {
    "e2e_request_latency_seconds", "Time from the arrival of a request to its end",
    {0.01, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480},
    {0}, 0};
static const histogram no_queue = {
    "request_queue_time_seconds", "Time that a request waited before its first step",
    {0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240},
    {0}, 0};

static void put_metric(buffer *b, const server *s, const char *name, const char *kind,
                       const char *help, double value) {
    add(b, "# HELP vllm:%s %s\n# TYPE vllm:%s %s\n", name, help, name, kind);
    add(b, "vllm:%s{engine=\"0\",model_name=", name);
    add_string(b, s->options->model_name, strlen(s->options->model_name));
    add(b, "} %.17g\n", value);
}

static void put_histogram(buffer *b, const server *s, const histogram *h) {
    buffer label = {0};
    uint64_t sum = 0;
    add_text(&label, "engine=\"0\",model_name=");
    add_string(&label, s->options->model_name, strlen(s->options->model_name));
    add_bytes(&label, "", 1);
    if (label.failed) return;
    add(b, "# HELP vllm:%s %s\n# TYPE vllm:%s histogram\n", h->name, h->help, h->name);
    for (int i = 0; i <= N_BOUNDS; i++) {
        sum += h->counts[i];
        add(b, "vllm:%s_bucket{%s,le=\"", h->name, label.data);
        if (i < N_BOUNDS) add(b, "%g\"} %llu\n", h->bounds[i], (unsigned long long)sum);
        else add(b, "+Inf\"} %llu\n", (unsigned long long)sum);
    }
    add(b, "vllm:%s_sum{%s} %.17g\n", h->name, label.data, h->sum);
    add(b, "vllm:%s_count{%s} %llu\n", h->name, label.data, (unsigned long long)sum);
    buffer_free(&label);
}

/* The lock is held. */
static void put_metrics(buffer *b, const server *s) {
    const llm_statistics *t = &s->statistics, *past = &s->past;
    const struct { const char *name, *kind, *help; double value; } metrics[] = {
        {"num_requests_running", "gauge", "Sequences that run", t->running},
        {"num_requests_waiting", "gauge", "Requests that wait", t->waiting + s->n_inbox},
        {"kv_cache_usage_perc", "gauge", "Share of the cache's blocks in use, from 0 to 1",
         t->blocks_total ? 1 - (double)t->blocks_free / (double)t->blocks_total : 0},
        {"num_preemptions_total", "counter", "Preemptions",
         (double)(past->preemptions + t->preemptions)},
        {"prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache",
         (double)(past->prefix_tokens + t->prefix_tokens)},
        {"prefix_cache_hits_total", "counter", "Those that were found",
         (double)(past->prefix_hits + t->prefix_hits)},
        {"prompt_tokens_total", "counter", "Prompt tokens", (double)s->prompt_tokens},
        {"generation_tokens_total", "counter", "Generated tokens", (double)s->generated_tokens},
        {"spec_decode_num_draft_tokens_total", "counter", "Proposals verified",
         (double)(past->proposed + t->proposed)},
        {"spec_decode_num_accepted_tokens_total", "counter", "Proposals accepted",
         (double)(past->accepted + t->accepted)},
    };
    for (int i = 0; i < COUNT(metrics); i++)
        put_metric(b, s, metrics[i].name, metrics[i].kind, metrics[i].help, metrics[i].value);
    add_text(b, "# HELP vllm:request_success_total Ended requests\n"
                "# TYPE vllm:request_success_total counter\n");
    for (int i = 0; i < COUNT(finish_reasons); i++) {
        add(b, "vllm:request_success_total{engine=\"0\",finished_reason=\"%s\",model_name=",
            finish_reasons[i]);
        add_string(b, s->options->model_name, strlen(s->options->model_name));
        add(b, "} %llu\n", (unsigned long long)s->finished[i]);
    }
    put_histogram(b, s, &s->ttft);
    put_histogram(b, s, &s->between);
    put_histogram(b, s, &s->whole);
    put_histogram(b, s, &s->queue);
}

/* =====================================================================================
 * [7] HTTP
 * ================================================================================== */

static enum MHD_Result respond(call *c, int status, const char *type, struct MHD_Response *r) {
    const serve_options *o = c->server->options;
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "x-request-id", c->request_id);
    if (status == 429 || status == 503) MHD_add_response_header(r, "Retry-After", "1");
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (o->cors) {
        MHD_add_response_header(r, "Access-Control-Allow-Origin", o->cors);
        MHD_add_response_header(r, "Access-Control-Allow-Headers", "authorization, content-type");
        MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
        MHD_add_response_header(r, "Access-Control-Expose-Headers", "x-request-id");
        MHD_add_response_header(r, "Vary", "Origin");
    }
    pthread_mutex_lock(&c->server->lock);
    c->status = status;
    pthread_mutex_unlock(&c->server->lock);
    enum MHD_Result result = MHD_queue_response(c->connection, (unsigned)status, r);
    MHD_destroy_response(r);
    return result;
}

static enum MHD_Result respond_text(call *c, int status, const char *type, const buffer *b) {
    if (b->failed) return MHD_NO;
    return respond(c, status, type,
                   MHD_create_response_from_buffer(b->length, b->data ? b->data : (char *)"",
                                                   MHD_RESPMEM_MUST_COPY));
}

/* Give the next part of a stream to libmicrohttpd; suspend the connection if there is none. */
static ssize_t read_out(void *call_, uint64_t position, char *to, size_t most) {
    call *c = (call *)call_;
    ssize_t n = 0;
    (void)position;
    pthread_mutex_lock(&c->server->lock);
    size_t left = c->out.length - c->out_at;
    if (c->gone) n = MHD_CONTENT_READER_END_WITH_ERROR;
    else if (left) {
        n = (ssize_t)(left < most ? left : most);
        memcpy(to, c->out.data + c->out_at, (size_t)n);
        c->out_at += (size_t)n;
        if (c->out_at == c->out.length) c->out.length = c->out_at = 0;
    } else if (c->ended) {
        n = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        c->suspended = true;
        MHD_suspend_connection(c->connection);
    }
    pthread_mutex_unlock(&c->server->lock);
    return n;
}

static enum MHD_Result respond_stream(call *c) {
    struct MHD_Response *r =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, read_out, c, NULL);
    if (r) {
        MHD_add_response_header(r, "Cache-Control", "no-cache");
        MHD_add_response_header(r, "X-Accel-Buffering", "no"); /* makes nginx forward each chunk */
    }
    return respond(c, 200, "text/event-stream; charset=utf-8", r);
}

/* Answer a call that the engine's thread has resumed. */
static enum MHD_Result deliver(call *c) {
    pthread_mutex_lock(&c->server->lock);
    bool gone = c->gone, stream = c->stream && c->status == 200, ended = c->ended;
    int status = c->status;
    buffer out = {0};
    if (!gone && !stream && ended) {
        out = c->out;
        c->out = (buffer){0};
    } else if (!gone && !stream) {
        c->suspended = true;
        MHD_suspend_connection(c->connection);
    }
    pthread_mutex_unlock(&c->server->lock);
    if (gone) return MHD_NO;
    if (!stream && !ended) return MHD_YES;
    if (!stream) {
        enum MHD_Result result = respond_text(c, status, "application/json", &out);
        buffer_free(&out);
        return result;
    }
    return respond_stream(c);
}

/* Pass a call to the engine's thread, unless too many are waiting. */
static enum MHD_Result enqueue(call *c) {
    server *s = c->server;
    pthread_mutex_lock(&s->lock);
    bool full = s->n_inbox + s->statistics.waiting + c->n_prompts > s->options->max_waiting;
    if (!s->ending && !full) {
        c->next = NULL;
        *s->inbox_end = c;
        s->inbox_end = &c->next;
        s->n_inbox += c->n_prompts;
        c->owned = c->suspended = true;
        c->queued = c->sent = llm_seconds();
        c->status = 0;
        MHD_suspend_connection(c->connection);
        pthread_cond_signal(&s->wake);
        pthread_mutex_unlock(&s->lock);
        return MHD_YES;
    }
    bool failed = s->failed, ending = s->ending;
    pthread_mutex_unlock(&s->lock);
    if (failed) refuse(c, 503, "engine_error", NULL, "the engine failed: %s", s->failure.message);
    else if (ending) refuse(c, 503, "server_ending", NULL, "the server is ending");
    else
        refuse(c, 429, "too_many_requests", NULL,
               "%d requests wait already, the most that this server allows: try again later",
               s->options->max_waiting);
    return respond_text(c, c->status, "application/json", &c->out);
}

/* Parse the body. False: the call is refused. */
static bool parse_body(call *c, llm_json *json) {
    llm_error err;
    if (llm_json_parse(json, c->body.data ? c->body.data : "", c->body.length, "the body", &err))
        return true;
    return refuse(c, err.status == LLM_ERROR_MEMORY ? 500 : 400, "invalid_json", NULL, "%s",
                  err.message);
}

static enum MHD_Result post_text(call *c, endpoint kind) {
    llm_json json;
    c->endpoint = kind;
    snprintf(c->id, sizeof c->id, "%s-%013llx", kind == CHAT ? "chatcmpl" : "cmpl",
             (unsigned long long)next_random(c->server));
    bool good = parse_body(c, &json);
    if (good) {
        good = read_request(c, json.nodes);
        llm_json_free(&json);
    }
    buffer_free(&c->body);
    if (good) return enqueue(c);
    return respond_text(c, c->status, "application/json", &c->out);
}

static enum MHD_Result post_completions(call *c) { return post_text(c, COMPLETIONS); }
static enum MHD_Result post_chat(call *c) { return post_text(c, CHAT); }

static void put_model(buffer *b, server *s) {
    const char *path = llm_file_path(llm_model_file(s->model));
    add_text(b, "{\"id\": ");
    add_string(b, s->options->model_name, strlen(s->options->model_name));
    add(b, ", \"object\": \"model\", \"created\": %lld, \"owned_by\": \"llm\", \"root\": ",
        (long long)s->created);
    add_string(b, path, strlen(path));
    add(b, ", \"parent\": null, \"max_model_len\": %d}",
        settings_of(s).context_length);
}

static enum MHD_Result get_models(call *c) {
    buffer b = {0};
    bool all = !strcmp(c->path, "/v1/models");
    add_text(&b, all ? "{\"object\": \"list\", \"data\": [" : "");
    put_model(&b, c->server);
    add_text(&b, all ? "]}" : "");
    enum MHD_Result result = respond_text(c, 200, "application/json", &b);
    buffer_free(&b);
    return result;
}

static enum MHD_Result get_health(call *c) {
    server *s = c->server;
    pthread_mutex_lock(&s->lock);
    bool ill = s->broken || s->failed || s->ending;
    pthread_mutex_unlock(&s->lock);
    buffer b = {0};
    add_text(&b, ill ? "{\"status\": \"unavailable\"}" : "{\"status\": \"ok\"}");
    enum MHD_Result result = respond_text(c, ill ? 503 : 200, "application/json", &b);
    buffer_free(&b);
    return result;
}

static enum MHD_Result get_version(call *c) {
    buffer b = {0};
    add(&b, "{\"version\": \"%s\"}", llm_version());
    enum MHD_Result result = respond_text(c, 200, "application/json", &b);
    buffer_free(&b);
    return result;
}

static enum MHD_Result get_metrics(call *c) {
    buffer b = {0};
    pthread_mutex_lock(&c->server->lock);
    put_metrics(&b, c->server);
    pthread_mutex_unlock(&c->server->lock);
    enum MHD_Result result = respond_text(c, 200, "text/plain; version=0.0.4; charset=utf-8", &b);
    buffer_free(&b);
    return result;
}

static bool tokenize_body(call *c, const llm_json_node *body, buffer *b) {
    const llm_json_node *node = llm_json_member(body, "prompt");
    llm_string text;
    bool bos = true;
    if (!check_model(c, body)) return false;
    if (is_given(llm_json_member(body, "messages"))) {
        c->endpoint = CHAT;
        if (!read_conversation(c, body)) return false;
    } else {
        if (!llm_json_string(node, &text)) return refuse_value(c, "prompt", "a text");
        if (!read_bool(c, body, "add_special_tokens", &bos) || !new_prompts(c, 1)) return false;
        llm_error err;
        c->prompts->n = llm_tokenize_new(c->server->tokenizer, text.data, text.length,
                                         bos ? LLM_TOKENIZE_BOS : 0, &c->prompts->ids, &err);
        if (c->prompts->n < 0) return fail_with(c, &err, "prompt");
    }
    add(b, "{\"count\": %lld, \"max_model_len\": %d, \"tokens\": [", (long long)c->prompts->n,
        settings_of(c->server).context_length);
    for (int64_t i = 0; i < c->prompts->n; i++) add(b, i ? ", %d" : "%d", c->prompts->ids[i]);
    add_text(b, "]}");
    return true;
}

static bool detokenize_body(call *c, const llm_json_node *body, buffer *b) {
    const llm_json_node *node = llm_json_member(body, "tokens");
    llm_error err;
    char *text;
    if (!check_model(c, body)) return false;
    if (!llm_json_has_kind(node, LLM_JSON_ARRAY))
        return refuse_value(c, "tokens", "an array of token ids");
    if (!new_prompts(c, 1) || !read_ids(c, node, c->prompts)) return false;
    int64_t n = llm_detokenize_new(c->server->tokenizer, c->prompts->ids, c->prompts->n, &text,
                                   &err);
    if (n < 0) return fail_with(c, &err, "tokens");
    add_text(b, "{\"prompt\": ");
    add_string(b, text, (size_t)n);
    add_text(b, "}");
    llm_free(text);
    return true;
}

/* Answer a request about tokens, which needs no engine. */
static enum MHD_Result post_about_tokens(call *c, bool (*answer)(call *, const llm_json_node *,
                                                                 buffer *)) {
    llm_json json;
    buffer b = {0};
    bool good = parse_body(c, &json);
    if (good) {
        good = answer(c, json.nodes, &b);
        llm_json_free(&json);
    }
    enum MHD_Result result = good ? respond_text(c, 200, "application/json", &b)
                                  : respond_text(c, c->status, "application/json", &c->out);
    buffer_free(&b);
    return result;
}

static enum MHD_Result post_tokenize(call *c) { return post_about_tokens(c, tokenize_body); }
static enum MHD_Result post_detokenize(call *c) { return post_about_tokens(c, detokenize_body); }

/* ---- The page -------------------------------------------------------------------------------- */

static enum MHD_Result get_page(call *c) {
    const serve_options *o = c->server->options;
    if (!o->page) {
        refuse(c, 404, NULL, NULL, "this server has no page");
        return respond_text(c, c->status, "application/json", &c->out);
    }
    struct MHD_Response *r = MHD_create_response_from_buffer(
        o->page_size, (void *)(uintptr_t)o->page, MHD_RESPMEM_PERSISTENT);
    if (r) {
        MHD_add_response_header(r, "Cache-Control", "no-cache");
        MHD_add_response_header(r, "X-Frame-Options", "DENY");
        MHD_add_response_header(r, "Content-Security-Policy",
                                "default-src 'none'; script-src 'unsafe-inline'; style-src "
                                "'unsafe-inline'; connect-src 'self'; img-src data:");
    }
    return respond(c, 200, "text/html; charset=utf-8", r);
}

/* The stream of the engine's states. */
static enum MHD_Result get_events(call *c) {
    server *s = c->server;
    if (!strcmp(c->method, "HEAD"))
        return respond_text(c, 200, "text/event-stream; charset=utf-8", &(buffer){0});
    pthread_mutex_lock(&s->lock);
    bool full = s->n_watchers >= MOST_WATCHERS, ending = s->ending;
    if (!full && !ending) {
        c->stream = c->behind = true;
        c->status = 200;
        c->sent = llm_seconds();
        c->next = s->watchers;
        s->watchers = c;
        s->n_watchers++;
        s->stirred = true;
        pthread_cond_signal(&s->wake);
    }
    pthread_mutex_unlock(&s->lock);
    if (!full && !ending) return respond_stream(c);
    if (ending) refuse(c, 503, "server_ending", NULL, "the server is ending");
    else refuse(c, 429, "too_many_requests", NULL, "%d others watch already", MOST_WATCHERS);
    return respond_text(c, c->status, "application/json", &c->out);
}

/* Whether a request comes from the server's own page, or from no page. Without this check, any page
 * open in a browser on this machine could control the engine. */
static bool is_own_page(const call *c) {
    const char *origin = MHD_lookup_connection_value(c->connection, MHD_HEADER_KIND, "Origin");
    const char *host = MHD_lookup_connection_value(c->connection, MHD_HEADER_KIND, "Host");
    const char *cors = c->server->options->cors;
    if (!origin || (cors && !strcmp(origin, cors))) return true;
    const char *name = strstr(origin, "://");
    return name && host && !strcasecmp(name + 3, host);
}

static bool read_switch(call *c, const llm_json_node *body, const char *name, int *out) {
    bool on = false;
    if (!read_bool(c, body, name, &on)) return false;
    if (is_given(llm_json_member(body, name))) *out = on;
    return true;
}

static bool read_control(call *c, const llm_json_node *body) {
    control *x = &c->control;
    const llm_json_node *settings = llm_json_member(body, "settings");
    *x = (control){-1, -1, -1, -1, -1, -1, -1, -1};
    if (!llm_json_has_kind(body, LLM_JSON_OBJECT))
        return refuse(c, 400, NULL, NULL, "the body must be a JSON object");
    if (is_given(settings) && !llm_json_has_kind(settings, LLM_JSON_OBJECT))
        return refuse_value(c, "settings", "an object");
    return read_switch(c, body, "paused", &x->paused) &&
           read_int(c, body, "steps", 1, 1000, &x->steps) &&
           read_int(c, body, "pace", 0, 1000, &x->pace) &&
           read_switch(c, settings, "prefix_cache", &x->prefix_cache) &&
           read_switch(c, settings, "chunked_prefill", &x->chunked_prefill) &&
           read_switch(c, settings, "speculation", &x->speculation) &&
           read_int(c, settings, "block_size", 1, 1024, &x->block_size) &&
           read_int(c, settings, "cache_tokens", 0, 1 << 30, &x->cache_tokens);
}

/* Pause the engine, run single steps, or restart it with other settings. */
static enum MHD_Result post_control(call *c) {
    server *s = c->server;
    llm_json json;
    bool good = false;
    if (!s->controls)
        refuse(c, 403, "controls_forbidden", NULL,
               "the engine can be controlled only if the server listens on loopback, or was "
               "started with --page-controls");
    else if (!is_own_page(c))
        refuse(c, 403, "controls_forbidden", NULL, "pages of other origins cannot control it");
    else if (parse_body(c, &json)) {
        good = read_control(c, json.nodes);
        llm_json_free(&json);
    }
    buffer_free(&c->body);
    if (good) {
        pthread_mutex_lock(&s->lock);
        good = !s->ending;
        if (good) {
            call **end = &s->controlling;
            while (*end) end = &(*end)->next;
            *end = c;
            c->next = NULL;
            c->owned = c->suspended = true;
            c->status = 0;
            MHD_suspend_connection(c->connection);
            pthread_cond_signal(&s->wake);
        }
        pthread_mutex_unlock(&s->lock);
        if (good) return MHD_YES;
        refuse(c, 503, "server_ending", NULL, "the server is ending");
    }
    return respond_text(c, c->status, "application/json", &c->out);
}

typedef struct route {
    const char *method, *path;
    bool open; /* needs no key */
    enum MHD_Result (*answer)(call *);
} route;

static const route routes[] = {
    {"POST", "/v1/chat/completions", false, post_chat},
    {"POST", "/v1/completions", false, post_completions},
    {"GET", "/v1/models", false, get_models},
    {"POST", "/tokenize", false, post_tokenize},
    {"POST", "/detokenize", false, post_detokenize},
    {"GET", "/engine/events", false, get_events},
    {"POST", "/engine/control", false, post_control},
    {"GET", "/", true, get_page},
    {"GET", "/health", true, get_health},
    {"GET", "/metrics", true, get_metrics},
    {"GET", "/version", true, get_version},
};

/* Compare in a time that does not depend on where the texts differ. */
static bool same_key(const char *key, const char *given) {
    size_t n = strlen(key), m = strlen(given);
    unsigned different = n != m;
    for (size_t i = 0; i < m; i++) different |= (unsigned char)(given[i] ^ key[n ? i % n : 0]);
    return !different;
}

static bool is_allowed(const call *c) {
    const serve_options *o = c->server->options;
    const char *given =
        MHD_lookup_connection_value(c->connection, MHD_HEADER_KIND, "Authorization");
    bool allowed = o->n_keys == 0;
    if (!given || strncasecmp(given, "Bearer ", 7)) given = "";
    else given += 7 + strspn(given + 7, " ");
    for (int i = 0; i < o->n_keys; i++) allowed |= same_key(o->keys[i], given);
    return allowed;
}

static enum MHD_Result answer(call *c) {
    const route *r = NULL;
    char allow[32] = "";
    size_t own = strlen("/v1/models/");
    bool model = !strncmp(c->path, "/v1/models/", own);
    if (c->server->options->cors && !strcmp(c->method, "OPTIONS"))
        return respond_text(c, 204, "text/plain", &(buffer){0});
    for (int i = 0; i < COUNT(routes); i++) {
        bool here = !strcmp(c->path, routes[i].path) || (model && routes[i].answer == get_models);
        bool head = !strcmp(c->method, "HEAD") && !strcmp(routes[i].method, "GET");
        if (here && (head || !strcmp(c->method, routes[i].method))) r = &routes[i];
        if (here) snprintf(allow, sizeof allow, "%s", routes[i].method);
    }
    if (!r && *allow) refuse(c, 405, NULL, NULL, "%s needs the method %s", c->path, allow);
    else if (!r) refuse(c, 404, NULL, NULL, "there is nothing at %s %s", c->method, c->path);
    else if (!r->open && !is_allowed(c))
        refuse(c, 401, "invalid_api_key", NULL, "the API key is missing or wrong");
    else if (c->too_large)
        refuse(c, 413, NULL, NULL, "the body has more than %zu bytes, the most that are accepted",
               c->server->options->max_body);
    else if (c->body.failed) refuse(c, 500, NULL, NULL, "out of memory");
    else if (model && strcmp(c->path + own, c->server->options->model_name))
        refuse(c, 404, "model_not_found", "model", "the model '%s' does not exist", c->path + own);
    else return r->answer(c);
    return respond_text(c, c->status, "application/json", &c->out);
}

/* ---- Connections ----------------------------------------------------------------------------- */

static client *client_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? (client *)info->socket_context : NULL;
}

/* A connection has been opened or is about to be closed. */
static void notice_connection(void *server_, struct MHD_Connection *connection, void **context,
                              enum MHD_ConnectionNotificationCode code) {
    server *s = (server *)server_;
    client *x = (client *)*context;
    pthread_mutex_lock(&s->lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        int on = 1;
        x = (client *)calloc(1, sizeof *x);
        *context = x;
        if (x && info) {
            x->descriptor = info->connect_fd;
            x->since = llm_seconds();
            setsockopt(x->descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            x->next = s->clients;
            if (x->next) x->next->previous = x;
            s->clients = x;
        }
    } else if (x) {
        if (x->next) x->next->previous = x->previous;
        if (x->previous) x->previous->next = x->next;
        else if (s->clients == x) s->clients = x->next;
        free(x);
        *context = NULL;
    }
    pthread_mutex_unlock(&s->lock);
}

/* Close connections whose request takes too long to arrive, and those that are idle. */
static void close_slow(server *s) {
    double now = llm_seconds();
    pthread_mutex_lock(&s->lock);
    for (client *x = s->clients; x; x = x->next)
        if (x->since > 0 && now - x->since > s->options->receive_seconds)
            shutdown(x->descriptor, SHUT_RDWR);
    pthread_mutex_unlock(&s->lock);
}

static call *call_new(server *s, struct MHD_Connection *connection, const char *url,
                      const char *method) {
    call *c = (call *)calloc(1, sizeof *c);
    if (!c) return NULL;
    const char *id = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "x-request-id");
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    c->server = s;
    c->connection = connection;
    c->descriptor = info ? info->connect_fd : -1;
    c->began = llm_seconds();
    c->endpoint = OTHER;
    snprintf(c->method, sizeof c->method, "%s", method);
    snprintf(c->path, sizeof c->path, "%s", url);
    bool printable = id && *id && strlen(id) < sizeof c->request_id;
    for (const char *p = id; printable && *p; p++) printable = *p > 0x20 && *p < 0x7f;
    if (printable) snprintf(c->request_id, sizeof c->request_id, "%s", id);
    else
        snprintf(c->request_id, sizeof c->request_id, "req-%013llx",
                 (unsigned long long)next_random(s));
    info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct sockaddr *address = info ? info->client_addr : NULL;
    if (address)
        getnameinfo(address,
                    address->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                   : sizeof(struct sockaddr_in),
                    c->client, sizeof c->client, NULL, 0, NI_NUMERICHOST);
    pthread_mutex_lock(&s->lock);
    s->n_open++;
    pthread_mutex_unlock(&s->lock);
    return c;
}

/* Called by libmicrohttpd for each request: once for its head, for each part of its body, at its
 * end, and after its connection was resumed. */
static enum MHD_Result handle(void *server_, struct MHD_Connection *connection, const char *url,
                              const char *method, const char *version, const char *data,
                              size_t *size, void **call_) {
    server *s = (server *)server_;
    call *c = (call *)*call_;
    (void)version;
    if (!c) {
        *call_ = call_new(s, connection, url, method);
        return *call_ ? MHD_YES : MHD_NO;
    }
    if (*size) {
        c->too_large = c->too_large || c->body.length + *size > s->options->max_body;
        if (c->too_large) buffer_free(&c->body);
        else add_bytes(&c->body, data, *size);
        *size = 0;
        return MHD_YES;
    }
    client *x = client_of(connection);
    pthread_mutex_lock(&s->lock);
    bool answered = c->owned || c->status;
    if (x && !answered) x->since = 0; /* the whole request has arrived */
    pthread_mutex_unlock(&s->lock);
    return answered ? deliver(c) : answer(c);
}

/* Write a line of the log. */
static void log_call(const call *c) {
    FILE *log = c->server->options->log;
    buffer b = {0};
    char now[32];
    struct timespec t;
    struct tm parts;
    if (!log) return;
    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &parts);
    strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%S", &parts);
    add(&b, "{\"time\": \"%s.%03ldZ\", \"client\": \"%s\", \"request_id\": ", now,
        t.tv_nsec / 1000000, c->client);
    add_string(&b, c->request_id, strlen(c->request_id));
    add_text(&b, ", \"method\": ");
    add_string(&b, c->method, strlen(c->method));
    add_text(&b, ", \"path\": ");
    add_string(&b, c->path, strlen(c->path));
    add(&b, ", \"status\": %d, \"seconds\": %.6f", c->status, llm_seconds() - c->began);
    if (c->queued > 0) {
        add(&b, ", \"id\": \"%s\", \"stream\": %s, \"prompt_tokens\": %lld, "
                "\"completion_tokens\": %d, \"seed\": %llu", c->id, c->stream ? "true" : "false",
            (long long)prompt_tokens(c), c->n_generated,
            (unsigned long long)c->request.sampling.seed);
        if (c->first > 0) add(&b, ", \"ttft_seconds\": %.6f", c->first - c->queued);
        if (c->choices && c->choices[0].finish)
            add(&b, ", \"finish\": \"%s\"", c->choices[0].finish);
        if (c->n_live > 0) add_text(&b, ", \"finish\": \"client left\"");
        if (c->fallback) add_text(&b, ", \"template\": \"none: roles as text\"");
    }
    add_text(&b, "}\n");
    if (!b.failed) fwrite(b.data, 1, b.length, log);
    fflush(log);
    buffer_free(&b);
}

/* Called by libmicrohttpd when a request is finished, for any reason. */
static void finished(void *server_, struct MHD_Connection *connection, void **call_,
                     enum MHD_RequestTerminationCode reason) {
    server *s = (server *)server_;
    call *c = (call *)*call_;
    client *x = client_of(connection);
    (void)reason;
    if (!c) return;
    *call_ = NULL;
    pthread_mutex_lock(&s->lock);
    log_call(c);
    if (x) x->since = llm_seconds();
    s->n_open--;
    c->gone = true;
    c->connection = NULL;
    bool owned = c->owned;
    for (call **at = &s->watchers; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            s->n_watchers--;
            break;
        }
    if (owned) pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    if (!owned) call_free(c);
}

/* =====================================================================================
 * [8] serve
 * ================================================================================== */

serve_options serve_defaults(void) {
    serve_options o = {.host = "127.0.0.1",
                       .port = 8080,
                       .max_waiting = 256,
                       .max_connections = 2048,
                       .max_body = 8 << 20,
                       .receive_seconds = 30,
                       .grace_seconds = 30,
                       .chat = llm_chat_defaults(),
                       .log = stderr};
    return o;
}

__attribute__((format(printf, 3, 4))) static bool
fail(llm_error *err, llm_status status, const char *format, ...) {
    va_list arguments;
    if (!err) return false;
    *err = (llm_error){.status = status};
    va_start(arguments, format);
    vsnprintf(err->message, sizeof err->message, format, arguments);
    va_end(arguments);
    return false;
}

/* Whether an address is reachable only from this machine. */
static bool is_loopback(const struct sockaddr_storage *address) {
    if (address->ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == 127;
    return address->ss_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

/* Open a listening socket and write its URL to `url`. -1: failed. */
static int listen_on(const serve_options *o, char *url, size_t size, bool *loopback,
                     llm_error *err) {
    struct addrinfo hints = {.ai_flags = AI_PASSIVE, .ai_socktype = SOCK_STREAM}, *found = NULL;
    char port[16];
    int on = 1, s = -1, code;
    snprintf(port, sizeof port, "%d", o->port);
    if ((code = getaddrinfo(o->host, port, &hints, &found)) != 0)
        return fail(err, LLM_ERROR_ARGUMENT, "host %s: %s", o->host, gai_strerror(code)), -1;
    s = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s >= 0) setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (s < 0 || bind(s, found->ai_addr, found->ai_addrlen) != 0 || listen(s, 1024) != 0) {
        fail(err, LLM_ERROR_FILE, "cannot listen on %s, port %d: %s%s", o->host, o->port,
             strerror(errno), errno == EADDRINUSE ? "; choose another port" : "");
        if (s >= 0) close(s);
        s = -1;
    }
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    if (s >= 0 && getsockname(s, (struct sockaddr *)&address, &length) == 0) {
        char host[64] = "", service[16] = "";
        *loopback = is_loopback(&address);
        getnameinfo((struct sockaddr *)&address, length, host, sizeof host, service, sizeof service,
                    NI_NUMERICHOST | NI_NUMERICSERV);
        snprintf(url, size, address.ss_family == AF_INET6 ? "http://[%s]:%s" : "http://%s:%s", host,
                 service);
    }
    freeaddrinfo(found);
    return s;
}

/* Allow n open files: each connection is one. */
static void allow_files(int n) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= (rlim_t)n) return;
    limit.rlim_cur = limit.rlim_max < (rlim_t)n ? limit.rlim_max : (rlim_t)n;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void be_quiet(void *user, const char *format, va_list arguments) {
    (void)user, (void)format, (void)arguments;
}

static struct MHD_Daemon *start_http(server *s, int listening) {
    unsigned most = (unsigned)s->options->max_connections;
    return MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL, NULL,
        handle, s, MHD_OPTION_EXTERNAL_LOGGER, be_quiet, NULL, /* first: before any message */
        MHD_OPTION_LISTEN_SOCKET, listening, MHD_OPTION_CONNECTION_LIMIT, most,
        MHD_OPTION_NOTIFY_COMPLETED, finished, s, MHD_OPTION_NOTIFY_CONNECTION, notice_connection,
        s, MHD_OPTION_END);
}

/* Wait until the running calls have ended, for at most the grace time; then end them. */
static void end_calls(server *s) {
    double end = llm_seconds() + s->options->grace_seconds;
    bool busy = true;
    pthread_mutex_lock(&s->lock);
    s->ending = s->stirred = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    while (busy && llm_seconds() < end) {
        pthread_mutex_lock(&s->lock);
        busy = s->n_open > 0;
        pthread_mutex_unlock(&s->lock);
        close_slow(s);
        if (busy) usleep(20000);
    }
    pthread_mutex_lock(&s->lock);
    s->stopped = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    for (int i = 0; busy && i < 100; i++) { /* wait until the last output is sent */
        pthread_mutex_lock(&s->lock);
        busy = s->n_open > 0;
        pthread_mutex_unlock(&s->lock);
        if (busy) usleep(20000);
    }
}

static bool run_server(server *s, llm_error *err) {
    char url[128] = "";
    bool loopback = false;
    int listening = listen_on(s->options, url, sizeof url, &loopback, err);
    if (listening < 0) return false;
    s->controls = loopback || s->options->page_controls;
    allow_files(s->options->max_connections + 64);
    if (pthread_create(&s->thread, NULL, run_engine, s) != 0) {
        close(listening);
        return fail(err, LLM_ERROR_MEMORY, "cannot start a thread");
    }
    struct MHD_Daemon *http = start_http(s, listening);
    if (!http) {
        pthread_mutex_lock(&s->lock);
        s->stopped = true;
        pthread_cond_signal(&s->wake);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
        close(listening);
        return fail(err, LLM_ERROR_MEMORY, "libmicrohttpd could not start");
    }
    if (s->options->ready) s->options->ready(s->options->user, url);
    for (bool failed = false; !*s->options->stop && !failed;) {
        usleep(50000);
        close_slow(s);
        pthread_mutex_lock(&s->lock);
        failed = s->failed;
        pthread_mutex_unlock(&s->lock);
    }
    MHD_quiesce_daemon(http); /* accept no more connections */
    close(listening);
    end_calls(s);
    MHD_stop_daemon(http);
    if (s->failed && err) *err = s->failure;
    return !s->failed;
}

bool serve(const llm_model *model, const llm_engine_options *engine_options,
           const serve_options *options, llm_error *err) {
    llm_engine_options o = engine_options ? *engine_options : llm_engine_defaults();
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    server s = {.options = options,
                .model = model,
                .tokenizer = llm_model_tokenizer(model),
                .created = t.tv_sec,
                .seed = (uint64_t)t.tv_sec * 1000000007u + (uint64_t)t.tv_nsec,
                .ttft = no_ttft,
                .between = no_between,
                .whole = no_whole,
                .queue = no_queue};
    if (err) *err = (llm_error){0};
    s.inbox_end = &s.inbox;
    o.trace = see_decision;
    o.trace_user = &s;
    s.first = o;
    s.tuning = (tuning){.prefix_cache = o.prefix_cache,
                        .chunked_prefill = o.chunked_prefill,
                        .speculation = options->speculate != 0,
                        .block_size = o.block_size};
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.wake, NULL);
    if (!start_engine(&s, &s.tuning, err)) return false;
    bool good = run_server(&s, err);
    pthread_mutex_destroy(&s.lock);
    pthread_cond_destroy(&s.wake);
    llm_engine_free(s.engine);
    view_free(&s.view);
    return good;
}
#endif
