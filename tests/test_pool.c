/* Chapter 4, compared with a simple model: its prefix cache is a search through all blocks, and
 * each slot of the "device" holds a number that depends on its token AND all earlier tokens, as
 * keys and values do. At random, tables match, grow, keep, fork, trim and clear. After every step,
 * the counts, the ring of free blocks, the buckets and the CONTENT that each sequence reads must
 * agree with the model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#define LLM_IMPLEMENTATION
#include "llm.h"

enum { MAX_TABLES = 12, MAX_TOKENS = 200 };

typedef struct world {
    llm__pool pool;
    int capacity;                         /* the most blocks in a table */
    llm__table tables[MAX_TABLES];
    int n_tokens[MAX_TABLES];             /* -1: not in use */
    /* each sequence's whole text, including tokens that are not yet appended */
    int32_t tokens[MAX_TABLES][MAX_TOKENS];
    uint64_t *memory;                     /* (n_blocks, block_size): the "device" */
    uint64_t random;
    /* number of different tokens; few, so that texts share prefixes */
    int alphabet;
    long matched, evicted;
} world;

static int pick(world *w, int n) { /* 0 to n - 1 */
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (int)((w->random >> 33) % (uint64_t)n);
}

static world *world_new(int64_t n_blocks, int block_size, bool keeps_prefixes, uint64_t seed) {
    llm_error err;
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->random = seed;
    w->alphabet = 2;
    w->capacity = MAX_TOKENS / block_size + 1;
    assert_true(llm__pool_init(&w->pool, n_blocks, block_size, MAX_TABLES, keeps_prefixes, &err));
    w->memory = calloc((size_t)n_blocks * (size_t)block_size, sizeof *w->memory);
    assert_non_null(w->memory);
    for (int i = 0; i < MAX_TABLES; i++) {
        w->tables[i].blocks = calloc((size_t)w->capacity, sizeof(int32_t));
        assert_non_null(w->tables[i].blocks);
        w->tables[i].capacity = w->capacity;
        w->n_tokens[i] = -1;
    }
    return w;
}

static void world_free(world *w) {
    for (int i = 0; i < MAX_TABLES; i++) free(w->tables[i].blocks);
    free(w->memory);
    llm__pool_free(&w->pool);
    free(w);
}

/* Do the pending copies, as a device does at the start of a step. Do each copy twice, since a copy
 * may be repeated. */
static void do_copies(world *w) {
    llm__pool *pool = &w->pool;
    size_t size = (size_t)pool->block_size;
    while (pool->n_copies > 0) {
        int n = llm__copies_at_once(pool);
        for (int i = 0; i < 2 * n; i++)
            memcpy(w->memory + (size_t)pool->copy_to[i % n] * size,
                   w->memory + (size_t)pool->copy_from[i % n] * size, size * sizeof *w->memory);
        llm__copies_done(pool, n);
    }
}

/* The content of a slot: a function of its token and of the previous slot's content. */
static uint64_t value_of(uint64_t before, int32_t token) {
    return llm__mix(before ^ (uint64_t)(token + 1));
}

static uint64_t *slot_of(const world *w, int i, int position) {
    return &w->memory[llm__table_slot(&w->pool, &w->tables[i], position)];
}

static void write_tokens(world *w, int i, int first, int end) {
    uint64_t value = first ? *slot_of(w, i, first - 1) : 0;
    for (int p = first; p < end; p++) {
        /* a sequence writes only blocks that no other one references */
        assert_int_equal(w->pool.references[w->tables[i].blocks[p / w->pool.block_size]], 1);
        *slot_of(w, i, p) = value = value_of(value, w->tokens[i][p]);
    }
}

/* ---- Invariants -------------------------------------------------------------------------- */

