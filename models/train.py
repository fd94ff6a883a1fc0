#!/usr/bin/env python3
"""Trains the two small language models that come with this project, from plain text.

    python3 models/train.py --data FOLDER --out models

One run of this command makes, in this order:

    OUT/eval.txt           tales kept out of training, to measure the models on
    OUT/tales.gguf         the target model (about 7 million parameters)
    OUT/tales-draft.gguf   the draft model (less than a tenth of it), same vocabulary
    OUT/loss.csv           the training curve of both
    OUT/samples.txt        ten tales told by the target at temperature 0.8
    OUT/results.json       sizes, times and bits per byte

and, in a work folder (--work, default OUT/work), the vocabulary, the tokens and
the checkpoints. Stopped halfway (Ctrl-C, power cut), the same command goes on from
the last checkpoint. It runs on a CPU or, if there is one, a CUDA GPU.

Needs: torch, numpy, tokenizers.

For readers new to training. A language model is a function with adjustable numbers
(parameters). It reads some tokens (pieces of words) and gives, for each possible
next token, a probability. Training shows it real text over and over; each step
computes how surprised the model was (the loss: minus the logarithm of the probability
it gave to the token that really came), finds for every parameter in which
direction to move to be less surprised (the gradient), and moves a little.
"""
import argparse
import csv
import glob
import hashlib
import json
import math
import os
import re
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

try:
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as e:
    sys.exit(f"train.py: missing Python package: {e.name}. Install: pip install torch numpy tokenizers")

# ---------------------------------------------------------------- settings

BOS, EOS = "<|bos|>", "<|endoftext|>"      # begin / end of a document; token ids 0 and 1
BOS_ID, EOS_ID = 0, 1
VOCAB = 4096
CONTEXT = 1024                              # longest text the model can look at, in tokens
ROPE_BASE = 10000.0
EPS = 1e-5

# Matrix rows of 256 and 768 numbers suit every GGUF quantisation, the 256-wide ones too.
TARGET = dict(name="tales", dim=256, layers=8, heads=4, kv_heads=2, ffn=768)
DRAFT = dict(name="tales-draft", dim=96, layers=2, heads=3, kv_heads=1, ffn=384)

# Books kept out of training. The corpus has no book labels, so each book is found by
# names that every one of its chapters uses and no other book does (checked against
# the sizes in SOURCES.md, to the byte). Every document with one of the names is held out.
HELD_OUT = [
    ("The Japanese Twins (Lucy Fitch Perkins)", r"\bTaro\b"),
    ("Raggedy Ann Stories and Raggedy Andy Stories (Johnny Gruelle)", r"\bRaggedy\b"),
    ("Heidi (Johanna Spyri)", r"\bHeidi\b"),
]
EVAL_BYTES_PER_BOOK = 32_000                # of each entry this much goes to eval.txt;
                                            # the rest gives the validation loss


def fail(msg):
    sys.exit("train.py: " + msg)


def write_atomic(path, data):
    """Write next to the file, then rename over it: no reader ever sees half a file."""
    tmp = f"{path}.tmp{os.getpid()}"
    with open(tmp, "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode("utf-8"))
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, path)


def save_torch(path, obj):
    tmp = f"{path}.tmp{os.getpid()}"
    torch.save(obj, tmp)
    os.replace(tmp, path)


# ---------------------------------------------------------------- text

def read_documents(folder):
    """All documents of all .txt files of the folder, each only once."""
    if not os.path.isdir(folder):
        fail(f"--data {folder}: no such folder")
    files = sorted(glob.glob(os.path.join(folder, "*.txt")))
    if not files:
        fail(f"--data {folder}: no .txt file in it")
    docs, seen = [], set()
    for path in files:
        try:
            with open(path, encoding="utf-8") as f:
                text = f.read()
        except (OSError, UnicodeDecodeError) as e:
            fail(f"cannot read {path}: {e}")
        for doc in re.split(r"^<\|endoftext\|>\n?", text, flags=re.M):
            doc = doc.strip("\n")
            key = hashlib.sha256(doc.encode()).digest()
            if doc and key not in seen:
                seen.add(key)
                docs.append(doc)
    size = sum(len(d.encode()) for d in docs)
    if size < 1_000_000 or len(docs) < 20:
        fail(f"--data {folder}: only {len(docs)} documents, {size} bytes; at least 20 documents "
             f"and 1 MB are needed (a line {EOS} ends each document)")
    return docs


