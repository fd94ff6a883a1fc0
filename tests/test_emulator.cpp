/* The emulated GPU (cuda_on_cpu.h) detects each kind of mistake. Small kernels contain one mistake
 * each, next to a correct version. Other tests compare fragments, half precision, streams and
 * graphs with a GPU's specified behaviour.
 *
 *  make build/test_emulator && build/test_emulator */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>
extern "C" {
#include <cmocka.h>
}

#include "counted.h"
#include "cuda_on_cpu.h"
#include "emulator.h"
#include "../llm.h"
#include "../models/quantize.h"

#if defined(__SANITIZE_ADDRESS__)
#define ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZER
#endif
#endif

static const char *const orders[] = {"forward", "reverse", "random:1", "random:2"};
enum { ORDERS = 4, N = 256 };

static cudaStream_t stream;
static float *numbers; /* device (N): 0, 1, 2, ... */
static float *result;  /* device (N) */

static int set_up(void **) {
    float host[N];
    for (int i = 0; i < N; i++) host[i] = (float)i;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) ||
        cudaMalloc(&numbers, sizeof host) || cudaMalloc(&result, sizeof host))
        return 1;
    return cudaMemcpyAsync(numbers, host, sizeof host, cudaMemcpyHostToDevice, stream) ||
           cudaStreamSynchronize(stream);
}

static int tear_down(void **) {
    emulator_order("forward");
    emulator_recover();
    cudaFree(numbers), cudaFree(result), cudaStreamDestroy(stream);
    emulator_counts c = emulator_counted();
    return c.live_allocations || c.live_pinned || c.live_handles;
}

/* Clear `result`, run the kernel in this order and copy the result to `out`. A fault remains for
 * the caller to examine. */
static cudaError_t run(int order, float out[N], int threads, size_t shared,
                       void (*kernel)(const float *, float *)) {
    emulator_order(orders[order]);
    assert_int_equal(cudaMemsetAsync(result, 0, N * sizeof(float), stream), cudaSuccess);
    LLM_LAUNCH(kernel, 1, threads, shared, stream, numbers, result);
    cudaError_t error = cudaGetLastError();
    if (!error) error = cudaStreamSynchronize(stream);
    if (!error)
        error = cudaMemcpyAsync(out, result, N * sizeof(float), cudaMemcpyDeviceToHost, stream);
    if (!error) error = cudaStreamSynchronize(stream);
    return error;
}

/* Whether the kernel gives expected(i) at each i, in every order. */
template <class F>
static bool gives(void (*kernel)(const float *, float *), F expected, size_t shared = 0) {
    for (int order = 0; order < ORDERS; order++) {
        float out[N];
        assert_int_equal(run(order, out, N, shared, kernel), cudaSuccess);
        for (int i = 0; i < N; i++)
            if (out[i] != expected(i)) return false;
    }
    return true;
}

/* Check that the kernel causes a fault, in every order, with these words in its message. */
static void assert_fault(void (*kernel)(const float *, float *), int line, const char *words,
                         int threads = N, size_t shared = 0) {
    for (int order = 0; order < ORDERS; order++) {
        float out[N];
        char place[64];
        snprintf(place, sizeof place, "test_emulator.cpp:%d: ", line);
        assert_int_equal(run(order, out, threads, shared, kernel), cudaErrorLaunchFailure);
        if (!strstr(emulator_fault(), words) || (line && !strstr(emulator_fault(), place)))
            fail_msg("the fault does not say \"%s%s\": %s", line ? place : "", words,
                     emulator_fault());
        assert_string_equal(cudaGetErrorString(cudaErrorLaunchFailure), emulator_fault());
        /* the device is lost until emulator_recover */
        assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
        emulator_recover();
        assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    }
}

/* ---- Barriers ---------------------------------------------------------------------------- */

template <bool barrier> static void reverse_kernel(const float *in, float *out) {
    LLM_SHARED(float, all, N);
    all[threadIdx.x] = in[threadIdx.x];
    if (barrier) __syncthreads();
    out[threadIdx.x] = all[N - 1 - threadIdx.x];
}

/* The same within a warp: each lane reads its neighbour's value. */
template <bool barrier> static void neighbour_kernel(const float *in, float *out) {
    LLM_SHARED(float, all, N);
    all[threadIdx.x] = in[threadIdx.x];
    if (barrier) __syncwarp();
    out[threadIdx.x] = all[threadIdx.x ^ 1];
}

/* Uses a buffer several times. The second barrier prevents a fast warp from overwriting values that
 * a slow one still reads. */
