#!/usr/bin/env python3
"""Writes tests/data/models: tiny random models of every architecture, and their logits, computed by
Hugging Face.

    python3 tests/make_models.py [OUT]        (OUT: tests/data/models beside this script)

Needs torch, transformers, tokenizers, gguf (llama.cpp's package) and numpy. The tests do not need
them, since the output is committed. Run this again only to add a model.

Each model NAME is

    NAME/          a Hugging Face folder: config.json, tokenizer.json, safetensors
    NAME.gguf      the same model as llama.cpp's converter writes it, if it is not quantized
    NAME.golden    golden.ids, golden.n_prompt, and golden.logits (len(ids), vocab) f32, which
                   transformers computes in float32

The golden logits are computed from the weights rounded to their storage type. Quantized models
(AWQ, GPTQ) are packed here from random integers as the formats define it; transformers computes
with the unpacked matrices.
"""
import json
import math
import os
import shutil
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

VOCAB = 96
N_PROMPT, N_TOTAL = 21, 40
LLAMA, MISTRAL = (LlamaConfig, LlamaForCausalLM), (MistralConfig, MistralForCausalLM)
QWEN2, QWEN3 = (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16
}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16
}

WIDE = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)  # more RoPE frequencies
SQUARE = dict(hidden_size=64, intermediate_size=64, head_dim=16)        # multiples of 32
SMALL = dict(SQUARE, num_key_value_heads=1, num_hidden_layers=1, tie_word_embeddings=True)
TWO_GROUPS = dict(SMALL, hidden_size=128, intermediate_size=256, head_dim=32)  # in ffn_down

# name, kind, storage type, style of config.json ("old": before transformers 5), other settings
MODELS = [
    ("llama", LLAMA, torch.float16, "old", dict(shards=2)),
    ("llama_mha", LLAMA, torch.float32, "old",
     dict(num_attention_heads=2, num_key_value_heads=2, head_dim=12, intermediate_size=20,
          no_kv_heads=True)),
    ("llama31", LLAMA, torch.bfloat16, "old",
     dict(WIDE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)),
    ("llama_linear", LLAMA, torch.float16, "new",
     dict(WIDE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5})),
    ("llama_bias", LLAMA, torch.float16, "new", dict(attention_bias=True, mlp_bias=True)),
    ("mistral", MISTRAL, torch.bfloat16, "old", dict(WIDE, sliding_window=None)),
    ("mistral_window", MISTRAL, torch.float16, "old", dict(sliding_window=9, head_dim=6)),
    ("qwen2", QWEN2, torch.bfloat16, "old",
     dict(tie_word_embeddings=True, sliding_window=4096, max_window_layers=2)),
    ("qwen2_yarn", QWEN2, torch.float16, "new",
     dict(num_attention_heads=2, num_key_value_heads=1, rope_parameters=YARN)),
    ("qwen2_window", QWEN2, torch.float16, "old",
     dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    ("qwen3", QWEN3, torch.bfloat16, "old", dict(WIDE, tie_word_embeddings=True)),
    ("qwen3_yarn", QWEN3, torch.float16, "old",
     dict(WIDE, rope_parameters=dict(YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.1))),
    # 4 bits. quantized: format, group size, act-order, zero points
    ("gptq_g32", LLAMA, torch.float16, "old",
     dict(SQUARE, intermediate_size=96, quantized=("gptq", 32, False, False))),
    ("gptq_g128_act", LLAMA, torch.float16, "old",
     dict(hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=1,
          tie_word_embeddings=True, quantized=("gptq", 128, True, True))),
    ("gptq_g32_act_sym", QWEN2, torch.float16, "old",
     dict(SQUARE, quantized=("gptq", 32, True, False))),
    ("gptq_v2", LLAMA, torch.float16, "old",
     dict(SQUARE, num_hidden_layers=1, quantized=("gptq_v2", -1, False, True))),
    ("awq_g32", QWEN2, torch.float16, "old",
     dict(SQUARE, intermediate_size=96, tie_word_embeddings=True,
          quantized=("awq", 32, False, True))),
    ("awq_g128", LLAMA, torch.float16, "old",
     dict(hidden_size=128, intermediate_size=128, head_dim=32, num_hidden_layers=1,
          tie_word_embeddings=True, quantized=("awq", 128, False, True))),
    ("gptq_g32_zero", LLAMA, torch.float16, "old",
     dict(SMALL, quantized=("gptq", 32, False, True))),
    ("gptq_g32_act", LLAMA, torch.float16, "old", dict(SMALL, quantized=("gptq", 32, True, True))),
    ("gptq_g128", LLAMA, torch.float16, "old",
     dict(TWO_GROUPS, intermediate_size=128, quantized=("gptq", 128, False, False))),
    ("gptq_g128_zero", LLAMA, torch.float16, "old",
     dict(TWO_GROUPS, quantized=("gptq", 128, False, True))),
    ("gptq_g128_act_sym", LLAMA, torch.float16, "old",
     dict(TWO_GROUPS, quantized=("gptq", 128, True, False))),
    ("awq_g32_sym", LLAMA, torch.float16, "old", dict(SMALL, quantized=("awq", 32, False, False))),
    ("awq_g128_sym", LLAMA, torch.float16, "old",
     dict(TWO_GROUPS, quantized=("awq", 128, False, False))),
]


