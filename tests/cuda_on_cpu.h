/* cuda_on_cpu.h - enough of CUDA to compile llm.cu as plain C++17 and to run its kernels on the
 * CPU, with no GPU and no CUDA Toolkit.
 *
 * llm.cu includes this file instead of CUDA's headers where LLM_EMULATED is defined;
 * cuda_on_cpu.cpp is linked with it. The emulator is made to find mistakes, not for speed:
 *
 *   - Each thread of a block is a coroutine. It runs until it ends or must wait: at __syncthreads
 *     for its block; at a shuffle, vote, fragment load or matrix product for the other lanes of its
 *     warp. LLM_EMU_ORDER=forward|reverse|random:SEED sets the order in which waiting threads, and
 *     blocks, continue. A kernel without a race gives the same bits in every order.
 *   - It is a fault if a thread never reaches a barrier of its block, if a lane is missing from a
 *     warp operation, or if lanes wait for each other at different places. A fault names file,
 *     line, kernel, block and thread.
 *   - Shared memory is all ones (NaN, -1) when a block starts, with a guarded gap after each array.
 *     Global memory is all ones after cudaMalloc. The address sanitizer detects every access
 *     outside of either, and any access of the host to device memory.
 *   - A cp.async writes its data at the wait that covers it, a bulk copy when a thread waits at its
 *     mbarrier. Until then the destination holds all ones. So do the sums of a wgmma, which runs at
 *     its wait.
 *   - It is a fault if a thread waits for an mbarrier's phase out of turn, or for other bytes than
 *     are copied; if wgmma reads what threads wrote without a fence; and if the warps of a
 *     warpgroup issue different wgmmas.
 *   - Work queued on a stream runs only when the host waits for it, so a missing wait shows.
 *
 * After a fault the device is lost, as a GPU would be: every call gives cudaErrorLaunchFailure,
 * and cudaGetErrorString describes the fault. With LLM_EMU_TRAP=1, a debugger stops there. Other
 * settings: LLM_EMU_MEMORY (bytes), LLM_EMU_SHARED (most bytes per block) and LLM_EMU_PROCESSORS
 * (multiprocessors). emulator.h has more, for tests.
 *
 * Differences from a GPU: blocks run one after the other, so a block cannot wait for another; a
 * matrix product adds in f32 in the order of k (a GPU's order and rounding are undocumented);
 * __expf and similar functions are libm's. */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

/* The caller's file and line, as default arguments. */
#define EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* ---- Vector types ----------------------------------------------------------------------- */

#define EMU_VECTORS(T, name, align2, align4)                           \
    struct name##1 {                                                   \
        T x;                                                           \
    };                                                                 \
    struct __align__(align2) name##2 {                                 \
        T x, y;                                                        \
    };                                                                 \
    struct name##3 {                                                   \
        T x, y, z;                                                     \
    };                                                                 \
    struct __align__(align4) name##4 {                                 \
        T x, y, z, w;                                                  \
    };                                                                 \
    inline name##1 make_##name##1(T x) { return {x}; }                 \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(signed char, char, 2, 4)
EMU_VECTORS(unsigned char, uchar, 2, 4)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(unsigned short, ushort, 4, 8)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(unsigned, uint, 8, 16)
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16, 16)
EMU_VECTORS(double, double, 16, 16)
#undef EMU_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

/* The indices of the running thread, set whenever it resumes. */
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

