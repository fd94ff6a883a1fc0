/* bench.h - what the lessons measure with, too */
#ifndef BENCH_H
#define BENCH_H
#include "../docs/cli.h"

/* Run one request of random tokens. *prefill: seconds to its first token; *decode: from there to
 * its last. p: collects the profile (NULL: none). */
typedef struct profile profile;
bool bench_once(llm_engine *engine, int n_prompt, int n_generate, profile *p, double *prefill,
                double *decode);

/* Run n requests at once, whose tokens come from this stream of random numbers alone. *seconds:
 * until all have ended; *rate: tokens per second once all have begun. */
bool bench_group(llm_engine *engine, int n, int n_prompt, int n_generate, uint64_t stream,
                 double *seconds, double *rate);

/* The index-th random number of a stream, in the range. */
int draw_range(int_range r, uint64_t seed, uint64_t stream, uint64_t index);
#endif
