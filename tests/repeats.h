/* How often a test repeats something: fewer times where everything is slow, such as with sanitizers
 * (LLM_TEST_LESS is set) or on an emulator. */
#ifndef REPEATS_H
#define REPEATS_H

#include <stdbool.h>
#include <stdlib.h>

static inline bool do_less(void) {
#ifdef LLM_EMULATED_TILES
    return true;
#else
    return getenv("LLM_TEST_LESS") != NULL;
#endif
}

static inline int repeats(int usual, int less) { return do_less() ? less : usual; }

#endif /* REPEATS_H */
