/* 08-paged.c - llm lesson paged: the owner of each cache block, step by step. See 08-paged.md.
 *
 * Four requests arrive and end. One asks for three samples, which share the blocks of the prompt
 * until they write to them. One begins with the same tokens as another, and finds them in the
 * prefix cache. The engine's trace reports each block that a sequence takes, shares, copies and
 * releases. From these events the lesson reconstructs the block tables, and draws them after each
 * step. */
#include "lesson.h"

enum { PAGED_REQUESTS = 4, PAGED_OWNERS = 6, PAGED_BLOCKS = 96 };
enum { PAGED_SHARED = PAGED_OWNERS, PAGED_KEPT }; /* series of the map after the owners */

static const struct paged_plan {
    const char *what;
    int step;            /* step of its arrival */
    int first, prompt;   /* first token and length of the prompt in the bundled text */
    int samples, tokens; /* number of samples; tokens per sample */
} paged_plan[PAGED_REQUESTS] = {{"A: alone", 0, 0, 20, 1, 30},
                                {"B: three samples of one prompt", 6, 2000, 21, 3, 14},
                                {"C: same beginning as A", 14, 0, 26, 1, 22},
                                {"D: a long prompt", 24, 5000, 44, 1, 8}};

/* The block tables according to the trace. Owners are numbered A, B1, B2, B3, C, D. */
typedef struct paged_state {
    uint64_t requests[PAGED_REQUESTS]; /* (n_requests) ids of the requests, in order of arrival */
    int n_requests;
    llm_state states[PAGED_OWNERS];
    int32_t tables[PAGED_OWNERS][PAGED_BLOCKS]; /* (lengths[i]) block numbers of each owner */
    int lengths[PAGED_OWNERS];
    int references[PAGED_BLOCKS]; /* number of tables that list each block */
    bool kept[PAGED_BLOCKS];      /* whether the prefix cache can find the content of each block */
    int copies;
} paged_state;

/* The owner that an event refers to; -1: none. */
static int paged_owner(const paged_state *p, const llm_trace_event *e) {
    int i = 0;
    while (i < p->n_requests && p->requests[i] != e->request) i++;
    if (i == p->n_requests) return -1;
    return i == 0 ? 0 : i == 1 ? 1 + e->sample : i + 2;
}

/* The block becomes an entry of the owner's table. */
static void paged_enter(paged_state *p, int owner, int entry, int32_t block, int references) {
    p->tables[owner][entry] = block;
    if (entry >= p->lengths[owner]) p->lengths[owner] = entry + 1;
    p->references[block] = references;
    p->kept[block] = false;
}

/* The owner releases the block, and e->count tables still list it. */
static void paged_leave(paged_state *p, int owner, const llm_trace_event *e) {
    int n = 0;
    for (int i = 0; i < p->lengths[owner]; i++)
        if (p->tables[owner][i] != e->block) p->tables[owner][n++] = p->tables[owner][i];
    p->lengths[owner] = n;
    p->references[e->block] = e->count;
    p->kept[e->block] = e->kept;
}

/* The engine calls this for each of its decisions: update the tables. */
static void paged_trace(void *user, const llm_trace_event *e) {
    paged_state *p = user;
    bool submitted =
        e->kind == LLM_TRACE_STATE && e->from == LLM_WAITING && e->state == LLM_WAITING;
    if (submitted && e->sample == 0 && p->n_requests < PAGED_REQUESTS)
        p->requests[p->n_requests++] = e->request;
    if (e->kind == LLM_TRACE_EVICT) p->kept[e->block] = false;
    int owner = paged_owner(p, e);
    if (owner < 0) return;
    switch (e->kind) {
    case LLM_TRACE_STATE: p->states[owner] = e->state; break;
    case LLM_TRACE_TAKE: paged_enter(p, owner, e->first, e->block, 1); break;
    case LLM_TRACE_SHARE:
        paged_enter(p, owner, e->first, e->block, p->references[e->block] + 1);
        break;
    case LLM_TRACE_COPY:
        paged_enter(p, owner, e->first, e->block, 1);
        p->references[e->source]--;
        p->copies++;
        break;
    case LLM_TRACE_RELEASE: paged_leave(p, owner, e); break;
    default: break;
    }
}

