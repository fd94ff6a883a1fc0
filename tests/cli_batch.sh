#!/bin/sh
# tests/cli_batch.sh LLM: tests of llm batch, of speculation in llm run, and of the benchmarks with
# many requests: options, messages, exit statuses, and batches that are killed, stopped, truncated
# or out of disk space. Ends in "N passed, N failed".
set -u
. "$(dirname "$0")/cli_lib.sh"

# ---- models and prompts ------------------------------------------------------------------
ok "a model" "" \
    "$LLM" synth --shape dim=64,layers=2,heads=4,kv-heads=2,hidden=96,vocab=600,context=128 \
    --type f16 s.gguf
ok "a draft" "" \
    "$LLM" synth --shape dim=32,layers=1,heads=2,kv-heads=1,hidden=32,vocab=600,context=128 \
    --type f16 d.gguf
ok "a draft of another vocabulary" "" \
    "$LLM" synth --shape dim=32,layers=1,heads=2,kv-heads=1,hidden=32,vocab=300,context=128 \
    --type f16 v.gguf
M=$T/s.gguf D=$T/d.gguf
i=0
while [ $i -lt 200 ]; do
    echo "{\"prompt\": \"Tale $i of the wolf who\", \"id\": \"p$i\", \"temperature\": $((i % 3))," \
        "\"max_tokens\": $((10 + i % 31)), \"n\": $((1 + i % 2)), \"ignore_end\": true}"
    i=$((i + 1))
done >many.jsonl
batch() { "$LLM" batch -m "$M" -q --no-timings "$@"; }
plain() { sed -e 's/, "ttft_seconds": [0-9.]*, "seconds": [0-9.]*}$/}/'; }

# ---- run: speculation, stop --------------------------------------------------------------
"$LLM" run -m "$M" -q -n 60 --temperature 0 --ignore-end "Hello there" >plain.txt 2>err
for o in "--draft $D" "--draft $D --speculate 1" \
    "--draft $D --speculate=20" "--draft $M --speculate 4" "--lookup" "--lookup --speculate 5" \
    "--speculate 0"; do
    ok "run $o" "" "$LLM" run -m "$M" -q -n 60 --temperature 0 --ignore-end $o "Hello there"
    same "... is the plain text" plain.txt out
done
name="run --draft, statistics"
run "$LLM" run -m "$M" -n 30 --temperature 0 --ignore-end --draft "$M" --speculate 4 "Hello"
judge 0 ' tokens/s; 100 % of [0-9]+ proposals accepted, [45]\.[0-9]+ tokens a step\]$' "^Hello"
ok "run --draft --json" '"accepted": true' \
    "$LLM" run -m "$M" -q -n 30 --ignore-end --draft "$M" --json -s 1 "Hello"
json "run --draft --json is JSON"
ok "run --draft, several samples" "sample 3" \
    "$LLM" run -m "$M" -q -n 20 --samples 3 --draft "$D" -s 3 "Hello"
bad "--speculate without a source of proposals" 2 \
    "needs something to propose tokens: --draft FILE, or --lookup" \
    "$LLM" run -m "$M" --speculate 3 x
bad "--speculate of a word" 2 "speculate needs a whole number from 0 to 64, or auto, not 'some'" \
    "$LLM" run -m "$M" --speculate some x
bad "--speculate -1" 2 "speculate needs a whole number" "$LLM" run -m "$M" --speculate -1 x
bad "--draft and --lookup" 2 "only one of --draft and --lookup" "$LLM" run -m "$M" --draft "$D" \
    --lookup x
bad "a draft of another vocabulary" 1 "^llm: .*vocabular" "$LLM" run -m "$M" --draft v.gguf x
bad "a missing draft" 1 "nowhere.gguf.*No such file" \
    "$LLM" run -m "$M" --draft nowhere.gguf x
