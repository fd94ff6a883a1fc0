/* llm.cu - the operations of llm.h on an NVIDIA GPU
 *
 * Copy this file next to llm.h and build it with the CUDA Toolkit (12 or 13):
 *
 *     nvcc -O3 -arch=native -c llm.cu -o llm_cuda.o
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
 * A kernel is a C function that many thousands of threads run at once. LLM_LAUNCH starts a grid of
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
 * few microseconds, so chapter [8] captures a decode step once as a graph and replays it.
 *
 * A kernel is limited by the bytes it moves to and from global memory, or by arithmetic. An H200
 * moves 4.8 TB/s and does 990 TFLOP/s with its matrix instructions, so memory is the limit below
 * about 200 operations per byte. 32 adjacent 4-byte words that a warp reads are one request of 128
 * bytes (a "coalesced" read); scattered words are up to 32 requests. Each kernel's comment gives
 * its limit, or the fewest bytes it can move.
 *
 * CONTENTS (search for the bracketed number)
 *
 *     [0]  The device         context, launches, sums over threads
 *     [1]  Memory             allocate, upload, download; errors; the batch of a step
 *     [2]  Simple kernels     RoPE, RMSNorm, SwiGLU, gathers, copies of blocks
 *     [3]  Matmul, few rows   limited by the bytes of the weights
 *     [4]  Matmul, many rows  limited by arithmetic
 *     [5]  Attention, many queries of a sequence (prefill)
 *     [6]  Attention, few queries of each sequence (decode)
 *     [7]  Sampling           from logits to a token
 *     [8]  The program        operations become launches; graphs
 *     [9]  The backend        the functions that llm.h calls
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

/* =====================================================================================
 * [0] The device and its small tools
 * ================================================================================== */

#ifndef LLM_EMULATED
/* Run kernel(...) on `grid` blocks of `block` threads, with shared_bytes of dynamic shared memory
 * per block. */
#define LLM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
/* The same on cuda->stream. With the option `overlap`, the kernel may begin before the previous one
 * ends: see llm__wait_for_last. */
#define LLM_LAUNCH_EARLY(cuda, kernel, grid, block, shared_bytes, ...) \
    llm__launch_early((cuda)->options.overlap, kernel, grid, block, shared_bytes, (cuda)->stream, __VA_ARGS__)
/* Unroll the next loop, so that the compiler can keep its arrays in registers. */
#define LLM_UNROLL _Pragma("unroll")
#define LLM_LOOP _Pragma("unroll 1") /* do not unroll, to save registers */
/* An array in shared memory, of constant size or of the size given at launch. */
#define LLM_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define LLM_DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(16) unsigned char llm__dynamic_shared[]; \
    type *name = (type *)(void *)llm__dynamic_shared
#else
#define LLM_UNROLL
#define LLM_LOOP
#endif

/* The batch of a step as kernels see it. For a step that may become a graph, the counts are rounded
 * up; `counts` has the exact ones. The extra rows have slot -1: they store nothing, and their
 * results are not read. */
typedef struct llm__device_batch {
    int n_tokens, n_sequences, n_logits; /* for grid sizes */
    int max_count;               /* largest number of tokens of a sequence; 1: plain decode */
    int max_context;             /* longest sequence, in positions, including this step */
    int block_size;
    const int32_t *counts;       /* device (4): the three exact counts; table_stride */
    const int32_t *tokens, *positions, *slots; /* device (n_tokens), as in llm_batch */
    const int32_t *sequence_of;  /* device (n_tokens): index of the sequence; -1: none */
    const int32_t *seq_first, *seq_count; /* device (n_sequences); count 0: no tokens */
    const int32_t *logit_rows;   /* device (n_logits), as in llm_batch */
    const int32_t *block_tables; /* device (n_sequences, counts[3]) */
} llm__device_batch;

enum { /* limits of the graphs of chapter [8] */
    LLM__GRAPH_TOKENS = 512, /* most tokens; in larger steps, launches take little of the time */
    LLM__GRAPH_COUNT = 16,   /* most tokens of one sequence */
    LLM__GRAPHS = 128        /* most graphs kept at a time */
};

enum { LLM__STAGES = 3 }; /* pinned buffers: one is filled while others are copied */

typedef struct llm__stage { /* a pinned buffer for uploads */
    char *host;           /* pinned (stage_bytes) */
    cudaEvent_t done;     /* signaled when the last copy out of `host` is done */
    bool busy;            /* whether that copy may still be running */
} llm__stage;

typedef struct llm__room { /* a pinned buffer and a device buffer of the same size */
    char *host, *device;  /* (bytes) each */
    size_t bytes;         /* size of one buffer */
} llm__room;

typedef struct llm__device_draw { /* llm_draw as the kernel of chapter [7] reads it */
    llm_sampling sampling;
    uint64_t random;
    int first_recent, n_recent; /* range in the array of recent tokens */
} llm__device_draw;

typedef struct llm__graph llm__graph; /* see chapter [8] */

typedef struct llm__largest { /* maximums over all prepared programs */
    int max_tokens, max_sequences, max_context;
    int n_heads, head_dim;
    int64_t max_cols;            /* columns of the widest matrix */
} llm__largest;

/* Contents of the buffer `rounded`. Consecutive matmuls with the same x (q, k and v; gate and up)
 * share it, so x is rounded once. Any other launch invalidates this record. */
typedef struct llm__rounded_input {
    const float *x;    /* input that was rounded; NULL: none */
    int n, n_chunks;   /* number of rows; number of chunks of 64 columns */
    int64_t cols;
    uint64_t launches; /* value of llm__cuda.launches after the last matmul */
} llm__rounded_input;

typedef struct llm__cuda { /* the context of the backend */
    llm_backend backend;
    llm_gpu_options options;
    cudaStream_t stream;
    char device_name[256];
    int device, n_processors;    /* CUDA device number; SMs */
    int capability;              /* compute capability: 80, 86, 89, 90, ... */
    size_t shared_bytes;         /* most dynamic shared memory per block */
    llm__largest largest;        /* sizes for which scratch memory is reserved */
    llm__graph *graphs;          /* (n_graphs), capacity LLM__GRAPHS */
    int n_graphs;
    uint64_t n_runs;             /* number of runs; llm__graph.last_use is one of them */

    llm__room batch_room;        /* the batch's arrays */
    bool batch_on_its_way;       /* whether the copy from batch_room.host may still be running */
    llm__room draw_room;         /* token draws and their results */
    llm__device_batch batch;     /* the current step's batch */

    llm__stage stages[LLM__STAGES];
    size_t stage_bytes;          /* size of one stage; 0: no stage is allocated */
    unsigned next_stage;

    double wait_seconds;         /* total time in which the CPU waited for the device */
    uint64_t launches, replays;  /* number of kernels launched; number of graphs replayed */
    char *raw, *rounded, *parts; /* device scratch: file rows; rounded x; parts of attention */
    char *pairs;                 /* device scratch: block numbers to copy */
    size_t raw_bytes, rounded_bytes, parts_bytes, pairs_bytes;
    llm__rounded_input last;     /* contents of `rounded` */
    llm_error failure;           /* first failure that is not yet reported */
} llm__cuda;

__host__ __device__ static inline int64_t llm__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- One kernel after another --------------------------------------------------------------
 * Between two kernels of a stream the GPU idles for a microsecond or two: the next kernel starts
 * when the last block has ended, then waits for its first bytes. Hopper and newer GPUs can close
 * this gap ("programmatic dependent launch", the option `overlap`). Once all blocks of a kernel
 * have called llm__let_next_begin, blocks of the next kernel start wherever there is room. Until a
 * thread of the next kernel calls llm__wait_for_last, it may read only weights, which no kernel
 * changes. */

#ifndef LLM_EMULATED
/* Wait until all earlier kernels have ended and their results can be read. */
__device__ __forceinline__ void llm__wait_for_last() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void llm__let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... P, class... A>
static void llm__launch_early(bool early, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                              A... arguments) {
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
    /* llm__cuda_launched checks for an error. */
    cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}
#endif

/* Call this first in a kernel that reads nothing before it waits. */
__device__ __forceinline__ void llm__take_over() {
    llm__let_next_begin();
    llm__wait_for_last();
}

/* ---- Numbers ---------------------------------------------------------------------------- */

__device__ static inline float llm__f16_bits_to_f32(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ static inline uint16_t llm__f32_to_f16_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
/* For the cache: clamp to f16's range, since an infinite value times a weight of 0 would be NaN. */
__device__ static inline uint16_t llm__stored_f16(float x) { return llm__f32_to_f16_bits(fmaxf(fminf(x, 65504.0f), -65504.0f)); }
__device__ static inline float llm__bf16_bits_to_f32(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }

/* Value i of an f32, f16 or bf16 row in the file's layout. */
__device__ static inline float llm__weight_value(llm_type type, const void *row, int64_t i) {
    if (type == LLM_F32) return ((const float *)row)[i];
    if (type == LLM_F16) return llm__f16_bits_to_f32(((const uint16_t *)row)[i]);
    return llm__bf16_bits_to_f32(((const uint16_t *)row)[i]);
}

/* Bytes of a row in the file's layout. */
static size_t llm__row_bytes(llm_type type, int64_t cols) {
    const llm_type_info *info = llm_type_find(type);
    return info ? (size_t)(cols / info->block_values) * (size_t)info->block_bytes : 0;
}

/* ---- Sums over threads --------------------------------------------------------------------
 * A warp adds 32 numbers in five rounds. In each, a thread adds the value of the thread whose
 * number differs in one bit. The order is fixed, and since a + b = b + a, all threads get the same
 * bits. */

__device__ static inline float llm__warp_sum(float x) {
    for (int other = 16; other; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

__device__ static inline float llm__warp_max(float x) {
    for (int other = 16; other; other /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
    return x;
}

/* Returns to each thread the sum of x over its block, of 32 to 1024 threads (a multiple of 32).
 * `shared` (32) is scratch. */
__device__ static inline float llm__block_sum(float x, float *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = llm__warp_sum(x);
    __syncthreads(); /* all threads of the previous call have read `shared` */
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return llm__warp_sum(lane < n_warps ? shared[lane] : 0.0f);
}

__device__ static inline float llm__block_max(float x, float *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = llm__warp_max(x);
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return llm__warp_max(lane < n_warps ? shared[lane] : -INFINITY);
}

/* =====================================================================================
 * [1] Memory: allocate, upload, download; errors
 *
 * A call that can fail fills in an llm_error. A launch has none: the context keeps its failure
 * until the next sync or download reports it. After a GPU is lost, every call fails, but the
 * backend can still be freed.
 * ================================================================================== */

static bool llm__cuda_fail(llm_error *err, llm_status status, const char *format, ...) {
    if (!err) return false;
    err->status = status;
    err->option = NULL;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(err->message, sizeof err->message, format, arguments);
    va_end(arguments);
    return false;
}

/* Return the context and make its GPU the current one of this thread: CUDA keeps the current GPU
 * per CPU thread, and any thread may call the engine. */
static llm__cuda *llm__cuda_of(void *context) {
    llm__cuda *cuda = (llm__cuda *)context;
    cudaSetDevice(cuda->device); /* if the GPU is lost, the next call reports it */
    return cuda;
}

static void llm__cuda_clear(llm_error *err) {
    if (err) memset(err, 0, sizeof *err);
}

/* Check the result of a CUDA call; `doing` names the call in the error. */
static bool llm__cuda_check(const llm__cuda *cuda, cudaError_t code, const char *doing, llm_error *err) {
    if (code == cudaSuccess) return true;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cuda->stream) cudaStreamIsCapturing(cuda->stream, &capture);
    cudaError_t now = cuda->stream && capture == cudaStreamCaptureStatusNone ? cudaStreamQuery(cuda->stream) : cudaSuccess;
    bool lost = now != cudaSuccess && now != cudaErrorNotReady;
    /* The error is reported here, so clear it: llm__cuda_launched must not report it again. */
    cudaGetLastError();
    return llm__cuda_fail(err, LLM_ERROR_DEVICE, "%s (%s): %s failed: %s%s", cuda->backend.name, cuda->device_name, doing,
                          cudaGetErrorString(code), lost ? ": the GPU is lost to this program, which has to be started again" : "");
}

/* Keep the first failure, to report it later: an operation cannot return an error. */
static void llm__cuda_note(llm__cuda *cuda, cudaError_t code, const char *doing) {
    llm_error err;
    if (code != cudaSuccess && !llm__cuda_check(cuda, code, doing, &err) && cuda->failure.status == LLM_OK)
        cuda->failure = err;
}

/* Call this after each launch. It keeps the error of a kernel that could not start. The next sync
 * reports errors that occur while the kernel runs. */
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

/* Report the failure that the context keeps, and clear it. */
static bool llm__cuda_tell(llm__cuda *cuda, llm_error *err) {
    bool fine = cuda->failure.status == LLM_OK;
    if (!fine && err) *err = cuda->failure;
    llm__cuda_clear(&cuda->failure);
    return fine;
}


/* Convert bytes to KiB, MiB or GiB. */
static double llm__in_units(size_t bytes, const char **unit) {
    *unit = bytes < 1 << 20 ? "KiB" : bytes < 1 << 30 ? "MiB" : "GiB";
    return (double)bytes / (bytes < 1 << 20 ? 1 << 10 : bytes < 1 << 30 ? 1 << 20 : 1 << 30);
}

static bool llm__out_of_memory(const llm__cuda *cuda, size_t bytes, const char *what, llm_error *err) {
    size_t free_bytes = 0, all_bytes = 0;
    const char *wanted, *left, *all;
    cudaMemGetInfo(&free_bytes, &all_bytes);
    cudaGetLastError();
    double wanted_units = llm__in_units(bytes, &wanted), free_units = llm__in_units(free_bytes, &left);
    double all_units = llm__in_units(all_bytes, &all);
    const char *advice = strchr(what, '(') ? "" : ": weights of a smaller type, smaller steps, a smaller cache or a "
                                                   "shorter context leave more";
    return llm__cuda_fail(err, LLM_ERROR_MEMORY,
                          "%s (%s): out of device memory: %.1f %s wanted for %s, and %.1f %s of %.1f %s are free%s",
                          cuda->backend.name, cuda->device_name, wanted_units, wanted, what, free_units, left, all_units, all, advice);
}

static void *llm__cuda_allocate(void *context, size_t bytes, const char *what, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    void *device = NULL;
    llm__cuda_clear(err);
    cudaError_t code = cudaMalloc(&device, bytes ? bytes : 1);
    if (code == cudaSuccess) return device;
    cudaGetLastError();
    if (code == cudaErrorMemoryAllocation) llm__out_of_memory(cuda, bytes, what, err);
    else llm__cuda_check(cuda, code, "allocating memory", err);
    return NULL;
}

static void llm__cuda_release(void *context, void *device) {
    llm__cuda_of(context);
    if (device) cudaFree(device); /* no check: a lost GPU has lost its memory too */
    cudaGetLastError();
}

/* ---- Upload -----------------------------------------------------------------------------
 * The device can read the CPU's memory at the full speed of the bus only if it is pinned. So
 * weights go through a few pinned buffers: threads copy the next piece of the mapped file into one
 * while the device reads another. One thread copies some 10 GB/s, and the bus carries 25 (PCIe 4)
 * to 60 GB/s (PCIe 5): hence several threads. */

typedef struct llm__copy_part {
    char *to;
    const char *from;
    size_t bytes;
} llm__copy_part;

static void *llm__copy_thread(void *part_) {
    const llm__copy_part *part = (const llm__copy_part *)part_;
    memcpy(part->to, part->from, part->bytes);
    return NULL;
}

enum { LLM__COPY_THREADS = 8 };

/* memcpy by several threads. If a thread cannot start, the caller copies its part. */
static void llm__copy_by_threads(char *to, const char *from, size_t bytes) {
    pthread_t threads[LLM__COPY_THREADS];
    llm__copy_part parts[LLM__COPY_THREADS];
    bool started[LLM__COPY_THREADS];
    int n = (int)(bytes >> 20); /* threads; each copies at least 1 MiB */
    n = n < 1 ? 1 : n > LLM__COPY_THREADS ? LLM__COPY_THREADS : n;
    int processors = llm_processor_count();
    if (n > processors) n = processors;
    size_t share = (size_t)llm__ceil_div((int64_t)bytes, (int64_t)n * 4096) * 4096;
    for (int i = n - 1; i >= 0; i--) { /* the caller copies part 0 */
        size_t first = (size_t)i * share < bytes ? (size_t)i * share : bytes;
        parts[i] = {to + first, from + first, bytes - first < share ? bytes - first : share};
        started[i] = i > 0 && pthread_create(&threads[i], NULL, llm__copy_thread, &parts[i]) == 0;
        if (!started[i]) llm__copy_thread(&parts[i]);
    }
    for (int i = 1; i < n; i++)
        if (started[i]) pthread_join(threads[i], NULL);
}

/* Allocate the pinned buffers. Uploads also work without them, at the speed of the driver's own
 * copy. */
static void llm__stages_create(llm__cuda *cuda) {
    cuda->stage_bytes = 32 << 20; /* large, so that starting threads costs little */
    for (int i = 0; i < LLM__STAGES; i++) {
        llm__stage *stage = &cuda->stages[i];
        if (cudaHostAlloc((void **)&stage->host, cuda->stage_bytes, cudaHostAllocDefault) != cudaSuccess) stage->host = NULL;
        else if (cudaEventCreateWithFlags(&stage->done, cudaEventDisableTiming) != cudaSuccess) stage->done = NULL;
    }
    cudaGetLastError();
}

static void llm__stages_free(llm__cuda *cuda) {
    for (int i = 0; i < LLM__STAGES; i++) {
        cudaFreeHost(cuda->stages[i].host);
        if (cuda->stages[i].done) cudaEventDestroy(cuda->stages[i].done);
    }
    memset(cuda->stages, 0, sizeof cuda->stages);
    cuda->stage_bytes = 0;
}

/* Returns when `host` has been read; the copies to the device may still be on the stream. */
static bool llm__cuda_upload(void *context, void *device, const void *host, size_t bytes, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    cuda->last.x = NULL;
    llm__cuda_clear(err);
    /* Smaller copies do not create pinned buffers, which would take longer than the copy. */
    if (!cuda->stage_bytes && bytes >= 1 << 20) llm__stages_create(cuda);
    for (size_t first = 0, part; first < bytes; first += part) {
        llm__stage *stage = &cuda->stages[cuda->next_stage++ % LLM__STAGES];
        char *to = (char *)device + first;
        const char *from = (const char *)host + first;
        bool staged = stage->host && stage->done;
        part = staged && bytes - first > cuda->stage_bytes ? cuda->stage_bytes : bytes - first;
        if (staged && stage->busy &&
            !llm__cuda_check(cuda, cudaEventSynchronize(stage->done), "copying to the device", err))
            return false;
        if (staged) llm__copy_by_threads(stage->host, from, part);
        if (!llm__cuda_check(cuda, cudaMemcpyAsync(to, staged ? stage->host : from, part, cudaMemcpyHostToDevice, cuda->stream),
                             "copying to the device", err))
            return false;
        stage->busy = staged;
        if (!llm__cuda_check(cuda, staged ? cudaEventRecord(stage->done, cuda->stream) : cudaStreamSynchronize(cuda->stream),
                             "copying to the device", err))
            return false;
    }
    return true;
}

static bool llm__cuda_download(void *context, void *host, const void *device, size_t bytes, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    llm__cuda_clear(err);
    if (!llm__cuda_tell(cuda, err)) return false;
    return llm__cuda_check(cuda, cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda->stream),
                           "copying from the device", err) &&
           llm__cuda_wait(cuda, "what the device was doing", err);
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
}

/* Grow scratch memory to at least `bytes`; its contents are lost. On failure, restore the old size
 * if possible: other engines of this backend rely on it. */
static bool llm__cuda_scratch(llm__cuda *cuda, char **scratch, size_t *scratch_bytes, size_t bytes, const char *what, llm_error *err) {
    if (bytes <= *scratch_bytes) return true;
    /* queued work may use the old memory */
    if (!llm__cuda_wait(cuda, "what the device was doing", err)) return false;
    llm__cuda_release(cuda, *scratch);
    *scratch = (char *)llm__cuda_allocate(cuda, bytes, what, err);
    if (*scratch) return *scratch_bytes = bytes, true;
    if (*scratch_bytes) *scratch = (char *)llm__cuda_allocate(cuda, *scratch_bytes, what, NULL);
    if (!*scratch) *scratch_bytes = 0;
    return false;
}

/* ---- Limits and the batch of a step ------------------------------------------------------- */

/* Largest head_dim: rope_and_store keeps four heads (f32) in 48 KB, the shared memory that every
 * launch may have. */
enum { LLM__HEAD_DIM = 3072 };

static int llm__larger(int a, int b) { return a > b ? a : b; }

static const char LLM__TABLES[] = "the tables of a step (smaller steps, fewer sequences or a shorter context need less)";
static const char LLM__DRAWS[] = "the draws of a step (fewer sequences need less)";
static const char LLM__PAIRS[] = "a list of blocks to copy";
enum { LLM__PAIRS_BYTES = 2 * 4096 * sizeof(int32_t) }; /* two lists of 4096 blocks; can grow */

static bool llm__matmul_reserve(llm__cuda *cuda, llm_error *err);    /* chapter [4] */
static bool llm__attention_reserve(llm__cuda *cuda, llm_error *err); /* chapter [6] */

static bool llm__cuda_room(llm__cuda *cuda, llm__room *room, size_t bytes, const char *what, llm_error *err);

/* Make scratch memory large enough for `wanted` and for the programs prepared before. On failure,
 * the earlier programs keep their memory. */
static bool llm__cuda_reserve(llm__cuda *cuda, const llm__largest *wanted, llm_error *err) {
    if (wanted->max_tokens < 1 || wanted->max_context < 1)
        return llm__cuda_fail(err, LLM_ERROR_ARGUMENT, "%s: prepare: every limit must be at least 1", cuda->backend.name);
    if (wanted->head_dim > LLM__HEAD_DIM)
        return llm__cuda_fail(err, LLM_ERROR_UNSUPPORTED, "%s: no kernel for heads of %d dimensions: %d is the most",
                              cuda->backend.name, wanted->head_dim, (int)LLM__HEAD_DIM);
    llm__largest before = cuda->largest, *l = &cuda->largest;
    l->max_tokens = llm__larger(l->max_tokens, wanted->max_tokens);
    l->max_sequences = llm__larger(l->max_sequences, wanted->max_sequences);
    l->max_context = llm__larger(l->max_context, wanted->max_context);
    l->n_heads = llm__larger(l->n_heads, wanted->n_heads);
    l->head_dim = llm__larger(l->head_dim, wanted->head_dim);
    if (wanted->max_cols > l->max_cols) l->max_cols = wanted->max_cols;
    /* Room for block tables of whole contexts in blocks of 16, and for draws with penalty windows
     * of 64 tokens. A step that needs more grows its room. */
    size_t tables = 4 * (5 * (size_t)l->max_tokens + (size_t)l->max_sequences * ((size_t)l->max_context / 16 + 4));
    size_t draws = (size_t)l->max_sequences * (sizeof(llm__device_draw) + 16 + 64 * 8);
    bool fine = llm__cuda_room(cuda, &cuda->batch_room, tables, LLM__TABLES, err) &&
                llm__cuda_room(cuda, &cuda->draw_room, draws, LLM__DRAWS, err) && llm__matmul_reserve(cuda, err) &&
                llm__attention_reserve(cuda, err) &&
                llm__cuda_scratch(cuda, &cuda->pairs, &cuda->pairs_bytes, LLM__PAIRS_BYTES, LLM__PAIRS, err);
    if (!fine) *l = before;
    return fine;
}

/* Grow a room to 1.5 x `bytes`, so that it seldom grows. Its contents are lost. */
static bool llm__cuda_room(llm__cuda *cuda, llm__room *room, size_t bytes, const char *what, llm_error *err) {
    if (bytes <= room->bytes) return true;
    bytes += bytes / 2;
    /* queued work may use the old memory */
    if (!llm__cuda_wait(cuda, "what the device was doing", err)) return false;
    cudaFreeHost(room->host);
    llm__cuda_release(cuda, room->device);
    memset(room, 0, sizeof *room);
    room->device = (char *)llm__cuda_allocate(cuda, bytes, what, err);
    if (!room->device) return false;
    cudaError_t code = cudaHostAlloc((void **)&room->host, bytes, cudaHostAllocDefault);
    if (code == cudaErrorMemoryAllocation)
        return cudaGetLastError(),
               llm__cuda_fail(err, LLM_ERROR_MEMORY, "%s (%s): out of pinned host memory: %zu bytes wanted for %s: is there a limit "
                              "on locked memory (ulimit -l)?", cuda->backend.name, cuda->device_name, bytes, what);
    if (!llm__cuda_check(cuda, code, "allocating pinned memory", err)) return false;
    room->bytes = bytes;
    return true;
}

/* Places the arrays of a step in batch_room, one after another. */
typedef struct llm__batch_writer {
    char *host, *device;
    size_t used; /* bytes */
} llm__batch_writer;

static int32_t *llm__batch_array(llm__batch_writer *writer, int64_t n, const int32_t **device) {
    int32_t *host = (int32_t *)(void *)(writer->host + writer->used);
    *device = (const int32_t *)(const void *)(writer->device + writer->used);
    writer->used += (size_t)(n + 3) / 4 * 4 * sizeof(int32_t); /* 16-byte aligned */
    return host;
}

static void llm__batch_copy(llm__batch_writer *writer, const int32_t *from, int n, int rounded, int32_t padding,
                            const int32_t **device) {
    int32_t *to = llm__batch_array(writer, rounded, device);
    memcpy(to, from, (size_t)n * sizeof *to);
    for (int i = n; i < rounded; i++) to[i] = padding;
}

/* Set the sizes of a step. If it is a decode step that may become a graph, they are rounded up, so
 * that similar steps share a graph. Returns whether they were rounded up. */
static bool llm__batch_sizes(llm__cuda *cuda, const llm_batch *batch, bool may_be_graph) {
    llm__device_batch *b = &cuda->batch;
    memset(b, 0, sizeof *b);
    b->n_tokens = batch->n_tokens;
    b->n_sequences = batch->n_sequences;
    b->n_logits = batch->n_logits;
    b->block_size = batch->block_size;
    for (int s = 0; s < batch->n_sequences; s++) {
        if (batch->seq_count[s] < 1) continue;
        b->max_count = llm__larger(b->max_count, batch->seq_count[s]);
        b->max_context = llm__larger(b->max_context, batch->positions[batch->seq_first[s] + batch->seq_count[s] - 1] + 1);
    }
    if (!may_be_graph || b->n_tokens > LLM__GRAPH_TOKENS || b->max_count > LLM__GRAPH_COUNT) return false;
    b->n_tokens = llm_rounded_rows(b->n_tokens);
    b->n_sequences = llm_rounded_rows(b->n_sequences);
    b->n_logits = llm_rounded_rows(b->n_logits);
    b->max_count = llm_rounded_rows(b->max_count);
    int context = 128;
    while (context < b->max_context && context < 1 << 30) context *= 2;
    b->max_context = context;
    return true;
}

/* Copy all arrays of the batch in one buffer, since each copy takes some microseconds. */
static bool llm__cuda_batch(llm__cuda *cuda, const llm_batch *batch, llm_error *err) {
    llm__device_batch *b = &cuda->batch;
    int64_t table = (int64_t)batch->n_sequences * batch->table_stride;
    size_t numbers = (size_t)(4 + 4 * b->n_tokens + 2 * b->n_sequences + b->n_logits + table) + 8 * 4;
    if (!llm__cuda_room(cuda, &cuda->batch_room, numbers * sizeof(int32_t), LLM__TABLES, err)) return false;

    /* The previous copy may still read this buffer. (Any wait since then has cleared the flag.) */
    if (cuda->batch_on_its_way && !llm__cuda_wait(cuda, "what the device was doing", err)) return false;
    llm__batch_writer writer = {cuda->batch_room.host, cuda->batch_room.device, 0};
    int32_t counts[4] = {batch->n_tokens, batch->n_sequences, batch->n_logits, batch->table_stride};
    llm__batch_copy(&writer, counts, 4, 4, 0, &b->counts);
    llm__batch_copy(&writer, batch->tokens, batch->n_tokens, b->n_tokens, 0, &b->tokens);
    llm__batch_copy(&writer, batch->positions, batch->n_tokens, b->n_tokens, 0, &b->positions);
    llm__batch_copy(&writer, batch->slots, batch->n_tokens, b->n_tokens, -1, &b->slots);
    int32_t *sequence_of = llm__batch_array(&writer, b->n_tokens, &b->sequence_of);
    for (int t = 0; t < b->n_tokens; t++) sequence_of[t] = -1;
    for (int s = 0; s < batch->n_sequences; s++)
        for (int t = 0; t < batch->seq_count[s]; t++) sequence_of[batch->seq_first[s] + t] = s;
    llm__batch_copy(&writer, batch->seq_first, batch->n_sequences, b->n_sequences, 0, &b->seq_first);
    llm__batch_copy(&writer, batch->seq_count, batch->n_sequences, b->n_sequences, 0, &b->seq_count);
    llm__batch_copy(&writer, batch->logit_rows, batch->n_logits, b->n_logits, 0, &b->logit_rows);
    int32_t *tables = llm__batch_array(&writer, table, &b->block_tables);
    memcpy(tables, batch->block_tables, (size_t)table * sizeof *tables);
    cuda->batch_on_its_way = true;
    return llm__cuda_check(cuda, cudaMemcpyAsync(cuda->batch_room.device, cuda->batch_room.host, writer.used,
                                                 cudaMemcpyHostToDevice, cuda->stream),
                           "copying the tables of a step", err);
}

static bool llm__cuda_sync(void *context, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    llm_error failure;
    llm__cuda_clear(err);
    if (!llm__cuda_wait(cuda, "what the device was doing", &failure) && cuda->failure.status == LLM_OK) cuda->failure = failure;
    return llm__cuda_tell(cuda, err);
}

/* =====================================================================================
 * [2] Simple kernels
 *
 * Each does only a few operations per number, so it is limited by bytes or by the launch time.
 * ================================================================================== */

enum { LLM__BLOCK = 256 }; /* default threads per block */

/* Number of threads for a row of n numbers: whole warps, at most LLM__BLOCK threads. It depends
 * only on n, and so does the order of a sum over the row. */
static dim3 llm__threads(int64_t n) { return dim3((unsigned)(n < (int)LLM__BLOCK ? llm__ceil_div(n, 32) * 32 : (int)LLM__BLOCK)); }

/* A grid of n blocks, at most `most`. (CUDA allows 2^31 - 1 in x, 65535 in y and z.) */
static unsigned llm__grid(int64_t n, int64_t most) { return (unsigned)(n < 1 ? 1 : n < most ? n : most); }

/* One block per token. Runs once per step, for all layers. */
__global__ static void llm__rope_angles_kernel(const int32_t *positions, const float *frequencies, int n_pairs,
                                               float magnitude, float2 *angles) {
    llm__take_over();
    float position = (float)positions[blockIdx.x];
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        float angle = position * frequencies[i];
        angles[(int64_t)blockIdx.x * n_pairs + i] = make_float2(magnitude * cosf(angle), magnitude * sinf(angle));
    }
}

static void llm__cuda_rope_angles(llm__cuda *cuda, const float *frequencies, int rope_dim,
                                  float magnitude, float *angles) {
    LLM_LAUNCH_EARLY(cuda, llm__rope_angles_kernel, dim3(cuda->batch.n_tokens), dim3(64), 0, cuda->batch.positions,
                     frequencies, rope_dim / 2, magnitude, (float2 *)(void *)angles);
    llm__cuda_launched(cuda, "rope_angles");
}

/* One block per row. Bytes: the row read (the second time from a cache) and written. */
__global__ static void llm__rmsnorm_kernel(const float *x, const float *weight, int dim, float epsilon, float *out) {
    llm__take_over();
    LLM_SHARED(float, scratch, 32);
    const float *row = x + (int64_t)blockIdx.x * dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum += row[i] * row[i];
    float scale = rsqrtf(llm__block_sum(sum, scratch) / (float)dim + epsilon);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) out[(int64_t)blockIdx.x * dim + i] = row[i] * scale * weight[i];
}

