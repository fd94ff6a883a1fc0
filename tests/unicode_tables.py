#!/usr/bin/env python3
"""Prints the Unicode tables of llm.h (chapter 2) from Python's unicodedata.

    python3 tests/unicode_tables.py            prints the tables
    python3 tests/unicode_tables.py --check    compares them with llm.h; exit 1 where they differ
    python3 tests/unicode_tables.py --write    puts them into llm.h (or the file named after it)

The tables stand between the two marker lines below. They hold the letters (general category L*) and
the numbers (N*) as runs: how many code points to skip from the end of the run before, then how many
belong to the class. The tables in llm.h were made with Unicode 14.0.0 (Python 3.11); a newer Python
knows a few more scripts and gives longer ones.
"""
import os
import sys
import textwrap
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
    assert max(out) < 65536
    return out


def table():
    text = "%s, Unicode %s */\n" % (BEGIN, unicodedata.unidata_version)
    for name, category in (("letters", "L"), ("numbers", "N")):
        values = ",".join(map(str, runs(category)))
        lines = textwrap.wrap(values.replace(",", ", "), 112)
        lines = [line.replace(", ", ",") for line in lines]
        text += "static const uint16_t llm__%s[] = {\n    %s};\n" % (name, "\n    ".join(lines))
    return text + END + "\n"


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
        sys.exit("%s: the tables differ from what Unicode %s gives" % (path, unicodedata.unidata_version))


if __name__ == "__main__":
    main()
