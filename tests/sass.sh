#!/bin/sh
# tests/sass.sh [--table] [--keep FOLDER] [ARCHITECTURE...]: what the machine code of llm.cu says
# about its kernels, without a GPU. For each architecture (default: 80, and 90a where the Makefile
# has it, or else 90) it compiles llm.cu with nvcc, dumps the machine code with cuobjdump and prints
# a table of the kernels: registers, spills, shared memory, blocks per SM, warp instructions in the
# main loop, loads in flight, and loads that a warp waits for one after another (sass.py). Then, for
# the newest architecture, a forecast for an H200 (gpu_model.py); with --table, also into
# docs/gpu.md. --keep: keep the compiled files there, and use those that are still up to date.
# --launches: only build and run the list of launches, which needs neither nvcc nor cuobjdump.
#
# It needs nvcc, cuobjdump ($CUOBJDUMP: its path), python3, and build/ as `make` leaves it. If a
# tool is missing, it says so and ends with status 77.
set -u
cd "$(dirname "$0")/.." || exit 1
table='' work='' launches=''
while :; do
    case ${1:-} in
    --table) table=1 && shift ;;
    --launches) launches=1 && shift ;;
    --keep) mkdir -p "$2" && work=$(cd "$2" && pwd) && shift 2 || exit 1 ;;
    *) break ;;
    esac
done
hopper=90
grep -q '^GPUS.* 90a' Makefile && hopper=90a
[ $# -gt 0 ] || set -- 80 $hopper

skip() { echo "SKIPPED: tests/sass.sh: $1"; exit 77; }
find_tool() { # print the path of a tool: on the PATH, or where CUDA puts it
    command -v "$1" && return
    for folder in /usr/local/cuda/bin /opt/cuda/bin /usr/local/cuda-*/bin; do
        [ ! -x "$folder/$1" ] || { echo "$folder/$1"; break; }
    done
}
if [ -z "$launches" ]; then
    nvcc=$(find_tool nvcc)
    [ -n "$nvcc" ] || skip 'no nvcc'
    cuobjdump=${CUOBJDUMP:-$(find_tool cuobjdump)}
    [ -n "$cuobjdump" ] || skip 'no cuobjdump (CUOBJDUMP=PATH; Debian: cuda-cuobjdump-13-0; PyPI:
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm)'
    command -v python3 >/dev/null || skip 'no python3'
fi
if [ -z "$work" ]; then
    work=$(mktemp -d) || exit 1
    trap 'rm -rf "$work"' EXIT
fi

newer() { # newer FILE THAN...
    file=$1 && shift
    [ -e "$file" ] && [ -z "$(find "$@" -newer "$file")" ]
}
if ! newer "$work/launches.txt" llm.cu llm.h tests/gpu_launches.cpp; then
    make -s NVCC= build/cuda_on_cpu.o build/libllm.a &&
        c++ -std=c++17 -O0 -Wall -Wextra -I. -Itests -no-pie tests/gpu_launches.cpp \
            build/cuda_on_cpu.o build/libllm.a -fopenmp -lm -o "$work/launches" &&
        "$work/launches" >"$work/launches.new" && mv "$work/launches.new" "$work/launches.txt" ||
        exit 1
fi
if [ -n "$launches" ]; then
    grep -c '^launch' "$work/launches.txt" | awk '{ print $1 " launches"; exit $1 < 1000 }'
    exit
fi
for arch; do
    if ! newer "$work/$arch.cubin" llm.cu llm.h; then
        "$nvcc" -O3 -std=c++17 -I. "-arch=sm_$arch" -cubin -o "$work/$arch.new" llm.cu || exit 1
        mv "$work/$arch.new" "$work/$arch.cubin"
    fi
    "$cuobjdump" -sass "$work/$arch.cubin" >"$work/$arch.sass" &&
        "$cuobjdump" -res-usage "$work/$arch.cubin" >"$work/$arch.usage" 2>&1 || exit 1
    echo && echo "sm_$arch:" && echo
    python3 tests/gpu_model.py kernels "$work/launches" "$work/launches.txt" "$work/$arch.sass" \
        "$work/$arch.usage" || exit 1
done
echo && echo "A forecast for an H200, from the code for sm_$arch (nothing was measured):" && echo
python3 tests/gpu_model.py forecast "$work/launches" "$work/launches.txt" "$work/$arch.sass" \
    "$work/$arch.usage" >"$work/forecast" || exit 1
cat "$work/forecast"
[ -n "$table" ] || exit 0

# Replace what is between the markers of docs/gpu.md, then put measured figures beside it again.
python3 tests/gpu_model.py kernels "$work/launches" "$work/launches.txt" "$work/$arch.sass" \
    "$work/$arch.usage" >"$work/kernels" || exit 1
sh tests/gpu_page.sh section docs/gpu.md forecast "$work/forecast" &&
    sh tests/gpu_page.sh section docs/gpu.md kernels "$work/kernels" &&
    sh tests/gpu_page.sh beside docs/gpu.md
