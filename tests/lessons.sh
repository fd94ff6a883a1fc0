#!/bin/sh
# tests/lessons.sh: runs every lesson and the ladder. Their text must fit 80 columns and have no
# colour in a pipe; the numbers of their JSON must be consistent; they must draw a picture as SVG
# and as PNG, and some an animation; and wrong arguments must be errors. The sizes are small, but
# the checks apply to any size.
set -u
. "$(dirname "$0")/cli_lib.sh"
if [ ! -f "$TOP/models/tales-q4_0.gguf" ] || [ ! -f "$TOP/models/eval.txt" ]; then
    echo "SKIPPED: the lessons: the bundled models are not there"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
ln -s "$TOP/models" models # where the lessons look for the bundled files first
escape=$(printf '\033')

judge_text() { # check that the last output fits 80 columns and has no escapes (name is set)
    if [ "$status" -ne 0 ] || [ -s err ]; then fail "exit status 0 and nothing on stderr"
    elif LC_ALL=C tr -d '\200-\277' <out |
        awk 'length > 80 { print; bad = 1 } END { exit !bad }' >log; then
        fail "80 columns, not: $(head -n 1 log)"
    elif grep -q "$escape" out; then fail "no colour in a pipe"
    elif [ "$(wc -l <out)" -gt 80 ]; then fail "at most two screens, not $(wc -l <out) lines"
    else pass
    fi
}
judge_picture() { # name, SVG file; and a PNG file of the same name, with two pixels per unit
    name="$1: picture"
    units=$(sed -n 's/.*viewBox="0 0 \(940 [1-9][0-9]*\)".*/\1/p' "$2")
    pixels=$(od -An -tu1 -j18 -N6 "${2%.svg}.png" |
        awk '{ print ($1 * 256 + $2) / 2, ($5 * 256 + $6) / 2 }')
    if [ -z "$units" ] || ! grep -q '^<title>.*</title>$' "$2" || ! grep -q '^</svg>$' "$2"; then
        fail "an SVG file"
    elif [ "$units" != "$pixels" ]; then fail "a PNG file of twice $units, not of $pixels"
    elif [ "$(wc -c <"$2")" -gt 65000 ]; then fail "less than 65 kB, not $(wc -c <"$2")"
    elif [ -n "$python" ] &&
        ! "$python" -c 'import sys, xml.dom.minidom as d; d.parse(sys.argv[1])' "$2" >log 2>&1; then
        fail "XML: $(tail -n 1 log)"
    else pass
    fi
}
judge_page() { # name, HTML file: an animation that needs nothing else, and in Chromium plays
    name="$1: animation"
    frames=$(grep -c '^<svg ' "$2")
    if [ "$(head -n 1 "$2")" != '<!DOCTYPE html>' ] || [ "$frames" -lt 2 ]; then
        fail "an HTML page with frames"
    elif sed 's/xmlns="[^"]*"//g' "$2" | grep -q '//\|@import\|src='; then
        fail "no outside resources"
    elif [ -z "$chromium" ]; then skip "$1: the animation plays (no Chromium)"
    else
        { cat "$2"; echo '<script>play.onclick()</script>'; } >playing.html
        for page in "$2" playing.html; do
            "$chromium" --headless --no-sandbox --disable-gpu --virtual-time-budget=200000 \
                --dump-dom "file://$PWD/$page" 2>log |
                sed -n 's/.*<output>\(.*\)<.output>.*/\1/p; /<svg .*"on"/=' | tr '\n' ' '
        done >shown
        grep -q "^1 of $frames [0-9]* $frames of $frames [0-9]* $" shown || {
            fail "the first frame, then the last of $frames, not $(cat shown)"
            return
        }
        pass
    fi
}
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
holds() { # name, a Python expression of d (the JSON) that must be true
    name=$1
    if [ -z "$python" ]; then skip "$1 (no python3 to read JSON with)"
    elif [ "$status" -ne 0 ]; then fail "exit status 0"
    elif "$python" - out "$2" >log 2>&1 <<'END'
import json, math, sys
def no(x): raise ValueError(x)
d = json.load(open(sys.argv[1], encoding="utf-8"), parse_constant=no)
sys.exit(0 if eval("(" + sys.argv[2] + ")") else 1)
END
    then pass
    else fail "$2 $(tail -n 1 log)"
    fi
}
lesson_text() { # name, options: text with a picture
    what=$1
    shift
    name="$what: text"
    run "$LLM" lesson "$what" --svg "$what.svg" --png "$what.png" "$@"
    judge_text
    judge_picture "$what" "$what.svg"
}
lesson_json() { # name, options
    what=$1
    shift
    run "$LLM" lesson "$what" --json "$@"
    json "$what: JSON"
}
lesson() { # both
    lesson_text "$@"
    lesson_json "$@"
}

# Small models of random weights, for lessons in which the bundled model is slow.
shape=dim=64,layers=2,heads=2,kv-heads=1,head-dim=32,hidden=96,vocab=300,context=256
for type in f16 q4_0; do
    ok "a tiny model in $type" "random weights" \
        "$LLM" synth --shape $shape --type $type tiny-$type.gguf
done

for what in attention batching paged speculation; do
    args=
    [ $what != speculation ] || args='-n 24 --texts 1 --most 1'
    # shellcheck disable=SC2086
    run "$LLM" lesson $what $args --html $what.html
    judge_text
    judge_page $what $what.html
done
bad "an animation into a folder" 1 "not a plain file" "$LLM" lesson paged --html .
bad "an animation of what has no steps" 2 "unknown option" "$LLM" lesson kv --html kv.html
ok "the list" "lesson speculation" "$LLM" lesson
for what in memory roofline program kv attention int4 prefill batching paged prefix speculation \
    kernel step tokens sampling cpu serving block weights; do
    name="the list names $what"
    if grep -q "llm lesson $what " out; then pass; else fail "its name"; fi
