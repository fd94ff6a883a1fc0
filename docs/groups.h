/* groups.h - static and dynamic batching on top of the public API, for the benchmark and the
 * lessons that compare them with continuous batching.
 *
 * The engine batches continuously: a request enters at any step and leaves when it ends. Here,
 * requests wait in a queue and enter the engine as a group when the engine is empty. A group
 * models one padded array: every member generates as many tokens as the longest one, and a group
 * has no more members than fit into memory at that length. A member that has all its tokens
 * continues as padding, and its output is discarded. When the last member has its tokens, the
 * padding is cancelled and the next group enters. */
#ifndef GROUPS_H
#define GROUPS_H
#include "cli.h"

enum { CONTINUOUS, STATIC, DYNAMIC, N_POLICIES };
#define POLICIES "continuous|static|dynamic"
extern const char *const policy_names[N_POLICIES];

typedef struct member {   /* a request; zero it to start */
    llm_request request;  /* max_tokens: requested length. Keep its prompt until it enters */
    int wanted;           /* number of tokens after which it ends; 0: max_tokens */
    int n_tokens;         /* number of tokens generated so far */
    uint64_t id;          /* id of the request in the engine */
    double arrived;       /* time of arrival, by llm_seconds() */
    uint64_t ended_step;  /* step of the batcher that produced the last wanted token; 0: none */
    bool running;         /* whether it is in the engine, possibly as padding */
    struct member *next;
} member;

typedef struct batcher { /* set the first three, and zero the rest */
    llm_engine *engine;
    int policy;
    double window;          /* seconds that a request waits for a dynamic group to fill */
    member *first, *last;   /* the running group (n_group), then all waiting requests */
    int n_group, n_running; /* members; requests in the engine. CONTINUOUS has no queue */
    int n_live;             /* number of members in the engine that still want tokens */
    int longest;            /* most tokens of each member of the group */
    uint64_t n_steps;
    uint64_t padding_tokens; /* number of discarded tokens */
    uint64_t padding_steps;  /* sequences computed only for padding, added up over steps */
} batcher;

/* Add a request that has arrived. *m must not move until its last event. */
bool batcher_submit(batcher *b, member *m, llm_error *err);

/* Like llm_step. While a dynamic group waits to fill, each call sleeps for a millisecond. */
int batcher_step(batcher *b, llm_error *err);

/* Like llm_next_event, but events of padding are discarded: the event of the last token that a
 * request wants has `finish` set, even if the engine continues the request as padding. */
bool batcher_next_event(batcher *b, llm_event *event);

/* The share of the group's reserved memory that holds no token of a member that still wants tokens.
 * With continuous batching: the share of the slots in used blocks that hold no token. */
double batcher_waste(const batcher *b);
#endif
