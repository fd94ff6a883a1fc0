#!/usr/bin/env python3
"""Compares how llm.h and Hugging Face's tokenizers split generated texts into words.

    python3 tests/compare_splits.py [NUMBER [NAME]]

For each rule of llm.h (or those whose names contain NAME), and for pre-tokenizers and normalizers
of tokenizer.json: NUMBER texts (100000). Prints the number that differ, and the first ones.
"""
import os
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
BEHAVIORS = {"Isolated": "isolated", "Removed": "removed", "Contiguous": "contiguous",
             "MergedWithPrevious": "merged_with_previous", "MergedWithNext": "merged_with_next"}
# beside the rules; steps in llm.h's syntax, and the library's own object for them
MORE = [
    (["Isolated \\p{N}+"], pre_tokenizers.Digits(False)),
    (["Isolated \\p{N}"], pre_tokenizers.Digits(True)),
    (["Removed \\s"], pre_tokenizers.WhitespaceSplit()),
    (["Replace \u2581\1 ", "Prepend-each \u2581", "MergedWithNext \u2581"],
     pre_tokenizers.Metaspace()),
] + [(["%sMergedWithNext [a-z\\s]+" % i], None) for i in ("", "!")] + [
    (["%s%s %s" % (i, b, e)], None) for i in ("", "!") for b in sorted(BEHAVIORS)
    for e in ("\\s+", "\\p{N}", "(?=\\d)", "a*?b|\\S{2,3}?(?!\\w)", "x*", "(?i:s+|[k-m]|\u00df)",
              "[a-t&&[^c-e\\d]&&\\p{Ll}]+", "(?>a+|\\s)\\b", "^.|.$", "\\w+|[^\\w\\s]+",
              "(?:ab?|\\s{1,2}+){2,}")
] + [([s, "Isolated \\s+"], None) for s in ("NFC", "NFKC", "Lowercase", "Strip-left",
                                            "Strip-right", "Replace xy\1[aeiou]\\s?")]
PARTS = ["'s", "'T", "'Re", "'\u017f", "'LL", "'", " ", "  ", "   ", "\n", "\r\n", "\r", "\t",
         "\u00a0", "\u3000", "\u2003", "\u0085", "\n\n", " \n ", "12", "12345", "\u00bd", "\u00b2",
         "\u0663", "\u2167", "e\u0301", "\u1e69", "\ud55c", "\u1112\u1161", "\u212b", "a", "the",
         " the", "Fox", "iPhone", "XMLHttp", "Gr\u00f6\u00dfe", "\u6708\u304c",
         "\u041f\u0440\u0438",
         "!", "...", "?!", "--", "/", "\u2581", "\U0001f680", "\U0001f469\u200d\U0001f4bb",
         "\ufb01",
         "\u0958", "\ufeff", "\u200b", "\u0e01\u0e33", "\u0915\u094d\u0937\u093f", "$1,000.00",
         "<b>", "a_b", "_", "\u2014", "\u3002", "\uff01", "#", "K", "\u212a"]


def steps_of(steps):
    """The library's normalizer and pre-tokenizer for steps of llm.h."""
    normal, pre = [], []
    for step in steps:
        name, _, rest = step.partition(" ")
        if name.lstrip("!") in BEHAVIORS:
            pre.append(pre_tokenizers.Split(Regex(rest), BEHAVIORS[name.lstrip("!")],
                                            invert=name[0] == "!"))
        elif name == "Replace":
            content, _, expression = rest.partition("\1")
            normal.append(normalizers.Replace(Regex(expression), content))
        elif name.startswith("Strip"):
            normal.append(normalizers.Strip(name == "Strip-left", name == "Strip-right"))
        else:
            normal.append(getattr(normalizers, name)())
    return normalizers.Sequence(normal), pre_tokenizers.Sequence(pre)


def character(r):
    while True:
        c = chr(r.randrange(*r.choice([(32, 127), (128, 0x3000), (128, 0x500), (0x3000, 0x32000)])))
        # assigned, and not a mark newer than the library's normal forms
        if unicodedata.category(c) not in ("Cs", "Cn", "Co") and (
                not unicodedata.combining(c) or c < "\u0370"):
            return c


def text(r):
    return "".join(character(r) if r.random() < 0.3 else r.choice(PARTS)
                   for _ in range(r.randint(1, 16)))


def lengths(helper, steps, texts):
    """The lengths of the words that llm.h finds in each text."""
    with tempfile.TemporaryFile() as file:
        for t in texts:
            data = t.encode()
            file.write(struct.pack("<I", len(data)) + data)
        file.seek(0)
        out = subprocess.run([helper, "split"] + steps, stdin=file, stdout=subprocess.PIPE,
                             check=True).stdout
    numbers, at, all_lengths = struct.unpack("<%dI" % (len(out) // 4), out), 0, []
    while at < len(numbers):
        n = numbers[at] if numbers[at] < 1 << 31 else 0
        all_lengths.append(list(numbers[at + 1:at + 1 + n]))
        at += n + 1
    return all_lengths


def main():
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100000
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    r, wrong = random.Random(3), 0
    texts = [text(r) for _ in range(number)]
    with tempfile.TemporaryDirectory() as folder:
        helper = os.path.join(folder, "helper")
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O2", "-w",
                        "-DLLM_NO_FAST_KERNELS", os.path.join(HERE, "compare_splits.c"), "-o",
                        helper, "-lm", "-lpthread"], check=True)
        rules = subprocess.run([helper, "rules"], stdout=subprocess.PIPE, check=True,
                               encoding="utf-8").stdout
        all_rules = [(line.split("\t")[0], line.split("\t")[1:], None)
                     for line in rules.split("\n") if line]
        for name, steps, pre in all_rules + [(" ".join(s), s, p) for s, p in MORE]:
            if wanted not in name:
                continue
            normal, ours = steps_of(steps) if not pre else (None, pre)
            bad = []
            for t, got in zip(texts, lengths(helper, steps, texts)):
                words = ours.pre_tokenize_str(normal.normalize_str(t) if normal else t)
                if got != [len(w.encode()) for w, _ in words]:
                    bad.append((t, got, [w for w, _ in words]))
            wrong += len(bad)
            print("%-60.60s %d of %d differ" % (name, len(bad), number), flush=True)
            for t, got, words in bad[:3]:
                print("    %r\n        %r instead of %r" % (t, got, words))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
