#!/usr/bin/env python3
"""Writes tests/data/golden: tiny random Llama models and their logits, computed by Hugging Face.

    python3 tests/make_golden.py [OUT]        (OUT: tests/data/golden beside this script)

Needs torch, transformers, gguf (llama.cpp's package) and numpy. The tests do not need them, since
the output is committed. Run this again only to add a shape.

Each model is two files, both GGUF:

    NAME.gguf     the model: a byte-level vocabulary of 288 tokens, weights drawn from a seed
    NAME.golden   the expected output: golden.ids (a prompt and its greedy continuation),
                  golden.n_prompt, and golden.logits (len(ids), vocab) f32, after every token

No code of llm.h takes part: the gguf package rounds the weights to their storage type and writes
the files, and transformers computes the logits in float32 from the rounded values. So an f32 copy
of a file must give these logits up to float rounding, and the file itself up to what an engine
loses by rounding its activations.

Besides the names, the weights in a "llama" GGUF file differ from Hugging Face's in two ways. RoPE
rotates pairs of dimensions: Hugging Face pairs i with i + half, GGUF's "llama" pairs 2i with
2i + 1, so `to_adjacent` reorders the rows of each head of q and k, as llama.cpp's converter does.
And GGUF lists a tensor's dimensions from the contiguous one on (the gguf package reverses them).
"""
import os
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 288
N_PROMPT, N_TOTAL = 21, 37  # the sequence ends inside its third block of 16

# 48 and 80 (dim and hidden of mha_48) are not multiples of 32, so no block format can hold them.
# In "wide" and "head64", heads x head_dim is not dim, so the file must give head_dim.
MODELS = [
    # name       type       dim layers heads kv head_dim hidden tied   rope base  epsilon
    ("gqa_4_2",  Type.Q8_0,  64, 2,     4,    2, 16,      96,    False, 10000.0,   1e-5),
    ("gqa_8_2",  Type.Q4_0,  64, 2,     8,    2, 8,       64,    True,  10000.0,   1e-6),
    ("mha_48",   Type.BF16,  48, 2,     4,    4, 12,      80,    True,  10000.0,   1e-5),
    ("mqa_4_1",  Type.F16,   32, 3,     4,    1, 8,       64,    True,  500000.0,  1e-5),
    ("wide",     Type.Q8_0,  32, 2,     4,    2, 32,      64,    False, 1000000.0, 1e-5),
    ("head64",   Type.Q4_0,  64, 1,     2,    1, 64,      64,    True,  10000.0,   1e-5),
    ("bias",     Type.F16,   32, 2,     4,    2, 8,       64,    True,  10000.0,   1e-5),
]
WITH_BIAS = {"bias"}  # on q, k, v and the attention's output


