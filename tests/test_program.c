/* The program of a model: its operations, their costs and its stages. Fusions and threads change no
 * bit of the logits. Uses only the public API and the seam. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "../llm.h"
#include "engine_util.h"

#define TALES "models/tales-q4_0.gguf"

static int count(const llm_program *p, llm_op_kind kind) {
    int n = 0;
    for (int i = 0; i < p->n_ops; i++) n += p->ops[i].kind == kind;
    return n;
}

static llm_engine *engine_of(const llm_model *model, int threads, unsigned fusions) {
    llm_engine_options o = llm_engine_defaults();
    o.n_threads = threads;
    o.fusions = fusions;
    o.context_length = 200;
    return engine_new(model, &o);
}

/* The operations of a layer in order, with the buffers that they read and write. */
static void test_operations_of_a_layer(void **state) {
    (void)state;
    static const char *const layer[] = {"rmsnorm x>h attn_norm.weight", "matmul h>q attn_q.weight",
                                        "matmul h>k attn_k.weight", "matmul h>v attn_v.weight",
                                        "rope_store angles,q,k,v,cache>", "attention q,cache>a",
                                        "matmul a+>x attn_output.weight",
                                        "rmsnorm x>h ffn_norm.weight",
                                        "matmul h>gate ffn_gate.weight",
                                        "matmul h>up ffn_up.weight", "swiglu gate,up>gate",
                                        "matmul gate+>x ffn_down.weight"};
    enum { N = sizeof layer / sizeof *layer };
    llm_model *model = model_load(TALES);
    const llm_config *c = llm_model_config(model);
    llm_engine *engine = engine_of(model, 1, LLM_FUSE_ALL);
    const llm_program *p = llm_engine_program(engine, false);
    assert_null(llm_engine_program(engine, true));
    assert_null(llm_engine_program(NULL, false));
    assert_int_equal(p->n_body, 2 + N * c->n_layers);
    assert_int_equal(p->n_ops, p->n_body + 3);
    assert_int_equal(p->ops[0].kind, LLM_OP_EMBED);
    assert_int_equal(p->ops[1].kind, LLM_OP_ROPE_ANGLES);
    for (int i = 2; i < p->n_body; i++) {
        const llm_op *op = &p->ops[i];
        char text[200];
        int n = snprintf(text, sizeof text, "%s ", llm_op_name(op->kind));
        for (int k = 0; k < LLM_OP_INPUTS && op->in[k] >= 0; k++)
            n += snprintf(text + n, sizeof text - (size_t)n, "%s%s", k ? "," : "",
                          p->buffers[op->in[k]].name);
        snprintf(text + n, sizeof text - (size_t)n, "%s%s%s%s", op->add ? "+>" : ">",
                 op->out < 0 ? "" : p->buffers[op->out].name, *op->name ? " " : "", op->name);
        assert_string_equal(text, layer[(i - 2) % N]);
        assert_int_equal(op->layer, (i - 2) / N);
    }
    assert_int_equal(p->ops[p->n_body].kind, LLM_OP_GATHER_ROWS);
    assert_true(p->buffers[p->ops[p->n_ops - 1].out].head);
    assert_int_equal(p->buffers[p->ops[p->n_ops - 1].out].width, c->vocab_size);
    assert_string_equal(llm_op_name(LLM_N_OP_KINDS), "unknown");
    llm_engine_free(engine);
    llm_model_free(model);
}