done

lesson memory --bandwidth 100 --price 2
holds "memory: the cache per token is 2 x layers x kv heads x head size x bytes" \
    'd["cache_bytes_per_token"] == 2*8*2*64*2'
holds "memory: the weights' sum is the total" \
    'sum(r["bytes"] for r in d["weights"][:-1]) == d["weights"][-1]["bytes"]
     and d["weights"][-1]["values"] == 7344384'
holds "memory: MHA needs heads / kv heads times this model's cache; MQA the least" \
    '[r["bytes_per_token"] for r in d["heads"][:3]] == [8192, 4096, 2048]'
holds "memory: a latent cache of 4.5 x head size; the model's context length" \
    'd["heads"][3]["bytes_per_token"] == 4.5*64*8*2
     and all(r["context_mib"] * 2**20 == r["bytes_per_token"] * 1024 for r in d["heads"])'
holds "memory: sizes follow from the shape; no token is faster than its bytes allow" \
    'all(abs(r["f16_gib"]*2**30 / (2*r["parameters"]) - 1) < 1e-9 and 0.56 < r["q4_0_gib"]*2**30 /
         r["parameters"] < 0.8 and r["tokens_that_fit"] == math.floor((24*2**30 -
         r["q4_0_gib"]*2**30) / r["cache_bytes_per_token"]) and 0.7 < 100e9 /
         r["tokens_per_second"] / (r["q4_0_gib"]*2**30) < 1 + 1e-9 for r in d["shapes"])'
holds "memory: the bundled model is as large as its shape says" \
    'abs(d["shapes"][0]["q4_0_gib"] * 2**30 - d["weights"][-1]["bytes"]) < 1'
holds "memory: 512 KiB a token for Llama 2 7B, 128 for Llama 3.1 8B; activations fit" \
    '(lambda s: s["llama-2-7b"] == 524288 and s["llama-3.1-8b"] == 131072)({r["shape"]:
         r["cache_bytes_per_token"] for r in d["shapes"]}) and 0 < d["activation_bytes"] < 2**26'
holds "memory: well-known sizes" \
    'abs(next(r for r in d["shapes"] if r["shape"] == "llama-2-7b")["parameters"] / 6738415616 - 1)
         < 1e-3
     and abs(next(r for r in d["shapes"] if r["shape"] == "llama-3.1-8b")["parameters"] /
         8030261248 - 1) < 1e-3'
holds "memory: cost = price / rate" \
    'all(abs(r["dollars_per_million"] * r["tokens_per_second"] * 3600 / 1e6 - 2) < 1e-6 for r in
         d["shapes"])'

lesson step
holds "step: the bytes of Llama 3.1 8B in q4_0; fewer launches; the times add up" \
    '4.6e9 < d["bytes"] < 5e9 and d["n_launches"] < 0.7 * d["n_launches_apart"]
     and d["bytes"] / 4300e9 * 1e6 < d["microseconds"] < d["microseconds_apart"]
     and abs(sum(r["share"] for r in d["launches"]) - 100) < 1e-6'
bad "step: no such shape" 1 "there is no shape" "$LLM" lesson step --shape nothing

lesson block --text 1000
holds "block: RoPE: a score depends on the distance only" \
    'len(d["rope"]) == 7 and all(abs(r[k] - r["near"]) < 1e-3 for r in d["rope"] for k in
         ("far", "farther")) and abs(d["rope"][0]["near"] - d["rope"][6]["near"]) > 1e-3'
holds "block: no part can be left out of all layers; the model itself is in every figure" \
    'len(d["parts"]) == 7 and all(r["bits"] > d["parts"][0]["bits"] + 0.3 for r in d["parts"][1:])
     and len(d["layers"]) == 8 and all(1 < r[k] < d["parts"][2]["bits"] for r in d["layers"]
         for k in ("attention", "feed_forward"))'
holds "block: a rotation changes no length; the blocks add to x" \
    '(lambda r: abs(r["attn_q"] - r["rope_store"]) < 1e-5 and r["embed"] < r["ffn_down"])(
         {r["operation"]: r["rms"] for r in d["layer"]})'
bad "block: a model with other parts" 1 "layers with RMSNorm" "$LLM" lesson block \
    -m "$TOP/tests/data/models/bloom.gguf"

lesson weights
holds "weights: a bell curve's kurtosis and tails; ffn_down is smaller, as it has more inputs" \
    '(lambda r: all(2.9 < r[n]["kurtosis"] < 4 and 0.2 < r[n]["far"] < 0.6 for n in r
         if "norm" not in n) and r["ffn_down"]["rms"] < 0.8 * r["ffn_up"]["rms"])(
         {r["tensor"]: r for r in d["tensors"]})'
holds "weights: the larger the group, the larger the error; a group of 32 has about 10 %" \
    'len(d["errors"]) == 7 and all(r["g8"] < r["g16"] < r["g32"] < r["g64"] < r["g256"] <= r["row"]
         < r["all"] and 9 < r["g32"] < 11 for r in d["errors"])'
bad "weights: no such layer" 1 "layers 0 to 7" "$LLM" lesson weights --layer 8

lesson kv -n 24 -p 5
holds "kv: the same tokens" 'd["same_tokens"] == 1'
holds "kv: quadratic and linear work" \
    'all(r["computed_without"] == r["tokens"]*5 + r["tokens"]*(r["tokens"]-1)/2 and
         r["computed_with"] == 5 + r["tokens"] - 1 for r in d["tokens"]) and len(d["tokens"]) == 24'

holds "kv: times increase" \
    'all(a["milliseconds_"+w] <= b["milliseconds_"+w] for a, b in zip(d["tokens"], d["tokens"][1:])
         for w in ("with", "without"))'