word=$(cut -d' ' -f 2 plain.txt | cut -c 1-5)
[ -n "$word" ] || word=e
"$LLM" run -m "$M" -q -n 60 --temperature 0 --ignore-end --stop "@@@" "Hello there" >out 2>err
same "a stop text that never comes" plain.txt out
bad "an empty stop text" 2 "stop needs a text" "$LLM" run -m "$M" --stop "" x
if [ -n "$python" ]; then
    name="run --stop ends before the text" text=$(cat plain.txt)
    "$LLM" run -m "$M" -q --json -n 60 --temperature 0 --ignore-end "Hello there" >whole.json 2>err
    "$python" - "$LLM" "$M" >log 2>err <<'END'
import json, subprocess, sys
whole = json.load(open("whole.json", encoding="utf-8"))["samples"][0]["text"]
pieces = (whole[i:i + 3] for i in range(10, len(whole) - 2))
piece = next(p for p in pieces if all(32 < ord(c) < 127 for c in p))
for more in [], ["--lookup", "--speculate", "4"]:
    command = [sys.argv[1], "run", "-m", sys.argv[2], "--json", "-q", "-n", "60",
               "--temperature", "0", "--ignore-end", "--stop", "@@@", "--stop", piece]
    out = subprocess.run([*command, *more, "Hello there"], stdout=subprocess.PIPE,
                         check=True).stdout
    s = json.loads(out)["samples"][0]
    assert s["finish"] == "stop" and s["text"] == whole[:whole.index(piece)], (s, piece)
END
    status=$?
    if [ $status -eq 0 ]; then pass; else fail "text up to the stop text, finish stop"; fi
fi

# ---- batch: results ----------------------------------------------------------------------
name="batch"; run batch -f many.jsonl -o full.jsonl; judge 0 "" ""
name="one line per prompt"; if [ "$(wc -l <full.jsonl)" -eq 200 ]; then pass
else fail "200 lines"; fi
name="in order"
i=$(sed -n 's/^{"line": \([0-9]*\), "hash": "[0-9a-f]*", "id": "p[0-9]*", "samples": .*/\1/p' \
    full.jsonl | tr '\n' ' ')
if [ "$i" = "$(seq 200 | tr '\n' ' ')" ]; then pass; else fail "line 1 to 200"; fi
for o in "--max-sequences 2" "--max-sequences 64 --max-batch-tokens 7" "--no-prefix-cache" \
    "--trace t.json" \
    "--cache-memory 64K --block-size 4" "--cache-memory 64K --preempt swap --block-size 4" \
    "-t 1 --no-chunked-prefill"; do
    rm -f o.jsonl
    name="batch $o"; run batch -f many.jsonl -o o.jsonl $o; judge 0 "" ""
    same "... gives the same bytes" full.jsonl o.jsonl
done
name="batch from standard input to standard output"; batch -f - <many.jsonl >o.jsonl 2>err
status=$?; : >out; judge 0 "" ""
same "... gives the same bytes" full.jsonl o.jsonl
sed 's/"temperature": [0-9]/"temperature": 0/; s/"prompt"/"prompt"  /' many.jsonl |
    head -40 >greedy.jsonl
rm -f g.jsonl h.jsonl
name="batch, greedy"; run batch -f greedy.jsonl -o g.jsonl; judge 0 "" ""
for o in "--draft $D --speculate 3" "--draft $D" "--draft $M --speculate 8" \
    "--lookup --speculate 2" "--draft $D --speculate 4 --cache-memory 64K --block-size 4"; do
    rm -f h.jsonl
    name="batch, greedy, $o"; run batch -f greedy.jsonl -o h.jsonl $o; judge 0 "" ""
    same "... gives the same bytes" g.jsonl h.jsonl
done
name="batch, sampled speculation"; run batch -f many.jsonl -o - --draft "$D" --speculate 3
judge 0 "" '"line": 200'
bad "batch, a draft of another vocabulary" 1 "vocabular" batch -f many.jsonl --draft v.gguf
name="statistics"; rm -f o.jsonl
run "$LLM" batch -m "$M" -f greedy.jsonl -o o.jsonl --draft "$D" --speculate 2
figures='^\[40 lines; [0-9]+ prompt tokens, [0-9]+ % of them cached; [0-9]+ tokens in [0-9.]+ s = '
figures=$figures'[0-9.]+ tokens/s; .*[0-9]+ % of [0-9]+ proposals accepted, '
figures=$figures'[0-9.]+ tokens a step\]$'
judge 0 "$figures" ""
plain <o.jsonl >p.jsonl
same "timings are all that --no-timings leaves out" g.jsonl p.jsonl
name="batch of nothing"; : >none.jsonl; run batch -f none.jsonl -o -
if [ -s out ]; then fail "nothing"; else judge 0 "" ""; fi
name="blank lines and no last newline"
printf '\n  \n{"prompt": "a", "max_tokens": 2}\r\n\n{"prompt": "b", "max_tokens": 0}' >b.jsonl
run batch -f b.jsonl; judge 0 "" '"line": 5, .*"tokens": \[\], "finish_reason": "length"'

