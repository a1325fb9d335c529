"""The metadata of a GGUF file -> our config.json.

Knows the keys of the architectures we run and which of them change the maths. Does not read files.
Every key under the architecture's name must be known; an unsupported value is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bonsai.config import Fields
from bonsai.convert.config_hf import MAX_LAYERS, check_heads
from bonsai.convert.config_qwen35 import read_gguf_gdn, read_gguf_rope
from bonsai.errors import UnsupportedModel

__all__ = ["ARCHITECTURES", "read_gguf_config"]

# Name in the file -> ours. The last two are written by bitnet.cpp.
ARCHITECTURES = {
    "bitnet": "bitnet",
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen35": "qwen35",
    "bitnet-25": "bitnet",
    "bitnet-b1.58": "bitnet",
}
# hidden, ffn and layers of BitNet-b1.58-2B-4T, of which there are files that lack the activation
BITNET_2B_4T = (2560, 6912, 30)
# Keys in these namespaces describe a file and cannot change the maths.
DESCRIPTIVE = ("general", "tokenizer", "quantize")
# Names of this space say that weights are transformed. What `hadamard` reads is allowed for:
TRANSFORMS, FOLDED = ("prism",), ("qwen35",)
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_config(
    metadata: Mapping[str, Any], vocab: int, where: str
) -> tuple[str, dict[str, Any], list[str]]:
    """(architecture, config without "tied", warnings) of a file whose table has `vocab` rows."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    warnings = _check_namespaces(metadata, architecture, where)
    prefix = architecture + "."
    keys = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields(keys, f"{where}: {architecture}")
    config = _read_sizes(fields, vocab)
    config["activation"] = _read_activation(fields, architecture, config, warnings)
    if architecture == "qwen35":
        config["layers"] -= fields.take(int, "nextn_predict_layers", 0)  # what drafts tokens
        theta = _short(fields.take(float, "rope.freq_base"))
        config["rope"] = read_gguf_rope(fields, theta, config["head_dim"])
        config |= read_gguf_gdn(fields, config["layers"])
    else:
        config["rope"] = _read_rope(fields, config, warnings)
    _refuse_unsupported(fields)
    fields.finish()
    config["eos"] = _end_tokens(metadata, where)
    return ARCHITECTURES[architecture], config, warnings


def _check_namespaces(metadata: Mapping[str, Any], architecture: str, where: str) -> list[str]:
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModel(
            f"{where}: general.type is {metadata['general.type']!r}, not 'model'"
        )
    warnings, known = [], (*DESCRIPTIVE, "split")
    for key in metadata:
        space = key.split(".")[0]
        if key.startswith("prism.hadamard.") and architecture in FOLDED:
            continue
        if space in TRANSFORMS:
            raise UnsupportedModel(
                f"{where}: {key}: the weights are in a transformed basis that is not supported"
            )
        if space not in known and not key.startswith(architecture + "."):
            warnings.append(f"metadata key {key} is not known and was left out")
    return warnings


