#!/usr/bin/env python3
"""Writes tests/data/models: tiny random models of every architecture, and their logits, computed by
Hugging Face.

    python3 tests/make_models.py [OUT [NAME...]]   (OUT: tests/data/models beside this script)

Needs torch, transformers, tokenizers, gguf (llama.cpp's package) and numpy. The tests do not need
them, since the output is committed. Run this again only to add a model.

Each model NAME is

    NAME/          a Hugging Face folder: config.json, tokenizer.json, safetensors
    NAME.gguf      the same model as llama.cpp's converter writes it, if it is not quantized
    NAME.golden    golden.ids, golden.n_prompt, and golden.logits (len(ids), vocab) f32, which
                   transformers computes in float32; with experts, golden.greedy too

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
from transformers import (BloomConfig, BloomForCausalLM, Gemma2Config, Gemma2ForCausalLM,
                          Gemma3ForCausalLM, Gemma3TextConfig, GPTNeoXConfig, GPTNeoXForCausalLM,
                          GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM,
                          MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM,
                          MptConfig, MptForCausalLM, Olmo2Config, Olmo2ForCausalLM, Olmo3Config,
                          Olmo3ForCausalLM, OlmoeConfig, OlmoeForCausalLM, Phi3Config,
                          Phi3ForCausalLM, PhiConfig, PhiForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM,
                          Qwen3MoeConfig, Qwen3MoeForCausalLM, SmolLM3Config, SmolLM3ForCausalLM,
                          StableLmConfig, StableLmForCausalLM, Starcoder2Config,
                          Starcoder2ForCausalLM)

VOCAB = 96
N_PROMPT, N_TOTAL = 21, 40
LLAMA, MISTRAL = (LlamaConfig, LlamaForCausalLM), (MistralConfig, MistralForCausalLM)
QWEN2, QWEN3 = (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
GRANITE, SMOLLM3 = (GraniteConfig, GraniteForCausalLM), (SmolLM3Config, SmolLM3ForCausalLM)
OLMO2, OLMO3 = (Olmo2Config, Olmo2ForCausalLM), (Olmo3Config, Olmo3ForCausalLM)
PHI3 = (Phi3Config, Phi3ForCausalLM)
GEMMA2, GEMMA3 = (Gemma2Config, Gemma2ForCausalLM), (Gemma3TextConfig, Gemma3ForCausalLM)
MIXTRAL, OLMOE = (MixtralConfig, MixtralForCausalLM), (OlmoeConfig, OlmoeForCausalLM)
QWEN2MOE = (Qwen2MoeConfig, Qwen2MoeForCausalLM)
QWEN3MOE = (Qwen3MoeConfig, Qwen3MoeForCausalLM)
BLOOM, MPT = (BloomConfig, BloomForCausalLM), (MptConfig, MptForCausalLM)
NEOX, PHI = (GPTNeoXConfig, GPTNeoXForCausalLM), (PhiConfig, PhiForCausalLM)
STABLELM = (StableLmConfig, StableLmForCausalLM)
STARCODER2 = (Starcoder2Config, Starcoder2ForCausalLM)
LAYER_NORMS = {BLOOM: "bloom", MPT: "mpt", NEOX: "gptneox", PHI: "phi2", STABLELM: "stablelm",
               STARCODER2: "starcoder2"}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16
}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16
}

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.25],
    "long_factor": [1.5, 3.0, 8.0]
}


def partial_rope(part):
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}


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
    ("granite", GRANITE, torch.bfloat16, "old",
     dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.25,
          logits_scaling=2.5, rms_norm_eps=0.05, tie_word_embeddings=True)),
    ("granite_bias", GRANITE, torch.float16, "new",
     dict(attention_bias=True, mlp_bias=True, residual_multiplier=0.22, attention_multiplier=0.1)),
    ("olmo2", OLMO2, torch.bfloat16, "old", dict()),
    ("olmo2_mha", OLMO2, torch.float16, "new", dict(num_key_value_heads=4, attention_bias=True)),
    ("olmo3", OLMO3, torch.float16, "new", dict(num_hidden_layers=4, sliding_window=7)),
    ("olmo3_yarn", OLMO3, torch.bfloat16, "old",
     dict(num_hidden_layers=4, sliding_window=5, num_attention_heads=2, num_key_value_heads=1,
          rope_parameters={"full_attention": dict(YARN),
                           "sliding_attention": {"rope_type": "default",
                                                 "rope_theta": 10000.0}})),
    ("smollm3", SMOLLM3, torch.bfloat16, "old", dict(num_hidden_layers=5)),
    ("smollm3_list", SMOLLM3, torch.float16, "new",
     dict(num_hidden_layers=3, no_rope_layers=[0, 1, 0], tie_word_embeddings=False)),
    ("phi3", PHI3, torch.bfloat16, "old", dict(sliding_window=11)),
    ("phi3_partial", PHI3, torch.float16, "new",
     dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                           "partial_rotary_factor": 0.5}, hidden_size=32,
          tie_word_embeddings=True)),
    ("phi3_long", PHI3, torch.float16, "old",
     dict(rope_parameters=LONGROPE, original_max_position_embeddings=16)),
    ("phi3_short", PHI3, torch.float16, "old",
     dict(rope_parameters=dict(LONGROPE, factor=4.0), max_position_embeddings=48,
          original_max_position_embeddings=48)),
    ("gemma2", GEMMA2, torch.bfloat16, "old",
     dict(WIDE, num_hidden_layers=3, sliding_window=6, query_pre_attn_scalar=24,
          attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    ("gemma3", GEMMA3, torch.bfloat16, "old",
     dict(WIDE, num_hidden_layers=7, sliding_window=6, query_pre_attn_scalar=16)),
    ("gemma3_linear", GEMMA3, torch.float16, "new",
     dict(WIDE, num_hidden_layers=6, sliding_window=8, query_pre_attn_scalar=9,
          rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 50000.0,
                                              "factor": 8.0},
                           "sliding_attention": {"rope_type": "default",
                                                 "rope_theta": 10000.0}})),
    ("mixtral", MIXTRAL, torch.bfloat16, "old", dict(num_local_experts=4, num_experts_per_tok=2)),
    ("mixtral_tied", MIXTRAL, torch.float16, "new",
     dict(num_local_experts=8, num_experts_per_tok=3, tie_word_embeddings=True)),
    ("qwen2moe", QWEN2MOE, torch.bfloat16, "old",
     dict(num_experts=6, num_experts_per_tok=4, moe_intermediate_size=20,
          shared_expert_intermediate_size=28)),
    ("qwen2moe_norm", QWEN2MOE, torch.float16, "new",
     dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
          shared_expert_intermediate_size=24, num_hidden_layers=3, mlp_only_layers=[1],
          tie_word_embeddings=True)),
    ("qwen3moe", QWEN3MOE, torch.bfloat16, "old",
     dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=16, norm_topk_prob=True,
          head_dim=8)),
    ("qwen3moe_step", QWEN3MOE, torch.float16, "new",
     dict(num_experts=8, num_experts_per_tok=8, moe_intermediate_size=12, head_dim=8,
          decoder_sparse_step=2, norm_topk_prob=False, tie_word_embeddings=True)),
    ("olmoe", OLMOE, torch.bfloat16, "old", dict(num_experts=8, num_experts_per_tok=2)),
    ("olmoe_norm", OLMOE, torch.float16, "new",
     dict(num_experts=12, num_experts_per_tok=5, norm_topk_prob=True, num_key_value_heads=4)),
    ("gptq_experts", QWEN3MOE, torch.float16, "old",
     dict(SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
          norm_topk_prob=True, quantized=("gptq", 32, False, True))),
    ("bloom", BLOOM, torch.bfloat16, "old", dict()),
    ("bloom_heads", BLOOM, torch.float16, "new", dict(n_head=6, n_layer=1)),
    ("mpt", MPT, torch.bfloat16, "new", dict()),
    ("mpt_heads", MPT, torch.float16, "old",
     dict(n_heads=3, attn_config={"alibi_bias_max": 4})),
    ("gptneox", NEOX, torch.float16, "old", dict(rope_parameters=partial_rope(0.5))),
    ("gptneox_serial", NEOX, torch.bfloat16, "new",
     dict(use_parallel_residual=False, attention_bias=False, rope_parameters=partial_rope(1.0))),
    ("stablelm", STABLELM, torch.bfloat16, "old",
     dict(use_qkv_bias=True, rope_parameters=partial_rope(0.25))),
    ("stablelm_parallel", STABLELM, torch.float16, "new",
     dict(use_parallel_residual=True, rope_parameters=partial_rope(0.5))),
    ("starcoder2", STARCODER2, torch.bfloat16, "old", dict(sliding_window=9)),
    ("starcoder2_plain", STARCODER2, torch.float16, "new",
     dict(use_bias=False, tie_word_embeddings=False)),
    ("phi2", PHI, torch.float16, "old", dict(rope_parameters=partial_rope(0.5))),
]


def to_parts(w, heads):
    """Reorder the rows of q, k and v of each head to those of q, of k and of v."""
    by_head = w.reshape(heads, 3, w.shape[0] // heads // 3, *w.shape[1:])
    return by_head.swapaxes(0, 1).reshape(w.shape)


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


def expert_matrices(name, p):
    """The matrices of all experts: (name in published folders, index in p, matrix)"""
    prefix = name.rsplit(".", 1)[0]
    for e in range(p.shape[0]):
        parts = [("down_proj", p[e])]
        if "gate_up" in name:
            parts = zip(("gate_proj", "up_proj"), p[e].chunk(2))
        for part, matrix in parts:
            yield f"{prefix}.{e}.{part}", matrix


def quantized_experts(p, name, quantized, random, tensors):
    for prefix, matrix in expert_matrices(name, p):
        linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
        quantized_linear(linear, prefix, *quantized, random, tensors)
        with torch.no_grad():
            matrix.copy_(linear.weight)


def published(name, t, mixtral):
    """The tensors of a published folder that hold this one of transformers 5"""
    found = {name: t}
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        found = {n + ".weight": m for n, m in expert_matrices(name, t)}
    if mixtral:
        for old, new in (("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"),
                         ("down_proj", "w2")):
            found = {n.replace(old, new): m for n, m in found.items()}
    return found


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
    if config.model_type == "qwen3_moe":
        c["num_experts"] = c.pop("num_local_experts")
    if style == "old":  # as in nearly all published models
        rope = c.pop("rope_parameters", {"rope_theta": None, "rope_type": "default"})
        if "sliding_attention" in rope:
            if config.model_type == "gemma3_text":
                c["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
                c["sliding_window_pattern"] = 6
            rope = rope["full_attention"]
        neox = config.model_type == "gpt_neox"
        if rope["rope_theta"]:
            c["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            c["rotary_pct" if neox else "partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        c["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        if config.model_type == "bloom":  # as in the published models
            c["n_embed"], c["num_attention_heads"] = c.pop("hidden_size"), c.pop("n_head")
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
POST_NORMS = {  # of models with norms after the blocks too
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm"
}
PARTS = {
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp"
}


def write_layer_norm_shape(w, arch, config):
    """The keys of the families with LayerNorm, as llama.cpp's converter writes them."""
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = config.hidden_size // config.num_attention_heads
    w.add_context_length(64)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(kv_heads)
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(config, name):
            w.add_layer_norm_eps(getattr(config, name))
    if rope:
        w.add_rope_freq_base(rope["rope_theta"])
        w.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if arch in ("gptneox", "stablelm"):
        w.add_parallel_residual(config.use_parallel_residual)
    if arch == "mpt":
        w.add_max_alibi_bias(config.attn_config.alibi_bias_max)
    if getattr(config, "sliding_window", None):
        w.add_sliding_window(config.sliding_window)


