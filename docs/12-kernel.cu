/* 12-kernel.cu - small kernels for llm lesson kernel: the same work done twice, once so that memory likes it. Beside
 * 12-kernel.md. They are written as those of llm.cu, and run on its emulated device, which counts what they do to
 * memory. */
#include "cuda_on_cpu.h"
#include "emulator.h"

/* sums (rows): each thread adds up a row of its own. The lanes of a warp read addresses that are a whole row apart. */
__global__ static void row_per_thread_kernel(const float *x, int rows, int columns, float *sums) {
    int row = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < columns; i++) sum += x[row * columns + i];
    sums[row] = sum;
}

/* The same: each warp adds up a row. Its lanes read neighbours. */
__global__ static void row_per_warp_kernel(const float *x, int rows, int columns, float *sums) {
    int row = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = lane; i < columns; i += 32) sum += x[row * columns + i];
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (lane == 0) sums[row] = sum;
}

/* out (columns, rows) = x (rows, columns) transposed: a block has a tile of 32 x 32. It reads along the rows, and so
 * writes along the columns. */
__global__ static void transpose_directly_kernel(const float *x, int rows, int columns, float *out) {
    int row = (int)(blockIdx.y * 32 + threadIdx.y), column = (int)(blockIdx.x * 32 + threadIdx.x);
    out[column * rows + row] = x[row * columns + column];
}

/* The same through shared memory, so that both sides run along rows. The tile is read by columns: with rows of 32
 * words all 32 lanes want words of one bank; one word more, and each wants another. */
template <int pitch> __global__ static void transpose_kernel(const float *x, int rows, int columns, float *out) {
    LLM_SHARED(float, tile, 32 * pitch);
    tile[threadIdx.y * pitch + threadIdx.x] = x[(blockIdx.y * 32 + threadIdx.y) * columns + blockIdx.x * 32 + threadIdx.x];
    __syncthreads();
    out[(blockIdx.x * 32 + threadIdx.y) * rows + blockIdx.y * 32 + threadIdx.x] = tile[threadIdx.x * pitch + threadIdx.y];
}

/* Run one of them, 0 to 4, on x (rows, columns), both multiples of 32; n_out numbers come back. False: the device
 * failed. */
extern "C" bool kernel_lesson_run(int which, const float *x, int rows, int columns, float *out, int n_out) {
    float *device_x, *device_out;
    size_t bytes = sizeof(float) * (size_t)rows * (size_t)columns;
    emulator_label("x");
    if (cudaMalloc(&device_x, bytes)) return false;
    emulator_label("out");
    if (cudaMalloc(&device_out, bytes)) return cudaFree(device_x), false;
    bool good = !cudaMemcpy(device_x, x, bytes, cudaMemcpyHostToDevice);
    dim3 tiles(columns / 32, rows / 32), tile(32, 32);
    if (which == 0)
        LLM_LAUNCH(row_per_thread_kernel, dim3((rows + 127) / 128), dim3(128), 0, 0, device_x, rows, columns,
                   device_out);
    if (which == 1)
        LLM_LAUNCH(row_per_warp_kernel, dim3((rows + 3) / 4), dim3(128), 0, 0, device_x, rows, columns, device_out);
    if (which == 2) LLM_LAUNCH(transpose_directly_kernel, tiles, tile, 0, 0, device_x, rows, columns, device_out);
    if (which == 3) LLM_LAUNCH(transpose_kernel<32>, tiles, tile, 0, 0, device_x, rows, columns, device_out);
    if (which == 4) LLM_LAUNCH(transpose_kernel<33>, tiles, tile, 0, 0, device_x, rows, columns, device_out);
    good = !cudaMemcpy(out, device_out, sizeof(float) * (size_t)n_out, cudaMemcpyDeviceToHost) && good;
    good = !cudaGetLastError() && good;
    cudaFree(device_x);
    cudaFree(device_out);
    return good;
}
