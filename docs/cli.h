/* cli.h - functions shared by the commands of `llm`: output, text and files, JSON writing, options,
 * and creating an engine from the options. cli.c implements it.
 *
 * A command is a function that parses its options (parse), does its work, and returns the exit
 * status: 0; FAILED, if it failed or was stopped; MISUSED, if its arguments were wrong. A function
 * that returns false or FAILED has already printed the reason. */
#ifndef CLI_H
#define CLI_H
#include "../llm.h"

#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
#if defined(__GNUC__)
#define PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define PRINTF(string, first)
#endif

enum { PARSED = -1, FAILED = 1, MISUSED = 2 };

extern const char *program_path;              /* argv[0] */
extern volatile sig_atomic_t stop_requested;  /* number of the signal received, or 0 */

/* The first Ctrl-C or SIGTERM requests an orderly end; a second one ends the process. A closed pipe
 * or a file at its size limit makes a write fail, and does not end the process. */
void set_signals(void);
void forget_interrupt(void); /* the next Ctrl-C is the first one again */

/* ---- Text -------------------------------------------------------------------------------- */

typedef struct text { /* a growing array of bytes; initialize with zeros */
    char *data;
    size_t length, capacity;
} text;

void append(text *t, const char *bytes, size_t n);

/* realloc that exits if there is no memory. */
void *resize(void *memory, size_t bytes);

/* ---- Output ------------------------------------------------------------------------------
 * Standard output is buffered. After the first failed write (disk full, closed pipe), nothing
 * more is written, and a long computation should end. */
extern int output_error;  /* errno of the failed write; 0: none */
extern text *captured;    /* if not NULL, output is appended to this text instead */
bool flush_output(void);  /* false: output_error is set */

PRINTF(1, 2) void put(const char *format, ...); /* at most 1,023 bytes */
void put_text(const char *text);
void put_bytes(const char *bytes, size_t n);
/* Put text from a model or a file. On a terminal, control characters are replaced by `?`. */
void put_foreign(const char *text, size_t length);
void put_coloured(const char *colour, const char *text, size_t length);

extern const char dim[], green[]; /* escape sequences */
bool is_terminal(int descriptor);
bool in_colour(int descriptor);

/* Show a progress bar on standard error or, if that is not a terminal, a line every 10 seconds (or
 * LLM_PROGRESS_SECONDS). done: completed share; NAN if the total is unknown; negative to erase the
 * bar. */
void show_progress(const char *what, double done, const char *note);

/* "1.5 GiB" */
const char *human_bytes(double bytes, char *buffer, size_t size);
#define HUMAN(bytes) human_bytes((double)(bytes), (char[32]){0}, 32)

/* ---- Errors: on standard error ------------------------------------------------------------- */
typedef struct command command;

PRINTF(1, 2) int fail(const char *format, ...);                           /* returns FAILED */
int fail_with(const llm_error *err);                                      /* returns FAILED */
PRINTF(2, 3) int misuse(const command *self, const char *format, ...);    /* returns MISUSED */

/* The engine's message, with options named as on the command line. */
typedef struct words { char text[sizeof ((llm_error *)0)->message + 64]; } words;
words our_words(const llm_error *err);

/* ---- JSON -------------------------------------------------------------------------------- */
void put_json(const char *data, size_t length); /* a string; a byte that is not UTF-8 is U+FFFD */
void put_json_text(const char *text);
void put_number(double x);                      /* null if it is not finite */
void put_ids(const int32_t *ids, int64_t n);    /* an array */
int utf8_length(const unsigned char *s, size_t n); /* length of the character at s; 0: not UTF-8 */
const char *skip_space(const char *p, const char *end); /* JSON's: space, tab, newline, return */
/* Read the token ids of a JSON array into *ids (n), which grows. False: it is not an array of
 * ids. */
bool json_ids(const llm_json_node *array, int32_t **ids, int64_t *n);

/* ---- Files ------------------------------------------------------------------------------- */
bool read_all(const char *path, text *t); /* "-": standard input */

