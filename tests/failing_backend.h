/* failing_backend.h - a wrapper around a backend in which one chosen call fails and does nothing.
 * Include after the implementation of llm.h. */
#ifndef FAILING_BACKEND_H
#define FAILING_BACKEND_H

static llm_backend *real;          /* the wrapped backend */
static long calls, fail_call = -1; /* calls so far that can fail; index of the call to fail */

static bool device_fails(llm_error *err) {
    if (calls++ != fail_call) return false;
    llm__fail(err, LLM_ERROR_DEVICE, "the device was unplugged");
    return true;
}

static void *failing_allocate(void *context, size_t bytes, const char *what, llm_error *err) {
    return device_fails(err) ? NULL : real->allocate(context, bytes, what, err);
}
static bool failing_upload(void *context, void *device, const void *host, size_t bytes,
                           llm_error *err) {
    return !device_fails(err) && real->upload(context, device, host, bytes, err);
}
static bool failing_download(void *context, void *host, const void *device, size_t bytes,
                             llm_error *err) {
    return !device_fails(err) && real->download(context, host, device, bytes, err);
}
static bool failing_load_weight(void *context, llm_weight *w, const void *host, llm_error *err) {
    return !device_fails(err) && real->load_weight(context, w, host, err);
}
static bool failing_prepare(void *context, llm_program *program, const llm_limits *limits,
                            llm_error *err) {
    return !device_fails(err) && real->prepare(context, program, limits, err);
}
static bool failing_run(void *context, const llm_program *program, llm_part part,
                        const llm_batch *batch, int first, int n, llm_error *err) {
    return !device_fails(err) && real->run(context, program, part, batch, first, n, err);
}
static bool failing_sync(void *context, llm_error *err) {
    return !device_fails(err) && real->sync(context, err);
}
static bool failing_sample(void *context, float *logits, int vocab_size, const llm_draw *draws,
                           int n, int32_t *ids, float *logprobs, llm_error *err) {
    return !device_fails(err) &&
           real->sample(context, logits, vocab_size, draws, n, ids, logprobs, err);
}

/* The function returns nothing: the next call reports its failure. */
static void failing_copy(void *context, const llm_cache *cache, const int32_t *from,
                         const int32_t *to, int n) {
    if (calls != fail_call) real->copy_blocks(context, cache, from, to, n);
}

static void failing_move(void *context, const llm_cache *cache, const int32_t *from,
                         const int32_t *to, int n) {
    if (calls != fail_call) real->copy_slots(context, cache, from, to, n);
}

static llm_backend failing_backend(void) {
    llm_backend b = *real;
    b.allocate = failing_allocate;
    b.upload = failing_upload;
    b.download = failing_download;
    b.load_weight = failing_load_weight;
    b.prepare = failing_prepare;
    b.run = failing_run;
    b.sync = failing_sync;
    b.copy_blocks = failing_copy;
    b.copy_slots = failing_move;
    if (b.sample) b.sample = failing_sample;
    return b;
}

#endif
