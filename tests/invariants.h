/* What is true of the engine after every step. The tests define LLM_DEBUG, and include this after
 * llm.h's implementation: llm_step then checks it, and fails if something is broken. */
static const char *llm__check_sequence(const llm__scheduler *s, const llm__sequence *seq) {
    const llm__request *r = seq->request;
    bool runs = seq->state == LLM_PREFILL || seq->state == LLM_DECODE, saves = seq->n_saved > 0;
    int64_t blocks = llm__blocks_for(&s->pool, seq->n_cached);
    if (seq->n_scheduled || seq->depth || seq->n_proposed || seq->n_chosen || seq->n_rows ||
        seq->closed)
        return "a sequence is still in a step";
    if (seq->n_cached < 0 || seq->n_cached >= seq->n_tokens || seq->n_tokens > r->limit)
        return "0 <= n_cached < n_tokens <= limit";
    if (seq->n_drafted > seq->n_cached) return "n_drafted <= n_cached";
    if (r->params.logits_hook && (seq->n_seen < seq->n_cached || seq->n_seen > seq->n_tokens))
        return "n_cached <= n_seen <= n_tokens";
    if (runs ? seq->table.n_blocks < blocks : seq->table.n_blocks != 0)
        return "blocks for n_cached tokens";
    if (saves ? seq->state != LLM_PREEMPTED || seq->n_saved != blocks : !runs && seq->n_cached)
        return "only a preempted sequence saves blocks, for n_cached tokens";
    bool decodes = r->forked && seq->n_cached == seq->n_tokens - 1;
    if (runs && (seq->state == LLM_DECODE) != decodes)
        return "a sequence in DECODE misses one token";
    return seq->finish ? "only an ended sequence has a finish" : NULL;
}

/* Every reference to a block is an entry of a table. */
static const char *llm__check_blocks(llm__scheduler *s) {
    llm__pool *pool = &s->pool;
    int64_t n_free = 0, n_used = 0, n_saved = 0;
    for (int sign = -1; sign <= 1; sign += 2) { /* count the entries down to 0, and up again */
        for (int i = 0; i < s->n_sequences; i++)
            for (int k = 0; k < s->sequences[i]->table.n_blocks; k++)
                pool->references[s->sequences[i]->table.blocks[k]] += sign;
        for (int64_t i = 0; i < pool->n_blocks; i++) {
            n_used += sign < 0 && pool->references[i] != 0;
            n_free += sign > 0 && pool->references[i] == 0;
        }
    }
    for (int i = 0; i < s->n_sequences; i++) n_saved += s->sequences[i]->n_saved;
    for (int32_t place = s->swap_free; s->n_swap && place >= 0; place = s->swap_next[place])
        n_saved++;
    if (n_used) return "a block's references are the tables that name it";
    if (n_free != pool->n_free) return "a block without references is free";
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
            broken = "sequences that run";
        n_preempted += seq->state == LLM_PREEMPTED;
    }
    for (const llm__request *r = s->running.first; r; r = r->next) n_places += r->n_live;
    if (n_preempted != s->n_preempted || n_places != s->n_places ||
        n_places > s->options->max_sequences)
        broken = broken ? broken : "n_preempted and n_places count the running sequences";
    return !broken || llm__fail(err, LLM_ERROR_ARGUMENT, "an invariant is broken: %s", broken);
}
