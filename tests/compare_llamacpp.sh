#!/bin/sh
# tests/compare_llamacpp.sh LLAMA_CPP: compares this engine with llama.cpp on the same files.
# LLAMA_CPP is its source folder, with its libraries built in build/bin. Run it in the repository's
# root. It prints the table of docs/types.md, and fails if
#
#   - f32 or f16 weights do not give the same greedy tokens, or
#   - the mean KL divergence between the two next-token distributions is 1e-3 or more.
#
# The files: the bundled model in every type, written by `llm quantize` and by llama.cpp's own
# quantizer; a model of random weights (`llm synth`) whose widths are not multiples of 256, where
# both fall back to other types; and the tiny models of tests/data/models, of every architecture
# that llama.cpp supports, written by `llm quantize` from their folders.
set -eu
peer=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2086
${CC:-cc} -std=gnu11 -O3 -ffp-contract=fast -fopenmp -rdynamic -I. -I"$peer/include" \
    -I"$peer/ggml/include" tests/compare_llamacpp.c \
    -o "$work/compare" -L"$peer/build/bin" -Wl,-rpath,"$peer/build/bin" -lllama -lggml -lggml-base \
    -lm
failed=0

row() { # row FILE DESCRIPTION greedy|free
    line=$("$work/compare" "$1" models/eval.txt)
    echo "| $2 | $line |"
    echo "$line" | awk -v strict="$3" '{
        if (!($1 < 1e-3)) { print "FAILED: the mean divergence is 1e-3 or more"; exit 1 }
        if (strict == "greedy" && $8 != $10) { print "FAILED: the greedy tokens differ"; exit 1 }
    }' || failed=1
}

printf '| file | mean KL | largest KL | same likeliest token | same greedy texts |'
echo ' tokens before they part |'
echo "|---|---|---|---|---|---|"
./llm synth --shape dim=320,layers=4,heads=5,kv-heads=5,hidden=864,vocab=1000,context=1024 \
    --type f32 "$work/odd.gguf" >/dev/null 2>&1
for type in f32 f16 bf16 q8_0 q6_K q5_K_M q5_K q5_1 q5_0 q4_K_M q4_K q4_1 q4_0; do
    case $type in f32 | f16) strict=greedy ;; *) strict=free ;; esac
    ./llm quantize models/tales.gguf "$work/q.gguf" --type $type >/dev/null 2>&1
    row "$work/q.gguf" "tales, $type" $strict
done
# llama.cpp's type numbers
for type in 1=f16 7=q8_0 18=q6_K 17=q5_K_M 9=q5_1 8=q5_0 15=q4_K_M 14=q4_K_S 3=q4_1 2=q4_0; do
    case $type in *f16) strict=greedy ;; *) strict=free ;; esac
    "$work/compare" --quantize "${type%=*}" models/tales.gguf "$work/q.gguf"
    row "$work/q.gguf" "tales, ${type#*=} by llama.cpp" $strict
done
for type in f32 q4_K q6_K; do
    ./llm quantize "$work/odd.gguf" "$work/q.gguf" --type $type >/dev/null 2>&1
    case $type in f32) strict=greedy ;; *) strict=free ;; esac
    row "$work/q.gguf" "random, rows of 320 and 864, $type" $strict
done
for type in 15=q4_K_M 17=q5_K_M; do
    "$work/compare" --quantize "${type%=*}" "$work/odd.gguf" "$work/q.gguf"
    row "$work/q.gguf" "random, rows of 320 and 864, ${type#*=} by llama.cpp" free
done
for model in llama llama_mha llama31 llama_linear mistral qwen2 qwen2_yarn \
    gptq_g32_zero gptq_g32_act_sym gptq_g128 gptq_g128_act gptq_v2 awq_g32 awq_g128_sym; do
    ./llm quantize tests/data/models/$model "$work/q.gguf" --type f32 >/dev/null 2>&1
    row "$work/q.gguf" "$model, f32" greedy
done
exit $failed