if [ -n "$python" ]; then
    name="batch: contents of a line, and the same output as llm run"
    cat >few.jsonl <<'END'
{"prompt": "Hello there", "seed": 7, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "penalty_window": 9, "n": 3, "max_tokens": 20, "id": {"a": [1, null, "\u00e9]\"["]}}
{"tokens": [0, 5, 9], "temperature": 0, "max_tokens": 8, "ignore_end": true, "priority": 3}
{"prompt": "caf\u00e9 \ud83d\ude00 \"q\"\n", "max_tokens": 6, "lookup": true, "speculate": 2, "stop": ["@@@", "###"]}
END
    batch -f few.jsonl --logprobs >o.jsonl 2>err && "$python" - "$LLM" "$M" >log 2>>err <<'END'
import json, subprocess, sys
def run(*words):
    command = [sys.argv[1], "run", "-m", sys.argv[2], "--json", "-q", *words]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
lines = [json.loads(l) for l in open("o.jsonl", encoding="utf-8")]
alone = run("--seed", "7", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "50",
            "--min-p", "0.01", "--repetition-penalty", "1.1", "--penalty-window", "9",
            "--samples", "3", "-n", "20", "Hello there")
a = lines[0]
assert a["line"] == 1 and a["id"] == {"a": [1, None, '\u00e9]"[']} and a["seed"] == 7
assert a["prompt_tokens"] == len(alone["prompt_tokens"])
for s, t in zip(a["samples"], alone["samples"], strict=True):
    assert s["text"] == t["text"] and s["finish_reason"] == t["finish"]
    assert s["tokens"] == [x["id"] for x in t["tokens"]]
    assert s["logprobs"] == [x["logprob"] for x in t["tokens"]]
b = lines[1]
assert b["prompt_tokens"] == 3 and len(b["samples"][0]["tokens"]) == 8 and b["seed"] == 2
assert "samples" in lines[2]
END
    status=$?
    if [ $status -eq 0 ]; then pass; else fail "the fields of a result"; fi
fi

# ---- batch: bad lines --------------------------------------------------------------------
cat >wrong.jsonl <<'END'
{"prompt": "good", "max_tokens": 2}
not JSON
{"prompt": "x", "temprature": 1}
{"prompt": "x", "n": 0}
{"prompt": "x", "temperature": "hot"}
{"prompt": "x", "temperature": NaN}
{"prompt": "x", "tokens": [1]}
{"max_tokens": 1}
{"prompt": 5}
{"tokens": [1, 2.5]}
{"tokens": [600]}
{"tokens": []}
{"prompt": "x", "prompt": "y"}
{"prompt": "x",}
{"prompt": "x"} {}
{"prompt": "x", "stop": [""]}
{"prompt": "x", "stop": 3}
{"prompt": "x", "speculate": 2}
{"prompt": "x", "speculate": 99}
{"prompt": "x", "n": 17}
{"prompt": "x", "id": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}
{"prompt": "x", "seed": -1}
{"prompt": "x", "lookup": 1}
{"prompt": "x\u00zz"}
["prompt"]
{"prompt": "x", "max_tokens": 01}
{"prompt": "good again", "max_tokens": 2}
END
rm -f o.jsonl
name="bad lines"; run batch -f wrong.jsonl -o o.jsonl
judge 1 "^llm: wrong.jsonl, line 2: not JSON: column 1: 'n' where a value should be" ""
name="exactly the bad lines have messages"
i=$(sed -n 's/^{"line": \([0-9]*\), .*"error": ".*/\1/p' o.jsonl | tr '\n' ' ')
if [ "$i" = "$(seq 2 26 | tr '\n' ' ')" ]; then pass
else fail "errors in lines 2 to 26, not $i"; fi
name="good lines have results"; if [ "$(grep -c '"samples"' o.jsonl)" -eq 2 ]; then pass
else fail "2 results"; fi
name="... with their number on stderr"
if [ "$(grep -c '^llm: wrong.jsonl, line [0-9]*: ' err)" -eq 20 ]; then judge 1 "and so on" ""
else fail "20 lines, then: and so on"; fi
name="a suggestion"; cp err log
judge 1 "line 3: unknown key 'temprature'; did you mean 'temperature'\?" ""
cp o.jsonl p.jsonl
name="bad lines are reported again when nothing is left to do"
run batch -f wrong.jsonl -o o.jsonl; judge 1 "" ""
same "... and not written again" o.jsonl p.jsonl
printf '{"prompt": "\377"}\n{"prompt": "a", "\377": 1}\n' >invalid.jsonl
name="lines that are not UTF-8"; run batch -f invalid.jsonl; judge 1 \
    "line 1: not JSON: column 13: the byte 0xFF is not valid UTF-8" \
    '"error": "not JSON: column 13: the byte 0xFF is not valid UTF-8'
