/* llm.cu - the operations of llm.h on an NVIDIA GPU
 *
 * Copy this file beside llm.h, and build it with the CUDA Toolkit (12 or 13), which is all that it needs:
 *
 *     nvcc -O3 -arch=native -c llm.cu -o llm_cuda.o
 *     cc -O2 -fopenmp app.c llm_cuda.o -lm -L/usr/local/cuda/lib64 -lcudart_static -lstdc++ -lpthread -ldl -lrt
 *
 * where app.c is a program over llm.h that asks for the GPU:
 *
 *     llm_engine_options options = llm_engine_defaults();
 *     options.backend = llm_cuda_backend(NULL, &err);
 *     llm_engine *engine = llm_engine_create(model, &options, &err);
 *
 * All else stays the same: the engine above the seam (struct llm_backend in llm.h) does not know which device it
 * drives. Free the backend, with llm_backend_free, after the engine.
 *
 * WHAT A GPU IS, for a reader who knows C and has never written a kernel
 *
 * A kernel is a C function that the GPU runs many thousand times at once. `LLM_LAUNCH(kernel, grid, block, ...)` says how
 * often: a grid of blocks of threads. A thread finds out which of them it is (blockIdx, threadIdx) and picks its share of
 * the work by that. There are three levels, and each has a kind of memory to itself:
 *
 *     thread       up to 255 registers. 32 threads with neighbouring numbers are a warp: they run the same instruction
 *                  at the same time, and can read each other's registers (__shfl_xor_sync).
 *     block        up to 1024 threads (32 warps) on one of the GPU's processors (an "SM"; an H100 has 132), with up to
 *                  some 200 KB of shared memory: as fast as a cache, but filled by hand. __syncthreads() waits until all
 *                  threads of the block have come to that line, so that what one wrote there others can read.
 *     grid         all blocks, in any order, on all SMs. They share the GPU's main memory ("global" memory: tens of GB,
 *                  at 2 to 5 TB/s), and cannot wait for each other: what needs the result of all is another kernel.
 *
 * Launches are queued on a stream: the GPU does them one after the other, while the CPU has long gone on. A launch costs
 * the CPU some microseconds, which is why chapter [8] records those of a step once and replays them.
 *
 * Two numbers bound every kernel: how many bytes it must move to and from global memory, and how much arithmetic it must
 * do. An H200 moves 4.8 TB/s and does 990 TFLOP/s with its matrix instructions, so a kernel that does fewer than some 200
 * operations with each byte waits for memory and not for arithmetic. A warp's 32 reads of 4 neighbouring bytes are one
 * request of 128 bytes ("coalesced"); reads all over the place are 32 requests. Comments below say of each kernel what
 * bounds it, and the fewest bytes it can move.
 *
 * CONTENTS (search for the mark in the left column)
 *
 *     [0]  The device      the context, launches, sums over a warp and a block, each special instruction in a function
 *     [1]  Memory          allocate, upload through pinned memory, download; errors
 *     [2]  Simple kernels  embed, rope_angles, rmsnorm, rope_and_store, swiglu, gather_rows, copy_blocks
 *     [3]  Matmul, few rows   bound by the bytes of the weights
 *     [4]  Matmul, many rows  bound by arithmetic
 *     [5]  Attention, many queries of a sequence (prefill)
 *     [6]  Attention, one query of each sequence (decode)
 *     [7]  Sampling        from logits to a token, on the device
 *     [8]  Graphs          the launches of a step, recorded once and replayed
 *     [9]  The backend     the table of functions that llm.h calls
 *
 * The same text also compiles as plain C++17 over tests/cuda_on_cpu.h (with LLM_EMULATED defined), which runs blocks and
 * threads on the CPU: slowly, but on any machine, in a debugger, and with every barrier checked. That is the device called
 * "emulated". So launches go through one macro, shared memory is declared by another, and each instruction that C++ has
 * no name for is one small function of chapter [0] with a twin over there.
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
/* Run kernel(...) on every thread of `grid` blocks of `block` threads, each block with shared_bytes of dynamic shared memory,
 * after all that is on the stream already. */
#define LLM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
/* An array in shared memory, of a size known to the compiler, or as large as the launch says. */
#define LLM_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define LLM_DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(16) unsigned char llm__dynamic_shared[]; \
    type *name = (type *)(void *)llm__dynamic_shared
#endif

/* The batch of a step as kernels see it. The arrays are device memory, filled by begin_step. Where a step is replayed from
 * a graph, the counts here are rounded up (the grid of a launch cannot change), and the true ones are in `counts`: rows
 * beyond them compute something that nobody reads, and their slots are -1, so that they write nothing into the cache. */
