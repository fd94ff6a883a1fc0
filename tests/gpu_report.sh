#!/usr/bin/env bash
# tests/gpu_report.sh [PART...]: builds for the GPU that is here, checks, measures, and writes a
# report with GPU, driver, date and commands. The parts, the most valuable first, which is the order
# in which they are done (all, if none is named):
#
#   check      the operations of llm.cu against the CPU's plain loops, and a tale told on both (build and check: 2 minutes)
#   kernels    ceilings of the GPU, then each operation with its share of them                 (1 to 2 minutes)
#   decode     one sequence through a model of 8 billion weights: tokens per second            (2 minutes)
#   serve      256 requests at once: the workload of nano-vllm's benchmark                     (1 minute)
#   torch      PyTorch's fused attention on the same shapes                                    (half a minute)
#   tests      the tests of the engine, on the GPU                                             (1 to 3 minutes)
#   sanitizer  compute-sanitizer over a tale and over the operations                           (3 to 6 minutes)
#   counters   ncu: what bounds the kernels that matter most                                   (1 minute)
#
# What is measured is written at once, so that a run which is cut short leaves all that it had. A
# run ends within BUDGET seconds: a part or a test that does not fit any more is cut or left out,
# and the report says so. For machines that are lent for a few minutes at a time, two runs of less
# than ten minutes each: `gpu_report.sh check kernels decode serve torch`, `gpu_report.sh tests
# sanitizer counters`; the second uses what the first has built, if it is still there.
#
# It needs nvcc, a C and a C++ compiler and make, and nothing from the network. What else is not
# there is done without: without cmocka the tests take tests/cross/cmocka.h; without cuBLAS,
# PyTorch, compute-sanitizer or ncu there are no figures of theirs.
#
#   OUT=FOLDER       where to write: gpu.md, the report (docs/), and gpu.log, all that every command printed (build/report-cuda/)
#   BUDGET=SECONDS   (560)
#   MODELS="..."     shape:type of the models to decode with (llama-3.1-8b:q4_0 llama-3.1-8b:f16)
#   CMOCKA=FOLDER    with include/cmocka.h and lib/libcmocka.so, where the system has none
#   DEVICE=emulated  a dry run without a GPU: the same steps, tiny
set -u
cd "$(dirname "$0")/.." || exit 1
DEVICE=${DEVICE:-cuda}
B=build/report-$DEVICE
LOG=${OUT:-$B}/gpu.log
OUT=${OUT:-docs}
REPORT=$OUT/gpu.md
BUDGET=${BUDGET:-560}
parts='check kernels decode serve torch tests sanitizer counters'
for part in "$@"; do
    case " $parts " in *" $part "*) ;; *) echo \
        "gpu_report.sh: there is no part $part: there are $parts" >&2; exit 2 ;; esac
done
ONLY=${*:-$parts}
tiny=dim=64,layers=2,heads=2,kv-heads=1,hidden=128,vocab=300,context=256
if [ "$DEVICE" = cuda ]; then MODELS=${MODELS:-llama-3.1-8b:q4_0 llama-3.1-8b:f16}
else MODELS=${MODELS:-$tiny:q4_0}; fi
export LLM_TEST_DEVICE=$DEVICE OMP_WAIT_POLICY=passive
mkdir -p "$OUT" "$B" || exit 1
work=$(mktemp -d) || exit 1
sampler=
trap 'rm -rf "$work"; [ -z "$sampler" ] || kill "$sampler" 2>/dev/null' EXIT
failed=0 unfinished=0
: >"$work/figures" # of the operations, for comparison

say() { printf '%s\n' "$*" | tee -a "$REPORT"; }
left() { echo $((BUDGET - SECONDS)); }
here() { command -v "$1" >/dev/null 2>&1; }