typedef struct paged_counts {   /* counts after a step */
    int used, shared, kept;     /* numbers of blocks */
    int sequences;              /* number of sequences that have started and not ended */
    double references, entries; /* sum over all blocks; sum over all tables */
} paged_counts;

/* Count the blocks, and draw each block's owner in the map. */
static paged_counts paged_count(const paged_state *p, plot *map, int step, int n_blocks) {
    paged_counts c = {0};
    for (int block = 0; block < n_blocks; block++) {
        bool kept = p->references[block] == 0 && p->kept[block];
        c.references += p->references[block];
        c.used += p->references[block] > 0;
        c.shared += p->references[block] > 1;
        c.kept += kept;
        if (kept) plot_cell(map, block, step, PAGED_KEPT);
    }
    for (int owner = 0; owner < PAGED_OWNERS; owner++) {
        c.sequences += p->states[owner] != LLM_WAITING && p->states[owner] != LLM_ENDED;
        c.entries += p->lengths[owner];
        for (int k = 0; k < p->lengths[owner]; k++) {
            int32_t block = p->tables[owner][k];
            plot_cell(map, block, step, p->references[block] > 1 ? PAGED_SHARED : owner);
        }
    }
    return c;
}

/* A block of a frame: its number, in the colour of its owner. */
static void paged_block(scene *s, double x, double y, int block, int colour) {
    char name[8];
    snprintf(name, sizeof name, "%d", block);
    scene_rectangle(s, colour, x, y, x + 42, y + 30);
    scene_text(s, colour < SCENE_COLOURS ? SCENE_ON + colour : SCENE_MUTED, 13, x + 21, y + 20, 0.5,
               false, name);
}

/* Draw the pool and the block tables after a step. */
static void paged_frame(lesson *l, const paged_state *p, const plot *map, int step, int n_blocks) {
    static const char *const owners[PAGED_OWNERS] = {"A", "B, sample 1", "B, sample 2",
                                                     "B, sample 3", "C", "D"};
    int rows = (n_blocks + 17) / 18;
    double tables = 130 + 34 * rows;
    scene *s = new_frame(l, tables + 34 * PAGED_OWNERS + 20, "The cache after step %d", step);
    if (!s) return;
    scene_text(s, SCENE_MUTED, 14, 28, 66, 0, false,
               "The pool: free blocks are pale, or light grey if their content is kept for a "
               "prompt that begins alike.");
    for (int i = 0; i < n_blocks; i++) {
        int at = step < map->columns ? map->cells[step * n_blocks + i] - 1 : -1;
        paged_block(s, 28 + i % 18 * 49, 80 + i / 18 * 34, i,
                    at < 0 ? SCENE_EMPTY : map->series[at].colour);
    }
    scene_text(s, SCENE_MUTED, 14, 28, tables - 14, 0, false,
               "The block tables, in order of the text. A block in several tables is purple.");
    for (int owner = 0; owner < PAGED_OWNERS; owner++) {
        double y = tables + 34 * owner;
        bool live = p->lengths[owner] > 0;
        scene_text(s, live ? SCENE_INK : SCENE_MUTED, 14, 28, y + 20, 0, false, owners[owner]);
        char more[16];
        snprintf(more, sizeof more, "+ %d", p->lengths[owner] - 15);
        if (p->lengths[owner] > 15) scene_text(s, SCENE_INK, 14, 868, y + 20, 0, false, more);
        for (int k = 0; k < p->lengths[owner] && k < 15; k++) {
            int block = p->tables[owner][k];
            paged_block(s, 130 + k * 49, y, block,
                        p->references[block] > 1 ? map->series[PAGED_SHARED].colour
                                                 : map->series[owner].colour);
        }
    }
}

