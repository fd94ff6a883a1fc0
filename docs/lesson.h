/* lesson.h - what the lessons share.
 *
 * A lesson is a function like any command's: it parses its options, computes, and shows. What it
 * shows goes through four calls, so that one text serves the terminal, --json and --png:
 *
 *     say        a sentence                             (not in JSON)
 *     fact       one number under a name                (only in JSON)
 *     show_table rows of text and numbers               (in JSON an array of objects)
 *     show_plot  a plot as text, kept for the picture   (not in JSON)
 *
 * All numbers are computed while you wait, by the engine and the model at hand. */
#ifndef LESSON_H
#define LESSON_H
#include "cli.h"
#include "plot.h"

typedef struct lesson {
    const command *self;
    const char *model, *png;   /* options */
    bool json;
    llm_engine_options engine; /* with the threads of --threads */
    char *path;
    llm_model *loaded;
    plot *plots;               /* (n_plots) shown so far */
    int n_plots;
} lesson;

#define LESSON_OPTIONS(l) \
    MODEL_OPTION((l).model), THREADS_OPTION((l).engine.n_threads), \
    {0, "png", "FILE", TEXT, &(l).png, 0, 0, \
     "write the picture too, as a PNG file"}, JSON_OPTION((l).json)

/* ---- Showing, and working for a lesson --------------------------------------------------- */

enum { LESSON_WIDTH = 79 };

typedef struct column {
    const char *key;    /* in JSON */
    const char *title;  /* above the column */
    const char *format; /* of one double; "%s": a text */
} column;

typedef struct table {
    const column *columns;
    int n_columns, n_cells;
    char (*cells)[64]; /* as shown */
    double *numbers;   /* the same; NAN for texts */
} table;

typedef struct task { /* a request, and its output */
    llm_request request;
    int32_t *tokens;   /* (n) generated */
    double *seconds;   /* (n) from submitting to each */
    bool *accepted;    /* (n) by speculation */
    int n;
    double submitted;  /* on the clock */
    bool ended;
} task;

/* Parse the options and load the model that they name; without one, the bundled `model` (NULL: the
 * default). Returns PARSED, or the exit status. */
int lesson_begin(lesson *l, const command *self, const option *options, int n, int argc,
                 char **argv, const char *model);
/* Write the picture and free everything. good: the lesson succeeded. Returns the exit status. */
int lesson_end(lesson *l, bool good);

PRINTF(2, 3) void say(const lesson *l, const char *format, ...);
void fact(const lesson *l, const char *name, double value);
table new_table(const column *columns, int n);
/* Add a row: for each column a double, or a const char * if its format is "%s". NAN shows as an
 * empty cell. */
void add_row(table *t, ...);
void show_table(const lesson *l, table *t, const char *name); /* and free it */
/* Show a plot as text now, and keep it for the picture; keep_plot: only for the picture. */
void show_plot(lesson *l, plot *p);
void keep_plot(lesson *l, plot p);

/* The value of an option, if it was given (it is -1 otherwise); else `wanted`, limited to what the
 * model allows. */
int given_or(int given, int wanted, int least, int most);
/* Does the context have room for so many tokens? */
bool fits_context(const lesson *l, int prompt, int generated);
/* n tokens for prompts: the bundled tales from token `start` on, repeated if they are too short,
 * after BOS if the model wants one. NULL: failed. */
int32_t *lesson_tokens(const lesson *l, int start, int n);

task new_task(const int32_t *prompt, int n_prompt, int max_tokens);
void free_task(task *t);
bool submit_task(llm_engine *engine, task *t);
void take_task_event(const llm_event *event);
/* Run one step, and give its events to their tasks. 1: worked; 0: nothing to do; -1: failed. */
int step_tasks(llm_engine *engine);
/* Submit all tasks and run until they have ended. */
bool run_tasks(llm_engine *engine, task *tasks, int n);

/* The device of --device as a backend of the lesson's own, for lessons that call backends directly.
 * NULL: failed. */
llm_backend *lesson_device(const lesson *l);
/* An engine on the device of --device, or on the backend in the options. NULL: failed. */
llm_engine *lesson_engine(const llm_model *model, const llm_engine_options *options);
/* The text of a token, with spaces and line ends made visible. */
const char *token_text(const llm_tokenizer *t, int32_t id, char *out, size_t size);

/* ---- What lessons take from each other --------------------------------------------------- */

typedef struct kv_run { /* 03: one way of generating n tokens */
    int32_t *tokens;  /* (n) */
    double *seconds;  /* (n) when each was generated */
    double *computed; /* (n) tokens that the model had computed by then */
} kv_run;
kv_run new_kv_run(int n);
bool kv_without(llm_engine *engine, const int32_t *prompt, int n_prompt, int n, kv_run *out);

/* 05: bits per byte and perplexity on the beginning of the bundled text, in whole documents. */
bool lesson_perplexity(lesson *l, const llm_model *model, int bytes_of_text, double *bits,
                       double *perplexity_);
/* 05: the model with weights of another type, from a file that is removed with the model. */
llm_model *quantized_model(const char *path, llm_type type);

typedef struct prefill_row { /* 06: medians of the runs */
    double prompt, ttft, tpot;
} prefill_row;
bool prefill_measure(lesson *l, llm_engine *engine, int n_prompt, int n, int runs,
                     prefill_row *row);

typedef struct roofline { /* 02: the limits of a device, for this model */
    double memory; /* bytes a second */
    double cached; /* bytes a second, of what stays in the processor's cache */
    double peak;   /* operations a second */
    bool fits;     /* the weights stay in the processor's cache */
} roofline;
bool roofline_measure(const lesson *l, llm_backend *device, roofline *roof);

/* ---- The lessons ------------------------------------------------------------------------- */

extern const command memory_lesson, roofline_lesson, program_lesson, kv_lesson, attention_lesson,
    int4_lesson, prefill_lesson, batching_lesson, paged_lesson, prefix_lesson, speculation_lesson,
    kernel_lesson, tokens_lesson, sampling_lesson, cpu_lesson;
#endif
