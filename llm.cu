/* llm.cu - the operations of llm.h on an NVIDIA GPU
 *
 * Copy this file next to llm.h and build it with the CUDA Toolkit (12 or 13):
 *
 *     nvcc -O3 -arch=native -c llm.cu -o llm_cuda.o      (on Hopper: -arch=sm_90a)
 *     cc -O2 -fopenmp app.c llm_cuda.o -lm -L/usr/local/cuda/lib64 \
 *        -lcudart_static -lstdc++ -lpthread -ldl -lrt
 *
 * where app.c uses llm.h and selects the GPU:
 *
 *     llm_engine_options options = llm_engine_defaults();
 *     options.backend = llm_cuda_backend(NULL, &err);
 *     llm_engine *engine = llm_engine_create(model, &options, &err);
 *
 * (With #define LLM_WITH_CUDA before the implementation of llm.h, llm_backend_open("auto", NULL,
 * NULL, &err) opens the GPU if there is one, or else the CPU.)
 *
 * Free the backend with llm_backend_free, after the engine.
 *
 * WHAT A GPU IS, for a reader who has never written a kernel
 *
 * A kernel is a C function that many thousands of threads run at once. LLM__START starts a grid of
 * blocks of threads; each thread picks its work by its indexes (blockIdx, threadIdx). Each of the
 * three levels has its own memory:
 *
 *     thread   up to 255 registers. 32 consecutive threads (lanes) form a warp: they run the same
 *              instruction at the same time and can read each other's registers.
 *     block    up to 1024 threads on one of the GPU's processors (SMs; an H100 has 132), with up to
 *              about 200 KB of shared memory: as fast as a cache, but filled by the program.
 *              __syncthreads() is a barrier, after which the threads of a block can read what the
 *              others wrote before it.
 *     grid     all blocks, in any order, on all SMs. They share the main ("global") memory: tens of
 *              GB at 2 to 5 TB/s. Blocks cannot wait for each other, so work that needs the results
 *              of all blocks is another kernel.
 *
 * The GPU runs the kernels of a stream in order while the CPU continues. A launch costs the CPU a
 * few microseconds, so chapter [10] captures a decode step once as a graph and replays it.
 *
 * A kernel is limited by the bytes it moves to and from global memory, or by arithmetic. An H200
 * moves 4.8 TB/s and does 990 TFLOP/s with its matrix instructions, so memory is the limit below
 * about 200 operations per byte. 32 adjacent words that a warp reads are one request of 128 bytes
 * ("coalesced"); scattered words are up to 32 requests. A kernel's comment gives its limit, or the
 * fewest bytes it can move.
 *
 * CONTENTS (search for the bracketed number)
 *
 *     [0]  The device         context, families of kernels
 *     [1]  Small tools        launches, numbers, sums over threads
 *     [2]  Simple kernels     RoPE, RMSNorm, SwiGLU, gathers, copies of blocks
 *     [3]  Matmul, few rows   limited by the bytes of the weights; q4_0
 *     [4]  Matmul, many rows  limited by arithmetic
 *     [5]  Attention, many queries of a sequence (prefill)
 *     [6]  Attention, few queries of each sequence (decode)
 *     [7]  Sampling           from logits to a token
 *     [8]  Appendix           the other layouts of weights; loading a matrix
 *     [9]  Memory             allocate, upload, download; errors; the batch of a step
 *     [10] The program        operations become launches; graphs
 *     [11] The backend        the functions that llm.h calls; the test of a device
 *
 * With LLM_EMULATED defined, this file is C++17 over tests/cuda_on_cpu.h and runs on the CPU:
 * slowly, but on any machine, in a debugger, with every barrier checked. So launches and shared
 * arrays use macros, and each special instruction is one small function, which that header defines
 * a second time in plain C++.
 *
 * License: public domain or MIT, as you prefer; see the end of llm.h.
 */

#include "llm.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef LLM_EMULATED
#include "cuda_on_cpu.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

/* ========================================
 * [0] The device
 * ===================================== */

#define LLM_DEVICE __device__ __forceinline__ /* a function of the device */
#define LLM_KERNEL __global__ static void
/* Launch a kernel on cuda->stream and record any failure. */
#define LLM__START(cuda, kernel, grid, block, bytes, ...)                \
    (llm__allow_shared(cuda, kernel, bytes),                             \
        LLM_LAUNCH_EARLY(cuda, kernel, grid, block, bytes, __VA_ARGS__), \
        llm__cuda_launched(cuda, #kernel))
#ifndef LLM_EMULATED
/* Run kernel(...) on `grid` blocks of `block` threads, with shared_bytes of dynamic shared memory
 * per block. */
#define LLM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
/* The same on cuda->stream. With the option `overlap`, the kernel may begin before the previous one
 * ends: see llm__wait_for_last. */
#define LLM_LAUNCH_EARLY(cuda, kernel, grid, block, shared_bytes, ...) \
    llm__launch_early(                                                 \
        (cuda)->options.overlap, kernel, grid, block, shared_bytes, (cuda)->stream, __VA_ARGS__)
/* Unroll the next loop, to let the compiler keep its arrays in registers. */
#define LLM_UNROLL _Pragma("unroll")
#define LLM_LOOP _Pragma("unroll 1") /* do not unroll, to save registers */
/* An array in shared memory, of constant size or of the size given at launch. */
#define LLM_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define LLM_DYNAMIC_SHARED(type, name)                                   \
    extern __shared__ __align__(16) unsigned char llm__dynamic_shared[]; \
    type *name = (type *)llm__dynamic_shared
#else
#define LLM_UNROLL
#define LLM_LOOP
#endif

/* What a thread block of attention computes for each kv head: a tile of rows of one sequence, over
 * some of the positions that they see. Row r is query head r % group of token r / group, where
 * group is the number of query heads per kv head. */
struct alignas(16) llm__attention_item {
    int32_t sequence; /* index of the sequence in the batch */
    int32_t n_rows, first_row; /* the tile; n_rows 0: padding, no work */
    int32_t first_position; /* position of the sequence's first token; in a tree: of the tile's
                             * token, minus its index in the sequence */
    int32_t start, end; /* positions start to end - 1 are covered */
    int32_t first_token; /* batch index of the sequence's first token */
    int32_t part_row; /* first row in llm__attention_args.parts; -1: not split */
    int32_t branch; /* from this position on, the tile's token sees its ancestors in a tree */
    int32_t unused[3];
};

enum { LLM__MANY_ITEMS, LLM__FEW_ITEMS, LLM__MERGE_ITEMS, LLM__ITEM_KINDS };

/* The work of a step for attention operations of one shape, longest items first: tiles of many rows
 * (chapter [5]), tiles of few rows or parts of them, and tiles to merge (chapter [6]). */
struct llm__attention_list {
    int group, window, tile_rows; /* the shape; tile_rows: rows of a tile of many rows */
    int part_bytes; /* bytes of a row of a part, for all kv heads */
    int n[LLM__ITEM_KINDS]; /* number of items, with padding */
    const llm__attention_item *items[LLM__ITEM_KINDS]; /* device (n) */
};

enum { LLM__LISTS = 4 }; /* most shapes of a program; the plain kernel computes any others */

/* The batch of a step as kernels see it. For a graph, the counts are rounded up; `counts` has the
 * exact ones. The extra rows have slot -1: nothing is stored for them, and their results are not
 * read. */
struct llm__device_batch {
    int n_tokens, n_sequences, n_logits; /* counts, for grid sizes */
    int max_count; /* largest number of tokens of a sequence; 1: plain decode */
    int max_context; /* longest sequence, in positions, including this step */
    int block_size;
    const int32_t *counts; /* device (4): the three exact counts, and table_stride */
    /* device (n_tokens), as in llm_batch; without a tree, all parents are -1 */
    const int32_t *tokens, *positions, *slots, *parents;
    const int32_t *sequence_of; /* device (n_tokens): index of the sequence; -1: none */
    const int32_t *seq_first, *seq_count; /* device (n_sequences); count 0: no tokens */
    const int32_t *logit_rows; /* device (n_logits), as in llm_batch */
    const int32_t *block_tables; /* device (n_sequences, counts[3]) */
    llm__attention_list lists[LLM__LISTS];
    int n_lists;
};

/* Limits of the graphs of chapter [10]. */
enum {
    LLM__GRAPH_TOKENS = 512, /* most tokens; in larger steps, launches take little time */
    LLM__GRAPH_COUNT = 16, /* most tokens of one sequence */
    LLM__GRAPHS = 128 /* most graphs kept at a time */
};

enum { LLM__STAGES = 3 }; /* pinned buffers: one is filled while others are copied */

struct llm__stage { /* a pinned buffer for uploads */
    char *host; /* pinned (stage_bytes) */
    cudaEvent_t done; /* signaled when the last copy out of `host` is done */
};

struct llm__room { /* a pinned buffer and a device buffer of the same size */
    char *host, *device; /* (bytes) each */
    size_t bytes; /* size of one buffer */
};

struct llm__device_draw { /* llm_draw as the kernel of chapter [7] reads it */
    llm_sampling sampling;
    uint64_t random;
    int row; /* row of the logits */
    int first_adjustment, n_adjustments; /* range in the array of adjustments */
    int first_top, n_top; /* range in the array of likeliest tokens */
};

struct llm__graph; /* see chapter [10] */

enum { LLM__LAYOUTS = 8 }; /* values of llm__layout */

/* Families of kernels, tested on each device (chapter [11]). Where a kernel is chosen, llm__on
 * checks its family; if that is off, another kernel is used. */
enum llm__family {
    LLM__REPLAY,
    LLM__SAMPLING,
    LLM__LAST_BLOCK, /* the last block of a matmul computes the norm after it */
    LLM__NORM, /* norms and gates, with and without rounding */
    LLM__GATE,
    LLM__ROPE_STORE, /* RoPE and store in one kernel */
    LLM__SPLIT_K, /* products of many rows, split into quarters */
    LLM__SPLIT, /* attention split into parts */
    LLM__DECODE, /* attention, few queries per sequence */
    LLM__WGMMA_ATTENTION,
    LLM__PREFILL, /* attention with matrix instructions: the three above need it */
    LLM__WGMMA, /* products of many rows, a family for each layout */
    LLM__FEW = LLM__WGMMA + LLM__LAYOUTS,
    LLM__MANY = LLM__FEW + LLM__LAYOUTS,
    LLM__FAMILIES = LLM__MANY + LLM__LAYOUTS
};

struct llm__verdict { /* result of testing a device */
    uint64_t used, off; /* sets of llm__family: used by the test; gave a wrong result */
    double seconds; /* duration of the test; 0: not tested, or unusable */
    char text[4096]; /* the families in `off`, and the size of their errors */
};

struct llm__largest { /* maximums over all prepared programs */
    int64_t max_tokens, max_sequences, max_context, head_dim;
    int64_t max_cols; /* columns of the widest matrix */
    int64_t parts_bytes; /* size of llm__attention_args.parts */
    int64_t experts_bytes; /* bytes of the rounded rows of experts' matmuls */
    int64_t group_bytes; /* size of llm__cuda.groups */
    int64_t vocab_size; /* the last field: see llm__cuda_reserve */
};

struct llm__rounded { /* x (n, cols) as matrix instructions read it */
    char *values; /* f16 (2 n_chunks, n, 32), for coalesced reads of fragments */
    float *sums; /* (2 n_chunks, llm__sums_stride): per row, the sum of its values in 32 columns,
                  * divided by LLM__OF_SUMS; only if `integers` */
    float *scales; /* (n) powers of two by which the rows were divided */
    int n, n_chunks;
    int cols, plane_chunks; /* columns of x; chunks of a plane (see llm__plane) */
    /* For integer weights: columns with c % 4 = 2 and 3 are divided by 16 (see llm__unpack_q4). */
    int integers;
    int tiles; /* values are (n_chunks, n, 64) in the order of wgmma: see chapter [4] */
};

struct llm__cuda { /* the context of the backend */
    llm_backend backend;
    llm_gpu_options options;
    cudaStream_t stream;
    char device_name[256];
    int device, n_processors; /* CUDA device number; SMs */
    int capability; /* compute capability: 80, 86, 89, 90, ... */
    size_t shared_bytes; /* most dynamic shared memory per block */
    bool wgmma; /* the GPU and the code have it; not in deterministic mode */
    llm__largest largest; /* sizes for which scratch memory is reserved */
    llm__graph *graphs; /* (n_graphs) room for LLM__GRAPHS */
    int n_graphs;
    uint64_t n_runs; /* runs so far, the clock of llm__graph.last_use */

    llm__room batch_room; /* the batch's arrays */
    bool batch_on_its_way; /* whether the copy from batch_room.host may still be running */
    llm__room draw_room; /* token draws and their results */
    llm__device_batch batch; /* the current step's batch */

    llm__stage stages[LLM__STAGES];
    size_t stage_bytes; /* size of one stage; 0: no stage is allocated */
    unsigned next_stage;

    double wait_seconds; /* total time that the CPU waited for the device */
    uint64_t launches, replays; /* number of kernels launched; number of graphs replayed */
    char *raw, *rounded, *parts; /* device scratch: file rows; rounded x; parts of attention */
    char *lists; /* device scratch, for chapter [7] */
    char *quarters; /* device scratch: totals of llm__split */
    char *done; /* device: the counters of llm__next_x and of llm__split */
    char *groups; /* device: the groups of experts' rows, then scratch for sorting them */
    size_t done_bytes, quarters_bytes, raw_bytes, rounded_bytes, parts_bytes, lists_bytes,
        groups_bytes;
    /* The buffer `rounded` holds `x`, in this form. Consecutive matmuls of one x (q, k and v; gate
     * and up) share it, so x is rounded once. Any other launch invalidates it. */
    const float *x; /* NULL: none */
    llm__rounded form;
    uint64_t x_launches; /* value of `launches` after the last matmul */
    llm_error failure; /* first failure not yet reported */
    int latest; /* the operation that failed or, without a failure, the latest launched */
    uint64_t off; /* set of llm__family: families switched off */
    mutable uint64_t used; /* set of llm__family: families chosen since the test cleared it */
    llm__verdict verdict;
};

/* Whether the kernels of a family may be used. Records them as used: call it only before using
 * them. */
static bool llm__on(const llm__cuda *cuda, int family) {
    uint64_t on = ((uint64_t)1 << family) & ~cuda->off;
    cuda->used |= on;
    return on != 0;
}

static int llm__larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ static inline int64_t llm__ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* ---- Declarations, for the code that launches kernels ---- */

/* chapter [9] */
static llm__cuda *llm__cuda_of(void *context, llm_error *err = NULL);
static bool llm__cuda_fail(
    const llm__cuda *cuda, llm_error *err, llm_status status, const char *format, ...);
static void llm__cuda_clear(llm_error *err);
static bool llm__cuda_check(
    const llm__cuda *cuda, cudaError_t code, const char *doing, llm_error *err);
static void llm__cuda_note(llm__cuda *cuda, cudaError_t code, const char *doing);
static void llm__cuda_launched(llm__cuda *cuda, const char *kernel);
static bool llm__cuda_tell(llm__cuda *cuda, llm_error *err);
static bool llm__cuda_wait(llm__cuda *cuda, const char *doing, llm_error *err);
static bool llm__cuda_scratch(llm__cuda *cuda, char **scratch, size_t *scratch_bytes, size_t bytes,
    const char *what, llm_error *err);
static bool llm__cuda_room(
    llm__cuda *cuda, llm__room *room, size_t bytes, const char *what, llm_error *err);
static void llm__graphs_forget(llm__cuda *cuda, const llm_program *program); /* chapter [10] */

static const char LLM__TABLES[] =
    "the tables of a step (smaller steps, fewer sequences or a shorter context need less)";
static const char LLM__DRAWS[] = "the draws of a step (fewer sequences need less)";

/* ========================================
 * [1] Small tools: launches, numbers, sums over threads
 * ===================================== */

/* ---- One kernel after another ----
 * Between two kernels the GPU idles for a microsecond or two. Hopper and newer GPUs can close this
 * gap ("programmatic dependent launch", the option `overlap`). Once all blocks of a kernel have
 * called llm__let_next_begin, blocks of the next kernel start wherever there is room. Until a
 * thread of the next kernel calls llm__wait_for_last, it may read only weights, which no kernel
 * changes. */

#ifndef LLM_EMULATED
/* Wait until all earlier kernels have ended and their results can be read. */
LLM_DEVICE void llm__wait_for_last() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
LLM_DEVICE void llm__let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... P, class... A>
static void llm__launch_early(bool early, void (*kernel)(P...), dim3 grid, dim3 block,
    size_t shared_bytes, cudaStream_t stream, A... arguments) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early;
    /* llm__cuda_launched checks for errors */
    cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}
#endif

/* Allow a kernel more than 48 KB of shared memory: the `bytes` of its launch, and its static arrays
 * (less than 2 KB). */
template <class Kernel>
static void llm__allow_shared(llm__cuda *cuda, Kernel kernel, size_t bytes) {
    if (bytes > 46 << 10)
        llm__cuda_note(cuda,
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
            "reserving shared memory");
}

/* The first call in a kernel that reads nothing before it waits. */
LLM_DEVICE void llm__take_over() {
    llm__let_next_begin();
    llm__wait_for_last();
}

/* ---- Numbers ---- */

LLM_DEVICE float llm__from_f16(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
LLM_DEVICE uint16_t llm__to_f16(float x) { return __half_as_ushort(__float2half_rn(x)); }
/* For the cache: clamp to f16's range, since an infinite value times a weight of 0 would be NaN. */
LLM_DEVICE uint16_t llm__stored_f16(float x) {
    return llm__to_f16(fmaxf(fminf(x, 65504.0f), -65504.0f));
}
LLM_DEVICE float llm__bf16_bits_to_f32(uint16_t bits) {
    return __uint_as_float((uint32_t)bits << 16);
}

/* ---- Sums over threads ----
 * A warp adds 32 numbers in five rounds. In each, a thread adds the value of the thread whose
 * number differs in one bit. The order is fixed, so all threads get the same bits. */

LLM_DEVICE float llm__swap(float x, int distance) {
    return __shfl_xor_sync(0xffffffffu, x, distance);
}

/* The sum over four neighbouring lanes. */
LLM_DEVICE float llm__four_sum(float x) {
    x += llm__swap(x, 1);
    return x + llm__swap(x, 2);
}
LLM_DEVICE float llm__four_max(float x) {
    x = fmaxf(x, llm__swap(x, 1));
    return fmaxf(x, llm__swap(x, 2));
}

LLM_DEVICE float llm__warp_sum(float x) {
    for (int other = 16; other; other /= 2) x += llm__swap(x, other);
    return x;
}

LLM_DEVICE float llm__warp_max(float x) {
    for (int other = 16; other; other /= 2) x = fmaxf(x, llm__swap(x, other));
    return x;
}

/* Give each thread the sum of x over its block, of 32 to 1024 threads (a multiple of 32). `shared`
 * (32) is scratch. */
LLM_DEVICE float llm__block_sum(float x, float *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = llm__warp_sum(x);
    __syncthreads(); /* all threads of the previous call have read `shared` */
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return llm__warp_sum(lane < n_warps ? shared[lane] : 0.0f);
}

LLM_DEVICE float llm__block_max(float x, float *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = llm__warp_max(x);
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return llm__warp_max(lane < n_warps ? shared[lane] : -INFINITY);
}

/* ========================================
 * [2] Simple kernels
 *
 * Each does only a few operations per number, so it is limited by bytes or by the launch time.
 * ===================================== */

enum { LLM__BLOCK = 256 }; /* default threads per block */

/* Number of threads for a row of n numbers: whole warps, at most the block of a matmul. It depends
 * only on n, so the order of a sum over the row does, too. */
enum { LLM__ROW_THREADS = 128 };
static int llm__threads(int64_t n) {
    return n < LLM__ROW_THREADS ? (int)llm__ceil_div(n, 32) * 32 : (int)LLM__ROW_THREADS;
}

/* A grid of n blocks, but at most `most`. (CUDA allows 2^31 - 1 in x, 65535 in y and z.) */
static unsigned llm__grid(int64_t n, int64_t most = INT32_MAX) {
    return (unsigned)(n < 1 ? 1 : n < most ? n : most);
}

/* The number of a warp in the grid. */
LLM_DEVICE int64_t llm__warp_index() {
    return (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

/* One block per token. Runs once per step, for all layers. */
LLM_KERNEL llm__rope_angles_kernel(const int32_t *positions, const float *frequencies, int n_pairs,
    float magnitude, float2 *angles) {
    llm__take_over();
    float position = (float)positions[blockIdx.x];
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        float angle = position * frequencies[i];
        angles[(int64_t)blockIdx.x * n_pairs + i] =
            make_float2(magnitude * cosf(angle), magnitude * sinf(angle));
    }
}

/* Normalise a row with a block. A thread starts many reads at once and keeps the values for the
 * second pass; that pass reads a longer row again. __ldcg reads from the L2 cache, since other SMs
 * may just have written the row (see llm__next_x). */
LLM_DEVICE void llm__rmsnorm_row(const float *row, const float *weight, int dim, float epsilon,
    bool add, float *out, float *scratch) {
    enum { AT_ONCE = 32 };
    float x[AT_ONCE], w[AT_ONCE], sum = 0.0f, scale = 0.0f;
    int threads = blockDim.x;
    for (int pass = 0; pass < 2; pass++) {
        for (int first = threadIdx.x; first < dim; first += AT_ONCE * threads) {
LLM_UNROLL
            for (int k = 0; k < AT_ONCE && (pass == 0 || dim > AT_ONCE * threads); k++) {
                bool inside = first + k * threads < dim;
                x[k] = inside ? __ldcg(&row[first + k * threads]) : 0.0f;
                w[k] = inside ? __ldg(&weight[first + k * threads]) : 0.0f;
            }
            if (pass == 0) {
LLM_UNROLL
                for (int k = 0; k < AT_ONCE; k++) sum = fmaf(x[k], x[k], sum);
                continue;
            }
LLM_UNROLL
            for (int k = 0; k < AT_ONCE; k++) {
                int i = first + k * threads;
                if (i < dim) out[i] = x[k] * scale * w[k] + (add ? __ldcg(&out[i]) : 0.0f);
            }
        }
        if (pass == 0) scale = rsqrtf(llm__block_sum(sum, scratch) / (float)dim + epsilon);
    }
}

/* The plain form: one warp per row. */
LLM_KERNEL llm__plain_rmsnorm_kernel(
    const float *x, const float *weight, int dim, float epsilon, bool add, float *out) {
    llm__take_over();
    float sum = 0.0f;
    x += (int64_t)blockIdx.x * dim, out += (int64_t)blockIdx.x * dim;
    for (int i = threadIdx.x; i < dim; i += 32) sum += x[i] * x[i];
    float scale = rsqrtf(llm__warp_sum(sum) / (float)dim + epsilon);
    for (int i = threadIdx.x; i < dim; i += 32)
        out[i] = x[i] * scale * weight[i] + (add ? out[i] : 0.0f);
}

/* Chapter [3]. */
static void llm__cuda_rmsnorm(llm__cuda *cuda, const float *x, const float *weight, int64_t n,
    int dim, float epsilon, float *out);

/* Rotate the pairs of a head by its token's angles. The lanes of a warp share the pairs. */
LLM_DEVICE void llm__rope(
    float *head, const float2 *angles, int rope_dim, llm_rope_pairing pairing, int lane) {
    for (int i = lane; i < rope_dim / 2; i += 32) {
        int a = pairing == LLM_ROPE_HALVES ? i : 2 * i;
        int b = pairing == LLM_ROPE_HALVES ? i + rope_dim / 2 : 2 * i + 1;
        float x = head[a], y = head[b];
        head[a] = x * angles[i].x - y * angles[i].y;
        head[b] = x * angles[i].y + y * angles[i].x;
    }
}

struct llm__rope_args {
    const int32_t *slots; /* (T) */
    int n_tokens, n_heads, n_kv_heads, head_dim, rope_dim, block_size;
    llm_rope_pairing pairing;
    const float2 *angles; /* (T, rope_dim/2) */
    const float *q_norm, *k_norm; /* (head_dim) or NULL */
    float epsilon;
    float *q, *k; /* (T, n_heads, head_dim), (T, n_kv_heads, head_dim) */
    const float *v; /* like k */
    llm_type cache_type;
    char *keys, *values; /* (n_blocks, n_kv_heads, block_size, head_dim) of this layer */
};

/* A warp writes a token's head to the cache, unless its slot is -1. */
LLM_DEVICE void llm__store_head(
    const llm__rope_args &a, int64_t token, int kv_head, const float *head, char *side, int lane) {
    int slot = a.slots[token];
    int64_t row = ((int64_t)(slot / a.block_size) * a.n_kv_heads + kv_head) * a.block_size +
        slot % a.block_size;
    for (int i = lane; slot >= 0 && i < a.head_dim; i += 32)
        if (a.cache_type == LLM_F16)
            ((uint16_t *)side)[row * a.head_dim + i] = llm__stored_f16(head[i]);
        else ((float *)side)[row * a.head_dim + i] = head[i];
}

/* Head norm, RoPE and the write to the cache. One warp per head of a token: query heads, key heads,
 * value heads. Bytes: q read and written; k and v read, and written in the cache's type. */
LLM_KERNEL llm__rope_and_store_kernel(llm__rope_args a) {
    llm__take_over();
    LLM_DYNAMIC_SHARED(float, all_heads); /* (warps, head_dim) */
    int lane = threadIdx.x % 32, heads = a.n_heads + 2 * a.n_kv_heads;
    float *head = all_heads + threadIdx.x / 32 * a.head_dim;
    for (int64_t item = llm__warp_index(); item < (int64_t)a.n_tokens * heads;
        item += (int64_t)gridDim.x * (blockDim.x / 32)) {
        int64_t token = item / heads;
        int which = (int)(item % heads);
        bool is_query = which < a.n_heads, is_value = which >= a.n_heads + a.n_kv_heads;
        int kv_head = (which - a.n_heads) % a.n_kv_heads;
        float *q = a.q + (token * a.n_heads + which) * a.head_dim;
        const float *from =
            is_query ? q : (is_value ? a.v : a.k) + (token * a.n_kv_heads + kv_head) * a.head_dim;
        const float *norm = is_query ? a.q_norm : is_value ? NULL : a.k_norm;
        float sum = 0.0f;
        for (int i = lane; i < a.head_dim; i += 32) {
            head[i] = from[i];
            sum += from[i] * from[i];
        }
        if (norm) {
            float scale = rsqrtf(llm__warp_sum(sum) / (float)a.head_dim + a.epsilon);
            for (int i = lane; i < a.head_dim; i += 32) head[i] *= scale * norm[i];
        }
        __syncwarp();
        if (!is_value)
            llm__rope(head, a.angles + token * (a.rope_dim / 2), a.rope_dim, a.pairing, lane);
        __syncwarp();
        for (int i = lane; is_query && i < a.head_dim; i += 32) q[i] = head[i];
        if (!is_query) llm__store_head(a, token, kv_head, head, is_value ? a.values : a.keys, lane);
        __syncwarp();
    }
}

/* The same in separate kernels, for a backend without the option `fused`: RMSNorm with each head as
 * a row, then these two. One warp per head. */
LLM_KERNEL llm__rope_kernel(llm__rope_args a, float *x, int n_heads) {
    llm__take_over();
    int64_t item = llm__warp_index();
    if (item < (int64_t)a.n_tokens * n_heads)
        llm__rope(x + item * a.head_dim, a.angles + item / n_heads * (a.rope_dim / 2), a.rope_dim,
            a.pairing, threadIdx.x % 32);
}

LLM_KERNEL llm__store_kernel(llm__rope_args a, const float *x, char *side) {
    llm__take_over();
    int64_t item = llm__warp_index();
    if (item < (int64_t)a.n_tokens * a.n_kv_heads)
        llm__store_head(a, item / a.n_kv_heads, (int)(item % a.n_kv_heads), x + item * a.head_dim,
            side, threadIdx.x % 32);
}

static void llm__cuda_rope_and_store(llm__cuda *cuda, const llm_op *op, const float *angles,
    float *q, float *k, const float *v, const llm_cache *cache) {
    const llm_attention_shape *shape = &op->attention;
    size_t layer = (size_t)op->layer * cache->layer_bytes;
    llm__rope_args a = {cuda->batch.slots, cuda->batch.n_tokens, shape->n_heads, shape->n_kv_heads,
        shape->head_dim, op->rope_dim, cache->block_size, op->pairing, (const float2 *)angles,
        op->q_norm ? (const float *)op->q_norm->data : NULL,
        op->k_norm ? (const float *)op->k_norm->data : NULL, op->epsilon, q, k, v, cache->type,
        (char *)cache->keys + layer, (char *)cache->values + layer};
    auto blocks = [&](int64_t heads) { return llm__grid(llm__ceil_div(a.n_tokens * heads, 4)); };
    if (llm__on(cuda, LLM__ROPE_STORE)) {
        LLM__START(cuda, llm__rope_and_store_kernel, blocks(a.n_heads + 2 * a.n_kv_heads), 128,
            4 * a.head_dim * sizeof(float), a);
        return;
    }
    for (int i = 0; i < 2; i++) { /* q, then k */
        const float *norm = i ? a.k_norm : a.q_norm;
        int heads = i ? a.n_kv_heads : a.n_heads;
        float *x = i ? k : q;
        if (norm)
            llm__cuda_rmsnorm(cuda, x, norm, (int64_t)a.n_tokens * heads, a.head_dim, a.epsilon, x);
        LLM__START(cuda, llm__rope_kernel, blocks(heads), 128, 0, a, x, heads);
    }
    LLM__START(cuda, llm__store_kernel, blocks(a.n_kv_heads), 128, 0, a, a.k, a.keys);
    LLM__START(cuda, llm__store_kernel, blocks(a.n_kv_heads), 128, 0, a, v, a.values);
}

enum { LLM__GATES = 8 }; /* numbers per thread, all read at once */

/* See llm__plain_swiglu in llm.h. */
LLM_DEVICE float llm__sigmoid_gate(llm_activation f, float x) { /* SiLU; GELU by its tanh formula */
    float y = f == LLM_GELU ? 1.59576912f * (x + 0.044715f * x * x * x) : x;
    return x / __fadd_rn(1.0f, expf(-y));
}

LLM_DEVICE float llm__activate(llm_activation f, float x) {
    return f == LLM_GELU_ERF ? 0.5f * x * erfcf(-0.707106781f * x) : llm__sigmoid_gate(f, x);
}

/* Gate (up NULL: only activate) the numbers first, first + blockDim.x, ... */
LLM_DEVICE void llm__gate(
    llm_activation f, const float *gate, const float *up, int first, int n, float *out) {
    float x[LLM__GATES], y[LLM__GATES];
    if (f == LLM_GELU_ERF) { /* erfcf is too long to repeat for each number */
        for (int k = 0, i = first; k < LLM__GATES && i < n; k++, i += (int)blockDim.x)
            out[i] = llm__activate(f, gate[i]) * (up ? up[i] : 1.0f);
        return;
    }
LLM_UNROLL
    for (int k = 0; k < LLM__GATES; k++) {
        int i = first + k * (int)blockDim.x;
        x[k] = i < n ? gate[i] : 0.0f;
        y[k] = up && i < n ? up[i] : 1.0f;
    }
LLM_UNROLL
    for (int k = 0; k < LLM__GATES; k++) {
        int i = first + k * (int)blockDim.x;
        if (i < n) out[i] = llm__sigmoid_gate(f, x[k]) * y[k];
    }
}

/* The plain form: one block. */
LLM_KERNEL llm__plain_swiglu_kernel(
    llm_activation f, const float *gate, const float *up, int64_t n, float *out) {
    llm__take_over();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        out[i] = llm__activate(f, gate[i]) * (up ? up[i] : 1.0f);
}

/* Limit numbers: x becomes cap tanh(x / cap). Bytes: numbers read and written. */
LLM_KERNEL llm__softcap_kernel(const float *x, float cap, int64_t n, float *out) {
    llm__take_over();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = cap * tanhf(x[i] / cap);
}

/* Permute columns, one thread per number. Bytes: rows read (coalesced if the order allows it) and
 * written. */
LLM_KERNEL llm__gather_columns_kernel(
    const float *x, const int32_t *columns, int64_t n, int cols, float *out) {
    llm__take_over();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
        i += (int64_t)gridDim.x * blockDim.x)
        out[i] = x[i / cols * cols + columns[i % cols]];
}

/* One thread per number. blockIdx.x: row. Bytes: the rows read and written. */
LLM_KERNEL llm__gather_rows_kernel(const int32_t *rows, const float *x, int dim, float *out) {
    llm__take_over();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < dim) out[(int64_t)blockIdx.x * dim + i] = x[(int64_t)rows[blockIdx.x] * dim + i];
}

enum { LLM__PAIRS = 256 };

struct llm__pairs { /* blocks or slots to copy; at most 4 KB of arguments per kernel */
    int32_t from[LLM__PAIRS], to[LLM__PAIRS];
    int n;
};

/* A thread copies the same word of every pair, in order, so pairs that share a block need no
 * barrier. blockIdx.y is the layer; z is 0 for keys, 1 for values. */
template <typename Word>
LLM_KERNEL llm__copy_blocks_kernel(
    char *keys, char *values, size_t layer_bytes, int64_t words, llm__pairs pairs) {
    llm__take_over();
    Word *side = (Word *)((blockIdx.z ? values : keys) + (size_t)blockIdx.y * layer_bytes);
    for (int64_t word = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; word < words;
        word += (int64_t)gridDim.x * blockDim.x)
        for (int i = 0; i < pairs.n; i++)
            side[pairs.to[i] * words + word] = side[pairs.from[i] * words + word];
}

/* The first pairs of n, as many as fit. They are passed as kernel arguments, so the host need not
 * wait for a copy of them. */
static llm__pairs llm__pairs_of(const int32_t *from, const int32_t *to, int n) {
    llm__pairs pairs = {};
    pairs.n = n < LLM__PAIRS ? n : (int)LLM__PAIRS;
    memcpy(pairs.from, from, (size_t)pairs.n * sizeof *from);
    memcpy(pairs.to, to, (size_t)pairs.n * sizeof *to);
    return pairs;
}

static void llm__cuda_copy_blocks(
    void *context, const llm_cache *cache, const int32_t *from, const int32_t *to, int n) {
    llm__cuda *cuda = llm__cuda_of(context);
    size_t bytes = cache->layer_bytes / (size_t)cache->n_blocks;
    bool wide = bytes % sizeof(uint4) == 0;
    int64_t words = (int64_t)(bytes / (wide ? sizeof(uint4) : sizeof(uint16_t)));
    dim3 grid(llm__grid(llm__ceil_div(words, LLM__BLOCK)), cache->n_layers, 2);
    auto copy_blocks_kernel =
        wide ? llm__copy_blocks_kernel<uint4> : llm__copy_blocks_kernel<uint16_t>;
    for (int first = 0; first < n; first += LLM__PAIRS) {
        llm__pairs pairs = llm__pairs_of(from + first, to + first, n - first);
        LLM__START(cuda, copy_blocks_kernel, grid, LLM__BLOCK, 0, (char *)cache->keys,
            (char *)cache->values, cache->layer_bytes, words, pairs);
    }
}

/* The same for single slots, each (n_kv_heads, head_dim): a thread copies one word of every
 * pair. */
LLM_KERNEL llm__copy_slots_kernel(uint16_t *keys, uint16_t *values, int64_t layer_words,
    int block_size, int n_kv_heads, int head_words, llm__pairs pairs) {
    llm__take_over();
    uint16_t *side = (blockIdx.z ? values : keys) + (int64_t)blockIdx.y * layer_words;
    for (int word = blockIdx.x * blockDim.x + threadIdx.x; word < n_kv_heads * head_words;
        word += gridDim.x * blockDim.x) {
        auto place = [&](int slot) {
            int64_t row = ((int64_t)(slot / block_size) * n_kv_heads + word / head_words) *
                    block_size +
                slot % block_size;
            return row * head_words + word % head_words;
        };
        for (int i = 0; i < pairs.n; i++) side[place(pairs.to[i])] = side[place(pairs.from[i])];
    }
}

static void llm__cuda_copy_slots(
    void *context, const llm_cache *cache, const int32_t *from, const int32_t *to, int n) {
    llm__cuda *cuda = llm__cuda_of(context);
    int head_words = cache->head_dim * (cache->type == LLM_F32 ? 2 : 1),
        words = cache->n_kv_heads * head_words;
    for (int first = 0; first < n; first += LLM__PAIRS) {
        llm__pairs pairs = llm__pairs_of(from + first, to + first, n - first);
        LLM__START(cuda, llm__copy_slots_kernel,
            dim3(llm__ceil_div(words, LLM__BLOCK), cache->n_layers, 2), LLM__BLOCK, 0,
            (uint16_t *)cache->keys, (uint16_t *)cache->values, (int64_t)cache->layer_bytes / 2,
            cache->block_size, cache->n_kv_heads, head_words, pairs);
    }
}

/* ========================================
 * [3] Matmul, few rows
 *
 * A decode step spends nearly all its time in out (n, rows) = x (n, cols) times the transposed
 * weights (rows, cols), where n, the number of tokens, is small. The limit is reading the weights
 * once: for n = 1 and q4_0, there are 2 operations per 0.56 bytes, and the GPU could do a hundred
 * in that time. So 4-bit weights stay 4-bit until they are in registers. A warp copies 512 bytes at
 * a time to shared memory, several chunks ahead, while it computes with matrix instructions, which
 * take as long for one token as for eight.
 *
 * THE INSTRUCTION. mma.m16n8k16 computes D += A x B. Here A (16 x 16) is 16 columns of 16 rows of
 * weights, B (16 x 8) is those columns of x for 8 tokens, and D (16 x 8) is sums. All three are
 * spread over the registers of a warp: with g = lane / 4 and t = lane % 4, a lane holds
 *
 *           A: weights (f16)                 B: x (f16)             D: sums (f32)
 *               k = 2t,2t+1   2t+8,2t+9          token g               token 2t,2t+1
 *     row g        a[0]          a[2]       k=2t,2t+1    b[0]    row g     d[0],d[1]
 *     row g + 8    a[1]          a[3]       k=2t+8,2t+9  b[1]    row g+8   d[2],d[3]
 *
 * THE ORDER OF COLUMNS. The instruction sums over k, so any column may be any k if A and B agree.
 * Of each 32 columns (two instructions, j = 0 and 1), lane t takes columns 8t to 8t + 7: the first
 * four in j = 0, the rest in j = 1. So its part of x is 16 contiguous bytes. Weights are put into
 * the same order ("packed") when they are loaded:
 *
 *     a matrix     tiles of 16 rows, each a list of chunks of 64 columns, padded with zeros
 *     a chunk      two halves of 32 columns; q4_0: 512 bytes, 16 per lane (8 columns of rows g and
 *                  g + 8, for each half), then 64 bytes of scales. (Others: chapter [8].)
 *
 * THE SUM over the columns has a fixed order, so the result is the same, bit for bit, with any
 * number of tokens and in every fast kernel of this chapter and the next. The columns are cut into
 * four quarters of four segments, at places that depend on the matrix alone. The chunks of a
 * segment are added in order, in f32; then the segments of a quarter; then the quarters. (f16
 * weights have no scales: their quarters are not cut.) Here each quarter has its own warp:
 *
 *     block:  16 or more rows     columns  | warp 0  | warp 1  | warp 2  | warp 3  |
 *                                               |         |         |         |
 *                             shared memory:  part 0  + part 1  + part 2  + part 3   -> out
 *
 * ZERO POINTS AND MINIMUMS. In q4_0, a weight is scale x (integer - 8); in q4_1, q4_K and others,
 * scale x integer + minimum, for 32 columns. The sum is scale x (sum(integer x) - 8 sum(x)), or
 * scale x sum(integer x) + minimum x sum(x). The kernel that rounds x computes sum(x), once.
 *
 * WHAT IS ROUNDED
 *     f16, integers   nothing. A scale multiplies the f32 sum of 32 products, not the integers.
 *     q6_K            a scale of 16 columns multiplies the integers: above 2048, one bit is lost
 *     bf16            becomes f16 times a power of two per row: exact, except for weights 2^32
 *                     times smaller than the largest of their row
 *     f32             becomes the sum of two such f16: 22 bits
 *     x               becomes f16: 11 bits; with f32 weights, the sum of two f16. Activations can
 *                     exceed f16's largest value, 65504: a token's x is divided by the power of
 *                     two that brings its largest value to 2^14 .. 2^15, and the sum multiplied.
 * ===================================== */

enum {
    LLM__TILE_ROWS = 16, /* rows of weights in a tile: the height of A */
    LLM__CHUNK = 64, /* columns in a chunk */
    LLM__QUARTERS = 4, /* quarters of a sum */
    LLM__SEGMENTS = 16, /* segments of a sum */
    LLM__FEW_TOKENS = 16, /* most tokens for the kernels of this chapter */
    LLM__PRODUCTS = 3 /* most products of one x in a launch */
};

/* The layout of a matrix in device memory. */
enum llm__layout {
    LLM__F16,
    LLM__Q8_0,
    LLM__Q4_0,
    LLM__4_BITS,
    LLM__4_BITS_GROUPS,
    LLM__5_BITS,
    LLM__5_BITS_GROUPS,
    LLM__6_BITS
};

struct llm__packed { /* a matrix as kernels see it */
    llm__layout layout;
    bool is_zero; /* 4 and 5 bits: blocks have zero points instead of minimums */
    const char *chunks; /* device (n_tiles, n_chunks) */
    const float *row_scales; /* (n_tiles * 16) powers of two for the rows; NULL: 1 */
    int64_t rows, cols;
    int n_tiles, n_chunks;
    int plane_chunks; /* chunks in one plane: see llm__plane */
    int segment_chunks; /* chunks in a segment */
};

/* chapter [8] */
template <class Function>
static void llm__with_layout(llm__layout layout, Function function);
static llm__packed llm__packed_of(const llm_weight *weight);
template <class Layout>
__device__ static float llm__packed_value(const llm__packed &w, int64_t row, int64_t col);

/* ---- Instructions ---- */

#ifndef LLM_EMULATED /* emulated in tests/cuda_on_cpu.h */
/* d (16, 8) += a (16, 16) times b (16, 8); f16 in, f32 out. */
LLM_DEVICE void llm__mma_m16n8k16_f16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

LLM_DEVICE uint32_t llm__shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Load four transposed 8 x 8 matrices of 16-bit values from shared memory. Lane 8 m + i passes the
 * address of row i of matrix m; register m of lane (g, t) gets rows 2t and 2t + 1 of column g. */
LLM_DEVICE void llm__ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(llm__shared_address(row))
        : "memory");
}