static void llm__cuda_rmsnorm(llm__cuda *cuda, const float *x, const float *weight, int n, int dim, float epsilon,
                              float *out) {
    if (n < 1) return;
    LLM_LAUNCH_EARLY(cuda, llm__rmsnorm_kernel, dim3(n), llm__threads(dim), 0, x, weight, dim, epsilon, out);
    llm__cuda_launched(cuda, "rmsnorm");
}

/* Rotate the pairs of a head by its token's angles. The lanes of a warp share the pairs. */
__device__ static inline void llm__rope(float *head, const float2 *angles, int rope_dim, llm_rope_pairing pairing, int lane) {
    for (int i = lane; i < rope_dim / 2; i += 32) {
        int a = pairing == LLM_ROPE_HALVES ? i : 2 * i;
        int b = pairing == LLM_ROPE_HALVES ? i + rope_dim / 2 : 2 * i + 1;
        float x = head[a], y = head[b];
        head[a] = x * angles[i].x - y * angles[i].y;
        head[b] = x * angles[i].y + y * angles[i].x;
    }
}

typedef struct llm__rope_arguments {
    const int32_t *slots;         /* (T) */
    int n_tokens, n_heads, n_kv_heads, head_dim, rope_dim, block_size;
    llm_rope_pairing pairing;
    const float2 *angles;         /* (T, rope_dim/2) */
    const float *q_norm, *k_norm; /* (head_dim) or NULL */
    float epsilon;
    float *q;                     /* (T, n_heads, head_dim) */
    const float *k, *v;           /* (T, n_kv_heads, head_dim) */
    llm_type cache_type;
    char *keys, *values;          /* (n_blocks, n_kv_heads, block_size, head_dim) of this layer */
} llm__rope_arguments;

/* Index of the cache row (head_dim values) for one head of a token; -1: not stored. */
__device__ static inline int64_t llm__slot_row(const llm__rope_arguments *a, int slot, int kv_head) {
    if (slot < 0) return -1;
    return ((int64_t)(slot / a->block_size) * a->n_kv_heads + kv_head) * a->block_size + slot % a->block_size;
}

/* Head norm, RoPE and the write into the cache in one kernel. One warp per head of a token: query
 * heads, then key heads, then value heads. Bytes: q read and written; k and v read, and written in
 * the type of the cache. */
__global__ static void llm__rope_and_store_kernel(llm__rope_arguments a) {
    llm__take_over();
    LLM_DYNAMIC_SHARED(float, all_heads); /* (warps, head_dim) */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    float *head = all_heads + warp * a.head_dim;
    int heads = a.n_heads + 2 * a.n_kv_heads;
    for (int64_t item = (int64_t)blockIdx.x * n_warps + warp; item < (int64_t)a.n_tokens * heads;
         item += (int64_t)gridDim.x * n_warps) {
        int64_t token = item / heads;
        int which = (int)(item % heads);
        bool is_query = which < a.n_heads, is_value = which >= a.n_heads + a.n_kv_heads;
        int kv_head = (which - a.n_heads) % a.n_kv_heads;
        const float *from = is_query ? a.q + (token * a.n_heads + which) * a.head_dim
                                     : (is_value ? a.v : a.k) + (token * a.n_kv_heads + kv_head) * a.head_dim;
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
        if (!is_value) llm__rope(head, a.angles + token * (a.rope_dim / 2), a.rope_dim, a.pairing, lane);
        __syncwarp();
        if (is_query) {
            float *q = a.q + (token * a.n_heads + which) * a.head_dim;
            for (int i = lane; i < a.head_dim; i += 32) q[i] = head[i];
        } else {
            int64_t row = llm__slot_row(&a, a.slots[token], kv_head);
            char *side = is_value ? a.values : a.keys;
            for (int i = lane; row >= 0 && i < a.head_dim; i += 32)
                if (a.cache_type == LLM_F16) ((uint16_t *)(void *)side)[row * a.head_dim + i] = llm__stored_f16(head[i]);
                else ((float *)(void *)side)[row * a.head_dim + i] = head[i];
        }
        __syncwarp();
    }
}

/* The same in separate kernels, for the option `fused` off: RMSNorm with each head as a row, then
 * these two. One warp per head. */
__global__ static void llm__rope_kernel(float *x, const float2 *angles, int n_tokens, int n_heads, int head_dim, int rope_dim,
                                        llm_rope_pairing pairing) {
    int64_t item = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (item >= (int64_t)n_tokens * n_heads) return;
    llm__rope(x + item * head_dim, angles + item / n_heads * (rope_dim / 2), rope_dim, pairing, threadIdx.x % 32);
}

__global__ static void llm__store_kernel(llm__rope_arguments a, const float *x, char *side) {
    int64_t item = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (item >= (int64_t)a.n_tokens * a.n_kv_heads) return;
    int64_t row = llm__slot_row(&a, a.slots[item / a.n_kv_heads], (int)(item % a.n_kv_heads));
    for (int i = threadIdx.x % 32; row >= 0 && i < a.head_dim; i += 32)
        if (a.cache_type == LLM_F16)
            ((uint16_t *)(void *)side)[row * a.head_dim + i] = llm__stored_f16(x[item * a.head_dim + i]);
        else ((float *)(void *)side)[row * a.head_dim + i] = x[item * a.head_dim + i];
}

static void llm__cuda_rope_then_store(llm__cuda *cuda, const llm__rope_arguments *a, float *k) {
    dim3 block(128), q_grid(llm__grid(llm__ceil_div((int64_t)a->n_tokens * a->n_heads, 4), INT32_MAX));
    dim3 kv_grid(llm__grid(llm__ceil_div((int64_t)a->n_tokens * a->n_kv_heads, 4), INT32_MAX));
    if (a->q_norm) llm__cuda_rmsnorm(cuda, a->q, a->q_norm, a->n_tokens * a->n_heads, a->head_dim, a->epsilon, a->q);
    if (a->k_norm) llm__cuda_rmsnorm(cuda, k, a->k_norm, a->n_tokens * a->n_kv_heads, a->head_dim, a->epsilon, k);
    LLM_LAUNCH(llm__rope_kernel, q_grid, block, 0, cuda->stream, a->q, a->angles, a->n_tokens, a->n_heads, a->head_dim,
               a->rope_dim, a->pairing);
    llm__cuda_launched(cuda, "rope");
    LLM_LAUNCH(llm__rope_kernel, kv_grid, block, 0, cuda->stream, k, a->angles, a->n_tokens, a->n_kv_heads, a->head_dim,
               a->rope_dim, a->pairing);
    llm__cuda_launched(cuda, "rope");
    LLM_LAUNCH(llm__store_kernel, kv_grid, block, 0, cuda->stream, *a, k, a->keys);
    llm__cuda_launched(cuda, "store");
    LLM_LAUNCH(llm__store_kernel, kv_grid, block, 0, cuda->stream, *a, a->v, a->values);
    llm__cuda_launched(cuda, "store");
}

static void llm__cuda_rope_and_store(llm__cuda *cuda, const llm_op *op, const float *angles, float *q, float *k, const float *v,
                                     const llm_cache *cache) {
    llm__rope_arguments a;
    a.slots = cuda->batch.slots;
    a.n_tokens = cuda->batch.n_tokens;
    a.n_heads = op->attention.n_heads;
    a.n_kv_heads = op->attention.n_kv_heads;
    a.head_dim = op->attention.head_dim;
    a.rope_dim = op->rope_dim;
    a.block_size = cache->block_size;
    a.pairing = op->pairing;
    a.angles = (const float2 *)(const void *)angles;
    a.q_norm = op->q_norm ? (const float *)op->q_norm->data : NULL;
    a.k_norm = op->k_norm ? (const float *)op->k_norm->data : NULL;
    a.epsilon = op->epsilon;
    a.q = q;
    a.k = k;
    a.v = v;
    a.cache_type = cache->type;
    a.keys = (char *)cache->keys + (size_t)op->layer * cache->layer_bytes;
    a.values = (char *)cache->values + (size_t)op->layer * cache->layer_bytes;
    if (!cuda->options.fused) {
        llm__cuda_rope_then_store(cuda, &a, k);
        return;
    }
    int warps = 4;
    int64_t items = (int64_t)a.n_tokens * (a.n_heads + 2 * a.n_kv_heads);
    LLM_LAUNCH_EARLY(cuda, llm__rope_and_store_kernel, dim3(llm__grid(llm__ceil_div(items, warps), INT32_MAX)),
                     dim3(32 * warps), (size_t)(warps * a.head_dim) * sizeof(float), a);
    llm__cuda_launched(cuda, "rope_and_store");
}

/* One thread per number. Bytes: two rows read, one written. */
__global__ static void llm__swiglu_kernel(const float *gate, const float *up, int64_t n, float *out) {
    llm__take_over();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void llm__cuda_swiglu(llm__cuda *cuda, const float *gate, const float *up, int64_t n, float *out) {
    if (n < 1) return;
    LLM_LAUNCH_EARLY(cuda, llm__swiglu_kernel, dim3(llm__grid(llm__ceil_div(n, LLM__BLOCK), 1 << 20)),
                     dim3(LLM__BLOCK), 0, gate, up, n, out);
    llm__cuda_launched(cuda, "swiglu");
}

/* Permute columns, one thread per number. Bytes: a row read (coalesced where the order allows) and
 * written. */
__global__ static void llm__gather_columns_kernel(const float *x, const int32_t *columns, int64_t n, int cols, float *out) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        out[i] = x[i / cols * cols + columns[i % cols]];
}

static void llm__cuda_gather_columns(llm__cuda *cuda, const float *x, const int32_t *columns, int n, int64_t cols, float *out) {
    if (n < 1 || cols < 1) return;
    LLM_LAUNCH(llm__gather_columns_kernel, dim3(llm__grid(llm__ceil_div(n * cols, LLM__BLOCK), 1 << 20)), dim3(LLM__BLOCK), 0,
               cuda->stream, x, columns, n * cols, (int)cols, out);
    llm__cuda_launched(cuda, "gather_columns");
}

__global__ static void llm__gather_rows_kernel(const int32_t *rows, const float *x, int dim, float *out) {
    llm__take_over();
    const float *row = x + (int64_t)rows[blockIdx.x] * dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) out[(int64_t)blockIdx.x * dim + i] = row[i];
}

static void llm__cuda_gather_rows(llm__cuda *cuda, const float *x, int dim, int first, int n,
                                  float *out) {
    if (n < 1) return;
    LLM_LAUNCH_EARLY(cuda, llm__gather_rows_kernel, dim3(n), llm__threads(dim), 0, cuda->batch.logit_rows + first, x,
                     dim, out);
    llm__cuda_launched(cuda, "gather_rows");
}

/* A thread copies the same word of every pair, in order, so pairs that share a block need no
 * barrier. blockIdx.y is the layer; z is 0 for keys, 1 for values. */
template <typename Word>
__global__ static void llm__copy_blocks_kernel(char *keys, char *values, size_t layer_bytes, int64_t words, const int32_t *from,
                                               const int32_t *to, int n) {
    Word *side = (Word *)(void *)((blockIdx.z ? values : keys) + (size_t)blockIdx.y * layer_bytes);
    for (int64_t word = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; word < words; word += (int64_t)gridDim.x * blockDim.x)
        for (int i = 0; i < n; i++) side[to[i] * words + word] = side[from[i] * words + word];
}

static void llm__cuda_copy_blocks(void *context, const llm_cache *cache, const int32_t *from, const int32_t *to, int n) {
    llm__cuda *cuda = llm__cuda_of(context);
    llm_error err;
    if (n < 1) return;
    size_t bytes = cache->layer_bytes / (size_t)cache->n_blocks;
    size_t list_bytes = (size_t)n * sizeof(int32_t);
    bool room = llm__cuda_scratch(cuda, &cuda->pairs, &cuda->pairs_bytes, 2 * list_bytes, LLM__PAIRS, &err);
    int32_t *pairs = (int32_t *)(void *)cuda->pairs;
    if (!room || !llm__cuda_upload(cuda, pairs, from, list_bytes, &err) || !llm__cuda_upload(cuda, pairs + n, to, list_bytes, &err)) {
        if (cuda->failure.status == LLM_OK) cuda->failure = err;
        return;
    }
    bool wide = bytes % sizeof(uint4) == 0;
    int64_t words = (int64_t)(bytes / (wide ? sizeof(uint4) : sizeof(uint16_t)));
    dim3 grid(llm__grid(llm__ceil_div(words, LLM__BLOCK), INT32_MAX), cache->n_layers, 2);
    auto copy_blocks_kernel = wide ? llm__copy_blocks_kernel<uint4> : llm__copy_blocks_kernel<uint16_t>;
    LLM_LAUNCH(copy_blocks_kernel, grid, dim3(LLM__BLOCK), 0, cuda->stream, (char *)cache->keys, (char *)cache->values,
               cache->layer_bytes, words, pairs, pairs + n, n);
    llm__cuda_launched(cuda, "copy_blocks");
    llm__cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "copy_blocks");
}

/* =====================================================================================
 * [3] Matmul, few rows
 *
 * A decode step spends nearly all its time in out (n, rows) = x (n, cols) times the transposed
 * weights (rows, cols), where n, the number of tokens, is small. The limit is reading the weights
 * once: for n = 1 and q4_0, there are 2 operations per 0.56 bytes, and the GPU could do a hundred
 * in that time. So 4-bit weights stay 4-bit until they are in registers, a warp reads 512
 * contiguous bytes at a time and has several such reads in flight, and the arithmetic overlaps with
 * them. It uses matrix instructions, which take the same time for one token as for eight.
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
 *     a chunk      two halves of 32 columns. Each 512 B below are 16 bytes per lane.
 *       f16            | 512 B | 512 B | 512 B | 512 B |    A of j = 0 and 1, for each half
 *       q8_0           | 512 B | 512 B | 64 B scales |      8 columns of rows g and g + 8, per half
 *       q4_0           | 512 B | 64 B scales |              the same, both halves together
 *       4, 5, 6 bits   | 512 B | 0, 128 or 256 B | 128 B scales |    as q4_0; higher bits apart
 *
 * THE SUM over the columns has a fixed order, so the result is the same, bit for bit, with any
 * number of tokens and in every fast kernel of this chapter and the next. The columns are cut into
 * 8 segments, at places that depend on the matrix alone. The chunks of a segment are added in
 * order, in f32; then the segments are added in order. Here each segment has its own warp:
 *
 *     block:  16 or more rows     columns  | warp 0 | warp 1 | ...          | warp 7 |
 *                                               |        |                       |
 *                             shared memory:  part 0 + part 1 + ...         + part 7   -> out
 *
 * A MINIMUM. In q4_1, q4_K and similar types, a weight is scale x integer + minimum, both shared by
 * 32 columns. The sum is scale x sum(integer x) + minimum x sum(x); a matrix of ones as A gives
 * sum(x).
 *
 * WHAT IS ROUNDED
 *     f16, integers   nothing. A scale multiplies the f32 sum of 32 products, not the integers.
 *     q6_K            a scale of 16 columns multiplies the integers: above 2048, one bit is lost
 *     bf16            becomes f16 times a power of two per row: exact, except for weights 2^32
 *                     times smaller than the largest of their row
 *     f32             becomes the sum of two such f16: 22 bits
 *     x               becomes f16: 11 bits; with f32 weights, the sum of two f16. Some models have
 *                     activations above 65504, f16's largest value. So each segment of a token's x
 *                     is divided by a power of two that brings its largest value to 2^14 .. 2^15,
 *                     and the sum is multiplied by it.
 * ================================================================================== */

