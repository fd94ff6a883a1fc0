#!/usr/bin/env bash
# tests/gpu_report.sh [PART...]: builds for this machine's GPU, checks, measures, and writes a
# report with GPU, driver, date and commands. It runs the parts in this order (default: all):
#
#   check      llm.cu's operations against the CPU's plain loops, and the same text on both (with
#              the build 2 minutes)
#   kernels    the limits of the GPU, then each operation's share of them (3 to 5 minutes)
#   decode     one sequence through a model of 8 billion weights: tokens per second (2 minutes)
#   serve      256 requests at once: the workload of nano-vllm's benchmark (1 minute)
#   torch      PyTorch's products and fused attention on the same shapes (1 minute)
#   tests      the engine's tests on the GPU (1 to 3 minutes)
#   sanitizer  compute-sanitizer over a text and over the operations (3 to 6 minutes)
#   counters   ncu: what limits the most important kernels (1 minute)
#
# A run ends within BUDGET seconds: a part or test that no longer fits is cut short or left out, and
# the report says so. Results are written at once, so that an interrupted run keeps them. If a
# machine is lent for ten minutes at a time, make three runs, each of which is complete by itself
# and has its own folder:
#
#   gpu_report.sh check kernels
#   gpu_report.sh decode serve torch
#   gpu_report.sh tests sanitizer counters
#
# A folder has report.md, gpu.log (the output of every command) and clocks-PART.csv (clock and power
# while kernels ran, with the time of day). The report is also copied into docs/gpu.md, as a section
# of its own, and its figures go beside the forecasts there. To do that on another machine:
#
#   sh tests/gpu_page.sh section docs/gpu.md 'measured: check kernels' FOLDER/report.md
#   sh tests/gpu_page.sh beside docs/gpu.md
#
# It needs nvcc, a C and a C++ compiler and make, and no network. Other tools are optional: without
# cmocka the tests use tests/cross/cmocka.h; without cuBLAS, PyTorch, compute-sanitizer or ncu their
# figures are missing.
#
#   OUT=FOLDER       the run's folder (default build/report-cuda/PART-PART...)
#   PAGE=FILE        the page to copy the report into (default docs/gpu.md)
#   B=FOLDER         build there (default build/report-cuda)
#   BUDGET=SECONDS   (default 560)
#   MODELS="..."     shape:type of the models to decode with (default llama-3.1-8b:q4_0
#                    llama-3.1-8b:f16)
#   CMOCKA=FOLDER    contains include/cmocka.h and lib/libcmocka.so, if the system has none
#   DEVICE=emulated  a dry run without a GPU: the same steps with tiny sizes, and a copy of the page
set -u
cd "$(dirname "$0")/.." || exit 1
DEVICE=${DEVICE:-cuda}
B=${B:-build/report-$DEVICE}
BUDGET=${BUDGET:-560}
parts='check kernels decode serve torch tests sanitizer counters'
for part in "$@"; do
    case " $parts " in *" $part "*) continue ;; esac
    echo "gpu_report.sh: unknown part $part; the parts are $parts" >&2
    exit 2
done
ONLY=${*:-$parts}
OUT=${OUT:-$B/$(echo "$ONLY" | tr ' ' -)}
LOG=$OUT/gpu.log REPORT=$OUT/report.md
tiny=dim=64,layers=2,heads=2,kv-heads=1,hidden=128,vocab=300,context=256
if [ "$DEVICE" = cuda ]; then MODELS=${MODELS:-llama-3.1-8b:q4_0 llama-3.1-8b:f16}
else MODELS=${MODELS:-$tiny:q4_0}; fi
export LLM_TEST_DEVICE=$DEVICE OMP_WAIT_POLICY=passive
mkdir -p "$OUT" "$B" || exit 1
if [ "$DEVICE" != cuda ]; then PAGE=$OUT/gpu.md && cp docs/gpu.md "$PAGE" || exit 1; fi
PAGE=${PAGE:-docs/gpu.md}
work=$(mktemp -d) || exit 1
sampler=
trap 'rm -rf "$work"; [ -z "$sampler" ] || kill "$sampler" 2>/dev/null' EXIT
failed=0 unfinished=0
: >"$work/figures" # rows of the operations, for comparison

