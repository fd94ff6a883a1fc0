#!/bin/sh
# tests/cli.sh LLM: tests of the llm command: options, messages, exit statuses, JSON, and damaged
# files, a full disk, a closed pipe and Ctrl-C. Run it in the repository's root. It makes its own
# small models, and ends in "N passed, N failed", with ", N skipped" if any were.
set -u
. "$(dirname "$0")/cli_lib.sh"

# ---- models for the tests ----------------------------------------------------------------
SHAPE=dim=64,layers=2,heads=4,kv-heads=2,hidden=96,vocab=600,context=128
ok "synth f16" "s.gguf: .* of random weights" "$LLM" synth --shape $SHAPE --type f16 s.gguf
ok "synth, head-dim and tied" "" \
    "$LLM" synth --shape $SHAPE,head-dim=32,tied=1,rope-base=500000 --type f32 tied.gguf
ok "synth, long context" "" \
    "$LLM" synth --shape dim=32,layers=1,heads=2,kv-heads=1,hidden=32,vocab=300,context=1000000 \
    --type q8_0 long.gguf
ok "synth, a value with = in it" "" "$LLM" synth "--shape=$SHAPE" --type=f16 equals.gguf

# a damaged model, whose last values are NaN
cp tied.gguf broken.gguf
printf '\377%.0s' 1 2 3 4 5 6 7 8 >nan
dd if=nan of=broken.gguf bs=1 seek=$(($(wc -c <broken.gguf) - 8)) conv=notrunc 2>/dev/null
name="run, logits are not finite" && run "$LLM" run -m broken.gguf -n 5 --quiet Hello &&
    judge 1 "request 1, sample 0: the model's logits after position [0-9]+ are not finite" ""
echo '{"prompt": "Hello"}' >one.jsonl
name="batch, logits are not finite" && run "$LLM" batch -m broken.gguf -f one.jsonl -n 5 &&
    judge 1 "line 1: request 1, sample 0: the model's logits" '"error": "request 1, sample 0'
echo "Some words to predict." >words.txt
bad "perplexity, logits are not finite" 1 "logits are not finite" \
    "$LLM" perplexity -m broken.gguf words.txt
M=$T/s.gguf
same "--option=value is --option value" s.gguf equals.gguf

# ---- help, version, usage errors ----------------------------------------------------------
ok "--version" "^llm [0-9]" "$LLM" --version
ok "--help" "perplexity" "$LLM" --help
name="--help fits a screen of 24 lines and 80 columns"
if [ "$(wc -l <out)" -lt 24 ] && ! grep -q '.\{81\}' out; then pass; else fail \
    "at most 23 lines of 80 columns, not $(wc -l <out)"; fi
for c in run chat batch demo info tokenize perplexity quantize bench "bench batch" "bench serve" \
    "bench speculate" synth; do
    # shellcheck disable=SC2086
    ok "$c --help, width" "" "$LLM" $c --help
    name="$c --help fits 96 columns"
    if grep -q '.\{97\}' out; then fail "no longer line than: $(grep '.\{97\}' out | head -1)"; \
        else pass; fi
done
for c in run demo info tokenize perplexity quantize bench synth; do
    ok "$c --help" "Usage: llm $c" "$LLM" $c --help
    [ $c = demo ] || { name="$c --help has examples"; judge 0 "" "Examples:"; }
    bad "$c, unknown option" 2 "llm $c: unknown option --hepl; did you mean --help\?" \
        "$LLM" $c --hepl
done
ok "help CMD" "Usage: llm run" "$LLM" help run
name="no command"; run "$LLM"; judge 2 "a command is missing" "Usage: llm COMMAND"
bad "unknown command" 2 "unknown command 'rnu'; did you mean 'run'\?" "$LLM" rnu
bad "unknown command, nothing similar" 2 "unknown command 'xyzzy'$" "$LLM" xyzzy
bad "unknown option" 2 "unknown option --temprature; did you mean --temperature\?" \
    "$LLM" run --temprature 1 x
bad "unknown option with a value" 2 "unknown option --sede; did you mean --seed\?" \
    "$LLM" run --sede=1 x
bad "unknown option, nothing similar" 2 "unknown option --frobnicate$" "$LLM" run --frobnicate
bad "unknown short option" 2 "unknown option -z" "$LLM" run -z
bad "combined short options" 2 "unknown option -nq" "$LLM" run -nq 3
bad "no value" 2 "seed needs a value: --seed N" "$LLM" run --seed
bad "value for a flag" 2 "json takes no value" "$LLM" run --json=yes
bad "not a number" 2 "tokens needs a whole number from -1 to 2147483647, not 'ten'" \
    "$LLM" run -n ten x
bad "number with a tail" 2 "tokens needs a whole number" "$LLM" run -n 10x x
bad "number too large" 2 "tokens needs a whole number" "$LLM" run -n 99999999999999999999 x
bad "negative temperature" 2 "temperature needs a number from 0 to 100" \
    "$LLM" run --temperature -1 x
bad "temperature nan" 2 "temperature needs a number" "$LLM" run --temperature nan x
bad "top-p above 1" 2 "top-p needs a number" "$LLM" run --top-p 1.5 x
bad "negative seed" 2 "seed needs a whole number" "$LLM" run --seed -1 x
bad "unknown type" 2 "type needs one of the types f32, .*q4_0.*, not 'q5_9'" \
    "$LLM" synth --shape tales --type q5_9 x.gguf
bad "invalid size" 2 "memory needs a size such as 512M or 8G, not 'lots'" \
    "$LLM" info --memory lots "$M"
