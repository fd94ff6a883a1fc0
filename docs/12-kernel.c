/* 12-kernel.c - llm lesson kernel: counts the memory accesses of GPU kernels. See 12-kernel.md.
 *
 * Everything runs on the emulated device. Its kernels are compiled with a call before each load and
 * store (see tests/emulator.h), and these calls are counted. The lesson shows the small kernels of
 * 12-kernel.cu, each with a poor and a good access pattern; all kernels of llm.cu that one decode
 * step launches; and one of those in detail: its grid, its blocks, and which lane reads which
 * bytes. */
#include "lesson.h"

#ifdef LLM_WITH_OBSERVED
#include "../tests/emulator.h"

llm_backend *llm_observed_backend(const llm_gpu_options *options, llm_error *err);
/* defined in 12-kernel.cu */
bool kernel_lesson_run(int which, const float *x, int rows, int columns, float *out, int n_out);

enum { KERNEL_PAIRS = 5, KERNEL_ROWS = 128, KERNEL_COLUMNS = 256, KERNEL_LANES = 32 };

typedef struct kernel_count { /* sums over the accesses of one kind */
    char name[40];            /* name of the kernel */
    char memory[24];          /* name of the memory that is accessed */
    bool shared, store;       /* shared or global memory; store or load */
    uint32_t bytes;           /* bytes per lane; 0: any number */
    uint32_t grid[3], block[3];
    uint64_t first, last;     /* indexes of the kernel's first and last launch */
    uint64_t launches;        /* number of launches of the kernel */
    double accesses;          /* number of accesses by whole warps */
    double lanes, used, sectors, passes, least; /* sums, as in emulator_access */
} kernel_count;

typedef struct kernel_watch { /* what the observer must count, and its counts */
    /* NULL: all kernels, one count for each. Otherwise the first launch of this kernel ("": of any
     * kernel), one count for each kind of access. */
    const char *kernel;
    kernel_count *counts;   /* (n) counts in order of first access */
    int n;
    bool kept;              /* whether `widest` is set */
    emulator_access widest; /* a load by the first warp, with the most bytes per lane */
} kernel_watch;

/* The short name of a kernel: llm__matmul_one_kernel<Layout> becomes matmul_one. */
static void kernel_name(const char *launched, char *out, size_t size) {
    while (*launched == '(') launched++;
    if (!strncmp(launched, "llm__", 5)) launched += 5;
    int n = (int)strcspn(launched, "<,)");
    if (n > 7 && !strncmp(launched + n - 7, "_kernel", 7)) n -= 7;
    snprintf(out, size, "%.*s", n, launched);
}

static void kernel_add(kernel_count *c, const emulator_access *a) {
    if (c->last != a->launch) c->launches++, c->last = a->launch;
    int lanes = 0;
    for (uint32_t mask = a->lanes; mask; mask &= mask - 1) lanes++;
    c->accesses++;
    c->lanes += lanes;
    if (a->shared) c->passes += a->passes, c->least += a->least;
    else c->used += a->used, c->sectors += a->sectors;
}

/* Keep the access for the map if it is a load by the grid's first warp, wider than the kept one. */
static void kernel_keep(kernel_watch *w, const emulator_access *a) {
    bool first = !a->warp && !a->block_index[0] && !a->block_index[1] && !a->block_index[2];
    if (!first || a->shared || a->store || a->sectors < 2 ||
        (w->kept && a->bytes <= w->widest.bytes))
        return;
    w->widest = *a;
    w->kept = true;
}

static void kernel_observe(void *user, const emulator_access *a) {
    kernel_watch *w = user;
    kernel_count key = {.first = a->launch, .bytes = a->bytes};
    kernel_name(a->kernel, key.name, sizeof key.name);
    if (w->kernel) {
        if ((*w->kernel && strcmp(key.name, w->kernel)) ||
            (w->n && w->counts[0].first != a->launch))
            return;
        snprintf(key.memory, sizeof key.memory, "%s", a->memory);
        key.shared = a->shared, key.store = a->store;
        kernel_keep(w, a);
    } else {
        key.bytes = 0;
    }
    int i = 0;
    for (; i < w->n; i++) {
        const kernel_count *c = &w->counts[i];
        if (!strcmp(c->name, key.name) && !strcmp(c->memory, key.memory) &&
            c->shared == key.shared && c->store == key.store && c->bytes == key.bytes)
            break;
    }
    if (i == w->n) {
        memcpy(key.grid, a->grid, sizeof key.grid);
        memcpy(key.block, a->block, sizeof key.block);
        w->counts = resize(w->counts, (size_t)(w->n + 1) * sizeof *w->counts);
        w->counts[w->n++] = key;
    }
    kernel_add(&w->counts[i], a);
}

