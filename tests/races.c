/* The plan of the CPU executor under the thread sanitizer: random programs run by 2 to 4 threads
 * must give the results of one thread. The kernels are simple loops that touch the same memory as
 * the real ones, so that the sanitizer sees each access. The test starts its own threads, since the
 * sanitizer does not know OpenMP's synchronisation. tests/races.sh compiles and runs it:
 *
 *     races            the sanitizer must be silent, and the results equal
 *     races weakened   runs without barriers between stages: the sanitizer must report a race, or
 *                      else this test detects nothing */
#define LLM_IMPLEMENTATION
#include "../llm.h"
#include "ops.h"
#include <pthread.h>

enum { COLS = 64, KV = 32, HEADS = 4, KV_HEADS = 2, DIM = 16 };
enum { N_BUFFERS = 5, BLOCK = 16, MOST = 24 };

static uint64_t state = 1;
static int random_below(int n) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (int)(state * 2685821657736338717ull >> 33) % n;
}

/* ---- Kernels --------------------------------------------------------------------------------- */

static void round_rows(const float *x, int64_t cols, int group, int height, int rows, int64_t first,
                       int64_t end, char *tile) {
    (void)group;
    for (int64_t stripe = first; stripe < end; stripe++) {
        float sum = 0;
        for (int row = 0; row < rows; row++)
            for (int64_t c = stripe * LLM__STRIPE; c < cols && c < (stripe + 1) * LLM__STRIPE; c++)
                sum += x[row * cols + c];
        for (int i = 0; i < LLM__X_BYTES * height; i++)
            tile[stripe * LLM__X_BYTES * height + i] = (char)((int)(sum * 100) + i);
    }
}

static void matmul(const llm__matmul_args *args, int64_t first_row, int64_t end_row,
                   void *scratch) {
    *(char *)scratch = 1;
    for (int i = 0; i < args->n; i++) {
        float sum = 0;
        if (args->x_tile_bytes) {
            const char *tile =
                (const char *)args->x_tiles + (size_t)(i / args->height) * args->x_tile_bytes;
            for (size_t k = 0; k < args->x_tile_bytes; k++) sum += tile[k] * 1e-4f;
        } else {
            for (int64_t c = 0; c < args->w->cols; c++) sum += args->x[i * args->w->cols + c];
        }
        for (int64_t row = first_row; row < end_row; row++) {
            float *out = &args->out[i * args->w->rows + row];
            *out = (args->add || args->gate ? *out * 0.5f : 0) + sum * 0.1f + (float)row;
        }
    }
}

static void rmsnorm(const float *x, const float *weight, int n, int dim, float epsilon,
                    bool add, float *out) {
    llm__plain_rmsnorm(x, weight, n, dim, epsilon, add, out);
}

static void swiglu(llm_activation f, const float *gate, const float *up, int64_t n, float *out) {
    (void)f;
    for (int64_t i = 0; i < n; i++) out[i] = gate[i] * 0.5f + up[i] * 0.25f;
}

static void rope_and_store(const llm__rope_args *args, int first_token, int end_token,
                           int first_kv_head, int end_kv_head) {
    int group = HEADS / KV_HEADS;
    for (int t = first_token; t < end_token; t++)
        for (int kv = first_kv_head; kv < end_kv_head; kv++) {
            for (int i = 0; i < group * DIM; i++)
                args->q[(t * HEADS + kv * group) * DIM + i] += args->angles[t * DIM];
            for (int i = 0; i < DIM; i++)
                args->k[(t * KV_HEADS + kv) * DIM + i] += args->angles[t * DIM];
            llm__plain_store(args->cache, args->cache->keys, 0, args->batch->slots[t], kv,
                             args->k + (t * KV_HEADS + kv) * DIM);
            llm__plain_store(args->cache, args->cache->values, 0, args->batch->slots[t], kv,
                             args->v + (t * KV_HEADS + kv) * DIM);
        }
}

static void attention(const llm__attention_args *args, int sequence, int kv_head, int first_row,
                      int end_row, void *scratch) {
    int group = HEADS / KV_HEADS;
    (void)scratch;
    for (int row = first_row; row < end_row; row++) {
        float scores[64];
        llm__plain_attention_row(args, sequence, args->batch->seq_first[sequence] + row / group,
                                 kv_head * group + row % group, scores);
    }
}