# attempt SECONDS COMMAND...: what it prints into $work/log, and into gpu.log. Ends it after so many
# seconds, or when the budget is spent; then the status is 124.
attempt() {
    local limit=$1 start=$SECONDS status
    shift
    [ "$limit" -le "$(left)" ] || limit=$(left)
    if [ "$limit" -lt 3 ]; then
        echo 'left out: the time was up' >"$work/log"
        return 124
    fi
    timeout -k 5 "$limit" "$@" >"$work/log" 2>"$work/errors"
    status=$?
    [ "$status" -ne 137 ] || status=124 # it did not end when asked to
    { echo "==== $*" && head -c 100000 "$work/log" && head -c 20000 "$work/errors" &&
        echo "---- status $status, $((SECONDS - start)) s"; } >>"$LOG"
    cat "$work/errors" >>"$work/log"
    return "$status"
}
# went STATUS WHAT: counts what went wrong, or was not finished.
went() {
    case $1 in
    0) ;;
    124) unfinished=$((unfinished + 1)) && echo "not finished: $2" >&2 ;;
    *) failed=$((failed + 1)) && echo "failed: $2 (status $1)" >&2 && tail -n 5 "$work/log" |
        cut -c1-300 >&2 ;;
    esac
}
last_line() { grep -v '^ *$' "$work/log" | tail -n 1 | tr '|' '/' | cut -c1-200; }
show_log() { say '```'
tail -n "${1:-15}" "$work/log" | sed "s|$work/||g" | cut -c1-400 | tee -a "$REPORT"; say '```'; }

# ---- Where we are, and the build ------------------------------------------------------------------------------
capability=
if [ "$DEVICE" = cuda ]; then
    for folder in /usr/local/cuda/bin /usr/local/nvidia/bin /opt/cuda/bin /usr/local/cuda-*/bin; do
        [ ! -d "$folder" ] || PATH=$PATH:$folder
    done
    here nvcc || { echo "gpu_report.sh: no nvcc here" >&2; exit 1; }
    here nvidia-smi || { echo "gpu_report.sh: no nvidia-smi here" >&2; exit 1; }
    facts=$(timeout 60 nvidia-smi \
        --query-gpu=name,driver_version,memory.total,compute_cap,clocks.max.sm,clocks.max.mem \
        --format=csv,noheader \
        2>&1 | head -n 1)
    capability=$(echo "$facts" | cut -d, -f4 | tr -d ' .')
    case $capability in *[!0-9]* | '') echo "gpu_report.sh: nvidia-smi finds no GPU here: $facts" \
        >&2; exit 1 ;; esac
else
    facts='the emulated device: a dry run, whose figures mean nothing'
fi
[ $# -gt 0 ] || : >"$REPORT" # parts that are named are added to what is there
: >"$LOG" || exit 1
say '# On a GPU' && say ''
say "Written by \`tests/gpu_report.sh $*\` on $(date -u '+%Y-%m-%d %H:%M') UTC, at commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."
say ''
say "- GPU (name, driver, memory, compute capability, highest clocks): $facts"
say "- CPU: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
[ "$DEVICE" != cuda ] || say "- $(nvcc --version | grep release)"

# Its own optimization: gcc takes half as long as for -O3, and only the CPU's kernels would be
# faster.
settings=(OPTIMIZE=-O2 OBSERVED= "DEVICE=$DEVICE")
if [ "$DEVICE" = cuda ]; then settings+=("GPUS=$capability" "NVCC=$(command -v nvcc)")
else settings+=(NVCC=); fi
has_cmocka() {
    printf '#include <%s.h>\n' setjmp stdarg stddef stdint cmocka >"$work/cmocka.c"
    echo 'int main(void) { return 0; }' >>"$work/cmocka.c"
    cc "$work/cmocka.c" -lcmocka -o "$work/cmocka" 2>/dev/null
}
if [ -n "${CMOCKA:-}" ]; then
    CMOCKA=$(cd "$CMOCKA" && pwd)
    export CPATH="$CMOCKA/include${CPATH:+:$CPATH}" \
        LIBRARY_PATH="$CMOCKA/lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
    export LD_LIBRARY_PATH="$CMOCKA/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    unset CMOCKA
fi
has_cmocka || settings+=(CMOCKA= 'CPPFLAGS=-isystem tests/cross')
build=(make --no-print-directory -k "-j$(nproc)" "B=$B" "LLM=$B/llm" "${settings[@]}")
operations='test_device test_cuda_kernels test_device_sampling test_device_engine' # of llm.cu
engine=
[ "$DEVICE" != cuda ] || engine='test_speculation test_scheduler test_engine'
programs() { local name; for name in "$@"; do echo "$B/$name"; done; }
start=$SECONDS
case " $ONLY " in *' tests '*) wanted="$operations $engine" ;; *) wanted=$operations ;; esac
# shellcheck disable=SC2046,SC2086
attempt 300 "${build[@]}" "$B/llm" "$B/libllm.a" $(programs $wanted)
status=$?
say "- Build: \`make ${settings[*]}\`, $((SECONDS - start)) s"
if [ "$status" -ne 0 ]; then
    went "$status" 'the build'
    say '' && say 'Not all of it builds:' && show_log 40
    [ -x "$B/llm" ] && [ -f "$B/libllm.a" ] || exit 1