/* Start a copy of 16 bytes from global to shared memory, or of zeros if not `valid`. It is complete
 * after a wait that covers its group; for other threads, also after a barrier. */
LLM_DEVICE void llm__cp_async_16(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(llm__shared_address(shared)),
        "l"(global), "r"(valid ? 16 : 0)
        : "memory");
}
LLM_DEVICE void llm__cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Wait until all committed groups but the last N are done. */
template <int N>
LLM_DEVICE void llm__cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* An mbarrier has phases 0, 1, 2, ...: a phase ends when `count` threads have arrived and all bytes
 * that they announced are copied. A wait names the phase by its parity, so a thread must wait for
 * each phase or for none. After the wait, copied data and data written before an arrival can be
 * read. */
LLM_DEVICE void llm__mbarrier_init(uint64_t *barrier, int count) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(llm__shared_address(barrier)), "r"(count)
        : "memory");
}
/* Arrive, and announce copies of `bytes` bytes. */
LLM_DEVICE void llm__mbarrier_arrive(uint64_t *barrier, uint32_t bytes = 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     llm__shared_address(barrier)),
        "r"(bytes)
        : "memory");
}
LLM_DEVICE void llm__mbarrier_wait(uint64_t *barrier, int parity) {
    uint32_t done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(llm__shared_address(barrier)), "r"(parity)
            : "memory");
}

/* One thread starts a copy of a multiple of 16 bytes from global to shared memory. */
LLM_DEVICE void llm__copy_bulk(
    void *shared, const void *global, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(llm__shared_address(shared)),
        "l"(global), "r"(bytes), "r"(llm__shared_address(barrier))
        : "memory");
}

/* Make this thread's writes to shared memory visible to bulk copies and to wgmma. */
LLM_DEVICE void llm__fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* d (64, 128) += a (64, 16) times b (16, 128): see chapter [4]. Transposed: b's rows, not its
 * columns, are contiguous. */
#define LLM__SUMS_8(d, i)                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
template <int transposed>
LLM_DEVICE void llm__wgmma_m64n128k16(float *d, const uint32_t a[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
        "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, 1, 1, 1, %69;"
        : LLM__SUMS_8(d, 0), LLM__SUMS_8(d, 8), LLM__SUMS_8(d, 16), LLM__SUMS_8(d, 24),
        LLM__SUMS_8(d, 32), LLM__SUMS_8(d, 40), LLM__SUMS_8(d, 48), LLM__SUMS_8(d, 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transposed));
}
/* Call before a group of wgmmas: the registers of a and d then have their values. If the compiler
 * computed `a` later, it would serialize the wgmmas. */
