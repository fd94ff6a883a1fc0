/* serve.h - an HTTP server over an engine of llm.h, with OpenAI's API. serve.c implements it, with
 * libmicrohttpd; docs/serve.c is the command. */
#ifndef SERVE_H
#define SERVE_H
#include "llm.h"

#include <signal.h>
#include <stdio.h>

typedef struct serve_options { /* start from serve_defaults() */
    const char *host;        /* address to listen on; default "127.0.0.1" */
    int port;                /* 0: any free one; default 8080 */
    const char *const *keys; /* (n_keys) accepted API keys */
    int n_keys;              /* number of keys; 0 (default): any key, or none, is accepted */
    const char *model_name;  /* name of the model for clients; required */
    const char *cors;        /* origin that browsers may call from, or "*"; NULL (default): none */
    int max_waiting;         /* requests that may wait; further ones are refused; default 256 */
    int max_connections;     /* default 2048 */
    size_t max_body;         /* longest body of a request in bytes; default 8 MiB */
    double receive_seconds;  /* time in which a client must send a request; default 30 */
    double grace_seconds;    /* time that running requests get when the server ends; default 30 */
    int speculate;           /* llm_request.speculate of each request; default 0 */
    int branches;            /* llm_request.branches of each request */
    bool lookup;             /* llm_request.lookup of each request */
    llm_chat_options chat;   /* default llm_chat_defaults() */
    const unsigned char *page; /* (page_size) HTML of GET /; NULL: none */
    size_t page_size;
    bool page_controls;      /* clients may pause and restart the engine, not only on loopback */
    FILE *log;               /* one JSON line per HTTP request; NULL: none; default stderr */
    volatile sig_atomic_t *stop; /* the server ends after this becomes nonzero */
    /* Called once the server listens; url: "http://127.0.0.1:8080". NULL: none. */
    void (*ready)(void *user, const char *url);
    void *user;              /* first argument of `ready` */
} serve_options;

serve_options serve_defaults(void);

/* Serve a model until *options->stop is nonzero. engine_options NULL: the defaults. False: the
 * server could not start, or the engine failed for good. */
bool serve(const llm_model *model, const llm_engine_options *engine_options,
           const serve_options *options, llm_error *err);
#endif