say() { printf '%s\n' "$*" | tee -a "$REPORT"; }
left() { echo $((BUDGET - SECONDS)); }
here() { command -v "$1" >/dev/null 2>&1; }

# attempt SECONDS COMMAND...: run the command with its output in $work/log and gpu.log. End it after
# that many seconds, or when the budget is spent; then the status is 124.
attempt() {
    local limit=$1 start=$SECONDS status
    shift
    [ "$limit" -le "$(left)" ] || limit=$(left)
    if [ "$limit" -lt 3 ]; then
        echo 'left out: no time left' >"$work/log"
        return 124
    fi
    timeout -k 5 "$limit" "$@" >"$work/log" 2>"$work/errors"
    status=$?
    [ "$status" -ne 137 ] || status=124 # killed, since it did not end on SIGTERM
    { echo "==== $*" && head -c 100000 "$work/log" && head -c 20000 "$work/errors" &&
        echo "---- status $status, $((SECONDS - start)) s"; } >>"$LOG"
    cat "$work/errors" >>"$work/log"
    return "$status"
}
# went STATUS WHAT: count failed and unfinished commands.
went() {
    case $1 in
    0) ;;
    124) unfinished=$((unfinished + 1)) && echo "not finished: $2" >&2 ;;
    *)
        failed=$((failed + 1))
        echo "failed: $2 (status $1)" >&2
        tail -n 5 "$work/log" | cut -c1-300 >&2 ;;
    esac
}
last_line() { grep -v '^ *$' "$work/log" | tail -n 1 | tr '|' '/' | cut -c1-200; }
show_log() {
    say '```'
    tail -n "${1:-15}" "$work/log" | sed "s|$work/||g" | cut -c1-400 | tee -a "$REPORT"
    say '```'
}

# ---- The machine, and the build ------------------------------------------------------------------
capability=
if [ "$DEVICE" = cuda ]; then
    for folder in /usr/local/cuda/bin /usr/local/nvidia/bin /opt/cuda/bin /usr/local/cuda-*/bin; do
        [ ! -d "$folder" ] || PATH=$PATH:$folder
    done
    here nvcc || { echo "gpu_report.sh: no nvcc here" >&2; exit 1; }
    here nvidia-smi || { echo "gpu_report.sh: no nvidia-smi here" >&2; exit 1; }
    facts=$(timeout 60 nvidia-smi \
        --query-gpu=name,driver_version,memory.total,compute_cap,clocks.max.sm,clocks.max.mem \
        --format=csv,noheader 2>&1 | head -n 1)
    capability=$(echo "$facts" | cut -d, -f4 | tr -d ' .')
    case $capability in
    *[!0-9]* | '') echo "gpu_report.sh: nvidia-smi finds no GPU here: $facts" >&2; exit 1 ;;
    esac
else
    facts='the emulated device: a dry run, whose figures mean nothing'
fi
: >"$REPORT" && : >"$LOG" || exit 1
say "## Measured: $ONLY" && say ''
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
say "Written by \`tests/gpu_report.sh $*\` on $(date -u '+%Y-%m-%d %H:%M') UTC, at commit $commit."
say ''
say "- GPU (name, driver, memory, compute capability, highest clocks): $facts"
say "- CPU: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
[ "$DEVICE" != cuda ] || say "- $(nvcc --version | grep release)"