bad "invalid list" 2 "threads needs whole numbers" "$LLM" bench --threads 1,two -m "$M"
bad "two prompts" 2 "one argument too many: 'upon'" "$LLM" run once upon
bad "prompt and file" 2 "two prompts" "$LLM" run -f a.txt once
bad "perplexity of nothing" 2 "a text file is missing" "$LLM" perplexity
bad "quantize nothing" 2 "the file to read is missing" "$LLM" quantize
bad "quantize to nothing" 2 "the file to write is missing" "$LLM" quantize "$M"
bad "synth without a shape" 2 "shape is missing" "$LLM" synth x.gguf
bad "synth, unknown shape" 2 "no shape is named 'tinylama-1.1b'; did you mean tinyllama-1.1b\?" \
    "$LLM" synth --shape tinylama-1.1b x.gguf
bad "synth, unknown size" 2 "no such size" "$LLM" synth --shape dims=3 x.gguf
bad "synth, heads" 2 "not a multiple of kv-heads" \
    "$LLM" synth --shape dim=64,heads=4,kv-heads=3 x.gguf
bad "synth, vocabulary" 2 "vocab must be at least" "$LLM" synth --shape vocab=10 x.gguf
bad "tokenize --json and text" 2 "json reads standard input" "$LLM" tokenize --json -m "$M" x
name="usage errors write no file"; if [ -e x.gguf ]; then fail "no x.gguf"; else pass; fi

# ---- missing, wrong and damaged files --------------------------------------------------------
bad "missing model" 1 "nowhere.gguf.*No such file" "$LLM" run -m nowhere.gguf x
bad "missing prompt file" 1 "cannot read nowhere.txt: No such file" \
    "$LLM" run -m "$M" -f nowhere.txt
bad "missing text" 1 "cannot read nowhere.txt: No such file" "$LLM" perplexity -m "$M" nowhere.txt
bad "a directory as a model" 1 "^llm: .*/" "$LLM" run -m "$T" x
bad "a directory as a text" 1 "cannot read .*: Is a directory" "$LLM" perplexity -m "$M" "$T"
printf 'Once upon a time there was a text file that wanted to be a model.\n' >text.gguf
: >empty.gguf
for c in run info tokenize bench; do
    bad "$c of a text file" 1 "text.gguf.*GGUF" "$LLM" $c -m text.gguf
    bad "$c of an empty file" 1 "empty.gguf" "$LLM" $c -m empty.gguf
done
bad "perplexity of a text file as a model" 1 "text.gguf.*GGUF" \
    "$LLM" perplexity -m text.gguf text.gguf
bad "quantize a text file" 1 "text.gguf.*GGUF" "$LLM" quantize text.gguf x.gguf
if [ -e models/tales-q4_0.gguf ] || [ -e "$(dirname "$LLM")/models/tales-q4_0.gguf" ]; then :
else bad "no model at all" 1 "tales-q4_0.gguf is not here.*-m FILE" "$LLM" run x
fi

name="a GGUF cut at 100 places" size=$(wc -c <"$M") wrong=0 i=0
while [ $i -lt 100 ]; do
    head -c $((size * i / 100)) "$M" >cut.gguf
    for c in run info; do
        run "$LLM" $c -m cut.gguf
        if [ $status -ne 1 ] || [ -s out ] || ! grep -q '^llm: .*cut.gguf' err ||
            [ "$(wc -l <err)" -ne 1 ]; then
            wrong=$((wrong + 1))
            if [ $wrong -le 3 ]; then
                name="$c of a GGUF cut to $((size * i / 100)) of $size bytes"
                fail "status 1 and one line that names the file"
            fi
        fi
    done
    i=$((i + 1))
done
[ $wrong -gt 0 ] || pass
head -c $((size - 1)) "$M" >cut.gguf
bad "a GGUF without its last byte" 1 "cut.gguf" "$LLM" run -m cut.gguf x

if LC_ALL=C sed 's/llama/mamba/' "$M" >other.gguf 2>/dev/null &&
    [ "$(wc -c <other.gguf)" -eq "$size" ]; then
    bad "another architecture" 1 "other.gguf.*mamba" "$LLM" run -m other.gguf x
    ok "info of another architecture" "cannot run it: .*mamba" "$LLM" info other.gguf
    name="info --check of another architecture"; run "$LLM" info --check other.gguf
    judge 1 "mamba" "all values and scales are finite"
    run "$LLM" info --json other.gguf
    json "info --json of another architecture"
    LC_ALL=C sed 's/ggml\.bos_token_id/ggml.xxx_token_id/; s/add_bos_token/add_xxx_token/' "$M" \
        >nobos.gguf
    bad "empty prompt without BOS" 1 "the prompt is empty, and this model has no BOS" \
        "$LLM" run -m nobos.gguf ""
else
    skip "another architecture (this sed cannot edit binary files)"
fi

# ---- run --------------------------------------------------------------------------------------
figures='^\[[0-9]+ prompt tokens, first token after [0-9.]+ ms; 12 tokens at [0-9.]+ tokens/s = '
figures=$figures'[0-9.]+ GB/s.*; seed 3\]$'
name="run"; run "$LLM" run -m "$M" -n 12 --seed 3 --ignore-end "Hello"; judge 0 "$figures" "^Hello"
name="one line of statistics"; if [ "$(wc -l <err)" -eq 1 ]; then pass
else fail "one line on stderr"; fi
name="no colour except on a terminal"
if LC_ALL=C grep -q "$(printf '\033')" err; then fail "no escapes"; else pass; fi
ok "run --quiet" "" "$LLM" run -m "$M" -n 12 --seed 3 -q --ignore-end "Hello"
cp out first
ok "the same seed" "" "$LLM" run -m "$M" -n 12 --seed=3 --quiet --ignore-end "Hello"
same "the same seed, the same text" first out
ok "other blocks, chunks and threads" "" \
    "$LLM" run -m "$M" -n 12 -s 3 -q -t 1 --block-size 3 --max-batch-tokens 2 --ignore-end \
    -- "Hello"