template <bool barrier> static void reuse_kernel(const float *in, float *out) {
    LLM_SHARED(float, all, N);
    float sum = 0;
    for (int round = 0; round < 3; round++) {
        all[threadIdx.x] = in[threadIdx.x] * (float)(round + 1);
        __syncthreads();
        sum += all[N - 1 - threadIdx.x];
        if (barrier) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

static void test_missing_barrier(void **) {
    auto reversed = [](int i) { return (float)(N - 1 - i); };
    assert_true(gives(reverse_kernel<true>, reversed));
    assert_false(gives(reverse_kernel<false>, reversed));
    auto neighbour = [](int i) { return (float)(i ^ 1); };
    assert_true(gives(neighbour_kernel<true>, neighbour));
    assert_false(gives(neighbour_kernel<false>, neighbour));
    auto six = [](int i) { return 6.0f * (float)(N - 1 - i); };
    assert_true(gives(reuse_kernel<true>, six));
    assert_false(gives(reuse_kernel<false>, six));
}

static int partial_line;
static void partial_barrier_kernel(const float *, float *) {
    partial_line = __LINE__ + 1;
    if (threadIdx.x < 100) __syncthreads();
}
static void left_early_kernel(const float *, float *) {
    if (threadIdx.x == 77) return;
    partial_line = __LINE__ + 1;
    __syncthreads();
}
static void two_places_kernel(const float *, float *) {
    if (threadIdx.x < 64) __syncthreads();
    else __syncthreads();
}

static void test_partial_barrier(void **) {
    float out[N];
    run(0, out, N, 0, partial_barrier_kernel); /* sets partial_line */
    emulator_recover();
    assert_fault(partial_barrier_kernel, partial_line,
                 "__syncthreads is not reached by all threads: thread (100, 0, 0), lane 4 of warp "
                 "3, has ended");
    run(0, out, N, 0, left_early_kernel);
    emulator_recover();
    assert_fault(left_early_kernel, partial_line,
                 "thread (77, 0, 0), lane 13 of warp 2, has ended");
    assert_fault(two_places_kernel, 0, "__syncthreads is not reached by all threads");
}

/* A kernel that may begin early must wait for the previous one in every thread. */
static void waiting_kernel(int without) {
    if ((int)threadIdx.x != without) llm__wait_for_last();
}

static void test_early_launch(void **) {
    const struct { cudaStream_t stream; } usual = {}, *context = &usual;
    for (int without = -1; without < 40; without += 20) {
        emulator_recover();
        LLM_LAUNCH_EARLY(context, waiting_kernel, dim3(2), dim3(32), 0, without);
        bool fine = cudaDeviceSynchronize() == cudaSuccess;
        assert_int_equal(fine, without != 19);
        if (!fine)
            assert_non_null(strstr(emulator_fault(),
                                   "without a call of llm__wait_for_last: thread (19, 0, 0)"));
    }
    emulator_recover();
}

static void count_kernel(const float *in, float *out) {
    int odd = (int)in[threadIdx.x] % 2;
    int count = __syncthreads_count(odd), all = __syncthreads_and(odd), any = __syncthreads_or(odd);
    out[threadIdx.x] = (float)(100 * count + 10 * all + any);
}

static void test_counting_barriers(void **) {
    assert_true(gives(count_kernel, [](int) { return 100.0f * N / 2 + 1; }));
}

/* ---- Warps ---------------------------------------------------------------------------------- */

/* Sum over a warp. With first = 8, each lane sums only its half of the warp. */
template <int first> static void warp_sum_kernel(const float *in, float *out) {
    float x = in[threadIdx.x];
    for (int other = first; other; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    out[threadIdx.x] = x;
}

static void shuffles_kernel(const float *in, float *out) {
    float x = in[threadIdx.x], lane = (float)(threadIdx.x % 32);
    float y = __shfl_sync(0xffffffffu, lane, 5), up = __shfl_up_sync(0xffffffffu, lane, 3),
          down = __shfl_down_sync(0xffffffffu, lane, 30);
    float part = __shfl_sync(0xffffffffu, lane, 1, 8), wrapped = __shfl_sync(0xffffffffu, lane, 33),
          xor8 = __shfl_xor_sync(0xffffffffu, lane, 3, 8);
    double wide = __shfl_sync(0xffffffffu, (double)x + 0.25, 31);
    unsigned ballot = __ballot_sync(0xffffffffu, (int)x & 1),
             same = __match_any_sync(0xffffffffu, (int)x / 4);
    bool right = y == 5 && up == (lane < 3 ? lane : lane - 3) &&
                 down == (lane < 2 ? lane + 30 : lane) && part == (float)((int)lane / 8 * 8 + 1) &&
                 wrapped == 1 && xor8 == (float)((int)lane ^ 3) &&
                 wide == (double)(x - lane + 31) + 0.25 && ballot == 0xaaaaaaaau &&
                 same == 15u << ((int)lane / 4 * 4) && __any_sync(0xffffffffu, lane == 7) &&
                 !__all_sync(0xffffffffu, lane == 7) &&
                 __reduce_add_sync(0xffffffffu, (unsigned)lane) == 496 &&
                 __reduce_max_sync(0xffffffffu, (int)lane - 40) == -9 &&
                 __reduce_min_sync(0xffffffffu, (int)lane - 40) == -40;
    /* the first half of a warp alone */
    if (threadIdx.x % 32 < 16)
        right = right && __shfl_xor_sync(0x0000ffffu, lane, 1) == (float)((int)lane ^ 1);
    out[threadIdx.x] = right;
}

static void missing_lane_kernel(const float *in, float *out) {
    if (threadIdx.x % 32 != 9) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 1);
}
static void out_of_mask_kernel(const float *in, float *out) {
    if (threadIdx.x % 32 < 8) out[threadIdx.x] = __shfl_sync(0xffu, in[threadIdx.x], 8);
}
static void not_in_mask_kernel(const float *in, float *out) {
    out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], 0);
}

static void test_warps(void **) {
    assert_true(gives(shuffles_kernel, [](int) { return 1.0f; }));
    auto sum = [](int i) { return (float)(32 * (i / 32 * 32) + 496); };
    assert_true(gives(warp_sum_kernel<16>, sum));
    assert_false(gives(warp_sum_kernel<8>, sum));
    assert_fault(missing_lane_kernel, 0, "is not reached by lane 9, which has ended");
    assert_fault(out_of_mask_kernel, 0, "reads lane 8, which is not in its mask 000000ff");
    assert_fault(not_in_mask_kernel, 0, "mask 0000ffff leaves it out");
    assert_fault(warp_sum_kernel<16>, 0, "lane 16, which the block does not have", 48);
}

/* ---- Shared memory --------------------------------------------------------------------------- */

