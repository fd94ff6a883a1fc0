/* groups.c - implements groups.h. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "groups.h"

#include <poll.h>

const char *const policy_names[N_POLICIES] = {"continuous", "static", "dynamic"};

/* ---- Entering -------------------------------------------------------------------------- */

/* Cache slots, in whole blocks, for a request that generates n_tokens. */
static int64_t member_slots(const batcher *b, const member *m, int n_tokens) {
    int size = llm_engine_settings(b->engine)->block_size;
    return ((int64_t)m->request.n_prompt + n_tokens + size - 1) / size * size;
}

/* Cache slots that the first n members need if each of them generates n_tokens. */
static int64_t group_slots(const batcher *b, int n, int n_tokens) {
    int64_t slots = 0;
    for (const member *m = b->first; n-- > 0; m = m->next) slots += member_slots(b, m, n_tokens);
    return slots;
}

/* Choose the next group, in order of arrival. Returns whether the group is full: the engine has no
 * sequence or no memory for another request. */
static bool choose_group(batcher *b) {
    llm_statistics s = llm_engine_statistics(b->engine);
    int most = llm_engine_settings(b->engine)->max_sequences;
    b->n_group = b->longest = 0;
    for (const member *m = b->first; m && b->n_group < most; m = m->next) {
        int longest = m->request.max_tokens > b->longest ? m->request.max_tokens : b->longest;
        bool fits = group_slots(b, b->n_group + 1, longest) <= s.blocks_total * s.block_size;
        if (!fits && b->n_group > 0) return true;
        b->n_group++;
        b->longest = longest;
    }
    return b->n_group == most;
}

static bool enter(batcher *b, member *m, int max_tokens, llm_error *err) {
    llm_request request = m->request;
    request.max_tokens = max_tokens;
    request.user = m;
    m->running = llm_submit(b->engine, &request, &m->id, err);
    b->n_running += m->running;
    b->n_live += m->running;
    return m->running;
}

/* Submit the next group, if it is due. A dynamic group that is not full waits for the window. */
static bool enter_group(batcher *b, llm_error *err) {
    bool full = choose_group(b), good = true;
    if (b->policy == DYNAMIC && !full && llm_seconds() - b->first->arrived < b->window)
        b->n_group = 0;
    member *m = b->first;
    for (int i = 0; i < b->n_group && good; i++, m = m->next) good = enter(b, m, b->longest, err);
    return good;
}

bool batcher_submit(batcher *b, member *m, llm_error *err) {
    m->arrived = llm_seconds();
    if (m->wanted == 0) m->wanted = m->request.max_tokens;
    if (b->policy == CONTINUOUS) return enter(b, m, m->request.max_tokens, err);
    if (b->first) b->last->next = m;
    else b->first = m;
    b->last = m;
    return true;
}

/* ---- Running --------------------------------------------------------------------------- */

int batcher_step(batcher *b, llm_error *err) {
    b->n_steps++;
    if (b->n_running == 0 && b->first && !enter_group(b, err)) return -1;
    int status = llm_step(b->engine, err);
    if (status != 0 || !b->first) return status;
    poll(NULL, 0, 1);
    return 1;
}

/* End a request that has all tokens it wants. With continuous batching, it leaves the engine at
 * once; otherwise the whole group leaves together with its last member. */
static void end_member(batcher *b, member *m) {
    llm_error unused;
    m->ended_step = b->n_steps;
    b->n_live--;
    if (b->policy == CONTINUOUS && m->running) llm_cancel(b->engine, m->id, &unused);
    if (b->policy == CONTINUOUS || b->n_live > 0) return;
    m = b->first;
    for (int i = 0; i < b->n_group; i++, m = m->next)
        if (m->running) llm_cancel(b->engine, m->id, &unused);
}

bool batcher_next_event(batcher *b, llm_event *event) {
    while (llm_next_event(b->engine, event)) {
        member *m = event->user;
        bool ended = m->ended_step > 0, discarded = ended && event->token >= 0;
        b->padding_tokens += discarded;
        b->padding_steps += discarded && !event->accepted && m->ended_step < b->n_steps;
        m->n_tokens += event->token >= 0 && !ended;
        event->user = m->request.user;
        if (event->finish) m->running = false, b->n_running--;
        if (!ended && (event->finish || m->n_tokens == m->wanted)) {
            end_member(b, m);
            if (!event->finish) event->finish = LLM_FINISH_LENGTH;
        }
        if (b->n_running == 0) /* the whole group has left */
            for (; b->n_group > 0; b->n_group--) b->first = b->first->next;
        if (!ended) return true;
    }
    return false;
}

double batcher_waste(const batcher *b) {
    if (b->policy == CONTINUOUS) return llm_engine_statistics(b->engine).kv_waste;
    int64_t slots = group_slots(b, b->n_group, b->longest), used = 0;
    const member *m = b->first;
    for (int i = 0; i < b->n_group; i++, m = m->next)
        if (m->ended_step == 0 && m->n_tokens > 0) used += m->request.n_prompt + m->n_tokens - 1;
    return slots > 0 ? 1 - (double)used / (double)slots : 0;
}