lesson attention --prompt 150
holds "attention: weights sum to 1" 'abs(d["weights_sum"] - 1) < 1e-9 and d["positions"] == 150'
holds "attention: the steps and both kernels equal the exact result" \
    'd["walk_error"] < 1e-5 and all(r["error"] < 1e-5 for r in d["forms"][1:])'
holds "attention: tiles cover the positions" \
    '[(r["first"], r["last"]) for r in d["tiles"]] == [(0, 63), (64, 127), (128, 149)]'
holds "attention: the largest score never falls, shrink is at most 1" \
    'all(a["largest"] <= b["largest"] and b["shrink"] <= 1 for a, b in zip(d["tiles"],
         d["tiles"][1:]))'
holds "attention: tiles read less, and need no n x n" \
    'd["forms"][2]["kv_bytes"] < d["forms"][1]["kv_bytes"] == 150*151/2*4*2*64*2
     and d["forms"][0]["score_bytes"] == 150*150*4*4'

holds "attention: the steps end at the result; the sum includes the largest share" \
    'd["tiles"][-1]["distance"] == d["walk_error"] and all(r["sum"] >= 1 for r in d["tiles"])
     and all(r["milliseconds"] > 0 for r in d["forms"][1:])'

lesson_text int4 -m tiny-f16.gguf --text 300
lesson_json int4 --text 300
holds "int4: the error is at most half a scale, or one scale at the clipped end" \
    'd["worst"] <= abs(d["scale"]) * 1.001
     and all(0 <= r["low_q"] <= 15 and 0 <= r["high_q"] <= 15 and abs(r["low_back"] -
         d["scale"]*(r["low_q"]-8)) < 1e-6 for r in d["group"])'
holds "int4: the histogram counts all weights" 'sum(r["count"] for r in d["histogram"]) == 768*256'
holds "int4: fewer bits, fewer bytes, more error" \
    '(lambda t: t["f16"]["step_mib"] > t["q8_0"]["step_mib"] > t["q4_0"]["step_mib"] and
         t["f16"]["error_percent"] == 0 < t["q8_0"]["error_percent"] < t["q4_0"]["error_percent"] <
         15)({r["type"]: r for r in d["types"]})'
holds "int4: q4_1, q4_K and more bits have less error than q4_0; no type is larger than f16" \
    '(lambda t: t["q4_1"]["error_percent"] < t["q4_0"]["error_percent"] and
         t["q4_K"]["error_percent"] < t["q4_0"]["error_percent"] > t["q5_0"]["error_percent"] >
         t["q6_K"]["error_percent"] and all(r["tokens_per_second"] > 0 and r["step_mib"] <=
         t["f16"]["step_mib"] for r in d["types"]))({r["type"]: r for r in d["types"]})'
holds "int4: perplexity = 2^(bits), in the same order" \
    'all(1 < r["bits_per_byte"] < 2 for r in d["types"])
     and sorted(r["bits_per_byte"] for r in d["types"]) == [r["bits_per_byte"] for r in
         sorted(d["types"], key=lambda r: r["perplexity"])]'

lesson prefill -p 1,8,64 -n 4 --runs 1
holds "prefill: a longer prompt does more operations per byte" \
    'd["prompts"][0]["prefill_intensity"] < d["prompts"][1]["prefill_intensity"] <
         d["prompts"][2]["prefill_intensity"]
     and d["prompts"][2]["prefill_intensity"] > 20 * d["prompts"][2]["decode_intensity"]'
holds "prefill: rates and times agree" \
    'all(abs(r["prefill_tokens_per_second"] * r["ttft_ms"] / 1e3 / r["prompt"] - 1) < 1e-6 and
         abs(r["decode_tokens_per_second"] * r["tpot_ms"] / 1e3 - 1) < 1e-6 for r in d["prompts"])'

lesson_text roofline -m tiny-f16.gguf
lesson_json roofline
holds "roofline: more tokens per step, more operations per byte; shares are consistent" \
    '(lambda rows: all(a["intensity"] < b["intensity"] for a, b in zip(rows, rows[1:]) if a["what"]
         == b["what"]) and all(abs(r["share_percent"] * r["predicted"] / r["measured"] / 100 - 1) <
         1e-6 for r in rows) and [r["tokens"] for r in rows] == [1, 2, 4, 8, 16, 32, 16, 64,
         256])(d["rows"])'
holds "roofline: predictions are the lower of two limits" \
    'all(r["predicted"] > 0 and r["measured"] > 0 and (r["bound"] == "bytes") == (r["intensity"] *
         (d["cached_bytes_per_second"] if d["weights_fit_the_cache"] else
         d["memory_bytes_per_second"]) < d["peak_operations_per_second"]) for r in d["rows"])'

lesson_text program -m tiny-f16.gguf -t 2
lesson_json program -t 2
holds "program: a layer is 12 operations; each is timed, and the logits" \
    'd["n_operations"] == 5 + 8 * 12 and len(d["program"]) == 5 + 12 and len(d["operations"]) == 13
     and all(r["one_us"] > 0 and r["many_us"] > 0 for r in d["operations"])'
holds "program: more tokens, more operations per byte of a matmul; not of elementwise operations" \
    '(lambda r: all(r[k]["many_intensity"] > 10 * r[k]["one_intensity"] for k in ("attn_q",
         "ffn_down", "attention")) and all(r[k]["many_intensity"] < 1 for k in ("swiglu",
         "rope_store", "attn_norm")))({r["operation"]: r for r in d["operations"]})'
holds "program: bytes are the limit left of the roofline's ridge" \
    'all((r[n + "_limit"] == "bytes") == (r[n + "_intensity"] < d["operations_per_second"] /
         d["bytes_per_second"]) for r in d["operations"] for n in ("one", "many"))'
holds "program: a matmul of 256 x 256 in q4_0 has 36 KiB of weights, 1 KiB in, 1 KiB out" \
    '{r["operation"]: r for r in d["operations"]}["attn_q"]["one_kib"] == 38'
