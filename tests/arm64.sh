#!/bin/sh
# tests/arm64.sh: $LLM, which is for arm64, tells a tale under the emulator that LLM_TEST_RUNNER
# names, with the bundled int4 model: the same with one thread and with three. Ends in one line, "N
# passed, N failed".
set -u
passed=0 failed=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

tell() { # tell FILE OPTION...
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

tell one --threads 1
tell three --threads 3
cat "$work/one"
check 'a tale' grep -q '^Once upon a time there was ' "$work/one"
check 'and no error' sh -c '! grep -q "exit status" "$1"' sh "$work/one"
check 'the same with three threads' cmp "$work/one" "$work/three"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