enum {
    LLM__TILE_ROWS = 16, /* rows of weights in a tile: the height of A */
    LLM__CHUNK = 64,     /* columns in a chunk */
    LLM__SEGMENTS = 8,   /* segments of a sum */
    LLM__FEW_TOKENS = 32, /* most tokens for the kernels of this chapter */
    LLM__PRODUCTS = 3    /* most products of one x in a launch */
};

/* The layout of a matrix in device memory. */
typedef enum llm__layout {
    LLM__LAYOUT_F16, LLM__LAYOUT_Q8_0, LLM__LAYOUT_Q4_0,
    LLM__LAYOUT_4_BITS, LLM__LAYOUT_4_BITS_GROUPS, LLM__LAYOUT_5_BITS, LLM__LAYOUT_5_BITS_GROUPS, LLM__LAYOUT_6_BITS
} llm__layout;

typedef struct llm__packed { /* a matrix as kernels see it */
    llm__layout layout;
    bool is_zero;            /* 4 and 5 bits: zero points are stored instead of minimums */
    const char *chunks;      /* device (n_tiles, n_chunks) */
    const float *row_scales; /* (n_tiles * 16) powers of two for the rows; NULL: 1 */
    int64_t rows, cols;
    int n_tiles, n_chunks;
    int plane_chunks;        /* chunks in one plane: see llm__plane */
    int segment_chunks;      /* chunks in a segment */
} llm__packed;

/* ---- Instructions ---------------------------------------------------------------------- */

#ifndef LLM_EMULATED /* tests/cuda_on_cpu.h has their emulated forms */
/* d (16, 8) += a (16, 16) times b (16, 8); f16 in, f32 out. */
__device__ __forceinline__ void llm__mma_m16n8k16_f16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four transposed 8 x 8 matrices of 16-bit values from shared memory. Lane 8 m + i passes the
 * address of row i of matrix m. Register m of lane (g, t) receives rows 2t and 2t + 1 of column g
 * of that matrix. */
__device__ __forceinline__ void llm__ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* Start a copy of 16 bytes from global to shared memory, without registers; if not `valid`, write
 * zeros. The copy is done after a wait that covers its group; other threads also need a barrier. */
__device__ __forceinline__ void llm__cp_async_16(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void llm__cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Wait until all committed groups but the last N are done. */
template <int N> __device__ __forceinline__ void llm__cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Any function of three bits, for 32 positions at once: the result is bit 4a + 2b + c of
 * `table`. */
template <int table> __device__ __forceinline__ uint32_t llm__lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(table));
    return r;
}

/* Four of the eight bytes of b:a, each chosen by a hexadecimal digit of the selector. */
__device__ __forceinline__ uint32_t llm__prmt(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}
#endif

