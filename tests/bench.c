/* bench.c - the command llm bench: one sequence, batches, serving, speculation, and a profile of a
 * step */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "bench.h"

#include "../docs/groups.h"
#include "../docs/program.h"
#include "../models/tools.h"

#include <poll.h>

/* ---- llm bench --------------------------------------------------------------------------- */
typedef struct bench {
    const char *model;
    int_list threads, prompts;
    int generate, runs;
    bool json, profile;
    llm_engine_options engine;
    llm_model *loaded;
    double bandwidth; /* bytes per second with the current number of threads */
    int n_rows;
} bench;

enum { PROFILE_PREFILL, PROFILE_DECODE, PROFILE_PHASES };

typedef struct profile_row { /* one operation, or several that run together */
    char name[96];
    double seconds, predicted, bytes, operations; /* sums over all calls */
    int calls;
} profile_row;

struct profile {
    llm_program *program;
    /* bytes per second (0: unknown) and operations per second, for predictions */
    double bandwidth, peak;
    int prompt, done;       /* tokens in the prompt; tokens in the cache */
    profile_row rows[PROFILE_PHASES][48];
    int n_rows[PROFILE_PHASES];
};

static void profile_step(profile *p, const llm_engine *engine, int n, bool logits);

bool bench_once(llm_engine *engine, int n_prompt, int n_generate, profile *p, double *prefill,
                double *decode) {
    int vocab = llm_model_config(llm_engine_model(engine))->vocab_size;
    int32_t *ids = resize(NULL, (size_t)n_prompt * sizeof *ids);
    for (int i = 0; i < n_prompt; i++) ids[i] = (int32_t)(llm_random(1, 0, (uint64_t)i) * vocab);
    llm_error err;
    llm_event event;
    llm_request request = llm_request_defaults();
    uint64_t id;
    request.prompt = ids;
    request.n_prompt = n_prompt;
    request.max_tokens = 1 + n_generate;
    request.ignore_end = true;
    /* spent: seconds spent on the profile */
    double start = llm_seconds(), first = 0, last = 0, spent = 0;
    bool good = llm_submit(engine, &request, &id, &err);
    int status = 0;
    uint64_t before = llm_engine_statistics(engine).prompt_tokens;
    while (good && !stop_requested && (status = llm_step(engine, &err)) > 0) {
        double now = llm_seconds();
        uint64_t after = p ? llm_engine_statistics(engine).prompt_tokens : 0;
        bool any = false;
        for (; llm_next_event(engine, &event); any = true) {
            if (event.error) good = !fail("%s", event.error);
            last = now - spent;
            if (first == 0) first = last;
        }
        if (p) profile_step(p, engine, after > before ? (int)(after - before) : 1, any);
        before = after;
        spent += llm_seconds() - now;
    }
    if (err.status != LLM_OK) fail_with(&err);
    else if (stop_requested) llm_cancel(engine, id, &err);
    free(ids);
    *prefill = first - start;
    *decode = last - first;
    return good && status >= 0;
}

static void bench_print(bench *b, int threads, int n_prompt, double prefill, double decode) {
    uint64_t token = llm_model_cache_bytes_per_token(b->loaded, b->engine.cache_type);
    double bytes = (double)llm_model_step_bytes(b->loaded) +
                   (double)token * (n_prompt + (b->generate + 1) / 2.0);
    double rate = b->generate / decode, used = bytes * rate;
    if (b->json) {
        put_text(b->n_rows ? ",\n" : "\n");
        put("  {\"threads\": %d, \"prompt\": %d, \"prefill_tokens_per_second\": ", threads,
            n_prompt);
        put_number(n_prompt / prefill);
        put(", \"decode_tokens_per_second\": ");
        put_number(rate);
        put(", \"bytes_per_token\": %.0f, \"bytes_per_second\": ", bytes);
        put_number(used);
        put(", \"memory_bytes_per_second\": ");
        put_number(b->bandwidth);
        put(", \"share\": ");
        put_number(b->bandwidth > 0 ? used / b->bandwidth : 0);
        put_text("}");
    } else if (b->bandwidth > 0) {
        put("%7d %7d %13.1f %13.1f %9.2f %9.2f %6.0f %%\n", threads, n_prompt, n_prompt / prefill,
            rate, 1e-9 * used, 1e-9 * b->bandwidth, 100 * used / b->bandwidth);
    } else {
        put("%7s %7d %13.1f %13.1f %9.2f %9s %6s\n", "-", n_prompt, n_prompt / prefill, rate,
            1e-9 * used, "-", "-");
    }
    b->n_rows++;
    flush_output();
}

/* Measure all prompt lengths with one number of threads. */
static bool bench_threads(bench *b, int threads) {
    llm_error err;
    char note[64];
    b->engine.n_threads = threads;
    llm_engine *engine = create_engine(b->loaded, &b->engine, &err);
    if (!engine) return !fail_with(&err);
    b->bandwidth = engine_bandwidth(engine);
    if (b->bandwidth == 0) b->threads.count = 1; /* threads do not matter on a GPU */
    double *prefill = resize(NULL, 2 * (size_t)b->runs * sizeof *prefill),
           *decode = prefill + b->runs;
    /* warm up */
    bool good = bench_once(engine, 1, b->generate < 8 ? b->generate : 8, NULL, prefill, decode);
    for (int i = 0; good && i < b->prompts.count && !stop_requested && !output_error; i++) {
        for (int k = 0; good && k < b->runs && !stop_requested; k++) {
            snprintf(note, sizeof note, "%d threads, prompt of %d", threads, b->prompts.values[i]);
            show_progress("bench", (i + (double)k / b->runs) / b->prompts.count, note);
            good = bench_once(engine, b->prompts.values[i], b->generate, NULL, &prefill[k],
                              &decode[k]);
        }
        show_progress("", -1, "");
        if (good && !stop_requested)
            bench_print(b, threads, b->prompts.values[i], median(prefill, b->runs),
                        median(decode, b->runs));
    }
    free(prefill);
    free_engine(engine);
    return good;
}

/* ---- llm bench --profile: where a step's time goes --------------------------------------- */

/* Find or add the profile row of `op` and the operations that run together with it. The row's name
 * lists all of them. */
static profile_row *profile_find(profile *p, int phase, const int *owner, int op) {
    char name[96] = "";
    for (int i = 0; i < p->program->n_ops; i++)
        if (owner[i] == owner[op])
            snprintf(name + strlen(name), sizeof name - strlen(name), *name ? "+%s" : "%s",
                     OP_NAME(&p->program->ops[i]));
    for (int i = 0; i < p->n_rows[phase]; i++)
        if (!strcmp(p->rows[phase][i].name, name)) return &p->rows[phase][i];
    if (p->n_rows[phase] == COUNT(p->rows[0])) return NULL;
    profile_row *row = &p->rows[phase][p->n_rows[phase]++];
    *row = (profile_row){.seconds = 0};
    snprintf(row->name, sizeof row->name, "%s", name);
    return row;
}

/* Add the last step to the profile: n tokens of one sequence whose cache already held p->done
 * tokens. */