holds "program: fusions save barriers and change no bits" \
    'd["same_bits"] == 1 and len(d["fusions"]) == 6
     and all(d["fusions"][0][k] <= r[k] <= d["fusions"][5][k] for r in d["fusions"] for k in
         ("one_barriers", "many_barriers"))
     and d["fusions"][0]["one_barriers"] < d["fusions"][5]["one_barriers"]'

lesson batching --requests 16 --gen 2-20
holds "batching: the same tokens under all policies" 'd["same_tokens"] == 1'
holds "batching: continuous batching has no idle slot while a request waits" \
    'd["policies"][0]["idle_while_waiting"] == 0
     and all(t["running"] == d["slots"] or t["waiting"] == 0 for t in d["trace_continuous"])'
holds "batching: static batching has idle slots and takes longer" \
    'd["policies"][1]["idle_while_waiting"] > 0
     and d["policies"][0]["ticks"] < d["policies"][1]["ticks"]'
holds "batching: busy slots are tokens; waiting time < latency <= the worst latency" \
    'all(abs(p["busy_percent"] * p["ticks"] * d["slots"] / 100 - sum(t["running"] for t in
         d["trace_" + p["policy"]])) < 1e-6 and p["ticks"] == len(d["trace_" + p["policy"]]) and
         p["mean_wait_ticks"] < p["mean_latency_ticks"] <= p["worst_latency_ticks"] for p in
         d["policies"])
     and d["policies"][0]["busy_percent"] == max(p["busy_percent"] for p in d["policies"])'
holds "batching: groups compute padding, which continuous batching does not" \
    'd["policies"][0]["padding"] == 0 < d["policies"][1]["padding"]
     and all(p["padding"] == sum(t["padding"] for t in d["trace_" + p["policy"]]) for p in
         d["policies"])'
holds "batching: never more sequences than slots" \
    'all(t["running"] + t["padding"] <= d["slots"] for k in ("continuous", "static", "dynamic") for
         t in d["trace_" + k])'
holds "batching: all policies generate the same number of tokens" \
    'len({sum(t["running"] for t in d["trace_" + k]) for k in ("continuous", "static", "dynamic")})
         == 1'

lesson paged
holds "paged: used and free blocks add up; references are table entries" \
    'all(s["used"] + s["free"] == 28 and s["references"] == s["table_entries"] and s["kept"] <=
         s["free"] and s["shared"] <= s["used"] for s in d["steps"])'
holds "paged: no token without a slot; less than a block wasted per sequence" \
    'all(s["tokens"] <= s["slots"] and s["slots"] - s["tokens"] <= s["sequences"] * d["block_size"]
         for s in d["steps"])'
holds "paged: two of three samples copy the last block of their prompt, one keeps it" \
    'd["blocks_copied"] == 2'
holds "paged: a prompt with a shared prefix finds whole blocks; all blocks are free at the end" \
    'd["prefix_hits"] == 16 and d["steps"][-1]["used"] == 0'
holds "paged: less waste than whole contexts" 'd["waste_paged"] < d["waste_contiguous"]'

lesson prefix --shared 100 --requests 3
holds "prefix: the same tokens; whole blocks of the shared prefix are found" \
    'd["same_tokens"] == 1 and [r["found"] for r in d["requests"]] == [0, 96, 96]'
holds "prefix: shared blocks are in memory once" \
    'd["blocks_shared"] == 6 and d["blocks_used"] == d["blocks_used_without"] - 2 * 6'

holds "prefix: a prompt's last token is always computed; the number of blocks is exact" \
    'd["block_size"] == 16
     and all(r["prompt"] == 112 and r["found"] <= r["prompt"] - 1 for r in d["requests"])
     and d["blocks_used_without"] == d["blocks_separate"] == 3 * math.ceil((112 + 7) / 16)'

lesson speculation --texts 2 -n 24 --most 3 --inflate 12M
holds "speculation: the same tokens at every depth" \
    'all(r["same_tokens"] == 1 for r in d["depths"]) and d["depths"][0]["tokens_per_step"] == 1'
holds "speculation: the inflated target takes the same steps" \
    '[(r["accepted_percent"], r["tokens_per_step"]) for r in d["depths"]] ==
     [(r["accepted_percent"], r["tokens_per_step"]) for r in d["inflated"]]'
holds "speculation: at the acceptance that breaks even, the formula gives the cost" \
    'all(abs((1 - (r["break_even_percent"]/100)**(r["depth"]+1)) / (1 -
         r["break_even_percent"]/100) - r["cost"]) < 1e-6 if r["break_even_percent"] else
         r["cost"] > r["depth"] + 1 - 1e-6 for r in d["depths"][1:] + d["inflated"][1:] if r["cost"] > 1)'
holds "speculation: the formula" \
    'all(abs(r["formula"] - (1 - (r["accepted_percent"]/100)**(r["depth"]+1)) / (1 -
         r["accepted_percent"]/100)) < 1e-9 for r in d["depths"][1:])'
holds "speculation: a proposal is checked only if those before it were accepted" \
    'all(abs(b["tested"] - a["tested"] * a["accepted_percent"] / 100) <= 4 and b["tested"] <=
         a["tested"] * a["accepted_percent"] / 100 + 1e-6 for a, b in zip(d["positions"],
         d["positions"][1:]))'

holds "speculation: a step gives 1 to K + 1 tokens: the accepted ones and its own" \
    'all(1 <= r["tokens_per_step"] <= r["depth"] + 1 for r in d["depths"])
     and abs(48 / d["depths"][3]["tokens_per_step"] + sum(p["tested"] * p["accepted_percent"] / 100
         for p in d["positions"]) - 48) < 1e-6'

