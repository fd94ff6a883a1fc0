/* trace.h - writes the decisions of an engine as Chrome trace events: a JSON file that opens in
 * Perfetto (ui.perfetto.dev) and in chrome://tracing. Copy it into a program that includes llm.h:
 *
 *     trace_writer trace;
 *     int error = trace_open(&trace, "trace.json");   0, or an errno
 *     options.trace = trace_write;
 *     options.trace_user = &trace;
 *     engine = llm_engine_create(model, &options, &err);
 *     trace.blocks_total = llm_engine_statistics(engine).blocks_total;
 *     ...
 *     llm_engine_free(engine);
 *     error = trace_close(&trace);                    0, or the errno of the first failure
 *
 * Each sequence has a track, with a slice for each step it took part in: "prefill 128" (tokens),
 * "decode", or "verify 1+4" (a token and 4 proposals). Instant events mark when it was admitted,
 * preempted and resumed, and when it ended. The first track shows the steps; counters show the
 * blocks in use and the tokens per step. */
#ifndef TRACE_H
#define TRACE_H
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct trace_track { /* a sequence that was admitted and has not ended */
    uint64_t request;
    int sample, tid;
    llm_state state, step_state; /* state now; state when it was scheduled for this step */
    int first, count;            /* position and number of its tokens in this step */
    int proposed, accepted;      /* in this step */
    int n_generated;             /* number of generated tokens once it has ended; -1: not ended */
} trace_track;

typedef struct trace_writer {
    FILE *file;
    int error;             /* errno of the first failure; nothing is written after it */
    double start, begin;   /* times when the trace and the step began, by llm_seconds */
    uint64_t step;         /* number of the step */
    bool in_step;
    uint64_t n_events;
    trace_track *tracks;   /* (n_tracks) */
    int n_tracks, found, last_tid; /* found: index of the last track found */
    int *references;       /* (n_blocks) number of block tables that list each block */
    int64_t n_blocks, blocks_used;
    int64_t blocks_total;  /* size of the pool, set by the caller; 0: unknown */
} trace_writer;