template <int filled> static void uninitialised_kernel(const float *in, float *out) {
    LLM_SHARED(float, all, N);
    if (threadIdx.x < filled) all[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    float x = all[threadIdx.x];
    out[threadIdx.x] = x == x ? x : -1; /* NaN: never written */
}
static void past_the_end_kernel(const float *in, float *out) {
    LLM_SHARED(float, first, N);
    LLM_SHARED(float, second, N);
    second[threadIdx.x] = 0;
    first[threadIdx.x + 1] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = first[threadIdx.x];
}
static void past_the_dynamic_end_kernel(const float *in, float *out) {
    LLM_DYNAMIC_SHARED(float, all);
    all[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = all[N - 1 - threadIdx.x];
}
/* static and dynamic shared memory together */
static void both_shared_kernel(const float *in, float *out) {
    LLM_SHARED(float, own, N);
    LLM_DYNAMIC_SHARED(float, all);
    own[threadIdx.x] = all[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = own[threadIdx.x] + all[threadIdx.x];
}
static void past_global_kernel(const float *in, float *out) {
    out[threadIdx.x + 1] = in[threadIdx.x];
}
static void before_global_kernel(const float *in, float *out) {
    (out - 1)[threadIdx.x] = in[threadIdx.x];
}

/* Run the kernel in a child process, since the address sanitizer ends the process. */
static void assert_caught(void (*kernel)(const float *, float *), size_t shared,
                          const char *words) {
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        float out[N];
        if (!freopen("/dev/null", "w", stderr)) _exit(3);
        cudaError_t error = run(0, out, N, shared, kernel);
        _exit(error == cudaErrorLaunchFailure && strstr(emulator_fault(), words) ? 42 : 0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
#ifdef ADDRESS_SANITIZER
    assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) == 1);
#else
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 42);
#endif
}

static void test_memory_bounds(void **) {
    assert_true(gives(uninitialised_kernel<N>, [](int i) { return (float)i; }));
    assert_true(
        gives(uninitialised_kernel<N - 3>, [](int i) { return i < N - 3 ? (float)i : -1.0f; }));
    assert_caught(past_the_end_kernel, 0, "past the end of the shared array first");
    float out[N];
    assert_int_equal(run(0, out, N, N * sizeof(float), past_the_dynamic_end_kernel), cudaSuccess);
    assert_true(out[0] == N - 1);
    assert_caught(past_the_dynamic_end_kernel, N * sizeof(float) - 4,
                  "past the end of the dynamic shared memory");
    size_t beside = 48 * 1024 - N * sizeof(float);
    assert_int_equal(run(0, out, N, beside, both_shared_kernel), cudaSuccess);
    assert_int_equal(run(0, out, N, beside + 4, both_shared_kernel), cudaErrorLaunchFailure);
    assert_non_null(strstr(emulator_fault(), "without cudaFuncSetAttribute"));
    emulator_recover();
    assert_int_equal(cudaFuncSetAttribute(both_shared_kernel,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)beside + 4),
                     cudaSuccess);
    assert_int_equal(run(0, out, N, beside + 4, both_shared_kernel), cudaSuccess);
    assert_caught(past_global_kernel, 0, "past the end of an allocation of 1024 bytes");
    assert_caught(before_global_kernel, 0, "before an allocation of 1024 bytes");
    /* memory that was never written is NaN */
    float *fresh;
    assert_int_equal(cudaMalloc(&fresh, 4), cudaSuccess);
    assert_int_equal(cudaMemcpy(out, fresh, 4, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_true(out[0] != out[0]);
    /* copies must stay within an allocation */
    assert_int_equal(cudaMemcpy(fresh, out, 8, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(out, out + 4, 8, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    assert_int_equal(cudaMemset(fresh, 0, 5), cudaErrorInvalidValue);
    assert_int_equal(cudaFree((char *)fresh + 1), cudaErrorInvalidValue);
    assert_int_equal(cudaFree(fresh), cudaSuccess);
    cudaGetLastError();
}

/* ---- Asynchronous copies --------------------------------------------------------------------- */

/* Copy four pieces of 64 numbers through two buffers. Up to `left` groups may be pending when a
 * piece is read. */
template <int left, bool barrier> static void pipeline_kernel(const float *in, float *out) {
    LLM_SHARED(float, buffer, 128);
    auto fetch = [&](int piece) {
        if (threadIdx.x < 16 && piece < 4)
            llm__cp_async_16(buffer + piece % 2 * 64 + threadIdx.x * 4,
                             in + piece * 64 + threadIdx.x * 4);
        llm__cp_async_commit();
    };
    fetch(0);
    for (int piece = 0; piece < 4; piece++) {
        fetch(piece + 1);
        llm__cp_async_wait<left>();
        __syncthreads();
        if (threadIdx.x / 64 == 3)
            out[piece * 64 + threadIdx.x % 64] = buffer[piece % 2 * 64 + threadIdx.x % 64];
        if (barrier) __syncthreads();
    }
}
static void zero_fill_kernel(const float *in, float *out) {
    LLM_SHARED(float, buffer, N);
    if (threadIdx.x < N / 4)
        llm__cp_async_16(buffer + threadIdx.x * 4, in + threadIdx.x * 4, threadIdx.x % 2 == 0);
    llm__cp_async_commit();
    llm__cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = buffer[threadIdx.x];
}
static void misaligned_copy_kernel(const float *in, float *) {
    LLM_SHARED(float, buffer, N);
    llm__cp_async_16(buffer + 1, in);
}

static void test_asynchronous_copies(void **) {
    auto same = [](int i) { return (float)i; };
    assert_true(gives(pipeline_kernel<1, true>, same));
    assert_true(gives(pipeline_kernel<0, true>, same));
    /* a wait that does not cover the piece that is read */
    assert_false(gives(pipeline_kernel<2, true>, same));
    /* a buffer that is refilled while it is read */
    assert_false(gives(pipeline_kernel<1, false>, same));
    assert_true(gives(zero_fill_kernel, [](int i) { return i / 4 % 2 ? 0.0f : (float)i; }));
    assert_fault(misaligned_copy_kernel, 0, "no multiple");
}

/* ---- Hopper: bulk copies and wgmma ----------------------------------------------------------- */

enum bulk_mistake {
    BULK_FINE, BULK_NO_FENCE, BULK_NO_BARRIER, BULK_WRONG_PHASE, BULK_LESS_EXPECTED,
    BULK_MORE_EXPECTED, BULK_MISALIGNED, BULK_NO_WAIT, BULK_READ_WHILE_REFILLED, BULK_ARRIVE_TWICE,
    BULK_LEFT_AT_END
};

/* Thread 0 copies eight pieces of 32 numbers through two stages. Warp 1 writes them to `out`. */
template <bulk_mistake mistake> static void bulk_kernel(const float *in, float *out) {
    LLM_SHARED(uint64_t, full, 2);
    LLM_SHARED(uint64_t, empty, 2);
    LLM_DYNAMIC_SHARED(float, stages);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            llm__mbarrier_init(full + i, 1), llm__mbarrier_init(empty + i, 32);
        if (mistake != BULK_NO_FENCE) llm__fence_async();
    }
    if (mistake != BULK_NO_BARRIER) __syncthreads();
    for (int i = 0; i < 8 && threadIdx.x == 0; i++) {
        if (i >= 2 && mistake != BULK_READ_WHILE_REFILLED)
            llm__mbarrier_wait(empty + i % 2, (i / 2 - 1) % 2);
        llm__mbarrier_arrive(full + i % 2, mistake == BULK_LESS_EXPECTED   ? 112
                                           : mistake == BULK_MORE_EXPECTED ? 144
                                                                           : 128);
        llm__copy_bulk(stages + i % 2 * 32 + (mistake == BULK_MISALIGNED), in + i * 32, 128,
                       full + i % 2);
    }
    for (int i = 0; i < 8 - (mistake == BULK_LEFT_AT_END) && threadIdx.x / 32 == 1; i++) {
        if (mistake != BULK_NO_WAIT)
            llm__mbarrier_wait(full + i % 2, mistake == BULK_WRONG_PHASE ? 0 : i / 2 % 2);
        out[i * 32 + threadIdx.x % 32] = stages[i % 2 * 32 + threadIdx.x % 32];
        if (mistake == BULK_ARRIVE_TWICE) llm__mbarrier_arrive(empty + i % 2);
        llm__mbarrier_arrive(empty + i % 2);
    }
}

static void test_bulk_copies(void **) {
    auto same = [](int i) { return (float)i; };
    auto faulty = [](void (*kernel)(const float *, float *), const char *words) {
        assert_fault(kernel, 0, words, N, 256);
    };
    assert_true(gives(bulk_kernel<BULK_FINE>, same, 256));
    faulty(bulk_kernel<BULK_NO_FENCE>, "no fence.proxy.async after");
    emulator_order("reverse");
    float out[N];
    assert_int_equal(run(1, out, N, 256, bulk_kernel<BULK_NO_BARRIER>), cudaErrorLaunchFailure);
    assert_non_null(strstr(emulator_fault(), "is not initialized"));
    emulator_recover();
    faulty(bulk_kernel<BULK_WRONG_PHASE>, "out of turn");
    faulty(bulk_kernel<BULK_LESS_EXPECTED>, "needs 0 more arrivals and -16 more bytes");
    faulty(bulk_kernel<BULK_MORE_EXPECTED>, "needs 0 more arrivals and 16 more bytes");
    faulty(bulk_kernel<BULK_MISALIGNED>, "multiples of 16");
    faulty(bulk_kernel<BULK_ARRIVE_TWICE>, "out of turn");
    faulty(bulk_kernel<BULK_LEFT_AT_END>, "before its bulk copies");
    /* too early: the stage still holds all ones; too late: the thread that refills it is lost */
    assert_int_not_equal(run(0, out, N, 256, bulk_kernel<BULK_READ_WHILE_REFILLED>), cudaSuccess);
    emulator_recover();
    assert_int_not_equal(run(0, out, N, 256, bulk_kernel<BULK_NO_WAIT>), cudaSuccess);
    emulator_recover();
}

enum wgmma_mistake {
    WGMMA_FINE, WGMMA_NO_FENCE, WGMMA_NO_ASYNC_FENCE, WGMMA_READ_EARLY, WGMMA_SUM_WRITTEN,
    WGMMA_A_WRITTEN, WGMMA_WARP_MISSING, WGMMA_OTHER_B, WGMMA_NO_WAIT, WGMMA_NO_SWIZZLE,
    WGMMA_NOT_ALIGNED, WGMMA_OUTSIDE
};

/* out[i] = 1 if all sums of thread i are right. Each warpgroup computes (64, 64) times (64, 128) in
 * two groups of wgmmas. */
template <wgmma_mistake mistake> static void wgmma_kernel(const float *in, float *out) {
    LLM_DYNAMIC_SHARED(char, memory);
    auto a_at = [&](int row, int k) { return in[row] - 30.0f + (float)(k * 7 % 11); };
    auto b_at = [](int k, int n) { return (float)(n * 3 % 13 - k % 5); };
    size_t start = (size_t)__cvta_generic_to_shared(memory);
    char *b = memory + ((1024 - start % 1024) % 1024) + (mistake == WGMMA_NOT_ALIGNED ? 128 : 0);
    for (int i = threadIdx.x; i < 64 * 128; i += blockDim.x) {
        int n = i / 64, k = i % 64;
        uint16_t bits = emu::to_f16(b_at(k, n));
        memcpy(b + n * 128 + (k / 8 ^ n % 8) * 16 + k % 8 * 2, &bits, 2);
    }
    if (mistake != WGMMA_NO_ASYNC_FENCE) llm__fence_async();
    __syncthreads();
    uint64_t descriptor = (uint64_t)(__cvta_generic_to_shared(b) >> 4) | (uint64_t)64 << 32 |
                          (uint64_t)(mistake != WGMMA_NO_SWIZZLE) << 62;
    if (mistake == WGMMA_OUTSIDE) descriptor += 128;
    int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint32_t a[4][4];
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 4; i++) {
            int row = warp * 16 + g + i % 2 * 8, k = j * 16 + 2 * t + i / 2 * 8;
            a[j][i] = emu::to_f16(a_at(row, k)) | (uint32_t)emu::to_f16(a_at(row, k + 1)) << 16;
        }
    float sums[64] = {};
    sums[5] = 100;
    bool right = true;
    if (mistake == WGMMA_WARP_MISSING && warp == 2) return;
    for (int j = 0; j < 4; j++) {
        if (mistake != WGMMA_NO_FENCE && j % 2 == 0) llm__wgmma_fence(a);
        llm__wgmma_m64n128k16<0>(sums, a[j],
                                 descriptor + 2 * j + (mistake == WGMMA_OTHER_B && warp == 1));
        if (j % 2) llm__wgmma_commit();
    }
    llm__wgmma_wait<1>(sums);
    if (mistake == WGMMA_A_WRITTEN) a[3][0]++;
    if (mistake == WGMMA_READ_EARLY && !(sums[0] < 1e30f)) right = false;
    if (mistake == WGMMA_SUM_WRITTEN) sums[3] = 0;
    if (mistake != WGMMA_NO_WAIT) llm__wgmma_wait<0>(sums);
    for (int i = 0; i < 64; i++) {
        float expected = i == 5 ? 100.0f : 0.0f;
        for (int k = 0; k < 64; k++)
            expected += a_at(warp * 16 + g + i / 2 % 2 * 8, k) * b_at(k, i / 4 * 8 + 2 * t + i % 2);
        right = right && sums[i] == expected;
    }
    out[threadIdx.x] = right;
}

static void test_warpgroup_products(void **) {
    constexpr size_t shared = 18 * 1024;
    auto one = [](int) { return 1.0f; };
    auto faulty = [](void (*kernel)(const float *, float *), const char *words) {
        assert_fault(kernel, 0, words, N, shared);
    };
    assert_true(gives(wgmma_kernel<WGMMA_FINE>, one, shared));
    assert_false(gives(wgmma_kernel<WGMMA_READ_EARLY>, one, shared));
    faulty(wgmma_kernel<WGMMA_NO_FENCE>, "no wgmma.fence");
    faulty(wgmma_kernel<WGMMA_NO_ASYNC_FENCE>, "without fence.proxy.async");
    faulty(wgmma_kernel<WGMMA_SUM_WRITTEN>, "a sum is written");
    faulty(wgmma_kernel<WGMMA_A_WRITTEN>, "a register of A is written");
    faulty(wgmma_kernel<WGMMA_WARP_MISSING>, "is missing from a wgmma");
    faulty(wgmma_kernel<WGMMA_OTHER_B>, "different wgmmas");
    faulty(wgmma_kernel<WGMMA_NO_WAIT>, "before its wgmma");
    faulty(wgmma_kernel<WGMMA_NO_SWIZZLE>, "without the 128-byte swizzle");
    faulty(wgmma_kernel<WGMMA_NOT_ALIGNED>, "multiple of 1024");
    faulty(wgmma_kernel<WGMMA_OUTSIDE>, "outside of the dynamic shared memory");
}

/* ---- Matrix instructions --------------------------------------------------------------------- */

/* c (16, 8) = a (16, 16) times b (16, 8), as kernels compute it: a is loaded by ldmatrix, b
 * (row-major) by ldmatrix with transposition. `swap` plants a mistake: it swaps two registers of
 * a. */
template <bool bf16, bool swap>
static void product_kernel(const uint16_t *a, const uint16_t *b, float *c) {
    LLM_SHARED(uint16_t, shared_a, 256);
    LLM_SHARED(uint16_t, shared_b, 128);
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) shared_a[i] = a[i];
    for (int i = lane; i < 128; i += 32) shared_b[i] = b[i];
    __syncwarp();
    uint32_t x[4], y[2];
    float d[4] = {0, 0, 0, 0};
    llm__ldmatrix_x4(x, shared_a + lane % 16 * 16 + lane / 16 * 8);
    llm__ldmatrix_x2_trans(y, shared_b + lane % 16 * 8);
    if (swap) {
        uint32_t other = x[1];
        x[1] = x[2], x[2] = other;
    }
    if (bf16) llm__mma_m16n8k16_bf16(d, x, y);
    else llm__mma_m16n8k16_f16(d, x, y);
    for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

/* The same for int8, (16, 32) times (32, 8), with b column-major. Fragments are laid out as in PTX:
 * row lane / 4, four consecutive values. */
static void product_s8_kernel(const int8_t *a, const int8_t *b, int32_t *c) {
    int row = threadIdx.x / 4, at = threadIdx.x % 4 * 4;
    uint32_t x[4], y[2];
    int32_t d[4] = {1, 1, 1, 1};
    memcpy(&x[0], a + row * 32 + at, 4), memcpy(&x[1], a + (row + 8) * 32 + at, 4);
    memcpy(&x[2], a + row * 32 + at + 16, 4), memcpy(&x[3], a + (row + 8) * 32 + at + 16, 4);
    memcpy(&y[0], b + row * 32 + at, 4), memcpy(&y[1], b + row * 32 + at + 16, 4);
    llm__mma_m16n8k32_s8(d, x, y);
    for (int i = 0; i < 4; i++) c[(row + i / 2 * 8) * 8 + threadIdx.x % 4 * 2 + i % 2] = d[i];
}

template <class T> static T *on_device(const T *host, size_t n) {
    T *p;
    assert_int_equal(cudaMalloc(&p, n * sizeof(T)), cudaSuccess);
    assert_int_equal(cudaMemcpy(p, host, n * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

static void test_matrix_products(void **) {
    float a[256], b[128], out[128], expected[128] = {0};
    uint16_t half_a[2][256], half_b[2][128];
    int8_t int_a[16 * 32], int_b[8 * 32];
    int32_t int_out[128];
    for (int i = 0; i < 256; i++) a[i] = (float)(i * 7 % 23) - 11;
    for (int i = 0; i < 128; i++) b[i] = (float)(i * 5 % 19) - 9;
    for (int i = 0; i < 512; i++) int_a[i] = (int8_t)(i * 37 % 256 - 128);
    for (int i = 0; i < 256; i++) int_b[i] = (int8_t)(i * 91 % 256 - 128);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        llm_pack(bf16 ? LLM_BF16 : LLM_F16, a, half_a[bf16], 256);
        llm_pack(bf16 ? LLM_BF16 : LLM_F16, b, half_b[bf16], 128);
    }
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++)
            for (int k = 0; k < 16; k++) expected[i * 8 + j] += a[i * 16 + k] * b[k * 8 + j];
    uint16_t *da[2] = {on_device(half_a[0], 256), on_device(half_a[1], 256)},
             *db[2] = {on_device(half_b[0], 128), on_device(half_b[1], 128)};
    int8_t *dia = on_device(int_a, 512), *dib = on_device(int_b, 256);
    float *dc = on_device(out, 128);
    for (int order = 0; order < ORDERS; order++) {
        emulator_order(orders[order]);
        for (int kind = 0; kind < 4; kind++) {
            auto kernel = kind == 0   ? product_kernel<false, false>
                          : kind == 1 ? product_kernel<true, false>
                          : kind == 2 ? product_kernel<false, true>
                                      : product_kernel<true, true>;
            LLM_LAUNCH(kernel, 1, 32, 0, 0, da[kind % 2], db[kind % 2], dc);
            assert_int_equal(cudaMemcpy(out, dc, sizeof out, cudaMemcpyDeviceToHost), cudaSuccess);
            /* integers, so the result is exact */
            assert_int_equal(memcmp(out, expected, sizeof out) == 0, kind < 2);
        }
        LLM_LAUNCH(product_s8_kernel, 1, 32, 0, 0, dia, dib, (int32_t *)dc);
        assert_int_equal(cudaMemcpy(int_out, dc, sizeof int_out, cudaMemcpyDeviceToHost),
                         cudaSuccess);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                int sum = 1;
                for (int k = 0; k < 32; k++) sum += int_a[i * 32 + k] * int_b[j * 32 + k];
                assert_int_equal(int_out[i * 8 + j], sum);
            }
    }
    for (int i = 0; i < 2; i++) cudaFree(da[i]), cudaFree(db[i]);
    cudaFree(dia), cudaFree(dib), cudaFree(dc);
}

/* ---- Numbers --------------------------------------------------------------------------------- */

static void test_half_precision(void **) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const llm_type_info *type = llm_type_find(bf16 ? LLM_BF16 : LLM_F16);
        for (uint32_t i = 0; i < 65536; i++) { /* every 16-bit value to f32 and back */
            uint16_t bits = (uint16_t)i;
            float x, y = bf16 ? (float)__ushort_as_bfloat16(bits) : (float)__ushort_as_half(bits);
            type->unpack(&bits, &x, 1);
            assert_true(memcmp(&x, &y, 4) == 0 || (x != x && y != y));
            if (x == x)
                assert_int_equal(bf16 ? __bfloat16_as_ushort(__float2bfloat16(x))
                                      : __half_as_ushort(__float2half(x)),
                                 bits);
        }
        uint64_t state = 1;
        /* f32 values of all magnitudes, and those exactly between two 16-bit values */
        for (int i = 0; i < 300000; i++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            uint32_t random = (uint32_t)(state >> 32);
            if (i % 3 == 0) random = (random & 0xff800000) | (random & 0x007fffff) >> 12 << 12;
            if (i % 3 == 1) random = (random & 0x807fffff) | (90 + random % 60) << 23;
            float x = __uint_as_float(random);
            if (x != x) continue;
            uint16_t bits;
            llm_pack(type->type, &x, &bits, 1);
            assert_int_equal(bf16 ? __bfloat16_as_ushort(__float2bfloat16(x))
                                  : __half_as_ushort(__float2half(x)),
                             bits);
        }
    }
    /* one rounding, not two: 1 + 2^-11 x (1 + 2^-30) is above the midpoint */
    assert_int_equal(__half_as_ushort(__hfma(__half(1.0f), __ushort_as_half(0x1000), __half(1.0f))),
                     0x3c00);
    __half2 sum = __hadd2(__floats2half2_rn(1.5f, -2.0f), __float2half2_rn(0.25f));
    assert_true(__low2float(sum) == 1.75f && __high2float(sum) == -1.75f);
}

static void test_bit_operations(void **) {
    assert_int_equal(__byte_perm(0x33221100, 0x77665544, 0x7531), 0x77553311);
    assert_int_equal(__byte_perm(0x80007f00, 0, 0x000b), 0x000000ff); /* replicates a sign bit */
    assert_int_equal(llm__and_or(12, 10, 1), 9);
    assert_int_equal(__dp4a((int)0x01ff807f, (int)0x02038001, 10), 10 + 2 - 3 + 16384 + 127);
    assert_int_equal(__brev(1), 0x80000000u);
    assert_int_equal(__clz(1), 31);
    assert_int_equal(__funnelshift_r(0x89abcdef, 0x01234567, 8), 0x6789abcd);
    assert_int_equal(__vsubss4(0x80000000, 0x01000000), 0x80000000u);
}

/* ---- Streams, events, graphs ----------------------------------------------------------------- */

static void add_kernel(float *x, float y) { x[threadIdx.x] += y; }
static void double_kernel(float *x) { x[threadIdx.x] *= 2; }

static void test_streams(void **) {
    cudaStream_t other;
    cudaEvent_t event, later;
    float *pinned, *x, seen = -1;
    assert_int_equal(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    assert_int_equal(cudaEventCreate(&event), cudaSuccess);
    assert_int_equal(cudaEventCreate(&later), cudaSuccess);
    assert_int_equal(cudaMallocHost(&pinned, 4), cudaSuccess);
    assert_int_equal(cudaMalloc(&x, 4), cudaSuccess);

    /* queued work runs only when the host waits, so that reading or refilling a buffer too early is
     * detected */
    *pinned = 1;
    cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, stream);
    cudaMemcpyAsync(&seen, x, 4, cudaMemcpyDeviceToHost, stream);
    *pinned = 2;
    assert_true(seen == -1);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    assert_true(seen == 2);
    float pageable = 3; /* ordinary memory is read before the call returns */
    cudaMemcpyAsync(x, &pageable, 4, cudaMemcpyHostToDevice, stream);
    pageable = 4;
    cudaMemcpyAsync(&seen, x, 4, cudaMemcpyDeviceToHost, stream);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    assert_true(seen == 3);

    /* another stream is independent, unless it waits for an event */
    LLM_LAUNCH(add_kernel, 1, 1, 0, stream, x, 10.0f);
    cudaMemcpyAsync(&seen, x, 4, cudaMemcpyDeviceToHost, other);
    cudaStreamSynchronize(other);
    assert_true(seen == 3);
    cudaEventRecord(event, stream);
    LLM_LAUNCH(add_kernel, 1, 1, 0, stream, x, 100.0f);
    cudaEventRecord(later, stream);
    cudaStreamWaitEvent(other, event);
    cudaMemcpyAsync(&seen, x, 4, cudaMemcpyDeviceToHost, other);
    cudaStreamSynchronize(other);
    assert_true(seen == 13); /* includes work up to the event, and none after it */
    cudaEventSynchronize(later);
    float milliseconds = -1;
    assert_int_equal(cudaEventElapsedTime(&milliseconds, event, later), cudaSuccess);
    assert_true(milliseconds >= 0);
    cudaMemcpy(&seen, x, 4, cudaMemcpyDeviceToHost);
    assert_true(seen == 113);

    cudaFree(x), cudaFreeHost(pinned), cudaEventDestroy(event), cudaEventDestroy(later),
        cudaStreamDestroy(other);
}

static void test_graphs(void **) {
    float *pinned, *x, out = 0;
    cudaStream_t other;
    cudaEvent_t fork, join;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    assert_int_equal(cudaMallocHost(&pinned, 4), cudaSuccess);
    assert_int_equal(cudaMalloc(&x, 4), cudaSuccess);
    assert_int_equal(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    assert_int_equal(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), cudaSuccess);
    assert_int_equal(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), cudaSuccess);

    assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, stream);
    LLM_LAUNCH(add_kernel, 1, 1, 0, stream, x, 1.0f);
    cudaEventRecord(fork, stream);
    cudaStreamWaitEvent(other, fork);
    LLM_LAUNCH(double_kernel, 1, 1, 0, other, x);
    cudaEventRecord(join, other);
    cudaStreamWaitEvent(stream, join);
    LLM_LAUNCH(add_kernel, 1, 1, 0, stream, x, 5.0f);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    assert_int_equal(cudaGraphInstantiate(&exec, graph), cudaSuccess);
    assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
    uint64_t launches = emulator_counted().launches;
    for (int i = 0; i < 3; i++) {
        *pinned = (float)i; /* the graph reads the current value */
        assert_int_equal(cudaGraphLaunch(exec, stream), cudaSuccess);
        cudaMemcpyAsync(&out, x, 4, cudaMemcpyDeviceToHost, stream);
        assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
        assert_true(out == (float)(2 * (i + 1) + 5));
    }
    assert_int_equal(emulator_counted().launches - launches, 9);
    assert_int_equal(cudaGraphExecDestroy(exec), cudaSuccess);

    /* a call that is not allowed during a capture invalidates it */
    float *y;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
        if (i) assert_int_equal(cudaMalloc(&y, 4), cudaErrorStreamCaptureUnsupported);
        else assert_int_equal(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
        assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
        assert_null(graph);
    }
    cudaGetLastError();
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    cudaFree(x), cudaFreeHost(pinned), cudaEventDestroy(fork), cudaEventDestroy(join),
        cudaStreamDestroy(other);
}

