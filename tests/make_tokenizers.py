#!/usr/bin/env python3
"""Writes three kinds of test data with Hugging Face's tokenizers library:

    tests/data/fuzz_vocabulary           small tokenizers of every supported kind
    tests/data/tokenizers/random.json    random texts over all of Unicode, and their ids
    tests/data/fuzz_chat                 the seeds of a fuzzer, made from tests/data/chat.json

    python3 tests/make_tokenizers.py
"""
import json
import os
import random
import tempfile

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
HERE = os.path.dirname(os.path.abspath(__file__))


def byte_level(pre, nfc=False, ignore_merges=False):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre
    t.decoder = decoders.ByteLevel()
    return t, pre_tokenizers.ByteLevel.alphabet()


def split(regex):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(regex), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ])


def sentencepiece(metaspace):
    t = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if metaspace:
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace,
                                                   split=metaspace == "always")
    else:
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                             normalizers.Replace(" ", "\u2581")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                   decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return t, []


def unigram(bytes_too):
    """Trained in main, since a Unigram model cannot be made empty with byte_fallback."""
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(),
                                         normalizers.Replace(Regex(" {2,}"), " ")])
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if bytes_too else "never")
    t.decoder = decoders.Metaspace(prepend_scheme="always" if bytes_too else "never")
    return t, []


def charsmap():
    """Unigram with SentencePiece's table for replacing characters; a small one. The library looks
    up whole grapheme clusters of less than 6 bytes, then characters."""
    with tempfile.TemporaryDirectory() as folder:
        rules, sample, prefix = (os.path.join(folder, x) for x in ("rules.tsv", "sample", "m"))
        with open(rules, "w", encoding="utf-8") as f:
            for a, b in (("\u00a0", " "), ("\u3000", " "), ("\u0085", ""), ("\u2003", " "), ("\t", " "),
                         ("\ufb01", "fi"), ("\u00bd", "1/2"),
                         ("e\u0301", "\u00e9"), ("e\u0301\u0316", "the")):
                f.write("%s\t%s\n" % tuple(" ".join("%X" % ord(c) for c in x) for x in (a, b)))
        with open(sample, "w", encoding="utf-8") as f:
            f.write("the fox said\n" * 9)
        spm.SentencePieceTrainer.train(
            input=sample, model_prefix=prefix, model_type="char", hard_vocab_limit=False,
            normalization_rule_tsv=rules, minloglevel=2)
        model = sentencepiece_model_pb2.ModelProto()
        with open(prefix + ".model", "rb") as f:
            model.ParseFromString(f.read())
    t, alphabet = unigram(True)
    t.normalizer = normalizers.Sequence([
        normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap), normalizers.Strip(),
        normalizers.Replace(Regex(" {2,}"), " ")])
    return t, alphabet


def gemma():
    t = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    t.normalizer = normalizers.Replace(" ", "\u2581")
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                   decoders.Fuse()])
    return t, []


# DeepSeek's kind: several splits, then ByteLevel
DEEPSEEK = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
    pre_tokenizers.Split(Regex(r"[\u4e00-\u9fa5\u3040-\u30ff]+"), "merged_with_next"),
    pre_tokenizers.Punctuation("contiguous"),
    pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
                               r"\s*[\r\n]+|\s+(?!\S)|\s+"), "removed", invert=True),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
])
FALCON = pre_tokenizers.Sequence([
    pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False),
    pre_tokenizers.Digits(individual_digits=False),
    pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")])
SMOLLM = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                  pre_tokenizers.ByteLevel(add_prefix_space=False)])
KINDS = [("gpt2", byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))),
         ("gpt2 with a space in front",
          byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))),
         ("llama3", byte_level(split(LLAMA3), ignore_merges=True)),
         ("qwen2", byte_level(split(QWEN2), nfc=True)),
         ("smollm", byte_level(SMOLLM)), ("llama2", sentencepiece(None)),
         ("metaspace first", sentencepiece("first")),
         ("metaspace always", sentencepiece("always")), ("deepseek", byte_level(DEEPSEEK)),
         ("gemma", gemma()), ("unigram", unigram(False)), ("unigram with bytes", unigram(True)),
         ("falcon", byte_level(FALCON)), ("unigram with charsmap", charsmap())]

