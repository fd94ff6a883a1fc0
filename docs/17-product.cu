/* 17-product.cu - out (rows) = weights (rows, columns) in q4_0 times x (columns): the same product
 * in seven versions, for llm lesson kernel --ladder. Each version has one new idea. The emulated
 * device runs them and counts what they do; nvcc compiles them for a GPU, which runs and times
 * them. */
#ifdef LLM_EMULATED
#include "counted.h"
#include "cuda_on_cpu.h"
typedef counted<float> f32; /* numbers whose operations the emulated device counts */
typedef counted<int> i32;
typedef counted<uint32_t> u32;
static void count(int operations) { while (operations-- > 0) emulator_operation(); }
#define product_run product_run_emulated
#define product_devices product_devices_emulated
#else
#include <cuda_fp16.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef float f32;
typedef int i32;
typedef uint32_t u32;
__device__ static inline void count(int) {}
#define product_run product_run_cuda
#define product_devices product_devices_cuda
#define LLM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                 \
    kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define LLM_UNROLL _Pragma("unroll")
#define LLM_LOOP _Pragma("unroll 1")
#define LLM_SHARED(type, name, count) __shared__ type name[count]
static void emulator_label(const char *) {}
#endif
#ifndef LLM_UNROLL
#define LLM_UNROLL
#define LLM_LOOP
#endif

enum { WARPS = 4, SEGMENTS = 8, TILE_ROWS = 16, AHEAD = 4, CHUNK_COLUMNS = 64, CHUNK_BYTES = 576 };

typedef struct file_block { /* 32 weights of a row, as in a file: scale x (4 bits - 8) */
    uint16_t scale;         /* f16 */
    uint8_t pairs[16];      /* low bits: weight i; high bits: weight i + 16 */
} file_block;

typedef struct product {
    int rows, columns;        /* columns: a multiple of 32 */
    const file_block *blocks; /* versions 1, 2: (rows, columns / 32) */
    const uint4 *words;       /* 3, 4: (rows, columns / 32) the weights of a block */
    const uint16_t *scales;   /* 3, 4: (rows, columns / 32) f16 */
    const char *tiles;        /* 5 to 7: (rows / 16, columns / 64) chunks, both rounded up */
    const float *x;           /* 1 to 3: (columns) */
    const uint4 *x_f16;       /* 4 to 7: the same as f16, 8 in each; zeros up to whole chunks */
    f32 *out;                 /* (rows) */
} product;

/* ---- Small tools ------------------------------------------------------------------------- */

__device__ static inline f32 f16_to_f32(uint16_t bits) {
    count(1);
    return __half2float(__ushort_as_half(bits));
}

/* The sum over the lanes of a warp. */
__device__ static inline f32 warp_sum(f32 x) {
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

/* (a & mask) | bits. nvcc would make two instructions, as one can hold only one constant. */
__device__ static inline u32 and_or(u32 a, uint32_t mask, uint32_t bits) {
    uint32_t word;
    count(1);
#ifdef LLM_EMULATED
    word = (a.value & mask) | bits;
#else
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(word) : "r"(a), "r"(mask), "r"(bits));
#endif
    return word;
}

/* a b + c for two f16 in each. */
__device__ static inline u32 fma_pairs(u32 a, u32 b, u32 c) {
    __half2 x, y, z;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    memcpy(&z, &c, sizeof z);
    count(1);
    x = __hfma2(x, y, z);
    memcpy(&a, &x, sizeof a);
    return a;
}

/* The sum of two f16. */
__device__ static inline f32 sum_of_pair(u32 pair) {
    __half2 two;
    memcpy(&two, &pair, sizeof two);
    count(2); /* two conversions */
    return f32(__low2float(two)) + f32(__high2float(two));
}