def split_documents(docs):
    """-> (training documents, evaluation documents, validation documents, report lines)"""
    train, books = [], [[] for _ in HELD_OUT]
    for doc in docs:
        hits = [i for i, (_, pattern) in enumerate(HELD_OUT) if re.search(pattern, doc)]
        (books[hits[0]] if hits else train).append(doc)
    evals, vals, report = [], [], []
    for (title, _), book in zip(HELD_OUT, books):
        used = 0
        for doc in book:
            if used + len(doc.encode()) <= EVAL_BYTES_PER_BOOK:
                evals.append(doc)
                used += len(doc.encode())
            else:
                vals.append(doc)
        report.append(f"{title}: {len(book)} documents, {sum(len(d.encode()) for d in book)} bytes "
                      f"held out, {used} of them in eval.txt")
    if not evals or not vals:               # some other corpus: hold out its last documents
        n = max(4, len(docs) // 100)
        train, evals, vals = docs[:-n], docs[-n:-n // 2], docs[-n // 2:]
        report = [f"no held-out book found; the last {n} documents are held out instead"]
    return train, evals, vals, report


def make_vocabulary(train_docs, path):
    """Byte-level BPE. Start: 256 tokens, one per byte value. Then join, again and again,
    the most frequent pair of neighbours into a new token, until there are VOCAB tokens.
    Words are first split off by the regular expression of GPT-2, so that no token
    spans two words."""
    if not os.path.exists(path):
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tok.decoder = decoders.ByteLevel()
        tok.train_from_iterator(train_docs, trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[BOS, EOS], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        write_atomic(path, tok.to_str())
    tok = Tokenizer.from_file(path)
    if tok.get_vocab_size() != VOCAB:
        fail(f"{path} has {tok.get_vocab_size()} tokens, not {VOCAB}: too little text, or an old file "
             f"(delete the work folder)")
    return tok


def encode(tok, docs):
    """Each document as an array of token ids: BOS, its text, EOS."""
    out = []
    for i in range(0, len(docs), 512):
        for e in tok.encode_batch(docs[i:i + 512], add_special_tokens=False):
            out.append(np.array([BOS_ID] + e.ids + [EOS_ID], dtype=np.uint16))
    return out


class Batches:
    """Endless shuffled training rows. In every pass over the text ("epoch") the documents
    are put in a new order, joined to one long stream and cut into rows of `length`
    inputs. Everything follows from (seed, epoch, length), so that a resumed
    run sees the rows that the interrupted one would have seen."""

    def __init__(self, docs, seed, state=None):
        self.docs, self.seed = docs, seed
        self.epoch, self.pos, self.length = state or (0, 0, 0)
        self.rows = None

    def state(self):
        return (self.epoch, self.pos, self.length)

    def _lay_out(self):
        rng = np.random.default_rng([self.seed, self.epoch, self.length])
        order = rng.permutation(len(self.docs))
        self.stream = np.concatenate([self.docs[i] for i in order])
        begins = np.flatnonzero(self.stream == BOS_ID)
        rows, at = [], int(rng.integers(0, self.length))
        while at + self.length + 1 <= len(self.stream):
            # If a document begins shortly after this place, begin the row there: rows that
            # begin with BOS are what the model will meet in use.
            i = np.searchsorted(begins, at)
            if i < len(begins) and begins[i] - at < self.length // 8:
                at = int(begins[i])
                if at + self.length + 1 > len(self.stream):
                    break
            rows.append(at)
            at += self.length
        self.rows = rng.permutation(np.array(rows))

    def next(self, count, length):
        if length != self.length:
            self.epoch, self.pos, self.length, self.rows = self.epoch + 1, 0, length, None
        if self.rows is None:
            self._lay_out()
        if self.pos + count > len(self.rows):
            self.epoch, self.pos = self.epoch + 1, 0
            self._lay_out()
        starts = self.rows[self.pos:self.pos + count]
        self.pos += count
        rows = np.stack([self.stream[s:s + length + 1] for s in starts]).astype(np.int64)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


# ---------------------------------------------------------------- the model

def rope_tables(head_dim, length):
    """Cosines and sines that turn the pairs (x0,x1), (x2,x3), ... of a query or key by an
    angle that grows with its position; this tells the model how far apart tokens are."""
    freq = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq[None, :]
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):                     # x: batch, position, head, head_dim
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def attention(q, k, v):
    """Each position mixes the values v of the positions up to itself, weighted by how well
    its query fits their keys. q: batch, position, head, head_dim; k and v have fewer
    heads, each serving `share` neighbouring query heads."""
    B, T, H, d = q.shape
    K = k.shape[2]
    share = H // K
    if q.device.type != "cpu" or T > 512:
        k, v = (t.repeat_interleave(share, 2).transpose(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)
    # On a CPU, for short rows, plain products of matrices are twice as fast.
    q = (q * d ** -0.5).view(B, T, K, share, d).permute(0, 2, 3, 1, 4).reshape(B * K, share * T, d)
    k, v = (t.transpose(1, 2).reshape(B * K, T, d) for t in (k, v))
    later = torch.full((T, T), float("-inf")).triu(1)            # nobody sees the future
    fit = torch.bmm(q, k.mT).view(B * K, share, T, T).float() + later
    y = torch.bmm(F.softmax(fit, -1).to(v.dtype).view(B * K, share * T, T), v)
    return y.view(B, K, share, T, d).permute(0, 3, 1, 2, 4).reshape(B, T, H, d)


class Norm(nn.Module):
    """Scale a vector to root mean square 1, then by learned weights."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        return y * self.weight


class Block(nn.Module):
    """Attention (each position gathers from earlier ones), then a feed-forward net
    (each position thinks by itself). Both add to the stream they read."""

    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.hd = c["heads"], c["kv_heads"], c["dim"] // c["heads"]
        dim, kv, ffn = c["dim"], self.kv_heads * self.hd, c["ffn"]
        self.attn_norm, self.ffn_norm = Norm(dim), Norm(dim)
        self.attn_q = nn.Linear(dim, dim, bias=False)
        self.attn_k = nn.Linear(dim, kv, bias=False)
        self.attn_v = nn.Linear(dim, kv, bias=False)
        self.attn_output = nn.Linear(dim, dim, bias=False)
        self.ffn_gate = nn.Linear(dim, ffn, bias=False)
        self.ffn_up = nn.Linear(dim, ffn, bias=False)
        self.ffn_down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x, cos, sin):
        B, T, D = x.shape
        h = self.attn_norm(x)
        q = rotate(self.attn_q(h).view(B, T, self.heads, self.hd), cos, sin)
        k = rotate(self.attn_k(h).view(B, T, self.kv_heads, self.hd), cos, sin)
        v = self.attn_v(h).view(B, T, self.kv_heads, self.hd)
        y = attention(q, k, v).reshape(B, T, D)
        x = x + self.attn_output(y)
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.token_embd = nn.Embedding(VOCAB, c["dim"])
        self.blk = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.output_norm = Norm(c["dim"])
        cos, sin = rope_tables(c["dim"] // c["heads"], CONTEXT)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        nn.init.normal_(self.token_embd.weight, std=0.02)
        for name, p in self.named_parameters():
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                nn.init.zeros_(p)            # every block begins as "change nothing"
            elif p.dim() == 2 and "token_embd" not in name:
                nn.init.normal_(p, std=0.6 / math.sqrt(p.shape[1]))

    def forward(self, ids):                  # ids: batch, position -> scores of every next token
        T = ids.shape[1]
        x = self.token_embd(ids)
        for b in self.blk:
            x = b(x, self.cos[:T], self.sin[:T])
        # The table of token vectors serves a second time, to score the next token.
        return F.linear(self.output_norm(x), self.token_embd.weight)

    def parameter_count(self):
        return sum(p.numel() for p in self.parameters())


# ---------------------------------------------------------------- the cores

class Workers:
    """Runs a function on several items at once, one thread per core. Each thread takes the
    next item when it has done its last, so a core that other programs slow down does
    not hold up the others."""

    def __init__(self, count):
        self.count = count
        self.pool = ThreadPoolExecutor(count) if count > 1 else None

    def map(self, function, *items):
        return list(self.pool.map(function, *items) if self.pool else map(function, *items))


# ---------------------------------------------------------------- the optimiser

def orthogonalise(m):
    """For a stack of matrices U S V' (singular value decomposition) return about U V': the
    same directions, all equally strong. Only products of matrices are needed: each round
    applies to the singular values s the polynomial a s + b s^3 + c s^5, which draws all of
    (0, 1] near 1 in five rounds."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = m.shape[-2] > m.shape[-1]
    x = m.bfloat16()
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        g = x @ x.mT
        x = a * x + (b * g + c * (g @ g)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """For the weight matrices: momentum, whose matrix is orthogonalised before use, so
    that rare directions are learned as fast as common ones. Learns from the same text
    notably more than Adam does. Matrices of one shape are handled as one stack."""

    def __init__(self, params, momentum=0.95, decay=0.1):
        self.momentum, self.decay = momentum, decay
        shapes = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = list(shapes.values())
        self.buf = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    def step(self, lr, workers):
        @torch.no_grad()
        def update(group, buf):
            grad = torch.stack([p.grad for p in group]).float()
            buf.lerp_(grad, 1 - self.momentum)
            change = orthogonalise(grad.lerp(buf, self.momentum))
            rows, cols = group[0].shape
            size = lr * max(1.0, rows / cols) ** 0.5
            for p, u in zip(group, change):
                p.mul_(1 - lr * self.decay).add_(u, alpha=-size)

        workers.map(update, self.groups, self.buf)


class Optimiser:
    """Muon for the matrices inside the blocks, AdamW for the token vectors and norms."""

    def __init__(self, model, lr_muon, lr_adam):
        inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "token_embd" not in n]
        other = [p for n, p in model.named_parameters() if p.dim() != 2 or "token_embd" in n]
        self.lr_muon, self.lr_adam = lr_muon, lr_adam
        self.muon = Muon(inner)
        self.adam = torch.optim.AdamW(other, lr=lr_adam, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)

    def step(self, scale, workers):
        self.muon.step(self.lr_muon * scale, workers)
        for g in self.adam.param_groups:
            g["lr"] = self.lr_adam * scale
        self.adam.step()

    def state(self):
        return {"muon": self.muon.buf, "adam": self.adam.state_dict()}

    def load(self, s):
        for mine, saved in zip(self.muon.buf, s["muon"]):
            mine.copy_(saved)
        self.adam.load_state_dict(s["adam"])


# ---------------------------------------------------------------- measuring

def autocast(device):
    """Inside: matrix products in bf16 (half the bytes, and fast units for it)."""
    return torch.autocast(device.type, dtype=torch.bfloat16)


def validation_loss(model, docs, device, workers, tokens=32768, length=512):
    """Mean loss (nats per token) on rows of text that training never sees."""
    stream = torch.from_numpy(np.concatenate(docs)[:tokens + 1].astype(np.int64)).to(device)
    n = (len(stream) - 1) // length

    @torch.no_grad()
    def loss_sum(start):
        part = stream[start * length:min(start + 8, n) * length + 1]
        with autocast(device):
            logits = model(part[:-1].view(-1, length))
        return F.cross_entropy(logits.float().flatten(0, 1), part[1:], reduction="sum").item()

    return sum(workers.map(loss_sum, range(0, n, 8))) / (n * length)


def bits_per_byte(model, token_docs, text_docs, device, workers):
    """Total surprise over whole documents, per byte of their text. Each document stands
    alone: BOS, text, EOS; EOS is predicted too. A document longer than the context is
    read in windows that advance by half a context; every token is scored once, in the
    first window that has it (so from the second window on with half a context before it)."""

    @torch.no_grad()
    def surprise(doc):
        ids = torch.from_numpy(doc.astype(np.int64)).to(device)
        nats, scored, start = 0.0, 1, 0      # BOS is given
        while scored < len(ids):
            end = min(start + CONTEXT, len(ids) - 1)
            logits = model(ids[None, start:end])[0].float()      # row i scores token start + i + 1
            nats += F.cross_entropy(logits[scored - 1 - start:], ids[scored:end + 1], reduction="sum").item()
            scored = end + 1
            start += CONTEXT // 2
        return nats

    nats = sum(workers.map(surprise, token_docs))
    count = sum(len(d) - 1 for d in token_docs)
    size = sum(len(d.encode()) for d in text_docs)
    return nats / math.log(2) / size, nats / count, count, size


@torch.no_grad()
def tell(model, tok, device, count=10, length=260, temperature=0.8, seed=1):
    """Let the model tell tales: draw each next token by its probability. A temperature
    below 1 makes likely tokens likelier still."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.full((count, 1), BOS_ID, dtype=torch.long)
    for _ in range(length):
        with autocast(device):
            logits = model(ids[:, -CONTEXT:].to(device))[:, -1]
        p = F.softmax(logits.float().cpu() / temperature, -1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=gen)], 1)
    out = []
    for row in ids[:, 1:].tolist():
        ended = EOS_ID in row
        row = row[:row.index(EOS_ID)] if ended else row
        out.append(tok.decode(row, skip_special_tokens=False) + ("" if ended else " [...]"))
    return out


# ---------------------------------------------------------------- GGUF

def gguf_bytes(model, tok):
    """The model as a GGUF file (version 3): a header, then key/value pairs, then the list
    of tensors, then their numbers; every tensor at a multiple of 32 bytes. Matrices as
    16-bit floats, the short vectors of the norms as 32-bit floats."""
    U8, U32, F32, BOOL, STR, ARR, I32 = 0, 4, 6, 7, 8, 9, 5
    ALIGN = 32

    def string(s):
        b = s.encode("utf-8")
        return struct.pack("<Q", len(b)) + b

    def value(kind, v):
        if kind == STR:
            return string(v)
        return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], v)

    def pair(key, kind, v):
        return string(key) + struct.pack("<I", kind) + value(kind, v)

    def array(key, kind, items):
        return (string(key) + struct.pack("<IIQ", ARR, kind, len(items)) +
                b"".join(value(kind, v) for v in items))

    c = model.c
    vocab = sorted(tok.get_vocab().items(), key=lambda kv: kv[1])
    merges = json.loads(tok.to_str())["model"]["merges"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in merges]
    pairs = [
        pair("general.architecture", STR, "llama"),
        pair("general.name", STR, c["name"]),
        pair("general.description", STR, "small story model trained on public-domain children's tales"),
        pair("general.file_type", U32, 1),                       # 1: mostly 16-bit floats
        pair("general.quantization_version", U32, 2),
        pair("general.alignment", U32, ALIGN),
        pair("llama.vocab_size", U32, VOCAB),
        pair("llama.context_length", U32, CONTEXT),
        pair("llama.embedding_length", U32, c["dim"]),
        pair("llama.block_count", U32, c["layers"]),
        pair("llama.feed_forward_length", U32, c["ffn"]),
        pair("llama.attention.head_count", U32, c["heads"]),
        pair("llama.attention.head_count_kv", U32, c["kv_heads"]),
        pair("llama.attention.layer_norm_rms_epsilon", F32, EPS),
        pair("llama.rope.dimension_count", U32, c["dim"] // c["heads"]),
        pair("llama.rope.freq_base", F32, ROPE_BASE),
        pair("tokenizer.ggml.model", STR, "gpt2"),
        pair("tokenizer.ggml.pre", STR, "gpt-2"),
        array("tokenizer.ggml.tokens", STR, [t for t, _ in vocab]),
        array("tokenizer.ggml.token_type", I32, [3 if i in (BOS_ID, EOS_ID) else 1 for _, i in vocab]),
        array("tokenizer.ggml.merges", STR, merges),
        pair("tokenizer.ggml.bos_token_id", U32, BOS_ID),
        pair("tokenizer.ggml.eos_token_id", U32, EOS_ID),
        pair("tokenizer.ggml.add_bos_token", BOOL, True),
        pair("tokenizer.ggml.add_eos_token", BOOL, False),
    ]
    infos, blobs, offset = [], [], 0
    for name, p in model.named_parameters():                     # names are those of GGUF already
        data = p.detach().cpu().float().numpy()
        kind = 1 if data.ndim == 2 else 0                        # 1: f16, 0: f32
        blob = data.astype("<f2" if kind else "<f4")
        if not np.isfinite(blob).all():
            fail(f"{name}: a number does not fit in 16 bits")
        blob = blob.tobytes()
        infos.append(string(name) + struct.pack("<I", data.ndim) +
                     b"".join(struct.pack("<Q", n) for n in reversed(data.shape)) +
                     struct.pack("<IQ", kind, offset))
        blob += bytes(-len(blob) % ALIGN)
        blobs.append(blob)
        offset += len(blob)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % ALIGN) + b"".join(blobs)


# ---------------------------------------------------------------- training

def lr_scale(progress, warmup, hold):
    """Step size, as a share of the largest: up from 0, level, then straight down to 0.
    Big steps find the way fast, small ones at the end settle the details."""
    if progress < warmup:
        return progress / warmup
    return 1.0 if progress < hold else max(0.0, (1 - progress) / (1 - hold))


def train_model(c, args, minutes, train_tok, val_tok, val_bytes_per_token, tok, device, workers, teacher=None):
    """Train one model; returns it. With a teacher (a trained bigger model) the student learns
    to give the teacher's whole table of probabilities, which says more than the one token
    that came."""
    torch.manual_seed(args.seed)
    model = Model(c).to(device)
    opt = Optimiser(model, args.lr_muon, args.lr_adam)
    ckpt_path = os.path.join(args.work, c["name"] + ".pt")
    gguf_path = os.path.join(args.out, c["name"] + ".gguf")
    step, spent, tokens, rows, batch_state = 0, 0.0, 0, [], None
    if os.path.exists(ckpt_path):
        ck = torch.load(ckpt_path, map_location=device, weights_only=False)
        if ck["shape"] != c:
            fail(f"{ckpt_path} is of another shape {ck['shape']}; delete the work folder")
        model.load_state_dict(ck["model"])
        opt.load(ck["opt"])
        step, spent, tokens, rows, batch_state = ck["step"], ck["spent"], ck["tokens"], ck["rows"], ck["batches"]
        print(f"{c['name']}: resumed at step {step}, {spent / 60:.1f} min", flush=True)
    batches = Batches(train_tok, args.seed, batch_state)
    budget = minutes * 60

    def loss_of(x, y):
        with autocast(device):
            logits = model(x).float().flatten(0, 1)
            if teacher is None:
                return F.cross_entropy(logits, y.flatten())
            with torch.no_grad():
                goal = F.softmax(teacher(x).float().flatten(0, 1), -1)
            return -(goal * F.log_softmax(logits, -1)).sum(-1).mean()

    run = torch.compile(loss_of, dynamic=False) if args.compile else loss_of

    params = list(model.parameters())

    def gradient(x, y):
        loss = run(x, y)
        return loss.item(), torch.autograd.grad(loss, params)

    def checkpoint():
        save_torch(ckpt_path, dict(shape=c, model=model.state_dict(), opt=opt.state(), step=step, spent=spent,
                                   tokens=tokens, rows=rows, batches=batches.state()))
        write_atomic(gguf_path, gguf_bytes(model, tok))

    def done():
        return step >= args.max_steps if args.max_steps else spent >= budget

    print(f"{c['name']}: {model.parameter_count():,} parameters, {device.type}", flush=True)
    checkpoint()
    last_saved, ema, usual, last_length = time.time(), None, [], 0
    while not done():
        progress = step / args.max_steps if args.max_steps else spent / budget
        length = args.length if progress < args.long_from else CONTEXT
        t0 = time.time()
        if length != last_length and args.compile:               # compile once, in one thread
            blank = torch.zeros(max(1, args.micro_tokens // length), length, dtype=torch.long, device=device)
            workers.map(gradient, [blank], [blank])
        x, y = batches.next(args.batch_tokens // length, length)
        x, y = x.to(device), y.to(device)
        parts = -(-x.numel() // args.micro_tokens)               # in parts, to bound memory
        results = workers.map(gradient, x.chunk(parts), y.chunk(parts))
        share = 1 / len(results)
        total = sum(loss for loss, _ in results) * share
        for p, *grads in zip(params, *(g for _, g in results)):
            p.grad = sum(grads[1:], grads[0]) * share
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scale = lr_scale(progress, args.warmup, args.hold)
        opt.step(scale, workers)
        # Time counts up to three usual steps per step: a pause of the machine, or the
        # compiler at work, must not eat the budget.
        took = time.time() - t0
        if usual:
            spent += min(took, 3 * sorted(usual)[len(usual) // 2])
            usual = usual[-50:]
        usual = usual + [took] if length == last_length else []
        last_length = length
        step += 1
        tokens += x.numel()
        ema = total if ema is None else ema + 0.02 * (total - ema)
        if step % args.log_every == 0 or done():
            val = validation_loss(model, val_tok, device, workers)
            row = dict(model=c["name"], step=step, minutes=round(spent / 60, 2), tokens=tokens, context=length,
                       lr_share=round(scale, 4), train_loss=round(ema, 4), val_loss=round(val, 4),
                       val_bits_per_byte=round(val / math.log(2) / val_bytes_per_token, 4))
            rows.append(row)
            print(" ".join(f"{k}={v}" for k, v in row.items()), f"tok/s={x.numel() / took:.0f}", flush=True)
            with open(os.path.join(args.work, "STATUS"), "w") as f:
                f.write(f"pid {os.getpid()} {time.strftime('%H:%M:%S', time.gmtime())} {row} of {minutes} min\n")
        if time.time() - last_saved > args.save_every:
            checkpoint()
            last_saved = time.time()
    checkpoint()
    return model.eval(), rows, dict(steps=step, tokens=tokens, minutes=round(spent / 60, 1))


def keep_memory():
    """glibc hands big buffers back to the system after each use and gets them anew, page by
    page, at each step: half of the time on a CPU. Tell it to keep them. And let each
    operation use one core; the cores share the work by rows instead (class Workers).
    These settings are read only at the start of a program, so start it again."""
    keep = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "40000000000", "MALLOC_ARENA_MAX": "1",
            "MALLOC_TOP_PAD_": "268435456", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux" and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable] + sys.argv, {**os.environ, **keep})


def main():
    ap = argparse.ArgumentParser(description="Train the bundled story models.")
    ap.add_argument("--data", required=True, help="folder of .txt files; a line <|endoftext|> ends each document")
    ap.add_argument("--out", default="models", help="where the models go")
    ap.add_argument("--work", help="checkpoints and vocabulary (default: OUT/work)")
    ap.add_argument("--max-minutes", type=float, default=90, help="training time of the target")
    ap.add_argument("--draft-minutes", type=float, default=12, help="training time of the draft")
    ap.add_argument("--max-steps", type=int, default=0, help="bound by steps instead of minutes")
    ap.add_argument("--device", default="auto", help="auto, cpu or cuda")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--length", type=int, default=256, help="row length (context) for most of the training")
    ap.add_argument("--long-from", type=float, default=0.85, help=f"from this share on, rows of {CONTEXT}")
    ap.add_argument("--batch-tokens", type=int, default=8192, help="tokens per step")
    ap.add_argument("--micro-tokens", type=int, default=0, help="tokens at once (0: 2048 per core, all on a GPU)")
    ap.add_argument("--lr-muon", type=float, default=0.02)
    ap.add_argument("--lr-adam", type=float, default=0.004)
    ap.add_argument("--warmup", type=float, default=0.01)
    ap.add_argument("--hold", type=float, default=0.3, help="share of the training after which steps get smaller")
    ap.add_argument("--draft-loss", choices=("distill", "plain"), default="distill")
    ap.add_argument("--log-every", type=int, default=150)
    ap.add_argument("--save-every", type=float, default=120, help="seconds between checkpoints")
    ap.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    ap.add_argument("--no-compile", dest="compile", action="store_false", help="do not use torch.compile")
    args = ap.parse_args()

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu":
        keep_memory()
    elif not torch.cuda.is_available():
        fail(f"--device {args.device}: no such device here; try --device cpu")
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    args.micro_tokens = args.micro_tokens or (2048 if device.type == "cpu" else args.batch_tokens)
    if min(args.micro_tokens, args.batch_tokens) < CONTEXT:
        fail(f"--micro-tokens and --batch-tokens must be at least {CONTEXT}")
    workers = Workers(args.threads if device.type == "cpu" else 1)

    args.work = args.work or os.path.join(args.out, "work")
    os.makedirs(args.out, exist_ok=True)
    os.makedirs(args.work, exist_ok=True)

    docs = read_documents(args.data)
    train_docs, eval_docs, val_docs, report = split_documents(docs)
    print("\n".join(report))
    write_atomic(os.path.join(args.out, "eval.txt"), "".join(f"{d}\n{EOS}\n" for d in eval_docs))
    tok = make_vocabulary(train_docs, os.path.join(args.work, "vocabulary.json"))
    train_tok, eval_tok, val_tok = (encode(tok, d) for d in (train_docs, eval_docs, val_docs))
    val_bpt = sum(len(d.encode()) for d in val_docs) / sum(len(d) - 1 for d in val_tok)
    print(f"training: {len(train_docs)} documents, {sum(len(d.encode()) for d in train_docs):,} bytes, "
          f"{sum(map(len, train_tok)):,} tokens", flush=True)

    target, rows, info = train_model(TARGET, args, args.max_minutes, train_tok, val_tok, val_bpt, tok, device,
                                     workers)
    for p in target.parameters():
        p.requires_grad_(False)
    teacher = target if args.draft_loss == "distill" else None
    draft, draft_rows, draft_info = train_model(DRAFT, args, args.draft_minutes, train_tok, val_tok, val_bpt,
                                                tok, device, workers, teacher)

    rows = rows + draft_rows
    with open(os.path.join(args.out, "loss.csv.tmp"), "w", newline="") as f:
        w = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        w.writeheader()
        w.writerows(rows)
    os.replace(f.name, os.path.join(args.out, "loss.csv"))

    results = {}
    for model, facts in ((target, info), (draft, draft_info)):
        with torch.no_grad():                # measure what the file holds: 16-bit matrices
            for p in model.parameters():
                if p.dim() == 2:
                    p.copy_(p.half().float())
        bpb, nats, count, size = bits_per_byte(model, eval_tok, eval_docs, device, workers)
        name = model.c["name"]
        results[name] = dict(facts, parameters=model.parameter_count(), shape=model.c,
                             file_bytes=os.path.getsize(os.path.join(args.out, name + ".gguf")),
                             eval_bits_per_byte=round(bpb, 4), eval_nats_per_token=round(nats, 4),
                             eval_tokens=count, eval_bytes=size)
        print(name, results[name])
    write_atomic(os.path.join(args.out, "results.json"), json.dumps(results, indent=1) + "\n")
    tales = tell(target, tok, device)
    write_atomic(os.path.join(args.out, "samples.txt"),
                 "".join(f"--- sample {i + 1}\n{t}\n\n" for i, t in enumerate(tales)))


if __name__ == "__main__":
    main()
