#!/usr/bin/env python3
"""Makes the Unicode tables of llm.h (chapter 9) from Python's copy of Unicode's data.

    python3 tests/unicode_tables.py            prints the tables
    python3 tests/unicode_tables.py --check    compares them with llm.h; exits with 1 if they differ
    python3 tests/unicode_tables.py --write    writes them to llm.h (or to a file given after it)

The tables are one list of numbers, between the two marker lines below:

    categories      runs of code points of one category: the category, the length of the run
    folds           simple case folding: distance from the previous code point with a folding, and
                    the difference to the folded one (zigzag: 2 d, or -2 d - 1 if negative)
    combining       canonical combining classes other than 0: code points skipped, length of the
                    run, class
    decompositions  distance from the previous code point; kind + 3 x (number of parts - 1), where
                    the kind is 0, 1 (canonical, but NFC never composes it) or 2 (NFKC only); each
                    part as the difference to the same part of the previous one (zigzag)

The numbers are compressed by an adaptive binary range coder; llm__unpack is its decoder. A number
is its length in bits, 5 bits under adaptive odds, then its bits after the first one. Each column of
a table has its own odds. The code is written as digits of 13 bits, two characters each.

llm.h has the categories and foldings of Unicode 16, and the normal forms of Unicode 9, as Hugging
Face's tokenizers have (pip install unicodedata2==16.0.0). NEWER are the characters to leave out of
the latter. Python's own str.casefold is older; ADDED has what came later.
"""
import os
import sys

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

