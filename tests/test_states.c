/* The life of a request, checked against a simple simulation: a million random calls (submit, step,
 * cancel) on a device that fails at random (token_backend.h). Each token must be the one that the
 * logits of its text select. Where requests share no prefixes and no draft model proposes, the
 * simulation predicts a step exactly: which sequences are admitted, scheduled, preempted and
 * resumed, with how many tokens and blocks, and what remains after a failure. In every walk, block
 * tables and states are also reconstructed from the trace and checked. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_util.h"
#define LLM_DEBUG
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "invariants.h"
#include "engine_util.h"
#include "tiny_model.h"
#include "token_backend.h"

enum { CONTEXT = 40, MAX_PROMPT = 22, REQUESTS = 16, SAMPLES = 4, SEQUENCES = 8, BLOCKS = 160 };
enum { DEPTH = 4 }; /* the most proposals per step */

typedef struct request request;

typedef struct sequence { /* one sample of a request */
    request *of;
    int sample;
    int32_t tokens[CONTEXT];
    uint64_t hashes[CONTEXT]; /* hash of the text up to each token */
    int known;                /* number of tokens */
    int seen, seen_before;    /* positions that the hook has seen, now and before this step */
    llm_finish finish;
    /* Simulated: */
    llm_state state;
    int cached;
    int first;        /* number of cached tokens before this step */
    int known_before; /* number of tokens before this step */
    int table[CONTEXT], n_blocks;
    int saved;            /* number of blocks saved in host memory */
    int resumed;          /* number of cached tokens when last resumed */
    int scheduled, depth; /* tokens in this step; the most proposals in this step */
    int32_t proposals[DEPTH];
    int n_proposed, n_accepted;
    int n_reported; /* accepted proposals in events since this step began */
    /* From the trace: */
    int n_submitted; /* number of submit events */
    llm_state traced;
    int32_t traced_table[CONTEXT];
    int n_traced;
    int traced_saved, traced_resumed, traced_generated;
    /* This step's trace events; request is 0 if there is no such event. */
    llm_trace_event scheduled_event, proposed_event, accepted_event;
} sequence;

struct request {
    bool live;
    uint64_t id;
    int64_t rank;
    llm_request options;
    int32_t prompt[MAX_PROMPT];
    char stop[2];
    const char *stops[1];
    int limit, depth;
    bool forked;
    sequence samples[SAMPLES];
};

typedef struct outcome { /* an event that the engine must emit */
    sequence *of;
    int32_t token;
    int index;
    bool accepted;
    llm_finish finish;
} outcome;

typedef struct world { /* one random walk: the engine, its simulation and its trace */
    uint64_t seed;
    test_random random;
    llm_engine_options options;
    token_device *device;
    llm_engine *engine;
    int n_blocks;
    int n_host; /* capacity of host memory in blocks */
    int slice;  /* the most rows of logits per pass */
    bool exact; /* the simulation predicts every step */
    request requests[REQUESTS];
    uint64_t last_id;
    outcome outcomes[SEQUENCES * (DEPTH + 1) + REQUESTS * SAMPLES]; /* not yet read */
    int n_outcomes;
    /* Simulated: */
    request *waiting[REQUESTS]; /* in rank order */
    int n_waiting;
    sequence *admitted[SEQUENCES]; /* oldest first */
    int n_admitted, turn;
    int held[BLOCKS];       /* number of block tables that list each block */
    int n_copies, n_copied; /* copies requested; copies done in this step */
    int host_free;
    int n_calls[CALL_NONE]; /* calls of the device in this step */
    uint64_t steps, prompt_tokens, generated, sequence_steps, decode_steps, preemptions, swapped,
        proposed, accepted, finished;
    /* From the trace: */
    bool stepping;
    int step_end; /* the return value that the trace announces for llm_step */
    int references[BLOCKS];
    bool kept[BLOCKS];
} world;

static struct totals {
    long steps, walks, exact, tokens, cancelled, failures[CALL_NONE], preemptions, swapped,
        accepted, hits, refused, copies, evicted;
} totals;

/* ---- Checks that report the walk's seed --------------------------------------------------- */

static world *current;

