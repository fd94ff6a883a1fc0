/* groups.h - static and dynamic batching, from outside the engine, for the benchmark and lessons
 * that compare them with continuous batching.
 *
 * The engine batches continuously: a request enters at any step and leaves when it ends. Here
 * requests wait in a queue of their own, and enter the engine as a group, when it is empty. A group
 * is one array, as the field knows it: all of its members ask for as many tokens as the one that
 * asks for most, and no more of them enter than have memory for that. A member that has the tokens
 * it wanted runs on as padding, and its output is discarded; when the last one has its tokens, the
 * rest is cancelled and the next group enters. */
#ifndef GROUPS_H
#define GROUPS_H
#include "cli.h"

enum { CONTINUOUS, STATIC, DYNAMIC, N_POLICIES };
#define POLICIES "continuous|static|dynamic"
extern const char *const policy_names[N_POLICIES];

typedef struct member {   /* a request; zero it to start */
    llm_request request;  /* max_tokens: what it asks for. Its prompt is needed until it enters */
    int wanted;           /* it is content with so many tokens; 0: with max_tokens */
    int n_tokens;         /* of these, generated so far */
    uint64_t id;          /* in the engine */
    double arrived;       /* on the clock */
    uint64_t ended_step;  /* the batcher's step that brought the last wanted token; 0: none yet */
    bool running;         /* the engine has it, perhaps as padding */
    struct member *next;
} member;

typedef struct batcher { /* set the first three, and zero the rest */
    llm_engine *engine;
    int policy;
    double window;          /* seconds that a request waits at most for a dynamic group to fill */
    member *first, *last;   /* the group that runs (n_group), and after it all that wait */
    int n_group, n_running; /* members; of these in the engine. With CONTINUOUS there is no queue */
    int n_live;             /* and without their last token */
    int longest;            /* tokens that each member of the group may generate */
    uint64_t n_steps;
    uint64_t padding_tokens; /* discarded */
    uint64_t padding_steps;  /* single sequences in a step only for these */
} batcher;

/* A request has arrived. *m must stay in place until its last event. */
bool batcher_submit(batcher *b, member *m, llm_error *err);

/* As llm_step. While a group waits to be full, one call waits for a millisecond. */
int batcher_step(batcher *b, llm_error *err);

/* As llm_next_event, without the padding: the last token that a request wanted ends it. */
bool batcher_next_event(batcher *b, llm_event *event);

/* The share of the memory set aside for the group that holds no token of a member that still wants
 * some; with continuous batching, the share of the blocks in use. */
double batcher_waste(const batcher *b);
#endif
