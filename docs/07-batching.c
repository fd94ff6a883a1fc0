/* 07-batching.c - llm lesson batching: the same requests under three policies. See 07-batching.md.
 *
 * The engine batches continuously; groups.h makes static and dynamic groups outside of it. Time is
 * counted in ticks. A tick is one call of batcher_step: a forward pass or, while a dynamic group
 * waits to fill, a millisecond. Request i arrives at tick i x gap. The engine's trace fills the
 * map: a row is a batch slot, and a letter is the request whose token the slot computed. */
#include "lesson.h"
#include "groups.h"
#include "../tests/bench.h"

typedef struct batching {
    int slots, n;      /* number of batch slots; number of requests */
    int prompt, gap;   /* tokens per prompt; ticks between arrivals */
    int_range lengths; /* tokens per answer */
    float window;      /* seconds: see groups.h */
} batching;

typedef struct batching_task {
    task task;
    member member;
    uint64_t id;              /* id of the request in the trace; 0: not in the engine yet */
    int slot;                 /* index of the batch slot; -1: none */
    int arrived, first, last; /* ticks of arrival, first and last token; -1: not yet */
} batching_task;

typedef struct batching_result {
    plot map;
    table trace; /* a row per tick: running, waiting, padding */
    int ticks;
    int idle_while_waiting; /* slots without useful work while a request waits, over all ticks */
    int padding;            /* tokens computed for ended requests */
    double tokens, seconds;
    double mean_wait, mean_latency, worst_latency; /* ticks */
    uint64_t hash;                                 /* hash of all tokens */
} batching_result;

typedef struct batching_watch { /* what batching_trace reads and updates */
    const batching *b;
    batching_task *tasks;
    batching_result *result;
    int entered;          /* number of requests submitted */
    int running, padding; /* numbers of sequences in this tick */
} batching_watch;

/* The first batch slot without a task. */
static int free_slot(const batching_task *tasks, int n, int slots) {
    for (int slot = 0; slot < slots; slot++) {
        bool taken = false;
        for (int i = 0; i < n; i++) taken = taken || tasks[i].slot == slot;
        if (!taken) return slot;
    }
    return slots - 1;
}

/* Record which requests enter, compute tokens and leave. */
static void batching_trace(void *user, const llm_trace_event *e) {
    batching_watch *w = user;
    const batching *b = w->b;
    bool state = e->kind == LLM_TRACE_STATE,
         submitted = state && e->from == LLM_WAITING && e->state == LLM_WAITING;
    int i = 0;
    /* requests enter in order of arrival */
    if (submitted && w->entered < b->n) w->tasks[w->entered++].id = e->request;
    while (i < b->n && w->tasks[i].id != e->request) i++;
    if (e->request == 0 || i == b->n) return;
    batching_task *t = &w->tasks[i];
    if (state && e->state == LLM_PREFILL) t->slot = free_slot(w->tasks, b->n, b->slots);
    if (state && e->state == LLM_ENDED) t->slot = -1;
    if (e->kind != LLM_TRACE_SCHEDULE) return;
    bool padding = t->last >= 0;
    plot_cell(&w->result->map, t->slot, w->result->ticks, padding ? b->n : i);
    w->padding += padding;
    w->running += !padding;
    if (t->first < 0) t->first = w->result->ticks;
}

static batching_result new_batching_result(const batching *b, int policy) {
    static const column columns[] = {{"tick", "", "%.0f"},
                                     {"running", "", "%.0f"},
                                     {"waiting", "", "%.0f"},
                                     {"padding", "", "%.0f"}};
    batching_result r = {.trace = new_table(columns, COUNT(columns))};
    char title[96];
    snprintf(title, sizeof title, "%s: the request in each batch slot, tick by tick",
             policy_names[policy]);
    r.map = plot_new(PLOT_MAP, title, "ticks", "");
    plot_note(&r.map, "%s",
              policy == STATIC    ? "A group starts when all requests of the group before it ended."
              : policy == DYNAMIC ? "A group also waits until it is full, or its time is over."
                                  : "A request takes a free slot in the next step.");
    for (int i = 0; i < b->slots; i++) plot_category(&r.map, (char[8]){(char)('1' + i % 9), 0});
    for (int i = 0; i <= b->n; i++) { /* the last series is padding */
        bool named = i == b->n && policy != CONTINUOUS;
        int series = plot_series_add(&r.map, named ? "padding, for an ended request" : "");
        if (series < 0) continue;
        r.map.series[series].mark =
            i == b->n ? '-' : (char)(i % 52 < 26 ? 'A' + i % 26 : 'a' + i % 26);
        /* 5 and 7 are the greys */
        r.map.series[series].colour = i == b->n ? 7 : i % 6 + (i % 6 == 5);
    }
    return r;
}