template <int I>
LLM_DEVICE void llm__wgmma_fence(uint32_t (&a)[I][4]) {
LLM_UNROLL
    for (int i = 0; i < 4 * I; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
LLM_DEVICE void llm__wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Wait until all committed groups of wgmmas but the last N are done. If N is 0, the compiler must
 * read `sums` afterwards. */
template <int N, int I, int J>
LLM_DEVICE void llm__wgmma_wait(float (&sums)[I][J]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
LLM_UNROLL
    for (int i = 0; N == 0 && i < I * J; i++)
        asm volatile("" : "+f"(sums[i / J][i % J])::"memory");
}

/* (a & b) | c. nvcc would use two instructions, since one can hold only one constant. */
LLM_DEVICE uint32_t llm__and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

/* Hide from the compiler how x was computed, so that it keeps x instead of computing it again. */
LLM_DEVICE int llm__keep(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
LLM_DEVICE const char *llm__keep(const char *x) { /* x: in global memory */
    asm volatile("" : "+l"(x));
    return x;
}

#endif

/* Two f16 in a register, `low` in the low half. */
LLM_DEVICE uint32_t llm__pair(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

LLM_DEVICE uint32_t llm__pair_fma(uint32_t a, uint32_t b, uint32_t c) {
    __half2 x, y, z;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    memcpy(&z, &c, sizeof z);
    x = __hfma2(x, y, z);
    memcpy(&a, &x, sizeof a);
    return a;
}

/* Eight 4-bit weights as f16, without conversion: an f16 whose upper six bits are 0 is its lower
 * ten bits times 2^-24 ("subnormal"), and matrix instructions multiply it exactly. From high to low
 * the word holds columns 7 5 3 1 6 4 2 0, so one mask selects two neighbours. out[i] has columns 2i
 * and 2i + 1, times 2^-24 for even i and 16 x 2^-24 for odd i. */
LLM_DEVICE void llm__unpack_q4(uint32_t word, uint32_t out[4]) {
    out[0] = word & 0x000f000f;
    out[1] = word & 0x00f000f0;
    out[2] = word >> 8 & 0x000f000f;
    out[3] = word >> 8 & 0x00f000f0;
}

/* Wider integers: the f16 with bits 0x6400 is 1024; with an integer i in its ten low bits, it is
 * 1024 + i. Subtracting 1024 is exact; the same instruction multiplies by 16 where llm__unpack_q4
 * does. */
enum {
    LLM__F16_1024 = 0x64006400, /* 1024, twice */
    LLM__F16_1 = 0x3c003c00,
    LLM__F16_16 = 0x4c004c00
};

/* ---- Layouts ----
 * A layout reads a lane's part of a chunk from shared memory (load), turns half of it into matrix
 * fragments (unpack: a[j] is for instruction j), and reads the scales of two rows (scales).
 * Constants:
 *
 *     scaled    the weights are integers with scales: x has the form of llm__rounded.integers
 *     zero      the zero point is 8, which the sums of x account for
 *     minimums  scales() also gives minimums
 *     unit      final factor of a sum over integers and x: 2^24 for 4 bits */

/* Divisor of the sums of x. They then equal what a zero point of 8 adds to the sums over 4-bit
 * weights: -8 x 2^-24 x. */
enum { LLM__OF_SUMS = -(1 << 21) };

/* Scales of rows g and g + 8 for half a chunk: weight = scale x integer + minimum. Minimums are
 * multiplied so that minimum x (a sum in llm__rounded.sums) has the unit of the other terms. */
struct llm__scales {
    float scale[2], minimum[2];
};

/* An f32 is stored as the sum of two f16, high + low. Except for the last bit, w x = high_w high_x
 * + high_w low_x + low_w high_x. So the matrix becomes three f16 planes side by side (high, high,
 * low), x becomes high, low, high, and kernels see one wide matrix. Returns the plane of column *k
 * of the wide matrix, and sets *k to the column in the plane. */
LLM_DEVICE int llm__plane(const llm__packed *w, int64_t *k) {
    int plane = 0;
    for (; *k >= (int64_t)w->plane_chunks * LLM__CHUNK; plane++)
        *k -= (int64_t)w->plane_chunks * LLM__CHUNK;
    return plane;
}

/* The part of x to store as f16: x itself or, if `low`, its rounding error. */
LLM_DEVICE float llm__half_of(float x, bool low) {
    return low ? x - __half2float(__float2half_rn(x)) : x;
}

LLM_DEVICE uint4 llm__load_16(const char *p) { return *(const uint4 *)p; }

/* 8 bytes: the scales of rows g and g + 8 for half 0, then for half 1. */
LLM_DEVICE void llm__unpack_scales(const char *from, llm__scales scales[2]) {
    uint2 bits = *(const uint2 *)from;
LLM_UNROLL
    for (int half = 0; half < 2; half++) {
        uint32_t pair = half ? bits.y : bits.x;
        scales[half].scale[0] = llm__from_f16(pair);
        scales[half].scale[1] = llm__from_f16((pair >> 16));
    }
}

/* Eight columns of rows g (top) and g + 8 (bottom), as the fragments of two instructions. */
LLM_DEVICE void llm__fragments(const uint32_t top[4], const uint32_t bottom[4], uint32_t a[2][4]) {
LLM_UNROLL
    for (int j = 0; j < 2; j++)
        a[j][0] = top[2 * j], a[j][1] = bottom[2 * j], a[j][2] = top[2 * j + 1],
        a[j][3] = bottom[2 * j + 1];
}

struct llm__q4_0_layout {
    enum {
        bits = 4,
        scales_at = 512,
        chunk_bytes = 576,
        scaled = 1,
        zero = 1,
        minimums = 0,
        unit = 1 << 24
    };
    uint4 words; /* eight columns: row g, row g + 8 of half 0; then of half 1 */

    LLM_DEVICE void load(const char *chunk, int lane) { words = llm__load_16(chunk + lane * 16); }
    LLM_DEVICE void unpack(int half, uint32_t a[2][4]) const {
        uint32_t top[4], bottom[4]; /* columns 2i, 2i + 1 of rows g, g + 8 */
        llm__unpack_q4(half ? words.z : words.x, top);
        llm__unpack_q4(half ? words.w : words.y, bottom);
        llm__fragments(top, bottom, a);
    }
    LLM_DEVICE static void scales(
        const llm__packed &, const char *chunk, int lane, llm__scales s[2]) {
        llm__unpack_scales(chunk + scales_at + lane / 4 * 8, s);
    }
};

/* The power of two p that brings largest / p to 2^14 .. 2^15; 1 if `largest` is 0 or not finite. */
LLM_DEVICE float llm__power_for(float largest) {
    if (!(largest > 0.0f && largest <= FLT_MAX)) return 1.0f;
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127 - 14;
    if (exponent < -126) exponent = -126; /* smaller powers are subnormal */
    return __uint_as_float((uint32_t)(exponent + 127) << 23);
}

/* ---- x, rounded ----
 * A kernel rounds the rows of x once; all matmuls of this x read the result. */

/* Record that `rounded` holds x after this launch. */
static void llm__rounded_is(llm__cuda *cuda, const float *x, const llm__rounded &r) {
    cuda->x = x, cuda->form = r, cuda->x_launches = cuda->launches;
}

__host__ __device__ static inline int llm__sums_stride(int n) {
    return n == 1 ? 1 : (n + 7) / 8 * 8;
}

/* Bytes of a row of llm__rounded. */
static size_t llm__rounded_bytes(int64_t n_chunks) {
    return (size_t)n_chunks * (LLM__CHUNK * 2 + 2 * sizeof(float)) + sizeof(float);
}

/* Eight columns of a row, from column k on, padded with zeros. */
LLM_DEVICE void llm__row_8(const float *row, int cols, int k, float v[8]) {
    if (cols % 4 == 0) { /* 16-byte aligned */
LLM_UNROLL
        for (int i = 0; i < 8; i += 4) {
            float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (k + i < cols) four = *(const float4 *)(row + k + i);
            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
        return;
    }
LLM_UNROLL
    for (int i = 0; i < 8; i++) v[i] = k + i < cols ? row[k + i] : 0.0f;
}

/* Round a row of x with all threads of a block (whole warps). A thread rounds eight columns at a
 * time; four threads add up 32. `scratch` (32) is shared. */
LLM_DEVICE void llm__round_row(const llm__rounded &x, const float *row, int token, float *scratch) {
    float largest = 0.0f, v[8];
    for (int k = 8 * threadIdx.x; k < x.cols; k += 8 * blockDim.x) {
        llm__row_8(row, x.cols, k, v);
LLM_UNROLL
        for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(v[i]));
    }
    float scale = llm__power_for(llm__block_max(largest, scratch)), inverse = 1.0f / scale;
    if (threadIdx.x == 0) x.scales[token] = scale;
    int plane_cols = x.plane_chunks * LLM__CHUNK, end = x.n_chunks * LLM__CHUNK;
    for (int first = 0; first < end; first += 8 * (int)blockDim.x) {
        int k = first + 8 * (int)threadIdx.x, plane = (k >= plane_cols) + (k >= 2 * plane_cols);
        uint4 rounded;
        uint32_t *pairs = &rounded.x;
        float sum = 0.0f;
        llm__row_8(row, k < end ? x.cols : 0, k - plane * plane_cols, v);
LLM_UNROLL
        for (int i = 0; i < 4; i++) {
            bool divided = i % 2 && x.integers;
            float factor = divided ? 0.0625f : 1.0f;
            pairs[i] = llm__pair(llm__half_of(v[2 * i] * inverse, plane == 1) * factor,
                llm__half_of(v[2 * i + 1] * inverse, plane == 1) * factor);
            sum += (llm__from_f16(pairs[i]) + llm__from_f16((pairs[i] >> 16))) *
                (divided ? 16.0f : 1.0f);
        }
        sum = llm__four_sum(sum);
        if (k >= end) continue;
        int64_t block = k / 32;
        if (x.tiles) {
            char *to = x.values + (block / 2 * x.n + token) * 128 + k % 32 / 2;
            int piece = (k / 8 & 4) ^ (token & 7);
LLM_UNROLL
            for (int i = 0; i < 4; i++) *(uint32_t *)(to + (piece ^ i) * 16) = pairs[i];
            continue;
        }
        *(uint4 *)(x.values + (block * x.n + token) * 64 + k % 32 * 2) = rounded;
        if (x.integers && k % 32 == 0)
            x.sums[block * llm__sums_stride(x.n) + token] = sum / LLM__OF_SUMS;
    }
}

/* One block per row. Bytes: x read (the second time from a cache), half as many written. */
LLM_KERNEL llm__round_kernel(const float *x, llm__rounded to) {
    llm__take_over();
    LLM_SHARED(float, scratch, 32);
    llm__round_row(to, x + (int64_t)blockIdx.x * to.cols, blockIdx.x, scratch);
}

/* ---- What computes x ----
 * A norm or a gate whose result is the x of a matmul also rounds it. With few tokens, the last
 * thread block of the matmul before a norm computes the norm: each block increments a counter when
 * its part of the result is in memory, and the block that counts last can read all of it. */

struct llm__next_x {
    const float *a, *b; /* (n, cols) norm: the input and NULL; gate: gate and up */
    const float *weight; /* norm: (cols) */
    float epsilon; /* norm */
    bool add; /* norm: add the result to out */
    llm_activation activation; /* gate */
    float *out; /* (n, cols) x; may be a */
    llm__rounded rounded; /* rounded x; rounded.n 0: not rounded, but cols is valid */
    unsigned *done; /* number of finished thread blocks of the matmul before; 0 between kernels */
};

template <bool Norm, bool Rounds>
LLM_DEVICE void llm__next_row(const llm__next_x &next, int row, float *scratch) {
    int cols = next.rounded.cols;
    int64_t at = (int64_t)row * cols;
    if (Norm)
        llm__rmsnorm_row(
            next.a + at, next.weight, cols, next.epsilon, next.add, next.out + at, scratch);
    else
        for (int i = threadIdx.x; i < cols; i += LLM__GATES * (int)blockDim.x)
            llm__gate(next.activation, next.a + at, next.b ? next.b + at : NULL, i, cols,
                next.out + at);
    if (!Rounds) return;
    __syncthreads(); /* the row is complete */
    llm__round_row(next.rounded, next.out + at, row, scratch);
}

/* One block per row. Bytes: the inputs read, x written, also as f16. */
template <bool Norm, bool Rounds>
LLM_KERNEL __launch_bounds__(Norm ? (int)LLM__ROW_THREADS : 1024, 1)
    llm__next_x_kernel(llm__next_x next) {
    llm__take_over();
    LLM_SHARED(float, scratch, 32);
    llm__next_row<Norm, Rounds>(next, blockIdx.x, scratch);
}

static void llm__cuda_next_x(llm__cuda *cuda, const llm__next_x &next, int64_t n) {
    int cols = next.rounded.cols;
    bool rounds = next.rounded.n > 0;
    auto rmsnorm_kernel = rounds ? llm__next_x_kernel<true, true> : llm__next_x_kernel<true, false>;
    auto swiglu_kernel =
        rounds ? llm__next_x_kernel<false, true> : llm__next_x_kernel<false, false>;
    if (n < 1) return;
    if (next.weight && llm__on(cuda, LLM__NORM))
        LLM__START(cuda, rmsnorm_kernel, llm__grid(n), llm__threads(cols), 0, next);
    else if (next.weight)
        LLM__START(cuda, llm__plain_rmsnorm_kernel, llm__grid(n), 32, 0, next.a, next.weight, cols,
            next.epsilon, next.add, next.out);
    else if (llm__on(cuda, LLM__GATE)) LLM__START(cuda, swiglu_kernel, llm__grid(n), 1024, 0, next);
    else
        LLM__START(cuda, llm__plain_swiglu_kernel, 1, LLM__BLOCK, 0, next.activation, next.a,
            next.b, n * cols, next.out);
    if (rounds) llm__rounded_is(cuda, next.out, next.rounded);
}

/* One block per row. Bytes: x read (again from a cache), and the result written. */
LLM_KERNEL llm__layernorm_kernel(const float *x, const float *weight, const float *bias, int dim,
    float epsilon, float *out) {
    llm__take_over();
    LLM_SHARED(float, scratch, 32);
    float sum = 0.0f, squares = 0.0f;
    x += (int64_t)blockIdx.x * dim, out += (int64_t)blockIdx.x * dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum += x[i];
    float mean = llm__block_sum(sum, scratch) / (float)dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
    float scale = rsqrtf(llm__block_sum(squares, scratch) / (float)dim + epsilon);
    for (int i = threadIdx.x; i < dim; i += blockDim.x)
        out[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

static void llm__cuda_rmsnorm(llm__cuda *cuda, const float *x, const float *weight, int64_t n,
    int dim, float epsilon, float *out) {
    llm__next_x next = {x, NULL, weight, epsilon, false, LLM_SILU, out, {}, NULL};
    next.rounded.cols = dim;
    llm__cuda_next_x(cuda, next, n);
}

/* Whether this is the last of n blocks to call this. It sees all that they have written. */
static LLM_DEVICE bool llm__is_last(unsigned *done, unsigned n) {
    LLM_SHARED(bool, is_last, 1);
    __syncthreads(); /* the block's part of the result is written... */
    if (threadIdx.x == 0) {
        __threadfence(); /* ...and visible to blocks that see the count; the last resets it to 0 */
        *is_last = atomicInc(done, n - 1) == n - 1;
        __threadfence();
    }
    __syncthreads();
    return *is_last;
}

/* All threads of a matmul call this at its end. */
static LLM_DEVICE void llm__then(const llm__next_x &next) {
    LLM_SHARED(float, scratch, 32);
    if (next.rounded.n == 0 || !llm__is_last(next.done, gridDim.x)) return;
    for (int row = 0; row < next.rounded.n; row++) llm__next_row<true, true>(next, row, scratch);
}

/* ---- The kernels ---- */

struct llm__output { /* out (n, rows) */
    float *out;
    const float *bias; /* (rows) or NULL */
    bool add; /* out += */
};

/* Matmuls of one x (q, k and v; gate and up) share a launch, since a matrix of few rows would leave
 * most of the GPU idle. All have the same layout and the same columns. */
struct llm__product {
    llm__packed w;
    llm__output o;
};

struct llm__products {
    llm__product each[LLM__PRODUCTS];
    int n;
    llm__next_x next; /* computed when all blocks are done */
};

__host__ __device__ static inline int64_t llm__row_blocks(const llm__product &p, int tiles) {
    return llm__ceil_div(p.w.n_tiles, tiles);
}

/* Find the product that a block computes; each block computes `tiles` tiles of rows. *block is the
 * block's number in the launch, and becomes its number in the product. */
LLM_DEVICE const llm__product &llm__find_product(
    const llm__products &p, int tiles, int64_t *block) {
    int which = 0;
    for (; which + 1 < p.n && *block >= llm__row_blocks(p.each[which], tiles); which++)
        *block -= llm__row_blocks(p.each[which], tiles);
    return p.each[which];
}

static int64_t llm__all_row_blocks(const llm__products &p, int tiles) {
    int64_t n = 0;
    for (int i = 0; i < p.n; i++) n += llm__row_blocks(p.each[i], tiles);
    return n;
}

/* Finish one sum over rounded x: apply the layout's unit, the scales and the bias, and store. The
 * order of these steps is the same in all kernels except the plain one. */
LLM_DEVICE void llm__finish(const llm__packed &w, const llm__output &o, const llm__rounded &x,
    int unit, int64_t token, int64_t row, float sum) {
    sum = __fmul_rn(__fmul_rn(sum, (float)unit), x.scales[token]);
    if (w.row_scales) sum = __fmul_rn(sum, w.row_scales[row]);
    if (o.bias) sum = __fadd_rn(sum, o.bias[row]);
    float *out = o.out + token * w.rows + row;
    *out = o.add ? __fadd_rn(*out, sum) : sum;
}

/* The first chunk of a segment. A segment ends where the next one begins. */
LLM_DEVICE int llm__segment_chunk(const llm__packed *w, int segment) {
    int chunk = segment * w->segment_chunks;
    return chunk < w->n_chunks ? chunk : w->n_chunks;
}

/* sums (16 rows, 8 tokens) += weights (16, 32) times x (32, 8). A scale multiplies the sum of its
 * 32 products. x_sums: the sums of x for tokens 2t and 2t + 1. */
template <class Layout>
LLM_DEVICE void llm__multiply(float sums[4], const uint32_t a[2][4], const llm__scales &scales,
    const uint4 &x, float2 x_sums) {
    const uint32_t b[2][2] = {{x.x, x.y}, {x.z, x.w}};
    if (!Layout::scaled) {
        llm__mma_m16n8k16_f16(sums, a[0], b[0]);
        llm__mma_m16n8k16_f16(sums, a[1], b[1]);
        return;
    }
    float part[4] = {};
    if (Layout::zero) part[0] = part[2] = x_sums.x, part[1] = part[3] = x_sums.y;
    llm__mma_m16n8k16_f16(part, a[0], b[0]);
    llm__mma_m16n8k16_f16(part, a[1], b[1]);
LLM_UNROLL
    for (int i = 0; i < 4; i++) {
        sums[i] = fmaf(part[i], scales.scale[i / 2], sums[i]);
        if (Layout::minimums)
            sums[i] = fmaf(i % 2 ? x_sums.y : x_sums.x, scales.minimum[i / 2], sums[i]);
    }
}

/* Add one array of sums to another, and clear it. */
template <int N>
LLM_DEVICE void llm__move_sums(float to[N][4], float from[N][4]) {
LLM_UNROLL
    for (int i = 0; i < N; i++)
LLM_UNROLL
        for (int j = 0; j < 4; j++) to[i][j] += from[i][j], from[i][j] = 0.0f;
}

/* A warp's copies of the next chunks of T streams (tiles or segments) to consecutive places in
 * shared memory; a lane copies 16 bytes of every 512. */
template <class Layout, int T>
struct llm__streams {
    enum { pieces = Layout::chunk_bytes / 16, copies = (T * pieces + 31) / 32 };
    const char *from[copies];

    template <class First>
    LLM_DEVICE llm__streams(int lane, First first) {
LLM_UNROLL
        for (int k = 0; k < copies; k++) {
            int i = lane + 32 * k < T * pieces ? lane + 32 * k : 0;
            from[k] = first(i / pieces) + i % pieces * 16;
        }
    }
    /* `ahead`: which of the next chunks; `to`: where the lane's first bytes go */
    LLM_DEVICE void copy(char *to, int lane, int ahead) const {
LLM_UNROLL
        for (int k = 0; k < copies; k++)
            if (k + 1 < copies || lane + 32 * k < T * pieces)
                llm__cp_async_16(to + k * 512, from[k] + ahead * Layout::chunk_bytes, true);
    }
    LLM_DEVICE void advance(int chunks) {
LLM_UNROLL
        for (int k = 0; k < copies; k++)
            from[k] = llm__keep(from[k] + chunks * Layout::chunk_bytes);
    }
};

/* ---- One token ----
 * Seven of the eight columns of B would be copies. Instead, each takes x in another block of 32
 * columns of the matrix: a warp multiplies a chunk of each of its four segments, and column 2s + h
 * of B is zero except while it multiplies half h of segment s. After the eight blocks, D has the
 * sums of all of them side by side:
 *
 *     B     column   0    1    2    3    ...              D     column  0   1   2   3   ...
 *     segment 0      x    0                               row 0         |   |   |   |
 *                    0    x                               row 1         one sum per block
 *     segment 1                x    0                     ...           |   |   |   |
 *                              0    x
 *
 * and each lane multiplies those of its own two rows and two blocks by their scales. */
template <class Layout>
struct llm__one_shape {
    enum {
        R = 2, /* tiles of 16 rows, which share x */
        x_at = 4 * R * Layout::chunk_bytes, /* offset of x in a stage, after the chunks */
        zeros = x_at + 512, /* offset of 16 zeros */
        group = zeros + 16, /* bytes of a stage */
        stages = group < 8192 ? 3 : 2,
        shared_bytes = LLM__QUARTERS * stages * group
    };
};

/* One block: 32 rows; one warp per quarter of the columns. Each warp has its own ring of stages in
 * shared memory, so no barrier delays it: it copies chunks ahead while it multiplies. The warps of
 * an SM have 30 KB in flight, which keeps memory busy (4 TB/s x 1 us / 132 SMs). Bytes: the
 * weights once; x once per block, from the L2 cache. */
template <class Layout>
LLM_KERNEL __launch_bounds__(32 * LLM__QUARTERS, 3)
    llm__matmul_one_kernel(llm__products p, llm__rounded x) {
    typedef llm__one_shape<Layout> shape;
    constexpr int R = shape::R, group = shape::group, stages = shape::stages;
    constexpr int rows = R * LLM__TILE_ROWS, ahead = stages - 1;
    constexpr bool has_sums = Layout::zero || Layout::minimums;
    LLM_SHARED(float, parts, (LLM__SEGMENTS * rows)); /* (segment, row) */
    LLM_DYNAMIC_SHARED(char, shared); /* (warp, stage): chunks (tile, segment); x; zeros */
    llm__let_next_begin();
    int64_t block = blockIdx.x;
    const llm__product &product = llm__find_product(p, R, &block);
    const llm__packed &w = product.w;
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); /* so the compiler sees one value */
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    /* All segments of the warp have the length of its first one. A shorter one begins earlier: its
     * first chunks belong to the previous segment, and their sums are left out. */
    int first = llm__segment_chunk(&w, 4 * warp),
        length = llm__segment_chunk(&w, 4 * warp + 1) - first;
    auto start = [&](int s) { return llm__segment_chunk(&w, 4 * warp + s + 1) - length; };
    int left_out = llm__segment_chunk(&w, 4 * warp + t) - start(t);
    llm__streams<Layout, 4 * R> weights(lane, [&](int i) { /* after the last tile: repeat it */
        int64_t tile = min((int)block * R + i / 4, w.n_tiles - 1);
        return w.chunks + (tile * w.n_chunks + start(i % 4)) * Layout::chunk_bytes;
    });
    /* Lane (g, t) has columns 8t to 8t + 7 of x for column g of B. */
    const char *values = x.values + ((int64_t)(2 * start(g / 2) + g % 2) * 32 + t * 8) * 2;
    const float2 *x_sums = (const float2 *)x.sums + start(t);
    /* Offsets in `shared`: the warp's ring; the lane's 16 bytes in it; the chunk of the lane's own
     * segment; B for each block (x in the four lanes of its column, zeros in the others). */
    const int ring = warp * stages * group, own = llm__keep(ring + lane * 16);
    const int own_chunk = llm__keep(ring + t * Layout::chunk_bytes);
    int b_at[8];
LLM_UNROLL
    for (int i = 0; i < 8; i++)
        b_at[i] = llm__keep(g == i ? own + (int)shape::x_at : ring + (int)shape::zeros);
    if (lane < stages)
        *(uint4 *)(shared + ring + lane * group + shape::zeros) = make_uint4(0, 0, 0, 0);
LLM_UNROLL
    for (int i = 0; i < ahead; i++)
        if (i < length) weights.copy(shared + own + i * group, lane, i);
    llm__wait_for_last(); /* earlier kernels may write everything except weights */
LLM_UNROLL
    for (int i = 0; i < ahead; i++) {
        if (i < length)
            llm__cp_async_16(
                shared + own + i * group + shape::x_at, values + i * LLM__CHUNK * 2, true);
        llm__cp_async_commit(); /* even if the group is empty, so that there is one per stage */
    }
    float2 next_sums = {0.0f, 0.0f}; /* sums of x for the halves of the lane's chunk */
    if (has_sums && length > 0) next_sums = x_sums[0];
    float sums[R][2] = {};
    for (int i = 0; i < length; i += stages) {
LLM_UNROLL
        for (int d = 0; d < stages; d++)
            if (i + d < length) {
                llm__cp_async_wait<ahead - 1>();
                __syncwarp(); /* all lanes can read this stage, and have read the previous one */
                if (i + d + ahead < length) {
                    char *to = shared + own + (d + ahead) % stages * group;
                    weights.copy(to, lane, d + ahead);
                    llm__cp_async_16(
                        to + shape::x_at, values + (d + ahead) * (LLM__CHUNK * 2), true);
                }
                llm__cp_async_commit();
                const float x_sum[2] = {next_sums.x, next_sums.y};
                if (has_sums && i + d + 1 < length) next_sums = x_sums[d + 1];
                float blocks[R][4] = {};
LLM_UNROLL
                for (int r = 0; r < R; r++)
                    if (Layout::zero)
                        blocks[r][0] = blocks[r][2] = x_sum[0],
                        blocks[r][1] = blocks[r][3] = x_sum[1];
LLM_UNROLL
                for (int s = 0; s < 4; s++) {
                    Layout part[R];
LLM_UNROLL
                    for (int r = 0; r < R; r++)
                        part[r].load(
                            shared + ring + d * group + (4 * r + s) * Layout::chunk_bytes, lane);
LLM_UNROLL
                    for (int half = 0; half < 2; half++) {
                        uint4 b = llm__load_16(shared + b_at[2 * s + half] + d * group);
                        const uint32_t pairs[2][2] = {{b.x, b.y}, {b.z, b.w}};
LLM_UNROLL
                        for (int r = 0; r < R; r++) {
                            uint32_t a[2][4];
                            part[r].unpack(half, a);
                            llm__mma_m16n8k16_f16(blocks[r], a[0], pairs[0]);
                            llm__mma_m16n8k16_f16(blocks[r], a[1], pairs[1]);
                        }
                    }
                }
LLM_UNROLL
                for (int r = 0; r < R; r++) {
                    llm__scales scales[2];
                    Layout::scales(w, shared + own_chunk + d * group + 4 * r * Layout::chunk_bytes,
                        lane, scales);
LLM_UNROLL
                    for (int j = 0; j < 4 && i + d >= left_out; j++) {
                        int half = j % 2, below = j / 2; /* below: row g + 8 */
                        float &sum = sums[r][below];
                        sum = fmaf(blocks[r][j], scales[half].scale[below], sum);
                        if (Layout::minimums)
                            sum = fmaf(x_sum[half], scales[half].minimum[below], sum);
                    }
                }
            }
        weights.advance(stages);
        values = llm__keep(values + stages * LLM__CHUNK * 2);
        x_sums += stages;
    }
    for (int i = 0; i < 2 * R; i++) parts[(4 * warp + t) * rows + i * 8 + g] = sums[i / 2][i % 2];
    __syncthreads();
    int64_t row = block * rows + threadIdx.x;
    if (threadIdx.x < rows && row < w.rows) {
        float sum = 0.0f;
        for (int q = 0; q < LLM__QUARTERS; q++) {
            float quarter = 0.0f;
            for (int s = 0; s < 4; s++) quarter += parts[(4 * q + s) * rows + threadIdx.x];
            sum += quarter;
        }
        llm__finish(w, product.o, x, Layout::unit, 0, row, sum);
    }
    llm__then(p.next);
}

/* ---- Experts ----
 * Each row of x has the matrix of its expert. The rows are sorted by expert, and the rows of one
 * expert are cut into groups of at most 8 or 16. A thread block multiplies a group by some rows of
 * its expert's matrix, so few tokens read only the matrices that they need. In rounded x, each
 * group begins at a multiple of 8 or 16 rows, because the copies of its sums are aligned. */

struct llm__expert_group {
    int expert, first, n; /* sorted rows first to first + n - 1; n 0: the group is unused */
};

struct llm__experts {
    const char *const *matrices; /* device (n) the packed matrices; NULL: no experts */
    const int32_t *sorted; /* device (3, T k): see llm_op.n_used */
    const llm__expert_group *groups; /* device (n_groups) */
    int n, n_groups;
};

/* Most groups of up to `size` rows that `rows` sorted rows can form. */
static int64_t llm__most_groups(int64_t rows, int64_t n_experts, int size) {
    return (rows < n_experts ? rows : n_experts) + rows / size;
}

/* Replace w's data by that of another matrix of the same type and shape. */
LLM_DEVICE void llm__take_matrix(llm__packed *w, const char *chunks) {
    if (w->row_scales)
        w->row_scales = (const float *)(chunks + ((const char *)w->row_scales - w->chunks));
    w->chunks = chunks;
}

/* Find the group of a thread block, and its expert's matrix. False: there is none. */
template <int Size>
LLM_DEVICE bool llm__take_group(
    llm__product *product, const llm__experts &experts, int *first, int *n) {
    llm__wait_for_last();
    llm__expert_group group = experts.groups[blockIdx.y];
    if (group.n < 1) return false;
    *first = Size * (int)blockIdx.y;
    *n = group.n;
    llm__take_matrix(&product->w, experts.matrices[group.expert]);
    product->o.out += (int64_t)(group.first - *first) * product->w.rows;
    return true;
}

/* Round the rows of all groups. blockIdx.x: row of rounded x. */
LLM_KERNEL llm__round_groups_kernel(
    const float *x, llm__rounded to, llm__experts experts, int size) {
    llm__take_over();
    LLM_SHARED(float, scratch, 32);
    llm__expert_group group = experts.groups[blockIdx.x / size];
    int row = blockIdx.x % size;
    if (row < group.n)
        llm__round_row(to, x + (int64_t)(group.first + row) * to.cols, blockIdx.x, scratch);
}

/* One warp per token: k times, find the next expert in order of decreasing logit, then of index. */
LLM_KERNEL llm__route_kernel(
    const float *logits, int n_tokens, int n, int k, bool normalize, llm_route *routes) {
    llm__take_over();
    int64_t token = llm__warp_index();
    int lane = threadIdx.x % 32, last = -1;
    if (token >= n_tokens) return;
    const float *x = logits + token * n;
    llm_route *to = routes + token * k;
    float last_x = INFINITY, largest = 0.0f, total = 0.0f;
    for (int i = 0; i < k; i++) {
        int best = -1;
        float best_x = -INFINITY;
        for (int e = lane; e < n; e += 32) {
            bool after = x[e] < last_x || (x[e] == last_x && e > last);
            if (after && (best < 0 || x[e] > best_x)) best = e, best_x = x[e];
        }
        for (int step = 16; step > 0; step /= 2) {
            int other = __shfl_xor_sync(0xffffffffu, best, step);
            float other_x = __shfl_xor_sync(0xffffffffu, best_x, step);
            bool better = best < 0 || other_x > best_x || (other_x == best_x && other < best);
            if (other >= 0 && better) best = other, best_x = other_x;
        }
        if (best < 0) best = i, best_x = NAN; /* no logit is a number */
        if (i == 0) largest = best_x;
        last = best, last_x = best_x;
        float factor = expf(best_x - largest);
        if (normalize) total += factor;
        if (lane == 0) to[i].expert = best, to[i].factor = factor;
    }
    if (!normalize) {
        for (int e = lane; e < n; e += 32) total += expf(x[e] - largest);
        total = llm__warp_sum(total);
    }
    for (int i = 0; i < k && lane == 0; i++) to[i].factor /= total;
}

/* Sort the routes (n tokens, k) by expert, and cut the rows of each expert into groups. One block;
 * a thread per expert scans all routes. A token with a slot of -1 has no expert: its routes come
 * last. starts (n_experts + 2): scratch. */
LLM_KERNEL llm__group_routes_kernel(const llm_route *routes, const int32_t *slots, int n, int k,
    int n_experts, int size, int n_groups, int *starts, int32_t *sorted,
    llm__expert_group *groups) {
    llm__take_over();
    auto expert_of = [&](int i) { return slots[i / k] < 0 ? n_experts : routes[i].expert; };
    for (int e = threadIdx.x; e <= n_experts; e += blockDim.x) {
        int count = 0;
        for (int i = 0; i < n * k; i++) count += expert_of(i) == e;
        starts[e] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int start = 0, group = 0;
        for (int e = 0; e <= n_experts; e++) {
            int count = starts[e];
            starts[e] = start;
            for (int i = 0; i < count && e < n_experts; i += size)
                groups[group++] = {e, start + i, min(size, count - i)};
            start += count;
        }
        for (; group < n_groups; group++) groups[group].n = 0;
    }
    __syncthreads();
    for (int e = threadIdx.x; e <= n_experts; e += blockDim.x) {
        int place = starts[e];
        for (int i = 0; i < n * k; i++) {
            if (expert_of(i) != e) continue;
            sorted[place] = e;
            sorted[n * k + place] = i / k;
            sorted[2 * n * k + i] = place++;
        }
    }
}

/* Add the results of a token's routes, in order, and those of the shared expert (NULL: none). One
 * thread per number; blockIdx.x: token. */
LLM_KERNEL llm__sum_routes_kernel(const float *results, const llm_route *routes,
    const int32_t *places, int k, const float *shared, const float *shared_factor, int width,
    float *out) {
    llm__take_over();
    int64_t token = blockIdx.x;
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float sum = out[token * width + i];
    if (shared)
        sum += 1.0f / (1.0f + expf(-shared_factor[token])) * shared[token * width + i];
    for (int64_t r = token * k; r < (token + 1) * k; r++)
        sum += routes[r].factor * results[(int64_t)places[r] * width + i];
    out[token * width + i] = sum;
}

/* ---- A few tokens ---- */

template <class Layout, int R, int N>
struct llm__few_shape {
    enum {
        x_at = R * Layout::chunk_bytes, /* offset of x in a stage, after the chunks */
        sums_at = x_at + N * 8 * LLM__CHUNK * 2, /* offset of its sums */
        stage_bytes = sums_at + N * 8 * 2 * 4,
        fit = (12 << 10) / stage_bytes,
        stages = fit >= 3 ? (int)fit
            : stage_bytes<8192 ? 3 : 2, /* less than 99 KB, for sm_86 */
                  pitch = R * LLM__TILE_ROWS + 4, /* rows of a sum, padded: no bank conflicts */
                  parts_bytes = LLM__QUARTERS * 8 * pitch * 4,
                  ring_bytes = LLM__QUARTERS * stages * stage_bytes,
                  shared_bytes = (int)ring_bytes>(int) parts_bytes
            ? ring_bytes
            : parts_bytes
    };
};

/* One block: R tiles of 16 rows, up to N x 8 tokens; as above, but a column of B is a token. Bytes:
 * the weights once; x once per block, from the L2 cache. R grows with N, since 16 tokens of x have
 * as many bytes as 57 rows of q4_0. */
template <class Layout, int R, int N, bool Grouped>
LLM_KERNEL __launch_bounds__(32 * LLM__QUARTERS, 2)
    llm__matmul_few_kernel(llm__products p, llm__rounded x, llm__experts experts) {
    typedef llm__few_shape<Layout, R, N> shape;
    constexpr int stages = shape::stages, ahead = stages - 1;
    constexpr int rows = R * LLM__TILE_ROWS, pitch = shape::pitch;
    constexpr bool has_sums = Layout::zero || Layout::minimums;
    LLM_DYNAMIC_SHARED(char, shared); /* (warp, stage): a chunk per tile, x, its sums */
    llm__let_next_begin();
    int64_t block = blockIdx.x;
    int first_token = 0, n_tokens = x.n; /* the block's tokens among the rows of x */
    llm__product grouped;
    if (Grouped) grouped = p.each[0];
    if (Grouped && !llm__take_group<8 * N>(&grouped, experts, &first_token, &n_tokens)) return;
    const llm__product &product = Grouped ? grouped : llm__find_product(p, R, &block);
    const llm__packed &w = product.w;
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); /* so the compiler sees one value */
    int lane = threadIdx.x % 32;
    int segment_end = llm__segment_chunk(&w, 4 * warp + 1);
    int first = llm__segment_chunk(&w, 4 * warp), end = llm__segment_chunk(&w, 4 * warp + 4);

    /* Missing tiles and tokens repeat the last one; their sums are not used. */
    llm__streams<Layout, R> weights(lane, [&](int r) {
        int64_t tile = min((int)block * R + r, w.n_tiles - 1);
        return w.chunks + (tile * w.n_chunks + first) * Layout::chunk_bytes;
    });
    const char *values[2 * N]; /* the lane's parts of x (half, token, 32) */
LLM_UNROLL
    for (int k = 0; k < 2 * N; k++) {
        int token = first_token + min((k % N * 32 + lane) / 4, n_tokens - 1);
        values[k] = x.values + ((int64_t)(2 * first + k / N) * x.n + token) * 64 + lane % 4 * 16;
    }
    const int stride = llm__sums_stride(x.n); /* lanes below 4N copy sums (half, token) */
    const float *x_sums = x.sums + (int64_t)(2 * first + lane / (2 * N)) * stride +
        min(first_token + lane % (2 * N) * 4, stride - 4);
    const int ring = warp * stages * shape::stage_bytes, own = llm__keep(ring + lane * 16);
    auto copy_x = [&](char *to) {
LLM_UNROLL
        for (int k = 0; k < 2 * N; k++) {
            llm__cp_async_16(to + shape::x_at + 512 * k, values[k], true);
            values[k] += x.n * (LLM__CHUNK * 2);
        }
        if (has_sums && lane < N * 4) llm__cp_async_16(to + shape::sums_at, x_sums, true);
        x_sums += 2 * stride;
    };
LLM_UNROLL
    for (int i = 0; i < ahead; i++)
        if (first + i < end) weights.copy(shared + own + i * shape::stage_bytes, lane, i);
    llm__wait_for_last(); /* earlier kernels may write everything except weights */
LLM_UNROLL
    for (int i = 0; i < ahead; i++) {
        if (first + i < end) copy_x(shared + own + i * shape::stage_bytes);
        llm__cp_async_commit(); /* even if the group is empty, so that there is one per stage */
    }
    float sums[R * N][4] = {}, quarter[R * N][4] = {};
    for (int c = first; c < end; c += stages) {
LLM_UNROLL
        for (int d = 0; d < stages; d++)
            if (c + d < end) {
                llm__cp_async_wait<ahead - 1>();
                __syncwarp(); /* all lanes can read this stage, and have read the previous one */
                if (c + d + ahead < end) {
                    char *to = shared + own + (d + ahead) % stages * shape::stage_bytes;
                    weights.copy(to, lane, d + ahead);
                    copy_x(to);
                }
                llm__cp_async_commit();
                const char *stage = shared + ring + d * shape::stage_bytes;
                uint4 input[2 * N]; /* (half, 8 tokens) */
                float2 input_sums[2 * N];
LLM_UNROLL
                for (int k = 0; k < 2 * N; k++) {
                    input[k] = llm__load_16(stage + shape::x_at + k * 512 + lane * 16);
                    if (has_sums)
                        input_sums[k] =
                            *(const float2 *)(stage + shape::sums_at + k * 32 + lane % 4 * 8);
                }
LLM_UNROLL
                for (int r = 0; r < R; r++) {
                    Layout part;
                    llm__scales scales[2];
                    part.load(stage + r * Layout::chunk_bytes, lane);
                    Layout::scales(w, stage + r * Layout::chunk_bytes, lane, scales);
LLM_UNROLL
                    for (int half = 0; half < 2; half++) {
                        uint32_t a[2][4];
                        part.unpack(half, a);
LLM_UNROLL
                        for (int i = 0; i < N; i++)
                            llm__multiply<Layout>(sums[r * N + i], a, scales[half],
                                input[half * N + i], input_sums[half * N + i]);
                    }
                }
                if (Layout::scaled && c + d + 1 == segment_end) {
                    llm__move_sums<R * N>(quarter, sums);
                    segment_end += w.segment_chunks;
                }
            }
        weights.advance(stages);
    }
    llm__move_sums<R * N>(quarter, sums);

    /* Add the quarters in order, 8 tokens at a time. */
    float *parts = (float *)shared; /* (quarter, token, row) */
LLM_UNROLL
    for (int i = 0; i < N; i++) {
        __syncthreads(); /* all warps have read their rings, or the previous 8 tokens */
LLM_UNROLL
        for (int r = 0; r < R; r++)
LLM_UNROLL
            for (int j = 0; j < 4; j++)
                parts[(warp * 8 + lane % 4 * 2 + j % 2) * pitch + r * LLM__TILE_ROWS + lane / 4 +
                    j / 2 * 8] = quarter[r * N + i][j];
        __syncthreads();
        for (int j = threadIdx.x; j < 8 * rows; j += 32 * LLM__QUARTERS) {
            int row = j % rows, token = j / rows;
            int64_t w_row = block * rows + row;
            if (i * 8 + token >= n_tokens || w_row >= w.rows) continue;
            float sum = 0.0f;
            for (int q = 0; q < LLM__QUARTERS; q++) sum += parts[(q * 8 + token) * pitch + row];
            llm__finish(w, product.o, x, Layout::unit, first_token + i * 8 + token, w_row, sum);
        }
    }
    if (!Grouped) llm__then(p.next);
}

/* The textbook kernel (the option `plain`): one warp per element of the result. */
template <class Layout>
LLM_KERNEL llm__plain_matmul_kernel(
    llm__packed w, const float *x, int n, llm__output o, llm__experts experts) {
    llm__take_over();
    int64_t row = llm__warp_index();
    if (row >= w.rows) return;
    for (int64_t token = blockIdx.y; token < n; token += gridDim.y) {
        float sum = 0.0f;
        if (experts.matrices) {
            if (experts.sorted[token] >= experts.n) continue;
            llm__take_matrix(&w, experts.matrices[experts.sorted[token]]);
        }
        for (int64_t j = threadIdx.x % 32; j < w.cols; j += 32)
            sum += llm__packed_value<Layout>(w, row, j) * x[token * w.cols + j];
        sum = llm__warp_sum(sum);
        if (threadIdx.x % 32) continue;
        if (o.bias) sum += o.bias[row];
        float *out = o.out + token * w.rows + row;
        *out = o.add ? *out + sum : sum;
    }
}

/* ---- Embedding (here because it reads packed weights) ---- */

/* One thread per number. blockIdx.x: token. Bytes: a row of the table read, a row of f32
 * written. */
template <class Layout>
LLM_KERNEL llm__embed_kernel(
    const int32_t *tokens, llm__packed table, float scale, float *out) {
    llm__take_over();
    int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    if (i < table.cols)
        out[blockIdx.x * table.cols + i] =
            scale * llm__packed_value<Layout>(table, tokens[blockIdx.x], i);
}

/* ========================================
 * [4] Matmul, many rows
 *
 * With hundreds of tokens the limit is arithmetic: the matrix instructions should never wait. A
 * block computes a tile of the result, 128 rows of weights by 128 or 64 tokens (smaller for small
 * products), with 64 columns of both at a time in shared memory. A tile of 128 by 128 does at least
 * 64 operations per byte from global memory.
 *
 *                          64 columns at a time ->
 *     tokens 0-127       | x  x  x  x  x ... |           8 warps, each with 32 rows (two fragments)
 *                                                        and 64 tokens (eight):
 *     rows 0-127         | w  w  w  w  w ... |                       tokens 0-63 | tokens 64-127
 *                                                        rows  0- 31    warp 0   |   warp 1
 *     copied by cp.async into a ring of stages:          rows 32- 63    warp 2   |   warp 3
 *       [ c, in use ][ c+1, arrived ][ c+2, on its way ] ...
 *
 * Weights are copied as they are, and each warp unpacks those it multiplies; lanes read shared
 * memory 16 bytes at a time, without bank conflicts. Sums have the order of chapter [3]: `sums`
 * holds the current segment, `quarter` the earlier ones of its quarter, `totals` the earlier
 * quarters. Where tiles do not fill the SMs, each quarter has its own block, and the last block of
 * a tile adds their totals in order ("split-K"). Bytes: the weights and x once; again from the L2
 * cache x for every 128 rows, weights for every 128 tokens.
 * ===================================== */

template <class Layout, int Rows, int Tokens>
struct llm__many_shape {
    enum {
        warps_down = Rows / 32,
        warps_across = 2,
        threads = warps_down * warps_across * 32,
        N = Tokens / warps_across / 8, /* fragments of 8 tokens per warp */
        x_bytes = Tokens * LLM__CHUNK * 2, /* bytes of x in a chunk; its sums follow */
        sums_bytes = Layout::zero || Layout::minimums ? Tokens * 2 * 4 : 0,
        stage_bytes = Rows / LLM__TILE_ROWS * Layout::chunk_bytes + x_bytes + sums_bytes,
        stages = stage_bytes > 24 << 10 ? 3 : 4,
        may_split = Rows * Tokens <= 128 * 64 /* larger tiles have no registers left */
    };
};

/* Source of the next chunk. In place of missing tiles and tokens, a block copies the last one; its
 * results are not used. */
struct llm__chunk_source {
    const char *weights, *x; /* addresses of the block's first tile and first token */
    const float *sums; /* sums of the block's first token */
    int64_t tile_bytes;
    int last_tile, last_token; /* last tile and token, counted from the block's first */
    int n, sums_stride; /* rows of x; stride of its sums */
};

/* Copy a chunk of the weight tiles and of x into a stage, 16 bytes per thread at a time. */
template <class Layout, int Rows, int Tokens>
LLM_DEVICE void llm__load_stage(char *stage, llm__chunk_source *from) {
    constexpr int threads = llm__many_shape<Layout, Rows, Tokens>::threads,
                  pieces = Layout::chunk_bytes / 16;
    constexpr int weight_pieces = Rows / LLM__TILE_ROWS * pieces, x_pieces = 2 * Tokens * 4;
LLM_UNROLL
    for (int k = 0; k < (weight_pieces + threads - 1) / threads; k++) {
        int i = threadIdx.x + k * threads, tile = i / pieces;
        if (weight_pieces % threads == 0 || i < weight_pieces)
            llm__cp_async_16(stage + i * 16,
                from->weights + min(tile, from->last_tile) * from->tile_bytes +
                    (i - tile * pieces) * 16,
                true);
    }
    char *x_stage = stage + weight_pieces * 16; /* (2, Tokens, 32) f16 */
LLM_UNROLL
    for (int k = 0; k < (x_pieces + threads - 1) / threads; k++) {
        int i = threadIdx.x + k * threads, half = i / (4 * Tokens),
            token = min(i / 4 % Tokens, from->last_token);
        if (x_pieces % threads == 0 || i < x_pieces)
            llm__cp_async_16(x_stage + i * 16,
                from->x + ((int64_t)half * from->n + token) * 64 + i % 4 * 16, true);
    }
    if ((Layout::zero || Layout::minimums) && threadIdx.x < Tokens / 2) { /* (2, Tokens) f32 */
        int half = threadIdx.x / (Tokens / 4),
            token = min((int)threadIdx.x % (Tokens / 4) * 4, from->last_token / 4 * 4);
        llm__cp_async_16(x_stage + (x_pieces + threadIdx.x) * 16,
            from->sums + half * from->sums_stride + token, true);
    }
    from->weights += Layout::chunk_bytes;
    from->x += (int64_t)from->n * 128;
    from->sums += 2 * from->sums_stride;
}

enum { LLM__SPLIT_THREADS = 128 }; /* tiles with at most this many threads per SM are split */

struct llm__split { /* for tiles whose quarters have their own blocks */
    float4 *totals; /* (tile, quarter, fragment, thread) */
    unsigned *done; /* (tile) finished quarters; 0 between kernels */
};

/* Store the totals of a block's quarter. In the last block of a tile, which returns true, add up
 * those of all quarters. */
template <int N>
LLM_DEVICE bool llm__add_quarters(float (&totals)[N][4], const llm__split &split) {
    int64_t size = N * blockDim.x; /* of a quarter */
    float4 *parts = split.totals + blockIdx.x * LLM__QUARTERS * size + threadIdx.x;
LLM_UNROLL
    for (int i = 0; i < N; i++)
        parts[blockIdx.y * size + i * blockDim.x] =
            make_float4(totals[i][0], totals[i][1], totals[i][2], totals[i][3]);
    if (!llm__is_last(split.done + blockIdx.x, LLM__QUARTERS)) return false;
LLM_UNROLL
    for (int i = 0; i < N; i++)
LLM_UNROLL
        for (int q = 0; q < LLM__QUARTERS; q++) {
            float4 part = __ldcg(&parts[q * size + i * blockDim.x]);
            totals[i][0] = (q ? totals[i][0] : 0.0f) + part.x;
            totals[i][1] = (q ? totals[i][1] : 0.0f) + part.y;
            totals[i][2] = (q ? totals[i][2] : 0.0f) + part.z;
            totals[i][3] = (q ? totals[i][3] : 0.0f) + part.w;
        }
    return true;
}

/* blockIdx.x: tile of the result; y: quarter, if tiles are split. */
template <class Layout, int Rows, int Tokens>
LLM_KERNEL __launch_bounds__((llm__many_shape<Layout, Rows, Tokens>::threads), 1)
    llm__matmul_many_kernel(llm__products p, llm__rounded x, int token_tiles, llm__split split) {
    llm__take_over();
    typedef llm__many_shape<Layout, Rows, Tokens> shape;
    constexpr int N = shape::N, stages = shape::stages;
    LLM_DYNAMIC_SHARED(char, shared); /* (stages, stage_bytes) */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int down = warp / shape::warps_across, across = warp % shape::warps_across;
    int64_t block = blockIdx.x / token_tiles;
    const llm__product &product = llm__find_product(p, Rows / LLM__TILE_ROWS, &block);
    const llm__packed &w = product.w;
    int64_t first_tile = block * (Rows / LLM__TILE_ROWS);
    int64_t first_token = (int64_t)(blockIdx.x % token_tiles) * Tokens;

    /* first segment, first chunk and number of chunks of the block */
    bool split_up = shape::may_split && gridDim.y > 1;
    int segment = split_up ? blockIdx.y * 4 : 0, first = llm__segment_chunk(&w, segment),
        n = (split_up ? llm__segment_chunk(&w, segment + 4) : w.n_chunks) - first;
    llm__chunk_source from = {w.chunks + (first_tile * w.n_chunks + first) * Layout::chunk_bytes,
        x.values + ((int64_t)2 * first * x.n + first_token) * 64,
        x.sums + (int64_t)2 * first * llm__sums_stride(x.n) + first_token,
        (int64_t)w.n_chunks * Layout::chunk_bytes, (int)(w.n_tiles - 1 - first_tile),
        (int)(x.n - 1 - first_token), x.n, llm__sums_stride(x.n)};
    for (int c = 0; c < stages - 1; c++) {
        if (c < n)
            llm__load_stage<Layout, Rows, Tokens>(shared + c * shape::stage_bytes, &from);
        llm__cp_async_commit(); /* even if the group is empty, so that there is one per chunk */
    }
    float sums[2 * N][4] = {}, quarter[2 * N][4] = {}, totals[2 * N][4] = {};
    int segment_end = llm__segment_chunk(&w, segment + 1) - first;
    for (int c = 0; c < n; c++) {
        llm__cp_async_wait<stages - 2>();
        __syncthreads(); /* all threads can read chunk c; the stage of chunk c - 1 is free */
        int next = c + stages - 1;
        if (next < n)
            llm__load_stage<Layout, Rows, Tokens>(
                shared + next % stages * shape::stage_bytes, &from);
        llm__cp_async_commit();

        const char *stage = shared + c % stages * shape::stage_bytes;
        const char *x_stage = stage + Rows / LLM__TILE_ROWS * Layout::chunk_bytes;
        Layout weights[2];
        llm__scales scales[2][2];
LLM_UNROLL
        for (int r = 0; r < 2; r++) {
            const char *chunk = stage + (down * 2 + r) * Layout::chunk_bytes;
            weights[r].load(chunk, lane);
            Layout::scales(w, chunk, lane, scales[r]);
        }
LLM_UNROLL
        for (int half = 0; half < 2; half++) {
            uint32_t a[2][2][4];
            weights[0].unpack(half, a[0]), weights[1].unpack(half, a[1]);
LLM_UNROLL
            for (int i = 0; i < N; i++) {
                int token = (across * N + i) * 8;
                uint4 input = llm__load_16(x_stage + (half * Tokens + token) * 64 + lane * 16);
                float2 input_sums = make_float2(0.0f, 0.0f);
                if (Layout::zero || Layout::minimums)
                    input_sums = *(const float2 *)(x_stage + shape::x_bytes +
                        (half * Tokens + token + lane % 4 * 2) * 4);
LLM_UNROLL
                for (int r = 0; r < 2; r++)
                    llm__multiply<Layout>(
                        sums[r * N + i], a[r], scales[r][half], input, input_sums);
            }
        }
        if (c + 1 < segment_end) continue;
        segment_end = llm__segment_chunk(&w, ++segment + 1) - first;
        if (Layout::scaled) llm__move_sums<2 * N>(quarter, sums);
        if (segment % 4 == 0) llm__move_sums<2 * N>(totals, Layout::scaled ? quarter : sums);
    }
    if (segment % 4) llm__move_sums<2 * N>(totals, Layout::scaled ? quarter : sums);
    if (split_up && !llm__add_quarters(totals, split)) return;
LLM_UNROLL
    for (int r = 0; r < 2; r++)
LLM_UNROLL
        for (int i = 0; i < N; i++)
LLM_UNROLL
            for (int j = 0; j < 4; j++) {
                int64_t token = first_token + (across * N + i) * 8 + lane % 4 * 2 + j % 2;
                int64_t row = (first_tile + down * 2 + r) * LLM__TILE_ROWS + lane / 4 + j / 2 * 8;
                if (token < x.n && row < w.rows)
                    llm__finish(w, product.o, x, Layout::unit, token, row, totals[r * N + i][j]);
            }
}

/* ---- The same on Hopper ----
 * WGMMA. Only instructions of a warpgroup, four consecutive warps, run Hopper's tensor cores at
 * full speed: D (64 x 128) += A (64 x 16) x B (16 x 128). Each warp has 16 rows of A and D in
 * registers, as for mma.m16n8k16, so the packed weights fit. B is 128 tokens of x in shared memory.
 * The instruction only starts the work: until a wait, nothing may read or write D, or write A's
 * registers or B.
 *
 * B IN SHARED MEMORY. A row of 128 bytes is a token's 64 columns of a chunk, in eight pieces of 16
 * bytes; row r has piece i at i ^ r % 8, so eight rows use different banks ("128-byte swizzle").
 * Each 8 rows are 1024 bytes at a multiple of 1024. The rounding kernel writes x in this form, with
 * columns in the order of the packed weights: one bulk copy fetches a block's tokens.
 *
 * A block computes 128 rows by 128 or 256 tokens. Each of two warpgroups has half of the rows, and
 * unpacks weights while the tensor cores multiply earlier ones. A stage is full when its bytes have
 * arrived, and empty when all eight warps have finished with it; then warp 0 starts the next
 * copies.
 *
 * THE SUMS DIFFER FROM CHAPTER [3]: a scale multiplies the integers, half of them times 16, and the
 * result is rounded to f16 (weights above 4094: infinity); there are no segments. So deterministic
 * mode does not use this kernel. Bytes: as above. */

enum { LLM__WGMMA_TOKENS = 128, LLM__WGMMA_TILES = 8 }; /* tokens per wgmma; tiles per block */

template <class Layout, int N>
struct llm__wgmma_shape { /* N: wgmmas side by side */
    enum {
        x_bytes = N * LLM__WGMMA_TOKENS * LLM__CHUNK * 2, /* per stage */
        weight_bytes = LLM__WGMMA_TILES * Layout::chunk_bytes,
        room = 220 << 10,
        stages = room / (x_bytes + weight_bytes) < 8 ? room / (x_bytes + weight_bytes) : 8,
        bytes = 1024 + stages * (x_bytes + weight_bytes) /* 1024: to align the first stage */
    };
};

/* The descriptor of B, in units of 16 bytes: its address; if transposed, the distance to the next
 * 64 columns; 1024 bytes between groups of 8 rows; the swizzle. */
LLM_DEVICE uint64_t llm__wgmma_b(const char *x, int next = 16) {
    return (uint64_t)(llm__shared_address(x) >> 4 & 0x3fff) | (uint64_t)(next >> 4) << 16 |
        (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Half a chunk of weights as f16, times their scales. The chunk is read half by half: no register
 * of `a` may be loaded while a wgmma reads it. */
template <class Layout>
LLM_DEVICE void llm__scaled_weights(
    const llm__packed &w, const char *chunk, int half, int lane, uint32_t a[2][4]) {
    constexpr bool bits4 = Layout::unit == 1 << 24;
    constexpr float times = Layout::unit == 16 ? 16.0f : 1.0f; /* the unit of q6_K */
    constexpr float per_minimum = bits4 ? -8.0f : 1.0f / LLM__OF_SUMS;
    Layout weights;
    llm__scales scales[2];
    weights.load(chunk, lane);
    weights.unpack(half, a);
    Layout::scales(w, chunk, lane, scales);
LLM_UNROLL
    for (int i = 0; Layout::scaled && i < 8; i++) {
        const llm__scales &s = scales[half];
        uint32_t &pair = a[i / 4][i % 4];
        bool by_16 = i & 2; /* see llm__unpack_q4 */
        float scale = s.scale[i % 2] * times,
              minimum = Layout::minimums ? s.minimum[i % 2] * (per_minimum * (by_16 ? 16 : 1)) : 0;
        if (bits4) /* subtract 1024 and the zero point, 8 or 16 x 8 */
            pair = llm__pair_fma(pair | LLM__F16_1024, LLM__F16_1,
                !Layout::zero ? 0xe400e400u
                    : by_16   ? 0xe480e480u
                              : 0xe408e408u);
        pair = llm__pair_fma(pair, llm__pair(scale, scale), llm__pair(minimum, minimum));
    }
}

/* The body exists only in code for sm_90a. */
template <class Layout, int N>
LLM_KERNEL __launch_bounds__(256, 1)
    llm__matmul_wgmma_kernel(llm__products p, llm__rounded x, int token_tiles) {
#if defined(LLM_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef llm__wgmma_shape<Layout, N> shape;
    constexpr int stages = shape::stages;
    LLM_SHARED(uint64_t, full, stages);
    LLM_SHARED(uint64_t, empty, stages);
    LLM_DYNAMIC_SHARED(char, shared);
    char *x_stages = shared + -llm__shared_address(shared) % 1024,
         *w_stages = x_stages + stages * shape::x_bytes;
    llm__take_over();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t block = blockIdx.x / token_tiles;
    const llm__product &product = llm__find_product(p, LLM__WGMMA_TILES, &block);
    const llm__packed &w = product.w;
    int first_token = (int)(blockIdx.x % token_tiles) * N * LLM__WGMMA_TOKENS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++)
            llm__mbarrier_init(full + i, 1), llm__mbarrier_init(empty + i, 8);
        llm__fence_async();
    }
    __syncthreads();

    /* Lanes 0 to 7 of warp 0 copy a tile each (instead of a missing tile, the last one), lane 8
     * copies x. Sums of missing tokens are not used. */
    int64_t tile = min(block * LLM__WGMMA_TILES + lane, (int64_t)w.n_tiles - 1);
    const char *source = w.chunks + tile * w.n_chunks * Layout::chunk_bytes;
    uint32_t x_bytes = (uint32_t)min(N * LLM__WGMMA_TOKENS, x.n - first_token) * 128;
    auto load = [&](int c, int stage) {
        if (lane == 0) llm__mbarrier_arrive(full + stage, x_bytes + shape::weight_bytes);
        __syncwarp();
        if (lane < LLM__WGMMA_TILES)
            llm__copy_bulk(w_stages + stage * shape::weight_bytes + lane * Layout::chunk_bytes,
                source + (int64_t)c * Layout::chunk_bytes, Layout::chunk_bytes, full + stage);
        if (lane == LLM__WGMMA_TILES)
            llm__copy_bulk(x_stages + stage * shape::x_bytes,
                x.values + ((int64_t)c * x.n + first_token) * 128, x_bytes, full + stage);
        __syncwarp(); /* wgmma needs all lanes */
    };
    for (int c = 0; warp == 0 && c < stages && c < w.n_chunks; c++) load(c, c);

    float sums[N][64] = {};
    llm__wgmma_wait<0>(sums); /* else the compiler may zero them in the loop, between wgmmas */
    uint32_t a[2][2][4]; /* halves of a chunk; one is in use while the other is unpacked */
    int stage = 0, parity = 0; /* of chunk c */
    for (int c = 0; c < w.n_chunks; c++) {
        const char *weights = w_stages + stage * shape::weight_bytes + warp * Layout::chunk_bytes;
        uint64_t b = llm__wgmma_b(x_stages + stage * shape::x_bytes);
        llm__mbarrier_wait(full + stage, parity);
LLM_UNROLL
        for (int half = 0; half < 2; half++) {
            llm__scaled_weights<Layout>(w, weights, half, lane, a[half]);
            llm__wgmma_fence(a[half]);
LLM_UNROLL
            for (int i = 0; i < 2 * N; i++)
                llm__wgmma_m64n128k16<0>(sums[i / 2], a[half][i % 2],
                    b + half * 4 + i % 2 * 2 + i / 2 * (LLM__WGMMA_TOKENS * 128 / 16));
            llm__wgmma_commit();
            llm__wgmma_wait<1>(sums); /* the previous half is done */
            if (half == 0 && c > 0 && lane == 0)
                llm__mbarrier_arrive(empty + (stage ? stage : stages) - 1);
        }
        if (warp == 0 && c >= 2 && c - 2 + stages < w.n_chunks) { /* fill chunk c - 2's stage */
            int round = stage < 2, last = stage - 2 + round * stages;
            llm__mbarrier_wait(empty + last, parity ^ round);
            load(c - 2 + stages, last);
        }
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    llm__wgmma_wait<0>(sums);
    int64_t row = (block * LLM__WGMMA_TILES + warp) * LLM__TILE_ROWS + lane / 4;
LLM_UNROLL
    for (int i = 0; i < N * 64; i++) {
        int token = first_token + i / 4 * 8 + lane % 4 * 2 + i % 2, below = i % 4 / 2 * 8;
        if (token < x.n && row + below < w.rows)
            llm__finish(w, product.o, x, 1, token, row + below, sums[i / 64][i % 64]);
    }
#endif
}

/* ---- Which kernel ---- */

/* Tests set this to run the kernels for large matrices on small ones; 0: the GPU's SMs. (weak: a
 * program may contain this file twice, for a GPU and emulated.) */
__attribute__((weak)) int llm__pretended_processors = 0;

static int64_t llm__processors(const llm__cuda *cuda) {
    return llm__pretended_processors ? llm__pretended_processors : cuda->n_processors;
}

template <class Layout>
static void llm__launch_one(llm__cuda *cuda, const llm__products &p, const llm__rounded &x) {
    typedef llm__one_shape<Layout> shape;
    auto matmul_one_kernel = llm__matmul_one_kernel<Layout>;
    LLM__START(cuda, matmul_one_kernel, llm__all_row_blocks(p, shape::R), 32 * LLM__QUARTERS,
        shape::shared_bytes, p, x);
}

template <class Layout, int R, int N>
static void llm__launch_few(llm__cuda *cuda, const llm__products &p, const llm__rounded &x) {
    typedef llm__few_shape<Layout, R, N> shape;
    auto matmul_few_kernel = llm__matmul_few_kernel<Layout, R, N, false>;
    LLM__START(cuda, matmul_few_kernel, llm__all_row_blocks(p, R), 32 * LLM__QUARTERS,
        shape::shared_bytes, p, x, llm__experts{});
}

/* The same for the groups of experts' rows. */
template <class Layout, int R, int N>
static void llm__launch_experts(llm__cuda *cuda, const llm__products &p, const llm__rounded &x,
    const llm__experts &experts) {
    typedef llm__few_shape<Layout, R, N> shape;
    auto matmul_experts_kernel = llm__matmul_few_kernel<Layout, R, N, true>;
    LLM__START(cuda, matmul_experts_kernel,
        dim3((unsigned)llm__all_row_blocks(p, R), (unsigned)experts.n_groups),
        32 * LLM__QUARTERS, shape::shared_bytes, p, x, experts);
}

template <class Layout, int Rows, int Tokens>
static void llm__launch_many(llm__cuda *cuda, const llm__products &p, const llm__rounded &x) {
    typedef llm__many_shape<Layout, Rows, Tokens> shape;
    auto matmul_many_kernel = llm__matmul_many_kernel<Layout, Rows, Tokens>;
    int tiles = (int)llm__ceil_div(x.n, Tokens);
    int64_t blocks = llm__all_row_blocks(p, Rows / LLM__TILE_ROWS) * tiles;
    constexpr int most = Layout::scaled ? LLM__SPLIT_THREADS : LLM__SPLIT_THREADS / 2; /* per SM */
    bool splits = shape::may_split && blocks * shape::threads <= most * llm__processors(cuda) &&
        p.each[0].w.n_chunks >= LLM__QUARTERS &&
        (size_t)blocks < cuda->done_bytes / sizeof(unsigned) &&
        (size_t)blocks * LLM__QUARTERS * Rows * Tokens * sizeof(float) <= cuda->quarters_bytes &&
        llm__on(cuda, LLM__SPLIT_K);
    llm__split split = {(float4 *)cuda->quarters, (unsigned *)cuda->done + 1};
    LLM__START(cuda, matmul_many_kernel, dim3((unsigned)blocks, splits ? (int)LLM__QUARTERS : 1),
        shape::threads, shape::stages * shape::stage_bytes, p, x, tiles, split);
}

template <class Layout, int N>
static void llm__launch_wgmma(llm__cuda *cuda, const llm__products &p, const llm__rounded &x) {
    auto matmul_wgmma_kernel = llm__matmul_wgmma_kernel<Layout, N>;
    int tiles = (int)llm__ceil_div(x.n, N * LLM__WGMMA_TOKENS),
        bytes = llm__wgmma_shape<Layout, N>::bytes;
    LLM__START(cuda, matmul_wgmma_kernel, llm__all_row_blocks(p, LLM__WGMMA_TILES) * tiles, 256,
        bytes, p, x, tiles);
}

/* The number of wgmmas side by side, for these tokens and blocks; 0: wgmma cannot be used, or would
 * leave most SMs idle. */
static int llm__wgmmas(const llm__cuda *cuda, const llm__products &p, int n) {
    int64_t blocks = llm__all_row_blocks(p, LLM__WGMMA_TILES), processors = llm__processors(cuda);
    if (!cuda->wgmma || n <= LLM__WGMMA_TOKENS / 2 ||
        2 * blocks * llm__ceil_div(n, LLM__WGMMA_TOKENS) < processors ||
        !llm__on(cuda, LLM__WGMMA + p.each[0].w.layout))
        return 0;
    return blocks * llm__ceil_div(n, 2 * LLM__WGMMA_TOKENS) >= processors ? 2 : 1;
}

/* Choose the fastest kernel from n and the number of blocks per SM. All except wgmma give the same
 * sums. */
template <class Layout>
static void llm__launch_matmul(llm__cuda *cuda, const llm__products &p, const llm__rounded &x) {
    constexpr int large = Layout::scaled ? 64 : 128; /* tokens; unpacking also needs registers */
    int64_t processors = llm__processors(cuda);
    bool few = x.n <= LLM__FEW_TOKENS && llm__on(cuda, LLM__FEW + p.each[0].w.layout);
    if (x.tiles && llm__wgmmas(cuda, p, x.n) > 1) llm__launch_wgmma<Layout, 2>(cuda, p, x);
    else if (x.tiles) llm__launch_wgmma<Layout, 1>(cuda, p, x);
    else if (few && Layout::scaled && x.n == 1) llm__launch_one<Layout>(cuda, p, x);
    else if (few && x.n <= 8 && llm__all_row_blocks(p, 2) < 4 * processors)
        llm__launch_few<Layout, 1, 1>(cuda, p, x);
    else if (few && x.n <= 8) llm__launch_few<Layout, 2, 1>(cuda, p, x);
    else if (few && llm__all_row_blocks(p, 4) < processors)
        llm__launch_few<Layout, 2, 2>(cuda, p, x);
    else if (few) llm__launch_few<Layout, 4, 2>(cuda, p, x);
    else if (x.n <= 32 || llm__all_row_blocks(p, 4) * llm__ceil_div(x.n, 64) < processors)
        llm__launch_many<Layout, 64, 32>(cuda, p, x);
    else if (llm__all_row_blocks(p, 8) * llm__ceil_div(x.n, large) < processors)
        llm__launch_many<Layout, Layout::scaled ? 128 : 64, 64>(cuda, p, x);
    else llm__launch_many<Layout, 128, large>(cuda, p, x);
}

/* Reserve memory for rounded x. A matmul whose rows do not fit is done in parts. */
static bool llm__matmul_reserve(llm__cuda *cuda, llm_error *err) {
    cuda->x = NULL;
    size_t rows = (size_t)cuda->largest.max_tokens + 7,
           chunks = (size_t)llm__ceil_div(cuda->largest.max_cols, LLM__CHUNK);
    /* minimum: 8 rows of the wide x, for f32 weights */
    size_t wide = 8 * llm__rounded_bytes((int64_t)chunks * 3),
           bytes = rows * llm__rounded_bytes((int64_t)chunks);
    /* a counter for each split tile, and one more; totals of up to 32 numbers per thread */
    size_t threads = LLM__SPLIT_THREADS * (size_t)llm__processors(cuda),
           counters = (1 + threads / 128) * sizeof(unsigned),
           totals = threads * LLM__QUARTERS * 32 * sizeof(float);
    if (cuda->largest.max_tokens <= LLM__FEW_TOKENS) totals = 0;
    bool cleared = cuda->done_bytes >= counters;
    if (!llm__cuda_scratch(cuda, &cuda->done, &cuda->done_bytes, counters, "counters", err) ||
        !llm__cuda_scratch(cuda, &cuda->quarters, &cuda->quarters_bytes, totals,
            "quarters of products (smaller steps need less)", err) ||
        (!cleared &&
            !llm__cuda_check(cuda, cudaMemsetAsync(cuda->done, 0, counters, cuda->stream),
                "clearing counters", err)))
        return false;
    if (cuda->largest.group_bytes &&
        !llm__cuda_scratch(cuda, &cuda->groups, &cuda->groups_bytes,
            (size_t)cuda->largest.group_bytes, "the groups of experts' rows", err))
        return false;
    if (bytes < wide) bytes = wide;
    if (bytes < (size_t)cuda->largest.experts_bytes) bytes = (size_t)cuda->largest.experts_bytes;
    return llm__cuda_scratch(cuda, &cuda->rounded, &cuda->rounded_bytes, bytes,
        "rounded activations (smaller steps need less)", err);
}

static bool llm__overlap(const float *a, int64_t n_a, const float *b, int64_t n_b) {
    return a < b + n_b && b < a + n_a;
}

/* Rows of rounded x for which memory is reserved. */
static int64_t llm__most_rounded(const llm__cuda *cuda, const llm__packed *w) {
    int64_t most = (int64_t)(cuda->rounded_bytes / llm__rounded_bytes(w->n_chunks)) / 8 * 8;
    return most < 32768 ? most : 32768; /* so that a grid has fewer than 2^31 blocks */
}

/* The form of x (n, cols) for these matmuls, in the memory reserved for it. */
static llm__rounded llm__rounded_for(const llm__cuda *cuda, const llm__products &p, int n) {
    const llm__packed *w = &p.each[0].w;
    llm__rounded x = {cuda->rounded, NULL, NULL, n, w->n_chunks, (int)w->cols, w->plane_chunks, 0,
        llm__wgmmas(cuda, p, n) > 0};
    x.sums = (float *)(x.values + (size_t)w->n_chunks * LLM__CHUNK * 2 * n);
    x.scales = x.sums + (size_t)w->n_chunks * 2 * llm__sums_stride(n);
    llm__with_layout(w->layout, [&](auto layout) { x.integers = decltype(layout)::scaled; });
    return x;
}

static void llm__cuda_matmul_part(llm__cuda *cuda, const float *x, const llm__products &p, int n) {
    const llm__packed *w = &p.each[0].w;
    /* The kernels for many rows cannot read a single row of sums. */
    bool plain = (n > LLM__FEW_TOKENS || !llm__on(cuda, LLM__FEW + w->layout)) &&
        (n == 1 || !llm__on(cuda, LLM__MANY + w->layout));
    for (int i = 0; i < p.n && plain; i++) {
        w = &p.each[i].w;
        dim3 grid(llm__grid(llm__ceil_div(w->rows, 4), INT32_MAX), llm__grid(n, 65535));
        llm__with_layout(w->layout, [&](auto layout) {
            auto plain_matmul_kernel = llm__plain_matmul_kernel<decltype(layout)>;
            LLM__START(cuda, plain_matmul_kernel, grid, 128, 0, *w, x, n, p.each[i].o,
                llm__experts{});
        });
    }
    if (plain) return;
    llm__rounded rounded = llm__rounded_for(cuda, p, n);
    if (cuda->x != x || memcmp(&cuda->form, &rounded, sizeof rounded) ||
        cuda->x_launches != cuda->launches) {
        int64_t threads = llm__ceil_div(w->cols, 8 * 32) * 32; /* eight columns each */
        LLM__START(cuda, llm__round_kernel, n, llm__grid(threads, 1024), 0, x, rounded);
    }
    llm__with_layout(
        w->layout, [&](auto layout) { llm__launch_matmul<decltype(layout)>(cuda, p, rounded); });
    llm__rounded_is(cuda, x, rounded);
    for (int i = 0; i < p.n; i++)
        if (llm__overlap(x, (int64_t)n * w->cols, p.each[i].o.out, n * p.each[i].w.rows))
            cuda->x = NULL;
    if (p.next.rounded.n) llm__rounded_is(cuda, p.next.out, p.next.rounded);
}

/* Rows of a group: 16 if the experts have many rows each. */
static int llm__group_size(int64_t rows, int n_experts) { return rows > 8 * n_experts ? 16 : 8; }

/* out (rows, w.rows) = each row of x times its expert's matrix, whose type and shape are w's. */
static void llm__cuda_experts(llm__cuda *cuda, const float *x, const llm__packed &w, int rows,
    llm__experts experts, float *out) {
    llm__products p;
    memset(&p, 0, sizeof p);
    p.n = 1;
    p.each[0].w = w;
    p.each[0].o.out = out;
    int size = llm__group_size(rows, experts.n);
    experts.n_groups = (int)llm__most_groups(rows, experts.n, size);
    if (!llm__on(cuda, LLM__FEW + w.layout)) {
        dim3 grid(llm__grid(llm__ceil_div(w.rows, 4), INT32_MAX), llm__grid(rows, 65535));
        llm__with_layout(w.layout, [&](auto layout) {
            auto plain_matmul_kernel = llm__plain_matmul_kernel<decltype(layout)>;
            LLM__START(
                cuda, plain_matmul_kernel, grid, 128, 0, w, x, rows, p.each[0].o, experts);
        });
        return;
    }
    llm__rounded rounded = llm__rounded_for(cuda, p, experts.n_groups * size);
    rounded.tiles = false;
    if (cuda->x != x || memcmp(&cuda->form, &rounded, sizeof rounded) ||
        cuda->x_launches != cuda->launches)
        LLM__START(cuda, llm__round_groups_kernel, rounded.n,
            llm__grid(llm__ceil_div(w.cols, 8 * 32) * 32, 1024), 0, x, rounded, experts, size);
    llm__with_layout(w.layout, [&](auto layout) {
        if (size == 8) llm__launch_experts<decltype(layout), 2, 1>(cuda, p, rounded, experts);
        else llm__launch_experts<decltype(layout), 4, 2>(cuda, p, rounded, experts);
    });
    llm__rounded_is(cuda, x, rounded);
}

/* Compute one product, or several with the same x, grouped by llm__join. */
static void llm__cuda_matmuls(llm__cuda *cuda, const float *x, llm__products *p, int n) {
    const llm__packed *w = &p->each[0].w;
    if (n < 1 || w->rows < 1) return;
    int64_t most = llm__most_rounded(cuda, w);
    if (n > LLM__FEW_TOKENS && most > LLM__FEW_TOKENS && !llm__on(cuda, LLM__MANY + w->layout))
        most = LLM__FEW_TOKENS;
    if (most < 1) {
        if (cuda->failure.status == LLM_OK)
            llm__cuda_fail(
                cuda, &cuda->failure, LLM_ERROR_DEVICE, "a matrix is wider than what was reserved");
        return;
    }
    for (int64_t first = 0; first < n; first += most) {
        int64_t rows = n - first < most ? n - first : most;
        llm__cuda_matmul_part(cuda, x + first * w->cols, *p, (int)rows);
        for (int i = 0; i < p->n; i++) p->each[i].o.out += rows * p->each[i].w.rows;
    }
}

/* ========================================
 * [5] Attention, many queries of a sequence (prefill)
 *
 * A query's scores are its dot products with the keys of the positions it sees. Its result is the
 * sum of their values, weighted by the softmax of the scores. A block computes 128 rows (a row: the
 * query of one head of one token) that share a kv head, so each key and value it reads, mostly from
 * the L2 cache, serves 128 rows. The limit is arithmetic.
 *
 * ONLINE SOFTMAX (Milakov and Gimelshein 2018; Dao et al. 2022). The matrix of all scores is never
 * stored: keys arrive in tiles of 64 positions. Each row keeps m, about its largest score so far;
 * the sum of exp(score - m), l; and the sum of value x exp(score - m), `sums`. When a tile has a
 * score m' more than LLM__SLACK above m, l and `sums` are first multiplied by exp(m - m'), and m
 * becomes m'. (The code uses scores times log2(e) and 2^x. Weights up to 2^LLM__SLACK are no less
 * exact in f16.)
 *
 *     16 rows of q    x   K tile (64, head_dim)   ->   scores (16, 64)
 *     f16, registers      f16, shared memory           f32, registers
 *
 *     weights (16, 64) x  V tile (64, head_dim)   ->   sums (16, head_dim)
 *     f16, registers      f16, shared memory           f32, registers
 *
 * A warp does this for 16 rows. The first product leaves the scores in the registers where the
 * second one needs its matrix A. Up to head_dim 64, blocks have 64 rows, so that an SM has several;
 * above 128, they have 32 rows, and tiles 32 positions.
 *
 * ORDER OF SUMS. A token's result has the same bits whether it is computed alone or in a chunk of a
 * prompt: tiles begin at multiples of 64 positions, and each 256 positions form a part with its own
 * m, l and sums. Parts are merged in order: here by the block; in chapter [6] by a second kernel.
 *
 * ROUNDING. Weights and q (each row scaled by a power of two) are rounded to f16; sums are f32.
 * ===================================== */

struct llm__attention_args {
    /* as in llm__device_batch; items: of one kind */
    const int32_t *positions, *slots, *parents, *sequence_of, *block_tables, *counts;
    const llm__attention_item *items;
    /* as in llm_attention_shape and llm_cache; group: query heads per kv head */
    int n_heads, n_kv_heads, group, head_dim, block_size, window;
    uint32_t multiplier, shift; /* for p / block_size */
    float scale; /* factor of the dot product of q and k */
    float cap, alibi; /* as in llm_attention_shape */
    llm_type cache_type; /* LLM_F16 or LLM_F32 */
    const char *keys, *values; /* device (n_blocks, n_kv_heads, block_size, head_dim): one layer */
    const float *q; /* device (T, n_heads, head_dim) */
    float *out; /* device (T, n_heads, head_dim) */
    float *parts; /* device (part rows, n_kv_heads, head_dim + 4): sums, m, l, two unused */
};

enum {
    LLM__PART = 256, /* positions in a part */
    LLM__FEW_ROWS = 32, /* most rows per sequence and kv head for chapter [6] */
    LLM__FEW_TILE = 16, /* rows of chapter [6]'s tiles */
    LLM__MMA_HEAD_DIM = 256, /* largest head_dim for the kernels with matrix instructions */
    LLM__WGMMA_T = 128, /* positions in a tile of the kernel for Hopper */
    LLM__WGMMA_HALF = LLM__WGMMA_T * 128, /* bytes of 64 dimensions of such a tile */
    LLM__WGMMA_SHARED = 1024 + 8 * LLM__WGMMA_HALF, /* two stages of keys and values, aligned */
    LLM__SLACK = 8 /* m is raised for scores that exceed it by more */
};

LLM_DEVICE float llm__cache_value(llm_type type, const char *side, int64_t i) {
    return type == LLM_F16 ? llm__from_f16(((const uint16_t *)side)[i]) : ((const float *)side)[i];
}

/* The index of the cache row (head_dim values of one layer and kv head) for position p of a
 * sequence with this block table. */
LLM_DEVICE int64_t llm__position_row(
    const llm__attention_args &a, const int32_t *table, int kv_head, int p) {
    /* p / a.block_size, without a division */
    int block = (int)((uint32_t)((uint64_t)(2 * (uint32_t)p) * a.multiplier >> 32) >> a.shift);
    return ((int64_t)table[block] * a.n_kv_heads + kv_head) * a.block_size + p -
        block * a.block_size;
}

/* The same for a position that a token of a tree sees: its own or that of an ancestor. */
LLM_DEVICE int64_t llm__branch_row(
    const llm__attention_args &a, int token, int kv_head, int p) {
    while (a.positions[token] > p) token = a.parents[token];
    int slot = a.slots[token], block = slot / a.block_size;
    return ((int64_t)block * a.n_kv_heads + kv_head) * a.block_size + slot - block * a.block_size;
}

/* The first position of a token's tree; INT32_MAX: it is in no tree. */
LLM_DEVICE int llm__first_branch(const llm__attention_args &a, int token) {
    if (a.parents[token] < 0) return INT32_MAX;
    while (a.parents[token] >= 0) token = a.parents[token];
    return a.positions[token];
}

/* See llm.h. */
LLM_DEVICE float llm__alibi_slope(const llm__attention_args &a, int head) {
    int n = 1 << (31 - __clz(a.n_heads));
    float part = head < n ? (float)head + 1.0f : (float)(head - n) + 0.5f;
    return exp2f(-a.alibi * part / (float)n);
}

/* ---- The plain form ----
 * One block per query. Each thread computes the score of one position of a tile, then sums some
 * dimensions over the tile. blockIdx.x: head; y: token. */
LLM_KERNEL llm__plain_attention_kernel(llm__attention_args a, int n_tokens) {
    llm__take_over();
    LLM_SHARED(float, scratch, 32);
    LLM_SHARED(float, scores, 128);
    LLM_DYNAMIC_SHARED(float, sums); /* (head_dim) */
    int head = blockIdx.x, kv_head = head / (a.n_heads / a.n_kv_heads);
    for (int64_t token = blockIdx.y; token < n_tokens; token += gridDim.y) {
        int sequence = a.sequence_of[token];
        if (sequence < 0) continue;
        const int32_t *table = a.block_tables + (int64_t)sequence * a.counts[3];
        const float *q = a.q + (token * a.n_heads + head) * a.head_dim;
        int end = a.positions[token] + 1, first = a.window && end > a.window ? end - a.window : 0;
        int branch = llm__first_branch(a, (int)token);
        auto find = [&](int p) {
            return p < branch ? llm__position_row(a, table, kv_head, p)
                              : llm__branch_row(a, (int)token, kv_head, p);
        };
        float largest = -INFINITY, total = 0.0f;
        for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x) sums[i] = 0.0f;
        for (int tile = first; tile < end; tile += blockDim.x) {
            int p = tile + threadIdx.x,
                n = end - tile < (int)blockDim.x ? end - tile : (int)blockDim.x;
            float score = -INFINITY;
            if (p < end) {
                int64_t row = find(p) * a.head_dim;
                float dot = 0.0f;
                for (int i = 0; i < a.head_dim; i++)
                    dot += q[i] * llm__cache_value(a.cache_type, a.keys, row + i);
                score = dot * a.scale;
                if (a.cap > 0.0f) score = a.cap * tanhf(score / a.cap);
                if (a.alibi > 0.0f) score -= llm__alibi_slope(a, head) * (float)(end - 1 - p);
            }
            float new_largest = fmaxf(largest, llm__block_max(score, scratch));
            float shrink = expf(largest - new_largest), share = expf(score - new_largest);
            scores[threadIdx.x] = share;
            total = total * shrink + llm__block_sum(share, scratch);
            largest = new_largest;
            for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x) {
                float sum = sums[i] * shrink;
                for (int k = 0; k < n; k++)
                    sum += scores[k] *
                        llm__cache_value(a.cache_type, a.values, find(tile + k) * a.head_dim + i);
                sums[i] = sum;
            }
            __syncthreads(); /* before the next tile overwrites `scores` */
        }
        float *out = a.out + (token * a.n_heads + head) * a.head_dim;
        for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x) out[i] = sums[i] / total;
    }
}

/* ---- With matrix instructions ---- */

#ifndef LLM_EMULATED
LLM_DEVICE float llm__exp2(float x) { /* 2^x to 22 bits; 0 for -infinity */
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
static inline float llm__exp2(float x) { return exp2f(x); }
#endif

/* The first position that a token sees. */
__host__ __device__ static inline int llm__window_start(int window, int position) {
    return window && position >= window ? position - window + 1 : 0;
}

/* Offset in the cache, in units of 16 bytes, of position p of an item's sequence; -1: no row sees
 * it. */
LLM_DEVICE int llm__find_position(const llm__attention_args &a, const llm__attention_item &item,
    const int32_t *table, int kv_head, int p) {
    if (p < item.start || p >= item.end) return -1;
    int64_t row = p < item.branch
        ? llm__position_row(a, table, kv_head, p)
        : llm__branch_row(a, item.first_token + item.first_row / a.group, kv_head, p);
    return (int)row * (a.head_dim / 8);
}

/* The offset in q and out of row r of an item's sequence, and the row's position. */
LLM_DEVICE int64_t llm__row_offset(const llm__attention_args &a, const llm__attention_item &item,
    int kv_head, int r, int *position) {
    int token = r / a.group;
    *position = item.first_position + token;
    return ((int64_t)(item.first_token + token) * a.n_heads + kv_head * a.group + r -
               token * a.group) *
        a.head_dim;
}

/* Address for the sums of a row of an item's tile, followed by m and l. NULL: the item is a whole
 * sequence, whose result goes to `out`. */
LLM_DEVICE float *llm__part(
    const llm__attention_args &a, const llm__attention_item &item, int kv_head, int row) {
    if (item.part_row < 0) return NULL;
    return a.parts + ((int64_t)(item.part_row + row) * a.n_kv_heads + kv_head) * (a.head_dim + 4);
}

struct llm__softmax {
    float m, l; /* m: largest score x log2(e) of a row; l: sum of 2^(score x log2(e) - m) */
};

LLM_DEVICE float llm__merged(float before, float part, float a, float b) {
    return fmaf(before, a, __fmul_rn(part, b));
}

/* Merge a part's m and l into the total. *a and *b: the factors for the earlier sums and for the
 * part's. A part with m = -infinity (no position seen) changes nothing. */
LLM_DEVICE void llm__merge(llm__softmax *total, float m, float l, float *a, float *b) {
    float larger = fmaxf(total->m, m), base = larger == -INFINITY ? 0.0f : larger;
    *a = llm__exp2(total->m - base);
    *b = llm__exp2(m - base);
    total->m = larger;
    total->l = llm__merged(total->l, l, *a, *b);
}

/* HD: head_dim, padded with zeros. A block has R groups of 16 rows and C warps per group. These
 * compute the same scores, then HD / C dimensions of the result each (C > 1 if one warp has too few
 * registers, or the others would have no rows). */
template <int HD, int R, int C, int Stages>
struct llm__attention_shape_of {
    enum {
        T = HD > 128 ? 32 : 64, /* positions in a tile; T x HD / 8 is a multiple of `threads` */
        threads = R * C * 32,
        rows = R * 16,
        D = HD / C, /* D: dimensions of the result per warp */
        side_bytes = T * HD * 2, /* bytes of a tile of keys or of values */
        shared_bytes = Stages * 2 * side_bytes
    };
};

/* Byte offset, in a shared-memory tile, of dimensions 8 * d8 to 8 * d8 + 7 of a position. The
 * layout is (HD / 32, position, 4 pieces of 16 bytes). Pieces change order every two positions, and
 * odd groups of 32 dimensions swap neighbouring positions. So 8 lanes read 4 pieces of 2 positions
 * (keys) or 1 of 8 (values), and write 8 of a position, without a bank conflict. A tile of
 * LLM__WGMMA_T positions is (HD / 64, position, 8 pieces), as wgmma reads it. */
template <int T>
LLM_DEVICE int llm__tile_offset(int position, int d8) {
    if (T == LLM__WGMMA_T)
        return d8 / 8 * LLM__WGMMA_HALF + (position * 8 + (d8 % 8 ^ position % 8)) * 16;
    return ((d8 / 4 * T + (position ^ (d8 / 4 & 1))) * 4 + ((d8 % 4) ^ (position / 2 % 4))) * 16;
}

/* A ring of tiles of an item's keys and values in shared memory. Tile i has the positions from
 * start + i T on. */
template <int HD, int T, int Threads, int Stages>
struct llm__tiles {
    enum { side_bytes = T * HD * 2 }; /* bytes of keys or values */
    const llm__attention_args &a;
    const llm__attention_item &item;
    char *ring; /* (Stages, 2, side_bytes): keys, values */
    int *table; /* (Stages, T): see llm__find_position */
    const int32_t *blocks; /* the sequence's block table */
    int start, n; /* first position; number of tiles */
    int ahead; /* the thread's next entry of the table, read one tile ahead */

    LLM_DEVICE int look_up(int tile) const {
        return llm__find_position(a, item, blocks, blockIdx.y, start + tile * T + (int)threadIdx.x);
    }
    LLM_DEVICE llm__tiles(
        const llm__attention_args &a, const llm__attention_item &item, char *ring, int *table)
        : a(a), item(item), ring(ring), table(table) {
        blocks = a.block_tables + (int64_t)item.sequence * a.counts[3];
        start = item.start / T * T;
        n = (item.end - start + T - 1) / T;
        ahead = -1;
        if (threadIdx.x < T) {
LLM_UNROLL
            for (int i = 0; i < Stages - 1; i++) table[i * T + threadIdx.x] = look_up(i);
            ahead = look_up(Stages - 1);
        }
        __syncthreads();
        for (int i = 0; i < Stages - 1; i++) copy(i);
    }
    /* Start to copy a tile. HD / 8 threads copy a row; if HD / 8 divides Threads, a thread always
     * copies the same 8 dimensions. */
    LLM_DEVICE void copy(int tile) {
        constexpr int pieces = HD / 8, rows = T * pieces / Threads, step = Threads / pieces;
        constexpr bool same = Threads % pieces == 0, aligned = same && step % 8 == 0;
        char *keys = ring + tile % Stages * 2 * side_bytes;
        const int *entries = table + tile % Stages * T;
        int first = threadIdx.x / pieces, first_d8 = threadIdx.x % pieces, row[rows];
LLM_UNROLL
        for (int k = 0; k < rows && tile < n; k++)
            row[k] = entries[same ? first + k * step : ((int)threadIdx.x + k * Threads) / pieces];
LLM_UNROLL
        for (int k = 0; k < rows && tile < n; k++) {
            int i = threadIdx.x + k * Threads, d8 = same ? first_d8 : i % pieces;
            int to = aligned ? llm__tile_offset<T>(first, d8) + llm__tile_offset<T>(k * step, 0)
                             : llm__tile_offset<T>(same ? first + k * step : i / pieces, d8);
            bool valid = row[k] >= 0 && d8 * 8 < a.head_dim;
            int64_t from = d8 * 16 + (int64_t)row[k] * 16;
            llm__cp_async_16(keys + to, a.keys + from, valid);
            llm__cp_async_16(keys + side_bytes + to, a.values + from, valid);
        }
        llm__cp_async_commit();
    }
    /* Wait for tile i, start to copy the tile that replaces tile i - 1, and return tile i. */
    LLM_DEVICE const char *next(int i) {
        int tile = i + Stages - 1;
        if (threadIdx.x < T) {
            table[tile % Stages * T + threadIdx.x] = ahead;
            ahead = look_up(tile + 1);
        }
        llm__cp_async_wait<Stages - 2>();
        if (T == LLM__WGMMA_T) llm__fence_async();
        __syncthreads(); /* tile i and the table are complete; tile i - 1 is no longer read */
        copy(tile);
        return ring + i % Stages * 2 * side_bytes;
    }
};

/* Rows g (h = 0) and g + 8 (h = 1) of 16 rows of a tile: their offsets in q and out; positions (-1:
 * no row); and q times scale x log2(e), divided by a power of two (factor), as f16. Lane (g, t) has
 * dimensions 8t to 8t + 7 of each 32, as matmul reads x; for wgmma (InOrder), 2t and 2t + 1 of each
 * 8. */
template <int HD, bool InOrder>
LLM_DEVICE void llm__load_query(uint32_t query[HD / 16][4], float factor[2], int64_t offset[2],
    int position[2], const llm__attention_args &a, const llm__attention_item &item, int kv_head,
    int first, int lane) {
    float x[2][HD / 4], scale = a.scale * 1.44269504f; /* log2(e) */
LLM_UNROLL
    for (int h = 0; h < 2; h++) {
        int row = first + h * 8 + lane / 4;
        offset[h] = llm__row_offset(a, item, kv_head, item.first_row + row, &position[h]);
        if (row >= item.n_rows) position[h] = -1;
LLM_UNROLL
        for (int i = 0; i < HD / 4;
            i += 4) { /* aligned, because head_dim is a multiple of 8 */
            int d = InOrder ? i * 4 + lane % 4 * 2 : i / 8 * 32 + lane % 4 * 8 + i % 8;
            const float *q = a.q + offset[h] + d;
            float4 v = {};
            if (position[h] >= 0 && d < a.head_dim) {
                if (InOrder) {
                    float2 low = *(const float2 *)q, high = *(const float2 *)(q + 8);
                    v = make_float4(low.x, low.y, high.x, high.y);
                } else v = *(const float4 *)q;
            }
            x[h][i] = v.x, x[h][i + 1] = v.y, x[h][i + 2] = v.z, x[h][i + 3] = v.w;
        }
    }
LLM_UNROLL
    for (int h = 0; h < 2; h++) {
        float largest = 0.0f;
LLM_UNROLL
        for (int i = 0; i < HD / 4; i++) largest = fmaxf(largest, fabsf(x[h][i]));
        factor[h] = llm__power_for(llm__four_max(largest) * fabsf(scale));
        /* scale / factor: the exponents of a power of two and its inverse add up to 2 x 127 */
        float by = scale * __uint_as_float((254u << 23) - __float_as_uint(factor[h]));
LLM_UNROLL
        for (int i = 0; i < HD / 4; i += 2)
            query[i / 4][i % 4 + h] = llm__pair(x[h][i] * by, x[h][i + 1] * by);
    }
}

/* scores (16, T) = query times keys. Of each 8 positions, lane (g, t) gets 2t and 2t + 1: for row g
 * in scores[n][0] and [1], for row g + 8 in [2] and [3]. */
template <int HD, int T>
LLM_DEVICE void llm__multiply_keys(
    float scores[T / 8][4], const uint32_t query[HD / 16][4], const char *keys, int lane) {
    const char *own[2] = {keys + llm__tile_offset<T>(lane / 4, lane % 4),
        keys + llm__tile_offset<T>(lane / 4, lane % 4 + 4)};
LLM_UNROLL
    for (int n = 0; n < T / 8; n++) { /* 8 positions each */
LLM_UNROLL
        for (int j = 0; j < 4; j++) scores[n][j] = 0.0f;
LLM_UNROLL
        for (int k = 0; k < HD / 32; k++) {
            uint4 key = llm__load_16(own[k % 2] + llm__tile_offset<T>(n * 8, k / 2 * 8));
            const uint32_t k0[2] = {key.x, key.y}, k1[2] = {key.z, key.w};
            llm__mma_m16n8k16_f16(scores[n], query[2 * k], k0);
            llm__mma_m16n8k16_f16(scores[n], query[2 * k + 1], k1);
        }
    }
}

/* Set the scores of unseen positions to -infinity. position: of rows g and g + 8. */
template <int T>
LLM_DEVICE void llm__hide_unseen(
    float scores[T / 8][4], int window, const int position[2], int tile_start, int lane) {
    int first = tile_start + lane % 4 * 2;
LLM_UNROLL
    for (int j = 0; j < 4; j++) {
        int own = position[j / 2] - first;
        int start = llm__window_start(window, position[j / 2]) - first;
LLM_UNROLL
        for (int n = 0; n < T / 8; n++)
            if (n * 8 + j % 2 > own || n * 8 + j % 2 < start) scores[n][j] = -INFINITY;
    }
}

/* Limit scores: x becomes cap tanh(x / cap). A stored score is x log2(e) / factor. */
template <int T>
LLM_DEVICE void llm__cap_scores(float scores[T / 8][4], const float factor[2], float cap) {
    cap *= 1.44269504f;
LLM_UNROLL
    for (int n = 0; n < T / 8; n++)
LLM_UNROLL
        for (int j = 0; j < 4; j++) {
            float x = scores[n][j] * factor[j / 2] / cap; /* tanh x = 1 - 2 / (e^2x + 1) */
            scores[n][j] =
                cap * (1.0f - 2.0f / (llm__exp2(2.88539008f * x) + 1.0f)) / factor[j / 2];
        }
}

/* Subtract from each score the distance of its position times its row's slope. slopes (16): times
 * log2(e), as scores are; scores are also divided by the factor. */
template <int T>
LLM_DEVICE void llm__add_alibi(float scores[T / 8][4], const float *slopes, const float factor[2],
    const int position[2], int tile_start, int lane) {
LLM_UNROLL
    for (int h = 0; h < 2; h++) {
        float slope = slopes[h * 8 + lane / 4] / factor[h];
        int ahead = tile_start + lane % 4 * 2 - position[h];
LLM_UNROLL
        for (int n = 0; n < T / 8; n++)
LLM_UNROLL
            for (int j = 0; j < 2; j++)
                scores[n][2 * h + j] =
                    fmaf(slope, (float)(ahead + n * 8 + j), scores[n][2 * h + j]);
    }
}

/* Turn scores into weights 2^(score x factor - m), and update m and l; `factor` is a power of two,
 * so the product is exact. The caller multiplies its sums by `shrink`, usually 1. Four lanes share
 * a row; l has only the lane's own weights. */
template <int T>
LLM_DEVICE void llm__weigh(
    float scores[T / 8][4], const float factor[2], llm__softmax now[2], float shrink[2]) {
    float largest[2] = {-INFINITY, -INFINITY}, base[2];
LLM_UNROLL
    for (int n = 0; n < T / 8; n++)
LLM_UNROLL
        for (int j = 0; j < 4; j++) largest[j / 2] = fmaxf(largest[j / 2], scores[n][j]);
LLM_UNROLL
    for (int h = 0; h < 2; h++) {
        largest[h] = __fmul_rn(factor[h], llm__four_max(largest[h]));
        float before = now[h].m, m = largest[h] > before + LLM__SLACK ? largest[h] : before;
        base[h] = m == -INFINITY ? 0.0f : m; /* no position seen yet: all weights are 2^-inf = 0 */
        shrink[h] = before == -INFINITY ? 1.0f : llm__exp2(before - m); /* 1: the sums are zero */
        now[h].m = m;
        now[h].l = __fmul_rn(now[h].l, shrink[h]);
    }
LLM_UNROLL
    for (int n = 0; n < T / 8; n++)
LLM_UNROLL
        for (int j = 0; j < 4; j++) {
            scores[n][j] = llm__exp2(fmaf(scores[n][j], factor[j / 2], -base[j / 2]));
            now[j / 2].l = __fadd_rn(now[j / 2].l, scores[n][j]);
        }
}

/* sums (16, D) += weights (16, T) times values (T, D), for D dimensions from first_d on. */
template <int T, int D>
LLM_DEVICE void llm__multiply_values(float sums[D / 8][4], const float weights[T / 8][4],
    const char *values, int first_d, int lane) {
    const char *own[4]; /* addresses of four pieces of 16 dimensions; offsets add 64 */
LLM_UNROLL
    for (int n = 0; n < 4; n++)
        own[n] = values + llm__tile_offset<T>(lane % 16, first_d / 8 + 2 * n + lane / 16);
LLM_UNROLL
    for (int k = 0; k < T / 16; k++) { /* 16 positions each */
        const float *low = weights[2 * k], *high = weights[2 * k + 1];
        const uint32_t rounded[4] = {llm__pair(low[0], low[1]), llm__pair(low[2], low[3]),
            llm__pair(high[0], high[1]), llm__pair(high[2], high[3])};
LLM_UNROLL
        for (int n = 0; n < D / 16; n++) { /* 16 dimensions each: four 8 x 8 matrices */
            uint32_t v[4];
            llm__ldmatrix_x4_trans(v, own[n % 4] + llm__tile_offset<T>(k * 16, n / 4 * 8));
            llm__mma_m16n8k16_f16(sums[2 * n], rounded, v);
            llm__mma_m16n8k16_f16(sums[2 * n + 1], rounded, v + 2);
        }
    }
}

/* blockIdx.x: item; y: kv head. Bytes: q; keys and values of each item's positions; `out` or, if
 * split, `parts`. The totals of earlier parts are in shared memory (`keep`) or in `out`. */
template <int HD, int R, int C, int Stages>
LLM_KERNEL __launch_bounds__((llm__attention_shape_of<HD, R, C, Stages>::threads))
    llm__attention_kernel(llm__attention_args a, bool keep) {
    llm__take_over();
    typedef llm__attention_shape_of<HD, R, C, Stages> shape;
    constexpr int T = shape::T, D = shape::D;
    LLM_DYNAMIC_SHARED(char, ring); /* see llm__tiles; after them, if `keep`, totals */
    LLM_SHARED(int, table, Stages * T);
    LLM_SHARED(float, slopes, shape::rows);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
    const llm__attention_item item = a.items[blockIdx.x];
    if (!item.n_rows) return;
    for (int r = threadIdx.x; a.alibi > 0.0f && r < shape::rows; r += shape::threads)
        slopes[r] = 1.44269504f *
            llm__alibi_slope(a, kv_head * a.group + (item.first_row + r) % a.group);
    llm__tiles<HD, T, shape::threads, Stages> tiles(a, item, ring, table);

    int position[2];
    int64_t offset[2];
    float factor[2];
    uint32_t query[HD / 16][4]; /* matrix A of two instructions for each 32 dimensions */
    llm__load_query<HD, false>(
        query, factor, offset, position, a, item, kv_head, warp / C * 16, lane);

    float sums[D / 8][4] = {};
    llm__softmax now[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}},
                 total[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
    int first_d = warp % C * D; /* this warp's first dimension of the result */
    /* lowest and highest position of the warp's rows; -1: no rows */
    int lowest = __shfl_sync(0xffffffffu, position[0], 0),
        highest = __reduce_max_sync(0xffffffffu, max(position[0], position[1]));
    for (int i = 0; i < tiles.n; i++) {
        int tile_start = tiles.start + i * T;
        const char *keys = tiles.next(i);
        if (tile_start <= highest && tile_start + T > llm__window_start(a.window, lowest)) {
            float scores[T / 8][4], shrink[2];
            llm__multiply_keys<HD, T>(scores, query, keys, lane);
            if (a.cap > 0.0f) llm__cap_scores<T>(scores, factor, a.cap);
            if (a.alibi > 0.0f)
                llm__add_alibi<T>(
                    scores, slopes + warp / C * 16, factor, position, tile_start, lane);
            if (tile_start + T - 1 > lowest || tile_start < llm__window_start(a.window, highest))
                llm__hide_unseen<T>(scores, a.window, position, tile_start, lane);
            llm__weigh<T>(scores, factor, now, shrink);
            if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f))
LLM_UNROLL
                for (int n = 0; n < D / 8; n++)
LLM_UNROLL
                    for (int j = 0; j < 4; j++)
                        sums[n][j] = __fmul_rn(sums[n][j], shrink[j / 2]);
            llm__multiply_values<T, D>(sums, scores, keys + shape::side_bytes, first_d, lane);
        }
        bool last = i + 1 == tiles.n;
        if (!last && (tile_start + T) % LLM__PART) continue;

        /* at the end of a part: store it (split) or merge it into the totals */
LLM_UNROLL
        for (int h = 0; h < 2; h++) {
            now[h].l = llm__four_sum(now[h].l);
            if (position[h] >= 0) {
                bool split = item.part_row >= 0, first = split || total[h].m == -INFINITY;
                int row = warp / C * 16 + h * 8 + lane / 4, own_d = first_d + lane % 4 * 2;
                float *part = llm__part(a, item, kv_head, row);
                float *totals = (float *)(ring + shape::shared_bytes);
                float *out = (split ? part : a.out + offset[h]) + own_d;
                float *to = keep ? totals + row * (HD + 8) + own_d : out;
                float2 x[D / 8] = {}; /* aligned below: head_dim is a multiple of 8 */
                if (!first)
LLM_UNROLL
                    for (int n = 0; n < D / 8; n++)
                        if (first_d + n * 8 < a.head_dim) x[n] = *(const float2 *)(to + n * 8);
                float before, share;
                llm__merge(&total[h], now[h].m, now[h].l, &before, &share);
                if (split) share = 1.0f;
                if (split && lane % 4 == 0 && first_d == 0)
                    *(float2 *)(part + a.head_dim) = make_float2(now[h].m, now[h].l);
                float divide = !last || split ? 1.0f : 1.0f / total[h].l;
LLM_UNROLL
                for (int n = 0; n < D / 8; n++) {
                    x[n].x = llm__merged(x[n].x, sums[n][2 * h], before, share);
                    x[n].y = llm__merged(x[n].y, sums[n][2 * h + 1], before, share);
                    if (last)
                        x[n] = make_float2(__fmul_rn(x[n].x, divide), __fmul_rn(x[n].y, divide));
                }
                if (last) to = out;
LLM_UNROLL
                for (int n = 0; n < D / 8; n++)
                    if (first_d + n * 8 < a.head_dim) *(float2 *)(to + n * 8) = x[n];
            }
            now[h].m = -INFINITY;
            now[h].l = 0.0f;
LLM_UNROLL
            for (int n = 0; n < D / 8; n++) sums[n][2 * h] = sums[n][2 * h + 1] = 0.0f;
        }
    }
}

/* ---- The same on Hopper, for heads of 128 ----
 * Two warpgroups with 64 rows each. For the scores, the columns of B are positions; for the sums,
 * dimensions ("transposed"). While one warpgroup computes its softmax, the tensor cores work for
 * the other. There are no parts, so the bits differ; deterministic mode does not use this
 * kernel. */
LLM_KERNEL __launch_bounds__(256, 1) llm__attention_wgmma_kernel(llm__attention_args a) {
#if defined(LLM_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int HD = 128, T = LLM__WGMMA_T, half_bytes = LLM__WGMMA_HALF;
    LLM_DYNAMIC_SHARED(char, shared);
    LLM_SHARED(int, table, 2 * T);
    llm__take_over();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
    const llm__attention_item item = a.items[blockIdx.x];
    if (!item.n_rows) return;
    llm__tiles<HD, T, 256, 2> tiles(a, item, shared + -llm__shared_address(shared) % 1024, table);

    int position[2];
    int64_t offset[2];
    float factor[2];
    uint32_t query[HD / 16][4];
    llm__load_query<HD, true>(query, factor, offset, position, a, item, kv_head, warp * 16, lane);
    float sums[HD / 8][4] = {}, scores[T / 8][4];
    uint32_t weights[T / 16][4]; /* the scores, as matrix A */
    llm__softmax now[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
    int lowest = __shfl_sync(0xffffffffu, position[0], 0); /* of the warp; -1: no rows */
    for (int i = 0; i < tiles.n; i++) {
        int tile_start = tiles.start + i * T;
        const char *keys = tiles.next(i);
        uint64_t k_tile = llm__wgmma_b(keys),
                 v_tile = llm__wgmma_b(keys + 2 * half_bytes, half_bytes);
LLM_UNROLL
        for (int n = 0; n < T / 2; n++) scores[n / 4][n % 4] = 0.0f;
        llm__wgmma_fence(query);
LLM_UNROLL
        for (int k = 0; k < HD / 16; k++) /* 16 dimensions each */
            llm__wgmma_m64n128k16<0>(
                scores[0], query[k], k_tile + k / 4 * (half_bytes / 16) + k % 4 * 2);
        llm__wgmma_commit();
        llm__wgmma_wait<0>(scores);

        float shrink[2];
        if (tile_start + T - 1 > lowest || tile_start < llm__window_start(a.window, item.end - 1))
            llm__hide_unseen<T>(scores, a.window, position, tile_start, lane);
        llm__weigh<T>(scores, factor, now, shrink);
LLM_UNROLL
        for (int n = 0; n < HD / 2; n++) sums[n / 4][n % 4] *= shrink[n % 4 / 2];
LLM_UNROLL
        for (int n = 0; n < T / 4; n++)
            weights[n / 4][n % 4] =
                llm__pair(scores[n / 2][n % 2 * 2], scores[n / 2][n % 2 * 2 + 1]);
        llm__wgmma_fence(weights);
LLM_UNROLL
        for (int k = 0; k < T / 16; k++) /* 16 positions each */
            llm__wgmma_m64n128k16<1>(sums[0], weights[k], v_tile + k * (16 * 128 / 16));
        llm__wgmma_commit();
        llm__wgmma_wait<0>(sums);
    }
LLM_UNROLL
    for (int h = 0; h < 2; h++) {
        float divide = 1.0f / llm__four_sum(now[h].l), *out = a.out + offset[h] + lane % 4 * 2;
LLM_UNROLL
        for (int n = 0; n < HD / 8; n++)
            if (position[h] >= 0)
                *(float2 *)(out + n * 8) =
                    make_float2(sums[n][2 * h] * divide, sums[n][2 * h + 1] * divide);
    }
#endif
}

template <int HD, int R, int C, int Stages>
static void llm__launch_attention(llm__cuda *cuda, const llm__attention_args &a, int n) {
    typedef llm__attention_shape_of<HD, R, C, Stages> shape;
    auto attention_kernel = llm__attention_kernel<HD, R, C, Stages>;
    size_t bytes = shape::shared_bytes, more = bytes + shape::rows * (HD + 8) * sizeof(float);
    bool keep =
        R > 1 && cuda->batch.max_context > LLM__PART && more + (2 << 10) <= cuda->shared_bytes;
    LLM__START(cuda, attention_kernel, dim3(n, a.n_kv_heads), shape::threads, keep ? more : bytes,
        a, keep);
}

static void llm__cuda_many_attention(llm__cuda *cuda, const llm__attention_args &a, int n) {
    if (cuda->wgmma && a.head_dim == 128 && cuda->batch.max_count * a.group >= 128 &&
        !(a.cap > 0.0f) && !(a.alibi > 0.0f) && llm__on(cuda, LLM__WGMMA_ATTENTION)) {
        LLM__START(
            cuda, llm__attention_wgmma_kernel, dim3(n, a.n_kv_heads), 256, LLM__WGMMA_SHARED, a);
        return;
    }
    if (a.head_dim <= 32) llm__launch_attention<32, 4, 1, 2>(cuda, a, n);
    else if (a.head_dim <= 64) llm__launch_attention<64, 4, 1, 2>(cuda, a, n);
    else if (a.head_dim <= 96) llm__launch_attention<96, 8, 1, 2>(cuda, a, n);
    else if (a.head_dim <= 128) llm__launch_attention<128, 8, 1, 2>(cuda, a, n);
    else llm__launch_attention<256, 2, 2, 2>(cuda, a, n);
}

/* ========================================
 * [6] Attention, few queries of each sequence (decode)
 *
 * A decode step has few rows: one token per sequence, so 4 rows per kv head in Llama 3. The limit
 * is bytes: every key and value once. The kernel is that of chapter [5] with one group of 16 rows,
 * a ring of three tiles, and two or four warps that divide the dimensions of the result.
 *
 * One block per sequence and kv head would leave most SMs idle: one sequence of Llama 3 has 8 kv
 * heads. So the positions are split too. Each block computes one part and writes its m, l and sums.
 * A second kernel merges the parts of each row in order, with the arithmetic of chapter [5]:
 *
 *     positions    0 .. 255      256 .. 511    512 .. 767    768 ..        one block each
 *                  m, l, sums    m, l, sums    m, l, sums    m, l, sums    to global memory
 *                      \_____________\_____________/_____________/
 *                                         merge -> out                     one block per row
 *
 * For 4 rows that adds 1/30 to the bytes. The split changes no bit of a result. The step's list has
 * an item for each part: 63 sequences of 512 tokens and one of 16,384 are 190 items.
 * ===================================== */

enum { LLM__MERGED = 8 }; /* parts that a warp merges at a time */

/* blockIdx.x: tile; y: kv head; z: row of the tile. The warps read parts at the same time, and add
 * them in turn: warp 0 parts 0 to 7, warp 1 parts 8 to 15, etc. A lane has four dimensions. Bytes:
 * all parts read, `out` written. */
LLM_KERNEL llm__merge_kernel(llm__attention_args a) {
    llm__take_over();
    LLM_SHARED(float, passed, 128); /* sums, m and l, passed from one warp to the next */
    LLM_SHARED(llm__softmax, passed_total, 1);
    const llm__attention_item item = a.items[blockIdx.x];
    int row = blockIdx.z, kv_head = blockIdx.y, lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    if (row >= item.n_rows) return;
    int n = (item.end - 1) / LLM__PART - item.start / LLM__PART + 1;
    int n_turns = (n + LLM__MERGED - 1) / LLM__MERGED, position;
    float *out = a.out + llm__row_offset(a, item, kv_head, item.first_row + row, &position);
    const float *parts = llm__part(a, item, kv_head, row);
    int64_t step = (int64_t)item.n_rows * a.n_kv_heads * (a.head_dim + 4);

    for (int d = lane * 4; d - lane * 4 < a.head_dim; d += 128) {
        float4 x[LLM__MERGED];
        float2 stats;
        auto load = [&](int first) { /* loads the warp's next parts; lane i has m and l of part i */
LLM_UNROLL
            for (int i = 0; i < LLM__MERGED; i++)
                if (first + i < n && d < a.head_dim)
                    x[i] = *(const float4 *)(parts + (first + i) * step + d);
            stats = make_float2(-INFINITY, 0.0f);
            if (lane < LLM__MERGED && first + lane < n)
                stats = *(const float2 *)(parts + (first + lane) * step + a.head_dim);
        };
        load(warp * LLM__MERGED);
        for (int turn = 0; turn < n_turns; turn++) {
            if ((turn & (n_warps - 1)) == warp) {
                float sum[4] = {};
                llm__softmax total = {-INFINITY, 0.0f};
                if (turn) total = passed_total[0];
LLM_UNROLL
                for (int j = 0; j < 4; j++)
                    if (turn) sum[j] = passed[lane + 32 * j];
                /* llm__merge, for all parts at once; m: the largest so far */
                float m = fmaxf(total.m, stats.x);
                for (int other = 1; other < LLM__MERGED; other *= 2) {
                    float earlier = __shfl_up_sync(0xffffffffu, m, other);
                    if (lane >= other) m = fmaxf(m, earlier);
                }
                float before = __shfl_up_sync(0xffffffffu, m, 1), base = m == -INFINITY ? 0.0f : m;
                float shrink = llm__exp2((lane ? before : total.m) - base),
                      share = llm__exp2(stats.x - base);
LLM_UNROLL
                for (int i = 0; i < LLM__MERGED; i++) {
                    float a_i = __shfl_sync(0xffffffffu, shrink, i),
                          b_i = __shfl_sync(0xffffffffu, share, i),
                          l_i = __shfl_sync(0xffffffffu, stats.y, i);
                    if (turn * LLM__MERGED + i >= n) break;
                    total.l = llm__merged(total.l, l_i, a_i, b_i);
                    sum[0] = llm__merged(sum[0], x[i].x, a_i, b_i);
                    sum[1] = llm__merged(sum[1], x[i].y, a_i, b_i);
                    sum[2] = llm__merged(sum[2], x[i].z, a_i, b_i);
                    sum[3] = llm__merged(sum[3], x[i].w, a_i, b_i);
                }
                total.m = __shfl_sync(0xffffffffu, m, LLM__MERGED - 1);
                if (lane == 0) passed_total[0] = total;
LLM_UNROLL
                for (int j = 0; j < 4; j++) {
                    passed[lane + 32 * j] = sum[j];
                    if (turn + 1 == n_turns && d < a.head_dim)
                        out[d + j] = __fmul_rn(sum[j], 1.0f / total.l);
                }
                load((turn + n_warps) * LLM__MERGED);
            }
            __syncthreads();
        }
    }
}

/* ---- The items of a step ---- */

static bool llm__has_items(
    const llm__cuda *cuda, const llm_attention_shape *shape, const llm_cache *cache) {
    return llm__on(cuda, LLM__PREFILL) && !shape->naive && cache->type == LLM_F16 &&
        shape->head_dim % 8 == 0 && shape->head_dim <= LLM__MMA_HEAD_DIM &&
        cache->n_blocks * cache->n_kv_heads * cache->block_size <=
        INT32_MAX / (shape->head_dim / 8); /* llm__load_tile counts in 16 bytes */
}

/* The list for operations of this shape; NULL: none. If `add`, a missing list is created. */
static llm__attention_list *llm__list_of(
    llm__device_batch *b, const llm_attention_shape *shape, bool add) {
    llm__attention_list list = {};
    list.group = shape->n_heads / shape->n_kv_heads;
    list.window = shape->window;
    list.tile_rows = shape->head_dim <= 64 ? 64 : shape->head_dim <= 128 ? 128 : 32;
    list.part_bytes = shape->n_kv_heads * (shape->head_dim + 4) * (int)sizeof(float);
    for (int i = 0; i < b->n_lists; i++)
        if (!memcmp(&b->lists[i], &list, offsetof(llm__attention_list, n))) return &b->lists[i];
    if (!add || b->n_lists == LLM__LISTS) return NULL;
    return (llm__attention_list *)memcpy(&b->lists[b->n_lists++], &list, sizeof list);
}

/* Add an empty list for each shape in the program. Returns the number of attention operations. */
static int llm__list_shapes(
    const llm__cuda *cuda, const llm_program *program, llm__device_batch *b) {
    int n = 0;
    for (int i = 0; i < program->n_ops; i++) {
        if (program->ops[i].kind != LLM_OP_ATTENTION) continue;
        n++;
        if (llm__has_items(cuda, &program->ops[i].attention, program->cache))
            llm__list_of(b, &program->ops[i].attention, true);
    }
    return n;
}

static bool llm__is_tree(const llm_batch *batch, int sequence) {
    int first = batch->seq_first[sequence];
    return batch->parents && batch->seq_count[sequence] > 1 && batch->parents[first + 1] >= 0;
}

/* Call use(kind, item) for each item of a step. Returns the number of part rows. */
template <class Function>
static int64_t llm__each_item(
    const llm__cuda *cuda, const llm_batch *batch, const llm__attention_list *list, Function use) {
    int64_t part_rows = 0;
    for (int s = 0; s < batch->n_sequences; s++) {
        int rows = batch->seq_count[s] * list->group, first_token = batch->seq_first[s];
        bool tree = llm__is_tree(batch, s), /* in a tree, a tile has rows of one token */
            few = (tree ? list->group : rows) <= LLM__FEW_ROWS && llm__on(cuda, LLM__DECODE);
        int tile_rows = few ? (int)LLM__FEW_TILE : list->tile_rows;
        for (int row = 0, end; row < rows; row = end) {
            end = tree ? (row / list->group + 1) * list->group : rows;
            if (end > row + tile_rows) end = row + tile_rows;
            llm__attention_item item = {s, end - row, row, batch->positions[first_token], 0, 0,
                first_token, -1, INT32_MAX, {}};
            if (tree) {
                item.branch = item.first_position;
                item.first_position =
                    batch->positions[first_token + row / list->group] - row / list->group;
            }
            int from = item.first_position + row / list->group;
            item.start = llm__window_start(list->window, from);
            item.end = item.first_position + (row + item.n_rows - 1) / list->group + 1;
            if (!few || (item.end - 1) / LLM__PART == item.start / LLM__PART ||
                !llm__on(cuda, LLM__SPLIT)) {
                use(few ? LLM__FEW_ITEMS : LLM__MANY_ITEMS, item);
                continue;
            }
            item.part_row = (int32_t)part_rows;
            use(LLM__MERGE_ITEMS, item);
            for (llm__attention_item part = item; part.start < item.end; part.start = part.end) {
                part.end = (part.start / LLM__PART + 1) * LLM__PART;
                if (part.end > item.end) part.end = item.end;
                part.part_row = (int32_t)part_rows;
                part_rows += part.n_rows;
                use(LLM__FEW_ITEMS, part);
            }
        }
    }
    return part_rows;
}

/* An item's class by its number of positions: four classes per power of two. Lists begin with the
 * longest items, since blocks with much work should start first. */
static int llm__item_class(const llm__attention_item &item) {
    int n = item.end - item.start, log2 = 31 - __builtin_clz((unsigned)n);
    return 127 - 4 * log2 - (int)((int64_t)n << 2 >> log2 & 3);
}

/* Write the items, then padding, to `to`; returns the bytes of their parts. to NULL: only set
 * list->n. */
static size_t llm__list_items(const llm__cuda *cuda, const llm_batch *batch,
    llm__attention_list *list, llm__attention_item *const to[]) {
    int places[LLM__ITEM_KINDS][128] = {}; /* items of each class; then its next index */
    llm__each_item(cuda, batch, list,
        [&](int kind, const llm__attention_item &item) { places[kind][llm__item_class(item)]++; });
    for (int kind = 0; kind < LLM__ITEM_KINDS; kind++) {
        int first = 0;
        for (int &place : places[kind]) {
            int n = place;
            place = first;
            first += n;
        }
        if (!to) list->n[kind] = first;
        for (int i = first; to && i < list->n[kind]; i++) to[kind][i].n_rows = 0;
    }
    if (!to) return 0;
    auto write = [&](int kind, const llm__attention_item &item) {
        to[kind][places[kind][llm__item_class(item)]++] = item;
    };
    return (size_t)list->part_bytes * (size_t)llm__each_item(cuda, batch, list, write);
}

/* The most bytes that `parts` needs in a step, unless sequences share blocks. Two limits apply:
 * every sequence fills its context; or the cache fills the memory that is now free. (32 rows of a
 * part have an eighth of the bytes of its keys and values in one layer.) */
static size_t llm__largest_parts(
    const llm__cuda *cuda, const llm_program *program, const llm_limits *limits) {
    llm__device_batch b = {};
    int n_layers = llm__list_shapes(cuda, program, &b);
    size_t free_bytes = 0, all_bytes = 0;
    double largest = 0.0;
    if (cudaMemGetInfo(&free_bytes, &all_bytes) != cudaSuccess) cudaGetLastError();
    for (int i = 0; i < b.n_lists && llm__on(cuda, LLM__SPLIT); i++) {
        int group = b.lists[i].group, few = LLM__FEW_ROWS / group * group;
        double one = fmin((double)few * limits->max_sequences, (double)group * limits->max_tokens) *
            b.lists[i].part_bytes; /* one part of each sequence */
        largest = fmax(largest,
            fmin(one * llm__ceil_div(limits->max_context, LLM__PART),
                one + (double)free_bytes / (8.0 * n_layers)));
    }
    return (size_t)largest;
}

/* Make `parts` at least this large. */
static bool llm__attention_reserve(llm__cuda *cuda, size_t bytes, llm_error *err) {
    if (bytes > cuda->parts_bytes) llm__graphs_forget(cuda, NULL); /* they use the old memory */
    return llm__cuda_scratch(cuda, &cuda->parts, &cuda->parts_bytes, bytes,
        "parts of attention (fewer sequences, a shorter context or "
        "split_attention off need less)",
        err);
}

static void llm__cuda_few_attention(llm__cuda *cuda, const llm__attention_args &a, int n) {
    if (a.head_dim <= 32) llm__launch_attention<32, 1, 2, 3>(cuda, a, n);
    else if (a.head_dim <= 64) llm__launch_attention<64, 1, 4, 3>(cuda, a, n);
    else if (a.head_dim <= 96) llm__launch_attention<96, 1, 2, 3>(cuda, a, n);
    else if (a.head_dim <= 128) llm__launch_attention<128, 1, 4, 3>(cuda, a, n);
    else llm__launch_attention<256, 1, 4, 3>(cuda, a, n);
}

static void llm__cuda_merge(llm__cuda *cuda, const llm__attention_args &a, int n) {
    int rows = cuda->batch.max_count * a.group, warps = 1;
    while (warps < 8 && warps * LLM__MERGED * LLM__PART < cuda->batch.max_context) warps *= 2;
    LLM__START(cuda, llm__merge_kernel,
        dim3(n, a.n_kv_heads, rows < LLM__FEW_TILE ? rows : (int)LLM__FEW_TILE), 32 * warps, 0, a);
}

static void llm__cuda_attention(llm__cuda *cuda, const llm_attention_shape *shape, const float *q,
    const llm_cache *cache, int layer, float *out) {
    const llm__device_batch *b = &cuda->batch;
    size_t offset = (size_t)layer * cache->layer_bytes;
    uint32_t shift = 0;
    while (1LL << shift < cache->block_size) shift++;
    llm__attention_args a = {b->positions, b->slots, b->parents, b->sequence_of, b->block_tables,
        b->counts, NULL,
        shape->n_heads, shape->n_kv_heads, shape->n_heads / shape->n_kv_heads, shape->head_dim,
        cache->block_size, shape->window,
        (uint32_t)llm__ceil_div(1LL << (31 + shift), cache->block_size), shift, shape->scale,
        shape->cap, shape->alibi, cache->type, (const char *)cache->keys + offset,
        (const char *)cache->values + offset, q,
        out, (float *)cuda->parts};
    const llm__attention_list *list =
        llm__has_items(cuda, shape, cache) ? llm__list_of(&cuda->batch, shape, false) : NULL;
    if (!list) {
        LLM__START(cuda, llm__plain_attention_kernel,
            dim3(a.n_heads, llm__grid(b->n_tokens, 65535)), 128, a.head_dim * sizeof(float), a,
            b->n_tokens);
        return;
    }
    for (int kind = 0; kind < LLM__ITEM_KINDS; kind++) {
        a.items = list->items[kind];
        if (!list->n[kind]) continue;
        if (kind == LLM__MANY_ITEMS) llm__cuda_many_attention(cuda, a, list->n[kind]);
        else if (kind == LLM__FEW_ITEMS) llm__cuda_few_attention(cuda, a, list->n[kind]);
        else llm__cuda_merge(cuda, a, list->n[kind]);
    }
}

/* =====================================================================================
 * [7] Sampling: from logits to a token, on the device
 *
 * 256 rows of logits of a vocabulary of 150000 are 150 MB: copying them to the CPU would take as
 * long as the rest of the step. So the device draws, and returns a token and its logprob.
 *
 * It draws the same token as chapter [3] of llm.h, which goes through a sorted list of tokens. The
 * filters and the draw only need the place in this list where a running sum exceeds a value t. For
 * top-k the sum counts tokens; for top-p and the draw it adds their likelihoods (their "mass").
 *
 * Histograms answer this without sorting ("radix select"). llm__sort_key makes a 32-bit key of each
 * logit. Sum the tokens by the first 11 bits of their keys, find the bin in which the running sum
 * passes t, and repeat inside that bin with the next 11 bits, then the last 10. Likelihoods are
 * integers, so the order in which threads add them does not matter.
 *
 * Each filter keeps a prefix of the list, so all filters together keep the shortest prefix: the one
 * with the least mass.
 *
 * The likeliest tokens that a draw may also ask for, before adjustments, are such a prefix too.
 *
 * One SM would read a long row slowly, so rows are cut into parts of 4096 logits. Three kernels:
 *
 *     largest   (part, draw)   the largest logit of the part, and its sum of exp(logit)
 *     mass      (part, draw)   the mass of the part; a list of its likely tokens, those whose
 *                              likelihood is at least e^-10 times that of the likeliest token
 *     draw      (row)          without filters: finds the part by the masses and reads only this
 *                              part; with filters: reads the list, usually a few hundred tokens.
 *                              If the filters keep tokens that are not in the list, or it is full:
 *                              reads the row, about twelve times
 *
 * The limit is bytes: the row is read once from memory and once from the L2 cache.
 * ================================================================================== */

enum {
    LLM__DRAW_THREADS = 512,  /* threads of the kernel `draw` */
    LLM__BINS = 2048,         /* bins of a histogram: 11 bits */
    LLM__OWN_LOGITS = 16,     /* logits per thread, and 256 threads per part: */
    LLM__PART_LOGITS = (int)LLM__BLOCK * LLM__OWN_LOGITS,
    LLM__LISTED = 4096        /* most tokens in the list of a draw */
};

typedef struct llm__tally {
    unsigned long long mass, count; /* sum of likelihoods; number of tokens */
} llm__tally;

/* A mass is kept as two 32-bit words. In shared memory, a 32-bit atomic addition is one
 * instruction; a 64-bit one is a loop in which threads with the same bin wait for each other. */
typedef struct llm__histogram {
    unsigned low[LLM__BINS], high[LLM__BINS]; /* halves of the mass */
    unsigned count[LLM__BINS];                /* tokens */
} llm__histogram;

__device__ static inline unsigned long long llm__bin_mass(const llm__histogram *h, int bin) {
    return (unsigned long long)h->high[bin] << 32 | h->low[bin];
}

__device__ static inline void llm__bin_add(llm__histogram *h, int bin, unsigned long long mass) {
    unsigned low = (unsigned)mass, before = atomicAdd(&h->low[bin], low),
             high = (unsigned)(mass >> 32) + (before + low < before);
    if (high) atomicAdd(&h->high[bin], high);
    atomicAdd(&h->count[bin], 1u);
}

typedef struct llm__token {
    float logit;
    int id;
} llm__token;

typedef struct llm__draw_shared {
    llm__histogram histogram;
    float logits[LLM__LISTED];   /* the draw's list: logits and ids */
    int ids[LLM__LISTED];
    llm__tally warps[32];        /* scratch, one per warp */
    llm__tally found;            /* sum over the bins before the one found by llm__find_bin */
    llm__token tokens[32];       /* scratch, one per warp */
    float values[32];            /* scratch, one per warp */
    int bin, id;                 /* results of llm__find_bin and llm__find_id */
} llm__draw_shared;

typedef struct llm__row_part {   /* a part of a row, for one draw */
    llm__token best;             /* the first token with the largest logit, after adjustments */
    float most, sum;             /* before adjustments: largest logit; sum of exp(logit - most) */
    unsigned long long mass;     /* sum of the likelihoods */
    int first, n;                /* range of its likely tokens in the draw's list */
} llm__row_part;

typedef struct llm__drawn {      /* result of a draw */
    llm__token token;            /* the token, with its logit before adjustments */
    float total;                 /* ln(sum of exp(logit)) */
} llm__drawn;

typedef struct llm__draw_arguments {
    float *logits;               /* (rows, n) */
    int n, bits, n_parts;        /* vocabulary; see llm__odds; parts of a row */
    const llm__device_draw *draws;
    const int32_t *starts;       /* block b of `draw`: draws starts[b] to starts[b + 1] - 1 */
    const llm_adjustment *adjustments; /* of all draws */
    float *saved;                /* the logits, before adjustments, of the adjusted tokens */
    llm__row_part *parts;        /* (draws, n_parts) */
    llm__token *lists;           /* (draws, LLM__LISTED) */
    int *listed;                 /* (draws) number of likely tokens; some may not fit in the list */
    llm__drawn *drawn;           /* (draws) */
    llm__token *tops;            /* likeliest tokens of all draws; of each draw in any order */
} llm__draw_arguments;

/* Parameters of llm__device_likelihood, which equals llm__likelihood in llm.h bit for bit. */
typedef struct llm__odds {
    float most;      /* largest logit */
    float per_logit; /* 2^24 / ln 2 / temperature */
    float listed;    /* least logit of the tokens in the list */
    int bits;        /* likelihood of the largest logit is 2^bits */
} llm__odds;

__device__ static inline llm__odds llm__odds_of(float most, float temperature, int bits) {
    llm__odds odds = {most, fminf(24204406.0f / temperature, FLT_MAX),
                      fmaf(temperature, -10.0f, most), bits};
    return odds;
}

__device__ static inline unsigned long long llm__device_likelihood(const llm__odds *odds,
                                                                   float logit) {
    const unsigned terms[] = {2977044387, 1031770177, 238335983, 41505391, 5394481, 916877};
    float y = (odds->most - logit) * odds->per_logit;
    if (!(y < 45 * 16777216.0f)) return 0;
    unsigned whole = ((unsigned)y + 0xffffff) >> 24, f = (0 - (unsigned)y) << 8, sum = terms[5];
LLM_UNROLL
    for (int i = 4; i >= 0; i--) sum = terms[i] + __umulhi(f, sum);
    return ((1ull << 32) + __umulhi(f, sum)) << (odds->bits - 32) >> whole;
}

/* A larger logit has a smaller key; equal logits (also 0 and -0) have equal keys. */
__device__ static inline uint32_t llm__sort_key(float logit) {
    uint32_t bits = __float_as_uint(logit == 0 ? 0.0f : logit);
    return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}

__device__ static inline float llm__logit_of_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key : ~key & 0x7fffffffu);
}

