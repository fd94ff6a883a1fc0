/* 08-paged.c - llm lesson paged: who owns which block of the cache, step by step. Beside 08-paged.md.
 *
 * Four requests come and go; one asks for three samples (a fork: they share the prompt's blocks, and who writes into a
 * shared block first gets a copy of it), one begins as another did (the prefix cache). After each step the lesson
 * reads the block tables and the reference counts where the scheduler keeps them. */

enum { PAGED_REQUESTS = 4, PAGED_OWNERS = 6, PAGED_SHARED = PAGED_OWNERS, PAGED_KEPT };

static const struct paged_plan {
    const char *what;
    int step, first, prompt, samples, tokens; /* comes at this step, with the tokens first .. of the text as its prompt */
} paged_plan[PAGED_REQUESTS] = {{"A: alone", 0, 0, 20, 1, 30},
                                {"B: three samples of one prompt", 6, 2000, 21, 3, 14},
                                {"C: begins as A did", 14, 0, 26, 1, 22},
                                {"D: a long prompt", 24, 5000, 44, 1, 8}};

static struct { /* what stands at the seam has no argument of its own to remember things by */
    void (*copy_blocks)(void *context, const llm_cache *cache, const int32_t *from, const int32_t *to, int n);
    int copies;
} paged_spy;

static void paged_copy_blocks(void *context, const llm_cache *cache, const int32_t *from, const int32_t *to, int n) {
    paged_spy.copies += n;
    paged_spy.copy_blocks(context, cache, from, to, n);
}

/* Owners are numbered A, B1, B2, B3, C, D. */
static int paged_owner(const llm__sequence *sequence) {
    int id = (int)sequence->job->id - (int)*(const uint64_t *)sequence->job->request.user; /* 0 to 3 */
    return id == 0 ? 0 : id == 1 ? 1 + sequence->sample : id + 2;
}

typedef struct paged_state { /* of the pool after a step */
    int used, shared, kept, sequences, copies;
    double references, entries, tokens;
} paged_state;

/* Read the tables; note each block's owner in the map. */
static paged_state paged_look(const llm_engine *engine, plot *map, int step) {
    const llm__scheduler *s = &engine->scheduler;
    const llm__pool *pool = &s->pool;
    paged_state state = {.used = (int)(pool->n_blocks - pool->n_free), .copies = paged_spy.copies};
    for (int block = 0; block < pool->n_blocks; block++) {
        state.references += pool->references[block];
        state.shared += pool->references[block] > 1;
        bool kept = pool->references[block] == 0 && pool->identity[block];
        state.kept += kept;
        if (kept) plot_cell(map, block, step, PAGED_KEPT);
    }
    for (int i = 0; i < s->n_sequences; i++) {
        const llm__sequence *sequence = s->sequences[i];
        state.sequences++;
        state.entries += sequence->table.n_blocks;
        for (int k = 0; k < sequence->table.n_blocks; k++) {
            int32_t block = sequence->table.blocks[k];
            plot_cell(map, block, step, pool->references[block] > 1 ? PAGED_SHARED : paged_owner(sequence));
        }
    }
    state.tokens = (double)llm__slots_used(s);
    return state;
}

static bool paged_submit(lesson *l, llm_engine *engine, int i, uint64_t *first_id) {
    llm_error err;
    uint64_t id;
    llm_request request = llm_request_defaults();
    int32_t *prompt = lesson_tokens(l, paged_plan[i].first, paged_plan[i].prompt);
    request.prompt = prompt;
    request.n_prompt = paged_plan[i].prompt;
    request.n_samples = paged_plan[i].samples;
    request.max_tokens = paged_plan[i].tokens;
    request.sampling.temperature = 1;
    request.ignore_end = true;
    request.user = first_id;
    bool good = prompt && (llm_submit(engine, &request, &id, &err) || !fail_with(&err));
    if (good && i == 0) *first_id = id;
    free(prompt);
    return good;
}

typedef struct paged_run { /* what all steps came to */
    table steps;
    plot map, slots;
    double waste_paged, waste_contiguous; /* shares of the slots that held no token, added up */
    int counted;                          /* steps with blocks in use */
    int hits;                             /* tokens of prompts that were found */
} paged_run;

static paged_run new_paged_run(int n_blocks) {
    static const column columns[] = {
        {"step", "", "%.0f"},   {"used", "", "%.0f"},       {"free", "", "%.0f"},          {"shared", "", "%.0f"},
        {"kept", "", "%.0f"},   {"references", "", "%.0f"}, {"table_entries", "", "%.0f"}, {"sequences", "", "%.0f"},
        {"tokens", "", "%.0f"}, {"slots", "", "%.0f"},      {"copied", "", "%.0f"}};
    static const char *const owners[] = {"A", "B, sample 1", "B, sample 2", "B, sample 3",
                                         "C", "D",           "several",     "free, but kept"};
    paged_run r = {.steps = new_table(columns, COUNT(columns))};
    r.map = plot_new(PLOT_MAP, "Who owns which block of the pool, after each step", "steps", "block");
    r.slots = plot_new(PLOT_LINES, "Slots of the cache", "steps", "slots");
    for (int i = 0; i < COUNT(owners); i++) {
        int series = plot_series_add(&r.map, owners[i]);
        if (series >= 0) r.map.series[series].mark = "A123CD#k"[i];
    }
    for (int i = 0; i < n_blocks; i++) plot_category(&r.map, (char[8]){(char)('0' + i / 10), (char)('0' + i % 10), 0});
    plot_series_add(&r.slots, "tokens held");
    plot_series_add(&r.slots, "slots of the blocks in use");
    plot_series_add(&r.slots, "a whole context each");
    return r;
}