same "... give the same text" first out
printf 'Hello\n' >prompt.txt
# a Hugging Face folder and the GGUF file written from it give the same text
F=$TOP/tests/data/models
for m in llama mistral_window gptq_g32_act_sym; do
    ok "a folder: run $m" "..........." "$LLM" run -m "$F/$m" -n 12 -q --temperature 0 "Once upon"
    cp out folder.txt
    ok "a folder: info $m" "^Hugging Face" "$LLM" info "$F/$m"
    ok "a folder: quantize $m" "" "$LLM" quantize "$F/$m" folder.gguf --type f32
    ok "a folder as a file: run $m" "..........." \
        "$LLM" run -m folder.gguf -n 12 -q --temperature 0 "Once upon"
    # except for this type, whose kernels round activations
    if [ $m != gptq_g32_act_sym ]; then same "a folder and its GGUF file, $m" out folder.txt; fi
done
bad "a folder without a model" 1 "there is no config.json in this folder" \
    "$LLM" run -m "$TOP/docs" x
ok "prompt from a file" "" "$LLM" run -m "$M" -n 12 -s 3 -q --ignore-end -f prompt.txt
same "... gives the same text" first out
piped "prompt from standard input" 'Hello' "" "$LLM" run -m "$M" -n 12 -s 3 -q --ignore-end -
same "... gives the same text" first out
piped "prompt from standard input, as it is piped" 'Hello\n\n' '"prompt": "Hello\\n\\n"' "$LLM" \
    run -m "$M" -n 1 -q --json -
piped "... with -f -, too" 'Hello\n' '"prompt": "Hello\\n"' "$LLM" run -m "$M" -n 1 -q --json -f -
ok "a whole number with an exponent" "" "$LLM" run -m "$M" -n 1.2e1 -s 3e0 -q --ignore-end "Hello"
same "... is that number" first out
bad "a number with an exponent that is not whole" 2 \
    "tokens needs a whole number from -1 to 2147483647, not '15e-1'" "$LLM" run -m "$M" -n 15e-1 x
bad "a number with an exponent, out of range" 2 \
    "tokens needs a whole number from -1 to 2147483647, not '1e10'" "$LLM" run -m "$M" -n 1e10 x
bad "a hexadecimal number" 2 "tokens needs a whole number" "$LLM" run -m "$M" -n 0x10 x
bad "a seed that is not whole" 2 "seed needs a whole number" "$LLM" run -m "$M" -s 1.5 x
printf 'Hello\n\n' >prompt.txt
ok "prompt from a file: one newline is dropped" '"prompt": "Hello\\n"' \
    "$LLM" run -m "$M" -n 1 -q --json -f prompt.txt
ok "empty prompt" "" "$LLM" run -m "$M" -n 5 -q ""
ok "no prompt" "" "$LLM" run -m "$M" -n 5 -q
ok "nothing to generate" "^Hello$" sh -c '"$1" run -m "$2" -n 0 Hello 2>/dev/null' - "$LLM" "$M"
printf 'caf\351 \377\376 \355\240\200 \300\200 \364\220\200\200 \360\237\230' >invalid.txt
ok "prompt of invalid UTF-8" "" "$LLM" run -m "$M" -n 8 -q "$(cat invalid.txt)"
ok "invalid UTF-8 from a file" "" "$LLM" run -m "$M" -n 8 -q -f invalid.txt
ok "invalid UTF-8, JSON" '"prompt_tokens"' "$LLM" run -m "$M" -n 8 -q --json -f invalid.txt
json "run --json of invalid UTF-8"
i=0; while [ $i -lt 40 ]; do printf 'QWERTY%d ' $i; i=$((i + 1)); done >longer.txt
ok "run --trace" "" \
    "$LLM" run -m "$M" -n 12 -s 3 -q --ignore-end --max-batch-tokens 2 --trace t.json -f invalid.txt
trace "... writes a trace" t.json '"prefill 2"'
ok "run --trace of several samples" "" \
    "$LLM" run -m "$M" -n 4 -s 3 -q --ignore-end --samples 3 --trace t.json "Hello"
trace "... writes over the last one" t.json '"request 1, sample 3"'
bad "run --trace -" 2 "trace needs the name of a file: standard output is for the text" "$LLM" \
    run -m "$M" -n 4 --trace - Hello
bad "run --trace over the prompt" 1 "prompt.txt exists and is not a trace: give another path" \
    "$LLM" run -m "$M" -n 4 -f prompt.txt --trace prompt.txt
bad "run --trace over the model" 1 "s.gguf exists and is not a trace" "$LLM" run -m "$M" -n 4 \
    --trace "$M" Hello
bad "run --trace to a directory" 1 "cannot write to .*: Is a directory" "$LLM" run -m "$M" -n 4 \
    --trace "$T" Hello
bad "prompt longer than the context" 1 "[0-9]+ tokens.*context.*128|context.*128.*tokens" "$LLM" \
    run -m "$M" -q -f longer.txt
bad "... than the context asked for" 1 \
    "--context is 8, and the prompt has [0-9]+ tokens: shorten the prompt, or allow a longer context$" \
    "$LLM" run -m "$M" -q -c 8 "Hello, and good evening to you"
bad "context longer than the model's" 1 "128" "$LLM" run -m "$M" -c 1000 x
bad "cache of an impossible type" 2 "one of f32.f16, not 'q8_0'" "$LLM" run -m "$M" --cache-type \
    q8_0 x
bad "cache too small for the request" 1 \
    "^llm: --cache-memory is 4.0 KiB \(1 blocks of 16 tokens\), and the request may need 28.0 KiB \(7 blocks\): ask for fewer tokens, or enlarge" \
    "$LLM" run -m "$M" --cache-memory 4K -n 100 x