/* ---- The runtime's types --------------------------------------------------------------- */

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevicePointer = 17,
    cudaErrorInsufficientDriver = 35,
    cudaErrorDevicesUnavailable = 46,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorECCUncorrectable = 214,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorLaunchTimeout = 702,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorUnknown = 999
} cudaError_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum {
    cudaSharedmemCarveoutDefault = -1, cudaSharedmemCarveoutMaxL1 = 0,
    cudaSharedmemCarveoutMaxShared = 100
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrIntegrated = 18,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum {
    cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
    cudaHostAllocWriteCombined = 4
};
enum {
    cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2,
    cudaHostRegisterReadOnly = 8
};

typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;
typedef struct emu_graph *cudaGraph_t;
typedef struct emu_graph_exec *cudaGraphExec_t;
typedef void (*cudaHostFn_t)(void *user);

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock,
        maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3];
    int major, minor, multiProcessorCount, l2CacheSize, memoryBusWidth, integrated, ECCEnabled,
        concurrentKernels, asyncEngineCount;
    int pciDomainID, pciBusID, pciDeviceID;
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};

/* ---- The runtime's functions ------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceReset(void);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);

cudaError_t cudaMalloc(void **device, size_t bytes);
cudaError_t cudaFree(void *device);
cudaError_t cudaMallocAsync(void **device, size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void *device, cudaStream_t stream);
cudaError_t cudaHostAlloc(void **host, size_t bytes, unsigned flags);
cudaError_t cudaMallocHost(void **host, size_t bytes);
cudaError_t cudaFreeHost(void *host);
cudaError_t cudaHostRegister(void *host, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *host);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = 0);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream = 0);
cudaError_t cudaMemset(void *device, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *device, int value, size_t bytes, cudaStream_t stream = 0);
template <class T> inline cudaError_t cudaMalloc(T **device, size_t bytes) {
    return cudaMalloc((void **)device, bytes);
}
template <class T> inline cudaError_t cudaHostAlloc(T **host, size_t bytes, unsigned flags) {
    return cudaHostAlloc((void **)host, bytes, flags);
}
template <class T> inline cudaError_t cudaMallocHost(T **host, size_t bytes) {
    return cudaMallocHost((void **)host, bytes);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags = 0);
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

/* ---- Launches ----------------------------------------------------------------------------- */

namespace emu {

struct launch { /* a kernel launch: the function that runs in each thread, and its arguments */
    const char *name;
    const void *function;
    dim3 grid, block;
    size_t shared_bytes;
    void (*run)(const void *arguments);
    void *arguments;
    void (*destroy)(void *arguments);
    bool early; /* every thread must call llm__wait_for_last */
};
void queue_launch(const launch &l, cudaStream_t stream); /* takes ownership of the arguments */

cudaError_t set_attribute(const void *function, cudaFuncAttribute attribute, int value);
cudaError_t get_attributes(cudaFuncAttributes *attributes, const void *function);

template <class... P> struct call {
    void (*function)(P...);
    std::tuple<typename std::remove_cv<P>::type...> arguments;
    static void run(const void *self) {
        const call *c = (const call *)self;
        std::apply(c->function, c->arguments);
    }
    static void destroy(void *self) { delete (call *)self; }
};

template <class... P, class... A>
inline void enqueue(bool early, const char *name, void (*function)(P...), dim3 grid, dim3 block,
                    size_t shared_bytes, cudaStream_t stream, A &&...arguments) {
    typedef call<P...> kernel_call;
    kernel_call *c = new kernel_call{function, {static_cast<P>(arguments)...}};
    queue_launch({name, (const void *)function, grid, block, shared_bytes, kernel_call::run, c,
                  kernel_call::destroy, early},
                 stream);
}

} // namespace emu

#define LLM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    emu::enqueue(false, #kernel, kernel, grid, block, shared_bytes, stream, ##__VA_ARGS__)
/* Here no kernel begins before the previous one has ended, but the emulator checks that all threads
 * wait for the previous kernel. */
