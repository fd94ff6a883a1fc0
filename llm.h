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
 *     If you have an hour: [DATA], the beginnings of the chapters of Part I, and llm_step in [1]
 *     with the functions that it calls. If you have a day: all of Part I, with a debugger
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

/* ---- Errors -------------------------------------------------------------------------
 * Every call that can fail has a last argument `llm_error *err` (may be NULL), and sets its
 * status. On success that is LLM_OK. On failure, the message says what was wrong, where (file,
 * tensor, offset), and what to do. */
typedef enum llm_status {
    LLM_OK = 0,
    LLM_ERROR_ARGUMENT,    /* an argument is invalid */
    LLM_ERROR_FILE,        /* a file could not be opened, read, mapped or written */
    LLM_ERROR_FORMAT,      /* a file is damaged, or not of the format that it claims */
    LLM_ERROR_UNSUPPORTED, /* the input is valid, but this engine cannot run it */
    LLM_ERROR_MEMORY,      /* an allocation failed */
    LLM_ERROR_CAPACITY,    /* the request can never fit the context or the cache */
    LLM_ERROR_DEVICE       /* the device (GPU) failed */
} llm_status;

typedef struct llm_error {
    llm_status status;
    char message[512];  /* one line, no newline at the end */
    const char *option; /* name of the field of llm_engine_options, llm_request or llm_sampling that
                         * the error is about ("cache_bytes"); NULL: none. Unless status is
                         * LLM_ERROR_MEMORY, the message begins with this name, so a program that
                         * names its options differently can replace it. */
} llm_error;

const char *llm_status_name(llm_status status); /* "ok", "argument", "file", ... */

/* Release memory that a call allocated for you (llm_tokenize_new and the like). NULL is fine. */
void llm_free(void *memory);

/* ---- Numbers: the storage types of weights and of the cache ------------------------
 * The enum constants are GGUF's numbers. A "block" is a group of values that share one
 * scale; a row of a tensor is a whole number of blocks. */
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
    LLM_Q4_Z = 0x1000 /* internal type for AWQ and GPTQ weights, absent from GGUF files and from
                       * llm_type_at. 32 values: one f16 scale, a zero point (0 to 16), 32 4-bit
                       * integers = 20 bytes */
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

/* Find the description of a type. NULL: unknown type. */
const llm_type_info *llm_type_find(llm_type type);
const llm_type_info *llm_type_by_name(const char *name); /* name: "q4_k" or "Q4_K" */
/* All types, by index; NULL past the end. */
const llm_type_info *llm_type_at(int index);

/* Convert between f32 and f16; f32 is rounded to nearest, ties to even. */
uint16_t llm_f32_to_f16(float x);
float llm_f16_to_f32(uint16_t half);

/* ---- Files: GGUF, and Hugging Face folders ----------------------------------------- */
typedef struct llm_string { /* borrowed bytes, not zero-terminated */
    const char *data;
    size_t length;
} llm_string;

typedef enum llm_value_type { /* with GGUF's numbering */
    LLM_VALUE_U8 = 0, LLM_VALUE_I8, LLM_VALUE_U16, LLM_VALUE_I16, LLM_VALUE_U32,
    LLM_VALUE_I32, LLM_VALUE_F32, LLM_VALUE_BOOL, LLM_VALUE_STRING, LLM_VALUE_ARRAY,
    LLM_VALUE_U64, LLM_VALUE_I64, LLM_VALUE_F64
} llm_value_type;

typedef struct llm_value { /* one key of a file's metadata, with its value */
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
 * tokenizer.json). A folder then looks like a GGUF file: its settings become GGUF metadata, and its
 * tensors get GGUF's names. A tokenizer.json alone gives metadata only. If a model is split into
 * several files (NAME-00001-of-00003.gguf), pass any one of them; all are mapped. Every count,
 * offset, size and type is checked here, so later reads stay inside the file. */
llm_file *llm_file_open(const char *path, llm_error *err);
/* The same for a file in memory, which the caller keeps alive and unchanged. `name` is for
 * errors. */
llm_file *llm_file_from_memory(const void *data, size_t size, const char *name, llm_error *err);
void llm_file_close(llm_file *file);

const char *llm_file_path(const llm_file *file);
uint64_t llm_file_size(const llm_file *file); /* size of all parts in bytes */
int64_t llm_file_n_parts(const llm_file *file); /* number of files that make up the model */
int llm_file_version(const llm_file *file); /* GGUF version; 0: a Hugging Face folder or a
                                             * tokenizer.json */
int64_t llm_file_n_values(const llm_file *file);
const llm_value *llm_file_value(const llm_file *file, int64_t index);
const llm_value *llm_file_find(const llm_file *file, const char *key); /* NULL: absent */
int64_t llm_file_n_tensors(const llm_file *file);
const llm_tensor *llm_file_tensor(const llm_file *file, int64_t index);
const llm_tensor *llm_file_find_tensor(const llm_file *file, const char *name);

/* Copy the rows first to first + n - 1 of a tensor (dims[0] values each) to out, in the tensor's
 * type. The 4-bit integers of AWQ and GPTQ are converted to that type (on all cores; fastest in
 * multiples of 128 rows). False, with the error set, if these rows do not exist. */
bool llm_tensor_rows(const llm_tensor *tensor, uint64_t first, uint64_t n, void *out,
                     llm_error *err);

typedef struct llm_faults { /* non-finite values of a tensor: NaN or infinite */
    uint64_t count;
    uint64_t first; /* index of the first one: row x dims[0] + column */
    float value;    /* value of the first one */
} llm_faults;

/* Find the non-finite values among `count` values. If a block's scale is not finite, neither is any
 * of its values. */
llm_faults llm_type_check(llm_type type, const void *blocks, uint64_t count);
/* The same for a whole tensor. False, with the error set: out of memory. */
bool llm_tensor_check(const llm_tensor *tensor, llm_faults *faults, llm_error *err);
/* Check all weights of a file (llm_file_open reads almost none of them). False, with the error set,
 * if a value is not finite, as in damaged downloads and failed conversions. */
bool llm_file_check(const llm_file *file, llm_error *err);

/* Read a scalar, or element `index` of an array, as another type. False if value is NULL, index is
 * out of range, or the conversion would lose the value. */
bool llm_value_u64(const llm_value *value, uint64_t index, uint64_t *out);
bool llm_value_i64(const llm_value *value, uint64_t index, int64_t *out);
bool llm_value_f64(const llm_value *value, uint64_t index, double *out);
bool llm_value_bool(const llm_value *value, uint64_t index, bool *out);
/* Read the next string of a value. Set *cursor to 0 before the first call. False at the end. */
bool llm_value_string(const llm_value *value, size_t *cursor, llm_string *out);

/* ---- JSON ---------------------------------------------------------------------------
 * A strict reader (RFC 8259) for texts of up to 128 MB. A text is one value and nothing else.
 * Strings must be valid UTF-8, with surrogates in pairs. The keys of an object must be unique,
 * since programs disagree on which duplicate counts. Arrays and objects nest at most 64 deep.
 *
 * The result is an array of nodes in the order of the text. The node of an array is followed by its
 * elements, that of an object by key, value, key, value ... The functions that take a node accept
 * NULL as an absent value, so a path needs no checks:
 *     llm_json_i64(llm_json_member(llm_json_member(json.nodes, "model"), "layers"), &n) */
typedef enum llm_json_kind {
    LLM_JSON_NULL, LLM_JSON_FALSE, LLM_JSON_TRUE, LLM_JSON_NUMBER, LLM_JSON_STRING, LLM_JSON_ARRAY,
    LLM_JSON_OBJECT
} llm_json_kind;

typedef struct llm_json_node {
    const char *text;    /* text of a string (unescaped) or number (as written); not
                          * zero-terminated */
    uint32_t length;     /* bytes of text; arrays, objects: number of elements or members */
    unsigned kind : 3;   /* llm_json_kind */
    unsigned span : 29;  /* number of nodes of this value, including nested ones */
} llm_json_node;

typedef struct llm_json {
    char *text;           /* copy of the parsed text, with strings unescaped in place */
    llm_json_node *nodes; /* (n_nodes) nodes[0] is the whole value */
    int64_t n_nodes;
} llm_json;

/* Error messages begin with "NAME, line 2, column 7: ", or with "column 7: " if name is NULL, which
 * is meant for a text of one line. On failure there is nothing to free. */
bool llm_json_parse(llm_json *json, const char *text, size_t length, const char *name,
                    llm_error *err);
void llm_json_free(llm_json *json);
/* Offset of the value's first byte in the parsed text. */
size_t llm_json_offset(const llm_json *json, const llm_json_node *node);
bool llm_json_has_kind(const llm_json_node *node, llm_json_kind kind);
/* Find the value of the member `key`, by linear search. NULL: not an object, or no such key. */
const llm_json_node *llm_json_member(const llm_json_node *object, const char *key);
/* llm_json_first: the first element of an array, or the first value of an object. llm_json_next:
 * the element or value after `value`. NULL: none. */
const llm_json_node *llm_json_first(const llm_json_node *container);
const llm_json_node *llm_json_next(const llm_json_node *container, const llm_json_node *value);
llm_string llm_json_key(const llm_json_node *value); /* key of the member with this value */
/* Read a value. False if it has another kind or, for i64 and u64, is not an integer in range (a
 * number with a point or an exponent is not an integer). f64: the result is within one unit of the
 * nearest double; false also if the number is too large. */
bool llm_json_string(const llm_json_node *node, llm_string *out);
bool llm_json_is(const llm_json_node *node, const char *text); /* whether it is this string */
bool llm_json_bool(const llm_json_node *node, bool *out);
bool llm_json_f64(const llm_json_node *node, double *out);
bool llm_json_i64(const llm_json_node *node, int64_t *out);
bool llm_json_u64(const llm_json_node *node, uint64_t *out);

/* ---- Tokenizer ---------------------------------------------------------------------- */
typedef struct llm_tokenizer llm_tokenizer;

/* Create a tokenizer from the vocabulary in a GGUF file, a tokenizer.json or a folder that contains
 * one ("gpt2": byte-level BPE; "llama": SentencePiece BPE with byte fallback). The tokenizer uses
 * the file, so close the file last. */
llm_tokenizer *llm_tokenizer_create(const llm_file *file, llm_error *err);
void llm_tokenizer_free(llm_tokenizer *tokenizer);

int32_t llm_tokenizer_size(const llm_tokenizer *t);
int32_t llm_tokenizer_bos(const llm_tokenizer *t); /* -1: none */
int32_t llm_tokenizer_eos(const llm_tokenizer *t); /* -1: none */
bool llm_tokenizer_adds_bos(const llm_tokenizer *t); /* whether the file asks for a leading BOS */
bool llm_tokenizer_adds_eos(const llm_tokenizer *t); /* whether it asks for a trailing EOS */
bool llm_tokenizer_is_end(const llm_tokenizer *t, int32_t id); /* whether it ends an output */
bool llm_tokenizer_is_special(const llm_tokenizer *t, int32_t id); /* is it a control token? */
llm_string llm_tokenizer_text(const llm_tokenizer *t, int32_t id); /* its text in the file */

enum {
    LLM_TOKENIZE_BOS = 1,    /* begin with BOS if the model's file asks for it */
    LLM_TOKENIZE_SPECIAL = 2, /* parse special tokens ("<|endoftext|>") in the text. Leave it off
                               * for text that you did not write. */
    LLM_TOKENIZE_EOS = 4     /* end with EOS if the model's file asks for it; only for a whole
                              * text */
};

/* Convert text to ids. The text may contain any bytes: invalid UTF-8 is converted byte by byte, and
 * llm_detokenize returns it unchanged if the vocabulary has byte tokens. Returns the number of
 * tokens, even if it exceeds `capacity` (at most `capacity` are written); -1 on error. */
int64_t llm_tokenize(const llm_tokenizer *t, const char *text, size_t length, unsigned flags,
                     int32_t *ids, int64_t capacity, llm_error *err);
/* The same, but the call allocates *ids (n, but at least one), to be released with llm_free.
 * Returns n; -1 on error, with *ids NULL. */
int64_t llm_tokenize_new(const llm_tokenizer *t, const char *text, size_t length, unsigned flags,
                         int32_t **ids, llm_error *err);

/* Convert ids to text, without special tokens. Returns the number of bytes, even if it exceeds
 * `capacity`; -1 on error (an id out of range). */
int64_t llm_detokenize(const llm_tokenizer *t, const int32_t *ids, int64_t n, char *text,
                       size_t capacity, llm_error *err);
/* The same, but the call allocates *text, zero-terminated, to be released with llm_free. Returns
 * its length in bytes, without the zero; -1 on error, with *text NULL. */
int64_t llm_detokenize_new(const llm_tokenizer *t, const int32_t *ids, int64_t n, char **text,
                           llm_error *err);

/* Convert ids to text, one token per call. The output never ends inside a UTF-8 character: the
 * stream (zero it before the first call) holds back the bytes of an incomplete one. `text` must
 * have room for llm_stream_capacity(t) bytes. Returns the number of bytes written. An id of -1
 * flushes the stream. */
typedef struct llm_stream {
    unsigned char held[4];
    int n_held;
    bool started;
} llm_stream;
size_t llm_stream_capacity(const llm_tokenizer *t);
size_t llm_stream_decode(const llm_tokenizer *t, llm_stream *stream, int32_t id, char *text);

/* ---- Conversations ------------------------------------------------------------------- */
typedef enum llm_role { LLM_ROLE_SYSTEM, LLM_ROLE_USER, LLM_ROLE_ASSISTANT } llm_role;

typedef struct llm_message {
    llm_role role;
    const char *text; /* not zero-terminated */
    size_t length;
} llm_message;

typedef struct llm_chat_options { /* start from llm_chat_defaults() */
    const char *template_name; /* name from llm_chat_template_at; NULL: the template in the model's
                                * file */
    const char *date;  /* date for templates that state one, "26 Jul 2024"; NULL: the template's
                        * default, or today */
    bool no_thinking;  /* "qwen3": begin the answer with an empty thinking section */
} llm_chat_options;

llm_chat_options llm_chat_defaults(void);
/* The names of all known templates, by index; NULL past the end. */
const char *llm_chat_template_at(int index);
/* The name of the template in the vocabulary's file; NULL: no template, or an unknown one. */
const char *llm_chat_template(const llm_tokenizer *t);
/* The source of that template (Jinja), as stored in the file; empty: none. */
llm_string llm_chat_template_source(const llm_tokenizer *t);

/* Convert a conversation, whose last message is the user's, to the tokens of a prompt: BOS if the
 * model wants it, the messages in the template, and the beginning of the answer. Special tokens
 * come from the template alone; the text of a message cannot forge them. Returns the number of
 * tokens, even if it exceeds `capacity`; -1 on error: the template is unknown, or does not allow
 * these messages (most require user and assistant to alternate). */
int64_t llm_chat_tokenize(const llm_tokenizer *t, const llm_chat_options *options,
                          const llm_message *messages, int n, int32_t *ids, int64_t capacity,
                          llm_error *err);
/* The same, but the call allocates the ids: see llm_tokenize_new. */
int64_t llm_chat_tokenize_new(const llm_tokenizer *t, const llm_chat_options *options,
                              const llm_message *messages, int n, int32_t **ids, llm_error *err);
/* The same as text, for inspection: exactly what the model's own template renders. Returns the
 * number of bytes, even if it exceeds `capacity`. */
int64_t llm_chat_render(const llm_tokenizer *t, const llm_chat_options *options,
                        const llm_message *messages, int n, char *text, size_t capacity,
                        llm_error *err);
/* The text at which to stop (for llm_request.stop) if the template does not end an answer with an
 * end token of this vocabulary; otherwise NULL. */
const char *llm_chat_stop(const llm_tokenizer *t, const llm_chat_options *options);

/* ---- Model -------------------------------------------------------------------------- */
typedef enum llm_rope_pairing {
    LLM_ROPE_ADJACENT, /* dimension 2i is rotated with 2i+1 ("llama" in GGUF) */
    LLM_ROPE_HALVES    /* dimension i is rotated with i + rope_dim/2 (NeoX, Hugging Face) */
} llm_rope_pairing;

typedef enum llm_rope_scaling { /* how a model was extended to a longer context */
    LLM_ROPE_UNSCALED,
    LLM_ROPE_LINEAR,   /* all positions divided by the factor */
    LLM_ROPE_YARN      /* the same, for slow dimensions only (Peng et al. 2023, arXiv 2309.00071) */
} llm_rope_scaling;    /* (Llama 3 stores one divisor per frequency, in the tensor
                        * rope_freqs.weight) */

typedef struct llm_config { /* the shape of a model */
    char architecture[32];
    int vocab_size;
    int context_length; /* longest context that the model supports, in tokens */
    int n_layers;
    int dim;            /* width of the residual stream */
    int hidden_dim;     /* width inside the feed-forward block */
    int n_heads;        /* query heads */
    int n_kv_heads;     /* key/value heads; each serves n_heads / n_kv_heads query heads */
    int head_dim;
    int rope_dim;       /* dimensions of a head that RoPE rotates */
    float rope_base;
    llm_rope_pairing rope_pairing;
    llm_rope_scaling rope_scaling;
    float rope_factor;          /* divisor of the frequencies; 1: unscaled */
    int rope_original_context;  /* YaRN: context length before the extension */
    float rope_beta_fast, rope_beta_slow; /* YaRN: frequencies that make rope_beta_slow to
                                           * rope_beta_fast turns over that context are blended */
    float rope_magnitude;       /* YaRN: factor of rotated queries and keys; otherwise 1 */
    float norm_epsilon;
    int window;         /* layers with a window: positions that a token attends to, including its
                         * own; 0: all */
    bool tied_output;   /* whether the output matrix is the token embedding */
} llm_config;

typedef struct llm_model llm_model;

/* Load a model (a GGUF file or a Hugging Face folder): map its weights without copying them, and
 * read its shape and its tokenizer. */
llm_model *llm_model_load(const char *path, llm_error *err);
llm_model *llm_model_from_memory(const void *data, size_t size, const char *name, llm_error *err);
void llm_model_free(llm_model *model); /* free it after the engines that use it, as target or
                                        * draft */
const llm_config *llm_model_config(const llm_model *model);
const llm_tokenizer *llm_model_tokenizer(const llm_model *model);
const llm_file *llm_model_file(const llm_model *model);
/* Why context_length is less than in config.json, for messages; empty if it is the same. */
const char *llm_model_context_note(const llm_model *model);
/* Bytes of weights that a decode step reads: all, but only one row of an untied embedding. */
uint64_t llm_model_step_bytes(const llm_model *model);
/* Bytes of cache per token: 2 x n_layers x n_kv_heads x head_dim x bytes per value. */
uint64_t llm_model_cache_bytes_per_token(const llm_model *model, llm_type cache_type);

/* ---- Engine ------------------------------------------------------------------------- */
typedef struct llm_engine llm_engine;
typedef struct llm_backend llm_backend;

typedef enum llm_isa { /* instruction sets, in ascending order */
    LLM_ISA_REFERENCE, /* plain loops of chapter 6 on one thread: slow; the reference in tests of
                        * the others */
    LLM_ISA_PLAIN,   /* C code compiled for the baseline processor */
    LLM_ISA_DOTPROD, /* arm64: NEON with dot products of int8 */
    LLM_ISA_AVX2,    /* AVX2 with FMA and F16C */
    LLM_ISA_AVX512,  /* AVX-512 F, BW, DQ, VL and VNNI */
    LLM_ISA_AMX,     /* the same, and matrix tiles of int8 and bf16 */
    LLM_ISA_BEST = LLM_ISA_AMX
} llm_isa;

typedef enum llm_preempt { /* what happens to the cache of a sequence that is preempted */
    LLM_PREEMPT_RECOMPUTE, /* the cache is dropped, and recomputed later */
    LLM_PREEMPT_SWAP       /* the cache is copied to host memory and back, or recomputed if
                            * swap_bytes are used up */
} llm_preempt;

typedef enum llm_state { /* state of a sequence (one sample of a request) */
    LLM_WAITING,   /* not admitted yet; further samples wait until the prompt has been computed */
    LLM_PREFILL,   /* the model processes its known tokens: the prompt or, after a preemption, all
                    * of them */
    LLM_DECODE,    /* all known tokens but the last are in the cache: each step generates more */
    LLM_PREEMPTED, /* its blocks were taken for an older sequence; it resumes when there is room */
    LLM_ENDED
} llm_state;

typedef enum llm_trace_kind {  /* kinds of llm_trace_event, and the fields that each uses */
    LLM_TRACE_STEP_BEGIN,      /* a call of llm_step begins */
    LLM_TRACE_STEP_END,        /* the call ends. count: 1 worked, 0 nothing to do, -1 failed */
    LLM_TRACE_STATE,           /* the sequence changes from state `from` to `state` (at submit, both
                                * are LLM_WAITING). count: on leaving LLM_WAITING or LLM_PREEMPTED:
                                * tokens already in the cache; on preemption: blocks saved in host
                                * memory; at the end: tokens generated, without an end token;
                                * otherwise 0 */
    LLM_TRACE_SCHEDULE,        /* this step processes `count` tokens from position `first` on */
    LLM_TRACE_PROPOSE,         /* `count` proposals follow these tokens */
    LLM_TRACE_ACCEPT,          /* `count` of the proposals were accepted */
    /* Events about a block. count: block tables that contain it after the event. kept: the prefix
     * cache can find its content. */
    LLM_TRACE_TAKE,            /* a free block becomes entry `first` of the sequence's block
                                * table */
    LLM_TRACE_SHARE,           /* a block that already holds the right tokens becomes entry
                                * `first` */
    LLM_TRACE_COPY,            /* entry `first` was shared: `block`, a copy of `source`, replaces
                                * `source` in it */
    LLM_TRACE_RELEASE,         /* the sequence gives up a block */
    LLM_TRACE_EVICT            /* the prefix cache forgets the content of a free block, which is
                                * about to be taken */
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

/* Called for each decision of the engine, inside llm_submit, llm_step and llm_cancel. The function
 * must not call the engine. After a failed step (count -1), only sequences with a LLM_TRACE_STATE,
 * a LLM_TRACE_ACCEPT or an llm_event have advanced. */
typedef void (*llm_trace)(void *user, const llm_trace_event *event);

typedef struct llm_engine_options { /* start from llm_engine_defaults() */
    const llm_model *draft; /* draft for speculation: a small model with the same vocabulary, which
                             * must outlive the engine; NULL: none */
    llm_backend *backend;  /* device; NULL: a CPU backend that the engine owns. You own any other:
                            * free it after the engine */
    int n_threads;         /* threads of the engine's own CPU backend; 0: one per processor */
    llm_isa max_isa;       /* best instruction set that this CPU backend may use; default
                            * LLM_ISA_BEST */
    bool pack_weights;     /* same backend: see llm_cpu_pack_weights; default true */
    int context_length;    /* longest sequence in tokens; 0: the model's context_length */
    int block_size;        /* tokens in a block of the cache; default 16 */
    llm_type cache_type;   /* LLM_F16 (default) or LLM_F32 */
    uint64_t cache_bytes;  /* size of the pool. 0: max_sequences whole contexts, but at most 1 GiB
                            * (and at least one context). 0 on a device with memory of its own:
                            * memory_share of its free memory, but at most a million blocks or
                            * max_sequences whole contexts, whichever is more. A draft's cache has
                            * as many blocks; it is added to cache_bytes, but included in
                            * memory_share. */
    float memory_share;    /* the cache's share of the device memory that weights and activations
                            * leave free; default 0.9 */
    int max_sequences;     /* most sequences that run at the same time; default 16 */
    int max_batch_tokens;  /* most tokens in a step: longer prompts take several; default 512 */
    int max_speculation;   /* most proposals per sequence and step; default 8 */
    llm_preempt preempt;   /* default LLM_PREEMPT_RECOMPUTE */
    uint64_t swap_bytes;   /* host memory for LLM_PREEMPT_SWAP; default 256 MiB */
    bool prefix_cache;     /* texts with the same beginning share blocks; default true. With a
                            * draft, only the blocks of requests that speculate with it are shared,
                            * since the draft must have read them, too. */
    bool chunked_prefill;  /* long prompts are split over steps; default true. false: a prompt is
                            * computed whole and before anything else, and prompt and output
                            * together must fit into max_batch_tokens */
    bool naive_attention;  /* use the plain loop, with all scores in memory, for comparison */
    unsigned fusions;      /* fusions that are allowed: LLM_FUSE_...; default LLM_FUSE_ALL */
    bool host_sampling;    /* draw tokens on the CPU even if the device can: same tokens, but the
                            * logits are copied to the host */
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
 * Returns NULL, with the error set, if the device cannot be opened or is not in this program; the
 * message lists the included devices. Release the backend with llm_backend_free, after the
 * engine. */
struct llm_gpu_options;
llm_backend *llm_backend_open(const char *name, const llm_engine_options *options,
                              const struct llm_gpu_options *gpu, llm_error *err);

typedef struct llm_sampling { /* start from llm_sampling_defaults(): greedy */
    float temperature;        /* 0: greedy (the most likely token); at most 1e6 */
    int top_k;                /* keep the k most likely tokens; 0: all */
    float top_p;              /* then keep the fewest tokens whose probabilities add up to p; 1:
                               * all */
    float min_p;              /* then keep tokens of at least min_p x the top probability; 0: all */
    float repetition_penalty; /* divisor of the logits of recent tokens (multiplier of those below
                               * 0); 1: none; at most 1e6 */
    int penalty_window;       /* number of recent tokens to penalize, including the prompt's; 0:
                               * all; default 64 */
    uint64_t seed;            /* seed of this request's random stream */
} llm_sampling;

llm_sampling llm_sampling_defaults(void);

/* Called with the logits (vocab_size) after the token at `position`, before a token is drawn from
 * them. The hook may change them (to force a grammar, for example), but must not call the engine.
 * It is called for every position of the prompt, in order: once, as sample 0, but for the last
 * position once for each sample. */
typedef void (*llm_logits_hook)(void *user, uint64_t request, int sample, int position,
                                float *logits);

enum { LLM_SPECULATE_AUTO = -1 };

typedef struct llm_request { /* start from llm_request_defaults() */
    const int32_t *prompt;  /* (n_prompt) token ids; copied by llm_submit */
    int n_prompt;           /* number of prompt tokens; at least 1 */
    int max_tokens;         /* most tokens to generate; 0: none (only the logits hook runs); -1
                             * (default): up to the end of the context */
    int n_samples;          /* number of independent continuations, which share the prompt's blocks;
                             * default 1 */
    llm_sampling sampling;  /* sample s uses the random stream (seed, s) */
    bool embedding;         /* generate nothing (max_tokens is ignored): the last event has hidden
                             * states of the prompt. Not allowed with n_samples > 1, a hook or
                             * speculation */
    bool ignore_end;        /* do not stop at an end token (benchmarks) */
    const char *const *stop; /* (n_stop) the output ends before the first of these texts; copied */
    int n_stop;
    int priority;           /* the request is queued 64 x priority places earlier; default 0 */
    int speculate;          /* proposals per step. 0: none; 1 to max_speculation: that many, but at
                             * most max_batch_tokens - 1; LLM_SPECULATE_AUTO: the engine adapts the
                             * number. Needs a draft model or lookup. Greedy output is the same as
                             * without speculation; sampled output has the same distribution. */
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

const char *llm_finish_name(llm_finish finish); /* "none", "end", "length", "stop", "cancelled",
                                                 * "error" */

typedef struct llm_event { /* one token, or the end, of one sample of one request */
    uint64_t request;
    int sample;           /* 0 to n_samples - 1 */
    void *user;
    int32_t token;        /* generated token; -1: none (the event only ends the sample) */
    int index;            /* number of tokens generated before this one; without a token: their
                           * total */
    float logprob;        /* ln p(token) under the model itself, before penalties, temperature and
                           * filters */
    bool accepted;        /* whether the token is an accepted proposal */
    const char *text;     /* new text: whole UTF-8 characters, without a possible beginning of a
                           * stop text; may be empty. Not zero-terminated; valid until the next
                           * llm_step or llm_engine_free */
    size_t text_length;
    llm_finish finish;    /* not LLM_FINISH_NONE: this is the sample's last event */
    const char *error;    /* LLM_FINISH_ERROR: what is wrong, and where; valid as long as text.
                           * Otherwise NULL */
    const float *last_hidden; /* (dim) for llm_request.embedding: hidden state of the prompt's last
                               * token after the final norm; valid as long as text. Otherwise
                               * NULL */
    const float *mean_hidden; /* (dim) the same, averaged over all tokens of the prompt */
} llm_event;

/* options NULL: the defaults. The model must outlive the engine; several engines may share it. */
llm_engine *llm_engine_create(const llm_model *model, const llm_engine_options *options,
                              llm_error *err);
void llm_engine_free(llm_engine *engine);

/* Queue a request. *id identifies it in events and for llm_cancel (id may be NULL). A request that
 * can never fit (longer than the context, or more blocks than the pool has) is refused. */
bool llm_submit(llm_engine *engine, const llm_request *request, uint64_t *id, llm_error *err);
/* The same for a prompt in text form, with BOS if the model's file asks for it; special tokens are
 * not parsed. `request` may be NULL (defaults); its prompt is ignored. */
bool llm_submit_text(llm_engine *engine, const char *text, const llm_request *request, uint64_t *id,
                     llm_error *err);
/* Run one step. Returns 1: worked, call again; 0: nothing left to do; -1: error. Read all events,
 * including those of llm_cancel, before the next call, which discards them. An error loses no work:
 * the next call repeats what the device failed to do (though a lost GPU fails every time). */
int llm_step(llm_engine *engine, llm_error *err);
/* Get the oldest unread event. False: none. */
bool llm_next_event(llm_engine *engine, llm_event *event);
/* End a request now. Each of its samples that has not ended gets an event LLM_FINISH_CANCELLED. */
bool llm_cancel(llm_engine *engine, uint64_t id, llm_error *err);

/* Save an unfinished request as a session of *size bytes. It contains the full blocks of the
 * request's cache (in an engine with a draft, only if the request speculates). NULL on failure. The
 * request continues, unless you cancel it. Events are not saved: read them first. */
void *llm_session_save(llm_engine *engine, uint64_t id, size_t *size, llm_error *err);
void llm_session_free(void *session); /* NULL is fine */
/* Submit a saved request, under a new id, to this engine or one with the same models, cache_type,
 * block_size and kind of device. It continues with the same tokens and logits as without the
 * interruption. `user` and the hook come from `callbacks` (NULL: none). The session is copied. It
 * is not trusted: a damaged session is refused, and a forged one affects no other request. */
bool llm_session_restore(llm_engine *engine, const void *session, size_t size,
                         const llm_request *callbacks, uint64_t *id, llm_error *err);

typedef struct llm_statistics {    /* totals since the engine was created, except those marked
                                    * `now` */
    uint64_t steps;                /* completed steps */
    uint64_t prompt_tokens;        /* prompt tokens processed; those recomputed after a preemption
                                    * count again */
    uint64_t generated_tokens;
    uint64_t requests_submitted, requests_finished;
    int running;                   /* running sequences, now */
    int waiting;                   /* waiting requests, now */
    double step_seconds;           /* total time in llm_step */
    double forward_seconds;        /* part of step_seconds: forward passes */
    double draft_seconds;          /* part of step_seconds: the draft's proposals */
    double sampling_seconds;       /* part of step_seconds: choosing tokens, and committing them
                                    * with their text */
    double schedule_seconds;       /* part of step_seconds: scheduling */
    double wait_seconds;           /* part of step_seconds: waiting for an asynchronous device (a
                                    * GPU) */
    uint64_t device_launches;      /* kernels launched one by one */
    uint64_t device_replays;       /* graphs replayed: see llm.cu, chapter [8] */
    uint64_t device_bytes;         /* size of the device's own memory; 0: it has none */
    uint64_t device_free_bytes;    /* free part of device_bytes, now */
    uint64_t preemptions;
    uint64_t blocks_swapped;       /* blocks copied to host memory, plus blocks copied back */
    uint64_t prefix_tokens;        /* prompt tokens of admitted requests without a hook */
    uint64_t prefix_hits;          /* those of prefix_tokens found in the prefix cache */
    int64_t blocks_shared;         /* blocks in more than one block table, now */
    uint64_t sequence_steps;       /* sequences in each step, summed over the steps */
    double kv_waste;               /* share of empty slots in the blocks in use, now */
    uint64_t decode_steps;         /* sequences for which a step chose tokens, summed over the
                                    * steps */
    uint64_t proposed, accepted;   /* proposals verified, and proposals accepted */
    uint64_t proposed_at[16], accepted_at[16]; /* the same by index in the proposal; [15]: index 15
                                                * and later */
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
/* The program that the engine runs in each step, or the draft model's program (NULL: no draft). The
 * caller may set the program's `seconds`. */
struct llm_program *llm_engine_program(llm_engine *engine, bool draft);
const llm_model *llm_engine_model(const llm_engine *engine);
/* The options in effect, including the values that the engine chose. */
const llm_engine_options *llm_engine_settings(const llm_engine *engine);

/* ---- Small tools for embedders ---------------------------------------------------- */
double llm_seconds(void); /* time in seconds from a monotonic clock */
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
 * prepares a program, and runs it; there is nothing else between the scheduler and the arithmetic.
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
    const int32_t *columns; /* device (cols): the permutation that gather_columns applies to the
                             * input; NULL: none */
    bool only_rows;         /* only embed reads it, no matmul does */
} llm_weight;

/* The ragged batch: all tokens of one step, of any number of sequences. A decode step has one token
 * per sequence, a prefill chunk many; the program does not distinguish them. The arrays are host
 * memory, filled by the engine. Sequence s owns the tokens seq_first[s] to seq_first[s] +
 * seq_count[s] - 1, at consecutive positions. Token t is written to slot slots[t] of the cache. The
 * key of position p of sequence s is in block block_tables[s * table_stride + p / block_size], at
 * slot p % block_size. No sequence reads what another one writes in the same step. */
typedef struct llm_batch {
    int n_tokens;
    int n_sequences;
    const int32_t *tokens;       /* (T) token ids */
    const int32_t *positions;    /* (T) position of each token in its sequence */
    const int32_t *slots;        /* (T) slot of each token: block * block_size + offset in the
                                  * block */
    const int32_t *seq_first;    /* (n_sequences) index of each sequence's first token */
    const int32_t *seq_count;    /* (n_sequences) number of tokens of each sequence */
    const int32_t *block_tables; /* (n_sequences, table_stride) blocks of each sequence */
    int table_stride;
    int block_size;
    int n_logits;
    const int32_t *logit_rows;   /* (n_logits) indexes of the tokens whose logits are wanted,
                                  * ascending */
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
    float scale;           /* factor of q.k: 1/sqrt(head_dim) */
    bool naive;            /* use the plain loop, for comparison */
    int window;            /* the token at position p attends to positions p - window + 1 to p; 0:
                            * to all up to p */
} llm_attention_shape;

/* ---- The program --------------------------------------------------------------------- */

typedef enum llm_op_kind {
    LLM_OP_EMBED,          /* out (T, cols) = for each token, the row of `weight` with its id */
    LLM_OP_ROPE_ANGLES,    /* out (T, rope_dim/2, 2) = scale x (cos, sin) of position x frequency;
                            * `weight` (rope_dim/2) holds the frequencies */
    LLM_OP_RMSNORM,        /* out = in[0] / sqrt(mean(in[0]^2) + epsilon) x `weight`, per row */
    LLM_OP_MATMUL,         /* out (n, rows) = in[0] (n, cols) x transposed `weight`, + `bias`,
                            * + out if `add` */
    LLM_OP_ROPE_STORE,     /* in: angles, q, k, v, cache. Per head: normalise q and k (q_norm and
                            * k_norm) and rotate them by the angles, in place; store k and v in the
                            * cache */
    LLM_OP_ATTENTION,      /* in: q, cache. out (T, n_heads, head_dim): each token's query attends
                            * to the cached positions of its sequence up to its own */
    LLM_OP_SWIGLU,         /* out = silu(in[0]) x in[1], elementwise */
    LLM_OP_GATHER_ROWS,    /* out (R, cols) = the rows of in[0] whose logits are wanted */
    LLM_OP_GATHER_COLUMNS, /* out[.][j] = in[0][.][weight->columns[j]] */
    LLM_N_OP_KINDS
} llm_op_kind;

const char *llm_op_name(llm_op_kind kind); /* "embed", "rmsnorm", ... */

enum { LLM_OP_INPUTS = 5 };

typedef struct llm_op { /* one operation; rmsnorm and swiglu may work in place: out = in[0] */
    llm_op_kind kind;
    int layer;                 /* layer of the model; -1: none */
    int in[LLM_OP_INPUTS];     /* indexes of the buffers that it reads; -1: unused */
    int out;                   /* index of the buffer that it writes; -1: it writes to in[]
                                * (rope_store) */
    bool add;                  /* matmul: whether to add to `out`, which it then also reads */
    const llm_weight *weight;  /* matrix, or vector (a matrix of one row, f32); NULL: none */
    const llm_weight *bias;    /* (weight->rows) vector added to each row of the output; NULL:
                                * none */
    const llm_weight *q_norm, *k_norm; /* rope_store: (head_dim); NULL: none */
    const char *name;          /* name of the weight, for display: "attn_q"; "": none */
    llm_attention_shape attention; /* parameters of rope_store and attention */
    llm_rope_pairing pairing;  /* rope_store: which dimensions are rotated together */
    int rope_dim;              /* rope_angles and rope_store: rotated dimensions of a head */
    float scale;               /* rope_angles: factor of cos and sin; 1 except with YaRN */
    float epsilon;             /* rmsnorm and rope_store: term added to the mean square */
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

enum { /* fusions that prepare may use; results are the same bit for bit with and without them */
    LLM_FUSE_GATE = 1,         /* gate, up and their activation run as one operation */
    LLM_FUSE_ROPE = 2,         /* rope_store and attention run as one operation, head by head */
    LLM_FUSE_OWN_COPIES = 4,   /* norms and rounding of few rows: one copy per thread (CPU) */
    LLM_FUSE_SIDE_BY_SIDE = 8, /* independent operations run at the same time */
    LLM_FUSE_ALL = 15
};

typedef struct llm_program {
    llm_op *ops;               /* (n_ops) operations, those of the body first */
    int n_ops, n_body;
    llm_buffer *buffers;       /* (n_buffers) */
    int n_buffers;
    const llm_cache *cache;    /* cache that the buffer "cache" refers to */
    unsigned fusions;          /* fusions that prepare may use: LLM_FUSE_... */
    double *seconds;           /* (n_ops) total seconds per operation, added by run (fused
                                * operations count as one of them); NULL: no profile */
    void *plan;                /* the backend's plan, made by prepare; initially NULL */
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

/* The cost of one operation of the program over a batch. Only n_tokens, n_sequences, seq_first,
 * seq_count, positions and n_logits of the batch are read. */
llm_cost llm_op_cost(const llm_program *program, const llm_op *op, const llm_batch *batch);

typedef struct llm_stage {     /* one unit of an executor's work */
    int first, last;           /* first and last operation of the stage, as indexes into ops */
    bool rounds;               /* whether it only rounds the input of `last` */
    bool barrier;              /* whether all threads wait for each other before it */
    bool each;                 /* whether every thread does all of it for itself */
} llm_stage;

/* A device may process llm_rounded_rows(n) rows instead of n, so that steps of similar size have
 * the same shape. Buffers have room for the extra rows, whose values are undefined. */
int llm_rounded_rows(int n);

typedef struct llm_device_state { /* counters of a device */
    const char *name;
    uint64_t total_bytes, free_bytes; /* size of its own memory, and free part; 0: it has none */
    double wait_seconds;   /* total time that the CPU waited for it */
    uint64_t launches, replays;
} llm_device_state;

typedef struct llm_draw {  /* one token to draw */
    int row;               /* row of the logits; ascending from draw to draw */
    llm_sampling sampling;
    uint64_t random;       /* random number in [0, 1), times 2^64 */
    const int32_t *recent; /* (n_recent) host: tokens to penalize; may contain duplicates */
    int n_recent;
} llm_draw;

struct llm_backend {
    const char *name;      /* "cpu", "cuda", ... */
    void *context;         /* the backend's data; first argument of every function */
    bool keys_transposed;  /* whether it wants transposed keys: see llm_cache */

    /* -- memory ------------------------------------------------------------------------ */
    /* Allocate device memory, not cleared. `what` names its purpose in errors. NULL on failure. */
    void *(*allocate)(void *context, size_t bytes, const char *what, llm_error *err);
    /* Release device memory (NULL is fine). Do not call it within a step: work on the memory may
     * not be done. */
    void (*release)(void *context, void *device);
    bool (*upload)(void *context, void *device, const void *host, size_t bytes, llm_error *err);
    bool (*download)(void *context, void *host, const void *device, size_t bytes, llm_error *err);
    /* Make a matrix of the file ready for matmul and embed: type, rows and cols of w are set; set
     * w->data. The host memory stays mapped while the weight exists, so the CPU just points to it.
     * (A matrix that was converted for this call is freed at once if w->packed is set or w->data is
     * elsewhere.) */
    bool (*load_weight)(void *context, llm_weight *w, const void *host, llm_error *err);
    void (*free_weight)(void *context, llm_weight *w);

    /* -- the program ------------------------------------------------------------------- */
    /* Make a program ready to run: choose kernels, fuse operations, and allocate scratch memory, so
     * that a step allocates nothing. Weights and buffers are in place and do not move; the cache
     * may be allocated later. After an error, programs prepared earlier can still run. */
    bool (*prepare)(void *context, llm_program *program, const llm_limits *limits, llm_error *err);
    /* Release what prepare made, if anything. */
    void (*forget)(void *context, llm_program *program);
    /* Run a part of the program over a batch. The head computes the logits for entries first to
     * first + n - 1 of logit_rows, of the batch whose body ran last. On the CPU, the work is done
     * when this returns. On a GPU, the work is on its stream, and the next download or sync reports
     * failures. */
    bool (*run)(void *context, const llm_program *program, llm_part part, const llm_batch *batch,
                int first, int n, llm_error *err);
    /* Describe stage `index` of such a run. False: there are no more stages. The pointer may be
     * NULL if the backend does not describe its plan. */
    bool (*stage)(void *context, const llm_program *program, llm_part part, const llm_batch *batch,
                  int n, int index, llm_stage *stage);
    /* Wait until all work is done. False: something failed since the last sync. */
    bool (*sync)(void *context, llm_error *err);
    /* Copy block from[i] to block to[i], in order: keys and values of every layer. The arrays (n)
     * are host memory. If the next sync fails, the engine requests the same copies again. */
    void (*copy_blocks)(void *context, const llm_cache *cache, const int32_t *from,
                        const int32_t *to, int n);

    /* -- optional: may be NULL ------------------------------------------------------------- */
    /* Draw n tokens from logits (max(row) + 1, vocab_size), exactly as chapter [3] does, and wait
     * for them. ids and logprobs (n) are host memory. */
    bool (*sample)(void *context, float *logits, int vocab_size, const llm_draw *draws, int n,
                   int32_t *ids, float *logprobs, llm_error *err);
    void (*state)(void *context, llm_device_state *state);

    void (*destroy)(llm_backend *backend);
};

/* A CPU backend. n_threads 0: one per processor. It uses the best instruction set of this processor
 * up to max_isa (LLM_ISA_BEST: no limit). */
llm_backend *llm_cpu_backend(int n_threads, llm_isa max_isa, llm_error *err);
llm_isa llm_cpu_isa(const llm_backend *backend);
/* Set whether weights loaded from now on are also kept in the layout of the kernels (default true).
 * Prompts and batches then run several times as fast. This takes a second copy of quantized
 * weights, but the file's pages are given back to the system. Results do not change. */
void llm_cpu_pack_weights(llm_backend *backend, bool pack);
const char *llm_isa_name(llm_isa isa);
int llm_cpu_threads(const llm_backend *backend);
int llm_processor_count(void);
void llm_backend_free(llm_backend *backend); /* NULL is fine */

typedef struct llm_gpu_options { /* start from llm_gpu_defaults() */
    int device;           /* index of the GPU, from 0 */
    bool graphs;          /* record the launches of a decode step once and replay them; default
                           * true */
    bool fused;           /* do several operations in one kernel where possible; default true */
    bool split_attention; /* spread the positions of a long sequence over several thread blocks;
                           * default true */
    bool overlap;         /* let a kernel fetch its weights before the previous kernel ends (Hopper
                           * and newer); default false */
    bool plain;           /* use the plain, slow kernels, for comparison; default false */
    bool deterministic;   /* use only kernels whose logits do not depend on what else is in the
                           * batch, bit for bit (at present, all kernels); default false */
} llm_gpu_options;

llm_gpu_options llm_gpu_defaults(void);
/* A backend for an NVIDIA GPU (link llm.cu). options NULL: the defaults. LLM_ERROR_UNSUPPORTED:
 * there is no GPU, or no suitable one. */
llm_backend *llm_cuda_backend(const llm_gpu_options *options, llm_error *err);
/* The same kernels, run slowly by the CPU: llm.cu compiled as C++ with LLM_EMULATED defined. */
llm_backend *llm_emulated_backend(const llm_gpu_options *options, llm_error *err);

#ifdef __cplusplus
}
#endif
#endif /* LLM_H */

/* =====================================================================================
 * Implementation. Chapter 10 includes this file again, once per instruction set, to compile its
 * kernels; LLM__KERNEL_PASS is defined during such a pass.
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
/* At -O1, GCC compiles in half the time. (-O0, for a debugger, stays -O0.) */
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

/* With -std=c11, system headers declare only ISO C, so these functions are declared here: madvise
 * gives back pages of weights that were copied; the monotonic clock never runs backwards. */
#ifdef __linux__
#ifndef MADV_HUGEPAGE
#define MADV_DONTNEED 4
#define MADV_HUGEPAGE 14
int madvise(void *memory, size_t bytes, int advice);
#endif
#if !defined(CLOCK_MONOTONIC) && defined(__LP64__) /* elsewhere the symbol may have another name */
#define CLOCK_MONOTONIC 1
int clock_gettime(int clock, struct timespec *time);
#endif
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "llm.h reads little-endian files in place, and so needs a little-endian machine"
#endif

#ifndef LLM_MALLOC
#define LLM_MALLOC(bytes) malloc(bytes)
#define LLM__CALLOC(bytes) calloc(1, bytes) /* zeroes large blocks lazily, when touched */
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
 * covers 8 MB: reading a large matrix misses it on nearly every page, and the hardware prefetcher
 * stops at each page's end. Larger pages also cause 512 times fewer page faults. */
static void llm__want_large_pages(void *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t page = 4096, first = ((uintptr_t)memory + page - 1) / page * page,
              end = ((uintptr_t)memory + bytes) / page * page;
    if (bytes >= (size_t)1 << 22) madvise((void *)first, end - first, MADV_HUGEPAGE); /* a hint */
#else
    (void)memory, (void)bytes;
#endif
}

/* Prefetch a cache line. (To write part of a line, the processor reads it first.) */
#define LLM__PREFETCH(p) __builtin_prefetch(p)           /* into L1 */
#define LLM__PREFETCH_FAR(p) __builtin_prefetch(p, 0, 2) /* into L2 */
#define LLM__PREFETCH_TO_WRITE(p) __builtin_prefetch(p, 1) /* a line to be written */

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

/* Spread every bit of x over all bits of the result, for hash tables and random numbers (the output
 * function of SplitMix64, Steele et al. 2014). */
static uint64_t llm__mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* A hash of n bytes. If the seed is unpredictable, no file can force collisions. */
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

/* Allocate zeroed memory that starts on a cache line, so that threads that write to different
 * allocations share no line. The pointer from LLM_MALLOC is stored just before it. */
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
 * Chapters 1 to 6 show the whole way from a request to its tokens, with a plain loop for each
 * operation. Part II, chapters 7 to 10, is for looking things up: storage types, files, text, and
 * the fast versions of the operations.
 *
 * [DATA] The structs of the engine, and declarations of functions that Part I defines later or
 * takes from Part II
 * ================================================================================== */

/* ---- A model on a device (chapter 5) ---- */

struct llm_model {
    llm_file *file;
    llm_tokenizer *tokenizer;
    llm_config config;
    const struct llm__architecture *architecture;
    const llm_tensor *embedding, *output, *output_norm; /* output = embedding if they are tied */
    const llm_tensor *rope_divisors; /* (rope_dim/2) divisors of the RoPE frequencies; NULL: none */
    int *windows;             /* (n_layers) attention window in tokens; 0: unlimited */
    uint64_t ordered_cols;    /* width of the widest matrix with permuted columns; 0: none */
    const llm_tensor **parts; /* (n_layers, LLM__N_PARTS) tensors of each layer; NULL: absent */
    uint64_t weight_bytes;    /* bytes of all tensors */
    char context_note[160];   /* text that llm_model_context_note returns */
};

typedef struct llm__network {
    const llm_model *model;
    llm_backend *backend;
    llm_weight embedding, output;
    llm_weight output_norm; /* an f32 matrix of one row, like all vectors */
    llm_weight frequencies; /* (rope_dim/2) RoPE frequencies */
    llm_weight *parts;      /* (n_layers, LLM__N_PARTS) weights of each layer; data and packed NULL:
                             * absent */
    llm_cache cache;
    llm_program program;
    float *activations;     /* device memory of all activation buffers */
    size_t activation_bytes;
    float *x;               /* device: (max_batch_tokens, dim) buffer of the residual stream */
    float *logits;          /* device: (max_logits, vocab_size) buffer of the logits */
    int max_logits;         /* most rows of logits in a slice */
    void **rows;            /* (n_rows) converted weights that the device reads from host memory */
    int64_t n_rows, rows_capacity;
} llm__network;

/* ---- The cache (chapter 4) ---- */

typedef struct llm__tracer {
    llm_trace call; /* trace callback; NULL: none */
    void *user;
    uint64_t step;  /* number of completed steps */
} llm__tracer;

typedef struct llm__pool {
    const llm__tracer *tracer; /* NULL: none */
    int block_size;
    int64_t n_blocks;
    int64_t n_free;      /* number of blocks in no block table, with or without cached content */
    int64_t peak;        /* highest number of blocks in use so far */
    int32_t *references; /* (n_blocks) number of block tables that name each block */
    /* The free list, doubly linked, in allocation order: first the blocks without cached content,
     * then the others, least recently used first. Entry n_blocks links its first and last block. */
    int32_t *before, *after; /* (n_blocks + 1) previous and next free block */
    /* The prefix cache. */
    bool keeps_prefixes;
    uint64_t *identity; /* (n_blocks) identity of the cached content; 0: none */
    uint64_t *parent;   /* (n_blocks) identity of the previous block, or llm__table.root for a first
                         * block */
    int32_t *tokens;    /* (n_blocks, block_size) tokens of the cached content */
    int32_t *buckets;   /* (n_buckets) first block of each hash bucket; -1: none */
    int32_t *next;      /* (n_blocks) next block in the same bucket; -1: none */
    int64_t n_buckets;  /* number of hash buckets, a power of two */
    uint64_t last_identity;
    /* Pending copies for copy-on-write; the device makes them before the next pass. */
    int32_t *copy_from, *copy_to; /* (max_copies) source and destination blocks */
    int n_copies, max_copies;
} llm__pool;

typedef struct llm__table { /* the block table of one sequence */
    int32_t *blocks;        /* (capacity) physical block of logical block i */
    int n_blocks;
    int capacity;
    int n_kept;        /* number of leading full blocks whose content is in the prefix cache */
    uint64_t identity; /* identity of the last of these blocks; `root` if there is none */
    uint64_t root;     /* 0; for a restored request, a unique identity: its blocks may be forged, so
                        * only its own samples can find them in the prefix cache */
    uint64_t request;  /* id of the request that owns the table, for the trace */
    int sample;
} llm__table;

/* ---- Requests and sequences (chapter 1) ---- */

typedef struct llm__request llm__request;

typedef struct llm__sequence { /* one sample of a request */
    llm__request *request;
    int sample;
    llm_state state;
    llm_finish finish; /* LLM_FINISH_NONE until it ends */
    int32_t *tokens;   /* (limit + depth) known tokens, followed during a step by proposed or chosen
                        * tokens */
    int n_tokens;      /* number of known tokens: the prompt and the generated ones */
    int n_cached;      /* number of tokens in the cache: n_cached < n_tokens; in DECODE, n_cached =
                        * n_tokens - 1 */
    int n_drafted;     /* number of tokens in the draft's cache; between steps, n_drafted <=
                        * n_cached */
    int n_seen;        /* number of positions whose logits its hook has received, or whose hidden
                        * states are in request->hidden_sum: n_cached <= n_seen <= n_tokens */
    llm__table table;  /* blocks for at least n_cached tokens; empty unless the state is PREFILL or
                        * DECODE */
    int32_t saved;     /* first of its saved blocks in host memory, linked by
                        * llm__scheduler.swap_next; -1: none */
    int n_saved;       /* number of saved blocks: enough for n_cached tokens, or 0; 0 unless the
                        * state is PREEMPTED */
    int index;         /* index in llm__scheduler.sequences */
    double acceptance; /* moving average of the share of proposals that are accepted */
    llm_stream stream; /* state of the conversion of its tokens to text */
    char *text;        /* text of its events since the last step began, then the text held back */
    size_t text_used;  /* bytes of `text` in events */
    size_t text_held;  /* bytes of `text` held back, which may be the beginning of a stop text */
    float *logprobs;   /* (depth + 1) log probabilities of the chosen tokens */
    /* The current step. All fields but `error` are 0 between steps. */
    int n_scheduled;   /* number of known tokens in the batch: at most n_tokens - n_cached */
    int depth;         /* number of proposals wanted in this step, at most request->depth */
    int n_proposed;    /* number of proposals made */
    int n_rows;        /* number of rows of logits used */
    int n_chosen;      /* number of tokens chosen, from tokens[n_tokens] on: the accepted proposals
                        * and one more token */
    int n_tested;      /* number of proposals tested */
    int n_accepted;    /* number of proposals accepted */
    bool closed;       /* no more tokens can be chosen: a proposal was rejected, or the sequence
                        * ends */
    bool broken;       /* the logits for the next token are not finite */
    char error[128];   /* message of its last event: see llm_event.error */
} llm__sequence;

struct llm__request { /* exists from llm_submit to the step after its end; one allocation */
    uint64_t id;
    int64_t rank;             /* the request with the smallest rank goes first */
    llm_request params;       /* the request as submitted; its pointers point into this
                               * allocation */
    int limit;                /* most tokens of a sequence, including the prompt */
    int depth;                /* most proposals of a sequence in a step */
    int n_live;               /* number of samples that have not ended */
    bool admitted;            /* it has moved from llm__scheduler.waiting to `running` */
    bool forked;              /* the model has processed the prompt, and all samples have started */
    bool restored;            /* created by llm_session_restore */
    double *hidden_sum;       /* (dim) sum of the hidden states so far; NULL: no embedding */
    float *hidden;            /* (2, dim) the last hidden state, and the mean of all so far */
    llm__sequence *sequences; /* (n_samples) sequences; the first computes the prompt, the others
                               * are forked from it */
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
    llm__queue ended;          /* ended requests, whose last events may be unread; freed at the next
                                * step */
    int n_waiting;             /* number of waiting requests */
    int64_t n_live;            /* number of samples, of all requests, that have not ended */
    llm__sequence **sequences; /* (max_sequences) sequences in PREFILL, DECODE or PREEMPTED, in
                                * order of entry */
    int n_sequences;
    int n_preempted;           /* number of these sequences in PREEMPTED */
    int n_places;              /* sum of n_live over the running requests: at most max_sequences */
    int turn;                  /* index of the decoding sequence that llm__select serves first */
    llm__network *networks[2]; /* target and draft (or NULL), whose caches share the block tables */
    char *swap;                /* (n_swap, swap_block_bytes) host memory for the blocks of preempted
                                * sequences */
    int32_t *swap_next;        /* (n_swap) next block in the same list: the list of unused blocks,
                                * or that of a sequence; -1: end */
    int32_t swap_free;         /* first unused block of `swap` */
    int64_t n_swap, n_swap_free;
    size_t swap_block_bytes;   /* bytes of a block in the caches of all networks */
    llm_batch batch;
    llm__sequence **batch_sequences; /* (max_sequences) sequences of the batch */
    int32_t *memory;                 /* one allocation for the arrays of llm_batch: */
    int32_t *tokens, *positions, *slots, *logit_rows; /* (max_batch_tokens) each */
    int32_t *row_sequence;           /* (max_batch_tokens) index in the batch of each logit row's
                                      * sequence */
    int32_t *seq_first, *seq_count;  /* (max_sequences) each */
    int32_t *block_tables;           /* (max_sequences, blocks of a context) */
    double proposal_cost;            /* cost of a proposal, in passes of the target over one row */
    llm_statistics *statistics;      /* the engine's statistics */
} llm__scheduler;

/* ---- Choosing tokens (chapters 2 and 3) ---- */

typedef struct llm__token_logit {
    float logit;
    int32_t id;
} llm__token_logit;

/* A model's output after one token of a sequence: the logits or, if the device has drawn from them,
 * the next token. */
typedef struct llm__outcome {
    struct llm__sequence *sequence;
    int position;        /* position of the input token; the outcome is for the next one */
    const float *logits; /* (vocab_size) host; NULL: the device has drawn a token */
    int32_t id;          /* token that the device has drawn */
    float logprob;
} llm__outcome;

typedef struct llm__sampler { /* scratch memory, one per engine */
    int vocab_size;
    int bits;          /* log2 of the likelihood of the most likely token */
    llm__token_logit *heap; /* (vocab_size) */
    llm__token_logit *kept; /* (vocab_size) tokens that pass the filters, most probable first */
    uint32_t *seen;    /* (vocab_size) number of the last draw that penalized this token */
    uint32_t n_draws;
    llm__outcome *outcomes; /* (max_draws) outcomes of a slice of logits */
    llm_draw *draws;        /* (max_draws) draws that the device makes */
    int32_t *ids;           /* (max_draws) tokens that the device has drawn */
    float *logprobs;
} llm__sampler;

typedef struct llm__speculator {
    llm__network draft;   /* the draft; draft.model NULL: none */
    int max_depth, vocab_size;
    float *logits;        /* (draft.max_logits, vocab_size) the draft's logits, host */
    float *probabilities; /* (max_sequences, max_depth, vocab_size) distributions of the
                           * proposals */
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
    float *hooked;     /* (vocab_size) copy of the logits that a hook may change */
    float *hidden;     /* (max_batch_tokens + 1, dim) host: rows of network.x for embeddings, then
                        * the weights of the final norm */
    llm_event *events; /* (max_events) events of the last step, and of later calls of llm_cancel */
    int n_events, next_event, max_events;
    uint64_t last_id;
    llm_statistics statistics;
    llm_device_state device; /* device counters at engine creation, subtracted from later
                              * readings */
};

/* ---- Forward declarations ---- */

/* [2] Speculation */
static int llm__speculation_depth(const llm__scheduler *s, const llm__sequence *seq);
static int32_t llm__verify(llm__speculator *sp, llm__sampler *sampler, llm__sequence *seq,
                           const float *logits, int32_t own);
static void llm__count_proposal(llm_statistics *statistics, llm__sequence *seq, int i);
static double llm__proposal_cost(const llm_model *target, const llm_model *draft);
static bool llm__speculator_init(llm__speculator *sp, const llm_model *target,
                                 const llm_engine_options *o, int max_logits, llm_error *err);
static void llm__speculator_free(llm__speculator *sp);
/* [3] Sampling */
static bool llm__sampling_check(const llm_sampling *s, llm_error *err);
static uint64_t llm__random_bits(uint64_t seed, uint64_t stream, uint64_t index);
static int32_t llm__sample(llm__sampler *s, const llm_sampling *p, const float *logits,
                           const int32_t *recent, int n_recent, uint64_t stream, uint64_t index);
static bool llm__sampler_init(llm__sampler *s, int vocab_size, int64_t max_draws, llm_error *err);
static void llm__sampler_free(llm__sampler *s);
static void llm__distribution(llm__sampler *s, const llm_sampling *p, const float *logits,
                              const int32_t *recent, int n_recent, float *probabilities);
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
static bool llm__network_load(llm__network *net, const llm_model *model, llm_backend *backend,
                              llm_error *err);
static bool llm__network_prepare(llm__network *net, const llm_engine_options *o, int max_logits,
                                 llm_error *err);
static bool llm__load_cache(llm__network *net, llm_type type, int block_size, int64_t n_blocks,
                            llm_error *err);
static void llm__network_free(llm__network *net);
/* [6] The operations */
static int llm__first_seen(const llm_attention_shape *shape, int position);
static void llm__plain_rmsnorm(const float *x, const float *weight, int64_t n, int64_t dim,
                               float epsilon, float *out);
static size_t llm__value_bytes(llm_type type);
/* [7] Numbers */
static size_t llm__row_bytes(llm_type type, int64_t cols);
static void llm__write_u16(void *p, uint16_t x);
static uint16_t llm__f32_to_f16(float x);
static float llm__f16_to_f32(uint16_t half);
static uint16_t llm__read_u16(const void *p);
/* [8] Files */
static int llm__compare_strings(const llm_string *a, const llm_string *b);
static void *llm__grow(void *items, int64_t count, int64_t *capacity, size_t size, const char *what,
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
 * n_tokens, the number of known tokens (the prompt and the generated ones), and n_cached, the
 * number of those whose keys and values are in the cache. A step runs the model over some of the
 * others: in PREFILL there may be many, in DECODE there is one, the last. A random number depends
 * on the position, not on earlier steps. So nothing has to be undone when a sequence is preempted:
 * without its blocks, n_cached is 0, the cache is computed again, and the output stays the same.
 *
 * When the pool is empty, the newest sequence is preempted. The oldest is never preempted for
 * another, and each sequence alone fits into the pool (llm_submit checks this). So at least one
 * sequence always advances, and all of them end.
 *
 * A step that fails commits the sequences whose tokens were chosen before the failure. The others
 * keep their tokens and n_cached, and the next step repeats their work. Admissions, preemptions and
 * allocations of blocks are not undone.
 * ================================================================================== */

static bool llm__schedule(llm_engine *e, llm_error *err);
static bool llm__propose(llm_engine *e, llm_error *err); /* chapter 2; without speculation it does
                                                          * nothing */
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
        /* The logits are computed in slices, to limit their memory; usually there is one slice. */
        int rows = ok ? llm__build_batch(s) : 0;
        for (int first = 0; ok && first < rows; first += e->network.max_logits)
            ok = llm__forward(e, first, err) && llm__choose(e, first, err);
        llm__commit(e, ok);
        e->statistics.step_seconds += llm_seconds() - start;
    }
    return llm__end_step(e, ok, work, err);
}

/* ---- States ---------------------------------------------------------------------------------- */

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

/* The only function that changes a sequence's state. count: see LLM_TRACE_STATE. */
static void llm__set_state(llm__scheduler *s, llm__sequence *seq, llm_state state, int count) {
    llm_trace_event event = llm__trace_event(LLM_TRACE_STATE, seq->request->id, seq->sample, 0,
                                             count);
    event.from = seq->state;
    event.state = state;
    s->n_preempted += (state == LLM_PREEMPTED) - (seq->state == LLM_PREEMPTED);
    seq->state = state;
    llm__trace(s->tracer, event);
}

/* Insert a request in rank order. Of equal ranks the newer goes first, so that it overtakes exactly
 * 64 x priority requests. */
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

/* Add a sequence to those that take part in steps. */
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

/* Remove ended sequences from the list. */
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

/* ---- Submit ---------------------------------------------------------------------------------- */

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

/* Give a new request its id, and add it to the waiting requests in rank order. */
static void llm__wait(llm_engine *e, llm__request *request) {
    llm__scheduler *s = &e->scheduler;
    request->id = ++e->last_id;
    /* A priority level is worth 64 ids. Later requests have larger ids, so only a limited number of
     * them can overtake this one: no request starves. */
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

/* ---- Schedule: resume, admit, select, secure ------------------------------------------------- */

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

/* Save a sequence's first n > 0 blocks in host memory, which has room for them. */
static bool llm__swap_out(llm__scheduler *s, llm__sequence *seq, int n, llm_error *err) {
    int32_t host = s->swap_free, last = -1;
    for (int i = 0; i < n; i++) {
        if (!llm__swap_copy(s, seq->table.blocks[i], llm__swap_place(s, host), true, err))
            return false;
        last = host;
        host = s->swap_next[host];
    }
    seq->saved = s->swap_free;
    seq->n_saved = n;
    s->swap_free = host;
    s->n_swap_free -= n;
    s->swap_next[last] = -1;
    return true;
}

/* Free the host memory of a sequence's saved blocks. */
static void llm__free_saved(llm__scheduler *s, llm__sequence *seq) {
    for (; seq->n_saved > 0; seq->n_saved--, s->n_swap_free++) {
        int32_t host = seq->saved;
        seq->saved = s->swap_next[host];
        s->swap_next[host] = s->swap_free;
        s->swap_free = host;
    }
}

/* Copy a sequence's saved blocks back into the pool, which has room for them. */
static bool llm__swap_in(llm__scheduler *s, llm__sequence *seq, llm_error *err) {
    bool ok = llm__table_grow(&s->pool, &seq->table, 0, seq->n_cached);
    int32_t host = seq->saved;
    for (int i = 0; ok && i < seq->n_saved; i++, host = s->swap_next[host])
        ok = llm__swap_copy(s, seq->table.blocks[i], llm__swap_place(s, host), false, err);
    if (ok) llm__free_saved(s, seq);
    else llm__table_clear(&s->pool, &seq->table);
    return ok;
}

/* Preempt a sequence and free its blocks. If the options allow it and there is room, their content
 * is saved in host memory; otherwise it is computed again later from the tokens. */
static bool llm__preempt(llm__scheduler *s, llm__sequence *seq, llm_error *err) {
    int64_t used = llm__blocks_for(&s->pool, seq->n_cached);
    if (used > 0 && used <= s->n_swap_free) {
        if (!llm__swap_out(s, seq, (int)used, err)) return false;
    } else {
        seq->n_cached = seq->n_drafted = 0;
    }
    llm__table_clear(&s->pool, &seq->table);
    seq->n_scheduled = seq->depth = 0;
    s->statistics->preemptions++;
    llm__set_state(s, seq, LLM_PREEMPTED, seq->n_saved);
    return true;
}

/* Number of blocks for a sequence's known tokens, the next one, and the proposals after it. */
static int64_t llm__blocks_wanted(const llm__scheduler *s, const llm__sequence *seq) {
    int64_t next = (int64_t)seq->n_tokens + 1;
    return llm__blocks_for(
        &s->pool, llm__min(next + seq->request->depth, llm__max(seq->request->limit, next)));
}

/* Number of free blocks, less those that the running sequences may soon need. */
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

/* Resume preempted sequences, the oldest first. The first that does not fit ends the loop, so that
 * newer ones do not starve it. */
static bool llm__resume(llm__scheduler *s, llm_error *err) {
    for (int i = 0; i < s->n_sequences && s->n_preempted > 0; i++) {
        llm__sequence *seq = s->sequences[i];
        if (seq->state != LLM_PREEMPTED) continue;
        if (llm__blocks_wanted(s, seq) > llm__blocks_spare(s)) break;
        if (seq->n_saved > 0) {
            if (!llm__swap_in(s, seq, err)) return false;
        } else { /* positions that a hook or an embedding has not seen must be computed */
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

/* Admit waiting requests in rank order, while there is room for the next request's prompt and one
 * more token. A request is admitted with all its samples; the first computes the prompt. */
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
        if (request->restored) { /* its samples continue as after a preemption */
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

/* Decide how many tokens of each sequence are in the step. Decoding sequences come first, so that
 * prompts do not delay them; prompts share the rest of the budget. If not all decoding sequences
 * fit, `turn` rotates which of them is first. */
static void llm__select(llm__scheduler *s) {
    int budget = s->options->max_batch_tokens, n = s->n_sequences;
    bool chunked = s->options->chunked_prefill;
    for (int pass = 0; pass < 2; pass++) {
        bool prefill = chunked ? pass == 1 : pass == 0; /* a whole prompt might never fit after
                                                         * decoding sequences */
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

/* Give the selected sequences the blocks that they will write to, the oldest first. When the pool
 * is empty, the newest sequence that has blocks is preempted; it may be the one that needs more. */
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

/* Make the pending copies of copy-on-write. The block tables already name the copies, so copies
 * that fail stay pending, and the next step makes them first. */
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

/* ---- Forward --------------------------------------------------------------------------------- */

static void llm__batch_clear(llm__scheduler *s) {
    s->batch.n_tokens = s->batch.n_sequences = s->batch.n_logits = 0;
}

/* Add the tokens first .. first + count - 1 of a sequence to the batch, with logits from position
 * `wanted` on. */
static void llm__batch_add(llm__scheduler *s, llm__sequence *seq, int first, int count,
                           int wanted) {
    llm_batch *b = &s->batch;
    s->batch_sequences[b->n_sequences] = seq;
    s->seq_first[b->n_sequences] = b->n_tokens;
    s->seq_count[b->n_sequences] = count;
    for (int p = first; p < first + count; p++) {
        int t = b->n_tokens++;
        s->tokens[t] = seq->tokens[p];
        s->positions[t] = p;
        s->slots[t] = llm__table_slot(&s->pool, &seq->table, p);
        if (p < wanted) continue;
        s->row_sequence[b->n_logits] = b->n_sequences;
        s->logit_rows[b->n_logits++] = t;
    }
    b->n_sequences++;
}

/* Copy the block tables into the batch, with the smallest possible stride. */
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

/* Build the target's batch: the scheduled tokens, and the proposals after them. Returns 0 if
 * nothing is scheduled, else the number of rows of logits wanted, but at least 1. */
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

/* Number of rows of logits in the slice that begins with row `first`. */
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

/* ---- Choose ---------------------------------------------------------------------------------- */

/* Can the device draw this sequence's tokens? A hook needs the logits on the host, and sampled
 * speculation compares whole distributions there. */
static bool llm__device_draws(const llm__sequence *seq) {
    const llm_request *r = &seq->request->params;
    /* number of proposals to verify; with a draft, n_proposed may still grow to `depth` */
    int tested = r->lookup ? seq->n_proposed : seq->depth;
    return !r->logits_hook && (r->sampling.temperature == 0 || tested == 0);
}

/* The device's arguments for drawing a sequence's token after `position` from row `row`. */
static llm_draw llm__draw_of(const llm__sequence *seq, int row, int position) {
    const llm_request *r = &seq->request->params;
    int n = position + 1, window = r->sampling.penalty_window;
    llm_draw draw;
    memset(&draw, 0, sizeof draw);
    draw.row = row;
    draw.sampling = r->sampling;
    draw.random = llm__random_bits(r->sampling.seed, (uint64_t)seq->sample,
                                   (uint64_t)(n - r->n_prompt));
    draw.n_recent = r->sampling.repetition_penalty == 1 ? 0 : window && window < n ? window : n;
    draw.recent = seq->tokens + n - draw.n_recent;
    return draw;
}

/* Copy n rows of logits to `host`, whose rows have `vocab` entries. A draft's rows may have another
 * width: models with the same vocabulary may pad it to different widths. */
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

/* Fetch a model's outcomes for a slice of rows: one per row, but one per sample for the last row of
 * a prompt. The device draws tokens where it can; the other rows of logits are copied to `host`
 * (max_logits, the target's vocab_size). Returns the number of outcomes; -1 on failure. */
static int llm__fetch(llm__sampler *sampler, const llm__scheduler *s, const llm__network *net,
                      int first, float *host, llm_error *err) {
    llm_backend *b = net->backend;
    bool device = b->sample && !s->options->host_sampling;
    int n = llm__slice_rows(net, &s->batch, first), n_outcomes = 0, n_draws = 0;
    int64_t vocab = sampler->vocab_size;
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
            o->logits = drawn ? NULL : host + row * vocab;
            if (drawn) sampler->draws[n_draws++] = llm__draw_of(o->sequence, row, position);
        }
    }
    if (n_draws && !b->sample(b->context, net->logits, net->model->config.vocab_size,
                              sampler->draws, n_draws, sampler->ids, sampler->logprobs, err))
        return -1;
    for (int i = 0, drawn = 0; i < n_outcomes; i++) {
        if (sampler->outcomes[i].logits) continue;
        /* an id in a draft's padding becomes 0 */
        sampler->outcomes[i].id = sampler->ids[drawn] < vocab ? sampler->ids[drawn] : 0;
        sampler->outcomes[i].logprob = sampler->logprobs[drawn++];
    }
    return n_outcomes;
}

/* Choose a sequence's next token, and write it after the known ones. llm__commit makes it a known
 * token. */
static void llm__choose_token(llm_engine *e, const llm__outcome *outcome) {
    llm__sequence *seq = outcome->sequence;
    const llm__request *request = seq->request;
    const llm_request *r = &request->params;
    const float *logits = outcome->logits;
    int vocab = e->model->config.vocab_size, n = seq->n_tokens + seq->n_chosen;
    if (seq->closed) return;
    seq->n_rows++;
    if (r->logits_hook) {
        memcpy(e->hooked, logits, (size_t)vocab * sizeof(float));
        r->logits_hook(r->user, request->id, seq->sample, outcome->position, e->hooked);
        logits = e->hooked;
    }
    /* the row is for the hook only */
    if (outcome->position < seq->n_tokens - 1 || request->limit == r->n_prompt) return;
    int32_t id = outcome->id;
    if (seq->n_chosen < seq->n_proposed)
        /* chapter 2: test a proposal */
        id = llm__verify(&e->speculator, &e->sampler, seq, logits, id);
    else if (logits)
        id = llm__sample(&e->sampler, &r->sampling, logits, seq->tokens, n, (uint64_t)seq->sample,
                         (uint64_t)(n - r->n_prompt));
    float logprob = outcome->logits ? llm_logprob(outcome->logits, vocab, id) : outcome->logprob;
    /* a hook may choose a token of probability 0 */
    seq->broken = !(fabsf(logprob) <= FLT_MAX) && !r->logits_hook;
    seq->closed = seq->closed || seq->broken ||
                  (!r->ignore_end && llm_tokenizer_is_end(e->model->tokenizer, id));
    if (seq->broken) return;
    seq->tokens[n] = id;
    seq->logprobs[seq->n_chosen++] = logprob;
}

/* Copy the residual stream of requests that want an embedding to the host. */
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
    e->statistics.forward_seconds += middle - start; /* includes the time waiting for the device */
    e->statistics.sampling_seconds += llm_seconds() - middle;
    return n >= 0;
}

/* ---- Commit ---------------------------------------------------------------------------------- */

/* Number of tokens of a sequence in the cache (with a draft: in both caches). */
static int llm__tokens_known(const llm__scheduler *s, const llm__sequence *seq) {
    return s->networks[1] ? (int)llm__min(seq->n_drafted, seq->n_cached) : seq->n_cached;
}

/* Add the full blocks of a sequence's cached tokens to the prefix cache. */
static void llm__keep_prefix(llm__scheduler *s, llm__sequence *seq) {
    llm__table_keep(&s->pool, &seq->table, seq->tokens, llm__tokens_known(s, seq));
}

/* Start all samples from the blocks of the prompt, which is in the cache. */
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

/* Add a sequence's chosen tokens to its known tokens, and emit an event for each. */
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
        finish = llm__emit_event(e, seq, id, seq->logprobs[i], i < seq->n_accepted, finish);
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

/* Update a sequence after a pass: its scheduled tokens and its accepted proposals (all chosen
 * tokens but the last) are now in the cache. */
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

/* Add the final hidden states of a sequence's tokens in this step to its request's sum. x: the
 * residual stream of these tokens */
static void llm__commit_hidden(llm_engine *e, llm__sequence *seq, const float *x) {
    llm__request *request = seq->request;
    const llm_config *c = &e->model->config;
    const float *norm = e->hidden + (int64_t)e->options.max_batch_tokens * c->dim;
    for (int p = seq->n_cached; p < seq->n_cached + seq->n_scheduled; p++, x += c->dim) {
        if (p < seq->n_seen) continue; /* already added before a preemption or a failure */
        seq->n_seen++;
        llm__plain_rmsnorm(x, norm, 1, c->dim, c->norm_epsilon, request->hidden);
        for (int i = 0; i < c->dim; i++) {
            request->hidden_sum[i] += request->hidden[i];
            request->hidden[c->dim + i] = (float)(request->hidden_sum[i] / seq->n_seen);
            seq->broken = seq->broken || !(fabsf(request->hidden[i]) <= FLT_MAX);
        }
    }
}

/* Apply the result of a step. If the step failed (!ok), only sequences whose tokens were chosen
 * advance. */
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
            if (ok || seq->n_chosen || seq->broken) llm__commit_sequence(e, seq);
        }
        /* the draft may have processed rejected proposals */
        seq->n_drafted = (int)llm__min(seq->n_drafted, seq->n_cached);
        seq->n_scheduled = seq->depth = seq->n_proposed = 0;
        seq->n_rows = seq->n_chosen = seq->n_tested = seq->n_accepted = 0;
        seq->closed = seq->broken = false;
    }
    llm__remove_ended(s);
    e->statistics.sampling_seconds += llm_seconds() - start;
    if (ok && any) e->tracer.step = ++e->statistics.steps;
}

/* ---- Events ---------------------------------------------------------------------------------- */

/* Offset in text (n bytes) of the first of the request's stop texts; n if there is none. whole:
 * find a complete stop text; else one that the end of the text cuts off. */
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
 * the stream's text. It stays valid until the next step. Returns whether a stop text was found. */
static bool llm__event_text(llm_engine *e, llm__sequence *seq, llm_event *event) {
    const llm_tokenizer *tokenizer = e->model->tokenizer;
    const llm_request *r = &seq->request->params;
    char *text = seq->text + seq->text_used;
    size_t n = seq->text_held;
    if (event->token >= 0) n += llm_stream_decode(tokenizer, &seq->stream, event->token, text + n);
    if (event->finish) n += llm_stream_decode(tokenizer, &seq->stream, -1, text + n);
    size_t given = llm__find_stop(r, text, n, true);
    bool stopped = given < n;
    /* hold back what may become a stop text */
    if (!stopped && !event->finish) given = llm__find_stop(r, text, n, false);
    event->text = text;
    event->text_length = given;
    seq->text_used += given;
    seq->text_held = stopped ? 0 : n - given;
    return stopped;
}

/* Emit an event for a token (-1: none). finish: why the sequence ends, if it does. Returns the
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
        llm__fail(err, LLM_ERROR_ARGUMENT, "no request %llu runs or waits here (it may have ended)",
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

/* Begin a step: discard the events since the last step began, and free the ended requests. */
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

#ifdef LLM_DEBUG /* the tests define LLM_DEBUG, and this check of all invariants: see
                  * tests/invariants.h */
static bool llm__check_invariants(llm_engine *e, llm_error *err);
#else
static bool llm__check_invariants(llm_engine *e, llm_error *err) {
    return (void)e, (void)err, true;
}
#endif

/* End a step. Returns the result of llm_step. */
static int llm__end_step(llm_engine *e, bool ok, bool worked, llm_error *err) {
    ok = llm__check_invariants(e, err) && ok;
    int result = ok ? worked : -1;
    llm__trace(&e->tracer, llm__trace_event(LLM_TRACE_STEP_END, 0, 0, 0, result));
    return result;
}

/* ---- Creation -------------------------------------------------------------------------------- */

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

/* Check that low <= value <= high. */
static bool llm__in_range(const char *name, int64_t value, int64_t low, int64_t high,
                          llm_error *err) {
    return (value >= low && value <= high) ||
           llm__refuse(err, LLM_ERROR_ARGUMENT, name, " is %lld: it must be from %lld to %lld",
                       (long long)value, (long long)low, (long long)high);
}

/* Check the options, and set those that the caller left to the engine. */
static bool llm__engine_options(llm_engine_options *o, const llm_model *model, llm_error *err) {
    const llm_config *c = &model->config;
    const char *note = model->context_note;
    if (o->context_length < 0 || o->context_length > c->context_length)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "context_length",
                           " is %d: the model was trained for 1 to %d tokens%s%s",
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

/* Most blocks of a pool whose size the engine chooses, unless all sequences together can use more.
 * The host needs about a hundred bytes per block, and a large GPU has room for 10^8 blocks of a
 * small model. */
enum { LLM__MANY_BLOCKS = 1 << 20 };

/* Choose the number of blocks in the pool: what fits into cache_bytes; if that is 0, what fits,
 * with the draft's cache, into the share of the device memory; without a device, what all sequences
 * can use, up to 1 GiB or one context. */
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
                      "%s: %s of device memory are free after weights and activations: too little "
                      "for a cache, of which one block takes %s; weights of a smaller type or "
                      "smaller steps leave more",
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

/* Number of rows of logits in a slice: as many as fit into 16 MB, and at least one. A device that
 * draws tokens gets a row for every sequence, because each further slice costs it another pass over
 * the output matrix. */
static int llm__engine_logits(const llm_config *c, const llm_engine_options *o) {
    int64_t rows = llm__max((16 << 20) / (int64_t)sizeof(float) / c->vocab_size, 1);
    if (o->backend->sample) rows = llm__max(rows, o->max_sequences);
    return (int)llm__min(rows, o->max_batch_tokens);
}

/* Allocate the host memory for preempted blocks, once, so that steps allocate nothing. */
static bool llm__swap_init(llm__scheduler *s, llm_error *err) {
    const llm_engine_options *o = s->options;
    for (int i = 0; i < 2; i++)
        if (s->networks[i]) s->swap_block_bytes += llm__block_bytes(&s->networks[i]->cache);
    if (o->preempt != LLM_PREEMPT_SWAP) return true;
    uint64_t n = o->swap_bytes / s->swap_block_bytes;
    s->n_swap = s->n_swap_free = n > INT32_MAX ? INT32_MAX : (int64_t)n;
    s->swap = (char *)llm__aligned_new((size_t)s->n_swap * s->swap_block_bytes,
                                       "preempted blocks (LLM_PREEMPT_RECOMPUTE needs none)", err);
    s->swap_next = s->swap ? (int32_t *)llm__new((size_t)s->n_swap, sizeof(int32_t),
                                                 "the list of preempted blocks", err)
                           : NULL;
    if (!s->swap_next) return llm__blame(err, "swap_bytes");
    for (int64_t i = 0; i < s->n_swap; i++)
        s->swap_next[i] = i + 1 < s->n_swap ? (int32_t)(i + 1) : -1;
    return true;
}

static bool llm__scheduler_init(llm__scheduler *s, llm_engine *e, int64_t n_blocks,
                                llm_error *err) {
    const llm_engine_options *o = s->options = &e->options;
    uint64_t n = (uint64_t)o->max_sequences, t = (uint64_t)o->max_batch_tokens, tables = 0,
             numbers = 0;
    if (!llm__multiply(n, (uint64_t)llm__divide_up(o->context_length, o->block_size), &tables) ||
        !llm__add(tables, 5 * t + 2 * n, &numbers))
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "max_sequences", " is too large: %d",
                           o->max_sequences);
    s->statistics = &e->statistics;
    s->tracer = &e->tracer;
    s->networks[0] = &e->network;
    s->networks[1] = o->draft ? &e->speculator.draft : NULL;
    s->proposal_cost = llm__proposal_cost(e->model, o->draft);
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
        !llm__swap_init(s, err))
        return false;
    s->pool.tracer = s->tracer;
    s->tokens = s->memory;
    s->positions = s->tokens + t;
    s->slots = s->positions + t;
    s->logit_rows = s->slots + t;
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
    /* the caches come last: their size may depend on the memory that is left */
    if (!llm__network_load(&e->network, e->model, o->backend, err) ||
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
    e->hidden = (float *)llm__new((rows + 1) * dim, sizeof(float), "hidden states", err);
    if (!e->logits || !e->hooked || !e->hidden) return false;
    const llm_tensor *norm = e->model->output_norm;
    llm_type_find(norm->type)->unpack(norm->data, e->hidden + rows * dim, c->dim);
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
    llm__aligned_free(s->swap);
    LLM_FREE(s->swap_next);
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

/* ---- Checks of a request, and its memory ----------------------------------------------------- */

static bool llm__check_stops(const llm_request *r, llm_error *err) {
    if (r->n_stop < 0 || (r->n_stop > 0 && !r->stop))
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "n_stop", " is %d, and stop is %s", r->n_stop,
                           r->stop ? "given" : "NULL");
    for (int i = 0; i < r->n_stop; i++)
        if (!r->stop[i] || !r->stop[i][0])
            return llm__refuse(err, LLM_ERROR_ARGUMENT, "stop", " text %d is empty", i);
    return true;
}

static bool llm__check_speculation(const llm_engine *e, const llm_request *r, llm_error *err) {
    const llm_engine_options *o = &e->options;
    if (r->speculate == 0) return true;
    if (r->speculate < LLM_SPECULATE_AUTO || r->speculate > o->max_speculation)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "speculate",
                           " is %d: it must be from 0 to %d (the engine's max_speculation), or "
                           "LLM_SPECULATE_AUTO",
                           r->speculate, o->max_speculation);
    if (!o->draft && !r->lookup)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "speculate",
                           " is %d: this needs a draft model in the engine, or lookup in the "
                           "request",
                           r->speculate);
    if (r->logits_hook)
        return llm__refuse(err, LLM_ERROR_UNSUPPORTED, "speculate",
                           " is %d: speculation cannot run with a logits hook", r->speculate);
    return true;
}

static bool llm__check_request(const llm_engine *e, const llm_request *r, llm_error *err) {
    int context = e->options.context_length, longest = e->model->config.context_length,
        vocab = e->model->config.vocab_size;
    if (!r->prompt || r->n_prompt < 1)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "prompt",
                           " is empty: it needs at least one token (BOS, say)");
    if (r->max_tokens < -1)
        return llm__refuse(err, LLM_ERROR_ARGUMENT, "max_tokens",
                           " is %d: it must be -1 (to the end of the context) or more",
                           r->max_tokens);
    if (!llm__in_range("n_samples", r->n_samples, 1, e->options.max_sequences, err) ||
        !llm__sampling_check(&r->sampling, err) || !llm__check_stops(r, err) ||
        !llm__check_speculation(e, r, err))
        return false;
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
                                             : " (the model has no longer context)",
                           *note ? "; " : "", note);
    }
    for (int i = 0; i < r->n_prompt; i++)
        if (r->prompt[i] < 0 || r->prompt[i] >= vocab)
            return llm__refuse(err, LLM_ERROR_ARGUMENT, "prompt",
                               " token %d is %d: ids go from 0 to %d", i, r->prompt[i], vocab - 1);
    return true;
}

/* Make room for the present events, and for those that the live samples can add before the next
 * step: for each sample a token, its accepted proposals and a cancellation. */
static bool llm__reserve_events(llm_engine *e, int n_more, llm_error *err) {
    int64_t wanted = e->n_events +
                     (e->scheduler.n_live + n_more) * (e->options.max_speculation + 2);
    if (wanted <= e->max_events) return true;
    if (wanted > INT32_MAX / 2)
        return llm__fail(err, LLM_ERROR_CAPACITY, "too many requests wait in this engine");
    wanted *= 2;
    llm_event *events = (llm_event *)LLM_REALLOC(e->events, (size_t)wanted * sizeof *events);
    if (!events)
        return llm__no_memory(err, (uint64_t)wanted * sizeof *events, "events");
    e->events = events;
    e->max_events = (int)wanted;
    return true;
}

/* Take a piece of a request's allocation, aligned to 8 bytes. base NULL: only add up the size. */
static void *llm__carve(char *base, uint64_t *used, uint64_t count, size_t size) {
    void *piece = base ? base + *used : NULL;
    *used += (count * size + 7) / 8 * 8;
    return piece;
}

/* Place all memory of a request's samples after the request, so that steps allocate nothing. text:
 * bytes for the text of a step's events. Returns the total number of bytes. */
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
        seq->text = (char *)llm__carve(base, &used, text, 1);
    }
    if (r->embedding) {
        request->hidden_sum = (double *)llm__carve(base, &used, (uint64_t)dim, sizeof(double));
        request->hidden = (float *)llm__carve(base, &used, 2 * (uint64_t)dim, sizeof(float));
    }
    request->sequences = all;
    if (base) request->params.stop = (const char *const *)stop;
    return used;
}

/* Number of bytes for the text of a step's events: the text of each token that may be accepted, and
 * the text held back. */
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
    llm__request plan; /* to compute the size */
    memset(&plan, 0, sizeof plan);
    plan.params = *r;
    plan.limit = r->n_prompt + (r->max_tokens < 0 ? room : (int)llm__min(r->max_tokens, room));
    if (r->embedding) plan.limit = r->n_prompt;
    plan.depth = r->speculate == LLM_SPECULATE_AUTO ? o->max_speculation : r->speculate;
    plan.depth = (int)llm__min(plan.depth, o->max_batch_tokens - 1);
    plan.n_live = r->n_samples;
    int64_t blocks = llm__blocks_for(pool, plan.limit);
    if (blocks > pool->n_blocks) {
        uint64_t block = llm__block_bytes(&e->network.cache);
        llm__refuse(err, LLM_ERROR_CAPACITY, "cache_bytes",
                    " is %s (%lld blocks of %d tokens), and the request may need %s (%lld blocks): "
                    "ask for fewer tokens, or give the cache more",
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
        seq->saved = -1;
        seq->table.capacity = (int)blocks;
        seq->table.sample = i;
        seq->acceptance = 0.7;      /* initial estimate */
        seq->stream.started = true; /* the text continues a prompt: keep its first space */
        seq->n_tokens = r->n_prompt;
        memcpy(seq->tokens, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    }
    request->params.prompt = request->sequences[0].tokens;
    return request;
}

/* ---- Sessions --------------------------------------------------------------------------------
 * A session is a head, a request's settings and, for each sample, its tokens, some counts and its
 * full blocks. (A partly filled block may still hold data of other requests, so it is not saved.)
 * Each llm__move function can write or read its part of a session. A restored request continues
 * like a preempted one, and finds its blocks in the prefix cache; blocks that did not fit into the
 * pool are computed again. */

typedef struct llm__session {
    char *data;  /* NULL: only count the bytes to write */
    size_t used; /* bytes written or read */
    size_t size; /* bytes of the session to read; 0: write one */
} llm__session;

typedef struct llm__session_head {
    char name[8];      /* name and version of the format */
    uint64_t engine;   /* hash of the models and their cache layouts: see llm__head_of */
    uint64_t checksum; /* hash of all bytes after the head */
} llm__session_head;

/* The head of a session that fits this engine. `engine` is a hash of the models' shapes, the first
 * bytes of their tensors, and the layout of their caches. data: the whole session, for the
 * checksum; NULL: none */
static llm__session_head llm__head_of(const llm__scheduler *s, const char *data, size_t size) {
    llm__session_head head = {"llm 1", s->swap_block_bytes, 0};
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

/* Write or read n bytes. False: fewer than n bytes are left to read. */
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
    int *const ints[] = {&flags,     &r->n_prompt, &r->max_tokens, &r->n_samples,
                         &r->n_stop, &r->priority, &r->speculate};
    bool ok = llm__move_ints(m, ints, 7) && llm__move(m, &r->sampling, sizeof r->sampling);
    r->ignore_end = flags & 1;
    r->lookup = flags & 2;
    *forked = flags & 4;
    return ok;
}

/* Write or read a sample, except its *n_blocks blocks. False: the values read are not valid. */
static bool llm__move_sample(llm_engine *e, llm__session *m, llm__sequence *seq, int *n_blocks) {
    const llm__request *request = seq->request;
    const llm_request *r = &request->params;
    int finish = (int)seq->finish, held = (int)seq->text_held, longest = 1, n = r->n_prompt;
    int *const ints[] = {&finish, &seq->n_tokens, &seq->n_seen, &held, &seq->stream.n_held,
                         n_blocks};
    if (!llm__move_ints(m, ints, 6) || !llm__move(m, seq->stream.held, sizeof seq->stream.held) ||
        !llm__move(m, &seq->acceptance, sizeof seq->acceptance))
        return false;
    bool live = !finish, forked = request->forked;
    for (int i = 0; i < r->n_stop; i++) longest = (int)llm__max(longest, (int)strlen(r->stop[i]));
    if (finish < 0 || finish > (forked ? LLM_FINISH_ERROR : LLM_FINISH_NONE) ||
        seq->n_tokens < n + (live && forked) ||
        seq->n_tokens > (forked ? request->limit - live : n) || *n_blocks < 0 ||
        *n_blocks > (live ? (seq->n_tokens - 1) / e->options.block_size : 0) || seq->n_seen < 0 ||
        seq->n_seen > seq->n_tokens || held < 0 || held >= longest ||
        !(seq->acceptance >= 0 && seq->acceptance <= 1) ||
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
    for (int i = 0; i < r.n_stop; i++)
        llm__move(m, (void *)(uintptr_t)r.stop[i], strlen(r.stop[i]) + 1);
    for (int i = 0; i < 2 * r.n_samples; i++) { /* the blocks come last */
        llm__sequence *seq = &request->sequences[i % r.n_samples];
        int32_t host = seq->saved;
        int n = seq->finish ? 0 : llm__tokens_known(s, seq) / e->options.block_size;
        if (i < r.n_samples) llm__move_sample(e, m, seq, &n);
        for (int k = 0; i >= r.n_samples && k < n; k++, m->used += s->swap_block_bytes) {
            char *to = m->data + m->used, *from = seq->n_saved ? llm__swap_place(s, host) : NULL;
            if (from) host = s->swap_next[host];
            if (m->data && from) memcpy(to, from, s->swap_block_bytes);
            if (m->data && !from && !llm__swap_copy(s, seq->table.blocks[k], to, true, err))
                return false;
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
        llm__fail(err, LLM_ERROR_UNSUPPORTED, "a request for an embedding cannot be saved");
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

/* Create the request of a session, without its blocks. r holds the settings that are not saved: the
 * hook and `user`. Returns NULL if the session is damaged, or with the error set. */
static llm__request *llm__restore(llm_engine *e, llm__session *m, llm_request r, llm_error *err) {
    bool forked = false, ok = llm__move_settings(m, &r, &forked);
    size_t left = m->size - m->used, n_blocks = 0;
    if (!ok || r.n_prompt < 1 || (size_t)r.n_prompt > left / sizeof(int) || r.n_stop < 0 ||
        (size_t)r.n_stop > left)
        return NULL;
    r.prompt = (const int32_t *)(void *)(m->data + m->used);
    m->used += (size_t)r.n_prompt * sizeof(int);
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
    /* Run the pending copies of a failed step now: later they would overwrite restored blocks. */
    if (m.data && size > sizeof head && llm__run_copies(e, err)) {
        memcpy(m.data, session, size); /* the copy is aligned */
        memcpy(&head, session, sizeof head);
        right = llm__head_of(s, m.data, size);
        bool whole = !memcmp(head.name, right.name, 8) && head.checksum == right.checksum;
        if (whole && head.engine == right.engine) request = llm__restore(e, &m, r, err);
        else if (whole)
            llm__fail(err, LLM_ERROR_UNSUPPORTED,
                      "the session is of an engine with another model, draft model, cache_type, "
                      "block_size or kind of device");
    }
    if (request) llm__wait(e, request);
    else if (err && err->status == LLM_OK)
        llm__fail(err, LLM_ERROR_FORMAT, "this is no session of this version, or it is damaged");
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

/* ---- Statistics ------------------------------------------------------------------------------ */

/* Number of slots of the pool that hold a token. Each of the k sequences that share a block counts
 * 1/k of it. */
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
 * accepted. The first proposal that it rejects is replaced by the target's own choice, and the rest
 * are dropped:
 *
 *     position           n-2    n-1   n     n+1   n+2            n = n_tokens
 *     known              the    cat
 *     draft, K = 3                    sat   on    a            3 small passes
 *     target                    sat   on    the   ...          1 large pass over cat, sat, on, a
 *     result                          sat   on    the          2 accepted, 1 corrected
 *
 * With greedy choice, "agree" means the same token. With sampling (Leviathan et al. 2023, "Fast
 * Inference from Transformers via Speculative Decoding"; Chen et al. 2023), a proposal d drawn from
 * the draft's distribution q is accepted with probability min(1, p(d)/q(d)), where p is the
 * target's; else the token is drawn from max(0, p - q), normalised. A token t is then chosen with
 * probability q(t) min(1, p(t)/q(t)) + (mass rejected) x residual(t) = min(p, q) + max(0, p - q) =
 * p(t), whatever q is. p and q are the distributions after penalties, temperature and filters.
 *
 * If each proposal is accepted with probability a, a step gives 1 + a + ... + a^K tokens on
 * average.
 *
 * Speculation plugs into the life of a request at two places. Before the pass, llm__propose writes
 * up to `depth` tokens after a sequence's known ones; the batch includes them. After the pass,
 * llm__verify replaces llm__sample for the rows of those tokens. (A tree of proposals would have
 * several tokens at one position, and llm__verify would follow a path. Heads that read the residual
 * stream would propose in llm__propose, from rows of the previous pass.) llm__commit only reads
 * counts: tokens chosen, proposals accepted.
 *
 * The draft's cache uses the same block tables as the target's. A rejected proposal leaves garbage
 * in slots after the end of the sequence: no earlier position reads them, and the right tokens
 * overwrite them.
 * ================================================================================== */

/* ---- How many proposals ---------------------------------------------------------------------- */

/* The assumed cost of one more row in a pass of the target; the pass over one row costs 1. It is a
 * constant, not measured, so that the depth, and thus a sampled text, is the same on every run. */
#define LLM__ROW_COST 0.1

/* The cost of a proposal: a row of the target's pass, and a pass of the draft, whose time depends
 * on the bytes it reads. */
static double llm__proposal_cost(const llm_model *target, const llm_model *draft) {
    double step = (double)llm_model_step_bytes(target);
    return LLM__ROW_COST + (draft ? (double)llm_model_step_bytes(draft) / step : 0);
}

/* Number of tokens to propose for a sequence. It depends on the sequence alone, not on time or
 * other sequences, because it determines which random number each token uses. */
static int llm__speculation_depth(const llm__scheduler *s, const llm__sequence *seq) {
    const llm__request *request = seq->request;
    /* a step chooses one token after the proposals */
    int most = (int)llm__min(request->depth, request->limit - seq->n_tokens - 1);
    if (request->params.speculate != LLM_SPECULATE_AUTO) return (int)llm__max(most, 0);
    /* the depth with the most tokens per cost */
    double cost = request->params.lookup ? LLM__ROW_COST : s->proposal_cost;
    double tokens = 1, power = 1, best = 1;
    int depth = 0;
    for (int k = 1; k <= most; k++) {
        tokens += power *= seq->acceptance;
        double rate = tokens / (1 + k * cost);
        if (rate > best) {
            best = rate;
            depth = k;
        }
    }
    /* at depth 0, retry every 16 tokens */
    return most > 0 && depth == 0 && seq->n_tokens % 16 == 0 ? 1 : depth;
}

/* ---- Prompt lookup --------------------------------------------------------------------------- */

/* Propose the tokens that followed an earlier occurrence of the last few tokens (Saxena 2023,
 * "Prompt lookup decoding"): names, quotations and code repeat. */
static void llm__propose_lookup(llm__sequence *seq) {
    int n = seq->n_tokens;
    int32_t *tokens = seq->tokens;
    for (int length = 3; length >= 1; length--)
        for (int start = n - length - 1; start >= 0; start--) {
            if (memcmp(tokens + start, tokens + n - length, (size_t)length * sizeof *tokens))
                continue;
            for (int from = start + length; from < n && seq->n_proposed < seq->depth; from++)
                tokens[n + seq->n_proposed++] = tokens[from];
            return;
        }
}

/* ---- A draft model --------------------------------------------------------------------------- */

/* Speculation and plain sampling use different random numbers: lane 0 is for plain sampling, lane 1
 * draws the proposal, 2 tests it, 3 draws the correction. */
static double llm__lane_random(const llm__sequence *seq, uint64_t lane, int n) {
    const llm_request *r = &seq->request->params;
    return llm_random(r->sampling.seed, (uint64_t)seq->sample | lane << 32,
                      (uint64_t)(n - r->n_prompt));
}

/* The distribution from which a sequence's proposal number i was drawn. */
static float *llm__proposal_distribution(const llm__speculator *sp, const llm__sequence *seq,
                                         int i) {
    return sp->probabilities +
           ((size_t)seq->index * (size_t)sp->max_depth + (size_t)i) * (size_t)sp->vocab_size;
}

/* Draw a token from max(0, p - q), normalised. q NULL: all its mass is on `proposal`; if that is
 * -1, draw from p. */
static int32_t llm__draw_residual(const float *p, const float *q, int n, int32_t proposal,
                                  double u) {
    double total = 0;
    int32_t last = proposal < 0 ? 0 : proposal;
    for (int pass = 0; pass < 2; pass++) { /* add up, then find the token at u x total */
        double point = u * total;
        for (int i = 0; i < n; i++) {
            double more = q ? (double)p[i] - (double)q[i] : i == proposal ? 0 : (double)p[i];
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

/* Append the draft's next proposal, drawn from its logits after the same penalties, temperature and
 * filters. */
static void llm__propose_token(llm__speculator *sp, llm__sampler *sampler,
                               const llm__outcome *outcome) {
    llm__sequence *seq = outcome->sequence;
    const llm_sampling *p = &seq->request->params.sampling;
    int n = seq->n_tokens + seq->n_proposed;
    float *q = llm__proposal_distribution(sp, seq, seq->n_proposed++);
    if (p->temperature == 0) { /* greedy verification needs no distribution */
        seq->tokens[n] = outcome->logits
                             ? llm__sample(sampler, p, outcome->logits, seq->tokens, n, 0, 0)
                             : outcome->id;
        return;
    }
    llm__distribution(sampler, p, outcome->logits, seq->tokens, n, q);
    seq->tokens[n] = llm__draw_residual(q, NULL, sp->vocab_size, -1, llm__lane_random(seq, 1, n));
}

/* Number of tokens of a sequence that the draft must have processed after its next pass: in a
 * prompt as many as the target, else as many as its next proposal needs; 0: nothing to do. */
static int llm__draft_goal(const llm__sequence *seq) {
    if (!seq->n_scheduled || seq->request->depth == 0 || seq->request->params.lookup) return 0;
    if (seq->state == LLM_PREFILL) return seq->n_cached + seq->n_scheduled;
    return seq->n_proposed < seq->depth ? seq->n_tokens + seq->n_proposed : 0;
}

/* One pass of the draft: a ragged batch of prompt chunks and single tokens. *more: whether there
 * was work. */
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

/* Before the pass: write the proposals of this step after the known tokens. */
static bool llm__propose(llm_engine *e, llm_error *err) {
    llm__scheduler *s = &e->scheduler;
    double start = llm_seconds();
    bool more = e->speculator.draft.model != NULL, ok = true;
    for (int i = 0; i < s->n_sequences; i++)
        if (s->sequences[i]->request->params.lookup && s->sequences[i]->depth > 0)
            llm__propose_lookup(s->sequences[i]);
    while (ok && more) ok = llm__draft_pass(e, &more, err);
    e->statistics.draft_seconds += llm_seconds() - start;
    return ok;
}

/* ---- Verification ---------------------------------------------------------------------------- */

/* Is a proposal accepted? p, q: its probabilities under target and draft; u: uniform in [0, 1). */
static bool llm__accept(double p, double q, double u) { return u * q < p; }

/* After the pass: choose a sequence's next token, for which there is a proposal. logits: the
 * target's; NULL: the device has drawn the target's choice, `own`. Returns the proposal if it is
 * accepted, else the correction. */
static int32_t llm__verify(llm__speculator *sp, llm__sampler *sampler, llm__sequence *seq,
                           const float *logits, int32_t own) {
    const llm_request *r = &seq->request->params;
    int i = seq->n_tested++, n = seq->n_tokens + i;
    int32_t proposal = seq->tokens[n];
    const float *p = sp->target, *q = r->lookup ? NULL : llm__proposal_distribution(sp, seq, i);
    bool greedy = r->sampling.temperature == 0, accepted;
    if (greedy) {
        if (logits) own = llm__sample(sampler, &r->sampling, logits, seq->tokens, n, 0, 0);
        accepted = own == proposal;
    } else {
        llm__distribution(sampler, &r->sampling, logits, seq->tokens, n, sp->target);
        accepted = llm__accept((double)p[proposal], q ? (double)q[proposal] : 1,
                               llm__lane_random(seq, 2, n));
    }
    seq->n_accepted += accepted;
    seq->closed = !accepted; /* later proposals are dropped */
    if (accepted) return proposal;
    return greedy ? own
                  : llm__draw_residual(p, q, sp->vocab_size, proposal, llm__lane_random(seq, 3, n));
}

/* Count a sequence's proposal number i, which was tested in this step. */
static void llm__count_proposal(llm_statistics *statistics, llm__sequence *seq, int i) {
    bool accepted = i < seq->n_accepted;
    int column = i < 15 ? i : 15;
    statistics->proposed++;
    statistics->proposed_at[column]++;
    statistics->accepted += accepted;
    statistics->accepted_at[column] += accepted;
    seq->acceptance += 0.1 * ((accepted ? 1 : 0) - seq->acceptance);
}

/* ---- Creation of the speculator -------------------------------------------------------------- */

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

/* Load the draft (NULL: no draft, only lookup) onto the target's device. */
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
    return llm__network_load(&sp->draft, draft, o->backend, err) &&
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
 *     repetition penalty   lower the logits of recent tokens (Keskar et al. 2019, "CTRL")
 *     temperature          logits / T: below 1 sharpens, above 1 flattens
 *     top-k                keep the k likeliest tokens (Fan et al. 2018)
 *     top-p                keep the likeliest until their sum reaches p (Holtzman et al. 2019)
 *     min-p                keep tokens of min_p x the top probability or more (Nguyen et al. 2024)
 *
 * Each of the last three filters keeps a prefix of the tokens sorted by probability, and all three
 * together keep the shortest of these prefixes: usually a few dozen of 100,000 tokens. So only
 * those are sorted: a heap yields the next likeliest token until a filter stops.
 *
 * A random number depends only on (seed, stream, index), not on other requests or preemption.
 *
 * Likelihoods (unnormalised probabilities) are integers, so their sum is the same in any order. A
 * GPU, which adds in parallel (chapter [7] of llm.cu), draws the same token from the same logits.
 * ================================================================================== */

/* A random number in [0, 1), times 2^64. Its upper 53 bits are random, the lower 11 are 0. */
static uint64_t llm__random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
    return llm__mix(llm__mix(llm__mix(seed) ^ stream) ^ index) >> 11 << 11;
}

double llm_random(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t bits = llm__random_bits(seed, stream, index) >> 11;
    return (double)bits * 0x1p-53; /* each multiple of 2^-53 is equally likely */
}

/* The upper 64 bits of the 128-bit product a x b: a x b / 2^64, rounded down. */
static uint64_t llm__multiply_high(uint64_t a, uint64_t b) {
    uint64_t al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32;
    uint64_t middle = ah * bl + (al * bl >> 32), low = (middle & 0xffffffffu) + al * bh;
    return ah * bh + (middle >> 32) + (low >> 32);
}

/* ln(sum(exp(x))); the largest x is subtracted so that exp cannot overflow */
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

llm_sampling llm_sampling_defaults(void) {
    llm_sampling s;
    memset(&s, 0, sizeof s);
    s.top_p = 1;
    s.repetition_penalty = 1;
    s.penalty_window = 64;
    return s;
}

static bool llm__sampling_check(const llm_sampling *s, llm_error *err) {
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
    return true;
}

static void llm__sampler_free(llm__sampler *s) {
    LLM_FREE(s->heap);
    LLM_FREE(s->kept);
    LLM_FREE(s->seen);
    LLM_FREE(s->draws);
    LLM_FREE(s->outcomes);
    LLM_FREE(s->ids);
    LLM_FREE(s->logprobs);
    memset(s, 0, sizeof *s);
}

/* The largest likelihood is 2^bits. Returns bits: at most 44, and small enough that the sum of n
 * likelihoods is below 2^63. */
static int llm__likelihood_bits(int n) {
    int bits = 44;
    while ((int64_t)n >> (63 - bits)) bits--;
    return bits;
}

/* max_draws: maximum number of tokens drawn from one slice of logits */
static bool llm__sampler_init(llm__sampler *s, int vocab_size, int64_t max_draws, llm_error *err) {
    size_t draws = (size_t)max_draws;
    s->vocab_size = vocab_size;
    s->bits = llm__likelihood_bits(vocab_size);
    s->heap = (llm__token_logit *)llm__new((size_t)vocab_size, sizeof *s->heap, "the sampler", err);
    s->kept = (llm__token_logit *)llm__new((size_t)vocab_size, sizeof *s->kept, "the sampler", err);
    s->seen = (uint32_t *)llm__new((size_t)vocab_size, sizeof *s->seen, "the sampler", err);
    s->draws = (llm_draw *)llm__new(draws, sizeof *s->draws, "the sampler", err);
    s->outcomes = (llm__outcome *)llm__new(draws, sizeof *s->outcomes, "the sampler", err);
    s->ids = (int32_t *)llm__new(draws, sizeof *s->ids, "the sampler", err);
    s->logprobs = (float *)llm__new(draws, sizeof *s->logprobs, "the sampler", err);
    if (s->heap && s->kept && s->seen && s->draws && s->outcomes && s->ids && s->logprobs)
        return true;
    llm__sampler_free(s);
    return false;
}

/* Whether a comes before b: by logit, then by id, so that the order is the same on every device. */
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

/* Penalize each recent token once: divide a positive logit by the penalty, multiply any other. */
static void llm__penalize(llm__sampler *s, const llm_sampling *p, const int32_t *recent,
                          int n_recent) {
    if (p->repetition_penalty == 1) return;
    int n = p->penalty_window && p->penalty_window < n_recent ? p->penalty_window : n_recent;
    if (++s->n_draws == 0) { /* the counter wrapped: clear the old marks */
        memset(s->seen, 0, (size_t)s->vocab_size * sizeof *s->seen);
        s->n_draws = 1;
    }
    for (int i = n_recent - n; i < n_recent; i++) {
        int32_t id = recent[i];
        if (s->seen[id] == s->n_draws) continue;
        s->seen[id] = s->n_draws;
        float *logit = &s->heap[id].logit;
        *logit = *logit > 0 ? *logit / p->repetition_penalty : *logit * p->repetition_penalty;
    }
}

/* 2^bits x e^((logit - most) / T), where `most` is the largest logit. Integer arithmetic gives the
 * same result on every machine: e^-x = 2^-y, where y = x / ln 2 has 24 fractional bits. The whole
 * part of y is a shift; for its fraction f, 2^-f = 1 - f ln 2 + (f ln 2)^2/2! - ... (`terms` holds
 * the coefficients x 2^32). A larger logit never gets a smaller likelihood: one step of y changes
 * the sum by more than its rounding error. */
static uint64_t llm__likelihood(const llm_sampling *p, float logit, float most, int bits) {
    static const uint64_t terms[] = {4294967296, 2977044472, 1031764991, 238388332,
                                     41309550,   5726720,    661577,     65510,
                                     5676,       437,        30};
    float x = (most - logit) / p->temperature;
    if (!(x < 44)) return 0;
    uint64_t y = (uint64_t)((double)x * (1.4426950408889634 * 16777216)); /* x / ln 2, times 2^24 */
    uint64_t f = (y & 0xffffff) << 8, sum = terms[10];
    for (int i = 9; i >= 0; i--) sum = terms[i] - (f * sum >> 32);
    return sum << (bits - 32) >> (y >> 24);
}

/* Copy the tokens of `heap` (vocab_size) that pass the filters to `kept`, likeliest first. *mass:
 * the sum of their likelihoods. Returns the number of tokens in `kept`. */
static int llm__filter(llm__sampler *s, const llm_sampling *p, uint64_t *mass) {
    int n = s->vocab_size, n_kept = 0;
    int limit = p->top_k && p->top_k < n ? p->top_k : n;
    bool all = limit == n;
    for (int i = n / 2 - 1; i >= 0; i--) llm__sift_down(s->heap, n, i);
    float most = s->heap[0].logit;
    uint64_t least = (uint64_t)((double)p->min_p * (double)((uint64_t)1 << s->bits));

    /* top-p is a share of the mass of all tokens or, with top-k, of the k likeliest tokens. The
     * mass of those k is known only after the loop. */
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
        /* if min-p stopped the loop, the rest of the k tokens still count towards the mass */
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
    int n;         /* number of tokens in `kept` */
    float most;    /* the largest logit */
    int bits;      /* the likelihood of the largest logit is 2^bits */
    uint64_t mass; /* sum of the likelihoods of `kept` */
} llm__shaped;

/* logits (vocab_size); recent (n_recent): tokens of the sequence. The result points into s. */
static llm__shaped llm__shape(llm__sampler *s, const llm_sampling *p, const float *logits,
                              const int32_t *recent, int n_recent) {
    for (int i = 0; i < s->vocab_size; i++) {
        s->heap[i].logit = logits[i] == logits[i] ? logits[i] : -INFINITY; /* never draw NaN */
        s->heap[i].id = i;
    }
    llm__penalize(s, p, recent, n_recent);
    int32_t best = 0;
    for (int i = 1; i < s->vocab_size; i++)
        if (llm__likelier(s->heap[i], s->heap[best])) best = i;

    llm__shaped shaped = {s->heap, s->vocab_size, s->heap[best].logit, s->bits, 0};
    if (p->temperature == 0 || !(fabsf(shaped.most) <= FLT_MAX)) { /* or it is infinite */
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

/* Draw a token: the first at which the running sum of likelihoods exceeds a random number below the
 * mass. index: the number of tokens generated so far. */
static int32_t llm__sample(llm__sampler *s, const llm_sampling *p, const float *logits,
                           const int32_t *recent, int n_recent, uint64_t stream, uint64_t index) {
    if (p->temperature == 0 && p->repetition_penalty == 1)
        return llm__argmax(logits, s->vocab_size);
    llm__shaped shaped = llm__shape(s, p, logits, recent, n_recent);
    uint64_t point = llm__multiply_high(llm__random_bits(p->seed, stream, index), shaped.mass);
    int i = 0;
    for (uint64_t passed = 0; i < shaped.n - 1; i++) /* the last token needs no test */
        if ((passed += llm__shaped_weight(&shaped, p, i)) > point) break;
    return shaped.kept[i].id;
}

/* The probabilities (vocab_size) with which llm__sample draws each token. */
static void llm__distribution(llm__sampler *s, const llm_sampling *p, const float *logits,
                              const int32_t *recent, int n_recent, float *probabilities) {
    llm__shaped shaped = llm__shape(s, p, logits, recent, n_recent);
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
 * A full block keeps its content while it is free, so a later prompt that begins with the same
 * tokens can share it (the prefix cache). The keys and values of a block depend on its tokens and
 * on all earlier tokens, so a block is looked up by its tokens and the identity of its parent, the
 * block before it. Identities are never reused, so the children of an evicted block never match the
 * content that replaces it.
 *
 * This chapter is only book-keeping. The keys and values are in device memory (struct llm_cache). A
 * block number is the same place in every layer, in the target's cache and in the draft's.
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

/* Add a block to the ring of free blocks, before `place`. */
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

/* max_copies: maximum number of sequences in a step; each sequence needs at most one copy. */
static bool llm__pool_init(llm__pool *pool, int64_t n_blocks, int block_size, int max_copies,
                           bool keeps_prefixes, llm_error *err) {
    memset(pool, 0, sizeof *pool);
    pool->block_size = block_size;
    pool->n_blocks = n_blocks;
    pool->max_copies = max_copies;
    pool->keeps_prefixes = keeps_prefixes;
    for (pool->n_buckets = 16; pool->n_buckets < 2 * n_blocks;) pool->n_buckets *= 2;
    size_t n = (size_t)n_blocks;
    const char *what = "the book-keeping of the cache";
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

/* ---- The prefix cache ------------------------------------------------------------------- */

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

/* ---- Blocks ------------------------------------------------------------------------------ */

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

/* Take a free block; its reference count becomes 1. The caller has checked that a block is free. */
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

/* ---- Block tables -------------------------------------------------------------------------- */

/* Give a sequence private slots for tokens first to end - 1: copy the block of `first` if it is
 * shared, and take new blocks. Returns false, and changes nothing, if there are too few free blocks
 * or table entries. */
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
        llm__pool_drop(pool, from); /* it is shared, so its content stays until it is copied */
        llm__trace_block(pool, table, LLM_TRACE_COPY, shared, to);
    }
    for (int i; (i = table->n_blocks) < wanted; table->n_blocks++) {
        table->blocks[i] = llm__pool_take(pool);
        llm__trace_block(pool, table, LLM_TRACE_TAKE, i, table->blocks[i]);
    }
    return true;
}

/* Number of copies at the start of the list that can be repeated after a failure: all before the
 * first copy that overwrites the source of an earlier copy. */
static int llm__copies_at_once(const llm__pool *pool) {
    for (int n = 1; n < pool->n_copies; n++)
        for (int i = 0; i < n; i++)
            if (pool->copy_to[n] == pool->copy_from[i]) return n;
    return pool->n_copies;
}

/* Remove the first n copies from the list. */
static void llm__copies_done(llm__pool *pool, int n) {
    pool->n_copies -= n;
    memmove(pool->copy_from, pool->copy_from + n, (size_t)pool->n_copies * sizeof *pool->copy_from);
    memmove(pool->copy_to, pool->copy_to + n, (size_t)pool->n_copies * sizeof *pool->copy_to);
}

/* Release the blocks after the first n_tokens tokens, last block first: the beginnings of texts,
 * which are shared more often, are evicted last. */
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

/* Let `copy` (with capacity >= table->n_blocks) share all blocks of `table`. */
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

/* Fill an empty table with blocks of the prefix cache: those of the longest prefix of these tokens
 * that it contains. Returns the length of that prefix in tokens. */
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

/* Add the full blocks of the first n_tokens tokens, which are computed, to the prefix cache. */
static void llm__table_keep(llm__pool *pool, llm__table *table, const int32_t *tokens,
                            int n_tokens) {
    if (!pool->keeps_prefixes && !table->root) return;
    for (; (table->n_kept + 1) * (int64_t)pool->block_size <= n_tokens; table->n_kept++)
        table->identity = llm__pool_keep(pool, table->blocks[table->n_kept], table->identity,
                                         tokens + (int64_t)table->n_kept * pool->block_size);
}

/* The slot of the token at `position`. */
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
 * Only attention combines tokens; all other operations treat each of the T tokens of the batch
 * separately. So one step can contain part of a prompt, single tokens of twenty other sequences and
 * a draft's proposals: only attention looks up, in the batch, which sequence a token belongs to.
 *
 * Models are described by data. One table lists the tensors that a layer can have, with names and
 * shapes; another lists which of them each architecture has. The loader checks files against both.
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
                         LLM__FFN_NORM,
                         LLM__GATE,
                         LLM__UP,
                         LLM__DOWN,
                         LLM__GATE_BIAS,
                         LLM__UP_BIAS,
                         LLM__DOWN_BIAS,
                         LLM__N_PARTS
} llm__part;

/* a dimension of a tensor */
typedef enum llm__width {
    LLM__ONE,
    LLM__DIM,
    LLM__Q_WIDTH,
    LLM__KV_WIDTH,
    LLM__HIDDEN,
    LLM__HEAD
} llm__width;

static uint64_t llm__width_of(const llm_config *c, llm__width width) {
    switch (width) {
    case LLM__DIM: return (uint64_t)c->dim;
    case LLM__Q_WIDTH: return (uint64_t)c->n_heads * (uint64_t)c->head_dim;
    case LLM__KV_WIDTH: return (uint64_t)c->n_kv_heads * (uint64_t)c->head_dim;
    case LLM__HIDDEN: return (uint64_t)c->hidden_dim;
    case LLM__HEAD: return (uint64_t)c->head_dim;
    case LLM__ONE: break;
    }
    return 1;
}

typedef struct llm__part_row {
    const char *name;      /* blk.N.<name> in a GGUF file */
    const char *source;    /* model.layers.N.<source> in a Hugging Face folder */
    llm__width rows, cols; /* rows = LLM__ONE: a vector */
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
        {"ffn_norm.weight", "post_attention_layernorm.weight", LLM__ONE, LLM__DIM},
        {"ffn_gate.weight", "mlp.gate_proj.weight", LLM__HIDDEN, LLM__DIM},
        {"ffn_up.weight", "mlp.up_proj.weight", LLM__HIDDEN, LLM__DIM},
        {"ffn_down.weight", "mlp.down_proj.weight", LLM__DIM, LLM__HIDDEN},
        {"ffn_gate.bias", "mlp.gate_proj.bias", LLM__ONE, LLM__HIDDEN},
        {"ffn_up.bias", "mlp.up_proj.bias", LLM__ONE, LLM__HIDDEN},
        {"ffn_down.bias", "mlp.down_proj.bias", LLM__ONE, LLM__DIM},
    };
    return table;
}

/* Sets of parts; bit i: whether part i is in the set. */
enum {
    LLM__ALWAYS = 1 << LLM__ATTN_NORM | 1 << LLM__Q | 1 << LLM__K | 1 << LLM__V | 1 << LLM__O |
        1 << LLM__FFN_NORM | 1 << LLM__GATE | 1 << LLM__UP | 1 << LLM__DOWN,
    LLM__QKV_BIASES = 1 << LLM__Q_BIAS | 1 << LLM__K_BIAS | 1 << LLM__V_BIAS,
    LLM__BIASES = LLM__QKV_BIASES | 1 << LLM__O_BIAS,
    LLM__FFN_BIASES = 1 << LLM__GATE_BIAS | 1 << LLM__UP_BIAS | 1 << LLM__DOWN_BIAS,
    LLM__HEAD_NORMS = 1 << LLM__Q_NORM | 1 << LLM__K_NORM
};

/* A supported architecture. Models of others are refused, since they would give wrong text. */
typedef struct llm__architecture {
    const char *name;           /* general.architecture in a GGUF file */
    const char *model_type;     /* model_type in a folder's config.json */
    llm_rope_pairing pairing;   /* pairing in GGUF files; in folders always LLM_ROPE_HALVES */
    unsigned required, optional; /* sets of parts that a model must have, or can have */
    /* Defaults for keys that are not in config.json: */
    int head_dim, window;       /* head_dim 0: dim / n_heads; window 0: no window */
    bool kv_heads;              /* true: n_kv_heads defaults to n_heads; false: required key */
} llm__architecture;

static const llm__architecture *llm__architecture_at(int index) {
    static const llm__architecture table[] = {
        {"llama", "llama", LLM_ROPE_ADJACENT, LLM__ALWAYS, LLM__BIASES | LLM__FFN_BIASES, 0, 0,
         true},
        {"llama", "mistral", LLM_ROPE_ADJACENT, LLM__ALWAYS, 0, 0, 4096, false},
        {"qwen2", "qwen2", LLM_ROPE_HALVES, LLM__ALWAYS | LLM__QKV_BIASES, 0, 0, 0, false},
        {"qwen3", "qwen3", LLM_ROPE_HALVES, LLM__ALWAYS | LLM__HEAD_NORMS, LLM__BIASES, 128, 0,
         false},
    };
    return index < (int)(sizeof table / sizeof *table) ? &table[index] : NULL;
}

/* Find an architecture by its name or, if source, by its model_type. NULL: unknown. */
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

/* ---- A model on a device -------------------------------------------------------------- */

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

/* Convert a vector (norm weights or a bias) to f32 and upload it. */
static bool llm__load_vector(llm_backend *backend, const llm_tensor *tensor, llm_weight *w,
                             llm_error *err) {
    int64_t n = (int64_t)tensor->dims[0];
    float *host = (float *)llm__new((size_t)n, sizeof(float), "a vector of weights", err);
    if (host) llm_type_find(tensor->type)->unpack(tensor->data, host, n);
    bool ok = host && llm__upload_vector(backend, host, n, w, err);
    LLM_FREE(host);
    return ok;
}

/* Upload the column order of a tensor; w->columns points to it. */
static bool llm__load_columns(llm_backend *backend, const llm_tensor *tensor, llm_weight *w,
                              llm_error *err) {
    size_t bytes = (size_t)w->cols * sizeof *w->columns;
    w->columns = (const int32_t *)backend->allocate(backend->context, bytes, "the order of columns",
                                                    err);
    return w->columns && backend->upload(backend->context, (void *)(uintptr_t)w->columns,
                                         tensor->columns, bytes, err);
}

/* Convert a matrix that the file has in another layout (AWQ, GPTQ). The network owns the rows. */
static const void *llm__network_rows(llm__network *net, const llm_tensor *tensor, llm_error *err) {
    void *grown = llm__grow(net->rows, net->n_rows, &net->rows_capacity, sizeof *net->rows,
                            "the rows of matrices", err);
    if (!grown) return NULL;
    net->rows = (void **)grown;
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
 * distinguish near positions; the last pairs turn slowly and distinguish distant positions (Su et
 * al. 2021).
 *
 * In texts longer than the training length, slow pairs reach angles that do not occur in training.
 * So frequencies are divided: all by the same factor (linear), or only those of slow pairs. Llama 3
 * stores a divisor per pair. YaRN divides the frequency of a pair by rope_factor if it makes fewer
 * than beta_slow turns over the training length, by 1 if it makes more than beta_fast turns, and
 * blends the two results in between. */
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

static bool llm__load_frequencies(llm__network *net, llm_error *err) {
    const llm_config *c = &net->model->config;
    const llm_tensor *divisors = net->model->rope_divisors;
    int n = c->rope_dim / 2;
    float *host = (float *)llm__new((size_t)n, sizeof(float), "the RoPE frequencies", err);
    if (!host) return false;
    for (int i = 0; i < n; i++) host[i] = 1;
    if (divisors) llm_type_find(divisors->type)->unpack(divisors->data, host, n);
    for (int i = 0; i < n; i++) {
        if (!(host[i] > 0)) {
            llm__fail(err, LLM_ERROR_FORMAT, "%s: rope_freqs.weight has the divisor %g",
                      llm_file_path(net->model->file), (double)host[i]);
            return LLM_FREE(host), false;
        }
        host[i] = (float)llm__frequency(c, i, host[i]);
    }
    bool ok = llm__upload_vector(net->backend, host, n, &net->frequencies, err);
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

/* Bytes of one block: keys and values of all layers. */
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

static void llm__network_free(llm__network *net) {
    llm_backend *b = net->backend;
    if (!b) return;
    b->forget(b->context, &net->program);
    b->release(b->context, net->activations);
    LLM_FREE(net->program.ops);
    LLM_FREE(net->program.buffers);
    if (net->embedding.data) b->free_weight(b->context, &net->embedding);
    if (net->output.data) b->free_weight(b->context, &net->output);
    b->release(b->context, (void *)net->output_norm.data);
    for (int i = 0; net->parts && i < net->model->config.n_layers * LLM__N_PARTS; i++) {
        llm_weight *w = &net->parts[i];
        if (llm__parts()[i % LLM__N_PARTS].rows == LLM__ONE)
            b->release(b->context, (void *)w->data);
        else {
            b->release(b->context, (void *)(uintptr_t)w->columns);
            if (w->data || w->packed) b->free_weight(b->context, w);
        }
    }
    while (net->n_rows > 0) LLM_FREE(net->rows[--net->n_rows]);
    LLM_FREE(net->rows);
    LLM_FREE(net->parts);
    b->release(b->context, (void *)net->frequencies.data);
    b->release(b->context, net->cache.keys);
    b->release(b->context, net->cache.values);
    memset(net, 0, sizeof *net);
}

/* Load the model's weights onto the device. On failure the caller frees the network. */
static bool llm__network_load(llm__network *net, const llm_model *model, llm_backend *backend,
                              llm_error *err) {
    net->model = model;
    net->backend = backend;
    int n = model->config.n_layers * LLM__N_PARTS;
    net->parts = (llm_weight *)llm__new((size_t)n, sizeof *net->parts, "the table of weights", err);
    net->embedding.only_rows = !model->config.tied_output;
    if (!net->parts || !llm__load_frequencies(net, err) ||
        !llm__load_matrix(net, model->embedding, &net->embedding, err) ||
        !llm__load_vector(backend, model->output_norm, &net->output_norm, err))
        return false;
    if (!model->config.tied_output && !llm__load_matrix(net, model->output, &net->output, err))
        return false;
    for (int i = 0; i < n; i++) {
        bool vector = llm__parts()[i % LLM__N_PARTS].rows == LLM__ONE;
        if (model->parts[i] &&
            !(vector ? llm__load_vector(backend, model->parts[i], &net->parts[i], err)
                     : llm__load_matrix(net, model->parts[i], &net->parts[i], err)))
            return false;
    }
    return true;
}

/* ---- The program ----------------------------------------------------------------------------
 * A trait of an architecture (a bias, head norms, a window) is a line in one of these functions. */

enum { /* the buffers of a program */
    LLM__X,         /* (T, dim) the residual stream */
    LLM__NORMED,    /* (T, dim) the normalised residual stream */
    LLM__QUERIES,   /* (T, n_heads, head_dim) queries */
    LLM__KEYS,      /* (T, n_kv_heads, head_dim) keys */
    LLM__VALUES,    /* (T, n_kv_heads, head_dim) values */
    LLM__ATTENDED,  /* (T, n_heads, head_dim) output of attention */
    LLM__GATES,     /* (T, hidden_dim) gates, then silu(gate) x up */
    LLM__UPS,       /* (T, hidden_dim) output of the up matrix */
    LLM__ORDERED,   /* (T, ordered_cols) input of a matmul after permuting its columns */
    LLM__ANGLES,    /* (T, rope_dim/2, 2) cosine and sine per pair */
    LLM__CACHE,     /* the paged cache, which has its own memory */
    LLM__ROWS,      /* (R, dim) the residual stream of tokens whose logits are needed */
    LLM__LOGITS,    /* (R, vocab_size) logits */
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

static llm_op *llm__emit_norm(llm__network *net, int layer, const llm_weight *w, const char *name,
                              int in, int out) {
    llm_op *op = llm__emit_op(&net->program, LLM_OP_RMSNORM, layer, in, out);
    op->weight = w;
    op->name = name;
    op->epsilon = net->model->config.norm_epsilon;
    return op;
}

/* out = w . in, + bias if the model has one. The input is permuted first if w has `columns`. */
static llm_op *llm__emit_matmul(llm__network *net, int layer, llm__part part, llm__part bias,
                                int in, int out) {
    const llm_weight *w = &net->parts[layer * LLM__N_PARTS + (int)part],
                     *b = &net->parts[layer * LLM__N_PARTS + (int)bias];
    if (w->columns) {
        llm__emit_op(&net->program, LLM_OP_GATHER_COLUMNS, layer, in, LLM__ORDERED)->weight = w;
        in = LLM__ORDERED;
    }
    llm_op *op = llm__emit_op(&net->program, LLM_OP_MATMUL, layer, in, out);
    op->weight = w;
    op->bias = b->data ? b : NULL;
    op->name = llm__parts()[part].name;
    return op;
}

/* x += Wo . attention of the normalised x */
static void llm__emit_attention(llm__network *net, int layer, bool naive) {
    const llm_config *c = &net->model->config;
    const llm_weight *w = &net->parts[layer * LLM__N_PARTS];
    const float scale = 1.0f / sqrtf((float)c->head_dim);
    llm_attention_shape shape = {c->n_heads, c->n_kv_heads, c->head_dim, scale, naive,
                                 net->model->windows[layer]};
    llm__emit_norm(net, layer, &w[LLM__ATTN_NORM], "attn_norm.weight", LLM__X, LLM__NORMED);
    llm__emit_matmul(net, layer, LLM__Q, LLM__Q_BIAS, LLM__NORMED, LLM__QUERIES);
    llm__emit_matmul(net, layer, LLM__K, LLM__K_BIAS, LLM__NORMED, LLM__KEYS);
    llm__emit_matmul(net, layer, LLM__V, LLM__V_BIAS, LLM__NORMED, LLM__VALUES);

    llm_op *rope = llm__emit_op(&net->program, LLM_OP_ROPE_STORE, layer, LLM__ANGLES, -1);
    rope->in[1] = LLM__QUERIES;
    rope->in[2] = LLM__KEYS;
    rope->in[3] = LLM__VALUES;
    rope->in[4] = LLM__CACHE;
    rope->attention = shape;
    rope->pairing = c->rope_pairing;
    rope->rope_dim = c->rope_dim;
    rope->epsilon = c->norm_epsilon;
    rope->q_norm = w[LLM__Q_NORM].data ? &w[LLM__Q_NORM] : NULL;
    rope->k_norm = w[LLM__K_NORM].data ? &w[LLM__K_NORM] : NULL;

    llm_op *attention = llm__emit_op(&net->program, LLM_OP_ATTENTION, layer, LLM__QUERIES,
                                     LLM__ATTENDED);
    attention->in[1] = LLM__CACHE;
    attention->attention = shape;
    llm__emit_matmul(net, layer, LLM__O, LLM__O_BIAS, LLM__ATTENDED, LLM__X)->add = true;
}

/* x += feed-forward of the normalised x */
static void llm__emit_feed_forward(llm__network *net, int layer) {
    const llm_weight *w = &net->parts[layer * LLM__N_PARTS];
    llm__emit_norm(net, layer, &w[LLM__FFN_NORM], "ffn_norm.weight", LLM__X, LLM__NORMED);
    llm__emit_matmul(net, layer, LLM__GATE, LLM__GATE_BIAS, LLM__NORMED, LLM__GATES);
    llm__emit_matmul(net, layer, LLM__UP, LLM__UP_BIAS, LLM__NORMED, LLM__UPS);
    llm__emit_op(&net->program, LLM_OP_SWIGLU, layer, LLM__GATES, LLM__GATES)->in[1] = LLM__UPS;
    llm__emit_matmul(net, layer, LLM__DOWN, LLM__DOWN_BIAS, LLM__GATES, LLM__X)->add = true;
}

/* The output matrix is the largest weight, so first gather the rows whose logits are needed. */
static void llm__emit_head(llm__network *net) {
    llm_program *p = &net->program;
    p->n_body = p->n_ops;
    llm__emit_op(p, LLM_OP_GATHER_ROWS, -1, LLM__X, LLM__ROWS);
    llm__emit_norm(net, -1, &net->output_norm, "output_norm.weight", LLM__ROWS, LLM__ROWS);
    llm_op *logits = llm__emit_op(p, LLM_OP_MATMUL, -1, LLM__ROWS, LLM__LOGITS);
    logits->weight = net->model->config.tied_output ? &net->embedding : &net->output;
    logits->name = net->model->config.tied_output ? "token_embd.weight" : "output.weight";
}

/* Emit all operations and describe the buffers. */
static bool llm__compile(llm__network *net, const llm_engine_options *o, llm_error *err) {
    enum { LAYER_OPS = 12, OTHER_OPS = 5 };
    const llm_config *c = &net->model->config;
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
        {"cache", 0, false, NULL},
        {"rows", c->dim, true, NULL},
        {"logits", c->vocab_size, true, NULL},
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
    llm__emit_op(p, LLM_OP_EMBED, -1, -1, LLM__X)->weight = &net->embedding;
    p->ops[0].name = "token_embd.weight";
    llm_op *angles = llm__emit_op(p, LLM_OP_ROPE_ANGLES, -1, -1, LLM__ANGLES);
    angles->weight = &net->frequencies;
    angles->rope_dim = c->rope_dim;
    angles->scale = c->rope_magnitude;
    for (int layer = 0; layer < c->n_layers; layer++) {
        llm__emit_attention(net, layer, o->naive_attention);
        llm__emit_feed_forward(net, layer);
    }
    llm__emit_head(net);
    return true;
}

/* Number of values in a buffer for steps of max_tokens tokens, rounded up so that the next buffer
 * starts on a cache line. 0: too many to address. */
static uint64_t llm__buffer_values(const llm__network *net, const llm_buffer *buffer,
                                   int max_tokens) {
    uint64_t values, rows = (uint64_t)llm_rounded_rows(buffer->head ? net->max_logits : max_tokens);
    if (!llm__multiply(rows, (uint64_t)buffer->width, &values) || values > SIZE_MAX / 64) return 0;
    return (values / 16 + 1) * 16;
}

/* Allocate memory for all buffers in one piece, sized for the largest batch. */
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

/* Compile the model and prepare its program. max_logits: maximum rows of logits in a slice. */
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

/* ---- What an operation costs -------------------------------------------------------------- */

const char *llm_op_name(llm_op_kind kind) {
    static const char *const names[LLM_N_OP_KINDS] = {"embed",  "rope_angles", "rmsnorm",
                                                      "matmul", "rope_store",  "attention",
                                                      "swiglu", "gather_rows", "gather_columns"};
    return (unsigned)kind < LLM_N_OP_KINDS ? names[kind] : "unknown";
}

/* Count, per head, the keys that attention reads over a batch and the pairs of query and key. */
static void llm__count_pairs(const llm_op *op, const llm_batch *batch, double *read,
                             double *pairs) {
    *read = *pairs = 0;
    for (int s = 0; s < batch->n_sequences; s++) {
        int first = batch->seq_first[s], end = first + batch->seq_count[s];
        if (first == end) continue;
        *read += batch->positions[end - 1] + 1 -
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
    case LLM_OP_RMSNORM: cost.operations = 4 * rows * width; break;
    case LLM_OP_SWIGLU: cost.operations = 5 * rows * width; break;
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
 * llm__reference_run, at the end, is a loop over the program with a switch over these functions.
 * LLM_ISA_REFERENCE selects it. The fast kernels of this file and llm.cu are tested against it.
 * ================================================================================== */

/* ---- The arguments of kernels --------------------------------------------------------- */

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
    int lanes;                       /* number of floats in a register */
    /* Round x (rows, cols) to int8, with a scale per `group` values, and write the result to a tile
     * of `height` rows. A call does only stripes first to end - 1, of 64 columns each. */
    void (*round_rows)(const float *x, int64_t cols, int group, int height, int rows, int64_t first,
                       int64_t end, char *tile);
    void (*matmul)(const llm__matmul_args *args, int64_t first_row, int64_t end_row, void *scratch);
    void (*rmsnorm)(const float *x, const float *weight, int n, int dim, float epsilon, float *out);
    void (*swiglu)(const float *gate, const float *up, int64_t n, float *out);
    int32_t (*argmax)(const float *x, int n);
    double (*sum_exp)(const float *x, int n, float shift);
    void (*rope_and_store)(const llm__rope_args *args, int first_token, int end_token,
                           int first_kv_head, int end_kv_head);
    /* Attention for rows first_row to end_row - 1 of a sequence's queries for one kv head. g query
     * heads share the kv head; row t * g + h is the h-th of them, for the sequence's t-th token in
     * the batch. */
    void (*attention)(const llm__attention_args *args, int sequence, int kv_head, int first_row,
                      int end_row, void *scratch);
} llm__kernels;

typedef struct llm__cpu { /* the context of a CPU backend */
    llm_backend backend;
    const llm__kernels *kernels;     /* kernels for `isa`; NULL: the reference loops */
    llm_isa isa;
    int n_threads;
    bool pack;                       /* whether weights are packed into slabs at load time */
    struct llm__slab *slabs;         /* (n_slabs) memory for packed weights */
    int64_t n_slabs, slab_capacity;
    uint64_t rounded_bytes;          /* size of `rounded` */
    void *rounded;                   /* rows of one matmul input, rounded to int8 */
    char *scratch;                   /* (n_threads, scratch_bytes) memory for kernels */
    size_t scratch_bytes, tile_bytes; /* scratch per thread; its part for unpacked weights */
    double alone_until;              /* llm_seconds() until which only one thread runs; 0: all */
} llm__cpu;

static size_t llm__value_bytes(llm_type type) { return type == LLM_F32 ? 4 : 2; }

/* Index of the row (head_dim values) of this position in a layer's keys or values. */
static int64_t llm__cache_row(const llm_batch *batch, const llm_cache *cache, int sequence,
                              int kv_head, int position) {
    const int32_t *table = batch->block_tables + (int64_t)sequence * batch->table_stride;
    int64_t block = table[position / batch->block_size];
    return (block * cache->n_kv_heads + kv_head) * batch->block_size + position % batch->block_size;
}

static const char *llm__cache_layer(const llm_cache *cache, const void *side, int layer) {
    return (const char *)side + (size_t)layer * cache->layer_bytes;
}

/* Index of a row's first value in its layer; the values of a row are *stride apart. */
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

/* ---- The reference loops --------------------------------------------------------------- */

/* Root mean square normalisation (Zhang and Sennrich 2019): scale each row of x (n, dim) to length
 * sqrt(dim), then multiply each dimension by its weight (dim). */
static void llm__plain_rmsnorm(const float *x, const float *weight, int64_t n, int64_t dim,
                               float epsilon, float *out) {
    for (int64_t row = 0; row < n; row++) {
        double sum = 0.0;
        for (int i = 0; i < dim; i++) sum += (double)x[row * dim + i] * x[row * dim + i];
        double scale = 1.0 / sqrt(sum / (double)dim + epsilon);
        for (int i = 0; i < dim; i++)
            out[row * dim + i] = (float)(x[row * dim + i] * scale * weight[i]);
    }
}

/* out (n, rows) = x (n, cols) times w transposed. unpacked (cols) is scratch for a row of w. */
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

/* SwiGLU (Shazeer 2020): the gate decides how much of each value of `up` passes. */
static void llm__plain_swiglu(const float *gate, const float *up, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++)
        out[i] = (float)(gate[i] / (1.0 + exp(-(double)gate[i])) * up[i]);
}

/* Rotary position embedding (Su et al. 2021): rotate pairs of dimensions by angles proportional to
 * the position. Then the dot product of a query and a key depends only on their distance. */
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
        llm__plain_rmsnorm(args->q, args->q_norm, n * n_heads, head_dim, op->epsilon, args->q);
    if (args->k_norm)
        llm__plain_rmsnorm(args->k, args->k_norm, n * n_kv_heads, head_dim, op->epsilon, args->k);
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

    float largest = -INFINITY;
    int first = llm__first_seen(shape, position);
    for (int p = first; p <= position; p++) {
        int64_t at = llm__cache_place(
            cache, cache->keys, llm__cache_row(args->batch, cache, sequence, kv_head, p), &stride);
        double dot = 0.0;
        for (int i = 0; i < head_dim; i++)
            dot += (double)q[i] * llm__cache_value(cache, keys, at + i * stride);
        scores[p] = (float)(dot * shape->scale);
        if (scores[p] > largest) largest = scores[p];
    }
    double total = 0.0; /* subtract the largest score: same quotients, no overflow */
    for (int p = first; p <= position; p++) total += scores[p] = expf(scores[p] - largest);
    for (int i = 0; i < head_dim; i++) out[i] = 0.0f;
    for (int p = first; p <= position; p++) {
        int64_t at = llm__cache_place(cache, cache->values,
                                      llm__cache_row(args->batch, cache, sequence, kv_head, p),
                                      &stride);
        float share = (float)(scores[p] / total);
        for (int i = 0; i < head_dim; i++)
            out[i] += share * llm__cache_value(cache, values, at + i * stride);
    }
}

/* Attention of all heads of one token. */
static void llm__plain_attention(const llm__attention_args *args, int token, float *scores) {
    const llm_batch *batch = args->batch;
    int s = 0;
    while (token < batch->seq_first[s] || token >= batch->seq_first[s] + batch->seq_count[s])
        if (++s == batch->n_sequences) return; /* the token has no sequence */
    for (int head = 0; head < args->shape.n_heads; head++)
        llm__plain_attention_row(args, s, token, head, scores);
}

/* The fast executor also uses the next four functions. They compute rows first to end - 1. */
static void llm__embed(const llm_batch *batch, const llm_weight *table, int64_t first, int64_t end,
                       float *out) {
    const llm_type_info *type = llm_type_find(table->type);
    size_t row_bytes = llm__row_bytes(table->type, table->cols);
    for (int64_t t = first; t < end; t++)
        type->unpack((const char *)table->data + (size_t)batch->tokens[t] * row_bytes,
                     out + t * table->cols, table->cols);
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

/* ---- The reference executor: the program, one operation after another ------------------------ */

/* The arguments of one call of llm_backend.run. */
typedef struct llm__step {
    llm__cpu *cpu;
    const llm_program *program;
    const llm_batch *batch;
    int first, n_logits;     /* start and length of the head's slice of batch->logit_rows */
} llm__step;

/* Input `index` of an operation; NULL: none */
static float *llm__in(const llm__step *step, const llm_op *op, int index) {
    return op->in[index] < 0 ? NULL : step->program->buffers[op->in[index]].data;
}

static float *llm__out(const llm__step *step, const llm_op *op) {
    return op->out < 0 ? NULL : step->program->buffers[op->out].data;
}

/* Number of rows that an operation computes */
static int llm__op_rows(const llm__step *step, const llm_op *op) {
    return op->out >= 0 && step->program->buffers[op->out].head ? step->n_logits
                                                                : step->batch->n_tokens;
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

/* Find the operations of a part of the program: *first to *end - 1. */
static void llm__part_ops(const llm_program *p, llm_part part, int *first, int *end) {
    *first = part & LLM_BODY ? 0 : p->n_body;
    *end = part & LLM_HEAD ? p->n_ops : p->n_body;
}

static bool llm__check_step(const llm__step *step, llm_part part, llm_error *err);

/* llm_backend.run, implemented with the reference loops */
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
        case LLM_OP_EMBED: llm__embed(batch, w, 0, n, out); break;
        case LLM_OP_ROPE_ANGLES: llm__rope_angles(batch, op, 0, n, out); break;
        case LLM_OP_RMSNORM:
            llm__plain_rmsnorm(x, llm__vector(w), n, w->cols, op->epsilon, out);
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
        case LLM_OP_SWIGLU: llm__plain_swiglu(x, llm__in(&step, op, 1), n * width, out); break;
        case LLM_OP_GATHER_ROWS:
            llm__gather_rows(x, batch->logit_rows + first, width, 0, n, out);
            break;
        case LLM_OP_GATHER_COLUMNS: llm__gather_columns(x, w, 0, n, out); break;
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
 * bandwidth. Weights with fewer bits are therefore faster as well as smaller, but less precise.
 * GGUF has these storage types:
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
 * Neighbouring weights have similar magnitudes, so they share a scale. An outlier costs precision
 * only in its own group. Scales and minimums are f16. In blocks of 32, the low nibble of byte i
 * belongs to value i, the high nibble to value i + 16, and fifth bit i to value i.
 *
 * A K block holds 256 values in groups of 32 (q6_K: 16). Group scales and minimums are integers of
 * 6 bits (q6_K: int8). The bits saved are used for a minimum (q4_K is as small as q4_0, which has
 * no minimum) or for smaller groups (q6_K).
 *
 * Unpacking is exact or rounds once, so a file gives the same values on every machine. Chapter 10
 * has the fast kernels.
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
    /* zero or denormal: magnitude counts steps of 2^-24, exact in f32 */
    return llm__float_from_bits(sign | llm__float_bits((float)magnitude * (1.0f / 16777216.0f)));
}

/* Round to nearest, ties to even. */
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

/* Read with memcpy, since blocks are not aligned. */
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
/* ---- q6_K: 16 groups of 16 with a scale of 8 bits each ---------------
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

/* ---- q4_Z: the integers of AWQ and GPTQ, exactly ---------------------
 * The layout of q4_1, with a zero point in place of the minimum: value = scale x (q - zero). A
 * minimum, -scale x zero, would be rounded to f16. GPTQ stores zero - 1 in 4 bits, so zero can be
 * as large as 16. */

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

/* ---- Unscaled integers, for the layouts of chapter 10 ---------------- */

typedef struct llm__levels { /* 32 neighbouring values of a row */
    uint8_t q[LLM__BLOCK];   /* integers: int8 (q8_0) or unsigned (all others) */
    uint16_t scale, minimum; /* f16. minimum: added (K formats: subtracted); q4_Z: zero point */
    uint8_t group[2];        /* group scale and minimum (q4_K, q5_K); two int8 scales (q6_K) */
} llm__levels;

/* Read columns 32 x block to 32 x block + 31 of a row in a block format. */
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
 * Files are not trusted. When a file is opened, counts are checked against the remaining bytes,
 * products against 64-bit overflow, and offsets against the end of the file. Later code relies on
 * these checks.
 * ================================================================================== */

typedef enum llm__memory { LLM__BORROWED, LLM__MAPPED, LLM__OWNED } llm__memory;

struct llm_file {
    char *path;
    const uint8_t *data;      /* (size) the file; for a folder: settings as GGUF metadata */
    uint64_t size;       /* bytes of data */
    llm__memory memory;  /* ownership of data */
    int version;         /* GGUF version */
    int64_t n_values, n_tensors;
    llm_value *values;               /* (n_values) values in file order */
    llm_tensor *tensors;             /* (n_tensors) tensors of all parts */
    const llm_string **value_index;  /* (n_values) pointers to the values, sorted by key */
    const llm_string **tensor_index; /* (n_tensors) pointers to the tensors, sorted by name */
    llm_file **parts;                /* (n_parts) files of the model besides this one */
    int64_t n_parts;
    int64_t parts_capacity;   /* entries allocated for `parts`; 0: n_parts */
    void **memories;          /* (n_memories) memory that loading a folder allocated */
    int64_t n_memories, memories_capacity;
    llm_json header;          /* header of a safetensors file; tensor names point into it */
    bool folder;              /* true for a Hugging Face folder or a tokenizer.json */
};

/* ---- Errors ---------------------------------------------------------- */

typedef unsigned long long llm__big; /* for "%llu" */

typedef struct llm__input { /* the input being read; its errors begin with "PATH: " */
    const char *path;
    llm_error *err;
} llm__input;

static bool llm__input_error(const llm__input *in, llm_status status, const char *format,
                             va_list arguments) {
    char text[440];
    vsnprintf(text, sizeof text, format, arguments);
    return llm__fail(in->err, status, "%s: %s", in->path, text);
}

/* The input is damaged or contradicts itself. */
LLM__PRINTF(2, 3)
static bool llm__bad(const llm__input *in, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    llm__input_error(in, LLM_ERROR_FORMAT, format, arguments);
    va_end(arguments);
    return false;
}

/* The input may be valid, but this engine cannot use it. */
LLM__PRINTF(2, 3)
static bool llm__unsupported(const llm__input *in, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    llm__input_error(in, LLM_ERROR_UNSUPPORTED, format, arguments);
    va_end(arguments);
    return false;
}

static bool llm__not_among(const llm__input *in, const char *what, llm__printable name,
                           const char *known) {
    return llm__unsupported(in, "%s \"%s\" is not supported; supported: %s", what, name.text,
                            known);
}

/* ---- Names ----------------------------------------------------------- */

static llm_string llm__string(const char *text) {
    llm_string s = {text, strlen(text)};
    return s;
}

static int llm__compare_strings(const llm_string *a, const llm_string *b) {
    size_t shorter = a->length < b->length ? a->length : b->length;
    int order = shorter ? memcmp(a->data, b->data, shorter) : 0;
    return order ? order : (a->length > b->length) - (a->length < b->length);
}

/* Equal names are ordered by address, so that the result of qsort is deterministic. */
static int llm__compare_names(const void *a, const void *b) {
    const llm_string *x = *(const llm_string *const *)a, *y = *(const llm_string *const *)b;
    int order = llm__compare_strings(x, y);
    return order ? order : (x > y) - (x < y);
}

/* Return pointers to `count` records of `stride` bytes, sorted by name (the first member of a
 * record). If two names are equal, the error is "<two> called 'NAME'". */
static const llm_string **llm__index(const llm__input *in, const void *items, int64_t count,
                                     size_t stride, const char *two) {
    const llm_string **index = (const llm_string **)llm__new((size_t)count, sizeof *index,
                                                             "an index of names", in->err);
    if (!index) return NULL;
    for (int64_t i = 0; i < count; i++)
        index[i] = (const llm_string *)(const void *)((const char *)items + (size_t)i * stride);
    qsort(index, (size_t)count, sizeof *index, llm__compare_names);
    for (int64_t i = 1; i < count; i++)
        if (!llm__compare_strings(index[i - 1], index[i])) {
            llm__bad(in, "%s called '%s'", two, llm__show(*index[i]).text);
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

/* ---- Reading the header ---------------------------------------------- */

typedef struct llm__reader {
    llm_file *file;
    uint64_t at; /* offset of the next byte, at most file->size */
    llm__input in;
} llm__reader;

static uint64_t llm__left(const llm__reader *r) { return r->file->size - r->at; }

static const uint8_t *llm__read_bytes(llm__reader *r, uint64_t n, const char *what) {
    if (n > llm__left(r)) {
        llm__bad(&r->in,
                 "%s at byte %llu needs %llu more bytes, but the file ends at byte %llu: it is "
                 "damaged, or did not arrive whole; fetch it again",
                 what, (llm__big)r->at, (llm__big)n, (llm__big)r->file->size);
        return NULL;
    }
    r->at += n;
    return r->file->data + (r->at - n);
}

static bool llm__read_number(llm__reader *r, const char *what, void *out, size_t size) {
    const uint8_t *bytes = llm__read_bytes(r, size, what);
    if (bytes) memcpy(out, bytes, size);
    return bytes != NULL;
}

static bool llm__read_string(llm__reader *r, const char *what, llm_string *out) {
    uint64_t length = 0;
    if (!llm__read_number(r, what, &length, sizeof length)) return false;
    out->data = (const char *)llm__read_bytes(r, length, what);
    out->length = (size_t)length;
    return out->data != NULL;
}

/* Size of an element in bytes; 0 for a string, an array or an unknown type. */
static size_t llm__value_size(uint32_t type) {
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof sizes ? sizes[type] : 0;
}

/* Check that all elements are inside the file, and set value->data and value->bytes. */
static bool llm__read_elements(llm__reader *r, llm_value *value, const char *what) {
    uint64_t start = r->at, bytes = 0, size = llm__value_size(value->element_type);
    llm_string skipped;
    bool strings = !size; /* each takes at least 8 bytes */
    if (strings ? value->count > llm__left(r) / 8 : !llm__multiply(value->count, size, &bytes))
        return llm__bad(&r->in, "%s at byte %llu is said to hold %llu %s, more than the file can",
                        what, (llm__big)start, (llm__big)value->count,
                        strings ? "strings" : "elements");
    for (uint64_t i = 0; strings && i < value->count; i++)
        if (!llm__read_string(r, what, &skipped)) return false;
    if (!llm__read_bytes(r, bytes, what)) return false;
    value->data = r->file->data + start;
    value->bytes = (size_t)(r->at - start);
    return true;
}

static bool llm__read_value(llm__reader *r, llm_value *value) {
    uint64_t start = r->at;
    uint32_t type = 0;
    if (!llm__read_string(r, "the key of a metadata value", &value->key)) return false;
    if (!value->key.length || value->key.length > 65535)
        return llm__bad(&r->in,
                        "the metadata value at byte %llu has a key of %zu bytes (1 to 65535 "
                        "are allowed)",
                        (llm__big)start, value->key.length);
    char what[100];
    snprintf(what, sizeof what, "the value of '%s'", llm__show(value->key).text);
    if (!llm__read_number(r, what, &type, sizeof type)) return false;
    value->type = (llm_value_type)type;
    value->count = 1;
    if (value->type == LLM_VALUE_ARRAY &&
        (!llm__read_number(r, what, &type, sizeof type) ||
         !llm__read_number(r, what, &value->count, sizeof value->count)))
        return false;
    if (value->type == LLM_VALUE_ARRAY && type == LLM_VALUE_ARRAY)
        return llm__bad(&r->in,
                        "%s at byte %llu is an array of arrays, which GGUF readers do not take",
                        what, (llm__big)start);
    if (type != LLM_VALUE_STRING && !llm__value_size(type))
        return llm__bad(&r->in, "%s at byte %llu is of type %u, which does not exist", what,
                        (llm__big)start, type);
    value->element_type = (llm_value_type)type;
    return llm__read_elements(r, value, what);
}

/* Make room for one more record. The capacity doubles; counts in a header are not used, since they
 * may be false. New memory is not zeroed, so that unused pages cost nothing. */
static void *llm__grow(void *items, int64_t count, int64_t *capacity, size_t size, const char *what,
                       llm_error *err) {
    if (count < *capacity) return items;
    int64_t wanted = *capacity ? *capacity * 2 : 64;
    uint64_t bytes = 0;
    bool fits = llm__multiply((uint64_t)wanted, size, &bytes) && bytes <= SIZE_MAX / 2;
    void *grown = fits ? LLM_REALLOC(items, (size_t)bytes) : NULL;
    if (!grown) {
        llm__no_memory(err, fits ? bytes : SIZE_MAX, what);
        return NULL;
    }
    llm__want_large_pages(grown, (size_t)bytes);
    *capacity = wanted;
    return grown;
}

/* Add a zeroed record by llm__grow. list: the address of the pointer to the records. */
static bool llm__add_record(void *list, int64_t count, int64_t *capacity, size_t size,
                            const char *what, llm_error *err) {
    void *items;
    memcpy(&items, list, sizeof items);
    items = llm__grow(items, count, capacity, size, what, err);
    if (!items) return false;
    memcpy(list, &items, sizeof items);
    memset((char *)items + (size_t)count * size, 0, size);
    return true;
}

static bool llm__read_values(llm__reader *r, uint64_t count) {
    llm_file *file = r->file;
    int64_t capacity = 0;
    for (; (uint64_t)file->n_values < count; file->n_values++)
        if (!llm__add_record(&file->values, file->n_values, &capacity, sizeof *file->values,
                             "the metadata", r->in.err) ||
            !llm__read_value(r, &file->values[file->n_values]))
            return false;
    file->value_index = llm__index(&r->in, file->values, file->n_values, sizeof *file->values,
                                   "the metadata has two values");
    return file->value_index != NULL;
}

/* Report a type that is not supported. The message includes its name: `names` lists all types of
 * GGUF in the order of their numbers. */
static bool llm__unsupported_type(llm__reader *r, const char *what, uint32_t type) {
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
    return llm__unsupported(&r->in,
                            "%s is of type %u (%.*s), which is not supported; supported are %s",
                            what, type, (int)strcspn(name, " "), name, known);
}

/* False if no tensor of this type can have these dimensions. */
static bool llm__tensor_bytes(const llm_type_info *info, int n_dims, const uint64_t *dims,
                              uint64_t *bytes) {
    uint64_t values = 1;
    if (dims[0] % (uint64_t)info->block_values) return false;
    for (int i = 0; i < n_dims; i++)
        if (!dims[i] || !llm__multiply(values, dims[i], &values) || values > INT64_MAX)
            return false;
    return llm__multiply(values / (uint64_t)info->block_values, (uint64_t)info->block_bytes,
                         bytes) &&
           *bytes <= INT64_MAX;
}

/* tensor->data stays NULL: *offset counts from the start of the data, which is not known yet. */
static bool llm__read_tensor(llm__reader *r, llm_tensor *tensor, uint64_t *offset) {
    uint64_t start = r->at, *d = tensor->dims;
    uint32_t n_dims = 0, type = 0;
    if (!llm__read_string(r, "the name of a tensor", &tensor->name)) return false;
    if (!tensor->name.length)
        return llm__bad(&r->in, "the tensor at byte %llu has no name", (llm__big)start);
    char what[100];
    snprintf(what, sizeof what, "the tensor '%s'", llm__show(tensor->name).text);
    if (!llm__read_number(r, what, &n_dims, sizeof n_dims)) return false;
    if (n_dims < 1 || n_dims > 4)
        return llm__bad(&r->in, "%s at byte %llu has %u dimensions (1 to 4 are allowed)", what,
                        (llm__big)start, n_dims);
    tensor->source = tensor->name;
    tensor->n_dims = (int)n_dims;
    for (uint32_t i = 0; i < 4; i++) d[i] = 1;
    if (!llm__read_number(r, what, d, n_dims * sizeof *d) ||
        !llm__read_number(r, what, &type, sizeof type) ||
        !llm__read_number(r, what, offset, sizeof *offset))
        return false;
    const llm_type_info *info = type < LLM_Q4_Z ? llm_type_find((llm_type)type) : NULL;
    if (!info) return llm__unsupported_type(r, what, type);
    tensor->type = info->type;
    return llm__tensor_bytes(info, tensor->n_dims, d, &tensor->bytes) ||
           llm__bad(&r->in,
                    "%s at byte %llu has the impossible shape %llu x %llu x %llu x %llu (none "
                    "may be zero, the first a multiple of %d for %s)",
                    what, (llm__big)start, (llm__big)d[0], (llm__big)d[1], (llm__big)d[2],
                    (llm__big)d[3], info->block_values, info->name);
}

static bool llm__read_tensors(llm__reader *r, uint64_t count, uint64_t **offsets) {
    llm_file *file = r->file;
    int64_t n, capacity = 0, offsets_capacity = 0;
    for (; (uint64_t)(n = file->n_tensors) < count; file->n_tensors++)
        if (!llm__add_record(&file->tensors, n, &capacity, sizeof *file->tensors, "the tensors",
                             r->in.err) ||
            !llm__add_record(offsets, n, &offsets_capacity, sizeof **offsets, "the tensors",
                             r->in.err) ||
            !llm__read_tensor(r, &file->tensors[n], &(*offsets)[n]))
            return false;
    file->tensor_index = llm__index(&r->in, file->tensors, file->n_tensors, sizeof *file->tensors,
                                    "there are two tensors");
    return file->tensor_index != NULL;
}

static int llm__compare_places(const void *a, const void *b) {
    const llm_tensor *x = *(const llm_tensor *const *)a, *y = *(const llm_tensor *const *)b;
    const uint8_t *p = (const uint8_t *)x->data, *q = (const uint8_t *)y->data;
    return (p > q) - (p < q);
}

/* Check that no two tensors share bytes. */
static bool llm__check_overlap(const llm__reader *r) {
    size_t n = (size_t)r->file->n_tensors;
    const llm_tensor **order = (const llm_tensor **)llm__new(n, sizeof *order, "the tensors' order",
                                                             r->in.err);
    if (!order) return false;
    for (size_t i = 0; i < n; i++) order[i] = &r->file->tensors[i];
    qsort(order, n, sizeof *order, llm__compare_places);
    bool apart = true;
    for (size_t i = 1; apart && i < n; i++) {
        const uint8_t *data = (const uint8_t *)order[i]->data;
        if ((const uint8_t *)order[i - 1]->data + order[i - 1]->bytes > data)
            apart = llm__bad(&r->in, "the tensors '%s' and '%s' overlap, at byte %llu",
                             llm__show(order[i - 1]->name).text, llm__show(order[i]->name).text,
                             (llm__big)(data - r->file->data));
    }
    LLM_FREE((void *)order);
    return apart;
}

static bool llm__place_tensors(llm__reader *r, const uint64_t *offsets) {
    llm_file *file = r->file;
    uint64_t alignment = 32, begin = 0;
    const llm_value *value = llm_file_find(file, "general.alignment");
    if (value &&
        (!llm_value_u64(value, 0, &alignment) || !alignment || (alignment & (alignment - 1))))
        return llm__bad(&r->in, "general.alignment is %llu, but must be a power of two",
                        (llm__big)alignment);
    if (!llm__add(r->at, alignment - 1, &begin)) begin = UINT64_MAX;
    begin &= ~(alignment - 1);
    for (int64_t i = 0; i < file->n_tensors; i++) {
        llm_tensor *tensor = &file->tensors[i];
        uint64_t place = 0, end = 0;
        if (offsets[i] & (alignment - 1))
            return llm__bad(&r->in,
                            "the tensor '%s' has the offset %llu, which is no multiple of the "
                            "alignment %llu",
                            llm__show(tensor->name).text, (llm__big)offsets[i],
                            (llm__big)alignment);
        if (!llm__add(begin, offsets[i], &place) || !llm__add(place, tensor->bytes, &end) ||
            end > file->size)
            return llm__bad(&r->in,
                            "the tensor '%s' (%llu bytes at offset %llu from byte %llu) lies "
                            "past the end of the file at byte %llu: it is damaged, or did not "
                            "arrive whole; fetch it again",
                            llm__show(tensor->name).text, (llm__big)tensor->bytes,
                            (llm__big)offsets[i], (llm__big)begin, (llm__big)file->size);
        tensor->data = file->data + place;
    }
    return llm__check_overlap(r);
}

/* Git without LFS checks out a few lines of text in place of a large file. */
static bool llm__refuse_pointer(const llm__input *in, const void *data, uint64_t size) {
    static const char beginning[] = "version https://git-lfs";
    return size < sizeof beginning - 1 || memcmp(data, beginning, sizeof beginning - 1) ||
           llm__bad(in, "not the file, but what git without LFS brings in place of a large one; "
                        "get the file itself (git lfs pull)");
}

/* A safetensors file starts with the length of its header (u64) and a JSON object. A GGUF file of
 * more than 14 GB with 123 ('{') tensors looks the same, so "GGUF" is checked as well. */
static bool llm__is_safetensors(const void *data, uint64_t size) {
    uint64_t length = 0;
    if (size > 8) memcpy(&length, data, sizeof length);
    return size > 8 && length <= size - 8 && ((const char *)data)[8] == '{' &&
           memcmp(data, "GGUF", 4);
}

static bool llm__read_magic(llm__reader *r) {
    const llm_file *file = r->file;
    if (!file->size) return llm__bad(&r->in, "not a GGUF file: it is empty");
    if (!llm__refuse_pointer(&r->in, file->data, file->size)) return false;
    if (llm__is_safetensors(file->data, file->size))
        return llm__bad(&r->in,
                        "a safetensors file is only a part of a model; give the folder that it "
                        "lies in, which must also hold a config.json and a tokenizer.json");
    llm_string beginning = {(const char *)file->data, file->size < 16 ? (size_t)file->size : 16};
    if (file->size < 4 || memcmp(file->data, "GGUF", 4))
        return llm__bad(&r->in, "not a GGUF file: it starts with \"%s\" instead of \"GGUF\"",
                        llm__show(beginning).text);
    r->at = 4;
    return true;
}

static bool llm__read_header(llm__reader *r) {
    uint32_t version = 0;
    uint64_t n_tensors = 0, n_values = 0, *offsets = NULL;
    if (!llm__read_magic(r) || !llm__read_number(r, "the version", &version, sizeof version))
        return false;
    if (version != 2 && version != 3)
        return llm__unsupported(
            &r->in, "GGUF version %u is not supported (2 and 3 are)%s", version,
            version && !(version & 0xffff) ? "; this looks like a big-endian file" : "");
    r->file->version = (int)version;
    if (!llm__read_number(r, "the number of tensors", &n_tensors, sizeof n_tensors) ||
        !llm__read_number(r, "the number of metadata values", &n_values, sizeof n_values))
        return false;
    /* a value takes at least 14 bytes (key 1, data 1), a tensor 33 (name 1, one dimension) */
    if (n_values > llm__left(r) / 14 || n_tensors > llm__left(r) / 33)
        return llm__bad(&r->in,
                        "the header promises %llu metadata values and %llu tensors, more than "
                        "the file's %llu bytes can hold: it is damaged",
                        (llm__big)n_values, (llm__big)n_tensors, (llm__big)r->file->size);
    bool read = llm__read_values(r, n_values) && llm__read_tensors(r, n_tensors, &offsets) &&
                llm__place_tensors(r, offsets);
    LLM_FREE(offsets);
    return read;
}

/* ---- Opening and closing --------------------------------------------- */

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

/* Drop mapped pages that a device has copied; the system reloads them if they are read again. */
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

/* Make the file the owner of `memory`: llm_file_close frees it. On failure, it is freed here. */
static bool llm__add_memory(llm_file *file, void *memory, llm_error *err) {
    if (!llm__add_record(&file->memories, file->n_memories, &file->memories_capacity,
                         sizeof *file->memories, "a file", err))
        return LLM_FREE(memory), false;
    file->memories[file->n_memories++] = memory;
    return true;
}

/* read: llm__read_header or llm__read_safetensors. Takes ownership of `data`, even on failure. */
static llm_file *llm__file_create(const void *data, uint64_t size, llm__memory memory,
                                  const char *name, bool (*read)(llm__reader *), llm_error *err) {
    llm_file *file = (llm_file *)llm__new(1, sizeof *file, "a file", err);
    if (!file) return llm__release(data, size, memory), (llm_file *)NULL;
    file->data = (const uint8_t *)data;
    file->size = size;
    file->memory = memory;
    file->path = llm__copy_text(name, "", err);
    llm__reader reader = {file, 0, {file->path, err}};
    if (file->path && read(&reader)) return file;
    llm_file_close(file);
    return NULL;
}

static bool llm__is_directory(const char *path) {
    struct stat status;
    return !stat(path, &status) && S_ISDIR(status.st_mode);
}

/* Map a file. *data is NULL if it is empty. */
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
    if (known && !file)
        return llm__fail(err, LLM_ERROR_FILE, "cannot open %s: it is %s, not a file", path,
                         S_ISDIR(status.st_mode) ? "a directory" : "a pipe or a device");
    return (file && (*data || !*size)) ||
           llm__fail(err, LLM_ERROR_FILE, "cannot open %s: %s", path, strerror(why));
}

static llm_file *llm__file_map(const char *path, bool (*read)(llm__reader *), llm_error *err) {
    const void *data = NULL;
    uint64_t size = 0;
    return llm__map(path, &data, &size, err)
               ? llm__file_create(data, size, LLM__MAPPED, path, read, err)
               : NULL;
}

/* ---- A model in several files ----------------------------------------
 * The files are called NAME-00001-of-00003.gguf and so on. Each file holds the values of
 * llm__split_keys and may hold tensors; the first also holds the metadata. The caller gets the
 * first file, with the tensors of all files. */

typedef struct llm__split_keys {
    uint64_t number, count, n_tensors; /* split.no (from 0), split.count, split.tensors.count */
} llm__split_keys;

/* A file without split.count is the only part: split->count = 1. */
static bool llm__read_split_keys(const llm_file *file, llm__split_keys *split, llm_error *err) {
    llm__input in = {file->path, err};
    const llm_value *count = llm_file_find(file, "split.count");
    split->number = 0;
    split->count = 1;
    if (count && (!llm_value_u64(count, 0, &split->count) || split->count > 99999))
        return llm__bad(&in, "split.count is no number from 0 to 99999");
    if (split->count < 2) return split->count = 1, true;
    if (!llm_value_u64(llm_file_find(file, "split.no"), 0, &split->number) ||
        split->number >= split->count)
        return llm__bad(&in, "it is one of %u parts, but split.no does not say which",
                        (unsigned)split->count);
    return llm_value_u64(llm_file_find(file, "split.tensors.count"), 0, &split->n_tensors) ||
           llm__bad(&in, "it is one of %u parts, but has no split.tensors.count",
                    (unsigned)split->count);
}

/* Open part `number` of a model, and check that it is that part. ending: the place in `path` where
 * the ending of the part's name is written. split: the keys of another part, which must agree */
static llm_file *llm__file_part_open(char *path, char *ending, const llm__split_keys *split,
                                     unsigned number, llm_error *err) {
    llm_error why;
    llm__clear(&why);
    llm__split_keys found;
    llm__input in = {path, err};
    unsigned count = (unsigned)split->count;
    sprintf(ending, "-%05u-of-%05u.gguf", number + 1, count);
    llm_file *part = llm__file_map(path, llm__read_header, &why);
    if (!part)
        llm__fail(err, why.status, "part %u of %u of the model is not there, or is damaged: %.420s",
                  number + 1, count, why.message);
    else if (llm__read_split_keys(part, &found, err)) {
        if (found.count == count && found.number == number && found.n_tensors == split->n_tensors)
            return part;
        llm__bad(&in,
                 "by its name part %u of %u with %llu tensors in all, but inside it says part "
                 "%u of %u with %llu: the parts are not of one model, or were renamed",
                 number + 1, count, (llm__big)split->n_tensors, (unsigned)found.number + 1,
                 (unsigned)found.count, (llm__big)found.n_tensors);
    }
    llm_file_close(part);
    return NULL;
}

/* Copy the tensors of all parts to the file's own list. two: see llm__index */
static bool llm__file_join(llm_file *file, const char *two, llm_error *err) {
    llm__input in = {file->path, err};
    int64_t n = file->n_tensors;
    for (int64_t i = 0; i < file->n_parts; i++) n += file->parts[i]->n_tensors;
    llm_tensor *tensors = (llm_tensor *)llm__new((size_t)n, sizeof *tensors, "the tensors", err);
    if (!tensors) return false;
    n = 0;
    for (int64_t i = -1; i < file->n_parts; i++) {
        const llm_file *part = i < 0 ? file : file->parts[i];
        for (int64_t k = 0; k < part->n_tensors; k++) tensors[n++] = part->tensors[k];
    }
    LLM_FREE(file->tensors);
    LLM_FREE((void *)file->tensor_index);
    file->tensors = tensors;
    file->n_tensors = n;
    file->tensor_index = llm__index(&in, tensors, n, sizeof *tensors, two);
    return file->tensor_index != NULL;
}

/* Open the other parts, if any. Takes ownership of the file, even on failure. */
static llm_file *llm__file_with_parts(llm_file *file, llm_error *err) {
    llm__split_keys split;
    char ending[40];
    bool good = llm__read_split_keys(file, &split, err);
    if (good && split.count == 1) return file;
    unsigned number = (unsigned)split.number, count = (unsigned)split.count;
    char *path = good ? llm__copy_text(file->path, "", err) : NULL, *end = path;
    if (path) {
        llm__input in = {file->path, err};
        size_t n = (size_t)sprintf(ending, "-%05u-of-%05u.gguf", number + 1, count);
        end += strlen(path) > n ? strlen(path) - n : 0;
        good = !strcmp(end, ending) ||
               llm__bad(&in,
                        "it says that it is part %u of %u; its name must end in %s, so that the "
                        "others can be found beside it",
                        number + 1, count, ending);
    }
    good = good && path;
    if (good && number > 0) { /* the first holds the metadata */
        llm_file_close(file);
        file = llm__file_part_open(path, end, &split, 0, err);
        good = file != NULL;
    }
    if (good)
        file->parts = (llm_file **)llm__new(count, sizeof *file->parts, "the parts of a model",
                                            err);
    good = good && file->parts;
    uint64_t total = good ? (uint64_t)file->n_tensors : 0;
    for (unsigned i = 1; good && i < count; i++) {
        llm_file *part = llm__file_part_open(path, end, &split, i, err);
        good = part != NULL;
        if (part) file->parts[file->n_parts++] = part, total += (uint64_t)part->n_tensors;
    }
    LLM_FREE(path);
    if (good && total != split.n_tensors) {
        llm__input in = {file->path, err};
        good = llm__bad(&in,
                        "the %u parts hold %llu tensors, but should hold %llu: fetch them again",
                        count, (llm__big)total, (llm__big)split.n_tensors);
    }
    if (good && llm__file_join(file, "two parts have a tensor", err)) return file;
    llm_file_close(file);
    return NULL;
}

/* Defined below, and in chapter 9 (tokenizer.json). */
static llm_file *llm__folder_open(const char *path, llm_error *err);
static llm_file *llm__vocabulary_open(const void *text, uint64_t length, const char *path,
                                      llm_error *err);

llm_file *llm_file_open(const char *path, llm_error *err) {
    const void *data = NULL;
    uint64_t size = 0;
    llm__clear(err);
    if (!path || !*path) {
        llm__fail(err, LLM_ERROR_ARGUMENT, "no path of a model file was given");
        return NULL;
    }
    if (llm__is_directory(path)) return llm__folder_open(path, err);
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
    llm__input in = {name, err};
    if (!data && size) {
        llm__fail(err, LLM_ERROR_ARGUMENT, "llm_file_from_memory: data is NULL");
        return NULL;
    }
    if (size && *(const char *)data == '{') return llm__vocabulary_open(data, size, name, err);
    llm_file *file = llm__file_create(data, size, LLM__BORROWED, name, llm__read_header, err);
    bool good = file && llm__read_split_keys(file, &split, err);
    if (good && split.count == 1) return file;
    if (good)
        llm__unsupported(&in, "one of %u parts of a model, which only llm_file_open can find",
                         (unsigned)split.count);
    llm_file_close(file);
    return NULL;
}
void llm_file_close(llm_file *file) {
    if (!file) return;
    for (int64_t i = 0; i < file->n_parts; i++) llm_file_close(file->parts[i]);
    LLM_FREE(file->parts);
    llm__release(file->data, file->size, file->memory);
    for (int64_t i = 0; i < file->n_memories; i++) LLM_FREE(file->memories[i]);
    LLM_FREE(file->memories);
    llm_json_free(&file->header);
    LLM_FREE((void *)file->value_index);
    LLM_FREE((void *)file->tensor_index);
    LLM_FREE(file->values);
    LLM_FREE(file->tensors);
    LLM_FREE(file->path);
    LLM_FREE(file);
}

const char *llm_file_path(const llm_file *file) { return file->path; }
uint64_t llm_file_size(const llm_file *file) {
    uint64_t size = file->folder && file->n_parts ? 0 : file->size; /* folder: only parts count */
    for (int64_t i = 0; i < file->n_parts; i++) size += file->parts[i]->size;
    return size;
}
int64_t llm_file_n_parts(const llm_file *file) {
    return file->n_parts + !(file->folder && file->n_parts);
}
int llm_file_version(const llm_file *file) { return file->folder ? 0 : file->version; }
int64_t llm_file_n_values(const llm_file *file) { return file->n_values; }
int64_t llm_file_n_tensors(const llm_file *file) { return file->n_tensors; }

const llm_value *llm_file_value(const llm_file *file, int64_t index) {
    return index >= 0 && index < file->n_values ? &file->values[index] : NULL;
}

const llm_tensor *llm_file_tensor(const llm_file *file, int64_t index) {
    return index >= 0 && index < file->n_tensors ? &file->tensors[index] : NULL;
}

/* The cast is valid because a name is the first member of its value or tensor. */
const llm_value *llm_file_find(const llm_file *file, const char *key) {
    return (const llm_value *)llm__find_name(file->value_index, file->n_values, llm__string(key));
}

const llm_tensor *llm_file_find_tensor(const llm_file *file, const char *name) {
    return (const llm_tensor *)llm__find_name(file->tensor_index, file->n_tensors,
                                              llm__string(name));
}

/* ---- Reading values -------------------------------------------------- */

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
    memcpy(&bits, value->data + index * size, size);
    memset(out, 0, sizeof *out);
    out->fraction = kind == 'f';
    if (kind == 'f' && size == 4) {
        float single;
        memcpy(&single, &bits, sizeof single);
        out->real = single;
    } else if (kind == 'f') {
        memcpy(&out->real, &bits, sizeof bits);
    } else {
        out->negative = kind == 'i' && bits >> (8 * size - 1);
        out->magnitude = out->negative ? (~bits + 1) & (UINT64_MAX >> (64 - 8 * size)) : bits;
    }
    return true;
}

/* Convert a real number to sign and magnitude. False if it is not whole or exceeds 64 bits. */
static bool llm__whole(llm__number *n) {
    if (!n->fraction) return true;
    double magnitude = fabs(n->real);
    if (!(magnitude < 18446744073709551616.0) || floor(magnitude) != magnitude) return false;
    n->magnitude = (uint64_t)magnitude;
    n->negative = n->real < 0;
    return true;
}

bool llm_value_u64(const llm_value *value, uint64_t index, uint64_t *out) {
    llm__number n;
    if (!llm__value_number(value, index, &n) || !llm__whole(&n) || n.negative) return false;
    *out = n.magnitude;
    return true;
}

bool llm_value_i64(const llm_value *value, uint64_t index, int64_t *out) {
    llm__number n;
    if (!llm__value_number(value, index, &n) || !llm__whole(&n)) return false;
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

/* ---- JSON ------------------------------------------------------------ */

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

/* Skip the next character if it is c. */
static bool llm__json_skip(llm__json_parser *p, int c) {
    if (llm__json_peek(p) != c) return false;
    p->at++;
    return true;
}

static void llm__json_space(llm__json_parser *p) {
    int c;
    while ((c = llm__json_peek(p)) == ' ' || c == '\n' || c == '\r' || c == '\t') p->at++;
}

/* Append a node and return its index; -1: out of memory. */
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

/* Read the code point after "\u". A code point above U+FFFF is written as two escapes, a "surrogate
 * pair". */
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

/* Decode the escape after a backslash. *out is in text that was read already, so there is room. */
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

/* Number of literal bytes from here, up to a '"', '\\', control character or invalid UTF-8. */
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

/* Check that the keys of an object differ, by a hash table of node index + 1 (0: free). Its seed
 * prevents collisions made on purpose. */
static bool llm__json_unique_keys(llm__json_parser *p, int64_t object) {
    const llm_json_node *nodes = p->json->nodes, *node = nodes + object + 1,
                        *end = nodes + object + nodes[object].span;
    uint64_t mask = 15,
             seed = llm__mix((uint64_t)(uintptr_t)nodes ^ (uint64_t)(llm_seconds() * 1e9));
    while (mask < 2 * (uint64_t)nodes[object].length) mask = mask * 2 + 1;
    uint32_t *table = (uint32_t *)llm__new((size_t)mask + 1, sizeof *table, "JSON", p->err);
    if (!table) return false;
    const llm_json_node *twice = NULL;
    for (; node < end && !twice; node += 1 + node[1].span) {
        uint64_t slot = llm__hash_bytes(seed, node->text, node->length);
        for (;; slot++) {
            uint32_t other = table[slot & mask];
            if (!other) break;
            const llm_json_node *key = nodes + other - 1;
            if (key->length == node->length && !memcmp(key->text, node->text, key->length))
                twice = node;
            if (twice) break;
        }
        table[slot & mask] = (uint32_t)(node - nodes) + 1;
    }
    LLM_FREE(table);
    if (!twice) return true;
    llm_string key = {twice->text, twice->length};
    return llm__json_error(p, (size_t)(twice->text - p->json->text),
                           "the key \"%s\" occurs twice in its object", llm__show(key).text);
}

static bool llm__json_parse_value(llm__json_parser *p);

static bool llm__json_parse_container(llm__json_parser *p, bool object) {
    char close = object ? '}' : ']';
    uint32_t count = 0;
    int64_t node = llm__json_add(p, object ? LLM_JSON_OBJECT : LLM_JSON_ARRAY);
    if (node < 0) return false;
    if (++p->depth > LLM__JSON_DEPTH)
        return llm__json_error(p, p->at, "more than %d arrays or objects in each other",
                               LLM__JSON_DEPTH);
    p->at++;
    llm__json_space(p);
    if (!llm__json_skip(p, close)) {
        do {
            llm__json_space(p);
            if (object) {
                if (llm__json_peek(p) != '"')
                    return llm__json_unexpected(p, "a key in quotation marks");
                if (!llm__json_parse_string(p)) return false;
                llm__json_space(p);
                if (!llm__json_skip(p, ':')) return llm__json_unexpected(p, "':'");
            }
            if (!llm__json_parse_value(p)) return false;
            count++;
            llm__json_space(p);
        } while (llm__json_skip(p, ','));
        if (!llm__json_skip(p, close))
            return llm__json_unexpected(p, object ? "',' or '}'" : "',' or ']'");
    }
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
    llm__input in = {name ? name : "JSON", err};
    if (!text && length) return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_json_parse: text is NULL");
    if (length > LLM__JSON_BYTES)
        return llm__bad(&in, "%s of JSON are more than the %s that are read",
                        llm__show_bytes(length).text, llm__show_bytes(LLM__JSON_BYTES).text);
    if (!llm__refuse_pointer(&in, text, length)) return false;
    json->text = (char *)LLM_MALLOC(length + 1);
    if (!json->text) return llm__no_memory(err, length, in.path);
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
    return llm_json_has_kind(node, LLM_JSON_STRING) && node->length == strlen(text) &&
           !memcmp(node->text, text, node->length);
}

llm_string llm_json_key(const llm_json_node *value) {
    llm_string key = {value[-1].text, value[-1].length};
    return key;
}

const llm_json_node *llm_json_member(const llm_json_node *object, const char *key) {
    bool members = llm_json_has_kind(object, LLM_JSON_OBJECT);
    const llm_json_node *value = members ? llm_json_first(object) : NULL;
    while (value && !llm_json_is(value - 1, key)) value = llm_json_next(object, value);
    return value;
}

bool llm_json_bool(const llm_json_node *node, bool *out) {
    if (!llm_json_has_kind(node, LLM_JSON_TRUE) && !llm_json_has_kind(node, LLM_JSON_FALSE))
        return false;
    *out = node->kind == LLM_JSON_TRUE;
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
        else exponent += !point; /* a digit beyond the precision */
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

/* ---- Safetensors -----------------------------------------------------
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
    llm_type type; /* 100 and above: types that only safetensors files have */
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

/* Read a tensor's type, shape and offsets, and check that they agree. begin: offset of the data in
 * the file. The tensor may have 0 dimensions. */
static bool llm__read_source(const llm__reader *r, llm_tensor *t, const llm_json_node *node,
                             uint64_t begin) {
    const llm_json_node *dtype = llm_json_member(node, "dtype"),
                        *shape = llm_json_member(node, "shape"),
                        *place = llm_json_member(node, "data_offsets");
    const llm__dtype *d = llm__dtypes, *end = d + sizeof llm__dtypes / sizeof *llm__dtypes;
    uint64_t first, last, values = 1, size = r->file->size - begin;
    char what[100];
    t->name = t->source = llm_json_key(node);
    snprintf(what, sizeof what, "the tensor '%s'", llm__show(t->name).text);
    while (d < end && !llm_json_is(dtype, d->name)) d++;
    if (d == end)
        return llm__unsupported(&r->in, "%s is of the type '%s', which is unknown", what,
                                llm__show_node(dtype).text);
    if (!llm_json_has_kind(shape, LLM_JSON_ARRAY) || shape->length > 4)
        return llm__bad(&r->in, "%s has no shape of up to 4 dimensions", what);
    t->type = d->type;
    t->n_dims = (int)shape->length;
    for (int i = 0; i < 4; i++) t->dims[i] = 1;
    const llm_json_node *n = llm_json_first(shape);
    for (int i = t->n_dims - 1; i >= 0; i--, n = llm_json_next(shape, n))
        if (!llm_json_u64(n, &t->dims[i]) || !t->dims[i] ||
            !llm__multiply(values, t->dims[i], &values))
            return llm__bad(&r->in, "%s has an impossible shape", what);
    if (!llm_json_has_kind(place, LLM_JSON_ARRAY) || place->length != 2 ||
        !llm_json_u64(place + 1, &first) || !llm_json_u64(llm_json_next(place, place + 1), &last))
        return llm__bad(&r->in, "%s has no data_offsets of two numbers", what);
    if (first > last || last > size)
        return llm__bad(&r->in,
                        "%s has the place %llu to %llu, but there are %llu bytes of data: the file "
                        "is damaged, or did not arrive whole; fetch it again",
                        what, (llm__big)first, (llm__big)last, (llm__big)size);
    if (!llm__multiply(values, (uint64_t)d->bytes, &t->bytes) || t->bytes != last - first)
        return llm__bad(&r->in,
                        "%s of %llu values of type %s has %llu bytes, which is not their number",
                        what, (llm__big)values, d->name, (llm__big)(last - first));
    t->data = r->file->data + begin + first;
    return true;
}

static bool llm__read_safetensors(llm__reader *r) {
    llm_file *file = r->file;
    uint64_t length = 0;
    int64_t capacity = 0;
    if (!llm__refuse_pointer(&r->in, file->data, file->size)) return false;
    if (file->size >= 8) memcpy(&length, file->data, sizeof length);
    if (file->size < 8 || length > file->size - 8)
        return llm__bad(&r->in,
                        "a header of %llu bytes does not fit into a file of %llu: this is no "
                        "safetensors file, or it did not arrive whole; fetch it again",
                        (llm__big)length, (llm__big)file->size);
    if (length > LLM__SAFETENSORS_HEADER)
        return llm__bad(&r->in, "a header of %llu bytes; the format allows %d", (llm__big)length,
                        LLM__SAFETENSORS_HEADER);
    const char *text = (const char *)file->data + 8;
    if (!llm_json_parse(&file->header, text, (size_t)length, file->path, r->in.err)) return false;
    const llm_json_node *root = file->header.nodes;
    if (root->kind != LLM_JSON_OBJECT) return llm__bad(&r->in, "the header is not an object");
    for (const llm_json_node *n = llm_json_first(root); n; n = llm_json_next(root, n)) {
        if (llm_json_is(n - 1, "__metadata__")) continue;
        if (!llm__add_record(&file->tensors, file->n_tensors, &capacity, sizeof *file->tensors,
                             "the tensors", r->in.err) ||
            !llm__read_source(r, &file->tensors[file->n_tensors], n, 8 + length))
            return false;
        file->n_tensors++;
    }
    return llm__check_overlap(r);
}

/* ---- Metadata written by a loader -----------------------------------
 * A Hugging Face folder has JSON in place of metadata. The loaders translate it to the bytes of
 * GGUF metadata, which llm__read_values reads and checks like the metadata of a GGUF file. */

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
    const char *architecture; /* prefix of keys that begin with "." */
    llm_error err;            /* first failure; nothing is added after it */
} llm__metadata;

static bool llm__note_bytes(llm__metadata *m, const void *data, size_t n) {
    return m->err.status == LLM_OK && llm__append(&m->bytes, data, n, &m->err);
}

static bool llm__note_text(llm__metadata *m, llm_string s) {
    uint64_t length = s.length;
    return llm__note_bytes(m, &length, sizeof length) && llm__note_bytes(m, s.data, s.length);
}

/* Write a key; the caller then writes its n elements. type: LLM_VALUE_ARRAY, or the type of the
 * single element. */
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

static void llm__note_scalar(llm__metadata *m, const char *key, llm_value_type type, const void *x,
                             size_t size) {
    llm__note_key(m, key, type, type, 1);
    llm__note_bytes(m, x, size);
}

static void llm__note_u32(llm__metadata *m, const char *key, uint32_t x) {
    llm__note_scalar(m, key, LLM_VALUE_U32, &x, sizeof x);
}

static void llm__note_f32(llm__metadata *m, const char *key, float x) {
    llm__note_scalar(m, key, LLM_VALUE_F32, &x, sizeof x);
}

static void llm__note_bool(llm__metadata *m, const char *key, bool x) {
    llm__note_scalar(m, key, LLM_VALUE_BOOL, &x, 1);
}

static void llm__note_string(llm__metadata *m, const char *key, llm_string x) {
    llm__note_key(m, key, LLM_VALUE_STRING, LLM_VALUE_STRING, 1);
    llm__note_text(m, x);
}

/* bytes: size of all n elements. */
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
    file->version = 3;
    memset(&m->bytes, 0, sizeof m->bytes);
    llm__reader r = {file, 0, {file->path, err}};
    return llm__read_values(&r, m->n_values);
}

/* Defined in chapter 9. */
static bool llm__folder_vocabulary(llm__metadata *m, const char *folder, llm_error *err);

/* ---- Loading: the shape ------------------------------------------------------------- */

typedef struct llm__loader {
    llm_model *model;
    llm__input in;
    bool *used; /* (n_tensors of the file) whether the model uses the tensor */
} llm__loader;

/* Metadata keys begin with the name of the architecture: "llama.block_count". */
static const llm_value *llm__model_value(const llm__loader *l, const char *name, char key[128]) {
    snprintf(key, 128, "%s.%s", l->model->config.architecture, name);
    return llm_file_find(l->model->file, key);
}

/* Read an integer from 1 to INT32_MAX. An absent key gives `fallback`, or an error if that is 0. */
static bool llm__model_int(const llm__loader *l, const char *name, int64_t fallback, int *out) {
    char key[128];
    const llm_value *value = llm__model_value(l, name, key);
    uint64_t x = (uint64_t)fallback;
    if (!value && !fallback)
        return llm__bad(&l->in, "the metadata has no %s, which this architecture needs", key);
    if (value && (value->type == LLM_VALUE_ARRAY || !llm_value_u64(value, 0, &x)))
        return llm__unsupported(
            &l->in, "%s is not one whole number (a value per layer is not supported)", key);
    if (x < 1 || x > INT32_MAX)
        return llm__bad(&l->in, "%s is %llu, which is impossible", key, (llm__big)x);
    *out = (int)x;
    return true;
}

static bool llm__model_float(const llm__loader *l, const char *name, double fallback, float *out) {
    char key[128];
    const llm_value *value = llm__model_value(l, name, key);
    double x = fallback;
    if ((value && !llm_value_f64(value, 0, &x)) || !(x > 0) || x > 1e30)
        return llm__bad(&l->in, "%s is not a positive number", key);
    *out = (float)x;
    return true;
}

static bool llm__model_architecture(const llm__loader *l) {
    llm_model *model = l->model;
    llm_string name = {"", 0};
    size_t cursor = 0;
    char known[128];
    if (!llm_value_string(llm_file_find(model->file, "general.architecture"), &cursor, &name))
        return llm__bad(&l->in, "the metadata has no general.architecture; is this a model file?");
    model->architecture = llm__find_architecture(name, false);
    llm__list_architectures(known, sizeof known, false);
    if (!model->architecture)
        return llm__not_among(&l->in, "the architecture", llm__show(name), known);
    memcpy(model->config.architecture, name.data, name.length);
    model->config.rope_pairing = model->file->folder ? LLM_ROPE_HALVES
                                                     : model->architecture->pairing;
    return true;
}

/* Is `word` one of the words in `list`, which are separated by single spaces? */
static bool llm__is_listed(llm_string word, const char *list) {
    for (size_t n; *list; list += n + (list[n] == ' ')) {
        n = strcspn(list, " ");
        if (n == word.length && !memcmp(list, word.data, n)) return true;
    }
    return false;
}

/* Is the option off: false, 0 or an empty string? */
static bool llm__is_off(const llm_value *value) {
    double x;
    llm_string s;
    size_t cursor = 0;
    if (value->type == LLM_VALUE_ARRAY) return false;
    if (value->type == LLM_VALUE_STRING) return llm_value_string(value, &cursor, &s) && !s.length;
    return llm_value_f64(value, 0, &x) && x == 0;
}

/* Refuse an unknown option of the architecture, unless it is off: it may change the result. */
static bool llm__model_known_keys(const llm__loader *l) {
    static const char known[] = /* tensor_data_layout only matters before conversion */
        "block_count context_length embedding_length feed_forward_length vocab_size "
        "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
        "attention.layer_norm_rms_epsilon attention.sliding_window "
        "attention.sliding_window_pattern rope.dimension_count rope.freq_base rope.scale_linear "
        "rope.scaling.type rope.scaling.factor rope.scaling.attn_factor "
        "rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_fast "
        "rope.scaling.yarn_beta_slow rope.scaling.llm.stated_context_length tensor_data_layout";
    const char *prefix = l->model->config.architecture;
    size_t n = strlen(prefix);
    for (int64_t i = 0; i < l->model->file->n_values; i++) {
        const llm_value *value = &l->model->file->values[i];
        llm_string key = value->key;
        if (key.length <= n || memcmp(key.data, prefix, n) || key.data[n] != '.') continue;
        llm_string name = {key.data + n + 1, key.length - n - 1};
        if (!llm__is_off(value) && !llm__is_listed(name, known))
            return llm__unsupported(&l->in, "%s is an option of %s that is not supported",
                                    llm__show(key).text, prefix);
    }
    return true;
}

/* Read the RoPE scaling, by which the model was extended to a longer context. */
static bool llm__model_scaling(const llm__loader *l) {
    llm_config *c = &l->model->config;
    char key[128];
    const llm_value *type = llm__model_value(l, "rope.scaling.type", key);
    llm_string name = {"linear", 6}; /* the default if there is only a factor */
    size_t cursor = 0;
    int stated = 0;
    if (type && !llm_value_string(type, &cursor, &name))
        return llm__bad(&l->in, "%s is not a name", key);
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
        return llm__not_among(&l->in, "RoPE scaling", llm__show(name), "linear, yarn");
    else if (c->rope_factor != 1) c->rope_scaling = LLM_ROPE_LINEAR;
    if (c->rope_scaling == LLM_ROPE_YARN && c->rope_factor > 1)
        c->rope_magnitude *= 1.0f + 0.1f * logf(c->rope_factor);
    if (stated > c->context_length)
        snprintf(l->model->context_note, sizeof l->model->context_note,
                 "config.json says %d, but its YaRN scaling makes %d of %d, its "
                 "original_max_position_embeddings",
                 stated, c->context_length, c->rope_original_context);
    return true;
}

/* Set model->windows, the sliding window of each layer (0: none). */
static bool llm__model_windows(const llm__loader *l) {
    llm_config *c = &l->model->config;
    char key[128], pattern_key[128];
    const llm_value *window = llm__model_value(l, "attention.sliding_window", key);
    const llm_value *pattern = llm__model_value(l, "attention.sliding_window_pattern", pattern_key);
    int64_t n_tensors = l->model->file->n_tensors;
    uint64_t w = 0;
    if (window && (window->type == LLM_VALUE_ARRAY || !llm_value_u64(window, 0, &w)))
        return llm__unsupported(&l->in, "%s is not one whole number", key);
    if (pattern &&
        (pattern->element_type != LLM_VALUE_BOOL || pattern->count != (uint64_t)c->n_layers))
        return llm__unsupported(&l->in, "%s is not a list of yes or no for each of the %d layers",
                                pattern_key, c->n_layers);
    /* each layer has tensors; checked before memory is allocated for an absurd count */
    if (c->n_layers > n_tensors || c->n_layers > INT32_MAX / LLM__N_PARTS)
        return llm__bad(&l->in, "%d layers, but only %llu tensors%s", c->n_layers,
                        (llm__big)n_tensors, n_tensors ? "" : " (a vocabulary only?)");
    int *windows = l->model->windows = (int *)llm__new((size_t)c->n_layers, sizeof *windows,
                                                       "the windows of the layers", l->in.err);
    if (!windows) return false;
    if (w > INT32_MAX) w = 0; /* no limit */
    for (int i = 0; i < c->n_layers; i++) {
        bool windowed = true;
        if (pattern && !llm_value_bool(pattern, (uint64_t)i, &windowed))
            return llm__bad(&l->in, "%s is neither yes nor no", pattern_key);
        windows[i] = windowed ? (int)w : 0;
        if (windows[i]) c->window = (int)w;
    }
    return true;
}

static bool llm__model_config(const llm__loader *l) {
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
        !llm__model_float(l, "attention.layer_norm_rms_epsilon", 1e-5, &c->norm_epsilon))
        return false;
    if (c->n_heads % c->n_kv_heads)
        return llm__bad(&l->in, "%d query heads cannot share %d key/value heads evenly", c->n_heads,
                        c->n_kv_heads);
    if (value_length != c->head_dim)
        return llm__unsupported(&l->in,
                                "keys of %d and values of %d numbers per head; they must be alike",
                                c->head_dim, value_length);
    if (c->rope_dim > c->head_dim || c->rope_dim % 2)
        return llm__bad(&l->in,
                        "RoPE over %d dimensions of a head of %d: it must be even and not more",
                        c->rope_dim, c->head_dim);
    return llm__model_scaling(l) && llm__model_windows(l);
}

/* ---- Loading: the tensors ------------------------------------------------------------ */

/* Find a tensor, which must have the shape (rows, cols); a vector has 1 row. On failure, sets the
 * error and returns NULL. */
static const llm_tensor *llm__model_tensor(const llm__loader *l, const char *name, uint64_t rows,
                                           uint64_t cols) {
    const llm_file *file = l->model->file;
    const llm_tensor *t = llm_file_find_tensor(file, name);
    if (!t) {
        llm__bad(&l->in, "the tensor %s is missing%s", name,
                 file->n_tensors ? "" : " (the file holds no tensors: a vocabulary only?)");
        return NULL;
    }
    llm__printable source = llm__show(t->source);
    if (t->dims[0] != cols || t->dims[1] != rows || t->dims[2] != 1 || t->dims[3] != 1)
        llm__bad(&l->in, "the tensor %s is of shape (%llu, %llu), but %s asks for (%llu, %llu)",
                 source.text, (llm__big)t->dims[1], (llm__big)t->dims[0],
                 file->folder ? "config.json" : "the metadata", (llm__big)rows, (llm__big)cols);
    else if ((uintptr_t)t->data % (t->type == LLM_F32 ? 4 : 2)) /* kernels read it in place */
        llm__bad(&l->in, "the tensor %s starts at an odd address", source.text);
    else return l->used[t - file->tensors] = true, t;
    return NULL;
}

static void llm__part_name(char name[64], int layer, int part) {
    snprintf(name, 64, "blk.%d.%s", layer, llm__parts()[part].name);
}

/* The layer N in a tensor name "<prefix>N.<part>"; -1 for any other name. */
static int64_t llm__layer_of(llm_string name, const char *prefix) {
    size_t start = strlen(prefix), i = start;
    int64_t layer = 0;
    if (name.length < start || memcmp(name.data, prefix, start)) return -1;
    for (; i < name.length && name.data[i] >= '0' && name.data[i] <= '9' && i < start + 18; i++)
        layer = layer * 10 + (name.data[i] - '0');
    return i > start && i < name.length && name.data[i] == '.' ? layer : -1;
}

/* Refuse a model with an unused tensor, since its output would be wrong. key: the setting that
 * gives the number of layers. prefix: the start of the names of tensors in a layer */
static bool llm__all_used(const llm__input *in, const llm_file *file, const bool *used,
                          const char *key, int n_layers, const char *prefix,
                          const char *architecture) {
    for (int64_t i = 0; i < file->n_tensors; i++) {
        llm_string name = file->tensors[i].name;
        if (used[i]) continue;
        if (llm__layer_of(name, prefix) >= n_layers)
            return llm__bad(in,
                            "%s is %d, but there are more layers, with the tensor %s: correct it, "
                            "or fetch the model again",
                            key, n_layers, llm__show(name).text);
        return llm__unsupported(in, "the tensor %s is unknown to the %s architecture here",
                                llm__show(name).text, architecture);
    }
    return true;
}

static bool llm__model_tensors(const llm__loader *l) {
    llm_model *model = l->model;
    llm_config *c = &model->config;
    const llm_file *file = model->file;
    const llm_tensor *t = llm_file_find_tensor(file, "token_embd.weight");
    /* some embeddings have more rows than the vocabulary has tokens */
    uint64_t vocab = (uint64_t)llm_tokenizer_size(model->tokenizer), dim = (uint64_t)c->dim;
    if (t && t->dims[1] > vocab && t->dims[1] <= INT32_MAX) vocab = t->dims[1];
    if (t && t->dims[0] == dim && t->dims[1] < vocab)
        return llm__bad(&l->in,
                        "%s has %llu tokens, but the embedding (%s) only %llu rows: tokens were "
                        "added without resizing the model; give it the vocabulary of the model "
                        "that it was made from",
                        file->folder ? "tokenizer.json (with what lies beside it)"
                                     : "the vocabulary",
                        (llm__big)vocab, llm__show(t->source).text, (llm__big)t->dims[1]);
    c->vocab_size = (int)vocab;
    c->tied_output = !llm_file_find_tensor(file, "output.weight");
    bool divisors = llm_file_find_tensor(file, "rope_freqs.weight");
    if (!(model->embedding = llm__model_tensor(l, "token_embd.weight", vocab, dim)) ||
        !(model->output_norm = llm__model_tensor(l, "output_norm.weight", 1, dim)) ||
        !(model->output = c->tied_output ? model->embedding
                                         : llm__model_tensor(l, "output.weight", vocab, dim)) ||
        (divisors && !(model->rope_divisors = llm__model_tensor(l, "rope_freqs.weight", 1,
                                                                (uint64_t)c->rope_dim / 2))))
        return false;
    int n_parts = c->n_layers * LLM__N_PARTS;
    model->parts = (const llm_tensor **)llm__new((size_t)n_parts, sizeof *model->parts,
                                                 "the table of tensors", l->in.err);
    if (!model->parts) return false;
    for (int i = 0; i < n_parts; i++) {
        const llm__part_row *row = &llm__parts()[i % LLM__N_PARTS];
        unsigned part = 1u << (i % LLM__N_PARTS);
        char name[64];
        llm__part_name(name, i / LLM__N_PARTS, i % LLM__N_PARTS);
        if (!(model->architecture->required & part) &&
            !(model->architecture->optional & part && llm_file_find_tensor(file, name)))
            continue;
        t = llm__model_tensor(l, name, llm__width_of(c, row->rows), llm__width_of(c, row->cols));
        if (!t) return false;
        model->parts[i] = t;
        if (t->columns && t->dims[0] > model->ordered_cols) model->ordered_cols = t->dims[0];
    }
    char key[128];
    llm__model_value(l, "block_count", key);
    return llm__all_used(&l->in, file, l->used, key, c->n_layers, "blk.", c->architecture);
}

/* Takes ownership of the file, even on failure. */
static llm_model *llm__model_create(llm_file *file, llm_error *err) {
    llm_model *model = file ? (llm_model *)llm__new(1, sizeof *model, "a model", err) : NULL;
    if (!model) return llm_file_close(file), (llm_model *)NULL;
    llm__loader l = {model, {file->path, err}, NULL};
    model->file = file;
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
    LLM_FREE(model->parts);
    LLM_FREE(model->windows);
    llm_tokenizer_free(model->tokenizer);
    llm_file_close(model->file);
    LLM_FREE(model);
}

const llm_config *llm_model_config(const llm_model *model) { return &model->config; }
const llm_tokenizer *llm_model_tokenizer(const llm_model *model) { return model->tokenizer; }
const llm_file *llm_model_file(const llm_model *model) { return model->file; }
const char *llm_model_context_note(const llm_model *model) { return model->context_note; }

uint64_t llm_model_step_bytes(const llm_model *model) {
    /* a tied embedding is read in full, as the output matrix; otherwise one row of it is read */
    uint64_t unread = model->config.tied_output ? 0 : model->embedding->bytes;
    return model->weight_bytes - unread +
           (unread ? unread / (uint64_t)model->config.vocab_size : 0);
}

uint64_t llm_model_cache_bytes_per_token(const llm_model *model, llm_type cache_type) {
    const llm_config *c = &model->config;
    const llm_type_info *info = llm_type_find(cache_type);
    uint64_t numbers = 2 * (uint64_t)c->n_layers * llm__width_of(c, LLM__KV_WIDTH);
    return info ? numbers * (uint64_t)info->block_bytes / (uint64_t)info->block_values : 0;
}

/* ---- Hugging Face folders ---------------------------------------------------------------
 * config.json gives the model's shape, the safetensors files its weights, and tokenizer.json its
 * vocabulary. They are translated to an llm_file with GGUF metadata and GGUF tensor names; the data
 * stays in the mapped files. Other code treats this llm_file as a GGUF file.
 *
 * The weights differ in one way. RoPE rotates pairs of dimensions. GGUF files of "llama" have the
 * rows of q and k reordered so that the two dimensions of a pair are adjacent. Folders keep the
 * original order, so the model's rope_pairing is LLM_ROPE_HALVES. */

typedef struct llm__folder {
    llm__input in; /* path of the folder */
    const llm__architecture *architecture;
    llm_json config;     /* parsed config.json */
    llm_file *file;      /* the result. Its parts are the safetensors files. Its tensors are
                          * first those of the parts, later `tensors` */
    bool *used;          /* (n_tensors of file) whether the tensor is used or safe to ignore */
    llm_tensor *tensors; /* (n_tensors) tensors of the result, with GGUF names */
    int64_t n_tensors;
    char *names; /* (n_tensors, LLM__TENSOR_NAME) their GGUF names; `file` frees them */
    int n_layers, dim, n_heads, head_dim;
    bool int4, gptq; /* whether weights are 4-bit integers; in GPTQ format (false: AWQ) */
} llm__folder;

enum { LLM__TENSOR_NAME = 64 };

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

/* Map a file of at most LLM__JSON_BYTES. A missing file is not an error: *found is false. */
static bool llm__map_text(const char *path, llm_string *text, bool *found, llm_error *err) {
    struct stat status;
    const void *data = NULL;
    uint64_t size = 0;
    *found = !stat(path, &status) && S_ISREG(status.st_mode);
    bool ok = !*found || llm__map(path, &data, &size, err);
    if (size > LLM__JSON_BYTES) {
        ok = llm__fail(err, LLM_ERROR_FORMAT, "%s is larger than the %d bytes that are read", path,
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
    llm__input in = {path, err};
    memset(json, 0, sizeof *json);
    bool ok = path && llm__map_text(path, &text, found, err);
    if (ok && *found) {
        ok = llm_json_parse(json, text.data, text.length, path, err);
        llm__release(text.data, text.length, LLM__MAPPED);
        if (ok && json->nodes->kind != LLM_JSON_OBJECT) {
            ok = llm__bad(&in, "it holds no object, but something else");
            llm_json_free(json);
        }
    }
    LLM_FREE(path);
    return ok;
}

/* ---- config.json ------------------------------------------------------------------------- */

/* The entry with this key; NULL if it is absent or null. */
static const llm_json_node *llm__folder_entry(const llm_json_node *object, const char *key) {
    const llm_json_node *node = llm_json_member(object, key);
    return llm_json_has_kind(node, LLM_JSON_NULL) ? NULL : node;
}

static bool llm__is_on(const llm_json_node *object, const char *key, bool otherwise) {
    bool flag = otherwise;
    llm_json_bool(llm_json_member(object, key), &flag);
    return flag;
}

/* Read a positive whole number. An absent key gives `fallback`, or an error if that is 0. */
static bool llm__folder_int(const llm__folder *f, const llm_json_node *object, const char *key,
                            int64_t fallback, int *out) {
    const llm_json_node *node = llm__folder_entry(object, key);
    int64_t x = fallback;
    if (!node && !fallback) return llm__bad(&f->in, "config.json does not say \"%s\"", key);
    if ((node && !llm_json_i64(node, &x)) || x < 1 || x > INT32_MAX)
        return llm__bad(&f->in, "\"%s\" in config.json is not a whole number from 1 to %d", key,
                        INT32_MAX);
    *out = (int)x;
    return true;
}

static bool llm__folder_number(const llm__folder *f, const llm_json_node *object, const char *key,
                               double fallback, double *out) {
    const llm_json_node *node = llm__folder_entry(object, key);
    *out = fallback;
    if (!node && !(fallback > 0)) return llm__bad(&f->in, "config.json does not say \"%s\"", key);
    if ((node && !llm_json_f64(node, out)) || !(*out > 0) || *out > 1e30)
        return llm__bad(&f->in, "\"%s\" in config.json is not a positive number", key);
    return true;
}

/* Refuse an entry whose key is not in `known`, since it might change the result. Ignore keys that
 * begin with '_', and entries that are off: null, false, or an empty list or object. */
static bool llm__folder_known(const llm__folder *f, const llm_json_node *object, const char *where,
                              const char *known) {
    for (const llm_json_node *n = llm_json_first(object); n; n = llm_json_next(object, n)) {
        llm_string key = llm_json_key(n);
        bool holds = n->kind == LLM_JSON_ARRAY || n->kind == LLM_JSON_OBJECT;
        bool off = n->kind == LLM_JSON_NULL || n->kind == LLM_JSON_FALSE || (holds && !n->length);
        if (!off && !(key.length && key.data[0] == '_') && !llm__is_listed(key, known))
            return llm__unsupported(&f->in, "\"%s\": %s in %s is an option that is not supported",
                                    llm__show(key).text, llm__show_node(n).text, where);
    }
    return true;
}

/* The known keys of config.json, in three groups: the model's shape and tokens; its training, its
 * origin and settings for other programs; and sampling settings, which each request has itself.
 * (Older models have the last group here instead of in generation_config.json.) */
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

/* Append rope_freqs.weight, as in GGUF files: the divisors of Llama 3.1's RoPE frequencies. A
 * frequency that makes fewer than low_freq_factor turns over the original context is divided by the
 * factor. Frequencies that make more than high_freq_factor turns are kept, and those between the
 * two are interpolated. */
static bool llm__folder_llama3(llm__folder *f, const llm_json_node *rope, double base,
                               int context) {
    double factor, low, high;
    int original, n = f->head_dim / 2;
    if (!llm__folder_number(f, rope, "factor", 0, &factor) ||
        !llm__folder_number(f, rope, "low_freq_factor", 0, &low) ||
        !llm__folder_number(f, rope, "high_freq_factor", 0, &high) ||
        !llm__folder_int(f, rope, "original_max_position_embeddings", context, &original))
        return false;
    if (!(high > low))
        return llm__bad(&f->in, "high_freq_factor in config.json is not above low_freq_factor");
    llm_tensor t = {llm__string("rope_freqs.weight"), {NULL, 0}, LLM_F32, 1, {1, 1, 1, 1}, NULL,
                    (uint64_t)n * sizeof(float),      NULL,      NULL};
    float *divisors = (float *)llm__new((size_t)n, sizeof *divisors, t.name.data, f->in.err);
    if (!divisors) return false;
    for (int i = 0; i < n; i++) {
        double turns = original * pow(base, -2.0 * i / f->head_dim) / (2 * 3.14159265358979323846);
        double blend = (turns - low) / (high - low);
        blend = blend > 0 ? blend < 1 ? blend : 1 : 0;
        divisors[i] = (float)(1 / ((1 - blend) / factor + blend));
    }
    t.source = t.name;
    t.dims[0] = (uint64_t)n;
    t.data = divisors;
    f->tensors[f->n_tensors++] = t;
    return llm__add_memory(f->file, divisors, f->in.err);
}

static bool llm__folder_yarn(const llm__folder *f, llm__metadata *m, const llm_json_node *rope,
                             double factor, int *context) {
    double log_factor = factor > 1 ? log(factor) : 0, usual = 0.1 * log_factor + 1;
    double fast, slow, magnitude = usual, mscale = 0, all = 0;
    if (!llm__is_on(rope, "truncate", true))
        return llm__unsupported(&f->in, "YaRN with \"truncate\": false is not supported");
    if (llm_json_f64(llm__folder_entry(rope, "mscale"), &mscale) &&
        llm_json_f64(llm__folder_entry(rope, "mscale_all_dim"), &all) && mscale != 0 && all != 0)
        magnitude = (0.1 * mscale * log_factor + 1) / (0.1 * all * log_factor + 1);
    if (!llm__folder_number(f, rope, "beta_fast", 32, &fast) ||
        !llm__folder_number(f, rope, "beta_slow", 1, &slow) ||
        !llm__folder_number(f, rope, "attention_factor", magnitude, &magnitude) ||
        !llm__folder_int(f, rope, "original_max_position_embeddings", *context, context))
        return false;
    llm__note_u32(m, ".rope.scaling.original_context_length", (uint32_t)*context);
    llm__note_f32(m, ".rope.scaling.yarn_beta_fast", (float)fast);
    llm__note_f32(m, ".rope.scaling.yarn_beta_slow", (float)slow);
    /* readers of GGUF multiply this value by the usual magnitude */
    llm__note_f32(m, ".rope.scaling.attn_factor", (float)(magnitude / usual));
    return true;
}

/* Translate the base and scaling of RoPE, from "rope_parameters" or from "rope_theta" and
 * "rope_scaling". stated: config.json's max_position_embeddings. */
static bool llm__folder_rope(llm__folder *f, llm__metadata *m, int stated) {
    static const char known[] =
        "rope_type type rope_theta factor low_freq_factor high_freq_factor "
        "original_max_position_embeddings beta_fast beta_slow attention_factor mscale "
        "mscale_all_dim truncate partial_rotary_factor finetuned";
    const llm_json_node *config = f->config.nodes,
                        *rope = llm__folder_entry(config, "rope_parameters");
    double base, factor = 1, part;
    int context = stated;
    if (!rope) rope = llm__folder_entry(config, "rope_scaling");
    if (rope && !llm_json_has_kind(rope, LLM_JSON_OBJECT))
        return llm__bad(&f->in, "the RoPE scaling in config.json is no object");
    if (!llm__folder_known(f, rope, "the RoPE scaling of config.json", known) ||
        !llm__folder_number(f, config, "rope_theta", 10000, &base) ||
        !llm__folder_number(f, rope, "rope_theta", base, &base) ||
        !llm__folder_number(f, config, "partial_rotary_factor", 1, &part) ||
        !llm__folder_number(f, rope, "partial_rotary_factor", part, &part))
        return false;
    if (part != 1)
        return llm__unsupported(&f->in, "partial_rotary_factor %g is not supported", part);
    llm__note_f32(m, ".rope.freq_base", (float)base);
    base = (float)base;

    const llm_json_node *type = llm__folder_entry(rope, "rope_type");
    if (!type) type = llm__folder_entry(rope, "type");
    bool yarn = llm_json_is(type, "yarn");
    if (!type && llm__folder_entry(rope, "factor"))
        return llm__bad(&f->in, "the RoPE scaling in config.json does not say its rope_type");
    if (llm_json_is(type, "llama3")) {
        if (!llm__folder_llama3(f, rope, base, context)) return false;
    } else if (yarn || llm_json_is(type, "linear")) {
        if (!llm__folder_number(f, rope, "factor", 0, &factor) ||
            (yarn && !llm__folder_yarn(f, m, rope, factor, &context)))
            return false;
        llm__note_string(m, ".rope.scaling.type", llm__string(yarn ? "yarn" : "linear"));
        llm__note_f32(m, ".rope.scaling.factor", (float)factor);
    } else if (type && !llm_json_is(type, "default")) {
        return llm__not_among(&f->in, "RoPE scaling", llm__show_node(type),
                              "default, linear, yarn, llama3");
    }
    /* scaling extends the original context by the factor */
    context = (int)llm__min((int64_t)(context * (factor > 1 ? factor : 1)), INT32_MAX);
    llm__note_u32(m, ".context_length", (uint32_t)context);
    if (context < stated)
        llm__note_u32(m, ".rope.scaling.llm.stated_context_length", (uint32_t)stated);
    return true;
}

/* Translate the sliding window, and which layers have it: all, those in the list layer_types, or
 * (Qwen) the last ones. */
static bool llm__folder_window(const llm__folder *f, llm__metadata *m) {
    const llm__architecture *a = f->architecture;
    const llm_json_node *config = f->config.nodes,
                        *types = llm__folder_entry(config, "layer_types"),
                        *node = llm_json_member(config, "sliding_window");
    bool qwen = a->pairing == LLM_ROPE_HALVES;
    int window = 0, n_windows = 0;
    int64_t first = 0;
    if (!llm__is_on(config, "use_sliding_window", !qwen) ||
        llm_json_has_kind(node, LLM_JSON_NULL) || (!node && !a->window && !types))
        return true;
    if (!strcmp(a->model_type, "llama"))
        return llm__unsupported(&f->in,
                                "\"sliding_window\" in config.json is not supported for llama");
    if (!llm__folder_int(f, config, "sliding_window", a->window, &window)) return false;
    if (qwen && !types &&
        (!llm_json_i64(llm_json_member(config, "max_window_layers"), &first) || first < 0))
        return llm__bad(&f->in, "config.json does not say from which layer on the window is used "
                                "(max_window_layers)");
    if (types &&
        (!llm_json_has_kind(types, LLM_JSON_ARRAY) || types->length != (uint32_t)f->n_layers))
        return llm__bad(&f->in, "layer_types in config.json is not a list of %d types",
                        f->n_layers);
    size_t n = (size_t)f->n_layers;
    uint8_t *pattern = (uint8_t *)llm__new(n, 1, "the windows of the layers", f->in.err);
    bool ok = pattern != NULL;
    const llm_json_node *type = llm_json_first(types);
    for (int i = 0; ok && i < f->n_layers; i++, type = llm_json_next(types, type)) {
        pattern[i] = types ? llm_json_is(type, "sliding_attention") : i >= first;
        n_windows += pattern[i];
        if (types && !pattern[i] && !llm_json_is(type, "full_attention"))
            ok = llm__not_among(&f->in, "the layer type", llm__show_node(type),
                                "sliding_attention, full_attention");
    }
    if (n_windows) llm__note_u32(m, ".attention.sliding_window", (uint32_t)window);
    if (n_windows && n_windows < f->n_layers)
        llm__note_array(m, ".attention.sliding_window_pattern", LLM_VALUE_BOOL, pattern, n, n);
    LLM_FREE(pattern);
    return ok;
}

/* Read a positive whole number from config.json, and write it as metadata. */
static bool llm__folder_copy(const llm__folder *f, llm__metadata *m, const char *from,
                             int64_t fallback, const char *to, int *x) {
    if (!llm__folder_int(f, f->config.nodes, from, fallback, x)) return false;
    llm__note_u32(m, to, (uint32_t)*x);
    return true;
}

/* Translate config.json to metadata. */
static bool llm__folder_config(llm__folder *f, llm__metadata *m) {
    const llm__architecture *a = f->architecture;
    const llm_json_node *config = f->config.nodes, *act = llm__folder_entry(config, "hidden_act");
    int hidden, kv_heads, context;
    double epsilon;
    if (act && !llm_json_is(act, "silu") && !llm_json_is(act, "swish"))
        return llm__not_among(&f->in, "the activation", llm__show_node(act), "silu");
    m->architecture = a->name;
    llm__note_string(m, "general.architecture", llm__string(a->name));
    if (!llm__folder_known(f, config, "config.json", llm__config_keys) ||
        !llm__folder_copy(f, m, "hidden_size", 0, ".embedding_length", &f->dim) ||
        !llm__folder_copy(f, m, "intermediate_size", 0, ".feed_forward_length", &hidden) ||
        !llm__folder_copy(f, m, "num_hidden_layers", 0, ".block_count", &f->n_layers) ||
        !llm__folder_copy(f, m, "num_attention_heads", 0, ".attention.head_count", &f->n_heads) ||
        !llm__folder_copy(f, m, "num_key_value_heads", a->kv_heads ? f->n_heads : 0,
                          ".attention.head_count_kv", &kv_heads) ||
        !llm__folder_copy(f, m, "head_dim",
                          a->head_dim ? a->head_dim : llm__max(f->dim / f->n_heads, 1),
                          ".attention.key_length", &f->head_dim) ||
        !llm__folder_int(f, config, "max_position_embeddings", 0, &context) ||
        !llm__folder_number(f, config, "rms_norm_eps", 1e-6, &epsilon))
        return false;
    /* each layer has tensors; checked before memory is allocated for an absurd count */
    if (f->n_layers > f->file->n_tensors || f->n_layers > INT32_MAX / LLM__N_PARTS)
        return llm__bad(&f->in, "config.json says %d layers, but there are only %llu tensors",
                        f->n_layers, (llm__big)f->file->n_tensors);
    if (f->head_dim > 1 << 20)
        return llm__bad(&f->in, "config.json says heads of %d numbers, which is absurd",
                        f->head_dim);
    llm__note_u32(m, ".attention.value_length", (uint32_t)f->head_dim);
    llm__note_u32(m, ".rope.dimension_count", (uint32_t)f->head_dim);
    llm__note_f32(m, ".attention.layer_norm_rms_epsilon", (float)epsilon);
    f->tensors = (llm_tensor *)llm__new((size_t)f->file->n_tensors + 1, sizeof *f->tensors,
                                        "the tensors", f->in.err); /* + 1: rope_freqs */
    return f->tensors && llm__folder_rope(f, m, context) && llm__folder_window(f, m);
}

/* ---- The tensors ---------------------------------------------------------------------------- */

/* Map a safetensors file of the folder and read its header. */
static bool llm__folder_shard(llm__folder *f, llm_string name) {
    char copy[256];
    llm_file *file = f->file;
    if (!name.length || name.length >= sizeof copy || memchr(name.data, '/', name.length) ||
        memchr(name.data, 0, name.length))
        return llm__bad(&f->in,
                        "the index names the file '%s', which is no name of a file in this folder",
                        llm__show(name).text);
    memcpy(copy, name.data, name.length);
    copy[name.length] = 0;
    if (!llm__add_record(&file->parts, file->n_parts, &file->parts_capacity, sizeof *file->parts,
                         "the files", f->in.err))
        return false;
    char *path = llm__join(f->in.path, copy, f->in.err);
    llm_file *part = path ? llm__file_map(path, llm__read_safetensors, f->in.err) : NULL;
    LLM_FREE(path);
    if (part) file->parts[file->n_parts++] = part;
    return part != NULL;
}

/* The part with this file name; NULL if it is not mapped yet. */
static const llm_file *llm__folder_find_shard(const llm__folder *f, llm_string name) {
    for (int64_t i = 0; i < f->file->n_parts; i++) {
        const char *slash = strrchr(f->file->parts[i]->path, '/');
        llm_string own = llm__string(slash + 1); /* llm__join wrote the slash */
        if (!llm__compare_strings(&own, &name)) return f->file->parts[i];
    }
    return NULL;
}

/* Map each file that the index names. */
static bool llm__folder_shards(llm__folder *f, const llm_json_node *map) {
    if (!llm_json_first(map) || map->kind != LLM_JSON_OBJECT)
        return llm__bad(&f->in, "model.safetensors.index.json has no weight_map");
    for (const llm_json_node *n = llm_json_first(map); n; n = llm_json_next(map, n)) {
        llm_string name = {"", 0};
        if (!llm_json_string(n, &name))
            return llm__bad(&f->in,
                            "the weight_map of model.safetensors.index.json names no file for '%s'",
                            llm__show(llm_json_key(n)).text);
        if (!llm__folder_find_shard(f, name) && !llm__folder_shard(f, name)) return false;
    }
    return true;
}

static bool llm__folder_weights(llm__folder *f) {
    static const char one[] = "model.safetensors", list[] = "model.safetensors.index.json";
    const char *folder = f->in.path;
    llm_json index;
    memset(&index, 0, sizeof index);
    bool found, single = llm__folder_has(folder, one);
    bool ok = single || llm__read_json(&index, folder, list, &found, f->in.err);
    if (ok && !single && !found)
        return llm__fail(f->in.err, LLM_ERROR_FILE, "%s: there is neither %s nor %s%s", folder, one,
                         list,
                         llm__folder_has(folder, "pytorch_model.bin") ||
                                 llm__folder_has(folder, "pytorch_model.bin.index.json")
                             ? "; its pytorch_model.bin is not read: such files may run programs"
                             : "");
    const llm_json_node *map = llm_json_member(index.nodes, "weight_map");
    ok = ok && (single ? llm__folder_shard(f, llm__string(one)) : llm__folder_shards(f, map));
    ok = ok && llm__file_join(f->file, "two of the files have a tensor", f->in.err);
    /* each tensor must be in the file that the index names for it */
    const llm_json_node *n = ok ? llm_json_first(map) : NULL;
    for (; ok && n; n = llm_json_next(map, n)) {
        llm_string name = llm_json_key(n), file = {n->text, n->length};
        const llm_tensor *t = (const llm_tensor *)llm__find_name(f->file->tensor_index,
                                                                 f->file->n_tensors, name);
        const llm_file *part = llm__folder_find_shard(f, file);
        if (!t || !llm__inside(t->data, t->bytes, part->data, part->size))
            ok = llm__bad(&f->in, "the tensor '%s' is not in the file that the index names for it",
                          llm__show(name).text);
    }
    llm_json_free(&index);
    return ok;
}

static void llm__folder_use(const llm__folder *f, const llm_tensor *source) {
    f->used[source - f->file->tensors] = true;
}

/* Append a copy of a tensor with this GGUF name. */
static llm_tensor *llm__folder_rename(llm__folder *f, const llm_tensor *source, const char *name) {
    llm_tensor *t = &f->tensors[f->n_tensors];
    char *copy = f->names + f->n_tensors++ * LLM__TENSOR_NAME;
    snprintf(copy, LLM__TENSOR_NAME, "%s", name);
    *t = *source;
    t->name = llm__string(copy);
    return t;
}

/* The data of a tensor, copied if its values are not aligned, as kernels need them to be. */
static const void *llm__folder_aligned(const llm__folder *f, const llm_tensor *source) {
    if ((uintptr_t)source->data % (uintptr_t)llm__dtype_of(source)->bytes == 0) return source->data;
    void *copy = llm__new((size_t)source->bytes, 1, "a tensor at an odd address", f->in.err);
    if (!copy) return NULL;
    memcpy(copy, source->data, (size_t)source->bytes);
    return llm__add_memory(f->file, copy, f->in.err) ? copy : NULL;
}

/* Append a tensor with this GGUF name. The source must have n_dims dimensions. */
static bool llm__folder_tensor(llm__folder *f, const llm_tensor *source, const char *name,
                               int n_dims) {
    if (!llm_type_find(source->type))
        return llm__unsupported(&f->in,
                                "the tensor '%s' is of the type %s; supported: F32, F16, BF16",
                                llm__show(source->name).text, llm__dtype_of(source)->name);
    if (source->n_dims != n_dims)
        return llm__bad(&f->in, "the tensor %s has %d dimensions, but should have %d",
                        llm__show(source->name).text, source->n_dims, n_dims);
    llm__folder_use(f, source);
    llm_tensor *t = llm__folder_rename(f, source, name);
    t->data = llm__folder_aligned(f, source);
    return t->data != NULL;
}

/* ---- 4-bit integers: GPTQ and AWQ ------------------------------------------------------------
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
 * Both become q4_0 if every zero is 8 (symmetric), else q4_Z, with exactly the same values. */

typedef struct llm__int4 {
    bool awq, zeros_less_one; /* whether AWQ (false: GPTQ); whether `zeros` holds zero - 1 */
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
 * rows. So that whole words are processed, a line of the tile holds the rows of all even nibbles,
 * then those of all odd nibbles. */
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

/* The position of row i in a line of an AWQ tile. */
static int llm__int4_place_awq(int i) {
    int nibble = llm__awq_shift(i) / 4;
    return i / 8 * 4 + nibble / 2 + (nibble & 1) * LLM__INT4_ROWS / 2;
}

/* Fill the same tile from GPTQ weights, with the rows in order. */
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

/* Transpose (PAIRS, ROWS) to (ROWS, PAIRS). A pass interleaves the two halves of the tile: the top
 * bit of each index becomes the lowest. The index of a pair has four bits, hence four passes. */
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

/* Set heads to the first bytes of a block in each of n rows: the scale and zero point of the group,
 * 16 bits each. */
static void llm__int4_heads(const llm__int4 *m, int64_t first, int64_t n, int64_t group,
                            uint8_t heads[LLM__INT4_ROWS][4]) {
    for (int64_t i = 0; i < n; i++) {
        llm__write_u16(heads[i], m->scales[group * m->rows + first + i]);
        llm__write_u16(heads[i] + 2, (uint16_t)llm__int4_zero(m, group, first + i));
    }
}

/* Convert n rows, all of one tile, to blocks of q4_0 or q4_Z. The matrix is stored transposed, so
 * one block of columns at a time is converted for all rows. A word holds eight rows, so the tile is
 * filled with whole groups of eight, but only the n rows are written. */
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
        llm__bad(&f->in, "the tensor %s is missing", name);
    } else if (strcmp(type, dtype) || source->n_dims != n_dims) {
        llm__unsupported(&f->in,
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
            return llm__bad(&f->in, "%s.g_idx names the group %d of %d", module, m->groups[c],
                            (int)m->n_groups);
        ordered = ordered && m->groups[c] == c / size;
    }
    if (ordered) return true;
    size_t bytes = (size_t)m->cols * sizeof(int32_t);
    int32_t *columns = (int32_t *)llm__new(bytes, 1, "the order of columns", f->in.err);
    if (!columns || !llm__add_memory(f->file, columns, f->in.err)) return false;
    int *next = (int *)llm__new((size_t)m->n_groups + 1, sizeof *next, "the groups", f->in.err);
    if (!next) return false;
    m->columns = columns;
    for (int64_t c = 0; c < m->cols; c++) next[m->groups[c] + 1]++;
    for (int64_t g = 0; ok && g < m->n_groups; g++) {
        if (next[g + 1] % LLM__BLOCK)
            ok = llm__unsupported(&f->in, "a group of %s has %d columns, no multiple of %d", module,
                                  next[g + 1], LLM__BLOCK);
        next[g + 1] += next[g];
    }
    for (int64_t c = 0; ok && c < m->cols; c++) columns[next[m->groups[c]]++] = (int32_t)c;
    LLM_FREE(next);
    return ok;
}

/* The entry that names the packing format, for which tools use different keys; NULL if absent. */
static const llm_json_node *llm__int4_format(const llm_json_node *quantization) {
    static const char *const keys[] = {"checkpoint_format", "format", "version"};
    const llm_json_node *format = NULL;
    for (int i = 0; i < 3 && !format; i++) format = llm__folder_entry(quantization, keys[i]);
    return format;
}

/* Find the three or four tensors of a matrix, and check that their shapes agree. Returns qweight;
 * on failure, sets the error and returns NULL. */
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
        llm__bad(&f->in,
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
    llm__bad(&f->in, "%s has %llu entries for %d columns", name, (llm__big)g->dims[0],
             (int)m->cols);
    return NULL;
}

/* Append a 4-bit matrix. llm_tensor_rows converts it when its rows are needed. */
static bool llm__folder_int4(llm__folder *f, const char *name, const char *module) {
    llm__int4 *m = (llm__int4 *)llm__new(1, sizeof *m, "a 4-bit matrix", f->in.err);
    if (!m || !llm__add_memory(f->file, m, f->in.err)) return false;
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
    void *rows = LLM_MALLOC((size_t)tensor->bytes); /* filled below */
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
/* Read quantization_config; refuse unsupported settings. */
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
        return llm__bad(&f->in,
                        "the quantization_config in config.json does not say its quant_method");
    if (!f->int4)
        return llm__not_among(&f->in, "the quantization", llm__show_node(method), "gptq, awq");
    if (type && !llm_json_is(type, "int")) /* a key of AutoRound */
        return llm__not_among(&f->in, "the data_type", llm__show_node(type), "int");
    if (!llm_json_i64(bits, &n) || n != 4)
        return llm__not_among(&f->in, "the number of bits", llm__show_node(bits), "4");
    if (format && !llm_json_is(format, f->gptq ? "gptq" : "gemm") &&
        !llm_json_is(format, f->gptq ? "gptq_v2" : "GEMM"))
        return llm__not_among(&f->in, f->gptq ? "the gptq format" : "the awq format",
                              llm__show_node(format), f->gptq ? "gptq, gptq_v2" : "gemm");
    return llm__folder_known(f, q, "the quantization_config", known);
}

/* Some tools write all-zero biases that config.json does not declare. */
static bool llm__all_zero(const llm_tensor *source) {
    for (uint64_t i = 0; i < source->bytes; i++)
        if (((const char *)source->data)[i]) return false;
    return true;
}

/* Does the architecture or config.json require this part? */
static bool llm__folder_wants(const llm__folder *f, int part) {
    const llm_json_node *config = f->config.nodes;
    unsigned wanted = f->architecture->required, optional = f->architecture->optional;
    if (llm__is_on(config, "attention_bias", false)) wanted |= optional & LLM__BIASES;
    if (llm__is_on(config, "mlp_bias", false)) wanted |= optional & LLM__FFN_BIASES;
    return wanted >> part & 1;
}

/* Report that a tensor is missing. If it is X.weight, X.qweight may be there instead. */
static bool llm__folder_missing(const llm__folder *f, const char *name) {
    char quantized[160];
    snprintf(quantized, sizeof quantized, "%.*s.qweight", (int)(strlen(name) - strlen(".weight")),
             name);
    if (!llm_file_find_tensor(f->file, quantized))
        return llm__bad(&f->in, "the tensor %s is missing", name);
    return llm__unsupported(
        &f->in, "the tensor %s is missing; it is quantized, %s", name,
        f->int4 ? "which is supported for the matrices of the layers only"
        : llm__folder_has(f->in.path, "quantize_config.json")
            ? "but config.json has no quantization_config: copy that of quantize_config.json to it, "
              "with a \"quant_method\" of \"gptq\" or \"awq\""
            : "but config.json has no quantization_config, which says how");
}

static bool llm__folder_part(llm__folder *f, int layer, int part) {
    const llm__part_row *row = &llm__parts()[part];
    bool vector = row->rows == LLM__ONE;
    char name[LLM__TENSOR_NAME], source_name[128];
    llm__part_name(name, layer, part);
    int n = snprintf(source_name, sizeof source_name, "model.layers.%d.%s", layer, row->source);
    const llm_tensor *source = llm_file_find_tensor(f->file, source_name);
    if (!llm__folder_wants(f, part)) {
        if (source && llm__all_zero(source)) llm__folder_use(f, source);
        return true;
    }
    if (source) return llm__folder_tensor(f, source, name, vector ? 1 : 2);
    if (!f->int4 || vector) return llm__folder_missing(f, source_name);
    source_name[n - (int)strlen(".weight")] = 0;
    return llm__folder_int4(f, name, source_name);
}

/* Check that vocab_size, if config.json has it, equals the number of rows of the embedding. Both
 * may be larger than the number of tokens. */
static bool llm__folder_check_vocab(const llm__folder *f, const llm_tensor *embedding) {
    int vocab = 0;
    if (!llm__folder_entry(f->config.nodes, "vocab_size")) return true;
    if (!llm__folder_int(f, f->config.nodes, "vocab_size", 0, &vocab)) return false;
    return embedding->dims[1] == (uint64_t)vocab ||
           llm__bad(&f->in,
                    "config.json says \"vocab_size\": %d, but %s has %llu rows: correct it, or "
                    "fetch the files again",
                    vocab, llm__show(embedding->name).text, (llm__big)embedding->dims[1]);
}

/* Append the tensors outside the layers. */
static bool llm__folder_ends_of_stack(llm__folder *f) {
    static const char *const names[][2] = {{"model.embed_tokens.weight", "token_embd.weight"},
                                           {"model.norm.weight", "output_norm.weight"},
                                           {"lm_head.weight", "output.weight"}};
    bool tied = llm__is_on(f->config.nodes, "tie_word_embeddings", false);
    for (int i = 0; i < 3; i++) {
        const llm_tensor *source = llm_file_find_tensor(f->file, names[i][0]);
        if (i == 2 && tied) { /* some files hold it anyway; it is ignored */
            if (source) llm__folder_use(f, source);
            continue;
        }
        if (!source) return llm__folder_missing(f, names[i][0]);
        if (!llm__folder_tensor(f, source, names[i][1], i == 1 ? 1 : 2) ||
            (i == 0 && !llm__folder_check_vocab(f, source)))
            return false;
    }
    return true;
}

static bool llm__ends_with(llm_string s, const char *end) {
    size_t n = strlen(end);
    return s.length >= n && !memcmp(s.data + s.length - n, end, n);
}

static bool llm__folder_tensors(llm__folder *f) {
    llm_file *file = f->file;
    size_t n = (size_t)file->n_tensors;
    f->used = (bool *)llm__new(n, 1, "the tensors", f->in.err);
    f->names = (char *)llm__new(n + 1, LLM__TENSOR_NAME, "the names of the tensors", f->in.err);
    if (!f->used || !f->names) return LLM_FREE(f->names), false;
    if (!llm__add_memory(file, f->names, f->in.err) || !llm__folder_ends_of_stack(f)) return false;
    for (int i = 0; i < f->n_layers * LLM__N_PARTS; i++)
        if (!llm__folder_part(f, i / LLM__N_PARTS, i % LLM__N_PARTS)) return false;
    for (size_t i = 0; i < n; i++) /* old files have inv_freq, which repeats config.json */
        f->used[i] |= llm__ends_with(file->tensors[i].name, ".rotary_emb.inv_freq");
    if (!llm__all_used(&f->in, file, f->used, "config.json's num_hidden_layers", f->n_layers,
                       "model.layers.", f->architecture->model_type))
        return false;
    LLM_FREE(file->tensors);
    LLM_FREE((void *)file->tensor_index);
    file->tensors = f->tensors;
    file->n_tensors = f->n_tensors;
    f->tensors = NULL;
    file->tensor_index = llm__index(&f->in, file->tensors, file->n_tensors, sizeof(llm_tensor),
                                    "there are two tensors");
    return file->tensor_index != NULL;
}

/* ---- Opening a folder ------------------------------------------------------------------------ */

static bool llm__folder_architecture(llm__folder *f) {
    llm_string type = {"", 0};
    char known[128];
    if (!llm_json_string(llm_json_member(f->config.nodes, "model_type"), &type))
        return llm__bad(&f->in, "config.json does not say its model_type");
    f->architecture = llm__find_architecture(type, true);
    llm__list_architectures(known, sizeof known, true);
    return f->architecture ||
           llm__not_among(&f->in, "config.json's model_type", llm__show(type), known);
}

/* A folder without config.json may hold only a vocabulary. */
static bool llm__folder_read(llm__folder *f, llm__metadata *m) {
    const char *path = f->in.path;
    bool found;
    if (!llm__read_json(&f->config, path, "config.json", &found, f->in.err)) return false;
    if (!found && llm__folder_has(path, "tokenizer.json") &&
        !llm__folder_has(path, "model.safetensors") &&
        !llm__folder_has(path, "model.safetensors.index.json"))
        return llm__folder_vocabulary(m, path, f->in.err);
    if (!found)
        return llm__fail(f->in.err, LLM_ERROR_FILE,
                         "%s: there is no config.json in this folder: it holds no Hugging Face "
                         "model; to run a GGUF file, give its own path",
                         path);
    return llm__folder_architecture(f) && llm__folder_quantization(f) && llm__folder_weights(f) &&
           llm__folder_config(f, m) && llm__folder_tensors(f) &&
           llm__folder_vocabulary(m, path, f->in.err);
}

static llm_file *llm__folder_open(const char *path, llm_error *err) {
    llm__folder f;
    llm__metadata m;
    memset(&f, 0, sizeof f);
    memset(&m, 0, sizeof m);
    f.in.path = path;
    f.in.err = err;
    f.file = (llm_file *)llm__new(1, sizeof *f.file, "a file", err);
    bool ok = f.file && (f.file->path = llm__copy_text(path, "", err)) != NULL;
    if (ok) f.file->folder = true;
    ok = ok && llm__folder_read(&f, &m) && llm__read_metadata(&m, f.file, err);
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
 * list is its id. A frequent word is one token; a rare word is several tokens.
 *
 * Both supported kinds of vocabulary use byte pair encoding (BPE; Gage 1994; for language models
 * Sennrich et al. 2016, arxiv.org/abs/1508.07909): start with the smallest pieces, and repeatedly
 * join the best pair of neighbours, until no pair makes a token.
 *
 *     "gpt2"   Byte-level BPE. Text is first split into words by a rule (llm__splits). The smallest
 *              pieces are bytes; the file spells them as printable characters (llm__spell_byte).
 *              The best pair is the earliest in the file's list of merges.
 *     "llama"  SentencePiece (Kudo and Richardson 2018, arxiv.org/abs/1808.06226). The smallest
 *              pieces are characters. A space becomes U+2581, and another U+2581 is added before
 *              the text. The best pair is the one whose joined token has the highest score. A
 *              character without a token becomes one token per byte, <0x00> to <0xFF>.
 *
 * The pieces form a linked list and the candidate pairs form a heap, so merging takes O(n log n)
 * time (llm__merge).
 *
 * Special tokens, such as "<|endoftext|>", are recognized only if the caller asks for it:
 * otherwise untrusted text could end the conversation or pose as another speaker. "User-defined"
 * tokens are ordinary text that is never split; they are always recognized.
 * ================================================================================== */

/* ---- Characters ------------------------------------------------------ */

enum { LLM__UTF8_INVALID = 0x110000, LLM__UTF8_INCOMPLETE = 0x110001 };

/* Decode the character at s (n >= 1 bytes) and return its length. *code is LLM__UTF8_INCOMPLETE if
 * the text ends inside the character, and LLM__UTF8_INVALID if the bytes are not valid UTF-8. */
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

/* Each table is a list of tuples of numbers, in base 31, most significant digit first. A digit is
 * one of the characters 0-9 A-Z a-z; each digit of a number except the last has 31 added.
 *     letters, numbers   number of code points to skip, number in the category (L or N)
 *     combining          number of code points to skip, number in the class, combining class
 *     decompositions     2 x the distance from the previous code point (+ 1 if NFC never composes
 *                        this one), the first part minus the previous first part (zigzag), the
 *                        second part minus 767 (0: no second part) */
/* BEGIN tables made by tests/unicode_tables.py, Unicode 16.0.0 */
enum { LLM__N_LETTERS = 1354 };
static const char *const llm__letters[] = {
    "X3Q6QWG1A1415N1W01jO4CE57111Z551224116113111K1XL1ZF8aB1W7216WAX9R44WEWCW421Y611F272A321G11UT",
    "XRB1OW292415M419131NP7B5O16HWBWRWN31I17AFG48222M17113431G1D213E2A186422M17121212W0411J3G9131M",
    "17121531I1F2N1B8222M17121531U213F1H116331432111232333CM1WL8131N1G31Q32122U148131N1A1531W0212F",
    "2H9131WA21G15383O65I3O191127WRWH12C7WR211151O111A12912511L4W11X181W5R5YMWCK1G6443132734DC1HW7",
    "11512WC1fN142711142WA142W2142711142F1WQ142X5W6GGXO263p02H1Q5XD687IDJEIED13FWLW4141X5XR752W311",
    "5X8AW0WIU25BWD4QWNN9WMXK1Y0WGH8WNUD2AWDQW5WA3AW52B5WC23WA41612315b6X2dU262W726281111111W02WM1",
    "711331734264D5317YN1D1GDY81412A1135611111141B245541WL2XtHcC6432CW711512WP71GN9717171717171717",
    "XI1k42WB5524XO631XS145WC1Y1HW1WHGlGbvKX2sWNX5WF2dL3GA2KWGGW02X8WI92YA2X5221118LG13141NTWLEWJ",
    "X063112BSANPT7WGS1G51AA51WAN318KN313WJ1132252111O32B73C6262697171WC1E6YMTgoCCN4WIdtKgP2YDW77C",
    "5511A1D151112121YFW2gMIX22WNW9CYN51ZBW5Q6QBXR36262623W4C1Q1J121F2EW3YUhHT3WIWGW1DK186W7AU2W54",
    "8WHa3IW54W54W98WLCB1F17121B1F17123WLCf19MA8O61WB19X76211WD12312NAN9W0X3J12AMAQX8WP62X21F4131T",
    "WBT3TW481SRWNAMAJDIYHXBWOWKDWKDW5W7S9Nd2WB62G3WSTA18MWBIWFLRNCWMWQ221DWEW1PQW5T1218W431CWHE4L",
    "111W4I1PJ2X1711141F1A7WGW78222M17121531I1C5UA11211W711P111WDWMI4K3UWHK211aTWGWA4W5WHK1WSWCD1",
    "X9RW67aUWDYNX2W082128121OF111Y182W8G111S1AW971L1BWFJ1IXBbDW2W091W6H1WIUYJ7121W7L1P6121W1E1fHJ",
    "F11D1W3Z01XHyNcDbAXs1Y4FWYIH6PZZR5nPcYLUWuQnB7W0HXHHUIWHG4W0L5JiTWEbPX2Z4XD51X4DX2211SbgT8WdT",
    "WAAee7417121eCF1T321E48hOXhEYE5D397Abc7XN1X9122122241C11171X31428171S141511371fU2P1P1W01P1W01",
    "P1W01P1W01P18WxFW066dDX0ZMWEA7G1fBUIWDkJScBU21kU714121F1bBWSX671WcQ41R1211211A141111614111111",
    "312112111111111121124171414111A1H53151HZnIWij2W1Zf06c52azREct2Fp2XmHmFWmIaZA5Zg7"};
enum { LLM__N_NUMBERS = 288 };
static const char *const llm__numbers[] = {
    "WHAYR25123WkFAZAAbCAi9AYPA46YFAYPAYPA26YHDYMA87YAAYB77JYGAY3AYPAX8KdKAX8As6KxD3cMA6AMAeLAZ4B",
    "aAA6AaRAXOAZAA6AWXN1366AbCWK25sDWTXGMpAUWiL1u21P9E3g24ZEAU81FW1AW8FzrOAb2AfA6ZUAW7AbCAMAXOAi3",
    "ArZ4AkSWECWQH2g0RW54T181ZA5bGAzC8P7W89XD5M6a522G2WFX29WL2U3XD5YB8O8WA7fK6WHA6AdUW0a3AWB4YJ7ZA",
    "UZ4AWTAZKA7Kd3Ag1AYPAh2AY9A6KXECiHJY0AqBAXOTcAAX8AiJAY9LWYDYIlaMAXiHAXOAZAA17lUAdENuZ4AWlLKCK",
    "YFPWZOWJXjCAiJAl6AcUAs39Z4AuGWS1314XEWE1FWV1DXwSA"};
enum { LLM__N_COMBINING = 393 };
static const char *const llm__combining[] = {
    "tOLcD01cF04c301cF01bU05c302bG04c302bG0Bc305104c308cD01cN01cD03c303cD02c313cD04c301cD01cF02c30",
    "1cD01cG02cH01cG02cH01cG0DcDdR5cDdH1c304cD01c303cD01c501c306cD06c302cD01c302cD01c501cB01cD01A0",
    "1B01C01D01E01F01G01H01I02J01K01L01M11N11O01P11cD01c311IXA8cD01U01W001W1WH1R01S01T01U01W001W10",
    "1W201W302cD02c305cD01c302cD01c3G1W4Y87cD24cD01c301cD22cD11c302cD01c3W41W5U1cD01c302cD01c302cD",
    "03c301cD02c301cD01c303cD01c301cD01c301cD01c301cD01c302cDa57cD01c301cD91c3O4cD19cD13cD15cDWC3",
    "c3WS2cD03c304cDWB5cD05c30EcD11c302cD01c302cD01c303cD03c301R01S01T03cD01c302cD02c305cDWT17G193",
    "1cD01c302cDYA17G19WH1cDWU17G19YH17G19YH17G19Z319YH17G1971XM01XTY817G19YG29G19Z019YG2YA019D4YE",
    "YF2YP019D4YTXE2c3R1c311c311bUWO1Z501Z611Z854Z621Z612cD01912cDX01c3YJ17129XK1c3s63cDzI29U19a21",
    "9A1cDbH1cBZJ1c501cD01c3c21cD01c3X919K8cD21c3WH5cD06c302cD01c312c302cD02c305cD01c304cDY817F19",
    "W71cD01c307cDWN29WR17B29X517ZS3cD11105c302cD04c301cD17141c361cD32cDbC2cD01c307cD01c302cD01cH0",
    "1bS01c301bG0W6cD01cF02cB01c301c101cD01cG01c301cD01c3s72cD02104cD03102cD41cD32101cD01c301cD021",
    "04c301cDYb13cDZH19Y3W1cDmR1c101cB01cF01c502c7YC28WVh11cD4AcDW12cDXI2cDdS19W619ZR19RIcDWQ3c3W6",
    "19Y217C19cM1cD12cD01c322cD52cD11cDWL19cT19qXT1QtP7cD07c302cDWVC1c3c91c3ZP5cDWs81c311cDW91cD01",
    "101c3419aA1cD01c3nF4cDX35cDf72cDXI3c3X82c303cD01c301cD04c3WI1cD01c301cD01c3b619WA19E19WQ19017",
    "X73cDWH29X017XE19917YD19017aN17019XI27G19O7cD35cDXR39YK19317N1cDY619017d319017Z219YP19017YM19",
    "dL19017dA29417a119XL19I19XJ19iI19dA17129XJ19iM29mmC19XnG51WS7cDWd026pi511alH2bU03131c905bU88",
    "c325cD02c3U4cDZO3cDYpC7cD1HcD27cD12cD15cDY71cDa57cDh31cDWU4cDlC2cF01c301cDd61cD01c3sN7c3YG6cD",
    "017"};
enum { LLM__N_DECOMPOSITIONS = 2081 };
static const char *const llm__decompositions[] = {
    "hCZ6120220320420920B44W92412022032092812022032094A42212022032042096C12022032092826G1202203204",
    "20920B44W92412022032092812022032094A42212022032042096C12022032092824092YI52X252X172X272X1WA2",
    "X2WA2WS22X222X132X232X182X282X1D2X2D2WUD2X2D6WU52X252X172X272X182X282X1WA2X2WA2X1D2X2D2WS32X2",
    "32X172X272X182X282X1W92X2W92WU32X236WU42X242X152X252X172X272X1WA2X2WA2X188232X232WUW92X2W94WU",
    "22X222X1W92X2W92X1D2X2DAWS22X222X1W92X2W92X1D2X2D8WU52X252X172X272X1C2X2C6WQ22X222X1W92X2W92",
    "X1D2X2D2WU22X222X132X232X1W92X2W92X1D2X2D2WUW92X2W92X1D2X2D6WU42X242X152X252X172X272X1B2X2B2",
    "X1C2X2C2X1WA2X2WA2WS32X232WS32X232X192222X222X182X282X1D2X2DX6XNS2X2SSWKS2X2SWRYAD2X2D2WGD2X2",
    "D2WKD2X2D2WKD2X2D2bK52X252X122X222X1D2X2D2X112X214YI52X252pO52252rN52X256f7D2X2D2WOD2X2D2WOWA",
    "2X2WA2tE52252YAD2j4D2WZID8X722X226WI12X212aJ22X222WU22X222R22X222gOG2X2G2X1I2X2I2WOG2X2G2X1I2",
    "X2I2WOG2X2G2X1I2X2I2WKG2X2G2X1I2X2I2WQG2X2G2X1I2X2I2WQG2X2G2X1I2X2I2X5W82X2W82WUW82X2W86XPD2",
    "X2DEXF82X282WOW92X2W92c952X252X352X252fL82X282xQ52252z952X25mBWfN02204W503L2Y3a20KWf40Ec122",
    "Wm222Wl202WlB22422424C24C22822X42WLY492O92O22822422422W52WLW492O92B22C2282AI2209XQZA12094328P",
    "9AW922312M7ML7X2X27WF512094328X89AWO22312M7WHY5G22GZOb372X27SXD72X272X192X296WM72X276fG92292",
    "hH92X292WU92X296WU52X252X192X292WK92X296fU92292h392X292XL52X252X192X292X1C2X2C2WO92X296WO92X2",
    "9o5zMwF20wG2X4wG2X3wH2X8wGeTdUwG4W8wGW3W3wGWcIWcIWpGGGWpG66WpGXBWSWpG32WpG32WpG3AWpG3AWpG32",
    "WpG3IWpG38WpGbUePWtM20WuGW2XDWtK32WtK5QWtKaEdEWxO7CWxOX9X5WxO32WxO3AWxO7UWxOk3nAXbR60Xb320XbS",
    "W2XDXb132Xb1YHc7Xg1YFYBXf722Xf721Xg1d0d8Xk4cNcPXo7EEXo720Xo840XnJ28Xo7d6d0XrJ22XrJ21XsDe5eF",
    "Xw440Xw926Xw425XwPs2s9Yh1LKYh1BAYh1BAYh1BAYh1RWMYgULY5YeP50YeR3Z6Yf852Yf8JZ7Yf8W6X4Yh1LKYh1BA",
    "Yh1BAYh1BAYh1RWMYgUc1eJYkRatJatJbiT44biT44biT44biT44biT88biTXKXKbiT44biT64biT22biT46biTWj7jgU",
    "W72X2W72WU82X282X1W52X2W52X1WJ2X2WJ2bG22X222fF82X282X1W52X2W52X1WJ2X2WJ2X1W92X2W92X1WF2X2WF2",
    "g712212122222i8WF2X2WF2X1WI2X2WI2y372272WV482X282WU52X252WU82X282X1W52X2W52X192X292X1W92X2W92",
    "X1WG2X2WG2WUWI2X2WI2bI22X222fH22X222X1W52X2W52X1WJ2X2WJ2WUW52X2W52kw052252ky3WJ2X2WJ2X1WF2X2",
    "WF2WU22X222X182X282X1W52X2W52WU82X282X1W52X2W52X1WJ2X2WJ2X1WF2X2WF2bK22X222X192X292aJ12212122",
    "222l922X222X182X282WS82X282X1W52X2W52kxT52252lV1WJ2X2WJ2WU82X282X1W52X2W52jS82282A82282kj1822",
    "82lVD82X282X1W52X2W52X1WJ2X2WJ2X1WF2X2WF2WUW62X2W62X1WI2X2WI2X1WF2X2WF2kL22222292292mQ42X242",
    "X1W52X2W52WU12X212X122X222X192X292X182X282X1W52X2W52WU82X282X192X292WU82X282WU32X232X1W52X2W5",
    "2X1WJ2X2WJ2W4WJ2O926B24B4lS8ApFW52X2W52X1A2X2A2b822X222X112X212X1A2X2A2X142X242kv732232kt6222",
    "221122121A22A2142242kt372272laCW52X2W52X1A2X2A2X142X242bG22X222X112X212X1A2X2A2X142X242kw8322",
    "32lbLA2X2A2X1W52X2W52WKW52X2W52X1A2X2A2bG22X222X112X212X1A2X2A2X142X242kwS32232klQ22222112212",
    "1A22A21422421W522W52qCW52X2W52X1A2X2A2p8222221122121A22A21422421W522W52r312X212X1W52X2W52X1A2",
    "X2A2X142X24EWr5K20L2jm1122121222221X522X52jo4K20L2joJ122121222221X522X52jmAK20L2jmP1221212222",
    "6joSK20L2jpC12212122226jn7K20L2jnM122121222221X522X52jpPK20L2jq9122121222221X522X52jo4K20L2",
    "joJ122121222221X522X52jqMK20L2jr6122121222221X522X52joOK20L2jp812212122226jrBK20L2jrQ12212122",
    "226jpDK20L2jpS122121222221X522X54js0L4jsH140240X52jq6K20L2jqL122121222221X522X52jsOK20L2jt812",
    "2121222221X522X52jsO12902I12F02K12H02M12J02W112Q02D12G02712A06jk5X822X822X822X822X822X822X822",
    "X822X822X822X822X822X822X822X822X82W3X822X822X822X822X822X822X822X822X822X822X822X822X822X822",
    "X822X82Y5X822X822X822X822X822X822X822X822X822X822X822X822X822X822X822X82jt572052jt8X82jt7X829",
    "X84AX52jxOX82jzP72052012L02MX84XI06WoJX52lhKX82jt3X82HX84IX52jyDX82kVI12P02U12R02SX82kV112022",
    "0X52jxP72052W312YM06XKX52W3X52Y472052012T04kZT120220X52kW372052C12WM02W3K20L28X52CX52XD720520",
    "12WE02W7L2Wn212Wl902WpS06lmPX82jsEX82AX849X52kVBX82kY112W602WR12WK02WLX82WmP06lq10220nSkY708",
    "WtI02cR0c5mjJWQ24WQW74WQX0YRWQ28WQ23WQYDY5WQAAWQ66WQWHWHWQ44WQWNWFWQ6EWQ64WQ46WQWFnZ7WQ4naRWQ",
    "MW8WQ2nZJWQ24WQ2nb0WQ22WQ6QWQ22WQ66WQ22WQE6WQ22WQ6EWQ22WQ66WQ22WQX8WNWQ2CWQ22WQ24WQY5Y0WQ22WQ",
    "2W9WQ22WQEX2WQ22WQ22WQ22WQYRcY20220ZY4XsCWQXwPXwLhZI44hZI44hZI44hZI44hZI44hZI44hZI44hZI44hZI4",
    "4hZI44hZI44hZI66hZI44hZI44hZIEEhZI20hZJ46hZI20hZJ46hZI20hZJ46hZI20hZJ46hZI20hZJWFYChZIKaJhZIS",
    "ShZI44hZI44hZI44hZI44hZI44hZI44hZI44hZI44hZI44hZI44hZI44hZI66hZI44hZI44hZIEEhZI20hZJ46hZI20",
    "hZJ46hZI20hZJ46hZI20hZJ46hZI20hZJWFYChZI6ZMhZI22hZI22hZI22hZI8MhZIYimBWmoP02owF02qbT02WX402",
    "kyR02mgN02YW402WefG02002WbiT02zY502WWYM02XV002ZoB02fwN02ZvE02Yn302tE02pG02ZWB02plL02Wp502WzP0",
    "2WnR02drC02cVJ02ZlQ02WeaQ02XoN02hm302Yt302fqF02hsD02WYl902ex902gpD02Wx902pmI02llU02YfL02rVJ02",
    "Zi302YgE02Xz002kwG02WYt502Wa602o102elJ02Yc202YvH02XmT02ZvA02YbD02aH02ZW302ZxU02Xd002Wg002oy50",
    "2kL02Xb602YdN02dYH02bYJ02fjL02vo602YdF02koS02Xb002cl002YhP02foP02aiI02WXXU02WwE02ce402XVC02oT",
    "02cl902m102huL02WZyB02tg502tw002W002qjP02Wy002YeC02evP02auT02qq102YuS02mmO02WWgK02cdT02XbQ02",
    "fgB02WVH02ne802paP02qz002djQ02egP02lgP02Yx002hnQ02rW802Xj202lf002cXB02YhB02ljT02oZT02nrJ02aXG",
    "02lzS02lpD02ejF02poC02Wj302b602hY702fvS02XyB02ZjG02YrD02WXk102qF02XsN02XxC02Yp302aiQ02ZwF02",
    "kaS02Xl802XbU02YH02WenF02fs302XkF02oZ702vX302WpB02c702WgU02ao002WZF02WrL02XtO02XbO02WeU02cv10",
    "2aiN02az302Wq202WYrP02e102WYM02jy502ht002WVF02sgL02oB02Ww602ZgD02duH02Zq202ojS02ZeF02XoD02z40",
    "2WdB02fiF02gP02ayQ02g302em402XlI02a902iD02Wcp702riT02htO02XpQ02xq602et402WcE02awU02a702ZzE02",
    "XfQ02ZZO02XgH02cv702bYT02dVQ02zgM02ugU02WaW602gZT02cN02XuJ02rC02XwJ02qL02WoM02XjM02jlU02WbtK0",
    "2dxM02wvJ02Wbj202bwH02dyN02mr502ugF02xE02YoM02bXS02np002Wai202WVB02ZiL02aZR02pA02rA02Xd002YtN",
    "02zM02aYC02Zz602W502Zs902Xr002WaW202joR02jaG02kuG02WjT02ed302dw502YW602WbL02yeR02YeE02fr602",
    "YtE02aF02sR02ac502WZG02jcN02WWdN02wyE02vY002Y802brE02XbU02ivJ02ms702egK02YhS02qnB02YqF02cj902",
    "btL02rsG02cc502XhA06WgU04ckS06fyU02mrT02WxR02WeC02X602E02XM02kvP02ja602WnF04YgI04XnS06XtM02hM",
    "08Zc702Q02XQ02Xi302buU02YYI02Wbv602p602bI02tG02WN02c102WbT02bO02bA02zE02bM02WzL02K02XbG02iL02",
    "XE02bE02WtH02eF02g902WW802XoL02fG02m102WbT02h602WWE02Xg702g502M02102G02C02E02Y302202gF02Z602",
    "pI02WaC02WB02YJ02oL02eF02WVF02e102002zQ02Xl002dK02sD02YJ02vE02YD02Wi802dC02Ym402nA02YR02yr402",
    "deWI02crZ006wpS02WwO02ZT02WVE02y702YP02q302Y902WhH02ZJ02ZC02ZM02WeO02aN02eB02W102mD02hO02WyG0",
    "2E02e902ZC02o902cJ02ZF02dK02XT02eD02Z802uP02aL02YF02lO02nE02fG02802YP02XbA02Z602u702vE02W002",
    "aJ02l802qL02YeO02XwS02cR02cT02q302eJ02YD02jI02402g102W302WJ02aH02J02uH02WV902mF02h202jE02eR02",
    "q902hQ02WsG02f402WwE02yD02ZE02W102o502YL02XR02YF02502W202ZS02a702tK02Wa402p802o102j802XZE02bK",
    "02cD02dI02XA02O02Y302WkS02XhU02bsbH02B02ba102dpoM02Xh002X402eYhI02anR02nYN02dckF02ZQ0ZDXowJrB",
    "5WJrENHrO30rP3ZbrKrO30rP3Zbt7rE30rF30rJ32rJ32rJ32rJ32rJ32rJ32rJ54rJ32rJ32rJ32rJ32rJ54rJ54rJ32",
    "rJ54rJ32rJ54rJ32rJ32rJ32rJ32rJ3WArG37rM3KrM3IrMan3ZhfU8WNG8aqSarFXevE44XevEUKXevEdEe1XeyU22",
    "XeyUWYQWYCXfl720Xfm1YHYPXfpM44Xfp8IEXfpF6AXfpMYBY7XfpF40Xfp520XfpMkLkTXfxF20Xfx540XfxIl8lE",
    "XgaC22XgaCWvJWvHXhYAWceLWceLYVdA20YVdL20YVdB2MYVdB2LYVdC26YVdB22YVdB21YVdCblAblMYYlO27YYlO2C",
    "YYlOWrcRWrcEYzaG32YzaG3EYzaP30YzaQ30YzaR30YzaS30YzaTaKaPYzaG32YzaG32YzaP32YzaP31YzaQ32YzaQ",
    "aWsRbpiS02902I02cjqG02cjXU02a102Q02ZI02cN02X002a102WG02kVI02dVX202ckt902E02W102W702ckY502czhQ",
    "02kdL02XE02ckZO02ckZ302Q02WkT02WlF02I02ewz002ewuQ02S02kl802koS02M02XQ02A02kp802kuE02402WN02WD",
    "02M02202W302Y702G02I02WJ02K02402002002clr702cWe602kd402WB02cma302cmZ902C02WB02eP02bH02W102X20",
    "2YN02aD02WL02ZA02W102X402002WB02W502G02U02qT02mG02mJ02hN02X802Xg202Yq002nH02XE02WJ02dB02fO021",
    "02cT02copO02col702A02U02W902G02Z402cpc602Z802cpXG02Y102O02a202e502nwO02S02obB02YF02002cpx302",
    "cpoF02WB02U02O02cqc302cqb902E02WsG02WqL02okT02ooU02S02a902Y802crhB02crVI02crVN02cqxT02502W302",
    "bG02202pXJ02pZC02XO02WB02XQ02pd102dhnG02dhlP02pfU02602602W902ezi802ezeR02csxI02002cad902nmS02",
    "002piE02dqm602uYE02dvY002I02plB02poD02Y902K02X602dO02pxL02WS02qVR02cuVE02ctx402dA02802402302",
    "XU02W902XA02R02M02Y102W902802WL02M02Z802aD02X802d002cutU02cuv502Z502bU02WN02b802cuz602cuv502",
    "aU02WO02rY202rkF02WB02X002XD02rhB02rvA02WR02cwfI02cwXR02mR02g802sV802sZT02sb002X902hXI02602",
    "ghN02bD02iwG02WWhJ02nt202802C02YT02L02cxeK02dpsU02su402cG02i702Y902cxVR02cxV802c402kP02tbR02",
    "teR02b802ZI02h802cxX302cwyO02tx902uWQ02cxwI02cxt802uWJ02uYI02XS02WN02202cyn002krA02kyC02cykG0",
    "2cziI02czb802S02bH02g902XI02YL02YE02XI02U02Q02cyzQ02cza102l602Z202vc202vi302702czc402czpC02t2",
    "02czaE02Y302czXQ02cD02WM02502vxB02wVD02Y902B02YF02byk802byaD02cztT02czo902dVeF02dVVD02Q02WN02",
    "dWaS02dWXO02WB02dWpR02jC02dWpE02W302xa602xbS02xb302002xlI02WB02WB02W902ZE02xnJ02xtE02dXz802",
    "dXxH02dYYG02dYV802cgYT02cftI02dZeF02WF02e102eXj402O02yd302dZlI02102XG02WL02dZmU02202002XO02",
    "yfE02yjL02yiP02a502eZaO02dakF02Z002Z402ytC02eaYD02dbW202dbdI02XO02dbcK02aT02zc002zhG02K02A02",
    "dce402o902002dcn402zf302ecj202dcpU02602zqQ02ecuD02dcmD02WVV402WVWI02902WR02deXD02ddw002WVY702",
    "WVeM02YP02ZA02WVjG02efdF02X002efd202efmG02delC02derT02deq502bG02M02dfeH02ZM02dfdB02dflU02dfkS",
    "02cjrD02dlVB02WWi702a702WWjT02WWnO02plD02eVq202S02wt002I02cjVE02602ccK02WeWU02WXYE02B02W502",
    "ulA02umK02402K02XK02dhaD02dhaE02YJ02ZG02ZO02dR02eT02XM02c702lN02cL02402W102dhaL02oT02eK02ejxA",
    "02WXz902402X802dkmI02dkhG02dhy902elWN02802elf302nK02elx202WYmP02O02M02402Z402X302dK02XP02eN02",
    "a602ZA02WN02WYzP02WZaM02X202WZaH02WZgM02602dkb702djyM02E02WZkT02WZmO02WiwC02eyzG02gR02epsR02I",
    "02WaZI02ZU02f402i302dliB02dlcO02WD02aP02aT02dmaC02XWk502bkkN02T02YB02bkwE02bkhM02bE02dot102WN",
    "02doY902b002X202dokU02dok902nC02f802202aS02tI02WP02dpjC02doq702WejH02WemD02dph002eyt502WeyF02",
    "zhF02znM02dqpB02iN02fVyU02G02WfcI02drrS02fWvI02fXZK02dry402002WT02dsjP02dsXQ02Wfh002WflJ02d40",
    "2WN02YR02WfpA02faXB02dtv502oF02h602Wgr902X002Wgw502dvnE02fciR02fcmE02m302dE02dvuI02Whg902WhkA",
    "02A02E02K02E02XC02dxh20"};
/* END tables made by tests/unicode_tables.py */

typedef struct llm__packed_numbers { /* read position in one of these tables */
    const char *const *line; /* the current line */
    const char *at;          /* next character to read */
} llm__packed_numbers;

static uint32_t llm__next_number(llm__packed_numbers *p) {
    uint32_t number = 0, digit;
    if (!*p->at) p->at = *++p->line;
    do {
        char c = *p->at++;
        digit = (uint32_t)(c >= 'a' ? c - 'a' + 36 : c >= 'A' ? c - 'A' + 10 : c - '0');
        number = number * 31 + digit % 31;
    } while (digit >= 31);
    return number;
}

/* Is c in the class? borders (n): for each run of code points in the class, its first code point,
 * then the first code point after the run. */
static bool llm__in_class(const uint32_t *borders, int n, uint32_t c) {
    int low = 0, high = n;
    while (low < high) {
        int middle = (low + high) / 2;
        if (borders[middle] <= c) low = middle + 1;
        else high = middle;
    }
    return low & 1;
}

/* Does c have the Unicode property White_Space? */
static bool llm__is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

/* ---- Normal form C ---------------------------------------------------
 * Some tokenizers (Qwen's) convert text to NFC (Unicode Standard Annex 15): a letter and its
 * accents become one character where possible; the other accents are sorted. A stable character
 * never changes and never composes with the character before it. Only unstable characters, and the
 * stable character before them, are decomposed, sorted and composed. */

enum { /* Korean syllables are composed by arithmetic */
    LLM__HANGUL = 0xAC00, LLM__HANGUL_L = 0x1100, LLM__HANGUL_V = 0x1161, LLM__HANGUL_T = 0x11A7,
    LLM__HANGUL_N_L = 19, LLM__HANGUL_N_V = 21, LLM__HANGUL_N_T = 28
};

typedef struct llm__decomposition {
    uint32_t whole, first, second; /* code points; second is 0 if whole is a synonym of first */
} llm__decomposition;

typedef struct llm__normalizer { /* the tables above, unpacked */
    llm__decomposition apart[LLM__N_DECOMPOSITIONS];    /* all decompositions, sorted by whole */
    llm__decomposition together[LLM__N_DECOMPOSITIONS]; /* the composable ones, sorted by parts */
    int n_together;
    uint32_t marks[2 * LLM__N_COMBINING];               /* borders of runs of one combining class */
    uint8_t mark_classes[LLM__N_COMBINING];             /* combining class of each run */
    uint8_t unstable[0x110000 / 8];                     /* one bit per code point: 1 if unstable */
} llm__normalizer;

static int llm__compare_together(const void *a, const void *b) {
    const llm__decomposition *x = (const llm__decomposition *)a, *y = (const llm__decomposition *)b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return (x->second > y->second) - (x->second < y->second);
}

static void llm__set_unstable(llm__normalizer *n, uint32_t begin, uint32_t end) {
    for (uint32_t c = begin; c < end; c++) n->unstable[c / 8] |= (uint8_t)(1u << c % 8);
}

static llm__normalizer *llm__normalizer_create(llm_error *err) {
    llm__normalizer *n = (llm__normalizer *)llm__new(1, sizeof *n, "the tables of Unicode's NFC",
                                                     err);
    if (!n) return NULL;
    uint32_t c = 0, first = 0;
    llm__packed_numbers combining = {llm__combining, *llm__combining};
    llm__packed_numbers pairs = {llm__decompositions, *llm__decompositions};
    for (int i = 0; i < LLM__N_COMBINING; i++) {
        n->marks[2 * i] = c += llm__next_number(&combining);
        n->marks[2 * i + 1] = c += llm__next_number(&combining);
        n->mark_classes[i] = (uint8_t)llm__next_number(&combining);
        llm__set_unstable(n, n->marks[2 * i], c);
    }
    c = 0;
    for (int i = 0; i < LLM__N_DECOMPOSITIONS; i++) {
        uint32_t step = llm__next_number(&pairs), difference = llm__next_number(&pairs);
        uint32_t second = llm__next_number(&pairs);
        c += step / 2;
        first += difference % 2 ? ~(difference / 2) : difference / 2;
        llm__decomposition d = {c, first, second ? second + 767 : 0};
        n->apart[i] = d;
        bool composes = step % 2 == 0 && second;
        if (composes) n->together[n->n_together++] = d;
        uint32_t changes = composes ? d.second : c;
        llm__set_unstable(n, changes, changes + 1);
    }
    llm__set_unstable(n, LLM__HANGUL_V, LLM__HANGUL_V + LLM__HANGUL_N_V);
    llm__set_unstable(n, LLM__HANGUL_T + 1, LLM__HANGUL_T + LLM__HANGUL_N_T);
    qsort(n->together, (size_t)n->n_together, sizeof *n->together, llm__compare_together);
    return n;
}

static bool llm__is_stable(const llm__normalizer *n, uint32_t c) {
    return c < 0x300 || c >= LLM__UTF8_INVALID || !(n->unstable[c / 8] >> c % 8 & 1);
}

/* Returns c with its combining class in the top byte. */
static uint32_t llm__with_class(const llm__normalizer *n, uint32_t c) {
    int low = 0, high = 2 * LLM__N_COMBINING;
    while (low < high) {
        int middle = (low + high) / 2;
        if (n->marks[middle] <= c) low = middle + 1;
        else high = middle;
    }
    return low & 1 ? c | (uint32_t)n->mark_classes[low / 2] << 24 : c;
}

typedef struct llm__codes { /* characters to normalize */
    uint32_t *data;      /* (capacity) n entries, code point | class << 24; then scratch space */
    int64_t n, capacity; /* capacity >= 2 n */
} llm__codes;

static bool llm__add_code(const llm__normalizer *n, llm__codes *codes, uint32_t c, llm_error *err) {
    void *grown = llm__grow(codes->data, 2 * codes->n + 1, &codes->capacity, sizeof *codes->data,
                            "text in NFC", err);
    if (!grown) return false;
    codes->data = (uint32_t *)grown;
    codes->data[codes->n++] = llm__with_class(n, c);
    return true;
}

/* Append the decomposition of c. The recursion has at most four levels: only the first part can be
 * decomposed again. */
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
    int low = 0, high = LLM__N_DECOMPOSITIONS;
    while (low < high) {
        int middle = (low + high) / 2;
        if (n->apart[middle].whole < c) low = middle + 1;
        else high = middle;
    }
    if (low == LLM__N_DECOMPOSITIONS || n->apart[low].whole != c)
        return llm__add_code(n, codes, c, err);
    return llm__add_decomposed(n, codes, n->apart[low].first, err) &&
           (!n->apart[low].second || llm__add_code(n, codes, n->apart[low].second, err));
}

/* Sort each run of combining marks (combining class above 0) by class. The sort is stable. */
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

/* Returns the character composed of first and second, or 0 if there is none. */
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

/* Compose each character with the last character of class 0 before it, if possible. A character
 * between them that has the same or a higher class prevents this. */
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

/* Append the text, converted to NFC. Invalid UTF-8 is copied unchanged. */
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

/* ---- The vocabulary -------------------------------------------------- */

enum { /* kinds of tokens, numbered as in GGUF */
       LLM__TOKEN_NORMAL = 1,
       LLM__TOKEN_UNKNOWN,
       LLM__TOKEN_CONTROL,
       LLM__TOKEN_USER,
       LLM__TOKEN_UNUSED,
       LLM__TOKEN_BYTE
};
/* STRIP_LEFT, STRIP_RIGHT: the white space before or after the token is removed. */
enum {
    LLM__MARK_END = 1,
    LLM__MARK_SPECIAL = 2,
    LLM__MARK_STRIP_LEFT = 4,
    LLM__MARK_STRIP_RIGHT = 8
};

typedef struct llm__merge_rule { /* entry of the hash table of merges */
    uint64_t pair;   /* left id << 32 | right id */
    int32_t rank;    /* position in the list of merges, from 1 (best); 0: free entry */
    int32_t result;  /* id of the joined token */
} llm__merge_rule;

/* Returns the length in bytes of the first word of a text (n >= 1 bytes). */
typedef size_t (*llm__splitter)(const llm_tokenizer *t, const uint8_t *text, size_t n);

/* Where llm_tokenize adds a space. A stretch is the text between two special tokens. */
typedef enum llm__prefix {
    LLM__PREFIX_NONE,
    LLM__PREFIX_START,   /* at the start, and after each control token */
    LLM__PREFIX_STRETCH, /* before every stretch */
    LLM__PREFIX_FIRST,   /* at the start, unless the text begins with a space */
    LLM__PREFIX_EACH     /* before every stretch that does not begin with a space */
} llm__prefix;

struct llm_tokenizer {
    const char *name;          /* path of the file, for error messages */
    const llm_file *file;      /* file that holds the bytes of texts */
    int32_t size;              /* number of tokens */
    bool byte_level;           /* "gpt2"; else "llama" */
    llm_string *texts;         /* (size) text of each token, as stored in the file */
    uint8_t *kinds, *marks;    /* (size) LLM__TOKEN_*; (size) bits LLM__MARK_* */
    float *scores;             /* (size) score of each token; NULL: merges are used */
    size_t longest;            /* length of the longest text in bytes */
    int32_t *ids;              /* (ids_mask + 1) hash table: text to id + 1; 0: free entry */
    uint64_t ids_mask;
    llm__merge_rule *merges;   /* (merges_mask + 1) hash table of merges; NULL: scores are used */
    uint64_t merges_mask;
    uint64_t seed;             /* random, for both hash tables, so no file can force collisions */
    int32_t bytes[256];        /* id of each byte's token; -1: none */
    int16_t spelled[324];      /* byte spelled by each code point; -1: none */
    llm__splitter split;
    llm__normalizer *normalizer; /* NULL: text is not converted to NFC */
    bool ignores_merges;       /* a word that is a token is used without merging */
    bool fuses_unknown;        /* adjacent characters without tokens become one unknown token */
    int32_t bos, eos, unknown; /* token ids; -1: none */
    bool adds_bos, adds_eos, drops_space; /* drops_space: decoding removes the leading space */
    llm__prefix prefix;
    bool has_chat;             /* does the file have a chat template? */
    llm_string chat_source;    /* source of the chat template, in Jinja */
    const struct llm__chat_format *chat; /* format of the chat template; NULL: unknown */
    char *chat_usual;          /* default system message, or NULL */
    bool chat_begins_bos;      /* template begins with BOS (LLM__CHAT_KEEPS_USUAL) */
    bool chat_begins_line;     /* template begins with an empty line (LLM__CHAT_KEEPS_USUAL) */
    const llm_string **specials[2]; /* sorted texts: [0] user-defined tokens, [1] special too */
    int64_t n_specials[2];
    bool special_begins[2][256]; /* [i][b]: a token in specials[i] begins with byte b */
    uint32_t letters[LLM__N_LETTERS], numbers[LLM__N_NUMBERS]; /* borders, for llm__in_class */
};

static bool llm__tokenizer_error(const llm_tokenizer *t, llm_error *err, llm_status status,
                                 const char *what) {
    return llm__fail(err, status, "%s: %s", t->name, what);
}

/* Returns the slot that holds the text, or the free slot where it belongs. */
static uint64_t llm__token_slot(const llm_tokenizer *t, llm_string text) {
    uint64_t slot = llm__hash_bytes(t->seed, text.data, text.length);
    for (;; slot++) {
        int32_t id = t->ids[slot & t->ids_mask] - 1;
        if (id < 0 || (t->texts[id].length == text.length &&
                       !memcmp(t->texts[id].data, text.data, text.length)))
            break;
    }
    return slot & t->ids_mask;
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
    uint64_t pair = llm__pair(left, right);
    uint64_t slot = llm__mix(pair ^ t->seed);
    while (t->merges[slot & t->merges_mask].rank && t->merges[slot & t->merges_mask].pair != pair)
        slot++;
    return &t->merges[slot & t->merges_mask];
}

/* Returns the size of a hash table. At least a third of its slots stay free: searches are short. */
static uint64_t llm__table_size(uint64_t entries) {
    uint64_t size = 16;
    while (size < entries + entries / 2) size *= 2;
    return size;
}

static bool llm__load_texts(llm_tokenizer *t, llm_error *err) {
    const llm_value *tokens = llm_file_find(t->file, "tokenizer.ggml.tokens");
    if (!tokens || tokens->type != LLM_VALUE_ARRAY || tokens->element_type != LLM_VALUE_STRING)
        return llm__tokenizer_error(
            t, err, LLM_ERROR_FORMAT,
            "there is no vocabulary (tokenizer.ggml.tokens, an array of strings)");
    if (!tokens->count || tokens->count > INT32_MAX / 2)
        return llm__fail(err, LLM_ERROR_FORMAT, "%s: a vocabulary of %llu tokens is impossible",
                         t->name, (unsigned long long)tokens->count);
    uint64_t slots = llm__table_size(tokens->count);
    t->size = (int32_t)tokens->count;
    t->ids_mask = slots - 1;
    t->texts = (llm_string *)llm__new((size_t)t->size, sizeof *t->texts, "the vocabulary", err);
    t->ids = t->texts ? (int32_t *)llm__new((size_t)slots, sizeof *t->ids,
                                            "the vocabulary's hash table", err)
                      : NULL;
    if (!t->ids) return false;
    size_t cursor = 0;
    for (int32_t id = 0; id < t->size && llm_value_string(tokens, &cursor, &t->texts[id]); id++) {
        uint64_t slot = llm__token_slot(t, t->texts[id]);
        if (!t->ids[slot]) t->ids[slot] = id + 1; /* for equal texts, keep the lowest id */
        if (t->texts[id].length > t->longest) t->longest = t->texts[id].length;
    }
    return true;
}

/* Returns 0x41 for "<0x41>", and -1 for text of another form. */
static int llm__parse_byte(llm_string s) {
    if (s.length != 6 || memcmp(s.data, "<0x", 3) || s.data[5] != '>') return -1;
    int value = 0;
    for (int i = 3; i < 5; i++) {
        char c = s.data[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                           : -1;
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

static bool llm__wrong_length(const llm_tokenizer *t, const char *key, const llm_value *value,
                              llm_error *err) {
    return llm__fail(err, LLM_ERROR_FORMAT, "%s: %s has %llu elements for %d tokens", t->name,
                     key, (unsigned long long)value->count, (int)t->size);
}

static bool llm__load_kinds(llm_tokenizer *t, llm_error *err) {
    const llm_value *kinds = llm_file_find(t->file, "tokenizer.ggml.token_type");
    if (kinds && kinds->count != (uint64_t)t->size)
        return llm__wrong_length(t, "tokenizer.ggml.token_type", kinds, err);
    t->kinds = (uint8_t *)llm__new((size_t)t->size, 1, "the kinds of tokens", err);
    t->marks = t->kinds ? (uint8_t *)llm__new((size_t)t->size, 1, "the kinds of tokens", err)
                        : NULL;
    if (!t->marks) return false;
    for (int32_t id = 0; id < t->size; id++) {
        int64_t kind = LLM__TOKEN_NORMAL;
        int byte = t->byte_level ? -1 : llm__parse_byte(t->texts[id]);
        if (kinds && !llm_value_i64(kinds, (uint64_t)id, &kind))
            return llm__tokenizer_error(
                t, err, LLM_ERROR_FORMAT,
                "tokenizer.ggml.token_type is not an array of whole numbers");
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

static bool llm__load_scores(llm_tokenizer *t, llm_error *err) {
    const llm_value *scores = llm_file_find(t->file, "tokenizer.ggml.scores");
    if (!scores)
        return llm__tokenizer_error(t, err, LLM_ERROR_FORMAT,
                                    "the vocabulary has no tokenizer.ggml.scores");
    if (scores->count != (uint64_t)t->size)
        return llm__wrong_length(t, "tokenizer.ggml.scores", scores, err);
    t->scores = (float *)llm__new((size_t)t->size, sizeof *t->scores, "the scores of tokens", err);
    if (!t->scores) return false;
    for (int32_t id = 0; id < t->size; id++) {
        double score;
        if (!llm_value_f64(scores, (uint64_t)id, &score) || !(score == score))
            return llm__fail(err, LLM_ERROR_FORMAT, "%s: the score of token %d is not a number",
                             t->name, (int)id);
        t->scores[id] = (float)score;
    }
    return true;
}

/* Write the character that spells a byte in "gpt2" vocabularies. A byte that is printable in
 * Latin-1 is spelled as itself; the other 68 bytes, in order, are spelled as U+0100 and up. Returns
 * the number of bytes written, 1 or 2. */
static size_t llm__spell_byte(int byte, char *out, uint32_t *letter) {
    uint32_t code = 256;
    for (int b = 0; b <= byte; b++) {
        bool prints = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        if (b == byte && prints) code = (uint32_t)b;
        else if (b < byte && !prints) code++;
    }
    *letter = code;
    if (code < 0x80) return out[0] = (char)code, 1;
    out[0] = (char)(0xC0 | code >> 6);
    out[1] = (char)(0x80 | (code & 0x3F));
    return 2;
}

static void llm__load_bytes(llm_tokenizer *t) {
    for (int i = 0; i < 324; i++) t->spelled[i] = -1;
    for (int byte = 0; byte < 256; byte++) {
        char letter[2];
        uint32_t code;
        llm_string spelling = {letter, llm__spell_byte(byte, letter, &code)};
        t->spelled[code] = (int16_t)byte;
        t->bytes[byte] = llm__find_token(t, spelling);
    }
}

/* Parse a rule of the form "left right". In some files, a part or the result is not a token; such a
 * rule gets rank 0 and is skipped. joined: scratch space of t->longest bytes. */
static llm__merge_rule llm__read_merge(const llm_tokenizer *t, llm_string rule, int32_t rank,
                                       char *joined) {
    llm__merge_rule merge = {0, 0, -1};
    /* the left part can be a space */
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

/* The hash table can be larger than the CPU caches, so slots are prefetched. */
static void llm__fill_merges(llm_tokenizer *t, const llm__merge_rule *rules, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        if (i + 16 < n)
            LLM__PREFETCH(&t->merges[llm__mix(rules[i + 16].pair ^ t->seed) & t->merges_mask]);
        llm__merge_rule *slot = (llm__merge_rule *)llm__find_merge(
            t, (int32_t)(rules[i].pair >> 32), (int32_t)rules[i].pair);
        if (rules[i].rank && !slot->rank) *slot = rules[i];
    }
}

static bool llm__load_merges(llm_tokenizer *t, const char *key, llm_error *err) {
    const llm_value *merges = llm_file_find(t->file, key);
    if (!merges || merges->type != LLM_VALUE_ARRAY || merges->element_type != LLM_VALUE_STRING)
        return llm__tokenizer_error(
            t, err, LLM_ERROR_FORMAT,
            "the vocabulary has no tokenizer.ggml.merges (an array of strings)");
    if (merges->count > INT32_MAX / 2)
        return llm__tokenizer_error(t, err, LLM_ERROR_FORMAT,
                                    "the vocabulary has an impossible number of merges");
    uint64_t slots = llm__table_size(merges->count), n = 0;
    t->merges_mask = slots - 1;
    t->merges = (llm__merge_rule *)llm__new((size_t)slots, sizeof *t->merges, "the merges", err);
    llm__merge_rule *rules = t->merges
                                 ? (llm__merge_rule *)llm__new((size_t)merges->count, sizeof *rules,
                                                               "the merges", err)
                                 : NULL;
    char *joined = rules ? (char *)llm__new(t->longest, 1, "the merges", err) : NULL;
    llm_string rule;
    for (size_t cursor = 0; joined && llm_value_string(merges, &cursor, &rule); n++)
        rules[n] = llm__read_merge(t, rule, (int32_t)n + 1, joined);
    bool ok = joined != NULL;
    llm__fill_merges(t, rules, n);
    LLM_FREE(rules);
    LLM_FREE(joined);
    return ok;
}

/* If the file has no such key, *id is `usual` if that token has the given kind, else -1. */
static bool llm__load_named(llm_tokenizer *t, const char *key, int32_t usual, int kind, int32_t *id,
                            llm_error *err) {
    const llm_value *value = llm_file_find(t->file, key);
    uint64_t number = 0;
    *id = usual >= 0 && usual < t->size && t->kinds[usual] == kind ? usual : -1;
    if (!value) return true;
    if (!llm_value_u64(value, 0, &number) || number >= (uint64_t)t->size)
        return llm__fail(err, LLM_ERROR_FORMAT, "%s: %s is not the id of one of the %d tokens",
                         t->name, key, (int)t->size);
    *id = (int32_t)number;
    return true;
}

/* Some files give an end token the kind "normal". If its text is in angle brackets, it is
 * special. */
static void llm__mark_special(llm_tokenizer *t, int32_t id, uint8_t marks) {
    if (id < 0) return;
    llm_string s = t->texts[id];
    t->marks[id] |= marks;
    if (s.length > 2 && s.data[0] == '<' && s.data[s.length - 1] == '>')
        t->marks[id] |= LLM__MARK_SPECIAL;
}

static bool llm__load_ends(llm_tokenizer *t, llm_error *err) {
    static const char *const spellings[] = {
        "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>",    "<|eom_id|>",
        "<|im_end|>",    "<|end|>",         "<end_of_turn>", "</s>"};
    bool sp = !t->byte_level;
    int32_t eot, eom;
    if (!llm__load_named(t, "tokenizer.ggml.bos_token_id", sp ? 1 : -1, LLM__TOKEN_CONTROL, &t->bos,
                         err) ||
        !llm__load_named(t, "tokenizer.ggml.eos_token_id", sp ? 2 : -1, LLM__TOKEN_CONTROL, &t->eos,
                         err) ||
        !llm__load_named(t, "tokenizer.ggml.unknown_token_id", sp ? 0 : -1, LLM__TOKEN_UNKNOWN,
                         &t->unknown, err) ||
        !llm__load_named(t, "tokenizer.ggml.eot_token_id", -1, 0, &eot, err) ||
        !llm__load_named(t, "tokenizer.ggml.eom_token_id", -1, 0, &eom, err))
        return false;
    llm__mark_special(t, t->bos, 0);
    llm__mark_special(t, t->eos, LLM__MARK_END);
    llm__mark_special(t, eot, LLM__MARK_END);
    llm__mark_special(t, eom, LLM__MARK_END);
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        int32_t id = llm__find_text(t, spellings[i]);
        /* In byte-level vocabularies, a "</s>" of the kind "normal" is an HTML tag. */
        if (id >= 0 && !sp && t->kinds[id] == LLM__TOKEN_NORMAL && !strcmp(spellings[i], "</s>"))
            continue;
        llm__mark_special(t, id, LLM__MARK_END);
    }
    return true;
}

/* llm__match_special needs the tokens sorted: then tokens with a common beginning are adjacent. */
static bool llm__load_specials(llm_tokenizer *t, bool all, llm_error *err) {
    int64_t n = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass && !(t->specials[all] = (const llm_string **)llm__new(
                          (size_t)n, sizeof(llm_string *), "the special tokens", err)))
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

/* ---- Splitting text into words ("gpt2") ------------------------------ */

typedef enum llm__class {
    LLM__CLASS_OTHER, LLM__CLASS_LETTER, LLM__CLASS_NUMBER, LLM__CLASS_SPACE
} llm__class;

/* Returns the class of the first character (n >= 1). An invalid byte counts as class OTHER. */
static llm__class llm__classify(const llm_tokenizer *t, const uint8_t *text, size_t n,
                                size_t *length) {
    uint32_t c;
    *length = llm__utf8(text, n, &c);
    if (c < 0x80) {
        if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') return LLM__CLASS_LETTER;
        if (c >= '0' && c <= '9') return LLM__CLASS_NUMBER;
        return llm__is_space(c) ? LLM__CLASS_SPACE : LLM__CLASS_OTHER;
    }
    if (c >= LLM__UTF8_INVALID) return *length = 1, LLM__CLASS_OTHER;
    if (llm__in_class(t->letters, LLM__N_LETTERS, c)) return LLM__CLASS_LETTER;
    if (llm__in_class(t->numbers, LLM__N_NUMBERS, c)) return LLM__CLASS_NUMBER;
    return llm__is_space(c) ? LLM__CLASS_SPACE : LLM__CLASS_OTHER;
}

/* Returns the number of bytes of white space at the start. *last: offset of the last character of
 * this white space. */
static size_t llm__space_run(const llm_tokenizer *t, const uint8_t *text, size_t n, size_t *last) {
    size_t at = 0, length;
    while (at < n && llm__classify(t, text + at, n - at, &length) == LLM__CLASS_SPACE) {
        *last = at;
        at += length;
    }
    return at;
}

static size_t llm__class_run(const llm_tokenizer *t, llm__class class_, const uint8_t *text,
                             size_t n) {
    size_t at = 0, length;
    while (at < n && llm__classify(t, text + at, n - at, &length) == class_) at += length;
    return at;
}

/* GPT-2's rule (its regular expression is in llm__read_split). A word is one of: an English
 * ending such as 's; a run of letters only, of numbers only, or of other characters only, each
 * after an optional space; a run of white space.
 * White space before other text ends one character early; the next word begins with that character.
 * digits_alone: each digit is a word, and text between digits is split separately. */
static size_t llm__gpt2_word(const llm_tokenizer *t, const uint8_t *text, size_t n,
                             bool digits_alone) {
    static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t i = 0; text[0] == '\'' && i < sizeof endings / sizeof *endings; i++) {
        size_t length = strlen(endings[i]);
        if (length <= n && !memcmp(text, endings[i], length)) return length;
    }
    size_t space = text[0] == ' ' && n > 1, length, last = 0;
    llm__class first = llm__classify(t, text + space, n - space, &length);
    if (digits_alone && first == LLM__CLASS_NUMBER) return space ? 1 : length;
    if (first != LLM__CLASS_SPACE) return space + llm__class_run(t, first, text + space, n - space);
    size_t run = llm__space_run(t, text, n, &last);
    if (run == n || !last) return run;
    return digits_alone && llm__classify(t, text + run, n - run, &length) == LLM__CLASS_NUMBER
               ? run
               : last;
}

static size_t llm__split_gpt2(const llm_tokenizer *t, const uint8_t *text, size_t n) {
    return llm__gpt2_word(t, text, n, false);
}

static size_t llm__split_digits_gpt2(const llm_tokenizer *t, const uint8_t *text, size_t n) {
    return llm__gpt2_word(t, text, n, true);
}

/* Returns the length of an English ending such as 's in upper or lower case (U+017F counts as an
 * s), or 0. */
static size_t llm__english_ending(const uint8_t *text, size_t n) {
    if (n < 2 || text[0] != '\'') return 0;
    if (n > 2 && text[1] == 0xC5 && text[2] == 0xBF) return 3;
    int a = text[1] | 0x20, b = n > 2 ? text[2] | 0x20 : 0;
    if (text[1] >= 0x80) return 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l') ? 3 : 0;
}

/* Llama 3's and Qwen's rule (llm__read_split). A word of letters can begin with one character that
 * is not a letter, number or line end. A number has at most `digits` digits. A word of other
 * characters can begin with a space, and includes the line ends after it. White space ends after
 * its last line end; without a line end, it ends one character before other text. */
static size_t llm__llama3_word(const llm_tokenizer *t, const uint8_t *text, size_t n, int digits) {
    size_t length, next, last = 0, ending = llm__english_ending(text, n);
    if (ending) return ending;
    llm__class first = llm__classify(t, text, n, &length);
    bool line_end = text[0] == '\r' || text[0] == '\n';
    if (first == LLM__CLASS_LETTER) return llm__class_run(t, first, text, n);
    if (first == LLM__CLASS_NUMBER) {
        size_t at = length;
        while (--digits && at < n &&
               llm__classify(t, text + at, n - at, &length) == LLM__CLASS_NUMBER)
            at += length;
        return at;
    }
    llm__class second = length < n ? llm__classify(t, text + length, n - length, &next)
                                   : LLM__CLASS_SPACE;
    if (second == LLM__CLASS_LETTER && !line_end)
        return length + llm__class_run(t, second, text + length, n - length);
    if (first == LLM__CLASS_OTHER || (text[0] == ' ' && second == LLM__CLASS_OTHER)) {
        size_t at = text[0] == ' ';
        at += llm__class_run(t, LLM__CLASS_OTHER, text + at, n - at);
        while (at < n && (text[at] == '\r' || text[at] == '\n')) at++;
        return at;
    }
    size_t run = llm__space_run(t, text, n, &last);
    for (size_t i = run; i > 0; i--)
        if (text[i - 1] == '\r' || text[i - 1] == '\n') return i;
    return run == n || !last ? run : last;
}

static size_t llm__split_llama3(const llm_tokenizer *t, const uint8_t *text, size_t n) {
    return llm__llama3_word(t, text, n, 3);
}

static size_t llm__split_qwen2(const llm_tokenizer *t, const uint8_t *text, size_t n) {
    return llm__llama3_word(t, text, n, 1);
}

/* Can merging produce this token? */
static bool llm__is_piece(const llm_tokenizer *t, int32_t id) {
    return t->kinds[id] != LLM__TOKEN_CONTROL && t->kinds[id] != LLM__TOKEN_UNKNOWN &&
           t->kinds[id] != LLM__TOKEN_BYTE;
}

/* Returns the next U+2581, or the end of the text. SentencePiece does not split text into words.
 * But if no token contains U+2581 after a different character, no merge crosses such a boundary,
 * and splitting there gives the same tokens in less time. */
static const uint8_t *llm__next_space(const uint8_t *text, size_t n) {
    for (const uint8_t *p = text, *end = text + n;
         (p = (const uint8_t *)memchr(p, 0xE2, (size_t)(end - p))); p++)
        if (end - p >= 3 && p[1] == 0x96 && p[2] == 0x81) return p;
    return text + n;
}

static size_t llm__split_spaces(const llm_tokenizer *t, const uint8_t *text, size_t n) {
    size_t at = 0;
    (void)t;
    while (n - at >= 3 && !memcmp(text + at, "\xE2\x96\x81", 3)) at += 3;
    return (size_t)(llm__next_space(text + at, n - at) - text);
}

static size_t llm__split_each_space(const llm_tokenizer *t, const uint8_t *text, size_t n) {
    (void)t;
    return n < 3 ? n : (size_t)(llm__next_space(text + 3, n - 3) - text);
}

static size_t llm__split_nothing(const llm_tokenizer *t, const uint8_t *text, size_t n) {
    (void)t;
    (void)text;
    return n;
}

/* Does any token contain U+2581 after a different character? */
static bool llm__joins_spaces(const llm_tokenizer *t) {
    for (int32_t id = 0; id < t->size; id++) {
        const uint8_t *text = (const uint8_t *)t->texts[id].data;
        size_t n = t->texts[id].length;
        if (llm__is_piece(t, id) && n && llm__split_spaces(t, text, n) != n) return true;
    }
    return false;
}

static const struct llm__split {
    const char *name;           /* value of tokenizer.ggml.pre */
    llm__splitter split;
    bool composes;              /* text is converted to NFC */
    bool ignores_merges, adds_bos;
} llm__splits[] = {
    {"gpt-2", llm__split_gpt2, false, false, false},
    {"gpt2", llm__split_gpt2, false, false, false},
    {"phi-2", llm__split_gpt2, false, false, false},
    {"olmo", llm__split_gpt2, false, false, false},
    {"mpt", llm__split_gpt2, false, false, false},
    {"smollm", llm__split_digits_gpt2, false, false, false},
    {"starcoder", llm__split_digits_gpt2, false, false, false},
    {"refact", llm__split_digits_gpt2, false, false, false},
    {"command-r", llm__split_digits_gpt2, false, false, false},
    {"codeshell", llm__split_digits_gpt2, false, false, false},
    {"llama-bpe", llm__split_llama3, false, true, true},
    {"llama3", llm__split_llama3, false, true, true},
    {"llama-v3", llm__split_llama3, false, true, true},
    {"falcon3", llm__split_llama3, false, true, true},
    {"dbrx", llm__split_llama3, false, false, false},
    {"smaug-bpe", llm__split_llama3, false, false, false},
    {"qwen2", llm__split_qwen2, true, false, false},
    {"deepseek-r1-qwen", llm__split_qwen2, true, false, false},
};

static bool llm__load_split(llm_tokenizer *t, bool *composes, llm_error *err) {
    const llm_value *value = llm_file_find(t->file, "tokenizer.ggml.pre");
    llm_string name;
    char known[300] = "";
    size_t cursor = 0;
    if (value && !llm_value_string(value, &cursor, &name))
        return llm__tokenizer_error(t, err, LLM_ERROR_FORMAT, "tokenizer.ggml.pre is not a string");
    /* Early Llama 3 files name no rule. A guessed rule would silently split some words wrongly. */
    if (!value || llm__is_text(name, "default"))
        return llm__fail(err, LLM_ERROR_UNSUPPORTED,
                         "%s: the vocabulary does not say by which rule words are split "
                         "(tokenizer.ggml.pre is %s), as in files that early "
                         "converters made; get a newer conversion of the model",
                         t->name, value ? "'default', whatever the model" : "missing");
    for (size_t i = 0; i < sizeof llm__splits / sizeof *llm__splits; i++) {
        const struct llm__split *rule = &llm__splits[i];
        if (llm__is_text(name, rule->name)) {
            t->split = rule->split;
            t->ignores_merges = rule->ignores_merges;
            t->adds_bos = rule->adds_bos;
            *composes = rule->composes;
            return true;
        }
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", rule->name);
    }
    return llm__fail(err, LLM_ERROR_UNSUPPORTED,
                     "%s: the tokenizer splits words by the rule '%s', which is not supported; "
                     "supported are %s",
                     t->name, llm__show(name).text, known);
}

static bool llm__load_model(llm_tokenizer *t, llm_error *err) {
    llm_string model = {"", 0};
    size_t cursor = 0;
    if (!llm_value_string(llm_file_find(t->file, "tokenizer.ggml.model"), &cursor, &model))
        return llm__tokenizer_error(t, err, LLM_ERROR_FORMAT,
                                    "there is no tokenizer (tokenizer.ggml.model) in this file");
    t->byte_level = llm__is_text(model, "gpt2");
    if (t->byte_level || llm__is_text(model, "llama")) return true;
    return llm__fail(err, LLM_ERROR_UNSUPPORTED,
                     "%s: the tokenizer is of the kind '%s', which is not supported; supported are "
                     "gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
                     t->name, llm__show(model).text);
}

static bool llm__load_marks(llm_tokenizer *t, const char *key, uint8_t mark, llm_error *err) {
    const llm_value *ids = llm_file_find(t->file, key);
    for (uint64_t i = 0; ids && i < ids->count; i++) {
        uint64_t id;
        if (!llm_value_u64(ids, i, &id) || id >= (uint64_t)t->size)
            return llm__fail(err, LLM_ERROR_FORMAT,
                             "%s: %s has an element that is no id of a token", t->name, key);
        t->marks[id] |= mark;
    }
    return true;
}

static bool llm__load_prefix(llm_tokenizer *t, llm_error *err) {
    const llm_value *value = llm_file_find(t->file, "tokenizer.llm.prefix");
    uint64_t prefix = LLM__PREFIX_NONE;
    if (!t->byte_level && llm__flag(t, "tokenizer.ggml.add_space_prefix", true))
        prefix = LLM__PREFIX_START;
    if (value && (!llm_value_u64(value, 0, &prefix) || prefix > LLM__PREFIX_EACH))
        return llm__tokenizer_error(t, err, LLM_ERROR_FORMAT,
                                    "tokenizer.llm.prefix is out of range");
    t->prefix = (llm__prefix)prefix;
    t->drops_space = !t->byte_level &&
                     llm__flag(t, "tokenizer.llm.drops_space", prefix != LLM__PREFIX_NONE);
    return true;
}

/* Pieces are joined by token scores or, if the vocabulary is from a tokenizer.json, by merges. */
static bool llm__load_pieces(llm_tokenizer *t, llm_error *err) {
    static const char merges[] = "tokenizer.llm.merges";
    if (llm_file_find(t->file, merges) ? !llm__load_merges(t, merges, err)
                                       : !llm__load_scores(t, err))
        return false;
    t->adds_bos = true;
    t->fuses_unknown = llm__flag(t, "tokenizer.llm.fuse_unknown", false);
    t->split = llm__flag(t, "tokenizer.llm.split_spaces", false) ? llm__split_each_space
               : llm__joins_spaces(t)                            ? llm__split_nothing
                                                                 : llm__split_spaces;
    return true;
}

static bool llm__load_chat(llm_tokenizer *t, llm_error *err);

static bool llm__load_tokenizer(llm_tokenizer *t, llm_error *err) {
    bool composes = false;
    if (!llm__load_model(t, err) || !llm__load_texts(t, err) || !llm__load_kinds(t, err))
        return false;
    if (t->byte_level) llm__load_bytes(t);
    if (t->byte_level ? !llm__load_split(t, &composes, err) ||
                            !llm__load_merges(t, "tokenizer.ggml.merges", err)
                      : !llm__load_pieces(t, err))
        return false;
    if (llm__flag(t, "tokenizer.llm.nfc", composes) &&
        !(t->normalizer = llm__normalizer_create(err)))
        return false;
    t->ignores_merges = llm__flag(t, "tokenizer.llm.ignore_merges", t->ignores_merges);
    t->adds_bos = llm__flag(t, "tokenizer.ggml.add_bos_token", t->adds_bos);
    t->adds_eos = llm__flag(t, "tokenizer.ggml.add_eos_token", false);
    return llm__load_prefix(t, err) && llm__load_ends(t, err) &&
           llm__load_marks(t, "tokenizer.llm.end_token_ids", LLM__MARK_END, err) &&
           llm__load_marks(t, "tokenizer.llm.strip_left", LLM__MARK_STRIP_LEFT, err) &&
           llm__load_marks(t, "tokenizer.llm.strip_right", LLM__MARK_STRIP_RIGHT, err) &&
           llm__load_specials(t, false, err) && llm__load_specials(t, true, err) &&
           llm__load_chat(t, err);
}

static llm_tokenizer *llm__tokenizer_new(const char *name, llm_error *err) {
    llm_tokenizer *t = (llm_tokenizer *)llm__new(1, sizeof *t, "a tokenizer", err);
    if (!t) return NULL;
    t->name = name;
    t->bos = t->eos = t->unknown = -1;
    t->seed = llm__mix((uint64_t)(uintptr_t)t ^ (uint64_t)(llm_seconds() * 1e9));
    for (int i = 0; i < 256; i++) t->bytes[i] = -1;
    llm__packed_numbers letters = {llm__letters, *llm__letters};
    llm__packed_numbers numbers = {llm__numbers, *llm__numbers};
    for (uint32_t i = 0, border = 0; i < LLM__N_LETTERS; i++)
        t->letters[i] = border += llm__next_number(&letters);
    for (uint32_t i = 0, border = 0; i < LLM__N_NUMBERS; i++)
        t->numbers[i] = border += llm__next_number(&numbers);
    return t;
}

llm_tokenizer *llm_tokenizer_create(const llm_file *file, llm_error *err) {
    llm__clear(err);
    if (!file)
        return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_tokenizer_create: no file was given"),
               (llm_tokenizer *)NULL;
    llm_tokenizer *t = llm__tokenizer_new(llm_file_path(file), err);
    if (!t) return NULL;
    t->file = file;
    if (llm__load_tokenizer(t, err)) return t;
    llm_tokenizer_free(t);
    return NULL;
}

void llm_tokenizer_free(llm_tokenizer *t) {
    if (!t) return;
    LLM_FREE(t->normalizer);
    LLM_FREE(t->chat_usual);
    LLM_FREE(t->texts);
    LLM_FREE(t->kinds);
    LLM_FREE(t->marks);
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

/* ---- tokenizer.json --------------------------------------------------
 * Hugging Face's format: a vocabulary, merges, and the steps normalizer, pre_tokenizer, model,
 * post_processor and decoder. The steps of byte-level and SentencePiece BPE are supported; for any
 * other step, the error gives its name. The result is a list of GGUF values. A setting that has no
 * key in GGUF gets one of these keys, after "tokenizer.llm.":
 *
 *     nfc, ignore_merges        bool, if tokenizer.ggml.pre does not imply the value
 *     merges                    merges of a "llama" vocabulary, used instead of scores
 *     prefix                    one of LLM__PREFIX_*
 *     drops_space               decoding removes the leading space
 *     split_spaces              every U+2581 begins a word
 *     fuse_unknown              adjacent characters without tokens become one unknown token
 *     strip_left, strip_right   ids of tokens that remove the white space before or after them
 *     end_token_ids             ids of additional tokens that end an answer */

typedef struct llm__vocabulary {
    const char *name;        /* path of the tokenizer.json, for error messages */
    llm__metadata *m;        /* destination of the GGUF values */
    llm_error *err;
    llm_json json, config, added; /* tokenizer.json, tokenizer_config.json, added_tokens.json */
    llm_string *texts;       /* (size) */
    int32_t *kinds;          /* (size) LLM__TOKEN_*; 0: no token has this id */
    uint8_t *strips;         /* (size) bits: 1 removes white space before the token, 2 after it */
    uint64_t size;           /* number of ids, used and unused */
    llm__splitter split;     /* rule for words; NULL: none yet */
    /* digits: each digit is a word; escapes: spaces become U+2581; byte_fallback: the tokens <0x00>
     * to <0xFF> represent bytes */
    bool byte_level, digits, nfc, escapes, byte_fallback, split_spaces, drops_space, adds_bos,
        adds_eos;
    llm__prefix prefix;
    int32_t bos, eos, unknown; /* token ids; -1: none */
    llm__bytes ids;          /* list of int32_t being built */
} llm__vocabulary;

static const llm_json_node *llm__setting(const llm__vocabulary *v, const char *key) {
    return llm_json_member(v->json.nodes, key);
}

static bool llm__is_null(const llm_json_node *node) { return !node || node->kind == LLM_JSON_NULL; }

static bool llm__vocabulary_error(const llm__vocabulary *v, llm_status status, const char *what) {
    return llm__fail(v->err, status, "%s: %s", v->name, what);
}

static bool llm__refuse_step(const llm__vocabulary *v, const char *step, const llm_json_node *node,
                             const char *known) {
    llm_string type = {"(none)", 6};
    llm_json_string(llm_json_member(node, "type"), &type);
    return llm__fail(v->err, LLM_ERROR_UNSUPPORTED,
                     "%s: the %s '%s' is not supported; supported: %s", v->name, step,
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

static bool llm__read_normalizer(llm__vocabulary *v, const llm_json_node *node) {
    const llm_json_node *steps = llm_json_member(node, "normalizers");
    if (llm__is_null(node)) return true;
    if (llm__is_step(node, "Sequence")) {
        for (const llm_json_node *step = llm_json_first(steps); step;
             step = llm_json_next(steps, step))
            if (!llm__read_normalizer(v, step)) return false;
        return true;
    }
    if (llm__is_step(node, "NFC")) return v->nfc = true;
    if (llm__is_step(node, "Prepend") &&
        llm_json_is(llm_json_member(node, "prepend"), "\xE2\x96\x81"))
        return v->prefix = LLM__PREFIX_STRETCH, true;
    if (llm__is_step(node, "Replace") && llm__replaces(node, " ", "\xE2\x96\x81"))
        return v->escapes = true;
    return llm__refuse_step(v, "normalizer", node,
                            "NFC, Prepend (of U+2581), Replace (of a space by U+2581), Sequence");
}

static bool llm__read_metaspace(llm__vocabulary *v, const llm_json_node *node, const char *step) {
    const llm_json_node *scheme = llm_json_member(node, "prepend_scheme");
    if (!llm_json_is(llm_json_member(node, "replacement"), "\xE2\x96\x81"))
        return llm__refuse_step(v, step, node, "one whose replacement is U+2581");
    if (llm_json_is(scheme, "never") || (!scheme && !llm__is_on(node, "add_prefix_space", true)))
        v->prefix = LLM__PREFIX_NONE;
    else if (llm_json_is(scheme, "first")) v->prefix = LLM__PREFIX_FIRST;
    else if (!scheme || llm_json_is(scheme, "always")) v->prefix = LLM__PREFIX_EACH;
    else return llm__refuse_step(v, step, node, "a prepend_scheme of always, first or never");
    return true;
}

static bool llm__read_split(llm__vocabulary *v, const llm_json_node *node) {
    static const struct {
        const char *regex;
        llm__splitter split; /* NULL: each digit is a word */
    } rules[] = {
        {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
         llm__split_gpt2},
        {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
         "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
         "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
         llm__split_llama3},
        {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
         "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
         "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
         llm__split_qwen2},
        {"\\p{N}", NULL},
    };
    const llm_json_node *regex = llm_json_member(llm_json_member(node, "pattern"), "Regex"),
                         *behavior = llm_json_member(node, "behavior");
    bool isolated = llm_json_is(behavior, "Isolated") && !llm__is_on(node, "invert", false),
         kept = llm_json_is(behavior, "Removed") && llm__is_on(node, "invert", false);
    for (size_t i = 0; i < sizeof rules / sizeof *rules && !v->split; i++) {
        if (!llm_json_is(regex, rules[i].regex)) continue;
        if (!isolated && !(kept && rules[i].split)) break;
        v->split = rules[i].split;
        return !v->split ? (v->digits = true) : true;
    }
    llm_string text = {"", 0};
    llm_json_string(regex, &text);
    return llm__fail(v->err, LLM_ERROR_UNSUPPORTED,
                     "%s: the pre_tokenizer 'Split' by '%s' is not supported; supported: the "
                     "regular expressions of GPT-2, "
                     "Llama 3 and Qwen2, and \\p{N}, isolated",
                     v->name, llm__show(text).text);
}

static bool llm__read_pre_tokenizer(llm__vocabulary *v, const llm_json_node *node) {
    static const char known[] = "ByteLevel, Split, Digits (individual), Metaspace, Sequence, in "
                                "the orders of GPT-2, Llama, "
                                "Qwen2 and SmolLM";
    const llm_json_node *steps = llm_json_member(node, "pretokenizers");
    if (llm__is_null(node)) return true;
    if (llm__is_step(node, "Sequence")) {
        for (const llm_json_node *step = llm_json_first(steps); step;
             step = llm_json_next(steps, step))
            if (!llm__read_pre_tokenizer(v, step)) return false;
        return true;
    }
    if (v->byte_level)
        return llm__refuse_step(v, "pre_tokenizer (behind ByteLevel)", node, "none there");
    if (llm__is_step(node, "ByteLevel")) {
        bool splits = llm__is_on(node, "use_regex", true);
        if ((splits && v->split) || (!splits && (!v->split || v->digits)))
            return llm__vocabulary_error(
                v, LLM_ERROR_UNSUPPORTED,
                "the pre_tokenizer ByteLevel is supported with use_regex, or behind one Split");
        if (splits) v->split = v->digits ? llm__split_digits_gpt2 : llm__split_gpt2;
        if (llm__is_on(node, "add_prefix_space", true)) v->prefix = LLM__PREFIX_EACH;
        return v->byte_level = true;
    }
    if (llm__is_step(node, "Split") && !v->digits) return llm__read_split(v, node);
    if (llm__is_step(node, "Digits") && llm__is_on(node, "individual_digits", false) && !v->split)
        return v->digits = true;
    if (llm__is_step(node, "Metaspace") && !v->split && !v->digits && !v->escapes) {
        v->escapes = true;
        v->split_spaces = llm__is_on(node, "split", true);
        return llm__read_metaspace(v, node, "pre_tokenizer");
    }
    return llm__refuse_step(v, "pre_tokenizer", node, known);
}

static bool llm__read_decoder(llm__vocabulary *v, const llm_json_node *node) {
    const llm_json_node *steps = llm_json_member(node, "decoders");
    uint64_t start = 0, stop = 0;
    if (v->byte_level && llm__is_step(node, "ByteLevel")) return true;
    if (!v->byte_level && llm__is_step(node, "Sequence")) {
        for (const llm_json_node *step = llm_json_first(steps); step;
             step = llm_json_next(steps, step))
            if (!llm__read_decoder(v, step)) return false;
        return true;
    }
    if (!v->byte_level && llm__is_step(node, "Metaspace")) {
        llm__prefix prefix = v->prefix;
        bool ok = llm__read_metaspace(v, node, "decoder");
        v->drops_space = v->prefix != LLM__PREFIX_NONE;
        v->prefix = prefix;
        return ok;
    }
    if (!v->byte_level && (llm__is_step(node, "ByteFallback") || llm__is_step(node, "Fuse")))
        return true;
    if (!v->byte_level && llm__is_step(node, "Replace") && llm__replaces(node, "\xE2\x96\x81", " "))
        return true;
    if (!v->byte_level && llm__is_step(node, "Strip") &&
        llm_json_is(llm_json_member(node, "content"), " ") &&
        llm_json_u64(llm_json_member(node, "start"), &start) && start <= 1 &&
        llm_json_u64(llm_json_member(node, "stop"), &stop) && !stop)
        return v->drops_space = start == 1, true;
    return llm__refuse_step(v, "decoder", node,
                            v->byte_level
                                ? "ByteLevel"
                                : "Metaspace, Replace (of U+2581 by a space), ByteFallback, Fuse, "
                                  "Strip (of one space in front), Sequence");
}

/* Returns the id of the token with this text, or -1. */
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

/* "single" must be the text, with one token (BOS) or none before it and one (EOS) or none
 * after it. */
static bool llm__read_template(llm__vocabulary *v, const llm_json_node *node) {
    const llm_json_node *items = llm_json_member(node, "single");
    bool text = false, ok = true;
    for (const llm_json_node *item = llm_json_first(items); item && ok;
         item = llm_json_next(items, item)) {
        const llm_json_node *token = llm_json_member(item, "SpecialToken");
        int32_t id = llm__vocabulary_find(v, llm_json_member(token, "id"));
        if (!token) ok = !text && llm_json_member(item, "Sequence") && (text = true);
        else if (!text) ok = id >= 0 && !v->adds_bos && (v->adds_bos = true) && (v->bos = id) >= 0;
        else ok = id >= 0 && !v->adds_eos && (v->adds_eos = true) && (v->eos = id) >= 0;
    }
    return (ok && text) ||
           llm__refuse_step(v, "post_processor", node,
                            "one that puts at most a token in front and one behind");
}

/* ByteLevel only changes offsets, which are not used. */
static bool llm__read_post_processor(llm__vocabulary *v, const llm_json_node *node) {
    const llm_json_node *steps = llm_json_member(node, "processors");
    if (llm__is_null(node) || llm__is_step(node, "ByteLevel")) return true;
    if (llm__is_step(node, "TemplateProcessing")) return llm__read_template(v, node);
    if (!llm__is_step(node, "Sequence"))
        return llm__refuse_step(v, "post_processor", node,
                                "TemplateProcessing, ByteLevel, Sequence");
    for (const llm_json_node *step = llm_json_first(steps); step; step = llm_json_next(steps, step))
        if (!llm__read_post_processor(v, step)) return false;
    return true;
}

/* Returns UINT64_MAX if the node is not an id. */
static uint64_t llm__entry_id(const llm_json_node *node) {
    uint64_t id;
    return llm_json_u64(node, &id) ? id : UINT64_MAX;
}

/* Returns the id in a key such as "96", or UINT64_MAX if the key is not an id. */
static uint64_t llm__key_id(llm_string key) {
    uint64_t id = 0;
    for (size_t i = 0; i < key.length; i++) {
        if (i == 9 || key.data[i] < '0' || key.data[i] > '9') return UINT64_MAX;
        id = id * 10 + (uint64_t)(key.data[i] - '0');
    }
    return key.length ? id : UINT64_MAX;
}

static bool llm__add_entry(llm__vocabulary *v, uint64_t id, llm_string text, int32_t kind) {
    if (id >= v->size)
        return llm__fail(
            v->err, LLM_ERROR_FORMAT,
            "%s: the token '%s' has no id, or one that leaves most ids below it without a token",
            v->name, llm__show(text).text);
    if (v->kinds[id] && (kind == LLM__TOKEN_NORMAL || llm__compare_strings(&v->texts[id], &text)))
        return llm__fail(
            v->err, LLM_ERROR_FORMAT, "%s: the tokens '%s' and '%s' have the same id, %llu",
            v->name, llm__show(v->texts[id]).text, llm__show(text).text, (unsigned long long)id);
    v->texts[id] = text;
    v->kinds[id] = kind == LLM__TOKEN_NORMAL && v->byte_fallback && llm__parse_byte(text) >= 0
                       ? LLM__TOKEN_BYTE
                       : kind;
    return true;
}

/* token: settings of the added token; NULL: the defaults. */
static bool llm__add_token(llm__vocabulary *v, uint64_t id, llm_string text,
                           const llm_json_node *token) {
    int32_t kind = llm__is_on(token, "special", false) ? LLM__TOKEN_CONTROL : LLM__TOKEN_USER;
    if (!text.length)
        return llm__vocabulary_error(v, LLM_ERROR_FORMAT,
                                     "an entry of added_tokens has no content");
    if (llm__is_on(token, "single_word", false))
        return llm__fail(v->err, LLM_ERROR_UNSUPPORTED,
                         "%s: the added token '%s' is single_word, which is not supported", v->name,
                         llm__show(text).text);
    /* Hugging Face would search for the token with U+2581 before it. */
    if (kind == LLM__TOKEN_USER && v->prefix == LLM__PREFIX_STRETCH &&
        llm__is_on(token, "normalized", true))
        return llm__fail(
            v->err, LLM_ERROR_UNSUPPORTED,
            "%s: the added token '%s' is normalized, which is not supported behind Prepend",
            v->name, llm__show(text).text);
    if (!llm__add_entry(v, id, text, kind)) return false;
    v->strips[id] = (uint8_t)(llm__is_on(token, "lstrip", false) |
                              llm__is_on(token, "rstrip", false) << 1);
    return true;
}

/* Add a token from another file in the folder. If it is an added token in tokenizer.json, its
 * settings do not change; if it is an ordinary token there, it becomes an added token. */
static bool llm__add_beside(llm__vocabulary *v, uint64_t id, llm_string text,
                            const llm_json_node *token) {
    bool same = id < v->size && v->kinds[id] && !llm__compare_strings(&v->texts[id], &text);
    int32_t found = same ? (int32_t)id : llm__vocabulary_find_text(v, text);
    if (found >= 0 && (v->kinds[found] == LLM__TOKEN_CONTROL || v->kinds[found] == LLM__TOKEN_USER))
        return true;
    return llm__add_token(v, found >= 0 ? (uint64_t)found : id, text, token);
}

/* decoder: added tokens in tokenizer_config.json, {"96": {"content": "<|x|>", ...}}. encoder:
 * added_tokens.json, written by older tools, {"<|x|>": 96}. */
static bool llm__read_beside(llm__vocabulary *v, const llm_json_node *decoder,
                             const llm_json_node *encoder) {
    uint64_t first = v->size, end;
    while (first && !v->kinds[first - 1]) first--;
    for (const llm_json_node *token = llm_json_first(decoder); token;
         token = llm_json_next(decoder, token)) {
        llm_string text = {"", 0};
        llm_json_string(llm_json_member(token, "content"), &text);
        if (!llm__add_beside(v, llm__key_id(llm_json_key(token)), text, token)) return false;
    }
    for (const llm_json_node *id = llm_json_first(encoder); id; id = llm_json_next(encoder, id))
        if (!llm__add_beside(v, llm__entry_id(id), llm_json_key(id), NULL)) return false;
    for (end = v->size; end > first && !v->kinds[end - 1];) end--;
    for (; first < end; first++)
        if (!v->kinds[first])
            return llm__fail(v->err, LLM_ERROR_FORMAT,
                             "%s: the token '%s' of %s beside it has the id %llu, but there is "
                             "none with the id %llu",
                             v->name, llm__show(v->texts[end - 1]).text,
                             decoder ? "tokenizer_config.json" : "added_tokens.json",
                             (unsigned long long)end - 1, (unsigned long long)first);
    return true;
}

static bool llm__read_entries(llm__vocabulary *v, const llm_json_node *vocab,
                              const llm_json_node *added) {
    const llm_json_node *decoder = llm_json_member(v->config.nodes, "added_tokens_decoder"),
                        *encoder = v->added.nodes;
    if (!llm_json_has_kind(decoder, LLM_JSON_OBJECT)) decoder = NULL;
    if (decoder || !llm_json_has_kind(encoder, LLM_JSON_OBJECT)) encoder = NULL;
    uint64_t n_beside = (decoder ? decoder->length : 0) + (uint64_t)(encoder ? encoder->length : 0);
    /* leave room for some unused ids */
    v->size = ((uint64_t)vocab->length + (added ? added->length : 0) + n_beside) * 2 + 256;
    v->texts = (llm_string *)llm__new((size_t)v->size, sizeof *v->texts, "the vocabulary", v->err);
    v->kinds = v->texts ? (int32_t *)llm__new((size_t)v->size, sizeof *v->kinds, "the vocabulary",
                                              v->err)
                        : NULL;
    v->strips = v->kinds ? (uint8_t *)llm__new((size_t)v->size, 1, "the vocabulary", v->err) : NULL;
    if (!v->strips) return false;
    for (const llm_json_node *id = llm_json_first(vocab); id; id = llm_json_next(vocab, id))
        if (!llm__add_entry(v, llm__entry_id(id), llm_json_key(id), LLM__TOKEN_NORMAL))
            return false;
    for (const llm_json_node *token = llm_json_first(added); token;
         token = llm_json_next(added, token)) {
        llm_string text = {"", 0};
        llm_json_string(llm_json_member(token, "content"), &text);
        if (!llm__add_token(v, llm__entry_id(llm_json_member(token, "id")), text, token))
            return false;
    }
    if (!llm__read_beside(v, decoder, encoder)) return false;
    while (v->size && !v->kinds[v->size - 1]) v->size--;
    if (!v->size) return llm__vocabulary_error(v, LLM_ERROR_FORMAT, "the vocabulary is empty");
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
    if (!llm_json_has_kind(model, LLM_JSON_OBJECT))
        return llm__vocabulary_error(v, LLM_ERROR_FORMAT,
                                     "there is no tokenizer in this file (the object \"model\")");
    if (type && !llm_json_is(type, "BPE")) return llm__refuse_step(v, "model", model, "BPE");
    for (int i = 0; i < 2; i++) {
        const llm_json_node *part = llm_json_member(model, parts[i]);
        if (!llm__is_null(part) && !llm_json_is(part, ""))
            return llm__fail(v->err, LLM_ERROR_UNSUPPORTED, "%s: BPE with a %s is not supported",
                             v->name, parts[i]);
    }
    if (llm_json_f64(llm_json_member(model, "dropout"), &dropout) && dropout != 0)
        return llm__vocabulary_error(v, LLM_ERROR_UNSUPPORTED, "BPE with dropout is not supported");
    if (!llm_json_has_kind(vocab, LLM_JSON_OBJECT) ||
        !llm_json_has_kind(llm_json_member(model, "merges"), LLM_JSON_ARRAY))
        return llm__vocabulary_error(v, LLM_ERROR_FORMAT,
                                     "the model has no vocab (an object) or no merges (an array)");
    if (!llm__is_null(added) && !llm_json_has_kind(added, LLM_JSON_ARRAY))
        return llm__vocabulary_error(v, LLM_ERROR_FORMAT, "added_tokens is not an array");
    v->byte_fallback = llm__is_on(model, "byte_fallback", false);
    if (!llm__read_entries(v, vocab, added)) return false;
    v->unknown = llm__vocabulary_find(v, unknown);
    if (v->unknown < 0 && !llm__is_null(unknown))
        return llm__vocabulary_error(v, LLM_ERROR_FORMAT, "unk_token is not one of the tokens");
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
        if (!ok)
            return llm__fail(v->err, LLM_ERROR_FORMAT, "%s: merge %llu is not a pair of tokens",
                             v->name, (unsigned long long)n);
        length = left.length + !one + right.length;
        llm__note_bytes(v->m, &length, sizeof length);
        llm__note_bytes(v->m, left.data, left.length);
        llm__note_bytes(v->m, " ", !one);
        llm__note_bytes(v->m, right.data, right.length);
    }
    return true;
}

/* Write GGUF's name of the split rule, and tokenizer.llm.* keys for settings it does not imply. */
static void llm__put_rule(llm__vocabulary *v, bool ignores_merges) {
    const struct llm__split *best = NULL;
    for (size_t i = 0; i < sizeof llm__splits / sizeof *llm__splits; i++) {
        const struct llm__split *rule = &llm__splits[i];
        bool same = rule->composes == v->nfc && rule->ignores_merges == ignores_merges;
        if (rule->split == v->split &&
            (!best ||
             (same && (best->composes != v->nfc || best->ignores_merges != ignores_merges))))
            best = rule;
    }
    if (v->byte_level && best)
        llm__note_string(v->m, "tokenizer.ggml.pre", llm__string(best->name));
    if (!best || best->composes != v->nfc) llm__note_bool(v->m, "tokenizer.llm.nfc", v->nfc);
    if (!best || best->ignores_merges != ignores_merges)
        llm__note_bool(v->m, "tokenizer.llm.ignore_merges", ignores_merges);
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
        if (v->strips[id] & side && !llm__append(&v->ids, &number, sizeof number, v->err))
            return false;
    }
    llm__put_ids(v, key);
    return true;
}

/* Write scores for other programs. Earlier merges usually make tokens with lower ids, so the score
 * is -id, as in SentencePiece's own files. */
static bool llm__put_scores(llm__vocabulary *v) {
    float *scores = (float *)llm__new((size_t)v->size, sizeof *scores, "the scores of tokens",
                                      v->err);
    if (!scores) return false;
    for (uint64_t id = 0; id < v->size; id++)
        scores[id] = v->kinds[id] == LLM__TOKEN_NORMAL ? -(float)id : 0;
    llm__note_array(v->m, "tokenizer.ggml.scores", LLM_VALUE_F32, scores, v->size,
                    (size_t)v->size * sizeof *scores);
    LLM_FREE(scores);
    return true;
}

/* Read the id of the token that the key names. A text that is not a token is an error, since a
 * missing end token would never be recognized. */
static bool llm__read_named(const llm__vocabulary *v, const char *key, int32_t *id) {
    const llm_json_node *node = llm_json_member(v->config.nodes, key);
    llm_string text = {"", 0};
    int32_t found = llm__vocabulary_find(v, node);
    if (llm_json_has_kind(node, LLM_JSON_OBJECT)) node = llm_json_member(node, "content");
    if (found < 0 && llm_json_string(node, &text) && text.length)
        return llm__fail(
            v->err, LLM_ERROR_FORMAT,
            "%s: the %s of tokenizer_config.json beside it, '%s', is not one of the tokens",
            v->name, key, llm__show(text).text);
    if (found >= 0) *id = found;
    return true;
}

static bool llm__read_config(llm__vocabulary *v) {
    const llm_json_node *config = v->config.nodes;
    if (!llm__read_named(v, "bos_token", &v->bos) || !llm__read_named(v, "eos_token", &v->eos))
        return false;
    v->adds_bos = llm__is_on(config, "add_bos_token", v->adds_bos) && v->bos >= 0;
    v->adds_eos = llm__is_on(config, "add_eos_token", v->adds_eos) && v->eos >= 0;
    return true;
}

/* node: the template, or an array of named templates: the one named "default" is used. */
static bool llm__config_template(const llm_json_node *node, llm_string *text) {
    for (const llm_json_node *item = llm_json_has_kind(node, LLM_JSON_ARRAY) ? llm_json_first(node)
                                                                             : NULL;
         item; item = llm_json_next(node, item))
        if (llm_json_is(llm_json_member(item, "name"), "default"))
            return llm_json_string(llm_json_member(item, "template"), text);
    return llm_json_string(node, text);
}

static bool llm__put_named(llm__vocabulary *v) {
    if (v->bos >= 0) llm__note_u32(v->m, "tokenizer.ggml.bos_token_id", (uint32_t)v->bos);
    if (v->eos >= 0) llm__note_u32(v->m, "tokenizer.ggml.eos_token_id", (uint32_t)v->eos);
    if (v->unknown >= 0)
        llm__note_u32(v->m, "tokenizer.ggml.unknown_token_id", (uint32_t)v->unknown);
    llm__note_bool(v->m, "tokenizer.ggml.add_bos_token", v->adds_bos);
    llm__note_bool(v->m, "tokenizer.ggml.add_eos_token", v->adds_eos);
    if (!v->byte_level) {
        llm__note_bool(v->m, "tokenizer.ggml.add_space_prefix", v->prefix != LLM__PREFIX_NONE);
        llm__note_bool(v->m, "tokenizer.llm.drops_space", v->drops_space);
        llm__note_bool(v->m, "tokenizer.llm.split_spaces", v->split_spaces);
        llm__note_bool(v->m, "tokenizer.llm.fuse_unknown",
                       llm__is_on(llm__setting(v, "model"), "fuse_unk", false));
    }
    llm__note_u32(v->m, "tokenizer.llm.prefix", (uint32_t)v->prefix);
    return llm__put_strips(v, 1, "tokenizer.llm.strip_left") &&
           llm__put_strips(v, 2, "tokenizer.llm.strip_right");
}

static bool llm__put_vocabulary(llm__vocabulary *v) {
    static const char *const known[] = {"version",        "truncation", "padding",
                                        "added_tokens",   "normalizer", "pre_tokenizer",
                                        "post_processor", "decoder",    "model"};
    const llm_json_node *root = v->json.nodes, *model = llm__setting(v, "model");
    if (!model && (llm__setting(v, "model_type") || llm__setting(v, "weight_map")))
        return llm__vocabulary_error(
            v, LLM_ERROR_FORMAT,
            "this file is only a part of a model; give the folder that it lies in");
    for (const llm_json_node *item = llm_json_has_kind(root, LLM_JSON_OBJECT) ? llm_json_first(root)
                                                                              : NULL;
         item; item = llm_json_next(root, item)) {
        size_t i = 0;
        while (i < sizeof known / sizeof *known && !llm_json_is(item - 1, known[i])) i++;
        if (i == sizeof known / sizeof *known)
            return llm__fail(v->err, LLM_ERROR_UNSUPPORTED,
                             "%s: '%s' is not a known part of a tokenizer.json", v->name,
                             llm__show(llm_json_key(item)).text);
    }
    if (!llm__read_normalizer(v, llm__setting(v, "normalizer")) ||
        !llm__read_pre_tokenizer(v, llm__setting(v, "pre_tokenizer")) || !llm__read_model(v, model))
        return false;
    if (v->byte_level ? v->escapes || v->byte_fallback : !v->escapes || v->split || v->digits)
        return llm__vocabulary_error(
            v, LLM_ERROR_UNSUPPORTED,
            "this combination of normalizer and pre_tokenizer is not supported; supported: "
            "byte-level BPE (ByteLevel), and SentencePiece BPE (U+2581 for spaces)");
    if (!llm__read_decoder(v, llm__setting(v, "decoder")) ||
        !llm__read_post_processor(v, llm__setting(v, "post_processor")) || !llm__read_config(v))
        return false;
    llm__note_string(v->m, "tokenizer.ggml.model", llm__string(v->byte_level ? "gpt2" : "llama"));
    llm__put_rule(v, llm__is_on(model, "ignore_merges", false));
    llm__note_key(v->m, "tokenizer.ggml.tokens", LLM_VALUE_ARRAY, LLM_VALUE_STRING, v->size);
    for (uint64_t id = 0; id < v->size; id++) {
        llm__note_text(v->m, v->texts[id]);
        if (!v->kinds[id]) v->kinds[id] = LLM__TOKEN_UNUSED;
    }
    llm__note_array(v->m, "tokenizer.ggml.token_type", LLM_VALUE_I32, v->kinds, v->size,
                    (size_t)v->size * sizeof *v->kinds);
    return (v->byte_level || llm__put_scores(v)) &&
           llm__put_merges(v, llm_json_member(model, "merges")) && llm__put_named(v);
}

/* ---- The folder of a tokenizer.json ---------------------------------- */

static bool llm__has_id(const llm__bytes *ids, int32_t id) {
    for (size_t at = 0; at < ids->length; at += sizeof id)
        if (!memcmp(ids->data + at, &id, sizeof id)) return true;
    return false;
}

/* Add the end tokens in "eos_token_id", which is one id or a list. "bos_token_id" has the same form
 * and is only checked. */
static bool llm__add_ends(llm__vocabulary *v, const char *folder, const char *name) {
    static const char *const keys[] = {"bos_token_id", "eos_token_id"};
    llm_json json;
    bool found, ok = llm__read_json(&json, folder, name, &found, v->err);
    for (int i = 0; ok && i < 2; i++) {
        const llm_json_node *ids = llm__folder_entry(json.nodes, keys[i]);
        bool list = llm_json_has_kind(ids, LLM_JSON_ARRAY);
        const llm_json_node *node = list ? llm_json_first(ids) : ids;
        for (; ok && node; node = list ? llm_json_next(ids, node) : NULL) {
            uint64_t id;
            if (!llm_json_u64(node, &id) || id >= v->size) {
                ok =
                    llm__fail(v->err, LLM_ERROR_FORMAT,
                              "%s/%s: \"%s\" is %s, which is not the id of one of the %llu tokens: "
                              "correct it, or remove the key if tokenizer_config.json says it",
                              folder, name, keys[i], llm__show_node(node).text, (llm__big)v->size);
            } else if (i == 1 && !llm__has_id(&v->ids, (int32_t)id)) {
                int32_t number = (int32_t)id;
                ok = llm__append(&v->ids, &number, sizeof number, v->err);
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
    char *path = llm__join(folder, "chat_template.jinja", v->err);
    bool ok = path && llm__map_text(path, &jinja, &found, v->err);
    LLM_FREE(path);
    if (!ok) return false;
    text = jinja;
    if (found || llm__config_template(llm_json_member(v->config.nodes, "chat_template"), &text))
        llm__note_string(v->m, "tokenizer.chat_template", text);
    llm__release(jinja.data, jinja.length, LLM__MAPPED);
    return true;
}

/* Append the GGUF values to m. folder: folder of the other files; NULL: no other files are read. */
static bool llm__translate_vocabulary(llm__metadata *m, const void *text, size_t length,
                                      const char *name, const char *folder, llm_error *err) {
    llm__vocabulary v;
    bool found, ok = true;
    memset(&v, 0, sizeof v);
    v.name = name;
    v.m = m;
    v.err = err;
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
    LLM_FREE(v.kinds);
    LLM_FREE(v.strips);
    LLM_FREE(v.ids.data);
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

/* Open a tokenizer.json, and the other files in its folder, as a file without tensors. */
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

/* ---- Merging --------------------------------------------------------- */

typedef struct llm__symbol { /* piece of a word, in a doubly linked list */
    int32_t previous, next;  /* indices of the neighbours; -1: none */
    int32_t start, length;   /* byte range in the word; length 0: joined to the left neighbour */
    int32_t id;              /* token id; -1: none */
} llm__symbol;

typedef struct llm__candidate { /* two neighbours that form a token */
    double cost;             /* merge rank or -score; the lowest cost is joined first */
    int32_t left;            /* index of the left symbol; its `next` is the right symbol */
    int32_t length;          /* bytes of both symbols at the time of the push */
    int32_t result;          /* id of the joined token */
} llm__candidate;

typedef struct llm__known_word { /* cache entry: a short word and its tokens */
    uint8_t length, n_ids;   /* length 0: free entry */
    char text[30];           /* (length) bytes of the word */
    int32_t ids[8];          /* (n_ids) tokens of the word */
} llm__known_word;

typedef struct llm__tokenizing { /* state of one call of llm_tokenize */
    const llm_tokenizer *t;
    const uint8_t *word;     /* word being merged */
    llm__symbol *symbols;    /* (n_symbols) pieces of the word */
    int64_t n_symbols, symbol_capacity;
    llm__candidate *heap;    /* (n_heap) heap; the children of entry i are 2i + 1 and 2i + 2 */
    int64_t n_heap, heap_capacity;
    llm__bytes normal;       /* text converted to NFC */
    llm__bytes escaped;      /* text with an added space, or with spaces as U+2581 */
    llm__codes codes;        /* scratch space of llm__normalize */
    llm__known_word *known;  /* (known_mask + 1) cache of words, indexed by hash */
    uint64_t known_mask;
    int32_t *ids;            /* (capacity) tokens: the caller's array, or one allocated here */
    int64_t n_ids, capacity; /* n_ids can exceed capacity: all tokens are counted */
    bool grows;              /* ids is allocated here */
    llm_error *err;
} llm__tokenizing;

static void llm__emit(llm__tokenizing *z, int32_t id) {
    if (z->grows) {
        void *grown = llm__grow(z->ids, z->n_ids, &z->capacity, sizeof id, "token ids", z->err);
        if (grown) z->ids = (int32_t *)grown;
        else z->grows = false; /* out of memory: n_ids will exceed capacity */
    }
    if (z->n_ids < z->capacity) z->ids[z->n_ids] = id;
    z->n_ids++;
}

/* Is a joined before b? If the costs are equal, the left pair is joined first. */
static bool llm__before(const llm__candidate *a, const llm__candidate *b) {
    return a->cost < b->cost || (a->cost == b->cost && a->left < b->left);
}

static bool llm__heap_push(llm__tokenizing *z, llm__candidate c) {
    void *grown = llm__grow(z->heap, z->n_heap, &z->heap_capacity, sizeof *z->heap,
                            "pairs of tokens", z->err);
    if (!grown) return false;
    z->heap = (llm__candidate *)grown;
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

/* Join neighbours, the best pair first. A candidate is stale if one of its symbols was joined after
 * the push. Symbols only grow, so a stale candidate has the wrong length. */
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
    void *grown = llm__grow(z->symbols, z->n_symbols, &z->symbol_capacity, sizeof *z->symbols,
                            "pieces of text", z->err);
    if (!grown) return false;
    z->symbols = (llm__symbol *)grown;
    int32_t i = (int32_t)z->n_symbols++;
    llm__symbol symbol = {i - 1, -1, (int32_t)start, (int32_t)length, id};
    if (i) z->symbols[i - 1].next = i;
    z->symbols[i] = symbol;
    return true;
}

/* Emit a character without a token as byte tokens or, if one of them is missing, as the unknown
 * token. *unknown (updated): was the last piece unknown? */
static bool llm__emit_bytes(llm__tokenizing *z, const uint8_t *text, int32_t length,
                            bool *unknown) {
    const llm_tokenizer *t = z->t;
    if (length == 3 && !memcmp(text, "\xE2\x96\x81", 3) && t->scores) { /* U+2581 spells a space */
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
            "%s: the vocabulary has no token for the byte 0x%02X, and none for the unknown",
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

/* Returns the token whose text is the whole word, or -1. */
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

static bool llm__tokenize_word(llm__tokenizing *z, const uint8_t *word, size_t n) {
    z->word = word;
    int32_t whole = z->t->ignores_merges ? llm__find_word(z->t, word, n) : -1;
    if (whole >= 0) return llm__emit(z, whole), true;
    return llm__add_symbols(z, n) && llm__merge(z) && llm__emit_symbols(z);
}

static bool llm__tokenize_words(llm__tokenizing *z, const uint8_t *text, size_t n) {
    for (size_t at = 0, length; at < n; at += length) {
        length = z->t->split(z->t, text + at, n - at);
        llm__known_word *known = NULL;
        if (length <= sizeof known->text)
            known = &z->known[llm__hash_bytes(z->t->seed, (const char *)text + at, length) &
                              z->known_mask];
        if (known && known->length == length && !memcmp(known->text, text + at, length)) {
            for (int i = 0; i < known->n_ids; i++) llm__emit(z, known->ids[i]);
            continue;
        }
        int64_t first = z->n_ids;
        if (!llm__tokenize_word(z, text + at, length)) return false;
        int64_t n_ids = z->n_ids - first;
        if (!known || n_ids > (int64_t)(sizeof known->ids / sizeof *known->ids) ||
            z->n_ids > z->capacity)
            continue;
        known->length = (uint8_t)length;
        known->n_ids = (uint8_t)n_ids;
        memcpy(known->text, text + at, length);
        memcpy(known->ids, z->ids + first, (size_t)n_ids * sizeof *z->ids);
    }
    return true;
}

/* Copy text to z->escaped, with spaces as the vocabulary spells them. */
static bool llm__escape(llm__tokenizing *z, const uint8_t *text, size_t n, bool space_in_front) {
    const char *space = z->t->byte_level ? " " : "\xE2\x96\x81";
    z->escaped.length = 0;
    if (space_in_front && !llm__append(&z->escaped, space, strlen(space), z->err)) return false;
    if (z->t->byte_level) return llm__append(&z->escaped, text, n, z->err);
    for (size_t at = 0, length; at < n; at += length) {
        const uint8_t *found = (const uint8_t *)memchr(text + at, ' ', n - at);
        length = found ? (size_t)(found - text) - at : n - at;
        if (!llm__append(&z->escaped, text + at, length, z->err)) return false;
        if (found && !llm__append(&z->escaped, space, strlen(space), z->err)) return false;
        length += found != NULL;
    }
    return true;
}

/* first: the stretch is at the start of the text. after_control: the stretch is at the start or
 * after a control token. */
static bool llm__tokenize_stretch(llm__tokenizing *z, const uint8_t *text, size_t n, bool first,
                                  bool after_control) {
    const llm_tokenizer *t = z->t;
    if (t->normalizer) {
        z->normal.length = 0;
        if (!llm__normalize(t->normalizer, text, n, &z->codes, &z->normal, z->err)) return false;
        text = z->normal.data;
        n = z->normal.length;
    }
    bool has_space = n && (text[0] == ' ' ||
                           (!t->byte_level && n >= 3 && !memcmp(text, "\xE2\x96\x81", 3)));
    bool space_in_front = t->prefix == LLM__PREFIX_STRETCH ||
                          (t->prefix == LLM__PREFIX_START && after_control) ||
                          (t->prefix == LLM__PREFIX_EACH && !has_space) ||
                          (t->prefix == LLM__PREFIX_FIRST && first && !has_space);
    if (t->byte_level && !space_in_front) return llm__tokenize_words(z, text, n);
    return llm__escape(z, text, n, space_in_front) &&
           llm__tokenize_words(z, z->escaped.data, z->escaped.length);
}

/* Returns the length of the longest token in specials[all] that the text begins with, or 0. The
 * tokens that match the bytes read so far are a range of the sorted list. For each byte, two binary
 * searches narrow the range. Only its first token, the shortest, can end at this byte. */
static size_t llm__match_special(const llm_tokenizer *t, bool all, const uint8_t *text, size_t n,
                                 int32_t *id) {
    const llm_string *const *names = t->specials[all];
    int64_t begin = 0, end = t->n_specials[all];
    size_t matched = 0;
    for (size_t depth = 0; depth < n && begin < end; depth++) {
        /* find the first name whose byte is >= the text's byte, then the first where it is > */
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

/* Part of a text, as byte offsets. Arrays of ranges are sorted and disjoint. */
typedef struct llm__range {
    size_t begin, end;
} llm__range;

/* Special tokens are recognized only in the trusted ranges, user-defined tokens everywhere. */
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
            !llm__tokenize_stretch(z, text + begin, end - begin, !begin, after_control))
            return false;
        if (length) llm__emit(z, special);
        after_control = length && t->kinds[special] != LLM__TOKEN_USER;
        begin = next;
    }
    return true;
}

/* Write the tokens to ids (capacity) or, if `owned` is not NULL, to a new array in *owned. */
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
    bool ok = z.known && llm__tokenize_text(&z, (const uint8_t *)text, length, trusted, n_trusted);
    if (eos && t->eos >= 0) llm__emit(&z, t->eos);
    if (owned && ok && z.n_ids == 0) /* allocate one entry, so that *owned is not NULL */
        z.ids = (int32_t *)llm__grow(NULL, 0, &z.capacity, sizeof *z.ids, "token ids", err);
    ok = ok && (!owned || (z.ids && z.n_ids <= z.capacity)); /* false if memory ran out */
    if (owned && ok) *owned = z.ids;
    else if (owned) LLM_FREE(z.ids);
    LLM_FREE(z.known);
    LLM_FREE(z.symbols);
    LLM_FREE(z.heap);
    LLM_FREE(z.codes.data);
    LLM_FREE(z.normal.data);
    LLM_FREE(z.escaped.data);
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

/* ---- Back to text ---------------------------------------------------- */

typedef struct llm__output { /* text buffer; bytes that do not fit are only counted */
    char *data;              /* (capacity) bytes of text */
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

/* At the start of a text, does decoding remove this token's space, which llm_tokenize added? */
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
    /* The bytes are decoded into the last third of `text`, then checked and moved to its start. At
     * most 3 bytes are written for each byte read, so no unread byte is overwritten. */
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

/* ---- Conversations ---------------------------------------------------
 * A chat model is trained on conversations in one fixed format. Its file defines the format with a
 * template, a program in the language Jinja. Few formats are in use, so a table of formats replaces
 * a Jinja interpreter. A format is recognized by expressions in its template. A conversation with
 * an unknown template is refused.
 *
 * In the patterns of a format, %s is the message, %b is BOS, %e is EOS and %d is a date. Special
 * tokens are recognized only in the patterns, so a message cannot end itself and pose as another
 * speaker. (Marks that are not tokens, such as Zephyr's "<|user|>", can be forged.) */

enum {
    LLM__CHAT_TRIMS = 1,         /* strip white space around messages */
    LLM__CHAT_TRIMS_ANSWERS = 2, /* strip white space around the assistant's messages only */
    LLM__CHAT_ALTERNATES = 4,    /* an optional system message, then user and assistant in turn */
    LLM__CHAT_JOINS_LAST = 8,    /* `joined` is in the last user message, not the first */
    LLM__CHAT_FORGETS = 16,      /* remove the thinking from earlier answers */
    LLM__CHAT_KEEPS_USUAL = 32,  /* the template can have its own default system message */
    LLM__CHAT_THINKS = 64,       /* empty <think> tags before the answer turn thinking off */
    LLM__CHAT_PRINTS = 128       /* the template has text outside of tags */
};

typedef struct llm__chat_format {
    const char *name;
    unsigned flags;         /* LLM__CHAT_* */
    const char *begin;      /* text at the start of the conversation */
    const char *first;      /* pattern of a system message at the start; NULL: `system` is used */
    const char *system;     /* pattern of a system message; NULL: see `joined` */
    const char *joined;     /* pattern of system text within a user message; NULL: none */
    const char *user, *assistant; /* patterns of user and assistant messages */
    const char *open;       /* text at the start of the answer */
    const char *usual;      /* default system message, or NULL */
    const char *end;        /* text that ends an answer; "%e": EOS */
    const char *date;       /* text for %d; NULL: the current date */
} llm__chat_format;

#define LLM__CHATML(role) "<|im_start|>" role "\n%s<|im_end|>\n"
#define LLM__CHATML_MESSAGES LLM__CHATML("system"), NULL, LLM__CHATML("user"), \
    LLM__CHATML("assistant")
#define LLM__LLAMA3(role) "<|start_header_id|>" role "<|end_header_id|>\n\n%s<|eot_id|>"
#define LLM__LLAMA3_MESSAGES LLM__LLAMA3("system"), NULL, LLM__LLAMA3("user"), \
    LLM__LLAMA3("assistant")
#define LLM__LLAMA3_OPEN "<|start_header_id|>assistant<|end_header_id|>\n\n"
#define LLM__LLAMA3_DATED \
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n" \
                          "Today Date: %d\n\n%s<|eot_id|>"
static const llm__chat_format llm__chat_formats[] = {
    {"chatml", LLM__CHAT_KEEPS_USUAL, "", NULL, LLM__CHATML_MESSAGES, "<|im_start|>assistant\n",
     NULL, "<|im_end|>", NULL},
    {"qwen3", LLM__CHAT_FORGETS | LLM__CHAT_THINKS, "", NULL, LLM__CHATML_MESSAGES,
     "<|im_start|>assistant\n", NULL, "<|im_end|>", NULL},
    {"qwen3-instruct", LLM__CHAT_FORGETS, "", NULL, LLM__CHATML_MESSAGES, "<|im_start|>assistant\n",
     NULL, "<|im_end|>", NULL},
    {"qwen3-thinking", LLM__CHAT_FORGETS, "", NULL, LLM__CHATML_MESSAGES,
     "<|im_start|>assistant\n<think>\n", NULL, "<|im_end|>", NULL},
    {"llama3", LLM__CHAT_TRIMS, "%b", NULL, LLM__LLAMA3_MESSAGES, LLM__LLAMA3_OPEN, NULL,
     "<|eot_id|>", NULL},
    {"llama3.1", LLM__CHAT_TRIMS, "%b", LLM__LLAMA3_DATED, LLM__LLAMA3_MESSAGES, LLM__LLAMA3_OPEN,
     "", "<|eot_id|>", "26 Jul 2024"},
    {"llama3.1-unsloth", 0, "%b", LLM__LLAMA3_DATED, LLM__LLAMA3_MESSAGES, LLM__LLAMA3_OPEN, "",
     "<|eot_id|>", "26 July 2024"},
    {"llama3.2", LLM__CHAT_TRIMS, "%b", LLM__LLAMA3_DATED, LLM__LLAMA3_MESSAGES, LLM__LLAMA3_OPEN,
     "", "<|eot_id|>", NULL},
    {"llama2", LLM__CHAT_TRIMS | LLM__CHAT_ALTERNATES, "", NULL, NULL, "<<SYS>>\n%s\n<</SYS>>\n\n",
     "%b[INST] %s [/INST]", " %s %e", "", NULL, "%e", NULL},
    {"mistral-v0.1", LLM__CHAT_ALTERNATES, "%b", NULL, NULL, NULL, "[INST] %s [/INST]", "%s%e ", "",
     NULL, "%e", NULL},
    {"mistral-v0.2", LLM__CHAT_ALTERNATES, "%b", NULL, NULL, NULL, "[INST] %s [/INST]", "%s%e", "",
     NULL, "%e", NULL},
    {"mistral-v1", LLM__CHAT_ALTERNATES, "%b", NULL, NULL, "%s\n\n", " [INST] %s [/INST]", " %s%e",
     "", NULL, "%e", NULL},
    {"mistral-v3", LLM__CHAT_ALTERNATES | LLM__CHAT_TRIMS_ANSWERS | LLM__CHAT_JOINS_LAST, "%b",
     NULL, NULL, "%s\n\n", "[INST] %s[/INST]", " %s%e", "", NULL, "%e", NULL},
    {"mistral-v3-tekken", LLM__CHAT_ALTERNATES | LLM__CHAT_JOINS_LAST, "%b", NULL, NULL, "%s\n\n",
     "[INST]%s[/INST]", "%s%e", "", NULL, "%e", NULL},
    {"mistral-v7", 0, "%b", NULL, "[SYSTEM_PROMPT] %s[/SYSTEM_PROMPT]", NULL, "[INST] %s[/INST]",
     " %s%e", "", NULL, "%e", NULL},
    {"zephyr", LLM__CHAT_PRINTS, "", NULL, "<|system|>\n%s%e\n", NULL, "<|user|>\n%s%e\n",
     "<|assistant|>\n%s%e\n", "<|assistant|>\n", NULL, "%e", NULL},
};
#undef LLM__CHATML
#undef LLM__CHATML_MESSAGES
#undef LLM__LLAMA3
#undef LLM__LLAMA3_MESSAGES
#undef LLM__LLAMA3_OPEN
#undef LLM__LLAMA3_DATED
enum { LLM__N_CHAT_FORMATS = sizeof llm__chat_formats / sizeof *llm__chat_formats };

/* How to recognize a format. Equivalent templates can contain different code, so a format can have
 * several rows. The code between the marks, usually for tool calls, is not checked; long marks keep
 * this code short. */
typedef struct llm__chat_marks {
    const char *name;     /* name of the format */
    const char *marks[9]; /* strings in llm__skeleton's output; "!x": it has no x */
} llm__chat_marks;

#define LLM__QWEN3_USER(content)                                                                   \
    "{%if(message.role=='user')or(message.role=='system'andnotloop.first)%}"                       \
    "{{'<|im_start|>'+message.role+'\n'+" content                                                  \
    "+'<|im_end|>\n'}}{%elifmessage.role=='assistant'%}"
#define LLM__QWEN3_MESSAGES \
    "{%formessageinmessages%}{%ifmessage.contentisstring%}{%setcontent=message.content%}" \
                            "{%else%}{%setcontent=''%}{%endif%}" LLM__QWEN3_USER("content")
#define LLM__QWEN3_THOUGHT(is)                                                                     \
    "{%setreasoning_content=''%}{%ifmessage.reasoning_content" is "%}"                             \
    "{%setreasoning_content=message.reasoning_content%}{%else%}{%if'</think>'in"
#define LLM__QWEN3_LAST "{%ifns.multi_step_toolandmessage.role=='user'and", \
    "{%endif%}{%endif%}{%ifloop.index0>ns.last_query_index%}"
#define LLM__QWEN3_SPLIT                                                                           \
    LLM__QWEN3_MESSAGES LLM__QWEN3_THOUGHT("isstring") "content%}", LLM__QWEN3_LAST,               \
        "{%setcontent=content.split('</think>')[-1].lstrip('\n')%}{%endif%}{%endif%}"
#define LLM__QWEN3_GGUF(split) "{%formessageinmessages%}" LLM__QWEN3_USER("message.content") \
    "{%setcontent=message.content%}" \
LLM__QWEN3_THOUGHT("isdefinedandmessage.reasoning_contentisnotnone") "message.content%}" \
                               "{%setcontent=" split ".lstrip('\n')%}", LLM__QWEN3_LAST
#define LLM__QWEN3_ANSWER "{{'<|im_start|>'+message.role+'\n'+content}}"
#define LLM__QWEN3_FORGETS "{%else%}" LLM__QWEN3_ANSWER "{%endif%}{%else%}" LLM__QWEN3_ANSWER \
    "{%endif%}"
#define LLM__QWEN3(open)                                                                           \
    "{%ifmessages[0].role=='system'%}{{'<|im_start|>system\n'+messages[0].content+'<|im_end|>\n'}" \
    "}{%endif%}",                                                                                  \
        "{%endif%}{{'<|im_end|>\n'}}{%e",                                                          \
        "{%ifadd_generation_prompt%}{{'<|im_start|>assistant\n" open "{%endif%}", "!trim"
#define LLM__QWEN3_MAY_THINK \
    "'}}{%ifenable_thinkingisdefinedandenable_thinkingisfalse%}{{'<think>\n\n</think>\n\n'" \
    "}}{%endif%}"
#define LLM__LLAMA3_MARK(content) "'<|start_header_id|>'+message.role+'<|end_header_id|>\n\n'+" \
    content "+'<|eot_id|>'"
#define LLM__LLAMA3(trim)                                                                          \
    "{%ifmessages[0].role=='system'%}{%setsystem_message=messages[0].content" trim                 \
    "%}{%setmessages=messages[1:]%}"                                                               \
    "{%else%}{%setsystem_message=''%}{%endif%}{{'<|start_header_id|>system<|end_header_id|>\n\n'}" \
    "}{%",                                                                                         \
        "{%endif%}{{'Cutting Knowledge Date: December 2023\n'}}{{'Today Date: "                    \
        "'+date_string+'\n\n'}}",                                                                  \
        "{{system_message}}{{'<|eot_id|>'}}{%",                                                    \
        "{%formessageinmessages%}{%ifnot(message.role=='ipython'ormessage.role=='tool'or'tool_"    \
        "calls'inmessage)%}"                                                                       \
        "{{" LLM__LLAMA3_MARK("message.content" trim) "}}{%e",                                     \
        "{%ifadd_generation_prompt%}{{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}{%"     \
        "endif%}",                                                                                 \
        "{{bos_token}}{%"
static const llm__chat_marks llm__chat_marked[] = {
    {"chatml",
     {"'<|im_start|>'+message.role+'\n'+message.content+'<|im_end|>\n'",
      "'<|im_start|>assistant\n'", "!trim", "!strip(", "!think>"}},
    {"chatml", /* Qwen3-Instruct-2507 */
     {LLM__QWEN3_MESSAGES LLM__QWEN3_ANSWER "{%", LLM__QWEN3("'}}"), "!strip(", "!think>"}},
    {"chatml", /* with a branch for each role */
     {"{%formessageinmessages%}{%ifmessage.role=='user'%}{{'<|im_start|>user\n'+message.content+'<|"
      "im_end|>\n'}}"
      "{%elifmessage.role=='assistant'%}{{'<|im_start|>assistant\n'+message.content+'<|im_end|>\n'}"
      "}"
      "{%else%}{{'<|im_start|>system\n'+message.content+'<|im_end|>\n'}}{%endif%}{%endfor%}"
      "{%ifadd_generation_prompt%}{{'<|im_start|>assistant\n'}}{%endif%}",
      "!trim", "!strip(", "!think>"}},
    {"qwen3", {LLM__QWEN3_SPLIT, LLM__QWEN3_FORGETS, LLM__QWEN3(LLM__QWEN3_MAY_THINK)}},
    {"qwen3", /* Qwen's own GGUF files */
     {LLM__QWEN3_GGUF("message.content.split('</think>')[-1]"), LLM__QWEN3_FORGETS,
      LLM__QWEN3(LLM__QWEN3_MAY_THINK)}},
    {"qwen3", /* Unsloth's files */
     {LLM__QWEN3_GGUF("(message.content.split('</think>')|last)"), LLM__QWEN3_FORGETS,
      LLM__QWEN3(LLM__QWEN3_MAY_THINK)}},
    {"qwen3-instruct", {LLM__QWEN3_SPLIT, LLM__QWEN3_FORGETS, LLM__QWEN3("'}}")}},
    {"qwen3-thinking", {LLM__QWEN3_SPLIT, LLM__QWEN3_FORGETS, LLM__QWEN3("<think>\n'}}")}},
    {"llama3",
     {LLM__LLAMA3_MARK("message.content|trim"), "!Cutting Knowledge Date", "!date_string"}},
    {"llama3.1",
     {LLM__LLAMA3("|trim"),
      "{%ifnotdate_stringisdefined%}{%setdate_string='26 Jul 2024'%}{%endif%}"}},
    {"llama3.1-unsloth",
     {LLM__LLAMA3(""), "{%ifnotdate_stringisdefined%}{%setdate_string='26 July 2024'%}{%endif%}"}},
    {"llama3.2",
     {LLM__LLAMA3("|trim"), "{%ifnotdate_stringisdefined%}{%ifstrftime_nowisdefined%}{%setdate_"
                            "string=strftime_now('%d %b %Y')%}{%else%}"}},
    {"llama2",
     {"'<<SYS>>\n'+system_message+'\n<</SYS>>\n\n'+message.content",
      "bos_token+'[INST] '+content.strip()+' [/INST]'", "' '+content.strip()+' '+eos_token",
      "!setsystem_message='"}},
    {"mistral-v0.1", {"{'[INST] '+message.content+' [/INST]'}", "{message.content+eos_token+' '}"}},
    {"mistral-v0.2", {"{'[INST] '+message.content+' [/INST]'}", "{message.content+eos_token}"}},
    {"mistral-v1",
     {"' [INST] '+message.content+' [/INST]'",
      "' [INST] '+system_message+'\n\n'+message.content+' [/INST]'",
      "' '+message.content+eos_token", "loop.firstandsystem_messageisdefined"}},
    {"mistral-v3",
     {"'[INST] '+message.content+'[/INST]'",
      "'[INST] '+system_message+'\n\n'+message.content+'[/INST]'",
      "' '+message.content|trim+eos_token", "loop.lastandsystem_messageisdefined"}},
    {"mistral-v3-tekken",
     {"'[INST]'+message.content+'[/INST]'",
      "'[INST]'+system_message+'\n\n'+message.content+'[/INST]'", "message.content+eos_token",
      "loop.lastandsystem_messageisdefined"}},
    {"mistral-v7",
     {"'[SYSTEM_PROMPT] '+message.content+'[/SYSTEM_PROMPT]'",
      "'[INST] '+message.content+'[/INST]'", "' '+message.content+eos_token"}},
    {"zephyr",
     {"{{'<|user|>\n'+message.content+eos_token}}\n{%",
      "{{'<|system|>\n'+message.content+eos_token}}\n{%",
      "{{'<|assistant|>\n'+message.content+eos_token}}\n{%", "{{'<|assistant|>'}}\n{%"}},
};
#undef LLM__QWEN3_USER
#undef LLM__QWEN3_MESSAGES
#undef LLM__QWEN3_THOUGHT
#undef LLM__QWEN3_LAST
#undef LLM__QWEN3_SPLIT
#undef LLM__QWEN3_GGUF
#undef LLM__QWEN3_ANSWER
#undef LLM__QWEN3_FORGETS
#undef LLM__QWEN3
#undef LLM__QWEN3_MAY_THINK
#undef LLM__LLAMA3_MARK
#undef LLM__LLAMA3

const char *llm_chat_template_at(int index) {
    return index >= 0 && index < LLM__N_CHAT_FORMATS ? llm__chat_formats[index].name : NULL;
}

/* Trim the text between two tags like Jinja with trim_blocks and lstrip_blocks, which Hugging Face
 * sets. before, after: kinds of the two tags: '%' for a block or comment, '{' for an expression,
 * '-' for a tag with a minus sign on the side of the text, 0 for no tag (start or end of the
 * template). */
static llm_string llm__template_text(llm_string s, char before, char after) {
    size_t end = s.length;
    while (end && strchr(" \t\r\n", s.data[end - 1])) end--;
    const char *line = s.data + s.length;
    while (line > s.data && (line[-1] == ' ' || line[-1] == '\t')) line--;
    if (after == '-') s.length = end;
    else if (after == '%' && (line == s.data ? before != '{' : line[-1] == '\n'))
        s.length = (size_t)(line - s.data);
    else if (!after && s.length && s.data[s.length - 1] == '\n') s.length--;
    if (before == '%' && s.length && *s.data == '\n') s.data++, s.length--;
    while (before == '-' && s.length && strchr(" \t\r\n", *s.data)) s.data++, s.length--;
    return s;
}

/* Replace ['y'] at the end of the output by .y */
static void llm__fold_member(llm__bytes *out) {
    size_t open = out->length - 2;
    while (open > 0 && out->data[open - 1] != '\'') open--;
    if (open < 2 || out->data[open - 2] != '[') return;
    size_t length = out->length - 2 - open;
    out->data[open - 2] = '.';
    memmove(out->data + open - 1, out->data + open, length);
    out->length = open - 1 + length;
}

/* Append a tag in normal form: no white space outside of strings, strings unescaped and in single
 * quotes, 'a'+'b' as 'ab', x['y'] as x.y. Returns the number of bytes read. *dash: the tag ends in
 * a minus sign. */
static size_t llm__template_code(llm_string s, llm__bytes *out, bool *dash, llm_error *err) {
    char quote = 0, close = s.data[1] == '{' ? '}' : '%';
    size_t i = 0;
    for (; i < s.length; i++) {
        char c = s.data[i], next = i + 1 < s.length ? s.data[i + 1] : 0;
        bool end = !quote && i > 1 && c == close && next == '}';
        if (!quote && (c == ' ' || c == '\n' || c == '\t' || c == '\r')) continue;
        if (!quote && c == '-' &&
            (i == 2 || (next == close && i + 2 < s.length && s.data[i + 2] == '}'))) {
            *dash = i > 2;
            continue;
        }
        if (quote ? c == quote : c == '\'' || c == '"') {
            quote = quote ? 0 : c;
            c = '\'';
            if (quote && out->length > 1 && out->data[out->length - 1] == '+' &&
                out->data[out->length - 2] == '\'') {
                out->length -= 2;
                continue;
            }
        } else if (quote && c == '\\' && next) {
            i++;
            c = next == 'n' ? '\n' : next == 't' ? '\t' : next;
        }
        if (!llm__append(out, &c, 1, err)) return 0;
        if (!quote && c == ']' && out->length > 4 && out->data[out->length - 2] == '\'')
            llm__fold_member(out);
        if (end) return llm__append(out, "}", 1, err) ? i + 2 : 0;
    }
    return i;
}

/* Append a template in normal form, to be searched for marks: text and tags without comments,
 * zero-terminated. *printed: number of bytes of text outside of tags. */
static bool llm__skeleton(llm_string source, llm__bytes *out, size_t *printed, llm_error *err) {
    char before = 0;
    *printed = 0;
    for (size_t at = 0, next; at < source.length || !at; at = next) {
        const char *begin = source.data + at, *end = source.data + source.length, *tag = begin;
        while (tag < end && !(*tag == '{' && tag + 1 < end && strchr("{%#", tag[1]) && tag[1]))
            tag++;
        bool minus = end - tag > 2 && tag[2] == '-', dash = false;
        llm_string text = {begin, (size_t)(tag - begin)}, code = {tag, (size_t)(end - tag)};
        text = llm__template_text(text, before,
                                  tag == end      ? 0
                                  : minus         ? '-'
                                  : tag[1] == '#' ? '%'
                                                  : tag[1]);
        next = (size_t)(tag - source.data);
        if (!llm__append(out, text.data, text.length, err)) return false;
        *printed += text.length;
        if (tag == end) break;
        before = tag[1] == '{' ? '{' : '%';
        if (tag[1] == '#') {
            while (tag < end && !(tag[0] == '#' && tag + 1 < end && tag[1] == '}' && tag > begin))
                tag++;
            dash = tag > begin && tag[-1] == '-';
            next = (size_t)(tag - source.data) + 2;
        } else {
            size_t took = llm__template_code(code, out, &dash, err);
            if (!took) return false;
            next += took;
        }
        if (dash) before = '-';
    }
    return llm__append(out, "", 1, err);
}

static const llm__chat_format *llm__format_called(const char *name) {
    for (int i = 0; i < LLM__N_CHAT_FORMATS; i++)
        if (!strcmp(name, llm__chat_formats[i].name)) return &llm__chat_formats[i];
    return NULL;
}

/* Returns the format whose marks match, or NULL. Only some formats allow text outside of tags or an
 * empty line at the start. */
static const llm__chat_format *llm__find_format(const char *skeleton, size_t printed) {
    for (size_t i = 0; i < sizeof llm__chat_marked / sizeof *llm__chat_marked; i++) {
        const char *const *marks = llm__chat_marked[i].marks;
        const llm__chat_format *format = llm__format_called(llm__chat_marked[i].name);
        size_t line = (format->flags & LLM__CHAT_KEEPS_USUAL) && *skeleton == '\n';
        bool fits = format->flags & LLM__CHAT_PRINTS ? *skeleton == '{' : printed == line;
        for (int k = 0; k < 9 && marks[k] && fits; k++)
            fits = *marks[k] == '!' ? !strstr(skeleton, marks[k] + 1)
                                    : strstr(skeleton, marks[k]) != NULL;
        if (fits) return format;
    }
    return NULL;
}

/* Find the default system message of a chatml template: one string. *usual: the message, or NULL;
 * the caller frees it. Returns false if the message is ambiguous or memory runs out. */
static bool llm__usual_system(const char *skeleton, char **usual, llm_error *err) {
    static const char begin[] = "'<|im_start|>system\n", end[] = "<|im_end|>\n'";
    *usual = NULL;
    for (const char *p = skeleton; (p = strstr(p, begin)) != NULL; p++) {
        const char *text = p + strlen(begin), *stop = strstr(text, end);
        if (*text == '\'') continue; /* the caller's message follows, not a default */
        if (!stop || strchr(text, '\'') < stop || *usual) return false;
        size_t length = (size_t)(stop - text);
        *usual = (char *)llm__new(length + 1, 1, "a system message", err);
        if (!*usual) return false;
        memcpy(*usual, text, length);
    }
    return true;
}

/* An unknown template is an error only when a conversation needs it. */
static bool llm__load_chat(llm_tokenizer *t, llm_error *err) {
    llm__bytes skeleton = {NULL, 0, 0};
    llm_error none;
    size_t cursor = 0, printed;
    t->has_chat = llm_value_string(llm_file_find(t->file, "tokenizer.chat_template"), &cursor,
                                   &t->chat_source);
    if (!t->has_chat || t->chat_source.length > 1 << 20) return true;
    bool ok = llm__skeleton(t->chat_source, &skeleton, &printed, err);
    const char *text = (const char *)skeleton.data;
    if (ok) t->chat = llm__find_format(text, printed);
    if (t->chat && (t->chat->flags & LLM__CHAT_KEEPS_USUAL)) {
        static const char bos[] = "{{bos_token}}";
        const char *found = strstr(text, "bos_token");
        t->chat_begins_line = *text == '\n';
        t->chat_begins_bos = found && !strncmp(text, bos, strlen(bos));
        llm__clear(&none);
        bool clear = llm__usual_system(text, &t->chat_usual, &none) &&
                     (!found || t->chat_begins_bos) && !(found && strstr(found + 1, "bos_token"));
        if (!clear) t->chat = NULL;
        if (none.status != LLM_OK && err) *err = none, ok = false;
        else if (none.status != LLM_OK) ok = false;
    }
    LLM_FREE(skeleton.data);
    return ok;
}

const char *llm_chat_template(const llm_tokenizer *t) {
    return t && t->chat ? t->chat->name : NULL;
}
llm_string llm_chat_template_source(const llm_tokenizer *t) { return t->chat_source; }

llm_chat_options llm_chat_defaults(void) {
    llm_chat_options options = {NULL, NULL, false};
    return options;
}

typedef struct llm__rendering { /* conversation being converted to text */
    const llm_tokenizer *t;
    const llm__chat_format *format;
    const char *date;        /* text for %d */
    llm__bytes text;         /* the output so far */
    llm__range *trusted;     /* (n_trusted) parts of text written from patterns */
    int64_t n_trusted, capacity;
    llm_error *err;
} llm__rendering;

static const llm__chat_format *llm__chat_of(const llm_tokenizer *t, const llm_chat_options *options,
                                            llm_error *err) {
    const char *name = options ? options->template_name : NULL;
    const llm__chat_format *format = name ? llm__format_called(name) : t->chat;
    char known[400] = "";
    if (format) return format;
    for (int i = 0; i < LLM__N_CHAT_FORMATS; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "",
                 llm__chat_formats[i].name);
    }
    if (name)
        llm__fail(err, LLM_ERROR_ARGUMENT, "there is no chat template called '%s'; there are %s",
                  llm__show(llm__string(name)).text, known);
    else
        llm__fail(
            err, LLM_ERROR_UNSUPPORTED, "%s: %s; choose one by name: %s", t->name,
            t->has_chat
                ? "the file's chat template is none of those that are known"
                : "the file has no chat template, so this model may not be made for conversations",
            known);
    return NULL;
}

static bool llm__write_text(llm__rendering *r, llm_string s, bool trusted) {
    llm__range range = {r->text.length, r->text.length + s.length};
    if (!s.length) return true;
    if (!llm__append(&r->text, s.data, s.length, r->err)) return false;
    if (!trusted) return true;
    if (r->n_trusted && r->trusted[r->n_trusted - 1].end == range.begin) {
        r->trusted[r->n_trusted - 1].end = range.end;
        return true;
    }
    void *grown = llm__grow(r->trusted, r->n_trusted, &r->capacity, sizeof *r->trusted,
                            "a conversation", r->err);
    if (!grown) return false;
    r->trusted = (llm__range *)grown;
    r->trusted[r->n_trusted++] = range;
    return true;
}

/* Returns the number of bytes of white space at the end, as defined by Python's strip(). */
static size_t llm__trailing_space(const char *text, size_t n) {
    for (size_t end = n;;) {
        size_t begin = end;
        uint32_t c;
        if (!end) return n;
        while (begin > 0 && end - begin < 4 && ((uint8_t)text[--begin] & 0xC0) == 0x80) {}
        if (llm__utf8((const uint8_t *)text + begin, end - begin, &c) != end - begin)
            return n - end;
        if (!llm__is_space(c) && !(c >= 0x1C && c <= 0x1F)) return n - end;
        end = begin;
    }
}

static llm_string llm__trim(llm_string s) {
    uint32_t c;
    while (s.length) {
        size_t n = llm__utf8((const uint8_t *)s.data, s.length, &c);
        if (!llm__is_space(c) && !(c >= 0x1C && c <= 0x1F)) break;
        s.data += n;
        s.length -= n;
    }
    s.length -= llm__trailing_space(s.data, s.length);
    return s;
}

/* Write one part of the pattern: 0, the part before %s; 1, the part after it. */
static bool llm__write_pattern(llm__rendering *r, const char *pattern, int part) {
    const char *cut = strstr(pattern, "%s");
    const char *p = part ? (cut ? cut + 2 : pattern + strlen(pattern)) : pattern,
               *end = part || !cut ? p + strlen(p) : cut;
    while (p < end) {
        const char *percent = (const char *)memchr(p, '%', (size_t)(end - p));
        llm_string literal = {p, (size_t)((percent ? percent : end) - p)};
        if (!llm__write_text(r, literal, true)) return false;
        if (!percent) break;
        llm_string insert = percent[1] == 'b'   ? llm_tokenizer_text(r->t, r->t->bos)
                            : percent[1] == 'e' ? llm_tokenizer_text(r->t, r->t->eos)
                                                : llm__string(r->date);
        if (!llm__write_text(r, insert, percent[1] != 'd')) return false;
        p = percent + 2;
    }
    return true;
}

static bool llm__write_message(llm__rendering *r, const char *pattern, llm_string text) {
    return llm__write_pattern(r, pattern, 0) && llm__write_text(r, text, false) &&
           llm__write_pattern(r, pattern, 1);
}

/* system: system text to put into the user message, or NULL. Both texts are trimmed as one. */
static bool llm__write_user(llm__rendering *r, llm_string text, const llm_string *system) {
    const llm__chat_format *f = r->format;
    bool trims = f->flags & LLM__CHAT_TRIMS;
    if (!system) return llm__write_message(r, f->user, trims ? llm__trim(text) : text);
    if (!llm__write_pattern(r, f->user, 0)) return false;
    size_t start = r->text.length;
    if (!llm__write_message(r, f->joined, *system) || !llm__write_text(r, text, false))
        return false;
    if (trims)
        r->text.length -= llm__trailing_space((const char *)r->text.data + start,
                                              r->text.length - start);
    if (r->n_trusted && r->trusted[r->n_trusted - 1].end > r->text.length)
        r->trusted[r->n_trusted - 1].end = r->text.length;
    return llm__write_pattern(r, f->user, 1);
}

static llm_string llm__after_thinking(llm_string s) {
    static const char mark[] = "</think>";
    const size_t length = sizeof mark - 1;
    for (size_t at = s.length; at >= length; at--) {
        if (memcmp(s.data + at - length, mark, length)) continue;
        for (s.data += at, s.length -= at; s.length && *s.data == '\n'; s.length--) s.data++;
        break;
    }
    return s;
}

static bool llm__check_conversation(const llm__chat_format *f, const llm_message *messages, int n,
                                    llm_error *err) {
    for (int i = 0; i < n; i++) {
        const llm_message *m = &messages[i];
        if (m->role != LLM_ROLE_SYSTEM && m->role != LLM_ROLE_USER && m->role != LLM_ROLE_ASSISTANT)
            return llm__fail(err, LLM_ERROR_ARGUMENT,
                             "message %d has the role %d, which does not exist", i + 1,
                             (int)m->role);
        if (!m->text && m->length)
            return llm__fail(err, LLM_ERROR_ARGUMENT, "message %d is NULL", i + 1);
        if (m->role == LLM_ROLE_SYSTEM && !f->system && !f->joined)
            return llm__fail(err, LLM_ERROR_UNSUPPORTED,
                             "the chat template %s has no place for a system message", f->name);
        int turn = i - (messages[0].role == LLM_ROLE_SYSTEM);
        llm_role due = turn < 0 ? LLM_ROLE_SYSTEM : turn % 2 ? LLM_ROLE_ASSISTANT : LLM_ROLE_USER;
        if ((f->flags & LLM__CHAT_ALTERNATES) && m->role != due)
            return llm__fail(err, LLM_ERROR_ARGUMENT,
                             "message %d: the chat template %s wants user and assistant in turn, "
                             "after at most one message of "
                             "the system",
                             i + 1, f->name);
    }
    if (n < 1 || messages[n - 1].role != LLM_ROLE_USER)
        return llm__fail(err, LLM_ERROR_ARGUMENT,
                         "the last message of a conversation must be the user's, to be answered");
    return true;
}

static bool llm__write_conversation(llm__rendering *r, const llm_message *messages, int n) {
    const llm__chat_format *f = r->format;
    bool own = f == r->t->chat, has_system = messages[0].role == LLM_ROLE_SYSTEM;
    const char *usual = own && r->t->chat_usual ? r->t->chat_usual : f->usual;
    int joined_at = !has_system || f->system ? -1 : f->flags & LLM__CHAT_JOINS_LAST ? n - 1 : 1;
    llm_string first = {messages[0].text, messages[0].length};
    bool ok = llm__write_pattern(r,
                                 own && r->t->chat_begins_bos    ? "%b"
                                 : own && r->t->chat_begins_line ? "\n"
                                                                 : f->begin,
                                 0);
    if (ok && !has_system && usual)
        ok = llm__write_message(r, f->first ? f->first : f->system, llm__string(usual));
    for (int i = 0; ok && i < n; i++) {
        llm_string text = {messages[i].text, messages[i].length};
        if (messages[i].role == LLM_ROLE_USER) {
            ok = llm__write_user(r, text, i == joined_at ? &first : NULL);
            continue;
        }
        bool answer = messages[i].role == LLM_ROLE_ASSISTANT;
        if (answer && (f->flags & LLM__CHAT_FORGETS)) text = llm__after_thinking(text);
        if ((f->flags & LLM__CHAT_TRIMS) || (answer && (f->flags & LLM__CHAT_TRIMS_ANSWERS)))
            text = llm__trim(text);
        if (answer) ok = llm__write_message(r, f->assistant, text);
        else if (f->system) ok = llm__write_message(r, !i && f->first ? f->first : f->system, text);
    }
    return ok && llm__write_pattern(r, f->open, 0);
}

/* Write the date as "21 Nov 2026", in UTC: localtime_r is not C11, and localtime is not
 * thread-safe. Years begin on 1 March here: month lengths then repeat 31 30 31 30 31, and the leap
 * day is the last day of the year. */
static void llm__today(char *text, size_t size) {
    static const char months[] = "MarAprMayJunJulAugSepOctNovDecJanFeb";
    int64_t days = (int64_t)time(NULL) / 86400 + 719468; /* days since 1 March of year 0 */
    int64_t era = days / 146097, day = days % 146097;    /* an era is 400 years */
    int64_t year = (day - day / 1460 + day / 36524 - day / 146096) / 365;
    day -= 365 * year + year / 4 - year / 100;
    int64_t month = (5 * day + 2) / 153;
    snprintf(text, size, "%02d %.3s %d", (int)(day - (153 * month + 2) / 5 + 1), months + 3 * month,
             (int)(400 * era + year + (month > 9)));
}

/* The caller frees r->text and r->trusted, even on failure. */
static bool llm__render(llm__rendering *r, const llm_tokenizer *t, const llm_chat_options *options,
                        const llm_message *messages, int n, llm_error *err) {
    char today[40];
    memset(r, 0, sizeof *r);
    if (!t || (!messages && n > 0))
        return llm__fail(err, LLM_ERROR_ARGUMENT, "llm_chat: an argument is NULL");
    r->t = t;
    r->err = err;
    r->format = llm__chat_of(t, options, err);
    if (!r->format || !llm__check_conversation(r->format, messages, n, err)) return false;
    llm__today(today, sizeof today);
    r->date = options && options->date ? options->date : r->format->date ? r->format->date : today;
    bool ok = llm__write_conversation(r, messages, n);
    if (ok && options && options->no_thinking && (r->format->flags & LLM__CHAT_THINKS))
        ok = llm__write_text(r, llm__string("<think>\n\n</think>\n\n"), true);
    r->date = NULL;
    return ok;
}

int64_t llm_chat_render(const llm_tokenizer *t, const llm_chat_options *options,
                        const llm_message *messages, int n, char *text, size_t capacity,
                        llm_error *err) {
    llm__rendering r;
    llm__clear(err);
    bool ok = llm__render(&r, t, options, messages, n, err);
    if (ok && r.text.length && capacity)
        memcpy(text, r.text.data, r.text.length < capacity ? r.text.length : capacity);
    LLM_FREE(r.text.data);
    LLM_FREE(r.trusted);
    return ok ? (int64_t)r.text.length : -1;
}

static int64_t llm__chat_tokenize(const llm_tokenizer *t, const llm_chat_options *options,
                                  const llm_message *messages, int n, int32_t *ids,
                                  int64_t capacity, int32_t **owned, llm_error *err) {
    llm__rendering r;
    int64_t count = -1;
    llm__clear(err);
    if (llm__render(&r, t, options, messages, n, err)) {
        llm_string bos = llm_tokenizer_text(t, t->bos);
        bool has_bos = bos.length && r.n_trusted && !r.trusted->begin &&
                       r.trusted->end >= bos.length && !memcmp(r.text.data, bos.data, bos.length);
        count = llm__tokenize_ranges(t, (const char *)r.text.data, r.text.length, r.trusted,
                                     r.n_trusted, t->adds_bos && !has_bos, false, ids, capacity,
                                     owned, err);
    }
    LLM_FREE(r.text.data);
    LLM_FREE(r.trusted);
    return count;
}

int64_t llm_chat_tokenize(const llm_tokenizer *t, const llm_chat_options *options,
                          const llm_message *messages, int n, int32_t *ids, int64_t capacity,
                          llm_error *err) {
    return llm__chat_tokenize(t, options, messages, n, ids, capacity, NULL, err);
}

int64_t llm_chat_tokenize_new(const llm_tokenizer *t, const llm_chat_options *options,
                              const llm_message *messages, int n, int32_t **ids, llm_error *err) {
    *ids = NULL;
    return llm__chat_tokenize(t, options, messages, n, NULL, 0, ids, err);
}

const char *llm_chat_stop(const llm_tokenizer *t, const llm_chat_options *options) {
    const llm__chat_format *format = t ? llm__chat_of(t, options, NULL) : NULL;
    if (!format || !strcmp(format->end, "%e")) return NULL;
    return llm_tokenizer_is_end(t, llm__find_text(t, format->end)) ? NULL : format->end;
}

/* =====================================================================================
 * [10] Fast CPU: the executor, and the kernels for each instruction set
 *
 * A kernel is the loop that computes one operation. Chapter 6 has the plain loops that define the
 * operations; this chapter has the fast ones. They use a vector type of LLM__W floats, which is one
 * register of the processor. This file includes itself once per instruction set, so the same text
 * is compiled for each; llm_cpu_backend chooses the kernels that run. One of two things limits a
 * matrix product:
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

/* ---- What the fast kernels share --------------------------------------------------------- */

enum {
    LLM__TILE = 64,         /* positions in an attention tile */
    LLM__QUERY_ROWS = 128,   /* maximum query rows, (token, head) pairs, in an attention item */
    LLM__PADDING = 32,      /* head_dim is padded to a multiple of this, the depth of a bf16 tile */
    LLM__FEW_ROWS = 8,      /* maximum rows of x for converting 16-bit weights on the fly */
    LLM__FEW_X = 32,        /* maximum rows of x for the form "alone": see "Matrix tiles" */
    LLM__FEW_X_Q4_0 = 64,   /* the same for q4_0 weights */
    LLM__SHARING_HEADS = 4, /* fewest query heads per kv head for attention in matrix tiles */
    LLM__FAR_BYTES = 4096,  /* prefetch distance, in bytes */
    LLM__X_CACHE_BYTES = 5 << 16,    /* bytes of rounded x to keep in an L2 cache of 512 KB */
    LLM__X_CACHE_BYTES_TILES = 7 << 18, /* the same in an L2 cache of 2 MB, with matrix tiles */
    LLM__GATE_CACHE_BYTES = 1 << 17  /* bytes of gate results to keep in the L2 cache */
};

#define LLM__INLINE static inline __attribute__((always_inline))
#define LLM__NOINLINE __attribute__((noinline))
/* Without unrolling, the compiler would keep an array of registers in memory. */
#if defined(__clang__)
#define LLM__UNROLL _Pragma("clang loop unroll(full)")
#define LLM__ROLLED _Pragma("clang loop unroll(disable)") /* for small code */
#else
#define LLM__UNROLL _Pragma("GCC unroll 16")
#define LLM__ROLLED _Pragma("GCC unroll 1")
#endif
#define LLM__JOIN(a, b) a##b

/* ---- Panels: weights in the order in which kernels read them -------------------------------
 * A kernel takes 16 rows of weights at once, one per lane of the widest register: each sum stays in
 * its lane, and one column of x is used for 16 rows. So 16 rows are packed into a panel, a sequence
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
 * are rounded (the error of a scale of 1/100 of the largest is at most 2.4 %). In these types, each
 * span of eight stripes begins with a head:
 *
 *   scale        (2, 16)     f16  per 256 columns and row (q4_K, q5_K: (2, 16) minimums follow)
 *
 * The stripes of a span have multipliers in place of scales:
 *
 *   q4_0, q4_Z   (2, 16)     i16  per block and row (q4_Z: (2, 16) zero points follow)
 *   q4_K, q5_K   (2, 2, 16)  u8   per block and row: of the scale, of the minimum
 *   q6_K         (2, 2, 16)  i8   per half block and row
 *
 * Missing rows and columns are zeros. If weights are not packed when they are loaded
 * (llm_cpu_pack_weights), each panel is packed just before its use. */

enum {
    LLM__PANEL = 16,        /* rows of weights in a panel */
    LLM__STRIPE = 64,       /* columns in a stripe */
    LLM__SPAN = 8,          /* stripes in a span, which share a head */
    LLM__FULL_SCALE = 2048, /* the multiplier of the largest scale */
    LLM__X_TILE = 16        /* maximum rows of x in a tile */
};

/* Layout of the panels of a weight type */
typedef struct llm__layout {
    int quads;        /* words per block and row; 0: the type has no panels */
    int zero;         /* stored level of a zero weight, for types without minimums (q4_0: 8) */
    bool multipliers; /* each block scale is an integer times a common scale per 256 columns */
    bool groups;      /* the type itself stores its scales in this form: the K formats */
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

/* Bytes of a span before its stripes */
static size_t llm__span_head(llm__layout l) {
    return l.multipliers ? 2 * LLM__PANEL * (l.groups && l.minimum ? 4 : 2) : 0;
}

/* Bytes of a stripe before its quads */
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
    uint32_t columns[8]; /* four columns in each word */
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
    /* If the largest scale is not finite, all multipliers are 1, and the products become NaN or
     * infinite. */
    bool finite = (largest & 0x7fff) < 0x7c00;
    for (int i = 0; i < n; i++) {
        float part = finite && all != 0.0f
                         ? rintf(llm__f16_to_f32(scales[i]) / all * LLM__FULL_SCALE)
                         : (float)!finite;
        /* The lower bound is -2047, since -16 (a level) times -2048 does not fit in 16 bits. */
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
/* Bytes of x per row and stripe */
enum { LLM__X_BYTES = LLM__STRIPE + 2 * sizeof(float) + 4 * sizeof(int16_t) };

enum { /* sizes for the matrix tiles */
    LLM__CHUNK = 2 * LLM__SPAN, /* blocks unpacked together; half as many "by halves" (see below) */
    LLM__TILE_PANELS = 4,  /* panels unpacked together; half as many "in chunks" */
    LLM__GROUP = 4,        /* blocks that the tile unit multiplies together */
    /* bytes of scratch memory, without the sums */
    LLM__TILES_BYTES = LLM__GROUP * 1024 + LLM__TILE_PANELS * LLM__CHUNK * (512 + 2 * 64)
};

static int64_t llm__stripes(int64_t cols) { return llm__divide_up(cols, LLM__STRIPE); }

/* Number of values of x that share a scale */
static int llm__x_group(llm_type type) {
    return llm__layout_of(type).multipliers ? LLM__SUPER : LLM__BLOCK;
}

LLM__INLINE const char *llm__x_tile(const llm__matmul_args *args, int64_t tile) {
    return (const char *)args->x_tiles + (size_t)tile * args->x_tile_bytes;
}

/* ---- The fast kernels: one text, compiled once per instruction set -----------------------
 * The following code is compiled once per pass, where this file includes itself (further down). A
 * pass defines:
 *
 *   LLM__KERNEL_PASS  0: baseline (SSE2, NEON, ...), 1: AVX2, 2: AVX-512 with VNNI,
 *                     3: NEON with dot products
 *   LLM__W            floats in a vector register: 4, 8, 16
 *   LLM__ROWS         rows of weights, or queries, whose sums advance together
 *   LLM__X_ROWS       maximum rows of x that share an unpacked block
 *   LLM__K(name)      the name with the prefix of the pass, such as llm__avx2_name */
#endif
#endif

#ifdef LLM__KERNEL_PASS

#ifdef __clang__ /* clang's undefined-behaviour checks take minutes to compile here */
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

/* Per lane: v where mask is all ones, 0 where it is 0. A comparison gives such a mask. */
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
#if defined(__aarch64__) /* the compiler would fuse the product and the sum in some places only */
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
#if defined(__aarch64__) /* on arm64 the compiler could fuse that addition with a product */
LLM__INLINE llm__vi LLM__K(nearest)(llm__vf v) { return (llm__vi)vcvtnq_s32_f32((float32x4_t)v); }
#else
LLM__INLINE llm__vi LLM__K(nearest)(llm__vf v) { return (llm__vi)(v + 12582912.0f) - 0x4b400000; }
#endif
#if defined(__aarch64__)
LLM__INLINE llm__vf LLM__K(from_f16)(const uint16_t *p) {
    return (llm__vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
#else
/* An f16 whose bits are shifted to the fields of an f32 is too small by a factor of 2^112, even if
 * it is denormal. */
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

/* e^x = 2^k e^r with integer k and |r| <= about ln(2)/2; e^r is the Taylor series to r^7 (error
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
                            float *out) {
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
        for (int i = 0; i < whole; i += LLM__W)
            LLM__K(store)(out + i, LLM__K(load)(x + i) * scale * LLM__K(load)(weight + i));
        for (int i = whole; i < dim; i++) out[i] = x[i] * scale * weight[i];
    }
}

LLM__INLINE llm__vf LLM__K(silu_times)(llm__vf gate, llm__vf up) {
    return gate / (1.0f + LLM__K(exp)(-gate)) * up;
}

static void LLM__K(swiglu)(const float *gate, const float *up, int64_t n, float *out) {
    int64_t i = 0;
    for (; i + LLM__W <= n; i += LLM__W)
        LLM__K(store)(out + i, LLM__K(silu_times)(LLM__K(load)(gate + i), LLM__K(load)(up + i)));
    int rest = (int)(n - i);
    if (rest == 0) return;
    LLM__K(store_some)(
        out + i,
        LLM__K(silu_times)(LLM__K(load_some)(gate + i, rest), LLM__K(load_some)(up + i, rest)),
        rest);
}

/* -- Rows of logits, for chapter 3 -- */

/* Index of the largest value, the first if several are equal. A NaN is never the largest. */
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

/* sum(exp(x - shift)), shift = max x. A lane adds 64 floats; then their sum is added to a
 * double. */
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
 * For out[i][row], lane l sums the products of columns l, l + W, l + 2W, ... Additions to the same
 * sum wait for each other, so R rows of weights are multiplied by T rows of x at the same time.
 * Each step loads R + T registers for R x T multiply-adds. */

/* Add the bias and the residual, and store the result. */
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

/* Multiply `count` rows of weights, which fit in the L2 cache, by all rows of x: 4 rows of x at a
 * time, which stay in the L1 cache while the weights are read. */
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

/* With few rows of x, f16 and bf16 weights are converted on the fly. With more, a tile of weights
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

/* Number of registers that hold one value for each row of a panel */
enum { LLM__K(parts) = LLM__PANEL / LLM__W };

typedef struct LLM__K(w_block) { /* one block of LLM__W rows */
#if LLM__KERNEL_PASS == 0
    llm__vf w[LLM__BLOCK];     /* one register per column */
#else
    llm__vi w[LLM__BLOCK / 4]; /* one register per quad of columns */
#endif
    llm__vf scale, minimum;    /* the minimum is added to each value */
    /* other: factor of the sum of x (q6_K: the multiplier of columns 16 to 31) */
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
/* Two 16-bit numbers per lane, `first` in the low half */
LLM__INLINE llm__vi LLM__K(pair)(llm__vi first, llm__vi second) {
#if LLM__KERNEL_PASS == 2
    return (llm__vi)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)first, (__m512i)(second << 16));
#else
    return (first & 0xffff) | second << 16;
#endif
}

/* sum + low(a) low(b) + high(a) high(b) per lane, with signed 16-bit halves */
LLM__INLINE llm__vi LLM__K(add_pair)(llm__vi sum, llm__vi a, llm__vi b) {
#if LLM__KERNEL_PASS == 2
    return (llm__vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (llm__vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

/* Read the multipliers of 4-bit types into the low half of each lane; the high half is 0. half and
 * part are as in unpack_block. */
LLM__INLINE llm__vi LLM__K(unpack_multipliers)(bool groups, const uint8_t *stripe, int half,
                                               int part) {
    typedef uint16_t halves __attribute__((vector_size(2 * LLM__W)));
    halves v;
    if (groups) return LLM__K(from_u8)(stripe + half * 2 * LLM__PANEL + part * LLM__W);
    memcpy(&v, stripe + half * 2 * LLM__PANEL + part * 2 * LLM__W, sizeof v);
    return __builtin_convertvector(v, llm__vi);
}

/* Read scales and minimums, or multipliers. */
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

/* Read the scale and the minimum of 256 columns. half: 0 or 1, the first or last 256 columns of the
 * span */
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
#if LLM__KERNEL_PASS == 1 /* keeps v in a register, else it is loaded for each nibble */
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

/* sum + (sum of a block of x) * b per lane. x_sums: the two half-block sums; b fits in 16 bits */
LLM__INLINE llm__vi LLM__K(add_x_sum)(llm__vi sum, const void *x_sums, llm__vi b) {
#if LLM__KERNEL_PASS == 1 || LLM__KERNEL_PASS == 2
    return LLM__K(add_pair)(sum, LLM__K(all_i32)(x_sums), LLM__K(pair)(b, b));
#else
    const int16_t *halves = (const int16_t *)x_sums;
    return sum + (halves[0] + halves[1]) * b;
#endif
}

/* -level times the sum of x over columns 4 * first to 4 * end - 1, which are whole half blocks */
LLM__INLINE llm__vi LLM__K(minus_level)(int level, int first, int end, const int16_t *x_sums) {
    if (level == 0) return (llm__vi){0};
#if LLM__KERNEL_PASS == 1 || LLM__KERNEL_PASS == 2
    int32_t factors = (first < 4 ? -level & 0xffff : 0) | (end > 4 ? -level * 65536 : 0);
    return LLM__K(add_pair)((llm__vi){0}, LLM__K(all_i32)(x_sums), factors - (llm__vi){0});
#else
    return -level * ((first < 4 ? x_sums[0] : 0) + (end > 4 ? x_sums[1] : 0)) - (llm__vi){0};
#endif
}

/* Columns 4 * first to 4 * end - 1 of LLM__W rows of weights, times T rows of x */
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
            /* q8_0: one result of vpmaddubsw fits in 16 bits, with the sign of w moved to x. */
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

/* sums[t][part] += a block of LLM__W rows times 32 values of row t of x, for T rows */
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

/* The same in integers, for weights with multipliers. q4_K, q5_K: minimums[t][part] += the
 * minimum's multiplier times the sum of x */
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
    llm__vi rows[LLM__X_ROWS], multiplier; /* sums and multiplier of the stripe's first block */
} LLM__K(short_sums);

/* Short sums, for 4-bit weights with multipliers, on x86: one instruction multiplies two pairs of
 * 16-bit numbers per lane and adds both products. So it applies two multipliers at once if the sums
 * fit in 16 bits. An AVX2 lane has two sums of 16 products (16 x 15 x 127 = 30480). An AVX-512 lane
 * has one sum of 32 products: 60960 does not fit, so it starts from -8 times the sum of x and
 * becomes a sum of (w - 8) x, at most 32512. Only the low half of the lane is used; it is correct
 * modulo 2^16.
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
        __asm__("" : "+v"(v)); /* keeps v in a register, else it is loaded for each nibble */
        /* t is the inner loop, since additions to the same sum wait for each other. */
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
    /* 16: bytes of one row of a block */
    const uint8_t *quads = stripe + llm__stripe_head(l) + half * LLM__PANEL * 16;
    llm__vi now[LLM__X_ROWS][2];
    LLM__UNROLL for (int q = 0; q < 4; q++, quads += LLM__PANEL * 4) {
        llm__vi w[2][2];
        LLM__UNROLL for (int part = 0; part < 2; part++) {
            llm__vi v = LLM__K(load_int)(quads + part * 4 * LLM__W);
            __asm__("" : "+x"(v)); /* keeps v in a register, else it is loaded for each nibble */
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
                    /* Keeps the order: the compiler would add in a tree, which spills registers. */
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

/* Correct short sums: they are sums of w x (AVX2) or (w - 8) x (AVX-512), not of (w - zero) x. Add
 * `missing` x (-8 times the sum of x) x multiplier, then q4_Z's zero points. For q4_K, add -8 times
 * the product of multiplier and sum of x to `minimums`. */
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

/* Multiply a panel by T rows of x from row i on, all in one tile. T is a constant. */
LLM__INLINE void LLM__K(panel_rows)(llm__layout l, bool known, int T, const llm__matmul_args *args,
                                    const uint8_t *panel, int64_t row, int64_t i) {
    const bool whole = l.multipliers, minimums = l.groups && l.minimum,
               short_sums = known && l.multipliers &&
                            (LLM__KERNEL_PASS == 1 || LLM__KERNEL_PASS == 2);
    const size_t stripe_bytes = llm__stripe_bytes(l), head = llm__span_head(l),
                 x_bytes = (size_t)args->height * LLM__X_BYTES;
    const size_t prefetched = short_sums ? 640 : stripe_bytes; /* 640: bytes of a q4_Z stripe */
    int64_t stripes = llm__stripes(args->w->cols);
    const uint8_t *stripe = panel;
    int first = (int)(i % args->height);
    const char *x = llm__x_tile(args, i / args->height) + first * LLM__STRIPE;
    /* At x_scales + 4: the second scale or, with multipliers, -8 times the sums of the blocks */
    const ptrdiff_t x_scales = args->height * LLM__STRIPE - first * (LLM__STRIPE - 8),
                    x_sums = x_scales + args->height * 8;
    llm__vf sums[LLM__X_ROWS][LLM__K(parts)];
    /* Sums over 256 columns. products: of w x; lower: of x times the minimums' multipliers */
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
            /* Keeps the sums in memory, since the block needs the registers. */
            if (T > 4) __asm__ volatile("" : "+m"(sums));
        }
        const float *scales = (const float *)(const void *)(x + x_scales);
        const int64_t end = llm__min(start + LLM__SPAN / 2, stripes);
        for (int64_t s = start; s < end; s++, x += x_bytes, stripe += stripe_bytes) {
            for (size_t line = 0; line < prefetched; line += 64)
                LLM__PREFETCH_FAR(stripe + LLM__FAR_BYTES + line),
                    LLM__PREFETCH(stripe + stripe_bytes + line);
#if LLM__KERNEL_PASS == 2
            LLM__UNROLL /* so that `before` stays in registers */
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
                    /* Loads x again for each part; the compiler would spill it. */
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
 * All forms add the same integers, so they give the same bits:
 *
 * "Alone" is for up to 32 rows of x (q4_0: 64; never for q6_K, which has two scales per block). It
 * multiplies one panel by one tile of x, block by block. After 32 columns, C is stored in memory.
 * Vector registers scale it and unpack the next weights while the tile unit multiplies. q4_0 needs
 * one vpdpwssd per row of C. Sums of q4_Z, q4_K and q5_K exceed 16 bits, so these types need a
 * multiplication and an addition. For types without multipliers, C is converted to floats.
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
 * bytes; the other rows have 64. */
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

/* These are macros because an instruction contains the names of its registers. */
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
    const int8_t *w;          /* (blocks, 8, 16, 4); by halves: (low and high, 4, 16, 16, 4) */
    const float *scales;      /* (blocks, 16) scales, or int32 multipliers */
    const float *others;      /* (blocks, 16) minimums, or 2 x i16 factors of x's half-sums */
    const uint8_t *span;      /* scales in the panel's span head, from the chunk's columns on */
    int32_t *products;        /* (group, 16, 16) scratch */
    float *kept;              /* (16, 16) sums so far, kept from one chunk to the next */
    const uint8_t *ahead;     /* weights to prefetch during the multiplication */
    int lines;                /* cache lines to prefetch per block */
} llm__tile_args;

LLM__INLINE const float *llm__tile_scales(const llm__tile_args *args, int block) {
    return (const float *)(const void *)(args->x + (size_t)(block / 2) * args->x_bytes +
                                         args->height * LLM__STRIPE) +
           block % 2;
}

/* Both half-sums of block `block` of row t of x, as two 16-bit values in every lane */
LLM__INLINE __m512i llm__tile_sums(const llm__tile_args *args, int block, int t) {
    int32_t pair;
    memcpy(&pair,
           args->x + (size_t)(block / 2) * args->x_bytes + args->height * (LLM__STRIPE + 8) +
               8 * t + 4 * (block % 2),
           4);
    return _mm512_set1_epi32(pair);
}

/* Multiply four blocks from `first` on, and prefetch weights. before: store the products of the
 * previous four blocks first. */
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

/* Scale the products of blocks first to end - 1 and add them to the sums of all rows of x. */
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

/* The same in integers, for weights with multipliers */
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

/* Unpack the weights of `count` blocks to signed bytes, and unpack their scales or multipliers. */
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

/* The same, but to the low and high bytes of weight times multiplier, (4, 16, 16, 4) each */
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

/* Unpack up to four blocks, starting with block `first`. Returns the arguments that multiply them
 * by the tile of x whose first row is i. w, scales and others are buffers of the whole chunk. */
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
 * blocks, the vector unit adds up the previous group and unpacks the next one. Tile loads wait for
 * earlier loads, so prefetches are issued early. */
LLM__INLINE void llm__amx_alone(llm__layout l, const llm__matmul_args *args, const uint8_t *panel,
                                int64_t i, int32_t *products, int8_t *w, float *scales,
                                float *others, float *kept) {
    const int64_t blocks = 2 * llm__stripes(args->w->cols);
    const bool whole = l.multipliers;
    llm__tile_args tile, before;
    memset(&before, 0, sizeof before); /* gcc 12 at -O1 does not see that it is set before use */
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

/* Pass the fields of l that differ most as constants, so that the compiler specializes the code. */
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

/* The form "by halves": multiply 256 columns of two tiles of x by a panel. The products of `before`
 * (or NULL) are stored when their tile registers are needed, and added up while the tile unit
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

/* Multiply a group of panels (by halves: up to four, in chunks: up to two, alone: one) by all rows
 * of x. The panels share each tile of x while it is cached. */
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
            llm__vf most[2] = {{0}, {0}}; /* two, since each max waits for the one before */
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
                /* An infinite range gives an infinite scale, so that the result is not finite
                 * either. */
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
    /* Clear missing rows: stale scales may be denormals, which are slow. */
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
    /* With constants, the compiler makes separate kernels for q8_0, for q4_0, for q4_K with q4_Z,
     * and for the other types. */
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
                            some_q);
        if (args->k_norm)
            LLM__K(rmsnorm)(some_k, args->k_norm, end_kv_head - first_kv_head, head_dim,
                            op->epsilon, some_k);
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
    float *sums;   /* (128 rows, padded_dim) acc, the weighted sums of values */
    float *scores; /* (128 rows, 64) */
    float *largest, *total; /* (128 rows) m; (128 rows) l */
    float *zeros;  /* (padded_dim) used as a missing row */
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

typedef struct LLM__K(tile) { /* 64 positions, in the cache or as f32 */
    llm_type type;
    int n;          /* positions that exist */
    int64_t stride; /* distance between dimensions of a key, in values */
    const void *keys[LLM__TILE / LLM__W]; /* each: dimension 0 of LLM__W adjacent keys */
    const void *values[LLM__TILE]; /* (head_dim) each */
} LLM__K(tile);

/* Find the tile from position `first` on; positions after `last` do not exist. Missing rows get a
 * valid address, for prefetching. */
LLM__INLINE void LLM__K(find_tile)(const llm__attention_args *args, int sequence, int kv_head,
                                   int first, int last, LLM__K(tile) *tile) {
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
        int64_t row = llm__cache_row(args->batch, cache, sequence, kv_head, first + k);
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

static void LLM__K(copy_keys)(const llm__attention_args *args, int sequence, int kv_head, int first,
                              const LLM__K(attention_scratch) *a, LLM__K(tile) *tile) {
    const llm_cache *cache = args->cache;
    const char *keys = llm__cache_layer(cache, cache->keys, args->layer);
    const size_t value_bytes = llm__value_bytes(cache->type);
    for (int k = 0; k < tile->n; k++) {
        int64_t stride,
            at = llm__cache_place(cache, cache->keys,
                                  llm__cache_row(args->batch, cache, sequence, kv_head, first + k),
                                  &stride);
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

/* Prefetch the next tile a few lines at a time: prefetching it at once would stall. */
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

/* Turn a row's scores into weights exp(score - largest). The row sees keys from .. seen - 1. Not
 * inlined, so that one compiled form rounds all rows alike. */
LLM__NOINLINE LLM__KERNELS void LLM__K(softmax_row)(float *scores, int from, int seen, float scale,
                                                    float *largest, float *total, float *sums,
                                                    int padded_dim) {
    int padded = (seen + LLM__W - 1) / LLM__W * LLM__W;
    for (int k = 0; k < padded; k += LLM__W)
        LLM__K(store)(scores + k, LLM__K(load)(scores + k) * scale);
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

/* sums[r] += weights times values of keys first .. end - 1, for R rows and V registers from d on */
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
    int position[LLM__QUERY_ROWS]; /* position of the row in the sequence */
    /* A row sees keys from .. seen - 1 of the tile, or no key if from >= seen. */
    int from[LLM__QUERY_ROWS], seen[LLM__QUERY_ROWS];
} LLM__K(query_rows);

/* Compute attention for rows `row` to row + R - 1. Row r sees keys from[r] .. seen[r] - 1. Both
 * bounds ascend with r. */
LLM__INLINE void LLM__K(attend)(int R, llm_type type, const llm__attention_args *args,
                                const LLM__K(attention_scratch) *a, const LLM__K(query_rows) *rows,
                                int row, const LLM__K(tile) *tile, const LLM__K(tile) *next) {
    float *scores = a->scores + row * LLM__TILE, *sums = a->sums + (int64_t)row * a->padded_dim;
    const int *from = rows->from + row, *seen = rows->seen + row, head_dim = args->shape.head_dim,
              padded_dim = a->padded_dim;
    LLM__K(score_rows)(R, type, rows->q + row, tile, next, head_dim, seen[R - 1], scores);
    for (int r = 0; r < R; r++)
        LLM__K(softmax_row)(scores + r * LLM__TILE, from[r], seen[r], args->shape.scale,
                            &a->largest[row + r], &a->total[row + r],
                            sums + (int64_t)r * padded_dim, padded_dim);
    /* The values of keys that all rows see are loaded once for all rows. */
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
    }
}

/* Set which keys the rows see in the tile from position `first` on. */
LLM__INLINE void LLM__K(see_tile)(const llm__attention_args *args, int first,
                                  LLM__K(query_rows) *rows) {
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

/* A few rows read f16 in place, if head_dim is a multiple of LLM__W. */
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
 * In this form, the values of unseen keys are multiplied by the weight 0. So values must be finite:
 * store_head clamps them, and missing rows are zeros. */

typedef struct llm__amx_tile {
    uint16_t *queries[2];  /* high, low: (8 groups of 16 rows, padded_dim / 32, 16, 32) */
    uint16_t *keys[2];     /* high, low: (4 groups of 16 keys, padded_dim / 2, 16, 2) */
    uint16_t *values[2];   /* high, low: (32 pairs of keys, padded_dim, 2) */
    uint16_t *weights[2];  /* high, low: (16 rows, 64) */
    float *scores;         /* (16 rows, 64) */
} llm__amx_tile;

/* Split a and b into high and low parts, each 16 pairs of bf16 with a in the low halves. To round,
 * half a unit of the last place is added; f16 values (exact) need no rounding. */
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

/* 16 values of a row from value d on; zeros after the end of the row */
LLM__INLINE __m512 llm__amx_some(llm_type type, const void *row, int d, int head_dim) {
    if (d + 16 <= head_dim) return (__m512)LLM__K(load_as)(type, row, d);
    return d < head_dim ? (__m512)LLM__K(load_some_as)(type, row, d, head_dim - d)
                        : _mm512_setzero_ps();
}

/* Use the vector form's scratch memory; the packed queries follow it. */
static llm__amx_tile llm__amx_carve(const LLM__K(attention_scratch) *a) {
    llm__amx_tile t;
    int64_t depth = a->padded_dim;
    t.keys[0] = (uint16_t *)(void *)a->keys; /* two parts of bf16 are as large as f32 */
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

/* Multiply the queries by the scale, split them into bf16 parts, and pack them. */
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

/* Convert 16 keys to bf16. */
LLM__INLINE void llm__amx_gather_keys(int head_dim, const LLM__K(tile) *tile,
                                      const LLM__K(tile) *next, int depth, const llm__amx_tile *t,
                                      int group) {
    for (int first = 0; first < depth; first += 32) {
        const uint16_t *key = (const uint16_t *)tile->keys[group] + first * tile->stride,
                       *other = key + 16 * tile->stride;
        const char *wanted = (const char *)next->keys[group] +
                             2 * (first + group % 2) * next->stride;
        for (int d = first; d < first + 16; d++) { /* d and d + 16 */
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
    for (int i = 0; i < (tile->n + 31) / 32 * 16; i++) { /* keys k and k + 16 */
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

/* scores (16 rows, n) = queries times keys, n = 32 or 64. Four sums take turns, since products that
 * are added to the same sum wait for each other. */
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

/* The same for one group of keys, summed in the same order */
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

/* sums (16 rows, padded_dim) += weights (16 rows, n) times values (n, padded_dim) */
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

/* e^x for x <= 0, with a relative error of 1e-6: 2^k 2^r with integer k and |r| <= 1/2 */
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

/* Lane r of the result: the sum or the largest of rows[r]. Each level merges pairs of registers. */
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

/* Turn the scores (n_rows, n keys) into weights, and rescale the earlier sums. sees: per row, one
 * bit per key */
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
    LLM__K(tile) tiles[2]; /* the current tile and the next */
    LLM__K(find_tile)(args, sequence, kv_head, begin, last, &tiles[0]);
    for (int first = begin, now = 0; first <= last; first += LLM__TILE, now = !now) {
        LLM__K(tile) *tile = &tiles[now], *next = &tiles[!now];
        LLM__K(find_tile)(args, sequence, kv_head, first + LLM__TILE, last, next);
        if (!as_it_lies) LLM__K(copy_keys)(args, sequence, kv_head, first, &a, tile);
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
    LLM__K(swiglu),
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

/* The passes take most of the compile time, so a program can compile each pass in a separate file,
 * where LLM_KERNELS_HERE is the level of the pass: 0 (baseline), 1 (AVX2, or NEON's dot products)
 * or 2 (AVX-512). In the program's other files, it is -1. */
#ifdef LLM_NO_FAST_KERNELS
#define LLM__COMPILES(level) 0
#elif defined(LLM_KERNELS_HERE)
#define LLM__COMPILES(level) (LLM_KERNELS_HERE == (level))
#define LLM__KERNELS
extern const llm__kernels llm__base_kernels, llm__avx2_kernels, llm__avx512_kernels,
    llm__dotprod_kernels;
void llm__base_softmax_row(float *scores, int from, int seen, float scale, float *largest,
                           float *total, float *sums, int padded_dim);
#else
#define LLM__COMPILES(level) 1
#define LLM__KERNELS static
#endif

/* Compile the passes. If you rename this file, define LLM_FILE_NAME as its new name. */
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

/* Linux lets a process use AMX only on request. */
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
#ifdef __ARM_FEATURE_DOTPROD /* the compiler's target has them */
    return true;
#else
    enum { DOT_PRODUCTS = 1 << 20 }; /* Linux's HWCAP_ASIMDDP */
    return (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0;
#endif
}
#endif

/* The best kernels that the processor supports and max_isa allows; NULL: the reference loops */
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

/* Index of the largest value, the first if several are equal. A NaN is never the largest. */
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

/* ---- The planned executor: stages, whose items the threads share ------------------------------
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
 *   - an item of attention that has all rows of its heads first applies RoPE to them;
 *   - the products gate and up are one stage, which also applies the activation.
 *
 * The fastest plan depends on the number of rows, so there is a plan for each class of steps.
 *
 * A thread first does the item with its own number: it has the same weights in each step, so they
 * may still be in the thread's cache. Then the threads take the remaining items one by one, so a
 * slow thread does fewer items. The first thread alone does a stage that is too small to share.
 *
 * A barrier waits for the slowest thread, and on a busy machine the system may suspend a thread for
 * milliseconds. When the calling thread has waited so long that it would have been faster alone, it
 * works alone for four times as long as it waited. So at most a fifth of the time is lost. */

enum {
    LLM__LARGE_WORK = 4000000,       /* smallest product to balance, in multiply-adds */
    LLM__SHARED_WORK = 30000,        /* smallest stage to share, in multiply-adds */
    LLM__THREADS_WORK = 400000,      /* smallest run to start threads for, in multiply-adds */
    LLM__TILES_MARGIN = LLM__GROUP / 2 * LLM__X_TILE * LLM__X_BYTES, /* bytes read past x_tiles */
    LLM__OWN_X_BYTES = 32 << 10,     /* bytes of a thread's scratch memory for a norm's result */
    LLM__OWN_TILES_BYTES = 64 << 10, /* bytes of a thread's scratch memory for rounded rows */
    LLM__SPINS = 4096,               /* polls at a barrier before a thread yields its core */
    LLM__CLASSES = 9                 /* number of classes of steps: see llm__class_rows */
};

typedef struct llm__stage {
    const llm_op *op;       /* the operation */
    const llm_op *before;   /* fused operation that each item does first (gate, RoPE); or NULL */
    bool rounds;            /* the stage only rounds the input of op, a product */
    bool barrier;           /* the threads wait for each other before this stage */
    bool each;              /* every thread does the whole stage, in its own memory */
    bool own_x;             /* each thread has its own copy of the input (norm: of the output) */
    bool own_tiles;         /* each thread has its own copy of the rounded rows */
} llm__stage;

typedef struct llm__deal {  /* how the items of a stage are dealt out in one run */
    const llm__stage *stage;
    int64_t items;
    int64_t next;           /* items taken so far, not counting each thread's own first item */
    int64_t n;              /* rows of activations (swiglu: values) */
    int64_t n_per_item;     /* rows of activations in an item; 0: items are rows of the matrix */
    int64_t first_rows;     /* rows of the matrix in each thread's own first item */
    int64_t more_rows;      /* rows of the matrix in each of the other items */
    int64_t parts;          /* rounding: items per tile of x; each rounds some of the columns */
    double amount;          /* work, in multiply-adds or their equivalent in time */
    bool shared;            /* all threads take items */
} llm__deal;

typedef struct llm__variant { /* a part of a program, planned for a class of steps */
    llm__stage *stages;     /* (n) */
    int n;
} llm__variant;

typedef struct llm__plan {  /* the result of prepare for a program */
    llm_limits limits;
    llm__variant variants[2][LLM__CLASSES][2]; /* [head][class][RoPE is fused with attention] */
    llm__deal *head;        /* deals of the head in the last run; the body's deals end here */
    const llm__variant *last[2]; /* variants used in the last run: body, head */
    int last_rows[2];       /* rows of the last run: body, head */
    void *memory;           /* memory of all stages and deals */
} llm__plan;

/* Maximum number of rows in a class of steps */
static int llm__class_rows(int class_) {
    static const int rows[LLM__CLASSES] = {1, 2, 4, 8, 16, 32, 64, 128, INT_MAX};
    return rows[class_];
}

static int llm__class_of(int n) {
    int class_ = 0;
    while (n > llm__class_rows(class_)) class_++;
    return class_;
}

/* Rows of x per item, the same in every stage, since a thread's rows may still be in its cache */
static int64_t llm__share_of_rows(const llm__cpu *cpu, int64_t n) {
    return llm__divide_up(llm__divide_up(n, cpu->n_threads), LLM__X_TILE) * LLM__X_TILE;
}

/* Rows in a tile of x. If n is more than 8, the tile unit may multiply the tile, which takes 16
 * rows. */
static int llm__tile_height(int64_t n) { return n <= 8 ? (int)n : LLM__X_TILE; }

static size_t llm__x_tile_bytes(int64_t n, int64_t cols) {
    return (size_t)(llm__stripes(cols) * LLM__X_BYTES * llm__tile_height(n));
}

/* ---- The plan ------------------------------------------------------------------------------- */

/* How a stage uses a buffer, or how stages used it since the last barrier */
enum {
    LLM__READ = 1,
    LLM__WRITTEN = 2,
    LLM__OWN = 4 /* the thread reads its own copy */
};

typedef struct llm__planner {
    const llm__cpu *cpu;
    const llm_program *program;
    int rows;            /* maximum rows of a step in this class */
    llm__stage *stages;  /* (n_stages) */
    int n_stages;
    uint8_t *touched;    /* (n_buffers + 1) uses since the last barrier; last entry: `rounded` */
    uint8_t *touches;    /* (n_buffers + 1) uses by the stage being planned */
    int own;             /* the buffer that each thread has its own copy of; -1: none */
    int rounded;         /* the buffer whose rounded rows are in llm__cpu.rounded; -1: none */
    int group;           /* values per scale in `rounded` */
    bool rounded_own;    /* each thread has its own rounded rows */
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
 * that it reads or writes, or read a buffer that it writes. No other thread writes a thread's own
 * copy, so reading the copy needs no barrier. (Writing own copies counts as writing the buffer,
 * since the buffer is the first thread's copy.) */
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
                               p->cpu->n_threads > 1 && op->out != op->in[0] &&
                               p->rows <= LLM__X_TILE && bytes <= LLM__OWN_X_BYTES;
    llm__plan_touch(p, op);
    llm__plan_add(p, stage);
    if (stage.each) p->own = op->out;
}

/* Plan a product. If its weights are multiplied as integers, a stage before it rounds its input,
 * unless the input is already rounded. */
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
        int64_t work = p->rows * op->weight->cols,
                tiles = llm__divide_up(p->rows, llm__tile_height(p->rows));
        round.each = round.own_tiles = (p->program->fusions & LLM_FUSE_OWN_COPIES) &&
                                       p->cpu->n_threads > 1 && work < LLM__SHARED_WORK &&
                                       tiles * (int64_t)llm__x_tile_bytes(p->rows,
                                                                          op->weight->cols) <=
                                           LLM__OWN_TILES_BYTES - LLM__TILES_MARGIN;
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

/* True if no operation after `index` reads the buffer before another operation overwrites it */
static bool llm__is_dead(const llm_program *p, int buffer, int index) {
    for (int i = index + 1; i < p->n_ops; i++) {
        for (int k = 0; k < LLM_OP_INPUTS; k++)
            if (p->ops[i].in[k] == buffer) return false;
        if (p->ops[i].out == buffer) return !p->ops[i].add;
    }
    return true;
}

/* True if this operation and the next two are the products gate and up and their activation, and
 * can be fused. Then the buffer of up is never written. (Float kernels finish one result at a time,
 * so the activation would not be vectorized.) */
static bool llm__is_gated(const llm_program *p, int index, int end) {
    const llm_op *gate = &p->ops[index], *up = gate + 1, *act = gate + 2;
    if (!(p->fusions & LLM_FUSE_GATE) || index + 2 >= end || up->kind != LLM_OP_MATMUL ||
        act->kind != LLM_OP_SWIGLU)
        return false;
    return gate->in[0] == up->in[0] && gate->out == act->in[0] && up->out == act->in[1] &&
           act->out == gate->out && gate->out != up->out && gate->out != gate->in[0] &&
           !gate->add && !up->add && gate->weight->rows == up->weight->rows &&
           llm__layout_of(gate->weight->type).quads && llm__layout_of(up->weight->type).quads &&
           llm__x_group(gate->weight->type) == llm__x_group(up->weight->type) &&
           llm__is_dead(p, up->out, index + 2);
}

/* Divide a part of the program into stages, at most two per operation, for steps of up to `rows`
 * rows. Returns the number of stages. touched (2 x (n_buffers + 1)) is scratch memory. */
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
        } else if (op->kind == LLM_OP_MATMUL) {
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

/* Plan all variants of a program. */
static llm__plan *llm__plan_new(const llm__cpu *cpu, const llm_program *program,
                                const llm_limits *limits, llm_error *err) {
    const int most[2] = {2 * program->n_body, 2 * (program->n_ops - program->n_body)};
    const size_t n_deals = (size_t)(most[0] + most[1]), n_stages = n_deals * LLM__CLASSES * 2;
    llm__plan *plan = (llm__plan *)llm__new(1, sizeof *plan, "a plan", err);
    if (plan) plan->limits = *limits;
    if (!plan || !cpu->kernels) return plan; /* the reference executor needs no stages */
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

/* ---- How the items of a stage are dealt out ------------------------------------------------- */

/* An attention item is one kv head and up to 128 (token, head) rows of one sequence. Items are
 * counted from the end: the last rows of a prompt see the most positions, and long items should
 * start first. */
static int64_t llm__attention_chunks(const llm_op *op, const llm_batch *batch, int sequence) {
    int64_t group = op->attention.n_heads / op->attention.n_kv_heads;
    return llm__divide_up(batch->seq_count[sequence] * group, LLM__QUERY_ROWS);
}

static void llm__deal_attention(const llm__step *step, const llm_op *op, llm__deal *deal) {
    const llm_batch *batch = step->batch;
    for (int s = 0; s < batch->n_sequences; s++) {
        if (batch->seq_count[s] < 1) continue;
        int last = batch->positions[batch->seq_first[s] + batch->seq_count[s] - 1];
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
    if (cpu->n_threads > 1 && deal->n >= 2 * LLM__X_TILE * cpu->n_threads &&
        share * (int64_t)sizeof(float) < 4096) {
        /* Each thread's part of a result row would be shorter than a page, and the threads'
         * prefetchers would take cache lines from each other. So items are rows of x. */
        deal->n_per_item = llm__share_of_rows(cpu, deal->n);
        deal->items = llm__divide_up(deal->n, deal->n_per_item);
    } else {
        /* Each thread gets one long run of rows of the matrix, because a new stream from memory
         * starts slowly. The rest of a large matrix is dealt out in small items, so that all
         * threads finish together. */
        bool small = work < LLM__LARGE_WORK || cpu->n_threads == 1;
        deal->first_rows = small ? llm__divide_up(share, LLM__PANEL) * LLM__PANEL
                                 : share * 15 / 16 / 64 * 64;
        deal->more_rows = 4 * LLM__PANEL;
        int64_t rest = w->rows - deal->first_rows * cpu->n_threads;
        deal->items = rest >= 0 ? cpu->n_threads + llm__divide_up(rest, deal->more_rows)
                                : llm__divide_up(w->rows, deal->first_rows);
    }
}

/* Deal out an operation whose items are rows of activations. The factors (work per value) are
 * rough: they only decide which stages are shared. */
static void llm__deal_rows(const llm__step *step, const llm_op *op, llm__deal *deal) {
    const llm_attention_shape *a = &op->attention;
    int64_t width = op->out >= 0 ? step->program->buffers[op->out].width
                                 : (int64_t)(a->n_heads + 2 * a->n_kv_heads) * a->head_dim;
    int factor = 20;
    if (op->kind == LLM_OP_EMBED) factor = 50;
    if (op->kind == LLM_OP_ROPE_ANGLES) factor = 300;
    if (op->kind == LLM_OP_RMSNORM || op->kind == LLM_OP_GATHER_ROWS) factor = 8;
    if (op->kind == LLM_OP_ROPE_STORE || op->kind == LLM_OP_SWIGLU) factor = 30;
    deal->amount = (double)factor * (double)deal->n * (double)width;
    deal->n_per_item = llm__share_of_rows(step->cpu, deal->n);
    if (op->kind == LLM_OP_SWIGLU) { /* items are runs of values, to share even a single row */
        deal->n *= width;
        deal->n_per_item = llm__divide_up(deal->n, 64 * step->cpu->n_threads) * 64;
    }
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
    else if (stage->op->kind == LLM_OP_MATMUL) llm__deal_matmul(cpu, stage, deal);
    else if (stage->op->kind == LLM_OP_ATTENTION) llm__deal_attention(step, stage->op, deal);
    else llm__deal_rows(step, stage->op, deal);
    /* A small product is also shared if the stage before it is, with no barrier between them. */
    bool beside = stage->op->kind == LLM_OP_MATMUL && !stage->barrier && ahead && ahead->shared;
    deal->shared = !stage->each && deal->items > 1 && cpu->n_threads > 1 &&
                   (deal->amount >= LLM__SHARED_WORK || beside);
}

/* ---- The work of an item -------------------------------------------------------------------- */

/* The first thread's own copy is the shared buffer. The copies of the other threads are at the end
 * of their scratch memory, and are valid until the run ends. */
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

/* Round some rows of x into tiles, or some columns of one tile. */
static void llm__round_item(const llm__step *step, const llm__deal *deal, int64_t item,
                            void *scratch) {
    const llm__cpu *cpu = step->cpu;
    const llm__stage *stage = deal->stage;
    const llm_weight *w = stage->op->weight;
    const float *x = llm__own_x(cpu, stage->own_x, llm__in(step, stage->op, 0), scratch);
    char *tiles = llm__own_tiles(cpu, stage->own_tiles, cpu->rounded, scratch);
    int64_t cols = w->cols, stripes = llm__stripes(cols), part = item % deal->parts,
            height = llm__tile_height(deal->n);
    int64_t groups = llm__divide_up(stripes, LLM__SPAN / 2),
            begin = groups * part / deal->parts * (LLM__SPAN / 2);
    int64_t end = llm__min(groups * (part + 1) / deal->parts * (LLM__SPAN / 2), stripes);
    int64_t row = item / deal->parts * deal->n_per_item,
            end_row = llm__min(row + deal->n_per_item, deal->n);
    for (; row < end_row; row += height)
        cpu->kernels->round_rows(x + row * cols, cols, llm__x_group(w->type), (int)height,
                                 (int)llm__min(height, deal->n - row), begin, end,
                                 tiles + (size_t)(row / height) * llm__x_tile_bytes(deal->n, cols));
}

/* True if matrix tiles multiply n rows of x faster than vector registers do. q6_K has two scales
 * per block, so its tiles always take 32 rows. For 17 to 24 rows, vector registers unpack 4-bit
 * weights fast enough to beat two tiles, the second of which would be half empty. */
static bool llm__tiles_pay(llm__layout l, int64_t n) {
    if (l.quads == 4 && n > LLM__X_TILE && n <= LLM__X_TILE + 8) return false;
    return n > (l.quads == 6 ? 12 : 8);
}

/* The kernel's arguments for a product with all rows of x */
static llm__matmul_args llm__matmul_args_of(const llm__step *step, const llm__deal *deal,
                                          const llm_op *op, void *scratch) {
    const llm__cpu *cpu = step->cpu;
    const llm__stage *stage = deal->stage;
    const llm_weight *w = op->weight;
    llm__matmul_args args;
    memset(&args, 0, sizeof args);
    args.w = w;
    args.x = llm__own_x(cpu, stage->own_x, llm__in(step, op, 0), scratch);
    args.bias = llm__vector(op->bias);
    args.add = op->add;
    args.n = (int)deal->n;
    args.out = llm__out(step, stage->before ? stage->before : op);
    args.tile_bytes = cpu->tile_bytes;
    args.x_tiles = llm__own_tiles(cpu, stage->own_tiles, cpu->rounded, scratch);
    if (!llm__layout_of(w->type).quads) return args;
    args.tiles = cpu->isa >= LLM_ISA_AMX && llm__tiles_pay(llm__layout_of(w->type), deal->n);
    args.height = llm__tile_height(deal->n);
    args.x_tile_bytes = llm__x_tile_bytes(deal->n, w->cols);
    return args;
}

/* Multiply some rows of x by the matrix, or all rows of x by some rows of the matrix. Every few
 * panels need all rows of x, so a long prompt is cut into parts that stay in the L2 cache. */
static void llm__matmul_item(const llm__step *step, const llm__deal *deal, int64_t item,
                             void *scratch) {
    const llm__cpu *cpu = step->cpu;
    const llm__stage *stage = deal->stage;
    llm__matmul_args args = llm__matmul_args_of(step, deal, stage->op, scratch), gate = args;
    int64_t first = 0, rows = args.w->rows, x_row = 0, x_end = args.n, together = args.n;
    if (stage->before)
        gate = llm__matmul_args_of(step, deal, stage->before, scratch), args.gate = true;
    if (deal->n_per_item > 0) {
        x_row = item * deal->n_per_item;
        x_end = llm__min(x_row + deal->n_per_item, args.n);
    } else {
        int64_t large = llm__min(item, cpu->n_threads);
        first = large * deal->first_rows + (item - large) * deal->more_rows;
        rows = item < cpu->n_threads ? deal->first_rows : deal->more_rows;
    }
    if (args.w->packed) { /* parts of about the same size, in whole pairs of tiles */
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
        /* With a gate, limit the rows of the matrix so that the gate's results stay in the L2
         * cache. */
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
    /* This choice must not depend on the batch, so that all rows of a sequence are computed
     * alike. */
    args.tiles = cpu->isa >= LLM_ISA_AMX && args.cache->type == LLM_F16 &&
                group >= LLM__SHARING_HEADS;
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
    cpu->kernels->attention(&args, sequence, kv_head, (int)first,
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
    case LLM_OP_EMBED: llm__embed(step->batch, op->weight, first, end, out); break;
    case LLM_OP_ROPE_ANGLES: llm__rope_angles(step->batch, op, first, end, out); break;
    case LLM_OP_RMSNORM: {
        int64_t at = first * op->weight->cols;
        out = llm__own_x(cpu, deal->stage->own_x, out, scratch);
        cpu->kernels->rmsnorm(x + at, llm__vector(op->weight), (int)(end - first),
                              (int)op->weight->cols, op->epsilon, out + at);
        break;
    }
    case LLM_OP_ROPE_STORE: {
        llm__rope_args args = llm__rope_args_of(step, op);
        cpu->kernels->rope_and_store(&args, (int)first, (int)end, 0, op->attention.n_kv_heads);
        break;
    }
    case LLM_OP_SWIGLU:
        cpu->kernels->swiglu(x + first, llm__in(step, op, 1) + first, end - first, out + first);
        break;
    case LLM_OP_GATHER_ROWS:
        llm__gather_rows(x, step->batch->logit_rows + step->first,
                         step->program->buffers[op->out].width, first, end, out);
        break;
    case LLM_OP_GATHER_COLUMNS: llm__gather_columns(x, op->weight, first, end, out); break;
    default: break; /* matmul and attention have their own functions */
    }
}

static void llm__do_item(const llm__step *step, const llm__deal *deal, int64_t item,
                         void *scratch) {
    if (deal->stage->rounds) llm__round_item(step, deal, item, scratch);
    else if (deal->stage->op->kind == LLM_OP_MATMUL) llm__matmul_item(step, deal, item, scratch);
    else if (deal->stage->op->kind == LLM_OP_ATTENTION)
        llm__attention_item(step, deal, item, scratch);
    else llm__rows_item(step, deal, item, scratch);
}

/* ---- A run ---------------------------------------------------------------------------------- */

/* Wait until `arrived`, the count of arrivals at this and all earlier barriers, is `all`. Adds the
 * seconds after the first LLM__SPINS polls to *waited. */
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

/* For a profile. Each call of llm__lap_begins ends the previous lap: the time since the previous
 * call is charged to the operation that was passed then. deal is NULL at the end of the run. */
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
    /* true if threads other than the first have worked since the last barrier */
    bool together = false;
    /* true if a barrier is due; it is delayed while only the first thread has work */
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
        if (own == deal->items) continue; /* there is at most one item per thread */
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

/* Run these stages, on all threads if there is enough work. */
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

/* Deal out the stages of a part, and return their number. If the last run had the same variant and
 * number of rows, only the deals of attention change. (Cache lines that are not written stay valid
 * in the other cores.) */
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

/* True if the program is prepared for steps as large as this one */
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
               batch->positions[batch->seq_first[s] + batch->seq_count[s] - 1] <
                   limits->max_context;
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
    if (part & LLM_HEAD) { /* its deals follow those of the body, so one run does both */
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

/* ---- Prepare -------------------------------------------------------------------------------- */

/* Reserve scratch memory for each thread, large enough for each of these: a tile of unpacked
 * weights that fits in the L2 cache (or four rows, if that is more); packed panels and matrix
 * tiles; attention in tiles; all scores of a query (naive attention). The thread's own copies
 * follow. Memory never shrinks, so programs that were prepared earlier still fit. */
static bool llm__cpu_reserve(llm__cpu *cpu, const llm_program *program, const llm_limits *limits,
                             llm_error *err) {
    int64_t max_cols = 1, head_dim = 1;
    for (int i = 0; i < program->n_ops; i++) {
        const llm_op *op = &program->ops[i];
        if (op->kind == LLM_OP_MATMUL) max_cols = llm__max(max_cols, op->weight->cols);
        if (op->kind == LLM_OP_ATTENTION) head_dim = llm__max(head_dim, op->attention.head_dim);
    }
    if (max_cols > INT64_MAX / 1024)
        return llm__fail(err, LLM_ERROR_ARGUMENT, "cpu: a matrix of %lld columns is too wide",
                         (long long)max_cols);
    int64_t rows = llm__max(limits->max_tokens, limits->max_logits);
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
    uint64_t all_scratch, rounded = 0;
    bool fits = llm__multiply(scratch, (uint64_t)cpu->n_threads, &all_scratch) &&
                all_scratch <= SIZE_MAX / 2;
    if (cpu->kernels) /* whole tiles of x */
        fits = fits &&
               llm__multiply((uint64_t)llm__stripes(max_cols) * LLM__X_BYTES,
                             (uint64_t)rows + LLM__X_TILE, &rounded) &&
               (rounded += LLM__TILES_MARGIN) <= SIZE_MAX / 2;
    if (!fits)
        return llm__fail(err, LLM_ERROR_MEMORY,
                         "cpu: scratch memory for such a batch is out of reach");
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

/* ---- The backend ---------------------------------------------------------------------------- */

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
 * 256 KB has 256 times the size of that weight. */
typedef struct llm__slab {
    char *memory;
    size_t bytes, used;
    int64_t n_weights; /* number of weights in the slab */
} llm__slab;

static void *llm__slab_take(llm__cpu *cpu, uint64_t bytes, llm_error *err) {
    const uint64_t usual = bytes < 256 << 10 ? bytes << 8 : 64 << 20;
    llm__slab *last = cpu->n_slabs > 0 ? &cpu->slabs[cpu->n_slabs - 1] : NULL;
    bytes = (bytes + LLM__ALIGNMENT - 1) / LLM__ALIGNMENT * LLM__ALIGNMENT;
    if (!last || last->bytes - last->used < bytes) {
        llm__slab *slabs = (llm__slab *)llm__grow(cpu->slabs, cpu->n_slabs, &cpu->slab_capacity,
                                                  sizeof *slabs, "the list of slabs", err);
        if (!slabs) return NULL;
        cpu->slabs = slabs;
        last = &slabs[cpu->n_slabs];
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
        return llm__fail(err, LLM_ERROR_MEMORY, "cpu: a matrix of %lld x %lld is out of reach",
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

/* Round n up: to a power of two if n <= 8, to a multiple of 8 if n < 128, otherwise to a multiple
 * of an eighth of the largest power of two <= n. From 64 on, at most an eighth is added, and there
 * are only a few dozen sizes. */
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
