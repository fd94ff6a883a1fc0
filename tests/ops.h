/* tests/ops.h: programs of one or a few operations on memory that the test owns. Build a program
 * with the ops_... functions and run it with ops_run; or call an op_... function, which runs a
 * single operation. */
#ifndef OPS_H
#define OPS_H

#include "llm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPS_MOST = 600 };

typedef struct ops {
    llm_program program;
    llm_op list[OPS_MOST];
    llm_buffer buffers[3 * OPS_MOST];
    llm_weight vectors[4 * OPS_MOST];
    int n_vectors;
    llm_cache cache;
} ops;

static inline ops *ops_new(void) {
    ops *o = (ops *)calloc(1, sizeof *o);
    if (!o) abort();
    o->program.ops = o->list;
    o->program.buffers = o->buffers;
    o->program.cache = &o->cache;
    o->program.fusions = LLM_FUSE_ALL;
    return o;
}

/* The index of the buffer at `data`; adds the buffer if it is new. */
static inline int ops_buffer(ops *o, const float *data, int64_t width, bool head) {
    for (int i = 0; i < o->program.n_buffers; i++)
        if (o->buffers[i].data == data) return i;
    llm_buffer buffer = {"test", width, head, (float *)(size_t)data};
    o->buffers[o->program.n_buffers] = buffer;
    return o->program.n_buffers++;
}

static inline const llm_weight *ops_vector(ops *o, const float *data, int64_t n) {
    if (!data) return NULL;
    llm_weight *w = &o->vectors[o->n_vectors++];
    w->type = LLM_F32;
    w->rows = 1;
    w->cols = n;
    w->data = data;
    return w;
}

static inline llm_op *ops_add(ops *o, llm_op_kind kind) {
    llm_op *op = &o->list[o->program.n_ops++];
    if (o->program.n_ops > OPS_MOST) abort();
    op->kind = kind;
    op->name = "";
    for (int i = 0; i < LLM_OP_INPUTS; i++) op->in[i] = -1;
    op->out = -1;
    o->program.n_body = o->program.n_ops;
    return op;
}

static inline void ops_rmsnorm(ops *o, const float *x, const float *weight, int dim, float epsilon,
                               float *out) {
    llm_op *op = ops_add(o, LLM_OP_RMSNORM);
    op->in[0] = ops_buffer(o, x, dim, false);
    op->out = ops_buffer(o, out, dim, false);
    op->weight = ops_vector(o, weight, dim);
    op->epsilon = epsilon;
}

static inline void ops_matmul(ops *o, const float *x, const llm_weight *w, const float *bias,
                              bool add, float *out) {
    llm_op *op = ops_add(o, LLM_OP_MATMUL);
    op->in[0] = ops_buffer(o, x, w->cols, false);
    op->out = ops_buffer(o, out, w->rows, false);
    op->weight = w;
    op->bias = ops_vector(o, bias, w->rows);
    op->add = add;
}

static inline void ops_swiglu(ops *o, const float *gate, const float *up, int64_t width,
                              float *out) {
    llm_op *op = ops_add(o, LLM_OP_SWIGLU);
    op->in[0] = ops_buffer(o, gate, width, false);
    op->in[1] = ops_buffer(o, up, width, false);
    op->out = ops_buffer(o, out, width, false);
}

static inline void ops_softcap(ops *o, const float *x, float cap, int64_t width, float *out) {
    llm_op *op = ops_add(o, LLM_OP_SOFTCAP);
    op->in[0] = ops_buffer(o, x, width, false);
    op->out = ops_buffer(o, out, width, false);
    op->scale = cap;
}

/* `order` must outlive the program. */
static inline void ops_gather_columns(ops *o, const float *x, const llm_weight *order, float *out) {
    llm_op *op = ops_add(o, LLM_OP_GATHER_COLUMNS);
    op->in[0] = ops_buffer(o, x, order->cols, false);
    op->out = ops_buffer(o, out, order->cols, false);
    op->weight = order;
}

static inline void ops_embed(ops *o, const llm_weight *table, float *out) {
    llm_op *op = ops_add(o, LLM_OP_EMBED);
    op->out = ops_buffer(o, out, table->cols, false);
    op->weight = table;
    op->scale = 1;
}

static inline void ops_rope_angles(ops *o, const float *frequencies, int rope_dim, float magnitude,
                                   float *angles) {
    llm_op *op = ops_add(o, LLM_OP_ROPE_ANGLES);
    op->out = ops_buffer(o, angles, rope_dim, false);
    op->weight = ops_vector(o, frequencies, rope_dim / 2);
    op->rope_dim = rope_dim;
    op->scale = magnitude;
}

