#!/bin/sh
# tests/text.sh: runs $LLM with the bundled int4 model (if LLM_TEST_RUNNER is set, under that
# emulator). One thread and three must give the same text. Ends in one line, "N passed, N failed".
set -u
passed=0 failed=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

run() { # run FILE OPTION...
    file=$1
    shift
    # shellcheck disable=SC2086
    ${LLM_TEST_RUNNER:-} \
        "$LLM" run -m models/tales-q4_0.gguf --temperature 0 -n 16 "$@" "Once upon a time" \
        >"$work/$file" 2>"$work/errors" ||
        echo "exit status $?" >>"$work/$file"
    cat "$work/errors"
}

check() { # check WHAT COMMAND...
    what=$1
    shift
    if "$@"; then passed=$((passed + 1)); else echo "failed: $what"; failed=$((failed + 1)); fi
}

run one --threads 1
run three --threads 3
cat "$work/one"
check 'the text' grep -q '^Once upon a time there was ' "$work/one"
check 'no error' sh -c '! grep -q "exit status" "$1"' sh "$work/one"
check 'the same text with three threads' cmp "$work/one" "$work/three"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
