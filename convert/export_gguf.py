"""A checkpoint as the metadata and tensors of a GGUF file, exactly.

Knows the keys of `llama` and `qwen3` and where each tensor goes: the recipes of the converter, read
backwards. Does not write files. The counterpart of `config_gguf` and `gguf_model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bonsai.convert.block_rows import DENSE_TYPES, TERNARY_TYPES, Blocks, blocks_of, half_floats
from bonsai.convert.config_gguf import read_gguf_config
from bonsai.convert.encode import row_blocks
from bonsai.convert.export_tokenizer import tokenizer_keys
from bonsai.convert.gguf_writer import F32, U32, OutTensor, Typed
from bonsai.convert.recipes import recipe, source_rows
from bonsai.errors import BonsaiError, ConversionError
from bonsai.format import Checkpoint
from bonsai.matrix import Matrix, PackedMatrix

__all__ = ["TARGETS", "gguf_metadata", "gguf_tensors"]

TARGETS = {f"gguf-{name.lower()}": kind for name, kind in TERNARY_TYPES.items()}
FILE_TYPES = {"PQ2_0": 141, "PTQ1_0": 143, "TQ2_0": 37, "Q2_0": 41}  # llama.cpp's "mostly ..."
QUANTIZATION_VERSION = 2  # of the block layouts of ggml


def gguf_metadata(checkpoint: Checkpoint, target: str, title: str) -> dict[str, Any]:
    """All keys; `title` is a name for people.

    Raises ConversionError for a config or tokenizer that they cannot say exactly.
    """
    config, name = checkpoint.config, checkpoint.architecture
    own = _sizes(config) | _rope(config["rope"])
    metadata = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": title,
        "general.file_type": Typed(U32, FILE_TYPES[TARGETS[target].name]),
        "general.quantization_version": Typed(U32, QUANTIZATION_VERSION),
        **{f"{name}.{key}": value for key, value in own.items()},
    }
    _check(checkpoint, metadata)
    ends = config.get("eos", [])
    return metadata | tokenizer_keys(checkpoint.path, config["vocab"], ends)


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "block_count": "layers",
        "context_length": "context",
        "embedding_length": "hidden",
        "feed_forward_length": "ffn",
        "attention.head_count": "heads",
        "attention.head_count_kv": "kv_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "vocab_size": "vocab",
    }
    sizes: dict[str, Any] = {key: Typed(U32, config[ours]) for key, ours in names.items()}
    return sizes | {"attention.layer_norm_rms_epsilon": Typed(F32, config["norm_eps"])}


def _rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "rope.dimension_count": Typed(U32, rope["dims"]),
        "rope.freq_base": Typed(F32, rope["theta"]),
    }
    yarn = rope.get("yarn")
    if yarn is None:
        return keys
    factor = yarn["factor"]
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    keys |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": Typed(F32, factor),
        "rope.scaling.original_context_length": Typed(U32, yarn["original_context"]),
        "rope.scaling.yarn_beta_fast": Typed(F32, yarn["beta_fast"]),
        "rope.scaling.yarn_beta_slow": Typed(F32, yarn["beta_slow"]),
    }
    if not math.isclose(yarn["attention_factor"], usual):
        keys["rope.scaling.attn_factor"] = Typed(F32, yarn["attention_factor"] / usual)
    return keys


def _check(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> None:
    """Read the keys back: each value must be the one of config.json."""
    plain = {key: v.value if isinstance(v, Typed) else v for key, v in metadata.items()}
    where, config = str(checkpoint.path), checkpoint.config
    try:
        _, again, _ = read_gguf_config(plain, config["vocab"], where)
    except BonsaiError as error:
        raise ConversionError(f"{where}: GGUF cannot say its config: {error}") from None
    for key, value in again.items():
        if key != "eos" and not _same(key, config.get(key), value):
            raise ConversionError(
                f"{where}: GGUF cannot say '{key}' exactly: {config.get(key)!r} would become "
                f"{value!r}"
            )


def _same(key: str, ours: Any, theirs: Any) -> bool:
    """Equal; the amplitude of YaRN, a product with a float32, up to its rounding."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_same(k, ours[k], theirs[k]) for k in ours)
    if key == "attention_factor":
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def gguf_tensors(checkpoint: Checkpoint, target: str, allow_f16: bool) -> list[OutTensor]:
    """Every tensor under its GGUF name; reading `data` reads the checkpoint.

    Raises ConversionError naming the tensors that no type holds exactly.
    """
    config, tensors, problems = checkpoint.config, [], []
    for line in recipe(checkpoint.architecture, "gguf").lines:
        for i in range(config["layers"]) if "{i}" in line.name else (0,):
            name, out = line.name.format(i=i), line.source.format(i=i)
            if line.optional and not checkpoint.has(name):
                continue
            if line.role == "vector":
                tensors.append(_vector(checkpoint, name, out))
                continue
            order = source_rows(line.op, config, checkpoint.entry(name).shape[0])
            try:
                tensors.append(_matrix(checkpoint, name, out, target, order, allow_f16))
            except ConversionError as error:
                problems.append(error)
    if problems:
        more = f" (and {len(problems) - 1} more tensors)" if len(problems) > 1 else ""
        raise ConversionError(f"{checkpoint.path}: {problems[0]}{more}", hint=problems[0].hint)
    return tensors


def _vector(checkpoint: Checkpoint, name: str, out: str) -> OutTensor:
    values = checkpoint.vector(name)
    data = np.ascontiguousarray(values, "<f4").view(np.uint8)
    return OutTensor(out, DENSE_TYPES["f32"], values.shape, [data])


def _matrix(
    checkpoint: Checkpoint,
    name: str,
    out: str,
    target: str,
    order: np.ndarray | None,
    allow_f16: bool,
) -> OutTensor:
    """`order` is the row of a GGUF file that each of our rows comes from."""
    matrix = checkpoint.matrix(name)
    if matrix.transform is not None:
        raise ConversionError(
            f"{name}: its inputs are Hadamard-transformed, which is not exported yet"
        )
    blocks = _blocks(matrix, target, allow_f16)
    back = None if order is None else np.argsort(order)
    return OutTensor(out, blocks.type, matrix.shape, _Rows(checkpoint, matrix, blocks, back))


def _blocks(matrix: Matrix, target: str, allow_f16: bool) -> Blocks:
    try:
        return blocks_of(matrix, TARGETS[target])
    except ConversionError as error:
        ternary = isinstance(matrix, PackedMatrix) and matrix.biases is None
        if ternary and allow_f16:
            assert isinstance(matrix, PackedMatrix)
            return half_floats(matrix)
        if ternary and error.hint is None:
            hint = "another target may fit (gguf-q2_0 has the smallest blocks), or --allow-f16"
            raise ConversionError(str(error), hint=hint) from None
        raise


class _Rows:
    """The blocks of a matrix, some rows at a time; its pages are let go at the end."""

    def __init__(
        self, checkpoint: Checkpoint, matrix: Matrix, blocks: Blocks, back: np.ndarray | None
    ) -> None:
        self._checkpoint, self._matrix, self._blocks, self._back = checkpoint, matrix, blocks, back

    def __iter__(self) -> Iterator[np.ndarray]:
        for rows in row_blocks(*self._matrix.shape, self._back):
            yield self._blocks.rows(rows)
        self._checkpoint.release(self._matrix.name)