def to_adjacent(w, heads):
    """Reorder the rows of q or k: in each head, row i or i + half becomes row 2i or 2i + 1."""
    halves = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:])
    return halves.swapaxes(1, 2).reshape(w.shape)


# ---- 4-bit formats ------------------------------------------------------------------------

def pack_along(q, axis, order=range(8)):
    """Pack groups of eight 4-bit integers into int32: number `order[j]` goes to bits 4j and up."""
    q = np.moveaxis(q.astype(np.uint32), axis, -1)
    q = q.reshape(*q.shape[:-1], q.shape[-1] // 8, 8)
    packed = np.zeros(q.shape[:-1], np.uint32)
    for j, k in enumerate(order):
        packed |= q[..., k] << np.uint32(4 * j)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32))


def quantized_linear(linear, prefix, how, group, act_order, zero_points, random, tensors):
    """Draw integers, scales and zero points. Put them into `tensors` packed, and into the layer
    unpacked."""
    rows, cols = linear.weight.shape
    n_groups = 1 if group < 0 else cols // group
    q = random.integers(0, 16, (cols, rows))
    gptq = how.startswith("gptq")
    low = 1 if how == "gptq" else 0  # GPTQ's version 1 stores the zero point minus one, in 4 bits
    shape = (n_groups, rows)
    zeros = random.integers(low, 16 + low, shape) if zero_points else np.full(shape, 8)
    scales = (random.uniform(0.5, 1.5, (n_groups, rows)) * 0.3 / math.sqrt(cols)).astype(np.float16)
    g_idx = np.arange(cols) // (cols if group < 0 else group)
    if act_order:
        g_idx = random.permutation(g_idx)
    w = scales[g_idx].astype(np.float32) * (q - zeros[g_idx]).astype(np.float32)  # (cols, rows)
    if gptq:
        tensors[prefix + ".qweight"] = pack_along(q, 0)
        tensors[prefix + ".qzeros"] = pack_along(zeros - low, 1)
        tensors[prefix + ".g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
    else:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors[prefix + ".qweight"] = pack_along(q, 1, order)
        tensors[prefix + ".qzeros"] = pack_along(zeros, 1, order)
    tensors[prefix + ".scales"] = torch.from_numpy(scales)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(np.ascontiguousarray(w.T)))


