/* engine_util.h - shared by the tests of the engine: run requests and record their output, for
 * bitwise comparison. Uses the public API only. Include after llm.h and cmocka.h. */
#ifndef ENGINE_UTIL_H
#define ENGINE_UTIL_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device_util.h"
#ifdef LLM_IMPLEMENTATION
#include "../models/quantize.c"
#else
#include "../models/quantize.h"
#endif

#define UNUSED __attribute__((unused))

/* True if this machine has the instruction set. If not, the backend would choose a lesser one,
 * which a loop over all sets has already tested. */
static UNUSED bool has_isa(llm_isa isa) {
    llm_error err;
    llm_backend *b = llm_cpu_backend(1, isa, &err);
    bool has = b && llm_cpu_isa(b) == isa;
    llm_backend_free(b);
    return has;
}

/* The output of one sample of a request: its tokens, and the logits that its hook saw, in order. */
typedef struct sample_record {
    int n_tokens, n_rows, vocab, n_ends;
    int32_t tokens[1100];
    float logprobs[1100];
    llm_token_logprob tops[1100]; /* last of the likeliest tokens, if any are wanted */
    int positions[1200];
    float *logits; /* (n_rows, vocab) */
    char *text;
    size_t text_length;
    llm_finish finish;
} sample_record;

enum { MAX_SAMPLES = 8 };

typedef struct record { /* one request's output */
    uint64_t id;
    int vocab;
    sample_record samples[MAX_SAMPLES];
    /* (1200) token to force after each position, -1: none; NULL: force nothing */
    const int32_t *forced;
    int force_until;
} record;

static UNUSED record *record_new(const llm_model *model) {
    record *r = (record *)calloc(1, sizeof *r);
    assert_non_null(r);
    r->vocab = llm_model_config(model)->vocab_size;
    return r;
}

static UNUSED void record_free(record *r) {
    for (int s = 0; r && s < MAX_SAMPLES; s++) {
        free(r->samples[s].logits);
        free(r->samples[s].text);
    }
    free(r);
}

/* A logits hook that records the logits and forces the tokens of `forced`. */
static UNUSED void record_hook(void *user, uint64_t request, int sample, int position,
                               float *logits) {
    record *r = (record *)user;
    sample_record *s = &r->samples[sample];
    size_t row = (size_t)r->vocab * sizeof(float);
    (void)request;
    assert_true(s->n_rows < 1200);
    s->logits = (float *)realloc(s->logits, (size_t)(s->n_rows + 1) * row);
    assert_non_null(s->logits);
    memcpy(s->logits + (size_t)s->n_rows * (size_t)r->vocab, logits, row);
    s->positions[s->n_rows++] = position;
    if (r->forced && position < r->force_until && r->forced[position] >= 0)
        logits[r->forced[position]] = 1e30f;
}

/* Add an event to its request's record. */
static UNUSED void record_event(record *r, const llm_event *event) {
    assert_int_equal(event->request, r->id);
    assert_in_range(event->sample, 0, MAX_SAMPLES - 1);
    sample_record *s = &r->samples[event->sample];
    assert_int_equal(s->n_ends, 0); /* no event follows the end */
    assert_int_equal(event->index, s->n_tokens);
    if (event->token >= 0) {
        s->logprobs[s->n_tokens] = event->logprob;
        if (event->n_top) s->tops[s->n_tokens] = event->top[event->n_top - 1];
        s->tokens[s->n_tokens++] = event->token;
    }
    s->text = (char *)realloc(s->text, s->text_length + event->text_length + 1);
    assert_non_null(s->text);
    if (event->text_length) memcpy(s->text + s->text_length, event->text, event->text_length);
    s->text_length += event->text_length;
    s->text[s->text_length] = 0;
    if (event->finish) s->n_ends++;
    s->finish = event->finish;
}

/* Read all waiting events. Each event's `user` is a record. */
static UNUSED int record_events(llm_engine *engine) {
    llm_event event;
    int n = 0;
    for (; llm_next_event(engine, &event); n++) record_event((record *)event.user, &event);
    return n;
}

static UNUSED void record_submit(llm_engine *engine, record *r, llm_request request, bool logits) {
    llm_error err;
    request.user = r;
    if (logits) request.logits_hook = record_hook;
    if (!llm_submit(engine, &request, &r->id, &err)) fail_msg("%s", err.message);
    assert_int_equal(err.status, LLM_OK);
}

static UNUSED void record_drain(llm_engine *engine) {
    llm_error err;
    int more, idle = 0; /* idle: consecutive steps without a forward pass */
    do {
        uint64_t before = llm_engine_statistics(engine).steps;
        more = llm_step(engine, &err);
        if (more < 0) fail_msg("%s", err.message);
        record_events(engine);
        idle = llm_engine_statistics(engine).steps > before ? 0 : idle + 1;
        if (idle > 1000) fail_msg("1000 steps in a row ran no forward pass");
    } while (more > 0);
}

