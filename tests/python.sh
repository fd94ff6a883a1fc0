#!/bin/sh
# tests/python.sh [./llm]: docs/examples/llm.py, the Python binding. Its structs and declarations
# equal those of llm.h, it generates the same text as the command, and errors, streams, embeddings
# and sessions work. LLM_LIBRARY: an existing shared library of llm.h.
set -u
. tests/cli_lib.sh
python=$(command -v python3) || python=
line() {
    text="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || text="$text, $skipped skipped"
    echo "$text"
    [ "$failed" -eq 0 ]
    exit
}
cc=${CC:-cc}
model=$TOP/models/tales.gguf
if [ -z "$python" ]; then skip 'the Python binding: python3 is not installed'; line; fi
if [ ! -f "$model" ]; then skip "the Python binding: $model is not there"; line; fi

# Without the fast kernels, which take a minute to compile; the text is the same (tests/embed.sh).
if [ -z "${LLM_LIBRARY:-}" ]; then
    LLM_LIBRARY=$T/libllm.so
    if ! $cc -O1 -shared -fPIC -DLLM_NO_FAST_KERNELS -DLLM_IMPLEMENTATION -x c "$TOP/llm.h" -o \
        "$LLM_LIBRARY" -lm 2>err; then
        skip "the Python binding: $cc builds no shared library: $(head -c 200 err)"
        line
    fi
fi
export LLM_LIBRARY PYTHONPATH="$TOP/docs/examples" PYTHONDONTWRITEBYTECODE=1

# ---- Declarations: a C program with those of llm.py, and the struct layouts of ctypes ----
"$python" - >declarations.c <<'END'
import llm
print('#include "llm.h"\n#include <stdio.h>')
print(llm.FUNCTIONS)
print("int main(void) {")
for struct in llm.STRUCTS:
    print('    printf("%%zu %s\\n", sizeof(%s));' % (struct.c_name, struct.c_name))
    for field in struct._fields_:
        print('    printf("%%zu %%zu %s.%s\\n", offsetof(%s, %s), sizeof ((%s *)0)->%s);' % (
            (struct.c_name, field[0]) * 3))
print("    return 0;\n}")
END
"$python" - >expected <<'END'
import ctypes, llm
for struct in llm.STRUCTS:
    print(ctypes.sizeof(struct), struct.c_name)
    for field in struct._fields_:
        at = getattr(struct, field[0])
        print(at.offset, at.size, struct.c_name + "." + field[0])
END
ok 'the functions are those of llm.h' '' $cc -std=c11 -Wall -Werror -I"$TOP" declarations.c -o \
    declarations
if [ -x declarations ]; then
    ./declarations >sizes
    same 'the structs are those of llm.h' expected sizes
fi

# ---- The same text as the command's ----
"$LLM" run -m "$model" -n 40 --temperature 0 --quiet "Once upon a time" >command 2>/dev/null \
    </dev/null
cat >greedy.py <<'END'
import llm, sys
with llm.Engine(sys.argv[1], n_threads=1) as engine:
    print("".join(engine.generate("Once upon a time", max_tokens=40)), end="")
END
ok 'a greedy text' '' "$python" greedy.py "$model"
printf 'Once upon a time' | cat - out | tr -d '\n' >text
tr -d '\n' <command >command.text
if [ "$(wc -c <text)" -lt 80 ] || [ "$(wc -c <command.text)" -lt 60 ]; then \
    name='a text of some length' && fail '80 bytes'; fi
case $(cat text) in *"$(cat command.text)"*) pass ;; *) name="the command's text" && fail \
    "$(cat command.text)" ;; esac

cat >behaviour.py <<'END'
import llm, sys

def check(truth, what):
    if not truth:
        sys.exit("wrong: " + what)

def raises(status, function):
    try:
        function()
    except llm.LlmError as error:
        check(error.status == status, "%s, not %s: %s" % (error.status, status, error))
        check(len(str(error)) > 10, "a message")
    else:
        sys.exit("no error: " + status)

path = sys.argv[1]
engine = llm.Engine(path, n_threads=1, max_sequences=4, block_size=4)

