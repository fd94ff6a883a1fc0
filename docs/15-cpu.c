/* 15-cpu.c - llm lesson cpu: one matrix product, from the plain loop to vectors, int8 products, many rows in one pass, matrix tiles and
 * threads. Beside 15-cpu.md. */

enum { CPU_SIZES = 3, CPU_CHECKED = 16 };
static const int cpu_sizes[CPU_SIZES] = {1, 16, 512}; /* rows of x: a token; sixteen sequences; a prompt */

typedef struct cpu_rung {
    const char *name;
    llm_isa isa;
    bool floats;     /* weights of f16, multiplied as floats */
    bool row_by_row; /* a product for each row of x */
    bool threads;
} cpu_rung;

static const cpu_rung cpu_rungs[] = {
    {"plain loop", LLM_ISA_REFERENCE, false, false, false},
    {"vectors, f16 weights", LLM_ISA_BEST, true, false, false},
    {"int8 values, plain C", LLM_ISA_PLAIN, false, false, false},
    {"int8, avx2", LLM_ISA_AVX2, false, false, false},
    {"int8, avx512, by row", LLM_ISA_AVX512, false, true, false},
    {"one pass for all", LLM_ISA_AVX512, false, false, false},
    {"matrix tiles", LLM_ISA_AMX, false, false, false},
    {"threads", LLM_ISA_BEST, false, false, true},
};

/* ---- The limits: as many multiply-adds as one core can start, from registers -------------------- */

enum { PEAK_CHAINS = 12 }; /* sums that do not wait for each other */

/* Each runs n rounds and returns the operations of one; *used keeps the compiler from leaving them out. */
static double cpu_peak_plain(int64_t n, float *used) {
    typedef float floats __attribute__((vector_size(16)));
    floats sums[PEAK_CHAINS] = {{0}}, factor = {0.5f, 0.25f, 0.5f, 0.25f}, term = {*used, 1, 2, 3};
    while (n-- > 0)
        for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = sums[i] * factor + term;
    for (int i = 0; i < PEAK_CHAINS; i++) *used += sums[i][0];
    return PEAK_CHAINS * 4 * 2;
}

#ifdef LLM__X86
__attribute__((target("avx2"))) static double cpu_peak_avx2(int64_t n, float *used) {
    __m256i sums[PEAK_CHAINS], w = _mm256_set1_epi8((char)*used);
    for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = _mm256_set1_epi8((char)i);
    while (n-- > 0)
        for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(sums[i], w));
    for (int i = 0; i < PEAK_CHAINS; i++) *used += (float)_mm256_extract_epi16(sums[i], 0);
    return PEAK_CHAINS * 32 * 2;
}

__attribute__((target("avx2,fma"))) static double cpu_peak_fma(int64_t n, float *used) {
    __m256 sums[PEAK_CHAINS], factor = _mm256_set1_ps(0.5f), term = _mm256_set1_ps(*used);
    for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = _mm256_set1_ps((float)i);
    while (n-- > 0)
        for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = _mm256_fmadd_ps(sums[i], factor, term);
    for (int i = 0; i < PEAK_CHAINS; i++) *used += _mm256_cvtss_f32(sums[i]);
    return PEAK_CHAINS * 8 * 2;
}

__attribute__((target("avx512f"))) static double cpu_peak_fma512(int64_t n, float *used) {
    __m512 sums[PEAK_CHAINS], factor = _mm512_set1_ps(0.5f), term = _mm512_set1_ps(*used);
    for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = _mm512_set1_ps((float)i);
    while (n-- > 0)
        for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = _mm512_fmadd_ps(sums[i], factor, term);
    for (int i = 0; i < PEAK_CHAINS; i++) *used += _mm512_cvtss_f32(sums[i]);
    return PEAK_CHAINS * 16 * 2;
}

__attribute__((target("avx512f,avx512vnni"))) static double cpu_peak_avx512(int64_t n, float *used) {
    __m512i sums[PEAK_CHAINS], x = _mm512_set1_epi32((int)*used + 5), w = _mm512_set1_epi32(3);
    for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = _mm512_set1_epi32(i);
    while (n-- > 0)
        for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], x, w);
    for (int i = 0; i < PEAK_CHAINS; i++) *used += (float)_mm512_reduce_add_epi32(sums[i]);
    return PEAK_CHAINS * 64 * 2;
}