ok "to the end of the context" "" "$LLM" run -m "$M" -n -1 -c 20 --ignore-end --json -q \
    --temperature 0 "Hello"
json "run --json"
name="run --json: greedy, to the end"; judge 0 "" '"finish": "length"'
for o in "--naive-attention" "--cache-type f32" \
    "--top-k 5 --min-p 0.1 --repetition-penalty 1.2 --penalty-window 8" "--special"; do
    ok "run $o" "" "$LLM" run -m "$M" -n 5 -q $o "Hello <|endoftext|>"
done
ok "several samples" "\[sample 3\]" "$LLM" run -m "$M" -n 5 -q --samples 3 -s 4 "Hello"
ok "several samples, JSON" '"samples"' "$LLM" run -m "$M" -n 5 --samples 3 --json -s 4 "Hello"
json "run --samples --json"
if [ -n "$python" ]; then
    name="run --json: contents"
    "$python" - out >log 2>err <<'END'
import json, sys
r = json.load(open(sys.argv[1], encoding="utf-8"))
assert r["prompt"] == "Hello" and r["prompt_tokens"][0] == 0 and r["seed"] == 4
assert len(r["samples"]) == 3
for s in r["samples"]:
    assert s["finish"] in ("end", "length") and 1 <= len(s["tokens"]) <= 5
    assert s["text"].startswith("".join(t["text"] for t in s["tokens"]))
    assert all(t["logprob"] <= 0 and 0 <= t["id"] < 600 for t in s["tokens"])
assert r["timings"]["ttft_seconds"] > 0 and r["timings"]["memory_bytes_per_second"] > 0
END
    status=$?
    if [ $status -eq 0 ]; then pass; else fail "the fields of run --json"; fi
fi

# ---- info, tokenize, perplexity, bench, quantize ------------------------------------------------
ok "info" "a sequence of 128 " "$LLM" info "$M"
ok "info --tensors" "blk.1.ffn_down.weight +f16 +96 x 64" "$LLM" info -m "$M" --tensors
ok "info --memory" "In 1.0 GiB of memory" "$LLM" info "$M" --memory 1G
ok "info, no memory" "In 0 B of memory" "$LLM" info "$M" --memory 0
bad "info, a context beyond the model's" 1 \
    "--context is 129: the model supports 1 to 128 tokens" "$LLM" info "$M" --context 129
ok "info, memory too small for the weights" "the weights do not fit" "$LLM" info "$M" --memory 1k
ok "info --check" "all values and scales are finite" "$LLM" info "$M" --check
ok "info --check of a folder" "21 tensors, .*finite" "$LLM" info --check \
    "$TOP/tests/data/models/llama"
ok "info --check --json" '"runs": true,' "$LLM" info --check --json "$M"
json "info --check --json"
cp -r "$TOP/tests/data/models/qwen3_yarn" yarn
sed 's/"max_position_embeddings": 64/"max_position_embeddings": 99/' \
    "$TOP/tests/data/models/qwen3_yarn/config.json" >yarn/config.json
ok "info, a context that YaRN makes smaller" \
    "context: config.json says 99, but its YaRN scaling gives only 64" "$LLM" info yarn
ok "info --json, a context that YaRN makes smaller" '"context_note": "config.json says 99' "$LLM" \
    info yarn --json
json "info --json, a context that YaRN makes smaller"
bad "... and a larger one" 1 \
    "supports 1 to 64 tokens.*; config.json says 99, but its YaRN scaling" "$LLM" run -m yarn \
    -c 70 x
bad "info, ... and a larger one" 1 \
    "supports 1 to 64 tokens; config.json says 99, but its YaRN scaling" "$LLM" info yarn -c 70
bad "info --check --program" 2 "cannot go with --program" "$LLM" info --check --program "$M"
cp "$M" nan.gguf
# a NaN of f16
printf '\000\176' | dd of=nan.gguf bs=2 seek=$(($(wc -c <nan.gguf) / 4)) conv=notrunc 2>/dev/null
name="info --check of a NaN"; run "$LLM" info --check nan.gguf; judge 1 \
    "nan.gguf: 1 of [0-9]* tensors have values" \
    "weight: 1 of [0-9]* values are not finite, the first is nan at index"
name="info --check --json of a NaN"; run "$LLM" info --check --json nan.gguf; judge 1 \
    "values that are not finite" '"count": 1,'
json "info --check --json of a NaN"
bad "quantize a NaN" 1 \
    "nan.gguf: the tensor .*weight has 1 values that are not finite, the first is nan at index [0-9]*" \
    "$LLM" quantize nan.gguf q.gguf --type q8_0
name="... writes no file"; if [ -e q.gguf ] || [ -e q.gguf.tmp ]; then fail "no q.gguf"; else \
    pass; fi
ok "info --json" '"bytes_per_token": 256,' "$LLM" info "$M" --json --tensors --memory 1.5GiB
json "info --json"

"$LLM" info "$M" --json >shape 2>err
ok "info --program" "matmul +gate -> \+=x +ffn_down f16 64 x 96 +12.0 KiB" \
    "$LLM" info --program "$M"
ok "info --program, layers" "layers 1 to 1 are like layer 0" "$LLM" info --program "$M"
ok "info --program --all" " 1  matmul +h -> up " "$LLM" info --program --all "$M"
ok "info --program --plan" "barrier  attn_norm" "$LLM" info --program --plan -t 2 "$M"
bad "info --program, too many tokens" 1 "--tokens is 65, more than --context, 64" "$LLM" info \
    --program "$M" --tokens 65 --context 64
bad "info --program, a context beyond the model's" 1 "--context is 129: " "$LLM" info --program \
    "$M" --context 129