static bool paged_submit(lesson *l, llm_engine *engine, int i) {
    llm_error err;
    llm_request request = llm_request_defaults();
    int32_t *prompt = lesson_tokens(l, paged_plan[i].first, paged_plan[i].prompt);
    request.prompt = prompt;
    request.n_prompt = paged_plan[i].prompt;
    request.n_samples = paged_plan[i].samples;
    request.max_tokens = paged_plan[i].tokens;
    request.sampling.temperature = 1;
    request.ignore_end = true;
    bool good = prompt && (llm_submit(engine, &request, NULL, &err) || !fail_with(&err));
    free(prompt);
    return good;
}

typedef struct paged_run { /* the result of all steps */
    paged_state state;
    table steps;
    plot map, slots;
    double waste_paged, waste_contiguous; /* share of slots without a token, added up over steps */
    int counted;                          /* number of steps with blocks in use */
    int hits;                             /* prompt tokens found in the prefix cache */
} paged_run;

static paged_run new_paged_run(int n_blocks) {
    static const column columns[] = {
        {"step", "", "%.0f"},          {"used", "", "%.0f"},      {"free", "", "%.0f"},
        {"shared", "", "%.0f"},        {"kept", "", "%.0f"},      {"references", "", "%.0f"},
        {"table_entries", "", "%.0f"}, {"sequences", "", "%.0f"}, {"tokens", "", "%.0f"},
        {"slots", "", "%.0f"},         {"copied", "", "%.0f"}};
    static const char *const owners[] = {"request A",   "B, sample 1",       "B, sample 2",
                                         "B, sample 3", "request C",         "request D",
                                         "shared",      "free, content kept"};
    paged_run r = {.steps = new_table(columns, COUNT(columns))};
    r.map = plot_new(PLOT_MAP, "The owner of each block of the pool, after each step", "steps",
                     "block");
    plot_note(&r.map, "Sequences take a block when they need one, anywhere. Equal beginnings "
                      "share blocks. A free block keeps its content until its space is needed.");
    r.slots = plot_new(PLOT_LINES, "Cache slots", "steps", "slots");
    plot_note(&r.slots, "Nearly all slots of used blocks hold a token. Reserving a whole "
                        "context for each sequence would take many times as much.");
    for (int i = 0; i < COUNT(owners); i++) {
        int series = plot_series_add(&r.map, owners[i]);
        if (series >= 0) r.map.series[series].mark = "A123CD#k"[i];
    }
    for (int i = 0; i < n_blocks; i++)
        plot_category(&r.map, (char[8]){(char)('0' + i / 10), (char)('0' + i % 10), 0});
    plot_series_add(&r.slots, "with a token");
    plot_series_add(&r.slots, "in used blocks");
    plot_series_add(&r.slots, "if whole contexts were reserved");
    for (int i = 0; i < r.slots.n_series; i++)
        r.slots.series[i].named_at = (const int[]){16, 12, 26}[i]; /* where the lines are apart */
    return r;
}

/* Record the state after a step. */
static void paged_note(const lesson *l, paged_run *r, const paged_counts *c, double tokens,
                       int step, int n_blocks) {
    double used = (double)c->used * l->engine.block_size,
           whole = (double)c->sequences * l->engine.context_length;
    add_row(&r->steps, (double)step, (double)c->used, (double)(n_blocks - c->used),
            (double)c->shared, (double)c->kept, c->references, c->entries, (double)c->sequences,
            tokens, used, (double)r->state.copies);
    plot_point(&r->slots, 0, step, tokens);
    plot_point(&r->slots, 1, step, used);
    plot_point(&r->slots, 2, step, whole);
    if (used > 0) {
        r->waste_paged += 1 - tokens / used;
        r->waste_contiguous += 1 - fmin(tokens / whole, 1);
        r->counted++;
    }
}