printf \
    '{"prompt": "a", "max_tokens": 3e0, "seed": 1.0e1, "n": 1.0, "ignore_end": true}\n{"prompt": "a", "max_tokens": 1e9, "ignore_end": true}\n' \
    >exponent.jsonl
name="whole numbers with a point or an exponent"; run batch -f exponent.jsonl; judge 0 "" \
    '"line": 1, .*"seed": 10}'
name="... mean the same"; if [ "$(sed -n '1s/.*"tokens": \[\([^]]*\)\].*/\1/p' out | wc -w)" -eq \
    3 ]; then judge 0 "" '"line": 2, .*"finish_reason": "length"'; else fail "3 tokens"; fi
printf '{"prompt": "a", "max_tokens": 2.5}\n' >exponent.jsonl
name="a number that is not whole"; run batch -f exponent.jsonl; judge 1 \
    "line 1: max_tokens needs a whole number from -1 to 2147483647, not 2.5" ""
name="a prompt longer than the context"; awk \
    'BEGIN { printf "{\"prompt\": \""; for (i = 0; i < 500; i++) printf "Q%dZ ", i; print "\"}" }' \
    >longer.jsonl
run batch -f longer.jsonl; judge 1 "line 1: .*context.*128" '"error"'

{ for i in 1 2 3; do cat longer.jsonl; done; head -n 2 many.jsonl; } >unfit.jsonl
name="most lines are too long: a warning before anything else"; run batch -f unfit.jsonl
if head -n 1 err | grep -q \
    '^llm: warning: 3 of the first 5 lines do not fit into the context or the cache'; then judge \
    1 "line 3: --context is 128, and the prompt has [0-9]+ tokens" '"line": 5, .*"samples"'; else \
    fail "the warning, on line 1"; fi
name="... also if the cache is too small"; run batch -f many.jsonl --cache-memory 4K -o -; judge \
    1 "^llm: warning: 200 of the first 200 lines do not fit" ""
{ cat longer.jsonl; head -n 2 many.jsonl; } >unfit.jsonl
name="... and none if most fit"; run batch -f unfit.jsonl; if grep -q warning err; then fail \
    "no warning"; else judge 1 "line 1: --context" ""; fi
rm -f p.jsonl
name="progress in a log"; run env LLM_PROGRESS_SECONDS=0 "$LLM" batch -m "$M" -f many.jsonl -o \
    p.jsonl; judge 0 "^batch: [0-9]+ %, [0-9]+ lines, [0-9.]+ tokens/s$" ""
rm -f p.jsonl
name="... but not with --quiet"; run env LLM_PROGRESS_SECONDS=0 "$LLM" batch -q -m "$M" -f \
    many.jsonl -o p.jsonl; judge 0 "" ""
