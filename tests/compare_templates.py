#!/usr/bin/env python3
"""Compares chat templates with jinja2 under transformers' settings.

    python3 tests/compare_templates.py FOLDER [--conversations 200] [--only NAME] [--show]

FOLDER has templates (*.jinja), such as models/templates in llama.cpp's source. Each one renders
generated conversations, here and with jinja2: with and without system messages, tools, documents,
tool calls, thoughts and variables; empty, long, in Unicode, and full of the template's own control
tokens. A template passes if both give the same bytes, or both refuse, for all of them.

Forging: the vocabulary has all the control tokens of all templates. The tokens of a conversation
must be special exactly where the template wrote them: as many as with the messages' control tokens
made harmless. Needs a C compiler, transformers and jinja2. Not part of make test.
"""
import argparse
import ctypes
import glob
import json
import os
import random
import re
import subprocess
import sys
import tempfile

from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import _compile_jinja_template

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MARK = re.compile(r"<[|｜]?[^<>{}'\"\s]{1,40}[|｜]?>|\[/?[A-Z_]{3,30}\]|<[|｜][^<>{}'\"]{1,40}[|｜]>")


class Options(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in (
        "template_name", "template_source", "tools_json", "documents_json", "variables_json",
        "date")] + [("no_thinking", ctypes.c_bool)]


class Error(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 4096)]


def build(folder):
    source, library = os.path.join(folder, "llm.c"), os.path.join(folder, "llm.so")
    with open(source, "w") as f:
        f.write("#define LLM_IMPLEMENTATION\n#define LLM_NO_FAST_KERNELS\n#include \"llm.h\"\n"
                "const char *message_of(const llm_error *e) { return e->message; }\n")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-I" + ROOT, source, "-o", library, "-lm"],
                   check=True)
    llm = ctypes.CDLL(library)
    for name in ("llm_file_open", "llm_tokenizer_create"):
        getattr(llm, name).restype = ctypes.c_void_p
    llm.message_of.restype = ctypes.c_char_p
    for name in ("llm_chat_render_json", "llm_chat_tokenize_json"):
        getattr(llm, name).restype = ctypes.c_int64
    llm.llm_tokenizer_is_special.restype = ctypes.c_bool
    return llm


