"""The config.json of a Hugging Face folder -> our config.json.

Knows the keys of the architectures we run and which of them change the maths. Does not read files
and never runs code: a config that names Python files gets a warning and its weights are read as
the architecture says. A key that nobody took is an error; null means absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bonsai.config import Fields
from bonsai.convert.config_qwen35 import HF_TYPES, read_hf_gdn, read_hf_rope
from bonsai.convert.quantization import Quantization, read_quantization
from bonsai.errors import UnsupportedModel

__all__ = ["ARCHITECTURES", "MAX_LAYERS", "check_heads", "read_hf_config"]

ARCHITECTURES = {
    "bitnet": "BitNetForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **dict.fromkeys(HF_TYPES, "Qwen3_5ForCausalLM"),
}
DEFAULT_THETA = {"bitnet": 500000.0}  # of a config without the key; 10000 for the others
ACTIVATIONS = {"bitnet": ("relu2", "silu")}  # the first is what a config without the key means
MAX_LAYERS = 4096
# Of a model for images and text, beside text_config: nothing that text alone needs.
OF_IMAGES = (
    "vision_config",
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
    "projector_hidden_act",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)
RUNS_CODE = ("model_file", "auto_map", "custom_pipelines")
# Keys that say nothing about the maths of inference: training, saving, other programs.
IGNORED = (
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "hidden_dropout_prob",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_model_parallel",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)


def read_hf_config(
    raw: Mapping[str, Any], where: str
) -> tuple[str, dict[str, Any], Quantization, list[str]]:
    """(architecture, our config, quantization, warnings). Nothing but `raw` is looked at."""
    values = _of_the_text(raw, where)
    architecture = values.pop("model_type", None)
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: model_type {architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    warnings = [
        f"{where}: '{key}' names Python code; it is ignored and never run"
        for key in RUNS_CODE
        if values.pop(key, None) is not None
    ]
    values = {key: value for key, value in values.items() if not key.startswith("_")}
    fields = Fields(values, where)
    quantization = read_quantization(fields)
    config = _read_sizes(fields, architecture)
    config["activation"] = _read_activation(fields, architecture)
    if architecture in HF_TYPES:
        config["rope"] = read_hf_rope(fields, _nested_rope(fields), config["head_dim"])
        config |= read_hf_gdn(fields, config["layers"])
    else:
        usual = DEFAULT_THETA.get(architecture, 10000.0)
        config["rope"] = _read_rope(fields, config, usual, warnings)
    config["tied"] = fields.take(bool, "tie_word_embeddings", False)
    config["eos"] = _end_tokens(fields)
    _refuse_unsupported(fields, architecture)
    fields.ignore(*IGNORED)
    fields.finish()
    ours = "qwen35" if architecture in HF_TYPES else architecture
    return ours, config, quantization, warnings


def _of_the_text(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys that are not null. Of a model for images and text, those of its text come first."""
    values = {key: value for key, value in raw.items() if value is not None}
    text = values.pop("text_config", None)
    if text is None:
        return values
    if not isinstance(text, Mapping):
        raise UnsupportedModel(f"{where}: text_config is {text!r:.60}, expected an object")
    text = {key: value for key, value in text.items() if value is not None}
    for key in ("model_type", "architectures", *OF_IMAGES):
        values.pop(key, None)
    for key in values.keys() & text.keys():
        if values[key] != text[key] and key not in IGNORED:
            raise UnsupportedModel(
                f"{where}: {key} is {values[key]!r:.60}, and {text[key]!r:.60} in text_config"
            )
    return {**values, **text}


def check_heads(config: Mapping[str, Any], where: str) -> None:
    """Refuse head counts and widths that no model can have."""
    heads, kv_heads, head_dim = config["heads"], config["kv_heads"], config["head_dim"]
    if kv_heads < 1 or heads % kv_heads or head_dim < 2 or head_dim % 2:
        raise UnsupportedModel(
            f"{where}: {heads} heads and {kv_heads} KV heads of width {head_dim} do not fit"
        )