typedef struct llm__device_batch {
    int n_tokens, n_sequences, n_logits; /* for the sizes of grids */
    int max_count;               /* the most tokens of one sequence; 1: a decode step */
    int max_context;             /* the most positions of one sequence, those of this step included */
    int block_size;
    const int32_t *counts;       /* device (4): n_tokens, n_sequences, n_logits, table_stride, as they are */
    const int32_t *tokens, *positions, *slots; /* device (n_tokens) as in llm_batch */
    const int32_t *sequence_of;  /* device (n_tokens) whose token it is; -1: nobody's */
    const int32_t *seq_first, *seq_count; /* device (n_sequences); a count of 0: nobody */
    const int32_t *logit_rows;   /* device (n_logits) */
    const int32_t *block_tables; /* device (n_sequences, counts[3]) */
} llm__device_batch;

enum { LLM__STAGES = 3 }; /* pieces of pinned memory: one is filled while others are on their way */

typedef struct llm__stage { /* what is uploaded goes through here */
    char *host;           /* pinned (stage_bytes) */
    cudaEvent_t done;     /* the last copy out of it has been done */
    bool busy;            /* ... or may not have been yet */
} llm__stage;

typedef struct llm__cuda { /* the context of the backend */
    llm_backend backend;
    llm_gpu_options options;
    cudaStream_t stream;
    char device_name[256];
    int device, n_processors;    /* SMs */
    int capability;              /* 80, 86, 89, 90, ... */
    size_t shared_bytes;         /* the most dynamic shared memory of a block */
    llm_limits limits;           /* as reserved */
    bool stepping;               /* between begin_step and end_step */

    char *batch_host, *batch_device; /* the arrays of a step: pinned memory, and its copy on the device */
    size_t batch_bytes;          /* of each */
    llm__device_batch batch;     /* of this step */

    llm__stage stages[LLM__STAGES];
    size_t stage_bytes;          /* 0: they are not there yet */
    int next_stage;

    double wait_seconds;         /* that the CPU has waited for the device */
    uint64_t launches, replays;  /* of kernels one by one, and of graphs */
    llm_error failure;           /* the first since the last sync */
} llm__cuda;

__host__ __device__ static inline int64_t llm__ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- Numbers ---------------------------------------------------------------------------- */