bad "info --program, no tokens" 2 "--tokens needs a whole number from 1 " "$LLM" info --program \
    "$M" --tokens 0
bad "info --tokens alone" 2 "need --program" "$LLM" info "$M" --tokens 5
ok "info --program --json" '"kind": "rope_store"' "$LLM" info "$M" --program --plan --json -t 2 \
    --tokens 3 --context 20
json "info --program --json"
if [ -n "$python" ]; then
    name="info --program --json: contents"
    "$python" - out shape >log 2>err <<'END'
import json, sys
p, shape = (json.load(open(f, encoding="utf-8")) for f in sys.argv[1:3])
ops, total = p["operations"], p["total"]
for what in total: # the totals are sums
    assert sum(o[what] for o in ops) == total[what]
assert [o["number"] for o in ops] == list(range(len(ops)))
assert (p["tokens"], p["context"]) == (3, 20)
# all weights, with 3 embedding rows instead of 1, and RoPE's frequencies, which are not in the file
embed, angles = ops[0], ops[1]
assert (embed["kind"], angles["kind"]) == ("embed", "rope_angles")
more = embed["weight_bytes"] * 2 / 3 + angles["weight_bytes"]
assert total["weight_bytes"] - more == shape["step_bytes"]
# keys and values: 3 tokens are written, 20 are read
assert total["cache_bytes"] == shape["cache"]["bytes_per_token"] * (3 + 20)
for o in ops:
    rows = 1 if o["writes"] == ["logits"] else 3
    assert o["kind"] != "matmul" or o["operations"] == 2 * rows * o["rows"] * o["cols"]
# each operation is in one stage, except a matmul with a rounding stage, which is in two
done = [i for s in p["stages"] if not s["rounds"] for i in s["operations"]]
assert sorted(done) == list(range(len(ops))) and p["stages"][0]["barrier"]
END
    status=$?
    if [ $status -eq 0 ]; then pass; else fail "the fields of info --program --json"; fi
fi
ok "info --program --plan --no-fusion" " rope_store$" \
    "$LLM" info "$M" --program --plan -t 2 --no-fusion rope
ok "info --program --plan, fused" "rope_store . attention, fused" \
    "$LLM" info "$M" --program --plan -t 2 --no-fusion gate,own-copies
bad "an unknown fusion" 2 \
    "some of gate.rope.own-copies.side-by-side.all with commas between them, not 'gate,x'" \
    "$LLM" run -m "$M" --no-fusion gate,x Hello
"$LLM" run -m "$M" -n 20 --temperature 0 -q --ignore-end Hello >fused 2>err
"$LLM" run -m "$M" -n 20 --temperature 0 -q --ignore-end --no-fusion all Hello >plain 2>>err
same "the same text without fusions" fused plain

"$LLM" tokenize -m "$M" -f "$LLM" >ids 2>err # arbitrary bytes: the program itself
"$LLM" tokenize -m "$M" --decode -f ids >back 2>>err
same "tokenize and back" "$LLM" back
ok "tokenize text" "^[0-9]+( [0-9]+)*$" "$LLM" tokenize -m "$M" "Hello there"
ok "tokenize --bos" "^0 [0-9]" "$LLM" tokenize -m "$M" --bos "Hello there"
ok "tokenize --special" "^1$" "$LLM" tokenize -m "$M" --special "<|endoftext|>"
ok "tokenize, not special" "^[0-9]+( [0-9]+)+$" "$LLM" tokenize -m "$M" "<|endoftext|>"
ok "tokenize --pieces" '"Ġ?[a-z]+"$' "$LLM" tokenize -m "$M" --pieces "hello there"
ok "tokenize nothing" "^$" "$LLM" tokenize -m "$M" ""
# folders with missing weights or of an unsupported model
cp -r "$F/llama_mha" words
echo '{"bos_token": "<|end|>", "add_bos_token": true}' >words/tokenizer_config.json
ok "tokenize with a folder" "^95 66 67$" "$LLM" tokenize -m words --bos "ab"
rm words/model.safetensors
ok "tokenize with a folder without weights" "^95 66 67$" "$LLM" tokenize -m words/ --bos "ab"
sed 's/"llama"/"mamba"/' "$F/llama_mha/config.json" >words/config.json
ok "tokenize with a folder of an unknown model" "^95 66 67$" "$LLM" tokenize -m words --bos "ab"
rm words/tokenizer.json
bad "tokenize with a folder without a vocabulary" 1 "^llm: words: .*" "$LLM" tokenize -m words "ab"
printf '"Hello"\n\n"\\u00e9\\ud83d\\ude00\\n\\"\\\\"\n  "" \n' >lines
name="tokenize --json"; "$LLM" tokenize -m "$M" --json <lines >ids 2>err; status=$?; cp ids out
judge 0 "" '^\[[0-9]+(, [0-9]+)*\]$'
name="tokenize --json --decode"; "$LLM" tokenize -m "$M" --json --decode <ids >out 2>err; status=$?
printf '"Hello"\n"\303\251\360\237\230\200\\n\\"\\\\"\n""\n' >expected
judge 0 "" ""
same "tokenize --json and back" out expected
for line in 'Hello' '"Hello' '"a" "b"' '"\x"' '"\u12"' '["a"]' '{'; do
    name="tokenize --json of $line"
    printf '%s\n' "$line" | "$LLM" tokenize -m "$M" --json >out 2>err; status=$?
    judge 1 "line 1 is not a JSON string" ""
done
for line in '1' '[1,]' '[,1]' '[1 2]' '[1' '[1] 2' '["1"]' '[1.5]' '[99999999999]'; do
    name="tokenize --json --decode of $line"
    printf '%s\n' "$line" | "$LLM" tokenize -m "$M" --json --decode >out 2>err; status=$?
    judge 1 "not a JSON array of token ids" ""