static void check_tables(const world *w, int32_t *count) {
    for (int i = 0; i < MAX_TABLES; i++) {
        const llm__table *table = &w->tables[i];
        uint64_t value = 0;
        if (w->n_tokens[i] < 0) assert_int_equal(table->n_blocks, 0);
        for (int k = 0; k < table->n_blocks; k++) {
            assert_in_range(table->blocks[k], 0, w->pool.n_blocks - 1);
            count[table->blocks[k]]++;
        }
        assert_true((int64_t)table->n_kept * w->pool.block_size <= llm__max(w->n_tokens[i], 0));
        /* every sequence reads the values of its own tokens */
        for (int p = 0; p < w->n_tokens[i]; p++) {
            value = value_of(value, w->tokens[i][p]);
            if (*slot_of(w, i, p) != value)
                fail_msg("sequence %d reads a wrong value at position %d", i, p);
        }
    }
}

/* The ring lists each free block once, first those without kept content. */
static void check_ring(const world *w, const int32_t *count) {
    const llm__pool *pool = &w->pool;
    int32_t end = (int32_t)pool->n_blocks;
    int64_t n = 0;
    bool kept = false;
    for (int32_t b = pool->after[end]; b != end; b = pool->after[b], n++) {
        assert_true(n < pool->n_free);
        assert_int_equal(count[b], 0);
        assert_int_equal(pool->before[pool->after[b]], b);
        if (kept) assert_true(pool->identity[b] != 0);
        kept = pool->identity[b] != 0;
    }
    assert_int_equal(n, pool->n_free);
}

/* Each kept block is in exactly one bucket, has a unique identity, and its content is unchanged. */
static void check_kept(const world *w) {
    const llm__pool *pool = &w->pool;
    int64_t listed = 0, kept = 0;
    for (int64_t i = 0; i < pool->n_buckets; i++)
        for (int32_t b = pool->buckets[i]; b >= 0; b = pool->next[b]) {
            assert_true(pool->identity[b] != 0);
            assert_true(++listed <= pool->n_blocks);
        }
    for (int64_t b = 0; b < pool->n_blocks; b++) {
        if (!pool->identity[b]) continue;
        kept++;
        assert_true(pool->identity[b] <= pool->last_identity);
        assert_true(pool->parent[b] < pool->identity[b]);
        const uint64_t *values = w->memory + b * pool->block_size;
        uint64_t value = values[0];
        for (int64_t a = 0; a < pool->n_blocks; a++) {
            if (a != b) assert_true(pool->identity[a] != pool->identity[b]);
            /* if the parent is still kept, this block's content continues the parent's */
            if (pool->identity[a] == pool->parent[b] && pool->parent[b])
                assert_true(value == value_of(w->memory[(a + 1) * pool->block_size - 1],
                                              pool->tokens[b * pool->block_size]));
        }
        if (!pool->parent[b]) assert_true(value == value_of(0, pool->tokens[b * pool->block_size]));
        for (int k = 1; k < pool->block_size; k++) {
            value = value_of(value, pool->tokens[b * pool->block_size + k]);
            assert_true(values[k] == value);
        }
    }
    assert_int_equal(listed, kept);
}

static void check(const world *w) {
    const llm__pool *pool = &w->pool;
    int32_t *count = calloc((size_t)pool->n_blocks, sizeof *count);
    assert_non_null(count);
    check_tables(w, count);
    int64_t n_free = 0;
    for (int64_t b = 0; b < pool->n_blocks; b++) {
        assert_int_equal(pool->references[b], count[b]);
        n_free += count[b] == 0;
    }
    assert_int_equal(pool->n_free, n_free);
    assert_true(pool->peak >= pool->n_blocks - pool->n_free);
    check_ring(w, count);
    check_kept(w);
    free(count);
}

/* ---- Random operations ---------------------------------------------------------------------- */

/* The number of blocks that a search through the whole pool finds for these tokens. */
static int simple_match(const world *w, const int32_t *tokens, int n) {
    const llm__pool *pool = &w->pool;
    uint64_t parent = 0;
    int found = 0;
    while (pool->keeps_prefixes && (found + 1) * pool->block_size <= n) {
        int64_t b = 0;
        while (b < pool->n_blocks &&
               !(pool->identity[b] && pool->parent[b] == parent &&
                 !memcmp(pool->tokens + b * pool->block_size, tokens + found * pool->block_size,
                         (size_t)pool->block_size * sizeof *tokens)))
            b++;
        if (b == pool->n_blocks) break;
        parent = pool->identity[b];
        found++;
    }
    return found;
}