/* Submit each request at its step, and run until all have ended. */
static bool paged_run_all(lesson *l, llm_engine *engine, int n_blocks, paged_run *r) {
    llm_error err;
    int n_arrived = 0;
    bool good = true, going = true;
    for (int step = 0; good && going && !stop_requested; step++) {
        while (good && n_arrived < PAGED_REQUESTS && paged_plan[n_arrived].step <= step)
            good = paged_submit(l, engine, n_arrived++);
        int result = good ? llm_step(engine, &err) : 0;
        if (result < 0) good = !fail_with(&err);
        going = result > 0 || n_arrived < PAGED_REQUESTS;
        paged_counts counts = paged_count(&r->state, &r->map, step, n_blocks);
        paged_frame(l, &r->state, &r->map, step, n_blocks);
        if (good)
            paged_note(l, r, &counts, (double)llm_engine_statistics(engine).slots_used, step,
                       n_blocks);
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
    double waste_paged = r->waste_paged / r->counted,
           waste_contiguous = r->waste_contiguous / r->counted;
    table t = new_table(columns, COUNT(columns));
    for (int i = 0; i < PAGED_REQUESTS; i++)
        add_row(&t, paged_plan[i].what, (double)paged_plan[i].step, (double)paged_plan[i].prompt,
                (double)paged_plan[i].samples, (double)paged_plan[i].tokens);
    show_table(l, &t, "requests");
    if (l->json) show_table(l, &r->steps, "steps");
    else free(r->steps.cells), free(r->steps.numbers);
    show_plot(l, &r->map);
    say(l,
        "\n%d blocks were copied on a write, and %d prompt tokens were found in the prefix cache. "
        "On average, %.0f %% of the slots in used blocks hold no token; it would be %.0f %% if "
        "each sequence reserved its whole context of %d tokens.\n",
        r->state.copies, r->hits, 100 * waste_paged, 100 * waste_contiguous,
        l->engine.context_length);
    fact(l, "blocks_copied", r->state.copies);
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
        HTML_OPTION(l),
        {0, "block-size", "N", WHOLE, &l.engine.block_size, 1, 96, "tokens in a block (default 8)"},
        {0, "blocks", "N", WHOLE, &n_blocks, 1, PAGED_BLOCKS, "blocks in the pool (default 28)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    int longest = 0;
    for (int i = 0; i < PAGED_REQUESTS; i++)
        if (paged_plan[i].prompt + paged_plan[i].tokens > longest)
            longest = paged_plan[i].prompt + paged_plan[i].tokens;
    int fewest = (longest + l.engine.block_size - 1) / l.engine.block_size;
    if (n_blocks < fewest) {
        fail("--blocks is %d, but the longest request, of %d tokens, needs %d", n_blocks, longest,
             fewest);
        return lesson_end(&l, false);
    }
    l.engine.context_length = given_or(-1, 96, 1, llm_model_config(l.loaded)->context_length);
    l.engine.cache_bytes = (uint64_t)n_blocks * (uint64_t)l.engine.block_size *
                           llm_model_cache_bytes_per_token(l.loaded, l.engine.cache_type);
    paged_run r = new_paged_run(n_blocks);
    l.engine.trace = paged_trace;
    l.engine.trace_user = &r.state;
    llm_engine *engine = lesson_engine(l.loaded, &l.engine);
    bool good = engine && paged_run_all(&l, engine, n_blocks, &r);
    free_engine(engine);
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
    "In the map, a row is a block of the pool, and a column is a step. # is a block in several\n"
    "block tables. k is a free block whose content is kept for a prompt with the same beginning.\n"
    "\n"
    "Examples:\n"
    "  llm lesson paged\n"
    "  llm lesson paged --block-size 4 --blocks 60 --svg paged.svg\n"
    "  llm lesson paged --html paged.html\n";

const command paged_lesson = {"lesson paged", "The owner of each cache block, step by step.",
                              "[options]", lesson_paged, paged_notes};
