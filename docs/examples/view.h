/* view.h - a picture of the engine from its trace: blocks, sequences and steps
 *
 * Give each event of llm_engine_options.trace to view_event. The picture is then up to date, and
 * put_view writes it as JSON: whole, or only what has changed since view_sent. */
#ifndef VIEW_H
#define VIEW_H
#include "buffer.h"
#include "llm.h"

typedef struct track { /* a sequence that has not ended */
    uint64_t request;
    int sample;
    int number;              /* in order of arrival, from 1 */
    llm_state state;
    int n_prompt, most;      /* tokens of the prompt; of the prompt and the longest answer */
    int position;            /* tokens in the cache after this step */
    int n_generated, n_cached; /* tokens generated; found in the prefix cache */
    int32_t *blocks;         /* (n_blocks) */
    int n_blocks, capacity;
} track;

typedef struct block { /* of the cache */
    int owner;               /* number of a sequence that holds the block; 0: none */
    int count;               /* block tables that contain it */
    bool kept;               /* it is free, and the prefix cache can find its content */
    bool changed;            /* since the last state was sent */
} block;

typedef struct step {
    uint64_t number;
    int prefill, decode, proposed, accepted, sequences;
    double seconds;
} step;

enum { MOST_BLOCKS = 16384, MOST_STEPS = 200, MOST_TRACKS = 256 }; /* shown */

typedef struct view { /* the engine's state, from its trace */
    block *blocks;           /* (n_blocks) at most MOST_BLOCKS are shown */
    int n_blocks;
    track *tracks;           /* (n_tracks) in order of arrival */
    int n_tracks, capacity, found, last_number; /* found: index of the last one looked up */
    step steps[MOST_STEPS];  /* a ring */
    uint64_t n_steps, n_sent; /* steps so far; those that have been sent */
    step now;                /* the step that runs */
    double began;            /* when it began */
    bool changed;            /* since the last state was sent */
} view;

/* Find the track of a sequence. NULL: none. */
static track *find_track(view *v, uint64_t request, int sample) {
    for (int i = 0; i < v->n_tracks; i++) { /* events mostly follow the order of the tracks */
        int at = (v->found + i) % v->n_tracks;
        track *t = &v->tracks[at];
        if (t->request == request && t->sample == sample) return v->found = at, t;
    }
    return NULL;
}

static void add_track(view *v, uint64_t request, int sample) {
    if (v->n_tracks == v->capacity) {
        int capacity = 2 * v->capacity + 16;
        track *tracks = (track *)realloc(v->tracks, (size_t)capacity * sizeof *tracks);
        if (!tracks) return; /* the sequence is not shown */
        v->tracks = tracks;
        v->capacity = capacity;
    }
    v->tracks[v->n_tracks++] =
        (track){.request = request, .sample = sample, .number = ++v->last_number};
}

static void remove_track(view *v, track *t) {
    int at = (int)(t - v->tracks);
    free(t->blocks);
    memmove(t, t + 1, (size_t)(--v->n_tracks - at) * sizeof *t);
    v->found = 0;
}

/* Note the size of a request that has been submitted. */
static void view_request(view *v, uint64_t request, int n_prompt, int most) {
    for (int i = 0; i < v->n_tracks; i++)
        if (v->tracks[i].request == request) {
            v->tracks[i].n_prompt = n_prompt;
            v->tracks[i].most = most;
        }
}

static void set_entry(track *t, int place, int32_t id) {
    if (place >= t->capacity) {
        int capacity = 2 * place + 16;
        int32_t *blocks = (int32_t *)realloc(t->blocks, (size_t)capacity * sizeof *blocks);
        if (!blocks) return;
        memset(blocks + t->capacity, 0xff, (size_t)(capacity - t->capacity) * sizeof *blocks);
        t->blocks = blocks;
        t->capacity = capacity;
    }
    t->blocks[place] = id;
    if (place >= t->n_blocks) t->n_blocks = place + 1;
}

/* Find another sequence that holds the block; shared blocks have the same place in all block
 * tables. */
static int heir(const view *v, int place, int32_t id) {
    for (int i = 0; i < v->n_tracks; i++)
        if (place < v->tracks[i].n_blocks && v->tracks[i].blocks[place] == id)
            return v->tracks[i].number;
    return 0;
}

static block *find_block(view *v, int32_t id) {
    if (id < 0 || id >= v->n_blocks) return NULL;
    v->blocks[id].changed = true;
    return &v->blocks[id];
}

static void view_block(view *v, const llm_trace_event *e) {
    track *t = e->request ? find_track(v, e->request, e->sample) : NULL;
    block *b = find_block(v, e->block), *source = find_block(v, e->source);
    if (t && e->kind == LLM_TRACE_RELEASE) t->n_blocks = e->first;
    else if (t) set_entry(t, e->first, e->block);
    if (e->kind == LLM_TRACE_COPY && source) {
        source->count--;
        source->owner = heir(v, e->first, e->source);
    }
    if (!b) return;
    b->count = e->count;
    b->kept = e->kept && e->count == 0;
    if (e->kind == LLM_TRACE_EVICT || e->count == 0) b->owner = 0;
    else if (e->kind == LLM_TRACE_RELEASE) b->owner = heir(v, e->first, e->block);
    else if (t && (e->kind != LLM_TRACE_SHARE || e->count == 1)) b->owner = t->number;
}

