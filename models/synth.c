/* synth.c - llm synth: a model file of any shape, with random weights; or a given model made larger
 * without changing its results */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "tools.h"

#include <ctype.h>
#include <unistd.h>

const shape shapes[N_SHAPES] = {
    {"tales", 256, 8, 8, 4, 768, 4096, 1024, 0, 1e4f, 1, 0, 0},
    {"qwen2.5-0.5b", 896, 24, 14, 2, 4864, 151936, 32768, 0, 1e6f, 1, 0, 0},
    {"tinyllama-1.1b", 2048, 22, 32, 4, 5632, 32000, 2048, 0, 1e4f, 0, 0, 0},
    {"llama-3.2-1b", 2048, 16, 32, 8, 8192, 128256, 131072, 0, 5e5f, 1, 0, 0},
    {"llama-2-7b", 4096, 32, 32, 32, 11008, 32000, 4096, 0, 1e4f, 0, 0, 0},
    {"mistral-7b", 4096, 32, 32, 8, 14336, 32000, 32768, 0, 1e6f, 0, 0, 0},
    {"llama-3.1-8b", 4096, 32, 32, 8, 14336, 128256, 131072, 0, 5e5f, 0, 0, 0},
    /* experts: hidden is the width of each (the norms of heads are left out) */
    {"qwen3-30b-a3b-4-layers", 2048, 4, 32, 4, 768, 151936, 40960, 128, 1e6f, 0, 128, 8},
    {"olmoe-1b-7b", 2048, 16, 16, 16, 1024, 50304, 4096, 0, 1e4f, 0, 64, 8},
    {"mixtral-8x7b", 4096, 32, 32, 8, 14336, 32000, 32768, 0, 1e6f, 0, 8, 2},
};

/* Parse "dim=64,layers=2,...", or a name. Missing sizes are those of the first shape in the table.
 * Returns an error message, or NULL. */
static const char *parse_shape(const char *s, shape *out) {
    *out = shapes[0];
    for (int i = 0; i < N_SHAPES; i++)
        if (!strcmp(s, shapes[i].name)) return *out = shapes[i], NULL;
    if (!strchr(s, '=')) return "no such shape";
    out->name = "synthetic";
    out->tied = 0;
    while (*s) {
        const struct { const char *name; int *value; } fields[] = {
            {"dim", &out->dim}, {"layers", &out->layers}, {"heads", &out->heads},
            {"kv-heads", &out->kv_heads},
            {"hidden", &out->hidden}, {"vocab", &out->vocab}, {"context", &out->context},
            {"head-dim", &out->head_dim},
            {"tied", &out->tied}, {"rope-base", NULL}, {"experts", &out->experts},
            {"experts-used", &out->experts_used}};
        size_t n = strcspn(s, "=");
        int k = 0;
        while (k < COUNT(fields) && (strlen(fields[k].name) != n || strncmp(s, fields[k].name, n)))
            k++;
        if (k == COUNT(fields) || s[n] != '=') return "no such size";
        char *end;
        double x = strtod(s + n + 1, &end);
        bool may_be_zero = fields[k].value == &out->tied;
        bool number = end > s + n + 1 && (!*end || *end == ',');
        if (!number || !(x >= (may_be_zero ? 0 : 1) && x <= 1 << 24))
            return "a size is not a number from 1 to 16777216";
        if (fields[k].value) *fields[k].value = (int)x;
        else out->rope_base = (float)x;
        s = *end ? end + 1 : end;
    }
    return NULL;
}

enum { BYTE_TOKENS = 256, FIRST_BYTE = 2, FIRST_MERGE = FIRST_BYTE + BYTE_TOKENS, MAX_PIECE = 32 };

static const char *check_shape(shape *s) {
    int head_dim = s->head_dim ? s->head_dim : s->dim / s->heads;
    if (!s->head_dim && s->dim % s->heads)
        return "dim is not a multiple of heads (or give head-dim)";
    s->head_dim = head_dim;
    if (s->heads % s->kv_heads) return "heads is not a multiple of kv-heads";
    if (head_dim % 2) return "the heads' width must be even";
    if (s->experts_used > s->experts || !s->experts_used != !s->experts)
        return "experts-used must be from 1 to experts";
    if (s->vocab < FIRST_MERGE)
        return "vocab must be at least 258: two special tokens and all bytes";
    return NULL;
}