done
bad "decode an id out of range" 1 "^llm: .*600" "$LLM" tokenize -m "$M" --decode 600
bad "decode words" 1 "not a list of token ids" "$LLM" tokenize -m "$M" --decode one two
ok "decode arguments" "" "$LLM" tokenize -m "$M" --decode 1 2 3

printf 'One small tale.\n<|endoftext|>\n\nAnother one, of two lines,\nand then no more %s\n' \
    'of it, for the windows must slide over this text a few times before it ends.' >text.txt
ok "perplexity" "^[0-9.]+ bits per byte, perplexity [0-9.]+ per token \(2 documents, 135 bytes" \
    "$LLM" perplexity -m "$M" text.txt
ok "perplexity in windows, JSON" '"complete": true' \
    "$LLM" perplexity -m "$M" --context 16 --json text.txt
json "perplexity --json"
if [ -n "$python" ]; then
    # every token of BOS, text and EOS except the first is predicted once, for any window size
    name="perplexity: tokens predicted"
    "$LLM" perplexity -m "$M" --context 16 --json text.txt >windows.json 2>err
    "$LLM" perplexity -m "$M" --json text.txt >whole.json 2>err
    "$python" - "$LLM" "$M" >log 2>err <<'END'
import json, subprocess, sys
documents = open("text.txt", encoding="utf-8").read().split("<|endoftext|>\n")
def tokens(text):
    command = [sys.argv[1], "tokenize", "-m", sys.argv[2], text]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()
counts = [len(tokens(d.strip("\n"))) for d in documents]
whole, windows = json.load(open("whole.json")), json.load(open("windows.json"))
expected = sum(n + 1 for n in counts)
assert whole["tokens_predicted"] == windows["tokens_predicted"] == expected, (whole, windows)
def computed(n, context): # windows advance by half a context until the last token is predicted
    total, start, done = 0, 0, 1
    while done < n:
        size = min(n - 1 - start, context)
        total, done, start = total + size, start + size + 1, start + context // 2
    return total
assert windows["tokens_computed"] == sum(computed(n + 2, 16) for n in counts), (windows, counts)
assert whole["bytes"] == windows["bytes"] == sum(len(d.strip("\n")) for d in documents)
END
    status=$?
    if [ $status -eq 0 ]; then pass; else fail "as many as there are tokens"; fi
fi
bad "perplexity of no text" 1 "holds no text" "$LLM" perplexity -m "$M" empty.gguf
ok "perplexity of invalid UTF-8" "^[0-9.]+ bits per byte" "$LLM" perplexity -m "$M" invalid.txt

ok "bench --json" '"complete": true' \
    "$LLM" bench -m "$M" --threads 1 --prompt 4,30 --gen 3 --runs 2 --json
json "bench --json"
for o in "" "batch --sequences 1" "serve --policy continuous --requests 2 --prompt 4 --gen 3" \
    "speculate --lookup -f words.txt -p 2 -g 3"; do
    if [ -n "$o" ]; then set -- $o; else set -- -t 1; fi
    case $o in batch* | "") set -- "$@" -p 4 -g 3 ;; esac
    name="bench $*, logits that are not numbers" && run "$LLM" bench "$@" -m broken.gguf && judge \
        1 "sample 0: the model's logits after position [0-9]+ are not finite" ""
done
ok "bench" "^ +1 +5 .* %$" "$LLM" bench -m "$M" -t 1 -p 5 -g 2 -r 1
bad "bench beyond the context" 1 "context of 128" "$LLM" bench -m "$M" --prompt 500
ok "bench --profile" "^rope_store\+attention +6 " "$LLM" bench -m "$M" -t 1 -p 5 -g 3 --profile
ok "bench --profile --no-fusion" "^attention +6 " \
    "$LLM" bench -m "$M" -t 1 -p 5 -g 3 --profile --no-fusion gate,rope
ok "bench --profile --json" '"predicted_seconds"' \
    "$LLM" bench -m "$M" -t 1 -p 100 -g 3 --max-batch-tokens 40 --profile --json
json "bench --profile --json"
if [ -n "$python" ]; then
    name="bench --profile --json: contents"
    "$python" - out >log 2>err <<'END'
import json, sys
d = json.load(open(sys.argv[1], encoding="utf-8"))
for phase, tokens, steps in ("prefill", 100, 3), ("decode", 3, 3):
    rows = {r["operation"]: r for r in d[phase]}
    assert abs(sum(r["seconds"] for r in d[phase]) - d[phase + "_seconds"]) < 1e-6
    down, logits = rows["ffn_down"], rows["output"]
    assert down["calls"] == 2 * steps and down["operations"] == tokens * 2 * 2 * 64 * 96
    assert logits["calls"] == (1 if phase == "prefill" else 3)
    assert logits["operations"] == logits["calls"] * 2 * 64 * 600
END
    status=$?
    if [ $status -eq 0 ]; then pass; else fail "the fields of bench --profile --json"; fi
fi

# K types need rows of whole blocks of 256 values, which this model does not have
for type in q4_K q4_k q5_K q6_K q4_K_M q5_K_M Q4_K_M q5_k_m; do
    ok "quantize to $type" "note: 1[5-9] of the matrices have rows that are not .* 256 values, .*" \
        "$LLM" quantize "$M" q.gguf --type $type
    ok "run $type" "" "$LLM" run -m q.gguf -n 4 -q "Hello"
