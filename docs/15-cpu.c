/* 15-cpu.c - llm lesson cpu: one matrix product, from the plain loop to vectors, int8 products,
 * many rows in one pass, matrix tiles and threads. See 15-cpu.md. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "lesson.h"
#include "program.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define CPU_X86
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../models/quantize.h"

enum { CPU_SIZES = 3, CPU_CHECKED = 16 };
/* numbers of rows of x: one token, sixteen sequences, a prompt */
static const int cpu_sizes[CPU_SIZES] = {1, 16, 512};

typedef struct cpu_rung { /* one form of the product */
    const char *name;
    llm_isa isa;
    bool floats;     /* f16 weights, multiplied as floats */
    bool row_by_row; /* one product per row of x */
    bool threads;    /* all threads, not one */
} cpu_rung;

static const cpu_rung cpu_rungs[] = {
    {"plain loop", LLM_ISA_REFERENCE, false, false, false},
    {"vectors, f16 weights", LLM_ISA_BEST, true, false, false},
    {"int8 values, plain C", LLM_ISA_PLAIN, false, false, false},
    {"int8, dot products", LLM_ISA_DOTPROD, false, false, false}, /* arm64 */
    {"int8, avx2", LLM_ISA_AVX2, false, false, false},
    {"int8, avx512, by row", LLM_ISA_AVX512, false, true, false},
    {"one pass for all", LLM_ISA_AVX512, false, false, false},
    {"matrix tiles", LLM_ISA_AMX, false, false, false},
    {"threads", LLM_ISA_BEST, false, false, true},
};

/* ---- The limit: the most multiply-adds per second that a core can start, on registers -------- */

enum { PEAK_CHAINS = 12 }; /* independent sums */

/* Define a function that updates each of PEAK_CHAINS sums n times and returns the operations of one
 * round. first: the initial value of sum i, different for each i; constant: x, the operand of each
 * step; number: the value of sum i, added to *used so that the compiler keeps the loop. */
#define CPU_PEAK(name, attributes, vector, first, constant, step, number, multiply_adds)           \
    attributes static double name(int64_t n, float *used) {                                        \
        vector sums[PEAK_CHAINS], x = constant;                                                    \
        for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = first;                                     \
        while (n-- > 0)                                                                            \
            for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = step;                                  \
        for (int i = 0; i < PEAK_CHAINS; i++) *used += (float)number;                              \
        return 2.0 * PEAK_CHAINS * multiply_adds;                                                  \
    }

/* the vector register of every 64-bit processor */
typedef float cpu_floats __attribute__((vector_size(16)));
static const cpu_floats cpu_halves = {0.5f, 0.5f, 0.5f, 0.5f};
CPU_PEAK(cpu_peak_plain, , cpu_floats, cpu_halves * (float)i, cpu_halves, sums[i] * x + x,
         sums[i][0], 4)

#ifdef CPU_X86
#define CPU_TARGET(what) __attribute__((target(what)))
CPU_PEAK(cpu_peak_fma, CPU_TARGET("avx2,fma"), __m256, _mm256_set1_ps((float)i),
         _mm256_set1_ps(0.5f), _mm256_fmadd_ps(sums[i], x, x), _mm256_cvtss_f32(sums[i]), 8)
CPU_PEAK(cpu_peak_fma512, CPU_TARGET("avx512f"), __m512, _mm512_set1_ps((float)i),
         _mm512_set1_ps(0.5f), _mm512_fmadd_ps(sums[i], x, x), _mm512_cvtss_f32(sums[i]), 16)
CPU_PEAK(cpu_peak_avx2, CPU_TARGET("avx2"), __m256i, _mm256_set1_epi8((char)i), _mm256_set1_epi8(3),
         _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(sums[i], x)),
         _mm256_extract_epi16(sums[i], 0), 32)
CPU_PEAK(cpu_peak_avx512, CPU_TARGET("avx512f,avx512vnni"), __m512i, _mm512_set1_epi32(i),
         _mm512_set1_epi32(3), _mm512_dpbusd_epi32(sums[i], x, x), _mm512_reduce_add_epi32(sums[i]),
         64)

