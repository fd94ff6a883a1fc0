/* Memory that counts its allocations, can make a chosen allocation fail, and overwrites freed
 * memory. Include it before llm.h: it sets the LLM_MALLOC family. The counters are atomic, since
 * engines may run in several threads. */
#ifndef TEST_MEMORY_H
#define TEST_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#if defined(__GNUC__)
#define TEST_UNUSED __attribute__((unused))
#else
#define TEST_UNUSED
#endif

static long test_live;          /* number of allocations not yet freed */
static long test_allocations;   /* number of allocations so far */
static long test_fail_in = -1;  /* >= 0: this many allocations succeed, then one fails */
static bool test_failed;        /* whether an allocation failed */

static bool test_allocation_fails(void) {
    __atomic_add_fetch(&test_allocations, 1, __ATOMIC_RELAXED);
    if (test_fail_in < 0 || __atomic_fetch_sub(&test_fail_in, 1, __ATOMIC_RELAXED) > 0)
        return false;
    test_failed = true;
    return true;
}

TEST_UNUSED static void *counted_malloc(size_t bytes) {
    void *p = test_allocation_fails() ? NULL : malloc(bytes);
    if (p) __atomic_add_fetch(&test_live, 1, __ATOMIC_RELAXED);
    return p;
}

TEST_UNUSED static void *counted_realloc(void *old, size_t bytes) {
    void *p = test_allocation_fails() ? NULL : realloc(old, bytes);
    if (p && !old) __atomic_add_fetch(&test_live, 1, __ATOMIC_RELAXED);
    return p;
}

TEST_UNUSED static void counted_free(void *p) {
    if (p) __atomic_sub_fetch(&test_live, 1, __ATOMIC_RELAXED);
#if defined(__GLIBC__)
    if (p) memset(p, 0xa5, malloc_usable_size(p)); /* a use after free reads garbage */
    __asm__ __volatile__("" : : "r"(p) : "memory"); /* keep the memset */
#endif
    free(p);
}

#define LLM_MALLOC(bytes) counted_malloc(bytes)
#define LLM_REALLOC(pointer, bytes) counted_realloc(pointer, bytes)
#define LLM_FREE(pointer) counted_free(pointer)

#endif
