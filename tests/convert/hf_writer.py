"""Tiny Hugging Face folders for tests: a plain safetensors writer, configs, random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {"<f4": "F32", "<f2": "F16", "<u4": "U32", "|u1": "U8", "<i8": "I64"}
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


class Bf16(np.ndarray):
    """uint16 bits that are written as BF16."""


def bf16(values: np.ndarray) -> np.ndarray:
    """Values rounded toward zero to bf16, as bits."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4") >> 16
    return bits.astype("<u2").view(Bf16)


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a file."""
    header, blob = {}, b""
    for name, array in tensors.items():
        data = array.tobytes()
        kind = "BF16" if isinstance(array, Bf16) else NAMES[array.dtype.str]
        end = len(blob) + len(data)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(blob), end]}
        blob += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + blob


@dataclass(frozen=True)
class Tiny:
    """The sizes of a tiny model. ffn is not a multiple of 128, on purpose."""

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 128
    ffn: int = 192
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    vocab: int = 320
    tied: bool = False
    theta: float = 1e6
    seed: int = 0


def linear_shapes(spec: Tiny) -> dict[str, tuple[int, int]]:
    """HF names of the matrices in the layers."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts = {
        "self_attn.q_proj": (q, spec.hidden),
        "self_attn.k_proj": (kv, spec.hidden),
        "self_attn.v_proj": (kv, spec.hidden),
        "self_attn.o_proj": (spec.hidden, q),
        "mlp.gate_proj": (spec.ffn, spec.hidden),
        "mlp.up_proj": (spec.ffn, spec.hidden),
        "mlp.down_proj": (spec.hidden, spec.ffn),
    }
    return {
        f"model.layers.{i}.{part}.weight": shape
        for i in range(spec.layers)
        for part, shape in parts.items()
    }


def weights(spec: Tiny = Tiny()) -> dict[str, np.ndarray]:
    """Random float32 tensors under their HF names."""
    rng = np.random.default_rng(spec.seed)
    found = {"model.embed_tokens.weight": rng.normal(size=(spec.vocab, spec.hidden))}
    for name, shape in linear_shapes(spec).items():
        found[name] = rng.normal(size=shape) / np.sqrt(shape[1])
    for i in range(spec.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{norm}.weight"] = rng.uniform(0.5, 1.5, spec.hidden)
        if spec.architecture == "bitnet":
            q = spec.heads * spec.head_dim
            for norm, width in (("self_attn.attn_sub_norm", q), ("mlp.ffn_sub_norm", spec.ffn)):
                found[f"model.layers.{i}.{norm}.weight"] = rng.uniform(0.5, 1.5, width)
        for norm in ("q_norm", "k_norm") if spec.architecture == "qwen3" else ():
            found[f"model.layers.{i}.self_attn.{norm}.weight"] = rng.uniform(
                0.5, 1.5, spec.head_dim
            )
    found["model.norm.weight"] = rng.uniform(0.5, 1.5, spec.hidden)
    if not spec.tied:
        found["lm_head.weight"] = rng.normal(size=(spec.vocab, spec.hidden))
    return {name: values.astype("<f4") for name, values in found.items()}


def config(spec: Tiny = Tiny(), **changes: Any) -> dict[str, Any]:
    """A config.json as transformers writes it; a change to None takes the key away."""
    classes = {
        "bitnet": "BitNetForCausalLM", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM",
    }  # fmt: skip
    values = {
        "architectures": [classes[spec.architecture]],
        "model_type": spec.architecture,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "rms_norm_eps": 1e-6,
        "hidden_act": "relu2" if spec.architecture == "bitnet" else "silu",
        "max_position_embeddings": 4096,
        "rope_theta": spec.theta,
        "rope_scaling": None,
        "tie_word_embeddings": spec.tied,
        "attention_bias": False,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "transformers_version": "4.51.0",
        "use_cache": True,
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not None}


def tokenizer(size: int = 300) -> dict[str, Any]:
    """A tokenizer.json of `size` ids: the byte alphabet and made-up words."""
    alphabet = [chr(b) for b in BYTES] + [chr(256 + i) for i in range(256 - len(BYTES))]
    words = alphabet + [f"<word{i}>" for i in range(size - 256)]
    return {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {w: i for i, w in enumerate(words)}},
    }


def write(
    folder: Path,
    spec: Tiny = Tiny(),
    tensors: Mapping[str, np.ndarray] | None = None,
    values: Mapping[str, Any] | None = None,
    shards: int = 1,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """A folder of tensors, config.json and tokenizer.json; `files` are more JSON or text files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, weights(spec) if tensors is None else tensors, shards)
    parts = {
        "config.json": config(spec) if values is None else values,
        "tokenizer.json": tokenizer(),
    }
    for name, value in {**parts, **(files or {})}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def write_shards(folder: Path, tensors: Mapping[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors))
        return
    places = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        (folder / name).write_bytes(safetensors(part))
        places.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file that `safetensors` wrote."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    kinds = {kind: dtype for dtype, kind in NAMES.items()} | {"BF16": "<u2"}
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[start + begin : start + end], kinds[entry["dtype"]])
        array = array.reshape(entry["shape"])
        found[name] = array.view(Bf16) if entry["dtype"] == "BF16" else array
    return found