/* d (16, 8) += a (16, 16) times b (16, 8); f16 in, f32 out. See "The instruction" in llm.cu. */
__device__ static inline void matrix_product(f32 d[4], const u32 a[4], const u32 b[2]) {
#ifdef LLM_EMULATED
    llm__mma_m16n8k16_f16((float *)(void *)d, (const uint32_t *)(const void *)a,
                          (const uint32_t *)(const void *)b);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/* The lowest bit of weight i (0 to 7) in a word of a packed layout. From high to low the word holds
 * weights 7 5 3 1 6 4 2 0, so that neighbours are 16 bits apart: see unpack. */
__host__ __device__ static inline int place(int i) { return i % 2 * 16 + i / 2 * 4; }

/* ---- The versions ------------------------------------------------------------------------ */

/* 1. A thread per row of weights: the plain loop. The lanes of a warp read bytes that are a row
 * apart, so each byte moves a sector of 32. */
__global__ static void thread_per_row_kernel(product p) {
    int row = (int)(blockIdx.x * blockDim.x + threadIdx.x), n = p.columns / 32;
    if (row >= p.rows) return;
    const float *x = p.x;
    f32 sum = 0.0f;
    for (int b = 0; b < n; b++, x += 32) {
        const file_block *block = p.blocks + (int64_t)row * n + b;
        f32 scale = f16_to_f32(block->scale);
        for (int i = 0; i < 16; i++) {
            i32 pair = block->pairs[i];
            sum = fmaf(scale * f32((pair & 15) - 8), x[i], sum);
            sum = fmaf(scale * f32((pair >> 4) - 8), x[i + 16], sum);
        }
    }
    p.out[row] = sum;
}

/* 2. A warp per row of weights: its lanes read neighbouring bytes, so a sector serves all of its 32
 * bytes. But a load still brings only one byte to a lane. */
__global__ static void warp_per_row_kernel(product p) {
    int row = (int)(blockIdx.x * WARPS + threadIdx.x / 32), n = p.columns / 32;
    int lane = (int)threadIdx.x % 32;
    if (row >= p.rows) return;
    f32 sum = 0.0f;
    for (int b = lane / 16; b < n; b += 2) { /* half a warp per block */
        const file_block *block = p.blocks + (int64_t)row * n + b;
        const float *x = p.x + b * 32 + lane % 16;
        i32 pair = block->pairs[lane % 16];
        f32 scale = f16_to_f32(block->scale);
        sum = fmaf(scale * f32((pair & 15) - 8), x[0], sum);
        sum = fmaf(scale * f32((pair >> 4) - 8), x[16], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) p.out[row] = sum;
}

/* 3. Loads of 16 bytes: a lane reads a whole block at once, a warp 512 bytes. The layout is packed:
 * such a load needs an address that is a multiple of 16, and a block of a file has 18 bytes. */
__global__ static void wide_loads_kernel(product p) {
    int row = (int)(blockIdx.x * WARPS + threadIdx.x / 32), n = p.columns / 32;
    int lane = (int)threadIdx.x % 32;
    if (row >= p.rows) return;
    f32 sum = 0.0f;
    for (int b = lane; b < n; b += 32) {
        uint4 words = p.words[(int64_t)row * n + b];
        f32 scale = f16_to_f32(p.scales[(int64_t)row * n + b]), part = 0.0f;
        const i32 word[4] = {(int)words.x, (int)words.y, (int)words.z, (int)words.w};
LLM_UNROLL
        for (int i = 0; i < 32; i += 4) {
            float4 x = *(const float4 *)(const void *)(p.x + b * 32 + i);
            part = fmaf(f32((word[i / 8] >> place(i % 8) & 15) - 8), x.x, part);
            part = fmaf(f32((word[i / 8] >> place(i % 8 + 1) & 15) - 8), x.y, part);
            part = fmaf(f32((word[i / 8] >> place(i % 8 + 2) & 15) - 8), x.z, part);
            part = fmaf(f32((word[i / 8] >> place(i % 8 + 3) & 15) - 8), x.w, part);
        }
        sum = fmaf(scale, part, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) p.out[row] = sum;
}

/* The eight weights of a word as f16; out[i] has weights 2i and 2i + 1. The f16 with bits 0x6400 is
 * 1024, and its lowest bit is worth 1. So four bits put there make 1024 + q; subtract 1032. Four
 * bits higher they make 1024 + 16 q; divide by 16 and subtract 72. All of this is exact. */
__device__ static inline void unpack(u32 word, u32 out[4]) {
LLM_UNROLL
    for (int half = 0; half < 2; half++) {
        u32 ones = and_or(word, 0x000f000f, 0x64006400),
            sixteens = and_or(word, 0x00f000f0, 0x64006400);
        out[2 * half] = fma_pairs(ones, 0x3c003c00, 0xe408e408);         /* x 1 - 1032 */
        out[2 * half + 1] = fma_pairs(sixteens, 0x2c002c00, 0xd480d480); /* x 1/16 - 72 */
        if (half == 0) word = word >> 8;
    }
}

/* 4. Unpacking in registers, two weights at a time: an operation on bits makes two f16, with no
 * conversion. x is f16, too: half of its bytes, and one instruction multiplies two weights. */
__global__ static void pairs_kernel(product p) {
    int row = (int)(blockIdx.x * WARPS + threadIdx.x / 32), n = p.columns / 32;
    int lane = (int)threadIdx.x % 32;
    if (row >= p.rows) return;
    f32 sum = 0.0f;
    for (int b = lane; b < n; b += 32) {
        uint4 words = p.words[(int64_t)row * n + b];
        f32 scale = f16_to_f32(p.scales[(int64_t)row * n + b]), part = 0.0f;
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
LLM_UNROLL
        for (int i = 0; i < 4; i++) {
            uint4 x = p.x_f16[b * 4 + i];
            u32 w[4];
            unpack(word[i], w);
            u32 two = fma_pairs(w[0], x.x, 0u); /* sums of 4 products in f16, then f32 */
            two = fma_pairs(w[1], x.y, two);
            two = fma_pairs(w[2], x.z, two);
            part += sum_of_pair(fma_pairs(w[3], x.w, two));
        }
        sum = fmaf(scale, part, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) p.out[row] = sum;
}

/* A lane's part of a chunk of 64 columns of a tile of 16 rows. With g = lane / 4 and t = lane % 4:
 * 8 columns (8t on) of rows g and g + 8 in the chunk's first half, then the same in its second. */
typedef struct lane_part {
    uint4 words;
    uint2 scales; /* of each half: two f16, for rows g and g + 8 */
} lane_part;

__device__ static inline lane_part load_part(const char *chunk, int lane) {
    lane_part part;
    part.words = *(const uint4 *)(const void *)(chunk + lane * 16);
    part.scales = *(const uint2 *)(const void *)(chunk + 512 + lane / 4 * 8);
    return part;
}

/* sums: those of rows g and g + 8, plus the products of a chunk with its columns of x. The
 * instruction takes 8 rows of x; here all are the same, so every lane gets the sums of its rows. */
__device__ static inline void multiply(lane_part w, const uint4 *x, int lane, f32 sums[2]) {
LLM_UNROLL
    for (int half = 0; half < 2; half++) {
        uint4 own = x[half * 4 + lane % 4];
        uint32_t scales = half ? w.scales.y : w.scales.x;
        u32 top[4], bottom[4];
        unpack(half ? w.words.z : w.words.x, top);
        unpack(half ? w.words.w : w.words.y, bottom);
        const u32 a[2][4] = {{top[0], bottom[0], top[1], bottom[1]},
                             {top[2], bottom[2], top[3], bottom[3]}},
                  b[2][2] = {{own.x, own.y}, {own.z, own.w}};
        f32 d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        matrix_product(d, a[0], b[0]);
        matrix_product(d, a[1], b[1]);
        sums[0] = fmaf(f16_to_f32((uint16_t)scales), d[0], sums[0]);
        sums[1] = fmaf(f16_to_f32((uint16_t)(scales >> 16)), d[2], sums[1]);
    }
}

__device__ static inline void store(const product &p, int row, f32 sum) {
    if (row < p.rows) p.out[row] = sum; /* the last tile may have fewer rows */
}

/* 5. Matrix instructions: one multiplies 16 rows by 16 columns. A warp has a tile of 16 rows, which
 * share each load of x. The layout gives each lane the weights that the instruction wants there. */
__global__ static void matrix_kernel(product p) {
    int tile = (int)(blockIdx.x * WARPS + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    int n = (p.columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS, row = tile * TILE_ROWS + lane / 4;
    if (tile * TILE_ROWS >= p.rows) return;
    const char *chunk = p.tiles + (int64_t)tile * n * CHUNK_BYTES;
    f32 sums[2] = {0.0f, 0.0f};
LLM_LOOP
    for (int c = 0; c < n; c++)
        multiply(load_part(chunk + c * CHUNK_BYTES, lane), p.x_f16 + c * 8, lane, sums);
    if (lane % 4 == 0) store(p, row, sums[0]), store(p, row + 8, sums[1]);
}

/* The sums of version 6 over chunks `first` to `end` of a tile. */
__device__ static inline void multiply_ahead(const char *chunk, const uint4 *x, int first, int end,
                                             int lane, f32 sums[2]) {
    lane_part next[AHEAD];
LLM_UNROLL
    for (int i = 0; i < AHEAD; i++)
        if (first + i < end) next[i] = load_part(chunk + (first + i) * CHUNK_BYTES, lane);
LLM_LOOP
    for (int c = first; c < end; c += AHEAD)
LLM_UNROLL
        for (int i = 0; i < AHEAD; i++)
            if (c + i < end) {
                multiply(next[i], x + (c + i) * 8, lane, sums);
                if (c + i + AHEAD < end)
                    next[i] = load_part(chunk + (c + i + AHEAD) * CHUNK_BYTES, lane);
            }
}

/* 6. Copying ahead: a warp has four chunks on their way to registers while it multiplies another.
 * Before, it waited for each chunk, for as long as memory takes to answer. */
__global__ static void ahead_kernel(product p) {
    int tile = (int)(blockIdx.x * WARPS + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    int n = (p.columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS, row = tile * TILE_ROWS + lane / 4;
    if (tile * TILE_ROWS >= p.rows) return;
    f32 sums[2] = {0.0f, 0.0f};
    multiply_ahead(p.tiles + (int64_t)tile * n * CHUNK_BYTES, p.x_f16, 0, n, lane, sums);
    if (lane % 4 == 0) store(p, row, sums[0]), store(p, row + 8, sums[1]);
}

/* 7. Split-K: eight warps share a tile, one for each eighth of the columns, since a warp per tile
 * leaves most of a GPU idle. Their sums are added in a fixed order: the same bits in every run. */
__global__ static void split_kernel(product p) {
    LLM_SHARED(f32, parts, SEGMENTS * TILE_ROWS);
    int tile = (int)blockIdx.x, segment = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int n = (p.columns + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
    f32 sums[2] = {0.0f, 0.0f};
    multiply_ahead(p.tiles + (int64_t)tile * n * CHUNK_BYTES, p.x_f16, segment * n / SEGMENTS,
                   (segment + 1) * n / SEGMENTS, lane, sums);
    if (lane % 4 == 0) {
        parts[segment * TILE_ROWS + lane / 4] = sums[0];
        parts[segment * TILE_ROWS + lane / 4 + 8] = sums[1];
    }
    __syncthreads();
    if (threadIdx.x >= TILE_ROWS) return;
    f32 sum = 0.0f;
    for (int s = 0; s < SEGMENTS; s++) sum += parts[s * TILE_ROWS + threadIdx.x];
    store(p, tile * TILE_ROWS + (int)threadIdx.x, sum);
}

/* ---- On the host: packing and launching -------------------------------------------------- */

static int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Eight weights of a row, from `column` on, as a word of a packed layout; zeros outside. */
static uint32_t packed_word(const file_block *blocks, int rows, int columns, int row, int column) {
    uint32_t word = 0;
    if (row >= rows || column >= columns) return 0x88888888; /* 8 - 8 */
    const file_block *block = blocks + (int64_t)row * (columns / 32) + column / 32;
    for (int i = 0; i < 8; i++) {
        int in_block = column % 32 + i;
        word |= (uint32_t)(block->pairs[in_block % 16] >> in_block / 16 * 4 & 15) << place(i);
    }
    return word;
}

static uint16_t packed_scale(const file_block *blocks, int rows, int columns, int row, int column) {
    if (row >= rows || column >= columns) return 0;
    return blocks[(int64_t)row * (columns / 32) + column / 32].scale;
}

/* For versions 3 and 4: the words of all blocks, row by row, and then their scales. */
static void pack_rows(const file_block *blocks, int rows, int columns, char *to) {
    int64_t n = (int64_t)rows * (columns / 32);
    uint32_t *words = (uint32_t *)(void *)to;
    uint16_t *scales = (uint16_t *)(void *)(to + n * 16);
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column += 8) {
            *words++ = packed_word(blocks, rows, columns, row, column);
            if (column % 32 == 0) *scales++ = packed_scale(blocks, rows, columns, row, column);
        }
}

/* For versions 5 to 7: see lane_part. */
static void pack_tiles(const file_block *blocks, int rows, int columns, char *to) {
    for (int first = 0; first < rows; first += TILE_ROWS)
        for (int chunk = 0; chunk < columns; chunk += CHUNK_COLUMNS, to += CHUNK_BYTES)
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++) { /* half of the chunk; row g or g + 8 */
                    int row = first + lane / 4 + i % 2 * 8, half = chunk + i / 2 * 32;
                    ((uint32_t *)(void *)to)[lane * 4 + i] =
                        packed_word(blocks, rows, columns, row, half + lane % 4 * 8);
                    ((uint16_t *)(void *)(to + 512))[lane / 4 * 4 + i] =
                        packed_scale(blocks, rows, columns, row, half);
                }
}

typedef struct version {
    void (*kernel)(product p);
    int rows, threads; /* of a thread block */
} version;
static const version versions[] = {
    {thread_per_row_kernel, 32 * WARPS, 32 * WARPS},
    {warp_per_row_kernel, WARPS, 32 * WARPS},
    {wide_loads_kernel, WARPS, 32 * WARPS},
    {pairs_kernel, WARPS, 32 * WARPS},
    {matrix_kernel, WARPS * TILE_ROWS, 32 * WARPS},
    {ahead_kernel, WARPS * TILE_ROWS, 32 * WARPS},
    {split_kernel, TILE_ROWS, 32 * SEGMENTS},
};

/* Launch on one of the copies of the weights. */
static bool launch(const version *v, product p, const char *weights, int64_t n_blocks) {
    p.blocks = (const file_block *)(const void *)weights;
    p.words = (const uint4 *)(const void *)weights;
    p.scales = (const uint16_t *)(const void *)(weights + n_blocks * 16);
    p.tiles = weights;
    LLM_LAUNCH(v->kernel, dim3((unsigned)((p.rows + v->rows - 1) / v->rows)),
               dim3((unsigned)v->threads), 0, 0, p);
    return cudaPeekAtLastError() == cudaSuccess;
}

/* Return the seconds per launch, or 0: failed. Each launch reads another copy of the weights, so
 * that none finds its weights in the cache. */
static double time_launches(const version *v, product p, const char *weights, int64_t bytes,
                            int copies, int64_t n_blocks, int runs) {
    cudaEvent_t start, end;
    float milliseconds = 0.0f;
    if (cudaEventCreate(&start)) return 0.0;
    if (cudaEventCreate(&end)) return cudaEventDestroy(start), 0.0;
    bool good = true;
    for (int i = -copies; i < runs && good; i++) { /* the first launches warm up */
        if (i == 0) good = !cudaEventRecord(start, 0);
        good = good && launch(v, p, weights + (i + copies) % copies * bytes, n_blocks);
    }
    good = good && !cudaEventRecord(end, 0) && !cudaEventSynchronize(end) &&
           !cudaEventElapsedTime(&milliseconds, start, end);
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    return good ? milliseconds / 1e3 / runs : 0.0;
}

/* Bytes of the weights in the layout of a version (1 to 7), in whole 256. */
static int64_t layout_bytes(int number, int rows, int columns) {
    int64_t tiles = rounded_up(rows, TILE_ROWS) / TILE_ROWS,
            chunks = rounded_up(columns, CHUNK_COLUMNS) / CHUNK_COLUMNS;
    int64_t bytes = number < 5 ? (int64_t)rows * (columns / 32) * 18 : tiles * chunks * CHUNK_BYTES;
    return rounded_up(bytes, 256);
}

extern "C" int product_devices(void) {
    int n = 0;
    if (cudaGetDeviceCount(&n)) n = 0;
    cudaGetLastError();
    return n;
}

/* Run version `number`, 1 to 7, on blocks (rows, columns / 32) of a file and x (columns), and copy
 * the result to out (rows). runs > 0: also launch it that many times, and set *seconds to the mean
 * time of a launch. Returns NULL, or what failed. */
extern "C" const char *product_run(int number, const void *blocks, const float *x, int rows,
                                   int columns, float *out, int runs, double *seconds) {
    const version *v = &versions[number - 1];
    int64_t n_blocks = (int64_t)rows * (columns / 32), bytes = layout_bytes(number, rows, columns);
    int64_t padded = rounded_up(columns, CHUNK_COLUMNS);
    int copies = 1, device = 0, cache = 0;
    cudaGetLastError(); /* an earlier error is not ours */
    bool good = !cudaGetDevice(&device) &&
                !cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device);
    if (runs > 0) copies = min((int)(4 * (int64_t)cache / bytes) + 2, 64);

    char *host = (char *)calloc((size_t)bytes, 1);
    uint16_t *host_x = (uint16_t *)calloc((size_t)padded, sizeof *host_x);
    char *weights = NULL;
    float *device_x = NULL, *device_out = NULL;
    uint16_t *device_x_f16 = NULL;
    bool room = host && host_x;
    good = good && room;
    if (room) {
        const file_block *from = (const file_block *)blocks;
        if (number < 3) memcpy(host, from, (size_t)n_blocks * sizeof *from);
        else if (number < 5) pack_rows(from, rows, columns, host);
        else pack_tiles(from, rows, columns, host);
        for (int i = 0; i < columns; i++) {
            __half value = __float2half_rn(x[i]);
            memcpy(&host_x[i], &value, sizeof value);
        }
    }
    size_t x_bytes = (size_t)columns * sizeof *x, f16_bytes = (size_t)padded * sizeof *host_x,
           out_bytes = (size_t)rows * sizeof *out;
    emulator_label("weights");
    good = good && !cudaMalloc((void **)&weights, (size_t)bytes * (size_t)copies);
    emulator_label("x");
    good = good && !cudaMalloc((void **)&device_x, x_bytes) &&
           !cudaMalloc((void **)&device_x_f16, f16_bytes);
    emulator_label("out");
    good = good && !cudaMalloc((void **)&device_out, out_bytes);
    for (int i = 0; i < copies && good; i++)
        good = !cudaMemcpy(weights + i * bytes, host, (size_t)bytes, cudaMemcpyHostToDevice);
    good = good && !cudaMemcpy(device_x, x, x_bytes, cudaMemcpyHostToDevice) &&
           !cudaMemcpy(device_x_f16, host_x, f16_bytes, cudaMemcpyHostToDevice);

    product p = {};
    p.rows = rows, p.columns = columns;
    p.x = device_x, p.x_f16 = (const uint4 *)(const void *)device_x_f16;
    p.out = (f32 *)(void *)device_out;
    good = good && launch(v, p, weights, n_blocks) &&
           !cudaMemcpy(out, device_out, out_bytes, cudaMemcpyDeviceToHost);
    if (good && runs > 0)
        good = (*seconds = time_launches(v, p, weights, bytes, copies, n_blocks, runs)) > 0.0;
    const char *failure = good ? NULL : room ? cudaGetErrorString(cudaGetLastError())
                                             : "the computer's memory is full";
    free(host), free(host_x);
    cudaFree(weights), cudaFree(device_x), cudaFree(device_x_f16), cudaFree(device_out);
    return failure;
}