#define LLM_LAUNCH_EARLY(cuda, kernel, grid, block, shared_bytes, ...) \
    emu::enqueue(true, #kernel, kernel, grid, block, shared_bytes, (cuda)->stream, ##__VA_ARGS__)
void llm__wait_for_last();
inline void llm__let_next_begin() {}

template <class... P>
inline cudaError_t cudaFuncSetAttribute(void (*f)(P...), cudaFuncAttribute attribute, int value) {
    return emu::set_attribute((const void *)f, attribute, value);
}
inline cudaError_t cudaFuncSetAttribute(const void *f, cudaFuncAttribute attribute, int value) {
    return emu::set_attribute(f, attribute, value);
}
template <class... P>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*f)(P...)) {
    return emu::get_attributes(attributes, (const void *)f);
}
template <class F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F, int block_size,
                                                                 size_t shared_bytes) {
    size_t by_shared = shared_bytes ? 100 * 1024 / shared_bytes : 16;
    size_t by_threads = block_size > 0 ? (size_t)(1024 / block_size) : 0;
    *blocks = (int)(by_shared < by_threads ? by_shared : by_threads);
    return cudaSuccess;
}

/* ---- Shared memory -------------------------------------------------------------------------- */

namespace emu {
/* The running block's array for this declaration. Each declaration has its own address `site`. */
void *shared(const void *site, size_t bytes, size_t alignment, const char *name, const char *file,
             int line);
void *dynamic_shared();
size_t dynamic_shared_bytes();
} // namespace emu

/* Declare type name[count] in the block's shared memory. */
#define LLM_SHARED(type, name, count)                                                          \
    static const char name##_site = 0;                                                         \
    type(&name)[count] = *(type(*)[count])emu::shared(&name##_site, sizeof(type) * (count),    \
                                                      alignof(type) > 16 ? alignof(type) : 16, \
                                                      #name, __FILE__, __LINE__)
/* Declare type *name, the shared memory that the launch asked for. */
#define LLM_DYNAMIC_SHARED(type, name) type *name = (type *)emu::dynamic_shared()

/* ---- Barriers, warps ------------------------------------------------------------------------- */

namespace emu {

enum block_kind { BARRIER, BARRIER_COUNT, BARRIER_AND, BARRIER_OR };
int block_barrier(block_kind kind, int predicate, const char *file, int line);

enum warp_kind {
    SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, MATCH_ANY, MATCH_ALL, REDUCE_ADD,
    REDUCE_MIN, REDUCE_MAX, REDUCE_MIN_SIGNED, REDUCE_MAX_SIGNED, REDUCE_AND, REDUCE_OR,
    REDUCE_XOR, LDMATRIX_1, LDMATRIX_2, LDMATRIX_4, LDMATRIX_1_TRANS, LDMATRIX_2_TRANS,
    LDMATRIX_4_TRANS, MMA_F16, MMA_BF16, MMA_S8, WGMMA_WAIT
};
/* one lane's part in a warp operation, and the place for its result */
struct warp_operation {
    warp_kind kind;
    unsigned mask;
    int lane, width;      /* shuffle: the lane to read, or the distance; wait: groups left */
    size_t bytes;         /* size of a shuffled value */
    const void *in, *in2;
    void *out;
    const char *file;
    int line;
};
/* returns when all lanes of the mask have called it */
void run_warp_operation(const warp_operation &operation);

template <class T>
inline T shuffle(warp_kind kind, unsigned mask, T value, int lane, int width, const char *file,
                 int line) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 16,
                  "a value that a warp can exchange");
    T result = value;
    run_warp_operation({kind, mask, lane, width, sizeof(T), &value, nullptr, &result, file, line});
    return result;
}
inline unsigned warp_u32(warp_kind kind, unsigned mask, unsigned value, const char *file,
                         int line) {
    unsigned result = 0;
    run_warp_operation({kind, mask, 0, 32, 4, &value, nullptr, &result, file, line});
    return result;
}
inline unsigned long long low_bits(const void *value, size_t bytes) {
    unsigned long long bits = 0;
    memcpy(&bits, value, bytes);
    return bits;
}

} // namespace emu