lesson tokens
holds "tokens: merging by hand equals the engine; each step has one piece less" \
    'd["same_as_the_engine"] == 1
     and all(a["pieces"] == b["pieces"] + 1 and a["rank"] for a, b in zip(d["steps"],
         d["steps"][1:])) and d["steps"][-1]["rank"] is None'
holds "tokens: all texts are restored; at least one byte per token" \
    'all(r["back"] == "same" and r["bytes_per_token"] >= 1 and abs(r["bytes_per_token"] *
         r["tokens"] / r["bytes"] - 1) < 1e-6 and r["half"] <= r["different"] <= d["vocabulary"]
         for r in d["texts"])'
for word in " unbelievable" "x" " Fischer" "12345"; do
    run "$LLM" lesson tokens --json --word "$word"
    holds "tokens: '$word' by hand" 'd["same_as_the_engine"] == 1'
done

lesson sampling --draws 2000
holds "sampling: each setting gives a distribution, and draws follow it" \
    'all(abs(r["sum"] - 1) < 1e-4 and r["distance"] <= r["chance"] for r in d["settings"])'
holds "sampling: temperature and filters order the entropy" \
    '(lambda e: e["greedy (T 0)"] == 0 < e["T 0.5"] < e["T 1"] < e["T 1.5"] and
         max(e["T 1, top-k 5"], e["T 1, top-p 0.9"], e["T 1, min-p 0.1"]) <
         e["T 1"])({r["setting"]: r["entropy"] for r in d["settings"]})'
holds "sampling: probabilities are exp(logit / temperature), normalized" \
    '(lambda t: all(abs(math.log(a["one"] / b["one"]) - (a["logit"] - b["logit"])) < 1e-3 and
         abs(math.log(a["hot"] / b["hot"]) - (a["logit"] - b["logit"]) / 1.5) < 1e-3 for a, b in
         zip(t, t[1:])))(d["tokens"])'
holds "sampling: top-k keeps k" \
    'next(r for r in d["settings"] if "top-k" in r["setting"])["kept"] == 5'


lesson_text cpu --rows 80 --cols 128 --milliseconds 1
lesson_json cpu --rows 80 --cols 128 --milliseconds 1
holds "cpu: every kernel is near the plain loop; floats nearer than int8" \
    '(lambda t: len(t) >= 4 and t[0]["error_percent"] == 0 and all((r["error_percent"] < 0.1) ==
         ("f16" in r["rung"]) for r in t[1:]) and all(r["error_percent"] < 2 for r in
         t))(d["rungs"])'
holds "cpu: the same bits row by row, in one pass, and with threads" \
    'd["same_row_by_row"] == 1 and d["same_with_threads"] == 1'
run "$LLM" lesson cpu --rows 80 --cols 128 --milliseconds 1 --isa plain --json
holds "cpu: --isa excludes instruction sets" \
    '[r["rung"][2:22] for r in d["rungs"]][:3] == ["plain loop", "vectors, f16 weights",
         "int8 values, plain C"] and len(d["rungs"]) == 4'
run "$LLM" lesson cpu --rows 80 --cols 128 --milliseconds 1 --isa reference --json
holds "cpu: only the plain loop" 'len(d["rungs"]) == 1 and d["same_with_threads"] == 1'
bad "cpu: no such type" 1 "no type 'q4_X'" "$LLM" lesson cpu --type q4_X
bad "cpu: no whole blocks" 1 "100 columns are not a multiple of 32" "$LLM" lesson cpu --cols 100
bad "cpu: on another device" 1 "is about the CPU" "$LLM" lesson cpu --device emulated

lesson_text serving -m tiny-f16.gguf --requests 20
lesson_json serving --requests 60 -p 4-16 -g 4-16 --long 100 --max-sequences 4
holds "serving: the rates are shares of the capacity, the fastest closed loop or more" \
    'all(abs(r["offered"] * 100 / d["capacity"] / r["load_percent"] - 1) < 1e-6 for r in d["open"])
     and d["capacity"] >= max(r["requests_per_second"] for r in d["closed"])'
holds "serving: goodput is at most throughput; p50 is at most p99; tokens per request" \
    'all(r["goodput"] <= r["requests_per_second"] * 1.000001 for r in d["open"])
     and all(r[k + "_p50_ms"] <= r[k + "_p99_ms"] for k in ("ttft", "tpot") for t in ("open",
         "closed", "chunks") for r in d[t])
     and all(4 <= r["tokens_per_second"] / r["requests_per_second"] <= 16 for t in ("open",
         "closed") for r in d[t])'
holds "serving: 32 clients wait for 4 sequences" \
    '(lambda c: c[32]["ttft_p50_ms"] > 2 * c[1]["ttft_p50_ms"])({r["clients"]: r for r in
         d["closed"]})'
holds "serving: no answer is in flight longer than the run" \
    'all(0 < r["in_flight"] <= 60 for r in d["open"]) and len(d["chunks"]) == 4'
bad "serving: a prompt longer than the context" 1 "do not fit" "$LLM" lesson serving -p 2000
bad "serving: an answer longer than the context" 1 "do not fit" "$LLM" lesson serving -g 2-2000

name="kernel: no such kernel"
run "$LLM" lesson kernel -m tiny-q4_0.gguf --kernel cooking
if grep -q 'built without the emulated device' err; then
    skip "lesson kernel (built without g++)"