# -O2 also for the CPU's kernels, which are not measured here: they compile faster than with -O3.
settings=(OPTIMIZE=-O2 OBSERVED= DEVICE=cuda)
if [ "$DEVICE" = cuda ]; then settings+=("GPUS=${capability/#90/90a}" "NVCC=$(command -v nvcc)")
else settings=(NVCC=); fi # as in other builds, so that it can use theirs (B=build)
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
sampler_fields=timestamp,utilization.gpu,clocks.sm,clocks.mem,power.draw,temperature.gpu
watch() { # watch PART: write clock and power ten times a second until `unwatch`
    [ "$DEVICE" = cuda ] || return 0
    nvidia-smi "--query-gpu=$sampler_fields" --format=csv,noheader,nounits -lms 100 \
        >"$OUT/clocks-$1.csv" 2>/dev/null &
    sampler=$!
}
unwatch() { # unwatch PART: say what was seen, without the idle samples before and after
    [ -n "$sampler" ] || return 0
    kill "$sampler" 2>/dev/null
    wait "$sampler" 2>/dev/null
    sampler=
    [ -s "$OUT/clocks-$1.csv" ] || return 0
    say '' && say "While kernels ran (nvidia-smi, ten samples a second): $(awk -F', *' '
        { busy[NR] = $2; clock[NR] = $3; power[NR] = $5
          if ($2 > 50) { if (!first) first = NR; last = NR } }
        END {
            if (!first) { print "not seen"; exit }
            low = clock[first]
            for (i = first; i <= last; i++) {
                n++; b += busy[i]; p += power[i]
                if (busy[i] <= 50) continue
                m++; c += clock[i]
                if (clock[i] < low) low = clock[i]
                if (power[i] > most) most = power[i]
            }
            printf "SM clock %.0f MHz (lowest %.0f), power %.0f W (most %.0f), ", c / m, low, p / n,
                most
            printf "busy %.1f %% of %d samples.", b / n, n
        }' "$OUT/clocks-$1.csv")"
}
operations='test_device test_cuda_kernels test_device_sampling test_device_engine'
engine=
[ "$DEVICE" != cuda ] || engine='test_speculation test_scheduler test_engine'
programs() { local name; for name in "$@"; do echo "$B/$name"; done; }
start=$SECONDS
wanted= # what the parts run
case " $ONLY " in *' check '* | *' sanitizer '*) wanted=$operations ;; esac
case " $ONLY " in *' tests '*) wanted="$wanted $engine" ;; esac
# shellcheck disable=SC2046,SC2086
attempt 300 "${build[@]}" "$B/llm" "$B/libllm.a" $(programs $wanted)
status=$?
say "- Build: \`make ${settings[*]}\`, $((SECONDS - start)) s"
if [ "$status" -ne 0 ]; then
    went "$status" 'the build'
    say '' && say 'Not everything was built:' && show_log 40
    [ -x "$B/llm" ] && [ -f "$B/libllm.a" ] || exit 1
fi

# ---- Tests ---------------------------------------------------------------------------------------
run_programs() { # run_programs SECONDS NAME...: a table of the tests' results
    local name limit=$1
    shift
    say '| test | result | seconds |' && say '|---|---|---|'
    : >"$work/why"
    for name in "$@"; do
        local start=$SECONDS result status
        attempt "$limit" "$B/$name"
        status=$?
        result=$(sed -n \
            's/^\[  *\(PASSED\|FAILED\|SKIPPED\) *\] \([0-9]*\) test(s).*/\2 \1/p' "$work/log" |
            tr '\n' ' ' | tr '[:upper:]' '[:lower:]')
        if [ "$status" -eq 124 ]; then
            [ -n "$result" ] || result="$(grep -c '^\[  *OK' "$work/log") passed until then"
            result="not finished in time; $result"
        fi
        say "| $name | ${result:-exit status $status: $(last_line)} | $((SECONDS - start)) |"
        went "$status" "$name"
        if [ "$status" -eq 0 ] || [ "$status" -eq 124 ]; then continue; fi
        echo "$name:" >>"$work/why"
        grep -aE '^ERROR|fault|\.(c|h|cpp):[0-9]+' "$work/log" | head -n 12 | cut -c1-300 \
            >>"$work/why"
    done
    [ ! -s "$work/why" ] || { say '' && say '```' && tee -a "$REPORT" <"$work/why" && say '```'; }
}
greedy_text() { # TOKENS DEVICE
    timeout -k 5 60 "$B/llm" run -m models/tales-q4_0.gguf --temperature 0 -n "$1" --device "$2" \
        'Once upon a time' 2>>"$LOG"
}
run_check() {
    say '' && say '### Correctness' && say ''
    local tokens=100 seconds=60 own theirs
    [ "$DEVICE" = cuda ] || { tokens=5 && seconds=4; } # a dry run ends the tests early
    # shellcheck disable=SC2086
    run_programs $seconds $operations
    theirs=$(greedy_text "$tokens" cpu) own=$(greedy_text "$tokens" "$DEVICE")
    say ''
    if [ -n "$own" ] && [ "$own" = "$theirs" ]; then
        say "A greedy text of $tokens tokens is the same as on the CPU."
    else
        say 'A greedy text on the CPU and on the device. They may differ after a while, since sums'
        say 'are rounded in another order:'
        say '```' && say "$theirs" && say "$own" && say '```'
        [ -n "$own" ] || went 1 'the greedy text'
    fi
}
run_tests() {
    [ -n "$engine" ] || return
    say '' && say '### Tests of the engine' && say ''
    # shellcheck disable=SC2086
    run_programs 90 $engine
}