typedef struct line_reader { /* reads lines of a file of any size; set `file` */
    int file;
    text buffer;
    size_t at;       /* offset in `buffer` of the first byte that is not returned yet */
    uint64_t number; /* number of the last returned line, from 1 */
    uint64_t offset; /* offset in the file of the end of that line */
    bool ended;
    bool torn;       /* whether the last line has no newline */
    int error;       /* errno of a failed read; 0: none */
} line_reader;

typedef enum line_state { LINE, NOT_YET, NO_MORE } line_state;

/* Return the next line, without its newline; valid until the next call. NOT_YET: the line has not
 * arrived, and may_wait is false. */
line_state next_line(line_reader *r, bool may_wait, const char **line, size_t *length);

bool temporary_file(char *name, size_t size); /* create an empty file in TMPDIR, or in /tmp */
/* False if `out` is not a plain file, or is the file `in` (NULL: none). */
bool may_write(const char *out, const char *in);
/* The path of a bundled file, or of the model to use (given NULL: the bundled one). Free it. */
char *bundled_path(const char *name);
char *model_path(const char *given);
#define DEFAULT_MODEL "models/tales-q4_0.gguf"

/* ---- Options -----------------------------------------------------------------------------
 * A command lists its options in a table, which determines parsing, checks and --help. */
typedef enum option_kind { /* each with the type that `value` points to */
    FLAG,   /* bool, set to true */
    OFF,    /* bool, set to false */
    TEXT,   /* const char * */
    TEXTS,  /* text_list: the option may be given several times */
    WHOLE,  /* int, from low to high */
    REAL,   /* float, from low to high */
    SEED,   /* seed_value */
    SIZE,   /* uint64_t, in bytes: 512M, 8G */
    TYPE,   /* llm_type */
    LIST,   /* int_list: whole numbers from low to high */
    RANGE,  /* int_range: LOW-HIGH, or one number for both */
    CHOICE, /* int: the index of the word in `argument`, where | separates the words */
    OMIT,   /* unsigned: bit i is cleared for word i of `argument`; the last word clears all bits */
    DEPTH   /* int, from low to high, or LLM_SPECULATE_AUTO */
} option_kind;

typedef struct seed_value {
    bool given;
    uint64_t value;
} seed_value;

typedef struct int_list {
    int *values, count;
} int_list;

typedef struct int_range {
    int low, high;
} int_range;

typedef struct text_list {
    const char **items;
    int count;
} text_list;

typedef struct option {
    char letter; /* short form; 0: none */
    const char *name;
    const char *argument; /* name of the argument in --help; NULL: no argument */
    option_kind kind;
    void *value;
    double low, high;
    const char *help;
} option;

struct command {
    const char *name, *summary, *usage;
    int (*run)(const command *self, int argc, char **argv);
    const char *notes; /* the rest of --help, with examples */
};

/* Set the values of the options. The other arguments, *argc of them and at most max_arguments,
 * remain in argv. Returns PARSED, or the exit status if the command must end: after --help, or
 * after a mistake. */
int parse(const command *self, const option *options, int n_options, int *argc, char **argv,
          int max_arguments);
bool parse_value(const option *o, const char *s);
bool parse_list(const char *s, double low, double high, int_list *list);

/* Describe in words which values the option accepts. */
const char *wanted(const option *o, char *buffer, size_t size);
#define WANTED(option) wanted(option, (char[160]){0}, 160)

/* Finds the name that is most like a misspelt one: call consider for each name. Then `best` is that
 * name, or NULL. */
typedef struct suggestion {
    const char *typed, *best;
    int distance;
} suggestion;
void consider(suggestion *s, const char *name);

#define MODEL_OPTION(value) \
    {'m', "model", "FILE", TEXT, &(value), 0, 0, \
     "GGUF file or Hugging Face folder (default: " DEFAULT_MODEL ")"}
