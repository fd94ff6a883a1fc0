/* program.h - programs, for commands and lessons: small programs that measure single operations,
 * and the program of a model, shown as text or JSON. */
#ifndef PROGRAM_H
#define PROGRAM_H
#include "cli.h"

/* ---- A batch of one sequence ------------------------------------------------------------- */

typedef struct lone_batch {
    llm_batch batch;
    int32_t first, count, row;
    int32_t *memory; /* memory of the arrays; free it */
} lone_batch;

/* Make a batch of n tokens, the last one at position end - 1, with or without its logits. Its
 * block table is 0, 1, 2, ... The token ids do not matter. *l must stay in place. */
void make_lone_batch(lone_batch *l, int n, int end, int block_size, bool logits);

/* ---- A program of single operations ------------------------------------------------------ */

/* Add an operation, out (., n_out) = kind(in (., n_in)), to a program that starts as zeros. The
 * result is valid until the next one is added. */
llm_op *program_add(llm_program *p, llm_op_kind kind, const llm_weight *w, const float *in,
                    int64_t n_in, float *out, int64_t n_out);
int program_buffer(llm_program *p, const float *data, int64_t width); /* its index; added if new */
/* Run such a program over n rows, and wait for its end. The first call prepares it for n rows. */
bool program_run(llm_backend *b, llm_program *p, int n, llm_error *err);
void program_free(llm_backend *b, llm_program *p);

/* Measure the operations per second of the engine's matrix product, on a matrix of the model's type
 * that stays in the cache, with so many rows that the arithmetic is the limit. 0: failed. */
double arithmetic_peak(const llm_model *model, llm_backend *b);

/* ---- A model's program ------------------------------------------------------------------- */

/* For a norm or a matrix product: the name of its weight, without ".weight". For any other
 * operation: its kind. */
const char *op_name(const llm_op *op, char name[48]);
#define OP_NAME(op) op_name(op, (char[48]){0})
const char *op_flow(const llm_program *p, const llm_op *op, char out[160]); /* "gate,up -> gate" */
#define OP_FLOW(p, op) op_flow(p, op, (char[160]){0})
const char *op_weight(const llm_op *op, char out[96]); /* "attn_q q4_0 256 x 256" */
#define OP_WEIGHT(op) op_weight(op, (char[96]){0})

double cost_bytes(const llm_cost *c);

/* owner[i] is the last operation of the stage that contains operation i. If a device does not
 * report its stages, an operation that took no time belongs to the stage of the one before it. */
void find_owners(const llm_backend *b, const llm_program *p, const llm_batch *batch, int *owner);

/* Count the barriers in a step. show: also print the stages of layer 0, one line from each barrier
 * to the next. */
int count_barriers(const llm_backend *b, const llm_program *p, const llm_batch *batch, bool show);

typedef struct program_view { /* what to show */
    bool json;
    bool plan;   /* show also the stages that the device planned */
    bool all;    /* show all layers, even if they are alike */
    int tokens;  /* number of tokens of the batch */
    int context; /* the last token is at position context - 1 */
    /* Set by program_show: */
    const llm_backend *backend;
    const llm_program *program;
    lone_batch lone;
    int *owner;                 /* (n_ops) see find_owners */
    struct program_line *lines; /* (n) not shown yet */
    int n;
} program_view;

/* Show the program of an engine. */
bool program_show(program_view *v, llm_engine *engine, const char *path);
#endif
