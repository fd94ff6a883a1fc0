#!/bin/sh
# tests/docs.sh: checks the book. Its quotes must equal the source; its commands, options, symbols,
# links and pictures must exist; and the programs in docs/examples must compile without a warning
# and run.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0
ok() { passed=$((passed + 1)); }
no() { echo "FAILED: $1"; failed=$((failed + 1)); }
skip() { echo "SKIPPED: $1"; skipped=$((skipped + 1)); }
check() {
    title=$1
    shift
    if "$@" >"$work/log" 2>&1; then ok; else no "$title"; head -n 20 "$work/log"; fi
}

has_parts() { # PAGE
    for part in 'The problem' 'The idea' 'In C' 'On a GPU' 'Run it' 'What it is worth' 'Exercises' \
        'What production engines do beyond this' 'Papers'; do
        grep -q "^## $part" "$1" || { echo "$1 has no part '$part'"; return 1; }
    done
    grep -q '^Answers:' "$1" || { echo "$1 has no answers"; return 1; }
}

check 'quotes, links, symbols, commands and options of the book' sh docs/make.sh check
check 'README.md: at most 100 lines' awk 'END { exit NR > 100 }' README.md
for page in README.md docs/features.md docs/command.md docs/models.md docs/types.md docs/text.md \
    docs/bench.md docs/gpu.md models/README.md models/SOURCES.md; do
    check "$page: at most 100 columns, except in tables, quoted text and code" env LC_ALL=C awk '
        /^```/ { code = !code } code || /^ *\|/ || /^>/ { next }
        { line = $0; gsub(/[\200-\277]/, "", line) }
        length(line) > 100 { print; bad = 1 } END { exit bad }' "$page"
done
for lesson in docs/[0-9]*.c; do
    page=${lesson%.c}
    check "$page.md: a page with its parts" has_parts "$page.md"
    check "$page.md: quotes C and CUDA" awk \
        '/^## / { part = $0 } /^```c$/ || /^```cuda$/ { quotes[part]++ }
        END { exit !(quotes["## In C"] && quotes["## On a GPU"]) }' "$page.md"
    check "$page.md: exercises with a switch and a line to change, and an answer to each" awk '
        /^## Exercises/ { part = 1 } /^Answers:/ { part = 2 } /^## What production/ { part = 0 }
        part && /^[0-9]+\. / { n[part]++ }
        part == 1 && /A switch:|`llm / { flips++ }
        part == 1 && /A line:/ { lines++ }
        END { print n[1] " exercises, " n[2] " answers"
              exit !(n[1] >= 3 && n[1] == n[2] && flips && lines) }' "$page.md"
    check "$page.md: output fits 80 columns" env LC_ALL=C awk '
        /^<!-- run/ { getline; shown = 1; next } shown && /^```/ { shown = 0 }
        shown { gsub(/[\200-\277]/, ""); if (length > 80) { print; bad = 1 } } END { exit bad }' \
            "$page.md"
    check "$page.svg: exists, in light and dark, and is below 65 kB" awk '
        { bytes += length + 1 } /<svg / { svg = 1 } /prefers-color-scheme:dark/ { dark = 1 }
        /^<.svg>$/ { end = 1 } END { exit !(svg && dark && end && bytes < 65000) }' "$page.svg"
    check "$page.md: shows $page.svg" grep -q "](${page#docs/}.svg)" "$page.md"
    # exit in a rule also runs END
    check "$page.md: shows output" awk '
        /^<!-- run/ { getline; if (!/^```/) empty = 1; getline; if (/^```/) empty = 1; found = 1 }
        END { exit empty || !found }' "$page.md"
done

# The checks must find each kind of mistake.
for mistake in '09-prefix s/<!-- quote llm.h llm__table_match/<!-- quote llm.h llm__table_mitch/' \
    '09-prefix s/](09-prefix.c)/](09-prefux.c)/' \
    '09-prefix s/`llm lesson prefix --help`/`llm lesson prefix --halp`/' \
    '09-prefix s/`llm__table_match`/`llm__table_mutch`/' \
    '13-tokens s/`tokens_by_hand`/`tokens_by_feet`/' \
    '04-attention s/`[*]total [*]= shrink;`/`*total *= shrank;`/' \
    'talk/slides s/memory --card/memory --cart/' 'models s/](types.md)/](tipes.md)/' \
    'command s/tokenize --pieces/tokenize --pisces/'; do
    page=${mistake%% *}.md
    mkdir -p "$work/docs"
    cp -r docs/. "$work/docs/"
    for file in llm.h llm.cu main.c models README.md; do [ ! -e "$file" ] ||
        ln -sfn "$here/$file" "$work/$file"; done
    sed "${mistake#* }" "docs/$page" >"$work/docs/$page"
    case ${LLM:-./llm} in /*) program=$LLM ;; *) program=$here/${LLM:-./llm} ;; esac
    if cmp -s "docs/$page" "$work/docs/$page"; then no "the mistake changes nothing: $mistake"
    elif (cd "$work" && LLM=$program sh docs/make.sh check "${mistake%% *}") >"$work/log" 2>&1; then
        no "the mistake is not found: $mistake"
    else ok; fi
done

# So must the check of the web pages. write: the page is made again, but must not be good.
if command -v cmark-gfm >/dev/null; then
    for mistake in 'check 09-prefix.md s/The problem/The problems/' \
        'check talk/slides.md s/Tell a story/Sell a story/' 'check frame.html s/Contents/Content/' \
        'write 09-prefix.md s/](09-prefix.c)/](09-prefux.c)/' \
        'write bench.md s/](#another-/](#no-other-/' \
        'write talk/slides.md s/(..\/03-kv.md)/(..\/04-kv.md)/' \
        'write README.md s/](features.md)/](types.md)/'; do
        page=${mistake#* } page=${page%% *}
        cp -r docs/. "$work/docs/"
        sed "${mistake#* * }" "docs/$page" >"$work/docs/$page"
        if cmp -s "docs/$page" "$work/docs/$page"; then no "the mistake changes nothing: $mistake"
        elif (cd "$work" && sh docs/html.sh "${mistake%% *}") >"$work/log" 2>&1; then
            no "the mistake is not found: $mistake"
        else ok; fi
    done
    cp -r docs/. "$work/docs/"
    check 'without a mistake, the web pages are good' sh "$work/docs/html.sh" check
else skip 'docs/index.html, the book as a web page: cmark-gfm is not installed'; fi

openmp=
cc=${CC:-cc}
if echo 'int main(void) { return 0; }' | $cc -fopenmp -x c - -o /dev/null 2>/dev/null; then
    openmp=-fopenmp
fi
kernels= library= # LLM_KERNELS: a library of compiled kernels, which saves time
if [ -n "${LLM_KERNELS:-}" ]; then kernels=-DLLM_KERNELS_HERE=-1 library=$LLM_KERNELS; fi
for example in embed chat batch embeddings; do
    check "docs/examples/$example.c compiles without a warning" \
        $cc -std=c11 -O1 -Wall -Wextra -Wpedantic -Werror $openmp $kernels \
        -I. "docs/examples/$example.c" $library -o "$work/$example" -lm
done
cat >"$work/trace.c" <<'END'
#include "llm.h"
#include "docs/trace.h"
int main(void) {
    trace_writer trace;
    llm_engine_options options = llm_engine_defaults();
    options.trace = trace_write;
    options.trace_user = &trace;
    return trace_open(&trace, "trace.json") || trace_close(&trace) || !options.trace;
}
END
check 'docs/trace.h compiles without a warning' $cc -std=c11 -Wall -Wextra -Wpedantic -Werror -I. \
    -c "$work/trace.c" -o "$work/trace.o"
model=models/tales-q4_0.gguf
runs() { # title, pattern, command...
    title=$1 pattern=$2
    shift 2
    if [ ! -f $model ]; then skip "$title: $model is not there"
    elif "$@" >"$work/out" 2>"$work/err" && grep -q "$pattern" "$work/out"; then ok
    else no "$title: $(head -c 300 "$work/out" "$work/err")"; fi
}
runs 'embed.c generates text' ' ' "$work/embed" $model "Once upon a time"
runs 'batch.c: all answers, in fewer steps than tokens' '^90 tokens in [34][0-9] steps$' \
    "$work/batch" $model
runs 'chat.c answers' '[a-z]' sh -c "printf 'There was a king\nThe queen\n' | '$work/chat' $model"
if grep -q '^\[[1-9][0-9]* prompt tokens so far' "$work/err" 2>/dev/null; then ok
else no 'chat.c: the second turn finds the first in the cache'; fi
runs 'embeddings.c: two sentences of three are alike' '^ 0[.][89][0-9]* 1.000 0[.][67]' \
    "$work/embeddings" $model
check 'embed.c: a missing model is an error' sh -c "! '$work/embed' no.gguf"
if echo 'int main() { return 0; }' | g++ -x c++ - -o /dev/null 2>/dev/null; then
    printf '#define LLM_IMPLEMENTATION\n#include "llm.h"\n' >"$work/llm.c"
    check 'embed.cpp compiles without a warning' sh \
        -c "$cc -O1 $openmp $kernels -I. -c '$work/llm.c' -o '$work/llm.o' &&
        g++ -std=c++11 -Wall -Wextra -Wpedantic -Werror -I. docs/examples/embed.cpp \
            '$work/llm.o' $library $openmp -o '$work/embedpp' -lm"
    runs 'embed.cpp generates text' ' ' "$work/embedpp" $model
else
    skip 'embed.cpp: no C++ compiler'
fi

line="$passed passed, $failed failed"
[ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
echo "$line"
[ "$failed" -eq 0 ]