def write_gguf(path, arch, config, tensors):
    w = gguf.GGUFWriter(path, arch)
    if arch in LAYER_NORMS.values():
        write_layer_norm_shape(w, arch, config)
    else:
        write_shape(w, arch, config)
    write_content(w, arch, config, tensors)


def write_shape(w, arch, config):
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if head_dim * config.num_attention_heads != config.hidden_size:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        w.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        w.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "norm_topk_prob", arch == "qwen3moe") != (arch == "qwen3moe"):
        w.add_expert_weights_norm(config.norm_topk_prob)  # llama.cpp does not support this
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
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        w.add_rope_scaling_orig_ctx_len(original)
        w.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(rope.get("factor", 64 / original)) / math.log(original)))
        for kind in ("short", "long"):
            w.add_tensor(f"rope_factors_{kind}.weight",
                         np.array(rope[f"{kind}_factor"], dtype=np.float32))
    if arch == "granite":
        w.add_attention_scale(config.attention_multiplier)
        w.add_embedding_scale(config.embedding_multiplier)
        w.add_residual_scale(config.residual_multiplier)
        w.add_logit_scale(config.logits_scaling)
    if arch == "gemma2":
        w.add_attn_logit_softcapping(config.attn_logit_softcapping)
        w.add_final_logit_softcapping(config.final_logit_softcapping)
    if "gemma" in arch and config.query_pre_attn_scalar != head_dim:  # llama.cpp knows by the size
        w.add_attention_scale(config.query_pre_attn_scalar**-0.5)
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
        if layer_types and len(set(layer_types)) > 1 and "gemma" not in arch:
            w.add_array(f"{arch}.attention.sliding_window_pattern",
                        [t == "sliding_attention" for t in layer_types])
    if set(getattr(config, "no_rope_layers", [])) and config.num_hidden_layers < 4:  # our own key
        w.add_array(f"{arch}.rope.llm.layers", [x == 1 for x in config.no_rope_layers])


