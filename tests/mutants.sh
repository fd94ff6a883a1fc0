#!/bin/sh
# tests/mutants.sh: measures how well the tests find bugs. Each patch under tests/mutants/ plants
# one bug (a "mutant"). This script applies each patch to a fresh copy of the tree, builds and runs
# the tests that cover the patched chapter, and prints whether one of them fails ("caught") or all
# pass ("survived").
#
#     ONLY=tokenizer/   only the patches whose path contains this text
#     SAMPLE=10         only this many, drawn at random from SEED (default: the last commit's
#                       hash, so that each commit draws others)
#     JOBS=2            this many at a time (default: one per processor)
#
# A patch file begins with a sentence that describes the bug. A line `Tests: NAME...` replaces the
# chapter's list of tests, and a line `Survives: REASON` explains why no test can find it. For a test
# that includes tests/device_util.h, NAME may be test_device:test_graphs: a single function. Ends in
# one line, "N passed, N failed". A mutant fails if it survives without a reason, does not apply,
# does not compile, or if its test also fails without the patch.
set -u

tests_of() { # chapter: its tests, the most effective or fastest first
    case $1 in
    files) echo test_files test_folders test_json ;;
    tokenizer) echo test_tokenizer ;;
    chat) echo test_chat ;;
    numbers) echo test_numbers ;;
    kernels) echo test_kernels ;;
    executor) echo tests/races.sh test_kernels test_engine ;;
    cache) echo test_pool test_states test_scheduler ;;
    transformer) echo test_engine test_golden ;;
    sampling) echo test_engine ;;
    scheduler) echo test_states test_scheduler ;;
    speculation) echo test_speculation ;;
    engine) echo test_states test_engine test_scheduler test_faults ;;
    sessions) echo test_sessions ;;
    embedding) echo test_embeddings test_transformer ;;
    cuda) echo test_device test_device_sampling test_cuda_kernels test_device_engine ;;
    command) echo tests/cli.sh tests/cli_batch.sh tests/cli_chat.sh ;;
    *) return 1 ;;
    esac
}

# build TARGET CHAPTER. The libraries are not rebuilt if the chapter is outside the kernels and the
# test contains its own copy of the engine.
build() {
    keep='-o build/libkernels.a -o build/libllm.a'
    if [ "$2" = kernels ]; then keep=
    elif [ "$2" != command ] && ! grep -q 'define LLM_IMPLEMENTATION' "tests/${1#build/}.c"; then
        keep=
    fi
    # shellcheck disable=SC2086
    make -s -o build/flags $keep NVCC= OBSERVED= OPTIMIZE=-O1 "$1"
}

# Run a test up to its first failure.
run() { # command...: 0 if it passes
    "$@" >../log 2>&1 </dev/null &
    while kill -0 $! 2>/dev/null; do
        if grep -q FAILED ../log; then
            { kill $! && wait $!; } 2>/dev/null
            return 1
        fi
        sleep 0.1
    done
    wait $! && ! grep -q FAILED ../log
}

# attempt TEST CHAPTER: 0 if the test passes, 1 if it fails, 2 if it does not compile; its output is
# in ../log
attempt() {
    program=build/${1%%:*} only=
    case $1 in
    *.sh) [ "$1" = tests/races.sh ] || build llm "$2" >../log 2>&1 || return 2
        # shellcheck disable=SC2086
        LLM=./llm run $limit sh "$1" || return 1
        return ;;
    *:*) only=${1#*:} ;;
    esac
    build "$program" "$2" >../log 2>&1 || return 2
    # shellcheck disable=SC2086
    run env LLM_TEST_ONLY="$only" $limit "$program" || return 1
}

fresh() { # enter a new copy of the tree, with its time stamps
    cd "$work" && rm -rf "$mine" && mkdir "$mine" && cp -a pristine "$mine/tree" && cd "$mine/tree"
}

# passes_without TEST CHAPTER: whether the test passes in the unchanged tree. Tried once per test.
passes_without() {
    while ! mkdir "$work/asking" 2>/dev/null; do sleep 1; done
    known=$work/known.$(basename "$1")
    if [ ! -e "$known" ]; then
        fresh && attempt "$1" "$2"
        echo $? >"$known"
    fi
    rmdir "$work/asking"
    [ "$(cat "$known")" -eq 0 ]
}

