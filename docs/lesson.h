/* lesson.h - functions that the lessons share.
 *
 * A lesson is a command: it parses its options, computes and shows its results. Results go through
 * four calls, so that the same code serves the terminal, --json, --svg and --png:
 *
 *     say        a sentence                             (not in JSON)
 *     fact       one number under a name                (only in JSON)
 *     show_table rows of text and numbers               (in JSON an array of objects)
 *     show_plot  a plot as text, kept for the picture   (not in JSON)
 *
 * All numbers are computed live, by the engine and the chosen model. */
#ifndef LESSON_H
#define LESSON_H
#include "cli.h"
#include "plot.h"

typedef struct lesson {
    const command *self;
    const char *model, *svg, *png, *html; /* values of the options */
    bool json;
    llm_engine_options engine; /* n_threads is set by --threads */
    char *path;
    llm_model *loaded;
    plot *plots;               /* (n_plots) shown so far */
    scene *frames;             /* (n_frames) of the animation */
    int n_plots, n_frames;
} lesson;

#define LESSON_OPTIONS(l) \
    MODEL_OPTION((l).model), THREADS_OPTION((l).engine.n_threads), \
    {0, "svg", "FILE", TEXT, &(l).svg, 0, 0, \
     "write the plots to an SVG file, light or dark as its reader's system"}, \
    {0, "png", "FILE", TEXT, &(l).png, 0, 0, \
     "write the plots to a PNG file"}, JSON_OPTION((l).json)

#define HTML_OPTION(l) \
    {0, "html", "FILE", TEXT, &(l).html, 0, 0, \
     "write an animation, step by step, as a web page"}

/* ---- Output and work common to all lessons ----------------------------------------------- */

enum { LESSON_WIDTH = 79 };

typedef struct column {
    const char *key;    /* name in JSON */
    const char *title;  /* header in the terminal */
    const char *format; /* printf format for one double; "%s": a text */
} column;

typedef struct table {
    const column *columns;
    int n_columns, n_cells;
    char (*cells)[64]; /* (n_cells) the cells as printed */
    double *numbers;   /* (n_cells) the values; NAN for texts */
} table;

typedef struct task { /* a request and its output */
    llm_request request;
    int32_t *tokens;   /* (n) generated tokens */
    double *seconds;   /* (n) time from submission to each token */
    bool *accepted;    /* (n) whether the token was an accepted proposal */
    int n;
    double submitted;  /* time of submission, by llm_seconds() */
    bool ended;
} task;

/* Parse the options and load the model of -m or, without -m, the bundled `model` (NULL: the default
 * one). Returns PARSED, or the exit status. */
int lesson_begin(lesson *l, const command *self, const option *options, int n, int argc,
                 char **argv, const char *model);
/* Write the pictures and free everything. good: the lesson succeeded. Returns an exit status. */
int lesson_end(lesson *l, bool good);

PRINTF(2, 3) void say(const lesson *l, const char *format, ...);
void fact(const lesson *l, const char *name, double value);
table new_table(const column *columns, int n);
/* Add a row: for each column pass a double, or a const char * if its format is "%s". NAN is printed
 * as an empty cell. */
void add_row(table *t, ...);
void show_table(const lesson *l, table *t, const char *name); /* frees the table */
/* Print a plot as text and keep it for the picture; keep_plot: only keep it. */
void show_plot(lesson *l, plot *p);
void keep_plot(lesson *l, plot p);
/* Begin a frame of the animation, with its title; NULL: none is wanted (no --html). */
PRINTF(3, 4) scene *new_frame(lesson *l, double height, const char *format, ...);

/* Returns `given` or, if that is -1 (option not given), `wanted` limited to least .. most. */
int given_or(int given, int wanted, int least, int most);
/* Report an error and return false if the context is too short for a prompt and its output. */
bool fits_context(const lesson *l, int prompt, int generated);
/* Returns n tokens for prompts: the bundled tales from token `start` on, cyclically. The first
 * token is BOS if the model wants one. NULL: failed. */
int32_t *lesson_tokens(const lesson *l, int start, int n);

task new_task(const int32_t *prompt, int n_prompt, int max_tokens);
void free_task(task *t);
bool submit_task(llm_engine *engine, task *t);
void take_task_event(const llm_event *event);
/* Run one step and pass its events to their tasks. 1: a step ran; 0: nothing to do; -1: failed. */
int step_tasks(llm_engine *engine);
/* Submit all tasks and run steps until all have ended. */
bool run_tasks(llm_engine *engine, task *tasks, int n);

/* Create a backend for --device, owned by the lesson, for lessons that call backends directly.
 * NULL: failed. */
llm_backend *lesson_device(const lesson *l);
/* Create an engine on the backend in the options or, if there is none, on --device. NULL:
 * failed. */
llm_engine *lesson_engine(const llm_model *model, const llm_engine_options *options);
/* The text of a token; each control character, such as a line end, becomes a slash. */
const char *token_text(const llm_tokenizer *t, int32_t id, char *out, size_t size);

/* ---- Functions of one lesson that others use --------------------------------------------- */

typedef struct kv_run { /* 03: one way of generating n tokens */
    int32_t *tokens;  /* (n) */
    double *seconds;  /* (n) time from the start to each token */
    double *computed; /* (n) number of tokens computed up to each token */
} kv_run;
kv_run new_kv_run(int n);
bool kv_without(llm_engine *engine, const int32_t *prompt, int n_prompt, int n, kv_run *out);

/* 05: measure bits per byte and perplexity on the first whole documents of the bundled text. */
bool lesson_perplexity(lesson *l, const llm_model *model, int bytes_of_text, double *bits,
                       double *perplexity_);
/* 05: the same on an engine that perplexity_engine made. */
llm_engine *perplexity_engine(const lesson *l, const llm_model *model);
bool measure_perplexity(const llm_model *model, llm_engine *engine, int bytes_of_text, double *bits,
                        double *perplexity_);
/* 05: convert the model to another type, and load it from a temporary file. */
llm_model *quantized_model(const char *path, llm_type type);

typedef struct prefill_row { /* 06: medians over the runs */
    double prompt, ttft, tpot;
} prefill_row;
bool prefill_measure(lesson *l, llm_engine *engine, int n_prompt, int n, int runs,
                     prefill_row *row);

typedef struct roofline { /* 02: the limits of a device, for this model */
    double memory; /* bytes per second */
    double cached; /* bytes per second, for data in the processor's cache */
    double peak;   /* operations per second */
    bool fits;     /* whether the weights fit into the cache */
} roofline;
bool roofline_measure(const lesson *l, llm_backend *device, roofline *roof);

/* 17: one product in seven versions, counted and timed; rows or columns 0: the default. */
bool product_ladder(lesson *l, int rows, int columns);

/* ---- The lessons ------------------------------------------------------------------------- */

extern const command memory_lesson, roofline_lesson, program_lesson, kv_lesson, attention_lesson,
    int4_lesson, prefill_lesson, batching_lesson, paged_lesson, prefix_lesson, speculation_lesson,
    kernel_lesson, step_lesson, tokens_lesson, sampling_lesson, cpu_lesson, serving_lesson,
    block_lesson, weights_lesson;
#endif