/* A NaN is never drawn: fmaxf(NaN, x) is x. */
__device__ static inline float llm__clean(float logit) { return fmaxf(logit, -INFINITY); }

__device__ static inline unsigned long long llm__warp_sum_whole(unsigned long long x) {
    for (int other = 16; other; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

/* The sum of x over this lane and those before it. */
template <class T> __device__ __forceinline__ T llm__warp_running_sum(T x) {
    for (int step = 1; step < 32; step *= 2) {
        T other = __shfl_up_sync(0xffffffffu, x, step);
        if ((int)threadIdx.x % 32 >= step) x += other;
    }
    return x;
}

__device__ static inline unsigned long long llm__block_sum_whole(unsigned long long x,
                                                                 llm__tally *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = llm__warp_sum_whole(x);
    __syncthreads();
    if (lane == 0) shared[warp].mass = x;
    __syncthreads();
    return llm__warp_sum_whole(lane < n_warps ? shared[lane].mass : 0);
}

/* The likelier of two tokens; of equals, the one with the smaller id. */
__device__ static inline llm__token llm__better(llm__token a, llm__token b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id) ? a : b;
}

/* Give all threads the best of their tokens. `shared` (32) is scratch. */
__device__ static inline llm__token llm__block_best(llm__token best, llm__token *shared) {
    for (int round = 0; round < 2; round++) { /* 0: within each warp; 1: over the warps' results */
        for (int other = 16; other; other /= 2) {
            llm__token x = {__shfl_xor_sync(0xffffffffu, best.logit, other),
                            __shfl_xor_sync(0xffffffffu, best.id, other)};
            best = llm__better(best, x);
        }
        if (round) break;
        __syncthreads();
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
        __syncthreads();
        if (threadIdx.x % 32 < blockDim.x / 32) best = shared[threadIdx.x % 32];
    }
    return best;
}

/* ---- Parts of a row ---- */

/* The same as llm__adjusted in llm.h. */
__device__ static inline float llm__device_adjusted(float x, const llm_adjustment *a) {
    x += a->bias;
    return x > 0 ? __fsub_rn(x / a->penalty, a->minus) : fmaf(x, a->penalty, -a->minus);
}

/* Load a thread's logits of a part: `raw`, and x after adjustments. Logit k belongs to token 32 k +
 * the returned id, so a warp has consecutive tokens. */
__device__ static __forceinline__ int llm__load_part(const llm__draw_arguments *a, int draw,
                                                     int part, float raw[LLM__OWN_LOGITS],
                                                     float x[LLM__OWN_LOGITS]) {
    LLM_SHARED(float, logits, LLM__PART_LOGITS);
    const llm__device_draw *d = &a->draws[draw];
    const float *row = a->logits + (int64_t)d->row * a->n;
    int start = part * LLM__PART_LOGITS, lane = threadIdx.x % 32,
        own = (threadIdx.x - lane) * LLM__OWN_LOGITS + lane, left = a->n - start - own;
    const float *from = row + start + own;
LLM_UNROLL
    for (int k = 0; k < LLM__OWN_LOGITS; k++)
        x[k] = raw[k] = k * 32 < left ? from[k * 32] : -INFINITY;
    if (d->n_adjustments > 0) {
LLM_UNROLL
        for (int k = 0; k < LLM__OWN_LOGITS; k++) logits[own + k * 32] = raw[k];
        __syncthreads();
        const llm_adjustment *list = a->adjustments + d->first_adjustment;
        for (int i = threadIdx.x; i < d->n_adjustments; i += blockDim.x) {
            unsigned at = (unsigned)(list[i].token - start);
            if (at < LLM__PART_LOGITS) logits[at] = llm__device_adjusted(logits[at], &list[i]);
        }
        __syncthreads();
LLM_UNROLL
        for (int k = 0; k < LLM__OWN_LOGITS; k++) x[k] = logits[own + k * 32];
    }
LLM_UNROLL
    for (int k = 0; k < LLM__OWN_LOGITS; k++) x[k] = llm__clean(x[k]);
    return start + own;
}

__global__ static void __launch_bounds__(LLM__BLOCK)
    llm__largest_kernel(llm__draw_arguments a) {
    LLM_SHARED(float, scratch, 32);
    LLM_SHARED(llm__token, tokens, 32);
    int draw = blockIdx.x / a.n_parts, part = blockIdx.x % a.n_parts;
    float raw[LLM__OWN_LOGITS], x[LLM__OWN_LOGITS], most = -INFINITY, sum = 0.0f;
    int first = llm__load_part(&a, draw, part, raw, x);
    llm__token best = {x[0], first};
LLM_UNROLL
    for (int k = 0; k < LLM__OWN_LOGITS; k++) {
        if (x[k] > best.logit) best.logit = x[k], best.id = first + k * 32;
        most = fmaxf(most, raw[k]); /* ignores NaN */
    }
    best = llm__block_best(best, tokens);
    most = llm__block_max(most, scratch);
    float base = most == -INFINITY ? 0.0f : most;
LLM_UNROLL
    for (int k = 0; k < LLM__OWN_LOGITS; k++) /* a NaN makes the sum a NaN */
        sum += llm__exp2((raw[k] - base) * 1.44269504f);
    sum = llm__block_sum(sum, scratch);
    if (threadIdx.x) return;
    llm__row_part *out = &a.parts[(int64_t)draw * a.n_parts + part];
    out->best = best;
    out->most = most;
    out->sum = sum;
    if (part == 0) a.listed[draw] = 0; /* for the next kernel */
}

__device__ static inline bool llm__is_greedy(const llm_sampling *p, float most) {
    return p->temperature == 0 || !(fabsf(most) <= FLT_MAX);
}

__device__ static inline bool llm__has_filter(const llm_sampling *p) {
    return p->top_k || p->top_p < 1 || p->min_p > 0;
}

__global__ static void __launch_bounds__(LLM__BLOCK) llm__mass_kernel(llm__draw_arguments a) {
    LLM_SHARED(float, scratch, 32);
    LLM_SHARED(llm__tally, warps, 32);
    LLM_SHARED(int, place, 1);
    int draw = blockIdx.x / a.n_parts, part = blockIdx.x % a.n_parts, lane = threadIdx.x % 32,
        warp = threadIdx.x / 32;
    const llm_sampling *p = &a.draws[draw].sampling;
    llm__row_part *parts = a.parts + (int64_t)draw * a.n_parts;
    float raw[LLM__OWN_LOGITS], x[LLM__OWN_LOGITS], most = -INFINITY;
    for (int i = threadIdx.x; i < a.n_parts; i += blockDim.x)
        most = fmaxf(most, parts[i].best.logit);
    most = llm__block_max(most, scratch);
    if (llm__is_greedy(p, most)) return;
    llm__odds odds = llm__odds_of(most, p->temperature, a.bits);
    int first = llm__load_part(&a, draw, part, raw, x);
    unsigned listed[LLM__OWN_LOGITS]; /* a bit per lane */
    llm__tally sum = {0, 0};
LLM_UNROLL
    for (int k = 0; k < LLM__OWN_LOGITS; k++) {
        sum.mass += llm__device_likelihood(&odds, x[k]);
        listed[k] = __ballot_sync(0xffffffffu, x[k] >= odds.listed);
        sum.count += __popc(listed[k]);
    }
    sum.mass = llm__warp_sum_whole(sum.mass);
    if (lane == 0) warps[warp] = sum;
    __syncthreads();
    llm__tally all = {0, 0};
    int at = 0; /* at first, the number of tokens listed before this warp's */
    for (int i = 0; i < (int)blockDim.x / 32; i++) {
        if (i == warp) at = (int)all.count;
        all.mass += warps[i].mass;
        all.count += warps[i].count;
    }
    if (threadIdx.x == 0) {
        parts[part].mass = all.mass;
        parts[part].n = (int)all.count;
        parts[part].first = *place = atomicAdd(&a.listed[draw], (int)all.count);
    }
    __syncthreads();
    at += *place;
LLM_UNROLL
    for (int k = 0; k < LLM__OWN_LOGITS; k++) {
        int own = at + __popc(listed[k] & ((1u << lane) - 1));
        llm__token token = {x[k], first + k * 32};
        if (listed[k] >> lane & 1 && own < LLM__LISTED)
            a.lists[(int64_t)draw * LLM__LISTED + own] = token;
        at += __popc(listed[k]);
    }
}

/* ---- The draw ---- */

/* Where a draw looks for its token: in a row, or in a list of the likeliest tokens of a row. */
typedef struct llm__tokens {
    const float *logits;   /* (n) */
    const int *ids;        /* (n) ascending; NULL: a row, and the index is the id */
    int n, n_all;          /* n_all: size of the vocabulary */
    unsigned long long all; /* mass of the whole row */
} llm__tokens;

/* Call visit(i, row[i]) for i = first, first + step, ..., in order. A thread starts several reads
 * at once, since one block per row has too few threads to hide the latency of memory otherwise. */
template <class Visit>
__device__ __forceinline__ void llm__each_logit(const float *row, int n, unsigned first,
                                                unsigned step, Visit visit) {
    enum { AT_ONCE = 8 };
    for (unsigned start = first; start < (unsigned)n; start += AT_ONCE * step) {
        float x[AT_ONCE];
LLM_UNROLL
for (unsigned k = 0; k < AT_ONCE; k++)
    x[k] = start + k * step < (unsigned)n ? row[start + k * step] : 0.0f;
LLM_UNROLL
        for (unsigned k = 0; k < AT_ONCE; k++)
            if (start + k * step < (unsigned)n) visit((int)(start + k * step), x[k]);
    }
}

__device__ static inline void llm__histogram_clear(llm__histogram *h) {
    __syncthreads();
    for (int i = threadIdx.x; i < LLM__BINS; i += blockDim.x) {
        h->low[i] = h->high[i] = h->count[i] = 0;
    }
    __syncthreads();
}

/* The bin in which the running sum (of counts or masses) passes t, or LLM__BINS; s->found is the
 * sum before it. Each thread owns a few neighbouring bins. The sum before these comes from a scan
 * over the lanes of a warp, then over the warps. */
__device__ static inline int llm__find_bin(llm__draw_shared *s, const llm__histogram *h,
                                           unsigned long long t, bool by_count) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = LLM__BINS / (int)blockDim.x,
        first = (int)threadIdx.x * own;
    llm__tally sum = {0, 0};
    for (int i = first; i < first + own; i++) {
        sum.mass += llm__bin_mass(h, i);
        sum.count += h->count[i];
    }
    llm__tally before = {llm__warp_running_sum(sum.mass), llm__warp_running_sum(sum.count)};
    __syncthreads();
    if (lane == 31) s->warps[warp] = before;
    if (threadIdx.x == 0) s->bin = LLM__BINS;
    __syncthreads();
    before.mass -= sum.mass;
    before.count -= sum.count;
    for (int i = 0; i < warp; i++) {
        before.mass += s->warps[i].mass;
        before.count += s->warps[i].count;
    }
    for (int i = first; i < first + own; i++) {
        unsigned long long from = by_count ? before.count : before.mass,
                           width = by_count ? h->count[i] : llm__bin_mass(h, i);
        if (from <= t && t - from < width) { /* true for at most one bin */
            s->found = before;
            s->bin = i;
        }
        before.mass += llm__bin_mass(h, i);
        before.count += h->count[i];
    }
    __syncthreads();
    return s->bin;
}