static const llm__kernels simple = {.isa = LLM_ISA_PLAIN, .lanes = 4, .round_rows = round_rows,
                                    .matmul = matmul, .rmsnorm = rmsnorm, .swiglu = swiglu,
                                    .rope_and_store = rope_and_store, .attention = attention};

/* ---- The memory that programs run on -------------------------------------------------------- */

typedef struct fixture {
    llm_batch batch;
    int32_t positions[MOST], slots[MOST], seq_first[MOST], seq_count[MOST], tables[MOST][4];
    float buffers[N_BUFFERS][MOST * COLS], kv[2][MOST * KV], angles[MOST * DIM], norm[COLS];
    char *cache_memory;
    llm_cache cache;
    llm_weight weights[3];
} fixture;

static void make_fixture(fixture *w, uint64_t seed) {
    memset(w, 0, sizeof *w);
    state = seed * 0x9E3779B97F4A7C15ull + 1;
    int n = 1 + random_below(MOST), together = 1 + random_below(n), sequences = n / together;
    w->batch = (llm_batch){.n_tokens = sequences * together, .n_sequences = sequences,
                           .positions = w->positions, .slots = w->slots, .seq_first = w->seq_first,
                           .seq_count = w->seq_count, .block_tables = w->tables[0],
                           .table_stride = 4, .block_size = BLOCK};
    for (int t = 0; t < w->batch.n_tokens; t++) {
        int s = t / together, p = w->positions[t] = t % together;
        w->seq_first[s] = s * together, w->seq_count[s] = together;
        for (int i = 0; i < 4; i++) w->tables[s][i] = s * 4 + i;
        w->slots[t] = w->tables[s][p / BLOCK] * BLOCK + p % BLOCK;
    }
    size_t layer = (size_t)sequences * 4 * BLOCK * KV * sizeof(float);
    w->cache_memory = calloc(2, layer);
    w->cache = (llm_cache){LLM_F32, 1, KV_HEADS, DIM, BLOCK, sequences * 4, layer,
                           w->cache_memory, w->cache_memory + layer, false};
    for (int b = 0; b < N_BUFFERS; b++)
        for (int i = 0; i < MOST * COLS; i++)
            w->buffers[b][i] = (float)random_below(1000) / 500 - 1;
    for (int i = 0; i < MOST * KV; i++)
        w->kv[0][i] = w->kv[1][i] = (float)random_below(1000) / 500 - 1;
    for (int i = 0; i < MOST * DIM; i++) w->angles[i] = (float)random_below(1000) / 500 - 1;
    for (int i = 0; i < COLS; i++) w->norm[i] = 1;
    /* the kernels round x with 256 columns per scale, not at all, and with 32 columns per scale */
    const llm_type types[3] = {LLM_Q4_0, LLM_F32, LLM_Q8_0};
    for (int i = 0; i < 3; i++)
        w->weights[i] = (llm_weight){types[i], COLS, COLS, w, NULL, NULL, false};
}