static inline int ops_cache(ops *o, const llm_cache *cache) {
    o->cache = *cache;
    return ops_buffer(o, (const float *)(const void *)&o->cache, 0, false);
}

static inline void ops_rope_and_store(ops *o, const llm_attention_shape *shape,
                                      llm_rope_pairing pairing, int rope_dim, const float *angles,
                                      const float *q_norm, const float *k_norm, float epsilon,
                                      float *q, float *k, const float *v, const llm_cache *cache,
                                      int layer) {
    llm_op *op = ops_add(o, LLM_OP_ROPE_STORE);
    op->layer = layer;
    op->in[0] = ops_buffer(o, angles, rope_dim, false);
    op->in[1] = ops_buffer(o, q, shape->n_heads * shape->head_dim, false);
    op->in[2] = ops_buffer(o, k, shape->n_kv_heads * shape->head_dim, false);
    op->in[3] = ops_buffer(o, v, shape->n_kv_heads * shape->head_dim, false);
    op->in[4] = ops_cache(o, cache);
    op->attention = *shape;
    op->pairing = pairing;
    op->rope_dim = rope_dim;
    op->q_norm = ops_vector(o, q_norm, shape->head_dim);
    op->k_norm = ops_vector(o, k_norm, shape->head_dim);
    op->epsilon = epsilon;
}

static inline void ops_attention(ops *o, const llm_attention_shape *shape, const float *q,
                                 const llm_cache *cache, int layer, float *out) {
    llm_op *op = ops_add(o, LLM_OP_ATTENTION);
    op->layer = layer;
    op->in[0] = ops_buffer(o, q, shape->n_heads * shape->head_dim, false);
    op->in[1] = ops_cache(o, cache);
    op->out = ops_buffer(o, out, shape->n_heads * shape->head_dim, false);
    op->attention = *shape;
}

/* The smallest limits in which this batch fits. */
static inline llm_limits ops_limits(const llm_batch *batch, int n_logits) {
    llm_limits limits = {batch->n_tokens > 0 ? batch->n_tokens : 1,
                         batch->n_sequences > 0 ? batch->n_sequences : 1, 1, n_logits};
    for (int s = 0; s < batch->n_sequences; s++)
        if (batch->seq_count[s] > 0) {
            int end = batch->positions[batch->seq_first[s]] + batch->seq_count[s];
            if (end > limits.max_context) limits.max_context = end;
        }
    return limits;
}

/* Prepare the program and run it without waiting for the end. Returns false, with the error set,
 * if either fails. The program stays prepared. */
static inline bool ops_start(ops *o, llm_backend *b, const llm_batch *batch, int first, int n,
                             llm_error *err) {
    llm_limits limits = ops_limits(batch, n);
    if (!o->program.plan && !b->prepare(b->context, &o->program, &limits, err)) return false;
    bool ok = b->run(b->context, &o->program, LLM_BODY, batch, 0, 0, err);
    return ok && (n == 0 || b->run(b->context, &o->program, LLM_HEAD, batch, first, n, err));
}

/* The same, with body and head in one call over the whole batch, as in an engine, so that a GPU can
 * capture the step. Each buffer has room for llm_rounded_rows(n_tokens) rows. */
static inline bool ops_step(ops *o, llm_backend *b, const llm_batch *batch, llm_error *err) {
    llm_limits limits = ops_limits(batch, batch->n_logits);
    if (!o->program.plan && !b->prepare(b->context, &o->program, &limits, err)) return false;
    return b->run(b->context, &o->program, LLM_WHOLE, batch, 0, batch->n_logits, err);
}

static inline void ops_free(ops *o, llm_backend *b) {
    b->forget(b->context, &o->program);
    free(o);
}

/* Run the program, wait for the end and free it. Aborts if something fails. */
static inline void ops_run(ops *o, llm_backend *b, const llm_batch *batch, int first, int n) {
    llm_error err;
    if (!ops_start(o, b, batch, first, n, &err) || !b->sync(b->context, &err)) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    ops_free(o, b);
}

/* Run the program over n rows that belong to no sequence. */
static inline void ops_run_rows(ops *o, llm_backend *b, int n) {
    llm_batch batch;
    int32_t *zeros = (int32_t *)calloc((size_t)n + 1, sizeof *zeros);
    if (!zeros) abort();
    memset(&batch, 0, sizeof batch);
    batch.n_tokens = n;
    batch.tokens = batch.positions = batch.slots = zeros;
    batch.seq_first = batch.seq_count = batch.block_tables = batch.logit_rows = zeros;
    ops_run(o, b, &batch, 0, 0);
    free(zeros);
}