inline void __syncthreads(EMU_HERE) { emu::block_barrier(emu::BARRIER, 0, file, line); }
inline int __syncthreads_count(int p, EMU_HERE) {
    return emu::block_barrier(emu::BARRIER_COUNT, p, file, line);
}
inline int __syncthreads_and(int p, EMU_HERE) {
    return emu::block_barrier(emu::BARRIER_AND, p, file, line);
}
inline int __syncthreads_or(int p, EMU_HERE) {
    return emu::block_barrier(emu::BARRIER_OR, p, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_HERE) {
    emu::run_warp_operation({emu::SYNC, mask, 0, 32, 0, 0, 0, 0, file, line});
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_HERE) {
    return emu::shuffle(emu::SHUFFLE, mask, value, lane, width, file, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, EMU_HERE) {
    return emu::shuffle(emu::SHUFFLE_UP, mask, value, (int)distance, width, file, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, EMU_HERE) {
    return emu::shuffle(emu::SHUFFLE_DOWN, mask, value, (int)distance, width, file, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMU_HERE) {
    return emu::shuffle(emu::SHUFFLE_XOR, mask, value, lane_mask, width, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int p, EMU_HERE) {
    return emu::warp_u32(emu::BALLOT, mask, p != 0, file, line);
}
inline int __any_sync(unsigned mask, int p, EMU_HERE) {
    return emu::warp_u32(emu::BALLOT, mask, p != 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int p, EMU_HERE) {
    return emu::warp_u32(emu::BALLOT, mask, p != 0, file, line) == mask;
}
template <class T> inline unsigned __match_any_sync(unsigned mask, T value, EMU_HERE) {
    unsigned long long bits = emu::low_bits(&value, sizeof value);
    unsigned result = 0;
    emu::run_warp_operation({emu::MATCH_ANY, mask, 0, 32, 8, &bits, nullptr, &result, file, line});
    return result;
}
template <class T> inline unsigned __match_all_sync(unsigned mask, T value, int *all, EMU_HERE) {
    unsigned long long bits = emu::low_bits(&value, sizeof value);
    unsigned result = 0;
    emu::run_warp_operation({emu::MATCH_ALL, mask, 0, 32, 8, &bits, nullptr, &result, file, line});
    *all = result != 0;
    return result;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, EMU_HERE) {
    return emu::warp_u32(emu::REDUCE_ADD, mask, v, file, line);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, EMU_HERE) {
    return emu::warp_u32(emu::REDUCE_MIN, mask, v, file, line);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, EMU_HERE) {
    return emu::warp_u32(emu::REDUCE_MAX, mask, v, file, line);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v, EMU_HERE) {
    return emu::warp_u32(emu::REDUCE_AND, mask, v, file, line);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v, EMU_HERE) {
    return emu::warp_u32(emu::REDUCE_OR, mask, v, file, line);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v, EMU_HERE) {
    return emu::warp_u32(emu::REDUCE_XOR, mask, v, file, line);
}
inline int __reduce_add_sync(unsigned mask, int v, EMU_HERE) {
    return (int)emu::warp_u32(emu::REDUCE_ADD, mask, (unsigned)v, file, line);
}
inline int __reduce_min_sync(unsigned mask, int v, EMU_HERE) {
    return (int)emu::warp_u32(emu::REDUCE_MIN_SIGNED, mask, (unsigned)v, file, line);
}
inline int __reduce_max_sync(unsigned mask, int v, EMU_HERE) {
    return (int)emu::warp_u32(emu::REDUCE_MAX_SIGNED, mask, (unsigned)v, file, line);
}

/* ---- The instructions that llm.cu names, in plain C++ ---------------------------------------- */

/* d (16, 8) += a (16, 16) times b (16, 8), spread over the 32 lanes as PTX's mma.m16n8k16
 * defines. */
inline void llm__mma_m16n8k16_f16(float d[4], const uint32_t a[4], const uint32_t b[2], EMU_HERE) {
    emu::run_warp_operation({emu::MMA_F16, 0xffffffffu, 0, 32, 0, a, b, d, file, line});
}
inline void llm__mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], EMU_HERE) {
    emu::run_warp_operation({emu::MMA_BF16, 0xffffffffu, 0, 32, 0, a, b, d, file, line});
}
/* d (16, 8) += a (16, 32) times b (32, 8), in int8. */
inline void llm__mma_m16n8k32_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2], EMU_HERE) {
    emu::run_warp_operation({emu::MMA_S8, 0xffffffffu, 0, 32, 0, a, b, d, file, line});
}
/* Load 8 x 8 matrices of 16-bit values from shared memory. Lane 8 m + i gives the address of row i
 * of matrix m. */
inline void llm__ldmatrix_x1(uint32_t r[1], const void *row, EMU_HERE) {
    emu::run_warp_operation({emu::LDMATRIX_1, 0xffffffffu, 0, 32, 0, row, nullptr, r, file, line});
}
inline void llm__ldmatrix_x2(uint32_t r[2], const void *row, EMU_HERE) {
    emu::run_warp_operation({emu::LDMATRIX_2, 0xffffffffu, 0, 32, 0, row, nullptr, r, file, line});
}
inline void llm__ldmatrix_x4(uint32_t r[4], const void *row, EMU_HERE) {
    emu::run_warp_operation({emu::LDMATRIX_4, 0xffffffffu, 0, 32, 0, row, nullptr, r, file, line});
}
inline void llm__ldmatrix_x1_trans(uint32_t r[1], const void *row, EMU_HERE) {
    emu::run_warp_operation(
        {emu::LDMATRIX_1_TRANS, 0xffffffffu, 0, 32, 0, row, nullptr, r, file, line});
}
inline void llm__ldmatrix_x2_trans(uint32_t r[2], const void *row, EMU_HERE) {
    emu::run_warp_operation(
        {emu::LDMATRIX_2_TRANS, 0xffffffffu, 0, 32, 0, row, nullptr, r, file, line});
}
inline void llm__ldmatrix_x4_trans(uint32_t r[4], const void *row, EMU_HERE) {
    emu::run_warp_operation(
        {emu::LDMATRIX_4_TRANS, 0xffffffffu, 0, 32, 0, row, nullptr, r, file, line});
}

namespace emu {
void copy_async(void *shared, const void *global, size_t bytes, bool valid, const char *file,
                int line);
void copy_commit();
void copy_wait(int groups_left);
} // namespace emu
/* Copy 16 bytes from global to shared memory (zeros if not valid), at any time before the wait that
 * covers their group. */
inline void llm__cp_async_16(void *shared, const void *global, bool valid = true, EMU_HERE) {
    emu::copy_async(shared, global, 16, valid, file, line);
}
inline void llm__cp_async_8(void *shared, const void *global, bool valid = true, EMU_HERE) {
    emu::copy_async(shared, global, 8, valid, file, line);
}
inline void llm__cp_async_4(void *shared, const void *global, bool valid = true, EMU_HERE) {
    emu::copy_async(shared, global, 4, valid, file, line);
}
inline void llm__cp_async_commit() { emu::copy_commit(); }
template <int N> inline void llm__cp_async_wait() { emu::copy_wait(N); }

namespace emu {
void mbarrier_init(uint64_t *barrier, int count, const char *file, int line);
void mbarrier_arrive(uint64_t *barrier, uint32_t bytes, const char *file, int line);
void mbarrier_wait(uint64_t *barrier, unsigned parity, const char *file, int line);
void copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *barrier,
               const char *file, int line);
void fence_async();
void wgmma(float *d, const uint32_t a[4], uint64_t b, int columns, bool transposed,
           const char *file, int line);
void wgmma_fence();
void wgmma_commit();
} // namespace emu
/* A phase of an mbarrier ends when `count` threads have arrived and all bytes that they expect have
 * been copied; phases have parity 0, 1, 0, ... */
inline void llm__mbarrier_init(uint64_t *barrier, int count, EMU_HERE) {
    emu::mbarrier_init(barrier, count, file, line);
}
inline void llm__mbarrier_arrive(uint64_t *barrier, uint32_t bytes = 0, EMU_HERE) {
    emu::mbarrier_arrive(barrier, bytes, file, line);
}
inline void llm__mbarrier_wait(uint64_t *barrier, int parity, EMU_HERE) {
    emu::mbarrier_wait(barrier, (unsigned)parity, file, line);
}
/* Copy from global to shared memory at any time before the barrier's phase ends. */
inline void llm__copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *barrier,
                           EMU_HERE) {
    emu::copy_bulk(shared, global, bytes, barrier, file, line);
}
inline void llm__fence_async() { emu::fence_async(); }
/* d (64, 128) += a (64, 16), in registers, times b (16, 128), in shared memory, at any time before
 * the wait that covers it. */