__device__ static inline float llm__f16_bits_to_f32(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ static inline uint16_t llm__f32_to_f16_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
__device__ static inline float llm__bf16_bits_to_f32(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }

/* Value i of a row of weights in the file's own layout: one at a time, so for the plain kernels only. */
__device__ static inline float llm__weight_value(llm_type type, const void *row, int64_t i) {
    if (type == LLM_F32) return ((const float *)row)[i];
    if (type == LLM_F16) return llm__f16_bits_to_f32(((const uint16_t *)row)[i]);
    if (type == LLM_BF16) return llm__bf16_bits_to_f32(((const uint16_t *)row)[i]);
    int64_t block = i / 32, j = i % 32;
    if (type == LLM_Q8_0) {
        const uint16_t *p = (const uint16_t *)row + block * 17; /* a scale, 32 bytes */
        return llm__f16_bits_to_f32(*p) * (float)((const int8_t *)(p + 1))[j];
    }
    const uint16_t *p = (const uint16_t *)row + block * 9; /* q4_0: a scale, 16 bytes; byte k holds values k and k + 16 */
    int nibbles = ((const uint8_t *)(p + 1))[j % 16];
    return llm__f16_bits_to_f32(*p) * (float)((j < 16 ? nibbles & 15 : nibbles >> 4) - 8);
}

/* Bytes of a row of weights in that layout. */
static size_t llm__row_bytes(llm_type type, int64_t cols) {
    const llm_type_info *info = llm_type_find(type);
    return info ? (size_t)(cols / info->block_values) * (size_t)info->block_bytes : 0;
}

/* ---- Sums over threads --------------------------------------------------------------------
 * A warp adds up 32 numbers in five rounds: each thread adds that of the thread whose number differs in one bit. All
 * end up with the same sum, to the last bit, since a + b = b + a. The order is fixed: so is the result. */

__device__ static inline float llm__warp_sum(float x) {
    for (int other = 16; other; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

__device__ static inline float llm__warp_max(float x) {
    for (int other = 16; other; other /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
    return x;
}

/* The sum over all threads of a block (a multiple of 32, up to 1024), for each of them. `shared` (32) is scratch. */
__device__ static inline float llm__block_sum(float x, float *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = llm__warp_sum(x);
    __syncthreads(); /* the scratch of the last sum has been read */
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
 * Nothing here ends the program. A call that can fail fills in an llm_error; a launch, which has nobody to tell, leaves its
 * failure in the context, and the next sync or download tells it. A GPU that was lost in mid-run fails every call
 * from then on, and can still be freed.
 * ================================================================================== */

static bool llm__cuda_fail(llm_error *err, llm_status status, const char *format, ...) {
    if (!err) return false;
    err->status = status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(err->message, sizeof err->message, format, arguments);
    va_end(arguments);
    return false;
}

static void llm__cuda_clear(llm_error *err) {
    if (err) memset(err, 0, sizeof *err);
}

/* Did a call of the CUDA library go well? If not, say what was being done. */
static bool llm__cuda_check(const llm__cuda *cuda, cudaError_t code, const char *doing, llm_error *err) {
    if (code == cudaSuccess) return true;
    cudaGetLastError(); /* what was told is told: the library must not report it once more at the next launch */
    return llm__cuda_fail(err, LLM_ERROR_DEVICE, "%s (%s): %s failed: %s", cuda->backend.name, cuda->device_name, doing,
                          cudaGetErrorString(code));
}

/* Note a failure of an operation, which has nobody to tell; only the first counts. */
static void llm__cuda_note(llm__cuda *cuda, cudaError_t code, const char *doing) {
    llm_error err;
    if (code != cudaSuccess && !llm__cuda_check(cuda, code, doing, &err) && cuda->failure.status == LLM_OK)
        cuda->failure = err;
}

/* After each launch: was it one that the device could start? (What goes wrong while it runs, the next sync tells.) */
static void llm__cuda_launched(llm__cuda *cuda, const char *kernel) {
    cuda->launches++;
    llm__cuda_note(cuda, cudaGetLastError(), kernel);
}

/* Wait until the device has done all that is on the stream. */
static bool llm__cuda_wait(llm__cuda *cuda, const char *doing, llm_error *err) {
    double start = llm_seconds();
    cudaError_t code = cudaStreamSynchronize(cuda->stream);
    cuda->wait_seconds += llm_seconds() - start;
    return llm__cuda_check(cuda, code, doing, err);
}

static bool llm__cuda_tell(llm__cuda *cuda, llm_error *err) {
    bool fine = cuda->failure.status == LLM_OK;
    if (!fine && err) *err = cuda->failure;
    llm__cuda_clear(&cuda->failure);
    return fine;
}

static void *llm__cuda_allocate(void *context, size_t bytes, const char *what, llm_error *err) {
    llm__cuda *cuda = (llm__cuda *)context;
    void *device = NULL;
    size_t free_bytes = 0, all_bytes = 0;
    llm__cuda_clear(err);
    cudaError_t code = cudaMalloc(&device, bytes ? bytes : 1);
    if (code == cudaSuccess) return device;
    cudaGetLastError();
    if (code != cudaErrorMemoryAllocation) {
        llm__cuda_check(cuda, code, "allocating memory", err);
        return NULL;
    }
    cudaMemGetInfo(&free_bytes, &all_bytes);
    llm__cuda_fail(err, LLM_ERROR_MEMORY, "%s (%s): out of device memory: %.1f MiB wanted for %s, and %.1f of %.1f MiB are free",
                   cuda->backend.name, cuda->device_name, (double)bytes / 1048576, what, (double)free_bytes / 1048576,
                   (double)all_bytes / 1048576);
    return NULL;
}

static void llm__cuda_release(void *context, void *device) {
    (void)context;
    if (device) cudaFree(device); /* a lost device has lost its memory too: nothing to be done about a failure */
    cudaGetLastError();
}

/* ---- Upload -----------------------------------------------------------------------------
 * The device can fetch from the CPU's memory by itself, at the full speed of the bus, but only from memory that stays where it
 * is: pinned memory. So a file of weights goes through a few pinned pieces: threads copy the next part of the mapped file into
 * one of them (which reads it from the disk, or from the system's cache of it) while the device fetches another. One
 * thread copies some 10 GB/s, the bus carries 25 (PCIe 4) to 60 (PCIe 5): hence several threads. */

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

/* memcpy by several threads. One that cannot be started is done without. */
static void llm__copy_by_threads(char *to, const char *from, size_t bytes) {
    pthread_t threads[LLM__COPY_THREADS];
    llm__copy_part parts[LLM__COPY_THREADS];
    bool started[LLM__COPY_THREADS];
    int n = (int)(bytes >> 20); /* a megabyte for each, at least */
    n = n < 1 ? 1 : n > LLM__COPY_THREADS ? LLM__COPY_THREADS : n;
    int processors = llm_processor_count();
    if (n > processors) n = processors;
    size_t share = (size_t)llm__ceil_div((int64_t)bytes, (int64_t)n * 4096) * 4096;
    for (int i = n - 1; i >= 0; i--) { /* the first part is the calling thread's own */
        size_t first = (size_t)i * share < bytes ? (size_t)i * share : bytes;
        parts[i] = {to + first, from + first, bytes - first < share ? bytes - first : share};
        started[i] = i > 0 && pthread_create(&threads[i], NULL, llm__copy_thread, &parts[i]) == 0;
        if (!started[i]) llm__copy_thread(&parts[i]);
    }
    for (int i = 1; i < n; i++)
        if (started[i]) pthread_join(threads[i], NULL);
}

/* The pinned pieces. Without them uploads still work, as fast as the driver does it. */
static void llm__stages_create(llm__cuda *cuda) {
    cuda->stage_bytes = 16 << 20;
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

/* Returns when `host` has been read; the last pieces may still be on their way, in order with all else on the stream. */
static bool llm__cuda_upload(void *context, void *device, const void *host, size_t bytes, llm_error *err) {
    llm__cuda *cuda = (llm__cuda *)context;
    llm__cuda_clear(err);
    if (!cuda->stage_bytes) llm__stages_create(cuda);
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
    llm__cuda *cuda = (llm__cuda *)context;
    llm__cuda_clear(err);
    if (!llm__cuda_tell(cuda, err)) return false;
    return llm__cuda_check(cuda, cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda->stream),
                           "copying from the device", err) &&
           llm__cuda_wait(cuda, "what the device was doing", err);
}

static void llm__cuda_state(void *context, llm_device_state *state) {
    llm__cuda *cuda = (llm__cuda *)context;
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

/* ---- Limits and the batch of a step ------------------------------------------------------- */

static int llm__larger(int a, int b) { return a > b ? a : b; }

static bool llm__cuda_reserve(void *context, const llm_limits *wanted, llm_error *err) {
    llm__cuda *cuda = (llm__cuda *)context;
    llm__cuda_clear(err);
    if (wanted->max_tokens < 1 || wanted->max_context < 1 || wanted->head_dim < 1 || wanted->max_cols < 1)
        return llm__cuda_fail(err, LLM_ERROR_ARGUMENT, "%s: reserve: every limit must be at least 1", cuda->backend.name);
    llm_limits *l = &cuda->limits;
    l->max_tokens = llm__larger(l->max_tokens, wanted->max_tokens);
    l->max_sequences = llm__larger(l->max_sequences, wanted->max_sequences);
    l->max_context = llm__larger(l->max_context, wanted->max_context);
    l->n_heads = llm__larger(l->n_heads, wanted->n_heads);
    l->head_dim = llm__larger(l->head_dim, wanted->head_dim);
    if (wanted->max_cols > l->max_cols) l->max_cols = wanted->max_cols;
    return true;
}

/* Room for the arrays of a step, in pinned memory and on the device. */
static bool llm__cuda_batch_room(llm__cuda *cuda, size_t bytes, llm_error *err) {
    if (bytes <= cuda->batch_bytes) return true;
    bytes += bytes / 2;
    cudaStreamSynchronize(cuda->stream); /* nothing on its way may still use the old ones */
    cudaFreeHost(cuda->batch_host);
    cudaFree(cuda->batch_device);
    cuda->batch_host = cuda->batch_device = NULL;
    cuda->batch_bytes = 0;
    cuda->batch_device = (char *)llm__cuda_allocate(cuda, bytes, "the tables of a step", err);
    if (!cuda->batch_device ||
        !llm__cuda_check(cuda, cudaHostAlloc((void **)&cuda->batch_host, bytes, cudaHostAllocDefault),
                         "allocating pinned memory for the tables of a step", err))
        return false;
    cuda->batch_bytes = bytes;
    return true;
}

/* The next n numbers of the step's buffer: where to fill them in, and where they will be on the device. */
typedef struct llm__batch_writer {
    char *host, *device;
    size_t used;
} llm__batch_writer;

static int32_t *llm__batch_array(llm__batch_writer *writer, int64_t n, const int32_t **device) {
    int32_t *host = (int32_t *)(void *)(writer->host + writer->used);
    *device = (const int32_t *)(const void *)(writer->device + writer->used);
    writer->used += (size_t)(n + 3) / 4 * 4 * sizeof(int32_t); /* each array starts at a multiple of 16 bytes */
    return host;
}

static void llm__batch_copy(llm__batch_writer *writer, const int32_t *from, int n, int rounded, int32_t padding,
                            const int32_t **device) {
    int32_t *to = llm__batch_array(writer, rounded, device);
    memcpy(to, from, (size_t)n * sizeof *to);
    for (int i = n; i < rounded; i++) to[i] = padding;
}

/* Round the sizes of a step up, for a graph. (Chapter [8] says why.) */
static void llm__batch_sizes(llm__cuda *cuda, const llm_batch *batch) {
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
}

/* All arrays of the batch in one buffer, and that in one copy: many small copies would cost some microseconds each. */
static bool llm__cuda_begin_step(void *context, const llm_batch *batch, llm_error *err) {
    llm__cuda *cuda = (llm__cuda *)context;
    llm__device_batch *b = &cuda->batch;
    llm__cuda_clear(err);
    llm__batch_sizes(cuda, batch);
    int64_t table = (int64_t)batch->n_sequences * batch->table_stride;
    size_t numbers = (size_t)(4 + 4 * b->n_tokens + 2 * b->n_sequences + b->n_logits + table) + 8 * 4;
    if (!llm__cuda_batch_room(cuda, numbers * sizeof(int32_t), err)) return false;

    /* the last step's copy must have been done before its buffer is filled anew: it has, unless that step failed */
    if (cuda->stepping) cudaStreamSynchronize(cuda->stream);
    llm__batch_writer writer = {cuda->batch_host, cuda->batch_device, 0};
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
    cuda->stepping = true;
    return llm__cuda_check(cuda, cudaMemcpyAsync(cuda->batch_device, cuda->batch_host, writer.used,
                                                 cudaMemcpyHostToDevice, cuda->stream),
                           "copying the tables of a step", err);
}

static bool llm__cuda_end_step(void *context, llm_error *err) {
    llm__cuda *cuda = (llm__cuda *)context;
    llm__cuda_clear(err);
    cuda->stepping = false;
    return true;
}

static bool llm__cuda_sync(void *context, llm_error *err) {
    llm__cuda *cuda = (llm__cuda *)context;
    llm_error failure;
    llm__cuda_clear(err);
    if (!llm__cuda_wait(cuda, "what the device was doing", &failure) && cuda->failure.status == LLM_OK) cuda->failure = failure;
    return llm__cuda_tell(cuda, err);
}

/* =====================================================================================
 * [2] Simple kernels
 *
 * None of these does more than a few operations with each number it reads, so all of them are bound by bytes, and
 * by the time of a launch where there are few. Speeds are not measured yet (no GPU was available).
 * ================================================================================== */

enum { LLM__BLOCK = 256 }; /* threads of a block, where nothing speaks for another number */

/* Grids count in 32 bits in x and in 16 bits in y and z. */
static unsigned llm__grid(int64_t n, int64_t most) { return (unsigned)(n < 1 ? 1 : n < most ? n : most); }

/* One block per token: the row of the table that its id says, as f32. Bytes: a row of the table read, a row written. */
__global__ static void llm__embed_kernel(const int32_t *tokens, llm_type type, const char *table, size_t row_bytes, int cols,
                                         float *out) {
    const char *row = table + (size_t)tokens[blockIdx.x] * row_bytes;
    for (int i = threadIdx.x; i < cols; i += blockDim.x)
        out[(int64_t)blockIdx.x * cols + i] = llm__weight_value(type, row, i);
}

static void llm__cuda_embed(void *context, const llm_batch *batch, const llm_weight *table, float *out) {
    llm__cuda *cuda = (llm__cuda *)context;
    (void)batch;
    LLM_LAUNCH(llm__embed_kernel, dim3(cuda->batch.n_tokens), dim3(LLM__BLOCK), 0, cuda->stream, cuda->batch.tokens,
               table->type, (const char *)table->data, llm__row_bytes(table->type, table->cols), (int)table->cols, out);
    llm__cuda_launched(cuda, "embed");
}

/* One block per token, a thread per pair of dimensions. Done once a step, and used by every layer. */
__global__ static void llm__rope_angles_kernel(const int32_t *positions, const float *frequencies, int n_pairs,
                                               float magnitude, float2 *angles) {
    float position = (float)positions[blockIdx.x];
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        float angle = position * frequencies[i];
        angles[(int64_t)blockIdx.x * n_pairs + i] = make_float2(magnitude * cosf(angle), magnitude * sinf(angle));
    }
}

static void llm__cuda_rope_angles(void *context, const llm_batch *batch, const float *frequencies, int rope_dim,
                                  float magnitude, float *angles) {
    llm__cuda *cuda = (llm__cuda *)context;
    (void)batch;
    LLM_LAUNCH(llm__rope_angles_kernel, dim3(cuda->batch.n_tokens), dim3(64), 0, cuda->stream, cuda->batch.positions,
               frequencies, rope_dim / 2, magnitude, (float2 *)(void *)angles);
    llm__cuda_launched(cuda, "rope_angles");
}

/* One block per row. Bytes: the row read (the second time it comes from a cache), the row written. */
__global__ static void llm__rmsnorm_kernel(const float *x, const float *weight, int dim, float epsilon, float *out) {
    LLM_SHARED(float, scratch, 32);
    const float *row = x + (int64_t)blockIdx.x * dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum += row[i] * row[i];
    float scale = rsqrtf(llm__block_sum(sum, scratch) / (float)dim + epsilon);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) out[(int64_t)blockIdx.x * dim + i] = row[i] * scale * weight[i];
}

static void llm__cuda_rmsnorm(void *context, const float *x, const float *weight, int n, int dim, float epsilon,
                              float *out) {
    llm__cuda *cuda = (llm__cuda *)context;
    if (n < 1) return;
    LLM_LAUNCH(llm__rmsnorm_kernel, dim3(n), dim3(LLM__BLOCK), 0, cuda->stream, x, weight, dim, epsilon, out);
    llm__cuda_launched(cuda, "rmsnorm");
}

/* Turn the pairs of a head (shared memory, or global) by the angles of its token. The lanes of one warp share the pairs. */
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
    const int32_t *slots;
    int n_tokens, n_heads, n_kv_heads, head_dim, rope_dim, block_size;
    llm_rope_pairing pairing;
    const float2 *angles;         /* (T, rope_dim/2) */
    const float *q_norm, *k_norm; /* (head_dim) or NULL */
    float epsilon;
    float *q;                     /* (T, n_heads, head_dim) */
    const float *k, *v;           /* (T, n_kv_heads, head_dim) */
    llm_type cache_type;
    char *keys, *values;          /* of this layer */
} llm__rope_arguments;

/* Where the cache keeps the head of a token, as the number of its row of head_dim values; -1: nowhere. */
__device__ static inline int64_t llm__slot_row(const llm__rope_arguments *a, int slot, int kv_head) {
    if (slot < 0) return -1;
    return ((int64_t)(slot / a->block_size) * a->n_kv_heads + kv_head) * a->block_size + slot % a->block_size;
}

/* Per-head norm, RoPE and the write into the cache, in one kernel: one warp per head of a token, first the query heads, then
 * those of the keys, then of the values. A head is read into shared memory, worked on there, and written once. Bytes: q read
 * and written, k and v read, and written in the type of the cache. */
__global__ static void llm__rope_and_store_kernel(llm__rope_arguments a) {
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
                if (a.cache_type == LLM_F16) ((uint16_t *)(void *)side)[row * a.head_dim + i] = llm__f32_to_f16_bits(head[i]);
                else ((float *)(void *)side)[row * a.head_dim + i] = head[i];
        }
        __syncwarp();
    }
}

static void llm__cuda_rope_and_store(void *context, const llm_batch *batch, const llm_attention_shape *shape,
                                     llm_rope_pairing pairing, int rope_dim, const float *angles, const float *q_norm,
                                     const float *k_norm, float epsilon, float *q, float *k, const float *v,
                                     const llm_cache *cache, int layer) {
    llm__cuda *cuda = (llm__cuda *)context;
    (void)batch;
    llm__rope_arguments a;
    a.slots = cuda->batch.slots;
    a.n_tokens = cuda->batch.n_tokens;
    a.n_heads = shape->n_heads;
    a.n_kv_heads = shape->n_kv_heads;
    a.head_dim = shape->head_dim;
    a.rope_dim = rope_dim;
    a.block_size = cache->block_size;
    a.pairing = pairing;
    a.angles = (const float2 *)(const void *)angles;
    a.q_norm = q_norm;
    a.k_norm = k_norm;
    a.epsilon = epsilon;
    a.q = q;
    a.k = k;
    a.v = v;
    a.cache_type = cache->type;
    a.keys = (char *)cache->keys + (size_t)layer * cache->layer_bytes;
    a.values = (char *)cache->values + (size_t)layer * cache->layer_bytes;
    int warps = 4;
    int64_t items = (int64_t)a.n_tokens * (a.n_heads + 2 * a.n_kv_heads);
    LLM_LAUNCH(llm__rope_and_store_kernel, dim3(llm__grid(llm__ceil_div(items, warps), INT32_MAX)), dim3(32 * warps),
               (size_t)(warps * a.head_dim) * sizeof(float), cuda->stream, a);
    llm__cuda_launched(cuda, "rope_and_store");
}

/* A thread per number. Bytes: two rows read, one written. */
__global__ static void llm__swiglu_kernel(const float *gate, const float *up, int64_t n, float *out) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void llm__cuda_swiglu(void *context, const float *gate, const float *up, int64_t n, float *out) {
    llm__cuda *cuda = (llm__cuda *)context;
    if (n < 1) return;
    LLM_LAUNCH(llm__swiglu_kernel, dim3(llm__grid(llm__ceil_div(n, LLM__BLOCK), 1 << 20)), dim3(LLM__BLOCK), 0,
               cuda->stream, gate, up, n, out);
    llm__cuda_launched(cuda, "swiglu");
}

__global__ static void llm__gather_rows_kernel(const int32_t *rows, const float *x, int dim, float *out) {
    const float *row = x + (int64_t)rows[blockIdx.x] * dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) out[(int64_t)blockIdx.x * dim + i] = row[i];
}