/* Check that nothing is left after all requests have ended: no block, sequence or request. */
static UNUSED void assert_idle(const llm_engine *engine) {
    llm_statistics s = llm_engine_statistics(engine);
    assert_int_equal(s.blocks_free, s.blocks_total);
    assert_int_equal(s.slots_used, 0);
    assert_int_equal(s.running, 0);
    assert_int_equal(s.waiting, 0);
    assert_int_equal(s.requests_finished, s.requests_submitted);
}

static UNUSED llm_engine *engine_new(const llm_model *model, const llm_engine_options *options) {
    llm_error err;
    llm_engine *engine = llm_engine_create(model, options, &err);
    if (!engine) fail_msg("%s", err.message);
    assert_int_equal(err.status, LLM_OK);
    return engine;
}

static UNUSED llm_model *model_load(const char *path) {
    llm_error err;
    llm_model *model = llm_model_load(path, &err);
    if (!model) fail_msg("%s", err.message);
    assert_int_equal(err.status, LLM_OK);
    return model;
}

/* Run one request on an engine of its own. */
static UNUSED record *run_alone(const llm_model *model, const llm_engine_options *options,
                                llm_request request) {
    llm_engine *engine = engine_new(model, options);
    record *r = record_new(model);
    record_submit(engine, r, request, true);
    record_drain(engine);
    assert_idle(engine);
    llm_engine_free(engine);
    return r;
}

static UNUSED void assert_same_sample(const sample_record *a, const sample_record *b, int vocab) {
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_memory_equal(a->tokens, b->tokens, sizeof(int32_t) * (size_t)a->n_tokens);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof(float) * (size_t)a->n_tokens);
    assert_int_equal(a->n_rows, b->n_rows);
    assert_memory_equal(a->positions, b->positions, sizeof(int) * (size_t)a->n_rows);
    for (int i = 0; i < a->n_rows; i++) /* compares bits: -0 differs from 0 */
        if (memcmp(a->logits + (size_t)i * (size_t)vocab, b->logits + (size_t)i * (size_t)vocab,
                   sizeof(float) * (size_t)vocab))
            fail_msg("the logits at position %d differ", a->positions[i]);
    assert_int_equal(a->text_length, b->text_length);
    if (a->text_length) assert_memory_equal(a->text, b->text, a->text_length);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->n_ends, b->n_ends);
}

/* A cancelled sample's output is a prefix of its output when it runs alone. */
static UNUSED void assert_sample_prefix(const sample_record *part, const sample_record *whole,
                                        int vocab) {
    size_t rows = (size_t)part->n_rows, tokens = (size_t)part->n_tokens;
    assert_true(part->n_tokens <= whole->n_tokens && part->n_rows <= whole->n_rows);
    assert_memory_equal(part->tokens, whole->tokens, sizeof(int32_t) * tokens);
    assert_memory_equal(part->logprobs, whole->logprobs, sizeof(float) * tokens);
    assert_memory_equal(part->positions, whole->positions, sizeof(int) * rows);
    rows *= (size_t)vocab;
    if (rows) assert_memory_equal(part->logits, whole->logits, sizeof(float) * rows);
}

static UNUSED void assert_same(const record *a, const record *b) {
    for (int s = 0; s < MAX_SAMPLES; s++)
        assert_same_sample(&a->samples[s], &b->samples[s], a->vocab);
}

/* ---- Files ---------------------------------------------------------------------------- */

/* Create a temporary file and return its name; temporary_remove deletes it. */
static UNUSED void temporary_path(char path[256]) {
    const char *folder = getenv("TMPDIR");
    snprintf(path, 256, "%s/llm-test-XXXXXX", folder ? folder : "/tmp");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
}

/* The same model with every tensor as f32: "dequantized". */
static UNUSED void write_as_f32(const char *in_path, const char *out_path) {
    llm_error err;
    llm_file *in = llm_file_open(in_path, &err);
    if (!in) fail_msg("%s", err.message);
    llm_writer *w = llm_writer_create(out_path, &err);
    if (!w) fail_msg("%s", err.message);
    for (int64_t i = 0; i < llm_file_n_values(in); i++)
        if (!llm_file_value(in, i)->key.length ||
            memcmp(llm_file_value(in, i)->key.data, "general.alignment", 17))
            llm_writer_value(w, llm_file_value(in, i));
    for (int64_t i = 0; i < llm_file_n_tensors(in); i++) {
        const llm_tensor *t = llm_file_tensor(in, i);
        llm_writer_tensor(w, t->name, LLM_F32, t->n_dims, t->dims);
    }
    for (int64_t i = 0; i < llm_file_n_tensors(in); i++) {
        const llm_tensor *t = llm_file_tensor(in, i);
        size_t n = (size_t)(t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]);
        float *values = (float *)malloc(n * sizeof *values);
        assert_non_null(values);
        llm_type_find(t->type)->unpack(t->data, values, (int64_t)n);
        llm_writer_data(w, values, n * sizeof *values);
        free(values);
    }
    if (!llm_writer_finish(w, &err)) fail_msg("%s", err.message);
    llm_file_close(in);
}

/* norm of the difference over the norm of `right` */
static UNUSED double relative_error(const float *x, const float *right, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)x[i] - (double)right[i]) * ((double)x[i] - (double)right[i]);
        norm += (double)right[i] * (double)right[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

#endif
