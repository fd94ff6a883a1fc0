/* 07-batching.c - llm lesson batching: the same requests under three policies. Beside 07-batching.md.
 *
 * Time is counted in ticks: one call of llm_step, which is a forward pass or, under dynamic batching, a millisecond of
 * waiting. Request i comes at tick i x gap. The map shows who got a token in which tick: each row is a place in the
 * batch. */

enum { BATCHING_POLICIES = 3 };

typedef struct batching {
    int slots, n, prompt, gap;
    int_range lengths;
    float window;
} batching;

typedef struct batching_task {
    task task;
    int slot, arrived, first, last; /* ticks; slot -1: none */
    int seen;                       /* tokens until the tick before */
} batching_task;

typedef struct batching_result {
    plot map;
    table trace;  /* of each tick: running, waiting */
    int ticks, passes, idle, idle_while_waiting; /* idle: slots x passes without a token */
    double tokens, seconds, mean_wait, mean_latency, worst_latency;
    uint64_t hash; /* of all tokens */
} batching_result;

static int free_slot(const batching_task *tasks, int n, int slots) {
    for (int slot = 0; slot < slots; slot++) {
        bool taken = false;
        for (int i = 0; i < n; i++) taken = taken || (tasks[i].slot == slot && tasks[i].last < 0);
        if (!taken) return slot;
    }
    return slots - 1;
}

/* Note who got a token in this tick. Returns how many. */
static int batching_note(const batching *b, batching_task *tasks, int tick, batching_result *r) {
    int running = 0;
    for (int i = 0; i < b->n; i++) {
        batching_task *t = &tasks[i];
        if (t->task.n == t->seen) continue;
        if (t->slot < 0) {
            t->slot = free_slot(tasks, b->n, b->slots);
            t->first = tick;
        }
        plot_cell(&r->map, t->slot, tick, i);
        t->seen = t->task.n;
        running++;
    }
    for (int i = 0; i < b->n; i++)
        if (tasks[i].task.ended && tasks[i].last < 0) tasks[i].last = tick;
    return running;
}

static bool batching_run(lesson *l, const batching *b, llm_policy policy, batching_result *r) {
    static const column columns[] = {{"tick", "", "%.0f"}, {"running", "", "%.0f"}, {"waiting", "", "%.0f"}};
    l->engine.policy = policy;
    l->engine.batch_window = b->window;
    llm_engine *engine = lesson_engine(l->loaded, &l->engine);
    batching_task *tasks = resize(NULL, (size_t)b->n * sizeof *tasks);
    int32_t *prompts = lesson_tokens(l, 0, b->n * b->prompt);
    bool good = engine && prompts;
    char title[96];
    snprintf(title, sizeof title, "%s: who got a token in which tick", policy_names[policy]);
    r->map = plot_new(PLOT_MAP, title, "ticks", "");
    r->trace = new_table(columns, COUNT(columns));
    for (int i = 0; i < b->slots; i++) plot_category(&r->map, (char[8]){(char)('1' + i % 9), 0});
    for (int i = 0; i < b->n; i++) {
        int series = plot_series_add(&r->map, "");
        if (series >= 0) r->map.series[series].mark = (char)(i % 52 < 26 ? 'A' + i % 26 : 'a' + i % 26);
        int length = draw_range(b->lengths, 7, 1, (uint64_t)i);
        tasks[i] = (batching_task){.slot = -1, .first = -1, .last = -1};
        if (good) tasks[i].task = new_task(prompts + i * b->prompt, b->prompt, length);
    }
    double start = llm_seconds();
    int came = 0, ended = 0;
    while (good && ended < b->n && !stop_requested) {
        while (good && came < b->n && came * b->gap <= r->ticks) {
            tasks[came].arrived = r->ticks;
            good = submit_task(engine, &tasks[came++].task);
        }
        int waiting = 0;
        uint64_t passes = llm_engine_statistics(engine).steps;
        good = good && step_tasks(engine) >= 0;
        int running = batching_note(b, tasks, r->ticks, r);
        for (int i = ended = 0; i < b->n; i++) {
            waiting += i < came && tasks[i].first < 0;
            ended += tasks[i].last >= 0;
        }
        add_row(&r->trace, (double)r->ticks, (double)running, (double)waiting);
        r->passes += (int)(llm_engine_statistics(engine).steps - passes);
        r->idle += b->slots - running;
        if (running < b->slots) r->idle_while_waiting += waiting < b->slots - running ? waiting : b->slots - running;
        r->ticks++;
    }
    r->seconds = llm_seconds() - start;
    for (int i = 0; i < b->n && good; i++) {
        double latency = tasks[i].last - tasks[i].arrived + 1;
        r->tokens += tasks[i].task.n;
        r->mean_wait += (double)(tasks[i].first - tasks[i].arrived) / b->n;
        r->mean_latency += latency / b->n;
        r->worst_latency = latency > r->worst_latency ? latency : r->worst_latency;
        r->hash = hash_bytes(r->hash, (const char *)tasks[i].task.tokens, (size_t)tasks[i].task.n * sizeof(int32_t));
    }
    for (int i = 0; i < b->n; i++) free_task(&tasks[i].task);
    free(tasks);
    free(prompts);
    free_engine(engine);
    return good && !stop_requested;
}