def quantization_config(how, group, act_order, zero_points):
    if how == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero_points,
            "version": "gemm", "backend": "autoawq", "modules_to_not_convert": None
        }
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order,
        "sym": not zero_points, "checkpoint_format": how, "damp_percent": 0.01,
        "true_sequential": True, "static_groups": False, "model_name_or_path": None,
        "lm_head": False
    }


# ---- The files ------------------------------------------------------------------------------

def byte_characters():
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    other = [b for b in range(256) if b not in keep]
    table = {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(other)}
    return [table[b] for b in range(256)]


def vocabulary():
    return [byte_characters()[b] for b in [10] + list(range(32, 126))] + ["<|end|>"]


def tokenizer_json():
    vocab = vocabulary()
    assert len(vocab) == VOCAB
    end = {"id": VOCAB - 1, "content": "<|end|>", "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False, "special": True}
    bytes_in = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                "use_regex": True}
    bytes_out = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                 "use_regex": True}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
           "vocab": {t: i for i, t in enumerate(vocab[:-1])}, "merges": []}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end],
            "normalizer": None, "pre_tokenizer": bytes_in, "post_processor": None,
            "decoder": bytes_out, "model": bpe}


def write_config(path, config, style, quantized, no_kv_heads):
    c = json.loads(config.to_json_string(use_diff=False))
    defaults = {
        "architectures", "return_dict", "output_attentions", "output_hidden_states",
        "chunk_size_feed_forward", "problem_type", "id2label", "label2id", "is_encoder_decoder",
        "_name_or_path"
    }
    c = {k: v for k, v in c.items() if k not in defaults}
    if style == "old":  # as in nearly all published models
        rope = c.pop("rope_parameters")
        c["rope_theta"] = rope.pop("rope_theta")
        c["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        c.pop("layer_types", None)
        c["torch_dtype"] = c.pop("dtype", None) or "float16"
        c["transformers_version"] = "4.45.0"
        if no_kv_heads:
            del c["num_key_value_heads"]
            c.pop("head_dim", None)
    if quantized:
        c["quantization_config"] = quantization_config(*quantized)
    with open(path, "w") as f:
        json.dump(c, f, indent=1)


def write_safetensors(folder, tensors, shards):
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    if shards == 1:
        save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        return
    names = sorted(tensors)
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
        "weight_map": {}
    }
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_file({n: tensors[n] for n in part}, os.path.join(folder, file),
                  metadata={"format": "pt"})
        index["weight_map"] |= {n: file for n in part}
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump(index, f, indent=1)


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight"
}
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down"
}