/* The spelling of a byte in byte-level vocabularies: printable bytes as they are, the others from
 * U+0100 on. Returns its length. */
static int spell_byte(int byte, char *out) {
    int others = 0;
    for (int b = 0; b <= byte; b++) others += !((b > ' ' && b < 0x7F) || (b > 0xA0 && b != 0xAD));
    bool printable = (byte > ' ' && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    int c = printable ? byte : 0x100 + others - 1;
    if (c < 0x80) return out[0] = (char)c, 1;
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
}

/* Write a vocabulary of invented words: BOS, EOS, all bytes, and then, shortest first, every word
 * that starts with a letter or a space and alternates vowels and consonants. Each word is a shorter
 * word plus a letter, so its merge is valid, and no word occurs twice. */
static bool synth_vocabulary(llm_writer *w, int vocab) {
    char (*pieces)[MAX_PIECE] = resize(NULL, (size_t)vocab * sizeof *pieces);
    char (*merges)[MAX_PIECE] = resize(NULL, (size_t)vocab * sizeof *merges);
    llm_string *strings = resize(NULL, (size_t)vocab * sizeof *strings);
    int32_t *types = resize(NULL, (size_t)vocab * sizeof *types);
    strcpy(pieces[0], "<|bos|>");
    strcpy(pieces[1], "<|endoftext|>");
    for (int b = 0; b < BYTE_TOKENS; b++)
        pieces[FIRST_BYTE + b][spell_byte(b, pieces[FIRST_BYTE + b])] = 0;
    int n = FIRST_MERGE;
    for (int parent = FIRST_BYTE + ' '; n < vocab; parent++) {
        if (parent > FIRST_BYTE + ' ' && parent < FIRST_BYTE + 'a') parent = FIRST_BYTE + 'a';
        if (parent > FIRST_BYTE + 'z' && parent < FIRST_MERGE) parent = FIRST_MERGE;
        char word[MAX_PIECE];
        int length = (int)strlen(memcpy(word, pieces[parent], MAX_PIECE));
        bool vowel = strchr("aeiou", word[length - 1]) != NULL,
             letter = islower((unsigned char)word[length - 1]);
        for (char c = 'a'; c <= 'z' && n < vocab; c++) {
            if (letter && (strchr("aeiou", c) != NULL) == vowel) continue;
            /* a vocabulary of millions has words of 9 letters, so none is cut */
            snprintf(pieces[n], MAX_PIECE, "%.*s%c", MAX_PIECE - 4, word, c);
            snprintf(merges[n++], MAX_PIECE, "%.*s %c", MAX_PIECE - 4, word, c);
        }
    }
    bool good = true;
    for (int i = 0; i < vocab; i++) {
        strings[i] = (llm_string){pieces[i], strlen(pieces[i])};
        types[i] = i < FIRST_BYTE ? 3 : 1; /* control, normal */
    }
    good &= llm_writer_string(w, "tokenizer.ggml.model", "gpt2") &&
            llm_writer_string(w, "tokenizer.ggml.pre", "gpt-2");
    good &= llm_writer_string_array(w, "tokenizer.ggml.tokens", strings, (uint64_t)vocab);
    good &= llm_writer_i32_array(w, "tokenizer.ggml.token_type", types, (uint64_t)vocab);
    for (int i = FIRST_MERGE; i < vocab; i++)
        strings[i] = (llm_string){merges[i], strlen(merges[i])};
    good &= llm_writer_string_array(w, "tokenizer.ggml.merges", strings + FIRST_MERGE,
                                    (uint64_t)(vocab - FIRST_MERGE));
    good &= llm_writer_u32(w, "tokenizer.ggml.bos_token_id", 0) &&
            llm_writer_u32(w, "tokenizer.ggml.eos_token_id", 1);
    good &= llm_writer_bool(w, "tokenizer.ggml.add_bos_token", true);
    good &= llm_writer_bool(w, "tokenizer.ggml.add_eos_token", false);
    free(pieces), free(merges), free(strings), free(types);
    return good;
}

static bool synth_metadata(llm_writer *w, const shape *s, llm_type type) {
    const struct { const char *name; int value; } sizes[] = {
        {"llama.vocab_size", s->vocab}, {"llama.context_length", s->context},
        {"llama.embedding_length", s->dim},
        {"llama.block_count", s->layers}, {"llama.feed_forward_length", s->hidden},
        {"llama.attention.head_count", s->heads},
        {"llama.attention.head_count_kv", s->kv_heads}, {"llama.attention.key_length", s->head_dim},
        {"llama.attention.value_length", s->head_dim}, {"llama.rope.dimension_count", s->head_dim}};
    uint32_t file_type = (uint32_t)llm_type_find(type)->file_type;
    bool good = llm_writer_string(w, "general.architecture", "llama") &&
                llm_writer_string(w, "general.name", s->name);
    good &= llm_writer_string(w, "general.description", "random weights, for benchmarks");
    good &= llm_writer_u32(w, "general.file_type", file_type) &&
            llm_writer_u32(w, "general.quantization_version", 2);
    for (int i = 0; i < COUNT(sizes); i++)
        good &= llm_writer_u32(w, sizes[i].name, (uint32_t)sizes[i].value);
    if (s->experts)
        good &= llm_writer_u32(w, "llama.expert_count", (uint32_t)s->experts) &&
                llm_writer_u32(w, "llama.expert_used_count", (uint32_t)s->experts_used);
    good &= llm_writer_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    good &= llm_writer_f32(w, "llama.rope.freq_base", s->rope_base);
    return good && synth_vocabulary(w, s->vocab);
}

/* Rows are slices of a pool of packed random values, each from a different place, because drawing
 * and packing billions of values would take minutes. A place is a multiple of 32 values, or of the
 * type's block. */
typedef struct pool {
    llm_type type;
    bool output;     /* true: for the embedding and the output matrix */
    uint8_t *data;
    uint64_t place;  /* distance in values from one place to the next */
    uint64_t places; /* number of places, a power of two; the longest row fits after the last */
    uint64_t rows;   /* number of rows taken so far */
} pool;

/* Weights of mean 0 and standard deviation 0.02, so that activations stay finite in any shape. The
 * sum of three uniform numbers is close to normally distributed, and equal on every platform. */
static pool make_pool(llm_type type, bool output, uint64_t seed, const shape *s) {
    pool p = {.type = type, .output = output, .place = 32, .places = 256};
    uint64_t longest = (uint64_t)s->heads * (uint64_t)s->head_dim, count;
    float values[256];
    if (llm_type_find(type)->block_values > 32)
        p.place = (uint64_t)llm_type_find(type)->block_values;
    if ((uint64_t)s->hidden > longest) longest = (uint64_t)s->hidden;
    if ((uint64_t)s->dim > longest) longest = (uint64_t)s->dim;
    while (p.places < (uint64_t)s->vocab && p.places < 1 << 18) p.places *= 2;
    count = (p.places + longest / p.place + 1) * p.place;
    p.data = resize(NULL, row_bytes(type, count));
    for (uint64_t i = 0; i < count; i += p.place) {
        for (uint64_t k = 0; k < p.place; k++) {
            double sum = 0;
            for (uint64_t j = 0; j < 3; j++) sum += llm_random(seed, 0, 3 * (i + k) + j);
            values[k] = (float)(0.02 * 2 * (sum - 1.5));
        }
        llm_pack(type, values, p.data + row_bytes(type, i), (int64_t)p.place);
    }
    return p;
}

typedef struct synth {
    const char *shape_name;
    llm_type type;
    seed_value seed;
    shape shape;
    llm_writer *writer;
    bool declaring; /* true: declare the tensors; false: write them */
    pool *pools;    /* (n_pools) one for each type of matrix */
    int n_pools;
    uint64_t done, total; /* bytes of data: written; in all */
} synth;

typedef enum tensor_kind { NORM, MATRIX, OUTPUT, ROUTER, EXPERTS } tensor_kind;

/* The pool for the rows of matrices of this type. */
static pool *pool_of(synth *s, llm_type type, bool output) {
    int i = 0;
    while (i < s->n_pools && (s->pools[i].type != type || s->pools[i].output != output)) i++;
    if (i == s->n_pools) {
        s->pools = resize(s->pools, (size_t)++s->n_pools * sizeof *s->pools);
        s->pools[i] = make_pool(type, output, s->seed.value + output, &s->shape);
    }
    return &s->pools[i];
}

static const uint8_t *pool_row(pool *p) { /* an odd factor visits all places in turn */
    uint64_t place = p->rows++ * 0x9E3779B97F4A7C15u & (p->places - 1);
    return p->data + row_bytes(p->type, place * p->place);
}

static void free_pools(synth *s) {
    while (s->n_pools) free(s->pools[--s->n_pools].data);
    free(s->pools);
}

/* Declare or write one tensor: a matrix (rows, cols), one for each expert, or a norm (a vector of
 * ones). */
static bool synth_tensor(synth *s, tensor_kind kind, const char *prefix, int layer,
                         const char *name, int64_t cols, int64_t rows) {
    bool output = kind == OUTPUT;
    pool *from = kind == NORM     ? NULL
                 : kind == ROUTER ? pool_of(s, LLM_F32, false)
                                  : pool_of(s, llm_quantize_type(s->type, (uint64_t)cols, output),
                                            output);
    char full[64];
    int n = snprintf(full, sizeof full, prefix, layer);
    n += snprintf(full + n, sizeof full - (size_t)n, "%s.weight", name);
    int n_dims = kind == NORM ? 1 : kind == EXPERTS ? 3 : 2;
    uint64_t dims[3] = {(uint64_t)cols, (uint64_t)rows, (uint64_t)s->shape.experts};
    if (kind == EXPERTS) rows *= s->shape.experts;
    size_t bytes = row_bytes(from ? from->type : LLM_F32, (uint64_t)cols);
    if (s->declaring) {
        s->total += bytes * (uint64_t)rows;
        return llm_writer_tensor(s->writer, (llm_string){full, (size_t)n},
                                 from ? from->type : LLM_F32, n_dims, dims);
    }
    bool good = true;
    const float one = 1;
    for (int64_t i = 0; !from && good && i < cols; i++)
        good = llm_writer_data(s->writer, &one, sizeof one);
    for (int64_t row = 0; from && good && row < rows && !stop_requested; row++) {
        good = llm_writer_data(s->writer, pool_row(from), bytes);
        s->done += bytes;
        if (row % 1024 == 0) show_progress("synth", (double)s->done / (double)s->total, full);
    }
    return good;
}

static bool synth_tensors(synth *s) {
    const shape *x = &s->shape;
    int64_t q = (int64_t)x->heads * x->head_dim, kv = (int64_t)x->kv_heads * x->head_dim;
    bool good = synth_tensor(s, OUTPUT, "", 0, "token_embd", x->dim, x->vocab);
    for (int i = 0; good && i < x->layers && !stop_requested; i++) {
        good = synth_tensor(s, NORM, "blk.%d.", i, "attn_norm", x->dim, 1) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "attn_q", x->dim, q) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "attn_k", x->dim, kv) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "attn_v", x->dim, kv) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "attn_output", q, x->dim) &&
               synth_tensor(s, NORM, "blk.%d.", i, "ffn_norm", x->dim, 1);
        static const char *const names[][3] = {{"ffn_gate", "ffn_up", "ffn_down"},
                                               {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}};
        const char *const *name = names[x->experts > 0];
        tensor_kind kind = x->experts ? EXPERTS : MATRIX;
        if (x->experts)
            good = good && synth_tensor(s, ROUTER, "blk.%d.", i, "ffn_gate_inp", x->dim,
                                        x->experts);
        good = good && synth_tensor(s, kind, "blk.%d.", i, name[0], x->dim, x->hidden) &&
               synth_tensor(s, kind, "blk.%d.", i, name[1], x->dim, x->hidden) &&
               synth_tensor(s, kind, "blk.%d.", i, name[2], x->hidden, x->dim);
    }
    good = good && synth_tensor(s, NORM, "", 0, "output_norm", x->dim, 1);
    return good && (x->tied || synth_tensor(s, OUTPUT, "", 0, "output", x->dim, x->vocab));
}

