#!/usr/bin/env bash
# tests/gpu_report.sh: builds for the GPU that is here, runs the tests on it, measures, and writes what came out, with GPU, driver, date and
# commands, to docs/gpu.md. Needs nvcc, a C compiler and nothing from the network. One run takes at most $BUDGET seconds: what does not fit any
# more is left out, and the report says so.
#
#   REPORT=FILE      where to write (docs/gpu.md)
#   BUDGET=SECONDS   (560)
#   MODELS="..."     shape:type of the models to decode with (llama-3.1-8b:q4_0 llama-3.1-8b:f16)
#   CMOCKA=FOLDER    with include/cmocka.h and lib/libcmocka.so, where the system has none
#   ONLY="..."       some of: tests kernels torch decode serve sanitizer (all)
#   DEVICE=emulated  a dry run without a GPU: the same steps, tiny
set -u
cd "$(dirname "$0")/.." || exit 1
DEVICE=${DEVICE:-cuda}
REPORT=${REPORT:-docs/gpu.md}
BUDGET=${BUDGET:-560}
ONLY=${ONLY:-tests kernels torch decode serve sanitizer}
B=build/report-$DEVICE
if [ "$DEVICE" = cuda ]; then MODELS=${MODELS:-llama-3.1-8b:q4_0 llama-3.1-8b:f16}; else MODELS=${MODELS:-dim=64,layers=2,heads=2,kv-heads=1,hidden=128,vocab=300,context=256:q4_0}; fi
export LLM_TEST_DEVICE=$DEVICE OMP_WAIT_POLICY=passive
if [ -n "${CMOCKA:-}" ]; then
    CMOCKA=$(cd "$CMOCKA" && pwd)
    export CPATH="$CMOCKA/include${CPATH:+:$CPATH}" LIBRARY_PATH="$CMOCKA/lib${LIBRARY_PATH:+:$LIBRARY_PATH}" LD_LIBRARY_PATH="$CMOCKA/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"; [ -z "${sampler:-}" ] || kill "$sampler" 2>/dev/null' EXIT
failed=0 sampler=

say() { printf '%s\n' "$*" | tee -a "$REPORT"; }
left() { echo $((BUDGET - SECONDS)); }
wanted() { case " $ONLY " in *" $1 "*) return 0 ;; *) return 1 ;; esac }
attempt() { # attempt SECONDS COMMAND...: into $work/log, no longer than that and than what is left
    local limit=$1
    shift
    [ "$limit" -le "$(left)" ] || limit=$(left)
    if [ "$limit" -lt 3 ]; then
        echo 'left out: the time was up' >"$work/log"
        return 124
    fi
    timeout -k 5 "$limit" "$@" >"$work/log" 2>&1
}
show_log() { say '```'; tail -n "${1:-15}" "$work/log" | sed "s|$work/||g" | cut -c1-400 | tee -a "$REPORT"; say '```'; }

# ---- Where we are, and the build ------------------------------------------------------------------------------
capability=
if [ "$DEVICE" = cuda ]; then
    command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
    command -v nvcc >/dev/null || { echo "gpu_report.sh: no nvcc here" >&2; exit 1; }
    facts=$(nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap,clocks.max.sm,clocks.max.mem --format=csv,noheader 2>/dev/null | head -n 1)
    [ -n "$facts" ] || { echo "gpu_report.sh: nvidia-smi finds no GPU here" >&2; exit 1; }
    capability=$(echo "$facts" | cut -d, -f4 | tr -d ' .')
else
    facts='the emulated device: a dry run, whose figures mean nothing'
fi
mkdir -p "$(dirname "$REPORT")" && : >"$REPORT" || exit 1
say '# On a GPU'
say ''
say "Written by \`tests/gpu_report.sh\` on $(date -u '+%Y-%m-%d %H:%M') UTC, at commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."
say ''
say "- GPU (name, driver, memory, compute capability, highest clocks): $facts"
say "- CPU: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
[ "$DEVICE" != cuda ] || say "- $(nvcc --version | tail -n 1)"

if [ "$DEVICE" = cuda ]; then settings="GPUS=$capability DEVICE=cuda"; else settings="NVCC= DEVICE=$DEVICE OPTIMIZE=-O1"; fi
# shellcheck disable=SC2206
build=(make --no-print-directory "-j$(nproc)" "B=$B" "LLM=$B/llm" $settings)
start=$SECONDS
if ! "${build[@]}" "$B/llm" "$B/libllm.a" >"$work/log" 2>&1; then
    say '' && say 'It does not build:' && show_log 40
    exit 1
fi
say "- Build: \`make $settings\`, $((SECONDS - start)) s"

