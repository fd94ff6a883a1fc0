#!/bin/sh
# tests/sanitize.sh TARGET...: make these targets (test, soak, build/sanitize/test_json) with the
# address and undefined-behaviour sanitizers. Two checks are left out because they take the compiler
# as long as all others together (the address sanitizer detects uses of such pointers), and, for
# C++, one that the C compiler does not support.
set -u
export LLM_TEST_LESS=1 UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=allocator_may_return_null=1
sanitize='-fsanitize=address,undefined -fno-sanitize=object-size,pointer-overflow,enum'
exec make --no-print-directory B=build/sanitize LLM=build/sanitize/llm NVCC= OBSERVED= \
    OPTIMIZE=-O1 SANITIZE="$sanitize -fno-sanitize-recover=all -fno-omit-frame-pointer" "$@"