else
    if [ "$status" -eq 1 ] && grep -q "launches no kernel named 'cooking'; it launches embed" \
        err; then pass
    else fail "an error that names the kernels"; fi
    lesson_text kernel -m tiny-q4_0.gguf
    lesson_json kernel
    holds "kernel: all results are right" 'all(r["right"] == 1 for r in d["pairs"])'
    holds "kernel: a row per thread touches a sector for each lane, a row per warp 4" \
        '(lambda p: [p[0]["sectors_per_load"], p[1]["sectors_per_load"], p[2]["sectors_per_store"],
             p[3]["sectors_per_store"]] == [32, 4, 32, 4])(d["pairs"])'
    holds "kernel: a row per warp moves each byte once, and 128 sums of a sector each" \
        'd["pairs"][1]["moved_kib"] == 128 + 128 * 32 / 1024
         and d["pairs"][0]["moved_kib"] == 8 * 128 + 0.5'
    holds "kernel: pitch 32 reads the tile in 32 passes for each warp, pitch 33 in one" \
        '(lambda a, b: a["shared_passes"] == 1024 + 32 * 1024 and b["shared_passes"] ==
             b["shared_least"] == 2048)(d["pairs"][3], d["pairs"][4])'
    holds "kernel: no kernel uses more bytes than it moves, or needs fewer passes than possible" \
        'all(r["used_kib"] <= r["moved_kib"] for r in d["step"])
         and all(r["shared_passes"] is None or r["shared_passes"] >= r["shared_least"] > 0 for r in
             d["step"])'
    holds "kernel: attention has no bank conflict" \
        'all(r["shared_passes"] == r["shared_least"] for r in d["step"] if r["kernel"] ==
             "attention")'
    holds "kernel: rmsnorm runs twice per layer and once at the end, and reads its row once" \
        '(lambda r: r["runs"] == 2 * 8 + 1)(next(r for r in d["step"] if r["kernel"] == "rmsnorm"))
         and (lambda t: t[0]["sectors"] == 256 * 4 / 32 and t[0]["memory"] == "activations" and
             t[-1]["sectors"] == 32 and t[-1]["kind"] == "store")(d["one"])'
    # 256 columns: each of four segments has a chunk (with fewer, segments share chunks)
    "$LLM" synth --shape dim=256,layers=1,heads=4,kv-heads=1,hidden=256,vocab=300,context=64 \
        --type q4_0 wide-q4_0.gguf >/dev/null 2>&1
    run "$LLM" lesson kernel -m wide-q4_0.gguf --json --kernel matmul_one
    holds "kernel: the matmul of q reads each weight once" \
        'sum(r["sectors"] for r in d["one"] if r["memory"] == "weights" and r["kind"] == "load") *
             32 == 256 * 256 * 18 / 32'
    run "$LLM" lesson kernel -m tiny-q4_0.gguf --json --plain-kernels --kernel plain_matmul
    holds "kernel: the plain kernel moves more: it reads x for each row, and scales one by one" \
        '(lambda r: r["moved_kib"] > r["used_kib"])(next(r for r in d["step"] if r["kernel"]
             == "plain_matmul"))
         and (lambda n: n("activations", 4) > n("weights", 16) > n("weights", 8) > 0)(
             lambda memory, bytes: sum(r["sectors"] for r in d["one"] if r["memory"] == memory and
                 r["bytes"] == bytes and r["kind"] == "load"))
         and next(r for r in d["one"] if r["memory"] == "weights" and r["bytes"] ==
             8)["used_percent"] == 25'
    name="kernel ladder: text"
    run "$LLM" lesson kernel --ladder --rows 40 --cols 1056 --device emulated \
        --svg ladder.svg --png ladder.png
    judge_text
    judge_picture "kernel ladder" ladder.svg
    run "$LLM" lesson kernel --ladder --device emulated --json
    json "kernel ladder: JSON"
    holds "kernel ladder: every version is near the plain loop" \
        'len(d["work"]) == len(d["memory"]) == 7 and all(r["error"] < 1e-3 for r in d["work"])'
    holds "kernel ladder: packed weights move once; files' bytes move several times" \
        '[r["weights_kib"] == d["weights_kib"] for r in d["memory"]] == [False] * 2 + [True] * 5
         and d["memory"][0]["weights_kib"] > 8 * d["memory"][1]["weights_kib"] > 24 * 288'
    holds "kernel ladder: tiles share x: an eighth of a sector per row and 8 columns" \
        'all(r["x_kib"] == 128 / 16 * 4096 * 2 / 1024 and r["full_percent"] == 100 for r in
             d["memory"][4:])'
    holds "kernel ladder: 5 operations per weight at first; then a matrix product per 256 weights" \
        'all(r["arithmetic"] * 288 >= 128 * 4096 / 32 * 5 for r in d["work"][:3])
         and all(abs(r["warp_operations"] * 288 - 128 * 4096 / 256) < 1 for r in d["work"][4:])'
    holds "kernel ladder: bytes ahead; the split has a barrier per block, and no bank conflict" \
        '[(r["warps"], r["ahead"]) for r in d["work"][4:]] == [(8, 576), (8, 2304), (64, 2304)]
         and (lambda r: r["barriers"] == 8 and r["passes"] == r["least"])(d["memory"][6])'
    bad "kernel ladder: on the CPU" 1 "need the emulated device" "$LLM" lesson kernel --ladder \
        --device cpu
    bad "kernel ladder: no whole blocks" 1 "33 columns are not a multiple of 32" \
        "$LLM" lesson kernel --ladder --cols 33
    bad "kernel: --rows alone" 2 "need --ladder" "$LLM" lesson kernel --rows 16
    bad "kernel: on the CPU" 1 "need the emulated device" "$LLM" lesson kernel --device cpu
    bad "kernel: on a GPU" 1 "need the emulated device" "$LLM" lesson kernel --device cuda
fi

name="ladder: text"
run "$LLM" ladder -m tiny-f16.gguf -n 8 --text 400 --svg ladder.svg --png ladder.png
judge_text
judge_picture ladder ladder.svg
run "$LLM" ladder -n 8 --requests 6 --text 400 --inflate 12M --json
holds "ladder: each rung gives the previous rung's tokens, except int4" \
    'len(d["rungs"]) == 12 and [r["tokens"] for r in d["rungs"]].count("same") == 10
     and d["rungs"][5]["tokens"].startswith("bits ")'
