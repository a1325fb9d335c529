"""The configs of Qwen3.5 models, in GGUF metadata and in Hugging Face folders -> our config.json.

Knows the keys that only this architecture has. Does not read files; every key must be known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bonsai.config import Fields
from bonsai.errors import UnsupportedModel

__all__ = [
    "HF_TYPES",
    "Pack",
    "read_gguf_gdn",
    "read_gguf_rope",
    "read_hf_gdn",
    "read_hf_rope",
    "split_pack",
]

HF_TYPES = ("qwen3_5_text", "qwen3_5")
PACK_TYPE, PACK_SCHEMA = "prism_hadamard_qwen35", 2

DELTA, ATTENTION = "delta", "attention"
MAX_TAPS = 65
SECTIONS, RECURRENT = "rope.dimension_sections", "attention.recurrent_layers"


def read_gguf_gdn(fields: Fields, layers: int) -> dict[str, Any]:
    """`kinds`, `gdn` and `output_gate` from the keys of an architecture "qwen35"."""
    value_heads = fields.take_size("ssm.time_step_rank")
    inner = fields.take_size("ssm.inner_size")
    if inner % value_heads:
        raise UnsupportedModel(
            f"{fields.where}: ssm.inner_size {inner} is not a multiple of ssm.time_step_rank "
            f"{value_heads}"
        )
    gdn = {
        "key_heads": fields.take_size("ssm.group_count"),
        "value_heads": value_heads,
        "key_dim": fields.take_size("ssm.state_size"),
        "value_dim": inner // value_heads,
        "taps": fields.take_size("ssm.conv_kernel", MAX_TAPS),
    }
    _check_gdn(gdn, fields.where)
    listed = fields.take_any(RECURRENT)  # comes before the interval, which may then be absent
    interval = fields.take_size("full_attention_interval") if listed is None else 1
    fields.ignore("full_attention_interval")
    kinds = _kinds(layers, interval) if listed is None else _gguf_kinds(fields, listed, layers)
    return {"output_gate": "sigmoid", "kinds": kinds, "gdn": gdn}


def _gguf_kinds(fields: Fields, listed: Any, layers: int) -> list[str]:
    """One truth value for each layer; those of layers that draft tokens come last."""
    good = isinstance(listed, list) and all(flag in (False, True) for flag in listed)
    if not good or len(listed) < layers:
        raise UnsupportedModel(
            f"{fields.where}: {RECURRENT} is {listed!r:.60}, expected a flag for each of {layers} "
            "layers"
        )
    return [DELTA if flag else ATTENTION for flag in listed[:layers]]


def read_gguf_rope(fields: Fields, theta: float, head_dim: int) -> dict[str, Any]:
    """The rotation of the first dims of each head. For text, all sections rotate alike."""
    dims = fields.take_size("rope.dimension_count")
    sections = fields.take_any(SECTIONS, [])
    whole = isinstance(sections, list) and all(isinstance(n, int) for n in sections)
    if not whole or (sections and sum(sections) != dims // 2):
        raise UnsupportedModel(
            f"{fields.where}: {SECTIONS} is {sections!r:.60}, which does not cover {dims} dims"
        )
    fields.require("rope.scaling.type", "none")
    if dims > head_dim or dims % 2:
        raise UnsupportedModel(f"{fields.where}: {dims} rotated dims of heads of {head_dim}")
    return {"theta": theta, "dims": dims}


def read_hf_gdn(fields: Fields, layers: int) -> dict[str, Any]:
    """`kinds`, `gdn` and `output_gate` from the keys of a Qwen3_5TextConfig, and its defaults."""
    gdn = {
        "key_heads": fields.take_size("linear_num_key_heads"),
        "value_heads": fields.take_size("linear_num_value_heads"),
        "key_dim": fields.take_size("linear_key_head_dim"),
        "value_dim": fields.take_size("linear_value_head_dim"),
        "taps": fields.take_size("linear_conv_kernel_dim", MAX_TAPS),
    }
    _check_gdn(gdn, fields.where)
    fields.require("attn_output_gate", True)
    fields.require("output_gate_type", "swish", "sigmoid")  # a sigmoid, whatever it is called
    fields.require("mamba_ssm_dtype", "float32")
    fields.require("mlp_only_layers", [])
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    interval = fields.take(int, "full_attention_interval", 4)
    listed = fields.take_any("layer_types")
    kinds = (
        _kinds(layers, max(interval, 1))
        if listed is None
        else _hf_kinds(fields.where, listed, layers)
    )
    return {"output_gate": "sigmoid", "kinds": kinds, "gdn": gdn}


def _hf_kinds(where: str, listed: Any, layers: int) -> list[str]:
    names = {"linear_attention": DELTA, "full_attention": ATTENTION}
    if not isinstance(listed, list) or any(
        not isinstance(kind, str) or kind not in names for kind in listed
    ):
        raise UnsupportedModel(
            f"{where}: layer_types is {listed!r:.80}; supported: {', '.join(names)}"
        )
    if len(listed) != layers:
        raise UnsupportedModel(f"{where}: {len(listed)} layer_types for {layers} layers")
    return [names[kind] for kind in listed]


def read_hf_rope(fields: Fields, nested: Fields | None, head_dim: int) -> dict[str, Any]:
    """The rotation of the first dims of each head. For text, all sections rotate alike."""
    theta, share = (
        fields.take(float, "rope_theta", 0.0),
        fields.take(float, "partial_rotary_factor", 0.25),
    )
    if nested is not None:
        theta = nested.take(float, "rope_theta", theta)
        share = nested.take(float, "partial_rotary_factor", share)
        for key in ("rope_type", "type"):
            nested.require(key, "default")
        nested.ignore("mrope_section", "mrope_interleaved")
        nested.finish()
    if theta == 0.0:
        raise UnsupportedModel(f"{fields.where}: rope_theta is missing")
    dims = int(head_dim * share)
    if dims < 2 or dims % 2 or dims > head_dim:
        raise UnsupportedModel(
            f"{fields.where}: partial_rotary_factor {share} of heads of {head_dim} is {dims} dims"
        )
    return {"theta": theta, "dims": dims}


@dataclass(frozen=True, slots=True)
class Pack:
    """A folded MLX pack: the modules that are folded, by path, and the size of their blocks."""

    block: int
    modules: tuple[str, ...]


def split_pack(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Pack | None, list[str]]:
    """(config of the model itself, what it says about folded modules, warnings)."""
    if raw.get("model_type") != PACK_TYPE:
        return dict(raw), None, []
    fields = Fields(raw, where)
    schema = fields.take(int, "schema_version")
    if schema != PACK_SCHEMA:
        raise UnsupportedModel(
            f"{where}: schema_version {schema} of {PACK_TYPE}; supported: {PACK_SCHEMA}"
        )
    for key, only in (
        ("base_model_type", "qwen3_5"),
        ("tensor_namespace", "mlx-vlm-qwen3_5"),
        ("gdn_activation_layout", "grouped"),
    ):
        fields.require(key, only)
    components = fields.take_object("components")
    if components is not None:
        components.require("text", True)
        components.ignore("vision", "mtp")
        components.finish()
    code = fields.take_any("requires_runtime")
    warnings = [f"{where}: 'requires_runtime' names Python code; it is ignored and never run"]
    pack = _read_modules(fields.take_any("modules"), f"{where}: modules")
    taken = (
        "schema_version", "base_model_type", "tensor_namespace", "gdn_activation_layout",
        "components", "requires_runtime", "modules", "hadamard_config", "architectures",
    )  # fmt: skip
    rest = {key: value for key, value in raw.items() if key not in taken}
    return {**rest, "model_type": HF_TYPES[1]}, pack, warnings if code else []


def _read_modules(found: Any, where: str) -> Pack:
    if not isinstance(found, list) or not found:
        raise UnsupportedModel(f"{where}: expected a list of the folded modules")
    blocks: dict[str, int] = {}
    for i, entry in enumerate(found):
        fields = Fields(entry, f"{where}: {i}")
        path, block = fields.take(str, "path"), fields.take(int, "block")
        looked_up = fields.take(bool, "embedding", False)
        fields.require("dtype", "float16", "bfloat16", "float32")  # of the activations
        fields.finish()
        good = 0 <= block < 1 << 17 and not block & (block - 1)
        if looked_up != path.endswith("embed_tokens") or not good or path in blocks:
            raise UnsupportedModel(
                f"{fields.where}: {path}: embedding {looked_up}, block {block}, or named twice"
            )
        blocks[path] = block
    folded = {path: block for path, block in blocks.items() if block}  # 0: packed, not folded
    if len(set(folded.values())) > 1:
        raise UnsupportedModel(f"{where}: blocks of {sorted(set(folded.values()))}, expected one")
    return Pack(max(blocks.values()), tuple(folded))


def _kinds(layers: int, interval: int) -> list[str]:
    return [DELTA if (i + 1) % interval else ATTENTION for i in range(layers)]


def _check_gdn(gdn: Mapping[str, int], where: str) -> None:
    if gdn["value_heads"] % gdn["key_heads"]:
        raise UnsupportedModel(
            f"{where}: {gdn['value_heads']} value heads cannot share {gdn['key_heads']} key heads"
        )
