/* 17-product.c - llm lesson kernel --ladder: one product of 4-bit weights and one row of x, in the
 * seven versions of 17-product.cu. The emulated device runs each and counts its instructions and
 * its memory accesses; a GPU, if there is one, times it. Each result is compared with the plain
 * loop. See 17-product.md. */
#include "lesson.h"

#if defined(LLM_WITH_OBSERVED) || defined(LLM_WITH_CUDA)
#include "../models/quantize.h"
#include "../tests/emulator.h"

enum { PRODUCT_VERSIONS = 7, PRODUCT_RUNS = 100 };

static const char *const product_names[PRODUCT_VERSIONS] = {
    "1 thread per row", "2 warp per row",  "3 16-byte loads", "4 unpacking pairs",
    "5 matrix unit",    "6 copying ahead", "7 split-K"};

/* The largest errors, relative to the sum of the absolute products of a row: from version 4 on, x
 * has the 11 bits of an f16, and version 4 also adds four products in f16. */
static const double product_errors[PRODUCT_VERSIONS] = {1e-5, 1e-5, 1e-5, 2e-3, 5e-4, 5e-4, 5e-4};

typedef struct product_case {
    int rows, columns;
    unsigned char *blocks;   /* (rows, columns / 32) blocks of q4_0 */
    float *x, *out;          /* (columns), (rows) */
    double *expected, *size; /* (rows) the plain loop's sums, of products and of absolute ones */
} product_case;

static float product_random(uint64_t *state) { /* -1 to 1 */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int32_t)(*state >> 32) / 2147483648.0);
}

static product_case product_new_case(int rows, int columns) {
    const llm_type_info *type = llm_type_find(LLM_Q4_0);
    size_t row_size = row_bytes(LLM_Q4_0, (uint64_t)columns), n = (size_t)rows;
    product_case c = {rows, columns, resize(NULL, n * row_size),
                      resize(NULL, (size_t)columns * sizeof *c.x), resize(NULL, n * sizeof *c.out),
                      resize(NULL, n * sizeof *c.expected), resize(NULL, n * sizeof *c.size)};
    float *row = resize(NULL, (size_t)columns * sizeof *row);
    uint64_t state = 17;
    for (int i = 0; i < columns; i++) c.x[i] = product_random(&state);
    for (int r = 0; r < rows; r++) {
        unsigned char *blocks = c.blocks + (size_t)r * row_size;
        for (int i = 0; i < columns; i++) row[i] = product_random(&state);
        llm_pack(LLM_Q4_0, row, blocks, columns);
        type->unpack(blocks, row, columns);
        c.expected[r] = c.size[r] = 0.0;
        for (int i = 0; i < columns; i++) {
            c.expected[r] += (double)row[i] * c.x[i];
            c.size[r] += fabs((double)row[i] * c.x[i]);
        }
    }
    free(row);
    return c;
}

static void product_free_case(product_case *c) {
    free(c->blocks);
    free(c->x);
    free(c->out);
    free(c->expected);
    free(c->size);
}

typedef const char *product_runner(int number, const void *blocks, const float *x, int rows,
                                   int columns, float *out, int runs, double *seconds);

/* Run a version and compare its result with the plain loop's. False: it failed. */
static bool product_check(product_runner *run, int number, product_case *c, int runs,
                          double *seconds, double *error) {
    for (int r = 0; r < c->rows; r++) c->out[r] = NAN;
    const char *failure = run(number, c->blocks, c->x, c->rows, c->columns, c->out, runs, seconds);
    if (failure) return !fail("version %d failed: %s", number, failure);
    *error = 0.0;
    for (int r = 0; r < c->rows; r++) {
        double off = fabs(c->out[r] - c->expected[r]) / (c->size[r] > 0.0 ? c->size[r] : 1.0);
        if (isnan(off)) off = INFINITY;
        if (off > *error) *error = off;
    }
    if (*error <= product_errors[number - 1]) return true;
    return !fail("version %d is wrong: its error is %.1e", number, *error);
}

static double product_kib(const product_case *c) {
    return (double)c->rows * (double)row_bytes(LLM_Q4_0, (uint64_t)c->columns) / 1024;
}
#endif

#ifdef LLM_WITH_OBSERVED
product_runner product_run_emulated; /* defined in 17-product.cu */