static int synth_file(synth *s, const char *path) {
    llm_error err;
    if (!may_write(path, NULL)) return FAILED;
    s->writer = llm_writer_create(path, &err);
    if (!s->writer) return fail_with(&err);
    s->declaring = true;
    bool good = synth_metadata(s->writer, &s->shape, s->type) && synth_tensors(s);
    s->declaring = false;
    if (good) synth_tensors(s);
    show_progress("", -1, "");
    free_pools(s);
    if (stop_requested) {
        llm_writer_abandon(s->writer);
        return fail("interrupted: %s was not written", path);
    }
    if (!llm_writer_finish(s->writer, &err)) return fail_with(&err);
    put_text(path);
    put(": %s of random weights, %s, %s\n", HUMAN(s->total), s->shape.name,
        llm_type_find(s->type)->name);
    llm_file *file = llm_file_open(path, &err);
    if (!file) return fail_with(&err);
    put_other_types(file, s->type);
    llm_file_close(file);
    return 0;
}

/* ---- llm synth --inflate: a larger model that computes the same function -------------------
 *
 * The matrices attn_output and ffn_down of each added layer are zeros, so the layer adds 0 to the
 * residual stream. The feed-forward of every layer gets wider: the added columns of ffn_down are
 * zeros. All other added weights are random. A step reads and computes the whole model. */

