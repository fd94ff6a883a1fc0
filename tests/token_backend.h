/* token_backend.h - a device that does no arithmetic, for tests of everything above the seam. A
 * slot of its cache holds a token and a hash of that token and all before it: as with keys and
 * values, the content depends on the whole text so far. A pass reads the texts through the block
 * tables and checks each slot that it reads, so it detects a wrong block table, a missing copy or a
 * stale block at its first use. The logits are a function of the hash alone (choices_after).
 *
 * Any call can fail after doing all, part or none of its work. Include after llm.h and cmocka.h.
 * The model must have one layer, 16 bytes of cache per token (tiny_model.h in f16) and a
 * vocabulary of TOKEN_VOCAB. */
#ifndef TOKEN_BACKEND_H
#define TOKEN_BACKEND_H

#include <stdlib.h>
#include <string.h>

enum {
    TOKEN_END = 2,
    TOKEN_LETTER = 3,
    TOKEN_CHOICES = 4,
    TOKEN_VOCAB = TOKEN_LETTER + 4 * TOKEN_CHOICES
};

static uint64_t token_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* The hash of a text extended by one token; the empty text has hash 0. */
static uint64_t text_hash(uint64_t before, int32_t token) {
    return token_mix(before + 0x9e3779b97f4a7c15u * (uint64_t)(token + 1)) | 1;
}

/* The tokens that may follow a text: ascending ids, all equally likely; all others are impossible.
 * Half of the time they depend on the last token alone, so that texts repeat themselves. About one
 * text in 50 may be followed by an end token. */
static void choices_after(uint64_t hash, int32_t last, int32_t out[TOKEN_CHOICES]) {
    uint64_t bits = hash >> 8 & 1 ? token_mix((uint64_t)last) : hash >> 16;
    for (int i = 0; i < TOKEN_CHOICES; i++)
        out[i] = TOKEN_LETTER + 4 * i + (int32_t)(bits >> 2 * i & 3);
    if ((hash >> 32) % 50 == 0) out[0] = TOKEN_END;
}

typedef enum token_call { /* calls that can fail */
    CALL_COPY, /* copy_blocks: the next sync reports it */
    CALL_SAVE, /* download from a cache */
    CALL_RESTORE, /* upload to a cache */
    CALL_RUN,
    CALL_LOGITS, /* download of logits, or sample */
    CALL_SYNC, /* any other sync */
    CALL_NONE
} token_call;

typedef unsigned long long ull; /* to print a seed */

typedef struct token_device {
    llm_backend backend;
    uint64_t seed, random;
    int fail_one_in;                /* one call in this many fails; 0: none */
    uint64_t draft_differs; /* the draft differs after one text in this many; 0: never */
    const llm_program *programs[2]; /* programs of the target and the draft */
    int n_programs, max_tokens;
    uint64_t *hashes;    /* (max_tokens) hash of the text up to each token of the last body part */
    int32_t *last;       /* (max_tokens) tokens of the last body part */
    int64_t *written_in; /* (slots) the last pass that wrote each slot */
    int64_t n_passes;
    int n_copies; /* copies requested since the last sync */
    bool copies_fail;
    struct {
        const char *begin, *end;
    } fetched[64]; /* (n_fetched) logits downloaded since the last pass */
    int n_fetched;
    long live; /* allocations not yet released */
    /* During the current llm_step: */
    token_call failed;      /* the call that failed */
    int failed_index;       /* number of successful calls of that kind before it */
    int n_calls[CALL_NONE]; /* successful calls of each kind; CALL_COPY: blocks copied */
} token_device;

static int token_pick(token_device *d, int n) {
    d->random = d->random * 6364136223846793005u + 1442695040888963407u;
    return (int)((d->random >> 33) % (uint64_t)n);
}

static bool token_error(llm_error *err) {
    if (!err) return false;
    err->status = LLM_ERROR_DEVICE;
    strcpy(err->message, "the device was unplugged");
    return false;
}

/* Decide whether this call fails. At most one call per step fails. */
static bool token_fails(token_device *d, token_call call) {
    if (d->failed == CALL_NONE && d->fail_one_in && token_pick(d, d->fail_one_in) == 0) {
        d->failed = call;
        d->failed_index = d->n_calls[call];
        return true;
    }
    if (call != CALL_COPY) d->n_calls[call]++;
    return false;
}