def write_gguf(path, arch, config, tensors):
    w = gguf.GGUFWriter(path, arch)
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_dimension_count(head_dim)
    if head_dim * config.num_attention_heads != config.hidden_size:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            w.add_rope_scaling_attn_factors(rope["attention_factor"] /
                                            (0.1 * math.log(rope["factor"]) + 1))
            w.add_float32(f"{arch}.rope.scaling.yarn_beta_fast", rope["beta_fast"])
            w.add_float32(f"{arch}.rope.scaling.yarn_beta_slow", rope["beta_slow"])
    if rope["rope_type"] == "llama3":  # as llama.cpp's converter computes it
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
        freqs = 1.0 / (rope["rope_theta"] ** exponents)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        old = rope["original_max_position_embeddings"]
        factors = []
        for freq in freqs:
            wavelength = 2 * math.pi / freq
            if wavelength < old / high:
                factors.append(1)
            elif wavelength > old / low:
                factors.append(rope["factor"])
            else:
                smooth = (old / wavelength - low) / (high - low)
                factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        w.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    layer_types = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None):
        w.add_sliding_window(config.sliding_window)
        if layer_types and len(set(layer_types)) > 1:
            w.add_array(f"{arch}.attention.sliding_window_pattern",
                        [t == "sliding_attention" for t in layer_types])
    vocab = vocabulary()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(vocab)
    w.add_token_types([gguf.TokenType.NORMAL] * (VOCAB - 1) + [gguf.TokenType.CONTROL])
    w.add_token_merges(["a b"])
    w.add_eos_token_id(VOCAB - 1)
    for name, t in tensors.items():
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        out = NAMES.get(name)
        if not out:
            _, _, layer, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            out = f"blk.{layer}.{PARTS[module]}.{kind}"
        x = t.float().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            x = np.ascontiguousarray(to_adjacent(x, heads))
        kind = {torch.float16: Type.F16, torch.bfloat16: Type.BF16, torch.float32: Type.F32}
        kind = kind[t.dtype]
        if x.ndim == 1:
            kind = Type.F32  # llama.cpp keeps vectors in f32
        w.add_tensor(out, gguf.quants.quantize(x, kind) if kind != Type.F32 else x, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def make(out, seed, name, kind, dtype, style, extra):
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    extra = dict(extra)
    shards, quantized = extra.pop("shards", 1), extra.pop("quantized", None)
    no_kv_heads = extra.pop("no_kv_heads", False)
    options = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
                   num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                   rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=None,
                   eos_token_id=VOCAB - 1) | extra
    if kind in (LLAMA, MISTRAL):
        options.setdefault("head_dim", 8)
    if kind == QWEN2 and not quantized:
        options["hidden_size"] = 32
    if kind == QWEN2:
        options.pop("head_dim", None)
    config = kind[0](**options)
    config._attn_implementation = "eager"
    model = kind[1](config).to(torch.float32).eval()
    tensors, packed = {}, {}
    with torch.no_grad():
        for pname, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_((1 if "norm" in pname else 0) + 0.3 * torch.randn(p.shape))
            else:  # so large that attention is concentrated and every block matters
                scale = 1.6 if ".q_proj." in pname or ".k_proj." in pname else 1.2
                scale /= math.sqrt(p.shape[1])
                if "embed" in pname and not config.tie_word_embeddings:
                    scale = 1
                p.copy_(torch.randn(p.shape) * scale)
            p.copy_(p.to(dtype).to(torch.float32))
    if quantized:
        for mname, m in model.named_modules():
            if isinstance(m, torch.nn.Linear) and "lm_head" not in mname:
                quantized_linear(m, mname, *quantized, random, packed)
    for pname, p in model.named_parameters():
        if pname.rsplit(".", 1)[0] + ".qweight" not in packed or pname.endswith(".bias"):
            tensors[pname] = p.detach().to(dtype)
    folder = os.path.join(out, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    write_config(os.path.join(folder, "config.json"), config, style, quantized, no_kv_heads)
    with open(os.path.join(folder, "tokenizer.json"), "w") as f:
        json.dump(tokenizer_json(), f, ensure_ascii=False, separators=(",", ":"))
    write_safetensors(folder, tensors | packed, shards)
    if not quantized:
        write_gguf(os.path.join(out, name + ".gguf"),
                   {"mistral": "llama"}.get(config.model_type, config.model_type), config, tensors)
    ids = torch.randint(0, VOCAB - 1, (N_TOTAL,))
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    golden = gguf.GGUFWriter(os.path.join(out, name + ".golden"), "golden")
    golden.add_array("golden.ids", ids.tolist())
    golden.add_uint32("golden.n_prompt", N_PROMPT)
    golden.add_tensor("golden.logits", logits.numpy().astype(np.float32))
    if quantized:  # the unpacked values of one matrix
        k_proj = model.model.layers[0].self_attn.k_proj.weight
        golden.add_tensor("golden.k_proj", k_proj.detach().numpy().astype(np.float32))
    golden.write_header_to_file()
    golden.write_kv_data_to_file()
    golden.write_tensors_to_file()
    golden.close()
    print(f"{name:18} logits have standard deviation {logits.std():.2f}")


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "data", "models")
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(1)
    for i, model in enumerate(MODELS):
        make(out, 100 * (i + 1), *model)


if __name__ == "__main__":
    main()