static void differ(const char *a, const char *b, int64_t x, int64_t y, int line) {
    fail_msg("walk %llu, step %llu: %s is %lld, %s is %lld (line %d)", (ull)current->seed,
             (ull)current->steps, a, (long long)x, b, (long long)y, line);
}
#define SAME(a, b)                                                                                 \
    ((int64_t)(a) == (int64_t)(b) ? (void)0 : differ(#a, #b, (int64_t)(a), (int64_t)(b), __LINE__))
#define CHECK(condition) SAME((condition) != 0, true)

/* ---- Texts ------------------------------------------------------------------------------- */

static void append(sequence *s, int32_t token) {
    CHECK(s->known < CONTEXT);
    s->hashes[s->known] = text_hash(s->known ? s->hashes[s->known - 1] : 0, token);
    s->tokens[s->known++] = token;
}

/* The hooks of odd samples forbid the first of the tokens that may follow. */
static bool forbids_first(const sequence *s) { return s->of->options.logits_hook && s->sample % 2; }

/* The token that follows a sequence's text. */
static int32_t next_token(const sequence *s) {
    const llm_request *r = &s->of->options;
    int32_t ids[TOKEN_CHOICES];
    uint64_t index = (uint64_t)(s->known - r->n_prompt), sample = (uint64_t)s->sample;
    int forbidden = forbids_first(s); /* number of forbidden tokens */
    choices_after(s->hashes[s->known - 1], s->tokens[s->known - 1], ids);
    if (r->sampling.temperature == 0) return ids[forbidden];
    double u = llm_random(r->sampling.seed, sample, index);
    return ids[forbidden + (int)((TOKEN_CHOICES - forbidden) * u)];
}

static void expect(world *w, sequence *s, int32_t token, bool accepted, llm_finish finish) {
    outcome o = {s, token, s->known - s->of->options.n_prompt, accepted, finish};
    CHECK(w->n_outcomes < (int)(sizeof w->outcomes / sizeof *w->outcomes));
    CHECK(!s->finish);
    w->outcomes[w->n_outcomes++] = o;
    s->finish = finish;
    if (!finish) return;
    s->state = LLM_ENDED;
    bool all = true;
    for (int i = 0; i < s->of->options.n_samples; i++) all = all && s->of->samples[i].finish;
    if (!all) return;
    s->of->live = false;
    w->finished++;
}

/* Append a chosen token and expect its event. */
static void choose(world *w, sequence *s, int32_t token, bool accepted) {
    const llm_request *r = &s->of->options;
    llm_finish finish = LLM_FINISH_NONE;
    w->generated++;
    if (token == TOKEN_END && !r->ignore_end) finish = LLM_FINISH_END;
    else if (s->known + 1 == s->of->limit) finish = LLM_FINISH_LENGTH;
    if (finish != LLM_FINISH_END && r->n_stop && token >= TOKEN_LETTER &&
        s->of->stop[0] == 'a' + token - TOKEN_LETTER)
        finish = LLM_FINISH_STOP;
    expect(w, s, token, accepted, finish);
    if (finish != LLM_FINISH_END) append(s, token);
}

/* ---- The simulation -----------------------------------------------------------------------
 * The scheduler's rules, over counts and lists. Blocks are only numbers, which differ from the
 * engine's. The simulation has no prefix cache and no draft model; prompt lookup proposes greedily,
 * to a fixed depth. */

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }

static int blocks_for(const world *w, int tokens) {
    return (tokens + w->options.block_size - 1) / w->options.block_size;
}

static int free_blocks(const world *w) {
    int n = 0;
    for (int i = 0; i < w->n_blocks; i++) n += !w->held[i];
    return n;
}

static int take_block(world *w) {
    int i = 0;
    while (w->held[i]) i++;
    w->held[i] = 1;
    return i;
}

static void release_blocks(world *w, sequence *s, int keep) {
    while (s->n_blocks > keep) w->held[s->table[--s->n_blocks]]--;
}

/* Whether the device fails in this call. */
static bool fails(world *w, token_call call) {
    const token_device *d = w->device;
    return w->n_calls[call]++ == d->failed_index && d->failed == call;
}

/* Copy-on-write requests copies; they are done before anything else in a step. */
static bool do_copies(world *w) {
    int left = w->n_copied + w->n_copies - w->device->n_calls[CALL_COPY];
    if (w->device->failed == CALL_COPY && left > 0) {
        w->n_copied += w->n_copies - left;
        w->n_copies = left;
        return false;
    }
    w->n_copied += w->n_copies;
    w->n_copies = 0;
    return true;
}

/* The number of blocks for a sequence's tokens, its next token and the proposals after it. */
static int wanted_blocks(const world *w, const sequence *s) {
    int next = s->known + 1;
    return blocks_for(w, least(next + s->of->depth, most(s->of->limit, next)));
}

/* The number of free blocks that admitted sequences do not need for their next step. */
static int spare_blocks(const world *w) {
    int n = free_blocks(w);
    for (int i = 0; i < w->n_admitted; i++) {
        const sequence *s = w->admitted[i];
        if (s->state != LLM_PREEMPTED) n -= most(wanted_blocks(w, s) - s->n_blocks, 0);
    }
    return n;
}

/* PREFILL while more than one token is not cached, also after a preemption; otherwise DECODE. */
static llm_state state_of(const sequence *s) {
    return !s->of->forked || s->known - s->cached > 1 ? LLM_PREFILL : LLM_DECODE;
}

static bool resume(world *w) {
    for (int i = 0; i < w->n_admitted; i++) {
        sequence *s = w->admitted[i];
        if (s->state != LLM_PREEMPTED) continue;
        if (wanted_blocks(w, s) > spare_blocks(w)) return true;
        bool ok = true;
        for (int k = 0; k < s->saved && ok; k++) {
            w->swapped++;
            s->table[s->n_blocks++] = take_block(w);
            ok = !fails(w, CALL_RESTORE) && !fails(w, CALL_RESTORE); /* keys, values */
        }
        if (!ok) { /* its blocks stay in host memory */
            release_blocks(w, s, 0);
            return false;
        }
        w->host_free += s->saved;
        s->saved = 0;
        s->resumed = s->cached;
        s->state = state_of(s);
    }
    return true;
}

static bool any_preempted(const world *w) {
    for (int i = 0; i < w->n_admitted; i++)
        if (w->admitted[i]->state == LLM_PREEMPTED) return true;
    return false;
}

/* The number of samples, started or not, of admitted requests that have not ended. */
static int pledged_samples(const world *w) {
    int n = 0;
    for (int i = 0; i < w->n_admitted; i++) {
        const request *r = w->admitted[i]->of;
        n += r->forked ? 1 : r->options.n_samples;
    }
    return n;
}

static void admit(world *w) {
    if (any_preempted(w)) return;
    int spare = spare_blocks(w);
    while (w->n_waiting > 0) {
        request *r = w->waiting[0];
        int wanted = blocks_for(w, r->options.n_prompt + 1);
        if (pledged_samples(w) + r->options.n_samples > w->options.max_sequences) return;
        if (wanted > spare && w->n_admitted > 0) return;
        spare -= wanted;
        r->samples[0].state = LLM_PREFILL;
        w->admitted[w->n_admitted++] = &r->samples[0];
        memmove(w->waiting, w->waiting + 1, sizeof *w->waiting * (size_t)--w->n_waiting);
    }
}

/* Select decoding sequences first, in turns, then prompts, oldest first. Without chunked prefill,
 * prompts come first. */
static void select_tokens(world *w) {
    int budget = w->options.max_batch_tokens, n = w->n_admitted;
    bool chunks = w->options.chunked_prefill;
    for (int i = 0; i < n; i++) w->admitted[i]->scheduled = w->admitted[i]->depth = 0;
    for (int pass = 0; pass < 2; pass++) {
        bool prompts = chunks ? pass == 1 : pass == 0;
        for (int i = 0; i < n; i++) {
            sequence *s = w->admitted[prompts ? i : (i + w->turn) % n];
            int missing = s->known - s->cached, depth = 0;
            if (s->state != (prompts ? LLM_PREFILL : LLM_DECODE)) continue;
            /* after a preemption, the next token is chosen in a separate step */
            if (prompts && s->of->forked) missing--;
            if (!prompts) depth = least(s->of->depth, s->of->limit - s->known - 1);
            if ((!chunks || !prompts) && missing + depth > budget) continue;
            s->scheduled = least(missing, budget);
            s->depth = s->scheduled ? depth : 0;
            budget -= s->scheduled + s->depth;
        }
    }
    w->turn = n ? (w->turn + 1) % n : 0;
}

static bool preempt(world *w, sequence *s) {
    int used = blocks_for(w, s->cached);
    bool swap = used > 0 && used <= w->host_free;
    for (int i = 0; swap && i < used; i++) {
        w->swapped++;
        if (fails(w, CALL_SAVE) || fails(w, CALL_SAVE)) return false; /* keys, values */
    }
    s->state = LLM_PREEMPTED;
    s->scheduled = s->depth = 0;
    release_blocks(w, s, 0);
    if (swap) w->host_free -= s->saved = used;
    else s->cached = 0;
    w->preemptions++;
    return true;
}

/* Take the blocks that the selected tokens need, oldest sequence first, and preempt the newest to
 * free blocks. */
static bool secure(world *w) {
    for (int i = 0; i < w->n_admitted; i++) {
        sequence *s = w->admitted[i];
        while (s->scheduled) {
            /* index of the first block to be written */
            int first = s->cached / w->options.block_size;
            bool copy = first < s->n_blocks && w->held[s->table[first]] > 1;
            int end = s->cached + s->scheduled + s->depth;
            int more = most(blocks_for(w, end) - s->n_blocks, 0);
            if (more + copy <= free_blocks(w)) {
                int shared = copy ? s->table[first] : -1;
                if (copy) {
                    s->table[first] = take_block(w);
                    w->n_copies++;
                    totals.copies++;
                }
                while (more-- > 0) s->table[s->n_blocks++] = take_block(w);
                if (copy) w->held[shared]--;
                break;
            }
            int newest = w->n_admitted - 1;
            while (newest > i && w->admitted[newest]->n_blocks == 0) newest--;
            if (!preempt(w, w->admitted[newest])) return false;
        }
    }
    return true;
}

/* Propose the tokens that followed the last earlier occurrence of the text's last three tokens, or
 * fewer. */
static void look_up(sequence *s) {
    for (int length = 3; length > 0; length--)
        for (int at = s->known - length - 1; at >= 0; at--) {
            bool same = true;
            for (int i = 0; i < length; i++)
                same = same && s->tokens[at + i] == s->tokens[s->known - length + i];
            if (!same) continue;
            for (int i = at + length; i < s->known && s->n_proposed < s->depth; i++)
                s->proposals[s->n_proposed++] = s->tokens[i];
            return;
        }
}

/* The prompt is computed: create all samples. */
static void fork_samples(world *w, request *r) {
    r->forked = true;
    for (int i = 1; i < r->options.n_samples; i++) {
        sequence *s = &r->samples[i];
        s->cached = r->options.n_prompt;
        s->n_blocks = r->samples[0].n_blocks;
        for (int k = 0; k < s->n_blocks; k++) w->held[s->table[k] = r->samples[0].table[k]]++;
        s->state = LLM_DECODE;
        s->scheduled = 0;
        w->admitted[w->n_admitted++] = s;
    }
}

/* The number of logits rows that a sequence needs in this step. A hook needs all positions that it
 * has not seen. */
static int rows_of(const sequence *s) {
    const request *r = s->of;
    int end = s->cached + s->scheduled + s->n_proposed;
    if (!s->scheduled) return 0;
    if (r->options.logits_hook) return most(end - s->seen_before, 0);
    return r->limit > r->options.n_prompt ? most(end - (s->known - 1), 0) : 0;
}

/* Choose the tokens after a text from `rows` rows of logits. Returns the number of tokens. */
static int choose_tokens(world *w, sequence *s, int rows) {
    w->decode_steps++;
    for (int n = 1;; n++) {
        int32_t token = next_token(s);
        bool proposed = n <= s->n_proposed, accepted = proposed && s->proposals[n - 1] == token;
        w->proposed += proposed;
        w->accepted += accepted;
        s->n_accepted += accepted;
        choose(w, s, token, accepted);
        if (!accepted || s->finish || n == rows) return n;
    }
}

/* Update a sequence after a pass with `rows` rows after its last known token. If !ok, the step
 * failed, and only the tokens chosen before the failure count. */
static void commit(world *w, sequence *s, int rows, bool ok) {
    request *r = s->of;
    bool silent = r->limit == r->options.n_prompt; /* generates no tokens */
    int prompt = most(least(r->options.n_prompt - s->cached, s->scheduled), 0), chosen = 0;
    if (!ok && (rows <= 0 || silent)) return;
    w->prompt_tokens += (uint64_t)prompt;
    w->sequence_steps++;
    s->cached += s->scheduled;
    bool forks = !r->forked && s->cached == r->options.n_prompt;
    if (forks) fork_samples(w, r);
    for (int i = 0; i < (forks ? r->options.n_samples : 1); i++) {
        sequence *sample = forks ? &r->samples[i] : s;
        if (silent && forks) expect(w, sample, -1, false, LLM_FINISH_LENGTH);
        else if (rows > 0) chosen = choose_tokens(w, sample, rows);
    }
    s->cached += most(chosen - 1, 0);
    if (s->finish) return;
    release_blocks(w, s, blocks_for(w, s->cached));
    s->state = state_of(s);
}

static void drop_ended(world *w) {
    int n = 0;
    for (int i = 0; i < w->n_admitted; i++) {
        if (w->admitted[i]->finish) release_blocks(w, w->admitted[i], 0);
        else w->admitted[n++] = w->admitted[i];
    }
    w->n_admitted = n;
}

static bool run(world *w) {
    const token_device *d = w->device;
    int n = w->n_admitted, n_scheduled = 0, n_rows = 0, before = 0;
    for (int i = 0; i < n; i++) {
        sequence *s = w->admitted[i];
        s->first = s->cached;
        if (s->depth) look_up(s);
        n_scheduled += s->scheduled;
        n_rows += rows_of(s);
    }
    if (n_scheduled == 0) return true;
    /* Each pass computes a slice of the rows. After a failure, the rows of earlier slices remain
     * valid. */
    int arrived = n_rows, n_slices = most((n_rows + w->slice - 1) / w->slice, 1);
    if (d->failed == CALL_RUN) arrived = d->failed_index * w->slice;
    else if (d->failed == CALL_LOGITS) arrived = (d->n_calls[CALL_RUN] - 1) * w->slice;
    else SAME(d->n_calls[CALL_RUN], n_slices);
    bool ok = d->failed == CALL_NONE;
    for (int i = 0; i < n; i++) {
        sequence *s = w->admitted[i];
        int rows = rows_of(s), own = least(rows, arrived - before);
        before += rows;
        if (s->of->options.logits_hook) own -= most(s->known - 1 - s->seen_before, 0);
        if (s->scheduled) commit(w, s, own, ok);
    }
    w->steps += ok;
    return ok;
}

static bool simulate_step(world *w) {
    w->n_copied = 0;
    memset(w->n_calls, 0, sizeof w->n_calls);
    bool ok = do_copies(w) && resume(w);
    if (ok) admit(w);
    if (ok) select_tokens(w);
    ok = ok && secure(w) && do_copies(w) && run(w);
    drop_ended(w);
    return ok;
}

static void simulate_cancel(world *w, request *r) {
    for (int i = 0; i < r->options.n_samples; i++) {
        sequence *s = &r->samples[i];
        if (s->finish) continue;
        expect(w, s, -1, false, LLM_FINISH_CANCELLED);
        w->host_free += s->saved;
        s->saved = 0;
    }
    for (int i = 0; i < w->n_waiting; i++)
        if (w->waiting[i] == r)
            memmove(w->waiting + i, w->waiting + i + 1,
                    sizeof *w->waiting * (size_t)(--w->n_waiting - i));
    drop_ended(w);
}

/* ---- The trace ----------------------------------------------------------------------------- */

static sequence *traced_sequence(world *w, const llm_trace_event *event) {
    for (int i = 0; i < REQUESTS; i++)
        if (w->requests[i].id == event->request) {
            CHECK(event->sample >= 0 && event->sample < w->requests[i].options.n_samples);
            return &w->requests[i].samples[event->sample];
        }
    fail_msg("the trace names request %llu, which does not exist", (ull)event->request);
    return NULL;
}

static bool may_follow(llm_state from, llm_state to) {
    switch (from) {
    case LLM_WAITING: return to != LLM_PREEMPTED; /* a submit event goes from WAITING to WAITING */
    case LLM_PREFILL: return to == LLM_DECODE || to == LLM_PREEMPTED || to == LLM_ENDED;
    case LLM_DECODE: return to == LLM_PREEMPTED || to == LLM_ENDED;
    case LLM_PREEMPTED: return to == LLM_PREFILL || to == LLM_DECODE || to == LLM_ENDED;
    default: return false;
    }
}

static void trace_state(world *w, sequence *s, const llm_trace_event *event) {
    SAME(event->from, s->traced);
    CHECK(may_follow(event->from, event->state));
    s->n_submitted += event->state == LLM_WAITING;
    /* the blocks found in the prefix cache */
    if (event->from == LLM_WAITING && event->state == LLM_PREFILL)
        SAME(event->count, s->n_traced * w->options.block_size);
    if (event->from == LLM_PREEMPTED && event->state != LLM_ENDED) {
        SAME(blocks_for(w, event->count), s->n_traced);
        s->traced_resumed = event->count;
    }
    if (event->state == LLM_PREEMPTED) s->traced_saved = event->count;
    if (event->state == LLM_ENDED) s->traced_generated = event->count;
    s->traced = event->state;
}

static void trace_block(world *w, sequence *s, const llm_trace_event *event) {
    int32_t block = event->block;
    CHECK(block >= 0 && block < w->n_blocks);
    int *references = &w->references[block];
    switch (event->kind) {
    case LLM_TRACE_TAKE:
        SAME(*references, 0);
        CHECK(!w->kept[block]);
        SAME(event->first, s->n_traced);
        s->traced_table[s->n_traced++] = block;
        ++*references;
        break;
    case LLM_TRACE_SHARE:
        CHECK(*references > 0 || w->kept[block]);
        SAME(event->first, s->n_traced);
        s->traced_table[s->n_traced++] = block;
        ++*references;
        break;
    case LLM_TRACE_COPY:
        CHECK(event->first >= 0 && event->first < s->n_traced);
        SAME(event->source, s->traced_table[event->first]);
        CHECK(w->references[event->source] > 1);
        SAME(*references, 0);
        CHECK(!w->kept[block]);
        s->traced_table[event->first] = block;
        w->references[event->source]--;
        ++*references;
        break;
    case LLM_TRACE_RELEASE:
        CHECK(s->n_traced > 0);
        SAME(block, s->traced_table[--s->n_traced]);
        SAME(event->count, --*references);
        CHECK(!event->kept || w->options.prefix_cache);
        if (event->count == 0) w->kept[block] = event->kept;
        break;
    default: /* LLM_TRACE_EVICT */
        SAME(*references, 0);
        CHECK(w->kept[block]);
        w->kept[block] = false;
        totals.evicted++;
    }
}

static void on_trace(void *user, const llm_trace_event *event) {
    world *w = (world *)user;
    SAME(event->step, llm_engine_statistics(w->engine).steps);
    if (event->kind == LLM_TRACE_STEP_BEGIN || event->kind == LLM_TRACE_STEP_END) {
        bool begins = event->kind == LLM_TRACE_STEP_BEGIN;
        SAME(w->stepping, !begins);
        w->stepping = begins;
        w->step_end = event->count;
        return;
    }
    if (event->kind == LLM_TRACE_EVICT) {
        trace_block(w, NULL, event);
        return;
    }
    sequence *s = traced_sequence(w, event);
    switch (event->kind) {
    case LLM_TRACE_STATE: trace_state(w, s, event); break;
    case LLM_TRACE_SCHEDULE: s->scheduled_event = *event; break;
    case LLM_TRACE_PROPOSE: s->proposed_event = *event; break;
    case LLM_TRACE_ACCEPT: s->accepted_event = *event; break;
    default: trace_block(w, s, event);
    }
}

/* Between calls, the trace's block tables and states equal the simulated ones. */
static void check_trace(world *w) {
    int used = 0, shared = 0;
    for (int i = 0; i < REQUESTS; i++)
        for (int k = 0; w->requests[i].id && k < w->requests[i].options.n_samples; k++) {
            const sequence *s = &w->requests[i].samples[k];
            if (s->finish) SAME(s->n_traced, 0);
            if (s->finish) SAME(s->traced_generated, s->known - s->of->options.n_prompt);
            SAME(s->traced == LLM_ENDED, s->finish != LLM_FINISH_NONE);
            if (s->traced == LLM_WAITING || s->traced == LLM_PREEMPTED) SAME(s->n_traced, 0);
            if (!w->exact) continue;
            SAME(s->traced, s->state);
            SAME(s->n_traced, s->n_blocks);
            if (s->state == LLM_PREEMPTED) SAME(s->traced_saved, s->saved);
            SAME(s->traced_resumed, s->resumed);
        }
    for (int i = 0; i < w->n_blocks; i++) {
        used += w->references[i] > 0;
        shared += w->references[i] > 1;
    }
    llm_statistics s = llm_engine_statistics(w->engine);
    SAME(s.blocks_total - s.blocks_free, used);
    SAME(s.blocks_shared, shared);
}

/* ---- A walk --------------------------------------------------------------------------------- */

static llm_model *target, *draft;
static int pick(world *w, int n) { return random_below(&w->random, n); }
static bool chance(world *w, int percent) { return pick(w, 100) < percent; }

static void random_world(world *w) {
    llm_engine_options o = llm_engine_defaults();
    w->exact = chance(w, 60);
    w->device = token_device_new(chance(w, 50), w->seed);
    o.backend = &w->device->backend;
    o.draft = w->exact || chance(w, 40) ? NULL : draft;
    w->device->draft_differs = chance(w, 30) ? 0 : 4;
    o.prefix_cache = !w->exact && (!o.draft || chance(w, 60));
    o.context_length = CONTEXT;
    o.block_size = 1 + pick(w, 6);
    o.max_sequences = 1 + pick(w, SEQUENCES);
    o.max_speculation = DEPTH;
    o.chunked_prefill = chance(w, 75);
    o.max_batch_tokens = o.chunked_prefill ? 1 + pick(w, 20) : 20 + pick(w, 30);
    o.preempt = (llm_preempt)pick(w, 2);
    o.host_sampling = chance(w, 20);
    o.trace = on_trace;
    o.trace_user = w;
    w->n_blocks = (20 + pick(w, 100)) / o.block_size + 1;
    o.cache_bytes = 16 * (uint64_t)(w->n_blocks * o.block_size);
    w->n_host = o.preempt == LLM_PREEMPT_SWAP ? 1 + pick(w, 80) / o.block_size : 0;
    w->host_free = w->n_host;
    o.swap_bytes = 16 * (uint64_t)(w->n_host * o.block_size) * (o.draft ? 2 : 1);
    CHECK(w->n_blocks <= BLOCKS);
    w->options = o;
}

static float *first_choice(float *logits) {
    while (*logits < 0) logits++;
    return logits;
}

/* Check that a hook sees each position once, in order, with the right logits. */
static void on_logits(void *user, uint64_t id, int sample, int position, float *logits) {
    request *r = (request *)user;
    sequence *s = &r->samples[sample];
    float row[TOKEN_VOCAB];
    SAME(id, r->id);
    SAME(position, s->seen++);
    CHECK(position < s->known);
    token_logits(s->hashes[position], s->tokens[position], row);
    CHECK(!memcmp(row, logits, sizeof row));
    if (forbids_first(s)) *first_choice(logits) = -1000;
}

static void random_request(world *w, request *r) {
    memset(r, 0, sizeof *r);
    r->options = llm_request_defaults();
    llm_request *o = &r->options;
    o->n_prompt = 1 + pick(w, MAX_PROMPT);
    uint64_t text = (uint64_t)pick(w, 3); /* few texts, so that many requests share a prefix */
    for (int i = 0; i < o->n_prompt; i++) {
        r->prompt[i] = TOKEN_LETTER + (int)(token_mix(text * 100 + (uint64_t)i) % 16);
        if (chance(w, 3)) r->prompt[i] = TOKEN_LETTER + pick(w, 16);
    }
    o->prompt = r->prompt;
    o->max_tokens = chance(w, 5) ? 0 : chance(w, 5) ? -1 : 1 + pick(w, 14);
    o->n_samples = chance(w, 60) ? 1 : 1 + pick(w, least(w->options.max_sequences, SAMPLES));
    o->priority = chance(w, 80) ? 0 : pick(w, 3) - 1;
    o->ignore_end = chance(w, 50);
    o->sampling.seed = (uint64_t)pick(w, 1000);
    o->sampling.temperature = chance(w, 30) && o->n_samples == 1 ? 0 : 1;
    if (chance(w, 20)) {
        r->stop[0] = (char)('a' + pick(w, 16));
        r->stops[0] = r->stop;
        o->stop = r->stops;
        o->n_stop = 1;
    }
    if (chance(w, 40)) {
        o->speculate = chance(w, 25) && !w->exact ? LLM_SPECULATE_AUTO : 1 + pick(w, DEPTH);
        o->lookup = !w->options.draft || (w->device->draft_differs && chance(w, 30));
        if (w->exact || chance(w, 70)) o->sampling.temperature = 0;
        if (!w->exact && chance(w, 50)) o->branches = 2 + pick(w, 3);
    } else if (chance(w, 15)) {
        o->logits_hook = on_logits;
    }
    o->user = r;
}

static bool fits(const world *w, const request *r) {
    return blocks_for(w, r->limit) <= w->n_blocks &&
           (w->options.chunked_prefill || r->limit <= w->options.max_batch_tokens);
}

static bool has_unread(const world *w, const request *r) {
    for (int i = 0; i < w->n_outcomes; i++)
        if (w->outcomes[i].of->of == r) return true;
    return false;
}

static void submit(world *w) {
    llm_error err;
    request *r = w->requests;
    while (r < w->requests + REQUESTS && (r->live || has_unread(w, r))) r++;
    if (r == w->requests + REQUESTS) return;
    random_request(w, r);
    llm_request *o = &r->options;
    int room = CONTEXT - o->n_prompt,
        depth = o->speculate == LLM_SPECULATE_AUTO ? DEPTH : o->speculate;
    r->limit = o->n_prompt + (o->max_tokens < 0 ? room : least(o->max_tokens, room));
    r->depth = least(depth, w->options.max_batch_tokens - 1);
    for (int k = 0; k < o->n_samples; k++) {
        sequence *s = &r->samples[k];
        s->of = r;
        s->sample = k;
        s->seen = k ? o->n_prompt - 1 : 0;
        for (int i = 0; i < o->n_prompt; i++) append(s, r->prompt[i]);
    }
    r->id = w->last_id + 1;
    uint64_t id = 0;
    bool ok = llm_submit(w->engine, o, &id, &err);
    CHECK(ok == fits(w, r));
    if (!ok) {
        SAME(err.status, LLM_ERROR_CAPACITY);
        r->id = 0;
        totals.refused++;
        return;
    }
    SAME(id, r->id);
    for (int k = 0; k < o->n_samples; k++) SAME(r->samples[k].n_submitted, 1);
    w->last_id = id;
    r->live = true;
    r->rank = (int64_t)id - 64 * o->priority;
    if (!w->exact) return;
    int at = w->n_waiting++;
    for (; at > 0 && w->waiting[at - 1]->rank >= r->rank; at--) w->waiting[at] = w->waiting[at - 1];
    w->waiting[at] = r;
}

/* Where the simulation is not exact, events determine when a token is chosen; the token itself is
 * still checked. */
static void follow_event(world *w, const llm_event *event) {
    sequence *s = &((request *)event->user)->samples[event->sample];
    const llm_request *r = &s->of->options;
    CHECK(!s->finish);
    if (event->token < 0) {
        SAME(s->of->limit, r->n_prompt);
        expect(w, s, -1, false, LLM_FINISH_LENGTH);
        return;
    }
    /* sampled proposals change the drawn token, but not the set of possible tokens */
    bool weighed = r->speculate && r->sampling.temperature > 0;
    int32_t ids[TOKEN_CHOICES], token = next_token(s);
    choices_after(s->hashes[s->known - 1], s->tokens[s->known - 1], ids);
    for (int i = 0; weighed && i < TOKEN_CHOICES; i++)
        if (ids[i] == event->token) token = event->token;
    choose(w, s, token, r->speculate && event->accepted);
}

/* Read all events; they must be exactly the expected ones. */
static void read_events(world *w) {
    llm_event event;
    int n = 0;
    for (; llm_next_event(w->engine, &event); n++) {
        if (!w->exact && n == w->n_outcomes) follow_event(w, &event);
        CHECK(n < w->n_outcomes);
        const outcome *o = &w->outcomes[n];
        const request *r = o->of->of;
        SAME(event.request, r->id);
        SAME(event.sample, o->of->sample);
        CHECK(event.user == r);
        SAME(event.token, o->token);
        SAME(event.index, o->index);
        SAME(event.finish, o->finish);
        SAME(event.accepted, o->accepted);
        o->of->n_reported += event.accepted;
        if (event.token >= 0) CHECK(event.logprob > -1.39f && event.logprob < -1.38f);
        bool letter = event.token >= TOKEN_LETTER && event.finish != LLM_FINISH_STOP;
        SAME(event.text_length, letter);
        if (letter) SAME(event.text[0], 'a' + event.token - TOKEN_LETTER);
        totals.tokens += event.token >= 0;
        totals.cancelled += event.finish == LLM_FINISH_CANCELLED;
    }
    SAME(n, w->n_outcomes);
    w->n_outcomes = 0;
}

static void check_counts(world *w) {
    llm_statistics s = llm_engine_statistics(w->engine);
    SAME(s.requests_finished, w->finished);
    SAME(s.generated_tokens, w->generated);
    SAME(s.blocks_total, w->n_blocks);
    CHECK(s.running <= w->options.max_sequences &&
          s.slots_used <= (s.blocks_total - s.blocks_free) * s.block_size);
    if (!w->exact) {
        w->steps = s.steps;
        return;
    }
    int shared = 0;
    for (int i = 0; i < w->n_blocks; i++) shared += w->held[i] > 1;
    SAME(s.steps, w->steps);
    SAME(s.waiting, w->n_waiting);
    SAME(s.running, w->n_admitted);
    SAME(s.blocks_free, free_blocks(w));
    SAME(s.blocks_shared, shared);
    SAME(s.preemptions, w->preemptions);
    SAME(s.blocks_swapped, w->swapped);
    SAME(s.prompt_tokens, w->prompt_tokens);
    SAME(s.sequence_steps, w->sequence_steps);
    SAME(s.decode_steps, w->decode_steps);
    SAME(s.proposed, w->proposed);
    SAME(s.accepted, w->accepted);
}

/* Check the trace events of a successful step. */
static void check_schedule(const world *w) {
    for (int i = 0; i < REQUESTS * SAMPLES; i++) {
        const sequence *s = &w->requests[i / SAMPLES].samples[i % SAMPLES];
        int accepted = s->accepted_event.request ? s->accepted_event.count : 0;
        if (s->proposed_event.request) SAME(s->proposed_event.first, s->known_before);
        CHECK(accepted <= (s->proposed_event.request ? s->proposed_event.count : 0));
        if (!w->exact) continue;
        SAME(s->scheduled_event.request != 0, s->scheduled > 0);
        if (s->scheduled) SAME(s->scheduled_event.first, s->first);
        if (s->scheduled) SAME(s->scheduled_event.count, s->scheduled);
        SAME(s->proposed_event.request ? s->proposed_event.count : 0, s->n_proposed);
        SAME(accepted, s->n_accepted);
    }
}

/* The trace counts as many accepted proposals as the events report. */
static void check_accepted(const world *w) {
    for (int i = 0; i < REQUESTS * SAMPLES; i++) {
        const sequence *s = &w->requests[i / SAMPLES].samples[i % SAMPLES];
        SAME(s->accepted_event.request ? s->accepted_event.count : 0, s->n_reported);
    }
}

static bool any_live(const world *w) {
    for (int i = 0; i < REQUESTS; i++)
        if (w->requests[i].live) return true;
    return false;
}

static void cancel(world *w) {
    llm_error err;
    request *r = &w->requests[pick(w, REQUESTS)];
    bool live = r->live;
    if (!r->id) return;
    CHECK(llm_cancel(w->engine, r->id, &err) == live);
    if (live) simulate_cancel(w, r);
}

/* Returns whether any request was live before the step. */
static bool step(world *w) {
    llm_error err;
    bool live = any_live(w), ok = true;
    for (int i = 0; i < REQUESTS * SAMPLES; i++) {
        sequence *s = &w->requests[i / SAMPLES].samples[i % SAMPLES];
        s->scheduled = s->n_proposed = s->n_accepted = s->n_reported = 0;
        s->seen_before = s->seen;
        s->known_before = s->known;
        s->scheduled_event.request = s->proposed_event.request = s->accepted_event.request = 0;
    }
    token_device_step(w->device);
    long allocations = test_allocations;
    int more = llm_step(w->engine, &err);
    SAME(test_allocations, allocations);
    CHECK(!w->stepping);
    SAME(w->step_end, more);
    if (more < 0 && (w->device->failed == CALL_NONE || err.status != LLM_ERROR_DEVICE))
        fail_msg("walk %llu, step %llu: %s", (ull)w->seed, (ull)w->steps, err.message);
    totals.steps++;
    if (w->device->failed != CALL_NONE) totals.failures[w->device->failed]++;
    if (live && w->exact) {
        ok = simulate_step(w);
        if (w->n_copied) SAME(w->device->n_calls[CALL_COPY], w->n_copied);
    }
    SAME(more < 0, w->device->failed != CALL_NONE);
    if (w->exact) SAME(more < 0, !ok);
    if (more >= 0) SAME(more, live);
    if (more > 0) check_schedule(w);
    return live;
}

static void walk(uint64_t seed, int n_calls) {
    world *w = (world *)calloc(1, sizeof *w);
    long live = test_live;
    assert_non_null(w);
    current = w;
    w->seed = seed;
    w->random.state = token_mix(seed);
    random_world(w);
    w->engine = engine_new(target, &w->options);
    w->slice = w->engine->network.max_logits; /* all rows, except with huge vocabularies */
    if (chance(w, 50)) {
        w->slice = least(w->slice, 1 + pick(w, 4));
        w->engine->network.max_logits = w->engine->speculator.draft.max_logits = w->slice;
    }
    int load = 5 + pick(w, 60), cancels = pick(w, 4), rate = chance(w, 40) ? 0 : 10 + pick(w, 200);
    bool drains = false, leaves = chance(w, 10); /* leaves: free the engine with live requests */
    for (int i = 0; i < n_calls || (any_live(w) && !leaves); i++) {
        drains = i >= n_calls;
        w->device->fail_one_in = drains ? 0 : rate && chance(w, 1) ? 1 : rate;
        if (i > n_calls + 5000) fail_msg("walk %llu: the requests do not end", (ull)seed);
        while (!drains && chance(w, load)) submit(w);
        if (chance(w, cancels)) cancel(w);
        check_trace(w);
        if (chance(w, 90)) read_events(w);
        else if (chance(w, 50)) cancel(w);
        read_events(w);
        check_counts(w);
        step(w);
        if (chance(w, cancels)) { /* a cancel does not remove the step's events */
            if (!w->exact) read_events(w);
            cancel(w);
        }
        while (!drains && chance(w, load / 4)) submit(w);
        read_events(w);
        check_counts(w);
        check_trace(w);
        check_accepted(w);
    }
    if (!any_live(w)) assert_idle(w->engine);
    llm_statistics s = llm_engine_statistics(w->engine);
    if (w->options.draft && !w->device->draft_differs)
        SAME(s.accepted, s.proposed); /* an identical draft model is always right */
    totals.walks++;
    totals.exact += w->exact;
    totals.preemptions += (long)s.preemptions;
    totals.swapped += (long)s.blocks_swapped;
    totals.accepted += (long)s.accepted;
    totals.hits += (long)s.prefix_hits;
    llm_engine_free(w->engine);
    token_device_free(w->device);
    SAME(test_live, live);
    free(w);
}

static void test_random_walks(void **state) {
    const int n = repeats(1000000, 200000);
    (void)state;
    for (uint64_t seed = 1; totals.steps < n; seed++) walk(seed, 1000);
    const struct totals *t = &totals;
    print_message(
        "%ld steps in %ld walks (%ld simulated exactly): %ld tokens, %ld samples cancelled, "
        "%ld requests refused, %ld preemptions, %ld blocks swapped, "
        "%ld copied, %ld prefix hits, %ld proposals accepted\n",
        t->steps, t->walks, t->exact, t->tokens, t->cancelled, t->refused, t->preemptions,
        t->swapped, t->copies, t->hits, t->accepted);
    print_message(
        "failures: %ld copies, %ld saves, %ld restores, %ld passes, %ld logits, %ld at the end\n",
        t->failures[CALL_COPY], t->failures[CALL_SAVE], t->failures[CALL_RESTORE],
        t->failures[CALL_RUN], t->failures[CALL_LOGITS], t->failures[CALL_SYNC]);
    for (int i = 0; i < CALL_NONE; i++) assert_true(t->failures[i] > n / 20000);
    assert_true(t->cancelled > n / 1000 && t->preemptions > n / 1000 && t->swapped > n / 1000 &&
                t->copies > n / 1000 && t->hits > n / 1000 && t->accepted > n / 1000);
}

static int load_models(void **state) {
    static tiny_model models[2];
    tiny t = tiny_defaults();
    (void)state;
    t.vocab = TOKEN_VOCAB;
    for (int i = 0; i < 2; i++) models[i] = tiny_model_new(t);
    target = models[0].model;
    draft = models[1].model;
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_walks)};
    return cmocka_run_group_tests_name("states", tests, load_models, NULL);
}
