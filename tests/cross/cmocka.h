/* The part of cmocka's interface that the tests use, for a machine that has a cross compiler but no
 * cmocka (tests/arm64.sh). As in cmocka, a failed check leaves its test by longjmp, and the closing
 * lines are the same. */
#ifndef CMOCKA_H
#define CMOCKA_H

#include <fnmatch.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

enum { CM_PASSED, CM_FAILED, CM_SKIPPED };

static jmp_buf cm_out;        /* of the test that runs */
static const char *cm_filter; /* run only tests whose name matches this pattern; NULL: all */

static inline void cmocka_set_test_filter(const char *pattern) { cm_filter = pattern; }

#define print_message(...) (printf(__VA_ARGS__), (void)fflush(stdout))
#define print_error(...) ((void)fprintf(stderr, __VA_ARGS__))
#define fail_msg(...) \
    (fprintf(stderr, "%s:%d: ", __FILE__, __LINE__), fprintf(stderr, __VA_ARGS__), \
     fputc('\n', stderr), longjmp(cm_out, CM_FAILED))
#define fail() fail_msg("fail()")
#define skip() longjmp(cm_out, CM_SKIPPED)

#define cm_check(holds, ...) ((holds) ? (void)0 : fail_msg(__VA_ARGS__))
#define assert_true(x) cm_check((x), "not true: %s", #x)
#define assert_false(x) cm_check(!(x), "true: %s", #x)
#define assert_null(x) cm_check((x) == NULL, "not null: %s", #x)
#define assert_non_null(x) cm_check((x) != NULL, "null: %s", #x)
#define assert_ptr_equal(a, b) \
    cm_check((const void *)(a) == (const void *)(b), "differ: %s, %s", #a, #b)

static inline int cm_equal(uintmax_t a, uintmax_t b, bool wanted, const char *what,
                           const char *file, int line) {
    if ((a == b) == wanted) return 1;
    fprintf(stderr, "%s:%d: %s: %" PRIdMAX " and %" PRIdMAX "\n", file, line, what, (intmax_t)a,
            (intmax_t)b);
    longjmp(cm_out, CM_FAILED);
}
#define cm_compare(a, b, wanted, what) \
    ((void)cm_equal((uintmax_t)(a), (uintmax_t)(b), wanted, what, __FILE__, __LINE__))
#define assert_int_equal(a, b) cm_compare(a, b, true, #a " is not " #b)
#define assert_int_not_equal(a, b) cm_compare(a, b, false, #a " is " #b)
#define assert_in_range(x, low, high) \
    cm_check((uintmax_t)(x) >= (uintmax_t)(low) && (uintmax_t)(x) <= (uintmax_t)(high), \
             "out of range: %s", #x)
#define assert_memory_equal(a, b, n) \
    cm_check(!memcmp((a), (b), (size_t)(n)), "bytes differ: %s, %s", #a, #b)
#define assert_memory_not_equal(a, b, n) \
    cm_check(memcmp((a), (b), (size_t)(n)), "the same bytes: %s, %s", #a, #b)
#define assert_string_equal(a, b) cm_check(!strcmp((a), (b)), "\"%s\" is not \"%s\"", (a), (b))

#define cmocka_unit_test(test) {#test, test}
#define cmocka_run_group_tests_name(group, tests, before, after) \
    cm_run(tests, sizeof(tests) / sizeof *(tests), before, after)
#define cmocka_run_group_tests(tests, before, after) \
    cmocka_run_group_tests_name("", tests, before, after)

static inline int cm_run(const struct CMUnitTest *tests, size_t n, int (*before)(void **),
                         int (*after)(void **)) {
    static const char *const words[] = {"       OK", "  FAILED ", " SKIPPED "};
    volatile int count[3] = {0};
    void *state = NULL;
    if (setjmp(cm_out) || (before && before(&state))) {
        printf("[  FAILED  ] %zu test(s): the preparation failed\n", n);
        return 1;
    }
    for (volatile size_t i = 0; i < n; i++) {
        void *own = state;
        if (cm_filter && fnmatch(cm_filter, tests[i].name, 0)) continue;
        printf("[ RUN      ] %s\n", tests[i].name);
        fflush(stdout);
        int result = setjmp(cm_out);
        if (result == CM_PASSED) tests[i].run(&own);
        count[result]++;
        printf("[%s ] %s\n", words[result], tests[i].name);
    }
    if (!setjmp(cm_out)) {
        if (after && after(&state)) count[CM_FAILED]++;
    } else count[CM_FAILED]++;
    printf("[  PASSED  ] %d test(s).\n[  SKIPPED ] %d test(s).\n[  FAILED  ] %d test(s).\n",
           count[CM_PASSED], count[CM_SKIPPED], count[CM_FAILED]);
    return count[CM_FAILED];
}

#endif