done
for type in q4_K q5_K q6_K; do
    ok "synth $type" "$type" \
        "$LLM" synth --shape dim=256,layers=1,heads=4,kv-heads=2,hidden=512,vocab=600,context=128 \
        --type $type y.gguf
    ok "run synthetic $type" "" "$LLM" run -m y.gguf -n 4 -q "Hello"
    ok "info of $type" "blk.0.ffn_down.weight +$type +512 x 256, .* bits each" \
        "$LLM" info y.gguf --tensors
    ok "quantize from $type" "f16" "$LLM" quantize y.gguf q.gguf --type f16
    ok "run the result of $type" "" "$LLM" run -m q.gguf -n 4 -q "Hello"
    ok "quantize back to $type" "$type" "$LLM" quantize q.gguf z.gguf --type $type
done
ok "synth, width not a multiple of 256" \
    "note: 16 of the matrices have rows that are not whole blocks of 256 values, .*" \
    "$LLM" synth --shape $SHAPE --type q4_K y.gguf
ok "info of the synthetic model" "blk.0.ffn_down.weight +q5_0 +96 x 64" \
    "$LLM" info y.gguf --tensors
ok "run the synthetic model" "" "$LLM" run -m y.gguf -n 4 -q "Hello"
ok "synth, width not a multiple of 32" "token_embd.weight, with rows of 40, is f16" \
    "$LLM" synth --shape dim=40,layers=1,heads=4,kv-heads=2,hidden=64,vocab=300 --type q4_0 y.gguf
ok "run the synthetic f16 model" "" "$LLM" run -m y.gguf -n 4 -q "Hello"
bad "quantize to an unknown type" 2 "type needs one of the types f32, .*q4_K_M, .*, not 'q5_9'" \
    "$LLM" quantize "$M" q.gguf --type q5_9
for type in f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0; do
    ok "quantize to $type" "q.gguf: .* before" "$LLM" quantize "$M" q.gguf --type $type
    ok "run $type" "" "$LLM" run -m q.gguf -n 4 -q "Hello"
    ok "synth $type" "$type" "$LLM" synth --shape $SHAPE --type $type --seed 9 y.gguf
    ok "run synthetic $type" "" "$LLM" run -m y.gguf -n 4 -q "Hello"
done
ok "quantize to F16 in capitals" "^ *f16 " "$LLM" quantize "$M" q.gguf --type F16
ok "quantize to Q8_0" "^ *q8_0 " "$LLM" quantize "$M" q.gguf --type Q8_0
cp y.gguf z.gguf
ok "synth again" "" "$LLM" synth --shape $SHAPE --type q4_0 --seed 9 y.gguf
same "synth is seeded" y.gguf z.gguf

# an inflated model computes the same, bit for bit
printf 'Once upon a time there was a king who had a daughter.' >once.txt
ok "synth a model to inflate" "" \
    "$LLM" synth --shape dim=256,layers=2,heads=4,kv-heads=2,hidden=512,vocab=600,context=128 \
    --type f16 small.gguf
for type in f32 f16 q8_0 q4_K q4_0; do
    ok "quantize to $type" "" "$LLM" quantize small.gguf plain.gguf --type $type
    ok "inflate to $type" "large.gguf: 1[0-2].* MiB, computes what small.gguf computes as $type" \
        "$LLM" synth --inflate small.gguf --to 12M --type $type large.gguf
    ok "inflate as it is" "same.gguf: .* computes what plain.gguf computes$" \
        "$LLM" synth --inflate plain.gguf --to 12M same.gguf
    same "... gives the same file" same.gguf large.gguf
    for m in plain large; do
        "$LLM" perplexity -m $m.gguf --json once.txt |
            sed 's/.*"documents"/"documents"/; s/"seconds.*//' >$m.out
        "$LLM" run -m $m.gguf -q -n 16 --temperature 0 Once >>$m.out
    done
    same "... computes the same ($type)" plain.out large.out
done
bad "inflate without a size" 2 "need each other" "$LLM" synth --inflate small.gguf x.gguf
bad "a size without a model" 2 "need each other" "$LLM" synth --shape $SHAPE --to 1M x.gguf
bad "inflate and shape" 2 "exclude each other" \
    "$LLM" synth --inflate small.gguf --to 8M --shape $SHAPE x.gguf
bad "inflate to less" 1 "small.gguf: the model has .* MiB already" \
    "$LLM" synth --inflate small.gguf --to 1K x.gguf
bad "inflate to too much" 1 "too large for this model" \
    "$LLM" synth --inflate small.gguf --to 900000T x.gguf
bad "inflate a folder" 1 "add --type" \
    "$LLM" synth --inflate "$TOP/tests/data/models/llama" --to 8M x.gguf
bad "inflate no model" 1 "once.txt" "$LLM" synth --inflate once.txt --to 8M x.gguf
name="... leaves no file"; status=0
[ -e x.gguf ] || [ -e x.gguf.tmp ] || [ -e x.gguf.small ] && fail "no file" || pass
ok "inflate a folder with a type" "" \
    "$LLM" synth --inflate "$TOP/tests/data/models/llama" --to 8M --type q8_0 x.gguf
ok "run tied" "" "$LLM" run -m tied.gguf -n 4 -q "Hello"
cp "$M" copy.gguf
bad "quantize onto itself" 1 "the same file" "$LLM" quantize copy.gguf copy.gguf --type q8_0
ln -s copy.gguf link.gguf
bad "quantize onto itself by another name" 1 "the same file" "$LLM" quantize copy.gguf link.gguf
same "... leaves it as it was" copy.gguf "$M"
bad "quantize into no directory" 1 "nowhere/q.gguf" "$LLM" quantize "$M" nowhere/q.gguf
bad "synth into no directory" 1 "nowhere/q.gguf" "$LLM" synth --shape $SHAPE nowhere/q.gguf
if [ -e /dev/full ]; then bad "synth onto a device" 1 "not a plain file" \
    "$LLM" synth --shape $SHAPE /dev/full; fi