/* Tiles 0 to 3 hold the sums, 16 x 16 int32; 4 and 5 the factors, 16 x 64 and 64 x 16 int8. */
static double cpu_peak_amx(int64_t n, float *used) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes;
    memset(&shapes, 0, sizeof shapes);
    shapes.palette = 1;
    for (int i = 0; i < 6; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
    __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\t"
                     "tilezero %%tmm3\n\ttilezero %%tmm4\n\ttilezero %%tmm5" ::);
    while (n-- > 0)
        __asm__ volatile("tdpbssd %%tmm5, %%tmm4, %%tmm0\n\ttdpbssd %%tmm5, %%tmm4, %%tmm1\n\t"
                         "tdpbssd %%tmm5, %%tmm4, %%tmm2\n\ttdpbssd %%tmm5, %%tmm4, %%tmm3" ::);
    __asm__ volatile("tilerelease" ::);
    *used += 1;
    return 4 * 16 * 16 * 64 * 2;
}
#elif defined(__aarch64__)
CPU_PEAK(cpu_peak_dotprod, __attribute__((target("arch=armv8.2-a+dotprod"))), int32x4_t,
         vdupq_n_s32(i), vdupq_n_s32(3),
         vdotq_s32(sums[i], vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(x)),
         vgetq_lane_s32(sums[i], 0), 16)
#endif

typedef double cpu_rounds(int64_t n, float *used);

/* The function that measures the instructions used by an instruction set's kernels. */
static cpu_rounds *cpu_peak_of(llm_isa isa, bool floats) {
#ifdef CPU_X86
    if (floats && isa >= LLM_ISA_AVX2)
        return isa >= LLM_ISA_AVX512 ? cpu_peak_fma512 : cpu_peak_fma;
    if (isa == LLM_ISA_AVX2) return cpu_peak_avx2;
    if (isa == LLM_ISA_AVX512) return cpu_peak_avx512;
    if (isa == LLM_ISA_AMX) return cpu_peak_amx;
#elif defined(__aarch64__)
    if (!floats && isa == LLM_ISA_DOTPROD) return cpu_peak_dotprod;
#endif
    (void)isa, (void)floats;
    return cpu_peak_plain;
}

/* The operations per second of `threads` threads together. */
static double cpu_peak(llm_isa isa, bool floats, int threads) {
    cpu_rounds *rounds = cpu_peak_of(isa, floats);
    const int64_t n = 200000;
    double best = 0, sum = 0;
    for (int run = 0; run < 6; run++) {
        double start = llm_seconds(), operations = 0;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) reduction(+ : sum, operations)
#endif
        for (int thread = 0; thread < threads; thread++) {
            float used = 0;
            operations += (double)n * rounds(n, &used);
            sum += used;
        }
        best = larger(best, operations / (llm_seconds() - start));
    }
    volatile double sink = sum;
    (void)sink;
    return best;
}

/* ---- The matrix and its products ---------------------------------------------------------- */

/* The same weights in the requested type [0] and in f16 [1]: up to 32 copies, about 128 MiB in all,
 * so that they do not stay in a cache. */
typedef struct cpu_matrix {
    int rows, cols;
    llm_type type;
    int copies[2];
    size_t bytes[2];  /* bytes of one copy */
    void *weights[2]; /* (copies, rows, cols) */
    float *x;         /* (512, cols) */
} cpu_matrix;