fi

# ---- Tests -------------------------------------------------------------------------------------------------------
run_programs() { # run_programs SECONDS NAME...: a table of what each test says
    local name limit=$1
    shift
    say '| test | result | seconds |' && say '|---|---|---|'
    : >"$work/why"
    for name in "$@"; do
        local start=$SECONDS result status
        attempt "$limit" "$B/$name"
        status=$?
        result=$(sed \
            -n 's/^\[  *\(PASSED\|FAILED\|SKIPPED\) *\] \([0-9]*\) test(s).*/\2 \1/p' "$work/log" |
            tr '\n' ' ' | tr '[:upper:]' '[:lower:]')
        [ "$status" -ne 124 ] ||
            result="not finished in time; ${result:-$(grep -c '^\[  *OK' "$work/log") passed until then}"
        say "| $name | ${result:-exit status $status: $(last_line)} | $((SECONDS - start)) |"
        went "$status" "$name"
        [ "$status" -eq 0 ] || [ "$status" -eq 124 ] ||
            { echo "$name:" && grep -aE '^ERROR|fault|\.(c|h|cpp):[0-9]+' "$work/log" | head -n 12 |
            cut -c1-300; } >>"$work/why"
    done
    [ ! -s "$work/why" ] || { say '' && say '```' && tee -a "$REPORT" <"$work/why" && say '```'; }
}
tell_a_tale() { timeout -k 5 60 "$B/llm" run -m models/tales-q4_0.gguf --temperature 0 -n "$1" \
    --device "$2" 'Once upon a time' 2>>"$LOG"; }
run_check() {
    say '' && say '## Is it right?' && say ''
    # shellcheck disable=SC2086
    run_programs 60 $operations
    local tokens=100 own theirs
    [ "$DEVICE" = cuda ] || tokens=5
    theirs=$(tell_a_tale "$tokens" cpu) own=$(tell_a_tale "$tokens" "$DEVICE")
    say ''
    if [ -n "$own" ] && [ "$own" = "$theirs" ]; then say \
        "A tale of $tokens tokens, the likeliest each time, is the same as on the CPU."
    else
        say 'A tale on the CPU and on the device (one that differs after a while may be right: sums are rounded in another order):'
        say '```' && say "$theirs" && say "$own" && say '```'
        [ -n "$own" ] || went 1 'the tale'
    fi
}
run_tests() {
    [ -n "$engine" ] || return
    say '' && say '## Tests of the engine' && say ''
    # shellcheck disable=SC2086
    run_programs 90 $engine
}