# ---- Kernels -------------------------------------------------------------------------------------
build_bench() {
    if [ "$DEVICE" != cuda ]; then
        attempt 200 c++ -std=c++17 -O1 -DLLM_EMULATED -I. -Itests -x c++ tests/gpu_bench.cu \
            -x none "$B/emulated.o" "$B/cuda_on_cpu.o" "$B/libllm.a" -fopenmp -lm \
            -o "$B/gpu_bench"
        return
    fi
    local library header
    local program=(nvcc -O3 -std=c++17 "-arch=sm_$capability" -I. tests/gpu_bench.cu
        "$B/llm_cuda.o" "$B/libllm.a" -Xcompiler -fopenmp -o "$B/gpu_bench")
    attempt 120 "${program[@]}" -lcublas && return
    library=$(find /usr /opt -name 'libcublas.so*' 2>/dev/null | head -n 1)
    header=$(find /usr /opt -name cublas_v2.h 2>/dev/null | head -n 1)
    if [ -n "$library" ] && [ -n "$header" ]; then
        attempt 120 "${program[@]}" -I"$(dirname "$header")" "$library" \
            -Xlinker -rpath -Xlinker "$(dirname "$library")" && return
    fi
    attempt 120 "${program[@]}" -DWITHOUT_CUBLAS
}
copy_rate=
bench_built=
ceilings() { # build gpu_bench and measure the limits, once per run
    [ -z "$bench_built" ] || return 0
    if ! build_bench; then
        went 1 'the build of tests/gpu_bench.cu'
        say 'tests/gpu_bench.cu does not build:' && show_log 30
        return 1
    fi
    bench_built=1
    say '| operation | shape | figure | share |' && say '|---|---|---|---|'
    bench ceilings
    copy_rate=$(sed -n 's/.*| copy | .* | \([0-9.]*\) TB.*/\1/p' "$work/log")
}
bench() { # bench PIECE: its rows
    attempt "${2:-90}" "$B/gpu_bench" "$1"
    local status=$?
    grep '^|' "$work/log" | tee -a "$REPORT" "$work/figures"
    [ "$status" -eq 0 ] || say "| $1 | | ended with status $status: $(last_line) | |"
    went "$status" "gpu_bench $1"
}
run_kernels() {
    say '' && say '### Operations' && say ''
    say "Each operation is compared with this GPU's limits, which are measured first. A share is"
    say 'relative to the limit that binds the operation. A time is that of a step (a graph) divided'
    say 'by its number of operations; products rotate over weights that do not fit in the L2 cache.'
    say ''
    ceilings || return
    watch kernels
    local piece
    # a process each, so that one failure does not affect the others
    for piece in layers rows sampling host attention matmul; do bench $piece 150; done
    unwatch kernels
}