static void view_step(view *v, const llm_trace_event *e) {
    if (e->kind == LLM_TRACE_STEP_BEGIN) {
        v->now = (step){.number = e->step};
        v->began = llm_seconds();
        return;
    }
    if (e->count <= 0) return;
    v->now.seconds = llm_seconds() - v->began;
    v->now.number = e->step;
    v->steps[v->n_steps++ % MOST_STEPS] = v->now;
}

/* Follow a decision of the engine. */
static void view_event(view *v, const llm_trace_event *e) {
    v->changed = v->changed || e->kind != LLM_TRACE_STEP_BEGIN;
    if (e->kind <= LLM_TRACE_STEP_END) {
        view_step(v, e);
        return;
    }
    if (e->kind >= LLM_TRACE_TAKE) {
        view_block(v, e);
        return;
    }
    if (e->kind == LLM_TRACE_STATE && e->from == e->state) add_track(v, e->request, e->sample);
    track *t = find_track(v, e->request, e->sample);
    if (e->kind == LLM_TRACE_PROPOSE) v->now.proposed += e->count;
    if (e->kind == LLM_TRACE_ACCEPT) v->now.accepted += e->count;
    if (!t) return;
    if (e->kind == LLM_TRACE_STATE) {
        bool comes = e->from == LLM_WAITING || e->from == LLM_PREEMPTED;
        if (e->state == LLM_ENDED) {
            remove_track(v, t);
            return;
        }
        t->state = e->state;
        if (comes && e->from != e->state) t->position = t->n_cached = e->count;
        if (e->state == LLM_PREEMPTED) t->position = 0;
    } else if (e->kind == LLM_TRACE_SCHEDULE) {
        if (t->state == LLM_PREFILL) v->now.prefill += e->count;
        else v->now.decode += e->count;
        v->now.sequences++;
        t->position = e->first + e->count;
    } else {
        t->position += e->kind == LLM_TRACE_ACCEPT ? e->count : 0;
    }
    int generated = t->position - t->n_prompt + 1;
    if (t->state == LLM_DECODE && generated > t->n_generated) t->n_generated = generated;
}

static void view_free(view *v) {
    for (int i = 0; i < v->n_tracks; i++) free(v->tracks[i].blocks);
    free(v->tracks);
    free(v->blocks);
}

/* Begin again for an engine with this many blocks; the numbering of sequences continues. */
static void view_reset(view *v, int64_t n_blocks) {
    int n = (int)(n_blocks < MOST_BLOCKS ? n_blocks : MOST_BLOCKS);
    view_free(v);
    *v = (view){.last_number = v->last_number, .n_blocks = n, .changed = true};
    v->blocks = (block *)calloc((size_t)n + 1, sizeof *v->blocks);
    if (!v->blocks) v->n_blocks = 0; /* none is shown */
}

/* Add the members "blocks", "sequences" and "steps" of a JSON object: the whole state, or the
 * changes since view_sent. A block is four numbers; a sequence and a step are an array each. */
static void put_view(buffer *b, const view *v, bool whole) {
    add_text(b, "\"blocks\": [");
    const char *comma = "";
    for (int i = 0; i < v->n_blocks; i++) {
        const block *x = &v->blocks[i];
        if (whole ? !x->count && !x->kept : !x->changed) continue;
        add(b, "%s%d,%d,%d,%d", comma, i, x->owner, x->count, x->kept);
        comma = ",";
    }
    add_text(b, "], \"sequences\": [");
    for (int i = 0; i < v->n_tracks && i < MOST_TRACKS; i++) {
        const track *x = &v->tracks[i];
        add(b, "%s[%d,%llu,%d,%d,%d,%d,%d,%d,%d,%d]", i ? "," : "", x->number,
            (unsigned long long)x->request, x->sample, (int)x->state, x->n_prompt, x->position,
            x->n_generated, x->most, x->n_blocks, x->n_cached);
    }
    add_text(b, "], \"steps\": [");
    uint64_t first = whole ? 0 : v->n_sent;
    if (v->n_steps > MOST_STEPS && first < v->n_steps - MOST_STEPS) first = v->n_steps - MOST_STEPS;
    for (uint64_t i = first; i < v->n_steps; i++) {
        const step *x = &v->steps[i % MOST_STEPS];
        add(b, "%s[%llu,%d,%d,%d,%d,%d,%.3f]", i > first ? "," : "", (unsigned long long)x->number,
            x->prefill, x->decode, x->proposed, x->accepted, x->sequences, 1e3 * x->seconds);
    }
    add_text(b, "]");
}

/* Note that the changes were sent. */
static void view_sent(view *v) {
    for (int i = 0; i < v->n_blocks; i++) v->blocks[i].changed = false;
    v->n_sent = v->n_steps;
    v->changed = false;
}

#endif
