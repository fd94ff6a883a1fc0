#!/bin/sh
# tests/embed.sh: checks that llm.h embeds as README.md says. Compiles README.md's example (which
# must equal the one in llm.h) with gcc and clang, with warnings as errors, and runs it. Links llm.h
# into a program of two C files and a C++ file. Compiles it without kernels, and as C++.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0
# -O0 is fast, but misses warnings that need data-flow analysis: tests/docs.sh compiles the examples
# with -O1, and `make arm64` compiles the kernels with warnings as errors.
strict='-O0 -Wall -Wextra -Wpedantic -Werror'

ok() { echo "ok: $1"; passed=$((passed + 1)); }
no() { echo "FAILED: $1"; failed=$((failed + 1)); }
skip() { echo "SKIPPED: $1"; skipped=$((skipped + 1)); }
check() { # check TITLE COMMAND...
    title=$1
    shift
    if "$@"; then ok "$title"; else no "$title"; fi
}

# The program in llm.h's top comment: from its second #define on, without the comment's stars.
awk '/^#ifndef LLM_H/ { exit }
     /^ \*     #define LLM_IMPLEMENTATION/ { n++ }
     n == 2 && /^ \*     / { sub(/^ \*     /, ""); print; if ($0 == "}") exit }' llm.h \
         >"$work/header.c"