static void *token_allocate(void *context, size_t bytes, const char *what, llm_error *err) {
    token_device *d = (token_device *)context;
    (void)what;
    (void)err;
    void *memory = malloc(bytes);
    assert_non_null(memory);
    memset(memory, 0xa5, bytes);
    d->live++;
    return memory;
}

static void token_release(void *context, void *memory) {
    if (memory) ((token_device *)context)->live--;
    free(memory);
}

/* Makes the contents of the target's and the draft's cache differ for the same text. */
static uint64_t token_salt(const token_device *d, const llm_cache *cache) {
    return (uint64_t)(cache != d->programs[0]->cache) << 40;
}

static bool token_in_cache(const token_device *d, const void *memory) {
    for (int i = 0; i < d->n_programs; i++) {
        const llm_cache *c = d->programs[i]->cache;
        const char *at = (const char *)memory, *keys = (const char *)c->keys,
                   *values = (const char *)c->values;
        if (keys && at >= keys && at < keys + c->layer_bytes) return true;
        if (values && at >= values && at < values + c->layer_bytes) return true;
    }
    return false;
}

static bool token_upload(void *context, void *device, const void *host, size_t bytes,
                         llm_error *err) {
    token_device *d = (token_device *)context;
    if (token_in_cache(d, device) && token_fails(d, CALL_RESTORE)) {
        memset(device, 0x5a, bytes / 2);
        return token_error(err);
    }
    memcpy(device, host, bytes);
    return true;
}

static bool token_download(void *context, void *host, const void *device, size_t bytes,
                           llm_error *err) {
    token_device *d = (token_device *)context;
    if (token_fails(d, token_in_cache(d, device) ? CALL_SAVE : CALL_LOGITS)) {
        memset(host, 0x5a, bytes / 2);
        return token_error(err);
    }
    memcpy(host, device, bytes);
    if (token_in_cache(d, device)) return true;
    assert_in_range(d->n_fetched, 0, 63);
    d->fetched[d->n_fetched].begin = (const char *)device;
    d->fetched[d->n_fetched++].end = (const char *)device + bytes;
    return true;
}

static bool token_load_weight(void *context, llm_weight *w, const void *host, llm_error *err) {
    (void)context;
    (void)err;
    w->data = host;
    return true;
}

static void token_free_weight(void *context, llm_weight *w) {
    (void)context;
    w->data = NULL;
}

static bool token_prepare(void *context, llm_program *program, const llm_limits *limits,
                          llm_error *err) {
    token_device *d = (token_device *)context;
    (void)err;
    assert_true(d->n_programs < 2);
    d->programs[d->n_programs++] = program;
    if (!d->hashes) {
        d->max_tokens = limits->max_tokens;
        d->hashes = (uint64_t *)malloc(sizeof *d->hashes * (size_t)limits->max_tokens);
        d->last = (int32_t *)malloc(sizeof *d->last * (size_t)limits->max_tokens);
        assert_true(d->hashes && d->last);
    }
    return true;
}

static void token_forget(void *context, llm_program *program) {
    (void)context;
    (void)program;
}

/* The token after which token n of the sequence from `first` on comes; -1: it is not in the batch.
 * A tree lists the parents of all tokens but the first. */
static int token_parent(const llm_batch *b, int first, int n) {
    bool tree = b->parents && n > first && b->parents[first + 1] >= 0;
    if (b->parents && !tree) assert_int_equal(b->parents[n], -1);
    return n == first ? -1 : tree ? b->parents[n] : n - 1;
}

/* Check where the batch writes its tokens: each goes to the slot that the block table gives for its
 * place in the sequence, and no slot is written twice. */
static void token_check(token_device *d, const llm_cache *cache, const llm_batch *b) {
    int n = 0;
    assert_in_range(b->n_tokens, 1, d->max_tokens);
    for (int s = 0; s < b->n_sequences; s++) {
        const int32_t *table = b->block_tables + s * b->table_stride;
        assert_int_equal(b->seq_first[s], n);
        for (int end = n + b->seq_count[s]; n < end; n++) {
            int first = b->seq_first[s], parent = token_parent(b, first, n);
            int place = b->positions[first] + n - first, slot = b->slots[n];
            assert_true(n == first ? parent == -1 : parent >= first && parent < n);
            if (n > first) assert_int_equal(b->positions[n], b->positions[parent] + 1);
            assert_in_range(place / b->block_size, 0, b->table_stride - 1);
            assert_int_equal(slot, table[place / b->block_size] * b->block_size +
                                       place % b->block_size);
            assert_in_range(slot, 0, cache->n_blocks * b->block_size - 1);
            if (d->written_in[slot] == d->n_passes)
                fail_msg("device %llu: two tokens of a batch have the same slot", (ull)d->seed);
            d->written_in[slot] = d->n_passes;
        }
    }
    assert_int_equal(b->n_tokens, n);
}

