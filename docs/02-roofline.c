/* 02-roofline.c - llm lesson roofline: the two limits of a machine, and how close prefill and
 * decode get to them. Described in 02-roofline.md. */
#include "lesson.h"
#include "program.h"
#include "../tests/bench.h"

/* Measure the speed, in bytes per second, at which all threads together read a buffer of this size
 * repeatedly. If the buffer fits in a cache, this is the speed of the cache. */
static double read_speed(size_t bytes, int threads) {
    size_t part = bytes / sizeof(uint64_t) / (size_t)threads / 8 * 8, n = part * (size_t)threads;
    uint64_t *buffer = resize(NULL, n * sizeof *buffer), used = 0;
    memset(buffer, 1, n * sizeof *buffer);
    double best = 0, end = llm_seconds() + 0.25;
    int passes = (int)(((size_t)64 << 20) / (n * sizeof *buffer + 1)) + 1;
    while (llm_seconds() < end) {
        double start = llm_seconds();
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) reduction(+ : used)
#endif
        for (int thread = 0; thread < threads; thread++)
            for (int pass = 0; pass < passes; pass++) {
                const uint64_t *p = buffer + (size_t)thread * part;
                uint64_t sums[8] = {0};
                for (size_t i = 0; i < part; i += 8)
                    for (int k = 0; k < 8; k++) sums[k] += p[i + (size_t)k] ^ (uint64_t)pass;
                for (int k = 0; k < 8; k++) used += sums[k];
            }
        double rate = (double)passes * (double)n * sizeof *buffer / (llm_seconds() - start);
        if (rate > best) best = rate;
    }
    volatile uint64_t sink = used; /* so that the reads are not optimised away */
    (void)sink;
    free(buffer);
    return best;
}

/* Measure the bandwidth of a GPU's memory, in bytes per second: SwiGLU over arrays larger than any
 * cache reads two of them and writes one. */
static double device_memory_speed(llm_backend *b) {
    llm_error err;
    const int64_t n = 1 << 26;
    size_t bytes = (size_t)n * sizeof(float);
    float *gate = b->allocate(b->context, bytes, "a test", &err),
          *up = gate ? b->allocate(b->context, bytes, "a test", &err) : NULL;
    double best = 0;
    bool good = up != NULL;
    llm_program p = {0};
    llm_op *op = program_add(&p, LLM_OP_SWIGLU, NULL, gate, n, gate, n);
    op->in[1] = program_buffer(&p, up, n);
    for (int run = 0; run < 8 && good; run++) {
        double start = llm_seconds();
        good = program_run(b, &p, 1, &err);
        if (run > 0) best = larger(best, 3.0 * (double)bytes / (llm_seconds() - start));
    }
    if (!good) fail_with(&err);
    program_free(b, &p);
    b->release(b->context, gate);
    b->release(b->context, up);
    return good ? best : 0;
}

bool roofline_measure(const lesson *l, llm_backend *device, roofline *roof) {
    int threads = llm_cpu_threads(device);
    double bytes = (double)llm_model_step_bytes(l->loaded);
    *roof = (roofline){0};
    if (chosen.device == DEVICE_EMULATED)
        return !fail("the emulated device has no speed to measure: it runs on the CPU");
    if (threads) {
        roof->memory = measure_bandwidth(threads),
        roof->cached = read_speed((size_t)bytes, threads);
        roof->fits = bytes < processor_cache();
    } else {
        roof->memory = roof->cached = device_memory_speed(device);
    }
    roof->peak = roof->memory > 0 ? arithmetic_peak(l->loaded, device) : 0;
    return roof->peak > 0;
}

/* Count the operations and bytes of a step with n tokens of each sequence, the last one at position
 * end - 1, as sums over the program's operations. Activations do not count, since they stay in a
 * cache. */
static void roofline_count(llm_engine *engine, int n, int end, int sequences, double *operations,
                           double *bytes) {
    const llm_program *p = llm_engine_program(engine, false);
    lone_batch lone;
    make_lone_batch(&lone, n, end, 16, true);
    *operations = *bytes = 0;
    for (int i = 0; i < p->n_ops; i++) {
        llm_cost cost = llm_op_cost(p, &p->ops[i], &lone.batch);
        *operations += sequences * cost.operations;
        *bytes += cost.weight_bytes +
                  (p->ops[i].kind == LLM_OP_ATTENTION ? sequences * cost.cache_bytes : 0);
    }
    free(lone.memory);
}

typedef struct roofline_row {
    bool prefill;
    double tokens; /* number of tokens in a step */
    double operations, bytes; /* operations of a step; bytes it reads */
    double measured; /* measured speed in tokens per second */
} roofline_row;

enum { ROOFLINE_PROMPT = 32, ROOFLINE_GENERATE = 32 }; /* tokens of each sequence that decodes */

static bool roofline_decode(llm_engine *engine, int sequences, roofline_row *row) {
    double seconds, rates[3];
    for (int run = 0; run < 3; run++)
        if (!bench_group(engine, sequences, ROOFLINE_PROMPT, ROOFLINE_GENERATE,
                         (uint64_t)(sequences * 10 + run), &seconds, &rates[run]))
            return false;
    *row = (roofline_row){.tokens = sequences, .measured = median(rates, 3)};
    roofline_count(engine, 1, ROOFLINE_PROMPT + ROOFLINE_GENERATE / 2, sequences, &row->operations,
                   &row->bytes);
    return true;
}

