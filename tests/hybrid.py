"""Tiny "qwen35" models under the names and conventions of Hugging Face."""

from __future__ import annotations

import dense
import numpy as np
import tiny

BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "gdn.qkv": "linear_attn.in_proj_qkv",
    "gdn.z": "linear_attn.in_proj_z",
    "gdn.a": "linear_attn.in_proj_a",
    "gdn.b": "linear_attn.in_proj_b",
    "gdn.conv": "linear_attn.conv1d",
    "gdn.a_log": "linear_attn.A_log",
    "gdn.dt_bias": "linear_attn.dt_bias",
    "gdn.norm": "linear_attn.norm",
    "gdn.out": "linear_attn.out_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
CENTRED = ("attn_norm", "ffn_norm", "attn.q_norm", "attn.k_norm", "norm")
"""Norms that are stored as the gain minus one; that of the delta nets is not among them."""
BARE = ("A_log", "dt_bias")
"""Names without ".weight"."""


def hf_tensors(made: tiny.Weights) -> dict[str, np.ndarray]:
    """Every tensor in float32, by its name in a Qwen3_5ForCausalLM."""
    found = {hf_name(name): dense.dequantized(m) for name, m in made.matrices.items()}
    for name, values in made.vectors.items():
        centred = name.split(".", 2)[-1] in CENTRED
        found[hf_name(name)] = values.astype(np.float64) - centred
    for name in found:
        if name.endswith("conv1d.weight"):
            found[name] = found[name][:, None, :]
    return {name: values.astype(np.float32) for name, values in found.items()}


def hf_name(name: str) -> str:
    ends = {"embedding": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
    if name in ends:
        return f"{ends[name]}.weight"
    _, number, part = name.split(".", 2)
    hf = BLOCK[part]
    suffix = "" if hf.endswith(BARE) else ".weight"
    return f"model.layers.{number}.{hf}{suffix}"


def hf_config(ours: dict) -> dict:
    """The keys of a Qwen3_5TextConfig for one of our config.json."""
    gdn, dims = ours["gdn"], ours["rope"]["dims"]
    kinds = {"delta": "linear_attention", "attention": "full_attention"}
    return {
        "vocab_size": ours["vocab"],
        "hidden_size": ours["hidden"],
        "intermediate_size": ours["ffn"],
        "num_hidden_layers": ours["layers"],
        "num_attention_heads": ours["heads"],
        "num_key_value_heads": ours["kv_heads"],
        "head_dim": ours["head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": ours["context"],
        "rms_norm_eps": ours["norm_eps"],
        "tie_word_embeddings": ours["tied"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ours["rope"]["theta"],
            "partial_rotary_factor": dims / ours["head_dim"],
            "mrope_section": [dims // 2 - 2 * (dims // 6), dims // 6, dims // 6],
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": gdn["taps"],
        "linear_key_head_dim": gdn["key_dim"],
        "linear_value_head_dim": gdn["value_dim"],
        "linear_num_key_heads": gdn["key_heads"],
        "linear_num_value_heads": gdn["value_heads"],
        "layer_types": [kinds[kind] for kind in ours["kinds"]],
    }
