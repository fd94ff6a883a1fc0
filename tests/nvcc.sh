#!/bin/sh
# tests/nvcc.sh [ARCHITECTURE...]: compiles llm.cu for each (default: 80 90), warnings as errors,
# and prints what each kernel takes: registers, static shared memory, bytes in local memory: spilled
# registers, and arrays that did not get into registers. Any fails, but for those of the plain
# kernels, which are there for comparison, of loading weights, and of cosf, which has an array for
# huge angles. (CUDA 12's compilers also spill up to 256 bytes in five of the kernels for sm_90,
# most of them of 5-bit weights: with those it is told, and does not fail.) Then links the program
# with the first one's object beside the emulated devices, as `make` does where nvcc is, and runs it
# on one of those. Ends in one line, "N passed, N failed": one check per architecture, and that one.
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# -gt 0 ] || set -- 80 90
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
filter=cat
command -v c++filt >/dev/null 2>&1 && filter='c++filt -p'
release=$(nvcc --version | sed -n 's/.*release \([0-9]*\).*/\1/p')

for arch; do # all at once
    nvcc -O3 -std=c++17 -Werror all-warnings -Xcompiler -Wall,-Werror -Xptxas -v \
        -gencode "arch=compute_$arch,code=sm_$arch" \
        -I. -c llm.cu -o "$work/llm_$arch.o" >"$work/log_$arch" 2>&1 && : >"$work/compiled_$arch" &
done
wait
for arch; do
    if [ ! -e "$work/compiled_$arch" ]; then
        cat "$work/log_$arch"
        echo "sm_$arch: does not compile"
        failed=$((failed + 1))
        continue
    fi
    echo "sm_$arch:  registers  shared  spilled  kernel"
    # A "Function properties" line and the one behind it tell of the kernel named last; "Used" comes
    # last.
    awk '/Compiling entry function/ { split($0, part, "\047"); name = part[2] }
         /bytes stack frame/ { spilled = $1; for (i = 2; i <= NF; i++) if ($i == "spill") spilled += $(i - 2) }
         /Used [0-9]+ registers/ && name != "" {
             shared = 0
             for (i = 2; i <= NF; i++) { if ($i == "registers," || $i == "registers") registers = $(i - 1); if ($i == "smem" || $i == "smem,") shared = $(i - 2) }
             printf "%s %s %s %s\n", registers, shared, spilled, name
             name = ""
         }' "$work/log_$arch" >"$work/table"
    awk '{ print $4 }' "$work/table" | $filter | sed 's/(.*//; s/^void //' >"$work/names"
    paste -d' ' "$work/table" "$work/names" |
        awk '{ name = $5; for (i = 6; i <= NF; i++) name = name " " $i
        printf "        %9d  %6d  %7d  %s\n", $1, $2, $3, name }' | sort -k4 >"$work/shown"
    cat "$work/shown"
    bad=$(awk '$3 > 0 && !/plain|pack|rope_angles/' "$work/shown")
    if [ ! -s "$work/shown" ]; then
        echo "sm_$arch: no kernels found in what ptxas says"
        failed=$((failed + 1))
    elif [ -n "$bad" ]; then
        echo "sm_$arch: these kernels spill:"
        echo "$bad"
        if [ "${release:-0}" -ge 13 ]; then failed=$((failed + 1)); else passed=$((passed + 1)); fi
    else
        passed=$((passed + 1))
    fi
done

# What both define, or neither, shows only here: the tests link one of them at a time.
if [ -e "$work/compiled_$1" ] &&
    make -s "DEVICES=$work/llm_$1.o \$(EMULATOR) \$(if \$(OBSERVED),build/observed.o)" build/llm &&
    text=$(build/llm run -m models/tales.gguf -n 4 --temperature 0 \
    --device emulated "Once upon a time") &&
    [ "$text" = \
    "$(build/llm run -m models/tales.gguf -n 4 --temperature 0 --device cpu "Once upon a time")" ]; then
    echo "the program with the object for sm_$1: $text"
    passed=$((passed + 1))
else
    echo "the program with the object for sm_$1 does not link, or does not say on the emulated device what it says on the CPU"
    failed=$((failed + 1))
fi
rm -f build/llm
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
