/* 19-serving.c - llm lesson serving: load against latency. See 19-serving.md.
 *
 * One plan of requests is served several times. Open loop: requests arrive at random times (a
 * Poisson process of a given rate), whether or not earlier ones have ended. Closed loop: each of a
 * number of clients sends its next request when its last one has ended. All times count from the
 * planned arrival of a request. */
#include "lesson.h"
#include "../tests/bench.h"

#include <poll.h>

enum { PLAN = 7 }; /* seed of all random numbers */
static const double loads[] = {0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.15, 1.3}; /* shares of the capacity */
static const int clients[] = {1, 2, 4, 8, 16, 32};
static const int budgets[] = {0, 512, 128, 32}; /* tokens in a step; 0: whole prompts */

typedef struct serving {
    int n, runs;              /* number of requests in each run; number of runs */
    int_range prompt, gen;    /* tokens per prompt and per answer */
    int long_prompt;          /* tokens of every fourth prompt in the last experiment */
    float slo_ttft, slo_tpot; /* the objective in milliseconds */
    llm_engine *engine;
    int32_t *tokens;          /* all prompts, one after another */
} serving;

typedef struct serving_task {
    task task;
    double arrival; /* seconds after the start */
} serving_task;

typedef struct serving_result {
    double seconds;               /* from the start to the last token */
    double requests, tokens;      /* served per second */
    double ttft[2], tpot[2];      /* seconds: p50 and p99 */
    double gap;                   /* seconds between two tokens of a request: p99 over all gaps */
    double in_flight;             /* mean number of requests that are waiting or running */
    double *first, *pace;         /* (n) each request's TTFT and TPOT */
} serving_result;

/* Draw the prompts and lengths, and the arrivals at `rate` requests per second (0: all arrive at
 * the start). Every rate gets the same requests in the same order, at other times. */
static void serving_plan(const serving *v, serving_task *tasks, double rate, bool with_long) {
    double clock = 0;
    const int32_t *prompt = v->tokens;
    for (int i = 0; i < v->n; i++) {
        int n_prompt = draw_range(v->prompt, PLAN, 1, (uint64_t)i);
        if (with_long && i % 4 == 2) n_prompt = v->long_prompt;
        /* the time between two arrivals of a Poisson process has an exponential distribution */
        if (rate > 0) clock -= log(1 - llm_random(PLAN, 0, (uint64_t)i)) / rate;
        tasks[i].task = new_task(prompt, n_prompt, draw_range(v->gen, PLAN, 2, (uint64_t)i));
        tasks[i].arrival = clock;
        prompt += n_prompt;
    }
}

static serving_result serving_summary(const serving *v, const serving_task *tasks, double seconds) {
    serving_result r = {.seconds = seconds, .requests = v->n / seconds};
    double *x = NULL, *gaps = NULL;
    size_t n_gaps = 0;
    r.first = resize(NULL, (size_t)v->n * sizeof *r.first);
    r.pace = resize(NULL, (size_t)v->n * sizeof *r.pace);
    x = resize(NULL, (size_t)v->n * sizeof *x);
    for (int i = 0; i < v->n; i++) {
        const task *t = &tasks[i].task;
        double last = t->seconds[t->n - 1];
        r.first[i] = t->seconds[0];
        r.pace[i] = t->n > 1 ? (last - t->seconds[0]) / (t->n - 1) : 0;
        r.tokens += t->n / seconds;
        r.in_flight += last / seconds;
        gaps = resize(gaps, (n_gaps + (size_t)t->n) * sizeof *gaps);
        for (int k = 1; k < t->n; k++) gaps[n_gaps++] = t->seconds[k] - t->seconds[k - 1];
    }
    for (int k = 0; k < 2; k++) {
        memcpy(x, r.first, (size_t)v->n * sizeof *x);
        r.ttft[k] = percentile(x, v->n, k ? 0.99 : 0.5);
        memcpy(x, r.pace, (size_t)v->n * sizeof *x);
        r.tpot[k] = percentile(x, v->n, k ? 0.99 : 0.5);
    }
    r.gap = percentile(gaps, (int)n_gaps, 0.99);
    free(gaps);
    free(x);
    return r;
}

/* Serve the planned requests. Open loop (n_clients 0): submit each at its arrival. Closed loop:
 * keep n_clients requests in the engine. */