#define DEVICES "auto|cpu|cuda|emulated"
#define ISAS "reference|plain|dotprod|avx2|avx512|amx" /* the words of enum llm_isa, in its order */
#define FUSIONS "gate|rope|own-copies|side-by-side|all" /* LLM_FUSE_..., in their order */
#define DEVICE_OPTIONS \
    {0, "device", DEVICES, CHOICE, &chosen.device, 0, 0, \
     "where to compute (default auto: an NVIDIA GPU if there is one, or the CPU)"}, \
    {0, "isa", ISAS, CHOICE, &chosen.isa, 0, 0, \
     "CPU: the best instruction set to use (default amx: the best that it has)"}, \
    {0, "no-packed-weights", NULL, OFF, &chosen.pack_weights, 0, 0, \
     "CPU: keep no second copy of the weights in the kernels' order (slower)"}, \
    {0, "no-fusion", FUSIONS, OMIT, &chosen.fusions, 0, 0, \
     "do not fuse these operations (separated by commas); same results, bit for bit"}, \
    {0, "gpu", "N", WHOLE, &chosen.gpu.device, 0, 1023, "GPU: which one (default 0)"}, \
    {0, "gpu-memory", "SHARE", REAL, &chosen.memory_share, 0.01, 1, \
     "GPU: share of its free memory for keys and values (default 0.9)"}, \
    {0, "no-graphs", NULL, OFF, &chosen.gpu.graphs, 0, 0, "GPU: launch kernels one by one"}, \
    {0, "no-fused", NULL, OFF, &chosen.gpu.fused, 0, 0, "GPU: one kernel for each operation"}, \
    {0, "no-split-attention", NULL, OFF, &chosen.gpu.split_attention, 0, 0, \
     "GPU: one thread block for each sequence, however long it is"}, \
    {0, "overlap", NULL, FLAG, &chosen.gpu.overlap, 0, 0, \
     "GPU: let a kernel begin before the previous one has ended (Hopper; not measured yet)"}, \
    {0, "plain-kernels", NULL, FLAG, &chosen.gpu.plain, 0, 0, \
     "GPU: plain kernels, for comparison"}, \
    {0, "deterministic", NULL, FLAG, &chosen.gpu.deterministic, 0, 0, \
     "GPU: the same bits whatever else is in the batch"}, \
    {0, "trust-gpu", NULL, FLAG, &chosen.gpu.trust, 0, 0, \
     "GPU: do not compare its fast kernels with plain ones first"}, \
    {0, "host-sampling", NULL, FLAG, &chosen.host_sampling, 0, 0, "GPU: choose tokens on the CPU"}
/* An option of every command that creates an engine. */
#define THREADS_OPTION(value) \
    {'t', "threads", "N", WHOLE, &(value), 0, 4096, \
     "CPU threads (default 0: one per processor)"}, DEVICE_OPTIONS
#define JSON_OPTION(value) \
    {0, "json", NULL, FLAG, &(value), 0, 0, "print the result as JSON"}
/* Used as options (_ is "-") and as keys of an input line of llm batch (_ is "_"). */
#define SAMPLING_OPTIONS(s, _) \
    {0, "temperature", "T", REAL, &(s).temperature, 0, 100, \
     "0: always the most likely token; 1: the model's probabilities (default 0.8)"}, \
    {0, "top" _ "k", "K", WHOLE, &(s).top_k, 0, INT_MAX, \
     "sample from the K most likely tokens (default 0: all)"}, \
    {0, "top" _ "p", "P", REAL, &(s).top_p, 1e-6, 1, \
     "sample from the fewest tokens whose probabilities add up to P (default 0.95)"}, \
    {0, "min" _ "p", "P", REAL, &(s).min_p, 0, 1, \
     "sample from tokens at least P times as likely as the most likely one (default 0)"}, \
    {0, "repetition" _ "penalty", "X", REAL, &(s).repetition_penalty, 0.01, 100, \
     "make recent tokens less likely (default 1: no)"}, \
    {0, "penalty" _ "window", "N", WHOLE, &(s).penalty_window, 0, INT_MAX, \
     "how many tokens count as recent (0: all; default 64)"}