def write_vocabulary(folder, marks):
    """A byte-level tokenizer.json with these special tokens."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {b: chr(b) for b in letters}
    for b in range(256):
        if b not in spelled:
            spelled[b] = chr(256 + len(spelled) - len(letters))
    vocabulary = {spelled[b]: b for b in range(256)}
    added = [{"id": 256 + i, "content": m, "special": True, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False} for i, m in enumerate(marks)]
    path = os.path.join(folder, "tokenizer.json")
    with open(path, "w") as f:
        json.dump({"added_tokens": added, "normalizer": None,
                   "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False,
                                     "use_regex": True},
                   "decoder": {"type": "ByteLevel"}, "post_processor": None,
                   "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}, f)
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        json.dump({"bos_token": "<s>", "eos_token": "</s>"}, f)
    return path


TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Get the \"weather\" of a city\nnow",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Name <of> the city, in 'any' language: é"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "exact": {"type": "boolean"}, "limit": {"type": ["number", "null"], "maximum": 1.5}},
            "required": ["city"]}}},
    {"type": "function", "function": {
        "name": "stop", "description": "", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {
        "name": "find", "description": "Find things", "parameters": {
            "type": "object", "properties": {"where": {
                "type": "object", "description": "place", "properties": {
                    "x": {"type": "number", "description": "X"}, "tags": {
                        "type": "array", "items": {"type": "string"}}}, "required": ["x"]}},
            "required": ["where"], "additionalProperties": False},
        "return": {"type": "string", "description": "what was found"}}},
]
ARGUMENTS = [{"city": "Zürich", "days": [1, 2]}, {}, {"where": {"x": 1.0, "tags": []}},
             {"exact": True, "limit": None, "x": 1e22, "y": -0.00001, "n": 123456789012},
             {"text": "two\nlines \"quoted\" <b> & 'c' \\ \t"}]
PLAIN = ["Hello", "", " ", "  two words \n", "\n\nlines\n\nand lines\n", "naïve 漢字 🙂 \u00a0x\u2003",
         "x" * 3000, "{{ messages }} {% if %} {# no #}", "'quoted' \"twice\" \\n", "a</think>b",
         "<think>\nhm\n</think>\n\nyes", "<think>open", "/no_think", "1 < 2 & 3 > 2", "A. B. C."]


def harm(text):
    return re.sub("[<>\\[\\]|｜]", "*", text.decode())


class Generator:
    def __init__(self, seed, marks, harmless=False):
        self.random, self.marks, self.harmless = random.Random(seed), marks, harmless

    def text(self):
        r = self.random
        if not self.marks or r.random() < 0.6:
            return r.choice(PLAIN)
        parts = [r.choice(self.marks + ["system", "user", "\n", " ", "a"]) for _ in
                 range(r.randint(1, 6))]
        text = "".join(parts)
        return re.sub(r"[<>\[\]|｜]", "*", text) if self.harmless else text

    def message(self, role):
        r, m = self.random, {"role": role, "content": self.text()}
        if r.random() < 0.06:
            m["content"] = [{"type": "text", "text": self.text()} for _ in range(r.randint(1, 2))]
        if role == "assistant":
            if r.random() < 0.25:
                m["reasoning_content"] = self.text()
            if r.random() < 0.1:
                m["thinking"] = self.text()
        return m

    def conversation(self):
        r, messages = self.random, []
        if r.random() < 0.45:
            messages.append(self.message(r.choice(["system", "system", "system", "developer"])))
        turns = r.choice([1, 1, 1, 2, 2, 3, 4, 12])
        style = r.choice(["dict", "dict", "text"])
        for turn in range(turns):
            messages.append(self.message("user"))
            if r.random() < 0.35:
                calls = []
                for _ in range(r.randint(1, 2)):
                    f = {"name": r.choice(["get_weather", "stop", "find"]),
                         "arguments": r.choice(ARGUMENTS)}
                    if style == "text":
                        f["arguments"] = json.dumps(f["arguments"])
                    calls.append({"id": "call%05d" % r.randint(0, 99999), "type": "function",
                                  "function": f})
                m = self.message("assistant")
                if r.random() < 0.5:
                    m["content"] = r.choice([None, ""])
                messages.append({**m, "tool_calls": calls})
                for call in calls:
                    messages.append({"role": "tool", "content": self.text(),
                                     "tool_call_id": call["id"],
                                     "name": call["function"]["name"]})
            if turn + 1 < turns or r.random() < 0.15:
                messages.append(self.message("assistant"))
        if r.random() < 0.04:
            r.shuffle(messages)
        variables = {}
        if r.random() < 0.3:
            variables["enable_thinking"] = r.random() < 0.5
        if r.random() < 0.2:
            variables["add_generation_prompt"] = False
        for name, values in {"thinking": [True, False], "reasoning_effort": ["low", "high"],
                             "date_string": ["1 Apr 2025"], "keep_past_thinking": [True],
                             "preserve_thinking": [True, False], "clear_thinking": [False],
                             "thinking_budget": [0, 512, 100000],
                             "model_identity": ["You are a model."]}.items():
            if r.random() < 0.1:
                variables[name] = r.choice(values)
        tools = r.sample(TOOLS, r.randint(1, 3)) if r.random() < 0.4 else None
        documents = [{"title": "T", "text": self.text()}] if r.random() < 0.1 else None
        return messages, tools, documents, variables


class Engine:
    def __init__(self, llm, path):
        self.llm, self.error = llm, Error()
        self.file = llm.llm_file_open(path.encode(), ctypes.byref(self.error))
        assert self.file, self.message()
        self.t = llm.llm_tokenizer_create(ctypes.c_void_p(self.file), ctypes.byref(self.error))
        assert self.t, self.message()

    def message(self):
        return self.llm.message_of(ctypes.byref(self.error)).decode("utf-8", "replace")

    def options(self, source, tools, documents, variables):
        def text(value):
            return None if value is None else json.dumps(value).encode()
        return Options(None, source.encode(), text(tools), text(documents), text(variables), None,
                       False)

    def render(self, options, messages):
        data = json.dumps(messages).encode()
        text = ctypes.create_string_buffer(1 << 21)
        n = self.llm.llm_chat_render_json(ctypes.c_void_p(self.t), ctypes.byref(options), data,
                                          ctypes.c_size_t(len(data)), text,
                                          ctypes.c_size_t(1 << 21), ctypes.byref(self.error))
        return None if n < 0 else text.raw[:n]

    def special(self, options, messages):
        """The special tokens of a conversation."""
        data, ids = json.dumps(messages).encode(), ctypes.POINTER(ctypes.c_int32)()
        n = self.llm.llm_chat_tokenize_json(ctypes.c_void_p(self.t), ctypes.byref(options), data,
                                            ctypes.c_size_t(len(data)), ctypes.byref(ids),
                                            ctypes.byref(self.error))
        found = [ids[i] for i in range(n) if ids[i] >= 256]
        self.llm.llm_free(ids)
        return found if n >= 0 else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--show", action="store_true", help="print the first difference of each")
    args = parser.parse_args()
    paths = [p for p in sorted(glob.glob(os.path.join(args.folder, "*.jinja"))) if args.only in p]
    sources = [open(p, newline="").read() for p in paths]
    marks = sorted({m for s in sources for m in MARK.findall(s)} | {"<s>", "</s>"})
    same = forged = 0
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(build(folder), write_vocabulary(folder, marks))
        for path, source in zip(paths, sources):
            own = sorted(set(MARK.findall(source))) + ["<s>", "</s>"]
            counts = dict.fromkeys(("same", "both refuse", "sandbox", "we refuse", "differ"), 0)
            shown, errors, forgeries = None, {}, 0
            try:
                template, broken = _compile_jinja_template(source), None
            except Exception as e:
                template, broken = None, str(e)
            for i in range(args.conversations):
                messages, tools, documents, variables = Generator(i, own).conversation()
                options = engine.options(source, tools, documents, variables)
                given = {"messages": messages, "tools": tools, "documents": documents,
                         "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
                try:
                    expected = template.render(**{**given, **variables}).encode()
                except SecurityError:
                    expected = False
                except TypeError as e:  # what a filter gives is a generator, which has no JSON form
                    expected, why = False if "generator" in str(e) else None, str(e)
                except Exception as e:
                    expected, why = None, str(e)
                got = engine.render(options, messages)
                kind = ("same" if got == expected and got is not None else
                        "sandbox" if expected is False else
                        "both refuse" if got is None and expected is None else
                        "we refuse" if got is None else "differ")
                counts[kind] += 1
                if got is None and kind == "we refuse":
                    errors[engine.message()] = errors.get(engine.message(), 0) + 1
                if kind == "differ" and not shown:
                    shown = (i, expected if expected is not None else why, got)
                if got is not None:
                    harmless = Generator(i, own, True).conversation()
                    twin = engine.options(source, *harmless[1:])
                    calm = engine.special(twin, harmless[0])
                    tokens = engine.special(options, messages)
                    again = engine.render(twin, harmless[0])
                    # the same text but for the marks: then as many special tokens, too
                    if calm is not None and again and harm(again) == harm(got) and (
                            len(tokens) != len(calm)):
                        forgeries += 1
                        shown = shown or (i, calm, tokens)
            good = counts["same"] + counts["both refuse"] + counts["sandbox"] == args.conversations
            same += good
            forged += forgeries > 0
            print(("ok    " if good else "FAILED"), os.path.basename(path),
                  ", ".join("%s %d" % c for c in counts.items() if c[1]),
                  "forged %d" % forgeries if forgeries else "", broken or "")
            for message, n in sorted(errors.items(), key=lambda e: -e[1])[:4]:
                print("       %d x %s" % (n, message))
            if shown and args.show:
                print("      ", *shown, sep="\n       ")
    print("%d of %d templates give the same for all conversations; %d forged" %
          (same, len(paths), forged))
    return 0 if same == len(paths) and not forged else 1


if __name__ == "__main__":
    sys.exit(main())
