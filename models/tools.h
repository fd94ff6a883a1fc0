/* tools.h - functions of the tools that create and evaluate model files, shared with the lessons
 * and benchmarks. */
#ifndef TOOLS_H
#define TOOLS_H
#include "../docs/cli.h"
#include "quantize.h"

/* ---- synth.c: well-known shapes, and larger models ----   */

typedef struct shape {
    const char *name;
    int dim, layers, heads, kv_heads, hidden, vocab, context;
    int head_dim; /* 0: dim / heads */
    float rope_base;
    int tied;
    int experts, experts_used; /* 0: none */
} shape;
enum { N_SHAPES = 10 };
extern const shape shapes[N_SHAPES];

/* Write a model of about `bytes` bytes that computes what `in`, a GGUF file, computes. */
bool inflate(const char *in, const char *out, uint64_t bytes, uint64_t seed, llm_error *err);
/* The same as a model, by a temporary file. NULL: the reason has been printed. */
llm_model *inflated_model(const char *path, uint64_t bytes);

/* ---- quantize_command.c ------------------------------------------------------------------ */

/* Print which matrices of the file could not have this type. */
void put_other_types(const llm_file *file, llm_type type);

/* ---- perplexity.c ------------------------------------------------------------------------ */

typedef struct perplexity {
    const char *model;
    int context, threads;
    bool json;
    llm_model *loaded;
    llm_engine *engine;
    /* the current document */
    int32_t *ids;
    int64_t n_ids;
    int64_t start; /* index in ids of the start of the window */
    int64_t done;  /* ids[1 .. done - 1] have been predicted */
    double document_nats;
    /* all documents so far */
    uint64_t documents, bytes, predicted, computed;
    double nats, seconds;
} perplexity;

/* Predict one document: BOS, its tokens, EOS. Windows are as long as the context and advance by
 * half of it. all_bytes: bytes of all documents, for the progress bar. Needs `loaded`, `engine` and
 * `context`. */
bool perplexity_document(perplexity *p, const char *data, size_t length, uint64_t all_bytes);

/* Find the next document. It ends at a line that holds only <|endoftext|>; newlines around that
 * line are not part of the document. */
bool next_document(const char **p, const char *end, const char **document, size_t *length);
#endif