static const char *kernel_shape(const uint32_t n[3], char *out, size_t size) {
    if (n[2] > 1) snprintf(out, size, "%ux%ux%u", n[0], n[1], n[2]);
    else if (n[1] > 1) snprintf(out, size, "%ux%u", n[0], n[1]);
    else snprintf(out, size, "%u", n[0]);
    return out;
}
#define KERNEL_SHAPE(n) kernel_shape(n, (char[40]){0}, 40)

/* The percentage of the moved bytes that lanes asked for. */
static double kernel_percent(double used, double sectors) {
    return sectors > 0 ? 100 * used / (32 * sectors) : NAN;
}

/* Draw which lane reads which bytes: one row per lane; one column per 4 bytes of the sectors that
 * are read (per 8, 16 or 32 bytes if there are many sectors); one colour per sector. */
static plot kernel_map(const emulator_access *a, const char *title) {
    plot p = plot_new(PLOT_MAP, title, "", "lane");
    plot_note(&p, "A row is a lane of the warp; a digit and its colour are one sector of 32 "
                  "bytes. Memory moves whole sectors, also for lanes that use a part of one.");
    uint64_t sectors[KERNEL_LANES * 8];
    int n = 0;
    for (int i = 0; i < KERNEL_LANES; i++)
        for (uint64_t s = a->address[i] / 32;
             a->lanes >> i & 1 && s <= (a->address[i] + a->bytes - 1) / 32; s++) {
            int k = n;
            while (k > 0 && sectors[k - 1] > s) k--;
            if (k > 0 && sectors[k - 1] == s) continue;
            memmove(sectors + k + 1, sectors + k, (size_t)(n++ - k) * sizeof *sectors);
            sectors[k] = s;
        }
    int per_sector = n <= 8 ? 8 : n <= 16 ? 4 : n <= 32 ? 2 : 1; /* columns */
    snprintf(p.x_label, sizeof p.x_label, "addresses: %d bytes per column, %d sectors",
             32 / per_sector, n);
    for (int i = 0; i < PLOT_COLOURS; i++) {
        int series = plot_series_add(&p, "");
        if (series >= 0) p.series[series].mark = (char)('0' + i);
    }
    for (int i = 0; i < KERNEL_LANES; i++)
        plot_category(&p, (char[8]){(char)('0' + i / 10), (char)('0' + i % 10), 0});
    for (int i = 0; i < KERNEL_LANES; i++)
        for (int k = 0; k < n; k++)
            for (int c = 0; c < per_sector; c++) {
                uint64_t from = 32 * sectors[k] + (uint64_t)(c * 32 / per_sector),
                         to = from + (uint64_t)(32 / per_sector);
                if (a->lanes >> i & 1 && a->address[i] < to && a->address[i] + a->bytes > from)
                    plot_cell(&p, i, k * per_sector + c, k % PLOT_COLOURS);
            }
    return p;
}

/* ---- Small kernels ----------------------------------------------------------------------- */

/* Check `out`: the sums of the rows of x or, if not `sums`, x transposed. */
static bool kernel_right(const float *x, const float *out, bool sums) {
    bool right = true;
    for (int row = 0; row < KERNEL_ROWS; row++) {
        float sum = 0;
        for (int i = 0; i < KERNEL_COLUMNS; i++) {
            sum += x[row * KERNEL_COLUMNS + i]; /* integers: exact in any order */
            right = right && (sums || out[i * KERNEL_ROWS + row] == x[row * KERNEL_COLUMNS + i]);
        }
        right = right && (!sums || out[row] == sum);
    }
    return right;
}