typedef struct inflation {
    const llm_file *in;
    llm_string architecture;
    int layers, hidden;             /* of the input */
    int added_layers, added_hidden; /* added_hidden: a multiple of 256 */
    synth to;                       /* the output, and the random weights */
    uint8_t *zeros;                 /* a row of zeros of any type and size */
} inflation;

enum { INFLATE_STEP = 256 }; /* whole blocks of every type */

static bool inflate_fail(llm_error *err, const inflation *x, const char *what) {
    *err = (llm_error){.status = LLM_ERROR_UNSUPPORTED};
    snprintf(err->message, sizeof err->message, "%s: %s", llm_file_path(x->in), what);
    return false;
}

/* The name of a layer's tensor without "blk.N.", and N; or NULL, if it is not a layer's. */
static const char *part_of_layer(const llm_tensor *t, int *layer, char *name, size_t size) {
    int at = 0;
    snprintf(name, size, "%.*s", (int)t->name.length, t->name.data);
    return sscanf(name, "blk.%d.%n", layer, &at) == 1 && at ? name + at : NULL;
}

static uint64_t rows_of(const llm_tensor *t) { return t->dims[1] * t->dims[2] * t->dims[3]; }

/* Declare or write a tensor; `added`: as a part of an added layer. */
static bool inflate_tensor(inflation *x, const llm_tensor *t, const char *name, const char *part,
                           bool added) {
    bool vector = t->n_dims < 2, zero = false;
    uint64_t dims[4], *widened = NULL;
    memcpy(dims, t->dims, sizeof dims);
    if (part) {
        zero = added && (!strncmp(part, "attn_output.", 12) || !strncmp(part, "ffn_down.", 9));
        bool wide = !strncmp(part, "ffn_gate.", 9) || !strncmp(part, "ffn_up.", 7);
        if (wide) widened = vector ? &dims[0] : &dims[1];
        else if (!strcmp(part, "ffn_down.weight")) widened = &dims[0];
    }
    if (widened) *widened += (uint64_t)x->added_hidden;
    size_t old_bytes = row_bytes(t->type, t->dims[0]), bytes = row_bytes(t->type, dims[0]);
    uint64_t rows = dims[1] * dims[2] * dims[3];
    if (x->to.declaring) {
        x->to.total += bytes * rows;
        return llm_writer_tensor(x->to.writer, (llm_string){name, strlen(name)}, t->type, t->n_dims,
                                 dims);
    }
    bool good = true;
    uint64_t copied = added && !vector ? 0 : rows_of(t);
    for (uint64_t row = 0; good && row < rows && !stop_requested; row++) {
        if (row < copied && !zero)
            good = llm_writer_data(x->to.writer, (const uint8_t *)t->data + row * old_bytes,
                                   old_bytes) &&
                   llm_writer_data(x->to.writer, x->zeros, bytes - old_bytes);
        else
            good = llm_writer_data(x->to.writer,
                                   zero ? x->zeros : pool_row(pool_of(&x->to, t->type, false)),
                                   bytes);
        x->to.done += bytes;
        if (row % 1024 == 0)
            show_progress("inflate", (double)x->to.done / (double)x->to.total, name);
    }
    return good && !stop_requested;
}