/* Tiles 0-3 are the sums, of 16 x 16 int32; 4 and 5 the factors, of 16 x 64 and 64 x 16 int8. */
static double cpu_peak_amx(int64_t n, float *used) {
    struct { uint8_t palette, start, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shapes;
    memset(&shapes, 0, sizeof shapes);
    shapes.palette = 1;
    for (int i = 0; i < 6; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
    __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\ttilezero %%tmm4\n\ttilezero %%tmm5" ::);
    while (n-- > 0)
        __asm__ volatile("tdpbssd %%tmm5, %%tmm4, %%tmm0\n\ttdpbssd %%tmm5, %%tmm4, %%tmm1\n\t"
                         "tdpbssd %%tmm5, %%tmm4, %%tmm2\n\ttdpbssd %%tmm5, %%tmm4, %%tmm3" ::);
    __asm__ volatile("tilerelease" ::);
    *used += 1;
    return 4 * 16 * 16 * 64 * 2;
}
#endif

/* Operations a second, of `threads` threads together. */
static double cpu_peak(llm_isa isa, bool floats, int threads) {
    double (*rounds)(int64_t, float *) = cpu_peak_plain;
#ifdef LLM__X86
    if (floats && isa >= LLM_ISA_AVX512) rounds = cpu_peak_fma512;
    else if (floats && isa == LLM_ISA_AVX2) rounds = cpu_peak_fma;
    else if (isa == LLM_ISA_AVX2) rounds = cpu_peak_avx2;
    else if (isa == LLM_ISA_AVX512) rounds = cpu_peak_avx512;
    else if (isa == LLM_ISA_AMX) rounds = cpu_peak_amx;
#endif
    const int64_t n = 200000;
    double best = 0, sum = 0;
    for (int run = 0; run < 6; run++) {
        double start = llm_seconds(), operations = 0;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) reduction(+ : sum, operations)
#endif
        for (int thread = 0; thread < threads; thread++) {
            float used = (float)thread;
            operations += (double)n * rounds(n, &used);
            sum += used;
        }
        best = larger(best, operations / (llm_seconds() - start));
    }
    volatile double sink = sum;
    (void)sink, (void)floats, (void)isa;
    return best;
}

/* ---- The matrix and its products ---------------------------------------------------------------- */

typedef struct cpu_matrix { /* the same weights in the type asked for [0] and in f16 [1]; in copies, up to 128 MiB, so that no
                           * near cache holds them */
    int rows, cols;
    llm_type type;
    int copies[2];
    size_t bytes[2];  /* of one copy */
    void *weights[2]; /* (copies) */
    float *x;         /* (512, cols) */
} cpu_matrix;

static void cpu_fill(cpu_matrix *m, const llm_type_info *type) {
    const llm_type_info *f16 = llm_type_find(LLM_F16);
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
    type->pack(values, m->weights[0], n);
    type->unpack(m->weights[0], values, n); /* so that both hold the same */
    f16->pack(values, m->weights[1], n);
    for (int k = 0; k < 2; k++)
        for (int i = 1; i < m->copies[k]; i++) memcpy((char *)m->weights[k] + (size_t)i * m->bytes[k], m->weights[k], m->bytes[k]);
    m->x = resize(NULL, (size_t)n_x * sizeof *m->x);
    for (int64_t i = 0; i < n_x; i++) m->x[i] = (float)(llm_random(3, 4, (uint64_t)i) - 0.5);
    free(values);
}

/* The textbook's loop takes seconds for what the best form does in a millisecond; so it gets the first 32 rows of the matrix. */
static int cpu_rows_of(const cpu_matrix *m, llm_isa isa) { return isa == LLM_ISA_REFERENCE && m->rows > 32 ? 32 : m->rows; }

typedef struct cpu_result {
    double seconds[CPU_SIZES]; /* of one product with the whole matrix */
    float *out;                /* (CPU_CHECKED, 32): what came out, for the first 32 rows of the matrix */
} cpu_result;

static bool cpu_time(llm_backend *b, const cpu_matrix *m, const llm_weight *w, const cpu_rung *rung, int n, int milliseconds, double *seconds,
                     float *out) {
    llm_error err;
    int copies = m->copies[rung->floats];
    double best = INFINITY, end = llm_seconds() + 1e-3 * milliseconds;
    int64_t rows = w->rows;
    bool good = true;
    for (int run = 0; good && (run < 3 || llm_seconds() < end) && !stop_requested; run++) {
        double start = llm_seconds();
        for (int copy = 0; copy < (n == 1 ? copies : 1); copy++)
            for (int i = 0; i < (rung->row_by_row ? n : 1); i++)
                b->matmul(b->context, m->x + (int64_t)i * m->cols, &w[(copy + run) % copies], NULL, rung->row_by_row ? 1 : n, false, out + i * rows);
        good = b->sync(b->context, &err);
        best = fmin(best, (llm_seconds() - start) / (n == 1 ? copies : 1));
        if (rung->isa == LLM_ISA_REFERENCE && n > 1 && run == 0) break; /* slow enough to be measured once */
    }
    *seconds = best * m->rows / (double)rows;
    return good || !fail_with(&err);
}

static bool cpu_measure(llm_backend *b, const cpu_matrix *m, const cpu_rung *rung, int milliseconds, cpu_result *result) {
    llm_error err;
    llm_limits limits = {.max_tokens = cpu_sizes[CPU_SIZES - 1], .max_sequences = 1, .max_context = 64, .n_heads = 1, .head_dim = 64, .max_cols = m->cols};
    int rows = cpu_rows_of(m, rung->isa), known = m->rows < 32 ? m->rows : 32, copies = m->copies[rung->floats];
    llm_weight *w = resize(NULL, (size_t)copies * sizeof *w);
    float *out = resize(NULL, (size_t)limits.max_tokens * (size_t)rows * sizeof *out);
    bool good = b->reserve(b->context, &limits, &err);
    int loaded = 0;
    for (; good && loaded < copies; loaded += good) {
        w[loaded] = (llm_weight){.type = rung->floats ? LLM_F16 : m->type, .rows = rows, .cols = m->cols};
        good = b->load_weight(b->context, &w[loaded], (const char *)m->weights[rung->floats] + (size_t)loaded * m->bytes[rung->floats], &err);
    }
    if (!good) fail_with(&err);
    for (int k = 0; good && k < CPU_SIZES && !stop_requested; k++) {
        good = cpu_time(b, m, w, rung, cpu_sizes[k], milliseconds, &result->seconds[k], out);
        for (int i = 0; good && cpu_sizes[k] == CPU_CHECKED && i < CPU_CHECKED; i++)
            memcpy(result->out + i * 32, out + (size_t)i * (size_t)rows, (size_t)known * sizeof *out);
    }
    while (loaded > 0) b->free_weight(b->context, &w[--loaded]);
    free(out);
    free(w);
    return good;
}

/* What is off, as a share of what is right, both squared and summed. */
static double cpu_error(const float *out, const float *right) {
    double lost = 0, all = 0;
    for (int i = 0; i < CPU_CHECKED * 32; i++) lost += ((double)out[i] - right[i]) * ((double)out[i] - right[i]), all += (double)right[i] * right[i];
    return all > 0 ? sqrt(lost / all) : 0;
}

static bool cpu_show(lesson *l, const cpu_matrix *m, int milliseconds) {
    static const column columns[] = {
        {"rung", "one thread, but the last", "%s"}, {"row_gb_per_second", "1: GB/s", "%.2f"}, {"row_share_percent", "%", "%.0f"},
        {"rows16_gop_per_second", "16: GOP/s", "%.1f"}, {"rows16_share_percent", "%", "%.0f"}, {"rows512_gop_per_second", "512: GOP/s", "%.1f"},
        {"rows512_share_percent", "%", "%.0f"}, {"error_percent", "error %", "%.2f"}};
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_LINES, "One product, rung by rung", "rung (row of the table)", "operations a second");
    p.log_y = true;
    for (int k = 0; k < CPU_SIZES; k++) {
        char name[48];
        snprintf(name, sizeof name, "%d row%s of x", cpu_sizes[k], cpu_sizes[k] == 1 ? "" : "s");
        plot_series_add(&p, name);
    }
    int all = l->engine.n_threads ? l->engine.n_threads : llm_processor_count(), shown = 0;
    double bandwidth[2] = {measure_bandwidth(1), measure_bandwidth(all)}, operations = 2.0 * m->rows * m->cols;
    float right[CPU_CHECKED * 32] = {0}, out[2][CPU_CHECKED * 32] = {{0}};
    bool good = bandwidth[0] > 0 && bandwidth[1] > 0, same_by_row = true, same_threads = true;
    if (!good) fail("there is no memory to measure its speed with");
    say(l, "One matrix of %d x %d weights in %s (%s), times 1, 16 and 512 rows of x. Memory: %.1f GB/s by one thread, %.1f by %d. Operations a second that a "
           "core can start, from registers:\n", m->rows, m->cols, llm_type_find(m->type)->name, HUMAN((double)m->bytes[0]), 1e-9 * bandwidth[0], 1e-9 * bandwidth[1], all);
    double peaks[LLM_ISA_BEST + 1] = {0};
    for (int isa = LLM_ISA_PLAIN; good && isa <= chosen.isa; isa++) {
        llm_error err;
        llm_backend *b = llm_cpu_backend(1, (llm_isa)isa, &err);
        if (b && llm_cpu_isa(b) == (llm_isa)isa) {
            peaks[isa] = cpu_peak((llm_isa)isa, false, 1);
            say(l, "  %-7s %7.0f G%s\n", llm_isa_name((llm_isa)isa), 1e-9 * peaks[isa], isa == LLM_ISA_PLAIN ? " (floats)" : " (int8)");
        }
        llm_backend_free(b);
    }
    for (int i = 0; good && i < COUNT(cpu_rungs) && !stop_requested; i++) {
        llm_error err;
        const cpu_rung *rung = &cpu_rungs[i];
        llm_isa wanted = rung->isa < (llm_isa)chosen.isa ? rung->isa : (llm_isa)chosen.isa;
        llm_backend *b = llm_cpu_backend(rung->threads ? all : 1, wanted, &err);
        if (!b) good = !fail_with(&err);
        bool best = rung->floats || rung->threads; /* of what there is; the others are of one instruction set */
        if (b && (best ? llm_cpu_isa(b) == LLM_ISA_REFERENCE : llm_cpu_isa(b) != rung->isa)) { /* which is not there */
            llm_backend_free(b);
            continue;
        }
        cpu_result r = {{0}, out[shown % 2]};
        good = good && cpu_measure(b, m, rung, milliseconds, &r);
        if (good && !stop_requested) {
            double peak = cpu_peak(llm_cpu_isa(b), rung->floats, rung->threads ? all : 1), shares[CPU_SIZES], rates[CPU_SIZES];
            for (int k = 0; k < CPU_SIZES; k++) {
                double least = larger((double)m->bytes[rung->floats] / bandwidth[rung->threads], cpu_sizes[k] * operations / peak);
                shares[k] = 100 * least / r.seconds[k];
                rates[k] = 1e-9 * cpu_sizes[k] * operations / r.seconds[k];
                plot_point(&p, k, shown + 1, 1e9 * rates[k]);
            }
            if (shown == 0) memcpy(right, r.out, sizeof right);
            bool like_before = memcmp(out[0], out[1], sizeof out[0]) == 0;
            if (i > 0 && cpu_rungs[i - 1].row_by_row) same_by_row = like_before;
            if (rung->threads) same_threads = like_before;
            char name[64];
            snprintf(name, sizeof name, rung->threads ? "%d %s, %d of them" : "%d %s", shown + 1, rung->name, all);
            add_row(&t, name, 1e-9 * (double)m->bytes[rung->floats] / r.seconds[0], shares[0], rates[1], shares[1], rates[2], shares[2], 100 * cpu_error(r.out, right));
            shown++;
        }
        llm_backend_free(b);
    }
    say(l, "\n");
    fact(l, "memory_bytes_per_second", bandwidth[1]);
    fact(l, "threads", all);
    fact(l, "same_row_by_row", same_by_row);
    fact(l, "same_with_threads", same_threads);
    show_table(l, &t, "rungs");
    say(l, "\n%%: of the nearer limit, bytes or the operations of the same instructions. Error: against the plain loop. Rows one by one and in one pass gave "
           "%s, threads changed %s.\n", same_by_row ? "the same bits" : "OTHER BITS", same_threads ? "no bit" : "THE RESULT");
    if (good) show_plot(l, &p);
    else plot_free(&p);
    return good;
}