/* Two f16 in a register, `low` in the low half. */
__device__ static inline uint32_t llm__pair(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

__device__ static inline uint32_t llm__pair_fma(uint32_t a, uint32_t b, uint32_t c) {
    __half2 x, y, z;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    memcpy(&z, &c, sizeof z);
    x = __hfma2(x, y, z);
    memcpy(&a, &x, sizeof a);
    return a;
}

/* Integers to f16 without a conversion instruction, two at a time. The f16 with bits 0x6400 is
 * 1024, and the last of its ten low bits is worth 1. With an integer i in these bits it is 1024 +
 * i; subtracting 1024 leaves i, exactly. */
enum {
    LLM__F16_1 = 0x3c003c00,         /* 1, twice */
    LLM__F16_SIXTEENTH = 0x2c002c00, /* 1/16, twice */
    LLM__F16_1024 = 0x64006400
};

enum { LLM__AND_OR = 0xea }; /* llm__lop3: (a & b) | c */

/* The eight 4-bit weights of a word, minus `zero`; out[i] has columns 2i and 2i + 1. From high to
 * low the word holds columns 7 5 3 1 6 4 2 0, so that one mask selects two neighbours. */
template <int zero> __device__ __forceinline__ void llm__unpack_q4(uint32_t word, uint32_t out[4]) {
LLM_UNROLL
    for (int half = 0; half < 2; half++, word >>= 8) {
        /* ones is 1024 + q: subtract 1024 + zero. sixteens is 1024 + 16 q: divide by 16, subtract
         * 64 + zero. */
        uint32_t ones = llm__lop3<LLM__AND_OR>(word, 0x000f000f, LLM__F16_1024);
        uint32_t sixteens = llm__lop3<LLM__AND_OR>(word, 0x00f000f0, LLM__F16_1024);
        out[2 * half] = llm__pair_fma(ones, LLM__F16_1, 0xe400e400u + zero * 0x10001u);
        out[2 * half + 1] = llm__pair_fma(sixteens, LLM__F16_SIXTEENTH, 0xd400d400u + zero * 0x100010u);
    }
}

/* Four int8 to f16. Flipping the sign bit adds 128. */
__device__ static inline void llm__unpack_q8(uint32_t word, uint32_t out[2]) {
    word ^= 0x80808080u;
    /* 1024 + 128 + q: subtract 1152 */
    out[0] = llm__pair_fma(llm__prmt(word, LLM__F16_1024, 0x5150), LLM__F16_1, 0xe480e480u);
    out[1] = llm__pair_fma(llm__prmt(word, LLM__F16_1024, 0x5352), LLM__F16_1, 0xe480e480u);
}

/* ---- The layouts ------------------------------------------------------------------------
 * A layout can write a chunk (pack), read it (stream: a chunk from global memory; load: half of one
 * from shared memory), turn half of it into matrix fragments (unpack: a[j] is for instruction j)
 * and return one weight (value). Each lane does its own part. Constants: scale_bytes is per g,
 * high_bytes per lane; depth is the number of chunks that a warp has in flight. */

/* Scales of rows g and g + 8 for half a chunk: weight = scale x integer + minimum. */
typedef struct llm__scales {
    float scale[2], minimum[2];
} llm__scales;

/* Rows of a matrix in the file's layout. The first one is also the first row of a tile. */
typedef struct llm__source {
    llm_type type;
    const char *data;
    size_t row_bytes;
    int64_t first_row, end_row; /* row numbers in the matrix */
    int64_t cols;
} llm__source;

__device__ static inline const char *llm__source_row(const llm__source *s, int64_t row) {
    return s->data + (size_t)(row - s->first_row) * s->row_bytes;
}

/* An f32 is stored as the sum of two f16, high + low. So w x = high_w high_x + high_w low_x + low_w
 * high_x, except for the last bit. The matrix becomes three f16 planes side by side (high, high,
 * low) and x becomes high, low, high; kernels see one wide matrix. This function returns the plane
 * of column *k of the wide matrix, and sets *k to the column in the plane. */
__device__ static inline int llm__plane(const llm__packed *w, int64_t *k) {
    int plane = 0;
    for (; *k >= (int64_t)w->plane_chunks * LLM__CHUNK; plane++) *k -= (int64_t)w->plane_chunks * LLM__CHUNK;
    return plane;
}

/* The part of x to store in an f16: x itself or, if `low`, its rounding error. */
__device__ static inline float llm__half_of(float x, bool low) {
    return low ? x - __half2float(__float2half_rn(x)) : x;
}

/* Read 16 bytes that are used once, so that the caches need not keep them. */
__device__ static inline uint4 llm__stream_16(const char *p) { return __ldcs((const uint4 *)(const void *)p); }
__device__ static inline uint4 llm__load_16(const char *p) { return *(const uint4 *)(const void *)p; }

/* Write the scales of rows g and g + 8, for both halves of a chunk: 8 bytes. */
__device__ static inline void llm__pack_scales(char *to, const llm__source *s, int64_t row, int64_t block, int block_bytes) {
    uint16_t scales[4];
    for (int i = 0; i < 4; i++) {
        int64_t r = row + i % 2 * 8, b = block + i / 2;
        bool there = r < s->end_row && b < s->cols / 32;
        scales[i] = there ? *(const uint16_t *)(const void *)(llm__source_row(s, r) + b * block_bytes) : 0;
    }
    memcpy(to, scales, sizeof scales);
}

__device__ static inline void llm__unpack_scales(uint32_t pair, llm__scales *scales) {
    scales->scale[0] = llm__f16_bits_to_f32((uint16_t)pair);
    scales->scale[1] = llm__f16_bits_to_f32((uint16_t)(pair >> 16));
}

/* Eight columns of rows g (top) and g + 8 (bottom), as the fragments of two instructions. */
__device__ __forceinline__ void llm__fragments(const uint32_t top[4], const uint32_t bottom[4], uint32_t a[2][4]) {
LLM_UNROLL
    for (int j = 0; j < 2; j++)
        a[j][0] = top[2 * j], a[j][1] = bottom[2 * j], a[j][2] = top[2 * j + 1], a[j][3] = bottom[2 * j + 1];
}

/* Addresses of a lane's parts of a chunk. They advance by whole chunks. */
struct llm__reader {
    const char *words, *high, *scales;
};
template <class Layout> __device__ __forceinline__ llm__reader llm__reader_of(const char *chunk, int lane) {
    return {chunk + lane * 16, chunk + 512 + lane * Layout::high_bytes, chunk + Layout::scales_at + lane / 4 * Layout::scale_bytes};
}

struct llm__f16_layout {
    enum { chunk_bytes = 2048, scales_at = 0, scale_bytes = 0, high_bytes = 0, scaled = 0, minimums = 0, depth = 2 };
    struct half_chunk {
        uint4 a[2]; /* A of instruction j */

        __device__ __forceinline__ void load(const char *chunk, int half, int lane) {
LLM_UNROLL
            for (int j = 0; j < 2; j++) a[j] = llm__load_16(chunk + half * 1024 + j * 512 + lane * 16);
        }
        __device__ __forceinline__ void unpack(const llm__packed &, int, int, uint32_t out[2][4], llm__scales *scales) const {
LLM_UNROLL
            for (int j = 0; j < 2; j++) out[j][0] = a[j].x, out[j][1] = a[j].y, out[j][2] = a[j].z, out[j][3] = a[j].w;
            scales->scale[0] = scales->scale[1] = 1.0f;
        }
    };
    half_chunk halves[2];

    /* A's four registers: two columns of row g, two of row g + 8, then the next two of both
     * rows. */
    __device__ static void pack(char *chunk, const llm__packed *w, const llm__source *s, int64_t row, int64_t k, int lane) {
        int plane = llm__plane(w, &k);
        for (int piece = 0; piece < 4; piece++) {
            uint16_t values[8];
            for (int i = 0; i < 8; i++) {
                int64_t r = row + i / 2 % 2 * 8 + lane / 4;
                int64_t column = k + piece / 2 * 32 + lane % 4 * 8 + piece % 2 * 4 + i / 4 * 2 + i % 2;
                bool there = r < s->end_row && column < s->cols;
                float inverse = w->row_scales && there ? 1.0f / w->row_scales[r] : 1.0f;
                float x = there ? llm__weight_value(s->type, llm__source_row(s, r), column) * inverse : 0.0f;
                values[i] = llm__f32_to_f16_bits(llm__half_of(x, plane == 2));
            }
            memcpy(chunk + piece * 512 + lane * 16, values, 16);
        }
    }
    __device__ __forceinline__ void stream(const llm__reader &at, int offset) {
LLM_UNROLL
        for (int i = 0; i < 4; i++) halves[i / 2].a[i % 2] = llm__stream_16(at.words + offset + i * 512);
    }
    __device__ static float value(const char *chunk, int row, int k) {
        int piece = k / 32 * 2 + k % 8 / 4, lane = row % 8 * 4 + k % 32 / 8, i = k % 4 / 2 * 4 + row / 8 * 2 + k % 2;
        return llm__f16_bits_to_f32(((const uint16_t *)(const void *)chunk)[piece * 256 + lane * 8 + i]);
    }
};

struct llm__q8_0_layout {
    enum { chunk_bytes = 1088, scales_at = 1024, scale_bytes = 8, high_bytes = 0, scaled = 1, minimums = 0, depth = 3 };
    struct half_chunk {
        uint4 words; /* eight columns of row g, of row g + 8 */
        uint32_t scale_bits;

        __device__ __forceinline__ void load(const char *chunk, int half, int lane) {
            words = llm__load_16(chunk + half * 512 + lane * 16);
            scale_bits = *(const uint32_t *)(const void *)(chunk + 1024 + lane / 4 * 8 + half * 4);
        }
        __device__ __forceinline__ void unpack(const llm__packed &, int, int, uint32_t a[2][4], llm__scales *scales) const {
            uint32_t top[4], bottom[4]; /* columns 2i, 2i + 1 of rows g, g + 8 */
            llm__unpack_q8(words.x, top), llm__unpack_q8(words.y, top + 2);
            llm__unpack_q8(words.z, bottom), llm__unpack_q8(words.w, bottom + 2);
            llm__fragments(top, bottom, a);
            llm__unpack_scales(scale_bits, scales);
        }
    };
    half_chunk halves[2];

    __device__ static void pack(char *chunk, const llm__packed *, const llm__source *s, int64_t row, int64_t k, int lane) {
        for (int half = 0; half < 2; half++) {
            int8_t values[16] = {0};
            for (int i = 0; i < 16; i++) {
                int64_t r = row + i / 8 * 8 + lane / 4, block = k / 32 + half;
                if (r < s->end_row && block < s->cols / 32)
                    values[i] = (int8_t)llm__source_row(s, r)[block * 34 + 2 + lane % 4 * 8 + i % 8];
            }
            memcpy(chunk + half * 512 + lane * 16, values, 16);
        }
        if (lane % 4 == 0) llm__pack_scales(chunk + 1024 + lane / 4 * 8, s, row + lane / 4, k / 32, 34);
    }
    __device__ __forceinline__ void stream(const llm__reader &at, int offset) {
        uint2 scale_bits = __ldcs((const uint2 *)(const void *)(at.scales + offset));
        halves[0].words = llm__stream_16(at.words + offset);
        halves[1].words = llm__stream_16(at.words + offset + 512);
        halves[0].scale_bits = scale_bits.x, halves[1].scale_bits = scale_bits.y;
    }
    __device__ static float value(const char *chunk, int row, int k) {
        int at = k / 32 * 512 + (row % 8 * 4 + k % 32 / 8) * 16 + row / 8 * 8 + k % 8;
        const uint16_t *scales = (const uint16_t *)(const void *)(chunk + 1024 + row % 8 * 8);
        return llm__f16_bits_to_f32(scales[k / 32 * 2 + row / 8]) * (float)((const int8_t *)chunk)[at];
    }
};

struct llm__q4_0_layout {
    enum { chunk_bytes = 576, scales_at = 512, scale_bytes = 8, high_bytes = 0, scaled = 1, minimums = 0, depth = 4 };
    struct half_chunk {
        uint2 words; /* eight columns of row g, of row g + 8 */
        uint32_t scale_bits;

        __device__ __forceinline__ void load(const char *chunk, int half, int lane) {
            words = *(const uint2 *)(const void *)(chunk + lane * 16 + half * 8);
            scale_bits = *(const uint32_t *)(const void *)(chunk + 512 + lane / 4 * 8 + half * 4);
        }
        __device__ __forceinline__ void unpack(const llm__packed &, int, int, uint32_t a[2][4], llm__scales *scales) const {
            uint32_t top[4], bottom[4];
            llm__unpack_q4<8>(words.x, top);
            llm__unpack_q4<8>(words.y, bottom);
            llm__fragments(top, bottom, a);
            llm__unpack_scales(scale_bits, scales);
        }
    };
    half_chunk halves[2];

    /* The lowest bit of column i (0 to 7) in a word: see llm__unpack_q4. */
    __device__ static int place(int i) { return i % 2 * 16 + i / 2 * 4; }
    __device__ static void pack(char *chunk, const llm__packed *, const llm__source *s, int64_t row, int64_t k, int lane) {
        uint32_t packed[4];
        for (int part = 0; part < 4; part++) {
            int64_t r = row + part % 2 * 8 + lane / 4, block = k / 32 + part / 2;
            packed[part] = 0;
            for (int i = 0; i < 8; i++) {
                /* column in the block of 32; byte c of a block in the file has columns c and c +
                 * 16 */
                int column = lane % 4 * 8 + i;
                uint32_t q = 8;
                if (r < s->end_row && block < s->cols / 32)
                    q = (uint8_t)llm__source_row(s, r)[block * 18 + 2 + column % 16] >> column / 16 * 4 & 15;
                packed[part] |= q << place(i);
            }
        }
        memcpy(chunk + lane * 16, packed, 16);
        if (lane % 4 == 0) llm__pack_scales(chunk + 512 + lane / 4 * 8, s, row + lane / 4, k / 32, 18);
    }
    __device__ __forceinline__ void stream(const llm__reader &at, int offset) {
        uint4 words = llm__stream_16(at.words + offset);
        uint2 scale_bits = __ldcs((const uint2 *)(const void *)(at.scales + offset));
        halves[0].words = make_uint2(words.x, words.y), halves[1].words = make_uint2(words.z, words.w);
        halves[0].scale_bits = scale_bits.x, halves[1].scale_bits = scale_bits.y;
    }
    __device__ static float value(const char *chunk, int row, int k) {
        const uint32_t *word = (const uint32_t *)(const void *)(chunk + (row % 8 * 4 + k % 32 / 8) * 16);
        const uint16_t *scales = (const uint16_t *)(const void *)(chunk + 512 + row % 8 * 8);
        int which = k / 32 * 2 + row / 8, q = (int)(word[which] >> place(k % 8) & 15) - 8;
        return llm__f16_bits_to_f32(scales[which]) * (float)q;
    }
};

/* Integer i of a row of the file, with no zero point subtracted. (Formats: chapter [7] of
 * llm.h.) */
__device__ static inline uint32_t llm__level(llm_type type, const char *row_, int64_t i) {
    const uint8_t *row = (const uint8_t *)row_;
    int j = (int)(i % 32), group = (int)(i % 256 / 32);
    if (type == LLM_Q6_K) {
        const uint8_t *p = row + i / 256 * 210;
        int half = group / 4, quarter = group % 4;
        uint32_t low = p[64 * half + 32 * (quarter % 2) + j] >> quarter / 2 * 4 & 15, high = p[128 + 32 * half + j] >> 2 * quarter & 3;
        return low | high << 4;
    }
    if (type == LLM_Q4_K || type == LLM_Q5_K) {
        const uint8_t *p = row + i / 256 * (type == LLM_Q4_K ? 144 : 176), *nibbles = p + (type == LLM_Q4_K ? 16 : 48);
        uint32_t low = nibbles[group / 2 * 32 + j] >> group % 2 * 4 & 15;
        return type == LLM_Q4_K ? low : low | (uint32_t)(p[16 + j] >> group & 1) << 4;
    }
    bool fifth = type == LLM_Q5_0 || type == LLM_Q5_1;
    int head = type == LLM_Q5_0 ? 2 : 4; /* bytes of scale and minimum */
    const uint8_t *p = row + i / 32 * (head + 4 * fifth + 16) + head;
    uint32_t low = p[4 * fifth + j % 16] >> j / 16 * 4 & 15;
    return fifth ? low | (uint32_t)(p[j / 8] >> j % 8 & 1) << 4 : low;
}

/* The scales of a row for a chunk, as kernels read them:
 *     most types   x and y, for 32 columns each: scale and minimum (or zero point), f16
 *     q4_K, q5_K   x: scale and minimum of 256 columns, f16; y: the bytes scale, minimum of 32
 *                  columns, scale, minimum of the next 32
 *     q6_K         x: scale of 256 columns, f16; y: four int8 scales of 16 columns each */
__device__ static inline uint2 llm__level_scales(llm_type type, const char *row_, int64_t chunk, int64_t cols) {
    const uint8_t *row = (const uint8_t *)row_;
    uint16_t words[2][2] = {};
    uint8_t bytes[4] = {};
    uint2 r = make_uint2(0, 0);
    if (type == LLM_Q6_K || type == LLM_Q4_K || type == LLM_Q5_K) {
        const uint8_t *p = row + chunk / 4 * (type == LLM_Q6_K ? 210 : type == LLM_Q4_K ? 144 : 176);
        memcpy(words, type == LLM_Q6_K ? p + 208 : p, type == LLM_Q6_K ? 2 : 4);
        for (int i = 0; i < 4; i++) {
            int group = (int)(chunk % 4) * 2 + i / 2;
            /* 6-bit scale (i even) or minimum (i odd): see llm__group_scales in llm.h */
            const uint8_t *s = p + 4 + group % 4 + i % 2 * 4;
            int low = group < 4 ? s[0] & 63 : (p[12 + group % 4] >> i % 2 * 4 & 15) | s[0] >> 6 << 4;
            bytes[i] = type == LLM_Q6_K ? p[192 + chunk % 4 * 4 + i] : (uint8_t)low;
        }
        memcpy(&r.x, words, 4);
        memcpy(&r.y, bytes, 4);
        return r;
    }
    int head = type == LLM_Q5_0 ? 2 : 4, block_bytes = type == LLM_Q5_0 ? 22 : type == LLM_Q5_1 ? 24 : 20;
    for (int i = 0; i < 2 && chunk * 2 + i < cols / 32; i++) {
        memcpy(words[i], row + (chunk * 2 + i) * block_bytes, head);
        if (type == LLM_Q5_0) words[i][1] = llm__f32_to_f16_bits(16.0f);
        if (type == LLM_Q4_Z) words[i][1] = llm__f32_to_f16_bits((float)words[i][1]);
    }
    memcpy(&r.x, words[0], 4);
    memcpy(&r.y, words[1], 4);
    return r;
}

/* Scale and minimum of a row for half a chunk, exact in f32. */
template <bool Groups>
__device__ __forceinline__ void llm__unpack_minimum(bool is_zero, uint2 row, int half, float *scale, float *minimum) {
    uint32_t pair = half && !Groups ? row.y : row.x, whole = row.y >> 16 * half;
    *scale = llm__f16_bits_to_f32((uint16_t)pair);
    *minimum = llm__f16_bits_to_f32((uint16_t)(pair >> 16));
    if (Groups) {
        *scale *= (float)(whole & 255);
        *minimum *= -(float)(whole >> 8 & 255);
    } else *minimum *= is_zero ? -*scale : 1.0f;
}

/* Integers of 4 + High bits. The low four bits are stored as in q4_0. The high bits of a lane are
 * in one word per chunk (High 1) or per half (High 2). The high bits of columns 2i and 2i + 1 of
 * row g start at bits i x High and i x High + 16 of the word; for row g + 8, add 4 x High; for the
 * second half, if High is 1, add 8. After the words, 16 bytes per g hold the scales of rows g and g
 * + 8. High 2 is q6_K: no minimum, zero point 32, a scale per 16 columns. */
template <int High, bool Groups> struct llm__bits_layout {
    enum {
        scales_at = 512 + 128 * High, scale_bytes = 16, high_bytes = 4 * High, chunk_bytes = scales_at + 128,
        scaled = 1, minimums = High < 2, depth = High ? 3 : 4
    };
    struct half_chunk {
        uint2 words;   /* as in q4_0 */
        uint32_t high; /* bits from 4 up, of the chunk (High 1) or of this half (High 2) */
        uint4 scales;  /* of row g, of row g + 8 */

        __device__ __forceinline__ void load(const char *chunk, int half, int lane) {
            words = *(const uint2 *)(const void *)(chunk + lane * 16 + half * 8);
            high = High ? *(const uint32_t *)(const void *)(chunk + 512 + lane * 4 * High + (High > 1 ? half * 4 : 0)) : 0;
            scales = llm__load_16(chunk + scales_at + lane / 4 * 16);
        }
        __device__ __forceinline__ void unpack_row(uint32_t word, uint32_t above, uint32_t out[4]) const {
            if (!High) llm__unpack_q4<0>(word, out);
LLM_UNROLL
            for (int i = 0; High && i < 4; i++) {
                /* shifts that move the high bits of pair i to bits 4 and 20 */
                const int at = i * High, left = at < 4 ? 4 - at : 0, right = at > 4 ? at - 4 : 0;
                uint32_t pair = llm__lop3<LLM__AND_OR>(word >> 4 * i, 0x000f000f, LLM__F16_1024);
                pair = llm__lop3<LLM__AND_OR>(above << left >> right, High == 1 ? 0x00100010 : 0x00300030, pair);
                /* subtract 1024; for q6_K, 1024 + 32 */
                out[i] = llm__pair_fma(pair, LLM__F16_1, High == 1 ? 0xe400e400u : 0xe420e420u);
            }
        }
        __device__ __forceinline__ void unpack(const llm__packed &w, int half, int lane, uint32_t a[2][4], llm__scales *s) const {
            uint32_t top[4], bottom[4], above = High == 1 ? high >> 8 * half : high;
            unpack_row(words.x, above, top);
            unpack_row(words.y, above >> 4 * High, bottom);
            uint2 rows[2] = {make_uint2(scales.x, scales.y), make_uint2(scales.z, scales.w)};
LLM_UNROLL
            for (int r = 0; r < 2; r++) {
                if (High < 2) {
                    llm__unpack_minimum<Groups>(w.is_zero, rows[r], half, &s->scale[r], &s->minimum[r]);
                    continue;
                }
                s->scale[r] = llm__f16_bits_to_f32((uint16_t)rows[r].x);
                float own = (float)(int8_t)(rows[r].y >> (16 * half + lane % 4 / 2 * 8));
                uint32_t factor = llm__pair(own, own);
LLM_UNROLL
                for (int i = 0; i < 4; i++) {
                    uint32_t *pair = r ? &bottom[i] : &top[i];
                    *pair = llm__pair_fma(*pair, factor, 0);
                }
            }
            llm__fragments(top, bottom, a);
        }
    };
    half_chunk halves[2];

    __device__ static void pack(char *chunk, const llm__packed *, const llm__source *s, int64_t row, int64_t k, int lane) {
        uint32_t words[4] = {}, above[2] = {};
        for (int part = 0; part < 4; part++) { /* rows g, g + 8 of half 0, then of half 1 */
            int64_t r = row + part % 2 * 8 + lane / 4, first = k + part / 2 * 32 + lane % 4 * 8;
            for (int i = 0; i < 8 && r < s->end_row && first < s->cols; i++) {
                uint32_t q = llm__level(s->type, llm__source_row(s, r), first + i);
                words[part] |= (q & 15) << llm__q4_0_layout::place(i);
                int at = (part % 2 * 4 + i / 2) * High + i % 2 * 16;
                above[High > 1 ? part / 2 : 0] |= q >> 4 << (at + (High == 1 ? part / 2 * 8 : 0));
            }
        }
        memcpy(chunk + lane * 16, words, 16);
        memcpy(chunk + 512 + lane * 4 * High, above, 4 * High);
        if (lane >= 16) return;
        uint2 scales = make_uint2(0, 0); /* of row g (even lanes) or g + 8 (odd) */
        int64_t r = row + lane % 2 * 8 + lane / 2;
        if (r < s->end_row) scales = llm__level_scales(s->type, llm__source_row(s, r), k / LLM__CHUNK, s->cols);
        memcpy(chunk + scales_at + lane * 8, &scales, 8);
    }
    __device__ __forceinline__ void stream(const llm__reader &at, int offset) {
        uint4 words = llm__stream_16(at.words + offset);
        halves[0].words = make_uint2(words.x, words.y), halves[1].words = make_uint2(words.z, words.w);
        if (High == 1) halves[0].high = halves[1].high = __ldcs((const uint32_t *)(const void *)(at.high + offset));
        if (High == 2) {
            uint2 high = __ldcs((const uint2 *)(const void *)(at.high + offset));
            halves[0].high = high.x, halves[1].high = high.y;
        }
        halves[0].scales = halves[1].scales = llm__stream_16(at.scales + offset);
    }
    __device__ static float value(const llm__packed *w, const char *chunk, int row, int k) {
        int lane = row % 8 * 4 + k % 32 / 8, half = k / 32, i = k % 8, at = (row / 8 * 4 + i / 2) * High + i % 2 * 16;
        uint32_t q = ((const uint32_t *)(const void *)chunk)[lane * 4 + half * 2 + row / 8] >> llm__q4_0_layout::place(i) & 15;
        const uint32_t *high = (const uint32_t *)(const void *)(chunk + 512);
        if (High == 1) q |= (high[lane] >> (half * 8 + at) & 1) << 4;
        if (High == 2) q |= (high[lane * 2 + half] >> at & 3) << 4;
        uint2 scales = *(const uint2 *)(const void *)(chunk + scales_at + row % 8 * 16 + row / 8 * 8);
        if (High == 2)
            return llm__f16_bits_to_f32((uint16_t)scales.x) * (float)(int8_t)(scales.y >> k / 16 * 8) * (float)((int)q - 32);
        float scale, minimum;
        llm__unpack_minimum<Groups>(w->is_zero, scales, half, &scale, &minimum);
        return scale * (float)q + minimum;
    }
};

typedef llm__bits_layout<0, false> llm__4_bits;        /* q4_1, q4_Z */
typedef llm__bits_layout<0, true> llm__4_bits_groups;  /* q4_K */
typedef llm__bits_layout<1, false> llm__5_bits;        /* q5_0, q5_1 */
typedef llm__bits_layout<1, true> llm__5_bits_groups;  /* q5_K */
typedef llm__bits_layout<2, true> llm__6_bits;         /* q6_K */

/* One weight, for kernels that need no speed. */
__device__ static inline float llm__packed_value(const llm__packed *w, int64_t row, int64_t col) {
    int64_t chunk = row / LLM__TILE_ROWS * w->n_chunks + col / LLM__CHUNK;
    int r = (int)(row % LLM__TILE_ROWS), k = (int)(col % LLM__CHUNK);
    switch (w->layout) {
    case LLM__LAYOUT_F16: break;
    case LLM__LAYOUT_Q8_0: return llm__q8_0_layout::value(w->chunks + chunk * llm__q8_0_layout::chunk_bytes, r, k);
    case LLM__LAYOUT_Q4_0: return llm__q4_0_layout::value(w->chunks + chunk * llm__q4_0_layout::chunk_bytes, r, k);
    case LLM__LAYOUT_4_BITS: return llm__4_bits::value(w, w->chunks + chunk * llm__4_bits::chunk_bytes, r, k);
    case LLM__LAYOUT_4_BITS_GROUPS: return llm__4_bits_groups::value(w, w->chunks + chunk * llm__4_bits::chunk_bytes, r, k);
    case LLM__LAYOUT_5_BITS: return llm__5_bits::value(w, w->chunks + chunk * llm__5_bits::chunk_bytes, r, k);
    case LLM__LAYOUT_5_BITS_GROUPS: return llm__5_bits_groups::value(w, w->chunks + chunk * llm__5_bits::chunk_bytes, r, k);
    case LLM__LAYOUT_6_BITS: return llm__6_bits::value(w, w->chunks + chunk * llm__6_bits::chunk_bytes, r, k);
    }
    float x = llm__f16_layout::value(w->chunks + chunk * llm__f16_layout::chunk_bytes, r, k);
    if (w->n_chunks > w->plane_chunks) /* f32: add its low part */
        x += llm__f16_layout::value(w->chunks + (chunk + 2 * w->plane_chunks) * llm__f16_layout::chunk_bytes, r, k);
    return w->row_scales ? x * w->row_scales[row] : x;
}

/* ---- Loading a matrix -------------------------------------------------------------------- */

/* The power of two p for which largest / p is between 2^14 and 2^15; 1 if `largest` is 0 or not
 * finite. */
__device__ static inline float llm__power_for(float largest) {
    if (!(largest > 0.0f && largest <= FLT_MAX)) return 1.0f;
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127 - 14;
    if (exponent < -126) exponent = -126; /* smaller powers are subnormal */
    return __uint_as_float((uint32_t)(exponent + 127) << 23);
}

/* Compute row_scales, for weights out of the range of f16. One warp per row. */
__global__ static void llm__row_scales_kernel(llm__source s, float *row_scales) {
    int64_t row = s.first_row + (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= s.end_row) return;
    float largest = 0.0f;
    for (int64_t i = threadIdx.x % 32; i < s.cols; i += 32)
        largest = fmaxf(largest, fabsf(llm__weight_value(s.type, llm__source_row(&s, row), i)));
    largest = llm__warp_max(largest);
    if (threadIdx.x % 32 == 0) row_scales[row] = llm__power_for(largest);
}

/* Pack rows in the file's layout into chunks. One warp per chunk. */
template <class Layout> __global__ static void llm__pack_kernel(llm__packed w, llm__source s) {
    int64_t n = llm__ceil_div(s.end_row - s.first_row, LLM__TILE_ROWS) * w.n_chunks;
    for (int64_t i = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < n;
         i += (int64_t)gridDim.x * (blockDim.x / 32)) {
        int64_t tile = s.first_row / LLM__TILE_ROWS + i / w.n_chunks, chunk = i % w.n_chunks;
        Layout::pack((char *)w.chunks + (tile * w.n_chunks + chunk) * Layout::chunk_bytes, &w, &s, tile * LLM__TILE_ROWS,
                     chunk * LLM__CHUNK, threadIdx.x % 32);
    }
}

/* How the device stores weights of a type. */
typedef struct llm__format {
    llm_type type;
    llm__layout layout;
    bool is_zero;    /* as in llm__packed */
    int planes;      /* 3 for f32: see llm__plane */
    bool row_scales; /* values may be too large or too small for f16 */
} llm__format;

/* The device format of a type; NULL: the type is not supported. */
static const llm__format *llm__format_of(llm_type type) {
    static const llm__format formats[] = {
        {LLM_F16, LLM__LAYOUT_F16, false, 1, false},           {LLM_BF16, LLM__LAYOUT_F16, false, 1, true},
        {LLM_F32, LLM__LAYOUT_F16, false, 3, true},            {LLM_Q8_0, LLM__LAYOUT_Q8_0, false, 1, false},
        {LLM_Q4_0, LLM__LAYOUT_Q4_0, false, 1, false},         {LLM_Q4_1, LLM__LAYOUT_4_BITS, false, 1, false},
        {LLM_Q4_Z, LLM__LAYOUT_4_BITS, true, 1, false},        {LLM_Q4_K, LLM__LAYOUT_4_BITS_GROUPS, false, 1, false},
        {LLM_Q5_0, LLM__LAYOUT_5_BITS, true, 1, false},        {LLM_Q5_1, LLM__LAYOUT_5_BITS, false, 1, false},
        {LLM_Q5_K, LLM__LAYOUT_5_BITS_GROUPS, false, 1, false}, {LLM_Q6_K, LLM__LAYOUT_6_BITS, false, 1, false},
    };
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (formats[i].type == type) return &formats[i];
    return NULL;
}

/* Call function(layout); only the type of the argument is used. */
template <class Function> static void llm__with_layout(llm__layout layout, Function function) {
    switch (layout) {
    case LLM__LAYOUT_F16: function(llm__f16_layout()); break;
    case LLM__LAYOUT_Q8_0: function(llm__q8_0_layout()); break;
    case LLM__LAYOUT_Q4_0: function(llm__q4_0_layout()); break;
    case LLM__LAYOUT_4_BITS: function(llm__4_bits()); break;
    case LLM__LAYOUT_4_BITS_GROUPS: function(llm__4_bits_groups()); break;
    case LLM__LAYOUT_5_BITS: function(llm__5_bits()); break;
    case LLM__LAYOUT_5_BITS_GROUPS: function(llm__5_bits_groups()); break;
    case LLM__LAYOUT_6_BITS: function(llm__6_bits()); break;
    }
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
    w.row_scales = format.row_scales ? (const float *)(const void *)(w.chunks + llm__packed_bytes(&w)) : NULL;
    return w;
}

static void llm__cuda_free_weight(void *context, llm_weight *w) {
    llm__cuda_release(context, (void *)w->data);
    w->data = NULL;
}

/* Pack the file rows in `raw`. */
static bool llm__cuda_pack(llm__cuda *cuda, const llm__packed *w, const llm__source *source, llm_error *err) {
    int64_t rows = source->end_row - source->first_row;
    if (w->row_scales)
        LLM_LAUNCH(llm__row_scales_kernel, dim3(llm__grid(llm__ceil_div(rows, 8), INT32_MAX)), dim3(256), 0, cuda->stream,
                   *source, (float *)w->row_scales);
    int64_t chunks = llm__ceil_div(rows, LLM__TILE_ROWS) * w->n_chunks;
    llm__with_layout(w->layout, [&](auto layout) {
        auto pack_kernel = llm__pack_kernel<decltype(layout)>;
        LLM_LAUNCH(pack_kernel, dim3(llm__grid(llm__ceil_div(chunks, 8), INT32_MAX)), dim3(256), 0, cuda->stream, *w, *source);
    });
    return llm__cuda_check(cuda, cudaGetLastError(), "packing weights", err);
}

enum { LLM__RAW_BYTES = 64 << 20 }; /* most bytes of file rows on the device at a time */

static bool llm__cuda_load_weight(void *context, llm_weight *w, const void *host, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    const llm_type_info *type = llm_type_find(w->type);
    llm__cuda_clear(err);
    const llm__format *format = llm__format_of(w->type);
    if (!type || !format)
        return llm__cuda_fail(err, LLM_ERROR_UNSUPPORTED, "%s: no kernel for weights of type %d", cuda->backend.name,
                              (int)w->type);
    if (w->rows < 1 || w->cols < 1 || w->cols % type->block_values || w->rows > INT32_MAX || w->cols > INT32_MAX / 4)
        return llm__cuda_fail(err, LLM_ERROR_FORMAT, "%s: a %s matrix of %lld x %lld: rows must be whole blocks of %d, "
                              "and neither count may reach 2^29", cuda->backend.name, type->name, (long long)w->rows,
                              (long long)w->cols, type->block_values);
    llm__packed packed = llm__packed_of(w);
    size_t bytes = llm__packed_bytes(&packed) + (size_t)packed.n_tiles * LLM__TILE_ROWS * sizeof(float);
    void *device = llm__cuda_allocate(cuda, bytes, "weights (a smaller type, as q8_0 or q4_0, needs less)", err);
    if (!device) return false;
    w->data = device;
    packed = llm__packed_of(w);

    llm__source source = {w->type, NULL, llm__row_bytes(w->type, w->cols), 0, 0, w->cols};
    /* rows per upload: whole tiles */
    int64_t step = (int64_t)(LLM__RAW_BYTES / source.row_bytes) / LLM__TILE_ROWS * LLM__TILE_ROWS;
    if (step < LLM__TILE_ROWS) step = LLM__TILE_ROWS;
    if (step > w->rows) step = w->rows;
    bool fine = llm__cuda_scratch(cuda, &cuda->raw, &cuda->raw_bytes, (size_t)step * source.row_bytes, "weights on their way", err);
    source.data = cuda->raw;
    for (; fine && source.end_row < w->rows; source.first_row = source.end_row) {
        source.end_row = source.first_row + step < w->rows ? source.first_row + step : w->rows;
        const char *from = (const char *)host + (size_t)source.first_row * source.row_bytes;
        fine = llm__cuda_upload(cuda, cuda->raw, from, (size_t)(source.end_row - source.first_row) * source.row_bytes, err) &&
               llm__cuda_pack(cuda, &packed, &source, err);
    }
    if (!fine) llm__cuda_free_weight(cuda, w);
    return fine;
}

/* ---- x, rounded ---------------------------------------------------------------------------- */

typedef struct llm__input { /* the input of a matmul: x (n, cols) */
    const float *x;
    /* f16 (2 n_chunks, stride, 32), for coalesced reads of fragments. NULL: each block rounds x. */
    const char *rounded;
    const float *scales; /* (segments, n) factors for the segments' sums */
    int n, stride;       /* stride: n rounded up to a multiple of 8, with rows of zeros */
} llm__input;

/* The first chunk of a segment. A segment ends where the next one begins. */
__device__ static inline int llm__segment_chunk(const llm__packed *w, int segment) {
    int chunk = segment * w->segment_chunks;
    return chunk < w->n_chunks ? chunk : w->n_chunks;
}

/* The largest |x| among the values that one of `threads` threads reads in a segment of a row. The
 * caller takes the maximum over the threads. */
__device__ static inline float llm__largest_input(const llm__packed *w, const float *row, int segment, int thread, int threads) {
    int64_t end = (int64_t)llm__segment_chunk(w, segment + 1) * LLM__CHUNK;
    float largest = 0.0f;
    for (int64_t k = (int64_t)llm__segment_chunk(w, segment) * LLM__CHUNK + thread; k < end; k += threads) {
        int64_t col = k;
        llm__plane(w, &col);
        if (col < w->cols) largest = fmaxf(largest, fabsf(row[col]));
    }
    return largest;
}

/* Columns k and k + 1 of a row of the wide x, divided by its scale (a power of two: exact). */
__device__ static inline uint32_t llm__round_pair(const llm__packed *w, const float *row, int64_t k, float inverse) {
    int64_t col = k;
    int plane = llm__plane(w, &col);
    float low = col < w->cols ? row[col] * inverse : 0.0f, high = col + 1 < w->cols ? row[col + 1] * inverse : 0.0f;
    return llm__pair(llm__half_of(low, plane == 1), llm__half_of(high, plane == 1));
}

/* blockIdx.x is the segment, y the token. Bytes: x read (the second time from a cache), and half as
 * many written. */
__global__ static void llm__round_kernel(llm__packed w, llm__input x, uint32_t *rounded, float *scales) {
    llm__take_over();
    LLM_SHARED(float, scratch, 32);
    int segment = blockIdx.x, token = blockIdx.y;
    const float *row = x.x + (int64_t)token * w.cols;
    float scale = 1.0f;
    if (token < x.n) {
        scale = llm__power_for(llm__block_max(llm__largest_input(&w, row, segment, threadIdx.x, blockDim.x), scratch));
        if (threadIdx.x == 0) scales[segment * x.n + token] = scale;
    }
    int64_t end = (int64_t)llm__segment_chunk(&w, segment + 1) * LLM__CHUNK;
    for (int64_t k = (int64_t)llm__segment_chunk(&w, segment) * LLM__CHUNK + 2 * threadIdx.x; k < end; k += 2 * blockDim.x)
        rounded[((k / 32 * x.stride + token) * 32 + k % 32) / 2] = token < x.n ? llm__round_pair(&w, row, k, 1.0f / scale) : 0;
}

/* ---- The kernel ----------------------------------------------------------------------------- */

typedef struct llm__output { /* out (n, rows) */
    float *out;
    const float *bias; /* (rows) or NULL */
    bool add;          /* out += */
} llm__output;

/* Matmuls of one x (q, k and v; gate and up) share a launch, so that a matrix of few rows does not
 * leave most of the GPU idle. All have the same layout and the same columns. */
typedef struct llm__product {
    llm__packed w;
    llm__output o;
} llm__product;

typedef struct llm__products {
    llm__product each[LLM__PRODUCTS];
    int n;
} llm__products;

__host__ __device__ static inline int64_t llm__row_blocks(const llm__product &p, int tiles) { return llm__ceil_div(p.w.n_tiles, tiles); }

/* Find the product that a block computes; each block computes `tiles` tiles of rows. *block is the
 * number of the block in the launch, and becomes its number in the product. */
__device__ __forceinline__ const llm__product &llm__find_product(const llm__products &p, int tiles, int64_t *block) {
    int which = 0;
    for (; which + 1 < p.n && *block >= llm__row_blocks(p.each[which], tiles); which++) *block -= llm__row_blocks(p.each[which], tiles);
    return p.each[which];
}

static int64_t llm__all_row_blocks(const llm__products &p, int tiles) {
    int64_t n = 0;
    for (int i = 0; i < p.n; i++) n += llm__row_blocks(p.each[i], tiles);
    return n;
}

/* Finish one element: apply the row scale and the bias, and store. The order of these steps is the
 * same in all kernels except the plain one. */
__device__ static inline void llm__finish(const llm__packed *w, const llm__output *o, int64_t token, int64_t row, float sum) {
    if (w->row_scales) sum = __fmul_rn(sum, w->row_scales[row]);
    if (o->bias) sum = __fadd_rn(sum, o->bias[row]);
    float *out = o->out + token * w->rows + row;
    *out = o->add ? __fadd_rn(*out, sum) : sum;
}

/* sums (16 equal rows, 8 tokens) = x (32, 8) summed over its columns, if the layout has
 * minimums. */
template <class Layout> __device__ __forceinline__ void llm__add_up(float sums[4], const uint4 &x) {
    const uint32_t ones[4] = {LLM__F16_1, LLM__F16_1, LLM__F16_1, LLM__F16_1}, b[2][2] = {{x.x, x.y}, {x.z, x.w}};
    sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
    if (Layout::minimums) {
        llm__mma_m16n8k16_f16(sums, ones, b[0]);
        llm__mma_m16n8k16_f16(sums, ones, b[1]);
    }
}

/* sums (16 rows, 8 tokens) += weights (16, 32) times x (32, 8). A scale multiplies the sum of its
 * 32 products. */
template <class Layout>
__device__ __forceinline__ void llm__multiply(float sums[4], const uint32_t a[2][4], const llm__scales &scales, const uint4 &x,
                                              const float x_sums[4]) {
    const uint32_t b[2][2] = {{x.x, x.y}, {x.z, x.w}};
    if (Layout::scaled) {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        llm__mma_m16n8k16_f16(part, a[0], b[0]);
        llm__mma_m16n8k16_f16(part, a[1], b[1]);
LLM_UNROLL
        for (int i = 0; i < 4; i++) {
            sums[i] = fmaf(part[i], scales.scale[i / 2], sums[i]);
            if (Layout::minimums) sums[i] = fmaf(x_sums[i], scales.minimum[i / 2], sums[i]);
        }
    } else {
        llm__mma_m16n8k16_f16(sums, a[0], b[0]);
        llm__mma_m16n8k16_f16(sums, a[1], b[1]);
    }
}

/* Return the two values of x that this lane rounds in a chunk, or zeros if chunk >= end. Whole: all
 * chunks are full and the weights are not f32, so one read of two values is enough. */
template <bool Whole>
__device__ __forceinline__ float2 llm__input_pair(const llm__packed *w, const float *row, int chunk, int end, int lane, int *plane) {
    *plane = 0;
    if (chunk >= end) return make_float2(0.0f, 0.0f);
    if (Whole) return ((const float2 *)(const void *)row)[chunk * (LLM__CHUNK / 2) + lane];
    int64_t col = (int64_t)chunk * LLM__CHUNK + 2 * lane;
    *plane = llm__plane(w, &col);
    return make_float2(col < w->cols ? row[col] : 0.0f, col + 1 < w->cols ? row[col + 1] : 0.0f);
}

/* Round a warp's segment of x into shared memory, in the layout of llm__input.rounded; this saves a
 * launch. Each lane reads several chunks before it uses them, so that it waits for memory once.
 * Every block does this, so it must be cheap compared with 16 rows of weights. */
template <bool Whole>
__device__ __forceinline__ void llm__round_segment(const llm__packed *w, const llm__input *x, int segment, int lane, uint32_t *to,
                                                   float *scales) {
    enum { AT_ONCE = 8 };
    int first = llm__segment_chunk(w, segment), end = llm__segment_chunk(w, segment + 1), plane[AT_ONCE];
    float2 pairs[AT_ONCE];
    for (int token = 0; token < x->n; token++) {
        const float *row = x->x + (int64_t)token * w->cols;
        float largest = 0.0f;
        for (int c = first; c < end; c += AT_ONCE) {
LLM_UNROLL
            for (int i = 0; i < AT_ONCE; i++) pairs[i] = llm__input_pair<Whole>(w, row, c + i, end, lane, &plane[i]);
LLM_UNROLL
            for (int i = 0; i < AT_ONCE; i++) largest = fmaxf(largest, fmaxf(fabsf(pairs[i].x), fabsf(pairs[i].y)));
        }
        float scale = llm__power_for(llm__warp_max(largest)), inverse = 1.0f / scale;
        if (lane == 0) scales[segment * x->n + token] = scale;
        for (int c = first; c < end; c += AT_ONCE) {
            uint32_t *place = to + ((2 * c + lane / 16) * x->n + token) * 16 + lane % 16;
LLM_UNROLL
            for (int i = 0; i < AT_ONCE; i++) pairs[i] = llm__input_pair<Whole>(w, row, c + i, end, lane, &plane[i]);
LLM_UNROLL
            for (int i = 0; i < AT_ONCE; i++, place += 32 * x->n)
                if (c + i < end)
                    *place = llm__pair(llm__half_of(pairs[i].x * inverse, plane[i] == 1),
                                       llm__half_of(pairs[i].y * inverse, plane[i] == 1));
        }
    }
    __syncwarp();
}

/* A lane's part of half a chunk of x, for N x 8 tokens. */
template <int N> __device__ __forceinline__ void llm__load_input(uint4 x[N], const char *half, const int own[N]) {
LLM_UNROLL
    for (int i = 0; i < N; i++) x[i] = llm__load_16(half + own[i]);
}

/* The numbers of chunks of weights (depth) and of x (x_depth) that a warp has in flight. x_depth 0:
 * x is read when it is used. All chunks take registers, so a shape with many sums has fewer. */
template <class Layout, int R, int N, bool Rounds> struct llm__few_shape {
    enum {
        depth = N == 1 ? R == 1 ? (int)Layout::depth : 2 : N == 2 && Layout::chunk_bytes < 600 ? 3 : 2,
        x_depth = Rounds || N > 2 ? 0 : N == 1 ? (int)depth : 1,
        /* fewest blocks per SM, which bounds the registers of a thread */
        blocks = R * N > 4 ? 1 : 2
    };
};

/* One block: R tiles of 16 rows, all columns, up to N x 8 tokens; one warp per segment. A warp has
 * `depth` chunks in flight while it multiplies another: with 16 warps per SM, at least the 30 KB
 * that keep memory busy (4 TB/s x 1 us of latency / 132 SMs). If Rounds, the block rounds x itself.
 * Bytes: the weights once; x once per block, from the caches. So R grows with N: 16 tokens of x are
 * as many bytes as 57 rows of q4_0. */
template <class Layout, int R, int N, bool Rounds>
__global__ static void __launch_bounds__(256, (llm__few_shape<Layout, R, N, Rounds>::blocks))
    llm__matmul_few_kernel(llm__products p, llm__input x) {
    typedef llm__few_shape<Layout, R, N, Rounds> shape;
    constexpr int depth = shape::depth, x_depth = shape::x_depth;
    constexpr int rows = R * LLM__TILE_ROWS, pitch = rows + 4; /* pitch: no bank conflicts */
    LLM_SHARED(float, parts, LLM__SEGMENTS * 8 * pitch); /* (segment, token, row) */
    LLM_SHARED(float, x_scales, Rounds ? LLM__SEGMENTS * 8 : 1);
    LLM_DYNAMIC_SHARED(uint32_t, x_rounded);
    llm__let_next_begin();
    int64_t block = blockIdx.x;
    const llm__product &product = llm__find_product(p, R, &block);
    const llm__packed &w = product.w;
    int segment = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first = llm__segment_chunk(&w, segment), end = llm__segment_chunk(&w, segment + 1);

    llm__reader at[R];
LLM_UNROLL
    for (int r = 0; r < R; r++) { /* after the last tile: repeat it; its sums are not used */
        int64_t tile = block * R + r < w.n_tiles ? block * R + r : w.n_tiles - 1;
        at[r] = llm__reader_of<Layout>(w.chunks + (tile * w.n_chunks + first) * Layout::chunk_bytes, lane);
    }
    Layout weights[depth][R];
LLM_UNROLL
    for (int d = 0; d < depth; d++)
        if (first + d < end) {
LLM_UNROLL
            for (int r = 0; r < R; r++) weights[d][r].stream(at[r], d * Layout::chunk_bytes);
        }
    llm__wait_for_last(); /* earlier kernels may write everything except weights */
    if (Rounds) {
        bool whole = w.n_chunks == w.plane_chunks && w.cols % LLM__CHUNK == 0;
        if (whole) llm__round_segment<true>(&w, &x, segment, lane, x_rounded, x_scales);
        else llm__round_segment<false>(&w, &x, segment, lane, x_rounded, x_scales);
        x.rounded = (const char *)x_rounded;
        x.scales = x_scales;
        x.stride = x.n; /* not rounded up */
    }
    uint4 inputs[x_depth ? 2 * x_depth : 1][N];
    /* Offset of a lane's part in half a chunk. After the last token, it is that of the first token,
     * whose extra sums are not used. */
    int own[N];
    const char *next_half = x.rounded + (int64_t)first * x.stride * 128;
LLM_UNROLL
    for (int i = 0; i < N; i++) own[i] = (i * 8 + lane / 4 < x.n ? i * 8 + lane / 4 : 0) * 64 + lane % 4 * 16;
LLM_UNROLL
    for (int h = 0; h < 2 * x_depth; h++, next_half += x.stride * 64)
        if (2 * first + h < 2 * end) llm__load_input<N>(inputs[h], next_half, own);

    float sums[R][N][4] = {};
    for (int c = first; c < end; c += depth) {
LLM_UNROLL
        for (int d = 0; d < depth; d++)
            if (c + d < end) {
LLM_UNROLL
                for (int half = 0; half < 2; half++, next_half += x.stride * 64) {
                    const int slot = x_depth ? (2 * d + half) % (x_depth ? 2 * x_depth : 1) : 0;
                    uint32_t a[R][2][4];
                    llm__scales weight_scales[R];
                    if (!x_depth) llm__load_input<N>(inputs[slot], next_half, own);
LLM_UNROLL
                    for (int r = 0; r < R; r++) weights[d][r].halves[half].unpack(w, half, lane, a[r], &weight_scales[r]);
LLM_UNROLL
                    for (int i = 0; i < N; i++) {
                        float x_sums[4];
                        llm__add_up<Layout>(x_sums, inputs[slot][i]);
LLM_UNROLL
                        for (int r = 0; r < R; r++)
                            llm__multiply<Layout>(sums[r][i], a[r], weight_scales[r], inputs[slot][i], x_sums);
                    }
                    if (x_depth && c + d + x_depth < end) /* x has been used: load the next one */
                        llm__load_input<N>(inputs[slot], next_half, own);
                }
                if (c + d + depth < end) {
LLM_UNROLL
                    for (int r = 0; r < R; r++) weights[d][r].stream(at[r], (d + depth) * Layout::chunk_bytes);
                }
            }
LLM_UNROLL
        for (int r = 0; r < R; r++) {
            at[r].words += depth * Layout::chunk_bytes;
            at[r].high += depth * Layout::chunk_bytes;
            at[r].scales += depth * Layout::chunk_bytes;
        }
    }

    /* Add the segments in order, 8 tokens at a time. */
LLM_UNROLL
    for (int i = 0; i < N; i++) {
        __syncthreads(); /* all threads have read the previous 8 tokens */
LLM_UNROLL
        for (int r = 0; r < R; r++)
LLM_UNROLL
            for (int j = 0; j < 4; j++)
                parts[(segment * 8 + lane % 4 * 2 + j % 2) * pitch + r * LLM__TILE_ROWS + lane / 4 + j / 2 * 8] = sums[r][i][j];
        __syncthreads();
        for (int j = threadIdx.x; j < 8 * rows; j += 256) {
            int row = j % rows, token = j / rows;
            int64_t w_row = block * rows + row;
            if (i * 8 + token >= x.n || w_row >= w.rows) continue;
            float sum = 0.0f;
            for (int s = 0; s < LLM__SEGMENTS; s++)
                sum = fmaf(parts[(s * 8 + token) * pitch + row], x.scales[s * x.n + i * 8 + token], sum);
            llm__finish(&w, &product.o, i * 8 + token, w_row, sum);
        }
    }
}

/* The textbook kernel (the option `plain`): one warp per element of the result. */
__global__ static void llm__plain_matmul_kernel(llm__packed w, const float *x, int n, llm__output o) {
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= w.rows) return;
    for (int64_t token = blockIdx.y; token < n; token += gridDim.y) {
        float sum = 0.0f;
        for (int64_t j = threadIdx.x % 32; j < w.cols; j += 32) sum += llm__packed_value(&w, row, j) * x[token * w.cols + j];
        sum = llm__warp_sum(sum);
        if (threadIdx.x % 32) continue;
        if (o.bias) sum += o.bias[row];
        float *out = o.out + token * w.rows + row;
        *out = o.add ? *out + sum : sum;
    }
}