template <int transposed>
inline void llm__wgmma_m64n128k16(float *d, const uint32_t a[4], uint64_t b, EMU_HERE) {
    emu::wgmma(d, a, b, 128, transposed, file, line);
}
/* On a GPU, the compiler must have these registers ready. */
template <class A> inline void llm__wgmma_fence(A &) { emu::wgmma_fence(); }
inline void llm__wgmma_commit() { emu::wgmma_commit(); }
template <int N, class Sums> inline void llm__wgmma_wait(Sums &, EMU_HERE) {
    emu::run_warp_operation({emu::WGMMA_WAIT, 0xffffffffu, N, 32, 0, 0, 0, 0, file, line});
}

inline uint32_t llm__and_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }
/* Four of the eight bytes of b:a, selected by the selector's nibbles (bit 3: replicate the byte's
 * sign). */
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t choice = selector >> 4 * i & 15,
                 byte = (uint32_t)(bytes >> 8 * (choice & 7)) & 255;
        if (choice & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
    return r;
}
template <class T> inline T llm__keep(T x) { return x; }

/* ---- Atomics: the threads take turns, so plain code is atomic -------------------------------- */

extern uint64_t emu_atomic_increments; /* calls of atomicInc so far */
template <class T> inline T emu_exchange(T *p, T value) {
    T old = *p;
    *p = value;
    return old;
}
template <class T, class V> inline T atomicAdd(T *p, V v) {
    return emu_exchange(p, (T)(*p + (T)v));
}
template <class T, class V> inline T atomicSub(T *p, V v) {
    return emu_exchange(p, (T)(*p - (T)v));
}
template <class T, class V> inline T atomicMax(T *p, V v) {
    return emu_exchange(p, *p > (T)v ? *p : (T)v);
}
template <class T, class V> inline T atomicMin(T *p, V v) {
    return emu_exchange(p, *p < (T)v ? *p : (T)v);
}
template <class T, class V> inline T atomicAnd(T *p, V v) {
    return emu_exchange(p, (T)(*p & (T)v));
}
template <class T, class V> inline T atomicOr(T *p, V v) { return emu_exchange(p, (T)(*p | (T)v)); }
template <class T, class V> inline T atomicXor(T *p, V v) {
    return emu_exchange(p, (T)(*p ^ (T)v));
}
template <class T, class V> inline T atomicExch(T *p, V v) { return emu_exchange(p, (T)v); }
template <class T, class C, class V> inline T atomicCAS(T *p, C compare, V v) {
    return emu_exchange(p, *p == (T)compare ? (T)v : *p);
}
inline unsigned atomicInc(unsigned *p, unsigned last) {
    emu_atomic_increments++;
    return emu_exchange(p, *p >= last ? 0u : *p + 1);
}