def to_adjacent(w, heads):
    """Reorder the rows of q or k: in each head, row i or i + half becomes row 2i or 2i + 1."""
    rows, cols = w.shape
    return w.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def to_halves(w, heads):
    rows, cols = w.shape
    return w.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def byte_characters():
    """GPT-2's printable character for each byte."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    other = [b for b in range(256) if b not in keep]
    table = {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(other)}
    return [table[b] for b in range(256)]


def add_vocabulary(writer):
    tokens = byte_characters()
    merges = []
    pairs = ("t h,h e,th e,Ġ the,i n,e r,a n,an d,Ġ and,o n,r e,e n,o u,Ġ t,Ġ a,Ġ s,h i,Ġ w,i t,"
             "o r,i s,a t,Ġ b,l l,e s,n d,v e,Ġ o,Ġ f,Ġ m")
    for pair in pairs.split(","):
        merges.append(pair)
        tokens.append(pair.replace(" ", ""))
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * 2
    tokens += ["<|bos|>", "<|endoftext|>"]
    assert len(tokens) == VOCAB and len(set(tokens)) == VOCAB
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_add_bos_token(False)


def make(out, seed, name, kind, dim, layers, heads, kv_heads, head_dim, hidden, tied, base,
         epsilon):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=dim, intermediate_size=hidden,
                         num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads, head_dim=head_dim,
                         max_position_embeddings=128, rms_norm_eps=epsilon,
                         tie_word_embeddings=tied,
                         rope_parameters={"rope_type": "default", "rope_theta": base},
                         attention_bias=name in WITH_BIAS, mlp_bias=False, hidden_act="silu",
                         bos_token_id=None, eos_token_id=None)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    expected = base ** (-np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), expected, rtol=1e-5)

    writer = gguf.GGUFWriter(os.path.join(out, name + ".gguf"), "llama")
    writer.add_name(f"golden {name}")
    writer.add_context_length(128)
    writer.add_embedding_length(dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_freq_base(base)
    writer.add_rope_dimension_count(head_dim)
    if heads * head_dim != dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    add_vocabulary(writer)

    def put(parameter, tensor_name, spread, heads_to_reorder=0):
        """Draw a matrix, round it to its storage type, write it and put the result in the model."""
        rows, cols = parameter.shape
        w = (torch.randn(rows, cols) * spread).numpy()
        if heads_to_reorder:
            w = to_adjacent(w, heads_to_reorder)
        packed = gguf.quants.quantize(np.ascontiguousarray(w), kind)
        writer.add_tensor(tensor_name, packed, raw_dtype=kind)
        w = gguf.quants.dequantize(packed, kind).reshape(rows, cols)
        if heads_to_reorder:
            w = to_halves(w, heads_to_reorder)
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(w)))

    def put_norm(parameter, tensor_name):
        w = (1 + 0.3 * torch.randn(parameter.shape)).numpy().astype(np.float32)
        writer.add_tensor(tensor_name, w)
        parameter.copy_(torch.from_numpy(w))

    def put_bias(linear, tensor_name, heads_to_reorder=0):
        if linear.bias is None:
            return
        b = (0.5 * torch.randn(linear.bias.shape)).numpy().astype(np.float32)
        stored = to_adjacent(b[:, None], heads_to_reorder)[:, 0].copy() if heads_to_reorder else b
        writer.add_tensor(tensor_name, stored)
        linear.bias.copy_(torch.from_numpy(b))

    # Weights so large that attention is concentrated on few positions and every block matters.
    # With the usual small initial weights, wrong attention would hardly change the logits.
    with torch.no_grad():
        put(model.model.embed_tokens.weight, "token_embd.weight", 1 / np.sqrt(dim) if tied else 1)
        for i, layer in enumerate(model.model.layers):
            a, m, p = layer.self_attn, layer.mlp, f"blk.{i}."
            put_norm(layer.input_layernorm.weight, p + "attn_norm.weight")
            put(a.q_proj.weight, p + "attn_q.weight", 1.6 / np.sqrt(dim), heads)
            put(a.k_proj.weight, p + "attn_k.weight", 1.6 / np.sqrt(dim), kv_heads)
            put(a.v_proj.weight, p + "attn_v.weight", 1 / np.sqrt(dim))
            put(a.o_proj.weight, p + "attn_output.weight", 1 / np.sqrt(heads * head_dim))
            put_bias(a.q_proj, p + "attn_q.bias", heads)
            put_bias(a.k_proj, p + "attn_k.bias", kv_heads)
            put_bias(a.v_proj, p + "attn_v.bias")
            put_bias(a.o_proj, p + "attn_output.bias")
            put_norm(layer.post_attention_layernorm.weight, p + "ffn_norm.weight")
            put(m.gate_proj.weight, p + "ffn_gate.weight", 1.5 / np.sqrt(dim))
            put(m.up_proj.weight, p + "ffn_up.weight", 1.5 / np.sqrt(dim))
            put(m.down_proj.weight, p + "ffn_down.weight", 1 / np.sqrt(hidden))
        put_norm(model.model.norm.weight, "output_norm.weight")
        if not tied:
            put(model.lm_head.weight, "output.weight", 2 / np.sqrt(dim))
        else:
            assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    # Greedy decoding over the whole sequence each time, without a cache. The second-best token must
    # be clearly less likely, so that rounding cannot change the choice.
    ids = torch.randint(0, VOCAB - 2, (N_PROMPT,)).tolist()
    with torch.no_grad():
        while True:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            if len(ids) == N_TOTAL:
                break
            special = torch.tensor([VOCAB - 2, VOCAB - 1])
            best = torch.topk(logits[-1].clone().index_fill_(0, special, -1e9), 2)
            margin = float(best.values[0] - best.values[1])
            if margin < 5e-3 or int(torch.argmax(logits[-1])) >= VOCAB - 2:
                return False  # the caller tries another seed
            ids.append(int(best.indices[0]))
    golden = gguf.GGUFWriter(os.path.join(out, name + ".golden"), "golden")
    golden.add_array("golden.ids", ids)
    golden.add_uint32("golden.n_prompt", N_PROMPT)
    golden.add_tensor("golden.logits", logits.numpy().astype(np.float32))
    golden.write_header_to_file()
    golden.write_kv_data_to_file()
    golden.write_tensors_to_file()
    golden.close()
    distinct = len(set(ids[N_PROMPT:]))
    print(f"{name:10} seed {seed}: logits have standard deviation {logits.std():.3f}, "
          f"{distinct} of {N_TOTAL - N_PROMPT} tokens are different")
    return True


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "data", "golden")
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(1)
    for i, shape in enumerate(MODELS):
        seed = 100 * (i + 1)
        while not make(out, seed, *shape):
            seed += 1


if __name__ == "__main__":
    main()
