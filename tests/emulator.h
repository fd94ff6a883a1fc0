/* emulator.h - controls of the emulated GPU (cuda_on_cpu.h) for tests, beyond CUDA's own functions:
 * its memory size, failures to inject, and the last kernel's fault. Plain C, so that the engine's
 * tests can include it. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Set the order in which blocks, warps and lanes run: "forward", "reverse" or "random:SEED".
 * LLM_EMU_ORDER sets the initial order. Returns false if the order is unknown. */
bool emulator_order(const char *order);

/* Set the device's memory size in bytes (default 8 GiB, or LLM_EMU_MEMORY). Existing allocations
 * remain. */
void emulator_memory(size_t bytes);
/* Set the number of devices (default 1), their compute capability as MAJOR * 10 + MINOR (80) and
 * the driver's version (13000). */
void emulator_devices(int count, int compute_capability, int driver_version);

/* Make the nth call of each kind from now on fail; -1: none. */
void emulator_fail_allocation(long n); /* device or pinned memory: out of memory */
void emulator_fail_launch(long n); /* a kernel: cudaGetLastError reports it; the device survives */
void emulator_lose_device(long n); /* lose the device after n more operations of its streams */
bool emulator_failed(void);        /* whether the failure has happened */

/* Simulate a wrong kernel: after each of its launches, change one number (or make it a NaN) in each
 * allocation that it has written. The kernels whose names contain `name` are counted in the order
 * of their first launches (each instance of a template counts), and `index` is one of them; -1:
 * all. "graph": all kernels of graphs. NULL: none. */
void emulator_corrupt(const char *name, int index, bool nan);
uint64_t emulator_corrupted(void); /* launches changed since then */

/* The last faulty kernel's mistake, with file and line; "" if there was none. After a fault the
 * device is lost: every call returns an error until emulator_recover. */
const char *emulator_fault(void);
/* Restore a lost device. Allocations remain and can be freed. */
void emulator_recover(void);

/* Counters since the start of the process. */
typedef struct emulator_counts {
    uint64_t launches;          /* kernels run, graphs included */
    uint64_t graph_launches;
    uint64_t blocks, threads;
    uint64_t barriers;          /* __syncthreads of whole blocks */
    uint64_t warp_operations;   /* shuffles, votes, fragment loads and products of whole warps */
    uint64_t matrix_products;   /* mma instructions, also counted as warp operations */
    uint64_t arithmetic;        /* emulator_operation: per warp, the calls of its busiest lane */
    uint64_t copies;            /* memcpy and memset, graphs included */
    uint64_t live_allocations, live_bytes;   /* current values, of device memory */
    uint64_t live_pinned, live_handles;      /* pinned memory; streams, events and graphs */
} emulator_counts;
emulator_counts emulator_counted(void);

/* A kernel's thread calls this at each operation on the numbers of counted.h. */
void emulator_operation(void);

/* One access of a warp to memory. Device code compiled with -fsanitize=thread calls a function
 * before each load and store; the emulator provides these functions (the thread sanitizer itself is
 * not linked), so it sees every access that the compiler left in a kernel. The k-th execution of an
 * instruction by each lane counts as one access of the warp. This is exact where the lanes of a
 * warp do not diverge. */
typedef struct emulator_access {
    const char *kernel;       /* the kernel's name at launch */
    uint64_t launch;          /* number of the launch in this process, from 1 */
    uint32_t grid[3], block[3];
    uint32_t block_index[3];
    uint32_t warp;            /* index of the warp in its block */
    const void *instruction;  /* code address, which identifies the instruction */
    bool shared, store;       /* memory: shared or else global; store or else load */
    uint32_t lanes;           /* participating lanes: bit i is lane i */
    uint32_t bytes;           /* bytes per lane */
    uint32_t operations;      /* the first lane's calls of emulator_operation before the access */
    uint64_t address[32];     /* address of each lane; in shared memory, the offset */
    const char *memory;       /* the name of the shared array, or the label of the allocation */
    uint64_t start;           /* first address of that array or allocation */
    uint32_t used;            /* distinct bytes over all lanes */
    /* global: 32-byte sectors and 128-byte lines touched; memory transfers whole sectors */
    uint32_t sectors, lines;
    /* shared: passes, each reading one 4-byte word from each of 32 banks; fewest possible passes */
    uint32_t passes, least;
} emulator_access;

/* Call the observer with each access once the access's block has ended; NULL: stop. Device code
 * compiled without -fsanitize=thread makes no such calls and runs at full speed. */
typedef void (*emulator_observer)(void *user, const emulator_access *access);
void emulator_observe(emulator_observer observer, void *user);
/* Label future allocations. The text must exist as long as they do. */
void emulator_label(const char *label);

#ifdef __cplusplus
}
#endif
#endif