/* ---- Embedding: here, since it reads packed weights ---------------------------------------- */

/* One block per token. Bytes: a row of the table read, a row of f32 written. */
__global__ static void llm__embed_kernel(const int32_t *tokens, llm__packed table, float *out) {
    llm__take_over();
    for (int64_t i = threadIdx.x; i < table.cols; i += blockDim.x)
        out[blockIdx.x * table.cols + i] = llm__packed_value(&table, tokens[blockIdx.x], i);
}

static void llm__cuda_embed(llm__cuda *cuda, const llm_weight *table, float *out) {
    LLM_LAUNCH_EARLY(cuda, llm__embed_kernel, dim3(cuda->batch.n_tokens), llm__threads(table->cols), 0, cuda->batch.tokens,
                     llm__packed_of(table), out);
    llm__cuda_launched(cuda, "embed");
}

/* =====================================================================================
 * [4] Matmul, many rows
 *
 * With hundreds of tokens the limit is arithmetic: the matrix instructions should never wait. A
 * block computes a tile of the result, 128 rows of weights by 128 or 64 tokens (less for small
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
 * Weights are copied as they are, and each warp unpacks those it multiplies. The layouts of chapter
 * [3] keep the pieces of a fragment together, so lanes read shared memory 16 bytes at a time,
 * without bank conflicts.
 *
 * Sums have the order of chapter [3]: `sums` holds the current segment, `totals` the earlier ones.
 * Bytes, at least: the weights and x once. They are read again, mostly from the L2 cache: x for
 * every 128 rows, weights for every 128 tokens. Hopper's larger matrix instructions (wgmma) are not
 * used, so that the same code serves every GPU from sm_80 on.
 * ================================================================================== */

template <class Layout, int Rows, int Tokens> struct llm__many_shape {
    enum {
        warps_down = Rows / 32, warps_across = 2, threads = warps_down * warps_across * 32,
        N = Tokens / warps_across / 8, /* fragments of 8 tokens per warp */
        stage_bytes = Rows / LLM__TILE_ROWS * Layout::chunk_bytes + Tokens * LLM__CHUNK * 2,
        stages = stage_bytes > 24 << 10 ? 3 : 4
    };
};

/* Where the next chunk is copied from. After the last tile or token, a block copies the last one
 * again; its results are not used. */
struct llm__chunk_source {
    const char *weights, *x;   /* addresses of the block's first tile and first token */
    int64_t tile_bytes;
    int last_tile, last_token; /* numbers, counted from the block's first tile and token */
    int stride;                /* stride of x: see llm__input */
};

/* Copy a chunk of the weight tiles and of x into a stage, 16 bytes per thread at a time. */
template <class Layout, int Rows, int Tokens>
__device__ __forceinline__ void llm__load_stage(char *stage, llm__chunk_source *from) {
    constexpr int threads = llm__many_shape<Layout, Rows, Tokens>::threads, pieces = Layout::chunk_bytes / 16;
    constexpr int weight_pieces = Rows / LLM__TILE_ROWS * pieces, x_pieces = 2 * Tokens * 4;
LLM_UNROLL
    for (int k = 0; k < (weight_pieces + threads - 1) / threads; k++) {
        int i = threadIdx.x + k * threads, tile = i / pieces;
        if (weight_pieces % threads == 0 || i < weight_pieces)
            llm__cp_async_16(stage + i * 16,
                             from->weights + min(tile, from->last_tile) * from->tile_bytes + (i - tile * pieces) * 16, true);
    }
    char *x_stage = stage + weight_pieces * 16; /* (2, Tokens, 32) f16 */
LLM_UNROLL
    for (int k = 0; k < (x_pieces + threads - 1) / threads; k++) {
        int i = threadIdx.x + k * threads, half = i / (4 * Tokens), token = min(i / 4 % Tokens, from->last_token);
        if (x_pieces % threads == 0 || i < x_pieces)
            llm__cp_async_16(x_stage + i * 16, from->x + ((int64_t)(half * from->stride) + token) * 64 + i % 4 * 16, true);
    }
    from->weights += Layout::chunk_bytes;
    from->x += (int64_t)from->stride * 128;
}

template <class Layout, int Rows, int Tokens>
__global__ static void __launch_bounds__((llm__many_shape<Layout, Rows, Tokens>::threads), 1)
    llm__matmul_many_kernel(llm__products p, llm__input x, int token_tiles) {
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

    llm__chunk_source from = {w.chunks + first_tile * w.n_chunks * Layout::chunk_bytes, x.rounded + first_token * 64,
                              (int64_t)w.n_chunks * Layout::chunk_bytes, (int)(w.n_tiles - 1 - first_tile),
                              (int)(x.stride - 1 - first_token), x.stride};
    for (int c = 0; c < stages - 1; c++) {
        if (c < w.n_chunks) llm__load_stage<Layout, Rows, Tokens>(shared + c * shape::stage_bytes, &from);
        llm__cp_async_commit(); /* even if the group is empty, so that there is one per chunk */
    }
    float sums[2][N][4] = {}, totals[2][N][4] = {};
    int segment = 0, segment_end = llm__segment_chunk(&w, 1);
    for (int c = 0; c < w.n_chunks; c++) {
        llm__cp_async_wait<stages - 2>();
        __syncthreads(); /* all threads can read chunk c; the stage of chunk c - 1 is free */
        int next = c + stages - 1;
        if (next < w.n_chunks) llm__load_stage<Layout, Rows, Tokens>(shared + next % stages * shape::stage_bytes, &from);
        llm__cp_async_commit();

        const char *stage = shared + c % stages * shape::stage_bytes;
        const char *x_stage = stage + Rows / LLM__TILE_ROWS * Layout::chunk_bytes;
LLM_LOOP
        for (int half = 0; half < 2; half++) {
            uint32_t a[2][2][4];
            llm__scales scales[2];
LLM_UNROLL
            for (int r = 0; r < 2; r++) {
                typename Layout::half_chunk weights;
                weights.load(stage + (down * 2 + r) * Layout::chunk_bytes, half, lane);
                weights.unpack(w, half, lane, a[r], &scales[r]);
            }
LLM_UNROLL
            for (int i = 0; i < N; i++) {
                int token = (across * N + i) * 8 + lane / 4;
                uint4 input = llm__load_16(x_stage + ((half * Tokens + token) * 4 + lane % 4) * 16);
                float x_sums[4];
                llm__add_up<Layout>(x_sums, input);
LLM_UNROLL
                for (int r = 0; r < 2; r++) llm__multiply<Layout>(sums[r][i], a[r], scales[r], input, x_sums);
            }
        }
        if (c + 1 < segment_end) continue;
LLM_UNROLL
        for (int i = 0; i < N; i++)
LLM_UNROLL
            for (int j = 0; j < 2; j++) { /* the lane's two tokens */
                int64_t token = first_token + (across * N + i) * 8 + lane % 4 * 2 + j;
                float scale = token < x.n ? x.scales[(int64_t)segment * x.n + token] : 0.0f;
LLM_UNROLL
                for (int r = 0; r < 2; r++) {
                    totals[r][i][j] = fmaf(sums[r][i][j], scale, totals[r][i][j]);
                    totals[r][i][j + 2] = fmaf(sums[r][i][j + 2], scale, totals[r][i][j + 2]);
                    sums[r][i][j] = sums[r][i][j + 2] = 0.0f;
                }
            }
        segment_end = llm__segment_chunk(&w, ++segment + 1);
    }
LLM_UNROLL
    for (int r = 0; r < 2; r++)
LLM_UNROLL
        for (int i = 0; i < N; i++)
LLM_UNROLL
            for (int j = 0; j < 4; j++) {
                int64_t token = first_token + (across * N + i) * 8 + lane % 4 * 2 + j % 2;
                int64_t row = (first_tile + down * 2 + r) * LLM__TILE_ROWS + lane / 4 + j / 2 * 8;
                if (token < x.n && row < w.rows) llm__finish(&w, &product.o, token, row, totals[r][i][j]);
            }
}

/* ---- Which kernel -------------------------------------------------------------------------- */

/* Allow a kernel more than 48 KB of shared memory: the `bytes` of its launch and its static
 * arrays. */
template <class Kernel> static void llm__allow_shared(llm__cuda *cuda, Kernel kernel, size_t bytes) {
    enum { OWN_ARRAYS = 2 << 10 }; /* upper bound of static arrays in the callers' kernels */
    if (bytes + OWN_ARRAYS > 48 << 10)
        llm__cuda_note(cuda, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                       "asking for shared memory");
}

template <class Layout, int R, int N, bool Rounds>
static void llm__launch_few(llm__cuda *cuda, const llm__products &p, const llm__input &x) {
    size_t shared = Rounds ? (size_t)p.each[0].w.n_chunks * LLM__CHUNK * 2 * (size_t)x.n : 0;
    LLM_LAUNCH_EARLY(cuda, (llm__matmul_few_kernel<Layout, R, N, Rounds>), dim3((unsigned)llm__all_row_blocks(p, R)),
                     dim3(256), shared, p, x);
}

template <class Layout, int Rows, int Tokens>
static void llm__launch_many(llm__cuda *cuda, const llm__products &p, const llm__input &x) {
    typedef llm__many_shape<Layout, Rows, Tokens> shape;
    auto matmul_many_kernel = llm__matmul_many_kernel<Layout, Rows, Tokens>;
    size_t shared = (size_t)shape::stages * shape::stage_bytes;
    int token_tiles = (int)llm__ceil_div(x.n, Tokens);
    llm__allow_shared(cuda, matmul_many_kernel, shared);
    LLM_LAUNCH_EARLY(cuda, matmul_many_kernel, dim3((unsigned)(llm__all_row_blocks(p, Rows / LLM__TILE_ROWS) * token_tiles)),
                     dim3((unsigned)shape::threads), shared, p, x, token_tiles);
}

/* Tests set this to run the kernels for large matrices on small ones; 0: the GPU's SMs. (weak: a
 * program may contain this file twice, for a GPU and emulated.) */
__attribute__((weak)) int llm__pretended_processors = 0;

/* Choose the fastest kernel from n and the number of blocks per SM. All kernels give the same
 * sums. */
template <class Layout> static void llm__launch_matmul(llm__cuda *cuda, const llm__products &p, const llm__input &x) {
    constexpr int large = Layout::scaled ? 64 : 128; /* tokens; unpacking also needs registers */
    int64_t processors = llm__pretended_processors ? llm__pretended_processors : cuda->n_processors;
    if (!x.rounded) llm__launch_few<Layout, 1, 1, true>(cuda, p, x);
    else if (x.n <= 8 && llm__all_row_blocks(p, 2) < 4 * processors) llm__launch_few<Layout, 1, 1, false>(cuda, p, x);
    else if (x.n <= 8) llm__launch_few<Layout, 2, 1, false>(cuda, p, x);
    else if (x.n <= 16 && llm__all_row_blocks(p, 4) < processors) llm__launch_few<Layout, 2, 2, false>(cuda, p, x);
    else if (x.n <= 16) llm__launch_few<Layout, 4, 2, false>(cuda, p, x);
    else if (x.n <= LLM__FEW_TOKENS && llm__all_row_blocks(p, 4) < processors) llm__launch_few<Layout, 2, 4, false>(cuda, p, x);
    else if (x.n <= LLM__FEW_TOKENS) llm__launch_many<Layout, 64, 32>(cuda, p, x);
    else if (llm__all_row_blocks(p, 8) * llm__ceil_div(x.n, large) < processors) llm__launch_many<Layout, 64, 64>(cuda, p, x);
    else llm__launch_many<Layout, 128, large>(cuda, p, x);
    llm__cuda_launched(cuda, "matmul");
}

/* Reserve memory for rounded x. If the rows of a matmul do not fit, it is done in parts. */
static bool llm__matmul_reserve(llm__cuda *cuda, llm_error *err) {
    cuda->last.x = NULL;
    size_t rows = (size_t)cuda->largest.max_tokens + 7, chunks = (size_t)llm__ceil_div(cuda->largest.max_cols, LLM__CHUNK);
    /* minimum: 8 rows of the wide x, for f32 weights */
    size_t wide = 8 * (chunks * 3 * LLM__CHUNK * 2 + LLM__SEGMENTS * sizeof(float));
    size_t bytes = rows * (chunks * LLM__CHUNK * 2 + LLM__SEGMENTS * sizeof(float));
    return llm__cuda_scratch(cuda, &cuda->rounded, &cuda->rounded_bytes, bytes > wide ? bytes : wide,
                          "rounded activations (smaller steps need less)", err);
}

enum { LLM__ROUND_SHARED = 32 << 10 }; /* largest x, in bytes, that each block rounds itself */

static bool llm__overlap(const float *a, int64_t n_a, const float *b, int64_t n_b) { return a < b + n_b && b < a + n_a; }

static void llm__cuda_matmul_part(llm__cuda *cuda, const float *x, const llm__products &p, int n, size_t row_bytes) {
    const llm__packed *w = &p.each[0].w;
    llm__input input = {x, NULL, NULL, n, (int)llm__ceil_div(n, 8) * 8};
    llm__rounded_input *last = &cuda->last;
    if (n > 2 || (size_t)n * row_bytes > LLM__ROUND_SHARED) {
        bool there = last->x == x && last->n == n && last->cols == w->cols && last->n_chunks == w->n_chunks &&
                     last->launches == cuda->launches;
        input.rounded = cuda->rounded;
        input.scales = (const float *)(const void *)(cuda->rounded + (size_t)input.stride * row_bytes);
        if (!there) {
            /* at least two columns per thread */
            unsigned threads = 32u * (unsigned)(w->segment_chunks < 4 ? w->segment_chunks : 4);
            LLM_LAUNCH_EARLY(cuda, llm__round_kernel, dim3(LLM__SEGMENTS, (unsigned)input.stride), dim3(threads), 0, *w, input,
                             (uint32_t *)(void *)cuda->rounded, (float *)input.scales);
            llm__cuda_launched(cuda, "rounding");
        }
    }
    llm__with_layout(w->layout, [&](auto layout) { llm__launch_matmul<decltype(layout)>(cuda, p, input); });
    last->x = input.rounded ? x : NULL;
    for (int i = 0; i < p.n; i++)
        if (llm__overlap(x, (int64_t)n * w->cols, p.each[i].o.out, n * p.each[i].w.rows)) last->x = NULL;
    last->n = n;
    last->cols = w->cols;
    last->n_chunks = w->n_chunks;
    last->launches = cuda->launches;
}