static bool serving_loop(const serving *v, serving_task *tasks, int n_clients, double *seconds) {
    int next = 0, ended = 0, status = 1;
    double start = llm_seconds();
    llm_error err;
    llm_event event;
    while (ended < v->n && status >= 0 && !stop_requested) {
        double now = llm_seconds() - start;
        while (next < v->n && (n_clients ? next - ended < n_clients : tasks[next].arrival <= now)) {
            serving_task *t = &tasks[next++];
            if (n_clients) t->arrival = now;
            if (!submit_task(v->engine, &t->task)) return false;
            t->task.submitted = start + t->arrival; /* a late submission is part of the latency */
        }
        status = llm_step(v->engine, &err);
        if (status == 0 && next < v->n)
            poll(NULL, 0, (int)fmax(0, 1e3 * (tasks[next].arrival - now)));
        while (status > 0 && llm_next_event(v->engine, &event)) {
            take_task_event(&event);
            ended += event.finish != LLM_FINISH_NONE;
            if (event.error) return false;
        }
    }
    *seconds = llm_seconds() - start;
    return status >= 0 ? !stop_requested : !fail_with(&err);
}

static bool serving_once(const serving *v, double rate, int n_clients, bool with_long,
                         serving_result *r) {
    serving_task *tasks = resize(NULL, (size_t)v->n * sizeof *tasks);
    double seconds;
    serving_plan(v, tasks, rate, with_long);
    bool good = serving_loop(v, tasks, n_clients, &seconds);
    if (good) *r = serving_summary(v, tasks, seconds);
    for (int i = 0; i < v->n; i++) free_task(&tasks[i].task);
    free(tasks);
    return good;
}

static void serving_free(serving_result *results, int n) {
    for (int i = 0; i < n; i++) free(results[i].first), free(results[i].pace);
}

/* Of several runs, keep the one with the least mean latency, since other programs on the machine
 * only slow the engine down. */
static bool serving_run(const serving *v, double rate, int n_clients, bool with_long,
                        serving_result *r) {
    bool good = serving_once(v, rate, n_clients, with_long, r);
    for (int i = 1; i < v->runs && good; i++) {
        serving_result other;
        good = serving_once(v, rate, n_clients, with_long, &other);
        if (!good) {
            serving_free(r, 1);
            continue;
        }
        bool better = other.in_flight * other.seconds < r->in_flight * r->seconds;
        serving_free(better ? r : &other, 1);
        if (better) *r = other;
    }
    return good;
}

/* The number of requests that meet the objective for TTFT and TPOT. */
static int serving_in_time(const serving *v, const serving_result *r) {
    int n = 0;
    for (int i = 0; i < v->n; i++)
        n += r->first[i] * 1e3 <= (double)v->slo_ttft && r->pace[i] * 1e3 <= (double)v->slo_tpot;
    return n;
}

static const column serving_columns[] = {
    {"load_percent", "load", "%.0f"}, {"offered", "offered", "%.1f"},
    {"requests_per_second", "served", "%.1f"}, {"goodput", "good", "%.1f"},
    {"tokens_per_second", "tok/s", "%.0f"},
    {"in_flight", "in flight", "%.1f"},
    {"ttft_p50_ms", "TTFT p50", "%.1f"}, {"ttft_p99_ms", "p99", "%.1f"},
    {"tpot_p50_ms", "TPOT p50", "%.2f"}, {"tpot_p99_ms", "p99", "%.2f"}};

static void serving_plots(lesson *l, const serving *v, const serving_result *r, double capacity) {
    plot latency = plot_new(PLOT_LINES, "Latency by load", "offered requests per second",
                            "milliseconds");
    plot rates = plot_new(PLOT_LINES, "Served, and served in time", "offered requests per second",
                          "requests per second");
    latency.log_y = true;
    plot_note(&latency, "Near the capacity, requests wait: the time to the first token (TTFT) "
                        "explodes, the time per token (TPOT) does not.");
    plot_note(&rates, "Goodput counts only requests that were answered in time. Overload lowers "
                      "it.");
    int lines[4], served = plot_series_add(&rates, "served"), good;
    for (int k = 0; k < 4; k++)
        lines[k] = plot_series_add(&latency, (const char *const[]){"TTFT p50", "TTFT p99",
                                                                   "TPOT p50", "TPOT p99"}[k]);
    good = plot_series_add(&rates, "goodput");
    for (int i = 0; i < COUNT(loads); i++) {
        double x = loads[i] * capacity;
        for (int k = 0; k < 4; k++)
            plot_point(&latency, lines[k], x, 1e3 * (k < 2 ? r[i].ttft[k] : r[i].tpot[k - 2]));
        plot_point(&rates, served, x, r[i].requests);
        plot_point(&rates, good, x, serving_in_time(v, &r[i]) / r[i].seconds);
    }
    show_plot(l, &latency);
    show_plot(l, &rates);
}