static bool inflate_tensors(inflation *x) {
    char name[128], copy[160];
    bool good = true;
    int layer;
    for (int64_t i = 0; good && i < llm_file_n_tensors(x->in); i++) {
        const llm_tensor *t = llm_file_tensor(x->in, i);
        const char *part = part_of_layer(t, &layer, name, sizeof name);
        good = inflate_tensor(x, t, name, part, false);
    }
    for (int added = 0; added < x->added_layers; added++)
        for (int64_t i = 0; good && i < llm_file_n_tensors(x->in); i++) {
            const llm_tensor *t = llm_file_tensor(x->in, i);
            const char *part = part_of_layer(t, &layer, name, sizeof name);
            if (!part || layer != 0) continue;
            snprintf(copy, sizeof copy, "blk.%d.%s", x->layers + added, part);
            good = inflate_tensor(x, t, copy, part, true);
        }
    return good;
}

static bool key_is(const inflation *x, llm_string key, const char *end) {
    size_t n = x->architecture.length;
    return key.length == n + strlen(end) && !memcmp(key.data, x->architecture.data, n) &&
           !memcmp(key.data + n, end, strlen(end));
}

static bool inflate_metadata(const inflation *x) {
    bool good = true;
    char key[128];
    for (int64_t i = 0; good && i < llm_file_n_values(x->in); i++) {
        const llm_value *v = llm_file_value(x->in, i);
        bool layers = key_is(x, v->key, ".block_count");
        snprintf(key, sizeof key, "%.*s", (int)v->key.length, v->key.data);
        if (!strncmp(key, "split.", 6) || !strcmp(key, "general.alignment")) continue;
        if (layers || key_is(x, v->key, ".feed_forward_length"))
            good = llm_writer_u32(x->to.writer, key,
                                  (uint32_t)(layers ? x->layers + x->added_layers
                                                    : x->hidden + x->added_hidden));
        else good = llm_writer_value(x->to.writer, v);
    }
    return good;
}