/* Start a new sequence; its text often has a prefix in common with another. */
static void start_sequence(world *w, int i) {
    int like = pick(w, MAX_TABLES), common = pick(w, MAX_TOKENS);
    for (int p = 0; p < MAX_TOKENS; p++)
        w->tokens[i][p] = p < common ? w->tokens[like][p] : pick(w, w->alphabet);
    int n = pick(w, MAX_TOKENS), expected = simple_match(w, w->tokens[i], n);
    assert_int_equal(llm__table_match(&w->pool, &w->tables[i], w->tokens[i], n),
                     expected * w->pool.block_size);
    assert_int_equal(w->tables[i].n_blocks, expected);
    assert_int_equal(w->tables[i].n_kept, expected);
    w->n_tokens[i] = expected * w->pool.block_size;
    w->matched += expected;
}

/* Append n tokens to sequence i. This must succeed if and only if there is room. */
static void append(world *w, int i, int n) {
    llm__pool *pool = &w->pool;
    int first = w->n_tokens[i], end = first + n, size = pool->block_size;
    int64_t need = llm__max((end + size - 1) / size - w->tables[i].n_blocks, 0);
    int at = first / size;
    if (n > 0 && at < w->tables[i].n_blocks && pool->references[w->tables[i].blocks[at]] > 1)
        need++;
    int64_t free_before = pool->n_free;
    for (int64_t k = 0, b = pool->after[pool->n_blocks]; k < need && b != pool->n_blocks;
         k++, b = pool->after[b])
        w->evicted += need <= free_before && pool->identity[b] != 0;
    bool ok = llm__table_grow(pool, &w->tables[i], first, end);
    assert_int_equal(ok, need <= free_before && (end + size - 1) / size <= w->capacity);
    assert_int_equal(pool->n_free, ok ? free_before - need : free_before);
    if (!ok) return;
    /* a second call changes nothing */
    assert_true(llm__table_grow(pool, &w->tables[i], first, end));
    assert_int_equal(pool->n_free, free_before - need);
    do_copies(w);
    write_tokens(w, i, first, end);
    w->n_tokens[i] = end;
}

static void keep(world *w, int i) {
    llm__table_keep(&w->pool, &w->tables[i], w->tokens[i], w->n_tokens[i]);
}

static void fork_table(world *w, int i, int j) {
    llm__table_fork(&w->pool, &w->tables[i], &w->tables[j]);
    memcpy(w->tokens[j], w->tokens[i], sizeof w->tokens[i]);
    w->n_tokens[j] = w->n_tokens[i];
    /* the rest of its text differs */
    for (int p = w->n_tokens[j]; p < MAX_TOKENS; p++) w->tokens[j][p] = pick(w, w->alphabet);
}

/* Drop some of the last tokens, as after a rejected proposal; other tokens will follow. Kept blocks
 * remain. */
static void trim(world *w, int i) {
    int least = w->tables[i].n_kept * w->pool.block_size, n = w->n_tokens[i];
    n -= pick(w, (int)llm__min(n - least, 10) + 1);
    llm__table_trim(&w->pool, &w->tables[i], n);
    w->n_tokens[i] = n;
    for (int p = n; p < MAX_TOKENS; p++) w->tokens[i][p] = pick(w, w->alphabet);
}

static void clear_table(world *w, int i) {
    llm__table_clear(&w->pool, &w->tables[i]);
    assert_int_equal(w->tables[i].identity, 0);
    w->n_tokens[i] = -1;
}