holds "ladder: factors, total and rates agree; the same cache on all rungs" \
    'all(abs(b[k + "_times"] * a[k + "_tokens_per_second"] / b[k + "_tokens_per_second"] - 1) <
         1e-6 for a, b in zip(d["rungs"], d["rungs"][1:]) if b["one_times"]
         for k in ("one", "many"))
     and [r["one_times"] is None for r in d["rungs"]] == [i in (0, 10) for i in range(12)]
     and all(abs(d["total_" + k] * d["rungs"][0][k + "_tokens_per_second"] / d["rungs"][9][k +
         "_tokens_per_second"] - 1) < 1e-6 for k in ("one", "many"))
     and len({r["memory_mib"] for r in d["rungs"][:5]}) == 1'
holds "ladder: int4 needs less memory" 'd["rungs"][5]["memory_mib"] < d["rungs"][4]["memory_mib"]'

# The same checks on the emulated device, with a tiny model of random weights.
if ! "$LLM" run -m tiny-f16.gguf --device emulated -n 1 x 2>&1 | grep -q 'built without'; then
    emulated() { # lesson, options: JSON on that device
        what=$1
        shift
        name="$what on the emulated device"
        run "$LLM" lesson "$what" -m tiny-f16.gguf --device emulated --trust-gpu --json "$@"
        json "$what on the emulated device: JSON"
    }
    emulated kv -n 6 -p 4
    holds "emulated: kv: the same tokens, linear and quadratic work" \
        'd["same_tokens"] == 1
         and [(r["computed_without"], r["computed_with"]) for r in d["tokens"]] == [(4*n +
             n*(n-1)/2, 3 + n) for n in range(1, 7)]'
    emulated attention --prompt 80 --layer 1
    holds "emulated: attention: tiles equal the exact result" \
        'abs(d["weights_sum"] - 1) < 1e-9 and d["walk_error"] < 1e-5
         and all(r["error"] < 2e-3 for r in d["forms"][1:])
         and [(r["first"], r["last"]) for r in d["tiles"]] == [(0, 63), (64, 79)]'
    holds "emulated: attention: the largest score never falls; tiles read less" \
        'all(a["largest"] <= b["largest"] and b["shrink"] <= 1 for a, b in zip(d["tiles"],
             d["tiles"][1:]))
         and d["forms"][2]["kv_bytes"] < d["forms"][1]["kv_bytes"] == 80*81/2*2*2*32*2'
    emulated prefill -p 1,8 -n 2 --runs 1
    holds "emulated: prefill: a longer prompt does more operations per byte" \
        'd["prompts"][0]["prefill_intensity"] < d["prompts"][1]["prefill_intensity"]'
    emulated batching --requests 6 --slots 2 --gen 2-5
    holds "emulated: batching: the same tokens, no idle slot while a request waits" \
        'd["same_tokens"] == 1 and d["policies"][0]["idle_while_waiting"] == 0
         and d["policies"][1]["idle_while_waiting"] > 0
         and all(t["running"] == d["slots"] or t["waiting"] == 0 for t in d["trace_continuous"])
         and len({sum(t["running"] for t in d["trace_" + k]) for k in ("continuous", "static",
             "dynamic")}) == 1'
    emulated paged
    holds "emulated: paged: used and free blocks add up; copies, hits" \
        'all(s["used"] + s["free"] == 28 and s["references"] == s["table_entries"] for s in
             d["steps"]) and d["blocks_copied"] == 2 and d["prefix_hits"] == 16
         and d["steps"][-1]["used"] == 0
         and all(s["tokens"] <= s["slots"] and s["slots"] - s["tokens"] <= s["sequences"] *
             d["block_size"] for s in d["steps"]) and d["waste_paged"] < d["waste_contiguous"]'
    emulated prefix --shared 40 --requests 2
    holds "emulated: prefix: the same tokens; whole blocks are found" \
        'd["same_tokens"] == 1 and [r["found"] for r in d["requests"]] == [0, 32]
         and d["blocks_shared"] == 2 and d["blocks_used"] == d["blocks_used_without"] - 2'
    emulated speculation --lookup --texts 1 -n 32 --most 2
    holds "emulated: speculation: the same tokens at every depth, the formula" \
        'all(r["same_tokens"] == 1 and 1 <= r["tokens_per_step"] <= r["depth"] + 1 for r in
             d["depths"])
         and all(abs(r["formula"] - (1 - (r["accepted_percent"]/100)**(r["depth"]+1)) / (1 -
             r["accepted_percent"]/100)) < 1e-9 for r in d["depths"][1:] if r["accepted_percent"] <
             100)'
    emulated int4 --tensor blk.1.ffn_up.weight --text 100
    holds "emulated: int4: fewer bits, more error" \
        '(lambda t: 0 == t["f16"]["error_percent"] < t["q8_0"]["error_percent"] <
             t["q4_0"]["error_percent"])({r["type"]: r for r in d["types"]})'
    emulated tokens
    holds "emulated: tokens: all texts are restored" 'all(r["back"] == "same" for r in d["texts"])'
    emulated sampling --draws 500
    holds "emulated: sampling: each setting gives a distribution, and draws follow it" \
        'all(abs(r["sum"] - 1) < 1e-4 and r["distance"] <= r["chance"] for r in d["settings"])'
    emulated memory --bandwidth 10
    holds "emulated: memory: 2 x layers x kv heads x head size x bytes; the weights' sum" \
        'd["cache_bytes_per_token"] == 2*2*1*32*2
         and sum(r["bytes"] for r in d["weights"][:-1]) == d["weights"][-1]["bytes"]'
    bad "emulated: program" 1 "no speed to measure" \
        "$LLM" lesson program -m tiny-f16.gguf --device emulated
    bad "emulated: roofline" 1 "no speed to measure" \
        "$LLM" lesson roofline -m tiny-f16.gguf --device emulated
    run "$LLM" ladder -m tiny-f16.gguf --device emulated --trust-gpu -n 4 --requests 2 --text 100 --json
    holds "emulated: ladder: a GPU's rungs, each gives the previous rung's tokens" \
        '[r["rung"] for r in d["rungs"][2:6]] == ["+ tiled kernels", "+ fused kernels",
             "+ split attention", "+ graphs"] and len(d["rungs"]) == 11
         and [r["tokens"] for r in d["rungs"]].count("same") == 9
         and d["rungs"][6]["tokens"].startswith("bits ")'