/* Measure the open loop at shares of the capacity. */
static bool serving_open(lesson *l, serving *v, double capacity) {
    serving_result r[COUNT(loads)];
    table t = new_table(serving_columns, COUNT(serving_columns));
    int n = 0;
    while (n < COUNT(loads) && serving_run(v, loads[n] * capacity, 0, false, &r[n])) n++;
    bool good = n == COUNT(loads);
    for (int i = 0; i < n; i++)
        add_row(&t, 100 * loads[i], loads[i] * capacity, r[i].requests,
                serving_in_time(v, &r[i]) / r[i].seconds, r[i].tokens, r[i].in_flight,
                1e3 * r[i].ttft[0], 1e3 * r[i].ttft[1], 1e3 * r[i].tpot[0], 1e3 * r[i].tpot[1]);
    say(l, "Open loop: requests arrive at random, at a share of %.1f a second, which is all that "
           "the engine serves. Good: requests a second with TTFT up to %g ms and TPOT up to %g ms. "
           "Times in ms:\n\n",
        capacity, (double)v->slo_ttft, (double)v->slo_tpot);
    show_table(l, &t, "open");
    fact(l, "slo_ttft_ms", (double)v->slo_ttft);
    fact(l, "slo_tpot_ms", (double)v->slo_tpot);
    say(l, "\n");
    if (good) serving_plots(l, v, r, capacity);
    serving_free(r, n);
    return good;
}

static bool serving_closed(lesson *l, const serving *v, double *capacity) {
    static const column columns[] = {{"clients", "clients", "%.0f"},
                                     {"requests_per_second", "served", "%.1f"},
                                     {"tokens_per_second", "tok/s", "%.0f"},
                                     {"ttft_p50_ms", "TTFT p50", "%.1f"},
                                     {"ttft_p99_ms", "p99", "%.1f"},
                                     {"tpot_p50_ms", "TPOT p50", "%.2f"},
                                     {"tpot_p99_ms", "p99", "%.2f"}};
    table t = new_table(columns, COUNT(columns));
    bool good = true;
    for (int i = 0; i < COUNT(clients) && good; i++) {
        serving_result r = {0};
        good = serving_run(v, 0, clients[i], false, &r);
        if (!good) break;
        add_row(&t, (double)clients[i], r.requests, r.tokens, 1e3 * r.ttft[0], 1e3 * r.ttft[1],
                1e3 * r.tpot[0], 1e3 * r.tpot[1]);
        *capacity = r.requests > *capacity ? r.requests : *capacity;
        serving_free(&r, 1);
    }
    say(l, "Closed loop: each client sends its next request when its last one has ended:\n\n");
    show_table(l, &t, "closed");
    say(l, "\n");
    return good;
}