static bool kernel_pairs(lesson *l, emulator_access *strided) {
    static const char *const names[KERNEL_PAIRS] = {"sum, row per thread", "sum, row per warp",
                                                    "transpose, direct", "transpose, pitch 32",
                                                    "transpose, pitch 33"};
    static const column columns[] = {{"kernel", "kernel", "%s"},
                                     {"sectors_per_load", "sectors/load", "%.1f"},
                                     {"sectors_per_store", "/store", "%.1f"},
                                     {"moved_kib", "KiB moved", "%.0f"},
                                     {"used_percent", "used %", "%.0f"},
                                     {"shared_passes", "passes", "%.0f"},
                                     {"shared_least", "min", "%.0f"},
                                     {"right", "", "%.0f"}};
    table t = new_table(columns, l->json ? 8 : 7);
    const int n = KERNEL_ROWS * KERNEL_COLUMNS;
    float *x = resize(NULL, 2 * (size_t)n * sizeof *x), *out = x + n;
    for (int i = 0; i < n; i++) x[i] = (float)(i * 7919 % 1000);
    bool good = true;
    for (int k = 0; k < KERNEL_PAIRS && good; k++) {
        kernel_watch w = {.kernel = ""};
        kernel_count sum[3]; /* loads, stores, shared */
        memset(sum, 0, sizeof sum);
        emulator_observe(kernel_observe, &w);
        good = kernel_lesson_run(k, x, KERNEL_ROWS, KERNEL_COLUMNS, out, k < 2 ? KERNEL_ROWS : n) ||
               !fail("the emulated device failed: %s", emulator_fault());
        emulator_observe(NULL, NULL);
        for (int i = 0; i < w.n; i++) {
            kernel_count *c = &w.counts[i], *to = &sum[c->shared ? 2 : c->store];
            to->accesses += c->accesses, to->used += c->used, to->sectors += c->sectors;
            to->passes += c->passes, to->least += c->least;
        }
        double sectors = sum[0].sectors + sum[1].sectors;
        bool shared = sum[2].accesses > 0;
        add_row(&t, names[k], sum[0].sectors / sum[0].accesses, sum[1].sectors / sum[1].accesses,
                sectors * 32 / 1024, kernel_percent(sum[0].used + sum[1].used, sectors),
                shared ? sum[2].passes : NAN, shared ? sum[2].least : NAN,
                (double)kernel_right(x, out, k < 2));
        if (k == 0) *strided = w.widest;
        free(w.counts);
    }
    free(x);
    say(l,
        "Two tasks on %d x %d floats, each with different access patterns. Global memory moves "
        "sectors of 32 bytes: a warp whose 32 lanes read 4 bytes each needs at least 4. In "
        "one pass, shared memory gives one word from each bank; min: passes without conflicts.\n\n",
        KERNEL_ROWS, KERNEL_COLUMNS);
    show_table(l, &t, "pairs");
    return good;
}

/* ---- One decode step of the engine ----------------------------------------------------------- */

static struct { /* the device's functions; static, since wrappers get only the device's context */
    void *(*allocate)(void *context, size_t bytes, const char *what, llm_error *err);
    bool (*load_weight)(void *context, llm_weight *w, const void *host, llm_error *err);
} kernel_spy;

/* Wrappers that label the memory, so that the lesson can name the memory of each access. */
static void *kernel_allocate(void *context, size_t bytes, const char *what, llm_error *err) {
    emulator_label(!strncmp(what, "the keys", 8)      ? "keys"
                   : !strncmp(what, "the values", 10) ? "values"
                   : strstr(what, "activations")      ? "activations"
                                                      : "small weights");
    void *device = kernel_spy.allocate(context, bytes, what, err);
    emulator_label("scratch");
    return device;
}

static bool kernel_load_weight(void *context, llm_weight *w, const void *host, llm_error *err) {
    emulator_label("weights");
    bool good = kernel_spy.load_weight(context, w, host, err);
    emulator_label("scratch");
    return good;
}

/* Observe the step that decodes one token after a prompt of n_prompt tokens, twice: all kernels,
 * then a single one. */