# PyTorch's products and fused attention on the same shapes, and our rate relative to it
run_torch() {
    say '' && say '### PyTorch' && say ''
    if [ "$DEVICE" != cuda ] ||
        ! timeout 60 python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        say 'Not measured, since there is no PyTorch with CUDA.'
        return
    fi
    cat >"$work/torch.py" <<'PYTHON'
import re, sys, torch
ours = {}
for line in open(sys.argv[1]):
    found = re.match(r"\| ([^|]*) \| ([^|]*) \| ([\d.]+) us", line)
    if found:
        ours[found.group(1), found.group(2)] = float(found.group(3))
def seconds(work):
    best = 1e9
    for i in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for k in range(10): work(k)
        end.record()
        end.synchronize()
        if i > 1: best = min(best, start.elapsed_time(end) * 1e-4)
    return best
def row(name, shape, s, figure, what):
    own = ours.get((what, shape))
    print(f"| PyTorch {torch.__version__}, {name} | {shape} | {1e6 * s:.1f} us, {figure} |",
          f"ours {own:.1f} us: {1e6 * s / own:.2f} x |" if own else "|", flush=True)
attention = torch.nn.functional.scaled_dot_product_attention
for dim in (128, 64):
    for n in (1024, 4096, 16384):
        q, k, v = (torch.randn(1, heads, n, dim, device="cuda", dtype=torch.float16)
                   for heads in (32, 8, 8))
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        s = seconds(lambda i: attention(q, k, v, is_causal=True))
        rate = 4 * n * (n + 1) / 2 * 32 * dim / s * 1e-12
        row("attention", f"heads of {dim}, {n} tokens", s, f"{rate:.0f} TFLOP/s",
            "attention of a prompt")
for rows, cols in ((14336, 4096), (4096, 14336), (4096, 4096)):
    w = [torch.randn(rows, cols, device="cuda", dtype=torch.float16) for _ in range(4)]
    for n in (1, 16, 64, 512, 4096):
        x = torch.randn(n, cols, device="cuda", dtype=torch.float16)
        s = seconds(lambda i: torch.nn.functional.linear(x, w[i % 4]))
        row("f16 product", f"{rows} x {cols}, {n} rows", s,
            f"{2 * rows * cols * n / s * 1e-12:.0f} TFLOP/s", "product f16")
PYTHON
    if ! grep -q 'prompt' "$work/figures"; then
        ceilings || return
        bench attention 60
    else say '| operation | shape | figure | share |' && say '|---|---|---|---|'; fi
    attempt 90 python3 "$work/torch.py" "$work/figures"
    went $? PyTorch
    grep '^|' "$work/log" | tee -a "$REPORT"
}