/* Read the sizes, and choose how many layers and how much width to add: the number of layers and
 * the width grow by about the same factor. */
static bool inflate_sizes(inflation *x, uint64_t bytes, llm_error *err) {
    const llm_tensor *parts[3];
    const char *const names[] = {"blk.0.ffn_gate.weight", "blk.0.ffn_up.weight",
                                 "blk.0.ffn_down.weight"};
    size_t cursor = 0;
    uint64_t layers = 0, hidden = 0, total = 0, layer_bytes = 0, step = 0;
    char key[128], name[128];
    int layer;
    llm_value_string(llm_file_find(x->in, "general.architecture"), &cursor, &x->architecture);
    for (int i = 0; i < 2; i++) {
        snprintf(key, sizeof key, "%.*s.%s", (int)x->architecture.length, x->architecture.data,
                 i ? "feed_forward_length" : "block_count");
        if (!llm_value_u64(llm_file_find(x->in, key), 0, i ? &hidden : &layers))
            return inflate_fail(err, x, "the number of layers or the width of the feed-forward is "
                                        "missing, or differs from layer to layer");
    }
    if (llm_file_version(x->in) == 0)
        return inflate_fail(err, x, "a folder cannot be inflated as it is: add --type TYPE");
    for (int i = 0; i < 3; i++) {
        parts[i] = llm_file_find_tensor(x->in, names[i]);
        if (!parts[i] || parts[i]->n_dims != 2 || parts[i]->dims[i == 2 ? 0 : 1] != hidden)
            return inflate_fail(err, x, "only a model whose layers have the matrices ffn_gate, "
                                        "ffn_up and ffn_down can be inflated");
    }
    for (int64_t i = 0; i < llm_file_n_tensors(x->in); i++) {
        const llm_tensor *t = llm_file_tensor(x->in, i);
        total += t->bytes;
        if (part_of_layer(t, &layer, name, sizeof name) && layer == 0) layer_bytes += t->bytes;
    }
    if (bytes < total) {
        snprintf(key, sizeof key, "the model has %s already", HUMAN(total));
        return inflate_fail(err, x, key);
    }
    for (int i = 0; i < 3; i++)
        step += i < 2 ? INFLATE_STEP * row_bytes(parts[i]->type, parts[i]->dims[0])
                      : parts[i]->dims[1] * row_bytes(parts[i]->type, INFLATE_STEP);
    double all = round((double)layers * sqrt((double)bytes / (double)total));
    uint64_t used = total + ((uint64_t)all - layers) * layer_bytes;
    double steps = used < bytes ? floor((double)(bytes - used) / all / (double)step) : 0;
    if (!(all < 1 << 16 && steps < 1 << 16))
        return inflate_fail(err, x, "--to is too large for this model");
    x->layers = (int)layers, x->hidden = (int)hidden;
    x->added_layers = (int)(all - (double)layers), x->added_hidden = (int)steps * INFLATE_STEP;
    return true;
}