static int lesson_cpu(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    cpu_matrix m = {.rows = 5632, .cols = 2048};
    int milliseconds = 120;
    char *type_name = "q4_0";
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "rows", "N", WHOLE, &m.rows, 1, 65536, "of the matrix (default 5632: TinyLlama's ffn_up)"},
        {0, "cols", "N", WHOLE, &m.cols, 64, 65536, "of the matrix, whole blocks of the type (default 2048)"},
        {0, "type", "TYPE", TEXT, &type_name, 0, 0, "of its weights (default q4_0)"},
        {0, "milliseconds", "N", WHOLE, &milliseconds, 1, 10000, "for each measurement (default 120)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    const llm_type_info *type = llm_type_by_name(type_name);
    bool good = false;
    if (chosen.device != DEVICE_CPU && chosen.device != DEVICE_AUTO) fail("this lesson is about the CPU: llm lesson kernel is about a GPU's threads");
    else if (!type || !type->pack) fail("there is no type '%s' that can be written", type_name);
    else if (m.cols % type->block_values) fail("%d columns are no whole blocks of %d values of %s", m.cols, type->block_values, type->name);
    else {
        cpu_fill(&m, type);
        good = cpu_show(&l, &m, milliseconds);
    }
    for (int k = 0; k < 2; k++) free(m.weights[k]);
    free(m.x);
    return lesson_end(&l, good);
}

static const char cpu_notes[] =
    "One product of a matrix in memory with 1, 16 and 512 rows of x, by each form of chapter [4] of llm.h that this processor has (or --isa\n"
    "allows), beside what memory and the processor's instructions could give.\n"
    "\n"
    "Examples:\n"
    "  llm lesson cpu\n"
    "  llm lesson cpu --isa avx2 --type q8_0\n"
    "  llm lesson cpu --png cpu.png\n";
