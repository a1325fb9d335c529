"""Tiny "qwen35" models under the names and conventions of Hugging Face and of MLX packs."""

from __future__ import annotations

from typing import Any

import dense
import numpy as np
import tiny
from tiny import Tiny

from bonsai.matrix import PackedMatrix

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


def config(spec: Tiny, **changes: Any) -> dict[str, Any]:
    values = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        **hf_config(tiny.config(spec)), "attn_output_gate": True, "eos_token_id": 257,
        "mamba_ssm_dtype": "float32", "full_attention_interval": 4, "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "use_cache": True,
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "output_gate_type": "swish", "dtype": "float32",
    }  # fmt: skip
    values.update(changes)
    return {key: value for key, value in values.items() if value is not None}


def raw(spec: Tiny, made: tiny.Weights) -> dict[str, np.ndarray]:
    """As transformers saves them."""
    found = hf_tensors(made)
    return found if not spec.tied else {k: v for k, v in found.items() if k != "lm_head.weight"}


def sanitized(spec: Tiny, made: tiny.Weights) -> dict[str, np.ndarray]:
    """As mlx-lm saves them: norms ready to multiply, convolutions [channels, taps, 1]."""
    found = raw(spec, made)
    for name in found:
        if name.endswith(("layernorm.weight", "q_norm.weight", "k_norm.weight")):
            found[name] = found[name] + np.float32(1)
        if name == "model.norm.weight":
            found[name] = found[name] + np.float32(1)
        if name.endswith("conv1d.weight"):
            found[name] = found[name].transpose(0, 2, 1)
    return {name: np.ascontiguousarray(values) for name, values in found.items()}


QUANTIZATION = {"group_size": 128, "bits": 2, "mode": "affine"}


def mlx_tensors(spec: Tiny, made: tiny.Weights, prefix: str) -> dict[str, np.ndarray]:
    """A pack of 2 bits: words of codes, scales, biases, and signs where matrices are folded."""
    found = {}
    for name, values in sanitized(spec, made).items():
        matrix = next((m for n, m in made.matrices.items() if hf_name(n) == name), None)
        module = prefix + name.removesuffix(".weight")
        if not isinstance(matrix, PackedMatrix):
            found[prefix + name] = values
            continue
        words = np.ascontiguousarray(matrix.codes).view("<u4")
        found |= {
            f"{module}.weight": words.reshape(len(words), -1),
            f"{module}.scales": np.asarray(matrix.scales),
            f"{module}.biases": -np.asarray(matrix.scales),
        }
        if matrix.transform is not None:
            found[f"{module}.signs"] = matrix.transform.signs.astype(np.float32)
    return found


def pack_config(spec: Tiny, made: tiny.Weights, **changes: Any) -> dict[str, Any]:
    modules = [
        {
            "path": hf_name(name).removesuffix(".weight"),
            "block": spec.hadamard,
            "embedding": name == "embedding",
            "dtype": "float16",
        }
        for name, matrix in made.matrices.items()
        if matrix.transform is not None
    ]
    values = {
        "model_type": "prism_hadamard_qwen35", "schema_version": 2, "base_model_type": "qwen3_5",
        "tensor_namespace": "mlx-vlm-qwen3_5", "gdn_activation_layout": "grouped",
        "components": {"text": True, "vision": True, "mtp": False},
        "requires_runtime": "runtime/artifact.py", "hadamard_config": "hadamard.json",
        "quantization": QUANTIZATION, "tie_word_embeddings": False, "image_token_id": 5,
        "text_config": config(spec, architectures=None), "modules": modules,
    }  # fmt: skip
    values.update(changes)
    return {key: value for key, value in values.items() if value is not None}
