#!/bin/sh
# tests/run.sh LLM TEST...: runs the tests, as many at a time as there are processors (or
# LLM_TEST_JOBS), and ends in one line, "N passed, N failed", with ", N skipped" if any were. A test
# is a cmocka program, or a script that ends in such a line itself. LLM_TEST_RUNNER, if set, runs
# programs of another architecture: an emulator with its options. Each test that passes prints one
# line when it ends; a failed one shows its whole output, a skipped one the reason.
set -u

if [ "$1" = --one ]; then # FOLDER TEST: run it with its output in the folder, and print its status
    start=$(date +%s)
    case $3 in
    *.sh) sh "$3" >"$2/$(basename "$3")" 2>&1 ;;
    # shellcheck disable=SC2086
    *) ${LLM_TEST_RUNNER:-} "$3" >"$2/$(basename "$3")" 2>&1 ;;
    esac
    echo "$? $(($(date +%s) - start)) $(basename "$3")"
    exit 0
fi

LLM=$1
shift
export LLM CC
# Two threads are enough to find threading bugs. Waiting threads must not spin, since tests share
# the processors.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
jobs=${LLM_TEST_JOBS:-$(nproc 2>/dev/null || echo 2)}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

sum() { # add up the counts in cmocka's closing lines that begin with this word
    sed -n "s/^\[  *$1 *\] \([0-9][0-9]*\) test(s).*/\1/p" "$log" |
        awk '{ n += $1 } END { print n + 0 }'
}

printf '%s\n' "$@" | xargs -P "$jobs" -n 1 sh "$0" --one "$work" | {
    passed=0 failed=0 skipped=0 done=0
    while read -r status seconds name; do
        log=$work/$name
        line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -n 1)
        if [ -n "$line" ]; then
            p=$(echo "$line" | sed 's/ passed.*//')
            f=$(echo "$line" | sed 's/.* passed, \([0-9]*\) failed.*/\1/')
            s=$(echo "$line" | sed -n 's/.* failed, \([0-9]*\) skipped$/\1/p')
            s=${s:-0}
        else
            p=$(sum PASSED) f=$(sum FAILED) s=$(sum SKIPPED)
        fi
        # a crash, a sanitizer's report at exit, or no tests at all count as one failure
        if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
        if [ $((p + f + s)) -eq 0 ]; then f=1; fi
        printf '== %-20s%4d passed, %d failed, %d skipped  (%d s)\n' "$name" "$p" "$f" "$s" \
            "$seconds"
        if [ "$f" -ne 0 ]; then
            echo "   exit status $status; output:"
            sed 's/^/   | /' "$log"
        elif [ "$s" -ne 0 ]; then
            grep '^SKIPPED' "$log" | sed 's/^/   | /'
        fi
        passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s)) done=$((done + 1))
    done
    if [ $done -lt $# ]; then
        echo "$(($# - done)) of $# tests ended without a result"
        failed=$((failed + $# - done))
    fi
    line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
    echo "$line"
    [ "$failed" -eq 0 ]
}