typedef struct product_counts {
    uint32_t warps_per_block, blocks;
    double accesses;             /* accesses by whole warps, to global and shared memory */
    double requests, full;       /* accesses to global memory; those without wasted sectors */
    double weights, x;           /* bytes moved, in whole sectors */
    double passes, least;        /* passes over shared memory, as in emulator_access */
    double ahead;                /* bytes of weights that the first warp reads before it computes */
    double arithmetic, warp_operations, barriers;
    double error;
} product_counts;

static void product_observe(void *user, const emulator_access *a) {
    product_counts *c = user;
    c->warps_per_block = a->block[0] / 32;
    c->blocks = a->grid[0];
    c->accesses++;
    if (a->shared) {
        c->passes += a->passes, c->least += a->least;
        return;
    }
    c->requests++;
    c->full += a->sectors <= (a->used + 31) / 32;
    if (!strcmp(a->memory, "weights")) c->weights += 32.0 * a->sectors;
    if (!strcmp(a->memory, "x")) c->x += 32.0 * a->sectors;
    if (!strcmp(a->memory, "weights") && !a->operations && !a->block_index[0] && !a->warp)
        c->ahead += a->used;
}

static bool product_count(product_case *c, int number, product_counts *counts) {
    emulator_counts before = emulator_counted();
    memset(counts, 0, sizeof *counts);
    emulator_observe(product_observe, counts);
    bool good = product_check(product_run_emulated, number, c, 0, NULL, &counts->error);
    emulator_observe(NULL, NULL);
    emulator_counts after = emulator_counted();
    counts->arithmetic = (double)(after.arithmetic - before.arithmetic);
    counts->warp_operations = (double)(after.warp_operations - before.warp_operations);
    counts->barriers = (double)(after.barriers - before.barriers);
    return good;
}

/* KiB of weights that all warps together can have in flight. */
static double product_in_flight(const product_counts *c) {
    return (double)c->blocks * c->warps_per_block * c->ahead / 1024;
}

static void product_plot(lesson *l, const product_counts *counts, double kib) {
    plot moved = plot_new(PLOT_BARS, "Bytes moved per byte of weights (in sectors, no caches)", "",
                          ""),
         work = plot_new(PLOT_BARS, "Warp instructions per KiB of weights", "", ""),
         flight = plot_new(PLOT_BARS, "KiB of weights in flight, if all warps run at once", "", "");
    plot_note(&moved, "Memory moves whole sectors, of which versions 1 and 2 use a part at a "
                      "time. From version 5 on, 16 rows share x.");
    plot_note(&work, "Pairs and the matrix unit leave few instructions per weight.");
    plot_note(&flight, "Memory answers late, so many bytes must be on the way at any time.");
    int weights = plot_series_add(&moved, "weights"), x = plot_series_add(&moved, "x"),
        arithmetic = plot_series_add(&work, "arithmetic"),
        requests = plot_series_add(&work, "loads and stores"),
        other = plot_series_add(&work, "shuffles and matrix products"),
        requested = plot_series_add(&flight, "");
    moved.stacked = work.stacked = true;
    for (int i = 0; i < PRODUCT_VERSIONS; i++) {
        plot_category(&moved, product_names[i]);
        plot_bar(&moved, weights, counts[i].weights / 1024 / kib);
        plot_bar(&moved, x, counts[i].x / 1024 / kib);
        plot_category(&work, product_names[i]);
        plot_bar(&work, arithmetic, counts[i].arithmetic / kib);
        plot_bar(&work, requests, counts[i].accesses / kib);
        plot_bar(&work, other, counts[i].warp_operations / kib);
        plot_category(&flight, product_names[i]);
        plot_bar(&flight, requested, product_in_flight(&counts[i]));
    }
    show_plot(l, &moved);
    show_plot(l, &work);
    show_plot(l, &flight);
}