static void llm__cuda_gather_rows(void *context, const llm_batch *batch, const float *x, int dim, int first, int n,
                                  float *out) {
    llm__cuda *cuda = (llm__cuda *)context;
    (void)batch;
    if (n < 1) return;
    LLM_LAUNCH(llm__gather_rows_kernel, dim3(n), dim3(LLM__BLOCK), 0, cuda->stream, cuda->batch.logit_rows + first, x, dim,
               out);
    llm__cuda_launched(cuda, "gather_rows");
}

/* A thread carries the same piece of every pair, one pair after the other: so a block that is first copied from and then to
 * is copied in that order, though no thread waits for another. blockIdx.y: the layer; z: keys or values. */
template <typename Word>
__global__ static void llm__copy_blocks_kernel(char *keys, char *values, size_t layer_bytes, int64_t words, const int32_t *from,
                                               const int32_t *to, int n) {
    Word *side = (Word *)(void *)((blockIdx.z ? values : keys) + (size_t)blockIdx.y * layer_bytes);
    for (int64_t word = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; word < words; word += (int64_t)gridDim.x * blockDim.x)
        for (int i = 0; i < n; i++) side[to[i] * words + word] = side[from[i] * words + word];
}

static void llm__cuda_copy_blocks(void *context, const llm_cache *cache, const int32_t *from, const int32_t *to, int n) {
    llm__cuda *cuda = (llm__cuda *)context;
    llm_error err;
    if (n < 1) return;
    size_t bytes = cache->layer_bytes / (size_t)cache->n_blocks;
    int32_t *pairs = (int32_t *)llm__cuda_allocate(cuda, 2 * (size_t)n * sizeof *pairs, "a list of blocks to copy", &err);
    if (!pairs || !llm__cuda_upload(cuda, pairs, from, (size_t)n * sizeof *pairs, &err) ||
        !llm__cuda_upload(cuda, pairs + n, to, (size_t)n * sizeof *pairs, &err)) {
        if (cuda->failure.status == LLM_OK) cuda->failure = err;
        llm__cuda_release(cuda, pairs);
        return;
    }
    bool wide = bytes % sizeof(uint4) == 0;
    int64_t words = (int64_t)(bytes / (wide ? sizeof(uint4) : sizeof(uint16_t)));
    dim3 grid(llm__grid(llm__ceil_div(words, LLM__BLOCK), INT32_MAX), cache->n_layers, 2);
    auto kernel = wide ? llm__copy_blocks_kernel<uint4> : llm__copy_blocks_kernel<uint16_t>;
    LLM_LAUNCH(kernel, grid, dim3(LLM__BLOCK), 0, cuda->stream, (char *)cache->keys, (char *)cache->values,
               cache->layer_bytes, words, pairs, pairs + n, n);
    llm__cuda_launched(cuda, "copy_blocks");
    llm__cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "copy_blocks");
    llm__cuda_release(cuda, pairs);
}