/* Write one event: the common fields, then those in `format`, in which a ' is written as ". */
static void trace_put(trace_writer *t, double when, int tid, const char *format, ...) {
    char rest[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(rest, sizeof rest, format, arguments);
    va_end(arguments);
    for (char *c = rest; *c; c++)
        if (*c == '\'') *c = '"';
    if (t->error) return;
    long long ns = (long long)(1e9 * (when - t->start)); /* integers: %f would follow the locale */
    int written = fprintf(t->file, "%s{\"pid\": 1, \"tid\": %d, \"ts\": %lld.%03d, %s}",
                          t->n_events++ ? ",\n" : "[\n", tid, ns / 1000, (int)(ns % 1000), rest);
    if (written < 0) t->error = errno;
}

static int trace_open(trace_writer *t, const char *path) {
    *t = (trace_writer){.file = fopen(path, "w"), .start = llm_seconds()};
    if (!t->file) return errno;
    trace_put(t, t->start, 0, "'ph': 'M', 'name': 'thread_name', 'args': {'name': 'steps'}");
    return 0;
}

static int trace_close(trace_writer *t) {
    if (!t->file) return 0;
    if (!t->error && fputs("\n]\n", t->file) < 0) t->error = errno;
    if (fclose(t->file) != 0 && !t->error) t->error = errno;
    free(t->tracks);
    free(t->references);
    t->file = NULL;
    return t->error;
}

/* Find or create the track of a sequence. NULL: out of memory. */
static trace_track *trace_find(trace_writer *t, const llm_trace_event *e) {
    for (int i = 0; i < t->n_tracks; i++) {
        int at = (t->found + i) % t->n_tracks; /* events mostly follow the order of the tracks */
        trace_track *track = &t->tracks[at];
        if (track->request == e->request && track->sample == e->sample) return t->found = at, track;
    }
    trace_track *tracks = realloc(t->tracks, (size_t)(t->n_tracks + 1) * sizeof *tracks);
    if (!tracks) return t->error = ENOMEM, NULL;
    t->tracks = tracks;
    tracks += t->n_tracks++;
    *tracks = (trace_track){
        .request = e->request, .sample = e->sample, .tid = ++t->last_tid, .n_generated = -1};
    trace_put(t, t->start, tracks->tid,
              "'ph': 'M', 'name': 'thread_name', 'args': {'name': 'request %llu, sample %d'}",
              (unsigned long long)e->request, e->sample + 1);
    return tracks;
}

/* Set the number of block tables that list the block to `count`, or add `count` if `more`. */
static void trace_refer(trace_writer *t, int32_t block, int count, bool more) {
    if (block < 0) return;
    if (block >= t->n_blocks) {
        int64_t n = 2 * ((int64_t)block + 1);
        int *references = realloc(t->references, (size_t)n * sizeof *references);
        if (!references) {
            t->error = ENOMEM;
            return;
        }
        memset(references + t->n_blocks, 0, (size_t)(n - t->n_blocks) * sizeof *references);
        t->references = references;
        t->n_blocks = n;
    }
    int before = t->references[block], now = more ? before + count : count;
    t->references[block] = now;
    t->blocks_used += (now > 0) - (before > 0);
}

static void trace_state(trace_writer *t, trace_track *track, const llm_trace_event *e,
                        double when) {
    const char *what = NULL, *count = "cached tokens";
    if (e->from == LLM_WAITING) what = "admitted";
    if (e->from == LLM_PREEMPTED) what = "resumed";
    if (e->state == LLM_PREEMPTED) what = "preempted", count = "saved blocks";
    track->state = e->state;
    if (e->state == LLM_ENDED) track->n_generated = e->count; /* written after the step's slice */
    else if (what)
        trace_put(t, when, track->tid,
                  "'ph': 'i', 's': 't', 'name': '%s', 'args': {'%s': %d}", what, count, e->count);
}

/* Write the slice of a step and, if the sequence ended, its end. Returns whether it continues. */
static bool trace_slice(trace_writer *t, trace_track *track, double end) {
    char name[48] = "decode";
    if (track->step_state == LLM_PREFILL) snprintf(name, sizeof name, "prefill %d", track->count);
    else if (track->proposed)
        snprintf(name, sizeof name, "verify %d+%d", track->count, track->proposed);
    if (track->count > 0)
        trace_put(t, t->begin, track->tid,
                  "'ph': 'X', 'dur': %lld, 'name': '%s', "
                  "'args': {'step': %llu, 'position': %d, 'tokens': %d, 'accepted': %d}",
                  (long long)(1e6 * (end - t->begin)), name, (unsigned long long)t->step,
                  track->first, track->count, track->accepted);
    track->count = track->proposed = track->accepted = 0;
    if (track->n_generated < 0) return true;
    trace_put(t, end, track->tid, "'ph': 'i', 's': 't', 'name': 'ended', 'args': {'tokens': %d}",
              track->n_generated);
    return false;
}

/* Write the slices of the step that ends, if any, and remove the tracks that have ended. */
static void trace_slices(trace_writer *t, const llm_trace_event *e, double end) {
    const char *name = e->count < 0 ? "failed" : "step";
    int tokens = 0, sequences = 0, n = 0;
    for (int i = 0; i < t->n_tracks; i++) {
        tokens += t->tracks[i].count + t->tracks[i].proposed;
        sequences += t->tracks[i].count > 0;
        if (trace_slice(t, &t->tracks[i], end)) t->tracks[n++] = t->tracks[i];
    }
    t->n_tracks = n;
    if (e->kind != LLM_TRACE_STEP_END || e->count == 0) return;
    trace_put(t, t->begin, 0,
              "'ph': 'X', 'dur': %lld, 'name': '%s', 'args': {'sequences': %d, 'tokens': %d}",
              (long long)(1e6 * (end - t->begin)), name, sequences, tokens);
    trace_put(t, t->begin, 0, "'ph': 'C', 'name': 'step', 'args': {'tokens': %d}", tokens);
    int64_t unused = t->blocks_total - t->blocks_used;
    trace_put(t, end, 0, "'ph': 'C', 'name': 'blocks', 'args': {'in use': %lld, 'free': %lld}",
              (long long)t->blocks_used, (long long)(unused > 0 ? unused : 0));
}

/* The llm_trace function to set as llm_engine_options.trace. */
static void trace_write(void *user, const llm_trace_event *e) {
    trace_writer *t = user;
    if (!t->file || t->error) return;
    double when = t->in_step && e->kind != LLM_TRACE_STEP_END ? t->begin : llm_seconds();
    bool submitted = e->kind == LLM_TRACE_STATE && e->from == e->state;
    bool tracked = e->kind >= LLM_TRACE_STATE && e->kind <= LLM_TRACE_ACCEPT && !submitted;
    trace_track *track = tracked ? trace_find(t, e) : NULL;
    switch (e->kind) {
    case LLM_TRACE_STEP_BEGIN: t->begin = when, t->step = e->step, t->in_step = true; break;
    case LLM_TRACE_STEP_END: t->in_step = false, trace_slices(t, e, when); break;
    case LLM_TRACE_STATE:
        if (track) trace_state(t, track, e, when);
        if (e->state == LLM_ENDED && !t->in_step) trace_slices(t, e, when); /* it was cancelled */
        break;
    case LLM_TRACE_SCHEDULE:
        if (!track) break;
        track->first = e->first, track->count = e->count, track->step_state = track->state;
        break;
    case LLM_TRACE_PROPOSE: if (track) track->proposed = e->count; break;
    case LLM_TRACE_ACCEPT: if (track) track->accepted = e->count; break;
    case LLM_TRACE_TAKE: trace_refer(t, e->block, 1, false); break;
    case LLM_TRACE_SHARE: trace_refer(t, e->block, 1, true); break;
    case LLM_TRACE_COPY:
        trace_refer(t, e->block, 1, false);
        trace_refer(t, e->source, -1, true);
        break;
    case LLM_TRACE_RELEASE: trace_refer(t, e->block, e->count, false); break;
    case LLM_TRACE_EVICT: break;
    }
}
#endif