# ---- Kernels: the ceilings first -----------------------------------------------------------------------------------
build_bench() {
    if [ "$DEVICE" != cuda ]; then
        attempt 200 c++ -std=c++17 -O1 -DLLM_EMULATED -I. -Itests -x c++ tests/gpu_bench.cu \
            -x none "$B/emulated.o" "$B/cuda_on_cpu.o" \
            "$B/libllm.a" -fopenmp -lm -o "$B/gpu_bench"
        return
    fi
    local library header
    local program=(nvcc -O3 -std=c++17 "-arch=sm_$capability" \
        -I. tests/gpu_bench.cu "$B/llm_cuda.o" "$B/libllm.a" -Xcompiler -fopenmp
        -o "$B/gpu_bench")
    attempt 120 "${program[@]}" -lcublas && return
    library=$(find /usr /opt -name 'libcublas.so*' 2>/dev/null |
        head -n 1) header=$(find /usr /opt -name cublas_v2.h 2>/dev/null | head -n 1)
    if [ -n "$library" ] && [ -n "$header" ]; then
        attempt 120 "${program[@]}" -I"$(dirname "$header")" "$library" -Xlinker -rpath \
            -Xlinker "$(dirname "$library")" && return
    fi
    attempt 120 "${program[@]}" -DWITHOUT_CUBLAS
}
copy_rate=
run_kernels() {
    say '' && say '## Operations' && say ''
    say 'Each beside the ceilings of this GPU, which are measured first. A share is that of whichever ceiling bounds the operation. Times are of'
    say 'operations in a step (a graph), divided by their number; matmul rotates over weights that do not fit the L2 cache.' && say ''
    if ! build_bench; then
        went 1 'the build of tests/gpu_bench.cu'
        say 'tests/gpu_bench.cu does not build:' && show_log 30
        return
    fi
    say '| what | figure | share |' && say '|---|---|---|'
    local piece status
    # each a program of its own: where one fails, the others do not
    for piece in ceilings layers matmul attention host; do
        attempt 90 "$B/gpu_bench" "$piece"
        status=$?
        grep '^|' "$work/log" | tee -a "$REPORT" "$work/figures"
        [ "$status" -eq 0 ] || say "| $piece | ended with status $status: $(last_line) | |"
        went "$status" "gpu_bench $piece"
        [ "$piece" != ceilings ] ||
            copy_rate=$(sed -n 's/.*copy of .* | \([0-9.]*\) TB.*/\1/p' "$work/log")
    done
}

# PyTorch's fused attention on the same shapes, and our share of its rate, if there is a PyTorch
run_torch() {
    if [ "$DEVICE" != cuda ] ||
        ! timeout 60 python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        say '' && say "PyTorch's attention: not measured, there is no PyTorch with CUDA here."
        return
    fi
    cat >"$work/attention.py" <<'PYTHON'
import re, sys, torch
ours = {int(n): float(rate) for n, rate in re.findall(r"prefill attention, (\d+) tokens[^|]*\| [\d.]+ ms, (\d+) TFLOP", open(sys.argv[1]).read())}
for n in (1024, 4096, 16384):
    q, k, v = (torch.randn(1, heads, n, 128, device="cuda", dtype=torch.float16) for heads in (32, 8, 8))
    k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
    best = 1e9
    for i in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10): torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        end.record()
        end.synchronize()
        if i > 1: best = min(best, start.elapsed_time(end) / 10)
    work = 4 * n * (n + 1) / 2 * 32 * 128
    what = f"PyTorch {torch.__version__}, scaled_dot_product_attention, {n} tokens, causal"
    rate = work / best * 1e-9
    share = f"ours does {100 * ours[n] / rate:.0f} % of that" if n in ours else ""
    print(f"| {what} | {best:.2f} ms, {rate:.0f} TFLOP/s | {share} |", flush=True)
PYTHON
    say '' && say '| for comparison | figure | |' && say '|---|---|---|'
    attempt 60 python3 "$work/attention.py" "$work/figures"
    went $? PyTorch
    grep '^|' "$work/log" | tee -a "$REPORT"
}