/* =====================================================================================
 * [3] Matmul, few rows
 *
 * The plain form: one warp per number of the result, over the weights as they are in the file. Every row of x reads all
 * weights again. It is what the fast ones are tested against.
 * ================================================================================== */

/* blockIdx.x: 4 rows of w, one for each warp; blockIdx.y: the row of x */
__global__ static void llm__plain_matmul_kernel(const float *x, llm_type type, const char *w, size_t row_bytes, int64_t rows,
                                                int64_t cols, const float *bias, int n, bool add, float *out) {
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= rows) return;
    for (int64_t i = blockIdx.y; i < n; i += gridDim.y) {
        float sum = 0.0f;
        for (int64_t j = lane; j < cols; j += 32)
            sum += llm__weight_value(type, w + (size_t)row * row_bytes, j) * x[i * cols + j];
        sum = llm__warp_sum(sum);
        if (lane) continue;
        if (bias) sum += bias[row];
        out[i * rows + row] = add ? out[i * rows + row] + sum : sum;
    }
}

static void llm__cuda_plain_matmul(llm__cuda *cuda, const float *x, const llm_weight *w, const float *bias, int n, bool add,
                                   float *out) {
    dim3 grid(llm__grid(llm__ceil_div(w->rows, 4), INT32_MAX), llm__grid(n, 65535));
    LLM_LAUNCH(llm__plain_matmul_kernel, grid, dim3(128), 0, cuda->stream, x, w->type, (const char *)w->data,
               llm__row_bytes(w->type, w->cols), w->rows, w->cols, bias, n, add, out);
    llm__cuda_launched(cuda, "matmul");
}