static void batching_show(lesson *l, const batching *b, batching_result *results) {
    static const column columns[] = {{"policy", "policy", "%s"},
                                     {"ticks", "ticks", "%.0f"},
                                     {"busy_percent", "busy %", "%.1f"},
                                     {"idle_while_waiting", "idle, one waits", "%.0f"},
                                     {"mean_wait_ticks", "mean wait", "%.1f"},
                                     {"mean_latency_ticks", "latency", "%.1f"},
                                     {"worst_latency_ticks", "worst", "%.0f"},
                                     {"tokens_per_second", "tok/s", "%.0f"}};
    table t = new_table(columns, COUNT(columns));
    bool same = true;
    for (int i = 0; i < BATCHING_POLICIES; i++) {
        const batching_result *r = &results[i];
        add_row(&t, policy_names[i], (double)r->ticks, 100 * r->tokens / ((double)r->ticks * b->slots),
                (double)r->idle_while_waiting, r->mean_wait, r->mean_latency, r->worst_latency, r->tokens / r->seconds);
        same = same && r->hash == results[0].hash;
    }
    say(l,
        "%d requests of %d to %d tokens, one every %d ticks, and %d places in the batch. Waits and latencies in "
        "ticks:\n\n",
        b->n, b->lengths.low, b->lengths.high, b->gap, b->slots);
    show_table(l, &t, "policies");
    fact(l, "slots", b->slots);
    fact(l, "same_tokens", same);
    say(l, "\nThe tokens of every request are %s under all three.\n", same ? "the same" : "NOT THE SAME");
    for (int i = 0; i < BATCHING_POLICIES; i++) {
        char name[32];
        snprintf(name, sizeof name, "trace_%s", policy_names[i]);
        if (l->json) show_table(l, &results[i].trace, name);
        else free(results[i].trace.cells), free(results[i].trace.numbers);
        show_plot(l, &results[i].map);
    }
}

static int lesson_batching(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    batching b = {.slots = 6, .n = 24, .prompt = 8, .gap = 2, .lengths = {2, 40}, .window = 0.01f};
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "slots", "N", WHOLE, &b.slots, 1, 64, "places in the batch (default 6)"},
        {0, "requests", "N", WHOLE, &b.n, 1, 200, "how many (default 24)"},
        {'p', "prompt", "N", WHOLE, &b.prompt, 1, 1024, "tokens of each prompt (default 8)"},
        {'g', "gen", "LOW-HIGH", RANGE, &b.lengths, 1, 1 << 20, "tokens of each answer (default 2-40)"},
        {0, "gap", "N", WHOLE, &b.gap, 0, 1000, "ticks from one request to the next (default 2)"},
        {0, "window", "SECONDS", REAL, &b.window, 0, 10,
         "how long dynamic batching waits for a group to fill (default 0.01)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    if (!fits_context(&l, b.prompt, b.lengths.high)) return lesson_end(&l, false);
    l.engine.max_sequences = b.slots;
    l.engine.prefix_cache = false;
    l.engine.max_batch_tokens =
        b.slots * (b.prompt + 1) > 512 ? b.slots * (b.prompt + 1) : 512; /* all prompts in one step */
    batching_result results[BATCHING_POLICIES];
    memset(results, 0, sizeof results);
    bool good = true;
    for (int i = 0; i < BATCHING_POLICIES && good; i++) good = batching_run(&l, &b, (llm_policy)i, &results[i]);
    if (good) batching_show(&l, &b, results);
    for (int i = 0; i < BATCHING_POLICIES && !good; i++) {
        plot_free(&results[i].map);
        free(results[i].trace.cells);
        free(results[i].trace.numbers);
    }
    return lesson_end(&l, good);
}

static const char batching_notes[] =
    "Static batching fills the places as a group and computes all of them until the longest has ended; dynamic batching also\n"
    "waits for the group to fill; continuous batching gives a place away in the step after it became free. A letter is a\n"
    "request; a row, a place.\n"
    "\n"
    "Examples:\n"
    "  llm lesson batching\n"
    "  llm lesson batching --slots 8 --requests 40 --gen 10-100 --png batching.png\n";
