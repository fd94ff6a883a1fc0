#!/bin/sh
# tests/fuzz.sh SECONDS FUZZER...: runs each fuzzer for its share of the seconds, from its seed corpus
# tests/data/<fuzzer>/ where there is one. What it finds it keeps under build/fuzz/<fuzzer>/.
set -u
seconds=$1
shift
share=$((seconds / $#))
[ "$share" -gt 0 ] || share=1
passed=0 failed=0
for fuzzer in "$@"; do
    name=$(basename "$fuzzer")
    mkdir -p "build/fuzz/$name/corpus"
    seeds=tests/data/$name
    [ -d "$seeds" ] || seeds=
    printf '== %-20s%d s ... ' "$name" "$share"
    # shellcheck disable=SC2086
    if "$fuzzer" -max_total_time="$share" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/$name/" "build/fuzz/$name/corpus" $seeds >"build/fuzz/$name/log" 2>&1; then
        sed -n 's/^stat::number_of_executed_units: */inputs tried: /p' "build/fuzz/$name/log"
        passed=$((passed + 1))
    else
        echo 'failed:'
        grep -v '^#' "build/fuzz/$name/log" | tail -n 60 | sed 's/^/   | /'
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