static void random_operation(world *w) {
    int i = pick(w, MAX_TABLES), j = pick(w, MAX_TABLES), what = pick(w, 20);
    if (w->n_tokens[i] < 0) start_sequence(w, i);
    else if (what < 9) {
        int n = pick(w, pick(w, 4) ? 4 : 60);
        if (w->n_tokens[i] + n <= MAX_TOKENS) append(w, i, n);
        if (what < 7) keep(w, i);
    } else if (what < 11) keep(w, i);
    else if (what < 14) trim(w, i);
    else if (what < 17 && w->n_tokens[j] < 0) fork_table(w, i, j);
    else clear_table(w, i);
}

static void random_walk(int64_t n_blocks, int block_size, bool keeps_prefixes, bool collide,
                        uint64_t seed, world *sum) {
    world *w = world_new(n_blocks, block_size, keeps_prefixes, seed);
    /* all blocks share one bucket: only the comparison of tokens distinguishes them */
    if (collide) w->pool.n_buckets = 1;
    for (int n = 0; n < 400; n++) {
        random_operation(w);
        check(w);
    }
    for (int i = 0; i < MAX_TABLES; i++) clear_table(w, i);
    check(w);
    assert_int_equal(w->pool.n_free, n_blocks);
    if (!keeps_prefixes) assert_int_equal(w->pool.last_identity, 0);
    sum->matched += w->matched;
    sum->evicted += w->evicted;
    world_free(w);
}

static void test_random_walks(void **state) {
    static const int64_t blocks[] = {1, 2, 7, 30, 100};
    static const int sizes[] = {1, 2, 3, 16, 64};
    static world sum;
    (void)state;
    for (int b = 0; b < 5; b++)
        for (int s = 0; s < 5; s++)
            for (int kind = 0; kind < 6; kind++)
                random_walk(blocks[b], sizes[s], kind > 0, kind % 2 == 1, 1000 * (uint64_t)kind + 7,
                            &sum);
    print_message("%ld blocks matched, %ld evicted\n", sum.matched, sum.evicted);
    assert_true(sum.matched > 1000 && sum.evicted > 1000);
}

/* ---- Single cases ---------------------------------------------------------------------------- */

/* Append the text as a sequence, keep its full blocks and clear the table. */
static void append_and_keep(world *w, const char *text) {
    int n = (int)strlen(text);
    for (int p = 0; p < n; p++) w->tokens[0][p] = text[p];
    w->n_tokens[0] = llm__table_match(&w->pool, &w->tables[0], w->tokens[0], n);
    append(w, 0, n - w->n_tokens[0]);
    keep(w, 0);
    clear_table(w, 0);
    check(w);
}

static int found(world *w, const char *text) {
    int32_t tokens[MAX_TOKENS];
    int n = (int)strlen(text), hit;
    for (int p = 0; p < n; p++) tokens[p] = text[p];
    int expected = simple_match(w, tokens, n);
    int64_t peak = w->pool.peak;
    hit = llm__table_match(&w->pool, &w->tables[1], tokens, n);
    llm__table_clear(&w->pool, &w->tables[1]);
    w->pool.peak = peak;
    assert_int_equal(hit, expected * w->pool.block_size);
    return hit;
}

/* Blocks with the same four tokens after different parents are different. */
static void test_equal_blocks_different_parents(void **state) {
    (void)state;
    for (int collide = 0; collide < 2; collide++) {
        world *w = world_new(20, 4, true, 1);
        if (collide) w->pool.n_buckets = 1;
        append_and_keep(w, "aaaabbbbcccc");
        append_and_keep(w, "ddddbbbbcccc");
        append_and_keep(w, "bbbbcccc");
        assert_int_equal(w->pool.last_identity, 8); /* eight different blocks */
        assert_int_equal(found(w, "aaaabbbbccccx"), 12);
        assert_int_equal(found(w, "ddddbbbbccc"), 8);
        assert_int_equal(found(w, "bbbbccccbbbb"), 8);
        assert_int_equal(found(w, "ccccbbbb"), 0);
        assert_int_equal(found(w, "aaab"), 0);
        append_and_keep(w, "aaaabbbbcccc"); /* already kept: nothing new */
        assert_int_equal(w->pool.last_identity, 8);
        world_free(w);
    }
}