# ---- Tests -------------------------------------------------------------------------------------------------------
run_tests() {
    say '' && say '## Tests' && say ''
    if ! printf '#include <setjmp.h>\n#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <cmocka.h>\nint main(void) { return 0; }\n' |
        cc -x c - -lcmocka -o "$work/cmocka" 2>/dev/null; then
        say 'Not run: there is no cmocka here (see CMOCKA in the script).'
        return
    fi
    local names='test_device test_cuda_kernels test_device_sampling test_device_engine' name
    [ "$DEVICE" = cuda ] && names="$names test_golden test_speculation test_scheduler test_engine"
    # shellcheck disable=SC2086
    if ! attempt 150 "${build[@]}" $(for name in $names; do echo "$B/$name"; done); then
        say 'The tests do not build:' && show_log 30
        failed=$((failed + 1))
        return
    fi
    say '| test | result | seconds |' && say '|---|---|---|'
    for name in $names; do
        local start=$SECONDS result status
        attempt 60 "$B/$name"
        status=$?
        result=$(sed -n 's/^\[  *\(PASSED\|FAILED\|SKIPPED\) *\] \([0-9]*\) test(s).*/\2 \1/p' "$work/log" | tr '\n' ' ' | tr 'A-Z' 'a-z')
        [ "$status" -ne 124 ] || result="not finished in time; ${result:-no result}"
        say "| $name | ${result:-exit status $status} | $((SECONDS - start)) |"
        if [ "$status" -ne 0 ] && [ "$status" -ne 124 ]; then
            failed=$((failed + 1))
            grep -E 'ERROR|FAILED|fault' "$work/log" | head -n 8 | cut -c1-300 >"$work/why-$name"
        fi
    done
    for name in $names; do
        [ -s "$work/why-$name" ] || continue
        say '' && say "$name:" && say '```' && tee -a "$REPORT" <"$work/why-$name" && say '```'
    done
}

# ---- Kernels: the ceilings first -----------------------------------------------------------------------------------
copy_rate=
run_kernels() {
    say '' && say '## Operations' && say ''
    say 'Each beside the ceilings of this GPU, which are measured first. A share is that of whichever ceiling bounds the operation. Times are of'
    say 'operations in a step (a graph), divided by their number; matmul rotates over weights that do not fit the L2 cache.' && say ''
    if [ "$DEVICE" = cuda ]; then
        local program=(nvcc -O3 -std=c++17 "-arch=sm_$capability" -I. tests/gpu_bench.cu "$B/llm_cuda.o" "$B/libllm.a" -Xcompiler -fopenmp -o "$B/gpu_bench")
        if ! attempt 120 "${program[@]}" -lcublas; then
            local library
            library=$(find / -name 'libcublas.so*' -not -path '/proc/*' 2>/dev/null | head -n 1)
            if ! attempt 120 "${program[@]}" "$library" -Xlinker -rpath -Xlinker "$(dirname "$library")"; then
                say 'tests/gpu_bench.cu does not build:' && show_log 30
                failed=$((failed + 1))
                return
            fi
        fi
    elif ! attempt 200 c++ -std=c++17 -O1 -DLLM_EMULATED -I. -Itests -x c++ tests/gpu_bench.cu -x none "$B/emulated.o" "$B/cuda_on_cpu.o" "$B/libllm.a" -fopenmp -lm -o "$B/gpu_bench"; then
        say 'tests/gpu_bench.cu does not build:' && show_log 30
        failed=$((failed + 1))
        return
    fi
    attempt 150 "$B/gpu_bench" || { echo "(gpu_bench ended with status $?)" >>"$work/log"; failed=$((failed + 1)); }
    tee -a "$REPORT" <"$work/log"
    copy_rate=$(sed -n 's/.*copy of .* | \([0-9.]*\) TB.*/\1/p' "$work/log")
}

run_torch() { # PyTorch's fused attention on the same shapes, if there is a PyTorch
    [ "$DEVICE" = cuda ] && python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || return
    cat >"$work/attention.py" <<'PYTHON'
import torch
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
    print(f"| PyTorch {torch.__version__}, scaled_dot_product_attention, {n} tokens, causal | {best:.2f} ms, {work / best * 1e-9:.0f} TFLOP/s | |")
PYTHON
    attempt 60 python3 "$work/attention.py"
    grep '^|' "$work/log" | tee -a "$REPORT"
}