static void llm__cuda_matmul(void *context, const float *x, const llm_weight *w, const float *bias, int n, bool add,
                             float *out) {
    llm__cuda *cuda = (llm__cuda *)context;
    if (n < 1 || w->rows < 1) return;
    llm__cuda_plain_matmul(cuda, x, w, bias, n, add, out);
}

/* Weights on the device, in the layout that the kernels read. */
static bool llm__cuda_load_weight(void *context, llm_weight *w, const void *host, llm_error *err) {
    llm__cuda *cuda = (llm__cuda *)context;
    const llm_type_info *type = llm_type_find(w->type);
    llm__cuda_clear(err);
    bool known = w->type == LLM_F32 || w->type == LLM_F16 || w->type == LLM_BF16 || w->type == LLM_Q8_0 || w->type == LLM_Q4_0;
    if (!known || !type)
        return llm__cuda_fail(err, LLM_ERROR_UNSUPPORTED, "%s: no kernel for weights of type %s", cuda->backend.name,
                              type ? type->name : "(unknown)");
    if (w->rows < 1 || w->cols < 1 || w->cols % type->block_values)
        return llm__cuda_fail(err, LLM_ERROR_FORMAT, "%s: a %s matrix of %lld x %lld: rows must be whole blocks of %d",
                              cuda->backend.name, type->name, (long long)w->rows, (long long)w->cols, type->block_values);
    size_t bytes = (size_t)w->rows * llm__row_bytes(w->type, w->cols);
    void *device = llm__cuda_allocate(cuda, bytes, "weights (a smaller type, as q8_0 or q4_0, needs less)", err);
    if (!device) return false;
    if (!llm__cuda_upload(cuda, device, host, bytes, err)) {
        llm__cuda_release(cuda, device);
        return false;
    }
    w->data = device;
    return true;
}