/* Sum the tokens whose key equals `key` in the bits from shift + width up, by their next `width`
 * bits. Tokens of likelihood 0 are skipped: they are last in the list and add no mass. Without
 * odds, each token has a mass of 1. */
__device__ static inline void llm__histogram_fill(llm__histogram *h, const llm__tokens *t,
                                                  const llm__odds *odds, uint32_t key, int shift,
                                                  int width) {
    llm__histogram_clear(h);
    llm__each_logit(t->logits, t->n, threadIdx.x, blockDim.x, [&](int, float x) {
        float logit = llm__clean(x);
        uint32_t k = llm__sort_key(logit);
        if (shift + width < 32 && k >> (shift + width) != key >> (shift + width)) return;
        unsigned long long mass = odds ? llm__device_likelihood(odds, logit) : 1;
        if (mass == 0) return;
        int bin = (int)(k >> shift & ((1u << width) - 1));
        llm__bin_add(h, bin, mass);
    });
    __syncthreads();
}

/* Find the logit at which the running sum over the sorted list passes `point`. *key is its key;
 * *before sums the tokens with larger logits. False: the sum never passes `point`. */
__device__ static inline bool llm__find(llm__draw_shared *s, const llm__tokens *t,
                                        const llm__odds *odds, unsigned long long point,
                                        bool by_count, uint32_t *key, llm__tally *before) {
    *key = 0;
    before->mass = before->count = 0;
    for (int shift = 21, width = 11; shift >= 0; width = shift == 10 ? 10 : 11, shift -= width) {
        llm__histogram_fill(&s->histogram, t, odds, *key, shift, width);
        int bin = llm__find_bin(s, &s->histogram,
                                point - (by_count ? before->count : before->mass), by_count);
        if (bin == LLM__BINS) return false;
        before->mass += s->found.mass;
        before->count += s->found.count;
        *key |= (uint32_t)bin << shift;
    }
    __syncthreads(); /* s->found may change only after all threads have read it */
    return true;
}

/* A token's term in the sum of llm__find_id: its likelihood or, if `equals`, 1 for tokens with this
 * key, else 0. */
__device__ static inline unsigned long long llm__share(const llm__odds *odds, float logit,
                                                       bool equals, uint32_t key) {
    logit = llm__clean(logit);
    return equals ? llm__sort_key(logit) == key : llm__device_likelihood(odds, logit);
}