/* Compute one product, or several with the same x that llm__join has grouped. */
static void llm__cuda_matmuls(llm__cuda *cuda, const float *x, llm__products *p, int n) {
    const llm__packed *w = &p->each[0].w;
    if (n < 1 || w->rows < 1) return;
    if (cuda->options.plain) {
        dim3 grid(llm__grid(llm__ceil_div(w->rows, 4), INT32_MAX), llm__grid(n, 65535));
        LLM_LAUNCH(llm__plain_matmul_kernel, grid, dim3(128), 0, cuda->stream, *w, x, n, p->each[0].o);
        llm__cuda_launched(cuda, "matmul");
        return;
    }
    size_t row_bytes = (size_t)w->n_chunks * LLM__CHUNK * 2;
    int64_t most = (int64_t)(cuda->rounded_bytes / (row_bytes + LLM__SEGMENTS * sizeof(float))) / 8 * 8;
    if (most > 32768) most = 32768; /* a grid's y ends at 65535 */
    if (most < 1) {
        if (cuda->failure.status == LLM_OK)
            llm__cuda_fail(&cuda->failure, LLM_ERROR_DEVICE, "%s: a matrix is wider than what was reserved", cuda->backend.name);
        return;
    }
    for (int64_t first = 0; first < n; first += most) {
        int64_t rows = n - first < most ? n - first : most;
        llm__cuda_matmul_part(cuda, x + first * w->cols, *p, (int)rows, row_bytes);
        for (int i = 0; i < p->n; i++) p->each[i].o.out += rows * p->each[i].w.rows;
    }
}

/* =====================================================================================
 * [5] Attention, many queries of a sequence (prefill)
 *
 * A query's scores are its dot products with the keys of the positions it sees. Its result is the
 * sum of their values, weighted by the softmax of the scores. A block computes 64 rows (a row: the
 * query of one head of one token) that share a kv head, so each key and value it reads serves 64
 * rows. Blocks of the same sequence find most keys and values in the L2 cache. So the limit is
 * arithmetic.
 *
 * ONLINE SOFTMAX (Milakov and Gimelshein 2018; Dao et al. 2022). The matrix of all scores is never
 * stored: keys arrive in tiles of 64 positions. Each row keeps its largest score so far, m; the sum
 * of exp(score - m), l; and the sum of value x exp(score - m), `sums`. When a tile has a larger
 * score m', l and `sums` are first multiplied by exp(m - m'). (The code uses scores times log2(e)
 * and 2^x, for which the GPU has an instruction.)
 *
 *     16 rows of q    x   K tile (64, head_dim)   ->   scores (16, 64)
 *     f16, registers      f16, shared memory           f32, registers
 *
 *     weights (16, 64) x  V tile (64, head_dim)   ->   sums (16, head_dim)
 *     f16, registers      f16, shared memory           f32, registers
 *
 * A warp does this for 16 rows. The first product leaves the scores in the registers where the
 * second one needs its matrix A. Above head_dim 128, blocks have 32 rows and tiles 32 positions.
 *
 * ORDER OF SUMS. A token's result has the same bits whether it is computed alone or in a chunk of a
 * prompt. So tiles begin at multiples of 64 positions of the sequence, and each 256 positions form
 * a part with its own m, l and sums. Parts are merged in order: here by the block, into `out`; in
 * chapter [6] by a second kernel.
 *
 * ROUNDING. Weights and q (each row scaled by a power of two) are rounded to f16; sums are f32.
 * ================================================================================== */

typedef struct llm__attention_arguments {
    /* as in llm__device_batch */
    const int32_t *positions, *sequence_of, *block_tables, *counts, *seq_first, *seq_count;
    int n_tokens, n_sequences;
    /* as in llm_attention_shape and llm_cache; block_size and window in positions */
    int n_heads, n_kv_heads, head_dim, block_size, window;
    float scale;               /* factor of the dot product of q and k */
    llm_type cache_type;       /* LLM_F16 or LLM_F32 */
    const char *keys, *values; /* device (n_blocks, n_kv_heads, block_size, head_dim): one layer */
    const float *q;            /* device (T, n_heads, head_dim) */
    float *out;                /* device (T, n_heads, head_dim) */
    int few_rows;              /* chapter [6] computes sequences of at most this many rows */
    int max_rows, n_parts;     /* sizes of the two arrays below */
    float *part_sums;          /* device (n_kv_heads, n_sequences, max_rows, n_parts, head_dim) or
                                * NULL: not split into parts */
    float2 *part_stats;        /* device (n_kv_heads, n_sequences, max_rows, n_parts): m and l */
} llm__attention_arguments;

enum {
    LLM__PART = 256,         /* positions in a part */
    LLM__FEW_ROWS = 32,      /* chapter [6] is faster for up to 32 rows per sequence and kv head */
    LLM__MMA_HEAD_DIM = 256  /* largest head_dim for the kernels with matrix instructions */
};

__device__ static inline float llm__cache_value(llm_type type, const char *side, int64_t i) {
    return type == LLM_F16 ? llm__f16_bits_to_f32(((const uint16_t *)(const void *)side)[i])
                           : ((const float *)(const void *)side)[i];
}

/* The index of the cache row (head_dim values of one layer and kv head) that holds position p. */
__device__ static inline int64_t llm__position_row(const llm__attention_arguments *a, int sequence, int kv_head, int p) {
    int64_t block = a->block_tables[(int64_t)sequence * a->counts[3] + p / a->block_size];
    return (block * a->n_kv_heads + kv_head) * a->block_size + p % a->block_size;
}

/* ---- The plain form ------------------------------------------------------------------------
 * One block per query. A tile has one position per thread: each thread computes the score of one
 * position, then sums some dimensions over the tile. blockIdx.x: head; y: token. */
__global__ static void llm__plain_attention_kernel(llm__attention_arguments a, int n_tokens) {
    LLM_SHARED(float, scratch, 32);
    LLM_SHARED(float, scores, 128);
    LLM_DYNAMIC_SHARED(float, sums); /* (head_dim) */
    int head = blockIdx.x, kv_head = head / (a.n_heads / a.n_kv_heads);
    for (int64_t token = blockIdx.y; token < n_tokens; token += gridDim.y) {
        int sequence = a.sequence_of[token];
        if (sequence < 0) continue;
        const float *q = a.q + (token * a.n_heads + head) * a.head_dim;
        int end = a.positions[token] + 1, first = a.window && end > a.window ? end - a.window : 0;
        float largest = -INFINITY, total = 0.0f;
        for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x) sums[i] = 0.0f;
        for (int tile = first; tile < end; tile += blockDim.x) {
            int p = tile + threadIdx.x, n = end - tile < (int)blockDim.x ? end - tile : (int)blockDim.x;
            float score = -INFINITY;
            if (p < end) {
                int64_t row = llm__position_row(&a, sequence, kv_head, p) * a.head_dim;
                float dot = 0.0f;
                for (int i = 0; i < a.head_dim; i++) dot += q[i] * llm__cache_value(a.cache_type, a.keys, row + i);
                score = dot * a.scale;
            }
            float new_largest = fmaxf(largest, llm__block_max(score, scratch));
            float shrink = expf(largest - new_largest), share = expf(score - new_largest);
            scores[threadIdx.x] = share;
            total = total * shrink + llm__block_sum(share, scratch);
            largest = new_largest;
            for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x) {
                float sum = sums[i] * shrink;
                for (int k = 0; k < n; k++)
                    sum += scores[k] * llm__cache_value(a.cache_type, a.values,
                                                        llm__position_row(&a, sequence, kv_head, tile + k) * a.head_dim + i);
                sums[i] = sum;
            }
            __syncthreads(); /* before the next tile overwrites `scores` */
        }
        float *out = a.out + (token * a.n_heads + head) * a.head_dim;
        for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x) out[i] = sums[i] / total;
    }
}

/* ---- With matrix instructions -------------------------------------------------------------- */