/* ---- Memory accesses ------------------------------------------------------------------------- */

/* The calls that -fsanitize=thread emits for loads and stores, written by hand so that this test
 * needs no such compiler. */
extern "C" void __tsan_read2(void *), __tsan_read4(void *), __tsan_read16(void *),
    __tsan_write4(void *), __tsan_write8(void *);

static void global_kernel(const float *in, float *) {
    float own = 0;
    int i = (int)threadIdx.x;
    char *bytes = (char *)in;
    __tsan_read4(&own);                         /* a register: not reported */
    __tsan_read4(bytes + 4 * i);                /* consecutive words */
    __tsan_read4(bytes + 4 * (i % 4) * 8 + 4);  /* a word in each of four sectors of one line */
    __tsan_read4(bytes + 4);                    /* the same word in all lanes */
    __tsan_read16(bytes + 16 * i);              /* 512 bytes */
    __tsan_read2(bytes + 31 + 32 * (i % 8));    /* crosses the end of a sector */
    if (i < 3) __tsan_write4(bytes + 128 * i);  /* three lanes in three lines */
    /* the second time, only in odd lanes */
    for (int k = 0; k <= i % 2; k++) __tsan_write8(bytes + 8 * i);
}

static void shared_kernel(const float *, float *) {
    LLM_SHARED(float, words, 32 * 33);
    int i = (int)threadIdx.x;
    __tsan_read4(words + i);               /* a different bank in each lane */
    __tsan_read4(words + 32 * i);          /* the same bank in all lanes */
    __tsan_read4(words + 33 * i);          /* a different bank in each lane */
    __tsan_read4(words + 2 * i);           /* two lanes in each of 16 banks */
    __tsan_read4(words + 7);               /* the same word: one pass */
    __tsan_read2((char *)words + 2 * i);   /* two lanes share a word */
    __tsan_read16(words + 4 * i);          /* 8 lanes per pass: four passes */
    __tsan_read16(words + 32 * i);         /* the same bank group in all lanes: 32 passes */
    __tsan_write8(words + 2 * i);          /* 16 lanes per pass: two passes */
}