static bool roofline_prefill(lesson *l, llm_engine *engine, int n, roofline_row *row) {
    prefill_row r;
    if (!prefill_measure(l, engine, n, 1, 3, &r)) return false;
    *row = (roofline_row){.prefill = true, .tokens = n, .measured = n / r.ttft};
    roofline_count(engine, n, n, 1, &row->operations, &row->bytes);
    return true;
}

static void roofline_show(lesson *l, const roofline *roof, const roofline_row *rows, int n) {
    static const column columns[] = {{"what", "what", "%s"},
                                     {"tokens", "tokens", "%.0f"},
                                     {"intensity", "FLOP/byte", "%.1f"},
                                     {"bound", "bound by", "%s"},
                                     {"predicted", "predicted", "%.0f"},
                                     {"measured", "measured", "%.0f"},
                                     {"share_percent", "share %", "%.0f"}};
    double bandwidth = roof->fits ? roof->cached : roof->memory;
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_LINES, "The roof, and the measured points", "operations per byte read",
                      "operations per second");
    p.log_x = p.log_y = true;
    plot_note(&p, "No step can be above the roof: on its slope, moving bytes takes longest, on "
                  "its flat part, arithmetic does. More tokens in a step are further to the "
                  "right.");
    int roof_line = plot_series_add(&p, roof->fits ? "roof, from the cache" : "roof"),
        memory_line = roof->fits ? plot_series_add(&p, "roof, from memory") : -1;
    int decode = plot_series_add(&p, "decode"), prefill = plot_series_add(&p, "prefill");
    if (decode >= 0) p.series[decode].dots = true;
    if (prefill >= 0) p.series[prefill].dots = true;
    if (roof_line >= 0) p.series[roof_line].named_at = 24;
    if (memory_line >= 0) p.series[memory_line].named_at = 40;
    for (double x = 1; x < 2100; x *= pow(2, 0.125)) {
        plot_point(&p, roof_line, x, fmin(roof->peak, x * bandwidth));
        plot_point(&p, memory_line, x, fmin(roof->peak, x * roof->memory));
    }
    for (int i = 0; i < n; i++) {
        const roofline_row *r = &rows[i];
        double intensity = r->operations / r->bytes,
               steps = fmin(bandwidth / r->bytes, roof->peak / r->operations);
        add_row(&t, r->prefill ? "prefill" : "decode", r->tokens, intensity,
                intensity * bandwidth < roof->peak ? "bytes" : "arithmetic", steps * r->tokens,
                r->measured, 100 * r->measured / (steps * r->tokens));
        plot_point(&p, r->prefill ? prefill : decode, intensity,
                   r->measured * r->operations / r->tokens);
    }
    say(l,
        "Bandwidth: %.1f GB/s from memory, %.1f GB/s from a buffer as large as the weights (%s%s). "
        "Peak: %.1f GFLOP/s in matrix products. The two limits meet at %.0f operations per "
        "byte.\n\n",
        1e-9 * roof->memory, 1e-9 * roof->cached, HUMAN(llm_model_step_bytes(l->loaded)),
        roof->fits ? ", which fits in the processor's cache" : "",
        1e-9 * roof->peak, roof->peak / bandwidth);
    fact(l, "memory_bytes_per_second", roof->memory);
    fact(l, "cached_bytes_per_second", roof->cached);
    fact(l, "peak_operations_per_second", roof->peak);
    fact(l, "weights_fit_the_cache", roof->fits);
    show_table(l, &t, "rows");
    say(l,
        "\npredicted and measured: tokens per second. The prediction is the tokens of a step times "
        "the lower of bandwidth / bytes of the step and peak / operations of the step.\n");
    show_plot(l, &p);
}

static int lesson_roofline(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    const option options[] = {LESSON_OPTIONS(l)};
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    static const int sequences[] = {1, 2, 4, 8, 16, 32}, prompts[] = {16, 64, 256};
    roofline_row rows[COUNT(sequences) + COUNT(prompts)];
    int n = 0;
    if (!fits_context(&l, ROOFLINE_PROMPT, ROOFLINE_GENERATE)) return lesson_end(&l, false);
    llm_backend *device = lesson_device(&l);
    if (!device) return lesson_end(&l, false);
    l.engine.max_sequences = 32;
    l.engine.prefix_cache = false;
    roofline roof;
    bool good = roofline_measure(&l, device, &roof);
    llm_backend_free(device); /* the engine creates its own */
    llm_engine *engine = good ? lesson_engine(l.loaded, &l.engine) : NULL;
    good = engine && roofline_decode(engine, 1, &rows[0]); /* to warm up */
    for (int i = 0; i < COUNT(sequences) && good && !stop_requested; i++)
        good = roofline_decode(engine, sequences[i], &rows[n++]);
    for (int i = 0; i < COUNT(prompts) && good && !stop_requested; i++)
        if (prompts[i] + 2 <= llm_model_config(l.loaded)->context_length)
            good = roofline_prefill(&l, engine, prompts[i], &rows[n++]);
    if (good && !stop_requested) roofline_show(&l, &roof, rows, n);
    free_engine(engine);
    return lesson_end(&l, good);
}

static const char roofline_notes[] =
    "Measures the bandwidth of memory and of the cache that holds the weights, and the peak rate\n"
    "of the engine's matrix product. From these alone it predicts the speed of decoding 1 to 32\n"
    "sequences and of prefill, and then measures both.\n"
    "\n"
    "Examples:\n"
    "  llm lesson roofline\n"
    "  llm lesson roofline -t 1 --svg roofline.svg\n";

const command roofline_lesson = {
    "lesson roofline", "Two limits of this machine; prefill and decode.",
    "[options]", lesson_roofline, roofline_notes};