def _read_sizes(fields: Fields, vocab: int) -> dict[str, Any]:
    hidden = fields.take_size("embedding_length")
    heads = fields.take_size("attention.head_count", 1 << 16)
    head_dim = fields.take(int, "attention.key_length", 0) or hidden // heads
    config = {
        "layers": fields.take_size("block_count", MAX_LAYERS),
        "hidden": hidden,
        "ffn": fields.take_size("feed_forward_length"),
        "heads": heads,
        "kv_heads": fields.take(int, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab": vocab,
        "norm_eps": _short(fields.take(float, "attention.layer_norm_rms_epsilon")),
        "context": fields.take_size("context_length"),
    }
    check_heads(config, where=fields.where)
    fields.require("attention.value_length", head_dim)
    fields.require("vocab_size", vocab)
    return config


def _read_activation(
    fields: Fields, architecture: str, config: Mapping[str, Any], warnings: list[str]
) -> str:
    """Of the gate. Without the key, "bitnet" means SiLU, and the names of bitnet.cpp relu2."""
    if ARCHITECTURES[architecture] != "bitnet":
        fields.require("hidden_activation", "silu")
        return "silu"
    sizes = config["hidden"], config["ffn"], config["layers"]
    usual = "silu" if architecture == "bitnet" and sizes != BITNET_2B_4T else "relu2"
    value = fields.take(str, "hidden_activation", "")
    if value not in ("", "relu2", "silu"):
        raise UnsupportedModel(
            f"{fields.where}: hidden_activation is {value!r}; supported: 'relu2', 'silu'"
        )
    if not value and architecture == "bitnet":
        warnings.append(
            f"{architecture}.hidden_activation is not in the file: {usual}, which models of this "
            "size have, is used"
        )
    return value or usual


def _read_rope(fields: Fields, config: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    head_dim = config["head_dim"]
    theta = _short(fields.take(float, "rope.freq_base", 0.0))
    if theta == 0.0:
        theta = 10000.0  # what a GGUF file without the key means
        warnings.append("rope.freq_base is not in the file: 10000, the default, is used")
    fields.require("rope.dimension_count", head_dim)
    kind = fields.take(str, "rope.scaling.type", "none")
    rope: dict[str, Any] = {"theta": theta, "dims": head_dim}
    if kind == "yarn":
        rope["yarn"] = _read_yarn(fields)
    elif kind == "none":
        fields.ignore("rope.scaling.original_context_length", "rope.scaling.finetuned")
        fields.require("rope.scaling.factor", 1.0, 0.0)
    elif kind == "linear" and fields.take(float, "rope.scaling.factor", 0.0) == 1.0:
        fields.ignore("rope.scaling.original_context_length", "rope.scaling.finetuned")
    else:
        raise UnsupportedModel(
            f"{fields.where}: rope.scaling.type is {kind!r}; supported: 'none', 'yarn'"
        )
    return rope


def _read_yarn(fields: Fields) -> dict[str, Any]:
    factor = _short(fields.take(float, "rope.scaling.factor"))
    if factor <= 0:
        raise UnsupportedModel(f"{fields.where}: rope.scaling.factor is {factor}")
    # An explicit factor multiplies the usual amplitude of cos and sin, it does not replace it.
    extra = _short(fields.take(float, "rope.scaling.attn_factor", 1.0))
    extra *= _short(fields.take(float, "rope.scaling.yarn_attn_factor", 1.0))
    fields.require("rope.scaling.yarn_ext_factor", 1.0)
    fields.ignore("rope.scaling.finetuned")
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {
        "factor": factor,
        "original_context": fields.take_size("rope.scaling.original_context_length"),
        "beta_fast": _short(fields.take(float, "rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": _short(fields.take(float, "rope.scaling.yarn_beta_slow", 1.0)),
        "attention_factor": extra * usual,
    }


def _refuse_unsupported(fields: Fields) -> None:
    """Keys that change the maths, at the value that leaves it as it is."""
    fields.require("attention.causal", True)
    fields.require("attention.sliding_window", 0)
    fields.require("attention.scale", 0.0)
    fields.require("attention.max_alibi_bias", 0.0)
    fields.require("attention.clamp_kqv", 0.0)
    fields.require("logit_scale", 0.0, 1.0)
    fields.require("expert_count", 0)
    fields.require("expert_used_count", 0)
    fields.require("use_parallel_residual", False)
    fields.require("tensor_data_layout", "Meta AI original pth", "reference")
    fields.require("pooling_type", 0)
    fields.require("nextn_predict_layers", 0)


def _end_tokens(metadata: Mapping[str, Any], where: str) -> list[int]:
    found = set()
    for key in END_TOKENS:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise UnsupportedModel(
                f"{where}: tokenizer.ggml.{key} is {value!r}, expected a token id"
            )
        found.add(value)
    return sorted(found)


def _short(value: float) -> float:
    """The shortest decimal that is the same float32, which is how GGUF stores it: 1e-05."""
    return float(str(np.float32(value)))
