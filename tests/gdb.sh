#!/bin/sh
# tests/gdb.sh: replays the gdb session of docs/debugging.md in a build without optimisation. Each
# command must work, and print what the page shows, except for line numbers, source lines and the
# digits of floats. RENEW=yes puts what it prints into the page. Without gdb, or where gdb may not
# trace processes, the test is skipped. Ends in one line, "N passed, N failed".
set -u
cd "$(dirname "$0")/.." || exit 1
page=docs/debugging.md B=build/debug
skip() { echo "SKIPPED: the session in gdb: $1"; echo '0 passed, 0 failed, 1 skipped'; exit 0; }
command -v gdb >/dev/null 2>&1 || skip 'there is no gdb'
export DEBUGINFOD_URLS=
[ "$(gdb -q -nx -batch -ex 'break main' -ex run -ex 'print 6 * 7' --args true 2>/dev/null |
    tail -n 1)" = '$1 = 42' ] || skip 'gdb cannot run a program here'
make -s --no-print-directory B=$B LLM=$B/llm OPTIMIZE='-O0 -g' NVCC= EMULATED= OBSERVED= \
    $B/llm || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# The session: the indented lines from "$ gdb" to the next heading.
sed -n '/^    \$ gdb/,/^## /p' $page | sed -n 's/^    //p' >"$work/page"
sed -n 's/^(gdb) \(.*\)/echo (gdb) \1\\n\n\1/p' "$work/page" >"$work/commands"
eval "set -- $(sed -n '1s/^.*--args [^ ]* //p' "$work/page")"
printf 'set width 0\nset style enabled off\n' | cat - "$work/commands" >"$work/script"
gdb -q -nx -batch -x "$work/script" --args $B/llm "$@" >"$work/all" 2>"$work/errors" </dev/null
{
    head -n 1 "$work/page"
    sed -E '/^\[|^Using host|^Run till exit|^$/d; s/ (at|file) docs\/\.\.\// \1 /; s/[[:space:]]+$//' "$work/all"
} >"$work/printed"

if [ "${RENEW:-}" = yes ]; then
    awk -v from="$work/printed" '
        function pour(command,   line) { # what the session printed up to the next command
            while ((getline line < from) > 0) {
                if (line ~ /^\(gdb\) /) { held = line; return }
                print "    " line
            }
        }
        /^    \$ gdb/ { inside = 1; getline held < from; print; pour(); next }
        inside && /^## / { inside = 0 }
        inside && /^    \(gdb\) / { print; pour(); next }
        inside && /^    / { next }
        { print }' $page >"$work/new" && cp "$work/new" $page
    exit
fi
blur() { # line numbers, source lines, floats
    sed -E 's/(llm\.h[:,])( line)? ?[0-9]+/\1/; s/^[0-9]+\t.*/source/;
        s/-?[0-9]+\.[0-9]+(e-?[0-9]+)?/float/g' "$1"
}
blur "$work/page" >"$work/a"
blur "$work/printed" >"$work/b"
n=$(grep -c '^(gdb)' "$work/page")
if grep -A 1 'script:[0-9]*: Error' "$work/errors" || [ "$n" -lt 20 ] ||
    ! diff "$work/a" "$work/b"; then
    echo "the session differs from $page (RENEW=yes sh tests/gdb.sh puts it there)"
    echo "0 passed, 1 failed"
    exit 1
fi
echo "$n passed, 0 failed"
