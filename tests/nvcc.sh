#!/bin/sh
# tests/nvcc.sh [ARCHITECTURE...]: compiles llm.cu, and the kernels of docs/17-product.cu, for each
# architecture (default: 80 90a), with warnings as errors, and prints each kernel's registers, static
# shared memory and bytes of local memory (spilled registers, and arrays that are not in registers).
# A kernel with local memory fails, except the plain kernels, which are for comparison, the kernels
# that load weights, and cosf, which has an array for huge angles. (CUDA 12's compilers also spill
# up to 256 bytes in five kernels for sm_90, most of them for 5-bit weights; with these compilers it
# is reported and does not fail.) Then it links the program with the first architecture's objects
# and the emulated devices, as `make` does with nvcc, and runs it on an emulated device. Ends in one
# line, "N passed, N failed": one check per architecture, and the program.
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# -gt 0 ] || set -- 80 90a
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
filter=cat
command -v c++filt >/dev/null 2>&1 && filter='c++filt -p'
release=$(nvcc --version | sed -n 's/.*release \([0-9]*\).*/\1/p')

for arch; do # all at once
    for source in llm docs/17-product; do
        nvcc -O3 -std=c++17 -Werror all-warnings -Xcompiler -Wall,-Werror -Xptxas -v \
            -gencode "arch=compute_$arch,code=sm_$arch" \
            -I. -c "$source.cu" -o "$work/${source#docs/}_$arch.o" || exit 1
    done >"$work/log_$arch" 2>&1 && : >"$work/compiled_$arch" &
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
    # A "Function properties" line and the next one are about the kernel named last; "Used" is the
    # last line.
    awk '/Compiling entry function/ { split($0, part, "\047"); name = part[2] }
         /bytes stack frame/ {
             spilled = $1
             for (i = 2; i <= NF; i++) if ($i == "spill") spilled += $(i - 2)
         }
         /Used [0-9]+ registers/ && name != "" {
             shared = 0
             for (i = 2; i <= NF; i++) {
                 if ($i == "registers," || $i == "registers") registers = $(i - 1)
                 if ($i == "smem" || $i == "smem,") shared = $(i - 2)
             }
             printf "%s %s %s %s\n", registers, shared, spilled, name
             name = ""
         }' "$work/log_$arch" >"$work/table"
    awk '{ print $4 }' "$work/table" | $filter | sed 's/(.*//; s/^void //' >"$work/names"
    paste -d' ' "$work/table" "$work/names" |
        awk '{ name = $5; for (i = 6; i <= NF; i++) name = name " " $i
        printf "        %9d  %6d  %7d  %s\n", $1, $2, $3, name }' | sort -k4 >"$work/shown"
    cat "$work/shown"
    if grep 'Potential Performance Loss' "$work/log_$arch"; then # each wgmma waits for the last one
        failed=$((failed + 1))
        continue
    fi
    bad=$(awk '$3 > 0 && !/plain|pack|rope_angles/' "$work/shown")
    if [ ! -s "$work/shown" ]; then
        echo "sm_$arch: no kernels found in the output of ptxas"
        failed=$((failed + 1))
    elif [ -n "$bad" ]; then
        echo "sm_$arch: these kernels spill:"
        echo "$bad"
        if [ "${release:-0}" -ge 13 ]; then failed=$((failed + 1)); else passed=$((passed + 1)); fi
    else
        passed=$((passed + 1))
    fi
done

# Link both devices into one program: only this detects symbols that are defined twice or not at
# all, since each test links one device.
said() { # DEVICE
    build/llm run -m models/tales.gguf -n 4 --temperature 0 --device "$1" "Once upon a time"
}
objects="$work/llm_$1.o $work/17-product_$1.o"
if [ -e "$work/compiled_$1" ] &&
    make -s "DEVICES=$objects \$(EMULATOR) \$(if \$(OBSERVED),build/observed.o)" build/llm &&
    text=$(said emulated) && [ "$text" = "$(said cpu)" ]; then
    echo "the program with the object for sm_$1: $text"
    passed=$((passed + 1))
else
    echo "the program with the object for sm_$1 does not link, or its text on the emulated device" \
        "differs from that on the CPU"
    failed=$((failed + 1))
fi
rm -f build/llm
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