static void llm__cuda_free_weight(void *context, llm_weight *w) {
    llm__cuda_release(context, (void *)w->data);
    llm__cuda_release(context, w->packed);
    w->data = w->packed = NULL;
}

/* =====================================================================================
 * [4] Matmul, many rows
 * ================================================================================== */

/* =====================================================================================
 * [5] Attention, many queries of a sequence (prefill)
 * ================================================================================== */

/* =====================================================================================
 * [6] Attention, one query of each sequence (decode)
 *
 * The plain form: one block per query (a head of a token), tiles of as many positions as it has threads. First each thread
 * scores one position, then each adds up some of the dimensions over the tile. The softmax is "online" (Milakov and
 * Gimelshein 2018): the largest score so far is taken off, and what was added up is made smaller whenever a larger one comes.
 * ================================================================================== */

typedef struct llm__attention_arguments {
    const int32_t *positions, *sequence_of, *block_tables, *counts;
    int n_heads, n_kv_heads, head_dim, block_size, window;
    float scale;
    llm_type cache_type;
    const char *keys, *values; /* of this layer */
    const float *q;            /* (T, n_heads, head_dim) */
    float *out;
} llm__attention_arguments;

__device__ static inline float llm__cache_value(llm_type type, const char *side, int64_t i) {
    return type == LLM_F16 ? llm__f16_bits_to_f32(((const uint16_t *)(const void *)side)[i])
                           : ((const float *)(const void *)side)[i];
}