/* One tick: submit the requests that arrive, and run a step. False: an error was reported. */
static bool batching_tick(const batching *b, batcher *groups, batching_watch *w, int *n_arrived) {
    batching_result *r = w->result;
    llm_error err;
    llm_event event;
    bool good = true;
    while (good && *n_arrived < b->n && *n_arrived * b->gap <= r->ticks) {
        batching_task *t = &w->tasks[(*n_arrived)++];
        t->arrived = r->ticks;
        good = batcher_submit(groups, &t->member, &err);
    }
    w->running = w->padding = 0;
    good = good && batcher_step(groups, &err) >= 0;
    while (good && batcher_next_event(groups, &event)) take_task_event(&event);
    return good || !fail_with(&err);
}

static bool batching_run(lesson *l, const batching *b, int policy, batching_result *r) {
    batching_task *tasks = resize(NULL, (size_t)b->n * sizeof *tasks);
    batching_watch watch = {.b = b, .tasks = tasks, .result = r};
    int32_t *prompts = lesson_tokens(l, 0, b->n * b->prompt);
    *r = new_batching_result(b, policy);
    l->engine.trace = batching_trace;
    l->engine.trace_user = &watch;
    batcher groups = {.engine = lesson_engine(l->loaded, &l->engine),
                      .policy = policy,
                      .window = (double)b->window};
    bool good = groups.engine && prompts;
    for (int i = 0; i < b->n; i++) {
        batching_task *t = &tasks[i];
        *t = (batching_task){.slot = -1, .first = -1, .last = -1};
        if (!good) continue;
        t->task =
            new_task(prompts + i * b->prompt, b->prompt, draw_range(b->lengths, 7, 1, (uint64_t)i));
        t->member.request = t->task.request;
        t->member.request.user = &t->task;
    }
    double start = llm_seconds();
    int n_arrived = 0, ended = 0;
    while (good && ended < b->n && !stop_requested) {
        int waiting = ended = 0;
        good = batching_tick(b, &groups, &watch, &n_arrived);
        for (int i = 0; i < b->n; i++) {
            if (tasks[i].task.ended && tasks[i].last < 0) tasks[i].last = r->ticks;
            waiting += i < n_arrived && tasks[i].first < 0;
            ended += tasks[i].last >= 0;
        }
        add_row(&r->trace, (double)r->ticks, (double)watch.running, (double)waiting,
                (double)watch.padding);
        int idle = b->slots - watch.running;
        r->padding += watch.padding;
        r->idle_while_waiting += waiting < idle ? waiting : idle;
        r->ticks++;
    }
    r->seconds = llm_seconds() - start;
    for (int i = 0; i < b->n && good; i++) {
        double latency = tasks[i].last - tasks[i].arrived + 1;
        r->tokens += tasks[i].task.n;
        r->mean_wait += (double)(tasks[i].first - tasks[i].arrived) / b->n;
        r->mean_latency += latency / b->n;
        r->worst_latency = latency > r->worst_latency ? latency : r->worst_latency;
        r->hash = hash_bytes(r->hash, (const char *)tasks[i].task.tokens,
                             (size_t)tasks[i].task.n * sizeof(int32_t));
    }
    free_engine(groups.engine);
    for (int i = 0; i < b->n; i++) free_task(&tasks[i].task);
    free(tasks);
    free(prompts);
    return good && !stop_requested;
}