#ifndef LLM_EMULATED
__device__ __forceinline__ float llm__exp2(float x) { /* 2^x to 22 bits; 0 for -infinity */
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
static inline float llm__exp2(float x) { return exp2f(x); }
#endif

/* Rows of one sequence and kv head. Row r is query head r % group of the sequence's token r / group
 * in this step; group: query heads per kv head. */
typedef struct llm__query_tile {
    int sequence;          /* in the batch; -1: no tile */
    int first_row, n_rows;
} llm__query_tile;

/* Find tile number `tile`, counted over all sequences with more than `above` and at most `most`
 * rows. A warp takes 32 sequences at a time: each lane counts the tiles of one sequence, and a
 * running sum over the lanes counts the tiles before it. */
__device__ static inline llm__query_tile llm__find_tile(const llm__attention_arguments *a, int tile, int tile_rows, int above,
                                                        int most) {
    int lane = threadIdx.x % 32, group = a->n_heads / a->n_kv_heads;
    for (int first = 0; first < a->n_sequences; first += 32) {
        int rows = first + lane < a->n_sequences ? a->seq_count[first + lane] * group : 0;
        if (rows <= above || rows > most) rows = 0;
        int tiles = (rows + tile_rows - 1) / tile_rows, before = tiles; /* inclusive at first */
        for (int other = 1; other < 32; other *= 2) {
            int sum = __shfl_up_sync(0xffffffffu, before, other);
            if (lane >= other) before += sum;
        }
        int all = __shfl_sync(0xffffffffu, before, 31);
        before -= tiles; /* exclusive from here on */
        unsigned found = __ballot_sync(0xffffffffu, tile >= before && tile < before + tiles);
        if (found) {
            int owner = __ffs(found) - 1;
            llm__query_tile t = {first + owner, (tile - __shfl_sync(0xffffffffu, before, owner)) * tile_rows, 0};
            t.n_rows = min(tile_rows, __shfl_sync(0xffffffffu, rows, owner) - t.first_row);
            return t;
        }
        tile -= all;
    }
    llm__query_tile none = {-1, 0, 0};
    return none;
}

/* The batch index of a row's token. The function after it gives the row's offset in q and in
 * out. */
__device__ static inline int llm__row_token(const llm__attention_arguments *a, int sequence, int row) {
    return a->seq_first[sequence] + row / (a->n_heads / a->n_kv_heads);
}
__device__ static inline int64_t llm__row_offset(const llm__attention_arguments *a, int sequence, int kv_head, int row) {
    int group = a->n_heads / a->n_kv_heads;
    return ((int64_t)llm__row_token(a, sequence, row) * a->n_heads + kv_head * group + row % group) * a->head_dim;
}
__device__ static inline int llm__window_start(const llm__attention_arguments *a, int position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

typedef struct llm__softmax {
    float m, l; /* m: largest score x log2(e) of a row; l: sum of 2^(score x log2(e) - m) */
} llm__softmax;

/* Merge a part's m and l into the total. *a and *b are the factors of llm__merged for the earlier
 * sums and for the part's sums. A part with m = -infinity (no position seen) changes nothing. */
__device__ static inline void llm__merge(llm__softmax *total, float m, float l, float *a, float *b) {
    float larger = fmaxf(total->m, m), base = larger == -INFINITY ? 0.0f : larger;
    *a = llm__exp2(total->m - base);
    *b = llm__exp2(m - base);
    total->m = larger;
    total->l = fmaf(total->l, *a, __fmul_rn(l, *b));
}
__device__ static inline float llm__merged(float before, float part, float a, float b) {
    return fmaf(before, a, __fmul_rn(part, b));
}

/* HD: head_dim, padded with zeros. A block has R groups of 16 rows and C warps per group, which all
 * compute the same scores and then HD / C dimensions of the result each. (C > 1 where one warp has
 * too few registers, or where other warps would have no rows.) */
template <int HD, int R, int C, int Stages> struct llm__attention_shape_of {
    enum {
        T = HD > 128 ? 32 : 64,   /* positions in a tile; T x HD / 8 is a multiple of `threads` */
        threads = R * C * 32, rows = R * 16, D = HD / C, /* D: dimensions of the result per warp */
        side_bytes = T * HD * 2,  /* a tile of keys, or of values */
        shared_bytes = Stages * 2 * side_bytes
    };
};

/* Byte offset in a shared-memory tile of a position's 8 dimensions from 8 * d8 on. The layout is
 * (HD / 32, position, 4 pieces of 16 bytes). The order of the pieces changes every two positions:
 * 8 lanes read 4 pieces of 2 positions (keys) or 1 of 8 (values) without a bank conflict. */
template <int T> __device__ __forceinline__ int llm__tile_offset(int position, int d8) {
    return ((d8 / 4 * T + position) * 4 + ((d8 % 4) ^ (position / 2 % 4))) * 16;
}

/* Start to copy a tile. rows[p]: index of the cache row of its position p; -1: zeros. HD / 8
 * threads copy a row. If HD / 8 divides Threads, a thread copies the same 8 dimensions in every
 * iteration. */
template <int HD, int T, int Threads>
__device__ __forceinline__ void llm__load_tile(const llm__attention_arguments &a, const int *rows, char *keys, char *values) {
    constexpr int pieces = HD / 8, step = Threads / pieces;
LLM_UNROLL
    for (int k = 0; k < T * pieces / Threads; k++) {
        int i = threadIdx.x + k * Threads;
        int position = Threads % pieces ? i / pieces : (int)threadIdx.x / pieces + k * step;
        int d8 = Threads % pieces ? i % pieces : (int)threadIdx.x % pieces, row = rows[position];
        bool valid = row >= 0 && d8 * 8 < a.head_dim;
        int64_t from = valid ? ((int64_t)row * a.head_dim + d8 * 8) * 2 : 0;
        llm__cp_async_16(keys + llm__tile_offset<T>(position, d8), a.keys + from, valid);
        llm__cp_async_16(values + llm__tile_offset<T>(position, d8), a.values + from, valid);
    }
}

/* The 8 dimensions of a row of q from 8 * d8 on, times `factor`, as f16. q NULL: zeros. */
__device__ __forceinline__ uint4 llm__load_query(const llm__attention_arguments &a, const float *q, int d8, float factor) {
    float x[8];
LLM_UNROLL
    for (int i = 0; i < 8; i++) x[i] = q && d8 * 8 < a.head_dim ? q[d8 * 8 + i] * factor : 0.0f;
    return make_uint4(llm__pair(x[0], x[1]), llm__pair(x[2], x[3]), llm__pair(x[4], x[5]), llm__pair(x[6], x[7]));
}

/* scores (16, T) = query times keys. Of each 8 positions, lane (g, t) gets 2t and 2t + 1: for row g
 * in scores[n][0] and [1], for row g + 8 in [2] and [3]. */
template <int HD, int T>
__device__ __forceinline__ void llm__multiply_keys(float scores[T / 8][4], const uint32_t query[HD / 32][2][4], const char *keys, int lane) {
LLM_UNROLL
    for (int n = 0; n < T / 8; n++) { /* 8 positions each */
LLM_UNROLL
        for (int j = 0; j < 4; j++) scores[n][j] = 0.0f;
LLM_UNROLL
        for (int k = 0; k < HD / 32; k++) {
            uint4 key = llm__load_16(keys + llm__tile_offset<T>(n * 8 + lane / 4, k * 4 + lane % 4));
            const uint32_t k0[2] = {key.x, key.y}, k1[2] = {key.z, key.w};
            llm__mma_m16n8k16_f16(scores[n], query[k][0], k0);
            llm__mma_m16n8k16_f16(scores[n], query[k][1], k1);
        }
    }
}

/* Set the scores of positions that a row does not see to -infinity. position: of rows g and g +
 * 8. */
template <int T>
__device__ __forceinline__ void llm__hide_unseen(float scores[T / 8][4], const llm__attention_arguments &a, const int position[2],
                                                 int tile_start, int lane) {
LLM_UNROLL
    for (int n = 0; n < T / 8; n++)
LLM_UNROLL
        for (int j = 0; j < 4; j++) {
            int p = tile_start + n * 8 + lane % 4 * 2 + j % 2, own = position[j / 2];
            if (p > own || p < llm__window_start(&a, own)) scores[n][j] = -INFINITY;
        }
}

/* Turn scores into weights 2^(score x factor - m), and update m and l. The caller multiplies the
 * sums so far by `shrink`. Four lanes share a row; in l each sums only its own weights. */
template <int T>
__device__ __forceinline__ void llm__weigh(float scores[T / 8][4], const float factor[2], llm__softmax now[2], float shrink[2]) {
    float largest[2] = {-INFINITY, -INFINITY}, base[2];
LLM_UNROLL
    for (int n = 0; n < T / 8; n++)
LLM_UNROLL
        for (int j = 0; j < 4; j++) {
            scores[n][j] = __fmul_rn(scores[n][j], factor[j / 2]);
            largest[j / 2] = fmaxf(largest[j / 2], scores[n][j]);
        }
LLM_UNROLL
    for (int h = 0; h < 2; h++) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
        float m = fmaxf(now[h].m, largest[h]);
        base[h] = m == -INFINITY ? 0.0f : m; /* no position seen yet: all weights are 2^-inf = 0 */
        shrink[h] = llm__exp2(now[h].m - base[h]);
        now[h].m = m;
        now[h].l = __fmul_rn(now[h].l, shrink[h]);
    }
LLM_UNROLL
    for (int n = 0; n < T / 8; n++)
LLM_UNROLL
        for (int j = 0; j < 4; j++) {
            scores[n][j] = llm__exp2(scores[n][j] - base[j / 2]);
            now[j / 2].l = __fadd_rn(now[j / 2].l, scores[n][j]);
        }
}

/* sums (16, D) += weights (16, T) times values (T, D), of the D dimensions from first_d on. */
template <int T, int D>
__device__ __forceinline__ void llm__multiply_values(float sums[D / 8][4], const float weights[T / 8][4], const char *values, int first_d,
                                                     int lane) {
LLM_UNROLL
    for (int k = 0; k < T / 16; k++) { /* 16 positions each */
        const float *low = weights[2 * k], *high = weights[2 * k + 1];
        const uint32_t rounded[4] = {llm__pair(low[0], low[1]), llm__pair(low[2], low[3]), llm__pair(high[0], high[1]),
                                     llm__pair(high[2], high[3])};
LLM_UNROLL
        for (int n = 0; n < D / 16; n++) { /* 16 dimensions each: four 8 x 8 matrices */
            uint32_t v[4];
            llm__ldmatrix_x4_trans(v, values + llm__tile_offset<T>(k * 16 + lane % 16, first_d / 8 + 2 * n + lane / 16));
            llm__mma_m16n8k16_f16(sums[2 * n], rounded, v);
            llm__mma_m16n8k16_f16(sums[2 * n + 1], rounded, v + 2);
        }
    }
}

/* blockIdx.x: tile of rows; y: kv head; z: part, if split. Few: chapter [6].
 * Bytes: q; for each tile of rows, the keys and values it sees; `out`, written once per part and
 * read again for the next part (if split: part_sums, written once). */
template <int HD, int R, int C, int Stages, bool Few>
__global__ static void __launch_bounds__((llm__attention_shape_of<HD, R, C, Stages>::threads))
    llm__attention_kernel(llm__attention_arguments a) {
    llm__take_over();
    typedef llm__attention_shape_of<HD, R, C, Stages> shape;
    constexpr int T = shape::T, D = shape::D;
    LLM_DYNAMIC_SHARED(char, tiles); /* (Stages, 2, side_bytes): keys, values */
    LLM_SHARED(int, table, Stages * T); /* (Stages, T): cache row of each position; -1: none */
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
    /* The last rows of a prompt see the most positions, so their tiles start first. */
    llm__query_tile tile = llm__find_tile(&a, gridDim.x - 1 - blockIdx.x, shape::rows, Few ? 0 : a.few_rows, Few ? a.few_rows : INT32_MAX);
    if (tile.sequence < 0) return;

    /* The block's rows see the positions first_seen to end - 1. The first tile is at `start`. */
    int first_position = a.positions[llm__row_token(&a, tile.sequence, tile.first_row)];
    int last_position = a.positions[llm__row_token(&a, tile.sequence, tile.first_row + tile.n_rows - 1)];
    int first_seen = llm__window_start(&a, first_position), start = first_seen / T * T, end = last_position + 1;
    bool split = Few && a.part_sums;
    int part = start / LLM__PART + (split ? (int)blockIdx.z : 0);
    if (split) {
        start = max(start, part * LLM__PART);
        end = min(end, (part + 1) * LLM__PART);
        if (start >= end) return; /* this sequence has fewer than n_parts parts */
    }

    /* Start to fill the ring of tiles, then read q while they arrive. Tile i is at start + i T. */
    int n_tiles = (end - start + T - 1) / T;
    for (int i = threadIdx.x; i < (Stages - 1) * T; i += blockDim.x) {
        int p = start + i;
        table[i] = p >= first_seen && p < end ? (int)llm__position_row(&a, tile.sequence, kv_head, p) : -1;
    }
    __syncthreads();
    for (int i = 0; i < Stages - 1; i++) {
        char *keys = tiles + i * 2 * shape::side_bytes;
        if (i < n_tiles) llm__load_tile<HD, T, shape::threads>(a, table + i * T, keys, keys + shape::side_bytes);
        llm__cp_async_commit();
    }

    /* Lane (g, t) reads dimensions 8t to 8t + 7 of each 32, of rows g (h = 0) and g + 8 (h = 1), as
     * the matmul of chapter [3] reads x. */
    int row[2], position[2];
    float factor[2]; /* for the scores: scale x log2(e) x the power of two that q is divided by */
    uint32_t query[HD / 32][2][4]; /* matrix A of two instructions for each 32 dimensions */
LLM_UNROLL
    for (int h = 0; h < 2; h++) {
        int in_tile = warp / C * 16 + h * 8 + lane / 4;
        bool valid = in_tile < tile.n_rows;
        row[h] = tile.first_row + in_tile;
        position[h] = valid ? a.positions[llm__row_token(&a, tile.sequence, row[h])] : -1;
        const float *q = valid ? a.q + llm__row_offset(&a, tile.sequence, kv_head, row[h]) : NULL;
        float largest = 0.0f;
        for (int i = 0; q && i < a.head_dim; i += 32)
            for (int j = i + lane % 4 * 8; j < min(i + lane % 4 * 8 + 8, a.head_dim); j++) largest = fmaxf(largest, fabsf(q[j]));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        float power = llm__power_for(largest);
        factor[h] = a.scale * 1.44269504f * power;
LLM_UNROLL
        for (int i = 0; i < HD / 32; i++) {
            uint4 x = llm__load_query(a, q, i * 4 + lane % 4, 1.0f / power);
            query[i][0][h] = x.x, query[i][0][2 + h] = x.y, query[i][1][h] = x.z, query[i][1][2 + h] = x.w;
        }
    }

    float sums[D / 8][4] = {};
    llm__softmax now[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}}, total[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
    int first_d = warp % C * D; /* this warp's first dimension of the result */
    int lowest = __shfl_sync(0xffffffffu, position[0], 0); /* lowest of the warp; -1: no rows */
    int window_start = llm__window_start(&a, last_position);
    for (int i = 0; i < n_tiles; i++) {
        int next = i + Stages - 1, slot = next % Stages, tile_start = start + i * T;
        if (threadIdx.x < T) {
            int p = start + next * T + (int)threadIdx.x;
            table[slot * T + threadIdx.x] = p >= first_seen && p < end ? (int)llm__position_row(&a, tile.sequence, kv_head, p) : -1;
        }
        llm__cp_async_wait<Stages - 2>();
        __syncthreads(); /* tile i and the table are complete; tile i - 1 is no longer read */
        char *keys = tiles + slot * 2 * shape::side_bytes;
        if (next < n_tiles) llm__load_tile<HD, T, shape::threads>(a, table + slot * T, keys, keys + shape::side_bytes);
        llm__cp_async_commit();
        keys = tiles + i % Stages * 2 * shape::side_bytes;
        const char *values = keys + shape::side_bytes;

        float scores[T / 8][4], shrink[2];
        llm__multiply_keys<HD, T>(scores, query, keys, lane);
        if (tile_start + T - 1 > lowest || tile_start < window_start) llm__hide_unseen<T>(scores, a, position, tile_start, lane);
        llm__weigh<T>(scores, factor, now, shrink);
LLM_UNROLL
        for (int n = 0; n < D / 8; n++)
LLM_UNROLL
            for (int j = 0; j < 4; j++) sums[n][j] = __fmul_rn(sums[n][j], shrink[j / 2]);
        llm__multiply_values<T, D>(sums, scores, values, first_d, lane);
        bool last = i + 1 == n_tiles;
        if (!last && (tile_start + T) % LLM__PART) continue;

        /* The end of a part: store it (split) or merge it into `out`. */
LLM_UNROLL
        for (int h = 0; h < 2; h++) {
            now[h].l += __shfl_xor_sync(0xffffffffu, now[h].l, 1);
            now[h].l += __shfl_xor_sync(0xffffffffu, now[h].l, 2);
            bool first = total[h].m == -INFINITY; /* `out` is not written yet */
            float before, share;
            llm__merge(&total[h], now[h].m, now[h].l, &before, &share);
            float divide = last && !split ? 1.0f / total[h].l : 1.0f;
            if (position[h] >= 0) {
                int64_t part_row = (((int64_t)kv_head * a.n_sequences + tile.sequence) * a.max_rows + row[h]) * a.n_parts + blockIdx.z;
                float *out = split ? a.part_sums + part_row * a.head_dim
                                   : a.out + llm__row_offset(&a, tile.sequence, kv_head, row[h]);
                if (split && lane % 4 == 0 && warp % C == 0) a.part_stats[part_row] = make_float2(now[h].m, now[h].l);
                /* aligned, because head_dim is a multiple of 8 */
                float2 *place = (float2 *)(void *)(out + first_d + lane % 4 * 2);
LLM_UNROLL
                for (int n = 0; n < D / 8; n++) {
                    if (first_d + n * 8 >= a.head_dim) break;
                    float2 sum = make_float2(sums[n][2 * h], sums[n][2 * h + 1]);
                    if (!split) {
                        float2 old = first ? make_float2(0.0f, 0.0f) : place[n * 4];
                        sum.x = __fmul_rn(llm__merged(old.x, sum.x, before, share), divide);
                        sum.y = __fmul_rn(llm__merged(old.y, sum.y, before, share), divide);
                    }
                    place[n * 4] = sum;
                }
            }
            now[h].m = -INFINITY;
            now[h].l = 0.0f;
        }
LLM_UNROLL
        for (int n = 0; n < D / 8; n++)
LLM_UNROLL
            for (int j = 0; j < 4; j++) sums[n][j] = 0.0f;
    }
}

template <int HD, int R, int C, int Stages, bool Few>
static void llm__launch_attention(llm__cuda *cuda, const llm__attention_arguments *a, int64_t tiles, int parts) {
    typedef llm__attention_shape_of<HD, R, C, Stages> shape;
    auto attention_kernel = llm__attention_kernel<HD, R, C, Stages, Few>;
    llm__allow_shared(cuda, attention_kernel, shape::shared_bytes);
    LLM_LAUNCH_EARLY(cuda, attention_kernel, dim3((unsigned)tiles, (unsigned)a->n_kv_heads, (unsigned)parts),
                     dim3((unsigned)shape::threads), (size_t)shape::shared_bytes, *a);
    llm__cuda_launched(cuda, "attention");
}

/* An upper bound of the number of tiles: each sequence has at most one tile that is not full. */
static int64_t llm__most_tiles(const llm__cuda *cuda, const llm__attention_arguments *a, int rows) {
    int group = a->n_heads / a->n_kv_heads;
    return (int64_t)cuda->batch.n_tokens * group / rows + cuda->batch.n_sequences;
}

static void llm__cuda_many_attention(llm__cuda *cuda, const llm__attention_arguments *a) {
    int64_t tiles = llm__most_tiles(cuda, a, a->head_dim > 128 ? 32 : 64);
    if (a->head_dim <= 32) llm__launch_attention<32, 4, 1, 2, false>(cuda, a, tiles, 1);
    else if (a->head_dim <= 64) llm__launch_attention<64, 4, 1, 2, false>(cuda, a, tiles, 1);
    else if (a->head_dim <= 96) llm__launch_attention<96, 4, 1, 2, false>(cuda, a, tiles, 1);
    else if (a->head_dim <= 128) llm__launch_attention<128, 4, 1, 2, false>(cuda, a, tiles, 1);
    else llm__launch_attention<256, 2, 2, 2, false>(cuda, a, tiles, 1);
}

/* =====================================================================================
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
 * For 4 rows that adds 1/30 to the bytes. Parts begin at fixed positions, so the result has the
 * same bits with and without the split.
 * ================================================================================== */

/* blockIdx.x: row; y: kv head; z: sequence. Bytes: all parts read, `out` written. */
__global__ static void llm__merge_kernel(llm__attention_arguments a) {
    llm__take_over();
    int row = blockIdx.x, kv_head = blockIdx.y;
    for (int sequence = blockIdx.z; sequence < a.n_sequences; sequence += gridDim.z) {
        int rows = a.seq_count[sequence] * (a.n_heads / a.n_kv_heads);
        if (row >= rows || rows > a.few_rows) continue;
        int last = a.positions[llm__row_token(&a, sequence, row)];
        /* Parts are numbered from the first one of the 16-row tile that contains this row. */
        int first = llm__window_start(&a, a.positions[llm__row_token(&a, sequence, row / 16 * 16)]) / LLM__PART;
        int64_t part_row = (((int64_t)kv_head * a.n_sequences + sequence) * a.max_rows + row) * a.n_parts;
        for (int d = threadIdx.x; d < a.head_dim; d += blockDim.x) {
            llm__softmax total = {-INFINITY, 0.0f};
            float sum = 0.0f;
            for (int part = first; part * LLM__PART <= last; part++) {
                float2 stats = a.part_stats[part_row + part - first];
                float before, share;
                llm__merge(&total, stats.x, stats.y, &before, &share);
                sum = llm__merged(sum, a.part_sums[(part_row + part - first) * a.head_dim + d], before, share);
            }
            a.out[llm__row_offset(&a, sequence, kv_head, row) + d] = __fmul_rn(sum, 1.0f / total.l);
        }
    }
}

/* Allocate memory for the parts of the largest decode step, up to 128 MB. Larger steps are not
 * split. */
static bool llm__attention_reserve(llm__cuda *cuda, llm_error *err) {
    const llm__largest *l = &cuda->largest;
    int64_t parts = llm__ceil_div(l->max_context, LLM__PART) + 1;
    int64_t rows = (int64_t)l->max_sequences * l->n_heads; /* one token per sequence, all heads */
    if (rows < LLM__FEW_ROWS * l->n_heads) rows = LLM__FEW_ROWS * l->n_heads;
    double wanted = (double)rows * parts * (l->head_dim + 2) * sizeof(float), most = 128 << 20;
    return llm__cuda_scratch(cuda, &cuda->parts, &cuda->parts_bytes, (size_t)(wanted < most ? wanted : most),
                          "parts of attention (fewer sequences or a shorter context need less)", err);
}

/* Split the positions if they form several parts and the scratch memory suffices. */
static void llm__split(llm__cuda *cuda, llm__attention_arguments *a) {
    const llm__device_batch *b = &cuda->batch;
    int64_t rows = (int64_t)b->max_count * (a->n_heads / a->n_kv_heads);
    int64_t seen = a->window && a->window + b->max_count < b->max_context ? a->window + b->max_count : b->max_context;
    /* one part more for a window, since it may begin inside a part */
    int64_t parts = llm__ceil_div(seen, LLM__PART) + (seen < b->max_context);
    a->max_rows = rows < LLM__FEW_ROWS ? (int)rows : LLM__FEW_ROWS;
    a->n_parts = (int)parts;
    double all = (double)a->n_kv_heads * b->n_sequences * a->max_rows * parts;
    if (!cuda->options.split_attention || parts < 2 || parts > 65535 ||
        all * (a->head_dim + 2) * sizeof(float) > (double)cuda->parts_bytes)
        return;
    a->part_stats = (float2 *)(void *)cuda->parts;
    a->part_sums = (float *)(void *)(cuda->parts + (size_t)all * sizeof(float2));
}

static void llm__cuda_few_attention(llm__cuda *cuda, llm__attention_arguments *a) {
    llm__split(cuda, a);
    int64_t tiles = (int64_t)cuda->batch.n_sequences * llm__ceil_div(a->max_rows, 16), parts = a->part_sums ? a->n_parts : 1;
    if (a->head_dim <= 32) llm__launch_attention<32, 1, 2, 3, true>(cuda, a, tiles, (int)parts);
    else if (a->head_dim <= 64) llm__launch_attention<64, 1, 4, 3, true>(cuda, a, tiles, (int)parts);
    else if (a->head_dim <= 96) llm__launch_attention<96, 1, 2, 3, true>(cuda, a, tiles, (int)parts);
    else if (a->head_dim <= 128) llm__launch_attention<128, 1, 4, 3, true>(cuda, a, tiles, (int)parts);
    else llm__launch_attention<256, 1, 4, 3, true>(cuda, a, tiles, (int)parts);
    if (!a->part_sums) return;
    dim3 grid((unsigned)a->max_rows, (unsigned)a->n_kv_heads, llm__grid(cuda->batch.n_sequences, 65535));
    LLM_LAUNCH_EARLY(cuda, llm__merge_kernel, grid, dim3(a->head_dim < 128 ? 64 : 128), 0, *a);
    llm__cuda_launched(cuda, "attention");
}

static llm__attention_arguments llm__attention_of(const llm__cuda *cuda, const llm_attention_shape *shape, const float *q,
                                                  const llm_cache *cache, int layer, float *out) {
    llm__attention_arguments a;
    memset(&a, 0, sizeof a);
    a.positions = cuda->batch.positions;
    a.sequence_of = cuda->batch.sequence_of;
    a.block_tables = cuda->batch.block_tables;
    a.counts = cuda->batch.counts;
    a.seq_first = cuda->batch.seq_first;
    a.seq_count = cuda->batch.seq_count;
    a.n_tokens = cuda->batch.n_tokens;
    a.n_sequences = cuda->batch.n_sequences;
    a.n_heads = shape->n_heads;
    a.n_kv_heads = shape->n_kv_heads;
    a.head_dim = shape->head_dim;
    a.block_size = cache->block_size;
    a.window = shape->window;
    a.scale = shape->scale;
    a.cache_type = cache->type;
    a.keys = (const char *)cache->keys + (size_t)layer * cache->layer_bytes;
    a.values = (const char *)cache->values + (size_t)layer * cache->layer_bytes;
    a.q = q;
    a.out = out;
    a.few_rows = LLM__FEW_ROWS;
    return a;
}

static void llm__cuda_attention(llm__cuda *cuda, const llm_attention_shape *shape, const float *q,
                                const llm_cache *cache, int layer, float *out) {
    const llm__device_batch *b = &cuda->batch;
    llm__attention_arguments a = llm__attention_of(cuda, shape, q, cache, layer, out);
    int64_t cache_rows = cache->n_blocks * cache->n_kv_heads * cache->block_size;
    bool plain = cuda->options.plain || shape->naive || cache->type != LLM_F16 || a.head_dim % 8 ||
                 a.head_dim > LLM__MMA_HEAD_DIM || cache_rows > INT32_MAX;
    int64_t rows = (int64_t)b->max_count * (a.n_heads / a.n_kv_heads); /* most in a sequence */
    if (plain) {
        dim3 grid(a.n_heads, llm__grid(a.n_tokens, 65535));
        LLM_LAUNCH(llm__plain_attention_kernel, grid, dim3(128), (size_t)a.head_dim * sizeof(float), cuda->stream, a, a.n_tokens);
        llm__cuda_launched(cuda, "attention");
        return;
    }
    bool few = rows <= LLM__FEW_ROWS || b->n_sequences > 1;
    /* max_count may be rounded up, so the only sequence may in fact have few rows. The kernel for
     * many rows must compute it too. */
    if (!few) a.few_rows = 0;
    if (rows > LLM__FEW_ROWS) llm__cuda_many_attention(cuda, &a);
    if (few) llm__cuda_few_attention(cuda, &a);
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
 * One block draws from one row. The limit is bytes: without filters it reads the row about five
 * times, with all of them about twelve times, mostly from the L2 cache.
 * ================================================================================== */

enum { LLM__DRAW_THREADS = 512, LLM__BINS = 2048 };

typedef struct llm__tally {
    unsigned long long mass, count; /* sum of likelihoods; number of tokens */
} llm__tally;

/* A mass is kept as two 32-bit words. An atomic addition of 32 bits in shared memory is one
 * instruction; one of 64 bits is a loop in which threads with the same bin wait for each other. */
typedef struct llm__histogram {
    unsigned low[LLM__BINS], high[LLM__BINS]; /* halves of the mass */
    unsigned count[LLM__BINS];                /* tokens */
} llm__histogram;

__device__ static inline unsigned long long llm__bin_mass(const llm__histogram *h, int bin) {
    return (unsigned long long)h->high[bin] << 32 | h->low[bin];
}

__device__ static inline void llm__bin_add(llm__histogram *h, int bin, unsigned long long mass) {
    unsigned low = (unsigned)mass, before = atomicAdd(&h->low[bin], low), high = (unsigned)(mass >> 32) + (before + low < before);
    if (high) atomicAdd(&h->high[bin], high);
    atomicAdd(&h->count[bin], 1u);
}

typedef struct llm__draw_shared {
    llm__histogram first, finer; /* by the top 11 key bits; by lower bits, within one bin */
    llm__tally warps[32];        /* scratch, one per warp */
    llm__tally found;            /* sum over the bins before the one that llm__find_bin found */
    float values[32];            /* scratch, one per warp */
    int ids[32];                 /* scratch, one per warp */
    int bin, id;                 /* results of llm__find_bin and llm__find_id */
} llm__draw_shared;

/* Parameters of llm__device_likelihood, which equals llm__likelihood in llm.h bit for bit. */
typedef struct llm__odds {
    float most, temperature; /* largest logit; divisor of the logits */
    int bits;                /* 2^bits is the likelihood of the largest logit */
} llm__odds;

__device__ static inline unsigned long long llm__device_likelihood(const llm__odds *odds, float logit) {
    const unsigned long long terms[] = {4294967296, 2977044472, 1031764991, 238388332, 41309550, 5726720,
                                        661577,     65510,      5676,       437,       30};
    float x = (odds->most - logit) / odds->temperature;
    if (!(x < 44)) return 0;
    unsigned long long y = (unsigned long long)((double)x * (1.4426950408889634 * 16777216));
    unsigned long long f = (y & 0xffffff) << 8, sum = terms[10];
    for (int i = 9; i >= 0; i--) sum = terms[i] - (f * sum >> 32);
    return sum << (odds->bits - 32) >> (y >> 24);
}

/* A larger logit has a smaller key; equal logits (0 and -0 too) have equal keys. */
__device__ static inline uint32_t llm__sort_key(float logit) {
    uint32_t bits = __float_as_uint(logit == 0 ? 0.0f : logit);
    return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}

__device__ static inline float llm__logit_of_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key : ~key & 0x7fffffffu);
}

/* A NaN is never drawn. */
__device__ static inline float llm__clean(float logit) { return logit == logit ? logit : -INFINITY; }

