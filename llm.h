/* llm.h - a whole LLM inference engine in one header (and llm.cu for an NVIDIA GPU)
 *
 * Copy this file into your project. In ONE C file write
 *
 *     #define LLM_IMPLEMENTATION
 *     #include "llm.h"
 *
 * and only the #include in all other files. The header needs C11, libc, libm and, if the compiler
 * has it, OpenMP:  cc -O2 -fopenmp app.c -lm
 *
 * It maps GGUF files and Hugging Face folders into memory as they are, and runs many requests at
 * once over a paged key/value cache. A complete program:
 *
 *     #define LLM_IMPLEMENTATION
 *     #include "llm.h"
 *     #include <stdio.h>
 *     int main(void) {
 *         llm_error err;
 *         llm_event event;
 *         llm_request request = llm_request_defaults();
 *         request.max_tokens = 200;
 *         request.sampling.temperature = 0.8f;
 *         llm_model *model = llm_model_load("models/tales-q4_0.gguf", &err);
 *         llm_engine *engine = model ? llm_engine_create(model, NULL, &err) : NULL;
 *         if (engine && llm_submit_text(engine, "Once upon a time", &request, NULL, &err))
 *             while (llm_step(engine, &err) > 0)
 *                 while (llm_next_event(engine, &event))
 *                     fwrite(event.text, 1, event.text_length, stdout);
 *         if (err.status != LLM_OK) fprintf(stderr, "%s\n", err.message);
 *         llm_engine_free(engine);
 *         llm_model_free(model);
 *         return err.status != LLM_OK;
 *     }
 *
 * CONTENTS (search for the mark in the left column)
 *
 *     [API]   everything you may call
 *     [SEAM]  a model is a program; struct llm_backend: what a device implements
 *
 *     Part I, the engine. It reads from top to bottom.
 *     [DATA]  the structs of the engine
 *     [1]     Life of a request  submit, schedule, forward, choose, commit, event
 *     [2]     Speculation        the two places where it plugs into [1]
 *     [3]     Sampling           from logits to a token
 *     [4]     Paged cache        blocks, block tables, copy-on-write, the prefix cache
 *     [5]     The program        a model as a list of operations
 *     [6]     The operations     each as the plain loop that defines it
 *
 *     Part II, the foundations. This is where you look things up.
 *     [7]     Numbers            storage types, bit by bit
 *     [8]     Files              GGUF, safetensors and Hugging Face folders, AWQ and GPTQ
 *     [9]     Text               tokenizers, conversations
 *     [10]    Fast CPU           the executor, and the kernels for each instruction set
 *
 *     If you have an hour: [DATA], the chapter introductions of Part I, and llm_step in [1] with
 *     the functions that it calls. If you have a day: all of Part I, with a debugger
 *     (LLM_ISA_REFERENCE).
 *
 * Macros that you may define before the include:
 *     LLM_MALLOC, LLM_REALLOC, LLM_FREE  your allocator (define all three)
 *     LLM_WITH_CUDA                      you also link llm.cu; llm_backend_open then finds it
 *     LLM_NO_FAST_KERNELS                compile in seconds, for sanitizers or a debugger. A model
 *                                        then runs on the loops of chapter 6, on one thread, slowly
 *
 * Threads: a model is read-only after loading and may be shared by any number of threads.
 * Only one thread at a time may use an engine. Inside a step, the engine uses several threads.
 * The library keeps no global mutable state, never prints, and never exits.
 *
 * License: public domain or MIT, as you prefer; see the end of this file.
 */

/* =====================================================================================
 * [API] Everything you may call
 * ================================================================================== */
#ifndef LLM_H
#define LLM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LLM_VERSION "1.0.0" /* version of this header */
const char *llm_version(void); /* version of the linked implementation */

/* ---- Errors ----
 * A call that can fail takes `llm_error *err` (may be NULL) last and sets its status (LLM_OK on
 * success). The message says what was wrong, where (file, tensor, offset), and what to do. */
typedef enum llm_status {
    LLM_OK = 0,
    LLM_ERROR_ARGUMENT,    /* an argument is invalid */
    LLM_ERROR_FILE,        /* a file could not be opened, read, mapped or written */
    LLM_ERROR_FORMAT,      /* a file is damaged, or not in the format that it claims */
    LLM_ERROR_UNSUPPORTED, /* the input is valid, but this engine cannot run it */
    LLM_ERROR_MEMORY,      /* an allocation failed */
    LLM_ERROR_CAPACITY,    /* the request can never fit the context or the cache */
    LLM_ERROR_DEVICE       /* the device (GPU) failed */
} llm_status;

typedef struct llm_error {
    llm_status status;
    char message[512];  /* one line, no newline at the end */
    const char *option; /* field of llm_engine_options, llm_request or llm_sampling at fault
                         * ("cache_bytes"); NULL: none. Except for LLM_ERROR_MEMORY, the message
                         * begins with it, so a program can replace it with its own name */
} llm_error;

const char *llm_status_name(llm_status status); /* "ok", "argument", "file", ... */

/* Release memory returned by llm_tokenize_new and similar functions. NULL is fine. */
void llm_free(void *memory);

/* ---- Numbers: the storage types of weights and of the cache ----
 * The constants are GGUF's numbers. A "block" is a group of values that share one scale; a row of a
 * tensor is a whole number of blocks. */
typedef enum llm_type {
    LLM_F32 = 0,
    LLM_F16 = 1,
    LLM_Q4_0 = 2, /* 32 values: one f16 scale, 32 4-bit integers   = 18 bytes */
    LLM_Q4_1 = 3, /* the same and an f16 minimum                   = 20 bytes */
    LLM_Q5_0 = 6, /* as q4_0, with 5 bits                          = 22 bytes */
    LLM_Q5_1 = 7, /* as q4_1, with 5 bits                          = 24 bytes */
    LLM_Q8_0 = 8, /* 32 values: one f16 scale, 32 8-bit integers   = 34 bytes */
    LLM_Q4_K = 12, /* 256 values in 8 groups with a 6-bit scale and minimum each  = 144 bytes */
    LLM_Q5_K = 13, /* the same, with 5 bits                                       = 176 bytes */
    LLM_Q6_K = 14, /* 256 6-bit integers in 16 groups with an 8-bit scale each    = 210 bytes */
    LLM_BF16 = 30,
    LLM_Q4_Z = 0x1000 /* for AWQ and GPTQ, not in GGUF files or llm_type_at. 32 values: one f16
                       * scale, a zero point (0 to 16), 32 4-bit integers = 20 bytes */
} llm_type;

typedef struct llm_type_info {
    llm_type type;
    const char *name;  /* name on the command line: "f32", "q4_0", ... */
    int block_values;  /* values per block */
    int block_bytes;   /* bytes per block */
    int file_type;     /* GGUF's general.file_type for a file mostly of this type */
    /* Convert `count` values, a multiple of block_values, to f32. */
    void (*unpack)(const void *blocks, float *values, int64_t count);
} llm_type_info;

/* NULL if the type is unknown. */
const llm_type_info *llm_type_find(llm_type type);
const llm_type_info *llm_type_by_name(const char *name); /* name: "q4_k" or "Q4_K" */
/* All types by index; NULL past the end. */
const llm_type_info *llm_type_at(int index);

/* f32 is rounded to nearest, ties to even. */
uint16_t llm_f32_to_f16(float x);
float llm_f16_to_f32(uint16_t half);

/* ---- Files: GGUF, and Hugging Face folders ---- */
typedef struct llm_string { /* borrowed bytes, not zero-terminated */
    const char *data;
    size_t length;
} llm_string;

typedef enum llm_value_type { /* numbered as in GGUF */
    LLM_VALUE_U8 = 0, LLM_VALUE_I8, LLM_VALUE_U16, LLM_VALUE_I16, LLM_VALUE_U32,
    LLM_VALUE_I32, LLM_VALUE_F32, LLM_VALUE_BOOL, LLM_VALUE_STRING, LLM_VALUE_ARRAY,
    LLM_VALUE_U64, LLM_VALUE_I64, LLM_VALUE_F64
} llm_value_type;

typedef struct llm_value { /* one entry of a file's metadata */
    llm_string key;
    llm_value_type type;
    llm_value_type element_type; /* arrays: type of the elements (never an array) */
    uint64_t count;              /* number of elements; 1 if not an array */
    const uint8_t *data;         /* the value: little-endian, unaligned, bounds checked */
    size_t bytes;                /* size of data */
} llm_value;

typedef struct llm_tensor { /* one tensor of a file */
    llm_string name;   /* name in GGUF */
    llm_string source; /* name in the file; in a Hugging Face folder it differs from `name` */
    llm_type type;
    int n_dims;        /* 1 to 4 */
    uint64_t dims[4];  /* sizes; dims[0] is contiguous; unused dimensions are 1 */
    const void *data;  /* values in the mapping, bounds checked; NULL: see llm_tensor_rows */
    uint64_t bytes;    /* size of data, or of all rows as llm_tensor_rows returns them */
    const int32_t *columns; /* (dims[0]) input column for entry j of a row; NULL: column j */
    const struct llm__int4 *int4; /* internal: AWQ or GPTQ storage; NULL: stored as `data` */
} llm_tensor;

typedef struct llm_file llm_file;

/* Map a GGUF file (version 2 or 3) or a Hugging Face folder (config.json, safetensors,
 * tokenizer.json), whose settings become GGUF metadata and whose tensors get GGUF names. A
 * tokenizer.json alone gives metadata only. Of a model in several files (NAME-00001-of-00003.gguf),
 * pass any one; all are mapped. Every count, offset, size and type is checked here, so later reads
 * stay inside the file. */
llm_file *llm_file_open(const char *path, llm_error *err);
/* The same for a file in memory, which must stay unchanged until llm_file_close. `name` is for
 * errors. */
llm_file *llm_file_from_memory(const void *data, size_t size, const char *name, llm_error *err);
void llm_file_close(llm_file *file);

const char *llm_file_path(const llm_file *file);
uint64_t llm_file_size(const llm_file *file); /* size of all parts in bytes */
int64_t llm_file_n_parts(const llm_file *file); /* number of mapped files */
int llm_file_version(const llm_file *file); /* GGUF version; 0: folder or tokenizer.json */
int64_t llm_file_n_values(const llm_file *file);
const llm_value *llm_file_value(const llm_file *file, int64_t index);
const llm_value *llm_file_find(const llm_file *file, const char *key); /* NULL: absent */
int64_t llm_file_n_tensors(const llm_file *file);
const llm_tensor *llm_file_tensor(const llm_file *file, int64_t index);
const llm_tensor *llm_file_find_tensor(const llm_file *file, const char *name);

/* Copy rows first to first + n - 1 of a tensor (dims[0] values each) to out, in the tensor's type;
 * AWQ and GPTQ weights are converted to it (on all cores; fastest in multiples of 128 rows). False,
 * with the error set: these rows do not exist. */
bool llm_tensor_rows(const llm_tensor *tensor, uint64_t first, uint64_t n, void *out,
                     llm_error *err);

typedef struct llm_faults { /* non-finite values of a tensor: NaN or infinite */
    uint64_t count;
    uint64_t first; /* index of the first one: row x dims[0] + column */
    float value;    /* value of the first one */
} llm_faults;

/* Find the non-finite values among `count` values: all values of a block with a non-finite
 * scale. */
llm_faults llm_type_check(llm_type type, const void *blocks, uint64_t count);
/* The same for a whole tensor. False, with the error set: out of memory. */
bool llm_tensor_check(const llm_tensor *tensor, llm_faults *faults, llm_error *err);
/* Check all weights of a file (llm_file_open reads almost none). False, with the error set: a value
 * is not finite, as after a damaged download or a failed conversion. */
bool llm_file_check(const llm_file *file, llm_error *err);

/* Read a scalar, or element `index` of an array, as another type. False: value is NULL, index is
 * out of range, or the conversion would lose the value. */
bool llm_value_u64(const llm_value *value, uint64_t index, uint64_t *out);
bool llm_value_i64(const llm_value *value, uint64_t index, int64_t *out);
bool llm_value_f64(const llm_value *value, uint64_t index, double *out);
bool llm_value_bool(const llm_value *value, uint64_t index, bool *out);
/* Read the next string of a value. Set *cursor to 0 before the first call. False at the end. */
bool llm_value_string(const llm_value *value, size_t *cursor, llm_string *out);

/* ---- JSON ----
 * A strict parser (RFC 8259) for one JSON value of up to 128 MB: valid UTF-8, surrogates in pairs,
 * unique keys (programs disagree on which duplicate counts), at most 64 levels of nesting.
 *
 * The result is an array of nodes in the order of the text. An array's node is followed by its
 * elements, an object's by key, value, key, value ... Functions accept NULL as an absent node, so a
 * path needs no checks:
 *     llm_json_i64(llm_json_member(llm_json_member(json.nodes, "model"), "layers"), &n) */
typedef enum llm_json_kind {
    LLM_JSON_NULL, LLM_JSON_FALSE, LLM_JSON_TRUE, LLM_JSON_NUMBER, LLM_JSON_STRING, LLM_JSON_ARRAY,
    LLM_JSON_OBJECT
} llm_json_kind;

typedef struct llm_json_node {
    const char *text;    /* string (unescaped) or number (as written), not zero-terminated */
    uint32_t length;     /* bytes of text; arrays, objects: number of elements or members */
    unsigned kind : 3;   /* llm_json_kind */
    unsigned span : 29;  /* number of nodes of this value, including nested ones */
} llm_json_node;

typedef struct llm_json {
    char *text;           /* copy of the parsed text, with strings unescaped in place */
    llm_json_node *nodes; /* (n_nodes) nodes[0] is the whole value */
    int64_t n_nodes;
} llm_json;

/* Error messages begin with "NAME, line 2, column 7: " or, without a name (for one-line texts),
 * with "column 7: ". On failure there is nothing to free. */
bool llm_json_parse(llm_json *json, const char *text, size_t length, const char *name,
                    llm_error *err);
void llm_json_free(llm_json *json);
/* Offset of the value in the parsed text, in bytes. */
size_t llm_json_offset(const llm_json *json, const llm_json_node *node);
bool llm_json_has_kind(const llm_json_node *node, llm_json_kind kind);
/* Find the value of the member `key`, by linear search. NULL: not an object, or no such key. */
const llm_json_node *llm_json_member(const llm_json_node *object, const char *key);
/* The first element of an array (or value of an object), and the one after `value`. NULL: none. */
const llm_json_node *llm_json_first(const llm_json_node *container);
const llm_json_node *llm_json_next(const llm_json_node *container, const llm_json_node *value);
llm_string llm_json_key(const llm_json_node *value); /* key of the member with this value */
/* Read a value. False: it has another kind or, for i64 and u64, is not an integer in range (no
 * point, no exponent). An f64 is within one unit of the nearest double; false also if the number is
 * too large. */
bool llm_json_string(const llm_json_node *node, llm_string *out);
bool llm_json_is(const llm_json_node *node, const char *text); /* whether it is this string */
bool llm_json_bool(const llm_json_node *node, bool *out);
bool llm_json_f64(const llm_json_node *node, double *out);
bool llm_json_i64(const llm_json_node *node, int64_t *out);
bool llm_json_u64(const llm_json_node *node, uint64_t *out);

/* ---- Tokenizer ---- */
typedef struct llm_tokenizer llm_tokenizer;

/* Create a tokenizer from the vocabulary in a GGUF file, a tokenizer.json or a folder with one.
 * Close the file after freeing the tokenizer, which uses it. */
llm_tokenizer *llm_tokenizer_create(const llm_file *file, llm_error *err);
void llm_tokenizer_free(llm_tokenizer *tokenizer);

int32_t llm_tokenizer_size(const llm_tokenizer *t);
int32_t llm_tokenizer_bos(const llm_tokenizer *t); /* -1: none */
int32_t llm_tokenizer_eos(const llm_tokenizer *t); /* -1: none */
bool llm_tokenizer_adds_bos(const llm_tokenizer *t); /* whether its file asks for a leading BOS */
bool llm_tokenizer_adds_eos(const llm_tokenizer *t); /* whether its file asks for a trailing EOS */
bool llm_tokenizer_is_end(const llm_tokenizer *t, int32_t id); /* does it end an output? */
bool llm_tokenizer_is_special(const llm_tokenizer *t, int32_t id); /* is it a control token? */
llm_string llm_tokenizer_text(const llm_tokenizer *t, int32_t id); /* its text in the file */

enum {
    LLM_TOKENIZE_BOS = 1,    /* begin with BOS if the model's file asks for it */
    LLM_TOKENIZE_SPECIAL = 2, /* parse special tokens ("<|endoftext|>") in the text; not for text
                               * that you did not write */
    LLM_TOKENIZE_EOS = 4     /* end with EOS if the file asks for it; for complete texts only */
};

/* Convert text to ids. Invalid UTF-8 is converted byte by byte; llm_detokenize returns it unchanged
 * if the vocabulary has byte tokens. Returns the number of tokens, even if it exceeds `capacity`
 * (only `capacity` are written); -1 on error. */
int64_t llm_tokenize(const llm_tokenizer *t, const char *text, size_t length, unsigned flags,
                     int32_t *ids, int64_t capacity, llm_error *err);
/* The same, but *ids (n, but at least one) is allocated: release it with llm_free. Returns n; -1 on
 * error, with *ids NULL. */
int64_t llm_tokenize_new(const llm_tokenizer *t, const char *text, size_t length, unsigned flags,
                         int32_t **ids, llm_error *err);

/* Convert ids to text, without special tokens. Returns the number of bytes, even if it exceeds
 * `capacity`; -1 on error (an id out of range). */
int64_t llm_detokenize(const llm_tokenizer *t, const int32_t *ids, int64_t n, char *text,
                       size_t capacity, llm_error *err);
/* The same, but *text is allocated and zero-terminated: release it with llm_free. Returns its
 * length in bytes, without the zero; -1 on error, with *text NULL. */
int64_t llm_detokenize_new(const llm_tokenizer *t, const int32_t *ids, int64_t n, char **text,
                           llm_error *err);

/* Convert ids to text, one token per call. The output has only whole UTF-8 characters: the stream
 * (zero it first) holds back the bytes of an incomplete one. `text` must have room for
 * llm_stream_capacity(t) bytes. Returns the number of bytes written. An id of -1 flushes the
 * stream. */
typedef struct llm_stream {
    unsigned char held[4];
    int n_held;
    bool started;
} llm_stream;
size_t llm_stream_capacity(const llm_tokenizer *t);
size_t llm_stream_decode(const llm_tokenizer *t, llm_stream *stream, int32_t id, char *text);

/* ---- Conversations ---- */
typedef enum llm_role { LLM_ROLE_SYSTEM, LLM_ROLE_USER, LLM_ROLE_ASSISTANT } llm_role;

typedef struct llm_message {
    llm_role role;
    const char *text; /* not zero-terminated */
    size_t length;
} llm_message;

typedef struct llm_chat_options { /* start from llm_chat_defaults() */
    const char *template_name;   /* name from llm_chat_template_at; NULL: the model's own */
    const char *template_source; /* Jinja source to use instead; NULL: none */
    const char *tools_json;      /* JSON array of tools in OpenAI's form; NULL: none */
    const char *documents_json;  /* JSON array of documents; NULL: none */
    const char *variables_json;  /* JSON object of further variables; NULL: none */
    const char *date;  /* variable date_string, used by some templates; NULL: not defined */
    bool no_thinking;  /* variable enable_thinking is false */
} llm_chat_options;

llm_chat_options llm_chat_defaults(void);
/* Names of the built-in templates, for files without one, by index; NULL past the end. */
const char *llm_chat_template_at(int index);
/* Jinja source of the template that these options select (NULL: the one in the model's file);
 * empty: none. */
llm_string llm_chat_template_source(const llm_tokenizer *t, const llm_chat_options *options);

/* Convert a conversation, whose last message is the user's, to the tokens of a prompt: BOS if the
 * model wants it, the messages as the template writes them, and the beginning of the answer.
 * Special tokens come from the template alone: no message can forge them. Returns the number of
 * tokens, even if it exceeds `capacity`; -1 on error: there is no template, it refuses these
 * messages (many require user and assistant to alternate), or it uses an unsupported feature. */
int64_t llm_chat_tokenize(const llm_tokenizer *t, const llm_chat_options *options,
                          const llm_message *messages, int n, int32_t *ids, int64_t capacity,
                          llm_error *err);
/* The same, but *ids is allocated: see llm_tokenize_new. */
int64_t llm_chat_tokenize_new(const llm_tokenizer *t, const llm_chat_options *options,
                              const llm_message *messages, int n, int32_t **ids, llm_error *err);
/* The same for messages in OpenAI's form, as a JSON array of objects. */
int64_t llm_chat_tokenize_json(const llm_tokenizer *t, const llm_chat_options *options,
                               const char *messages, size_t length, int32_t **ids, llm_error *err);
/* The same as text, for inspection: exactly what the template writes. Returns the number of bytes,
 * even if it exceeds `capacity`. */
int64_t llm_chat_render(const llm_tokenizer *t, const llm_chat_options *options,
                        const llm_message *messages, int n, char *text, size_t capacity,
                        llm_error *err);
int64_t llm_chat_render_json(const llm_tokenizer *t, const llm_chat_options *options,
                             const char *messages, size_t length, char *text, size_t capacity,
                             llm_error *err);
/* Text at which to stop (for llm_request.stop) if the template does not end an answer with an end
 * token. Returns its length (0: none); text is zero-terminated if it fits. */
size_t llm_chat_stop(const llm_tokenizer *t, const llm_chat_options *options, char *text,
                     size_t capacity);

/* ---- Model ---- */
typedef enum llm_rope_pairing {
    LLM_ROPE_ADJACENT, /* dimension 2i is rotated with 2i+1 ("llama" in GGUF) */
    LLM_ROPE_HALVES    /* dimension i is rotated with i + rope_dim/2 (NeoX, Hugging Face) */
} llm_rope_pairing;

typedef enum llm_rope_scaling { /* how a model was extended to a longer context */
    LLM_ROPE_UNSCALED,
    LLM_ROPE_LINEAR,   /* all positions divided by the factor */
    LLM_ROPE_YARN      /* the same, for slow dimensions only (Peng et al. 2023, arXiv 2309.00071) */
} llm_rope_scaling;    /* Llama 3 instead stores a divisor per frequency (rope_freqs.weight) */

typedef enum llm_activation {
    LLM_SILU,
    LLM_GELU,    /* tanh approximation */
    LLM_GELU_ERF /* exact */
} llm_activation;

typedef struct llm_config { /* the shape of a model */
    char architecture[32];
    int vocab_size;
    int context_length; /* longest context that the model supports, in tokens */
    int n_layers;
    int dim;            /* width of the residual stream */
    int hidden_dim;     /* width inside the feed-forward block */
    int n_experts;      /* experts of a layer; 0: none */
    int n_experts_used; /* experts that the router chooses for each token */
    int expert_dim;     /* width inside an expert */
    int shared_dim;     /* width inside the shared expert, which every token uses; 0: none */
    bool norm_experts;  /* the factors of a token's experts are divided by their sum */
    int n_heads;        /* query heads */
    int n_kv_heads;     /* key/value heads; each serves n_heads / n_kv_heads query heads */
    int head_dim;
    int rope_dim;       /* dimensions of a head that RoPE rotates */
    float rope_base;
    llm_rope_pairing rope_pairing;
    llm_rope_scaling rope_scaling;
    float rope_factor;          /* divides the frequencies; 1: unscaled */
    int rope_original_context;  /* YaRN: context length before the extension */
    float rope_beta_fast, rope_beta_slow; /* YaRN: scaling is partial for frequencies with
                                           * rope_beta_slow to rope_beta_fast turns over that
                                           * context */
    float rope_magnitude;       /* YaRN: multiplies rotated queries and keys; otherwise 1 */
    float norm_epsilon;
    float local_rope_base;      /* RoPE base of layers with a window, whose frequencies are not
                                 * scaled; 0: as in the other layers */
    float embedding_scale;      /* multiplies the embeddings; usually 1 */
    float residual_scale;       /* multiplies what a block adds to the residual stream; usually 1 */
    float attention_scale;      /* multiplies attention scores; usually 1 / sqrt(head_dim) */
    float logit_scale;          /* divides the logits; usually 1 */
    float score_cap, logit_cap; /* limits of attention scores and logits: x becomes
                                 * cap tanh(x / cap); 0: no limit */
    llm_activation activation;  /* of the feed-forward block */
    float alibi;                /* ALiBi, which replaces RoPE: see llm__alibi_slope; 0: RoPE */
    bool parallel;              /* both blocks of a layer read the layer's input */
    int window;         /* positions that a windowed layer sees, the token's own included; 0: all */
    bool tied_output;   /* whether the output matrix is the token embedding */
} llm_config;

typedef struct llm_model llm_model;

/* Load a model (a GGUF file or a Hugging Face folder): map its weights without copying, and read
 * its shape and tokenizer. */
llm_model *llm_model_load(const char *path, llm_error *err);
llm_model *llm_model_from_memory(const void *data, size_t size, const char *name, llm_error *err);
void llm_model_free(llm_model *model); /* free it after the engines that use it */
const llm_config *llm_model_config(const llm_model *model);
const llm_tokenizer *llm_model_tokenizer(const llm_model *model);
const llm_file *llm_model_file(const llm_model *model);
/* Why context_length is less than in config.json, for messages; empty if it is the same. */
const char *llm_model_context_note(const llm_model *model);
/* Bytes of weights that a decode step of one sequence reads: all, except unused experts and all but
 * one row of an untied embedding. */
uint64_t llm_model_step_bytes(const llm_model *model);
/* 2 x n_layers x n_kv_heads x head_dim x bytes per value of the cache. */
uint64_t llm_model_cache_bytes_per_token(const llm_model *model, llm_type cache_type);

/* ---- Engine ---- */
typedef struct llm_engine llm_engine;
typedef struct llm_backend llm_backend;

typedef enum llm_isa { /* instruction sets, in ascending order */
    LLM_ISA_REFERENCE, /* the plain loops of chapter 6 on one thread: slow, for comparison */
    LLM_ISA_PLAIN,   /* C code compiled for the baseline processor */
    LLM_ISA_DOTPROD, /* arm64: NEON with dot products of int8 */
    LLM_ISA_AVX2,    /* AVX2 with FMA and F16C */
    LLM_ISA_AVX512,  /* AVX-512 F, BW, DQ, VL and VNNI */
    LLM_ISA_AMX,     /* the same, and matrix tiles of int8 and bf16 */
    LLM_ISA_BEST = LLM_ISA_AMX
} llm_isa;

typedef enum llm_preempt { /* what happens to the cache of a sequence that is preempted */
    LLM_PREEMPT_RECOMPUTE, /* the cache is dropped, and recomputed later */
    LLM_PREEMPT_SWAP       /* the cache is moved to host memory; recomputed if swap_bytes is full */
} llm_preempt;

typedef enum llm_state { /* state of a sequence (one sample of a request) */
    LLM_WAITING,   /* not admitted yet; further samples wait until the prompt has been computed */
    LLM_PREFILL,   /* the model processes known tokens: a prompt or, once preempted, all of them */
    LLM_DECODE,    /* all known tokens but the last are in the cache: each step generates more */
    LLM_PREEMPTED, /* its blocks were taken for an older sequence; it resumes when there is room */
    LLM_ENDED
} llm_state;

typedef enum llm_trace_kind {  /* kinds of llm_trace_event, and the fields that each uses */
    LLM_TRACE_STEP_BEGIN,      /* a call of llm_step begins */
    LLM_TRACE_STEP_END,        /* the call ends. count: 1 worked, 0 nothing to do, -1 failed */
    LLM_TRACE_STATE,           /* the sequence changes from state `from` to `state` (at submit,
                                * both LLM_WAITING). count: from LLM_WAITING or LLM_PREEMPTED,
                                * tokens already in the cache; at preemption, blocks saved in
                                * host memory; at the end, tokens generated, without an end
                                * token; else 0 */
    LLM_TRACE_SCHEDULE,        /* this step processes `count` tokens from position `first` on */
    LLM_TRACE_PROPOSE,         /* the step also verifies `count` proposals, from `first` on */
    LLM_TRACE_ACCEPT,          /* `count` of the proposals were accepted */
    /* Events about a block. count: block tables that contain it after the event. kept: the prefix
     * cache can find its content. */
    LLM_TRACE_TAKE,            /* a free block becomes entry `first` of the block table */
    LLM_TRACE_SHARE,           /* a block that holds the right tokens becomes entry `first` */
    LLM_TRACE_COPY,            /* entry `first`, shared, becomes `block`, a copy of `source` */
    LLM_TRACE_RELEASE,         /* the sequence gives up a block */
    LLM_TRACE_EVICT            /* the prefix cache drops a free block that is about to be taken */
} llm_trace_kind;

typedef struct llm_trace_event {
    llm_trace_kind kind;
    uint64_t step;         /* steps completed so far: llm_statistics.steps */
    uint64_t request;      /* 0: the event is not about a sequence */
    int sample;
    llm_state from, state; /* LLM_TRACE_STATE only */
    int first, count;      /* see llm_trace_kind */
    int32_t block, source; /* blocks of the pool; -1: none */
    bool kept;             /* see llm_trace_kind */
} llm_trace_event;

/* Called for each decision of the engine, inside llm_submit, llm_step and llm_cancel; must not call
 * the engine. After a failed step (count -1), only sequences with an LLM_TRACE_STATE,
 * LLM_TRACE_ACCEPT or llm_event have advanced. */
typedef void (*llm_trace)(void *user, const llm_trace_event *event);

typedef struct llm_engine_options { /* start from llm_engine_defaults() */
    const llm_model *draft; /* small model, same vocabulary; must outlive the engine; NULL: none */
    llm_backend *backend;  /* device; NULL: a CPU backend that the engine owns. Free your own
                            * backend after the engine */
    int n_threads;         /* threads of the engine's own CPU backend; 0: one per processor */
    llm_isa max_isa;       /* best instruction set for this backend; default LLM_ISA_BEST */
    bool pack_weights;     /* for this backend: see llm_cpu_pack_weights; default true */
    int context_length;    /* longest sequence in tokens; 0: the model's context_length */
    int block_size;        /* tokens in a block of the cache; default 16 */
    llm_type cache_type;   /* LLM_F16 (default) or LLM_F32 */
    uint64_t cache_bytes;  /* size of the pool. 0 on the CPU: max_sequences whole contexts, at
                            * most 1 GiB (but at least one context). 0 on a device with its own
                            * memory: memory_share of what is free, at most a million blocks or
                            * max_sequences whole contexts, whichever is more. A draft's cache
                            * has as many blocks, which memory_share includes and cache_bytes
                            * does not. */
    float memory_share;    /* the cache's share of memory left on the device; default 0.9 */
    int max_sequences;     /* most sequences that run at the same time; default 16 */
    int max_batch_tokens;  /* most tokens in a step; longer prompts take several; default 512 */
    int max_speculation;   /* most proposals per sequence and step; default 8 */
    llm_preempt preempt;   /* default LLM_PREEMPT_RECOMPUTE */
    uint64_t swap_bytes;   /* host memory for LLM_PREEMPT_SWAP; default 256 MiB */
    bool prefix_cache;     /* share blocks among texts with the same beginning; default true.
                            * With a draft, only requests that speculate with it share blocks,
                            * since it must have processed them, too. */
    bool chunked_prefill;  /* split long prompts over steps; default true. false: a prompt is
                            * computed whole, before anything else, and must fit with its output
                            * into max_batch_tokens */
    bool naive_attention;  /* use the plain loop, with all scores in memory, for comparison */
    unsigned fusions;      /* allowed fusions: LLM_FUSE_...; default LLM_FUSE_ALL */
    bool host_sampling;    /* draw tokens on the CPU even if the device can: slower, same tokens */
    llm_trace trace;       /* function to call for each decision; NULL (default): none */
    void *trace_user;      /* first argument of trace */
} llm_engine_options;

llm_engine_options llm_engine_defaults(void);

/* Open a device by name, for llm_engine_options.backend:
 *     "cpu"       the CPU, with n_threads, max_isa and pack_weights of `options` (NULL: defaults)
 *     "cuda"      an NVIDIA GPU, with `gpu` (NULL: llm_gpu_defaults). Needs llm.cu, and
 *                 LLM_WITH_CUDA defined where LLM_IMPLEMENTATION is
 *     "emulated"  the same kernels, run slowly by the CPU (LLM_WITH_EMULATED)
 *     "auto"      "cuda", or "cpu" if there is no GPU or this program does not include "cuda". If
 *                 there is a GPU that cannot be used, the CPU is opened too, and err->message says
 *                 why (err->status is LLM_OK)
 * NULL, with the error set: the device cannot be opened or is not in this program (the message
 * lists those that are). Release the backend with llm_backend_free, after the engine. */
struct llm_gpu_options;
llm_backend *llm_backend_open(const char *name, const llm_engine_options *options,
                              const struct llm_gpu_options *gpu, llm_error *err);

typedef struct llm_sampling { /* start from llm_sampling_defaults(): greedy */
    float temperature;        /* 0: greedy (the most likely token); at most 1e6 */
    int top_k;                /* keep the k most likely tokens; 0: all */
    float top_p;              /* then keep the fewest tokens that add up to p; 1: all */
    float min_p;              /* then keep tokens of at least min_p x the top probability; 0: all */
    float repetition_penalty; /* positive logits of recent tokens are divided by it, negative ones
                               * multiplied; 1: none; at most 1e6 */
    int penalty_window;       /* number of latest tokens penalized, prompt included; 0: all;
                               * default 64 */
    float presence_penalty;   /* subtracted from the logit of each token generated so far */
    float frequency_penalty;  /* the same, times its occurrences */
    const struct llm_logit_bias *bias; /* (n_bias) changes of logits; copied by llm_submit */
    int n_bias;
    uint64_t seed;            /* seed of this request's random stream */
} llm_sampling;

typedef struct llm_logit_bias {
    int32_t token;
    float bias;               /* added to the token's logit, before the penalties */
} llm_logit_bias;

llm_sampling llm_sampling_defaults(void);

/* Called with the logits (vocab_size) after the token at `position`, before a token is drawn from
 * them. The hook may change them (to force a grammar, for example), but must not call the engine.
 * It runs for every position of the prompt, in order, as sample 0; for the last one, once per
 * sample. */
typedef void (*llm_logits_hook)(void *user, uint64_t request, int sample, int position,
                                float *logits);

enum { LLM_SPECULATE_AUTO = -1, LLM_MOST_BRANCHES = 8 };

typedef struct llm_request { /* start from llm_request_defaults() */
    const int32_t *prompt;  /* (n_prompt) token ids; copied by llm_submit */
    int n_prompt;           /* prompt tokens; at least 1 */
    int max_tokens;         /* most tokens to generate; 0: none (only the logits hook runs); -1
                             * (default): as many as the context allows */
    int n_samples;          /* independent continuations, which share the prompt; default 1 */
    llm_sampling sampling;  /* sample s uses the random stream (seed, s) */
    bool embedding;         /* generate nothing (max_tokens is ignored): the last event has hidden
                             * states of the prompt. Not with n_samples > 1, a hook or
                             * speculation */
    bool ignore_end;        /* do not stop at an end token (benchmarks) */
    const char *const *stop; /* (n_stop) the output ends before the first of these texts; copied */
    int n_stop;
    int top_logprobs;       /* each event lists this many of the most likely tokens; 0 (default) to
                             * 256 */
    int priority;           /* queued 64 x priority places earlier; default 0 */
    int speculate;          /* proposals per step. 0: none; 1 to max_speculation: that many, but
                             * at most max_batch_tokens - 1; LLM_SPECULATE_AUTO: as many as pay
                             * off. Needs a draft or lookup. Greedy output, and sampled output
                             * with lookup, is the same as without speculation; with a draft,
                             * sampled output has the same distribution. */
    int branches;           /* most proposals for the same position, which form a tree; 1: a chain.
                             * At most LLM_MOST_BRANCHES. 0 (default): 1, or with AUTO as many as
                             * pay off */
    bool lookup;            /* without a draft: propose the tokens that followed an earlier
                             * occurrence of the latest ones */
    llm_logits_hook logits_hook; /* NULL: none */
    void *user;             /* argument of the hook, and llm_event.user */
} llm_request;

llm_request llm_request_defaults(void);

typedef enum llm_finish {
    LLM_FINISH_NONE = 0,  /* still running */
    LLM_FINISH_END,       /* the model generated an end token */
    LLM_FINISH_LENGTH,    /* max_tokens or the end of the context was reached */
    LLM_FINISH_STOP,      /* the output reached one of the request's stop texts */
    LLM_FINISH_CANCELLED,
    LLM_FINISH_ERROR      /* logits or hidden states were not finite: see llm_event.error */
} llm_finish;

const char *llm_finish_name(llm_finish finish); /* "none", "end", "length", ... */

typedef struct llm_token_logprob {
    int32_t token;
    float logprob;         /* ln p(token), as in llm_event */
} llm_token_logprob;

typedef struct llm_event { /* a token, or the end, of one sample of a request */
    uint64_t request;
    int sample;           /* 0 to n_samples - 1 */
    void *user;
    int32_t token;        /* generated token; -1: none (the event only ends the sample) */
    int index;            /* tokens generated before this one; without a token: their total */
    float logprob;        /* ln p(token) before penalties, temperature and filters */
    const llm_token_logprob *top; /* (n_top) the likeliest tokens for this position, in order: see
                                   * llm_request.top_logprobs; valid as long as text */
    int n_top;
    bool accepted;        /* whether the token is an accepted proposal */
    const char *text;     /* new text: whole UTF-8 characters, without a possible beginning of a
                           * stop text; may be empty. Not zero-terminated; valid until the next
                           * llm_step or llm_engine_free */
    size_t text_length;
    llm_finish finish;    /* not LLM_FINISH_NONE: this is the sample's last event */
    const char *error;    /* what is wrong, and where; valid as long as text; NULL: no error */
    const float *last_hidden; /* (dim) for llm_request.embedding: the prompt's last hidden state,
                               * after the final norm; valid as long as text; otherwise NULL */
    const float *mean_hidden; /* (dim) the same, averaged over all tokens of the prompt */
} llm_event;

/* options NULL: the defaults. The model must outlive the engine; several engines may share it. */
llm_engine *llm_engine_create(const llm_model *model, const llm_engine_options *options,
                              llm_error *err);
void llm_engine_free(llm_engine *engine);

/* Queue a request. *id identifies it in events and for llm_cancel (id may be NULL). A request that
 * can never fit (too long for the context or the pool) is refused. */
bool llm_submit(llm_engine *engine, const llm_request *request, uint64_t *id, llm_error *err);
/* The same for a text, with BOS if the model's file asks for it; special tokens are not parsed.
 * `request` may be NULL (defaults); its prompt is ignored. */
bool llm_submit_text(llm_engine *engine, const char *text, const llm_request *request, uint64_t *id,
                     llm_error *err);
/* Run one step. Returns 1: worked, call again; 0: nothing left to do; -1: error. Read all events,
 * including those of llm_cancel, before the next call: it discards them. An error loses no work:
 * the next call repeats what failed (though a lost GPU fails every time). */
int llm_step(llm_engine *engine, llm_error *err);
/* Get the oldest unread event. False: none. */
bool llm_next_event(llm_engine *engine, llm_event *event);
/* End a request now. Each unfinished sample gets an event LLM_FINISH_CANCELLED. */
bool llm_cancel(llm_engine *engine, uint64_t id, llm_error *err);

/* Save an unfinished request as a session of *size bytes, with the full blocks of its cache (with a
 * draft in the engine, only if the request speculates). NULL on failure. The request continues,
 * unless you cancel it. Read its events first: they are not saved. */
void *llm_session_save(llm_engine *engine, uint64_t id, size_t *size, llm_error *err);
void llm_session_free(void *session); /* NULL is fine */
/* Submit a saved request, under a new id, to this engine or one with the same models, cache_type,
 * block_size and kind of device. It continues with the same tokens and logits. `user` and the hook
 * come from `callbacks` (NULL: none). The session is copied and not trusted: a damaged one is
 * refused, and a forged one affects no other request. */
bool llm_session_restore(llm_engine *engine, const void *session, size_t size,
                         const llm_request *callbacks, uint64_t *id, llm_error *err);

typedef struct llm_statistics {    /* totals since engine creation; `now`: the current value */
    uint64_t steps;                /* completed steps */
    uint64_t prompt_tokens;        /* prompt tokens processed, recomputed ones included */
    uint64_t generated_tokens;
    uint64_t requests_submitted, requests_finished;
    int running;                   /* running sequences, now */
    int waiting;                   /* waiting requests, now */
    double step_seconds;           /* total time in llm_step */
    double forward_seconds;        /* part of step_seconds: forward passes */
    double draft_seconds;          /* part of step_seconds: the draft's proposals */
    double sampling_seconds;       /* part of step_seconds: choosing and committing tokens */
    double schedule_seconds;       /* part of step_seconds: scheduling */
    double wait_seconds;           /* part of step_seconds: waiting for a GPU */
    uint64_t device_launches;      /* kernels launched one by one */
    uint64_t device_replays;       /* graphs replayed: see llm.cu, chapter [10] */
    uint64_t device_bytes;         /* size of the device's own memory; 0: it has none */
    uint64_t device_free_bytes;    /* free part of device_bytes, now */
    uint64_t preemptions;
    uint64_t blocks_swapped;       /* blocks copied to host memory, plus blocks copied back */
    uint64_t prefix_tokens;        /* prompt tokens of admitted requests without a hook */
    uint64_t prefix_hits;          /* those of prefix_tokens found in the prefix cache */
    int64_t blocks_shared;         /* blocks in more than one block table, now */
    uint64_t sequence_steps;       /* sequences in each step, summed over the steps */
    double kv_waste;               /* share of empty slots in the blocks in use, now */
    uint64_t decode_steps;         /* sequences that got tokens, summed over the steps */
    uint64_t proposed, accepted;   /* proposals verified, and proposals accepted */
    uint64_t proposed_at[16], accepted_at[16]; /* by index among the proposals; [15]: 15 and up */
    int64_t blocks_total;          /* blocks in the pool */
    int64_t blocks_free;           /* free blocks, now */
    int64_t blocks_peak;           /* most blocks in use at once */
    int block_size;                /* slots in a block */
    int64_t slots_used;            /* slots that hold a token, each shared slot counted once, now */
    uint64_t weight_bytes;         /* size of all tensors in the model files */
    uint64_t cache_bytes;          /* size of the caches, the draft's included */
    uint64_t arena_bytes;          /* size of the activations, logits and tables of a step */
} llm_statistics;

llm_statistics llm_engine_statistics(const llm_engine *engine);
/* The program that each step runs, or the draft's (NULL: no draft). The caller may set its
 * `seconds`. */
struct llm_program *llm_engine_program(llm_engine *engine, bool draft);
const llm_model *llm_engine_model(const llm_engine *engine);
/* The options in effect, including the values that the engine chose. */
const llm_engine_options *llm_engine_settings(const llm_engine *engine);

/* ---- Small tools for embedders ---- */
double llm_seconds(void); /* time on a monotonic clock */
/* ln of the softmax probability of `id` under `logits` (n). */
float llm_logprob(const float *logits, int n, int32_t id);
/* Random number `index` of stream `stream` of `seed`, uniform in [0, 1): the same on every
 * platform. */
double llm_random(uint64_t seed, uint64_t stream, uint64_t index);

/* =====================================================================================
 * [SEAM] A model is a program; what a device implements
 *
 * An engine compiles its model once into a program: a flat list of operations on named buffers. A
 * step runs the program over a batch. A device (struct llm_backend) keeps memory and weights,
 * prepares a program, and runs it.
 *
 * Pointers marked "device" point to memory that the backend allocated: on the CPU, ordinary memory.
 * All activations are f32. Below, T = tokens in the batch, R = rows whose logits are wanted; a
 * matrix (rows, cols) is stored row by row.
 * ================================================================================== */

typedef struct llm_weight { /* a matrix in a backend's memory */
    llm_type type;
    int64_t rows, cols;     /* rows: output width; cols: input width */
    const void *data;       /* device: the values; on the CPU, the mapped file itself */
    void *packed;           /* the backend's copy in the layout of its kernels; NULL: none */
    const int32_t *columns; /* device (cols): order of the input's columns; NULL: unchanged */
    bool only_rows;         /* used by embed only, not by matmul */
} llm_weight;

/* The ragged batch: all tokens of one step, of any number of sequences. A decode step has one token
 * per sequence, a prefill chunk many; the program does not distinguish them. The arrays are host
 * memory, filled by the engine. Sequence s owns the tokens seq_first[s] to seq_first[s] +
 * seq_count[s] - 1, at consecutive positions. The key of its position p is in block block_tables[s
 * * table_stride + p / block_size], at slot p % block_size. No sequence reads what another one
 * writes in the same step.
 *
 * The tokens of a sequence may also form a tree: several proposals for the same position. Each
 * follows its parent and sees its ancestors and all positions cached before the step, but no other
 * branch. All tokens still have separate slots, in the order of the batch. */
typedef struct llm_batch {
    int n_tokens;
    int n_sequences;
    const int32_t *tokens;       /* (T) token ids */
    const int32_t *positions;    /* (T) position of each token in its sequence */
    const int32_t *slots;        /* (T) slot of each token: block * block_size + offset in block */
    const int32_t *parents;      /* (T) in a tree, each token's parent: an earlier token of the
                                  * batch, at the position before; -1: the tree's first token, or no
                                  * tree. NULL: the batch has no tree */
    const int32_t *seq_first;    /* (n_sequences) index of each sequence's first token */
    const int32_t *seq_count;    /* (n_sequences) number of tokens of each sequence */
    const int32_t *block_tables; /* (n_sequences, table_stride) blocks of each sequence */
    int table_stride;
    int block_size;
    int n_logits;
    const int32_t *logit_rows;   /* (n_logits) tokens whose logits are wanted, ascending */
} llm_batch;

/* The cache of one model. Keys and values are (layer, block, kv head, slot, head_dim); transposed
 * keys are (layer, block, kv head, head_dim, slot). */
typedef struct llm_cache {
    llm_type type;         /* LLM_F16 or LLM_F32 */
    int n_layers, n_kv_heads, head_dim, block_size;
    int64_t n_blocks;
    size_t layer_bytes;    /* size of the keys (or the values) of one layer */
    void *keys, *values;   /* device */
    bool keys_transposed;
} llm_cache;

typedef struct llm_attention_shape {
    int n_heads, n_kv_heads, head_dim;
    float scale;           /* multiplies q.k: usually 1/sqrt(head_dim) */
    bool naive;            /* use the plain loop, for comparison */
    int window;            /* a token sees the last `window` positions, its own included; 0: all */
    float cap;             /* a score x becomes cap tanh(x / cap); 0: no limit */
    float alibi;           /* ALiBi reduces scores by distance: see llm__alibi_slope; 0: off */
} llm_attention_shape;

/* ---- The program ---- */

typedef enum llm_op_kind {
    LLM_OP_EMBED,          /* out (T, cols) = scale x the row of `weight` for each token's id */
    LLM_OP_ROPE_ANGLES,    /* out (T, rope_dim/2, 2) = scale x (cos, sin) of position x frequency;
                            * `weight` (rope_dim/2) holds the frequencies */
    LLM_OP_RMSNORM,        /* out = in[0] / sqrt(mean(in[0]^2) + epsilon) x `weight` (+ out), per
                            * row */
    LLM_OP_LAYERNORM,      /* the same for in[0] minus its mean, + bias */
    LLM_OP_MATMUL,         /* out (n, rows) = in[0] (n, cols) x transposed weight + bias (+ out) */
    LLM_OP_ROPE_STORE,     /* in: angles, q, k, v, cache. Per head: normalise q and k (q_norm,
                            * k_norm), rotate them, in place; store k and v in the cache */
    LLM_OP_ATTENTION,      /* in: q, cache. out (T, n_heads, head_dim): each token's query attends
                            * to the cached positions of its sequence up to its own */
    LLM_OP_SWIGLU,         /* out = f(in[0]) x in[1] (-1: f(in[0])), elementwise; f:
                            * `activation` */
    LLM_OP_SOFTCAP,        /* out = scale x tanh(in[0] / scale), elementwise */
    LLM_OP_GATHER_ROWS,    /* out (R, cols) = the rows of in[0] whose logits are wanted */
    LLM_OP_GATHER_COLUMNS, /* out[.][j] = in[0][.][weight->columns[j]] */
    LLM_OP_ROUTE,          /* out (T, k) llm_route: for each token the k experts with the largest
                            * in[0] (T, n_experts), largest first; of equals, the lower index first.
                            * Their factors: softmax of in[0] */
    LLM_OP_GROUP_ROUTES,   /* out: sort the routes in[0] (T, k) by expert: see llm_op.n_used */
    LLM_OP_GATHER_ROUTES,  /* out (T k, cols) = for each sorted route, its token's row of in[0];
                            * in[1]: the sorted routes */
    LLM_OP_EXPERTS,        /* out (T k, rows) = each row of in[0] (T k, cols) x the transposed
                            * matrix of its expert; in[1]: the sorted routes */
    LLM_OP_SUM_ROUTES,     /* out (T, cols) += the sum, over a token's routes, of factor x row of
                            * in[0]. in[1], in[2]: routes, sorted routes. in[3] (T, cols), if any,
                            * is added too, multiplied by sigmoid(in[4] (T, 1)) */
    LLM_N_OP_KINDS
} llm_op_kind;

const char *llm_op_name(llm_op_kind kind); /* "embed", "rmsnorm", ... */

enum { LLM_OP_INPUTS = 5 };

typedef struct llm_route { /* one of a token's experts */
    int32_t expert;
    float factor;              /* weight of its result in the sum */
} llm_route;

typedef struct llm_op { /* one operation; norms and swiglu may work in place: out = in[0] */
    llm_op_kind kind;
    int layer;                 /* layer of the model; -1: none */
    int in[LLM_OP_INPUTS];     /* indexes of the buffers that it reads; -1: unused */
    int out;                   /* buffer that it writes; -1: writes some of in[] (rope_store) */
    bool add;                  /* matmul and rmsnorm: add to `out`, which is then also read */
    const llm_weight *weight;  /* matrix, or vector (a matrix of one row, f32); NULL: none */
    const llm_weight *bias;    /* vector added to each output row; NULL: none */
    const llm_weight *q_norm, *k_norm; /* rope_store: (head_dim); NULL: none */
    const char *name;          /* name of the weight, for display: "attn_q"; "": none */
    llm_attention_shape attention; /* parameters of rope_store and attention */
    llm_rope_pairing pairing;  /* rope_store: which dimensions are rotated together */
    int rope_dim;              /* rope_angles and rope_store: rotated dimensions of a head */
    float scale;               /* rope_angles: multiplies cos and sin (1 without YaRN); embed,
                                * softcap: see llm_op_kind */
    llm_activation activation; /* swiglu: its function */
    float epsilon;             /* norms and rope_store: term added to the mean square */
    int n_experts;             /* number of experts; `weight` is then an array of as many
                                * matrices, of one type and shape; 0: no experts */
    int n_used;                /* k, the routes of a token. Sorted routes are (3, T k) int32: expert
                                * and token of each sorted route; place in that order of each of
                                * the (T, k) routes */
    bool normalize;            /* route: divide a token's factors by their sum */
} llm_op;

typedef struct llm_buffer {
    const char *name;          /* name for display: "x", "q", ... */
    int64_t width;             /* values per row; 0: the cache, which has no `data` */
    bool head;                 /* one row per row of logits; otherwise one row per token */
    float *data;               /* device (rows, width) */
} llm_buffer;

typedef enum llm_part {        /* part of a program */
    LLM_BODY = 1,              /* all layers: fills the cache and the residual stream */
    LLM_HEAD = 2,              /* logits for a slice of the wanted rows */
    LLM_WHOLE = LLM_BODY | LLM_HEAD
} llm_part;

enum { /* fusions that prepare may use; they change no bit of the results */
    LLM_FUSE_GATE = 1,         /* gate, up and their activation run as one operation */
    LLM_FUSE_ROPE = 2,         /* rope_store and attention run as one operation, head by head */
    LLM_FUSE_OWN_COPIES = 4,   /* few rows: each thread normalises and rounds its own copy (CPU),
                                * or the kernel of the matmul before does both (GPU) */
    LLM_FUSE_SIDE_BY_SIDE = 8, /* independent operations run at the same time */
    LLM_FUSE_ALL = 15
};

typedef struct llm_program {
    llm_op *ops;               /* (n_ops) operations, those of the body first */
    int n_ops, n_body;
    llm_buffer *buffers;       /* (n_buffers) */
    int n_buffers;
    const llm_cache *cache;    /* the cache that the buffer "cache" refers to */
    unsigned fusions;          /* fusions that prepare may use: LLM_FUSE_... */
    double *seconds;           /* (n_ops) total seconds per operation, added by run (fused ones
                                * under one of them); NULL: no profile */
    void *plan;                /* made by prepare for the backend; initially NULL */
} llm_program;

typedef struct llm_limits {    /* size of the largest step */
    int max_tokens;            /* most tokens in a batch */
    int max_sequences;
    int max_context;           /* most positions of one sequence */
    int max_logits;            /* most rows of logits computed at a time */
} llm_limits;

typedef struct llm_cost {      /* bytes and arithmetic of one operation */
    double weight_bytes;       /* bytes of weights read, each once */
    double activation_bytes;   /* bytes of buffers read and written */
    double cache_bytes;        /* bytes of keys and values read and written */
    double operations;         /* arithmetic operations; a multiply-add counts as two */
} llm_cost;

/* The cost of an operation over a batch, of which only n_tokens, n_sequences, seq_first, seq_count,
 * positions and n_logits are read. */
llm_cost llm_op_cost(const llm_program *program, const llm_op *op, const llm_batch *batch);

typedef struct llm_stage {     /* one unit of an executor's work */
    int first, last;           /* indexes of its first and last operation in ops */
    bool rounds;               /* it only rounds the input of `last` */
    bool barrier;              /* all threads wait for each other before it */
    bool each;                 /* every thread does all of it, in its own memory */
} llm_stage;

/* A device may process llm_rounded_rows(n) rows instead of n, so that steps of similar size have
 * the same shape. Buffers have room for the extra rows, whose values are undefined. */
int llm_rounded_rows(int n);

typedef struct llm_device_state { /* counters of a device */
    const char *name;
    uint64_t total_bytes, free_bytes; /* size of its own memory, and free part; 0: it has none */
    double wait_seconds;   /* total time that the CPU waited for it */
    uint64_t launches, replays;
    int proved;            /* families of kernels whose results were checked when the device was
                            * opened; 0: none */
    double proof_seconds;  /* time that the check took */
    const char *distrusted; /* families with wrong results, and by how much they were wrong:
                             * other kernels replace them; NULL: none */
} llm_device_state;

typedef struct llm_adjustment { /* how a logit x changes before a draw: see llm__adjusted */
    int32_t token;
    float bias;            /* first x += bias */
    float penalty;         /* then x /= penalty if x > 0, else x *= penalty; 1: none */
    float minus;           /* then x -= minus */
} llm_adjustment;

typedef struct llm_draw {  /* one token to draw */
    int row;               /* row of the logits; ascending from draw to draw */
    llm_sampling sampling; /* only temperature and filters are used */
    uint64_t random;       /* random number in [0, 1), times 2^64 */
    const llm_adjustment *adjustments; /* (n_adjustments) host: no token occurs twice */
    int n_adjustments, n_top;
    llm_token_logprob *top; /* (n_top) host, result: the likeliest tokens before adjustments, as in
                             * llm_event.top */
} llm_draw;

/* The token of a draw from its row of logits (n): what llm_backend.sample must return. -1: out of
 * memory. */
int32_t llm_draw_token(const llm_draw *draw, const float *logits, int n);

struct llm_backend {
    const char *name;      /* "cpu", "cuda", ... */
    void *context;         /* the backend's data; first argument of every function */
    bool keys_transposed;  /* whether it wants transposed keys: see llm_cache */

    /* -- memory -- */
    /* Allocate device memory, not cleared. `what` names it in errors. NULL on failure. */
    void *(*allocate)(void *context, size_t bytes, const char *what, llm_error *err);
    /* Release device memory (NULL is fine). Do not call it during a step, which may still use the
     * memory. */
    void (*release)(void *context, void *device);
    bool (*upload)(void *context, void *device, const void *host, size_t bytes, llm_error *err);
    bool (*download)(void *context, void *host, const void *device, size_t bytes, llm_error *err);
    /* Make a matrix of the file ready for matmul and embed: w's type, rows and cols are given; set
     * w->data. `host` stays mapped as long as the weight exists, so the CPU just points to it. (If
     * w->packed is set, or w->data to a copy, the engine may free `host`.) */
    bool (*load_weight)(void *context, llm_weight *w, const void *host, llm_error *err);
    void (*free_weight)(void *context, llm_weight *w);

    /* -- programs -- */
    /* Choose kernels, fuse operations and allocate scratch memory, so that a step allocates
     * nothing. Weights and buffers do not move; the cache may be allocated later. After an error,
     * programs prepared earlier can still run. */
    bool (*prepare)(void *context, llm_program *program, const llm_limits *limits, llm_error *err);
    /* Release what prepare made. */
    void (*forget)(void *context, llm_program *program);
    /* Run a part of the program over a batch. The head computes the logits of entries first to
     * first + n - 1 of logit_rows, for the batch whose body ran last. On the CPU, the work is done
     * on return. On a GPU, it is on the stream; the next download or sync reports failures. */
    bool (*run)(void *context, const llm_program *program, llm_part part, const llm_batch *batch,
                int first, int n, llm_error *err);
    /* Describe stage `index` of such a run. False: no more stages. NULL if the backend does not
     * describe its plan. */
    bool (*stage)(void *context, const llm_program *program, llm_part part, const llm_batch *batch,
                  int n, int index, llm_stage *stage);
    /* Wait until all work is done. False: something failed since the last sync. */
    bool (*sync)(void *context, llm_error *err);
    /* Copy block from[i] to block to[i], in order: keys and values of every layer. The arrays (n)
     * are host memory. After a failed sync, the engine requests the same copies again. */
    void (*copy_blocks)(void *context, const llm_cache *cache, const int32_t *from,
                        const int32_t *to, int n);
    /* Copy slot from[i] (block * block_size + offset) to slot to[i], in order, in the same way. */
    void (*copy_slots)(void *context, const llm_cache *cache, const int32_t *from,
                       const int32_t *to, int n);

    /* -- optional: may be NULL -- */
    /* Draw n tokens from logits (max(row) + 1, vocab_size), exactly as chapter [3] does, and wait
     * for them. ids and logprobs (n) are host memory. */
    bool (*sample)(void *context, float *logits, int vocab_size, const llm_draw *draws, int n,
                   int32_t *ids, float *logprobs, llm_error *err);
    void (*state)(void *context, llm_device_state *state);
    double balance;        /* about how many operations it does in the time in which it reads a byte
                            * of weights: decides how many proposals pay off. 0: 40 */

    void (*destroy)(llm_backend *backend);
};

/* A CPU backend. n_threads 0: one per processor. It uses the processor's best instruction set up to
 * max_isa. */
llm_backend *llm_cpu_backend(int n_threads, llm_isa max_isa, llm_error *err);
llm_isa llm_cpu_isa(const llm_backend *backend);
/* Set whether weights loaded from now on are also kept in the layout of the kernels (default true).
 * Prompts and batches are then several times as fast, with the same results. Quantized weights are
 * copied, but the file's pages are returned to the system. */
void llm_cpu_pack_weights(llm_backend *backend, bool pack);
const char *llm_isa_name(llm_isa isa);
int llm_cpu_threads(const llm_backend *backend);
int llm_processor_count(void);
void llm_backend_free(llm_backend *backend); /* NULL is fine */

typedef struct llm_gpu_options { /* start from llm_gpu_defaults() */
    int device;           /* index of the GPU, from 0 */
    bool graphs;          /* record a decode step's launches once, then replay them; default true */
    bool fused;           /* do several operations in one kernel where possible; default true */
    bool split_attention; /* spread a long sequence over several thread blocks; default true */
    bool overlap;         /* let a kernel fetch its weights before the previous one ends (Hopper and
                           * newer); default false */
    bool plain;           /* use the plain, slow kernels, for comparison; default false */
    bool deterministic;   /* use only kernels whose logits do not depend, bit for bit, on the rest
                           * of the batch; prompts on Hopper are then slower (no wgmma); default
                           * false */
    bool trust;           /* do not check the fast kernels' results when a process first opens the
                           * device; default false */
} llm_gpu_options;

llm_gpu_options llm_gpu_defaults(void);
/* A backend for an NVIDIA GPU (link llm.cu). options NULL: the defaults. LLM_ERROR_UNSUPPORTED: no
 * suitable GPU. */
llm_backend *llm_cuda_backend(const llm_gpu_options *options, llm_error *err);
/* The same kernels, run slowly by the CPU: llm.cu compiled as C++ with LLM_EMULATED defined. */
llm_backend *llm_emulated_backend(const llm_gpu_options *options, llm_error *err);

#ifdef __cplusplus
}
#endif
#endif /* LLM_H */

/* =====================================================================================
 * Implementation. Chapter 10 includes this file again, once per instruction set, to compile its
 * kernels, with LLM__KERNEL_PASS defined.
 * ================================================================================== */
#if defined(LLM_IMPLEMENTATION) && !defined(LLM__KERNEL_PASS)
#ifndef LLM__IMPLEMENTED
#define LLM__IMPLEMENTED

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef LLM_NO_FAST_KERNELS
/* At -O1, GCC compiles in half the time. (-O0, for a debugger, is kept.) */
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif
#elif defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#if defined(__cplusplus) && !defined(__clang__) /* GCC 12 warns about its own vector intrinsics */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#define LLM__X86 1
#elif defined(__aarch64__)
#include <arm_neon.h>
/* GCC enables these instructions by pragma (chapter 10); older clangs need a compiler flag. */
#if defined(__ARM_FEATURE_DOTPROD) || (defined(__linux__) && !defined(__clang__))
#define LLM__DOTPROD 1
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif
#endif

/* With -std=c11, system headers declare only ISO C. madvise gives back pages of copied weights; the
 * monotonic clock never runs backwards. */
#ifdef __linux__
#ifndef MADV_HUGEPAGE
#define MADV_DONTNEED 4
#define MADV_HUGEPAGE 14
int madvise(void *memory, size_t bytes, int advice);
#endif
#if !defined(CLOCK_MONOTONIC) && defined(__LP64__) /* elsewhere, its name may differ */
#define CLOCK_MONOTONIC 1
int clock_gettime(int clock, struct timespec *time);
#endif
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "llm.h reads little-endian files in place, and so needs a little-endian machine"
#endif

#ifndef LLM_MALLOC
#define LLM_MALLOC(bytes) malloc(bytes)
#define LLM__CALLOC(bytes) calloc(1, bytes) /* zeroes large blocks only when touched */
#define LLM_REALLOC(pointer, bytes) realloc(pointer, bytes)
#define LLM_FREE(pointer) free(pointer)
#endif

#if defined(__GNUC__)
#define LLM__PRINTF(text, rest) __attribute__((format(printf, text, rest)))
#else
#define LLM__PRINTF(text, rest)
#endif

/* Fill in an error. Returns false, so that a failing check is one statement. */
LLM__PRINTF(3, 4)
static bool llm__fail(llm_error *err, llm_status status, const char *format, ...) {
    if (err) {
        err->status = status;
        err->option = NULL;
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(err->message, sizeof err->message, format, arguments);
        va_end(arguments);
    }
    return false;
}

/* The same for an error about an option: the message is the option's name, then the text. */
LLM__PRINTF(4, 5)
static bool llm__refuse(llm_error *err, llm_status status, const char *option, const char *format,
                        ...) {
    if (err) {
        llm__fail(err, status, "%s", option);
        err->option = option;
        size_t n = strlen(err->message);
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(err->message + n, sizeof err->message - n, format, arguments);
        va_end(arguments);
    }
    return false;
}

/* Set err->option to the option that decides how much memory the failed allocation needed. */
static bool llm__blame(llm_error *err, const char *option) {
    if (err && err->status == LLM_ERROR_MEMORY) err->option = option;
    return false;
}

static void llm__clear(llm_error *err) {
    if (err) {
        err->status = LLM_OK;
        err->message[0] = 0;
        err->option = NULL;
    }
}

/* *out = a * b (llm__add: a + b). False: overflow. */
static bool llm__multiply(uint64_t a, uint64_t b, uint64_t *out) {
    if (a && b > UINT64_MAX / a) return false;
    *out = a * b;
    return true;
}

static bool llm__add(uint64_t a, uint64_t b, uint64_t *out) {
    *out = a + b;
    return *out >= a;
}

/* Ask for 2 MB pages for memory that is not touched yet. With 4 KB pages, a TLB of 2000 entries
 * covers only 8 MB, the prefetcher stops at each page's end, and there are 512 times as many page
 * faults. */
static void llm__want_large_pages(void *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t page = 4096, first = ((uintptr_t)memory + page - 1) / page * page,
              end = ((uintptr_t)memory + bytes) / page * page;
    if (bytes >= (size_t)1 << 22) madvise((void *)first, end - first, MADV_HUGEPAGE); /* a hint */
#else
    (void)memory, (void)bytes;
#endif
}

#define LLM__PREFETCH(p) __builtin_prefetch(p)           /* into L1 */
#define LLM__PREFETCH_FAR(p) __builtin_prefetch(p, 0, 2) /* into L2 */
#define LLM__PREFETCH_TO_WRITE(p) __builtin_prefetch(p, 1) /* to write to it */

typedef struct llm__printable {
    char text[72];
} llm__printable;

/* Format a number of bytes for a message: "1.5 GiB". */
static llm__printable llm__show_bytes(uint64_t bytes) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
    llm__printable p;
    double x = (double)bytes;
    int unit = 0;
    for (; x >= 1024 && unit < 5; unit++) x /= 1024;
    snprintf(p.text, sizeof p.text, unit ? "%.1f %s" : "%.0f %s", x,
             bytes == 1 ? "byte" : units[unit]);
    return p;
}

static bool llm__no_memory(llm_error *err, uint64_t bytes, const char *what) {
    return llm__fail(err, LLM_ERROR_MEMORY, "out of memory: %s for %s",
                     llm__show_bytes(bytes).text, what);
}

void llm_free(void *memory) { LLM_FREE(memory); }

static void *llm__zeroed(size_t bytes) {
#ifdef LLM__CALLOC
    return LLM__CALLOC(bytes);
#else
    void *memory = LLM_MALLOC(bytes);
    return memory ? memset(memory, 0, bytes) : NULL;
#endif
}

/* Allocate zeroed memory for count items. NULL, with the error set, on failure. */
static void *llm__new(size_t count, size_t size, const char *what, llm_error *err) {
    uint64_t bytes = 0;
    bool fits = llm__multiply(count, size, &bytes) && bytes <= SIZE_MAX / 2;
    void *p = fits ? llm__zeroed(bytes ? (size_t)bytes : 1) : NULL;
    if (p) llm__want_large_pages(p, (size_t)bytes);
    else llm__no_memory(err, fits ? bytes : SIZE_MAX, what);
    return p;
}

static int64_t llm__min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t llm__max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t llm__divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Spread every bit of x over all bits of the result, for hashes and random numbers (the output
 * function of SplitMix64, Steele et al. 2014). */
static uint64_t llm__mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Hash n bytes. If the seed is unpredictable, no file can force collisions. */
static uint64_t llm__hash_bytes(uint64_t seed, const char *data, size_t n) {
    uint64_t hash = seed ^ n, word = 0;
    for (; n > 8; data += 8, n -= 8) {
        memcpy(&word, data, 8);
        hash = llm__mix(hash ^ word);
    }
    if (n >= 4) { /* the last 4 to 8 bytes; the halves may overlap */
        uint32_t halves[2];
        memcpy(&halves[0], data, 4);
        memcpy(&halves[1], data + n - 4, 4);
        word = halves[0] | (uint64_t)halves[1] << 32;
    } else if (n) {
        word = (uint8_t)data[0] | (uint64_t)(uint8_t)data[n / 2] << 8 |
               (uint64_t)(uint8_t)data[n - 1] << 16;
    } else {
        word = 0;
    }
    return llm__mix(hash ^ word);
}

double llm_seconds(void) {
    struct timespec t;
#ifdef CLOCK_MONOTONIC
    clock_gettime(CLOCK_MONOTONIC, &t);
#else
    timespec_get(&t, TIME_UTC);
#endif
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Make a string from a file safe to print: short, one line, ASCII. */
static llm__printable llm__show(llm_string s) {
    llm__printable p;
    size_t n = s.length < 64 ? s.length : 64;
    for (size_t i = 0; i < n; i++)
        p.text[i] = s.data[i] >= ' ' && s.data[i] <= '~' ? s.data[i] : '?';
    strcpy(p.text + n, s.length > n ? "..." : "");
    return p;
}

/* Allocate zeroed memory that starts on a cache line, so that threads writing different allocations
 * share no line. The pointer from LLM_MALLOC is stored just before it. */
enum { LLM__ALIGNMENT = 64 };

static void *llm__aligned_new(size_t bytes, const char *what, llm_error *err) {
    char *raw = bytes <= SIZE_MAX / 2 ? (char *)llm__zeroed(bytes + LLM__ALIGNMENT + sizeof raw)
                                      : NULL;
    if (!raw) {
        llm__no_memory(err, bytes, what);
        return NULL;
    }
    char *aligned = raw + sizeof raw;
    aligned += (LLM__ALIGNMENT - (uintptr_t)aligned % LLM__ALIGNMENT) % LLM__ALIGNMENT;
    memcpy(aligned - sizeof raw, &raw, sizeof raw);
    return aligned;
}

static void llm__aligned_free(void *aligned) {
    if (!aligned) return;
    char *raw;
    memcpy(&raw, (char *)aligned - sizeof raw, sizeof raw);
    LLM_FREE(raw);
}

/* =====================================================================================
 * PART I: THE ENGINE
 *
 * The whole way from a request to its tokens, with a plain loop for each operation.
 *
 * [DATA] The structs of the engine, and declarations of functions that are defined later
 * ================================================================================== */

/* ---- A model on a device (chapter 5) ---- */

enum { /* vectors outside the layers */
    LLM__EMBEDDING_NORM,
    LLM__EMBEDDING_NORM_BIAS,
    LLM__OUTPUT_NORM,
    LLM__OUTPUT_NORM_BIAS,
    LLM__OUTPUT_BIAS,
    LLM__N_ENDS
};

struct llm_model {
    llm_file *file;
    llm_tokenizer *tokenizer;
    llm_config config;
    const struct llm__architecture *architecture;
    const llm_tensor *embedding, *output; /* the same if they are tied */
    const llm_tensor *ends[LLM__N_ENDS]; /* vectors outside the layers; NULL: absent */
    /* (rope_dim/2) divisors of the RoPE frequencies, for contexts of up to rope_original_context
     * tokens and for longer ones; NULL: none */
    const llm_tensor *rope_divisors[2];
    struct llm__layer *layers; /* (n_layers) */
    uint64_t expert_bytes;    /* bytes of the experts' matrices */
    llm_tensor *split;        /* (8 n_layers) parts of fused tensors: q, k, v, gate, up */
    uint64_t ordered_cols;    /* width of the widest matrix with permuted columns; 0: none */
    const llm_tensor **parts; /* (n_layers, LLM__N_PARTS) tensors of each layer; NULL: absent */
    uint64_t weight_bytes;    /* bytes of all tensors */
    char context_note[160];   /* what llm_model_context_note returns */
};

typedef struct llm__network {
    const llm_model *model;
    llm_backend *backend;
    llm_weight embedding, output;
    llm_weight ends[LLM__N_ENDS]; /* f32 matrices of one row, like all vectors */
    llm_weight frequencies; /* (rope_dim/2) RoPE frequencies */
    llm_weight local_frequencies; /* the same for layers with a window, where they differ */
    llm_weight *parts;      /* (n_layers, LLM__N_PARTS) weights; absent ones have no data */
    llm_weight *experts;    /* (n_layers, 3, n_experts) gate, up and down matrices; NULL: none */
    llm_cache cache;
    llm_program program;
    float *activations;     /* device memory of all activation buffers */
    size_t activation_bytes;
    float *x;               /* device: (max_batch_tokens, dim) residual stream */
    float *logits;          /* device: (max_logits, vocab_size) logits */
    int max_logits;         /* most rows of logits in a slice */
    void **rows;            /* (n_rows) converted weights that the device reads from host memory */
    int64_t n_rows, rows_capacity;
} llm__network;

/* ---- The cache (chapter 4) ---- */

typedef struct llm__tracer {
    llm_trace call; /* trace callback; NULL: none */
    void *user;
    uint64_t step;  /* steps completed */
} llm__tracer;

typedef struct llm__pool {
    const llm__tracer *tracer; /* NULL: none */
    int block_size;
    int64_t n_blocks;
    int64_t n_free;      /* blocks in no block table, with or without cached content */
    int64_t peak;        /* most blocks in use so far */
    int32_t *references; /* (n_blocks) how many block tables contain each block */
    /* The free blocks, doubly linked, in allocation order: first those without cached content, then
     * the others, least recently used first. Entry n_blocks links the first and the last. */
    int32_t *before, *after; /* (n_blocks + 1) previous and next free block */
    /* The prefix cache. */
    bool keeps_prefixes;
    uint64_t *identity; /* (n_blocks) identity of the cached content; 0: none */
    uint64_t *parent;   /* (n_blocks) identity of the previous block, or llm__table.root */
    int32_t *tokens;    /* (n_blocks, block_size) tokens of the cached content */
    int32_t *buckets;   /* (n_buckets) first block of each hash bucket; -1: none */
    int32_t *next;      /* (n_blocks) next block in the same bucket; -1: none */
    int64_t n_buckets;  /* a power of two */
    uint64_t last_identity;
    /* Pending copies (copy-on-write); the device makes them before the next pass. */
    int32_t *copy_from, *copy_to; /* (max_copies) source and destination blocks */
    int n_copies, max_copies;
} llm__pool;

typedef struct llm__table { /* the block table of one sequence */
    int32_t *blocks;        /* (capacity) physical block of logical block i */
    int n_blocks;
    int capacity;
    int n_kept;        /* leading full blocks whose content is in the prefix cache */
    uint64_t identity; /* identity of the last of these blocks; `root` if there is none */
    uint64_t root;     /* 0; for a restored request, a unique identity: its blocks may be forged, so
                        * only its own samples can find them in the prefix cache */
    uint64_t request;  /* id of the owning request, for the trace */
    int sample;
} llm__table;

/* ---- Requests and sequences (chapter 1) ---- */

typedef struct llm__request llm__request;

typedef struct llm__sequence { /* one sample of a request */
    llm__request *request;
    int sample;
    llm_state state;
    llm_finish finish; /* LLM_FINISH_NONE until it ends */
    int32_t *tokens;   /* (limit + depth) known tokens, then this step's proposed or chosen ones */
    int n_tokens;      /* known tokens: the prompt and the generated ones */
    int n_cached;      /* tokens in the cache: n_cached < n_tokens; in DECODE, n_tokens - 1 */
    int n_drafted;     /* tokens in the draft's cache; between steps, n_drafted <= n_cached */
    int n_seen;        /* positions whose logits its hook has received, or whose hidden states are
                        * in request->hidden_sum: n_cached <= n_seen <= n_tokens */
    llm__table table;  /* blocks for at least n_cached tokens; empty unless PREFILL or DECODE */
    int n_saved;       /* saved blocks: 0, or in PREEMPTED enough for n_cached tokens;
                        * table.blocks then lists their places in `swap`, while table.n_blocks is
                        * 0 */
    int index;         /* index in llm__scheduler.sequences */
    double acceptance; /* moving average: how often a position's first proposal is accepted */
    double rescue;     /* ... how often each further one is accepted, once the first is rejected */
    llm_stream stream; /* state of the conversion of its tokens to text */
    char *text;        /* text of its events since the last step began, then the text held back */
    size_t text_used;  /* bytes of `text` in events */
    size_t text_held;  /* bytes of `text` held back, since they may begin a stop text */
    float *logprobs;   /* (depth + 1) log probabilities of the chosen tokens */
    llm_token_logprob *top; /* (depth + 1, top_logprobs) likeliest tokens for each position */
    /* Proposal i is tokens[n_tokens + i], and its row is i + 1. Row 0 is the last known token. */
    int32_t *parents;  /* (depth) row of each proposal's parent; then the rows of accepted ones */
    llm_token_logprob *candidates; /* (depth, branches) the draft's likeliest tokens */
    /* The current step. All are 0 between steps, except `error`. */
    int n_scheduled;   /* known tokens in the batch: at most n_tokens - n_cached */
    int depth;         /* number of proposals wanted in this step, at most request->depth */
    int width;         /* most of them for the same position */
    int n_proposed;    /* proposals made */
    bool branched;     /* the proposals form a tree, not a chain */
    int row;           /* the row whose logits choose the next token */
    int n_rows;        /* rows of logits used */
    int n_chosen;      /* tokens chosen, from tokens[n_tokens] on: accepted ones and one more */
    int n_tested;      /* positions for which proposals were tested */
    int n_accepted;    /* proposals accepted */
    bool closed;       /* no more to choose: proposals rejected, or the sequence ends */
    bool broken;       /* the logits for the next token are not finite */
    char error[128];   /* message of its last event: see llm_event.error */
} llm__sequence;

struct llm__request { /* exists from llm_submit to the step after its end; one allocation */
    uint64_t id;
    int64_t rank;             /* the request with the smallest rank goes first */
    llm_request params;       /* the request as submitted, with pointers into this allocation */
    int limit;                /* most tokens of a sequence, including the prompt */
    int depth;                /* most proposals per sequence and step */
    int branches;             /* most of them for the same position */
    int n_live;               /* samples that have not ended */
    bool admitted;            /* moved from llm__scheduler.waiting to `running` */
    bool forked;              /* the prompt is processed, and all samples have started */
    bool restored;            /* created by llm_session_restore */
    double *hidden_sum;       /* (dim) sum of the hidden states so far; NULL: no embedding */
    float *hidden;            /* (2, dim) the last hidden state, and the mean of all so far */
    llm__sequence *sequences; /* (n_samples) the first computes the prompt; the others fork it */
    llm__request *previous, *next;
};

typedef struct llm__queue { /* requests in rank order */
    llm__request *first, *last;
} llm__queue;

typedef struct llm__scheduler {
    const llm_engine_options *options;
    const llm__tracer *tracer;
    llm__pool pool;
    llm__queue waiting, running;
    llm__queue ended;          /* requests whose events may be unread; freed at the next step */
    int n_waiting;             /* waiting requests */
    int64_t n_live;            /* samples, of all requests, that have not ended */
    llm__sequence **sequences; /* (max_sequences) sequences in PREFILL, DECODE or PREEMPTED, in
                                * order of entry */
    int n_sequences;
    int n_preempted;           /* sequences in PREEMPTED */
    int n_places;              /* sum of n_live over the running requests: at most max_sequences */
    int turn;                  /* index of the decoding sequence that llm__select serves first */
    llm__network *networks[2]; /* target and draft (or NULL), whose caches share the block tables */
    char *swap;                /* (n_swap, swap_block_bytes) host memory for preempted blocks */
    int32_t *swap_free;        /* (n_swap_free) stack of the unused blocks of `swap` */
    int64_t n_swap, n_swap_free;
    size_t swap_block_bytes;   /* bytes of a block in all caches */
    llm_batch batch;
    llm__sequence **batch_sequences; /* (max_sequences) sequences of the batch */
    int32_t *memory;                 /* the one allocation of the arrays of llm_batch: */
    int32_t *tokens, *positions, *slots, *parents, *logit_rows; /* (max_batch_tokens) each */
    int32_t *row_sequence;           /* (max_batch_tokens) batch index of each logit row's
                                      * sequence */
    int32_t *seq_first, *seq_count;  /* (max_sequences) each */
    int32_t *block_tables;           /* (max_sequences, blocks of a context) */
    double *pass_costs[2];           /* (most_rows + 1) cost of a pass of each of `networks` over n
                                      * rows; NULL: no draft */
    int most_rows;                   /* of a step in which all sequences propose */
    int n_decoding;                  /* sequences in DECODE */
    llm_statistics *statistics;      /* the engine's statistics */
} llm__scheduler;

/* ---- Choosing tokens (chapters 2 and 3) ---- */

typedef struct llm__token_logit {
    float logit;
    int32_t id;
} llm__token_logit;

/* A model's output after one token: the logits or, if the device has drawn from them, the next
 * token. */
typedef struct llm__outcome {
    struct llm__sequence *sequence;
    int position;        /* position of the input token; the outcome is for the next one */
    int row;             /* its row: see llm__sequence.parents */
    const float *logits; /* (vocab_size) host; NULL: the device has drawn a token */
    int32_t id;          /* the token drawn */
    float logprob;
} llm__outcome;

typedef struct llm__past { /* the tokens before the one to draw */
    const int32_t *tokens; /* (n) */
    int n, n_prompt;       /* the first n_prompt are the prompt */
} llm__past;

typedef struct llm__sampler { /* scratch memory, one per engine */
    int vocab_size;
    int bits;          /* the likeliest token has the likelihood 2^bits */
    llm__token_logit *heap; /* (vocab_size) */
    llm__token_logit *kept; /* (vocab_size) tokens that pass the filters, likeliest first */
    int32_t *places;   /* (vocab_size) index of a token in a list of adjustments, if it is there */
    llm_adjustment *adjustments; /* (max_adjustments) lists of the draws, one after another */
    int64_t max_adjustments;
    llm__outcome *outcomes; /* (max_draws) outcomes of a slice of rows */
    llm_draw *draws;        /* (max_draws) draws that the device makes */
    int32_t *ids;           /* (max_draws) tokens that the device has drawn */
    float *logprobs;
} llm__sampler;

typedef struct llm__speculator {
    llm__network draft;   /* draft.model NULL: none */
    int max_depth, vocab_size;
    float *logits;        /* (draft.max_logits, vocab_size) the draft's logits, host */
    float *probabilities; /* (max_sequences, max_depth, vocab_size) proposals' distributions */
    float *target;        /* (vocab_size) distribution of the target */
} llm__speculator;

/* ---- The engine ---- */

struct llm_engine {
    const llm_model *model;
    llm_engine_options options;
    llm_backend *own_backend; /* NULL: the caller's backend is used */
    llm__network network;
    llm__scheduler scheduler;
    llm__sampler sampler;
    llm__speculator speculator;
    llm__tracer tracer;
    float *logits;     /* (network.max_logits, vocab_size) host */
    float *hooked;     /* (vocab_size) logits that a hook may change */
    float *hidden;     /* (max_batch_tokens + 1, dim) host: rows of x, then final norm weights */
    llm_event *events; /* (max_events) events of the last step, and of later calls of llm_cancel */
    int n_events, next_event, max_events;
    uint64_t last_id;
    llm_statistics statistics;
    llm_device_state device; /* device's state at engine creation, subtracted from later readings */
};

/* ---- Forward declarations ---- */

/* [2] Speculation */
static int llm__speculation_depth(const llm__scheduler *s, llm__sequence *seq);
static bool llm__has_child(const llm__sequence *seq, int row);
static int32_t llm__verify(llm__speculator *sp, llm__sampler *sampler, llm__sequence *seq,
                           const float *logits);
static void llm__follow(llm__sequence *seq, int32_t id);
static bool llm__join_branches(llm_engine *e, llm_error *err);
static void llm__count_proposal(llm_statistics *statistics, const llm__sequence *seq, int i);
static bool llm__count_costs(llm__scheduler *s, llm_error *err);
static bool llm__speculator_init(llm__speculator *sp, const llm_model *target,
                                 const llm_engine_options *o, int max_logits, llm_error *err);
static void llm__speculator_free(llm__speculator *sp);
/* [3] Sampling */
static bool llm__sampling_check(const llm_sampling *s, int vocab_size, llm_error *err);
static uint64_t llm__random_bits(uint64_t seed, uint64_t stream, uint64_t index);
static int32_t llm__sample(llm__sampler *s, const llm_sampling *p, const float *logits,
                           llm__past past, uint64_t stream, uint64_t index);
static bool llm__sampler_init(llm__sampler *s, int vocab_size, int64_t max_draws, llm_error *err);
static void llm__sampler_free(llm__sampler *s);
static void llm__distribution(llm__sampler *s, const llm_sampling *p, const float *logits,
                              llm__past past, float *probabilities);
static int llm__adjust(llm__sampler *s, const llm_sampling *p, llm__past past, llm_adjustment *to);
static void llm__top_logprobs(const float *logits, int n, int k, llm_token_logprob *top);
/* [4] Paged cache */
static void llm__table_clear(llm__pool *pool, llm__table *table);
static int64_t llm__blocks_for(const llm__pool *pool, int64_t n_tokens);
static bool llm__table_grow(llm__pool *pool, llm__table *table, int first, int end);
static int llm__table_match(llm__pool *pool, llm__table *table, const int32_t *tokens,
                            int n_tokens);
static int llm__copies_at_once(const llm__pool *pool);
static void llm__copies_done(llm__pool *pool, int n);
static int32_t llm__table_slot(const llm__pool *pool, const llm__table *table, int position);
static void llm__table_keep(llm__pool *pool, llm__table *table, const int32_t *tokens,
                            int n_tokens);
static void llm__table_fork(llm__pool *pool, const llm__table *table, llm__table *copy);
static void llm__table_trim(llm__pool *pool, llm__table *table, int n_tokens);
static bool llm__pool_init(llm__pool *pool, int64_t n_blocks, int block_size, int max_copies,
                           bool keeps_prefixes, llm_error *err);
static void llm__pool_free(llm__pool *pool);
/* [5] The program */
static bool llm__block_copy(const llm__network *net, int32_t block, char *host, bool out,
                            llm_error *err);
static size_t llm__block_bytes(const llm_cache *cache);
static float llm__stream_epsilon(const llm_config *c);
static bool llm__network_load(llm__network *net, const llm_model *model, llm_backend *backend,
                              int context, llm_error *err);
static bool llm__network_prepare(llm__network *net, const llm_engine_options *o, int max_logits,
                                 llm_error *err);
static bool llm__load_cache(llm__network *net, llm_type type, int block_size, int64_t n_blocks,
                            llm_error *err);
static void llm__network_free(llm__network *net);
/* [6] The operations */
static int llm__first_seen(const llm_attention_shape *shape, int position);
static void llm__plain_rmsnorm(const float *x, const float *weight, int64_t n, int64_t dim,
                               float epsilon, bool add, float *out);
static void llm__plain_layernorm(const float *x, const float *weight, const float *bias, int64_t n,
                                 int64_t dim, float epsilon, float *out);
static bool llm__has_layer_norms(const llm_model *model);
static size_t llm__value_bytes(llm_type type);
/* [7] Numbers */
static size_t llm__row_bytes(llm_type type, int64_t cols);
static void llm__write_u16(void *p, uint16_t x);
static uint16_t llm__f32_to_f16(float x);
static float llm__f16_to_f32(uint16_t half);
static uint16_t llm__read_u16(const void *p);
/* [8] Files */
static int llm__compare_strings(const llm_string *a, const llm_string *b);
static bool llm__grow(void *list, int64_t count, int64_t *capacity, size_t size, const char *what,
                      llm_error *err);
static void *llm__new_rows(const llm_tensor *tensor, llm_error *err);
static void llm__tensor_forget(const llm_file *file, const llm_tensor *tensor);
/* [9] Text */
static bool llm__is_text(llm_string s, const char *text);
/* [10] Fast CPU */
static int32_t llm__argmax(const float *x, int n);
static double llm__sum_exp(const float *x, int n, float shift);

/* =====================================================================================
 * [1] Life of a request: submit, schedule, forward, choose, commit, event
 *
 * Most of a step's time goes into reading the weights once, whether the step carries one token or
 * twenty. So requests share steps. They arrive and end at different times, and their lengths are
 * unknown in advance; hence continuous batching (Yu et al. 2022, "Orca"): every step has a new
 * batch. Ended sequences leave, and waiting ones enter as soon as there is room. A long prompt is
 * cut into chunks; they fill the rest of the step's token budget after the decoding sequences
 * (Agrawal et al. 2023, "Sarathi").
 *
 *     llm_submit           a request arrives, and waits
 *     llm_step
 *         llm__schedule    decide which sequences take part, with how many tokens, in which blocks
 *         llm__propose     (speculation only: guess some tokens ahead)
 *         llm__forward     run the program over the batch
 *         llm__choose      pick the next token of each sequence from its logits
 *         llm__commit      apply the result: the only function that changes a sequence after a pass
 *     llm_next_event       the caller reads what happened
 *
 * A sequence is one sample of a request, and has one state:
 *
 *     WAITING   -> PREFILL    its request is admitted; the first sample computes the prompt
 *               -> DECODE     (further samples) the prompt is in the cache: the request is forked
 *               -> PREEMPTED  a restored request is admitted; it is resumed at once if it fits
 *     PREFILL   -> DECODE     all known tokens but the last are in the cache
 *     PREFILL, DECODE -> PREEMPTED    its blocks are needed for an older sequence
 *     PREEMPTED -> PREFILL    there is room again
 *               -> DECODE     the same, and n_cached == n_tokens - 1
 *     any state -> ENDED      a last token, a stop text, llm_cancel
 *
 * Between steps, a sequence is little more than its tokens, its block table and two counts:
 * n_tokens, the known tokens (the prompt and the generated ones), and n_cached, those whose keys
 * and values are in the cache. A step runs the model over some of the others: in PREFILL there may
 * be many, in DECODE only the last. Random numbers depend on the position alone. So preemption has
 * nothing to undo: without its blocks, n_cached is 0, the cache is computed again, and the output
 * stays the same.
 *
 * When the pool is empty, the newest sequence is preempted. The oldest never is, and each sequence
 * alone fits into the pool (llm_submit checks this). So at least one sequence always advances, and
 * all of them end.
 *
 * A step that fails commits the sequences whose tokens were chosen before the failure. The others
 * keep their tokens and n_cached, and the next step repeats their work. Admissions, preemptions and
 * allocations of blocks are not undone.
 * ================================================================================== */

static bool llm__schedule(llm_engine *e, llm_error *err);
static bool llm__propose(llm_engine *e, llm_error *err); /* chapter 2 */
static int llm__build_batch(llm__scheduler *s);
static bool llm__forward(llm_engine *e, int first, llm_error *err);
static bool llm__choose(llm_engine *e, int first, llm_error *err);
static void llm__commit(llm_engine *e, bool ok);
static void llm__begin_step(llm_engine *e);
static int llm__end_step(llm_engine *e, bool ok, bool worked, llm_error *err);

int llm_step(llm_engine *e, llm_error *err) {
    llm__clear(err);
    if (!e) {
        llm__fail(err, LLM_ERROR_ARGUMENT, "llm_step: the engine is NULL");
        return -1;
    }
    double start = llm_seconds();
    llm__scheduler *s = &e->scheduler;
    bool work = s->running.first || s->waiting.first, ok = true;
    llm__begin_step(e);
    if (work) {
        ok = llm__schedule(e, err) && llm__propose(e, err);
        /* in slices, to limit the memory for logits; usually there is one */
        int rows = ok ? llm__build_batch(s) : 0;
        for (int first = 0; ok && first < rows; first += e->network.max_logits)
            ok = llm__forward(e, first, err) && llm__choose(e, first, err);
        llm__commit(e, ok);
        e->statistics.step_seconds += llm_seconds() - start;
    }
    return llm__end_step(e, ok, work, err);
}

/* ---- States ---- */

/* A trace event without a block. */
static llm_trace_event llm__trace_event(llm_trace_kind kind, uint64_t request, int sample,
                                        int first, int count) {
    llm_trace_event event;
    memset(&event, 0, sizeof event);
    event.kind = kind;
    event.request = request;
    event.sample = sample;
    event.first = first;
    event.count = count;
    event.block = event.source = -1;
    return event;
}

static void llm__trace(const llm__tracer *tracer, llm_trace_event event) {
    if (!tracer || !tracer->call) return;
    event.step = tracer->step;
    tracer->call(tracer->user, &event);
}

/* The only function that changes a state. count: see LLM_TRACE_STATE. */
static void llm__set_state(llm__scheduler *s, llm__sequence *seq, llm_state state, int count) {
    llm_trace_event event = llm__trace_event(LLM_TRACE_STATE, seq->request->id, seq->sample, 0,
                                             count);
    event.from = seq->state;
    event.state = state;
    s->n_preempted += (state == LLM_PREEMPTED) - (seq->state == LLM_PREEMPTED);
    seq->state = state;
    llm__trace(s->tracer, event);
}

/* Insert a request in rank order. Of equal ranks, the newer comes first: it overtakes exactly 64 x
 * priority requests. */
static void llm__queue_insert(llm__queue *q, llm__request *request) {
    llm__request *after = q->last;
    while (after && after->rank >= request->rank) after = after->previous;
    request->previous = after;
    request->next = after ? after->next : q->first;
    *(after ? &after->next : &q->first) = request;
    *(request->next ? &request->next->previous : &q->last) = request;
}

static void llm__queue_remove(llm__queue *q, llm__request *request) {
    *(request->previous ? &request->previous->next : &q->first) = request->next;
    *(request->next ? &request->next->previous : &q->last) = request->previous;
}

static void llm__queue_free(llm__queue *q) {
    while (q->first) {
        llm__request *request = q->first;
        llm__queue_remove(q, request);
        LLM_FREE(request);
    }
}

static void llm__enter(llm__scheduler *s, llm__sequence *seq, llm_state state, int count) {
    seq->index = s->n_sequences;
    s->sequences[s->n_sequences++] = seq;
    llm__set_state(s, seq, state, count);
}

static void llm__free_saved(llm__scheduler *s, llm__sequence *seq);

/* End a sequence and free its blocks. A request ends with its last sample. The caller then calls
 * llm__remove_ended. */
static void llm__end(llm__scheduler *s, llm__sequence *seq, llm_finish finish) {
    llm__request *request = seq->request;
    if (seq->state != LLM_WAITING) {
        llm__free_saved(s, seq);
        llm__table_clear(&s->pool, &seq->table);
    }
    seq->finish = finish;
    llm__set_state(s, seq, LLM_ENDED, seq->n_tokens - request->params.n_prompt);
    s->n_live--;
    if (request->admitted) s->n_places--;
    if (--request->n_live > 0) return;
    llm__queue_remove(request->admitted ? &s->running : &s->waiting, request);
    if (!request->admitted) s->n_waiting--;
    llm__queue_insert(&s->ended, request);
    s->statistics->requests_finished++;
}

static void llm__remove_ended(llm__scheduler *s) {
    int n = 0;
    for (int i = 0; i < s->n_sequences; i++) {
        llm__sequence *seq = s->sequences[i];
        if (seq->state == LLM_ENDED) continue;
        seq->index = n;
        s->sequences[n++] = seq;
    }
    s->n_sequences = n;
}

/* ---- Submit ---- */

static bool llm__check_request(const llm_engine *e, const llm_request *r, llm_error *err);
static bool llm__reserve_events(llm_engine *e, int n_more, llm_error *err);
static llm__request *llm__request_create(const llm_engine *e, const llm_request *r, llm_error *err);
static void llm__wait(llm_engine *e, llm__request *request);

bool llm_submit(llm_engine *e, const llm_request *r, uint64_t *id, llm_error *err) {
    llm__clear(err);
    if (!e || !r)
        return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_submit: the engine or the request is NULL");
    if (!llm__check_request(e, r, err) || !llm__reserve_events(e, r->n_samples, err)) return false;
    llm__request *request = llm__request_create(e, r, err);
    if (!request) return false;
    llm__wait(e, request);
    if (id) *id = request->id;
    return true;
}

/* Give a new request its id, and queue it. */
static void llm__wait(llm_engine *e, llm__request *request) {
    llm__scheduler *s = &e->scheduler;
    request->id = ++e->last_id;
    /* A priority level is worth 64 ids. Ids grow, so only a limited number of later requests can
     * overtake this one: no request starves. */
    request->rank = (int64_t)request->id - 64 * (int64_t)request->params.priority;
    llm__queue_insert(&s->waiting, request);
    s->n_waiting++;
    s->n_live += request->n_live;
    e->statistics.requests_submitted++;
    for (int i = 0; i < request->params.n_samples; i++) {
        request->sequences[i].table.request = request->id;
        llm__set_state(s, &request->sequences[i], LLM_WAITING, 0);
    }
}

bool llm_submit_text(llm_engine *e, const char *text, const llm_request *request, uint64_t *id,
                     llm_error *err) {
    llm__clear(err);
    if (!e || !text)
        return llm__fail(err, LLM_ERROR_ARGUMENT,
                         "llm_submit_text: the engine or the text is NULL");
    llm_request r = request ? *request : llm_request_defaults();
    int32_t *ids;
    int64_t n = llm_tokenize_new(e->model->tokenizer, text, strlen(text), LLM_TOKENIZE_BOS, &ids,
                                 err);
    if (n < 0) return false;
    r.prompt = ids;
    r.n_prompt = (int)llm__min(n, INT32_MAX);
    bool ok = llm_submit(e, &r, id, err);
    LLM_FREE(ids);
    return ok;
}

/* ---- Schedule: resume, admit, select, secure ---- */

static bool llm__resume(llm__scheduler *s, llm_error *err);
static bool llm__admit(llm__scheduler *s, llm_error *err);
static void llm__select(llm__scheduler *s);
static bool llm__secure(llm__scheduler *s, llm_error *err);
static bool llm__run_copies(llm_engine *e, llm_error *err);

static bool llm__schedule(llm_engine *e, llm_error *err) {
    double start = llm_seconds();
    llm__scheduler *s = &e->scheduler;
    bool ok = llm__run_copies(e, err) && llm__resume(s, err) && llm__admit(s, err);
    if (ok) {
        llm__select(s);
        ok = llm__secure(s, err) && llm__run_copies(e, err);
    }
    e->statistics.schedule_seconds += llm_seconds() - start;
    return ok;
}

static char *llm__swap_place(const llm__scheduler *s, int32_t host) {
    return s->swap + (size_t)host * s->swap_block_bytes;
}

/* Copy a block of all caches to host memory (swap_block_bytes), or back. */
static bool llm__swap_copy(llm__scheduler *s, int32_t block, char *memory, bool out,
                           llm_error *err) {
    s->statistics->blocks_swapped++;
    for (int i = 0; i < 2; i++) {
        if (!s->networks[i]) continue;
        if (!llm__block_copy(s->networks[i], block, memory, out, err)) return false;
        memory += llm__block_bytes(&s->networks[i]->cache);
    }
    return true;
}

static void llm__free_saved(llm__scheduler *s, llm__sequence *seq) {
    while (seq->n_saved > 0) s->swap_free[s->n_swap_free++] = seq->table.blocks[--seq->n_saved];
}

/* Copy a sequence's saved blocks back into the pool, which has room. */
static bool llm__swap_in(llm__scheduler *s, llm__sequence *seq, llm_error *err) {
    llm__table *table = &seq->table;
    int32_t *places = s->swap_free + s->n_swap_free; /* has room for them */
    size_t bytes = (size_t)seq->n_saved * sizeof *places;
    memcpy(places, table->blocks, bytes);
    bool ok = llm__table_grow(&s->pool, table, 0, seq->n_cached);
    for (int i = 0; ok && i < seq->n_saved; i++)
        ok = llm__swap_copy(s, table->blocks[i], llm__swap_place(s, places[i]), false, err);
    if (ok) {
        s->n_swap_free += seq->n_saved;
        seq->n_saved = 0;
    } else {
        llm__table_clear(&s->pool, table);
        memcpy(table->blocks, places, bytes);
    }
    return ok;
}

/* Preempt a sequence and free its blocks. Their content is saved if there is host memory for it;
 * otherwise it is computed again later. */
static bool llm__preempt(llm__scheduler *s, llm__sequence *seq, llm_error *err) {
    int32_t *blocks = seq->table.blocks;
    int64_t used = llm__blocks_for(&s->pool, seq->n_cached), first = s->n_swap_free - used;
    int n = first >= 0 ? (int)used : 0;
    for (int i = 0; i < n; i++)
        if (!llm__swap_copy(s, blocks[i], llm__swap_place(s, s->swap_free[first + i]), true, err))
            return false;
    llm__table_clear(&s->pool, &seq->table);
    for (int i = n; i > 0; i--) blocks[i - 1] = s->swap_free[--s->n_swap_free];
    seq->n_saved = n;
    if (!n) seq->n_cached = seq->n_drafted = 0;
    seq->n_scheduled = seq->depth = 0;
    s->statistics->preemptions++;
    llm__set_state(s, seq, LLM_PREEMPTED, n);
    return true;
}

/* Blocks needed for a sequence's known tokens, the next one, and the proposals after it. */
static int64_t llm__blocks_wanted(const llm__scheduler *s, const llm__sequence *seq) {
    int64_t next = (int64_t)seq->n_tokens + 1;
    return llm__blocks_for(
        &s->pool, llm__min(next + seq->request->depth, llm__max(seq->request->limit, next)));
}

/* Free blocks, minus those that the running sequences may soon need. */
static int64_t llm__blocks_spare(const llm__scheduler *s) {
    int64_t spare = s->pool.n_free;
    for (int i = 0; i < s->n_sequences; i++) {
        const llm__sequence *seq = s->sequences[i];
        if (seq->state != LLM_PREEMPTED)
            spare -= llm__max(llm__blocks_wanted(s, seq) - seq->table.n_blocks, 0);
    }
    return spare;
}

/* Must the model compute every position of the request, even those in the prefix cache? */
static bool llm__sees_all(const llm__request *request) {
    return request->params.logits_hook || request->hidden;
}

/* Resume preempted sequences, oldest first, up to the first that does not fit: newer ones must not
 * starve it. */
static bool llm__resume(llm__scheduler *s, llm_error *err) {
    for (int i = 0; i < s->n_sequences && s->n_preempted > 0; i++) {
        llm__sequence *seq = s->sequences[i];
        if (seq->state != LLM_PREEMPTED) continue;
        if (llm__blocks_wanted(s, seq) > llm__blocks_spare(s)) break;
        if (seq->n_saved > 0) {
            if (!llm__swap_in(s, seq, err)) return false;
        } else { /* compute what the hook or embedding still needs */
            int known = seq->n_tokens - 1;
            if (llm__sees_all(seq->request)) known = (int)llm__min(known, seq->n_seen);
            seq->n_cached = seq->n_drafted = llm__table_match(&s->pool, &seq->table, seq->tokens,
                                                              known);
        }
        bool decode = seq->request->forked && seq->n_cached == seq->n_tokens - 1;
        llm__set_state(s, seq, decode ? LLM_DECODE : LLM_PREFILL, seq->n_cached);
    }
    return true;
}

/* Admit waiting requests in rank order, while there is room for the next one's prompt and a token.
 * A request is admitted with all its samples; the first computes the prompt. */
static bool llm__admit(llm__scheduler *s, llm_error *err) {
    if (s->n_preempted > 0) return true;
    int64_t spare = llm__blocks_spare(s);
    for (llm__request *request; (request = s->waiting.first) != NULL;) {
        llm__sequence *seq = &request->sequences[0];
        int n_prompt = request->params.n_prompt;
        int64_t before = s->pool.n_free, wanted = llm__blocks_for(&s->pool, n_prompt + 1);
        if (s->n_places + request->n_live > s->options->max_sequences) return true;
        if (wanted > spare && s->n_sequences > 0) return true;
        llm__queue_remove(&s->waiting, request);
        s->n_waiting--;
        llm__queue_insert(&s->running, request);
        request->admitted = true;
        s->n_places += request->n_live;
        if (request->restored) { /* its samples resume as if preempted */
            for (int i = 0; i < (request->forked ? request->params.n_samples : 1); i++)
                if (!seq[i].finish) llm__enter(s, &seq[i], LLM_PREEMPTED, 0);
            if (!llm__resume(s, err)) return false;
            if (s->n_preempted > 0) return true;
            spare = llm__blocks_spare(s);
            continue;
        }
        if (!llm__sees_all(request)) {
            seq->n_cached = seq->n_drafted =
                llm__table_match(&s->pool, &seq->table, seq->tokens, n_prompt - 1);
            s->statistics->prefix_tokens += (uint64_t)n_prompt;
            s->statistics->prefix_hits += (uint64_t)seq->n_cached;
        }
        llm__enter(s, seq, LLM_PREFILL, seq->n_cached);
        /* a matched block that is in use takes no free block; any other takes one */
        spare -= wanted - seq->table.n_blocks + (before - s->pool.n_free);
    }
    return true;
}

/* Decide how many tokens of each sequence are in the step. Decoding sequences come first (in turns,
 * if not all fit), so that prompts do not delay them; prompts share the rest of the budget. */
static void llm__select(llm__scheduler *s) {
    int budget = s->options->max_batch_tokens, n = s->n_sequences;
    bool chunked = s->options->chunked_prefill;
    s->n_decoding = 0;
    for (int i = 0; i < n; i++) s->n_decoding += s->sequences[i]->state == LLM_DECODE;
    for (int pass = 0; pass < 2; pass++) {
        bool prefill = chunked ? pass == 1 : pass == 0; /* whole prompts first: they would starve */
        for (int i = 0; i < n && budget > 0; i++) {
            llm__sequence *seq = s->sequences[prefill ? i : (i + s->turn) % n];
            if (seq->state != (prefill ? LLM_PREFILL : LLM_DECODE)) continue;
            /* after a preemption, the first decode step computes the last token */
            int missing = seq->n_tokens - seq->n_cached - (prefill && seq->request->forked);
            int depth = prefill ? 0 : llm__speculation_depth(s, seq); /* 0 without speculation */
            bool whole = !prefill || !chunked;
            if (whole && missing + depth > budget) continue;
            seq->n_scheduled = (int)llm__min(missing, budget);
            seq->depth = depth;
            budget -= seq->n_scheduled + depth;
        }
    }
    s->turn = n ? (s->turn + 1) % n : 0;
}

/* Give the selected sequences, oldest first, the blocks that they will write to. When the pool is
 * empty, preempt the newest sequence that has blocks, even if it is the one that needs more. */
static bool llm__secure(llm__scheduler *s, llm_error *err) {
    for (int i = 0; i < s->n_sequences; i++) {
        llm__sequence *seq = s->sequences[i];
        /* A draft with fewer cached tokens than the target writes below n_cached, but never to a
         * shared block: a block is kept or forked only after the draft has processed it, too. */
        while (seq->n_scheduled &&
               !llm__table_grow(&s->pool, &seq->table, seq->n_cached,
                                seq->n_cached + seq->n_scheduled + seq->depth)) {
            int victim = s->n_sequences - 1;
            while (victim > i && s->sequences[victim]->table.n_blocks == 0) victim--;
            if (!llm__preempt(s, s->sequences[victim], err)) return false;
        }
    }
    return true;
}

/* Make the pending copies. The block tables already name the copies, so copies that fail stay
 * pending for the next step. */
static bool llm__run_copies(llm_engine *e, llm_error *err) {
    llm__scheduler *s = &e->scheduler;
    llm__pool *pool = &s->pool;
    llm_backend *b = e->options.backend;
    while (pool->n_copies > 0) {
        int n = llm__copies_at_once(pool);
        for (int i = 0; i < 2; i++)
            if (s->networks[i])
                b->copy_blocks(b->context, &s->networks[i]->cache, pool->copy_from, pool->copy_to,
                               n);
        if (!b->sync(b->context, err)) return false;
        llm__copies_done(pool, n);
    }
    return true;
}

/* ---- Forward ---- */

static void llm__batch_clear(llm__scheduler *s) {
    s->batch.n_tokens = s->batch.n_sequences = s->batch.n_logits = 0;
    s->batch.parents = NULL;
}

/* Add tokens first .. first + count - 1 of a sequence to the batch, with logits from position
 * `wanted` on. */
static void llm__batch_add(llm__scheduler *s, llm__sequence *seq, int first, int count,
                           int wanted) {
    llm_batch *b = &s->batch;
    s->batch_sequences[b->n_sequences] = seq;
    s->seq_first[b->n_sequences] = b->n_tokens;
    s->seq_count[b->n_sequences] = count;
    if (seq->branched) b->parents = s->parents;
    for (int p = first; p < first + count; p++) {
        int t = b->n_tokens++, row = p - (seq->n_tokens - 1);
        int parent = t - (row > 0 && seq->branched ? row - seq->parents[row - 1] : 1);
        s->tokens[t] = seq->tokens[p];
        s->positions[t] = p > first ? s->positions[parent] + 1 : p;
        s->parents[t] = p > first && seq->branched ? parent : -1;
        s->slots[t] = llm__table_slot(&s->pool, &seq->table, p);
        if (p < wanted) continue;
        s->row_sequence[b->n_logits] = b->n_sequences;
        s->logit_rows[b->n_logits++] = t;
    }
    b->n_sequences++;
}

/* Copy the block tables into the batch, with the smallest stride. */
static void llm__batch_finish(llm__scheduler *s) {
    llm_batch *b = &s->batch;
    b->table_stride = 1;
    for (int i = 0; i < b->n_sequences; i++)
        b->table_stride = (int)llm__max(b->table_stride, s->batch_sequences[i]->table.n_blocks);
    for (int i = 0; i < b->n_sequences; i++) {
        const llm__table *table = &s->batch_sequences[i]->table;
        memcpy(s->block_tables + (int64_t)i * b->table_stride, table->blocks,
               (size_t)table->n_blocks * sizeof(int32_t));
    }
    b->tokens = s->tokens;
    b->positions = s->positions;
    b->slots = s->slots;
    b->seq_first = s->seq_first;
    b->seq_count = s->seq_count;
    b->block_tables = s->block_tables;
    b->block_size = s->pool.block_size;
    b->logit_rows = s->logit_rows;
}

/* Build the target's batch: the scheduled tokens, and the proposals after them. Returns 0 if it is
 * empty, else the number of logit rows wanted (at least 1). */
static int llm__build_batch(llm__scheduler *s) {
    llm__batch_clear(s);
    for (int i = 0; i < s->n_sequences; i++) {
        llm__sequence *seq = s->sequences[i];
        const llm__request *request = seq->request;
        if (!seq->n_scheduled) continue;
        int wanted = request->limit > request->params.n_prompt ? seq->n_tokens - 1 : INT_MAX;
        if (request->params.logits_hook) wanted = seq->n_seen;
        llm__batch_add(s, seq, seq->n_cached, seq->n_scheduled + seq->n_proposed, wanted);
        llm__trace(s->tracer, llm__trace_event(LLM_TRACE_SCHEDULE, request->id, seq->sample,
                                               seq->n_cached, seq->n_scheduled));
        if (seq->n_proposed)
            llm__trace(s->tracer, llm__trace_event(LLM_TRACE_PROPOSE, request->id, seq->sample,
                                                   seq->n_tokens, seq->n_proposed));
    }
    llm__batch_finish(s);
    return s->batch.n_tokens ? (int)llm__max(s->batch.n_logits, 1) : 0;
}

/* Rows of logits in the slice that begins with row `first`. */
static int llm__slice_rows(const llm__network *net, const llm_batch *batch, int first) {
    return (int)llm__min(net->max_logits, batch->n_logits - first);
}

/* Run a model over the batch: the body and the first slice of logits, or a further slice. */
static bool llm__run(const llm__network *net, const llm_batch *batch, int first, llm_error *err) {
    llm_backend *b = net->backend;
    int n = llm__slice_rows(net, batch, first);
    llm_part part = first > 0 ? LLM_HEAD : n > 0 ? LLM_WHOLE : LLM_BODY;
    return b->run(b->context, &net->program, part, batch, first, n, err);
}

static bool llm__forward(llm_engine *e, int first, llm_error *err) {
    double start = llm_seconds();
    bool ok = llm__run(&e->network, &e->scheduler.batch, first, err);
    e->statistics.forward_seconds += llm_seconds() - start;
    return ok;
}

/* ---- Choose ---- */

/* Are a sequence's proposals drawn at random from the distributions of a draft? */
static bool llm__proposals_drawn(const llm__sequence *seq) {
    const llm_request *r = &seq->request->params;
    return r->sampling.temperature > 0 && !r->lookup && seq->depth > 0;
}

/* Can the device draw this sequence's tokens? Hooks need the logits on the host, and drawn
 * proposals are tested there against whole distributions. In a tree, penalties and top_logprobs
 * depend on the branch. */
static bool llm__device_draws(const llm__sequence *seq) {
    const llm_request *r = &seq->request->params;
    const llm_sampling *p = &r->sampling;
    bool alike = !seq->branched || (p->repetition_penalty == 1 && p->presence_penalty == 0 &&
                                    p->frequency_penalty == 0 && !r->top_logprobs);
    return !r->logits_hook && !llm__proposals_drawn(seq) && alike;
}

static llm__past llm__past_of(const llm__sequence *seq, int n) {
    llm__past past = {seq->tokens, n, seq->request->params.n_prompt};
    return past;
}

/* Describe the draw of a sequence's token after `position`, from row `row`. The adjustments are
 * written to `list`. draft: the logits are the draft's. */
static llm_draw llm__draw_of(llm__sampler *s, llm_adjustment *list, const llm__sequence *seq,
                             int row, int position, bool draft) {
    const llm_request *r = &seq->request->params;
    int n = position + 1;
    llm_draw draw;
    memset(&draw, 0, sizeof draw);
    draw.row = row;
    draw.sampling = r->sampling;
    draw.random = llm__random_bits(r->sampling.seed, (uint64_t)seq->sample,
                                   (uint64_t)(n - r->n_prompt));
    draw.adjustments = list;
    draw.n_adjustments = llm__adjust(s, &r->sampling, llm__past_of(seq, n), list);
    draw.n_top = n < seq->n_tokens ? 0 : draft ? (seq->width > 1 ? seq->width : 0) : r->top_logprobs;
    draw.top = draft ? seq->candidates : seq->top;
    if (draw.n_top) draw.top += (n - seq->n_tokens) * draw.n_top;
    return draw;
}

/* Let the device make draws first to end - 1. */
static bool llm__draw(const llm__sampler *s, const llm__network *net, int first, int end,
                      llm_error *err) {
    return first == end ||
           net->backend->sample(net->backend->context, net->logits, net->model->config.vocab_size,
                                s->draws + first, end - first, s->ids + first, s->logprobs + first,
                                err);
}

/* Copy n rows of logits to `host`, whose rows have `vocab` entries. A draft may pad the same
 * vocabulary to another width. */
static bool llm__fetch_logits(const llm__network *net, int first, int n, float *host, int64_t vocab,
                              llm_error *err) {
    llm_backend *b = net->backend;
    int64_t width = net->model->config.vocab_size, common = llm__min(width, vocab);
    const float *logits = net->logits + first * width;
    host += first * vocab;
    if (width == vocab)
        return b->download(b->context, host, logits, (size_t)(n * vocab) * sizeof *host, err);
    for (int row = 0; row < n; row++, host += vocab, logits += width) {
        if (!b->download(b->context, host, logits, (size_t)common * sizeof *host, err))
            return false;
        for (int64_t i = common; i < vocab; i++) host[i] = -INFINITY;
    }
    return true;
}

/* Fetch a model's outcomes for a slice of rows: one per row, or one per sample for a prompt's last
 * row. The device draws tokens where it can; other rows of logits are copied to `host` (max_logits,
 * the target's vocab_size). Returns the number of outcomes; -1 on failure. */
static int llm__fetch(llm__sampler *sampler, const llm__scheduler *s, const llm__network *net,
                      int first, float *host, llm_error *err) {
    llm_backend *b = net->backend;
    bool device = b->sample && !s->options->host_sampling;
    int n = llm__slice_rows(net, &s->batch, first), n_outcomes = 0, n_draws = 0, n_drawn = 0;
    int64_t vocab = sampler->vocab_size, n_list = 0; /* n_list: adjustments of pending draws */
    for (int row = 0, from = 0; row <= n; row++) { /* from: first row not yet copied */
        llm__sequence *seq = row < n ? s->batch_sequences[s->row_sequence[first + row]] : NULL;
        bool drawn = seq && device && llm__device_draws(seq);
        if (!seq || drawn) {
            if (row > from && !llm__fetch_logits(net, from, row - from, host, vocab, err))
                return -1;
            from = row + 1;
        }
        if (!seq) break;
        int position = s->positions[s->logit_rows[first + row]];
        bool forks = !seq->request->forked && position == seq->n_tokens - 1;
        for (int i = 0; i < (forks ? seq->request->params.n_samples : 1); i++) {
            llm__outcome *o = &sampler->outcomes[n_outcomes++];
            o->sequence = forks ? &seq->request->sequences[i] : seq;
            o->position = position;
            o->row = s->logit_rows[first + row] - seq->n_scheduled + 1 -
                     s->seq_first[s->row_sequence[first + row]];
            o->logits = drawn ? NULL : host + row * vocab;
            if (!drawn) continue;
            if (n_list + vocab > sampler->max_adjustments) {
                if (!llm__draw(sampler, net, n_drawn, n_draws, err)) return -1;
                n_drawn = n_draws;
                n_list = 0;
            }
            sampler->draws[n_draws] = llm__draw_of(sampler, sampler->adjustments + n_list,
                                                   o->sequence, row, position,
                                                   net != s->networks[0]);
            n_list += sampler->draws[n_draws++].n_adjustments;
        }
    }
    if (!llm__draw(sampler, net, n_drawn, n_draws, err)) return -1;
    for (int i = 0, drawn = 0; i < n_outcomes; i++) {
        if (sampler->outcomes[i].logits) continue;
        /* an id in a draft's padding becomes 0 */
        sampler->outcomes[i].id = sampler->ids[drawn] < vocab ? sampler->ids[drawn] : 0;
        sampler->outcomes[i].logprob = sampler->logprobs[drawn++];
    }
    return n_outcomes;
}

/* Choose a sequence's next token and write it after the known ones. llm__commit makes it known. */
static void llm__choose_token(llm_engine *e, const llm__outcome *outcome) {
    llm__sequence *seq = outcome->sequence;
    const llm__request *request = seq->request;
    const llm_request *r = &request->params;
    const float *logits = outcome->logits;
    int vocab = e->model->config.vocab_size, n = seq->n_tokens + seq->n_chosen;
    if (seq->closed || (outcome->row > 0 && outcome->row != seq->row)) return;
    seq->n_rows++;
    if (r->logits_hook) {
        memcpy(e->hooked, logits, (size_t)vocab * sizeof(float));
        r->logits_hook(r->user, request->id, seq->sample, outcome->position, e->hooked);
        logits = e->hooked;
    }
    /* only the hook needs this row */
    if (outcome->position < seq->n_tokens - 1 || request->limit == r->n_prompt) return;
    int32_t id = outcome->id;
    if (llm__proposals_drawn(seq) && llm__has_child(seq, seq->row)) /* chapter 2 */
        id = llm__verify(&e->speculator, &e->sampler, seq, logits);
    else if (logits)
        id = llm__sample(&e->sampler, &r->sampling, logits, llm__past_of(seq, n),
                         (uint64_t)seq->sample, (uint64_t)(n - r->n_prompt));
    float logprob = outcome->logits ? llm_logprob(outcome->logits, vocab, id) : outcome->logprob;
    /* a hook may choose a token of probability 0 */
    seq->broken = !(fabsf(logprob) <= FLT_MAX) && !r->logits_hook;
    seq->closed = seq->broken ||
                  (!r->ignore_end && llm_tokenizer_is_end(e->model->tokenizer, id));
    if (seq->broken) return;
    llm__follow(seq, id);
    seq->tokens[n] = id;
    if (r->top_logprobs && logits)
        llm__top_logprobs(outcome->logits, vocab, r->top_logprobs,
                          seq->top + seq->n_chosen * r->top_logprobs);
    seq->logprobs[seq->n_chosen++] = logprob;
}

/* Copy the residual stream of embedding requests to the host. */
static bool llm__fetch_hidden(llm_engine *e, llm_error *err) {
    const llm__scheduler *s = &e->scheduler;
    llm_backend *b = e->options.backend;
    int64_t dim = e->model->config.dim;
    for (int i = 0; i < s->batch.n_sequences; i++) {
        int64_t at = s->seq_first[i] * dim;
        if (s->batch_sequences[i]->request->hidden &&
            !b->download(b->context, e->hidden + at, e->network.x + at,
                         (size_t)(s->seq_count[i] * dim) * sizeof(float), err))
            return false;
    }
    return true;
}

static bool llm__choose(llm_engine *e, int first, llm_error *err) {
    double start = llm_seconds();
    llm_backend *b = e->options.backend;
    if (first == 0 && !llm__fetch_hidden(e, err)) return false;
    /* no logits are wanted: wait for the device */
    if (e->scheduler.batch.n_logits == 0) return b->sync(b->context, err);
    int n = llm__fetch(&e->sampler, &e->scheduler, &e->network, first, e->logits, err);
    double middle = llm_seconds();
    for (int i = 0; i < n; i++) llm__choose_token(e, &e->sampler.outcomes[i]);
    bool last = first + e->network.max_logits >= e->scheduler.batch.n_logits;
    bool ok = n >= 0 && (!last || llm__join_branches(e, err));
    e->statistics.forward_seconds += middle - start; /* includes the wait for the device */
    e->statistics.sampling_seconds += llm_seconds() - middle;
    return ok;
}

/* ---- Commit ---- */

/* Number of a sequence's tokens in the cache (with a draft: in both caches). */
static int llm__tokens_known(const llm__scheduler *s, const llm__sequence *seq) {
    return s->networks[1] ? (int)llm__min(seq->n_drafted, seq->n_cached) : seq->n_cached;
}

static void llm__keep_prefix(llm__scheduler *s, llm__sequence *seq) {
    llm__table_keep(&s->pool, &seq->table, seq->tokens, llm__tokens_known(s, seq));
}

/* Start all samples of a request from its prompt's blocks, which are in the cache. */
static void llm__fork(llm__scheduler *s, llm__request *request) {
    llm__sequence *first = &request->sequences[0];
    request->forked = true;
    llm__keep_prefix(s, first); /* before its first token, which may end the sequence */
    for (int i = 1; i < request->params.n_samples; i++) {
        llm__sequence *seq = &request->sequences[i];
        seq->n_cached = seq->n_seen = request->params.n_prompt;
        seq->n_drafted = first->n_drafted;
        llm__table_fork(&s->pool, &first->table, &seq->table);
        llm__enter(s, seq, LLM_DECODE, seq->n_cached);
    }
}

static llm_finish llm__emit_event(llm_engine *e, llm__sequence *seq, int32_t token, float logprob,
                                  bool accepted, llm_finish finish);

/* Make a sequence's chosen tokens known, and emit an event for each. */
static void llm__commit_tokens(llm_engine *e, llm__sequence *seq) {
    llm__scheduler *s = &e->scheduler;
    const llm__request *request = seq->request;
    const llm_request *r = &request->params;
    llm_finish finish = LLM_FINISH_NONE;
    e->statistics.decode_steps += seq->n_chosen > 0;
    int n_accepted = 0;
    for (int i = 0; i < seq->n_chosen && !finish; i++) {
        int32_t id = seq->tokens[seq->n_tokens];
        bool end = !r->ignore_end && llm_tokenizer_is_end(e->model->tokenizer, id);
        seq->n_tokens += !end;
        e->statistics.generated_tokens++;
        if (i < seq->n_tested) llm__count_proposal(&e->statistics, seq, i);
        n_accepted += i < seq->n_accepted;
        finish = end                               ? LLM_FINISH_END
                 : seq->n_tokens == request->limit ? LLM_FINISH_LENGTH
                                                   : LLM_FINISH_NONE;
        llm_event *event = &e->events[e->n_events];
        finish = llm__emit_event(e, seq, id, seq->logprobs[i], i < seq->n_accepted, finish);
        event->n_top = r->top_logprobs;
        event->top = r->top_logprobs ? seq->top + i * r->top_logprobs : NULL;
    }
    if (seq->n_tested)
        llm__trace(s->tracer,
                   llm__trace_event(LLM_TRACE_ACCEPT, request->id, seq->sample, 0, n_accepted));
    if (seq->broken && !finish) finish = llm__emit_event(e, seq, -1, 0, false, LLM_FINISH_ERROR);
    else if (request->forked && request->limit == r->n_prompt) /* max_tokens was 0 */
        finish = llm__emit_event(e, seq, -1, 0, false, LLM_FINISH_LENGTH);
    if (finish) {
        llm__end(s, seq, finish);
        return;
    }
    llm__table_trim(&s->pool, &seq->table, seq->n_cached); /* the blocks of rejected proposals */
    llm__keep_prefix(s, seq);
    if (request->forked && seq->n_cached == seq->n_tokens - 1 && seq->state == LLM_PREFILL)
        llm__set_state(s, seq, LLM_DECODE, 0);
}

/* Update a sequence after a pass: its scheduled tokens and accepted proposals (all chosen tokens
 * but the last) are now in the cache. */
static void llm__commit_sequence(llm_engine *e, llm__sequence *seq) {
    llm__request *request = seq->request;
    int prompt_left = request->params.n_prompt - seq->n_cached;
    if (prompt_left > 0)
        e->statistics.prompt_tokens += (uint64_t)llm__min(prompt_left, seq->n_scheduled);
    e->statistics.sequence_steps++;
    seq->n_cached += seq->n_scheduled + (int)llm__max(seq->n_chosen - 1, 0);
    bool fork = !request->forked && seq->n_cached == request->params.n_prompt;
    if (fork) llm__fork(&e->scheduler, request);
    for (int i = 0; i < (fork ? request->params.n_samples : 1); i++)
        llm__commit_tokens(e, fork ? &request->sequences[i] : seq);
}

/* Add the final hidden states of a sequence's tokens in this step to its request's sum. x: their
 * residual stream. */
static void llm__commit_hidden(llm_engine *e, llm__sequence *seq, const float *x) {
    llm__request *request = seq->request;
    const llm_config *c = &e->model->config;
    const float *norm = e->hidden + (int64_t)e->options.max_batch_tokens * c->dim,
                *bias = norm + c->dim;
    bool centred = llm__has_layer_norms(e->model);
    for (int p = seq->n_cached; p < seq->n_cached + seq->n_scheduled; p++, x += c->dim) {
        if (p < seq->n_seen) continue; /* already added before a preemption or a failure */
        seq->n_seen++;
        if (centred)
            llm__plain_layernorm(x, norm, bias, 1, c->dim, llm__stream_epsilon(c), request->hidden);
        else
            llm__plain_rmsnorm(x, norm, 1, c->dim, llm__stream_epsilon(c), false, request->hidden);
        for (int i = 0; i < c->dim; i++) {
            request->hidden_sum[i] += request->hidden[i];
            request->hidden[c->dim + i] = (float)(request->hidden_sum[i] / seq->n_seen);
            seq->broken = seq->broken || !(fabsf(request->hidden[i]) <= FLT_MAX);
        }
    }
}

/* Apply the result of a step. If it failed (!ok), only sequences whose tokens were chosen advance,
 * and no sequence with branches, since these may not be joined. */
static void llm__commit(llm_engine *e, bool ok) {
    llm__scheduler *s = &e->scheduler;
    double start = llm_seconds();
    bool any = false;
    for (int i = 0; ok && i < s->batch.n_sequences; i++)
        if (s->batch_sequences[i]->request->hidden)
            llm__commit_hidden(e, s->batch_sequences[i],
                               e->hidden + (int64_t)s->seq_first[i] * e->model->config.dim);
    for (int i = 0; i < s->n_sequences; i++) { /* a fork adds sequences */
        llm__sequence *seq = s->sequences[i];
        if (seq->n_scheduled) {
            any = true;
            if (seq->request->params.logits_hook) seq->n_seen += seq->n_rows;
            if (!ok && seq->branched) seq->n_chosen = 0, seq->broken = false;
            if (ok || seq->n_chosen || seq->broken) llm__commit_sequence(e, seq);
        }
        /* the draft may have processed rejected proposals */
        seq->n_drafted = (int)llm__min(seq->n_drafted, seq->n_cached);
        seq->n_scheduled = seq->depth = seq->n_proposed = seq->row = 0;
        seq->branched = false;
        seq->n_rows = seq->n_chosen = seq->n_tested = seq->n_accepted = 0;
        seq->closed = seq->broken = false;
    }
    llm__remove_ended(s);
    e->statistics.sampling_seconds += llm_seconds() - start;
    if (ok && any) e->tracer.step = ++e->statistics.steps;
}

/* ---- Events ---- */

/* Offset in text (n bytes) of the first stop text; n: none. whole: find a complete stop text; else
 * the beginning of one at the end of the text. */
static size_t llm__find_stop(const llm_request *r, const char *text, size_t n, bool whole) {
    for (size_t at = 0; at < n; at++)
        for (int i = 0; i < r->n_stop; i++) {
            size_t length = strlen(r->stop[i]), left = n - at;
            if ((length <= left) == whole && !memcmp(text + at, r->stop[i], whole ? length : left))
                return at;
        }
    return n;
}

/* Set an event's text: the text held back, the token's text and, if the sequence ends, the rest of
 * the stream. Returns whether a stop text was found. */
static bool llm__event_text(llm_engine *e, llm__sequence *seq, llm_event *event) {
    const llm_tokenizer *tokenizer = e->model->tokenizer;
    const llm_request *r = &seq->request->params;
    char *text = seq->text + seq->text_used;
    size_t n = seq->text_held;
    if (event->token >= 0) n += llm_stream_decode(tokenizer, &seq->stream, event->token, text + n);
    if (event->finish) n += llm_stream_decode(tokenizer, &seq->stream, -1, text + n);
    size_t given = llm__find_stop(r, text, n, true);
    bool stopped = given < n;
    /* hold back the possible beginning of a stop text */
    if (!stopped && !event->finish) given = llm__find_stop(r, text, n, false);
    event->text = text;
    event->text_length = given;
    seq->text_used += given;
    seq->text_held = stopped ? 0 : n - given;
    return stopped;
}

/* Emit an event for a token (-1: none). finish: why the sequence ends; 0: it does not. Returns the
 * event's `finish`, which a stop text may change. */
static llm_finish llm__emit_event(llm_engine *e, llm__sequence *seq, int32_t token, float logprob,
                                  bool accepted, llm_finish finish) {
    const llm__request *request = seq->request;
    llm_event *event = &e->events[e->n_events++];
    memset(event, 0, sizeof *event);
    event->request = request->id;
    event->sample = seq->sample;
    event->user = request->params.user;
    event->token = token;
    event->index = seq->n_tokens - request->params.n_prompt -
                   (token >= 0 && finish != LLM_FINISH_END);
    event->logprob = logprob;
    event->accepted = accepted;
    event->finish = finish;
    bool stopped = llm__event_text(e, seq, event);
    if (stopped && finish != LLM_FINISH_CANCELLED && finish != LLM_FINISH_ERROR)
        event->finish = LLM_FINISH_STOP;
    if (request->hidden && finish == LLM_FINISH_LENGTH) {
        event->last_hidden = request->hidden;
        event->mean_hidden = request->hidden + e->model->config.dim;
    }
    if (finish != LLM_FINISH_ERROR) return event->finish;
    event->error = seq->error;
    snprintf(seq->error, sizeof seq->error,
             "request %llu, sample %d: the model's %s position %d are not finite: its file may be "
             "damaged",
             (unsigned long long)request->id, seq->sample,
             request->hidden ? "hidden states up to" : "logits after", seq->n_tokens - 1);
    return event->finish;
}

bool llm_next_event(llm_engine *e, llm_event *event) {
    if (!e || !event || e->next_event == e->n_events) return false;
    *event = e->events[e->next_event++];
    return true;
}

static llm__request *llm__find_request(const llm_engine *e, uint64_t id, llm_error *err) {
    llm__request *request = e->scheduler.running.first;
    while (request && request->id != id) request = request->next;
    if (!request) request = e->scheduler.waiting.first;
    while (request && request->id != id) request = request->next;
    if (!request)
        llm__fail(err, LLM_ERROR_ARGUMENT, "request %llu does not exist, or has ended",
                  (unsigned long long)id);
    return request;
}

bool llm_cancel(llm_engine *e, uint64_t id, llm_error *err) {
    llm__clear(err);
    if (!e) return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_cancel: the engine is NULL");
    llm__request *request = llm__find_request(e, id, err);
    if (!request) return false;
    if (e->next_event == e->n_events) e->next_event = e->n_events = 0;
    for (int i = 0; i < request->params.n_samples; i++) {
        llm__sequence *seq = &request->sequences[i];
        if (seq->finish) continue;
        llm__end(&e->scheduler, seq, llm__emit_event(e, seq, -1, 0, false, LLM_FINISH_CANCELLED));
    }
    llm__remove_ended(&e->scheduler);
    return true;
}

/* Discard the events since the last step began, and free the ended requests. */
static void llm__begin_step(llm_engine *e) {
    llm__scheduler *s = &e->scheduler;
    llm__trace(&e->tracer, llm__trace_event(LLM_TRACE_STEP_BEGIN, 0, 0, 0, 0));
    llm__queue_free(&s->ended);
    e->n_events = e->next_event = 0;
    for (int i = 0; i < s->n_sequences; i++) {
        llm__sequence *seq = s->sequences[i];
        memmove(seq->text, seq->text + seq->text_used, seq->text_held);
        seq->text_used = 0;
    }
}

#ifdef LLM_DEBUG /* defined by the tests: see tests/invariants.h */
static bool llm__check_invariants(llm_engine *e, llm_error *err);
#else
static bool llm__check_invariants(llm_engine *e, llm_error *err) {
    return (void)e, (void)err, true;
}
#endif

/* Returns the result of llm_step. */
static int llm__end_step(llm_engine *e, bool ok, bool worked, llm_error *err) {
    ok = llm__check_invariants(e, err) && ok;
    int result = ok ? worked : -1;
    llm__trace(&e->tracer, llm__trace_event(LLM_TRACE_STEP_END, 0, 0, 0, result));
    return result;
}

/* ---- Creation ---- */

llm_engine_options llm_engine_defaults(void) {
    llm_engine_options o;
    memset(&o, 0, sizeof o);
    o.max_isa = LLM_ISA_BEST;
    o.pack_weights = true;
    o.block_size = 16;
    o.cache_type = LLM_F16;
    o.max_sequences = 16;
    o.max_batch_tokens = 512;
    o.max_speculation = 8;
    o.swap_bytes = 256u << 20;
    o.memory_share = 0.9f;
    o.prefix_cache = true;
    o.chunked_prefill = true;
    o.fusions = LLM_FUSE_ALL;
    return o;
}

llm_request llm_request_defaults(void) {
    llm_request r;
    memset(&r, 0, sizeof r);
    r.max_tokens = -1;
    r.n_samples = 1;
    r.sampling = llm_sampling_defaults();
    return r;
}

static bool llm__in_range(const char *name, int64_t value, int64_t low, int64_t high,
                          llm_error *err) {
    return (value >= low && value <= high) ||
           llm__refuse(err, LLM_ERROR_ARGUMENT, name, " is %lld: it must be from %lld to %lld",
                       (long long)value, (long long)low, (long long)high);
}

/* Check the options and fill in those that the caller left open. */
static bool llm__engine_options(llm_engine_options *o, const llm_model *model, llm_error *err) {
    const llm_config *c = &model->config;
    const char *note = model->context_note;
    if (o->context_length < 0 || o->context_length > c->context_length)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "context_length",
                           " is %d: the model supports 1 to %d tokens%s%s",
                           o->context_length, c->context_length, *note ? "; " : "", note);
    if (o->context_length == 0) o->context_length = c->context_length;
    if (o->cache_type != LLM_F16 && o->cache_type != LLM_F32)
        return llm__refuse(err, LLM_ERROR_UNSUPPORTED, "cache_type",
                           " is %d: it must be f16 or f32", (int)o->cache_type);
    if ((unsigned)o->preempt > LLM_PREEMPT_SWAP)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "preempt", " is %d: it must be from 0 to %d",
                           (int)o->preempt, (int)LLM_PREEMPT_SWAP);
    if (!(o->memory_share > 0 && o->memory_share <= 1))
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "memory_share",
                           " is %g: it must be above 0 and at most 1", (double)o->memory_share);
    if (o->n_threads < 0 || o->n_threads > 4096)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "n_threads",
                           " is %d: it must be from 0 (one per processor) to 4096", o->n_threads);
    return llm__in_range("block_size", o->block_size, 1, 1 << 20, err) &&
           llm__in_range("max_sequences", o->max_sequences, 1, 1 << 20, err) &&
           llm__in_range("max_batch_tokens", o->max_batch_tokens, 1, 1 << 20, err) &&
           llm__in_range("max_speculation", o->max_speculation, 1, 1024, err);
}

static llm_device_state llm__device_state(const llm_backend *b) {
    llm_device_state state;
    memset(&state, 0, sizeof state);
    if (b && b->state) b->state(b->context, &state);
    return state;
}

/* Most blocks in a pool whose size the engine chooses, unless all sequences together can use more.
 * The host needs about a hundred bytes per block, and a large GPU has room for 10^8 blocks of a
 * small model. */
enum { LLM__MANY_BLOCKS = 1 << 20 };

/* Choose the number of blocks: what fits into cache_bytes. If that is 0: on a device, what fits,
 * with the draft's, into its share of the memory; on the CPU, what all sequences can use, up to 1
 * GiB (or one context). */
static bool llm__engine_blocks(const llm_model *model, const llm_engine_options *o,
                               int64_t *n_blocks, llm_error *err) {
    uint64_t block = llm_model_cache_bytes_per_token(model, o->cache_type) *
                     (uint64_t)o->block_size;
    uint64_t context = (uint64_t)llm__divide_up(o->context_length, o->block_size);
    uint64_t all = context * (uint64_t)o->max_sequences, n = o->cache_bytes / block;
    llm_device_state device = llm__device_state(o->backend);
    if (!o->cache_bytes && device.total_bytes) {
        uint64_t both = block;
        if (o->draft)
            both += llm_model_cache_bytes_per_token(o->draft, o->cache_type) *
                    (uint64_t)o->block_size;
        n = (uint64_t)((double)device.free_bytes * (double)o->memory_share) / both;
        n = (uint64_t)llm__min((int64_t)n, llm__max((int64_t)all, LLM__MANY_BLOCKS));
        if (n == 0) {
            llm__fail(err, LLM_ERROR_MEMORY,
                      "%s: after weights and activations, %s of device memory is free, but a block "
                      "of the cache takes %s: use smaller weights or smaller steps",
                      o->backend->name, llm__show_bytes(device.free_bytes).text,
                      llm__show_bytes(both).text);
            return llm__blame(err, "max_batch_tokens");
        }
    } else if (!o->cache_bytes) {
        uint64_t budget = (1u << 30) / block;
        n = all <= budget ? all : budget > context ? budget : context;
    }
    if (n == 0)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "cache_bytes",
                           " is %s, and one block of %d tokens takes %s: a context of %d tokens "
                           "needs %s",
                           llm__show_bytes(o->cache_bytes).text, o->block_size,
                           llm__show_bytes(block).text, o->context_length,
                           llm__show_bytes(block * context).text);
    /* slot numbers are int32 */
    *n_blocks = llm__min((int64_t)n, INT32_MAX / o->block_size);
    return true;
}

/* Rows of logits in a slice: as many as fit into 16 MB, and at least one. A device that draws
 * tokens gets a row for every sequence, since each further slice reads the output matrix again. */
static int llm__engine_logits(const llm_config *c, const llm_engine_options *o) {
    int64_t rows = llm__max((16 << 20) / (int64_t)sizeof(float) / c->vocab_size, 1);
    if (o->backend->sample) rows = llm__max(rows, o->max_sequences);
    return (int)llm__min(rows, o->max_batch_tokens);
}

/* Allocate the host memory for preempted blocks once, so that steps allocate nothing. */
static bool llm__swap_init(llm__scheduler *s, llm_error *err) {
    const llm_engine_options *o = s->options;
    for (int i = 0; i < 2; i++)
        if (s->networks[i]) s->swap_block_bytes += llm__block_bytes(&s->networks[i]->cache);
    if (o->preempt != LLM_PREEMPT_SWAP) return true;
    uint64_t n = o->swap_bytes / s->swap_block_bytes;
    s->n_swap = s->n_swap_free = n > INT32_MAX ? INT32_MAX : (int64_t)n;
    s->swap = (char *)llm__aligned_new((size_t)s->n_swap * s->swap_block_bytes,
                                       "preempted blocks (LLM_PREEMPT_RECOMPUTE needs none)", err);
    s->swap_free = s->swap ? (int32_t *)llm__new((size_t)s->n_swap, sizeof(int32_t),
                                                 "the list of preempted blocks", err)
                           : NULL;
    if (!s->swap_free) return llm__blame(err, "swap_bytes");
    for (int32_t i = 0; i < (int32_t)s->n_swap; i++) s->swap_free[i] = i;
    return true;
}

static bool llm__scheduler_init(llm__scheduler *s, llm_engine *e, int64_t n_blocks,
                                llm_error *err) {
    const llm_engine_options *o = s->options = &e->options;
    uint64_t n = (uint64_t)o->max_sequences, t = (uint64_t)o->max_batch_tokens, tables = 0,
             numbers = 0;
    if (!llm__multiply(n, (uint64_t)llm__divide_up(o->context_length, o->block_size), &tables) ||
        !llm__add(tables, 6 * t + 2 * n, &numbers))
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "max_sequences", " is too large: %d",
                           o->max_sequences);
    s->statistics = &e->statistics;
    s->tracer = &e->tracer;
    s->networks[0] = &e->network;
    s->networks[1] = o->draft ? &e->speculator.draft : NULL;
    s->memory = (int32_t *)llm__new((size_t)numbers, sizeof(int32_t),
                                    "the arrays of a batch (fewer sequences need less)", err);
    s->sequences = (llm__sequence **)llm__new((size_t)n, sizeof *s->sequences,
                                              "the list of sequences", err);
    s->batch_sequences =
        (llm__sequence **)llm__new((size_t)n, sizeof *s->sequences, "the list of sequences", err);
    if (!s->memory || !s->sequences || !s->batch_sequences)
        return llm__blame(err, "max_sequences");
    if (!llm__pool_init(&s->pool, n_blocks, o->block_size, o->max_sequences, o->prefix_cache,
                        err) ||
        !llm__swap_init(s, err) || !llm__count_costs(s, err))
        return false;
    s->pool.tracer = s->tracer;
    s->tokens = s->memory;
    s->positions = s->tokens + t;
    s->slots = s->positions + t;
    s->parents = s->slots + t;
    s->logit_rows = s->parents + t;
    s->row_sequence = s->logit_rows + t;
    s->seq_first = s->row_sequence + t;
    s->seq_count = s->seq_first + n;
    s->block_tables = s->seq_count + n;
    return true;
}

static bool llm__engine_init(llm_engine *e, llm_error *err) {
    const llm_config *c = llm_model_config(e->model);
    llm_engine_options *o = &e->options;
    int64_t n_blocks = 0;
    if (!llm__engine_options(o, e->model, err)) return false;
    if (!o->backend) {
        o->backend = e->own_backend = llm_cpu_backend(o->n_threads, o->max_isa, err);
        if (!o->backend) return false;
        llm_cpu_pack_weights(o->backend, o->pack_weights);
    }
    e->tracer.call = o->trace;
    e->tracer.user = o->trace_user;
    int max_logits = llm__engine_logits(c, o);
    /* the caches come last: their size may depend on the memory left */
    if (!llm__network_load(&e->network, e->model, o->backend, o->context_length, err) ||
        !llm__network_prepare(&e->network, o, max_logits, err) ||
        !llm__speculator_init(&e->speculator, e->model, o, max_logits, err) ||
        !llm__engine_blocks(e->model, o, &n_blocks, err) ||
        !llm__load_cache(&e->network, o->cache_type, o->block_size, n_blocks, err) ||
        (o->draft &&
         !llm__load_cache(&e->speculator.draft, o->cache_type, o->block_size, n_blocks, err)) ||
        !llm__scheduler_init(&e->scheduler, e, n_blocks, err) ||
        !llm__sampler_init(&e->sampler, c->vocab_size, (int64_t)max_logits + o->max_sequences, err))
        return false;
    e->logits = (float *)llm__new((size_t)max_logits * (size_t)c->vocab_size, sizeof(float),
                                  "logits", err);
    e->hooked = (float *)llm__new((size_t)c->vocab_size, sizeof(float), "logits", err);
    size_t rows = (size_t)o->max_batch_tokens, dim = (size_t)c->dim;
    e->hidden = (float *)llm__new((rows + 2) * dim, sizeof(float), "hidden states", err);
    if (!e->logits || !e->hooked || !e->hidden) return false;
    for (int i = 0; i < 2; i++) {
        const llm_tensor *t = e->model->ends[LLM__OUTPUT_NORM + i];
        float *to = e->hidden + (rows + (size_t)i) * dim;
        if (t) llm_type_find(t->type)->unpack(t->data, to, c->dim);
    }
    e->device = llm__device_state(o->backend);
    return true;
}

llm_engine *llm_engine_create(const llm_model *model, const llm_engine_options *options,
                              llm_error *err) {
    llm__clear(err);
    if (!model) {
        llm__fail(err, LLM_ERROR_ARGUMENT, "llm_engine_create: the model is NULL");
        return NULL;
    }
    llm_engine *e = (llm_engine *)llm__new(1, sizeof *e, "an engine", err);
    if (!e) return NULL;
    e->model = model;
    e->options = options ? *options : llm_engine_defaults();
    if (llm__engine_init(e, err)) return e;
    llm_engine_free(e);
    return NULL;
}

void llm_engine_free(llm_engine *e) {
    if (!e) return;
    llm__scheduler *s = &e->scheduler;
    llm__queue_free(&s->waiting);
    llm__queue_free(&s->running);
    llm__queue_free(&s->ended);
    llm__pool_free(&s->pool);
    LLM_FREE(s->sequences);
    LLM_FREE(s->batch_sequences);
    LLM_FREE(s->memory);
    LLM_FREE(s->pass_costs[0]);
    LLM_FREE(s->pass_costs[1]);
    llm__aligned_free(s->swap);
    LLM_FREE(s->swap_free);
    llm__speculator_free(&e->speculator);
    llm__sampler_free(&e->sampler);
    llm__network_free(&e->network);
    llm_backend_free(e->own_backend);
    LLM_FREE(e->events);
    LLM_FREE(e->logits);
    LLM_FREE(e->hooked);
    LLM_FREE(e->hidden);
    LLM_FREE(e);
}

/* ---- Checks of a request, and its memory ---- */

static bool llm__check_request(const llm_engine *e, const llm_request *r, llm_error *err) {
    const llm_status wrong = LLM_ERROR_ARGUMENT;
    const llm_engine_options *o = &e->options;
    int context = o->context_length, longest = e->model->config.context_length,
        vocab = e->model->config.vocab_size;
    if (!r->prompt || r->n_prompt < 1)
        return llm__refuse(err, wrong, "prompt",
                           " is empty: it needs at least one token (such as BOS)");
    if (r->max_tokens < -1)
        return llm__refuse(err, wrong, "max_tokens",
                           " is %d: it must be -1 (to the end of the context) or more",
                           r->max_tokens);
    if (!llm__in_range("n_samples", r->n_samples, 1, o->max_sequences, err) ||
        !llm__sampling_check(&r->sampling, vocab, err))
        return false;
    if (r->n_stop < 0 || (r->n_stop > 0 && !r->stop))
        return llm__refuse(err, wrong, "n_stop", " is %d, and stop is %s", r->n_stop,
                           r->stop ? "given" : "NULL");
    for (int i = 0; i < r->n_stop; i++)
        if (!r->stop[i] || !r->stop[i][0])
            return llm__refuse(err, wrong, "stop", " text %d is empty", i);
    if (!llm__in_range("top_logprobs", r->top_logprobs, 0, llm__min(vocab, 256), err)) return false;
    if (r->speculate < LLM_SPECULATE_AUTO || r->speculate > o->max_speculation)
        return llm__refuse(err, wrong, "speculate",
                           " is %d: it must be from 0 to %d (the engine's max_speculation), or "
                           "LLM_SPECULATE_AUTO",
                           r->speculate, o->max_speculation);
    if (r->speculate && !o->draft && !r->lookup)
        return llm__refuse(err, wrong, "speculate",
                           " is %d: this needs a draft model in the engine, or lookup in the "
                           "request",
                           r->speculate);
    if (!llm__in_range("branches", r->branches, 0, LLM_MOST_BRANCHES, err)) return false;
    if (r->speculate && r->logits_hook)
        return llm__refuse(err, LLM_ERROR_UNSUPPORTED, "speculate",
                           " is %d: speculation cannot run with a logits hook", r->speculate);
    if (r->embedding && (r->n_samples > 1 || r->logits_hook || r->speculate))
        return llm__refuse(err, LLM_ERROR_UNSUPPORTED, "embedding",
                           " cannot be combined with further samples, a logits hook or "
                           "speculation");
    if (r->n_prompt > context || (r->n_prompt == context && r->max_tokens > 0 && !r->embedding)) {
        const char *note = context < longest ? "" : e->model->context_note;
        return llm__refuse(err, LLM_ERROR_CAPACITY, "context_length",
                           " is %d, and the prompt has %d tokens: shorten the prompt%s%s%s",
                           context, r->n_prompt,
                           context < longest ? ", or allow a longer context"
                                             : " (the model allows no more)",
                           *note ? "; " : "", note);
    }
    for (int i = 0; i < r->n_prompt; i++)
        if (r->prompt[i] < 0 || r->prompt[i] >= vocab)
            return llm__refuse(err, wrong, "prompt", " token %d is %d: ids go from 0 to %d", i,
                               r->prompt[i], vocab - 1);
    return true;
}

/* Make room for the present events and for those that live samples can add before the next step:
 * per sample, a token, the accepted proposals and a cancellation. */
static bool llm__reserve_events(llm_engine *e, int n_more, llm_error *err) {
    int64_t wanted = e->n_events +
                     (e->scheduler.n_live + n_more) * (e->options.max_speculation + 2);
    if (wanted <= e->max_events) return true;
    if (wanted > INT32_MAX / 2)
        return llm__fail(err, LLM_ERROR_CAPACITY, "too many requests are waiting");
    wanted *= 2;
    llm_event *events = (llm_event *)LLM_REALLOC(e->events, (size_t)wanted * sizeof *events);
    if (!events)
        return llm__no_memory(err, (uint64_t)wanted * sizeof *events, "events");
    e->events = events;
    e->max_events = (int)wanted;
    return true;
}

/* Take a piece of a request's allocation, aligned to 8 bytes. base NULL: only add up sizes. */
static void *llm__carve(char *base, uint64_t *used, uint64_t count, size_t size) {
    void *piece = base ? base + *used : NULL;
    *used += (count * size + 7) / 8 * 8;
    return piece;
}

/* Divide one allocation into a request and all memory of its samples, so that steps allocate
 * nothing. text: bytes for the text of a step's events. Returns the total size in bytes. */
static uint64_t llm__request_layout(llm__request *request, char *base, size_t text, int n_blocks,
                                    int dim) {
    const llm_request *r = &request->params;
    uint64_t used = (sizeof *request + 7) / 8 * 8,
             n_tokens = (uint64_t)request->limit + (uint64_t)request->depth;
    llm__sequence *all = (llm__sequence *)llm__carve(base, &used, (uint64_t)r->n_samples,
                                                     sizeof *all);
    char **stop = (char **)llm__carve(base, &used, (uint64_t)r->n_stop, sizeof *stop);
    for (int i = 0; i < r->n_stop; i++) {
        size_t length = strlen(r->stop[i]) + 1;
        char *copy = (char *)llm__carve(base, &used, length, 1);
        if (base) stop[i] = (char *)memcpy(copy, r->stop[i], length);
    }
    for (int i = 0; i < r->n_samples; i++) {
        llm__sequence unused, *seq = base ? &all[i] : &unused;
        seq->tokens = (int32_t *)llm__carve(base, &used, n_tokens, sizeof *seq->tokens);
        seq->table.blocks = (int32_t *)llm__carve(base, &used, (uint64_t)n_blocks, sizeof(int32_t));
        seq->logprobs = (float *)llm__carve(base, &used, (uint64_t)request->depth + 1,
                                            sizeof(float));
        seq->top = (llm_token_logprob *)llm__carve(
            base, &used, (uint64_t)(request->depth + 1) * (uint64_t)r->top_logprobs,
            sizeof *seq->top);
        seq->text = (char *)llm__carve(base, &used, text, 1);
        seq->parents = (int32_t *)llm__carve(base, &used, (uint64_t)request->depth,
                                             sizeof *seq->parents);
        seq->candidates = (llm_token_logprob *)llm__carve(
            base, &used, (uint64_t)request->depth * (uint64_t)request->branches,
            sizeof *seq->candidates);
    }
    if (r->embedding) {
        request->hidden_sum = (double *)llm__carve(base, &used, (uint64_t)dim, sizeof(double));
        request->hidden = (float *)llm__carve(base, &used, 2 * (uint64_t)dim, sizeof(float));
    }
    size_t n_bias = (size_t)r->sampling.n_bias;
    llm_logit_bias *bias = (llm_logit_bias *)llm__carve(base, &used, n_bias, sizeof *bias);
    request->sequences = all;
    if (!base) return used;
    request->params.stop = (const char *const *)stop;
    if (n_bias) memcpy(bias, r->sampling.bias, n_bias * sizeof *bias);
    request->params.sampling.bias = bias;
    return used;
}

/* Bytes for the text of a step's events: of each token that may be accepted, and the text held
 * back. */
static size_t llm__text_bytes(const llm_engine *e, const llm_request *r, int depth) {
    size_t longest = 0;
    for (int i = 0; i < r->n_stop; i++)
        longest = (size_t)llm__max((int64_t)longest, (int64_t)strlen(r->stop[i]));
    return ((size_t)depth + 3) * llm_stream_capacity(e->model->tokenizer) + 2 * longest;
}

static llm__request *llm__request_create(const llm_engine *e, const llm_request *r,
                                         llm_error *err) {
    const llm_engine_options *o = &e->options;
    const llm__pool *pool = &e->scheduler.pool;
    int room = o->context_length - r->n_prompt;
    llm__request plan; /* only to compute the size */
    memset(&plan, 0, sizeof plan);
    plan.params = *r;
    plan.limit = r->n_prompt + (r->max_tokens < 0 ? room : (int)llm__min(r->max_tokens, room));
    if (r->embedding) plan.limit = r->n_prompt;
    plan.depth = r->speculate == LLM_SPECULATE_AUTO ? o->max_speculation : r->speculate;
    plan.depth = (int)llm__min(plan.depth, o->max_batch_tokens - 1);
    plan.branches = r->branches || r->speculate != LLM_SPECULATE_AUTO ? r->branches : 4;
    plan.branches = (int)llm__min(llm__max(plan.branches, 1), plan.depth);
    plan.n_live = r->n_samples;
    int64_t blocks = llm__blocks_for(pool, plan.limit);
    if (blocks > pool->n_blocks) {
        uint64_t block = llm__block_bytes(&e->network.cache);
        llm__refuse(err, LLM_ERROR_CAPACITY, "cache_bytes",
                    " is %s (%lld blocks of %d tokens), and the request may need %s (%lld blocks): "
                    "ask for fewer tokens, or enlarge the cache",
                    llm__show_bytes((uint64_t)pool->n_blocks * block).text,
                    (long long)pool->n_blocks, pool->block_size,
                    llm__show_bytes((uint64_t)blocks * block).text, (long long)blocks);
        return NULL;
    }
    if (!o->chunked_prefill && plan.limit > o->max_batch_tokens) {
        llm__refuse(err, LLM_ERROR_CAPACITY, "max_batch_tokens",
                    " is %d, and the request may grow to %d tokens: without chunked prefill, all "
                    "of them must fit into one step; ask for fewer, or allow larger steps",
                    o->max_batch_tokens, plan.limit);
        return NULL;
    }
    size_t text = llm__text_bytes(e, r, plan.depth);
    /* the options keep the size below 2^60 */
    int dim = e->model->config.dim;
    uint64_t bytes = llm__request_layout(&plan, NULL, text, (int)blocks, dim);
    llm__request *request = (llm__request *)llm__new(1, bytes > SIZE_MAX ? SIZE_MAX : (size_t)bytes,
                                                     "a request", err);
    if (!request) return NULL;
    *request = plan;
    llm__request_layout(request, (char *)request, text, (int)blocks, dim);
    for (int i = 0; i < r->n_samples; i++) {
        llm__sequence *seq = &request->sequences[i];
        seq->request = request;
        seq->sample = i;
        seq->table.capacity = (int)blocks;
        seq->table.sample = i;
        seq->acceptance = 0.7;      /* initial estimates */
        seq->rescue = 0.3;
        seq->stream.started = true; /* the text continues a prompt: keep its first space */
        seq->n_tokens = r->n_prompt;
        memcpy(seq->tokens, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    }
    request->params.prompt = request->sequences[0].tokens;
    return request;
}

/* ---- Sessions ----
 * A session is a header, a request's settings and, for each sample, its tokens, some counts and its
 * full blocks. (The rest of a partly filled block may belong to other requests.) Each llm__move
 * function writes or reads a part. A restored request continues like a preempted one and finds its
 * blocks in the prefix cache; those that did not fit into the pool are computed again. */

typedef struct llm__session {
    char *data;  /* NULL: only count the bytes */
    size_t used; /* bytes written or read */
    size_t size; /* bytes to read; 0: write a session */
} llm__session;

typedef struct llm__session_head {
    char name[8];      /* name and version of the format */
    uint64_t engine;   /* see llm__head_of */
    uint64_t checksum; /* hash of all bytes after the header */
} llm__session_head;

/* The header of a session of this engine. `engine` is a hash of the models' shapes, the first bytes
 * of their tensors, and their cache layouts. data: the whole session, for the checksum; NULL: no
 * checksum. */
static llm__session_head llm__head_of(const llm__scheduler *s, const char *data, size_t size) {
    llm__session_head head = {"llm 3", s->swap_block_bytes, 0};
    for (int k = 0; k < 2 && s->networks[k]; k++) {
        const llm_model *model = s->networks[k]->model;
        llm_cache cache = s->networks[k]->cache;
        int layout[] = {(int)cache.type, cache.block_size, cache.keys_transposed};
        head.engine = llm__hash_bytes(head.engine, (const char *)layout, sizeof layout);
        head.engine = llm__hash_bytes(head.engine, (const char *)&model->config,
                                      sizeof model->config);
        for (int64_t i = 0; i < llm_file_n_tensors(model->file); i++) {
            const llm_tensor *t = llm_file_tensor(model->file, i);
            size_t n = t->data ? (size_t)llm__min((int64_t)t->bytes, 64) : 0;
            head.engine = llm__hash_bytes(head.engine, (const char *)t->data, n);
        }
    }
    if (data) head.checksum = llm__hash_bytes(0, data + sizeof head, size - sizeof head);
    return head;
}

/* Write or read n bytes. False: fewer are left to read. */
static bool llm__move(llm__session *m, void *item, size_t n) {
    if (m->size && n > m->size - m->used) return false;
    if (m->data && n)
        memcpy(m->size ? item : m->data + m->used, m->size ? m->data + m->used : item, n);
    m->used += n;
    return true;
}

static bool llm__move_ints(llm__session *m, int *const *ints, int n) {
    bool ok = true;
    for (int i = 0; i < n; i++) ok = ok && llm__move(m, ints[i], sizeof(int));
    return ok;
}

static bool llm__move_settings(llm__session *m, llm_request *r, bool *forked) {
    int flags = r->ignore_end | r->lookup << 1 | *forked << 2;
    int *const ints[] = {&flags,     &r->n_prompt,  &r->max_tokens,  &r->n_samples,
                         &r->n_stop, &r->priority, &r->speculate, &r->branches,
                         &r->top_logprobs};
    llm_sampling sampling = r->sampling;
    sampling.bias = NULL; /* the array follows the prompt */
    bool ok = llm__move_ints(m, ints, 9) && llm__move(m, &sampling, sizeof sampling);
    if (m->size) r->sampling = sampling;
    r->ignore_end = flags & 1;
    r->lookup = flags & 2;
    *forked = flags & 4;
    return ok;
}

/* Write or read a sample without its *n_blocks blocks. False: invalid values were read. */
static bool llm__move_sample(llm_engine *e, llm__session *m, llm__sequence *seq, int *n_blocks) {
    const llm__request *request = seq->request;
    const llm_request *r = &request->params;
    int finish = (int)seq->finish, held = (int)seq->text_held, longest = 1, n = r->n_prompt;
    int *const ints[] = {&finish, &seq->n_tokens, &seq->n_seen, &held, &seq->stream.n_held,
                         n_blocks};
    if (!llm__move_ints(m, ints, 6) || !llm__move(m, seq->stream.held, sizeof seq->stream.held) ||
        !llm__move(m, &seq->acceptance, 2 * sizeof seq->acceptance)) /* and rescue */
        return false;
    bool live = !finish, forked = request->forked;
    for (int i = 0; i < r->n_stop; i++) longest = (int)llm__max(longest, (int)strlen(r->stop[i]));
    if (finish < 0 || finish > (forked ? LLM_FINISH_ERROR : LLM_FINISH_NONE) ||
        seq->n_tokens < n + (live && forked) ||
        seq->n_tokens > (forked ? request->limit - live : n) || *n_blocks < 0 ||
        *n_blocks > (live ? (seq->n_tokens - 1) / e->options.block_size : 0) || seq->n_seen < 0 ||
        seq->n_seen > seq->n_tokens || held < 0 || held >= longest ||
        !(seq->acceptance >= 0 && seq->acceptance <= 1) ||
        !(seq->rescue >= 0 && seq->rescue <= 1) ||
        !llm__move(m, seq->tokens + n, (size_t)(seq->n_tokens - n) * sizeof(int)) ||
        !llm__move(m, seq->text + seq->text_used, (size_t)held))
        return false;
    seq->finish = (llm_finish)finish;
    seq->text_held = (size_t)held;
    while (n < seq->n_tokens && (uint32_t)seq->tokens[n] < (uint32_t)e->sampler.vocab_size) n++;
    return n == seq->n_tokens;
}

static bool llm__save(llm_engine *e, llm__request *request, llm__session *m, llm_error *err) {
    llm__scheduler *s = &e->scheduler;
    llm_request r = request->params;
    r.max_tokens = request->limit - r.n_prompt;
    m->used = sizeof(llm__session_head);
    llm__move_settings(m, &r, &request->forked);
    llm__move(m, request->sequences[0].tokens, (size_t)r.n_prompt * sizeof(int));
    llm__move(m, (void *)(uintptr_t)r.sampling.bias,
              (size_t)r.sampling.n_bias * sizeof *r.sampling.bias);
    for (int i = 0; i < r.n_stop; i++)
        llm__move(m, (void *)(uintptr_t)r.stop[i], strlen(r.stop[i]) + 1);
    for (int i = 0; i < 2 * r.n_samples; i++) { /* the blocks come last */
        llm__sequence *seq = &request->sequences[i % r.n_samples];
        int n = seq->finish ? 0 : llm__tokens_known(s, seq) / e->options.block_size;
        if (i < r.n_samples) llm__move_sample(e, m, seq, &n);
        for (int k = 0; i >= r.n_samples && k < n; k++, m->used += s->swap_block_bytes) {
            int32_t block = seq->table.blocks[k];
            char *to = m->data + m->used;
            if (!m->data) continue;
            if (seq->n_saved) memcpy(to, llm__swap_place(s, block), s->swap_block_bytes);
            else if (!llm__swap_copy(s, block, to, true, err)) return false;
        }
    }
    if (!m->data) return true;
    llm__session_head head = llm__head_of(s, m->data, m->used);
    memcpy(m->data, &head, sizeof head);
    return true;
}

void *llm_session_save(llm_engine *e, uint64_t id, size_t *size, llm_error *err) {
    llm__session m = {NULL, 0, 0};
    llm__clear(err);
    if (!e || !size) {
        llm__fail(err, LLM_ERROR_ARGUMENT, "llm_session_save: the engine or the size is NULL");
        return NULL;
    }
    llm__request *request = llm__find_request(e, id, err);
    if (request && request->hidden) {
        llm__fail(err, LLM_ERROR_UNSUPPORTED, "an embedding request cannot be saved");
        return NULL;
    }
    if (!request || !llm__save(e, request, &m, err)) return NULL;
    *size = m.used;
    m.data = (char *)llm__new(m.used, 1, "a session", err);
    if (m.data && llm__save(e, request, &m, err)) return m.data;
    LLM_FREE(m.data);
    return NULL;
}

void llm_session_free(void *session) { LLM_FREE(session); }

/* Put up to n saved blocks into the prefix cache, while the pool has free blocks. */
static void llm__restore_blocks(llm__scheduler *s, llm__sequence *seq, char *saved, int n) {
    llm__pool *pool = &s->pool;
    llm__table *table = &seq->table;
    int size = pool->block_size, i = llm__table_match(pool, table, seq->tokens, n * size) / size;
    while (i < n && llm__table_grow(pool, table, i * size, (i + 1) * size) &&
           llm__swap_copy(s, table->blocks[i], saved + (size_t)i * s->swap_block_bytes, false,
                          NULL))
        i++;
    llm__table_keep(pool, table, seq->tokens, i * size);
    llm__table_clear(pool, table);
}

/* Create the request of a session, without its blocks. r has what is not saved: the hook and
 * `user`. NULL: the session is damaged, or the error is set. */
static llm__request *llm__restore(llm_engine *e, llm__session *m, llm_request r, llm_error *err) {
    bool forked = false, ok = llm__move_settings(m, &r, &forked);
    size_t left = m->size - m->used, n_blocks = 0;
    if (!ok || r.n_prompt < 1 || (size_t)r.n_prompt > left / sizeof(int) || r.n_stop < 0 ||
        (size_t)r.n_stop > left || r.sampling.n_bias < 0 ||
        (size_t)r.sampling.n_bias >
            (left - (size_t)r.n_prompt * sizeof(int)) / sizeof *r.sampling.bias)
        return NULL;
    r.prompt = (const int32_t *)(void *)(m->data + m->used);
    m->used += (size_t)r.n_prompt * sizeof(int);
    r.sampling.bias = (const llm_logit_bias *)(void *)(m->data + m->used);
    m->used += (size_t)r.sampling.n_bias * sizeof *r.sampling.bias;
    const char **stop = (const char **)llm__new((size_t)r.n_stop, sizeof *stop, "a session", err);
    r.stop = stop;
    ok = stop != NULL;
    for (int i = 0; ok && i < r.n_stop; i++) {
        const char *end = (const char *)memchr(m->data + m->used, 0, m->size - m->used);
        stop[i] = m->data + m->used;
        ok = end != NULL;
        m->used += ok ? (size_t)(end + 1 - stop[i]) : 0;
    }
    llm__request *request = NULL;
    if (ok && llm__check_request(e, &r, err) && llm__reserve_events(e, r.n_samples, err))
        request = llm__request_create(e, &r, err);
    LLM_FREE(stop);
    if (!request) return NULL;
    request->restored = true;
    request->forked = forked;
    for (int i = 0; ok && i < r.n_samples; i++) {
        llm__sequence *seq = &request->sequences[i];
        ok = llm__move_sample(e, m, seq, &seq->n_saved);
        n_blocks += (size_t)seq->n_saved;
        request->n_live -= seq->finish != LLM_FINISH_NONE;
    }
    left = m->size - m->used;
    size_t block = e->scheduler.swap_block_bytes;
    if (ok && request->n_live > 0 && left / block == n_blocks && left % block == 0) return request;
    LLM_FREE(request);
    return NULL;
}

bool llm_session_restore(llm_engine *e, const void *session, size_t size,
                         const llm_request *callbacks, uint64_t *id, llm_error *err) {
    llm__clear(err);
    if (!e || !session)
        return llm__fail(err, LLM_ERROR_ARGUMENT,
                         "llm_session_restore: the engine or the session is NULL");
    llm__scheduler *s = &e->scheduler;
    llm_request r = llm_request_defaults();
    if (callbacks) r.logits_hook = callbacks->logits_hook, r.user = callbacks->user;
    llm__session_head head, right;
    llm__session m = {(char *)llm__new(size, 1, "a session", err), sizeof head, size};
    llm__request *request = NULL;
    /* Copies pending after a failed step would later overwrite restored blocks: make them now. */
    if (m.data && size > sizeof head && llm__run_copies(e, err)) {
        memcpy(m.data, session, size); /* the copy is aligned */
        memcpy(&head, session, sizeof head);
        right = llm__head_of(s, m.data, size);
        bool whole = !memcmp(head.name, right.name, 8) && head.checksum == right.checksum;
        if (whole && head.engine == right.engine) request = llm__restore(e, &m, r, err);
        else if (whole)
            llm__fail(err, LLM_ERROR_UNSUPPORTED,
                      "the session is from an engine with another model, draft model, "
                      "cache_type, block_size or kind of device");
    }
    if (request) llm__wait(e, request);
    else if (err && err->status == LLM_OK)
        llm__fail(err, LLM_ERROR_FORMAT, "this is not a session of this version, or it is damaged");
    if (request && id) *id = request->id;
    uint64_t root = ++s->pool.last_identity;
    for (int i = 0; request && i < request->params.n_samples; i++) {
        llm__sequence *seq = &request->sequences[i];
        int n = seq->n_saved;
        seq->n_saved = 0;
        seq->table.root = seq->table.identity = root;
        llm__restore_blocks(s, seq, m.data + m.used, n);
        m.used += (size_t)n * s->swap_block_bytes;
        if (seq->finish)
            llm__set_state(s, seq, LLM_ENDED, seq->n_tokens - request->params.n_prompt);
    }
    LLM_FREE(m.data);
    return request != NULL;
}

/* ---- Statistics ---- */

/* Slots of the pool that hold a token. Each of k sequences that share a block counts 1/k of it. */
static int64_t llm__slots_used(const llm__scheduler *s) {
    double used = 0;
    for (int i = 0; i < s->n_sequences; i++) {
        const llm__sequence *seq = s->sequences[i];
        for (int k = 0; k < seq->table.n_blocks; k++) {
            int64_t tokens = llm__min(seq->n_cached - (int64_t)k * s->pool.block_size,
                                      s->pool.block_size);
            if (tokens > 0) used += (double)tokens / s->pool.references[seq->table.blocks[k]];
        }
    }
    return (int64_t)(used + 0.5);
}

llm_statistics llm_engine_statistics(const llm_engine *e) {
    llm_statistics s;
    memset(&s, 0, sizeof s);
    if (!e) return s;
    s = e->statistics;
    const llm__scheduler *scheduler = &e->scheduler;
    const llm__pool *pool = &scheduler->pool;
    const llm__speculator *sp = &e->speculator;
    s.running = scheduler->n_sequences;
    s.waiting = scheduler->n_waiting;
    s.blocks_total = pool->n_blocks;
    s.blocks_free = pool->n_free;
    s.blocks_peak = pool->peak;
    s.block_size = pool->block_size;
    for (int64_t i = 0; i < pool->n_blocks; i++) s.blocks_shared += pool->references[i] > 1;
    s.slots_used = llm__slots_used(scheduler);
    int64_t slots = (s.blocks_total - s.blocks_free) * pool->block_size;
    s.kv_waste = slots ? 1 - (double)s.slots_used / (double)slots : 0;
    s.weight_bytes = e->model->weight_bytes +
                     (e->options.draft ? e->options.draft->weight_bytes : 0);
    const llm_cache *caches[] = {&e->network.cache, &sp->draft.cache};
    for (int i = 0; i < 2; i++)
        s.cache_bytes += 2 * (uint64_t)caches[i]->layer_bytes * (uint64_t)caches[i]->n_layers;
    s.arena_bytes = e->network.activation_bytes + sp->draft.activation_bytes;
    llm_device_state device = llm__device_state(e->options.backend);
    s.wait_seconds = device.wait_seconds - e->device.wait_seconds;
    s.device_launches = device.launches - e->device.launches;
    s.device_replays = device.replays - e->device.replays;
    s.device_bytes = device.total_bytes;
    s.device_free_bytes = device.free_bytes;
    return s;
}

llm_program *llm_engine_program(llm_engine *e, bool draft) {
    if (!e || (draft && !e->speculator.draft.model)) return NULL;
    return draft ? &e->speculator.draft.program : &e->network.program;
}

const char *llm_version(void) { return LLM_VERSION; }

const char *llm_status_name(llm_status status) {
    static const char *const names[] = {"ok",     "argument", "file",    "format", "unsupported",
                                        "memory", "capacity", "device"};
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "unknown";
}

const char *llm_finish_name(llm_finish finish) {
    static const char *const names[] = {"none", "end", "length", "stop", "cancelled", "error"};
    return (unsigned)finish < sizeof names / sizeof *names ? names[finish] : "unknown";
}

const llm_model *llm_engine_model(const llm_engine *e) { return e ? e->model : NULL; }
const llm_engine_options *llm_engine_settings(const llm_engine *e) {
    return e ? &e->options : NULL;
}

/* =====================================================================================
 * [2] Speculation: a draft proposes, the target verifies
 *
 * Decoding one sequence reads all weights for every token, and leaves the arithmetic units idle.
 * Verifying K proposals takes one pass over K + 1 rows, which costs hardly more than a pass over
 * one. So something cheap proposes tokens: a small model with the same vocabulary (the draft), or
 * earlier text that is repeated (prompt lookup). Proposals that the target agrees with are
 * accepted. The first that it rejects is replaced by its own choice, and the rest are dropped:
 *
 *     position           n-2    n-1   n     n+1   n+2            n = n_tokens
 *     known              the    cat
 *     draft, K = 3                    sat   on    a            3 small passes
 *     target                    sat   on    the   ...          1 large pass over cat, sat, on, a
 *     result                          sat   on    the          2 accepted, 1 corrected
 *
 * With greedy decoding, "agree" means the same token. With sampling (Leviathan et al. 2023, "Fast
 * Inference from Transformers via Speculative Decoding"; Chen et al. 2023), a proposal d drawn from
 * the draft's distribution q is accepted with probability min(1, p(d)/q(d)), where p is the
 * target's; else the token is drawn from max(0, p - q), normalised. A token t is then chosen with
 * probability q(t) min(1, p(t)/q(t)) + (mass rejected) x residual(t) = min(p, q) + max(0, p - q) =
 * p(t), whatever q is. p and q are the distributions after penalties, temperature and filters.
 *
 * If each proposal is accepted with probability a, a step gives 1 + a + ... + a^K tokens on
 * average.
 *
 * Proposals may form a tree, with several candidates for a position (Miao et al. 2023,
 * "SpecInfer"). One pass verifies all branches, since each token sees only its own ancestors:
 *
 *     row        0     1     2    3    4     5             row 0 is the last known token
 *     token      cat   sat   on   a    the   ran
 *     parent           0     1    2    2     0             cat -+- sat --- on -+- a
 *     position   n-1   n     n+1  n+2  n+2   n                  +- ran         +- the
 *
 * The draft makes a chain, and further branches from what else it found likely; lookup takes
 * several earlier occurrences. Of drawn candidates, the first is tested as above. If it is
 * rejected, the second is tested with p' = max(0, p - q), normalised, in place of p, and with q'
 * = q without the first; and so on. Each test ends with a token from its p, or leaves max(0, p - q)
 * to the next, so the result still follows p (Yang et al. 2024; Li et al. 2024, "EAGLE").
 *
 * Greedy proposals and those of lookup are not drawn: the target chooses a token as without
 * speculation, and a proposal is accepted if it is that token. So the output stays the same.
 *
 * Speculation plugs into the life of a request at two places. Before the pass, llm__propose writes
 * up to `depth` tokens after a sequence's known ones; the batch includes them. After the pass,
 * llm__choose follows the proposals while they are what it chooses (llm__follow); for drawn ones,
 * llm__verify chooses. Then it moves the accepted branch together in the cache. llm__commit only
 * reads counts: tokens chosen, proposals accepted.
 *
 * The draft's cache uses the same block tables as the target's. A rejected proposal leaves garbage
 * in slots after the end of the sequence: nothing reads them before the right tokens overwrite
 * them.
 * ================================================================================== */

/* ---- How many proposals ---- */

/* The cost of a pass over n rows: the bytes of weights, and the operations as the bytes that are
 * read meanwhile. It is computed, not measured, so that the number of proposals, and thus a sampled
 * text, is the same on every run. */
static double llm__pass_cost(const llm__network *net, int n) {
    enum { CACHED = 32 << 20 }; /* bytes of weights that fit into the processor's caches */
    const llm_program *program = &net->program;
    double balance = net->backend->balance > 0 ? net->backend->balance : 40, bytes = 0, work = 0;
    llm_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.n_tokens = batch.n_logits = n;
    for (int i = 0; i < program->n_ops; i++) {
        llm_cost cost = llm_op_cost(program, &program->ops[i], &batch);
        bytes += cost.weight_bytes;
        work += cost.operations / balance;
    }
    return (bytes < CACHED ? bytes / 3 : bytes) + work; /* caches: about three times as fast */
}

static bool llm__count_costs(llm__scheduler *s, llm_error *err) {
    const llm_engine_options *o = s->options;
    s->most_rows = (int)llm__min((int64_t)o->max_sequences * (1 + o->max_speculation),
                                 o->max_batch_tokens);
    for (int i = 0; i < 2 && s->networks[i]; i++) {
        s->pass_costs[i] = (double *)llm__new((size_t)s->most_rows + 1, sizeof(double),
                                              "the costs of a step", err);
        if (!s->pass_costs[i]) return llm__blame(err, "max_batch_tokens");
        for (int n = 1; n <= s->most_rows; n++)
            s->pass_costs[i][n] = llm__pass_cost(s->networks[i], n);
    }
    return true;
}

/* How many tokens to propose for a sequence, and how many of them for the same position
 * (seq->width). With AUTO: as many as give the most tokens per cost, if all sequences that decode
 * propose as many. Where proposals are drawn, the choice depends on the sequence alone, because it
 * determines which random number each token uses. */
static int llm__speculation_depth(const llm__scheduler *s, llm__sequence *seq) {
    const llm__request *request = seq->request;
    const llm_request *r = &request->params;
    /* a step chooses one token after the proposals */
    int most = (int)llm__max(llm__min(request->depth, request->limit - seq->n_tokens - 1), 0);
    seq->width = (int)llm__max(request->branches, 1);
    if (r->speculate != LLM_SPECULATE_AUTO) return most;
    bool drawn = r->sampling.temperature > 0 && !r->lookup;
    int n = drawn ? 1 : (int)llm__min(s->n_decoding, s->most_rows), rows = s->most_rows / n,
        depth = 0;
    double a = seq->acceptance, best = 1 / s->pass_costs[0][n];
    for (int width = 1, wide = seq->width; width <= wide; width++) {
        /* how likely one of a position's proposals is accepted */
        double tokens = 1, reached = 1, any = a + (1 - a) * fmin((width - 1) * seq->rescue, 1);
        for (int k = 1; k * width <= most && k * width < rows; k++, reached *= a) {
            double draft = s->pass_costs[1] && !r->lookup ? k * s->pass_costs[1][n] : 0;
            tokens += reached * any;
            double rate = tokens / (s->pass_costs[0][n * (1 + k * width)] + draft);
            if (rate <= best) continue;
            best = rate;
            depth = k * width;
            seq->width = width;
        }
    }
    /* at depth 0, retry every 16 tokens */
    return depth == 0 && seq->n_tokens % 16 == 0 ? (int)llm__min(seq->width, most) : depth;
}

/* ---- The tree of proposals ---- */

/* The row of the next proposal with this parent, after row `after`; 0: none. */
static int llm__next_child(const llm__sequence *seq, int parent, int after) {
    for (int i = (int)llm__max(after, parent); i < seq->n_proposed; i++)
        if (seq->parents[i] == parent) return i + 1;
    return 0;
}

static bool llm__has_child(const llm__sequence *seq, int row) {
    return llm__next_child(seq, row, 0) > 0;
}

/* The row of the proposal with this parent and token; 0: none. */
static int llm__find_child(const llm__sequence *seq, int parent, int32_t token) {
    int row = llm__next_child(seq, parent, 0);
    while (row && seq->tokens[seq->n_tokens - 1 + row] != token)
        row = llm__next_child(seq, parent, row);
    return row;
}

/* Propose a token after the one at row `parent`. Returns its row. */
static int llm__add_proposal(llm__sequence *seq, int parent, int32_t token) {
    int row = llm__find_child(seq, parent, token);
    if (row) return row;
    seq->branched = seq->branched || parent != seq->n_proposed;
    seq->parents[seq->n_proposed] = parent;
    seq->tokens[seq->n_tokens + seq->n_proposed] = token;
    return ++seq->n_proposed;
}

/* ---- Prompt lookup ---- */

/* Propose the tokens that followed an earlier occurrence of the last few tokens (Saxena 2023,
 * "Prompt lookup decoding"): names, quotations and code repeat. With branches, several occurrences
 * share the proposals: longest first, then latest first. */
static void llm__propose_lookup(llm__sequence *seq) {
    int n = seq->n_tokens, left = seq->width;
    int32_t *tokens = seq->tokens;
    for (int length = 3; length >= 1; length--)
        for (int start = n - length - 1; start >= 0; start--) {
            if (memcmp(tokens + start, tokens + n - length, (size_t)length * sizeof *tokens))
                continue;
            int before = seq->n_proposed, row = 0,
                end = before + (int)llm__divide_up(seq->depth - before, left);
            for (int from = start + length; from < n && seq->n_proposed < end; from++)
                row = llm__add_proposal(seq, row, tokens[from]);
            left -= seq->n_proposed > before;
            if (left == 0 || seq->n_proposed == seq->depth) return;
        }
}

/* ---- A draft model ---- */

/* Drawn proposals use separate random numbers: lane 0 is for plain sampling; 1 draws a proposal, 2
 * tests it, 3 draws the correction. Lanes 5 and 6, 9 and 10, ... are for further branches. */
static double llm__lane_random(const llm__sequence *seq, uint64_t lane, int n) {
    const llm_request *r = &seq->request->params;
    return llm_random(r->sampling.seed, (uint64_t)seq->sample | lane << 32,
                      (uint64_t)(n - r->n_prompt));
}

/* The distribution that a sequence's proposal number i was drawn from. */
static float *llm__proposal_distribution(const llm__speculator *sp, const llm__sequence *seq,
                                         int i) {
    return sp->probabilities +
           ((size_t)seq->index * (size_t)sp->max_depth + (size_t)i) * (size_t)sp->vocab_size;
}

/* Draw a token from max(0, p - q), normalised. q NULL: 0. If that is 0 everywhere: `last`. */
static int32_t llm__draw_residual(const float *p, const float *q, int n, int32_t last, double u) {
    double total = 0;
    for (int pass = 0; pass < 2; pass++) { /* add up, then find the token at u x total */
        double point = u * total;
        for (int i = 0; i < n; i++) {
            double more = (double)p[i] - (q ? (double)q[i] : 0);
            if (more <= 0) continue;
            if (pass == 0) {
                total += more;
                continue;
            }
            last = i;
            point -= more;
            if (point < 0) break;
        }
    }
    return last;
}

/* Append the draft's next proposal, drawn like a sampled token. */
static void llm__propose_token(llm__speculator *sp, llm__sampler *sampler,
                               const llm__outcome *outcome) {
    llm__sequence *seq = outcome->sequence;
    const llm_sampling *p = &seq->request->params.sampling;
    int i = seq->n_proposed, n = seq->n_tokens + i, width = seq->width;
    int32_t id = outcome->id;
    if (p->temperature > 0) {
        float *q = llm__proposal_distribution(sp, seq, i);
        llm__distribution(sampler, p, outcome->logits, llm__past_of(seq, n), q);
        id = llm__draw_residual(q, NULL, sp->vocab_size, 0, llm__lane_random(seq, 1, n));
    } else if (outcome->logits) { /* greedy verification needs no distribution */
        id = llm__sample(sampler, p, outcome->logits, llm__past_of(seq, n), 0, 0);
        if (width > 1)
            llm__top_logprobs(outcome->logits, sp->vocab_size, width, seq->candidates + i * width);
    }
    llm__add_proposal(seq, i, id);
}

/* Propose up to `width` - 1 more tokens for each position of the draft's chain, until there are
 * `depth`: the second for each position, then the third, and so on. If greedy, they are the draft's
 * likeliest; otherwise they are drawn without replacement. */
static void llm__branch_out(llm__speculator *sp, llm__sequence *seq) {
    int width = seq->width, chain = seq->n_proposed, vocab = sp->vocab_size;
    bool greedy = seq->request->params.sampling.temperature == 0;
    for (int i = chain; i < width * chain && seq->n_proposed < seq->depth; i++) {
        int row = i % chain, rank = i / chain;
        int32_t id = -1;
        if (greedy) {
            for (int k = 0; k < width && id < 0; k++) {
                id = seq->candidates[row * width + k].token;
                if (id >= vocab || llm__find_child(seq, row, id)) id = -1;
            }
        } else {
            float *q = sp->target; /* free until the target's pass */
            memcpy(q, llm__proposal_distribution(sp, seq, row), (size_t)vocab * sizeof *q);
            for (int child = 0; (child = llm__next_child(seq, row, child)) > 0;)
                q[seq->tokens[seq->n_tokens - 1 + child]] = 0;
            id = llm__draw_residual(q, NULL, vocab, -1,
                                    llm__lane_random(seq, 1 + 4 * (uint64_t)rank,
                                                     seq->n_tokens + row));
        }
        if (id >= 0) llm__add_proposal(seq, row, id);
    }
}

/* How many of a sequence's proposals the draft makes one after another. */
static int llm__chain_length(const llm__sequence *seq) {
    return (int)llm__divide_up(seq->depth, seq->width);
}

/* How many tokens of a sequence the draft must have processed after its next pass: in a prompt, as
 * many as the target; else as many as its next proposal needs. 0: nothing to do. */
static int llm__draft_goal(const llm__sequence *seq) {
    if (!seq->n_scheduled || seq->request->depth == 0 || seq->request->params.lookup) return 0;
    if (seq->state == LLM_PREFILL) return seq->n_cached + seq->n_scheduled;
    return seq->n_proposed < llm__chain_length(seq) ? seq->n_tokens + seq->n_proposed : 0;
}

/* One pass of the draft over prompt chunks and single tokens. *more: whether there was work. */
static bool llm__draft_pass(llm_engine *e, bool *more, llm_error *err) {
    llm__scheduler *s = &e->scheduler;
    llm__speculator *sp = &e->speculator;
    llm_batch *batch = &s->batch;
    const llm__network *net = &sp->draft;
    llm__batch_clear(s);
    for (int i = 0; i < s->n_sequences; i++) {
        llm__sequence *seq = s->sequences[i];
        int goal = llm__draft_goal(seq), first = seq->n_drafted;
        int count = (int)llm__min(goal - first, s->options->max_batch_tokens - batch->n_tokens);
        if (count <= 0) continue;
        bool propose = goal >= seq->n_tokens && seq->depth > 0;
        llm__batch_add(s, seq, first, count, propose ? goal - 1 : INT_MAX);
    }
    *more = batch->n_tokens > 0;
    if (!*more) return true;
    llm__batch_finish(s);
    for (int first = 0; first == 0 || first < batch->n_logits; first += net->max_logits) {
        if (!llm__run(net, batch, first, err)) return false;
        int n = batch->n_logits ? llm__fetch(&e->sampler, s, net, first, sp->logits, err) : 0;
        for (int i = 0; i < n; i++) llm__propose_token(sp, &e->sampler, &e->sampler.outcomes[i]);
        if (n < 0) return false;
    }
    if (!net->backend->sync(net->backend->context, err)) return false;
    for (int i = 0; i < batch->n_sequences; i++)
        s->batch_sequences[i]->n_drafted += batch->seq_count[i];
    return true;
}

/* Before the pass: write this step's proposals after the known tokens. */
static bool llm__propose(llm_engine *e, llm_error *err) {
    llm__scheduler *s = &e->scheduler;
    double start = llm_seconds();
    bool more = e->speculator.draft.model != NULL, ok = true;
    for (int i = 0; i < s->n_sequences; i++)
        if (s->sequences[i]->request->params.lookup && s->sequences[i]->depth > 0)
            llm__propose_lookup(s->sequences[i]);
    while (ok && more) ok = llm__draft_pass(e, &more, err);
    for (int i = 0; ok && i < s->n_sequences; i++)
        if (s->sequences[i]->n_proposed > 0 && !s->sequences[i]->request->params.lookup)
            llm__branch_out(&e->speculator, s->sequences[i]);
    e->statistics.draft_seconds += llm_seconds() - start;
    return ok;
}

/* ---- Verification ---- */

/* p, q: a proposal's probabilities under target and draft; u: uniform in [0, 1). */
static bool llm__accept(double p, double q, double u) { return u * q < p; }

/* Reject proposal `id`: p = max(0, p - q), and q loses the probability of `id`; normalise both. */
static void llm__reject(float *p, float *q, int n, int32_t id) {
    double total = 0, left = 0;
    for (int i = 0; i < n; i++) {
        p[i] = p[i] > q[i] ? p[i] - q[i] : 0;
        if (i == id) q[i] = 0;
        total += (double)p[i];
        left += (double)q[i];
    }
    for (int i = 0; i < n; i++) {
        if (total > 0) p[i] = (float)((double)p[i] / total);
        if (left > 0) q[i] = (float)((double)q[i] / left);
    }
}

/* Choose a sequence's next token where proposals were drawn, after the target's pass. Returns the
 * first accepted proposal, or the correction. After each rejection, p becomes its rest, and q loses
 * the rejected token, which is not drawn again. */
static int32_t llm__verify(llm__speculator *sp, llm__sampler *sampler, llm__sequence *seq,
                           const float *logits) {
    int n = seq->n_tokens + seq->n_chosen, vocab = sp->vocab_size, row = 0, next;
    float *p = sp->target, *q = llm__proposal_distribution(sp, seq, seq->row);
    llm__distribution(sampler, &seq->request->params.sampling, logits, llm__past_of(seq, n), p);
    for (uint64_t lane = 2; (next = llm__next_child(seq, seq->row, row)) > 0; lane += 4) {
        if (row) llm__reject(p, q, vocab, seq->tokens[seq->n_tokens - 1 + row]);
        row = next;
        int32_t id = seq->tokens[seq->n_tokens - 1 + row];
        if (llm__accept((double)p[id], (double)q[id], llm__lane_random(seq, lane, n))) return id;
    }
    return llm__draw_residual(p, q, vocab, seq->tokens[seq->n_tokens - 1 + row],
                              llm__lane_random(seq, 3, n));
}

/* Advance to the row of a sequence's chosen token if it was proposed; if not, choosing ends. */
static void llm__follow(llm__sequence *seq, int32_t id) {
    int row = llm__find_child(seq, seq->row, id), first = llm__next_child(seq, seq->row, 0),
        others = 0;
    for (int child = first; child; others++) child = llm__next_child(seq, seq->row, child);
    seq->n_tested += first > 0;
    if (first) seq->acceptance += 0.1 * ((row == first) - seq->acceptance);
    if (--others > 0 && row != first)
        seq->rescue += 0.1 * ((row > 0) / (double)others - seq->rescue);
    if (!row) {
        seq->closed = true;
        return;
    }
    /* the draft has processed its chain only: rows 1, 2, ... */
    if (row != seq->n_accepted + 1)
        seq->n_drafted = (int)llm__min(seq->n_drafted, seq->n_tokens + seq->n_accepted);
    seq->row = seq->parents[seq->n_accepted++] = row;
}

/* Make the slots of accepted branches contiguous in the cache. */
static bool llm__join_branches(llm_engine *e, llm_error *err) {
    llm__scheduler *s = &e->scheduler;
    llm_backend *b = e->options.backend;
    int32_t *from = s->parents, *to = s->tokens; /* the pass no longer needs them */
    int n = 0;
    for (int i = 0; i < s->n_sequences; i++) {
        const llm__sequence *seq = s->sequences[i];
        for (int k = 0; k < seq->n_accepted && seq->branched; k++) {
            if (seq->parents[k] == k + 1) continue;
            from[n] = llm__table_slot(&s->pool, &seq->table, seq->n_tokens - 1 + seq->parents[k]);
            to[n++] = llm__table_slot(&s->pool, &seq->table, seq->n_tokens + k);
        }
    }
    if (n) b->copy_slots(b->context, &e->network.cache, from, to, n);
    return !n || b->sync(b->context, err);
}

static void llm__count_proposal(llm_statistics *statistics, const llm__sequence *seq, int i) {
    bool accepted = i < seq->n_accepted;
    int column = i < 15 ? i : 15;
    statistics->proposed++;
    statistics->proposed_at[column]++;
    statistics->accepted += accepted;
    statistics->accepted_at[column] += accepted;
}

/* ---- Creation of the speculator ---- */

static void llm__speculator_free(llm__speculator *sp) {
    llm__network_free(&sp->draft);
    LLM_FREE(sp->logits);
    LLM_FREE(sp->probabilities);
    LLM_FREE(sp->target);
}

/* Proposals are token ids, so both models must have the same vocabulary. */
static bool llm__same_vocabulary(const llm_model *target, const llm_model *draft, llm_error *err) {
    const llm_tokenizer *a = target->tokenizer, *b = draft->tokenizer;
    const char *path = llm_file_path(draft->file);
    int32_t n = llm_tokenizer_size(a), n_draft = llm_tokenizer_size(b);
    if (n != n_draft)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "draft",
                           ": %s has a vocabulary of %d tokens, and the model one of %d: they must "
                           "be the same",
                           path, n_draft, n);
    for (int32_t i = 0; i < n; i++) {
        llm_string x = llm_tokenizer_text(a, i), y = llm_tokenizer_text(b, i);
        if (llm__compare_strings(&x, &y))
            return llm__refuse(err, LLM_ERROR_ARGUMENT, "draft",
                               ": %s has another vocabulary: its token %d is \"%s\", and the "
                               "model's is \"%s\"",
                               path, i, llm__show(y).text, llm__show(x).text);
    }
    return true;
}

/* Load the draft onto the target's device. o->draft NULL: only lookup. */
static bool llm__speculator_init(llm__speculator *sp, const llm_model *target,
                                 const llm_engine_options *o, int max_logits, llm_error *err) {
    const llm_model *draft = o->draft;
    size_t vocab = (size_t)target->config.vocab_size;
    sp->max_depth = o->max_speculation;
    sp->vocab_size = target->config.vocab_size;
    if (!(sp->target = (float *)llm__new(vocab, sizeof(float), "a distribution", err)))
        return false;
    if (!draft) return true;
    if (!llm__same_vocabulary(target, draft, err)) return false;
    if (draft->config.context_length < o->context_length)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "context_length",
                           " is %d, and the draft, %s, was trained for %d tokens: set it to that "
                           "or less%s%s",
                           o->context_length, llm_file_path(draft->file),
                           draft->config.context_length, *draft->context_note ? "; " : "",
                           draft->context_note);
    sp->logits = (float *)llm__new((size_t)max_logits * vocab, sizeof(float), "the draft's logits",
                                   err);
    sp->probabilities = (float *)llm__new(
        (size_t)o->max_sequences * (size_t)o->max_speculation * vocab, sizeof(float),
        "the draft's distributions (fewer proposals or fewer sequences need less)", err);
    if (!sp->logits || !sp->probabilities) return llm__blame(err, "max_speculation");
    return llm__network_load(&sp->draft, draft, o->backend, o->context_length, err) &&
           llm__network_prepare(&sp->draft, o, max_logits, err);
}

/* =====================================================================================
 * [3] Sampling: from logits to a token
 *
 * The model outputs one logit per vocabulary entry, and softmax turns the logits into
 * probabilities. A text of only the likeliest tokens (greedy) tends to fall into loops; a draw from
 * the full distribution often hits one of its many unlikely tokens. So the distribution is shaped
 * first, in this order:
 *
 *     bias                 added to the logits of the tokens that the request lists
 *     repetition penalty   lower the logits of recent tokens (Keskar et al. 2019, "CTRL")
 *     presence, frequency  subtracted from the logits of generated tokens: once, per occurrence
 *     temperature          logits / T: below 1 sharpens, above 1 flattens
 *     top-k                keep the k likeliest tokens (Fan et al. 2018)
 *     top-p                keep the likeliest until their sum reaches p (Holtzman et al. 2019)
 *     min-p                keep tokens of min_p x the top probability or more (Nguyen et al. 2024)
 *
 * Each of the last three filters keeps a prefix of the tokens sorted by probability; together they
 * keep the shortest prefix, usually a few dozen of 100,000 tokens. Only those are sorted: a heap
 * yields the next likeliest token until a filter stops.
 *
 * Likelihoods (unnormalised probabilities) are integers, so their sum is the same in any order. A
 * GPU, which adds in parallel (chapter [7] of llm.cu), draws the same token from the same logits.
 * ================================================================================== */

/* A random number in [0, 1), times 2^64. The upper 53 bits are random, the lower 11 are 0. */
static uint64_t llm__random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
    return llm__mix(llm__mix(llm__mix(seed) ^ stream) ^ index) >> 11 << 11;
}

double llm_random(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t bits = llm__random_bits(seed, stream, index) >> 11;
    return (double)bits * 0x1p-53; /* all multiples of 2^-53 are equally likely */
}

/* a x b / 2^64, rounded down. */
static uint64_t llm__multiply_high(uint64_t a, uint64_t b) {
    uint64_t al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32;
    uint64_t middle = ah * bl + (al * bl >> 32), low = (middle & 0xffffffffu) + al * bh;
    return ah * bh + (middle >> 32) + (low >> 32);
}

/* ln(sum(exp(x))), without overflow: the largest x is subtracted first */
static double llm__log_sum_exp(const float *x, int n) {
    float most = x[llm__argmax(x, n)];
    if (!(fabsf(most) <= FLT_MAX)) return most;
    return (double)most + log(llm__sum_exp(x, n, most));
}

float llm_logprob(const float *logits, int n, int32_t id) {
    if (id < 0 || id >= n) return -INFINITY;
    double total = llm__log_sum_exp(logits, n);
    return total > -INFINITY ? (float)((double)logits[id] - total) : -INFINITY;
}

/* List the k likeliest tokens, in descending order. */
static void llm__top_logprobs(const float *logits, int n, int k, llm_token_logprob *top) {
    double total = llm__log_sum_exp(logits, n);
    int found = 0;
    for (int i = 0; i < n; i++) {
        if (found == k && !(logits[i] > top[k - 1].logprob)) continue;
        int at = found < k ? found++ : k - 1;
        for (; at > 0 && logits[i] > top[at - 1].logprob; at--) top[at] = top[at - 1];
        top[at].token = i;
        top[at].logprob = logits[i];
    }
    for (int i = 0; i < found; i++) top[i].logprob = (float)((double)top[i].logprob - total);
}

llm_sampling llm_sampling_defaults(void) {
    llm_sampling s;
    memset(&s, 0, sizeof s);
    s.top_p = 1;
    s.repetition_penalty = 1;
    s.penalty_window = 64;
    return s;
}

static bool llm__sampling_check(const llm_sampling *s, int vocab_size, llm_error *err) {
    const llm_status wrong = LLM_ERROR_ARGUMENT;
    if (!(s->temperature >= 0) || s->temperature > 1e6f)
        return llm__refuse(err, wrong, "temperature", " is %g: it must be from 0 (greedy) to 1e6",
                           (double)s->temperature);
    if (s->top_k < 0)
        return llm__refuse(err, wrong, "top_k", " is %d: it must be 0 (all) or more", s->top_k);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return llm__refuse(err, wrong, "top_p", " is %g: it must be above 0 and at most 1",
                           (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return llm__refuse(err, wrong, "min_p", " is %g: it must be from 0 to 1",
                           (double)s->min_p);
    if (!(s->repetition_penalty > 0) || s->repetition_penalty > 1e6f)
        return llm__refuse(err, wrong, "repetition_penalty",
                           " is %g: it must be above 0 (1: none), and at most 1e6",
                           (double)s->repetition_penalty);
    if (s->penalty_window < 0)
        return llm__refuse(err, wrong, "penalty_window",
                           " is %d: it must be 0 (all tokens) or more", s->penalty_window);
    if (!(fabsf(s->presence_penalty) <= 1e6f))
        return llm__refuse(err, wrong, "presence_penalty", " is %g: it must be from -1e6 to 1e6",
                           (double)s->presence_penalty);
    if (!(fabsf(s->frequency_penalty) <= 1e6f))
        return llm__refuse(err, wrong, "frequency_penalty", " is %g: it must be from -1e6 to 1e6",
                           (double)s->frequency_penalty);
    if (s->n_bias < 0 || s->n_bias > vocab_size || (s->n_bias && !s->bias))
        return llm__refuse(err, wrong, "n_bias", " is %d, and bias is %s", s->n_bias,
                           s->bias ? "given" : "NULL");
    for (int i = 0; i < s->n_bias; i++)
        if (s->bias[i].token < 0 || s->bias[i].token >= vocab_size ||
            !(fabsf(s->bias[i].bias) <= 1e6f))
            return llm__refuse(err, wrong, "bias",
                               " %d is %g for token %d: it must be from -1e6 to 1e6, and ids go "
                               "from 0 to %d",
                               i, (double)s->bias[i].bias, s->bias[i].token, vocab_size - 1);
    return true;
}

static void llm__sampler_free(llm__sampler *s) {
    LLM_FREE(s->heap);
    LLM_FREE(s->kept);
    LLM_FREE(s->places);
    LLM_FREE(s->adjustments);
    LLM_FREE(s->draws);
    LLM_FREE(s->outcomes);
    LLM_FREE(s->ids);
    LLM_FREE(s->logprobs);
    memset(s, 0, sizeof *s);
}

/* The largest likelihood is 2^bits: at most 2^44, and small enough that n of them add up to less
 * than 2^63. */
static int llm__likelihood_bits(int n) {
    int bits = 44;
    while ((int64_t)n >> (63 - bits)) bits--;
    return bits;
}

/* max_draws: most tokens drawn from a slice of logits */
static bool llm__sampler_init(llm__sampler *s, int vocab_size, int64_t max_draws, llm_error *err) {
    size_t draws = (size_t)max_draws;
    s->vocab_size = vocab_size;
    s->bits = llm__likelihood_bits(vocab_size);
    s->max_adjustments = vocab_size + 64 * max_draws; /* 64 per draw, and one list of all tokens */
    s->heap = (llm__token_logit *)llm__new((size_t)vocab_size, sizeof *s->heap, "the sampler", err);
    s->kept = (llm__token_logit *)llm__new((size_t)vocab_size, sizeof *s->kept, "the sampler", err);
    s->places = (int32_t *)llm__new((size_t)vocab_size, sizeof *s->places, "the sampler", err);
    s->adjustments = (llm_adjustment *)llm__new((size_t)s->max_adjustments, sizeof *s->adjustments,
                                                "the sampler", err);
    s->draws = (llm_draw *)llm__new(draws, sizeof *s->draws, "the sampler", err);
    s->outcomes = (llm__outcome *)llm__new(draws, sizeof *s->outcomes, "the sampler", err);
    s->ids = (int32_t *)llm__new(draws, sizeof *s->ids, "the sampler", err);
    s->logprobs = (float *)llm__new(draws, sizeof *s->logprobs, "the sampler", err);
    if (s->heap && s->kept && s->places && s->adjustments && s->draws && s->outcomes && s->ids &&
        s->logprobs)
        return true;
    llm__sampler_free(s);
    return false;
}

/* Does a come before b: by logit, then by id? The order is the same on every device. */
static bool llm__likelier(llm__token_logit a, llm__token_logit b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

static void llm__sift_down(llm__token_logit *heap, int n, int i) {
    llm__token_logit moving = heap[i];
    for (;;) {
        int child = 2 * i + 1;
        if (child >= n) break;
        if (child + 1 < n && llm__likelier(heap[child + 1], heap[child])) child++;
        if (!llm__likelier(heap[child], moving)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = moving;
}

/* Find a token's entry in a list of *n adjustments; add one if there is none. */
static llm_adjustment *llm__adjustment(llm__sampler *s, llm_adjustment *list, int *n, int32_t id) {
    int32_t place = s->places[id]; /* of this list, or left by an earlier one */
    if (place < *n && list[place].token == id) return &list[place];
    s->places[id] = place = (*n)++;
    list[place].token = id;
    list[place].bias = list[place].minus = 0;
    list[place].penalty = 1;
    return &list[place];
}

/* List the changes to logits before a draw, one entry per token. Returns their number. */
static int llm__adjust(llm__sampler *s, const llm_sampling *p, llm__past past, llm_adjustment *to) {
    int n = 0, window = p->penalty_window && p->penalty_window < past.n ? p->penalty_window
                                                                        : past.n;
    for (int i = 0; i < p->n_bias; i++)
        llm__adjustment(s, to, &n, p->bias[i].token)->bias += p->bias[i].bias;
    if (p->repetition_penalty != 1)
        for (int i = past.n - window; i < past.n; i++)
            llm__adjustment(s, to, &n, past.tokens[i])->penalty = p->repetition_penalty;
    if (p->presence_penalty == 0 && p->frequency_penalty == 0) return n;
    for (int i = past.n_prompt; i < past.n; i++) /* `minus` is a count at first */
        llm__adjustment(s, to, &n, past.tokens[i])->minus++;
    for (int i = 0; i < n; i++)
        if (to[i].minus > 0)
            to[i].minus = fmaf(p->frequency_penalty, to[i].minus, p->presence_penalty);
    return n;
}

/* fmaf rounds once on every machine; a compiler may or may not do so for x * y - z. */
static float llm__adjusted(float x, const llm_adjustment *a) {
    x += a->bias;
    return x > 0 ? x / a->penalty - a->minus : fmaf(x, a->penalty, -a->minus);
}

/* 2^bits x e^((logit - most) / T), where `most` is the largest logit. Integer arithmetic gives the
 * same result on every machine: e^-x = 2^-y, where y = x / ln 2 has 24 fractional bits. Rounding y
 * up to `whole` adds a fraction f, so 2^-y = 2^f >> whole, and 2^f = 1 + f (c0 + f (c1 + ...)), a
 * polynomial that is exact to 5e-9 (`terms` holds its coefficients x 2^32). A larger logit never
 * gets a smaller likelihood: one step of y changes the sum by more than its rounding error. */
static uint64_t llm__likelihood(const llm_sampling *p, float logit, float most, int bits) {
    static const uint32_t terms[] = {2977044387, 1031770177, 238335983,
                                     41505391,   5394481,    916877};
    float per_logit = 24204406.0f / p->temperature; /* 2^24 / ln 2 / T */
    float y = (most - logit) * (per_logit <= FLT_MAX ? per_logit : FLT_MAX);
    if (!(y < 45 * 16777216.0f)) return 0;
    uint32_t whole = ((uint32_t)y + 0xffffff) >> 24, f = (0 - (uint32_t)y) << 8, sum = terms[5];
    for (int i = 4; i >= 0; i--) sum = terms[i] + (uint32_t)((uint64_t)f * sum >> 32);
    return (((uint64_t)1 << 32) + ((uint64_t)f * sum >> 32)) << (bits - 32) >> whole;
}

/* Copy the tokens of `heap` (vocab_size) that pass the filters to `kept`, likeliest first. Returns
 * their number. *mass: the sum of their likelihoods. */
static int llm__filter(llm__sampler *s, const llm_sampling *p, uint64_t *mass) {
    int n = s->vocab_size, n_kept = 0;
    int limit = p->top_k && p->top_k < n ? p->top_k : n;
    bool all = limit == n;
    for (int i = n / 2 - 1; i >= 0; i--) llm__sift_down(s->heap, n, i);
    float most = s->heap[0].logit;
    uint64_t least = (uint64_t)((double)p->min_p * (double)((uint64_t)1 << s->bits));

    /* top-p is a share of the mass of all tokens or, with top-k, of the k likeliest, whose mass is
     * known only after the loop. */
    uint64_t total = 0, sum = 0;
    if (all && p->top_p < 1)
        for (int i = 0; i < n; i++) total += llm__likelihood(p, s->heap[i].logit, most, s->bits);
    uint64_t enough = all && p->top_p < 1 ? (uint64_t)((double)p->top_p * (double)total)
                                          : UINT64_MAX;
    for (; n_kept < limit; n_kept++) {
        uint64_t weight = llm__likelihood(p, s->heap[0].logit, most, s->bits);
        if (n_kept && (sum >= enough || weight < least)) break;
        s->kept[n_kept] = s->heap[0];
        sum += weight;
        s->heap[0] = s->heap[--n];
        llm__sift_down(s->heap, n, 0);
    }
    if (!all && p->top_p < 1) {
        /* the rest of the k tokens, which min-p removed, still count towards the mass */
        total = sum;
        for (int i = n_kept; i < limit; i++) {
            total += llm__likelihood(p, s->heap[0].logit, most, s->bits);
            s->heap[0] = s->heap[--n];
            llm__sift_down(s->heap, n, 0);
        }
        int n_mass = 0;
        enough = (uint64_t)((double)p->top_p * (double)total);
        for (sum = 0; n_mass < n_kept && (n_mass == 0 || sum < enough); n_mass++)
            sum += llm__likelihood(p, s->kept[n_mass].logit, most, s->bits);
        n_kept = n_mass;
    }
    *mass = sum;
    return n_kept;
}

/* A distribution after penalties, temperature and filters. */
typedef struct llm__shaped {
    const llm__token_logit *kept; /* (n) tokens that can be drawn */
    int n;         /* length of `kept` */
    float most;    /* the largest logit */
    int bits;      /* the likelihood of the largest logit is 2^bits */
    uint64_t mass; /* sum of the likelihoods of `kept` */
} llm__shaped;

/* logits (vocab_size), list (n). The result points into s. */
static llm__shaped llm__shape(llm__sampler *s, const llm_sampling *p, const float *logits,
                              const llm_adjustment *list, int n) {
    for (int i = 0; i < s->vocab_size; i++) {
        s->heap[i].logit = logits[i] == logits[i] ? logits[i] : -INFINITY; /* never draw NaN */
        s->heap[i].id = i;
    }
    for (int i = 0; i < n; i++)
        s->heap[list[i].token].logit = llm__adjusted(s->heap[list[i].token].logit, &list[i]);
    int32_t best = 0;
    for (int i = 1; i < s->vocab_size; i++)
        if (llm__likelier(s->heap[i], s->heap[best])) best = i;

    llm__shaped shaped = {s->heap, s->vocab_size, s->heap[best].logit, s->bits, 0};
    if (p->temperature == 0 || !(fabsf(shaped.most) <= FLT_MAX)) { /* greedy, or infinite logits */
        shaped.kept = &s->heap[best];
        shaped.n = 1;
        shaped.mass = 1;
    } else if (p->top_k || p->top_p < 1 || p->min_p > 0) {
        shaped.n = llm__filter(s, p, &shaped.mass);
        shaped.kept = s->kept;
    } else {
        for (int i = 0; i < shaped.n; i++)
            shaped.mass += llm__likelihood(p, shaped.kept[i].logit, shaped.most, s->bits);
    }
    return shaped;
}

static uint64_t llm__shaped_weight(const llm__shaped *shaped, const llm_sampling *p, int i) {
    return shaped->n == 1 ? shaped->mass
                          : llm__likelihood(p, shaped->kept[i].logit, shaped->most, shaped->bits);
}

/* Draw a token: the first at which the running sum of likelihoods exceeds a random share of the
 * mass. random: a number in [0, 1), times 2^64. */
static int32_t llm__sample_at(llm__sampler *s, const llm_sampling *p, const float *logits,
                              const llm_adjustment *list, int n, uint64_t random) {
    if (p->temperature == 0 && n == 0) return llm__argmax(logits, s->vocab_size);
    llm__shaped shaped = llm__shape(s, p, logits, list, n);
    uint64_t point = llm__multiply_high(random, shaped.mass);
    int i = 0;
    for (uint64_t passed = 0; i < shaped.n - 1; i++) /* the last token needs no test */
        if ((passed += llm__shaped_weight(&shaped, p, i)) > point) break;
    return shaped.kept[i].id;
}

/* index: tokens generated so far. */
static int32_t llm__sample(llm__sampler *s, const llm_sampling *p, const float *logits,
                           llm__past past, uint64_t stream, uint64_t index) {
    int n = llm__adjust(s, p, past, s->adjustments);
    return llm__sample_at(s, p, logits, s->adjustments, n,
                          llm__random_bits(p->seed, stream, index));
}

int32_t llm_draw_token(const llm_draw *draw, const float *logits, int n) {
    llm__sampler s;
    if (!llm__sampler_init(&s, n, 1, NULL)) return -1;
    int32_t id = llm__sample_at(&s, &draw->sampling, logits, draw->adjustments,
                                draw->n_adjustments, draw->random);
    llm__sampler_free(&s);
    return id;
}

/* The probabilities (vocab_size) with which llm__sample draws. */
static void llm__distribution(llm__sampler *s, const llm_sampling *p, const float *logits,
                              llm__past past, float *probabilities) {
    int n = llm__adjust(s, p, past, s->adjustments);
    llm__shaped shaped = llm__shape(s, p, logits, s->adjustments, n);
    memset(probabilities, 0, (size_t)s->vocab_size * sizeof *probabilities);
    for (int i = 0; i < shaped.n; i++)
        probabilities[shaped.kept[i].id] =
            (float)((double)llm__shaped_weight(&shaped, p, i) / (double)shaped.mass);
}

/* =====================================================================================
 * [4] Paged cache: blocks, block tables, reference counts, copy-on-write, the prefix cache
 *
 * Attention needs the keys and values of all earlier tokens, in every layer. The KV cache keeps
 * them: 2 x n_layers x n_kv_heads x head_dim numbers per token. Without a cache, token n would take
 * a forward pass over n tokens instead of one.
 *
 * The length of a text is not known in advance, and memory for the longest context of each sequence
 * would be mostly unused. So the cache is paged (Kwon et al. 2023, "Efficient Memory Management for
 * Large Language Model Serving with PagedAttention"): a pool has blocks of `block_size` slots, and
 * the block table of a sequence lists its blocks. A sequence takes blocks as it grows, and wastes
 * less than one block. An example with 8 blocks of 16 slots (blocks 0 to 3 above, 4 to 7 below):
 *
 *     sequence A, 37 tokens     table: 5 0 3         pool:  [A16-31][    ][B0-15][A32-36]
 *     sequence B, 18 tokens     table: 2 6                  [      ][A0-15][B16-17][    ]
 *
 * Blocks have reference counts. A fork (several samples of one prompt) copies the table, not the
 * blocks. A sequence that writes into a shared block first copies it (copy-on-write). A block whose
 * count falls to zero is free.
 *
 * A free block keeps its content, so a later prompt that begins with the same tokens can share it
 * (the prefix cache). Keys and values depend on the block's tokens and all earlier ones, so a block
 * is looked up by its tokens and the identity of its parent, the block before it. Identities are
 * never reused, so the children of an evicted block never match the content that replaces it.
 *
 * This chapter is only bookkeeping: the keys and values are in device memory (struct llm_cache). A
 * block number means the same place in every layer, in the target's cache and in the draft's.
 * ================================================================================== */

static void llm__pool_free(llm__pool *pool) {
    LLM_FREE(pool->references);
    LLM_FREE(pool->before);
    LLM_FREE(pool->after);
    LLM_FREE(pool->identity);
    LLM_FREE(pool->parent);
    LLM_FREE(pool->tokens);
    LLM_FREE(pool->buckets);
    LLM_FREE(pool->next);
    LLM_FREE(pool->copy_from);
    LLM_FREE(pool->copy_to);
    memset(pool, 0, sizeof *pool);
}

/* Add a block to the free list, before `place`. */
static void llm__pool_insert(llm__pool *pool, int32_t block, int32_t place) {
    int32_t before = pool->before[place];
    pool->before[block] = before;
    pool->after[block] = place;
    pool->after[before] = pool->before[place] = block;
    pool->n_free++;
}

static void llm__pool_remove(llm__pool *pool, int32_t block) {
    pool->after[pool->before[block]] = pool->after[block];
    pool->before[pool->after[block]] = pool->before[block];
    pool->n_free--;
    pool->peak = llm__max(pool->peak, pool->n_blocks - pool->n_free);
}

/* max_copies: most sequences in a step; each needs at most one copy. */
static bool llm__pool_init(llm__pool *pool, int64_t n_blocks, int block_size, int max_copies,
                           bool keeps_prefixes, llm_error *err) {
    memset(pool, 0, sizeof *pool);
    pool->block_size = block_size;
    pool->n_blocks = n_blocks;
    pool->max_copies = max_copies;
    pool->keeps_prefixes = keeps_prefixes;
    for (pool->n_buckets = 16; pool->n_buckets < 2 * n_blocks;) pool->n_buckets *= 2;
    size_t n = (size_t)n_blocks;
    const char *what = "the bookkeeping of the cache";
    bool ok =
        (pool->references = (int32_t *)llm__new(n, sizeof(int32_t), what, err)) &&
        (pool->before = (int32_t *)llm__new(n + 1, sizeof(int32_t), what, err)) &&
        (pool->after = (int32_t *)llm__new(n + 1, sizeof(int32_t), what, err)) &&
        (pool->identity = (uint64_t *)llm__new(n, sizeof(uint64_t), what, err)) &&
        (pool->parent = (uint64_t *)llm__new(n, sizeof(uint64_t), what, err)) &&
        (pool->tokens = (int32_t *)llm__new(n, sizeof(int32_t) * (size_t)block_size, what, err)) &&
        (pool->buckets = (int32_t *)llm__new((size_t)pool->n_buckets, sizeof(int32_t), what,
                                             err)) &&
        (pool->next = (int32_t *)llm__new(n, sizeof(int32_t), what, err)) &&
        (pool->copy_from = (int32_t *)llm__new((size_t)max_copies, sizeof(int32_t), what, err)) &&
        (pool->copy_to = (int32_t *)llm__new((size_t)max_copies, sizeof(int32_t), what, err));
    if (!ok) {
        llm__pool_free(pool);
        return false;
    }
    pool->before[n_blocks] = pool->after[n_blocks] = (int32_t)n_blocks;
    for (int64_t i = 0; i < n_blocks; i++) llm__pool_insert(pool, (int32_t)i, (int32_t)n_blocks);
    for (int64_t i = 0; i < pool->n_buckets; i++) pool->buckets[i] = -1;
    return true;
}

/* ---- The prefix cache ---- */

static int32_t *llm__pool_bucket(const llm__pool *pool, uint64_t parent, const int32_t *tokens) {
    uint64_t hash = llm__mix(parent);
    for (int i = 0; i < pool->block_size; i++) hash = llm__mix(hash ^ (uint32_t)tokens[i]);
    return &pool->buckets[hash & (uint64_t)(pool->n_buckets - 1)];
}

static int32_t *llm__pool_tokens(const llm__pool *pool, int32_t block) {
    return pool->tokens + (int64_t)block * pool->block_size;
}

/* The block with these tokens (block_size) and this parent; -1: none. */
static int32_t llm__pool_find(const llm__pool *pool, uint64_t parent, const int32_t *tokens) {
    int32_t block = *llm__pool_bucket(pool, parent, tokens);
    while (block >= 0 &&
           (pool->parent[block] != parent || memcmp(llm__pool_tokens(pool, block), tokens,
                                                    (size_t)pool->block_size * sizeof *tokens)))
        block = pool->next[block];
    return block;
}

static void llm__pool_forget(llm__pool *pool, int32_t block) {
    if (!pool->identity[block]) return;
    int32_t *link = llm__pool_bucket(pool, pool->parent[block], llm__pool_tokens(pool, block));
    while (*link != block) link = &pool->next[*link];
    *link = pool->next[block];
    pool->identity[block] = 0;
}

/* Add a full block to the prefix cache, unless another block has the same content. Returns the
 * content's identity. */
static uint64_t llm__pool_keep(llm__pool *pool, int32_t block, uint64_t parent,
                               const int32_t *tokens) {
    int32_t known = llm__pool_find(pool, parent, tokens);
    if (known >= 0) return pool->identity[known];
    int32_t *bucket = llm__pool_bucket(pool, parent, tokens);
    memcpy(llm__pool_tokens(pool, block), tokens, (size_t)pool->block_size * sizeof *tokens);
    pool->parent[block] = parent;
    pool->next[block] = *bucket;
    *bucket = block;
    return pool->identity[block] = ++pool->last_identity;
}

/* ---- Blocks ---- */

/* Report an event about a block that is, or was, entry `place` of a table. */
static void llm__trace_block(const llm__pool *pool, const llm__table *table, llm_trace_kind kind,
                             int place, int32_t block) {
    llm_trace_event event = llm__trace_event(kind, table ? table->request : 0,
                                             table ? table->sample : 0, place, 0);
    event.block = block;
    if (kind == LLM_TRACE_COPY) event.source = pool->copy_from[pool->n_copies - 1];
    event.count = pool->references[block];
    event.kept = pool->identity[block] != 0;
    llm__trace(pool->tracer, event);
}

/* Take a free block, with a reference count of 1. The caller has checked that there is one. */
static int32_t llm__pool_take(llm__pool *pool) {
    int32_t block = pool->after[pool->n_blocks];
    llm__pool_remove(pool, block);
    bool kept = pool->identity[block] != 0;
    llm__pool_forget(pool, block);
    if (kept) llm__trace_block(pool, NULL, LLM_TRACE_EVICT, 0, block);
    pool->references[block] = 1;
    return block;
}

static void llm__pool_share(llm__pool *pool, int32_t block) {
    if (pool->references[block]++ == 0) llm__pool_remove(pool, block); /* the block was free */
}

static void llm__pool_drop(llm__pool *pool, int32_t block) {
    if (--pool->references[block] > 0) return;
    bool kept = pool->identity[block] != 0;
    llm__pool_insert(pool, block, kept ? (int32_t)pool->n_blocks : pool->after[pool->n_blocks]);
}

static int64_t llm__blocks_for(const llm__pool *pool, int64_t n_tokens) {
    return llm__divide_up(n_tokens, pool->block_size);
}

/* ---- Block tables ---- */

/* Give a sequence private slots for tokens first to end - 1: copy the block of `first` if it is
 * shared, and take new blocks. False, with nothing changed: too few free blocks or table
 * entries. */
static bool llm__table_grow(llm__pool *pool, llm__table *table, int first, int end) {
    if (first >= end) return true;
    int64_t wanted = llm__blocks_for(pool, end);
    int shared = first / pool->block_size; /* earlier blocks are only read */
    bool copy = shared < table->n_blocks && pool->references[table->blocks[shared]] > 1;
    int64_t take = llm__max(wanted - table->n_blocks, 0) + copy;
    if (wanted > table->capacity || take > pool->n_free ||
        (copy && pool->n_copies == pool->max_copies))
        return false;
    if (copy) {
        int32_t from = table->blocks[shared], to = llm__pool_take(pool);
        pool->copy_from[pool->n_copies] = from;
        pool->copy_to[pool->n_copies++] = to;
        table->blocks[shared] = to;
        llm__pool_drop(pool, from); /* shared, so its content stays until it is copied */
        llm__trace_block(pool, table, LLM_TRACE_COPY, shared, to);
    }
    for (int i; (i = table->n_blocks) < wanted; table->n_blocks++) {
        table->blocks[i] = llm__pool_take(pool);
        llm__trace_block(pool, table, LLM_TRACE_TAKE, i, table->blocks[i]);
    }
    return true;
}

/* The number of pending copies that can be repeated after a failure: those before the first that
 * overwrites an earlier one's source. */
static int llm__copies_at_once(const llm__pool *pool) {
    for (int n = 1; n < pool->n_copies; n++)
        for (int i = 0; i < n; i++)
            if (pool->copy_to[n] == pool->copy_from[i]) return n;
    return pool->n_copies;
}

static void llm__copies_done(llm__pool *pool, int n) {
    pool->n_copies -= n;
    memmove(pool->copy_from, pool->copy_from + n, (size_t)pool->n_copies * sizeof *pool->copy_from);
    memmove(pool->copy_to, pool->copy_to + n, (size_t)pool->n_copies * sizeof *pool->copy_to);
}

/* Release the blocks after the first n_tokens tokens, last block first: the beginnings of texts are
 * shared more often, so they are evicted last. */
static void llm__table_trim(llm__pool *pool, llm__table *table, int n_tokens) {
    int64_t wanted = llm__blocks_for(pool, n_tokens);
    while (table->n_blocks > wanted) {
        int32_t block = table->blocks[--table->n_blocks];
        llm__pool_drop(pool, block);
        llm__trace_block(pool, table, LLM_TRACE_RELEASE, table->n_blocks, block);
    }
}

static void llm__table_clear(llm__pool *pool, llm__table *table) {
    llm__table_trim(pool, table, 0);
    table->n_kept = 0;
    table->identity = table->root;
}

/* Make `copy` (capacity >= table->n_blocks) share all blocks of `table`. */
static void llm__table_fork(llm__pool *pool, const llm__table *table, llm__table *copy) {
    for (int i = 0; i < table->n_blocks; i++) {
        copy->blocks[i] = table->blocks[i];
        llm__pool_share(pool, table->blocks[i]);
        llm__trace_block(pool, copy, LLM_TRACE_SHARE, i, copy->blocks[i]);
    }
    copy->n_blocks = table->n_blocks;
    copy->n_kept = table->n_kept;
    copy->identity = table->identity;
}

/* Fill an empty table with the longest prefix of these tokens that the prefix cache has. Returns
 * its length in tokens. */
static int llm__table_match(llm__pool *pool, llm__table *table, const int32_t *tokens,
                            int n_tokens) {
    bool looks = pool->keeps_prefixes || table->root;
    while (looks && (table->n_blocks + 1) * (int64_t)pool->block_size <= n_tokens) {
        int32_t block = llm__pool_find(pool, table->identity,
                                       tokens + (int64_t)table->n_blocks * pool->block_size);
        if (block < 0) break;
        llm__pool_share(pool, block);
        table->blocks[table->n_blocks] = block;
        llm__trace_block(pool, table, LLM_TRACE_SHARE, table->n_blocks++, block);
        table->identity = pool->identity[block];
    }
    table->n_kept = table->n_blocks;
    return table->n_blocks * pool->block_size;
}

/* Add the full blocks of the first n_tokens tokens (all computed) to the prefix cache. */
static void llm__table_keep(llm__pool *pool, llm__table *table, const int32_t *tokens,
                            int n_tokens) {
    if (!pool->keeps_prefixes && !table->root) return;
    for (; (table->n_kept + 1) * (int64_t)pool->block_size <= n_tokens; table->n_kept++)
        table->identity = llm__pool_keep(pool, table->blocks[table->n_kept], table->identity,
                                         tokens + (int64_t)table->n_kept * pool->block_size);
}

static int32_t llm__table_slot(const llm__pool *pool, const llm__table *table, int position) {
    return table->blocks[position / pool->block_size] * pool->block_size +
           position % pool->block_size;
}

/* =====================================================================================
 * [5] The program: a model as a list of operations
 *
 * A Llama model (Vaswani et al. 2017; Touvron et al. 2023) is a stack of similar layers. Every
 * layer reads, and adds to, the residual stream: one vector of `dim` numbers per token.
 *
 *     x = embedding[token]                               (T, dim)
 *     for each layer:
 *         x += Wo . attention(rope(Wq.h), rope(Wk.h), Wv.h)      where h = rmsnorm(x)
 *         x += Wdown . (silu(Wgate.h) * Wup.h)                   where h = rmsnorm(x)
 *     logits = Woutput . rmsnorm(x)                      (T, vocab_size)
 *
 * Only attention combines tokens; all other operations treat each of the T tokens separately. So
 * one step can contain part of a prompt, single tokens of twenty other sequences and a draft's
 * proposals.
 *
 * One table lists the tensors that a layer can have, with names and shapes; another lists which of
 * them each architecture has. The loader checks files against both.
 * ================================================================================== */

typedef enum llm__part { /* a tensor of a layer */
                         LLM__ATTN_NORM,
                         LLM__Q,
                         LLM__K,
                         LLM__V,
                         LLM__O,
                         LLM__Q_BIAS,
                         LLM__K_BIAS,
                         LLM__V_BIAS,
                         LLM__O_BIAS,
                         LLM__Q_NORM,
                         LLM__K_NORM,
                         LLM__WIDE_Q_NORM, /* over all heads together */
                         LLM__WIDE_K_NORM,
                         LLM__ATTN_POST_NORM,
                         LLM__FFN_NORM,
                         LLM__GATE,
                         LLM__UP,
                         LLM__DOWN,
                         LLM__GATE_BIAS,
                         LLM__UP_BIAS,
                         LLM__DOWN_BIAS,
                         LLM__FFN_POST_NORM,
                         LLM__QKV,         /* q, k and v in one matrix, split at load */
                         LLM__GATE_UP,     /* gate and up in one matrix, split at load */
                         LLM__QKV_BIAS,
                         LLM__ATTN_NORM_BIAS,
                         LLM__FFN_NORM_BIAS,
                         LLM__ROUTER, /* from here on: of layers with experts, in no set of parts */
                         LLM__SHARED_ROUTER,
                         LLM__SHARED_GATE,
                         LLM__SHARED_UP,
                         LLM__SHARED_DOWN,
                         LLM__N_PARTS
} llm__part;

typedef struct llm__layer { /* how a layer differs from the others of its model */
    int window;             /* attention window in tokens; 0: unlimited */
    bool no_rope;           /* its queries and keys are not rotated */
    llm_tensor *experts;    /* (3, n_experts) gate, up and down matrices; NULL: no experts */
} llm__layer;

typedef enum llm__width {
    LLM__ONE,
    LLM__DIM,
    LLM__Q_WIDTH,
    LLM__KV_WIDTH,
    LLM__HIDDEN,
    LLM__HEAD,
    LLM__QKV_WIDTH,
    LLM__TWO_HIDDEN,
    LLM__EXPERTS,
    LLM__SHARED,
    LLM__ONE_ROW /* of a matrix */
} llm__width;

static uint64_t llm__width_of(const llm_config *c, llm__width width) {
    switch (width) {
    case LLM__DIM: return (uint64_t)c->dim;
    case LLM__Q_WIDTH: return (uint64_t)c->n_heads * (uint64_t)c->head_dim;
    case LLM__KV_WIDTH: return (uint64_t)c->n_kv_heads * (uint64_t)c->head_dim;
    case LLM__HIDDEN: return (uint64_t)c->hidden_dim;
    case LLM__HEAD: return (uint64_t)c->head_dim;
    case LLM__QKV_WIDTH:
        return llm__width_of(c, LLM__Q_WIDTH) + 2 * llm__width_of(c, LLM__KV_WIDTH);
    case LLM__TWO_HIDDEN: return 2 * (uint64_t)c->hidden_dim;
    case LLM__EXPERTS: return (uint64_t)c->n_experts;
    case LLM__SHARED: return (uint64_t)c->shared_dim;
    case LLM__ONE_ROW:
    case LLM__ONE: break;
    }
    return 1;
}

typedef struct llm__part_row {
    const char *name;      /* blk.N.<name> in a GGUF file */
    const char *source;    /* model.layers.N.<source> in a Hugging Face folder */
    llm__width rows, cols; /* rows is LLM__ONE for a vector */
} llm__part_row;

static const llm__part_row *llm__parts(void) {
    static const llm__part_row table[LLM__N_PARTS] = {
        {"attn_norm.weight", "input_layernorm.weight", LLM__ONE, LLM__DIM},
        {"attn_q.weight", "self_attn.q_proj.weight", LLM__Q_WIDTH, LLM__DIM},
        {"attn_k.weight", "self_attn.k_proj.weight", LLM__KV_WIDTH, LLM__DIM},
        {"attn_v.weight", "self_attn.v_proj.weight", LLM__KV_WIDTH, LLM__DIM},
        {"attn_output.weight", "self_attn.o_proj.weight", LLM__DIM, LLM__Q_WIDTH},
        {"attn_q.bias", "self_attn.q_proj.bias", LLM__ONE, LLM__Q_WIDTH},
        {"attn_k.bias", "self_attn.k_proj.bias", LLM__ONE, LLM__KV_WIDTH},
        {"attn_v.bias", "self_attn.v_proj.bias", LLM__ONE, LLM__KV_WIDTH},
        {"attn_output.bias", "self_attn.o_proj.bias", LLM__ONE, LLM__DIM},
        {"attn_q_norm.weight", "self_attn.q_norm.weight", LLM__ONE, LLM__HEAD},
        {"attn_k_norm.weight", "self_attn.k_norm.weight", LLM__ONE, LLM__HEAD},
        {"attn_q_norm.weight", "self_attn.q_norm.weight", LLM__ONE, LLM__Q_WIDTH},
        {"attn_k_norm.weight", "self_attn.k_norm.weight", LLM__ONE, LLM__KV_WIDTH},
        {"post_attention_norm.weight", "post_attention_layernorm.weight", LLM__ONE, LLM__DIM},
        {"ffn_norm.weight", "post_attention_layernorm.weight", LLM__ONE, LLM__DIM},
        {"ffn_gate.weight", "mlp.gate_proj.weight", LLM__HIDDEN, LLM__DIM},
        {"ffn_up.weight", "mlp.up_proj.weight", LLM__HIDDEN, LLM__DIM},
        {"ffn_down.weight", "mlp.down_proj.weight", LLM__DIM, LLM__HIDDEN},
        {"ffn_gate.bias", "mlp.gate_proj.bias", LLM__ONE, LLM__HIDDEN},
        {"ffn_up.bias", "mlp.up_proj.bias", LLM__ONE, LLM__HIDDEN},
        {"ffn_down.bias", "mlp.down_proj.bias", LLM__ONE, LLM__DIM},
        {"post_ffw_norm.weight", "post_feedforward_layernorm.weight", LLM__ONE, LLM__DIM},
        {"attn_qkv.weight", "self_attn.qkv_proj.weight", LLM__QKV_WIDTH, LLM__DIM},
        {"ffn_up.weight", "mlp.gate_up_proj.weight", LLM__TWO_HIDDEN, LLM__DIM},
        {"attn_qkv.bias", "self_attn.qkv_proj.bias", LLM__ONE, LLM__QKV_WIDTH},
        {"attn_norm.bias", "input_layernorm.bias", LLM__ONE, LLM__DIM},
        {"ffn_norm.bias", "post_attention_layernorm.bias", LLM__ONE, LLM__DIM},
        {"ffn_gate_inp.weight", "mlp.gate.weight", LLM__EXPERTS, LLM__DIM},
        {"ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", LLM__ONE_ROW, LLM__DIM},
        {"ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", LLM__SHARED, LLM__DIM},
        {"ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", LLM__SHARED, LLM__DIM},
        {"ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", LLM__DIM, LLM__SHARED},
    };
    return table;
}

/* Sets of parts: bit i is part i. */
enum {
    LLM__MATRICES = 1 << LLM__Q | 1 << LLM__K | 1 << LLM__V | 1 << LLM__O | 1 << LLM__GATE |
        1 << LLM__UP | 1 << LLM__DOWN,
    LLM__PRE_NORMS = 1 << LLM__ATTN_NORM | 1 << LLM__FFN_NORM,
    LLM__POST_NORMS = 1 << LLM__ATTN_POST_NORM | 1 << LLM__FFN_POST_NORM,
    LLM__ALWAYS = LLM__MATRICES | LLM__PRE_NORMS,
    LLM__QKV_BIASES = 1 << LLM__Q_BIAS | 1 << LLM__K_BIAS | 1 << LLM__V_BIAS,
    LLM__BIASES = LLM__QKV_BIASES | 1 << LLM__O_BIAS,
    LLM__FFN_BIASES = 1 << LLM__GATE_BIAS | 1 << LLM__UP_BIAS | 1 << LLM__DOWN_BIAS,
    LLM__HEAD_NORMS = 1 << LLM__Q_NORM | 1 << LLM__K_NORM,
    LLM__WIDE_NORMS = 1 << LLM__WIDE_Q_NORM | 1 << LLM__WIDE_K_NORM,
    LLM__NORMS = LLM__PRE_NORMS | LLM__POST_NORMS | LLM__HEAD_NORMS | LLM__WIDE_NORMS,
    LLM__FUSED = 1 << LLM__O | 1 << LLM__DOWN | 1 << LLM__QKV | 1 << LLM__GATE_UP,
    LLM__SECOND_NORM = 1 << LLM__FFN_NORM | 1 << LLM__FFN_NORM_BIAS,
    LLM__NORM_BIASES = 1 << LLM__ATTN_NORM_BIAS | 1 << LLM__FFN_NORM_BIAS
};

enum { /* traits of an architecture that are not tensors */
    LLM__MHA = 1,              /* in config.json, n_kv_heads defaults to n_heads */
    LLM__TANH_GELU = 2,        /* the feed-forward block uses GELU instead of SiLU */
    LLM__SCALED_EMBEDDING = 4, /* embeddings are multiplied by sqrt(dim) */
    LLM__NORMS_MINUS_ONE = 8,  /* folders store norm weights minus 1 */
    LLM__ROPE_3_OF_4 = 16,     /* every fourth layer has no RoPE */
    LLM__TIED = 32,            /* in config.json, tie_word_embeddings defaults to true */
    LLM__LOCAL_ROPE = 64,      /* RoPE differs in layers with a window: see local_rope_base */
    LLM__EXPERT_LAYERS = 128,  /* layers can have experts in place of the feed-forward block */
    LLM__NORM_EXPERTS = 256,   /* norm_experts, unless the metadata says otherwise */
    LLM__SHARED_EXPERT = 512,  /* one more expert serves every token */
    LLM__ERF_GELU = 1 << 10,   /* like LLM__TANH_GELU, but exact */
    LLM__LAYER_NORMS = 1 << 11, /* LayerNorm instead of RMSNorm */
    LLM__EMBEDDING_NORMED = 1 << 12, /* the embedding is normalised */
    LLM__LOGIT_BIAS = 1 << 13, /* the output matrix has a bias */
    LLM__ALIBI = 1 << 14,      /* llm_config.alibi defaults to 8 */
    LLM__PARALLEL = 1 << 15,   /* use_parallel_residual defaults to true */
    LLM__BIASED = 1 << 16,     /* in config.json, attention_bias and mlp_bias default to true */
    LLM__BY_HEAD = 1 << 17,    /* in folders, the rows of QKV are in the order of heads */
    LLM__PARTIAL_ROPE = 1 << 18 /* config.json must have partial_rotary_factor */
};

/* A supported architecture; others are refused, since they would give wrong text. */
typedef struct llm__architecture {
    const char *name;           /* general.architecture in a GGUF file */
    const char *model_type;     /* model_type in a folder's config.json */
    llm_rope_pairing pairing;   /* pairing in GGUF files; in folders always LLM_ROPE_HALVES */
    unsigned required, optional; /* sets of parts that a model must have, or can have */
    unsigned traits;
    int full_every;             /* if > 0: every full_every-th layer has no window */
    int wide_layers;            /* models of this many layers scale scores by 1/sqrt(dim / heads) */
    /* Defaults for keys missing in config.json: */
    int head_dim, window;       /* head_dim 0: dim / n_heads; window 0: no window */
    float local_rope_base;      /* default of local_rope_base, also in GGUF files; 0: rope_base */
    const char *keys;           /* known keys of config.json, besides llm__config_keys */
    const char *names;          /* how folders name keys and tensors: see llm__folder_name */
} llm__architecture;

static const llm__architecture *llm__architecture_at(int index) {
    enum { OLMO = LLM__MATRICES | LLM__POST_NORMS | LLM__WIDE_NORMS };
    enum {
        QKV = 1 << LLM__Q | 1 << LLM__K | 1 << LLM__V,
        UNGATED = 1 << LLM__O | 1 << LLM__UP | 1 << LLM__DOWN,
        UP_DOWN_BIASES = 1 << LLM__UP_BIAS | 1 << LLM__DOWN_BIAS,
        BLOOM = UNGATED | 1 << LLM__QKV | LLM__PRE_NORMS | LLM__NORM_BIASES | UP_DOWN_BIASES
    };
    enum { GEMMA = LLM__TANH_GELU | LLM__SCALED_EMBEDDING | LLM__NORMS_MINUS_ONE | LLM__TIED };
    static const llm__architecture table[] = {
        {"llama", "llama", LLM_ROPE_ADJACENT, LLM__ALWAYS, LLM__BIASES | LLM__FFN_BIASES,
         LLM__MHA | LLM__EXPERT_LAYERS | LLM__NORM_EXPERTS, 0, 0, 0, 0, 0, "", ""},
        {"llama", "mistral", LLM_ROPE_ADJACENT, LLM__ALWAYS, 0, 0, 0, 0, 0, 4096, 0, "", ""},
        {"llama", "mixtral", LLM_ROPE_ADJACENT, LLM__ALWAYS, 0,
         LLM__EXPERT_LAYERS | LLM__NORM_EXPERTS, 0, 0, 0, 0, 0, "",
         "mlp.=block_sparse_moe. gate_proj=w1 up_proj=w3 down_proj=w2"},
        {"qwen2", "qwen2", LLM_ROPE_HALVES, LLM__ALWAYS | LLM__QKV_BIASES, 0, 0, 0, 0, 0, 0, 0, "",
         ""},
        {"qwen3", "qwen3", LLM_ROPE_HALVES, LLM__ALWAYS | LLM__HEAD_NORMS, LLM__BIASES, 0, 0, 0,
         128, 0, 0, "", ""},
        {"qwen2moe", "qwen2_moe", LLM_ROPE_HALVES, LLM__ALWAYS | LLM__QKV_BIASES, 0,
         LLM__EXPERT_LAYERS | LLM__SHARED_EXPERT, 0, 0, 0, 0, 0, "qkv_bias", ""},
        {"qwen3moe", "qwen3_moe", LLM_ROPE_HALVES, LLM__ALWAYS | LLM__HEAD_NORMS, LLM__BIASES,
         LLM__EXPERT_LAYERS | LLM__NORM_EXPERTS, 0, 0, 128, 0, 0, "", ""},
        {"olmoe", "olmoe", LLM_ROPE_HALVES, LLM__ALWAYS | LLM__WIDE_NORMS, LLM__BIASES,
         LLM__MHA | LLM__EXPERT_LAYERS, 0, 0, 0, 0, 0, "", ""},
        {"granite", "granite", LLM_ROPE_ADJACENT, LLM__ALWAYS, LLM__BIASES | LLM__FFN_BIASES,
         LLM__MHA, 0, 0, 0, 0, 0,
         "embedding_multiplier residual_multiplier attention_multiplier logits_scaling", ""},
        {"olmo2", "olmo2", LLM_ROPE_HALVES, OLMO, LLM__BIASES, LLM__MHA | LLM__LOCAL_ROPE, 4, 0, 0,
         0, 0, "", ""},
        {"olmo2", "olmo3", LLM_ROPE_HALVES, OLMO, LLM__BIASES, LLM__MHA | LLM__LOCAL_ROPE, 4, 0, 0,
         4096, 0, "", ""},
        {"smollm3", "smollm3", LLM_ROPE_ADJACENT, LLM__ALWAYS, LLM__BIASES | LLM__FFN_BIASES,
         LLM__ROPE_3_OF_4 | LLM__TIED, 0, 0, 0, 0, 0, "no_rope_layers no_rope_layer_interval", ""},
        {"phi3", "phi3", LLM_ROPE_HALVES, LLM__FUSED | LLM__PRE_NORMS, 0, LLM__MHA, 0, 0, 0, 0, 0,
         "original_max_position_embeddings partial_rotary_factor", ""},
        {"gemma2", "gemma2", LLM_ROPE_HALVES, LLM__ALWAYS | LLM__POST_NORMS, LLM__BIASES, GEMMA, 2,
         46, 256, 4096, 0,
         "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping hidden_activation "
         "cache_implementation", ""},
        {"gemma3", "gemma3_text", LLM_ROPE_HALVES,
         LLM__ALWAYS | LLM__POST_NORMS | LLM__HEAD_NORMS, LLM__BIASES, GEMMA | LLM__LOCAL_ROPE, 6,
         62, 256, 4096, 10000,
         "query_pre_attn_scalar final_logit_softcapping hidden_activation cache_implementation "
         "sliding_window_pattern rope_local_base_freq", ""},
        {"bloom", "bloom", LLM_ROPE_HALVES, BLOOM | 1 << LLM__QKV_BIAS | 1 << LLM__O_BIAS, 0,
         LLM__MHA | LLM__TANH_GELU | LLM__LAYER_NORMS | LLM__EMBEDDING_NORMED | LLM__ALIBI |
             LLM__BY_HEAD | LLM__TIED,
         0, 0, 0, 0, 0,
         "n_layer n_head n_embed layer_norm_epsilon attention_softmax_in_fp32 bias_dropout_fusion "
         "masked_softmax_fusion offset_alibi skip_bias_add slow_but_exact",
         "model.layers.=transformer.h. model.=transformer. embed_tokens=word_embeddings "
         "embed_norm=word_embeddings_layernorm transformer.norm=transformer.ln_f "
         "self_attn.qkv_proj=self_attention.query_key_value self_attn.o_proj=self_attention.dense "
         "mlp.up_proj=mlp.dense_h_to_4h mlp.down_proj=mlp.dense_4h_to_h num_hidden_layers=n_layer "
         "num_attention_heads=n_head hidden_size=n_embed rms_norm_eps=layer_norm_epsilon "
         "max_position_embeddings=seq_length"},
        {"gptneox", "gpt_neox", LLM_ROPE_HALVES, BLOOM, 1 << LLM__QKV_BIAS | 1 << LLM__O_BIAS,
         LLM__MHA | LLM__ERF_GELU | LLM__LAYER_NORMS | LLM__PARALLEL | LLM__BIASED | LLM__BY_HEAD |
             LLM__PARTIAL_ROPE,
         0, 0, 0, 0, 0,
         "layer_norm_eps rotary_emb_base rotary_pct use_parallel_residual classifier_dropout",
         "model.=gpt_neox. embed_tokens=embed_in gpt_neox.norm=gpt_neox.final_layer_norm "
         "lm_head=embed_out self_attn.qkv_proj=attention.query_key_value "
         "self_attn.o_proj=attention.dense mlp.up_proj=mlp.dense_h_to_4h "
         "mlp.down_proj=mlp.dense_4h_to_h rms_norm_eps=layer_norm_eps rope_theta=rotary_emb_base "
         "partial_rotary_factor=rotary_pct"},
        {"mpt", "mpt", LLM_ROPE_HALVES, UNGATED | 1 << LLM__QKV | LLM__PRE_NORMS, 0,
         LLM__MHA | LLM__ERF_GELU | LLM__LAYER_NORMS | LLM__ALIBI | LLM__TIED, 0, 0, 0, 0, 0,
         "d_model n_heads n_layers max_seq_len layer_norm_epsilon attn_config emb_pdrop "
         "embedding_fraction expansion_ratio init_config init_device learned_pos_emb no_bias "
         "norm_type verbose",
         "model.layers.=transformer.blocks. model.embed_tokens=transformer.wte "
         "model.norm=transformer.norm_f input_layernorm=norm_1 post_attention_layernorm=norm_2 "
         "self_attn.qkv_proj=attn.Wqkv self_attn.o_proj=attn.out_proj mlp.=ffn. "
         "num_hidden_layers=n_layers num_attention_heads=n_heads hidden_size=d_model "
         "rms_norm_eps=layer_norm_epsilon max_position_embeddings=max_seq_len"},
        {"stablelm", "stablelm", LLM_ROPE_HALVES,
         (LLM__ALWAYS | LLM__NORM_BIASES) & ~LLM__SECOND_NORM,
         LLM__QKV_BIASES | LLM__SECOND_NORM, LLM__LAYER_NORMS | LLM__PARTIAL_ROPE, 0, 0, 0, 0, 0,
         "layer_norm_eps use_qkv_bias use_parallel_residual partial_rotary_factor",
         "rms_norm_eps=layer_norm_eps attention_bias=use_qkv_bias"},
        {"starcoder2", "starcoder2", LLM_ROPE_HALVES,
         UNGATED | QKV | LLM__PRE_NORMS | LLM__NORM_BIASES, LLM__BIASES | UP_DOWN_BIASES,
         LLM__TANH_GELU | LLM__LAYER_NORMS | LLM__BIASED | LLM__TIED, 0, 0, 0, 0, 0,
         "norm_epsilon use_bias activation_function embedding_dropout residual_dropout mlp_type "
         "norm_type",
         "mlp.up_proj=mlp.c_fc mlp.down_proj=mlp.c_proj rms_norm_eps=norm_epsilon "
         "attention_bias=use_bias mlp_bias=use_bias"},
        {"phi2", "phi", LLM_ROPE_HALVES,
         (UNGATED | QKV | LLM__PRE_NORMS | LLM__NORM_BIASES | LLM__BIASES | UP_DOWN_BIASES) &
             ~LLM__SECOND_NORM,
         0,
         LLM__MHA | LLM__TANH_GELU | LLM__LAYER_NORMS | LLM__PARALLEL | LLM__LOGIT_BIAS |
             LLM__PARTIAL_ROPE,
         0, 0, 0, 0, 0, "layer_norm_eps partial_rotary_factor",
         "self_attn.o_proj=self_attn.dense mlp.up_proj=mlp.fc1 mlp.down_proj=mlp.fc2 "
         "model.norm=model.final_layernorm rms_norm_eps=layer_norm_eps"},
    };
    return index < (int)(sizeof table / sizeof *table) ? &table[index] : NULL;
}

/* Names of the vectors outside the layers: in GGUF files and in folders */
static const char *const llm__end_names[LLM__N_ENDS][2] = {
    {"token_embd_norm.weight", "model.embed_norm.weight"},
    {"token_embd_norm.bias", "model.embed_norm.bias"},
    {"output_norm.weight", "model.norm.weight"},
    {"output_norm.bias", "model.norm.bias"},
    {"output.bias", "lm_head.bias"}};

static bool llm__has_end(const llm__architecture *a, int end) {
    if (end < LLM__OUTPUT_NORM) return a->traits & LLM__EMBEDDING_NORMED;
    if (end == LLM__OUTPUT_NORM_BIAS) return a->required & 1u << LLM__ATTN_NORM_BIAS;
    return end == LLM__OUTPUT_NORM || a->traits & LLM__LOGIT_BIAS;
}

/* Find an architecture by name or, if source, by model_type. NULL: unknown. */
static const llm__architecture *llm__find_architecture(llm_string name, bool source) {
    const llm__architecture *a;
    for (int i = 0; (a = llm__architecture_at(i)) != NULL; i++)
        if (llm__is_text(name, source ? a->model_type : a->name)) return a;
    return NULL;
}

/* Write a list of the architectures to text (size bytes): "llama, qwen2, ..." */
static void llm__list_architectures(char *text, size_t size, bool source) {
    const llm__architecture *a, *last = NULL;
    size_t used = 0;
    for (int i = 0; (a = llm__architecture_at(i)) != NULL && used < size; last = a, i++)
        if (source || !last || strcmp(a->name, last->name))
            used += (size_t)snprintf(text + used, size - used, "%s%s", last ? ", " : "",
                                     source ? a->model_type : a->name);
}

/* Must a layer, with or without experts, have this part? shared: one expert serves all tokens.
 * Experts replace the gate, up and down matrices. */
static bool llm__wants_part(unsigned parts, int part, bool experts, bool shared) {
    if (part >= LLM__ROUTER) return experts && (part == LLM__ROUTER || shared);
    return parts >> part & 1 && !(experts && part >= LLM__GATE && part <= LLM__DOWN);
}

/* ---- A model on a device ---- */

static bool llm__upload_vector(llm_backend *backend, const float *host, int64_t n, llm_weight *w,
                               llm_error *err) {
    size_t bytes = (size_t)n * sizeof *host;
    w->type = LLM_F32;
    w->rows = 1;
    w->cols = n;
    w->data = backend->allocate(backend->context, bytes, "a vector of weights", err);
    void *to = (void *)(uintptr_t)w->data;
    return to && backend->upload(backend->context, to, host, bytes, err);
}

/* Convert a vector (norm weights or a bias) to f32, multiply it by the factor, and upload it. */
static bool llm__load_vector(llm_backend *backend, const llm_tensor *tensor, float factor,
                             llm_weight *w, llm_error *err) {
    int64_t n = (int64_t)tensor->dims[0];
    float *host = (float *)llm__new((size_t)n, sizeof(float), "a vector of weights", err);
    if (host) llm_type_find(tensor->type)->unpack(tensor->data, host, n);
    for (int64_t i = 0; host && i < n; i++) host[i] *= factor;
    bool ok = host && llm__upload_vector(backend, host, n, w, err);
    LLM_FREE(host);
    return ok;
}

static bool llm__load_columns(llm_backend *backend, const llm_tensor *tensor, llm_weight *w,
                              llm_error *err) {
    size_t bytes = (size_t)w->cols * sizeof *w->columns;
    w->columns = (const int32_t *)backend->allocate(backend->context, bytes, "the order of columns",
                                                    err);
    return w->columns && backend->upload(backend->context, (void *)(uintptr_t)w->columns,
                                         tensor->columns, bytes, err);
}

/* Convert a matrix that the file stores as AWQ or GPTQ. The network owns the rows. */
static const void *llm__network_rows(llm__network *net, const llm_tensor *tensor, llm_error *err) {
    if (!llm__grow(&net->rows, net->n_rows, &net->rows_capacity, sizeof *net->rows,
                   "the rows of matrices", err))
        return NULL;
    void *rows = llm__new_rows(tensor, err);
    if (rows) net->rows[net->n_rows++] = rows;
    return rows;
}

static bool llm__load_matrix(llm__network *net, const llm_tensor *tensor, llm_weight *w,
                             llm_error *err) {
    llm_backend *backend = net->backend;
    const void *host = tensor->data ? tensor->data : llm__network_rows(net, tensor, err);
    w->type = tensor->type;
    w->rows = (int64_t)tensor->dims[1];
    w->cols = (int64_t)tensor->dims[0];
    if (!host || !backend->load_weight(backend->context, w, host, err)) return false;
    bool copied = w->packed || w->data != host;
    if (copied && !tensor->data) { /* the device has its own copy */
        if (w->data == host) w->data = NULL;
        LLM_FREE(net->rows[--net->n_rows]);
    }
    if (copied || !tensor->data) llm__tensor_forget(net->model->file, tensor);
    return !tensor->columns || llm__load_columns(backend, tensor, w, err);
}

/* The frequency of pair i: base^(-2i/rope_dim) radians per position. The first pairs turn fast and
 * distinguish near positions; the last turn slowly and distinguish distant ones (Su et al. 2021).
 *
 * In texts longer than those of training, slow pairs reach unseen angles. So frequencies are
 * divided: all by the same factor (linear), or only slow ones. Llama 3 stores a divisor per pair.
 * YaRN divides by rope_factor if a pair makes fewer than beta_slow turns over the training length,
 * by 1 if it makes more than beta_fast, and blends the two in between. */
static double llm__frequency(const llm_config *c, int i, double divisor) {
    double frequency = pow((double)c->rope_base, -2.0 * i / c->rope_dim) / divisor;
    if (c->rope_scaling != LLM_ROPE_YARN) return frequency / c->rope_factor;
    /* fast, slow: pairs with beta_fast and beta_slow turns over the training length */
    double per_turn = c->rope_original_context / (2 * 3.14159265358979323846),
           scale = c->rope_dim / (2 * log(c->rope_base));
    double fast = floor(scale * log(per_turn / c->rope_beta_fast)),
           slow = ceil(scale * log(per_turn / c->rope_beta_slow));
    fast = fast > 0 ? fast : 0;
    slow = slow < c->rope_dim - 1 ? slow : c->rope_dim - 1;
    double blend = (i - fast) / (slow - fast > 0.001 ? slow - fast : 0.001);
    blend = blend > 0 ? blend < 1 ? blend : 1 : 0;
    return frequency * (1 - blend) + frequency / c->rope_factor * blend;
}

static bool llm__load_frequencies(llm__network *net, int context, bool local, llm_error *err) {
    const llm_config *c = &net->model->config;
    const llm_tensor *divisors =
        local ? NULL : net->model->rope_divisors[context > c->rope_original_context];
    int n = c->rope_dim / 2;
    float *host = (float *)llm__new((size_t)n, sizeof(float), "the RoPE frequencies", err);
    if (!host) return false;
    for (int i = 0; i < n; i++) host[i] = 1;
    if (divisors) llm_type_find(divisors->type)->unpack(divisors->data, host, n);
    for (int i = 0; i < n; i++) {
        if (!(host[i] > 0)) {
            llm__fail(err, LLM_ERROR_FORMAT, "%s: %s has a divisor that is not positive: %g",
                      llm_file_path(net->model->file), llm__show(divisors->name).text,
                      (double)host[i]);
            return LLM_FREE(host), false;
        }
        host[i] = (float)(local ? pow((double)c->local_rope_base, -2.0 * i / c->rope_dim)
                                : llm__frequency(c, i, host[i]));
    }
    bool ok = llm__upload_vector(net->backend, host, n,
                                 local ? &net->local_frequencies : &net->frequencies, err);
    LLM_FREE(host);
    return ok;
}

static bool llm__load_cache(llm__network *net, llm_type type, int block_size, int64_t n_blocks,
                            llm_error *err) {
    const llm_config *c = &net->model->config;
    llm_cache *cache = &net->cache;
    llm_backend *b = net->backend;
    cache->type = type;
    cache->n_layers = c->n_layers;
    cache->n_kv_heads = c->n_kv_heads;
    cache->head_dim = c->head_dim;
    cache->block_size = block_size;
    cache->n_blocks = n_blocks;
    cache->keys_transposed = b->keys_transposed;
    uint64_t per_token = llm_model_cache_bytes_per_token(net->model, type) / 2 /
                         (uint64_t)c->n_layers,
             layer, all;
    if (!llm__multiply(per_token, (uint64_t)n_blocks * (uint64_t)block_size, &layer) ||
        !llm__multiply(layer, (uint64_t)c->n_layers, &all) || all > SIZE_MAX / 2)
        return llm__fail(
                   err, LLM_ERROR_MEMORY,
                   "a cache of %lld blocks of %d tokens is more than this machine can address",
                   (long long)n_blocks, block_size),
               llm__blame(err, "cache_bytes");
    cache->layer_bytes = (size_t)layer;
    cache->keys = b->allocate(b->context, (size_t)all,
                              "the keys of the cache (a smaller cache or context needs less)", err);
    if (cache->keys)
        cache->values = b->allocate(
            b->context, (size_t)all,
            "the values of the cache (a smaller cache or context needs less)", err);
    return cache->values || llm__blame(err, "cache_bytes");
}

/* Bytes of a block: keys and values of all layers. */
static size_t llm__block_bytes(const llm_cache *cache) {
    return 2 * (size_t)cache->n_layers * (cache->layer_bytes / (size_t)cache->n_blocks);
}

/* Copy a block, in all layers, from the device to `host` (llm__block_bytes) if out, else back. */
static bool llm__block_copy(const llm__network *net, int32_t block, char *host, bool out,
                            llm_error *err) {
    const llm_cache *cache = &net->cache;
    llm_backend *b = net->backend;
    size_t piece = cache->layer_bytes / (size_t)cache->n_blocks;
    for (int i = 0; i < 2 * cache->n_layers; i++, host += piece) {
        char *side = (char *)(i % 2 ? cache->values : cache->keys);
        char *device = side + (size_t)(i / 2) * cache->layer_bytes + (size_t)block * piece;
        if (!(out ? b->download(b->context, host, device, piece, err)
                  : b->upload(b->context, device, host, piece, err)))
            return false;
    }
    return true;
}

/* The residual stream is kept divided by residual_scale, so that blocks just add to it. Its norms
 * give the same result if their epsilon is divided by the square. */
static float llm__stream_epsilon(const llm_config *c) {
    return c->norm_epsilon / (c->residual_scale * c->residual_scale);
}

static void llm__network_free(llm__network *net) {
    llm_backend *b = net->backend;
    if (!b) return;
    b->forget(b->context, &net->program);
    b->release(b->context, net->activations);
    LLM_FREE(net->program.ops);
    LLM_FREE(net->program.buffers);
    if (net->embedding.data) b->free_weight(b->context, &net->embedding);
    if (net->output.data) b->free_weight(b->context, &net->output);
    for (int i = 0; i < LLM__N_ENDS; i++) b->release(b->context, (void *)net->ends[i].data);
    for (int i = 0; net->parts && i < net->model->config.n_layers * LLM__N_PARTS; i++) {
        llm_weight *w = &net->parts[i];
        if (llm__parts()[i % LLM__N_PARTS].rows == LLM__ONE)
            b->release(b->context, (void *)w->data);
        else {
            b->release(b->context, (void *)(uintptr_t)w->columns);
            if (w->data || w->packed) b->free_weight(b->context, w);
        }
    }
    const llm_config *c = &net->model->config;
    for (int64_t i = 0; net->experts && i < (int64_t)c->n_layers * 3 * c->n_experts; i++)
        if (net->experts[i].data || net->experts[i].packed)
            b->free_weight(b->context, &net->experts[i]);
    while (net->n_rows > 0) LLM_FREE(net->rows[--net->n_rows]);
    LLM_FREE(net->rows);
    LLM_FREE(net->parts);
    LLM_FREE(net->experts);
    b->release(b->context, (void *)net->frequencies.data);
    b->release(b->context, (void *)net->local_frequencies.data);
    b->release(b->context, net->cache.keys);
    b->release(b->context, net->cache.values);
    memset(net, 0, sizeof *net);
}

static bool llm__load_experts(llm__network *net, llm_error *err) {
    const llm_config *c = &net->model->config;
    const int n = 3 * c->n_experts;
    if (!n) return true;
    net->experts = (llm_weight *)llm__new((size_t)c->n_layers, (size_t)n * sizeof *net->experts,
                                          "the table of experts", err);
    if (!net->experts) return false;
    for (int layer = 0; layer < c->n_layers; layer++) {
        const llm_tensor *experts = net->model->layers[layer].experts;
        for (int i = 0; experts && i < n; i++)
            if (!llm__load_matrix(net, &experts[i], &net->experts[(int64_t)layer * n + i], err))
                return false;
    }
    return true;
}

/* On failure the caller frees the network. */
static bool llm__network_load(llm__network *net, const llm_model *model, llm_backend *backend,
                              int context, llm_error *err) {
    net->model = model;
    net->backend = backend;
    int n = model->config.n_layers * LLM__N_PARTS;
    net->parts = (llm_weight *)llm__new((size_t)n, sizeof *net->parts, "the table of weights", err);
    net->embedding.only_rows = !model->config.tied_output;
    if (!net->parts || !llm__load_frequencies(net, context, false, err) ||
        (model->config.local_rope_base > 0 && !llm__load_frequencies(net, context, true, err)) ||
        !llm__load_matrix(net, model->embedding, &net->embedding, err))
        return false;
    for (int i = 0; i < LLM__N_ENDS; i++)
        if (model->ends[i] &&
            !llm__load_vector(backend, model->ends[i],
                              i < LLM__OUTPUT_NORM ? 1 : 1 / model->config.logit_scale,
                              &net->ends[i], err))
            return false;
    if (!model->config.tied_output && !llm__load_matrix(net, model->output, &net->output, err))
        return false;
    for (int i = 0; i < n; i++) {
        bool vector = llm__parts()[i % LLM__N_PARTS].rows == LLM__ONE;
        if (model->parts[i] &&
            !(vector ? llm__load_vector(backend, model->parts[i], 1, &net->parts[i], err)
                     : llm__load_matrix(net, model->parts[i], &net->parts[i], err)))
            return false;
    }
    return llm__load_experts(net, err);
}

/* ---- The program ----
 * A trait of an architecture (a bias, head norms, a window) is a line in one of these functions. */

enum { /* the buffers of a program */
    LLM__X,         /* (T, dim) the residual stream */
    LLM__NORMED,    /* (T, dim) the normalised residual stream */
    LLM__QUERIES,   /* (T, n_heads, head_dim) */
    LLM__KEYS,      /* (T, n_kv_heads, head_dim) */
    LLM__VALUES,    /* (T, n_kv_heads, head_dim) */
    LLM__ATTENDED,  /* (T, n_heads, head_dim) output of attention */
    LLM__GATES,     /* (T, hidden_dim) gates, then silu(gate) x up */
    LLM__UPS,       /* (T, hidden_dim) output of the up matrix */
    LLM__ORDERED,   /* (T, ordered_cols) input of a matmul, with its columns permuted */
    LLM__ANGLES,    /* (T, rope_dim/2, 2) cosine and sine per pair */
    LLM__LOCAL_ANGLES, /* the same for layers with a window, where they differ */
    LLM__CACHE,     /* the paged cache, which has its own memory */
    LLM__ROWS,      /* (R, dim) residual stream of tokens whose logits are wanted */
    LLM__LOGITS,    /* (R, vocab_size) */
    LLM__ROUTER_LOGITS, /* (T, n_experts) */
    LLM__ROUTES,    /* (T, k) the chosen experts and their factors: llm_route */
    LLM__SORTED,    /* (3, T k) the routes, sorted by expert: see llm_op.n_used */
    LLM__PICKED,    /* (T k, dim) per sorted route: input of its expert, then the expert's result */
    LLM__EXPERT_GATES, /* (T k, expert_dim) per sorted route */
    LLM__EXPERT_UPS,
    LLM__SHARED_GATES, /* (T, shared_dim) */
    LLM__SHARED_UPS,
    LLM__SHARED_FACTOR, /* (T, 1) its sigmoid is the shared expert's factor */
    LLM__N_BUFFERS
};

static llm_op *llm__emit_op(llm_program *p, llm_op_kind kind, int layer, int in, int out) {
    llm_op *op = &p->ops[p->n_ops++];
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->layer = layer;
    op->in[0] = in;
    for (int i = 1; i < LLM_OP_INPUTS; i++) op->in[i] = -1;
    op->out = out;
    op->name = "";
    return op;
}

static bool llm__has_layer_norms(const llm_model *model) {
    return model->architecture->traits & LLM__LAYER_NORMS;
}

/* Emit out = norm(in), and return out. If w has no data, emit nothing and return in. */
static int llm__emit_norm(llm__network *net, int layer, const llm_weight *w,
                          const llm_weight *bias, const char *name, int in, int out) {
    const llm_config *c = &net->model->config;
    if (!w->data) return in;
    llm_op_kind kind = llm__has_layer_norms(net->model) ? LLM_OP_LAYERNORM : LLM_OP_RMSNORM;
    llm_op *op = llm__emit_op(&net->program, kind, layer, in, out);
    op->weight = w;
    op->bias = bias && bias->data ? bias : NULL;
    op->name = name;
    op->epsilon = in == LLM__X || in == LLM__ROWS ? llm__stream_epsilon(c) : c->norm_epsilon;
    return out;
}

static int llm__emit_part_norm(llm__network *net, int layer, llm__part part, int in, int out) {
    const llm_weight *w = &net->parts[layer * LLM__N_PARTS];
    const llm_weight *bias = part == LLM__ATTN_NORM  ? &w[LLM__ATTN_NORM_BIAS]
                             : part == LLM__FFN_NORM ? &w[LLM__FFN_NORM_BIAS]
                                                     : NULL;
    return llm__emit_norm(net, layer, &w[part], bias, llm__parts()[part].name, in, out);
}

/* out = w . in, plus the bias, if any (LLM__N_PARTS: none). If w has `columns`, the input is
 * permuted first. */
static llm_op *llm__emit_matmul(llm__network *net, int layer, llm__part part, llm__part bias,
                                int in, int out) {
    const llm_weight *w = &net->parts[layer * LLM__N_PARTS + (int)part],
                     *b = bias == LLM__N_PARTS ? NULL
                                               : &net->parts[layer * LLM__N_PARTS + (int)bias];
    if (w->columns) {
        llm__emit_op(&net->program, LLM_OP_GATHER_COLUMNS, layer, in, LLM__ORDERED)->weight = w;
        in = LLM__ORDERED;
    }
    llm_op *op = llm__emit_op(&net->program, LLM_OP_MATMUL, layer, in, out);
    op->weight = w;
    op->bias = b && b->data ? b : NULL;
    op->name = llm__parts()[part].name;
    return op;
}

/* x += w . in, or x += the norm of w . in if the block ends in a norm */
static void llm__emit_end_of_block(llm__network *net, int layer, llm__part part, llm__part bias,
                                   llm__part norm, int in) {
    bool normed = net->parts[layer * LLM__N_PARTS + (int)norm].data != NULL;
    llm__emit_matmul(net, layer, part, bias, in, normed ? LLM__NORMED : LLM__X)->add = !normed;
    if (!normed) return;
    llm__emit_part_norm(net, layer, norm, LLM__NORMED, LLM__X);
    net->program.ops[net->program.n_ops - 1].add = true;
}

/* x += Wo . attention of the normalised x */
static void llm__emit_attention(llm__network *net, int layer, bool naive) {
    const llm_config *c = &net->model->config;
    const llm__layer *l = &net->model->layers[layer];
    const llm_weight *w = &net->parts[layer * LLM__N_PARTS];
    llm_attention_shape shape = {c->n_heads, c->n_kv_heads, c->head_dim, c->attention_scale, naive,
                                 l->window, c->score_cap, c->alibi};
    int h = llm__emit_part_norm(net, layer, LLM__ATTN_NORM, LLM__X, LLM__NORMED);
    llm__emit_matmul(net, layer, LLM__Q, LLM__Q_BIAS, h, LLM__QUERIES);
    llm__emit_matmul(net, layer, LLM__K, LLM__K_BIAS, h, LLM__KEYS);
    llm__emit_matmul(net, layer, LLM__V, LLM__V_BIAS, h, LLM__VALUES);
    llm__emit_part_norm(net, layer, LLM__WIDE_Q_NORM, LLM__QUERIES, LLM__QUERIES);
    llm__emit_part_norm(net, layer, LLM__WIDE_K_NORM, LLM__KEYS, LLM__KEYS);

    int angles = l->window && c->local_rope_base > 0 ? LLM__LOCAL_ANGLES : LLM__ANGLES;
    llm_op *rope = llm__emit_op(&net->program, LLM_OP_ROPE_STORE, layer, angles, -1);
    rope->in[1] = LLM__QUERIES;
    rope->in[2] = LLM__KEYS;
    rope->in[3] = LLM__VALUES;
    rope->in[4] = LLM__CACHE;
    rope->attention = shape;
    rope->pairing = c->rope_pairing;
    rope->rope_dim = l->no_rope ? 0 : c->rope_dim;
    rope->epsilon = c->norm_epsilon;
    rope->q_norm = w[LLM__Q_NORM].data ? &w[LLM__Q_NORM] : NULL;
    rope->k_norm = w[LLM__K_NORM].data ? &w[LLM__K_NORM] : NULL;

    llm_op *attention = llm__emit_op(&net->program, LLM_OP_ATTENTION, layer, LLM__QUERIES,
                                     LLM__ATTENDED);
    attention->in[1] = LLM__CACHE;
    attention->attention = shape;
    llm__emit_end_of_block(net, layer, LLM__O, LLM__O_BIAS, LLM__ATTN_POST_NORM, LLM__ATTENDED);
}

static llm_op *llm__emit_route_op(llm__network *net, llm_op_kind kind, int layer, int in, int in1,
                                  int out) {
    llm_op *op = llm__emit_op(&net->program, kind, layer, in, out);
    op->in[1] = in1;
    op->n_experts = net->model->config.n_experts;
    op->n_used = net->model->config.n_experts_used;
    return op;
}

/* Multiply each row by a matrix of its expert: gate, up or down (0 to 2). */
static void llm__emit_expert_matmul(llm__network *net, int layer, int matrix, int in, int out) {
    static const char *const names[] = {"ffn_gate_exps.weight", "ffn_up_exps.weight",
                                        "ffn_down_exps.weight"};
    llm_op *op = llm__emit_route_op(net, LLM_OP_EXPERTS, layer, in, LLM__SORTED, out);
    op->weight = &net->experts[((int64_t)layer * 3 + matrix) * op->n_experts];
    op->name = names[matrix];
}

/* up -1: the activation alone */
static void llm__emit_swiglu(llm__network *net, int layer, int gate, int up) {
    llm_op *op = llm__emit_op(&net->program, LLM_OP_SWIGLU, layer, gate, gate);
    op->in[1] = up;
    op->activation = net->model->config.activation;
}

/* x += the weighted sum of the outputs of the token's experts, each a feed-forward block, for the
 * normalised x (Shazeer et al. 2017; Fedus et al. 2021). Rows are sorted by expert, so an expert's
 * weights are read once per step, and only if needed. */
static void llm__emit_experts(llm__network *net, int layer) {
    int h = llm__emit_part_norm(net, layer, LLM__FFN_NORM, LLM__X, LLM__NORMED);
    bool shared = net->parts[layer * LLM__N_PARTS + (int)LLM__SHARED_GATE].data != NULL;
    llm__emit_matmul(net, layer, LLM__ROUTER, LLM__N_PARTS, h, LLM__ROUTER_LOGITS);
    llm__emit_route_op(net, LLM_OP_ROUTE, layer, LLM__ROUTER_LOGITS, -1, LLM__ROUTES)->normalize =
        net->model->config.norm_experts;
    llm__emit_route_op(net, LLM_OP_GROUP_ROUTES, layer, LLM__ROUTES, -1, LLM__SORTED);
    llm__emit_route_op(net, LLM_OP_GATHER_ROUTES, layer, h, LLM__SORTED, LLM__PICKED);
    if (shared) {
        llm__emit_matmul(net, layer, LLM__SHARED_ROUTER, LLM__N_PARTS, h, LLM__SHARED_FACTOR);
        llm__emit_matmul(net, layer, LLM__SHARED_GATE, LLM__N_PARTS, h, LLM__SHARED_GATES);
        llm__emit_matmul(net, layer, LLM__SHARED_UP, LLM__N_PARTS, h, LLM__SHARED_UPS);
        llm__emit_swiglu(net, layer, LLM__SHARED_GATES, LLM__SHARED_UPS);
        llm__emit_matmul(net, layer, LLM__SHARED_DOWN, LLM__N_PARTS, LLM__SHARED_GATES, h);
    }
    llm__emit_expert_matmul(net, layer, 0, LLM__PICKED, LLM__EXPERT_GATES);
    llm__emit_expert_matmul(net, layer, 1, LLM__PICKED, LLM__EXPERT_UPS);
    llm__emit_swiglu(net, layer, LLM__EXPERT_GATES, LLM__EXPERT_UPS);
    llm__emit_expert_matmul(net, layer, 2, LLM__EXPERT_GATES, LLM__PICKED);
    llm_op *sum = llm__emit_route_op(net, LLM_OP_SUM_ROUTES, layer, LLM__PICKED, LLM__ROUTES,
                                     LLM__X);
    sum->in[2] = LLM__SORTED;
    sum->in[3] = shared ? h : -1;
    sum->in[4] = shared ? LLM__SHARED_FACTOR : -1;
    sum->add = true;
}

/* Emit the gates of the feed-forward block of the normalised x. A parallel layer may have one norm
 * for both blocks. */
static void llm__emit_gates(llm__network *net, int layer) {
    const llm_tensor **parts = net->model->parts + layer * LLM__N_PARTS;
    bool shared = net->model->config.parallel && !parts[LLM__FFN_NORM];
    int h = llm__emit_part_norm(net, layer, shared ? LLM__ATTN_NORM : LLM__FFN_NORM, LLM__X,
                                LLM__NORMED);
    bool gated = parts[LLM__GATE] != NULL;
    if (gated) llm__emit_matmul(net, layer, LLM__GATE, LLM__GATE_BIAS, h, LLM__GATES);
    llm__emit_matmul(net, layer, LLM__UP, LLM__UP_BIAS, h, gated ? LLM__UPS : LLM__GATES);
    llm__emit_swiglu(net, layer, LLM__GATES, gated ? LLM__UPS : -1);
}

/* Both blocks add to x. In a parallel layer, the second reads x before the first adds to it. */
static void llm__emit_layer(llm__network *net, int layer, bool naive) {
    bool parallel = net->model->config.parallel;
    if (parallel) llm__emit_gates(net, layer);
    llm__emit_attention(net, layer, naive);
    if (net->model->layers[layer].experts) {
        llm__emit_experts(net, layer);
        return;
    }
    if (!parallel) llm__emit_gates(net, layer);
    llm__emit_end_of_block(net, layer, LLM__DOWN, LLM__DOWN_BIAS, LLM__FFN_POST_NORM, LLM__GATES);
}

/* The output matrix is the largest weight, so the rows whose logits are wanted are gathered
 * first. */
static void llm__emit_head(llm__network *net) {
    llm_program *p = &net->program;
    p->n_body = p->n_ops;
    llm__emit_op(p, LLM_OP_GATHER_ROWS, -1, LLM__X, LLM__ROWS);
    llm__emit_norm(net, -1, &net->ends[LLM__OUTPUT_NORM], &net->ends[LLM__OUTPUT_NORM_BIAS],
                   "output_norm.weight", LLM__ROWS, LLM__ROWS);
    llm_op *logits = llm__emit_op(p, LLM_OP_MATMUL, -1, LLM__ROWS, LLM__LOGITS);
    logits->weight = net->model->config.tied_output ? &net->embedding : &net->output;
    logits->name = net->model->config.tied_output ? "token_embd.weight" : "output.weight";
    if (net->ends[LLM__OUTPUT_BIAS].data) logits->bias = &net->ends[LLM__OUTPUT_BIAS];
    if (net->model->config.logit_cap > 0)
        llm__emit_op(p, LLM_OP_SOFTCAP, -1, LLM__LOGITS, LLM__LOGITS)->scale =
            net->model->config.logit_cap;
}

static bool llm__compile(llm__network *net, const llm_engine_options *o, llm_error *err) {
    enum { LAYER_OPS = 26, OTHER_OPS = 8 };
    const llm_config *c = &net->model->config;
    const int64_t k = c->n_experts_used;
    const llm_buffer buffers[LLM__N_BUFFERS] = {
        {"x", c->dim, false, NULL},
        {"h", c->dim, false, NULL},
        {"q", (int64_t)llm__width_of(c, LLM__Q_WIDTH), false, NULL},
        {"k", (int64_t)llm__width_of(c, LLM__KV_WIDTH), false, NULL},
        {"v", (int64_t)llm__width_of(c, LLM__KV_WIDTH), false, NULL},
        {"a", (int64_t)llm__width_of(c, LLM__Q_WIDTH), false, NULL},
        {"gate", c->hidden_dim, false, NULL},
        {"up", c->hidden_dim, false, NULL},
        {"ordered", (int64_t)net->model->ordered_cols, false, NULL},
        {"angles", c->rope_dim, false, NULL},
        {"local angles", c->local_rope_base > 0 ? c->rope_dim : 0, false, NULL},
        {"cache", 0, false, NULL},
        {"rows", c->dim, true, NULL},
        {"logits", c->vocab_size, true, NULL},
        {"router", c->n_experts, false, NULL},
        {"routes", 2 * k, false, NULL},
        {"sorted", 3 * k, false, NULL},
        {"picked", k * c->dim, false, NULL},
        {"expert gate", k * c->expert_dim, false, NULL},
        {"expert up", k * c->expert_dim, false, NULL},
        {"shared gate", c->shared_dim, false, NULL},
        {"shared up", c->shared_dim, false, NULL},
        {"shared factor", c->shared_dim > 0, false, NULL},
    };
    llm_program *p = &net->program;
    size_t n_ops = (size_t)c->n_layers * LAYER_OPS + OTHER_OPS;
    for (int i = 0; i < c->n_layers * LLM__N_PARTS; i++) n_ops += net->parts[i].columns != NULL;
    p->ops = (llm_op *)llm__new(n_ops, sizeof *p->ops, "a program", err);
    p->buffers = (llm_buffer *)llm__new(LLM__N_BUFFERS, sizeof *p->buffers, "a program", err);
    if (!p->ops || !p->buffers) return false;
    memcpy(p->buffers, buffers, sizeof buffers);
    p->n_buffers = LLM__N_BUFFERS;
    p->cache = &net->cache;
    p->fusions = o->fusions;
    llm_op *embed = llm__emit_op(p, LLM_OP_EMBED, -1, -1, LLM__X);
    embed->weight = &net->embedding;
    embed->name = "token_embd.weight";
    embed->scale = c->embedding_scale / c->residual_scale;
    llm__emit_norm(net, -1, &net->ends[LLM__EMBEDDING_NORM], &net->ends[LLM__EMBEDDING_NORM_BIAS],
                   "token_embd_norm.weight", LLM__X, LLM__X);
    for (int local = 0; local <= (c->local_rope_base > 0); local++) {
        llm_op *angles = llm__emit_op(p, LLM_OP_ROPE_ANGLES, -1, -1,
                                      local ? LLM__LOCAL_ANGLES : LLM__ANGLES);
        angles->weight = local ? &net->local_frequencies : &net->frequencies;
        angles->rope_dim = c->rope_dim;
        angles->scale = local ? 1 : c->rope_magnitude;
    }
    for (int layer = 0; layer < c->n_layers; layer++)
        llm__emit_layer(net, layer, o->naive_attention);
    llm__emit_head(net);
    return true;
}

/* Values in a buffer for steps of max_tokens tokens, rounded up so that the next buffer starts on a
 * cache line. 0: too many to address. */
static uint64_t llm__buffer_values(const llm__network *net, const llm_buffer *buffer,
                                   int max_tokens) {
    uint64_t values, rows = (uint64_t)llm_rounded_rows(buffer->head ? net->max_logits : max_tokens);
    if (!llm__multiply(rows, (uint64_t)buffer->width, &values) || values > SIZE_MAX / 64) return 0;
    return (values / 16 + 1) * 16;
}

static bool llm__allocate_buffers(llm__network *net, int max_tokens, llm_error *err) {
    llm_program *p = &net->program;
    llm_backend *b = net->backend;
    uint64_t total = 0;
    for (int i = 0; i < p->n_buffers; i++) {
        uint64_t values = llm__buffer_values(net, &p->buffers[i], max_tokens);
        if (values == 0 || total > SIZE_MAX / 64)
            return llm__fail(err, LLM_ERROR_MEMORY,
                             "activations of %d tokens are more than this machine can address",
                             max_tokens),
                   llm__blame(err, "max_batch_tokens");
        total += values;
    }
    net->activation_bytes = (size_t)total * sizeof(float);
    net->activations = (float *)b->allocate(
        b->context, net->activation_bytes,
        "the activations of a step (fewer tokens in a step need less)", err);
    if (!net->activations) return llm__blame(err, "max_batch_tokens");
    float *next = net->activations;
    for (int i = 0; i < p->n_buffers; i++) {
        p->buffers[i].data = next;
        next += llm__buffer_values(net, &p->buffers[i], max_tokens);
    }
    return true;
}

/* Compile the model and prepare its program. max_logits: most rows of logits in a slice. */
static bool llm__network_prepare(llm__network *net, const llm_engine_options *o, int max_logits,
                                 llm_error *err) {
    llm_limits limits = {o->max_batch_tokens, o->max_sequences, o->context_length, max_logits};
    net->max_logits = max_logits;
    if (!llm__compile(net, o, err) || !llm__allocate_buffers(net, o->max_batch_tokens, err))
        return false;
    net->x = net->program.buffers[LLM__X].data;
    net->logits = net->program.buffers[LLM__LOGITS].data;
    return net->backend->prepare(net->backend->context, &net->program, &limits, err) ||
           llm__blame(err, "max_batch_tokens");
}

/* ---- What an operation costs ---- */

const char *llm_op_name(llm_op_kind kind) {
    static const char *const names[LLM_N_OP_KINDS] = {
        "embed",        "rope_angles",   "rmsnorm",     "layernorm",      "matmul",
        "rope_store",   "attention",     "swiglu",      "softcap",        "gather_rows",
        "gather_columns", "route",       "group_routes", "gather_routes", "experts",
        "sum_routes"};
    return (unsigned)kind < LLM_N_OP_KINDS ? names[kind] : "unknown";
}

/* The expected number of experts that n tokens use, if each chooses k independently; exactly k for
 * one token. The batch does not say which ones. */
static double llm__experts_read(const llm_op *op, double n) {
    return op->n_experts * (1 - pow(1 - (double)op->n_used / op->n_experts, n));
}

/* Count, per head, the keys that attention reads over a batch, and the query-key pairs. */
static void llm__count_pairs(const llm_op *op, const llm_batch *batch, double *read,
                             double *pairs) {
    *read = *pairs = 0;
    for (int s = 0; s < batch->n_sequences; s++) {
        int first = batch->seq_first[s], end = first + batch->seq_count[s];
        if (first == end) continue;
        *read += batch->positions[first] + end - first -
                 llm__first_seen(&op->attention, batch->positions[first]);
        for (int t = first; t < end; t++)
            *pairs += batch->positions[t] + 1 -
                      llm__first_seen(&op->attention, batch->positions[t]);
    }
}

llm_cost llm_op_cost(const llm_program *program, const llm_op *op, const llm_batch *batch) {
    const llm_attention_shape *a = &op->attention;
    bool head = op->out >= 0 && program->buffers[op->out].head;
    double rows = head ? batch->n_logits : batch->n_tokens,
           width = op->out >= 0 ? (double)program->buffers[op->out].width : 0;
    double per_key = 2.0 * a->n_kv_heads * a->head_dim *
                     (double)llm__value_bytes(program->cache ? program->cache->type : LLM_F32);
    double read, pairs;
    llm_cost cost;
    memset(&cost, 0, sizeof cost);
    for (int i = 0; i < LLM_OP_INPUTS; i++)
        if (op->in[i] >= 0)
            cost.activation_bytes += 4 * rows * (double)program->buffers[op->in[i]].width;
    cost.activation_bytes += 4 * rows * width * (op->add ? 2 : 1);
    if (op->weight) {
        double weight_rows = op->kind == LLM_OP_EMBED ? rows : (double)op->weight->rows;
        if (op->kind == LLM_OP_EXPERTS) weight_rows *= llm__experts_read(op, rows);
        cost.weight_bytes = weight_rows *
                            (double)llm__row_bytes(op->weight->type, op->weight->cols);
    }
    const llm_weight *vectors[] = {op->bias, op->q_norm, op->k_norm};
    for (int i = 0; i < 3; i++)
        if (vectors[i]) cost.weight_bytes += 4.0 * (double)vectors[i]->cols;
    switch (op->kind) {
    case LLM_OP_MATMUL:
        cost.operations = 2 * rows * (double)op->weight->rows * (double)op->weight->cols;
        break;
    case LLM_OP_EXPERTS:
        cost.operations = 2 * rows * op->n_used * (double)op->weight->rows *
                          (double)op->weight->cols;
        break;
    case LLM_OP_ROUTE: cost.operations = 5 * rows * op->n_experts; break;
    case LLM_OP_SUM_ROUTES: cost.operations = 2 * rows * op->n_used * width; break;
    case LLM_OP_RMSNORM: cost.operations = 4 * rows * width; break;
    case LLM_OP_LAYERNORM: cost.operations = 6 * rows * width; break;
    case LLM_OP_SWIGLU:
    case LLM_OP_SOFTCAP: cost.operations = 5 * rows * width; break;
    case LLM_OP_ROPE_ANGLES: cost.operations = 2 * rows * width; break;
    case LLM_OP_ROPE_STORE:
        cost.operations = 3 * rows * (a->n_heads + a->n_kv_heads) * a->head_dim;
        cost.activation_bytes += 4 * rows * (a->n_heads + a->n_kv_heads) *
                                 a->head_dim; /* q and k are also written */
        cost.cache_bytes = rows * per_key;
        break;
    case LLM_OP_ATTENTION:
        llm__count_pairs(op, batch, &read, &pairs);
        cost.cache_bytes = read * per_key;
        cost.operations = 4 * pairs * a->n_heads * a->head_dim;
        break;
    case LLM_OP_GATHER_COLUMNS:
        cost.weight_bytes = 4.0 * (double)op->weight->cols;
        break; /* reads w->columns, not the weights */
    default: break;
    }
    return cost;
}

/* =====================================================================================
 * [6] The operations: each as the plain loop that defines it
 *
 * Each kind of llm_op has one function, as in a textbook: simple, slow, mostly in double precision.
 * llm__reference_run, at the end, loops over the program and calls them (LLM_ISA_REFERENCE). The
 * fast kernels of this file and llm.cu are tested against it.
 * ================================================================================== */

/* ---- The arguments of kernels ---- */

typedef struct llm__matmul_args { /* out = x times w transposed, + bias */
    const llm_weight *w;     /* (rows, cols) weights */
    const float *x;          /* (n, cols) input */
    const void *x_tiles;     /* x as int8 in tiles, for quantized w (see LLM__X_BYTES) */
    size_t x_tile_bytes;     /* size of one tile */
    int height;              /* rows of x in a tile */
    bool tiles;              /* use the processor's matrix tiles (AMX) */
    const float *bias;       /* (rows) bias; NULL: none */
    bool add;                /* add the result to out */
    int n;                   /* rows of x */
    float *out;              /* (n, rows) result */
    bool gate;               /* multiply the result by silu(out): out holds the gate */
    size_t tile_bytes;       /* bytes of scratch for unpacked weights */
} llm__matmul_args;

typedef struct llm__rope_args {
    const llm_batch *batch;
    const llm_op *op;
    const llm_cache *cache;
    const float *angles, *q_norm, *k_norm; /* (T, rope_dim/2, 2); (head_dim), NULL: no norm */
    float *q, *k;            /* (T, n_heads, head_dim); (T, n_kv_heads, head_dim) */
    const float *v;          /* (T, n_kv_heads, head_dim) */
} llm__rope_args;

typedef struct llm__attention_args {
    const llm_batch *batch;
    llm_attention_shape shape;
    const float *q;          /* (T, n_heads, head_dim) */
    const llm_cache *cache;
    int layer;
    float *out;              /* (T, n_heads, head_dim) */
    bool tiles;              /* use the processor's matrix tiles (AMX) */
} llm__attention_args;

/* The kernels for one instruction set. Each call computes one thread's share. */
typedef struct llm__kernels {
    llm_isa isa;
    int lanes;                       /* floats in a register */
    /* Round x (rows, cols) to int8, with a scale per `group` values, into a tile of `height` rows.
     * A call rounds only stripes first to end - 1, of 64 columns each. */
    void (*round_rows)(const float *x, int64_t cols, int group, int height, int rows, int64_t first,
                       int64_t end, char *tile);
    void (*matmul)(const llm__matmul_args *args, int64_t first_row, int64_t end_row, void *scratch);
    void (*rmsnorm)(const float *x, const float *weight, int n, int dim, float epsilon, bool add,
                    float *out);
    void (*layernorm)(const float *x, const float *weight, const float *bias, int n, int dim,
                      float epsilon, float *out); /* bias NULL: none */
    void (*swiglu)(llm_activation f, const float *gate, const float *up, int64_t n, float *out);
    void (*softcap)(const float *x, float cap, int64_t n, float *out);
    int32_t (*argmax)(const float *x, int n);
    double (*sum_exp)(const float *x, int n, float shift);
    void (*rope_and_store)(const llm__rope_args *args, int first_token, int end_token,
                           int first_kv_head, int end_kv_head);
    /* Attention for rows first_row to end_row - 1 of a sequence's queries for one kv head. g query
     * heads share the kv head; row t * g + h is the h-th of them for the sequence's t-th token. */
    void (*attention)(const llm__attention_args *args, int sequence, int kv_head, int first_row,
                      int end_row, void *scratch);
} llm__kernels;

typedef struct llm__cpu { /* the context of a CPU backend */
    llm_backend backend;
    const llm__kernels *kernels;     /* kernels for `isa`; NULL: the reference loops */
    llm_isa isa;
    int n_threads;
    bool pack;                       /* whether weights are packed into slabs when loaded */
    struct llm__slab *slabs;         /* (n_slabs) memory for packed weights */
    int64_t n_slabs, slab_capacity;
    uint64_t rounded_bytes;          /* size of `rounded` */
    void *rounded;                   /* one matmul input, rounded to int8 */
    char *scratch;                   /* (n_threads, scratch_bytes) memory for kernels */
    size_t scratch_bytes, tile_bytes; /* bytes of scratch per thread, and of its part for unpacked
                                       * weights */
    double alone_until;              /* until this llm_seconds(), only one thread runs; 0: all */
} llm__cpu;

static size_t llm__value_bytes(llm_type type) { return type == LLM_F32 ? 4 : 2; }

static bool llm__is_tree(const llm_batch *batch, int sequence) {
    int first = batch->seq_first[sequence];
    return batch->parents && batch->seq_count[sequence] > 1 && batch->parents[first + 1] >= 0;
}

/* Row (of head_dim values), in a layer's keys or values, of the position that a token sees: its own
 * or an earlier one. */
static int64_t llm__cache_row(const llm_batch *batch, const llm_cache *cache, int sequence,
                              int token, int kv_head, int position) {
    const int32_t *table = batch->block_tables + (int64_t)sequence * batch->table_stride;
    int size = batch->block_size, slot = table[position / size] * size + position % size;
    if (llm__is_tree(batch, sequence) && position >= batch->positions[batch->seq_first[sequence]]) {
        while (batch->positions[token] > position) token = batch->parents[token];
        slot = batch->slots[token];
    }
    return ((int64_t)(slot / size) * cache->n_kv_heads + kv_head) * size + slot % size;
}

static const char *llm__cache_layer(const llm_cache *cache, const void *side, int layer) {
    return (const char *)side + (size_t)layer * cache->layer_bytes;
}

/* Index of a row's first value in its layer; its values are *stride apart. */
static int64_t llm__cache_place(const llm_cache *cache, const void *side, int64_t row,
                                int64_t *stride) {
    bool transposed = side == cache->keys && cache->keys_transposed;
    int64_t slot = row % cache->block_size;
    *stride = transposed ? cache->block_size : 1;
    return transposed ? (row - slot) * cache->head_dim + slot : row * cache->head_dim;
}

/* The first position that a token attends to: 0, or the first of the last `window` tokens (Child et
 * al. 2019). Earlier tokens stay in the cache, for the prefix cache. */
static int llm__first_seen(const llm_attention_shape *shape, int position) {
    return shape->window > 0 && position >= shape->window ? position - shape->window + 1 : 0;
}

/* ALiBi (Press et al. 2021): a head reduces the score of a key by its slope times the distance. For
 * 8 heads with `alibi` 8, slopes are 1/2, 1/4, ... 1/256; heads beyond a power of two are in
 * between. */
static float llm__alibi_slope(const llm_attention_shape *shape, int head) {
    int n = 1;
    while (2 * n <= shape->n_heads) n *= 2;
    float part = head < n ? (float)head + 1 : (float)(head - n) + 0.5f;
    return exp2f(-shape->alibi * part / (float)n);
}

/* ---- The reference loops ---- */

/* Root mean square normalisation (Zhang and Sennrich 2019): scale each row of x (n, dim) to length
 * sqrt(dim), then multiply it by the weights (dim). */
static void llm__plain_rmsnorm(const float *x, const float *weight, int64_t n, int64_t dim,
                               float epsilon, bool add, float *out) {
    for (int64_t row = 0; row < n; row++) {
        double sum = 0.0;
        for (int i = 0; i < dim; i++) sum += (double)x[row * dim + i] * x[row * dim + i];
        double scale = 1.0 / sqrt(sum / (double)dim + epsilon);
        for (int i = 0; i < dim; i++)
            out[row * dim + i] = (float)(x[row * dim + i] * scale * weight[i] +
                                         (add ? out[row * dim + i] : 0));
    }
}

/* Layer normalisation (Ba et al. 2016): the same after subtracting the mean of the row, + bias. */
static void llm__plain_layernorm(const float *x, const float *weight, const float *bias, int64_t n,
                                 int64_t dim, float epsilon, float *out) {
    for (int64_t row = 0; row < n; row++, x += dim, out += dim) {
        double mean = 0, sum = 0;
        for (int64_t i = 0; i < dim; i++) mean += x[i] / (double)dim;
        for (int64_t i = 0; i < dim; i++) sum += (x[i] - mean) * (x[i] - mean);
        double scale = 1 / sqrt(sum / (double)dim + epsilon);
        for (int64_t i = 0; i < dim; i++)
            out[i] = (float)((x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0));
    }
}

/* out (n, rows) = x (n, cols) times w transposed. unpacked (cols): scratch for a row of w. */
static void llm__plain_matmul(const float *x, const llm_weight *w, const float *bias, int64_t n,
                              bool add, float *unpacked, float *out) {
    const llm_type_info *type = llm_type_find(w->type);
    for (int64_t row = 0; row < w->rows; row++) {
        type->unpack((const char *)w->data + (size_t)row * llm__row_bytes(w->type, w->cols),
                     unpacked, w->cols);
        for (int64_t i = 0; i < n; i++) {
            double sum = bias ? bias[row] : 0.0;
            for (int64_t j = 0; j < w->cols; j++) sum += (double)unpacked[j] * x[i * w->cols + j];
            out[i * w->rows + row] = (float)(add ? out[i * w->rows + row] + sum : sum);
        }
    }
}

/* SwiGLU and GeGLU (Shazeer 2020): the gate decides how much of each value of `up` passes; without
 * `up`, only the activation is applied. GELU is x times the share of a normal distribution below x;
 * its tanh approximation is x sigmoid(2y) with y = sqrt(2/pi) (x + 0.044715 x^3). */
static void llm__plain_swiglu(llm_activation f, const float *gate, const float *up, int64_t n,
                              float *out) {
    for (int64_t i = 0; i < n; i++) {
        double x = gate[i], y = f == LLM_GELU ? 1.5957691216057308 * (x + 0.044715 * x * x * x) : x;
        double share = f == LLM_GELU_ERF ? 0.5 * erfc(-x * 0.70710678118654752) : 1 / (1 + exp(-y));
        out[i] = (float)(x * share * (up ? up[i] : 1));
    }
}

/* Limit x smoothly to -cap .. cap (Gemma 2). */
static void llm__plain_softcap(const float *x, float cap, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) out[i] = cap * tanhf(x[i] / cap);
}

/* Rotary position embedding (Su et al. 2021): rotate pairs of dimensions by angles proportional to
 * the position. So the dot product of a query and a key depends on their distance alone. */
static void llm__plain_rope(float *head, const float *angles, int rope_dim,
                            llm_rope_pairing pairing) {
    for (int i = 0; i < rope_dim / 2; i++) {
        float *a = pairing == LLM_ROPE_HALVES ? head + i : head + 2 * i;
        float *b = pairing == LLM_ROPE_HALVES ? head + i + rope_dim / 2 : head + 2 * i + 1;
        double x = *a, y = *b, cosine = angles[2 * i], sine = angles[2 * i + 1];
        *a = (float)(x * cosine - y * sine);
        *b = (float)(x * sine + y * cosine);
    }
}

/* Store a key or value. f16 is clamped: infinity times an attention weight of 0 would be NaN. */
static void llm__plain_store(const llm_cache *cache, void *side, int layer, int slot, int kv_head,
                             const float *head) {
    int64_t block = slot / cache->block_size, offset = slot % cache->block_size, stride;
    int64_t at = llm__cache_place(
        cache, side, (block * cache->n_kv_heads + kv_head) * cache->block_size + offset, &stride);
    char *to = (char *)side + (size_t)layer * cache->layer_bytes;
    for (int i = 0; i < cache->head_dim; i++, at += stride) {
        if (cache->type == LLM_F16)
            llm__write_u16(to + 2 * at,
                           llm__f32_to_f16((float)fmax(fmin(head[i], 65504.0), -65504.0)));
        else memcpy(to + 4 * at, head + i, sizeof *head);
    }
}

static void llm__plain_rope_store(const llm__rope_args *args) {
    const llm_op *op = args->op;
    int n_heads = op->attention.n_heads, n_kv_heads = op->attention.n_kv_heads,
        head_dim = op->attention.head_dim;
    int64_t n = args->batch->n_tokens;
    if (args->q_norm)
        llm__plain_rmsnorm(args->q, args->q_norm, n * n_heads, head_dim, op->epsilon, false,
                           args->q);
    if (args->k_norm)
        llm__plain_rmsnorm(args->k, args->k_norm, n * n_kv_heads, head_dim, op->epsilon, false,
                           args->k);
    for (int64_t token = 0; token < n; token++) {
        const float *turn = args->angles + token * (op->rope_dim / 2) * 2;
        int slot = args->batch->slots[token];
        for (int head = 0; head < n_heads; head++)
            llm__plain_rope(args->q + (token * n_heads + head) * head_dim, turn, op->rope_dim,
                            op->pairing);
        for (int head = 0; head < n_kv_heads; head++) {
            int64_t row = (token * n_kv_heads + head) * head_dim;
            llm__plain_rope(args->k + row, turn, op->rope_dim, op->pairing);
            llm__plain_store(args->cache, args->cache->keys, op->layer, slot, head, args->k + row);
            llm__plain_store(args->cache, args->cache->values, op->layer, slot, head,
                             args->v + row);
        }
    }
}

static float llm__cache_value(const llm_cache *cache, const char *layer, int64_t i) {
    if (cache->type == LLM_F16) return llm__f16_to_f32(llm__read_u16(layer + 2 * i));
    float x;
    memcpy(&x, layer + 4 * i, sizeof x);
    return x;
}

/* Attention of one query (Vaswani et al. 2017): all scores, their softmax, the weighted mean of the
 * values. scores (position + 1) is scratch. */
static void llm__plain_attention_row(const llm__attention_args *args, int sequence, int token,
                                     int head, float *scores) {
    const llm_attention_shape *shape = &args->shape;
    const llm_cache *cache = args->cache;
    int head_dim = shape->head_dim, position = args->batch->positions[token];
    int kv_head = head / (shape->n_heads / shape->n_kv_heads);
    int64_t stride;
    const float *q = args->q + ((int64_t)token * shape->n_heads + head) * head_dim;
    float *out = args->out + ((int64_t)token * shape->n_heads + head) * head_dim;
    const char *keys = llm__cache_layer(cache, cache->keys, args->layer);
    const char *values = llm__cache_layer(cache, cache->values, args->layer);

    float largest = -INFINITY, slope = shape->alibi > 0 ? llm__alibi_slope(shape, head) : 0;
    int first = llm__first_seen(shape, position);
    for (int p = first; p <= position; p++) {
        int64_t row = llm__cache_row(args->batch, cache, sequence, token, kv_head, p);
        int64_t at = llm__cache_place(cache, cache->keys, row, &stride);
        double dot = 0.0;
        for (int i = 0; i < head_dim; i++)
            dot += (double)q[i] * llm__cache_value(cache, keys, at + i * stride);
        scores[p] = (float)(dot * shape->scale);
        if (shape->cap > 0) scores[p] = shape->cap * tanhf(scores[p] / shape->cap);
        scores[p] -= slope * (float)(position - p);
        if (scores[p] > largest) largest = scores[p];
    }
    double total = 0.0; /* exp(score - largest): same quotients, no overflow */
    for (int p = first; p <= position; p++) total += scores[p] = expf(scores[p] - largest);
    for (int i = 0; i < head_dim; i++) out[i] = 0.0f;
    for (int p = first; p <= position; p++) {
        int64_t row = llm__cache_row(args->batch, cache, sequence, token, kv_head, p);
        int64_t at = llm__cache_place(cache, cache->values, row, &stride);
        float share = (float)(scores[p] / total);
        for (int i = 0; i < head_dim; i++)
            out[i] += share * llm__cache_value(cache, values, at + i * stride);
    }
}

static void llm__plain_attention(const llm__attention_args *args, int token, float *scores) {
    const llm_batch *batch = args->batch;
    int s = 0;
    while (token < batch->seq_first[s] || token >= batch->seq_first[s] + batch->seq_count[s])
        if (++s == batch->n_sequences) return; /* the token has no sequence */
    for (int head = 0; head < args->shape.n_heads; head++)
        llm__plain_attention_row(args, s, token, head, scores);
}

/* The fast executor uses the next four functions, too. They compute rows first to end - 1. */
static void llm__embed(const llm_batch *batch, const llm_op *op, int64_t first, int64_t end,
                       float *out) {
    const llm_weight *table = op->weight;
    const llm_type_info *type = llm_type_find(table->type);
    size_t row_bytes = llm__row_bytes(table->type, table->cols);
    for (int64_t t = first; t < end; t++)
        type->unpack((const char *)table->data + (size_t)batch->tokens[t] * row_bytes,
                     out + t * table->cols, table->cols);
    for (int64_t i = first * table->cols; op->scale != 1 && i < end * table->cols; i++)
        out[i] *= op->scale;
}

static void llm__rope_angles(const llm_batch *batch, const llm_op *op, int64_t first, int64_t end,
                             float *out) {
    const float *frequencies = (const float *)op->weight->data;
    int n = op->rope_dim / 2;
    for (int64_t t = first; t < end; t++)
        for (int i = 0; i < n; i++) {
            float angle = (float)batch->positions[t] * frequencies[i], *at = out + 2 * (t * n + i);
            at[0] = op->scale * cosf(angle);
            at[1] = op->scale * sinf(angle);
        }
}

static void llm__gather_rows(const float *x, const int32_t *rows, int64_t width, int64_t first,
                             int64_t end, float *out) {
    for (int64_t i = first; i < end; i++)
        memcpy(out + i * width, x + rows[i] * width, (size_t)width * sizeof *x);
}

static void llm__gather_columns(const float *x, const llm_weight *w, int64_t first, int64_t end,
                                float *out) {
    for (int64_t i = first; i < end; i++)
        for (int64_t j = 0; j < w->cols; j++) out[i * w->cols + j] = x[i * w->cols + w->columns[j]];
}

/* Choose the op->n_used experts of tokens first to end - 1, and their factors. Comparisons keep the
 * indexes valid and distinct even if logits are NaN. */
static void llm__route(const llm_op *op, const float *logits, int64_t first, int64_t end,
                       llm_route *routes) {
    const int n = op->n_experts, k = op->n_used;
    for (int64_t t = first; t < end; t++) {
        const float *x = logits + t * n;
        llm_route *to = routes + t * k;
        double sum = 0;
        for (int e = 0; e < n; e++) {
            int at = e < k ? e : k - 1;
            if (e >= k && !(x[e] > x[to[at].expert])) continue;
            for (; at > 0 && x[e] > x[to[at - 1].expert]; at--) to[at] = to[at - 1];
            to[at].expert = e;
        }
        const float largest = x[to[0].expert];
        for (int i = 0; i < (op->normalize ? k : n); i++)
            sum += exp((double)x[op->normalize ? to[i].expert : i] - largest);
        for (int i = 0; i < k; i++)
            to[i].factor = (float)(exp((double)x[to[i].expert] - largest) / sum);
    }
}

/* Sort n routes by expert; routes of one expert keep their order. next (n_experts): scratch. */
static void llm__group_routes(const llm_op *op, const llm_route *routes, int64_t n, int32_t *next,
                              int32_t *sorted) {
    int32_t *experts = sorted, *tokens = sorted + n, *places = sorted + 2 * n;
    memset(next, 0, (size_t)op->n_experts * sizeof *next);
    for (int64_t i = 0; i < n; i++) next[routes[i].expert]++;
    for (int32_t e = 0, start = 0, count; e < op->n_experts; e++, start += count)
        count = next[e], next[e] = start;
    for (int64_t i = 0; i < n; i++) {
        int32_t place = places[i] = next[routes[i].expert]++;
        experts[place] = routes[i].expert;
        tokens[place] = (int32_t)(i / op->n_used);
    }
}

/* Add to rows first to end - 1 of out (width) the results of their routes, largest factor first,
 * and the shared expert's. n: number of all routes. */
static void llm__sum_routes(const llm_op *op, const float *results, const llm_route *routes,
                            const int32_t *sorted, const float *shared, const float *shared_factor,
                            int64_t n, int64_t width, int64_t first, int64_t end, float *out) {
    const int32_t *places = sorted + 2 * n;
    for (int64_t t = first; t < end; t++) {
        float *to = out + t * width;
        float factor = shared ? 1 / (1 + expf(-shared_factor[t])) : 0;
        for (int64_t i = 0; shared && i < width; i++) to[i] += factor * shared[t * width + i];
        for (int64_t r = t * op->n_used; r < (t + 1) * op->n_used; r++) {
            const float *from = results + places[r] * width;
            for (int64_t i = 0; i < width; i++) to[i] += routes[r].factor * from[i];
        }
    }
}

/* ---- The reference executor: the program, one operation after another ---- */

/* The arguments of llm_backend.run. */
typedef struct llm__step {
    llm__cpu *cpu;
    const llm_program *program;
    const llm_batch *batch;
    int first, n_logits;     /* the head's slice of batch->logit_rows */
} llm__step;

/* Input `index` of an operation; NULL: none. */
static float *llm__in(const llm__step *step, const llm_op *op, int index) {
    return op->in[index] < 0 ? NULL : step->program->buffers[op->in[index]].data;
}

static float *llm__out(const llm__step *step, const llm_op *op) {
    return op->out < 0 ? NULL : step->program->buffers[op->out].data;
}

static int llm__op_rows(const llm__step *step, const llm_op *op) {
    if (op->kind == LLM_OP_EXPERTS || op->kind == LLM_OP_GATHER_ROUTES)
        return step->batch->n_tokens * op->n_used;
    return op->out >= 0 && step->program->buffers[op->out].head ? step->n_logits
                                                                : step->batch->n_tokens;
}

/* Input `index` of an operation: routes or sorted routes. */
static llm_route *llm__routes_in(const llm__step *step, const llm_op *op, int index) {
    return (llm_route *)(void *)llm__in(step, op, index);
}

static int32_t *llm__sorted_in(const llm__step *step, const llm_op *op, int index) {
    return (int32_t *)(void *)llm__in(step, op, index);
}

/* The rows of a product's input that share a matrix: all of them, or those of one expert. */
typedef struct llm__group {
    int64_t first, end;      /* rows first to end - 1 */
    const llm_weight *w;
} llm__group;

/* Find the next group of a product of n rows; start with zeros. False: there are no more. */
static bool llm__next_group(const llm__step *step, const llm_op *op, int64_t n, llm__group *g) {
    g->first = g->end;
    g->end = n;
    g->w = op->weight;
    if (g->first >= n || op->kind != LLM_OP_EXPERTS) return g->first < n;
    const int32_t *experts = llm__sorted_in(step, op, 1);
    for (g->end = g->first; g->end < n && experts[g->end] == experts[g->first];) g->end++;
    g->w = op->weight + experts[g->first];
    return true;
}

static const float *llm__vector(const llm_weight *w) { return w ? (const float *)w->data : NULL; }

static llm__rope_args llm__rope_args_of(const llm__step *step, const llm_op *op) {
    llm__rope_args args = {step->batch,
                         op,
                         step->program->cache,
                         llm__in(step, op, 0),
                         llm__vector(op->q_norm),
                         llm__vector(op->k_norm),
                         llm__in(step, op, 1),
                         llm__in(step, op, 2),
                         llm__in(step, op, 3)};
    return args;
}

static llm__attention_args llm__attention_args_of(const llm__step *step, const llm_op *op) {
    llm__attention_args args = {
        step->batch,        op->attention, llm__in(step, op, 0), step->program->cache, op->layer,
        llm__out(step, op), false};
    return args;
}

/* The operations of a part of the program: *first to *end - 1. */
static void llm__part_ops(const llm_program *p, llm_part part, int *first, int *end) {
    *first = part & LLM_BODY ? 0 : p->n_body;
    *end = part & LLM_HEAD ? p->n_ops : p->n_body;
}

static bool llm__check_step(const llm__step *step, llm_part part, llm_error *err);

/* llm_backend.run with the reference loops. */
static bool llm__reference_run(void *context, const llm_program *p, llm_part part,
                               const llm_batch *batch, int first, int n_logits, llm_error *err) {
    llm__step step = {(llm__cpu *)context, p, batch, first, n_logits};
    float *scratch = (float *)(void *)step.cpu->scratch;
    int i, end;
    if (!llm__check_step(&step, part, err)) return false;
    llm__part_ops(p, part, &i, &end);
    for (; i < end; i++) {
        double start = p->seconds ? llm_seconds() : 0;
        const llm_op *op = &p->ops[i];
        const llm_weight *w = op->weight;
        const float *x = llm__in(&step, op, 0);
        float *out = llm__out(&step, op);
        int64_t n = llm__op_rows(&step, op), width = out ? p->buffers[op->out].width : 0;
        switch (op->kind) {
        case LLM_OP_EMBED: llm__embed(batch, op, 0, n, out); break;
        case LLM_OP_ROPE_ANGLES: llm__rope_angles(batch, op, 0, n, out); break;
        case LLM_OP_RMSNORM:
            llm__plain_rmsnorm(x, llm__vector(w), n, w->cols, op->epsilon, op->add, out);
            break;
        case LLM_OP_LAYERNORM:
            llm__plain_layernorm(x, llm__vector(w), llm__vector(op->bias), n, w->cols, op->epsilon,
                                 out);
            break;
        case LLM_OP_MATMUL:
            llm__plain_matmul(x, w, llm__vector(op->bias), n, op->add, scratch, out);
            break;
        case LLM_OP_ROPE_STORE: {
            llm__rope_args args = llm__rope_args_of(&step, op);
            llm__plain_rope_store(&args);
            break;
        }
        case LLM_OP_ATTENTION: {
            llm__attention_args args = llm__attention_args_of(&step, op);
            for (int t = 0; t < n; t++) llm__plain_attention(&args, t, scratch);
            break;
        }
        case LLM_OP_SWIGLU:
            llm__plain_swiglu(op->activation, x, llm__in(&step, op, 1), n * width, out);
            break;
        case LLM_OP_SOFTCAP: llm__plain_softcap(x, op->scale, n * width, out); break;
        case LLM_OP_GATHER_ROWS:
            llm__gather_rows(x, batch->logit_rows + first, width, 0, n, out);
            break;
        case LLM_OP_GATHER_COLUMNS: llm__gather_columns(x, w, 0, n, out); break;
        case LLM_OP_ROUTE: llm__route(op, x, 0, n, (llm_route *)(void *)out); break;
        case LLM_OP_GROUP_ROUTES:
            llm__group_routes(op, llm__routes_in(&step, op, 0), n * op->n_used,
                              (int32_t *)(void *)scratch, (int32_t *)(void *)out);
            break;
        case LLM_OP_GATHER_ROUTES:
            llm__gather_rows(x, llm__sorted_in(&step, op, 1) + n, width / op->n_used, 0, n, out);
            break;
        case LLM_OP_EXPERTS:
            for (llm__group g = {0, 0, NULL}; llm__next_group(&step, op, n, &g);)
                llm__plain_matmul(x + g.first * w->cols, g.w, NULL, g.end - g.first, false, scratch,
                                  out + g.first * w->rows);
            break;
        case LLM_OP_SUM_ROUTES:
            llm__sum_routes(op, x, llm__routes_in(&step, op, 1), llm__sorted_in(&step, op, 2),
                            llm__in(&step, op, 3), llm__in(&step, op, 4), n * op->n_used, width, 0,
                            n, out);
            break;
        case LLM_N_OP_KINDS: break;
        }
        if (p->seconds) p->seconds[i] += llm_seconds() - start;
    }
    return true;
}

/* =====================================================================================
 * PART II: THE FOUNDATIONS
 * ================================================================================== */

/* =====================================================================================
 * [7] Numbers: storage types, bit by bit
 *
 * A decode step reads every weight once, so on most machines its time is bytes of weights / memory
 * bandwidth. Weights with fewer bits are smaller and faster, but less precise. GGUF has these
 * types:
 *
 *     type  bits/weight  layout
 *     f32       32       sign 1, exponent 8, fraction 23 bits
 *     f16       16       sign 1, exponent 5, fraction 10 bits: at most 65504
 *     bf16      16       sign 1, exponent 8, fraction 7 bits: the upper half of an f32
 *
 *     q8_0       8.5     | scale | 32 x int8 |                            value = scale * q
 *     q4_0       4.5     | scale | 32 nibbles |                           scale * (q - 8)
 *     q4_1       5       | scale | minimum | 32 nibbles |                 scale * q + minimum
 *     q5_0       5.5     | scale | 32 fifth bits | 32 nibbles |           scale * (q - 16)
 *     q5_1       6       | scale | minimum | 32 fifth bits | 32 nibbles | scale * q + minimum
 *
 *     q4_K       4.5     | scale | minimum | 8 group scales and minimums | 256 nibbles |
 *     q5_K       5.5     | scale | minimum | as in q4_K | 256 fifth bits | 256 nibbles |
 *                        value = scale * group scale * q - minimum * group minimum
 *     q6_K       6.5625  | 256 nibbles | 256 x 2 high bits | 16 group scales | scale |
 *                        value = scale * group scale * (q - 32)
 *
 * Neighbouring weights have similar magnitudes, so they share a scale, and an outlier costs
 * precision only in its own group. Scales and minimums are f16. In blocks of 32, the low nibble of
 * byte i belongs to value i, the high nibble to value i + 16, and fifth bit i to value i.
 *
 * A K block holds 256 values in groups of 32 (q6_K: 16). Group scales and minimums are integers of
 * 6 bits (q6_K: int8). The bits saved are used for a minimum (q4_K is as small as q4_0, which has
 * none) or for smaller groups (q6_K).
 *
 * Unpacking is exact or rounds once, so a file gives the same values on every machine.
 * ================================================================================== */

static float llm__float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t llm__float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float llm__f16_to_f32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) /* infinity, or NaN with its payload */
        return llm__float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x0400) /* normal: shift the fields, change the bias from 15 to 127 */
        return llm__float_from_bits(sign | ((magnitude << 13) + ((127 - 15) << 23)));
    /* zero or denormal: magnitude steps of 2^-24, exact in f32 */
    return llm__float_from_bits(sign | llm__float_bits((float)magnitude * (1.0f / 16777216.0f)));
}

/* Rounds to nearest, ties to even. */
static uint16_t llm__f32_to_f16(float x) {
    uint32_t bits = llm__float_bits(x);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more: infinity */
    if (magnitude >= 0x38800000) {                                 /* 2^-14 and more: normal */
        uint32_t tie_to_even = magnitude >> 13 & 1;
        return (uint16_t)(sign | ((magnitude - ((127 - 15) << 23) + 0xfff + tie_to_even) >> 13));
    }
    if (magnitude < 0x33000000) return (uint16_t)sign; /* rounds to zero */
    /* denormal: the fraction, with its implicit 1, in steps of 2^-24 */
    uint32_t fraction = (magnitude & 0x7fffff) | 0x800000;
    uint32_t shift = 126 - (magnitude >> 23);
    uint32_t steps = fraction >> shift, rest = fraction & ((1u << shift) - 1),
             half = 1u << (shift - 1);
    return (uint16_t)(sign | (steps + (rest > half || (rest == half && (steps & 1)))));
}

uint16_t llm_f32_to_f16(float x) { return llm__f32_to_f16(x); }
float llm_f16_to_f32(uint16_t half) { return llm__f16_to_f32(half); }

static float llm__bf16_to_f32(uint16_t x) { return llm__float_from_bits((uint32_t)x << 16); }

/* memcpy, since blocks are not aligned. */
static uint16_t llm__read_u16(const void *p) {
    uint16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static void llm__write_u16(void *p, uint16_t x) { memcpy(p, &x, sizeof x); }

static void llm__unpack_f32(const void *blocks, float *values, int64_t count) {
    memcpy(values, blocks, (size_t)count * sizeof *values);
}

static void llm__unpack_f16(const void *blocks, float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        values[i] = llm__f16_to_f32(llm__read_u16((const char *)blocks + 2 * i));
}

static void llm__unpack_bf16(const void *blocks, float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        values[i] = llm__bf16_to_f32(llm__read_u16((const char *)blocks + 2 * i));
}

enum {
    LLM__BLOCK = 32, LLM__Q8_0_BYTES = 2 + 32, LLM__Q4_0_BYTES = 2 + 16, LLM__Q4_1_BYTES = 4 + 16,
    LLM__Q4_Z_BYTES = 4 + 16,
    LLM__Q5_0_BYTES = 2 + 4 + 16, LLM__Q5_1_BYTES = 4 + 4 + 16,
    LLM__SUPER = 256, LLM__Q4_K_BYTES = 4 + 12 + 128, LLM__Q5_K_BYTES = 4 + 12 + 32 + 128,
    LLM__Q6_K_BYTES = 128 + 64 + 16 + 2
};

static void llm__unpack_q8_0(const void *blocks, float *values, int64_t count) {
    const uint8_t *block = (const uint8_t *)blocks;
    for (int64_t first = 0; first < count; first += LLM__BLOCK, block += LLM__Q8_0_BYTES) {
        float scale = llm__f16_to_f32(llm__read_u16(block));
        for (int i = 0; i < LLM__BLOCK; i++)
            values[first + i] = scale * (float)(int8_t)block[2 + i];
    }
}

/* ---- q4_0, q4_1, q5_0, q5_1: 4 or 5 bits, with a minimum or centred on zero */

static void llm__unpack_nibbles(const void *blocks, float *values, int64_t count, int bits,
                                bool has_minimum) {
    const uint8_t *block = (const uint8_t *)blocks;
    int zero = has_minimum ? 0 : 1 << (bits - 1);
    for (int64_t first = 0; first < count; first += LLM__BLOCK) {
        float scale = llm__f16_to_f32(llm__read_u16(block));
        float minimum = has_minimum ? llm__f16_to_f32(llm__read_u16(block + 2)) : 0.0f;
        const uint8_t *fifth = block + (has_minimum ? 4 : 2),
                      *nibbles = fifth + (bits == 5 ? 4 : 0);
        for (int i = 0; i < LLM__BLOCK; i++) {
            int q = nibbles[i % 16] >> (i / 16 * 4) & 15;
            if (bits == 5) q |= (fifth[i / 8] >> (i % 8) & 1) << 4;
            float value = scale * (float)(q - zero);
            values[first + i] = has_minimum ? value + minimum : value;
        }
        block = nibbles + 16;
    }
}

static void llm__unpack_q4_0(const void *b, float *x, int64_t n) {
    llm__unpack_nibbles(b, x, n, 4, false);
}
static void llm__unpack_q4_1(const void *b, float *x, int64_t n) {
    llm__unpack_nibbles(b, x, n, 4, true);
}
static void llm__unpack_q5_0(const void *b, float *x, int64_t n) {
    llm__unpack_nibbles(b, x, n, 5, false);
}
static void llm__unpack_q5_1(const void *b, float *x, int64_t n) {
    llm__unpack_nibbles(b, x, n, 5, true);
}
/* ---- q4_K and q5_K: 8 groups of 32 with a scale and a minimum of 6 bits each */

/* 8 scales and 8 minimums of 6 bits are packed into 12 bytes. For i = 0 .. 3, high bits first:
 *     byte i        top 2 bits of scale i + 4    | scale i
 *     byte i + 4    top 2 bits of minimum i + 4  | minimum i
 *     byte i + 8    low 4 bits of minimum i + 4  | low 4 bits of scale i + 4 */
static void llm__group_scales(const uint8_t *packed, int group, int *scale, int *minimum) {
    const uint8_t *p = packed + group % 4;
    *scale = group < 4 ? p[0] & 63 : (p[8] & 15) | p[0] >> 6 << 4;
    *minimum = group < 4 ? p[4] & 63 : p[8] >> 4 | p[4] >> 6 << 4;
}

/* Groups 2j and 2j + 1 are the low and the high nibbles of the same 32 bytes. Bit g of fifth[i]
 * belongs to value i of group g. scale x group scale x q is exact in f32. */
static void llm__unpack_groups(const void *blocks, float *values, int64_t count, int bits) {
    const uint8_t *block = (const uint8_t *)blocks;
    for (int64_t first = 0; first < count; first += LLM__SUPER) {
        float scale = llm__f16_to_f32(llm__read_u16(block)),
              minimum = llm__f16_to_f32(llm__read_u16(block + 2));
        const uint8_t *fifth = block + 16, *nibbles = fifth + (bits == 5 ? 32 : 0);
        for (int group = 0; group < 8; group++) {
            int s, m;
            llm__group_scales(block + 4, group, &s, &m);
            float group_scale = scale * (float)s, group_minimum = minimum * (float)m;
            for (int i = 0; i < 32; i++) {
                int q = nibbles[group / 2 * 32 + i] >> (group % 2 * 4) & 15;
                if (bits == 5) q |= (fifth[i] >> group & 1) << 4;
                *values++ = group_scale * (float)q - group_minimum;
            }
        }
        block = nibbles + 128;
    }
}

static void llm__unpack_q4_K(const void *b, float *x, int64_t n) { llm__unpack_groups(b, x, n, 4); }
static void llm__unpack_q5_K(const void *b, float *x, int64_t n) { llm__unpack_groups(b, x, n, 5); }
/* ---- q6_K: 16 groups of 16 with a scale of 8 bits each ----
 * Each half (4 quarters of 32 values) has 64 bytes of nibbles and 32 bytes of bit pairs. For value
 * i of quarter k, the low four bits are in nibble byte 32 (k % 2) + i (low nibble if k < 2, else
 * high nibble); the high two bits are bits 2k and 2k + 1 of byte i of the bit pairs. */

static void llm__unpack_q6_K(const void *blocks, float *values, int64_t count) {
    const uint8_t *block = (const uint8_t *)blocks;
    for (int64_t first = 0; first < count; first += LLM__SUPER, block += LLM__Q6_K_BYTES) {
        const uint8_t *scales = block + 192;
        float scale = llm__f16_to_f32(llm__read_u16(block + 208));
        for (int i = 0; i < LLM__SUPER; i++) {
            int half = i / 128, quarter = i / 32 % 4;
            int low = block[64 * half + 32 * (quarter % 2) + i % 32] >> (quarter / 2 * 4) & 15;
            int high = block[128 + 32 * half + i % 32] >> (2 * quarter) & 3;
            *values++ = scale * (float)(int8_t)scales[i / 16] * (float)((low | high << 4) - 32);
        }
    }
}

/* ---- q4_Z: the integers of AWQ and GPTQ, exactly ----
 * As q4_1, with a zero point in place of the minimum: value = scale x (q - zero). A minimum, -scale
 * x zero, would be rounded to f16. GPTQ stores zero - 1 in 4 bits, so zero is at most 16. */

static void llm__unpack_q4_Z(const void *blocks, float *values, int64_t count) {
    const uint8_t *block = (const uint8_t *)blocks;
    for (int64_t first = 0; first < count; first += LLM__BLOCK, block += LLM__Q4_Z_BYTES) {
        float scale = llm__f16_to_f32(llm__read_u16(block));
        int zero = llm__read_u16(block + 2);
        for (int i = 0; i < LLM__BLOCK; i++)
            values[first + i] = scale * (float)((block[4 + i % 16] >> (i / 16 * 4) & 15) - zero);
    }
}

static const llm_type_info llm__own_type = {LLM_Q4_Z,        "q4_Z", LLM__BLOCK,
                                            LLM__Q4_Z_BYTES, 0,      llm__unpack_q4_Z};

/* ---- Unscaled integers, for the layouts of chapter 10 ---- */

typedef struct llm__levels { /* 32 neighbouring values of a row */
    uint8_t q[LLM__BLOCK];   /* integers: int8 (q8_0) or unsigned (all others) */
    uint16_t scale, minimum; /* f16. minimum: added (K formats: subtracted); q4_Z: zero point */
    uint8_t group[2];        /* group scale and minimum (q4_K, q5_K); two int8 scales (q6_K) */
} llm__levels;

/* Read columns 32 x block to 32 x block + 31 of a row of blocks. */
static void llm__read_levels(llm_type type, const uint8_t *row, int64_t block, llm__levels *out) {
    memset(out, 0, sizeof *out);
    if (type == LLM_Q6_K) {
        const uint8_t *p = row + block / 8 * LLM__Q6_K_BYTES;
        int half = (int)(block % 8 / 4), quarter = (int)(block % 4);
        const uint8_t *low = p + 64 * half + 32 * (quarter % 2), *high = p + 128 + 32 * half;
        for (int i = 0; i < LLM__BLOCK; i++)
            out->q[i] = (uint8_t)((low[i] >> (quarter / 2 * 4) & 15) |
                                  (high[i] >> (2 * quarter) & 3) << 4);
        memcpy(out->group, p + 192 + block % 8 * 2, 2);
        out->scale = llm__read_u16(p + 208);
    } else if (type == LLM_Q4_K || type == LLM_Q5_K) {
        const uint8_t *p = row + block / 8 * (type == LLM_Q4_K ? LLM__Q4_K_BYTES : LLM__Q5_K_BYTES);
        int group = (int)(block % 8), scale, minimum;
        const uint8_t *nibbles = p + (type == LLM_Q5_K ? 48 : 16) + group / 2 * 32;
        for (int i = 0; i < LLM__BLOCK; i++) out->q[i] = nibbles[i] >> (group % 2 * 4) & 15;
        for (int i = 0; type == LLM_Q5_K && i < LLM__BLOCK; i++)
            out->q[i] |= (uint8_t)((p[16 + i] >> group & 1) << 4);
        llm__group_scales(p + 4, group, &scale, &minimum);
        out->group[0] = (uint8_t)scale;
        out->group[1] = (uint8_t)minimum;
        out->scale = llm__read_u16(p);
        out->minimum = llm__read_u16(p + 2);
    } else {
        bool has_minimum = type == LLM_Q4_1 || type == LLM_Q5_1 || type == LLM_Q4_Z,
             fifth = type == LLM_Q5_0 || type == LLM_Q5_1;
        int head = has_minimum ? 4 : 2, bits = fifth ? 4 : 0; /* sizes in bytes */
        const uint8_t *p = row +
                           block * (head + bits + (type == LLM_Q8_0 ? LLM__BLOCK : LLM__BLOCK / 2));
        out->scale = llm__read_u16(p);
        if (has_minimum) out->minimum = llm__read_u16(p + 2);
        p += head + bits;
        if (type == LLM_Q8_0) memcpy(out->q, p, LLM__BLOCK);
        else
            for (int i = 0; i < LLM__BLOCK / 2; i++) {
                out->q[i] = p[i] & 15;
                out->q[i + LLM__BLOCK / 2] = p[i] >> 4;
            }
        for (int i = 0; fifth && i < LLM__BLOCK; i++)
            out->q[i] |= (uint8_t)((p[i / 8 - bits] >> (i % 8) & 1) << 4);
    }
}

static const llm_type_info llm__types[] = {
    {LLM_F32, "f32", 1, 4, 0, llm__unpack_f32},
    {LLM_F16, "f16", 1, 2, 1, llm__unpack_f16},
    {LLM_BF16, "bf16", 1, 2, 32, llm__unpack_bf16},
    {LLM_Q8_0, "q8_0", LLM__BLOCK, LLM__Q8_0_BYTES, 7, llm__unpack_q8_0},
    {LLM_Q6_K, "q6_K", LLM__SUPER, LLM__Q6_K_BYTES, 18, llm__unpack_q6_K},
    {LLM_Q5_1, "q5_1", LLM__BLOCK, LLM__Q5_1_BYTES, 9, llm__unpack_q5_1},
    {LLM_Q5_0, "q5_0", LLM__BLOCK, LLM__Q5_0_BYTES, 8, llm__unpack_q5_0},
    {LLM_Q5_K, "q5_K", LLM__SUPER, LLM__Q5_K_BYTES, 16, llm__unpack_q5_K},
    {LLM_Q4_1, "q4_1", LLM__BLOCK, LLM__Q4_1_BYTES, 3, llm__unpack_q4_1},
    {LLM_Q4_0, "q4_0", LLM__BLOCK, LLM__Q4_0_BYTES, 2, llm__unpack_q4_0},
    {LLM_Q4_K, "q4_K", LLM__SUPER, LLM__Q4_K_BYTES, 14, llm__unpack_q4_K},
};

const llm_type_info *llm_type_at(int index) {
    int n = (int)(sizeof llm__types / sizeof llm__types[0]);
    return index >= 0 && index < n ? &llm__types[index] : NULL;
}

const llm_type_info *llm_type_find(llm_type type) {
    const llm_type_info *info;
    for (int i = 0; (info = llm_type_at(i)) != NULL; i++)
        if (info->type == type) return info;
    return type == LLM_Q4_Z ? &llm__own_type : NULL;
}

static char llm__lower(char c) { return (char)(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); }

const llm_type_info *llm_type_by_name(const char *name) {
    const llm_type_info *info;
    for (int i = 0; name && (info = llm_type_at(i)) != NULL; i++) {
        size_t n = 0;
        while (name[n] && llm__lower(name[n]) == llm__lower(info->name[n])) n++;
        if (!name[n] && !info->name[n]) return info;
    }
    return NULL;
}

static size_t llm__row_bytes(llm_type type, int64_t cols) {
    const llm_type_info *info = llm_type_find(type);
    return info ? (size_t)(cols / info->block_values) * (size_t)info->block_bytes : 0;
}

/* =====================================================================================
 * [8] Files: GGUF, safetensors and Hugging Face folders, AWQ and GPTQ
 *
 * A model is a few hundred tensors and a few dozen metadata values (the number of layers, the
 * vocabulary). A GGUF file holds both:
 *
 *     "GGUF"  version u32  number of tensors u64  number of metadata values u64
 *     each value:   key   type u32   the value itself
 *     each tensor:  name  n_dims u32  dims u64 x n_dims  type u32  offset u64
 *     padding to a multiple of the alignment (general.alignment; default 32)
 *     the data of each tensor, at its offset from here (aligned)
 *
 * A string is its length (u64) and its bytes; an array is its element type (u32), count (u64) and
 * elements. All numbers are little-endian. Nothing in the header is aligned.
 *
 * The file is mapped, not read: the system loads a page at its first access, drops it when memory
 * is short, and shares it between processes. So a large file opens at once, and tensors point into
 * the mapping. Do not shorten a mapped file: write another one, and rename it.
 *
 * Files are not trusted. Opening one checks counts against the remaining bytes, products against
 * 64-bit overflow, and offsets against the end of the file. Later code relies on this.
 * ================================================================================== */

typedef enum llm__memory { LLM__BORROWED, LLM__MAPPED, LLM__OWNED } llm__memory;

struct llm_file {
    char *path;
    llm_error *error;     /* filled in by failures while the file or its model is loaded */
    const uint8_t *data;  /* (size) the file; for a folder: settings as GGUF metadata */
    uint64_t size;        /* bytes of data */
    llm__memory memory;   /* ownership of data */
    int version;          /* GGUF version; 0: a folder or a tokenizer.json */
    bool folder;          /* a Hugging Face folder or a tokenizer.json */
    llm_value *values;               /* (n_values) values in file order */
    llm_tensor *tensors;             /* (n_tensors) tensors of all parts */
    const llm_string **value_index;  /* (n_values) the values, sorted by key */
    const llm_string **tensor_index; /* (n_tensors) the tensors, sorted by name */
    llm_file **parts;                /* (n_parts) the model's other files */
    void **memories;                 /* (n_memories) memory allocated while loading a folder */
    int64_t n_values, n_tensors, n_parts, n_memories;
    int64_t parts_capacity, memories_capacity;
    llm_json header;      /* header of a safetensors file; tensor names point into it */
};

/* ---- Errors ---- */

typedef unsigned long long llm__big; /* for "%llu" */

static bool llm__file_error(const llm_file *file, llm_status status, const char *format,
                            va_list arguments) {
    char text[440];
    vsnprintf(text, sizeof text, format, arguments);
    return llm__fail(file->error, status, "%s: %s", file->path, text);
}

/* The file is damaged or contradicts itself. */
LLM__PRINTF(2, 3)
static bool llm__bad(const llm_file *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    llm__file_error(file, LLM_ERROR_FORMAT, format, arguments);
    va_end(arguments);
    return false;
}

/* The file may be valid, but this engine cannot use it. */
LLM__PRINTF(2, 3)
static bool llm__unsupported(const llm_file *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    llm__file_error(file, LLM_ERROR_UNSUPPORTED, format, arguments);
    va_end(arguments);
    return false;
}

static bool llm__not_among(const llm_file *file, const char *what, llm__printable name,
                           const char *known) {
    return llm__unsupported(file, "%s \"%s\" is not supported; supported: %s", what, name.text,
                            known);
}

/* ---- Names ---- */

static llm_string llm__string(const char *text) {
    llm_string s = {text, strlen(text)};
    return s;
}

static int llm__compare_strings(const llm_string *a, const llm_string *b) {
    size_t shorter = a->length < b->length ? a->length : b->length;
    int order = shorter ? memcmp(a->data, b->data, shorter) : 0;
    return order ? order : (a->length > b->length) - (a->length < b->length);
}

/* Equal names are ordered by address, to make qsort deterministic. */
static int llm__compare_names(const void *a, const void *b) {
    const llm_string *x = *(const llm_string *const *)a, *y = *(const llm_string *const *)b;
    int order = llm__compare_strings(x, y);
    return order ? order : (x > y) - (x < y);
}

/* Return pointers to `count` records of `stride` bytes, sorted by name (their first member). For
 * equal names, the error is "<two> called 'NAME'". */
static const llm_string **llm__index(const llm_file *file, const void *items, int64_t count,
                                     size_t stride, const char *two) {
    const llm_string **index = (const llm_string **)llm__new((size_t)count, sizeof *index,
                                                             "an index of names", file->error);
    if (!index) return NULL;
    for (int64_t i = 0; i < count; i++)
        index[i] = (const llm_string *)(const void *)((const char *)items + (size_t)i * stride);
    qsort(index, (size_t)count, sizeof *index, llm__compare_names);
    for (int64_t i = 1; i < count; i++)
        if (!llm__compare_strings(index[i - 1], index[i])) {
            llm__bad(file, "%s called '%s'", two, llm__show(*index[i]).text);
            LLM_FREE((void *)index);
            return NULL;
        }
    return index;
}

static const void *llm__find_name(const llm_string *const *index, int64_t count,
                                  llm_string wanted) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = llm__compare_strings(index[middle], &wanted);
        if (!order) return index[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

/* ---- Growing arrays ---- */

/* Make room for one more record. list: address of the pointer to the records. The capacity doubles,
 * since counts in a header cannot be trusted. New memory is not zeroed: unused pages cost
 * nothing. */
static bool llm__grow(void *list, int64_t count, int64_t *capacity, size_t size, const char *what,
                      llm_error *err) {
    if (count < *capacity) return true;
    int64_t wanted = *capacity ? *capacity * 2 : 64;
    uint64_t bytes = 0;
    void *items;
    memcpy(&items, list, sizeof items);
    bool fits = llm__multiply((uint64_t)wanted, size, &bytes) && bytes <= SIZE_MAX / 2;
    items = fits ? LLM_REALLOC(items, (size_t)bytes) : NULL;
    if (!items) {
        llm__no_memory(err, fits ? bytes : SIZE_MAX, what);
        return false;
    }
    llm__want_large_pages(items, (size_t)bytes);
    *capacity = wanted;
    memcpy(list, &items, sizeof items);
    return true;
}

/* The same, and zero the record. */
static bool llm__add_record(void *list, int64_t count, int64_t *capacity, size_t size,
                            const char *what, llm_error *err) {
    void *items;
    if (!llm__grow(list, count, capacity, size, what, err)) return false;
    memcpy(&items, list, sizeof items);
    memset((char *)items + (size_t)count * size, 0, size);
    return true;
}

/* ---- Reading the header ---- */

typedef struct llm__reader {
    llm_file *file;
    uint64_t at;    /* offset of the next byte, at most file->size */
    char what[120]; /* the item being read, for errors */
} llm__reader;

/* Describe the item at byte `start` in r->what. name: may be NULL. */
static void llm__reads(llm__reader *r, const char *what, uint64_t start, const llm_string *name) {
    snprintf(r->what, sizeof r->what, name ? "%s '%s' at byte %llu" : "%s%s at byte %llu", what,
             name ? llm__show(*name).text : "", (llm__big)start);
}

static uint64_t llm__left(const llm__reader *r) { return r->file->size - r->at; }

static const uint8_t *llm__read_bytes(llm__reader *r, uint64_t n) {
    if (n > llm__left(r)) {
        llm__bad(r->file, "%s needs %llu more bytes, but the file ends at byte %llu: it is "
                          "damaged or incomplete; fetch it again",
                 r->what, (llm__big)n, (llm__big)r->file->size);
        return NULL;
    }
    r->at += n;
    return r->file->data + (r->at - n);
}

static bool llm__read_number(llm__reader *r, void *out, size_t size) {
    const uint8_t *bytes = llm__read_bytes(r, size);
    if (bytes) memcpy(out, bytes, size);
    return bytes != NULL;
}

static bool llm__read_string(llm__reader *r, llm_string *out) {
    uint64_t length = 0;
    if (!llm__read_number(r, &length, sizeof length)) return false;
    out->data = (const char *)llm__read_bytes(r, length);
    out->length = (size_t)length;
    return out->data != NULL;
}

/* Bytes of an element; 0: a string, an array or an unknown type. */
static size_t llm__value_size(uint32_t type) {
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof sizes ? sizes[type] : 0;
}

static bool llm__read_value(llm__reader *r, llm_value *value) {
    uint64_t start = r->at, bytes = 0;
    uint32_t type = 0;
    llm_string skipped;
    llm__reads(r, "the key of a metadata value", start, NULL);
    if (!llm__read_string(r, &value->key)) return false;
    if (!value->key.length || value->key.length > 65535)
        return llm__bad(r->file, "the metadata value at byte %llu has a key of %zu bytes (1 to "
                                 "65535 are allowed)",
                        (llm__big)start, value->key.length);
    llm__reads(r, "the value of", start, &value->key);
    if (!llm__read_number(r, &type, sizeof type)) return false;
    value->type = (llm_value_type)type;
    value->count = 1;
    if (value->type == LLM_VALUE_ARRAY &&
        (!llm__read_number(r, &type, sizeof type) || !llm__read_number(r, &value->count, 8)))
        return false;
    size_t size = llm__value_size(type);
    if (value->type == LLM_VALUE_ARRAY && type == LLM_VALUE_ARRAY)
        return llm__bad(r->file, "%s is an array of arrays, which is not supported", r->what);
    if (type != LLM_VALUE_STRING && !size)
        return llm__bad(r->file, "%s is of type %u, which does not exist", r->what, type);
    /* all elements must be inside the file; a string takes at least 8 bytes */
    if (size ? !llm__multiply(value->count, size, &bytes) : value->count > llm__left(r) / 8)
        return llm__bad(r->file, "%s claims to hold %llu elements, more than the file can", r->what,
                        (llm__big)value->count);
    start = r->at;
    for (uint64_t i = 0; !size && i < value->count; i++)
        if (!llm__read_string(r, &skipped)) return false;
    if (!llm__read_bytes(r, bytes)) return false;
    value->element_type = (llm_value_type)type;
    value->data = r->file->data + start;
    value->bytes = (size_t)(r->at - start);
    return true;
}

static bool llm__read_values(llm__reader *r, uint64_t count) {
    llm_file *file = r->file;
    int64_t capacity = 0;
    for (; (uint64_t)file->n_values < count; file->n_values++)
        if (!llm__add_record(&file->values, file->n_values, &capacity, sizeof *file->values,
                             "the metadata", file->error) ||
            !llm__read_value(r, &file->values[file->n_values]))
            return false;
    file->value_index = llm__index(file, file->values, file->n_values, sizeof *file->values,
                                   "the metadata has two values");
    return file->value_index != NULL;
}

/* Report an unsupported type by its name: `names` lists all types of GGUF by number. */
static bool llm__unsupported_type(const llm_file *file, llm_string tensor, uint32_t type) {
    static const char names[] =
        "f32 f16 q4_0 q4_1 unknown unknown q5_0 q5_1 q8_0 q8_1 q2_k q3_k q4_k q5_k q6_k q8_k "
        "iq2_xxs iq2_xs iq3_xxs iq1_s iq4_nl iq3_s iq2_s iq4_xs i8 i16 i32 i64 f64 iq1_m bf16 "
        "q4_0_4_4 q4_0_4_8 q4_0_8_8 tq1_0 tq2_0 iq4_nl_4_4 iq4_nl_4_8 iq4_nl_8_8 mxfp4 nvfp4 "
        "unknown";
    char known[200] = "";
    const char *name = names, *next;
    const llm_type_info *info;
    size_t used = 0;
    for (uint32_t i = 0; i < type && (next = strchr(name, ' ')) != NULL; i++) name = next + 1;
    for (int i = 0; (info = llm_type_at(i)) != NULL && used < sizeof known; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "",
                                 info->name);
    return llm__unsupported(file, "the tensor '%s' is of type %u (%.*s), which is not supported; "
                                  "supported are %s",
                            llm__show(tensor).text, type, (int)strcspn(name, " "), name, known);
}

/* False: no tensor of this type can have these dimensions. */
static bool llm__tensor_bytes(const llm_type_info *info, const uint64_t dims[4], uint64_t *bytes) {
    uint64_t values = 1;
    if (dims[0] % (uint64_t)info->block_values) return false;
    for (int i = 0; i < 4; i++)
        if (!dims[i] || !llm__multiply(values, dims[i], &values) || values > INT64_MAX)
            return false;
    return llm__multiply(values / (uint64_t)info->block_values, (uint64_t)info->block_bytes,
                         bytes) &&
           *bytes <= INT64_MAX;
}

/* Until llm__place_tensors, tensor->data points to the tensor's offset in the header. */
static bool llm__read_tensor(llm__reader *r, llm_tensor *tensor) {
    uint64_t start = r->at, *d = tensor->dims;
    uint32_t n_dims = 0, type = 0;
    llm__reads(r, "the name of a tensor", start, NULL);
    if (!llm__read_string(r, &tensor->name)) return false;
    if (!tensor->name.length)
        return llm__bad(r->file, "the tensor at byte %llu has no name", (llm__big)start);
    llm__reads(r, "the tensor", start, &tensor->name);
    if (!llm__read_number(r, &n_dims, sizeof n_dims)) return false;
    if (n_dims < 1 || n_dims > 4)
        return llm__bad(r->file, "%s has %u dimensions (1 to 4 are allowed)", r->what, n_dims);
    tensor->source = tensor->name;
    tensor->n_dims = (int)n_dims;
    for (uint32_t i = 0; i < 4; i++) d[i] = 1;
    if (!llm__read_number(r, d, n_dims * sizeof *d) || !llm__read_number(r, &type, sizeof type) ||
        !(tensor->data = llm__read_bytes(r, 8)))
        return false;
    const llm_type_info *info = type < LLM_Q4_Z ? llm_type_find((llm_type)type) : NULL;
    if (!info) return llm__unsupported_type(r->file, tensor->name, type);
    tensor->type = info->type;
    return llm__tensor_bytes(info, d, &tensor->bytes) ||
           llm__bad(r->file, "%s has the impossible shape %llu x %llu x %llu x %llu (none may be "
                             "zero, the first a multiple of %d for %s)",
                    r->what, (llm__big)d[0], (llm__big)d[1], (llm__big)d[2], (llm__big)d[3],
                    info->block_values, info->name);
}

static bool llm__index_tensors(llm_file *file, const char *two) {
    LLM_FREE((void *)file->tensor_index);
    file->tensor_index = llm__index(file, file->tensors, file->n_tensors, sizeof *file->tensors,
                                    two);
    return file->tensor_index != NULL;
}

static int llm__compare_places(const void *a, const void *b) {
    const llm_tensor *x = *(const llm_tensor *const *)a, *y = *(const llm_tensor *const *)b;
    const uint8_t *p = (const uint8_t *)x->data, *q = (const uint8_t *)y->data;
    return (p > q) - (p < q);
}

static bool llm__check_overlap(const llm_file *file) {
    size_t n = (size_t)file->n_tensors;
    const llm_tensor **order = (const llm_tensor **)llm__new(n, sizeof *order, "the tensors' order",
                                                             file->error);
    if (!order) return false;
    for (size_t i = 0; i < n; i++) order[i] = &file->tensors[i];
    qsort(order, n, sizeof *order, llm__compare_places);
    bool apart = true;
    for (size_t i = 1; apart && i < n; i++) {
        const uint8_t *data = (const uint8_t *)order[i]->data;
        if ((const uint8_t *)order[i - 1]->data + order[i - 1]->bytes > data)
            apart = llm__bad(file, "the tensors '%s' and '%s' overlap, at byte %llu",
                             llm__show(order[i - 1]->name).text, llm__show(order[i]->name).text,
                             (llm__big)(data - file->data));
    }
    LLM_FREE((void *)order);
    return apart;
}

static bool llm__place_tensors(llm__reader *r) {
    llm_file *file = r->file;
    uint64_t alignment = 32, begin = 0, offset, place, end;
    const llm_value *value = llm_file_find(file, "general.alignment");
    if (value &&
        (!llm_value_u64(value, 0, &alignment) || !alignment || (alignment & (alignment - 1))))
        return llm__bad(file, "general.alignment is %llu, but must be a power of two",
                        (llm__big)alignment);
    if (!llm__add(r->at, alignment - 1, &begin)) begin = UINT64_MAX;
    begin &= ~(alignment - 1);
    for (int64_t i = 0; i < file->n_tensors; i++) {
        llm_tensor *tensor = &file->tensors[i];
        memcpy(&offset, tensor->data, sizeof offset);
        if (offset & (alignment - 1))
            return llm__bad(file, "the tensor '%s' has the offset %llu, which is not a multiple of "
                                  "the alignment %llu",
                            llm__show(tensor->name).text, (llm__big)offset, (llm__big)alignment);
        if (!llm__add(begin, offset, &place) || !llm__add(place, tensor->bytes, &end) ||
            end > file->size)
            return llm__bad(file, "the tensor '%s' (%llu bytes at offset %llu from byte %llu) lies "
                                  "past the end of the file at byte %llu: it is damaged or "
                                  "incomplete; fetch it again",
                            llm__show(tensor->name).text, (llm__big)tensor->bytes, (llm__big)offset,
                            (llm__big)begin, (llm__big)file->size);
        tensor->data = file->data + place;
    }
    return llm__check_overlap(file);
}

/* Is this the short text that Git without LFS checks out in place of a large file? */
static bool llm__is_pointer(const void *data, uint64_t size) {
    static const char beginning[] = "version https://git-lfs";
    return size >= sizeof beginning - 1 && !memcmp(data, beginning, sizeof beginning - 1);
}
static const char llm__get_pointer[] =
    "a Git LFS pointer, not the file itself; get the file (git lfs pull)";

static bool llm__read_magic(llm__reader *r) {
    const llm_file *file = r->file;
    uint64_t length = 0;
    if (!file->size) return llm__bad(file, "not a GGUF file: it is empty");
    if (llm__is_pointer(file->data, file->size)) return llm__bad(file, "%s", llm__get_pointer);
    bool gguf = file->size >= 4 && !memcmp(file->data, "GGUF", 4);
    if (file->size > 8) memcpy(&length, file->data, sizeof length);
    /* a header's length, then JSON (a 14 GB GGUF file with 123 tensors would look the same) */
    if (!gguf && file->size > 8 && length <= file->size - 8 && file->data[8] == '{')
        return llm__bad(file, "a safetensors file is only a part of a model; give its folder, "
                              "which must also contain a config.json and a tokenizer.json");
    llm_string beginning = {(const char *)file->data, file->size < 16 ? (size_t)file->size : 16};
    r->at = 4;
    return gguf || llm__bad(file, "not a GGUF file: it starts with \"%s\" instead of \"GGUF\"",
                            llm__show(beginning).text);
}

static bool llm__read_header(llm__reader *r) {
    llm_file *file = r->file;
    uint32_t version = 0;
    uint64_t n_tensors = 0, n_values = 0;
    int64_t capacity = 0;
    if (!llm__read_magic(r)) return false;
    llm__reads(r, "the version", r->at, NULL);
    if (!llm__read_number(r, &version, sizeof version)) return false;
    if (version != 2 && version != 3)
        return llm__unsupported(file, "GGUF version %u is not supported (2 and 3 are)%s", version,
                                version && !(version & 0xffff)
                                    ? "; this looks like a big-endian file"
                                    : "");
    file->version = (int)version;
    llm__reads(r, "the number of tensors and values", r->at, NULL);
    if (!llm__read_number(r, &n_tensors, sizeof n_tensors) ||
        !llm__read_number(r, &n_values, sizeof n_values))
        return false;
    /* a value takes at least 14 bytes (key 1, data 1), a tensor 33 (name 1, one dimension) */
    if (n_values > llm__left(r) / 14 || n_tensors > llm__left(r) / 33)
        return llm__bad(file, "the header promises %llu metadata values and %llu tensors, more "
                              "than the file's %llu bytes can hold: it is damaged",
                        (llm__big)n_values, (llm__big)n_tensors, (llm__big)file->size);
    if (!llm__read_values(r, n_values)) return false;
    for (; (uint64_t)file->n_tensors < n_tensors; file->n_tensors++)
        if (!llm__add_record(&file->tensors, file->n_tensors, &capacity, sizeof *file->tensors,
                             "the tensors", file->error) ||
            !llm__read_tensor(r, &file->tensors[file->n_tensors]))
            return false;
    return llm__index_tensors(file, "there are two tensors") && llm__place_tensors(r);
}

/* ---- Opening and closing ---- */

static char *llm__copy_text(const char *text, const char *after, llm_error *err) {
    char *copy = (char *)llm__new(strlen(text) + strlen(after) + 1, 1, "a path", err);
    return copy ? strcat(strcpy(copy, text), after) : NULL;
}

static void llm__release(const void *data, uint64_t size, llm__memory memory) {
    if (memory == LLM__MAPPED && data) munmap((void *)(uintptr_t)data, (size_t)size);
    if (memory == LLM__OWNED) LLM_FREE((void *)(uintptr_t)data);
}

static bool llm__inside(const void *data, uint64_t bytes, const void *region, uint64_t size) {
    const char *first = (const char *)data, *start = (const char *)region;
    return region && first >= start && bytes <= size && (uint64_t)(first - start) <= size - bytes;
}

/* Drop mapped pages that a device has copied; the system reloads them when needed. */
static void llm__file_forget(const llm_file *file, const void *data, uint64_t bytes) {
    for (int64_t i = 0; i < file->n_parts; i++) llm__file_forget(file->parts[i], data, bytes);
#ifdef MADV_DONTNEED
    uintptr_t page = 4096, first = ((uintptr_t)data + page - 1) / page * page,
              end = ((uintptr_t)data + bytes) / page * page;
    if (file->memory == LLM__MAPPED && llm__inside(data, bytes, file->data, file->size) &&
        end > first)
        madvise((void *)first, end - first, MADV_DONTNEED);
#endif
}

/* Let llm_file_close free `memory`. On failure, it is freed here. */
static bool llm__add_memory(llm_file *file, void *memory) {
    if (!llm__add_record(&file->memories, file->n_memories, &file->memories_capacity,
                         sizeof *file->memories, "a file", file->error))
        return LLM_FREE(memory), false;
    file->memories[file->n_memories++] = memory;
    return true;
}

/* read: llm__read_header, llm__read_safetensors or NULL (no header). Takes ownership of `data`,
 * even on failure. */
static llm_file *llm__file_create(const void *data, uint64_t size, llm__memory memory,
                                  const char *name, bool (*read)(llm__reader *), llm_error *err) {
    llm_file *file = (llm_file *)llm__new(1, sizeof *file, "a file", err);
    if (!file) return llm__release(data, size, memory), (llm_file *)NULL;
    file->data = (const uint8_t *)data;
    file->size = size;
    file->memory = memory;
    file->error = err;
    file->path = llm__copy_text(name, "", err);
    llm__reader reader = {file, 0, ""};
    if (file->path && (!read || read(&reader))) return file;
    llm_file_close(file);
    return NULL;
}

/* *data is NULL if the file is empty. */
static bool llm__map(const char *path, const void **data, uint64_t *size, llm_error *err) {
    struct stat status;
    int descriptor = open(path, O_RDONLY | O_NONBLOCK); /* does not wait for a pipe's writer */
    bool known = descriptor >= 0 && !fstat(descriptor, &status),
         file = known && S_ISREG(status.st_mode);
    *data = NULL;
    *size = file ? (uint64_t)status.st_size : 0;
    if (*size > SIZE_MAX / 2) errno = EFBIG;
    else if (*size) *data = mmap(NULL, (size_t)*size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    int why = errno;
    if (descriptor >= 0) close(descriptor); /* the mapping stays valid */
    if (*data == MAP_FAILED) *data = NULL;
    return (file && (*data || !*size)) ||
           llm__fail(err, LLM_ERROR_FILE, "cannot open %s: %s", path,
                     !known || file             ? strerror(why)
                     : S_ISDIR(status.st_mode) ? "it is a directory, not a file"
                                                : "it is a pipe or a device, not a file");
}

static llm_file *llm__file_map(const char *path, bool (*read)(llm__reader *), llm_error *err) {
    const void *data = NULL;
    uint64_t size = 0;
    return llm__map(path, &data, &size, err)
               ? llm__file_create(data, size, LLM__MAPPED, path, read, err)
               : NULL;
}

/* ---- A model in several files ----
 * The files are called NAME-00001-of-00003.gguf and so on. Each has the values of llm__split_keys
 * and may have tensors; the first also has the metadata. The caller gets the first file, with the
 * tensors of all files. */

typedef struct llm__split_keys {
    uint64_t number, count, n_tensors; /* split.no (from 0), split.count, split.tensors.count */
} llm__split_keys;

/* A file without split.count is the only part: split->count = 1. */
static bool llm__read_split_keys(const llm_file *file, llm__split_keys *split) {
    const llm_value *count = llm_file_find(file, "split.count");
    split->number = 0;
    split->count = 1;
    if (count && (!llm_value_u64(count, 0, &split->count) || split->count > 99999))
        return llm__bad(file, "split.count is not a number from 0 to 99999");
    if (split->count < 2) return split->count = 1, true;
    bool known = llm_value_u64(llm_file_find(file, "split.no"), 0, &split->number) &&
                 split->number < split->count;
    return (known && llm_value_u64(llm_file_find(file, "split.tensors.count"), 0,
                                   &split->n_tensors)) ||
           llm__bad(file, "it is one of %u parts, but %s", (unsigned)split->count,
                    known ? "has no split.tensors.count" : "split.no does not say which");
}

/* Open part `number` of a model and check that it is that part. ending: where the end of the name
 * begins in `path`. split: the keys of another part, which must agree. */
static llm_file *llm__file_part_open(char *path, char *ending, const llm__split_keys *split,
                                     unsigned number, llm_error *err) {
    llm_error why;
    llm__clear(&why);
    llm__split_keys found;
    unsigned count = (unsigned)split->count;
    sprintf(ending, "-%05u-of-%05u.gguf", number + 1, count);
    llm_file *part = llm__file_map(path, llm__read_header, &why);
    if (!part) {
        llm__fail(err, why.status, "part %u of %u of the model is missing or damaged: %.420s",
                  number + 1, count, why.message);
        return NULL;
    }
    part->error = err;
    if (llm__read_split_keys(part, &found)) {
        if (found.count == count && found.number == number && found.n_tensors == split->n_tensors)
            return part;
        llm__bad(part, "its name says part %u of %u, with %llu tensors in all, but its metadata "
                       "says part %u of %u, with %llu: the parts are of different models, or "
                       "were renamed",
                 number + 1, count, (llm__big)split->n_tensors, (unsigned)found.number + 1,
                 (unsigned)found.count, (llm__big)found.n_tensors);
    }
    llm_file_close(part);
    return NULL;
}

/* Copy the tensors of all parts to the file's own list. two: see llm__index. */
static bool llm__file_join(llm_file *file, const char *two) {
    int64_t n = file->n_tensors;
    for (int64_t i = 0; i < file->n_parts; i++) n += file->parts[i]->n_tensors;
    llm_tensor *tensors = (llm_tensor *)llm__new((size_t)n, sizeof *tensors, "the tensors",
                                                 file->error);
    if (!tensors) return false;
    n = 0;
    for (int64_t i = -1; i < file->n_parts; i++) {
        const llm_file *part = i < 0 ? file : file->parts[i];
        for (int64_t k = 0; k < part->n_tensors; k++) tensors[n++] = part->tensors[k];
    }
    LLM_FREE(file->tensors);
    file->tensors = tensors;
    file->n_tensors = n;
    return llm__index_tensors(file, two);
}

/* Open the other parts, if any. Takes ownership of the file, even on failure. */
static llm_file *llm__file_with_parts(llm_file *file, llm_error *err) {
    llm__split_keys split;
    char ending[40], *path = NULL, *end;
    bool good = llm__read_split_keys(file, &split);
    if (good && split.count == 1) return file;
    unsigned number = (unsigned)split.number, count = (unsigned)split.count;
    good = good && (path = llm__copy_text(file->path, "", err)) != NULL;
    if (good) {
        size_t n = (size_t)sprintf(ending, "-%05u-of-%05u.gguf", number + 1, count);
        end = path + (strlen(path) > n ? strlen(path) - n : 0);
        good = !strcmp(end, ending) ||
               llm__bad(file, "it says that it is part %u of %u; its name must end in %s, so that "
                              "the others can be found in the same folder",
                        number + 1, count, ending);
    }
    if (good && number > 0) { /* the metadata is in the first */
        llm_file_close(file);
        file = llm__file_part_open(path, end, &split, 0, err);
        good = file != NULL;
    }
    uint64_t total = good ? (uint64_t)file->n_tensors : 0;
    for (unsigned i = 1; good && i < count; i++) {
        llm_file *part = NULL;
        good = llm__add_record(&file->parts, file->n_parts, &file->parts_capacity,
                               sizeof *file->parts, "the parts of a model", err) &&
               (part = llm__file_part_open(path, end, &split, i, err)) != NULL;
        if (good) file->parts[file->n_parts++] = part, total += (uint64_t)part->n_tensors;
    }
    LLM_FREE(path);
    if (good && total != split.n_tensors)
        good = llm__bad(file, "the %u parts hold %llu tensors, but should hold %llu: fetch them "
                              "again",
                        count, (llm__big)total, (llm__big)split.n_tensors);
    if (good && llm__file_join(file, "two parts have a tensor")) return file;
    llm_file_close(file);
    return NULL;
}

/* Defined below, and in chapter 9 (tokenizer.json). */
static llm_file *llm__folder_open(const char *path, llm_error *err);
static llm_file *llm__vocabulary_open(const void *text, uint64_t length, const char *path,
                                      llm_error *err);

llm_file *llm_file_open(const char *path, llm_error *err) {
    struct stat status;
    const void *data = NULL;
    uint64_t size = 0;
    llm__clear(err);
    if (!path || !*path) {
        llm__fail(err, LLM_ERROR_ARGUMENT, "no path of a model file was given");
        return NULL;
    }
    if (!stat(path, &status) && S_ISDIR(status.st_mode)) return llm__folder_open(path, err);
    if (!llm__map(path, &data, &size, err)) return NULL;
    bool json = size && *(const char *)data == '{';
    llm_file *file = json ? llm__vocabulary_open(data, size, path, err)
                          : llm__file_create(data, size, LLM__MAPPED, path, llm__read_header, err);
    if (json) llm__release(data, size, LLM__MAPPED);
    return file && !json ? llm__file_with_parts(file, err) : file;
}

llm_file *llm_file_from_memory(const void *data, size_t size, const char *name, llm_error *err) {
    llm__split_keys split = {0, 1, 0};
    llm__clear(err);
    if (!name) name = "memory";
    if (!data && size) {
        llm__fail(err, LLM_ERROR_ARGUMENT, "llm_file_from_memory: data is NULL");
        return NULL;
    }
    if (size && *(const char *)data == '{') return llm__vocabulary_open(data, size, name, err);
    llm_file *file = llm__file_create(data, size, LLM__BORROWED, name, llm__read_header, err);
    bool good = file && llm__read_split_keys(file, &split);
    if (good && split.count == 1) return file;
    if (good)
        llm__unsupported(file, "one of %u parts of a model, which only llm_file_open can find",
                         (unsigned)split.count);
    llm_file_close(file);
    return NULL;
}

void llm_file_close(llm_file *file) {
    if (!file) return;
    for (int64_t i = 0; i < file->n_parts; i++) llm_file_close(file->parts[i]);
    for (int64_t i = 0; i < file->n_memories; i++) LLM_FREE(file->memories[i]);
    llm__release(file->data, file->size, file->memory);
    llm_json_free(&file->header);
    void *memories[] = {file->parts,  file->memories, (void *)file->value_index,
                        file->values, file->tensors,  (void *)file->tensor_index,
                        file->path,   file};
    for (int i = 0; i < 8; i++) LLM_FREE(memories[i]);
}

const char *llm_file_path(const llm_file *file) { return file->path; }
uint64_t llm_file_size(const llm_file *file) {
    uint64_t size = file->folder && file->n_parts ? 0 : file->size; /* a folder is its parts */
    for (int64_t i = 0; i < file->n_parts; i++) size += file->parts[i]->size;
    return size;
}
int64_t llm_file_n_parts(const llm_file *file) {
    return file->n_parts + !(file->folder && file->n_parts);
}
int llm_file_version(const llm_file *file) { return file->version; }
int64_t llm_file_n_values(const llm_file *file) { return file->n_values; }
int64_t llm_file_n_tensors(const llm_file *file) { return file->n_tensors; }

const llm_value *llm_file_value(const llm_file *file, int64_t index) {
    return index >= 0 && index < file->n_values ? &file->values[index] : NULL;
}

const llm_tensor *llm_file_tensor(const llm_file *file, int64_t index) {
    return index >= 0 && index < file->n_tensors ? &file->tensors[index] : NULL;
}

/* A name is the first member of its value or tensor, so the cast is valid. */
const llm_value *llm_file_find(const llm_file *file, const char *key) {
    return (const llm_value *)llm__find_name(file->value_index, file->n_values, llm__string(key));
}

const llm_tensor *llm_file_find_tensor(const llm_file *file, const char *name) {
    return (const llm_tensor *)llm__find_name(file->tensor_index, file->n_tensors,
                                              llm__string(name));
}

/* ---- Reading values ---- */

/* A number of any type: in `real` if `fraction` is set, else in `negative` and `magnitude`. */
typedef struct llm__number {
    bool fraction, negative;
    uint64_t magnitude;
    double real;
} llm__number;

static bool llm__value_number(const llm_value *value, uint64_t index, llm__number *out) {
    size_t size = value ? llm__value_size(value->element_type) : 0;
    if (!size || index >= value->count || index >= value->bytes / size) return false;
    char kind = "uiuiuifu  uif"[value->element_type]; /* u: unsigned or bool, i: signed, f: real */
    uint64_t bits = 0;
    float single;
    memcpy(&bits, value->data + index * size, size);
    memcpy(&single, &bits, sizeof single);
    memset(out, 0, sizeof *out);
    out->fraction = kind == 'f';
    out->negative = kind == 'i' && bits >> (8 * size - 1);
    out->magnitude = out->negative ? (~bits + 1) & (UINT64_MAX >> (64 - 8 * size)) : bits;
    if (kind == 'f' && size == 4) out->real = single;
    else memcpy(&out->real, &bits, sizeof bits);
    return true;
}

/* Read a whole number. False: not whole, or over 64 bits. */
static bool llm__value_whole(const llm_value *value, uint64_t index, llm__number *n) {
    if (!llm__value_number(value, index, n)) return false;
    if (!n->fraction) return true;
    double magnitude = fabs(n->real);
    if (!(magnitude < 18446744073709551616.0) || floor(magnitude) != magnitude) return false;
    n->magnitude = (uint64_t)magnitude;
    n->negative = n->real < 0;
    return true;
}

bool llm_value_u64(const llm_value *value, uint64_t index, uint64_t *out) {
    llm__number n;
    if (!llm__value_whole(value, index, &n) || n.negative) return false;
    *out = n.magnitude;
    return true;
}

bool llm_value_i64(const llm_value *value, uint64_t index, int64_t *out) {
    llm__number n;
    if (!llm__value_whole(value, index, &n)) return false;
    if (n.magnitude > (uint64_t)INT64_MAX + n.negative) return false;
    *out = n.negative ? -(int64_t)(n.magnitude - 1) - 1 : (int64_t)n.magnitude;
    return true;
}

bool llm_value_f64(const llm_value *value, uint64_t index, double *out) {
    llm__number n;
    if (!llm__value_number(value, index, &n)) return false;
    if (!n.fraction) {
        n.real = (double)n.magnitude;
        /* integers of more than 53 bits must not be rounded */
        if (n.real >= 18446744073709551616.0 || (uint64_t)n.real != n.magnitude) return false;
        if (n.negative) n.real = -n.real;
    }
    *out = n.real;
    return true;
}

bool llm_value_bool(const llm_value *value, uint64_t index, bool *out) {
    uint64_t n;
    if (!llm_value_u64(value, index, &n) || n > 1) return false;
    *out = n == 1;
    return true;
}

bool llm_value_string(const llm_value *value, size_t *cursor, llm_string *out) {
    uint64_t length;
    if (!value || value->element_type != LLM_VALUE_STRING) return false;
    if (*cursor > value->bytes || value->bytes - *cursor < sizeof length) return false;
    memcpy(&length, value->data + *cursor, sizeof length);
    if (length > value->bytes - *cursor - sizeof length) return false;
    out->data = (const char *)value->data + *cursor + sizeof length;
    out->length = (size_t)length;
    *cursor += sizeof length + (size_t)length;
    return true;
}

/* ---- JSON ---- */

enum {
    LLM__JSON_DEPTH = 64,     /* maximum nesting */
    LLM__JSON_BYTES = 1 << 27 /* maximum length; a large tokenizer.json has 2^25 */
};

typedef struct llm__json_parser {
    llm_json *json;
    size_t length, at; /* bytes of text; offset of the next byte */
    int64_t capacity;  /* entries allocated for json->nodes */
    int depth;
    const char *original; /* unmodified text, to locate errors */
    const char *name;
    llm_error *err;
} llm__json_parser;

static size_t llm__utf8(const uint8_t *s, size_t n, uint32_t *code); /* chapter 9 */

/* Report an error by line and character, counted as in editors. Always false. */
LLM__PRINTF(3, 4)
static bool llm__json_error(llm__json_parser *p, size_t at, const char *format, ...) {
    char text[300];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    unsigned long long line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        if (p->original[i] == '\n') line++, column = 1;
        else column += ((uint8_t)p->original[i] & 0xC0) != 0x80;
    }
    if (!p->name) return llm__fail(p->err, LLM_ERROR_FORMAT, "column %llu: %s", column, text);
    return llm__fail(p->err, LLM_ERROR_FORMAT, "%s, line %llu, column %llu: %s", p->name, line,
                     column, text);
}

static bool llm__json_unexpected(llm__json_parser *p, const char *wanted) {
    if (p->at == p->length)
        return llm__json_error(p, p->at, "the text ends where %s should be", wanted);
    llm_string found = {p->original + p->at, 1};
    return llm__json_error(p, p->at, "'%s' where %s should be", llm__show(found).text, wanted);
}

static int llm__json_peek(const llm__json_parser *p) { /* -1 at the end */
    return p->at < p->length ? (uint8_t)p->json->text[p->at] : -1;
}

static bool llm__json_skip(llm__json_parser *p, int c) {
    if (llm__json_peek(p) != c) return false;
    p->at++;
    return true;
}

static void llm__json_space(llm__json_parser *p) {
    int c;
    while ((c = llm__json_peek(p)) == ' ' || c == '\n' || c == '\r' || c == '\t') p->at++;
}

/* Append a node. Returns its index; -1: out of memory. */
static int64_t llm__json_add(llm__json_parser *p, llm_json_kind kind) {
    llm_json *json = p->json;
    if (json->n_nodes == p->capacity &&
        !llm__add_record(&json->nodes, json->n_nodes, &p->capacity, sizeof *json->nodes, "JSON",
                         p->err))
        return -1;
    llm_json_node *node = &json->nodes[json->n_nodes];
    node->text = json->text + p->at;
    node->length = 0;
    node->kind = kind;
    node->span = 1;
    return json->n_nodes++;
}

static bool llm__json_hex(llm__json_parser *p, uint32_t *code) {
    *code = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        int c = llm__json_peek(p), letter = c | 0x20;
        if (c >= '0' && c <= '9') *code = *code << 4 | (uint32_t)(c - '0');
        else if (letter >= 'a' && letter <= 'f') *code = *code << 4 | (uint32_t)(letter - 'a' + 10);
        else return llm__json_unexpected(p, "a hexadecimal digit of \\u");
    }
    return true;
}

/* Read the code point after "\u". Above U+FFFF, it consists of two escapes, a "surrogate pair". */
static bool llm__json_escaped_code(llm__json_parser *p, uint32_t *code) {
    size_t start = p->at - 2;
    uint32_t low = 0;
    if (!llm__json_hex(p, code)) return false;
    if (*code < 0xD800 || *code > 0xDFFF) return true;
    bool pair = *code < 0xDC00 && p->length - p->at >= 2 && p->original[p->at] == '\\' &&
                p->original[p->at + 1] == 'u';
    if (pair) {
        p->at += 2;
        if (!llm__json_hex(p, &low)) return false;
    }
    if (!pair || low < 0xDC00 || low > 0xDFFF)
        return llm__json_error(p, start, "half of a surrogate pair: \\u%04X without its other half",
                               (unsigned)*code);
    *code = 0x10000 + ((*code - 0xD800) << 10) + (low - 0xDC00);
    return true;
}

static size_t llm__put_utf8(uint32_t code, char *out) {
    if (code < 0x80) return out[0] = (char)code, 1;
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3F));
    out[0] = (char)((0xF00u >> length & 0xFF) | code);
    return length;
}

/* Decode the escape after a backslash. *out is in text that has been read, so there is room. */
static bool llm__json_escape(llm__json_parser *p, char **out) {
    static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    int c = llm__json_peek(p);
    const char *name = c > 0 ? strchr(names, c) : NULL;
    if (!name && c != 'u')
        return llm__json_unexpected(p, "an escape (\\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX)");
    p->at++;
    uint32_t code = name ? (uint8_t)meanings[name - names] : 0;
    if (!name && !llm__json_escaped_code(p, &code)) return false;
    *out += llm__put_utf8(code, *out);
    return true;
}

/* Count the bytes from here that need no decoding: no '"', '\\', control character or invalid
 * UTF-8. */
static size_t llm__json_plain(const llm__json_parser *p) {
    const uint8_t *start = (const uint8_t *)p->json->text + p->at,
                  *end = start + (p->length - p->at), *at = start;
    while (at < end && *at >= ' ' && *at != '"' && *at != '\\') {
        uint32_t code = 0;
        size_t n = *at < 0x80 ? 1 : llm__utf8(at, (size_t)(end - at), &code);
        if (code > 0x10FFFF) break;
        at += n;
    }
    return (size_t)(at - start);
}

static bool llm__json_parse_string(llm__json_parser *p) {
    int64_t node = llm__json_add(p, LLM_JSON_STRING);
    if (node < 0) return false;
    size_t start = p->at++;
    char *first = p->json->text + p->at, *out = first;
    while (!llm__json_skip(p, '"')) {
        size_t plain = llm__json_plain(p);
        if (out != p->json->text + p->at) memmove(out, p->json->text + p->at, plain);
        out += plain;
        p->at += plain;
        int c = llm__json_peek(p);
        if (c == '"') continue;
        if (c < 0) return llm__json_error(p, start, "the string that begins here does not end");
        if (c < ' ')
            return llm__json_error(p, p->at,
                                   "the control character %d in a string; it must be escaped", c);
        if (c >= 0x80)
            return llm__json_error(p, p->at, "the byte 0x%02X is not valid UTF-8 here",
                                   (unsigned)c);
        p->at++;
        if (!llm__json_escape(p, &out)) return false;
    }
    p->json->nodes[node].text = first;
    p->json->nodes[node].length = (uint32_t)(out - first);
    return true;
}

static bool llm__json_digits(llm__json_parser *p) {
    size_t start = p->at;
    while (llm__json_peek(p) >= '0' && llm__json_peek(p) <= '9') p->at++;
    return p->at > start || llm__json_unexpected(p, "a digit");
}

static bool llm__json_parse_number(llm__json_parser *p) {
    int64_t node = llm__json_add(p, LLM_JSON_NUMBER);
    size_t start = p->at;
    llm__json_skip(p, '-');
    size_t whole = p->at;
    bool zero = llm__json_peek(p) == '0';
    if (node < 0 || !llm__json_digits(p)) return false;
    if (zero && p->at > whole + 1)
        return llm__json_error(p, whole, "a number must not begin with a 0 before other digits");
    if (llm__json_skip(p, '.') && !llm__json_digits(p)) return false;
    if (llm__json_skip(p, 'e') || llm__json_skip(p, 'E')) {
        if (!llm__json_skip(p, '+')) llm__json_skip(p, '-');
        if (!llm__json_digits(p)) return false;
    }
    p->json->nodes[node].length = (uint32_t)(p->at - start);
    return true;
}

static bool llm__json_parse_word(llm__json_parser *p) {
    static const char *const words[] = {"null", "false", "true"}; /* in llm_json_kind order */
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if (p->length - p->at < n || memcmp(p->json->text + p->at, words[i], n)) continue;
        if (llm__json_add(p, (llm_json_kind)i) < 0) return false;
        p->at += n;
        return true;
    }
    return llm__json_unexpected(p, "a value");
}

/* Check that an object's keys differ, using a hash table of node index + 1 (0: free). The seed
 * prevents deliberate collisions. */
static bool llm__json_unique_keys(llm__json_parser *p, int64_t object) {
    const llm_json_node *nodes = p->json->nodes, *node = nodes + object + 1,
                        *end = nodes + object + nodes[object].span;
    uint64_t mask = 15,
             seed = llm__mix((uint64_t)(uintptr_t)nodes ^ (uint64_t)(llm_seconds() * 1e9));
    while (mask < 2 * (uint64_t)nodes[object].length) mask = mask * 2 + 1;
    uint32_t *table = (uint32_t *)llm__new((size_t)mask + 1, sizeof *table, "JSON", p->err);
    if (!table) return false;
    bool twice = false;
    for (; node < end; node += 1 + node[1].span) {
        uint64_t slot = llm__hash_bytes(seed, node->text, node->length);
        for (; table[slot & mask] && !twice; slot++) {
            const llm_json_node *key = nodes + table[slot & mask] - 1;
            twice = key->length == node->length && !memcmp(key->text, node->text, key->length);
        }
        if (twice) break;
        table[slot & mask] = (uint32_t)(node - nodes) + 1;
    }
    LLM_FREE(table);
    if (!twice) return true;
    llm_string key = {node->text, node->length};
    return llm__json_error(p, (size_t)(node->text - p->json->text),
                           "the key \"%s\" occurs twice in its object", llm__show(key).text);
}

static bool llm__json_parse_value(llm__json_parser *p);

static bool llm__json_parse_container(llm__json_parser *p, bool object) {
    char close = object ? '}' : ']';
    uint32_t count = 0;
    int64_t node = llm__json_add(p, object ? LLM_JSON_OBJECT : LLM_JSON_ARRAY);
    if (node < 0) return false;
    if (++p->depth > LLM__JSON_DEPTH)
        return llm__json_error(p, p->at, "arrays or objects nest more than %d deep",
                               LLM__JSON_DEPTH);
    p->at++;
    llm__json_space(p);
    bool more = !llm__json_skip(p, close);
    for (; more; more = llm__json_skip(p, ','), count++) {
        llm__json_space(p);
        if (object && llm__json_peek(p) != '"')
            return llm__json_unexpected(p, "a key in quotation marks");
        if (object && !llm__json_parse_string(p)) return false;
        llm__json_space(p);
        if (object && !llm__json_skip(p, ':')) return llm__json_unexpected(p, "':'");
        if (!llm__json_parse_value(p)) return false;
        llm__json_space(p);
    }
    if (count && !llm__json_skip(p, close))
        return llm__json_unexpected(p, object ? "',' or '}'" : "',' or ']'");
    p->depth--;
    p->json->nodes[node].length = count;
    p->json->nodes[node].span = (unsigned)(p->json->n_nodes - node) & 0x1FFFFFFF;
    return !object || count < 2 || llm__json_unique_keys(p, node);
}

static bool llm__json_parse_value(llm__json_parser *p) {
    llm__json_space(p);
    int c = llm__json_peek(p);
    if (c == '"') return llm__json_parse_string(p);
    if (c == '{' || c == '[') return llm__json_parse_container(p, c == '{');
    if (c == '-' || (c >= '0' && c <= '9')) return llm__json_parse_number(p);
    return llm__json_parse_word(p);
}

void llm_json_free(llm_json *json) {
    LLM_FREE(json->text);
    LLM_FREE(json->nodes);
    memset(json, 0, sizeof *json);
}

bool llm_json_parse(llm_json *json, const char *text, size_t length, const char *name,
                    llm_error *err) {
    llm__clear(err);
    memset(json, 0, sizeof *json);
    llm__json_parser p = {json, length, 0, 0, 0, text, name, err};
    const char *what = name ? name : "JSON";
    if (!text && length) return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_json_parse: text is NULL");
    if (length > LLM__JSON_BYTES)
        return llm__fail(err, LLM_ERROR_FORMAT, "%s: %s of JSON are more than the limit of %s",
                         what, llm__show_bytes(length).text, llm__show_bytes(LLM__JSON_BYTES).text);
    if (llm__is_pointer(text, length))
        return llm__fail(err, LLM_ERROR_FORMAT, "%s: %s", what, llm__get_pointer);
    json->text = (char *)LLM_MALLOC(length + 1);
    if (!json->text) return llm__no_memory(err, length, what);
    llm__want_large_pages(json->text, length);
    if (length) memcpy(json->text, text, length);
    bool ok = llm__json_parse_value(&p);
    llm__json_space(&p);
    if (ok && p.at < length) ok = llm__json_unexpected(&p, "the end");
    if (!ok) llm_json_free(json);
    return ok;
}

bool llm_json_has_kind(const llm_json_node *node, llm_json_kind kind) {
    return node && node->kind == (unsigned)kind;
}

size_t llm_json_offset(const llm_json *json, const llm_json_node *node) {
    return (size_t)(node->text - json->text) - (node->kind == LLM_JSON_STRING); /* at the quote */
}

const llm_json_node *llm_json_first(const llm_json_node *container) {
    bool array = llm_json_has_kind(container, LLM_JSON_ARRAY);
    if (!array && !llm_json_has_kind(container, LLM_JSON_OBJECT)) return NULL;
    return container->length ? container + (array ? 1 : 2) : NULL;
}

const llm_json_node *llm_json_next(const llm_json_node *container, const llm_json_node *value) {
    if (!container || !value) return NULL;
    const llm_json_node *next = value + value->span + (container->kind == LLM_JSON_OBJECT);
    return next < container + container->span ? next : NULL;
}

bool llm_json_string(const llm_json_node *node, llm_string *out) {
    if (!llm_json_has_kind(node, LLM_JSON_STRING)) return false;
    out->data = node->text;
    out->length = node->length;
    return true;
}

bool llm_json_is(const llm_json_node *node, const char *text) {
    llm_string s;
    return llm_json_string(node, &s) && llm__is_text(s, text);
}

llm_string llm_json_key(const llm_json_node *value) {
    llm_string key = {value[-1].text, value[-1].length};
    return key;
}

const llm_json_node *llm_json_member(const llm_json_node *object, const char *key) {
    if (!llm_json_has_kind(object, LLM_JSON_OBJECT)) return NULL;
    const llm_json_node *value = llm_json_first(object);
    while (value && !llm_json_is(value - 1, key)) value = llm_json_next(object, value);
    return value;
}

bool llm_json_bool(const llm_json_node *node, bool *out) {
    bool on = llm_json_has_kind(node, LLM_JSON_TRUE);
    if (!on && !llm_json_has_kind(node, LLM_JSON_FALSE)) return false;
    *out = on;
    return true;
}

/* strtod is not used, since it depends on the locale. */
bool llm_json_f64(const llm_json_node *node, double *out) {
    if (!llm_json_has_kind(node, LLM_JSON_NUMBER)) return false;
    const char *s = node->text, *end = s + node->length;
    uint64_t digits = 0;
    long exponent = 0, written = 0;
    bool negative = *s == '-', point = false, down = false;
    for (s += negative; s < end && (*s | 0x20) != 'e'; s++) {
        if (*s == '.') point = true;
        else if (digits < UINT64_MAX / 10 - 1)
            digits = digits * 10 + (uint64_t)(*s - '0'), exponent -= point;
        else exponent += !point; /* digit beyond the precision */
    }
    if (s < end && (*++s == '-' || *s == '+')) down = *s++ == '-';
    for (; s < end; s++) written = written < 100000000 ? written * 10 + (*s - '0') : written;
    exponent += down ? -written : written;
    /* 10^22 is the largest power of ten that a double holds exactly */
    double x = (double)digits;
    if (digits >> 53 || exponent < -22 || exponent > 22)
        x = (double)((long double)digits * powl(10.0L, (long double)exponent));
    else x = exponent < 0 ? x / pow(10, (double)-exponent) : x * pow(10, (double)exponent);
    if (!digits) x = 0;
    *out = negative ? -x : x;
    return x <= DBL_MAX;
}

bool llm_json_i64(const llm_json_node *node, int64_t *out) {
    if (!llm_json_has_kind(node, LLM_JSON_NUMBER)) return false;
    const char *s = node->text, *end = s + node->length;
    bool negative = *s == '-';
    uint64_t x = 0, limit = (uint64_t)INT64_MAX + negative;
    for (s += negative; s < end; s++) {
        if (*s < '0' || *s > '9') return false;
        uint64_t digit = (uint64_t)(*s - '0');
        if (x > (limit - digit) / 10) return false;
        x = x * 10 + digit;
    }
    *out = negative ? (int64_t)(~x + 1) : (int64_t)x;
    return true;
}

bool llm_json_u64(const llm_json_node *node, uint64_t *out) {
    int64_t x;
    if (!llm_json_i64(node, &x) || x < 0) return false;
    *out = (uint64_t)x;
    return true;
}

/* ---- Safetensors ----
 * A file holds the length of its header (u64), the header in JSON, and the data. A header:
 *
 *     {"__metadata__": {...},
 *      "model.norm.weight": {"dtype": "BF16", "shape": [4096], "data_offsets": [0, 8192]}, ...}
 *
 * Offsets count from the end of the header. The last dimension of a shape is contiguous. */

enum { LLM__SAFETENSORS_HEADER = 100000000 }; /* limit of the format, in bytes */

typedef struct llm__dtype {
    const char *name;
    int bytes;     /* bytes per value */
    llm_type type; /* 100 and above: types of safetensors files only */
} llm__dtype;

static const llm__dtype llm__dtypes[] = {
    {"F32", 4, LLM_F32},        {"F16", 2, LLM_F16},           {"BF16", 2, LLM_BF16},
    {"F64", 8, (llm_type)100},  {"I64", 8, (llm_type)101},     {"U64", 8, (llm_type)102},
    {"I32", 4, (llm_type)103},  {"U32", 4, (llm_type)104},     {"I16", 2, (llm_type)105},
    {"U16", 2, (llm_type)106},  {"I8", 1, (llm_type)107},      {"U8", 1, (llm_type)108},
    {"BOOL", 1, (llm_type)109}, {"F8_E4M3", 1, (llm_type)110}, {"F8_E5M2", 1, (llm_type)111}};

static const llm__dtype *llm__dtype_of(const llm_tensor *t) {
    const llm__dtype *d = llm__dtypes;
    while (d->type != t->type) d++;
    return d;
}

/* A JSON value in printable form; "" for NULL. */
static llm__printable llm__show_node(const llm_json_node *node) {
    static const char *const words[] = {"null", "false", "true", "", "", "[...]", "{...}"};
    llm_string s = {node ? node->text : "", node ? node->length : 0};
    return llm__show(node && *words[node->kind] ? llm__string(words[node->kind]) : s);
}

/* Read a tensor's type, shape (possibly of 0 dimensions) and offsets, and check that they agree.
 * begin: offset of the data in the file. */
static bool llm__read_source(const llm_file *file, llm_tensor *t, const llm_json_node *node,
                             uint64_t begin) {
    const llm_json_node *dtype = llm_json_member(node, "dtype"),
                        *shape = llm_json_member(node, "shape"),
                        *place = llm_json_member(node, "data_offsets");
    const llm__dtype *d = llm__dtypes, *end = d + sizeof llm__dtypes / sizeof *llm__dtypes;
    uint64_t first, last, values = 1, size = file->size - begin;
    t->name = t->source = llm_json_key(node);
    llm__printable name = llm__show(t->name);
    while (d < end && !llm_json_is(dtype, d->name)) d++;
    if (d == end)
        return llm__unsupported(file, "the tensor '%s' is of the type '%s', which is unknown",
                                name.text, llm__show_node(dtype).text);
    if (!llm_json_has_kind(shape, LLM_JSON_ARRAY) || shape->length > 4)
        return llm__bad(file, "the tensor '%s' has no shape of up to 4 dimensions", name.text);
    t->type = d->type;
    t->n_dims = (int)shape->length;
    for (int i = 0; i < 4; i++) t->dims[i] = 1;
    const llm_json_node *n = llm_json_first(shape);
    for (int i = t->n_dims - 1; i >= 0; i--, n = llm_json_next(shape, n))
        if (!llm_json_u64(n, &t->dims[i]) || !t->dims[i] ||
            !llm__multiply(values, t->dims[i], &values))
            return llm__bad(file, "the tensor '%s' has an impossible shape", name.text);
    if (!llm_json_has_kind(place, LLM_JSON_ARRAY) || place->length != 2 ||
        !llm_json_u64(place + 1, &first) || !llm_json_u64(place + 2, &last))
        return llm__bad(file, "the tensor '%s' has no data_offsets of two numbers", name.text);
    if (first > last || last > size)
        return llm__bad(file, "the tensor '%s' has the data_offsets %llu to %llu, but there are "
                              "%llu bytes of data: the file is damaged or incomplete; fetch it "
                              "again",
                        name.text, (llm__big)first, (llm__big)last, (llm__big)size);
    t->data = file->data + begin + first;
    return (llm__multiply(values, (uint64_t)d->bytes, &t->bytes) && t->bytes == last - first) ||
           llm__bad(file, "the tensor '%s' of %llu values of type %s has %llu bytes, which is not "
                          "their size",
                    name.text, (llm__big)values, d->name, (llm__big)(last - first));
}

static bool llm__read_safetensors(llm__reader *r) {
    llm_file *file = r->file;
    uint64_t length = 0;
    int64_t capacity = 0;
    if (llm__is_pointer(file->data, file->size)) return llm__bad(file, "%s", llm__get_pointer);
    if (file->size >= 8) memcpy(&length, file->data, sizeof length);
    if (file->size < 8 || length > file->size - 8)
        return llm__bad(file, "a header of %llu bytes does not fit into a file of %llu: this is "
                              "not a safetensors file, or it is incomplete; fetch it again",
                        (llm__big)length, (llm__big)file->size);
    if (length > LLM__SAFETENSORS_HEADER)
        return llm__bad(file, "a header of %llu bytes; the format allows %d", (llm__big)length,
                        LLM__SAFETENSORS_HEADER);
    const char *text = (const char *)file->data + 8;
    if (!llm_json_parse(&file->header, text, (size_t)length, file->path, file->error)) return false;
    const llm_json_node *root = file->header.nodes;
    if (root->kind != LLM_JSON_OBJECT) return llm__bad(file, "the header is not an object");
    for (const llm_json_node *n = llm_json_first(root); n; n = llm_json_next(root, n)) {
        if (llm_json_is(n - 1, "__metadata__")) continue;
        if (!llm__add_record(&file->tensors, file->n_tensors, &capacity, sizeof *file->tensors,
                             "the tensors", file->error) ||
            !llm__read_source(file, &file->tensors[file->n_tensors], n, 8 + length))
            return false;
        file->n_tensors++;
    }
    return llm__check_overlap(file);
}

/* ---- Metadata written by a loader ----
 * A Hugging Face folder has JSON in place of metadata. The loaders translate it to the bytes of
 * GGUF metadata, which llm__read_values then reads and checks. */

typedef struct llm__bytes { /* a growing array of bytes */
    uint8_t *data;
    size_t length, capacity;
} llm__bytes;

static bool llm__append(llm__bytes *b, const void *data, size_t n, llm_error *err) {
    if (n > b->capacity - b->length) {
        size_t wanted = b->capacity * 2 > 4096 ? b->capacity * 2 : 4096;
        bool fits = n <= SIZE_MAX / 4 && b->length <= SIZE_MAX / 4;
        if (fits && wanted < b->length + n) wanted = b->length + n;
        uint8_t *grown = fits ? (uint8_t *)LLM_REALLOC(b->data, wanted) : NULL;
        if (!grown) return llm__no_memory(err, wanted, "a text");
        llm__want_large_pages(grown, wanted);
        b->data = grown;
        b->capacity = wanted;
    }
    if (n) memcpy(b->data + b->length, data, n);
    b->length += n;
    return true;
}

typedef struct llm__metadata {
    llm__bytes bytes;
    uint64_t n_values;
    const char *architecture; /* prefix for keys that begin with "." */
    llm_error err;            /* first failure; nothing is added after it */
} llm__metadata;

static bool llm__note_bytes(llm__metadata *m, const void *data, size_t n) {
    return m->err.status == LLM_OK && llm__append(&m->bytes, data, n, &m->err);
}

static bool llm__note_text(llm__metadata *m, llm_string s) {
    uint64_t length = s.length;
    return llm__note_bytes(m, &length, sizeof length) && llm__note_bytes(m, s.data, s.length);
}

/* Write a key; the caller then writes its n elements. type: LLM_VALUE_ARRAY, or that of the single
 * element. */
static void llm__note_key(llm__metadata *m, const char *key, llm_value_type type,
                          llm_value_type element, uint64_t n) {
    uint32_t numbers[2] = {(uint32_t)type, (uint32_t)element};
    bool array = type == LLM_VALUE_ARRAY;
    const char *prefix = *key == '.' ? m->architecture : "";
    uint64_t length = strlen(prefix) + strlen(key);
    m->n_values++;
    llm__note_bytes(m, &length, sizeof length);
    llm__note_bytes(m, prefix, strlen(prefix));
    llm__note_bytes(m, key, strlen(key));
    llm__note_bytes(m, numbers, array ? sizeof numbers : sizeof *numbers);
    if (array) llm__note_bytes(m, &n, sizeof n);
}

static void llm__note_u32(llm__metadata *m, const char *key, uint32_t x) {
    llm__note_key(m, key, LLM_VALUE_U32, LLM_VALUE_U32, 1);
    llm__note_bytes(m, &x, sizeof x);
}

static void llm__note_f32(llm__metadata *m, const char *key, double x) {
    float single = (float)x;
    llm__note_key(m, key, LLM_VALUE_F32, LLM_VALUE_F32, 1);
    llm__note_bytes(m, &single, sizeof single);
}

static void llm__note_bool(llm__metadata *m, const char *key, bool x) {
    llm__note_key(m, key, LLM_VALUE_BOOL, LLM_VALUE_BOOL, 1);
    llm__note_bytes(m, &x, 1);
}

static void llm__note_string(llm__metadata *m, const char *key, llm_string x) {
    llm__note_key(m, key, LLM_VALUE_STRING, LLM_VALUE_STRING, 1);
    llm__note_text(m, x);
}

static void llm__note_array(llm__metadata *m, const char *key, llm_value_type element,
                            const void *x, uint64_t n, size_t bytes) {
    llm__note_key(m, key, LLM_VALUE_ARRAY, element, n);
    llm__note_bytes(m, x, bytes);
}

/* Move the bytes to the file, and read its values from them. */
static bool llm__read_metadata(llm__metadata *m, llm_file *file, llm_error *err) {
    if (m->err.status != LLM_OK)
        return llm__fail(err, m->err.status, "%s: %s", file->path, m->err.message);
    file->data = m->bytes.data;
    file->size = m->bytes.length;
    file->memory = LLM__OWNED;
    file->error = err;
    memset(&m->bytes, 0, sizeof m->bytes);
    llm__reader r = {file, 0, ""};
    return llm__read_values(&r, m->n_values);
}

/* Defined in chapter 9. */
static bool llm__folder_vocabulary(llm__metadata *m, const char *folder, llm_error *err);

/* ---- Loading: the shape ---- */

typedef struct llm__loader {
    llm_model *model;
    const llm_file *file;
    bool *used;    /* (n_tensors of the file) whether the model uses the tensor */
    char key[128]; /* the latest key of llm__model_value, for errors */
} llm__loader;

/* Keys begin with the name of the architecture: "llama.block_count". */
static const llm_value *llm__model_value(llm__loader *l, const char *name) {
    snprintf(l->key, sizeof l->key, "%s.%s", l->model->config.architecture, name);
    return llm_file_find(l->file, l->key);
}

/* Read an integer from 1 to INT32_MAX. An absent key gives `fallback`; 0: an error. */
static bool llm__model_int(llm__loader *l, const char *name, int64_t fallback, int *out) {
    const llm_value *value = llm__model_value(l, name);
    uint64_t x = (uint64_t)fallback;
    if (!value && !fallback)
        return llm__bad(l->file, "the metadata has no %s, which this architecture needs", l->key);
    if (value && (value->type == LLM_VALUE_ARRAY || !llm_value_u64(value, 0, &x)))
        return llm__unsupported(
            l->file, "%s is not one whole number (a value per layer is not supported)", l->key);
    if (x < 1 || x > INT32_MAX)
        return llm__bad(l->file, "%s is %llu, which is impossible", l->key, (llm__big)x);
    *out = (int)x;
    return true;
}

static bool llm__model_float(llm__loader *l, const char *name, double fallback, float *out) {
    const llm_value *value = llm__model_value(l, name);
    double x = fallback;
    if (value && (!llm_value_f64(value, 0, &x) || !(x > 0) || x > 1e30))
        return llm__bad(l->file, "%s is not a positive number", l->key);
    *out = (float)x;
    return true;
}

static bool llm__model_architecture(llm__loader *l) {
    llm_model *model = l->model;
    llm_string name = {"", 0};
    size_t cursor = 0;
    char known[512];
    if (!llm_value_string(llm_file_find(model->file, "general.architecture"), &cursor, &name))
        return llm__bad(l->file, "the metadata has no general.architecture; is this a model file?");
    model->architecture = llm__find_architecture(name, false);
    llm__list_architectures(known, sizeof known, false);
    if (!model->architecture)
        return llm__not_among(l->file, "the architecture", llm__show(name), known);
    memcpy(model->config.architecture, name.data, name.length);
    model->config.rope_pairing = l->file->folder ? LLM_ROPE_HALVES : model->architecture->pairing;
    return true;
}

/* Is `word` in `list`, whose words are separated by single spaces? */
static bool llm__is_listed(llm_string word, const char *list) {
    for (size_t n; *list; list += n + (list[n] == ' ')) {
        n = strcspn(list, " ");
        if (n == word.length && !memcmp(list, word.data, n)) return true;
    }
    return false;
}

static bool llm__is_off(const llm_value *value) {
    double x;
    llm_string s;
    size_t cursor = 0;
    if (value->type == LLM_VALUE_ARRAY) return false;
    if (value->type == LLM_VALUE_STRING) return llm_value_string(value, &cursor, &s) && !s.length;
    return llm_value_f64(value, 0, &x) && x == 0;
}

/* Refuse an unknown option of the architecture unless it is off: it may change the result. */
static bool llm__model_known_keys(llm__loader *l) {
    static const char known[] = /* tensor_data_layout matters to converters only */
        "block_count context_length embedding_length feed_forward_length vocab_size "
        "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
        "attention.scale attn_logit_softcapping final_logit_softcapping logit_scale "
        "embedding_scale residual_scale rope.freq_base_swa rope.llm.layers "
        "attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.sliding_window "
        "attention.max_alibi_bias use_parallel_residual "
        "attention.sliding_window_pattern rope.dimension_count rope.freq_base rope.scale_linear "
        "rope.scaling.type rope.scaling.factor rope.scaling.attn_factor "
        "rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_fast "
        "rope.scaling.yarn_beta_slow rope.scaling.llm.stated_context_length tensor_data_layout";
    const char *prefix = l->model->config.architecture;
    const char *experts = l->model->architecture->traits & LLM__EXPERT_LAYERS
                              ? "expert_count expert_used_count expert_feed_forward_length "
                                "expert_shared_feed_forward_length expert_weights_norm"
                              : "";
    size_t n = strlen(prefix);
    for (int64_t i = 0; i < l->file->n_values; i++) {
        const llm_value *value = &l->file->values[i];
        llm_string key = value->key;
        if (key.length <= n || memcmp(key.data, prefix, n) || key.data[n] != '.') continue;
        llm_string name = {key.data + n + 1, key.length - n - 1};
        if (!llm__is_off(value) && !llm__is_listed(name, known) && !llm__is_listed(name, experts))
            return llm__unsupported(l->file, "%s is an option of %s that is not supported",
                                    llm__show(key).text, prefix);
    }
    return true;
}

static bool llm__model_scaling(llm__loader *l) {
    llm_config *c = &l->model->config;
    const llm_value *type = llm__model_value(l, "rope.scaling.type");
    llm_string name = {"linear", 6}; /* default, if there is only a factor */
    size_t cursor = 0;
    int stated = 0;
    if (type && !llm_value_string(type, &cursor, &name))
        return llm__bad(l->file, "%s is not a name", l->key);
    if (!llm__model_float(l, "rope.scale_linear", 1, &c->rope_factor) || /* the older key */
        !llm__model_float(l, "rope.scaling.factor", c->rope_factor, &c->rope_factor) ||
        !llm__model_float(l, "rope.scaling.attn_factor", 1, &c->rope_magnitude) ||
        !llm__model_float(l, "rope.scaling.yarn_beta_fast", 32, &c->rope_beta_fast) ||
        !llm__model_float(l, "rope.scaling.yarn_beta_slow", 1, &c->rope_beta_slow) ||
        !llm__model_int(l, "rope.scaling.original_context_length", c->context_length,
                        &c->rope_original_context) ||
        !llm__model_int(l, "rope.scaling.llm.stated_context_length", c->context_length, &stated))
        return false;
    if (llm__is_text(name, "none")) c->rope_factor = 1;
    else if (llm__is_text(name, "yarn")) c->rope_scaling = LLM_ROPE_YARN;
    else if (!llm__is_text(name, "linear"))
        return llm__not_among(l->file, "RoPE scaling", llm__show(name), "linear, yarn");
    else if (c->rope_factor != 1) c->rope_scaling = LLM_ROPE_LINEAR;
    if (c->rope_scaling == LLM_ROPE_YARN && c->rope_factor > 1)
        c->rope_magnitude *= 1.0f + 0.1f * logf(c->rope_factor);
    if (stated > c->context_length)
        snprintf(l->model->context_note, sizeof l->model->context_note,
                 "config.json says %d, but its YaRN scaling gives only %d, for an "
                 "original_max_position_embeddings of %d",
                 stated, c->context_length, c->rope_original_context);
    return true;
}

/* Find an array of one boolean per layer. *flags is NULL if the key is absent. */
static bool llm__model_flags(llm__loader *l, const char *name, const llm_value **flags) {
    const int n = l->model->config.n_layers;
    *flags = llm__model_value(l, name);
    if (*flags && ((*flags)->element_type != LLM_VALUE_BOOL || (*flags)->count != (uint64_t)n))
        return llm__unsupported(l->file, "%s is not a list of booleans, one for each of %d layers",
                                l->key, n);
    for (int i = 0; *flags && i < n; i++) {
        bool flag;
        if (!llm_value_bool(*flags, (uint64_t)i, &flag))
            return llm__bad(l->file, "%s is neither yes nor no", l->key);
    }
    return true;
}

/* Read which layers have a window and which have RoPE. */
static bool llm__model_layers(llm__loader *l) {
    llm_config *c = &l->model->config;
    const llm__architecture *a = l->model->architecture;
    const llm_value *window = llm__model_value(l, "attention.sliding_window"), *pattern, *ropes;
    int64_t n_tensors = l->file->n_tensors;
    int full_every = a->full_every;
    uint64_t w = 0;
    if (window && (window->type == LLM_VALUE_ARRAY || !llm_value_u64(window, 0, &w)))
        return llm__unsupported(l->file, "%s is not one whole number", l->key);
    pattern = llm__model_value(l, "attention.sliding_window_pattern");
    if (pattern && pattern->type != LLM_VALUE_ARRAY && full_every) { /* a number */
        if (!llm__model_int(l, "attention.sliding_window_pattern", 0, &full_every)) return false;
        pattern = NULL;
    } else if (!llm__model_flags(l, "attention.sliding_window_pattern", &pattern)) return false;
    if (!llm__model_flags(l, "rope.llm.layers", &ropes)) return false;
    /* check this before allocating memory for an absurd count */
    if (c->n_layers > n_tensors || c->n_layers > INT32_MAX / LLM__N_PARTS)
        return llm__bad(l->file, "%d layers, but only %llu tensors%s", c->n_layers,
                        (llm__big)n_tensors, n_tensors ? "" : " (a vocabulary only?)");
    llm__layer *layers = l->model->layers = (llm__layer *)llm__new(
        (size_t)c->n_layers, sizeof *layers, "the layers", l->file->error);
    if (!layers) return false;
    if (w > INT32_MAX) w = 0; /* no limit */
    for (int i = 0; i < c->n_layers; i++) {
        bool windowed = !full_every || (i + 1) % full_every, rope = true;
        if (pattern) llm_value_bool(pattern, (uint64_t)i, &windowed);
        if (ropes) llm_value_bool(ropes, (uint64_t)i, &rope);
        else if (a->traits & LLM__ROPE_3_OF_4) rope = (i + 1) % 4 != 0;
        layers[i].window = windowed ? (int)w : 0;
        layers[i].no_rope = !rope || c->alibi > 0;
        if (layers[i].window) c->window = (int)w;
    }
    double base = a->local_rope_base > 0 ? (double)a->local_rope_base : (double)c->rope_base;
    return !c->window || !(a->traits & LLM__LOCAL_ROPE) ||
           llm__model_float(l, "rope.freq_base_swa", base, &c->local_rope_base);
}

/* Read the number of experts, how many a token uses, and their width. */
static bool llm__model_expert_counts(llm__loader *l) {
    enum { MOST = 1 << 16 };
    llm_config *c = &l->model->config;
    const unsigned traits = l->model->architecture->traits;
    const llm_value *count = llm__model_value(l, "expert_count"), *norm;
    c->norm_experts = traits & LLM__NORM_EXPERTS;
    if (!(traits & LLM__EXPERT_LAYERS) || !count || llm__is_off(count)) return true;
    norm = llm__model_value(l, "expert_weights_norm");
    if (norm && !llm_value_bool(norm, 0, &c->norm_experts))
        return llm__bad(l->file, "%s is neither yes nor no", l->key);
    if (!llm__model_int(l, "expert_count", 0, &c->n_experts) ||
        !llm__model_int(l, "expert_used_count", 0, &c->n_experts_used))
        return false;
    if (c->n_experts > MOST || c->n_experts_used > c->n_experts)
        return llm__bad(l->file,
                        "%s is %d of %d experts; it must be at most all of them, and those at most "
                        "%d",
                        l->key, c->n_experts_used, c->n_experts, (int)MOST);
    bool shared = traits & LLM__SHARED_EXPERT;
    return llm__model_int(l, "expert_feed_forward_length",
                          shared ? llm__max(c->hidden_dim / c->n_experts_used, 1) : c->hidden_dim,
                          &c->expert_dim) &&
           (!shared || llm__model_int(l, "expert_shared_feed_forward_length", c->hidden_dim,
                                      &c->shared_dim));
}

static bool llm__model_scales(llm__loader *l) {
    llm_config *c = &l->model->config;
    const llm__architecture *a = l->model->architecture;
    int width = a->wide_layers && c->n_layers == a->wide_layers ? c->dim / c->n_heads : c->head_dim;
    c->activation = a->traits & LLM__TANH_GELU  ? LLM_GELU
                    : a->traits & LLM__ERF_GELU ? LLM_GELU_ERF
                                                : LLM_SILU;
    return llm__model_float(l, "embedding_scale",
                            a->traits & LLM__SCALED_EMBEDDING ? sqrt(c->dim) : 1,
                            &c->embedding_scale) &&
           llm__model_float(l, "residual_scale", 1, &c->residual_scale) &&
           llm__model_float(l, "attention.scale", 1 / sqrt(width), &c->attention_scale) &&
           llm__model_float(l, "logit_scale", 1, &c->logit_scale) &&
           llm__model_float(l, "attn_logit_softcapping", 0, &c->score_cap) &&
           llm__model_float(l, "final_logit_softcapping", 0, &c->logit_cap);
}

static bool llm__model_config(llm__loader *l) {
    llm_config *c = &l->model->config;
    int value_length = 0;
    if (!llm__model_architecture(l) || !llm__model_known_keys(l) ||
        !llm__model_int(l, "block_count", 0, &c->n_layers) ||
        !llm__model_int(l, "context_length", 0, &c->context_length) ||
        !llm__model_int(l, "embedding_length", 0, &c->dim) ||
        !llm__model_int(l, "feed_forward_length", 0, &c->hidden_dim) ||
        !llm__model_int(l, "attention.head_count", 0, &c->n_heads) ||
        !llm__model_int(l, "attention.head_count_kv", c->n_heads, &c->n_kv_heads) ||
        !llm__model_int(l, "attention.key_length", llm__max(c->dim / c->n_heads, 1),
                        &c->head_dim) ||
        !llm__model_int(l, "attention.value_length", c->head_dim, &value_length) ||
        !llm__model_int(l, "rope.dimension_count", c->head_dim, &c->rope_dim) ||
        !llm__model_float(l, "rope.freq_base", 10000, &c->rope_base) ||
        !llm__model_float(l, llm__has_layer_norms(l->model) ? "attention.layer_norm_epsilon"
                                                            : "attention.layer_norm_rms_epsilon",
                          1e-5, &c->norm_epsilon) ||
        !llm__model_float(l, "attention.max_alibi_bias",
                          l->model->architecture->traits & LLM__ALIBI ? 8 : 0, &c->alibi))
        return false;
    c->parallel = l->model->architecture->traits & LLM__PARALLEL;
    const llm_value *parallel = llm__model_value(l, "use_parallel_residual");
    if (parallel && !llm_value_bool(parallel, 0, &c->parallel))
        return llm__bad(l->file, "%s is neither yes nor no", l->key);
    if (c->n_heads % c->n_kv_heads)
        return llm__bad(l->file, "%d query heads cannot share %d key/value heads evenly",
                        c->n_heads, c->n_kv_heads);
    if (value_length != c->head_dim)
        return llm__unsupported(l->file,
                                "keys have %d numbers per head and values %d; these must be equal",
                                c->head_dim, value_length);
    if (c->rope_dim > c->head_dim || c->rope_dim % 2)
        return llm__bad(l->file,
                        "RoPE over %d dimensions, which must be even and at most a head's %d",
                        c->rope_dim, c->head_dim);
    return llm__model_scaling(l) && llm__model_layers(l) && llm__model_expert_counts(l) &&
           llm__model_scales(l);
}

/* ---- Loading: the tensors ---- */

/* Find a tensor of n matrices, which must have the shape (rows, cols); a vector has 1 row. On
 * failure, sets the error and returns NULL. */
static const llm_tensor *llm__model_matrices(llm__loader *l, const char *name, uint64_t n,
                                             uint64_t rows, uint64_t cols) {
    const llm_file *file = l->file;
    const llm_tensor *t = llm_file_find_tensor(file, name);
    if (!t) {
        llm__bad(file, "the tensor %s is missing%s", name,
                 file->n_tensors ? "" : " (the file holds no tensors: a vocabulary only?)");
        return NULL;
    }
    llm__printable source = llm__show(t->source);
    if (t->dims[2] != n || t->dims[3] != 1)
        llm__bad(file, "the tensor %s has %llu matrices, but %s asks for %llu", source.text,
                 (llm__big)(t->dims[2] * t->dims[3]),
                 file->folder ? "config.json" : "the metadata", (llm__big)n);
    else if (t->dims[0] != cols || t->dims[1] != rows)
        llm__bad(file, "the tensor %s is of shape (%llu, %llu), but %s asks for (%llu, %llu)",
                 source.text, (llm__big)t->dims[1], (llm__big)t->dims[0],
                 file->folder ? "config.json" : "the metadata", (llm__big)rows, (llm__big)cols);
    else if ((uintptr_t)t->data % (t->type == LLM_F32 ? 4 : 2)) /* kernels read it in place */
        llm__bad(file, "the tensor %s is not aligned", source.text);
    else return l->used[t - file->tensors] = true, t;
    return NULL;
}

static const llm_tensor *llm__model_tensor(llm__loader *l, const char *name, uint64_t rows,
                                           uint64_t cols) {
    return llm__model_matrices(l, name, 1, rows, cols);
}

enum { LLM__TENSOR_NAME = 64, LLM__SOURCE_NAME = 128 };

static void llm__part_name(char name[LLM__TENSOR_NAME], int layer, int part) {
    snprintf(name, LLM__TENSOR_NAME, "blk.%d.%s", layer, llm__parts()[part].name);
}

/* Refuse a model with an unused tensor: its output would be wrong. key: the setting that gives the
 * number of layers. format: reads the layer from a tensor's name (sscanf). */
static bool llm__all_used(const llm_file *file, const bool *used, const char *key, int n_layers,
                          const char *format, const char *architecture) {
    for (int64_t i = 0; i < file->n_tensors; i++) {
        llm__printable name = llm__show(file->tensors[i].name);
        int layer = -1, length = 0;
        if (used[i]) continue;
        if (sscanf(name.text, format, &layer, &length) == 1 && length && layer >= n_layers)
            return llm__bad(file, "%s is %d, but there are more layers, with the tensor %s: "
                                  "correct it, or fetch the model again",
                            key, n_layers, name.text);
        return llm__unsupported(file, "the tensor %s is unknown in the %s architecture", name.text,
                                architecture);
    }
    return true;
}

/* Split the fused tensors of all layers: their rows are those of q, k and v, or of gate and up. */
static bool llm__model_split(llm__loader *l) {
    static const llm__part table[][2] = {
        {LLM__Q, LLM__QKV},           {LLM__K, LLM__QKV},           {LLM__V, LLM__QKV},
        {LLM__GATE, LLM__GATE_UP},    {LLM__UP, LLM__GATE_UP},      {LLM__Q_BIAS, LLM__QKV_BIAS},
        {LLM__K_BIAS, LLM__QKV_BIAS}, {LLM__V_BIAS, LLM__QKV_BIAS}};
    llm_model *model = l->model;
    const size_t n = sizeof table / sizeof *table, n_layers = (size_t)model->config.n_layers;
    model->split = (llm_tensor *)llm__new(n_layers, n * sizeof *model->split, "split matrices",
                                          l->file->error);
    if (!model->split) return false;
    for (size_t i = 0; i < n_layers * n; i++) {
        const llm__part *row = table[i % n];
        const llm__part_row *part = &llm__parts()[row[0]];
        const llm_tensor **parts = model->parts + i / n * LLM__N_PARTS, *whole = parts[row[1]];
        if (!whole) continue;
        if (!whole->data)
            return llm__unsupported(l->file, "the tensor %s is stored as 4-bit integers, which is "
                                            "not supported for matrices that must be split",
                                    llm__show(whole->source).text);
        llm_tensor *t = &model->split[i];
        int along = part->rows != LLM__ONE; /* the dimension that is split */
        uint64_t row_bytes = whole->bytes / whole->dims[along],
                 first = i % n == 0 || row[1] != table[i % n - 1][1]
                             ? 0
                             : (uint64_t)((const char *)t[-1].data - (const char *)whole->data) +
                                   t[-1].bytes;
        *t = *whole;
        t->dims[along] = llm__width_of(&model->config, along ? part->rows : part->cols);
        t->data = (const char *)whole->data + first;
        t->bytes = row_bytes * t->dims[along];
        parts[row[0]] = t;
    }
    for (size_t i = 0; i < n_layers * n; i++)
        model->parts[i / n * LLM__N_PARTS + table[i % n][1]] = NULL;
    return true;
}

/* Find the vectors outside the layers. */
static bool llm__model_ends(llm__loader *l) {
    const llm__architecture *a = l->model->architecture;
    const llm_config *c = &l->model->config;
    for (int i = 0; i < LLM__N_ENDS; i++)
        if (llm__has_end(a, i) &&
            !(l->model->ends[i] = llm__model_tensor(
                  l, llm__end_names[i][0], 1,
                  (uint64_t)(i == LLM__OUTPUT_BIAS ? c->vocab_size : c->dim))))
            return false;
    return true;
}

/* The name of matrix i of a layer's experts: all gates, then all ups, then all downs. In older GGUF
 * files and in folders, each matrix is a tensor. */
static void llm__expert_name(char name[LLM__TENSOR_NAME], int n_experts, int layer, int i) {
    static const char *const names[] = {"gate", "up", "down"};
    snprintf(name, LLM__TENSOR_NAME, "blk.%d.ffn_%s.%d.weight", layer, names[i / n_experts],
             i % n_experts);
}

/* Find the matrices of a layer's experts. The slices of a three-dimensional tensor become
 * tensors. */
static bool llm__model_experts(llm__loader *l, int layer) {
    static const char *const names[] = {"gate", "up", "down"};
    const llm_config *c = &l->model->config;
    const int n = c->n_experts;
    const llm_tensor *all = NULL;
    llm_tensor *to = (llm_tensor *)llm__new(3, (size_t)n * sizeof *to, "the experts",
                                            l->file->error);
    l->model->layers[layer].experts = to;
    for (int i = 0; to && i < 3 * n; i++) {
        char name[LLM__TENSOR_NAME];
        uint64_t rows = (uint64_t)c->expert_dim, cols = (uint64_t)c->dim;
        if (i / n == 2) rows = cols, cols = (uint64_t)c->expert_dim;
        snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight", layer, names[i / n]);
        if (i % n == 0 && (all = llm_file_find_tensor(l->file, name)) != NULL &&
            !(all = llm__model_matrices(l, name, (uint64_t)n, rows, cols)))
            return false;
        const llm_tensor *t = all;
        if (!all) {
            llm__expert_name(name, n, layer, i);
            if (!(t = llm__model_tensor(l, name, rows, cols))) return false;
        }
        to[i] = *t;
        if (t->columns || t->type != to[i / n * n].type)
            return llm__unsupported(l->file, "the tensor %s is of another type than the other "
                                             "experts, or its columns are in an order of its own",
                                    llm__show(t->source).text);
        if (all) {
            to[i].dims[2] = 1;
            to[i].bytes /= (uint64_t)n;
            to[i].data = (const char *)t->data + (uint64_t)(i % n) * to[i].bytes;
        }
        l->model->expert_bytes += to[i].bytes;
    }
    return to != NULL;
}

static bool llm__model_tensors(llm__loader *l) {
    llm_model *model = l->model;
    llm_config *c = &model->config;
    const llm_file *file = l->file;
    const llm_tensor *t = llm_file_find_tensor(file, "token_embd.weight");
    /* an embedding may have more rows than the vocabulary has tokens */
    uint64_t vocab = (uint64_t)llm_tokenizer_size(model->tokenizer), dim = (uint64_t)c->dim;
    if (t && t->dims[1] > vocab && t->dims[1] <= INT32_MAX) vocab = t->dims[1];
    if (t && t->dims[0] == dim && t->dims[1] < vocab)
        return llm__bad(file, "%s has %llu tokens, but the embedding (%s) only %llu rows: tokens "
                              "were added without resizing the model; use the vocabulary of the "
                              "original model",
                        file->folder ? "tokenizer.json (with the files beside it)"
                                     : "the vocabulary",
                        (llm__big)vocab, llm__show(t->source).text, (llm__big)t->dims[1]);
    c->vocab_size = (int)vocab;
    c->tied_output = !llm_file_find_tensor(file, "output.weight");
    static const char *const divisors[] = {"rope_freqs.weight", "rope_factors_short.weight",
                                           "rope_factors_long.weight"};
    if (!(model->embedding = llm__model_tensor(l, "token_embd.weight", vocab, dim)) ||
        !llm__model_ends(l) ||
        !(model->output = c->tied_output ? model->embedding
                                         : llm__model_tensor(l, "output.weight", vocab, dim)))
        return false;
    for (int i = 0; i < 3; i++) {
        if (!llm_file_find_tensor(file, divisors[i])) continue;
        t = llm__model_tensor(l, divisors[i], 1, (uint64_t)c->rope_dim / 2);
        if (!t) return false;
        if (i < 2) model->rope_divisors[0] = t;
        if (i != 1) model->rope_divisors[1] = t;
    }
    int n_parts = c->n_layers * LLM__N_PARTS;
    unsigned required = model->architecture->required, optional = model->architecture->optional;
    if (!c->parallel) required |= optional & LLM__SECOND_NORM;
    model->parts = (const llm_tensor **)llm__new((size_t)n_parts, sizeof *model->parts,
                                                 "the table of tensors", file->error);
    if (!model->parts) return false;
    for (int i = 0; i < n_parts; i++) {
        const int layer = i / LLM__N_PARTS, part = i % LLM__N_PARTS;
        const llm__part_row *row = &llm__parts()[part];
        char name[LLM__TENSOR_NAME];
        /* with experts, some layers may have a feed-forward block instead */
        llm__part_name(name, layer, LLM__GATE);
        bool experts = c->n_experts && !llm_file_find_tensor(file, name);
        llm__part_name(name, layer, part);
        if (!llm__wants_part(required, part, experts, c->shared_dim > 0) &&
            !(llm__wants_part(optional, part, false, false) && llm_file_find_tensor(file, name)))
            continue;
        t = llm__model_tensor(l, name, llm__width_of(c, row->rows), llm__width_of(c, row->cols));
        if (!t) return false;
        model->parts[i] = t;
        if (part == LLM__ROUTER && !llm__model_experts(l, layer)) return false;
        if (t->columns && t->dims[0] > model->ordered_cols) model->ordered_cols = t->dims[0];
    }
    if (required & 1u << LLM__QKV && !llm__model_split(l)) return false;
    llm__model_value(l, "block_count");
    return llm__all_used(file, l->used, l->key, c->n_layers, "blk.%8d.%n", c->architecture);
}

/* Takes ownership of the file, even on failure. */
static llm_model *llm__model_create(llm_file *file, llm_error *err) {
    llm_model *model = file ? (llm_model *)llm__new(1, sizeof *model, "a model", err) : NULL;
    if (!model) return llm_file_close(file), (llm_model *)NULL;
    llm__loader l = {model, file, NULL, ""};
    model->file = file;
    file->error = err;
    l.used = (bool *)llm__new((size_t)file->n_tensors, 1, "the table of tensors", err);
    bool ok = l.used && llm__model_config(&l) &&
              (model->tokenizer = llm_tokenizer_create(file, err)) && llm__model_tensors(&l);
    LLM_FREE(l.used);
    for (int64_t i = 0; i < file->n_tensors; i++) model->weight_bytes += file->tensors[i].bytes;
    if (ok) return model;
    llm_model_free(model);
    return NULL;
}

llm_model *llm_model_load(const char *path, llm_error *err) {
    llm__clear(err);
    return llm__model_create(llm_file_open(path, err), err);
}

llm_model *llm_model_from_memory(const void *data, size_t size, const char *name, llm_error *err) {
    llm__clear(err);
    return llm__model_create(llm_file_from_memory(data, size, name, err), err);
}

void llm_model_free(llm_model *model) {
    if (!model) return;
    for (int i = 0; model->layers && i < model->config.n_layers; i++)
        LLM_FREE(model->layers[i].experts);
    LLM_FREE(model->parts);
    LLM_FREE(model->layers);
    LLM_FREE(model->split);
    llm_tokenizer_free(model->tokenizer);
    llm_file_close(model->file);
    LLM_FREE(model);
}

const llm_config *llm_model_config(const llm_model *model) { return &model->config; }
const llm_tokenizer *llm_model_tokenizer(const llm_model *model) { return model->tokenizer; }
const llm_file *llm_model_file(const llm_model *model) { return model->file; }
const char *llm_model_context_note(const llm_model *model) { return model->context_note; }

uint64_t llm_model_step_bytes(const llm_model *model) {
    /* a tied embedding is the output matrix and is read in full; of an untied one, a token reads
     * one row */
    const llm_config *c = &model->config;
    uint64_t unread = c->tied_output ? 0 : model->embedding->bytes;
    uint64_t idle = c->n_experts ? model->expert_bytes / (uint64_t)c->n_experts *
                                       (uint64_t)(c->n_experts - c->n_experts_used)
                                 : 0; /* experts that the token does not use */
    return model->weight_bytes - unread - idle + (unread ? unread / (uint64_t)c->vocab_size : 0);
}

uint64_t llm_model_cache_bytes_per_token(const llm_model *model, llm_type cache_type) {
    const llm_config *c = &model->config;
    const llm_type_info *info = llm_type_find(cache_type);
    uint64_t numbers = 2 * (uint64_t)c->n_layers * llm__width_of(c, LLM__KV_WIDTH);
    return info ? numbers * (uint64_t)info->block_bytes / (uint64_t)info->block_values : 0;
}

/* ---- Hugging Face folders ----
 * config.json gives the model's shape, the safetensors files its weights, and tokenizer.json its
 * vocabulary. They become an llm_file with GGUF metadata and tensor names; the data stays in the
 * mapped files.
 *
 * The weights differ in one way. GGUF files of "llama" have the rows of q and k reordered to make
 * the two dimensions of each RoPE pair adjacent. Folders keep the original order, so the model's
 * rope_pairing is LLM_ROPE_HALVES. */

typedef struct llm__folder {
    llm_file *file;      /* the result; has the parts' tensors until `tensors` replaces them */
    llm_json config;     /* parsed config.json */
    const llm__architecture *architecture;
    bool *used;          /* (n_tensors of file) whether the tensor is used or safe to ignore */
    llm_tensor *tensors; /* (n_tensors) the result's tensors, with GGUF names */
    int64_t n_tensors;
    char *names; /* (n_tensors, LLM__TENSOR_NAME) their GGUF names; `file` frees them */
    int n_layers, dim, n_heads, head_dim, rope_dim;
    int n_experts; /* 0: none */
    bool int4, gptq; /* whether weights are 4-bit integers; in GPTQ format (false: AWQ) */
} llm__folder;

/* The caller frees the path. */
static char *llm__join(const char *folder, const char *name, llm_error *err) {
    size_t length = strlen(folder);
    char *path = (char *)llm__new(length + strlen(name) + 2, 1, "a path", err);
    if (path) sprintf(path, "%s%s%s", folder, length && folder[length - 1] == '/' ? "" : "/", name);
    return path;
}

static bool llm__folder_has(const char *folder, const char *name) {
    char *path = llm__join(folder, name, NULL);
    bool there = path && !access(path, F_OK);
    LLM_FREE(path);
    return there;
}

/* Map a file of at most LLM__JSON_BYTES. If there is none, *found is false. */
static bool llm__map_text(const char *path, llm_string *text, bool *found, llm_error *err) {
    struct stat status;
    const void *data = NULL;
    uint64_t size = 0;
    *found = !stat(path, &status) && S_ISREG(status.st_mode);
    bool ok = !*found || llm__map(path, &data, &size, err);
    if (size > LLM__JSON_BYTES) {
        ok = llm__fail(err, LLM_ERROR_FORMAT, "%s is larger than the limit of %d bytes", path,
                       LLM__JSON_BYTES);
        llm__release(data, size, LLM__MAPPED);
    }
    text->data = ok ? (const char *)data : NULL;
    text->length = ok ? (size_t)size : 0;
    return ok;
}

/* Parse a JSON file of the folder, which must hold an object. found: see llm__map_text. */
static bool llm__read_json(llm_json *json, const char *folder, const char *name, bool *found,
                           llm_error *err) {
    llm_string text;
    char *path = llm__join(folder, name, err);
    memset(json, 0, sizeof *json);
    bool ok = path && llm__map_text(path, &text, found, err);
    if (ok && *found) {
        ok = llm_json_parse(json, text.data, text.length, path, err);
        llm__release(text.data, text.length, LLM__MAPPED);
        if (ok && json->nodes->kind != LLM_JSON_OBJECT) {
            ok = llm__fail(err, LLM_ERROR_FORMAT, "%s: it is not a JSON object", path);
            llm_json_free(json);
        }
    }
    LLM_FREE(path);
    return ok;
}

/* ---- config.json ---- */

static const llm_json_node *llm__folder_entry(const llm_json_node *object, const char *key) {
    const llm_json_node *node = llm_json_member(object, key);
    return llm_json_has_kind(node, LLM_JSON_NULL) ? NULL : node;
}

static bool llm__is_on(const llm_json_node *object, const char *key, bool otherwise) {
    bool flag = otherwise;
    llm_json_bool(llm_json_member(object, key), &flag);
    return flag;
}

/* Replace the usual names in `name` (of a tensor or a key of config.json) by this architecture's:
 * `names` holds pairs "usual=own", applied in order. */
static void llm__folder_name(const llm__folder *f, char name[LLM__SOURCE_NAME]) {
    for (const char *pair = f->architecture->names; *pair;) {
        size_t usual = strcspn(pair, "="), own = strcspn(pair + usual, " ") - 1;
        char *at = name;
        while (*at && strncmp(at, pair, usual)) at++;
        if (*at && strlen(name) + own - usual < LLM__SOURCE_NAME) {
            memmove(at + own, at + usual, strlen(at + usual) + 1);
            memcpy(at, pair + usual + 1, own);
        }
        pair += usual + 1 + own;
        pair += *pair == ' ';
    }
}

/* Find the entry with this key in config.json or in an object in it. At the top level, the key may
 * be replaced by the architecture's own name for it. */
static const llm_json_node *llm__folder_setting(const llm__folder *f, const llm_json_node *object,
                                                char key[LLM__SOURCE_NAME]) {
    const llm_json_node *node = llm__folder_entry(object, key);
    if (node || object != f->config.nodes) return node;
    llm__folder_name(f, key);
    return llm__folder_entry(object, key);
}

static bool llm__folder_is_on(const llm__folder *f, const char *key, bool otherwise) {
    char name[LLM__SOURCE_NAME];
    snprintf(name, sizeof name, "%s", key);
    llm_json_bool(llm__folder_setting(f, f->config.nodes, name), &otherwise);
    return otherwise;
}

/* Read a positive number. An absent key gives `fallback`; 0: an error. */
static bool llm__folder_number(const llm__folder *f, const llm_json_node *object, const char *key,
                               double fallback, double *out) {
    char name[LLM__SOURCE_NAME];
    snprintf(name, sizeof name, "%s", key);
    const llm_json_node *node = llm__folder_setting(f, object, name);
    *out = fallback;
    if (!node && !(fallback > 0)) return llm__bad(f->file, "config.json does not say \"%s\"", name);
    return ((!node || llm_json_f64(node, out)) && *out > 0 && *out <= 1e30) ||
           llm__bad(f->file, "\"%s\" in config.json is not a positive number", name);
}

static bool llm__folder_int(const llm__folder *f, const llm_json_node *object, const char *key,
                            int64_t fallback, int *out) {
    char name[LLM__SOURCE_NAME];
    snprintf(name, sizeof name, "%s", key);
    const llm_json_node *node = llm__folder_setting(f, object, name);
    int64_t x = fallback;
    if (!node && !fallback) return llm__bad(f->file, "config.json does not say \"%s\"", name);
    if ((node && !llm_json_i64(node, &x)) || x < 1 || x > INT32_MAX)
        return llm__bad(f->file, "\"%s\" in config.json is not a whole number from 1 to %d", name,
                        INT32_MAX);
    *out = (int)x;
    return true;
}

/* Keys of config.json in architectures whose layers can have experts; the last two matter only in
 * training. */
static const char llm__expert_keys[] =
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
    "shared_expert_intermediate_size decoder_sparse_step mlp_only_layers output_router_logits "
    "router_aux_loss_coef router_jitter_noise";

/* Refuse an entry whose key is not in `known`: it might change the result. Ignore keys that begin
 * with '_', and entries that are off: null, false, or an empty list or object. */
static bool llm__folder_known(const llm__folder *f, const llm_json_node *object, const char *where,
                              const char *known) {
    const bool whole = object == f->config.nodes;
    const char *keys = whole ? f->architecture->keys : "",
               *experts = whole && f->architecture->traits & LLM__EXPERT_LAYERS
                              ? llm__expert_keys
                              : "";
    for (const llm_json_node *n = llm_json_first(object); n; n = llm_json_next(object, n)) {
        llm_string key = llm_json_key(n);
        bool holds = n->kind == LLM_JSON_ARRAY || n->kind == LLM_JSON_OBJECT;
        bool off = n->kind == LLM_JSON_NULL || n->kind == LLM_JSON_FALSE || (holds && !n->length);
        if (!off && !(key.length && key.data[0] == '_') && !llm__is_listed(key, known) &&
            !llm__is_listed(key, keys) && !llm__is_listed(key, experts))
            return llm__unsupported(f->file, "\"%s\": %s in %s is an option that is not supported",
                                    llm__show(key).text, llm__show_node(n).text, where);
    }
    return true;
}

/* The known keys of config.json: the model's shape and tokens; its training, its origin and
 * settings of other programs; and sampling settings, which requests set instead. */
static const char llm__config_keys[] =
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling "
    "rope_parameters hidden_act tie_word_embeddings attention_bias mlp_bias sliding_window "
    "use_sliding_window max_window_layers layer_types partial_rotary_factor quantization_config "
    "bos_token_id eos_token_id "
    "architectures attention_dropout attn_pdrop auto_map chunk_size_feed_forward "
    "decoder_start_token_id dtype embd_pdrop finetuning_task hidden_dropout id2label "
    "initializer_range is_decoder is_encoder_decoder is_llama_config label2id max_sequence_length "
    "model_max_length name_or_path neftune_noise_alpha pad_token_id prefix pretraining_tp "
    "problem_type resid_pdrop return_dict rope_interleaved sep_token_id seq_length "
    "task_specific_params tokenizer_class tokenizer_model_max_length tokenizer_name "
    "tokenizer_padding_side torch_dtype transformers.js_config transformers_version unk_token_id "
    "unsloth_fixed unsloth_version use_cache "
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size length_penalty "
    "max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams "
    "num_return_sequences repetition_penalty temperature top_k top_p typical_p";

/* Append a tensor with the divisors (rope_dim/2) of the RoPE frequencies. NULL on failure. */
static float *llm__folder_divisors(llm__folder *f, const char *name) {
    uint64_t n = (uint64_t)f->rope_dim / 2;
    llm_tensor t = {llm__string(name), llm__string(name), LLM_F32, 1, {1, 1, 1, 1}, NULL,
                    n * sizeof(float), NULL,              NULL};
    float *divisors = (float *)llm__new((size_t)n, sizeof *divisors, name, f->file->error);
    if (!divisors || !llm__add_memory(f->file, divisors)) return NULL;
    t.dims[0] = n;
    t.data = divisors;
    f->tensors[f->n_tensors++] = t;
    return divisors;
}

/* Append rope_freqs.weight, as in GGUF files: the divisors of Llama 3.1's RoPE frequencies. A
 * frequency with fewer than low_freq_factor turns in the original context is divided by the factor;
 * one with more than high_freq_factor turns is not; in between, it is interpolated. */
static bool llm__folder_llama3(llm__folder *f, const llm_json_node *rope, double base,
                               int context) {
    double factor, low, high;
    int original;
    if (!llm__folder_number(f, rope, "factor", 0, &factor) ||
        !llm__folder_number(f, rope, "low_freq_factor", 0, &low) ||
        !llm__folder_number(f, rope, "high_freq_factor", 0, &high) ||
        !llm__folder_int(f, rope, "original_max_position_embeddings", context, &original))
        return false;
    if (!(high > low))
        return llm__bad(f->file, "high_freq_factor in config.json is not above low_freq_factor");
    float *divisors = llm__folder_divisors(f, "rope_freqs.weight");
    for (int i = 0; divisors && i < f->rope_dim / 2; i++) {
        double turns = original * pow(base, -2.0 * i / f->rope_dim) / (2 * 3.14159265358979323846);
        double blend = (turns - low) / (high - low);
        blend = blend > 0 ? blend < 1 ? blend : 1 : 0;
        divisors[i] = (float)(1 / ((1 - blend) / factor + blend));
    }
    return divisors != NULL;
}

/* LongRoPE (Ding et al. 2024, in Phi-3): one list of divisors for contexts up to the original
 * length, and one for longer ones. */
static bool llm__folder_longrope(llm__folder *f, llm__metadata *m, const llm_json_node *rope,
                                 int context) {
    static const char *const keys[] = {"short_factor", "long_factor"},
                             *const names[] = {"rope_factors_short.weight",
                                               "rope_factors_long.weight"};
    int original;
    double factor, magnitude;
    if (!llm__folder_int(f, f->config.nodes, "original_max_position_embeddings", context,
                         &original) ||
        !llm__folder_int(f, rope, "original_max_position_embeddings", original, &original) ||
        !llm__folder_number(f, rope, "factor", (double)context / original, &factor))
        return false;
    magnitude = factor > 1 && original > 1 ? sqrt(1 + log(factor) / log(original)) : 1;
    if (!llm__folder_number(f, rope, "attention_factor", magnitude, &magnitude)) return false;
    for (int k = 0; k < 2; k++) {
        const llm_json_node *list = llm__folder_entry(rope, keys[k]), *x = llm_json_first(list);
        if (!llm_json_has_kind(list, LLM_JSON_ARRAY) || list->length != (uint32_t)f->rope_dim / 2)
            return llm__bad(f->file, "\"%s\" in config.json is not a list of %d numbers", keys[k],
                            f->rope_dim / 2);
        float *divisors = llm__folder_divisors(f, names[k]);
        if (!divisors) return false;
        for (int i = 0; i < f->rope_dim / 2; i++, x = llm_json_next(list, x)) {
            double divisor;
            if (!llm_json_f64(x, &divisor) || !(divisor > 0))
                return llm__bad(f->file,
                                "\"%s\" in config.json has an entry that is not a positive number",
                                keys[k]);
            divisors[i] = (float)divisor;
        }
    }
    llm__note_u32(m, ".rope.scaling.original_context_length", (uint32_t)original);
    llm__note_f32(m, ".rope.scaling.attn_factor", (float)magnitude);
    return true;
}

static bool llm__folder_yarn(const llm__folder *f, llm__metadata *m, const llm_json_node *rope,
                             double factor, int *context) {
    double log_factor = factor > 1 ? log(factor) : 0, usual = 0.1 * log_factor + 1;
    double fast, slow, magnitude = usual, mscale = 0, all = 0;
    if (!llm__is_on(rope, "truncate", true))
        return llm__unsupported(f->file, "YaRN with \"truncate\": false is not supported");
    if (llm_json_f64(llm__folder_entry(rope, "mscale"), &mscale) &&
        llm_json_f64(llm__folder_entry(rope, "mscale_all_dim"), &all) && mscale != 0 && all != 0)
        magnitude = (0.1 * mscale * log_factor + 1) / (0.1 * all * log_factor + 1);
    if (!llm__folder_number(f, rope, "beta_fast", 32, &fast) ||
        !llm__folder_number(f, rope, "beta_slow", 1, &slow) ||
        !llm__folder_number(f, rope, "attention_factor", magnitude, &magnitude) ||
        !llm__folder_int(f, rope, "original_max_position_embeddings", *context, context))
        return false;
    llm__note_u32(m, ".rope.scaling.original_context_length", (uint32_t)*context);
    llm__note_f32(m, ".rope.scaling.yarn_beta_fast", fast);
    llm__note_f32(m, ".rope.scaling.yarn_beta_slow", slow);
    /* GGUF readers multiply this by the usual magnitude */
    llm__note_f32(m, ".rope.scaling.attn_factor", magnitude / usual);
    return true;
}

/* Translate the RoPE of layers with a window, if config.json has it separately. */
static bool llm__folder_local_rope(const llm__folder *f, llm__metadata *m,
                                   const llm_json_node *rope) {
    const llm_json_node *type = llm__folder_entry(rope, "rope_type");
    double base;
    if (!(f->architecture->traits & LLM__LOCAL_ROPE) || (type && !llm_json_is(type, "default")))
        return llm__unsupported(f->file, "the RoPE of \"sliding_attention\" in config.json is not "
                                        "supported");
    if (!llm__folder_known(f, rope, "the RoPE of config.json", "rope_type rope_theta") ||
        !llm__folder_number(f, rope, "rope_theta", 10000, &base))
        return false;
    llm__note_f32(m, ".rope.freq_base_swa", (float)base);
    return true;
}

/* Translate RoPE's base and scaling, from "rope_parameters" or from "rope_theta" and
 * "rope_scaling". stated: config.json's max_position_embeddings. */
static bool llm__folder_rope(llm__folder *f, llm__metadata *m, int stated) {
    static const char known[] =
        "rope_type type rope_theta factor low_freq_factor high_freq_factor "
        "original_max_position_embeddings beta_fast beta_slow attention_factor mscale "
        "mscale_all_dim truncate partial_rotary_factor finetuned short_factor long_factor";
    const llm_json_node *config = f->config.nodes,
                        *rope = llm__folder_entry(config, "rope_parameters"),
                        *local = llm_json_member(rope, "sliding_attention");
    double base, factor = 1, part;
    int context = stated;
    if (local) rope = llm__folder_entry(rope, "full_attention");
    if (!rope) rope = llm__folder_entry(config, "rope_scaling");
    if (rope && !llm_json_has_kind(rope, LLM_JSON_OBJECT))
        return llm__bad(f->file, "the RoPE scaling in config.json is not an object");
    if (!llm__folder_known(f, rope, "the RoPE scaling of config.json", known) ||
        !llm__folder_number(f, config, "rope_theta", 10000, &base) ||
        !llm__folder_number(f, rope, "rope_theta", base, &base) ||
        !llm__folder_number(f, config, "partial_rotary_factor",
                            f->architecture->traits & LLM__PARTIAL_ROPE &&
                                    !llm__folder_entry(rope, "partial_rotary_factor")
                                ? 0
                                : 1,
                            &part) ||
        !llm__folder_number(f, rope, "partial_rotary_factor", part, &part))
        return false;
    f->rope_dim = (int)(f->head_dim * part);
    if (part > 1 ||
        (part != 1 && !(f->architecture->traits & LLM__PARTIAL_ROPE) &&
         !llm__is_listed(llm__string("partial_rotary_factor"), f->architecture->keys)))
        return llm__unsupported(f->file, "partial_rotary_factor %g is not supported", part);
    llm__note_u32(m, ".rope.dimension_count", (uint32_t)f->rope_dim);
    llm__note_f32(m, ".rope.freq_base", (float)base);
    base = (float)base;
    if (local && !llm__folder_local_rope(f, m, local)) return false;

    const llm_json_node *type = llm__folder_entry(rope, "rope_type");
    if (!type) type = llm__folder_entry(rope, "type");
    bool yarn = llm_json_is(type, "yarn");
    if (!type && llm__folder_entry(rope, "factor"))
        return llm__bad(f->file, "the RoPE scaling in config.json does not say its rope_type");
    if (llm_json_is(type, "llama3")) {
        if (!llm__folder_llama3(f, rope, base, context)) return false;
    } else if (yarn || llm_json_is(type, "linear")) {
        if (!llm__folder_number(f, rope, "factor", 0, &factor) ||
            (yarn && !llm__folder_yarn(f, m, rope, factor, &context)))
            return false;
        llm__note_string(m, ".rope.scaling.type", llm__string(yarn ? "yarn" : "linear"));
        llm__note_f32(m, ".rope.scaling.factor", (float)factor);
    } else if (llm_json_is(type, "longrope") || llm_json_is(type, "su")) {
        if (!llm__folder_longrope(f, m, rope, context)) return false;
    } else if (type && !llm_json_is(type, "default")) {
        return llm__not_among(f->file, "RoPE scaling", llm__show_node(type),
                              "default, linear, yarn, llama3, longrope");
    }
    /* scaling extends the original context by the factor */
    context = (int)llm__min((int64_t)(context * (factor > 1 ? factor : 1)), INT32_MAX);
    llm__note_u32(m, ".context_length", (uint32_t)context);
    if (context < stated)
        llm__note_u32(m, ".rope.scaling.llm.stated_context_length", (uint32_t)stated);
    return true;
}

/* Translate the sliding window and which layers have it: all, those in layer_types, or (Qwen) the
 * last ones. */
static bool llm__folder_window(const llm__folder *f, llm__metadata *m) {
    const llm__architecture *a = f->architecture;
    const llm_json_node *config = f->config.nodes,
                        *types = llm__folder_entry(config, "layer_types"),
                        *node = llm_json_member(config, "sliding_window");
    bool qwen = !strncmp(a->name, "qwen", 4);
    int window = 0, n_windows = 0, full_every = a->full_every;
    int64_t first = 0;
    if (!llm__is_on(config, "use_sliding_window", !qwen && !(a->traits & LLM__ROPE_3_OF_4)) ||
        llm_json_has_kind(node, LLM_JSON_NULL) || (!node && !a->window && !types))
        return true;
    if (llm__is_listed(llm__string(a->model_type), "llama granite olmo2"))
        return llm__unsupported(f->file,
                                "\"sliding_window\" in config.json is not supported for %s",
                                a->model_type);
    if (!llm__folder_int(f, config, "sliding_window", a->window, &window) ||
        (full_every &&
         !llm__folder_int(f, config, "sliding_window_pattern", full_every, &full_every)))
        return false;
    if (qwen && !types &&
        (!llm_json_i64(llm_json_member(config, "max_window_layers"), &first) || first < 0))
        return llm__bad(f->file, "config.json does not say from which layer on the window is used "
                                "(max_window_layers)");
    if (types &&
        (!llm_json_has_kind(types, LLM_JSON_ARRAY) || types->length != (uint32_t)f->n_layers))
        return llm__bad(f->file, "layer_types in config.json is not a list of %d types",
                        f->n_layers);
    size_t n = (size_t)f->n_layers;
    uint8_t *pattern = (uint8_t *)llm__new(n, 1, "the windows of the layers", f->file->error);
    bool ok = pattern != NULL;
    const llm_json_node *type = llm_json_first(types);
    for (int i = 0; ok && i < f->n_layers; i++, type = llm_json_next(types, type)) {
        pattern[i] = types        ? llm_json_is(type, "sliding_attention")
                     : full_every ? (i + 1) % full_every != 0
                                  : i >= first;
        n_windows += pattern[i];
        if (types && !pattern[i] && !llm_json_is(type, "full_attention"))
            ok = llm__not_among(f->file, "the layer type", llm__show_node(type),
                                "sliding_attention, full_attention");
    }
    if (n_windows) llm__note_u32(m, ".attention.sliding_window", (uint32_t)window);
    if (n_windows && (full_every || n_windows < f->n_layers))
        llm__note_array(m, ".attention.sliding_window_pattern", LLM_VALUE_BOOL, pattern, n, n);
    LLM_FREE(pattern);
    return ok;
}

/* Write which layers have RoPE: those with a 1 in no_rope_layers or, without that list, all except
 * every no_rope_layer_interval-th. */
static bool llm__folder_rope_layers(const llm__folder *f, llm__metadata *m) {
    const llm_json_node *config = f->config.nodes,
                        *list = llm__folder_entry(config, "no_rope_layers"),
                        *node = llm_json_first(list);
    int every = 4;
    if (!(f->architecture->traits & LLM__ROPE_3_OF_4)) return true;
    if (!llm__folder_int(f, config, "no_rope_layer_interval", every, &every)) return false;
    if (list && (!llm_json_has_kind(list, LLM_JSON_ARRAY) || list->length != (uint32_t)f->n_layers))
        return llm__bad(f->file, "no_rope_layers in config.json is not a list of %d numbers",
                        f->n_layers);
    size_t n = (size_t)f->n_layers;
    uint8_t *ropes = (uint8_t *)llm__new(n, 1, "the layers with RoPE", f->file->error);
    bool ok = ropes != NULL;
    for (int i = 0; ok && i < f->n_layers; i++, node = llm_json_next(list, node)) {
        int64_t rope = (i + 1) % every != 0;
        ok = !list || (llm_json_i64(node, &rope) && (rope == 0 || rope == 1)) ||
             llm__bad(f->file, "no_rope_layers in config.json has an entry other than 0 and 1");
        ropes[i] = (uint8_t)rope;
    }
    if (ok) llm__note_array(m, ".rope.llm.layers", LLM_VALUE_BOOL, ropes, n, n);
    LLM_FREE(ropes);
    return ok;
}

static bool llm__folder_scales(const llm__folder *f, llm__metadata *m) {
    static const char *const table[][2] = {
        {"embedding_multiplier", ".embedding_scale"},
        {"residual_multiplier", ".residual_scale"},
        {"attention_multiplier", ".attention.scale"},
        {"query_pre_attn_scalar", ".attention.scale"}, /* scores are divided by its square root */
        {"logits_scaling", ".logit_scale"},
        {"attn_logit_softcapping", ".attn_logit_softcapping"},
        {"final_logit_softcapping", ".final_logit_softcapping"},
        {"rope_local_base_freq", ".rope.freq_base_swa"},
    };
    const llm_json_node *config = f->config.nodes;
    double x;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (!llm__is_listed(llm__string(table[i][0]), f->architecture->keys) ||
            !llm__folder_entry(config, table[i][0]))
            continue;
        if (!llm__folder_number(f, config, table[i][0], 0, &x)) return false;
        llm__note_f32(m, table[i][1], (float)(i == 3 ? 1 / sqrt(x) : x));
    }
    return true;
}

/* Copy a positive whole number from config.json to the metadata. */
static bool llm__folder_copy(const llm__folder *f, llm__metadata *m, const char *from,
                             int64_t fallback, const char *to, int *x) {
    if (!llm__folder_int(f, f->config.nodes, from, fallback, x)) return false;
    llm__note_u32(m, to, (uint32_t)*x);
    return true;
}

/* Translate the number of experts, how many a token uses, and their width. The tensors show which
 * layers have experts (mlp_only_layers, decoder_sparse_step). */
static bool llm__folder_experts(llm__folder *f, llm__metadata *m, int hidden) {
    const llm_json_node *config = f->config.nodes;
    const unsigned traits = f->architecture->traits;
    const char *count = llm__folder_entry(config, "num_experts") ? "num_experts"
                                                                 : "num_local_experts";
    int x;
    bool mixtral = !strcmp(f->architecture->model_type, "mixtral"),
         qwen = !strncmp(f->architecture->name, "qwen", 4);
    if (!(traits & LLM__EXPERT_LAYERS) || !strcmp(f->architecture->model_type, "llama"))
        return true;
    llm__note_bool(m, ".expert_weights_norm",
                   mixtral || llm__is_on(config, "norm_topk_prob", false));
    if (!llm__folder_copy(f, m, count, 0, ".expert_count", &f->n_experts)) return false;
    if (f->n_experts > f->file->n_tensors || f->n_experts > INT32_MAX / 3)
        return llm__bad(f->file, "config.json says %d experts, but there are only %llu tensors",
                        f->n_experts, (llm__big)f->file->n_tensors);
    return
           llm__folder_copy(f, m, "num_experts_per_tok", 0, ".expert_used_count", &x) &&
           llm__folder_copy(f, m, qwen ? "moe_intermediate_size" : "intermediate_size",
                            qwen ? 0 : hidden, ".expert_feed_forward_length", &x) &&
           (!(traits & LLM__SHARED_EXPERT) ||
            llm__folder_copy(f, m, "shared_expert_intermediate_size", 0,
                             ".expert_shared_feed_forward_length", &x));
}

static bool llm__folder_activation(const llm__folder *f) {
    const llm__architecture *a = f->architecture;
    const llm_json_node *act = llm__folder_entry(
        f->config.nodes, llm__is_listed(llm__string("hidden_activation"), a->keys)
                             ? "hidden_activation"
                             : "hidden_act");
    const char *known = a->traits & LLM__TANH_GELU  ? "gelu_pytorch_tanh gelu_new gelu_fast"
                        : a->traits & LLM__ERF_GELU ? "gelu"
                                                    : "silu swish";
    llm_string name = {"", 0};
    return !act || (llm_json_string(act, &name) && llm__is_listed(name, known)) ||
           llm__not_among(f->file, "the activation", llm__show_node(act), known);
}

static bool llm__folder_parallel(const llm__folder *f) {
    return llm__is_on(f->config.nodes, "use_parallel_residual",
                      f->architecture->traits & LLM__PARALLEL);
}

/* Translate MPT's attention settings. */
static bool llm__folder_alibi(const llm__folder *f, llm__metadata *m) {
    const llm_json_node *config = f->config.nodes, *a = llm__folder_entry(config, "attn_config"),
                        *type = llm__folder_entry(a, "attn_type"),
                        *norm = llm__folder_entry(config, "norm_type");
    double most;
    if (strcmp(f->architecture->name, "mpt")) return true;
    if (!llm__is_on(a, "alibi", true))
        return llm__unsupported(f->file, "\"alibi\": false in config.json is not supported");
    if (type && !llm_json_is(type, "multihead_attention"))
        return llm__not_among(f->file, "the attn_type", llm__show_node(type),
                              "multihead_attention");
    if (norm && !llm_json_is(norm, "layernorm") && !llm_json_is(norm, "low_precision_layernorm"))
        return llm__not_among(f->file, "the norm_type", llm__show_node(norm),
                              "layernorm, low_precision_layernorm");
    if (!llm__folder_known(f, a, "the attn_config of config.json",
                           "alibi alibi_bias_max attn_impl attn_pdrop attn_type "
                           "chunk_size_feed_forward id2label label2id model_type return_dict") ||
        !llm__folder_number(f, a, "alibi_bias_max", 8, &most))
        return false;
    llm__note_f32(m, ".attention.max_alibi_bias", (float)most);
    return true;
}

static bool llm__folder_config(llm__folder *f, llm__metadata *m) {
    const llm__architecture *a = f->architecture;
    const llm_json_node *config = f->config.nodes;
    bool alibi = a->traits & LLM__ALIBI, layer_norms = a->traits & LLM__LAYER_NORMS;
    int hidden, kv_heads, context;
    double epsilon;
    m->architecture = a->name;
    llm__note_string(m, "general.architecture", llm__string(a->name));
    if (!llm__folder_known(f, config, "config.json", llm__config_keys) ||
        !llm__folder_activation(f) || !llm__folder_alibi(f, m) ||
        !llm__folder_copy(f, m, "hidden_size", 0, ".embedding_length", &f->dim) ||
        !llm__folder_copy(f, m, "intermediate_size", alibi ? 4 * (int64_t)f->dim : 0,
                          ".feed_forward_length", &hidden) ||
        !llm__folder_copy(f, m, "num_hidden_layers", 0, ".block_count", &f->n_layers) ||
        !llm__folder_copy(f, m, "num_attention_heads", 0, ".attention.head_count", &f->n_heads) ||
        !llm__folder_copy(f, m, "num_key_value_heads", a->traits & LLM__MHA ? f->n_heads : 0,
                          ".attention.head_count_kv", &kv_heads) ||
        !llm__folder_copy(f, m, "head_dim",
                          a->head_dim ? a->head_dim : llm__max(f->dim / f->n_heads, 1),
                          ".attention.key_length", &f->head_dim) ||
        !llm__folder_int(f, config, "max_position_embeddings", alibi ? 2048 : 0, &context) ||
        !llm__folder_number(f, config, "rms_norm_eps", layer_norms ? 1e-5 : 1e-6, &epsilon))
        return false;
    /* check this before allocating memory for an absurd count */
    if (f->n_layers > f->file->n_tensors || f->n_layers > INT32_MAX / LLM__N_PARTS)
        return llm__bad(f->file, "config.json says %d layers, but there are only %llu tensors",
                        f->n_layers, (llm__big)f->file->n_tensors);
    if (f->head_dim > 1 << 20)
        return llm__bad(f->file, "config.json gives heads of %d numbers, which is impossible",
                        f->head_dim);
    llm__note_u32(m, ".attention.value_length", (uint32_t)f->head_dim);
    llm__note_f32(m,
                  layer_norms ? ".attention.layer_norm_epsilon"
                              : ".attention.layer_norm_rms_epsilon",
                  (float)epsilon);
    if (llm__is_listed(llm__string("use_parallel_residual"), a->keys))
        llm__note_bool(m, ".use_parallel_residual", llm__folder_parallel(f));
    f->tensors = (llm_tensor *)llm__new((size_t)f->file->n_tensors + 2, sizeof *f->tensors,
                                        "the tensors", f->file->error); /* + 2: divisors of RoPE */
    return f->tensors && llm__folder_rope(f, m, context) && llm__folder_rope_layers(f, m) &&
           llm__folder_window(f, m) && llm__folder_experts(f, m, hidden) &&
           llm__folder_scales(f, m);
}

/* ---- The tensors ---- */

/* The part with this file name; NULL: not mapped yet. */
static const llm_file *llm__folder_find_shard(const llm__folder *f, llm_string name) {
    for (int64_t i = 0; i < f->file->n_parts; i++) /* llm__join wrote the slash */
        if (llm__is_text(name, strrchr(f->file->parts[i]->path, '/') + 1)) return f->file->parts[i];
    return NULL;
}

/* Map a safetensors file of the folder and read its header, unless already done. */
static bool llm__folder_shard(llm__folder *f, llm_string name) {
    char copy[256];
    llm_file *file = f->file;
    if (llm__folder_find_shard(f, name)) return true;
    if (!name.length || name.length >= sizeof copy || memchr(name.data, '/', name.length) ||
        memchr(name.data, 0, name.length))
        return llm__bad(file, "the index names the file '%s', which is not the name of a file here",
                        llm__show(name).text);
    snprintf(copy, sizeof copy, "%.*s", (int)name.length, name.data);
    if (!llm__add_record(&file->parts, file->n_parts, &file->parts_capacity, sizeof *file->parts,
                         "the files", file->error))
        return false;
    char *path = llm__join(file->path, copy, file->error);
    llm_file *part = path ? llm__file_map(path, llm__read_safetensors, file->error) : NULL;
    LLM_FREE(path);
    if (part) file->parts[file->n_parts++] = part;
    return part != NULL;
}

static bool llm__folder_weights(llm__folder *f) {
    static const char one[] = "model.safetensors", list[] = "model.safetensors.index.json";
    llm_file *file = f->file;
    llm_json index;
    memset(&index, 0, sizeof index);
    bool found = llm__folder_has(file->path, one);
    bool ok = found ? llm__folder_shard(f, llm__string(one))
                    : llm__read_json(&index, file->path, list, &found, file->error);
    if (ok && !found)
        return llm__fail(file->error, LLM_ERROR_FILE, "%s: there is neither %s nor %s%s",
                         file->path, one, list,
                         llm__folder_has(file->path, "pytorch_model.bin") ||
                                 llm__folder_has(file->path, "pytorch_model.bin.index.json")
                             ? "; its pytorch_model.bin is not read: such files may run programs"
                             : "");
    const llm_json_node *map = llm_json_member(index.nodes, "weight_map");
    if (ok && index.nodes && !(llm_json_has_kind(map, LLM_JSON_OBJECT) && map->length))
        ok = llm__bad(file, "%s has no weight_map", list);
    /* map the files; then check that each tensor is in the one that the index names for it */
    for (int checks = 0; checks < 2; checks++) {
        const llm_json_node *n = ok ? llm_json_first(map) : NULL;
        for (; ok && n; n = llm_json_next(map, n)) {
            llm_string key = llm_json_key(n), name = {"", 0};
            if (!llm_json_string(n, &name)) {
                ok = llm__bad(file, "the weight_map of %s names no file for '%s'", list,
                              llm__show(key).text);
            } else if (!checks) {
                ok = llm__folder_shard(f, name);
            } else {
                const llm_tensor *t = (const llm_tensor *)llm__find_name(file->tensor_index,
                                                                         file->n_tensors, key);
                const llm_file *part = llm__folder_find_shard(f, name);
                ok = (t && llm__inside(t->data, t->bytes, part->data, part->size)) ||
                     llm__bad(file, "the tensor '%s' is not in the file that the index names for "
                                    "it",
                              llm__show(key).text);
            }
        }
        ok = ok && (checks || llm__file_join(file, "two of the files have a tensor"));
    }
    llm_json_free(&index);
    return ok;
}

static void llm__folder_use(const llm__folder *f, const llm_tensor *source) {
    f->used[source - f->file->tensors] = true;
}

/* Append a copy of a tensor, with this GGUF name. */
static llm_tensor *llm__folder_rename(llm__folder *f, const llm_tensor *source, const char *name) {
    llm_tensor *t = &f->tensors[f->n_tensors];
    char *copy = f->names + f->n_tensors++ * LLM__TENSOR_NAME;
    snprintf(copy, LLM__TENSOR_NAME, "%s", name);
    *t = *source;
    t->name = llm__string(copy);
    return t;
}

/* A tensor's data or, if it is not aligned as kernels need, a copy. */
static const void *llm__folder_aligned(const llm__folder *f, const llm_tensor *source) {
    if ((uintptr_t)source->data % (uintptr_t)llm__dtype_of(source)->bytes == 0) return source->data;
    void *copy = llm__new((size_t)source->bytes, 1, "a tensor that is not aligned", f->file->error);
    if (!copy) return NULL;
    memcpy(copy, source->data, (size_t)source->bytes);
    return llm__add_memory(f->file, copy) ? copy : NULL;
}

static bool llm__ends_with(llm_string s, const char *end) {
    size_t n = strlen(end);
    return s.length >= n && !memcmp(s.data + s.length - n, end, n);
}

/* Add one to a vector, which becomes f32. */
static bool llm__folder_plus_one(const llm__folder *f, llm_tensor *t) {
    int64_t n = (int64_t)t->dims[0];
    float *values = (float *)llm__new((size_t)n, sizeof *values, "the weights of a norm",
                                      f->file->error);
    if (!values) return false;
    llm_type_find(t->type)->unpack(t->data, values, n);
    for (int64_t i = 0; i < n; i++) values[i] += 1;
    t->type = LLM_F32;
    t->bytes = (uint64_t)n * sizeof *values;
    t->data = values;
    return llm__add_memory(f->file, values);
}

/* Append a tensor with this GGUF name. The source must have n_dims dimensions. */
static bool llm__folder_tensor(llm__folder *f, const llm_tensor *source, const char *name,
                               int n_dims) {
    if (!llm_type_find(source->type))
        return llm__unsupported(f->file,
                                "the tensor '%s' is of the type %s; supported: F32, F16, BF16",
                                llm__show(source->name).text, llm__dtype_of(source)->name);
    if (source->n_dims != n_dims)
        return llm__bad(f->file, "the tensor %s has %d dimensions, but should have %d",
                        llm__show(source->name).text, source->n_dims, n_dims);
    llm__folder_use(f, source);
    llm_tensor *t = llm__folder_rename(f, source, name);
    t->data = llm__folder_aligned(f, source);
    return t->data != NULL &&
           (!(f->architecture->traits & LLM__NORMS_MINUS_ONE) ||
            !llm__ends_with(source->name, "norm.weight") || llm__folder_plus_one(f, t));
}

/* ---- 4-bit integers: GPTQ and AWQ ----
 * GPTQ (Frantar et al. 2022, arxiv.org/abs/2210.17323) and AWQ (Lin et al. 2023,
 * arxiv.org/abs/2306.00978) replace a matrix X.weight (rows, cols) by X.qweight, X.qzeros and
 * X.scales. Each group of columns in a row has a scale and a zero point:
 *
 *     value = scale x (q - zero)        scale f16; q and zero 4 bits, eight in an int32
 *
 * The tensors are transposed: scales (groups, rows), qzeros (groups, rows/8), and
 *
 *     GPTQ  qweight (cols/8, rows): eight columns in an int32, the first in the lowest bits. qzeros
 *           holds zero - 1, except with the checkpoint_format "gptq_v2". With "desc_act", columns
 *           were quantized in order of importance, and X.g_idx (cols) is the group of each. The
 *           loader sorts the columns by group, and the engine permutes the matrix's input likewise.
 *     AWQ   qweight (cols, rows/8): eight rows in an int32, in the order 0 2 4 6 1 3 5 7 from the
 *           lowest bits. qzeros is packed in the same way.
 *
 * Both become q4_0 if every zero point is 8 (symmetric), else q4_Z, with exactly the same
 * values. */

typedef struct llm__int4 {
    bool awq, zeros_less_one; /* AWQ (false: GPTQ); whether `zeros` holds zero - 1 */
    int64_t rows, cols, n_groups;
    const uint32_t *weights, *zeros; /* qweight, qzeros */
    const uint16_t *scales;          /* (n_groups, rows) f16 */
    const int32_t *columns;          /* (cols) columns sorted by group; NULL: 0, 1, 2, ... */
    const int32_t *groups; /* (cols) group of each column; NULL: consecutive groups of equal size */
} llm__int4;

/* The first bit of row i in an AWQ word. */
static int llm__awq_shift(int64_t i) { return (int)(4 * ((i & 1) * 4 + (i >> 1 & 3))); }

static int llm__int4_zero(const llm__int4 *m, int64_t group, int64_t row) {
    uint32_t word = m->zeros[group * (m->rows / 8) + row / 8];
    return (int)(word >> (m->awq ? llm__awq_shift(row % 8) : 4 * (row % 8)) & 15) +
           m->zeros_less_one;
}

enum {
    LLM__INT4_ROWS = 128,            /* rows in a tile: 16 words of AWQ, a cache line */
    LLM__INT4_PAIRS = LLM__BLOCK / 2 /* pairs of columns (k, k + 16) in a block, a byte each */
};

/* Fill a tile of bytes (PAIRS, ROWS) from n rows and one block of columns. As in q4_0, the byte at
 * (k, row) has column k in its low nibble and k + 16 in its high nibble. An AWQ word holds eight
 * rows: to process whole words, a line of the tile holds the rows of all even nibbles, then those
 * of all odd ones. */
static void llm__int4_tile_awq(const llm__int4 *m, int64_t first, int64_t n, int64_t column,
                               uint8_t *tile) {
    const uint32_t lower = 0x0f0f0f0f, *low = m->weights + (column * m->rows + first) / 8,
                   *high = low + LLM__INT4_PAIRS * m->rows / 8;
    for (int k = 0; k < LLM__INT4_PAIRS; k++, low += m->rows / 8, high += m->rows / 8) {
        LLM__PREFETCH(low + 2 * LLM__BLOCK * m->rows / 8); /* too far apart for hardware prefetch */
        LLM__PREFETCH(high + 2 * LLM__BLOCK * m->rows / 8);
        uint32_t even[LLM__INT4_ROWS / 8] = {0}, odd[LLM__INT4_ROWS / 8] = {0};
        for (int64_t i = 0; i < n / 8; i++) {
            even[i] = (low[i] & lower) | (high[i] & lower) << 4;
            odd[i] = (low[i] >> 4 & lower) | (high[i] & ~lower);
        }
        memcpy(tile + k * LLM__INT4_ROWS, even, sizeof even);
        memcpy(tile + k * LLM__INT4_ROWS + sizeof even, odd, sizeof odd);
    }
}

/* Position of row i in a line of an AWQ tile. */
static int llm__int4_place_awq(int i) {
    int nibble = llm__awq_shift(i) / 4;
    return i / 8 * 4 + nibble / 2 + (nibble & 1) * LLM__INT4_ROWS / 2;
}

/* Fill a tile from GPTQ weights, with the rows in order. */
static void llm__int4_tile_gptq(const llm__int4 *m, int64_t first, int64_t n, int64_t column,
                                uint8_t *tile) {
    for (int k = 0; k < LLM__INT4_PAIRS; k++) {
        int64_t a = column + k, b = a + LLM__INT4_PAIRS;
        if (m->columns) a = m->columns[a], b = m->columns[b];
        const uint32_t *low = m->weights + a / 8 * m->rows + first,
                       *high = m->weights + b / 8 * m->rows + first;
        for (int64_t i = 0; k % 8 == 0 && i < n; i += 16) {
            LLM__PREFETCH(low + 8 * m->rows + i);
            LLM__PREFETCH(high + 8 * m->rows + i);
        }
        for (int64_t i = 0; i < n; i++)
            tile[k * LLM__INT4_ROWS + i] = (uint8_t)((low[i] >> (4 * (a & 7)) & 15) |
                                                     (high[i] >> (4 * (b & 7)) & 15) << 4);
    }
}

/* Transpose (PAIRS, ROWS) to (ROWS, PAIRS). Each pass interleaves the two halves of the tile: the
 * top bit of each index becomes the lowest. A pair's index has four bits, hence four passes. */
static void llm__int4_transpose(uint8_t *tile) {
    enum { HALF = LLM__INT4_ROWS * LLM__INT4_PAIRS / 2 };
    uint8_t shuffled[2 * HALF], *from = tile, *to = shuffled;
    for (int pass = 0; pass < 4; pass++) {
        for (int i = 0; i < HALF; i++) to[2 * i] = from[i], to[2 * i + 1] = from[HALF + i];
        uint8_t *other = from;
        from = to;
        to = other;
    }
}

/* Set heads to the start of a block in each of n rows: the group's scale and zero point, 16 bits
 * each. */
static void llm__int4_heads(const llm__int4 *m, int64_t first, int64_t n, int64_t group,
                            uint8_t heads[LLM__INT4_ROWS][4]) {
    for (int64_t i = 0; i < n; i++) {
        llm__write_u16(heads[i], m->scales[group * m->rows + first + i]);
        llm__write_u16(heads[i] + 2, (uint16_t)llm__int4_zero(m, group, first + i));
    }
}

/* Convert n rows, all of one tile, to blocks of q4_0 or q4_Z. The matrix is stored transposed, so
 * each block of columns is converted for all rows at once. Words hold eight rows: the tile has
 * whole words, but only the n rows are written. */
static void llm__int4_rows(const llm__int4 *m, int64_t first, int64_t n, llm_type type,
                           uint8_t *out) {
    int head = type == LLM_Q4_0 ? 2 : 4, skipped = (int)(first % 8), end = skipped + (int)n;
    size_t row_bytes = llm__row_bytes(type, m->cols), block_bytes = (size_t)head + LLM__INT4_PAIRS;
    uint8_t tile[LLM__INT4_ROWS * LLM__INT4_PAIRS] = {0}, heads[LLM__INT4_ROWS][4];
    first -= skipped;
    n = llm__divide_up(end, 8) * 8;
    for (int64_t column = 0, last = -1; column < m->cols; column += LLM__BLOCK) {
        int64_t group = m->columns ? m->groups[m->columns[column]]
                                   : column / (m->cols / m->n_groups);
        if (group != last) llm__int4_heads(m, first, n, last = group, heads);
        if (m->awq) llm__int4_tile_awq(m, first, n, column, tile);
        else llm__int4_tile_gptq(m, first, n, column, tile);
        llm__int4_transpose(tile);
        uint8_t *to = out + (size_t)(column / LLM__BLOCK) * block_bytes;
        for (int i = skipped; i < end; i++, to += row_bytes) {
            LLM__PREFETCH_FAR(to + 128);
            memcpy(to, heads[i], 4); /* q4_0: the integers overwrite the zero point */
            memcpy(to + head, tile + (m->awq ? llm__int4_place_awq(i) : i) * LLM__INT4_PAIRS,
                   LLM__INT4_PAIRS);
        }
    }
}
static bool llm__int4_symmetric(const llm__int4 *m) {
    uint32_t differs = 0, eights = m->zeros_less_one ? 0x77777777 : 0x88888888;
    for (int64_t i = 0; i < m->n_groups * (m->rows / 8); i++) differs |= m->zeros[i] ^ eights;
    return !differs;
}

/* Find "<module>.<part>", check its type, and set *data to its values. On failure, sets the error
 * and returns NULL. */
static const llm_tensor *llm__folder_int4_source(llm__folder *f, const char *module,
                                                 const char *part, const char *dtype, int n_dims,
                                                 const void **data) {
    char name[160];
    snprintf(name, sizeof name, "%s.%s", module, part);
    const llm_tensor *source = llm_file_find_tensor(f->file, name);
    const char *type = source ? llm__dtype_of(source)->name : "";
    if (!source) {
        llm__bad(f->file, "the tensor %s is missing", name);
    } else if (strcmp(type, dtype) || source->n_dims != n_dims) {
        llm__unsupported(f->file,
                         "the tensor %s is of type %s with %d dimensions, but should be %s with %d",
                         name, type, source->n_dims, dtype, n_dims);
    } else {
        llm__folder_use(f, source);
        if ((*data = llm__folder_aligned(f, source)) != NULL) return source;
    }
    return NULL;
}

/* Set m->columns, unless the columns are in order already. The file owns the array. */
static bool llm__folder_columns(llm__folder *f, llm__int4 *m, const char *module) {
    int64_t size = m->cols / m->n_groups;
    bool ok = true, ordered = true;
    for (int64_t c = 0; c < m->cols; c++) {
        if (m->groups[c] < 0 || m->groups[c] >= m->n_groups)
            return llm__bad(f->file, "%s.g_idx names the group %d of %d", module, m->groups[c],
                            (int)m->n_groups);
        ordered = ordered && m->groups[c] == c / size;
    }
    if (ordered) return true;
    size_t bytes = (size_t)m->cols * sizeof(int32_t);
    int32_t *columns = (int32_t *)llm__new(bytes, 1, "the order of columns", f->file->error);
    if (!columns || !llm__add_memory(f->file, columns)) return false;
    int *next = (int *)llm__new((size_t)m->n_groups + 1, sizeof *next, "the groups",
                                f->file->error);
    if (!next) return false;
    m->columns = columns;
    for (int64_t c = 0; c < m->cols; c++) next[m->groups[c] + 1]++;
    for (int64_t g = 0; ok && g < m->n_groups; g++) {
        if (next[g + 1] % LLM__BLOCK)
            ok = llm__unsupported(f->file, "a group of %s has %d columns, not a multiple of %d",
                                  module, next[g + 1], LLM__BLOCK);
        next[g + 1] += next[g];
    }
    for (int64_t c = 0; ok && c < m->cols; c++) columns[next[m->groups[c]]++] = (int32_t)c;
    LLM_FREE(next);
    return ok;
}

static const llm_json_node *llm__int4_format(const llm_json_node *quantization) {
    static const char *const keys[] = {"checkpoint_format", "format", "version"};
    const llm_json_node *format = NULL;
    for (int i = 0; i < 3 && !format; i++) format = llm__folder_entry(quantization, keys[i]);
    return format;
}

/* Find the three or four tensors of a matrix and check their shapes. Returns qweight, or NULL. */
static const llm_tensor *llm__folder_int4_sources(llm__folder *f, llm__int4 *m,
                                                  const char *module) {
    const llm_json_node *q = llm_json_member(f->config.nodes, "quantization_config");
    const void *weights, *zeros, *scales, *groups;
    const llm_tensor *w = llm__folder_int4_source(f, module, "qweight", "I32", 2, &weights);
    const llm_tensor *z = w ? llm__folder_int4_source(f, module, "qzeros", "I32", 2, &zeros) : w;
    const llm_tensor *s = z ? llm__folder_int4_source(f, module, "scales", "F16", 2, &scales) : z;
    if (!s) return NULL;
    int64_t group = 0;
    char name[160];
    m->awq = !f->gptq;
    m->zeros_less_one = f->gptq && !llm_json_is(llm__int4_format(q), "gptq_v2");
    m->rows = (int64_t)w->dims[0] * (m->awq ? 8 : 1);
    m->cols = (int64_t)w->dims[1] * (m->awq ? 1 : 8);
    m->n_groups = (int64_t)s->dims[1];
    m->weights = (const uint32_t *)weights;
    m->zeros = (const uint32_t *)zeros;
    m->scales = (const uint16_t *)scales;
    llm_json_i64(llm_json_member(q, "group_size"), &group);
    if (group == -1) group = m->cols;
    if (group < 1 || m->cols > INT32_MAX || m->cols % LLM__BLOCK || m->rows % 8 ||
        group % LLM__BLOCK || m->cols % group || m->n_groups != m->cols / group ||
        (int64_t)s->dims[0] != m->rows || (int64_t)z->dims[1] != m->n_groups ||
        (int64_t)z->dims[0] != m->rows / 8) {
        llm__bad(f->file,
                 "%s: qweight (%llu, %llu), qzeros (%llu, %llu) and scales (%llu, %llu) do not fit "
                 "together in groups of %lld, which must be a multiple of %d",
                 module, (llm__big)w->dims[1], (llm__big)w->dims[0], (llm__big)z->dims[1],
                 (llm__big)z->dims[0], (llm__big)s->dims[1], (llm__big)s->dims[0], (long long)group,
                 LLM__BLOCK);
        return NULL;
    }
    snprintf(name, sizeof name, "%s.g_idx", module);
    if (m->awq || (!llm__is_on(q, "desc_act", false) && !llm_file_find_tensor(f->file, name)))
        return w;
    const llm_tensor *g = llm__folder_int4_source(f, module, "g_idx", "I32", 1, &groups);
    if (!g) return NULL;
    m->groups = (const int32_t *)groups;
    if ((int64_t)g->dims[0] == m->cols) return llm__folder_columns(f, m, module) ? w : NULL;
    llm__bad(f->file, "%s has %llu entries for %d columns", name, (llm__big)g->dims[0],
             (int)m->cols);
    return NULL;
}

/* Append a 4-bit matrix, which llm_tensor_rows converts later. */
static bool llm__folder_int4(llm__folder *f, const char *name, const char *module) {
    llm__int4 *m = (llm__int4 *)llm__new(1, sizeof *m, "a 4-bit matrix", f->file->error);
    if (!m || !llm__add_memory(f->file, m)) return false;
    const llm_tensor *source = llm__folder_int4_sources(f, m, module);
    if (!source) return false;
    llm_tensor *t = llm__folder_rename(f, source, name);
    t->type = llm__int4_symmetric(m) ? LLM_Q4_0 : LLM_Q4_Z;
    t->data = NULL;
    t->dims[0] = (uint64_t)m->cols;
    t->dims[1] = (uint64_t)m->rows;
    t->bytes = (uint64_t)m->rows * llm__row_bytes(t->type, m->cols); /* cannot overflow */
    t->columns = m->columns;
    t->int4 = m;
    return true;
}

bool llm_tensor_rows(const llm_tensor *tensor, uint64_t first, uint64_t n, void *out,
                     llm_error *err) {
    llm__clear(err);
    if (!tensor || (n && !out))
        return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_tensor_rows: %s is NULL",
                         tensor ? "out" : "the tensor");
    uint64_t rows = tensor->dims[1] * tensor->dims[2] * tensor->dims[3],
             row_bytes = tensor->bytes / rows;
    if (first > rows || n > rows - first)
        return llm__fail(err, LLM_ERROR_ARGUMENT,
                         "llm_tensor_rows: %llu rows of %s from row %llu on, but it has %llu",
                         (llm__big)n, llm__show(tensor->name).text, (llm__big)first,
                         (llm__big)rows);
    if (!tensor->int4) {
        if (n)
            memcpy(out, (const uint8_t *)tensor->data + first * row_bytes, (size_t)(n * row_bytes));
        return true;
    }
    int64_t begin = (int64_t)first, end = (int64_t)(first + n);
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (int64_t tile = begin / LLM__INT4_ROWS; tile < llm__divide_up(end, LLM__INT4_ROWS);
         tile++) {
        int64_t from = llm__max(tile * LLM__INT4_ROWS, begin),
                to = llm__min((tile + 1) * LLM__INT4_ROWS, end);
        llm__int4_rows(tensor->int4, from, to - from, tensor->type,
                       (uint8_t *)out + (uint64_t)(from - begin) * row_bytes);
    }
    return true;
}

static void *llm__new_rows(const llm_tensor *tensor, llm_error *err) {
    void *rows = LLM_MALLOC((size_t)tensor->bytes);
    if (!rows) {
        llm__no_memory(err, tensor->bytes, llm__show(tensor->source).text);
        return NULL;
    }
    llm__want_large_pages(rows, (size_t)tensor->bytes);
    llm_tensor_rows(tensor, 0, tensor->dims[1] * tensor->dims[2] * tensor->dims[3], rows, NULL);
    return rows;
}

llm_faults llm_type_check(llm_type type, const void *blocks, uint64_t count) {
    enum { STEP = 1024 };
    const llm_type_info *info = llm_type_find(type);
    llm_faults faults = {0, 0, 0};
    int64_t n = info ? (int64_t)count : 0, bad = 0, first = n;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) reduction(+ : bad) reduction(min : first)
#endif
    for (int64_t at = 0; at < n; at += STEP) {
        float values[STEP];
        int64_t here = llm__min(STEP, n - at);
        info->unpack((const char *)blocks + at / info->block_values * info->block_bytes, values,
                     here);
        for (int64_t i = 0; i < here; i++)
            if (!(fabsf(values[i]) <= FLT_MAX)) bad++, first = llm__min(first, at + i);
    }
    if (bad) {
        float values[LLM__SUPER];
        int64_t block = first / info->block_values;
        info->unpack((const char *)blocks + block * info->block_bytes, values, info->block_values);
        faults.count = (uint64_t)bad;
        faults.first = (uint64_t)first;
        faults.value = values[first % info->block_values];
    }
    return faults;
}

bool llm_tensor_check(const llm_tensor *tensor, llm_faults *faults, llm_error *err) {
    llm__clear(err);
    void *rows = tensor->int4 ? llm__new_rows(tensor, err) : NULL;
    if (tensor->int4 && !rows) return false;
    uint64_t count = tensor->dims[0] * tensor->dims[1] * tensor->dims[2] * tensor->dims[3];
    *faults = llm_type_check(tensor->type, rows ? rows : tensor->data, count);
    LLM_FREE(rows);
    return true;
}

bool llm_file_check(const llm_file *file, llm_error *err) {
    llm__clear(err);
    for (int64_t i = 0; i < file->n_tensors; i++) {
        llm_faults faults;
        if (!llm_tensor_check(&file->tensors[i], &faults, err)) return false;
        if (faults.count)
            return llm__fail(err, LLM_ERROR_FORMAT,
                             "%s: the tensor %s has %llu values that are not finite, the first is "
                             "%g at index %llu: fetch the file again, or convert it again",
                             file->path, llm__show(file->tensors[i].source).text,
                             (llm__big)faults.count, (double)faults.value, (llm__big)faults.first);
    }
    return true;
}

/* See llm__file_forget. */
static void llm__tensor_forget(const llm_file *file, const llm_tensor *tensor) {
    const llm__int4 *m = tensor->int4;
    if (!m) {
        llm__file_forget(file, tensor->data, tensor->bytes);
        return;
    }
    llm__file_forget(file, m->weights, (uint64_t)(m->rows * m->cols / 2));
    llm__file_forget(file, m->scales, (uint64_t)(m->rows * m->n_groups) * sizeof *m->scales);
    llm__file_forget(file, m->zeros, (uint64_t)(m->rows * m->n_groups / 2));
}
static bool llm__folder_quantization(llm__folder *f) {
    static const char known[] =
        "quant_method bits group_size desc_act sym checkpoint_format zero_point version data_type "
        /* ignored: settings of the quantizer and of other programs */
        "act_group_aware amp autoround_version backend batch_size block_name_to_quantize "
        "cache_block_outputs damp_percent dataset disable_exllama do_fuse enable_minmax_tuning "
        "enable_norm_bias_tuning enable_quanted_input exllama_config format fuse_max_seq_len "
        "gradient_accumulate_steps iters lm_head low_cpu_mem_usage low_gpu_mem_usage lr "
        "max_input_length meta method minmax_lr model_file_base_name model_name_or_path "
        "model_seqlen module_name_preceding_first_block modules_in_block_to_quantize "
        "modules_to_fuse "
        "modules_to_not_convert nsamples pack_dtype pack_impl pad_token_id provider "
        "quant_block_list quantizer scale_dtype seqlen static_groups to_quant_block_names "
        "tokenizer train_bs true_sequential use_cuda_fp16 use_exllama";
    const llm_json_node *q = llm__folder_entry(f->config.nodes, "quantization_config");
    const llm_json_node *method = llm_json_member(q, "quant_method"), *format = llm__int4_format(q),
                        *type = llm__folder_entry(q, "data_type"),
                        *bits = llm_json_member(q, "bits");
    int64_t n = 0;
    if (!q) return true;
    f->gptq = llm_json_is(method, "gptq");
    f->int4 = f->gptq || llm_json_is(method, "awq");
    if (!method)
        return llm__bad(f->file,
                        "the quantization_config in config.json does not say its quant_method");
    if (!f->int4)
        return llm__not_among(f->file, "the quantization", llm__show_node(method), "gptq, awq");
    if (type && !llm_json_is(type, "int")) /* a key of AutoRound */
        return llm__not_among(f->file, "the data_type", llm__show_node(type), "int");
    if (!llm_json_i64(bits, &n) || n != 4)
        return llm__not_among(f->file, "the number of bits", llm__show_node(bits), "4");
    if (format && !llm_json_is(format, f->gptq ? "gptq" : "gemm") &&
        !llm_json_is(format, f->gptq ? "gptq_v2" : "GEMM"))
        return llm__not_among(f->file, f->gptq ? "the gptq format" : "the awq format",
                              llm__show_node(format), f->gptq ? "gptq, gptq_v2" : "gemm");
    return llm__folder_known(f, q, "the quantization_config", known);
}

/* Some tools write all-zero biases that config.json does not declare. */
static bool llm__all_zero(const llm_tensor *source) {
    for (uint64_t i = 0; i < source->bytes; i++)
        if (((const char *)source->data)[i]) return false;
    return true;
}

/* Does the architecture or config.json require this part? experts: the layer has experts. */
static bool llm__folder_wants(const llm__folder *f, int part, bool experts) {
    unsigned wanted = f->architecture->required, optional = f->architecture->optional;
    bool biased = f->architecture->traits & LLM__BIASED;
    if (llm__folder_is_on(f, "attention_bias", biased))
        wanted |= optional & (LLM__BIASES | 1 << LLM__QKV_BIAS);
    if (llm__folder_is_on(f, "mlp_bias", biased)) wanted |= optional & LLM__FFN_BIASES;
    if (!llm__folder_parallel(f)) wanted |= optional & LLM__SECOND_NORM;
    return llm__wants_part(wanted, part, experts, f->architecture->traits & LLM__SHARED_EXPERT);
}

/* Report that X.weight is missing and, if there is X.qweight, why that cannot be used. */
static bool llm__folder_missing(const llm__folder *f, const char *name) {
    char quantized[160];
    snprintf(quantized, sizeof quantized, "%.*s.qweight", (int)(strlen(name) - strlen(".weight")),
             name);
    if (!llm_file_find_tensor(f->file, quantized))
        return llm__bad(f->file, "the tensor %s is missing", name);
    return llm__unsupported(
        f->file, "the tensor %s is missing; it is quantized, %s", name,
        f->int4 ? "which is supported for the matrices of the layers only"
        : llm__folder_has(f->file->path, "quantize_config.json")
            ? "but config.json has no quantization_config: copy it from quantize_config.json, "
              "with a \"quant_method\" of \"gptq\" or \"awq\""
            : "but config.json has no quantization_config, which says how");
}

/* Find the tensor with this name, which may be replaced by the architecture's own. The file's name
 * may lack the prefix "transformer.". */
static const llm_tensor *llm__folder_find(const llm__folder *f, char name[LLM__SOURCE_NAME]) {
    llm__folder_name(f, name);
    const llm_tensor *t = llm_file_find_tensor(f->file, name);
    size_t n = strlen("transformer.");
    return t || strncmp(name, "transformer.", n) ? t : llm_file_find_tensor(f->file, name + n);
}

/* Reorder the rows of the latest tensor: from q, k, v of each head to all q, all k, all v. */
static bool llm__folder_by_part(const llm__folder *f) {
    llm_tensor *t = &f->tensors[f->n_tensors - 1];
    uint64_t rows = t->dims[t->n_dims - 1], heads = (uint64_t)f->n_heads,
             size = t->bytes / (3 * heads);
    if (rows != 3 * heads * (uint64_t)f->head_dim)
        return llm__bad(f->file, "the tensor %s has %llu rows, not 3 x %d x %d",
                        llm__show(t->source).text, (llm__big)rows, f->n_heads, f->head_dim);
    char *copy = (char *)llm__new(3 * (size_t)heads, (size_t)size, "reordered rows",
                                  f->file->error);
    if (!copy) return false;
    for (uint64_t i = 0; i < 3 * heads; i++)
        memcpy(copy + (i % 3 * heads + i / 3) * size, (const char *)t->data + i * size,
               (size_t)size);
    t->data = copy;
    return llm__add_memory(f->file, copy);
}

static bool llm__folder_layer_tensor(llm__folder *f, char source_name[LLM__SOURCE_NAME],
                                     const char *name, bool vector) {
    const llm_tensor *source = llm__folder_find(f, source_name);
    if (source) return llm__folder_tensor(f, source, name, vector ? 1 : 2);
    if (!f->int4 || vector) return llm__folder_missing(f, source_name);
    source_name[strlen(source_name) - strlen(".weight")] = 0;
    return llm__folder_int4(f, name, source_name);
}

static bool llm__folder_layer_experts(llm__folder *f, int layer) {
    static const char *const names[] = {"gate", "up", "down"};
    for (int i = 0; i < 3 * f->n_experts; i++) {
        char name[LLM__TENSOR_NAME], source_name[LLM__SOURCE_NAME];
        llm__expert_name(name, f->n_experts, layer, i);
        snprintf(source_name, sizeof source_name, "model.layers.%d.mlp.experts.%d.%s_proj.weight",
                 layer, i % f->n_experts, names[i / f->n_experts]);
        if (!llm__folder_layer_tensor(f, source_name, name, false)) return false;
    }
    return true;
}

static bool llm__folder_part(llm__folder *f, int layer, int part) {
    const llm__part_row *row = &llm__parts()[part];
    bool vector = row->rows == LLM__ONE;
    char name[LLM__TENSOR_NAME], source_name[LLM__SOURCE_NAME];
    /* with norms after the blocks as well, the FFN norm has another name */
    bool second = part == LLM__FFN_NORM && f->architecture->required & LLM__POST_NORMS;
    bool by_head = f->architecture->traits & LLM__BY_HEAD &&
                   (part == LLM__QKV || part == LLM__QKV_BIAS);
    /* with experts, some layers may have a feed-forward block instead */
    snprintf(source_name, sizeof source_name, "model.layers.%d.mlp.down_proj.weight", layer);
    bool experts = f->n_experts && !llm_file_find_tensor(f->file, source_name);
    llm__part_name(name, layer, part);
    snprintf(source_name, sizeof source_name, "model.layers.%d.%s", layer,
             second ? "pre_feedforward_layernorm.weight" : row->source);
    if (llm__folder_wants(f, part, experts))
        return llm__folder_layer_tensor(f, source_name, name, vector) &&
               (!by_head || llm__folder_by_part(f)) &&
               (part != LLM__ROUTER || llm__folder_layer_experts(f, layer));
    const llm_tensor *source = llm__folder_find(f, source_name);
    if (source && llm__all_zero(source)) llm__folder_use(f, source);
    return true;
}

/* If config.json has a vocab_size, it must equal the rows of the embedding. Both may exceed the
 * number of tokens. */
static bool llm__folder_check_vocab(const llm__folder *f, const llm_tensor *embedding) {
    int vocab = 0;
    if (!llm__folder_entry(f->config.nodes, "vocab_size")) return true;
    if (!llm__folder_int(f, f->config.nodes, "vocab_size", 0, &vocab)) return false;
    return embedding->dims[1] == (uint64_t)vocab ||
           llm__bad(f->file,
                    "config.json says \"vocab_size\": %d, but %s has %llu rows: correct it, or "
                    "fetch the files again",
                    vocab, llm__show(embedding->name).text, (llm__big)embedding->dims[1]);
}

static bool llm__folder_ends_of_stack(llm__folder *f) {
    static const char *const matrices[][2] = {{"token_embd.weight", "model.embed_tokens.weight"},
                                              {"output.weight", "lm_head.weight"}};
    bool tied = llm__is_on(f->config.nodes, "tie_word_embeddings",
                           f->architecture->traits & LLM__TIED);
    for (int i = 0; i < 2 + LLM__N_ENDS; i++) {
        const char *const *names = i < 2 ? matrices[i] : llm__end_names[i - 2];
        char source_name[LLM__SOURCE_NAME];
        if (i >= 2 && !llm__has_end(f->architecture, i - 2)) continue;
        snprintf(source_name, sizeof source_name, "%s", names[1]);
        const llm_tensor *source = llm__folder_find(f, source_name);
        if (i == 1 && tied) { /* may be in the file all the same */
            if (source) llm__folder_use(f, source);
            continue;
        }
        if (!source) return llm__folder_missing(f, source_name);
        if (!llm__folder_tensor(f, source, names[0], i < 2 ? 2 : 1) ||
            (i == 0 && !llm__folder_check_vocab(f, source)))
            return false;
    }
    return true;
}

static bool llm__folder_tensors(llm__folder *f) {
    llm_file *file = f->file;
    size_t n = (size_t)file->n_tensors;
    f->used = (bool *)llm__new(n, 1, "the tensors", f->file->error);
    f->names = (char *)llm__new(n + 2, LLM__TENSOR_NAME, "the names of the tensors",
                                f->file->error);
    if (!f->used || !f->names) return LLM_FREE(f->names), false;
    if (!llm__add_memory(file, f->names) || !llm__folder_ends_of_stack(f)) return false;
    for (int i = 0; i < f->n_layers * LLM__N_PARTS; i++)
        if (!llm__folder_part(f, i / LLM__N_PARTS, i % LLM__N_PARTS)) return false;
    for (size_t i = 0; i < n; i++) { /* old files have masks, and copies of config.json's values */
        static const char *const ends[] = {".rotary_emb.inv_freq", ".attention.bias",
                                           ".attention.masked_bias"};
        for (int k = 0; k < 3; k++) f->used[i] |= llm__ends_with(file->tensors[i].name, ends[k]);
    }
    if (!llm__all_used(file, f->used, "config.json's num_hidden_layers", f->n_layers,
                       "model.layers.%8d.%n", f->architecture->model_type))
        return false;
    LLM_FREE(file->tensors);
    file->tensors = f->tensors;
    file->n_tensors = f->n_tensors;
    f->tensors = NULL;
    return llm__index_tensors(file, "there are two tensors");
}

/* ---- Opening a folder ---- */

static bool llm__folder_architecture(llm__folder *f) {
    llm_string type = {"", 0};
    char known[512];
    if (!llm_json_string(llm_json_member(f->config.nodes, "model_type"), &type))
        return llm__bad(f->file, "config.json does not say its model_type");
    f->architecture = llm__find_architecture(type, true);
    llm__list_architectures(known, sizeof known, true);
    return f->architecture ||
           llm__not_among(f->file, "config.json's model_type", llm__show(type), known);
}

/* A folder without config.json may be just a vocabulary. */
static bool llm__folder_read(llm__folder *f, llm__metadata *m) {
    const char *path = f->file->path;
    bool found;
    if (!llm__read_json(&f->config, path, "config.json", &found, f->file->error)) return false;
    if (!found && llm__folder_has(path, "tokenizer.json") &&
        !llm__folder_has(path, "model.safetensors") &&
        !llm__folder_has(path, "model.safetensors.index.json"))
        return llm__folder_vocabulary(m, path, f->file->error);
    if (!found)
        return llm__fail(f->file->error, LLM_ERROR_FILE,
                         "%s: there is no config.json in this folder, so it is not a Hugging "
                         "Face model; to run a GGUF file, give its own path",
                         path);
    return llm__folder_architecture(f) && llm__folder_quantization(f) && llm__folder_weights(f) &&
           llm__folder_config(f, m) && llm__folder_tensors(f) &&
           llm__folder_vocabulary(m, path, f->file->error);
}

static llm_file *llm__folder_open(const char *path, llm_error *err) {
    llm__folder f;
    llm__metadata m;
    memset(&f, 0, sizeof f);
    memset(&m, 0, sizeof m);
    f.file = llm__file_create(NULL, 0, LLM__BORROWED, path, NULL, err);
    if (!f.file) return NULL;
    f.file->folder = true;
    bool ok = llm__folder_read(&f, &m) && llm__read_metadata(&m, f.file, err);
    LLM_FREE(m.bytes.data);
    LLM_FREE(f.tensors);
    LLM_FREE(f.used);
    llm_json_free(&f.config);
    if (ok) return f.file;
    llm_file_close(f.file);
    return NULL;
}

/* =====================================================================================
 * [9] Text: tokenizers and conversations
 *
 * A model reads tokens: pieces of text from a fixed list, the vocabulary. A token's index in the
 * list is its id. A frequent word is one token; a rare word is several.
 *
 * Most vocabularies use byte pair encoding (BPE; Gage 1994; for language models Sennrich et al.
 * 2016, arxiv.org/abs/1508.07909): start with the smallest pieces, and repeatedly join the best
 * pair of neighbours, until no pair makes a token. First, steps rewrite the text and split it into
 * words by regular expressions (llm__run_steps).
 *
 *     "gpt2"   Byte-level BPE. The smallest pieces are bytes; the file spells them as printable
 *              characters (llm__load_bytes). The best pair is the earliest in the list of merges.
 *     "llama"  SentencePiece (Kudo and Richardson 2018, arxiv.org/abs/1808.06226). The smallest
 *              pieces are characters. A space becomes U+2581, and another U+2581 may be added
 *              before the text. The best pair is the one whose joined token has the highest
 *              score. A character without a token becomes one token per byte, <0x00> to <0xFF>.
 *              "gemma4" is the same, with merges instead of scores.
 *     "t5"     Unigram: of all ways to cut a word into tokens, the one with the highest sum of
 *              scores (llm__add_best_path).
 *
 * The pieces form a linked list and the candidate pairs a heap, so merging takes O(n log n) time
 * (llm__merge).
 *
 * Special tokens, such as "<|endoftext|>", are recognized only if the caller asks for it: otherwise
 * untrusted text could end the conversation or pose as another speaker. "User-defined" tokens are
 * ordinary text that is never split; they are always recognized.
 * ================================================================================== */

/* ---- Characters ---- */

enum { LLM__UTF8_INVALID = 0x110000, LLM__UTF8_INCOMPLETE = 0x110001 };

/* Decode the character at s (n >= 1 bytes) and return its length. *code: LLM__UTF8_INCOMPLETE if
 * the text ends inside it, LLM__UTF8_INVALID if it is not valid UTF-8. */
static size_t llm__utf8(const uint8_t *s, size_t n, uint32_t *code) {
    uint32_t first = s[0];
    *code = first;
    if (first < 0x80) return 1;
    *code = LLM__UTF8_INVALID;
    if (first < 0xC2 || first > 0xF4) return 1;
    size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    uint32_t c = first & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) {
        if (i == n) return *code = LLM__UTF8_INCOMPLETE, n;
        uint32_t low = 0x80, high = 0xBF;
        if (i == 1) { /* reject overlong forms, surrogates and codes above U+10FFFF */
            if (first == 0xE0) low = 0xA0;
            if (first == 0xED) high = 0x9F;
            if (first == 0xF0) low = 0x90;
            if (first == 0xF4) high = 0x8F;
        }
        if (s[i] < low || s[i] > high) return i;
        c = c << 6 | (s[i] & 0x3F);
    }
    *code = c;
    return length;
}

/* Unicode tables, compressed: general categories, case foldings, combining classes and
 * decompositions, in this order. tests/unicode_tables.py describes the encoding. */
/* BEGIN tables made by tests/unicode_tables.py, Unicode 16.0.0 */
enum {
    LLM__N_RUNS = 3585, LLM__N_FOLDS = 1481, LLM__N_COMBINING = 333,
    LLM__N_DECOMPOSITIONS = 5722, LLM__N_DECOMPOSED = 8525
};
static const char *const llm__unicode_tables[] = {
" S$h-)YTwm6yp=&ct2.EsNyZ!fAD-E=$xEytt=h=0ZRmf4[&b/ToOM<V%#C6!W|y,/>|gq%SlvadPH^m'tre,S6j!Ol@ Dj0",
"lKof1O1/=)u@<:|wx>`YNk}[)C2MJ-O]esLdJn+ x~m@}UWQ;&6W;AK4=c&fORoHB<%t]_PEWnWSi[NFDh{pfpNP]I^.E>;R",
"xX}TP>A%jm.%s1c;l9N]8Q|#^/aw`!,M9o`8mOThaX a#i|P7@3+WH)vIBU|wrr/!p7(OJpz#9GfgeY)jz]5- a.Nf:K5)<L",
"=j)0&%:crg9<!!M,Z|ETV OYzgm]!v)(A9jnZCTA4CcS)Ejt$ygR-Ww=D0y;g0EihQ!I^SyP> MVe{n.g[7SzYvMn$ARIGg+",
"kWL5!sjd=ad6NXw_(IPi>!^~&|<wby&5X}kMQdhv9S^vq2(Mp90l{>z=-V-{{m1gm^M <n}VKdJN][#K[SaJ%>tDokwOZJ@<",
"GDOGQ0D.HYoW;SWEO64;g;ltcSkyU) aUj$IPM}Y]Bs@02[/F@F+F%fnjgG KOc9sB:Q0Pv!/yEXY(Jk|fxmoG!oW`Cxis_8",
"RO_k<P]TqaGV,AVo5vSA&^%B4811XD%A``S8B0TV;oUs6`Wo{S=DkQWf,AzBtL#:<GP#AwM2JDah#h<tWrOdCmg.cm/&BSN>",
"S6!:H{v{zx.ZL;&~lm|+^6jlzq=Jm&<dUQhvf3caI#(w;'erk6i2YAzAc$-64T+,l.iqhO{mg_ u-Et^5b:IcHB~X,AB[m18",
";mK)T_Hc}8]HBR%X.b|[/^=pp]Mr&!:vi.vOo}ACF5BL0#IrT:y87v1ayBo-]8lt%;`YLWbO;1WwlY|a:/V}]i9;NrwP%Pl+",
"8ye! 1_ LNBN|}b_ m+y$ds.S'u[g/@_Yj,Zh$#3T0zGu$g.>M0E$z%v{T1- |jemN6tI~EeX6nb[NF7W`-jM$ 8%~t8p,M=",
"Y&-u}6q8.]:s,e&'!|Bdd:oo<0&/8m[RmbSE`k1O<7fAZT,I9e`G3Em)CW{f(8AX=;ojPdn/qw|8k%A|dkgd3u: {X2DjBhp",
"x K#&Q3~Q$K<{P&'Mf{-f~Zln@42nF$,>o9ZO]YuvF^k4HU;oLL<lSU!xjMKK'O:z%<&KmXc6+QeVkr!Tv0TGB#&i( FlJ,#",
"4Dn%iw=d(KE<w:NJ@e=,o{wM5ufO%~.U _M{R(H<f MOo{f-S!H0WmJVmE{<.w! bxHNhB]_-@ouV@2^L{w_>5a,xP'Evbcr",
"l/T4}Q>X8UlffZ^;MSb[wp1rbYd(qtx0l;WqQ^RVlm!c!wYO4z4]yz;FRZH]&}0X42fJh~-DcT(|YT]j6)8239]AgG77^gg6",
"lb5M!L^8$dkF,&Xm)03jRN$=-)JaN'2psB56(]+'-y,XT]Y'yvQr>ETmr5#6si)~'kG&<(']B^Sc}oXGOLaj{5&6,W Z9g{6",
"GQutZo0Gp>o.kg 5Gf.z&I6T+co3<uA>nF8Bh|@#%hR}^]L`%Hy'RyW1Zwz~{SJ1!DCU_O{/`'kR#)sK8tWnkmx%SJ-Y4B y",
"u{!ia6)}<#H5iW-8xu4ln%Gjd.ZZ;}BR#pY$j)<fhFdU}mx~TkQQOO-3/neJZ_QiE2<Nw>ScwH .P=x,R-eDj5eO[$diki8y",
"9@8vZoeQ<35#0z]C<4ZP&3P!2G=ul(CC4e#WX)Cv6Jhn&v8[Q,cAQo1<C0(%:aQ<+=iyp=SGUh1&^Q>1_!tHQ]u/f$-RjjCr",
"6cJT'+}Z[l_c^.^3fH]6bw->NsK,z_C&cZ%u928ra;+N:aT>'idj;}i2Qu-e-e:)ulQZzukx#o5`_d9EA+qyE8(Xde}m;{]j",
"|Djz4Q{=SPr7t,{36tZPHA6=U)t}E);q+`V>GJ^>XsKHM,wbPCR~K'D1|zyg3!1'YIii,cB0=sF0Gnq~m7kZm3@L^II!eo4i",
"jg0r2zu//o&s; a%Kyc]BG&JH6[~Z(07qbJtWzqU/VSY>$}LPQ3/WLEUK~$Ln!1W9Q[BDhol_SFc}FgD[2GgnN3YHoEzZd#:",
"eBK6;-1'`n,FBW(Wg xY7/^:Ve|J&6wHx^B>;n3&U;>)F4}`uj%zWn6cNiqP [mbE%Kox[rLG83><E+d(&$$d-NF^Mhwye%F",
"iOKJE 1!;F1Gv=kxJ23$gC@=zzo}J0<meNvWScxCTBr2IyO~PpQZC9!AhaqJQ'M-`;%SP'q!8=P]u:H%AH1ZG~k~pA#Nwdtz",
"o;:+$XBG-s,10jS]G<TL#T7gLDVF1Vy57PFn[GItO2Hi1%G6mWN8bv;cIaWJQMquwbXYL_vB23acyT@>AfkE:lfs_w|ANADe",
"c[I=i{=_9{2`oh-;MHd0eDQZc[8DN+LmH=,{_%wH60|8gTIg1'{7.3bKRq&yE$^`y@(L{A3)4Mm-;)#Qf2Z)C%V.mpc/S}%C",
":njbt)(O^|)XPdlfvnGtn|`3[O,hiB47,Azp5Sh)D ;}[j=/$p+qYEn'p=#7u=1(Ko{TcGf-n-M$'K$9jzX)S_B(cUE3+W5c",
"vH[ahPA~b<Ba'1Qh1~`s>3yET.,r78,I[))@9T=3h|=}0n|%151tQ.)H5wIk5:15_{f-AQut2h_lq7eLB'RP!|-V`Mx:hbGw",
"!0j~:dIdWd`n&GFcb}xegB@0PW|#S-]Q}on,xzs!^QLoeTSQXO[tKR1yBs7p'f=C6SDqXMFmsQ{^GMr;Xh/X}x2M!nhi3>2I",
"tG-|z4q.!U.h#|MjO1%fI}}p7{6/Z4N>B!ccq`}Kxk7)qs_C{0Yf;43sa7:Sa(t@bA$LH87E(vs@)jhu#Ri>p'@byAIjUqyJ",
"U(U+I26R5pJx>BHeBIO&L(ib#@KY8U{366b4D~.I[07@r+y5=eO.6CjDI(#]dD,Xd|!+j hIZ/;wYnsY)]T$VV'Ba+8RE}TX",
"Gv3ij#AXxYeMC2WhSL8T98CD8>Ybp{b-ttmWhzhXHPV x+km0t+u<Qh 7Vxlzu@=KKhb`ye#=XK}(L&@H}w(//4TX@MAIA`c",
"y=I'=8m(P{.lUta_pv]RVeBDU:hhal0PV@$[UU:v[u2I<qhjSKXN]ZiN(itLo/,]X!C+eq2F|u>cmS/owtu`$Tqm dtc27Wr",
"WfRk=Y.z}yhn2tP`NkxeZUV$.<&-S1#gW^FanzULUNAb=`hTAW=|d_Au]xrwukx-}>oBIndRj4'Wz=4u'k{;JV5.352Tl|T_",
"&i%:43-YD@#^qRJw Bun>g_7RZ8kdY3d'3fPWlmQ]b9{E87zxI3+47{q]jpZSDq0yBEn'v%zCK.=j(PV;~_Q@ZroXT:0l)ez",
"_UOzJbRck,>g^j@A,jMs`^i6QD|DX3`m&qSeNm&0mL-_byL}WWZrwfUjDSn0RY-.^vI;'^+%8/})6=unc/NwUQn'1m3BRa,d",
":ctdnVHnsfqqgjoliRnO$24tm< K'J{-hY]#8IFZ<J<Gu:7^VkjZ)fp3l[:FRM1,L[r[V7;~D9>%|D,krxW|M0T5=C;gPsw9",
"3/.y p>j!EMs@|yt1P>Acim}I'QvD&9!I<iUn~s1xExx#j@#5qubmXQ<$:A|yCUf1JNZu=t`QFOU^8'ePx%',K/lg|-HIQ]^",
"0{JN(j21=RD&0p8S/M6Qs0>V3}>>QL+^Rl4/Ve7NS#A_n,F_+ bkw-L6QdS%U.=ME,%L/cTnGMuVTa(#5TV|.Xy'=4FK%X8/",
"^{%fi{7vak=KnWo)D51vYj]JcMDDM3qe@l}xnu&t,KA/U8#$O0DB#bc7gQM2,~.$qJov@TPDM]Pox|-e15l9a,h( ^ji/]m-",
"|aQO5HpfageqCvwzd^:5t=.-:`_fOXeI]g@31 ;w:P_limvrbwE%;#<If=>m&fji}fp:0&c<+wy<%jfBK6DA3-w4SFqZv]Fu",
"7wM2Z/[S)daqzy^-^^7h H^e6~O6o-ye 7|q+,hjfaaN$lLbTES V}ASc/iR95PJ=%4O<T 1JLa[W]GtQ]YV@4Jz4KoIOT-z",
"#Lg.Jiq##s7(eT+@yeen|adF|R-ICRz$<OO2$T5bQq,=yDC-f<C;]a<cb9>BKfHukhKft)gsJ_f42Tn~V@&~6yHrFas@P.dz",
"O!>Uq9=~vQ:Xt)-@V&$c@x9gC2SE'3B&Id0[d;X%tkKKM%SM7l9usbDEY`!L^=YB<m9}onOLE;JWN>G'sst`jyxZ$w>Hm>l4",
"xDkqbXqjQ2V8G6e%j,}cGnhy;'wDFOC`Q#6q{Uj^ms8K93^fz4|O3{XpG)p@9M6k(#FCOi,%ld<!KeX(;EB4I(:T]Jz,v@Bd",
"V)4tI[j|fO:Y5zW@jjz3w]6Zcdr!{xOo7&F1b0_fuHqf-$Y(y9VX@xVnh|cF)=,jlQ4YslDXs[!5b.^mOF;D7xYK:n5A<ey}",
"t4iHAwtiroD@t){2fPBs=aFc h_g<%{:eO4o2eCTw%l.9yme.bSrSa!iR>DtsWcDBEa;sz{SJRtLK7eJ];5pN5nM$O1<ogDy",
"b>zv61'1 yQDF,% PYCQICjw!N%_3f$WZqjj+`9fy86AcwmuOxf6HD)F-]2!QjN2x&N$57FlhAgctnqygM7bZ}}Xtx=Nu_[b",
"O#O_;tcyz3#1vIY`aIAfWsplbD7Tm<!eBCO9FiN&5Y6Wgt)GW^bbv.HN5<|Gq^V6X#Ul%;B9J>-:3#+Dm_=l_kmOx0#ZWz g",
"Y}hkNE[ .Uga^u!YCE3MQ=5b$uNHi!6+dhJ_PcK{pw:P6_|]&h}>)zIOv>vMmt'i}wA'FyF&r1d05LCI8Pu8hRM+$3m)eH1Q",
"dOf4wFWIo$x(]!`tmkuF]tr)1p#uK%6V RQHeqG[DOPKtStZG!t'o9R<ZOm+%f!HrU,XJwhzaW^I(b!wN+JmA!n>xO+OrW#:",
"S51ClT[{hFM3gs7teQGJ@8A8@fIGL`k1M_q13_zJV7d|Z%}Gi5#(E!-}7[(T|w/8X+.G8%AJ&ta6w9(=`4$QW>Gi=F]s4pn(",
"[YL352yPPN}kLIO%h%[RnTKHC+)ANbct{.0Y8:%+;:8o9tNnoZ !3|x<d&DfCyy1V6AZ&vRz1f]x[W;(`[Y1vZ& ,~6b.w48",
"Bk;=g[vQH;P_]!5n//._ VxzDO5D7PCSLYUJ>!o37!QL/Xj~ytyGb#,onk.ESqIz1lSWv{'HBnYcv#ctIExsOohg4p@q6gSG",
"A'KMq3'iASH5^;lGq}F/m>{(iE`agCttoEtHmVC#4_JqDJ+j^^,+VnLiYpP,Tz_eIvu<.G0U2a2aS$5>#D& Rn}k`orX;+.'",
"a~0HlEUWP6QXC+xowH23VhUn88B,/Jj:PPB&>v-[Y_<Kj]+ZX(M[cDx7TD:#Z0Q.OR[X>DiNcF}bGW=q2d{A7[FtD_WhT/t-",
"%8xdsw/!C|5E&lGVr+I_jA4Y%Qk`R^75<-{K/p:op7Mw4AFIUga)4&$J6W-c2+Mj@mYWHmO !Lnbq9;,7Vf^W;b9.QdNr002",
"Nk}l7{r8eQUv@'#~rT,ER^u!/,`[P4-$wK#lqco<O{0L#ziumw&UpG]^}r=iMkP1a4N%BPH=PZ//IS(&z}a=^YbQP^W_O<.W",
"/e+X.nA~^B9@It4!F=nG1IN3jZ70HaCd.J(LgrsS}]zsht-,||ZZK>=OLBkt1~ QUI&2&t1uIb#;F[}-Itc<6TbWEc(odN M",
"aCEZJ8=_YCR<cj&/l>Z={Ta]&k+(^dr_)K.l3stYl~&Mx&}vty1|/9Yekvq|7f>]ZcGerHn/6Q#`TO|+)B'41J4lPERRZ#f0",
"}pyyVrk&tA z86Hdu85(AUvEMV9s[V<::AuXI#;0bmW]$>F^3KT8lmU:@;6iTx%5wEnzRU3rL7.9U,@ty~6D8zX7hj(zsmQ+",
"U${X_-fhc#+OrihU{u%R]3j@ILJ$o'.LCZ:zMH#T1V (oFim]9c $-Wc72)4C`q;K&4;upX|4ggh=&x+-j/Hrho,ey6]J cm",
"Jql$gQ<O,1Wc0=|vO%YVhusQByhRH#>bK_cXw$c4K'fAY,RC-YT]Ot{/tHQ}nLsO>SD2_k6D%,5xbrfBIO'a%+IT'TGUXuz2",
"5{_ nf_/=A]-^X8}dsS+mSur<e&<HLn^QNYFv;lXF$Q!Mwgcegcp=SjGIn9qs7VhXZb+h@_$5e8;P(dwR2nE),5hl(#7xueN",
".jLJzy'sR[1GB5RzO')UelcppD.i6yiN/Xwq_-J@=2b%W|8cBoqx@xUbYrw!)jqsB%}RQ5%ec`kz|Xs9E&:ikt&hSk=I p 9",
"+4/t.|hp>5cq+4N&J|g-!5EtD7z}C7IbKdK}PV<vN476Pvd,L)yNb{Xc/l1%:7s-V.U!]56[4JmY@MrMpY4DseP8g7gNMBy1",
"$'bc6@1cv:_,3.{C%fUN$C)ut8MG<g_~JR1aOG6d-%/>w8VA4{GMyLLIk%2>_+9rOFM^84o+CMM|SsW^8WM|dzYqDH&bqh%E",
"^i%td^.$V$$V'Oqpb5EQ]4.`SL+Jfl}E{,1)gn:! 9,Q<|A_He4Z+[:XC$z2dr9WfQmN'}8o;Ke! v4'.uG}X2]oJ(<n@6I%",
"LY,<'ZO`A/z}mf3LN_9~E:CawZ2fon[`@p@Y6hyF8c`dq/!Na8KYx)#1e:)Ii(=089<5lon{[i/,45v_29 )M9{;1(GvuN=^",
"le`B#A[vw_I(xj8H!O$g}bpR/iZGbMKoXQ9nQEg430WgfZDHxnsW,(f|VK`}gguT%+8.X/duHS.:5 iRp9e>T02n/aHroO}F",
"ceWd-6h8nqq.ai:vkV&%W2CjCdFB9BlI8sf0|Ot=)[!'6Bqn,YMTu-yQG}h;p<%i,_zCr)Q2tg`|=_WM3.!)ESnK%:s V1Rp",
"E|kGFF9&PMu2V,%h5m &<l}jR_9qgq(NgZ9cQRF~(Q$JI'YVEal^skF}BkX..&D:L{WNQKtvsp-0OBIc}fFd%jf%S]n&uhDs",
"F49}w1@wS/wW _!l|GRvE!D>AqE6n}n;VQy6_;-(Rmg3wbl:$za4DisMHav%#SE{P('[gO0fRmvA@!Jq%;duAp3XY~2c-w8;",
" z+T,)QABSL_MUUaLGX+A3tD.qd1sncOdFsXO-a<MS7UDdQ50nDVE#oNbFB'[7N2SY=zKWHYB&B#}Rw,g!: D2],>Y2NAr@3",
"U9l:s,{/7VIY2{6IRTvw,[LfYeUw$pnpjJgXN_Rb%Y;^r}MTYdSVP5g~)(!O=wvkd%S+taeQcxG>Q%vHRf;xgr9:Yuf8+:_J",
" !EPc>8^q'O502}]7^E}[Bq0bIcf.(vRO$yG~!)xMv56_m2:/l+Xl1W`:(KjM-/:ABN' eiik2.t2Kp5X2/nLdk`E3kK+)Ur",
"+R8Xeua#MCZ5;msrA>ETwg/2vvBNw'ej=I4a46._4DEU@0yz@x]!EA1k;>qdu-5Xz9VJz+'AiN:r4'O5(6yHCAEwb|#=/-}D",
"oW[,SOL,!Vm;DBNkyC`{vlfj6=WH|g!}tcuq'Uhb&5/G&EsG`o7!DA7%MG}X9rR//nhJ<3RsOPOh^#=4;a9S:&E%:X^`{jMD",
"Wg1WB6nAUK ecTt]0sZuU+<6{Na5f7L;tQ9[_K<X0NR|mcK-$_]SA6F-bZ74L})Oy{7'5j&p>JmyB5i2^q=fu}fqy-IMI]wg",
"E;|],oKB_1;q2`A@T5RiiNBU75kw_:@t}Ra:v7lD}vyY`W_ 0xK-]/]=^spWI35[G+w.rqLGgVma|R()Ic)lsYhN8v1_4BJ0",
"U$YP4/9[SUMGqEv]mxS~FX-FS6IwTR}p#h!fn24uq#^@Z'oPS7wavU2_s+#BU`sAr-ftW2w$IA&^Vtu}zH^%syYRxpwMf#nh",
"z3+3/yda5%GLG//A)q>SgFG+,!5xKrDuAAT$|qa_Hzp[s) c}SjAJ-Us9qIiD5D1k jVH2(!dV7zLLrsTYQ,1]%aP|B+D/h5",
"!b_zH%@3M)W])`bdy,|pzeL(8v2$F]/H H@D-Opc,UnsaG$Wv:<GIYo9c!!N;VY4+k38<&,Q127;5yjWQ<UnPk%'qT!}_cAe",
"9q4aj,Tzm[jAVT:r-T:BAx]BvR<tvzIlT[2e_7qJz)hH:DtnyxtF(U[j]i$B$=sPTn)9f/|R$_Vm92W]z`T{AYNHjw@&gNmZ",
":}]FR]!P#,{'PE1vE%|2+(U<yx[HC|!{toCs:NTV0|46b1/Ro)@Rlp2T}8.8La&G=ysFY@Z:=s<]<]p`$~6t%XaxD<LcpLgv",
"&9wG/eB}/l$|nKl7+lU|}!MS98f+Rh>{7a}M(`fxV-aDHe|2p1$^XTV5^)tq&hPvA~Ep13tSH ]4dkM4y%rO_$OTT&=T$yvl",
"e}OA{eX7@Vg]rjHxZ:N+&fuK h:42W<'n|uA;wvG=pK-1-sJYi8cmqh%Jz'o`w_w7mlv^HSY&6qeVACrX.78W'L-h0fWKNnq",
"R.A<s{];8:MOfz=ujuQ[urnCck7isqOUF>x=E:[=QF8% 8>~!]pO8uKJY'l:cg(:isHex&]/,z^{S#I)3d}#f=w,B&{:9^(k",
")_`VW5,7!iS_KaK^mSby`O)S<I|ITewg:Ff,K37q!RjKOUwXD:=Q40+ER5f>:Jr/+^!^AHRI-ZT,l<oP)6,wy6SQh>KpI|$W",
"9i]K$sLl_nW~PRAOtJ:mR==Hskc{mB-$q.D4vzb]%u#cM7Pm(|f1hA4XQH&D-M ::G[)Wc'h[h,]6nRew6$0-pQEbK=oEDg:",
"X&Ez4r94tJaK.[wJOzc.dGiT:}CiX0cK5'b'O~JMo:-PGXZ%5pQzY8>}u~v=kW4+OhRioLI|b 10wqF,.sI3}]z5jZ[cfStz",
"[$n,&C!,}Y8J5dVK8Y)4AB@H<I/FG[)Hs4K3!;jj,rx6/Y`-@g/i];FsalTF0qMO{Ur0N>GQ:Lde0%{p(3LRQ-|`')r)fxIf",
"{lb/WbeT-dP-pgB@_z9r.Z:)M-}R]ztcBul:f`a|; o_8~[l{bQAwGyg[`!9 XeD4}e;CtR>{5+PbJ0F)3{<wqOc$4DTQ(5)",
"dc:f6 HG%N#l7<JND`3T^@C3ngZMzC2Blkxtfa-yzL$)cmN{mEICrP3|6F(|Qsgz]3Q;@m0GieF-JLN#o{%OrcS/o0Q]H3Ca",
"MBLgxAE- <gSa3=gB{,0gA0q3pjdMI )V&Kn1X5ifKe>d%c^(of2tf7NfGPdOBT02+Br[zE)3':;r z[Wu)2^wG4RGwHc,MF",
"8VhBR/5'4ROgdG^/Qqm}mYgGlIAfA'a#9^0h/2Z| epH#v`YKnRS2L>G'bgNGTxmdd89)a`AR1v 1`ENd uG;7[7SLip$3;[",
"=2wO$DZQ]w,1sg'1aW,'h3`N{Z`NN'fYVuxQmXd[wQ U}iUfN2gAwZzSEH>zYIXKHP4>qBWDC fzgqwH;JR@,W^(Di<YGNf:",
"2d;bQLYQ0e]o/DZyXdF&9{]:EjHR0O.|D%[GtVb[W=C4v1V_bKtfhfZ_4M%D m]gy#`mcsc6%Ny,)~|L#{t&9&vzZ3{Cp%gg",
"myrOq3[;_2!:L<90!1E/#vQj4(PIz<K5J H t{vWTLT-SMQrsl_gDD<iX#kDM.p dCQ304IQ6r79wS0 abAkmV-|yZ}#mClN",
"0o^`%b=DnsGcX/'v[5MY%;fPny%~Hl69yq6p+hyYzZJ6d$Wr]NC#_h@Q:Ua!U$prtuls)B75EUMTcE^o/:/QHjRXV4^iL_^l",
"Nji#DiHB0P1XX]okw;_L4|`zL y@LNa0$~BHV{xOxQ((gzX|95N7]j6nz8v|''RF-F7zkZ>Y0Q_>RDr~W(8Q1A`VCx<c'F@S",
".rRDr0xExY)SjhGp5t,U!k]3b}3ZYiij(Lw{d~XTg/4lqYx3c_s2rac~H6CHvWo1H8_fOD]:ss8f_gmtwNx+0N6X2<^@Hwb[",
"32.;e9}-m6v}/c/`3JdjLNN7ulHZ@FWzFn)57l>mlVcbaMI/p^axGFP>OuEp$PLK2Ks|PKo)Nhb'xR)z4<E!F<w7 n!{7H!;",
"[sx(REi<R'HQc1>~ag#C#}<f/7mw:pmL;$o7t8frh]0I/A`d1sQSEdOBWM%8dDHhS=BXLQq`EtyM]f;STO3-+ctz6!vwcTbj",
"2e'Tq+nig+[h^UGme)Opzs!v7G;&{jYM3 ]7 SntZMy+[mPv6-ZB:MymdyD>f%qO6/6mE/z.NMD`0~-~[ xrX&r>M/ IJ!J#",
".ooW,+iFjlVLBCQ={szriOYwh>d4.5Ad5csJLQnb-nty8Z$P#$icu0sdnJajg(Xw$u/C7@XyG&:;A4gctKGEl17q!xjE'/fU",
"Z.Oef 7.^ILis<=>_{Bsh}oL%:`vhqIVzt[<9FbOg9=PLIw1TcNSI:NXa6uVeQlIg$z>$$5sCd00_F!5R(,P1-wH_s;R4:Db",
"dRgGHM<<S5&M`klboA/Mt)Gek e/Z6hR5yl0BI@UA~:^8lDBD)l+At5##GTd:wk,AM}9N.f=YPba,o[AdO_s!UUop!7ff1n2",
"<W]Ee^Sv|^ONu@9SXBVA4DC{ghC;dn}@U$9isKjLyhhc).%]XAYI|_#5FzA0[`1rI]5E7&IysN]v]yMvJ$BG:o$0(^!mr^c=",
"`vH 8Y{`>;C<w,G`v%&.K`3_&`9CYwYmRL;V7h_p,`D2pD6[HK0K,6nAFMR:1EpE4Uh1ehh/pU:;,a)rGEq3n5KVGH2b.3MX",
"j/UEKg9Yse2&a,!5/$f[.^uX#=b!<$'oLJm[iU}}LC<lY5(MU`{VV/n)@>,{:jNEP+s/{yQ2.$xO uxSDS]:EVX(8npx7+>c",
"n>cgR&OZ59o/q.6t&dCW+Aj8e%vF<ZuT F,Tc.3H4mSmJ3AaAyCG{hS{V67f]x'<Ci.O4jwcitB$xuMr[.w(f 0 %RK(j7cX",
"$<o3jixoO<V6iq`iv-!NI@P-GeCUKU,kbmt_Vsb_r ejsj-/T_Rn2Te5`;+H7)h&oT]-5x;&#sEwT@]tm{(gniz7lvojcu9s",
";Xr^2caVEB.0lA-52d&{,3RR7ZBe:R{OK=N/{rcx3V!bD[#']+wH}uDcTtTMn-1',Q_~zfG1wz6K.l8q&<|H# KA$y=.m/1D",
"u2eb_HD.W]+b`{z>n#&:L=b!@pDVCHJGRpJZqd}dEk$8AK]SYX8gruleq PpY--WSp<kx{ST60oYVrn`}jt02KQBvCy7:P7q",
"Q; ,=HxyCj]kERh#]L1f}s{&A|PC}!yhA2-71'p Yt1 I|LZwV rr_A')=;[Ox { o7{<wm3{bqdPYzQbiFPq{g#zwgrt5IC",
"7t/{:+[L.[K}^ylSkKwNyQN x V}yE!d&$q-V1&z=,`:/OjnYM;2.)/=F(ocnj@n,ST$}q}crL7nC[5F'DF0@vrl8UsyX:}s",
")0O-S>lkfNsZ9/PZqlc3V9nP%`d8/+}C97wK2!kWU!TH>^%{NYtge_&m(2G&Jl)SuHY5@&h%hE(BTD<`jAxG(.`2=t;.ez(3",
"fw{sD<>^n=;Dbo,+WL^Z0FDw9g+ANtAYpCjc YPQ)Zlg5p(DTmyUTV/2:0<J30P~ZkW9G|-^&)IE)E}Q$YkPiuUU0H0'5#lA",
"0](5hRSY(,.58_DW5iiJI.1xE/i0^rbdu0Lc8:1w#bk#5G0az57nmh`6A$V6OmA3!UOJhMDYE|s6Mg.o<fOJ<io861[xwV'h",
"(98-)rbmr_Y]Gk;p3L(E(h}{b#_lXFHZ$F&'q=d|U`E{IRm4Nv)MzNH-5cm_jD,+:.bKUMw>ZjnPg`ikF!u!zGb|}tHF'52S",
"hP}9[cPk+k/M%tiV3K{f/&I=Ri18Q)%r(~sla^Ult;3JFPy7V.pmunc%L-3td =k8)!^8gV-n3e+k @R9!%m#pCf7Xo@,!&6",
"X/g{]e,7OZ5qb{b:P8I6l>AzU{HI:Bd#Xe T>|cST(Cb1CO7z;^.(hO+WJo b3L1K{}_ZD|@O<L65xwB-T5L=jrt{axPr0=0",
"9|]<o@lEd:!jDyqf4/L!t>AG/#A}ctJe`6 -;4_<=8B@Kx_3;`aQm>wFkAG)1RYHlvK%L<@R3W&mp-zyxl7>iK.H&RN[3D;i",
"7{|vF Z+ dT60sP)iJEYg}%.oUem!kX;RTyVd{7Q cW;stSC#&$fiSSsPEb5hRS`Sfbmq-3Y45P|+eB]9'r&-oXYk#kiS<hQ",
"PyyCutSl[:N06JQP9lVLAekzny:pc8z9 /(])lD;`c',osdU<W:ikqY&NU9QLWl6io1w0]z0'7JT91>'=98u'AA}Kha1aq2~",
"$'r_%rt7Lx= `ITRy|Y6P=CvbKx84{TiYtbeF|yZ7`(30--jqQuA;+@`K[@x0H0`+B^u~!Ytjz(a}] )++lGj-ly4ee9is}X",
"-(#24D;:wt;5Ad/S_PeVbs/0>u+1hmnhx{&#,pTCJ0T}zWi'p!c<9j_a2w&eAdd}5Z$3SN:mYjx]tGPaSMTDWTv_wZgoj046",
"vz@$Pu^aKlDrjVX{D2Dkd$c}-hazjf0+g=(]rl<]=KB,sas$,px/2H%CT.05#9w#|zaXs-5[kdX'&fLHyJkx[}$VPJxU8~>+",
"9C!7D_Q8b3^!e-hQGg`BKp#oHLt./.uO[&F'6u,D&g];bhCw>mzR`vf/6tC}nYb,5oRui(@nE}KSQYf-`9!1:7A&G_WAPTzF",
"X09Bck;QMi`[r;HNsl50jvN(rjB~:fV`C|Yk|`o}@)kx>z'a;{gQ2lF%H[tJAl|r23 p ]i=TYgLjx1grakk,= U!X5Mq3/6",
"H:smg}Xy49}=/2`}{HGcsPgd1~MUrDyIe;_CXaVdPBho@oA4Te'0x_`bbg07ALRAW!8BXno`(hzN-B@mXUsud6_ON7tBjd=<",
"yF`R6pk^|g9067_^4rGP5G%XlkCEvA'4=<N:[uYqeW5(EUi4aW>w<AZx0>(LM`@0o(]gj&P}YC4+T.atI7oarl}u4}FsqI3o",
" gjfruZol4k&F+gBEDS+mpr8Z,)&h-GnRAg5sr1ZUFJsZ`n<gu6P9~;mDT0.>:{`5a-{ik7-=5,XlWpT%g]=[}f~m<evw}zg",
"MCd8n3<@6xB.z4==[m`0.IX&|_7+ z/pQ!sX8AK#(Ibx$|/+>7;zOlU.`&:0z%qG'.6>YnxORY<CW]BdKLs%`V,zNLEZhhc%",
"^8/RP:Zu`gXUR>i|l491A(>Pjr,eG!+Gv;;!g+FMfi.-sjeuE; iBa`^CwA>SJ+)xM%a/;MH!@z[3vNVg!!ks4[]!B+[GI-g",
"06[-g{FaCD12_Wz;Xt`'pqjd>!dl6DR3Fc'J^)UtJivb0Hdav][8je{+gCsefB;'l}KMA+a=uHwXsI9{26$,Zi'VrgM8KRCo",
"pZUmK~k#&5S'D4Alxp:^!QqV)d=9UD[6WtP&eqUPh>S0omU-27 R2Li@d7GbX q`_KW'D=^x&0Q'P&_:caqfz`ql&t8NH4FH",
"P_P&T_]cZV_YhK2b vE8[<N05/!`T5kBH#W>G)XwItY/5Xm2=K>o$}w[RwmDE3}!S3Eawc]#LQeD+;-=V[yHcs1~pUG_95y{",
">PDL^j><JAW$G@JHn_9SULaI>qLGW>`aNU(~x9T_)$Wb8'JkpOLd62G}#VSBbK5}m&+7--ve]Xep4SJPPxaku8lg=J|HNm:!",
"jSL{Xko7Q;^+AyTMEyHtcu]`!X  >UZP>!H(Oe(]OJKI7!5wT6jm 2D)+8RER^/<'P(~!;)i@)27PA]qwkFP.FSWt=fG`Tg>",
"9,S4^koAoy#sj=dHo2rg_2hj{0>|m$0cG],],p_8OFAIkA+'NYSl[MK5TsmOMu.{]<>)^t0/!.LdvP+V/LLwA,2X3O/XFR9@",
"m+_t7q    "};
/* END tables made by tests/unicode_tables.py */

typedef struct llm__unpacker { /* binary range decoder for these tables */
    const char *const *line, *at; /* the next characters: two hold 13 bits */
    uint64_t range, code;    /* code < range */
    uint16_t odds[37][128];  /* probability of a 0 bit in 1/2048, by column and context */
} llm__unpacker;

static void llm__refill(llm__unpacker *p) {
    uint64_t digit = 0;
    if (!*p->at) p->at = *++p->line;
    for (int i = 0; i < 2; i++) { /* base 91: without four characters that tools may misread */
        int c = *p->at++;
        digit = digit * 91 +
                (uint64_t)(c - ' ' - (c > '"') - (c > '*') - (c > '?') - (c > '\\'));
    }
    p->code = p->code << 13 | digit;
}

static uint32_t llm__unpack_bit(llm__unpacker *p, uint16_t *odds) {
    uint64_t bound = (p->range >> 11) * *odds;
    bool bit = p->code >= bound;
    if (bit) p->code -= bound;
    p->range = bit ? p->range - bound : bound;
    *odds = (uint16_t)(bit ? *odds - (*odds >> 4) : *odds + ((2048 - *odds) >> 4));
    for (; p->range < 1u << 26; p->range <<= 13) llm__refill(p);
    return bit;
}

/* Decode a number of this column: its length in bits, then the bits after its leading 1. */
static uint32_t llm__unpack(llm__unpacker *p, uint32_t column) {
    uint16_t *odds = p->odds[column];
    uint32_t length = 1, n;
    while (length < 32) length = 2 * length + llm__unpack_bit(p, &odds[length]);
    n = (length -= 32) > 0;
    for (uint32_t i = 1; i < length; i++)
        n = 2 * n +
            llm__unpack_bit(p, i < 3 ? &odds[32 + 4 * length + n] : &p->odds[0][length - i]);
    return n;
}

static uint32_t llm__unzigzag(uint32_t n) { return n % 2 ? ~(n / 2) : n / 2; }

enum { LLM__N_CATEGORIES = 13 };
static const char *const llm__categories[] = {"C", "Lu", "Ll", "Lt", "Lm", "Lo", "M",
                                              "Nd", "N", "Pc", "P", "S", "Z"};

typedef struct llm__unicode {            /* the first two tables, decoded */
    llm__unpacker rest;                  /* decoder for the other tables */
    uint32_t ends[LLM__N_RUNS];          /* first code point after each run of one category */
    uint8_t categories[LLM__N_RUNS];     /* index in llm__categories of each run */
    uint32_t folds[LLM__N_FOLDS][2];     /* code point and its simple case folding */
} llm__unicode;

static llm__unicode *llm__unicode_create(llm_error *err) {
    llm__unicode *u = (llm__unicode *)llm__new(1, sizeof *u, "the tables of Unicode", err);
    if (!u) return NULL;
    llm__unpacker *p = &u->rest;
    p->line = llm__unicode_tables;
    p->at = *p->line;
    p->range = ((uint64_t)1 << 39) - 1;
    for (int i = 0; i < 3; i++) llm__refill(p);
    for (int i = 0; i < 37 * 128; i++) p->odds[i / 128][i % 128] = 1024;
    uint32_t c = 0, category = 0;
    for (int i = 0; i < LLM__N_RUNS; i++) {
        u->categories[i] = (uint8_t)(category = llm__unpack(p, 1 + category));
        u->ends[i] = c += llm__unpack(p, 14 + category);
    }
    c = 0;
    for (int i = 0; i < LLM__N_FOLDS; i++) {
        u->folds[i][0] = c += llm__unpack(p, 27);
        u->folds[i][1] = c + llm__unzigzag(llm__unpack(p, 28));
    }
    return u;
}

/* How many of n sorted values, `step` apart in memory, are at most c. */
static int llm__rank(const uint32_t *values, int n, int step, uint32_t c) {
    int low = 0, high = n;
    while (low < high) {
        int middle = (low + high) / 2;
        if (values[middle * step] <= c) low = middle + 1;
        else high = middle;
    }
    return low;
}

static uint32_t llm__fold(const llm__unicode *u, uint32_t c) {
    int i = llm__rank(u->folds[0], LLM__N_FOLDS, 2, c) - 1;
    return i >= 0 && u->folds[i][0] == c ? u->folds[i][1] : c;
}

/* The lower case of c: an upper-case character's folding, except for Cherokee, which folds up. */
static uint32_t llm__lower_case(const llm__unicode *u, uint32_t c) {
    int category = u->categories[llm__rank(u->ends, LLM__N_RUNS, 1, c)];
    if (c >= 0x13A0 && c < 0x13F6) return c < 0x13F0 ? c + 0x97D0 : c + 8;
    return category == 1 || category == 3 || (c >= 0x2160 && c < 0x2170) ||
                   (c >= 0x24B6 && c < 0x24D0)
               ? llm__fold(u, c) : c;
}

/* Does c have the Unicode property White_Space? */
static bool llm__is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

/* ---- Regular expressions ----
 * They split text into words. Syntax and semantics are Oniguruma's, as in Hugging Face's library,
 * without look-behind and back-references. An expression is compiled to a list of nodes. The
 * matcher takes the first path that matches and keeps the alternatives in a list of frames. Its
 * steps are bounded: a text takes linear time, or fails. */

typedef struct llm__set { /* a set of characters; LLM__UTF8_INVALID represents any invalid byte */
    struct llm__set *next; /* next set of the same expression */
    uint64_t bits[LLM__UTF8_INVALID / 64 + 1];
} llm__set;

enum { /* kinds of nodes; offsets are relative to the node */
    LLM__NODE_RUN,    /* a to b characters of a set, as many as possible */
    LLM__NODE_EITHER, /* go on at offset a or, if that fails, at b */
    LLM__NODE_JUMP,   /* go on at offset a */
    LLM__NODE_AHEAD, LLM__NODE_NOT_AHEAD, LLM__NODE_ATOMIC, /* match up to MATCH, then go on at a */
    LLM__NODE_MATCH,
    LLM__NODE_BEGIN, LLM__NODE_END, LLM__NODE_LAST, LLM__NODE_LINE_BEGIN, LLM__NODE_LINE_END,
    LLM__NODE_BORDER  /* \A \z \Z ^ $ \b */
};
enum { LLM__NODES_MOST = 20000, LLM__SETS_MOST = 200, LLM__DEPTH_MOST = 100 };

typedef struct llm__node {
    int32_t kind, a, b;  /* LLM__NODE_*; offsets, or least and most characters of a run */
    const llm__set *set; /* of RUN and BORDER; NULL: the characters in codes */
    uint32_t codes[4];   /* a character, and those with the same case folding */
} llm__node;

typedef struct llm__expression {
    llm_string source;
    llm__node *nodes;    /* (n_nodes) */
    int64_t n_nodes, capacity;
    llm__set *sets;      /* linked list */
} llm__expression;

typedef struct llm__compiler {
    const uint8_t *at, *end; /* source not parsed yet */
    llm__expression *e;
    const llm__unicode *u;
    const char *name;        /* path of the file, for errors */
    bool folds, failed;      /* folds: inside of (?i) */
    int depth, n_sets;
    llm_error *err;
    llm__node scrap;         /* what a failing llm__insert returns */
} llm__compiler;

static void llm__bad_expression(llm__compiler *c) {
    llm_string rest = {(const char *)c->at, (size_t)(c->end - c->at)};
    if (!c->failed)
        llm__fail(c->err, LLM_ERROR_UNSUPPORTED,
                  "%s: the regular expression '%s' is not supported, at or before '%s'", c->name,
                  llm__show(c->e->source).text, llm__show(rest).text);
    c->failed = true;
}

static bool llm__has(const llm__set *set, uint32_t c) { return set->bits[c / 64] >> c % 64 & 1; }

static void llm__include(llm__set *set, uint32_t first, uint32_t last) {
    for (uint32_t c = first; c <= last; c++)
        if (c % 64 == 0 && last - c >= 63) set->bits[c / 64] = UINT64_MAX, c += 63;
        else set->bits[c / 64] |= (uint64_t)1 << c % 64;
}

/* Include the part or, if `others`, its complement. */
static void llm__join_set(llm__set *set, const llm__set *part, bool others) {
    for (size_t i = 0; part && i < sizeof set->bits / 8; i++)
        set->bits[i] |= others ? ~part->bits[i] : part->bits[i];
}

static llm__set *llm__new_set(llm__compiler *c) {
    llm__set *set = (llm__set *)llm__new(1, sizeof *set, "a set of characters", c->err);
    if (!set) return c->failed = true, set;
    if (c->n_sets++ == LLM__SETS_MOST) llm__bad_expression(c);
    set->next = c->e->sets;
    return c->e->sets = set;
}

static void llm__drop_set(llm__compiler *c) {
    llm__set *set = c->e->sets;
    c->e->sets = set->next;
    c->n_sets--;
    LLM_FREE(set);
}

/* Add a node before the one at index `at`. Nodes that move keep their offsets to each other. */
static llm__node *llm__insert(llm__compiler *c, int64_t at, int kind) {
    llm__expression *e = c->e;
    if (e->n_nodes == LLM__NODES_MOST) llm__bad_expression(c);
    c->failed |= !llm__grow(&e->nodes, e->n_nodes, &e->capacity, sizeof *e->nodes,
                            "a regular expression", c->err);
    if (c->failed) return &c->scrap;
    llm__node *node = e->nodes + at;
    memmove(node + 1, node, (size_t)(e->n_nodes++ - at) * sizeof *node);
    memset(node, 0, sizeof *node);
    node->kind = kind;
    return node;
}

static llm__node *llm__emit_node(llm__compiler *c, int kind) {
    return llm__insert(c, c->e->n_nodes, kind);
}

/* The value of a digit or letter in base 36; -1: it is neither. */
static int llm__digit(uint32_t c) {
    if (c >= '0' && c <= '9') return (int)c - '0';
    return (c | 0x20) >= 'a' && (c | 0x20) <= 'z' ? (int)(c | 0x20) - 'a' + 10 : -1;
}

static bool llm__take(llm__compiler *c, const char *text) {
    size_t n = strlen(text);
    if ((size_t)(c->end - c->at) < n || memcmp(c->at, text, n)) return false;
    return c->at += n, true;
}

static uint32_t llm__take_char(llm__compiler *c) {
    uint32_t code = LLM__UTF8_INVALID;
    if (c->at < c->end) c->at += llm__utf8(c->at, (size_t)(c->end - c->at), &code);
    if (code >= LLM__UTF8_INVALID) return llm__bad_expression(c), 0u;
    return code;
}

/* Read up to `most` digits; -1: there are none. */
static int32_t llm__take_number(llm__compiler *c, int base, int most) {
    int32_t n = -1;
    for (; most-- && c->at < c->end; c->at++) {
        int digit = llm__digit(*c->at);
        if (digit < 0 || digit >= base) break;
        n = (n < 0 ? 0 : n) * base + digit;
    }
    return n;
}

static llm__set *llm__parse_class(llm__compiler *c);

/* Include the class \s, \d, \w or \p{name} or, if negated, its complement. */
static void llm__include_name(llm__compiler *c, llm__set *set, llm_string name, bool negated) {
    static const char *const classes[][2] = {
        {"s", "\t-\r \\x85\u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000]"},
        {"d", "\\p{Nd}]"},
        {"o", "\\w\u00B2\u00B3\u00B9\u00BC-\u00BE]"}, /* \w outside of a class */
        {"w", "\\p{L}\\p{M}\\p{Nd}\\p{Pc}\u16EE-\u16F0\u2160-\u2182\u2185-\u2188\u24B6-\u24E9"
              "\u3007\u3021-\u3029\u3038-\u303A\uA6E6-\uA6EF\U00010140-\U00010174\U00010341"
              "\U0001034A\U000103D1-\U000103D5\U00012400-\U0001246E\U0001F130-\U0001F149"
              "\U0001F150-\U0001F169\U0001F170-\U0001F189]"},
        {"Han", "\u2E80-\u2E99\u2E9B-\u2EF3\u2F00-\u2FD5\u3005\u3007\u3021-\u3029\u3038-\u303B"
                "\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFA6D\uFA70-\uFAD9\U00016FE2\U00016FE3"
                "\U00016FF0\U00016FF1\U00020000-\U0002A6DF\U0002A700-\U0002B739\U0002B740-"
                "\U0002B81D\U0002B820-\U0002CEA1\U0002CEB0-\U0002EBE0\U0002EBF0-\U0002EE5D"
                "\U0002F800-\U0002FA1D\U00030000-\U0003134A\U00031350-\U000323AF]"}};
    uint32_t mask = 0;
    llm__set *part = NULL;
    for (int i = 0; i < 5 && !part; i++) {
        if (!llm__is_text(name, classes[i][0])) continue;
        llm__compiler inner = *c;
        inner.at = (const uint8_t *)classes[i][1];
        inner.end = inner.at + strlen(classes[i][1]);
        part = llm__parse_class(&inner);
        c->failed |= inner.failed;
        c->n_sets = inner.n_sets;
    }
    for (uint32_t i = 0; name.length && i < LLM__N_CATEGORIES; i++)
        if (!strncmp(llm__categories[i], name.data, name.length)) mask |= 1u << i;
    if (!part && !mask) llm__bad_expression(c);
    if (!part) part = llm__new_set(c);
    for (uint32_t i = 0, begin = 0; part && mask && i < LLM__N_RUNS; begin = c->u->ends[i++])
        if (mask >> c->u->categories[i] & 1) llm__include(part, begin, c->u->ends[i] - 1);
    llm__join_set(set, part, negated);
    if (part) llm__drop_set(c);
}

/* Parse what follows a backslash: return a character, or include a class in the set. */
static uint32_t llm__parse_escape(llm__compiler *c, llm__set *set, bool in_class) {
    static const char letters[] = "nrtfvae", codes[] = "\n\r\t\f\v\a\x1B";
    llm_string name = {(const char *)c->at, 1};
    char lower;
    uint32_t letter = llm__take_char(c);
    const char *known = letter && letter < 0x80 ? strchr(letters, (int)letter) : NULL;
    if (known) return (uint32_t)codes[known - letters];
    if (letter >= 0x80 || llm__digit(letter) < 0) return letter;
    lower = (char)(letter | 0x20);
    if (lower == 's' || lower == 'd' || lower == 'w' || (lower == 'p' && llm__take(c, "{"))) {
        bool negated = (letter < 'a') != (lower == 'p' && llm__take(c, "^"));
        const void *end = lower == 'p' ? memchr(c->at, '}', (size_t)(c->end - c->at)) : NULL;
        name.data = end ? (const char *)c->at : &lower;
        name.length = end ? (size_t)((const uint8_t *)end - c->at) : 1;
        if (lower == 'w' && !in_class) lower = 'o';
        llm__include_name(c, set, name, negated);
        if (end) c->at = (const uint8_t *)end + 1;
        return LLM__UTF8_INVALID;
    }
    bool braces = letter == 'x' && llm__take(c, "{");
    int32_t code = llm__take_number(c, letter == 'x' || letter == 'u' ? 16 : 0,
                                    letter == 'u' ? 4 : braces ? 6 : 2);
    if (code < 0 || code >= LLM__UTF8_INVALID || (braces && !llm__take(c, "}")))
        return llm__bad_expression(c), 0u;
    return (uint32_t)code;
}

/* Parse a class, after its "[": the union of items and nested classes; && intersects. */
static llm__set *llm__parse_class(llm__compiler *c) {
    llm__set *all = llm__new_set(c), *part = llm__new_set(c);
    bool negated = llm__take(c, "^"), more = true;
    if (++c->depth > LLM__DEPTH_MOST) llm__bad_expression(c);
    if (c->failed) return NULL;
    llm__join_set(all, part, true);
    for (bool begins = true; more && !c->failed; begins = false) {
        more = begins || !llm__take(c, "]");
        if (!more || llm__take(c, "&&")) {
            for (int k = 0; c->folds && k < 2; k++) /* add characters with the same folding */
                for (int i = 0; i < LLM__N_FOLDS; i++)
                    if (llm__has(part, c->u->folds[i][k]))
                        llm__include(part, c->u->folds[i][!k], c->u->folds[i][!k]);
            for (size_t i = 0; i < sizeof all->bits / 8; i++)
                all->bits[i] &= part->bits[i], part->bits[i] = 0;
            continue;
        }
        if (llm__take(c, "[")) {
            if (llm__take(c, ":")) llm__bad_expression(c);
            else {
                llm__join_set(part, llm__parse_class(c), false);
                if (!c->failed) llm__drop_set(c);
            }
            continue;
        }
        uint32_t first = llm__take_char(c), last;
        if (first == '\\') first = llm__parse_escape(c, part, true);
        if (first == LLM__UTF8_INVALID) continue;
        last = first;
        if (c->end - c->at > 1 && *c->at == '-' && c->at[1] != ']') {
            c->at++;
            last = llm__take_char(c);
            if (last == '\\') last = llm__parse_escape(c, part, true);
            if (last < first || last == LLM__UTF8_INVALID || last == '[') llm__bad_expression(c);
        }
        if (!c->failed) llm__include(part, first, last);
    }
    c->depth--;
    for (size_t i = 0; negated && i < sizeof all->bits / 8; i++) all->bits[i] = ~all->bits[i];
    if (c->failed) return NULL;
    llm__drop_set(c);
    return all;
}

/* The functions that follow parse a part and return whether it can match an empty text. */
static bool llm__parse_alternatives(llm__compiler *c);

/* Parse a group, after its "(". */
static bool llm__parse_group(llm__compiler *c) {
    static const char *const kinds[] = {"?=", "?!", "?>", "?:", "?i", "?-i", ""};
    int64_t start = c->e->n_nodes;
    int kind = 0;
    bool folds = c->folds, empty;
    while (!llm__take(c, kinds[kind])) kind++;
    bool option = kind == 4 || kind == 5, rest = false;
    if (option) c->folds = kind == 4;
    if (option && !llm__take(c, ":")) rest = true; /* for the rest of the group around it */
    if (rest && !llm__take(c, ")")) llm__bad_expression(c);
    if (kind == 6 && llm__take(c, "?")) llm__bad_expression(c);
    if (kind < 3) llm__emit_node(c, LLM__NODE_AHEAD + kind);
    empty = llm__parse_alternatives(c);
    c->folds = folds;
    if (!rest && !llm__take(c, ")")) llm__bad_expression(c);
    if (kind > 2) return empty;
    llm__emit_node(c, LLM__NODE_MATCH);
    if (!c->failed) c->e->nodes[start].a = (int32_t)(c->e->n_nodes - start);
    return empty || kind < 2;
}

static bool llm__parse_atom(llm__compiler *c) {
    static const char *const anchors[] = {"\\A", "\\z", "\\Z", "^", "$", "\\b"};
    llm__set *set = NULL;
    llm__node *node;
    for (int i = 0; i < 6; i++) {
        if (!llm__take(c, anchors[i])) continue;
        if (i == 5 && (set = llm__new_set(c)) != NULL)
            llm__include_name(c, set, llm__string("o"), false);
        llm__emit_node(c, LLM__NODE_BEGIN + i)->set = set;
        return true;
    }
    uint32_t code = llm__take_char(c);
    if (code == '(') return llm__parse_group(c);
    if (code == '*' || code == '+' || code == '?') llm__bad_expression(c);
    if (code == '[') set = llm__parse_class(c);
    else if (code == '.' || code == '\\') set = llm__new_set(c);
    if (set && code == '.') {
        llm__include(set, 0, '\n' - 1);
        llm__include(set, '\n' + 1, LLM__UTF8_INVALID);
    }
    if (set && code == '\\') code = llm__parse_escape(c, set, false);
    else if (set) code = LLM__UTF8_INVALID;
    if (set && code != LLM__UTF8_INVALID) {
        llm__drop_set(c);
        set = NULL;
    }
    node = llm__emit_node(c, LLM__NODE_RUN);
    node->a = node->b = 1;
    node->set = set;
    if (c->folds) code = llm__fold(c->u, code);
    for (int i = 0; i < 4; i++) node->codes[i] = code;
    for (int i = 0, n = 1; c->folds && i < LLM__N_FOLDS && n < 4; i++)
        if (c->u->folds[i][1] == code) node->codes[n++] = c->u->folds[i][0];
    return false;
}

/* Repeat the nodes from `start` on, least to most times; most < 0: without limit. */
static void llm__repeat(llm__compiler *c, int64_t start, int32_t least, int32_t most, bool lazy) {
    llm__node *body = c->e->nodes + start;
    int32_t n = (int32_t)(c->e->n_nodes - start);
    if (n == 1 && !lazy && body->kind == LLM__NODE_RUN && body->a == 1 && body->b == 1) {
        body->a = least;
        body->b = most < 0 ? INT32_MAX : most;
        return;
    }
    llm__node *copy = (llm__node *)llm__new((size_t)n, sizeof *copy, "an expression", c->err);
    c->failed |= !copy;
    if (copy) memcpy(copy, body, (size_t)n * sizeof *copy);
    c->e->n_nodes = start;
    for (int32_t i = 0; i < (most < 0 ? least + 1 : most) && !c->failed; i++) {
        int32_t skip = most < 0 ? n + 2 : (most - i) * (n + 1);
        if (i >= least) {
            llm__node *node = llm__emit_node(c, LLM__NODE_EITHER);
            node->a = lazy ? skip : 1;
            node->b = lazy ? 1 : skip;
        }
        for (int32_t k = 0; k < n && !c->failed; k++) *llm__emit_node(c, 0) = copy[k];
    }
    if (most < 0) llm__emit_node(c, LLM__NODE_JUMP)->a = -(n + 1);
    LLM_FREE(copy);
}

/* Read * + ? {2} {2,} {,2} {2,3}; false: there is none. *most < 0: without limit. */
static bool llm__parse_count(llm__compiler *c, int32_t *least, int32_t *most, bool *braces) {
    const uint8_t *before = c->at;
    *least = llm__take(c, "+");
    *most = *least || llm__take(c, "*") ? -1 : 1;
    *braces = *most == 1 && !llm__take(c, "?");
    if (!*braces) return true;
    if (!llm__take(c, "{")) return false;
    *least = *most = llm__take_number(c, 10, 5);
    if (llm__take(c, ",")) *most = llm__take_number(c, 10, 5);
    if (!llm__take(c, "}") || (*least < 0 && *most < 0)) return c->at = before, false; /* text */
    if (*least < 0) *least = 0;
    if (*most >= 0 && *most < *least) llm__bad_expression(c);
    return true;
}

static bool llm__parse_sequence(llm__compiler *c) {
    bool all_empty = true, braces;
    while (c->at < c->end && *c->at != '|' && *c->at != ')' && !c->failed) {
        int64_t start = c->e->n_nodes;
        int32_t least, most;
        bool empty = llm__parse_atom(c);
        while (!c->failed && llm__parse_count(c, &least, &most, &braces)) {
            bool lazy = llm__take(c, "?");
            if ((lazy && least == most) || (empty && most < 0)) llm__bad_expression(c);
            if (!c->failed) llm__repeat(c, start, least, most, lazy);
            if (!lazy && !braces && llm__take(c, "+")) { /* possessive */
                llm__emit_node(c, LLM__NODE_MATCH);
                int32_t skip = (int32_t)(c->e->n_nodes - start + 1);
                llm__insert(c, start, LLM__NODE_ATOMIC)->a = skip;
            }
            empty |= !least;
        }
        all_empty &= empty;
    }
    return all_empty;
}

static bool llm__parse_alternatives(llm__compiler *c) {
    int64_t start = c->e->n_nodes, jump;
    if (++c->depth > LLM__DEPTH_MOST) llm__bad_expression(c);
    bool empty = llm__parse_sequence(c);
    if (!c->failed && llm__take(c, "|")) {
        llm__insert(c, start, LLM__NODE_EITHER)->a = 1;
        llm__emit_node(c, LLM__NODE_JUMP);
        jump = c->e->n_nodes - 1;
        empty |= llm__parse_alternatives(c);
        if (!c->failed) {
            c->e->nodes[start].b = (int32_t)(jump + 1 - start);
            c->e->nodes[jump].a = (int32_t)(c->e->n_nodes - jump);
        }
    }
    c->depth--;
    return empty;
}

static void llm__expression_free(llm__expression *e) {
    if (!e) return;
    for (llm__set *set = e->sets, *next; set; set = next) {
        next = set->next;
        LLM_FREE(set);
    }
    LLM_FREE(e->nodes);
    LLM_FREE(e);
}

static llm__expression *llm__expression_create(const llm__unicode *u, llm_string source,
                                               const char *name, llm_error *err) {
    llm__expression *e = (llm__expression *)llm__new(1, sizeof *e, "a regular expression", err);
    if (!e) return NULL;
    llm__compiler c;
    memset(&c, 0, sizeof c);
    c.at = (const uint8_t *)source.data;
    c.end = c.at + source.length;
    c.e = e;
    c.u = u;
    c.name = name;
    c.err = err;
    e->source = source;
    llm__parse_alternatives(&c);
    if (c.at < c.end) llm__bad_expression(&c);
    llm__emit_node(&c, LLM__NODE_MATCH);
    if (!c.failed) return e;
    llm__expression_free(e);
    return NULL;
}

typedef struct llm__frame { /* an alternative, tried if the current path fails */
    int32_t node, at, low; /* where to resume; after a RUN, at each position from at down to low */
} llm__frame;

typedef struct llm__matcher {
    const llm__expression *e;
    const uint8_t *text;
    int32_t n;           /* bytes of text */
    int64_t steps;       /* left until the bound */
    llm__frame *frames;  /* (n_frames) */
    int64_t n_frames, capacity;
    const char *name;    /* path of the file, for errors */
    bool failed;         /* err has the reason */
    llm_error *err;
} llm__matcher;

/* Decode the character at `at` < n. An invalid byte is a character. */
static inline int32_t llm__next_char(const llm__matcher *m, int32_t at, uint32_t *c) {
    if ((*c = m->text[at]) < 0x80) return 1;
    size_t length = llm__utf8(m->text + at, (size_t)(m->n - at), c);
    return *c < LLM__UTF8_INVALID ? (int32_t)length : (*c = LLM__UTF8_INVALID, 1);
}

/* The start of the character before `at` > 0. */
static int32_t llm__char_before(const llm__matcher *m, int32_t at) {
    uint32_t c;
    for (int32_t k = 2; m->text[at - 1] >= 0x80 && k <= 4 && k <= at; k++)
        if (llm__next_char(m, at - k, &c) == k) return at - k;
    return at - 1;
}

static inline bool llm__accepts(const llm__node *node, uint32_t c) {
    if (node->set) return llm__has(node->set, c);
    return c == node->codes[0] || c == node->codes[1] || c == node->codes[2] || c == node->codes[3];
}

static void llm__push(llm__matcher *m, int64_t node, int32_t at, int32_t low) {
    llm__frame frame = {(int32_t)node, at, low};
    if (m->n_frames == m->capacity &&
        !llm__grow(&m->frames, m->n_frames, &m->capacity, sizeof *m->frames,
                   "matching a regular expression", m->err))
        m->failed = true;
    else m->frames[m->n_frames++] = frame;
}

static bool llm__anchored(const llm__matcher *m, const llm__node *node, int32_t at) {
    uint32_t c;
    bool before, last = at == m->n - 1 && m->text[at] == '\n';
    switch (node->kind) {
    case LLM__NODE_BEGIN: return !at;
    case LLM__NODE_END: return at == m->n;
    case LLM__NODE_LAST: return at == m->n || last;
    case LLM__NODE_LINE_BEGIN: return !at || (at < m->n && m->text[at - 1] == '\n');
    case LLM__NODE_LINE_END: return at == m->n || m->text[at] == '\n';
    default: /* BORDER */
        before = at && (llm__next_char(m, llm__char_before(m, at), &c), llm__accepts(node, c));
        return before != (at < m->n && (llm__next_char(m, at, &c), llm__accepts(node, c)));
    }
}

/* Match from this node on; returns the end of the match, -1: none (m->failed: an error). */
static int32_t llm__match(llm__matcher *m, int64_t node, int32_t at) {
    int64_t base = m->n_frames;
    for (;;) {
        const llm__node *x = &m->e->nodes[node++];
        bool ok = true;
        if (--m->steps < 0 && !m->failed)
            m->failed = !llm__fail(m->err, LLM_ERROR_UNSUPPORTED,
                                   "%s: the expression '%s' takes too many steps to split this "
                                   "text", m->name, llm__show(m->e->source).text);
        if (m->failed || x->kind == LLM__NODE_MATCH) return m->n_frames = base, m->failed ? -1 : at;
        if (x->kind == LLM__NODE_RUN) {
            int32_t low = at, count = 0, length;
            for (uint32_t c; count < x->b && at < m->n; at += length) {
                length = llm__next_char(m, at, &c);
                if (!llm__accepts(x, c)) break;
                if (++count == x->a) low = at + length;
            }
            m->steps -= count;
            ok = count >= x->a;
            if (ok && at > low) llm__push(m, node, at, low);
        } else if (x->kind == LLM__NODE_EITHER || x->kind == LLM__NODE_JUMP) {
            const llm__node *first = x + x->a;
            uint32_t c;
            bool either = x->kind == LLM__NODE_EITHER; /* the first way often fails at once */
            bool fails = either && first->kind == LLM__NODE_RUN && first->a > 0 &&
                         (at == m->n || (llm__next_char(m, at, &c), !llm__accepts(first, c)));
            if (either && !fails) llm__push(m, node + x->b - 1, at, -1);
            node += (fails ? x->b : x->a) - 1;
        } else if (x->kind < LLM__NODE_MATCH) {
            int32_t end = llm__match(m, node, at);
            ok = (end >= 0) != (x->kind == LLM__NODE_NOT_AHEAD);
            if (end >= 0 && x->kind == LLM__NODE_ATOMIC) at = end;
            node += x->a - 1;
        } else ok = llm__anchored(m, x, at);
        if (ok) continue;
        if (m->n_frames == base) return -1;
        llm__frame *f = &m->frames[m->n_frames - 1];
        node = f->node;
        at = f->low < 0 ? f->at : (f->at = llm__char_before(m, f->at));
        if (at <= f->low || f->low < 0) m->n_frames--;
    }
}

/* Find the first match at or after *begin. As in Oniguruma, an empty match right after the previous
 * one (which ended at `after`) does not count. */
static bool llm__find(llm__matcher *m, int32_t after, int32_t *begin, int32_t *end) {
    uint32_t c;
    for (;; *begin += llm__next_char(m, *begin, &c)) {
        *end = llm__match(m, 0, *begin);
        if (m->failed || (*end >= 0 && (*end > *begin || *begin != after))) return !m->failed;
        if (*begin == m->n) return false;
    }
}

/* ---- Normal forms C and KC ----
 * Some tokenizers convert text to NFC (Unicode Standard Annex 15): a letter and its accents become
 * one character where possible; the other accents are sorted. NFKC also replaces variants such as
 * full-width letters. A stable character never changes and never composes with the one before it.
 * So only unstable characters, and the stable one before them, are decomposed, sorted and
 * composed. */

enum { /* Korean syllables are composed by arithmetic */
    LLM__HANGUL = 0xAC00, LLM__HANGUL_L = 0x1100, LLM__HANGUL_V = 0x1161, LLM__HANGUL_T = 0x11A7,
    LLM__HANGUL_N_L = 19, LLM__HANGUL_N_V = 21, LLM__HANGUL_N_T = 28
};

typedef struct llm__decomposition {
    uint32_t whole, first, second; /* code points */
} llm__decomposition;

typedef struct llm__normalizer { /* the decoded tables */
    uint32_t wholes[LLM__N_DECOMPOSITIONS];  /* (n_wholes) what has one, sorted */
    uint16_t ends[LLM__N_DECOMPOSITIONS];    /* index after the last part of each */
    int n_wholes;
    uint32_t parts[LLM__N_DECOMPOSED];
    llm__decomposition together[LLM__N_DECOMPOSITIONS]; /* (n_together) pairs that compose */
    int n_together;
    uint32_t marks[2 * LLM__N_COMBINING];    /* start and end of each run of one combining class */
    uint8_t mark_classes[LLM__N_COMBINING];  /* combining class of each run */
    llm__set unstable;
} llm__normalizer;

static int llm__compare_together(const void *a, const void *b) {
    const llm__decomposition *x = (const llm__decomposition *)a, *y = (const llm__decomposition *)b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return (x->second > y->second) - (x->second < y->second);
}

static llm__normalizer *llm__normalizer_create(bool compatible, llm_error *err) {
    llm__unicode *u = llm__unicode_create(err);
    llm__normalizer *n = u ? (llm__normalizer *)llm__new(1, sizeof *n, "the tables of NFC", err)
                           : NULL;
    uint32_t c = 0, last[18] = {0}, n_parts = 0;
    for (int i = 0; n && i < LLM__N_COMBINING; i++) {
        n->marks[2 * i] = c += llm__unpack(&u->rest, 29);
        n->marks[2 * i + 1] = c += llm__unpack(&u->rest, 30);
        n->mark_classes[i] = (uint8_t)llm__unpack(&u->rest, 31);
        llm__include(&n->unstable, n->marks[2 * i], c - 1);
    }
    c = 0;
    for (int i = 0; n && i < LLM__N_DECOMPOSITIONS; i++) {
        c += llm__unpack(&u->rest, 32);
        uint32_t kind = llm__unpack(&u->rest, 33), count = kind / 3 + 1;
        for (uint32_t k = 0; k < count && k < 18; k++)
            last[k] += llm__unzigzag(llm__unpack(&u->rest, 34 + (k > 0)));
        if (kind % 3 == 2 && !compatible) continue;
        n->wholes[n->n_wholes] = c;
        memcpy(n->parts + n_parts, last, count * sizeof *last);
        n->ends[n->n_wholes++] = (uint16_t)(n_parts += count);
        bool composes = kind == 3; /* two parts, canonical, and NFC composes them */
        llm__decomposition d = {c, last[0], last[1]};
        if (composes) n->together[n->n_together++] = d;
        llm__include(&n->unstable, composes ? d.second : c, composes ? d.second : c);
    }
    LLM_FREE(u);
    if (!n) return NULL;
    for (int i = 0; i < n->n_together; i++) /* NFKC also changes what composes from unstable ones */
        if (llm__has(&n->unstable, n->together[i].first))
            llm__include(&n->unstable, n->together[i].whole, n->together[i].whole);
    llm__include(&n->unstable, LLM__HANGUL_V, LLM__HANGUL_V + LLM__HANGUL_N_V - 1);
    llm__include(&n->unstable, LLM__HANGUL_T + 1, LLM__HANGUL_T + LLM__HANGUL_N_T - 1);
    qsort(n->together, (size_t)n->n_together, sizeof *n->together, llm__compare_together);
    return n;
}

static bool llm__is_stable(const llm__normalizer *n, uint32_t c) {
    return c < 0x80 || c >= LLM__UTF8_INVALID || !llm__has(&n->unstable, c);
}

typedef struct llm__codes { /* characters to normalize */
    uint32_t *data;      /* (capacity) n entries, code point | class << 24; then scratch */
    int64_t n, capacity; /* capacity >= 2 n */
} llm__codes;

static bool llm__add_code(const llm__normalizer *n, llm__codes *codes, uint32_t c, llm_error *err) {
    if (!llm__grow(&codes->data, 2 * codes->n + 1, &codes->capacity, sizeof *codes->data,
                   "text in NFC", err))
        return false;
    int run = llm__rank(n->marks, 2 * LLM__N_COMBINING, 1, c);
    codes->data[codes->n++] = run & 1 ? c | (uint32_t)n->mark_classes[run / 2] << 24 : c;
    return true;
}

/* Append the decomposition of c. The parts may be decomposed again, a few levels deep. */
static bool llm__add_decomposed(const llm__normalizer *n, llm__codes *codes, uint32_t c,
                                llm_error *err) {
    uint32_t syllable = c - LLM__HANGUL, per_lead = LLM__HANGUL_N_V * LLM__HANGUL_N_T;
    if (syllable < LLM__HANGUL_N_L * per_lead) {
        uint32_t tail = syllable % LLM__HANGUL_N_T;
        return llm__add_code(n, codes, LLM__HANGUL_L + syllable / per_lead, err) &&
               llm__add_code(n, codes, LLM__HANGUL_V + syllable % per_lead / LLM__HANGUL_N_T,
                             err) &&
               (!tail || llm__add_code(n, codes, LLM__HANGUL_T + tail, err));
    }
    int i = llm__rank(n->wholes, n->n_wholes, 1, c) - 1;
    if (i < 0 || n->wholes[i] != c) return llm__add_code(n, codes, c, err);
    for (int k = i ? n->ends[i - 1] : 0; k < n->ends[i]; k++)
        if (!llm__add_decomposed(n, codes, n->parts[k], err)) return false;
    return true;
}

/* Sort each run of combining marks (class above 0) by class, stably. */
static void llm__sort_marks(llm__codes *codes) {
    uint32_t *data = codes->data, *room = data + codes->n;
    for (int64_t begin = 0, end; begin < codes->n; begin = end + 1) {
        int64_t counts[257] = {0};
        for (end = begin; end < codes->n && data[end] >> 24; end++) room[end - begin] = data[end];
        if (end - begin < 2) continue;
        for (int64_t i = 0; i < end - begin; i++) counts[(room[i] >> 24) + 1]++;
        for (int class_ = 0; class_ < 256; class_++) counts[class_ + 1] += counts[class_];
        for (int64_t i = 0; i < end - begin; i++) data[begin + counts[room[i] >> 24]++] = room[i];
    }
}

/* The character composed of first and second; 0: none. */
static uint32_t llm__composed(const llm__normalizer *n, uint32_t first, uint32_t second) {
    uint32_t lead = first - LLM__HANGUL_L, vowel = second - LLM__HANGUL_V,
             tail = second - LLM__HANGUL_T;
    if (lead < LLM__HANGUL_N_L && vowel < LLM__HANGUL_N_V)
        return LLM__HANGUL + (lead * LLM__HANGUL_N_V + vowel) * LLM__HANGUL_N_T;
    uint32_t syllable = first - LLM__HANGUL;
    if (syllable < LLM__HANGUL_N_L * LLM__HANGUL_N_V * LLM__HANGUL_N_T &&
        syllable % LLM__HANGUL_N_T == 0 && tail > 0 && tail < LLM__HANGUL_N_T)
        return first + tail;
    llm__decomposition wanted = {0, first, second};
    const llm__decomposition *found = (const llm__decomposition *)bsearch(
        &wanted, n->together, (size_t)n->n_together, sizeof wanted, llm__compare_together);
    return found ? found->whole : 0;
}

/* Compose each character with the last one of class 0 before it, if possible. A character between
 * them that has the same or a higher class prevents this. */
static void llm__compose(const llm__normalizer *n, llm__codes *codes) {
    int64_t starter = -1, kept = 0;
    uint32_t last = 0;
    for (int64_t i = 0; i < codes->n; i++) {
        uint32_t class_ = codes->data[i] >> 24, whole = 0;
        if (starter >= 0 && (!last || last < class_))
            whole = llm__composed(n, codes->data[starter], codes->data[i] & 0xFFFFFF);
        if (whole) {
            codes->data[starter] = whole;
            continue;
        }
        if (!class_) starter = kept;
        last = class_;
        codes->data[kept++] = codes->data[i];
    }
    codes->n = kept;
}

/* Append the text in NFC. Invalid UTF-8 is copied unchanged. */
static bool llm__normalize(const llm__normalizer *n, const uint8_t *text, size_t length,
                           llm__codes *codes, llm__bytes *out, llm_error *err) {
    size_t copied = 0, before = 0; /* before: start of the last stable character */
    for (size_t at = 0, bytes; at < length;) {
        uint32_t c = text[at];
        bytes = c < 0x80 ? 1 : llm__utf8(text + at, length - at, &c);
        if (llm__is_stable(n, c)) {
            before = c < LLM__UTF8_INVALID ? at : at + bytes;
            at += bytes;
            continue;
        }
        codes->n = 0;
        if (!llm__append(out, text + copied, before - copied, err)) return false;
        while (before < length) {
            bytes = llm__utf8(text + before, length - before, &c);
            if (before >= at && llm__is_stable(n, c)) break;
            if (!llm__add_decomposed(n, codes, c, err)) return false;
            before += bytes;
        }
        copied = at = before;
        llm__sort_marks(codes);
        llm__compose(n, codes);
        for (int64_t i = 0; i < codes->n; i++) {
            char utf8[4];
            if (!llm__append(out, utf8, llm__put_utf8(codes->data[i] & 0xFFFFFF, utf8), err))
                return false;
        }
    }
    return llm__append(out, text + copied, length - copied, err);
}

/* ---- The vocabulary ---- */

enum { /* kinds of tokens, numbered as in GGUF */
       LLM__TOKEN_NORMAL = 1,
       LLM__TOKEN_UNKNOWN,
       LLM__TOKEN_CONTROL,
       LLM__TOKEN_USER,
       LLM__TOKEN_UNUSED,
       LLM__TOKEN_BYTE
};
/* STRIP_LEFT, STRIP_RIGHT: white space before or after the token is removed. */
enum {
    LLM__MARK_END = 1,
    LLM__MARK_SPECIAL = 2,
    LLM__MARK_STRIP_LEFT = 4,
    LLM__MARK_STRIP_RIGHT = 8
};

typedef struct llm__merge_rule { /* an entry of the hash table of merges */
    uint64_t pair;   /* left id << 32 | right id */
    int32_t rank;    /* place in the list of merges, from 1 (best); 0: free entry */
    int32_t result;  /* id of the joined token */
} llm__merge_rule;

struct llm_tokenizer {
    const char *name;          /* path of the file, for errors */
    llm_file in;               /* for errors: only path and error; error is NULL once created */
    const llm_file *file;      /* file that holds the texts */
    int32_t size;              /* number of tokens */
    bool byte_level;           /* pieces are bytes, as in "gpt2"; else characters */
    bool unigram;              /* "t5": the best pieces by score; else pairs are merged */
    llm_string *texts;         /* (size) each token's text, as in the file */
    uint8_t *kinds, *marks;    /* (size) LLM__TOKEN_*; (size) bits LLM__MARK_* */
    double *scores;            /* (size) each token's score; NULL: merges are used */
    double unknown_cost;       /* of a character without a token, in a Unigram vocabulary */
    size_t longest;            /* length of the longest text in bytes */
    int32_t *ids;              /* (ids_mask + 1) hash table: text to id + 1; 0: free entry */
    uint64_t ids_mask;
    llm__merge_rule *merges;   /* (merges_mask + 1) hash table; NULL: scores are used */
    uint64_t merges_mask;
    uint64_t seed;             /* random seed of both tables: no file can force collisions */
    int32_t bytes[256];        /* id of each byte's token; -1: none */
    int16_t spelled[324];      /* byte spelled by each code point; -1: none */
    struct llm__text_step *steps;   /* (n_steps) rewrite a text and split it into words */
    int64_t n_steps, step_capacity;
    llm__unicode *unicode;     /* NULL: no step needs it */
    bool ignores_merges;       /* a word that is a token is used without merging */
    bool fuses_unknown;        /* adjacent characters without tokens become one unknown token */
    int32_t bos, eos, unknown; /* token ids; -1: none */
    bool adds_bos, adds_eos, drops_space; /* drops_space: decoding removes the leading space */
    llm_string chat_source;    /* source of the chat template, in Jinja */
    const llm_string **specials[2]; /* sorted texts: [0] user-defined; [1] all */
    int64_t n_specials[2];
    bool special_begins[2][256]; /* [i][b]: some text in specials[i] begins with byte b */
};

/* The slot that holds the text, or the free slot where it belongs. */
static uint64_t llm__token_slot(const llm_tokenizer *t, llm_string text) {
    uint64_t slot = llm__hash_bytes(t->seed, text.data, text.length) & t->ids_mask;
    for (int32_t id; (id = t->ids[slot] - 1) >= 0; slot = (slot + 1) & t->ids_mask)
        if (!llm__compare_strings(&t->texts[id], &text)) break;
    return slot;
}

static int32_t llm__find_token(const llm_tokenizer *t, llm_string text) {
    return text.length <= t->longest ? t->ids[llm__token_slot(t, text)] - 1 : -1;
}

static int32_t llm__find_text(const llm_tokenizer *t, const char *text) {
    return llm__find_token(t, llm__string(text));
}

static uint64_t llm__pair(int32_t left, int32_t right) {
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static const llm__merge_rule *llm__find_merge(const llm_tokenizer *t, int32_t left, int32_t right) {
    uint64_t pair = llm__pair(left, right), slot = llm__mix(pair ^ t->seed) & t->merges_mask;
    while (t->merges[slot].rank && t->merges[slot].pair != pair) slot = (slot + 1) & t->merges_mask;
    return &t->merges[slot];
}

/* The size of a hash table with at least a third of its slots free, so that searches are short. */
static uint64_t llm__table_size(uint64_t entries) {
    uint64_t size = 16;
    while (size < entries + entries / 2) size *= 2;
    return size;
}

/* The array of strings with this key, or if it is NULL, with the key `other`. */
static const llm_value *llm__strings(const llm_tokenizer *t, const char *key, const char *other) {
    const llm_value *value = llm_file_find(t->file, key);
    if (!value && other) value = llm_file_find(t->file, other);
    bool ok = value && value->type == LLM_VALUE_ARRAY && value->element_type == LLM_VALUE_STRING;
    if (!ok || value->count > INT32_MAX / 2)
        return llm__bad(&t->in, "the vocabulary has no %s (an array of strings)",
                        other ? other : key), (const llm_value *)NULL;
    return value;
}

/* Zeroed memory; on failure, the error is set. */
static void *llm__room(const llm_tokenizer *t, uint64_t n, size_t size) {
    return llm__new((size_t)n, size, "the vocabulary", t->in.error);
}

static bool llm__load_texts(llm_tokenizer *t) {
    const llm_value *tokens = llm__strings(t, "tokenizer.ggml.tokens", NULL);
    if (!tokens) return false;
    if (!tokens->count) return llm__bad(&t->in, "a vocabulary of 0 tokens is impossible");
    uint64_t slots = llm__table_size(tokens->count);
    t->size = (int32_t)tokens->count;
    t->ids_mask = slots - 1;
    if (!(t->texts = (llm_string *)llm__room(t, tokens->count, sizeof *t->texts)) ||
        !(t->ids = (int32_t *)llm__room(t, slots, sizeof *t->ids)))
        return false;
    size_t cursor = 0;
    for (int32_t id = 0; id < t->size && llm_value_string(tokens, &cursor, &t->texts[id]); id++) {
        uint64_t slot = llm__token_slot(t, t->texts[id]);
        if (!t->ids[slot]) t->ids[slot] = id + 1; /* of equal texts, the lowest id wins */
        if (t->texts[id].length > t->longest) t->longest = t->texts[id].length;
    }
    return true;
}

/* 0x41 for "<0x41>"; -1: not of this form. */
static int llm__parse_byte(llm_string s) {
    if (s.length != 6 || memcmp(s.data, "<0x", 3) || s.data[5] != '>') return -1;
    int high = llm__digit((uint8_t)s.data[3]), low = llm__digit((uint8_t)s.data[4]);
    bool lower = s.data[3] >= 'a' || s.data[4] >= 'a';
    return high < 0 || high > 15 || low < 0 || low > 15 || lower ? -1 : high * 16 + low;
}

/* Read an array with an entry for each token. */
static bool llm__each_token(const llm_tokenizer *t, const char *key, const llm_value **value) {
    *value = llm_file_find(t->file, key);
    return !*value || (*value)->count == (uint64_t)t->size ||
           llm__bad(&t->in, "%s has %llu elements for %d tokens", key, (llm__big)(*value)->count,
                    (int)t->size);
}

static bool llm__load_kinds(llm_tokenizer *t) {
    const llm_value *kinds;
    if (!llm__each_token(t, "tokenizer.ggml.token_type", &kinds) ||
        !(t->kinds = (uint8_t *)llm__room(t, (uint64_t)t->size, 2)))
        return false;
    t->marks = t->kinds + t->size;
    for (int32_t id = 0; id < t->size; id++) {
        int64_t kind = LLM__TOKEN_NORMAL;
        int byte = t->byte_level ? -1 : llm__parse_byte(t->texts[id]);
        if (kinds && !llm_value_i64(kinds, (uint64_t)id, &kind))
            return llm__bad(&t->in, "tokenizer.ggml.token_type is not an array of whole numbers");
        if (!kinds && byte >= 0) kind = LLM__TOKEN_BYTE;
        if (kind < LLM__TOKEN_NORMAL || kind > LLM__TOKEN_BYTE ||
            (kind == LLM__TOKEN_BYTE && byte < 0))
            kind = LLM__TOKEN_NORMAL;
        t->kinds[id] = (uint8_t)kind;
        if (kind == LLM__TOKEN_CONTROL || kind == LLM__TOKEN_UNKNOWN)
            t->marks[id] = LLM__MARK_SPECIAL;
        if (kind == LLM__TOKEN_BYTE && t->bytes[byte] < 0) t->bytes[byte] = id;
    }
    return true;
}

static bool llm__load_scores(llm_tokenizer *t) {
    const llm_value *scores;
    if (!llm__each_token(t, "tokenizer.ggml.scores", &scores)) return false;
    if (!scores) return llm__bad(&t->in, "the vocabulary has no tokenizer.ggml.scores");
    if (!(t->scores = (double *)llm__room(t, (uint64_t)t->size, sizeof *t->scores))) return false;
    for (int32_t id = 0; id < t->size; id++) {
        double score;
        if (!llm_value_f64(scores, (uint64_t)id, &score) || !(score == score))
            return llm__bad(&t->in, "the score of token %d is not a number", (int)id);
        t->scores[id] = score;
        t->unknown_cost = t->unknown_cost > 10 - score ? t->unknown_cost : 10 - score;
    }
    return true;
}

/* "gpt2" vocabularies spell a byte as a character: one that is printable in Latin-1 as itself, the
 * other 68, in order, as U+0100 and up. */
static uint32_t llm__spelling(uint32_t byte) {
    if (byte < 33) return 256 + byte;
    return byte == 173 ? 323 : byte > 126 && byte < 161 ? byte + 162 : byte;
}

static void llm__load_bytes(llm_tokenizer *t) {
    for (int i = 0; i < 324; i++) t->spelled[i] = -1;
    for (int byte = 0; byte < 256; byte++) {
        char letter[4];
        uint32_t code = llm__spelling((uint8_t)byte);
        llm_string spelling = {letter, llm__put_utf8(code, letter)};
        t->spelled[code] = (int16_t)byte;
        t->bytes[byte] = llm__find_token(t, spelling);
    }
}

/* Parse a rule of the form "left right". If a part or the result is not a token, as in some files,
 * it gets rank 0 and is skipped. joined: scratch of t->longest bytes. */
static llm__merge_rule llm__read_merge(const llm_tokenizer *t, llm_string rule, int32_t rank,
                                       char *joined) {
    llm__merge_rule merge = {0, 0, -1};
    /* the left part may be a space */
    const char *gap = rule.length > 1 ? (const char *)memchr(rule.data + 1, ' ', rule.length - 1)
                                      : NULL;
    if (!gap || rule.length - 1 > t->longest) return merge;
    llm_string left = {rule.data, (size_t)(gap - rule.data)},
               right = {gap + 1, rule.length - left.length - 1}, both = {joined, rule.length - 1};
    memcpy(joined, left.data, left.length);
    memcpy(joined + left.length, right.data, right.length);
    int32_t a = llm__find_token(t, left), b = llm__find_token(t, right);
    merge.result = llm__find_token(t, both);
    merge.pair = llm__pair(a, b);
    if (a >= 0 && b >= 0 && right.length && merge.result >= 0) merge.rank = rank;
    return merge;
}

/* The table may be larger than the CPU caches, so slots are prefetched. */
static bool llm__load_merges(llm_tokenizer *t) {
    const llm_value *merges = llm__strings(t, "tokenizer.llm.merges", "tokenizer.ggml.merges");
    if (!merges) return false;
    uint64_t slots = llm__table_size(merges->count), n = 0;
    t->merges_mask = slots - 1;
    t->merges = (llm__merge_rule *)llm__room(t, slots, sizeof *t->merges);
    llm__merge_rule *rules = (llm__merge_rule *)llm__room(t, merges->count, sizeof *rules);
    char *joined = (char *)llm__room(t, t->longest, 1);
    bool ok = t->merges && rules && joined;
    llm_string rule;
    for (size_t cursor = 0; ok && llm_value_string(merges, &cursor, &rule); n++)
        rules[n] = llm__read_merge(t, rule, (int32_t)n + 1, joined);
    for (uint64_t i = 0; i < n; i++) {
        if (i + 16 < n)
            LLM__PREFETCH(&t->merges[llm__mix(rules[i + 16].pair ^ t->seed) & t->merges_mask]);
        llm__merge_rule *slot = (llm__merge_rule *)llm__find_merge(
            t, (int32_t)(rules[i].pair >> 32), (int32_t)rules[i].pair);
        if (rules[i].rank && !slot->rank) *slot = rules[i];
    }
    LLM_FREE(rules);
    LLM_FREE(joined);
    return ok;
}

/* If the key is absent, *id is `usual` if that token has the given kind, else -1. */
static bool llm__load_named(llm_tokenizer *t, const char *key, int32_t usual, int kind,
                            int32_t *id) {
    const llm_value *value = llm_file_find(t->file, key);
    uint64_t number = 0;
    *id = usual >= 0 && usual < t->size && t->kinds[usual] == kind ? usual : -1;
    if (!value) return true;
    if (!llm_value_u64(value, 0, &number) || number >= (uint64_t)t->size)
        return llm__bad(&t->in, "%s is not the id of one of the %d tokens", key, (int)t->size);
    return *id = (int32_t)number, true;
}

/* Some files give end tokens the kind "normal". Those in angle brackets are special all the
 * same. */
static void llm__mark_special(llm_tokenizer *t, int32_t id, uint8_t marks) {
    if (id < 0) return;
    llm_string s = t->texts[id];
    t->marks[id] |= marks;
    if (s.length > 2 && s.data[0] == '<' && s.data[s.length - 1] == '>')
        t->marks[id] |= LLM__MARK_SPECIAL;
}

static bool llm__load_ends(llm_tokenizer *t) {
    static const char *const spellings[] = {
        "</s>",       "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>",
        "<|eom_id|>", "<|im_end|>",    "<|end|>",         "<end_of_turn>"};
    bool sp = !t->byte_level;
    static const struct { const char *key; int usual, kind; } named[] = {
        {"tokenizer.ggml.unknown_token_id", 0, LLM__TOKEN_UNKNOWN},
        {"tokenizer.ggml.bos_token_id", 1, LLM__TOKEN_CONTROL},
        {"tokenizer.ggml.eos_token_id", 2, LLM__TOKEN_CONTROL},
        {"tokenizer.ggml.eot_token_id", -1, 0}, {"tokenizer.ggml.eom_token_id", -1, 0}};
    int32_t eot, eom, *ids[] = {&t->unknown, &t->bos, &t->eos, &eot, &eom};
    for (int i = 0; i < 5; i++) {
        int usual = sp ? named[i].usual : -1;
        if (!llm__load_named(t, named[i].key, usual, named[i].kind, ids[i])) return false;
        if (i) llm__mark_special(t, *ids[i], i > 1 ? LLM__MARK_END : 0);
    }
    for (int i = 0; i < 8; i++) {
        int32_t id = llm__find_text(t, spellings[i]);
        /* In byte-level vocabularies, a "</s>" of the kind "normal" is an HTML tag. */
        if (i || sp || id < 0 || t->kinds[id] != LLM__TOKEN_NORMAL)
            llm__mark_special(t, id, LLM__MARK_END);
    }
    return true;
}

/* Sorted, since llm__match_special needs tokens with a common beginning to be adjacent. */
static bool llm__load_specials(llm_tokenizer *t, bool all) {
    int64_t n = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass && !(t->specials[all] =
                          (const llm_string **)llm__room(t, (uint64_t)n, sizeof(llm_string *))))
            return false;
        n = 0;
        for (int32_t id = 0; id < t->size; id++) {
            bool wanted = t->kinds[id] == LLM__TOKEN_USER ||
                          (all && (t->marks[id] & LLM__MARK_SPECIAL));
            if (!wanted || !t->texts[id].length) continue;
            if (pass) t->specials[all][n] = &t->texts[id];
            t->special_begins[all][(uint8_t)t->texts[id].data[0]] = true;
            n++;
        }
    }
    t->n_specials[all] = n;
    qsort(t->specials[all], (size_t)n, sizeof(llm_string *), llm__compare_names);
    return true;
}

static bool llm__flag(const llm_tokenizer *t, const char *key, bool otherwise) {
    bool flag = otherwise;
    return llm_value_bool(llm_file_find(t->file, key), 0, &flag) ? flag : otherwise;
}

static bool llm__is_text(llm_string s, const char *text) {
    llm_string other = llm__string(text);
    return !llm__compare_strings(&s, &other);
}

/* ---- Steps: from text to words ----
 * What happens to a text before its words are merged, in the terms of tokenizer.json. Each step is
 * a line of text: a name and, after a space, its argument.
 *
 *     NFC, NFKC, Lowercase      rewrite the text
 *     Charsmap                  replace characters by SentencePiece's table in
 *                               tokenizer.ggml.precompiled_charsmap; !Charsmap: as Hugging Face's
 *                               library uses the table
 *     Spell                     write each byte as in a byte-level vocabulary; !Spell: the reverse
 *     Strip-left, Strip-right   remove white space at the start, at the end
 *     Prepend X                 write X before the text; Prepend-start: only at the start and after
 *                               control tokens; Prepend-first: only at the start, unless it is
 *                               already there; Prepend-each: unless it is already there
 *     Replace X^AE              replace each match of the expression E by X (^A is the byte 1)
 *     Isolated E                split: matches of E and the texts between them are pieces;
 *                               Removed: matches are dropped; Contiguous: adjacent matches are one
 *                               piece; MergedWithPrevious, MergedWithNext: a match joins the text
 *                               before or after it. With "!" before the name, the texts between
 *                               matches count as the matches.
 *
 * GGUF names a rule instead (tokenizer.ggml.pre); the table below gives its steps. */

enum { /* kinds of steps, in the order of llm__step_names */
    LLM__STEP_ISOLATED, LLM__STEP_REMOVED, LLM__STEP_CONTIGUOUS, LLM__STEP_PREVIOUS,
    LLM__STEP_NEXT, LLM__STEP_REPLACE, LLM__STEP_NFC, LLM__STEP_NFKC, LLM__STEP_LOWERCASE,
    LLM__STEP_CHARSMAP, LLM__STEP_SPELL,
    LLM__STEP_STRIP_LEFT, LLM__STEP_STRIP_RIGHT, LLM__STEP_PREPEND, LLM__STEP_PREPEND_START,
    LLM__STEP_PREPEND_FIRST, LLM__STEP_PREPEND_EACH, LLM__N_STEPS, LLM__STEPS_MOST = 32
};
static const char *const llm__step_names[] = {
    "Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext", "Replace", "NFC",
    "NFKC", "Lowercase", "Charsmap", "Spell", "Strip-left", "Strip-right", "Prepend",
    "Prepend-start", "Prepend-first", "Prepend-each"};

typedef struct llm__text_step {
    int kind;                    /* LLM__STEP_* */
    bool inverted;               /* "!" */
    llm_string text;             /* what is prepended, the replacement, or a Charsmap's table */
    llm__expression *expression; /* of a split or replacement */
    llm__normalizer *normalizer; /* of NFC and NFKC */
} llm__text_step;

#define LLM__ENDINGS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define LLM__SPACES "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define LLM__LETTERS "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define LLM__REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" LLM__SPACES
#define LLM__UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define LLM__LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"
#define LLM__CASES(other, ending)                                                                  \
    "[^\\r\\n\\p{L}\\p{N}]?" LLM__UPPER other "]*" LLM__LOWER other "]+" ending                    \
    "|[^\\r\\n\\p{L}\\p{N}]?" LLM__UPPER other "]+" LLM__LOWER other "]*" ending "|"
#define LLM__CASES_REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" LLM__SPACES
#define LLM__CJK "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
#define LLM__PUNCTUATED(rest) "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"            \
    "[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+" rest
#define LLM__LINES "Isolated [^\\n]+|[\\n]+"
static const char llm__gpt2_words[] = "Isolated 's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| "
                                      "?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
static const char llm__llama3_words[] = "Isolated " LLM__ENDINGS "|" LLM__LETTERS "\\p{N}{1,3}"
                                        LLM__REST;
static const char llm__qwen2_words[] = "Isolated " LLM__ENDINGS "|" LLM__LETTERS "\\p{N}" LLM__REST;
static const char llm__o200k_words[] = "Isolated " LLM__CASES("", LLM__ENDINGS "?") "\\p{N}{1,3}"
                                       LLM__CASES_REST;
static const char llm__each_digit[] = "Isolated \\p{N}", llm__threes[] = "Isolated \\p{N}{1,3}",
                  llm__cjk_words[] = "Isolated " LLM__CJK;
static const char llm__deepseek_words[] = "Isolated " LLM__PUNCTUATED("[\\r\\n]*|" LLM__SPACES);
static const char llm__bloom_words[] = "Isolated  ?[^(\\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4"
                                       "\u060C)]+";
static const char llm__escape[] = "Replace \u2581\1 ";

enum { LLM__RULE_NO_MERGES = 1, LLM__RULE_BOS = 2 };
static const struct llm__rule {
    const char *names;      /* values of tokenizer.ggml.pre */
    unsigned flags;         /* bits LLM__RULE_* */
    const char *steps[6];
} llm__rules[] = {
    {"gpt-2 gpt2 phi-2 olmo mpt jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum "
     "modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
     0, {llm__gpt2_words}},
    {"smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", 0,
     {llm__each_digit, llm__gpt2_words}},
    {"llama3 llama-bpe llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     LLM__RULE_NO_MERGES | LLM__RULE_BOS, {llm__llama3_words}},
    {"dbrx smaug-bpe chatglm-bpe", 0, {llm__llama3_words}},
    {"glm4 glm5", LLM__RULE_NO_MERGES, {llm__llama3_words}},
    {"minicpm5", LLM__RULE_NO_MERGES,
     {llm__threes, "Isolated " LLM__ENDINGS "|" LLM__LETTERS "\\p{N}+" LLM__REST}},
    {"jais-2", 0,
     {"Isolated " LLM__ENDINGS "|" LLM__LETTERS "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
      "\\s*[\\r\\n]+|\\s{512}(?!\\S)|\\s{256}(?!\\S)|\\s{128}(?!\\S)|\\s{64}(?!\\S)|\\s{32}(?!\\S)|"
      "\\s{16}(?!\\S)|\\s{8}(?!\\S)|\\s{4}(?!\\S)|\\s{1,2}(?!\\S)|\\s{1}"}},
    {"qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", 0, {"NFC", llm__qwen2_words}},
    {"stablelm2 hunyuan solar-open grok-2", 0, {llm__qwen2_words}},
    {"qwen35", 0,
     {"Isolated " LLM__ENDINGS "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| "
      "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" LLM__SPACES}},
    {"ufakzeka", 0, {"Isolated " LLM__LETTERS "\\p{N}" LLM__REST}},
    {"laguna", 0, {LLM__LINES, llm__qwen2_words}},
    {"seed-coder", 0,
     {"Isolated " LLM__ENDINGS "|" LLM__LETTERS "\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+|"
      LLM__SPACES}},
    {"bailingmoe bailingmoe2 llada-moe", 0,
     {"Isolated '(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| "
      "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}},
    {"exaone-moe", 0,
     {"Isolated " LLM__ENDINGS "|[^\\r\\n\\p{L}\\p{N}]?(?:\\p{L}\\p{M}*(?: \\p{L}\\p{M}*)*)+|"
      "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]?|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}},
    {"gpt-4o llama4 kanana2 talkie minimax-m2", 0, {llm__o200k_words}},
    {"granite-embed-multi-97m", LLM__RULE_NO_MERGES, {llm__o200k_words}},
    {"tiny_aya cohere2moe", 0, {"Isolated \\d{1,3}(?=(?:\\d{3})*\\b)", llm__o200k_words}},
    {"tekken", LLM__RULE_NO_MERGES | LLM__RULE_BOS,
     {"Isolated " LLM__CASES("", "") "\\p{N}" LLM__CASES_REST}},
    {"youtu", LLM__RULE_NO_MERGES,
     {"Isolated [\uAC00-\uD7A3\u3131-\u318E]+|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A"
      "\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+|[\u3105-\u312F]+|" LLM__CJK,
      "Isolated " LLM__CASES("", LLM__ENDINGS "?") "\\p{N}" LLM__CASES_REST}},
    {"kimi-k2", 0,
     {"Isolated [\\p{Han}]+|" LLM__CASES("&&[^\\p{Han}]", LLM__ENDINGS "?") "\\p{N}{1,3}"
      LLM__REST}},
    {"deepseek-llm", 0, /* scripts with upper and lower case, in an earlier Unicode version */
     {"Isolated [\\r\\n]",
      "Isolated \\s?[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C8A\u2D00-\u2D2D"
      "\uA790-\uAB68\U00010570-\U000105BC\U00010D50-\U00010D85\U00016E40-\U0001DF2A]]+",
      "Isolated \\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
      "Isolated \\s+$", "Isolated [\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+", llm__each_digit}},
    {"deepseek-coder", 0,
     {"Isolated [\\r\\n]", "Isolated \\s?\\p{L}+", "Isolated \\s?\\p{P}+",
      "Isolated [\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+", llm__each_digit}},
    {"deepseek-v3 hunyuan-dense hy_v4 joyai-llm", 0,
     {llm__threes, llm__cjk_words, llm__deepseek_words}},
    {"spark2_5", 0,
     {llm__threes, llm__cjk_words,
      "Isolated " LLM__PUNCTUATED("|[\\r\\n]|\\s+(?!\\S)|\\s+"), llm__each_digit}},
    {"afmoe", 0,
     {"Isolated \\p{N}{1,3}(?=(?:\\p{N}{3})*(?!\\p{N}))",
      "Isolated [\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F"
      "\u2F00-\u2FDF\u0E40-\u0E7F\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF"
      "\uAC00-\uD7AF\u1100-\u11FF]+", llm__deepseek_words}},
    {"superbpe", 0, {"Isolated \\p{N}+", "Isolated (?=(\\d{3})+(?!\\d))"}},
    {"falcon", 0,
     {"Isolated [\\p{P}$+<=>^~|`]+", llm__gpt2_words, "Isolated [0-9][0-9][0-9]"}},
    {"poro-chat bloom gpt3-finnish", 0, {llm__bloom_words}},
    {"viking", 0, {llm__bloom_words, llm__each_digit}},
    {"chameleon", LLM__RULE_BOS,
     {"Isolated <sentinel:[0-9]+>", "Isolated (IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
      "Isolated ([\\t\\n]|    |  )", llm__each_digit, "Isolated [\\p{P}!-/:-@\\[-`{-~]",
      llm__gpt2_words}},
    {"gemma4 granite-embed-multi-311m sarvam-moe", 0, {llm__escape, LLM__LINES}},
};
enum { LLM__N_RULES = sizeof llm__rules / sizeof *llm__rules };

/* Can merging produce this token? */
static bool llm__is_piece(const llm_tokenizer *t, int32_t id) {
    return t->kinds[id] != LLM__TOKEN_CONTROL && t->kinds[id] != LLM__TOKEN_UNKNOWN &&
           t->kinds[id] != LLM__TOKEN_BYTE;
}

static uint32_t llm__charsmap_unit(llm_string table, uint64_t i) {
    uint32_t unit;
    memcpy(&unit, table.data + 4 * i, 4);
    return unit;
}

/* Find the Charsmap table: the length of a trie, the trie, and the replacements, each of which ends
 * in a 0 byte. */
static bool llm__load_charsmap(const llm_tokenizer *t, llm_string *table) {
    const llm_value *value = llm_file_find(t->file, "tokenizer.ggml.precompiled_charsmap");
    table->data = value ? (const char *)value->data : NULL;
    table->length = value ? value->bytes : 0;
    uint32_t n = table->length > 8 ? llm__charsmap_unit(*table, 0) : 0;
    return (n && n % 4 == 0 && n < table->length - 4 && !table->data[table->length - 1]) ||
           llm__bad(&t->in, "there is no valid tokenizer.ggml.precompiled_charsmap");
}

static bool llm__add_step(llm_tokenizer *t, llm_string line) {
    if (!llm__add_record(&t->steps, t->n_steps, &t->step_capacity, sizeof *t->steps,
                         "the tokenizer's steps", t->in.error))
        return false;
    llm__text_step *step = &t->steps[t->n_steps];
    const char *begin = line.data, *space = (const char *)memchr(begin, ' ', line.length);
    const char *end = begin + line.length, *expression = space ? space + 1 : end;
    step->inverted = line.length && *begin == '!';
    begin += step->inverted;
    llm_string name = {begin, (size_t)((space ? space : end) - begin)};
    while (step->kind < LLM__N_STEPS && !llm__is_text(name, llm__step_names[step->kind]))
        step->kind++;
    step->text.data = expression;
    step->text.length = (size_t)(end - expression);
    if (step->kind == LLM__STEP_REPLACE) {
        const char *one = (const char *)memchr(expression, 1, step->text.length);
        step->text.length = one ? (size_t)(one - expression) : 0;
        expression = one ? one + 1 : end;
    }
    if (step->kind >= LLM__N_STEPS || t->n_steps == LLM__STEPS_MOST ||
        (step->kind <= LLM__STEP_REPLACE && expression == end))
        return llm__bad(&t->in, "tokenizer.llm.steps has a step that is unknown or the 33rd: '%s'",
                        llm__show(line).text);
    t->n_steps++;
    if (!t->unicode && !(t->unicode = llm__unicode_create(t->in.error))) return false;
    llm_string source = {expression, (size_t)(end - expression)};
    if (step->kind <= LLM__STEP_REPLACE)
        return (step->expression =
                    llm__expression_create(t->unicode, source, t->name, t->in.error)) != NULL;
    if (step->kind == LLM__STEP_CHARSMAP) return llm__load_charsmap(t, &step->text);
    if (step->kind != LLM__STEP_NFC && step->kind != LLM__STEP_NFKC) return true;
    step->normalizer = llm__normalizer_create(step->kind == LLM__STEP_NFKC, t->in.error);
    return step->normalizer != NULL;
}

/* Is the name in the rule's list, which is separated by spaces? */
static bool llm__is_rule(const struct llm__rule *rule, llm_string name) {
    for (const char *at = rule->names; *at; at += strcspn(at, " "), at += *at == ' ') {
        llm_string one = {at, strcspn(at, " ")};
        if (!llm__compare_strings(&one, &name)) return true;
    }
    return false;
}

/* Does a token have U+2581 after another character? */
static bool llm__joins_spaces(const llm_tokenizer *t) {
    for (int32_t id = 0; id < t->size; id++) {
        const char *text = t->texts[id].data;
        size_t n = t->texts[id].length, at = 0;
        if (!llm__is_piece(t, id)) continue;
        while (n - at >= 3 && !memcmp(text + at, "\xE2\x96\x81", 3)) at += 3;
        for (; at + 3 <= n; at++)
            if (!memcmp(text + at, "\xE2\x96\x81", 3)) return true;
    }
    return false;
}

/* Read the file's steps or, if it has none, the rule's; and flags. */
static bool llm__load_steps(llm_tokenizer *t, const struct llm__rule *rule) {
    const llm_value *steps = llm_file_find(t->file, "tokenizer.llm.steps");
    llm_string line;
    size_t cursor = 0;
    if (rule) {
        t->ignores_merges = rule->flags & LLM__RULE_NO_MERGES;
        t->adds_bos = rule->flags & LLM__RULE_BOS;
    }
    while (steps && llm_value_string(steps, &cursor, &line))
        if (!llm__add_step(t, line)) return false;
    for (int i = 0; !steps && rule && i < 6 && rule->steps[i]; i++)
        if (!llm__add_step(t, llm__string(rule->steps[i]))) return false;
    if (t->byte_level) return true;
    bool plain = !steps && !rule, tidy = llm__flag(t, "tokenizer.ggml.remove_extra_whitespaces",
                                                   false);
    const struct { bool is_on; const char *line; } lines[] = {
        {plain && t->unigram && llm_file_find(t->file, "tokenizer.ggml.precompiled_charsmap"),
         "Charsmap"},
        {plain && t->unigram && tidy, "Replace \1\\A +| +\\z"},
        {plain && t->unigram && tidy, "Replace  \1 +"},
        {plain && llm__flag(t, "tokenizer.ggml.add_space_prefix", true), "Prepend-start \u2581"},
        {plain, llm__escape}};
    for (int i = 0; i < 5; i++)
        if (lines[i].is_on && !llm__add_step(t, llm__string(lines[i].line))) return false;
    /* If no token has U+2581 after another character, no merge crosses such a border: splitting
     * there gives the same tokens in less time. */
    return t->unigram || llm__joins_spaces(t) ||
           llm__add_step(t, llm__string("Isolated \u2581+[^\u2581]*|[^\u2581]+"));
}

/* Read the vocabulary's kind and, if it has one, the rule that splits words. */
static bool llm__load_model(llm_tokenizer *t, const struct llm__rule **rule) {
    const llm_value *value = llm_file_find(t->file, "tokenizer.ggml.pre");
    llm_string model = {"", 0}, name = {"gemma4", 6};
    size_t cursor = 0;
    if (!llm_value_string(llm_file_find(t->file, "tokenizer.ggml.model"), &cursor, &model))
        return llm__bad(&t->in, "there is no tokenizer (tokenizer.ggml.model) in this file");
    t->byte_level = llm__is_text(model, "gpt2");
    t->unigram = llm__is_text(model, "t5");
    bool gemma4 = llm__is_text(model, "gemma4");
    if (t->unigram || llm__is_text(model, "llama")) return true;
    if (!t->byte_level && !gemma4)
        return llm__unsupported(&t->in, "the tokenizer is of the kind '%s', which is not supported;"
                                " supported are gpt2 (byte-level BPE), llama and gemma4 "
                                "(SentencePiece BPE), and t5 (Unigram)", llm__show(model).text);
    cursor = 0;
    if (!gemma4 && value && !llm_value_string(value, &cursor, &name))
        return llm__bad(&t->in, "tokenizer.ggml.pre is not a string");
    const struct llm__rule *end = llm__rules + LLM__N_RULES;
    if (gemma4 || value)
        for (*rule = llm__rules; *rule < end && !llm__is_rule(*rule, name);) ++*rule;
    if (*rule == end) *rule = NULL;
    t->byte_level = *rule != end - 1;
    if (*rule || llm_file_find(t->file, "tokenizer.llm.steps")) return true;
    /* Early Llama 3 files name no rule. Guessing would silently split some words wrongly. */
    if (!value || llm__is_text(name, "default"))
        return llm__unsupported(&t->in, "the file does not name the rule that splits words "
                                "(tokenizer.ggml.pre is %s), as after early converters; get a "
                                "newer conversion of the model",
                                value ? "'default', whatever the model" : "missing");
    return llm__unsupported(&t->in, "the tokenizer splits words by the rule '%s', which is not "
                            "known", llm__show(name).text);
}

static bool llm__load_marks(llm_tokenizer *t, const char *key, uint8_t mark) {
    const llm_value *ids = llm_file_find(t->file, key);
    for (uint64_t i = 0; ids && i < ids->count; i++) {
        uint64_t id;
        if (!llm_value_u64(ids, i, &id) || id >= (uint64_t)t->size)
            return llm__bad(&t->in, "%s has an element that is not the id of a token", key);
        t->marks[id] |= mark;
    }
    return true;
}

static void llm__load_chat(llm_tokenizer *t);

static bool llm__load_tokenizer(llm_tokenizer *t) {
    const struct llm__rule *rule = NULL;
    if (!llm__load_model(t, &rule) || !llm__load_texts(t) || !llm__load_kinds(t)) return false;
    if (t->byte_level) llm__load_bytes(t);
    t->adds_bos = !t->byte_level && !t->unigram;
    /* Pieces are joined by merges or, in SentencePiece's own files, by scores. */
    bool merges = rule || t->byte_level || llm_file_find(t->file, "tokenizer.llm.merges");
    if (!llm__load_steps(t, rule) || !(merges ? llm__load_merges(t) : llm__load_scores(t)))
        return false;
    t->fuses_unknown = llm__flag(t, "tokenizer.llm.fuse_unknown", t->unigram);
    t->ignores_merges = llm__flag(t, "tokenizer.llm.ignore_merges", t->ignores_merges);
    t->adds_bos = llm__flag(t, "tokenizer.ggml.add_bos_token", t->adds_bos);
    t->adds_eos = llm__flag(t, "tokenizer.ggml.add_eos_token", t->unigram);
    bool prefix = llm__flag(t, "tokenizer.ggml.add_space_prefix", true);
    t->drops_space = !t->byte_level && llm__flag(t, "tokenizer.llm.drops_space", !rule && prefix);
    llm__load_chat(t);
    return llm__load_ends(t) && llm__load_marks(t, "tokenizer.llm.end_token_ids", LLM__MARK_END) &&
           llm__load_marks(t, "tokenizer.llm.strip_left", LLM__MARK_STRIP_LEFT) &&
           llm__load_marks(t, "tokenizer.llm.strip_right", LLM__MARK_STRIP_RIGHT) &&
           llm__load_specials(t, false) && llm__load_specials(t, true);
}

llm_tokenizer *llm_tokenizer_create(const llm_file *file, llm_error *err) {
    llm__clear(err);
    if (!file)
        return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_tokenizer_create: no file was given"),
               (llm_tokenizer *)NULL;
    llm_tokenizer *t = (llm_tokenizer *)llm__new(1, sizeof *t, "a tokenizer", err);
    if (!t) return NULL;
    t->name = t->in.path = file->path;
    t->in.error = err;
    t->file = file;
    t->bos = t->eos = t->unknown = -1;
    t->seed = llm__mix((uint64_t)(uintptr_t)t ^ (uint64_t)(llm_seconds() * 1e9));
    for (int i = 0; i < 256; i++) t->bytes[i] = -1;
    if (llm__load_tokenizer(t)) return t;
    llm_tokenizer_free(t);
    return NULL;
}

void llm_tokenizer_free(llm_tokenizer *t) {
    if (!t) return;
    for (int64_t i = 0; i < t->n_steps; i++) {
        llm__expression_free(t->steps[i].expression);
        LLM_FREE(t->steps[i].normalizer);
    }
    LLM_FREE(t->steps);
    LLM_FREE(t->unicode);
    LLM_FREE(t->texts);
    LLM_FREE(t->kinds);
    LLM_FREE(t->scores);
    LLM_FREE(t->ids);
    LLM_FREE(t->merges);
    LLM_FREE((void *)t->specials[0]);
    LLM_FREE((void *)t->specials[1]);
    LLM_FREE(t);
}

static bool llm__is_id(const llm_tokenizer *t, int32_t id) { return id >= 0 && id < t->size; }

int32_t llm_tokenizer_size(const llm_tokenizer *t) { return t->size; }
int32_t llm_tokenizer_bos(const llm_tokenizer *t) { return t->bos; }
int32_t llm_tokenizer_eos(const llm_tokenizer *t) { return t->eos; }
bool llm_tokenizer_adds_bos(const llm_tokenizer *t) { return t->adds_bos; }
bool llm_tokenizer_adds_eos(const llm_tokenizer *t) { return t->adds_eos; }
bool llm_tokenizer_is_end(const llm_tokenizer *t, int32_t id) {
    return llm__is_id(t, id) && (t->marks[id] & LLM__MARK_END);
}
bool llm_tokenizer_is_special(const llm_tokenizer *t, int32_t id) {
    return llm__is_id(t, id) && (t->marks[id] & LLM__MARK_SPECIAL);
}
llm_string llm_tokenizer_text(const llm_tokenizer *t, int32_t id) {
    return llm__is_id(t, id) ? t->texts[id] : llm__string("");
}

/* ---- tokenizer.json ----
 * Hugging Face's format: a vocabulary, merges, and five stages: normalizer, pre_tokenizer, model,
 * post_processor and decoder. It is translated to GGUF values. A setting without a key in GGUF gets
 * one of these, after "tokenizer.llm.":
 *
 *     steps                     see above; absent if tokenizer.ggml.pre implies them
 *     ignore_merges             bool, likewise
 *     merges                    merges of a "llama" vocabulary, used instead of scores
 *     drops_space               decoding removes the leading space
 *     fuse_unknown              adjacent characters without tokens become one unknown token
 *     strip_left, strip_right   ids of tokens that remove the white space before or after them
 *     end_token_ids             ids of additional tokens that end an answer */

typedef struct llm__vocabulary {
    llm_file in;             /* for errors: only path (of tokenizer.json) and error */
    llm__metadata *m;        /* destination of the GGUF values */
    llm_json json, config, added; /* tokenizer.json, tokenizer_config.json, added_tokens.json */
    llm_string *texts;       /* (size) text of each id */
    int32_t *kinds;          /* (size) LLM__TOKEN_*; 0: no token has this id */
    uint8_t *strips;         /* (size) bits: 1 strips white space before the token, 2 after it */
    double *scores;          /* (size) of Unigram */
    uint64_t size, n_steps;  /* number of ids, used or not; number of steps */
    llm__bytes steps, ids;   /* steps: strings as in GGUF; ids: a list of int32_t being built */
    /* escapes: spaces become U+2581; byte_fallback: the tokens <0x00> to <0xFF> are bytes;
     * rewrites: a normalizer does more than NFC and escaping */
    bool unigram, byte_level, spelled, escapes, byte_fallback, rewrites, drops_space, adds_bos,
        adds_eos;
    int32_t bos, eos, unknown; /* token ids; -1: none */
} llm__vocabulary;

static const llm_json_node *llm__setting(const llm__vocabulary *v, const char *key) {
    return llm_json_member(v->json.nodes, key);
}

static bool llm__is_null(const llm_json_node *node) { return !node || node->kind == LLM_JSON_NULL; }

static bool llm__refuse_step(const llm__vocabulary *v, const char *step, const llm_json_node *node,
                             const char *known) {
    llm_string type = {"(none)", 6};
    llm_json_string(llm_json_member(node, "type"), &type);
    return llm__unsupported(&v->in, "the %s '%s' is not supported; supported: %s", step,
                            llm__show(type).text, known);
}

static bool llm__is_step(const llm_json_node *node, const char *type) {
    return llm_json_is(llm_json_member(node, "type"), type);
}

/* Does the step have the form {"pattern": {"String": pattern}, "content": content}? */
static bool llm__replaces(const llm_json_node *node, const char *pattern, const char *content) {
    return llm_json_is(llm_json_member(llm_json_member(node, "pattern"), "String"), pattern) &&
           llm_json_is(llm_json_member(node, "content"), content);
}

/* Add a step with this name, text and pattern (NULL: none). A literal pattern is escaped. */
static bool llm__put_step(llm__vocabulary *v, const char *name, llm_string text,
                          const llm_json_node *pattern) {
    const llm_json_node *literal = llm_json_member(pattern, "String");
    llm_string source = {"", 0};
    uint64_t length = 0;
    size_t start = v->steps.length;
    bool ok = llm__append(&v->steps, &length, sizeof length, v->in.error) &&
              llm__append(&v->steps, name, strlen(name), v->in.error) &&
              llm__append(&v->steps, text.data, text.length, v->in.error) &&
              llm__append(&v->steps, "\1", !strcmp(name, "Replace "), v->in.error);
    if (pattern && !llm_json_string(literal, &source) &&
        !llm_json_string(llm_json_member(pattern, "Regex"), &source))
        return llm__bad(&v->in, "a step has no pattern");
    for (size_t i = 0; ok && i < source.length; i++) {
        uint8_t two[2] = {'\\', (uint8_t)source.data[i]};
        bool plain = !literal || two[1] >= 0x80 || llm__digit(two[1]) >= 0;
        ok = llm__append(&v->steps, two + plain, 2u - plain, v->in.error);
    }
    v->n_steps++;
    length = v->steps.length - start - sizeof length;
    if (ok) memcpy(v->steps.data + start, &length, sizeof length);
    return ok;
}

static bool llm__put_line(llm__vocabulary *v, const char *line) {
    return llm__put_step(v, line, llm__string(""), NULL);
}

/* Read the step or, if it is a Sequence, the steps in its array `key`. */
static bool llm__read_steps(llm__vocabulary *v, const llm_json_node *node, const char *key,
                            bool (*read)(llm__vocabulary *, const llm_json_node *)) {
    const llm_json_node *steps = llm_json_member(node, key);
    if (llm__is_null(node)) return true;
    if (!llm__is_step(node, "Sequence")) return read(v, node);
    for (const llm_json_node *step = llm_json_first(steps); step; step = llm_json_next(steps, step))
        if (!llm__read_steps(v, step, key, read)) return false;
    return true;
}

/* Decode the base64 table and write it. */
static bool llm__put_charsmap(llm__vocabulary *v, llm_string text) {
    uint32_t bits = 0;
    uint8_t *table = (uint8_t *)llm__new(text.length / 4 + 1, 3, "the tokenizer", v->in.error);
    size_t n = 0;
    bool ok = table && text.length % 4 == 0;
    for (size_t i = 0; ok && i < text.length && text.data[i] != '='; i++) {
        int c = text.data[i], digit = llm__digit((uint8_t)c);
        digit = c == '+' ? 62 : c == '/' ? 63 : digit < 0 ? -64 : digit < 10 ? digit + 52
                : digit - 10 + (c >= 'a' ? 26 : 0);
        ok = digit >= 0;
        bits = bits << 6 | (uint32_t)digit;
        if (i % 4) table[n++] = (uint8_t)(bits >> (6 - 2 * (i % 4)));
    }
    if (ok) llm__note_array(v->m, "tokenizer.ggml.precompiled_charsmap", LLM_VALUE_U8, table, n, n);
    LLM_FREE(table);
    return ok;
}

static bool llm__read_normalizer(llm__vocabulary *v, const llm_json_node *node) {
    static const char *const same[] = {"NFC", "NFKC", "Lowercase"};
    llm_string text = {"", 0};
    if (llm__is_step(node, "Replace") && llm__replaces(node, " ", "\u2581"))
        return v->escapes = llm__put_line(v, llm__escape);
    for (int i = 0; i < 3; i++, v->rewrites = true)
        if (llm__is_step(node, same[i])) return llm__put_line(v, same[i]);
    if (llm__is_step(node, "Strip"))
        return (!llm__is_on(node, "strip_left", true) || llm__put_line(v, "Strip-left")) &&
               (!llm__is_on(node, "strip_right", true) || llm__put_line(v, "Strip-right"));
    if (llm__is_step(node, "Prepend") && llm_json_string(llm_json_member(node, "prepend"), &text))
        return llm__put_step(v, "Prepend ", text, NULL);
    if (llm__is_step(node, "Replace") && llm_json_string(llm_json_member(node, "content"), &text) &&
        !memchr(text.data, 1, text.length))
        return llm__put_step(v, "Replace ", text, llm_json_member(node, "pattern"));
    if (llm__is_step(node, "Precompiled") &&
        llm_json_string(llm_json_member(node, "precompiled_charsmap"), &text) &&
        llm__put_charsmap(v, text))
        return llm__put_line(v, "!Charsmap");
    return llm__refuse_step(v, "normalizer", node,
                            "NFC, NFKC, Lowercase, Strip, Prepend, Precompiled (in base64), "
                            "Replace, Sequence");
}

static bool llm__read_metaspace(llm__vocabulary *v, const llm_json_node *node, const char *step,
                                const char **prefix) {
    const llm_json_node *scheme = llm_json_member(node, "prepend_scheme");
    bool never = llm_json_is(scheme, "never") ||
                 (!scheme && !llm__is_on(node, "add_prefix_space", true));
    bool first = llm_json_is(scheme, "first");
    *prefix = never ? NULL : first ? "Prepend-first \u2581" : "Prepend-each \u2581";
    return (llm_json_is(llm_json_member(node, "replacement"), "\u2581") &&
            (never || first || !scheme || llm_json_is(scheme, "always"))) ||
           llm__refuse_step(v, step, node, "one whose replacement is U+2581, and whose "
                                           "prepend_scheme is always, first or never");
}

static bool llm__read_pre_tokenizer(llm__vocabulary *v, const llm_json_node *node) {
    llm_string behavior = {"Isolated", 8};
    const char *prefix = NULL;
    char name[32];
    llm_json_string(llm_json_member(node, "behavior"), &behavior);
    snprintf(name, sizeof name, "%s%.20s ", llm__is_on(node, "invert", false) ? "!" : "",
             llm__show(behavior).text);
    if (v->byte_level && !v->spelled && !(v->spelled = llm__put_line(v, "Spell"))) return false;
    if (llm__is_step(node, "ByteLevel") && !v->byte_level)
        return v->byte_level = (!llm__is_on(node, "add_prefix_space", true) ||
                                llm__put_line(v, "Prepend-each  ")) &&
                               (!llm__is_on(node, "use_regex", true) ||
                                llm__put_line(v, llm__gpt2_words));
    if (llm__is_step(node, "Split"))
        return llm__put_step(v, name, llm__string(""), llm_json_member(node, "pattern"));
    if (llm__is_step(node, "Digits"))
        return llm__put_line(v, llm__is_on(node, "individual_digits", false) ? llm__each_digit
                                                                             : "Isolated \\p{N}+");
    if (llm__is_step(node, "Punctuation"))
        return llm__put_step(v, name, llm__string("[!-/:-@\\[-`{-~\\p{P}]"), NULL);
    if (llm__is_step(node, "WhitespaceSplit")) return llm__put_line(v, "Removed \\s");
    if (llm__is_step(node, "Metaspace"))
        return v->escapes = llm__read_metaspace(v, node, "pre_tokenizer", &prefix) &&
                            llm__put_line(v, llm__escape) &&
                            (!prefix || llm__put_line(v, prefix)) &&
                            (!llm__is_on(node, "split", true) ||
                             llm__put_line(v, "MergedWithNext \u2581"));
    return llm__refuse_step(v, "pre_tokenizer", node, "ByteLevel, Split, Digits, Punctuation, "
                                                      "Metaspace, WhitespaceSplit, Sequence");
}

static bool llm__read_decoder(llm__vocabulary *v, const llm_json_node *node) {
    uint64_t start = 0, stop = 0;
    const char *prefix = NULL;
    if (v->byte_level)
        return llm__is_step(node, "ByteLevel") ||
               llm__refuse_step(v, "decoder", node, "ByteLevel");
    if (llm__is_step(node, "Metaspace")) {
        bool ok = llm__read_metaspace(v, node, "decoder", &prefix);
        return v->drops_space = prefix != NULL, ok;
    }
    if (llm__is_step(node, "ByteFallback") || llm__is_step(node, "Fuse") ||
        (llm__is_step(node, "Replace") && llm__replaces(node, "\u2581", " ")))
        return true;
    if (llm__is_step(node, "Strip") && llm_json_is(llm_json_member(node, "content"), " ") &&
        llm_json_u64(llm_json_member(node, "start"), &start) && start <= 1 &&
        llm_json_u64(llm_json_member(node, "stop"), &stop) && !stop)
        return v->drops_space = start == 1, true;
    return llm__refuse_step(v, "decoder", node, "Metaspace, Replace (of U+2581 by a space), "
                            "ByteFallback, Fuse, Strip (of one leading space), Sequence");
}

/* The id of the token with this text; -1: none. */
static int32_t llm__vocabulary_find_text(const llm__vocabulary *v, llm_string text) {
    for (uint64_t id = 0; id < v->size; id++)
        if (v->kinds[id] && !llm__compare_strings(&v->texts[id], &text)) return (int32_t)id;
    return -1;
}

static int32_t llm__vocabulary_find(const llm__vocabulary *v, const llm_json_node *text) {
    llm_string wanted;
    if (llm_json_has_kind(text, LLM_JSON_OBJECT)) text = llm_json_member(text, "content");
    return llm_json_string(text, &wanted) ? llm__vocabulary_find_text(v, wanted) : -1;
}

/* ByteLevel changes only offsets, which are not used. In TemplateProcessing, "single" must be the
 * text, with at most one token (BOS) before it and one (EOS) after it. */
static bool llm__read_post_processor(llm__vocabulary *v, const llm_json_node *node) {
    const llm_json_node *items = llm_json_member(node, "single");
    bool text = false, ok = llm__is_step(node, "TemplateProcessing");
    if (llm__is_step(node, "ByteLevel")) return true;
    if (!ok)
        return llm__refuse_step(v, "post_processor", node,
                                "TemplateProcessing, ByteLevel, Sequence");
    for (const llm_json_node *item = llm_json_first(items); item && ok;
         item = llm_json_next(items, item)) {
        const llm_json_node *token = llm_json_member(item, "SpecialToken");
        int32_t id = llm__vocabulary_find(v, llm_json_member(token, "id"));
        bool *adds = text ? &v->adds_eos : &v->adds_bos;
        if (token) {
            ok = id >= 0 && !*adds;
            *adds = true;
            *(text ? &v->eos : &v->bos) = id;
        } else ok = !text && llm_json_member(item, "Sequence") && (text = true);
    }
    return (ok && text) ||
           llm__refuse_step(v, "post_processor", node,
                            "one that adds at most one token before the text and one after it");
}

static bool llm__add_entry(llm__vocabulary *v, uint64_t id, llm_string text, int32_t kind) {
    if (id >= v->size)
        return llm__bad(&v->in, "the token '%s' has no id, or one that leaves most ids below it "
                        "without a token", llm__show(text).text);
    if (v->kinds[id] && (kind == LLM__TOKEN_NORMAL || llm__compare_strings(&v->texts[id], &text)))
        return llm__bad(&v->in, "the tokens '%s' and '%s' have the same id, %llu",
                        llm__show(v->texts[id]).text, llm__show(text).text, (llm__big)id);
    v->texts[id] = text;
    v->kinds[id] = kind == LLM__TOKEN_NORMAL && v->byte_fallback && llm__parse_byte(text) >= 0
                       ? LLM__TOKEN_BYTE : kind;
    return true;
}

/* The node's id; UINT64_MAX: it is not an id. */
static uint64_t llm__entry_id(const llm_json_node *node) {
    uint64_t id;
    return llm_json_u64(node, &id) ? id : UINT64_MAX;
}

/* token: settings of the added token; NULL: the defaults. */
static bool llm__add_token(llm__vocabulary *v, uint64_t id, llm_string text,
                           const llm_json_node *token) {
    int32_t kind = llm__is_on(token, "special", false) ? LLM__TOKEN_CONTROL : LLM__TOKEN_USER;
    if (!text.length) return llm__bad(&v->in, "an entry of added_tokens has no content");
    if (llm__is_on(token, "single_word", false))
        return llm__unsupported(&v->in, "the added token '%s' is single_word, which is not "
                                "supported", llm__show(text).text);
    /* Hugging Face's library would search normalized text for the normalized token. */
    if (kind == LLM__TOKEN_USER && v->rewrites && llm__is_on(token, "normalized", true))
        return llm__unsupported(&v->in, "the added token '%s' is normalized, which is not "
                                "supported with steps such as Prepend", llm__show(text).text);
    if (!llm__add_entry(v, id, text, kind)) return false;
    v->strips[id] = (uint8_t)(llm__is_on(token, "lstrip", false) |
                              llm__is_on(token, "rstrip", false) << 1);
    return true;
}

/* Add a token from another file of the folder. An added token of tokenizer.json keeps its settings;
 * an ordinary one becomes an added token. */
static bool llm__add_beside(llm__vocabulary *v, uint64_t id, llm_string text,
                            const llm_json_node *token) {
    bool same = id < v->size && v->kinds[id] && !llm__compare_strings(&v->texts[id], &text);
    int32_t found = same ? (int32_t)id : llm__vocabulary_find_text(v, text);
    if (found >= 0 && (v->kinds[found] == LLM__TOKEN_CONTROL || v->kinds[found] == LLM__TOKEN_USER))
        return true;
    return llm__add_token(v, found >= 0 ? (uint64_t)found : id, text, token);
}

/* Read added tokens from the folder's other files. decoder: in tokenizer_config.json, {"96":
 * {"content": "<|x|>", ...}}. encoder: added_tokens.json, written by older tools, {"<|x|>": 96}. */
static bool llm__read_beside(llm__vocabulary *v, const llm_json_node *decoder,
                             const llm_json_node *encoder) {
    uint64_t first = v->size, end;
    while (first && !v->kinds[first - 1]) first--;
    for (const llm_json_node *token = llm_json_first(decoder); token;
         token = llm_json_next(decoder, token)) {
        llm_string text = {"", 0}, key = llm_json_key(token);
        uint64_t id = key.length ? 0 : UINT64_MAX;
        for (size_t i = 0; i < key.length && id != UINT64_MAX; i++)
            id = i < 9 && key.data[i] >= '0' && key.data[i] <= '9'
                     ? id * 10 + (uint64_t)(key.data[i] - '0') : UINT64_MAX;
        llm_json_string(llm_json_member(token, "content"), &text);
        if (!llm__add_beside(v, id, text, token)) return false;
    }
    for (const llm_json_node *id = llm_json_first(encoder); id; id = llm_json_next(encoder, id))
        if (!llm__add_beside(v, llm__entry_id(id), llm_json_key(id), NULL)) return false;
    for (end = v->size; end > first && !v->kinds[end - 1];) end--;
    for (; first < end; first++)
        if (!v->kinds[first])
            return llm__bad(&v->in, "the token '%s' in %s has the id %llu, but no token has the "
                            "id %llu", llm__show(v->texts[end - 1]).text,
                            decoder ? "tokenizer_config.json" : "added_tokens.json",
                            (llm__big)end - 1, (llm__big)first);
    return true;
}

static bool llm__read_entries(llm__vocabulary *v, const llm_json_node *vocab,
                              const llm_json_node *added) {
    const llm_json_node *decoder = llm_json_member(v->config.nodes, "added_tokens_decoder"),
                        *encoder = v->added.nodes;
    uint64_t next = 0;
    if (!llm_json_has_kind(decoder, LLM_JSON_OBJECT)) decoder = NULL;
    if (decoder || !llm_json_has_kind(encoder, LLM_JSON_OBJECT)) encoder = NULL;
    uint64_t n_beside = (decoder ? decoder->length : 0) + (uint64_t)(encoder ? encoder->length : 0);
    /* with room for some unused ids */
    v->size = ((uint64_t)vocab->length + (added ? added->length : 0) + n_beside) * 2 + 256;
    v->texts = (llm_string *)llm__new((size_t)v->size, sizeof *v->texts + sizeof *v->scores +
                                      sizeof *v->kinds + 1, "the vocabulary", v->in.error);
    if (!v->texts) return false;
    v->scores = (double *)(v->texts + v->size);
    v->kinds = (int32_t *)(v->scores + v->size);
    v->strips = (uint8_t *)(v->kinds + v->size);
    for (const llm_json_node *id = llm_json_first(vocab); id; id = llm_json_next(vocab, id)) {
        llm_string text = {"", 0};
        bool pair = v->unigram && id->length == 2 && llm_json_string(id + 1, &text) &&
                    llm_json_f64(id + 2, &v->scores[next]);
        if (v->unigram && !pair) return llm__bad(&v->in, "an entry of vocab is not a pair");
        if (!llm__add_entry(v, pair ? next++ : llm__entry_id(id), pair ? text : llm_json_key(id),
                            LLM__TOKEN_NORMAL))
            return false;
    }
    for (const llm_json_node *token = llm_json_first(added); token;
         token = llm_json_next(added, token)) {
        llm_string text = {"", 0};
        llm_json_string(llm_json_member(token, "content"), &text);
        if (!llm__add_token(v, llm__entry_id(llm_json_member(token, "id")), text, token))
            return false;
    }
    if (!llm__read_beside(v, decoder, encoder)) return false;
    while (v->size && !v->kinds[v->size - 1]) v->size--;
    if (!v->size) return llm__bad(&v->in, "the vocabulary is empty");
    for (uint64_t id = 0; id < v->size; id++)
        if (!v->kinds[id]) v->texts[id] = llm__string("");
    return true;
}

static bool llm__read_model(llm__vocabulary *v, const llm_json_node *model) {
    static const char *const parts[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const llm_json_node *type = llm_json_member(model, "type"),
                        *vocab = llm_json_member(model, "vocab"),
                        *added = llm__setting(v, "added_tokens"),
                        *unknown = llm_json_member(model, "unk_token");
    double dropout = 0;
    uint64_t id = UINT64_MAX;
    if (!llm_json_has_kind(model, LLM_JSON_OBJECT))
        return llm__bad(&v->in, "there is no tokenizer in this file (the object \"model\")");
    v->unigram = llm_json_is(type, "Unigram");
    if (type && !v->unigram && !llm_json_is(type, "BPE"))
        return llm__refuse_step(v, "model", model, "BPE, Unigram");
    for (int i = 0; i < 2; i++) {
        const llm_json_node *part = llm_json_member(model, parts[i]);
        if (!llm__is_null(part) && !llm_json_is(part, ""))
            return llm__unsupported(&v->in, "BPE with a %s is not supported", parts[i]);
    }
    if (llm_json_f64(llm_json_member(model, "dropout"), &dropout) && dropout != 0)
        return llm__unsupported(&v->in, "BPE with dropout is not supported");
    if (!llm_json_has_kind(vocab, v->unigram ? LLM_JSON_ARRAY : LLM_JSON_OBJECT) ||
        (!v->unigram && !llm_json_has_kind(llm_json_member(model, "merges"), LLM_JSON_ARRAY)))
        return llm__bad(&v->in, "the model has no vocab (an object) or no merges (an array)");
    if (!llm__is_null(added) && !llm_json_has_kind(added, LLM_JSON_ARRAY))
        return llm__bad(&v->in, "added_tokens is not an array");
    v->byte_fallback = llm__is_on(model, "byte_fallback", false);
    if (!llm__read_entries(v, vocab, added)) return false;
    v->unknown = llm__vocabulary_find(v, unknown);
    if (v->unigram && llm_json_u64(llm_json_member(model, "unk_id"), &id) && id < v->size)
        v->unknown = (int32_t)id;
    if (v->unknown < 0 && !llm__is_null(unknown))
        return llm__bad(&v->in, "unk_token is not one of the tokens");
    if (v->unknown >= 0 && !v->byte_level) v->kinds[v->unknown] = LLM__TOKEN_UNKNOWN;
    return true;
}

/* A merge is "a b" or ["a", "b"]. */
static bool llm__put_merges(llm__vocabulary *v, const llm_json_node *merges) {
    uint64_t n = 0, length;
    llm__note_key(v->m, v->byte_level ? "tokenizer.ggml.merges" : "tokenizer.llm.merges",
                  LLM_VALUE_ARRAY, LLM_VALUE_STRING, merges->length);
    for (const llm_json_node *rule = llm_json_first(merges); rule;
         rule = llm_json_next(merges, rule)) {
        llm_string left, right = {NULL, 0};
        bool one = llm_json_string(rule, &left), ok;
        if (one) ok = left.length > 2 && memchr(left.data + 1, ' ', left.length - 2);
        else
            ok = llm_json_has_kind(rule, LLM_JSON_ARRAY) && rule->length == 2 &&
                 llm_json_string(rule + 1, &left) && llm_json_string(rule + 2, &right) &&
                 left.length && right.length && !memchr(left.data, ' ', left.length) &&
                 !memchr(right.data, ' ', right.length);
        n++;
        if (!ok) return llm__bad(&v->in, "merge %llu is not a pair of tokens", (llm__big)n);
        length = left.length + !one + right.length;
        llm__note_bytes(v->m, &length, sizeof length);
        llm__note_bytes(v->m, left.data, left.length);
        llm__note_bytes(v->m, " ", !one);
        llm__note_bytes(v->m, right.data, right.length);
    }
    return true;
}

/* Compare the steps with the rule's. 0: different; 2: equal but for a leading NFC; 3: equal. */
static int llm__match_rule(const llm__vocabulary *v, const struct llm__rule *rule) {
    const char *const *step = rule->steps, *const *end = step + 6;
    int same = 1;
    if (*step && !strcmp(*step, "NFC")) step++, same = 0;
    for (uint64_t i = 0, at = 0, length; i < v->n_steps; i++, at += sizeof length + length) {
        memcpy(&length, v->steps.data + at, sizeof length);
        llm_string line = {(const char *)v->steps.data + at + sizeof length, (size_t)length};
        if (!i && llm__is_text(line, "NFC")) same = !same;
        else if (step == end || !*step || !llm__is_text(line, *step++)) return 0;
    }
    return step == end || !*step ? 2 + same : 0;
}

/* Write GGUF's name for the rule closest to these steps, and what it does not imply. */
static void llm__put_rule(llm__vocabulary *v, bool ignores_merges) {
    const struct llm__rule *rule = llm__rules, *best = NULL;
    int fit = 0, most = 0;
    for (; v->byte_level && rule < llm__rules + LLM__N_RULES; rule++) {
        if (!(fit = 2 * llm__match_rule(v, rule))) continue;
        fit += (rule->flags & LLM__RULE_NO_MERGES) == (unsigned)ignores_merges;
        if (fit > most) most = fit, best = rule;
    }
    if (best) {
        llm_string name = {best->names, strcspn(best->names, " ")};
        llm__note_string(v->m, "tokenizer.ggml.pre", name);
    }
    if (most < 6)
        llm__note_array(v->m, "tokenizer.llm.steps", LLM_VALUE_STRING, v->steps.data, v->n_steps,
                        v->steps.length);
    if (most % 2 == 0) llm__note_bool(v->m, "tokenizer.llm.ignore_merges", ignores_merges);
}

/* Write the list v->ids, and clear it. */
static void llm__put_ids(llm__vocabulary *v, const char *key) {
    if (v->ids.length)
        llm__note_array(v->m, key, LLM_VALUE_I32, v->ids.data, v->ids.length / 4, v->ids.length);
    v->ids.length = 0;
}

static bool llm__put_strips(llm__vocabulary *v, uint8_t side, const char *key) {
    for (uint64_t id = 0; id < v->size; id++) {
        int32_t number = (int32_t)id;
        if (v->strips[id] & side && !llm__append(&v->ids, &number, sizeof number, v->in.error))
            return false;
    }
    return llm__put_ids(v, key), true;
}

/* Read the id of the token that the key names. A text that is not a token is an error, since a
 * missing end token would never be recognized. */
static bool llm__read_named(const llm__vocabulary *v, const char *key, int32_t *id) {
    const llm_json_node *node = llm_json_member(v->config.nodes, key);
    llm_string text = {"", 0};
    int32_t found = llm__vocabulary_find(v, node);
    if (llm_json_has_kind(node, LLM_JSON_OBJECT)) node = llm_json_member(node, "content");
    if (found < 0 && llm_json_string(node, &text) && text.length)
        return llm__bad(&v->in, "the %s in tokenizer_config.json, '%s', is not one of the "
                        "tokens", key, llm__show(text).text);
    if (found >= 0) *id = found;
    return true;
}

/* node: the template, or an array of named ones, of which "default" is used. */
static bool llm__config_template(const llm_json_node *node, llm_string *text) {
    for (const llm_json_node *item = llm_json_has_kind(node, LLM_JSON_ARRAY) ? llm_json_first(node)
                                                                             : NULL;
         item; item = llm_json_next(node, item))
        if (llm_json_is(llm_json_member(item, "name"), "default"))
            return llm_json_string(llm_json_member(item, "template"), text);
    return llm_json_string(node, text);
}

static bool llm__put_named(llm__vocabulary *v) {
    const llm_json_node *config = v->config.nodes;
    if (!llm__read_named(v, "bos_token", &v->bos) || !llm__read_named(v, "eos_token", &v->eos))
        return false;
    v->adds_bos = llm__is_on(config, "add_bos_token", v->adds_bos) && v->bos >= 0;
    v->adds_eos = llm__is_on(config, "add_eos_token", v->adds_eos) && v->eos >= 0;
    if (v->bos >= 0) llm__note_u32(v->m, "tokenizer.ggml.bos_token_id", (uint32_t)v->bos);
    if (v->eos >= 0) llm__note_u32(v->m, "tokenizer.ggml.eos_token_id", (uint32_t)v->eos);
    if (v->unknown >= 0)
        llm__note_u32(v->m, "tokenizer.ggml.unknown_token_id", (uint32_t)v->unknown);
    llm__note_bool(v->m, "tokenizer.ggml.add_bos_token", v->adds_bos);
    llm__note_bool(v->m, "tokenizer.ggml.add_eos_token", v->adds_eos);
    if (!v->byte_level) {
        llm__note_bool(v->m, "tokenizer.ggml.add_space_prefix", v->drops_space);
        llm__note_bool(v->m, "tokenizer.llm.drops_space", v->drops_space);
        llm__note_bool(v->m, "tokenizer.llm.fuse_unknown",
                       llm__is_on(llm__setting(v, "model"), "fuse_unk", v->unigram));
    }
    return llm__put_strips(v, 1, "tokenizer.llm.strip_left") &&
           llm__put_strips(v, 2, "tokenizer.llm.strip_right");
}

static bool llm__put_vocabulary(llm__vocabulary *v) {
    static const char *const known[] = {"version",        "truncation", "padding",
                                        "added_tokens",   "normalizer", "pre_tokenizer",
                                        "post_processor", "decoder",    "model"};
    const llm_json_node *root = v->json.nodes, *model = llm__setting(v, "model");
    bool object = llm_json_has_kind(root, LLM_JSON_OBJECT);
    if (!model && (llm__setting(v, "model_type") || llm__setting(v, "weight_map")))
        return llm__bad(&v->in, "this file is only a part of a model; give its folder");
    for (const llm_json_node *item = object ? llm_json_first(root) : NULL; item;
         item = llm_json_next(root, item)) {
        size_t i = 0;
        while (i < 9 && !llm_json_is(item - 1, known[i])) i++;
        if (i == 9)
            return llm__unsupported(&v->in, "'%s' is not a known part of a tokenizer.json",
                                    llm__show(llm_json_key(item)).text);
    }
    if (!llm__read_steps(v, llm__setting(v, "normalizer"), "normalizers", llm__read_normalizer) ||
        !llm__read_steps(v, llm__setting(v, "pre_tokenizer"), "pretokenizers",
                         llm__read_pre_tokenizer) ||
        (v->spelled && !llm__put_line(v, "!Spell")) || !llm__read_model(v, model))
        return false;
    if (v->byte_level ? v->escapes || v->byte_fallback || v->unigram : !v->escapes)
        return llm__unsupported(&v->in, "this combination of normalizer and pre_tokenizer is not "
                                "supported; supported: byte-level BPE (ByteLevel), and "
                                "SentencePiece BPE and Unigram (U+2581 for spaces)");
    if (!llm__read_steps(v, llm__setting(v, "decoder"), "decoders", llm__read_decoder) ||
        !llm__read_steps(v, llm__setting(v, "post_processor"), "processors",
                         llm__read_post_processor))
        return false;
    llm__note_string(v->m, "tokenizer.ggml.model",
                     llm__string(v->unigram ? "t5" : v->byte_level ? "gpt2" : "llama"));
    llm__put_rule(v, llm__is_on(model, "ignore_merges", false));
    llm__note_key(v->m, "tokenizer.ggml.tokens", LLM_VALUE_ARRAY, LLM_VALUE_STRING, v->size);
    for (uint64_t id = 0; id < v->size; id++) {
        llm__note_text(v->m, v->texts[id]);
        if (!v->kinds[id]) v->kinds[id] = LLM__TOKEN_UNUSED;
        /* For other programs: -id, as in SentencePiece's own files. Earlier merges usually make
         * tokens with lower ids. */
        if (!v->unigram && v->kinds[id] == LLM__TOKEN_NORMAL) v->scores[id] = -(double)id;
    }
    llm__note_array(v->m, "tokenizer.ggml.token_type", LLM_VALUE_I32, v->kinds, v->size,
                    (size_t)v->size * sizeof *v->kinds);
    if (!v->byte_level)
        llm__note_key(v->m, "tokenizer.ggml.scores", LLM_VALUE_ARRAY,
                      v->unigram ? LLM_VALUE_F64 : LLM_VALUE_F32, v->size);
    for (uint64_t id = 0; !v->byte_level && id < v->size; id++) {
        float score = (float)v->scores[id];
        llm__note_bytes(v->m, v->unigram ? (void *)&v->scores[id] : &score, v->unigram ? 8 : 4);
    }
    return (v->unigram || llm__put_merges(v, llm_json_member(model, "merges"))) &&
           llm__put_named(v);
}

/* ---- The folder of a tokenizer.json ---- */

static bool llm__has_id(const llm__bytes *ids, int32_t id) {
    for (size_t at = 0; at < ids->length; at += sizeof id)
        if (!memcmp(ids->data + at, &id, sizeof id)) return true;
    return false;
}

/* Add the end tokens in "eos_token_id", one id or a list. "bos_token_id" is only checked. */
static bool llm__add_ends(llm__vocabulary *v, const char *folder, const char *name) {
    static const char *const keys[] = {"bos_token_id", "eos_token_id"};
    llm_json json;
    bool found, ok = llm__read_json(&json, folder, name, &found, v->in.error);
    for (int i = 0; ok && i < 2; i++) {
        const llm_json_node *ids = llm__folder_entry(json.nodes, keys[i]);
        bool list = llm_json_has_kind(ids, LLM_JSON_ARRAY);
        const llm_json_node *node = list ? llm_json_first(ids) : ids;
        for (; ok && node; node = list ? llm_json_next(ids, node) : NULL) {
            uint64_t id;
            if (!llm_json_u64(node, &id) || id >= v->size) {
                ok =
                    llm__fail(v->in.error, LLM_ERROR_FORMAT,
                              "%s/%s: \"%s\" is %s, which is not the id of one of the %llu tokens: "
                              "correct it, or remove the key if tokenizer_config.json says it",
                              folder, name, keys[i], llm__show_node(node).text, (llm__big)v->size);
            } else if (i == 1 && !llm__has_id(&v->ids, (int32_t)id)) {
                int32_t number = (int32_t)id;
                ok = llm__append(&v->ids, &number, sizeof number, v->in.error);
            }
        }
    }
    llm_json_free(&json);
    return ok;
}

/* Read additional end tokens and the chat template from the other files of the folder. */
static bool llm__put_siblings(llm__vocabulary *v, const char *folder) {
    llm_string jinja, text;
    bool found = false;
    if (!llm__add_ends(v, folder, "generation_config.json") ||
        !llm__add_ends(v, folder, "config.json"))
        return false;
    llm__put_ids(v, "tokenizer.llm.end_token_ids");
    char *path = llm__join(folder, "chat_template.jinja", v->in.error);
    bool ok = path && llm__map_text(path, &jinja, &found, v->in.error);
    LLM_FREE(path);
    if (!ok) return false;
    text = jinja;
    if (found || llm__config_template(llm_json_member(v->config.nodes, "chat_template"), &text))
        llm__note_string(v->m, "tokenizer.chat_template", text);
    llm__release(jinja.data, jinja.length, LLM__MAPPED);
    return true;
}

/* Append the GGUF values to m. folder: where the other files are; NULL: they are not read. */
static bool llm__translate_vocabulary(llm__metadata *m, const void *text, size_t length,
                                      const char *name, const char *folder, llm_error *err) {
    llm__vocabulary v;
    bool found, ok = true;
    memset(&v, 0, sizeof v);
    v.in.path = (char *)(uintptr_t)name;
    v.in.error = err;
    v.m = m;
    v.bos = v.eos = v.unknown = -1;
    if (folder)
        ok = llm__read_json(&v.config, folder, "tokenizer_config.json", &found, err) &&
             llm__read_json(&v.added, folder, "added_tokens.json", &found, err);
    ok = ok && llm_json_parse(&v.json, (const char *)text, length, name, err) &&
         llm__put_vocabulary(&v) && (!folder || llm__put_siblings(&v, folder));
    llm_json_free(&v.json);
    llm_json_free(&v.config);
    llm_json_free(&v.added);
    LLM_FREE(v.texts);
    LLM_FREE(v.ids.data);
    LLM_FREE(v.steps.data);
    return ok;
}

static bool llm__folder_vocabulary(llm__metadata *m, const char *folder, llm_error *err) {
    llm_string text = {NULL, 0};
    bool found = false;
    char *path = llm__join(folder, "tokenizer.json", err);
    bool ok = path && llm__map_text(path, &text, &found, err);
    if (ok && !found)
        ok = llm__fail(
            err, LLM_ERROR_FILE, "cannot open %s: it is a directory without a tokenizer.json%s",
            folder,
            llm__folder_has(folder, "tokenizer.model")
                ? "; there is a tokenizer.model, which is not read: with Hugging Face's "
                  "transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) "
                  "makes a tokenizer.json of it"
                : "");
    ok = ok && llm__translate_vocabulary(m, text.data, text.length, path, folder, err);
    llm__release(text.data, text.length, LLM__MAPPED);
    LLM_FREE(path);
    return ok;
}

/* Open a tokenizer.json, and its folder's other files, as a file without tensors. */
static llm_file *llm__vocabulary_open(const void *text, uint64_t length, const char *path,
                                      llm_error *err) {
    llm_file *file = (llm_file *)llm__new(1, sizeof *file, "a file", err);
    llm__metadata m;
    memset(&m, 0, sizeof m);
    char *parent = llm__copy_text(path, "", err), *slash = parent ? strrchr(parent, '/') : NULL;
    if (slash) *slash = 0;
    bool ok = file && parent && (file->path = llm__copy_text(path, "", err)) != NULL &&
              llm__translate_vocabulary(&m, text, (size_t)length, path,
                                        slash ? (*parent ? parent : "/") : ".", err) &&
              llm__read_metadata(&m, file, err);
    LLM_FREE(m.bytes.data);
    LLM_FREE(parent);
    if (ok) return file->folder = true, file;
    llm_file_close(file);
    return NULL;
}

/* ---- Merging ---- */

typedef struct llm__symbol { /* a piece of a word, in a doubly linked list */
    int32_t previous, next;  /* indexes of its neighbours; -1: none */
    int32_t start, length;   /* bytes in the word; length 0: joined to the left neighbour */
    int32_t id;              /* token id; -1: none */
} llm__symbol;

typedef struct llm__candidate { /* two neighbours that form a token */
    double cost;             /* merge rank or -score; the lowest is joined first */
    int32_t left;            /* index of the left symbol; its `next` is the right symbol */
    int32_t length;          /* bytes of both symbols when it was pushed */
    int32_t result;          /* id of the joined token */
} llm__candidate;

typedef struct llm__known_word { /* a short word and its tokens */
    uint8_t length, n_ids;   /* bytes of text, 0: free entry; number of tokens */
    char text[30];           /* (length) the word */
    int32_t ids[8];          /* (n_ids) its tokens */
} llm__known_word;

typedef struct llm__work {   /* scratch of one step */
    llm__matcher matcher;
    llm__bytes text;         /* the text as the step rewrote it */
} llm__work;

typedef struct llm__tokenizing { /* the state of a call of llm_tokenize */
    const llm_tokenizer *t;
    const uint8_t *word;     /* the word being merged */
    llm__symbol *symbols;    /* (n_symbols) pieces of the word */
    int64_t n_symbols, symbol_capacity;
    llm__candidate *heap;    /* (n_heap) a heap: entry i has the children 2i + 1 and 2i + 2 */
    int64_t n_heap, heap_capacity;
    llm__work *work;         /* (t->n_steps) */
    llm__codes codes;        /* scratch of llm__normalize */
    llm__known_word *known;  /* (known_mask + 1) cached words, by hash */
    uint64_t known_mask;
    int32_t *ids;            /* (capacity) tokens: the caller's array, or one allocated here */
    int64_t n_ids, capacity; /* n_ids may exceed capacity: all tokens are counted */
    bool grows;              /* ids is allocated here */
    llm_error *err;
} llm__tokenizing;

static void llm__emit(llm__tokenizing *z, int32_t id) {
    if (z->grows) /* if memory runs out, n_ids will exceed capacity */
        z->grows = llm__grow(&z->ids, z->n_ids, &z->capacity, sizeof id, "token ids", z->err);
    if (z->n_ids < z->capacity) z->ids[z->n_ids] = id;
    z->n_ids++;
}

/* Is a joined before b? Of equal costs, the left one is. */
static bool llm__before(const llm__candidate *a, const llm__candidate *b) {
    return a->cost < b->cost || (a->cost == b->cost && a->left < b->left);
}

static bool llm__heap_push(llm__tokenizing *z, llm__candidate c) {
    if (!llm__grow(&z->heap, z->n_heap, &z->heap_capacity, sizeof *z->heap, "pairs of tokens",
                   z->err))
        return false;
    int64_t i = z->n_heap++;
    for (; i && llm__before(&c, &z->heap[(i - 1) / 2]); i = (i - 1) / 2)
        z->heap[i] = z->heap[(i - 1) / 2];
    z->heap[i] = c;
    return true;
}

static llm__candidate llm__heap_pop(llm__tokenizing *z) {
    llm__candidate best = z->heap[0], last = z->heap[--z->n_heap];
    int64_t i = 0, child;
    while ((child = 2 * i + 1) < z->n_heap) {
        if (child + 1 < z->n_heap && llm__before(&z->heap[child + 1], &z->heap[child])) child++;
        if (!llm__before(&z->heap[child], &last)) break;
        z->heap[i] = z->heap[child];
        i = child;
    }
    z->heap[i] = last;
    return best;
}

static int32_t llm__find_piece(const llm_tokenizer *t, const uint8_t *text, int32_t length) {
    llm_string s = {(const char *)text, (size_t)length};
    int32_t id = llm__find_token(t, s);
    return id >= 0 && llm__is_piece(t, id) ? id : -1;
}

/* Push the pair of a symbol and its right neighbour if they form a token. */
static bool llm__consider(llm__tokenizing *z, int32_t left) {
    const llm_tokenizer *t = z->t;
    if (left < 0 || z->symbols[left].next < 0) return true;
    const llm__symbol *a = &z->symbols[left], *b = &z->symbols[a->next];
    llm__candidate c = {0, left, a->length + b->length, -1};
    if (t->scores) {
        c.result = llm__find_piece(t, z->word + a->start, c.length);
        if (c.result >= 0) c.cost = -(double)t->scores[c.result];
    } else if (a->id >= 0 && b->id >= 0) {
        const llm__merge_rule *rule = llm__find_merge(t, a->id, b->id);
        if (rule->rank) c.result = rule->result;
        c.cost = rule->rank;
    }
    return c.result < 0 || llm__heap_push(z, c);
}

/* Join neighbours, the best pair first. A candidate is stale if its symbols have changed since the
 * push: they only grow, so its length no longer matches. */
static bool llm__merge(llm__tokenizing *z) {
    z->n_heap = 0;
    for (int32_t i = 0; i < z->n_symbols; i++)
        if (!llm__consider(z, i)) return false;
    while (z->n_heap) {
        llm__candidate c = llm__heap_pop(z);
        llm__symbol *left = &z->symbols[c.left];
        if (!left->length || left->next < 0) continue;
        llm__symbol *right = &z->symbols[left->next];
        if (left->length + right->length != c.length) continue;
        left->id = c.result;
        left->length = c.length;
        left->next = right->next;
        right->length = 0;
        if (left->next >= 0) z->symbols[left->next].previous = c.left;
        if (!llm__consider(z, left->previous) || !llm__consider(z, c.left)) return false;
    }
    return true;
}

static bool llm__add_symbol(llm__tokenizing *z, size_t start, size_t length, int32_t id) {
    if (!llm__grow(&z->symbols, z->n_symbols, &z->symbol_capacity, sizeof *z->symbols,
                   "pieces of text", z->err))
        return false;
    int32_t i = (int32_t)z->n_symbols++;
    llm__symbol symbol = {i - 1, -1, (int32_t)start, (int32_t)length, id};
    if (i) z->symbols[i - 1].next = i;
    z->symbols[i] = symbol;
    return true;
}

/* Emit a character without a token as byte tokens or, if one is missing, as the unknown token.
 * *unknown (updated): was the last piece unknown? */
static bool llm__emit_bytes(llm__tokenizing *z, const uint8_t *text, int32_t length,
                            bool *unknown) {
    const llm_tokenizer *t = z->t;
    if (length == 3 && !memcmp(text, "\u2581", 3) && t->scores && !t->unigram) { /* a space */
        text = (const uint8_t *)" ";
        length = 1;
    }
    for (int32_t i = 0; i < length; i++) {
        if (t->bytes[text[i]] >= 0) continue;
        if (t->unknown >= 0) {
            if (!*unknown || !t->fuses_unknown) llm__emit(z, t->unknown);
            return *unknown = true;
        }
        return llm__fail(
            z->err, LLM_ERROR_UNSUPPORTED,
            "%s: the vocabulary has no token for the byte 0x%02X, and no unknown token",
            t->name, text[i]);
    }
    for (int32_t i = 0; i < length; i++) llm__emit(z, t->bytes[text[i]]);
    *unknown = false;
    return true;
}

static bool llm__emit_symbols(llm__tokenizing *z) {
    bool unknown = false;
    for (int32_t i = z->n_symbols ? 0 : -1; i >= 0; i = z->symbols[i].next) {
        const llm__symbol *symbol = &z->symbols[i];
        if (symbol->id < 0) {
            if (!llm__emit_bytes(z, z->word + symbol->start, symbol->length, &unknown))
                return false;
            continue;
        }
        llm__emit(z, symbol->id);
        unknown = false;
    }
    return true;
}

/* Cut the word into bytes ("gpt2") or characters ("llama"). */
static bool llm__add_symbols(llm__tokenizing *z, size_t n) {
    const llm_tokenizer *t = z->t;
    z->n_symbols = 0;
    for (size_t at = 0, length; at < n; at += length) {
        uint32_t code = 0;
        length = t->byte_level ? 1 : llm__utf8(z->word + at, n - at, &code);
        if (code >= LLM__UTF8_INVALID) length = 1;
        int32_t id = t->byte_level            ? t->bytes[z->word[at]]
                     : code < LLM__UTF8_INVALID ? llm__find_piece(t, z->word + at, (int32_t)length)
                                                : -1;
        if (!llm__add_symbol(z, at, length, id)) return false;
    }
    return true;
}

/* Cut the word into the tokens with the highest sum of scores (Unigram, by Viterbi's algorithm).
 * Entry i of the heap is the best path to byte i: its cost, its last token and that token's
 * start. */
static bool llm__add_best_path(llm__tokenizing *z, size_t n) {
    const llm_tokenizer *t = z->t;
    while ((size_t)z->heap_capacity <= n)
        if (!llm__grow(&z->heap, z->heap_capacity, &z->heap_capacity, sizeof *z->heap,
                       "paths through a text", z->err))
            return false;
    llm__candidate *best = z->heap;
    for (size_t i = 0; i <= n; i++) best[i].left = -1;
    best[0].cost = 0;
    for (size_t at = 0, step; at < n; at += step) {
        uint32_t code;
        step = llm__utf8(z->word + at, n - at, &code);
        for (size_t length = 1; length <= t->longest && at + length <= n; length++) {
            int32_t id = llm__find_piece(t, z->word + at, (int32_t)length);
            if (id < 0 && length != step) continue;
            double cost = best[at].cost + (id < 0 ? t->unknown_cost : -t->scores[id]);
            llm__candidate path = {cost, (int32_t)at, 0, id};
            if (best[at + length].left < 0 || cost < best[at + length].cost)
                best[at + length] = path;
        }
    }
    for (size_t at = n; at; at = (size_t)best[at].left) best[best[at].left].length = (int32_t)at;
    z->n_symbols = 0;
    for (size_t at = 0, next; at < n; at = next) {
        next = (size_t)best[at].length;
        if (!llm__add_symbol(z, at, next - at, best[next].result)) return false;
    }
    return true;
}

/* The token whose text is the whole word; -1: none. */
static int32_t llm__find_word(const llm_tokenizer *t, const uint8_t *word, size_t n) {
    char spelled[512];
    if (n > t->longest || n > sizeof spelled / 2) return -1;
    if (!t->byte_level) return llm__find_piece(t, word, (int32_t)n);
    size_t length = 0;
    for (size_t i = 0; i < n; i++) {
        if (t->bytes[word[i]] < 0) return -1;
        llm_string letter = t->texts[t->bytes[word[i]]];
        for (size_t k = 0; k < letter.length; k++) spelled[length++] = letter.data[k];
    }
    return llm__find_piece(t, (const uint8_t *)spelled, (int32_t)length);
}

/* Emit the tokens of a word. Those of short words are cached. */
static bool llm__tokenize_word(llm__tokenizing *z, const uint8_t *word, size_t n) {
    llm__known_word *known = NULL;
    if (n <= sizeof known->text)
        known = &z->known[llm__hash_bytes(z->t->seed, (const char *)word, n) & z->known_mask];
    if (known && known->length == n && !memcmp(known->text, word, n)) {
        for (int i = 0; i < known->n_ids; i++) llm__emit(z, known->ids[i]);
        return true;
    }
    int64_t first = z->n_ids;
    int32_t whole = z->t->ignores_merges ? llm__find_word(z->t, word, n) : -1;
    z->word = word;
    if (whole >= 0) llm__emit(z, whole);
    else if (!(z->t->unigram ? llm__add_best_path(z, n)
                             : llm__add_symbols(z, n) && llm__merge(z)) || !llm__emit_symbols(z))
        return false;
    int64_t n_ids = z->n_ids - first;
    if (!known || n_ids > (int64_t)(sizeof known->ids / sizeof *known->ids) ||
        z->n_ids > z->capacity)
        return true;
    known->length = (uint8_t)n;
    known->n_ids = (uint8_t)n_ids;
    memcpy(known->text, word, n);
    memcpy(known->ids, z->ids + first, (size_t)n_ids * sizeof *z->ids);
    return true;
}

/* ---- Running the steps ---- */

enum { LLM__AT_START = 1, LLM__AFTER_CONTROL = 2 }; /* bits: what is before a text */

static bool llm__run_steps(llm__tokenizing *z, int64_t i, const uint8_t *text, size_t n,
                           unsigned where);

static llm__matcher *llm__matcher_begin(llm__tokenizing *z, int64_t i, const uint8_t *text,
                                        size_t n) {
    llm__matcher *m = &z->work[i].matcher;
    m->e = z->t->steps[i].expression;
    m->text = text;
    m->n = (int32_t)n;
    m->steps = 10000 + 100 * (int64_t)n;
    m->name = z->t->name;
    m->err = z->err;
    return m;
}

/* Split the text by step i, and run the later steps on each piece. Parts are matches and the texts
 * between them; a part may join the piece before it. */
static bool llm__split(llm__tokenizing *z, int64_t i, const uint8_t *text, size_t n,
                       unsigned where) {
    const llm__text_step *step = &z->t->steps[i];
    llm__matcher *m = llm__matcher_begin(z, i, text, n);
    int32_t piece = 0, at = 0, after = -1, part[3] = {0, 0, 0}; /* part: text, match, end */
    bool was_match = false, drops = false, found = true;
    for (; found; at = after = part[2]) {
        part[0] = part[1] = at;
        found = llm__find(m, after, &part[1], &part[2]);
        if (m->failed) return false;
        for (int k = 0; k < 1 + found; k++) {
            if (!k && part[0] == part[1]) continue;
            bool matches = k != step->inverted;
            bool joins = step->kind == LLM__STEP_CONTIGUOUS ? matches == was_match
                         : step->kind == LLM__STEP_PREVIOUS ? matches && !was_match
                         : step->kind == LLM__STEP_NEXT     ? was_match && !matches
                                                            : false;
            was_match = matches;
            if (joins) continue;
            if (!drops && !llm__run_steps(z, i + 1, text + piece, (size_t)(part[k] - piece),
                                          piece ? 0 : where))
                return false;
            piece = part[k];
            drops = step->kind == LLM__STEP_REMOVED && matches;
        }
    }
    return drops || llm__run_steps(z, i + 1, text + piece, n - (size_t)piece, piece ? 0 : where);
}

static bool llm__replace(llm__tokenizing *z, int64_t i, const uint8_t *text, size_t n,
                         llm__bytes *out) {
    llm_string content = z->t->steps[i].text;
    llm__matcher *m = llm__matcher_begin(z, i, text, n);
    int32_t at = 0, begin, end = -1;
    while (begin = at, llm__find(m, end, &begin, &end)) {
        if (!llm__append(out, text + at, (size_t)(begin - at), z->err) ||
            !llm__append(out, content.data, content.length, z->err))
            return false;
        at = end;
    }
    return !m->failed && llm__append(out, text + at, n - (size_t)at, z->err);
}

/* A character's place in a grapheme cluster: 0 alone, 1 base, 2 after a base (marks). */
static int llm__place_in_cluster(const llm__unicode *u, uint32_t c) {
    if (c == 0x200C || c == 0x200D) return 2;
    if (c >= LLM__UTF8_INVALID) return 0;
    int category = u->categories[llm__rank(u->ends, LLM__N_RUNS, 1, c)];
    return category == 6 ? 2 : category > 0;
}

/* Replace the longest match in the table, as SentencePiece does. Inverted, as in Hugging Face's
 * library: replace a character and its marks by the table's entry for their shortest prefix, or the
 * character alone if they have 6 bytes or more. The trie is a double array as in Darts-clone: the
 * child for a byte is at node ^ offset ^ byte, and holds the byte in its low 8 bits. */
static bool llm__replace_mapped(llm__tokenizing *z, const llm__text_step *step,
                                const uint8_t *text, size_t n, llm__bytes *out) {
    const llm__unicode *u = z->t->unicode;
    llm_string table = step->text;
    uint64_t count = llm__charsmap_unit(table, 0) / 4;
    for (size_t at = 0, length, most, more; at < n; at += length) {
        uint32_t code, unit = llm__charsmap_unit(table, 1);
        uint64_t node = 0;
        length = most = llm__utf8(text + at, n - at, &code);
        llm_string with = {(const char *)text + at, length};
        if (code >= LLM__UTF8_INVALID) with = llm__string("\uFFFD");
        int place = llm__place_in_cluster(u, code);
        for (; step->inverted && at + most < n && most < 6; most += more) {
            more = llm__utf8(text + at + most, n - at - most, &code);
            bool joins = place && (place == 1 || !at) && llm__place_in_cluster(u, code) == 2;
            if (!joins && !(text[at] == '\r' && code == '\n')) break;
        }
        if (!step->inverted) most = 256;
        else if (most > 5) most = length;
        for (size_t i = at; i < n && i < at + most; i++) {
            node ^= (uint64_t)(unit >> 10) << (unit >> 6 & 8) ^ text[i];
            if (node >= count) break;
            unit = llm__charsmap_unit(table, 1 + node);
            if ((unit & 0x800000FF) != text[i]) break;
            uint64_t leaf = node ^ (uint64_t)(unit >> 10) << (unit >> 6 & 8);
            if (!(unit & 0x100) || leaf >= count) continue;
            leaf = 4 + 4 * count + (llm__charsmap_unit(table, 1 + leaf) & 0x7FFFFFFF);
            llm_string found = llm__string(leaf < table.length ? table.data + leaf : "");
            if (leaf >= table.length || found.length > 255) break; /* real ones have at most 60 */
            with = found;
            length = step->inverted ? most : i + 1 - at;
            if (step->inverted) break;
        }
        if (!llm__append(out, with.data, with.length, z->err)) return false;
    }
    return true;
}

/* Lowercase; Spell, which writes each byte as a character; !Spell, which undoes that. */
static bool llm__rewrite(llm__tokenizing *z, const llm__text_step *step, const uint8_t *text,
                         size_t n, llm__bytes *out) {
    bool lowers = step->kind == LLM__STEP_LOWERCASE, spells = !lowers && !step->inverted;
    for (size_t at = 0, length; at < n; at += length) {
        uint32_t c, limit = lowers ? LLM__UTF8_INVALID : 324;
        char utf8[6] = "i\xCC\x87"; /* lower case of U+0130, the only one with two characters */
        length = llm__utf8(text + at, n - at, &c);
        if (spells) length = 1, c = text[at];
        llm_string with = {(const char *)text + at, length};
        if (c < limit) {
            with.data = utf8;
            if (spells) with.length = llm__put_utf8(llm__spelling(c), utf8);
            else if (!lowers) with.length = 1, *utf8 = (char)z->t->spelled[c];
            else with.length = c == 0x130 ? 3 : llm__put_utf8(llm__lower_case(z->t->unicode, c),
                                                              utf8);
        }
        if (!llm__append(out, with.data, with.length, z->err)) return false;
    }
    return true;
}

static bool llm__run_steps(llm__tokenizing *z, int64_t i, const uint8_t *text, size_t n,
                           unsigned where) {
    if (!n) return true;
    if (i == z->t->n_steps) return llm__tokenize_word(z, text, n);
    const llm__text_step *step = &z->t->steps[i];
    llm__bytes *out = &z->work[i].text;
    size_t begin = 0, end = n;
    bool ok = true, has = n >= step->text.length &&
                          !memcmp(text, step->text.data, step->text.length);
    if (n > INT32_MAX)
        return llm__fail(z->err, LLM_ERROR_ARGUMENT, "a text is too long to be tokenized at once");
    out->length = 0;
    if (step->kind < LLM__STEP_REPLACE) return llm__split(z, i, text, n, where);
    if (step->kind == LLM__STEP_REPLACE) ok = llm__replace(z, i, text, n, out);
    else if (step->normalizer)
        ok = llm__normalize(step->normalizer, text, n, &z->codes, out, z->err);
    else if (step->kind == LLM__STEP_LOWERCASE || step->kind == LLM__STEP_SPELL)
        ok = llm__rewrite(z, step, text, n, out);
    else if (step->kind == LLM__STEP_CHARSMAP) 
        ok = llm__replace_mapped(z, step, text, n, out);
    else {
        uint32_t c;
        size_t length = 0;
        if (step->kind == LLM__STEP_STRIP_LEFT)
            while (begin < n && (length = llm__utf8(text + begin, n - begin, &c), llm__is_space(c)))
                begin += length;
        else if (step->kind == LLM__STEP_STRIP_RIGHT)
            for (size_t at = end = 0; at < n; at += length) {
                length = llm__utf8(text + at, n - at, &c);
                if (!llm__is_space(c)) end = at + length;
            }
        else if (step->kind == LLM__STEP_PREPEND ||
                 (step->kind == LLM__STEP_PREPEND_START && where & LLM__AFTER_CONTROL) ||
                 (step->kind == LLM__STEP_PREPEND_FIRST && where & LLM__AT_START && !has) ||
                 (step->kind == LLM__STEP_PREPEND_EACH && !has))
            ok = llm__append(out, step->text.data, step->text.length, z->err);
        ok = ok && llm__append(out, text + begin, end - begin, z->err);
    }
    return ok && llm__run_steps(z, i + 1, out->data, out->length, where);
}

/* Find the longest token in specials[all] that the text begins with; returns its length, 0: none.
 * The tokens that match so far are a range of the sorted list, narrowed by two binary searches per
 * byte. Only its first token, the shortest, can end at this byte. */
static size_t llm__match_special(const llm_tokenizer *t, bool all, const uint8_t *text, size_t n,
                                 int32_t *id) {
    const llm_string *const *names = t->specials[all];
    int64_t begin = 0, end = t->n_specials[all];
    size_t matched = 0;
    for (size_t depth = 0; depth < n && begin < end; depth++) {
        /* find the first name whose byte is >= the text's, then the first where it is > */
        for (int side = 0; side < 2; side++) {
            int64_t low = begin, high = end;
            while (low < high) {
                int64_t middle = low + (high - low) / 2;
                int byte = names[middle]->length > depth ? (uint8_t)names[middle]->data[depth] : -1;
                if (byte < text[depth] + side) low = middle + 1;
                else high = middle;
            }
            if (side) end = low;
            else begin = low;
        }
        if (begin < end && names[begin]->length == depth + 1) {
            matched = depth + 1;
            *id = (int32_t)(names[begin] - t->texts);
        }
    }
    return matched;
}

/* Byte offsets in a text. Arrays of ranges are sorted and disjoint. */
typedef struct llm__range {
    size_t begin, end;
} llm__range;

/* Special tokens are recognized in the trusted ranges only, user-defined tokens everywhere. */
static bool llm__tokenize_text(llm__tokenizing *z, const uint8_t *text, size_t n,
                               const llm__range *trusted, int64_t n_trusted) {
    const llm_tokenizer *t = z->t;
    bool after_control = true;
    size_t begin = 0, at = 0;
    while (begin < n) {
        int32_t special = -1;
        size_t length = 0;
        for (at = begin; at < n; at++) {
            while (n_trusted && trusted->end <= at) trusted++, n_trusted--;
            bool all = n_trusted && trusted->begin <= at;
            if (all && t->special_begins[1][text[at]])
                length = llm__match_special(t, true, text + at, trusted->end - at, &special);
            if (!length && t->special_begins[0][text[at]])
                length = llm__match_special(t, false, text + at, n - at, &special);
            if (length) break;
        }
        size_t end = at, next = at + length;
        if (length && (t->marks[special] & LLM__MARK_STRIP_LEFT))
            while (end > begin && llm__is_space(text[end - 1])) end--;
        if (length && (t->marks[special] & LLM__MARK_STRIP_RIGHT))
            while (next < n && llm__is_space(text[next])) next++;
        if (end > begin &&
            !llm__run_steps(z, 0, text + begin, end - begin,
                            (unsigned)(!begin * LLM__AT_START +
                                       after_control * LLM__AFTER_CONTROL)))
            return false;
        if (length) llm__emit(z, special);
        after_control = length && t->kinds[special] != LLM__TOKEN_USER;
        begin = next;
    }
    return true;
}

/* Write the tokens to ids (capacity) or, if `owned` is not NULL, to a new array *owned. */
static int64_t llm__tokenize_ranges(const llm_tokenizer *t, const char *text, size_t length,
                                    const llm__range *trusted, int64_t n_trusted, bool bos,
                                    bool eos, int32_t *ids, int64_t capacity, int32_t **owned,
                                    llm_error *err) {
    if (length > INT32_MAX / 4)
        return llm__fail(err, LLM_ERROR_ARGUMENT,
                         "a text of %s is too long to be tokenized at once (512 MiB at most)",
                         llm__show_bytes(length).text),
               -1;
    llm__tokenizing z;
    memset(&z, 0, sizeof z);
    z.t = t;
    z.ids = ids;
    z.capacity = capacity;
    z.grows = owned != NULL;
    z.err = err;
    if (bos && t->bos >= 0) llm__emit(&z, t->bos);
    z.known_mask = llm__table_size(length / 16 < 8192 ? length / 16 : 8192) - 1;
    z.known = (llm__known_word *)llm__new((size_t)z.known_mask + 1, sizeof *z.known,
                                          "the words of a text", err);
    z.work = z.known ? (llm__work *)llm__new((size_t)t->n_steps, sizeof *z.work, "a text", err)
                     : NULL;
    bool ok = z.work && llm__tokenize_text(&z, (const uint8_t *)text, length, trusted, n_trusted);
    if (eos && t->eos >= 0) llm__emit(&z, t->eos);
    if (owned && ok && z.n_ids == 0) /* so that *owned is not NULL */
        ok = llm__grow(&z.ids, 0, &z.capacity, sizeof *z.ids, "token ids", err);
    ok = ok && (!owned || z.n_ids <= z.capacity); /* false: memory ran out */
    if (owned && ok) *owned = z.ids;
    else if (owned) LLM_FREE(z.ids);
    LLM_FREE(z.known);
    LLM_FREE(z.symbols);
    LLM_FREE(z.heap);
    LLM_FREE(z.codes.data);
    for (int64_t i = 0; z.work && i < t->n_steps; i++) {
        LLM_FREE(z.work[i].matcher.frames);
        LLM_FREE(z.work[i].text.data);
    }
    LLM_FREE(z.work);
    return ok ? z.n_ids : -1;
}

static int64_t llm__tokenize_whole(const llm_tokenizer *t, const char *text, size_t length,
                                   unsigned flags, int32_t *ids, int64_t capacity, int32_t **owned,
                                   llm_error *err) {
    llm__clear(err);
    if (!t || (!text && length) || (!owned && !ids && capacity > 0))
        return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_tokenize: an argument is NULL"), -1;
    llm__range whole = {0, length};
    return llm__tokenize_ranges(t, text, length, &whole, (flags & LLM_TOKENIZE_SPECIAL) != 0,
                                (flags & LLM_TOKENIZE_BOS) && t->adds_bos,
                                (flags & LLM_TOKENIZE_EOS) && t->adds_eos, ids, capacity, owned,
                                err);
}

int64_t llm_tokenize(const llm_tokenizer *t, const char *text, size_t length, unsigned flags,
                     int32_t *ids, int64_t capacity, llm_error *err) {
    return llm__tokenize_whole(t, text, length, flags, ids, capacity, NULL, err);
}

int64_t llm_tokenize_new(const llm_tokenizer *t, const char *text, size_t length, unsigned flags,
                         int32_t **ids, llm_error *err) {
    *ids = NULL;
    return llm__tokenize_whole(t, text, length, flags, NULL, 0, ids, err);
}

/* ---- Back to text ---- */

typedef struct llm__output { /* bytes that do not fit are only counted */
    char *data;              /* (capacity) bytes */
    size_t capacity, length;
} llm__output;

static void llm__put(llm__output *out, const void *data, size_t n) {
    for (size_t i = 0; i < n; i++, out->length++)
        if (out->length < out->capacity) out->data[out->length] = ((const char *)data)[i];
}

/* Append the bytes of a token, at most as many as its text has. */
static void llm__decode(const llm_tokenizer *t, int32_t id, bool drop_space, llm__output *out) {
    llm_string s = t->texts[id];
    const uint8_t *text = (const uint8_t *)s.data;
    if (t->marks[id] & LLM__MARK_SPECIAL) return;
    if (t->kinds[id] == LLM__TOKEN_USER) {
        llm__put(out, text, s.length);
        return;
    }
    for (size_t at = 0, n; at < s.length; at += n) {
        uint32_t code;
        uint8_t byte = ' ';
        n = llm__utf8(text + at, s.length - at, &code);
        bool spelled = t->byte_level && code < 324 && t->spelled[code] >= 0;
        bool space = !t->byte_level && code == 0x2581;
        if (spelled) byte = (uint8_t)t->spelled[code];
        if (t->kinds[id] == LLM__TOKEN_BYTE) {
            byte = (uint8_t)llm__parse_byte(s);
            space = true;
            n = s.length;
        }
        if (drop_space && !at && space && byte == ' ') continue;
        if (spelled || space) llm__put(out, &byte, 1);
        else llm__put(out, text + at, n);
    }
}

/* Does decoding remove this token's space, which llm_tokenize added, at the start of a text? */
static bool llm__drops_space(const llm_tokenizer *t, int32_t id) {
    return t->drops_space && t->kinds[id] != LLM__TOKEN_USER;
}

int64_t llm_detokenize(const llm_tokenizer *t, const int32_t *ids, int64_t n, char *text,
                       size_t capacity, llm_error *err) {
    llm__clear(err);
    if (!t || (!ids && n > 0) || (!text && capacity))
        return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_detokenize: an argument is NULL"), -1;
    llm__output out = {text, capacity, 0};
    bool started = false;
    for (int64_t i = 0; i < n; i++) {
        if (!llm__is_id(t, ids[i]))
            return llm__fail(err, LLM_ERROR_ARGUMENT,
                             "token %lld is %ld, but the vocabulary has ids from 0 to %ld",
                             (long long)i, (long)ids[i], (long)t->size - 1),
                   -1;
        llm__decode(t, ids[i], !started && llm__drops_space(t, ids[i]), &out);
        started = started || !(t->marks[ids[i]] & LLM__MARK_SPECIAL);
    }
    return (int64_t)out.length;
}

int64_t llm_detokenize_new(const llm_tokenizer *t, const int32_t *ids, int64_t n, char **text,
                           llm_error *err) {
    *text = NULL;
    int64_t bytes = llm_detokenize(t, ids, n, NULL, 0, err);
    if (bytes < 0) return -1;
    *text = (char *)llm__new((size_t)bytes + 1, 1, "the text of tokens", err);
    return *text ? llm_detokenize(t, ids, n, *text, (size_t)bytes, err) : -1;
}

/* The input is up to 3 held bytes and a token. Each byte can become U+FFFD, which has 3 bytes. */
size_t llm_stream_capacity(const llm_tokenizer *t) { return 3 * (t->longest + 4); }

size_t llm_stream_decode(const llm_tokenizer *t, llm_stream *stream, int32_t id, char *text) {
    /* Decode into the last third of `text`, then check the bytes and move them to its start. Each
     * byte read becomes at most 3 bytes, so no unread byte is overwritten. */
    llm__output raw = {text + 2 * (t->longest + 4), t->longest + 4, 0};
    size_t n_held = stream->n_held > 0 && stream->n_held < 4 ? (size_t)stream->n_held : 0;
    llm__put(&raw, stream->held, n_held);
    if (llm__is_id(t, id)) {
        llm__decode(t, id, !stream->started && llm__drops_space(t, id), &raw);
        stream->started = stream->started || !(t->marks[id] & LLM__MARK_SPECIAL);
    }
    stream->n_held = 0;
    size_t written = 0;
    for (size_t at = 0, n; at < raw.length; at += n) {
        uint32_t code;
        const char *from = raw.data + at;
        n = llm__utf8((const uint8_t *)from, raw.length - at, &code);
        if (code == LLM__UTF8_INCOMPLETE && id >= 0) {
            memcpy(stream->held, from, n);
            stream->n_held = (int)n;
        } else if (code >= LLM__UTF8_INVALID) {
            memcpy(text + written, "\xEF\xBF\xBD", 3);
            written += 3;
        } else {
            memmove(text + written, from, n);
            written += n;
        }
    }
    return written;
}

/* ---- Conversations ----
 * A chat model is trained on conversations in one format. Its file defines the format by a
 * template, a program in the language Jinja. This interpreter has the semantics of jinja2's sandbox
 * under transformers' settings. There is no syntax tree: a template is evaluated while it is read.
 * A loop reads its body once per element, a macro is a place in the template, and an expression
 * whose value is not needed is read with `live` off. An error ends the interpreter by longjmp.
 *
 * Each byte of a string carries its origin: 1 the template, 0 a message. Special tokens are
 * recognized only where all bytes are the template's. So a message cannot end itself and pose as
 * another speaker. (Marks that are not tokens, such as Zephyr's "<|user|>", can be forged.) */

enum {
    LLM__TEMPLATE_STEPS = 30000000,  /* template parts read, plus bytes / 64 handled */
    LLM__TEMPLATE_MEMORY = 1 << 28,  /* bytes */
    LLM__TEMPLATE_DEPTH = 200        /* nested blocks, calls, brackets and lists */
};

typedef enum llm__kind {
    LLM__UNDEFINED, LLM__NONE, LLM__BOOL, LLM__INT, LLM__FLOAT, LLM__STRING, LLM__LIST, LLM__DICT,
    LLM__NAMESPACE, LLM__MACRO, LLM__FUNCTION
} llm__kind;

typedef struct llm__value {
    uint8_t kind, origin; /* origin: of a number; macro: 0 for a `call` body; string: 2 if safe */
    uint32_t length;      /* bytes of text; of a macro: its offset in the template */
    union {
        int64_t i;
        double f;
        const char *text;       /* string, or name of an undefined variable */
        struct llm__list *list; /* a macro's scope; a function's name and object */
    };
    const uint8_t *from; /* (length) origins of a string's bytes */
} llm__value;

typedef struct llm__list { /* dicts and scopes: key, value, key, value ... */
    llm__value *items;
    int64_t n, capacity;
    struct llm__list *more; /* scope: the enclosing one; arguments: the keyword arguments */
} llm__list;

typedef struct llm__jinja {
    jmp_buf failed;
    llm_status status;           /* status of the next error */
    llm_error *err;
    const char *name;            /* name of the template, for errors */
    const char *text;            /* (length) template */
    size_t length, at, longest;  /* at: next byte; longest: bytes of the longest message */
    uint32_t *ends;              /* (length + 1) see llm__skip_body and llm__evaluate */
    const uint8_t *ones, *zeros; /* ones: origins of literals; zeros: of messages */
    bool live;                   /* false: expressions are read without being evaluated */
    char leaving;                /* 'b': a break is under way; 'c': a continue */
    int depth;
    size_t steps, memory;        /* left until the limits */
    void *blocks;                /* memory of all values: a list of blocks */
    char *room;                  /* (n_room) free part of the first block */
    size_t n_room, n_out, capacity;
    char *out;                   /* (n_out) text so far */
    uint8_t *out_from;           /* (n_out) its origins */
    llm__list *scope;
    llm__value caller;           /* `caller` of the next macro called */
} llm__jinja;

#ifdef __cplusplus
#define LLM__NORETURN [[noreturn]]
#else
#define LLM__NORETURN _Noreturn
#endif
LLM__NORETURN LLM__PRINTF(2, 3) static void llm__halt(llm__jinja *j, const char *format, ...) {
    char text[300];
    int line = 1;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    for (size_t i = 0; i < j->at && i < j->length; i++) line += j->text[i] == '\n';
    llm__fail(j->err, j->status, "%s: the chat template, line %d: %s%s", j->name, line, text,
              j->status == LLM_ERROR_UNSUPPORTED ? "; correct it, or choose another one" : "");
    longjmp(j->failed, 1);
}

static void llm__spend(llm__jinja *j, size_t steps) {
    if (steps > j->steps) llm__halt(j, "more than %d steps", LLM__TEMPLATE_STEPS);
    j->steps -= steps;
}

/* Allocate, or enlarge `old`, within the limit. */
static void *llm__keep(llm__jinja *j, void *old, size_t bytes) {
    if (bytes > j->memory) llm__halt(j, "more than %d bytes of memory", LLM__TEMPLATE_MEMORY);
    j->memory -= bytes;
    void *data = LLM_REALLOC(old, bytes);
    if (!data) {
        j->status = LLM_ERROR_MEMORY;
        llm__halt(j, "out of memory");
    }
    return data;
}

static void *llm__arena(llm__jinja *j, size_t bytes) {
    bytes = (bytes + 15) & ~(size_t)15;
    llm__spend(j, bytes / 64);
    if (bytes > j->n_room) {
        j->n_room = bytes < 65000 ? 65536 : bytes;
        void **block = (void **)llm__keep(j, NULL, j->n_room + 16);
        *block = j->blocks;
        j->blocks = block;
        j->room = (char *)block + 16;
    }
    void *data = j->room;
    j->room += bytes;
    j->n_room -= bytes;
    return memset(data, 0, bytes);
}

static void llm__nest(llm__jinja *j) {
    if (++j->depth > LLM__TEMPLATE_DEPTH) llm__halt(j, "more than %d deep", LLM__TEMPLATE_DEPTH);
}

static llm__value llm__made(llm__kind kind, int64_t i) {
    llm__value v;
    memset(&v, 0, sizeof v);
    v.kind = (uint8_t)kind;
    v.origin = 1;
    v.i = i;
    return v;
}

static llm__value llm__view(const char *text, size_t n, const uint8_t *from) {
    llm__value v = llm__made(LLM__STRING, 0);
    v.text = text;
    v.length = (uint32_t)n;
    v.from = from;
    return v;
}

static llm__value llm__between(llm__value s, size_t begin, size_t end) {
    return llm__view(s.text + begin, end - begin, s.from + begin);
}

static llm__value llm__missing(llm_string name) {
    llm__value v = llm__view(name.data, name.length, NULL);
    v.kind = LLM__UNDEFINED;
    return v;
}

static llm__value llm__word(llm__jinja *j, const char *text) {
    return llm__view(text, strlen(text), j->ones);
}

static llm__value llm__container(llm__jinja *j, llm__kind kind) {
    llm__value v = llm__made(kind, 0);
    v.list = (llm__list *)llm__arena(j, sizeof *v.list);
    return v;
}

static void llm__list_push(llm__jinja *j, llm__list *list, llm__value v) {
    if (list->n == list->capacity) {
        llm__value *old = list->items;
        list->capacity = 2 * list->n + 4;
        list->items = (llm__value *)llm__arena(j, (size_t)list->capacity * sizeof v);
        if (list->n) memcpy(list->items, old, (size_t)list->n * sizeof v);
    }
    list->items[list->n++] = v;
}

/* The value of a key in a dict or scope; NULL: none. */
static llm__value *llm__lookup(const llm__list *dict, llm_string key) {
    for (int64_t i = 0; i < dict->n; i += 2) {
        llm_string k = {dict->items[i].text, dict->items[i].length};
        if (dict->items[i].kind == LLM__STRING && k.length == key.length &&
            !memcmp(k.data, key.data, key.length))
            return &dict->items[i + 1];
    }
    return NULL;
}

static void llm__assign(llm__jinja *j, llm__list *dict, llm_string key, llm__value v) {
    llm__value *old = llm__lookup(dict, key);
    if (!old) {
        llm__list_push(j, dict, llm__view(key.data, key.length, j->ones));
        llm__list_push(j, dict, v);
    } else *old = v;
}

static void llm__define(llm__jinja *j, llm__list *dict, const char *key, llm__value v) {
    llm__assign(j, dict, llm__string(key), v);
}

static bool llm__truth(llm__value v) {
    if (v.kind == LLM__FLOAT) return v.f < 0 || v.f > 0;
    if (v.kind == LLM__LIST || v.kind == LLM__DICT) return v.list->n > 0;
    return v.kind == LLM__STRING ? v.length > 0 : v.kind >= LLM__BOOL && v.i;
}

static bool llm__numeric(llm__value v) { return v.kind >= LLM__BOOL && v.kind <= LLM__FLOAT; }
static double llm__real(llm__value v) { return v.kind == LLM__FLOAT ? v.f : (double)v.i; }

/* Halt: v is undefined, or of the wrong kind for `what`. */
LLM__NORETURN static void llm__mistyped(llm__jinja *j, llm__value v, const char *what) {
    static const char *const names[] = {"", "none", "a truth value", "a number", "a number", "text",
                                        "a list", "a dict", "a namespace", "a macro", "a function"};
    llm_string name = {v.text, v.length};
    if (v.kind) llm__halt(j, "%s is no operand of %s", names[v.kind], what);
    llm__halt(j, "'%s' is undefined, in %s", llm__show(name).text, what);
}

static int64_t llm__whole_number(llm__jinja *j, llm__value v, int64_t otherwise) {
    if (v.kind <= LLM__NONE) return otherwise;
    if (v.kind != LLM__INT) llm__mistyped(j, v, "a whole number");
    return v.i;
}

/* ---- Text of templates ---- */

static void llm__write(llm__jinja *j, const char *text, size_t n, const uint8_t *from) {
    if (n > j->capacity - j->n_out) {
        size_t capacity = 2 * j->capacity + n + 4096;
        j->out = (char *)llm__keep(j, j->out, capacity);
        j->out_from = (uint8_t *)llm__keep(j, j->out_from, capacity);
        j->capacity = capacity;
    }
    llm__spend(j, n / 64);
    if (n) memcpy(j->out + j->n_out, text, n), memcpy(j->out_from + j->n_out, from, n);
    j->n_out += n;
}

static void llm__write_word(llm__jinja *j, const char *text) {
    llm__write(j, text, strlen(text), j->ones);
}

/* Remove the output since n_out was `mark`, and return it as a string. */
static llm__value llm__taken(llm__jinja *j, size_t mark) {
    size_t n = j->n_out - mark;
    char *text = (char *)llm__arena(j, 2 * n);
    if (n) memcpy(text, j->out + mark, n), memcpy(text + n, j->out_from + mark, n);
    j->n_out = mark;
    return llm__view(text, n, (const uint8_t *)text + n);
}

static size_t llm__next_character(llm__value s, size_t at) {
    for (at++; at < s.length && ((uint8_t)s.text[at] & 0xC0) == 0x80;) at++;
    return at;
}

static int64_t llm__count_characters(llm__value s) {
    int64_t n = 0;
    for (size_t i = 0; i < s.length; i++) n += ((uint8_t)s.text[i] & 0xC0) != 0x80;
    return n;
}

/* Offset of `what` in s, from `at` on; SIZE_MAX: it is not there. */
static size_t llm__search(llm__jinja *j, llm__value s, llm__value what, size_t at) {
    for (; at + what.length <= s.length; at++) {
        const char *p = what.length ? (const char *)memchr(s.text + at, *what.text, s.length - at)
                                    : s.text + at;
        if (!p) break;
        llm__spend(j, 1 + ((size_t)(p - s.text) - at + what.length) / 64);
        at = (size_t)(p - s.text);
        if (at + what.length <= s.length && !memcmp(p, what.text, what.length)) return at;
    }
    return SIZE_MAX;
}

/* Strip white space, as Python does, or the characters of `set`. sides: 1 left, 2 right, 3 both. */
static llm__value llm__strip(llm__jinja *j, llm__value s, llm__value set, int sides) {
    for (int side = 1; side < 3; side++)
        while ((sides & side) && s.length) {
            size_t begin = 0, end = s.length;
            uint32_t c;
            if (side == 1) end = llm__next_character(s, 0);
            else for (begin = end - 1; begin && ((uint8_t)s.text[begin] & 0xC0) == 0x80;) begin--;
            llm__utf8((const uint8_t *)s.text + begin, end - begin, &c);
            if (set.kind == LLM__STRING
                    ? llm__search(j, set, llm__between(s, begin, end), 0) == SIZE_MAX
                    : !llm__is_space(c) && !(c >= 0x1C && c <= 0x1F))
                break;
            s = side == 1 ? llm__between(s, end, s.length) : llm__between(s, 0, begin);
        }
    return s;
}

/* Write a number as Python does: the fewest digits that give the same number. */
static void llm__write_real(llm__jinja *j, double x) {
    char e[40], digits[24], text[48];
    int precision = 0, n = 0, at = 0;
    do snprintf(e, sizeof e, "%.*e", precision, x);
    while (strtod(e, NULL) != x && ++precision < 17);
    const char *p = e;
    for (; *p && *p != 'e'; p++)
        if (*p >= '0' && *p <= '9') digits[n++] = *p; /* the point varies by locale */
    int exponent = *p ? atoi(p + 1) : 0;
    bool plain = exponent >= -4 && exponent < 16;
    int point = plain ? exponent : 0;
    if (*e == '-') text[at++] = '-';
    for (int i = point < 0 ? point : 0; i < n || i <= point + plain; i++) {
        if (i == point + 1) text[at++] = '.';
        text[at++] = i >= 0 && i < n ? digits[i] : '0';
    }
    if (plain) text[at] = 0;
    else snprintf(text + at, 8, "e%+03d", exponent);
    llm__write_word(j, *p ? text : e);
}

/* Write a string in quotes, as json.dumps() or, if json is false, repr() does. */
static void llm__write_quoted(llm__jinja *j, llm__value s, bool json, bool ascii) {
    static const char names[] = "\n\r\t\b\f", letters[] = "nrtbf";
    bool apostrophe = s.length && memchr(s.text, '\'', s.length) && !memchr(s.text, '"', s.length);
    const char *quote = json || apostrophe ? "\"" : "'";
    llm__write_word(j, quote);
    for (size_t i = 0, n; i < s.length; i += n) {
        uint32_t c = 0;
        char text[16];
        int length = 0;
        for (n = 0; i + n < s.length; n++) { /* bytes that need no escape */
            c = (uint8_t)s.text[i + n];
            if (c < ' ' || c == (uint8_t)*quote || c == '\\' || (c == 0x7F && !json) ||
                (c > 0x7E && ascii))
                break;
            if (json || c < 0x80) continue; /* repr() escapes the other kinds of space */
            size_t more = llm__utf8((const uint8_t *)s.text + i + n, s.length - i - n, &c);
            if (llm__is_space(c) || c < 0xA0 || c == 0xAD) break;
            n += more - 1;
        }
        if (n) {
            llm__write(j, s.text + i, n, s.from + i);
            continue;
        }
        n = llm__utf8((const uint8_t *)s.text + i, s.length - i, &c);
        const char *name = c && c < ' ' ? (const char *)memchr(names, (int)c, json ? 5 : 3) : NULL;
        if (name || c == '\\' || c == (uint8_t)*quote)
            length = snprintf(text, sizeof text, "\\%c", name ? letters[name - names] : (char)c);
        else if (c > 0xFFFF)
            length = snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xD7C0 + (c >> 10),
                              0xDC00 | (c & 0x3FF));
        else length = snprintf(text, sizeof text, json || c > 255 ? "\\u%04x" : "\\x%02x", c);
        llm__write(j, text, (size_t)length, s.from[i] ? j->ones : j->zeros);
    }
    llm__write_word(j, quote);
}

enum { LLM__STR = -2, LLM__LINE = -1, LLM__ASCII = 1 << 20 }; /* styles; others: JSON indent */

/* Write v like Python's str(), or as JSON. level: depth in lists and dicts. */
static void llm__write_value(llm__jinja *j, llm__value v, int style, int level) {
    static const char *const words[2][3] = {{"None", "False", "True"}, {"null", "false", "true"}};
    char text[32];
    bool json = style != LLM__STR, dict = v.kind >= LLM__DICT;
    int indent = style >= LLM__ASCII - 1 ? style - LLM__ASCII : style;
    size_t mark = j->n_out;
    if (v.kind == LLM__STRING && (json || level)) llm__write_quoted(j, v, json, indent != style);
    else if (v.kind == LLM__STRING) llm__write(j, v.text, v.length, v.from);
    else if (llm__numeric(v)) {
        snprintf(text, sizeof text, "%lld", (long long)v.i);
        if (v.kind == LLM__FLOAT) llm__write_real(j, v.f);
        else llm__write_word(j, v.kind == LLM__INT ? text : words[json][1 + v.i]);
        memset(j->out_from + mark, v.origin, j->n_out - mark);
    } else if (v.kind == LLM__NONE) llm__write_word(j, words[json][0]);
    else if (v.kind >= LLM__LIST && v.kind <= LLM__NAMESPACE) {
        llm__nest(j);
        llm__write_word(j, dict ? "{" : "[");
        for (int64_t i = 0; i <= v.list->n; i++) {
            bool last = i == v.list->n;
            if (i && !last) llm__write_word(j, indent >= 0 ? "," : ", ");
            for (int k = -1; indent >= 0 && v.list->n && k < indent * (level + !last); k++)
                llm__write_word(j, k < 0 ? "\n" : " ");
            if (last) break;
            if (dict) {
                llm__write_value(j, v.list->items[i++], style, level + 1);
                llm__write_word(j, ": ");
            }
            llm__write_value(j, v.list->items[i], style, level + 1);
        }
        llm__write_word(j, dict ? "}" : "]");
        j->depth--;
    } else if (json || v.kind) llm__mistyped(j, v, json ? "tojson" : "text");
}

static llm__value llm__as_text(llm__jinja *j, llm__value v) {
    size_t mark = j->n_out;
    if (v.kind == LLM__STRING) return v;
    llm__write_value(j, v, LLM__STR, 0);
    return llm__taken(j, mark);
}

/* ---- Functions, filters, methods and tests of templates ---- */

/* Names of f filters, t tests, g functions; s l d methods of strings, lists and dicts. */
static const char *const llm__names[] = {
    ("f abs capitalize count d default dictsort first float indent int items join last length list "
    "lower map max min reject rejectattr replace reverse safe select selectattr sort string title "
    "tojson trim unique upper "),
    ("t boolean callable defined divisibleby eq equalto even false float ge gt in integer iterable "
    "le lower lt mapping ne none number odd sameas sequence string true undefined "
    "upper == != < > <= >= "),
    "g dict namespace raise_exception range strftime_now ",
    ("s capitalize count endswith find format isdigit join lower lstrip replace rstrip split "
    "splitlines startswith strip title upper "),
    "l append count index pop ", "d get items keys pop update values "};

static bool llm__has_name(char where, llm_string name) {
    char word[24] = " ";
    if (name.length > 20 || !name.length) return false;
    memcpy(word + 1, name.data, name.length);
    strcpy(word + 1 + name.length, " ");
    for (int i = 0; i < 6; i++)
        if (*llm__names[i] == where) return strstr(llm__names[i] + 1, word) != NULL;
    return false;
}

/* Compare: -1, 0 or 1. fold: ignore the case of ASCII letters. */
static int llm__order(llm__jinja *j, llm__value a, llm__value b, bool fold) {
    if (llm__numeric(a) && llm__numeric(b)) {
        double x = llm__real(a), y = llm__real(b);
        if (a.kind != LLM__FLOAT && b.kind != LLM__FLOAT) return (a.i > b.i) - (a.i < b.i);
        return (x > y) - (x < y);
    }
    if (a.kind != LLM__STRING || b.kind != LLM__STRING)
        llm__mistyped(j, a.kind == LLM__STRING ? b : a, "a comparison");
    llm__spend(j, 1 + a.length / 64);
    for (size_t i = 0; i < a.length && i < b.length; i++) {
        uint8_t x = (uint8_t)a.text[i], y = (uint8_t)b.text[i];
        if (fold && x >= 'A' && x <= 'Z') x |= 32;
        if (fold && y >= 'A' && y <= 'Z') y |= 32;
        if (x != y) return x < y ? -1 : 1;
    }
    return (a.length > b.length) - (a.length < b.length);
}

static bool llm__same(llm__jinja *j, llm__value a, llm__value b) {
    if (llm__numeric(a) && llm__numeric(b)) return !llm__order(j, a, b, false);
    if (a.kind != b.kind || a.kind <= LLM__NONE) return a.kind == b.kind;
    if (a.kind == LLM__STRING) return a.length == b.length && !llm__order(j, a, b, false);
    bool same = a.list == b.list || (a.kind <= LLM__DICT && a.list->n == b.list->n);
    llm__nest(j);
    for (int64_t i = 0; same && a.list != b.list && i < a.list->n; i++) {
        llm__spend(j, 1);
        same = llm__same(j, a.list->items[i], b.list->items[i]);
    }
    j->depth--;
    return same;
}

/* Index of x in a list (step 1), or among the keys of a dict (step 2); -1: none. */
static int64_t llm__position(llm__jinja *j, const llm__list *list, int64_t step, llm__value x) {
    for (int64_t i = 0; i < list->n; i += step) {
        llm__spend(j, 1);
        if (llm__same(j, list->items[i], x)) return i;
    }
    return -1;
}

/* What a loop iterates over, as a list: elements, keys or characters. */
static llm__list *llm__elements(llm__jinja *j, llm__value v) {
    llm__list *list = v.kind == LLM__LIST ? v.list : llm__container(j, LLM__LIST).list;
    if (v.kind == LLM__STRING)
        for (size_t i = 0, next; i < v.length; i = next) {
            next = llm__next_character(v, i);
            llm__list_push(j, list, llm__between(v, i, next));
        }
    else if (v.kind == LLM__DICT)
        for (int64_t i = 0; i < v.list->n; i += 2) llm__list_push(j, list, v.list->items[i]);
    else if (v.kind && v.kind != LLM__LIST) llm__mistyped(j, v, "a list");
    return list;
}

/* v.name (dot) or v['name']. A dict's methods come first with a dot, its members without. */
static llm__value llm__attribute(llm__jinja *j, llm__value v, llm_string name, bool dot) {
    if (v.kind == LLM__UNDEFINED) llm__mistyped(j, v, "an attribute or subscript");
    bool dict = v.kind == LLM__DICT || v.kind == LLM__NAMESPACE;
    llm__value *member = dict ? llm__lookup(v.list, name) : NULL;
    char where = v.kind < LLM__STRING || v.kind > LLM__DICT ? 0 : "sld"[v.kind - LLM__STRING];
    if ((member && !dot) || !llm__has_name(where, name))
        return member ? *member : llm__missing(name);
    llm__value f = llm__container(j, LLM__FUNCTION);
    f.length = (uint8_t)where;
    llm__list_push(j, f.list, llm__view(name.data, name.length, j->ones));
    llm__list_push(j, f.list, v);
    return f;
}

/* v[key], or undefined */
static llm__value llm__member(llm__jinja *j, llm__value v, llm__value key) {
    llm_string name = {key.text, key.length}, none = {"", 0};
    if (key.kind == LLM__STRING || !v.kind) return llm__attribute(j, v, name, false);
    bool text = v.kind == LLM__STRING;
    int64_t n = text ? llm__count_characters(v) : 0, i = -1;
    if (v.kind == LLM__DICT) i = llm__position(j, v.list, 2, key) + 1;
    else if (key.kind == LLM__INT && (text || v.kind == LLM__LIST)) {
        if (!text) n = v.list->n;
        i = key.i < 0 ? key.i + n : key.i;
        if (i >= n) i = -1;
    }
    if (i < (v.kind == LLM__DICT)) return llm__missing(none);
    if (!text) return v.list->items[i];
    size_t at = 0;
    llm__spend(j, v.length / 64);
    while (i--) at = llm__next_character(v, at);
    return llm__between(v, at, llm__next_character(v, at));
}

/* Follow a filter's `attribute` argument: an index, or names separated by dots. */
static llm__value llm__by_path(llm__jinja *j, llm__value v, llm__value path) {
    if (path.kind != LLM__STRING) return path.kind == LLM__INT ? llm__member(j, v, path) : v;
    for (size_t at = 0, end; at <= path.length; at = end + 1) {
        for (end = at; end < path.length && path.text[end] != '.';) end++;
        llm_string name = {path.text + at, end - at};
        v = llm__attribute(j, v, name, false);
    }
    return v;
}

/* Parse a decimal number; false: it is not one. */
static bool llm__to_number(const char *text, size_t n, llm__value *v) {
    llm_json_node node = {text, (uint32_t)n, LLM_JSON_NUMBER, 1};
    size_t at = n && *text == '-', digits = at;
    v->kind = LLM__INT;
    while (at < n && strchr("0123456789.eE+-", text[at]) && text[at]) at++;
    if (at < n || digits == n || !(text[digits] >= '0' && text[digits] <= '9')) return false;
    if (llm_json_i64(&node, &v->i)) return true;
    v->kind = LLM__FLOAT;
    return llm_json_f64(&node, &v->f);
}

static llm__value llm__split_text(llm__jinja *j, llm__value s, llm__value by, int64_t most) {
    llm__value list = llm__container(j, LLM__LIST), none = llm__made(LLM__NONE, 0);
    bool spaces = by.kind != LLM__STRING;
    if (!spaces && !by.length) llm__halt(j, "split by an empty text");
    if (spaces) s = llm__strip(j, s, none, 3);
    for (size_t end, next; !spaces || s.length; s = llm__between(s, next, s.length)) {
        for (end = 0; spaces && end < s.length; end = llm__next_character(s, end)) {
            llm__value c = llm__between(s, end, llm__next_character(s, end));
            if (!llm__strip(j, c, none, 1).length) break;
        }
        if (!spaces) end = llm__search(j, s, by, 0);
        if (most == list.list->n || end >= s.length + !spaces) break;
        llm__list_push(j, list.list, llm__between(s, 0, end));
        next = spaces ? s.length - llm__strip(j, llm__between(s, end, s.length), none, 1).length
                      : end + by.length;
    }
    if (!spaces || s.length) llm__list_push(j, list.list, s);
    return list;
}

/* s.format(...): {} is the next argument, {name} a keyword argument. */
static llm__value llm__format(llm__jinja *j, llm__value s, const llm__list *args) {
    size_t mark = j->n_out;
    for (size_t i = 0, end, next = 0; i < s.length; i = end) {
        for (end = i; end < s.length && s.text[end] != '{' && s.text[end] != '}';) end++;
        llm__write(j, s.text + i, end - i, s.from + i);
        if (end == s.length) break;
        llm_string name = {s.text + end + 1, 0};
        while (end + 1 + name.length < s.length && name.data[name.length] != '}') name.length++;
        llm__value *v = name.length || (int64_t)next >= args->n ? llm__lookup(args->more, name)
                                                                : &args->items[next++];
        if (!v || s.text[end] == '}') llm__halt(j, "format with '%s'", llm__show(name).text);
        llm__write_value(j, *v, LLM__STR, 0);
        end += name.length + 2;
    }
    return llm__taken(j, mark);
}

static void llm__write_date(llm__jinja *j, llm__value format) {
    char f[100], text[200];
    struct tm tm;
    /* Local time without localtime(), which is not thread-safe: mktime() takes the UTC time for
     * local time, and the difference is the offset from UTC. Another call handles an offset that
     * changes in between. */
    time_t now = time(NULL), local = now, read = now;
    for (int i = 0; i < 3 && (!i || read != now); i++) {
        local += now - read;
        memset(&tm, 0, sizeof tm);
        tm.tm_year = 70;
        tm.tm_mday = 1 + (int)(local / 86400);
        tm.tm_hour = (int)(local / 3600 % 24);
        tm.tm_min = (int)(local / 60 % 60);
        tm.tm_sec = (int)(local % 60);
        read = mktime(&tm);
    }
    snprintf(f, sizeof f, "%.*s", (int)(format.length < 99 ? format.length : 99), format.text);
    llm__write(j, text, strftime(text, sizeof text, f, &tm), j->ones);
}

static bool llm__test(llm__jinja *j, llm_string name, llm__value v, llm__value a) {
    static const struct { const char *name; int mask; } kinds[] = { /* bits: llm__kind */
        {"defined", 0x7FE}, {"undefined", 1}, {"none", 2}, {"boolean", 4}, {"integer", 8},
        {"float", 0x10}, {"number", 0x1C}, {"string", 0x20}, {"mapping", 0x80},
        {"iterable", 0xE1}, {"sequence", 0xE1}, {"callable", 0x600}};
    char t[24] = "";
    memcpy(t, name.data, name.length);
#define LLM__IS(word) !strcmp(t, word)
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (LLM__IS(kinds[i].name)) return kinds[i].mask >> v.kind & 1;
    if (LLM__IS("true") || LLM__IS("false")) return v.kind == LLM__BOOL && v.i == (*t == 't');
    if (LLM__IS("odd") || LLM__IS("even")) return (llm__whole_number(j, v, 0) & 1) == (*t == 'o');
    if (LLM__IS("in")) {
        if (a.kind == LLM__STRING && v.kind == LLM__STRING)
            return llm__search(j, a, v, 0) != SIZE_MAX;
        if (a.kind == LLM__STRING) llm__mistyped(j, v, "'in'");
        return a.kind == LLM__DICT ? llm__position(j, a.list, 2, v) >= 0
                                   : llm__position(j, llm__elements(j, a), 1, v) >= 0;
    }
    if (LLM__IS("eq") || LLM__IS("==") || LLM__IS("equalto") || LLM__IS("sameas"))
        return llm__same(j, v, a);
    if (LLM__IS("ne") || LLM__IS("!=")) return !llm__same(j, v, a);
    if (LLM__IS("divisibleby"))
        return llm__whole_number(j, a, 0) > 0 && llm__whole_number(j, v, 0) % a.i == 0;
    if (LLM__IS("lower") || LLM__IS("upper")) {
        for (size_t i = 0; v.kind == LLM__STRING && i < v.length; i++)
            if ((v.text[i] | 32) >= 'a' && (v.text[i] | 32) <= 'z' &&
                !(v.text[i] & 32) == (*t == 'l'))
                return false;
        return true;
    }
    int order = llm__order(j, v, a, false);
    return *t == 'l' || *t == '<' ? order < (t[1] == 'e' || t[1] == '=')
                                  : order > -(t[1] == 'e' || t[1] == '=');
}

static llm__value llm__argument(const llm__list *args, int64_t i, const char *name) {
    llm_string none = {"", 0};
    llm__value *v = name ? llm__lookup(args->more, llm__string(name)) : NULL;
    return v ? *v : i < args->n ? args->items[i] : llm__missing(none);
}

static void llm__check_name(llm__jinja *j, char where, llm_string name) {
    if (!llm__has_name(where, name))
        llm__halt(j, "there is no %s '%s'", where == 't' ? "test" : "filter", llm__show(name).text);
}

static llm__value llm__apply(llm__jinja *j, char where, llm_string name, llm__value v,
                             const llm__list *args);

/* map, select, reject, selectattr, rejectattr */
static llm__value llm__filter_list(llm__jinja *j, const char *act, llm__value v,
                                   const llm__list *args) {
    llm__value list = llm__container(j, LLM__LIST), path = llm__argument(args, 99, "attribute");
    const llm__list *from = llm__truth(v) ? llm__elements(j, v) : list.list;
    bool map = *act == 'm', keeps = *act == 's';
    llm__list rest = *args;
    if (rest.n && strlen(act) > 6) path = *rest.items++, rest.n--;
    llm__value tested, name = llm__argument(&rest, 0, NULL);
    llm_string f = {name.text, name.kind == LLM__STRING ? name.length : 0};
    if (rest.n) rest.items++, rest.n--, llm__check_name(j, map ? 'f' : 't', f);
    for (int64_t i = 0, n = from->n; i < n; i++) {
        llm__spend(j, 1);
        tested = llm__by_path(j, from->items[i], path);
        if (map && f.length) tested = llm__apply(j, 'f', f, tested, &rest);
        if (map && !tested.kind) tested = llm__argument(args, 99, "default");
        bool holds = map             ? keeps
                     : f.length ? llm__test(j, f, tested, llm__argument(&rest, 0, NULL))
                                : llm__truth(tested);
        if (holds == keeps) llm__list_push(j, list.list, map ? tested : from->items[i]);
    }
    return list;
}

/* Call a filter, test, function or method (`where`, as in llm__names) on v. */
static llm__value llm__apply(llm__jinja *j, char where, llm_string name, llm__value v,
                             const llm__list *args) {
    llm__value a = llm__argument(args, 0, NULL), b = llm__argument(args, 1, NULL), list, s = v, x;
    llm__value path = llm__argument(args, 99, "attribute");
    bool fold = !llm__truth(llm__argument(args, 99, "case_sensitive")), found = false;
    int64_t n = 0;
    size_t mark = j->n_out, at = 0, next;
    char t[24];
    for (int64_t i = 0; where == 'f' && i < args->more->n; i += 2) {
        x = args->more->items[i];
        snprintf(t, sizeof t, " %.*s ", x.length < 20 ? (int)x.length : 20, x.text);
        if (!strstr(" attribute boolean case_sensitive default ensure_ascii first indent reverse "
                    "width ", t))
            llm__halt(j, "filters have no argument '%s'", t);
    }
    memset(t, 0, sizeof t);
    memcpy(t, name.data, name.length);
    if (where == 't') return llm__made(LLM__BOOL, llm__test(j, name, v, a));
    if (LLM__IS("default") || LLM__IS("d"))
        return (llm__truth(llm__argument(args, 1, "boolean")) ? llm__truth(v) : v.kind) ? v
               : args->n ? a : llm__word(j, "");
    if (LLM__IS("length") || (LLM__IS("count") && where == 'f'))
        return llm__made(LLM__INT, v.kind == LLM__STRING ? llm__count_characters(v)
                                                         : llm__elements(j, v)->n);
    if (LLM__IS("string") || LLM__IS("safe")) {
        x = llm__as_text(j, v);
        if (*t == 's' && t[1] == 'a') x.origin = 2;
        return x;
    }
    if (LLM__IS("tojson")) {
        int64_t indent = llm__whole_number(j, llm__argument(args, 0, "indent"), LLM__LINE);
        if (indent > 100) llm__mistyped(j, a, t);
        llm__write_value(j, v, (int)indent + (llm__truth(llm__argument(args, 99, "ensure_ascii"))
                                                  ? LLM__ASCII : 0), 0);
        return llm__taken(j, mark);
    }
    if (strstr("trim strip lstrip rstrip", t))
        return llm__strip(j, llm__as_text(j, v), a, *t == 'l' ? 1 : *t == 'r' ? 2 : 3);
    if (LLM__IS("split")) return llm__split_text(j, v, a, llm__whole_number(j, b, -1));
    if (LLM__IS("splitlines")) {
        list = llm__split_text(j, v, llm__word(j, "\n"), -1);
        list.list->n -= !list.list->items[list.list->n - 1].length;
        return list;
    }
    if (LLM__IS("startswith") || LLM__IS("endswith")) {
        llm__list one = {&a, 1, 1, NULL}, *any = a.kind == LLM__LIST ? a.list : &one;
        for (int64_t i = 0; i < any->n; i++) {
            x = any->items[i];
            if (x.kind != LLM__STRING) llm__mistyped(j, x, t);
            at = *t == 'e' ? v.length - x.length : 0;
            found |= x.length <= v.length && !memcmp(v.text + at, x.text, x.length);
        }
        return llm__made(LLM__BOOL, found);
    }
    if (LLM__IS("upper") || LLM__IS("lower") || LLM__IS("title") || LLM__IS("capitalize")) {
        llm__write_value(j, v, LLM__STR, 0); /* only ASCII letters change */
        bool up = *t != 'l';
        for (size_t i = mark; i < j->n_out; i++) {
            char *c = j->out + i, low = (char)(*c | 32);
            if (low >= 'a' && low <= 'z') *c = up ? (char)(low - 32) : low;
            up = *t == 'u' || (*t == 't' && *c && strchr(" \t\n\r-({[<", *c));
        }
        return llm__taken(j, mark);
    }
    if (LLM__IS("replace") || (where == 's' && (LLM__IS("find") || LLM__IS("count")))) {
        s = llm__as_text(j, v);
        n = llm__whole_number(j, llm__argument(args, 2, NULL), -1);
        bool replaces = *t == 'r';
        if (a.kind != LLM__STRING || !a.length) llm__mistyped(j, a, t);
        if (replaces && b.kind != LLM__STRING) llm__mistyped(j, b, t);
        for (; n && (next = llm__search(j, s, a, at)) != SIZE_MAX; n--, at = next + a.length) {
            if (*t == 'f')
                return llm__made(LLM__INT, llm__count_characters(llm__between(s, 0, next)));
            if (replaces) llm__write(j, s.text + at, next - at, s.from + at);
            if (replaces) llm__write(j, b.text, b.length, b.from);
        }
        if (!replaces) return llm__made(LLM__INT, *t == 'f' ? -1 : -1 - n);
        llm__write(j, s.text + at, s.length - at, s.from + at);
        return llm__taken(j, mark);
    }
    if (LLM__IS("format")) return llm__format(j, v, args);
    if (LLM__IS("isdigit")) {
        for (size_t i = 0; i < v.length; i++) n += v.text[i] >= '0' && v.text[i] <= '9';
        return llm__made(LLM__BOOL, n && n == (int64_t)v.length);
    }
    if (LLM__IS("join")) {
        const llm__list *from = llm__elements(j, where == 'f' ? v : a);
        for (int64_t i = 0; i < from->n; i++) {
            if (i) llm__write_value(j, where == 'f' ? a : v, LLM__STR, 0);
            llm__write_value(j, llm__by_path(j, from->items[i], path), LLM__STR, 0);
        }
        return llm__taken(j, mark);
    }
    if (LLM__IS("int") || LLM__IS("float")) {
        x = v;
        if (v.kind == LLM__STRING) {
            s = llm__strip(j, v, llm__made(LLM__NONE, 0), 3);
            x.origin = !memchr(s.from, 0, s.length);
            found = llm__to_number(s.text, s.length, &x);
        } else found = llm__numeric(v);
        if (!found || (x.kind == LLM__FLOAT && !(fabs(x.f) < 9e18)))
            return args->n ? a : llm__made(LLM__INT, 0);
        if (*t == 'f') x.f = llm__real(x);
        else if (x.kind == LLM__FLOAT) x.i = (int64_t)x.f;
        x.kind = *t == 'f' ? LLM__FLOAT : LLM__INT;
        return x;
    }
    if (LLM__IS("abs")) {
        if (!llm__numeric(v)) llm__mistyped(j, v, t);
        if (v.kind == LLM__FLOAT) v.f = fabs(v.f);
        else if (v.i < 0) v.i = (int64_t)(0 - (uint64_t)v.i);
        return v;
    }
    if (LLM__IS("indent")) {
        x = llm__argument(args, 0, "width");
        n = x.kind == LLM__STRING ? 1 : llm__whole_number(j, x, 4);
        if (x.kind != LLM__STRING) x = llm__word(j, " ");
        bool begins = llm__truth(llm__argument(args, 1, "first"));
        s = llm__as_text(j, v);
        for (size_t i = 0; i <= s.length; i++) {
            bool more = i < s.length;
            for (int64_t k = 0; k < n && begins && (!i || (more && s.text[i] != '\n')); k++)
                llm__write_value(j, x, LLM__STR, 0);
            if (more) llm__write(j, s.text + i, 1, s.from + i);
            begins = more && s.text[i] == '\n';
        }
        return llm__taken(j, mark);
    }
    if (LLM__IS("map") || strstr("selectattr rejectattr", t))
        return llm__filter_list(j, t, v, args);
    if (strstr("first last min max list reverse unique sort", t)) {
        const llm__list *from = llm__elements(j, v);
        bool descends = LLM__IS("sort") && llm__truth(llm__argument(args, 0, "reverse"));
        list = llm__container(j, LLM__LIST);
        for (int64_t i = 0, count = from->n; i < count; i++) { /* stable insertion sort */
            x = from->items[LLM__IS("reverse") ? count - 1 - i : i];
            s = llm__by_path(j, x, path);
            n = list.list->n;
            bool twice = false;
            llm__list_push(j, list.list, x);
            for (int64_t k = n - 1; k >= 0 && strstr("min max unique sort", t); k--) {
                llm__value other = llm__by_path(j, list.list->items[k], path);
                llm__spend(j, 1);
                if (*t == 'u') twice |= s.kind == LLM__STRING && other.kind == LLM__STRING
                                            ? !llm__order(j, s, other, fold)
                                            : llm__same(j, s, other);
                else {
                    int order = llm__order(j, s, other, fold);
                    if (descends ? order <= 0 : order >= 0) break;
                    list.list->items[k + 1] = list.list->items[k];
                    list.list->items[k] = x;
                }
            }
            list.list->n -= twice;
        }
        n = LLM__IS("last") || LLM__IS("max") ? list.list->n - 1 : 0;
        if (strstr("first last min max", t)) return llm__member(j, list, llm__made(LLM__INT, n));
        if (*t != 'r' || v.kind != LLM__STRING) return list;
        for (n = 0; n < list.list->n; n++) llm__write_value(j, list.list->items[n], LLM__STR, 0);
        return llm__taken(j, mark);
    }
    if (where != 'g' && strstr("items keys values dictsort", t)) {
        list = llm__container(j, LLM__LIST);
        if (v.kind && v.kind != LLM__DICT) llm__mistyped(j, v, t);
        for (int64_t i = 0; v.kind && i < v.list->n; i += 2) {
            x = llm__container(j, LLM__LIST);
            for (int k = 0; k < 2; k++) llm__list_push(j, x.list, v.list->items[i + k]);
            llm__list_push(j, list.list, *t == 'k' || *t == 'v' ? x.list->items[*t == 'v'] : x);
        }
        if (*t != 'd') return list;
        llm__list by = {NULL, 0, 0, llm__container(j, LLM__DICT).list};
        llm__define(j, by.more, "attribute", llm__made(LLM__INT, 0));
        llm__define(j, by.more, "case_sensitive", a);
        return llm__apply(j, 'f', llm__string("sort"), list, &by);
    }
    if (where == 'd') {
        n = LLM__IS("update") ? 0 : llm__position(j, v.list, 2, a);
        if (LLM__IS("get"))
            return n >= 0 ? v.list->items[n + 1] : args->n > 1 ? b : llm__made(LLM__NONE, 0);
    }
    if (LLM__IS("update")) {
        if (a.kind != LLM__DICT) llm__mistyped(j, a, t);
        for (int64_t i = 0; i < a.list->n; i += 2) {
            n = llm__position(j, v.list, 2, a.list->items[i]);
            x = a.list->items[i + 1];
            if (n < 0) llm__list_push(j, v.list, a.list->items[i]), llm__list_push(j, v.list, x);
            else v.list->items[n + 1] = x;
        }
    }
    if (LLM__IS("append")) llm__list_push(j, v.list, a);
    if (LLM__IS("append") || LLM__IS("update")) return llm__made(LLM__NONE, 0);
    if (LLM__IS("pop")) {
        int64_t width = where == 'd' ? 2 : 1;
        if (width == 1 && (n = llm__whole_number(j, a, -1)) < 0) n += v.list->n;
        if (n < 0 && where == 'd' && args->n > 1) return b;
        if (n < 0 || n >= v.list->n) llm__halt(j, "pop() of a missing item");
        x = v.list->items[n + width - 1];
        v.list->n -= width;
        memmove(v.list->items + n, v.list->items + n + width, (size_t)(v.list->n - n) * sizeof x);
        return x;
    }
    if (where == 'l') { /* index, count */
        for (int64_t i = 0; i < v.list->n; i++) {
            bool same = llm__same(j, v.list->items[i], a);
            if (same && *t == 'i') return llm__made(LLM__INT, i);
            n += same;
        }
        if (*t == 'i') llm__halt(j, "index() of a missing item");
        return llm__made(LLM__INT, n);
    }
    if (LLM__IS("range")) {
        int64_t begin = args->n > 1 ? llm__whole_number(j, a, 0) : 0,
                end = llm__whole_number(j, args->n > 1 ? b : a, 0),
                step = llm__whole_number(j, llm__argument(args, 2, NULL), 1);
        list = llm__container(j, LLM__LIST);
        if (!step || fabs((double)begin) + fabs((double)end) + fabs((double)step) > 1e15 ||
            (end - begin) / step > 100000)
            llm__halt(j, "range of more than 100000 numbers");
        for (; step > 0 ? begin < end : begin > end; begin += step)
            llm__list_push(j, list.list, llm__made(LLM__INT, begin));
        return list;
    }
    if (LLM__IS("dict") || LLM__IS("namespace")) {
        list = llm__container(j, *t == 'd' ? LLM__DICT : LLM__NAMESPACE);
        *list.list = *args->more;
        return list;
    }
    s = llm__as_text(j, a);
    if (LLM__IS("raise_exception")) {
        j->status = LLM_ERROR_ARGUMENT;
        llm__halt(j, "it refuses the conversation: %.*s",
                  (int)(s.length < 200 ? s.length : 200), s.text);
    }
    llm__write_date(j, s);
    return llm__taken(j, mark);
}
#undef LLM__IS

/* ---- Expressions of templates ---- */

static bool llm__is_letter(char c) {
    return ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_' || (c >= '0' && c <= '9');
}

/* The next character of a tag after white space; 0: the template ends. */
static char llm__peek(llm__jinja *j) {
    llm__spend(j, 1);
    while (j->at < j->length && j->text[j->at] && strchr(" \t\n\r\f\v", j->text[j->at])) j->at++;
    return j->at < j->length ? j->text[j->at] : 0;
}

/* Read these characters or this word, if they come next. */
static bool llm__got(llm__jinja *j, const char *what) {
    size_t n = strlen(what);
    if (llm__peek(j) != *what || n > j->length - j->at || memcmp(j->text + j->at, what, n))
        return false;
    if (llm__is_letter(*what) && j->at + n < j->length && llm__is_letter(j->text[j->at + n]))
        return false;
    j->at += n;
    return true;
}

LLM__NORETURN static void llm__unexpected(llm__jinja *j, const char *wanted) {
    llm_string rest = {j->text + j->at, j->length - j->at < 20 ? j->length - j->at : 20};
    llm__halt(j, "%s is expected before '%s'", wanted, llm__show(rest).text);
}

static void llm__expect(llm__jinja *j, const char *what) {
    if (!llm__got(j, what)) llm__unexpected(j, what);
}

static llm_string llm__name(llm__jinja *j) { /* empty: no name comes next */
    bool name = llm__peek(j) > '9' && llm__is_letter(j->text[j->at]);
    llm_string s = {j->text + j->at, 0};
    while (name && j->at < j->length && llm__is_letter(j->text[j->at])) j->at++, s.length++;
    return s;
}

static llm_string llm__expect_name(llm__jinja *j) {
    llm_string name = llm__name(j);
    if (!name.length) llm__unexpected(j, "a name");
    return name;
}

/* Whether the tag ends here: "%}" or "}}", optionally after a sign. */
static bool llm__at_end(llm__jinja *j) {
    char c = llm__peek(j);
    size_t at = j->at + (c == '-' || c == '+');
    return at + 1 < j->length && (j->text[at] == '%' || j->text[at] == '}') &&
           j->text[at + 1] == '}';
}

static llm__value llm__evaluate(llm__jinja *j);
static void llm__body(llm__jinja *j);
static void llm__end_tag(llm__jinja *j, const char *end);

/* Read elements up to `close`. form: 0 a list, ':' a dict, '=' arguments. */
static llm__value llm__series(llm__jinja *j, const char *close, char form, llm__value list) {
    if (!list.list) list = llm__container(j, form == ':' ? LLM__DICT : LLM__LIST);
    if (form == '=') list.list->more = llm__container(j, LLM__DICT).list;
    while (!llm__got(j, close)) {
        size_t start = j->at;
        llm_string name = {"", 0};
        if (form == '=') name = llm__name(j);
        if (name.length && (!llm__got(j, "=") || (j->at < j->length && j->text[j->at] == '=')))
            name.length = 0, j->at = start;
        llm__value v = llm__evaluate(j);
        if (j->live && name.length) llm__assign(j, list.list->more, name, v);
        else if (j->live) llm__list_push(j, list.list, v);
        if (form == ':') {
            llm__expect(j, ":");
            v = llm__evaluate(j);
            if (j->live) llm__list_push(j, list.list, v);
        }
        if (llm__got(j, ",")) continue;
        llm__expect(j, close);
        break;
    }
    return list;
}

/* Read an escape in a string, as Python does: an unknown one is kept as it is. */
static void llm__write_escape(llm__jinja *j) {
    static const char names[] = "nrtbfva\\'\"\n", meanings[] = "\n\r\t\b\f\v\a\\'\"";
    char c = j->text[j->at + 1], text[4] = {'\\', c};
    const char *name = c ? strchr(names, c) : NULL;
    bool octal = c >= '0' && c <= '7';
    size_t most = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : octal ? 3 : 0, n = 0, length = 2;
    uint32_t code = 0;
    j->at += octal ? 1 : 2;
    for (int digit; n < most && j->at < j->length; n++, j->at++) {
        digit = llm__digit((uint8_t)j->text[j->at]);
        if (digit < 0 || digit >= (octal ? 8 : 16)) break;
        code = code * (octal ? 8 : 16) + (uint32_t)digit;
    }
    if (c == 'N' || (!octal && n < most) || code > 0x10FFFF || code >> 11 == 0x1B)
        llm__halt(j, "the escape \\%c in a string", c);
    if (most) length = llm__put_utf8(code, text);
    else if (name) *text = meanings[name - names], length = *text != 0;
    if (j->live) llm__write(j, text, length, j->ones);
}

/* A literal or a variable. */
static llm__value llm__primary(llm__jinja *j) {
    llm__value v = llm__made(LLM__NONE, 0);
    char c = llm__peek(j);
    size_t start = j->at, mark = j->n_out, end;
    if (c == '\'' || c == '"') {
        for (end = ++j->at; end < j->length && j->text[end] != c; end++) {
            if (j->text[end] != '\\' || end + 1 == j->length) continue;
            if (j->live) llm__write(j, j->text + j->at, end - j->at, j->ones);
            j->at = end;
            llm__write_escape(j);
            end = j->at - 1;
        }
        if (end >= j->length) llm__unexpected(j, "the end of a string");
        v = llm__view(j->text + j->at, end - j->at, j->ones);
        j->at = end + 1;
        if (j->n_out == mark) return v;
        llm__write_value(j, v, LLM__STR, 0);
        return llm__taken(j, mark);
    }
    if (c >= '0' && c <= '9') {
        for (end = start + 1; end < j->length; end++)
            if (!llm__is_letter(j->text[end]) && j->text[end] != '.' &&
                ((j->text[end - 1] | 32) != 'e' || !strchr("+-", j->text[end])))
                break;
        j->at = end;
        if (!llm__to_number(j->text + start, end - start, &v))
            llm__halt(j, "a number of this form");
        return v;
    }
    v.list = NULL;
    if (llm__got(j, "[")) return llm__series(j, "]", 0, v);
    if (llm__got(j, "{")) return llm__series(j, "}", ':', v);
    if (llm__got(j, "(")) {
        v = llm__evaluate(j);
        if (llm__got(j, ")")) return v;
        llm__expect(j, ",");
        llm__value list = llm__container(j, LLM__LIST);
        llm__list_push(j, list.list, v);
        return llm__series(j, ")", 0, list);
    }
    llm_string name = llm__name(j);
    if (!name.length) llm__unexpected(j, "a value");
    for (int i = 0; i < 6; i++)
        if (llm__is_text(name, &"none\0\0None\0\0false\0False\0true\0\0True\0"[6 * i]))
            return i < 2 ? v : llm__made(LLM__BOOL, i > 3);
    for (const llm__list *scope = j->live ? j->scope : NULL; scope; scope = scope->more) {
        llm__value *found = llm__lookup(scope, name);
        llm__spend(j, 1 + (size_t)scope->n / 4);
        if (found) return *found;
    }
    if (!llm__has_name('g', name)) return llm__missing(name);
    v = llm__container(j, LLM__FUNCTION);
    v.length = 'g';
    llm__list_push(j, v.list, llm__view(name.data, name.length, j->ones));
    llm__list_push(j, v.list, llm__made(LLM__NONE, 0));
    return v;
}

/* Run a macro or the body of a `call`: read its parameters, then run its body. */
static llm__value llm__call_macro(llm__jinja *j, llm__value macro, const llm__list *args) {
    size_t back = j->at, mark;
    llm__list *scope = j->scope;
    int64_t n = 0, used = 0;
    llm__nest(j);
    j->scope = llm__container(j, LLM__DICT).list;
    j->scope->more = macro.list;
    if (j->caller.kind) llm__define(j, j->scope, "caller", j->caller);
    j->caller.kind = LLM__UNDEFINED;
    j->at = macro.length;
    if (llm__got(j, "("))
        for (; !llm__got(j, ")"); n++, llm__got(j, ",")) {
            llm_string name = llm__expect_name(j);
            llm__value *keyword = llm__lookup(args->more, name), v = llm__missing(name);
            bool given = n < args->n || keyword;
            if (given) v = n < args->n ? args->items[n] : *keyword;
            used += keyword != NULL;
            if (llm__got(j, "=")) {
                j->live = !given;
                llm__value otherwise = llm__evaluate(j);
                j->live = true;
                if (!given) v = otherwise;
            }
            llm__assign(j, j->scope, name, v);
        }
    if (n < args->n || used < args->more->n / 2) llm__halt(j, "a call with an unknown argument");
    j->live = macro.origin != 0;
    if (!j->live) llm__evaluate(j); /* skip the expression of the `call` */
    j->live = true;
    llm__end_tag(j, "%}");
    mark = j->n_out;
    llm__body(j);
    llm__expect(j, macro.origin ? "endmacro" : "endcall");
    j->scope = scope;
    j->at = back;
    j->depth--;
    return llm__taken(j, mark);
}

static llm__value llm__call(llm__jinja *j, llm__value f) {
    llm__value caller = j->caller, none = llm__made(LLM__NONE, 0);
    if (j->live) j->caller.kind = LLM__UNDEFINED; /* only the outermost call gets it */
    none.list = NULL;
    llm__list *args = llm__series(j, ")", '=', none).list;
    if (!j->live) return f;
    if (llm__at_end(j)) j->caller = caller;
    if (f.kind == LLM__MACRO) return llm__call_macro(j, f, args);
    if (f.kind != LLM__FUNCTION) llm__mistyped(j, f, "a call");
    llm_string name = {f.list->items[0].text, f.list->items[0].length};
    return llm__apply(j, (char)f.length, name, f.list->items[1], args);
}

/* v[begin:end:step], as in Python; bounds: the three, or undefined. */
static llm__value llm__slice(llm__jinja *j, llm__value v, const llm__value *bounds) {
    llm__value list = llm__container(j, LLM__LIST);
    bool text = v.kind == LLM__STRING;
    int64_t step = llm__whole_number(j, bounds[2], 1), limits[2];
    if ((!text && v.kind != LLM__LIST) || !step) llm__mistyped(j, v, "a slice");
    int64_t n = text ? llm__count_characters(v) : v.list->n;
    for (int i = 0; i < 2; i++) {
        int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n,
                x = llm__whole_number(j, bounds[i], (step < 0) == i ? low : high);
        if (bounds[i].kind == LLM__INT && x < 0) x += n;
        limits[i] = x < low ? low : x > high ? high : x;
    }
    if (text && step == 1) {
        size_t at[2] = {0, 0};
        llm__spend(j, v.length / 64);
        for (int i = 0; i < 2; i++)
            for (int64_t k = 0; k < limits[i]; k++) at[i] = llm__next_character(v, at[i]);
        return llm__between(v, at[0], at[1] < at[0] ? at[0] : at[1]);
    }
    const llm__list *from = llm__elements(j, v);
    size_t mark = j->n_out;
    for (int64_t i = limits[0]; step > 0 ? i < limits[1] : i > limits[1]; i += step) {
        if (text) llm__write_value(j, from->items[i], LLM__STR, 0);
        else llm__list_push(j, list.list, from->items[i]);
        if (step > n || step < -n) break;
    }
    return text ? llm__taken(j, mark) : list;
}

/* Attributes, subscripts and calls after a value. */
static llm__value llm__postfix(llm__jinja *j, llm__value v) {
    for (;;) {
        if (llm__got(j, ".")) {
            llm_string name = llm__expect_name(j);
            if (j->live) v = llm__attribute(j, v, name, true);
        } else if (llm__got(j, "[")) {
            llm__value bounds[3];
            int n = 0;
            for (int i = 0; i < 3; i++) bounds[i] = llm__made(LLM__UNDEFINED, 0);
            while (!llm__got(j, "]"))
                if (n < 2 && llm__got(j, ":")) n++;
                else if (bounds[n] = llm__evaluate(j), !strchr("]:", llm__peek(j)))
                    llm__unexpected(j, "]");
            if (j->live) v = n ? llm__slice(j, v, bounds) : llm__member(j, v, bounds[0]);
        } else if (llm__got(j, "(")) v = llm__call(j, v);
        else return v;
    }
}

/* Apply a filter ('f') or test ('t'), whose name comes next. */
static llm__value llm__filter_next(llm__jinja *j, char where, llm__value v) {
    llm__value args = llm__made(LLM__LIST, 0);
    llm_string name = llm__expect_name(j);
    llm__check_name(j, where, name);
    args.list = NULL;
    if (llm__got(j, "(")) args = llm__series(j, ")", '=', args);
    else {
        args = llm__container(j, LLM__LIST);
        args.list->more = llm__container(j, LLM__DICT).list;
        char c = llm__peek(j);
        size_t start = j->at;
        llm_string word = llm__name(j);
        j->at = start;
        bool ends = llm__is_text(word, "and") || llm__is_text(word, "or") ||
                    llm__is_text(word, "else") || llm__is_text(word, "if");
        if (where == 't' && !ends && (llm__is_letter(c) || strchr("'\"[{", c)) && c)
            llm__list_push(j, args.list, llm__postfix(j, llm__primary(j)));
    }
    return j->live ? llm__apply(j, where, name, v, args.list) : v;
}

/* A value with its sign and postfixes and, if `filters`, its filters and tests. */
static llm__value llm__operand(llm__jinja *j, bool filters) {
    llm__value v;
    bool minus = llm__got(j, "-");
    if (minus) {
        llm__nest(j);
        v = llm__operand(j, false);
        j->depth--;
        if (j->live && !llm__numeric(v)) llm__mistyped(j, v, "-");
        if (v.kind == LLM__FLOAT) v.f = -v.f;
        else if (v.kind == LLM__INT) v.i = (int64_t)(0 - (uint64_t)v.i);
    } else v = llm__postfix(j, llm__primary(j));
    while (filters)
        if (llm__got(j, "|")) v = llm__filter_next(j, 'f', v);
        else if (llm__got(j, "is")) {
            bool negated = llm__got(j, "not");
            v = llm__filter_next(j, 't', v);
            if (j->live) v.i ^= negated;
        } else break;
    return v;
}

/* Each operator, after its precedence. */
static const char *const llm__operators[] = {"1or", "2and", "4==", "4!=", "4<=", "4>=", "4<", "4>",
                                             "4in", "4not", "5+", "5-", "6~", "8**", "7*", "7//",
                                             "7/", "7%"};

static llm__value llm__calculate(llm__jinja *j, const char *sign, llm__value a, llm__value b) {
    size_t mark = j->n_out;
    char act = sign[1] == '/' ? 'f' : sign[1] == '*' ? '^' : *sign;
    if (act == '+' && (a.origin == 2) != (b.origin == 2))
        llm__halt(j, "'safe' text + other text, which would be escaped");
    if (act == '~' || (act == '+' && a.kind == LLM__STRING && b.kind == LLM__STRING)) {
        llm__write_value(j, a, LLM__STR, 0);
        llm__write_value(j, b, LLM__STR, 0);
        return llm__taken(j, mark);
    }
    if (act == '*' && a.kind == LLM__STRING && b.kind == LLM__INT) {
        for (int64_t i = 0; i < b.i && a.length; i++) llm__write(j, a.text, a.length, a.from);
        return llm__taken(j, mark);
    }
    if (act == '+' && a.kind == LLM__LIST && b.kind == LLM__LIST) {
        llm__value list = llm__container(j, LLM__LIST);
        for (int64_t i = 0, n = a.list->n + b.list->n; i < n; i++)
            llm__list_push(j, list.list,
                      i < a.list->n ? a.list->items[i] : b.list->items[i - a.list->n]);
        return list;
    }
    if (!llm__numeric(a) || !llm__numeric(b)) llm__mistyped(j, llm__numeric(a) ? b : a, sign);
    double x = llm__real(a), y = llm__real(b);
    if (act == '^' ? !(x < 0 || x > 0) && y < 0 : !(y < 0 || y > 0) && strchr("/f%", act))
        llm__halt(j, "a division by zero");
    double z = act == '+' ? x + y : act == '-' ? x - y : act == '*' ? x * y
               : act == '^' ? pow(x, y) : x / y;
    if (act == 'f' || act == '%') z = floor(z);
    if (act == '%') z = x - z * y;
    llm__value v = llm__made(LLM__FLOAT, 0);
    v.f = z;
    if (act == '^' && !(fabs(z) < 1e300)) llm__halt(j, "a power that is no number or too large");
    if (a.kind != LLM__FLOAT && b.kind != LLM__FLOAT && act != '/' && (act != '^' || y >= 0)) {
        if (!(fabs(x) < 1e15 && fabs(y) < 1e15 && fabs(z) < 1e15))
            llm__halt(j, "a number is too large");
        v = llm__made(LLM__INT, (int64_t)z); /* below 2^53, so z is exact */
        if (act == '%') v.i = (a.i % b.i + b.i) % b.i;
    }
    v.origin = a.origin & b.origin;
    return v;
}

/* Read operators of at least this level, by precedence climbing. */
static llm__value llm__operation(llm__jinja *j, int level) {
    const int n = sizeof llm__operators / sizeof *llm__operators;
    llm__value v, last = llm__made(LLM__UNDEFINED, 0); /* right side of the last comparison */
    bool live = j->live, negated, compared = false;
    llm__nest(j);
    if (level <= 3 && llm__got(j, "not"))
        v = llm__made(LLM__BOOL, !llm__truth(llm__operation(j, 3)));
    else v = llm__operand(j, true);
    while (!llm__at_end(j)) {
        int i = 0;
        size_t start = j->at;
        while (i < n &&
               (*llm__operators[i] < '0' + level || !llm__got(j, llm__operators[i] + 1)))
            i++;
        if (i == n) break;
        const char *sign = llm__operators[i] + 1;
        negated = *sign == 'n';
        if (negated && !llm__got(j, "in")) {
            j->at = start;
            break;
        }
        bool skips = i < 2 && live && llm__truth(v) == !i;
        j->live = live && !skips;
        llm__value right = llm__operation(j, sign[-1] - '0' + 1);
        j->live = live;
        if (i < 2 && !skips) v = right;
        else if (i >= 2 && live && sign[-1] > '4') v = llm__calculate(j, sign, v, right);
        else if (i >= 2 && live) { /* a < b < c is a < b and b < c */
            bool holds = negated != llm__test(j, llm__string(negated ? "in" : sign),
                                              compared ? last : v, right);
            v = llm__made(LLM__BOOL, holds && (!compared || llm__truth(v)));
            compared = true;
            last = right;
        }
    }
    j->depth--;
    return v;
}

/* A value with an optional inline `if`. The condition is evaluated first, then the chosen value. */
static llm__value llm__evaluate(llm__jinja *j) {
    llm__value v = llm__made(LLM__UNDEFINED, 0);
    bool live = j->live, holds = true;
    if (!llm__peek(j)) llm__unexpected(j, "a value");
    uint32_t *condition = &j->ends[j->at]; /* where the condition is; 1: none; 0: not known yet */
    size_t start = j->at, after = 0;
    if (!live || !*condition) {
        j->live = false;
        llm__operation(j, 1);
        *condition = llm__got(j, "if") ? (uint32_t)j->at : 1;
        if (*condition > 1) llm__operation(j, 1);
        if (*condition > 1 && llm__got(j, "else")) llm__evaluate(j);
        j->live = live;
        if (!live) return v;
    }
    if (*condition > 1) {
        j->at = *condition;
        holds = llm__truth(llm__operation(j, 1));
        after = j->at;
    }
    if (holds) {
        j->at = start;
        v = llm__operation(j, 1);
        if (after) j->at = after;
    }
    if (after && llm__got(j, "else")) {
        j->live = !holds;
        llm__value other = llm__evaluate(j);
        if (!holds) v = other;
    }
    j->live = live;
    return v;
}

/* ---- Statements of templates ---- */

/* After a tag, drop all white space (sign '-') or, after a block ('%') or comment, a newline. */
static void llm__after_tag(llm__jinja *j, char sign, char kind) {
    llm__value rest = llm__view(j->text + j->at, j->length - j->at, j->ones);
    if (sign == '-') j->at = j->length - llm__strip(j, rest, llm__made(LLM__NONE, 0), 1).length;
    else if (kind != '}' && sign != '+' && rest.length && *rest.text == '\n') j->at++;
}

static void llm__end_tag(llm__jinja *j, const char *end) {
    char sign = llm__peek(j);
    if (sign == '-' || sign == '+') j->at++;
    if (j->length - j->at < 2 || memcmp(j->text + j->at, end, 2)) llm__unexpected(j, end);
    j->at += 2;
    llm__after_tag(j, sign, *end);
}

/* Enter the next tag; if `emits`, write the text before it. Returns '%', '{' or, at the end, 0. */
static char llm__next_tag(llm__jinja *j, bool emits) {
    for (bool raw = false;;) {
        size_t begin = j->at, tag = begin, line;
        for (; tag + 1 < j->length; tag++) {
            if (j->text[tag] != '{' || !memchr("%{#", j->text[tag + 1], 3)) continue;
            j->at = tag + 2 + (tag + 2 < j->length && strchr("-+", j->text[tag + 2]));
            if (!raw || (j->text[tag + 1] == '%' && llm__got(j, "endraw"))) break;
        }
        if (tag + 1 >= j->length) tag = j->length;
        char kind = tag < j->length ? j->text[tag + 1] : 0,
             sign = tag + 2 < j->length ? j->text[tag + 2] : 0;
        llm__value text = llm__view(j->text + begin, tag - begin, j->ones);
        llm__spend(j, text.length / 16);
        if (kind && sign == '-') text = llm__strip(j, text, llm__made(LLM__NONE, 0), 2);
        else if (kind && kind != '{' && sign != '+') { /* drop the indentation of a block */
            for (line = tag; line > begin && memchr(" \t\r\f\v", j->text[line - 1], 5);) line--;
            if (!line || j->text[line - 1] == '\n') text = llm__between(text, 0, line - begin);
        }
        if (emits) llm__write_value(j, text, LLM__STR, 0);
        j->at = kind ? tag + 2 + (sign == '-' || sign == '+') : tag;
        if (raw && !kind) llm__unexpected(j, "endraw");
        if (raw || (kind == '%' && llm__got(j, "raw"))) {
            if (raw) llm__expect(j, "endraw");
            sign = llm__peek(j);
            if (raw) llm__end_tag(j, "%}");
            else llm__expect(j, sign == '-' ? "-%}" : "%}"), llm__after_tag(j, sign, '}');
            raw = !raw;
            continue;
        }
        if (kind != '#') return kind;
        while (j->at + 1 < j->length && memcmp(j->text + j->at, "#}", 2)) j->at++;
        if (j->at + 1 >= j->length) llm__unexpected(j, "#}");
        j->at += 2;
        llm__after_tag(j, j->text[j->at - 3], '#');
    }
}

/* Go to the end of a tag. Returns whether it has a '=' outside of strings and brackets. */
static bool llm__skip_tag(llm__jinja *j) {
    bool assigns = false;
    for (int depth = 0; depth > 0 || !llm__at_end(j); j->at++) {
        char c = llm__peek(j);
        if (!c) llm__unexpected(j, "the end of a tag");
        depth += strchr("([{", c) ? 1 : strchr(")]}", c) ? -1 : 0;
        assigns |= c == '=' && !depth;
        if (c == '"' || c == '\'')
            while (++j->at < j->length && j->text[j->at] != c) j->at += j->text[j->at] == '\\';
    }
    return assigns;
}

/* Whether a tag with this word ends a body. */
static bool llm__ends_body(llm_string word) {
    return (word.length > 3 && !memcmp(word.data, "end", 3)) || llm__is_text(word, "else") ||
           llm__is_text(word, "elif");
}

/* From the start of a body, go to the word of the tag that ends it: endfor, else ... */
static void llm__skip_body(llm__jinja *j) {
    static const char *const openers[] = {"for", "if", "macro", "call", "filter", "generation",
                                          "set"};
    uint32_t *end = &j->ends[j->at]; /* there is one entry more than bytes */
    for (int depth = 0; !*end;) {
        char kind = llm__next_tag(j, false);
        size_t at = j->at;
        llm_string word = {"", 0};
        if (!kind) llm__unexpected(j, "the end of a block");
        if (kind == '%') word = llm__name(j);
        if (!depth && llm__ends_body(word)) *end = (uint32_t)at;
        depth -= word.length > 3 && !memcmp(word.data, "end", 3);
        bool assigns = llm__skip_tag(j);
        for (int i = 0; i < 7; i++) depth += llm__is_text(word, openers[i]) && !(i == 6 && assigns);
        llm__end_tag(j, kind == '%' ? "%}" : "}}");
    }
    llm__spend(j, 1);
    j->at = *end;
}

/* After a tag: run the body up to the word `end` in a new scope, and return its text. */
static llm__value llm__block(llm__jinja *j, const char *end) {
    llm__list *scope = j->scope;
    size_t mark = j->n_out;
    llm__skip_tag(j);
    llm__end_tag(j, "%}");
    size_t body = j->at;
    j->scope = llm__container(j, LLM__DICT).list;
    j->scope->more = scope;
    llm__body(j);
    j->scope = scope;
    j->at = body;
    llm__skip_body(j);
    llm__expect(j, end);
    return llm__taken(j, mark);
}

static int llm__targets(llm__jinja *j, llm_string *names) {
    int n = 0;
    bool brackets = llm__got(j, "(");
    do names[n++] = llm__expect_name(j);
    while (n < 4 && llm__got(j, ","));
    if (brackets) llm__expect(j, ")");
    return n;
}

static void llm__assign_targets(llm__jinja *j, const llm_string *names, int n, llm__value v) {
    if (n > 1 && (v.kind != LLM__LIST || v.list->n != n)) llm__mistyped(j, v, "an assignment");
    for (int i = 0; i < n; i++) llm__assign(j, j->scope, names[i], n > 1 ? v.list->items[i] : v);
}

static void llm__run_for(llm__jinja *j) {
    static const char *const variables[] = {"index0", "index", "revindex0", "revindex", "length",
                                            "first", "last", "previtem", "nextitem"};
    llm__list *outer = j->scope;
    llm_string names[4];
    int n_names = llm__targets(j, names);
    llm__expect(j, "in");
    llm__value missing = llm__missing(names[0]), loop = llm__container(j, LLM__NAMESPACE);
    llm__list *list = llm__elements(j, llm__operation(j, 1)), *kept;
    j->scope = llm__container(j, LLM__DICT).list;
    j->scope->more = outer;
    if (llm__got(j, "if")) {
        size_t condition = j->at;
        kept = llm__container(j, LLM__LIST).list;
        for (int64_t i = 0; i < list->n; i++, j->at = condition) {
            llm__assign_targets(j, names, n_names, list->items[i]);
            if (llm__truth(llm__operation(j, 1))) llm__list_push(j, kept, list->items[i]);
        }
        list = kept;
        llm__skip_tag(j);
    }
    llm__end_tag(j, "%}");
    size_t body = j->at;
    int64_t n = list->n;
    for (int64_t i = 0; i < n && j->leaving != 'b'; i++) {
        const llm__value values[] = {
            llm__made(LLM__INT, i), llm__made(LLM__INT, i + 1), llm__made(LLM__INT, n - 1 - i),
            llm__made(LLM__INT, n - i), llm__made(LLM__INT, n), llm__made(LLM__BOOL, !i),
            llm__made(LLM__BOOL, i == n - 1), i ? list->items[i - 1] : missing,
            i + 1 < n ? list->items[i + 1] : missing};
        for (int k = 0; k < 9; k++) llm__define(j, loop.list, variables[k], values[k]);
        j->scope->n = 0;
        llm__define(j, j->scope, "loop", loop);
        llm__assign_targets(j, names, n_names, list->items[i]);
        j->at = body;
        j->leaving = 0;
        llm__body(j);
    }
    j->leaving = 0;
    j->scope = outer;
    j->at = body;
    llm__skip_body(j);
    if (llm__got(j, "else")) {
        llm__end_tag(j, "%}");
        if (n) llm__skip_body(j);
        else llm__body(j);
    }
    if (!j->leaving) llm__expect(j, "endfor");
}

static void llm__run_if(llm__jinja *j) {
    bool done = false, holds;
    do {
        holds = !done && llm__truth(llm__evaluate(j));
        if (done) llm__skip_tag(j);
        llm__end_tag(j, "%}");
        if (holds) llm__body(j);
        else llm__skip_body(j);
        done |= holds;
    } while (!j->leaving && llm__got(j, "elif"));
    if (!j->leaving && llm__got(j, "else")) {
        llm__end_tag(j, "%}");
        if (done) llm__skip_body(j);
        else llm__body(j);
    }
    if (!j->leaving) llm__expect(j, "endif");
}

/* Run the body after this tag, and apply the tag's filters to its text. */
static llm__value llm__filtered(llm__jinja *j, const char *end) {
    llm__peek(j);
    size_t start = j->at;
    llm__value v = llm__block(j, end);
    size_t after = j->at;
    j->at = start;
    if (strcmp(end, "endset")) v = llm__filter_next(j, 'f', v);
    while (llm__got(j, "|")) v = llm__filter_next(j, 'f', v);
    j->at = after;
    return v;
}

static void llm__run_set(llm__jinja *j) {
    llm_string names[4], member = {"", 0};
    int n = llm__targets(j, names);
    llm__value v, *space = NULL;
    if (n == 1 && llm__got(j, ".")) member = llm__expect_name(j);
    if (llm__got(j, "=")) {
        v = llm__evaluate(j);
        if (llm__peek(j) == ',') llm__halt(j, "a tuple without brackets");
    } else v = llm__filtered(j, "endset");
    if (!member.length) {
        llm__assign_targets(j, names, n, v);
        return;
    }
    for (llm__list *scope = j->scope; scope && !space; scope = scope->more)
        space = llm__lookup(scope, names[0]);
    if (!space || space->kind != LLM__NAMESPACE)
        llm__halt(j, "only a namespace's members can be set");
    llm__assign(j, space->list, member, v);
}

static void llm__run_macro(llm__jinja *j, bool call) {
    llm__value v = llm__made(LLM__MACRO, 0);
    llm_string name = {"", 0};
    if (!call) name = llm__expect_name(j);
    llm__peek(j);
    v.origin = !call;
    v.length = (uint32_t)j->at;
    v.list = j->scope;
    if (call) {
        j->live = false; /* parameters are read at each call */
        for (bool more = llm__got(j, "("); more && !llm__got(j, ")"); llm__got(j, ",")) {
            llm__expect_name(j);
            if (llm__got(j, "=")) llm__evaluate(j);
        }
        j->live = true;
        j->caller = v;
        llm__write_value(j, llm__evaluate(j), LLM__STR, 0);
        j->caller.kind = LLM__UNDEFINED;
    } else {
        llm__assign(j, j->scope, name, v);
        llm__skip_tag(j);
    }
    llm__end_tag(j, "%}");
    llm__skip_body(j);
    llm__expect(j, call ? "endcall" : "endmacro");
}

/* Run a body, up to the word of the tag that ends it, or to a break or continue. */
static void llm__body(llm__jinja *j) {
    char kind;
    llm__nest(j);
    while (!j->leaving && (kind = llm__next_tag(j, true)) != 0) {
        size_t start = j->at;
        if (kind == '{') {
            llm__write_value(j, llm__evaluate(j), LLM__STR, 0);
            llm__end_tag(j, "}}");
            continue;
        }
        llm_string word = llm__expect_name(j);
        if (llm__ends_body(word)) {
            j->at = start;
            break;
        }
        if (llm__is_text(word, "if")) llm__run_if(j);
        else if (llm__is_text(word, "for")) llm__run_for(j);
        else if (llm__is_text(word, "set")) llm__run_set(j);
        else if (llm__is_text(word, "macro") || llm__is_text(word, "call"))
            llm__run_macro(j, *word.data == 'c');
        else if (llm__is_text(word, "filter"))
            llm__write_value(j, llm__filtered(j, "endfilter"), LLM__STR, 0);
        else if (llm__is_text(word, "generation"))
            llm__write_value(j, llm__block(j, "endgeneration"), LLM__STR, 0);
        else if (llm__is_text(word, "break") || llm__is_text(word, "continue")) {
            j->leaving = *word.data;
            break;
        } else llm__halt(j, "there is no statement '%s'", llm__show(word).text);
        if (!j->leaving) llm__end_tag(j, "%}");
    }
    j->depth--;
}

/* ---- Named templates ---- */

#define LLM__EACH(messages, text) "{% for m in " messages " %}{{ " text " }}{% endfor %}"
#define LLM__OPEN(text) "{% if add_generation_prompt %}{{ " text " }}{% endif %}"
#define LLM__CHATML(content, open) \
    LLM__EACH("messages", "'<|im_start|>' + m.role + '\n' + " content " + '<|im_end|>\n'") \
    LLM__OPEN("'<|im_start|>assistant\n" open)
#define LLM__UNTHOUGHT \
    "(m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' and " \
    "'</think>' in m.content else m.content)"
#define LLM__HEADER(role) "'<|start_header_id|>' + " role " + '<|end_header_id|>\n\n'"
#define LLM__LLAMA3(messages, content) \
    LLM__EACH(messages, LLM__HEADER("m.role") " + " content " + '<|eot_id|>'") \
    LLM__OPEN(LLM__HEADER("'assistant'"))
#define LLM__DATED(date, trim) \
    "{{ bos_token }}{% set first = messages[0].role == 'system' %}{{ " LLM__HEADER("'system'") \
    " + 'Cutting Knowledge Date: December 2023\nToday Date: ' + (date_string or " date ") + " \
    "'\n\n' + (messages[0].content if first else '')" trim " + '<|eot_id|>' }}" \
    LLM__LLAMA3("(messages[1:] if first else messages)", "m.content" trim)
#define LLM__REFUSE(condition, why) \
    "{% if " condition " %}{{ raise_exception('" why "') }}{% endif %}"
#define LLM__TURNS(system, where, user, answer) \
    "{% set system = messages[0].content if messages[0].role == 'system' %}" \
    "{% for m in (messages if system is undefined else messages[1:]) %}" \
    LLM__REFUSE("m.role != ('assistant' if loop.index0 % 2 else 'user')", \
                "user and assistant must take turns, after at most one system message") \
    "{% set text = (" system " if system is defined and loop." where " else '') + m.content %}" \
    "{{ " user " if m.role == 'user' else " answer " }}{% endfor %}"
#define LLM__MISTRAL(where, user, answer) \
    "{{ bos_token }}" LLM__TURNS("system + '\n\n'", where, user " + '[/INST]'", answer)
#define LLM__UNGUIDED(answer) \
    LLM__REFUSE("messages[0].role == 'system'", "it has no place for a system message") \
    LLM__MISTRAL("first", "'[INST] ' + text + ' '", answer)

static const char *const llm__templates[][2] = { /* name, source */
    {"chatml", LLM__CHATML("m.content", "'")},
    {"qwen3", LLM__CHATML(LLM__UNTHOUGHT, "' + ('<think>\n\n</think>\n\n' if enable_thinking is "
                                          "false else '')")},
    {"qwen3-instruct", LLM__CHATML(LLM__UNTHOUGHT, "'")},
    {"qwen3-thinking", LLM__CHATML(LLM__UNTHOUGHT, "<think>\n'")},
    {"llama3", "{{ bos_token }}" LLM__LLAMA3("messages", "m.content|trim")},
    {"llama3.1", LLM__DATED("'26 Jul 2024'", "|trim")},
    {"llama3.1-unsloth", LLM__DATED("'26 July 2024'", "")},
    {"llama3.2", LLM__DATED("strftime_now('%d %b %Y')", "|trim")},
    {"llama2", LLM__TURNS("'<<SYS>>\n' + system + '\n<</SYS>>\n\n'", "first",
                          "bos_token + '[INST] ' + text|trim + ' [/INST]'",
                          "' ' + text|trim + ' ' + eos_token")},
    {"mistral-v0.1", LLM__UNGUIDED("text + eos_token + ' '")},
    {"mistral-v0.2", LLM__UNGUIDED("text + eos_token")},
    {"mistral-v1", LLM__MISTRAL("first", "' [INST] ' + text + ' '", "' ' + text + eos_token")},
    {"mistral-v3", LLM__MISTRAL("last", "'[INST] ' + text", "' ' + text|trim + eos_token")},
    {"mistral-v3-tekken", LLM__MISTRAL("last", "'[INST]' + text", "text + eos_token")},
    {"mistral-v7", "{{ bos_token }}" LLM__EACH(
        "messages",
        "'[SYSTEM_PROMPT] ' + m.content + '[/SYSTEM_PROMPT]' if m.role == 'system' else "
                    "'[INST] ' + m.content + '[/INST]' if m.role == 'user' else "
                    "' ' + m.content + eos_token")},
    {"zephyr", LLM__EACH("messages", "'<|' + m.role + '|>\n' + m.content + eos_token + '\n'")
                   LLM__OPEN("'<|assistant|>\n'")},
};
enum { LLM__N_TEMPLATES = sizeof llm__templates / sizeof *llm__templates };


static void llm__load_chat(llm_tokenizer *t) {
    size_t cursor = 0;
    llm_value_string(llm_file_find(t->file, "tokenizer.chat_template"), &cursor, &t->chat_source);
}

const char *llm_chat_template_at(int index) {
    return index >= 0 && index < LLM__N_TEMPLATES ? llm__templates[index][0] : NULL;
}

llm_chat_options llm_chat_defaults(void) {
    llm_chat_options options;
    memset(&options, 0, sizeof options);
    return options;
}

llm_string llm_chat_template_source(const llm_tokenizer *t, const llm_chat_options *options) {
    llm_string none = {"", 0};
    if (options && options->template_source) return llm__string(options->template_source);
    if (!options || !options->template_name) return t ? t->chat_source : none;
    for (int i = 0; i < LLM__N_TEMPLATES; i++)
        if (!strcmp(options->template_name, llm__templates[i][0]))
            return llm__string(llm__templates[i][1]);
    return none;
}

/* Convert a JSON value; NULL becomes none. message: it is a message; the usual roles count as the
 * template's text, since some templates make special tokens of them. */
static llm__value llm__from_json(llm__jinja *j, const llm_json_node *node, bool message) {
    llm__value v = llm__made(LLM__NONE, 0);
    if (!node || node->kind == LLM_JSON_NULL) return v;
    if (node->kind == LLM_JSON_STRING) return llm__view(node->text, node->length, j->zeros);
    if (node->kind <= LLM_JSON_TRUE) v = llm__made(LLM__BOOL, node->kind == LLM_JSON_TRUE);
    else if (node->kind == LLM_JSON_NUMBER) {
        if (!llm__to_number(node->text, node->length, &v)) llm__halt(j, "a number is too large");
    } else {
        bool dict = node->kind == LLM_JSON_OBJECT;
        v = llm__container(j, dict ? LLM__DICT : LLM__LIST);
        for (const llm_json_node *n = llm_json_first(node); n; n = llm_json_next(node, n)) {
            llm__value x = llm__from_json(j, n, message && !dict);
            llm_string text = {n->text, n->length};
            if (dict) llm__list_push(j, v.list, llm__view(n[-1].text, n[-1].length, j->zeros));
            if (dict && message && llm_json_is(n - 1, "role") && x.kind == LLM__STRING &&
                (llm__is_text(text, "user") || llm__is_text(text, "assistant") ||
                 llm__is_text(text, "system") || llm__is_text(text, "tool")))
                x.from = j->ones;
            llm__list_push(j, v.list, x);
        }
    }
    v.origin = 0;
    return v;
}

/* Run the template; false: an error. json: messages (or NULL: they are in `given`), tools,
 * documents and variables. */
static bool llm__run_template(llm__jinja *j, const llm_tokenizer *t,
                              const llm_chat_options *options, llm_string source,
                              const llm_message *given, int n, const llm_json *json) {
    static const char *const names[] = {"messages", "tools", "documents"},
                      *const roles[] = {"system", "user", "assistant"};
    llm_string bos = llm_tokenizer_text(t, t->bos), eos = llm_tokenizer_text(t, t->eos);
    if (setjmp(j->failed)) return false;
    size_t n_ones = source.length + bos.length + eos.length + 256;
    j->zeros = (const uint8_t *)llm__arena(j, j->longest + 256);
    j->ones = (const uint8_t *)memset(llm__arena(j, n_ones), 1, n_ones);
    j->ends = (uint32_t *)llm__arena(j, (source.length + 1) * sizeof *j->ends);
    char *text = (char *)llm__arena(j, source.length + 1);
    j->text = text;
    for (size_t i = 0; i < source.length; i++) /* each line ends in '\n' alone */
        if (source.data[i] != '\r') text[j->length++] = source.data[i];
        else if (i + 1 == source.length || source.data[i + 1] != '\n') text[j->length++] = '\n';
    if (j->length && text[j->length - 1] == '\n') j->length--;
    j->scope = llm__container(j, LLM__DICT).list;
    for (int i = 0; i < 3; i++)
        llm__define(j, j->scope, names[i], llm__from_json(j, json[i].nodes, !i));
    llm__value list = llm__container(j, LLM__LIST);
    for (int i = 0; i < n; i++) {
        llm__value m = llm__container(j, LLM__DICT);
        llm__define(j, m.list, "role", llm__word(j, roles[given[i].role]));
        llm__define(j, m.list, "content",
                    llm__view(given[i].length ? given[i].text : "", given[i].length, j->zeros));
        llm__list_push(j, list.list, m);
    }
    if (n) llm__define(j, j->scope, "messages", list);
    llm__define(j, j->scope, "add_generation_prompt", llm__made(LLM__BOOL, 1));
    llm__define(j, j->scope, "bos_token",
                llm__view(bos.length ? bos.data : "", bos.length, j->ones));
    llm__define(j, j->scope, "eos_token",
                llm__view(eos.length ? eos.data : "", eos.length, j->ones));
    if (options && options->date)
        llm__define(j, j->scope, "date_string",
                    llm__view(options->date, strlen(options->date), j->zeros));
    if (options && options->no_thinking)
        llm__define(j, j->scope, "enable_thinking", llm__made(LLM__BOOL, 0));
    const llm_json_node *variables = json[3].nodes;
    for (const llm_json_node *v = llm_json_first(variables); v; v = llm_json_next(variables, v))
        llm__assign(j, j->scope, llm_json_key(v), llm__from_json(j, v, false));
    llm__body(j);
    if (j->at < j->length || j->leaving) llm__halt(j, "the end of a block that has no beginning");
    return true;
}

/* Render messages, or `json`. The caller frees j->out and j->out_from, even on failure. */
static bool llm__render(llm__jinja *j, const llm_tokenizer *t, const llm_chat_options *options,
                        const llm_message *messages, int n, const char *json, size_t length,
                        llm_error *err) {
    static const char *const names[] = {"the conversation", "tools_json", "documents_json",
                                        "variables_json"};
    llm_json parsed[4];
    llm_string source;
    char known[400] = "";
    memset(j, 0, sizeof *j);
    memset(parsed, 0, sizeof parsed);
    llm__clear(err);
    if (!t || (!json && !messages && n))
        return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_chat: an argument is NULL");
    source = llm_chat_template_source(t, options);
    j->name = options && options->template_source ? "template_source"
              : options && options->template_name ? options->template_name : t->name;
    for (int i = 0; i < LLM__N_TEMPLATES; i++)
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "",
                 llm__templates[i][0]);
    if (!source.length && j->name != t->name)
        return llm__fail(err, LLM_ERROR_ARGUMENT,
                         "there is no chat template called '%s'; there are %s",
                         llm__show(llm__string(j->name)).text, known);
    if (!source.length)
        return llm__fail(err, LLM_ERROR_UNSUPPORTED,
                         "%s: the file has no chat template, so this model may not be meant for "
                         "conversations; choose one by name: %s", t->name, known);
    for (int i = 0; !json && i < n; i++) {
        if ((unsigned)messages[i].role > LLM_ROLE_ASSISTANT ||
            (!messages[i].text && messages[i].length))
            return llm__fail(err, LLM_ERROR_ARGUMENT, "message %d is NULL or has no known role",
                             i + 1);
        if (messages[i].length > j->longest) j->longest = messages[i].length;
    }
    if (!json && (n < 1 || messages[n - 1].role != LLM_ROLE_USER))
        return llm__fail(err, LLM_ERROR_ARGUMENT,
                         "the last message of a conversation must be the user's, to be answered");
    const char *texts[] = {json, options ? options->tools_json : NULL,
                           options ? options->documents_json : NULL,
                           options ? options->variables_json : NULL};
    bool ok = true;
    for (int i = 0; ok && i < 4; i++) {
        if (!texts[i]) continue;
        if (i) length = strlen(texts[i]);
        if (length > j->longest) j->longest = length;
        ok = llm_json_parse(&parsed[i], texts[i], length, names[i], err);
        if (ok && !llm_json_has_kind(parsed[i].nodes, i < 3 ? LLM_JSON_ARRAY : LLM_JSON_OBJECT))
            ok = llm__fail(err, LLM_ERROR_ARGUMENT, "%s must be a JSON %s", names[i],
                           i < 3 ? "array" : "object");
    }
    if (options && options->date) j->longest += strlen(options->date);
    j->err = err;
    j->status = LLM_ERROR_UNSUPPORTED;
    j->steps = LLM__TEMPLATE_STEPS;
    j->memory = LLM__TEMPLATE_MEMORY;
    j->live = true;
    ok = ok && llm__run_template(j, t, options, source, messages, n, parsed);
    for (int i = 0; i < 4; i++) llm_json_free(&parsed[i]);
    for (void *block = j->blocks, *next; block; block = next) {
        next = *(void **)block;
        LLM_FREE(block);
    }
    return ok;
}

static int64_t llm__chat_text(llm__jinja *j, bool ok, char *text, size_t capacity) {
    if (ok && j->n_out && capacity) memcpy(text, j->out, j->n_out < capacity ? j->n_out : capacity);
    LLM_FREE(j->out);
    LLM_FREE(j->out_from);
    return ok ? (int64_t)j->n_out : -1;
}

static int64_t llm__chat_ids(llm__jinja *j, bool ok, const llm_tokenizer *t, int32_t *ids,
                             int64_t capacity, int32_t **owned, llm_error *err) {
    llm__range *trusted = NULL;
    int64_t count = -1, n = 0, room = 0;
    for (size_t i = 0, begin; ok && i < j->n_out; i++) { /* runs of the template's bytes */
        for (begin = i; i < j->n_out && j->out_from[i];) i++;
        if (i == begin) continue;
        if (!(ok = llm__grow(&trusted, n, &room, sizeof *trusted, "a conversation", err))) break;
        trusted[n].begin = begin;
        trusted[n++].end = i;
    }
    if (ok) {
        llm_string bos = llm_tokenizer_text(t, t->bos);
        bool has_bos = bos.length && n && !trusted->begin && trusted->end >= bos.length &&
                       !memcmp(j->out, bos.data, bos.length);
        count = llm__tokenize_ranges(t, j->out ? j->out : "", j->n_out, trusted, n,
                                     t->adds_bos && !has_bos, false, ids, capacity, owned, err);
    }
    LLM_FREE(trusted);
    llm__chat_text(j, false, NULL, 0);
    return count;
}

int64_t llm_chat_render(const llm_tokenizer *t, const llm_chat_options *options,
                        const llm_message *messages, int n, char *text, size_t capacity,
                        llm_error *err) {
    llm__jinja j;
    bool ok = llm__render(&j, t, options, messages, n, NULL, 0, err);
    return llm__chat_text(&j, ok, text, capacity);
}

int64_t llm_chat_render_json(const llm_tokenizer *t, const llm_chat_options *options,
                             const char *messages, size_t length, char *text, size_t capacity,
                             llm_error *err) {
    llm__jinja j;
    bool ok = llm__render(&j, t, options, NULL, 0, messages ? messages : "", length, err);
    return llm__chat_text(&j, ok, text, capacity);
}

int64_t llm_chat_tokenize(const llm_tokenizer *t, const llm_chat_options *options,
                          const llm_message *messages, int n, int32_t *ids, int64_t capacity,
                          llm_error *err) {
    llm__jinja j;
    bool ok = llm__render(&j, t, options, messages, n, NULL, 0, err);
    return llm__chat_ids(&j, ok, t, ids, capacity, NULL, err);
}

int64_t llm_chat_tokenize_new(const llm_tokenizer *t, const llm_chat_options *options,
                              const llm_message *messages, int n, int32_t **ids, llm_error *err) {
    llm__jinja j;
    *ids = NULL;
    bool ok = llm__render(&j, t, options, messages, n, NULL, 0, err);
    return llm__chat_ids(&j, ok, t, NULL, 0, ids, err);
}

int64_t llm_chat_tokenize_json(const llm_tokenizer *t, const llm_chat_options *options,
                               const char *messages, size_t length, int32_t **ids, llm_error *err) {
    llm__jinja j;
    *ids = NULL;
    bool ok = llm__render(&j, t, options, NULL, 0, messages ? messages : "", length, err);
    return llm__chat_ids(&j, ok, t, NULL, 0, ids, err);
}

/* Render a conversation and look at what follows the answer. */
size_t llm_chat_stop(const llm_tokenizer *t, const llm_chat_options *options, char *text,
                     size_t capacity) {
    const llm_message messages[] = {{LLM_ROLE_USER, "?", 1}, {LLM_ROLE_ASSISTANT, "answer", 6},
                                    {LLM_ROLE_USER, "?", 1}};
    llm__jinja j;
    size_t n = 0, at = 0;
    int32_t id = -1;
    if (llm__render(&j, t, options, messages, 3, NULL, 0, NULL)) {
        for (size_t i = 0; i + 6 < j.n_out; i++)
            if (!memcmp(j.out + i, "answer", 6)) at = i + 6;
        while (at && at < j.n_out && strchr(" \n", j.out[at])) at++;
        const char *close = at && at < j.n_out && strchr("<[", j.out[at]) /* ...>, ...] */
                                ? (const char *)memchr(j.out + at, j.out[at] + 2, j.n_out - at)
                                : NULL;
        const uint8_t *tail = (const uint8_t *)j.out + at;
        if (close && !(llm__match_special(t, true, tail, j.n_out - at, &id) &&
                       llm_tokenizer_is_end(t, id)))
            n = (size_t)(close + 1 - j.out) - at;
        if (n < capacity) memcpy(text, j.out + at, n), text[n] = 0;
    }
    llm__chat_text(&j, false, NULL, 0);
    return n;
}

/* =====================================================================================
 * [10] Fast CPU: the executor, and the kernels for each instruction set
 *
 * A kernel is a loop that computes one operation. Those of chapter 6 define the operations; these
 * are fast. They use a vector type of LLM__W floats, which is one register of the processor. This
 * file includes itself once per instruction set, so the same text is compiled for each;
 * llm_cpu_backend chooses the kernels that run. One of two things limits a matrix product:
 *
 *     bytes        limit a decode step: a weight is used for only one row of x per sequence, so
 *                  reading the weight takes longer than the arithmetic.
 *     arithmetic   limits a prefill step of hundreds of rows: a weight in a register is used for
 *                  several rows of x, as many as there are registers for their sums.
 *
 * Every loop keeps one promise: no bit of a result depends on the number of other rows computed
 * with it, on the thread, or on the location of its cache blocks. Floating-point addition is not
 * associative, so on a given instruction set every sum has ONE order. The loops only choose which
 * sums advance together.
 * ================================================================================== */

/* ---- What the fast kernels share ---- */

enum {
    LLM__TILE = 64,         /* positions in an attention tile */
    LLM__QUERY_ROWS = 128,   /* most query rows, (token, head) pairs, per attention item */
    LLM__PADDING = 32,      /* head_dim is padded to a multiple of this, the depth of a bf16 tile */
    LLM__FEW_ROWS = 8,      /* most rows of x for which 16-bit weights are converted on the fly */
    LLM__FEW_X = 32,        /* most rows of x for "alone": see "Matrix tiles" */
    LLM__FEW_X_Q4_0 = 64,   /* the same for q4_0 weights */
    LLM__SHARING_HEADS = 4, /* fewest query heads per kv head for attention in matrix tiles */
    LLM__FAR_BYTES = 4096,  /* prefetch distance, in bytes */
    LLM__X_CACHE_BYTES = 5 << 16,    /* bytes of rounded x to keep in an L2 cache of 512 KB */
    LLM__X_CACHE_BYTES_TILES = 7 << 18, /* the same in 2 MB, with matrix tiles */
    LLM__GATE_CACHE_BYTES = 1 << 17  /* bytes of gate results to keep in the L2 cache */
};

#define LLM__INLINE static inline __attribute__((always_inline))
#define LLM__NOINLINE __attribute__((noinline))
/* Unrolled, because the compiler would otherwise keep an array of registers in memory. */
#if defined(__clang__)
#define LLM__UNROLL _Pragma("clang loop unroll(full)")
#define LLM__ROLLED _Pragma("clang loop unroll(disable)") /* to keep code small */
#else
#define LLM__UNROLL _Pragma("GCC unroll 16")
#define LLM__ROLLED _Pragma("GCC unroll 1")
#endif
#define LLM__JOIN(a, b) a##b

/* ---- Panels: weights in the order in which kernels read them ----
 * A kernel takes 16 rows of weights at once, one per lane of the widest register: each sum stays in
 * its lane, and a column of x is used for 16 rows. So 16 rows are packed into a panel, a sequence
 * of stripes of 64 columns (two blocks of 32):
 *
 *   scales       (2, 16)     f16  per block and row (q4_1, q5_1: (2, 16) minimums follow)
 *   quads        (2, Q, 16)  u32  four adjacent columns of a row. q8_0: Q = 8. q4_0: Q = 4; low
 *                                 nibbles are columns 4q to 4q + 3, high nibbles those 16 further
 *
 * q5_0, q5_1 and q5_K add a word with the fifth bits (column 4q + i at bit 8i + q). q6_K adds two
 * words, each with the two high bits of 16 columns (column 4q + i at bit 8i + 2q).
 *
 * Block scales of the K formats are multiples of one f16 scale per 256 columns. Panels of q4_0 and
 * q4_Z use this form too: the largest of eight scales becomes the multiplier 2048, and the others
 * are rounded (a scale of 1/100 of the largest is off by at most 2.4 %). In these types, each span
 * of eight stripes begins with a head:
 *
 *   scale        (2, 16)     f16  per 256 columns and row (q4_K, q5_K: (2, 16) minimums follow)
 *
 * The stripes of a span have multipliers in place of scales:
 *
 *   q4_0, q4_Z   (2, 16)     i16  per block and row (q4_Z: (2, 16) zero points follow)
 *   q4_K, q5_K   (2, 2, 16)  u8   per block and row: of the scale, of the minimum
 *   q6_K         (2, 2, 16)  i8   per half block and row
 *
 * Missing rows and columns are zeros. Weights that are not packed when loaded
 * (llm_cpu_pack_weights) are packed panel by panel just before use. */

enum {
    LLM__PANEL = 16,        /* rows of weights in a panel */
    LLM__STRIPE = 64,       /* columns in a stripe */
    LLM__SPAN = 8,          /* stripes in a span */
    LLM__FULL_SCALE = 2048, /* multiplier of the largest scale */
    LLM__X_TILE = 16        /* most rows of x in a tile */
};

/* How the panels of a weight type are stored. */
typedef struct llm__layout {
    int quads;        /* words per block and row; 0: no panels for this type */
    int zero;         /* stored integer for 0, in a type without minimums (q4_0: 8) */
    bool multipliers; /* block scales are multiples of a scale per 256 columns */
    bool groups;      /* the K formats: multipliers are in the file */
    bool minimum;     /* blocks have minimums or zero points */
} llm__layout;

static llm__layout llm__layout_of(llm_type type) {
    switch (type) {
    case LLM_Q4_0: return (llm__layout){4, 8, true, false, false};
    case LLM_Q4_1: return (llm__layout){4, 0, false, false, true};
    case LLM_Q4_Z: return (llm__layout){4, 0, true, false, true};
    case LLM_Q4_K: return (llm__layout){4, 0, true, true, true};
    case LLM_Q5_0: return (llm__layout){5, 16, false, false, false};
    case LLM_Q5_1: return (llm__layout){5, 0, false, false, true};
    case LLM_Q5_K: return (llm__layout){5, 0, true, true, true};
    case LLM_Q6_K: return (llm__layout){6, 32, true, true, false};
    case LLM_Q8_0: return (llm__layout){8, 0, false, false, false};
    default: return (llm__layout){0, 0, false, false, false};
    }
}

/* Bytes of a span before its stripes. */
static size_t llm__span_head(llm__layout l) {
    return l.multipliers ? 2 * LLM__PANEL * (l.groups && l.minimum ? 4 : 2) : 0;
}

/* Bytes of a stripe before its quads. */
static size_t llm__stripe_head(llm__layout l) {
    return 2 * LLM__PANEL * (l.minimum && !l.groups ? 4 : 2);
}

static size_t llm__stripe_bytes(llm__layout l) {
    return llm__stripe_head(l) + 2 * LLM__PANEL * (size_t)l.quads * sizeof(uint32_t);
}

static size_t llm__span_bytes(llm__layout l) {
    return llm__span_head(l) + LLM__SPAN * llm__stripe_bytes(l);
}

static size_t llm__panel_bytes(llm__layout l, int64_t cols) {
    size_t stripes = (size_t)llm__divide_up(cols, LLM__STRIPE);
    return (stripes + LLM__SPAN - 1) / LLM__SPAN * llm__span_head(l) +
           stripes * llm__stripe_bytes(l);
}

static void llm__pack_quads(int quads, const uint8_t *q, uint32_t *words) {
    if (quads == 8) {
        memcpy(words, q, LLM__BLOCK);
        return;
    }
    uint32_t columns[8]; /* 4 per word */
    memcpy(columns, q, sizeof columns);
    for (int i = 0; i < 4; i++)
        words[i] = (columns[i] & 0x0f0f0f0f) | (columns[i + 4] & 0x0f0f0f0f) << 4;
    words[4] = words[5] = 0;
    for (int i = 0; i < 8; i++)
        if (quads == 6) words[4 + i / 4] |= (columns[i] >> 4 & 0x03030303) << (i % 4 * 2);
        else words[4] |= (columns[i] >> 4 & 0x01010101) << i;
}

/* Convert up to eight f16 block scales to multipliers. Returns the f16 scale whose multiplier is
 * LLM__FULL_SCALE. */
static uint16_t llm__find_multipliers(const uint16_t *scales, int n, int16_t *multipliers) {
    uint16_t largest = 0;
    for (int i = 0; i < n; i++)
        if ((scales[i] & 0x7fff) > (largest & 0x7fff)) largest = scales[i];
    float all = llm__f16_to_f32(largest);
    /* if the largest scale is not finite, multipliers of 1 make the products NaN or infinite */
    bool finite = (largest & 0x7fff) < 0x7c00;
    for (int i = 0; i < n; i++) {
        float part = finite && all != 0.0f
                         ? rintf(llm__f16_to_f32(scales[i]) / all * LLM__FULL_SCALE)
                         : (float)!finite;
        /* at least -2047: -2048 times -16 (the lowest q - zero) does not fit in 16 bits */
        multipliers[i] = (int16_t)(part > 1 - LLM__FULL_SCALE ? part : 1 - LLM__FULL_SCALE);
    }
    return largest;
}

/* Pack up to 16 rows, from first_row on. */
static void llm__pack_panel(const llm_weight *w, int64_t first_row, uint8_t *panel) {
    enum { BLOCKS = LLM__SUPER / LLM__BLOCK };
    const llm__layout l = llm__layout_of(w->type);
    size_t row_bytes = llm__row_bytes(w->type, w->cols), stripe_bytes = llm__stripe_bytes(l);
    int64_t rows = llm__min(LLM__PANEL, w->rows - first_row), blocks = w->cols / LLM__BLOCK;
    if (rows < LLM__PANEL || blocks % 2) memset(panel, 0, llm__panel_bytes(l, w->cols));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t first = 0; first < blocks; first += BLOCKS) {
            uint8_t *span = panel + (size_t)(first / (2 * LLM__SPAN)) * llm__span_bytes(l);
            uint8_t *head = span + first / BLOCKS % 2 * LLM__PANEL * 2 + 2 * row;
            llm__levels levels[BLOCKS];
            int n = (int)llm__min(BLOCKS, blocks - first);
            for (int b = 0; b < n; b++)
                llm__read_levels(w->type,
                                 (const uint8_t *)w->data + (size_t)(first_row + row) * row_bytes,
                                 first + b, &levels[b]);
            if (l.groups) {
                llm__write_u16(head, levels[0].scale);
                if (l.minimum) llm__write_u16(head + LLM__PANEL * 4, levels[0].minimum);
            } else if (l.multipliers) {
                uint16_t scales[BLOCKS];
                int16_t multipliers[BLOCKS];
                for (int b = 0; b < n; b++) scales[b] = levels[b].scale;
                llm__write_u16(head, llm__find_multipliers(scales, n, multipliers));
                for (int b = 0; b < n; b++) levels[b].scale = (uint16_t)multipliers[b];
            }
            for (int b = 0; b < n; b++) {
                int64_t block = first + b;
                uint8_t *stripe = span + llm__span_head(l) +
                                  (size_t)(block / 2 % LLM__SPAN) * stripe_bytes;
                uint8_t *to = stripe + llm__stripe_head(l) + block % 2 * LLM__PANEL * 4 * l.quads;
                uint8_t *scales = stripe + block % 2 * LLM__PANEL * 2;
                uint32_t words[8];
                llm__pack_quads(l.quads, levels[b].q, words);
                for (int i = 0; l.groups && i < 2; i++)
                    scales[i * LLM__PANEL + row] = levels[b].group[i];
                if (!l.groups) llm__write_u16(scales + 2 * row, levels[b].scale);
                if (!l.groups && l.minimum)
                    llm__write_u16(scales + LLM__PANEL * 4 + 2 * row, levels[b].minimum);
                for (int q = 0; q < l.quads; q++)
                    memcpy(to + (q * LLM__PANEL + row) * 4, &words[q], 4);
            }
        }
}

/* x is rounded to int8, with a scale per 32 values, or per 256 for weights with multipliers. A tile
 * of x has `height` rows: 16, or all n rows if n is at most 8. A stripe of the tile contains:
 *
 *   values  (height, 64)    int8
 *   scales  (height, 2)     f32   one per block; with multipliers: one, followed by
 *                                 (2) i16, -8 times the sum of each block
 *   sums    (height, 2, 2)  i16   sums of half blocks */
/* bytes of x per row and stripe */
enum { LLM__X_BYTES = LLM__STRIPE + 2 * sizeof(float) + 4 * sizeof(int16_t) };

enum { /* see "Matrix tiles" */
    LLM__CHUNK = 2 * LLM__SPAN, /* blocks unpacked together ("by halves": half as many) */
    LLM__TILE_PANELS = 4,  /* panels unpacked together ("in chunks": half as many) */
    LLM__GROUP = 4,        /* blocks that the tile unit multiplies together */
    /* bytes of scratch, without the sums */
    LLM__TILES_BYTES = LLM__GROUP * 1024 + LLM__TILE_PANELS * LLM__CHUNK * (512 + 2 * 64)
};

static int64_t llm__stripes(int64_t cols) { return llm__divide_up(cols, LLM__STRIPE); }

/* Number of values of x that share a scale. */
static int llm__x_group(llm_type type) {
    return llm__layout_of(type).multipliers ? LLM__SUPER : LLM__BLOCK;
}

LLM__INLINE const char *llm__x_tile(const llm__matmul_args *args, int64_t tile) {
    return (const char *)args->x_tiles + (size_t)tile * args->x_tile_bytes;
}

/* ---- The fast kernels: one text, compiled once per instruction set ----
 * This file includes itself once per pass (further down). A pass defines:
 *
 *   LLM__KERNEL_PASS  0: baseline (SSE2, NEON, ...), 1: AVX2, 2: AVX-512 with VNNI,
 *                     3: NEON with dot products
 *   LLM__W            floats in a vector register: 4, 8, 16
 *   LLM__ROWS         rows of weights, or queries, whose sums advance together
 *   LLM__X_ROWS       most rows of x that share an unpacked block
 *   LLM__K(name)      the name with the prefix of the pass, such as llm__avx2_name */
#endif
#endif

#ifdef LLM__KERNEL_PASS

#ifdef __clang__ /* undefined-behaviour checks take minutes to compile */
#pragma clang attribute push(__attribute__((no_sanitize("undefined"))), apply_to = function)
#endif

/* Vector types: + - * / act on each lane. */
typedef float LLM__K(vf) __attribute__((vector_size(4 * LLM__W)));
typedef int32_t LLM__K(vi) __attribute__((vector_size(4 * LLM__W)));
#define llm__vf LLM__K(vf)
#define llm__vi LLM__K(vi)

/* -- Operations without a C operator -- */

LLM__INLINE llm__vf LLM__K(load)(const float *p) {
    llm__vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

LLM__INLINE void LLM__K(store)(float *p, llm__vf v) { memcpy(p, &v, sizeof v); }

LLM__INLINE llm__vf LLM__K(all)(float x) { return x - (llm__vf){0}; }

/* Per lane: v where the mask is all ones, 0 where it is 0. Comparisons give such masks. */
LLM__INLINE llm__vf LLM__K(where)(llm__vi mask, llm__vf v) { return (llm__vf)((llm__vi)v & mask); }

LLM__INLINE llm__vf LLM__K(absolute)(llm__vf v) { return (llm__vf)((llm__vi)v & 0x7fffffff); }

#if LLM__KERNEL_PASS == 2

LLM__INLINE llm__vf LLM__K(fma)(llm__vf a, llm__vf b, llm__vf c) {
    return (llm__vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
LLM__INLINE llm__vf LLM__K(max)(llm__vf a, llm__vf b) {
    return (llm__vf)_mm512_max_ps((__m512)a, (__m512)b);
}
LLM__INLINE llm__vi LLM__K(nearest)(llm__vf v) { return (llm__vi)_mm512_cvtps_epi32((__m512)v); }
LLM__INLINE llm__vf LLM__K(from_f16)(const uint16_t *p) {
    return (llm__vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
LLM__INLINE void LLM__K(to_f16)(uint16_t *p, llm__vf v) {
    _mm256_storeu_si256((__m256i *)(void *)p,
                        _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LLM__INLINE llm__vf LLM__K(from_bf16)(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return (llm__vf)_mm512_slli_epi32(wide, 16);
}
LLM__INLINE void LLM__K(to_int8)(int8_t *p, llm__vi v) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)v));
}
LLM__INLINE float LLM__K(sum)(llm__vf v) {
    __m512 x = (__m512)v;
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
}
LLM__INLINE float LLM__K(largest)(llm__vf v) { return _mm512_reduce_max_ps((__m512)v); }

#elif LLM__KERNEL_PASS == 1

LLM__INLINE llm__vf LLM__K(fma)(llm__vf a, llm__vf b, llm__vf c) {
    return (llm__vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
LLM__INLINE llm__vf LLM__K(max)(llm__vf a, llm__vf b) {
    return (llm__vf)_mm256_max_ps((__m256)a, (__m256)b);
}
LLM__INLINE llm__vi LLM__K(nearest)(llm__vf v) { return (llm__vi)_mm256_cvtps_epi32((__m256)v); }
LLM__INLINE llm__vf LLM__K(from_f16)(const uint16_t *p) {
    return (llm__vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
LLM__INLINE void LLM__K(to_f16)(uint16_t *p, llm__vf v) {
    _mm_storeu_si128((__m128i *)(void *)p,
                     _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LLM__INLINE llm__vf LLM__K(from_bf16)(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return (llm__vf)_mm256_slli_epi32(wide, 16);
}
LLM__INLINE void LLM__K(to_int8)(int8_t *p, llm__vi v) {
    __m256i x = (__m256i)v;
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(words, words));
}
LLM__INLINE float LLM__K(sum)(llm__vf v) {
    __m256 y = (__m256)v;
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
}
LLM__INLINE float LLM__K(largest)(llm__vf v) {
    __m256 y = (__m256)v;
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_shuffle_ps(z, z, 1)));
}

#else

LLM__INLINE llm__vf LLM__K(fma)(llm__vf a, llm__vf b, llm__vf c) {
#if defined(__aarch64__) /* always fused; the compiler would fuse only in some places */
    return (llm__vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
LLM__INLINE llm__vf LLM__K(max)(llm__vf a, llm__vf b) {
    llm__vi greater = a > b;
    return (llm__vf)(((llm__vi)a & greater) | ((llm__vi)b & ~greater));
}
/* Round to an integer, for |v| < 2^22: adding 1.5 x 2^23 leaves the integer in the low bits. */
#if defined(__aarch64__) /* the compiler could fuse that addition with a product */
LLM__INLINE llm__vi LLM__K(nearest)(llm__vf v) { return (llm__vi)vcvtnq_s32_f32((float32x4_t)v); }
#else
LLM__INLINE llm__vi LLM__K(nearest)(llm__vf v) { return (llm__vi)(v + 12582912.0f) - 0x4b400000; }
#endif
#if defined(__aarch64__)
LLM__INLINE llm__vf LLM__K(from_f16)(const uint16_t *p) {
    return (llm__vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
#else
/* The bits of an f16, moved to the fields of an f32, give 2^-112 times its value, even if
 * denormal. */
LLM__INLINE llm__vf LLM__K(from_f16)(const uint16_t *p) {
    llm__vi half = {0};
    LLM__UNROLL for (int i = 0; i < LLM__W; i++) half[i] = p[i];
    llm__vi magnitude = (half & 0x7fff) << 13;
    llm__vi special = (llm__vi)(magnitude >= 0x0f800000) & 0x7f800000; /* infinities, NaNs */
    llm__vi value = (llm__vi)((llm__vf)magnitude * 5192296858534827628530496329220096.0f);
    return (llm__vf)(value | special | (half & 0x8000) << 16);
}
#endif
LLM__INLINE void LLM__K(to_f16)(uint16_t *p, llm__vf v) {
    for (int i = 0; i < LLM__W; i++) p[i] = llm__f32_to_f16(v[i]);
}
LLM__INLINE llm__vf LLM__K(from_bf16)(const uint16_t *p) {
    llm__vi wide = {0};
    LLM__UNROLL for (int i = 0; i < LLM__W; i++) wide[i] = p[i];
    return (llm__vf)(wide << 16);
}
LLM__INLINE void LLM__K(to_int8)(int8_t *p, llm__vi v) {
    LLM__UNROLL for (int i = 0; i < LLM__W; i++) p[i] = (int8_t)v[i];
}
LLM__INLINE float LLM__K(sum)(llm__vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
LLM__INLINE float LLM__K(largest)(llm__vf v) {
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}

#endif

/* Load n < LLM__W floats; the other lanes are 0. */
LLM__INLINE llm__vf LLM__K(load_some)(const float *p, int n) {
    float padded[LLM__W] = {0};
    memcpy(padded, p, (size_t)n * sizeof *p);
    return LLM__K(load)(padded);
}

LLM__INLINE void LLM__K(store_some)(float *p, llm__vf v, int n) {
    float values[LLM__W];
    LLM__K(store)(values, v);
    memcpy(p, values, (size_t)n * sizeof *p);
}

/* The same for n <= LLM__W. */
LLM__INLINE llm__vf LLM__K(load_up_to)(const float *p, int n) {
    return n == LLM__W ? LLM__K(load)(p) : LLM__K(load_some)(p, n);
}

LLM__INLINE void LLM__K(store_up_to)(float *p, llm__vf v, int n) {
    if (n == LLM__W) LLM__K(store)(p, v);
    else LLM__K(store_some)(p, v, n);
}

/* Load LLM__W values of f32, f16 or bf16 from element i on. `type` is a constant. */
LLM__INLINE llm__vf LLM__K(load_as)(llm_type type, const void *row, int64_t i) {
    if (type == LLM_F16) return LLM__K(from_f16)((const uint16_t *)row + i);
    if (type == LLM_BF16) return LLM__K(from_bf16)((const uint16_t *)row + i);
    return LLM__K(load)((const float *)row + i);
}

LLM__INLINE llm__vf LLM__K(load_some_as)(llm_type type, const void *row, int64_t i, int n) {
    if (type == LLM_F32) return LLM__K(load_some)((const float *)row + i, n);
    uint16_t padded[LLM__W] = {0};
    memcpy(padded, (const uint16_t *)row + i, (size_t)n * sizeof padded[0]);
    return LLM__K(load_as)(type, padded, 0);
}

/* e^x = 2^k e^r with integer k and |r| <= about ln(2)/2; e^r is its Taylor series to r^7 (error
 * below 1e-8). Returns 0 for x < -87, and e^88 for x > 88. */
LLM__INLINE llm__vf LLM__K(exp)(llm__vf x) {
    const float log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    llm__vi normal = (llm__vi)(x >= -87.0f);
    x = LLM__K(max)(x, LLM__K(all)(-87.0f));
    x = -LLM__K(max)(-x, LLM__K(all)(-88.0f));
    llm__vi k = LLM__K(nearest)(x * log2_e);
    llm__vf whole = __builtin_convertvector(k, llm__vf);
    llm__vf r = LLM__K(fma)(whole, LLM__K(all)(-ln2_high), x);
    r = LLM__K(fma)(whole, LLM__K(all)(-ln2_low), r);
    llm__vf sum = LLM__K(all)(1.0f / 5040.0f);
    sum = LLM__K(fma)(sum, r, LLM__K(all)(1.0f / 720.0f));
    sum = LLM__K(fma)(sum, r, LLM__K(all)(1.0f / 120.0f));
    sum = LLM__K(fma)(sum, r, LLM__K(all)(1.0f / 24.0f));
    sum = LLM__K(fma)(sum, r, LLM__K(all)(1.0f / 6.0f));
    sum = LLM__K(fma)(sum, r, LLM__K(all)(0.5f));
    sum = LLM__K(fma)(sum, r, LLM__K(all)(1.0f));
    sum = LLM__K(fma)(sum, r, LLM__K(all)(1.0f));
    return LLM__K(where)(normal, sum * (llm__vf)((k + 127) << 23));
}

/* -- Normalisation and activation -- */

static void LLM__K(rmsnorm)(const float *x, const float *weight, int n, int dim, float epsilon,
                            bool add, float *out) {
    int whole = dim - dim % LLM__W, rest = dim % LLM__W;
    for (int row = 0; row < n; row++, x += dim, out += dim) {
        llm__vf squares = {0};
        for (int i = 0; i < whole; i += LLM__W)
            squares = LLM__K(fma)(LLM__K(load)(x + i), LLM__K(load)(x + i), squares);
        if (rest) {
            llm__vf tail = LLM__K(load_some)(x + whole, rest);
            squares = LLM__K(fma)(tail, tail, squares);
        }
        float scale = 1.0f / sqrtf(LLM__K(sum)(squares) / (float)dim + epsilon);
        for (int i = 0; i < whole; i += LLM__W) {
            llm__vf y = LLM__K(load)(x + i) * scale * LLM__K(load)(weight + i);
            LLM__K(store)(out + i, add ? LLM__K(load)(out + i) + y : y);
        }
        for (int i = whole; i < dim; i++)
            out[i] = x[i] * scale * weight[i] + (add ? out[i] : 0.0f);
    }
}

static void LLM__K(layernorm)(const float *x, const float *weight, const float *bias, int n,
                              int dim, float epsilon, float *out) {
    for (int row = 0; row < n; row++, x += dim, out += dim) {
        llm__vf sum = {0};
        for (int i = 0; i < dim; i += LLM__W)
            sum += LLM__K(load_up_to)(x + i, (int)llm__min(LLM__W, dim - i));
        float mean = LLM__K(sum)(sum) / (float)dim;
        for (int i = 0; i < dim; i++) out[i] = x[i] - mean;
        LLM__K(rmsnorm)(out, weight, 1, dim, epsilon, false, out);
        for (int i = 0; bias && i < dim; i++) out[i] += bias[i];
    }
}

LLM__INLINE llm__vf LLM__K(silu_times)(llm__vf gate, llm__vf up) {
    return gate / (1.0f + LLM__K(exp)(-gate)) * up;
}

/* GELU: see llm__plain_swiglu. */
LLM__INLINE llm__vf LLM__K(gelu_times)(llm__vf x, llm__vf up) {
    return x / (1.0f + LLM__K(exp)(-1.59576912f * (x + 0.044715f * x * x * x))) * up;
}

/* Exact GELU: max(x, 0) - |x| times the share of a normal distribution beyond |x|, to 1e-7
 * (Abramowitz and Stegun 7.1.26). */
LLM__INLINE llm__vf LLM__K(gelu_erf_times)(llm__vf x, llm__vf up) {
    llm__vf size = LLM__K(absolute)(x), t = 1.0f / (1.0f + 0.231641888f * size);
    llm__vf sum = LLM__K(fma)(LLM__K(all)(0.5307027145f), t, LLM__K(all)(-0.7265760135f));
    sum = LLM__K(fma)(sum, t, LLM__K(all)(0.7107068705f));
    sum = LLM__K(fma)(sum, t, LLM__K(all)(-0.142248368f));
    sum = LLM__K(fma)(sum, t, LLM__K(all)(0.127414796f));
    return (LLM__K(max)(x, LLM__K(all)(0.0f)) - size * sum * t * LLM__K(exp)(-0.5f * x * x)) * up;
}

static void LLM__K(swiglu)(llm_activation f, const float *gate, const float *up, int64_t n,
                           float *out) {
    for (int64_t i = 0; i < n; i += LLM__W) {
        int some = (int)llm__min(LLM__W, n - i);
        llm__vf x = LLM__K(load_up_to)(gate + i, some),
                y = up ? LLM__K(load_up_to)(up + i, some) : LLM__K(all)(1.0f);
        LLM__K(store_up_to)(out + i,
                            f == LLM_SILU       ? LLM__K(silu_times)(x, y)
                            : f == LLM_GELU_ERF ? LLM__K(gelu_erf_times)(x, y)
                                                : LLM__K(gelu_times)(x, y),
                            some);
    }
}

/* cap tanh(x / cap), where tanh(y) = 1 - 2 / (e^2y + 1) */
LLM__INLINE llm__vf LLM__K(capped)(llm__vf x, float cap) {
    return cap - 2.0f * cap / (LLM__K(exp)(x * (2.0f / cap)) + 1.0f);
}

static void LLM__K(softcap)(const float *x, float cap, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i += LLM__W) {
        int some = (int)llm__min(LLM__W, n - i);
        LLM__K(store_up_to)(out + i, LLM__K(capped)(LLM__K(load_up_to)(x + i, some), cap), some);
    }
}

/* -- Rows of logits, for chapter 3 -- */

/* Index of the first largest value. A NaN is never the largest. */
static int32_t LLM__K(argmax)(const float *x, int n) {
    llm__vf most = LLM__K(all)(-INFINITY);
    llm__vi at = {0}, best = {0};
    int i = 0;
    for (int lane = 0; lane < LLM__W; lane++) at[lane] = lane;
    for (; i + LLM__W <= n; i += LLM__W, at += LLM__W) {
        llm__vf v = LLM__K(load)(x + i);
        llm__vi more = (llm__vi)(v > most);
        most = (llm__vf)(((llm__vi)v & more) | ((llm__vi)most & ~more));
        best = (at & more) | (best & ~more);
    }
    float top = -INFINITY;
    int32_t index = 0;
    for (int lane = 0; lane < LLM__W; lane++)
        if (most[lane] > top || (most[lane] == top && top > -INFINITY && best[lane] < index))
            top = most[lane], index = best[lane];
    for (; i < n; i++)
        if (x[i] > top) top = x[i], index = i;
    return index;
}

/* exp(x), or NaN if x is NaN */
LLM__INLINE llm__vf LLM__K(exp_or_nan)(llm__vf x) {
    return LLM__K(exp)(x) + LLM__K(where)((llm__vi)(x != x), x);
}

/* sum(exp(x - shift)), where shift is the largest x. After each 64 floats per lane, the sum of the
 * lanes is added to a double. */
static double LLM__K(sum_exp)(const float *x, int n, float shift) {
    double sum = 0;
    for (int first = 0; first < n; first += 64 * LLM__W) {
        int end = (int)llm__min(first + 64 * LLM__W, n), i = first;
        llm__vf part = {0};
        for (; i + LLM__W <= end; i += LLM__W)
            part += LLM__K(exp_or_nan)(LLM__K(load)(x + i) - shift);
        if (i < end) {
            float rest[LLM__W];
            for (int lane = 0; lane < LLM__W; lane++)
                rest[lane] = i + lane < end ? x[i + lane] - shift : -INFINITY;
            part += LLM__K(exp_or_nan)(LLM__K(load)(rest));
        }
        sum += (double)LLM__K(sum)(part);
    }
    return sum;
}

/* -- Matrix products in floating point --
 * For out[i][row], lane l sums the products of columns l, l + W, l + 2W, ... Each addition to a sum
 * waits for the previous one, so R rows of weights are multiplied by T rows of x at the same time:
 * R + T loads for R x T multiply-adds. */

LLM__INLINE void LLM__K(finish)(const llm__matmul_args *args, int64_t i, int64_t row, float sum) {
    float *out = args->out + i * args->w->rows + row;
    if (args->bias) sum += args->bias[row];
    *out = args->add ? *out + sum : sum;
}

/* Multiply R rows of weights, row_bytes apart, by T rows of x. R, T and type are constants. */
LLM__INLINE void LLM__K(dot_block)(llm_type type, int R, int T, const llm__matmul_args *args,
                                   const char *weights, size_t row_bytes, int64_t row, int64_t i0) {
    int64_t cols = args->w->cols;
    const float *x = args->x + i0 * cols;
    int64_t whole = cols - cols % LLM__W;
    int rest = (int)(cols % LLM__W);
    llm__vf sums[LLM__ROWS][4], w[LLM__ROWS];
    LLM__UNROLL for (int r = 0; r < R; r++)
        LLM__UNROLL for (int t = 0; t < T; t++) sums[r][t] = (llm__vf){0};
    for (int64_t j = 0; j < whole; j += LLM__W) {
        LLM__UNROLL for (int r = 0; r < R; r++) {
            w[r] = LLM__K(load_as)(type, weights + (size_t)r * row_bytes, j);
            if (T == 1)
                LLM__PREFETCH_FAR(weights + (size_t)(R + r) * row_bytes +
                                  (size_t)j * (type == LLM_F32 ? 4 : 2));
        }
        LLM__UNROLL for (int t = 0; t < T; t++) {
            llm__vf xt = LLM__K(load)(x + t * cols + j);
            LLM__UNROLL for (int r = 0; r < R; r++) sums[r][t] = LLM__K(fma)(w[r], xt, sums[r][t]);
        }
    }
    if (rest) {
        LLM__UNROLL for (int r = 0; r < R; r++)
            w[r] = LLM__K(load_some_as)(type, weights + (size_t)r * row_bytes, whole, rest);
        LLM__UNROLL for (int t = 0; t < T; t++) {
            llm__vf xt = LLM__K(load_some)(x + t * cols + whole, rest);
            LLM__UNROLL for (int r = 0; r < R; r++) sums[r][t] = LLM__K(fma)(w[r], xt, sums[r][t]);
        }
    }
    LLM__UNROLL for (int r = 0; r < R; r++)
        LLM__UNROLL for (int t = 0; t < T; t++)
            LLM__K(finish)(args, i0 + t, row + r, LLM__K(sum)(sums[r][t]));
}

/* Multiply `count` rows of weights, which fit in the L2 cache, by all rows of x, 4 at a time: these
 * 4 stay in the L1 cache while the weights are read. */
LLM__INLINE void LLM__K(dot_rows)(llm_type type, const llm__matmul_args *args, const char *weights,
                                  size_t row_bytes, int64_t row, int64_t count) {
    for (int64_t i = 0, together; i < args->n; i += together) {
        together = args->n - i >= 4 ? 4 : 1;
        int64_t r = 0;
        for (; r + LLM__ROWS <= count; r += LLM__ROWS)
            if (together == 4)
                LLM__K(dot_block)(type, LLM__ROWS, 4, args, weights + (size_t)r * row_bytes,
                                  row_bytes, row + r, i);
            else
                LLM__K(dot_block)(type, LLM__ROWS, 1, args, weights + (size_t)r * row_bytes,
                                  row_bytes, row + r, i);
        for (; r < count; r++)
            for (int64_t k = i; k < i + together; k++)
                LLM__K(dot_block)(type, 1, 1, args, weights + (size_t)r * row_bytes, row_bytes,
                                  row + r, k);
    }
}

static void LLM__K(dot_rows_f32)(const llm__matmul_args *args, const char *weights,
                                 size_t row_bytes, int64_t row, int64_t count) {
    LLM__K(dot_rows)(LLM_F32, args, weights, row_bytes, row, count);
}

LLM__INLINE void LLM__K(unpack_rows)(llm_type type, const char *weights, size_t row_bytes,
                                     int64_t cols, int64_t count, float *tile) {
    for (int64_t r = 0; r < count; r++, weights += row_bytes, tile += cols) {
        int64_t j = 0;
        for (; j + LLM__W <= cols; j += LLM__W)
            LLM__K(store)(tile + j, LLM__K(load_as)(type, weights, j));
        if (j < cols)
            LLM__K(store_some)(tile + j, LLM__K(load_some_as)(type, weights, j, (int)(cols - j)),
                               (int)(cols - j));
    }
}

static void LLM__K(unpack_tile)(llm_type type, const char *weights, size_t row_bytes, int64_t cols,
                                int64_t count, float *tile) {
    if (type == LLM_F16) LLM__K(unpack_rows)(LLM_F16, weights, row_bytes, cols, count, tile);
    else if (type == LLM_BF16) LLM__K(unpack_rows)(LLM_BF16, weights, row_bytes, cols, count, tile);
    else /* the rows are contiguous whole blocks */
        llm_type_find(type)->unpack(weights, tile, count * cols);
}

/* With few rows of x, f16 and bf16 weights are converted on the fly; with more, a tile of weights
 * is converted once for all rows. Both give the same bits. */
static void LLM__K(matmul_float)(const llm__matmul_args *args, int64_t first, int64_t end,
                                 void *scratch) {
    const llm_weight *w = args->w;
    size_t row_bytes = llm__row_bytes(w->type, w->cols);
    const char *weights = (const char *)w->data;
    bool few = args->n <= LLM__FEW_ROWS;
    int64_t tile_rows = (int64_t)(args->tile_bytes / ((size_t)w->cols * sizeof(float)));
    tile_rows = llm__max(tile_rows - tile_rows % LLM__ROWS, 1);
    for (int64_t row = first; row < end; row += tile_rows) {
        int64_t count = llm__min(tile_rows, end - row);
        const char *part = weights + (size_t)row * row_bytes;
        if (w->type == LLM_F32) LLM__K(dot_rows_f32)(args, part, row_bytes, row, count);
        else if (few && w->type == LLM_F16)
            LLM__K(dot_rows)(LLM_F16, args, part, row_bytes, row, count);
        else if (few && w->type == LLM_BF16)
            LLM__K(dot_rows)(LLM_BF16, args, part, row_bytes, row, count);
        else {
            LLM__K(unpack_tile)(w->type, part, row_bytes, w->cols, count, (float *)scratch);
            LLM__K(dot_rows_f32)(args, (const char *)scratch, (size_t)w->cols * sizeof(float), row,
                                 count);
        }
    }
}

/* -- Integer products: the block formats --
 * One instruction multiplies four pairs of 8-bit integers per lane and adds the products. So x is
 * rounded to int8:
 *
 *   sum w x  =  sum over blocks of  w_scale x_scale  (sum of 32 integer products)
 *
 * With multipliers (see "Panels"), 256 values of x share a scale, and 32 bits hold the sum over
 * their eight blocks:
 *
 *   sum w x  =  sum over groups of 256 columns of
 *               w_scale x_scale  (sum over blocks of  multiplier (sum of 32 integer products))
 *
 * Only the outer sum is rounded. It has one order, in one lane per row of weights, so all forms
 * below give the same bits.
 *
 *   AVX-512  vpdpbusd adds four unsigned x signed products to an int32 lane. Lane r has a quad of
 *            row r; all lanes have the same four columns of x. A nibble of q4_0 is w + 8, so sums
 *            start from -8 times the sum of x, which is stored with x. For q8_0, 128 is added to w
 *            and corrected in the same way.
 *   AVX2     vpmaddubsw adds pairs of unsigned x signed products in 16 bits. For 4-bit weights, the
 *            sum of eight results fits (8 x 2 x 15 x 127); for q8_0, one result fits
 *            (2 x 128 x 127, with the sign of w moved to x). vpmaddwd adds pairs in 32 bits.
 *   arm64    sdot is like vpdpbusd, but both operands are signed.
 *   plain C  Sums are floats, which are exact up to 2^24. */

/* Registers that hold one value for each row of a panel. */
enum { LLM__K(parts) = LLM__PANEL / LLM__W };

typedef struct LLM__K(w_block) { /* one block of LLM__W rows */
#if LLM__KERNEL_PASS == 0
    llm__vf w[LLM__BLOCK];     /* one register per column */
#else
    llm__vi w[LLM__BLOCK / 4]; /* one register per quad of columns */
#endif
    llm__vf scale, minimum;    /* scale, and minimum, which is added to each value */
    /* other: factor of the sum of x (q6_K: multiplier of columns 16 to 31) */
    llm__vi multiplier, other;
} LLM__K(w_block);

LLM__INLINE llm__vi LLM__K(load_int)(const void *p) {
    llm__vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

LLM__INLINE llm__vi LLM__K(from_u8)(const uint8_t *p) {
#if LLM__KERNEL_PASS == 2
    return (llm__vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#elif LLM__KERNEL_PASS == 1
    return (llm__vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
#else
    llm__vi v = {0};
    for (int i = 0; i < LLM__W; i++) v[i] = p[i];
    return v;
#endif
}

LLM__INLINE llm__vi LLM__K(from_i8)(const uint8_t *p) { return (LLM__K(from_u8)(p) ^ 128) - 128; }

LLM__INLINE llm__vi LLM__K(from_i16)(const uint16_t *p) {
    typedef int16_t halves __attribute__((vector_size(2 * LLM__W)));
    halves v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, llm__vi);
}

LLM__INLINE llm__vi LLM__K(all_i32)(const void *p) {
    int32_t v;
    memcpy(&v, p, sizeof v);
    return v - (llm__vi){0};
}

#if LLM__KERNEL_PASS == 1 || LLM__KERNEL_PASS == 2
/* Two 16-bit numbers per lane, `first` in the low half. */
LLM__INLINE llm__vi LLM__K(pair)(llm__vi first, llm__vi second) {
#if LLM__KERNEL_PASS == 2
    return (llm__vi)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)first, (__m512i)(second << 16));
#else
    return (first & 0xffff) | second << 16;
#endif
}

/* Per lane: sum + low(a) low(b) + high(a) high(b), with signed 16-bit halves. */
LLM__INLINE llm__vi LLM__K(add_pair)(llm__vi sum, llm__vi a, llm__vi b) {
#if LLM__KERNEL_PASS == 2
    return (llm__vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (llm__vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

/* Read a 4-bit type's multipliers into the low half of each lane; the high half is 0. half, part:
 * see unpack_quads. */
LLM__INLINE llm__vi LLM__K(unpack_multipliers)(bool groups, const uint8_t *stripe, int half,
                                               int part) {
    typedef uint16_t halves __attribute__((vector_size(2 * LLM__W)));
    halves v;
    if (groups) return LLM__K(from_u8)(stripe + half * 2 * LLM__PANEL + part * LLM__W);
    memcpy(&v, stripe + half * 2 * LLM__PANEL + part * 2 * LLM__W, sizeof v);
    return __builtin_convertvector(v, llm__vi);
}

LLM__INLINE void LLM__K(unpack_scales)(llm__layout l, const uint8_t *stripe, int half, int part,
                                       LLM__K(w_block) *w) {
    const uint16_t *scales = (const uint16_t *)(const void *)stripe + half * LLM__PANEL +
                             part * LLM__W;
    w->scale = w->minimum = (llm__vf){0};
    w->multiplier = w->other = (llm__vi){0};
    if (l.groups) {
        const uint8_t *p = stripe + half * 2 * LLM__PANEL + part * LLM__W;
        w->multiplier = l.quads == 6 ? LLM__K(from_i8)(p) : LLM__K(from_u8)(p);
        w->other = l.quads == 6 ? LLM__K(from_i8)(p + LLM__PANEL) : LLM__K(from_u8)(p + LLM__PANEL);
    } else if (l.multipliers) {
        w->multiplier = LLM__K(from_i16)(scales);
        if (l.minimum) w->other = -(w->multiplier * LLM__K(from_i16)(scales + 2 * LLM__PANEL));
    } else {
        w->scale = LLM__K(from_f16)(scales);
        if (l.minimum) w->minimum = LLM__K(from_f16)(scales + 2 * LLM__PANEL);
    }
}

/* Read scales and minimums of the first (half 0) or last (1) 256 columns of a span. */
LLM__INLINE void LLM__K(unpack_head)(llm__layout l, const uint8_t *span, int half, int part,
                                     llm__vf *scale, llm__vf *minimum) {
    const uint16_t *scales = (const uint16_t *)(const void *)span + half * LLM__PANEL +
                             part * LLM__W;
    *scale = LLM__K(from_f16)(scales);
    if (!l.groups) *scale *= 1.0f / LLM__FULL_SCALE;
    else if (l.minimum) *minimum = -LLM__K(from_f16)(scales + 2 * LLM__PANEL);
}

/* Unpack block `half` of a stripe, LLM__W rows from part * LLM__W on. */
LLM__INLINE void LLM__K(unpack_quads)(llm__layout l, const uint8_t *stripe, int half, int part,
                                      LLM__K(w_block) *w) {
    const int stored = l.quads, bytes = LLM__PANEL * 4;
    const uint8_t *p = stripe + llm__stripe_head(l) + half * bytes * stored + part * 4 * LLM__W;
    llm__vi quads[8];
    LLM__UNROLL for (int q = 0; q < 4; q++) {
        llm__vi v = LLM__K(load_int)(p + q * bytes);
#if LLM__KERNEL_PASS == 1 /* keeps v in a register: otherwise each nibble loads it */
        __asm__("" : "+x"(v));
#elif LLM__KERNEL_PASS == 2
        __asm__("" : "+v"(v));
#endif
        quads[q] = stored == 8 ? v : v & 0x0f0f0f0f;
        quads[q + 4] = stored == 8 ? LLM__K(load_int)(p + (q + 4) * bytes) : v >> 4 & 0x0f0f0f0f;
    }
    if (stored == 5) {
        llm__vi fifth = LLM__K(load_int)(p + 4 * bytes);
        LLM__UNROLL for (int q = 0; q < 8; q++) quads[q] |= (fifth >> q & 0x01010101) << 4;
    }
    if (stored == 6) {
        llm__vi high[2] = {LLM__K(load_int)(p + 4 * bytes), LLM__K(load_int)(p + 5 * bytes)};
        LLM__UNROLL for (int q = 0; q < 8; q++)
            quads[q] |= (high[q / 4] >> (q % 4 * 2) & 0x03030303) << 4;
    }
#if LLM__KERNEL_PASS == 0
    LLM__UNROLL for (int q = 0; q < 8; q++)
        LLM__UNROLL for (int i = 0; i < 4; i++) {
            llm__vi v = quads[q] >> (8 * i);
            w->w[4 * q + i] = __builtin_convertvector(
                l.quads == 8 ? v << 24 >> 24 : (v & 63) - l.zero, llm__vf);
        }
#else
    LLM__UNROLL for (int q = 0; q < 8; q++)
        w->w[q] = LLM__KERNEL_PASS == 2 && l.quads == 8 ? quads[q] ^ (int)0x80808080u : quads[q];
#endif
}

LLM__INLINE void LLM__K(unpack_block)(llm__layout l, const uint8_t *stripe, int half, int part,
                                      LLM__K(w_block) *w) {
    LLM__K(unpack_quads)(l, stripe, half, part, w);
    LLM__K(unpack_scales)(l, stripe, half, part, w);
}

/* Per lane: sum + b times the sum of a block of x. x_sums: its two half-sums. b fits in 16 bits. */
LLM__INLINE llm__vi LLM__K(add_x_sum)(llm__vi sum, const void *x_sums, llm__vi b) {
#if LLM__KERNEL_PASS == 1 || LLM__KERNEL_PASS == 2
    return LLM__K(add_pair)(sum, LLM__K(all_i32)(x_sums), LLM__K(pair)(b, b));
#else
    const int16_t *halves = (const int16_t *)x_sums;
    return sum + (halves[0] + halves[1]) * b;
#endif
}

/* -level times the sum of x over columns 4 * first to 4 * end - 1, which are whole half blocks. */
LLM__INLINE llm__vi LLM__K(minus_level)(int level, int first, int end, const int16_t *x_sums) {
    if (level == 0) return (llm__vi){0};
#if LLM__KERNEL_PASS == 1 || LLM__KERNEL_PASS == 2
    int32_t factors = (first < 4 ? -level & 0xffff : 0) | (end > 4 ? -level * 65536 : 0);
    return LLM__K(add_pair)((llm__vi){0}, LLM__K(all_i32)(x_sums), factors - (llm__vi){0});
#else
    return -level * ((first < 4 ? x_sums[0] : 0) + (end > 4 ? x_sums[1] : 0)) - (llm__vi){0};
#endif
}

/* Multiply columns 4 * first to 4 * end - 1 of LLM__W rows of weights by T rows of x. */
LLM__INLINE void LLM__K(dot_quads)(llm__layout l, int T, const LLM__K(w_block) *w, int first,
                                   int end, const int8_t *x, const int16_t *x_sums, llm__vi *sums) {
#if LLM__KERNEL_PASS == 0
    llm__vf floats[LLM__X_ROWS];
    (void)l, (void)x_sums;
    LLM__UNROLL for (int t = 0; t < T; t++) floats[t] = (llm__vf){0};
    LLM__ROLLED for (int i = 4 * first; i < 4 * end; i++)
        LLM__UNROLL for (int t = 0; t < T; t++)
            floats[t] = LLM__K(fma)(w->w[i], LLM__K(all)(x[t * LLM__STRIPE + i]), floats[t]);
    LLM__UNROLL for (int t = 0; t < T; t++) sums[t] = __builtin_convertvector(floats[t], llm__vi);
#else
    const int level = LLM__KERNEL_PASS == 2 && l.quads == 8 ? 128 : l.zero;
    LLM__UNROLL for (int t = 0; t < T; t++)
        sums[t] = LLM__K(minus_level)(level, first, end, x_sums + 4 * t);
#if LLM__KERNEL_PASS == 1
    LLM__UNROLL
#else
    LLM__ROLLED
#endif
    for (int q = first; q < end; q += LLM__KERNEL_PASS == 1 ? 2 : 1)
        LLM__UNROLL for (int t = 0; t < T; t++) {
            const int8_t *xq = x + t * LLM__STRIPE + 4 * q;
            (void)level;
#if LLM__KERNEL_PASS == 2
            sums[t] = (llm__vi)_mm512_dpbusd_epi32((__m512i)sums[t], (__m512i)w->w[q],
                                                   (__m512i)LLM__K(all_i32)(xq));
#elif LLM__KERNEL_PASS == 3
            sums[t] = (llm__vi)vdotq_s32((int32x4_t)sums[t], (int8x16_t)w->w[q],
                                         (int8x16_t)LLM__K(all_i32)(xq));
#else
            __m256i v[2] = {(__m256i)w->w[q], (__m256i)w->w[q + 1]},
                    some[2] = {(__m256i)LLM__K(all_i32)(xq), (__m256i)LLM__K(all_i32)(xq + 4)};
            const __m256i ones = _mm256_set1_epi16(1);
            /* x takes the sign of w, so that a result of vpmaddubsw fits in 16 bits */
            if (l.quads == 8)
                LLM__UNROLL for (int i = 0; i < 2; i++)
                    sums[t] += (llm__vi)_mm256_madd_epi16(
                        _mm256_maddubs_epi16(_mm256_abs_epi8(v[i]),
                                             _mm256_sign_epi8(some[i], v[i])),
                        ones);
            else
                sums[t] += (llm__vi)_mm256_madd_epi16(
                    _mm256_add_epi16(_mm256_maddubs_epi16(v[0], some[0]),
                                     _mm256_maddubs_epi16(v[1], some[1])),
                    ones);
#endif
        }
#endif
}

/* Add to sums[t][part]: a block of LLM__W rows times 32 values of row t of x, for T rows. */
LLM__INLINE void LLM__K(add_block)(llm__layout l, int T, const LLM__K(w_block) *w, int part,
                                   const int8_t *x, const float *scales, const int16_t *x_sums,
                                   llm__vf (*sums)[LLM__K(parts)]) {
    llm__vi products[LLM__X_ROWS];
    LLM__K(dot_quads)(l, T, w, 0, 8, x, x_sums, products);
    LLM__UNROLL for (int t = 0; t < T; t++) {
        sums[t][part] = LLM__K(fma)(__builtin_convertvector(products[t], llm__vf),
                                    w->scale * scales[2 * t], sums[t][part]);
        if (l.minimum)
            sums[t][part] = LLM__K(fma)(
                w->minimum, LLM__K(all)(scales[2 * t] * (float)(x_sums[4 * t] + x_sums[4 * t + 1])),
                sums[t][part]);
    }
}

/* The same in integers, for weights with multipliers. q4_K, q5_K: also add the minimum's multiplier
 * times the sum of x to minimums[t][part]. */
LLM__INLINE void LLM__K(add_whole_block)(llm__layout l, int T, const LLM__K(w_block) *w, int part,
                                         const int8_t *x, const int16_t *x_sums,
                                         llm__vi (*sums)[LLM__K(parts)],
                                         llm__vi (*minimums)[LLM__K(parts)]) {
    llm__vi products[LLM__X_ROWS];
    if (l.quads == 6) {
        LLM__K(dot_quads)(l, T, w, 0, 4, x, x_sums, products);
        LLM__UNROLL for (int t = 0; t < T; t++) sums[t][part] += products[t] * w->multiplier;
        LLM__K(dot_quads)(l, T, w, 4, 8, x, x_sums, products);
        LLM__UNROLL for (int t = 0; t < T; t++) sums[t][part] += products[t] * w->other;
        return;
    }
    LLM__K(dot_quads)(l, T, w, 0, 8, x, x_sums, products);
    LLM__UNROLL for (int t = 0; t < T; t++) sums[t][part] += products[t] * w->multiplier;
    if (!l.minimum) return;
    LLM__UNROLL for (int t = 0; t < T; t++) {
        llm__vi *to = l.groups ? &minimums[t][part] : &sums[t][part];
        *to = LLM__K(add_x_sum)(*to, x_sums + 4 * t, w->other);
    }
}

typedef struct LLM__K(short_sums) {
    llm__vi rows[LLM__X_ROWS], multiplier; /* of the stripe's first block */
} LLM__K(short_sums);

/* Short sums, for 4-bit weights with multipliers, on x86: one instruction multiplies two pairs of
 * 16-bit numbers per lane and adds both products. So it applies two multipliers at once, if the
 * sums fit in 16 bits. An AVX2 lane has two sums of 16 products, which fit (16 x 15 x 127 = 30480).
 * An AVX-512 lane has one sum of 32 products, which does not (60960): it starts from -8 times the
 * sum of x, and so becomes a sum of (w - 8) x, at most 32512. Only the low half of the lane is
 * used, modulo 2^16.
 *
 *   block 0:  -8 sum x + 8 vpdpbusd   . . .  | sum 0
 *   block 1:  the same                . . .  | sum 1
 *   pair, one vpdpwssd                sum 1  | sum 0   times  multiplier 1 | multiplier 0
 *
 * AVX2 has 16 registers: four hold weights (both nibbles, both halves of the panel), eight hold
 * sums (of four rows of x). */
LLM__INLINE void LLM__K(add_short_half)(llm__layout l, int T, const uint8_t *stripe, int half,
                                        const int8_t *x, const char *starts,
                                        LLM__K(short_sums) *before,
                                        llm__vi (*sums)[LLM__K(parts)]) {
#if LLM__KERNEL_PASS == 2
    const uint8_t *quads = stripe + llm__stripe_head(l) + half * LLM__PANEL * 16;
    llm__vi now[LLM__X_ROWS], multiplier = LLM__K(unpack_multipliers)(l.groups, stripe, half, 0);
    LLM__UNROLL for (int t = 0; t < T; t++) now[t] = LLM__K(all_i32)(starts + 8 * t + 2 * half);
    LLM__ROLLED for (int q = 0; q < 4; q++, quads += LLM__PANEL * 4, x += 4) {
        llm__vi v = LLM__K(load_int)(quads);
        __asm__("" : "+v"(v)); /* as in unpack_quads */
        /* additions to the same sum wait for each other, so t is the inner loop */
        LLM__UNROLL for (int t = 0; t < T; t++)
            now[t] = (llm__vi)_mm512_dpbusd_epi32((__m512i)now[t], (__m512i)(v & 0x0f0f0f0f),
                                                  (__m512i)LLM__K(all_i32)(x + t * LLM__STRIPE));
        LLM__UNROLL for (int t = 0; t < T; t++)
            now[t] = (llm__vi)_mm512_dpbusd_epi32(
                (__m512i)now[t], (__m512i)(v >> 4 & 0x0f0f0f0f),
                (__m512i)LLM__K(all_i32)(x + t * LLM__STRIPE + 16));
    }
    if (half == 0) {
        LLM__UNROLL for (int t = 0; t < T; t++) before->rows[t] = now[t];
        before->multiplier = multiplier;
    } else {
        llm__vi multipliers = LLM__K(pair)(before->multiplier, multiplier);
        LLM__UNROLL for (int t = 0; t < T; t++)
            sums[t][0] = LLM__K(add_pair)(sums[t][0], LLM__K(pair)(before->rows[t], now[t]),
                                          multipliers);
    }
#elif LLM__KERNEL_PASS == 1
    (void)starts, (void)before;
    /* 16 bytes per row of a block */
    const uint8_t *quads = stripe + llm__stripe_head(l) + half * LLM__PANEL * 16;
    llm__vi now[LLM__X_ROWS][2];
    LLM__UNROLL for (int q = 0; q < 4; q++, quads += LLM__PANEL * 4) {
        llm__vi w[2][2];
        LLM__UNROLL for (int part = 0; part < 2; part++) {
            llm__vi v = LLM__K(load_int)(quads + part * 4 * LLM__W);
            __asm__("" : "+x"(v)); /* as in unpack_quads */
            w[part][0] = v & 0x0f0f0f0f;
            w[part][1] = v >> 4 & 0x0f0f0f0f;
        }
        __asm__("" : "+r"(x)); /* delays the loads of x to here */
        LLM__UNROLL for (int t = 0; t < T; t++)
            LLM__UNROLL for (int nibble = 0; nibble < 2; nibble++) {
                __m256i values = (__m256i)LLM__K(all_i32)(x + t * LLM__STRIPE + 4 * q +
                                                          16 * nibble);
                LLM__UNROLL for (int part = 0; part < 2; part++) {
                    __m256i products = _mm256_maddubs_epi16((__m256i)w[part][nibble], values);
                    now[t][part] = (llm__vi)(q + nibble
                                                 ? _mm256_add_epi16((__m256i)now[t][part], products)
                                                 : products);
                    /* keeps this order: a tree of additions would spill registers */
                    __asm__("" : "+x"(now[t][part]));
                }
            }
    }
    LLM__UNROLL for (int part = 0; part < 2; part++) {
        llm__vi multiplier = LLM__K(unpack_multipliers)(l.groups, stripe, half, part),
                multipliers = multiplier | multiplier << 16;
        LLM__UNROLL for (int t = 0; t < T; t++)
            sums[t][part] = LLM__K(add_pair)(sums[t][part], now[t][part], multipliers);
    }
#else
    (void)l, (void)T, (void)stripe, (void)half, (void)x, (void)starts, (void)before, (void)sums;
#endif
}

/* Short sums are of w x (AVX2) or (w - 8) x (AVX-512). To get sums of (w - zero) x, add `missing` x
 * multiplier x -8 sum x (stored with x), then q4_Z's zero points. For q4_K and q5_K, add the
 * minimum's multiplier x -8 sum x to `minimums`. */
LLM__INLINE void LLM__K(correct_short_sums)(llm__layout l, const uint8_t *stripe, int T,
                                            const char *starts, const char *x_sums,
                                            llm__vi (*sums)[LLM__K(parts)],
                                            llm__vi (*minimums)[LLM__K(parts)]) {
#if LLM__KERNEL_PASS == 1 || LLM__KERNEL_PASS == 2
    const int missing = l.zero / 8 - (LLM__KERNEL_PASS == 2);
    LLM__UNROLL for (int part = 0; part < LLM__K(parts); part++) {
        LLM__K(w_block) w[2];
        LLM__UNROLL for (int half = 0; half < 2; half++)
            LLM__K(unpack_scales)(l, stripe, half, part, &w[half]);
        llm__vi factors = LLM__K(pair)(missing * w[0].multiplier, missing * w[1].multiplier);
        LLM__UNROLL for (int t = 0; t < T; t++) {
            llm__vi start = LLM__K(all_i32)(starts + 8 * t);
            if (missing) sums[t][part] = LLM__K(add_pair)(sums[t][part], start, factors);
            if (l.groups)
                minimums[t][part] = LLM__K(add_pair)(minimums[t][part], start,
                                                     LLM__K(pair)(w[0].other, w[1].other));
            else if (l.minimum)
                LLM__UNROLL for (int half = 0; half < 2; half++)
                    sums[t][part] = LLM__K(add_x_sum)(sums[t][part], x_sums + 8 * t + 4 * half,
                                                      w[half].other);
        }
    }
#else
    (void)l, (void)stripe, (void)T, (void)starts, (void)x_sums, (void)sums, (void)minimums;
#endif
}

/* Add the bias, add the residual or apply the gate, and store up to LLM__W rows. Not inlined, to
 * compile faster. */
static LLM__NOINLINE void LLM__K(finish_some)(const llm__matmul_args *args, float *out, int64_t row,
                                              llm__vf sum) {
    int n = (int)llm__min(args->w->rows - row, LLM__W);
    bool whole = n == LLM__W;
    llm__vf before = {0};
    if (args->bias)
        sum += whole ? LLM__K(load)(args->bias + row) : LLM__K(load_some)(args->bias + row, n);
    if (args->add || args->gate) before = whole ? LLM__K(load)(out) : LLM__K(load_some)(out, n);
    if (args->add) sum = before + sum;
    else if (args->gate) sum = LLM__K(silu_times)(before, sum);
    if (whole) LLM__K(store)(out, sum);
    else LLM__K(store_some)(out, sum, n);
}

/* The same for LLM__PANEL rows. Whole registers without a gate are handled inline. */
LLM__INLINE void LLM__K(finish_panel)(const llm__matmul_args *args, int64_t i, int64_t row,
                                      const llm__vf *sums) {
    float *out = args->out + i * args->w->rows + row;
    LLM__UNROLL for (int part = 0; part < LLM__K(parts); part++, row += LLM__W, out += LLM__W) {
        if (row >= args->w->rows) return;
        llm__vf sum = sums[part];
        if (args->w->rows - row < LLM__W || args->gate) {
            LLM__K(finish_some)(args, out, row, sum);
            continue;
        }
        if (args->bias) sum += LLM__K(load)(args->bias + row);
        if (args->add) sum = LLM__K(load)(out) + sum;
        LLM__K(store)(out, sum);
    }
}

/* Multiply a panel by T rows of x from row i on, all in one tile. T is a constant; so is l if
 * `known`. */
LLM__INLINE void LLM__K(panel_rows)(llm__layout l, bool known, int T, const llm__matmul_args *args,
                                    const uint8_t *panel, int64_t row, int64_t i) {
    const bool whole = l.multipliers, minimums = l.groups && l.minimum,
               short_sums = known && l.multipliers &&
                            (LLM__KERNEL_PASS == 1 || LLM__KERNEL_PASS == 2);
    const size_t stripe_bytes = llm__stripe_bytes(l), head = llm__span_head(l),
                 x_bytes = (size_t)args->height * LLM__X_BYTES;
    const size_t prefetched = short_sums ? 640 : stripe_bytes; /* bytes of a q4_Z stripe */
    int64_t stripes = llm__stripes(args->w->cols);
    const uint8_t *stripe = panel;
    int first = (int)(i % args->height);
    const char *x = llm__x_tile(args, i / args->height) + first * LLM__STRIPE;
    /* at x_scales + 4: the second scale or, with multipliers, -8 times the sums of the blocks */
    const ptrdiff_t x_scales = args->height * LLM__STRIPE - first * (LLM__STRIPE - 8),
                    x_sums = x_scales + args->height * 8;
    llm__vf sums[LLM__X_ROWS][LLM__K(parts)];
    /* sums over 256 columns. products: of w x; lower: of x times the minimums' multipliers */
    llm__vi products[LLM__X_ROWS][LLM__K(parts)], lower[LLM__X_ROWS][LLM__K(parts)];
    LLM__K(short_sums) before;
    LLM__UNROLL for (int t = 0; t < T; t++)
        LLM__UNROLL for (int part = 0; part < LLM__K(parts); part++) sums[t][part] = (llm__vf){0};
    for (int64_t start = 0; start < stripes; start += LLM__SPAN / 2) {
        const uint8_t *span = stripe -
                              (start % LLM__SPAN ? head + LLM__SPAN / 2 * stripe_bytes : 0);
        LLM__UNROLL for (int t = 0; t < T; t++)
            LLM__UNROLL for (int part = 0; part < LLM__K(parts); part++)
                products[t][part] = (llm__vi){0}, lower[t][part] = (llm__vi){0};
        if (whole) {
            if (stripe == span) {
                for (size_t line = 0; line < head; line += 64)
                    LLM__PREFETCH_FAR(span + LLM__FAR_BYTES + line),
                        LLM__PREFETCH(span + llm__span_bytes(l) + line);
                stripe += head;
            }
            /* keeps the sums in memory: the block needs the registers */
            if (T > 4) __asm__ volatile("" : "+m"(sums));
        }
        const float *scales = (const float *)(const void *)(x + x_scales);
        const int64_t end = llm__min(start + LLM__SPAN / 2, stripes);
        for (int64_t s = start; s < end; s++, x += x_bytes, stripe += stripe_bytes) {
            for (size_t line = 0; line < prefetched; line += 64)
                LLM__PREFETCH_FAR(stripe + LLM__FAR_BYTES + line),
                    LLM__PREFETCH(stripe + stripe_bytes + line);
#if LLM__KERNEL_PASS == 2
            LLM__UNROLL /* keeps `before` in registers */
#endif
            for (int half = 0; half < 2; half++) {
                const int8_t *values = (const int8_t *)x + half * LLM__BLOCK;
                const float *block_scales = (const float *)(const void *)(x + x_scales) + half;
                const int16_t *block_sums = (const int16_t *)(const void *)(x + x_sums) + 2 * half;
                if (short_sums) {
                    LLM__K(add_short_half)(l, T, stripe, half, values, x + x_scales + 4, &before,
                                           products);
                    continue;
                }
#if LLM__KERNEL_PASS != 0 /* plain C has too few registers */
                LLM__UNROLL
#endif
                for (int part = 0; part < LLM__K(parts); part++) {
                    LLM__K(w_block) w;
                    LLM__K(unpack_block)(l, stripe, half, part, &w);
                    /* loads x again for each part: the compiler would spill it */
                    __asm__("" : "+r"(values));
                    if (whole)
                        LLM__K(add_whole_block)(l, T, &w, part, values, block_sums, products,
                                                lower);
                    else LLM__K(add_block)(l, T, &w, part, values, block_scales, block_sums, sums);
                }
            }
        }
        if (!whole) continue;
        for (int64_t back = end - start; short_sums && back > 0; back--) {
            const char *x_back = x - (size_t)back * x_bytes;
            const uint8_t *stripe_back = stripe - (size_t)back * stripe_bytes;
            llm__layout constant = {4, 0, true, true, true};
            if (l.groups)
                LLM__K(correct_short_sums)(constant, stripe_back, T, x_back + x_scales + 4,
                                           x_back + x_sums, products, lower);
            else
                LLM__K(correct_short_sums)(l, stripe_back, T, x_back + x_scales + 4,
                                           x_back + x_sums, products, lower);
        }
        LLM__UNROLL for (int part = 0; part < LLM__K(parts); part++) {
            llm__vf scale, minimum = {0};
            LLM__K(unpack_head)(l, span, start % LLM__SPAN != 0, part, &scale, &minimum);
            if (short_sums) minimum *= -0.125f; /* `lower` is -8 times the sum */
            LLM__UNROLL for (int t = 0; t < T; t++) {
                sums[t][part] = LLM__K(fma)(__builtin_convertvector(products[t][part], llm__vf),
                                            scale * scales[2 * t], sums[t][part]);
                if (minimums)
                    sums[t][part] = LLM__K(fma)(__builtin_convertvector(lower[t][part], llm__vf),
                                                minimum * scales[2 * t], sums[t][part]);
            }
        }
    }
    LLM__UNROLL for (int t = 0; t < T; t++) LLM__K(finish_panel)(args, i + t, row, sums[t]);
}

LLM__INLINE void LLM__K(panel_by_rows)(llm__layout l, bool known, const llm__matmul_args *args,
                                       const uint8_t *panel, int64_t row) {
    for (int64_t i = 0; i < args->n;) {
        int64_t together = llm__min(llm__min(args->n - i, args->height - i % args->height),
                                    LLM__X_ROWS);
        if (together >= 8 && LLM__X_ROWS >= 8)
            LLM__K(panel_rows)(l, known, LLM__X_ROWS, args, panel, row, i), i += LLM__X_ROWS;
        else if (together >= 4) LLM__K(panel_rows)(l, known, 4, args, panel, row, i), i += 4;
        else if (LLM__KERNEL_PASS != 0 && together >= 2)
            LLM__K(panel_rows)(l, known, 2, args, panel, row, i), i += 2;
        else LLM__K(panel_rows)(l, known, 1, args, panel, row, i), i++;
    }
}

#if LLM__KERNEL_PASS == 2

/* -- Matrix tiles: AMX --
 * There are 8 tile registers of 16 rows of 64 bytes. tdpbssd multiplies two int8 tiles, A and B,
 * and adds the products to an int32 tile, C, at four times the rate of vpdpbusd. B is a panel,
 * unpacked to signed bytes:
 *
 *   A: 16 rows of x,  B: 8 quads of 16 rows of weights       C: 16 rows of x by 16 of weights
 *      32 columns     row q: w[0] quad q | w[1] quad q | ..  row t: x[t].w[0]  x[t].w[1]  ...
 *
 * There are three forms. They add the same integers, so they give the same bits:
 *
 * "Alone" is for up to 32 rows of x (q4_0: 64; never for q6_K, which has two scales per block). It
 * multiplies one panel by one tile of x, block by block. After 32 columns, C is stored in memory.
 * Vector registers scale it and unpack the next weights while the tile unit multiplies. A row of C
 * takes one vpdpwssd for q4_0; sums of q4_Z, q4_K and q5_K exceed 16 bits, and take a
 * multiplication and an addition. Without multipliers, C is converted to floats.
 *
 * "In chunks" is for more rows and types without multipliers. It works like "alone", but unpacks a
 * chunk of two panels once for all tiles of x.
 *
 * "By halves" is for more rows and types with multipliers. It splits the 16-bit product of weight
 * and multiplier into a high and a low byte, and multiplies both, in full tiles of 64 columns. C is
 * stored in memory once per 256 columns:
 *
 *   sum of w x  =  256 (sum of high x)  +  (sum of low x)    high: -128 .. 127, low: 0 .. 255
 *
 *   tile registers:  0, 1: low   of 16 + 16 rows of x    4, 5: x, 16 + 16 rows, 64 columns
 *                    2, 3: high                          6, 7: low, high of 16 rows of weights
 *
 * Chunks of 512 columns (by halves: 256) keep 8 KB of an unpacked panel and 10 KB of x in the L1
 * cache. */

/* Tiles 0-3 (C) and 4-5 (A) have `rows` rows, tiles 6-7 (B) have b_rows. A row of A has a_bytes
 * bytes; the others have 64. */
LLM__INLINE void llm__amx_configure(int rows, int a_bytes, int b_rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes;
    memset(&shapes, 0, sizeof shapes);
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? a_bytes : 64);
        shapes.rows[i] = (uint8_t)(i < 6 ? rows : b_rows);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

/* Macros, because an instruction contains the names of its registers. */
#define LLM__TILE_LOAD(tile, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(p), "r"((int64_t)(stride)), \
                     "m"(*(const char(*)[1024])(const void *)(p)))
#define LLM__TILE_STORE(tile, p)                            \
    __asm__ volatile("tilestored %%tmm" #tile ", (%1,%2,1)" \
                     : "=m"(*(char(*)[1024])(void *)(p)) : "r"(p), "r"((int64_t)64))
#define LLM__TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define LLM__TILE_ADD(low, c, a, b) \
    __asm__ volatile("tdpb" low "d %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

typedef struct llm__tile_args { /* a chunk of a panel times one tile of x */
    llm__layout l;
    const char *x;            /* the chunk's first stripe in the tile of x */
    size_t x_bytes;           /* bytes of a stripe of the tile */
    int height, blocks;       /* rows in the tile; blocks in the chunk */
    const int8_t *w;          /* (blocks, 8, 16, 4) weights; by halves: (2, 4, 16, 16, 4) */
    const float *scales;      /* (blocks, 16) scales, or int32 multipliers */
    const float *others;      /* (blocks, 16) minimums, or 2 x i16 factors of x's half-sums */
    const uint8_t *span;      /* scales in the panel's span head, from the chunk's columns on */
    int32_t *products;        /* (group, 16, 16) scratch */
    float *kept;              /* (16, 16) sums over earlier chunks */
    const uint8_t *ahead;     /* weights to prefetch during the multiplication */
    int lines;                /* cache lines to prefetch per block */
} llm__tile_args;

LLM__INLINE const float *llm__tile_scales(const llm__tile_args *args, int block) {
    return (const float *)(const void *)(args->x + (size_t)(block / 2) * args->x_bytes +
                                         args->height * LLM__STRIPE) +
           block % 2;
}

/* Both half-sums of block `block` of row t of x, as two 16-bit values in every lane. */
LLM__INLINE __m512i llm__tile_sums(const llm__tile_args *args, int block, int t) {
    int32_t pair;
    memcpy(&pair,
           args->x + (size_t)(block / 2) * args->x_bytes + args->height * (LLM__STRIPE + 8) +
               8 * t + 4 * (block % 2),
           4);
    return _mm512_set1_epi32(pair);
}

/* Multiply four blocks from `first` on, and prefetch weights. before: first store the products of
 * the previous four. */
LLM__INLINE void llm__amx_products(const llm__tile_args *args, int first, bool before) {
    const size_t x_bytes = args->x_bytes;
    const char *x = args->x + (size_t)(first / 2) * x_bytes;
    const int8_t *w = args->w + first * 512;
    const int lines = args->lines;
    const uint8_t *ahead = args->ahead + first * lines * 64;
    int32_t *products = args->products;
#define LLM__TILE_BLOCK(c, a, b)                                                              \
    if (before) LLM__TILE_STORE(c, products + (c) * 256);                                    \
    LLM__TILE_ZERO(c);                                                                       \
    LLM__TILE_LOAD(a, x + (c) / 2 * x_bytes + (c) % 2 * LLM__BLOCK, LLM__STRIPE);              \
    LLM__TILE_LOAD(b, w + (c) * 512, 64);                                                    \
    LLM__TILE_ADD("ss", c, a, b);                                                            \
    for (int line = 0; line < lines; line++) LLM__PREFETCH_FAR(ahead + ((c) * lines + line) * 64);
    LLM__TILE_BLOCK(0, 4, 6)
    LLM__TILE_BLOCK(1, 5, 7)
    LLM__TILE_BLOCK(2, 4, 6)
    LLM__TILE_BLOCK(3, 5, 7)
#undef LLM__TILE_BLOCK
}

LLM__INLINE void llm__amx_store(int32_t *products) {
    LLM__TILE_STORE(0, products);
    LLM__TILE_STORE(1, products + 256);
    LLM__TILE_STORE(2, products + 512);
    LLM__TILE_STORE(3, products + 768);
}

/* Scale the products of blocks first to end - 1, and add them to the sums of all rows of x. */
LLM__INLINE void llm__amx_add(const llm__tile_args *args, int first, int end, __m512 *sums) {
    const int32_t *products = args->products;
    for (int b = first; b < end; b++, products += 256) {
        const float *x_scales = llm__tile_scales(args, b);
        __m512 w_scale = _mm512_loadu_ps(args->scales + b * LLM__PANEL);
        LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++) {
            __m512 product = _mm512_cvtepi32_ps(
                _mm512_loadu_si512((const void *)(products + t * 16)));
            sums[t] = _mm512_fmadd_ps(
                product, _mm512_mul_ps(w_scale, _mm512_set1_ps(x_scales[2 * t])), sums[t]);
        }
        if (!args->l.minimum) continue;
        __m512 minimum = _mm512_loadu_ps(args->others + b * LLM__PANEL);
        LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++) {
            __m512 x_sum = _mm512_cvtepi32_ps(
                _mm512_madd_epi16(llm__tile_sums(args, b, t), _mm512_set1_epi16(1)));
            sums[t] = _mm512_fmadd_ps(
                minimum, _mm512_mul_ps(_mm512_set1_ps(x_scales[2 * t]), x_sum), sums[t]);
        }
    }
}

/* The same in integers, for weights with multipliers. */
LLM__INLINE void llm__amx_add_whole(const llm__tile_args *args, int first, int end, __m512i *sums) {
    const int32_t *products = args->products;
    const float *multipliers = args->scales + first * LLM__PANEL;
    for (int b = first; b < end; b++, products += 256, multipliers += LLM__PANEL) {
        __m512i multiplier = _mm512_loadu_si512((const void *)multipliers);
        if (!args->l.minimum && !args->l.groups)
            LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++)
                sums[t] = _mm512_dpwssd_epi32(
                    sums[t], _mm512_loadu_si512((const void *)(products + t * 16)), multiplier);
        else
            LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++)
                sums[t] = _mm512_add_epi32(
                    sums[t],
                    _mm512_mullo_epi32(_mm512_loadu_si512((const void *)(products + t * 16)),
                                       multiplier));
        if (args->l.groups || !args->l.minimum) continue;
        __m512i other = _mm512_loadu_si512((const void *)(args->others + b * LLM__PANEL));
        LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++)
            sums[t] = _mm512_dpwssd_epi32(sums[t], llm__tile_sums(args, b, t), other);
    }
}

/* Scale the sums of 256 columns from block `first` on; add them and their minimums to `kept`. */
LLM__INLINE void llm__amx_finish(const llm__tile_args *args, int first, const __m512i *sums) {
    const float *x_scales = llm__tile_scales(args, first);
    float *kept = args->kept;
    llm__vf scale, minimum = {0};
    LLM__K(unpack_head)(args->l, args->span, first / LLM__SPAN, 0, &scale, &minimum);
    LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++) {
        __m512 factor = _mm512_mul_ps((__m512)scale, _mm512_set1_ps(x_scales[2 * t]));
        _mm512_storeu_ps(kept + t * 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), factor,
                                                        _mm512_loadu_ps(kept + t * 16)));
    }
    if (!(args->l.groups && args->l.minimum)) return;
    __m512i lower[LLM__X_TILE];
    LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++) lower[t] = _mm512_setzero_si512();
    for (int b = first; b < llm__min(first + LLM__SPAN, args->blocks); b++) {
        __m512i other = _mm512_loadu_si512((const void *)(args->others + b * LLM__PANEL));
        LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++)
            lower[t] = _mm512_dpwssd_epi32(lower[t], llm__tile_sums(args, b, t), other);
    }
    LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++) {
        __m512 factor = _mm512_mul_ps((__m512)minimum, _mm512_set1_ps(x_scales[2 * t]));
        _mm512_storeu_ps(kept + t * 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(lower[t]), factor,
                                                        _mm512_loadu_ps(kept + t * 16)));
    }
}

/* Multiply a chunk, block by block, for types without multipliers: the sums are floats. */
LLM__INLINE void llm__amx_float_chunk(const llm__tile_args *args) {
    llm__amx_products(args, 0, false);
    __m512 sums[LLM__X_TILE];
    LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++)
        sums[t] = _mm512_loadu_ps(args->kept + t * 16);
    for (int block = 0, after; block < args->blocks; block = after) {
        after = block + LLM__GROUP;
        if (after < args->blocks) llm__amx_products(args, after, true);
        else llm__amx_store(args->products);
        llm__amx_add(args, block, (int)llm__min(after, args->blocks), sums);
    }
    LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++)
        _mm512_storeu_ps(args->kept + t * 16, sums[t]);
}

LLM__INLINE void llm__amx_unpack_as(llm__layout l, const uint8_t *stripe, int count, int8_t *w,
                                    float *scales, float *others) {
    const __m512i zero = _mm512_set1_epi8((char)l.zero);
    for (int b = 0; b < count; b++, w += 512, scales += LLM__PANEL, others += LLM__PANEL) {
        int half = b % 2;
        LLM__K(w_block) block;
        if (l.quads == 8) {
            memcpy(w, stripe + llm__stripe_head(l) + half * 512, 512);
            LLM__K(unpack_scales)(l, stripe, half, 0, &block);
        } else {
            LLM__K(unpack_block)(l, stripe, half, 0, &block);
            LLM__UNROLL for (int q = 0; q < 8; q++)
                _mm512_storeu_si512((void *)(w + q * 64),
                                    _mm512_sub_epi8((__m512i)block.w[q], zero));
        }
        if (l.multipliers) {
            _mm512_storeu_si512(
                (void *)scales,
                (__m512i)(!l.minimum && !l.groups ? block.multiplier & 0xffff : block.multiplier));
            if (l.minimum || l.groups)
                _mm512_storeu_si512((void *)others,
                                    (__m512i)LLM__K(pair)(block.other, block.other));
        } else {
            LLM__K(store)(scales, block.scale);
            if (l.minimum) LLM__K(store)(others, block.minimum);
        }
        if (half) stripe += llm__stripe_bytes(l);
    }
}

/* Unpack `count` blocks: weights to signed bytes; scales or multipliers. */
LLM__INLINE void llm__amx_unpack(llm__layout l, const uint8_t *stripe, int count, int8_t *w,
                                 float *scales, float *others) {
    if (l.zero == 8)
        l = (llm__layout){4, 8, true, false, false},
        llm__amx_unpack_as(l, stripe, count, w, scales, others);
    else if (l.quads == 8)
        l = (llm__layout){8, 0, false, false, false},
        llm__amx_unpack_as(l, stripe, count, w, scales, others);
    else if (l.quads == 4 && l.groups)
        l = (llm__layout){4, 0, true, true, true},
        llm__amx_unpack_as(l, stripe, count, w, scales, others);
    else if (l.quads == 4 && l.multipliers)
        l = (llm__layout){4, 0, true, false, true},
        llm__amx_unpack_as(l, stripe, count, w, scales, others);
    else llm__amx_unpack_as(l, stripe, count, w, scales, others);
}

/* The same, but to the low and high bytes of weight times multiplier, (4, 16, 16, 4) each. */
LLM__INLINE void llm__amx_unpack_halves(llm__layout l, const uint8_t *stripe, int count,
                                        int8_t *low, int8_t *high, float *others) {
    const __m512i zero = _mm512_set1_epi8((char)l.zero), bytes = _mm512_set1_epi16(255);
    for (int b = 0; b < count; b++, low += 512, high += 512, others += LLM__PANEL) {
        LLM__K(w_block) block;
        LLM__K(unpack_block)(l, stripe, b % 2, 0, &block);
        __m512i factor = (__m512i)LLM__K(pair)(block.multiplier, block.multiplier),
                offset = _mm512_setzero_si512();
        __m512i second = l.quads == 6 ? (__m512i)LLM__K(pair)(block.other, block.other) : factor;
        if (l.minimum && !l.groups) offset = (__m512i)LLM__K(pair)(block.other, block.other);
        else if (l.minimum)
            _mm512_storeu_si512((void *)others, (__m512i)LLM__K(pair)(block.other, block.other));
        LLM__UNROLL for (int q = 0; q < 8; q++) {
            __m512i v = _mm512_sub_epi8((__m512i)block.w[q], zero), f = q < 4 ? factor : second;
            __m512i even = _mm512_add_epi16(
                _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), f), offset);
            __m512i odd = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_srai_epi16(v, 8), f), offset);
            _mm512_storeu_si512(
                (void *)(low + q * 64),
                _mm512_ternarylogic_epi32(bytes, even, _mm512_slli_epi16(odd, 8), 0xca));
            _mm512_storeu_si512(
                (void *)(high + q * 64),
                _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(even, 8), odd, 0xca));
        }
        if (b % 2 == 0) continue;
        for (size_t line = 0; line < llm__stripe_bytes(l); line += 64) /* the next 256 columns */
            LLM__PREFETCH_FAR(stripe + LLM__SPAN / 2 * llm__stripe_bytes(l) + line);
        stripe += llm__stripe_bytes(l);
    }
}

/* Unpack up to four blocks from `first` on. Returns the arguments that multiply them by the tile of
 * x whose first row is i. w, scales and others have room for a chunk. */
LLM__INLINE llm__tile_args llm__amx_group(llm__layout l, const llm__matmul_args *args,
                                          const uint8_t *panel, int64_t i, int64_t first,
                                          int64_t blocks, int8_t *w, float *scales, float *others) {
    const int64_t place = first % LLM__CHUNK;
    const size_t x_bytes = (size_t)args->height * LLM__X_BYTES, stripe_bytes = llm__stripe_bytes(l);
    const uint8_t *span = panel + (size_t)(first / LLM__CHUNK) * llm__span_bytes(l);
    const uint8_t *stripe = span + llm__span_head(l) + (size_t)(place / 2) * stripe_bytes;
    llm__tile_args tile = {l,
                           llm__x_tile(args, i / args->height) + (size_t)(first / 2) * x_bytes,
                           x_bytes,
                           args->height,
                           (int)llm__min(LLM__GROUP, blocks - first),
                           w + place * 512,
                           scales + place * LLM__PANEL,
                           others + place * LLM__PANEL,
                           span + (size_t)(place / LLM__SPAN * LLM__PANEL * 2),
                           NULL,
                           NULL,
                           stripe + LLM__FAR_BYTES,
                           (int)llm__divide_up((int64_t)stripe_bytes / 2, 64)};
    llm__amx_unpack(l, stripe, tile.blocks, w + place * 512, scales + place * LLM__PANEL,
                    others + place * LLM__PANEL);
    return tile;
}

/* Multiply a panel by the tile of x whose first row is i. While the tile unit multiplies a group of
 * blocks, the vector unit adds up the previous group and unpacks the next. Tile loads wait for
 * earlier loads, so prefetches are issued early. */
LLM__INLINE void llm__amx_alone(llm__layout l, const llm__matmul_args *args, const uint8_t *panel,
                                int64_t i, int32_t *products, int8_t *w, float *scales,
                                float *others, float *kept) {
    const int64_t blocks = 2 * llm__stripes(args->w->cols);
    const bool whole = l.multipliers;
    llm__tile_args tile, before;
    memset(&before, 0, sizeof before); /* gcc 12 at -O1 warns without it */
    __m512 floats[LLM__X_TILE];
    __m512i sums[LLM__X_TILE];
    LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++)
        floats[t] = _mm512_setzero_ps(), sums[t] = _mm512_setzero_si512();
    for (int64_t first = -LLM__GROUP; first < blocks + LLM__GROUP; first += LLM__GROUP) {
        if (first >= blocks) llm__amx_store(products);
        else if (first >= 0) llm__amx_products(&tile, 0, first > 0);
        if (first > 0 && !whole) llm__amx_add(&before, 0, before.blocks, floats);
        if (first > 0 && whole) llm__amx_add_whole(&before, 0, before.blocks, sums);
        /* 256 columns are complete */
        if (first > 0 && whole && (first % LLM__SPAN == 0 || first >= blocks)) {
            int earlier = (int)((first - LLM__GROUP) % LLM__SPAN);
            before.x -= (size_t)(earlier / 2) * before.x_bytes;
            before.others -= earlier * LLM__PANEL;
            before.blocks += earlier;
            llm__amx_finish(&before, 0, sums);
            LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++) sums[t] = _mm512_setzero_si512();
        }
        if (first >= 0) before = tile;
        if (first + LLM__GROUP < blocks)
            tile = llm__amx_group(l, args, panel, i, first + LLM__GROUP, blocks, w, scales, others);
        tile.products = products;
        tile.kept = kept;
    }
    if (!whole)
        LLM__UNROLL for (int t = 0; t < LLM__X_TILE; t++)
            _mm512_storeu_ps(kept + t * 16, floats[t]);
}

/* Pass the fields of l that differ most as constants, to make the compiler specialize the code. */
LLM__INLINE void llm__amx_alone_as(llm__layout l, const llm__matmul_args *args,
                                   const uint8_t *panel, int64_t i, int32_t *products, int8_t *w,
                                   float *scales, float *others, float *kept) {
    if (l.zero == 8)
        l = (llm__layout){4, 8, true, false, false},
        llm__amx_alone(l, args, panel, i, products, w, scales, others, kept);
    else if (l.multipliers)
        l.multipliers = true, llm__amx_alone(l, args, panel, i, products, w, scales, others, kept);
    else
        l.multipliers = l.groups = false,
        llm__amx_alone(l, args, panel, i, products, w, scales, others, kept);
}

/* Join the low and high products of tile k (0 or 1), and add them to its sums. */
LLM__INLINE void llm__amx_add_halves(const llm__tile_args *tiles, int k) {
    const int32_t *low = tiles->products + k * 256, *high = low + 512;
    __m512i sums[16];
    LLM__UNROLL for (int t = 0; t < 16; t++) {
        __m512i sum = _mm512_slli_epi32(_mm512_loadu_si512((const void *)(high + t * 16)), 8);
        sums[t] = _mm512_add_epi32(sum, _mm512_loadu_si512((const void *)(low + t * 16)));
    }
    llm__amx_finish(&tiles[k], 0, sums);
}

/* "By halves": multiply 256 columns of two tiles of x by a panel. The products of `before` (if not
 * NULL) are stored when their tile registers are needed, and added up while the tile unit
 * multiplies. */
LLM__INLINE void llm__amx_halves(const llm__tile_args *tiles, const llm__tile_args *before) {
    const size_t x_bytes = tiles->x_bytes;
    const char *x0 = tiles[0].x, *x1 = tiles[1].x;
    const int8_t *low = tiles->w, *high = low + LLM__CHUNK / 2 * 512;
    int32_t *products = tiles->products;
#define LLM__TILE_START(c)                                   \
    if (before) LLM__TILE_STORE(c, products + (c) * 256);   \
    LLM__TILE_ZERO(c);
#define LLM__TILE_GO_ON(c)
#define LLM__TILE_STRIPE(k, START)                                                        \
    LLM__TILE_LOAD(6, low + (k) * 1024, 64);                                             \
    LLM__TILE_LOAD(4, x0 + (k) * x_bytes, 64); START(0) LLM__TILE_ADD("su", 0, 4, 6);      \
    LLM__TILE_LOAD(5, x1 + (k) * x_bytes, 64); START(1) LLM__TILE_ADD("su", 1, 5, 6);      \
    LLM__TILE_LOAD(7, high + (k) * 1024, 64);                                            \
    START(2) LLM__TILE_ADD("ss", 2, 4, 7); START(3) LLM__TILE_ADD("ss", 3, 5, 7);
    LLM__TILE_STRIPE(0, LLM__TILE_START)
    if (tiles->blocks > 2) { LLM__TILE_STRIPE(1, LLM__TILE_GO_ON) }
    if (before) llm__amx_add_halves(before, 0);
    if (tiles->blocks > 4) { LLM__TILE_STRIPE(2, LLM__TILE_GO_ON) }
    if (before) llm__amx_add_halves(before, 1);
    if (tiles->blocks > 6) { LLM__TILE_STRIPE(3, LLM__TILE_GO_ON) }
#undef LLM__TILE_START
#undef LLM__TILE_GO_ON
#undef LLM__TILE_STRIPE
}
#undef LLM__TILE_LOAD
#undef LLM__TILE_STORE
#undef LLM__TILE_ZERO
#undef LLM__TILE_ADD

/* Multiply a group of panels ("by halves": up to four, "in chunks": up to two, "alone": one) by all
 * rows of x. The panels share each tile of x while it is cached. */
static void llm__amx_panels(llm__layout l, bool halves, const llm__matmul_args *args,
                            const uint8_t *panels, int n_panels, int64_t row, char *scratch) {
    int64_t blocks = 2 * llm__stripes(args->w->cols), kept_rows = args->n + 2 * LLM__X_TILE;
    size_t x_bytes = (size_t)args->height * LLM__X_BYTES,
           panel_bytes = llm__panel_bytes(l, args->w->cols);
    int32_t *products = (int32_t *)(void *)scratch; /* (group, 16, 16) */
    int8_t *w = (int8_t *)(products + LLM__GROUP * 256); /* (panels, chunk, 8, 16, 4) */
    /* scales and others: (panels, chunk, 16) */
    float *scales = (float *)(void *)(w + LLM__TILE_PANELS * LLM__CHUNK * 512);
    float *others = scales + LLM__TILE_PANELS * LLM__CHUNK * LLM__PANEL;
    float *sums = others + LLM__TILE_PANELS * LLM__CHUNK * LLM__PANEL; /* (panels, kept_rows, 16) */
    int chunk = halves ? LLM__CHUNK / 2 : LLM__CHUNK, x_tiles = halves ? 2 : 1;
    memset(sums, 0, (size_t)(n_panels * kept_rows * LLM__PANEL) * sizeof *sums);
    bool alone = !halves && (l.multipliers || args->n <= LLM__FEW_X);
    for (int64_t i = 0; alone && i < args->n; i += LLM__X_TILE)
        llm__amx_alone_as(l, args, panels, i, products, w, scales, others, sums + i * LLM__PANEL);
    for (int64_t block = 0; block < blocks && !alone; block += chunk) {
        llm__tile_args tiles[2], before[2];
        const uint8_t *span = panels + (size_t)(block / LLM__CHUNK) * llm__span_bytes(l);
        const uint8_t *stripe = span + llm__span_head(l) +
                                (size_t)(block % LLM__CHUNK / 2) * llm__stripe_bytes(l);
        int count = (int)llm__min(chunk, blocks - block);
        for (int p = 0; p < n_panels; p++) {
            int8_t *w_p = w + p * LLM__CHUNK * 512;
            float *scales_p = scales + p * LLM__CHUNK * LLM__PANEL,
                  *others_p = others + p * LLM__CHUNK * LLM__PANEL;
            if (halves)
                llm__amx_unpack_halves(l, stripe + (size_t)p * panel_bytes, count, w_p,
                                       w_p + LLM__CHUNK / 2 * 512, others_p);
            else
                llm__amx_unpack(l, stripe + (size_t)p * panel_bytes, count, w_p, scales_p,
                                others_p);
        }
        for (int64_t i = 0; i < args->n; i += x_tiles * args->height)
            for (int p = 0; p < n_panels; p++) {
                for (int k = 0; k < x_tiles; k++) {
                    llm__tile_args t = {
                        l,
                        llm__x_tile(args, i / args->height) + (size_t)(block / 2) * x_bytes,
                        x_bytes,
                        args->height,
                        count,
                        w + p * LLM__CHUNK * 512,
                        scales + p * LLM__CHUNK * LLM__PANEL,
                        others + p * LLM__CHUNK * LLM__PANEL,
                        span + (size_t)p * panel_bytes +
                            (size_t)(block % LLM__CHUNK / 8 * LLM__PANEL * 2),
                        products,
                        sums + (p * kept_rows + i + k * LLM__X_TILE) * LLM__PANEL,
                        span + (size_t)p * panel_bytes + llm__span_bytes(l),
                        i == 0 ? (int)llm__divide_up((int64_t)llm__stripe_bytes(l) / 2, 64) : 0};
                    if (k == 1 && i + LLM__X_TILE < args->n) t.x += args->x_tile_bytes;
                    tiles[k] = t;
                }
                /* A panel's results are one cache line per row of x: prefetch some with each
                 * chunk. */
                for (int64_t r = i + block / chunk;
                     halves && r < llm__min(i + 2 * LLM__X_TILE, args->n);
                     r += llm__divide_up(blocks, chunk))
                    LLM__PREFETCH_TO_WRITE(args->out + r * args->w->rows + row + p * LLM__PANEL);
                if (halves) {
                    llm__amx_halves(tiles, i + p > 0 ? before : NULL);
                    memcpy(before, tiles, sizeof before);
                } else llm__amx_float_chunk(tiles);
            }
        if (!halves) continue;
        llm__amx_store(products);
        llm__amx_add_halves(before, 0);
        llm__amx_add_halves(before, 1);
    }
    for (int64_t i = 0; i < args->n; i++)
        for (int p = 0; p < n_panels; p++) {
            llm__vf sum = LLM__K(load)(sums + (p * kept_rows + i) * LLM__PANEL);
            LLM__K(finish_panel)(args, i, row + p * LLM__PANEL, &sum);
        }
}
#endif

LLM__INLINE void LLM__K(matmul_int)(llm__layout l, bool known, const llm__matmul_args *args,
                                    int64_t first, int64_t end, char *scratch) {
    const llm_weight *w = args->w;
    size_t panel_bytes = llm__panel_bytes(l, w->cols);
    bool tiles = LLM__KERNEL_PASS == 2 && args->tiles;
    bool halves = tiles && l.multipliers &&
                  (l.quads == 6 || args->n > (l.zero == 8 ? LLM__FEW_X_Q4_0 : LLM__FEW_X));
#if LLM__KERNEL_PASS == 2
    if (halves) llm__amx_configure(LLM__X_TILE, LLM__STRIPE, 16);
    else if (tiles) llm__amx_configure(args->height, LLM__BLOCK, 8);
#endif
    for (int64_t row = first, together; row < end; row += together * LLM__PANEL) {
        together = halves                                            ? LLM__TILE_PANELS
                   : tiles && !l.multipliers && args->n > LLM__FEW_X ? LLM__TILE_PANELS / 2
                                                                     : 1;
        together = llm__min(llm__divide_up(end - row, LLM__PANEL), together);
        const uint8_t *panels = (const uint8_t *)w->packed +
                                (size_t)(row / LLM__PANEL) * panel_bytes;
        if (!w->packed) {
            for (int64_t p = 0; p < together; p++)
                llm__pack_panel(w, row + p * LLM__PANEL,
                                (uint8_t *)scratch + (size_t)p * panel_bytes);
            panels = (const uint8_t *)scratch;
        }
#if LLM__KERNEL_PASS == 2
        if (tiles) {
            llm__amx_panels(l, halves, args, panels, (int)together, row,
                            scratch + (w->packed ? 0 : LLM__TILE_PANELS * panel_bytes));
            continue;
        }
#endif
        LLM__K(panel_by_rows)(l, known, args, panels, row);
    }
#if LLM__KERNEL_PASS == 2
    if (args->tiles) __asm__ volatile("tilerelease" ::);
#endif
}

LLM__INLINE void LLM__K(sum_halves)(const int8_t *values, int16_t *sums) {
#if LLM__KERNEL_PASS == 2
    __m128i v[2];
    for (int half = 0; half < 2; half++)
        v[half] = _mm_dpbusd_epi32(
            _mm_setzero_si128(), _mm_set1_epi8(1),
            _mm_loadu_si128((const __m128i *)(const void *)(values + 16 * half)));
    v[0] = _mm_hadd_epi32(v[0], v[1]);
    v[0] = _mm_hadd_epi32(v[0], v[0]);
    sums[0] = (int16_t)_mm_extract_epi32(v[0], 0);
    sums[1] = (int16_t)_mm_extract_epi32(v[0], 1);
#else
    for (int half = 0; half < 2; half++) {
        int sum = 0;
        for (int i = 0; i < 16; i++) sum += values[16 * half + i];
        sums[half] = (int16_t)sum;
    }
#endif
}

/* See llm__kernels.round_rows. A group with all |x| below 1e-25 becomes zero, since its products
 * could be denormal. */
static void LLM__K(round_rows)(const float *x, int64_t cols, int group, int height, int rows,
                               int64_t first, int64_t end, char *tile) {
    enum { PARTS = LLM__BLOCK / LLM__W };
    const size_t stripe_bytes = (size_t)height * LLM__X_BYTES;
    for (int r = 0; r < rows; r++)
        for (int64_t start = first * LLM__STRIPE; start < end * LLM__STRIPE; start += group) {
            const float *from = x + r * cols;
            int64_t stop = llm__min(start + group, cols);
            llm__vf most[2] = {{0}, {0}}; /* two, since each max waits for the previous one */
            for (int64_t i = start; i < stop; i += LLM__BLOCK)
                LLM__UNROLL for (int k = 0; k < PARTS; k++)
                    most[k % 2] = LLM__K(max)(LLM__K(absolute)(LLM__K(load)(from + i + k * LLM__W)),
                                              most[k % 2]);
            float range = LLM__K(largest)(LLM__K(max)(most[0], most[1])),
                  inverse = range > 1e-25f ? 127.0f / range : 0.0f;
            for (int64_t i = start; i < llm__min(start + group, end * LLM__STRIPE);
                 i += LLM__BLOCK) {
                char *to = tile + (size_t)(i / LLM__STRIPE) * stripe_bytes;
                int half = (int)(i / LLM__BLOCK % 2);
                int8_t *values = (int8_t *)to + r * LLM__STRIPE + half * LLM__BLOCK;
                float *scale = (float *)(void *)(to + height * LLM__STRIPE) + 2 * r;
                int16_t *starts = (int16_t *)(void *)(scale + 1); /* in place of the second scale */
                int16_t *sums = (int16_t *)(void *)(to + height * (LLM__STRIPE + 8)) + 4 * r +
                                2 * half;
                /* an infinite range gives an infinite scale, hence a result that is not finite */
                if (half == 0 || group == LLM__BLOCK)
                    scale[half] = range > 1e-25f ? range / 127.0f : 0.0f;
                if (i < stop && inverse > 0.0f) {
                    for (int k = 0; k < PARTS; k++)
                        LLM__K(to_int8)(
                            values + k * LLM__W,
                            LLM__K(nearest)(LLM__K(load)(from + i + k * LLM__W) * inverse));
                    LLM__K(sum_halves)(values, sums);
                } else {
                    memset(values, 0, LLM__BLOCK);
                    sums[0] = sums[1] = 0;
                }
                if (group > LLM__BLOCK) starts[half] = (int16_t)(-8 * (sums[0] + sums[1]));
            }
        }
    /* Clear missing rows: stale scales might be denormals, which are slow. */
    for (int64_t stripe = first; stripe < end; stripe++) {
        char *scales = tile + (size_t)stripe * stripe_bytes + height * LLM__STRIPE,
             *sums = scales + height * 8;
        for (int r = rows; r < height; r++)
            memset(scales + 8 * r, 0, 8), memset(sums + 8 * r, 0, 8);
    }
}

static void LLM__K(matmul)(const llm__matmul_args *args, int64_t first, int64_t end,
                           void *scratch) {
    llm__layout l = llm__layout_of(args->w->type);
    /* Constants give q8_0, q4_0, q4_K with q4_Z, and the other types separate kernels. */
    if (l.quads == 0) LLM__K(matmul_float)(args, first, end, scratch);
#if LLM__KERNEL_PASS != 0
    else if (l.quads == 8) {
        l.quads = 8, l.minimum = l.groups = l.multipliers = false, l.zero = 0;
        LLM__K(matmul_int)(l, true, args, first, end, (char *)scratch);
    }
    else if (l.zero == 8) {
        l = (llm__layout){4, 8, true, false, false}; /* q4_0 */
        LLM__K(matmul_int)(l, true, args, first, end, (char *)scratch);
    }
    else if (l.quads == 4 && l.multipliers) {
        l.quads = 4, l.multipliers = l.minimum = true, l.zero = 0;
        LLM__K(matmul_int)(l, true, args, first, end, (char *)scratch);
    }
#endif
    else LLM__K(matmul_int)(l, false, args, first, end, (char *)scratch);
}

/* -- RoPE, and storing in the cache -- */

LLM__INLINE void LLM__K(rope)(float *head, const float *angles, int rope_dim,
                              llm_rope_pairing pairing) {
    int half = rope_dim / 2;
    if (pairing == LLM_ROPE_HALVES)
        for (int i = 0; i < half; i++) {
            float x = head[i], y = head[i + half], cosine = angles[2 * i], sine = angles[2 * i + 1];
            head[i] = x * cosine - y * sine;
            head[i + half] = x * sine + y * cosine;
        }
    else
        for (int i = 0; i < half; i++) {
            float x = head[2 * i], y = head[2 * i + 1], cosine = angles[2 * i],
                  sine = angles[2 * i + 1];
            head[2 * i] = x * cosine - y * sine;
            head[2 * i + 1] = x * sine + y * cosine;
        }
}

LLM__INLINE void LLM__K(store_head)(const llm_cache *cache, void *side, int layer, int64_t row,
                                    const float *head) {
    int64_t stride, at = llm__cache_place(cache, side, row, &stride);
    char *to = (char *)side + (size_t)layer * cache->layer_bytes;
    uint16_t *half = (uint16_t *)(void *)to + at;
    float *whole = (float *)(void *)to + at;
    const llm__vf lowest = LLM__K(all)(-65504.0f);
    for (int i = 0, n; i < cache->head_dim; i += n) {
        n = (int)llm__min(LLM__W, cache->head_dim - i);
        uint16_t some[LLM__W];
        if (cache->type == LLM_F32) {
            for (int k = 0; k < n; k++) whole[(i + k) * stride] = head[i + k];
            continue;
        }
        llm__vf x = n == LLM__W ? LLM__K(load)(head + i) : LLM__K(load_some)(head + i, n);
        LLM__K(to_f16)(some, -LLM__K(max)(-LLM__K(max)(x, lowest), lowest));
        if (stride == 1) memcpy(half + i, some, (size_t)n * sizeof *some);
        else for (int k = 0; k < n; k++) half[(i + k) * stride] = some[k];
    }
}

static void LLM__K(rope_and_store)(const llm__rope_args *args, int first_token, int end_token,
                                   int first_kv_head, int end_kv_head) {
    const llm_op *op = args->op;
    int n_heads = op->attention.n_heads, n_kv_heads = op->attention.n_kv_heads,
        head_dim = op->attention.head_dim;
    int group = n_heads / n_kv_heads, first_head = first_kv_head * group,
        end_head = end_kv_head * group;
    const llm_cache *cache = args->cache;
    for (int64_t token = first_token; token < end_token; token++) {
        const float *angles = args->angles + token * (op->rope_dim / 2) * 2;
        float *q = args->q + token * n_heads * head_dim,
              *k = args->k + token * n_kv_heads * head_dim;
        const float *v = args->v + token * n_kv_heads * head_dim;
        float *some_q = q + (int64_t)first_head * head_dim,
              *some_k = k + (int64_t)first_kv_head * head_dim;
        if (args->q_norm)
            LLM__K(rmsnorm)(some_q, args->q_norm, end_head - first_head, head_dim, op->epsilon,
                            false, some_q);
        if (args->k_norm)
            LLM__K(rmsnorm)(some_k, args->k_norm, end_kv_head - first_kv_head, head_dim,
                            op->epsilon, false, some_k);
        for (int head = first_head; head < end_head; head++)
            LLM__K(rope)(q + (int64_t)head * head_dim, angles, op->rope_dim, op->pairing);
        int64_t block = args->batch->slots[token] / cache->block_size,
                offset = args->batch->slots[token] % cache->block_size;
        for (int head = first_kv_head; head < end_kv_head; head++) {
            int64_t row = (block * n_kv_heads + head) * cache->block_size + offset;
            LLM__K(rope)(k + (int64_t)head * head_dim, angles, op->rope_dim, op->pairing);
            LLM__K(store_head)(cache, cache->keys, op->layer, row, k + (int64_t)head * head_dim);
            LLM__K(store_head)(cache, cache->values, op->layer, row, v + (int64_t)head * head_dim);
        }
    }
}

/* -- Attention in tiles --
 * A softmax divides by a sum over all scores of a query; a prompt of n tokens has n x n scores. The
 * online softmax (Milakov and Gimelshein 2018) keeps the largest score so far, m, and two sums
 * relative to m: the sum l of the weights, and the weighted sum acc of the values. When a larger
 * score m' appears, both sums are multiplied by exp(m - m'). So memory for one tile of scores is
 * enough (Dao et al. 2022):
 *
 *   positions              0 .. 63     64 .. 127    128 .. 191      cache, by block table
 *   query rows           +---------+  +---------+  +---------+      K tile: (head_dim, 64)
 *   (token, head) x 128  | scores  |  |         |  |   \ .   |      V tile: (64, head_dim)
 *                        +---------+  +---------+  +---------+
 *                         m, l, acc -> m, l, acc -> m, l, acc / l -> out
 *
 * The query heads of a kv head and adjacent tokens of a prompt share a tile. A register holds one
 * dimension of LLM__W keys, so a score is a sequential sum in one lane. Hence the CPU's cache keeps
 * keys transposed per block, (head_dim, slot); if block_size is not a multiple of LLM__W, keys are
 * copied. A few query rows read f16 in place; many rows share one conversion to f32. Both give the
 * same bits.
 *
 * Tiles begin at absolute positions, so the order of sums does not depend on chunks, blocks or the
 * batch. Values at unseen positions are never multiplied, not even by zero. Tiles before the
 * windows of all rows are skipped. */

typedef struct LLM__K(attention_scratch) {
    float *keys;   /* (padded_dim, 64) */
    float *values; /* (64, padded_dim) */
    float *copies; /* (padded_dim, 64) keys, if block_size is not a multiple of LLM__W */
    float *sums;   /* (128, padded_dim) acc, the weighted sums of values */
    float *scores; /* (128, 64) */
    float *largest, *total; /* (128) m; (128) l */
    float *zeros;  /* (padded_dim) used for missing rows */
    int padded_dim;
} LLM__K(attention_scratch);

static LLM__K(attention_scratch) LLM__K(carve)(void *scratch, int head_dim) {
    LLM__K(attention_scratch) a;
    int64_t padded = llm__divide_up(head_dim, LLM__PADDING) * LLM__PADDING;
    a.padded_dim = (int)padded;
    a.keys = (float *)scratch;
    a.values = a.keys + padded * LLM__TILE;
    a.copies = a.values + padded * LLM__TILE;
    a.sums = a.copies + padded * LLM__TILE;
    a.scores = a.sums + padded * LLM__QUERY_ROWS;
    a.largest = a.scores + LLM__QUERY_ROWS * LLM__TILE;
    a.total = a.largest + LLM__QUERY_ROWS;
    a.zeros = a.total + LLM__QUERY_ROWS;
    return a;
}

typedef struct LLM__K(tile) { /* 64 positions, in the cache or converted to f32 */
    llm_type type;
    int n;          /* positions that exist */
    int64_t stride; /* values from one dimension of a key to the next */
    const void *keys[LLM__TILE / LLM__W]; /* each: dimension 0 of LLM__W adjacent keys */
    const void *values[LLM__TILE]; /* (head_dim) each */
} LLM__K(tile);

/* Find the tile of a token from position `first` on; positions after `last` do not exist. From
 * position `branch` on (in a tree), each row has its own. Missing rows get a valid address, for
 * prefetching. */
LLM__INLINE void LLM__K(find_tile)(const llm__attention_args *args, int sequence, int token,
                                   int kv_head, int first, int last, int branch,
                                   LLM__K(tile) *tile) {
    const llm_cache *cache = args->cache;
    const size_t value_bytes = llm__value_bytes(cache->type),
                 row_bytes = (size_t)args->shape.head_dim * value_bytes;
    const char *keys = llm__cache_layer(cache, cache->keys, args->layer),
               *values = llm__cache_layer(cache, cache->values, args->layer);
    tile->type = cache->type;
    tile->stride = 0; /* for an empty tile */
    tile->n = (int)llm__max(0, llm__min(LLM__TILE, last + 1 - first));
    int k = 0;
    while (k < tile->n) {
        int run = (int)llm__min(tile->n - k, cache->block_size - (first + k) % cache->block_size);
        run = first + k < branch ? (int)llm__min(run, branch - first - k) : 1;
        int64_t row = llm__cache_row(args->batch, cache, sequence, token, kv_head, first + k);
        const char *key = keys + (size_t)llm__cache_place(cache, cache->keys, row, &tile->stride) *
                                     value_bytes;
        for (int i = 0; i < run; i++, k++) {
            tile->values[k] = values + (size_t)(row + i) * row_bytes;
            if (k % LLM__W == 0) tile->keys[k / LLM__W] = key + (size_t)i * value_bytes;
        }
    }
    for (; k < LLM__TILE; k++) tile->values[k] = values;
    for (k = (tile->n + LLM__W - 1) / LLM__W; k < LLM__TILE / LLM__W; k++) tile->keys[k] = keys;
}

static void LLM__K(copy_keys)(const llm__attention_args *args, int sequence, int token, int kv_head,
                              int first, const LLM__K(attention_scratch) *a, LLM__K(tile) *tile) {
    const llm_cache *cache = args->cache;
    const char *keys = llm__cache_layer(cache, cache->keys, args->layer);
    const size_t value_bytes = llm__value_bytes(cache->type);
    for (int k = 0; k < tile->n; k++) {
        int64_t row = llm__cache_row(args->batch, cache, sequence, token, kv_head, first + k),
                stride, at = llm__cache_place(cache, cache->keys, row, &stride);
        const uint16_t *half = (const uint16_t *)(const void *)keys + at;
        const float *whole = (const float *)(const void *)keys + at;
        for (int d = 0; d < args->shape.head_dim; d++) {
            if (cache->type == LLM_F16)
                ((uint16_t *)(void *)a->copies)[d * LLM__TILE + k] = half[d * stride];
            else a->copies[d * LLM__TILE + k] = whole[d * stride];
        }
    }
    for (int g = 0; g < LLM__TILE / LLM__W; g++)
        tile->keys[g] = (const char *)a->copies + (size_t)(g * LLM__W) * value_bytes;
    tile->stride = LLM__TILE;
}

/* Prefetch a few lines of the next tile at a time: all at once would stall. */
LLM__INLINE void LLM__K(ask_for_keys)(llm_type type, const LLM__K(tile) *next, int group, int d) {
    if (next)
        LLM__PREFETCH_FAR((const char *)next->keys[group] +
                          (size_t)(d * next->stride) * llm__value_bytes(type));
}

LLM__INLINE void LLM__K(ask_for_value)(llm_type type, const LLM__K(tile) *next, int k,
                                       int head_dim) {
    size_t bytes = (size_t)head_dim * llm__value_bytes(type);
    for (size_t at = 0; next && at < bytes; at += 64)
        LLM__PREFETCH_FAR((const char *)next->values[k] + at);
}

LLM__INLINE void LLM__K(widen_tile)(llm_type type, int head_dim, const LLM__K(tile) *from,
                                    const LLM__K(tile) *next, const LLM__K(attention_scratch) *a,
                                    LLM__K(tile) *to) {
    to->type = LLM_F32, to->n = from->n, to->stride = LLM__TILE;
    for (int g = 0; g < LLM__TILE / LLM__W; g++) {
        to->keys[g] = a->keys + g * LLM__W;
        for (int d = 0; g * LLM__W < from->n && d < head_dim; d++) {
            LLM__K(store)(a->keys + d * LLM__TILE + g * LLM__W,
                          LLM__K(load_as)(type, from->keys[g], d * from->stride));
            LLM__K(ask_for_keys)(type, next, g, d);
        }
    }
    for (int k = 0; k < from->n; k++) {
        float *value = a->values + (int64_t)k * a->padded_dim;
        int d = 0;
        for (; d + LLM__W <= head_dim; d += LLM__W)
            LLM__K(store)(value + d, LLM__K(load_as)(type, from->values[k], d));
        if (d < head_dim)
            LLM__K(store)(value + d, LLM__K(load_some_as)(type, from->values[k], d, head_dim - d));
        LLM__K(ask_for_value)(type, next, k, head_dim);
        to->values[k] = value;
    }
}

/* Multiply R query rows by V registers of keys from `group` on. R and V are constants. */
LLM__INLINE void LLM__K(score_block)(int R, int V, llm_type type, const float *const *q,
                                     const LLM__K(tile) *tile, const LLM__K(tile) *next, int group,
                                     int head_dim, float *scores) {
    llm__vf sums[LLM__ROWS][4];
    const void *keys[4];
    LLM__UNROLL for (int v = 0; v < V; v++) keys[v] = tile->keys[group + v];
    LLM__UNROLL for (int r = 0; r < R; r++)
        LLM__UNROLL for (int v = 0; v < V; v++) sums[r][v] = (llm__vf){0};
    int64_t at = 0, stride = tile->stride;
    for (int d = 0; d < head_dim; d++, at += stride) {
        llm__vf key[4];
        LLM__UNROLL for (int v = 0; v < V; v++) key[v] = LLM__K(load_as)(type, keys[v], at);
        LLM__UNROLL for (int v = 0; v < V; v += 2)
            LLM__K(ask_for_keys)(type, next, group + v + (V > 1 ? d % 2 : 0), d);
        LLM__UNROLL for (int r = 0; r < R; r++) {
            llm__vf query = LLM__K(all)(q[r][d]);
            LLM__UNROLL for (int v = 0; v < V; v++)
                sums[r][v] = LLM__K(fma)(query, key[v], sums[r][v]);
        }
    }
    LLM__UNROLL for (int r = 0; r < R; r++)
        LLM__UNROLL for (int v = 0; v < V; v++)
            LLM__K(store)(scores + r * LLM__TILE + v * LLM__W, sums[r][v]);
}

LLM__INLINE void LLM__K(score_rows)(int R, llm_type type, const float *const *q,
                                    const LLM__K(tile) *tile, const LLM__K(tile) *next,
                                    int head_dim, int n_keys, float *scores) {
    int g = 0, end = (n_keys + LLM__W - 1) / LLM__W;
    for (; g + 4 <= end; g += 4)
        LLM__K(score_block)(R, 4, type, q, tile, next, g, head_dim, scores + g * LLM__W);
    for (; g < end; g++)
        LLM__K(score_block)(R, 1, type, q, tile, next, g, head_dim, scores + g * LLM__W);
}

/* Turn a row's scores into weights exp(score - largest). The row sees keys `from` to seen - 1; key
 * k is at distance `ahead` - k. Not inlined: one compiled form must round all rows alike. */
LLM__NOINLINE LLM__KERNELS void LLM__K(softmax_row)(float *scores, int from, int seen,
                                                    const llm_attention_shape *shape, float slope,
                                                    int ahead, float *largest, float *total,
                                                    float *sums, int padded_dim) {
    int padded = (seen + LLM__W - 1) / LLM__W * LLM__W;
    for (int k = 0; k < padded; k += LLM__W) {
        llm__vf score = LLM__K(load)(scores + k) * shape->scale;
        LLM__K(store)(scores + k, shape->cap > 0 ? LLM__K(capped)(score, shape->cap) : score);
    }
    for (int k = 0; slope > 0 && k < padded; k++) scores[k] -= slope * (float)(ahead - k);
    for (int k = seen; k < padded; k++) scores[k] = -INFINITY;
    for (int k = 0; k < from; k++) scores[k] = -INFINITY;
    llm__vf top = LLM__K(all)(*largest);
    for (int k = 0; k < padded; k += LLM__W) top = LLM__K(max)(LLM__K(load)(scores + k), top);
    float new_largest = LLM__K(largest)(top);
    llm__vf added = {0};
    for (int k = 0; k < padded; k += LLM__W) {
        llm__vf weight = LLM__K(exp)(LLM__K(load)(scores + k) - new_largest);
        LLM__K(store)(scores + k, weight);
        added += weight;
    }
    if (new_largest != *largest) {
        float shrink = LLM__K(exp)(LLM__K(all)(*largest - new_largest))[0];
        *total *= shrink;
        for (int d = 0; d < padded_dim; d += LLM__W)
            LLM__K(store)(sums + d, LLM__K(load)(sums + d) * shrink);
    }
    *total += LLM__K(sum)(added);
    *largest = new_largest;
}

/* Add to sums[r]: weights times values of keys first .. end - 1, for R rows and V registers from d
 * on. */
LLM__INLINE void LLM__K(value_block)(int R, int V, llm_type type, const float *weights,
                                     const LLM__K(tile) *tile, const LLM__K(tile) *next, int d,
                                     int first, int end, int head_dim, int padded_dim,
                                     float *sums) {
    llm__vf acc[LLM__ROWS][4];
    LLM__UNROLL for (int r = 0; r < R; r++)
        LLM__UNROLL for (int v = 0; v < V; v++)
            acc[r][v] = LLM__K(load)(sums + r * padded_dim + d + v * LLM__W);
    for (int k = first; k < end; k++) {
        llm__vf value[4];
        LLM__UNROLL for (int v = 0; v < V; v++)
            value[v] = LLM__K(load_as)(type, tile->values[k], d + v * LLM__W);
        if (d == 0) LLM__K(ask_for_value)(type, next, k, head_dim);
        LLM__UNROLL for (int r = 0; r < R; r++) {
            llm__vf weight = LLM__K(all)(weights[r * LLM__TILE + k]);
            LLM__UNROLL for (int v = 0; v < V; v++)
                acc[r][v] = LLM__K(fma)(weight, value[v], acc[r][v]);
        }
    }
    LLM__UNROLL for (int r = 0; r < R; r++)
        LLM__UNROLL for (int v = 0; v < V; v++)
            LLM__K(store)(sums + r * padded_dim + d + v * LLM__W, acc[r][v]);
}

LLM__INLINE void LLM__K(value_rows)(int R, llm_type type, const float *weights,
                                    const LLM__K(tile) *tile, const LLM__K(tile) *next, int first,
                                    int end, int head_dim, int padded_dim, float *sums) {
    int d = 0;
    if (first >= end) return;
    for (; d + 4 * LLM__W <= head_dim; d += 4 * LLM__W)
        LLM__K(value_block)(R, 4, type, weights, tile, next, d, first, end, head_dim, padded_dim,
                            sums);
    for (; d < head_dim; d += LLM__W)
        LLM__K(value_block)(R, 1, type, weights, tile, next, d, first, end, head_dim, padded_dim,
                            sums);
}

static LLM__NOINLINE void LLM__K(value_row)(llm_type type, const float *weights,
                                            const LLM__K(tile) *tile, const LLM__K(tile) *next,
                                            int first, int end, int head_dim, int padded_dim,
                                            float *sums) {
    if (type == LLM_F16)
        LLM__K(value_rows)(1, LLM_F16, weights, tile, next, first, end, head_dim, padded_dim, sums);
    else
        LLM__K(value_rows)(1, LLM_F32, weights, tile, next, first, end, head_dim, padded_dim, sums);
}

typedef struct LLM__K(query_rows) { /* the query rows of an attention item */
    int n; /* number of rows */
    const float *q[LLM__QUERY_ROWS]; /* (head_dim) each */
    int position[LLM__QUERY_ROWS]; /* position of each row in the sequence */
    float slope[LLM__QUERY_ROWS]; /* see llm__alibi_slope; 0: none */
    int first; /* position of the tile's first key */
    /* Each row sees keys `from` to seen - 1 of the tile; none if from >= seen. */
    int from[LLM__QUERY_ROWS], seen[LLM__QUERY_ROWS];
} LLM__K(query_rows);

/* Attention of rows `row` to row + R - 1, whose bounds `from` and `seen` ascend. */
LLM__INLINE void LLM__K(attend)(int R, llm_type type, const llm__attention_args *args,
                                const LLM__K(attention_scratch) *a, const LLM__K(query_rows) *rows,
                                int row, const LLM__K(tile) *tile, const LLM__K(tile) *next) {
    float *scores = a->scores + row * LLM__TILE, *sums = a->sums + (int64_t)row * a->padded_dim;
    const int *from = rows->from + row, *seen = rows->seen + row, head_dim = args->shape.head_dim,
              padded_dim = a->padded_dim;
    LLM__K(score_rows)(R, type, rows->q + row, tile, next, head_dim, seen[R - 1], scores);
    for (int r = 0; r < R; r++)
        LLM__K(softmax_row)(scores + r * LLM__TILE, from[r], seen[r], &args->shape,
                            rows->slope[row + r], rows->position[row + r] - rows->first,
                            &a->largest[row + r], &a->total[row + r],
                            sums + (int64_t)r * padded_dim, padded_dim);
    /* values that all rows see are loaded once */
    int common = from[R - 1], end = seen[0] > common ? seen[0] : common;
    for (int r = 0; r < R - 1; r++)
        LLM__K(value_row)(type, scores + r * LLM__TILE, tile, NULL, from[r],
                          common < seen[r] ? common : seen[r], head_dim, padded_dim,
                          sums + (int64_t)r * padded_dim);
    if (R == 1)
        LLM__K(value_row)(type, scores, tile, next, common, seen[0], head_dim, padded_dim, sums);
    else
        LLM__K(value_rows)(R, type, scores, tile, next, common, seen[0], head_dim, padded_dim,
                           sums);
    for (int r = 1; r < R; r++)
        LLM__K(value_row)(type, scores + r * LLM__TILE, tile, NULL, end, seen[r], head_dim,
                          padded_dim, sums + (int64_t)r * padded_dim);
}

static void LLM__K(find_rows)(const llm__attention_args *args, int sequence, int kv_head,
                              int first_row, int end_row, LLM__K(query_rows) *rows) {
    const llm_batch *batch = args->batch;
    int group = args->shape.n_heads / args->shape.n_kv_heads;
    rows->n = end_row - first_row;
    for (int r = 0; r < rows->n; r++) {
        int64_t token = batch->seq_first[sequence] + (first_row + r) / group,
                head = kv_head * group + (first_row + r) % group;
        rows->q[r] = args->q + (token * args->shape.n_heads + head) * args->shape.head_dim;
        rows->position[r] = batch->positions[token];
        rows->slope[r] = args->shape.alibi > 0 ? llm__alibi_slope(&args->shape, (int)head) : 0;
    }
}

/* Find which keys of the tile from position `first` on each row sees. */
LLM__INLINE void LLM__K(see_tile)(const llm__attention_args *args, int first,
                                  LLM__K(query_rows) *rows) {
    rows->first = first;
    for (int r = 0; r < rows->n; r++) {
        rows->from[r] = (int)llm__max(llm__first_seen(&args->shape, rows->position[r]) - first, 0);
        rows->seen[r] = (int)llm__min(LLM__TILE, rows->position[r] + 1 - first);
    }
}

LLM__INLINE void LLM__K(attend_rows)(llm_type type, const llm__attention_args *args,
                                     const LLM__K(attention_scratch) *a,
                                     const LLM__K(query_rows) *rows, const LLM__K(tile) *tile,
                                     const LLM__K(tile) *next) {
    int row = 0, end = rows->n;
    while (row < end && rows->seen[row] <= 0) row++;
    while (end > row && rows->from[end - 1] >= LLM__TILE) end--;
    for (; row + LLM__ROWS <= end; row += LLM__ROWS)
        LLM__K(attend)(LLM__ROWS, type, args, a, rows, row, tile, next);
    for (; LLM__ROWS > 2 && row + 2 <= end; row += 2)
        LLM__K(attend)(LLM__ROWS > 2 ? 2 : 1, type, args, a, rows, row, tile, next);
    for (; row < end; row++) LLM__K(attend)(1, type, args, a, rows, row, tile, next);
}

/* A few rows read f16 in place if head_dim is a multiple of LLM__W. */
static void LLM__K(attend_tile)(const llm__attention_args *args, const LLM__K(attention_scratch) *a,
                                const LLM__K(query_rows) *rows, const LLM__K(tile) *tile,
                                const LLM__K(tile) *next) {
    if (tile->type == LLM_F16 && rows->n <= 2 * LLM__ROWS && args->shape.head_dim % LLM__W == 0) {
        LLM__K(attend_rows)(LLM_F16, args, a, rows, tile, next);
        return;
    }
    LLM__K(tile) wide;
    if (tile->type == LLM_F16)
        LLM__K(widen_tile)(LLM_F16, args->shape.head_dim, tile, next, a, &wide);
    else LLM__K(widen_tile)(LLM_F32, args->shape.head_dim, tile, next, a, &wide);
    LLM__K(attend_rows)(LLM_F32, args, a, rows, &wide, NULL);
}

#if LLM__KERNEL_PASS == 2

/* -- Attention in matrix tiles: AMX --
 * The tile unit also multiplies bf16: C (16 x 16, f32) += A (16 x 32) B (32 x 16), at 16 times the
 * rate of vector registers. bf16 has 8 bits of precision, so each number is split into two:
 *
 *   x = high + low                              high: x to 8 bits; low: the rest to 8 bits
 *   x y = high high' + high low' + low high'    relative error at most 2^-16
 *
 * (An f16 value is exactly high + low.) For each tile and 16 query rows:
 *
 *   C: scores (16 rows, 64 keys) = A: queries (16 rows, dim), packed once  x  B: keys (dim, 64)
 *   weights                      = exp(scores - largest)
 *   C: sums (16 rows, dim)      += A: weights (16 rows, 64 keys)  x  B: values (64 keys, dim)
 *
 * A row of B interleaves two rows of its matrix: two dimensions of the keys, or the values of two
 * keys. Row i is paired with row i + 16, so two registers make a row of A without a shuffle. Tiles
 * with fewer rows take less time.
 *
 * In this form, values of unseen keys are multiplied by 0, so they must be finite: store_head
 * clamps them, and missing rows are zeros. */

typedef struct llm__amx_tile {
    uint16_t *queries[2];  /* high, low: (8 groups of 16 rows, padded_dim / 32, 16, 32) */
    uint16_t *keys[2];     /* high, low: (4 groups of 16 keys, padded_dim / 2, 16, 2) */
    uint16_t *values[2];   /* high, low: (32 pairs of keys, padded_dim, 2) */
    uint16_t *weights[2];  /* high, low: (16 rows, 64) */
    float *scores;         /* (16 rows, 64) */
} llm__amx_tile;

/* Split a and b into high and low parts, each 16 pairs of bf16 with a in the low halves. Rounding
 * adds half a unit in the last place; f16 values (`exact`) need none. */
LLM__INLINE void llm__amx_split(bool exact, __m512 a, __m512 b, void *high, void *low) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000),
                  half = exact ? _mm512_setzero_si512() : _mm512_set1_epi32(0x8000);
    __m512i whole_a = _mm512_and_si512(_mm512_add_epi32((__m512i)a, half), upper);
    __m512i whole_b = _mm512_and_si512(_mm512_add_epi32((__m512i)b, half), upper);
    __m512i rest_a = _mm512_add_epi32((__m512i)_mm512_sub_ps(a, (__m512)whole_a), half);
    __m512i rest_b = _mm512_add_epi32((__m512i)_mm512_sub_ps(b, (__m512)whole_b), half);
    _mm512_storeu_si512(high, _mm512_or_si512(_mm512_srli_epi32(whole_a, 16), whole_b));
    _mm512_storeu_si512(low,
                        _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(rest_a, 16), rest_b));
}

/* 16 values of a row from value d on, padded with zeros. */
LLM__INLINE __m512 llm__amx_some(llm_type type, const void *row, int d, int head_dim) {
    if (d + 16 <= head_dim) return (__m512)LLM__K(load_as)(type, row, d);
    return d < head_dim ? (__m512)LLM__K(load_some_as)(type, row, d, head_dim - d)
                        : _mm512_setzero_ps();
}

/* Reuse the vector form's scratch memory; the packed queries follow it. */
static llm__amx_tile llm__amx_carve(const LLM__K(attention_scratch) *a) {
    llm__amx_tile t;
    int64_t depth = a->padded_dim;
    t.keys[0] = (uint16_t *)(void *)a->keys; /* two bf16 parts are as large as f32 */
    t.values[0] = (uint16_t *)(void *)a->values;
    t.scores = a->scores; /* the first 16 of 128 rows */
    t.weights[0] = (uint16_t *)(void *)(a->scores + LLM__TILE * 16);
    t.queries[0] = (uint16_t *)(void *)(a->zeros + depth);
    t.keys[1] = t.keys[0] + LLM__TILE * depth;
    t.values[1] = t.values[0] + LLM__TILE * depth;
    t.weights[1] = t.weights[0] + LLM__TILE * 16;
    t.queries[1] = t.queries[0] + LLM__QUERY_ROWS * depth;
    return t;
}

static void llm__amx_begin(const llm__attention_args *args, const LLM__K(query_rows) *rows,
                           const LLM__K(attention_scratch) *a, const llm__amx_tile *t) {
    __m512 scale = _mm512_set1_ps(args->shape.scale);
    for (int r = 0; r < (rows->n + 15) / 16 * 16; r++)
        for (int d = 0; d < a->padded_dim; d += 32) {
            const void *q = r < rows->n ? rows->q[r] : a->zeros;
            int64_t at = (int64_t)(r / 16) * 16 * a->padded_dim + d * 16 + r % 16 * 32;
            llm__amx_split(
                false, _mm512_mul_ps(llm__amx_some(LLM_F32, q, d, args->shape.head_dim), scale),
                _mm512_mul_ps(llm__amx_some(LLM_F32, q, d + 16, args->shape.head_dim), scale),
                t->queries[0] + at, t->queries[1] + at);
        }
}

LLM__INLINE void llm__amx_gather_keys(int head_dim, const LLM__K(tile) *tile,
                                      const LLM__K(tile) *next, int depth, const llm__amx_tile *t,
                                      int group) {
    for (int first = 0; first < depth; first += 32) {
        const uint16_t *key = (const uint16_t *)tile->keys[group] + first * tile->stride,
                       *other = key + 16 * tile->stride;
        const char *wanted = (const char *)next->keys[group] +
                             2 * (first + group % 2) * next->stride;
        for (int d = first; d < first + 16; d++) { /* pairs of dimensions d and d + 16 */
            int64_t at = (int64_t)(group * depth + 2 * d - first) * 16;
            __m512 a = _mm512_setzero_ps(), b = a;
            if (d < head_dim) a = (__m512)LLM__K(from_f16)(key);
            if (d + 16 < head_dim) b = (__m512)LLM__K(from_f16)(other);
            llm__amx_split(true, a, b, t->keys[0] + at, t->keys[1] + at);
            LLM__PREFETCH_FAR(wanted);
            key += tile->stride, other += tile->stride, wanted += 4 * next->stride;
        }
    }
}

/* Convert the values to bf16, up to a multiple of 32 rows. */
LLM__INLINE void llm__amx_gather_values(int head_dim, const LLM__K(tile) *tile,
                                        const LLM__K(tile) *next,
                                        const LLM__K(attention_scratch) *a,
                                        const llm__amx_tile *t) {
    int depth = a->padded_dim;
    for (int i = 0; i < (tile->n + 31) / 32 * 16; i++) { /* pairs of keys k and k + 16 */
        int k = i / 16 * 32 + i % 16;
        const void *a_value = k < tile->n ? tile->values[k] : a->zeros,
                   *b_value = k + 16 < tile->n ? tile->values[k + 16] : a->zeros;
        uint16_t *high = t->values[0] + i * 2 * depth, *low = t->values[1] + i * 2 * depth;
        int d = 0;
        for (; d + 16 <= head_dim; d += 16)
            llm__amx_split(true, (__m512)LLM__K(from_f16)((const uint16_t *)a_value + d),
                           (__m512)LLM__K(from_f16)((const uint16_t *)b_value + d), high + 2 * d,
                           low + 2 * d);
        for (; d < depth; d += 16)
            llm__amx_split(true, llm__amx_some(LLM_F16, a_value, d, head_dim),
                           llm__amx_some(LLM_F16, b_value, d, head_dim), high + 2 * d, low + 2 * d);
        LLM__K(ask_for_value)(LLM_F16, next, k, head_dim);
        LLM__K(ask_for_value)(LLM_F16, next, k + 16, head_dim);
    }
}

#define LLM__TILE_LOAD(tile, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define LLM__TILE_STORE(tile, p, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride))       \
                     : "memory")
#define LLM__TILE_ZERO(c) __asm__ volatile("tilezero %%tmm" #c ::)
#define LLM__TILE_PRODUCT(c, a, b) \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

/* scores (16 rows, n) = queries times keys, n = 32 or 64. Each addition to a sum waits for the
 * previous one, so four sums take turns. */
LLM__INLINE void llm__amx_scores(const llm__amx_tile *t, int depth, int group, int n) {
    LLM__TILE_ZERO(0); LLM__TILE_ZERO(1); LLM__TILE_ZERO(2); LLM__TILE_ZERO(3);
    for (int d = 0; d < depth; d += 32)
        for (int part = 0; part < 3; part++) { /* high high, high low, low high */
            const uint16_t *keys = t->keys[part == 1] + d * 16;
            LLM__TILE_LOAD(4, t->queries[part == 2] + (int64_t)group * 16 * depth + d * 16, 64);
            LLM__TILE_LOAD(6, keys, 64);
            LLM__TILE_PRODUCT(0, 4, 6);
            LLM__TILE_LOAD(7, keys + 16 * depth, 64);
            LLM__TILE_PRODUCT(1, 4, 7);
            if (n <= 32) continue;
            LLM__TILE_LOAD(6, keys + 32 * depth, 64);
            LLM__TILE_PRODUCT(2, 4, 6);
            LLM__TILE_LOAD(7, keys + 48 * depth, 64);
            LLM__TILE_PRODUCT(3, 4, 7);
        }
    const int stride = LLM__TILE * 4;
    LLM__TILE_STORE(0, t->scores, stride);
    LLM__TILE_STORE(1, t->scores + 16, stride);
    if (n <= 32) return;
    LLM__TILE_STORE(2, t->scores + 32, stride);
    LLM__TILE_STORE(3, t->scores + 48, stride);
}

/* The same for one group of keys, with the same order of sums. */
LLM__INLINE void llm__amx_group_scores(const llm__amx_tile *t, int depth, int group) {
    LLM__TILE_ZERO(0);
    for (int d = 0; d < depth; d += 32) {
        LLM__TILE_LOAD(4, t->queries[0] + d * 16, 64);
        LLM__TILE_LOAD(6, t->keys[0] + (group * depth + d) * 16, 64);
        LLM__TILE_PRODUCT(0, 4, 6);
        LLM__TILE_LOAD(7, t->keys[1] + (group * depth + d) * 16, 64);
        LLM__TILE_PRODUCT(0, 4, 7);
        LLM__TILE_LOAD(5, t->queries[1] + d * 16, 64);
        LLM__TILE_PRODUCT(0, 5, 6);
    }
    LLM__TILE_STORE(0, t->scores + group * 16, LLM__TILE * 4);
}

/* sums (16 rows, padded_dim) += weights (16 rows, n) times values (n, padded_dim). */
LLM__INLINE void llm__amx_values(const llm__amx_tile *t, int padded_dim, int n, float *sums) {
    int64_t stride = padded_dim * 4;
    for (int d = 0; d < padded_dim; d += 64) {
        bool more = d + 32 < padded_dim;
        LLM__TILE_LOAD(0, sums + d, stride);
        LLM__TILE_LOAD(1, sums + d + 16, stride);
        if (more) LLM__TILE_LOAD(2, sums + d + 32, stride);
        if (more) LLM__TILE_LOAD(3, sums + d + 48, stride);
        for (int k = 0; k < n; k += 32)
            for (int part = 0; part < 3; part++) {
                const uint16_t *values = t->values[part == 1] + k * padded_dim + 2 * d;
                LLM__TILE_LOAD(4, t->weights[part == 2] + k, 2 * LLM__TILE);
                LLM__TILE_LOAD(6, values, stride);
                LLM__TILE_PRODUCT(0, 4, 6);
                LLM__TILE_LOAD(7, values + 32, stride);
                LLM__TILE_PRODUCT(1, 4, 7);
                if (!more) continue;
                LLM__TILE_LOAD(6, values + 64, stride);
                LLM__TILE_PRODUCT(2, 4, 6);
                LLM__TILE_LOAD(7, values + 96, stride);
                LLM__TILE_PRODUCT(3, 4, 7);
            }
        LLM__TILE_STORE(0, sums + d, stride);
        LLM__TILE_STORE(1, sums + d + 16, stride);
        if (more) LLM__TILE_STORE(2, sums + d + 32, stride);
        if (more) LLM__TILE_STORE(3, sums + d + 48, stride);
    }
}
#undef LLM__TILE_PRODUCT
#undef LLM__TILE_ZERO
#undef LLM__TILE_STORE
#undef LLM__TILE_LOAD

/* e^x for x <= 0, with a relative error of 1e-6: 2^k 2^r with integer k and |r| <= 1/2. */
LLM__INLINE __m512 llm__amx_exp(__m512 x) {
    /* coefficients of the series of 2^r: ln(2)^i / i!, i = 6 .. 0 */
    const float terms[] = {1.54035304e-4f,
                           1.33335581e-3f,
                           9.61812911e-3f,
                           5.55041087e-2f,
                           2.40226507e-1f,
                           6.93147181e-1f,
                           1.0f};
    const __m512 log2_e = _mm512_set1_ps(1.44269504f);
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
    __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, log2_e),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fmsub_ps(x, log2_e, k), sum = _mm512_set1_ps(terms[0]);
    LLM__UNROLL for (int i = 1; i < 7; i++) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(sum, k);
}

LLM__INLINE __m512 llm__amx_both(bool largest, __m512 a, __m512 b) {
    return largest ? _mm512_max_ps(a, b) : _mm512_add_ps(a, b);
}

/* Lane r of the result: the sum, or the largest, of rows[r]. Each level merges pairs of
 * registers. */
LLM__INLINE __m512 llm__amx_reduce(bool largest, const __m512 *rows) {
    __m512 a[8], b[4], c[2];
    LLM__UNROLL for (int i = 0; i < 8; i++)
        a[i] = llm__amx_both(largest, _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                             _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
    LLM__UNROLL for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = llm__amx_both(largest, _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    LLM__UNROLL for (int i = 0; i < 2; i++)
        c[i] = llm__amx_both(largest, _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return llm__amx_both(largest, _mm512_shuffle_f32x4(c[0], c[1], 0x88),
                         _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

/* Turn the scores (n_rows, n keys) into weights, and rescale the earlier sums. sees: for each row,
 * a bit per key. */
LLM__INLINE void llm__amx_softmax(const llm__amx_tile *t, int n_rows, int n, const uint64_t *sees,
                                  float *largest, float *total, float *sums, int padded_dim) {
    __m512 rows[16], before = _mm512_loadu_ps(largest);
    for (int r = 0; r < 16; r++) {
        rows[r] = _mm512_set1_ps(-INFINITY);
        for (int k = 0; r < n_rows && k < n; k += 16)
            rows[r] = _mm512_mask_max_ps(rows[r], (__mmask16)(sees[r] >> k), rows[r],
                                         _mm512_loadu_ps(t->scores + r * LLM__TILE + k));
    }
    __m512 top = _mm512_max_ps(before, llm__amx_reduce(true, rows));
    __mmask16 changed = _mm512_cmp_ps_mask(top, before, _CMP_NEQ_UQ);
    float shrink[16];
    _mm512_storeu_ps(shrink, _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), changed,
                                                llm__amx_exp(_mm512_sub_ps(before, top))));
    _mm512_storeu_ps(largest, top);
    for (int r = 0; r < 16; r++) {
        __m512 weight[2], most = _mm512_set1_ps(largest[r]);
        rows[r] = _mm512_setzero_ps();
        for (int k = 0; r < n_rows && k < n; k += 32) {
            LLM__UNROLL for (int i = 0; i < 2; i++) {
                __m512 score = _mm512_loadu_ps(t->scores + r * LLM__TILE + k + 16 * i);
                weight[i] = _mm512_maskz_mov_ps((__mmask16)(sees[r] >> (k + 16 * i)),
                                                llm__amx_exp(_mm512_sub_ps(score, most)));
                rows[r] = _mm512_add_ps(rows[r], weight[i]);
            }
            llm__amx_split(false, weight[0], weight[1], t->weights[0] + r * LLM__TILE + k,
                           t->weights[1] + r * LLM__TILE + k);
        }
        for (int d = 0; changed >> r & 1 && d < padded_dim; d += 16)
            LLM__K(store)(sums + r * padded_dim + d,
                          LLM__K(load)(sums + r * padded_dim + d) * shrink[r]);
    }
    _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), _mm512_loadu_ps(shrink),
                                            llm__amx_reduce(false, rows)));
}

/* With up to 16 rows, the vector unit converts keys while the tile unit multiplies. */
static void llm__amx_attend(int head_dim, const LLM__K(query_rows) *rows,
                            const LLM__K(attention_scratch) *a, const llm__amx_tile *t,
                            const LLM__K(tile) *tile, const LLM__K(tile) *next) {
    int depth = a->padded_dim;
    for (int group = 0; group * 16 < tile->n; group++) {
        llm__amx_gather_keys(head_dim, tile, next, depth, t, group);
        if (rows->n <= 16) llm__amx_group_scores(t, depth, group);
    }
    llm__amx_gather_values(head_dim, tile, next, a, t);
    for (int row = 0; row < rows->n; row += 16) {
        uint64_t sees[16] = {0}, all = 0;
        for (int r = 0; r < 16 && row + r < rows->n; r++) {
            int from = rows->from[row + r], seen = rows->seen[row + r];
            if (from < seen) all |= sees[r] = UINT64_MAX >> (64 - seen) & UINT64_MAX << from;
        }
        if (all == 0) continue;
        int n = all >> 32 ? 64 : 32;
        if (rows->n > 16) llm__amx_scores(t, depth, row / 16, n);
        llm__amx_softmax(t, rows->n > 16 ? 16 : rows->n, n, sees, a->largest + row, a->total + row,
                         a->sums + (int64_t)row * depth, depth);
        llm__amx_values(t, depth, n, a->sums + (int64_t)row * depth);
    }
}
#endif

static void LLM__K(attention)(const llm__attention_args *args, int sequence, int kv_head,
                              int first_row, int end_row, void *scratch) {
    int head_dim = args->shape.head_dim;
    LLM__K(query_rows) rows;
    LLM__K(find_rows)(args, sequence, kv_head, first_row, end_row, &rows);
    LLM__K(attention_scratch) a = LLM__K(carve)(scratch, head_dim);
    memset(a.zeros, 0, (size_t)a.padded_dim * sizeof *a.zeros);
    int n_rows = (rows.n + 15) / 16 * 16; /* a matrix tile holds 16 rows */
    memset(a.sums, 0, (size_t)n_rows * (size_t)a.padded_dim * sizeof *a.sums);
    for (int r = 0; r < n_rows; r++) a.largest[r] = -INFINITY, a.total[r] = 0.0f;
#if LLM__KERNEL_PASS == 2
    llm__amx_tile t = llm__amx_carve(&a);
    if (args->tiles)
        llm__amx_configure((int)llm__min(rows.n, 16), 64, 16), llm__amx_begin(args, &rows, &a, &t);
#endif
    int last = rows.position[rows.n - 1],
        begin = llm__first_seen(&args->shape, rows.position[0]) / LLM__TILE * LLM__TILE;
    bool as_it_lies = args->cache->keys_transposed && args->cache->block_size % LLM__W == 0;
    /* in a tree, all rows belong to one token: see llm__attend */
    int token = args->batch->seq_first[sequence], branch = INT_MAX;
    if (llm__is_tree(args->batch, sequence))
        branch = args->batch->positions[token], token += first_row * args->shape.n_kv_heads /
                                                         args->shape.n_heads;
    LLM__K(tile) tiles[2]; /* the current tile and the next */
    LLM__K(find_tile)(args, sequence, token, kv_head, begin, last, branch, &tiles[0]);
    for (int first = begin, now = 0; first <= last; first += LLM__TILE, now = !now) {
        LLM__K(tile) *tile = &tiles[now], *next = &tiles[!now];
        LLM__K(find_tile)(args, sequence, token, kv_head, first + LLM__TILE, last, branch, next);
        if (!as_it_lies || first + tile->n > branch)
            LLM__K(copy_keys)(args, sequence, token, kv_head, first, &a, tile);
        LLM__K(see_tile)(args, first, &rows);
#if LLM__KERNEL_PASS == 2
        if (args->tiles) {
            llm__amx_attend(head_dim, &rows, &a, &t, tile, next);
            continue;
        }
#endif
        LLM__K(attend_tile)(args, &a, &rows, tile, next);
    }
#if LLM__KERNEL_PASS == 2
    if (args->tiles) __asm__ volatile("tilerelease" ::);
#endif
    for (int r = 0; r < rows.n; r++) {
        float *out = args->out + (rows.q[r] - args->q), *sums = a.sums + (int64_t)r * a.padded_dim;
        for (int d = 0; d < head_dim; d++) out[d] = sums[d] / a.total[r];
    }
}

LLM__KERNELS const llm__kernels LLM__K(kernels) = {
    LLM__KERNEL_PASS == 0   ? LLM_ISA_PLAIN
    : LLM__KERNEL_PASS == 1 ? LLM_ISA_AVX2
    : LLM__KERNEL_PASS == 2 ? LLM_ISA_AVX512
                            : LLM_ISA_DOTPROD,
    LLM__W,
    LLM__K(round_rows),
    LLM__K(matmul),
    LLM__K(rmsnorm),
    LLM__K(layernorm),
    LLM__K(swiglu),
    LLM__K(softcap),
    LLM__K(argmax),
    LLM__K(sum_exp),
    LLM__K(rope_and_store),
    LLM__K(attention),
};

#ifdef __clang__
#pragma clang attribute pop
#endif
#undef llm__vf
#undef llm__vi
#undef LLM__K
#undef LLM__W
#undef LLM__ROWS
#undef LLM__X_ROWS
#endif /* LLM__KERNEL_PASS */

#if defined(LLM_IMPLEMENTATION) && !defined(LLM__KERNEL_PASS)
#ifndef LLM__IMPLEMENTED_KERNELS
#define LLM__IMPLEMENTED_KERNELS

/* The passes take most of the compile time, so a program may compile each in a file of its own,
 * with LLM_KERNELS_HERE as the level of the pass: 0 (baseline), 1 (AVX2, or NEON's dot products) or
 * 2 (AVX-512). In its other files, it is -1. */
#ifdef LLM_NO_FAST_KERNELS
#define LLM__COMPILES(level) 0
#elif defined(LLM_KERNELS_HERE)
#define LLM__COMPILES(level) (LLM_KERNELS_HERE == (level))
#define LLM__KERNELS
extern const llm__kernels llm__base_kernels, llm__avx2_kernels, llm__avx512_kernels,
    llm__dotprod_kernels;
void llm__base_softmax_row(float *scores, int from, int seen, const llm_attention_shape *shape,
                           float slope, int ahead, float *largest, float *total, float *sums,
                           int padded_dim);
#else
#define LLM__COMPILES(level) 1
#define LLM__KERNELS static
#endif

/* If you rename this file, define LLM_FILE_NAME as its new name: the passes include it. */
#ifndef LLM_FILE_NAME
#define LLM_FILE_NAME "llm.h"
#endif

#if LLM__COMPILES(0)
#define LLM__KERNEL_PASS 0
#define LLM__W 4
#define LLM__ROWS 2
#define LLM__X_ROWS 4
#define LLM__K(name) LLM__JOIN(llm__base_, name)
#include LLM_FILE_NAME
#undef LLM__KERNEL_PASS
#endif

#if defined(LLM__X86) && LLM__COMPILES(1)
#define LLM__KERNEL_PASS 1
#define LLM__W 8
#define LLM__ROWS 2
#define LLM__X_ROWS 4
#define LLM__K(name) LLM__JOIN(llm__avx2_, name)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include LLM_FILE_NAME
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LLM__KERNEL_PASS
#endif

#if defined(LLM__X86) && LLM__COMPILES(2)
#define LLM__KERNEL_PASS 2
#define LLM__W 16
#define LLM__ROWS 4
#define LLM__X_ROWS 8
#define LLM__K(name) LLM__JOIN(llm__avx512_, name)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8,avx2,fma,f16c")
#endif
#include LLM_FILE_NAME
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LLM__KERNEL_PASS
#endif

#if defined(LLM__DOTPROD) && LLM__COMPILES(1)
#define LLM__KERNEL_PASS 3
#define LLM__W 4
#define LLM__ROWS 2
#define LLM__X_ROWS 4
#define LLM__K(name) LLM__JOIN(llm__dotprod_, name)
#ifndef __clang__
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include LLM_FILE_NAME
#ifndef __clang__
#pragma GCC pop_options
#endif
#undef LLM__KERNEL_PASS
#endif

/* Linux grants AMX to a process only on request. */
static bool llm__has_matrix_tiles(void) {
#if defined(LLM_EMULATED_TILES) /* tests/tiles_on_cpu.c emulates them */
    return true;
#elif defined(LLM__X86) && defined(__linux__) && defined(__LP64__)
    enum {
        TILES = 1 << 22 | 1 << 24 | 1 << 25 /* bf16, tiles, int8 */,
        ARCH_PRCTL = 158,
        REQUEST_PERMISSION = 0x1023,
        TILE_DATA = 18
    };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) != TILES) return false;
    int64_t failed; /* strict C11 does not declare syscall() */
    __asm__ volatile("syscall"
                     : "=a"(failed)
                     : "0"((int64_t)ARCH_PRCTL), "D"((int64_t)REQUEST_PERMISSION),
                       "S"((int64_t)TILE_DATA)
                     : "rcx", "r11", "memory");
    return failed == 0;
#else
    return false;
#endif
}

#ifdef LLM__DOTPROD
static bool llm__has_dot_products(void) {
#ifdef __ARM_FEATURE_DOTPROD /* the target always has them */
    return true;
#else
    enum { DOT_PRODUCTS = 1 << 20 }; /* Linux's HWCAP_ASIMDDP */
    return (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0;
#endif
}
#endif

/* The best kernels for this processor up to max_isa; NULL: the reference loops */
static const llm__kernels *llm__choose_kernels(llm_isa max_isa) {
#ifdef LLM__X86
    /* a processor with AVX2 and FMA also has F16C */
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512vnni");
    if (avx512 && max_isa >= LLM_ISA_AVX512) return &llm__avx512_kernels;
    if (avx2 && max_isa >= LLM_ISA_AVX2) return &llm__avx2_kernels;
#endif
#ifdef LLM__DOTPROD
    if (max_isa >= LLM_ISA_DOTPROD && llm__has_dot_products()) return &llm__dotprod_kernels;
#endif
#ifdef LLM_NO_FAST_KERNELS
    (void)max_isa;
    return NULL;
#else
    return max_isa >= LLM_ISA_PLAIN ? &llm__base_kernels : NULL;
#endif
}

static int32_t llm__argmax(const float *x, int n) {
    const llm__kernels *kernels = llm__choose_kernels(LLM_ISA_BEST);
    if (kernels) return kernels->argmax(x, n);
    float most = -INFINITY;
    int32_t index = 0;
    for (int i = 0; i < n; i++)
        if (x[i] > most) most = x[i], index = i;
    return index;
}

static double llm__sum_exp(const float *x, int n, float shift) {
    const llm__kernels *kernels = llm__choose_kernels(LLM_ISA_BEST);
    if (kernels) return kernels->sum_exp(x, n, shift);
    double sum = 0;
    for (int i = 0; i < n; i++) sum += exp((double)x[i] - (double)shift);
    return sum;
}

/* ---- The planned executor: stages, whose items the threads share ----
 * `prepare` divides a program into stages. A stage is one operation, or a few fused operations, and
 * is divided into items, which the threads share. `run` starts the threads once. Before some
 * stages, the threads wait for each other at a barrier:
 *
 *     thread 0   norm round  q    k  v  | rope  attention | round  o      | norm round  gate ...
 *     thread 1   norm round  q    k  v  | rope  attention | round  o      | norm round  gate ...
 *
 * One rule decides where a barrier is needed (llm__plan_add). The plan also saves barriers and
 * memory traffic in three ways, each with a switch (llm_program.fusions):
 *
 *   - every thread computes and rounds the norm of a few rows for itself, in its own memory;
 *   - an attention item that has all rows of its heads first applies RoPE to them;
 *   - the products gate and up are one stage, which also applies the activation.
 *
 * The fastest plan depends on the number of rows, so there is one for each class of steps.
 *
 * A thread first does the item with its own number: its weights are the same in each step, so they
 * may still be in the thread's cache. The threads take the remaining items one by one, so a slow
 * thread does fewer. A stage too small to share is left to the first thread.
 *
 * A barrier waits for the slowest thread, and a busy machine may suspend a thread for milliseconds.
 * When the calling thread has waited so long that it would have been faster alone, it works alone
 * for four times as long. So at most a fifth of the time is lost. */

enum {
    LLM__LARGE_WORK = 4000000,       /* smallest product to balance, in multiply-adds */
    LLM__SHARED_WORK = 30000,        /* smallest stage to share, in multiply-adds */
    LLM__THREADS_WORK = 400000,      /* smallest run to start threads for, in multiply-adds */
    LLM__TILES_MARGIN = LLM__GROUP / 2 * LLM__X_TILE * LLM__X_BYTES, /* bytes read past x_tiles */
    LLM__OWN_X_BYTES = 32 << 10,     /* bytes of scratch for a thread's copy of a norm's result */
    LLM__OWN_TILES_BYTES = 64 << 10, /* bytes of scratch for a thread's copy of rounded rows */
    LLM__SPINS = 4096,               /* polls at a barrier before a thread yields its core */
    LLM__CLASSES = 9                 /* classes of steps: see llm__class_rows */
};

typedef struct llm__stage {
    const llm_op *op;       /* the operation; the last of fused ones */
    const llm_op *before;   /* operation that each item does first (gate, RoPE); NULL: none */
    bool rounds;            /* stage that only rounds the input of op, a product */
    bool barrier;           /* the threads wait for each other before this stage */
    bool each;              /* every thread does the whole stage, in its own memory */
    bool own_x;             /* each thread has its own copy of the input (norm: of the output) */
    bool own_tiles;         /* each thread has its own copy of the rounded rows */
} llm__stage;

typedef struct llm__deal {  /* how a stage is divided into items in one run */
    const llm__stage *stage;
    int64_t items;
    int64_t next;           /* items taken, besides each thread's own first one */
    int64_t n;              /* rows of activations (swiglu: values) */
    int64_t n_per_item;     /* rows of activations in an item; 0: items are rows of the matrix */
    int64_t first_rows;     /* matrix rows in a thread's own first item */
    int64_t more_rows;      /* matrix rows in any other item */
    int64_t parts;          /* rounding: items per tile of x, each for some columns */
    double amount;          /* work, in multiply-adds or equivalent time */
    bool shared;            /* all threads take items */
} llm__deal;

typedef struct llm__variant { /* part of a program, planned for a class of steps */
    llm__stage *stages;     /* (n) */
    int n;
} llm__variant;

typedef struct llm__plan {  /* the result of prepare */
    llm_limits limits;
    llm__variant variants[2][LLM__CLASSES][2]; /* [head][class][RoPE fused with attention] */
    llm__deal *head;        /* the head's deals in the last run; the body's deals end here */
    const llm__variant *last[2]; /* body's and head's variant in the last run */
    int last_rows[2];       /* body's and head's rows in the last run */
    void *memory;           /* all stages and deals */
} llm__plan;

/* Most rows in a class of steps. */
static int llm__class_rows(int class_) {
    static const int rows[LLM__CLASSES] = {1, 2, 4, 8, 16, 32, 64, 128, INT_MAX};
    return rows[class_];
}

static int llm__class_of(int n) {
    int class_ = 0;
    while (n > llm__class_rows(class_)) class_++;
    return class_;
}

/* Rows of x per item: the same in every stage, since a thread's rows may still be in its cache. */
static int64_t llm__share_of_rows(const llm__cpu *cpu, int64_t n) {
    return llm__divide_up(llm__divide_up(n, cpu->n_threads), LLM__X_TILE) * LLM__X_TILE;
}

/* Rows in a tile of x. A tile of more than 8 has 16, as the tile unit needs. */
static int llm__tile_height(int64_t n) { return n <= 8 ? (int)n : LLM__X_TILE; }

static size_t llm__x_tile_bytes(int64_t n, int64_t cols) {
    return (size_t)(llm__stripes(cols) * LLM__X_BYTES * llm__tile_height(n));
}

/* ---- The plan ---- */

/* How a stage, or all stages since the last barrier, use a buffer. */
enum {
    LLM__READ = 1,
    LLM__WRITTEN = 2,
    LLM__OWN = 4 /* the thread reads its own copy */
};

typedef struct llm__planner {
    const llm__cpu *cpu;
    const llm_program *program;
    int rows;            /* most rows of a step in this class */
    llm__stage *stages;  /* (n_stages) */
    int n_stages;
    uint8_t *touched;    /* (n_buffers + 1) uses since the last barrier; the last: `rounded` */
    uint8_t *touches;    /* (n_buffers + 1) uses by the stage being planned */
    int own;             /* buffer that each thread has its own copy of; -1: none */
    int rounded;         /* buffer whose rounded rows are in llm__cpu.rounded; -1: none */
    int group;           /* values per scale in `rounded` */
    bool rounded_own;    /* whether each thread has its own rounded rows */
} llm__planner;

static void llm__plan_touch(llm__planner *p, const llm_op *op) {
    for (int i = 0; i < LLM_OP_INPUTS; i++)
        if (op->in[i] >= 0)
            p->touches[op->in[i]] |= op->kind == LLM_OP_ROPE_STORE && i > 0
                                         ? LLM__READ | LLM__WRITTEN
                                         : LLM__READ;
    if (op->out >= 0) p->touches[op->out] |= LLM__WRITTEN | (op->add ? LLM__READ : 0);
}

/* The one rule for barriers: a stage waits if, since the last barrier, another stage wrote a buffer
 * that it reads or writes, or read a buffer that it writes. Reading a thread's own copy needs no
 * barrier. (Writing own copies counts as writing the buffer, which is the first thread's copy.) */
static void llm__plan_add(llm__planner *p, llm__stage stage) {
    int n = p->program->n_buffers + 1;
    stage.barrier = p->n_stages == 0 || !(p->program->fusions & LLM_FUSE_SIDE_BY_SIDE);
    for (int i = 0; i < n; i++)
        if (((p->touches[i] & (LLM__READ | LLM__OWN)) == LLM__READ &&
             (p->touched[i] & LLM__WRITTEN)) ||
            ((p->touches[i] & LLM__WRITTEN) && p->touched[i]))
            stage.barrier = true;
    for (int i = 0; i < n; i++) {
        p->touched[i] = (stage.barrier ? 0 : p->touched[i]) |
                        (p->touches[i] & (LLM__READ | LLM__WRITTEN));
        if (!(p->touches[i] & LLM__WRITTEN)) continue;
        if (p->own == i) p->own = -1; /* its copies are out of date */
        if (p->rounded == i) p->rounded = -1;
    }
    memset(p->touches, 0, (size_t)n);
    p->stages[p->n_stages++] = stage;
}

static void llm__plan_norm(llm__planner *p, llm__stage stage) {
    const llm_op *op = stage.op;
    int64_t bytes = p->rows * op->weight->cols * (int64_t)sizeof(float);
    stage.each = stage.own_x = (p->program->fusions & LLM_FUSE_OWN_COPIES) &&
                               p->cpu->n_threads > 1 && op->out != op->in[0] && !op->add &&
                               p->rows <= LLM__X_TILE && bytes <= LLM__OWN_X_BYTES;
    llm__plan_touch(p, op);
    llm__plan_add(p, stage);
    if (stage.each) p->own = op->out;
}

/* Is it a product with one matrix or with the matrices of experts? */
static bool llm__is_product(const llm_op *op) {
    return op->kind == LLM_OP_MATMUL || op->kind == LLM_OP_EXPERTS;
}

/* Bytes of the rounded input of a product, for n tokens. The tiles of an expert's rows begin at
 * twice the index of the first row: m rows fill tiles of m rows (m <= 8) or of fewer than 2 m
 * rows. */
static uint64_t llm__rounded_bytes(const llm_op *op, int64_t n) {
    uint64_t bytes, rows = op->kind == LLM_OP_EXPERTS
                               ? 2 * (uint64_t)n * (uint64_t)op->n_used
                               : (uint64_t)(llm__divide_up(n, llm__tile_height(n)) *
                                            llm__tile_height(n));
    return llm__multiply((uint64_t)llm__stripes(op->weight->cols) * LLM__X_BYTES, rows, &bytes)
               ? bytes + LLM__TILES_MARGIN
               : UINT64_MAX;
}

/* Plan a product. If its weights are multiplied as integers, an earlier stage rounds its input. */
static void llm__plan_matmul(llm__planner *p, llm__stage stage) {
    const llm_op *op = stage.op;
    int x = op->in[0], group = llm__x_group(op->weight->type), rounded = p->program->n_buffers;
    if (!llm__layout_of(op->weight->type).quads) {
        stage.own_x = p->own == x;
        llm__plan_touch(p, op);
        if (stage.own_x) p->touches[x] |= LLM__OWN;
        llm__plan_add(p, stage);
        return;
    }
    if (p->rounded != x || p->group != group) {
        llm__stage round = {op, NULL, true, false, false, p->own == x, false};
        int64_t work = p->rows * op->weight->cols *
                       (op->kind == LLM_OP_EXPERTS ? op->n_used : 1);
        round.each = round.own_tiles = (p->program->fusions & LLM_FUSE_OWN_COPIES) &&
                                       p->cpu->n_threads > 1 && work < LLM__SHARED_WORK &&
                                       llm__rounded_bytes(op, p->rows) <= LLM__OWN_TILES_BYTES;
        if (op->kind == LLM_OP_EXPERTS) p->touches[op->in[1]] = LLM__READ;
        p->touches[x] = LLM__READ | (round.own_x ? LLM__OWN : 0);
        p->touches[rounded] = LLM__WRITTEN;
        llm__plan_add(p, round);
        p->rounded = x;
        p->group = group;
        p->rounded_own = round.each;
    }
    stage.own_tiles = p->rounded_own;
    llm__plan_touch(p, op);
    if (stage.before) {
        llm__plan_touch(p, stage.before);
        p->touches[op->out] = 0; /* the result goes to the gate's buffer */
    }
    p->touches[x] = 0; /* only the rounding stage reads it */
    p->touches[rounded] = LLM__READ | (stage.own_tiles ? LLM__OWN : 0);
    llm__plan_add(p, stage);
}

/* Does no operation after `index` read the buffer before it is overwritten? */
static bool llm__is_dead(const llm_program *p, int buffer, int index) {
    for (int i = index + 1; i < p->n_ops; i++) {
        for (int k = 0; k < LLM_OP_INPUTS; k++)
            if (p->ops[i].in[k] == buffer) return false;
        if (p->ops[i].out == buffer) return !p->ops[i].add;
    }
    return true;
}

/* Are this operation and the next two the products gate and up and their activation, and can they
 * be fused? The buffer of up is then never written. (Float kernels finish one result at a time, so
 * the activation would not be vectorized.) */
static bool llm__is_gated(const llm_program *p, int index, int end) {
    const llm_op *gate = &p->ops[index], *up = gate + 1, *act = gate + 2;
    if (!(p->fusions & LLM_FUSE_GATE) || index + 2 >= end || up->kind != gate->kind ||
        act->kind != LLM_OP_SWIGLU || act->activation != LLM_SILU)
        return false;
    return gate->in[0] == up->in[0] && gate->out == act->in[0] && up->out == act->in[1] &&
           act->out == gate->out && gate->out != up->out && gate->out != gate->in[0] &&
           gate->in[1] == up->in[1] && !gate->add && !up->add &&
           gate->weight->rows == up->weight->rows &&
           llm__layout_of(gate->weight->type).quads && llm__layout_of(up->weight->type).quads &&
           llm__x_group(gate->weight->type) == llm__x_group(up->weight->type) &&
           llm__is_dead(p, up->out, index + 2);
}

/* Divide a part of the program into stages, at most two per operation, for steps of up to `rows`
 * rows. Returns their number. touched (2 x (n_buffers + 1)) is scratch. */
static int llm__plan_part(const llm__cpu *cpu, const llm_program *program, llm_part part, int rows,
                          bool rope_inside, uint8_t *touched, llm__stage *stages) {
    llm__planner p = {cpu, program, rows, stages, 0, touched, touched + program->n_buffers + 1,
                      -1,  -1,      0,    false};
    int first, end;
    memset(touched, 0, 2 * ((size_t)program->n_buffers + 1));
    llm__part_ops(program, part, &first, &end);
    for (int i = first; i < end; i++) {
        const llm_op *op = &program->ops[i];
        llm__stage stage = {op, NULL, false, false, false, false, false};
        if (op->kind == LLM_OP_RMSNORM) {
            llm__plan_norm(&p, stage);
        } else if (llm__is_product(op)) {
            if (llm__is_gated(program, i, end)) {
                stage.before = op;
                stage.op = op + 1;
                i += 2;
            }
            llm__plan_matmul(&p, stage);
        } else {
            if (op->kind == LLM_OP_ROPE_STORE && rope_inside && i + 1 < end &&
                op[1].kind == LLM_OP_ATTENTION && op[1].in[0] == op->in[1] &&
                op[1].layer == op->layer) {
                llm__plan_touch(&p, op);
                stage.before = op;
                stage.op = &program->ops[++i];
            }
            llm__plan_touch(&p, stage.op);
            llm__plan_add(&p, stage);
        }
    }
    return p.n_stages;
}

static llm__plan *llm__plan_new(const llm__cpu *cpu, const llm_program *program,
                                const llm_limits *limits, llm_error *err) {
    const int most[2] = {2 * program->n_body, 2 * (program->n_ops - program->n_body)};
    const size_t n_deals = (size_t)(most[0] + most[1]), n_stages = n_deals * LLM__CLASSES * 2;
    llm__plan *plan = (llm__plan *)llm__new(1, sizeof *plan, "a plan", err);
    if (plan) plan->limits = *limits;
    if (!plan || !cpu->kernels) return plan; /* the reference executor has no stages */
    uint8_t *touched = (uint8_t *)llm__new(2, (size_t)program->n_buffers + 1, "a plan", err);
    size_t bytes = n_deals * sizeof *plan->head + n_stages * sizeof(llm__stage);
    plan->memory = touched ? llm__aligned_new(bytes, "a plan", err) : NULL;
    if (!plan->memory) {
        LLM_FREE(touched);
        LLM_FREE(plan);
        return NULL;
    }
    plan->head = (llm__deal *)plan->memory + most[0];
    llm__stage *stages = (llm__stage *)(void *)(plan->head + most[1]);
    for (int i = 0; i < 2 * LLM__CLASSES * 2; i++) {
        int head = i % 2, class_ = i / 4, inside = i / 2 % 2;
        int64_t rows = llm__max(head ? limits->max_logits : limits->max_tokens, 1);
        llm__variant *v = &plan->variants[head][class_][inside];
        v->stages = stages;
        v->n = llm__plan_part(cpu, program, head ? LLM_HEAD : LLM_BODY,
                              (int)llm__min(llm__class_rows(class_), rows),
                              inside && (program->fusions & LLM_FUSE_ROPE), touched, stages);
        stages += most[head];
    }
    LLM_FREE(touched);
    return plan;
}

/* ---- Dividing a stage into items ---- */

/* An attention item is one kv head and up to 128 (token, head) rows of a sequence. Items are
 * counted from the end: a prompt's last rows see the most positions, and long items should start
 * first. */
static int64_t llm__attention_chunks(const llm_op *op, const llm_batch *batch, int sequence) {
    int64_t group = op->attention.n_heads / op->attention.n_kv_heads;
    return llm__divide_up(batch->seq_count[sequence] * group, LLM__QUERY_ROWS);
}

static void llm__deal_attention(const llm__step *step, const llm_op *op, llm__deal *deal) {
    const llm_batch *batch = step->batch;
    for (int s = 0; s < batch->n_sequences; s++) {
        if (batch->seq_count[s] < 1) continue;
        int last = batch->positions[batch->seq_first[s]] + batch->seq_count[s] - 1;
        int seen = last + 1 - llm__first_seen(&op->attention, last);
        deal->items += llm__attention_chunks(op, batch, s) * op->attention.n_kv_heads;
        deal->amount += (double)(batch->seq_count[s] + 4) * seen * op->attention.n_heads *
                        op->attention.head_dim;
    }
    deal->amount *= op->attention.naive ? 30 : 2;
    if (op->attention.naive) deal->items = batch->n_tokens;
}

static void llm__deal_rounding(const llm__cpu *cpu, const llm__stage *stage, llm__deal *deal) {
    int64_t height = llm__tile_height(deal->n), tiles = llm__divide_up(deal->n, height);
    deal->amount = (double)deal->n * (double)stage->op->weight->cols;
    deal->parts = 1;
    if (stage->each) deal->n_per_item = tiles * height;
    else if (tiles < cpu->n_threads)
        deal->parts = llm__divide_up(cpu->n_threads, tiles), deal->n_per_item = height;
    else deal->n_per_item = llm__share_of_rows(cpu, deal->n);
    deal->items = llm__divide_up(deal->n, deal->n_per_item) * deal->parts;
}

static void llm__deal_matmul(const llm__cpu *cpu, const llm__stage *stage, llm__deal *deal) {
    const llm_weight *w = stage->op->weight;
    int64_t share = llm__divide_up(w->rows, cpu->n_threads);
    double work = (double)w->rows * (double)w->cols * (double)deal->n;
    deal->amount = work;
    if (stage->before)
        deal->amount += (double)stage->before->weight->rows * (double)stage->before->weight->cols *
                        (double)deal->n;
    if (stage->op->kind == LLM_OP_MATMUL && cpu->n_threads > 1 &&
        deal->n >= 2 * LLM__X_TILE * cpu->n_threads && share * (int64_t)sizeof(float) < 4096) {
        /* A thread's part of a result row would be shorter than a page, and prefetchers would
         * compete for cache lines. So items are rows of x. */
        deal->n_per_item = llm__share_of_rows(cpu, deal->n);
        deal->items = llm__divide_up(deal->n, deal->n_per_item);
    } else {
        /* Each thread gets one long run of matrix rows, since a new stream from memory starts
         * slowly. The rest of a large matrix is divided into small items, so that all threads
         * finish together. */
        bool small = work < LLM__LARGE_WORK || cpu->n_threads == 1;
        deal->first_rows = small ? llm__divide_up(share, LLM__PANEL) * LLM__PANEL
                                 : share * 15 / 16 / 64 * 64;
        deal->more_rows = 4 * LLM__PANEL;
        int64_t rest = w->rows - deal->first_rows * cpu->n_threads;
        deal->items = rest >= 0 ? cpu->n_threads + llm__divide_up(rest, deal->more_rows)
                                : llm__divide_up(w->rows, deal->first_rows);
    }
}

/* Divide an operation whose items are rows of activations. The factors (work per value) are rough:
 * they only decide which stages are shared. */
static void llm__deal_rows(const llm__step *step, const llm_op *op, llm__deal *deal) {
    const llm_attention_shape *a = &op->attention;
    int64_t width = op->out >= 0 ? step->program->buffers[op->out].width
                                 : (int64_t)(a->n_heads + 2 * a->n_kv_heads) * a->head_dim;
    int factor = 20;
    if (op->kind == LLM_OP_EMBED) factor = 50;
    if (op->kind == LLM_OP_ROPE_ANGLES) factor = 300;
    if (op->kind == LLM_OP_RMSNORM || op->kind == LLM_OP_GATHER_ROWS) factor = 8;
    if (op->kind == LLM_OP_ROPE_STORE || op->kind == LLM_OP_SWIGLU) factor = 30;
    if (op->kind == LLM_OP_ROUTE) width = op->n_experts;
    if (op->kind == LLM_OP_GATHER_ROUTES) width /= op->n_used;
    bool elementwise = op->kind == LLM_OP_SWIGLU || op->kind == LLM_OP_SOFTCAP;
    deal->amount = (double)factor * (double)deal->n * (double)width;
    deal->n_per_item = llm__share_of_rows(step->cpu, deal->n);
    if (elementwise) { /* runs of values, so that even one row is shared */
        deal->n *= width;
        deal->n_per_item = llm__divide_up(deal->n, 64 * step->cpu->n_threads) * 64;
    }
    if (op->kind == LLM_OP_GROUP_ROUTES) deal->n_per_item = deal->n; /* one item */
    deal->items = llm__divide_up(deal->n, deal->n_per_item);
}

static void llm__deal_out(const llm__step *step, const llm__stage *stage, const llm__deal *ahead,
                          llm__deal *deal) {
    const llm__cpu *cpu = step->cpu;
    memset(deal, 0, sizeof *deal);
    deal->stage = stage;
    deal->n = llm__op_rows(step, stage->op);
    if (deal->n < 1) return;
    if (stage->rounds) llm__deal_rounding(cpu, stage, deal);
    else if (llm__is_product(stage->op)) llm__deal_matmul(cpu, stage, deal);
    else if (stage->op->kind == LLM_OP_ATTENTION) llm__deal_attention(step, stage->op, deal);
    else llm__deal_rows(step, stage->op, deal);
    /* a small product is shared, too, if the previous stage is and no barrier is between them */
    bool beside = llm__is_product(stage->op) && !stage->barrier && ahead && ahead->shared;
    deal->shared = !stage->each && deal->items > 1 && cpu->n_threads > 1 &&
                   (deal->amount >= LLM__SHARED_WORK || beside);
}

/* ---- The work of an item ---- */

/* The first thread's own copy is the shared buffer. The other threads' are at the end of their
 * scratch memory, and valid until the run ends. */
static void *llm__own_copy(const llm__cpu *cpu, bool own, const void *shared, void *scratch,
                           size_t from_end) {
    return !own || scratch == cpu->scratch ? (void *)(uintptr_t)shared
                                           : (char *)scratch + cpu->scratch_bytes - from_end;
}

static float *llm__own_x(const llm__cpu *cpu, bool own, const float *shared, void *scratch) {
    return (float *)llm__own_copy(cpu, own, shared, scratch, LLM__OWN_X_BYTES);
}

static char *llm__own_tiles(const llm__cpu *cpu, bool own, const void *shared, void *scratch) {
    return (char *)llm__own_copy(cpu, own, shared, scratch,
                                 LLM__OWN_X_BYTES + LLM__OWN_TILES_BYTES);
}

/* The tiles of a group of rows: see llm__rounded_bytes. */
static char *llm__group_tiles(char *tiles, const llm__group *g) {
    return tiles + (size_t)(2 * g->first * llm__stripes(g->w->cols)) * LLM__X_BYTES;
}

/* Round some rows of x into tiles, or some columns of one tile. */
static void llm__round_item(const llm__step *step, const llm__deal *deal, int64_t item,
                            void *scratch) {
    const llm__cpu *cpu = step->cpu;
    const llm__stage *stage = deal->stage;
    const llm_weight *w = stage->op->weight;
    const float *x = llm__own_x(cpu, stage->own_x, llm__in(step, stage->op, 0), scratch);
    char *tiles = llm__own_tiles(cpu, stage->own_tiles, cpu->rounded, scratch);
    int64_t cols = w->cols, stripes = llm__stripes(cols), part = item % deal->parts;
    int64_t groups = llm__divide_up(stripes, LLM__SPAN / 2),
            begin = groups * part / deal->parts * (LLM__SPAN / 2);
    int64_t end = llm__min(groups * (part + 1) / deal->parts * (LLM__SPAN / 2), stripes);
    int64_t first_row = item / deal->parts * deal->n_per_item,
            end_row = llm__min(first_row + deal->n_per_item, deal->n);
    for (llm__group g = {0, 0, NULL}; llm__next_group(step, stage->op, deal->n, &g);) {
        int64_t n = g.end - g.first, height = llm__tile_height(n);
        int64_t row = llm__max(llm__divide_up(first_row - g.first, height), 0) * height;
        for (; row < llm__min(end_row - g.first, n); row += height)
            cpu->kernels->round_rows(x + (g.first + row) * cols, cols, llm__x_group(w->type),
                                     (int)height, (int)llm__min(height, n - row), begin, end,
                                     llm__group_tiles(tiles, &g) +
                                         (size_t)(row / height) * llm__x_tile_bytes(n, cols));
    }
}

/* Do matrix tiles multiply n rows of x faster than vector registers? q6_K has two scales per block,
 * so its tiles always take 32 rows. For 17 to 24 rows and 4-bit weights, vector registers beat two
 * tiles, the second of which would be half empty. */
static bool llm__tiles_pay(llm__layout l, int64_t n) {
    if (l.quads == 4 && n > LLM__X_TILE && n <= LLM__X_TILE + 8) return false;
    return n > (l.quads == 6 ? 12 : 8);
}

/* Arguments of the product of a group of rows of x with matrix w. */
static llm__matmul_args llm__matmul_args_of(const llm__step *step, const llm__deal *deal,
                                            const llm_op *op, const llm_weight *w,
                                            const llm__group *g, void *scratch) {
    const llm__cpu *cpu = step->cpu;
    const llm__stage *stage = deal->stage;
    llm__matmul_args args;
    memset(&args, 0, sizeof args);
    args.w = w;
    args.x = llm__own_x(cpu, stage->own_x, llm__in(step, op, 0), scratch) + g->first * w->cols;
    args.bias = llm__vector(op->bias);
    args.add = op->add;
    args.n = (int)(g->end - g->first);
    args.out = llm__out(step, stage->before ? stage->before : op) + g->first * w->rows;
    args.tile_bytes = cpu->tile_bytes;
    args.x_tiles = llm__group_tiles(
        llm__own_tiles(cpu, stage->own_tiles, cpu->rounded, scratch), g);
    if (!llm__layout_of(w->type).quads) return args;
    args.tiles = cpu->isa >= LLM_ISA_AMX && llm__tiles_pay(llm__layout_of(w->type), args.n);
    args.height = llm__tile_height(args.n);
    args.x_tile_bytes = llm__x_tile_bytes(args.n, w->cols);
    return args;
}

/* Multiply some rows of the group by the matrix, or all its rows by some rows of the matrix. All
 * rows of x are read for every few panels, so a long prompt is cut into parts that stay in the L2
 * cache. */
static void llm__multiply_group(const llm__step *step, const llm__deal *deal, const llm__group *g,
                                int64_t item, void *scratch) {
    const llm__cpu *cpu = step->cpu;
    const llm_op *op = deal->stage->op, *before = deal->stage->before;
    llm__matmul_args args = llm__matmul_args_of(step, deal, op, g->w, g, scratch), gate = args;
    int64_t first = 0, rows = args.w->rows, x_row = 0, x_end = args.n, together = args.n;
    if (before) /* its matrices are in the same order */
        gate = llm__matmul_args_of(step, deal, before, before->weight + (g->w - op->weight), g,
                                   scratch),
        args.gate = true;
    if (deal->n_per_item > 0) {
        x_row = item * deal->n_per_item;
        x_end = llm__min(x_row + deal->n_per_item, args.n);
    } else {
        int64_t large = llm__min(item, cpu->n_threads);
        first = large * deal->first_rows + (item - large) * deal->more_rows;
        rows = item < cpu->n_threads ? deal->first_rows : deal->more_rows;
    }
    if (args.w->packed) { /* parts of similar size, in whole pairs of tiles */
        int64_t most = args.tiles ? LLM__X_CACHE_BYTES_TILES : LLM__X_CACHE_BYTES,
                pair = 2 * LLM__X_TILE;
        most = llm__max(most / (llm__stripes(args.w->cols) * LLM__X_BYTES), 1);
        together = llm__divide_up(
                       llm__divide_up(x_end - x_row, llm__divide_up(x_end - x_row, most)), pair) *
                   pair;
    }
    const llm__matmul_args whole = args;
    const int64_t end = llm__min(first + rows, args.w->rows);
    for (; rows > 0 && x_row < x_end; x_row += together) {
        args.n = (int)llm__min(together, x_end - x_row);
        args.x = whole.x + x_row * args.w->cols;
        args.x_tiles = (const char *)whole.x_tiles +
                      (size_t)(x_row / LLM__X_TILE) * args.x_tile_bytes;
        args.out = whole.out + x_row * args.w->rows;
        gate.n = args.n, gate.x = args.x, gate.x_tiles = args.x_tiles, gate.out = args.out;
        /* the gate's results must stay in the L2 cache: limit the matrix rows */
        int64_t run =
            args.gate
                ? llm__max(LLM__GATE_CACHE_BYTES / (args.n * (int64_t)sizeof *args.out) / 64, 1) *
                      64
                : rows;
        for (int64_t row = first, to; row < end; row = to) {
            to = llm__min(row + run, end);
            if (args.gate) cpu->kernels->matmul(&gate, row, to, scratch);
            cpu->kernels->matmul(&args, row, to, scratch);
        }
    }
}

/* Attention for some of a sequence's query rows. The tokens of a tree see different positions, so
 * they are computed one by one. */
static void llm__attend(const llm__kernels *kernels, const llm__attention_args *args, int sequence,
                        int kv_head, int first, int end, void *scratch) {
    int run = llm__is_tree(args->batch, sequence) ? args->shape.n_heads / args->shape.n_kv_heads
                                                  : end;
    for (int next; first < end; first = next) {
        next = (int)llm__min(end, (int64_t)(first / run + 1) * run);
        kernels->attention(args, sequence, kv_head, first, next, scratch);
    }
}

static void llm__matmul_item(const llm__step *step, const llm__deal *deal, int64_t item,
                             void *scratch) {
    for (llm__group g = {0, 0, NULL}; llm__next_group(step, deal->stage->op, deal->n, &g);)
        llm__multiply_group(step, deal, &g, item, scratch);
}

static void llm__attention_item(const llm__step *step, const llm__deal *deal, int64_t item,
                                void *scratch) {
    const llm__cpu *cpu = step->cpu;
    const llm_op *op = deal->stage->op, *rope = deal->stage->before;
    llm__attention_args args = llm__attention_args_of(step, op);
    int n_kv_heads = op->attention.n_kv_heads, group = op->attention.n_heads / n_kv_heads;
    if (op->attention.naive) {
        llm__plain_attention(&args, (int)item, (float *)scratch);
        return;
    }
    /* must not depend on the batch: all rows of a sequence are computed alike */
    args.tiles = cpu->isa >= LLM_ISA_AMX && args.cache->type == LLM_F16 &&
                group >= LLM__SHARING_HEADS && !(op->attention.cap > 0) &&
                !(op->attention.alibi > 0);
    int sequence = args.batch->n_sequences - 1;
    for (; item >= llm__attention_chunks(op, args.batch, sequence) * n_kv_heads; sequence--)
        item -= llm__attention_chunks(op, args.batch, sequence) * n_kv_heads;
    int64_t chunk = llm__attention_chunks(op, args.batch, sequence) - 1 - item / n_kv_heads;
    int64_t first = chunk * LLM__QUERY_ROWS, end = (int64_t)args.batch->seq_count[sequence] * group;
    int kv_head = (int)(item % n_kv_heads), first_token = args.batch->seq_first[sequence];
    if (rope) { /* the item has all rows of its sequence and kv head */
        llm__rope_args turn = llm__rope_args_of(step, rope);
        cpu->kernels->rope_and_store(&turn, first_token,
                                     first_token + args.batch->seq_count[sequence], kv_head,
                                     kv_head + 1);
    }
    llm__attend(cpu->kernels, &args, sequence, kv_head, (int)first,
                (int)llm__min(first + LLM__QUERY_ROWS, end), scratch);
}

static void llm__rows_item(const llm__step *step, const llm__deal *deal, int64_t item,
                           void *scratch) {
    const llm__cpu *cpu = step->cpu;
    const llm_op *op = deal->stage->op;
    const float *x = llm__in(step, op, 0);
    float *out = llm__out(step, op);
    int64_t first = item * deal->n_per_item, end = llm__min(first + deal->n_per_item, deal->n);
    switch (op->kind) {
    case LLM_OP_EMBED: llm__embed(step->batch, op, first, end, out); break;
    case LLM_OP_ROPE_ANGLES: llm__rope_angles(step->batch, op, first, end, out); break;
    case LLM_OP_RMSNORM: {
        int64_t at = first * op->weight->cols;
        out = llm__own_x(cpu, deal->stage->own_x, out, scratch);
        cpu->kernels->rmsnorm(x + at, llm__vector(op->weight), (int)(end - first),
                              (int)op->weight->cols, op->epsilon, op->add, out + at);
        break;
    }
    case LLM_OP_ROPE_STORE: {
        llm__rope_args args = llm__rope_args_of(step, op);
        cpu->kernels->rope_and_store(&args, (int)first, (int)end, 0, op->attention.n_kv_heads);
        break;
    }
    case LLM_OP_LAYERNORM: {
        int64_t at = first * op->weight->cols;
        cpu->kernels->layernorm(x + at, llm__vector(op->weight), llm__vector(op->bias),
                                (int)(end - first), (int)op->weight->cols, op->epsilon, out + at);
        break;
    }
    case LLM_OP_SWIGLU: {
        const float *up = llm__in(step, op, 1);
        cpu->kernels->swiglu(op->activation, x + first, up ? up + first : NULL, end - first,
                             out + first);
        break;
    }
    case LLM_OP_SOFTCAP:
        cpu->kernels->softcap(x + first, op->scale, end - first, out + first);
        break;
    case LLM_OP_GATHER_ROWS:
        llm__gather_rows(x, step->batch->logit_rows + step->first,
                         step->program->buffers[op->out].width, first, end, out);
        break;
    case LLM_OP_GATHER_COLUMNS: llm__gather_columns(x, op->weight, first, end, out); break;
    case LLM_OP_ROUTE: llm__route(op, x, first, end, (llm_route *)(void *)out); break;
    case LLM_OP_GROUP_ROUTES:
        llm__group_routes(op, llm__routes_in(step, op, 0), end * op->n_used,
                          (int32_t *)scratch, (int32_t *)(void *)out);
        break;
    case LLM_OP_GATHER_ROUTES:
        llm__gather_rows(x, llm__sorted_in(step, op, 1) + deal->n,
                         step->program->buffers[op->in[0]].width, first, end, out);
        break;
    case LLM_OP_SUM_ROUTES:
        llm__sum_routes(op, x, llm__routes_in(step, op, 1), llm__sorted_in(step, op, 2),
                        llm__in(step, op, 3), llm__in(step, op, 4), deal->n * op->n_used,
                        step->program->buffers[op->out].width, first, end, out);
        break;
    default: break; /* matmul and attention have their own functions */
    }
}

static void llm__do_item(const llm__step *step, const llm__deal *deal, int64_t item,
                         void *scratch) {
    if (deal->stage->rounds) llm__round_item(step, deal, item, scratch);
    else if (llm__is_product(deal->stage->op)) llm__matmul_item(step, deal, item, scratch);
    else if (deal->stage->op->kind == LLM_OP_ATTENTION)
        llm__attention_item(step, deal, item, scratch);
    else llm__rows_item(step, deal, item, scratch);
}

/* ---- A run ---- */

/* Wait until `arrived` (arrivals at this and all earlier barriers) reaches `all`. Adds the seconds
 * after the first LLM__SPINS polls to *waited. */
static void llm__barrier(int64_t *arrived, int64_t all, double *waited) {
    double start = 0;
    __atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL);
    for (int spins = 0; __atomic_load_n(arrived, __ATOMIC_ACQUIRE) < all; spins++) {
#if defined(LLM__X86)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
        if (spins < LLM__SPINS) continue;
        if (start == 0) start = llm_seconds();
        sched_yield();
    }
    if (start > 0) *waited += llm_seconds() - start;
}

/* For a profile. llm__lap_begins ends the previous lap: it charges the time since the previous call
 * to that call's operation. deal NULL: the run ends. */
typedef struct llm__lap {
    double *seconds, start;
} llm__lap;

static void llm__lap_begins(const llm__step *step, llm__lap *lap, const llm__deal *deal) {
    double *seconds = step->program->seconds, now = seconds ? llm_seconds() : 0;
    if (!seconds) return;
    if (lap->seconds) *lap->seconds += now - lap->start;
    lap->seconds = deal ? seconds + (deal->stage->op - step->program->ops) : NULL;
    lap->start = now;
}

/* Run the stages as one thread of a team. */
static void llm__run_as(const llm__step *step, llm__deal *deals, int n, int thread, int team,
                        int64_t *arrived, double *waited) {
    void *scratch = step->cpu->scratch + (size_t)thread * step->cpu->scratch_bytes;
    /* threads other than the first have worked since the last barrier */
    bool together = false;
    /* a barrier is due; it is delayed while only the first thread has work */
    bool owed = false;
    int64_t barriers = 0;
    llm__lap lap = {NULL, 0};
    for (llm__deal *deal = deals; deal < deals + n; deal++) {
        bool all = deal->shared || deal->stage->each;
        owed = owed || (deal->stage->barrier && deal > deals);
        if (owed && team > 1 && (all || together)) {
            llm__barrier(arrived, team * ++barriers, waited);
            owed = together = false;
        }
        together = together || all;
        if (thread == 0) llm__lap_begins(step, &lap, deal);
        if (!all && thread > 0) continue;
        int64_t own = deal->shared ? llm__min(team, deal->items) : 0;
        if (deal->stage->each || team == 1) {
            for (int64_t item = 0; item < deal->items; item++)
                llm__do_item(step, deal, item, scratch);
            continue;
        }
        if (thread < own) llm__do_item(step, deal, thread, scratch);
        if (own == deal->items) continue; /* at most one item per thread */
        for (int64_t item;
             (item = own + __atomic_fetch_add(&deal->next, 1, __ATOMIC_RELAXED)) < deal->items;)
            llm__do_item(step, deal, item, scratch);
    }
    if (thread == 0) llm__lap_begins(step, &lap, NULL);
}

#ifdef _OPENMP
static void llm__run_team(const llm__step *step, llm__deal *deals, int n) {
    llm__cpu *cpu = step->cpu;
    double start = llm_seconds(), waited = 0;
    int64_t arrived = 0;
    int team = 1;
#pragma omp parallel num_threads(cpu->n_threads)
    {
        double others = 0;
        if (omp_get_thread_num() == 0) team = omp_get_num_threads();
        llm__run_as(step, deals, n, omp_get_thread_num(), omp_get_num_threads(), &arrived,
                    omp_get_thread_num() == 0 ? &waited : &others);
        if (omp_get_thread_num() == 0) waited -= llm_seconds();
    }
    double end = llm_seconds();
    waited += end; /* includes the wait at the end of the parallel region */
    if (waited > 1e-3 && waited > (1.0 - 1.0 / team) * (end - start))
        cpu->alone_until = end + 4 * waited;
}
#endif

/* Run the stages, on all threads if there is enough work. */
static void llm__run_deals(const llm__step *step, llm__deal *deals, int n) {
#ifdef _OPENMP
    llm__cpu *cpu = step->cpu;
    bool any_shared = false;
    double work = 0;
    for (int i = 0; i < n; i++) any_shared = any_shared || deals[i].shared, work += deals[i].amount;
    if (any_shared && work >= LLM__THREADS_WORK &&
        (cpu->alone_until == 0 || llm_seconds() >= cpu->alone_until)) {
        cpu->alone_until = 0;
        llm__run_team(step, deals, n);
        return;
    }
#endif
    int64_t arrived = 0;
    double waited = 0;
    llm__run_as(step, deals, n, 0, 1, &arrived, &waited);
}

/* The variant of the plan for this step. RoPE is fused with attention if each item has all rows of
 * its sequence and kv head, and there are items for all threads or the batch is small. */
static const llm__variant *llm__find_variant(const llm__step *step, bool head) {
    const llm__plan *plan = (const llm__plan *)step->program->plan;
    const llm_batch *batch = step->batch;
    bool inside = true;
    int64_t items = 0;
    for (int i = 0; !head && inside && i < step->program->n_body; i++) {
        const llm_op *op = &step->program->ops[i];
        if (op->kind != LLM_OP_ATTENTION) continue;
        for (int s = 0; inside && s < batch->n_sequences; s++) {
            inside = llm__attention_chunks(op, batch, s) <= 1 && !op->attention.naive;
            items += batch->seq_count[s] > 0 ? op->attention.n_kv_heads : 0;
        }
        inside = inside && (items >= step->cpu->n_threads || batch->n_tokens <= LLM__X_TILE);
        break; /* all layers have the same heads */
    }
    int rows = head ? step->n_logits : batch->n_tokens;
    return &plan->variants[head][llm__class_of(rows)][inside];
}

/* Divide the stages of a part into items; returns their number. If variant and number of rows are
 * those of the last run, only attention's deals change. (Cache lines that are not written stay
 * valid in the other cores.) */
static int llm__deal_part(const llm__step *step, bool head, llm__deal **first) {
    llm__plan *plan = (llm__plan *)step->program->plan;
    const llm__variant *v = llm__find_variant(step, head);
    int rows = head ? step->n_logits : step->batch->n_tokens;
    bool known = plan->last[head] == v && plan->last_rows[head] == rows;
    llm__deal *deals = *first = head ? plan->head : plan->head - v->n;
    for (int i = 0; i < v->n; i++) {
        if (deals[i].next) deals[i].next = 0;
        if (known && v->stages[i].op->kind != LLM_OP_ATTENTION) continue;
        llm__deal_out(step, &v->stages[i], i ? &deals[i - 1] : NULL, &deals[i]);
    }
    plan->last[head] = v;
    plan->last_rows[head] = rows;
    return v->n;
}

/* Is the program prepared for steps as large as this one? */
static bool llm__check_step(const llm__step *step, llm_part part, llm_error *err) {
    const llm__plan *plan = (const llm__plan *)step->program->plan;
    const llm_batch *batch = step->batch;
    llm__clear(err);
    if (!plan) return llm__fail(err, LLM_ERROR_ARGUMENT, "cpu: run: the program is not prepared");
    const llm_limits *limits = &plan->limits;
    bool fits = batch->n_tokens <= limits->max_tokens &&
                (!(part & LLM_HEAD) || step->n_logits <= limits->max_logits);
    for (int s = 0; fits && s < batch->n_sequences; s++)
        fits = batch->seq_count[s] < 1 ||
               batch->positions[batch->seq_first[s]] + batch->seq_count[s] <= limits->max_context;
    if (fits) return true;
    return llm__fail(err, LLM_ERROR_DEVICE,
                     "cpu: a step of %d tokens and %d rows of logits is larger than was prepared: "
                     "%d tokens, %d rows of logits and %d positions",
                     batch->n_tokens, step->n_logits, limits->max_tokens, limits->max_logits,
                     limits->max_context);
}

static bool llm__cpu_run(void *context, const llm_program *program, llm_part part,
                         const llm_batch *batch, int first, int n, llm_error *err) {
    llm__step step = {(llm__cpu *)context, program, batch, first, n};
    if (!llm__check_step(&step, part, err)) return false;
    llm__deal *head, *deals = NULL;
    int n_deals = part & LLM_BODY ? llm__deal_part(&step, false, &deals) : 0;
    if (part & LLM_HEAD) { /* after the body's, so one run does both */
        n_deals += llm__deal_part(&step, true, &head);
        if (!deals) deals = head;
    }
    llm__run_deals(&step, deals, n_deals);
    return true;
}

static bool llm__cpu_stage(void *context, const llm_program *program, llm_part part,
                           const llm_batch *batch, int n, int index, llm_stage *stage) {
    llm__cpu *cpu = (llm__cpu *)context;
    llm__step step = {cpu, program, batch, 0, n};
    memset(stage, 0, sizeof *stage);
    int first, end;
    llm__part_ops(program, part, &first, &end);
    if (!program->plan) return false;
    if (!cpu->kernels) { /* the reference executor: one operation at a time */
        stage->first = stage->last = first + index;
        return first + index < end;
    }
    const llm__variant *v = NULL;
    for (int head = 0; !v && head < 2; head++) {
        if (!(part & (head ? LLM_HEAD : LLM_BODY))) continue;
        v = llm__find_variant(&step, head);
        if (index < v->n) break;
        index -= v->n;
        v = NULL;
    }
    if (!v) return false;
    const llm__stage *s = &v->stages[index];
    stage->last = (int)(s->op - program->ops);
    stage->first = s->before ? (int)(s->before - program->ops) : stage->last;
    stage->rounds = s->rounds;
    stage->barrier = s->barrier && cpu->n_threads > 1;
    stage->each = s->each;
    return true;
}

/* ---- Prepare ---- */

/* Reserve scratch memory for each thread, large enough for any of: a tile of unpacked weights that
 * fits in the L2 cache (at least four rows); packed panels and matrix tiles; attention in tiles;
 * all scores of a query (naive attention). The thread's own copies follow. Memory never shrinks, so
 * programs prepared earlier still fit. */
static bool llm__cpu_reserve(llm__cpu *cpu, const llm_program *program, const llm_limits *limits,
                             llm_error *err) {
    int64_t max_cols = 1, head_dim = 1, rows = llm__max(limits->max_tokens, limits->max_logits);
    uint64_t rounded = 0;
    for (int i = 0; i < program->n_ops; i++) {
        const llm_op *op = &program->ops[i];
        if (llm__is_product(op)) {
            uint64_t bytes = llm__rounded_bytes(op, rows);
            max_cols = llm__max(max_cols, op->weight->cols);
            if (cpu->kernels && bytes > rounded) rounded = bytes;
        }
        if (op->kind == LLM_OP_ATTENTION) head_dim = llm__max(head_dim, op->attention.head_dim);
    }
    if (max_cols > INT64_MAX / 1024)
        return llm__fail(err, LLM_ERROR_ARGUMENT, "cpu: a matrix of %lld columns is too wide",
                         (long long)max_cols);
    uint64_t padded = (uint64_t)llm__divide_up(head_dim, LLM__PADDING) * LLM__PADDING;
    uint64_t attention = (padded * (3 * LLM__TILE + 2 * LLM__QUERY_ROWS + 1) +
                          LLM__QUERY_ROWS * (LLM__TILE + 2)) *
                         sizeof(float);
    uint64_t naive = (uint64_t)limits->max_context * sizeof(float);
    uint64_t tile = (uint64_t)llm__max(512 << 10,
                                       4 * (max_cols + LLM__BLOCK * 4) * (int64_t)sizeof(float));
    uint64_t panel = LLM__TILE_PANELS * llm__panel_bytes(llm__layout_of(LLM_Q8_0), max_cols) +
                     LLM__TILES_BYTES +
                     ((uint64_t)rows + 2 * LLM__X_TILE) * LLM__TILE_PANELS * LLM__PANEL *
                         sizeof(float);
    uint64_t scratch = (uint64_t)llm__max(llm__max((int64_t)attention, (int64_t)naive),
                                llm__max((int64_t)tile, (int64_t)panel));
    scratch = (scratch + LLM__OWN_X_BYTES + LLM__OWN_TILES_BYTES + 4095) / 4096 * 4096;
    uint64_t all_scratch;
    bool fits = llm__multiply(scratch, (uint64_t)cpu->n_threads, &all_scratch) &&
                all_scratch <= SIZE_MAX / 2 && rounded <= SIZE_MAX / 2;
    if (!fits)
        return llm__fail(err, LLM_ERROR_MEMORY,
                         "cpu: scratch memory for such a batch is too large");
    if (scratch > cpu->scratch_bytes) {
        char *memory = (char *)llm__aligned_new((size_t)all_scratch,
                                                "the scratch memory of threads", err);
        if (!memory) return false;
        llm__aligned_free(cpu->scratch);
        cpu->scratch = memory;
        cpu->scratch_bytes = (size_t)scratch;
    }
    if (tile > cpu->tile_bytes) cpu->tile_bytes = (size_t)tile;
    if (rounded > cpu->rounded_bytes) {
        void *memory = llm__aligned_new((size_t)rounded, "rounded activations", err);
        if (!memory) return false;
        llm__aligned_free(cpu->rounded);
        cpu->rounded = memory;
        cpu->rounded_bytes = rounded;
    }
    return true;
}

static void llm__cpu_forget(void *context, llm_program *program) {
    llm__plan *plan = (llm__plan *)program->plan;
    (void)context;
    if (plan) llm__aligned_free(plan->memory);
    LLM_FREE(plan);
    program->plan = NULL;
}

static bool llm__cpu_prepare(void *context, llm_program *program, const llm_limits *limits,
                             llm_error *err) {
    llm__cpu *cpu = (llm__cpu *)context;
    llm__clear(err);
    llm__cpu_forget(cpu, program);
    if (limits->max_tokens < 1 || limits->max_context < 1 || limits->max_logits < 0)
        return llm__fail(err, LLM_ERROR_ARGUMENT, "cpu: prepare: every limit must be at least 1");
    program->plan = llm__plan_new(cpu, program, limits, err);
    if (program->plan && llm__cpu_reserve(cpu, program, limits, err)) return true;
    llm__cpu_forget(cpu, program);
    return false;
}

/* ---- The backend ---- */

static void llm__cpu_copy_blocks(void *context, const llm_cache *cache, const int32_t *from,
                                 const int32_t *to, int n) {
    size_t bytes = (size_t)cache->n_kv_heads * (size_t)cache->block_size * (size_t)cache->head_dim *
                   llm__value_bytes(cache->type);
    (void)context;
    for (int layer = 0; layer < cache->n_layers; layer++)
        for (int i = 0; i < n; i++) {
            char *keys = (char *)cache->keys + (size_t)layer * cache->layer_bytes;
            char *values = (char *)cache->values + (size_t)layer * cache->layer_bytes;
            memmove(keys + (size_t)to[i] * bytes, keys + (size_t)from[i] * bytes, bytes);
            memmove(values + (size_t)to[i] * bytes, values + (size_t)from[i] * bytes, bytes);
        }
}

static void llm__cpu_copy_slots(void *context, const llm_cache *cache, const int32_t *from,
                                const int32_t *to, int n) {
    size_t bytes = llm__value_bytes(cache->type);
    (void)context;
    for (int64_t i = 0; i < (int64_t)n * cache->n_layers * cache->n_kv_heads * 2; i++) {
        int64_t pair = i / 2 % n, head = i / 2 / n % cache->n_kv_heads, size = cache->block_size;
        char *side = (char *)(i % 2 ? cache->keys : cache->values) +
                     (size_t)(i / 2 / n / cache->n_kv_heads) * cache->layer_bytes;
        int64_t stride, place[2], slots[] = {from[pair], to[pair]};
        for (int k = 0; k < 2; k++) {
            int64_t row = (slots[k] / size * cache->n_kv_heads + head) * size + slots[k] % size;
            place[k] = llm__cache_place(cache, i % 2 ? cache->keys : cache->values, row, &stride);
        }
        for (int d = 0; d < cache->head_dim; d++, place[0] += stride, place[1] += stride)
            memcpy(side + (size_t)place[1] * bytes, side + (size_t)place[0] * bytes, bytes);
    }
}

static void *llm__cpu_allocate(void *context, size_t bytes, const char *what, llm_error *err) {
    (void)context;
    llm__clear(err);
    return llm__aligned_new(bytes, what, err);
}

static void llm__cpu_release(void *context, void *device) {
    (void)context;
    llm__aligned_free(device);
}

static bool llm__cpu_upload(void *context, void *device, const void *host, size_t bytes,
                            llm_error *err) {
    (void)context;
    llm__clear(err);
    memcpy(device, host, bytes);
    return true;
}

static bool llm__cpu_download(void *context, void *host, const void *device, size_t bytes,
                              llm_error *err) {
    return llm__cpu_upload(context, host, device, bytes, err);
}

/* Packed weights share slabs of 64 MB, which fill large pages. A slab whose first weight is below
 * 256 KB has 256 times that weight's size. */
typedef struct llm__slab {
    char *memory;
    size_t bytes, used;
    int64_t n_weights; /* weights in the slab */
} llm__slab;

static void *llm__slab_take(llm__cpu *cpu, uint64_t bytes, llm_error *err) {
    const uint64_t usual = bytes < 256 << 10 ? bytes << 8 : 64 << 20;
    llm__slab *last = cpu->n_slabs > 0 ? &cpu->slabs[cpu->n_slabs - 1] : NULL;
    bytes = (bytes + LLM__ALIGNMENT - 1) / LLM__ALIGNMENT * LLM__ALIGNMENT;
    if (!last || last->bytes - last->used < bytes) {
        if (!llm__grow(&cpu->slabs, cpu->n_slabs, &cpu->slab_capacity, sizeof *cpu->slabs,
                       "the list of slabs", err))
            return NULL;
        last = &cpu->slabs[cpu->n_slabs];
        memset(last, 0, sizeof *last);
        last->bytes = (size_t)(bytes > usual ? bytes : usual);
        last->memory = (char *)llm__aligned_new(
            last->bytes, "weights in the kernels' order (which can be switched off)", err);
        if (!last->memory) return NULL;
        llm__want_large_pages(last->memory, last->bytes);
        cpu->n_slabs++;
    }
    void *memory = last->memory + last->used;
    last->used += (size_t)bytes;
    last->n_weights++;
    return memory;
}

static void llm__slab_drop(llm__cpu *cpu, const void *memory) {
    for (int64_t i = 0; memory && i < cpu->n_slabs; i++) {
        llm__slab *slab = &cpu->slabs[i];
        if ((const char *)memory < slab->memory ||
            (const char *)memory >= slab->memory + slab->used)
            continue;
        if (--slab->n_weights == 0) {
            llm__aligned_free(slab->memory);
            memmove(slab, slab + 1, (size_t)(--cpu->n_slabs - i) * sizeof *slab);
        }
        return;
    }
}

static bool llm__cpu_load_weight(void *context, llm_weight *w, const void *host, llm_error *err) {
    llm__cpu *cpu = (llm__cpu *)context;
    const llm_type_info *type = llm_type_find(w->type);
    llm__clear(err);
    if (!type)
        return llm__fail(err, LLM_ERROR_UNSUPPORTED, "cpu: no kernel for weights of type %d",
                         (int)w->type);
    if (w->rows < 1 || w->cols < 1 || w->cols % type->block_values)
        return llm__fail(err, LLM_ERROR_FORMAT,
                         "cpu: a %s matrix of %lld x %lld: rows must be whole blocks of %d",
                         type->name, (long long)w->rows, (long long)w->cols, type->block_values);
    w->data = host;
    w->packed = NULL;
    if (!cpu->pack || !cpu->kernels || w->only_rows || !llm__layout_of(w->type).quads) return true;
    uint64_t bytes;
    if (!llm__multiply((uint64_t)llm__divide_up(w->rows, LLM__PANEL),
                       llm__panel_bytes(llm__layout_of(w->type), w->cols), &bytes) ||
        bytes > SIZE_MAX / 2)
        return llm__fail(err, LLM_ERROR_MEMORY, "cpu: a matrix of %lld x %lld is too large",
                         (long long)w->rows, (long long)w->cols);
    w->packed = llm__slab_take(cpu, bytes, err);
    if (!w->packed) return false;
    int64_t panels = llm__divide_up(w->rows, LLM__PANEL);
#ifdef _OPENMP
#pragma omp parallel for num_threads(cpu->n_threads) if (w->rows * w->cols > LLM__SHARED_WORK)
#endif
    for (int64_t i = 0; i < panels; i++)
        llm__pack_panel(w, i * LLM__PANEL,
                        (uint8_t *)w->packed +
                            (size_t)i * llm__panel_bytes(llm__layout_of(w->type), w->cols));
    return true;
}

static void llm__cpu_free_weight(void *context, llm_weight *w) {
    llm__slab_drop((llm__cpu *)context, w->packed);
    w->data = NULL;
    w->packed = NULL;
}

static bool llm__cpu_sync(void *context, llm_error *err) { /* run has already done the work */
    (void)context;
    llm__clear(err);
    return true;
}

static void llm__cpu_destroy(llm_backend *backend) {
    llm__cpu *cpu = (llm__cpu *)backend->context;
    llm__aligned_free(cpu->scratch);
    llm__aligned_free(cpu->rounded);
    for (int64_t i = 0; i < cpu->n_slabs; i++) llm__aligned_free(cpu->slabs[i].memory);
    LLM_FREE(cpu->slabs);
    LLM_FREE(cpu);
}

int llm_processor_count(void) {
#ifdef _OPENMP
    return omp_get_num_procs();
#elif defined(_SC_NPROCESSORS_ONLN)
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (int)n;
#else
    return 1;
#endif
}

llm_backend *llm_cpu_backend(int n_threads, llm_isa max_isa, llm_error *err) {
    llm__clear(err);
    llm__cpu *cpu = (llm__cpu *)llm__new(1, sizeof *cpu, "the CPU backend", err);
    if (!cpu) return NULL;
    const llm__kernels *kernels = cpu->kernels = llm__choose_kernels(max_isa);
    cpu->isa = kernels ? kernels->isa : LLM_ISA_REFERENCE;
    if (cpu->isa == LLM_ISA_AVX512 && max_isa >= LLM_ISA_AMX && llm__has_matrix_tiles())
        cpu->isa = LLM_ISA_AMX;
    cpu->pack = true;
    cpu->n_threads = n_threads > 0 ? n_threads : llm_processor_count();
#ifndef _OPENMP
    cpu->n_threads = 1;
#endif
    if (!kernels) cpu->n_threads = 1;
    llm_backend *b = &cpu->backend;
    b->name = "cpu";
    b->context = cpu;
    b->keys_transposed = true;
    b->allocate = llm__cpu_allocate;
    b->release = llm__cpu_release;
    b->upload = llm__cpu_upload;
    b->download = llm__cpu_download;
    b->load_weight = llm__cpu_load_weight;
    b->free_weight = llm__cpu_free_weight;
    b->prepare = llm__cpu_prepare;
    b->forget = llm__cpu_forget;
    b->run = kernels ? llm__cpu_run : llm__reference_run;
    b->stage = llm__cpu_stage;
    b->sync = llm__cpu_sync;
    b->copy_blocks = llm__cpu_copy_blocks;
    b->copy_slots = llm__cpu_copy_slots;
    b->destroy = llm__cpu_destroy;
    return b;
}

void llm_cpu_pack_weights(llm_backend *backend, bool pack) {
    if (backend && backend->destroy == llm__cpu_destroy)
        ((llm__cpu *)backend->context)->pack = pack;
}

llm_isa llm_cpu_isa(const llm_backend *backend) {
    bool ours = backend && backend->destroy == llm__cpu_destroy;
    return ours ? ((const llm__cpu *)backend->context)->isa : LLM_ISA_REFERENCE;
}

int llm_cpu_threads(const llm_backend *backend) {
    bool ours = backend && backend->destroy == llm__cpu_destroy;
    return ours ? ((const llm__cpu *)backend->context)->n_threads : 0;
}

const char *llm_isa_name(llm_isa isa) {
    switch (isa) {
    case LLM_ISA_REFERENCE: return "reference";
    case LLM_ISA_PLAIN: return "plain";
    case LLM_ISA_DOTPROD: return "dotprod";
    case LLM_ISA_AVX2: return "avx2";
    case LLM_ISA_AVX512: return "avx512";
    case LLM_ISA_AMX: return "amx";
    }
    return "unknown";
}

void llm_backend_free(llm_backend *backend) {
    if (backend) backend->destroy(backend);
}

/* Round n up: to a power of two if n <= 8, to a multiple of 8 if n < 128, else to a multiple of an
 * eighth of the largest power of two <= n. This gives only a few dozen sizes. */
int llm_rounded_rows(int n) {
    int step = 8, rounded = 1;
    while (rounded < n && rounded < 8) rounded *= 2;
    if (n <= 8) return n < 1 ? n : rounded;
    while (step < INT_MAX / 16 && 16 * step <= n) step *= 2;
    return n > INT_MAX - step ? n : (n + step - 1) / step * step;
}

llm_gpu_options llm_gpu_defaults(void) {
    llm_gpu_options o;
    memset(&o, 0, sizeof o);
    o.graphs = o.fused = o.split_attention = true;
    return o;
}

static llm_backend *llm__open_cpu(const llm_engine_options *options, llm_error *err) {
    llm_engine_options o = options ? *options : llm_engine_defaults();
    llm_backend *b = llm_cpu_backend(o.n_threads, o.max_isa, err);
    llm_cpu_pack_weights(b, o.pack_weights);
    return b;
}

llm_backend *llm_backend_open(const char *name, const llm_engine_options *options,
                              const struct llm_gpu_options *gpu, llm_error *err) {
    const bool automatic = !name || !strcmp(name, "auto");
    llm_error why;
    llm__clear(err);
    llm__clear(&why);
    (void)gpu;
    if (!automatic && !strcmp(name, "cpu")) return llm__open_cpu(options, err);
#ifdef LLM_WITH_EMULATED
    if (!automatic && !strcmp(name, "emulated")) return llm_emulated_backend(gpu, err);
#endif
#ifdef LLM_WITH_CUDA
    if (!automatic && !strcmp(name, "cuda")) return llm_cuda_backend(gpu, err);
    llm_backend *cuda = automatic ? llm_cuda_backend(gpu, &why) : NULL;
    if (cuda) return cuda;
#endif
    if (automatic) {
        llm_backend *cpu = llm__open_cpu(options, err);
        if (cpu && err && why.status != LLM_ERROR_UNSUPPORTED) /* there is a GPU, but it fails */
            memcpy(err->message, why.message, sizeof why.message);
        return cpu;
    }
    llm__fail(err, LLM_ERROR_UNSUPPORTED,
              "this program was built without a device \"%.64s\": it has auto, cpu%s%s", name,
#ifdef LLM_WITH_CUDA
              ", cuda",
#else
              "",
#endif
#ifdef LLM_WITH_EMULATED
              ", emulated"
#else
              ""
#endif
    );
    return NULL;
}

#if defined(LLM_NO_FAST_KERNELS) && defined(__GNUC__) && !defined(__clang__) && \
    defined(__OPTIMIZE__)
#pragma GCC pop_options
#endif
#endif /* LLM__IMPLEMENTED_KERNELS */
#endif /* LLM_IMPLEMENTATION && !LLM__KERNEL_PASS */

/* -------------------------------------------------------------------------------------
 * This software is in the public domain, or, where that is not recognised or not wanted, under
 * the MIT licence: the choice is yours. The text of both is in the file LICENSE; if you copy
 * this header without it, this notice is enough.
 * ---------------------------------------------------------------------------------- */