static void batching_show(lesson *l, const batching *b, batching_result *results) {
    static const column columns[] = {{"policy", "policy", "%s"},
                                     {"ticks", "ticks", "%.0f"},
                                     {"busy_percent", "busy %", "%.1f"},
                                     {"padding", "padding", "%.0f"},
                                     {"idle_while_waiting", "lost", "%.0f"},
                                     {"mean_wait_ticks", "wait", "%.1f"},
                                     {"mean_latency_ticks", "latency", "%.1f"},
                                     {"worst_latency_ticks", "worst", "%.0f"},
                                     {"tokens_per_second", "tok/s", "%.0f"}};
    table t = new_table(columns, COUNT(columns));
    bool same = true;
    for (int i = 0; i < N_POLICIES; i++) {
        const batching_result *r = &results[i];
        add_row(&t, policy_names[i], (double)r->ticks,
                100 * r->tokens / ((double)r->ticks * b->slots), (double)r->padding,
                (double)r->idle_while_waiting, r->mean_wait, r->mean_latency, r->worst_latency,
                r->tokens / r->seconds);
        same = same && r->hash == results[0].hash;
    }
    say(l,
        "%d requests of %d to %d tokens arrive, one every %d ticks. The batch has %d slots. "
        "Padding: tokens computed for ended requests. Lost: slots without useful work while a "
        "request waits, added up over ticks. Mean wait, mean and worst latency are in "
        "ticks:\n\n",
        b->n, b->lengths.low, b->lengths.high, b->gap, b->slots);
    show_table(l, &t, "policies");
    fact(l, "slots", b->slots);
    fact(l, "same_tokens", same);
    say(l, "\nThe three policies give every request %s tokens.\n", same ? "the same" : "DIFFERENT");
    for (int i = 0; i < N_POLICIES; i++) {
        char name[32];
        snprintf(name, sizeof name, "trace_%s", policy_names[i]);
        if (l->json) show_table(l, &results[i].trace, name);
        else free(results[i].trace.cells), free(results[i].trace.numbers);
        show_plot(l, &results[i].map);
    }
}

/* The ticks of a request, from the map: the first and the last; -1: none. */
static void batching_ticks(const plot *map, int request, int *first, int *last) {
    *first = *last = -1;
    for (int i = 0; i < map->columns * map->n_categories; i++) {
        if (map->cells[i] != request + 1) continue;
        *last = i / map->n_categories;
        if (*first < 0) *first = *last;
    }
}

static void batching_box(scene *s, double x, double y, int colour, char mark) {
    scene_rectangle(s, colour, x, y, x + 28, y + 28);
    scene_text(s, SCENE_ON + colour, 14, x + 14, y + 19, 0.5, false, (char[2]){mark, 0});
}

/* Draw a policy at one tick: the requests in the slots, those waiting, and the number ended. */
static void batching_policy(scene *s, const batching *b, const plot *map, const char *name,
                            int tick, double y) {
    int waiting = 0, ended = 0, padding = 0;
    char line[64];
    scene_text(s, SCENE_INK, 14, 28, y + 20, 0, true, name);
    for (int slot = 0; slot < b->slots && slot < 16; slot++) {
        int i = tick < map->columns ? map->cells[tick * b->slots + slot] - 1 : -1;
        double x = 130 + slot * 32;
        if (i >= 0) batching_box(s, x, y, map->series[i].colour, map->series[i].mark);
        else scene_rectangle(s, SCENE_EMPTY, x, y, x + 28, y + 28);
    }
    snprintf(line, sizeof line, "+ %d", b->slots - 16);
    if (b->slots > 16) scene_text(s, SCENE_INK, 14, 650, y + 20, 0, false, line);
    scene_text(s, SCENE_MUTED, 14, 28, y + 58, 0, false, "waiting");
    for (int i = 0; i < b->n; i++) {
        int first, last;
        batching_ticks(map, i, &first, &last);
        ended += last >= 0 && last < tick;
        if (i * b->gap > tick || (first >= 0 && first <= tick)) continue;
        if (waiting < 22)
            batching_box(s, 130 + waiting * 32, y + 38, map->series[i].colour, map->series[i].mark);
        waiting++;
    }
    snprintf(line, sizeof line, "+ %d", waiting - 22);
    if (waiting > 22) scene_text(s, SCENE_INK, 14, 902, y + 58, 1, false, line);
    for (int i = 0; i < (tick + 1) * b->slots && i < map->columns * b->slots; i++)
        padding += map->cells[i] == b->n + 1;
    snprintf(line, sizeof line, "%d of %d have ended; padding so far: %d", ended, b->n, padding);
    scene_text(s, SCENE_INK, 14, 130, y + 92, 0, false, line);
}

