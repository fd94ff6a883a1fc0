/* bench.h - measurements shared by llm bench and the lessons */
#ifndef BENCH_H
#define BENCH_H
#include "../docs/cli.h"

/* Run one request of random tokens. *prefill: seconds until its first token; *decode: seconds from
 * its first token to its last. p: collects the profile (NULL: none). */
typedef struct profile profile;
bool bench_once(llm_engine *engine, int n_prompt, int n_generate, profile *p, double *prefill,
                double *decode);

/* Run n requests at once, with tokens from this stream of random numbers. *seconds: time until all
 * have ended; *rate: tokens per second once all have begun. */
bool bench_group(llm_engine *engine, int n, int n_prompt, int n_generate, uint64_t stream,
                 double *seconds, double *rate);

/* The index-th random number of a stream, within the range. */
int draw_range(int_range r, uint64_t seed, uint64_t stream, uint64_t index);
#endif