/* The index of the token at which the running sum of llm__share, in order of ids, passes t. Each
 * warp sums one range of tokens. The warp in whose range the sum passes t scans it again, 32 tokens
 * at a time. */
__device__ static inline int llm__find_id(llm__draw_shared *s, const float *row, int n,
                                          const llm__odds *odds, unsigned long long t, bool equals,
                                          uint32_t key) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    int stretch = (n + n_warps - 1) / n_warps, first = warp * stretch,
        end = first + stretch < n ? first + stretch : n;
    unsigned long long sum = 0;
    llm__each_logit(row, end, (unsigned)(first + lane), 32,
                    [&](int, float x) { sum += llm__share(odds, x, equals, key); });
    sum = llm__warp_sum_whole(sum);
    __syncthreads();
    if (lane == 0) s->warps[warp].mass = sum;
    __syncthreads();
    unsigned long long before = 0;
    for (int i = 0; i < warp; i++) before += s->warps[i].mass;
    if (before <= t && t - before < sum) { /* true for one warp */
        for (int i = first; i < end; i += 32) {
            unsigned long long own = i + lane < end ? llm__share(odds, row[i + lane], equals, key)
                                                    : 0,
                               upto = llm__warp_running_sum(own);
            if (before + upto - own <= t && t < before + upto) s->id = i + lane;
            before += __shfl_sync(0xffffffffu, upto, 31);
            if (t < before) break;
        }
    }
    __syncthreads();
    return s->id;
}

/* The mass of the tokens that pass all filters; 0: some of these are not in t. */
__device__ static inline unsigned long long llm__filtered_mass(llm__draw_shared *s,
                                                               const llm__tokens *t,
                                                               const llm__odds *odds,
                                                               const llm_sampling *p) {
    uint32_t key;
    llm__tally before;
    unsigned long long total = t->all, mass, top = 1ull << odds->bits;
    if (p->top_k && p->top_k < t->n_all) {
        if (llm__find(s, t, odds, (unsigned long long)p->top_k - 1, true, &key, &before))
            total = before.mass + (p->top_k - before.count) *
                                      llm__device_likelihood(odds, llm__logit_of_key(key));
        else if (t->ids) return 0;
    }
    mass = total;
    if (p->top_p < 1) {
        unsigned long long enough = (unsigned long long)((double)p->top_p * (double)total),
                           kept = top;
        if (enough > 0) {
            if (!llm__find(s, t, odds, enough - 1, false, &key, &before)) return 0;
            unsigned long long one = llm__device_likelihood(odds, llm__logit_of_key(key));
            kept = before.mass + ((enough - 1 - before.mass) / one + 1) * one;
        }
        if (kept < mass) mass = kept;
    }
    unsigned long long least = (unsigned long long)((double)p->min_p * (double)top), listed = 0,
                       kept = 0;
    llm__each_logit(t->logits, t->n, threadIdx.x, blockDim.x, [&](int, float x) {
        unsigned long long own = llm__device_likelihood(odds, llm__clean(x));
        listed += own;
        if (own >= least) kept += own;
    });
    if (p->min_p > 0) {
        if (t->ids && llm__device_likelihood(odds, odds->listed) >= least) return 0;
        kept = llm__block_sum_whole(kept, s->warps);
        if (kept < mass) mass = kept;
    }
    return mass <= llm__block_sum_whole(listed, s->warps) ? mass : 0;
}

/* Find the part in which the running sum of masses passes *t, and subtract the sum before it. */
__device__ static inline int llm__find_part(const llm__row_part *parts, int n,
                                            unsigned long long *t) {
    int lane = threadIdx.x % 32;
    for (int first = 0; first < n; first += 32) {
        unsigned long long own = first + lane < n ? parts[first + lane].mass : 0,
                           upto = llm__warp_running_sum(own);
        unsigned found = __ballot_sync(0xffffffffu, upto > *t);
        int owner = found ? __ffs(found) - 1 : 31;
        *t -= __shfl_sync(0xffffffffu, found ? upto - own : upto, owner);
        if (found) return first + owner;
    }
    return 0; /* not reached: *t is less than the mass of the row */
}

/* Copy a draw's list to shared memory, in order of ids. Returns the number of its tokens. */
__device__ static inline int llm__copy_list(llm__draw_shared *s, const llm__row_part *parts,
                                            int n_parts, const llm__token *list) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = 0;
    for (int first = 0; first < n_parts; first += 32) { /* 32 parts at a time, one per lane */
        int n = first + lane < n_parts ? parts[first + lane].n : 0,
            from = n ? parts[first + lane].first : 0, upto = llm__warp_running_sum(n);
        for (int i = warp; i < 32; i += (int)blockDim.x / 32) { /* each warp copies some of them */
            int count = __shfl_sync(0xffffffffu, n, i), at = __shfl_sync(0xffffffffu, from, i),
                to = before + __shfl_sync(0xffffffffu, upto, i) - count;
            for (int k = lane; k < count; k += 32) {
                s->logits[to + k] = list[at + k].logit;
                s->ids[to + k] = list[at + k].id;
            }
        }
        before += __shfl_sync(0xffffffffu, upto, 31);
    }
    __syncthreads();
    return before;
}

/* List the n likeliest tokens of a row in `tops`, in any order. Equally likely ones rank by id,
 * smallest first. */
__device__ static inline void llm__list_tops(llm__draw_shared *s, const llm__tokens *row, int n,
                                             llm__token *tops) {
    uint32_t key;
    llm__tally before;
    llm__find(s, row, NULL, (unsigned long long)n - 1, true, &key, &before);
    int last = llm__find_id(s, row->logits, row->n, NULL, n - 1 - before.count, true, key);
    __syncthreads();
    if (threadIdx.x == 0) s->bin = 0; /* tokens listed */
    __syncthreads();
    llm__each_logit(row->logits, row->n, threadIdx.x, blockDim.x, [&](int i, float x) {
        llm__token token = {llm__clean(x), i};
        uint32_t own = llm__sort_key(token.logit);
        if (own < key || (own == key && i <= last)) tops[atomicAdd(&s->bin, 1)] = token;
    });
    __syncthreads();
}

/* Draw one token from a row of adjusted logits. */
__device__ static inline int llm__draw_one(llm__draw_shared *s, const llm__draw_arguments *a,
                                           int draw, const llm__odds *odds) {
    const llm_sampling *p = &a->draws[draw].sampling;
    const llm__row_part *parts = a->parts + (int64_t)draw * a->n_parts;
    uint64_t random = a->draws[draw].random;
    llm__tokens row = {a->logits + (int64_t)a->draws[draw].row * a->n, NULL, a->n, a->n, 0};
    for (int i = threadIdx.x; i < a->n_parts; i += blockDim.x) row.all += parts[i].mass;
    row.all = llm__block_sum_whole(row.all, s->warps);
    if (!llm__has_filter(p)) {
        unsigned long long point = __umul64hi(random, row.all);
        int first = llm__find_part(parts, a->n_parts, &point) * LLM__PART_LOGITS;
        int n = min(a->n - first, (int)LLM__PART_LOGITS);
        return first + llm__find_id(s, row.logits + first, n, odds, point, false, 0);
    }
    llm__tokens t = row;
    unsigned long long mass = 0;
    for (int in_row = a->listed[draw] > LLM__LISTED; in_row < 2 && !mass; in_row++) {
        t.logits = in_row ? row.logits : s->logits;
        t.ids = in_row ? NULL : s->ids;
        t.n = in_row ? row.n
                     : llm__copy_list(s, parts, a->n_parts, a->lists + (int64_t)draw * LLM__LISTED);
        mass = llm__filtered_mass(s, &t, odds, p);
    }
    uint32_t key = 0;
    llm__tally before = {0, 0};
    unsigned long long point = __umul64hi(random, mass);
    llm__find(s, &t, odds, point, false, &key, &before);
    unsigned long long one = llm__device_likelihood(odds, llm__logit_of_key(key));
    int i = llm__find_id(s, t.logits, t.n, odds, (point - before.mass) / one, true, key);
    return t.ids ? t.ids[i] : i;
}

/* One block per row. The adjusted logits are written into the row; `saved` keeps the original ones
 * until after the draw. */
__global__ static void __launch_bounds__(LLM__DRAW_THREADS, 1)
    llm__draw_kernel(llm__draw_arguments a) {
    LLM_DYNAMIC_SHARED(llm__draw_shared, s);
    for (int d = a.starts[blockIdx.x]; d < a.starts[blockIdx.x + 1]; d++) {
        const llm__device_draw *draw = &a.draws[d];
        const llm__row_part *parts = a.parts + (int64_t)d * a.n_parts;
        float *row = a.logits + (int64_t)draw->row * a.n, most = -INFINITY, sum = 0.0f;
        llm__token best = {-INFINITY, a.n};
        for (int i = threadIdx.x; i < a.n_parts; i += blockDim.x) {
            best = llm__better(best, parts[i].best);
            most = fmaxf(most, parts[i].most);
        }
        best = llm__block_best(best, s->tokens);
        most = llm__block_max(most, s->values);
        for (int i = threadIdx.x; i < a.n_parts; i += blockDim.x)
            sum += parts[i].sum * expf(parts[i].most - most);
        sum = llm__block_sum(sum, s->values);
        float total = fabsf(most) <= FLT_MAX ? most + logf(sum) : most;
        if (draw->n_top) {
            llm__tokens all = {row, NULL, a.n, a.n, 0};
            llm__list_tops(s, &all, draw->n_top, a.tops + draw->first_top);
        }
        if (!llm__is_greedy(&draw->sampling, best.logit)) {
            llm__odds odds = llm__odds_of(best.logit, draw->sampling.temperature, a.bits);
            const llm_adjustment *list = a.adjustments + draw->first_adjustment;
            float *kept = a.saved + draw->first_adjustment;
            for (int i = threadIdx.x; i < draw->n_adjustments; i += blockDim.x) {
                float *logit = &row[list[i].token];
                kept[i] = *logit;
                *logit = llm__device_adjusted(*logit, &list[i]);
            }
            __syncthreads();
            best.id = llm__draw_one(s, &a, d, &odds);
            __syncthreads();
            for (int i = threadIdx.x; i < draw->n_adjustments; i += blockDim.x)
                row[list[i].token] = kept[i];
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            best.logit = row[best.id];
            a.drawn[d].token = best;
            a.drawn[d].total = total;
        }
    }
}

/* The same as llm__likelihood_bits in llm.h. */
static int llm__odds_bits(int n) {
    int bits = 44;
    while ((int64_t)n >> (63 - bits)) bits--;
    return bits;
}

/* Reserve memory for the lists and the parts of n draws. */
static bool llm__parts_reserve(llm__cuda *cuda, int n, int64_t vocab_size, llm_error *err) {
    size_t parts = (size_t)llm__ceil_div(vocab_size, LLM__PART_LOGITS);
    size_t each = LLM__LISTED * sizeof(llm__token) + parts * sizeof(llm__row_part) + sizeof(int);
    return llm__cuda_scratch(cuda, &cuda->lists, &cuda->lists_bytes, (size_t)n * each, LLM__DRAWS,
                             err);
}

static float llm__logprob_of(float logit, float total) {
    return total > -INFINITY ? logit - total : -INFINITY;
}

/* Copy n tokens in order, the likeliest first. */
static void llm__sort_tops(const llm__token *from, int n, float total, llm_token_logprob *to) {
    for (int i = 0; i < n; i++) {
        int at = i;
        for (; at > 0 && (to[at - 1].logprob < from[i].logit ||
                          (to[at - 1].logprob == from[i].logit && to[at - 1].token > from[i].id));
             at--)
            to[at] = to[at - 1];
        to[at].token = from[i].id;
        to[at].logprob = from[i].logit;
    }
    for (int i = 0; i < n; i++) to[i].logprob = llm__logprob_of(to[i].logprob, total);
}

static bool llm__cuda_sample(void *context, float *logits, int vocab_size, const llm_draw *draws,
                             int n, int32_t *ids, float *logprobs, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    int n_adjustments = 0, n_tops = 0, n_rows = 0;
    llm__cuda_clear(err);
    for (int i = 0; i < n; i++) {
        n_adjustments += draws[i].n_adjustments;
        n_tops += draws[i].n_top;
    }
    /* The layout of the buffer: draws (n), starts (n + 1), adjustments, results (drawn (n), tops);
     * on the device also saved logits, one per adjustment. */
    size_t results = (size_t)n * sizeof(llm__drawn) + (size_t)n_tops * sizeof(llm__token);
    size_t bytes = (size_t)n * sizeof(llm__device_draw) + results + ((size_t)n + 1) * 4 +
                   (size_t)n_adjustments * (sizeof(llm_adjustment) + sizeof(float));
    if (!llm__cuda_room(cuda, &cuda->draw_room, bytes, LLM__DRAWS, err) ||
        !llm__parts_reserve(cuda, n, vocab_size, err))
        return false;
    char *host = cuda->draw_room.host, *device = cuda->draw_room.device;
    llm__device_draw *to = (llm__device_draw *)(void *)host;
    int32_t *starts = (int32_t *)(void *)(to + n);
    llm_adjustment *list = (llm_adjustment *)(void *)(starts + n + 1);
    bool all_greedy = true;
    n_adjustments = n_tops = 0;
    for (int i = 0; i < n; i++) {
        if (i == 0 || draws[i].row != draws[i - 1].row) starts[n_rows++] = i;
        to[i].sampling = draws[i].sampling;
        to[i].random = draws[i].random;
        to[i].row = draws[i].row;
        to[i].first_top = n_tops;
        to[i].n_top = draws[i].n_top;
        n_tops += draws[i].n_top;
        to[i].first_adjustment = n_adjustments;
        for (int k = 0; k < draws[i].n_adjustments; k++) /* a draft may have fewer tokens */
            if (draws[i].adjustments[k].token < vocab_size)
                list[n_adjustments++] = draws[i].adjustments[k];
        to[i].n_adjustments = n_adjustments - to[i].first_adjustment;
        all_greedy = all_greedy && draws[i].sampling.temperature == 0;
    }
    starts[n_rows] = n;
    llm__drawn *drawn = (llm__drawn *)(void *)(list + n_adjustments);
    llm__token *tops = (llm__token *)(void *)(drawn + n);
    size_t used = (size_t)((char *)drawn - host);
    if (!llm__cuda_check(cuda,
                         cudaMemcpyAsync(device, host, used, cudaMemcpyHostToDevice, cuda->stream),
                         "copying draws", err))
        return false;
    llm__draw_arguments a;
    a.logits = logits;
    a.n = vocab_size;
    a.bits = llm__odds_bits(vocab_size);
    a.n_parts = (int)llm__ceil_div(vocab_size, LLM__PART_LOGITS);
    a.draws = (const llm__device_draw *)(const void *)device;
    a.starts = (const int32_t *)(const void *)(a.draws + n);
    a.adjustments = (const llm_adjustment *)(const void *)(a.starts + n + 1);
    a.drawn = (llm__drawn *)(void *)(device + used);
    a.tops = (llm__token *)(void *)(a.drawn + n);
    a.saved = (float *)(void *)(a.tops + n_tops);
    a.lists = (llm__token *)(void *)cuda->lists;
    a.parts = (llm__row_part *)(void *)(a.lists + (size_t)n * LLM__LISTED);
    a.listed = (int *)(void *)(a.parts + (size_t)n * a.n_parts);
    dim3 all_parts((unsigned)(n * a.n_parts));
    LLM_LAUNCH(llm__largest_kernel, all_parts, dim3(LLM__BLOCK), 0, cuda->stream, a);
    llm__cuda_launched(cuda, "sample");
    if (!all_greedy) {
        LLM_LAUNCH(llm__mass_kernel, all_parts, dim3(LLM__BLOCK), 0, cuda->stream, a);
        llm__cuda_launched(cuda, "sample");
    }
    LLM_LAUNCH(llm__draw_kernel, dim3(n_rows), dim3(LLM__DRAW_THREADS), sizeof(llm__draw_shared),
               cuda->stream, a);
    llm__cuda_launched(cuda, "sample");
    if (!llm__cuda_tell(cuda, err) ||
        !llm__cuda_check(
            cuda, cudaMemcpyAsync(drawn, a.drawn, results, cudaMemcpyDeviceToHost, cuda->stream),
            "copying tokens", err) ||
        !llm__cuda_wait(cuda, "what the device was doing", err))
        return false;
    for (int i = 0; i < n; i++) {
        ids[i] = drawn[i].token.id;
        logprobs[i] = llm__logprob_of(drawn[i].token.logit, drawn[i].total);
        llm__sort_tops(tops + to[i].first_top, to[i].n_top, drawn[i].total, draws[i].top);
    }
    return true;
}

/* ========================================
 * [8] Appendix: the other layouts of weights; loading a matrix
 *
 * Chunks of 64 columns of 16 rows, as in chapter [3]. Each 512 B are 16 bytes per lane:
 *
 *       f16            | 512 B | 512 B | 512 B | 512 B |    A of j = 0 and 1, for each half
 *       q8_0           | 512 B | 512 B | 64 B scales |      8 columns of rows g and g + 8, per half
 *       4, 5, 6 bits   | 512 B | 0, 128 or 256 B | 128 B scales |    as q4_0; higher bits apart
 * ===================================== */

struct llm__f16_layout {
    enum { bits = 16, chunk_bytes = 2048, scaled = 0, zero = 0, minimums = 0, unit = 1 };
    uint4 words[4]; /* A of the four instructions */

    LLM_DEVICE void load(const char *chunk, int lane) {
LLM_UNROLL
        for (int i = 0; i < 4; i++) words[i] = llm__load_16(chunk + i * 512 + lane * 16);
    }
    LLM_DEVICE void unpack(int half, uint32_t a[2][4]) const {
LLM_UNROLL
        for (int j = 0; j < 2; j++) {
            const uint4 &w = words[2 * half + j];
            a[j][0] = w.x, a[j][1] = w.y, a[j][2] = w.z, a[j][3] = w.w;
        }
    }
    __device__ static void scales(const llm__packed &, const char *, int, llm__scales[2]) {}
};

/* Convert four int8 to f16: out[0] unchanged, out[1] times 16. Flipping the sign bit adds 128. */
LLM_DEVICE void llm__unpack_q8(uint32_t word, uint32_t out[2]) {
    word ^= 0x80808080u;
    /* 1024 + 128 + q: subtract 1152, or 16 x 1152 */
    out[0] = llm__pair_fma(__byte_perm(word, LLM__F16_1024, 0x5150), LLM__F16_1, 0xe480e480u);
    out[1] = llm__pair_fma(__byte_perm(word, LLM__F16_1024, 0x5352), LLM__F16_16, 0xf480f480u);
}

struct llm__q8_0_layout {
    enum {
        bits = 8,
        scales_at = 1024,
        chunk_bytes = 1088,
        scaled = 1,
        zero = 0,
        minimums = 0,
        unit = 1
    };
    uint4 words[2]; /* eight columns: row g, row g + 8 of half 0; then of half 1 */

    LLM_DEVICE void load(const char *chunk, int lane) {
        for (int i = 0; i < 2; i++) words[i] = llm__load_16(chunk + i * 512 + lane * 16);
    }
    LLM_DEVICE void unpack(int half, uint32_t a[2][4]) const {
        const uint4 &w = words[half];
        uint32_t top[4], bottom[4]; /* columns 2i, 2i + 1 of rows g, g + 8 */
        llm__unpack_q8(w.x, top), llm__unpack_q8(w.y, top + 2);
        llm__unpack_q8(w.z, bottom), llm__unpack_q8(w.w, bottom + 2);
        llm__fragments(top, bottom, a);
    }
    LLM_DEVICE static void scales(
        const llm__packed &, const char *chunk, int lane, llm__scales s[2]) {
        llm__unpack_scales(chunk + scales_at + lane / 4 * 8, s);
    }
};

/* Scale and `times` x minimum of a row for half a chunk, exact in f32. */
template <bool Groups>
LLM_DEVICE void llm__unpack_minimum(
    bool is_zero, uint2 row, int half, float times, float *scale, float *minimum) {
    uint32_t pair = half && !Groups ? row.y : row.x;
    *scale = llm__from_f16(pair);
    *minimum = llm__from_f16((pair >> 16)) * times;
    if (Groups) { /* make a byte the last bits of 2^23 and subtract 2^23: no conversion */
        float whole = __uint_as_float(__byte_perm(row.y, 0x4b000000, 0x7650 + 2 * half));
        float whole_minimum = __uint_as_float(__byte_perm(row.y, 0x4b000000, 0x7651 + 2 * half));
        *scale *= whole - 8388608.0f;
        *minimum *= 8388608.0f - whole_minimum;
    } else if (is_zero) *minimum *= -*scale;
}

/* Integers of 4 + High bits. The low four bits are stored as in q4_0, the high bits in one word per
 * lane and chunk (High 1) or half (High 2): those of columns 2i and 2i + 1 of row g begin at bits i
 * x High and i x High + 16; for row g + 8, add 4 x High; for the second half, if High is 1, add 8.
 * Then 16 bytes per g: the scales of rows g and g + 8. High 2 is q6_K: no minimum, zero point 32, a
 * scale per 16 columns. */
template <int High, bool Groups>
struct llm__bits_layout {
    enum {
        bits = 4 + High,
        scales_at = 512 + 128 * High,
        chunk_bytes = scales_at + 128,
        scaled = 1,
        zero = 0,
        minimums = High < 2,
        unit = High == 0 ? 1 << 24
            : High == 1  ? 1
                         : 16
    };
    uint4 words; /* as in q4_0 */
    uint32_t high[2]; /* higher bits of each half; High 1: all in high[0] */
    uint32_t own[2]; /* High 2: scales of rows g and g + 8, half 0, then half 1 */

    LLM_DEVICE void load(const char *chunk, int lane) {
        words = llm__load_16(chunk + lane * 16);
        const uint32_t *above = (const uint32_t *)(chunk + 512) + lane * High;
        const uint2 *scales = (const uint2 *)(chunk + scales_at) + lane / 4 * 2;
        if (High) high[0] = above[0];
        if (High == 2) {
            high[1] = above[1];
            own[0] = scales[0].y >> lane % 4 / 2 * 8, own[1] = scales[1].y >> lane % 4 / 2 * 8;
        }
    }
    /* Unpack the columns of a word; above: their high bits. */
    LLM_DEVICE static void unpack_row(uint32_t word, uint32_t above, uint32_t out[4]) {
        if (!High) llm__unpack_q4(word, out);
LLM_UNROLL
        for (int i = 0; High && i < 4; i++) {
            /* shifts that move the high bits of pair i to bits 4 and 20 */
            const int at = i * High, left = at < 4 ? 4 - at : 0, right = at > 4 ? at - 4 : 0;
            uint32_t pair = llm__and_or(word >> 4 * i, 0x000f000f, LLM__F16_1024);
            pair = llm__and_or(above << left >> right, High == 1 ? 0x00100010 : 0x00300030, pair);
            /* subtract 1024, or 16 x 1024; for q6_K, 1024 + 32 */
            if (High == 1 && i % 2) out[i] = llm__pair_fma(pair, LLM__F16_16, 0xf400f400u);
            else out[i] = llm__pair_fma(pair, LLM__F16_1, High == 1 ? 0xe400e400u : 0xe420e420u);
        }
    }
    LLM_DEVICE void unpack(int half, uint32_t a[2][4]) const {
        uint32_t top[4], bottom[4];
        uint32_t above = High == 0 ? 0 : High == 1 ? high[0] >> 8 * half : high[half];
        unpack_row(half ? words.z : words.x, above, top);
        unpack_row(half ? words.w : words.y, above >> 4 * High, bottom);
LLM_UNROLL
        for (int r = 0; High == 2 && r < 2; r++) {
            float whole = (float)(int8_t)(own[r] >> 16 * half);
            /* 16 x whole could exceed f16's range, so the other columns are divided */
            uint32_t factor = llm__pair(whole, whole),
                     sixteenth = llm__pair(whole / 16, whole / 16);
LLM_UNROLL
            for (int i = 0; i < 4; i++) {
                uint32_t *pair = r ? &bottom[i] : &top[i];
                *pair = llm__pair_fma(*pair, i % 2 ? factor : sixteenth, 0);
            }
        }
        llm__fragments(top, bottom, a);
    }
    LLM_DEVICE static void scales(
        const llm__packed &w, const char *chunk, int lane, llm__scales s[2]) {
        uint4 both = llm__load_16(chunk + scales_at + lane / 4 * 16);
        const uint2 rows[2] = {make_uint2(both.x, both.y), make_uint2(both.z, both.w)};
LLM_UNROLL
        for (int i = 0; i < 4; i++) {
            int half = i / 2, r = i % 2;
            if (High < 2)
                llm__unpack_minimum<Groups>(w.is_zero, rows[r], half, (float)LLM__OF_SUMS / unit,
                    &s[half].scale[r], &s[half].minimum[r]);
            else s[half].scale[r] = llm__from_f16(rows[r].x);
        }
    }
};

typedef llm__bits_layout<0, false> llm__4_bits; /* q4_1, q4_Z */
typedef llm__bits_layout<0, true> llm__4_bits_groups; /* q4_K */
typedef llm__bits_layout<1, false> llm__5_bits; /* q5_0, q5_1 */
typedef llm__bits_layout<1, true> llm__5_bits_groups; /* q5_K */
typedef llm__bits_layout<2, true> llm__6_bits; /* q6_K */

/* Call function(layout); only the type of the argument is used. */
template <class Function>
static void llm__with_layout(llm__layout layout, Function function) {
    switch (layout) {
    case LLM__F16: function(llm__f16_layout()); break;
    case LLM__Q8_0: function(llm__q8_0_layout()); break;
    case LLM__Q4_0: function(llm__q4_0_layout()); break;
    case LLM__4_BITS: function(llm__4_bits()); break;
    case LLM__4_BITS_GROUPS: function(llm__4_bits_groups()); break;
    case LLM__5_BITS: function(llm__5_bits()); break;
    case LLM__5_BITS_GROUPS: function(llm__5_bits_groups()); break;
    case LLM__6_BITS: function(llm__6_bits()); break;
    }
}

/* Read one weight from the fragments, slowly. */
template <class Layout>
__device__ static float llm__packed_value(const llm__packed &w, int64_t row, int64_t col) {
    int k = (int)(col % LLM__CHUNK), below = (int)(row % LLM__TILE_ROWS / 8);
    int lane = (int)(row % 8 * 4) + k % 32 / 8, place = k / 32 * 8 + k % 8 / 2 * 2 + below;
    float sum = 0.0f;
    /* f32: high part, then low part */
    for (int64_t c = col / LLM__CHUNK; c < w.n_chunks; c += 2 * w.plane_chunks) {
        const char *chunk =
            w.chunks + (row / LLM__TILE_ROWS * w.n_chunks + c) * Layout::chunk_bytes;
        Layout part;
        llm__scales scales[2] = {};
        uint32_t pair = 0, a[2][4];
        float factor = 1.0f, scale = 1.0f, minimum = 0.0f;
        part.load(chunk, lane);
        Layout::scales(w, chunk, lane, scales);
        if constexpr (Layout::bits == 6) { /* apply its scale of 16 columns here: exact */
            factor = (float)(int8_t)((below ? part.own[1] : part.own[0]) >> k / 32 * 16);
            part.own[0] = part.own[1] = 0x00010001;
        }
LLM_UNROLL
        for (int i = 0; i < 16;
            i++) { /* constant indexes keep the arrays in registers */
            if (i % 8 == 0) part.unpack(i / 8, a);
            if (i != place) continue;
            pair = a[i / 4 % 2][i % 4];
            if (Layout::scaled) scale = scales[i / 8].scale[i % 2];
            if (Layout::minimums) minimum = scales[i / 8].minimum[i % 2];
        }
        float x = llm__from_f16((pair >> k % 2 * 16)) * (float)Layout::unit;
        if (Layout::scaled && k & 2) x *= 0.0625f;
        x = scale * factor * (x - (Layout::zero ? 8.0f : 0.0f));
        sum += x + minimum * ((float)Layout::unit / LLM__OF_SUMS);
    }
    return w.row_scales ? sum * w.row_scales[row] : sum;
}

/* ---- Loading a matrix ---- */

/* Rows of a matrix in the file's layout. The first one is the first row of a tile. */
struct llm__source {
    llm_type type;
    const char *data;
    size_t row_bytes;
    int64_t first_row, end_row; /* row numbers in the matrix */
    int64_t cols;
};

LLM_DEVICE const uint8_t *llm__source_row(const llm__source &s, int64_t row) {
    return (const uint8_t *)s.data + (size_t)(row - s.first_row) * s.row_bytes;
}

/* Value i of an f32, f16 or bf16 row in the file's layout. */
LLM_DEVICE float llm__weight_value(llm_type type, const void *row, int64_t i) {
    if (type == LLM_F32) return ((const float *)row)[i];
    if (type == LLM_F16) return llm__from_f16(((const uint16_t *)row)[i]);
    return llm__bf16_bits_to_f32(((const uint16_t *)row)[i]);
}

/* Compute row_scales, for weights outside f16's range. One warp per row. */
LLM_KERNEL llm__row_scales_kernel(llm__source s, float *row_scales) {
    int64_t row = s.first_row + (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= s.end_row) return;
    float largest = 0.0f;
    for (int64_t i = threadIdx.x % 32; i < s.cols; i += 32)
        largest = fmaxf(largest, fabsf(llm__weight_value(s.type, llm__source_row(s, row), i)));
    largest = llm__warp_max(largest);
    if (threadIdx.x % 32 == 0) row_scales[row] = llm__power_for(largest);
}

/* Types with blocks of 32: bytes of a block before its fifth bits. */
LLM_DEVICE int llm__head_bytes(llm_type type) {
    return type == LLM_Q4_0 || type == LLM_Q5_0 || type == LLM_Q8_0 ? 2 : 4;
}
LLM_DEVICE int llm__block_bytes(llm_type type) {
    return llm__head_bytes(type) +
        (type == LLM_Q8_0                              ? 32
                : type == LLM_Q5_0 || type == LLM_Q5_1 ? 20
                                                       : 16);
}
/* Types with blocks of 256. */
LLM_DEVICE int llm__group_block_bytes(llm_type type) {
    return type == LLM_Q4_K ? 144 : type == LLM_Q5_K ? 176 : type == LLM_Q6_K ? 210 : 0;
}

/* Integer i of a row of the file, before subtracting a zero point. (Formats: chapter [7] of
 * llm.h.) */
LLM_DEVICE uint32_t llm__level(llm_type type, const uint8_t *row, int64_t i) {
    int j = (int)(i % 32), group = (int)(i % 256 / 32), bytes = llm__group_block_bytes(type);
    const uint8_t *p = row + (bytes ? i / 256 * bytes : i / 32 * llm__block_bytes(type));
    if (type == LLM_Q6_K) {
        int half = group / 4, quarter = group % 4;
        uint32_t low = p[64 * half + 32 * (quarter % 2) + j] >> quarter / 2 * 4 & 15,
                 high = p[128 + 32 * half + j] >> 2 * quarter & 3;
        return low | high << 4;
    }
    if (bytes) { /* q4_K, q5_K */
        uint32_t low = p[bytes - 128 + group / 2 * 32 + j] >> group % 2 * 4 & 15;
        return type == LLM_Q4_K ? low : low | (uint32_t)(p[16 + j] >> group & 1) << 4;
    }
    p += llm__head_bytes(type);
    if (type == LLM_Q8_0) return p[j];
    bool fifth = type == LLM_Q5_0 || type == LLM_Q5_1;
    uint32_t low = p[4 * fifth + j % 16] >> j / 16 * 4 & 15;
    return fifth ? low | (uint32_t)(p[j / 8] >> j % 8 & 1) << 4 : low;
}

/* The scales of a row for a chunk, as kernels read them:
 *     most types   x and y, for 32 columns each: scale and minimum (or zero point), f16
 *     q4_K, q5_K   x: scale and minimum of 256 columns, f16; y: the bytes scale, minimum of 32
 *                  columns, scale, minimum of the next 32
 *     q6_K         x: scale of 256 columns, f16; y: four int8 scales of 16 columns each */
LLM_DEVICE uint2 llm__level_scales(llm_type type, const uint8_t *row, int64_t chunk, int64_t cols) {
    uint16_t words[4] = {};
    uint8_t *bytes = (uint8_t *)(words + 2);
    int block_bytes = llm__group_block_bytes(type);
    const uint8_t *p = row + chunk / 4 * block_bytes;
    if (block_bytes) memcpy(words, type == LLM_Q6_K ? p + 208 : p, type == LLM_Q6_K ? 2 : 4);
    for (int i = 0; block_bytes && i < 4; i++) {
        int group = (int)(chunk % 4) * 2 + i / 2;
        /* 6-bit scale (i even) or minimum (i odd): see llm__group_scales in llm.h */
        const uint8_t *s = p + 4 + group % 4 + i % 2 * 4;
        int low = group < 4 ? s[0] & 63 : (p[12 + group % 4] >> i % 2 * 4 & 15) | s[0] >> 6 << 4;
        bytes[i] = type == LLM_Q6_K ? p[192 + chunk % 4 * 4 + i] : (uint8_t)low;
    }
    for (int i = 0; !block_bytes && i < 2 && chunk * 2 + i < cols / 32; i++) {
        memcpy(
            words + 2 * i, row + (chunk * 2 + i) * llm__block_bytes(type), llm__head_bytes(type));
        if (type == LLM_Q5_0) words[2 * i + 1] = llm__to_f16(16.0f);
        if (type == LLM_Q4_Z) words[2 * i + 1] = llm__to_f16((float)words[2 * i + 1]);
    }
    return make_uint2(words[0] | (uint32_t)words[1] << 16, words[2] | (uint32_t)words[3] << 16);
}

/* Write a lane's part of a chunk, from row `row` and column k on. */
template <class Layout>
__device__ static void llm__pack(
    char *chunk, const llm__packed &w, const llm__source &s, int64_t row, int64_t k, int lane) {
    constexpr int bits = Layout::bits, high = bits < 8 ? bits - 4 : 0;
    if constexpr (bits == 16) { /* as A: pairs of columns of row g, of row g + 8, of row g, ... */
        int plane = llm__plane(&w, &k);
        for (int i = 0; i < 32; i++) {
            int64_t r = row + i / 2 % 2 * 8 + lane / 4;
            int64_t column = k + i / 16 * 32 + lane % 4 * 8 + i % 16 / 4 * 2 + i % 2;
            float x = 0.0f;
            if (r < s.end_row && column < s.cols)
                x = llm__weight_value(s.type, llm__source_row(s, r), column) *
                    (w.row_scales ? 1.0f / w.row_scales[r] : 1.0f);
            ((uint16_t *)chunk)[i / 8 * 256 + lane * 8 + i % 8] =
                llm__to_f16(llm__half_of(x, plane == 2));
        }
    } else {
        uint32_t words[4] = {}, above[2] = {};
        uint8_t bytes[32] = {};
        for (int i = 0; i < 32; i++) { /* 8 columns of rows g, g + 8 of half 0, then of half 1 */
            int part = i / 8, half = part / 2, pair = i % 8 / 2;
            int64_t r = row + part % 2 * 8 + lane / 4,
                    column = k + half * 32 + lane % 4 * 8 + i % 8;
            if (r >= s.end_row || column >= s.cols) continue;
            uint32_t q = llm__level(s.type, llm__source_row(s, r), column);
            bytes[i] = (uint8_t)q;
            words[part] |= (q & 15) << (i % 2 * 16 + pair * 4); /* see llm__unpack_q4 */
            if (high)
                above[high > 1 ? half : 0] |= q >> 4
                        << ((part % 2 * 4 + pair) * high + i % 2 * 16 + (high == 1 ? half * 8 : 0));
        }
        memcpy(chunk + lane * 16, bits == 8 ? (const void *)bytes : words, 16);
        if (bits == 8) memcpy(chunk + 512 + lane * 16, bytes + 16, 16);
        memcpy(chunk + 512 + lane * 4 * high, above, 4 * high);
        if (lane >= 16) return;
        int64_t r = row + lane % 2 * 8 + lane / 2; /* row g (even lanes) or g + 8 (odd) */
        uint2 scales = make_uint2(0, 0);
        if (r < s.end_row)
            scales = llm__level_scales(s.type, llm__source_row(s, r), k / LLM__CHUNK, s.cols);
        chunk += Layout::scales_at;
        if (Layout::chunk_bytes - Layout::scales_at == 128) memcpy(chunk + lane * 8, &scales, 8);
        else { /* see llm__unpack_scales */
            memcpy(chunk + lane / 2 * 8 + lane % 2 * 2, &scales.x, 2);
            memcpy(chunk + lane / 2 * 8 + lane % 2 * 2 + 4, &scales.y, 2);
        }
    }
}

/* Pack rows from the file's layout into chunks. One warp per chunk. */
template <class Layout>
LLM_KERNEL llm__pack_kernel(llm__packed w, llm__source s) {
    int64_t n = llm__ceil_div(s.end_row - s.first_row, LLM__TILE_ROWS) * w.n_chunks;
    for (int64_t i = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < n;
        i += (int64_t)gridDim.x * (blockDim.x / 32)) {
        int64_t tile = s.first_row / LLM__TILE_ROWS + i / w.n_chunks, chunk = i % w.n_chunks;
        llm__pack<Layout>((char *)w.chunks + (tile * w.n_chunks + chunk) * Layout::chunk_bytes, w,
            s, tile * LLM__TILE_ROWS, chunk * LLM__CHUNK, threadIdx.x % 32);
    }
}

/* How the device stores weights of a type. */
struct llm__format {
    llm_type type;
    llm__layout layout;
    bool is_zero; /* as in llm__packed */
    int planes; /* 3 for f32: see llm__plane */
    bool row_scales; /* values may be too large or too small for f16 */
};

/* The device format of a type; NULL: the type is not supported. */
static const llm__format *llm__format_of(llm_type type) {
    static const llm__format formats[] = {
        {LLM_F16, LLM__F16, false, 1, false},
        {LLM_BF16, LLM__F16, false, 1, true},
        {LLM_F32, LLM__F16, false, 3, true},
        {LLM_Q8_0, LLM__Q8_0, false, 1, false},
        {LLM_Q4_0, LLM__Q4_0, false, 1, false},
        {LLM_Q4_1, LLM__4_BITS, false, 1, false},
        {LLM_Q4_Z, LLM__4_BITS, true, 1, false},
        {LLM_Q4_K, LLM__4_BITS_GROUPS, false, 1, false},
        {LLM_Q5_0, LLM__5_BITS, true, 1, false},
        {LLM_Q5_1, LLM__5_BITS, false, 1, false},
        {LLM_Q5_K, LLM__5_BITS_GROUPS, false, 1, false},
        {LLM_Q6_K, LLM__6_BITS, false, 1, false},
    };
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (formats[i].type == type) return &formats[i];
    return NULL;
}