rm -f p.jsonl
name="... nor in a short run"; run "$LLM" batch -m "$M" -f b.jsonl -o p.jsonl
if [ "$(wc -l <err)" -eq 1 ]; then judge 0 "^\[2 lines; " ""; else fail "one line of figures"; fi

# ---- batch: killed, stopped, torn, changed --------------------------------------------------
rm -f o.jsonl
for lines in 1 60 130; do
    "$LLM" batch -m "$M" -q --no-timings -f many.jsonl -o o.jsonl --max-sequences 4 >out \
        2>err </dev/null &
    pid=$! i=0
    while [ "$(wc -l 2>/dev/null <o.jsonl || echo 0)" -lt $lines ] && [ $i -lt 2000 ] &&
        kill -0 $pid 2>/dev/null; do
        sleep 0.01
        i=$((i + 1))
    done
    kill -9 $pid 2>/dev/null
    wait $pid 2>/dev/null
    cp o.jsonl killed.jsonl
    head -c "$(wc -c <killed.jsonl)" full.jsonl >part
    same "killed after $lines lines: so far right" killed.jsonl part
done
printf '{"line": 201, "ha' >>killed.jsonl
cp killed.jsonl o.jsonl
name="... and continues after a truncated line"; run batch -f many.jsonl -o o.jsonl; judge 0 "" ""
same "... to the same end" full.jsonl o.jsonl
name="nothing left to do"; run batch -f many.jsonl -o o.jsonl; judge 0 "" ""
same "... does nothing" full.jsonl o.jsonl
for cut in 1 2 300 5000; do
    head -c $(($(wc -c <full.jsonl) - cut)) full.jsonl >o.jsonl
    name="without the last $cut bytes"; run batch -f many.jsonl -o o.jsonl; judge 0 "" ""
    same "... they come again" full.jsonl o.jsonl
done
head -n 100 full.jsonl >o.jsonl
cp o.jsonl p.jsonl
sed '50s/wolf/bear/' many.jsonl >changed.jsonl
bad "a changed input" 1 "changed.jsonl, line 50 is not what the result in o.jsonl was made from" \
    batch -f changed.jsonl -o o.jsonl
for o in "--top-k 3" "--temperature 0.5" "--top-p 0.5" "--min-p 0.5" "--repetition-penalty 2" \
    "--penalty-window 3" "-s 5" "-n 7" "-c 100" "--cache-type f32" \
    --ignore-end --special "--stop x"; do
    bad "another option, $o" 1 "many.jsonl, line 1 is not what the result" \
        batch -f many.jsonl -o o.jsonl $o
done
bad "another model" 1 "many.jsonl, line 1 is not what the result" \
    "$LLM" batch -m "$D" -q -f many.jsonl -o o.jsonl
head -n 99 many.jsonl >shorter.jsonl
bad "a shorter input" 1 "o.jsonl has a result for line 100, and shorter.jsonl has no such line" \
    batch -f shorter.jsonl -o o.jsonl
same "... leave the output as it was" o.jsonl p.jsonl
sed '150s/wolf/bear/' many.jsonl >changed.jsonl
name="a change after the last result"; run batch -f changed.jsonl -o o.jsonl; judge 0 "" ""
echo "Dear diary" >diary.txt
bad "an output that is no result file" 1 "diary.txt, line 1 is not a result of llm batch" batch \
    -f many.jsonl -o diary.txt
name="... is unchanged"; if [ "$(cat diary.txt)" = "Dear diary" ]; then pass
else fail "the diary"; fi
bad "input and output are the same" 1 "the same file" batch -f many.jsonl -o ./many.jsonl
bad "no input" 2 "the prompts are missing: -f FILE" batch
bad "a missing input" 1 "cannot read nowhere.jsonl: No such file" batch -f nowhere.jsonl
bad "an input that is a directory" 1 "cannot read .*: Is a directory" batch -f "$T"
bad "an output in no directory" 1 "cannot write to nowhere/o.jsonl: No such file" batch -f \
    many.jsonl -o nowhere/o.jsonl