/* ---- Arithmetic ------------------------------------------------------------------------------ */

template <class To, class From> inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }

inline float emu_rsqrtf(float x) { return 1.0f / sqrtf(x); }
/* a macro, since newer C libraries have a function with this name */
#define rsqrtf(x) emu_rsqrtf(x)
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline void __sincosf(float x, float *s, float *c) { *s = sinf(x), *c = cosf(x); }
inline float __saturatef(float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
/* a real call, so the compiler cannot fuse it into an fma */
__attribute__((noinline)) inline float __fmul_rn(float x, float y) { return x * y; }
__attribute__((noinline)) inline float __fadd_rn(float x, float y) { return x + y; }
__attribute__((noinline)) inline float __fsub_rn(float x, float y) { return x - y; }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_ru(float x) { return (int)ceilf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
inline unsigned __umulhi(unsigned x, unsigned y) {
    return (unsigned)((unsigned long long)x * y >> 32);
}
inline int __mulhi(int x, int y) { return (int)((long long)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    __extension__ typedef unsigned __int128 wide;
    return (unsigned long long)((wide)x * y >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline int __dp4a(int a, int b, int c) { /* c plus four int8 products */
    for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; i++) c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    return c;
}
inline unsigned __vsub4(unsigned a, unsigned b) { /* four bytes, with wrap-around */
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) r |= (((a >> i & 255) - (b >> i & 255)) & 255) << i;
    return r;
}
inline unsigned __vsubss4(unsigned a, unsigned b) { /* four signed bytes, saturating */
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) {
        int d = (int)(int8_t)(a >> i) - (int)(int8_t)(b >> i);
        r |= (unsigned)((d > 127 ? 127 : d < -128 ? -128 : d) & 255) << i;
    }
    return r;
}

#define EMU_MIN_MAX(T)                               \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

/* Loads and stores with cache hints, which have no effect here. */
template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline T __ldca(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldlu(const T *p) { return *p; }
template <class T> inline T __ldcv(const T *p) { return *p; }
template <class T> inline void __stcg(T *p, T value) { *p = value; }
template <class T> inline void __stcs(T *p, T value) { *p = value; }
template <class T> inline void __stwb(T *p, T value) { *p = value; }
template <class T> inline void __stwt(T *p, T value) { *p = value; }
size_t __cvta_generic_to_shared(const void *p); /* the offset in the block's shared memory */
inline uint32_t llm__shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
long long clock64();
void __trap(EMU_HERE);
inline void __nanosleep(unsigned) {}

/* ---- Half precision -------------------------------------------------------------------------- */

namespace emu {

/* The bits of x, rounded to nearest even, with `fraction` bits after the point and exponents from
 * `lowest` to `highest`. */
inline uint16_t round_to(double x, int fraction, int lowest, int highest) {
    uint64_t bits = emu_bits<uint64_t>(x);
    unsigned sign = (unsigned)(bits >> 63) << 15, infinity = (unsigned)(highest - lowest + 2)
                                                             << fraction;
    int exponent = (int)(bits >> 52 & 2047) - 1023;
    uint64_t mantissa = bits & ((1ull << 52) - 1);
    /* CUDA's conversion yields a single NaN */
    if (exponent == 1024) return (uint16_t)(mantissa ? 0x7fffu : sign | infinity);
    if (exponent == -1023) return (uint16_t)sign;
    mantissa |= 1ull << 52;
    int shift = 52 - fraction + (exponent < lowest ? lowest - exponent : 0);
    if (shift > 54) return (uint16_t)sign;
    uint64_t kept = mantissa >> shift, rest = mantissa & ((1ull << shift) - 1),
             half = 1ull << (shift - 1);
    if (rest > half || (rest == half && (kept & 1))) kept++;
    uint64_t result = exponent < lowest ? kept : kept + ((uint64_t)(exponent - lowest) << fraction);
    return (uint16_t)(sign | (result >= infinity ? infinity : (unsigned)result));
}
inline uint16_t to_f16(double x) { return round_to(x, 10, -14, 15); }
inline uint16_t to_bf16(double x) { return round_to(x, 7, -126, 127); }
inline float from_bf16(uint16_t bits) { return emu_bits<float>((uint32_t)bits << 16); }
inline float from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31,
             fraction = bits & 1023;
    if (exponent == 31) return emu_bits<float>(sign | 0x7f800000 | fraction << 13);
    if (exponent) return emu_bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
    return emu_bits<float>(sign | emu_bits<uint32_t>((float)fraction * 5.9604644775390625e-8f));
}

} // namespace emu

struct __half_raw { unsigned short x; };
struct __nv_bfloat16_raw { unsigned short x; };

/* A 16-bit floating-point type and its pair, with the functions of CUDA's headers. */
#define EMU_HALF(half, half2, raw, encode, decode)                                          \
    struct __align__(2) half {                                                              \
        unsigned short __x;                                                                 \
        half() = default;                                                                   \
        half(raw r) : __x(r.x) {}                                                           \
        half(float f) : __x(encode(f)) {}                                                   \
        half(double f) : __x(encode(f)) {}                                                  \
        half(int f) : __x(encode(f)) {}                                                     \
        operator float() const { return decode(__x); }                                      \
        operator raw() const { return {__x}; }                                              \
    };                                                                                      \
    struct __align__(4) half2 {                                                             \
        half x, y;                                                                          \
        half2() = default;                                                                  \
        half2(half a, half b) : x(a), y(b) {}                                               \
    };                                                                                      \
    inline half __hadd(half a, half b) { return half((double)(float)a + (float)b); }        \
    inline half __hsub(half a, half b) { return half((double)(float)a - (float)b); }        \
    inline half __hmul(half a, half b) { return half((double)(float)a * (float)b); }        \
    inline half __hdiv(half a, half b) { return half((float)a / (float)b); }                \
    inline half __hfma(half a, half b, half c) {                                            \
        return half((double)(float)a * (float)b + (float)c);                                \
    }                                                                                       \
    inline half __hneg(half a) { return half(-(float)a); }                                  \
    inline half __habs(half a) { return half(fabsf((float)a)); }                            \
    inline half __hmax(half a, half b) { return half(fmaxf((float)a, (float)b)); }          \
    inline half __hmin(half a, half b) { return half(fminf((float)a, (float)b)); }          \
    inline bool __hgt(half a, half b) { return (float)a > (float)b; }                       \
    inline bool __hlt(half a, half b) { return (float)a < (float)b; }                       \
    inline bool __heq(half a, half b) { return (float)a == (float)b; }                      \
    inline bool __hisnan(half a) { return isnan((float)a) != 0; }                           \
    inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; } \
    inline half2 __hsub2(half2 a, half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; } \
    inline half2 __hmul2(half2 a, half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; } \
    inline half2 __hfma2(half2 a, half2 b, half2 c) {                                       \
        return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                              \
    }                                                                                       \
    inline half2 __hneg2(half2 a) { return {__hneg(a.x), __hneg(a.y)}; }                    \
    inline half2 __hmax2(half2 a, half2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; } \
    inline half2 __hmin2(half2 a, half2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; } \
    inline float __low2float(half2 a) { return (float)a.x; }                                \
    inline float __high2float(half2 a) { return (float)a.y; }
EMU_HALF(__half, __half2, __half_raw, emu::to_f16, emu::from_f16)
EMU_HALF(__nv_bfloat16, __nv_bfloat162, __nv_bfloat16_raw, emu::to_bf16, emu::from_bf16)
#undef EMU_HALF
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __double2half(double x) { return __half(x); }
inline float __half2float(__half x) { return (float)x; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline float2 __half22float2(__half2 v) { return {(float)v.x, (float)v.y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __low2half2(__half2 v) { return {v.x, v.x}; }
inline __half2 __high2half2(__half2 v) { return {v.y, v.y}; }
inline unsigned short __half_as_ushort(__half x) { return x.__x; }
inline __half __ushort_as_half(unsigned short bits) { return __half(__half_raw{bits}); }
inline __half __int2half_rn(int x) { return __half(x); }

inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return (float)x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) {
    return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)};
}
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {(float)v.x, (float)v.y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.__x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    return __nv_bfloat16(__nv_bfloat16_raw{bits});
}

#endif