static void profile_step(profile *p, const llm_engine *engine, int n, bool logits) {
    lone_batch l;
    int phase = p->done >= p->prompt ? PROFILE_DECODE : PROFILE_PREFILL,
        n_ops = logits ? p->program->n_ops : p->program->n_body;
    int *owner = resize(NULL, (size_t)p->program->n_ops * sizeof *owner);
    make_lone_batch(&l, n, p->done + n, 16, logits);
    find_owners(llm_engine_settings(engine)->backend, p->program, &l.batch, owner);
    for (int i = 0; i < n_ops; i++) {
        profile_row *row = profile_find(p, phase, owner, i);
        if (!row) continue;
        llm_cost cost = llm_op_cost(p->program, &p->program->ops[i], &l.batch);
        row->calls += owner[i] == i;
        row->seconds += p->program->seconds[i];
        row->bytes += cost_bytes(&cost);
        row->operations += cost.operations;
        row->predicted += fmax(p->bandwidth > 0 ? cost_bytes(&cost) / p->bandwidth : 0,
                               cost.operations / p->peak);
    }
    memset(p->program->seconds, 0, (size_t)p->program->n_ops * sizeof(double));
    p->done += n;
    free(l.memory);
    free(owner);
}

static int compare_profile_rows(const void *a, const void *b) {
    double x = ((const profile_row *)a)->seconds, y = ((const profile_row *)b)->seconds;
    return (x < y) - (x > y);
}

/* Print the profile of one phase, which processed `tokens` tokens in `seconds`. */
static void profile_print(const bench *b, profile *p, int phase, int tokens, double seconds) {
    profile_row *rows = p->rows[phase], rest = {.name = "all else", .seconds = seconds};
    int n = p->n_rows[phase];
    qsort(rows, (size_t)n, sizeof *rows, compare_profile_rows);
    if (!b->json)
        put("\n%s of %d tokens: %.2f ms, %.1f tokens/s\n%-29s %6s %9s %9s %7s %7s %7s\n",
            phase == PROFILE_PREFILL ? "Prefill" : "Decode", tokens, 1e3 * seconds,
            tokens / seconds, "operation", "calls", "us each", "predicted", "time %", "GB/s",
            "GFLOP/s");
    for (int i = 0; i <= n; i++) {
        const profile_row *r = i < n ? &rows[i] : &rest;
        rest.seconds -= i < n ? r->seconds : 0;
        double read = r->seconds > 0 ? r->bytes / r->seconds : 0,
               done = r->seconds > 0 ? r->operations / r->seconds : 0;
        if (b->json) {
            put("%s\n   {\"operation\": \"%s\", \"calls\": %d, \"seconds\": %.9f, "
                "\"predicted_seconds\": %.9f, \"bytes\": %.0f, "
                "\"operations\": %.0f}",
                i ? "," : "", r->name, r->calls, r->seconds, r->predicted, r->bytes, r->operations);
            continue;
        }
        put("%-29s", r->name);
        if (r->calls)
            put(" %6d %9.1f %9.1f", r->calls, 1e6 * r->seconds / r->calls,
                1e6 * r->predicted / r->calls);
        else put(" %6s %9s %9s", "", "", "");
        put(" %5.1f %%", 100 * r->seconds / seconds);
        if (i < n) put(" %7.2f %7.1f", 1e-9 * read, 1e-9 * done);
        put_text("\n");
    }
}

/* Run one request and time each operation of the program. */
static bool bench_profile(bench *b, int threads) {
    llm_error err;
    profile p = {.prompt = 0};
    double prefill, decode;
    b->engine.n_threads = threads;
    llm_engine *engine = create_engine(b->loaded, &b->engine, &err);
    if (!engine) return !fail_with(&err);
    llm_backend *device = llm_engine_settings(engine)->backend;
    p.program = llm_engine_program(engine, false);
    p.bandwidth = engine_bandwidth(engine);
    p.peak = arithmetic_peak(b->loaded, device);
    int prompt = b->prompts.values[0], begin = prompt < 16 ? prompt : 16;
    /* warm up */
    bool good = p.peak > 0 && bench_once(engine, begin, b->generate < 4 ? b->generate : 4, NULL,
                                         &prefill, &decode);
    p.prompt = prompt;
    p.program->seconds = resize(NULL, (size_t)p.program->n_ops * sizeof(double));
    memset(p.program->seconds, 0, (size_t)p.program->n_ops * sizeof(double));
    good =
        good && bench_once(engine, prompt, b->generate, &p, &prefill, &decode) && !stop_requested;
    if (good && b->json)
        put("{\"threads\": %d, \"memory_bytes_per_second\": %.0f, \"operations_per_second\": %.0f, "
            "\"prefill_seconds\": %.9f, "
            "\"decode_seconds\": %.9f, \"prefill\": [",
            threads, p.bandwidth, p.peak, prefill, decode);
    else if (good)
        put("%d threads; memory reads %.2f GB/s; the engine's own matrix product from the cache "
            "%.0f GFLOP/s\n",
            llm_cpu_threads(device), 1e-9 * p.bandwidth, 1e-9 * p.peak);
    if (good) profile_print(b, &p, PROFILE_PREFILL, prompt, prefill);
    if (good && b->json) put_text("\n  ], \"decode\": [");
    if (good) profile_print(b, &p, PROFILE_DECODE, b->generate, decode);
    if (good && b->json) put_text("\n  ]}\n");
    free(p.program->seconds);
    p.program->seconds = NULL;
    free_engine(engine);
    return good;
}

/* Set the lists that the user did not give: one thread and all threads; the default prompt lengths
 * that fit in the context. */
static void bench_defaults(bench *b) {
    static const int lengths[] = {16, 128, 512};
    int all = llm_processor_count(),
        room = llm_model_config(b->loaded)->context_length - b->generate - 1;
    if (b->threads.count == 0) {
        b->threads.values = resize(NULL, 2 * sizeof(int));
        b->threads.values[b->threads.count++] = 1;
        if (all > 1) b->threads.values[b->threads.count++] = all;
    }
    if (b->prompts.count == 0) {
        b->prompts.values = resize(NULL, sizeof lengths);
        for (int i = 0; i < COUNT(lengths); i++)
            if (i == 0 || lengths[i] <= room) b->prompts.values[b->prompts.count++] = lengths[i];
    }
}

/* End a benchmark's output. The JSON is valid even if rows are missing. Returns the exit status. */
static int end_bench(bool json, bool good) {
    good = good && !stop_requested;
    if (json) put("\n ], \"complete\": %s}\n", good ? "true" : "false");
    return good ? 0 : FAILED;
}

static bool bench_fits(const llm_model *model, int prompt, int more) {
    int context = llm_model_config(model)->context_length;
    if ((int64_t)prompt + more <= context) return true;
    return !fail("a prompt of %d and %d more tokens are longer than the model's context of %d: "
                 "give a shorter --prompt or --gen",
                 prompt, more, context);
}