bad "a cache of one byte" 1 \
    "^llm: --cache-memory is 1 byte, and one block of 16 tokens takes 4.0 KiB: a context of 128 tokens needs 32.0 KiB" \
    batch -f many.jsonl --cache-memory 1
bad "a context that no model has" 1 "^llm: --context is 1000000: the model supports" batch \
    -f many.jsonl --context 1000000
bad "a policy: batch has none" 2 "unknown option --policy" batch -f many.jsonl --policy static
bad "a window: batch has none" 2 "unknown option --window" batch -f many.jsonl --window 1

# ---- batch --trace: which steps a sequence is in ---------------------------------------------
rm -f o.jsonl
name="batch --trace"
run batch -f many.jsonl -o o.jsonl --trace t.json --cache-memory 64K --block-size 4 \
    --max-sequences 8; judge 0 "" ""
trace "... writes a trace" t.json '"request 200, sample 2"'
for what in prefill decode admitted preempted resumed ended '"in use"'; do
    name="... with $what"; if grep -q -- "$what" t.json; then pass; else fail "$what"; fi
done
name="... of 300 sequences, each of which ends"
if [ "$(grep -c '"name": "ended"' t.json)" -eq 300 ] &&
    [ "$(grep -c '"request [0-9]*, sample [12]"' t.json)" -eq 300 ]; then pass
    else fail "300 ends"; fi
ok "batch --trace, with proposals" "" batch -f greedy.jsonl -o - --trace t.json --draft "$M" \
    --speculate 3
trace "... has them" t.json '"verify 1\+3", "args": .*"accepted": 3'
cp many.jsonl p.jsonl
bad "a trace over the prompts" 1 \
    "^llm: p.jsonl exists and is not a trace: give another path to write to$" batch -f many.jsonl \
    --trace p.jsonl
same "... leaves them as they were" p.jsonl many.jsonl
rm -f o.jsonl
bad "a trace over the results" 1 "the same file, o.jsonl: give another" batch -f many.jsonl -o \
    o.jsonl --trace o.jsonl
bad "a trace over the model" 1 "d.gguf exists and is not a trace" "$LLM" batch -m "$D" -q -f \
    many.jsonl --trace d.gguf
bad "a trace to standard output" 2 "trace needs the name of a file" batch -f many.jsonl --trace -
bad "a trace in no directory" 1 "cannot write to nowhere/t.json: No such file" batch -f \
    many.jsonl --trace nowhere/t.json
bad "a trace of no engine" 1 "cache-memory is 1 byte, and one block" batch -f many.jsonl \
    --cache-memory 1 --trace t.json
trace "... is a trace all the same" t.json steps

mkfifo fifo
rm -f o.jsonl
"$LLM" batch -m "$M" -q --no-timings -f fifo -o o.jsonl >out 2>err &
pid=$!
exec 3>fifo
head -n 3 many.jsonl >&3
i=0
while [ "$(wc -l 2>/dev/null <o.jsonl || echo 0)" -lt 3 ] && kill -0 $pid 2>/dev/null && [ $i -lt \
    1000 ]; do sleep 0.01; i=$((i + 1)); done
name="lines are answered as they come"; if [ "$(wc -l <o.jsonl)" -eq 3 ]; then pass; else \
    status=0; fail "3 results while the input is open"; fi
name="two at once"; "$LLM" batch -m "$M" -q -f many.jsonl -o o.jsonl >out 2>err.2 </dev/null; \
    status=$?; cp err.2 err; judge 1 "another llm is writing to o.jsonl" ""
kill -INT $pid
wait $pid
status=$?
exec 3>&-
: >out
name="stopped while it waits for input"
if [ $status -eq 1 ] && [ "$(wc -l <o.jsonl)" -eq 3 ]; then pass
else fail "status 1, 3 lines"; fi
rm -f o.jsonl
for signal in INT TERM; do
    "$LLM" batch -m "$M" --no-timings -f many.jsonl -o o.jsonl --max-sequences 2 --trace t.json \
        >out 2>err </dev/null &
    pid=$! i=0 before=$(wc -l 2>/dev/null <o.jsonl || echo 0)
    while [ "$(wc -l 2>/dev/null <o.jsonl || echo 0)" -le $((before + 5)) ] && [ $i -lt 2000 ] &&
        kill -0 $pid 2>/dev/null; do
        sleep 0.01
        i=$((i + 1))
    done
    kill -$signal $pid
    wait $pid
    status=$?
    name="stopped by SIG$signal"; judge 1 \
        "stopped, with [0-9]+ lines done; the same command continues from there" ""
    trace "... with a whole trace" t.json decode