/* If a block is evicted and its successor is not, the successor is never found again: neither
 * after the block that replaces its parent, nor after the same text computed again. */
static void test_evicted_parents(void **state) {
    (void)state;
    world *w = world_new(4, 4, true, 1);
    for (int p = 0; p < 8; p++) w->tokens[0][p] = 'a' + p / 4;
    w->n_tokens[0] = 0;
    append(w, 0, 8); /* aaaa bbbb */
    keep(w, 0);
    int32_t parent = w->tables[0].blocks[0], child = w->tables[0].blocks[1];
    llm__pool_drop(&w->pool, parent); /* release the parent first, so that it is evicted first */
    llm__pool_drop(&w->pool, child);
    w->tables[0].n_blocks = w->tables[0].n_kept = 0;
    w->tables[0].identity = 0;
    w->n_tokens[0] = -1;
    assert_int_equal(found(w, "aaaabbbb"), 8);
    llm__pool_share(&w->pool, child); /* in use by a third table, so it stays */
    w->tables[2].blocks[0] = child;
    w->tables[2].n_blocks = 1;
    w->n_tokens[2] = 0;
    append_and_keep(w, "xxxxyyyyzzzz"); /* takes all other blocks, including the parent */
    assert_int_equal(found(w, "aaaabbbb"), 0);
    assert_int_equal(found(w, "xxxxbbbb"), 4);
    assert_int_equal(w->pool.identity[child] != 0, 1);
    append_and_keep(w, "aaaa"); /* the same text again gets another identity */
    assert_int_equal(found(w, "aaaabbbb"), 4);
    clear_table(w, 2);
    append_and_keep(w, "aaaabbbb"); /* kept again, in another block */
    assert_int_equal(found(w, "aaaabbbb"), 8);
    world_free(w);
}

/* Eviction order: blocks without kept content first; then the least recently used; within a text,
 * the end before the beginning. */
static void test_eviction_order(void **state) {
    (void)state;
    world *w = world_new(8, 4, true, 1);
    append_and_keep(w, "aaaabbbb");
    append_and_keep(w, "ccccdddd");
    append_and_keep(w, "eeeeffffgg"); /* gg does not fill a block, so it is not kept */
    assert_int_equal(w->pool.n_free, 8);
    assert_int_equal(found(w, "aaaabbbb"), 8); /* used again, so it is evicted last */
    w->n_tokens[2] = 0;
    static const struct { const char *text; int left[9]; } expected[] = {
        /*          blocks taken:  0  1  2  3  4  5  6  7  8 */
        {"ccccdddd",             {8, 8, 8, 4, 0, 0, 0, 0, 0}},
        {"eeeeffff",             {8, 8, 8, 8, 8, 4, 0, 0, 0}},
        {"aaaabbbb",             {8, 8, 8, 8, 8, 8, 8, 4, 0}},
    };
    for (int taken = 0; taken <= 8; taken++) {
        if (taken) append(w, 2, 4);
        /* simple_match changes nothing; a match would make the text the most recently used */
        for (int t = 0; t < 3; t++) {
            int32_t tokens[8];
            for (int p = 0; p < 8; p++) tokens[p] = expected[t].text[p];
            assert_int_equal(simple_match(w, tokens, 8) * 4, expected[t].left[taken]);
        }
        check(w);
    }
    assert_false(llm__table_grow(&w->pool, &w->tables[2], 32, 33));
    world_free(w);
}

/* Several forks write into the block they share before the device has copied anything. All but the
 * last one copy it. */