static int bench_model(bench *b, const char *path) {
    llm_error err;
    b->loaded = llm_model_load(path, &err);
    if (!b->loaded) return fail_with(&err);
    bench_defaults(b);
    int longest = 0;
    for (int i = 0; i < b->prompts.count; i++)
        longest = b->prompts.values[i] > longest ? b->prompts.values[i] : longest;
    if (!bench_fits(b->loaded, longest, b->generate + 1)) return FAILED;
    b->engine.context_length = longest + b->generate + 1;
    b->engine.max_sequences = 1;
    if (b->profile) return bench_profile(b, b->threads.values[b->threads.count - 1]) ? 0 : FAILED;
    double step_bytes = (double)llm_model_step_bytes(b->loaded);
    if (b->json) {
        put_text("{\"model\": ");
        put_json_text(path);
        put(", \"step_bytes\": %.0f, \"processor_cache_bytes\": %.0f", step_bytes,
            processor_cache());
        put(", \"generate\": %d, \"runs\": %d, \"rows\": [", b->generate, b->runs);
    } else {
        put_text(path);
        put(": a decode step reads %s of weights; ", HUMAN(step_bytes));
        put("medians of %d runs, %d tokens each\n", b->runs, b->generate);
        if (step_bytes < processor_cache())
            put("(these may stay in the processor's cache of %s, so the share of the memory's "
                "speed says little)\n",
                HUMAN(processor_cache()));
        put("threads  prompt  prefill tok/s  decode tok/s      GB/s    memory    share\n");
    }
    bool good = true;
    for (int i = 0; good && i < b->threads.count && !stop_requested && !output_error; i++)
        good = bench_threads(b, b->threads.values[i]);
    return end_bench(b->json, good);
}

/* ---- llm bench batch: many sequences in one step -------------------------------------------
 * A step reads all weights once, for one sequence or for many. So many sequences cost little more
 * than one, until the arithmetic takes longer than reading the weights. */
typedef struct bench_batch {
    const char *model;
    int_list sequences;
    int prompt, generate, runs;
    bool json;
    llm_engine_options engine;
    llm_model *loaded;
} bench_batch;

bool bench_group(llm_engine *engine, int n, int n_prompt, int n_generate, uint64_t stream,
                 double *seconds, double *rate) {
    int vocab = llm_model_config(llm_engine_model(engine))->vocab_size, begun = 0;
    int32_t *ids = resize(NULL, (size_t)n_prompt * sizeof *ids);
    llm_error err;
    llm_event event;
    llm_request request = llm_request_defaults();
    request.prompt = ids;
    request.n_prompt = n_prompt;
    request.max_tokens = n_generate;
    request.ignore_end = true;
    double start = llm_seconds(), all_begun = start, now = start;
    int64_t counted = 0;
    bool good = true;
    for (int i = 0; good && i < n; i++) {
        for (int k = 0; k < n_prompt; k++)
            ids[k] = (int32_t)(llm_random(stream, (uint64_t)i, (uint64_t)k) * vocab);
        good = llm_submit(engine, &request, NULL, &err);
    }
    free(ids);
    int status = 1;
    while (good && status > 0 && !stop_requested) {
        status = llm_step(engine, &err);
        now = status > 0 ? llm_seconds() : now;
        int before = begun;
        while (llm_next_event(engine, &event)) {
            if (event.error) good = !fail("%s", event.error);
            begun += event.index == 0;
            counted += before == n && event.token >= 0; /* only after all requests have begun */
        }
        if (begun == n && before < n) all_begun = now;
    }
    if (err.status != LLM_OK) fail_with(&err);
    if (!good || status < 0) return false;
    *seconds = now - start;
    *rate = now > all_begun ? (double)counted / (now - all_begun) : 0;
    return true;
}

/* Run the prompts without generating; they stay in the prefix cache. Then run the same prompts with
 * one more token each, so that all sequences decode from the first step on. */
static bool bench_batch_once(const bench_batch *b, llm_engine *engine, int n, uint64_t stream,
                             double *prefill, double *decode) {
    double seconds = 0, unused;
    if (!bench_group(engine, n, b->prompt, 0, stream, &seconds, &unused)) return false;
    *prefill = (double)n * b->prompt / seconds;
    return bench_group(engine, n, b->prompt + 1, 1 + b->generate, stream, &seconds, decode);
}

static void bench_batch_print(const bench_batch *b, int row, double prefill, double decode,
                              double alone) {
    int n = b->sequences.values[row];
    if (!b->json) {
        put("%9d %13.1f %13.1f %13.1f %9.2f", n, prefill, decode, decode / n, 1e3 * n / decode);
        put(alone > 0 ? " %8.2f x\n" : "\n", decode / alone);
        return;
    }
    const struct { const char *name; double value; } values[] = {
        {"prefill_tokens_per_second", prefill}, {"decode_tokens_per_second", decode},
        {"step_seconds", n / decode},
        {"times_one", alone > 0 ? decode / alone : NAN}};
    put("%s\n  {\"sequences\": %d", row ? "," : "", n);
    for (int i = 0; i < COUNT(values); i++)
        put(", \"%s\": ", values[i].name), put_number(values[i].value);
    put_text("}");
}

/* Measure all sizes in turn, several times, so that a temporary load on the machine affects all
 * sizes alike. */
static bool bench_batch_rows(bench_batch *b, llm_engine *engine) {
    int n_rows = b->sequences.count, runs = b->runs;
    double *prefill = resize(NULL, 2 * (size_t)n_rows * (size_t)runs * sizeof *prefill),
           *decode = prefill + n_rows * runs, alone = 0, unused;
    bool good = bench_group(engine, 1, 8, 8, 0, &unused, &unused); /* to warm up */
    for (int k = 0; good && k < runs; k++)
        for (int i = 0; good && i < n_rows && !stop_requested; i++) {
            char note[64];
            snprintf(note, sizeof note, "%d sequences", b->sequences.values[i]);
            show_progress("bench", (double)(k * n_rows + i) / (runs * n_rows), note);
            uint64_t stream = 1 + (uint64_t)(k * n_rows + i);
            good = bench_batch_once(b, engine, b->sequences.values[i], stream,
                                    &prefill[i * runs + k], &decode[i * runs + k]);
        }
    show_progress("bench", -1, "");
    for (int i = 0; good && i < n_rows && !stop_requested; i++) {
        double before = median(prefill + i * runs, runs), rate = median(decode + i * runs, runs);
        if (b->sequences.values[i] == 1) alone = rate;
        bench_batch_print(b, i, before, rate, alone);
    }
    free(prefill);
    return good;
}

static void bench_batch_head(const bench_batch *b, const char *path, int threads) {
    if (b->json) {
        put_text("{\"model\": ");
        put_json_text(path);
        put(", \"threads\": %d, \"prompt\": %d, \"generate\": %d, \"runs\": %d, \"rows\": [",
            threads, b->prompt, b->generate, b->runs);
    } else {
        put_text(path);
        put(": prompts of %d, then %d tokens; %d threads; medians of %d runs\n", b->prompt,
            b->generate, threads, b->runs);
        put_text("sequences prefill tok/s  decode tok/s  ... for each   ms/step  against 1\n");
    }
    flush_output();
}