/* The program of an architecture has the operations of its traits and no other operations. */
static void test_traits(void **state) {
    (void)state;
    static const struct {
        const char *path;
        bool biases, head_norms, ordered;
    } models[] = {{"tests/data/models/llama", false, false, false},
                  {"tests/data/models/qwen2", true, false, false},
                  {"tests/data/models/qwen3", false, true, false},
                  {"tests/data/models/gptq_g32_act", false, false, true}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        llm_error err;
        llm_model *model = llm_model_load(models[i].path, &err);
        if (!model) fail_msg("%s", err.message);
        llm_engine *engine = engine_new(model, NULL);
        const llm_program *p = llm_engine_program(engine, false);
        int biases = 0, norms = 0, layers = llm_model_config(model)->n_layers;
        for (int k = 0; k < p->n_ops; k++) {
            const llm_op *op = &p->ops[k];
            if (op->kind != LLM_OP_ATTENTION) continue;
            assert_int_equal(p->buffers[op->in[0]].width,
                             op->attention.n_heads * op->attention.head_dim);
            assert_int_equal(p->buffers[op->out].width,
                             op->attention.n_heads * op->attention.head_dim);
        }
        for (int k = 0; k < p->n_ops; k++)
            biases += p->ops[k].bias != NULL, norms += p->ops[k].q_norm && p->ops[k].k_norm;
        assert_int_equal(biases, models[i].biases ? 3 * layers : 0);
        assert_int_equal(norms, models[i].head_norms ? layers : 0);
        assert_int_equal(count(p, LLM_OP_GATHER_COLUMNS), models[i].ordered ? 7 * layers : 0);
        assert_int_equal(p->n_ops, 5 + (models[i].ordered ? 19 : 12) * layers);
        llm_engine_free(engine);
        llm_model_free(model);
    }
}

/* Costs computed by hand for two sequences: one of 3 tokens from position 0, one of 1 token at
 * position 9. */
static void test_costs_by_hand(void **state) {
    (void)state;
    llm_model *model = model_load(TALES);
    const llm_config *c = llm_model_config(model);
    llm_engine *engine = engine_of(model, 1, LLM_FUSE_ALL);
    const llm_program *p = llm_engine_program(engine, false);
    const int32_t positions[] = {0, 1, 2, 9}, first[] = {0, 3}, counts[] = {3, 1}, rows[] = {2, 3};
    llm_batch batch = {.n_tokens = 4, .n_sequences = 2, .positions = positions, .seq_first = first,
                       .seq_count = counts, .n_logits = 2, .logit_rows = rows};
    double weights = 0, q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    for (int i = 0; i < p->n_ops; i++) {
        const llm_op *op = &p->ops[i];
        llm_cost cost = llm_op_cost(p, op, &batch);
        double n = i < p->n_body ? 4 : 2;
        if (op->kind != LLM_OP_EMBED) weights += cost.weight_bytes;
        if (op->kind == LLM_OP_MATMUL) {
            double bytes = (double)op->weight->rows * (double)op->weight->cols / 32 * 18;
            if (op->weight->type == LLM_Q4_0) assert_true(cost.weight_bytes == bytes);
            assert_true(cost.operations ==
                        2 * n * (double)op->weight->rows * (double)op->weight->cols);
            assert_true(cost.activation_bytes ==
                        4 * n * (double)(op->weight->cols + op->weight->rows * (op->add ? 2 : 1)));
            assert_true(cost.cache_bytes == 0);
        } else if (op->kind == LLM_OP_ATTENTION) {
            assert_true(cost.cache_bytes == (3 + 10) * 2 * kv * 2); /* keys and values, f16 */
            assert_true(cost.operations == 4 * (1 + 2 + 3 + 10) * q);
            assert_true(cost.activation_bytes == 4 * 4 * 2 * q);
        } else if (op->kind == LLM_OP_ROPE_STORE) {
            assert_true(cost.cache_bytes == 4 * 2 * kv * 2);
        } else if (op->kind == LLM_OP_EMBED) {
            assert_true(cost.weight_bytes < 4 * 4 * c->dim + 1);
        }
    }
    /* the sum: the bytes of the file that a step reads, plus RoPE's frequencies */
    uint64_t step = llm_model_step_bytes(model);
    if (fabs(weights - (double)step - 2.0 * c->rope_dim) > 1)
        fail_msg("%.0f bytes, a step reads %llu", weights, (unsigned long long)step);
    llm_engine_free(engine);
    llm_model_free(model);
}