else
    skip "lessons on the emulated device (built without a C++ compiler)"
fi

# A model of another shape. A lesson that needs the bundled model must report that.
wide=$TOP/tests/data/golden/wide.gguf
ok "another model: memory" "weights" "$LLM" lesson memory -m "$wide" --bandwidth 10
ok "another model: kv" "Both gave the same" "$LLM" lesson kv -m "$wide" -n 8 -p 3
# a Hugging Face folder with a context of 64 tokens and 2 layers: the defaults must shrink
folder=$TOP/tests/data/models/llama
for what in memory program kv attention "int4 --text 300" prefill batching paged prefix \
    "speculation --lookup" tokens sampling "serving --requests 10"; do
    name="a folder with a small context: $what"
    # shellcheck disable=SC2086
    run "$LLM" lesson $what -m "$folder"
    judge_text
done
ok "a folder with a small context: ladder" "paged cache .* same" \
    "$LLM" ladder -m "$folder" --requests 6 --text 200
bad "speculation without a guesser" 1 "--draft FILE, or --lookup" \
    "$LLM" lesson speculation -m "$wide"

bad "no such lesson, with a guess" 2 "did you mean 'paged'" "$LLM" lesson page
bad "no such lesson" 2 "no lesson is named" "$LLM" lesson cooking
bad "a word that is too long" 1 "1 to 24 bytes" \
    "$LLM" lesson tokens --word "a word that is longer than all words"
bad "too few draws" 2 "whole number" "$LLM" lesson sampling --draws 5
bad "an option, no name" 2 "unknown option" "$LLM" lesson --json
bad "an unknown option" 2 "did you mean --json" "$LLM" lesson kv --jsn
bad "an argument too many" 2 "one argument too many" "$LLM" lesson kv 12
bad "no number" 2 "whole number" "$LLM" lesson kv -n many
bad "a picture into a folder" 1 "not a plain file" "$LLM" lesson kv --png .
bad "an SVG picture into a folder" 1 "not a plain file" "$LLM" lesson kv --svg .
bad "no such model" 1 "cannot open" "$LLM" lesson kv -m no.gguf
bad "a prompt longer than the context" 1 "context" "$LLM" lesson kv -p 5000
bad "a text longer than the context: kv" 1 "do not fit the context of 1024" \
    "$LLM" lesson kv -p 1000 -n 25
bad "a text longer than the context: prefill" 1 "do not fit" "$LLM" lesson prefill -p 4,2000
bad "a text longer than the context: batching" 1 "do not fit" "$LLM" lesson batching --gen 2-2000
bad "a text longer than the context: prefix" 1 "do not fit" "$LLM" lesson prefix --shared 1010
bad "a text longer than the context: speculation" 1 "do not fit" \
    "$LLM" lesson speculation --lookup -n 1000
bad "more tokens in a request than the pool has" 1 "of 52 tokens, needs 7" \
    "$LLM" lesson paged --blocks 3
bad "a prompt longer than the context: attention" 1 "context" "$LLM" lesson attention -p 5000
bad "no such head" 1 "heads 0 to 3" "$LLM" lesson attention --head 4
bad "no such group" 1 "groups of 32" "$LLM" lesson int4 --group 1000000
bad "no such layer" 1 "layers 0 to 7" "$LLM" lesson attention --layer 8
bad "no such tensor" 1 "has no tensor" "$LLM" lesson int4 --tensor blk.77.nothing
bad "weights that are int4 already" 1 "are q4_0 already" \
    "$LLM" lesson int4 -m models/tales-q4_0.gguf
bad "a picture where nothing may be written" 1 "cannot write" \
    "$LLM" lesson prefix --shared 20 --requests 1 --svg /nowhere/x.svg
bad "a ladder longer than the context" 1 "do not fit the context of 512" "$LLM" ladder -n 5000

in_terminal() { # lesson, options: run it in a terminal of 80 columns, with colour and without
    TERM=xterm script -qec "stty cols 80; '$LLM' lesson $*" /dev/null >out 2>err </dev/null
    status=$?
    name="$1 in a terminal: colour"
    if grep -q "$escape\[[0-9;]*m" out; then pass; else fail "colour"; fi
    name="$1 in a terminal: 80 columns"
    if sed "s/$escape\[[0-9;]*[mK]//g; s/\r\$//; s/.*\r//" out | LC_ALL=C tr -d '\200-\277' |
        awk 'length > 80 { bad = 1 } END { exit bad }'
    then pass; else fail "80 columns"; fi
    name="$1 in a terminal: NO_COLOR"
    NO_COLOR=1 TERM=xterm script -qec "stty cols 80; '$LLM' lesson $*" /dev/null >out \
        2>err </dev/null
    status=$?
    if grep -q "$escape\[[0-9;]*m" out; then fail "no colour"; else pass; fi
}
if command -v script >/dev/null 2>&1 && script -qec true /dev/null >/dev/null 2>&1; then
    in_terminal prefix --shared 20 --requests 1
    in_terminal speculation --texts 1 -n 16 --most 1 --inflate 0
    in_terminal paged
    in_terminal kv -n 8
else
    skip "lessons in a terminal (no script command)"
fi

line="$passed passed, $failed failed"
[ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
echo "$line"
[ "$failed" -eq 0 ]
