#!/bin/sh
# tests/races.sh: runs the CPU executor's plan under the thread sanitizer (tests/races.c). Ends in
# "N passed, N failed".
set -u
CC=${CC:-cc}
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
if ! echo 'int main(void) { return 0; }' | "$CC" -fsanitize=thread -x c - -o "$T/try" 2>/dev/null ||
    ! "$T/try" 2>/dev/null; then
    echo "SKIPPED: races (the compiler has no thread sanitizer, or it does not run here)"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
passed=0 failed=0
"$CC" -std=gnu11 -g1 -O1 -fopenmp -fsanitize=thread -DLLM_KERNELS_HERE=-1 -I. \
    -Itests tests/races.c "${LLM_KERNELS:-build/libkernels.a}" \
    -lm -o "$T/races" || { echo "0 passed, 1 failed"; exit 1; }
if "$T/races" >"$T/log" 2>&1; then passed=$((passed + 1)); else
    failed=$((failed + 1))
    head -n 60 "$T/log"
fi
if "$T/races" weakened >"$T/log" 2>&1; then
    failed=$((failed + 1))
    echo "without barriers, the run succeeds, but must fail"
elif grep -q 'data race' "$T/log"; then passed=$((passed + 1))
else
    failed=$((failed + 1))
    echo "without barriers, the sanitizer reports no race:"
    head -n 20 "$T/log"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
