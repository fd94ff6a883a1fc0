/* 12-kernel.cu - small kernels for llm lesson kernel: each task with a poor and with a good memory
 * access pattern. They are written like the kernels of llm.cu. The lesson runs them on the emulated
 * device, which counts their memory accesses. */
#include "cuda_on_cpu.h"
#include "emulator.h"

/* sums (rows): each thread sums one row. The lanes of a warp read addresses a whole row apart. */
__global__ static void row_per_thread_kernel(const float *x, int rows, int columns, float *sums) {
    int row = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < columns; i++) sum += x[row * columns + i];
    sums[row] = sum;
}

/* The same sums: each warp sums one row, and its lanes read neighbouring words. */
__global__ static void row_per_warp_kernel(const float *x, int rows, int columns, float *sums) {
    int row = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    int lane = (int)threadIdx.x % 32;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = lane; i < columns; i += 32) sum += x[row * columns + i];
    for (int distance = 16; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (lane == 0) sums[row] = sum;
}

/* out (columns, rows) = x (rows, columns) transposed. Each block transposes 32 x 32 values: it
 * reads along the rows of x, and so writes down the columns of out. */
__global__ static void transpose_directly_kernel(const float *x, int rows, int columns,
                                                 float *out) {
    int row = (int)(blockIdx.y * 32 + threadIdx.y), column = (int)(blockIdx.x * 32 + threadIdx.x);
    out[column * rows + row] = x[row * columns + column];
}

/* The same through a tile in shared memory: both the reads of x and the writes of out run along
 * rows. The tile is read down its columns. If pitch is 32, a column is in one bank; if it is 33,
 * each word of a column is in another bank. */
template <int pitch> __global__ static void transpose_kernel(const float *x, int rows, int columns,
                                                             float *out) {
    LLM_SHARED(float, tile, 32 * pitch);
    int column = blockIdx.x * 32, row = blockIdx.y * 32; /* where the tile starts in x */
    int i = threadIdx.y, j = threadIdx.x;
    tile[i * pitch + j] = x[(row + i) * columns + column + j];
    __syncthreads();
    out[(column + i) * rows + row + j] = tile[j * pitch + i];
}

/* Run kernel `which`, 0 to 4, on x (rows, columns), both multiples of 32, and copy n_out results
 * to out. False: the device failed. */
extern "C" bool kernel_lesson_run(int which, const float *x, int rows, int columns, float *out,
                                  int n_out) {
    float *device_x, *device_out;
    size_t bytes = sizeof(float) * (size_t)rows * (size_t)columns;
    emulator_label("x");
    if (cudaMalloc(&device_x, bytes)) return false;
    emulator_label("out");
    if (cudaMalloc(&device_out, bytes)) return cudaFree(device_x), false;
    bool good = !cudaMemcpy(device_x, x, bytes, cudaMemcpyHostToDevice);
    dim3 tiles(columns / 32, rows / 32), tile(32, 32);
    if (which == 0)
        LLM_LAUNCH(row_per_thread_kernel, dim3((rows + 127) / 128), dim3(128), 0, 0, device_x, rows,
                   columns, device_out);
    if (which == 1)
        LLM_LAUNCH(row_per_warp_kernel, dim3((rows + 3) / 4), dim3(128), 0, 0, device_x, rows,
                   columns, device_out);
    if (which == 2)
        LLM_LAUNCH(transpose_directly_kernel, tiles, tile, 0, 0, device_x, rows, columns,
                   device_out);
    if (which == 3)
        LLM_LAUNCH(transpose_kernel<32>, tiles, tile, 0, 0, device_x, rows, columns, device_out);
    if (which == 4)
        LLM_LAUNCH(transpose_kernel<33>, tiles, tile, 0, 0, device_x, rows, columns, device_out);
    bytes = sizeof(float) * (size_t)n_out;
    good = !cudaMemcpy(out, device_out, bytes, cudaMemcpyDeviceToHost) && good;
    good = !cudaGetLastError() && good;
    cudaFree(device_x);
    cudaFree(device_out);
    return good;
}
