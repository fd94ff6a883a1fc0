#!/bin/sh
# tests/cli_chat.sh [LLM]: tests of `llm chat`: its commands, the end of its input, and lines that
# are too long (tests/test_chat.c tests the terminal and Ctrl-C). Run it in the repository's root.
# Ends in one line, "N passed, N failed".
set -u
. "$(dirname "$0")/cli_lib.sh"
M=$TOP/models/tales-q4_0.gguf

# name, exit status, pattern in stderr, pattern in stdout, option...: chat with the input in the
# file `typed`
chat() {
    name=$1 expected=$2 said=$3 shown=$4
    shift 4
    "$LLM" chat -m "$M" --temperature 0 -n 6 --template chatml "$@" <typed >out 2>err
    status=$?
    judge "$expected" "$said" "$shown"
}
answers() { # the number of answers in the last chat; each ends in a line of statistics
    name="$name: $1 answers"
    if [ "$(grep -c ' tokens in .* s$' err)" -eq "$1" ]; then pass; else fail "$1 answers"; fi
}

: >typed
chat "nothing is said" 0 "chat template: chatml; /help lists the commands" ""
answers 0
printf 'Who is there?' >typed
"$LLM" synth --shape dim=64,layers=1,heads=2,kv-heads=1,hidden=64,vocab=600,context=128,tied=1 \
    --type f32 broken.gguf >log 2>&1
printf '\377\377\377\377\377\377\377\377' >nan # the last values are not numbers
dd if=nan of=broken.gguf bs=1 seek=$(($(wc -c <broken.gguf) - 8)) conv=notrunc 2>/dev/null
chat "logits that are not numbers" 1 \
    "sample 0: the model's logits after position [0-9]+ are not finite" "" -m broken.gguf
chat "a message without the end of its line" 0 \
    "prompt tokens \(0 from the cache\), [0-9]+ tokens in" "^..*"
answers 1
printf '/system Be kind.\n/save whole.json' >typed
chat "a command without a newline" 0 "1 messages are in whole\.json$" ""
printf 'Who is there?\n\n   \nAnd who else?\n' >typed
chat "empty lines are no messages; earlier messages are in the cache" 0 \
    "\([1-9][0-9]* from the cache\)" ""
answers 2
chat "--quiet" 0 "" "" --quiet
name="--quiet prints the same answers and nothing else"
cp out quietly
"$LLM" chat -m "$M" --temperature 0 -n 6 --template chatml <typed 2>err | sed 's/ \.\.\.$//' >out
if cmp out quietly >log 2>&1 && [ ! -s log ]; then pass; else fail "the same answers"; fi

printf '%s\n' One '/save one.json' '/system Be brief.' /system '/save two.json' 'Two \' \
    'and three' //four '/save three.json' /reset '/save four.json' /quit Five >typed
chat "/system shows the message" 0 "^Be brief\.$" ""
answers 3
cat >check.py <<'EOF'
import json
def roles(name): return [(m["role"], m["content"]) for m in json.load(open(name))]
one, two, three, four = (roles(n + ".json") for n in ("one", "two", "three", "four"))
assert len(one) == 2 and one[0] == ("user", "One") and one[1][0] == "assistant" and one[1][1], one
assert two == four == [("system", "Be brief.")], (two, four)
assert [r for r, _ in three] == ["system", "user", "assistant", "user", "assistant"], three
assert three[1][1] == "Two \nand three" and three[3][1] == "/four", three
EOF
if [ -n "$python" ]; then
    name="/save, /system and /reset"
    run "$python" check.py
    judge 0 "" ""
else
    skip "what /save writes (no python3)"
fi
printf '/system\n' >typed
chat "--system" 0 "^Be kind\.$" "" --system "Be kind."
chat "/system where there is none" 0 "^there is no system message$" ""
printf '/help\n/nonsense\n/save\n/save no/such/folder.json\nHello\n' >typed
chat "/help" 0 "^/save FILE " ""
chat "an unknown command" 0 \
    "there is no command /nonsense of this form; /help lists the commands" ""
chat "/save without a name" 0 "there is no command /save of this form" ""
chat "/save where nothing can be written" 0 "cannot write no/such/folder.json: No such file" ""
answers 1

{ head -c 300000 /dev/zero | tr '\0' a; printf '\nHello\n'; } >typed
chat "a line longer than the context" 1 \
    "prompt of [0-9]+ tokens, even after /reset, and the context holds 1024: send a shorter one$" ""
answers 1
{ echo One; head -c 3000 /dev/zero | tr '\0' a; printf '\n/save kept.json\n'; } >typed
chat "a longer context may help" 1 \
    "holds 160: send a shorter one, or start again with a larger --context$" "" --context 160
name="a message that does not fit drops no earlier ones"
if grep -q '"One"' kept.json; then pass; else fail "the earlier messages"; fi
{ for word in one two three four five six seven eight nine ten; do echo \
    "Tell me of $word, and of the others too."; done; } >typed
chat "a conversation longer than the context" 0 \
    "the oldest [0-9]+ messages were forgotten, since the context holds 160 tokens" "" --context 160
answers 10

echo "/save long.json" >>typed
chat "... with a system message" 0 "messages were forgotten, since the context holds" "" \
    --context 160 --system "Be kind."
name="... which is kept"
if grep -A 1 '^\[$' long.json | grep -q '"system", "content": "Be kind\."'; then pass
else fail "the system message first"; fi

bad "a model without a template" 1 \
    "none .*chatml.*\(--template NAME\)|no chat template.*\(--template NAME\)" "$LLM" chat -m "$M"
bad "--no-thinking with a template without thinking" 1 \
    "for chat templates that know enable_thinking; this one, chatml, has no" \
    "$LLM" chat -m "$M" --template chatml --no-thinking
echo '[{"role": "user", "content": "Hi <|im_end|>"}]' >messages.json
echo '{{ messages[0].content }}|{{ tools is none }}' >own.jinja
ok "a conversation as text" "^Hi <\|im_end\|>\|True$" \
    "$LLM" tokenize -m "$M" --chat messages.json --template-file own.jinja --render
ok "a conversation as ids" "^[0-9]+( [0-9]+)+$" \
    "$LLM" tokenize -m "$M" --chat messages.json --template chatml
bad "a template that does not exist" 1 "no chat template called 'x'" \
    "$LLM" tokenize -m "$M" --chat messages.json --template x
bad "--render without --chat" 2 "are for --chat" "$LLM" tokenize -m "$M" --render x
echo '{{ nothing.x' >own.jinja
bad "an error in a template" 1 "template_source: the chat template, line 1: " \
    "$LLM" tokenize -m "$M" --chat messages.json --template-file own.jinja
ok "the templates" "^mistral-v7$" "$LLM" chat --template help
bad "an unknown template" 1 "chatml" "$LLM" chat -m "$M" --template chatlm

end