static size_t llm__packed_bytes(const llm__packed *w) {
    size_t chunk_bytes = 0;
    llm__with_layout(w->layout, [&](auto layout) { chunk_bytes = decltype(layout)::chunk_bytes; });
    return (size_t)w->n_tiles * w->n_chunks * chunk_bytes;
}

static llm__packed llm__packed_of(const llm_weight *weight) {
    llm__format format = *llm__format_of(weight->type); /* load_weight has checked the type */
    llm__packed w;
    w.layout = format.layout;
    w.is_zero = format.is_zero;
    w.chunks = (const char *)weight->data;
    w.rows = weight->rows;
    w.cols = weight->cols;
    w.n_tiles = (int)llm__ceil_div(w.rows, LLM__TILE_ROWS);
    w.plane_chunks = (int)llm__ceil_div(w.cols, LLM__CHUNK);
    w.n_chunks = w.plane_chunks * format.planes;
    w.segment_chunks = (int)llm__ceil_div(w.n_chunks, LLM__SEGMENTS);
    w.row_scales = format.row_scales ? (const float *)(w.chunks + llm__packed_bytes(&w)) : NULL;
    return w;
}

/* ========================================
 * [9] Memory: allocate, upload, download; errors; the batch of a step
 *
 * A call that can fail fills in an llm_error. A launch has none: the context keeps its failure
 * until the next sync or download reports it. After a GPU is lost, every call fails, but the
 * backend can still be freed.
 * ===================================== */

static bool llm__cuda_fail(
    const llm__cuda *cuda, llm_error *err, llm_status status, const char *format, ...) {
    if (!err) return false;
    va_list arguments;
    va_start(arguments, format);
    bool found = *cuda->device_name != 0;
    int n = snprintf(err->message, sizeof err->message, "%s%s%s%s: ", cuda->backend.name,
        found ? " (" : "", cuda->device_name, found ? ")" : "");
    vsnprintf(err->message + n, sizeof err->message - (size_t)n, format, arguments);
    va_end(arguments);
    err->status = status;
    err->option = NULL;
    return false;
}

/* Clear err, return the context, and make its GPU current: CUDA keeps a current GPU per CPU thread,
 * and any thread may call the engine. */
static llm__cuda *llm__cuda_of(void *context, llm_error *err) {
    llm__cuda *cuda = (llm__cuda *)context;
    llm__cuda_clear(err);
    cudaSetDevice(cuda->device); /* if the GPU is lost, the next call reports it */
    return cuda;
}

static void llm__cuda_clear(llm_error *err) {
    if (err) memset(err, 0, sizeof *err);
}

/* Check the result of a CUDA call; `doing` names the call in the error. */
static bool llm__cuda_check(
    const llm__cuda *cuda, cudaError_t code, const char *doing, llm_error *err) {
    if (code == cudaSuccess) return true;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cuda->stream) cudaStreamIsCapturing(cuda->stream, &capture);
    cudaError_t now = cuda->stream && capture == cudaStreamCaptureStatusNone
        ? cudaStreamQuery(cuda->stream)
        : cudaSuccess;
    bool lost = now != cudaSuccess && now != cudaErrorNotReady;
    cudaGetLastError(); /* reported here, so llm__cuda_launched must not report it again */
    return llm__cuda_fail(cuda, err, LLM_ERROR_DEVICE, "%s failed: %s%s", doing,
        cudaGetErrorString(code), lost ? ": the GPU is lost; restart the program" : "");
}

/* Keep the first failure, to report it later: operations cannot return errors. */
static void llm__cuda_note(llm__cuda *cuda, cudaError_t code, const char *doing) {
    llm_error err;
    if (!llm__cuda_check(cuda, code, doing, &err) && cuda->failure.status == LLM_OK)
        cuda->failure = err;
}

/* Keep the error of a kernel that could not start. Errors while a kernel runs are reported by the
 * next sync. */
static void llm__cuda_launched(llm__cuda *cuda, const char *kernel) {
    cuda->launches++;
    llm__cuda_note(cuda, cudaGetLastError(), kernel);
}

/* Wait for all work on the stream. */
static bool llm__cuda_wait(llm__cuda *cuda, const char *doing, llm_error *err) {
    double start = llm_seconds();
    cudaError_t code = cudaStreamSynchronize(cuda->stream);
    cuda->wait_seconds += llm_seconds() - start;
    if (code == cudaSuccess) cuda->batch_on_its_way = false;
    return llm__cuda_check(cuda, code, doing, err);
}
static bool llm__cuda_finish(llm__cuda *cuda, llm_error *err) {
    return llm__cuda_wait(cuda, "what the device was doing", err);
}

/* Report the kept failure, and clear it. */
static bool llm__cuda_tell(llm__cuda *cuda, llm_error *err) {
    bool fine = cuda->failure.status == LLM_OK;
    if (!fine && err) *err = cuda->failure;
    llm__cuda_clear(&cuda->failure);
    return fine;
}

static void *llm__cuda_allocate(void *context, size_t bytes, const char *what, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context, err);
    void *device = NULL;
    size_t free_bytes = 0, all_bytes = 0;
    const double MIB = 1 << 20;
    cudaError_t code = cudaMalloc(&device, bytes ? bytes : 1);
    if (code == cudaSuccess) return device;
    if (code != cudaErrorMemoryAllocation)
        return llm__cuda_check(cuda, code, "allocating memory", err), nullptr;
    cudaMemGetInfo(&free_bytes, &all_bytes);
    cudaGetLastError();
    llm__cuda_fail(cuda, err, LLM_ERROR_MEMORY,
        "out of device memory: %zu bytes wanted for %s, and %.0f of %.0f MiB are free%s", bytes,
        what, (double)free_bytes / MIB, (double)all_bytes / MIB,
        strchr(what, '(') ? ""
                          : ": weights of a smaller type, smaller steps, a smaller cache or a "
                            "shorter context leave more");
    return NULL;
}

static void llm__cuda_release(void *context, void *device) {
    llm__cuda_of(context);
    if (device) cudaFree(device); /* no check: a lost GPU's memory is gone */
    cudaGetLastError();
}

/* Grow scratch memory to at least `bytes`; its contents are lost. On failure, restore the old size
 * if possible: other engines of this backend rely on it. */
static bool llm__cuda_scratch(llm__cuda *cuda, char **scratch, size_t *scratch_bytes, size_t bytes,
    const char *what, llm_error *err) {
    if (bytes <= *scratch_bytes) return true;
    if (!llm__cuda_finish(cuda, err)) return false; /* queued work may use the old memory */
    llm__cuda_release(cuda, *scratch);
    *scratch = (char *)llm__cuda_allocate(cuda, bytes, what, err);
    if (*scratch) return *scratch_bytes = bytes, true;
    if (*scratch_bytes) *scratch = (char *)llm__cuda_allocate(cuda, *scratch_bytes, what, NULL);
    if (!*scratch) *scratch_bytes = 0;
    return false;
}

/* Grow a room to 1.5 x `bytes`, to make this rare. Its contents are lost. */
static bool llm__cuda_room(
    llm__cuda *cuda, llm__room *room, size_t bytes, const char *what, llm_error *err) {
    if (bytes <= room->bytes) return true;
    bytes += bytes / 2;
    if (!llm__cuda_finish(cuda, err)) return false; /* queued work may use the old memory */
    cudaFreeHost(room->host);
    llm__cuda_release(cuda, room->device);
    memset(room, 0, sizeof *room);
    room->device = (char *)llm__cuda_allocate(cuda, bytes, what, err);
    if (!room->device) return false;
    cudaError_t code = cudaHostAlloc((void **)&room->host, bytes, cudaHostAllocDefault);
    if (code == cudaErrorMemoryAllocation)
        return cudaGetLastError(),
               llm__cuda_fail(cuda, err, LLM_ERROR_MEMORY,
                   "out of pinned host memory: %zu bytes wanted for %s: is there a limit on locked "
                   "memory (ulimit -l)?",
                   bytes, what);
    if (!llm__cuda_check(cuda, code, "allocating pinned memory", err)) return false;
    room->bytes = bytes;
    return true;
}

/* ---- Upload ----
 * The device reads the CPU's memory at full speed only if it is pinned. So weights go through a few
 * pinned buffers: threads copy the next piece of the mapped file into one while the device reads
 * another. One thread copies some 10 GB/s, and the bus carries 25 (PCIe 4) to 60 GB/s (PCIe 5). */

struct llm__copy_part {
    char *to;
    const char *from;
    size_t bytes;
    pthread_t thread;
    bool started;
};

static void *llm__copy_thread(void *part_) {
    const llm__copy_part *part = (const llm__copy_part *)part_;
    memcpy(part->to, part->from, part->bytes);
    return NULL;
}

/* memcpy by several threads. The caller copies the parts of threads that cannot start. */
static void llm__copy_by_threads(char *to, const char *from, size_t bytes) {
    enum { MOST = 8 };
    llm__copy_part parts[MOST];
    int n = llm_processor_count(); /* threads; each copies at least 1 MiB */
    if (n > (int)(bytes >> 20)) n = (int)(bytes >> 20);
    n = n < 1 ? 1 : n > MOST ? (int)MOST : n;
    size_t share = (size_t)llm__ceil_div((int64_t)bytes, (int64_t)n * 4096) * 4096;
    for (int i = n - 1; i >= 0; i--) { /* the caller copies part 0 */
        llm__copy_part *p = &parts[i];
        size_t first = (size_t)i * share < bytes ? (size_t)i * share : bytes;
        *p = {to + first, from + first, bytes - first < share ? bytes - first : share, {}, false};
        p->started = i > 0 && pthread_create(&p->thread, NULL, llm__copy_thread, p) == 0;
        if (!p->started) llm__copy_thread(p);
    }
    for (int i = 1; i < n; i++)
        if (parts[i].started) pthread_join(parts[i].thread, NULL);
}

/* Allocate the pinned buffers. Without them, uploads run at the speed of the driver's own copy. */
static void llm__stages_create(llm__cuda *cuda) {
    cuda->stage_bytes = 32 << 20; /* large, so that starting threads costs little */
    for (llm__stage &stage : cuda->stages) {
        void **host = (void **)&stage.host;
        if (cudaHostAlloc(host, cuda->stage_bytes, cudaHostAllocDefault) != cudaSuccess)
            stage.host = NULL;
        else if (cudaEventCreateWithFlags(&stage.done, cudaEventDisableTiming) != cudaSuccess)
            stage.done = NULL;
    }
    cudaGetLastError();
}

/* Returns when `host` has been read; copies to the device may still be queued. */
static bool llm__cuda_upload(
    void *context, void *device, const void *host, size_t bytes, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context, err);
    auto fine = [&](cudaError_t code) {
        return llm__cuda_check(cuda, code, "copying to the device", err);
    };
    cuda->x = NULL;
    /* For smaller copies, creating pinned buffers would take longer than the copy. */
    if (!cuda->stage_bytes && bytes >= 1 << 20) llm__stages_create(cuda);
    for (size_t first = 0, part; first < bytes; first += part) {
        llm__stage *stage = &cuda->stages[cuda->next_stage++ % LLM__STAGES];
        const char *from = (const char *)host + first;
        bool staged = stage->host && stage->done;
        part = staged && bytes - first > cuda->stage_bytes ? cuda->stage_bytes : bytes - first;
        if (staged && !fine(cudaEventSynchronize(stage->done))) return false;
        if (staged) llm__copy_by_threads(stage->host, from, part);
        if (!fine(cudaMemcpyAsync((char *)device + first, staged ? stage->host : from, part,
                cudaMemcpyHostToDevice, cuda->stream)) ||
            !fine(staged ? cudaEventRecord(stage->done, cuda->stream)
                         : cudaStreamSynchronize(cuda->stream)))
            return false;
    }
    return true;
}

static bool llm__cuda_download(
    void *context, void *host, const void *device, size_t bytes, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context, err);
    return llm__cuda_tell(cuda, err) &&
        llm__cuda_check(cuda,
            cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda->stream),
            "copying from the device", err) &&
        llm__cuda_finish(cuda, err);
}

static bool llm__cuda_sync(void *context, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context, err);
    llm_error failure;
    if (!llm__cuda_finish(cuda, &failure) && cuda->failure.status == LLM_OK)
        cuda->failure = failure;
    return llm__cuda_tell(cuda, err);
}

static void llm__cuda_state(void *context, llm_device_state *state) {
    llm__cuda *cuda = llm__cuda_of(context);
    size_t free_bytes = 0, total_bytes = 0;
    if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) cudaGetLastError();
    memset(state, 0, sizeof *state);
    state->name = cuda->device_name;
    state->free_bytes = free_bytes;
    state->total_bytes = total_bytes;
    state->wait_seconds = cuda->wait_seconds;
    state->launches = cuda->launches;
    state->replays = cuda->replays;
    state->proved = __builtin_popcountll(cuda->verdict.used);
    state->proof_seconds = cuda->verdict.seconds;
    state->distrusted = *cuda->verdict.text ? cuda->verdict.text : NULL;
}

/* ---- Weights ---- */

static void llm__cuda_free_weight(void *context, llm_weight *w) {
    llm__cuda_release(context, (void *)w->data);
    w->data = NULL;
}

/* Pack the file rows in `raw`. */
static bool llm__cuda_pack(
    llm__cuda *cuda, const llm__packed &w, const llm__source &source, llm_error *err) {
    int64_t rows = source.end_row - source.first_row;
    unsigned chunks = llm__grid(llm__ceil_div(rows, LLM__TILE_ROWS) * w.n_chunks);
    if (w.row_scales)
        LLM_LAUNCH(llm__row_scales_kernel, llm__grid(rows), 32, 0, cuda->stream, source,
            (float *)w.row_scales);
    llm__with_layout(w.layout, [&](auto layout) {
        auto pack_kernel = llm__pack_kernel<decltype(layout)>;
        LLM_LAUNCH(pack_kernel, chunks / 8 + 1, 256, 0, cuda->stream, w, source);
    });
    return llm__cuda_check(cuda, cudaGetLastError(), "packing weights", err);
}

/* Bytes of a row in the file's layout. */
static size_t llm__row_bytes(llm_type type, int64_t cols) {
    const llm_type_info *info = llm_type_find(type);
    return info ? (size_t)(cols / info->block_values) * (size_t)info->block_bytes : 0;
}

static bool llm__cuda_load_weight(void *context, llm_weight *w, const void *host, llm_error *err) {
    enum { RAW_BYTES = 64 << 20 }; /* most bytes of file rows on the device at a time */
    llm__cuda *cuda = llm__cuda_of(context, err);
    const llm_type_info *type = llm_type_find(w->type);
    if (!type || !llm__format_of(w->type))
        return llm__cuda_fail(
            cuda, err, LLM_ERROR_UNSUPPORTED, "no kernel for weights of type %d", (int)w->type);
    if (w->rows < 1 || w->cols < 1 || w->cols % type->block_values || w->rows > INT32_MAX ||
        w->cols > INT32_MAX / 4)
        return llm__cuda_fail(cuda, err, LLM_ERROR_FORMAT,
            "a %s matrix of %lld x %lld: rows must be whole blocks of %d, and neither count may "
            "reach 2^29",
            type->name, (long long)w->rows, (long long)w->cols, type->block_values);
    llm__packed packed = llm__packed_of(w);
    size_t bytes =
        llm__packed_bytes(&packed) + (size_t)packed.n_tiles * LLM__TILE_ROWS * sizeof(float);
    void *device = llm__cuda_allocate(
        cuda, bytes, "weights (a smaller type, such as q8_0, needs less)", err);
    if (!device) return false;
    w->data = device;
    packed = llm__packed_of(w);

    llm__source source = {w->type, NULL, llm__row_bytes(w->type, w->cols), 0, 0, w->cols};
    /* rows per upload: whole tiles */
    int64_t step = (int64_t)(RAW_BYTES / source.row_bytes) / LLM__TILE_ROWS * LLM__TILE_ROWS;
    if (step < LLM__TILE_ROWS) step = LLM__TILE_ROWS;
    if (step > w->rows) step = w->rows;
    bool fine = llm__cuda_scratch(cuda, &cuda->raw, &cuda->raw_bytes,
        (size_t)step * source.row_bytes, "weights in transit", err);
    source.data = cuda->raw;
    for (; fine && source.end_row < w->rows; source.first_row = source.end_row) {
        source.end_row = source.first_row + step < w->rows ? source.first_row + step : w->rows;
        const char *from = (const char *)host + (size_t)source.first_row * source.row_bytes;
        fine = llm__cuda_upload(cuda, cuda->raw, from,
                   (size_t)(source.end_row - source.first_row) * source.row_bytes, err) &&
            llm__cuda_pack(cuda, packed, source, err);
    }
    /* With `overlap`, a kernel reads weights before it waits for earlier kernels. */
    fine = fine && llm__cuda_wait(cuda, "packing weights", err);
    if (!fine) llm__cuda_free_weight(cuda, w);
    return fine;
}

/* ---- Limits and the batch of a step ---- */

/* Make scratch memory large enough for `wanted` and for earlier programs, which keep theirs on
 * failure. */
static bool llm__cuda_reserve(llm__cuda *cuda, const llm__largest *wanted, llm_error *err) {
    /* rope_and_store keeps four heads (f32) in 48 KB, the shared memory that every launch has. */
    enum { HEAD_DIM = 3072 };
    if (wanted->max_tokens < 1 || wanted->max_context < 1)
        return llm__cuda_fail(
            cuda, err, LLM_ERROR_ARGUMENT, "prepare: every limit must be at least 1");
    if (wanted->head_dim > HEAD_DIM)
        return llm__cuda_fail(cuda, err, LLM_ERROR_UNSUPPORTED,
            "no kernel for heads of %d dimensions: %d is the most", (int)wanted->head_dim,
            (int)HEAD_DIM);
    llm__largest before = cuda->largest, *l = &cuda->largest;
    const int64_t *from = &wanted->max_tokens;
    for (int64_t *to = &l->max_tokens; to <= &l->vocab_size; to++, from++)
        if (*to < *from) *to = *from;
    /* Room for block tables of whole contexts in blocks of 16, for as many numbers in attention
     * items, and for draws with 64 adjustments each. A step that needs more grows its room. */
    int64_t tables = 4 * (7 * l->max_tokens + l->max_sequences * (l->max_context / 8 + 64));
    size_t draws = (size_t)l->max_sequences * (sizeof(llm__device_draw) + 16 + 64 * 20);
    bool fine = llm__cuda_room(cuda, &cuda->batch_room, (size_t)tables, LLM__TABLES, err) &&
        llm__cuda_room(cuda, &cuda->draw_room, draws, LLM__DRAWS, err) &&
        llm__parts_reserve(cuda, (int)l->max_sequences, l->vocab_size, err) &&
        llm__matmul_reserve(cuda, err) && llm__attention_reserve(cuda, (size_t)l->parts_bytes, err);
    if (!fine) *l = before;
    return fine;
}

/* Places the arrays of a step in batch_room, one after another. */
struct llm__batch_writer {
    char *host, *device;
    size_t used; /* bytes */
};

static int32_t *llm__batch_array(llm__batch_writer *writer, int64_t n, const int32_t **device) {
    int32_t *host = (int32_t *)(writer->host + writer->used);
    *device = (const int32_t *)(writer->device + writer->used);
    writer->used += (size_t)(n + 3) / 4 * 4 * sizeof(int32_t); /* 16-byte aligned */
    return host;
}

/* Set the sizes of a step. For a decode step that may become a graph, they are rounded up, so that
 * similar steps share a graph. Returns whether they were rounded up. */
static bool llm__batch_sizes(
    llm__cuda *cuda, const llm_program *program, const llm_batch *batch, bool may_be_graph) {
    llm__device_batch *b = &cuda->batch;
    memset(b, 0, sizeof *b);
    llm__list_shapes(cuda, program, b);
    b->n_tokens = batch->n_tokens;
    b->n_sequences = batch->n_sequences;
    b->n_logits = batch->n_logits;
    b->block_size = batch->block_size;
    for (int s = 0; s < batch->n_sequences; s++) {
        if (batch->seq_count[s] < 1) continue;
        b->max_count = llm__larger(b->max_count, batch->seq_count[s]);
        b->max_context = llm__larger(
            b->max_context, batch->positions[batch->seq_first[s]] + batch->seq_count[s]);
    }
    for (int i = 0; i < b->n_lists; i++) llm__list_items(cuda, batch, &b->lists[i], NULL);
    if (!may_be_graph || b->n_tokens > LLM__GRAPH_TOKENS || b->max_count > LLM__GRAPH_COUNT ||
        !llm__on(cuda, LLM__REPLAY))
        return false;
    b->n_tokens = llm_rounded_rows(b->n_tokens);
    b->n_sequences = llm_rounded_rows(b->n_sequences);
    b->n_logits = llm_rounded_rows(b->n_logits);
    b->max_count = llm_rounded_rows(b->max_count);
    for (int i = 0; i < b->n_lists; i++) {
        llm__attention_list *list = &b->lists[i];
        for (int &n : list->n) { /* rounding adds at most a quarter: contexts grow in every step */
            int step = 1;
            while (step <= n / 8) step *= 2;
            n = (n + step - 1) / step * step;
        }
        int rows = batch->parents ? list->group : b->max_count * list->group;
        if (list->n[LLM__MERGE_ITEMS]) /* upper limit: two tiles of few rows */
            list->n[LLM__MERGE_ITEMS] =
                (batch->parents ? b->n_tokens : b->n_sequences) * (rows > LLM__FEW_TILE ? 2 : 1);
    }
    int context = 128;
    while (context < b->max_context && context < 1 << 30) context *= 2;
    b->max_context = context;
    return true;
}

/* Write the lists of items. */
static bool llm__batch_items(
    llm__cuda *cuda, const llm_batch *batch, llm__batch_writer *writer, llm_error *err) {
    for (int i = 0; i < cuda->batch.n_lists; i++) {
        llm__attention_list *list = &cuda->batch.lists[i];
        llm__attention_item *to[LLM__ITEM_KINDS];
        for (int kind = 0; kind < LLM__ITEM_KINDS; kind++)
            to[kind] = (llm__attention_item *)llm__batch_array(
                writer, (int64_t)list->n[kind] * 12, (const int32_t **)&list->items[kind]);
        if (!llm__attention_reserve(cuda, llm__list_items(cuda, batch, list, to), err))
            return false;
    }
    return true;
}

/* Copy all arrays of the batch as one buffer, since each copy takes some microseconds. */
static bool llm__cuda_batch(llm__cuda *cuda, const llm_batch *batch, llm_error *err) {
    llm__device_batch *b = &cuda->batch;
    int table = batch->n_sequences * batch->table_stride;
    int32_t counts[4] = {batch->n_tokens, batch->n_sequences, batch->n_logits, batch->table_stride};
    const struct {
        const int32_t *from; /* (n); NULL: all padding */
        int n, rounded, padding; /* `rounded` numbers are written */
        const int32_t **device;
    } arrays[] = {{counts, 4, 4, 0, &b->counts},
        {batch->tokens, batch->n_tokens, b->n_tokens, 0, &b->tokens},
        {batch->positions, batch->n_tokens, b->n_tokens, 0, &b->positions},
        {batch->slots, batch->n_tokens, b->n_tokens, -1, &b->slots},
        {batch->parents, batch->parents ? batch->n_tokens : 0, b->n_tokens, -1, &b->parents},
        {NULL, 0, b->n_tokens, -1, &b->sequence_of},
        {batch->seq_first, batch->n_sequences, b->n_sequences, 0, &b->seq_first},
        {batch->seq_count, batch->n_sequences, b->n_sequences, 0, &b->seq_count},
        {batch->logit_rows, batch->n_logits, b->n_logits, 0, &b->logit_rows},
        {batch->block_tables, table, table, 0, &b->block_tables}};
    size_t bytes = 0;
    for (auto &array : arrays) bytes += (size_t)(array.rounded + 4) * sizeof(int32_t);
    for (int i = 0; i < b->n_lists; i++)
        for (int n : b->lists[i].n) bytes += (size_t)n * sizeof(llm__attention_item);
    /* The previous copy may still read this buffer. (Any wait since then has cleared the flag.) */
    if (!llm__cuda_room(cuda, &cuda->batch_room, bytes, LLM__TABLES, err) ||
        (cuda->batch_on_its_way && !llm__cuda_finish(cuda, err)))
        return false;
    llm__batch_writer writer = {cuda->batch_room.host, cuda->batch_room.device, 0};
    for (auto &array : arrays) {
        int32_t *to = llm__batch_array(&writer, array.rounded, array.device);
        if (array.n) memcpy(to, array.from, (size_t)array.n * sizeof *to);
        for (int i = array.n; i < array.rounded; i++) to[i] = array.padding;
        if (array.device != &b->sequence_of) continue;
        for (int s = 0; s < batch->n_sequences; s++)
            for (int t = 0; t < batch->seq_count[s]; t++) to[batch->seq_first[s] + t] = s;
    }
    if (!llm__batch_items(cuda, batch, &writer, err)) return false;
    cuda->batch_on_its_way = true;
    return llm__cuda_check(cuda,
        cudaMemcpyAsync(cuda->batch_room.device, cuda->batch_room.host, writer.used,
            cudaMemcpyHostToDevice, cuda->stream),
        "copying the tables of a step", err);
}

/* ========================================
 * [10] The program: operations become launches; decode steps are captured and replayed
 *
 * Each operation is one or two launches (llm__launch_op), unless `prepare` finds operations that
 * share one: matmuls with the same x (q, k and v; gate and up); a norm or a gate, and the rounding
 * of its result for the matmul after it; with few tokens, a norm and the matmul before it.
 *
 * GRAPHS. A decode step of 32 layers has about 200 launches, each 2 to 5 microseconds of CPU time:
 * for a small model, as long as the GPU needs for the step. A graph is a list of launches that the
 * driver has prepared: the CPU launches all of it in about 10 microseconds. It repeats the same
 * kernels, grids and arguments, so the tables of a step are always at the same place in device
 * memory, and grids are rounded up (llm_rounded_rows): steps of 27 and 31 tokens share a graph. The
 * extra threads find a slot of -1 or a sequence without tokens. A shape is captured the second time
 * it occurs, because many occur only once; large steps are not captured.
 * ===================================== */

struct llm__graph {
    const llm_program *program;
    llm__device_batch batch; /* sizes rounded up; pointers to the arrays */
    int n_logits; /* number of rows of the head, rounded up */
    cudaGraphExec_t exec; /* NULL: not captured yet */
    uint64_t last_use; /* value of llm__cuda.n_runs at the last use */
};

struct llm__run { /* one call of llm__cuda_run */
    const llm_program *program;
    llm_part part;
    int first; /* index in logit_rows of the head's first row */
    int n_tokens, n_logits; /* rows of the body; rows of the head; rounded up for a graph */
};

struct llm__planned { /* the plan of one operation */
    int n; /* matmuls, from this one on, that share a launch; else 1 */
    bool rounds; /* norm, gate: round the result for the matmul after it */
    bool norm; /* matmul: with few tokens, also compute the norm after it */
    const char **experts; /* device (n_experts) the packed matrices of experts */
};

/* Most tokens for which a matmul's last block computes the norm, one row after another. */
enum { LLM__NORM_TOKENS = 2 };

static float *llm__in(const llm__run *run, const llm_op *op, int index) {
    return op->in[index] < 0 ? NULL : run->program->buffers[op->in[index]].data;
}

/* The number of matmuls, from operation `index` on, that share one launch. */
static int llm__join(const llm__cuda *cuda, const llm_program *program, int index) {
    int n = 1, end = index < program->n_body ? program->n_body : program->n_ops;
    const llm_op *ops = program->ops;
    auto may_join = [](const llm_op &a, const llm_op &b) {
        return b.kind == LLM_OP_MATMUL && b.in[0] == a.in[0] && b.out != a.out &&
            b.out != a.in[0] && a.out != a.in[0] && b.weight->cols == a.weight->cols &&
            llm__format_of(a.weight->type)->layout == llm__format_of(b.weight->type)->layout &&
            llm__format_of(a.weight->type)->planes == llm__format_of(b.weight->type)->planes;
    };
    if (!cuda->options.fused || cuda->options.plain || !(program->fusions & LLM_FUSE_SIDE_BY_SIDE))
        return 1;
    for (; n < LLM__PRODUCTS && index + n < end; n++)
        for (int i = 0; i < n; i++)
            if (!may_join(ops[index + i], ops[index + n])) return n;
    return n;
}

/* Whether operation i may also round its result for the matmul after it. */
static bool llm__may_round(const llm__cuda *cuda, const llm_program *p, int i) {
    const llm_op *op = &p->ops[i], *matmul = op + 1;
    unsigned fusion = op->kind == LLM_OP_RMSNORM ? LLM_FUSE_OWN_COPIES
        : op->kind == LLM_OP_SWIGLU              ? LLM_FUSE_GATE
                                                 : 0;
    int end = i < p->n_body ? p->n_body : p->n_ops;
    return cuda->options.fused && !cuda->options.plain && p->fusions & fusion && i + 1 < end &&
        matmul->kind == LLM_OP_MATMUL && matmul->in[0] == op->out &&
        matmul->weight->cols == p->buffers[op->out].width;
}

/* Matmul i and those that share its launch. */
static llm__products llm__products_of(const llm_program *p, int i) {
    llm__products products;
    memset(&products, 0, sizeof products);
    products.n = ((const llm__planned *)p->plan)[i].n;
    for (int k = 0; k < products.n; k++) {
        const llm_op *op = &p->ops[i + k];
        products.each[k].w = llm__packed_of(op->weight);
        products.each[k].o = {
            p->buffers[op->out].data, op->bias ? (const float *)op->bias->data : NULL, op->add};
    }
    return products;
}

/* Norm or gate i and, if `prepare` planned it, the rounding of its result. */
static llm__next_x llm__next_x_of(llm__cuda *cuda, const llm__run *run, int i, int rows) {
    const llm_program *p = run->program;
    const llm_op *op = &p->ops[i];
    llm__next_x next = {llm__in(run, op, 0), llm__in(run, op, 1),
        op->weight ? (const float *)op->weight->data : NULL, op->epsilon, op->add, op->activation,
        p->buffers[op->out].data, {}, (unsigned *)cuda->done};
    next.rounded.cols = (int)(op->weight ? op->weight->cols : p->buffers[op->out].width);
    if (!((const llm__planned *)p->plan)[i].rounds ||
        !llm__on(cuda, op->weight ? LLM__NORM : LLM__GATE))
        return next;
    llm__products products = llm__products_of(p, i + 1);
    if (rows <= llm__most_rounded(cuda, &products.each[0].w))
        next.rounded = llm__rounded_for(cuda, products, rows);
    return next;
}

/* The groups of experts' rows, followed by scratch for sorting. */
static llm__expert_group *llm__groups_of(llm__cuda *cuda, int64_t n_groups, int **starts) {
    *starts = (int *)(cuda->groups + (size_t)n_groups * sizeof(llm__expert_group));
    return (llm__expert_group *)cuda->groups;
}

/* Launch an operation on routes. */
static void llm__launch_routes(llm__cuda *cuda, const llm__run *run, int index, unsigned across) {
    const llm_program *p = run->program;
    const llm_op *op = &p->ops[index];
    const float *x = llm__in(run, op, 0);
    const int32_t *sorted =
        (const int32_t *)llm__in(run, op, op->kind == LLM_OP_SUM_ROUTES ? 2 : 1);
    float *out = p->buffers[op->out].data;
    int n = run->n_tokens, k = op->n_used, rows = n * k, *starts;
    int size = llm__group_size(rows, op->n_experts),
        n_groups = (int)llm__most_groups(rows, op->n_experts, size);
    llm__expert_group *groups = llm__groups_of(cuda, n_groups, &starts);
    int width = (int)p->buffers[op->out].width;
    switch (op->kind) {
    case LLM_OP_ROUTE:
        LLM__START(cuda, llm__route_kernel, llm__ceil_div(n, 4), 128, 0, x, n, op->n_experts, k,
            op->normalize, (llm_route *)out);
        break;
    case LLM_OP_GROUP_ROUTES:
        LLM__START(cuda, llm__group_routes_kernel, 1, 256, 0, (const llm_route *)x,
            cuda->batch.slots, n, k, op->n_experts, size, n_groups, starts, (int32_t *)out, groups);
        break;
    case LLM_OP_GATHER_ROUTES:
        width /= k;
        LLM__START(cuda, llm__gather_rows_kernel,
            dim3(rows, llm__grid(llm__ceil_div(width, LLM__BLOCK))), LLM__BLOCK, 0, sorted + rows,
            x, width, out);
        break;
    case LLM_OP_EXPERTS: {
        llm__experts experts = {((const llm__planned *)p->plan)[index].experts, sorted, groups,
            op->n_experts, n_groups};
        llm__cuda_experts(cuda, x, llm__packed_of(op->weight), rows, experts, out);
        break;
    }
    default:
        LLM__START(cuda, llm__sum_routes_kernel, dim3(n, across), LLM__BLOCK, 0, x,
            (const llm_route *)llm__in(run, op, 1), sorted + 2 * rows, k, llm__in(run, op, 3),
            llm__in(run, op, 4), width, out);
    }
}

/* Launch operation i and those that share its launch. Returns their number. */
static int llm__launch_op(llm__cuda *cuda, const llm__run *run, int index) {
    const llm_program *p = run->program;
    const llm_op *op = &p->ops[index];
    const llm__planned *plan = (const llm__planned *)p->plan + index;
    const llm_weight *w = op->weight;
    const float *x = llm__in(run, op, 0), *vector = w ? (const float *)w->data : NULL;
    float *out = op->out < 0 ? NULL : p->buffers[op->out].data;
    int64_t width = op->out < 0 ? 0 : p->buffers[op->out].width;
    int rows = op->out >= 0 && p->buffers[op->out].head ? run->n_logits : run->n_tokens;
    unsigned across = llm__grid(llm__ceil_div(width, LLM__BLOCK));
    if (rows < 1) return plan->n;
    switch (op->kind) {
    case LLM_OP_EMBED:
        llm__with_layout(llm__packed_of(w).layout, [&](auto layout) {
            auto embed_kernel = llm__embed_kernel<decltype(layout)>;
            LLM__START(cuda, embed_kernel, dim3(rows, across), LLM__BLOCK, 0, cuda->batch.tokens,
                llm__packed_of(w), op->scale, out);
        });
        break;
    case LLM_OP_ROPE_ANGLES:
        LLM__START(cuda, llm__rope_angles_kernel, rows, 64, 0, cuda->batch.positions, vector,
            op->rope_dim / 2, op->scale, (float2 *)out);
        break;
    case LLM_OP_RMSNORM:
    case LLM_OP_SWIGLU: llm__cuda_next_x(cuda, llm__next_x_of(cuda, run, index, rows), rows); break;
    case LLM_OP_LAYERNORM:
        LLM__START(cuda, llm__layernorm_kernel, rows, llm__threads(w->cols), 0, x, vector,
            op->bias ? (const float *)op->bias->data : NULL, (int)w->cols, op->epsilon, out);
        break;
    case LLM_OP_SOFTCAP:
        LLM__START(cuda, llm__softcap_kernel, llm__grid(llm__ceil_div(rows * width, LLM__BLOCK)),
            LLM__BLOCK, 0, x, op->scale, rows * width, out);
        break;
    case LLM_OP_MATMUL: {
        llm__products products = llm__products_of(p, index);
        if (plan->norm && rows <= LLM__NORM_TOKENS &&
            llm__on(cuda, LLM__FEW + products.each[0].w.layout) && llm__on(cuda, LLM__LAST_BLOCK))
            products.next = llm__next_x_of(cuda, run, index + 1, rows);
        llm__cuda_matmuls(cuda, x, &products, rows);
        return plan->n + (products.next.rounded.n > 0);
    }
    case LLM_OP_ROPE_STORE:
        llm__cuda_rope_and_store(
            cuda, op, x, llm__in(run, op, 1), llm__in(run, op, 2), llm__in(run, op, 3), p->cache);
        break;
    case LLM_OP_ATTENTION:
        llm__cuda_attention(cuda, &op->attention, x, p->cache, op->layer, out);
        break;
    case LLM_OP_GATHER_ROWS:
        LLM__START(cuda, llm__gather_rows_kernel, dim3(rows, across), LLM__BLOCK, 0,
            cuda->batch.logit_rows + run->first, x, (int)width, out);
        break;
    case LLM_OP_GATHER_COLUMNS:
        LLM__START(cuda, llm__gather_columns_kernel, llm__grid(rows * across, 1 << 20), LLM__BLOCK,
            0, x, w->columns, rows * w->cols, (int)w->cols, out);
        break;
    case LLM_OP_ROUTE:
    case LLM_OP_GROUP_ROUTES:
    case LLM_OP_GATHER_ROUTES:
    case LLM_OP_EXPERTS:
    case LLM_OP_SUM_ROUTES: llm__launch_routes(cuda, run, index, across); break;
    default: break;
    }
    return plan->n;
}

/* Launch a part of the program. */
static void llm__launch_part(llm__cuda *cuda, const llm__run *run) {
    const llm_program *p = run->program;
    int end = run->part & LLM_HEAD ? p->n_ops : p->n_body;
    cuda->x = NULL; /* a graph must not depend on an input rounded before it */
    for (int i = run->part & LLM_BODY ? 0 : p->n_body, n; i < end; i += n) {
        double start = p->seconds ? llm_seconds() : 0;
        if (cuda->failure.status == LLM_OK) cuda->latest = i;
        n = llm__launch_op(cuda, run, i);
        if (!p->seconds) continue;
        llm__cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "a profiled operation");
        p->seconds[i] += llm_seconds() - start;
    }
    cuda->x = NULL;
}

/* ---- Graphs ---- */

static void llm__graph_free(llm__graph *graph) {
    if (graph->exec) cudaGraphExecDestroy(graph->exec);
    memset(graph, 0, sizeof *graph);
}

/* Free the graphs of a program; NULL: of all programs. */
static void llm__graphs_forget(llm__cuda *cuda, const llm_program *program) {
    for (int i = cuda->n_graphs - 1; i >= 0; i--) {
        if (program && cuda->graphs[i].program != program) continue;
        llm__graph_free(&cuda->graphs[i]);
        cuda->graphs[i] = cuda->graphs[--cuda->n_graphs];
        memset(&cuda->graphs[cuda->n_graphs], 0, sizeof *cuda->graphs);
    }
}

static llm__graph *llm__graph_find(llm__cuda *cuda, const llm__run *run) {
    for (int i = 0; i < cuda->n_graphs; i++) {
        llm__graph *g = &cuda->graphs[i];
        if (g->program == run->program && g->n_logits == run->n_logits &&
            !memcmp(&g->batch, &cuda->batch, sizeof cuda->batch))
            return g;
    }
    return NULL;
}