__device__ static inline unsigned long long llm__warp_sum_whole(unsigned long long x) {
    for (int other = 16; other; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

__device__ static inline unsigned long long llm__block_sum_whole(unsigned long long x, llm__tally *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = llm__warp_sum_whole(x);
    __syncthreads();
    if (lane == 0) shared[warp].mass = x;
    __syncthreads();
    return llm__warp_sum_whole(lane < n_warps ? shared[lane].mass : 0);
}

/* Call visit(i, row[i]) for i = first, first + step, ..., in order. A thread starts several reads
 * at once: one block per row has too few threads to hide the latency of memory otherwise. */
template <class Visit> __device__ __forceinline__ void llm__each_logit(const float *row, int n, unsigned first, unsigned step, Visit visit) {
    enum { AT_ONCE = 8 };
    for (unsigned start = first; start < (unsigned)n; start += AT_ONCE * step) {
        float x[AT_ONCE];
LLM_UNROLL
        for (unsigned k = 0; k < AT_ONCE; k++) x[k] = start + k * step < (unsigned)n ? row[start + k * step] : 0.0f;
LLM_UNROLL
        for (unsigned k = 0; k < AT_ONCE; k++)
            if (start + k * step < (unsigned)n) visit((int)(start + k * step), x[k]);
    }
}

/* Return to all threads the largest logit of a row and, in *id, the first token that has it. */
__device__ static inline float llm__block_best(const float *row, int n, llm__draw_shared *s, int *id) {
    float best = -INFINITY;
    int at = n;
    llm__each_logit(row, n, threadIdx.x, blockDim.x, [&](int i, float logit) {
        float x = llm__clean(logit);
        if (at == n || x > best) {
            best = x;
            at = i;
        }
    });
    __syncthreads();
    for (int round = 0; round < 2; round++) { /* 0: within each warp; 1: over the warps' results */
        for (int other = 16; other; other /= 2) {
            float x = __shfl_xor_sync(0xffffffffu, best, other);
            int i = __shfl_xor_sync(0xffffffffu, at, other);
            if (x > best || (x == best && i < at)) {
                best = x;
                at = i;
            }
        }
        if (round) break;
        if (threadIdx.x % 32 == 0) {
            s->values[threadIdx.x / 32] = best;
            s->ids[threadIdx.x / 32] = at;
        }
        __syncthreads();
        bool there = threadIdx.x % 32 < blockDim.x / 32;
        best = there ? s->values[threadIdx.x % 32] : -INFINITY;
        at = there ? s->ids[threadIdx.x % 32] : n;
    }
    *id = at;
    return best;
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
__device__ static inline int llm__find_bin(llm__draw_shared *s, const llm__histogram *h, unsigned long long t, bool by_count) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = LLM__BINS / (int)blockDim.x, first = (int)threadIdx.x * own;
    llm__tally sum = {0, 0};
    for (int i = first; i < first + own; i++) {
        sum.mass += llm__bin_mass(h, i);
        sum.count += h->count[i];
    }
    llm__tally before = sum; /* first inclusive */
    for (int step = 1; step < 32; step *= 2) {
        unsigned long long mass = __shfl_up_sync(0xffffffffu, before.mass, step);
        unsigned long long count = __shfl_up_sync(0xffffffffu, before.count, step);
        if (lane >= step) {
            before.mass += mass;
            before.count += count;
        }
    }
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
        unsigned long long from = by_count ? before.count : before.mass, width = by_count ? h->count[i] : llm__bin_mass(h, i);
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
 * bits. Tokens of likelihood 0 are skipped: they are last in the list and add no mass. */
__device__ static inline void llm__histogram_fill(llm__histogram *h, const float *row, int n, const llm__odds *odds,
                                                  uint32_t key, int shift, int width) {
    llm__histogram_clear(h);
    llm__each_logit(row, n, threadIdx.x, blockDim.x, [&](int, float x) {
        float logit = llm__clean(x);
        uint32_t k = llm__sort_key(logit);
        if (shift + width < 32 && k >> (shift + width) != key >> (shift + width)) return;
        unsigned long long mass = llm__device_likelihood(odds, logit);
        if (mass == 0) return;
        int bin = (int)(k >> shift & ((1u << width) - 1));
        llm__bin_add(h, bin, mass);
    });
    __syncthreads();
}

/* Find the logit at which the running sum over the sorted list passes t. *key is its key; *before
 * sums the tokens with larger logits. False: the sum never passes t. s->first must be filled. */
__device__ static inline bool llm__find(llm__draw_shared *s, const float *row, int n, const llm__odds *odds, unsigned long long t,
                                        bool by_count, uint32_t *key, llm__tally *before) {
    int bin = llm__find_bin(s, &s->first, t, by_count);
    if (bin == LLM__BINS) return false;
    *before = s->found;
    *key = (uint32_t)bin << 21;
    for (int shift = 10; shift >= 0; shift -= 10) { /* 11 bits, then 10 */
        llm__histogram_fill(&s->finer, row, n, odds, *key, shift, shift ? 11 : 10);
        bin = llm__find_bin(s, &s->finer, t - (by_count ? before->count : before->mass), by_count);
        before->mass += s->found.mass;
        before->count += s->found.count;
        *key |= (uint32_t)bin << shift;
    }
    __syncthreads(); /* s->found may change only after all threads have read it */
    return true;
}

/* A token's term in the sum of llm__find_id: its likelihood or, if `equals`, 1 if its key is
 * `key`. */
__device__ static inline unsigned long long llm__share(const llm__odds *odds, float logit, bool equals, uint32_t key) {
    logit = llm__clean(logit);
    return equals ? llm__sort_key(logit) == key : llm__device_likelihood(odds, logit);
}

/* The token at which the running sum of llm__share, in order of ids, passes t. Each warp sums one
 * range of ids. The warp in whose range the sum passes t scans it again, 32 ids at a time. */
__device__ static inline int llm__find_id(llm__draw_shared *s, const float *row, int n, const llm__odds *odds,
                                          unsigned long long t, bool equals, uint32_t key) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    int stretch = (n + n_warps - 1) / n_warps, first = warp * stretch, end = first + stretch < n ? first + stretch : n;
    unsigned long long sum = 0;
    llm__each_logit(row, end, (unsigned)(first + lane), 32, [&](int, float x) { sum += llm__share(odds, x, equals, key); });
    sum = llm__warp_sum_whole(sum);
    __syncthreads();
    if (lane == 0) s->warps[warp].mass = sum;
    __syncthreads();
    unsigned long long before = 0;
    for (int i = 0; i < warp; i++) before += s->warps[i].mass;
    if (before <= t && t - before < sum) { /* true for one warp */
        for (int i = first; i < end; i += 32) {
            unsigned long long own = i + lane < end ? llm__share(odds, row[i + lane], equals, key) : 0, upto = own;
            for (int step = 1; step < 32; step *= 2) {
                unsigned long long x = __shfl_up_sync(0xffffffffu, upto, step);
                if (lane >= step) upto += x;
            }
            if (before + upto - own <= t && t < before + upto) s->id = i + lane;
            before += __shfl_sync(0xffffffffu, upto, 31);
            if (t < before) break;
        }
    }
    __syncthreads();
    return s->id;
}

/* The mass of the tokens that pass all filters. s->first must be filled. */
__device__ static inline unsigned long long llm__filtered_mass(llm__draw_shared *s, const float *row, int n, const llm__odds *odds,
                                                               const llm_sampling *p) {
    uint32_t key;
    llm__tally before;
    unsigned long long total = 0, mass, top = 1ull << odds->bits;
    for (int i = threadIdx.x; i < LLM__BINS; i += blockDim.x) total += llm__bin_mass(&s->first, i);
    total = llm__block_sum_whole(total, s->warps);
    if (p->top_k && p->top_k < n &&
        llm__find(s, row, n, odds, (unsigned long long)p->top_k - 1, true, &key, &before))
        total = before.mass + (p->top_k - before.count) * llm__device_likelihood(odds, llm__logit_of_key(key));
    mass = total;
    if (p->top_p < 1) {
        unsigned long long enough = (unsigned long long)((double)p->top_p * (double)total), kept = top;
        if (enough > 0 && llm__find(s, row, n, odds, enough - 1, false, &key, &before)) {
            unsigned long long one = llm__device_likelihood(odds, llm__logit_of_key(key));
            kept = before.mass + ((enough - 1 - before.mass) / one + 1) * one;
        }
        if (kept < mass) mass = kept;
    }
    if (p->min_p > 0) {
        unsigned long long least = (unsigned long long)((double)p->min_p * (double)top), kept = 0;
        llm__each_logit(row, n, threadIdx.x, blockDim.x, [&](int, float x) {
            unsigned long long own = llm__device_likelihood(odds, llm__clean(x));
            if (own >= least) kept += own;
        });
        kept = llm__block_sum_whole(kept, s->warps);
        if (kept < mass) mass = kept;
    }
    return mass;
}

/* Draw one token from a row whose logits include the penalty. */
__device__ static inline int llm__draw_one(llm__draw_shared *s, const float *row, int n, int bits, const llm__device_draw *draw) {
    const llm_sampling *p = &draw->sampling;
    int best;
    llm__odds odds = {llm__block_best(row, n, s, &best), p->temperature, bits};
    if (p->temperature == 0 || !(fabsf(odds.most) <= FLT_MAX)) return best;
    if (!p->top_k && !(p->top_p < 1) && !(p->min_p > 0)) {
        unsigned long long mass = 0;
        llm__each_logit(row, n, threadIdx.x, blockDim.x, [&](int, float x) { mass += llm__device_likelihood(&odds, llm__clean(x)); });
        mass = llm__block_sum_whole(mass, s->warps);
        return llm__find_id(s, row, n, &odds, __umul64hi(draw->random, mass), false, 0);
    }
    uint32_t key = 0;
    llm__tally before = {0, 0};
    llm__histogram_fill(&s->first, row, n, &odds, 0, 21, 11);
    unsigned long long point = __umul64hi(draw->random, llm__filtered_mass(s, row, n, &odds, p));
    llm__find(s, row, n, &odds, point, false, &key, &before);
    unsigned long long one = llm__device_likelihood(&odds, llm__logit_of_key(key));
    return llm__find_id(s, row, n, &odds, (point - before.mass) / one, true, key);
}

/* Block b makes the draws starts[b] to starts[b + 1] - 1, from row rows[b]. The penalty is written
 * into the row and undone after the draw; `saved` (as long as `recent`) keeps the original logits.
 * All threads save their logits before any thread writes, so a token that occurs twice is penalised
 * once. */
__global__ static void __launch_bounds__(LLM__DRAW_THREADS, 1)
    llm__sample_kernel(float *logits, int n, int bits, const llm__device_draw *draws, const int32_t *starts, const int32_t *rows,
                       const int32_t *recent, float *saved, int32_t *ids, float *logprobs) {
    LLM_DYNAMIC_SHARED(llm__draw_shared, s);
    float *row = logits + (int64_t)rows[blockIdx.x] * n;
    int best;
    float most = llm__block_best(row, n, s, &best), sum = 0.0f;
    bool finite = fabsf(most) <= FLT_MAX;
    llm__each_logit(row, n, threadIdx.x, blockDim.x, [&](int, float x) {
        if (x > most - 100) sum += expf(x - most);
    });
    float total = finite ? most + logf(llm__block_sum(sum, s->values)) : most;
    for (int d = starts[blockIdx.x]; d < starts[blockIdx.x + 1]; d++) {
        const llm__device_draw *draw = &draws[d];
        float penalty = draw->sampling.repetition_penalty;
        const int32_t *last = recent + draw->first_recent;
        float *kept = saved + draw->first_recent;
        for (int i = threadIdx.x; i < draw->n_recent; i += blockDim.x) kept[i] = row[last[i]];
        __syncthreads();
        for (int i = threadIdx.x; i < draw->n_recent; i += blockDim.x)
            row[last[i]] = kept[i] > 0 ? kept[i] / penalty : kept[i] * penalty;
        __syncthreads();
        int id = llm__draw_one(s, row, n, bits, draw);
        __syncthreads();
        for (int i = threadIdx.x; i < draw->n_recent; i += blockDim.x) row[last[i]] = kept[i];
        __syncthreads();
        if (threadIdx.x == 0) {
            ids[d] = id;
            logprobs[d] = total > -INFINITY ? row[id] - total : -INFINITY;
        }
    }
}

/* The same as llm__likelihood_bits in llm.h. */
static int llm__odds_bits(int n) {
    int bits = 44;
    while ((int64_t)n >> (63 - bits)) bits--;
    return bits;
}

static bool llm__cuda_sample(void *context, float *logits, int vocab_size, const llm_draw *draws, int n, int32_t *ids,
                             float *logprobs, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    int64_t n_recent = 0;
    int n_rows = 0;
    llm__cuda_clear(err);
    for (int i = 0; i < n; i++) n_recent += draws[i].n_recent;
    /* The layout of the buffer: draws (n), starts (n + 1), rows (n), ids (n), logprobs (n), recent
     * tokens (n_recent); on the device also saved logits (n_recent). */
    size_t count = (size_t)n, numbers = (4 * count + 1) * 4 + (size_t)n_recent * 4;
    size_t bytes = count * sizeof(llm__device_draw) + numbers + (size_t)n_recent * sizeof(float);
    if (!llm__cuda_room(cuda, &cuda->draw_room, bytes, LLM__DRAWS, err)) return false;
    char *host = cuda->draw_room.host, *device = cuda->draw_room.device;
    llm__device_draw *to = (llm__device_draw *)(void *)host;
    int32_t *starts = (int32_t *)(void *)(to + n), *rows = starts + n + 1, *out = rows + n, *recent = out + 2 * n, *next = recent;
    for (int i = 0; i < n; i++) {
        if (i == 0 || draws[i].row != draws[i - 1].row) {
            starts[n_rows] = i;
            rows[n_rows++] = draws[i].row;
        }
        to[i].sampling = draws[i].sampling;
        to[i].random = draws[i].random;
        to[i].first_recent = (int)(next - recent);
        to[i].n_recent = draws[i].n_recent;
        for (int k = 0; k < draws[i].n_recent; k++) *next++ = draws[i].recent[k];
    }
    starts[n_rows] = n;
    size_t used = (size_t)((char *)next - host), out_at = (size_t)((char *)out - host);
    int32_t *d_starts = (int32_t *)(void *)(device + ((char *)starts - host)), *d_out = (int32_t *)(void *)(device + out_at);
    if (!llm__cuda_check(cuda, cudaMemcpyAsync(device, host, used, cudaMemcpyHostToDevice, cuda->stream), "copying draws", err))
        return false;
    LLM_LAUNCH(llm__sample_kernel, dim3(n_rows), dim3(LLM__DRAW_THREADS), sizeof(llm__draw_shared), cuda->stream, logits,
               vocab_size, llm__odds_bits(vocab_size), (const llm__device_draw *)(const void *)device, d_starts, d_starts + n + 1,
               d_out + 2 * n, (float *)(void *)(device + used), d_out, (float *)(void *)(d_out + n));
    llm__cuda_launched(cuda, "sample");
    if (!llm__cuda_tell(cuda, err) ||
        !llm__cuda_check(cuda, cudaMemcpyAsync(out, d_out, 2 * count * 4, cudaMemcpyDeviceToHost, cuda->stream), "copying tokens", err) ||
        !llm__cuda_wait(cuda, "what the device was doing", err))
        return false;
    memcpy(ids, out, count * sizeof *ids);
    memcpy(logprobs, out + n, count * sizeof *logprobs);
    return true;
}

/* =====================================================================================
 * [8] The program: operations become launches; decode steps are captured and replayed
 *
 * Each operation is one or two launches (llm__launch_op). Matmuls with the same x (q, k and v; gate
 * and up) share a launch; `prepare` finds them.
 *
 * GRAPHS. A decode step of 32 layers has about 400 launches, each 2 to 5 microseconds of CPU time.
 * For a small model, that is as long as the GPU needs for the step. A graph is a list of launches
 * that the driver has prepared: the CPU launches all of it in about 10 microseconds.
 *
 * A graph repeats the same kernels, grids and arguments. So the tables of a step (tokens,
 * positions, block tables, counts) are always at the same place in device memory. Grids are rounded
 * up (llm_rounded_rows), so that steps of 27 and 31 tokens share a graph. The extra threads find a
 * slot of -1 or a sequence without tokens.
 *
 * A shape is captured the second time it occurs, because many occur only once. Large steps
 * (LLM__GRAPH_TOKENS, LLM__GRAPH_COUNT) are not captured: launches are a small part of their time.
 * ================================================================================== */

struct llm__graph {
    const llm_program *program;
    llm__device_batch batch;    /* sizes rounded up; pointers to the arrays */
    int n_logits;               /* number of rows of the head, rounded up */
    cudaGraphExec_t exec;       /* NULL: not captured yet */
    uint64_t last_use;          /* value of llm__cuda.n_runs at the last use */
};

typedef struct llm__run {       /* one call of llm__cuda_run */
    const llm_program *program;
    llm_part part;
    int first;                  /* index in logit_rows of the first row of the head */
    int n_tokens, n_logits;     /* rows of the body; rows of the head; rounded up for a graph */
} llm__run;

static float *llm__in(const llm__run *run, const llm_op *op, int index) {
    return op->in[index] < 0 ? NULL : run->program->buffers[op->in[index]].data;
}

/* Can matmuls a and b share a launch? (Different buffers do not overlap.) */
static bool llm__may_join(const llm_op *a, const llm_op *b) {
    if (b->kind != LLM_OP_MATMUL || b->in[0] != a->in[0] || b->out == a->out ||
        b->out == a->in[0] || a->out == a->in[0])
        return false;
    return b->weight->cols == a->weight->cols &&
           llm__format_of(a->weight->type)->layout == llm__format_of(b->weight->type)->layout &&
           llm__format_of(a->weight->type)->planes == llm__format_of(b->weight->type)->planes;
}

/* The number of matmuls, from operation `index` on, that share one launch. */
static int llm__join(const llm__cuda *cuda, const llm_program *program, int index) {
    int n = 1, end = index < program->n_body ? program->n_body : program->n_ops;
    if (!cuda->options.fused || cuda->options.plain || !(program->fusions & LLM_FUSE_SIDE_BY_SIDE))
        return 1;
    for (bool join = true; n < LLM__PRODUCTS && index + n < end; n++) {
        for (int i = 0; join && i < n; i++)
            join = llm__may_join(&program->ops[index + i], &program->ops[index + n]);
        if (!join) break;
    }
    return n;
}

/* Launch op[0] to op[n - 1], which share a launch. */
static void llm__launch_op(llm__cuda *cuda, const llm__run *run, const llm_op *op, int n) {
    const llm_program *p = run->program;
    const llm_weight *w = op->weight;
    const float *x = llm__in(run, op, 0), *vector = w ? (const float *)w->data : NULL;
    float *out = op->out < 0 ? NULL : p->buffers[op->out].data;
    int rows = op->out >= 0 && p->buffers[op->out].head ? run->n_logits : run->n_tokens;
    switch (op->kind) {
    case LLM_OP_EMBED: llm__cuda_embed(cuda, w, out); break;
    case LLM_OP_ROPE_ANGLES:
        llm__cuda_rope_angles(cuda, vector, op->rope_dim, op->scale, out);
        break;
    case LLM_OP_RMSNORM:
        llm__cuda_rmsnorm(cuda, x, vector, rows, (int)w->cols, op->epsilon, out);
        break;
    case LLM_OP_MATMUL: {
        llm__products products;
        memset(&products, 0, sizeof products);
        products.n = n;
        for (int i = 0; i < n; i++) {
            products.each[i].w = llm__packed_of(op[i].weight);
            products.each[i].o = {p->buffers[op[i].out].data,
                                  op[i].bias ? (const float *)op[i].bias->data : NULL, op[i].add};
        }
        llm__cuda_matmuls(cuda, x, &products, rows);
        break;
    }
    case LLM_OP_ROPE_STORE:
        llm__cuda_rope_and_store(cuda, op, x, llm__in(run, op, 1), llm__in(run, op, 2),
                                 llm__in(run, op, 3), p->cache);
        break;
    case LLM_OP_ATTENTION:
        llm__cuda_attention(cuda, &op->attention, x, p->cache, op->layer, out);
        break;
    case LLM_OP_SWIGLU:
        llm__cuda_swiglu(cuda, x, llm__in(run, op, 1), rows * p->buffers[op->out].width, out);
        break;
    case LLM_OP_GATHER_ROWS:
        llm__cuda_gather_rows(cuda, x, (int)p->buffers[op->out].width, run->first, rows, out);
        break;
    case LLM_OP_GATHER_COLUMNS:
        llm__cuda_gather_columns(cuda, x, w->columns, rows, w->cols, out);
        break;
    default: break;
    }
}

/* Launch a part of the program. Its plan (n_ops) says how many operations share each launch. */
static void llm__launch_part(llm__cuda *cuda, const llm__run *run) {
    const llm_program *p = run->program;
    const int *together = (const int *)p->plan;
    int end = run->part & LLM_HEAD ? p->n_ops : p->n_body;
    cuda->last.x = NULL; /* a graph must not depend on an input that was rounded before it */
    for (int i = run->part & LLM_BODY ? 0 : p->n_body; i < end; i += together[i]) {
        double start = p->seconds ? llm_seconds() : 0;
        llm__launch_op(cuda, run, &p->ops[i], together[i]);
        if (!p->seconds) continue;
        llm__cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "a profiled operation");
        p->seconds[i] += llm_seconds() - start;
    }
    cuda->last.x = NULL;
}

/* ---- Graphs ------------------------------------------------------------------------------- */

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

/* Capture the launches of a run without executing them. False: a launch failed (replays would skip
 * its kernel), or there is no memory. This is not reported, because the caller then launches the
 * kernels directly, which reports any failure. */
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

/* Replay the graph of a run, captured first if necessary. False: the shape is new, or the graph
 * cannot be captured or launched (a first launch allocates device memory). */
static bool llm__graph_replay(llm__cuda *cuda, const llm__run *run) {
    llm__graph *graph = llm__graph_find(cuda, run);
    if (!graph) return llm__graph_remember(cuda, run), false;
    graph->last_use = cuda->n_runs;
    if (!graph->exec && !llm__graph_capture(cuda, run, graph)) return false;
    if (cudaGraphLaunch(graph->exec, cuda->stream) == cudaSuccess) {
        cuda->replays++;
        cuda->last.x = NULL; /* the graph has overwritten `rounded` */
        return true;
    }
    cudaGetLastError();
    cudaGraphExecDestroy(graph->exec);
    graph->exec = NULL;
    return false;
}

/* ---- Prepare and run --------------------------------------------------------------------- */

static void llm__cuda_forget(void *context, llm_program *program) {
    llm__graphs_forget(llm__cuda_of(context), program);
    free(program->plan);
    program->plan = NULL;
}

static bool llm__cuda_prepare(void *context, llm_program *program, const llm_limits *limits,
                              llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    llm__largest largest = {llm__larger(limits->max_tokens, limits->max_logits),
                            limits->max_sequences,
                            limits->max_context,
                            1,
                            1,
                            1};
    int *together = (int *)calloc((size_t)program->n_ops, sizeof *together);
    llm__cuda_clear(err);
    llm__cuda_forget(cuda, program);
    program->plan = together;
    if (!together)
        return llm__cuda_fail(err, LLM_ERROR_MEMORY, "%s: out of memory: %zu bytes for a plan",
                              cuda->backend.name, (size_t)program->n_ops * sizeof *together);
    for (int i = 0; i < program->n_ops; i++) {
        const llm_op *op = &program->ops[i];
        if (op->kind == LLM_OP_MATMUL && op->weight->cols > largest.max_cols)
            largest.max_cols = op->weight->cols;
        if (op->kind == LLM_OP_ROPE_STORE || op->kind == LLM_OP_ATTENTION) {
            largest.n_heads = llm__larger(largest.n_heads, op->attention.n_heads);
            largest.head_dim = llm__larger(largest.head_dim, op->attention.head_dim);
        }
        together[i] = op->kind == LLM_OP_MATMUL ? llm__join(cuda, program, i) : 1;
    }
    llm__graphs_forget(cuda, NULL); /* graphs may use scratch memory that moves here */
    if (llm__cuda_reserve(cuda, &largest, err)) return true;
    llm__cuda_forget(cuda, program);
    return false;
}

static bool llm__cuda_run(void *context, const llm_program *program, llm_part part,
                          const llm_batch *batch, int first, int n, llm_error *err) {
    llm__cuda *cuda = llm__cuda_of(context);
    llm__run run = {program, part, first, batch->n_tokens, n};
    llm__cuda_clear(err);
    if (!program->plan)
        return llm__cuda_fail(err, LLM_ERROR_ARGUMENT, "%s: run: the program is not prepared",
                              cuda->backend.name);
    bool graph = cuda->options.graphs && part == LLM_WHOLE && first == 0 && !program->seconds;
    if (n < 1) run.part = (llm_part)(part & LLM_BODY);
    if (batch->n_tokens > cuda->largest.max_tokens || n > cuda->largest.max_tokens)
        return llm__cuda_fail(err, LLM_ERROR_DEVICE, "%s: a step of %d tokens and %d rows of logits is larger than what was prepared",
                              cuda->backend.name, batch->n_tokens, n);
    if (part & LLM_BODY) {
        graph = llm__batch_sizes(cuda, batch, graph);
        if (!llm__cuda_batch(cuda, batch, err)) return false;
    }
    if (graph) run.n_tokens = cuda->batch.n_tokens, run.n_logits = llm_rounded_rows(n);
    cuda->n_runs++;
    if (!graph || !llm__graph_replay(cuda, &run)) llm__launch_part(cuda, &run);
    return true;
}

/* =====================================================================================
 * [9] The backend
 * ================================================================================== */

static void llm__cuda_destroy(llm_backend *backend) {
    llm__cuda *cuda = (llm__cuda *)backend->context;
    /* Creation failed. Do not call cudaSetDevice: it could allocate hundreds of MB on the
     * device. */
    if (!cuda->stream) {
        free(cuda);
        return;
    }
    cudaSetDevice(cuda->device);
    cudaStreamSynchronize(cuda->stream);
    llm__graphs_forget(cuda, NULL);
    free(cuda->graphs);
    llm__stages_free(cuda);
    cudaFreeHost(cuda->batch_room.host);
    cudaFree(cuda->batch_room.device);
    cudaFreeHost(cuda->draw_room.host);
    cudaFree(cuda->draw_room.device);
    cudaFree(cuda->raw);
    cudaFree(cuda->rounded);
    cudaFree(cuda->parts);
    cudaFree(cuda->pairs);
    cudaStreamDestroy(cuda->stream);
    cudaGetLastError();
    free(cuda);
}

/* Find the GPU, or report what is missing. */
static bool llm__cuda_find(llm__cuda *cuda, llm_error *err) {
    const char *name = cuda->backend.name;
    int n = 0, driver = 0, runtime = 0;
    cudaError_t code = cudaGetDeviceCount(&n);
    cudaGetLastError();
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (code == cudaErrorInsufficientDriver && driver == 0)
        return llm__cuda_fail(err, LLM_ERROR_UNSUPPORTED, "%s: no NVIDIA driver is installed", name);
    if (code == cudaErrorInsufficientDriver)
        return llm__cuda_fail(err, LLM_ERROR_DEVICE, "%s: the NVIDIA driver knows CUDA %d.%d at most, and this program was built "
                              "for CUDA %d.%d: install a newer driver, or build with an older CUDA Toolkit",
                              name, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (code == cudaErrorNoDevice || (code == cudaSuccess && n == 0))
        return llm__cuda_fail(err, LLM_ERROR_UNSUPPORTED, "%s: there is no NVIDIA GPU here", name);
    if (code != cudaSuccess)
        return llm__cuda_fail(err, LLM_ERROR_DEVICE, "%s: looking for a GPU failed: %s", name, cudaGetErrorString(code));
    if (cuda->options.device < 0 || cuda->options.device >= n)
        return llm__cuda_fail(err, LLM_ERROR_ARGUMENT, "%s: there is no GPU %d: there are %d, counted from 0", name,
                              cuda->options.device, n);
    cudaDeviceProp facts;
    code = cudaGetDeviceProperties(&facts, cuda->options.device);
    if (!llm__cuda_check(cuda, code, "asking the GPU what it is", err)) return false;
    snprintf(cuda->device_name, sizeof cuda->device_name, "%s", facts.name);
    cuda->device = cuda->options.device;
    cuda->n_processors = facts.multiProcessorCount;
    cuda->capability = 10 * facts.major + facts.minor;
    if (cuda->capability < 90 || driver < 12030 || runtime < 12030) /* for graphs: CUDA 12.3 */
        cuda->options.overlap = false;
    cuda->shared_bytes = facts.sharedMemPerBlockOptin;
    if (cuda->capability < 80)
        return llm__cuda_fail(err, LLM_ERROR_UNSUPPORTED, "%s: %s has compute capability %d.%d: 8.0 (Ampere) or newer is needed",
                              name, cuda->device_name, facts.major, facts.minor);
    return true;
}

#ifdef LLM_EMULATED
#define LLM__DEVICE_NAME "emulated"
#define LLM__DEVICE_BACKEND llm_emulated_backend
#else
#define LLM__DEVICE_NAME "cuda"
#define LLM__DEVICE_BACKEND llm_cuda_backend
#endif

llm_backend *LLM__DEVICE_BACKEND(const llm_gpu_options *options, llm_error *err) {
    llm__cuda_clear(err);
    llm__cuda *cuda = (llm__cuda *)calloc(1, sizeof *cuda);
    if (!cuda) {
        llm__cuda_fail(err, LLM_ERROR_MEMORY, "out of memory: %zu bytes for the backend", sizeof *cuda);
        return NULL;
    }
    llm_backend *b = &cuda->backend;
    b->name = LLM__DEVICE_NAME;
    b->context = cuda;
    b->allocate = llm__cuda_allocate;
    b->release = llm__cuda_release;
    b->upload = llm__cuda_upload;
    b->download = llm__cuda_download;
    b->load_weight = llm__cuda_load_weight;
    b->free_weight = llm__cuda_free_weight;
    b->prepare = llm__cuda_prepare;
    b->forget = llm__cuda_forget;
    b->run = llm__cuda_run;
    b->sync = llm__cuda_sync;
    b->copy_blocks = llm__cuda_copy_blocks;
    b->sample = llm__cuda_sample;
    b->state = llm__cuda_state;
    b->destroy = llm__cuda_destroy;
    cuda->options = options ? *options : llm_gpu_defaults();
    snprintf(cuda->device_name, sizeof cuda->device_name, "GPU %d", cuda->options.device);
    if (llm__cuda_find(cuda, err) && llm__cuda_check(cuda, cudaSetDevice(cuda->device), "choosing the GPU", err) &&
        llm__cuda_check(cuda, cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking), "creating a stream", err) &&
        llm__cuda_check(cuda, cudaFuncSetAttribute(llm__sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   (int)sizeof(llm__draw_shared)),
                        "preparing the kernels", err)) {
        cudaFuncAttributes facts; /* code for older GPUs does not wait for the previous kernel */
        if (cudaFuncGetAttributes(&facts, llm__merge_kernel) != cudaSuccess || facts.ptxVersion < 90) cuda->options.overlap = false;
        cudaGetLastError();
        return b;
    }
    llm__cuda_destroy(b);
    return NULL;
}