#define STOP_OPTION(value) \
    {0, "stop", "TEXT", TEXTS, &(value), 0, 0, \
     "end before this text (may be given several times)"}
#define SPECULATION_OPTIONS(s) \
    {'d', "draft", "FILE", TEXT, &(s).path, 0, 0, \
     "a small model with the same vocabulary, which proposes tokens"}, \
    {0, "speculate", "K|auto", DEPTH, &(s).depth, 0, MOST_PROPOSALS, \
     "tokens to propose in each step (default: as many as pay off)"}, \
    {0, "branches", "N", WHOLE, &(s).branches, 1, LLM_MOST_BRANCHES, \
     "propose up to N tokens for the same position: a tree (default: 1, or as " \
     "many as pay off with --speculate auto)"}, \
    {0, "lookup", NULL, FLAG, &(s).lookup, 0, 0, \
     "propose what followed the same words before; needs no draft"}
#define NAIVE_OPTION(e) \
    {0, "naive-attention", NULL, FLAG, &(e).naive_attention, 0, 0, \
     "use the plain attention loop, for comparison"}
#define CACHE_TYPE_OPTION(e) \
    {0, "cache-type", "f32|f16", CHOICE, &(e).cache_type, 0, 0, \
     "type of keys and values (default f16)"}
_Static_assert(LLM_F32 == 0 && LLM_F16 == 1 && sizeof(llm_type) == sizeof(int),
               "the choices of --cache-type have the values of llm_type");
#define CACHE_OPTION(e, fallback) \
    {0, "cache-memory", "SIZE", SIZE, &(e).cache_bytes, 0, 0, \
     "memory for keys and values (default: " fallback ", up to 1G; GPU: see --gpu-memory)"}
#define BLOCK_OPTION(e) \
    {0, "block-size", "N", WHOLE, &(e).block_size, 1, 1 << 20, \
     "tokens in a block of the cache (default 16)"}
#define STEP_OPTION(e) \
    {0, "max-batch-tokens", "N", WHOLE, &(e).max_batch_tokens, 1, 1 << 20, \
     "tokens in a step (default 512)"}
#define PREEMPTIONS "recompute|swap" /* the words of enum llm_preempt, in their order */
#define SCHEDULE_OPTIONS(e) \
    {0, "max-sequences", "N", WHOLE, &(e).max_sequences, 1, 1 << 16, \
     "sequences that run at the same time (default 16)"}, \
    STEP_OPTION(e), \
    {0, "preempt", PREEMPTIONS, CHOICE, &(e).preempt, 0, 0, \
     "if blocks run out: recompute a sequence later (default), or copy it to host memory"}, \
    {0, "no-prefix-cache", NULL, OFF, &(e).prefix_cache, 0, 0, \
     "do not share blocks between prompts that begin alike"}, \
    {0, "no-chunked-prefill", NULL, OFF, &(e).chunked_prefill, 0, 0, \
     "compute each prompt in one step"}

#define TRACE_OPTION(path) \
    {0, "trace", "FILE", TEXT, &(path), 0, 0, \
     "write the decisions of each step as a Chrome trace (for Perfetto)"}
/* ---- Models and engines --------------------------------------------------------------------
 * The device options fill `chosen`, which main sets to its defaults. */
enum { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA, DEVICE_EMULATED };

typedef struct device_choice {
    int device;         /* one of DEVICE_... */
    int isa;            /* one of llm_isa */
    llm_gpu_options gpu;
    float memory_share; /* share of the GPU's free memory to use for the cache */
    bool host_sampling, pack_weights;
    bool quiet;         /* do not print how an engine uses a GPU's memory */
    unsigned fusions;   /* set of LLM_FUSE_... */
} device_choice;
extern device_choice chosen;

/* Load a model and its draft (draft_path NULL: none). */
bool load_models(const char *path, const char *draft_path, llm_model **model, llm_model **draft);
/* Open the device that --device names, with n_threads of the options. */
llm_backend *open_device(const llm_engine_options *options, llm_error *err);
/* Create an engine on this device; free_engine releases both. */
llm_engine *create_engine(const llm_model *model, const llm_engine_options *options,
                          llm_error *err);