static void product_show(lesson *l, const product_counts *counts, double kib) {
    static const column work_columns[] = {
        {"version", "version", "%s"},          {"arithmetic", "arithmetic", "%.1f"},
        {"accesses", "memory", "%.1f"},        {"warp_operations", "warp", "%.1f"},
        {"instructions", "all", "%.0f"},       {"warps", "warps", "%.0f"},
        {"ahead", "ahead", "%.0f"},            {"in_flight_kib", "in flight", "%.2f"},
        {"error", "error", "%.0e"}};
    static const column memory_columns[] = {
        {"version", "version", "%s"},          {"requests", "requests", "%.0f"},
        {"full_percent", "full %", "%.0f"},    {"weights_kib", "weights", "%.0f"},
        {"x_kib", "x", "%.0f"},                {"passes", "passes", "%.0f"},
        {"least", "min", "%.0f"},              {"barriers", "barriers", "%.0f"}};
    table work = new_table(work_columns, COUNT(work_columns)),
          memory = new_table(memory_columns, COUNT(memory_columns));
    for (int i = 0; i < PRODUCT_VERSIONS; i++) {
        const product_counts *c = &counts[i];
        double barriers = c->barriers * c->warps_per_block,
               all = c->arithmetic + c->accesses + c->warp_operations + barriers;
        add_row(&work, product_names[i], c->arithmetic / kib, c->accesses / kib,
                c->warp_operations / kib, all / kib, (double)c->blocks * c->warps_per_block,
                c->ahead, product_in_flight(c), c->error);
        add_row(&memory, product_names[i], c->requests, 100 * c->full / c->requests,
                c->weights / 1024, c->x / 1024, c->passes > 0 ? c->passes : NAN,
                c->passes > 0 ? c->least : NAN, c->barriers);
    }
    say(l,
        "Instructions of whole warps per KiB of weights: arithmetic on weights and x (addresses "
        "and loops are not counted), loads and stores, and warp operations (shuffles, matrix "
        "products). Ahead: bytes of weights that a warp requests before it first computes; in "
        "flight: KiB that all warps together can have requested.\n\n");
    show_table(l, &work, "work");
    say(l,
        "\nGlobal memory: requests of whole warps; full: those that move no more sectors of 32 "
        "bytes than their bytes fill (coalesced); KiB moved of the weights and of x (which, on a "
        "GPU, mostly comes from a cache). Shared memory: passes, and the fewest possible, without "
        "bank conflicts. Barriers: of whole blocks.\n\n");
    show_table(l, &memory, "memory");
}
#endif

#ifdef LLM_WITH_CUDA
product_runner product_run_cuda; /* defined in 17-product.cu */
int product_devices_cuda(void);

static bool product_time(lesson *l, int rows, int columns) {
    static const column columns_[] = {{"version", "version", "%s"},
                                      {"microseconds", "us", "%.1f"},
                                      {"gigabytes_per_second", "GB/s", "%.0f"},
                                      {"error", "error", "%.0e"}};
    table t = new_table(columns_, COUNT(columns_));
    product_case c = product_new_case(rows, columns);
    bool good = true;
    for (int i = 0; i < PRODUCT_VERSIONS && good; i++) {
        double seconds = 0.0, error = 0.0;
        good = !stop_requested &&
               product_check(product_run_cuda, i + 1, &c, PRODUCT_RUNS, &seconds, &error);
        add_row(&t, product_names[i], seconds * 1e6, product_kib(&c) * 1024 / seconds / 1e9, error);
    }
    say(l, "\nOn the GPU, with weights (%d, %d), %.1f MiB; time: the mean of %d launches.\n\n",
        rows, columns, product_kib(&c) / 1024, PRODUCT_RUNS);
    show_table(l, &t, "times");
    product_free_case(&c);
    return good;
}
#endif

bool product_ladder(lesson *l, int rows, int columns) {
    bool good = true, counted = false, timed = false;
    (void)l, (void)rows, (void)columns;
#ifdef LLM_WITH_CUDA
    timed = chosen.device != DEVICE_EMULATED && product_devices_cuda() > 0;
#endif
    if (!timed && chosen.device == DEVICE_CUDA) return !fail("there is no GPU to time the kernels");
#ifdef LLM_WITH_OBSERVED
    product_case c = product_new_case(rows ? rows : 128, columns ? columns : 4096);
    product_counts counts[PRODUCT_VERSIONS];
    for (int i = 0; i < PRODUCT_VERSIONS && good; i++)
        good = product_count(&c, i + 1, &counts[i]) && !stop_requested;
    counted = true;
    if (good) {
        say(l, "One row of x times weights (%d, %d) in q4_0, %.0f KiB, in seven versions.\n\n",
            c.rows, c.columns, product_kib(&c));
        fact(l, "weights_kib", product_kib(&c));
        product_show(l, counts, product_kib(&c));
        product_plot(l, counts, product_kib(&c));
    }
    product_free_case(&c);
#endif
#ifdef LLM_WITH_CUDA
    if (timed && good) good = product_time(l, rows ? rows : 14336, columns ? columns : 4096);
#endif
    if (!counted && !timed)
        return !fail("this program was built without the emulated device, which counts, and there "
                     "is no GPU: install g++, then run make again");
    if (good && !timed) say(l, "\ntime: needs a GPU\n");
    return good;
}
