#!/bin/sh
# tests/run.sh LLM TEST...: runs the tests one after another and ends in one line, "N passed, N failed",
# with ", N skipped" if some were. A test is a cmocka program or a script that ends in such a line itself.
# LLM_TEST_RUNNER is put before the programs: an emulator with its options, where they are another machine's.
# What passes is one line; a test that fails shows all it printed, a skip shows why.
set -u
LLM=$1
shift
export LLM CC
# More threads than processors must not spin while they wait: the machine may be busy with other things too.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
passed=0 failed=0 skipped=0

sum() { # the numbers before a word at the start of cmocka's closing lines
    sed -n "s/^\[  *$1 *\] \([0-9][0-9]*\) test(s).*/\1/p" "$log" | awk '{ n += $1 } END { print n + 0 }'
}

for test in "$@"; do
    name=$(basename "$test")
    printf '== %-20s' "$name"
    start=$(date +%s)
    case $test in
    *.sh) sh "$test" >"$log" 2>&1 ;;
    # shellcheck disable=SC2086
    *) ${LLM_TEST_RUNNER:-} "$test" >"$log" 2>&1 ;;
    esac
    status=$?
    seconds=$(($(date +%s) - start))
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -n 1)
    if [ -n "$line" ]; then
        p=$(echo "$line" | sed 's/ passed.*//')
        f=$(echo "$line" | sed 's/.* passed, \([0-9]*\) failed.*/\1/')
        s=$(echo "$line" | sed -n 's/.* failed, \([0-9]*\) skipped$/\1/p')
        s=${s:-0}
    else
        p=$(sum PASSED) f=$(sum FAILED) s=$(sum SKIPPED)
    fi
    # a crash, a sanitizer's report at the end, or no tests at all
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
    if [ $((p + f + s)) -eq 0 ]; then f=1; fi
    printf '%4d passed, %d failed, %d skipped  (%d s)\n' "$p" "$f" "$s" "$seconds"
    if [ "$f" -ne 0 ]; then
        echo "   exit status $status; all it printed:"
        sed 's/^/   | /' "$log"
    elif [ "$s" -ne 0 ]; then
        grep '^SKIPPED' "$log" | sed 's/^/   | /'
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done

line="$passed passed, $failed failed"
[ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
echo "$line"
[ "$failed" -eq 0 ]