def _read_sizes(fields: Fields, architecture: str) -> dict[str, Any]:
    hidden = fields.take_size("hidden_size")
    heads = fields.take_size("num_attention_heads", 1 << 16)
    # Qwen's own defaults, whatever the other widths are.
    own = {"qwen3": 128, **dict.fromkeys(HF_TYPES, 256)}
    usual = own.get(architecture, hidden // heads)
    config = {
        "layers": fields.take_size("num_hidden_layers", MAX_LAYERS),
        "hidden": hidden,
        "ffn": fields.take_size("intermediate_size"),
        "heads": heads,
        "kv_heads": fields.take(int, "num_key_value_heads", heads),
        "head_dim": fields.take(int, "head_dim", usual),
        "vocab": fields.take_size("vocab_size"),
        "norm_eps": fields.take(float, "rms_norm_eps"),
        "context": fields.take_size("max_position_embeddings"),
    }
    check_heads(config, fields.where)
    return config


def _read_activation(fields: Fields, architecture: str) -> str:
    known = ACTIVATIONS.get(architecture, ("silu",))
    value = fields.take(str, "hidden_act", known[0])
    if value not in known:
        raise UnsupportedModel(
            f"{fields.where}: 'hidden_act' is {value!r}; supported: {', '.join(known)}"
        )
    return value


def _read_rope(
    fields: Fields, config: Mapping[str, Any], usual: float, warnings: list[str]
) -> dict[str, Any]:
    """rope_theta at the top or nested; scaling under rope_parameters or rope_scaling."""
    nested = _nested_rope(fields)
    thetas = [fields.take(float, "rope_theta", 0.0)]
    kinds = ["default"]
    if nested is not None:
        thetas.append(nested.take(float, "rope_theta", 0.0))
        kinds = [nested.take(str, key, "") for key in ("rope_type", "type")]
    theta = _one_of(fields, "rope_theta", thetas, 0.0)
    kind = _one_of(fields, "rope_type", kinds, "") or "default"
    if theta == 0.0:
        theta = usual
        warnings.append(f"{fields.where}: rope_theta is missing: {usual:g}, the default, is used")
    rope: dict[str, Any] = {"theta": theta, "dims": config["head_dim"]}
    if kind not in ("default", "yarn"):
        raise UnsupportedModel(
            f"{fields.where}: rope scaling of type {kind!r}; supported: 'default', 'yarn'"
        )
    if nested is not None:
        nested.require("partial_rotary_factor", 1.0)
        if kind == "yarn":
            rope["yarn"] = _read_yarn(nested, config["context"], warnings)
        else:
            nested.require("factor", 1.0)
            nested.ignore("original_max_position_embeddings")
        nested.finish()
    return rope


def _nested_rope(fields: Fields) -> Fields | None:
    objects = [fields.take_any(key) for key in ("rope_parameters", "rope_scaling")]
    found = [value for value in objects if value is not None]
    if not found:
        return None
    if len(found) == 2 and found[0] != found[1]:
        raise UnsupportedModel(f"{fields.where}: rope_parameters and rope_scaling disagree")
    if isinstance(found[0], Mapping):
        found[0] = {key: value for key, value in found[0].items() if value is not None}
    return Fields(found[0], f"{fields.where}: rope_parameters")


def _one_of(fields: Fields, what: str, values: list, absent: Any) -> Any:
    """The one value that is given, which may be given twice but not differently."""
    given = {value for value in values if value != absent}
    if len(given) > 1:
        shown = " and ".join(sorted(map(str, given)))
        raise UnsupportedModel(f"{fields.where}: {what} is given twice, as {shown}")
    return given.pop() if given else absent


def _read_yarn(nested: Fields, context: int, warnings: list[str]) -> dict[str, Any]:
    original = nested.take(int, "original_max_position_embeddings", context)
    factor = nested.take(float, "factor", context / max(original, 1))
    if factor <= 0 or original <= 0:
        raise UnsupportedModel(f"{nested.where}: factor {factor} over {original} positions")
    if original != context and not math.isclose(factor, context / original):
        warnings.append(
            f"{nested.where}: factor is {factor:g}, and {context} / {original} positions is "
            f"{context / original:g}; the factor is used"
        )
    mscale, all_dim = (nested.take(float, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    usual = _amplitude(factor, 1.0)
    if mscale and all_dim:
        usual = _amplitude(factor, mscale) / _amplitude(factor, all_dim)
    nested.require("truncate", True)
    nested.ignore("finetuned")
    return {
        "factor": factor,
        "original_context": original,
        "beta_fast": nested.take(float, "beta_fast", 32.0),
        "beta_slow": nested.take(float, "beta_slow", 1.0),
        "attention_factor": nested.take(float, "attention_factor", usual),
    }


def _amplitude(factor: float, mscale: float) -> float:
    """What YaRN multiplies cos and sin by."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _refuse_unsupported(fields: Fields, architecture: str) -> None:
    """Keys that change the maths, at the values that leave it as we compute it."""
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    fields.require("partial_rotary_factor", 1.0)
    fields.require("rope_interleaved", False)
    window = fields.take(int, "sliding_window", 0)
    # Qwen3 has a separate switch; a window without a switch is taken as active.
    active = fields.take(bool, "use_sliding_window", architecture != "qwen3")
    if window and active:
        raise UnsupportedModel(f"{fields.where}: sliding_window is {window}; it is not supported")
    kinds = _list_of(fields, "layer_types")
    if kinds != ["full_attention"] * len(kinds):
        raise UnsupportedModel(f"{fields.where}: layer_types: only 'full_attention' is supported")
    classes = _list_of(fields, "architectures")
    expected = ARCHITECTURES[architecture]
    if classes and expected not in classes:
        raise UnsupportedModel(
            f"{fields.where}: architectures is {classes!r}; supported: {expected}"
        )


def _list_of(fields: Fields, key: str) -> list:
    value = fields.take_any(key, [])
    if not isinstance(value, list):
        raise UnsupportedModel(f"{fields.where}: '{key}' is {value!r}, expected a list")
    return value


def _end_tokens(fields: Fields) -> list[int]:
    value = fields.take_any("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            raise UnsupportedModel(f"{fields.where}: eos_token_id is {value!r}, expected token ids")
    return sorted(set(ids))