if [ -f "$TOP/models/tales-q4_0.gguf" ]; then
    name="the bundled model"
    (cd "$TOP" && "$LLM" run -n 3 -q "Once upon a time") >out 2>err </dev/null; status=$?
    judge 0 "" ""
else skip "the bundled model (models/tales-q4_0.gguf is not here)"
fi

# ---- full disk, closed pipe, Ctrl-C -----------------------------------------------------------
if [ -w /dev/full ]; then
    full() { # name, command...
        name="$1 to a full disk"
        shift
        "$@" >/dev/full 2>err </dev/null
        status=$?
        : >out
        judge 1 "cannot write to standard output: No space left on device" ""
    }
    full "--help" "$LLM" --help
    full "--version" "$LLM" --version
    full "run" "$LLM" run -m "$M" -n 5 Hello
    full "run --json" "$LLM" run -m "$M" -n 5 -q --json Hello
    full "info" "$LLM" info "$M"
    full "tokenize" "$LLM" tokenize -m "$M" Hello
    full "perplexity" "$LLM" perplexity -m "$M" text.txt
    full "bench" "$LLM" bench -m "$M" -t 1 -p 2 -g 1 -r 1
    name="run --trace to a full disk"; run "$LLM" run -m "$M" -n 1 -q --trace /dev/full Hello
    judge 1 "^llm: cannot write to /dev/full: No space left on device$" ""
    # the command must end at once
    full "a long run" "$LLM" run -m long.gguf -n 100000 --ignore-end -q Hello
else
    skip "a full disk (no /dev/full)"
fi
for c in synth quantize; do
    name="$c to a full disk"
    arguments="$M d.gguf --type f32"
    [ $c = quantize ] || arguments="--shape $SHAPE --type f32 d.gguf"
    (ulimit -f 64 2>/dev/null && exec "$LLM" $c $arguments) >out 2>err </dev/null
    status=$?
    judge 1 "d.gguf.*(too large|No space)" ""
    name="... leaves no file"
    if [ -e d.gguf ] || [ -e d.gguf.tmp ]; then fail "no d.gguf, no d.gguf.tmp"; else pass; fi
done
closed "--help" "$LLM" --help
closed "run" "$LLM" run -m "$M" -n 5 Hello
closed "a long run" "$LLM" run -m long.gguf -n 100000 --ignore-end Hello
closed "info" "$LLM" info "$M"
closed "tokenize" "$LLM" tokenize -m "$M" -f "$LLM"
closed "bench" "$LLM" bench -m "$M" -t 1 -p 2 -g 1 -r 1
name="standard output is closed"
"$LLM" --version >&- 2>err
status=$?
: >out
judge 1 "cannot write to standard output" ""

if has_terminal; then
    for colour in yes no; do
        name="run on a terminal, colour: $colour"
        [ $colour = yes ] || export NO_COLOR=1
        on_terminal "'$LLM' run -m '$M' -n 5 Hello"
        if LC_ALL=C grep -a -q "$(printf '\033')\[2mHello" out; then seen=yes; else seen=no; fi
        if [ $seen = $colour ]; then judge 0 "" "Hello"; else fail "colour: $colour"; fi
    done
    unset NO_COLOR
else
    skip "a terminal (no script command, or no pseudo-terminals)"
fi
for signal in INT TERM; do
    name="run, stopped by SIG$signal"
    : >out # the background command creates it later
    "$LLM" run -m long.gguf -n 100000 --ignore-end --seed 1 --trace t.json Hello >out \
        2>err </dev/null &
    pid=$! i=0
    while [ "$(wc -c <out)" -lt 50 ] && [ $i -lt 1000 ] &&
        kill -0 $pid 2>/dev/null; do
        sleep 0.02
        i=$((i + 1))
    done
    kill -$signal $pid
    wait $pid
    status=$?
    judge 1 '^\[stopped; [0-9]+ prompt tokens, first token after .*; [0-9]+ tokens at .*seed 1\]$' \
        "^Hello"
    trace "... with a whole trace" t.json decode
done

# ---- --device ---------------------------------------------------------------------------------
bad "abbreviated values are refused" 2 "cache-type needs one of f32.f16, not 'f'" \
    "$LLM" run --cache-type f -m "$M" Hello
bad "run on a device of no kind" 2 'needs one of auto\|cpu\|cuda\|emulated' "$LLM" run --device \
    gpu -m "$M" Hello
"$LLM" run -q --device cpu --temperature 0 -n 4 --ignore-end -m "$M" Hello >expected 2>err \
    </dev/null
run env LLM_EMU_MEMORY=50000000 "$LLM" run -q --device emulated --temperature 0 -n 4 --ignore-end \
    -m "$M" Hello
if grep -q 'built without a device "emulated"' err; then skip \
    "the emulated device (no C++ compiler)"
else
    name="run --device emulated"
    judge 0 "" ""
    same "the emulated device gives the CPU's text" out expected
    run env LLM_EMU_MEMORY=50000000 "$LLM" run --device emulated -n 1 -m "$M" Hello
    name="run --device emulated reports its memory use"
    sizes='.* of weights, .* of cache \([0-9]+ blocks of 16 tokens\), .* of activations, .* free'
    judge 0 "of memory: $sizes" ""
    bad "a device without enough memory" 1 \
        'out of device memory: .* wanted for .* are free|device memory are free' \
        env LLM_EMU_MEMORY=4096 "$LLM" run -q --device emulated -n 1 -m "$M" Hello
fi
run "$LLM" run -q --device cuda -n 1 -m "$M" Hello
name="run --device cuda, with a GPU or with a reason"
if [ "$status" -eq 0 ]; then judge 0 "" ""; else judge 1 \
    'cuda: |built without a device "cuda": it has auto, cpu' ""; fi

end