static void cpu_fill(cpu_matrix *m, const llm_type_info *type) {
    int64_t n = (int64_t)m->rows * m->cols, n_x = (int64_t)cpu_sizes[CPU_SIZES - 1] * m->cols;
    float *values = resize(NULL, (size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = (float)(llm_random(1, 2, (uint64_t)i) - 0.5);
    m->type = type->type;
    m->bytes[0] = row_bytes(type->type, m->cols) * (size_t)m->rows;
    m->bytes[1] = (size_t)n * 2;
    for (int k = 0; k < 2; k++) {
        m->copies[k] = (int)fmin(32, (double)(128 << 20) / (double)m->bytes[k] + 1);
        m->weights[k] = resize(NULL, m->bytes[k] * (size_t)m->copies[k]);
    }
    llm_pack(type->type, values, m->weights[0], n);
    type->unpack(m->weights[0], values, n); /* so that both types hold the same values */
    llm_pack(LLM_F16, values, m->weights[1], n);
    for (int k = 0; k < 2; k++)
        for (int i = 1; i < m->copies[k]; i++)
            memcpy((char *)m->weights[k] + (size_t)i * m->bytes[k], m->weights[k], m->bytes[k]);
    m->x = resize(NULL, (size_t)n_x * sizeof *m->x);
    for (int64_t i = 0; i < n_x; i++) m->x[i] = (float)(llm_random(3, 4, (uint64_t)i) - 0.5);
    free(values);
}

/* Number of matrix rows to compute. The plain loop takes seconds where the best form takes a
 * millisecond, so it computes only the first 32. */
static int cpu_rows_of(const cpu_matrix *m, llm_isa isa) {
    return isa == LLM_ISA_REFERENCE && m->rows > 32 ? 32 : m->rows;
}

typedef struct cpu_result {
    double seconds[CPU_SIZES]; /* time of one product with the whole matrix */
    float *out;                /* (CPU_CHECKED, 32) results, for the first 32 rows of the matrix */
} cpu_result;

static bool cpu_time(llm_backend *b, const cpu_matrix *m, const llm_weight *w, const cpu_rung *rung,
                     int n, int milliseconds, double *seconds, float *out) {
    llm_error err;
    int copies = m->copies[rung->floats];
    double best = INFINITY, end = llm_seconds() + 1e-3 * milliseconds;
    int64_t rows = w->rows;
    bool good = true;
    /* If x has one row, a run multiplies it by all copies of the matrix; otherwise by the next
     * copy. */
    int n_programs = n == 1 ? 1 : copies;
    llm_program *p = resize(NULL, (size_t)n_programs * sizeof *p);
    memset(p, 0, (size_t)n_programs * sizeof *p);
    for (int copy = 0; copy < copies; copy++)
        for (int i = 0; i < (rung->row_by_row ? n : 1); i++)
            program_add(&p[n == 1 ? 0 : copy], LLM_OP_MATMUL, &w[copy], m->x + (int64_t)i * m->cols,
                        m->cols, out + i * rows, rows);
    for (int run = 0; good && (run < 3 || llm_seconds() < end) && !stop_requested; run++) {
        double start = llm_seconds();
        good = program_run(b, &p[run % n_programs], rung->row_by_row ? 1 : n, &err);
        best = fmin(best, (llm_seconds() - start) / (n == 1 ? copies : 1));
        if (rung->isa == LLM_ISA_REFERENCE && n > 1 && run == 0)
            break; /* slow: one measurement is enough */
    }
    for (int k = 0; k < n_programs; k++) program_free(b, &p[k]);
    free(p);
    *seconds = best * m->rows / (double)rows;
    return good || !fail_with(&err);
}

static bool cpu_measure(llm_backend *b, const cpu_matrix *m, const cpu_rung *rung, int milliseconds,
                        cpu_result *result) {
    llm_error err;
    int rows = cpu_rows_of(m, rung->isa), known = m->rows < 32 ? m->rows : 32;
    int copies = m->copies[rung->floats];
    const char *weights = m->weights[rung->floats];
    llm_weight *w = resize(NULL, (size_t)copies * sizeof *w);
    float *out = resize(NULL, (size_t)cpu_sizes[CPU_SIZES - 1] * (size_t)rows * sizeof *out);
    bool good = true;
    int loaded = 0;
    for (; good && loaded < copies; loaded += good) {
        llm_type type = rung->floats ? LLM_F16 : m->type;
        w[loaded] = (llm_weight){.type = type, .rows = rows, .cols = m->cols};
        good = b->load_weight(b->context, &w[loaded],
                              weights + (size_t)loaded * m->bytes[rung->floats], &err);
    }
    if (!good) fail_with(&err);
    for (int k = 0; good && k < CPU_SIZES && !stop_requested; k++) {
        good = cpu_time(b, m, w, rung, cpu_sizes[k], milliseconds, &result->seconds[k], out);
        for (int i = 0; good && cpu_sizes[k] == CPU_CHECKED && i < CPU_CHECKED; i++)
            memcpy(result->out + i * 32, out + (size_t)i * (size_t)rows,
                   (size_t)known * sizeof *out);
    }
    while (loaded > 0) b->free_weight(b->context, &w[--loaded]);
    free(out);
    free(w);
    return good;
}

/* The relative error: the norm of the differences over the norm of the correct results. */
static double cpu_error(const float *out, const float *right) {
    double lost = 0, all = 0;
    for (int i = 0; i < CPU_CHECKED * 32; i++) {
        lost += ((double)out[i] - right[i]) * ((double)out[i] - right[i]);
        all += (double)right[i] * right[i];
    }
    return all > 0 ? sqrt(lost / all) : 0;
}

typedef struct cpu_shown { /* the results so far */
    table rows;
    plot bars;
    int n;                            /* number of rungs */
    int threads;                      /* number of threads of the last rung */
    double bandwidth[2];              /* bytes per second of one thread, of all threads */
    float right[CPU_CHECKED * 32];    /* results of the plain loop */
    float out[2][CPU_CHECKED * 32];   /* results of the last two rungs */
    bool same_by_row, same_threads;   /* whether row by row, or threads, give the same bits */
} cpu_shown;

static void cpu_say_peaks(lesson *l, const cpu_matrix *m, const cpu_shown *shown) {
    say(l,
        "A matrix of %d x %d weights in %s (%s) times 1, 16 and 512 rows of x. Memory bandwidth: "
        "%.1f GB/s with one thread, %.1f with %d. Peak operations per second of one "
        "core, on registers:\n",
        m->rows, m->cols, llm_type_find(m->type)->name, HUMAN((double)m->bytes[0]),
        1e-9 * shown->bandwidth[0], 1e-9 * shown->bandwidth[1], shown->threads);
    for (int isa = LLM_ISA_PLAIN; isa <= chosen.isa; isa++) {
        llm_error err;
        llm_backend *b = llm_cpu_backend(1, (llm_isa)isa, &err);
        if (b && llm_cpu_isa(b) == (llm_isa)isa)
            say(l, "  %-7s %7.0f G%s\n", llm_isa_name((llm_isa)isa),
                1e-9 * cpu_peak((llm_isa)isa, false, 1),
                isa == LLM_ISA_PLAIN ? " (floats)" : " (int8)");
        llm_backend_free(b);
    }
    say(l, "\n");
}

/* The backend for a rung; NULL if this processor does not support it, or --isa forbids it. */
static llm_backend *cpu_backend_for(const cpu_rung *rung, int threads) {
    llm_error err;
    llm_isa wanted = rung->isa < (llm_isa)chosen.isa ? rung->isa : (llm_isa)chosen.isa;
    llm_backend *b = llm_cpu_backend(rung->threads ? threads : 1, wanted, &err);
    if (!b) return fail_with(&err), NULL;
    bool best = rung->floats || rung->threads; /* true: use the best instruction set */
    if (best ? llm_cpu_isa(b) != LLM_ISA_REFERENCE : llm_cpu_isa(b) == rung->isa) return b;
    llm_backend_free(b);
    return NULL;
}

static void cpu_add_row(cpu_shown *shown, const cpu_matrix *m, const cpu_rung *rung, llm_isa isa,
                        const cpu_result *r) {
    double bytes = (double)m->bytes[rung->floats], operations = 2.0 * m->rows * m->cols;
    double peak = cpu_peak(isa, rung->floats, rung->threads ? shown->threads : 1);
    double shares[CPU_SIZES], rates[CPU_SIZES];
    char name[64];
    plot_category(&shown->bars, rung->name);
    for (int k = 0; k < CPU_SIZES; k++) {
        double least_seconds = larger(bytes / shown->bandwidth[rung->threads],
                                      cpu_sizes[k] * operations / peak);
        shares[k] = 100 * least_seconds / r->seconds[k];
        rates[k] = 1e-9 * cpu_sizes[k] * operations / r->seconds[k];
        plot_bar(&shown->bars, k, rates[k]);
    }
    if (shown->n == 0) memcpy(shown->right, r->out, sizeof shown->right);
    snprintf(name, sizeof name, rung->threads ? "%d %s (%d)" : "%d %s", shown->n + 1, rung->name,
             shown->threads);
    add_row(&shown->rows, name, 1e-9 * bytes / r->seconds[0], shares[0], rates[1], shares[1],
            rates[2], shares[2], 100 * cpu_error(r->out, shown->right));
    shown->n++;
}

static bool cpu_climb(const cpu_matrix *m, int milliseconds, cpu_shown *shown) {
    bool good = true;
    for (int i = 0; good && i < COUNT(cpu_rungs) && !stop_requested; i++) {
        const cpu_rung *rung = &cpu_rungs[i];
        llm_backend *b = cpu_backend_for(rung, shown->threads);
        if (!b) continue;
        cpu_result r = {{0}, shown->out[shown->n % 2]};
        good = cpu_measure(b, m, rung, milliseconds, &r);
        if (good && !stop_requested) {
            bool like_before = memcmp(shown->out[0], shown->out[1], sizeof shown->out[0]) == 0;
            if (i > 0 && cpu_rungs[i - 1].row_by_row) shown->same_by_row = like_before;
            if (rung->threads) shown->same_threads = like_before;
            cpu_add_row(shown, m, rung, llm_cpu_isa(b), &r);
        }
        llm_backend_free(b);
    }
    return good && !stop_requested;
}

static bool cpu_show(lesson *l, const cpu_matrix *m, int milliseconds) {
    static const column columns[] = {
        {"rung", "form (one thread)", "%s"},    {"row_gb_per_second", "1: GB/s", "%.2f"},
        {"row_share_percent", "%", "%.0f"},     {"rows16_gop_per_second", "16: GOP/s", "%.1f"},
        {"rows16_share_percent", "%", "%.0f"},  {"rows512_gop_per_second", "512: GOP/s", "%.1f"},
        {"rows512_share_percent", "%", "%.0f"}, {"error_percent", "error %", "%.2f"}};
    cpu_shown shown = {
        .rows = new_table(columns, COUNT(columns)), .same_by_row = true, .same_threads = true};
    shown.bars = plot_new(PLOT_BARS, "One product, rung by rung",
                          "billions of operations a second, logarithmic", "");
    plot_note(&shown.bars, "With one row of x, reading the weights is the limit from the second "
                           "rung on. With many rows, arithmetic is the limit, and each better "
                           "instruction helps.");
    shown.bars.log_x = true;
    for (int k = 0; k < CPU_SIZES; k++) {
        char name[48];
        snprintf(name, sizeof name, "%d row%s of x", cpu_sizes[k], cpu_sizes[k] == 1 ? "" : "s");
        plot_series_add(&shown.bars, name);
    }
    shown.threads = l->engine.n_threads ? l->engine.n_threads : llm_processor_count();
    shown.bandwidth[0] = measure_bandwidth(1);
    shown.bandwidth[1] = measure_bandwidth(shown.threads);
    bool good = shown.bandwidth[0] > 0 && shown.bandwidth[1] > 0;
    if (!good) fail("there is not enough memory to measure its bandwidth");
    if (good) cpu_say_peaks(l, m, &shown);
    good = good && cpu_climb(m, milliseconds, &shown);
    fact(l, "memory_bytes_per_second", shown.bandwidth[1]);
    fact(l, "threads", shown.threads);
    fact(l, "same_row_by_row", shown.same_by_row);
    fact(l, "same_with_threads", shown.same_threads);
    show_table(l, &shown.rows, "rungs");
    say(l,
        "\n%%: share of the nearer limit, memory bandwidth or operations of the same instructions. "
        "Error: relative to the plain loop. Row by row and in one pass, the bits are %s; threads "
        "changed %s.\n",
        shown.same_by_row ? "the same" : "DIFFERENT", shown.same_threads ? "none" : "THE RESULT");
    if (good) show_plot(l, &shown.bars);
    else plot_free(&shown.bars);
    return good;
}

static int lesson_cpu(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    cpu_matrix m = {.rows = 5632, .cols = 2048};
    int milliseconds = 120;
    char *type_name = "q4_0";
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "rows", "N", WHOLE, &m.rows, 1, 65536,
         "rows of the matrix (default 5632: TinyLlama's ffn_up)"},
        {0, "cols", "N", WHOLE, &m.cols, 64, 65536,
         "columns of the matrix, a multiple of the type's block (default 2048)"},
        {0, "type", "TYPE", TEXT, &type_name, 0, 0, "type of its weights (default q4_0)"},
        {0, "milliseconds", "N", WHOLE, &milliseconds, 1, 10000,
         "time for each measurement (default 120)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    const llm_type_info *type = llm_type_by_name(type_name);
    bool good = false;
    if (chosen.device != DEVICE_CPU && chosen.device != DEVICE_AUTO)
        fail("this lesson is about the CPU: for a GPU, see llm lesson kernel");
    else if (!type) fail("there is no type '%s' that can be written", type_name);
    else if (m.cols % type->block_values)
        fail("%d columns are not a multiple of %d, the values in a block of %s", m.cols,
             type->block_values, type->name);
    else {
        cpu_fill(&m, type);
        good = cpu_show(&l, &m, milliseconds);
    }
    for (int k = 0; k < 2; k++) free(m.weights[k]);
    free(m.x);
    return lesson_end(&l, good);
}

static const char cpu_notes[] =
    "Measures the product of one matrix with 1, 16 and 512 rows of x, in each form of chapter\n"
    "[10] of llm.h that this processor supports and --isa allows, and compares it with the\n"
    "limits of memory and instructions.\n"
    "\n"
    "Examples:\n"
    "  llm lesson cpu\n"
    "  llm lesson cpu --isa avx2 --type q8_0\n"
    "  llm lesson cpu --svg cpu.svg\n";

const command cpu_lesson = {
    "lesson cpu", "One matrix product on a CPU, from the plain loop to tiles.", "[options]",
    lesson_cpu, cpu_notes};
