/* tools.h - functions of the tools that create and evaluate model files, shared with the lessons
 * and benchmarks. */
#ifndef TOOLS_H
#define TOOLS_H
#include "../docs/cli.h"
#include "quantize.h"

/* ---- synth.c: well-known shapes ---------------------------------------------------------- */

typedef struct shape {
    const char *name;
    int dim, layers, heads, kv_heads, hidden, vocab, context;
    int head_dim; /* 0: dim / heads */
    float rope_base;
    int tied;
} shape;
enum { N_SHAPES = 7 };
extern const shape shapes[N_SHAPES];

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
