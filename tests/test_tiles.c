/* The kernels that use matrix tiles, on a processor that has none: test_kernels.c once more, with
 * the tile instructions emulated. */
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
