#!/bin/sh
# tests/arm64.sh: builds the program and some of the tests for arm64, with warnings as errors, and
# runs them under qemu. There is no cmocka for arm64 here: tests/cross/ replaces it. Ends in one
# line, "N passed, N failed".
set -u
B=build/arm64
sh tests/need.sh arm64 qemu || exit 1
tests=
for name in kernels golden tokenizer numbers files; do tests="$tests $B/test_$name"; done
# shellcheck disable=SC2086
make --no-print-directory -j"$(nproc 2>/dev/null || echo 2)" B=$B CC=aarch64-linux-gnu-gcc \
    CFLAGS='-g1 -O2 -Wall -Wextra -Werror' NVCC= EMULATED= OBSERVED= CMOCKA= \
    CPPFLAGS='-isystem tests/cross' $tests $B/llm || exit 1
export LLM_TEST_LESS=1 LLM_TEST_RUNNER='qemu-aarch64 -L /usr/aarch64-linux-gnu'
# shellcheck disable=SC2086
exec sh tests/run.sh $B/llm $tests tests/text.sh