/* Add this shape to the list; if the list is full, remove the least recently used one. */
static void llm__graph_remember(llm__cuda *cuda, const llm__run *run) {
    if (!cuda->graphs && !(cuda->graphs = (llm__graph *)calloc(LLM__GRAPHS, sizeof *cuda->graphs)))
        return;
    llm__graph *graph = &cuda->graphs[cuda->n_graphs];
    if (cuda->n_graphs < LLM__GRAPHS) {
        cuda->n_graphs++;
    } else {
        graph = cuda->graphs;
        for (int i = 1; i < LLM__GRAPHS; i++)
            if (cuda->graphs[i].last_use < graph->last_use) graph = &cuda->graphs[i];
        llm__graph_free(graph);
    }
    graph->program = run->program;
    graph->batch = cuda->batch;
    graph->n_logits = run->n_logits;
    graph->last_use = cuda->n_runs;
}

/* Capture the launches of a run. False: a launch failed, or memory ran out. The caller then
 * launches the kernels directly, which reports any failure. */
static bool llm__graph_capture(llm__cuda *cuda, const llm__run *run, llm__graph *graph) {
    uint64_t launches = cuda->launches;
    llm_error before = cuda->failure;
    cudaGraph_t captured = NULL;
    if (cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess)
        return cudaGetLastError(), false;
    llm__cuda_clear(&cuda->failure);
    llm__launch_part(cuda, run);
    cuda->launches = launches;
    bool good = cudaStreamEndCapture(cuda->stream, &captured) == cudaSuccess &&
        cuda->failure.status == LLM_OK &&
        cudaGraphInstantiate(&graph->exec, captured, 0) == cudaSuccess;
    if (captured) cudaGraphDestroy(captured);
    cuda->failure = before;
    if (!good) {
        cudaGetLastError();
        graph->exec = NULL;
    }
    return good;
}

/* Replay the graph of a run, after capturing it if necessary. False: the shape is new, or the graph
 * cannot be captured or launched (a first launch allocates device memory). */
static bool llm__graph_replay(llm__cuda *cuda, const llm__run *run) {
    llm__graph *graph = llm__graph_find(cuda, run);
    if (!graph) return llm__graph_remember(cuda, run), false;
    graph->last_use = cuda->n_runs;
    if (!graph->exec && !llm__graph_capture(cuda, run, graph)) return false;
    if (cudaGraphLaunch(graph->exec, cuda->stream) == cudaSuccess) {
        cuda->replays++;
        cuda->x = NULL; /* the graph has overwritten `rounded` */
        return true;
    }
    cudaGetLastError();
    cudaGraphExecDestroy(graph->exec);
    graph->exec = NULL;
    return false;
}

/* ---- Prepare and run ---- */

static void llm__cuda_forget(void *context, llm_program *program) {
    llm__cuda *cuda = llm__cuda_of(context);
    llm__graphs_forget(cuda, program);
    for (int i = 0; program->plan && i < program->n_ops; i++)
        llm__cuda_release(cuda, ((llm__planned *)program->plan)[i].experts);
    free(program->plan);
    program->plan = NULL;
}

/* Upload the addresses of the experts' matrices, and find the scratch memory that the operation
 * needs. */
static bool llm__plan_experts(llm__cuda *cuda, const llm_op *op, int max_tokens,
    llm__planned *plan, llm__largest *largest, llm_error *err) {
    size_t bytes = (size_t)op->n_experts * sizeof *plan->experts;
    const char **matrices = (const char **)malloc(bytes);
    for (int e = 0; matrices && e < op->n_experts; e++)
        matrices[e] = (const char *)op->weight[e].data;
    plan->experts = (const char **)llm__cuda_allocate(cuda, bytes, "the table of experts", err);
    bool fine = matrices && plan->experts &&
        llm__cuda_upload(cuda, plan->experts, matrices, bytes, err);
    if (!matrices)
        llm__cuda_fail(cuda, err, LLM_ERROR_MEMORY, "out of memory: %zu bytes of a table", bytes);
    free(matrices);
    int64_t rows = (int64_t)llm_rounded_rows(max_tokens) * op->n_used,
            groups = llm__most_groups(rows, op->n_experts, 8),
            padded = groups * 8 > llm__most_groups(rows, op->n_experts, 16) * 16
        ? groups * 8
        : llm__most_groups(rows, op->n_experts, 16) * 16;
    int64_t rounded = padded * (int64_t)llm__rounded_bytes(llm__packed_of(op->weight).n_chunks),
            scratch = groups * (int64_t)sizeof(llm__expert_group) +
        (op->n_experts + 2) * (int64_t)sizeof(int);
    if (fine && groups > 65535) /* the height of a grid */
        fine = llm__cuda_fail(cuda, err, LLM_ERROR_UNSUPPORTED,
            "steps of %d tokens are too large for %d experts of which each uses %d", max_tokens,
            op->n_experts, op->n_used);
    if (rounded > largest->experts_bytes) largest->experts_bytes = rounded;
    if (scratch > largest->group_bytes) largest->group_bytes = scratch;
    return fine;
}

static bool llm__cuda_prepare(
    void *context, llm_program *program, const llm_limits *limits, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context, err);
    llm__largest largest = {llm__larger(limits->max_tokens, limits->max_logits),
        limits->max_sequences, limits->max_context, 1, 1, 0, 0, 0, 1};
    llm__planned *plan = (llm__planned *)calloc((size_t)program->n_ops, sizeof *plan);
    llm__cuda_forget(cuda, program);
    program->plan = plan;
    if (!plan)
        return llm__cuda_fail(cuda, err, LLM_ERROR_MEMORY, "out of memory: %zu bytes for a plan",
            (size_t)program->n_ops * sizeof *plan);
    bool fine = true;
    for (int i = 0; i < program->n_ops; i++) {
        const llm_op *op = &program->ops[i];
        if (op->kind == LLM_OP_EXPERTS && fine)
            fine = llm__plan_experts(cuda, op, limits->max_tokens, &plan[i], &largest, err);
        if (op->kind == LLM_OP_MATMUL && op->weight->cols > largest.max_cols)
            largest.max_cols = op->weight->cols;
        if (op->kind == LLM_OP_MATMUL && i >= program->n_body)
            largest.vocab_size = op->weight->rows;
        if (op->kind == LLM_OP_ROPE_STORE || op->kind == LLM_OP_ATTENTION)
            largest.head_dim = llm__larger((int)largest.head_dim, op->attention.head_dim);
        plan[i].n = op->kind == LLM_OP_MATMUL ? llm__join(cuda, program, i) : 1;
        plan[i].rounds = llm__may_round(cuda, program, i);
        if (i > 0 && op->kind == LLM_OP_RMSNORM && i != program->n_body)
            plan[i - 1].norm = plan[i].rounds && op[-1].kind == LLM_OP_MATMUL &&
                op[-1].out == op->in[0] && op->out != op[-1].in[0] &&
                op->weight->cols == op[-1].weight->rows;
    }
    largest.parts_bytes = (int64_t)llm__largest_parts(cuda, program, limits);
    llm__graphs_forget(cuda, NULL); /* graphs may use scratch memory that moves here */
    if (fine && llm__cuda_reserve(cuda, &largest, err)) return true;
    llm__cuda_forget(cuda, program);
    return false;
}

static bool llm__cuda_run(void *context, const llm_program *program, llm_part part,
    const llm_batch *batch, int first, int n, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context, err);
    llm__run run = {program, part, first, batch->n_tokens, n};
    if (!program->plan)
        return llm__cuda_fail(cuda, err, LLM_ERROR_ARGUMENT, "run: the program is not prepared");
    bool graph = part == LLM_WHOLE && first == 0 && !program->seconds;
    if (n < 1) run.part = (llm_part)(part & LLM_BODY);
    if (batch->n_tokens > cuda->largest.max_tokens || n > cuda->largest.max_tokens)
        return llm__cuda_fail(cuda, err, LLM_ERROR_DEVICE,
            "a step of %d tokens and %d rows of logits is larger than what was prepared",
            batch->n_tokens, n);
    if (part & LLM_BODY) {
        graph = llm__batch_sizes(cuda, program, batch, graph);
        if (!llm__cuda_batch(cuda, batch, err)) return false;
    }
    if (graph) run.n_tokens = cuda->batch.n_tokens, run.n_logits = llm_rounded_rows(n);
    cuda->n_runs++;
    if (!graph || !llm__graph_replay(cuda, &run)) llm__launch_part(cuda, &run);
    return true;
}

/* ========================================
 * [11] The backend
 * ===================================== */

static void llm__cuda_destroy(llm_backend *backend) {
    llm__cuda *cuda = (llm__cuda *)backend->context;
    /* Creation failed. cudaSetDevice could allocate hundreds of MB on the device, so it is not
     * called. */
    if (!cuda->stream) {
        free(cuda);
        return;
    }
    cudaSetDevice(cuda->device);
    cudaStreamSynchronize(cuda->stream);
    llm__graphs_forget(cuda, NULL);
    free(cuda->graphs);
    for (llm__stage &stage : cuda->stages) {
        cudaFreeHost(stage.host);
        if (stage.done) cudaEventDestroy(stage.done);
    }
    cudaFreeHost(cuda->batch_room.host);
    cudaFreeHost(cuda->draw_room.host);
    for (char *memory : {cuda->batch_room.device, cuda->draw_room.device, cuda->raw, cuda->rounded,
             cuda->parts, cuda->lists, cuda->quarters, cuda->done, cuda->groups})
        cudaFree(memory);
    cudaStreamDestroy(cuda->stream);
    cudaGetLastError();
    free(cuda);
}

/* Find the GPU, or report what is missing. */
static bool llm__cuda_find(llm__cuda *cuda, llm_error *err) {
    int n = 0, driver = 0, runtime = 0, device = cuda->options.device;
    cudaError_t code = cudaGetDeviceCount(&n);
    cudaGetLastError();
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (code == cudaErrorInsufficientDriver && driver == 0)
        return llm__cuda_fail(cuda, err, LLM_ERROR_UNSUPPORTED, "no NVIDIA driver is installed");
    if (code == cudaErrorInsufficientDriver)
        return llm__cuda_fail(cuda, err, LLM_ERROR_DEVICE,
            "the NVIDIA driver supports CUDA up to %d.%d, but this program was built for CUDA "
            "%d.%d: install a newer driver, or build with an older CUDA Toolkit",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (code == cudaErrorNoDevice || (code == cudaSuccess && n == 0))
        return llm__cuda_fail(cuda, err, LLM_ERROR_UNSUPPORTED, "there is no NVIDIA GPU here");
    if (!llm__cuda_check(cuda, code, "looking for a GPU", err)) return false;
    if (device < 0 || device >= n)
        return llm__cuda_fail(cuda, err, LLM_ERROR_ARGUMENT,
            "there is no GPU %d: there are %d, counted from 0", device, n);
    cudaDeviceProp facts;
    code = cudaGetDeviceProperties(&facts, device);
    if (!llm__cuda_check(cuda, code, "reading the properties of the GPU", err)) return false;
    snprintf(cuda->device_name, sizeof cuda->device_name, "%s", facts.name);
    cuda->device = device;
    cuda->n_processors = facts.multiProcessorCount;
    cuda->capability = 10 * facts.major + facts.minor;
    if (cuda->capability < 90 || driver < 12030 || runtime < 12030) /* for graphs: CUDA 12.3 */
        cuda->options.overlap = false;
    cuda->shared_bytes = facts.sharedMemPerBlockOptin;
    if (cuda->capability < 80)
        return llm__cuda_fail(cuda, err, LLM_ERROR_UNSUPPORTED,
            "compute capability %d.%d: 8.0 (Ampere) or newer is needed", facts.major, facts.minor);
    return true;
}

#ifdef LLM_EMULATED
#define LLM__DEVICE_NAME "emulated"
#define LLM__DEVICE_BACKEND llm_emulated_backend
#else
#define LLM__DEVICE_NAME "cuda"
#define LLM__DEVICE_BACKEND llm_cuda_backend
#endif

/* Create a backend without testing the device. */
static llm__cuda *llm__cuda_open(const llm_gpu_options *options, llm_error *err) {
    llm__cuda_clear(err);
    llm__cuda *cuda = (llm__cuda *)calloc(1, sizeof *cuda);
    if (!cuda) {
        if (err) {
            err->status = LLM_ERROR_MEMORY;
            snprintf(err->message, sizeof err->message, "out of memory for a backend");
        }
        return NULL;
    }
    llm_backend *b = &cuda->backend;
    *b = {LLM__DEVICE_NAME, cuda, false, llm__cuda_allocate, llm__cuda_release, llm__cuda_upload,
        llm__cuda_download, llm__cuda_load_weight, llm__cuda_free_weight, llm__cuda_prepare,
        llm__cuda_forget, llm__cuda_run, NULL, llm__cuda_sync, llm__cuda_copy_blocks,
        llm__cuda_copy_slots, llm__cuda_sample, llm__cuda_state, 100 /* H200, f16: 440 TFLOP/s
        forecast for 4.3 TB/s */, llm__cuda_destroy};
    cuda->options = options ? *options : llm_gpu_defaults();
    if (llm__cuda_find(cuda, err) &&
        llm__cuda_check(cuda, cudaSetDevice(cuda->device), "choosing the GPU", err) &&
        llm__cuda_check(cuda, cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking),
            "creating a stream", err) &&
        llm__cuda_check(cuda,
            cudaFuncSetAttribute(llm__draw_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                (int)sizeof(llm__draw_shared)),
            "preparing the kernels", err)) {
        cudaFuncAttributes facts; /* code for older GPUs does not wait for the previous kernel */
        if (cudaFuncGetAttributes(&facts, llm__merge_kernel) != cudaSuccess ||
            facts.ptxVersion < 90)
            cuda->options.overlap = false;
        /* The kernel is empty, with no shared arrays, in code for GPUs other than sm_90a. */
        cuda->wgmma = cuda->capability == 90 && !cuda->options.deterministic &&
            cudaFuncGetAttributes(&facts, llm__matmul_wgmma_kernel<llm__f16_layout, 1>) ==
                cudaSuccess &&
            facts.sharedSizeBytes > 0;
        cudaGetLastError();
        return cuda;
    }
    llm__cuda_destroy(b);
    return NULL;
}

/* ---- The test of a device (its "proof") ----
 * When a process first opens a device, a program of unrelated operations runs over a few small
 * batches: with plain kernels only, then with more and more families of kernels. The results are
 * compared with those of the CPU's reference loops or, after the first program, of the plain
 * kernels. If an operation's result is wrong, or its kernel cannot start, the first family of
 * llm__family that it used is switched off, and the stage runs again. If a plain kernel is wrong,
 * the device is not used.
 *
 * To add a family, add its bit and name, llm__on where its kernel is chosen, its operation in
 * LLM__PROOF_OF and, if no operation in `build` uses it, one that does. */

enum {
    LLM__PROOF_TOKENS = 65,
    LLM__PROOF_BLOCKS = 20, /* blocks of 16 positions */
    LLM__PROOF_OPS = 24,
    LLM__PROOF_FLOATS = 1 << 20, /* room for buffers, vectors, cache */
    LLM__PROOF_BYTES = 2 << 20 /* room for all matrices */
};

/* The set of one family, and of LLM__LAYOUTS families from `first` on. */
constexpr uint64_t llm__bit(int family) { return (uint64_t)1 << family; }
constexpr uint64_t llm__bits(int first) { return llm__bit(first + LLM__LAYOUTS) - llm__bit(first); }

/* The families that each stage leaves out. */
enum { LLM__PLAIN, LLM__BASIC, LLM__ALL, LLM__AGAIN, LLM__PROOF_STAGES }; /* again: with graphs */
static const uint64_t LLM__PROOF_WITHOUT[LLM__PROOF_STAGES] = {~(uint64_t)0,
    llm__bit(LLM__REPLAY) | llm__bit(LLM__LAST_BLOCK) | llm__bit(LLM__SPLIT) |
        llm__bit(LLM__WGMMA_ATTENTION) | llm__bits(LLM__WGMMA)};

/* The kinds of operations, and the families that compute them. */
static const struct {
    llm_op_kind op;
    uint64_t families;
} LLM__PROOF_OF[] = {
    {LLM_OP_MATMUL,
        llm__bit(LLM__SPLIT_K) | llm__bits(LLM__WGMMA) | llm__bits(LLM__FEW) |
            llm__bits(LLM__MANY)},
    {LLM_OP_ATTENTION,
        llm__bit(LLM__SPLIT) | llm__bit(LLM__DECODE) | llm__bit(LLM__WGMMA_ATTENTION) |
            llm__bit(LLM__PREFILL)},
    {LLM_OP_RMSNORM, llm__bit(LLM__LAST_BLOCK) | llm__bit(LLM__NORM)},
    {LLM_OP_SWIGLU, llm__bit(LLM__GATE)}, {LLM_OP_ROPE_STORE, llm__bit(LLM__ROPE_STORE)}};

/* Rounding errors of f16 and f32. */
static const double LLM__HALF = 1.0 / 2048, LLM__SINGLE = 1.0 / (1 << 24);

struct llm__proof_side { /* the program on one backend */
    llm_backend *b;
    llm_program program;
    llm_op ops[LLM__PROOF_OPS];
    llm_buffer buffers[3 * LLM__PROOF_OPS];
    llm_weight weights[2 * LLM__PROOF_OPS];
    llm_cache cache;
    float *memory; /* device (LLM__PROOF_FLOATS) */
};

struct llm__proof_batch {
    int n_tokens, n_sequences;
    int first[3], count[3]; /* first position and number of tokens of each sequence */
    bool stages[LLM__PROOF_STAGES];
};

namespace { // so that two devices in one program have separate ones
struct llm__proof {
    llm__proof_side cpu, gpu, *side; /* side: the one that is being built */
    llm__cuda *cuda; /* the backend of `gpu` */
    llm_error *err;
    float start[LLM__PROOF_FLOATS], want[LLM__PROOF_FLOATS],
        got[LLM__PROOF_FLOATS]; /* memory before a run; after it: expected, actual */
    uint8_t files[LLM__PROOF_BYTES]; /* matrices */
    double allowed[LLM__PROOF_OPS]; /* allowed distance of results from the exact ones */
    int kind[LLM__PROOF_OPS]; /* index in LLM__PROOF_OF of the operation to blame */
    uint64_t state; /* of the random numbers */
    size_t used, used_bytes; /* values of `memory` and bytes of `files` in use */
    int n_weights;

    uint32_t random() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (uint32_t)(state >> 32);
    }
    /* The next n values of memory: from -range to range, of 11 bits, so that f16 can hold them. */
    float *values(int64_t n, float range = 1.0f) {
        size_t first = used;
        for (int64_t i = 0; i < n; i++)
            start[used++] = range * ((float)(random() % 2049) / 1024 - 1);
        used = (used + 31) / 32 * 32;
        return side->memory + first;
    }
    int buffer(int64_t width) { /* returns its index */
        llm_program *p = &side->program;
        p->buffers[p->n_buffers] = {"", width, false, values(LLM__PROOF_TOKENS * width)};
        return p->n_buffers++;
    }
    llm_weight *weight(llm_type type, int64_t rows, int64_t cols, const void *data) {
        side->weights[n_weights] = {type, rows, cols, data, NULL, NULL, false};
        return &side->weights[n_weights++];
    }
    llm_weight *vector(int64_t n) { return weight(LLM_F32, 1, n, values(n)); }

    llm_op *add(int of_kind, int in, int out, double error) {
        int i = side->program.n_ops++;
        llm_op *op = &side->ops[i];
        side->program.n_body = i + 1;
        op->kind = LLM__PROOF_OF[of_kind].op;
        op->name = "";
        for (int &k : op->in) k = -1;
        op->in[0] = in;
        op->out = out;
        op->epsilon = 1e-5f;
        allowed[i] = error;
        kind[i] = of_kind;
        return op;
    }
    llm_op *product(llm_type type, int64_t rows, int x, bool rounded);
    void norm_or_gate(int x, int up, int out) { /* up -1: a norm */
        int64_t n = side->buffers[x].width;
        llm_op *op = add(up < 0 ? 2 : 3, x, out, 8 * (double)(n + 32) * LLM__SINGLE);
        op->in[1] = up;
        if (up < 0) op->weight = vector(n);
    }
    bool build(llm__proof_side *to, int64_t cols, int64_t head_dim);
    void clear(llm__proof_side *from);
    bool run(llm__proof_side *on, const llm__proof_batch *sequences, float *out);
    double distance(int i, int n_tokens, double *error) const;
    void distrust(int family, const char *why);
    bool agree(const llm__proof_batch *batch, int stage);
    bool program(int64_t cols, int head_dim, int round);
    bool sampling();
};
} // namespace

/* Add a product with a matrix of random bytes with moderate scales. f16: powers of two, so that
 * sums are exact. rounded: x may have more bits than f16. NULL: it cannot be loaded. */
llm_op *llm__proof::product(llm_type type, int64_t rows, int x, bool rounded) {
    const llm_type_info *info = llm_type_find(type);
    int64_t cols = side->buffers[x].width;
    size_t row_bytes = llm__row_bytes(type, cols), bytes = (size_t)rows * row_bytes;
    bool floats = info->block_values == 1, q6_k = type == LLM_Q6_K,
         minimums = type == LLM_Q4_1 || type == LLM_Q5_1 || type == LLM_Q4_K || type == LLM_Q5_K;
    uint8_t *file = files + used_bytes;
    used_bytes += (bytes + 15) / 16 * 16;
    for (size_t k = 0; k < bytes; k++) file[k] = type == LLM_F16 ? 0 : (uint8_t)random();
    for (uint8_t *b = file; b < file + bytes; b += info->block_bytes) {
        /* the high bytes of a value, a scale, a minimum: between 2^-5 and 2^-2 */
        b[(floats || q6_k ? info->block_bytes : 2) - 1] =
            (uint8_t)((floats ? random() & 0x80 : 0) | (type == LLM_F16 || !floats ? 0x2c : 0x3d));
        if (minimums) b[3] = 0x2c;
        if (type == LLM_Q4_Z) b[2] &= 15, b[3] = 0; /* a zero point, as an integer */
        for (int k = 192; q6_k && k < 208; k++) b[k] &= 63; /* small enough to be exact in f16 */
    }
    double largest = 0;
    for (int64_t row = 0; row < rows; row++) {
        info->unpack(file + (size_t)row * row_bytes, got, cols);
        for (int64_t k = 0; k < cols; k++) largest = fmax(largest, fabs((double)got[k]));
    }
    /* sums in f32; minimums cancel a part */
    double sums = ((double)cols / 2 + 16) * LLM__SINGLE * (floats ? 1 : 4);
    llm_op *op = add(0, x, buffer(rows), (double)cols * largest * (sums + rounded * LLM__HALF));
    llm_weight *w = weight(type, rows, cols, NULL);
    op->weight = w;
    return side->b->load_weight(side->b->context, w, file, err) ? op : NULL;
}

/* Build the program on one side, and prepare it. Both sides get the same values. */
bool llm__proof::build(llm__proof_side *to, int64_t cols, int64_t head_dim) {
    static const llm_type types[] = {LLM_BF16, LLM_F32, LLM_Q8_0, LLM_Q4_0, LLM_Q4_1, LLM_Q4_Z,
        LLM_Q4_K, LLM_Q5_0, LLM_Q5_1, LLM_Q5_K, LLM_Q6_K};
    enum { HEADS = 4, KV_HEADS = 2 };
    llm_backend *b = to->b;
    llm_op *op;
    side = to;
    state = 1;
    used = used_bytes = 0;
    n_weights = 0;
    side->memory = (float *)b->allocate(b->context, sizeof start, "proving the device", err);
    if (!side->memory) return false;
    side->program.ops = side->ops;
    side->program.buffers = side->buffers;
    side->program.cache = &side->cache;
    side->program.fusions = LLM_FUSE_ALL;

    int x = buffer(cols), gated = buffer(64), up = buffer(64);
    for (llm_type type : types)
        if (!product(type, 24, x, false)) return false;
    op = product(LLM_Q6_K, 24, x, false); /* shares the launch of the other q6_k */
    if (!op) return false;
    op->add = true;
    op->bias = vector(24);
    norm_or_gate(x, -1, buffer(cols));
    norm_or_gate(gated, up, buffer(64));
    /* With few tokens, this product's last block computes the norm after it. The products after the
     * norm and the gate read what these have rounded. */
    if (!product(LLM_F16, 64, x, false)) return false;
    for (int i = 0, out; i < 2; i++) {
        out = buffer(64);
        norm_or_gate(i ? gated : out - 1, i ? up : -1, out);
        if (!product(LLM_Q4_0, 24, out, true)) return false;
        kind[side->program.n_ops - 1] = 2 + i;
    }

    /* Attention reads layer 0 of the cache, and rope_store writes layer 1. */
    int64_t layer = (int64_t)LLM__PROOF_BLOCKS * KV_HEADS * 16 * head_dim; /* values */
    float *keys = values(2 * layer);
    uint16_t *halves = (uint16_t *)(start + (keys - side->memory));
    for (int64_t i = 0; i < 4 * layer; i++) /* between 1/8 and 1 */
        halves[i] = (uint16_t)((random() & 0x8bff) | 0x3000);
    side->cache = {LLM_F16, 2, KV_HEADS, (int)head_dim, 16, LLM__PROOF_BLOCKS, (size_t)layer * 2,
        keys, keys + layer, false};
    int cache = side->program.n_buffers++;
    /* The scores give some positions much more weight than others. An error in a score changes its
     * weight and the sum of all weights. Values are at most 1. */
    double dim = (double)head_dim;
    llm_attention_shape shape = {
        HEADS, KV_HEADS, (int)head_dim, 8 / sqrtf((float)dim), false, 0, 0, 0};
    for (; shape.window <= 100; shape.window += 100) {
        int q = buffer(HEADS * head_dim);
        op = add(
            1, q, buffer(HEADS * head_dim), (16 * sqrt(dim) * dim + 64) * LLM__SINGLE + LLM__HALF);
        op->in[1] = cache;
        op->attention = shape;
    }
    /* Heads have values of at most 4 when their norm is 1. */
    op = add(4, buffer(head_dim), -1, 4 * (dim + 32) * LLM__SINGLE);
    op->layer = 1;
    for (int i = 1; i < 4; i++) op->in[i] = buffer((i == 1 ? HEADS : KV_HEADS) * head_dim);
    op->in[4] = cache;
    op->attention = shape;
    op->rope_dim = (int)head_dim;
    op->q_norm = vector(head_dim);
    op->k_norm = vector(head_dim);
    llm_limits limits = {LLM__PROOF_TOKENS, 8, 16 * LLM__PROOF_BLOCKS, 1};
    return b->prepare(b->context, &side->program, &limits, err);
}

void llm__proof::clear(llm__proof_side *from) {
    llm_backend *b = from->b;
    b->forget(b->context, &from->program);
    for (int i = 0; i < n_weights; i++)
        if (from->weights[i].rows > 1) b->free_weight(b->context, &from->weights[i]);
    b->release(b->context, from->memory);
    memset(from, 0, sizeof *from);
    from->b = b;
}

/* Run the program over a batch, and fetch all memory. */
bool llm__proof::run(llm__proof_side *on, const llm__proof_batch *sequences, float *out) {
    int32_t zeros[LLM__PROOF_TOKENS] = {}, positions[LLM__PROOF_TOKENS], slots[LLM__PROOF_TOKENS],
            first[3], tables[3 * LLM__PROOF_BLOCKS];
    llm_batch batch = {sequences->n_tokens, sequences->n_sequences, zeros, positions, slots, NULL,
        first, sequences->count, tables, LLM__PROOF_BLOCKS, 16, 1, zeros};
    for (int s = 0, t = 0; s < batch.n_sequences; s++) {
        first[s] = t;
        for (int i = 0; i < sequences->count[s]; i++, t++)
            positions[t] = sequences->first[s] + i, slots[t] = t * 7;
        for (int i = 0; i < LLM__PROOF_BLOCKS; i++) /* all read the same blocks */
            tables[s * LLM__PROOF_BLOCKS + i] = i * 7 % LLM__PROOF_BLOCKS;
    }
    llm_backend *b = on->b;
    return b->upload(b->context, on->memory, start, used * sizeof *start, err) &&
        b->run(b->context, &on->program, LLM_WHOLE, &batch, 0, 1, err) &&
        b->download(b->context, out, on->memory, used * sizeof *start, err);
}

/* The largest difference between two results of operation i, as a multiple of the allowed one.
 * *error: this difference. */
double llm__proof::distance(int i, int n_tokens, double *error) const {
    const llm_op *op = &gpu.ops[i];
    const llm_buffer *out = &gpu.buffers[op->out < 0 ? op->in[1] : op->out];
    const float *keys = (const float *)gpu.cache.keys; /* values follow */
    const uint16_t *is = (const uint16_t *)(got + (keys - gpu.memory)),
                   *must = (const uint16_t *)(want + (keys - gpu.memory));
    int64_t at = out->data - gpu.memory, n = n_tokens * out->width,
            in_cache = op->out < 0 ? (int64_t)(2 * gpu.cache.layer_bytes) : 0;
    double worst = 0;
    for (int64_t k = -in_cache; k < n; k++) {
        int64_t c = k + in_cache;
        if (k < 0 && is[c] == must[c]) continue;
        double value = k < 0 ? llm_f16_to_f32(must[c]) : want[at + k],
               off = fabs((k < 0 ? llm_f16_to_f32(is[c]) : got[at + k]) - value),
               far = off / (allowed[i] + (k < 0 ? 2 * LLM__HALF * fabs(value) : 0));
        if (!(far <= worst)) worst = far == far ? far : INFINITY, *error = off;
    }
    return worst;
}

/* Whether the device still works after a failure. */
static bool llm__cuda_answers(llm__cuda *cuda) {
    return cudaStreamSynchronize(cuda->stream) == cudaSuccess && cudaGetLastError() == cudaSuccess;
}

/* Switch a family off. */
void llm__proof::distrust(int family, const char *why) {
    static const char *const names[] = {"graphs", "sampling", "norms in products", "norms", "gate",
        "RoPE and store", "split products", "split attention", "decode attention",
        "attention with wgmma", "attention"};
    static const char *const rows[] = {"many rows with wgmma", "few rows", "many rows"};
    static const char *const layouts[] = {
        "f16", "q8_0", "q4_0", "q4_1 and q4_z", "q4_k", "q5_0 and q5_1", "q5_k", "q6_k"};
    char *text = cuda->verdict.text;
    size_t n = strlen(text), room = sizeof cuda->verdict.text - n;
    cuda->verdict.off |= llm__bit(family);
    if (family < LLM__WGMMA)
        snprintf(text + n, room, "%s%s (%s)", n ? ", " : "", names[family], why);
    else
        snprintf(text + n, room, "%sproducts of %s in %s (%s)", n ? ", " : "",
            rows[(family - LLM__WGMMA) / LLM__LAYOUTS],
            layouts[(family - LLM__WGMMA) % LLM__LAYOUTS], why);
}

/* Run a batch with the families of a stage, and compare the results with `want`. Switch off
 * families until they agree. */
bool llm__proof::agree(const llm__proof_batch *batch, int stage) {
    int n = gpu.program.n_ops, i = 0;
    double error = 0, far = 0;
    uint64_t replays = cuda->replays;
    cuda->off = LLM__PROOF_WITHOUT[stage] | cuda->verdict.off;
    cuda->used = 0;
    bool ran = run(&gpu, batch, got);
    if (ran)
        while (i < n && (far = distance(i, batch->n_tokens, &error)) <= 1) i++;
    else if (!llm__cuda_answers(cuda)) return false;
    else i = cuda->latest;
    cuda->verdict.used |= cuda->used;
    if (i == n) return true;
    char why[64] = "cannot start";
    if (ran) snprintf(why, sizeof why, "off by %.2g, not %.2g", error, error / far);
    uint64_t blame = cuda->used & LLM__PROOF_OF[kind[i]].families;
    if (kind[i] == 0) { /* this layout's families, and those of all layouts */
        int layout = llm__format_of(gpu.ops[i].weight->type)->layout;
        blame &= llm__bit(LLM__FEW + layout) | llm__bit(LLM__MANY + layout) |
            llm__bit(LLM__WGMMA + layout) | llm__bit(LLM__SPLIT_K);
    }
    if (cuda->replays > replays) blame = llm__bit(LLM__REPLAY);
    if (blame) return distrust(__builtin_ctzll(blame), why), agree(batch, stage);
    return ran &&
        llm__cuda_fail(cuda, err, LLM_ERROR_DEVICE, "all kernels for %s give wrong results, %s",
            llm_op_name(gpu.ops[i].kind), why);
}

/* Compare a program of this size on several batches. */
bool llm__proof::program(int64_t cols, int head_dim, int round) {
    const llm__proof_batch batches[] = {{9, 3, {296, 0, 61}, {4, 4, 1}, {true, true}},
        {65, 1, {195}, {65}, {false, true, cuda->wgmma}}, {1, 1, {40}, {1}, {false, false, true}},
        {2, 2, {300, 5}, {1, 1}, {true, false, true, true}}};
    static const int pretended[] = {2, 0, 1 << 20}; /* each selects other kernels */
    int processors = cuda->n_processors;
    bool fine = build(&gpu, cols, head_dim) && (round || build(&cpu, cols, head_dim));
    for (int i = 0; fine && i < 4; i++) {
        cuda->off = ~(uint64_t)0;
        fine = run(round ? &gpu : &cpu, &batches[i], want);
        for (int stage = 0; fine && stage < LLM__PROOF_STAGES; stage++) {
            cuda->n_processors = pretended[(i + round + stage) % 3];
            fine = !batches[i].stages[stage] || agree(&batches[i], stage);
        }
        cuda->n_processors = processors;
    }
    if (!round) clear(&cpu);
    clear(&gpu);
    return fine;
}

/* Draw tokens from random logits, as llm_draw_token does. */
bool llm__proof::sampling() {
    enum { N = 5000, DRAWS = 6 };
    llm_draw draws[DRAWS] = {};
    llm_adjustment changes[] = {{1, 2, 1.3f, 0.5f}, {5, 0, 1.3f, 0}, {77, -3, 1, 1}};
    llm_token_logprob tops[3];
    int32_t ids[DRAWS];
    float logprobs[DRAWS];
    used = 0;
    values(N, 12.0f);
    for (int i = 0; i < DRAWS; i++) {
        llm_sampling *s = &draws[i].sampling;
        *s = llm_sampling_defaults();
        s->temperature = 0.3f * (float)i;
        if (i == 1) draws[i].n_adjustments = draws[i].n_top = 3;
        if (i % 3 == 2) s->top_k = 50;
        if (i > 2) s->top_p = 0.9f;
        if (i == 4) s->min_p = 0.01f;
        draws[i].random = (uint64_t)random() << 32;
        draws[i].adjustments = changes;
        draws[i].top = tops;
    }
    float *logits = (float *)llm__cuda_allocate(cuda, N * sizeof(float), "proving the device", err);
    if (!logits) return false;
    bool same = llm__cuda_upload(cuda, logits, start, N * sizeof(float), err) &&
        llm__cuda_sample(cuda, logits, N, draws, DRAWS, ids, logprobs, err),
         fine = same || llm__cuda_answers(cuda);
    for (int i = 0; i < DRAWS && same; i++) {
        float logprob = llm_logprob(start, N, ids[i]);
        same = ids[i] == llm_draw_token(&draws[i], start, N) &&
            fabsf(logprobs[i] - logprob) <= 1e-5f * (1 + fabsf(logprob));
        for (int k = 0; k < draws[i].n_top; k++) {
            int token = tops[k].token, before = 0; /* likelier tokens */
            for (int v = 0; v < N; v++)
                before += start[v] > start[token] || (start[v] == start[token] && v < token);
            same = same && before == k;
        }
    }
    cuda->verdict.used |= llm__bit(LLM__SAMPLING);
    if (fine && !same) distrust(LLM__SAMPLING, "another token");
    llm__cuda_release(cuda, logits);
    return fine;
}

/* Test the device with a separate backend. False: the device is unusable. */
static bool llm__cuda_prove(llm__cuda *cuda, llm_error *err) {
    static const int sizes[][2] = {{256, 128}, {2560, 64}, {256, 256}, {256, 96}, {256, 32}};
    double start = llm_seconds();
    llm__proof *p = (llm__proof *)calloc(1, sizeof *p);
    if (!p) return llm__cuda_fail(cuda, err, LLM_ERROR_MEMORY, "out of memory: proving the device");
    p->err = err;
    p->cuda = cuda;
    p->side = &p->gpu;
    p->gpu.b = &cuda->backend;
    p->cpu.b = llm_cpu_backend(1, LLM_ISA_REFERENCE, err);
    int n = cuda->n_processors < 16 ? 1 : 5; /* few processors: emulated, hence slow */
    bool fine = p->cpu.b != NULL;
    for (int i = 0; fine && i < n; i++) fine = p->program(sizes[i][0], sizes[i][1], i);
    fine = fine && p->sampling();
    llm_backend_free(p->cpu.b);
    free(p);
    cuda->verdict.seconds = llm_seconds() - start;
    return fine;
}

/* Test a device, or find the verdict that this process has kept. */
static bool llm__cuda_judge(int device, llm__verdict *verdict, llm_error *err) {
    enum { KEPT = 16 }; /* devices from this number on are tested each time */
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static llm__verdict verdicts[KEPT + 1];
    llm__verdict *kept = &verdicts[device < KEPT ? device : (int)KEPT];
    llm_gpu_options options = llm_gpu_defaults();
    options.device = device;
    pthread_mutex_lock(&mutex);
    if (device >= KEPT || kept->seconds == 0) {
        llm__cuda *cuda = llm__cuda_open(&options, err);
        memset(kept, 0, sizeof *kept);
        if (cuda && llm__cuda_prove(cuda, err)) *kept = cuda->verdict;
        if (cuda) llm__cuda_destroy(&cuda->backend);
    }
    *verdict = *kept;
    pthread_mutex_unlock(&mutex);
    return verdict->seconds > 0;
}

llm_backend *LLM__DEVICE_BACKEND(const llm_gpu_options *options, llm_error *err) {
    llm__cuda *cuda = llm__cuda_open(options, err);
    if (!cuda) return NULL;
    const llm_gpu_options *o = &cuda->options;
    if (!o->trust && !llm__cuda_judge(o->device, &cuda->verdict, err)) {
        llm__cuda_destroy(&cuda->backend);
        return NULL;
    }
    auto off = [&](bool on, int family) { cuda->off |= on ? 0 : llm__bit(family); };
    cuda->off = cuda->verdict.off;
    off(o->graphs, LLM__REPLAY);
    off(o->fused, LLM__ROPE_STORE);
    off(o->split_attention, LLM__SPLIT);
    for (int i = LLM__SPLIT; i < LLM__FAMILIES; i++) off(!o->plain, i);
    if (!llm__on(cuda, LLM__SAMPLING)) cuda->backend.sample = NULL;
    return &cuda->backend;
}