void free_engine(llm_engine *engine);

/* Return the number of token ids of a prompt; release *ids with llm_free. An empty prompt becomes
 * BOS alone, or no ids if there is no BOS. -1: failed. */
int64_t prompt_ids(const llm_tokenizer *t, const text *words, bool special, int32_t **ids);

/* The output of a request: a sample, or several. */
typedef struct generated_token {
    int32_t id;
    float logprob;
    bool accepted;   /* whether the token was an accepted proposal */
    size_t text_end; /* end of its text in the text of the sample */
} generated_token;

typedef struct sample {
    text text;
    generated_token *tokens; /* (n_tokens) */
    int n_tokens;
    llm_finish finish;
    char error[160]; /* LLM_FINISH_ERROR: see llm_event; else empty */
    size_t n_shown;     /* bytes of text already on the screen */
    int n_shown_tokens; /* tokens whose text is on the screen completely */
} sample;

sample *make_samples(int n);
void free_samples(sample *samples, int n);
void take_event(sample *s, const llm_event *event); /* add the event to the sample */

/* Settings of speculation in the options. */
enum { NO_DEPTH = -2, MOST_PROPOSALS = 64 };

typedef struct speculation {
    const char *path; /* path of the draft model; NULL: none */
    int depth;        /* NO_DEPTH: not given */
    int branches;     /* llm_request.branches */
    bool lookup;
} speculation;

int check_speculation(const command *self, const speculation *s); /* PARSED, or MISUSED */
void apply_speculation(const speculation *s, llm_engine_options *engine, llm_request *request);

/* A trace (docs/trace.h), written to `path`; with path NULL, all of these do nothing. */
typedef struct trace_writer trace_writer;
int check_trace_name(const command *self, const char *path); /* PARSED, or MISUSED */
/* Only an old trace or an empty file is overwritten, and never `output` (NULL: none). */
bool check_trace(const char *path, const char *output);
bool open_trace(trace_writer **trace, const char *path, llm_engine_options *options);
void trace_engine(trace_writer *trace, const llm_engine *engine); /* once the engine is created */
bool close_trace(trace_writer *trace, const char *path);

/* ---- Figures ------------------------------------------------------------------------------ */
double acceptance(const llm_statistics *s); /* share of the proposals; 0: unknown */
double tokens_per_step(const llm_statistics *s);
void print_speculation(const llm_statistics *s);
void print_host_time(const llm_statistics *s); /* CPU time in a step of a GPU */
uint64_t chance_seed(void); /* different each time; at most six digits */

double median(double *x, int n); /* sorts x */
/* The smallest value v for which at least the share p of the values is <= v. Sorts x. */
double percentile(double *x, int n, double p);
uint64_t hash_bytes(uint64_t hash, const char *data, size_t n); /* FNV-1a */

typedef struct type_sum { /* sums over tensors */
    uint64_t tensors, values, bytes;
} type_sum;
type_sum sum_type(const llm_file *file, const llm_type_info *type); /* type NULL: all types */
void put_type_sum(const char *name, type_sum sum);                  /* prints a line */
uint64_t tensor_values(const llm_tensor *t);
double bits_per_value(uint64_t bytes, uint64_t values); /* values 0: 0 */
size_t row_bytes(llm_type type, uint64_t values);

double measure_bandwidth(int threads);  /* bytes per second read by n threads */
double engine_bandwidth(const llm_engine *engine); /* bytes per second; 0: unknown (GPU) */
double processor_cache(void);           /* bytes of the largest cache; 0: unknown */

/* ---- The commands that are not in main.c ------------------------------------------------- */
extern const command perplexity_command, quantize_command, synth_command; /* models/ */
extern const command bench_command;                                       /* tests/bench.c */
extern const command batch_command, chat_command, serve_command;          /* docs/ */
extern const command lesson_command, ladder_command;                      /* docs/ */
#endif