# ---- The whole engine --------------------------------------------------------------------------------------------------
write_model() { # write_model SHAPE TYPE: to $work/model.gguf
    attempt 150 "$B/llm" synth --shape "$1" --type "$2" "$work/model.gguf" && return
    went $? "llm synth $1 $2"
    say "| $1 $2 | llm synth: $(last_line) | | | | |"
    return 1
}
run_decode() {
    say '' && say '## One sequence' && say ''
    say '| model | command | prefill, tokens/s | decode, tokens/s | GB/s of weights and cache | share of the copy |'
    say '|---|---|---|---|---|---|'
    local model shape type form began options='-p 512,4096 -g 128 -r 3 --max-batch-tokens 4096'
    [ "$DEVICE" = cuda ] || options='-p 8 -g 2 -r 1'
    for model in $MODELS; do
        shape=${model%:*} type=${model##*:}
        write_model "$shape" "$type" || continue
        began=$(date +%s.%N)
        attempt 60 "$B/llm" run -m "$work/model.gguf" --device "$DEVICE" -n 1 Hello
        went $? "llm run $model"
        say "| $shape $type | from the command to the first token, $(wc -c <"$work/model.gguf" | awk '{ printf "%.1f", $1 * 1e-9 }') GB from the page cache:" \
            "$(date +%s.%N | awk -v b="$began" '{ printf "%.2f", $1 - b }') s | | | | |"
        for form in '' --overlap; do
            # shellcheck disable=SC2086
            attempt 60 "$B/llm" bench -m "$work/model.gguf" --device "$DEVICE" -t 1 $options $form \
                --json
            went $? "llm bench $model $form"
            grep -q '"decode_tokens_per_second"' "$work/log" ||
                say "| $shape $type | llm bench $form: $(last_line) | | | | |"
            grep '"decode_tokens_per_second"' "$work/log" | while read -r line; do
                number() { echo "$line" | sed -n "s/.*\"$1\": \([-+0-9.e]*\).*/\1/p"; }
                say \
                    "| $shape $type | llm bench $options $form ($(number prompt) tokens) | $(number prefill_tokens_per_second) |" \
                    \
                    "$(number decode_tokens_per_second) | $(number bytes_per_second | awk '{ printf "%.1f", $1 * 1e-9 }') |" \
                    \
                    "$(number bytes_per_second | awk -v c="${copy_rate:-0}" '{ if (c > 0) printf "%.0f %%", $1 * 1e-10 / c; }') |"
            done
        done
        # shellcheck disable=SC2086
        attempt 60 "$B/llm" bench -m "$work/model.gguf" --device "$DEVICE" -t 1 $options \
            --no-graphs --profile
        went $? "llm bench --profile $model"
        { echo && echo \
            "$shape $type, \`llm bench --no-graphs --profile\` (each operation is waited for, so they add up to more than a step):" && echo &&
            echo '```' && tail -n 40 "$work/log" | cut -c1-200 && echo '```'; } >>"$work/profiles"
        rm -f "$work/model.gguf"
    done
    [ ! -s "$work/profiles" ] || tee -a "$REPORT" <"$work/profiles"
}

run_serve() { # the workload of nano-vllm's benchmark, on a Qwen3-0.6B shape
    say '' && say '## Many sequences' && say ''
    local shape=dim=1024,layers=28,heads=16,kv-heads=8,head-dim=128,hidden=3072,vocab=151936,context=4096,rope-base=1000000,tied=1
    local options=(--requests 256 --prompt 100-1024 --gen 100-1024 --max-sequences 256 \
        --max-batch-tokens 16384 --cache-memory 40G)
    if [ "$DEVICE" != cuda ]; then
        shape=$tiny
        options=(--requests 4 --prompt 4-9 --gen 2-4 --max-sequences 4 --max-batch-tokens 64)
    fi
    write_model "$shape" f16 || return
    if [ "$DEVICE" = cuda ]; then
        nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 100 \
            >"$work/busy" 2>/dev/null &
        sampler=$!
    fi
    attempt 150 "$B/llm" bench serve -m "$work/model.gguf" --device "$DEVICE" \
        --policy continuous "${options[@]}" --json
    went $? 'llm bench serve'
    [ -z "$sampler" ] || { kill "$sampler" 2>/dev/null; wait "$sampler" 2>/dev/null; sampler=; }
    say "\`llm synth --shape $shape --type f16\`, \`llm bench serve --policy continuous ${options[*]}\`:" && say ''
    show_log 6
    # the samples while it ran at full speed: those between loading and the end, without the idle
    # ones at both sides
    [ ! -s "$work/busy" ] ||
        say "GPU busy (nvidia-smi, share of the time in which a kernel ran, samples from the first to the last above" \
        "50 %): $(awk '
        { x[NR] = $1; if ($1 > 50) { if (!first) first = NR; last = NR } }
        END { for (i = first; first && i <= last; i++) { sum += x[i]; n++ } if (n) printf "%.1f %% of %d samples", sum / n, n; else print "not seen" }' "$work/busy")"
    rm -f "$work/model.gguf"
}

# ---- NVIDIA's own tools -----------------------------------------------------------------------------------------------
find_tool() { # its path: on the PATH, or where the Toolkit and Nsight put it
    command -v "$1" || find /usr/local/cuda*/ /opt/nvidia -name "$1" -type f -perm \
        -u+x 2>/dev/null | sort | tail -n 1
}
run_sanitizer() {
    say '' && say '## compute-sanitizer' && say ''
    local sanitizer tool status what
    sanitizer=$(find_tool compute-sanitizer)
    if [ "$DEVICE" != cuda ] || [ -z "$sanitizer" ]; then
        say 'Not run: there is no compute-sanitizer here.'
        return
    fi
    local tale=("$B/llm" run -m models/tales-q4_0.gguf --device cuda -n 4 \
        --no-graphs 'Once upon a time')
    say "\`llm run -m models/tales-q4_0.gguf -n 4 --no-graphs\`, and tests:" && say '' &&
        say '| tool | program | result |' && say '|---|---|---|'
    for what in 'memcheck tale' 'racecheck tale' 'synccheck tale' 'initcheck tale' \
        'memcheck test_device' 'memcheck test_device_sampling' \
        'racecheck test_device' 'memcheck test_cuda_kernels'; do
        tool=${what% *} program=("$B/${what#* }")
        [ "${what#* }" != tale ] || program=("${tale[@]}")
        # (some tests ask for more memory than there is, on purpose: a call that says no is not
        # memcheck's business)
        local quiet=()
        [ "$tool" != memcheck ] || quiet=(--report-api-errors no)
        attempt 100 "$sanitizer" --tool "$tool" "${quiet[@]}" --error-exitcode 9 "${program[@]}"
        status=$?
        say "| $tool | ${what#* } | $(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY|Device not supported' "$work/log" | tail -n 1 | sed 's/=* *//'), exit status $status |"
        [ "$status" -eq 0 ] || grep -aE '=========' "$work/log" | head -n 15 | cut -c1-300
        went "$status" "$what"
        if grep -q 'Device not supported' "$work/log"; then return; fi
    done
}

run_counters() {
    local ncu kernel \
        figures='llm__|Duration|Throughput|Warp Cycles Per Issued|Achieved Occupancy|Registers Per|Grid Size|Error|ERR_'
    say '' && say '## Counters' && say ''
    ncu=$(find_tool ncu)
    if [ "$DEVICE" != cuda ] || [ -z "$ncu" ]; then
        say 'Not run: there is no ncu here.'
        return
    fi
    write_model llama-3.1-8b q4_0 || return
    say "What ncu says of one launch of each in \`llm bench -p 512 -g 8 --no-graphs\` (Llama-3.1-8B, q4_0):" && say '' && say '```'
    # the first launches only warm up
    for kernel in matmul_few matmul_many attention merge rmsnorm rope_and_store swiglu sample; do
        attempt 60 "$ncu" --clock-control none --kernel-name "regex:llm__${kernel}_kernel" \
            --launch-skip 20 --launch-count 1 \
            --section SpeedOfLight --section WarpStateStats --section Occupancy \
            --section LaunchStats \
            "$B/llm" bench -m "$work/model.gguf" --device cuda -t 1 -p 512 -g 8 -r 1 --no-graphs
        grep -aE "$figures" "$work/log" | cut -c1-160 | tee -a "$REPORT"
        if grep \
            -qaE 'ERR_NVGPUCTRPERM|Failed to initialize|LibraryNotLoaded' \
            "$work/log"; then break; fi
    done
    say '```'
    rm -f "$work/model.gguf"
}

for part in $parts; do
    case " $ONLY " in *" $part "*) ;; *) continue ;; esac
    if [ "$(left)" -lt 10 ]; then
        say '' && say "Left out, since the time was up: $part."
        unfinished=$((unfinished + 1))
    else "run_$part"; fi
done
say ''
say "$SECONDS s in all; $failed failed, $unfinished not finished."
[ "$failed" -eq 0 ]
