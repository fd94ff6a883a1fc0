#!/usr/bin/env python3
"""Makes the Unicode tables of llm.h (chapter 9) from Python's copy of Unicode's data.

    python3 tests/unicode_tables.py            prints the tables
    python3 tests/unicode_tables.py --check    compares them with llm.h; exits with 1 if they differ
    python3 tests/unicode_tables.py --write    writes them to llm.h (or to a file given after it)

The tables are between the two marker lines below:

    letters, numbers   general categories L* and N*, as runs: the code points to skip after the
                       previous run, then the code points in the run
    combining          canonical combining classes other than 0, as runs: skip, count, class
    decompositions     triples: the distance from the previous code point (negative if NFC never
                       composes the pair again), then one or two code points (0: no second one)

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
    out, last = [], 0
    for c in range(0x110000):
        fields = unicodedata.decomposition(chr(c)).split()
        if not fields or fields[0].startswith("<"):
            continue
        parts = [int(x, 16) for x in fields] + [0]
        again = unicodedata.normalize("NFC", unicodedata.normalize("NFD", chr(c))) == chr(c)
        out += [c - last if again or not parts[1] else last - c, parts[0], parts[1]]
        last = c
    return out


def array(kind, name, values):
    assert kind != "uint16_t" or max(values) < 65536
    lines = textwrap.wrap(", ".join(map(str, values)), 112)
    lines = [line.replace(", ", ",") for line in lines]
    return "static const %s llm__%s[] = {\n    %s};\n" % (kind, name, "\n    ".join(lines))


def table():
    return ("%s, Unicode %s */\n" % (BEGIN, unicodedata.unidata_version) +
            array("uint16_t", "letters", runs("L")) + array("uint16_t", "numbers", runs("N")) +
            array("uint16_t", "combining", combining()) +
            array("int32_t", "decompositions", decompositions()) + END + "\n")


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