/* The random rows: at most as wide as the widest tensor. */
static bool inflate_prepare(inflation *x, uint64_t seed, llm_error *err) {
    uint64_t widest = (uint64_t)(x->hidden + x->added_hidden);
    for (int64_t i = 0; i < llm_file_n_tensors(x->in); i++) {
        const llm_tensor *t = llm_file_tensor(x->in, i);
        if (t->dims[0] > widest) widest = t->dims[0];
    }
    if (widest > 1 << 24) return inflate_fail(err, x, "--to is too large for this model");
    x->to.seed.value = seed;
    x->to.shape = (shape){.dim = (int)widest, .heads = 1, .head_dim = 1, .hidden = 1,
                          .vocab = 1 << 16};
    x->zeros = resize(NULL, widest * sizeof(float));
    memset(x->zeros, 0, widest * sizeof(float)); /* zero bytes are zeros in every type */
    return true;
}

bool inflate(const char *in, const char *out, uint64_t bytes, uint64_t seed, llm_error *err) {
    inflation x = {.in = llm_file_open(in, err)};
    bool good = x.in && inflate_sizes(&x, bytes, err) && inflate_prepare(&x, seed, err) &&
                (x.to.writer = llm_writer_create(out, err)) != NULL;
    if (good) {
        x.to.declaring = true;
        if (inflate_metadata(&x) && inflate_tensors(&x)) {
            x.to.declaring = false;
            inflate_tensors(&x);
        }
        show_progress("", -1, "");
        if (stop_requested) {
            llm_writer_abandon(x.to.writer);
            *err = (llm_error){.status = LLM_ERROR_FILE, .message = "interrupted"};
            good = false;
        } else {
            good = llm_writer_finish(x.to.writer, err);
        }
    }
    free_pools(&x.to);
    free(x.zeros);
    llm_file_close((llm_file *)(uintptr_t)x.in);
    return good;
}

llm_model *inflated_model(const char *path, uint64_t bytes) {
    char name[4096];
    llm_error err;
    if (!temporary_file(name, sizeof name)) return NULL;
    llm_model *model = inflate(path, name, bytes, 1, &err) ? llm_model_load(name, &err) : NULL;
    if (!model) fail_with(&err);
    unlink(name); /* the mapping remains valid */
    return model;
}

/* llm synth --inflate: if a type is given, first quantize to a temporary file next to `out`. */
static int inflate_file(const char *in, const char *out, const llm_type *type, uint64_t bytes,
                        uint64_t seed) {
    llm_error err;
    text small = {0};
    if (!may_write(out, in)) return FAILED;
    if (type) {
        append(&small, out, strlen(out));
        append(&small, ".small", sizeof ".small");
    }
    bool good = (!type || llm_quantize(in, small.data, *type, false, NULL, NULL, &err)) &&
                inflate(type ? small.data : in, out, bytes, seed, &err);
    if (type) unlink(small.data);
    free(small.data);
    llm_file *file = good ? llm_file_open(out, &err) : NULL;
    if (!file) return fail_with(&err);
    put_text(out);
    put(": %s, computes what ", HUMAN(llm_file_size(file)));
    put_text(in);
    put_text(type ? " computes as " : " computes\n");
    if (type) put("%s\n", llm_type_find(*type)->name);
    llm_file_close(file);
    return 0;
}

