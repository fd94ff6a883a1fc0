/* emulator.h - what a test can ask of the emulated GPU (cuda_on_cpu.h) beyond CUDA's own functions:
 * how much memory it has, when it is to fail, what was wrong with the last kernel. Plain C, for the
 * tests of the engine. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The order in which blocks, warps and lanes run: "forward", "reverse" or "random:SEED".
 * LLM_EMU_ORDER sets it at the start. False: no such order. */
bool emulator_order(const char *order);

/* The device's memory in bytes; LLM_EMU_MEMORY sets it at the start (8 GiB). What is allocated
 * stays. */
void emulator_memory(size_t bytes);
/* How many devices there are (1), their number as MAJOR * 10 + MINOR (80), and the driver's version
 * (13000). */
void emulator_devices(int count, int compute_capability, int driver_version);

/* The nth of each kind from now on fails; -1: none does. */
void emulator_fail_allocation(long n); /* of device or pinned memory: out of memory */
/* of a kernel: told by the next cudaGetLastError; the device lives on */
void emulator_fail_launch(long n);
/* the device is lost after n more operations of its streams */
void emulator_lose_device(long n);
bool emulator_failed(void);            /* has that come to pass? */

/* What the last faulty kernel did wrong, with file and line; "" if none did. The device is lost
 * then, until emulator_recover: every call gives an error. */
const char *emulator_fault(void);
/* The device is as new, but what is allocated stays and can be freed. */
void emulator_recover(void);

/* What the device has done since the start. */
typedef struct emulator_counts {
    uint64_t launches;          /* kernels run, those of graphs too */
    uint64_t graph_launches;
    uint64_t blocks, threads;
    uint64_t barriers;          /* __syncthreads of whole blocks */
    uint64_t warp_operations;   /* shuffles, votes, fragment loads and products of whole warps */
    uint64_t matrix_products;   /* of these: mma */
    uint64_t copies;            /* memcpy and memset, those of graphs too */
    uint64_t live_allocations, live_bytes;   /* device memory, now */
    uint64_t live_pinned, live_handles;      /* pinned host memory; streams, events, graphs: now */
} emulator_counts;
emulator_counts emulator_counted(void);

/* What the threads of a warp do to memory in one instruction. Code that was compiled with
 * -fsanitize=thread calls a function before each load and store; here it is the emulator that
 * answers these calls (not the thread sanitizer, which is not linked). So every access that the
 * compiler left in a kernel is seen. The k-th time that each lane comes to an instruction is taken
 * as one access of its warp: exact where the lanes of a warp go the same way. */
typedef struct emulator_access {
    const char *kernel;       /* the name at its launch */
    uint64_t launch;          /* which one since the start: 1 is the first */
    uint32_t grid[3], block[3];
    uint32_t block_index[3];
    uint32_t warp;            /* of its block */
    const void *instruction;  /* in the program: tells instructions apart */
    bool shared, store;       /* shared memory, or global; a store, or a load */
    uint32_t lanes;           /* that take part: bit i is lane i */
    uint32_t bytes;           /* of each of them */
    uint64_t address[32];     /* of each of them; in shared memory the offset */
    const char *memory;       /* the name of the shared array, or the label of the allocation */
    uint64_t start;           /* where that begins */
    uint32_t used;            /* different bytes among all lanes' */
    /* global: pieces of 32 and of 128 bytes that hold them; memory moves whole sectors */
    uint32_t sectors, lines;
    /* shared: a pass gives one word of 4 bytes from each of 32 banks; least: without a conflict */
    uint32_t passes, least;
} emulator_access;

/* From now on each access is shown to the observer, when its block has ended; NULL: to nobody.
 * Device code that was not compiled so shows nothing, and runs as fast as ever. */
typedef void (*emulator_observer)(void *user, const emulator_access *access);
void emulator_observe(emulator_observer observer, void *user);
/* What is allocated from now on is called so; the text must last. */
void emulator_label(const char *label);

#ifdef __cplusplus
}
#endif
#endif