# ---- The whole engine --------------------------------------------------------------------------------------------------
run_decode() {
    say '' && say '## One sequence' && say ''
    say '| model | command | prefill, tokens/s | decode, tokens/s | GB/s of weights and cache | share of the copy |' && say '|---|---|---|---|---|---|'
    local model shape type form prompt=512 gen=128
    [ "$DEVICE" = cuda ] || { prompt=8 gen=2; }
    for model in $MODELS; do
        shape=${model%:*} type=${model##*:}
        if ! attempt 150 "$B/llm" synth --shape "$shape" --type "$type" "$work/model.gguf"; then
            say "| $shape $type | llm synth: $(tail -n 1 "$work/log" | cut -c1-200) | | | | |"
            continue
        fi
        for form in '' --overlap; do
            # shellcheck disable=SC2086
            attempt 60 "$B/llm" bench -m "$work/model.gguf" --device "$DEVICE" -t 1 -p "$prompt" -g "$gen" -r 3 $form --json
            if ! grep -q '"decode_tokens_per_second"' "$work/log"; then
                say "| $shape $type | llm bench $form: $(tail -n 1 "$work/log" | cut -c1-200) | | | | |"
                failed=$((failed + 1))
            fi
            grep '"decode_tokens_per_second"' "$work/log" | while read -r line; do
                number() { echo "$line" | sed -n "s/.*\"$1\": \([-+0-9.e]*\).*/\1/p"; }
                say "| $shape $type | llm bench -p $prompt -g $gen $form | $(number prefill_tokens_per_second) | $(number decode_tokens_per_second) | $(number bytes_per_second |
                    awk '{ printf "%.1f", $1 * 1e-9 }') | $(number bytes_per_second | awk -v c="${copy_rate:-0}" '{ if (c > 0) printf "%.0f %%", $1 * 1e-10 / c; }') |"
            done
        done
        rm -f "$work/model.gguf"
    done
}

run_serve() { # the workload of nano-vllm's benchmark, on a Qwen3-0.6B shape
    say '' && say '## Many sequences' && say ''
    local shape=dim=1024,layers=28,heads=16,kv-heads=8,head-dim=128,hidden=3072,vocab=151936,context=4096,rope-base=1000000,tied=1
    local options=(--requests 256 --prompt 100-1024 --gen 100-1024 --max-sequences 256 --max-batch-tokens 16384 --cache-memory 40G)
    if [ "$DEVICE" != cuda ]; then
        shape=dim=64,layers=2,heads=2,kv-heads=1,hidden=128,vocab=300,context=256
        options=(--requests 4 --prompt 4-9 --gen 2-4 --max-sequences 4 --max-batch-tokens 64)
    fi
    if ! attempt 90 "$B/llm" synth --shape "$shape" --type f16 "$work/model.gguf"; then
        say "llm synth: $(tail -n 1 "$work/log")"
        return
    fi
    if [ "$DEVICE" = cuda ]; then
        nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 100 >"$work/busy" 2>/dev/null &
        sampler=$!
    fi
    attempt 150 "$B/llm" bench serve -m "$work/model.gguf" --device "$DEVICE" --policy continuous "${options[@]}" --json
    local status=$?
    [ -z "$sampler" ] || { kill "$sampler" 2>/dev/null; wait "$sampler" 2>/dev/null; sampler=; }
    say "\`llm synth --shape $shape --type f16\`, \`llm bench serve --policy continuous ${options[*]}\`:" && say ''
    if [ "$status" -ne 0 ]; then failed=$((failed + 1)); fi
    show_log 6
    # the samples while it ran at full speed: those between loading and the end, without the idle ones at both sides
    [ ! -s "$work/busy" ] || say "GPU busy (nvidia-smi, share of the time in which a kernel ran, samples from the first to the last above 50 %): $(awk '
        { x[NR] = $1; if ($1 > 50) { if (!first) first = NR; last = NR } } END { for (i = first; first && i <= last; i++) { sum += x[i]; n++ } if (n) printf "%.1f %% of %d samples", sum / n, n; else print "not seen" }' "$work/busy")"
    rm -f "$work/model.gguf"
}

run_sanitizer() {
    say '' && say '## compute-sanitizer' && say ''
    if [ "$DEVICE" != cuda ] || ! command -v compute-sanitizer >/dev/null; then
        say 'Not run: there is no compute-sanitizer here.'
        return
    fi
    say '`llm run -m models/tales-q4_0.gguf -n 4` under each tool:' && say '' && say '| tool | result |' && say '|---|---|'
    local tool status
    for tool in memcheck racecheck initcheck; do
        attempt 70 compute-sanitizer --tool "$tool" --error-exitcode 9 "$B/llm" run -m models/tales-q4_0.gguf --device cuda -n 4 --no-graphs 'Once upon a time'
        status=$?
        say "| $tool | $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|Device not supported' "$work/log" | tail -n 1 | sed 's/=* *//'), exit status $status |"
        [ "$status" -eq 0 ] || [ "$status" -eq 124 ] || { failed=$((failed + 1)); grep -E '=========' "$work/log" | head -n 12 >&2; }
    done
}

for part in kernels torch decode serve tests sanitizer; do
    wanted "$part" || continue
    if [ "$(left)" -lt 10 ]; then say '' && say "Left out, since the time was up: $part."; else "run_$part"; fi
done
say ''
say "$SECONDS s in all; $failed failed."
[ "$failed" -eq 0 ]