/* Note the state after a step. */
static void paged_note(const lesson *l, paged_run *r, const paged_state *s, int step, int n_blocks) {
    double used = (double)s->used * l->engine.block_size, whole = (double)s->sequences * l->engine.context_length;
    add_row(&r->steps, (double)step, (double)s->used, (double)(n_blocks - s->used), (double)s->shared, (double)s->kept,
            s->references, s->entries, (double)s->sequences, s->tokens, used, (double)s->copies);
    plot_point(&r->slots, 0, step, s->tokens);
    plot_point(&r->slots, 1, step, used);
    plot_point(&r->slots, 2, step, whole);
    if (used > 0) {
        r->waste_paged += 1 - s->tokens / used;
        r->waste_contiguous += 1 - fmin(s->tokens / whole, 1);
        r->counted++;
    }
}

/* All requests, each at its step, until all have ended. */
static bool paged_work(lesson *l, llm_engine *engine, int n_blocks, paged_run *r) {
    llm_error err;
    uint64_t first_id = 0;
    int came = 0;
    bool good = true, going = true;
    for (int step = 0; good && going && !stop_requested; step++) {
        while (good && came < PAGED_REQUESTS && paged_plan[came].step <= step)
            good = paged_submit(l, engine, came++, &first_id);
        int result = good ? llm_step(engine, &err) : 0;
        if (result < 0) good = !fail_with(&err);
        going = result > 0 || came < PAGED_REQUESTS;
        paged_state state = paged_look(engine, &r->map, step);
        if (good) paged_note(l, r, &state, step, n_blocks);
    }
    r->hits = (int)llm_engine_statistics(engine).prefix_hits;
    return good && !stop_requested && r->counted > 0;
}

static void paged_show(lesson *l, paged_run *r) {
    static const column columns[] = {{"request", "request", "%s"},
                                     {"step", "at step", "%.0f"},
                                     {"prompt", "prompt", "%.0f"},
                                     {"samples", "samples", "%.0f"},
                                     {"tokens", "tokens", "%.0f"}};
    double waste_paged = r->waste_paged / r->counted, waste_contiguous = r->waste_contiguous / r->counted;
    table t = new_table(columns, COUNT(columns));
    for (int i = 0; i < PAGED_REQUESTS; i++)
        add_row(&t, paged_plan[i].what, (double)paged_plan[i].step, (double)paged_plan[i].prompt,
                (double)paged_plan[i].samples, (double)paged_plan[i].tokens);
    show_table(l, &t, "requests");
    if (l->json) show_table(l, &r->steps, "steps");
    else free(r->steps.cells), free(r->steps.numbers);
    show_plot(l, &r->map);
    say(l,
        "\n%d blocks were copied on a write, and %d tokens of prompts were found in the prefix cache. Slots that "
        "held no token: %.0f %% of the blocks in use, at the mean of all steps; with the whole context of %d tokens "
        "reserved for each sequence %.0f %%.\n",
        paged_spy.copies, r->hits, 100 * waste_paged, l->engine.context_length, 100 * waste_contiguous);
    fact(l, "blocks_copied", paged_spy.copies);
    fact(l, "prefix_hits", r->hits);
    fact(l, "waste_paged", waste_paged);
    fact(l, "waste_contiguous", waste_contiguous);
    fact(l, "block_size", l->engine.block_size);
    show_plot(l, &r->slots);
}

static int lesson_paged(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    int n_blocks = 28;
    l.engine.block_size = 8;
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "block-size", "N", WHOLE, &l.engine.block_size, 1, 96, "tokens in a block (default 8)"},
        {0, "blocks", "N", WHOLE, &n_blocks, 1, 96, "blocks of the pool (default 28)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    int longest = 0;
    for (int i = 0; i < PAGED_REQUESTS; i++)
        if (paged_plan[i].prompt + paged_plan[i].tokens > longest) longest = paged_plan[i].prompt + paged_plan[i].tokens;
    int fewest = (longest + l.engine.block_size - 1) / l.engine.block_size;
    if (n_blocks < fewest) {
        fail("--blocks is %d: the longest request alone, of %d tokens, needs %d", n_blocks, longest, fewest);
        return lesson_end(&l, false);
    }
    llm_backend *device = lesson_device(&l);
    if (!device) return lesson_end(&l, false);
    llm_backend spy = *device;
    paged_spy.copy_blocks = device->copy_blocks;
    paged_spy.copies = 0;
    spy.copy_blocks = paged_copy_blocks;
    l.engine.backend = &spy;
    l.engine.context_length = given_or(-1, 96, 1, llm_model_config(l.loaded)->context_length);
    l.engine.cache_bytes = (uint64_t)n_blocks * (uint64_t)l.engine.block_size *
                           llm_model_cache_bytes_per_token(l.loaded, l.engine.cache_type);
    llm_engine *engine = lesson_engine(l.loaded, &l.engine);
    paged_run r = new_paged_run(n_blocks);
    bool good = engine && paged_work(&l, engine, n_blocks, &r);
    llm_engine_free(engine);
    llm_backend_free(device);
    if (good) {
        paged_show(&l, &r);
    } else {
        plot_free(&r.map);
        plot_free(&r.slots);
        free(r.steps.cells), free(r.steps.numbers);
    }
    return lesson_end(&l, good);
}

static const char paged_notes[] =
    "A row is a block of the pool, a column a step. #: several block tables name it; k: free, but what it holds is kept for a\n"
    "prompt that begins alike.\n"
    "\n"
    "Examples:\n"
    "  llm lesson paged\n"
    "  llm lesson paged --block-size 4 --blocks 60 --png paged.png\n";