static void test_forks_in_one_step(void **state) {
    (void)state;
    world *w = world_new(40, 4, true, 1);
    start_sequence(w, 0);
    append(w, 0, 6);
    keep(w, 0);
    for (int i = 1; i < 5; i++) fork_table(w, 0, i);
    check(w);
    assert_int_equal(w->pool.n_free, 38); /* forks take no blocks */
    for (int i = 0; i < 5; i++) assert_true(llm__table_grow(&w->pool, &w->tables[i], 6, 7));
    assert_int_equal(w->pool.n_copies, 4); /* the last fork keeps the shared block */
    do_copies(w);
    for (int i = 0; i < 5; i++) {
        write_tokens(w, i, 6, 7);
        w->n_tokens[i] = 7;
    }
    check(w);
    /* the full block is still shared */
    assert_int_equal(w->pool.references[w->tables[0].blocks[0]], 5);
    assert_int_equal(w->pool.n_free, 34);
    world_free(w);
}

/* A block is copied and then released by its other owner, and another block is copied to it. The
 * two copies must not run at the same time. */
static void test_copy_to_released_source(void **state) {
    (void)state;
    world *w = world_new(3, 4, false, 1);
    for (int i = 0; i < 4; i += 2) {
        start_sequence(w, i);
        w->tokens[i][0] = i / 2; /* a different token for each */
        append(w, i, 2);
        fork_table(w, i, i + 1);
    }
    assert_true(llm__table_grow(&w->pool, &w->tables[1], 2, 3));
    clear_table(w, 0);
    assert_true(llm__table_grow(&w->pool, &w->tables[3], 2, 3));
    assert_int_equal(w->pool.n_copies, 2);
    assert_int_equal(w->pool.copy_to[1], w->pool.copy_from[0]);
    assert_int_equal(llm__copies_at_once(&w->pool), 1);
    do_copies(w);
    for (int i = 1; i < 4; i += 2) {
        write_tokens(w, i, 2, 3);
        w->n_tokens[i] = 3;
    }
    check(w);
    world_free(w);
}

/* If a table or the pool is too small, growing fails and changes nothing. */
static void test_grow_fails_without_room(void **state) {
    (void)state;
    world *w = world_new(3, 4, true, 1);
    w->n_tokens[0] = w->n_tokens[1] = 0;
    append(w, 0, 8);
    assert_false(llm__table_grow(&w->pool, &w->tables[1], 0, 5));
    assert_int_equal(w->tables[1].n_blocks, 0);
    append(w, 1, 4);
    check(w);
    assert_int_equal(w->pool.n_free, 0);
    assert_int_equal(w->pool.peak, 3);
    assert_false(llm__table_grow(&w->pool, &w->tables[0], 8, 9));
    check(w);
    clear_table(w, 1);
    w->tables[0].capacity = 2;
    assert_false(llm__table_grow(&w->pool, &w->tables[0], 8, 9));
    check(w);
    world_free(w);
}

/* The list of pending copies has a limit; when it is full, growing fails. */
static void test_too_many_copies(void **state) {
    (void)state;
    world *w = world_new(40, 4, false, 1);
    w->pool.max_copies = 2;
    start_sequence(w, 0);
    append(w, 0, 2);
    for (int i = 1; i < 4; i++) fork_table(w, 0, i);
    for (int i = 0; i < 2; i++) assert_true(llm__table_grow(&w->pool, &w->tables[i], 2, 3));
    assert_false(llm__table_grow(&w->pool, &w->tables[2], 2, 3));
    assert_int_equal(w->pool.n_copies, 2);
    do_copies(w);
    assert_true(llm__table_grow(&w->pool, &w->tables[2], 2, 3));
    assert_int_equal(w->pool.n_copies, 1);
    do_copies(w);
    for (int i = 0; i < 4; i++) {
        write_tokens(w, i, 2, 3);
        w->n_tokens[i] = 3;
    }
    check(w);
    world_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_walks),
        cmocka_unit_test(test_equal_blocks_different_parents),
        cmocka_unit_test(test_evicted_parents),
        cmocka_unit_test(test_eviction_order),
        cmocka_unit_test(test_forks_in_one_step),
        cmocka_unit_test(test_copy_to_released_source),
        cmocka_unit_test(test_too_many_copies),
        cmocka_unit_test(test_grow_fails_without_room),
    };
    return cmocka_run_group_tests_name("pool", tests, NULL, NULL);
}
