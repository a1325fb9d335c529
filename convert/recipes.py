"""Where each tensor of a checkpoint comes from: the recipes, as data.

Knows names, shapes in terms of config sizes, and which tensors may be ignored and why. Does not
know bytes or files. A line whose tensor is missing, and a tensor without a line, are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bonsai.errors import ConversionError, UnsupportedModel

__all__ = ["RECIPES", "Ignored", "Line", "Recipe", "Step", "match", "recipe", "source_rows"]


@dataclass(frozen=True, slots=True)
class Line:
    """Tensor `name` is the source's tensor `source`; `{i}` is each layer.

    `role` says how it may be stored: "linear", "gate" (small, never quantized), "table" (embedding
    and head) or "vector" (float32).
    `op` is "copy", or "half-split q" / "half-split k": rows of heads whose rotary pairs are
    interleaved (2 i, 2 i + 1) are put in the order (i, i + head_dim / 2). `only`: in layers of this
    kind.
    """

    name: str
    source: str
    role: str
    shape: tuple[str, ...]
    op: str = "copy"
    optional: bool = False
    only: str | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """Source tensors that hold nothing we need. `must_be_one`: an error unless all values are 1."""

    source: str
    reason: str
    must_be_one: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    lines: tuple[Line, ...]
    ignored: tuple[Ignored, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One line for one layer, with its shape in numbers."""

    name: str
    source: str
    role: str
    shape: tuple[int, ...]
    op: str


_BLOCK = "layers.{i}."
# name, role, shape
_DENSE_TRANSFORMER = (
    ("embedding", "table", ("vocab", "hidden")),
    (_BLOCK + "attn_norm", "vector", ("hidden",)),
    (_BLOCK + "attn.q", "linear", ("q", "hidden")),
    (_BLOCK + "attn.k", "linear", ("kv", "hidden")),
    (_BLOCK + "attn.v", "linear", ("kv", "hidden")),
    (_BLOCK + "attn.out", "linear", ("hidden", "q")),
    (_BLOCK + "ffn_norm", "vector", ("hidden",)),
    (_BLOCK + "ffn.gate", "linear", ("ffn", "hidden")),
    (_BLOCK + "ffn.up", "linear", ("ffn", "hidden")),
    (_BLOCK + "ffn.down", "linear", ("hidden", "ffn")),
    ("norm", "vector", ("hidden",)),
    ("head", "table", ("vocab", "hidden")),
)
_HEAD_NORMS = (
    (_BLOCK + "attn.q_norm", "vector", ("head_dim",)),
    (_BLOCK + "attn.k_norm", "vector", ("head_dim",)),
)
_SUB_NORMS = (
    (_BLOCK + "attn.sub_norm", "vector", ("q",)),
    (_BLOCK + "ffn.sub_norm", "vector", ("ffn",)),
)
_GATED_ATTENTION = (
    (_BLOCK + "attn.q", "linear", ("gated_q", "hidden")),
    (_BLOCK + "attn.k", "linear", ("kv", "hidden")),
    (_BLOCK + "attn.v", "linear", ("kv", "hidden")),
    (_BLOCK + "attn.out", "linear", ("hidden", "q")),
    *_HEAD_NORMS,
)
_DELTA = (
    (_BLOCK + "gdn.qkv", "linear", ("channels", "hidden")),
    (_BLOCK + "gdn.z", "linear", ("values", "hidden")),
    (_BLOCK + "gdn.a", "gate", ("value_heads", "hidden")),
    (_BLOCK + "gdn.b", "gate", ("value_heads", "hidden")),
    (_BLOCK + "gdn.conv", "vector", ("channels", "taps")),
    (_BLOCK + "gdn.a_log", "vector", ("value_heads",)),
    (_BLOCK + "gdn.dt_bias", "vector", ("value_heads",)),
    (_BLOCK + "gdn.norm", "vector", ("value_dim",)),
    (_BLOCK + "gdn.out", "linear", ("hidden", "values")),
)
_MIXERS = (_BLOCK + "attn.", _BLOCK + "gdn.")
_TENSORS = {
    "bitnet": _DENSE_TRANSFORMER + _SUB_NORMS,
    "llama": _DENSE_TRANSFORMER,
    "qwen3": _DENSE_TRANSFORMER + _HEAD_NORMS,
    "qwen35": (
        *(line for line in _DENSE_TRANSFORMER if not line[0].startswith(_MIXERS)),
        *_GATED_ATTENTION,
        *_DELTA,
    ),
}

_GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    _BLOCK + "attn_norm": "blk.{i}.attn_norm.weight",
    _BLOCK + "attn.q": "blk.{i}.attn_q.weight",
    _BLOCK + "attn.k": "blk.{i}.attn_k.weight",
    _BLOCK + "attn.v": "blk.{i}.attn_v.weight",
    _BLOCK + "attn.out": "blk.{i}.attn_output.weight",
    _BLOCK + "attn.q_norm": "blk.{i}.attn_q_norm.weight",
    _BLOCK + "attn.k_norm": "blk.{i}.attn_k_norm.weight",
    _BLOCK + "attn.sub_norm": "blk.{i}.attn_sub_norm.weight",
    _BLOCK + "ffn_norm": "blk.{i}.ffn_norm.weight",
    _BLOCK + "ffn.sub_norm": "blk.{i}.ffn_sub_norm.weight",
    _BLOCK + "ffn.gate": "blk.{i}.ffn_gate.weight",
    _BLOCK + "ffn.up": "blk.{i}.ffn_up.weight",
    _BLOCK + "ffn.down": "blk.{i}.ffn_down.weight",
}
_GGUF_QWEN35_NAMES = {
    **_GGUF_NAMES,
    _BLOCK + "ffn_norm": "blk.{i}.post_attention_norm.weight",
    _BLOCK + "gdn.qkv": "blk.{i}.attn_qkv.weight",
    _BLOCK + "gdn.z": "blk.{i}.attn_gate.weight",
    _BLOCK + "gdn.a": "blk.{i}.ssm_alpha.weight",
    _BLOCK + "gdn.b": "blk.{i}.ssm_beta.weight",
    _BLOCK + "gdn.conv": "blk.{i}.ssm_conv1d.weight",
    _BLOCK + "gdn.a_log": "blk.{i}.ssm_a",
    _BLOCK + "gdn.dt_bias": "blk.{i}.ssm_dt.bias",
    _BLOCK + "gdn.norm": "blk.{i}.ssm_norm.weight",
    _BLOCK + "gdn.out": "blk.{i}.ssm_out.weight",
}
_HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    _BLOCK + "attn_norm": "model.layers.{i}.input_layernorm.weight",
    _BLOCK + "attn.q": "model.layers.{i}.self_attn.q_proj.weight",
    _BLOCK + "attn.k": "model.layers.{i}.self_attn.k_proj.weight",
    _BLOCK + "attn.v": "model.layers.{i}.self_attn.v_proj.weight",
    _BLOCK + "attn.out": "model.layers.{i}.self_attn.o_proj.weight",
    _BLOCK + "attn.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    _BLOCK + "attn.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    _BLOCK + "attn.sub_norm": "model.layers.{i}.self_attn.attn_sub_norm.weight",
    _BLOCK + "gdn.qkv": "model.layers.{i}.linear_attn.in_proj_qkv.weight",
    _BLOCK + "gdn.z": "model.layers.{i}.linear_attn.in_proj_z.weight",
    _BLOCK + "gdn.a": "model.layers.{i}.linear_attn.in_proj_a.weight",
    _BLOCK + "gdn.b": "model.layers.{i}.linear_attn.in_proj_b.weight",
    _BLOCK + "gdn.conv": "model.layers.{i}.linear_attn.conv1d.weight",
    _BLOCK + "gdn.a_log": "model.layers.{i}.linear_attn.A_log",
    _BLOCK + "gdn.dt_bias": "model.layers.{i}.linear_attn.dt_bias",
    _BLOCK + "gdn.norm": "model.layers.{i}.linear_attn.norm.weight",
    _BLOCK + "gdn.out": "model.layers.{i}.linear_attn.out_proj.weight",
    _BLOCK + "ffn_norm": "model.layers.{i}.post_attention_layernorm.weight",
    _BLOCK + "ffn.sub_norm": "model.layers.{i}.mlp.ffn_sub_norm.weight",
    _BLOCK + "ffn.gate": "model.layers.{i}.mlp.gate_proj.weight",
    _BLOCK + "ffn.up": "model.layers.{i}.mlp.up_proj.weight",
    _BLOCK + "ffn.down": "model.layers.{i}.mlp.down_proj.weight",
}
# The llama architecture of GGUF rotates interleaved pairs; qwen3 rotates half-split ones, as we do.
_GGUF_LLAMA_OPS = {_BLOCK + "attn.q": "half-split q", _BLOCK + "attn.k": "half-split k"}

_GGUF_IGNORED = (
    Ignored(
        "rope_freqs.weight",
        "factors on the rotary frequencies; all 1 means that there is no scaling",
        must_be_one=True,
    ),
    Ignored("blk.{i}.attn_rot_embd.weight", "rotary frequencies, which follow from rope.freq_base"),
)
_HF_IGNORED = (
    Ignored(
        "model.layers.{i}.self_attn.rotary_emb.inv_freq",
        "rotary frequencies, which follow from rope_theta",
    ),
    Ignored("model.rotary_emb.inv_freq", "rotary frequencies, which follow from rope_theta"),
)


def _recipe(
    architecture: str,
    names: Mapping[str, str] | None,
    ignored: tuple[Ignored, ...] = (),
    ops: Mapping[str, str] | None = None,
) -> Recipe:
    lines = (
        Line(
            name,
            names[name] if names else name,
            role,
            shape,
            (ops or {}).get(name, "copy"),
            optional=name == "head",
            only=_only(architecture, name),
        )
        for name, role, shape in _TENSORS[architecture]
    )
    return Recipe(tuple(lines), ignored)