# ---- The whole engine ----------------------------------------------------------------------------
write_model() { # write_model SHAPE TYPE: to $work/model.gguf
    attempt 150 "$B/llm" synth --shape "$1" --type "$2" "$work/model.gguf" && return
    went $? "llm synth $1 $2"
    say "| $1 $2 | llm synth: $(last_line) | | | | |"
    return 1
}
run_decode() {
    say '' && say '### One sequence' && say ''
    [ -n "$copy_rate" ] || { ceilings && say ''; }
    watch decode
    say "| model | command | prefill, tokens/s | decode, tokens/s | GB/s of weights and cache |" \
        'share of the copy |'
    say '|---|---|---|---|---|---|'
    local model shape type form began gigabytes seconds rate share
    local options='-p 512,4096 -g 128 -r 3 --max-batch-tokens 4096'
    [ "$DEVICE" = cuda ] || options='-p 8 -g 2 -r 1'
    for model in $MODELS; do
        shape=${model%:*} type=${model##*:}
        write_model "$shape" "$type" || continue
        began=$(date +%s.%N)
        attempt 60 "$B/llm" run -m "$work/model.gguf" --device "$DEVICE" -n 1 Hello
        went $? "llm run $model"
        seconds=$(date +%s.%N | awk -v b="$began" '{ printf "%.2f", $1 - b }')
        gigabytes=$(wc -c <"$work/model.gguf" | awk '{ printf "%.1f", $1 * 1e-9 }')
        say "| $shape $type | from the command to the first token, $gigabytes GB from the page" \
            "cache: $seconds s | | | | |"
        for form in '' --overlap; do
            # shellcheck disable=SC2086
            attempt 60 "$B/llm" bench -m "$work/model.gguf" --device "$DEVICE" -t 1 $options $form \
                --json
            went $? "llm bench $model $form"
            grep -q '"decode_tokens_per_second"' "$work/log" ||
                say "| $shape $type | llm bench $form: $(last_line) | | | | |"
            grep '"decode_tokens_per_second"' "$work/log" | while read -r line; do
                number() { echo "$line" | sed -n "s/.*\"$1\": \([-+0-9.e]*\).*/\1/p"; }
                rate=$(number bytes_per_second | awk '{ printf "%.1f", $1 * 1e-9 }')
                share=$(number bytes_per_second |
                    awk -v c="${copy_rate:-0}" '{ if (c > 0) printf "%.0f %%", $1 * 1e-10 / c }')
                say "| $shape $type | llm bench $options $form ($(number prompt) tokens) |" \
                    "$(number prefill_tokens_per_second) | $(number decode_tokens_per_second) |" \
                    "$rate | $share |"
            done
        done
        # shellcheck disable=SC2086
        attempt 60 "$B/llm" bench -m "$work/model.gguf" --device "$DEVICE" -t 1 $options \
            --no-graphs --profile
        went $? "llm bench --profile $model"
        {
            echo
            echo "$shape $type, \`llm bench --no-graphs --profile\` (it waits for each operation,"
            echo "so their times add up to more than a step):"
            echo
            echo '```' && tail -n 40 "$work/log" | cut -c1-200 && echo '```'
        } >>"$work/profiles"
        rm -f "$work/model.gguf"
    done
    unwatch decode
    [ ! -s "$work/profiles" ] || tee -a "$REPORT" <"$work/profiles"
}

run_serve() { # the workload of nano-vllm's benchmark, on a Qwen3-0.6B shape
    say '' && say '### Many sequences' && say ''
    local shape=dim=1024,layers=28,heads=16,kv-heads=8,head-dim=128,hidden=3072,vocab=151936
    shape=$shape,context=4096,rope-base=1000000,tied=1
    local options=(--requests 256 --prompt 100-1024 --gen 100-1024 --max-sequences 256
        --max-batch-tokens 16384 --cache-memory 40G)
    if [ "$DEVICE" != cuda ]; then
        shape=$tiny
        options=(--requests 4 --prompt 4-9 --gen 2-4 --max-sequences 4 --max-batch-tokens 64)
    fi
    write_model "$shape" f16 || return
    watch serve
    attempt 150 "$B/llm" bench serve -m "$work/model.gguf" --device "$DEVICE" \
        --policy continuous "${options[@]}" --json
    went $? 'llm bench serve'
    say "\`llm synth --shape $shape --type f16\`,"
    say "\`llm bench serve --policy continuous ${options[*]}\`:" && say ''
    show_log 6
    unwatch serve
    rm -f "$work/model.gguf"
}

# ---- NVIDIA's own tools --------------------------------------------------------------------------
find_tool() { # print its path: on the PATH, or where the Toolkit and Nsight put it
    command -v "$1" ||
        find /usr/local/cuda*/ /opt/nvidia -name "$1" -type f -perm -u+x 2>/dev/null | sort |
        tail -n 1
}
run_sanitizer() {
    say '' && say '### compute-sanitizer' && say ''
    local sanitizer tool status what
    sanitizer=$(find_tool compute-sanitizer)
    if [ "$DEVICE" != cuda ] || [ -z "$sanitizer" ]; then
        say 'Not run: there is no compute-sanitizer here.'
        return
    fi
    local summary limit spare=10
    case " $ONLY " in *' counters '*) spare=120 ;; esac # seconds that the next part needs
    # a small cache: memcheck and initcheck keep a record of all memory that kernels can reach
    local run=("$B/llm" run -m models/tales-q4_0.gguf --device cuda -n 4 --no-graphs -c 128
        --cache-memory 16M 'Once upon a time')
    say "\`${run[*]:1}\`, and tests:" && say ''
    say '| tool | program | result |' && say '|---|---|---|'
    for what in 'memcheck run' 'racecheck run' 'synccheck run' 'initcheck run' \
        'memcheck test_device' 'memcheck test_device_sampling' \
        'racecheck test_device' 'memcheck test_cuda_kernels'; do
        tool=${what% *} program=("$B/${what#* }")
        [ "${what#* }" != run ] || program=("${run[@]}")
        # some tests ask for too much memory on purpose, which memcheck must not report
        local quiet=()
        [ "$tool" != memcheck ] || quiet=(--report-api-errors no)
        limit=$(($(left) - spare))
        [ "$limit" -le 100 ] || limit=100
        if [ "$limit" -lt 10 ]; then
            say "| $tool | ${what#* } | left out: no time left |"
            unfinished=$((unfinished + 1))
            continue
        fi
        attempt "$limit" "$sanitizer" --tool "$tool" "${quiet[@]}" --error-exitcode 9 "${program[@]}"
        status=$?
        summary=$(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY|Device not supported' "$work/log" |
            tail -n 1 | sed 's/=* *//')
        say "| $tool | ${what#* } | $summary, exit status $status |"
        [ "$status" -eq 0 ] || grep -aE '=========' "$work/log" | head -n 15 | cut -c1-300
        went "$status" "$what"
        if grep -q 'Device not supported' "$work/log"; then return; fi
    done
}

