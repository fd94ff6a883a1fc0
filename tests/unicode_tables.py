#!/usr/bin/env python3
"""Makes the Unicode tables of llm.h (chapter 9) from Python's copy of Unicode's data.

    python3 tests/unicode_tables.py            prints the tables
    python3 tests/unicode_tables.py --check    compares them with llm.h; exits with 1 if they differ
    python3 tests/unicode_tables.py --write    writes them to llm.h (or to a file given after it)

The tables are between the two marker lines below:

    letters, numbers   general categories L* and N*, as runs: the code points to skip after the
                       previous run, then the code points in the run
    combining          canonical combining classes other than 0, as runs: skip, count, class
    decompositions     triples: twice the distance from the previous code point (plus 1 if NFC never
                       composes the pair again), the first part as a difference from the previous
                       first part (zigzag: 2 d, or -2 d - 1 if negative), the second part less 767
                       (0: there is none)

Each number is written in base 31, the most significant digit first. A digit is a character of
0-9 A-Z a-z; all but the last digit of a number have 31 added.

llm.h has the tables of Unicode 16, as Hugging Face's tokenizers have. The version of Python's
unicodedata depends on the Python; the package unicodedata2 (pip install unicodedata2==16.0.0) has a
fixed one.
"""
import os
import sys
import textwrap

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

BEGIN = "/* BEGIN tables made by tests/unicode_tables.py"
END = "/* END tables made by tests/unicode_tables.py */"


def runs(category):
    out, end, start = [], 0, None
    for c in range(0x110000 + 1):
        inside = c < 0x110000 and unicodedata.category(chr(c))[0] == category
        if inside and start is None:
            start = c
        elif not inside and start is not None:
            out += [start - end, c - start]
            start, end = None, c
    return out


def combining():
    out, end, start, now = [], 0, 0, 0
    for c in range(0x110000 + 1):
        value = unicodedata.combining(chr(c)) if c < 0x110000 else 0
        if value != now:
            if now:
                out += [start - end, c - start, now]
                end = c
            now, start = value, c
    return out


def decompositions():
    out, last, first = [], 0, 0
    for c in range(0x110000):
        fields = unicodedata.decomposition(chr(c)).split()
        if not fields or fields[0].startswith("<"):
            continue
        parts = [int(x, 16) for x in fields] + [0]
        again = unicodedata.normalize("NFC", unicodedata.normalize("NFD", chr(c))) == chr(c)
        step = 2 * (c - last) + (not again and parts[1] != 0)
        difference = parts[0] - first
        out += [step, 2 * difference if difference >= 0 else -2 * difference - 1,
                parts[1] - 767 if parts[1] else 0]
        first = parts[0]
        last = c
    return out


def number(n):
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    out = digits[n % 31]
    while n >= 31:
        n //= 31
        out = digits[31 + n % 31] + out
    return out


def array(name, values, size):
    """The numbers as lines of text; a number does not cross lines."""
    lines = [""]
    for word in map(number, values):
        if len(lines[-1]) + len(word) > 93:
            lines.append("")
        lines[-1] += word
    count = "enum { LLM__N_%s = %d };\n" % (name.upper(), len(values) // size)
    text = ",\n    ".join('"%s"' % line for line in lines)
    return count + "static const char *const llm__%s[] = {\n    %s};\n" % (name, text)


def table(letters=None, numbers=None, marks=None, pairs=None):
    return ("%s, Unicode %s */\n" % (BEGIN, unicodedata.unidata_version) +
            array("letters", letters or runs("L"), 1) + array("numbers", numbers or runs("N"), 1) +
            array("combining", marks or combining(), 3) +
            array("decompositions", pairs or decompositions(), 3) + END + "\n")


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    if mode not in ("", "--check", "--write"):
        sys.exit(__doc__)
    if not mode:
        sys.stdout.write(table())
        return
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[2] if len(sys.argv) > 2 else os.path.join(here, "..", "llm.h")
    source = open(path, encoding="utf-8").read()
    begin, end = source.index(BEGIN), source.index(END) + len(END) + 1
    if mode == "--write":
        with open(path, "w", encoding="utf-8") as f:
            f.write(source[:begin] + table() + source[end:])
    elif source[begin:end] != table():
        sys.exit("%s: the tables differ from what Unicode %s gives" %
                 (path, unicodedata.unidata_version))


if __name__ == "__main__":
    main()
