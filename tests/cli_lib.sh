# tests/cli_lib.sh: shared by the command-line tests, which source it in the repository's root. It
# sets LLM (an absolute path), TOP and T (a temporary folder, which becomes the current one and is
# removed at the end), and defines functions that run a command and check the result.
TOP=$PWD
LLM=${1:-${LLM:-./llm}}
case $LLM in /*) ;; *) LLM=$PWD/$LLM ;; esac
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
trap 'exit 1' INT TERM
cd "$T" || exit 1
passed=0 failed=0 skipped=0
unset NO_COLOR

pass() { passed=$((passed + 1)); }
fail() { # what the test expected
    failed=$((failed + 1))
    echo "FAILED: $name"
    echo "  expected: $1"
    echo "  status:   $status"
    echo "  stdout:   $(head -c 300 out 2>/dev/null | tr '\000\n' '.|')"
    echo "  stderr:   $(head -c 600 err 2>/dev/null | tr '\000\n' '.|')"
}
skip() {
    skipped=$((skipped + 1))
    echo "SKIPPED: $1"
}
run() { # command...: leaves status, out, err
    "$@" >out 2>err </dev/null
    status=$?
}
judge() { # status, pattern in stderr ("": it must be empty), pattern in stdout ("": anything)
    if [ "$status" -ne "$1" ]; then fail "exit status $1"
    elif [ -z "$2" ] && [ -s err ]; then fail "nothing on stderr"
    elif [ -n "$2" ] && ! grep -q -E -e "$2" err; then fail "stderr matches '$2'"
    elif [ -n "$3" ] && ! LC_ALL=C grep -a -q -E -e "$3" out; then fail "stdout matches '$3'"
    else pass
    fi
}
ok() { # name, pattern in stdout, command...
    name=$1 pattern=$2
    shift 2
    run "$@"
    judge 0 "" "$pattern"
}
bad() { # name, status, pattern in stderr, command...: and nothing on stdout
    name=$1 expected=$2 pattern=$3
    shift 3
    run "$@"
    if [ -s out ]; then fail "nothing on stdout"; else judge "$expected" "$pattern" ""; fi
}
piped() { # name, text for standard input (printf), pattern in stdout, command...
    name=$1 text=$2 pattern=$3
    shift 3
    # shellcheck disable=SC2059
    printf "$text" | "$@" >out 2>err
    status=$?
    judge 0 "" "$pattern"
}
same() { # name, file, file
    name=$1
    if cmp "$2" "$3" >log 2>err; then pass; else status=$?; fail "$2 and $3 are the same"; fi
}
json() { # name: the last output is valid JSON and nothing else
    name=$1
    if [ -z "$python" ]; then skip "$1 (no python3 to check JSON with)"
    elif "$python" -c 'import json, sys
text = sys.stdin.buffer.read().decode("utf-8")
json.loads(text, parse_constant=lambda x: 1/0)' <out >/dev/null 2>err; then pass
    else fail "valid JSON"
    fi
}
# name, file, pattern in it: check a complete trace (docs/trace.h). It is an array with one object
# per line, which llm batch can parse
trace() {
    name=$1
    sed -e '1d; $d; s/,$//' "$2" >lines
    "$LLM" batch -m "$M" -q -f lines >objects 2>log </dev/null
    if [ "$(head -n 1 "$2")" != '[' ] || [ "$(tail -n 1 "$2")" != ']' ]; then fail "an array"
    elif [ ! -s lines ] ||
        [ "$(grep -c "unknown key 'pid'" objects)" -ne "$(wc -l <lines)" ]; then
        fail "one object per line: $(grep -v "key 'pid'" objects | head -n 1)"
    elif [ "$(grep -c ',$' "$2")" -ne $(($(wc -l <lines) - 1)) ]; then fail "commas between objects"
    elif ! grep -q -E -e "$3" "$2"; then fail "'$3' in $2"
    elif [ -n "$python" ] &&
        ! "$python" -c 'import json, sys
json.load(open(sys.argv[1], encoding="utf-8"))' "$2" >log 2>&1; then
        fail "valid JSON: $(tail -n 1 log)"
    else pass
    fi
}
closed() { # name, command...: with standard output a pipe whose reader has gone
    name="$1 to a closed pipe"
    shift
    rm -f gone code
    {
        while [ ! -e gone ]; do sleep 0.02; done
        "$@" 2>err </dev/null
        echo $? >code
    } | {
        exec <&-
        : >gone
    }
    while [ ! -s code ]; do sleep 0.02; done
    status=$(cat code)
    : >out
    judge 1 "" "" # without a message
}
has_terminal() { # whether there are pseudo-terminals, and a `script` command with -e
    script --version 2>/dev/null | grep -q util-linux &&
        script -qec true /dev/null >/dev/null 2>&1 </dev/null
}
# Run a command line on a terminal: leaves status, out, err. (script sometimes misses the end of
# its command and waits for ever.)
on_terminal() {
    for attempt in 1 2 3; do
        TERM=xterm timeout 30 script -qec "$1" /dev/null >out 2>err </dev/null
        status=$?
        [ $status -eq 124 ] || break
    done
}
end() { # print the summary line
    line="$passed passed, $failed failed"
    [ $skipped -eq 0 ] || line="$line, $skipped skipped"
    echo "$line"
    [ $failed -eq 0 ]
}
python=$(command -v python3) && "$python" -c 'import json' 2>/dev/null || python=