/* A sliding window limits what attention reads. */
static void test_cost_of_a_window(void **state) {
    (void)state;
    llm_op op;
    memset(&op, 0, sizeof op);
    op.kind = LLM_OP_ATTENTION;
    for (int i = 0; i < LLM_OP_INPUTS; i++) op.in[i] = -1;
    op.out = -1;
    op.attention.n_heads = op.attention.n_kv_heads = op.attention.head_dim = 1;
    op.attention.window = 4;
    const int32_t positions[] = {8, 9}, zero = 0, two = 2;
    llm_batch batch = {.n_tokens = 2, .n_sequences = 1, .positions = positions, .seq_first = &zero,
                       .seq_count = &two};
    llm_program p;
    memset(&p, 0, sizeof p);
    llm_cost cost = llm_op_cost(&p, &op, &batch);
    assert_true(cost.cache_bytes == 5 * 2 * 4); /* positions 5 to 9, f32 without a cache */
    assert_true(cost.operations == 4 * (4 + 4));
}

/* Every operation is in a stage, in order. Without fusions there are more stages and barriers. */
static void test_stages(void **state) {
    (void)state;
    llm_model *model = model_load(TALES);
    int n_stages[2] = {0, 0}, n_barriers[2] = {0, 0};
    const int32_t position = 5, zero = 0, one = 1;
    llm_batch batch = {.n_tokens = 1, .n_sequences = 1, .positions = &position, .seq_first = &zero,
                       .seq_count = &one, .n_logits = 1};
    for (int fused = 0; fused < 2; fused++) {
        llm_error err;
        llm_engine_options o = llm_engine_defaults();
        llm_backend *b = o.backend = llm_cpu_backend(2, LLM_ISA_BEST, &err);
        o.fusions = fused ? LLM_FUSE_ALL : 0;
        llm_engine *engine = engine_new(model, &o);
        const llm_program *p = llm_engine_program(engine, false);
        int *seen = calloc((size_t)p->n_ops, sizeof *seen), last = -1;
        llm_stage stage;
        while (b->stage(b->context, p, LLM_WHOLE, &batch, 1, n_stages[fused], &stage)) {
            assert_true(stage.last >= last && stage.last < p->n_ops && stage.first <= stage.last);
            last = stage.last;
            if (!stage.rounds) seen[stage.first] = seen[stage.last] = 1;
            if (!fused) assert_true(!stage.each && stage.first == stage.last);
            /* the stage of the gate and up products includes the swiglu after them */
            if (p->ops[stage.last].kind == LLM_OP_MATMUL && stage.first < stage.last)
                seen[stage.last + 1] = 1;
            n_barriers[fused] += stage.barrier;
            n_stages[fused]++;
        }
        for (int i = 0; i < p->n_ops; i++) assert_true(seen[i]);
        free(seen);
        llm_engine_free(engine);
        llm_backend_free(b);
    }
    assert_true(n_stages[1] > 0 && n_stages[1] < n_stages[0]);
    assert_true(n_barriers[1] > 0 && n_barriers[1] < n_barriers[0] / 2);
    llm_model_free(model);
}

/* Fusions, threads and profiling change no bit of the logits. */
static void test_same_bits(void **state) {
    (void)state;
    llm_model *model = model_load(TALES);
    int32_t prompt[40];
    for (int i = 0; i < 40; i++) prompt[i] = 5 + i * 7 % 300;
    llm_request request = llm_request_defaults();
    request.prompt = prompt;
    request.n_prompt = 40;
    request.max_tokens = 5;
    request.ignore_end = true;
    record *expected = NULL;
    for (unsigned fusions = 0; fusions <= LLM_FUSE_ALL; fusions++) {
        llm_engine *engine = engine_of(model, fusions % 3 ? 2 : 1, fusions);
        llm_program *p = llm_engine_program(engine, false);
        double *seconds = calloc((size_t)p->n_ops, sizeof *seconds), total = 0;
        bool profile = fusions & LLM_FUSE_SIDE_BY_SIDE;
        if (profile) p->seconds = seconds;
        record *r = record_new(model);
        record_submit(engine, r, request, true);
        record_drain(engine);
        r->id = 0;
        if (expected) assert_same(r, expected);
        for (int i = 0; i < p->n_ops; i++) {
            assert_true(seconds[i] >= 0);
            if (p->ops[i].kind == LLM_OP_MATMUL && profile && !(fusions & LLM_FUSE_GATE))
                assert_true(seconds[i] > 0);
            total += seconds[i];
        }
        assert_true(profile ? total > 0 : total == 0);
        llm_engine_free(engine);
        free(seconds);
        if (expected) record_free(r);
        else expected = r;
    }
    record_free(expected);
    llm_model_free(model);
}

