/* The engine's invariants after every step. Tests define LLM_DEBUG and include this file after
 * llm.h's implementation. llm_step then checks the invariants and fails if one is broken. */
static const char *llm__check_sequence(const llm__scheduler *s, const llm__sequence *seq) {
    const llm__request *r = seq->request;
    bool runs = seq->state == LLM_PREFILL || seq->state == LLM_DECODE, saves = seq->n_saved > 0;
    int64_t blocks = llm__blocks_for(&s->pool, seq->n_cached);
    if (seq->n_scheduled || seq->depth || seq->n_proposed || seq->n_chosen || seq->n_rows ||
        seq->closed)
        return "a sequence belongs to no step between steps";
    if (seq->n_cached < 0 || seq->n_cached >= seq->n_tokens || seq->n_tokens > r->limit)
        return "0 <= n_cached < n_tokens <= limit";
    if (seq->n_drafted > seq->n_cached) return "n_drafted <= n_cached";
    if (r->params.logits_hook && (seq->n_seen < seq->n_cached || seq->n_seen > seq->n_tokens))
        return "n_cached <= n_seen <= n_tokens";
    if (runs ? seq->table.n_blocks < blocks : seq->table.n_blocks != 0)
        return "a running sequence has blocks for n_cached tokens, a preempted one has none";
    if (saves ? seq->state != LLM_PREEMPTED || seq->n_saved != blocks : !runs && seq->n_cached)
        return "only a preempted sequence has saved blocks, as many as n_cached needs";
    bool decodes = r->forked && seq->n_cached == seq->n_tokens - 1;
    if (runs && (seq->state == LLM_DECODE) != decodes)
        return "exactly a sequence in DECODE lacks just one cached token";
    return seq->finish ? "only an ended sequence has a finish reason" : NULL;
}

/* A block's reference count is the number of block tables that list it. */
static const char *llm__check_blocks(llm__scheduler *s) {
    llm__pool *pool = &s->pool;
    int64_t n_free = 0, n_used = 0, n_saved = 0;
    for (int sign = -1; sign <= 1; sign += 2) { /* count down to 0, then restore */
        for (int i = 0; i < s->n_sequences; i++)
            for (int k = 0; k < s->sequences[i]->table.n_blocks; k++)
                pool->references[s->sequences[i]->table.blocks[k]] += sign;
        for (int64_t i = 0; i < pool->n_blocks; i++) {
            n_used += sign < 0 && pool->references[i] != 0;
            n_free += sign > 0 && pool->references[i] == 0;
        }
    }
    for (int i = 0; i < s->n_sequences; i++) n_saved += s->sequences[i]->n_saved;
    n_saved += s->n_swap_free;
    if (n_used) return "a block's reference count is the number of tables that list it";
    if (n_free != pool->n_free) return "the free blocks are those without references";
    return n_saved != s->n_swap ? "each place in host memory is free or holds one block" : NULL;
}

static bool llm__check_invariants(llm_engine *e, llm_error *err) {
    llm__scheduler *s = &e->scheduler;
    int n_preempted = 0, n_places = 0;
    const char *broken = llm__check_blocks(s);
    for (int i = 0; i < s->n_sequences && !broken; i++) {
        const llm__sequence *seq = s->sequences[i];
        broken = llm__check_sequence(s, seq);
        if (seq->index != i || seq->state == LLM_WAITING || seq->state == LLM_ENDED)
            broken = "a listed sequence is running or preempted, and knows its index";
        n_preempted += seq->state == LLM_PREEMPTED;
    }
    for (const llm__request *r = s->running.first; r; r = r->next) n_places += r->n_live;
    if (n_preempted != s->n_preempted || n_places != s->n_places ||
        n_places > s->options->max_sequences)
        broken = broken ? broken : "n_preempted and n_places count the listed sequences";
    return !broken || llm__fail(err, LLM_ERROR_ARGUMENT, "an invariant is broken: %s", broken);
}