static bool kernel_step(lesson *l, int n_prompt, kernel_watch *all, kernel_watch *one) {
    llm_error err;
    setenv("LLM_EMU_MEMORY", "1073741824", 0);
    emulator_label("scratch");
    chosen.gpu.trust = true;
    llm_backend *device = llm_observed_backend(&chosen.gpu, &err);
    if (!device) return !fail_with(&err);
    llm_backend spy = *device;
    kernel_spy.allocate = device->allocate, spy.allocate = kernel_allocate;
    kernel_spy.load_weight = device->load_weight, spy.load_weight = kernel_load_weight;
    l->engine.backend = &spy;
    l->engine.max_sequences = 1;
    l->engine.context_length = n_prompt + 4;
    llm_engine *engine = lesson_engine(l->loaded, &l->engine);
    int32_t *prompt = lesson_tokens(l, 0, n_prompt);
    bool good = engine && prompt;
    for (int run = 0; run < 2 && good; run++) { /* the same step for both watches */
        task t = new_task(prompt, n_prompt, 2);
        good = submit_task(engine, &t);
        while (good && t.n < 1) good = step_tasks(engine) > 0; /* prefill */
        emulator_observe(kernel_observe, run ? one : all);
        for (int status = 1; good && status > 0;) good = (status = step_tasks(engine)) >= 0;
        emulator_observe(NULL, NULL);
        if (!run && !one->kernel && all->n) one->kernel = all->counts[0].name;
        free_task(&t);
    }
    free(prompt);
    llm_engine_free(engine);
    llm_backend_free(device);
    return good && !stop_requested;
}

static void kernel_show_step(lesson *l, const kernel_watch *all, int n_prompt) {
    static const column columns[] = {{"kernel", "kernel", "%s"},
                                     {"runs", "launches", "%.0f"},
                                     {"grid", "grid", "%s"},
                                     {"block", "block", "%s"},
                                     {"used_kib", "KiB used", "%.1f"},
                                     {"moved_kib", "moved", "%.1f"},
                                     {"used_percent", "used %", "%.0f"},
                                     {"shared_passes", "passes", "%.0f"},
                                     {"shared_least", "min", "%.0f"}};
    table t = new_table(columns, COUNT(columns));
    for (int i = 0; i < all->n; i++) {
        const kernel_count *c = &all->counts[i];
        bool shared = c->passes > 0;
        add_row(&t, c->name, (double)c->launches, KERNEL_SHAPE(c->grid), KERNEL_SHAPE(c->block),
                c->used / 1024, c->sectors * 32 / 1024, kernel_percent(c->used, c->sectors),
                shared ? c->passes : NAN, shared ? c->least : NAN);
    }
    say(l,
        "\nOne decode step of this model, after a prompt of %d tokens. Grid (in blocks) and block "
        "(in threads) are those of a kernel's first launch.\n\n",
        n_prompt);
    show_table(l, &t, "step");
}

static void kernel_show_one(lesson *l, const kernel_watch *one) {
    static const column columns[] = {
        {"memory", "memory", "%s"},         {"kind", "", "%s"},
        {"bytes", "B/lane", "%.0f"},        {"accesses", "accesses", "%.0f"},
        {"lanes", "lanes", "%.0f"},         {"sectors", "sectors", "%.0f"},
        {"used_percent", "used %", "%.0f"}, {"passes", "passes", "%.0f"},
        {"least", "min", "%.0f"}};
    table t = new_table(columns, COUNT(columns));
    for (int i = 0; i < one->n; i++) {
        const kernel_count *c = &one->counts[i];
        char name[40];
        snprintf(name, sizeof name, "%s%s", c->shared ? "shared " : "", c->memory);
        add_row(&t, name, c->store ? "store" : "load", (double)c->bytes, c->accesses,
                c->lanes / c->accesses, c->shared ? NAN : c->sectors,
                c->shared ? NAN : kernel_percent(c->used, c->sectors), c->shared ? c->passes : NAN,
                c->shared ? c->least : NAN);
    }
    const kernel_count *c = one->counts;
    say(l,
        "\nThe first launch of %s: %s block%s of %s threads. An access is one instruction of a "
        "whole warp; lanes: of its 32, those that take part; sectors: of all accesses.\n\n",
        c->name, KERNEL_SHAPE(c->grid), strcmp(KERNEL_SHAPE(c->grid), "1") ? "s" : "",
        KERNEL_SHAPE(c->block));
    show_table(l, &t, "one");
}