# tokens
text = "A king, “née” 🦊, and a fox."
ids = engine.tokenize(text)
check(engine.detokenize(ids) == text, "detokenize")
check(engine.tokenize(text.encode()) == ids, "bytes")
check(max(ids) < engine.config.vocab_size and engine.config.dim > 0, "config")

# streams: pieces come one at a time, and are whole characters
stream = engine.generate("Once upon a time", max_tokens=30)
first = next(stream)
check(stream.finish is None and len(stream.tokens) < 4, "the first piece comes early")
greedy = first + "".join(stream)
check(stream.finish in ("length", "end") and len(stream.tokens) <= 30, "finish")
check(engine.detokenize(ids[:1] + stream.tokens).endswith(greedy), "pieces are the tokens' text")
check("".join(engine.generate(engine.tokenize("Once upon a time"), max_tokens=30)) == greedy, "ids")
stop = engine.generate("Once upon a time", max_tokens=30, stop=[greedy[20:24]])
check("".join(stop) == greedy[:greedy.index(greedy[20:24])] and stop.finish == "stop", "stop")
noise = engine.generate("Once", max_tokens=60, temperature=30.0, seed=3, ignore_end=True)
pieces = list(noise)  # random tokens, some of which are single bytes of characters
check(all(piece.encode() for piece in pieces) and len(noise.tokens) == 60, "random tokens")

# several at the same time
both = [engine.generate(p, max_tokens=20) for p in ("Once upon a time", "There was a fox")]
alone = "".join(engine.generate("There was a fox", max_tokens=20))
check(greedy.startswith("".join(both[0])) and "".join(both[1]) == alone, "two at a time")
unwanted = engine.generate("There was", max_tokens=20)
next(unwanted)
unwanted.cancel()
check(unwanted.finish == "cancelled" and not engine.running, "cancel")

# embeddings
a, b, again = engine.embed(["The dog ran home.", "The king's gold", "The dog ran home."])
check(len(a.last) == len(a.mean) == engine.config.dim, "dim")
check(a == again and a != b and a.last != a.mean, "embeddings")

# sessions
for options in (dict(), dict(temperature=0.9, seed=7)):
    whole = engine.generate("There was a king", max_tokens=40, **options)
    text = "".join(whole)
    part = engine.generate("There was a king", max_tokens=40, **options)
    begun = "".join(next(part) for _ in range(9))
    begun += "".join(part.pieces)
    session = part.save()
    part.cancel()
    with llm.Engine(path, n_threads=1, block_size=4) as other:
        rest = other.restore(session)
        check(begun + "".join(rest) == text, "a restored session")
        check(whole.tokens[-len(rest.tokens):] == rest.tokens, "its tokens")
    check(begun + "".join(engine.restore(session)) == text, "restored in the same engine")
raises("format", lambda: engine.restore(session[:-1]))
raises("format", lambda: engine.restore(b"nothing"))
with llm.Engine(path, n_threads=1, block_size=8) as other:
    raises("unsupported", lambda: other.restore(session))

# errors
raises("file", lambda: llm.Engine("no such file.gguf"))
raises("argument", lambda: engine.generate("x", temperature=-1.0))
raises("argument", lambda: llm.Engine(path, block_size=-1))
raises("capacity", lambda: engine.generate([1] * (engine.config.context_length + 1)))
for wrong in (lambda: engine.generate("x", temprature=1.0), lambda: llm.Engine(path, threads=1)):
    try:
        wrong()
    except TypeError as error:
        check("has no field" in str(error), "an unknown option")
    else:
        sys.exit("an unknown option is accepted")
open_one = engine.generate("Once", max_tokens=5)
engine.close()
check(list(open_one) == [], "a generation of a closed engine")
print("all is well")
END
ok 'streams, embeddings, sessions, errors' '^all is well$' "$python" behaviour.py "$model"
ok 'the example itself' '^Once upon a time there' "$python" "$TOP/docs/examples/llm.py" "$model" \
    "Once upon a time"
bad 'a missing model' 1 '^file: ' "$python" "$TOP/docs/examples/llm.py" no.gguf
line