static void collect_access(void *user, const emulator_access *access) {
    ((std::vector<emulator_access> *)user)->push_back(*access);
}

static std::vector<emulator_access> observe(int order, int threads,
                                            void (*kernel)(const float *, float *)) {
    std::vector<emulator_access> list;
    float out[N];
    emulator_observe(collect_access, &list);
    assert_int_equal(run(order, out, threads, 0, kernel), cudaSuccess);
    emulator_observe(NULL, NULL);
    return list;
}

static void test_accesses(void **) {
    static const struct { bool store; int lanes, bytes, used, sectors, lines;
    } global[] = {{false, 32, 4, 128, 4, 1},   {false, 32, 4, 16, 4, 1}, {false, 32, 4, 4, 1, 1},
                  {false, 32, 16, 512, 16, 4}, {false, 32, 2, 16, 9, 3}, {true, 3, 4, 12, 3, 3},
                  {true, 32, 8, 256, 8, 2},    {true, 16, 8, 128, 8, 2}};
    static const struct {
        int passes, least;
    } shared[] = {{1, 1}, {32, 1}, {1, 1}, {2, 1}, {1, 1}, {1, 1}, {4, 4}, {32, 4}, {2, 2}};
    for (int order = 0; order < ORDERS; order++) {
        std::vector<emulator_access> list = observe(order, 64, global_kernel);
        /* all lanes of the second warp skip the three-lane store */
        size_t second_warp = sizeof global / sizeof *global;
        assert_int_equal(list.size(), 2 * second_warp - 1);
        for (size_t i = 0; i < second_warp; i++) {
            const emulator_access &a = list[i];
            assert_string_equal(a.kernel, "kernel");
            assert_true(a.block[0] == 64 && a.grid[0] == 1 && a.warp == 0 && !a.shared &&
                        a.start == (uint64_t)(uintptr_t)numbers);
            assert_int_equal(a.store, global[i].store);
            assert_int_equal(__builtin_popcount(a.lanes), global[i].lanes);
            assert_int_equal(a.bytes, global[i].bytes);
            assert_int_equal(a.used, global[i].used);
            assert_int_equal(a.sectors, global[i].sectors);
            assert_int_equal(a.lines, global[i].lines);
        }
        assert_int_equal(list[second_warp].warp, 1);
        list = observe(order, 32, shared_kernel);
        assert_int_equal(list.size(), sizeof shared / sizeof *shared);
        for (size_t i = 0; i < list.size(); i++) {
            assert_true(list[i].shared && !strcmp(list[i].memory, "words"));
            assert_int_equal(list[i].passes, shared[i].passes);
            assert_int_equal(list[i].least, shared[i].least);
        }
    }
}

