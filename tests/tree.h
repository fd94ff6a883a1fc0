/* Attention in a tree of proposals: each token must get the bits of its branch alone. */
#ifndef TREE_H
#define TREE_H

#include "test_util.h"
#include "ops.h"

typedef struct tree_case {
    llm_attention_shape shape;
    llm_type type;
    int n_cached, n, block_size; /* tokens cached before the step, and tokens of the tree */
    bool transposed, beside;     /* beside: two plain sequences are in the batch, too */
} tree_case;

static inline void *tree_upload(llm_backend *b, const void *host, size_t bytes) {
    llm_error err;
    void *device = b->allocate(b->context, bytes, "a test", &err);
    assert_non_null(device);
    assert_true(b->upload(b->context, device, host, bytes, &err));
    return device;
}

static inline void *tree_random(size_t n, llm_type type, uint64_t stream) {
    float *x = calloc(n, sizeof *x);
    char *packed = malloc(n * 4);
    assert_true(x && packed);
    for (size_t i = 0; i < n; i++) x[i] = (float)(4 * llm_random(7, stream, i) - 2);
    llm_pack(type, x, packed, (int64_t)n);
    free(x);
    return packed;
}

/* Compute a random tree in one step. Then, token by token, make the token's branch contiguous with
 * copy_slots, in a copy of the cache, and compute the token alone. Blocks are in random places. */
static inline void check_tree(llm_backend *b, const tree_case *c, uint64_t seed) {
    enum { MOST = 64 };
    int heads = c->shape.n_heads, dim = c->shape.head_dim, n = c->n, beside = c->beside ? 2 : 0,
        n_blocks = (c->n_cached + n + c->block_size - 1) / c->block_size, width = heads * dim;
    assert_true(n <= MOST && n_blocks <= MOST);
    llm_cache cache = {c->type, 2, c->shape.n_kv_heads, dim, c->block_size, n_blocks, 0, NULL, NULL,
                       c->transposed};
    size_t values = (size_t)(n_blocks * c->shape.n_kv_heads * c->block_size * dim);
    cache.layer_bytes = values * (c->type == LLM_F16 ? 2 : 4);
    void *keys = tree_random(2 * values, c->type, 2 * seed),
         *side = tree_random(2 * values, c->type, 2 * seed + 1);
    float *q = tree_random((size_t)((n + 2) * width), LLM_F32, seed + 99),
          *out = malloc((size_t)((n + 2) * width) * sizeof *out), *one = malloc((size_t)width * 4);
    int32_t table[3 * MOST] = {0}, positions[MOST + 2], slots[MOST + 2], parents[MOST + 2],
            first[3] = {0, n, n + 1}, count[3] = {n, 1, 1}, zero = 0;
    for (int i = 0; i < n_blocks; i++) {
        int at = (int)(llm_random(seed, 1, (uint64_t)i) * (i + 1));
        table[i] = table[at], table[at] = i;
    }
    for (int s = 1; s < 3; s++) memcpy(table + s * n_blocks, table, (size_t)n_blocks * 4);
    for (int t = 0; t < n + 2; t++) {
        int at = c->n_cached + (t < n ? t : 0);
        slots[t] = table[at / c->block_size] * c->block_size + at % c->block_size;
        /* the second token's parent is the first; after that, any earlier one */
        parents[t] = t == 0 || t >= n ? -1 : (int)(llm_random(seed, 2, (uint64_t)t) * t);
        positions[t] = t >= n ? c->n_cached : parents[t] < 0 ? c->n_cached
                                                               : positions[parents[t]] + 1;
    }
    llm_batch batch = {.n_tokens = n + beside, .n_sequences = 1 + beside, .tokens = positions,
                       .positions = positions, .slots = slots, .parents = parents,
                       .seq_first = first, .seq_count = count, .block_tables = table,
                       .table_stride = n_blocks, .block_size = c->block_size, .n_logits = 1,
                       .logit_rows = &zero};
    llm_error err;
    float *device_q = tree_upload(b, q, (size_t)((n + 2) * width) * 4),
          *device_out = tree_upload(b, q, (size_t)((n + 2) * width) * 4);
    cache.keys = tree_upload(b, keys, 2 * cache.layer_bytes);
    cache.values = tree_upload(b, side, 2 * cache.layer_bytes);
    op_attention(b, &batch, &c->shape, device_q, &cache, 1, device_out);
    assert_true(b->download(b->context, out, device_out, (size_t)(n * width) * 4, &err));
    for (int t = 0; t < n; t++) {
        int32_t from[MOST], to[MOST], where = slots[positions[t] - c->n_cached];
        int depth = positions[t] - c->n_cached;
        for (int i = depth, at = t; i >= 0; i--, at = parents[at]) from[i] = slots[at];
        for (int i = 0; i <= depth; i++) to[i] = slots[i];
        assert_true(b->upload(b->context, cache.keys, keys, 2 * cache.layer_bytes, &err));
        assert_true(b->upload(b->context, cache.values, side, 2 * cache.layer_bytes, &err));
        b->copy_slots(b->context, &cache, from, to, depth + 1);
        llm_batch alone = batch;
        int32_t once = 1;
        alone.n_tokens = alone.n_sequences = 1, alone.parents = NULL, alone.seq_count = &once,
        alone.positions = positions + t, alone.slots = &where;
        assert_true(b->upload(b->context, device_q, q + t * width, (size_t)width * 4, &err));
        op_attention(b, &alone, &c->shape, device_q, &cache, 1, device_out);
        assert_true(b->download(b->context, one, device_out, (size_t)width * 4, &err));
        for (int i = 0; i < width; i++) assert_true(fabsf(one[i]) < 1e6f);
        if (memcmp(one, out + t * width, (size_t)width * 4))
            fail_msg("%s, tree %d of %d tokens after %d: token %d differs from its branch alone",
                     b->name, (int)seed, n, c->n_cached, t);
    }
    b->release(b->context, device_q), b->release(b->context, device_out);
    b->release(b->context, cache.keys), b->release(b->context, cache.values);
    free(keys), free(side), free(q), free(out), free(one);
}

/* Trees of several sizes, after several numbers of tokens; head_dim, group, window, cap and ALiBi
 * vary. */
static inline void check_trees(llm_backend *b, int repeats) {
    static const int cached[] = {0, 1, 15, 61, 64, 127, 300}, dims[] = {64, 128, 80, 19, 256};
    for (int i = 0; i < repeats; i++) {
        int kv = 1 + i % 2, group = 1 + i * 5 % 7 + (i % 4 == 3) * 12;
        tree_case c = {.type = i % 3 == 2 ? LLM_F32 : LLM_F16, .n_cached = cached[i % 7],
                       .n = 2 + i * 7 % 20, .block_size = i % 5 == 4 ? 7 : 16,
                       .transposed = b->keys_transposed, .beside = i % 2};
        c.shape = (llm_attention_shape){kv * group, kv, dims[i % 5], 0.2f, i % 11 == 10,
                                        i % 6 == 5 ? 40 : 0, i % 8 == 7 ? 2.0f : 0.0f,
                                        i % 4 == 1 ? 8.0f : 0.0f};
        check_tree(b, &c, (uint64_t)i);
    }
}

#endif