static bool kernel_teach(lesson *l, int n_prompt, const char *kernel) {
    kernel_watch all = {0}, one = {.kernel = kernel};
    emulator_access strided;
    bool good = kernel_step(l, n_prompt, &all, &one);
    if (good && !one.n) {
        char names[512] = "";
        for (int i = 0; i < all.n; i++)
            snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "",
                     all.counts[i].name);
        good = !fail("this step launches no kernel named '%s'; it launches %s", kernel, names);
    }
    good = good && kernel_pairs(l, &strided);
    if (good) {
        kernel_show_step(l, &all, n_prompt);
        kernel_show_one(l, &one);
        keep_plot(l, kernel_map(&strided, "sum, row per thread: one load of the first warp"));
        if (one.kept) {
            char title[96];
            snprintf(title, sizeof title, "%s: the widest load of the first warp, from %s",
                     one.counts[0].name, one.widest.memory);
            plot p = kernel_map(&one.widest, title);
            show_plot(l, &p);
        }
    }
    free(all.counts);
    free(one.counts);
    return good;
}
#else
static bool kernel_teach(lesson *l, int n_prompt, const char *kernel) {
    (void)l, (void)n_prompt, (void)kernel;
    return !fail("this program was built without the emulated device, which counts the accesses: "
                 "install g++, then run make again");
}
#endif

static int lesson_kernel(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    int n_prompt = 20, rows = 0, columns = 0;
    bool ladder = false;
    const char *kernel = "rmsnorm";
    chosen.gpu.fused = false; /* each operation has a separate kernel */
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "kernel", "NAME", TEXT, &kernel, 0, 0,
         "the kernel to show in detail, named as in the table (default rmsnorm)"},
        {'p', "prompt", "N", WHOLE, &n_prompt, 1, 512,
         "tokens of the prompt before the decode step (default 20)"},
        {0, "ladder", NULL, FLAG, &ladder, 0, 0,
         "instead: one 4-bit product in seven versions (page 17)"},
        {0, "rows", "N", WHOLE, &rows, 1, 1 << 16,
         "--ladder: rows of its weights (default 128; for times on a GPU 14336)"},
        {0, "cols", "N", WHOLE, &columns, 1, 1 << 16,
         "--ladder: columns of its weights, a multiple of 32 (default 4096)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    if ((rows || columns) && !ladder)
        return lesson_end(&l, false), misuse(self, "--rows and --cols need --ladder");
    if (columns % 32)
        return fail("%d columns are not a multiple of 32", columns), lesson_end(&l, false);
    if (ladder && chosen.device != DEVICE_CPU)
        return lesson_end(&l, product_ladder(&l, rows, columns));
    if (chosen.device == DEVICE_CPU || chosen.device == DEVICE_CUDA)
        return fail("the counters need the emulated device: for a GPU, use ncu of the CUDA "
                    "Toolkit; the CPU runs no CUDA kernels"),
               lesson_end(&l, false);
    return lesson_end(&l, kernel_teach(&l, n_prompt, kernel));
}

static const char kernel_notes[] =
    "Counts the memory accesses of the kernels in llm.cu, on the emulated device (no GPU\n"
    "needed), with a kernel for each operation. --plain-kernels: those of simpler kernels.\n"
    "With --ladder it counts what seven versions of a 4-bit product do; a GPU times them.\n"
    "\n"
    "Examples:\n"
    "  llm lesson kernel\n"
    "  llm lesson kernel --kernel matmul_one\n"
    "  llm lesson kernel --plain-kernels --kernel plain_matmul\n"
    "  llm lesson kernel --ladder\n";

const command kernel_lesson = {
    "lesson kernel", "A GPU kernel's memory accesses; --ladder: 7 versions.", "[options]",
    lesson_kernel, kernel_notes};