/* ---- Injected failures ----------------------------------------------------------------------- */

static void test_injected_failures(void **) {
    float *x, out[N];
    size_t free_bytes, all_bytes;
    emulator_memory(100000);
    assert_int_equal(cudaMemGetInfo(&free_bytes, &all_bytes), cudaSuccess);
    assert_int_equal(all_bytes, 100000);
    assert_int_equal(cudaMalloc(&x, free_bytes + 1), cudaErrorMemoryAllocation);
    assert_null(x);
    assert_int_equal(cudaMalloc(&x, free_bytes), cudaSuccess);
    assert_int_equal(cudaFree(x), cudaSuccess);
    emulator_memory((size_t)8 << 30);
    emulator_fail_allocation(1);
    assert_int_equal(cudaMalloc(&x, 4), cudaSuccess);
    cudaFree(x);
    assert_int_equal(cudaMalloc(&x, 4), cudaErrorMemoryAllocation);
    cudaGetLastError();

    emulator_fail_launch(0);
    assert_int_equal(run(0, out, N, 0, reverse_kernel<true>), cudaErrorLaunchOutOfResources);
    assert_int_equal(run(0, out, N, 0, reverse_kernel<true>), cudaSuccess);
    assert_int_equal(run(0, out, 1025, 0, reverse_kernel<true>), cudaErrorInvalidConfiguration);
    assert_int_equal(run(0, out, N, 49153, reverse_kernel<true>), cudaErrorInvalidValue);
    assert_int_equal(cudaFuncSetAttribute(reverse_kernel<true>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, 60000),
                     cudaSuccess);
    assert_int_equal(run(0, out, N, 49153, reverse_kernel<true>), cudaSuccess);
    assert_int_equal(cudaFuncSetAttribute(reverse_kernel<true>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20),
                     cudaErrorInvalidValue);
    cudaGetLastError();

    emulator_lose_device(1);
    assert_int_equal(run(0, out, N, 0, reverse_kernel<true>), cudaErrorUnknown);
    assert_int_equal(cudaMalloc(&x, 4), cudaErrorUnknown);
    emulator_recover();
    assert_int_equal(run(0, out, N, 0, reverse_kernel<true>), cudaSuccess);

    int n = -1;
    emulator_devices(0, 80, 13000);
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorNoDevice);
    emulator_devices(1, 80, 11000);
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
    emulator_devices(1, 80, 13000);
    assert_int_equal(cudaGetDeviceCount(&n), cudaSuccess);
    cudaGetLastError();
}