static void batching_frames(lesson *l, const batching *b, const batching_result *results) {
    int ticks = 0;
    for (int i = 0; i < N_POLICIES; i++)
        if (results[i].ticks > ticks) ticks = results[i].ticks;
    for (int tick = 0; tick <= ticks && l->html; tick++) {
        scene *s = new_frame(l, 74 + 120 * N_POLICIES, "The slots of the batch in tick %d", tick);
        scene_text(s, SCENE_MUTED, 14, 28, 64, 0, false,
                   "A letter is a request; - is padding: a token computed for an ended request.");
        for (int i = 0; i < N_POLICIES; i++)
            batching_policy(s, b, &results[i].map, policy_names[i], tick, 84 + 120 * i);
    }
}

static int lesson_batching(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    batching b = {.slots = 6, .n = 24, .prompt = 8, .gap = 2, .lengths = {2, 40}, .window = 0.02f};
    const option options[] = {
        LESSON_OPTIONS(l),
        HTML_OPTION(l),
        {0, "slots", "N", WHOLE, &b.slots, 1, 64, "slots of the batch (default 6)"},
        {0, "requests", "N", WHOLE, &b.n, 1, 200, "number of requests (default 24)"},
        {'p', "prompt", "N", WHOLE, &b.prompt, 1, 1024, "tokens per prompt (default 8)"},
        {'g', "gen", "LOW-HIGH", RANGE, &b.lengths, 1, 1 << 20, "tokens per answer (default 2-40)"},
        {0, "gap", "N", WHOLE, &b.gap, 0, 1000, "ticks between arrivals (default 2)"},
        {0, "window", "SECONDS", REAL, &b.window, 0, 10,
         "how long dynamic batching waits for a group to fill (default 0.02)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    if (!fits_context(&l, b.prompt, b.lengths.high)) return lesson_end(&l, false);
    l.engine.max_sequences = b.slots;
    l.engine.prefix_cache = false;
    /* all prompts fit into one step */
    l.engine.max_batch_tokens = b.slots * (b.prompt + 1) > 512 ? b.slots * (b.prompt + 1) : 512;
    batching_result results[N_POLICIES];
    memset(results, 0, sizeof results);
    bool good = true;
    for (int i = 0; i < N_POLICIES && good; i++) good = batching_run(&l, &b, i, &results[i]);
    if (good) batching_frames(&l, &b, results);
    if (good) batching_show(&l, &b, results);
    for (int i = 0; i < N_POLICIES && !good; i++) {
        plot_free(&results[i].map);
        free(results[i].trace.cells);
        free(results[i].trace.numbers);
    }
    return lesson_end(&l, good);
}

static const char batching_notes[] =
    "Static batching fills the slots with a group of requests and computes all of them until\n"
    "the longest has ended. Dynamic batching also waits for the group to fill. Continuous\n"
    "batching gives a slot to another request in the step after it becomes free. In the map, a\n"
    "row is a slot, a letter is a request, and - is a token computed for an ended request.\n"
    "\n"
    "Examples:\n"
    "  llm lesson batching\n"
    "  llm lesson batching --slots 8 --requests 40 --gen 10-100 --svg batching.svg\n"
    "  llm lesson batching --html batching.html\n";

const command batching_lesson = {"lesson batching",
                                 "Static, dynamic and continuous batching compared.", "[options]",
                                 lesson_batching, batching_notes};