/* Measure long prompts among short ones, for several numbers of tokens in a step. */
static bool serving_chunks(lesson *l, serving *v) {
    static const column columns[] = {{"budget", "tokens in a step", "%s"},
                                     {"tokens_per_second", "tok/s", "%.0f"},
                                     {"ttft_p50_ms", "TTFT p50", "%.1f"},
                                     {"ttft_p99_ms", "p99", "%.1f"},
                                     {"tpot_p50_ms", "TPOT p50", "%.2f"},
                                     {"tpot_p99_ms", "p99", "%.2f"},
                                     {"gap_p99_ms", "gap p99", "%.2f"}};
    table t = new_table(columns, COUNT(columns));
    double rate = 0;
    bool good = true;
    for (int i = -1; i < COUNT(budgets) && good; i++) { /* -1: measure the capacity */
        int budget = i < 0 ? 512 : budgets[i];
        char name[32];
        snprintf(name, sizeof name, budget ? "%d" : "whole prompts", budget);
        l->engine.chunked_prefill = budget > 0;
        /* a whole prompt and its output must fit into a step */
        l->engine.max_batch_tokens = budget ? budget : v->long_prompt + v->gen.high + 512;
        v->engine = lesson_engine(l->loaded, &l->engine);
        serving_result r = {0};
        good = v->engine && serving_run(v, rate, i < 0 ? l->engine.max_sequences : 0, true, &r);
        if (good && i < 0) rate = 0.6 * r.requests;
        else if (good)
            add_row(&t, name, r.tokens, 1e3 * r.ttft[0], 1e3 * r.ttft[1], 1e3 * r.tpot[0],
                    1e3 * r.tpot[1], 1e3 * r.gap);
        if (good) serving_free(&r, 1);
        free_engine(v->engine);
    }
    say(l, "\nEach fourth prompt has %d tokens, at a load of 60 %%. Gap: the time between two "
           "tokens of a request:\n\n", v->long_prompt);
    show_table(l, &t, "chunks");
    return good;
}

static int lesson_serving(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    serving v = {.n = 100, .runs = 2, .long_prompt = -1, .slo_ttft = 50, .slo_tpot = 5};
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "requests", "N", WHOLE, &v.n, 10, 100000, "requests in each run (default 100)"},
        {0, "runs", "N", WHOLE, &v.runs, 1, 100,
         "runs per row, of which the fastest counts (default 2)"},
        {'p', "prompt", "LOW-HIGH", RANGE, &v.prompt, 1, 1 << 20,
         "tokens per prompt (default 16-64)"},
        {'g', "gen", "LOW-HIGH", RANGE, &v.gen, 2, 1 << 20, "tokens per answer (default 16-64)"},
        {0, "long", "N", WHOLE, &v.long_prompt, 1, 1 << 20, 
         "tokens of a long prompt (default 384)"},
        {0, "max-sequences", "N", WHOLE, &l.engine.max_sequences, 1, 1024,
         "sequences that run at a time (default 16)"},
        {0, "slo-ttft", "MS", REAL, &v.slo_ttft, 0, 1e6,
         "longest TTFT of a good request (default 50)"},
        {0, "slo-tpot", "MS", REAL, &v.slo_tpot, 0, 1e6,
         "longest TPOT of a good request (default 5)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    int context = llm_model_config(l.loaded)->context_length, quarter = (context + 3) / 4;
    int_range usual = {quarter < 16 ? quarter : 16, quarter < 64 ? quarter : 64};
    if (v.prompt.high == 0) v.prompt = usual;
    if (v.gen.high == 0) v.gen = usual;
    v.long_prompt = given_or(v.long_prompt, 384, 1, context - v.gen.high);
    if (!fits_context(&l, v.prompt.high > v.long_prompt ? v.prompt.high : v.long_prompt,
                      v.gen.high)) return lesson_end(&l, false);
    l.engine.prefix_cache = false;
    v.tokens = lesson_tokens(&l, 0, v.n * (v.prompt.high + v.long_prompt / 4 + 1) + v.long_prompt);
    v.engine = lesson_engine(l.loaded, &l.engine);
    double capacity = 0;
    bool good = v.tokens && v.engine && serving_closed(&l, &v, &capacity) &&
                serving_open(&l, &v, capacity);
    free_engine(v.engine);
    fact(&l, "capacity", capacity);
    fact(&l, "max_sequences", l.engine.max_sequences);
    good = good && serving_chunks(&l, &v);
    free(v.tokens);
    return lesson_end(&l, good);
}

static const char serving_notes[] =
    "The same requests are served in a closed loop by 1 to 32 clients, then in an open loop at\n"
    "30 to 130 % of the rate that the closed loop reached, then with long prompts among them.\n"
    "Throughput is what the engine serves; goodput is what it serves in time.\n"
    "\n"
    "Examples:\n"
    "  llm lesson serving\n"
    "  llm lesson serving --requests 500 --slo-ttft 20 --slo-tpot 3 --svg serving.svg\n";

const command serving_lesson = {"lesson serving", "Load against latency, up to saturation.",
                                "[options]", lesson_serving, serving_notes};
