/* synth.c - llm synth: a model file of any shape, with random weights */
#include "tools.h"

#include <ctype.h>

const shape shapes[N_SHAPES] = {
    {"tales", 256, 8, 8, 4, 768, 4096, 1024, 0, 1e4f, 1},
    {"qwen2.5-0.5b", 896, 24, 14, 2, 4864, 151936, 32768, 0, 1e6f, 1},
    {"tinyllama-1.1b", 2048, 22, 32, 4, 5632, 32000, 2048, 0, 1e4f, 0},
    {"llama-3.2-1b", 2048, 16, 32, 8, 8192, 128256, 131072, 0, 5e5f, 1},
    {"llama-2-7b", 4096, 32, 32, 32, 11008, 32000, 4096, 0, 1e4f, 0},
    {"mistral-7b", 4096, 32, 32, 8, 14336, 32000, 32768, 0, 1e6f, 0},
    {"llama-3.1-8b", 4096, 32, 32, 8, 14336, 128256, 131072, 0, 5e5f, 0},
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
            {"tied", &out->tied}, {"rope-base", NULL}};
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
 * sum of three uniform numbers is close to a normal distribution, and the same on every platform.
 * */
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

typedef enum tensor_kind { NORM, MATRIX, OUTPUT } tensor_kind;

/* The pool for the values of a matrix; llm_quantize_type chooses its type. */
static pool *pool_for(synth *s, bool output, int64_t cols) {
    llm_type type = llm_quantize_type(s->type, (uint64_t)cols, output);
    int i = 0;
    while (i < s->n_pools && (s->pools[i].type != type || s->pools[i].output != output)) i++;
    if (i == s->n_pools) {
        s->pools = resize(s->pools, (size_t)++s->n_pools * sizeof *s->pools);
        s->pools[i] = make_pool(type, output, s->seed.value + output, &s->shape);
    }
    return &s->pools[i];
}

/* Declare or write one tensor: a matrix (rows, cols), or a norm (a vector of ones). */
static bool synth_tensor(synth *s, tensor_kind kind, const char *prefix, int layer,
                         const char *name, int64_t cols, int64_t rows) {
    pool *from = kind == NORM ? NULL : pool_for(s, kind == OUTPUT, cols);
    char full[64];
    int n = snprintf(full, sizeof full, prefix, layer);
    n += snprintf(full + n, sizeof full - (size_t)n, "%s.weight", name);
    uint64_t dims[2] = {(uint64_t)cols, (uint64_t)rows};
    size_t bytes = row_bytes(from ? from->type : LLM_F32, (uint64_t)cols);
    if (s->declaring) {
        s->total += bytes * (uint64_t)rows;
        return llm_writer_tensor(s->writer, (llm_string){full, (size_t)n},
                                 from ? from->type : LLM_F32, from ? 2 : 1, dims);
    }
    bool good = true;
    const float one = 1;
    for (int64_t i = 0; !from && good && i < cols; i++)
        good = llm_writer_data(s->writer, &one, sizeof one);
    for (int64_t row = 0; from && good && row < rows && !stop_requested; row++) {
        uint64_t place = from->rows++ * 0x9E3779B97F4A7C15u &
                         (from->places - 1); /* an odd factor visits all places in turn */
        good = llm_writer_data(s->writer, from->data + row_bytes(from->type, place * from->place),
                               bytes);
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
               synth_tensor(s, NORM, "blk.%d.", i, "ffn_norm", x->dim, 1) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "ffn_gate", x->dim, x->hidden) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "ffn_up", x->dim, x->hidden) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "ffn_down", x->hidden, x->dim);
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
    while (s->n_pools) free(s->pools[--s->n_pools].data);
    free(s->pools);
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

static int command_synth(const command *self, int argc, char **argv) {
    synth s = {.type = LLM_Q4_0, .seed = {false, 1}};
    const option options[] = {
        {0, "shape", "NAME|SIZES", TEXT, &s.shape_name, 0, 0,
         "a name from the list below, or sizes"},
        {0, "type", "TYPE", TYPE, &s.type, 0, 0,
         "type of the matrices: q4_0 (default), q4_K, f16 or any other of llm quantize"},
        {'s', "seed", "N", SEED, &s.seed, 0, 0, "seed of the random weights (default 1)"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status != PARSED) return status;
    if (!s.shape_name)
        return misuse(self, "--shape is missing: a name such as tinyllama-1.1b, or sizes");
    if (argc == 0) return misuse(self, "the file to write is missing");
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
    "mistral-7b, llama-3.1-8b (the Llama 3 models without scaled RoPE frequencies). Or sizes,\n"
    "such as dim=256,layers=8,heads=8,kv-heads=4,hidden=768,vocab=4096,context=1024, which are\n"
    "also the defaults, with the optional ones ,head-dim=32 ,rope-base=10000 and ,tied=1.\n"
    "\n"
    "Examples:\n"
    "  llm synth --shape tinyllama-1.1b --type q4_0 tinyllama.gguf\n"
    "  llm synth --shape dim=512,layers=4,heads=8,kv-heads=2,hidden=1024 --type f16 small.gguf\n";

const command synth_command = {
    "synth", "Write a model with random weights, for benchmarks.",
    "--shape NAME|SIZES --type TYPE OUT", command_synth, synth_notes};