one() { # patch: try it and print the result in one line
    chapter=$(basename "$(dirname "$1")")
    patch=$work/pristine/$1 start=$(date +%s) verdict=survived by=
    tests=$(sed -n 's/^Tests: *//p' "$patch")
    [ -n "$tests" ] || tests=$(tests_of "$chapter") || verdict='has no chapter of that name'
    fresh || exit 1
    if [ "$verdict" = survived ] && ! patch -p1 -s -f <"$patch" >../log 2>&1; then
        verdict='does not apply'
    fi
    if [ "$verdict" = survived ]; then
        for test in $tests; do
            attempt "$test" "$chapter"
            case $? in
            1) verdict=caught by=$test ;;
            2) verdict='does not compile' by=$test ;;
            *) continue ;;
            esac
            break
        done
    fi
    seconds=$(($(date +%s) - start))
    case $verdict in
    'does not'*) head -n 5 ../log >"$work/why.$$" ;;
    esac
    if [ "$verdict" = caught ] && ! passes_without "$by" "$chapter"; then
        verdict='test fails without it, too:'
    fi
    reason=$(sed -n 's/^Survives: *//p' "$patch")
    if [ "$verdict" = survived ] && [ -n "$reason" ]; then verdict=explained by="($reason)"; fi
    printf '%-10s %-58s %3d s  %s\n' "$verdict" "${1#tests/mutants/}" "$seconds" "$by"
    [ ! -e "$work/why.$$" ] || sed 's/^/   | /' "$work/why.$$"
    rm -rf "${work:?}/$mine" "$work/why.$$"
}

limit=$(command -v timeout >/dev/null 2>&1 && echo timeout 200)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
if [ "${1:-}" = --one ]; then # FOLDER PATCH
    work=$2 mine=mutant.$$
    one "$3"
    exit 0
fi

cd "$(dirname "$0")/.." || exit 1
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}
mkdir -p build && work=$(mktemp -d "$PWD/build/mutants.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

find tests/mutants -name '*.patch' | sort >"$work/all"
grep -F -e "${ONLY:-}" "$work/all" >"$work/chosen"
if [ -n "${SAMPLE:-}" ]; then
    seed=${SEED:-$(git rev-parse HEAD 2>/dev/null)}
    while read -r patch; do
        grep -q '^Survives:' "$patch" ||
            echo "$(echo "$seed $patch" | cksum | cut -d' ' -f1) $patch"
    done <"$work/chosen" | sort -n | head -n "$SAMPLE" | cut -d' ' -f2 >"$work/sample"
    mv "$work/sample" "$work/chosen"
fi
if [ ! -s "$work/chosen" ]; then
    echo "no patch under tests/mutants/ has '${ONLY:-}' in its path"
    echo '0 passed, 1 failed'
    exit 1
fi

# Copy the tree with everything that `make` and `make test` have compiled, and compile the rest of
# what mutants link once.
mkdir -p "$work/pristine/build"
tar -cf - --exclude=./build --exclude=./.git . | tar -C "$work/pristine" -xf - || exit 1
find build -maxdepth 1 -type f -exec cp -p {} "$work/pristine/build" \; || exit 1
(cd "$work/pristine" && make -s \
    -j"$jobs" NVCC= OBSERVED= build/libkernels.a build/libllm.a build/emulated.o \
    build/cuda_on_cpu.o llm) || exit 1

echo "$(wc -l <"$work/chosen") mutants"
xargs -P "$jobs" -n 1 sh "$0" --one "$work" <"$work/chosen" | {
    caught=0 explained=0 failed=0
    while read -r line; do
        echo "$line"
        case $line in
        caught*) caught=$((caught + 1)) ;;
        explained*) explained=$((explained + 1)) ;;
        '| '*) ;;
        *) failed=$((failed + 1)) ;;
        esac
    done
    n=$(wc -l <"$work/chosen")
    lost=$((n - caught - explained - failed))
    echo "caught $caught of $n; $explained survive for a stated reason"
    [ "$lost" -eq 0 ] || echo "$lost ended without a result"
    failed=$((failed + lost))
    # An explained survivor is still a gap: at most 3 in 100, once there are 100 mutants.
    if [ $((explained * 100)) -gt $((n * 3)) ] && [ "$n" -ge 100 ]; then
        echo "more than 3 % survive"
        failed=$((failed + 1))
    fi
    echo "$((caught + explained)) passed, $failed failed"
    [ "$failed" -eq 0 ]
}