done
name="... continues"; run batch -f many.jsonl -o o.jsonl; judge 0 "" ""
same "... to the same end" full.jsonl o.jsonl

# ---- full disk, closed pipe ------------------------------------------------------------------
rm -f o.jsonl
name="batch to a full disk"
(ulimit -f 16 2>/dev/null &&
    exec "$LLM" batch -m "$M" -q --no-timings -f many.jsonl -o o.jsonl) >out 2>err </dev/null
status=$?
judge 1 "cannot write to o.jsonl: .*(too large|No space)" ""
name="... leaves whole lines"; if [ -s o.jsonl ] && [ -z "$(tail -c 1 o.jsonl)" ]; then pass
else fail "a newline at the end"; fi
name="... continues"; run batch -f many.jsonl -o o.jsonl; judge 0 "" ""
same "... to the same end" full.jsonl o.jsonl
printf 'a line of before\n' >appended.txt
name="batch to a full standard output that is a file"
(ulimit -f 16 2>/dev/null && exec "$LLM" batch -m "$M" -q --no-timings -f many.jsonl) >whole.txt \
    2>err </dev/null
status=$?
: >out
judge 1 "cannot write to standard output: .*(too large|No space)" ""
head -c "$(wc -c <whole.txt)" full.jsonl >part
same "... leaves whole lines" whole.txt part
name="... a newline at the end"; if [ -s whole.txt ] && [ -z "$(tail -c 1 whole.txt)" ]; then \
    pass; else fail "a newline at the end"; fi
(ulimit -f 16 2>/dev/null && exec "$LLM" batch -m "$M" -q --no-timings -f many.jsonl) \
    >>appended.txt 2>err </dev/null
name="... also where it is appended to"; if [ "$(head -n 1 appended.txt)" = "a line of before" ] \
    && [ "$(wc -l <appended.txt)" -gt 5 ] && [ -z "$(tail -c 1 appended.txt)" ]; then pass; else \
    fail "whole lines"; fi
if [ -w /dev/full ]; then
    name="batch --trace /dev/full"; run batch -f greedy.jsonl --trace /dev/full
    judge 1 "^llm: cannot write to /dev/full: No space left on device$" '"line": 40'
    bad "batch -o /dev/full" 1 "cannot write to /dev/full: No space left" batch \
        -f many.jsonl -o /dev/full
    name="batch to a full standard output"; batch -f many.jsonl >/dev/full 2>err </dev/null
    status=$?; : >out
    judge 1 "cannot write to standard output: No space left on device" ""
    name="bench serve to a full standard output"
    "$LLM" bench serve -m "$M" --requests 2 --gen 2 --prompt 4 >/dev/full 2>err </dev/null
    status=$?
    judge 1 "cannot write to standard output: No space left on device" ""
else
    skip "a full disk (no /dev/full)"
fi
closed "batch" batch -f many.jsonl
closed "bench batch" "$LLM" bench batch -m "$M" --sequences 1 -p 4 -g 4 -r 1
if has_terminal; then
    rm -f o.jsonl
    name="a bar on a terminal"; on_terminal "'$LLM' batch -m '$M' -f many.jsonl -o o.jsonl"
    judge 0 "" "batch \[#*\.*\] +[0-9]+ %  [0-9]+ lines, [0-9.]+ tokens/s"
    name="accepted tokens on a terminal"; on_terminal \
        "'$LLM' run -m '$M' -n 20 --temperature 0 --ignore-end --draft '$M' Hello"
    if LC_ALL=C grep -a -q "$(printf '\033')\[32m" out; then pass; else fail "green"; fi
else
    skip "a terminal (no script command, or no pseudo-terminals)"
fi