static ops *random_program(fixture *w) {
    static const llm_attention_shape shape = {HEADS, KV_HEADS, DIM, 0.25f, false, 0, 0, 0};
    ops *o = ops_new();
    for (int i = 0; i < 30; i++) {
        float *x = w->buffers[random_below(N_BUFFERS)], *y = x, *z = x;
        while (y == x) y = w->buffers[random_below(N_BUFFERS)];
        while (z == x || z == y) z = w->buffers[random_below(N_BUFFERS)];
        const llm_weight *v = &w->weights[random_below(3)], *u = &w->weights[random_below(3)];
        switch (random_below(7)) {
        case 0: ops_rmsnorm(o, x, w->norm, COLS, 1e-5f, random_below(2) ? x : y); break;
        case 1: ops_matmul(o, x, v, NULL, random_below(2), y); break;
        case 2: ops_swiglu(o, x, y, COLS, random_below(2) ? x : z); break;
        case 3: /* a norm and two products of its result; one may overwrite the norm's input */
            ops_rmsnorm(o, x, w->norm, COLS, 1e-5f, y);
            ops_matmul(o, y, v, NULL, false, z);
            ops_matmul(o, y, u, NULL, random_below(2), x);
            break;
        case 4: /* gate and up */
            ops_matmul(o, x, v, NULL, false, y);
            ops_matmul(o, x, v, NULL, false, z);
            ops_swiglu(o, y, z, COLS, y);
            if (random_below(2)) ops_rmsnorm(o, y, w->norm, COLS, 1e-5f, z);
            break;
        case 5:
            ops_rope_and_store(o, &shape, LLM_ROPE_HALVES, DIM, w->angles, NULL, NULL, 1e-5f, x,
                               w->kv[0], w->kv[1], &w->cache, 0);
            ops_attention(o, &shape, x, &w->cache, 0, y);
            ops_matmul(o, y, v, NULL, true, z);
            break;
        default: ops_rmsnorm(o, x, w->norm, COLS, 1e-5f, x);
        }
        ops_rmsnorm(o, z, w->norm, COLS, 1e-5f, z); /* keeps the values finite */
    }
    /* reads every buffer, so that no operation is without effect */
    for (int i = 0; i < N_BUFFERS; i++)
        ops_rmsnorm(o, w->buffers[i], w->norm, COLS, 1e-5f, w->buffers[i]);
    return o;
}

/* ---- The team -------------------------------------------------------------------------------- */

typedef struct member {
    const llm__step *step;
    llm__deal *deals;
    int n, thread, team;
    int64_t *arrived;
} member;

static void *run_member(void *data) {
    member *m = data;
    double waited = 0;
    llm__run_as(m->step, m->deals, m->n, m->thread, m->team, m->arrived, &waited);
    return NULL;
}

static void run_with(int threads, ops *o, fixture *w, bool weakened) {
    llm_error err;
    llm_backend *b = llm_cpu_backend(threads, LLM_ISA_PLAIN, &err);
    llm__cpu *cpu = (llm__cpu *)b->context;
    llm_limits limits = ops_limits(&w->batch, 0);
    cpu->kernels = &simple;
    if (!b->prepare(b->context, &o->program, &limits, &err)) abort();
    llm__step step = {cpu, &o->program, &w->batch, 0, 0};
    llm__deal *deals;
    int n = llm__deal_part(&step, false, &deals);
    for (int i = 0; i < n; i++) /* share even these small stages, unlike the executor */
        deals[i].shared = threads > 1 && !deals[i].stage->each && deals[i].items > 1;
    for (int i = 0; weakened && i < n; i++) ((llm__stage *)(size_t)deals[i].stage)->barrier = false;
    int64_t arrived = 0;
    pthread_t ids[4];
    member members[4];
    for (int t = 0; t < threads; t++) {
        members[t] = (member){&step, deals, n, t, threads, &arrived};
        if (t > 0 && pthread_create(&ids[t], NULL, run_member, &members[t])) abort();
    }
    run_member(&members[0]);
    for (int t = 1; t < threads; t++) pthread_join(ids[t], NULL);
    b->forget(b->context, &o->program);
    llm_backend_free(b);
}

int main(int argc, char **argv) {
    bool weakened = argc > 1 && !strcmp(argv[1], "weakened");
    static fixture fixtures[2];
    for (uint64_t seed = 1; seed <= 40; seed++)
        for (int threads = 2; threads <= 4; threads++) {
            for (int i = 0; i < 2; i++) {
                make_fixture(&fixtures[i], seed);
                ops *o = random_program(&fixtures[i]);
                run_with(i ? threads : 1, o, &fixtures[i], i && weakened);
                free(o);
            }
            bool same =
                !memcmp(fixtures[0].buffers, fixtures[1].buffers, sizeof fixtures[0].buffers) &&
                !memcmp(fixtures[0].cache_memory, fixtures[1].cache_memory,
                        2 * fixtures[0].cache.layer_bytes);
            free(fixtures[0].cache_memory), free(fixtures[1].cache_memory);
            if (same) continue;
            printf("seed %d, %d threads: the results differ from those of one thread\n", (int)seed,
                   threads);
            return 1;
        }
    return 0;
}