def _only(architecture: str, name: str) -> str | None:
    if architecture != "qwen35" or not name.startswith(_MIXERS):
        return None
    return "attention" if name.startswith(_MIXERS[0]) else "delta"


RECIPES: dict[tuple[str, str], Recipe] = {
    ("bitnet", "gguf"): _recipe("bitnet", _GGUF_NAMES, _GGUF_IGNORED),
    ("bitnet", "huggingface"): _recipe("bitnet", _HF_NAMES, _HF_IGNORED),
    ("bitnet", "bonsai"): _recipe("bitnet", None),
    ("llama", "gguf"): _recipe("llama", _GGUF_NAMES, _GGUF_IGNORED, _GGUF_LLAMA_OPS),
    ("qwen3", "gguf"): _recipe("qwen3", _GGUF_NAMES, _GGUF_IGNORED),
    ("qwen35", "gguf"): _recipe("qwen35", _GGUF_QWEN35_NAMES, _GGUF_IGNORED),
    ("qwen35", "huggingface"): _recipe("qwen35", _HF_NAMES, _HF_IGNORED),
    ("qwen35", "bonsai"): _recipe("qwen35", None),
    ("llama", "huggingface"): _recipe("llama", _HF_NAMES, _HF_IGNORED),
    ("qwen3", "huggingface"): _recipe("qwen3", _HF_NAMES, _HF_IGNORED),
    ("llama", "bonsai"): _recipe("llama", None),
    ("qwen3", "bonsai"): _recipe("qwen3", None),
}


def recipe(architecture: str, kind: str) -> Recipe:
    """The recipe of an architecture for a kind of source."""
    found = RECIPES.get((architecture, kind))
    if found is None:
        names = ", ".join(sorted(a for a, k in RECIPES if k == kind))
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; supported: {names}"
        )
    return found


def match(
    recipe: Recipe, config: Mapping, names: Iterable[str], where: str
) -> tuple[list[Step], list[tuple[str, Ignored]]]:
    """The steps of a model of `config`, and the tensors to ignore; no name is left over.

    Raises ConversionError naming the tensors that are missing, or that no line uses.
    """
    left = dict.fromkeys(names)
    sizes = _sizes(config)
    steps, missing = [], []
    for line in recipe.lines:
        shape = tuple(sizes[size] for size in line.shape)
        for i in _layers(line, config):
            source = line.source.format(i=i)
            if source in left:
                del left[source]
                steps.append(Step(line.name.format(i=i), source, line.role, shape, line.op))
            elif not line.optional:
                missing.append(source)
    if missing:
        raise ConversionError(f"{where}: missing tensors: {_some(missing)}")
    ignored = [(name, rule) for name in left for rule in recipe.ignored if _matches(rule, name)]
    for name, _ in ignored:
        del left[name]
    if left:
        raise ConversionError(
            f"{where}: tensors that no line of the recipe uses: {_some(list(left))}",
            hint="the model has parts that we would leave out, so it would not be the same model",
        )
    steps.sort(key=lambda step: _order(step.name))
    return steps, ignored


def source_rows(op: str, config: Mapping, rows: int) -> np.ndarray | None:
    """Which row of the source each row comes from, or None where rows stay in place."""
    if op == "copy":
        return None
    heads = config["heads"] if op == "half-split q" else config["kv_heads"]
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2)  # [head, pair, member]
    return np.ascontiguousarray(order.swapaxes(1, 2)).reshape(-1)


def _layers(line: Line, config: Mapping) -> Iterable[int]:
    if "{i}" not in line.source:
        return (0,)
    layers = range(config["layers"])
    return layers if line.only is None else [i for i in layers if config["kinds"][i] == line.only]


def _sizes(config: Mapping) -> dict[str, int]:
    head_dim = config["head_dim"]
    q = config["heads"] * head_dim
    sizes = {
        "vocab": config["vocab"],
        "hidden": config["hidden"],
        "ffn": config["ffn"],
        "head_dim": head_dim,
        "q": q,
        "gated_q": 2 * q,
        "kv": config["kv_heads"] * head_dim,
    }
    if "gdn" in config:
        gdn = config["gdn"]
        values = gdn["value_heads"] * gdn["value_dim"]
        channels = 2 * gdn["key_heads"] * gdn["key_dim"] + values
        sizes |= {"values": values, "channels": channels, "value_heads": gdn["value_heads"]}
        sizes |= {"value_dim": gdn["value_dim"], "taps": gdn["taps"]}
    return sizes


def _matches(rule: Ignored, name: str) -> bool:
    pattern = re.escape(rule.source).replace(re.escape("{i}"), r"\d+")
    return re.fullmatch(pattern, name) is not None


def _order(name: str) -> tuple[int, int]:
    """Embedding, layers in order, the rest."""
    if name.startswith("layers."):
        return 1, int(name.split(".")[1])
    return (0, 0) if name == "embedding" else (2, 0)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