BEGIN = "/* BEGIN tables made by tests/unicode_tables.py"
END = "/* END tables made by tests/unicode_tables.py */"
ALPHABET = [chr(c) for c in range(32, 127) if chr(c) not in '"*\\?']
# numbered as LLM__CATEGORY_*
CATEGORIES = ["C", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Nd", "N", "Pc", "P", "S", "Z"]
CATEGORY, LENGTH, OTHERS = 1, 14, 27  # columns: one per previous or current category, then these
FOLD, SKIP, STEP = OTHERS, OTHERS + 2, OTHERS + 5
NEWER = """
    7FD 897-89F 8CA-8D3 9FE C3C D3B-D3C EBA 1715 1ABF-1ACE 1DF6-1DFA 32FF A7F2-A7F4 A82C AB69 105C9
    105E4 10781-10785 10787-107B0 107B2-107BA 10D24-10D27 10D69-10D6D 10EAB-10EAC 10EFD-10EFF
    10F46-10F50 10F82-10F85 11070 1133B 11383 11385 1138E 11391 113C5 113C7-113C8 113CE-113D0 1145E
    11839-1183A 11938 1193D-1193E 11943 119E0 11A34 11A47 11A99 11D42 11D44-11D45 11D97 11F41-11F42
    16121-16128 1612F 16D68-16D6A 16FF0-16FF1 1CCD6-1CCF9 1E030-1E06D 1E08F 1E130-1E136 1E2AE
    1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF 1F16C 1FBF0-1FBF9"""
NEWER = {c for a, _, b in (x.partition("-") for x in NEWER.split())
         for c in range(int(a, 16), int(b or a, 16) + 1)}
ADDED = {0x1C89: 0x1C8A, 0xA7CB: 0x264, 0xA7CC: 0xA7CD, 0xA7DA: 0xA7DB, 0xA7DC: 0x19B}
ADDED.update({c: c + 32 for c in range(0x10D50, 0x10D66)})


class Coder:
    def __init__(self):
        self.low, self.range, self.units, self.odds = 0, (1 << 39) - 1, 3, {}
        self.counts = dict.fromkeys(
            ("RUNS", "FOLDS", "COMBINING", "DECOMPOSITIONS", "DECOMPOSED"), 0)

    def bit(self, context, bit):
        odds = self.odds.get(context, 1024)
        bound = (self.range >> 11) * odds
        if bit:
            self.low += bound
            self.range -= bound
            odds -= odds >> 4
        else:
            self.range = bound
            odds += (2048 - odds) >> 4
        self.odds[context] = odds
        while self.range < 1 << 26:
            self.low <<= 13
            self.range <<= 13
            self.units += 1

    def number(self, column, n):
        length, node = n.bit_length(), 1
        for i in range(4, -1, -1):
            self.bit((column, node), length >> i & 1)
            node = 2 * node + (length >> i & 1)
        for i in range(1, length):
            known = n >> (length - i)
            context = (column, 32 + 4 * length + known) if i < 3 else (0, length - i)
            self.bit(context, n >> (length - i - 1) & 1)

    def text(self):
        digits = []
        value = self.low + self.range - 1
        value -= value % (1 << 26)  # any value from low to low + range - 1 will do
        for i in range(self.units - 1, -1, -1):
            digit = value >> 13 * i & 8191
            digits.append(ALPHABET[digit // 91] + ALPHABET[digit % 91])
        return digits


def zigzag(d):
    return 2 * d if d >= 0 else -2 * d - 1


def category(c):
    name = unicodedata.category(chr(c))
    return CATEGORIES.index(name if name in CATEGORIES else name[0])


def categories(coder):
    begin, previous = 0, 0
    while begin < 0x110000:
        now, end = category(begin), begin
        while end < 0x110000 and category(end) == now:
            end += 1
        coder.number(CATEGORY + previous, now)
        coder.number(LENGTH + now, end - begin)
        coder.counts["RUNS"] += 1
        begin, previous = end, now


def fold(c):
    folded = chr(c).casefold()
    return ADDED.get(c, ord(folded if len(folded) == 1 else chr(c).lower()[0]) if c != 0x130 else c)


def folds(coder):
    last = 0
    for c in range(0x110000):
        if fold(c) != c:
            coder.number(FOLD, c - last)
            coder.number(FOLD + 1, zigzag(fold(c) - c))
            coder.counts["FOLDS"] += 1
            last = c


def combining_class(c):
    return unicodedata.combining(chr(c)) if c not in NEWER else 0


def combining(coder):
    begin, end = 0, 0
    while begin < 0x110000:
        now, stop = combining_class(begin), begin
        while stop < 0x110000 and combining_class(stop) == now:
            stop += 1
        if now:
            coder.number(SKIP, begin - end)
            coder.number(SKIP + 1, stop - begin)
            coder.number(SKIP + 2, now)
            coder.counts["COMBINING"] += 1
            end = stop
        begin = stop


def decompositions(coder):
    last, previous = 0, [0] * 18
    for c in range(0x110000):
        fields = unicodedata.decomposition(chr(c)).split()
        if not fields or c in NEWER:
            continue
        wide = fields[0].startswith("<")
        parts = [int(x, 16) for x in fields[wide:]]
        again = unicodedata.normalize("NFC", unicodedata.normalize("NFD", chr(c))) == chr(c)
        coder.number(STEP, c - last)
        coder.number(STEP + 1, (2 if wide else not again) + 3 * (len(parts) - 1))
        for i, part in enumerate(parts):
            coder.number(STEP + 2 + (i > 0), zigzag(part - previous[i]))
            previous[i] = part
        coder.counts["DECOMPOSITIONS"] += 1
        coder.counts["DECOMPOSED"] += len(parts)
        last = c


def table():
    coder = Coder()
    for part in (categories, folds, combining, decompositions):
        part(coder)
    digits = coder.text()
    lines = ["".join(digits[i:i + 48]) for i in range(0, len(digits), 48)]
    counts = ", ".join("LLM__N_%s = %d" % item for item in coder.counts.items())
    counts = counts.replace(" LLM__N_DECOMPOSITIONS", "\n    LLM__N_DECOMPOSITIONS")
    return ("%s, Unicode %s */\n" % (BEGIN, unicodedata.unidata_version) +
            "enum {\n    %s\n};\n" % counts +
            "static const char *const llm__unicode_tables[] = {\n" +
            ",\n".join('"%s"' % line for line in lines) + "};\n" + END + "\n")


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