# ---- bench -----------------------------------------------------------------------------------
ok "bench batch" "^ +4 .* x$" "$LLM" bench batch -m "$M" --sequences 1,4 -p 20 -g 5 -r 1
ok "bench batch --json" '"complete": true' \
    "$LLM" bench batch -m "$M" --sequences 2,3 -p 16 -g 5 -r 2 --json
json "bench batch --json is JSON"
bad "bench batch beyond the context" 1 "context of 128" "$LLM" bench batch -m "$M"
ok "bench serve" "continuous +static +dynamic" \
    "$LLM" bench serve -m "$M" --requests 12 --prompt 4-20 --gen 2-30 --max-sequences 4
name="bench serve: a group computes as many tokens for each member as for its longest"
judge 0 "" "still computed +0.00 +[0-9.]*[1-9][0-9.]* +[0-9.]*[1-9]"
ok "bench serve --rate" "200 a second" \
    "$LLM" bench serve -m "$M" --requests 12 --rate 200 --prompt 4-20 --gen 2-30 --shared 32 \
    --policy continuous
ok "bench serve --json" '"policy": "dynamic".*"complete": true|"complete": true' \
    "$LLM" bench serve -m "$M" --requests 12 --prompt 4 --gen 1-30 --cache-memory 64K \
    --preempt swap --runs 2 --json
json "bench serve --json is JSON"
# Requests that end before the length they asked for: all get their tokens. A group computes
# padding; continuous batching does not.
ok "bench serve --ask" "of 60 asked for" \
    "$LLM" bench serve -m "$M" --requests 12 --prompt 4-20 --gen 2-30 --ask 60 --max-sequences 4
name="bench serve: padding under static and dynamic only"
judge 0 "" "still computed +0.00 +[0-9.]*[1-9][0-9.]* +[0-9.]*[1-9]"
# A group reserves memory for the longest output of each member, so no member is preempted.
# Continuous batching preempts with the same cache.
ok "bench serve: groups that fit" "" \
    "$LLM" bench serve -m "$M" --requests 12 --prompt 4-20 --gen 2-30 --ask 60 --cache-memory 64K \
    --block-size 4
name="bench serve: preemptions under continuous only"; judge 0 "" "^preemptions +[1-9][0-9]* +0 +0$"
bad "bench serve: --ask below --gen" 2 "ask is 20, and --gen gives up to 30 tokens" \
    "$LLM" bench serve -m "$M" --gen 2-30 --ask 20
ok "bench serve --draft" "proposals accepted" \
    "$LLM" bench serve -m "$M" --requests 6 --prompt 4-20 --gen 2-30 --draft "$D" --policy static
bad "bench serve beyond the context" 1 "context is 128" "$LLM" bench serve -m "$M" --gen 10-500
bad "bench serve, invalid range" 2 "gen needs a whole number, or two of them as LOW-HIGH" \
    "$LLM" bench serve -m "$M" --gen 9-3
yes "Once upon a time there was a wolf who had a friend, and the friend had a house." |
    head -n 20 >text.txt
ok "bench speculate" "^auto " \
    "$LLM" bench speculate -m "$M" --draft "$D" -f text.txt -p 8 -g 12 -r 1
ok "bench speculate --lookup --json" '"complete": true' \
    "$LLM" bench speculate -m "$M" --lookup -f text.txt -p 8 -g 12 -r 1 --json
json "bench speculate --json is JSON"
bad "bench speculate without a source of proposals" 2 "nothing proposes tokens" \
    "$LLM" bench speculate -m "$M" -f text.txt
bad "bench speculate, no text" 1 "holds no text of 8 tokens" \
    "$LLM" bench speculate -m "$M" --lookup -f none.jsonl -p 8
bad "an unknown benchmark" 2 "no benchmark is named 'srve'; did you mean 'serve'\?" \
    "$LLM" bench srve
for c in batch "bench serve" "bench batch" "bench speculate"; do
    ok "$c --help" "Usage: llm $c" "$LLM" $c --help
    name="$c --help has examples"; judge 0 "" "Examples:"
    bad "$c, unknown option" 2 "llm $c: unknown option --hepl; did you mean --help\?" \
        "$LLM" $c --hepl
done

end