/* ---- Counted arithmetic ---------------------------------------------------------------------- */

static void arithmetic_kernel(const float *in, float *out) {
    counted<float> x = in[1], y = in[2];
    counted<int> bits = 0x75;
    x += y;                                                        /* 1 operation */
    x = fmaf(x * y, y - 1, x);                                     /* 3 */
    if (threadIdx.x == 40) x = x + counted<float>(bits >> 4 & 15); /* 4, one a conversion */
    out[threadIdx.x] = x.value;
}

static void test_counted_arithmetic(void **) {
    for (int order = 0; order < ORDERS; order++) {
        float out[N];
        uint64_t before = emulator_counted().arithmetic;
        assert_int_equal(run(order, out, 64, 0, arithmetic_kernel), cudaSuccess);
        /* two warps of 4 operations; one lane of the second does 4 more */
        assert_int_equal(emulator_counted().arithmetic - before, 4 + 8);
        assert_true(out[0] == 9.0f && out[40] == 16.0f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_barrier),
        cmocka_unit_test(test_partial_barrier),
        cmocka_unit_test(test_early_launch),
        cmocka_unit_test(test_counting_barriers),
        cmocka_unit_test(test_warps),
        cmocka_unit_test(test_memory_bounds),
        cmocka_unit_test(test_asynchronous_copies),
        cmocka_unit_test(test_bulk_copies),
        cmocka_unit_test(test_warpgroup_products),
        cmocka_unit_test(test_matrix_products),
        cmocka_unit_test(test_half_precision),
        cmocka_unit_test(test_bit_operations),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_accesses),
        cmocka_unit_test(test_counted_arithmetic),
        cmocka_unit_test(test_injected_failures),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