/* Read the first n tokens of a sequence through its block table. Returns the hash of the text. */
static uint64_t token_read(const token_device *d, const llm_cache *cache, const int32_t *table,
                           int n) {
    const uint64_t *keys = (const uint64_t *)cache->keys, *values = (const uint64_t *)cache->values;
    uint64_t hash = 0;
    for (int p = 0; p < n; p++) {
        int block = table[p / cache->block_size];
        int64_t slot = (int64_t)block * cache->block_size + p % cache->block_size;
        assert_in_range(block, 0, cache->n_blocks - 1);
        int32_t token = (int32_t)(values[slot] ^ keys[slot] ^ token_salt(d, cache));
        if (keys[slot] != text_hash(hash, token))
            fail_msg("device %llu: block %d does not hold position %d of its sequence",
                     (ull)d->seed, block, p);
        if (d->written_in[slot] == d->n_passes)
            fail_msg("device %llu: a step writes a slot that another sequence reads", (ull)d->seed);
        hash = keys[slot];
    }
    return hash;
}

/* Run the body part of the program, but write only the first n_written tokens to the cache. */
static void token_body(token_device *d, const llm_cache *cache, const llm_batch *b, int n_written) {
    uint64_t *keys = (uint64_t *)cache->keys, *values = (uint64_t *)cache->values;
    size_t slots = (size_t)(cache->n_blocks * cache->block_size);
    if (!d->written_in) d->written_in = (int64_t *)calloc(slots, sizeof *d->written_in);
    assert_non_null(d->written_in);
    d->n_passes++;
    token_check(d, cache, b);
    for (int s = 0; s < b->n_sequences; s++) {
        int first = b->seq_first[s];
        uint64_t hash = token_read(d, cache, b->block_tables + s * b->table_stride,
                                   b->positions[first]);
        for (int t = first; t < first + b->seq_count[s]; t++) {
            int parent = token_parent(b, first, t);
            if (parent >= 0) hash = d->hashes[parent];
            d->hashes[t] = hash = text_hash(hash, b->tokens[t]);
            d->last[t] = b->tokens[t];
            if (t >= n_written) continue;
            keys[b->slots[t]] = hash;
            values[b->slots[t]] = hash ^ (uint64_t)b->tokens[t] ^ token_salt(d, cache);
        }
    }
}

/* Logits after a text: 0 for the tokens that may follow, far lower for the others. */
static void token_logits(uint64_t hash, int32_t last, float *row) {
    int32_t ids[TOKEN_CHOICES];
    choices_after(hash, last, ids);
    for (int i = 0; i < TOKEN_VOCAB; i++) row[i] = -1000;
    for (int i = 0; i < TOKEN_CHOICES; i++) row[ids[i]] = 0;
}

static bool token_run(void *context, const llm_program *program, llm_part part, const llm_batch *b,
                      int first, int n, llm_error *err) {
    token_device *d = (token_device *)context;
    assert_int_equal(d->n_copies, 0); /* requested copies must be complete before a pass */
    bool fails = token_fails(d, CALL_RUN), draft = program != d->programs[0];
    d->n_fetched = 0;
    assert_int_equal((part & LLM_BODY) != 0, first == 0); /* the body runs once,*/
    assert_int_equal((part & LLM_HEAD) != 0, n > 0);      /* the head whenever it has rows */
    if (part & LLM_BODY)
        token_body(d, program->cache, b, fails ? token_pick(d, b->n_tokens + 1) : b->n_tokens);
    if (fails) return token_error(err);
    float *logits = program->buffers[program->ops[program->n_ops - 1].out].data;
    for (int i = 0; part & LLM_HEAD && i < n; i++) {
        int t = b->logit_rows[first + i];
        assert_true(first + i < b->n_logits && t < b->n_tokens &&
                    (first + i == 0 || t > b->logit_rows[first + i - 1]));
        uint64_t hash = d->hashes[t];
        if (draft && d->draft_differs && (hash >> 40) % d->draft_differs == 0)
            hash = token_mix(hash);
        token_logits(hash, d->last[t], logits + i * TOKEN_VOCAB);
    }
    return true;
}