def write_content(w, arch, config, tensors):
    vocab = vocabulary()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(vocab)
    w.add_token_types([gguf.TokenType.NORMAL] * (VOCAB - 1) + [gguf.TokenType.CONTROL])
    w.add_token_merges(["a b"])
    w.add_eos_token_id(VOCAB - 1)
    for name, t in tensors.items():
        if ".experts." in name:  # all experts in one tensor
            layer, kind = name.split(".")[2], {torch.float16: Type.F16, torch.bfloat16: Type.BF16}
            parts = ["gate", "up"] if "gate_up" in name else ["down"]
            for part, x in zip(parts, t.float().numpy().swapaxes(0, 1).reshape(
                    len(parts), -1, t.shape[0], t.shape[2])):
                x = np.ascontiguousarray(x.swapaxes(0, 1))
                w.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight",
                             gguf.quants.quantize(x, kind[t.dtype]), raw_dtype=kind[t.dtype])
            continue
        heads = config.num_attention_heads
        if ".k_proj." in name:
            heads = config.num_key_value_heads
        out = NAMES.get(name)
        if arch in LAYER_NORMS.values():
            model_arch = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch]
            names = gguf.get_tensor_name_map(model_arch, config.num_hidden_layers)
            out = (names.get_name(name, (".weight", ".bias")) or
                   names.get_name(name.removeprefix("transformer."), (".weight", ".bias")))
        if not out:
            _, _, layer, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            parts = PARTS | POST_NORMS if arch in ("olmo2", "gemma2", "gemma3") else PARTS
            out = f"blk.{layer}.{parts[module]}.{kind}"
        x = t.float().numpy()
        if "gemma" in arch and name.endswith("norm.weight"):
            x = x + 1
        if arch in ("llama", "granite", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            x = np.ascontiguousarray(to_adjacent(x, heads))
        if ".query_key_value." in name:
            x = np.ascontiguousarray(to_parts(x, heads))
        kind = {torch.float16: Type.F16, torch.bfloat16: Type.BF16, torch.float32: Type.F32}
        kind = kind[t.dtype]
        if name.endswith("shared_expert_gate.weight"):
            x = x[0]
        if x.ndim == 1 or name.endswith("mlp.gate.weight"):
            kind = Type.F32  # llama.cpp keeps vectors and routers in f32
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
    if kind in (LLAMA, MISTRAL, GEMMA2, GEMMA3):
        options.setdefault("head_dim", 8)
    if kind in (SMOLLM3, PHI3, OLMOE):
        options["pad_token_id"] = None
    if kind in (MIXTRAL, OLMOE, QWEN2MOE, QWEN3MOE):
        options["max_position_embeddings"] = 96
    if kind in (GEMMA2, GEMMA3):
        options["tie_word_embeddings"] = True
    if kind in LAYER_NORMS:
        layers, tied = options.pop("num_hidden_layers"), kind in (BLOOM, MPT, STARCODER2)
        options = options | dict(tie_word_embeddings=tied, hidden_size=32) | extra
        del options["rms_norm_eps"]
        options["pad_token_id"] = None
        if kind in (BLOOM, MPT):
            for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads",
                        "max_position_embeddings"):
                del options[key]
            options = dict(hidden_size=24, n_layer=layers, n_head=4) | extra | {
                k: v for k, v in options.items() if k not in extra and k != "hidden_size"}
        else:
            options["num_hidden_layers"] = layers
        if kind == MPT:
            options = {k: v for k, v in options.items() if k != "n_head"}
            options = dict(d_model=options.pop("hidden_size"), n_layers=options.pop("n_layer"),
                           n_heads=4, max_seq_len=64) | options
        if kind in (NEOX, PHI):
            del options["num_key_value_heads"]
    if kind == QWEN2 and not quantized:
        options["hidden_size"] = 32
    if kind == QWEN2:
        options.pop("head_dim", None)
    config = kind[0](**options)
    config._attn_implementation = "eager"
    model = kind[1](config).to(torch.float32).eval()
    tensors, packed = {}, {}
    if kind == MPT:  # transformers ignores alibi_bias_max, which the original code reads
        build = model.transformer.build_mpt_alibi_tensor
        model.transformer.build_mpt_alibi_tensor = lambda heads, length, device: build(
            heads, length, config.attn_config.alibi_bias_max, device)
    with torch.no_grad():
        for pname, p in model.named_parameters():
            if p.dim() == 1:
                norm = "norm" in pname or ".ln_f." in pname
                one = norm and kind not in (GEMMA2, GEMMA3) and "bias" not in pname
                p.copy_((1 if one else 0) + 0.3 * torch.randn(p.shape))
            else:  # so large that attention is concentrated and every block matters
                scale = 1.6 if ".q_proj." in pname or ".k_proj." in pname else 1.2
                scale /= math.sqrt(p.shape[-1])
                if "embed" in pname and not config.tie_word_embeddings:
                    scale = 1
                p.copy_(torch.randn(p.shape) * scale)
            p.copy_(p.to(dtype).to(torch.float32))
    if quantized:
        for mname, m in model.named_modules():
            if isinstance(m, torch.nn.Linear) and "lm_head" not in mname:
                quantized_linear(m, mname, *quantized, random, packed)
    for pname, p in model.named_parameters():
        if quantized and ".experts." in pname:
            quantized_experts(p, pname, quantized, random, packed)
        elif pname.rsplit(".", 1)[0] + ".qweight" not in packed or pname.endswith(".bias"):
            stored = pname.replace("lm_head", "embed_out") if kind == NEOX else pname
            tensors[stored] = p.detach().to(dtype)
    folder = os.path.join(out, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    write_config(os.path.join(folder, "config.json"), config, style, quantized, no_kv_heads)
    with open(os.path.join(folder, "tokenizer.json"), "w") as f:
        json.dump(tokenizer_json(), f, ensure_ascii=False, separators=(",", ":"))
    mixtral = config.model_type == "mixtral"
    write_safetensors(folder, {n: m for name, t in tensors.items()
                               for n, m in published(name, t, mixtral).items()} | packed, shards)
    if not quantized:
        write_gguf(os.path.join(out, name + ".gguf"),
                   LAYER_NORMS.get(kind) or
                   {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2",
                    "gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}.get(
                       config.model_type, config.model_type), config, tensors)
    ids = torch.randint(0, VOCAB - 1, (N_TOTAL,))
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    golden = gguf.GGUFWriter(os.path.join(out, name + ".golden"), "golden")
    golden.add_array("golden.ids", ids.tolist())
    golden.add_uint32("golden.n_prompt", N_PROMPT)
    golden.add_tensor("golden.logits", logits.numpy().astype(np.float32))
    if kind in (MIXTRAL, OLMOE, QWEN2MOE, QWEN3MOE):  # 64 greedy tokens after 8
        greedy = ids[:8].tolist()
        with torch.no_grad():
            while len(greedy) < 8 + 64:
                last = model(torch.tensor([greedy]), use_cache=False).logits[0, -1]
                greedy.append(int(last.argmax()))
        golden.add_array("golden.greedy", greedy)
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
        if len(sys.argv) < 3 or model[0] in sys.argv[2:]:
            make(out, 100 * (i + 1), *model)


if __name__ == "__main__":
    main()
