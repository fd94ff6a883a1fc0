/* The kernels that use matrix tiles, on a processor without tiles: runs test_kernels.c with
 * emulated tile instructions. */
#if defined(__x86_64__) && defined(__linux__)
#include "tiles_on_cpu.c"
#define LLM_EMULATED_TILES
#include "test_kernels.c"
#else
#include <stdio.h>
int main(void) {
    puts("SKIPPED: emulated matrix tiles (only on x86-64)");
    puts("0 passed, 0 failed, 1 skipped");
    return 0;
}
#endif