/* Which row of head_dim values of a layer holds position p of a sequence. */
__device__ static inline int64_t llm__position_row(const llm__attention_arguments *a, int sequence, int kv_head, int p) {
    int64_t block = a->block_tables[(int64_t)sequence * a->counts[3] + p / a->block_size];
    return (block * a->n_kv_heads + kv_head) * a->block_size + p % a->block_size;
}

/* blockIdx.x: the head; y: the token */
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
            __syncthreads(); /* all have read the scores before the next tile's are written */
        }
        float *out = a.out + (token * a.n_heads + head) * a.head_dim;
        for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x) out[i] = sums[i] / total;
    }
}

static llm__attention_arguments llm__attention_of(const llm__cuda *cuda, const llm_attention_shape *shape, const float *q,
                                                  const llm_cache *cache, int layer, float *out) {
    llm__attention_arguments a;
    a.positions = cuda->batch.positions;
    a.sequence_of = cuda->batch.sequence_of;
    a.block_tables = cuda->batch.block_tables;
    a.counts = cuda->batch.counts;
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
    return a;
}

static void llm__cuda_plain_attention(llm__cuda *cuda, const llm__attention_arguments *a) {
    dim3 grid(a->n_heads, llm__grid(cuda->batch.n_tokens, 65535));
    LLM_LAUNCH(llm__plain_attention_kernel, grid, dim3(128), (size_t)a->head_dim * sizeof(float), cuda->stream, *a,
               cuda->batch.n_tokens);
    llm__cuda_launched(cuda, "attention");
}

static void llm__cuda_attention(void *context, const llm_batch *batch, const llm_attention_shape *shape, const float *q,
                                const llm_cache *cache, int layer, float *out) {
    llm__cuda *cuda = (llm__cuda *)context;
    (void)batch;
    llm__attention_arguments a = llm__attention_of(cuda, shape, q, cache, layer, out);
    llm__cuda_plain_attention(cuda, &a);
}

/* =====================================================================================
 * [7] Sampling
 * ================================================================================== */

/* =====================================================================================
 * [8] Graphs
 * ================================================================================== */

/* =====================================================================================
 * [9] The backend
 * ================================================================================== */

static void llm__cuda_destroy(llm_backend *backend) {
    llm__cuda *cuda = (llm__cuda *)backend->context;
    if (cuda->stream) cudaStreamSynchronize(cuda->stream);
    llm__stages_free(cuda);
    cudaFreeHost(cuda->batch_host);
    cudaFree(cuda->batch_device);
    if (cuda->stream) cudaStreamDestroy(cuda->stream);
    cudaGetLastError();
    free(cuda);
}

/* Find the GPU, or say what is missing. */
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
    b->reserve = llm__cuda_reserve;
    b->begin_step = llm__cuda_begin_step;
    b->end_step = llm__cuda_end_step;
    b->sync = llm__cuda_sync;
    b->embed = llm__cuda_embed;
    b->rope_angles = llm__cuda_rope_angles;
    b->rmsnorm = llm__cuda_rmsnorm;
    b->matmul = llm__cuda_matmul;
    b->rope_and_store = llm__cuda_rope_and_store;
    b->attention = llm__cuda_attention;
    b->swiglu = llm__cuda_swiglu;
    b->gather_rows = llm__cuda_gather_rows;
    b->copy_blocks = llm__cuda_copy_blocks;
    b->state = llm__cuda_state;
    b->destroy = llm__cuda_destroy;
    cuda->options = options ? *options : llm_gpu_defaults();
    snprintf(cuda->device_name, sizeof cuda->device_name, "GPU %d", cuda->options.device);
    if (llm__cuda_find(cuda, err) && llm__cuda_check(cuda, cudaSetDevice(cuda->device), "choosing the GPU", err) &&
        llm__cuda_check(cuda, cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking), "creating a stream", err))
        return b;
    llm__cuda_destroy(b);
    return NULL;
}
