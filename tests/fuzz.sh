#!/bin/sh
# tests/fuzz.sh SECONDS [NAME]: builds all fuzzers, or those whose names contain NAME, with clang,
# and runs them at once for that many seconds, each from its seed corpus tests/data/<fuzzer>/, if it
# has one. Findings stay in build/fuzz/<fuzzer>/. Ends in one line, "N passed, N failed".
set -u

if [ "$1" = --one ]; then # SECONDS FUZZER: run it and print its status
    name=$(basename "$3") seeds=tests/data/$(basename "$3")
    mkdir -p "build/fuzz/$name/corpus"
    [ -d "$seeds" ] || seeds=
    # shellcheck disable=SC2086
    "$3" -max_total_time="$2" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/$name/" "build/fuzz/$name/corpus" $seeds \
        >"build/fuzz/$name/log" 2>&1
    echo "$? $name"
    exit 0
fi

seconds=$1 B=build/fuzzers
sh tests/need.sh fuzzer || exit 1
# shellcheck disable=SC2046
set -- $(for file in tests/fuzz_*"${2:-}"*.c; do echo "$B/$(basename "$file" .c)"; done)
# Compile the kernels without tracing of comparisons, which does not help the fuzzer, and with
# address-sanitizer checks as calls instead of inline code. They compile in a fraction of the time
# and run as fast.
kernel_flags='-fno-sanitize-coverage=trace-cmp -mllvm -asan-instrumentation-with-call-threshold=0'
make --no-print-directory -j"$(nproc 2>/dev/null || echo 2)" B=$B CC=clang OPTIMIZE=-O1 OPENMP= \
    SANITIZE='-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all' \
    KERNEL_FLAGS="$kernel_flags" LDFLAGS=-fsanitize=fuzzer CMOCKA= \
    NVCC= EMULATED= OBSERVED= "$@" || exit 1
printf '%s\n' "$@" | xargs -P "$#" -n 1 sh "$0" --one "$seconds" | {
    passed=0
    while read -r status name; do
        printf '== %-20s' "$name"
        if [ "$status" -eq 0 ]; then
            tried=$(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz/$name/log")
            echo "inputs tried in $seconds s: $tried"
            passed=$((passed + 1))
        else
            echo "failed with exit status $status:"
            grep -v '^#' "build/fuzz/$name/log" | tail -n 60 | sed 's/^/   | /'
        fi
    done
    echo "$passed passed, $(($# - passed)) failed"
    [ "$passed" -eq $# ]
}