SAMPLES = [
    "Once upon a time there was a fox, who didn't know what it's worth; she'd say: "
    "'we'll see' 12345 times.\n\n",
    "É è ê ñ ü ö, naïve café, Größe; 月が綺麗ですね。 한국어 Привет мир! ½ ² ٣٤ Ⅷ  end\t\tof   "
    "line\r\n",
    "def f(x):\n    return x ** 2  # don't\n        if True: print('THEY'RE')\n",
    "the the that then them there these this those "
]
PARTS = [
    "'s", "'T", "'Re", "'ſ", "'ll", "'", " ", "  ", "   ", "\n", "\r\n", "\r", "\t", "\u00a0",
    "\u3000", "\u2003", "\u0085", "12", "12345", "½", "²", "٣", "Ⅷ", "e\u0301", "o\u0302\u0323",
    "\u1e69", "s\u0307\u0323", "한", "\u1112\u1161\u11ab", "\u1100\u1161", "Å", "\u212b", "\u2126",
    "a", "the", " the", " fox", "didn't", "Größe", "月が", "Привет", "!", "...", "?!", "\u2581", "🚀",
    "👩\u200d💻", "ﬁ", "\u0958", "\u0344", "\U0002f800", "\ufeff", "\u200b", "<s>", "<tool>",
    "\U0001d15e", "\u0f73\u0f71", "e\u0316\u0301\u0300"
]


def assigned(c):  # in the oldest version of Unicode that these programs use
    import unicodedata
    known = unicodedata.category(c) not in ("Cs", "Cn", "Co")
    return known and (not unicodedata.combining(c) or c < "\u0378")


def text(r):
    out = []
    for _ in range(r.randint(0, 14)):
        while r.random() < 0.35:
            c = chr(r.randrange(0x30000) if r.random() < 0.6 else r.randrange(0x3000))
            if assigned(c):
                out.append(c)
        out.append(r.choice(PARTS))
    return "".join(out)


def main():
    r, kinds = random.Random(11), []
    texts = [text(r) for _ in range(100)]
    for name, (t, alphabet) in KINDS:
        specials = ["<unk>", "<s>", "</s>"] if not alphabet else ["<s>", "</s>"]
        trainer = trainers.BpeTrainer(vocab_size=480 if alphabet else 330,
                                      initial_alphabet=alphabet, special_tokens=specials,
                                      show_progress=False)
        if isinstance(t.model, models.Unigram):
            trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=specials,
                                              unk_token="<unk>", show_progress=False)
        t.train_from_iterator(SAMPLES * 4, trainer)
        if not alphabet:  # the trainer has no byte tokens: add them
            d = json.loads(t.to_str())
            vocab = d["model"]["vocab"]
            for b in range(256 if name != "unigram" else 0):
                if isinstance(vocab, list):
                    vocab.append(["<0x%02X>" % b, 0.0])
                else:
                    vocab["<0x%02X>" % b] = len(vocab)
            d["model"]["byte_fallback"] = name != "unigram"
            t = Tokenizer.from_str(json.dumps(d))
        t.add_tokens([AddedToken("<tool>", normalized=False)])
        bos = ("<s>", t.token_to_id("<s>"))
        t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
        t = Tokenizer.from_str(t.to_str())
        plain = json.loads(t.to_str())  # without special tokens, so that they are text
        plain["added_tokens"] = [a for a in plain["added_tokens"]
                                 if not a["special"] or a["content"] == "<unk>"]
        plain["post_processor"] = None
        if name.startswith("unigram"):  # the library's model would find them in text
            for entry in plain["model"]["vocab"][1:3]:
                entry[0] = "\ue000" + entry[0]
        plain = Tokenizer.from_str(json.dumps(plain))
        file = name.replace(" ", "-") + ".json"
        ids = [[t.encode(x, add_special_tokens=True).ids,
                plain.encode(x, add_special_tokens=False).ids] for x in texts]
        kinds.append({"name": name, "file": file, "ids": ids})
        with open(os.path.join(HERE, "data/fuzz_vocabulary", file), "w") as f:
            small = json.loads(t.to_str())
            json.dump(small, f, ensure_ascii=False, separators=(",", ":"))
    with open(os.path.join(HERE, "data/tokenizers/random.json"), "w", encoding="utf-8") as f:
        json.dump({"texts": texts, "kinds": kinds}, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    chat = json.load(open(os.path.join(HERE, "data/chat.json"), encoding="utf-8"))
    for i, entry in enumerate(chat["templates"]):
        with open(os.path.join(HERE, "data/fuzz_chat", "template-%02d" % i), "wb") as f:
            f.write(entry["template"].encode() + b"\0Hello</s><|im_end|>")


if __name__ == "__main__":
    main()