run_counters() {
    local ncu kernel figures='llm__|Duration|Throughput|Warp Cycles Per Issued|Achieved Occupancy'
    figures="$figures|Registers Per|Grid Size|Error|ERR_"
    say '' && say '### Counters' && say ''
    ncu=$(find_tool ncu)
    if [ "$DEVICE" != cuda ] || [ -z "$ncu" ]; then
        say 'Not run: there is no ncu here.'
        return
    fi
    if [ -z "$bench_built" ]; then
        build_bench || { went 1 'the build of tests/gpu_bench.cu'; return; }
        bench_built=1
    fi
    say "ncu's figures for the second launch of each kernel in \`gpu_bench one ...\`: it launches"
    say 'the kernel a few times, and nothing else with that name:'
    say '' && say '```'
    local one
    # OPERATION:kernel; --launch-skip counts launches of that kernel only
    for one in 'matmul q4_0 1:matmul' 'matmul f16 1:matmul' 'matmul q4_K 1:matmul' \
        'matmul q4_0 16:matmul' 'matmul q4_0 64:matmul' 'matmul f16 512:matmul' \
        'matmul q4_0 512:matmul' 'prompt:attention' 'attention:attention' 'attention:merge' \
        'rmsnorm x 1:rmsnorm' 'gate x 64:swiglu' 'sampling:sample'; do
        kernel=${one##*:}
        say "==== ${one%:*}"
        # shellcheck disable=SC2086
        attempt 40 "$ncu" --clock-control none --kernel-name "regex:llm__$kernel" \
            --launch-skip 1 --launch-count 1 --section SpeedOfLight --section WarpStateStats \
            --section Occupancy --section LaunchStats --section MemoryWorkloadAnalysis \
            "$B/gpu_bench" one ${one%:*}
        went $? "ncu $one"
        grep -aE "$figures" "$work/log" | cut -c1-160 | tee -a "$REPORT"
        if grep -qaE 'ERR_NVGPUCTRPERM|Failed to initialize|LibraryNotLoaded' "$work/log"; then
            break
        fi
    done
    say '```'
}

for part in $parts; do
    case " $ONLY " in *" $part "*) ;; *) continue ;; esac
    if [ "$(left)" -lt 10 ]; then
        say '' && say "Left out, since there was no time left: $part."
        unfinished=$((unfinished + 1))
    else "run_$part"; fi
done
say ''
say "$SECONDS s in all; $failed failed, $unfinished not finished."
{ [ -f "$PAGE" ] || echo '# On a GPU' >"$PAGE"; } &&
    sh tests/gpu_page.sh section "$PAGE" "measured: $ONLY" "$REPORT" &&
    sh tests/gpu_page.sh beside "$PAGE" || failed=$((failed + 1))
[ "$failed" -eq 0 ]