static bool token_sync(void *context, llm_error *err) {
    token_device *d = (token_device *)context;
    int n = d->n_copies;
    bool fails = n ? d->copies_fail : token_fails(d, CALL_SYNC);
    d->n_copies = 0;
    d->copies_fail = false;
    if (fails) return token_error(err);
    d->n_calls[CALL_COPY] += n;
    return true;
}

/* Copies all blocks, or only some if the call fails. */
static void token_copy_blocks(void *context, const llm_cache *cache, const int32_t *from,
                              const int32_t *to, int n) {
    token_device *d = (token_device *)context;
    size_t piece = cache->layer_bytes / (size_t)cache->n_blocks;
    bool fails = d->copies_fail || token_fails(d, CALL_COPY);
    int done = fails ? token_pick(d, n + 1) : n;
    for (int i = 0; i < done; i++) {
        memcpy((char *)cache->keys + (size_t)to[i] * piece,
               (char *)cache->keys + (size_t)from[i] * piece, piece);
        memcpy((char *)cache->values + (size_t)to[i] * piece,
               (char *)cache->values + (size_t)from[i] * piece, piece);
    }
    d->copies_fail = fails;
    if (cache == d->programs[0]->cache) d->n_copies += n;
}

/* Copies all slots, or only some if the call fails. */
static void token_copy_slots(void *context, const llm_cache *cache, const int32_t *from,
                             const int32_t *to, int n) {
    token_device *d = (token_device *)context;
    uint64_t *keys = (uint64_t *)cache->keys, *values = (uint64_t *)cache->values;
    bool fails = d->copies_fail || token_fails(d, CALL_COPY);
    int done = fails ? token_pick(d, n + 1) : n;
    for (int i = 0; i < done; i++) keys[to[i]] = keys[from[i]], values[to[i]] = values[from[i]];
    d->copies_fail = fails;
    d->n_copies += n;
}

static bool token_sample(void *context, float *logits, int vocab_size, const llm_draw *draws, int n,
                         int32_t *ids, float *logprobs, llm_error *err) {
    token_device *d = (token_device *)context;
    if (token_fails(d, CALL_LOGITS)) return token_error(err);
    for (int i = 0; i < n; i++) {
        const float *row = logits + draws[i].row * vocab_size;
        int wanted = draws[i].sampling.temperature == 0 ? 0 : (int)(draws[i].random >> 62), id = 0;
        assert_true(i == 0 || draws[i].row >= draws[i - 1].row);
        /* rows that are sampled here need no download */
        for (int k = 0; k < d->n_fetched; k++)
            assert_true((const char *)row < d->fetched[k].begin ||
                        (const char *)row >= d->fetched[k].end);
        while (row[id] < 0 || wanted-- > 0) id++;
        ids[i] = id;
        logprobs[i] = -1.3862944f; /* ln(1/4) */
        if (draws[i].n_top)
            llm__top_logprobs(row, vocab_size, draws[i].n_top, draws[i].top);
    }
    return true;
}

/* Call this before each llm_step. */
static void token_device_step(token_device *d) {
    d->failed = CALL_NONE;
    memset(d->n_calls, 0, sizeof d->n_calls);
}

/* Check that everything allocated was released, and free the device. */
static void token_device_free(token_device *d) {
    assert_int_equal(d->live, 0);
    free(d->hashes);
    free(d->last);
    free(d->written_in);
    free(d);
}

static token_device *token_device_new(bool samples, uint64_t seed) {
    token_device *d = (token_device *)calloc(1, sizeof *d);
    assert_non_null(d);
    d->seed = d->random = seed;
    d->failed = CALL_NONE;
    llm_backend *b = &d->backend;
    b->name = "tokens";
    b->context = d;
    b->allocate = token_allocate;
    b->release = token_release;
    b->upload = token_upload;
    b->download = token_download;
    b->load_weight = token_load_weight;
    b->free_weight = token_free_weight;
    b->prepare = token_prepare;
    b->forget = token_forget;
    b->run = token_run;
    b->sync = token_sync;
    b->copy_blocks = token_copy_blocks;
    b->copy_slots = token_copy_slots;
    if (samples) b->sample = token_sample;
    return d;
}

#endif