# The README's first fenced block of C that defines main.
awk '/^```c$/ { block = ""; inside = 1; next }
     /^```$/ && inside { inside = 0; if (block ~ /int main/) { printf "%s", block; exit } }
     inside { block = block $0 "\n" }' README.md >"$work/example.c"
check 'the example in llm.h is a program' grep -q 'int main' "$work/header.c"
check 'README.md and llm.h show the same program' diff "$work/header.c" "$work/example.c"

cat >"$work/one.c" <<'END'
#define LLM_IMPLEMENTATION
#include "llm.h"
int one(void);
int one(void) { return llm_type_find(LLM_Q4_0)->block_bytes; }
END
cat >"$work/two.c" <<'END'
#include "llm.h"
#include "llm.h"
int two(void);
int two(void) { return llm_request_defaults().n_samples; }
END
cat >"$work/three.cpp" <<'END'
#include "llm.h"
#include <cstdio>
extern "C" int one(void);
extern "C" int two(void);
int main(int argc, char **argv) {
    llm_error error;
    llm_model *model = llm_model_load(argc > 1 ? argv[1] : "no such file", &error);
    llm_engine *engine = model ? llm_engine_create(model, nullptr, &error) : nullptr;
    std::printf("%d %d %s\n", one(), two(), engine ? "runs" : error.message);
    llm_engine_free(engine);
    llm_model_free(model);
    return engine ? 0 : 1;
}
END

cat >"$work/strict.c" <<'END'
#define LLM_IMPLEMENTATION
#include "llm.h"
#if defined(__linux__) && !(defined(MADV_HUGEPAGE) && defined(MADV_DONTNEED))
#error "llm.h does without madvise"
#endif
int main(void) {
#ifdef __linux__
    struct timespec now; /* of the calendar */
    timespec_get(&now, TIME_UTC);
    if (llm_seconds() > 0.5 * (double)now.tv_sec) return 1; /* since the machine was started */
#endif
    return 0;
}
END

with() { # with C-COMPILER C++-COMPILER
    cc=$1 cxx=$2 openmp=
    if ! command -v "$cc" >/dev/null 2>&1; then
        skip "everything with $cc: it is not installed"
        return
    fi
    if echo 'int main(void) { return 0; }' | "$cc" -fopenmp -x c - -o /dev/null 2>/dev/null; then
        openmp=-fopenmp
    fi
    # shellcheck disable=SC2086
    check "$cc -std=c11 $openmp compiles the example without a warning" \
        "$cc" -std=c11 $strict $openmp -I. "$work/example.c" -o "$work/example" -lm
    if [ ! -f models/tales-q4_0.gguf ]; then
        skip "... and it generates text: models/tales-q4_0.gguf is not there"
    elif "$work/example" >"$work/out" 2>"$work/err" && [ "$(wc -c <"$work/out")" -gt 20 ] &&
        [ ! -s "$work/err" ]; then
        ok "... and it generates:$(head -c 60 "$work/out" | tr '\n' ' ')..."
    else
        no "... and it generates text ($(wc -c <"$work/out") bytes; $(head -c 200 "$work/err"))"
    fi
    # Strict C hides madvise and the monotonic clock, but llm.h must use them: otherwise models
    # would take twice the memory, and the time could jump.
    # shellcheck disable=SC2086
    if "$cc" -std=c11 $strict -I. "$work/strict.c" -o "$work/strict" -lm && "$work/strict"; then
        ok "$cc -std=c11 has madvise and a monotonic clock"
    else no "$cc -std=c11 has madvise and a monotonic clock"; fi
    # Without OpenMP there must be no warning about unknown pragmas.
    # shellcheck disable=SC2086
    check "$cc -std=c11, no OpenMP: the implementation" "$cc" -std=c11 $strict -I. \
        -c "$work/one.c" -o "$work/one.o"
    # shellcheck disable=SC2086
    check "$cc -std=c11: a plain include, twice" "$cc" -std=c11 $strict -I. \
        -c "$work/two.c" -o "$work/two.o"
    if ! echo 'int main() { return 0; }' | "$cxx" -x c++ - -o /dev/null 2>/dev/null; then
        skip "$cxx: from C++: it is not installed"
        return
    fi
    # shellcheck disable=SC2086
    if check "$cxx -std=c++11: from C++" "$cxx" -std=c++11 $strict -I. \
        -c "$work/three.cpp" -o "$work/three.o" &&
        "$cxx" "$work/one.o" "$work/two.o" "$work/three.o" -o "$work/program" -lm &&
        [ "$("$work/program" tests/data/golden/wide.gguf)" = "18 1 runs" ]; then
        ok "$cc and $cxx: two C files and a C++ file in one program"
    else
        no "$cc and $cxx: two C files and a C++ file in one program"
    fi
}
with gcc g++
with clang clang++

# ---- LLM_NO_FAST_KERNELS: the same text from the reference loops, compiled in seconds ----
cat >"$work/greedy.c" <<'END'
#include <stdio.h>
#include <string.h>
#define LLM_IMPLEMENTATION
#include "llm.h"
int main(int argc, char **argv) {
    (void)argc;
    llm_error err;
    llm_event event;
    llm_request request = llm_request_defaults();
    request.max_tokens = 40;
    request.sampling.temperature = 0;
    llm_engine_options options = llm_engine_defaults();
    options.backend = llm_cpu_backend(2, LLM_ISA_BEST, &err);
    llm_model *model = options.backend ? llm_model_load(argv[1], &err) : NULL;
    llm_engine *engine = model ? llm_engine_create(model, &options, &err) : NULL;
    if (engine && llm_submit_text(engine, "Once upon a time", &request, NULL, &err))
        while (llm_step(engine, &err) > 0)
            while (llm_next_event(engine, &event)) fwrite(event.text, 1, event.text_length, stdout);
    fprintf(stderr, "%s%s\n", llm_isa_name(llm_cpu_isa(options.backend)), err.message);
    llm_engine_free(engine);
    llm_model_free(model);
    llm_backend_free(options.backend);
    return err.status != LLM_OK;
}
END
cp "$work/greedy.c" "$work/greedy.cpp"
cp "$work/one.c" "$work/one.cpp"
warnings='-Wall -Wextra -Werror'
openmp=
if echo 'int main(void) { return 0; }' | gcc -fopenmp -x c - -o /dev/null 2>/dev/null; then
    openmp=-fopenmp
fi
kernels= library= # LLM_KERNELS: a library of compiled kernels, which saves time
if [ -n "${LLM_KERNELS:-}" ]; then kernels=-DLLM_KERNELS_HERE=-1 library=$LLM_KERNELS; fi

quick() { # quick TITLE COMPILE...: compile and run greedy; its text must equal the normal build's
    quick_title=$1
    shift
    check "$quick_title: compiles without a warning" "$@" -I. -o "$work/quick" -lm
    if "$work/quick" models/tales.gguf >"$work/out" 2>"$work/isa" &&
        cmp "$work/out" "$work/normal" &&
        [ "$(cat "$work/isa")" = reference ]; then
        ok "$quick_title: same text from the reference loops"
    else
        no "$quick_title: same text from the reference loops ($(head -c 200 "$work/isa"))"
    fi
}
if ! command -v gcc >/dev/null 2>&1; then
    skip 'LLM_NO_FAST_KERNELS: gcc is not installed'
# shellcheck disable=SC2086
elif ! gcc -std=c11 -O1 $warnings $openmp $kernels -I. "$work/greedy.c" $library -o "$work/greedy" \
    -lm ||
    ! "$work/greedy" models/tales.gguf >"$work/normal" 2>"$work/isa" ||
    [ "$(wc -c <"$work/normal")" -lt 80 ]; then
    no "LLM_NO_FAST_KERNELS: the normal build does not run ($(head -c 200 "$work/isa"))"
else
    # shellcheck disable=SC2086
    quick "gcc -O2 $openmp, LLM_NO_FAST_KERNELS" gcc -std=c11 -O2 $warnings -Wpedantic $openmp \
        -DLLM_NO_FAST_KERNELS "$work/greedy.c"
    if ! nm "$work/quick" | grep -q 'avx2_\|base_kernels'; then ok '... and has no kernels'
    else no '... and has no kernels'; fi
    # shellcheck disable=SC2086
    if command -v g++ >/dev/null 2>&1; then
        quick "g++ -std=c++17 -O2, LLM_NO_FAST_KERNELS" g++ -std=c++17 -O2 $warnings $openmp \
            -DLLM_NO_FAST_KERNELS "$work/greedy.cpp"
        # the whole implementation as C++; -O1, since GCC 12 warns about its own intrinsics with -O2
        check 'g++ -std=c++17 -O1: the implementation without a warning' \
            g++ -std=c++17 -O1 $warnings $openmp -I. -c "$work/one.cpp" -o "$work/one.o"
    else
        skip 'the implementation as C++: g++ is not installed'
    fi
fi

# ---- make compiles an object again when the flags change, and only then ----
compiles() { # compiles FLAGS: print the number of files compiled
    make B="$work/build" NVCC= EMULATED= OBSERVED= OPTIMIZE="$1" \
        "$work/build/command/docs/chat.o" 2>&1 | grep -c -e ' -c '
}
if [ "$(compiles -O1) $(compiles -O1) $(compiles '-O0 -g') $(compiles '-O0 -g')" = \
    '1 0 1 0' ]; then
    ok 'make compiles again when the flags change, and only then'
else
    no 'make compiles again when the flags change, and only then'
fi

# ---- A change in Part I compiles no kernels, and their objects redefine no public function ----
awk -v part=kernels -f tests/parts.awk llm.h >"$work/before"
awk '{ print } /^ \* \[[1-5]\] |^ \* \[DATA\] / { print " * (changed)" }' llm.h |
    awk -v part=kernels -f tests/parts.awk >"$work/after"
check 'a change in Part I compiles no kernels' cmp "$work/before" "$work/after"
if [ -z "${LLM_KERNELS:-}" ]; then skip 'public functions of kernel objects: no LLM_KERNELS'
elif nm "$LLM_KERNELS" | grep -E ' T _?llm_[a-z]'; then no 'public functions of kernels are weak'
else ok 'public functions of kernels are weak'; fi

line="$passed passed, $failed failed"
[ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
echo "$line"
[ "$failed" -eq 0 ]