static int bench_batch_model(bench_batch *b, const char *path) {
    llm_error err;
    if (!(b->loaded = llm_model_load(path, &err))) return fail_with(&err);
    int most = 0;
    for (int i = 0; i < b->sequences.count; i++)
        most = b->sequences.values[i] > most ? b->sequences.values[i] : most;
    b->engine.context_length = b->prompt + b->generate + 2;
    b->engine.max_sequences = most;
    if (b->engine.max_batch_tokens < most) b->engine.max_batch_tokens = most;
    if (!bench_fits(b->loaded, b->prompt, b->generate + 2)) return FAILED;
    llm_engine *engine = create_engine(b->loaded, &b->engine, &err);
    if (!engine) return fail_with(&err);
    bench_batch_head(b, path, llm_cpu_threads(llm_engine_settings(engine)->backend));
    int status = end_bench(b->json, bench_batch_rows(b, engine));
    free_engine(engine);
    return status;
}

static int command_bench_batch(const command *self, int argc, char **argv) {
    bench_batch b = {.prompt = 128, .generate = 64, .runs = 3, .engine = llm_engine_defaults()};
    const option options[] = {
        MODEL_OPTION(b.model),
        {0, "sequences", "LIST", LIST, &b.sequences, 1, 4096,
         "numbers of sequences to try (default 1,2,4,8,16,32,64)"},
        {'p', "prompt", "N", WHOLE, &b.prompt, 1, 1 << 20, "tokens of each prompt (default 128)"},
        {'g', "gen", "N", WHOLE, &b.generate, 1, 1 << 20,
         "tokens to generate after each prompt (default 64)"},
        {'r', "runs", "R", WHOLE, &b.runs, 1, 1000,
         "runs of each; medians are printed (default 3)"},
        THREADS_OPTION(b.engine.n_threads),
        NAIVE_OPTION(b.engine),
        CACHE_TYPE_OPTION(b.engine),
        CACHE_OPTION(b.engine, "as needed"),
        BLOCK_OPTION(b.engine),
        STEP_OPTION(b.engine),
        JSON_OPTION(b.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    char usual[] = "1,2,4,8,16,32,64";
    if (status == PARSED && b.sequences.count == 0) parse_list(usual, 1, 64, &b.sequences);
    char *path = status == PARSED ? model_path(b.model) : NULL;
    if (status == PARSED) status = path ? bench_batch_model(&b, path) : FAILED;
    free(path);
    free(b.sequences.values);
    llm_model_free(b.loaded);
    return status;
}

static const char bench_batch_notes[] =
    "For each number of sequences: that many prompts of random tokens (prefill), then --gen\n"
    "tokens after each, all sequences in one step (decode; the rate counts the tokens of all\n"
    "sequences). A step reads the weights once, for however many sequences.\n"
    "\n"
    "Examples:\n"
    "  llm bench batch\n"
    "  llm bench batch -m some.gguf --sequences 1,16 --prompt 128 --gen 64 --runs 5 --json\n";

/* ---- llm bench serve: requests that come and go ---------------------------------------------
 * Every policy gets the same requests at the same times. TTFT counts from the planned arrival of
 * a request. */
enum {
    SECONDS, THROUGHPUT, TTFT_50, TTFT_90, TTFT_99, TPOT_50, TPOT_90, TPOT_99, BATCH, OCCUPANCY,
    PADDING,
    STEPS, PREEMPTIONS_MADE, HIT_RATE, WASTE, SCHEDULER, HOST, ACCEPTANCE, PER_STEP, N_FIGURES
};

static const struct {
    const char *words, *json;
    double scale; /* factor from seconds to the unit in `words` */
    int decimals;
} serve_figures[N_FIGURES] = {
    {"seconds", "seconds", 1, 2}, {"tokens/s", "tokens_per_second", 1, 1},
    {"TTFT p50, ms", "ttft_p50_seconds", 1e3, 1}, {"TTFT p90, ms", "ttft_p90_seconds", 1e3, 1},
    {"TTFT p99, ms", "ttft_p99_seconds", 1e3, 1},
    {"TPOT p50, ms", "tpot_p50_seconds", 1e3, 2}, {"TPOT p90, ms", "tpot_p90_seconds", 1e3, 2},
    {"TPOT p99, ms", "tpot_p99_seconds", 1e3, 2},
    {"sequences in a step, mean", "sequences_per_step", 1, 2},
    {"... of the most, %", "occupancy", 100, 1},
    {"... ended, and still computed", "padding_per_step", 1, 2}, {"steps", "steps", 1, 0},
    {"preemptions", "preemptions", 1, 0}, {"prompt tokens cached, %", "prefix_hit_rate", 100, 1},
    {"cache slots wasted, mean, %", "kv_waste", 100, 2},
    {"scheduler's share of time, %", "scheduler_share", 100, 3},
    {"a step's time of the CPU, us", "host_seconds_per_step", 1e6, 1}, /* only with a GPU */
    {"proposals accepted, %", "acceptance", 100, 1},
    {"tokens per sequence's step", "tokens_per_step", 1, 2},
};

typedef struct serve_request {
    double arrival;     /* seconds after the start */
    member member;
    double first, last; /* times of the first and last token */
} serve_request;

typedef struct serve {
    const char *model;
    llm_engine_options engine_options;
    speculation speculation;
    int policy; /* index in POLICIES; N_POLICIES: all, side by side */
    int n_requests, shared, runs;
    int ask; /* tokens that each request asks for; 0: exactly its output length */
    float rate, window;
    int_range prompt, generate;
    seed_value seed;
    bool json;
    llm_model *loaded, *draft;
    serve_request *requests;
    int32_t *ids; /* all prompts, one after another */
} serve;

int draw_range(int_range r, uint64_t seed, uint64_t stream, uint64_t index) {
    return r.low + (int)(llm_random(seed, stream, index) * (r.high - r.low + 1));
}

/* Plan the arrivals, prompts and lengths. The plan is the same in every run. */
static void serve_plan(serve *v) {
    double clock = 0;
    uint64_t seed = v->seed.value;
    int vocab = llm_model_config(v->loaded)->vocab_size;
    size_t n_ids = 0;
    for (int i = 0; i < v->n_requests; i++) {
        serve_request *r = &v->requests[i];
        llm_request *request = &r->member.request;
        int n_prompt = v->shared + draw_range(v->prompt, seed, 1, (uint64_t)i);
        if (v->rate > 0) clock -= log(1 - llm_random(seed, 0, (uint64_t)i)) / (double)v->rate;
        *r = (serve_request){.arrival = clock, .member.request = llm_request_defaults()};
        apply_speculation(&v->speculation, &v->engine_options, request);
        v->ids = resize(v->ids, (n_ids + (size_t)n_prompt) * sizeof *v->ids);
        for (int k = 0; k < n_prompt; k++)
            v->ids[n_ids++] =
                (int32_t)(llm_random(seed, k < v->shared ? 3 : 4 + (uint64_t)i, (uint64_t)k) *
                          vocab);
        r->member.wanted = draw_range(v->generate, seed, 2, (uint64_t)i);
        request->n_prompt = n_prompt;
        request->max_tokens = v->ask ? v->ask : r->member.wanted;
        request->ignore_end = true;
        request->user = r;
    }
    n_ids = 0; /* v->ids is not reallocated after this line */
    for (int i = 0; i < v->n_requests; i++) {
        v->requests[i].member.request.prompt = v->ids + n_ids;
        n_ids += (size_t)v->requests[i].member.request.n_prompt;
    }
}

static void serve_summary(const serve *v, const batcher *b, double start, double *figures) {
    int n = v->n_requests, n_paced = 0;
    double *ttft = resize(NULL, 2 * (size_t)n * sizeof *ttft), *tpot = ttft + n, last = start;
    static const double shares[] = {0.5, 0.9, 0.99};
    int64_t tokens = 0;
    for (int i = 0; i < n; i++) {
        const serve_request *r = &v->requests[i];
        ttft[i] = r->first - start - r->arrival;
        if (r->member.n_tokens > 1)
            tpot[n_paced++] = (r->last - r->first) / (r->member.n_tokens - 1);
        tokens += r->member.n_tokens;
        if (r->last > last) last = r->last;
    }
    for (int i = 0; i < COUNT(shares); i++) {
        figures[TTFT_50 + i] = percentile(ttft, n, shares[i]);
        figures[TPOT_50 + i] = percentile(tpot, n_paced, shares[i]);
    }
    free(ttft);
    llm_statistics s = llm_engine_statistics(b->engine);
    figures[SECONDS] = last - start;
    figures[THROUGHPUT] = (double)tokens / (last - start);
    figures[STEPS] = (double)s.steps;
    figures[BATCH] = (double)(s.sequence_steps - b->padding_steps) / (double)s.steps;
    figures[OCCUPANCY] = figures[BATCH] / v->engine_options.max_sequences;
    figures[PADDING] = (double)b->padding_tokens / (double)s.steps;
    figures[PREEMPTIONS_MADE] = (double)s.preemptions;
    figures[HIT_RATE] = s.prefix_tokens ? (double)s.prefix_hits / (double)s.prefix_tokens : 0;
    figures[SCHEDULER] =
        (s.step_seconds - s.forward_seconds - s.draft_seconds - s.sampling_seconds) /
        s.step_seconds;
    figures[HOST] = s.device_launches + s.device_replays
                        ? (s.step_seconds - s.wait_seconds) / (double)s.steps
                        : NAN;
    figures[ACCEPTANCE] = s.proposed ? acceptance(&s) : NAN;
    figures[PER_STEP] = tokens_per_step(&s);
}

/* Run all requests through one engine, each submitted at its arrival time. */
static bool serve_requests(serve *v, batcher *b, double *figures) {
    llm_error err;
    llm_event event;
    int n_steps = 0, n_looks = 0;
    double start = llm_seconds();
    for (int next = 0, n_ended = 0; n_ended < v->n_requests && !stop_requested;) {
        double now = llm_seconds() - start;
        while (next < v->n_requests && v->requests[next].arrival <= now)
            if (!batcher_submit(b, &v->requests[next++].member, &err)) return !fail_with(&err);
        int status = batcher_step(b, &err);
        if (status < 0) return !fail_with(&err);
        if (status == 0)
            poll(NULL, 0, (int)fmin(100, fmax(1e3 * (v->requests[next].arrival - now), 0)));
        now = llm_seconds();
        while (batcher_next_event(b, &event)) {
            if (event.error) return !fail("%s", event.error);
            serve_request *r = event.user;
            if (r->first == 0) r->first = now;
            r->last = now;
            n_ended += event.finish != LLM_FINISH_NONE;
        }
        /* only every eighth step: batcher_waste is slow for a large pool */
        if (b->n_running == 0 || n_steps++ % 8) continue;
        figures[WASTE] += batcher_waste(b);
        n_looks++;
        char note[64];
        snprintf(note, sizeof note, "%s, %d of %d requests", policy_names[b->policy], n_ended,
                 v->n_requests);
        show_progress("bench", (double)n_ended / v->n_requests, note);
    }
    figures[WASTE] /= n_looks ? n_looks : 1;
    if (!stop_requested) serve_summary(v, b, start, figures);
    return true;
}

static bool serve_once(serve *v, int policy, double *figures) {
    llm_error err;
    for (int i = 0; i < N_FIGURES; i++) figures[i] = 0;
    serve_plan(v);
    batcher b = {.engine = create_engine(v->loaded, &v->engine_options, &err),
                 .policy = policy,
                 .window = (double)v->window};
    if (!b.engine) return !fail_with(&err);
    bool good = serve_requests(v, &b, figures);
    free_engine(b.engine);
    return good;
}

static void serve_print_head(const serve *v, const char *path) {
    put_text(v->json ? "{\"model\": " : "");
    if (v->json) {
        put_json_text(path);
        put(", \"requests\": %d, \"rate\": %g, \"prompt\": [%d, %d], \"generate\": [%d, %d], "
            "\"ask\": %d, \"shared\": %d, \"seed\": %llu, ",
            v->n_requests, (double)v->rate, v->prompt.low, v->prompt.high, v->generate.low,
            v->generate.high, v->ask, v->shared, (unsigned long long)v->seed.value);
        put("\"max_sequences\": %d, \"runs\": %d, \"rows\": [", v->engine_options.max_sequences,
            v->runs);
        return;
    }
    put_text(path);
    put(": %d requests, ", v->n_requests);
    if (v->rate > 0) put("%g a second by chance", (double)v->rate);
    else put_text("all at once");
    put(", prompts of %d to %d", v->prompt.low, v->prompt.high);
    if (v->shared) put(" after the same %d", v->shared);
    put(", %d to %d tokens each", v->generate.low, v->generate.high);
    if (v->ask) put(" of %d asked for", v->ask);
    put("; up to %d sequences; medians of %d runs\n", v->engine_options.max_sequences, v->runs);
}

/* figures (policies, runs, N_FIGURES) */
static void serve_print(const serve *v, const double *figures, int first, int n) {
    double *x = resize(NULL, (size_t)v->runs * sizeof *x), medians[N_POLICIES][N_FIGURES];
    for (int p = 0; p < n; p++)
        for (int i = 0; i < N_FIGURES; i++) {
            for (int k = 0; k < v->runs; k++) x[k] = figures[(p * v->runs + k) * N_FIGURES + i];
            medians[p][i] = median(x, v->runs);
        }
    free(x);
    for (int p = 0; v->json && p < n; p++) {
        put("%s\n  {\"policy\": \"%s\"", p ? "," : "", policy_names[first + p]);
        for (int i = 0; i < N_FIGURES; i++)
            put(", \"%s\": ", serve_figures[i].json), put_number(medians[p][i]);
        put_text("}");
    }
    if (v->json) return;
    put("%-30s", "");
    for (int p = 0; p < n; p++) put(" %12s", policy_names[first + p]);
    put_text("\n");
    for (int i = 0; i < N_FIGURES; i++) {
        if (isnan(medians[0][i]) || (i == PER_STEP && isnan(medians[0][ACCEPTANCE])))
            continue; /* without speculation */
        put("%-30s", serve_figures[i].words);
        for (int p = 0; p < n; p++)
            put(" %12.*f", serve_figures[i].decimals, serve_figures[i].scale * medians[p][i]);
        put_text("\n");
    }
}

static int serve_model(serve *v, const char *path) {
    if (!load_models(path, v->speculation.path, &v->loaded, &v->draft)) return FAILED;
    int longest = v->shared + v->prompt.high + (v->ask ? v->ask : v->generate.high),
        context = llm_model_config(v->loaded)->context_length;
    if (longest > context)
        return fail("a request may have %d tokens, and the model's context is %d: give a shorter "
                    "--prompt, --gen, --ask or --shared",
                    longest, context);
    llm_request unused = llm_request_defaults();
    apply_speculation(&v->speculation, &v->engine_options, &unused);
    v->engine_options.context_length = longest;
    v->engine_options.draft = v->draft;
    v->requests = resize(NULL, (size_t)v->n_requests * sizeof *v->requests);
    int first = v->policy < N_POLICIES ? v->policy : 0, n = v->policy < N_POLICIES ? 1 : N_POLICIES;
    double *figures = resize(NULL, (size_t)n * (size_t)v->runs * N_FIGURES * sizeof *figures);
    serve_print_head(v, path);
    flush_output();
    bool good = true;
    /* policies take turns, so that a temporary load affects all of them alike */
    for (int k = 0; k < v->runs && good && !stop_requested; k++)
        for (int p = 0; p < n && good && !stop_requested; p++)
            good = serve_once(v, first + p, figures + (p * v->runs + k) * N_FIGURES);
    show_progress("bench", -1, "");
    if (good && !stop_requested) serve_print(v, figures, first, n);
    free(figures);
    return end_bench(v->json, good);
}

static int command_bench_serve(const command *self, int argc, char **argv) {
    serve v = {.engine_options = llm_engine_defaults(),
               .speculation.depth = NO_DEPTH,
               .policy = N_POLICIES,
               .n_requests = 64,
               .runs = 1,
               .window = 0.05f,
               .prompt = {16, 128},
               .generate = {10, 200},
               .seed = {false, 1}};
    llm_engine_options *e = &v.engine_options;
    const option options[] = {
        MODEL_OPTION(v.model),
        {0, "requests", "N", WHOLE, &v.n_requests, 1, 1 << 24, "number of requests (default 64)"},
        {0, "rate", "R", REAL, &v.rate, 0, 1e6,
         "requests per second, at random times (default 0: all at once)"},
        {'p', "prompt", "LOW-HIGH", RANGE, &v.prompt, 1, 1 << 20,
         "tokens in a prompt (default 16-128)"},
        {'g', "gen", "LOW-HIGH", RANGE, &v.generate, 1, 1 << 20,
         "tokens to generate after it (default 10-200)"},
        {0, "ask", "N", WHOLE, &v.ask, 1, 1 << 20,
         "tokens that each request asks for, though it may end sooner (default: what it "
         "gets)"},
        {0, "shared", "N", WHOLE, &v.shared, 0, 1 << 20,
         "additional tokens that begin all prompts (default 0)"},
        {'s', "seed", "N", SEED, &v.seed, 0, 0,
         "seed of the times, lengths and tokens (default 1)"},
        {'r', "runs", "R", WHOLE, &v.runs, 1, 1000,
         "runs of each; medians are printed (default 1)"},
        {0, "policy", POLICIES "|all", CHOICE, &v.policy, 0, 0,
         "scheduling policy (default: all, side by side)"},
        {0, "window", "SECONDS", REAL, &v.window, 0, 3600,
         "how long dynamic batching waits for a group to fill (default 0.05)"},
        SCHEDULE_OPTIONS(*e),
        SPECULATION_OPTIONS(v.speculation),
        THREADS_OPTION(e->n_threads),
        CACHE_TYPE_OPTION(*e),
        CACHE_OPTION(*e, "what all sequences need"),
        BLOCK_OPTION(*e),
        JSON_OPTION(v.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED) status = check_speculation(self, &v.speculation);
    if (status == PARSED && v.ask && v.ask < v.generate.high)
        status =
            misuse(self, "--ask is %d, and --gen gives up to %d tokens: ask for as many, or more",
                   v.ask, v.generate.high);
    char *path = status == PARSED ? model_path(v.model) : NULL;
    if (status == PARSED) status = path ? serve_model(&v, path) : FAILED;
    free(path);
    free(v.requests);
    free(v.ids);
    llm_model_free(v.loaded);
    llm_model_free(v.draft);
    return status;
}

static const char bench_serve_notes[] =
    "Requests of random tokens and random lengths, as a server gets them, through one engine\n"
    "per policy. TTFT is the time from the arrival of a request to its first token, TPOT the\n"
    "time per token after that. p90: nine of ten requests have at most this value. The\n"
    "scheduler's time is the part of a step spent neither in the models nor in choosing tokens.\n"
    "\n"
    "Static and dynamic batching are done outside the engine. Requests wait until the engine\n"
    "is empty and enter it as a group, which is one array: every member asks for as many tokens\n"
    "as the longest one, and the group is only as large as the cache allows at that length. A\n"
    "request that has all its tokens is computed further, as padding, until the whole group is\n"
    "done. A server cannot know when a model will end a text, so requests usually ask for more\n"
    "tokens than they get (--ask).\n"
    "\n"
    "\"sequences in a step\" counts the sequences that still want tokens; \"ended, and still\n"
    "computed\" is the tokens of padding per step. \"cache slots wasted\" is, for continuous\n"
    "batching, the share of the used blocks that holds no token of a running sequence; for\n"
    "groups, the share of the group's reserved slots that holds no token of an unfinished\n"
    "request.\n"
    "\n"
    "Examples:\n"
    "  llm bench serve\n"
    "  llm bench serve --requests 100 --rate 5 --gen 10-500 --runs 3\n"
    "  llm bench serve --requests 100 --gen 10-500 --ask 500 --max-sequences 32 \\\n"
    "      --cache-memory 16M\n"
    "  llm bench serve --policy continuous --shared 256 --no-prefix-cache\n"
    "  llm bench serve --policy continuous --cache-memory 4M --preempt swap --json\n";

/* ---- llm bench speculate: one sequence, by the number of proposals ----------------------- */
typedef struct bench_speculate {
    const char *model, *file;
    llm_engine_options engine_options;
    speculation speculation;
    float temperature;
    int prompt, generate, n_texts, runs;
    uint64_t inflate; /* bytes; 0: the model as it is */
    bool json;
    llm_model *loaded, *draft;
    text words;
    int32_t **ids;  /* (n_texts, prompt) */
    int n_prompts;
} bench_speculate;

enum { DEPTHS = 10 }; /* depths 0 to 8, and automatic */
static int depth_at(int i) { return i < DEPTHS - 1 ? i : LLM_SPECULATE_AUTO; }

typedef struct speculate_sum { /* sums over all prompts of a run */
    double seconds;
    uint64_t tokens; /* number of tokens, not counting the first token of each prompt */
    uint64_t hash;   /* hash of all tokens, to compare runs */
    llm_statistics before, after;
} speculate_sum;

static bool speculate_once(bench_speculate *b, llm_engine *engine, int depth, speculate_sum *sum) {
    llm_error err;
    llm_event event;
    llm_request request = llm_request_defaults();
    request.n_prompt = b->prompt;
    request.max_tokens = 1 + b->generate;
    request.ignore_end = true;
    request.speculate = depth;
    request.lookup = b->speculation.lookup;
    request.branches = b->speculation.branches;
    request.sampling.temperature = b->temperature;
    *sum = (speculate_sum){.before = llm_engine_statistics(engine)};
    for (int i = 0; i < b->n_prompts && !stop_requested; i++) {
        double first = 0, last = 0;
        int status = 1;
        request.prompt = b->ids[i];
        if (!llm_submit(engine, &request, NULL, &err)) return !fail_with(&err);
        while (!stop_requested && (status = llm_step(engine, &err)) > 0)
            while (llm_next_event(engine, &event)) {
                if (event.error) return !fail("%s", event.error);
                last = llm_seconds();
                if (first == 0) first = last;
                sum->tokens += event.index > 0;
                sum->hash = (sum->hash ^ (uint64_t)event.token) * 0x100000001B3u;
            }
        if (status < 0) return !fail_with(&err);
        sum->seconds += last - first;
    }
    sum->after = llm_engine_statistics(engine);
    return true;
}

static void speculate_print(const bench_speculate *b, int depth, double rate, double plain,
                            const speculate_sum *sum) {
    llm_statistics s = sum->after;
    s.proposed -= sum->before.proposed;
    s.accepted -= sum->before.accepted;
    s.decode_steps -= sum->before.decode_steps;
    s.generated_tokens -= sum->before.generated_tokens;
    double a = acceptance(&s), per_step = tokens_per_step(&s);
    double formula = depth >= 0 ? a < 1 ? (1 - pow(a, depth + 1)) / (1 - a) : depth + 1 : NAN;
    if (b->json) {
        const struct { const char *name; double value; } values[] = {
            {"tokens_per_second", rate}, {"times_plain", rate / plain},
            {"acceptance", s.proposed ? a : NAN}, {"tokens_per_step", per_step},
            {"formula", formula}};
        put(depth == 0  ? "\n  {\"speculate\": %d"
            : depth > 0 ? ",\n  {\"speculate\": %d"
                        : ",\n  {\"speculate\": \"auto\"",
            depth);
        for (int i = 0; i < COUNT(values); i++)
            put(", \"%s\": ", values[i].name), put_number(values[i].value);
        put_text("}");
        return;
    }
    if (depth < 0) put("auto");
    else put("%4d", depth);
    put(" %11.1f %8.2f x", rate, rate / plain);
    if (s.proposed) put(" %9.1f %%", 100 * a);
    else put(" %11s", "");
    put(" %14.2f", per_step);
    if (isnan(formula)) put_text("\n");
    else put(" %9.2f\n", formula);
}

static bool speculate_rows(bench_speculate *b, llm_engine *engine) {
    double *rates = resize(NULL, (size_t)DEPTHS * (size_t)b->runs * sizeof *rates), plain = 0;
    speculate_sum sums[DEPTHS], warm;
    bool good = speculate_once(b, engine, 0, &warm);
    for (int k = 0; k < b->runs; k++)
        for (int i = 0; good && i < DEPTHS && !stop_requested; i++) {
            show_progress("bench", (double)(k * DEPTHS + i) / (b->runs * DEPTHS), "");
            good = speculate_once(b, engine, depth_at(i), &sums[i]);
            rates[i * b->runs + k] = (double)sums[i].tokens / sums[i].seconds;
        }
    show_progress("bench", -1, "");
    for (int i = 0; good && i < DEPTHS && !stop_requested; i++) {
        double rate = median(rates + i * b->runs, b->runs);
        if (i == 0) plain = rate;
        speculate_print(b, depth_at(i), rate, plain, &sums[i]);
        if (b->temperature == 0 && sums[i].hash != sums[0].hash)
            good = !fail("speculation has changed the text: this is a bug");
    }
    free(rates);
    return good;
}

/* Read the first texts that have at least `prompt` tokens. */
static bool speculate_read(bench_speculate *b) {
    if (!read_all(b->file, &b->words)) return false;
    const char *at = b->words.data, *document;
    size_t length;
    b->ids = resize(NULL, (size_t)b->n_texts * sizeof *b->ids);
    while (b->n_prompts < b->n_texts &&
           next_document(&at, b->words.data + b->words.length, &document, &length)) {
        llm_error err;
        int64_t n = llm_tokenize_new(llm_model_tokenizer(b->loaded), document, length,
                                     LLM_TOKENIZE_BOS, &b->ids[b->n_prompts], &err);
        if (n >= b->prompt) b->n_prompts++;
        else llm_free(b->ids[b->n_prompts]);
        if (n < 0) return !fail_with(&err);
    }
    return b->n_prompts > 0 || !fail("%s holds no text of %d tokens", b->file, b->prompt);
}

static void speculate_head(const bench_speculate *b, const char *path) {
    if (b->json) {
        put_text("{\"model\": ");
        put_json_text(path);
        put_text(", \"draft\": ");
        put_json_text(b->draft ? b->speculation.path : "lookup");
        put(", \"texts\": %d, \"prompt\": %d, \"generate\": %d, \"temperature\": %g, \"runs\": %d, "
            "\"rows\": [",
            b->n_prompts, b->prompt, b->generate, (double)b->temperature, b->runs);
    } else {
        put_text(path);
        put_text(" with ");
        put_text(b->draft ? b->speculation.path : "lookup");
        put(": %d texts, prompts of %d, then %d tokens, one after another; temperature %g; medians "
            "of %d runs\n",
            b->n_prompts, b->prompt, b->generate, (double)b->temperature, b->runs);
        if (b->draft)
            put("a step of the model reads %s of weights, one of the draft %s\n",
                HUMAN(llm_model_step_bytes(b->loaded)), HUMAN(llm_model_step_bytes(b->draft)));
        put_text("   K    tokens/s  against 0   accepted  tokens a step   formula\n");
    }
    flush_output();
}

static int speculate_model(bench_speculate *b, const char *path) {
    llm_error err;
    if (!load_models(path, b->speculation.path, &b->loaded, &b->draft)) return FAILED;
    if (b->inflate) {
        llm_model_free(b->loaded);
        if (!(b->loaded = inflated_model(path, b->inflate))) return FAILED;
    }
    if (!speculate_read(b)) return FAILED;
    llm_engine_options *e = &b->engine_options;
    e->draft = b->draft;
    e->max_sequences = 1;
    e->prefix_cache = false;
    e->context_length = b->prompt + b->generate + 1;
    if (!bench_fits(b->loaded, b->prompt, b->generate + 1)) return FAILED;
    llm_engine *engine = create_engine(b->loaded, e, &err);
    if (!engine) return fail_with(&err);
    speculate_head(b, path);
    int status = end_bench(b->json, speculate_rows(b, engine));
    free_engine(engine);
    return status;
}

static int command_bench_speculate(const command *self, int argc, char **argv) {
    bench_speculate b = {.file = "models/eval.txt",
                         .engine_options = llm_engine_defaults(),
                         .speculation.depth = NO_DEPTH,
                         .prompt = 32,
                         .generate = 64,
                         .n_texts = 8,
                         .runs = 3};
    const option options[] = {
        MODEL_OPTION(b.model),
        {'d', "draft", "FILE", TEXT, &b.speculation.path, 0, 0,
         "a small model of the same vocabulary, which proposes tokens"},
        {0, "lookup", NULL, FLAG, &b.speculation.lookup, 0, 0,
         "propose what followed the same words earlier; needs no draft"},
        {0, "branches", "N", WHOLE, &b.speculation.branches, 1, LLM_MOST_BRANCHES,
         "up to N proposals for the same position: a tree (default: 1, or as many as pay "
         "off with K = auto)"},
        {'f', "file", "FILE", TEXT, &b.file, 0, 0,
         "texts, between lines of <|endoftext|> (default models/eval.txt)"},
        {0, "inflate", "SIZE", SIZE, &b.inflate, 0, 0,
         "make the model this large, with the same tokens: see llm synth"},
        {0, "texts", "N", WHOLE, &b.n_texts, 1, 100000, "number of texts to continue (default 8)"},
        {'p', "prompt", "N", WHOLE, &b.prompt, 1, 1 << 20,
         "tokens of each text used as prompt (default 32)"},
        {'g', "gen", "N", WHOLE, &b.generate, 1, 1 << 20,
         "tokens to generate after it (default 64)"},
        {0, "temperature", "T", REAL, &b.temperature, 0, 100,
         "sampling temperature (default 0: greedy)"},
        {'r', "runs", "R", WHOLE, &b.runs, 1, 1000,
         "runs of each; medians are printed (default 3)"},
        THREADS_OPTION(b.engine_options.n_threads),
        JSON_OPTION(b.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED && !b.speculation.path && !b.speculation.lookup)
        status = misuse(self, "nothing proposes tokens: give --draft FILE or --lookup");
    if (status == PARSED) status = check_speculation(self, &b.speculation);
    char *path = status == PARSED ? model_path(b.model) : NULL;
    if (status == PARSED) status = path ? speculate_model(&b, path) : FAILED;
    for (int i = 0; i < b.n_prompts; i++) llm_free(b.ids[i]);
    free(b.ids);
    free(b.words.data);
    free(path);
    llm_model_free(b.loaded);
    llm_model_free(b.draft);
    return status;
}

static const char bench_speculate_notes[] =
    "One sequence at a time, with 0 to 8 proposals per step, and with the number that the\n"
    "engine expects to pay off. If each proposal is accepted with probability a, a step gives\n"
    "(1 - a^(K+1)) / (1 - a) tokens: the formula. Speculation pays off if these tokens are\n"
    "worth more than the cost of the proposals and of the wider step.\n"
    "\n"
    "Examples:\n"
    "  llm bench speculate --draft models/tales-draft.gguf --inflate 600M\n"
    "  llm bench speculate --lookup -f letters.txt --temperature 0.8 --json\n";

/* ---- llm bench itself -------------------------------------------------------------------- */
static const command bench_modes[] = {
    {"bench batch", "The throughput of many sequences together, compared with one.",
     "[-m FILE] [options]", command_bench_batch, bench_batch_notes},
    {"bench serve", "Requests that come and go: throughput and latency, by policy.",
     "[-m FILE] [options]", command_bench_serve, bench_serve_notes},
    {"bench speculate", "One sequence, by the number of proposals per step.",
     "--draft FILE | --lookup [-m FILE] [options]", command_bench_speculate, bench_speculate_notes},
};

static int bench_mode(const command *self, int argc, char **argv) {
    suggestion s = {argv[0], NULL, 0};
    for (int i = 0; i < COUNT(bench_modes); i++) {
        const char *name = bench_modes[i].name + sizeof "bench";
        if (!strcmp(name, argv[0])) return bench_modes[i].run(&bench_modes[i], argc - 1, argv + 1);
        consider(&s, name);
    }
    if (s.best)
        return misuse(self, "no benchmark is named '%s'; did you mean '%s'?", argv[0], s.best);
    return misuse(self, "no benchmark is named '%s'", argv[0]);
}

static int command_bench(const command *self, int argc, char **argv) {
    if (argc > 0 && argv[0][0] != '-') return bench_mode(self, argc, argv);
    bench b = {.generate = 32, .runs = 3, .engine = llm_engine_defaults()};
    b.engine.prefix_cache = false; /* each run computes its whole prompt */
    const option options[] = {
        MODEL_OPTION(b.model),
        {'t', "threads", "LIST", LIST, &b.threads, 1, 4096,
         "numbers of threads to try (default: 1, and one per processor)"},
        DEVICE_OPTIONS,
        {'p', "prompt", "LIST", LIST, &b.prompts, 1, 1 << 20,
         "prompt lengths to try (default 16,128,512)"},
        {'g', "gen", "N", WHOLE, &b.generate, 1, 1 << 20,
         "tokens to generate after each prompt (default 32)"},
        {'r', "runs", "R", WHOLE, &b.runs, 1, 1000,
         "runs of each; medians are printed (default 3)"},
        {0, "profile", NULL, FLAG, &b.profile, 0, 0,
         "measure each operation of the program, for the first --prompt and the last "
         "--threads"},
        NAIVE_OPTION(b.engine),
        CACHE_TYPE_OPTION(b.engine),
        BLOCK_OPTION(b.engine),
        STEP_OPTION(b.engine),
        JSON_OPTION(b.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    char *path = status == PARSED ? model_path(b.model) : NULL;
    if (status == PARSED) status = path ? bench_model(&b, path) : FAILED;
    free(path);
    free(b.threads.values);
    free(b.prompts.values);
    llm_model_free(b.loaded);
    return status;
}

static const char bench_notes[] =
    "For each number of threads and each length: a prompt of that many random tokens (prefill),\n"
    "then --gen tokens after it (decode). GB/s counts the weights and the cached keys and values\n"
    "that decoding reads. memory is the speed at which that many threads read memory on this\n"
    "machine, measured first; share is GB/s divided by it. With --profile, predicted is the\n"
    "least time for an operation's bytes or for its arithmetic, whichever is longer, if all\n"
    "bytes come from memory.\n"
    "\n"
    "Other benchmarks, each with its own --help:\n"
    "  llm bench batch        the throughput of many sequences, compared with one\n"
    "  llm bench serve        requests that come and go: throughput and latency, by policy\n"
    "  llm bench speculate    one sequence, by the number of proposals per step\n"
    "\n"
    "Examples:\n"
    "  llm bench\n"
    "  llm bench -m some.gguf --threads 1,2,4 --prompt 128,1024 --gen 64 --runs 5\n"
    "  llm synth --shape tinyllama-1.1b --type q4_0 tiny.gguf && llm bench -m tiny.gguf --json\n";

const command bench_command = {
    "bench",
    "Measure prefill and decode, batches, serving or speculation.",
    "[batch|serve|speculate] [-m FILE] [options]", command_bench, bench_notes};