static int command_synth(const command *self, int argc, char **argv) {
    synth s = {.type = LLM_Q4_Z /* not given */, .seed = {false, 1}};
    const char *source = NULL;
    uint64_t bytes = 0;
    const option options[] = {
        {0, "shape", "NAME|SIZES", TEXT, &s.shape_name, 0, 0,
         "a name from the list below, or sizes"},
        {0, "inflate", "MODEL", TEXT, &source, 0, 0,
         "make this model larger, and keep the function that it computes"},
        {0, "to", "SIZE", SIZE, &bytes, 0, 0, "with --inflate: the size of the new model"},
        {0, "type", "TYPE", TYPE, &s.type, 0, 0,
         "type of the matrices: q4_0 (default; --inflate: that of MODEL), q4_K, f16 or any other "
         "of llm quantize"},
        {'s', "seed", "N", SEED, &s.seed, 0, 0, "seed of the random weights (default 1)"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status != PARSED) return status;
    if (!s.shape_name && !source)
        return misuse(self, "--shape is missing: a name such as tinyllama-1.1b, or sizes");
    if (s.shape_name && source) return misuse(self, "--shape and --inflate exclude each other");
    if (!bytes != !source) return misuse(self, "--inflate MODEL and --to SIZE need each other");
    if (argc == 0) return misuse(self, "the file to write is missing");
    if (source)
        return inflate_file(source, argv[0], s.type == LLM_Q4_Z ? NULL : &s.type, bytes,
                            s.seed.value);
    if (s.type == LLM_Q4_Z) s.type = LLM_Q4_0;
    const char *wrong = parse_shape(s.shape_name, &s.shape);
    if (wrong && !strchr(s.shape_name, '=')) {
        suggestion near = {s.shape_name, NULL, 0};
        for (int i = 0; i < N_SHAPES; i++) consider(&near, shapes[i].name);
        if (near.best)
            return misuse(self, "no shape is named '%s'; did you mean %s?", s.shape_name,
                          near.best);
    }
    if (!wrong) wrong = check_shape(&s.shape);
    if (wrong) return misuse(self, "--shape %s: %s", s.shape_name, wrong);
    return synth_file(&s, argv[0]);
}

static const char synth_notes[] =
    "Writes a model that generates nonsense, but runs as fast as a real one of its shape, with a\n"
    "vocabulary that can be decoded. As in llm quantize, the embedding and the output matrix are\n"
    "q8_0 where the type is q4_0, and q6_K where it is q4_K. A matrix whose rows are not whole\n"
    "blocks gets another type; a note says which.\n"
    "\n"
    "Shapes: tales, qwen2.5-0.5b (without its biases), tinyllama-1.1b, llama-3.2-1b, llama-2-7b,\n"
    "mistral-7b, llama-3.1-8b (the Llama 3 models without scaled RoPE frequencies); with experts:\n"
    "qwen3-30b-a3b-4-layers (4 of its 48, without norms of heads), olmoe-1b-7b (likewise),\n"
    "mixtral-8x7b. Or sizes, such as\n"
    "dim=256,layers=8,heads=8,kv-heads=4,hidden=768,vocab=4096,context=1024, which are also the\n"
    "defaults, with the optional ones ,head-dim=32 ,rope-base=10000 ,tied=1 and\n"
    ",experts=16,experts-used=4 (hidden is then the width of an expert).\n"
    "\n"
    "--inflate adds layers and widens the feed-forward networks. Zeros in attn_output and\n"
    "ffn_down keep the results as they were. All other added weights are random, and a step\n"
    "reads and computes all of them. So a model that fits the processor's cache becomes one that\n"
    "is bound by memory, for example to measure speculation with real proposals.\n"
    "\n"
    "Examples:\n"
    "  llm synth --shape tinyllama-1.1b --type q4_0 tinyllama.gguf\n"
    "  llm synth --shape dim=512,layers=4,heads=8,kv-heads=2,hidden=1024 --type f16 small.gguf\n"
    "  llm synth --inflate models/tales.gguf --to 600M --type q4_0 large.gguf\n";

const command synth_command = {
    "synth", "Write a random or enlarged model, for benchmarks.",
    "--shape NAME|SIZES | --inflate MODEL --to SIZE [--type TYPE] OUT", command_synth, synth_notes};