/* The head computes only the rows whose logits are wanted: one for a prompt. */
static void test_rows_of_the_head(void **state) {
    (void)state;
    llm_error err;
    llm_model *model = model_load(TALES);
    llm_engine *engine = engine_of(model, 2, LLM_FUSE_ALL);
    const llm_program *p = llm_engine_program(engine, false);
    const llm_op *last = &p->ops[p->n_ops - 1];
    int32_t prompt[40];
    for (int i = 0; i < 40; i++) prompt[i] = 5 + i;
    llm_request request = llm_request_defaults();
    request.prompt = prompt;
    request.n_prompt = 40;
    for (int k = 0; k < 2; k++) { /* the logits, then the rows from which they are computed */
        const llm_buffer *buffer = &p->buffers[k ? last->in[0] : last->out];
        for (int64_t i = 0; i < 3 * buffer->width; i++) buffer->data[i] = 12345;
    }
    if (!llm_submit(engine, &request, NULL, &err)) fail_msg("%s", err.message);
    assert_int_equal(llm_step(engine, &err), 1);
    for (int k = 0; k < 2; k++) {
        const llm_buffer *buffer = &p->buffers[k ? last->in[0] : last->out];
        assert_true(buffer->data[0] != 12345);
        for (int64_t i = buffer->width; i < 3 * buffer->width; i++)
            assert_true(buffer->data[i] == 12345);
    }
    llm_engine_free(engine);
    llm_model_free(model);
}

/* Steps of many sizes give the same results in sequence on one engine as each on a fresh engine: a
 * run uses no data left by an earlier run with another plan. */
static void test_steps_of_all_sizes(void **state) {
    (void)state;
    static const int lengths[] = {5, 190, 5, 1, 33, 150, 2, 17};
    enum { N = sizeof lengths / sizeof *lengths };
    llm_model *model = model_load(TALES);
    int32_t prompt[200];
    for (int i = 0; i < 200; i++) prompt[i] = 5 + i * 11 % 300;
    llm_engine_options o = llm_engine_defaults();
    /* prompts take several chunks: the last has logits, the others do not */
    o.max_batch_tokens = 60;
    o.prefix_cache = false;
    for (int threads = 1; threads <= 2; threads++) {
        o.n_threads = threads;
        llm_engine *engine = engine_new(model, &o);
        for (int i = 0; i < N; i++) {
            llm_request request = llm_request_defaults();
            request.prompt = prompt + i;
            request.n_prompt = lengths[i];
            request.max_tokens = 4;
            request.ignore_end = true;
            record *r = record_new(model), *fresh = run_alone(model, &o, request);
            request.user = r;
            record_submit(engine, r, request, false);
            record_drain(engine);
            assert_int_equal(r->samples[0].n_tokens, 4);
            assert_memory_equal(r->samples[0].tokens, fresh->samples[0].tokens,
                                4 * sizeof(int32_t));
            assert_memory_equal(r->samples[0].logprobs, fresh->samples[0].logprobs,
                                4 * sizeof(float));
            record_free(r);
            record_free(fresh);
        }
        llm_engine_free(engine);
    }
    llm_model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_operations_of_a_layer), cmocka_unit_test(test_traits),
        cmocka_unit_test(test_costs_by_hand), cmocka_unit_test(test_cost_of_a_window),
        cmocka_unit_test(test_stages), cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_rows_of_the_head), cmocka_unit_test(test_steps_of_all_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