/* ---- One operation --------------------------------------------------------------------------- */

static inline void op_rmsnorm(llm_backend *b, const float *x, const float *weight, int n, int dim,
                              float epsilon, float *out) {
    ops *o = ops_new();
    ops_rmsnorm(o, x, weight, dim, epsilon, out);
    ops_run_rows(o, b, n);
}

static inline void op_matmul(llm_backend *b, const float *x, const llm_weight *w, const float *bias,
                             int n, bool add, float *out) {
    ops *o = ops_new();
    ops_matmul(o, x, w, bias, add, out);
    ops_run_rows(o, b, n);
}

/* One row of n values. */
static inline void op_swiglu(llm_backend *b, const float *gate, const float *up, int64_t n,
                             float *out) {
    ops *o = ops_new();
    ops_swiglu(o, gate, up, n, out);
    ops_run_rows(o, b, 1);
}

/* What some architectures add (n rows of x): out += rmsnorm(x) times y, out = gelu(x) times y,
 * out = 3 tanh(x / 3), out = gelu(x), exact, or out = layernorm(x) times y + y. */
typedef enum { OP_NORM_ADDED, OP_GEGLU, OP_SOFTCAP, OP_GELU, OP_LAYERNORM } op_trait;
static inline void op_with_trait(llm_backend *b, op_trait trait, const float *x, const float *y,
                                 int n, int dim, float *out) {
    ops *o = ops_new();
    if (trait == OP_NORM_ADDED || trait == OP_LAYERNORM) ops_rmsnorm(o, x, y, dim, 1e-5f, out);
    else if (trait == OP_GEGLU || trait == OP_GELU) ops_swiglu(o, x, y, dim, out);
    else ops_softcap(o, x, 3, dim, out);
    if (trait == OP_NORM_ADDED) o->program.ops[0].add = true;
    if (trait == OP_GEGLU) o->program.ops[0].activation = LLM_GELU;
    if (trait == OP_GELU) o->program.ops[0].activation = LLM_GELU_ERF, o->program.ops[0].in[1] = -1;
    if (trait == OP_LAYERNORM) {
        o->program.ops[0].kind = LLM_OP_LAYERNORM;
        o->program.ops[0].bias = o->program.ops[0].weight;
    }
    ops_run_rows(o, b, n);
}

static inline void op_gather_columns(llm_backend *b, const float *x, const int32_t *columns, int n,
                                     int64_t cols, float *out) {
    ops *o = ops_new();
    llm_weight order;
    memset(&order, 0, sizeof order);
    order.rows = 1;
    order.cols = cols;
    order.columns = columns;
    ops_gather_columns(o, x, &order, out);
    ops_run_rows(o, b, n);
}

static inline void op_embed(llm_backend *b, const llm_batch *batch, const llm_weight *table,
                            float *out) {
    ops *o = ops_new();
    ops_embed(o, table, out);
    ops_run(o, b, batch, 0, 0);
}

static inline void op_rope_angles(llm_backend *b, const llm_batch *batch, const float *frequencies,
                                  int rope_dim, float magnitude, float *angles) {
    ops *o = ops_new();
    ops_rope_angles(o, frequencies, rope_dim, magnitude, angles);
    ops_run(o, b, batch, 0, 0);
}

static inline void op_rope_and_store(llm_backend *b, const llm_batch *batch,
                                     const llm_attention_shape *shape, llm_rope_pairing pairing,
                                     int rope_dim, const float *angles, const float *q_norm,
                                     const float *k_norm, float epsilon, float *q, float *k,
                                     const float *v, const llm_cache *cache, int layer) {
    ops *o = ops_new();
    ops_rope_and_store(o, shape, pairing, rope_dim, angles, q_norm, k_norm, epsilon, q, k, v, cache,
                       layer);
    ops_run(o, b, batch, 0, 0);
}

static inline void op_attention(llm_backend *b, const llm_batch *batch,
                                const llm_attention_shape *shape, const float *q,
                                const llm_cache *cache, int layer, float *out) {
    ops *o = ops_new();
    ops_attention(o, shape, q, cache, layer, out);
    ops_run(o, b, batch, 0, 0);
}

static inline void op_gather_rows(llm_backend *b, const llm_batch *batch, const float *x, int dim,
                                  int first, int n, float *out) {
    ops *o = ops_new();
    llm_op *op = ops_add(o, LLM_OP_GATHER_ROWS);
    op->in[0] = ops_buffer(o, x, dim, false);
    op->out = ops_buffer(o, out, dim, true);
    o->program.n_body = 0;
    ops_run(o, b, batch, first, n);
}

#endif
